"""gin-config: bindings in .gin files, and an option that takes further ones: `--gin_param=train.lr=0.1`."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.knobs import find_seed, suggest
from looplab.onboard.readers.config_file import RUNNER, with_runner
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import calls, constant, keyword
from looplab.untrusted import UntrustedError, read_bounded

MAX_FILE = 1 << 20
BINDING = re.compile(r"(?P<name>[A-Za-z_][\w.]*)\s*=\s*(?P<value>.+?)\s*(?:#.*)?$")
INCLUDE = re.compile(r"include\s+(['\"])(?P<file>.+?)\1")
PARSERS = ("parse_config_files_and_bindings", "parse_config")
"""Functions of gin that take bindings."""


class GinReader:
    """The constants in the .gin files of the call.

    They are passed through the option that takes bindings, else added to the file when the script opens it.
    """

    name = "gin"

    def read(self, script: Script) -> Interface | None:
        if "gin" not in script.imports:
            return None
        base: dict[str, Any] = {}
        for file in _gin_files(script):
            base |= dict(_bindings(script, file, seen=set()))
        settings = [ScriptSetting(name, kind_of(value), value) for name, value in base.items()]
        if not settings:
            return None
        seed = find_seed(settings)
        wanted = [setting for setting in settings if suggest(setting).role != "other" or setting.name == seed]
        words = [_word(setting) for setting in wanted]
        notes: tuple[str, ...] = ()
        if (option := _binding_option(script)) is not None:
            flag, is_list = option
            command = [*script.argv, *([flag, *words] if is_list else [f"{flag}={word}" for word in words])]
        else:
            file = next(name for name in _gin_files(script) if _path(script, name) is not None)
            shown = os.path.relpath(_path(script, file) or file, script.folder)
            command = [*with_runner(script, f"{shown}={{config}}")]
            notes = (f"the script takes no bindings: {RUNNER} adds those of the run to {shown}",)
        nested: dict[str, Any] = {}
        for setting in wanted:
            *above, last = setting.name.split(".")
            node = nested
            for part in above:
                node = node.setdefault(part, {})
            node[last] = setting.default
        return Interface(self.name, tuple(wanted), tuple(command), {"as": "file"}, base=nested, notes=notes)


def _word(setting: ScriptSetting) -> str:
    place = f"{{config.{setting.name}}}"
    return f'{setting.name}="{place}"' if setting.kind == "str" else f"{setting.name}={place}"


def _binding_option(script: Script) -> tuple[str, bool] | None:
    """Return the flag that takes bindings, and whether it takes several words; None: there is none."""
    names = {
        node.attr
        for tree in script.modules
        for call in calls(tree, *PARSERS)
        for item in (call.args[1:2] or call.args[:1], [keyword(call, "bindings")])
        for part in item
        if part is not None
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
    }
    for tree in script.modules:
        for call in calls(tree, "add_argument", "DEFINE_multi_string", "DEFINE_string_list", "DEFINE_list"):
            words = [word for word in map(constant, call.args) if isinstance(word, str)]
            absl = not words or not words[0].startswith("-")
            flags = [f"--{words[0]}"] if absl and words else words
            flag = next((word for word in flags if word.startswith("--")), None)
            dest = constant(keyword(call, "dest"))
            if flag is None or (dest if isinstance(dest, str) else flag[2:].replace("-", "_")) not in names:
                continue
            several = constant(keyword(call, "nargs")) in ("*", "+")
            if absl or several or constant(keyword(call, "action")) in ("append", "extend"):
                return flag, several and constant(keyword(call, "action")) != "append"
    return None


def _gin_files(script: Script) -> Iterator[str]:
    """Yield the .gin files that the command names, else those that the source does."""
    typed = [word.rpartition("=")[2] for word in script.arguments if word.endswith(".gin")]
    in_source = [
        node.value
        for tree in script.modules
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".gin")
    ]
    yield from dict.fromkeys(typed or in_source)


def _path(script: Script, file: str) -> Path | None:
    return next((path for path in (script.folder / file, script.path.parent / file) if path.is_file()), None)


def _bindings(script: Script, file: str, seen: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the bindings of a file to constants, those of included files first."""
    path = _path(script, file)
    if path is None or file in seen:
        return
    seen.add(file)
    try:
        text = read_bounded(path, MAX_FILE).decode("utf-8", "replace")
    except (OSError, UntrustedError):
        return
    for line in text.splitlines():
        if (included := INCLUDE.match(line.strip())) is not None:
            yield from _bindings(script, included["file"], seen)
        elif (found := BINDING.match(line)) is not None:
            try:
                value = constant(ast.parse(found["value"], mode="eval").body)
            except (SyntaxError, ValueError):
                continue
            if value is not MISSING and isinstance(value, bool | int | float | str):
                yield found["name"], value
