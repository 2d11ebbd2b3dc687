"""Scripts that take their settings from `wandb.config` alone, as those of W&B sweeps do."""

from __future__ import annotations

import ast
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import calls, constant, keyword, module_constants


class WandbConfigReader:
    """`wandb.init(config={…})` with values that the script then reads from `wandb.config`."""

    name = "wandb.config"

    def read(self, script: Script) -> Interface | None:
        if "wandb" not in script.imports:
            return None
        defaults: dict[str, Any] = {}
        reads = False
        for tree in script.modules:
            names = module_constants(tree)
            tables = {
                node.targets[0].id: node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for call in calls(tree, "init"):
                defaults |= _table(keyword(call, "config"), names, tables)
            reads = reads or "wandb.config" in ast.unparse(tree) or "run.config" in ast.unparse(tree)
        settings = tuple(ScriptSetting(name, kind_of(value), value) for name, value in defaults.items())
        if not reads or not settings:
            return None
        return Interface(self.name, settings, script.argv, {"as": "wandb"})


def _table(node: ast.expr | None, names: dict[str, Any], tables: dict[str, ast.expr]) -> dict[str, Any]:
    if isinstance(node, ast.Name) and node.id in tables:
        node = tables[node.id]
    if isinstance(node, ast.Dict):
        pairs = [(constant(key), constant(value, names)) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        pairs = [(item.arg, constant(item.value, names)) for item in node.keywords]
    else:
        return {}
    return {key: value for key, value in pairs if isinstance(key, str) and value is not MISSING}
