from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from looplab.config import files
from looplab.decide.queue import PORTION, QueueProposer, read_queue
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


def proposals(queue: QueueProposer, study: StudyLedger, n: int = 10) -> list[tuple[str, ...]]:
    queue.refresh(study)
    return [proposal.edits for proposal in queue.propose(study, n)]


def test_entries_come_in_order_and_equal_ones_each_count(tmp_path: Path, study: StudyLedger) -> None:
    queue = QueueProposer(write(tmp_path / "q.yaml", "x@set=1", "x@set=2", "x@set=1"))
    assert proposals(queue, study) == [("x@set=1",), ("x@set=2",), ("x@set=1",)]
    assert len(queue.propose(study, 2)) == 2


def test_the_file_may_grow_and_nothing_is_taken_twice(tmp_path: Path, study: StudyLedger) -> None:
    path = write(tmp_path / "q.yaml", "x@set=1")
    assert len(proposals(QueueProposer(path), study)) == 1
    write(path, "x@set=1", "x@mul=22")
    assert proposals(QueueProposer(path), study) == [("x@set=1",), ("x@mul=22",)]


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of events that each outermost transaction recorded; parsing inside one is an error."""
    counts: list[int] = []
    write_, read_ = Ledger.write, files.read_config
    depths: Counter[int] = Counter()  # by thread

    @contextmanager
    def counted(ledger: Ledger) -> Iterator[None]:
        thread = threading.get_ident()
        before = ledger.head()[0]
        with write_(ledger):
            depths[thread] += 1
            try:
                yield
            finally:
                depths[thread] -= 1
        if depths[thread] == 0:
            counts.append(ledger.head()[0] - before)

    def read(path: Path) -> dict[str, Any]:
        assert not depths[threading.get_ident()], "a file is parsed inside a transaction"
        return read_(path)

    monkeypatch.setattr(Ledger, "write", counted)
    monkeypatch.setattr("looplab.decide.queue.read_config", read)
    return counts


def test_a_long_queue_is_recorded_in_short_transactions_with_room_between_them(
    tmp_path: Path, study: StudyLedger, transactions: list[int]
) -> None:
    path = write(tmp_path / "q.yaml", *(f"x@set={i}" for i in range(3000)))
    queue = QueueProposer(path)
    other = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    refreshed = 0
    while queue.thinking or queue.left or not refreshed:
        queue.refresh(study)
        other.say("stop")  # another process writes between two steps of the engine
        refreshed += 1
    assert study.count_waiting() == 3000
    assert max(transactions) <= PORTION
    assert refreshed >= 3000 / PORTION


def test_a_long_queue_hands_out_its_first_entries_before_all_are_recorded(tmp_path: Path, study: StudyLedger) -> None:
    path = write(tmp_path / "q.yaml", *(f"x@set={i}" for i in range(PORTION + 50)))
    queue = QueueProposer(path, background=False)
    assert len(proposals(queue, study)) == 10
    assert (study.count_waiting(), queue.left) == (PORTION, 50)
    with study.ledger.write():
        for row in study.waiting(PORTION):
            study.reject(row.id, [])
        assert len(queue.propose(study, 100)) == 50  # nobody waits for the next refresh


def test_an_unchanged_file_is_parsed_once_over_all_engines(
    tmp_path: Path, study: StudyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "q.yaml", "x@set=1", "x@set=2")
    assert len(proposals(QueueProposer(path), study)) == 2
    parsed: list[Path] = []
    monkeypatch.setattr("looplab.decide.queue.read_queue", lambda path: parsed.append(path) or [])
    path.touch()
    assert len(proposals(QueueProposer(path), study)) == 2
    assert not parsed
    write(path, "x@set=1", "x@set=2", "x@set=3")
    queue = QueueProposer(path)
    queue.refresh(study)
    queue.refresh(study)
    assert parsed == [path]


def test_a_broken_file_is_reported_parsed_once_and_read_again_when_it_is_mended(
    tmp_path: Path, study: StudyLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Path] = []
    monkeypatch.setattr("looplab.decide.queue.read_queue", lambda path: parsed.append(path) or read_queue(path))
    path = tmp_path / "q.yaml"
    path.write_text("proposals: [")
    queue = QueueProposer(path)
    for _ in range(3):
        assert proposals(queue, study) == []
        assert "broken YAML" in (queue.problem or "")
    assert len(parsed) == 1
    write(path, "x@set=1")
    assert proposals(queue, study) == [("x@set=1",)]
    assert queue.problem is None
    path.unlink()
    assert proposals(queue, study) == [("x@set=1",)]
    assert "does not exist" in (queue.problem or "")


def test_an_engine_that_dies_between_two_portions_takes_nothing_twice(tmp_path: Path, study: StudyLedger) -> None:
    path = write(tmp_path / "q.yaml", *(f"x@set={i % 300}" for i in range(2 * PORTION + 10)))
    first = QueueProposer(path, background=False)
    first.refresh(study)
    assert 0 < study.count_waiting() < 2 * PORTION
    second = QueueProposer(path, background=False)
    for _ in range(4):
        second.refresh(study)
    assert study.count_waiting() == 2 * PORTION + 10
    assert study.queue_taken("q.yaml") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("proposals: 3", "list `proposals:`"),
        ("- {edits: [x@set=1]}", "must contain a list `proposals:` (as in proposals: [{edits: ["),
        ("proposals:\n  - {reason: x}", "list `edits:`"),
        ("proposals:\n  - {edits: x@set=1}", "list `edits:`"),
        ("proposals:\n  - {changes: [x@set=1]}", "proposal 1: unknown key 'changes' (known: edits,"),
        ("proposals:\n  - {edits: ['x=1']}", "x@set=1"),
        ("proposals:\n  - {edits: [], why: x}", "unknown key 'why'"),
    ],
)
def test_a_broken_queue_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "q.yaml"
    path.write_text(text)
    with pytest.raises(LabError) as error:
        read_queue(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
