from __future__ import annotations

import json
from pathlib import Path

import pytest

from looplab.decide import next_config
from looplab.decide.next_config import NextConfig
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger


@pytest.fixture
def study(tmp_path: Path) -> StudyLedger:
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    study.open(None, "min")
    return study


def make(tmp_path: Path) -> NextConfig:
    (tmp_path / "next_config.json").write_text(json.dumps({"x": 2, "reason": "larger"}))
    return NextConfig(tmp_path / "next_config.json", tmp_path / "outputs", {"x": 1})


def test_the_file_is_cleared_only_after_its_proposal_is_committed(
    tmp_path: Path, study: StudyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make(tmp_path)
    elsewhere = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")  # sees only what is committed
    clear = next_config.write_atomic
    seen: list[int] = []

    def cleared(path: Path, content: bytes, *, sync: bool) -> None:
        seen.append(elsewhere.count_waiting())
        clear(path, content, sync=sync)

    monkeypatch.setattr(next_config, "write_atomic", cleared)
    proposer.refresh(study)
    assert seen == [1]
    assert json.loads((tmp_path / "next_config.json").read_text()) == {}


def test_a_transaction_that_fails_leaves_the_file(
    tmp_path: Path, study: StudyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make(tmp_path)
    record = study.ledger.record

    def full(*args: object, **data: object) -> int:
        raise OSError("the disk is full")

    monkeypatch.setattr(study.ledger, "record", full)
    proposer.refresh(study)
    assert "the disk is full" in (proposer.problem or "")
    assert "larger" in (tmp_path / "next_config.json").read_text()
    monkeypatch.setattr(study.ledger, "record", record)
    proposer.refresh(study)
    assert [p.edits for p in proposer.propose(study, 5)] == [("x@set=2",)]


def test_an_engine_killed_before_it_cleared_the_file_takes_it_only_once(
    tmp_path: Path, study: StudyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(next_config, "write_atomic", lambda *args, **options: None)
        proposer.refresh(study)
    assert "larger" in (tmp_path / "next_config.json").read_text()
    proposer.refresh(study)
    assert study.count_waiting() == 1
    assert json.loads((tmp_path / "next_config.json").read_text()) == {}


def test_a_planning_transaction_never_touches_the_file(tmp_path: Path, study: StudyLedger) -> None:
    proposer = make(tmp_path)
    with study.ledger.write():
        assert proposer.propose(study, 5) == []
    assert "larger" in (tmp_path / "next_config.json").read_text()
