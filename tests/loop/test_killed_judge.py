"""SIGKILL in a study that repeats, judges and decides by itself: every verdict stands on what was run, once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.setup import RunOptions, prepare

LAB = """
study: judged
launch: {command: ["{python}", -I, -S, train.py, "{config}", "{lab}/executed"], grace: 2s}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 30}}
proposers: [{rules: rules.yaml}]
watch: [{name: too far, when: "step == 1 and score > 20", requeue: ["x@add=-15"]}]
judge: {baseline_seeds: 3, replicates: 2, max_replicates: 4}
slots: {count: 2, gpus: none}
round_size: 2
budget: {rounds: 4}
"""
RULES = """
rules:
  - {name: up, when: "score.last < 25", edits: ["x@add=7"], reason: more may be better}
"""
TRAINER = """
import os, sys, time
text = open(sys.argv[1]).read()
x = int(text.split('"x":')[1].split(",")[0].strip(" }\\n")); seed = int(text.split('"seed":')[1].split(",")[0].strip(" }\\n"))
where = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(where, (os.environ["LOOPLAB_RUN_ID"] + "\\n").encode())
score = x + (x * 31 + seed * 17) % 7 / 10
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write('{"step": 1, "score": %r}\\n' % score)
    log.flush()
    if score > 20:
        time.sleep(600)
time.sleep(0.01 + seed % 3 * 0.02)
"""


def make_lab(folder: Path) -> Path:
    folder.mkdir()
    for name, text in (
        ("lab.yaml", LAB),
        ("rules.yaml", RULES),
        ("train.py", TRAINER),
        ("base.json", '{"x": 3, "seed": 1}'),
    ):
        (folder / name).write_text(text)
    return folder


def born(folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            lab = load_lab(folder)
            setup = prepare(lab, lab.study(None), RunOptions())
            with StudyLock(folder, "judged"):
                executor = LocalExecutor()
                Engine(setup, Ledger(lab.ledger_path), executor).run()
                executor.close()
            status = 0
        finally:
            os._exit(status)
    return pid


def live_and_die(folder: Path, seconds: float) -> bool:
    pid = born(folder)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0, "the engine failed by itself"
            return True
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@pytest.mark.slow
def test_a_judged_study_killed_again_and_again_ends_with_verdicts_that_hold(tmp_path: Path) -> None:
    folder = make_lab(tmp_path / "lab")
    chance = random.Random(5)
    kills = 0
    while kills < 120 and not live_and_die(folder, chance.uniform(0.0, 0.15)):
        kills += 1
    print(f"{kills} kills")
    assert kills >= 20
    assert os.waitpid(born(folder), 0)[1] == 0
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    study = StudyLedger(ledger, "judged")
    runs = study.runs()
    executed = Counter((folder / "executed").read_text().split())
    assert executed == {run.id: 1 for run in runs}
    assert all(run.state == "ended" for run in runs)
    # No config was run twice under one seed, and each was judged once.
    measured = [run for run in runs if run.role in ("base", "trial", "replicate")]
    assert max(Counter((run.point, run.seed) for run in measured).values()) == 1
    judged = [event.run for event in ledger.events() if event.kind == "judged"]
    assert len(judged) == len(set(judged)) > 0
    for run in runs:
        if run.verdict is not None:
            summary = json.loads((folder / "outputs/judged" / run.id / "record/summary.json").read_text())
            assert summary["verdict"]["verdict"] == run.verdict
    # What was stopped was sent back once, and tried again inside its range.
    sent_back = [run for run in runs if run.proposer == "watch"]
    assert len({run.parent for run in sent_back}) == len(sent_back)
    best = study.best()
    assert best is not None
    assert best.verdict == "keep"
    assert not audit(ledger, folder).findings
