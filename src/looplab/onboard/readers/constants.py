"""Scripts without a command line: constants in the file, or tables of them.

Such a script is started by a small program in the lab (`with_config.py`), which replaces the constants by the values of
the run's config and leaves the file as it is.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script
from looplab.onboard.knobs import find_seed, is_seed, suggest, words_of
from looplab.onboard.readers.config_file import RUNNER, with_runner
from looplab.onboard.readers.flags import with_flags
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, calls, constant, module_of
from looplab.onboard.with_config import seed_places

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
DATA = {"field", "split", "fold", "make", "load", "print", "info", "subplots", "linspace"}
"""Words in the names of functions whose arguments are not hyper-parameters."""
TRAINS = ("fit", "train", "compile", "clip_grad_norm_")
"""Functions whose arguments are hyper-parameters, beside classes."""
MAX_TEXT = 200


class ConstantsReader:
    """Constants at the top of the file, in tables, classes and functions; else those in calls, and in a `config.py`."""

    name = "constants"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None or script.python is None or script.program is not None:
            return None
        base: dict[str, Any] = {}
        for name in _imported(script.tree):
            if name in MODULES and (tree := module_of(script, name)) is not None and (found := bound(tree.body)):
                base[name] = found
        base |= bound(script.tree.body, functions=_called(script.tree))
        unused = _unused_classes(script.modules)
        for table in (base, *(base[name] for name in MODULES if isinstance(base.get(name), dict))):
            for name in unused & table.keys():
                del table[name]
        known = {setting.name.rpartition(".")[2].lower() for setting in settings_in(base)}
        has_knob = any(suggest(setting).role == "knob" for setting in settings_in(base))
        for name, values in _in_calls(script.tree, doubtful=not has_knob).items():
            new = {key: value for key, value in values.items() if key.lower() not in known}
            if new and name not in base:
                base[name] = new
        seed = fixed_seed(script.tree)
        if seed is not None and find_seed(tuple(settings_in(base))) is None and "seed" not in base:
            base["seed"] = seed
        if find_seed(tuple(settings_in(base))) is None:
            for name, value in _seeds_of_own_calls(script.tree).items():
                base[name] = (
                    {**base.get(name, {}), "seed": value} if isinstance(base.get(name, {}), dict) else base[name]
                )
        settings = tuple(settings_in(base))
        if not any(suggest(setting).role in ("knob", "doubtful", "length") for setting in settings):
            return None
        command = with_runner(script)
        note = f"the script has no options: {RUNNER} sets its constants, and the file stays as it is"
        return with_flags(Interface(self.name, settings, command, {"as": "file"}, base=base, notes=(note,)), script)


def bound(body: Sequence[ast.stmt], functions: Mapping[str, frozenset[str]] | None = None) -> dict[str, Any]:
    """Return the constants that statements bind, once and for all: names, tables, and the members of classes.

    Args:
        functions: Functions whose constants count too, their defaults and what they bind; with the parameters that
            they are called with, which do not.
    """
    found: dict[str, Any] = {}
    often = _bound_again(body)
    for node in _flat(body):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            for one, value in _pairs(target, node.value):
                _bind(found, one, value, often)
        elif isinstance(node, ast.ClassDef) and not _is_network(node):
            _keep(found, node.name, bound(node.body))
        elif isinstance(node, ast.FunctionDef) and functions is not None and node.name in functions:
            values = {**_defaults(node.args), **bound(node.body)}
            _keep(found, node.name, {key: value for key, value in values.items() if key not in functions[node.name]})
    return found


def _unused_classes(trees: Sequence[ast.Module]) -> set[str]:
    """Return the classes that nothing uses, other than classes that nothing uses; none if they may be found by name."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if any(True for tree in trees for _ in calls(tree, "getattr", "globals", "eval", "import_module", "vars")):
        return set()
    parents: dict[str, set[str]] = {}
    used: set[str] = set()
    bases = {id(item) for node in classes.values() for base in node.bases for item in ast.walk(base)}
    for tree in trees:
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if name in classes and id(node) not in bases:
                used.add(name)
    for name, node in classes.items():
        parents[name] = {call_name(base).rpartition(".")[2] for base in node.bases} & classes.keys()
    while more := {parent for name in used for parent in parents[name]} - used:
        used |= more
    return set(classes) - used


