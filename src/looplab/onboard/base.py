"""Data types: a script, its settings, and how they reach it (`Interface`); the contract of readers.

A reader knows one way in which scripts take settings (argparse, Hydra, globals, …). It looks at the source text first
and never runs the script itself: `Script.introspect` does, with `--help` and under a time limit.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from looplab.onboard.introspect import DOOR_S, Introspection, introspect
from looplab.untrusted import read_bounded

MAX_SOURCE = 4 << 20
"""Bytes of the largest source file that is read."""

Kind = Literal["int", "float", "bool", "str", "list", "unknown"]
BooleanStyle = Literal["switch", "present", "absent", "value", "empty"]


class _Missing:
    """The type of `MISSING`."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
"""Default of a setting that must be given, or whose default is not known."""


@dataclass(frozen=True, slots=True)
class ScriptSetting:
    """One value that a script takes."""

    name: str
    """As the script's users write it, without dashes: `learning-rate`, `optimizer.lr`."""
    kind: Kind
    default: Any = MISSING
    choices: tuple[Any, ...] | None = None
    help: str = ""
    low: float | None = None
    """The smallest value that the script takes; None: not known."""
    high: float | None = None
    """The largest."""
    required: bool = False
    positional: bool = False
    boolean: BooleanStyle | None = None
    """How a bool is written: `--x`/`--no-x`, `--x` or nothing, nothing or `--no-x`, `--x True`, `--x True`/`--x ""`."""
    spread: bool = False
    """Whether a list is written as several words: `--layers 64 64`."""
    flag: str | None = None
    """The flag's spelling, if it is not `--<name>`."""
    off: str | None = None
    """The flag that makes a bool false; None: `--no-<name>` for a switch."""
    aliases: tuple[str, ...] = ()
    """Other flags of the same setting: `-b`."""
    word: str | None = None
    """Start of the word of the command that holds its value, for options that take such words: `learning_rate:`."""


@dataclass(frozen=True, slots=True)
class Interface:
    """How a script takes its settings."""

    reader: str
    """`argparse`, `hydra`, …"""
    settings: tuple[ScriptSetting, ...]
    command: tuple[str, ...]
    """`launch.command` with placeholders."""
    rendering: Mapping[str, Any] = field(default_factory=dict)
    """`launch.config`; empty: looplab's defaults."""
    env: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, Any] | None = None
    """The base config if it is nested or comes from a file; None: the defaults of the settings."""
    notes: tuple[str, ...] = ()
    """What a person should know, as sentences."""
    offers: tuple[str, ...] = ()
    """Knobs that need a change of the base config, as YAML; the lab file has them as comments."""
    specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Ranges of settings that are known better than by name and default, as in the lab file."""
    groups: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Config groups of Hydra that have several options: the option in use, and all of them."""
    leading: tuple[str, ...] | None = None
    """Words between the script and its settings, of a script with commands; None: those without a placeholder."""
    typed: tuple[str, ...] | None = None
    """What a person typed for the settings; None: everything after the script."""


