"""The note on a run that succeeded without measuring its objective."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from looplab.measure import missing
from looplab.measure.missing import explain_missing

START = 1_700_000_000.0


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "outputs" / "toy" / "0001-abcd").mkdir(parents=True)
    return tmp_path


def explain(lab: Path, metric: str, *measured: str, since: float | None = START, in_run_dir: bool = False) -> str:
    run_dir = lab / "outputs" / "toy" / "0001-abcd"
    return explain_missing(metric, measured, run_dir=run_dir, lab=lab, since=since, in_run_dir=in_run_dir)


def write(lab: Path, name: str, at: float = START + 1) -> None:
    path = lab / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (at, at))


LIGHTNING = [
    *("FLOPs", "epoch", "eval_mode", "hp_metric", "params", "test_loss", "train_loss_epoch", "train_loss_step"),
    *("valid_loss_epoch", "valid_loss_step"),
]


def test_the_nearest_names_are_suggested_and_come_first(lab: Path) -> None:
    text = explain(lab, "valid_loss", *LIGHTNING)
    assert "'valid_loss' was not measured; did you mean valid_loss_epoch or valid_loss_step?" in text
    assert "measured 10 metrics, among them valid_loss_epoch, valid_loss_step, " in text
    assert len(text.split("among them ")[1].split(", ")) == 8


@pytest.mark.parametrize(
    ("metric", "measured"),
    [
        ("eval_accuracy", "eval/accuracy"),
        ("Val_Loss", "val.loss"),
        ("val loss", "ValLoss"),
        ("charts/episodic-return", "charts/episodic_return"),
    ],
)
def test_a_name_that_differs_only_in_separators_or_case_is_named_plainly(lab: Path, metric: str, measured: str) -> None:
    text = explain(lab, metric, "adam_beta1", "eval_mode", measured)
    assert f"but {measured!r} was, which differs only in separators or case" in text


def test_of_two_names_that_differ_only_in_separators_none_is_the_one(lab: Path) -> None:
    text = explain(lab, "eval_loss", "eval/loss", "eval-loss")
    assert "did you mean eval-loss or eval/loss?" in text
    assert "differs only" not in text


@pytest.mark.parametrize(
    ("metric", "measured"),
    [("val_loss", "Validation_loss"), ("eval/acc", "valid_acc"), ("val_acc", "acc_dev"), ("acuracy", "accuracy")],
)
def test_other_words_for_a_split_and_slips_of_the_pen_are_near(lab: Path, metric: str, measured: str) -> None:
    assert f"did you mean {measured}?" in explain(lab, metric, "lr", "params", measured)


def test_another_split_is_never_suggested(lab: Path) -> None:
    text = explain(lab, "val_loss", "train_loss", "loss")
    assert "did you mean" not in text
    assert "the run measured 2 metrics: loss, train_loss" in text


def test_without_any_metric_it_says_so(lab: Path) -> None:
    assert explain(lab, "loss") == "the objective 'loss' was not measured; the run measured nothing"


def test_files_that_were_written_elsewhere_are_named(lab: Path) -> None:
    write(lab, "runs/CartPole__ppo__1/events.out.tfevents.170.host.1.0")
    text = explain(lab, "charts/episodic_return", "SPS")
    assert "runs/CartPole__ppo__1/events.out.tfevents.170.host.1.0 was written during the run" in text
    assert "point the trainer at {run_dir}, or start it there with launch.cwd: run" in text


def test_a_trainer_that_starts_in_its_run_folder_is_not_advised_to(lab: Path) -> None:
    write(lab, "logs/metrics.csv")
    text = explain(lab, "loss", in_run_dir=True)
    assert text.endswith("logs/metrics.csv was written during the run: point the trainer at {run_dir}")


def test_at_most_three_files_are_named(lab: Path) -> None:
    for number in range(5):
        write(lab, f"logs/{number}/metrics.jsonl")
    write(lab, "wandb/run-1/run-1.wandb")
    text = explain(lab, "loss")
    assert len(re.findall(r"metrics\.jsonl|\.wandb", text)) == 3
    assert "were written during the run" in text


@pytest.mark.parametrize(
    "name",
    [
        "outputs/other/0001-x/metrics.jsonl",
        ".git/metrics.jsonl",
        ".venv/lib/metrics.csv",
        "node_modules/metrics.jsonl",
        ".cache/events.out.tfevents.1",
        "data/samples.csv",
        "train.log",
    ],
)
def test_files_that_are_not_metrics_of_the_trainer_are_not_named(lab: Path, name: str) -> None:
    write(lab, name)
    assert "written" not in explain(lab, "loss")


def test_files_from_before_the_run_are_not_named(lab: Path) -> None:
    write(lab, "runs/metrics.jsonl", START - 10)
    assert "written" not in explain(lab, "loss")
    assert "written" not in explain(lab, "loss", since=None)


def test_the_walk_is_bounded(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "MAX_ENTRIES", 20)
    for number in range(30):
        (lab / f"a{number:02}").touch()
    write(lab, "zzz/metrics.jsonl")
    listed = 0
    real = os.scandir

    def counting(path: str) -> object:
        nonlocal listed
        listed += 1
        return real(path)

    monkeypatch.setattr(missing.os, "scandir", counting)
    assert "written" not in explain(lab, "loss")
    assert listed == 1


def test_a_folder_that_links_to_itself_is_walked_once(lab: Path) -> None:
    (lab / "logs").mkdir()
    (lab / "logs" / "again").symlink_to(lab / "logs", target_is_directory=True)
    write(lab, "logs/metrics.jsonl")
    assert explain(lab, "loss").count("metrics.jsonl") == 1
