"""A long queue, and other processes that write to the ledger while an engine plans it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.loop.test_preview import STUDY, InstantExecutor, set_up, train, write_lab

from looplab.config import files
from looplab.decide.queue import PORTION
from looplab.launch.base import LaunchSpec
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.roles import Origin
from looplab.ledger.study import StudyLedger
from looplab.loop import planning
from looplab.loop.engine import Engine
from looplab.loop.planning import AHEAD
from looplab.loop.setup import RunOptions


class Transactions:
    """Counts the events of every outermost transaction, and notes what is done inside one that may take long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[int] = []
        self.slow: list[str] = []
        self._open: dict[int, int] = {}  # by thread
        write = Ledger.write
        note = self

        @contextmanager
        def counted(ledger: Ledger) -> Iterator[None]:
            before = ledger.head()[0]
            with write(ledger):
                thread = threading.get_ident()
                note._open[thread] = note._open.get(thread, 0) + 1
                try:
                    yield
                finally:
                    note._open[thread] -= 1
            if note._open[thread] == 0:
                note.events.append(ledger.head()[0] - before)

        monkeypatch.setattr(Ledger, "write", counted)
        for where, name in ((files, "_parse_yaml"), (files, "_parse_json"), (subprocess, "run")):
            self._watch(monkeypatch, where, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
        original = getattr(where, name)

        def watched(*args: Any, **options: Any) -> Any:
            if self._open.get(threading.get_ident()):
                self.slow.append(f"{name}{args[:1]}")
            return original(*args, **options)

        monkeypatch.setattr(where, name, watched)


@pytest.mark.parametrize("continuous", [False, True])
def test_others_can_write_at_every_step_of_an_engine_that_plans_a_long_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continuous: bool
) -> None:
    queue = [{"edits": [f"x@set={n % 31}"], "reason": f"try {n}"} for n in range(3000)]
    write_lab(tmp_path / "lab", {**STUDY, "proposers": [{"queue": "queue.yaml"}]}, queue=queue)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "lab", check=True)
    setup = set_up(tmp_path / "lab", RunOptions(runs=30, continuous=continuous))
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    beside = StudyLedger(Ledger(setup.lab / ".looplab" / "ledger.db"), "toy")
    transactions = Transactions(monkeypatch)
    executor = InstantExecutor(train)
    executor.on_end = lambda n: beside.say(f"{n} runs have ended")
    engine = Engine(setup, ledger, executor)
    engine.run()
    assert len(beside.messages(100)) == 30
    assert not transactions.slow
    assert max(transactions.events) <= PORTION + 2 * AHEAD


def test_a_stop_is_obeyed_between_two_portions_of_a_queue(tmp_path: Path) -> None:
    queue = [{"edits": [f"x@set={n % 31}"], "reason": f"try {n}"} for n in range(3000)]
    write_lab(tmp_path / "lab", {**STUDY, "proposers": [{"queue": "queue.yaml"}]}, queue=queue)
    setup = set_up(tmp_path / "lab", RunOptions())
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    beside = StudyLedger(Ledger(setup.lab / ".looplab" / "ledger.db"), "toy")
    executor = InstantExecutor(train)
    executor.on_end = lambda n: beside.command("stop") if n == 1 else None
    outcome = Engine(setup, ledger, executor).run()
    assert outcome.ending == "stopped"
    assert StudyLedger(ledger, "toy").usage().runs < 100
    assert len(StudyLedger(ledger, "toy").proposals()) < 3000  # the rest is taken in by the next engine


