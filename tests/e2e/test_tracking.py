"""What every run is told about W&B, and what a formal run must have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

LOOPLAB = Path(sys.executable).with_name("looplab")
LAB = """
study: s
launch:
  command: ["{python}", -I, -S, -c, "import os; print({k: v for k, v in os.environ.items() if k.startswith('WANDB')})"]
base: base.json
proposers: [{queue: queue.yaml}]
knobs: {x: {type: int, low: 0, high: 9}}
slots: {count: 1, gpus: none}
round_size: 1
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "base.json").write_text('{"x": 0}')
    (tmp_path / "queue.yaml").write_text("proposals: [{edits: ['x@set=1']}, {edits: ['x@set=2']}]")
    return tmp_path


def looplab(lab: Path, *argv: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"NETRC": str(lab / "no-netrc"), **({"WANDB_API_KEY": key} if key else {})}
    return subprocess.run([str(LOOPLAB), *argv], cwd=lab, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_every_round_is_told_the_same_about_wandb(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "track: {wandb: {mode: online, entity: e, project: p}}\n")
    assert looplab(lab, "run").returncode == 0
    logs = sorted((lab / "outputs/s").glob("*/record/train.log"))
    assert len(logs) == 3
    for log in logs:
        told = json.loads(log.read_text().replace("'", '"'))
        assert (told["WANDB_MODE"], told["WANDB_ENTITY"], told["WANDB_PROJECT"]) == ("online", "e", "p")
        assert told["WANDB_DIR"] == str(log.parents[1])
        assert told["WANDB_CACHE_DIR"].startswith(str(lab))
        assert told["WANDB_LOG_MODEL"] == "false"
        assert told["WANDB_RUN_GROUP"] == "s"


def test_without_tracking_nothing_is_said_about_wandb(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB)
    assert looplab(lab, "run", "--runs", "1").returncode == 0
    assert next((lab / "outputs/s").glob("*/record/train.log")).read_text().strip() == "{}"


def test_a_formal_run_is_refused_without_what_it_requires(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "require: {gpu: true, wandb: online}\n")
    refused = looplab(lab, "run")
    assert refused.returncode == 2
    for missing in ("a GPU for every slot", "W&B online", "a W&B key"):
        assert missing in refused.stderr
    assert not (lab / "outputs").exists()


def test_only_what_is_missing_is_named(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "require: {wandb: online}\ntrack: {wandb: {mode: online}}\n")
    refused = looplab(lab, "run")
    assert refused.returncode == 2
    assert "a W&B key" in refused.stderr
    assert "W&B online" not in refused.stderr
    assert looplab(lab, "run", "--runs", "1", key="0" * 40).returncode == 0


def test_an_informal_run_is_recorded_as_one(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "require: {gpu: true}\n")
    assert "`run` would refuse" in looplab(lab, "plan").stdout
    assert looplab(lab, "run", "--informal", "--runs", "1").returncode == 0
    about = json.loads(next((lab / "outputs/s").glob("*/record/run.json")).read_text())
    assert about["formal"] is False
