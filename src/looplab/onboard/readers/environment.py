"""Environment variables: `os.environ.get("LR", "0.1")`, `${LR:-0.1}`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from looplab.onboard.base import MAX_SOURCE, MISSING, Interface, Script, ScriptSetting
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import call_name, constant, keyword, module_constants
from looplab.untrusted import read_bounded

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
            for name, value in _variables(tree, reads_file=bool(script.imports & DOTENV)):
                if value is not MISSING or name not in found:
                    found[name] = value
        if script.python is None:
            found |= {name: parse_number(value) for name, value in SHELL_DEFAULT.findall(script.text)}
        if script.imports & DOTENV:
            found |= {name: value for name, value in _dotenv(script) if name in found}
        found = {name: value for name, value in found.items() if value is not MISSING}
        settings = [ScriptSetting(name, kind_of(value), value) for name, value in found.items() if name not in COMMON]
        if not any(suggest(setting).role in ("knob", "length", "doubtful") for setting in settings):
            return None
        return Interface(self.name, tuple(settings), script.argv, {"as": "env"})


DOTENV = {"dotenv", "environs", "decouple"}
"""Packages that read a file `.env`; what is in the environment already wins."""
DOTENV_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$")


def _dotenv(script: Script) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the file `.env` of a project."""
    places = dict.fromkeys((script.folder.resolve(), script.path.parent.resolve()))
    path = next((place / ".env" for place in places if (place / ".env").is_file()), None)
    if path is None:
        return
    for line in read_bounded(path, MAX_SOURCE).decode("utf-8", "replace").splitlines():
        if (match := DOTENV_LINE.match(line)) is not None:
            text = match[2]
            quoted = text[:1] in "'\"" and text[1:].find(text[:1]) > 0
            text = text[1:].partition(text[0])[0] if text and quoted else text.partition(" #")[0].rstrip()
            yield match[1], parse_number(text)


def _variables(tree: ast.Module, *, reads_file: bool) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a module reads, with their defaults.

    Args:
        reads_file: Whether the script has one of `DOTENV`, so that `env.float("LR")` and `config("LR")` count too.
    """
    names = module_constants(tree)
    helpers = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _reads_variable(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and call_name(node.value) in ("os.environ", "environ"):
            key = constant(node.slice, names)
            if isinstance(key, str) and isinstance(node.ctx, ast.Load):
                yield key, MISSING
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node)
        if name.partition(".")[0] in ("env", "config") and node.args and reads_file:
            key = constant(node.args[0], names)
            if isinstance(key, str) and key.isupper():
                default = keyword(node, "default") or (node.args[1] if len(node.args) > 1 else None)
                value = constant(default, names)
                yield key, parse_number(value) if value is not None else MISSING
        if name in ("os.environ.get", "environ.get", "os.getenv", "getenv", "os.environ.setdefault") or name in helpers:
            words = [constant(item, names) for item in [*node.args, *(item.value for item in node.keywords)]]
            if len(words) >= 2 and isinstance(words[0], str) and words[1] is not MISSING and words[1] is not None:
                yield words[0], parse_number(words[1])
            elif len(words) == 1 and isinstance(words[0], str):
                yield words[0], MISSING


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
