"""Hydra applications: the config is composed by Hydra itself (`--cfg job`), and overrides are `key=value`."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from looplab.config.files import read_config
from looplab.config.lab import ConfigRendering
from looplab.errors import LabError
from looplab.launch.command import render
from looplab.onboard.base import Interface, Kind, Script, ScriptSetting
from looplab.onboard.introspect import ask
from looplab.onboard.source import call_name, constant, keyword


class HydraReader:
    """A function decorated with `hydra.main`."""

    name = "hydra"

    def read(self, script: Script) -> Interface | None:
        if "hydra" not in script.imports:
            return None
        decorators = [
            item
            for tree in script.modules
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for item in node.decorator_list
            if call_name(item).endswith("hydra.main") or call_name(item) in _imported_main(tree)
        ]
        if not decorators:
            return None
        composed, problem = ask(script, [*script.arguments, "--cfg", "job"])
        notes = [f"Hydra could not compose the config: {problem}"] if problem else []
        base = _without_interpolations(composed or {})
        if composed and base != composed:
            notes.append("values that Hydra interpolates are left to Hydra")
        name = constant(keyword(decorators[0], "config_name")) if isinstance(decorators[0], ast.Call) else None
        if isinstance(name, str):
            notes.append(f"the base config is what Hydra composes from {name}")
        offers: list[str] = []
        if isinstance(decorators[0], ast.Call):
            groups = _groups(script, constant(keyword(decorators[0], "config_path")), name, base)
            listed = [f"{key} ({', '.join(options)})" for key, (_, options) in groups.items()]
            notes += [f"config groups: {', '.join(listed)}; lab.yaml says how to search over them"] if listed else []
            offers = [
                f"{key}: {{choices: [{', '.join(options)}]}}  # a config group: its options, not its values; in the "
                f'base config, write "{current}" in place of the table'
                for key, (current, options) in groups.items()
            ]
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
            offers=tuple(offers),
        )


def _is_expressible(base: Mapping[str, Any]) -> bool:
    """Return whether Hydra's override grammar can express every key."""
    try:
        render(base, ConfigRendering.model_validate({"as": "hydra", "only": "all"}))
    except LabError:
        return False
    return True


def _groups(
    script: Script, config_path: Any, config_name: Any, base: Mapping[str, Any]
) -> dict[str, tuple[str, list[str]]]:
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
            found[key] = (used[key], options)
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
