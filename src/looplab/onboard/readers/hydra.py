"""Hydra applications: the config is composed by Hydra itself (`--cfg job`), and overrides are `key=value`."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from looplab.config.files import read_config
from looplab.config.lab import ConfigRendering
from looplab.errors import LabError
from looplab.launch.command import render
from looplab.onboard.base import Interface, Kind, Script, ScriptSetting
from looplab.onboard.introspect import ask, run_helper
from looplab.onboard.knobs import CHOICES, MOST_CHOICES, suggest, words_of
from looplab.onboard.source import call_name, constant, keyword


class HydraReader:
    """A function decorated with `hydra.main`."""

    name = "hydra"

    def read(self, script: Script) -> Interface | None:
        if "hydra" not in script.imports:
            return None
        decorators = _decorators(script)
        if not decorators:
            return None
        composed, problem = _ask(script, decorators[0], script.arguments)
        notes = [f"Hydra could not compose the config: {problem}"] if problem else []
        base = _without_interpolations(composed or {})
        if composed and base != composed:
            notes.append("values that Hydra interpolates are left to Hydra")
        name = constant(keyword(decorators[0], "config_name")) if isinstance(decorators[0], ast.Call) else None
        if isinstance(name, str):
            notes.append(f"the base config is what Hydra composes from {name}")
        groups: dict[str, tuple[str, tuple[str, ...]]] = {}
        if isinstance(decorators[0], ast.Call):
            groups = _groups(script, constant(keyword(decorators[0], "config_path")), name, base)
        command = (*script.argv, "{overrides}", "hydra.run.dir={out_dir}")
        rendering = {"as": "hydra"}
        if _is_expressible(base):
            rendering["only"] = "all"  # what is recorded is what Hydra gets, even if its own files change later
        return Interface(
            self.name,
            tuple(settings_in(base)),
            command,
            rendering,
            base=base,
            notes=tuple(notes),
            groups=groups,
        )


def search_groups(script: Script, interface: Interface) -> Interface:
    """Return the interface of a Hydra app whose config groups are knobs, `optim: adam` or `sgd`; the rest are offered.

    A run gets `optim=sgd` from the key `groups.optim`. Hydra composes each option here, once, because the values of
    one option must not be passed with another: what differs between the options is left to Hydra, except for knobs
    that all of them have. A group whose option in use has a knob that others lack is offered as a comment.
    """
    if not interface.groups or not interface.base:
        return interface
    base: dict[str, Any] = json.loads(json.dumps(interface.base, default=str))
    holder = "groups" if "groups" not in base else "hydra_groups"
    chosen: dict[str, tuple[str, list[str]]] = {}
    notes, offers = list(interface.notes), list(interface.offers)
    specs = dict(interface.specs)
    for key, (current, options) in interface.groups.items():
        composed, why = _compose(script, interface, key, next(iter(_decorators(script)), None))
        if why is None:
            why = _why_not(base, composed)
        if why is None:
            chosen[key] = (current, list(composed))
            specs |= _merge_options(base, composed)
            continue
        notes.append(f"config group {key} ({', '.join(options)}): {why}; lab.yaml says how to search over it")
        offers.append(
            f"{key}: {{choices: [{', '.join(options)}]}}  # a config group: its options, not its values; in the "
            f'base config, write "{current}" in place of the table'
        )
    if not chosen:
        return replace(interface, notes=tuple(notes), offers=tuple(offers))
    base[holder] = {key: current for key, (current, _) in chosen.items()}
    listed = [f"{key} ({', '.join(options)})" for key, (_, options) in chosen.items()]
    notes.append(f"config groups that are knobs: {', '.join(listed)}; the values of the chosen option are Hydra's")
    added = [
        ScriptSetting(f"{holder}.{key}", "str", current, tuple(options), f"config group {key}")
        for key, (current, options) in chosen.items()
    ]
    words = tuple(word for word in interface.command if word.partition("=")[0] not in chosen)
    at = words.index("{overrides}")
    places = tuple(f"{key}={{config.{holder}.{key}}}" for key in chosen)
    return replace(
        interface,
        settings=(*(setting for setting in settings_in(base) if not setting.name.startswith(f"{holder}.")), *added),
        command=(*words[:at], *places, *words[at:]),
        rendering={**interface.rendering, "skip": [holder]},
        base=base,
        notes=tuple(notes),
        offers=tuple(offers),
        specs=specs,
    )


def _decorators(script: Script) -> list[ast.expr]:
    return [
        item
        for tree in script.modules
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for item in node.decorator_list
        if call_name(item).endswith("hydra.main") or call_name(item) in _imported_main(tree)
    ]


def _ask(script: Script, decorator: ast.expr | None, words: Sequence[str]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the config that Hydra composes with these words, or None and why there is none.

    Hydra composes files without the application, which may take long to import; a config that has a part in its source
    is composed by the application.
    """
    place = constant(keyword(decorator, "config_path")) if isinstance(decorator, ast.Call) else None
    name = constant(keyword(decorator, "config_name")) if isinstance(decorator, ast.Call) else None
    folder = (script.path.parent / place).resolve() if isinstance(place, str) else None
    if folder is not None and isinstance(name, str) and not any(word.startswith("-") for word in words):
        helper = Path(__file__).parents[1] / "compose_config.py"
        composed = run_helper(script, helper, [str(folder), name.removesuffix(".yaml"), *words])
        if isinstance(composed, dict):
            return composed, None
    return ask(script, [*words, "--cfg", "job"])


