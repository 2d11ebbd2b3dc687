"""argparse, and parsers built on it: HfArgumentParser, simple-parsing, jsonargparse."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from looplab.onboard.base import MISSING, BooleanStyle, Interface, Kind, Script, ScriptSetting, flag_rendering
from looplab.onboard.readers.environment import parse_number
from looplab.onboard.readers.hydra import kind_of
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
OPTPARSE_TYPES = {"int": "int", "long": "int", "float": "float", "string": "str", "choice": "str"}
"""Types of optparse, which are texts."""
NUMBERS = ("number", "positive", "eval")
"""Words in the name of a conversion that returns numbers."""
OPTIONAL = ("?", "*", "...", "A...")
"""`nargs` of positional arguments that may be absent."""
FIRST_SEED = 1
"""Seed of a script that has none by default."""
PARSES = ("add_argument", "parse_args", "parse_known_args", "parse_intermixed_args")
PAIR = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)(?P<sign>[:=])(?P<value>[-+]?[\d.][\w.+-]*)")
"""A word with a name and a number."""
LEFT_OUT = ("_CountAction", "_AppendAction", "_AppendConstAction", "_StoreConstAction", "_ExtendAction")


class ArgparseReader:
    """Options of `add_argument`: from the running parser if it can be asked, else from the source."""

    name = "argparse"

    def read(self, script: Script) -> Interface | None:
        if not any(True for tree in script.modules for _ in calls(tree, *PARSES)):
            return None
        parsers = _without_inner(argparse_records(script), script.arguments)
        notes: list[str] = []
        options: list[Mapping[str, Any]]
        if parsers:
            options = [
                {**option, "exclusive": _group(index, option), "parser": index}
                for index, parser in enumerate(parsers)
                for option in parser["options"]
            ]
            hugging_face = _is_hugging_face(parsers[-1])
        elif script.introspection.parsers:
            return None  # its parsers read something else than the command line
        else:
            options, hugging_face = [*_options_in_source(script)], False
            if options and script.introspection.problem:
                notes.append(f"the options come from the source alone: {script.introspection.problem}")
        options = _with_field_defaults(script, _converted_later(script, options))
        if any(option.get("commands") for option in options):
            return self._with_commands(script, options, notes)
        settings = settings_of(options, hugging_face=hugging_face)
        if not settings:
            return None
        settings += _pairs(settings, script.arguments)
        return flags_interface(self.name, script, settings, notes=notes)

    def _with_commands(self, script: Script, options: list[Mapping[str, Any]], notes: list[str]) -> Interface | None:
        """Return the interface of a script with subparsers."""
        from looplab.onboard.readers.commands import (
            Level,
            best_command,
            commands_interface,
            name_commands,
            split_at_command,
        )

        levels: list[Level] = []
        words: Sequence[str] = script.arguments
        later: list[Mapping[str, Any]] = []
        while groups := [option for option in options if option.get("commands")]:
            commands = groups[-1]["commands"]
            if (place := groups[-1].get("parser")) is not None:
                # Parsers that follow get what is behind the command.
                later = [option for option in options if option.get("parser", place) > place]
                options = [option for option in options if option.get("parser", place) <= place]
            before, name, words = split_at_command(words, commands)
            name = name or best_command(list(commands))
            levels.append(Level(settings_of(options), name, before))
            notes.append(name_commands(commands, name))
            options = _converted_later(script, commands[name])
        levels.append(Level(settings_of([*options, *later]), None, words))
        if not any(level.settings for level in levels):
            return None
        return commands_interface(self.name, script, levels, notes=notes)


def _group(parser: int, option: Mapping[str, Any]) -> str | None:
    number = option.get("exclusive")
    return None if number is None else f"{parser}.{number}"


def argparse_records(script: Script) -> list[dict[str, Any]]:
    """Return the parsers of a script that read its command line, as `hook.py` recorded them."""
    found = [parser for parser in script.introspection.parsers if parser.get("framework") == "argparse"]
    return [parser for parser in found if parser.get("ours", True)]


def _without_inner(parsers: Sequence[dict[str, Any]], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return parsers without those that parse the command line of another program, such as a launcher's.

    With several parsers, one that needs a positional value which nobody typed is such a parser.
    """
    if len(parsers) < 2:
        return list(parsers)
    options = {flag: option for parser in parsers for option in parser["options"] for flag in option["flags"]}
    commands = {name for parser in parsers for option in parser["options"] for name in option.get("commands") or ()}
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            if word not in commands:
                return list(parsers)  # a positional value was typed
            continue
        several = options.get(word, {}).get("nargs") in ("+", "*")
        takes = "=" not in word and options.get(word, {}).get("nargs") != 0
        while takes and left and not left[0].startswith("-"):
            left.pop(0)
            takes = several
    kept = [
        parser
        for parser in parsers
        if not any(setting.positional and setting.required for setting in settings_of(parser["options"]))
    ]
    return kept or list(parsers)


