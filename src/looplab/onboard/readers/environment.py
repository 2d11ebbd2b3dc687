"""Environment variables: `os.environ.get("LR", "0.1")`, `${LR:-0.1}`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import call_name, constant

SHELL_DEFAULT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):?[-=]([^}$`]*)\}")
COMMON = {
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHON",
    "PYTHONPATH",
    "RANK",
    "TMPDIR",
    "USER",
    "WORLD_SIZE",
    "WANDB_MODE",
    "WANDB_PROJECT",
    "WANDB_API_KEY",
    "HF_HOME",
}
"""Variables that are not settings of a training."""


class EnvironmentReader:
    """A script that reads its settings from the environment, with defaults."""

    name = "environment"

    def read(self, script: Script) -> Interface | None:
        found: dict[str, Any] = {}
        for tree in script.modules:
            found |= dict(_variables(tree))
        if script.python is None:
            found |= {name: _number(value) for name, value in SHELL_DEFAULT.findall(script.text)}
        settings = [ScriptSetting(name, kind_of(value), value) for name, value in found.items() if name not in COMMON]
        if not any(setting.kind in ("int", "float") for setting in settings):
            return None
        return Interface(self.name, tuple(settings), script.argv, {"as": "env"})


def _variables(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and call_name(node) in ("os.environ.get", "environ.get", "os.getenv", "getenv"):
            words = [constant(item) for item in node.args]
            if len(words) == 2 and isinstance(words[0], str) and words[1] is not MISSING and words[1] is not None:
                yield words[0], _number(words[1])


def _number(value: Any) -> Any:
    """Return the number that a text stands for, else the text."""
    if not isinstance(value, str):
        return value
    for parse in (int, float):
        try:
            return parse(value)
        except ValueError:
            continue
    return value
