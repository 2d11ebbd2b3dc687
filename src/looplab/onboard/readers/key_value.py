"""Words such as `lr=0.1` or `--lr=0.1` that a script merges into a config of its own: OmegaConf, CfgNode, Sacred."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.config_file import config_in, names_in_source
from looplab.onboard.readers.constants import bound, path_of
from looplab.onboard.readers.environment import parse_number
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, calls, constant


class KeyValueReader:
    """A script that merges `key=value` words into its config; the defaults are in its source, or in a file it loads."""

    name = "key=value"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None:
            return None
        for find in (self._omegaconf, self._config_node, self._yacs, self._sacred, self._positional):
            found = find(script)
            if found is not None:
                return found
        return None

    def _omegaconf(self, script: Script) -> Interface | None:
        """`OmegaConf.from_cli()`: `optim.lr=0.1`."""
        if not any(call_name(call).endswith("from_cli") for tree in script.modules for call in calls(tree, "from_cli")):
            return None
        base: dict[str, Any] = {}
        for tree in script.modules:
            for call in calls(tree, "structured", "create"):
                merge(base, _created(call, tree))
        for name in names_in_source(script):
            merge(base, config_in(script, name) or {})
        rendering = {"as": "hydra"}
        return self._interface(script, "OmegaConf", base, (*script.argv, "{overrides}"), rendering)

    def _config_node(self, script: Script) -> Interface | None:
        """`config.merge_from_args(sys.argv[1:])`, as in minGPT: `--trainer.learning_rate=0.1`."""
        merges = [call for tree in script.modules for call in calls(tree, "merge_from_args")]
        if not merges:
            return None
        base: dict[str, Any] = {}
        defaults = {
            f"{owner.name}.{node.name}": _root(bound(node.body))
            for tree in script.modules
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.FunctionDef) and "config" in node.name
        }
        functions = [
            node for tree in reversed(script.modules) for node in tree.body if isinstance(node, ast.FunctionDef)
        ]
        for node in functions:
            if "config" in node.name:
                merge(base, _composed(node, defaults))
        for values in defaults.values() if not base else ():
            merge(base, values)
        # Many of them read values as Python does, and a path is not a literal of Python.
        texts = [setting.name for setting in settings_in(base) if setting.kind == "str"]
        rendering: dict[str, Any] = {"as": "flags", "case": "snake", "booleans": "value", "separator": "equals"}
        rendering |= {"skip": texts} if texts else {}
        return self._interface(script, "CfgNode", base, (*script.argv, "{flags}"), rendering)

    def _sacred(self, script: Script) -> Interface | None:
        """`@ex.config` of Sacred, or of something like it: `with lr=0.1`."""
        functions = [node for tree in script.modules for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        if "sacred" not in script.imports and not any(_is_decorated(node, ".automain") for node in functions):
            return None
        base: dict[str, Any] = {}
        for node in functions:
            if _is_decorated(node, ".config"):
                merge(base, bound(node.body))
        for tree in script.modules:
            for call in calls(tree, "add_config"):
                values = {item.arg: constant(item.value) for item in call.keywords if item.arg is not None}
                merge(base, {name: value for name, value in values.items() if value is not MISSING})
        if not base:
            return None
        base.setdefault("seed", 1)  # Sacred has one of its own
        return self._interface(
            script, "Sacred", base, (*script.argv, "with", "{overrides}"), {"as": "hydra", "only": "all"}
        )

    def _yacs(self, script: Script) -> Interface | None:
        """`cfg.merge_from_list(args.opts)`: `SOLVER.BASE_LR 0.1`."""
        if not any(True for tree in script.modules for _ in calls(tree, "merge_from_list")):
            return None
        base: dict[str, Any] = {}
        for tree in reversed(script.modules):
            tables = bound(tree.body)
            merge(
                base,
                next((tables[name] for name in ("_C", "cfg", "__C", "C") if isinstance(tables.get(name), dict)), {}),
            )
        for word in script.arguments:
            merge(base, config_in(script, word.rpartition("=")[2]) or {})
        wanted = [setting for setting in settings_in(base) if suggest(setting).role != "other"]
        words = [word for setting in wanted for word in (setting.name, f"{{config.{setting.name}}}")]
        return self._interface(script, "yacs", base, (*script.argv, *words), {"as": "file"})

    def _positional(self, script: Script) -> Interface | None:
        """`lr = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1`."""
        found: dict[int, tuple[str, Any]] = {}
        for node in ast.walk(script.tree) if script.tree is not None else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                places = {index for item in ast.walk(node.value) if (index := _argv_index(item)) is not None}
                default = constant(node.value.orelse) if isinstance(node.value, ast.IfExp) else MISSING
                if len(places) == 1:
                    (place,) = places
                    given = script.arguments[place - 1] if 0 < place <= len(script.arguments) else None
                    found[place] = (node.targets[0].id, parse_number(given) if given is not None else default)
        if not found or sorted(found) != list(range(1, len(found) + 1)):
            return None
        base = {name: value for _, (name, value) in sorted(found.items())}
        if MISSING in base.values() or len(base) != len(found):
            return None
        command = (*script.prefix, *(f"{{config.{name}}}" for name in base))
        return self._interface(script, "sys.argv", base, command, {"as": "file"})

    def _interface(
        self, script: Script, name: str, base: dict[str, Any], command: tuple[str, ...], rendering: Mapping[str, Any]
    ) -> Interface | None:
        settings = tuple(settings_in(base))
        if not settings:
            return None
        return Interface(name, settings, command, rendering, base=base)


def _is_decorated(node: ast.FunctionDef, name: str) -> bool:
    return any(call_name(item).endswith(name) for item in node.decorator_list)


def _argv_index(node: ast.AST) -> int | None:
    """Return N of `sys.argv[N]`; None: it is something else."""
    if isinstance(node, ast.Subscript) and call_name(node.value) in ("sys.argv", "argv"):
        index = constant(node.slice)
        return index if isinstance(index, int) and index > 0 else None
    return None


def _created(call: ast.Call, tree: ast.Module) -> dict[str, Any]:
    """Return the config of `OmegaConf.structured(Config)` or `OmegaConf.create({…})`."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Call) and not first.args:
        first = first.func
    if isinstance(first, ast.Name):
        values = bound(tree.body)
        found = values.get(first.id)
        return _nested(found, tree) if isinstance(found, dict) else {}
    table = bound([ast.Assign([ast.Name("config", ast.Store())], first)]) if first is not None else {}
    found = table.get("config")
    return found if isinstance(found, dict) else {}


