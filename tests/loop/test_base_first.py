"""The base is the first config that works, not the first whose run ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from looplab.config.lab import load_lab
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.judging import StudyJudge

LAB = """
study: s
launch: {command: ["true"]}
base: base.json
objective: {metric: loss, goal: min}
knobs: {x: {type: float, low: 0, high: 1}}
seed: seed
"""
JUDGES = ("judge: {}\ndeterministic: true", "judge: {by: test}", "judge: {by: mean}", "judge: {by: ratchet}")


class Judged:
    """A study whose runs end when a test says so."""

    def __init__(self, folder: Path, judge: str) -> None:
        (folder / "lab.yaml").write_text(LAB + judge)
        (folder / "base.json").write_text('{"x": 0.5, "seed": 1}')
        study = load_lab(folder).study("s")
        self.ledger = Ledger(folder / "ledger.db")
        self.record = StudyLedger(self.ledger, "s")
        self.record.open("loss", "min")
        self.judge = StudyJudge(study, self.record, folder / "outputs/s")
        self.open: dict[str, RunRow] = {}

    def plan(self, point: str, role: Role, seed: int = 1) -> RunRow:
        with self.ledger.write():
            run = self.record.plan(
                round=1, proposal=None, proposer="queue", parent=None, base="base.json", reason="", config_hash=point,
                devices=1, plan=RunPlan({}), role=role, point=point, seed=seed,
            )  # fmt: skip
        self.open[run.id] = run
        return run

    def end(self, run: RunRow, loss: float | None) -> None:
        del self.open[run.id]
        status = "failed" if loss is None else "ok"
        self.judge.add_run(replace(run, state="ended", status=status, objective=loss, started=0.0, ended=1.0))

    def champion(self) -> str | None:
        with self.ledger.write():
            judgement = self.judge.evaluate(self.open.values())
        assert judgement is not None
        return judgement.state.champion


@pytest.mark.parametrize("judge", JUDGES)
def test_a_challenger_that_ends_first_is_not_the_base(tmp_path: Path, judge: str) -> None:
    study = Judged(tmp_path, judge)
    base = study.plan("base", Role.BASE)
    challenger = study.plan("other", Role.TRIAL)
    study.end(challenger, 0.3)
    assert study.champion() is None
    assert study.judge.requests == (), "nothing is repeated for a base that it is not"
    for seed in range(2, 12):  # a person asks for more of it
        study.end(study.plan("other", Role.REPLICATE, seed), 0.3)
        assert study.champion() is None
    study.end(base, 0.2)
    assert study.champion() == base.id


@pytest.mark.parametrize("judge", [JUDGES[0], JUDGES[3]])
def test_if_the_base_fails_the_next_config_that_works_is_the_base(tmp_path: Path, judge: str) -> None:
    study = Judged(tmp_path, judge)
    base = study.plan("base", Role.BASE)
    challenger = study.plan("other", Role.TRIAL)
    study.end(challenger, 0.3)
    assert study.champion() is None
    study.end(base, None)
    assert study.champion() == challenger.id
