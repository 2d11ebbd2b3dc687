"""Training on the real game: scripts act, distance counts, and a killed run resumes exactly."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

import looplab.recipes.mario as recipe
from looplab.errors import LabError
from looplab.recipes.mario.mario.cores import make_core
from looplab.rl.metrics import exact_rows
from looplab.trainkit import newest

FOLDER = Path(recipe.__path__[0])


def _missing_game() -> str | None:
    try:
        make_core("auto").close()
    except LabError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif((why := _missing_game()) is not None, reason=str(why))
SMALL = (
    "--num-envs", "2", "--workers", "2", "--rollout-steps", "16", "--train.minibatch", "16", "--train.epochs", "1",
    "--width", "16", "--log-interval", "1", "--checkpoint-interval", "2",
)  # fmt: skip


def command(out: Path, *words: str) -> list[str]:
    small = [word.replace("--width", "--train.width") for word in SMALL]
    return [sys.executable, str(FOLDER / "train.py"), "--out", str(out), *small, *words]


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, *words), capture_output=True, text=True, timeout=PATIENCE_S)


def rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_script_moves_mario_and_distance_is_counted(overlap: str, tmp_path: Path) -> None:
    done = run(
        tmp_path, "--action-type", "extended", "--scripted-sequence", "START:4,B+RIGHT:60", "--total-steps", "128",
        "--reward-distance-weight", "0.05", "--enable-ram-x-parse", "--overlap-collect", overlap,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logged = rows(tmp_path)
    assert sum(row.get("env_shaping_raw_sum", 0) for row in logged) > 0
    assert sum(row["env_distance_delta_sum"] for row in logged) > 100
    assert max(row["env_max_x_pos"] for row in logged) > 150
    assert logged[-1]["env_shaping_parse_fail"] == 0 if "env_shaping_parse_fail" in logged[-1] else True
    assert (tmp_path / "metrics.parquet").exists()
    assert (tmp_path / "trainer_summary.json").exists()


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    more = ("--algorithm", "impala", "--per", "true", "--total-steps", "320")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(whole, *more).returncode == 0
    process = subprocess.Popen(command(killed, *more), stdout=subprocess.DEVNULL)
    while process.poll() is None and len(rows(killed)) < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = run(killed, *more)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from" in resumed.stdout
    ends = [newest(folder / "checkpoints") for folder in (whole, killed)]
    assert ends[0] is not None
    assert ends[1] is not None
    one, other = (end.state["parts"]["learner"]["policy"] for end in ends if end is not None)
    assert all(one[name].equal(other[name]) for name in one)
    assert exact_rows(whole / "metrics.jsonl") == exact_rows(killed / "metrics.jsonl")


def test_the_readme_names_files_and_modules_that_a_lab_has() -> None:
    text = (FOLDER / "README.md").read_text()
    made_by_a_run = {"metrics.jsonl", "monitor.jsonl", "episode.gif"}
    named = set(re.findall(r"`([\w/]+\.(?:py|md|json|jsonl|yaml|sh|gif))`", text)) - made_by_a_run
    assert {"mario/cores.py", "train.py", "backfill.py", "mario/metrics.py"} <= named
    assert [name for name in named if not (FOLDER / name).is_file()] == []
    modules = re.findall(r"python -m ([\w.]+)", text)
    assert "looplab.rl.metrics" in modules
    assert all(importlib.util.find_spec(name) is not None for name in modules)


def test_an_unknown_button_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    done = run(tmp_path, "--scripted-sequence", "JUMP:3", "--total-steps", "32")
    assert done.returncode == 2
    assert "RIGHT" in done.stderr


@pytest.mark.slow
def test_forward_actions_are_probed(tmp_path: Path) -> None:
    done = run(tmp_path, "--scripted-forward-frames", "20", "--probe-forward-actions", "12", "--total-steps", "32")
    assert done.returncode == 0, done.stderr
    assert "forward is action" in done.stdout


@pytest.mark.slow
def test_a_training_shorter_than_the_log_interval_has_one_row(tmp_path: Path) -> None:
    done = run(tmp_path, "--total-steps", "32", "--log-interval", "50")
    assert done.returncode == 0, done.stderr
    assert [row["global_update"] for row in rows(tmp_path)] == [1]


@pytest.mark.slow
def test_a_stopped_training_leaves_a_table_and_refuses_other_settings(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "a"
    process = subprocess.Popen(command(out, "--total-steps", "100000"), stdout=subprocess.PIPE, text=True)
    while process.poll() is None and len(rows(out)) < 3:
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert (out / "metrics.parquet").exists()
    settings = (out / "settings.json").read_bytes()
    changed = run(out, "--total-steps", "100000", "--stage", "2", "--reward-distance-weight", "5")
    assert changed.returncode == 2
    assert "env.stage: 1 → 2; reward.distance_weight: 0.0125 → 5.0" in changed.stderr
    assert (out / "settings.json").read_bytes() == settings
    step = newest(out / "checkpoints").step  # type: ignore[union-attr]
    accepted = run(out, "--total-steps", str(step), "--stage", "2", "--allow-changes")
    assert accepted.returncode == 0, accepted.stderr
    assert "env.stage: 1 → 2" in accepted.stdout
