"""A device that somebody else computes on is waited for, end to end, with a stand-in for the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

Driver = Any
LOOPLAB = Path(sys.executable).with_name("looplab")
LAB = """
study: s
launch: {command: ["{python}", -I, -S, -c, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]}
base: base.json
proposers: [{queue: queue.yaml}]
knobs: {x: {type: int, low: 0, high: 9}}
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "lab.yaml").write_text(LAB)
    (folder / "base.json").write_text('{"x": 0}')
    (folder / "queue.yaml").write_text("proposals:\n" + "".join(f"  - {{edits: ['x@set={i}']}}\n" for i in range(1, 4)))
    return folder


def start(lab: Path, nvml: Driver, *options: str) -> subprocess.Popen[str]:
    env = {**nvml.env, "LOOPLAB_LOCK_DIR": str(lab / "locks")}
    argv = [str(LOOPLAB), "run", "--rounds", "1", *options]
    return subprocess.Popen(argv, cwd=lab, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def devices_used(lab: Path) -> list[str]:
    return [log.read_text().strip() for log in sorted((lab / "outputs/s").glob("*/record/train.log"))]


def test_only_the_free_device_is_used_while_a_stranger_computes_on_the_other(lab: Path, nvml: Driver) -> None:
    nvml.show([os.getpid()], [])
    engine = start(lab, nvml, "--gpus", "0,1")
    said, _ = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 0, said
    assert "gpu0: device 0 is used by" in said
    assert set(devices_used(lab)) == {"1"}


def test_a_study_begins_when_the_stranger_has_gone(lab: Path, nvml: Driver) -> None:
    nvml.show([os.getpid()])
    engine = start(lab, nvml, "--gpus", "0")
    assert engine.stdout is not None
    while "is used by" not in (line := engine.stdout.readline()):
        assert line, "the engine ended"
    time.sleep(0.3)
    assert not list((lab / "outputs/s").glob("*/record/train.log"))
    nvml.show([])
    said, _ = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 0, said
    assert devices_used(lab) == ["0"]


def test_sharing_does_not_wait(lab: Path, nvml: Driver) -> None:
    nvml.show([os.getpid()])
    engine = start(lab, nvml, "--gpus", "0", "--share")
    said, _ = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 0, said
    assert devices_used(lab) == ["0"]


def test_all_devices_are_slots_by_default(lab: Path, nvml: Driver) -> None:
    nvml.show([], [])
    engine = start(lab, nvml)
    said, _ = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 0, said
    assert sorted(devices_used(lab)) == ["0", "1"]
