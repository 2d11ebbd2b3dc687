"""Runs outlive engines and supervisors: what a new executor makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looplab.launch import procfs, supervisor
from looplab.launch.base import Ended, Rejected, Slot, Started
from looplab.launch.local import LocalExecutor, find_by_mark, is_alive

Harness = Any
"""The value of the fixture `harness`; see conftest.py."""

GATED = """
import os, sys, time
print(os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
sys.exit(int(sys.argv[2]))
"""
FAMILY = """
import os, signal, sys, time
child = os.fork()
if child == 0 and sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def left_folder(harness: Harness, **process: Any) -> Path:
    """A run folder as somebody left it: started, with this `process.json`."""
    run_dir: Path = harness.folder / "left"
    run_dir.mkdir()
    (run_dir / "train.log").touch()
    if process:
        (run_dir / "process.json").write_text(json.dumps(process))
    return run_dir


# -- the engine is killed


def test_a_run_whose_engine_was_killed_ends_with_its_own_exit_code(harness: Harness) -> None:
    go = harness.folder / "go"
    harness.engine(harness.spec(harness.python(GATED, go, 7))).kill()
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    harness.nothing_more(executor)
    go.touch()
    end = harness.end(executor)
    assert (end.code, end.reason, end.signal) == (7, None, None)
    harness.nothing_more(executor)


def test_a_run_that_ended_after_its_engine_was_killed_is_reported_at_once(harness: Harness) -> None:
    go = harness.folder / "go"
    harness.engine(harness.spec(harness.python(GATED, go, 7))).kill()
    go.touch()
    harness.file("exit.json")
    harness.until(lambda: not supervisor.is_locked(str(harness.folder / "r1")))
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    assert [(e.run_id, e.exit.code) for e in executor.poll(0.0)] == [("r1", 7)]


@pytest.mark.parametrize("forged", ["exit.json", "exit.json process.json"])
@pytest.mark.parametrize("adopted", ["before", "after"])
def test_an_exit_that_the_trainer_wrote_is_not_believed_before_the_supervisor_has_written(
    harness: Harness, forged: str, adopted: str
) -> None:
    go = harness.folder / "go"
    engine = harness.engine(harness.spec(harness.python(GATED, go, 7)))
    harness.file("process.json")
    supervisor_pid = harness.supervisor_of(engine.pids["r1"])
    engine.kill()
    for name in forged.split():
        (harness.folder / "r1" / name).write_text('{"code": 77}')
    os.kill(supervisor_pid, signal.SIGSTOP)
    executor = harness.executor()
    if adopted == "before":
        assert executor.adopt("r1", harness.folder / "r1")
    go.touch()
    harness.until(lambda: procfs.is_zombie(engine.pids["r1"]))
    if adopted == "after":
        assert executor.adopt("r1", harness.folder / "r1")
    assert not [event for _ in range(5) for event in executor.poll(0.02) if isinstance(event, Ended)]
    os.kill(supervisor_pid, signal.SIGCONT)
    assert harness.end(executor).code == 7


def test_all_runs_of_a_killed_engine_are_adopted(harness: Harness) -> None:
    go, ids = harness.folder / "go", [f"r{i}" for i in range(4)]
    harness.engine(*(harness.spec(harness.python(GATED, go, i), run_id) for i, run_id in enumerate(ids))).kill()
    executor = harness.executor()
    assert all(executor.adopt(run_id, harness.folder / run_id) for run_id in ids)
    go.touch()
    assert {run_id: end.code for run_id, end in harness.ends(executor, *ids).items()} == dict(
        zip(ids, range(4), strict=True)
    )


def test_adopting_twice_is_adopting_once(harness: Harness) -> None:
    go = harness.folder / "go"
    harness.engine(harness.spec(harness.python(GATED, go, 7))).kill()
    executor = harness.executor()
    for _ in range(2):
        assert executor.adopt("r1", harness.folder / "r1")
    executor.start(harness.spec(harness.python(GATED, go, 7)))
    go.touch()
    assert [type(e) for e in harness.events(executor, lambda events: len(events) > 0)] == [Ended]
    harness.nothing_more(executor)


def test_a_stopped_adopted_run_goes_with_its_whole_group(harness: Harness) -> None:
    harness.engine(harness.spec(harness.python(FAMILY, harness.folder / "pids", "meek"), grace=60)).kill()
    pids = harness.pids("pids", 2)
    executor = harness.executor()
    executor.adopt("r1", harness.folder / "r1")
    executor.stop("r1", "stop", grace=60)
    end = harness.end(executor)
    assert (end.signal, end.reason) == (signal.SIGTERM, "stop")
    assert not any(map(harness.alive, pids))
    harness.nothing_more(executor)


@pytest.mark.parametrize("supervisor_lives", [True, False])
def test_a_stopped_adopted_run_that_does_not_go_is_killed(harness: Harness, supervisor_lives: bool) -> None:
    engine = harness.engine(
        harness.spec(harness.python(FAMILY, harness.folder / "pids", "stubborn"), grace=60, cleanup_timeout=60)
    )
    pids = harness.pids("pids", 2)
    harness.file("process.json")
    engine.kill()
    if not supervisor_lives:
        harness.kill(harness.supervisor_of(engine.pids["r1"]))
    executor = harness.executor()
    executor.adopt("r1", harness.folder / "r1")
    executor.stop("r1", "stop", grace=0.3)
    assert harness.end(executor).reason == "stop"
    assert not any(map(harness.alive, pids))


@pytest.mark.parametrize("end", ["itself", "stop"])
def test_a_start_after_an_adopted_run_waits_for_its_end(harness: Harness, end: str) -> None:
    go = harness.folder / "go"
    harness.engine(harness.spec(harness.python(GATED, go, 7))).kill()
    executor = harness.executor()
    executor.adopt("r1", harness.folder / "r1")
    executor.start(harness.spec(["/bin/true"], "r2"), after="r1")
    assert not (harness.folder / "r2/train.log").exists()
    if end == "itself":
        go.touch()
    else:
        executor.stop("r1", "stop", grace=60)
    events = harness.events(executor, lambda events: len([e for e in events if not isinstance(e, Started)]) == 2)
    told = [event for event in events if not isinstance(event, Started)]
    assert [event.run_id for event in told][-1] == "r2" or isinstance(told[0], Rejected)  # held for too long
    harness.nothing_more(executor)


@pytest.mark.parametrize("how", ["time", "cancel", "stop"])
def test_a_start_after_an_adopted_run_is_rejected(harness: Harness, how: str) -> None:
    harness.engine(harness.spec(["/bin/sleep", "600"])).kill()
    executor = harness.executor()
    executor.adopt("r1", harness.folder / "r1")
    executor.start(harness.spec(["/bin/true"], "r2"), after="r1")
    if how == "cancel":
        executor.cancel("r2")
    elif how == "stop":
        executor.stop("r2", "stop", grace=0)
    assert harness.events(executor, lambda events: len(events) > 0) == [Rejected("r2", None)]
    harness.nothing_more(executor)
    assert not (harness.folder / "r2/train.log").exists()


# -- the supervisor is killed too


def test_a_run_without_engine_and_supervisor_is_waited_for_and_then_lost(harness: Harness) -> None:
    go = harness.folder / "go"
    engine = harness.engine(harness.spec(harness.python(GATED, go, 7)))
    pid = engine.pids["r1"]
    harness.file("process.json")
    engine.kill()
    harness.kill(harness.supervisor_of(pid))
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    harness.nothing_more(executor)
    assert harness.alive(pid)
    go.touch()
    end = harness.end(executor)
    assert not harness.alive(pid)
    assert (end.code, end.reason, end.ok) == (None, "lost", False)
    assert "exit code" in str(end)
    assert end.started is not None
    assert end.started < end.ended


def test_a_run_that_was_lost_before_it_could_be_adopted_is_reported(harness: Harness) -> None:
    engine = harness.engine(harness.spec(["/bin/sleep", "600"]))
    pid = engine.pids["r1"]
    harness.file("process.json")
    engine.kill()
    harness.kill(harness.supervisor_of(pid))
    harness.kill(pid)
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    assert harness.end(executor).reason == "lost"


def test_what_a_run_without_a_supervisor_leaves_behind_is_ended(harness: Harness) -> None:
    engine = harness.engine(
        harness.spec(harness.python(FAMILY, harness.folder / "pids", "stubborn"), cleanup_timeout=0.1, grace=0.1)
    )
    pid = engine.pids["r1"]
    pids = harness.pids("pids", 2)
    harness.file("process.json")
    engine.kill()
    harness.kill(harness.supervisor_of(pid))
    executor = harness.executor()
    executor.adopt("r1", harness.folder / "r1")
    harness.kill(pid)
    end = harness.end(executor)
    assert (end.reason, end.lingered) == ("lost", True)
    assert not any(map(harness.alive, pids))


def test_a_time_limit_holds_for_an_adopted_run_without_a_supervisor(harness: Harness) -> None:
    engine = harness.engine(harness.spec(["/bin/sleep", "600"], timeout=600.0))
    pid = engine.pids["r1"]
    written = harness.file("process.json")
    engine.kill()
    harness.kill(harness.supervisor_of(pid))
    (harness.folder / "r1/process.json").write_text(
        json.dumps({**written, "timeout": 1.0})
    )  # not the supervisor's to hold
    executor = harness.executor()
    executor.adopt("r1", harness.folder / "r1")
    end = harness.end(executor)
    assert end.reason == "timeout"
    assert not harness.alive(pid)


def test_an_engine_whose_supervisor_is_killed_continues_with_its_runs(harness: Harness) -> None:
    executor, go = harness.executor(), harness.folder / "go"
    executor.start(harness.spec(harness.python(GATED, go, 7)))
    pid = harness.started(executor)
    harness.kill(harness.supervisor_of(pid))
    harness.nothing_more(executor)
    executor.start(harness.spec(["/bin/true"], "r2"))
    assert harness.end(executor, "r2").ok
    assert harness.alive(pid)
    go.touch()
    assert harness.end(executor).reason == "lost"


def test_a_start_sent_to_a_supervisor_that_was_just_killed_goes_to_the_next_one(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    pid = harness.started(executor)
    harness.kill(harness.supervisor_of(pid))
    executor.start(harness.spec(["/bin/true"], "r2"))  # the executor does not know yet
    events = harness.events(executor, lambda events: any(isinstance(event, Ended) for event in events))
    assert not any(isinstance(event, Rejected) for event in events)
    assert [event.run_id for event in events if isinstance(event, Ended)] == ["r2"]
    assert harness.alive(pid)


def test_a_stop_that_finds_the_supervisor_killed_still_ends_the_run(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    pid = harness.started(executor)
    harness.kill(harness.supervisor_of(pid))
    executor.stop("r1", "stop", grace=60)
    assert harness.end(executor).reason == "stop"
    assert not harness.alive(pid)


def test_a_start_that_a_killed_supervisor_never_read_is_rejected(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    supervisor_pid = harness.supervisor_of(harness.started(executor))
    os.kill(supervisor_pid, signal.SIGSTOP)
    executor.start(harness.spec(["/bin/true"], "r2"))
    harness.kill(supervisor_pid)
    (event,) = harness.events(executor, lambda events: len(events) > 0)
    assert isinstance(event, Rejected)
    executor.start(harness.spec(["/bin/true"], "r2"))
    assert harness.end(executor, "r2").ok


# -- nothing was written down


def start_and_kill_the_supervisor_at_once(harness: Harness) -> tuple[LocalExecutor, str, int]:
    """A run whose supervisor was killed before it could write down which process it is; what it did write is removed."""
    executor = harness.executor()
    executor.start(harness.spec(["/bin/true"], "first"))
    harness.end(executor, "first")
    spec = harness.spec(harness.python(GATED, harness.folder / "go", 7))
    executor.start(spec)
    own = executor._supervisor.pid  # it carries the mark itself while it starts the process
    (pid,) = harness.until(lambda: [pid for pid in find_by_mark(spec.run_dir) if pid != own])
    harness.kill(harness.supervisor_of(pid))
    for path in spec.run_dir.glob("process.json*"):
        path.unlink()
    return executor, "r1", pid


def test_a_run_of_which_nothing_was_written_down_is_found_by_its_mark(harness: Harness) -> None:
    executor, run_id, pid = start_and_kill_the_supervisor_at_once(harness)
    executor.close()
    executor = harness.executor()
    assert executor.adopt(run_id, harness.folder / run_id)
    deadline = time.monotonic() + 3  # longer than the file is waited for
    while time.monotonic() < deadline:
        assert executor.poll(1.0) == []
    assert harness.alive(pid)
    (harness.folder / "go").touch()
    assert harness.end(executor, run_id).reason == "lost"
    assert not harness.alive(pid)


def test_a_run_of_which_nothing_was_written_down_can_be_stopped(harness: Harness) -> None:
    executor, run_id, pid = start_and_kill_the_supervisor_at_once(harness)
    executor.stop(run_id, "stop", grace=60)
    assert harness.end(executor, run_id).reason == "stop"
    assert not harness.alive(pid)


def test_a_run_that_ends_before_its_process_file_is_written_is_reported(harness: Harness) -> None:
    run_dir = left_folder(harness)
    executor = harness.executor()
    temporary = run_dir / "exit.json.new"
    temporary.write_text(json.dumps({"code": 7}))
    assert executor.adopt("left", run_dir)
    assert executor.poll(0.0) == []
    temporary.rename(run_dir / "exit.json")
    assert harness.end(executor, "left").code == 7


def test_a_run_of_which_nothing_is_left_is_lost(harness: Harness) -> None:
    executor = harness.executor()
    assert executor.adopt("left", left_folder(harness))
    assert harness.end(executor, "left").reason == "lost"


# -- numbers are given to others


def test_a_process_is_known_by_its_start_and_boot_not_by_its_number(bystander: subprocess.Popen[bytes]) -> None:
    ticks, boot = supervisor.start_ticks(bystander.pid), supervisor.boot_id()
    assert is_alive(bystander.pid, ticks, boot)
    assert not is_alive(bystander.pid, ticks + 1, boot)
    assert not is_alive(bystander.pid, ticks, "another boot")
    bystander.kill()
    os.waitid(os.P_PID, bystander.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(bystander.pid, ticks, boot)


@pytest.mark.parametrize("wrong", ["start", "boot"])
def test_a_number_that_now_belongs_to_another_is_left_alone(
    harness: Harness, bystander: subprocess.Popen[bytes], wrong: str
) -> None:
    process = {
        "pid": bystander.pid,
        "start": supervisor.start_ticks(bystander.pid),
        "boot": supervisor.boot_id(),
        "supervisor": 1,
    }
    process[wrong] = {"start": 12345, "boot": "another boot"}[wrong]
    executor = harness.executor()
    assert executor.adopt("left", left_folder(harness, **process))
    executor.stop("left", "stop", grace=0)
    assert harness.end(executor, "left").reason == "lost"
    assert bystander.poll() is None


def test_a_supervisor_with_the_number_of_an_earlier_one_is_not_waited_for(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    new_supervisor = harness.supervisor_of(harness.started(executor))
    run_dir = left_folder(
        harness,
        pid=2**22,
        start=1,
        boot=supervisor.boot_id(),
        supervisor=new_supervisor,
        supervisor_start=1,
        started=1.0,
    )
    assert executor.adopt("left", run_dir)
    assert harness.end(executor, "left").reason == "lost"


# -- devices


def test_a_device_stays_locked_while_a_training_without_engine_and_supervisor_uses_it(harness: Harness) -> None:
    slot, go = Slot("gpu0", devices=("0",)), harness.folder / "go"
    engine = harness.engine(harness.spec(harness.python(GATED, go, 0), slot=slot))
    pid = engine.pids["r1"]
    supervisor_pid = harness.supervisor_of(pid)
    engine.kill()
    harness.kill(supervisor_pid)
    executor = harness.executor()
    waiting = harness.spec(["/bin/true"], "r2", slot=slot)
    executor.start(waiting)
    assert harness.events(executor, lambda events: len(events) > 0) == [Rejected("r2", str(harness.folder / "r1"))]
    go.touch()
    harness.until(lambda: not harness.alive(pid))
    executor.start(waiting)
    assert harness.end(executor, "r2").ok


def test_however_many_devices_a_run_has_all_of_them_stay_locked(harness: Harness) -> None:
    devices = tuple(map(str, range(150)))
    engine = harness.engine(harness.spec(["/bin/sleep", "600"], slot=Slot("all", devices=devices)))
    pid = engine.pids["r1"]
    supervisor_pid = harness.supervisor_of(pid)
    engine.kill()
    harness.kill(supervisor_pid)
    executor = harness.executor()
    for device in devices:
        executor.start(harness.spec(["/bin/true"], f"on-{device}", slot=Slot("one", devices=(device,))))
    events = harness.events(executor, lambda events: len(events) == len(devices))
    assert {type(event) for event in events} == {Rejected}


def test_a_lock_that_cannot_be_taken_gives_the_run_back(harness: Harness) -> None:
    executor, slot = harness.executor(), Slot("gpu0", devices=("0",))
    (harness.folder / "locks/gpu-0.0.lock").mkdir(parents=True)
    executor.start(harness.spec(["/bin/true"], slot=slot))
    (event,) = harness.events(executor, lambda events: len(events) > 0)
    assert isinstance(event, Rejected)
    assert "gpu-0.0.lock" in event.holder


def test_a_run_is_adopted_by_its_record_folder(harness: Harness) -> None:
    record = harness.folder / "r1/record"
    record.mkdir(parents=True)
    spec = harness.spec(["/bin/sleep", "600"], record_dir=record)
    engine = harness.engine(spec)
    engine.kill()
    executor = harness.executor()
    assert executor.adopt("r1", spec.run_dir) is False
    assert executor.adopt("r1", spec.run_dir, record)
    executor.stop("r1", "stop", grace=60)
    assert harness.end(executor).reason == "stop"
    assert harness.file("record/exit.json")["signal"] == signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[]", "{}", '{"pid": "x", "start": 1, "supervisor": 2, "boot": ""}', "torn"])
def test_what_a_run_writes_over_its_own_record_does_not_hide_it(harness: Harness, text: str) -> None:
    engine = harness.engine(harness.spec(["/bin/sleep", "600"]))
    engine.kill()
    for name in ("process.json", "exit.json"):
        harness.until((harness.folder / "r1/process.json").exists)
        (harness.folder / "r1" / name).write_text(text)
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    executor.stop("r1", "stop", grace=60)
    assert harness.end(executor).reason == "stop"


def test_an_end_is_not_believed_while_the_process_lives(harness: Harness) -> None:
    engine = harness.engine(harness.spec(["/bin/sleep", "600"]))
    engine.kill()
    harness.file("process.json")
    (harness.folder / "r1/exit.json").write_text('{"code": 0}')
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "r1")
    assert not [event for event in executor.poll(0.1) if isinstance(event, Ended)]
    executor.stop("r1", "stop", grace=60)
    harness.end(executor)
