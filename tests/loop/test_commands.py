"""What people ask of an engine, and what it says: between two steps, and after the transaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looplab.launch.base import Slot
from looplab.launch.pool import SlotPool
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.commands import EngineControl
from looplab.loop.events import EngineEvent, Note
from looplab.loop.outbox import Outbox


class CommandedExecutor:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        self.asked.append(("stop", run_id, reason))

    def cancel(self, run_id: str) -> None:
        self.asked.append(("cancel", run_id))


class Stand:
    def __init__(self, ledger: Ledger) -> None:
        self.executor: Any = CommandedExecutor()
        self.pool: SlotPool[str] = SlotPool([Slot("cpu0"), Slot("cpu1")])
        self.running: dict[str, Any] = {"1": None, "2": None}
        self.said: list[EngineEvent] = []
        self.vetoed: list[tuple[str, str]] = []
        self.study = StudyLedger(ledger, "s")
        self.study.open(None, "min")
        self.control = EngineControl(
            self.study, self.executor, self.pool, self.running, {"2"}, grace=1.0, tell=self.said.append
        )
        slot = self.pool.take()
        assert slot is not None
        self.pool.hold("1", slot)
        self.pool.prequeue("3", slot, "next")

    def handle(self) -> None:
        self.control.handle(lambda run, why: self.vetoed.append((run, why)))


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield Stand(ledger)
    ledger.close()


def test_a_request_is_obeyed_between_two_steps(stand: Stand) -> None:
    stand.control.request("drain")
    assert stand.control.may_start
    stand.handle()
    assert (stand.control.may_start, stand.control.draining, stand.control.why) == (False, True, "drained")
    assert stand.executor.asked == [("cancel", "3")]


def test_a_stop_ends_the_runs_that_can_be_seen(stand: Stand) -> None:
    stand.control.request("stop")
    stand.handle()
    assert stand.executor.asked == [("cancel", "3"), ("stop", "1", "stop")]
    assert stand.control.ending


def test_commands_of_other_processes_are_obeyed(stand: Stand, tmp_path: Path) -> None:
    stand.handle()
    other = Ledger(tmp_path / "ledger.db")
    study = StudyLedger(other, "s")
    study.command("stop", run="2")
    study.command("stop", run="9")
    study.command("pause")
    study.command("veto", run="1", why="the data was wrong")
    stand.handle()
    assert stand.executor.asked == [("stop", "2", "stop"), ("cancel", "3")], "a named run is given up, seen or not"
    assert stand.control.paused
    assert not stand.control.ending
    assert stand.vetoed == [("1", "the data was wrong")]
    study.command("resume")
    other.close()
    stand.handle()
    assert stand.control.may_start
    assert [type(event) for event in stand.said] == [Note, Note]


def test_a_failure_drains_and_keeps_its_reason(stand: Stand) -> None:
    stand.control.fail("no base config works")
    assert (stand.control.failed, stand.control.draining, stand.control.why) == (True, True, "no base config works")


def test_what_is_said_waits_for_the_end_of_the_transaction(tmp_path: Path) -> None:
    said: list[EngineEvent] = []
    outbox = Outbox(tmp_path, "s", said.append)
    outbox.tell(Note("one"))
    outbox.alarm("smoke", "0001")
    assert said == []
    assert not (tmp_path / "labbook.md").exists()
    outbox.tell_now("at once")
    outbox.flush()
    assert [event.text for event in said] == ["at once", "one", "smoke"]
    assert (tmp_path / "labbook.md").read_text().count("| smoke") == 1
    outbox.flush()
    assert len(said) == 3
