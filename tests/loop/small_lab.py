"""A lab with one small study whose trainer waits for a file, and an engine for it in a thread of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from tests.conftest import PATIENCE_S

from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.ledger import Ledger
from looplab.loop.engine import Engine
from looplab.loop.events import EngineEvent
from looplab.loop.lock import StudyLock
from looplab.loop.outcome import Outcome
from looplab.loop.setup import RunOptions, prepare

TRAINER = """
import os, sys, time
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write('{"step": 0, "score": 1}\\n')
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
"""
LAB = """
study: small
launch: {command: ["{python}", -I, -S, train.py, "GATE"], grace: 2s}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 1000}}
proposers: [{queue: queue.yaml}]
slots: {count: 1, gpus: none}
"""


def make_lab(folder: Path, gate: Path, more: str = "") -> Path:
    folder.mkdir()
    (folder / "lab.yaml").write_text(LAB.replace("GATE", str(gate)) + more)
    (folder / "base.json").write_text('{"x": 0}')
    (folder / "train.py").write_text(TRAINER)
    (folder / "queue.yaml").write_text('proposals: [{edits: ["x@set=1"], reason: one}]\n')
    return folder


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.005)


class EngineThread:
    """An engine at work on a lab, to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.news: list[EngineEvent] = []
        self.thread = Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        lab = load_lab(self.folder)
        setup = prepare(lab, lab.study(None), RunOptions())
        executor = LocalExecutor()
        try:
            with StudyLock(self.folder, "small"):
                ledger = Ledger(lab.ledger_path)
                try:
                    self.outcome = Engine(setup, ledger, executor, self.news.append).run()
                finally:
                    ledger.close()
        except Exception as error:
            self.error = error
        finally:
            executor.close()

    def until_running(self) -> None:
        """Wait until a training has written its row, and the record says which process it is."""
        for name in ("record/process.json", "metrics.jsonl"):
            until(lambda name=name: [p for p in self.folder.glob(f"outputs/small/*/{name}") if p.stat().st_size])

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
