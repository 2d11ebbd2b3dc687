"""Dataclasses as command lines: tyro, simple-parsing, HfArgumentParser, draccus and the like."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from looplab.onboard.base import MISSING, Interface, Kind, Script, ScriptSetting
from looplab.onboard.knobs import inside
from looplab.onboard.readers.arguments import KINDS, flags_interface, settings_of
from looplab.onboard.readers.commands import Level, best_command, commands_interface, name_commands, split_at_command
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, calls, constant, keyword, module_constants

FRAMEWORKS = {
    "tyro": "tyro",
    "simple_parsing": "simple-parsing",
    "transformers": "HfArgumentParser",
    "jsonargparse": "jsonargparse",
    "pyrallis": "pyrallis",
    "draccus": "draccus",
}
TYRO_COMMANDS = ("subcommand_cli_from_dict", "overridable_config_cli")
INNER_UNDERSCORE = re.compile(r"(?<![.])(?<!^)_(?![.]|$)")
"""Underscores that tyro turns to dashes, unlike that of `lambda_`."""
YAML = ("jsonargparse", "pyrallis", "draccus")
"""Frameworks that read the values of flags as YAML."""


class DataclassReader:
    """Fields of the dataclass that a script passes to `tyro.cli`, `simple_parsing.parse` or `HfArgumentParser`."""

    name = "dataclass"

    def read(self, script: Script) -> Interface | None:
        framework = _framework(script)
        if framework is None:
            return None
        if framework == "transformers" and (in_file := _in_file(script)) is not None:
            return in_file
        reported = script.introspection.of("tyro" if framework == "tyro" else "argparse")
        notes: list[str] = []
        if reported is not None and framework == "tyro":
            if any("commands" in option for option in reported["options"]):
                return _tyro_commands(script, reported["options"])
            settings = [tyro_setting(option) for option in reported["options"]]
        elif reported is not None:
            settings = settings_of(
                _read_as_yaml(reported["options"]) if framework in YAML else reported["options"],
                hugging_face=framework == "transformers",
            )
        else:
            settings = list(_from_source(script, framework))
            notes.append(f"the options come from the source alone: {script.introspection.problem}")
        if not settings:
            return None
        return flags_interface(FRAMEWORKS[framework], script, settings, notes=notes)


def _in_file(script: Script) -> Interface | None:
    """Return the interface of a script whose only argument is a file with its settings: `run_glue.py args.json`."""
    from looplab.onboard.readers.config_file import FORMATS, config_in

    file = script.arguments[0] if len(script.arguments) == 1 else ""
    base = config_in(script, file) if file else None
    if base is None or not any(
        True for tree in script.modules for _ in calls(tree, "parse_json_file", "parse_yaml_file")
    ):
        return None
    reported = script.introspection.of("argparse")
    known = (
        {one.name: one for one in settings_of(reported["options"], hugging_face=True)} if reported is not None else {}
    )
    if "seed" in known:
        base.setdefault("seed", known["seed"].default)
    settings = [replace(known.get(one.name, one), default=one.default) for one in settings_in(base)]
    rendering = {"as": "file", "format": FORMATS[Path(file).suffix.lower()]}
    note = f"the base config is a copy of {file}"
    command = (*script.prefix, "{config}")
    return Interface(FRAMEWORKS["transformers"], tuple(settings), command, rendering, base=base, notes=(note,))


def _tyro_commands(script: Script, options: Sequence[Mapping[str, Any]]) -> Interface:
    """Return the interface of a union of dataclasses: `--epochs 5 optimizer:adam --optimizer.lr 0.1`."""
    notes: list[str] = []
    levels: list[Level] = []
    words: Sequence[str] = script.arguments
    unions = [option for option in options if "commands" in option]
    settings = [tyro_setting(option) for option in options if "commands" not in option]
    while unions:
        union, *unions = unions
        commands = union["commands"]
        before, name, words = split_at_command(words, commands)
        name = name or union["chosen"] or best_command(list(commands))
        levels.append(Level(settings, name, before))
        notes.append(name_commands(commands, name))
        inner = commands[name]
        unions = [*(option for option in inner if "commands" in option), *unions]
        settings = [tyro_setting(option) for option in inner if "commands" not in option]
    levels.append(Level(settings, None, words))
    return commands_interface(FRAMEWORKS["tyro"], script, levels, notes=notes)


def _framework(script: Script) -> str | None:
    for tree in script.modules:
        for call in calls(
            tree, "cli", "parse", "HfArgumentParser", "ArgumentParser", "auto_cli", "CLI", "wrap", *TYRO_COMMANDS
        ):
            name = call_name(call)
            last = name.rpartition(".")[2]
            if "jsonargparse" in script.imports and last in ("auto_cli", "CLI", "ArgumentParser"):
                return "jsonargparse"
            for package in ("pyrallis", "draccus"):
                if package in script.imports and last in ("parse", "wrap", "ArgumentParser"):
                    return package
            if (name in ("tyro.cli", "cli") or last in TYRO_COMMANDS) and "tyro" in script.imports:
                return "tyro"
            if "simple_parsing" in script.imports and name.rpartition(".")[2] in ("parse", "ArgumentParser"):
                return "simple_parsing"
            if name.endswith("HfArgumentParser"):
                return "transformers"
    return None


def _read_as_yaml(options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return options whose values are parsed as YAML, whatever their type says."""
    kept = [
        option for option in options if "Config" not in option["action"] and not isinstance(option["default"], list)
    ]
    return [{**option, "reads": True, "words": "value", "nargs": None} for option in kept]


