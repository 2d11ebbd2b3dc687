"""What every executor promises (`looplab.testing`), and what a local one promises beyond that."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.launch.base import Ended, Executor, Rejected, Slot, Started
from looplab.launch.local import LocalExecutor
from looplab.testing.executors import ONCE, ExecutorContract

Harness = Any
"""The value of the fixture `harness`; see conftest.py."""

STUBBORN_FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


class TestLocalExecutor(ExecutorContract):
    patience_s = PATIENCE_S

    def make_executor(self) -> Executor:
        return LocalExecutor()


# -- starting and ending


def test_the_end_says_when_it_was_and_what_was_used(harness: Harness) -> None:
    end = harness.run(harness.python("x = bytearray(30_000_000)"))
    assert end.started < end.ended
    assert end.user_s + end.system_s > 0
    assert end.max_rss_kb > 30_000
    assert not end.lingered


# -- what cannot be started


def test_cores_that_do_not_exist_are_reported(harness: Harness) -> None:
    assert harness.run(["/bin/true"], slot=Slot("cpu0", cores=(100_000,))).reason == "not started"


# -- at most once


def test_a_failing_start_does_not_touch_a_live_run(harness: Harness) -> None:
    first, second = harness.executor(), harness.executor()
    first.start(harness.spec(["/bin/sleep", "600"]))
    pid = harness.started(first)
    second.start(harness.spec(["/bin/sleep", "600"], cwd=harness.folder / "missing"))
    harness.nothing_more(second)
    assert harness.alive(pid)
    assert not (harness.folder / "r1/exit.json").exists()
    first.stop("r1", "stop", 10)
    assert harness.end(first).reason == "stop"
    assert harness.end(second).signal == signal.SIGTERM


# -- one after the other


def test_a_start_that_is_pending_too_long_is_rejected(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    harness.started(executor)
    waiting = harness.spec(["/bin/true"], "r2")
    executor.start(waiting, after="r1")
    (event,) = harness.events(executor, lambda events: len(events) > 0)
    assert event == Rejected("r2", None)
    assert not (waiting.run_dir / "train.log").exists()
    executor.stop("r1", "stop", grace=60)
    assert set(harness.ends(executor, "r1")) == {"r1"}
    harness.nothing_more(executor)


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_pending_start_can_be_cancelled(harness: Harness, how: str) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    harness.started(executor)
    waiting = harness.spec(["/bin/true"], "r2")
    executor.start(waiting, after="r1")
    executor.cancel("r2") if how == "cancel" else executor.stop("r2", "stop", 0)
    (event,) = harness.events(executor, lambda events: len(events) > 0)
    assert event == Rejected("r2", None)
    executor.stop("r1", "stop", grace=60)
    harness.end(executor)
    harness.nothing_more(executor)
    assert not (waiting.run_dir / "train.log").exists()


def test_what_has_started_cannot_be_taken_back(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    pid = harness.started(executor)
    executor.cancel("r1")
    executor.cancel("nobody")
    harness.nothing_more(executor)
    assert harness.alive(pid)


def test_a_pending_start_is_dropped_without_its_executor(harness: Harness) -> None:
    executor, trace = harness.executor(), harness.folder / "trace"
    executor.start(harness.spec(["/bin/sleep", "600"]))
    harness.started(executor)
    executor.start(harness.spec(harness.python(ONCE, trace, 0), "r2"), after="r1")
    executor.stop("r1", "stop", grace=60)
    executor.close()
    assert harness.file("exit.json")["reason"] == "stop"
    other = harness.executor()
    if other.adopt("r2", harness.folder / "r2"):  # it was faster than the end of the executor
        harness.end(other, "r2")
    else:
        assert not trace.exists()


# -- stopping


def test_a_run_that_does_not_go_is_killed_with_all_its_processes(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(harness.python(STUBBORN_FAMILY, harness.folder / "pids"), grace=60))
    pids = harness.pids("pids", 2)
    executor.stop("r1", "stall", grace=0.2)
    end = harness.end(executor)
    assert (end.signal, end.reason) == (signal.SIGKILL, "stall")
    assert not any(map(harness.alive, pids))


def test_a_second_stop_with_less_patience_counts(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(harness.python(STUBBORN_FAMILY, harness.folder / "pids")))
    harness.pids("pids", 2)
    executor.stop("r1", "stop", grace=3600)
    executor.stop("r1", "again", grace=0)
    end = harness.end(executor)
    assert (end.signal, end.reason) == (signal.SIGKILL, "stop")


def test_only_the_stopped_run_ends(harness: Harness) -> None:
    executor = harness.executor()
    for run_id in ("r1", "r2"):
        executor.start(harness.spec(["/bin/sleep", "600"], run_id))
    executor.stop("r2", "stop", grace=60)
    assert set(harness.ends(executor, "r2")) == {"r2"}
    assert harness.alive(harness.file("process.json", "r1")["pid"])
    assert not any(isinstance(event, Ended) for event in executor.poll(0.1))


# -- what a training finds


def test_a_recreated_working_folder_is_the_new_one(harness: Harness) -> None:
    executor, cwd = harness.executor(), harness.folder / "work"
    for run_id in ("r1", "r2"):
        cwd.mkdir()
        (cwd / "here").write_text(run_id)
        executor.start(harness.spec(["/bin/cat", "here"], run_id, cwd=cwd))
        assert harness.end(executor, run_id).ok
        (cwd / "here").unlink()
        cwd.rmdir()
    assert harness.log("r2") == "r2"


def test_the_cores_are_those_of_the_slot(harness: Harness) -> None:
    cores = sorted(os.sched_getaffinity(0))
    executor = harness.executor()
    show = harness.python("import os; print(sorted(os.sched_getaffinity(0)))")
    for run_id, pinned in (("r1", (cores[-1],)), ("r2", ())):
        executor.start(harness.spec(show, run_id, slot=Slot("cpu0", cores=pinned)))
    harness.ends(executor, "r1", "r2")
    assert json.loads(harness.log("r1")) == cores[-1:]
    assert json.loads(harness.log("r2")) == cores


def test_a_run_leads_a_session_of_its_own(harness: Harness) -> None:
    harness.run(harness.python("import os; print([os.getpid(), os.getpgrp(), os.getsid(0)])"))
    pid, group, session = json.loads(harness.log())
    assert pid == group == session


def test_a_run_has_nothing_to_read_and_no_descriptors_of_others(harness: Harness) -> None:
    code = """
