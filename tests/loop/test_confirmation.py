"""The champion runs again before it is replaced: in a study, with the runs that this needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.loop.small_lab import EngineThread

from looplab.config.lab import load_lab
from looplab.ledger.ledger import Ledger
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.report.judged import judged_now, points

LAB = """
study: small
launch: {command: ["{python}", -I, -S, train.py, "{config}", "{lab}/count"], grace: 2s}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 1000}}
proposers: [{queue: queue.yaml}]
judge: {baseline_seeds: 8}
seed: seed
slots: {count: 1, gpus: none}
"""
TRAINER = """
import json, os, random, sys
config = json.load(open(sys.argv[1]))
with open(sys.argv[2], "a+") as file:
    file.write(".")
    count = file.tell()
seed = [config["seed"], config["x"]] + [count] * config["noisy"]
score = GAIN * config["x"] + STEP * (count > 8) + random.Random(str(seed)).gauss(0, 1)
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write(json.dumps({"step": 0, "score": score}) + "\\n")
"""


def run_study(folder: Path, proposals: list[int], *, noisy: bool, gain: float, step: float) -> StudyLedger:
    folder.mkdir()
    (folder / "lab.yaml").write_text(LAB)
    (folder / "base.json").write_text(json.dumps({"x": 0, "seed": 1, "noisy": noisy}))
    (folder / "train.py").write_text(TRAINER.replace("GAIN", str(gain)).replace("STEP", str(step)))
    lines = [f'  - {{edits: ["x@set={x}"], reason: more}}' for x in proposals]
    (folder / "queue.yaml").write_text("proposals:\n" + "\n".join(lines) + "\n")
    engine = EngineThread(folder)
    engine.join()
    assert engine.error is None
    return StudyLedger(Ledger(folder / ".looplab/ledger.db"), "small")


def confirmations(record: StudyLedger) -> list[int | None]:
    return [run.seed for run in record.runs() if run.role == Role.CONFIRMATION]


@pytest.fixture(autouse=True)
def _locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))


def test_a_reproducible_champion_is_confirmed_by_one_run(tmp_path: Path) -> None:
    record = run_study(tmp_path / "lab", [8], noisy=False, gain=1.0, step=0.0)
    best = record.best()
    assert best is not None
    assert best.verdict == "keep"
    assert len(confirmations(record)) == 1
    study = load_lab(tmp_path / "lab").study("small")
    base = points(record.runs())[record.runs()[0].id]
    assert [run.role for run in base.copies] == [Role.CONFIRMATION]
    assert len({run.seed for run in base.runs}) == len(base.runs)
    found = judged_now(study, record)
    assert found is not None
    assert found.champion == best.id
    assert "run again" in found.sentences[0]


def test_a_change_after_the_base_was_measured_is_an_alarm_and_promotes_nobody(tmp_path: Path) -> None:
    record = run_study(tmp_path / "lab", [1, 2], noisy=True, gain=0.0, step=8.0)
    assert len(confirmations(record)) > 1
    verdicts = [run.verdict for run in record.runs() if run.role == Role.TRIAL]
    assert "keep" not in verdicts
    state = record.judge_state()
    assert state is not None
    assert any("no longer measures what it did" in alarm for alarm in state["alarms"])
