"""Further attempts at a run: each is in the ledger before it is started."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.launch.base import Ended, ExecutorTraits, Exit, LaunchEvent, LaunchSpec
from looplab.ledger.ledger import Ledger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.outcome import Ending
from looplab.loop.setup import RunOptions, prepare

LAB: dict[str, Any] = {
    "study": "s",
    "launch": {"command": ["true"]},
    "base": "base.json",
    "knobs": {"x": {"type": "int", "low": 0, "high": 9}},
    "proposers": [{"queue": "queue.yaml"}],
    "slots": {"count": 2, "gpus": "none", "cores": "none"},
}


class LosingExecutor:
    """Loses the first attempts at every run, and reads with a connection of its own what the ledger says at a start."""

    def __init__(self, ledger: Path, losses: int) -> None:
        self.traits = ExecutorTraits(name="losing", queues=True, prequeues=True, retries={"lost": 2})
        self.starts: list[tuple[int, int]] = []
        """Attempt that was started, and attempt in the ledger."""
        self._ledger, self._losses = ledger, losses
        self._events: deque[LaunchEvent] = deque()

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        with contextlib.closing(sqlite3.connect(self._ledger)) as db:
            row = db.execute("SELECT attempt FROM runs WHERE id=?", (spec.run_id,)).fetchone()
        self.starts.append((spec.attempt, row[0] if row is not None else 0))
        now = time.time()
        lost = Exit(None, reason="lost", message="the node is gone", started=now, ended=now, attempt=spec.attempt)
        done = Exit(0, started=now, ended=now, attempt=spec.attempt)
        self._events.append(Ended(spec.run_id, lost if spec.attempt <= self._losses else done))

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if not self._events:
            time.sleep(min(timeout, 0.001))
            return []
        return [self._events.popleft()]

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        return False

    def cancel(self, run_id: str) -> None: ...

    def stop(self, run_id: str, reason: str, grace: float) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("losses", [1, 2, 3])
def test_an_attempt_is_in_the_ledger_before_it_is_started(tmp_path: Path, losses: int) -> None:
    (tmp_path / "lab.yaml").write_text(json.dumps(LAB))
    (tmp_path / "base.json").write_text('{"x": 0}')
    (tmp_path / "queue.yaml").write_text(json.dumps({"proposals": [{"edits": [f"x@set={x}"]} for x in range(1, 5)]}))
    lab = load_lab(tmp_path)
    ledger = Ledger(lab.ledger_path)
    executor = LosingExecutor(lab.ledger_path, losses)
    with StudyLock(lab.folder, "s"):
        outcome = Engine(prepare(lab, lab.study(None), RunOptions()), ledger, executor).run()
    assert [started for started, recorded in executor.starts if started != recorded] == []
    assert max(started for started, _ in executor.starts) == min(losses, 2) + 1
    assert outcome.ending is Ending.DONE
