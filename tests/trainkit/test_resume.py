"""Exact resume: a run that was killed and resumed ends with the same weights, to the bit, as one that was not."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import PATIENCE_S

from looplab import trainkit
from looplab.errors import LabError

TRAINER = """
import hashlib, json, os, random, signal, sys
os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np, torch, torch._dynamo
from looplab import trainkit


class Window:
    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def train(folder, die_at, first_seed):
    os.environ["LOOPLAB_METRICS"] = f"{folder}/metrics.jsonl"
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(first_seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9, 14], gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    own, mine = np.random.default_rng(1), torch.Generator().manual_seed(2)
    old, base = np.random.RandomState(3), random.Random(4)
    window, counters = Window(), {"step": 0, "best": float("inf")}
    training_state = trainkit.TrainingState(
        model=torch.compile(model, backend="eager") if die_at else model,  # the resumed one is not compiled
        optimizer=optimizer, scheduler=scheduler, scaler=scaler, parts={"window": window}, counters=counters,
        generators={"own": own, "mine": mine, "old": old, "base": base},
    )
    training_state.resume(f"{folder}/checkpoints")
    with trainkit.Checkpoints(f"{folder}/checkpoints") as checkpoints:
        while counters["step"] < 20:
            x = torch.from_numpy(np.random.randn(16, 8) + own.normal(size=(16, 8)) * old.rand()).float()
            x = x + torch.randn(16, 8, generator=mine) * (random.random() + base.random())
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            window.seen = (window.seen + [loss.item()])[-5:]
            counters["step"] += 1
            counters["best"] = min(counters["best"], loss.item())
            trainkit.log({"loss": loss.item(), "window": sum(window.seen), "lr": scheduler.get_last_lr()[0]})
            if counters["step"] == die_at:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if counters["step"] % 4 == 0:
                training_state.save(checkpoints, counters["step"])
    tree, tensors = trainkit.flatten({
        "model": trainkit.clean(model.state_dict()), "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "counters": counters,
    })
    hashed = hashlib.sha256(repr(tree).encode())
    for tensor in tensors.values():
        hashed.update(tensor.numpy().tobytes())
    with open(f"{folder}/sha256", "w") as file:
        file.write(hashed.hexdigest())


