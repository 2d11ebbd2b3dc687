"""Words such as `lr=0.1` or `--lr=0.1` that a script merges into a config of its own: OmegaConf, CfgNode, Sacred."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script
from looplab.onboard.readers.config_file import config_in, names_in_source
from looplab.onboard.readers.constants import bound
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, calls, constant


class KeyValueReader:
    """A script that merges `key=value` words into its config; the defaults are in its source, or in a file it loads."""

    name = "key=value"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None:
            return None
        for find in (self._omegaconf, self._config_node, self._sacred):
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
                _merge(base, _created(call, tree))
        for name in names_in_source(script):
            _merge(base, config_in(script, name) or {})
        rendering = {"as": "hydra"}
        return self._interface(script, "OmegaConf", base, (*script.argv, "{overrides}"), rendering)

    def _config_node(self, script: Script) -> Interface | None:
        """`config.merge_from_args(sys.argv[1:])`, as in minGPT: `--trainer.learning_rate=0.1`."""
        merges = [call for tree in script.modules for call in calls(tree, "merge_from_args")]
        if not merges:
            return None
        base: dict[str, Any] = {}
        for tree in reversed(script.modules):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and "config" in node.name:
                    _merge(base, _root(bound(node.body)))
        rendering = {"as": "flags", "case": "snake", "booleans": "value", "separator": "equals"}
        return self._interface(script, "CfgNode", base, (*script.argv, "{flags}"), rendering)

    def _sacred(self, script: Script) -> Interface | None:
        """`@ex.config` of Sacred: `with lr=0.1`."""
        if "sacred" not in script.imports:
            return None
        base: dict[str, Any] = {}
        for tree in script.modules:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and any(
                    call_name(item).endswith(".config") for item in node.decorator_list
                ):
                    _merge(base, bound(node.body))
            for call in calls(tree, "add_config"):
                values = {item.arg: constant(item.value) for item in call.keywords if item.arg is not None}
                _merge(base, {name: value for name, value in values.items() if value is not MISSING})
        if not base:
            return None
        base.setdefault("seed", 1)  # Sacred has one of its own
        return self._interface(
            script, "Sacred", base, (*script.argv, "with", "{overrides}"), {"as": "hydra", "only": "all"}
        )

    def _interface(
        self, script: Script, name: str, base: dict[str, Any], command: tuple[str, ...], rendering: Mapping[str, Any]
    ) -> Interface | None:
        settings = tuple(settings_in(base))
        if not settings:
            return None
        return Interface(name, settings, command, rendering, base=base)


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


def _root(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is below the only name: `C.trainer.lr = 0.1` is `trainer.lr`."""
    tables = [value for value in values.values() if isinstance(value, dict)]
    return tables[0] if len(tables) == 1 and len(values) == 1 else values


def _merge(base: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value