def _nested(values: dict[str, Any], tree: ast.Module) -> dict[str, Any]:
    """Return the fields of a dataclass with those of its nested ones: `optim: Optim = field(default_factory=Optim)`."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    owner = next((node for node in classes.values() if bound(node.body) == values), None)
    for item in owner.body if owner is not None else ():
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            inner = ast.unparse(item.annotation)
            if inner in classes and inner != getattr(owner, "name", None):
                values = {**values, item.target.id: _nested(bound(classes[inner].body), tree)}
    return values


def _composed(function: ast.FunctionDef, defaults: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the config that a function composes of those of others: `C.trainer = Trainer.get_default_config()`.

    Args:
        defaults: The configs that methods return, by class and method.
    """
    found: dict[str, Any] = {}
    for node in function.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.targets[0], ast.Attribute)
        ):
            values = defaults.get(".".join(call_name(node.value).split(".")[-2:]))
            _, *path = path_of(node.targets[0]) or [""]
            for part in reversed(path):
                values = {part: values} if values is not None else None
            merge(found, values or {})
    merge(found, _root(bound(function.body)))
    return found


def _root(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is below the only name: `C.trainer.lr = 0.1` is `trainer.lr`."""
    tables = [value for value in values.values() if isinstance(value, dict)]
    return tables[0] if len(tables) == 1 and len(values) == 1 else values


def merge(base: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add the values of another config to one, whose values it replaces."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value
