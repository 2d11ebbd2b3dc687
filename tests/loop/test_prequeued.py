"""Short runs are handed over before their slot is free. A long one among them must not let others start early."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.outcome import Ending
from looplab.loop.setup import RunOptions, prepare

RUNS = 400
TRAINER = """#!/bin/sh
case "$1" in *00) sleep 2;; esac
"""
LAB = """
study: mixed
launch: {command: ["./train.sh", "{config.x}"]}
base: base.json
knobs: {x: {type: int, low: 0, high: 1000000}}
slots: {count: 4, gpus: none, cores: none}
round_size: 400
"""


def test_a_long_run_among_short_ones_keeps_its_slot(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(TRAINER)
    (tmp_path / "train.sh").chmod(0o755)
    (tmp_path / "lab.yaml").write_text(LAB)
    (tmp_path / "base.json").write_text('{"x": 1}')
    lab = load_lab(tmp_path)
    ledger = Ledger(lab.ledger_path)
    record = StudyLedger(ledger, "mixed")
    record.open(None, "min")
    with ledger.write():
        for i in range(2, RUNS + 1):
            record.propose("person", [f"x@set={i}"], "more than the slots")
    setup = prepare(lab, lab.study(None), RunOptions(rounds=1))
    with StudyLock(lab.folder, "mixed"):
        executor = LocalExecutor()
        outcome = Engine(setup, ledger, executor).run()
        executor.close()
    runs = record.runs()
    assert outcome.ending is Ending.DONE
    assert [run.status for run in runs] == ["ok"] * RUNS
    for slot in {run.slot for run in runs}:
        times = sorted((run.started or 0.0, run.ended or 0.0) for run in runs if run.slot == slot)
        assert all(later[0] >= earlier[1] - 0.001 for earlier, later in pairwise(times)), slot
