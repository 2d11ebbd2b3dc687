"""A study whose engine is killed again and again, and what must hold at its end."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.setup import RunOptions, prepare

RUNS = 40
# Written for a fast start: the standard library's smallest part only.
TRAINER = """
import os, sys, time
x = int(open(sys.argv[1]).read().split('"x":')[1].split("}")[0])
where = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(where, (os.environ["LOOPLAB_RUN_ID"] + "\\n").encode())
time.sleep(0.02 + x % 5 * 0.02)
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write('{"step": 0, "score": %d}\\n' % x)
sys.exit(3 if x % 10 == 7 else 0)
"""
LAB = """
study: killed
launch: {command: ["{python}", -I, -S, train.py, "{config}", "{lab}/executed"], grace: 2s}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 1000}}
proposers: [{queue: queue.yaml}]
slots: {count: 2, gpus: none}
round_size: 7
"""


def make_lab(folder: Path) -> Path:
    folder.mkdir()
    (folder / "lab.yaml").write_text(LAB)
    (folder / "base.json").write_text('{"x": 0}')
    (folder / "train.py").write_text(TRAINER)
    entries = "".join(f'  - {{edits: ["x@set={i}"], reason: try {i}}}\n' for i in range(1, RUNS))
    (folder / "queue.yaml").write_text("proposals:\n" + entries)
    return folder


def engine_life(folder: Path, continuous: bool) -> None:
    """What an engine does, in this process, to its end."""
    lab = load_lab(folder)
    setup = prepare(lab, lab.study(None), RunOptions(runs=RUNS, continuous=continuous))
    with StudyLock(folder, "killed"):
        executor = LocalExecutor()
        Engine(setup, Ledger(lab.ledger_path), executor).run()
        executor.close()


def born(folder: Path, continuous: bool) -> int:
    """An engine in a process of its own; gives its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            engine_life(folder, continuous)
            status = 0
        finally:
            os._exit(status)
    return pid


def live_and_die(folder: Path, continuous: bool, seconds: float) -> bool:
    """Start an engine, kill it after so many seconds; True if it came to its end before."""
    pid = born(folder, continuous)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0, "the engine failed by itself"
            return True
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def kill_again_and_again(folder: Path, seed: int, kills: int, continuous: bool, longest: float) -> int:
    """Kill engines at seeded random moments until there were so many kills or the study is done; gives their number."""
    chance = random.Random(seed)
    for number in range(kills):
        if live_and_die(folder, continuous, chance.uniform(0.0, longest)):
            return number
    return kills


def finish(folder: Path, continuous: bool) -> None:
    assert os.waitpid(born(folder, continuous), 0)[1] == 0


def check_nothing_lost(folder: Path) -> list[RunRow]:
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    runs = StudyLedger(ledger, "killed").runs()
    assert len(runs) == RUNS
    executed = Counter((folder / "executed").read_text().split())
    assert set(executed.values()) == {1}, f"started twice: {[r for r, n in executed.items() if n > 1]}"
    assert set(executed) == {run.id for run in runs}
    assert sorted(run.n for run in runs) == list(range(1, RUNS + 1))
    assert all(run.state == "ended" for run in runs)
    assert ledger.first_broken_link() is None
    findings = audit(ledger, folder).findings
    assert not findings, findings
    book = (folder / "outputs/killed/labbook.md").read_text()
    counts = {run.id: book.count(f"| run {run.id} ") for run in runs}
    assert set(counts.values()) == {1}, [(run, n) for run, n in counts.items() if n != 1]
    assert (folder / "outputs/killed/BEST").read_text().strip() == max(runs, key=lambda r: r.objective or -1).id
    assert not [p for p in (folder / "outputs/killed").iterdir() if p.name.startswith(".")]
    return runs


if __name__ == "__main__":
    engine_life(Path(sys.argv[1]), "continuous" in sys.argv)
