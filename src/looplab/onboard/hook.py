"""Runs a script and writes down the options that it defines. Imports nothing of looplab; works on Python 3.8 and later.

    python hook.py OUT SCRATCH FRAMEWORKS (SCRIPT | -m MODULE) [ARGUMENTS…]

FRAMEWORKS are the names of packages that the script imports, separated by commas, and `parses_again`. A parser is
recorded in OUT when it parses. Usually the script then ends, because its last argument is `--help`; a script that does
not is ended when it begins to train, connects to another machine, or a while after its first parser. Files that it
writes go to SCRATCH.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import math
import os
import re
import runpy
import socket
import sys
import threading
import typing
from typing import Any

MAX_OPTIONS = 2_000
AFTER_S = 15.0
"""Seconds that a script may run after its first parser, if `--help` does not end it."""

Options = typing.List[typing.Dict[str, Any]]  # noqa: UP006 (evaluated by Python 3.8)

out_file = ""
scratch = ""
records: Options = []


def write() -> None:
    with REAL_OPEN(out_file + ".new", "w") as file:
        json.dump(records, file, default=str)
    os.replace(out_file + ".new", out_file)


def record(framework: str, options: Options, **more: Any) -> None:
    if not records:
        watchdog = threading.Timer(AFTER_S, os._exit, [0])
        watchdog.daemon = True
        watchdog.start()
        end_before_training()
    records.append({"framework": framework, "options": options[:MAX_OPTIONS], **more})
    write()


# -- what a script must not do during introspection


REAL_OPEN, REAL_OS_OPEN, REAL_MKDIR = io.open, os.open, os.mkdir


def diverted(path: Any) -> Any:
    """Return where a file that is to be written goes instead: to the same name below the scratch folder."""
    if isinstance(path, int):
        return path
    text = os.path.abspath(os.fsdecode(path))
    if text == scratch or text.startswith((scratch + os.sep, "/dev/", "/proc/")):
        return path
    return scratch + os.sep + "files" + text


def with_parent(path: Any) -> Any:
    """Create the folder that a diverted file is in."""
    if isinstance(path, str) and path.startswith(scratch + os.sep):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def divert_writes() -> None:
    """Let the Python functions that write files write to the scratch folder."""

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(file, int):
            return REAL_OPEN(with_parent(diverted(file)), mode.replace("r+", "w+"), *args, **kwargs)
        return REAL_OPEN(there(file), mode, *args, **kwargs)

    def os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return REAL_OS_OPEN(with_parent(diverted(path)), flags | os.O_CREAT, *args, **kwargs)
        return REAL_OS_OPEN(there(path), flags, *args, **kwargs)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if os.path.isdir(path):
            raise FileExistsError(17, "File exists", os.fspath(path))
        moved = with_parent(diverted(path))
        if not os.path.isdir(moved):  # else it made it before, and will not find it where it looks
            REAL_MKDIR(moved, *args, **kwargs)

    def there(file: Any) -> Any:
        """Return the diverted file if only that one exists."""
        if isinstance(file, int) or os.path.exists(file):
            return file
        moved = diverted(file)
        return moved if os.path.exists(moved) else file

    def moved(real: Any) -> Any:
        """Return a function that renames a diverted file where it is."""

        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if there(source) is not source:
                return real(there(source), with_parent(diverted(target)), *args, **kwargs)
            return real(source, target, *args, **kwargs)

        return move

    def removed(real: Any) -> Any:
        return lambda path, *args, **kwargs: real(there(path), *args, **kwargs)

    os.rename, os.replace = moved(os.rename), moved(os.replace)
    os.remove, os.unlink = removed(os.remove), removed(os.unlink)
    builtins.open = io.open = opened
    os.open = os_open
    os.mkdir = mkdir


CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move", "os.symlink", "os.link")


def refuse(event: str, arguments: Any) -> None:
    """End the script if it is about to change a file of the user, or to connect to another machine."""
    if event in ("socket.connect", "socket.getaddrinfo"):
        where = str(arguments[1] if event == "socket.connect" else arguments[0])
        near = ("None", "localhost", "127.0.0.1", "::1", socket.gethostname())
        if where and not where.startswith(("/", "b'")) and not any(name in where for name in near):
            stop("it connects to another machine before it reads its arguments")
    elif event in CHANGES and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
        changed = os.path.abspath(os.fsdecode(arguments[0]))
        if os.path.exists(changed) and not changed.startswith((scratch + os.sep, out_file)) and is_ours(changed):
            stop("it changes files before it reads its arguments")


def is_ours(path: str) -> bool:
    """Return whether a file belongs to the project, rather than to a cache of a package."""
    return path.startswith(os.getcwd() + os.sep)


def stop(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(0 if records else 3)


def end_before_training() -> None:
    """End the script when it takes its first gradient: it has parsed its arguments and was not ended by `--help`."""
    torch = sys.modules.get("torch")
    if torch is not None:

        def backward(*args: Any, **kwargs: Any) -> None:
            stop("it begins to train")

        with contextlib.suppress(Exception):
            torch.Tensor.backward = backward


# -- values


def plain(value: Any) -> Any:
    """Return a value that JSON can hold, or None."""
    if isinstance(value, enum.Enum):
        value = value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float, str)) for item in value):
        return list(value)
    if isinstance(value, os.PathLike):
        return str(value)
    return None


def type_name(kind: Any) -> str | None:
    if kind is None:
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "literal"
    if str(origin) == "typing.Annotated" or hasattr(kind, "__metadata__"):
        return type_name(arguments[0] if arguments else kind.__origin__)
    if origin in (list, tuple, set) or kind in (list, tuple, set) or "Sequence" in str(origin):
        return "list"
    if origin is dict or kind is dict:
        return "dict"
    if origin is typing.Union or str(origin) == "<class 'types.UnionType'>":
        inner = [item for item in arguments if item is not type(None)]
        return type_name(inner[0]) if len(inner) == 1 else None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "enum"
    if hasattr(kind, "__supertype__"):
        return type_name(kind.__supertype__)
    return getattr(kind, "__name__", None)


def choices_of(kind: Any) -> list[Any] | None:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return [plain(item) for item in arguments]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [member.name for member in kind]
    for inner in arguments:
        if inner is not type(None):
            found = choices_of(inner)
            if found:
                return found
    return None


# -- argparse, and what is built on it


def reads_back(action: argparse.Action, default: Any) -> bool | None:
    """Return whether a value, written as text, is parsed to the same value; None: it was not tried."""
    convert = action.type
    if convert is None and default is not None and type(action).__name__ == "_StoreAction":
        return all(isinstance(word, str) for word in (default if isinstance(default, list) else [default]))
    if default is None or convert is None or not callable(convert) or isinstance(convert, argparse.FileType):
        return None
    words = default if isinstance(default, list) and action.nargs is not None else [default]
    texts = [
        word if isinstance(word, str) else json.dumps(word) if isinstance(word, list) else repr(word) for word in words
    ]
    try:
        found = [plain(convert(text)) for text in texts]
    except BaseException:  # noqa: BLE001 (a conversion may raise anything, SystemExit too)
        return False
    found = [item[0] if isinstance(item, list) and len(item) == 1 else item for item in found]
    return found == words or (found == [default] and not isinstance(default, list))


def number_in(action: argparse.Action, default: Any) -> Any:
    """Return the number that a conversion of the script's own makes of a default that is a text, as in a list of rates:
    `type=floats, default="0.25"`; else the default."""
    if isinstance(default, str) and callable(action.type) and action.type not in (str, int, float):
        with contextlib.suppress(BaseException):  # a conversion may raise anything, SystemExit too
            found = plain(action.type(default))
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
            if type(found) in (int, float) and float(default) == found:
                return found
    return default


PROBES = (-1.0, 0.0, 0.5, 0.999, 1.0, 2.0)
"""Values that an option's conversion is tested with, in addition to multiples of its default."""


