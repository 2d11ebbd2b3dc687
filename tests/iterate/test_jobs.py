"""Trainings that an agent submits: waited for, and required of what is evaluated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from looplab.iterate.gates import check_values
from looplab.iterate.jobs import Training, check_trained
from looplab.iterate.settings import ValueGate


def training(status: str | None = "ok", started: float = 1000.0, ended: float = 2000.0) -> Training:
    return Training(
        run="0001", command="python train.py", program="python", status=status, started=started, ended=ended
    )


@pytest.fixture
def version(tmp_path: Path) -> Path:
    for number in (1, 2):
        folder = tmp_path / f"v{number}" / "artifacts" / "checkpoints"
        folder.mkdir(parents=True)
        (folder / ".gitkeep").touch()
        (folder / "policy.json").write_text(f"weights {number}")
        os.utime(folder / "policy.json", (1500, 1500))
    return tmp_path / "v2"


PATTERNS = ["artifacts/checkpoints/*"]


def why(version: Path, *done: Training) -> list[str]:
    return [one.why for one in check_trained(version, PATTERNS, done, version.parent) if not one.ok]


def test_a_checkpoint_of_a_recorded_training_passes(version: Path) -> None:
    assert why(version, training("failed", 0, 1), training()) == []


def test_a_version_that_trained_nothing_does_not_pass(version: Path) -> None:
    assert "nothing was submitted" in why(version)[0]
    assert "python train.py: failed" in why(version, training("failed"))[0]


def test_a_checkpoint_from_before_or_after_the_training_does_not_pass(version: Path) -> None:
    assert "was not written by a training" in why(version, training(started=1600))[0]
    assert "was not written by a training" in why(version, training(ended=1400))[0]


def test_a_copied_checkpoint_does_not_pass(version: Path) -> None:
    path = version / "artifacts/checkpoints/policy.json"
    path.write_text("weights 1")
    os.utime(path, (1500, 1500))
    assert why(version, training()) == [
        "artifacts/checkpoints/policy.json is a copy of v1/artifacts/checkpoints/policy.json"
    ]


def test_numbers_have_bounds(version: Path) -> None:
    gate = ValueGate(file="settings.json", key="envs.n", at_least=64)
    assert "settings.json is missing" in check_values(version, [gate])[0].why
    for text, passes in (('{"envs": {"n": 128}}', True), ('{"envs": {"n": 8}}', False), ("{}", False)):
        (version / "settings.json").write_text(text)
        assert check_values(version, [gate])[0].ok is passes
