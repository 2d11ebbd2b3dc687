"""The act_ot lab with LeRobot as its trainer, as its README prints it: its command lines, and where it logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOOPLAB = Path(sys.executable).with_name("looplab")
RECIPE = ROOT / "src/looplab/recipes/act_ot"
FEATURE = {"name": "action", "term": "action_lbl", "use_learned_embed": False, "weight_embed": 0.0,
           "weight_label": 0.0005}  # fmt: skip
BASE: dict[str, Any] = {
    "dataset": {"repo_id": "somebody/fr3", "root": None},
    "policy": {"type": "act", "device": "cpu", "chunk_size": 10, "optimizer_lr": 1e-5, "optimizer_weight_decay": 1e-4},
    "output_dir": None,
    "seed": 1000,
    "batch_size": 8,
    "steps": 20000,
    "log_freq": 50,
    "eval_freq": 200,
    "optimizer": {"type": "adamw", "lr": 1e-5, "weight_decay": 1e-4},
    "wandb": {"enable": True, "disable_artifact": False, "project": "lerobot", "entity": "kept", "notes": None,
              "run_id": None, "mode": "online"},
    "ot": {"lambda_ot": 0.1, "window_size": 10,
           "loss_config": {"reg": 0.1, "tau_src": 0.05, "tau_tgt": 0.05, "features": [FEATURE]}},
}  # fmt: skip
ACCELERATE = """\
#!/bin/sh
# `accelerate launch --num_processes 1 SCRIPT …`, and nothing else.
[ "$1 $2 $3" = "launch --num_processes 1" ] || exit 64
shift 3
exec "{python}" -I -S "$@"
"""


def printed_block() -> dict[str, Any]:
    """The lab file of the README's section on LeRobot."""
    section = (RECIPE / "README.md").read_text().split("## With LeRobot itself")[1]
    lines = [line for line in section.splitlines() if line.startswith("    ")]
    block: dict[str, Any] = yaml.safe_load(textwrap.dedent("\n".join(lines)))
    return block


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    folder = tmp_path / "lab"
    shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "src/lerobot/scripts/lerobot_train.py"
    script.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("lerobot_parser.py"), script)
    accelerate = tmp_path / "bin/accelerate"
    accelerate.parent.mkdir()
    accelerate.write_text(ACCELERATE.format(python=sys.executable))
    accelerate.chmod(0o755)
    (folder / "configs/baseline.json").write_text(json.dumps(BASE))
    configure(folder)
    return folder


def configure(folder: Path, **changes: Any) -> None:
    """The recipe's lab file with the README's block, on a machine without GPUs and with a trainer that trains nothing."""
    lab = yaml.safe_load((RECIPE / "lab.yaml").read_text())
    lab |= printed_block() | {"base": "configs/baseline.json", "slots": {"count": 1}, "round_size": 1, "watch": []}
    lab |= {"proposers": [{"queue": "queue.yaml"}], "judge": None, "holdout": None, "evaluator": []} | changes
    lab["require"] = {**lab["require"], "gpu": False}
    (folder / "lab.yaml").write_text(yaml.safe_dump(lab, sort_keys=False))
    (folder / "queue.yaml").write_text(json.dumps({"proposals": []}))


def looplab(folder: Path, *argv: str, code: int = 0) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {"PATH": f"{folder.parent}/bin:{env['PATH']}", "WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [str(LOOPLAB), *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def told(folder: Path) -> list[dict[str, Any]]:
    logs = sorted((folder / "outputs/act_ot").glob("*/record/train.log"))
    return [json.loads(log.read_text().splitlines()[0]) for log in logs]


def test_lerobot_takes_the_printed_command_and_logs_where_the_lab_file_says(lab: Path) -> None:
    edits = ["ot.window_size@mul=2.0", "batch_size@add=4.0", "ot.loss_config.features.*.weight_label@mul=0.5"]
    (lab / "queue.yaml").write_text(json.dumps({"proposals": [{"edits": edits, "reason": "wider"}]}))
    looplab(lab, "run", "--rounds", "2")
    base, variant = told(lab)
    online = {"mode": "online", "entity": "YOURS", "project": "lerobot", "artifacts": False}
    assert (base["init"], variant["init"]) == (online, online)
    assert base["device"] == "cuda"
    assert (variant["config"]["ot"]["window_size"], variant["config"]["batch_size"]) == (20, 12)


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_lab_that_is_offline_is_offline_in_lerobot(lab: Path, mode: str) -> None:
    configure(lab, track={"wandb": {"mode": mode}}, require={})
    looplab(lab, "run", "--rounds", "1")
    (base,) = told(lab)
    where = {"mode": "offline", "entity": "kept", "project": "lerobot", "artifacts": False}
    assert base["init"] == (where if mode == "offline" else None)


def test_a_formal_run_that_lerobot_would_log_offline_is_refused(lab: Path) -> None:
    (lab / "configs/baseline.json").write_text(json.dumps({**BASE, "wandb": {**BASE["wandb"], "mode": "offline"}}))
    configure(lab, track={})
    assert "configs/baseline.json: wandb.mode is offline in the config" in looplab(lab, "run", code=2)
    configure(lab)
    looplab(lab, "run", "--rounds", "1")
    assert told(lab)[0]["init"]["mode"] == "online"


def test_the_parser_is_strict(lab: Path) -> None:
    (lab / "configs/baseline.json").write_text(json.dumps({**BASE, "steps": 20.5}))
    assert "Couldn't parse '20.5' into a int" in looplab(lab, "run", code=1)
