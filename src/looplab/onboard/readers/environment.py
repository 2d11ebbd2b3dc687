"""Environment variables: `os.environ.get("LR", "0.1")`, `${LR:-0.1}`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import call_name, constant, module_constants

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
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "TOKENIZERS_PARALLELISM",
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
            found |= {name: parse_number(value) for name, value in SHELL_DEFAULT.findall(script.text)}
        settings = [ScriptSetting(name, kind_of(value), value) for name, value in found.items() if name not in COMMON]
        if not any(suggest(setting).role in ("knob", "length", "doubtful") for setting in settings):
            return None
        return Interface(self.name, tuple(settings), script.argv, {"as": "env"})


def _variables(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    names = module_constants(tree)
    helpers = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _reads_variable(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node)
        if name in ("os.environ.get", "environ.get", "os.getenv", "getenv", "os.environ.setdefault") or name in helpers:
            words = [constant(item, names) for item in [*node.args, *(item.value for item in node.keywords)]]
            if len(words) >= 2 and isinstance(words[0], str) and words[1] is not MISSING and words[1] is not None:
                yield words[0], parse_number(words[1])


def _reads_variable(node: ast.FunctionDef) -> bool:
    """Whether a function looks up its first parameter in the environment: `env_float("LR", 0.1)`."""
    text = ast.unparse(node)
    return bool(node.args.args) and ("environ" in text or "getenv" in text) and f"{node.args.args[0].arg}" in text


def parse_number(value: Any) -> Any:
    """Return the number that a text represents, else the text."""
    if not isinstance(value, str):
        return value
    for parse in (int, float):
        try:
            return parse(value)
        except ValueError:
            continue
    return value