codes = []
for folder, die_at, seed in json.loads(sys.argv[1]):  # each in its own process, forked so that torch is imported once
    os.makedirs(folder, exist_ok=True)
    if (child := os.fork()) == 0:
        train(folder, die_at, seed)
        sys.exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in read]


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs = [
        (str(whole), 0, 7),
        (str(killed), 11, 7),
        (str(killed), 0, 8),
    ]  # the seed of the resumed process must not matter
    argv = [sys.executable, "-c", TRAINER, json.dumps(runs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == f"[0, {-signal.SIGKILL}, 0]\n", done.stderr
    assert (killed / "sha256").read_text() == (whole / "sha256").read_text()
    assert rows(killed) == rows(whole)
    assert [row["step"] for row in rows(killed)] == list(range(20))


# --- without torch


class Part:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_every_generator_continues_its_sequence(tmp_path: Path) -> None:
    own = {
        "pcg": np.random.default_rng(1),
        "philox": np.random.Generator(np.random.Philox(2)),
        "old": np.random.RandomState(3),
        "base": random.Random(4),
    }
    training_state = trainkit.TrainingState(generators=own, metrics=False)

    def draw() -> list[float]:
        drawn = [random.gauss(0, 1), np.random.normal(), own["pcg"].normal(), own["philox"].normal()]
        return [*drawn, own["old"].normal(), own["base"].gauss(0, 1)]

    draw()
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        training_state.save(checkpoints, 1)
    first = draw()
    assert draw() != first
    loaded = training_state.resume(tmp_path)
    assert loaded is not None
    assert draw() == first


def test_rows_after_the_checkpoint_are_truncated_and_counting_continues(tmp_path: Path) -> None:
    with trainkit.Logger(tmp_path / "metrics.jsonl") as logger:
        training_state = trainkit.TrainingState(metrics=logger, rng=False)
        for value in range(3):
            logger.log(value=value)
        state = training_state.state()
        for value in range(100, 300):
            logger.log(value=value)
        assert training_state.restore(state) == []
        logger.log(value=3)
    assert [(row["step"], row["value"]) for row in rows(tmp_path)] == [(n, n) for n in range(4)]


def test_a_checkpoint_older_than_the_first_row_truncates_all_rows(tmp_path: Path) -> None:
    logger = trainkit.Logger(tmp_path / "metrics.jsonl")
    training_state = trainkit.TrainingState(metrics=logger, rng=False)
    state = training_state.state()
    logger.log(value=1)
    training_state.restore(state)
    logger.log(value=2)
    assert [(row["step"], row["value"]) for row in rows(tmp_path)] == [(0, 2)]


@pytest.mark.parametrize("other_rows", [1, 50])
def test_metrics_of_another_run_are_left_alone(tmp_path: Path, other_rows: int) -> None:
    one, other = (trainkit.Logger(tmp_path / name) for name in ("one.jsonl", "other.jsonl"))
    for value in range(5):
        one.log(value=value)
    for value in range(other_rows):
        other.log(other=value)
    state = trainkit.TrainingState(metrics=one, rng=False).state()
    (difference,) = trainkit.TrainingState(metrics=tmp_path / "other.jsonl", rng=False).restore(state)
    assert "is not the metrics file of the checkpoint" in difference
    assert len((tmp_path / "other.jsonl").read_text().splitlines()) == other_rows


def test_a_state_without_a_part_is_rejected_unless_that_is_allowed(tmp_path: Path) -> None:
    optimizer, counters = Part(1), {"step": 5}
    state = trainkit.TrainingState(counters=counters, metrics=False).state()
    training_state = trainkit.TrainingState(optimizer=optimizer, counters=counters, metrics=False)
    with pytest.raises(LabError, match="the part optimizer is missing in the saved state"):
        training_state.restore(state)
    counters["step"] = 9
    assert training_state.restore(state, allow="missing") == ["the part optimizer is missing in the saved state"]
    assert counters == {"step": 5}
    with pytest.raises(LabError, match="the part optimizer is missing in the current state"):
        trainkit.TrainingState(metrics=False).restore(training_state.state())
    with pytest.raises(LabError, match="the generator own is missing in the current state"):
        trainkit.TrainingState(metrics=False).restore(
            trainkit.TrainingState(generators={"own": random.Random(1)}).state()
        )
    with pytest.raises(LabError, match="not the state of a TrainingState"):
        training_state.restore({"model": 1})


def test_invalid_parts_are_reported(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="cannot be named 'model'"):
        trainkit.TrainingState(parts={"model": Part(1)})
    with pytest.raises(LabError, match="own is a Part, not a random generator"):
        trainkit.TrainingState(generators={"own": Part(1)}, metrics=False).state()
    state = trainkit.TrainingState(parts={"a": Part(1)}, metrics=False).state()
    state["parts"]["a"] = {}
    with pytest.raises(LabError, match="cannot restore the a"):
        trainkit.TrainingState(parts={"a": Part(1)}, metrics=False).restore(state)


def test_nothing_to_resume_from_is_a_fresh_start(tmp_path: Path) -> None:
    assert trainkit.TrainingState(metrics=False).resume(tmp_path) is None


def test_other_settings_are_refused_with_a_list_of_them(tmp_path: Path) -> None:
    saved = {"train": {"lr": 0.1, "batch": 8, "layers": (64, 64)}, "stage": 1}
    state = trainkit.TrainingState(settings=saved, metrics=False).state()
    same = {"stage": 1, "train": {"layers": [64, 64], "batch": 8, "lr": 0.1}}
    assert trainkit.TrainingState(settings=same, metrics=False).restore(state) == []
    changed = trainkit.TrainingState(settings={"train": {"lr": 0.2, "batch": 8, "layers": [64]}}, metrics=False)
    with pytest.raises(LabError, match=r"stage: 1 → not set; train.layers: .* → \[64\]; train.lr: 0.1 → 0.2"):
        changed.restore(state)
    assert len(changed.restore(state, allow="settings")) == 3
    assert trainkit.TrainingState(metrics=False).restore(state) == []


def test_the_newest_checkpoint_that_fits_is_resumed_from_a_folder_of_several_runs(tmp_path: Path) -> None:
    for run, settings, step in (("a", {"stage": 1}, 5), ("b", {"stage": 2}, 9), ("c", {"stage": 1}, 7)):
        with trainkit.Checkpoints(tmp_path / run) as checkpoints:
            trainkit.TrainingState(counters={"run": run}, settings=settings, metrics=False).save(checkpoints, step)
    counters: dict[str, str] = {}
    state = trainkit.TrainingState(counters=counters, settings={"stage": 1}, metrics=False)
    told: list[str] = []
    loaded = state.resume(tmp_path, tell=told.append, skip_unfit=True)
    assert loaded is not None
    assert (loaded.step, counters["run"]) == (7, "c")
    assert len(told) == 1
    assert "stage: 2 → 1" in told[0]
    with pytest.raises(LabError, match="other settings"):
        state.resume(tmp_path, tell=told.append)
    with pytest.raises(LabError, match="stage: 2 → 3"):
        trainkit.TrainingState(settings={"stage": 3}, metrics=False).resume(tmp_path, tell=told.append, skip_unfit=True)
