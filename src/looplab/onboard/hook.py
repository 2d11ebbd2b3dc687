"""Runs a script with `--help` and writes down the options that it defines. Imports nothing of looplab.

    python hook.py OUT FRAMEWORKS (SCRIPT | -m MODULE)

FRAMEWORKS are the names of packages that the script imports, separated by commas. A parser is recorded when it parses;
the script then ends, because it was asked for help.
"""

import argparse
import builtins
import contextlib
import dataclasses
import enum
import importlib
import inspect
import json
import os
import runpy
import sys
import typing

OUT = ""
RECORDS = []
MAX_OPTIONS = 2_000


def write():
    with open(OUT + ".new", "w") as file:
        json.dump(RECORDS, file)
    os.replace(OUT + ".new", OUT)


def record(framework, options, **more):
    RECORDS.append({"framework": framework, "options": options[:MAX_OPTIONS], **more})
    write()


def plain(value):
    """Return a value that JSON can hold, or None and its text."""
    if isinstance(value, enum.Enum):
        value = value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, bool | int | float | str) for item in value):
        return list(value)
    if isinstance(value, os.PathLike):
        return str(value)
    return None


def type_name(kind):
    if kind is None:
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "literal"
    if origin in (list, tuple, set) or kind in (list, tuple, set):
        return "list"
    if origin is typing.Union or str(origin) == "<class 'types.UnionType'>":
        inner = [item for item in arguments if item is not type(None)]
        return type_name(inner[0]) if len(inner) == 1 else None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "enum"
    return getattr(kind, "__name__", None)


def choices_of(kind):
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return [plain(item) for item in arguments]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [member.name for member in kind]
    for inner in arguments:
        if inner is not type(None) and (found := choices_of(inner)):
            return found
    return None


# -- argparse, and what is built on it


def argparse_options(parser):
    options = []
    for action in parser._actions:
        kind = type(action).__name__
        if kind in ("_HelpAction", "_VersionAction") or "help" in action.dest:
            continue
        default = action.default
        if default is argparse.SUPPRESS:
            default = None
        known = (
            [plain(item) for item in action.choices]
            if isinstance(action.choices, list | tuple | set | range | dict)
            else None
        )
        options.append(
            {
                "flags": list(action.option_strings),
                "dest": action.dest,
                "action": kind,
                "type": type_name(action.type),
                "default": plain(default),
                "choices": known,
                "nargs": action.nargs,
                "help": action.help if isinstance(action.help, str) and action.help != argparse.SUPPRESS else "",
                "required": bool(action.required),
                "const": plain(action.const),
            }
        )
    return options