def test_a_large_round_starts_before_it_is_decided_and_only_what_is_committed(tmp_path: Path) -> None:
    runs, slots = 2 * AHEAD, STUDY["slots"]["count"]
    queue = [{"edits": [f"x@set={n % 31}"], "reason": f"try {n}"} for n in range(runs)]
    write_lab(tmp_path / "lab", {**STUDY, "proposers": [{"queue": "queue.yaml"}], "round_size": runs}, queue=queue)
    setup = set_up(tmp_path / "lab", RunOptions(rounds=1))
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    beside = StudyLedger(Ledger(setup.lab / ".looplab" / "ledger.db"), "toy")
    planned: list[int] = []

    class WatchedExecutor(InstantExecutor):
        def start(self, spec: LaunchSpec, after: str | None = None) -> None:
            assert beside.run(spec.run_id).state == "planned"  # seen from outside of the engine's transaction
            planned.append(len(beside.runs()))
            super().start(spec, after)

    assert Engine(setup, ledger, WatchedExecutor(train)).run().ending == "done"
    assert planned[0] == 2 * slots
    assert len(planned) == len(beside.runs()) == runs
    assert {run.state for run in beside.runs()} == {"ended"}
    assert ledger.first_broken_link() is None


def test_what_watch_rules_requeued_does_not_hold_up_others_when_the_rules_are_gone(tmp_path: Path) -> None:
    write_lab(tmp_path / "lab", {**STUDY, "proposers": [{"queue": "queue.yaml"}]}, queue=[])
    setup = set_up(tmp_path / "lab", RunOptions(runs=1))
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    Engine(setup, ledger, InstantExecutor(train)).run()
    study = StudyLedger(ledger, "toy")
    with ledger.write():
        for n in range(AHEAD):
            study.propose(Origin.WATCH, (), "requeued", parent=study.run("1").id, source=f"watch:{n}")
        study.propose(Origin.AGAIN, (), "reproduce it", parent=study.run("1").id, source="again:1:1")
    Engine(set_up(tmp_path / "lab", RunOptions(asked_only=True)), ledger, InstantExecutor(train)).run()
    assert [(run.proposer, run.state) for run in study.runs()] == [("base", "ended"), ("again", "ended")]


def test_a_costly_sum_is_computed_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = cpu = 0.0
    calls: list[float] = []
    cost = 0.0

    def total() -> float:
        nonlocal now, cpu
        now, cpu = now + cost, cpu + cost
        calls.append(now)
        return now

    monkeypatch.setattr(planning.time, "monotonic", lambda: now)
    monkeypatch.setattr(planning.time, "thread_time", lambda: cpu)
    rationed = planning.Rationed(total)
    assert [rationed() for _ in range(5)] == calls
    assert len(calls) == 5  # it costs nothing, so it is never old
    calls.clear()
    cost = 0.04
    for _ in range(10_000):
        assert rationed() == calls[-1]
        assert now - calls[-1] <= planning.KEPT_RATIO * cost + 0.011
        now += 0.01
    assert cpu <= now / planning.KEPT_RATIO


@pytest.mark.parametrize("size", [200, 4000])
def test_planning_does_not_read_the_whole_queue_or_all_ended_runs(tmp_path: Path, size: int) -> None:
    """What is asked for each planned or retried run takes SQLite as many steps for a long queue as for a short one."""
    ledger = Ledger(tmp_path / "ledger.db")
    study = StudyLedger(ledger, "toy")
    study.open(None, "min")
    with ledger.write():
        round_ = study.begin_round()
        for n in range(size):
            study.propose("person", [f"x@set={n}"], "waits")
            run = study.plan(
                round=round_, proposal=None, proposer="person", parent=None, base="base.json", reason="",
                config_hash=f"{n:016x}", devices=1, plan=RunPlan({}),
            )  # fmt: skip
            if n:
                study.ended(run.id, status="ok", code=0, signal=None, started=1.0, ended=2.0, objective=None, files={})
        study.propose(Origin.AGAIN, (), "reproduce", parent="1", source="again:1:1")
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    ledger._db.set_progress_handler(count, 10)  # each ten steps
    assert [row.proposer for row in study.requeued(10)] == [Origin.AGAIN]
    assert [row.id for row in study.waiting(3)] == [1, 2, 3]
    assert [run.n for run in study.runs_open()] == [1]
    assert study.lost_attempts("1") == []
    assert study.usage([]).device_hours == 0.0
    ledger._db.set_progress_handler(None, 0)
    assert steps < 100