def _pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return what an assignment binds: `lr, epochs = 0.1, 10` binds two names."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _bind(found: dict[str, Any], target: ast.expr, value: ast.expr | None, often: set[str]) -> None:
    path = path_of(target)
    if (
        path is None
        or path[:2] == ["os", "environ"]
        or path[0] in often
        or (len(path) == 1 and path[0].startswith("_"))
    ):
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


def path_of(target: ast.AST) -> list[str] | None:
    """Return the names of what an assignment binds: `C.trainer.lr` has three; None: it has none."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute):
        above = path_of(target.value)
        return None if above is None or above[0] == "self" else [*above, target.attr]
    if isinstance(target, ast.Subscript) and isinstance(key := constant(target.slice), str):
        above = path_of(target.value)
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
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= MAX_TEXT)


def _defaults(arguments: ast.arguments) -> dict[str, Any]:
    """Return the defaults of a function's parameters that are constants."""
    last = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(last, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    values = {parameter.arg: constant(default) for parameter, default in pairs}
    return {name: value for name, value in values.items() if value is not MISSING and _is_scalar(value)}


def _called(tree: ast.Module) -> dict[str, frozenset[str]]:
    """Return the functions that the module calls by itself, and the parameters that it passes."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, frozenset[str]] = {}

    def note(call: ast.Call) -> None:
        if (function := functions.get(call_name(call))) is not None:
            names = [parameter.arg for parameter in function.args.args]
            given = {*names[: len(call.args)], *(item.arg or "" for item in call.keywords)}
            found[function.name] = found.get(function.name, frozenset()) | given

    for node in _flat(tree.body):
        if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            note(node.value)
    if len(found) == 1:  # main(), which may call train()
        for call in ast.walk(functions[next(iter(found))]):
            if isinstance(call, ast.Call) and "train" in call_name(call):
                note(call)
    return found


def _in_calls(tree: ast.Module, *, doubtful: bool) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of calls that look like hyper-parameters: `Adam(lr=0.1)`, `fit(epochs=5)`.

    An argument that has several values in several calls of a function is left out: they cannot be distinguished.

    Args:
        doubtful: Whether those count too that only may be hyper-parameters, if no other is one.
    """
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    seen: dict[tuple[str, str], list[Any]] = {}
    for call in ast.walk(tree):
        name = call_name(call).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or not name or name in own or DATA & set(words_of(name)):
            continue
        if name[0].isupper() or name in TRAINS:
            for item in call.keywords:
                if item.arg is not None:
                    seen.setdefault((name, item.arg), []).append(constant(item.value))
    found: dict[str, dict[str, Any]] = {}
    perhaps: dict[str, dict[str, Any]] = {}
    for (name, key), values in seen.items():
        if any(value != values[0] for value in values) or not _is_scalar(values[0]):
            continue
        (setting,) = settings_in({key: values[0]})
        role = suggest(setting).role
        doubtful = doubtful and role != "knob"
        wanted = role in ("knob", "length") or is_seed(setting)
        (found if wanted else perhaps if role == "doubtful" else {}).setdefault(name, {})[key] = values[0]
    for name, others in perhaps.items() if doubtful else ():
        found[name] = {**others, **found.get(name, {})}
    return found


def _seeds_of_own_calls(tree: ast.Module) -> dict[str, int]:
    """Return the seeds that are passed to classes and functions of the script, `Agent(seed=0)`, by their names."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found: dict[str, set[Any]] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (name := call_name(call)) in own and not DATA & set(words_of(name)):
            for item in call.keywords:
                if item.arg == "seed":
                    found.setdefault(name, set()).add(constant(item.value))
    return {name: value for name, values in found.items() if len(values) == 1 and type(value := values.pop()) is int}


def fixed_seed(tree: ast.Module, *, names: bool = False) -> int | None:
    """Return the seed that is a constant in a script, which `with_config.py` can replace; None: there is none.

    Args:
        names: Whether `SEED = 1` counts, too, and not only `random.seed(1)`.
    """
    for owner, place in seed_places(tree, names):
        value = constant(owner[place] if isinstance(owner, list) else getattr(owner, place))
        if type(value) is int:
            return value
    return None


def _imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found