def tyro_setting(option: Mapping[str, Any]) -> ScriptSetting:
    """Return the setting of a field, as tyro writes it: `--optim.learning-rate`, `--x`/`--no-x`."""
    kind: Kind = KINDS.get(option["type"] or "", "unknown")
    default = MISSING if option["required"] else option["default"]
    if kind == "unknown" and isinstance(default, bool | int | float | str):
        kind = (
            "bool"
            if isinstance(default, bool)
            else "int"
            if isinstance(default, int)
            else ("float" if isinstance(default, float) else "str")
        )
    choices = tuple(option["choices"]) if option["choices"] else None
    if kind == "float" and isinstance(default, int) and not isinstance(default, bool):
        default = float(default)
    return ScriptSetting(
        INNER_UNDERSCORE.sub("-", option["name"]),
        "str" if choices else kind,
        default,
        choices,
        option["help"] or "",
        low=option.get("low"),
        high=option.get("high"),
        required=option["required"],
        boolean="switch" if kind == "bool" else None,
        spread=kind == "list",
    )


def _from_source(script: Script, framework: str) -> Iterator[ScriptSetting]:
    """Yield the fields of all dataclasses of the project, nested ones with dots."""
    classes = {
        node.name: (node, module_constants(tree))
        for tree in script.modules
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("dataclass" in call_name(item) for item in node.decorator_list)
    }
    nested = {
        annotation.id
        for node, _ in classes.values()
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(annotation := item.annotation, ast.Name)
        and annotation.id in classes
    }
    used = {name for tree in script.modules for name in _arguments(tree) if name in classes}
    for name in [name for name in classes if name in used] or [name for name in classes if name not in nested]:
        for option in fields_of(name, classes, ""):
            yield tyro_setting(option) if framework == "tyro" else _flat_setting(option, framework)


def _arguments(tree: ast.Module) -> Iterator[str]:
    for call in calls(tree, "cli", "parse", "HfArgumentParser", "add_arguments"):
        for node in ast.walk(call):
            if isinstance(node, ast.Name):
                yield node.id