import os, sys
assert sys.stdin.read() == ""
for fd in sorted(os.listdir("/proc/self/fd"), key=int):
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        print(fd, os.readlink(f"/proc/self/fd/{fd}"))
"""
    (harness.folder / "held").touch()
    with (harness.folder / "held").open() as held:
        os.set_inheritable(held.fileno(), True)
        assert harness.run(harness.python(code)).ok
    log = harness.folder / "r1/train.log"
    # Beside its streams only the lock on its own folder, by which others see that it is alive.
    assert harness.log().splitlines() == ["0 /dev/null", f"1 {log}", f"2 {log}", f"100 {log.parent}"]


def test_no_signal_is_ignored_or_blocked_in_a_run(harness: Harness) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as it is in the background of a script
    try:
        harness.run(["/bin/cat", "/proc/self/status"])
    finally:
        signal.signal(signal.SIGQUIT, before)
    status = dict(line.split(":", 1) for line in harness.log().splitlines())
    of_the_c_library = 1 << 31 | 1 << 32  # it uses signals 32 and 33 for itself
    assert int(status["SigIgn"], 16) & ~of_the_c_library == 0
    assert int(status["SigBlk"], 16) == 0


# -- devices


def test_a_device_is_given_to_one_run_at_a_time_on_the_whole_machine(harness: Harness) -> None:
    first, second = harness.executor(), harness.executor()
    slot = Slot("gpu0", devices=("0",))
    first.start(harness.spec(["/bin/sleep", "600"], "r1", slot=slot))
    harness.started(first)
    waiting = harness.spec(["/bin/true"], "r2", slot=slot)
    second.start(waiting)
    events = harness.events(second, lambda events: len(events) > 0)
    assert events == [Rejected("r2", str(harness.folder / "r1"))]
    assert not (waiting.run_dir / "train.log").exists()
    first.stop("r1", "stop", 60)
    harness.end(first)
    second.start(waiting)
    assert harness.end(second, "r2").ok


def test_other_devices_and_other_lanes_are_free(harness: Harness) -> None:
    executor = harness.executor()
    slots = [Slot("gpu0", ("0",)), Slot("gpu1", ("1",)), Slot("gpu0.1", ("0",), device_share=1)]
    for i, slot in enumerate(slots):
        executor.start(harness.spec(["/bin/sleep", "600"], f"r{i}", slot=slot))
    events = harness.events(executor, lambda events: len(events) == 3)
    assert {type(event) for event in events} == {Started}


def test_a_run_that_needs_two_devices_takes_both_or_none(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"], "one", slot=Slot("gpu1", ("1",))))
    harness.started(executor, "one")
    executor.start(harness.spec(["/bin/true"], "both", slot=Slot("gpu01", ("0", "1"))))
    assert isinstance(harness.events(executor, lambda events: len(events) > 0)[0], Rejected)
    executor.start(harness.spec(["/bin/true"], "other", slot=Slot("gpu0", ("0",))))
    assert harness.end(executor, "other").ok
