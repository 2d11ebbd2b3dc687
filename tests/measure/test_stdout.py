from __future__ import annotations

from math import inf, isnan
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.measure.stdout import StdoutSource

Points = dict[str, list[tuple[float, float]]]


def read(tmp_path: Path, text: str, *patterns: str, final: bool = False) -> Points:
    path = tmp_path / "train.log"
    path.write_bytes(text.encode())
    batch = StdoutSource(path, patterns).poll(final)
    return {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in batch.items()}


@pytest.mark.parametrize(
    ("line", "step", "metrics"),
    [
        ("step: 100 loss: 0.31 acc=0.9", 100, {"loss": 0.31, "acc": 0.9}),
        ("Epoch 3/10 - loss: 0.31 - val_loss: 4e-1", 3, {"loss": 0.31, "val_loss": 0.4}),
        ("Epoch [5/10] Step [10/100] Loss: 0.3", 10, {"Loss": 0.3}),
        ("step:1K loss:0.2 tokens=1.2M", 1000, {"loss": 0.2, "tokens": 1.2e6}),
        ("iter 20 | train/loss = -1.5e-3 | lr = 1e-3", 20, {"train/loss": -1.5e-3, "lr": 1e-3}),
        ("\x1b[32mstep: 7\x1b[0m \x1b[1macc:\x1b[0m 91.5%", 7, {"acc": 91.5}),
        ("{'loss': 0.31, 'learning_rate': 5e-05, 'epoch': 1.5}", 1.5, {"loss": 0.31, "learning_rate": 5e-5}),
        ('{"step": 4, "loss": 0.5}', 4, {"loss": 0.5}),
        (
            "step:100/1750 val_loss:3.25 train_time:100ms step_avg:57.5ms",
            100,
            {"val_loss": 3.25, "train_time": 100, "step_avg": 57.5},
        ),
        ("step=5, train loss: 0.4, val loss: 0.5", 5, {"train_loss": 0.4, "val_loss": 0.5}),
        ("step 5: tokens: 1,234,567", 5, {"tokens": 1234567}),
        (" 45%|████▌     | 45/100 [00:10<00:12,  4.50it/s, loss=0.31, acc=0.9]", 45, {"loss": 0.31, "acc": 0.9}),
        ("2025-01-01 10:00:00,123 - INFO - step: 3 loss: 2", 3, {"loss": 2}),
        ("[2025-01-01T10:00:00Z] INFO: loss: 2 global_step: 3", 3, {"loss": 2}),
        ("INFO:trainer:loss: 0.5 step=200", 200, {"loss": 0.5}),
        ("I1103 10:00:00.123456 140 train.py:42] step: 9 loss: 1", 9, {"loss": 1}),
        ("mAP@0.5: 0.61 step: 2", 2, {"mAP@0.5": 0.61}),
        ("success_rate : .25 step: 2", 2, {"success_rate": 0.25}),
    ],
)
def test_lines_as_trainers_print_them(tmp_path: Path, line: str, step: float, metrics: dict[str, float]) -> None:
    assert read(tmp_path, line + "\n") == {name: [(step, value)] for name, value in metrics.items()}


@pytest.mark.parametrize(
    "line",
    [
        "2025-01-01 10:00:00 INFO: starting",
        "10:00:00 started at: 10:00:00",
        "date: 2025-01-01",
        "ERROR: 3 files are missing",
        "RuntimeError: 3 is not a size",
        'File "train.py", line 12, in main',
        "train.py:123 loading",
        "device: cuda:0",
        "listening on localhost:8080, port: 8080",
        "see http://host:80/",
        "version: 1.2.3",
        "shape: 3x4, sizes=[1, 2]",
        "batch: 3/10",
        "weights: None",
        "time per step: 0.3",
        "eta: 12 elapsed: 3",
        "betas=1,2,3",
        "saved to out/run=final",
        "",
    ],
)
def test_what_is_not_a_metric(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line + "\n") == {}


def test_a_line_without_a_step_uses_the_last_one_seen(tmp_path: Path) -> None:
    assert read(tmp_path, "step: 50 loss: 1\nval_bpb: 0.99\n")["val_bpb"] == [(50, 0.99)]


def test_without_any_step_the_lines_with_metrics_are_counted(tmp_path: Path) -> None:
    assert read(tmp_path, "loss: 3\nhello\nloss: 2\n") == {"loss": [(0, 3.0), (1, 2.0)]}


def test_keras_prints_the_epoch_on_a_line_of_its_own(tmp_path: Path) -> None:
    text = "Epoch 1/2\n10/10 [====] - 1s 2ms/step - loss: 0.5 - acc: 0.1\nEpoch 2/2\n10/10 [====] - loss: 0.4\n"
    assert read(tmp_path, text) == {"loss": [(1, 0.5), (2, 0.4)], "acc": [(1, 0.1)]}


def test_beside_a_step_an_epoch_is_a_metric(tmp_path: Path) -> None:
    found = read(tmp_path, "step: 10 epoch: 1 loss: 3\nepoch: 2 loss: 2\nEpoch 3 loss: 1\n")
    assert found == {"loss": [(10, 3.0), (10, 2.0), (10, 1.0)], "epoch": [(10, 1.0), (10, 2.0)]}


def test_carriage_returns_separate(tmp_path: Path) -> None:
    assert read(tmp_path, "step: 1 loss: 3\rstep: 2 loss: 2\rstep: 3 loss: 1\r\n") == {
        "loss": [(1, 3.0), (2, 2.0), (3, 1.0)]
    }


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    found = read(tmp_path, "step: 1 a: nan b=inf c: -inf\n")
    assert isnan(found["a"][0][1])
    assert found["b"] == [(1, inf)]
    assert found["c"] == [(1, -inf)]


def test_a_last_line_without_its_end_counts_only_if_the_writer_ended(tmp_path: Path) -> None:
    assert read(tmp_path, "val_bpb: 0.99") == {}
    assert read(tmp_path, "val_bpb: 0.99", final=True) == {"val_bpb": [(0, 0.99)]}


def test_the_users_pattern_says_what_is_in_a_line(tmp_path: Path) -> None:
    found = read(tmp_path, "it 5 of 9, L 0.25 x: 1\nacc: 0.5\n", r"it (?P<step>\d+) .* L (?P<loss>\S+)")
    assert found == {"loss": [(5, 0.25)], "acc": [(5, 0.5)]}


def test_a_pattern_may_match_several_times_and_find_no_number(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "step 100 loss 0.5, step 200 loss 1.5K; step 300 loss none\n",
        r"step (?P<step>\d+) loss (?P<loss>[^;,]+)",
    )
    assert [value for _, value in found["loss"]] == [0.5, 1500.0]


@pytest.mark.parametrize("pattern", ["(?P<loss>", r"loss (\d+)"])
def test_a_bad_pattern_is_said_to_be_bad(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(LabError, match="pattern"):
        StdoutSource(tmp_path / "train.log", [pattern])
