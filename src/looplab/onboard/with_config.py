"""Start a script with other values: python with_config.py (seed=SEED | [FILE=]CONFIG) (SCRIPT | -m MODULE) [ARGUMENTS…]

With seed=SEED, only the constants that seed its generators are replaced: `torch.manual_seed(1)`, `SEED = 1`.

With FILE, a config file that the script always reads, such as config.yaml: it gets CONFIG wherever it opens FILE. A
gin file is followed by the values of CONFIG, which is JSON then.
Otherwise CONFIG is JSON, and replaces constants.

The values of the config replace those that the script binds: at its top level (`LR = 0.1`, `CONFIG = {"lr": 0.1}`,
`cfg.lr = 0.1`), in a class (`class CFG: lr = 0.1`), in a function (`def main(): lr = 0.1`, `def train(lr=0.1)`), in the
calls of a function (`Adam(model, lr=0.1)`), and in a module next to it (`config.py`). A `seed` that the script does not
bind is that of its calls: `random.seed(1)`. No file is changed.

Made by `looplab init` for scripts that have no options, or none for their seed. FILE is relative to the folder of this
program.
"""

from __future__ import annotations  # the interpreter of the script may be older than looplab's

import ast
import builtins
import importlib.util
import io
import json
import os
import sys
from typing import Any


def literal(value: object, old: ast.AST) -> Any:
    return ast.copy_location(ast.parse(repr(value), mode="eval").body, old)


def replaced(node: Any, new: Any) -> Any:
    """Return an expression with another value; of a table only the entries that the value has."""
    if isinstance(new, dict) and isinstance(node, ast.Dict):
        for index, key in enumerate(node.keys):
            if isinstance(key, ast.Constant) and key.value in new:
                node.values[index] = replaced(node.values[index], new[key.value])
        return node
    if isinstance(new, dict) and isinstance(node, ast.Call):
        for item in node.keywords:
            if item.arg in new:
                item.value = replaced(item.value, new[item.arg])
        if node.args and isinstance(node.args[0], ast.Dict):
            replaced(node.args[0], new)
        return node
    return node if isinstance(new, dict) else literal(new, node)


def path_of(target: ast.AST) -> list[str] | None:
    """Return the names of `a`, `a.b` or `a["b"]`; None: it is something else."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute):
        above = path_of(target.value)
        return None if above is None else [*above, target.attr]
    if isinstance(target, ast.Subscript):
        key = getattr(target.slice, "value", None)
        key = key.value if isinstance(key, ast.Constant) else key  # before Python 3.9
        above = path_of(target.value) if isinstance(key, str) else None
        return None if above is None else [*above, str(key)]
    return None


def find(values: dict[str, Any], path: list[str] | None) -> Any:
    node: Any = values
    for name in path or ["?"]:
        if not isinstance(node, dict) or name not in node:
            return None
        node = node[name]
    return node


def rebind(body: list[Any], values: dict[str, Any]) -> None:
    """Replace the constants that statements bind."""
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # lr, epochs = 0.1, 10
                for index, item in enumerate(target.elts[: len(node.value.elts)]):
                    new = find(values, path_of(item))
                    if new is not None:
                        node.value.elts[index] = replaced(node.value.elts[index], new)
                continue
            new = find(values, path_of(target))
            if new is not None and node.value is not None:
                node.value = replaced(node.value, new)
        elif isinstance(node, (ast.If, ast.With)):
            rebind(node.body, values)
        elif isinstance(node, ast.ClassDef) and isinstance(values.get(node.name), dict):
            rebind(node.body, values[node.name])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(values.get(node.name), dict):
            rebind_defaults(node.args, values[node.name])
            rebind(node.body, values[node.name])


def rebind_defaults(arguments: ast.arguments, values: dict[str, Any]) -> None:
    first = len(arguments.args) - len(arguments.defaults)
    for index, old in enumerate(arguments.defaults):
        if arguments.args[first + index].arg in values:
            arguments.defaults[index] = literal(values[arguments.args[first + index].arg], old)
    for index, default in enumerate(arguments.kw_defaults):
        if default is not None and arguments.kwonlyargs[index].arg in values:
            arguments.kw_defaults[index] = literal(values[arguments.kwonlyargs[index].arg], default)


def rebind_calls(tree: ast.Module, values: dict[str, Any]) -> None:
    """Replace keyword arguments: of `optim.Adam(…, lr=0.1)` those in `values["Adam"]`."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if isinstance(values.get(name), dict):
                for item in node.keywords:
                    if name in own and item.arg not in SEED_NAMES:
                        continue  # the function itself has its values
                    if item.arg in values[name] and isinstance(item.value, (ast.Constant, ast.UnaryOp, ast.BinOp)):
                        item.value = literal(values[name][item.arg], item.value)


SEEDS = ("seed", "manual_seed", "manual_seed_all", "set_seed", "set_random_seed", "seed_everything")
"""Functions that seed a generator with their first argument."""
JAX_KEYS = ("PRNGKey",)
"""Functions of JAX that make a generator from their first argument."""
SEED_NAMES = ("seed", "random_seed", "manual_seed", "rng_seed", "torch_seed", "global_seed")
"""Variables and parameters that hold a seed, in lower case."""


