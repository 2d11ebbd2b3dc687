"""argparse, and parsers built on it: HfArgumentParser, simple-parsing, jsonargparse."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from looplab.onboard.base import MISSING, Interface, Kind, Script, ScriptSetting, flag_rendering
from looplab.onboard.source import call_name, calls, constant, keyword, module_constants

KINDS: dict[str, Kind] = {
    "int": "int",
    "float": "float",
    "str": "str",
    "bool": "bool",
    "list": "list",
    "Path": "str",
    "PosixPath": "str",
    "strtobool": "bool",
    "str2bool": "bool",
    "str_to_bool": "bool",
    "string_to_bool": "bool",
    "boolean": "bool",
}
NUMBERS = ("number", "positive", "eval")
"""Words in the name of a conversion that returns numbers."""


class ArgparseReader:
    """Options of `add_argument`: from the running parser if it can be asked, else from the source."""

    name = "argparse"

    def read(self, script: Script) -> Interface | None:
        if not any(True for tree in script.modules for _ in calls(tree, "add_argument", "parse_args")):
            return None
        parsers = [parser for parser in script.introspection.parsers if parser.get("framework") == "argparse"]
        notes: list[str] = []
        if parsers:
            options = {option["dest"]: option for parser in parsers for option in parser["options"]}
            settings = settings_of(list(options.values()), hugging_face=_is_hugging_face(parsers[-1]))
        else:
            settings = _from_source(script)
            if script.introspection.problem:
                notes.append(f"the options come from the source alone: {script.introspection.problem}")
        if not settings:
            return None
        return flags_interface(self.name, script, settings, notes=notes)


def flags_interface(
    reader: str,
    script: Script,
    settings: Sequence[ScriptSetting],
    *,
    separator: str = "space",
    notes: Sequence[str] = (),
) -> Interface:
    """Return the interface of a script that takes flags, and positional values before them."""
    positional = [f"{{config.{setting.name}}}" for setting in settings if setting.positional]
    words = ("{flags}", *positional)
    return Interface(
        reader,
        tuple(settings),
        (*script.prefix, *words),
        flag_rendering(settings, separator=separator),
        notes=tuple(notes),
    )


def settings_of(options: Sequence[Mapping[str, Any]], *, hugging_face: bool = False) -> list[ScriptSetting]:
    """Return the settings of a running parser, from the records of `hook.py`."""
    found = []
    for option in options:
        if option["action"] in ("_SubParsersAction", "_CountAction", "_AppendAction", "_AppendConstAction"):
            continue
        setting = _setting(option, hugging_face)
        if setting is not None:
            found.append(setting)
    return found


def _setting(option: Mapping[str, Any], hugging_face: bool) -> ScriptSetting | None:
    flags, action, default = option["flags"], option["action"], option["default"]
    long = [flag for flag in flags if flag.startswith("--")]
    flag = (long or flags or [None])[0]
    name = flag.lstrip("-") if flag else option["dest"]
    common: dict[str, Any] = {
        "help": option["help"],
        "positional": not flags,
        "flag": None if long or not flags else flag,
    }
    if action in ("_StoreTrueAction", "_StoreFalseAction"):
        # A flag that is there or not; `store_false` is named after the flag, so that it is false unless it is there.
        return ScriptSetting(name, "bool", False, boolean="present", **common)
    if action == "BooleanOptionalAction":
        return ScriptSetting(
            name, "bool", default if isinstance(default, bool) else MISSING, boolean="switch", **common
        )
    if action == "_StoreConstAction":
        return None
    kind = _kind(option["type"], default)
    required = bool(option["required"]) or (not flags and option["nargs"] not in ("?", "*"))
    value = MISSING if default is None and required else default
    choices = tuple(option["choices"]) if option["choices"] else None
    if option["nargs"] in ("+", "*") or (isinstance(option["nargs"], int) and option["nargs"] > 1):
        return ScriptSetting(name, "list", value, choices, required=required, spread=True, **common)
    if kind == "bool":
        how = "value" if option["type"] != "bool" or hugging_face else "empty"
        return ScriptSetting(name, "bool", value, required=required, boolean="value" if hugging_face else how, **common)
    return ScriptSetting(name, kind, value, choices, required=required, **common)


def _kind(type_name: str | None, default: Any) -> Kind:
    name = type_name or ""
    if name in KINDS:
        return KINDS[name]
    if any(word in name.lower() for word in ("bool",)):
        return "bool"
    if isinstance(default, bool):
        return "bool"
    if isinstance(default, int | float):
        return "float" if isinstance(default, float) else "int"
    if any(word in name.lower() for word in NUMBERS):
        return "float"
    return (
        "list" if isinstance(default, list) else "str" if type_name is None or isinstance(default, str) else "unknown"
    )


def _is_hugging_face(parser: Mapping[str, Any]) -> bool:
    return str(parser.get("parser", "")).startswith("transformers.")


def _from_source(script: Script) -> list[ScriptSetting]:
    """Return the options of all `add_argument` calls, as far as they are constants."""
    options: dict[str, dict[str, Any]] = {}
    for tree in script.modules:
        names = module_constants(tree)
        for call in calls(tree, "add_argument"):
            option = _option(call, names)
            if option is not None:
                options.setdefault(option["dest"], option)
    return settings_of(list(options.values()))


def _option(call: ast.Call, names: dict[str, Any]) -> dict[str, Any] | None:
    words = [constant(word, names) for word in call.args]
    if not words or not all(isinstance(word, str) for word in words):
        return None
    flags = [word for word in words if word.startswith("-")]
    long = next((flag for flag in flags if flag.startswith("--")), (flags or words)[0])
    action = constant(keyword(call, "action"), names)
    if action is MISSING:
        action = call_name(keyword(call, "action") or ast.Constant(None)).rpartition(".")[2] or "store"
    actions = {
        "store": "_StoreAction",
        "store_true": "_StoreTrueAction",
        "store_false": "_StoreFalseAction",
        "BooleanOptionalAction": "BooleanOptionalAction",
    }
    if action not in actions:
        return None
    kind = call_name(keyword(call, "type") or ast.Constant(None)).rpartition(".")[2] or None
    default = constant(keyword(call, "default"), names)
    choices = constant(keyword(call, "choices"), names)
    text = constant(keyword(call, "help"), names)
    dest = constant(keyword(call, "dest"), names)
    known = keyword(call, "default") is not None and default is MISSING
    return {
        "flags": flags,
        "dest": dest if isinstance(dest, str) else long.lstrip("-").replace("-", "_"),
        "action": actions[action],
        "type": kind,
        "default": None if default is MISSING else default,
        "choices": choices if isinstance(choices, list) else None,
        "nargs": None if (nargs := constant(keyword(call, "nargs"), names)) is MISSING else nargs,
        "help": text if isinstance(text, str) else "",
        "required": constant(keyword(call, "required"), names) is True or known,
    }