def _compose(
    script: Script, interface: Interface, key: str, decorator: ast.expr | None
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return the values that Hydra composes with each option of a group, by dotted name; and why it is not a knob."""
    current, options = interface.groups[key]
    if not set(words_of(key)) & CHOICES:
        return {}, "it does not sound like a hyper-parameter"
    if len(options) > MOST_CHOICES:
        return {}, f"{len(options)} options are many"
    composed = {current: _flat(interface.base or {})}
    kept = [word for word in script.arguments if word.partition("=")[0] != key]
    for option in options:
        if option != current:
            found, _ = _ask(script, decorator, [*kept, f"{key}={option}"])
            if found is not None:
                composed[option] = _flat(_without_interpolations(found))
    in_order = {option: composed[option] for option in options if option in composed}
    return in_order, None if len(composed) > 1 else "Hydra composes no other option"


def _why_not(base: Mapping[str, Any], composed: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return why a group should not be a knob by itself; None: it can be one."""
    for name in _flat(base):
        with_it = [option for option, values in composed.items() if name in values]
        if _is_knob(name, next(iter(composed[option][name] for option in with_it), None)) and len(with_it) < len(
            composed
        ):
            return f"{name} exists with {', '.join(with_it)} alone"
    first, *others = composed.values()
    return "its options compose the same config" if all(other == first for other in others) else None


def _merge_options(base: dict[str, Any], composed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Remove from the base config what differs between the options of a group, except for knobs.

    Returns:
        The ranges of knobs that have different values, so that they hold for every option.
    """
    specs: dict[str, dict[str, Any]] = {}
    for name in _flat(base):
        values = [one.get(name) for one in composed.values()]
        if all(name in one for one in composed.values()) and all(value == values[0] for value in values):
            continue
        if _is_knob(name, values[0]) and (spec := _union(name, values)) is not None:
            specs[name] = spec
            continue
        *above, last = name.split(".")
        node = base
        for part in above:
            node = node[part]
        del node[last]
    return specs


def _union(name: str, values: Sequence[Any]) -> dict[str, Any] | None:
    """Return a range that holds for several defaults of a setting; None: there is none."""
    found = [suggest(ScriptSetting(name, kind_of(value), value)).spec for value in values]
    known = [spec for spec in found if spec is not None]
    if len(known) < len(found):
        return None
    if all("choices" in spec for spec in known):
        return {"choices": sorted({choice for spec in known for choice in spec["choices"]}, key=_by_type)}
    if any("choices" in spec for spec in known) or len({spec["type"] for spec in known}) > 1:
        return None
    return {
        **known[0],
        "low": min(spec["low"] for spec in known),
        "high": max(spec["high"] for spec in known),
    }


def _by_type(value: Any) -> tuple[str, Any]:
    return ("", value) if isinstance(value, int | float) else (type(value).__name__, value)


def _is_knob(name: str, value: Any) -> bool:
    return suggest(ScriptSetting(name, kind_of(value), value)).role == "knob"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {setting.name: setting.default for setting in settings_in(config)}


def _is_expressible(base: Mapping[str, Any]) -> bool:
    """Return whether Hydra's override grammar can express every key."""
    try:
        render(base, ConfigRendering.model_validate({"as": "hydra", "only": "all"}))
    except LabError:
        return False
    return True


def _groups(
    script: Script, config_path: Any, config_name: Any, base: Mapping[str, Any]
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the config groups that have several options: the option in use, and all of them."""
    if not isinstance(config_path, str):
        return {}
    folder = script.path.parent / config_path
    used: dict[str, str] = {}
    with contextlib.suppress(LabError):
        defaults = read_config(folder / f"{str(config_name).removesuffix('.yaml')}.yaml").get("defaults", [])
        for entry in defaults if isinstance(defaults, list) else ():
            used |= {str(key): str(option) for key, option in entry.items()} if isinstance(entry, Mapping) else {}
    used |= {key: option for key, sign, option in (word.partition("=") for word in script.arguments) if sign}
    found = {}
    for key, value in base.items():
        options = sorted(file.stem for file in (folder / key).glob("*.yaml")) if isinstance(value, Mapping) else []
        if (
            len(options) > 1
            and used.get(key) in options
            and all(map(re.compile(r"[A-Za-z_][\w-]*").fullmatch, options))
        ):
            found[key] = (used[key], tuple(options))
    return found


def _imported_main(tree: ast.Module) -> set[str]:
    """Return the names of `hydra.main` in a module that has `from hydra import main`."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "hydra"
        for alias in node.names
        if alias.name == "main"
    }


def settings_in(config: Mapping[str, Any], prefix: str = "") -> Iterator[ScriptSetting]:
    """Yield the leaves of a nested config as settings."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from settings_in(value, f"{name}.")
        else:
            yield ScriptSetting(name, kind_of(value), value)


def kind_of(value: Any) -> Kind:
    """Return the kind of a value."""
    kinds: tuple[tuple[type, Kind], ...] = (
        (bool, "bool"),
        (int, "int"),
        (float, "float"),
        (str, "str"),
        (list, "list"),
    )
    return next((kind for python, kind in kinds if isinstance(value, python)), "unknown")


def _without_interpolations(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {
            key: _without_interpolations(value)
            for key, value in config.items()
            if not (isinstance(value, str) and ("${" in value or value == "???"))
        }
    return config
