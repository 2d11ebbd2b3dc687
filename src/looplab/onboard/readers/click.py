"""click and typer."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from looplab.onboard.base import MISSING, BooleanStyle, Interface, Kind, Script, ScriptSetting
from looplab.onboard.knobs import inside
from looplab.onboard.readers.arguments import KINDS, flags_interface
from looplab.onboard.readers.commands import Level, best_command, commands_interface, name_commands, split_at_command
from looplab.onboard.source import call_name, calls, constant, keyword, module_constants

TYPES: dict[str, Kind] = {
    "integer": "int",
    "integer range": "int",
    "float": "float",
    "float range": "float",
    "boolean": "bool",
    "int": "int",
    "bool": "bool",
    "str": "str",
    "text": "str",
    "choice": "str",
    "literal": "str",
    "enum": "str",
    "Path": "str",
    "path": "str",
    "filename": "str",
    "file": "str",
    "directory": "str",
}


class ClickReader:
    """Options of a click command or a typer app."""

    name = "click"

    def read(self, script: Script) -> Interface | None:
        if not {"click", "typer"} & script.imports:
            return None
        name = "typer" if "typer" in script.imports else "click"
        reported = script.introspection.of("click")
        notes: list[str] = []
        if reported is None:
            settings = _from_source(script)
            notes.append(f"the options come from the source alone: {script.introspection.problem}")
            return flags_interface(name, script, settings, notes=notes) if settings else None
        levels: list[Level] = []
        words: Sequence[str] = script.arguments
        command = reported
        while commands := command.get("sub"):
            before, chosen, words = split_at_command(words, commands)
            chosen = chosen or best_command(list(commands))
            levels.append(Level(_settings(command["options"]), chosen, before))
            notes.append(name_commands(commands, chosen))
            command = commands[chosen]
        levels.append(Level(_settings(command["options"]), None, words))
        if not any(level.settings for level in levels):
            return None
        if len(levels) == 1:
            return flags_interface(name, script, levels[0].settings, notes=notes)
        return commands_interface(name, script, levels, notes=notes)


def _settings(options: Sequence[Mapping[str, Any]]) -> list[ScriptSetting]:
    return [setting for option in options if (setting := _setting(option)) is not None]


def _setting(option: Mapping[str, Any]) -> ScriptSetting | None:
    flag = next((flag for flag in option["flags"] if flag.startswith("--")), None)
    name = option["name"] if option["positional"] else (flag or f"--{option['name']}").lstrip("-")
    if name in ("help", "install-completion", "show-completion") or option["multiple"]:
        return None
    kind = TYPES.get(option["type"], "unknown")
    default = MISSING if option["required"] else option["default"]
    written = f"--{name}" if flag is not None else (option["flags"] or [f"--{name}"])[0]
    common: dict[str, Any] = {
        "help": option["help"],
        **_bounds(option, kind),
        "flag": None if option["positional"] or written == f"--{name}" else written,
        "aliases": tuple(word for word in option["flags"] if word != written and not option["positional"]),
    }
    if (option["is_flag"] or kind == "bool") and not option["positional"]:
        if option["is_flag"] and not option["off"]:
            # A flag that is there or not; one that is on by default cannot be switched off.
            return None if default is True else ScriptSetting(name, "bool", False, boolean="present", **common)
        off = option["off"][0] if option["off"] else None
        how: BooleanStyle = "switch" if off else "value"
        return ScriptSetting(name, "bool", default, boolean=how, off=off, required=option["required"], **common)
    if option["nargs"] != 1 or isinstance(default, list):
        return ScriptSetting(name, "unknown", required=option["required"], positional=option["positional"], **common)
    choices = tuple(option["choices"]) if option["choices"] else None
    if kind == "unknown" and isinstance(default, int | float) and not isinstance(default, bool):
        kind = "float" if isinstance(default, float) else "int"
    if kind == "float" and isinstance(default, int):
        default = float(default)
    return ScriptSetting(
        name, kind, default, choices, required=option["required"], positional=option["positional"], **common
    )


def _bounds(option: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the bounds of `IntRange`, `FloatRange`, and of `typer.Option(min=0, max=1)`."""
    low, high = option.get("low"), option.get("high")
    return {
        "low": inside(low, kind, upper=False) if option.get("low_open") else low,
        "high": inside(high, kind, upper=True) if option.get("high_open") else high,
    }


def _from_source(script: Script) -> list[ScriptSetting]:
    found: dict[str, ScriptSetting] = {}
    for tree in script.modules:
        names = module_constants(tree)
        for call in calls(tree, "option"):
            words = [word for word in (constant(item, names) for item in call.args) if isinstance(word, str)]
            flag = next((word for word in words if word.startswith("--")), None)
            if flag is None:
                continue
            on, _, off = flag.partition("/")
            default, kind = constant(keyword(call, "default"), names), _type(call, names)
            text = constant(keyword(call, "help"), names)
            is_flag = constant(keyword(call, "is_flag"), names) is True or bool(off)
            choices = _choices(call, names)
            found.setdefault(
                on,
                ScriptSetting(
                    on.lstrip("-"),
                    "bool" if is_flag else "str" if choices else kind if kind != "unknown" else _like(default),
                    default if default is not MISSING or not is_flag else False,
                    choices,
                    text if isinstance(text, str) else "",
                    boolean=("switch" if off else "present") if is_flag else None,
                    off=off or None,
                    required=constant(keyword(call, "required"), names) is True,
                ),
            )
        if not found and "typer" in script.imports:
            found |= _typer_parameters(tree, names)
    return list(found.values())


def _typer_parameters(tree: ast.Module, names: dict[str, Any]) -> dict[str, ScriptSetting]:
    found: dict[str, ScriptSetting] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (
            any("command" in call_name(item) for item in node.decorator_list)
            or any(
                isinstance(arg, ast.Name) and arg.id == node.name for call in calls(tree, "run") for arg in call.args
            )
        ):
            continue
        parameters = node.args.args
        defaults = [None] * (len(parameters) - len(node.args.defaults)) + [*node.args.defaults]
        for parameter, default in zip(parameters, defaults, strict=True):
            value: ast.expr | None = default
            if isinstance(value, ast.Call) and call_name(value).rpartition(".")[2] in ("Option", "Argument"):
                value = value.args[0] if value.args else None
            known = constant(value, names)
            kind = KINDS.get(ast.unparse(parameter.annotation), "unknown") if parameter.annotation else "unknown"
            name = parameter.arg.replace("_", "-")
            positional = default is None
            found[name] = ScriptSetting(
                parameter.arg if positional else name,
                kind if kind != "unknown" else _like(known),
                known,
                boolean="switch" if kind == "bool" else None,
                positional=positional,
                required=positional,
            )
    return found


def _type(call: ast.Call, names: dict[str, Any]) -> Kind:
    name = call_name(keyword(call, "type") or ast.Constant(None)).rpartition(".")[2]
    return {"IntRange": "int", "FloatRange": "float", "INT": "int", "FLOAT": "float", "BOOL": "bool"}.get(  # type: ignore[return-value]
        name, KINDS.get(name, "unknown")
    )


def _choices(call: ast.Call, names: dict[str, Any]) -> tuple[Any, ...] | None:
    kind = keyword(call, "type")
    if isinstance(kind, ast.Call) and call_name(kind).endswith("Choice") and kind.args:
        items = constant(kind.args[0], names)
        return tuple(items) if isinstance(items, list) else None
    return None


def _like(value: Any) -> Kind:
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str")):
        if isinstance(value, kind):
            return name  # type: ignore[return-value]
    return "unknown"
