"""The benchmark of a night in small: with an agent that misbehaves in every third call, all proposals are decided."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.setup import RunOptions, prepare

_spec = importlib.util.spec_from_file_location("night", Path(__file__).parents[2] / "benchmarks" / "night.py")
assert _spec is not None
assert _spec.loader is not None
night = importlib.util.module_from_spec(_spec)
sys.modules["night"] = night
_spec.loader.exec_module(night)


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1], ids=["search", "repaired"])
def test_a_short_night_decides_everything_and_loses_nothing(tmp_path: Path, retries: int) -> None:
    found = night.spend(
        tmp_path / "lab", 9, seed=retries, wall=5.0, retries=retries, kills=retries, patience=PATIENCE_S
    )
    assert (found.exit_code, found.wedged, found.lost, found.decided_share) == (0, 0, 0, 1.0)
    assert found.failed_calls + found.refused_answers > 0
    assert retries or found.by_agent < 9  # the search stood in


def live(folder: Path, rounds: int) -> None:
    """Run an engine in this process, to its end."""
    lab = load_lab(folder)
    setup = prepare(lab, lab.study(None), RunOptions(rounds=rounds, autopilot=True))
    with StudyLock(folder, "night"):
        executor = LocalExecutor()
        Engine(setup, Ledger(lab.ledger_path), executor).run()
        executor.close()


def fork(folder: Path, rounds: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            live(folder, rounds)
            status = 0
        finally:
            os._exit(status)
    return pid


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1], ids=["search", "repaired"])
def test_killed_between_answer_check_retry_and_stand_in_no_decision_is_lost_or_doubled(
    tmp_path: Path, retries: int
) -> None:
    iterations = 12
    folder = night.make_lab(tmp_path / "lab", seed=3 + retries, wall=2.0, retries=retries)
    chance = random.Random(retries)
    is_done = False
    for _ in range(40):
        pid = fork(folder, iterations + 1)
        deadline = time.monotonic() + chance.uniform(0.0, 1.0)
        while time.monotonic() < deadline and not is_done:
            is_done = os.waitpid(pid, os.WNOHANG)[0] == pid
            time.sleep(0.0005)
        if is_done:
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not is_done:
        assert os.waitpid(fork(folder, iterations + 1), 0)[1] == 0
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    study = StudyLedger(ledger, "night")
    runs = study.runs()
    trials = [run for run in runs if run.role == "trial"]
    assert len(trials) == iterations
    assert all(run.status == "ok" for run in runs)
    assert set(Counter((run.point, run.seed) for run in runs).values()) == {1}
    calls = study.agent_calls()
    assert all(call["answer"] is not None for call in calls)
    accepted = {call["call"]: call["answer"]["accepted"] for call in calls if call["answer"].get("accepted")}
    used = Counter(study.proposal(run.proposal).source.split(":")[1] for run in trials if run.proposer == "agent")
    assert used == accepted
    assert not audit(ledger, folder).findings
    ledger.close()
