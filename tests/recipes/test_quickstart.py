"""The trainer of the quickstart recipe, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab import recipes

pytest.importorskip("sklearn")
RECIPE = Path(recipes.__file__).parent / "quickstart"
BASELINE = json.loads((RECIPE / "configs" / "baseline.json").read_text())


def train(out: Path, seed: int = 0, **changes: Any) -> subprocess.CompletedProcess[str]:
    config = json.loads(json.dumps(BASELINE))
    config["seed"] = seed
    config["train"]["epochs"] = 3
    for path, value in changes.items():
        part, key = path.split("__")
        assert key in config[part]
        config[part][key] = value
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_suffix(".json")
    path.write_text(json.dumps(config))
    return subprocess.run(
        [sys.executable, str(RECIPE / "train.py"), "--config", str(path), "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of a run, without their times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


@pytest.mark.slow
def test_a_run_logs_a_row_an_epoch_and_ends_with_the_held_out_accuracy(tmp_path: Path) -> None:
    done = train(tmp_path / "run", train__learning_rate=0.05)
    assert done.returncode == 0, done.stderr
    assert "epoch" in done.stdout
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert set(rows[0]) == {"step", "train/loss", "val/loss", "val/accuracy", "val/error", "learning_rate"}
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert all(row["val/error"] == pytest.approx(1 - row["val/accuracy"]) for row in rows)
    summary = json.loads((tmp_path / "run" / "trainer_summary.json").read_text())
    assert summary["val/accuracy"] == rows[-1]["val/accuracy"]
    assert 0.5 < summary["test/accuracy"] < 1
    assert not any(name.startswith("test/") for row in rows for name in row), "the held-out metric is not for tuning"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(tmp_path: Path) -> None:
    knobs = {"model__dropout": 0.2, "model__layers": 2, "data__noise": 0.1, "data__shift": 0.5}
    knobs |= {"train__schedule": "cosine", "train__weight_decay": 0.001, "train__learning_rate": 0.1}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        done = train(tmp_path / name, seed, **knobs)
        assert done.returncode == 0, done.stderr
        rows = metrics(tmp_path / name)
        assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert metrics(tmp_path / "one") == metrics(tmp_path / "again")
    assert metrics(tmp_path / "one") != metrics(tmp_path / "other")


@pytest.mark.slow
def test_tuning_helps(tmp_path: Path) -> None:
    better = {"train__learning_rate": 0.1, "train__momentum": 0.9, "model__hidden": 64, "model__activation": "relu"}
    for name, changes in (("baseline", {}), ("tuned", better)):
        assert train(tmp_path / name, train__epochs=10, **changes).returncode == 0
    baseline, tuned = (metrics(tmp_path / name)[-1]["val/accuracy"] for name in ("baseline", "tuned"))
    assert tuned > baseline + 0.2


def test_an_unknown_choice_is_named_without_a_traceback(tmp_path: Path) -> None:
    done = train(tmp_path / "run", model__activation="swish")
    assert done.returncode == 1
    assert "model.activation must be tanh, relu or sigmoid, not 'swish'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
