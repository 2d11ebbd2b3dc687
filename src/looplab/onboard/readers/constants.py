"""Scripts without a command line: constants in the file, or tables of them.

Such a script is started by a small program in the lab (`with_config.py`), which replaces the constants by the values of
the run's config and leaves the file as it is.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script
from looplab.onboard.knobs import is_seed, suggest, words_of
from looplab.onboard.readers.arguments import with_flags
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, constant, module_of

RUNNER = "with_config.py"
"""Name of the small program in the lab."""
TABLES = {
    *(
        "dict",
        "SimpleNamespace",
        "Namespace",
        "EasyDict",
        "edict",
        "ConfigDict",
        "AttrDict",
        "DotDict",
        "DotMap",
        "Box",
    ),
    *("Munch", "Bunch", "OmegaConf.create", "create", "Config", "Args"),
}
"""Calls whose keyword arguments are a table."""
MODULES = ("config", "configs", "cfg", "conf", "settings", "params", "hparams", "hyperparameters", "constants", "const")
"""Modules beside a script that hold constants."""
DATA = {"split", "fold", "make", "load", "print", "info", "subplots", "linspace"}
"""Words in the names of functions whose arguments are not hyper-parameters."""
MAX_TEXT = 200


class ConstantsReader:
    """Constants at the top of the file, in tables, classes and functions; else those in calls, and in a `config.py`."""

    name = "constants"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None or script.python is None:
            return None
        base: dict[str, Any] = {}
        for name in _imported(script.tree):
            if name in MODULES and (tree := module_of(script, name)) is not None and (found := bound(tree.body)):
                base[name] = found
        base |= bound(script.tree.body, functions=_called(script.tree))
        if not any(suggest(setting).role == "knob" for setting in settings_in(base)):
            for name, values in _in_calls(script.tree).items():
                base.setdefault(name, values)
        settings = tuple(settings_in(base))
        if not any(suggest(setting).role in ("knob", "doubtful", "length") for setting in settings):
            return None
        words = ("-m", script.module) if script.module else (script.prefix[-1],)
        python = script.prefix[: len(script.prefix) - len(words)]
        command = (*python, RUNNER, "{config}", *words, *script.arguments)
        note = f"the script has no options: {RUNNER} sets its constants, and the file stays as it is"
        return with_flags(Interface(self.name, settings, command, {"as": "file"}, base=base, notes=(note,)), script)


def bound(body: Sequence[ast.stmt], functions: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the constants that statements bind, once and for all: names, tables, and the members of classes.

    Args:
        functions: Names of functions whose constants count too: their defaults, and what they bind.
    """
    found: dict[str, Any] = {}
    often = _bound_again(body)
    for node in _flat(body):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            _bind(found, target, node.value, often)
        elif isinstance(node, ast.ClassDef) and not _is_network(node):
            _keep(found, node.name, bound(node.body))
        elif isinstance(node, ast.FunctionDef) and node.name in functions:
            _keep(found, node.name, {**_defaults(node.args), **bound(node.body)})
    return found


def _bind(found: dict[str, Any], target: ast.expr, value: ast.expr | None, often: set[str]) -> None:
    path = _path(target)
    if path is None or path[0] in often or path[0].startswith("_"):
        return
    table = _table(value)
    new: Any = constant(value) if table is None else table
    if new is MISSING or not (isinstance(new, dict) or _is_scalar(new)):
        return
    for part in path[:-1]:
        found = found.setdefault(part, {})
        if not isinstance(found, dict):
            return
    if isinstance(new, dict) and isinstance(found.get(path[-1]), dict):
        found[path[-1]] |= new
    elif new != {}:
        found[path[-1]] = new


def _keep(found: dict[str, Any], name: str, values: dict[str, Any]) -> None:
    if values:
        found[name] = values


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and those of `if __name__ == …:` and the like."""
    for node in body:
        if isinstance(node, ast.If | ast.With):
            yield from _flat(node.body)
        else:
            yield node


def _bound_again(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that are bound more than once, in a loop, or from inside a function: they are state."""
    counts: Counter[str] = Counter()
    for node in body:
        for item in _in_scope(node):
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store | ast.Del):
                counts[item.id] += 1
            if isinstance(item, ast.AugAssign | ast.For | ast.While):
                inside = [name for name in ast.walk(item) if isinstance(name, ast.Name)]
                counts.update(name.id for name in inside if isinstance(name.ctx, ast.Store))
        for item in ast.walk(node):
            if isinstance(item, ast.Global | ast.Nonlocal):
                counts.update([*item.names, *item.names])
    return {name for name, count in counts.items() if count > 1}


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is below it in the same scope."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _in_scope(child)


def _is_network(node: ast.ClassDef) -> bool:
    return any(call_name(item).rpartition(".")[2] in ("Module", "Model", "Dataset", "Enum") for item in node.bases)


def _path(target: ast.AST) -> list[str] | None:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute):
        above = _path(target.value)
        return None if above is None or above[0] == "self" else [*above, target.attr]
    if isinstance(target, ast.Subscript) and isinstance(key := constant(target.slice), str):
        above = _path(target.value)
        return None if above is None else [*above, key]
    return None


def _table(node: ast.AST | None) -> dict[str, Any] | None:
    """Return the constants of a table; None: it is not one."""
    pairs: list[tuple[Any, ast.expr]] = []
    if isinstance(node, ast.Dict):
        pairs = [(constant(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and call_name(node).rpartition(".")[2] in TABLES:
        pairs = [(item.arg, item.value) for item in node.keywords]
        if node.args and isinstance(node.args[0], ast.Dict):
            return {
                **(_table(node.args[0]) or {}),
                **{key: v for key, item in pairs if (v := constant(item)) is not MISSING},
            }
    else:
        return None
    found: dict[str, Any] = {}
    for name, value in pairs:
        if not isinstance(name, str):
            continue
        inner = _table(value)
        if inner:
            found[name] = inner
        elif inner is None and _is_scalar(known := constant(value)):
            found[name] = known
    return found


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MAX_TEXT)


def _defaults(arguments: ast.arguments) -> dict[str, Any]:
    """Return the defaults of a function's parameters that are constants."""
    last = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(last, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    values = {parameter.arg: constant(default) for parameter, default in pairs}
    return {name: value for name, value in values.items() if value is not MISSING and _is_scalar(value)}


def _called(tree: ast.Module) -> frozenset[str]:
    """Return the functions that the module calls by itself, without the arguments that have defaults."""
    found = set()
    for node in _flat(tree.body):
        if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            found.add(call_name(node.value))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if len(found & functions.keys()) == 1:  # main(), which may call train()
        (first,) = found & functions.keys()
        found |= {
            call_name(call)
            for call in ast.walk(functions[first])
            if isinstance(call, ast.Call) and "train" in call_name(call) and not call.keywords
        }
    return frozenset(found)


def _in_calls(tree: ast.Module) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of calls that look like hyper-parameters: `Adam(lr=0.1)`, `fit(epochs=5)`."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found: dict[str, dict[str, Any]] = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or (name := call_name(call).rpartition(".")[2]) in own or not name:
            continue
        if DATA & set(words_of(name)):
            continue
        values = {item.arg: constant(item.value) for item in call.keywords if item.arg is not None}
        for setting in settings_in({key: value for key, value in values.items() if _is_scalar(value)}):
            if suggest(setting).role in ("knob", "length") or is_seed(setting):
                found.setdefault(name, {}).setdefault(setting.name, setting.default)
    return found


def _imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found
