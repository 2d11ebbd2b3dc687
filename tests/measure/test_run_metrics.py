from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import StudyConfig
from looplab.measure.run_metrics import RunMetrics


def make_metrics(run_dir: Path, at: str = "last") -> RunMetrics:
    objective: Any = {"metric": "loss", "goal": "min", "at": at}
    study = StudyConfig.model_validate(
        {"study": "s", "launch": {"command": ["train"]}, "base": ["base.json"], "objective": objective, "knobs": {}}
    )
    return RunMetrics(study, run_dir)


def write(run_dir: Path, losses: list[float], start: int = 1) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step, loss in enumerate(losses, start):
            file.write(json.dumps({"step": step, "other": 1.0, "loss": loss}) + "\n")


@pytest.mark.parametrize(
    ("at", "values"), [("last", [9, 8, 6, 7, 4]), ("best", [9, 8, 6, 2, 2]), ("mean(2)", [9, 8.5, 6.5, 4.5, 4.5])]
)
def test_the_curve_of_the_objective_is_kept_at_steps_that_double(tmp_path: Path, at: str, values: list[float]) -> None:
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 2.0, 7.0, 5.0, 4.0]
    write(tmp_path, losses)
    at_once = make_metrics(tmp_path, at)
    at_once.poll(final=True)
    assert at_once.whole_curve() == [*zip((1, 2, 4, 8, 10), values, strict=True)]
    row_by_row = tmp_path / "rows"
    row_by_row.mkdir()
    metrics = make_metrics(row_by_row, at)
    for step, loss in enumerate(losses, 1):
        write(row_by_row, [loss], step)
        metrics.poll()
    metrics.poll(final=True)
    assert metrics.whole_curve() == at_once.whole_curve()
    assert metrics.summariser.result() == at_once.summariser.result()


def test_a_curve_that_ends_in_nan_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, [3.0, 2.0, float("nan")])
    metrics = make_metrics(tmp_path)
    metrics.poll(final=True)
    assert metrics.whole_curve() == []
