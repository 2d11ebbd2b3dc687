"""pydantic-settings: fields of a `BaseSettings` class, from environment variables or a command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from looplab.onboard.base import MISSING, Interface, Kind, Script, ScriptSetting
from looplab.onboard.readers.arguments import KINDS, flags_interface
from looplab.onboard.readers.dataclass import fields_of
from looplab.onboard.readers.environment import COMMON
from looplab.onboard.source import call_name, calls, constant, keyword, module_constants

Classes = dict[str, tuple[ast.ClassDef, dict[str, Any]]]


class PydanticSettingsReader:
    """Fields become flags if the class parses the command line, else environment variables."""

    name = "pydantic-settings"

    def read(self, script: Script) -> Interface | None:
        if not script.imports & {"pydantic_settings", "pydantic"}:
            return None
        classes: Classes = {
            node.name: (node, module_constants(tree))
            for tree in script.modules
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        found = [name for name in classes if _derives(name, classes)]
        used = {call_name(call) for tree in script.modules for call in ast.walk(tree) if isinstance(call, ast.Call)}
        arguments = {
            item.id
            for tree in script.modules
            for call in calls(tree, "run")
            for item in call.args
            if isinstance(item, ast.Name)
        }
        name = next((name for name in found if name in used | arguments), found[-1] if found else None)
        if name is None:
            return None
        options = _options(name, classes)
        is_cli = name in arguments or options.get("cli_parse_args") not in (None, MISSING, False)
        for tree in script.modules:
            for call in calls(tree, name):
                is_cli = is_cli or keyword(call, "_cli_parse_args") is not None
        fields = list(fields_of(name, classes, ""))
        if is_cli:
            settings = [_flag(field, options) for field in fields]
            return flags_interface(self.name, script, settings, notes=()) if settings else None
        settings = list(_variables(fields, options))
        if not settings:
            return None
        return Interface(self.name, tuple(settings), script.argv, {"as": "env"})


def _derives(name: str, classes: Classes) -> bool:
    """Return whether a class of the project derives from `BaseSettings`."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        node = classes[queue.pop()][0]
        for base in node.bases:
            last = call_name(base).rpartition(".")[2]
            if last == "BaseSettings":
                return True
            if last in classes and last not in seen:
                seen.add(last)
                queue.append(last)
    return False


def _options(name: str, classes: Classes) -> dict[str, Any]:
    """Return `model_config`, or the members of the older `class Config`."""
    node, constants = classes[name]
    found: dict[str, Any] = {}
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) and isinstance(item.value, ast.Call):
            if item.targets[0].id == "model_config":
                found |= {word.arg: constant(word.value, constants) for word in item.value.keywords if word.arg}
        elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Dict):
            keys = [constant(key) if key is not None else None for key in item.value.keys]
            pairs = zip(keys, item.value.values, strict=True)
            found |= {key: constant(value, constants) for key, value in pairs if isinstance(key, str)}
        elif isinstance(item, ast.ClassDef) and item.name == "Config":
            found |= {
                inner.targets[0].id: constant(inner.value, constants)
                for inner in item.body
                if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name)
            }
    return found


def _flag(field: Mapping[str, Any], options: Mapping[str, Any]) -> ScriptSetting:
    """Return the setting of a field: `--optim.learning_rate 0.1`, and for a bool `--augment True` or a switch."""
    name = field["name"]
    if options.get("cli_kebab_case") not in (None, MISSING, False):
        name = name.replace("_", "-")
    prefix = options.get("cli_prefix")
    switch = options.get("cli_implicit_flags") not in (None, MISSING, False)
    kind = _kind(field)
    return ScriptSetting(
        f"{prefix}.{name}" if isinstance(prefix, str) and prefix else name,
        kind,
        _default(field),
        tuple(field["choices"]) if field["choices"] else None,
        field["help"],
        low=field["low"],
        high=field["high"],
        required=field["required"],
        boolean=None if kind != "bool" else "switch" if switch else "value",
    )


def _variables(fields: list[dict[str, Any]], options: Mapping[str, Any]) -> Iterator[ScriptSetting]:
    """Yield the fields that have an environment variable of their own, under its name."""
    prefix, between = options.get("env_prefix"), options.get("env_nested_delimiter")
    for field in fields:
        if "." in field["name"] and not isinstance(between, str):
            continue  # it would be part of a JSON text
        name = field["name"].replace(".", str(between))
        variable = f"{prefix if isinstance(prefix, str) else ''}{name}".upper()
        variable = (field.get("alias") or variable).upper()
        if variable not in COMMON and not field["required"]:
            choices = tuple(field["choices"]) if field["choices"] else None
            yield ScriptSetting(
                variable, _kind(field), _default(field), choices, field["help"], low=field["low"], high=field["high"]
            )


def _kind(field: Mapping[str, Any]) -> Kind:
    return "str" if field["choices"] else KINDS.get(field["type"] or "", "unknown")


def _default(field: Mapping[str, Any]) -> Any:
    default = MISSING if field["required"] else field["default"]
    if field["type"] == "float" and isinstance(default, int) and not isinstance(default, bool):
        return float(default)
    return default
