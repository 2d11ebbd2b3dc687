"""Small programs that behave as agents do, in a folder of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.agents.base import AgentSpec, Answer, Limits
from looplab.agents.run import run_agent

# The stand-in is shared by test files, which are no package.
_spec = importlib.util.spec_from_file_location("agents_model", Path(__file__).with_name("model.py"))
assert _spec is not None
assert _spec.loader is not None
_model = importlib.util.module_from_spec(_spec)
sys.modules["agents_model"] = _model
_spec.loader.exec_module(_model)

Ask = Callable[..., Answer]
HEAD = """
import json, os, subprocess, sys, time
def tell(**record):
    print(json.dumps(record), flush=True)
def message(text):
    tell(type="item.completed", item={"type": "agent_message", "text": text})
def usage(n):
    return {"input_tokens": n, "cached_input_tokens": 0, "output_tokens": 0}
def count():
    "How often this program was started before."
    with open("count", "a") as file:
        file.write("x")
    return os.path.getsize("count") - 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    return tmp_path / "lab"


@pytest.fixture
def ask(tmp_path: Path, folder: Path) -> Ask:
    """Ask an agent that is this Python text; it speaks as codex does unless said otherwise."""

    def ask(body: str, prompt: str = "do it", limits: Limits | None = None, **more: Any) -> Answer:
        program = tmp_path / "agent.py"
        program.write_text(f"#!{sys.executable}\n{HEAD}\n{textwrap.dedent(body)}")
        program.chmod(0o755)
        cli = more.pop("cli", "codex")
        spec_args = {k: more.pop(k) for k in [*more] if k in AgentSpec.__dataclass_fields__}
        if cli == "command":
            spec_args["command"] = (str(program), *spec_args.get("command", ()))
        spec = AgentSpec(cli, binary=str(program), **spec_args)
        more.setdefault("environ", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
        log = more.pop("log", tmp_path / "agent_runs" / "1-test.jsonl")
        return run_agent(
            spec, prompt, cwd=folder, log=log, limits=limits or Limits(wall_s=PATIENCE_S, grace_s=1), **more
        )

    return ask