def is_whole(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def seed_places(tree: ast.Module, names: bool = True) -> list[tuple[Any, Any]]:
    """Return where a script has the constants that seed its generators: lists or nodes, and an index or a field.

    Those of `Random(1)` and `default_rng(1)` do not count, because such generators often make the data.

    Args:
        names: Whether variables and parameters count, too: `SEED = 1`, `def set_seed(seed=1)`.
    """
    found: list[tuple[Any, Any]] = []
    keys: list[tuple[Any, Any]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in JAX_KEYS and is_whole(node.args[0]):
                keys.append((node.args, 0))
            elif name in SEEDS:
                first = node.args[0]
                if is_whole(first):
                    found.append((node.args, 0))
                elif isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):  # 1337 + rank
                    found += [(first, side) for side in ("left", "right") if is_whole(getattr(first, side))]
        elif names and isinstance(node, ast.Assign) and len(node.targets) == 1 and is_whole(node.value):
            if getattr(node.targets[0], "id", "").lower() in SEED_NAMES:
                found.append((node, "value"))
        elif names and isinstance(node, ast.FunctionDef) and "seed" in node.name:
            first_default = len(node.args.args) - len(node.args.defaults)
            for index, default in enumerate(node.args.defaults):
                if node.args.args[first_default + index].arg in SEED_NAMES and is_whole(default):
                    found.append((node.args.defaults, index))
    return found + (keys if len(keys) == 1 else [])  # of several, one may make the data


def rebind_seeds(tree: ast.Module, seed: object, names: bool = False) -> None:
    """Replace the constants that generators are seeded with."""
    for owner, place in seed_places(tree, names):
        if isinstance(owner, list):
            owner[place] = literal(seed, owner[place])
        else:
            setattr(owner, place, literal(seed, getattr(owner, place)))


def compiled(file: str, values: dict[str, Any], seed: int | None = None) -> Any:
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read(), file)
    if seed is not None:
        rebind_seeds(tree, seed, names=True)
    rebind(tree.body, values)
    rebind_calls(tree, values)
    magics = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)]
    if any(
        getattr(node.value.func, "id", None) == "get_ipython" for node in magics if isinstance(node.value, ast.Call)
    ):
        builtins.get_ipython = NoShell  # type: ignore[attr-defined]
    if isinstance(values.get("seed"), int):
        rebind_seeds(tree, values["seed"])
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def open_instead(file: str, config: str) -> None:
    """Make `open` return another file than this one, for reading."""
    plain, beside = io.open, os.path.dirname(os.path.abspath(__file__))
    wanted = os.path.realpath(os.path.join(beside, file))

    def replacing(path: Any, mode: str = "r", *others: Any, **named: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and not set(mode) & set("wax+"):
            text = os.fspath(path)
            if isinstance(text, str) and wanted in (
                os.path.realpath(text),
                os.path.realpath(os.path.join(beside, text)),
            ):
                if file.endswith(".gin") and path != config:
                    builtins.open = io.open = plain
                    try:
                        return with_bindings(wanted, config)
                    finally:
                        builtins.open = io.open = replacing  # type: ignore[assignment]
                path = config
        return plain(path, mode, *others, **named)

    builtins.open = io.open = replacing  # type: ignore[assignment]


def with_bindings(file: str, config: str) -> Any:
    """Return a gin file, followed by the values of the config as bindings, which win."""

    def flat(values: dict[str, Any], above: str) -> list[str]:
        found = []
        for key, value in values.items():
            found += flat(value, above + key + ".") if isinstance(value, dict) else [f"{above}{key} = {value!r}"]
        return found

    with open(config, encoding="utf-8") as text:
        bindings = flat(json.load(text), "")
    with open(file, encoding="utf-8") as text:
        return io.StringIO("\n".join([text.read(), *bindings, ""]))


class NoShell:
    """Stands for IPython in a script that was exported from a notebook: its magics do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def main() -> None:
    config_file, script, *arguments = sys.argv[1:]
    config, seed = {}, None
    file, sign, instead = config_file.partition("=")
    if file == "seed" and instead.isdigit():
        seed = int(instead)
    elif sign and not os.path.exists(config_file):
        open_instead(file, os.path.abspath(instead))
    else:
        with open(config_file, encoding="utf-8") as text:
            config = json.load(text)
    package = None
    if script == "-m":
        name, *arguments = arguments
        sys.path[0] = ""
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
        if spec is None or spec.origin is None:
            sys.exit("there is no module " + name)
        script, package = spec.origin, spec.parent
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    sys.argv = [script, *arguments]
    for key, values in config.items():
        beside = os.path.join(os.path.dirname(os.path.abspath(script)), key + ".py")
        is_script = os.path.realpath(beside) == os.path.realpath(script)
        if isinstance(values, dict) and key.isidentifier() and os.path.isfile(beside) and not is_script:
            imported = type(sys)(key)
            imported.__file__ = beside
            sys.modules[key] = imported
            exec(compiled(beside, values), imported.__dict__)  # noqa: S102 (this program is there to run the script)
    module = type(sys)("__main__")
    module.__file__ = script
    module.__package__ = package
    sys.modules["__main__"] = module
    exec(compiled(script, config, seed), module.__dict__)  # noqa: S102 (this program is there to run the script)


if __name__ == "__main__":
    main()
