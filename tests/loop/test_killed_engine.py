"""SIGKILL at any moment: no run is lost, none is started twice, exit codes are still learnt."""

from __future__ import annotations

import importlib.util
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("killing", Path(__file__).with_name("killing.py"))
assert _spec is not None
assert _spec.loader is not None
killing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(killing)

LOOPLAB = Path(sys.executable).with_name("looplab")


def check_exit_codes(folder: Path) -> None:
    for run in killing.check_nothing_lost(folder):
        score = int((folder / "outputs/killed" / run.id / "record/config.json").read_text().split(":")[1].strip(" }\n"))
        if score % 10 == 7:
            assert (run.status, run.exit_code, run.objective) == ("failed", 3, None)
        else:
            assert (run.status, run.exit_code, run.objective) == ("ok", 0, float(score))


@pytest.mark.slow
@pytest.mark.parametrize("continuous", [False, True], ids=["rounds", "continuous"])
def test_an_engine_killed_a_hundred_times_loses_no_run_and_starts_none_twice(tmp_path: Path, continuous: bool) -> None:
    kills = 0
    studies = 0
    while kills < 100:
        # Short lives: many moments are in the first steps of an engine, in recovery, between any two lines.
        folder = killing.make_lab(tmp_path / f"lab{studies}")
        kills += killing.kill_again_and_again(folder, seed=studies, kills=150, continuous=continuous, longest=0.08)
        killing.finish(folder, continuous)
        check_exit_codes(folder)
        studies += 1
    assert kills >= 100


@pytest.mark.slow
def test_the_installed_command_can_be_killed_too(tmp_path: Path) -> None:
    folder = killing.make_lab(tmp_path / "lab")
    chance = random.Random(7)
    command = [str(LOOPLAB), "run", "--runs", str(killing.RUNS), "--lab", str(folder)]
    for _ in range(8):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.3, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    check_exit_codes(folder)