def accepted_range(action: argparse.Action, default: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest value that a conversion of the script's own takes, as far as it was asked;
    None where it took all."""
    convert = action.type
    if not callable(convert) or convert in (int, float) or isinstance(default, bool):
        return None, None
    if not isinstance(default, (int, float)) or action.nargs not in (None, "?"):
        return None, None
    kind = type(default)
    values = {kind(value) for value in (*PROBES, *(default * 10.0**power for power in (-2, -1, 1, 2)))}
    taken, low, high = {default}, None, None
    for value in sorted(values):
        with contextlib.suppress(BaseException):  # a conversion may raise anything, SystemExit too
            convert(repr(value))
            taken.add(value)
    for value in sorted(values - taken):
        if value < default:
            low = min(item for item in taken if item > value)
        elif high is None:
            high = max(item for item in taken if item < value)
    return low, high


def boolean_words(action: argparse.Action) -> str | None:
    """Return how a bool must be written for its conversion: `value` (True, False), `empty` ("True", ""), or None."""
    for name, false in (("value", "False"), ("empty", "")):
        try:
            if action.type("True") is True and action.type(false) is False:  # type: ignore[operator,misc]
                return name
        except BaseException:  # noqa: BLE001, S112 (a conversion may raise anything)
            continue
    return None


def argparse_options(parser: argparse.ArgumentParser, depth: int = 0) -> Options:
    options: Options = []
    exclusive = {
        id(action): number
        for number, group in enumerate(getattr(parser, "_mutually_exclusive_groups", []))
        for action in group._group_actions
    }
    for action in parser._actions:
        kind = type(action).__name__
        if kind in ("_HelpAction", "_VersionAction") or action.dest in ("help", "print_config", "config_path"):
            continue
        default = action.default
        if default is argparse.SUPPRESS:
            default = None
        known = (
            [plain(item) for item in typing.cast(typing.Iterable[typing.Any], action.choices)]
            if isinstance(action.choices, (list, tuple, set, frozenset, range, dict)) or hasattr(action.choices, "keys")
            else choices_of(action.choices)
            if isinstance(action.choices, type)
            else choices_of(getattr(action, "_typehint", None))  # of jsonargparse
        )
        told = number_in(action, plain(default))
        option: dict[str, Any] = {
            "flags": list(action.option_strings),
            "dest": action.dest,
            "action": kind,
            "type": type_name(action.type) or type_name(getattr(action, "_typehint", None)),
            "default": told,
            "choices": known,
            "nargs": action.nargs,
            "help": action.help if isinstance(action.help, str) and action.help != argparse.SUPPRESS else "",
            "required": bool(action.required),
            "const": plain(action.const),
            "reads": reads_back(action, told),
            "words": boolean_words(action) if isinstance(told, bool) or type_name(action.type) == "bool" else None,
            "exclusive": exclusive.get(id(action)),
            "opaque": told is None and default is not None,
        }
        option["low"], option["high"] = accepted_range(action, told)
        if kind.endswith("SubParsersAction") and isinstance(action.choices, dict) and depth < 3:
            option["commands"] = {
                str(name): argparse_options(sub, depth + 1)
                for name, sub in action.choices.items()
                if isinstance(sub, argparse.ArgumentParser)
            }
        options.append(option)
    return options


def hook_argparse(parses_again: bool) -> None:
    """Record parsers when they parse.

    Args:
        parses_again: `parse_known_args` is followed by `parse_args` somewhere: only that one is asked for help.
    """
    real, real_help = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.print_help
    real_args = argparse.ArgumentParser.parse_args
    depth, final = [0], [0]

    def parse_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        final[0] += 1
        try:
            return real_args(self, *args, **kwargs)
        finally:
            final[0] -= 1

    def print_help(self: Any, *args: Any, **kwargs: Any) -> None:
        if not any(item["framework"] == "argparse" for item in records):  # a parser that parses in its own way
            name = "{0.__module__}.{0.__name__}".format(type(self))
            record("argparse", argparse_options(self), parser=name, ours=True)
        real_help(self, *args, **kwargs)

    def take_from_files(self: Any) -> None:
        """Record the values that a parser takes from its config files, which it does not open for `--help`."""
        depth[0] += 1
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                words = [word for word in sys.argv[1:] if word not in ("--help", "-h")]
                values = vars(self.parse_known_args(words)[0])
        except BaseException:  # noqa: BLE001 (a parser may raise anything, SystemExit too)
            return
        finally:
            depth[0] -= 1
        for option in records[-1]["options"]:
            if plain(values.get(option["dest"])) is not None:
                option["default"], option["required"] = plain(values[option["dest"]]), False
        write()

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None, **kwargs: Any) -> Any:
        if depth[0] == 0:
            record(
                "argparse",
                argparse_options(self),
                parser="{0.__module__}.{0.__name__}".format(type(self)),
                # Whether it reads the command line, rather than a list of its own.
                ours=args is None or bool(set(map(str, args)) & set(sys.argv[1:])),
            )
        asked_later = parses_again and not final[0] and depth[0] == 0
        if asked_later:
            args = [word for word in (sys.argv[1:] if args is None else args) if word not in ("--help", "-h")]
        if depth[0] == 0 and (
            getattr(self, "_default_config_files", None)
            or any(getattr(action, "is_config_file_arg", False) for action in self._actions)
        ):
            take_from_files(self)
        depth[0] += 1
        try:
            found, unknown = real(self, args, namespace, **kwargs)
            return found, [*unknown, "--help"] if asked_later else unknown  # for the parser that gets the rest
        finally:
            depth[0] -= 1

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment,unused-ignore]
    argparse.ArgumentParser.print_help = print_help  # type: ignore[method-assign]
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment,unused-ignore]


# -- signatures and dataclasses


def type_hints(thing: Any) -> dict[str, Any]:
    """Return the annotations of a class or a function, those of `Annotated` with their metadata."""
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except TypeError:  # Python 3.8
        return typing.get_type_hints(thing)


def union_of(kind: Any) -> list[Any]:
    """Return the members of a union that has a dataclass in it; empty: it is something else."""
    if hasattr(kind, "__metadata__"):
        kind = typing.get_args(kind)[0]
    origin = typing.get_origin(kind)
    if origin is not typing.Union and str(origin) != "<class 'types.UnionType'>":
        return []
    members = list(typing.get_args(kind))
    return members if any(dataclasses.is_dataclass(plain_type(member)) for member in members) else []


def plain_type(kind: Any) -> Any:
    return typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def command_name(kind: Any) -> str:
    """Return the name that tyro gives to a member of a union: its class in kebab case, unless it has one."""
    for item in getattr(kind, "__metadata__", ()):
        if isinstance(getattr(item, "name", None), str):
            return str(item.name)
    name = getattr(plain_type(kind), "__name__", str(kind))
    if name == "NoneType":
        return "None"
    return (
        "None" if name == "NoneType" else re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()
    )


def union_option(name: str, hint: Any, value: Any, *, required: bool) -> dict[str, Any]:
    """Return the commands that choose a member of a union: `optimizer:adam`, with the options of each."""
    commands: dict[str, Any] = {}
    chosen = None
    above = name.replace("_", "-")
    for member in union_of(hint):
        kind = plain_type(member)
        command = command_name(member)
        command = command if not name else above + ":" + command
        own = value if dataclasses.is_dataclass(kind) and type(value) is kind else None
        if own is not None:
            chosen = command
        prefix = name + "." if name else ""
        commands[command] = field_options(kind, own, prefix) if dataclasses.is_dataclass(kind) else []
    return {"name": name, "commands": commands, "chosen": chosen, "required": required and chosen is None}


def field_options(kind: Any, default: Any = None, prefix: str = "") -> Options:
    """Return the options of a dataclass, nested ones with dots."""
    options: Options = []
    try:
        hints = type_hints(kind)
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
        if len(union_of(hint)) > 1:
            options.append(union_option(name, hint, value if has else None, required=not has))
            continue
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            options += field_options(hint, value if has else None, name + ".")
            continue
        text = field.metadata.get("help", "") if field.metadata else ""
        options.append(option_of(name, hint, value, has=has, text=text))
    return options


def option_of(name: str, hint: Any, value: Any, *, has: bool, text: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "type": type_name(hint),
        "choices": choices_of(hint),
        "default": plain(value),
        "required": not has,
        "help": text if isinstance(text, str) else "",
    }


def signature_options(function: Any) -> Options:
    options: Options = []
    try:
        hints = type_hints(function)
    except Exception:  # noqa: BLE001 (an annotation may raise anything)
        hints = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in ("self", "cls"):
            continue
        has = parameter.default is not parameter.empty
        hint = hints.get(parameter.name)
        if len(union_of(hint)) > 1:
            value = parameter.default if has else None
            options.append(union_option(parameter.name, hint, value, required=not has))
            continue
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            options += field_options(hint, parameter.default if has else None, parameter.name + ".")
            continue
        options.append(option_of(parameter.name, hint, parameter.default if has else None, has=has))
    return options


def callable_options(thing: Any) -> Options:
    if dataclasses.is_dataclass(thing):
        return field_options(thing)
    return signature_options(thing.__init__ if inspect.isclass(thing) else thing)


def hook_tyro() -> None:
    tyro: Any = importlib.import_module("tyro")

    def cli(f: Any, *args: Any, default: Any = None, **kwargs: Any) -> None:
        kind = plain_type(type(f) if dataclasses.is_dataclass(f) and not isinstance(f, type) else f)
        if len(union_of(f)) > 1:
            options = [union_option("", f, default, required=True)]
        elif dataclasses.is_dataclass(kind):
            options = field_options(kind, default if dataclasses.is_dataclass(default) else None)
        else:
            options = signature_options(f) if callable(f) else []
        record("tyro", options)
        sys.exit(0)

    def from_dict(subcommands: Any, *args: Any, **kwargs: Any) -> None:
        commands = {str(name): callable_options(item) for name, item in subcommands.items()}
        record("tyro", [{"name": "", "commands": commands, "chosen": None, "required": True}])
        sys.exit(0)

    def from_configs(configs: Any, *args: Any, **kwargs: Any) -> None:
        commands = {str(name): field_options(type(item[1]), item[1]) for name, item in configs.items()}
        record("tyro", [{"name": "", "commands": commands, "chosen": None, "required": True}])
        sys.exit(0)

    tyro.cli = cli
    tyro.extras.subcommand_cli_from_dict = from_dict
    tyro.extras.overridable_config_cli = from_configs


def hook_fire() -> None:
    fire: Any = importlib.import_module("fire")

    def call(component: Any = None, *args: Any, **kwargs: Any) -> None:
        if component is None:
            main = sys.modules["__main__"].__dict__
            component = {
                name: item
                for name, item in main.items()
                if inspect.isfunction(item) and item.__module__ == "__main__" and not name.startswith("_")
            }
        if isinstance(component, dict):
            sub = {str(name): callable_options(item) for name, item in component.items() if callable(item)}
            record("fire", [], commands=list(sub), sub=sub)
        elif inspect.isclass(component) or not callable(component):
            methods = inspect.getmembers(component, callable)
            sub = {name: signature_options(item) for name, item in methods if not name.startswith("_")}
            own = signature_options(component.__init__) if inspect.isclass(component) else []
            record("fire", own, commands=list(sub), sub={name: [*own, *items] for name, items in sub.items()})
        else:
            record("fire", signature_options(component))
        sys.exit(0)

    fire.Fire = call


# -- click and typer


def click_options(command: Any) -> Options:
    options: Options = []
    for parameter in command.params:
        default = parameter.default
        if callable(default):
            with contextlib.suppress(Exception):
                default = default()
        if isinstance(default, enum.Enum):
            default = default.value
        if not isinstance(default, (bool, int, float, str, list, tuple, os.PathLike)):
            default = None
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
                "low_open": bool(getattr(source, "min_open", False)),
                "high_open": bool(getattr(source, "max_open", False)),
                "default": plain(default),
                "required": bool(parameter.required),
                "multiple": bool(getattr(parameter, "multiple", False)),
                "nargs": parameter.nargs,
                "help": getattr(parameter, "help", None) or "",
            }
        )
    return options


def click_type(parameter: Any) -> tuple[str | None, list[Any] | None, Any]:
    """Return the name of a parameter's type, its choices, and what knows its bounds."""
    kind = getattr(parameter, "type", None)
    if kind is not None:
        choices = getattr(kind, "choices", None)
        return kind.name, [plain(getattr(item, "value", item)) for item in choices] if choices else None, kind
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)  # recent versions of typer
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "choice", [plain(member.value) for member in annotation], parameter
    return type_name(annotation), choices_of(annotation), parameter


