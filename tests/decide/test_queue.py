from __future__ import annotations

from pathlib import Path

import pytest

from looplab.decide.queue import QueueProposer, read_queue
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger


@pytest.fixture
def study(tmp_path: Path) -> StudyLedger:
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    study.open(None, "min")
    return study


def write(path: Path, *edits: str) -> Path:
    path.write_text("proposals:\n" + "".join(f"  - {{edits: ['{edit}'], reason: r}}\n" for edit in edits))
    return path


def test_entries_come_in_order_and_equal_ones_each_count(tmp_path: Path, study: StudyLedger) -> None:
    queue = QueueProposer(write(tmp_path / "q.yaml", "x@set=1", "x@set=2", "x@set=1"))
    assert [p.edits for p in queue.propose(study, 10)] == [("x@set=1",), ("x@set=2",), ("x@set=1",)]
    assert len(queue.propose(study, 2)) == 2


def test_the_file_may_grow_and_nothing_is_taken_twice(tmp_path: Path, study: StudyLedger) -> None:
    path = write(tmp_path / "q.yaml", "x@set=1")
    assert len(QueueProposer(path).propose(study, 10)) == 1
    write(path, "x@set=1", "x@mul=22")
    assert [p.edits for p in QueueProposer(path).propose(study, 10)] == [("x@set=1",), ("x@mul=22",)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("proposals: 3", "list `proposals:`"),
        ("proposals:\n  - {reason: x}", "list `edits:`"),
        ("proposals:\n  - {edits: ['x=1']}", "x@set=1"),
        ("proposals:\n  - {edits: [], why: x}", "unknown key 'why'"),
    ],
)
def test_a_broken_queue_says_where(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "q.yaml"
    path.write_text(text)
    with pytest.raises(LabError) as error:
        read_queue(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)
