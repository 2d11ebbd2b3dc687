"""Flags of a script that has its hyper-parameters elsewhere: in a config file, or in constants."""

from __future__ import annotations

from dataclasses import replace

from looplab.onboard.base import MISSING, Interface, InterfaceReader, Script
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.absl import AbslReader
from looplab.onboard.readers.arguments import FIRST_SEED, ArgparseReader
from looplab.onboard.readers.click import ClickReader
from looplab.onboard.readers.dataclass import DataclassReader
from looplab.onboard.readers.fire import FireReader

READERS: tuple[type[InterfaceReader], ...] = (DataclassReader, ClickReader, AbslReader, FireReader, ArgparseReader)


def read_flags(script: Script) -> Interface | None:
    """Return the flags of a script; None if it has none, or has commands."""
    if script.tree is None:
        return None
    found = next((found for reader in READERS if (found := reader().read(script)) is not None), None)
    return found if found is not None and found.leading is None else None


def with_flags(interface: Interface, script: Script) -> Interface:
    """Return the interface of a script that has its hyper-parameters elsewhere, with the flags that it has too.

    A seed or a hyper-parameter that is a flag becomes part of the base config, and of the command: `--seed
    {config.seed}`.
    """
    flags = read_flags(script)
    if flags is None:
        return interface
    known = {_plain(setting.name.rpartition(".")[2]) for setting in interface.settings}
    is_joined = flags.rendering.get("separator") == "equals"
    base, words, added = dict(interface.base or {}), [], []
    for setting in flags.settings:
        role = suggest(setting).role
        default = FIRST_SEED if role == "seed" and setting.default in (None, MISSING) else setting.default
        flag = setting.flag or f"--{setting.name}"
        given = any(word.partition("=")[0] in (flag, *setting.aliases) for word in script.arguments)
        if (
            role not in ("seed", "knob", "length")
            or setting.kind not in ("int", "float", "str", "unknown")
            or setting.positional
            or default in (None, MISSING)
            or _plain(setting.name) in known
            or "." in setting.name
            or given
        ):
            continue
        base[setting.name] = default
        added.append(replace(setting, default=default))
        place = f"{{config.{setting.name}}}"
        words += [f"{flag}={place}"] if is_joined else [flag, place]
    if not words:
        return interface
    return replace(interface, settings=(*interface.settings, *added), base=base, command=(*interface.command, *words))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
