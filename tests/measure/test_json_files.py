"""Files that are written whole: `trainer_summary.json` and `wandb-summary.json`."""

from __future__ import annotations

import json
import os
from math import isnan
from pathlib import Path

from looplab.measure.base import Batch, Curve, merge
from looplab.measure.discover import Reader
from looplab.measure.summary import Summariser
from looplab.measure.trainer_state import TrainerStateSource
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


HISTORY = [
    {"epoch": 0.5, "grad_norm": 1.5, "learning_rate": 4e-05, "loss": 0.7, "step": 50},
    {"epoch": 1.0, "eval_accuracy": 0.8, "eval_loss": 0.5, "step": 100},
    {"epoch": 1.5, "grad_norm": 1.25, "learning_rate": 2e-05, "loss": 0.4, "step": 150},
]


def write_state(folder: Path, rows: int) -> None:
    folder.mkdir(exist_ok=True)
    state = {"best_metric": 0.5, "epoch": 1.5, "global_step": 150, "log_history": HISTORY[:rows], "max_steps": 300}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_the_history_of_a_trainer_state_becomes_curves(tmp_path: Path) -> None:
    source = TrainerStateSource(tmp_path / "trainer_state.json")
    assert source.poll() == {}
    write_state(tmp_path, 2)
    assert {name: (curve.steps, curve.values) for name, curve in source.poll().items()} == {
        "epoch": ([50, 100], [0.5, 1.0]),
        "grad_norm": ([50], [1.5]),
        "learning_rate": ([50], [4e-05]),
        "loss": ([50], [0.7]),
        "eval_accuracy": ([100], [0.8]),
        "eval_loss": ([100], [0.5]),
    }
    write_state(tmp_path, 3)
    assert source.poll()["loss"] == Curve([150], [0.4])
    assert source.poll() == {}
    (tmp_path / "trainer_state.json").write_text('{"log_history": 3}')
    assert source.poll() == {}


def test_the_states_of_several_checkpoints_are_one_curve(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    total: Batch = {}
    write_state(tmp_path / "checkpoint-100", 2)
    merge(total, reader.poll())
    write_state(tmp_path / "checkpoint-150", 3)
    write_state(tmp_path, 3)
    (tmp_path / "all_results.json").write_text('{"epoch": 1.5, "test_accuracy": 0.75, "train_loss": 0.55}')
    merge(total, reader.poll(final=True))
    assert total["loss"] == Curve([50, 150], [0.7, 0.4])
    assert total["eval_accuracy"] == Curve([100], [0.8])
    assert total["test_accuracy"].values == [0.75]


def test_what_was_printed_is_not_read_again_from_the_state(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("{'loss': '0.7', 'epoch': '0.5'}\n{'loss': '0.4', 'epoch': '1.5'}\n")
    write_state(tmp_path, 3)
    total = Reader(tmp_path).poll(final=True)
    assert total["loss"] == Curve([0.5, 1.5], [0.7, 0.4])
    assert total["eval_loss"] == Curve([100], [0.5])


def test_results_that_a_trainer_writes_at_its_end_are_metrics_and_its_settings_are_not(tmp_path: Path) -> None:
    content = {"test_accuracy": 0.9, "params": {"lr": 0.1}, "classes": ["a", "b"], "history": {"val_loss": [3, 2, 1]}}
    for name in ("results.json", "eval_metrics.json", "final-scores.json"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
        batch = Reader(folder).poll(final=True)
        assert {name: curve.values for name, curve in batch.items()} == {
            "test_accuracy": [0.9],
            "history/val_loss": [3.0, 2.0, 1.0],
        }


def test_a_history_that_is_written_again_adds_only_its_new_points(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"loss": [3, 2]}))
    source = TrainerSummarySource(path)
    first = source.poll()
    path.write_text(json.dumps({"loss": [3, 2, 1.5]}))
    second = source.poll()
    assert (first["loss"].steps, second["loss"].steps, second["loss"].values) == ([0.0, 1.0], [2.0], [1.5])


def test_rows_that_are_added_to_a_json_file_are_curves(tmp_path: Path) -> None:
    """Detectron2 and MMEngine write `metrics.json` and `scalars.json` so: one object per line, each with its step."""
    path = tmp_path / "output" / "metrics.json"
    path.parent.mkdir()
    source = TrainerSummarySource(path)
    path.write_text('{"iteration": 19, "total_loss": 0.5, "lr": 0.1}\n')
    first = source.poll()
    assert first["total_loss"] == Curve([19], [0.5])
    with path.open("a") as file:
        file.write('{"iteration": 39, "total_loss": 0.25, "lr": 0.1}\n{"iteration": 39, "bbox/AP": 41.5}\n{"itera')
    assert source.poll() == {"total_loss": Curve([39], [0.25]), "bbox/AP": Curve([39], [41.5])}
    assert source.skipped == 0
    assert Reader(tmp_path).poll()["total_loss"] == Curve([19, 39], [0.5, 0.25])


def test_the_rows_of_a_history_have_their_own_steps(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"history": [{"epoch": e, "val_acc": e / 4} for e in (1, 2)]}))
    assert Reader(tmp_path).poll()["val_acc"] == Curve([1, 2], [0.25, 0.5])


def test_rows_in_a_json_file_are_not_added_to_what_was_printed(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("iter: 19 total_loss: 0.5\niter: 39 total_loss: 0.25\n")
    rows = [{"iteration": 19, "total_loss": 0.5}, {"iteration": 39, "total_loss": 0.25}, {"iteration": 39, "AP": 0.5}]
    (tmp_path / "metrics.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = Reader(tmp_path).poll(True)
    assert batch == {"total_loss": Curve([19, 39], [0.5, 0.25]), "AP": Curve([39], [0.5])}