def _pairs(settings: Sequence[ScriptSetting], arguments: Sequence[str]) -> list[ScriptSetting]:
    """Return the settings in the words that were typed for options which take pairs: `--hyperparams lr:0.1 gamma:0.99`,
    `--cfg-options optimizer.lr=0.1`."""
    options = {
        flag: setting.name
        for setting in settings
        if setting.kind == "unknown" or (setting.kind == "list" and setting.default in (None, MISSING, []))
        for flag in (setting.flag or f"--{setting.name}", *setting.aliases)
    }
    found: dict[str, ScriptSetting] = {}
    option = None
    for argument in arguments:
        if argument.startswith("-"):
            option = options.get(argument)
        elif option is not None and (pair := PAIR.fullmatch(argument)) is not None:
            name, value = f"{option}.{pair['key']}", parse_number(pair["value"])
            if isinstance(value, int | float):
                found[name] = ScriptSetting(name, kind_of(value), value, word=pair["key"] + pair["sign"])
    return list(found.values())


def _converted_later(script: Script, options: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return options with the types that the script gives to their texts itself: `lr = float(args.lr)`."""
    texts = [option["dest"] for option in options if option["type"] is None and option.get("reads") is False]
    if not texts:
        return list(options)
    found: dict[str, str] = {}
    for tree in script.modules:
        for call in calls(tree, "int", "float"):
            if call.args and isinstance(call.args[0], ast.Attribute) and isinstance(call.func, ast.Name):
                found[call.args[0].attr] = call.func.id
    return [
        {**option, "type": found[option["dest"]], "reads": True}
        if option["dest"] in texts and option["dest"] in found
        else option
        for option in options
    ]


def _with_field_defaults(script: Script, options: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return options without a default of their own with that of the dataclass field of the same name."""
    fields: dict[str, Any] = {}
    for tree in script.modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("dataclass" in call_name(item) for item in node.decorator_list):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        value = constant(item.value)
                        if isinstance(item.value, ast.Call) and call_name(item.value).endswith("field"):
                            value = constant(keyword(item.value, "default"))
                        if value is not MISSING:
                            fields.setdefault(item.target.id, value)
    return [
        {**option, "default": fields[option["dest"]], "reads": option.get("reads") is not False, "opaque": False}
        if option["default"] is None and not option["required"] and fields.get(option["dest"]) is not None
        else option
        for option in options
    ]


def flags_interface(
    reader: str,
    script: Script,
    settings: Sequence[ScriptSetting],
    *,
    separator: str = "space",
    notes: Sequence[str] = (),
) -> Interface:
    """Return the interface of a script that takes flags, and positional values before them."""
    positional = [setting.name for setting in settings if setting.positional]
    places = [f"{{config.{name}}}" for name in positional]
    rendering = flag_rendering(settings, separator=separator)
    pairs = dict.fromkeys(setting.name[: -len(setting.word)] for setting in settings if setting.word is not None)
    skipped = [*positional, *pairs]  # they are in the command
    if skipped:
        rendering["skip"] = skipped
    command = (*script.prefix, *places, "{flags}")
    return Interface(reader, tuple(settings), command, rendering, notes=tuple(notes))


def settings_of(options: Sequence[Mapping[str, Any]], *, hugging_face: bool = False) -> list[ScriptSetting]:
    """Return the settings of a running parser, from the records of `hook.py`."""
    found: dict[str, ScriptSetting] = {}
    groups: set[Any] = set()
    for option in options:
        if option.get("commands") or option["action"] in LEFT_OUT:
            continue
        pair = _pair(option, options)
        setting = pair if pair is not None else _setting(option, hugging_face)
        if setting is None:
            continue
        group = option.get("exclusive")
        if group is not None and pair is None:
            if group in groups:
                continue  # only one of them may be given
            groups.add(group)
        if pair is None or setting.name not in found:
            found[setting.name] = setting
    return list(found.values())


def _pair(option: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> ScriptSetting | None:
    """Return the bool that two flags set: `--x` (store_true) and `--no-x` (store_false) with the same `dest`."""
    both = {
        other["action"]: other
        for other in options
        if other["dest"] == option["dest"] and other["action"] in ("_StoreTrueAction", "_StoreFalseAction")
    }
    if len(both) != 2 or option["action"] not in both:
        return None
    on, off = both["_StoreTrueAction"], both["_StoreFalseAction"]
    flag, no = _long(on["flags"]), _long(off["flags"])
    name = flag.lstrip("-")
    default = on["default"] if isinstance(on["default"], bool) else off["default"]
    return ScriptSetting(
        name,
        "bool",
        default if isinstance(default, bool) else MISSING,
        help=on["help"] or off["help"],
        boolean="switch",
        flag=None if flag == f"--{name}" else flag,
        off=no,
    )


def _long(flags: Sequence[str]) -> str:
    return next((flag for flag in flags if flag.startswith("--")), flags[0])


def _setting(option: Mapping[str, Any], hugging_face: bool) -> ScriptSetting | None:
    flags, action = option["flags"], option["action"]
    flag = _long(flags) if flags else None
    # `-s` with `dest="seed"` is called as the script calls it.
    name = flag.lstrip("-") if flag and len(flag) > 2 else option["dest"]
    common: dict[str, Any] = {
        "help": option["help"],
        "low": option.get("low"),
        "high": option.get("high"),
        "positional": not flags,
        "flag": None if flag is None or flag == f"--{name}" else flag,
        "aliases": tuple(word for word in flags if word != flag),
    }
    if action.endswith(("BooleanOptionalAction", "_StoreTrueAction", "_StoreFalseAction")):
        return _switch(option, name, common)
    kind = _kind(option["type"], option["default"])
    default = _like_kind(option["default"], kind)
    required = bool(option["required"]) or (not flags and option["nargs"] not in OPTIONAL)
    value = MISSING if default is None and (required or option.get("opaque")) else default
    choices = tuple(option["choices"]) if option["choices"] else None
    several = option["nargs"] in ("+", "*") or isinstance(option["nargs"], int)
    if kind == "bool" and not several:
        if flags and option["nargs"] == 0:
            return None
        styles: dict[str, BooleanStyle] = {"value": "value", "empty": "empty"}
        style = styles.get(option.get("words") or "") or ("empty" if option["type"] == "bool" else "value")
        if hugging_face or "words" not in option:
            style = "empty" if option["type"] == "bool" and not hugging_face else "value"
        elif option["type"] is not None and option["words"] is None:
            return None  # neither True and False nor an empty text is understood
        return ScriptSetting(name, "bool", value, required=required, boolean=style, **common)
    reads = option.get("reads") is not False or option["type"] in ("int", "float")
    is_one = option["nargs"] in ("+", "*") and isinstance(value, list) and len(value) == 1
    if is_one and reads and flags and type(value[0]) in (int, float):
        # `--hidden 300`, or `--hidden 300 300`: one number is the default, and can be searched.
        number = _like_kind(value[0], kind)
        return ScriptSetting(name, kind_of(number), number, choices, required=required, spread=True, **common)
    if several and isinstance(value, list) | (value is MISSING) | (value is None) and reads and flags:
        return ScriptSetting(name, "list", value, choices, required=required, spread=True, **common)
    if not reads or several or option["nargs"] == 0 or (isinstance(default, list) and option["type"] is None):
        # Its default cannot be written so that the script reads the same value.
        kind = "str" if option["type"] is None and not several else "unknown"  # a number that would become a text
        return ScriptSetting(name, kind, MISSING, required=required, **common)
    return ScriptSetting(name, kind, value, choices, required=required, **common)


def _switch(option: Mapping[str, Any], name: str, common: Mapping[str, Any]) -> ScriptSetting | None:
    """Return the setting of a flag without a value."""
    action, default, flags = option["action"], option["default"], option["flags"]
    if action.endswith("BooleanOptionalAction"):
        value = default if isinstance(default, bool) else MISSING
        off = next((word for word in flags if word.startswith("--no") and word[4:].lstrip("-_").endswith(name)), None)
        dotted = next((word for word in flags if ".no" in word), None)
        aliases = tuple(word for word in common["aliases"] if not word.startswith("--no"))
        return ScriptSetting(name, "bool", value, boolean="switch", off=off or dotted, **{**common, "aliases": aliases})
    if action.endswith("_StoreTrueAction"):
        if default is True:
            return None  # the flag changes nothing
        return ScriptSetting(name, "bool", False, boolean="present", **common)
    if default is False:
        return None
    # `store_false` is named after what it sets, so that the lab says what the script uses: true without the flag.
    common = {**common, "flag": None, "aliases": ()}
    return ScriptSetting(option["dest"], "bool", True, boolean="absent", off=_long(flags), **common)


def _like_kind(default: Any, kind: Kind) -> Any:
    """Return a default as the option's type would read it: 1e6 of an int is 1000000, "0.1" of a float 0.1."""
    if isinstance(default, bool):
        return default
    try:
        if kind == "int" and isinstance(default, float) and default == int(default):
            return int(default)
        if kind == "int" and isinstance(default, str):
            return int(default)
        if kind == "float" and isinstance(default, int | str):
            return float(default)
    except (ValueError, OverflowError):
        return None
    return default


def _kind(type_name: str | None, default: Any) -> Kind:
    name = type_name or ""
    if name in KINDS:
        return KINDS[name]
    if "bool" in name.lower():
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


def _options_in_source(script: Script) -> list[dict[str, Any]]:
    """Return the options of all `add_argument` calls, as far as they are constants."""
    options: dict[str, dict[str, Any]] = {}
    for tree in script.modules:
        names = module_constants(tree)
        exclusive = _exclusive_groups(tree)
        for call in calls(tree, "add_argument", "add_option"):  # add_option: of optparse
            option = _option(call, names)
            if option is not None:
                group = call_name(call).rpartition(".")[0]
                option["exclusive"] = group if group in exclusive else None
                options.setdefault((option["flags"] or [option["dest"]])[0], option)
        for call in calls(tree, "set_defaults"):
            given = {item.arg: constant(item.value, names) for item in call.keywords}
            for option in options.values():
                if given.get(option["dest"], MISSING) is not MISSING:
                    option["default"] = given[option["dest"]]
    return list(options.values())


def _exclusive_groups(tree: ast.Module) -> set[str]:
    """Return the names of groups of which only one option may be given."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and call_name(node.value).endswith("add_mutually_exclusive_group")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


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
    convert = keyword(call, "type")
    kind = call_name(convert or ast.Constant(None)).rpartition(".")[2] or OPTPARSE_TYPES.get(str(constant(convert)))
    if isinstance(convert, ast.Lambda):
        kind = "str2bool" if "bool" in (text := ast.unparse(convert)) or "true" in text.lower() else "<lambda>"
    default = constant(keyword(call, "default"), names)
    choices = constant(keyword(call, "choices"), names)
    text = constant(keyword(call, "help"), names)
    dest = constant(keyword(call, "dest"), names)
    unknown = keyword(call, "default") is not None and default is MISSING
    return {
        "flags": flags,
        "dest": dest if isinstance(dest, str) else long.lstrip("-").replace("-", "_"),
        "action": actions[action],
        "type": kind,
        "default": None if default is MISSING else default,
        "choices": choices if isinstance(choices, list) else None,
        "nargs": None if (nargs := constant(keyword(call, "nargs"), names)) is MISSING else nargs,
        "help": text if isinstance(text, str) else "",
        "required": constant(keyword(call, "required"), names) is True,
        "opaque": unknown,
        "reads": (default is MISSING or default is None or isinstance(default, str))
        if kind is None
        else None
        if kind in KINDS
        else not isinstance(default, list),
    }