@dataclass(frozen=True)
class Script:
    """A training script and how it is called."""

    folder: Path
    """Where it is called from, and where the lab will be."""
    argv: tuple[str, ...]
    """The command: `python tools/train.py --data data`."""
    path: Path
    """The script itself."""
    python: str | None
    """The interpreter; None: not a Python script."""
    module: str | None = None
    """`python -m MODULE`, or the module of the function that a console script calls."""
    program: Path | None = None
    """The console script of a package, if it is called by its name: `spacy train`."""
    arguments: tuple[str, ...] = ()
    """What follows the script in the command."""

    @cached_property
    def text(self) -> str:
        """Its source."""
        return read_bounded(self.path, MAX_SOURCE).decode("utf-8", "replace")

    @cached_property
    def tree(self) -> ast.Module | None:
        """Its syntax tree; None if it is not Python, or not valid."""
        if self.python is None:
            return None
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError):
            return None

    @cached_property
    def modules(self) -> tuple[ast.Module, ...]:
        """Its syntax tree and those of the modules of the same project that it imports, nearest first."""
        from looplab.onboard.source import project_modules

        return project_modules(self)

    @cached_property
    def imports(self) -> frozenset[str]:
        """Top-level names of the packages that it and its project's modules import."""
        from looplab.onboard.source import imported_packages

        return frozenset().union(*map(imported_packages, self.modules)) if self.modules else frozenset()

    @cached_property
    def introspection(self) -> Introspection:
        """Output of `--help`; the script is started once for that."""
        return introspect(self)

    @cached_property
    def first_output(self) -> Introspection:
        """Its output with `--help`, even if nothing in it reads a command line."""
        if self.introspection.printed:
            return self.introspection
        started = introspect(self, DOOR_S, always=True)
        return started if started.printed or started.parsers else self.introspection

    @property
    def package_root(self) -> Path | None:
        """Where the package of an installed module is; None: the script belongs to the project."""
        if self.module is None:
            return None
        path, folder = self.path.resolve(), self.folder.resolve()
        if path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts:
            return None
        return self.import_root

    @property
    def import_root(self) -> Path | None:
        """The folder from which its module is imported; None: it is not a module."""
        if self.module is None:
            return None
        path = self.path.resolve()
        is_package = path.stem in ("__init__", "__main__") and self.module.rpartition(".")[2] != path.stem
        return path.parents[self.module.count(".") + is_package]

    @property
    def name(self) -> str:
        """What people call it: `train.py`, `spacy`."""
        return self.path.name if self.program is None else self.program.name

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command without what follows the script."""
        return self.argv[: len(self.argv) - len(self.arguments)]


class InterfaceReader(Protocol):
    """Knows one way in which scripts take settings (entry point group `looplab.readers`)."""

    name: str

    def read(self, script: Script) -> Interface | None:
        """Return how a script takes its settings; None if it does not take them in this way."""
        ...


def flag_rendering(settings: Sequence[ScriptSetting], *, separator: str = "space") -> dict[str, Any]:
    """Return `launch.config` for settings that are flags, and nothing that is a default anyway."""
    flags = [setting for setting in settings if not setting.positional and setting.word is None]
    rendering: dict[str, Any] = {"as": "flags"}
    kebab = not any("_" in setting.name for setting in flags if setting.boolean != "absent")
    if not kebab:
        rendering["case"] = "as_written"  # the keys are written as the flags are
    styles = {setting.boolean for setting in flags if setting.kind == "bool"}
    common = next((style for style in ("value", "empty", "switch", "present") if style in styles), "switch")
    if common != "switch":
        rendering["booleans"] = common
    present: list[str] = []
    names: dict[str, str] = {}
    for setting in flags:
        flag = setting.flag or f"--{setting.name}"
        if setting.kind == "bool" and setting.boolean is not None:
            written = _boolean_name(setting, flag, common)
            if written is not None:
                names[setting.name] = written
            elif setting.boolean == "present" != common:
                present.append(setting.name)
        elif flag != f"--{setting.name}":
            names[setting.name] = flag
    if present:
        rendering["store_true"] = present
    if names:
        rendering["names"] = names
    if any(setting.spread for setting in flags):
        rendering["lists"] = "spread"
    if separator != "space":
        rendering["separator"] = separator
    return rendering


def _boolean_name(setting: ScriptSetting, flag: str, common: str) -> str | None:
    """Return the entry of a bool in `names`; None: it needs none."""
    parent, dot, last = setting.name.rpartition(".")
    negation = f"--{parent}{dot}no-{last}"
    off = setting.off or negation
    match setting.boolean:
        case "absent":
            return f"/{off}"
        case "switch":
            return None if common == "switch" and off == negation and flag == f"--{setting.name}" else f"{flag}/{off}"
        case "present":
            return None if flag == f"--{setting.name}" else f"{flag}/"
        case style if style != common:
            return f"{flag}=True/{flag}={'False' if style == 'value' else ''}"
    return None if flag == f"--{setting.name}" else flag
