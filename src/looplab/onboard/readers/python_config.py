"""Config files in Python with values that words override: mmengine's `--cfg-options optimizer.lr=0.1`, LazyConfig."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looplab.onboard.base import MAX_SOURCE, MISSING, Interface, Script
from looplab.onboard.knobs import find_seed, suggest
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.readers.key_value import merge
from looplab.onboard.source import call_name, calls, constant, keyword
from looplab.untrusted import UntrustedError, read_bounded

MERGES = {"merge_from_dict": 0, "apply_overrides": 1}
"""Methods that change a config by what was typed, with the position of that argument."""
TABLES = ("dict", "Dict", "ConfigDict")
PARENTS = "_base_"
"""Files whose config a config extends."""
MAX_PARENTS = 20


class PythonConfigReader:
    """A script that reads a Python file as its config and merges `key=value` words into it. The file is not executed:
    only its constants count."""

    name = "Python config"

    def read(self, script: Script) -> Interface | None:
        option = _option(script)
        path = next((path for word in script.arguments if (path := _config_path(script, word)) is not None), None)
        if option is None or path is None:
            return None
        base = _read_file(path, MAX_PARENTS)
        overrides = [word for word in script.arguments if "=" in word and not word.startswith("-")]
        for key, _, value in (word.partition("=") for word in overrides):
            merge(base, _nested(key.split("."), constant(_parsed(value))))
        seed = find_seed(tuple(settings_in(base)))
        notes = []
        if seed is not None and _leaf(base, seed) is None:
            merge(base, _nested(seed.split("."), 0))
            notes.append(f"{path.name} has no {seed}: runs get 0, and the judge's others")
        settings = tuple(settings_in(base))
        wanted = [one.name for one in settings if one.name == seed or suggest(one).role in ("knob", "length")]
        if not wanted:
            return None
        words = (f"{name}={{config.{name}}}" for name in wanted)
        typed = (word for word in script.arguments if word not in (option, *overrides))
        command = (*script.prefix, *typed, *((option,) if option.startswith("-") else ()), *words)
        reached = tuple(one for one in settings if one.name in wanted)
        return Interface(self.name, reached, command, {"as": "file"}, base=_only(base, wanted), notes=tuple(notes))


def _option(script: Script) -> str | None:
    """Return the option whose words are merged into the config, or the name of the positional argument; None: there is
    none."""
    typed = {
        node.attr
        for tree in script.modules
        for method, position in MERGES.items()
        for call in calls(tree, method)
        if len(call.args) > position and isinstance(node := call.args[position], ast.Attribute)
    }
    for tree in script.modules:
        for call in calls(tree, "add_argument"):
            names = [word for word in map(constant, call.args) if isinstance(word, str)]
            is_dict = "Dict" in call_name(keyword(call, "action") or ast.Constant(None))  # mmengine's DictAction
            found = next((word for word in names if is_dict or word.lstrip("-").replace("-", "_") in typed), None)
            if found is not None:
                return found
    return None


def _config_path(script: Script, word: str) -> Path | None:
    """Return the Python file that a word of the command names; None: it names none, or the script."""
    path = script.folder / word.rpartition("=")[2]
    return path if path.suffix == ".py" and path.is_file() and path.resolve() != script.path.resolve() else None


def _read_file(path: Path, depth: int) -> dict[str, Any]:
    """Return the constants that a config file binds, on top of those of the files that it extends."""
    try:
        tree = ast.parse(read_bounded(path, MAX_SOURCE))
    except (OSError, UntrustedError, SyntaxError, ValueError, RecursionError):
        return {}
    names: dict[str, Any] = {}
    for target, value in _assignments(tree):
        found = _value(value, names)
        if found is not MISSING:
            merge(names, _nested(target, found))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    parents = names.pop(PARENTS, [])
    # A number that the file itself uses has been copied when words are merged: to override it changes nothing.
    names = {name: value for name, value in names.items() if isinstance(value, dict) or name not in used}
    base: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents if depth else ():
        merge(base, _read_file(path.parent / str(parent), depth - 1))
    merge(base, names)
    return base


def _assignments(tree: ast.Module) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield what the file binds: `lr = 0.1`, `train.lr = 0.1`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            parts = ast.unparse(node.targets[0]).split(".")
            if all(part.isidentifier() for part in parts):
                yield parts, node.value


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression of constants, tables and earlier names; MISSING: it is none."""
    if isinstance(node, ast.Dict):
        pairs = [(constant(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and (
        isinstance(node.func, ast.Call)  # L(SGD)(lr=0.1)
        or call_name(node.func).rpartition(".")[2] in TABLES
    ):
        pairs = [(item.arg, item.value) for item in node.keywords]
    else:
        return constant(node, names)
    found = {key: _value(value, names) for key, value in pairs if isinstance(key, str)}
    return {key: value for key, value in found.items() if value is not MISSING}


def _parsed(text: str) -> ast.expr:
    """Return a typed value as an expression; what is not one is a text."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return ast.Constant(text)


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def _leaf(base: Mapping[str, Any], name: str) -> Any:
    value: Any = base
    for part in name.split("."):
        value = value[part]
    return value


def _only(base: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the part of a config with these leaves."""
    found: dict[str, Any] = {}
    for name in names:
        merge(found, _nested(name.split("."), _leaf(base, name)))
    return found
