"""A machine's clock that is set forward or back changes no duration."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.launch.conftest import Harness
from tests.loop.small_lab import EngineThread, make_lab, until

from looplab.launch import supervisor
from looplab.launch.base import Started
from looplab.launch.local import LocalExecutor
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.runs import clock

MONTH = 30 * 86400.0
REAL = time.time


@pytest.mark.parametrize("jump", [MONTH, -MONTH, 7200.0])
def test_the_clock_for_durations_does_not_jump(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: REAL() + jump)
    assert 0 <= clock.now() - before < 600


@pytest.mark.parametrize("jump", [MONTH, -MONTH])
def test_what_a_session_used_does_not_depend_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    study = StudyLedger(Ledger(tmp_path / ".looplab/ledger.db"), "s")
    session = study.begin_session("host", 1, 1)
    monkeypatch.setattr(time, "time", lambda: REAL() + jump)
    study.heartbeat(session)
    assert 0 <= study.usage().wall < 600
    study.end_session(session, "done")
    assert 0 <= study.usage().wall < 600
    assert 0 <= study.shared_usage().wall < 600


def test_sessions_that_seem_to_end_before_they_began_use_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / ".looplab/ledger.db")
    ledger.execute("INSERT INTO sessions VALUES (1, 's', 'h', 1, 1, 5000.0, 1000.0, 1000.0, 'done')")
    assert StudyLedger(ledger, "s").usage().wall == 0


@pytest.mark.parametrize("jump", [MONTH, -MONTH])
def test_the_supervisor_measures_a_run_by_the_monotonic_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Its clock is set after the start of the run."""
    script = tmp_path / "supervisor.py"
    script.write_text(
        "import runpy, time\nreal, asked = time.time, []\n"
        f"time.time = lambda: asked.append(0) or real() + (0 if len(asked) == 1 else {jump})\n"
        f"runpy.run_path({supervisor.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(supervisor, "__file__", str(script))
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    harness = Harness(tmp_path, LocalExecutor)
    end = harness.run(["/bin/sleep", "0.05"])
    harness.tidy()
    assert end.ok
    assert end.started is not None
    assert end.ended is not None
    assert 0.04 < end.ended - end.started < 600


@pytest.mark.parametrize("jump", [MONTH, -MONTH])
def test_an_adopted_run_is_as_old_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """The clock was set between two engines."""
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    harness = Harness(tmp_path, LocalExecutor)
    engine = harness.engine(harness.spec(["/bin/sleep", "600"], timeout=500.0))
    harness.file("process.json")
    engine.kill()
    monkeypatch.setattr(clock, "_OFFSET", clock._OFFSET + jump)
    monkeypatch.setattr(time, "time", lambda: REAL() + jump)
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    (event,) = harness.events(executor, bool)
    assert isinstance(event, Started)
    assert 0 <= clock.now() - event.at < 600
    assert executor.poll(0.0) == []  # nor is it over its time
    executor.stop("r1", "stop", grace=60)
    end = harness.end(executor)
    assert end.reason != "timeout"
    assert end.started is not None
    assert end.ended is not None
    assert 0 <= end.ended - end.started < 600
    harness.tidy()


def test_no_healthy_run_is_stopped_when_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    gate = tmp_path / "gate"
    rules = "watch: [{stall: 10m, stop: true}, {timeout: 30m, stop: true}]\nbudget: {wall: 10h, device_hours: 10}\n"
    engine = EngineThread(make_lab(tmp_path / "lab", gate, rules))
    engine.until_running()
    path = tmp_path / "lab/.looplab/ledger.db"
    until(lambda: StudyLedger(Ledger(path), "small").runs()[0].started)
    for jump in (MONTH, -MONTH):
        monkeypatch.setattr(time, "time", lambda jump=jump: REAL() + jump)
        seen = time.monotonic()
        until(lambda seen=seen: time.monotonic() > seen + 1.0)  # several looks of the watch rules
    gate.touch()
    engine.join()
    assert engine.error is None
    runs = StudyLedger(Ledger(path), "small").runs()
    assert [run.status for run in runs] == ["ok", "ok"]
    assert all(run.seconds is not None and 0 <= run.seconds < 600 for run in runs)
    assert 0 <= StudyLedger(Ledger(path), "small").usage().wall < 600


def test_durations_are_short_texts() -> None:
    texts = [clock.format_seconds(value) for value in (None, 0.04, 59.94, 60, 185.9, 3599, 3600, 7 * 3600 + 65)]
    assert texts == ["-", "0.0s", "59.9s", "1m00s", "3m05s", "59m59s", "1h00m", "7h01m"]