def fields_of(
    name: str, classes: Mapping[str, tuple[ast.ClassDef, dict[str, Any]]], prefix: str
) -> Iterator[dict[str, Any]]:
    """Yield the fields of a class, its own before those that it inherits; nested ones with dots."""
    node, constants = classes[name]
    own = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for index, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        field, annotation = item.target.id, item.annotation
        if isinstance(annotation, ast.Name) and annotation.id in classes:
            yield from fields_of(annotation.id, classes, f"{prefix}{field}.")
            continue
        value, text = item.value, ""
        alias, required = None, value is None
        annotation, bounds = _bounds(annotation, value, constants)
        if isinstance(value, ast.Call) and call_name(value).rpartition(".")[2] in ("field", "choice", "Field"):
            metadata = keyword(value, "metadata")
            words = [
                n.value for n in ast.walk(metadata or value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            text = next((word for word in words if " " in word), "")
            factory = keyword(value, "default_factory")
            alias = keyword(value, "validation_alias") or keyword(value, "alias") or keyword(value, "env")
            first = value.args[0] if value.args and "Field" in call_name(value) else None  # as pydantic has it
            required = isinstance(first, ast.Constant) and first.value is ...
            value = keyword(value, "default") or (factory.body if isinstance(factory, ast.Lambda) else first)
        default = constant(value, constants)
        following = node.body[index + 1] if index + 1 < len(node.body) else None
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            text = text or " ".join(following.value.value.split())
        kind, choices = _annotation(annotation)
        yield {
            "name": prefix + field,
            "type": kind,
            "default": None if default is MISSING else default,
            "choices": choices,
            "required": required,
            "help": text,
            "alias": shown if isinstance(shown := constant(alias), str) else None,
            **bounds,
        }
    for base in node.bases:
        if (above := call_name(base)) in classes and above != name:
            inherited = fields_of(above, classes, prefix)
            yield from (option for option in inherited if option["name"].removeprefix(prefix).split(".")[0] not in own)


CONSTRAINED = {
    "PositiveInt": ("int", {"gt": 0}),
    "NonNegativeInt": ("int", {"ge": 0}),
    "PositiveFloat": ("float", {"gt": 0}),
    "NonNegativeFloat": ("float", {"ge": 0}),
    "conint": ("int", {}),
    "confloat": ("float", {}),
}
"""Types of pydantic with bounds."""
BOUNDS = ("ge", "gt", "le", "lt")


def _bounds(
    annotation: ast.expr, value: ast.expr | None, names: dict[str, Any]
) -> tuple[ast.expr, dict[str, float | None]]:
    """Return the plain type of a field, and the bounds that its annotation and its default have.

    `Annotated[float, Field(ge=0, lt=1)]`, `Field(0.1, gt=0)`, `conint(ge=1)`, `PositiveInt`, `Annotated[int, Gt(0)]`.
    """
    given: dict[str, Any] = {}
    holders: list[ast.AST] = [value] if isinstance(value, ast.Call) else []
    if isinstance(annotation, ast.Subscript) and call_name(annotation.value).endswith("Annotated"):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        annotation, *more = inner
        holders += more
    if (known := CONSTRAINED.get(call_name(annotation).rpartition(".")[2])) is not None:
        holders.append(annotation)
        annotation, given = ast.Name(known[0], ast.Load()), dict(known[1])
    for holder in holders:
        for call in ast.walk(holder):
            if isinstance(call, ast.Call):
                given |= {item.arg: constant(item.value, names) for item in call.keywords if item.arg in BOUNDS}
                word = call_name(call).rpartition(".")[2].lower()
                if word in BOUNDS and call.args:  # of annotated_types
                    given[word] = constant(call.args[0], names)
    kind = _annotation(annotation)[0] or ""
    low, high = given.get("ge"), given.get("le")
    if low is None:
        low = inside(given.get("gt"), kind, upper=False)
    if high is None:
        high = inside(given.get("lt"), kind, upper=True)
    numbers = {"low": low, "high": high}
    return annotation, {key: bound if isinstance(bound, int | float) else None for key, bound in numbers.items()}


def _annotation(node: ast.expr) -> tuple[str | None, list[Any] | None]:
    """Return the name of a type, and the choices of a Literal."""
    text = ast.unparse(node)
    if isinstance(node, ast.Subscript) and text.split("[")[0].rpartition(".")[2] == "Literal":
        items = constant(node.slice if isinstance(node.slice, ast.Tuple) else ast.Tuple([node.slice], ast.Load()))
        return "str", items if isinstance(items, list) else None
    for name in ("bool", "int", "float", "str"):
        if name in text.replace("Optional", "").replace("[", " ").replace("]", " ").replace("|", " ").split():
            return ("list" if text.lower().startswith(("list", "tuple", "sequence")) else name), None
    return None, None


def _flat_setting(option: Mapping[str, Any], framework: str) -> ScriptSetting:
    last = option["name"].rpartition(".")[2]
    record = {
        "flags": [f"--{last}"],
        "dest": last,
        "action": "_StoreAction",
        "type": option["type"],
        "default": option["default"],
        "choices": option["choices"],
        "nargs": "+" if option["type"] == "list" else None,
        "help": option["help"],
        "required": option["required"],
        "low": option.get("low"),
        "high": option.get("high"),
    }
    setting = settings_of([record], hugging_face=True)[0]
    return setting
