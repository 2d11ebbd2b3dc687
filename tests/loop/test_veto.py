"""A vetoed run is never promoted, whatever the judge is doing with it at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.loop.test_preview import engine_life, judged_lab, set_up

from looplab.ledger.ledger import Ledger
from looplab.ledger.rebuild import reindex
from looplab.ledger.study import StudyLedger
from looplab.loop.judging import veto
from looplab.loop.setup import RunOptions


@contextmanager
def record_of(folder: Path) -> Iterator[StudyLedger]:
    with closing(Ledger(folder / ".looplab" / "ledger.db")) as ledger:
        yield StudyLedger(ledger, "toy")


def veto_trial(folder: Path) -> str:
    with record_of(folder) as record, record.ledger.write():
        (trial,) = [run for run in record.runs() if run.role == "trial"]
        veto(record, trial, "a leak")
        return trial.id


@pytest.mark.parametrize("ended", [4, 5, 6], ids=["its test is open", "a replicate has ended", "it is the champion"])
def test_a_vetoed_challenger_is_not_promoted(tmp_path: Path, ended: int) -> None:
    folder = judged_lab(tmp_path / "lab")  # three seeds of the base, the trial, two replicates
    engine_life(set_up(folder, RunOptions()), drain_after=ended)
    trial = veto_trial(folder)
    engine_life(set_up(folder, RunOptions()))
    with record_of(folder) as record:
        best = record.best()
        assert best is not None
        assert best.role == "base"
        assert record.run(trial).verdict == "void"


def test_a_veto_outlives_the_state_of_the_judge(tmp_path: Path) -> None:
    folder = judged_lab(tmp_path / "lab")
    engine_life(set_up(folder, RunOptions()))
    trial = veto_trial(folder)
    for path in (folder / ".looplab").glob("ledger.db*"):
        path.unlink()
    for path in (folder / ".looplab" / "backups").glob("*"):
        path.unlink()
    assert reindex(folder / ".looplab" / "ledger.db", folder).judged_again == ["toy"]
    engine_life(set_up(folder, RunOptions()))
    with record_of(folder) as record:
        best = record.best()
        assert best is not None
        assert best.role == "base"
        assert record.run(trial).verdict == "void"