def hook_argparse():
    real = argparse.ArgumentParser.parse_known_args
    depth = [0]

    def parse_known_args(self, *args, **kwargs):
        if depth[0] == 0:
            record("argparse", argparse_options(self), parser=f"{type(self).__module__}.{type(self).__name__}")
        depth[0] += 1
        try:
            return real(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    argparse.ArgumentParser.parse_known_args = parse_known_args


# -- signatures and dataclasses


def field_options(kind, default=None, prefix=""):
    """Return the options of a dataclass, nested ones with dots."""
    options = []
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # noqa: BLE001 (an annotation may raise anything)
        hints = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        value = getattr(default, field.name, None) if default is not None else None
        has = default is not None
        if not has and field.default is not dataclasses.MISSING:
            value, has = field.default, True
        if not has and field.default_factory is not dataclasses.MISSING:
            with contextlib.suppress(Exception):
                value, has = field.default_factory(), True
        hint = hints.get(field.name, field.type)
        name = prefix + field.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            options += field_options(hint, value if has else None, name + ".")
            continue
        text = field.metadata.get("help", "") if field.metadata else ""
        options.append(
            {
                "name": name,
                "type": type_name(hint),
                "choices": choices_of(hint),
                "default": plain(value),
                "required": not has,
                "help": text,
            }
        )
    return options


def signature_options(function):
    options = []
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 (an annotation may raise anything)
        hints = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in ("self", "cls"):
            continue
        has = parameter.default is not parameter.empty
        hint = hints.get(parameter.name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            options += field_options(hint, parameter.default if has else None, parameter.name + ".")
            continue
        options.append(
            {
                "name": parameter.name,
                "type": type_name(hint),
                "choices": choices_of(hint),
                "default": plain(parameter.default) if has else None,
                "required": not has,
                "help": "",
            }
        )
    return options


def hook_tyro():
    import tyro

    def cli(f, *args, default=None, **kwargs):
        options = (
            field_options(f, default if dataclasses.is_dataclass(default) else None)
            if dataclasses.is_dataclass(f)
            else (signature_options(f) if callable(f) else [])
        )
        record("tyro", options)
        sys.exit(0)

    tyro.cli = cli


def hook_fire():
    import fire

    def call(component=None, *args, **kwargs):
        if component is None or not callable(component):
            members = component if isinstance(component, dict) else {}
            record("fire", [], commands=sorted(map(str, members)))
        else:
            record("fire", signature_options(component.__init__ if inspect.isclass(component) else component))
        sys.exit(0)

    fire.Fire = call


# -- click and typer


def click_options(command):
    options = []
    for parameter in command.params:
        default = parameter.default() if callable(parameter.default) else parameter.default
        if not isinstance(default, bool | int | float | str | list | tuple | enum.Enum):
            default = None
        if isinstance(default, enum.Enum):
            default = default.value
        kind, choices, source = click_type(parameter)
        options.append(
            {
                "flags": list(getattr(parameter, "opts", [])),
                "off": list(getattr(parameter, "secondary_opts", [])),
                "name": parameter.name,
                "positional": parameter.param_type_name == "argument",
                "type": kind,
                "is_flag": bool(getattr(parameter, "is_flag", False)),
                "choices": choices,
                "low": plain(getattr(source, "min", None)),
                "high": plain(getattr(source, "max", None)),
                "default": plain(default),
                "required": bool(parameter.required),
                "multiple": bool(getattr(parameter, "multiple", False)),
                "nargs": parameter.nargs,
                "help": getattr(parameter, "help", None) or "",
            }
        )
    return options


def click_type(parameter):
    """Return the name of a parameter's type, its choices, and what knows its bounds."""
    kind = getattr(parameter, "type", None)
    if kind is not None:
        choices = getattr(kind, "choices", None)
        return kind.name, [plain(getattr(item, "value", item)) for item in choices] if choices else None, kind
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)  # recent versions of typer
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "choice", [plain(member.value) for member in annotation], parameter
    return type_name(annotation), choices_of(annotation), parameter


def hook_click():
    import click

    def main(self, *args, **kwargs):
        commands = getattr(self, "commands", None)
        record(
            "click",
            click_options(self),
            commands=sorted(commands) if commands else [],
            sub={name: click_options(command) for name, command in (commands or {}).items()},
        )
        sys.exit(0)

    click.Command.main = main
    with contextlib.suppress(Exception):
        import typer.core

        typer.core.TyperCommand.main = main
        typer.core.TyperGroup.main = main


def hook_absl():
    from absl import app, flags

    def run(main, argv=None, **kwargs):
        values = flags.FLAGS
        known = values.flags_by_module_dict()
        ours = [flag for module, items in known.items() if not module.startswith("absl.") for flag in items]
        record(
            "absl",
            [
                {
                    "name": flag.name,
                    "type": flag.flag_type(),
                    "default": plain(flag.default),
                    "help": flag.help or "",
                    "choices": [plain(item) for item in getattr(flag.parser, "enum_values", None) or []] or None,
                    "low": plain(getattr(flag.parser, "lower_bound", None)),
                    "high": plain(getattr(flag.parser, "upper_bound", None)),
                    "required": flag.default is None and getattr(flag, "required", False),
                }
                for flag in ours
            ],
        )
        sys.exit(0)

    app.run = run


HOOKS = {"tyro": hook_tyro, "fire": hook_fire, "click": hook_click, "typer": hook_click, "absl": hook_absl}


def main():
    global OUT
    OUT, frameworks, *words = sys.argv[1:]
    hook_argparse()
    for name in frameworks.split(","):
        if name in HOOKS:
            with contextlib.suppress(ImportError):
                HOOKS[name]()
    builtins.input = lambda *args: sys.exit("asks on stdin")
    with contextlib.suppress(ImportError):
        importlib.import_module("torch").set_num_threads(1) if "torch" in sys.modules else None
    if words[0] == "-m":
        sys.argv = [words[1], "--help"]
        sys.path[0] = ""
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [words[0], "--help"]
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