def click_commands(group: Any, depth: int = 0) -> dict[str, Any]:
    """Return the options of the commands of a group, and the commands of nested groups."""
    found: dict[str, Any] = {}
    for name, command in (getattr(group, "commands", None) or {}).items():
        inner = click_commands(command, depth + 1) if depth < 2 else {}
        found[str(name)] = {"options": click_options(command), "sub": inner}
    return found


def hook_click() -> None:
    import click

    def main(self: Any, *args: Any, **kwargs: Any) -> None:
        record("click", click_options(self), sub=click_commands(self))
        sys.exit(0)

    click.Command.main = main  # type: ignore[assignment,method-assign,unused-ignore]
    for name in ("BaseCommand", "MultiCommand", "Group"):
        with contextlib.suppress(Exception):
            if "main" in getattr(click, name).__dict__:
                getattr(click, name).main = main
    with contextlib.suppress(Exception):
        import typer.core

        typer.core.TyperCommand.main = main  # type: ignore[assignment,method-assign,unused-ignore]
        typer.core.TyperGroup.main = main  # type: ignore[assignment,method-assign,unused-ignore]


# -- absl


def flatten(config: Any, prefix: str) -> dict[str, Any]:
    """Return the leaves of a config dict by dotted name."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if hasattr(value, "items"):
            found.update(flatten(value, f"{prefix}.{key}"))
        else:
            found[f"{prefix}.{key}"] = value
    return found


def absl_options() -> Options:
    from absl import flags

    values = flags.FLAGS
    if not values.is_parsed():
        words = [word for word in sys.argv if word not in ("--help", "-h")]
        with contextlib.suppress(Exception):
            values(words, known_only=True)
        values.mark_as_parsed()
    options: Options = []
    for module, items in values.flags_by_module_dict().items():
        if module.startswith("absl.") or "ml_collections" in module:
            continue
        for flag in items:
            with contextlib.suppress(Exception):
                if hasattr(flag.value, "items") and not isinstance(flag.value, dict):  # a ConfigDict
                    for name, value in flatten(flag.value, flag.name).items():
                        options.append(option_of(name, type(value), value, has=True))
                    continue
            parser = getattr(flag, "parser", None)
            options.append(
                {
                    "name": flag.name,
                    "type": flag.flag_type(),
                    "default": plain(flag.default),
                    "help": flag.help or "",
                    "choices": [plain(item) for item in getattr(parser, "enum_values", None) or []] or None,
                    "low": plain(getattr(parser, "lower_bound", None)),
                    "high": plain(getattr(parser, "upper_bound", None)),
                    "required": flag.default is None and getattr(flag, "required", False),
                }
            )
    return options


def hook_absl() -> None:
    from absl import app, flags

    real = flags.FlagValues.__call__

    def run(main: Any, argv: Any = None, **kwargs: Any) -> None:
        flags.FlagValues.__call__ = real  # type: ignore[method-assign]
        record("absl", absl_options())
        sys.exit(0)

    def parse(self: Any, argv: Any, known_only: bool = False) -> Any:
        """`FLAGS(sys.argv)`, for scripts without `app.run`."""
        flags.FlagValues.__call__ = real  # type: ignore[method-assign]
        record("absl", absl_options())
        sys.exit(0)

    app.run = run  # type: ignore[assignment]
    flags.FlagValues.__call__ = parse  # type: ignore[method-assign]


HOOKS = {"tyro": hook_tyro, "fire": hook_fire, "click": hook_click, "typer": hook_click, "absl": hook_absl}


def main() -> None:
    global out_file, scratch
    out_file, scratch, frameworks, *words = sys.argv[1:]
    out_file, scratch = os.path.abspath(out_file), os.path.abspath(scratch)
    hook_argparse("parses_again" in frameworks.split(","))
    for name in frameworks.split(","):
        if name in HOOKS:
            with contextlib.suppress(ImportError):
                HOOKS[name]()
    builtins.input = lambda *args: sys.exit("asks on stdin")
    divert_writes()
    sys.addaudithook(refuse)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = ""
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
