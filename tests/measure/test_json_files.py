"""Files that are written whole: `trainer_summary.json` and `wandb-summary.json`."""

from __future__ import annotations

import json
import os
from math import isnan
from pathlib import Path

from looplab.measure.summary import Summariser
from looplab.measure.trainer_summary import TrainerSummarySource
from looplab.measure.wandb_legacy import WandbSummarySource


def test_numbers_of_a_trainer_summary_become_points(tmp_path: Path) -> None:
    path = tmp_path / "trainer_summary.json"
    path.write_text(
        json.dumps(
            {
                "run_id": "2025",
                "train": {"learning_rate": 0.003, "name": "x"},
                "metrics": {"success_rate": 0.5, "agent_steps": 2000, "done": True},
            }
        )
    )
    source = TrainerSummarySource(path)
    batch = source.poll()
    assert {name: (curve.steps, curve.values) for name, curve in batch.items()} == {
        "train/learning_rate": ([2000.0], [0.003]),
        "success_rate": ([2000.0], [0.5]),
        "agent_steps": ([2000.0], [2000.0]),
        "done": ([2000.0], [1.0]),
    }


def test_only_what_is_new_in_a_rewritten_summary_counts(tmp_path: Path) -> None:
    path = tmp_path / "trainer_summary.json"
    path.write_text('{"metrics": {"a": 1, "b": 2}}')
    source = TrainerSummarySource(path)
    assert set(source.poll()) == {"a", "b"}
    assert source.poll() == {}
    os.utime(path, ns=(1, 1))
    assert source.poll() == {}
    path.write_text('{"metrics": {"a": 1, "b": 3, "c": 4}}')
    source.at_step = 70.0
    batch = source.poll()
    assert {name: (curve.steps, curve.values) for name, curve in batch.items()} == {
        "b": ([70.0], [3.0]),
        "c": ([70.0], [4.0]),
    }


def test_a_half_written_summary_waits(tmp_path: Path) -> None:
    path = tmp_path / "trainer_summary.json"
    source = TrainerSummarySource(path)
    assert source.poll() == {}
    path.write_text('{"metrics": {"a": 1')
    assert source.poll() == {}
    assert source.skipped == 1
    path.write_text('{"metrics": {"a": NaN}}')
    assert isnan(source.poll()["a"].values[0])
    assert source.skipped == 0


def test_a_lone_wandb_summary_never_looks_like_a_plateau(tmp_path: Path) -> None:
    path = tmp_path / "wandb-summary.json"
    path.write_text(
        '{"_step": 900, "_runtime": 12, "_timestamp": 1.7e9, "_wandb": {"runtime": 3}, "train/l1_loss": 0.25,'
        ' "nested": {"x": 1}, "picture": {"_type": "image-file", "width": 3}}'
    )
    batch = WandbSummarySource(path).poll()
    assert {name: (curve.steps, curve.values) for name, curve in batch.items()} == {
        "train/l1_loss": ([900.0], [0.25]),
        "nested.x": ([900.0], [1.0]),
    }
    summariser = Summariser()
    summariser.add(batch)
    summary = summariser.result()["train/l1_loss"]
    assert (summary.n, summary.delta, summary.pct) == (1, None, None)


def test_a_summary_of_wandbs_own_clock_alone_holds_no_metric(tmp_path: Path) -> None:
    path = tmp_path / "wandb-summary.json"
    path.write_text('{"_wandb": {"runtime": 2}}')
    assert WandbSummarySource(path).poll() == {}
