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

Stand = Any
"""What the fixture `stand` gives; see conftest.py."""

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


def test_the_end_says_when_it_was_and_what_was_used(stand: Stand) -> None:
    end = stand.run(stand.python("x = bytearray(30_000_000)"))
    assert end.started < end.ended
    assert end.user_s + end.system_s > 0
    assert end.max_rss_kb > 30_000
    assert not end.lingered


# -- what cannot be started


def test_cores_that_do_not_exist_are_reported(stand: Stand) -> None:
    assert stand.run(["/bin/true"], slot=Slot("cpu0", cores=(100_000,))).reason == "not started"


# -- at most once


def test_a_failing_start_does_not_touch_a_live_run(stand: Stand) -> None:
    first, second = stand.executor(), stand.executor()
    first.start(stand.spec(["/bin/sleep", "600"]))
    pid = stand.started(first)
    second.start(stand.spec(["/bin/sleep", "600"], cwd=stand.folder / "missing"))
    stand.nothing_more(second)
    assert stand.alive(pid)
    assert not (stand.folder / "r1/exit.json").exists()
    first.stop("r1", "stop", 10)
    assert stand.end(first).reason == "stop"
    assert stand.end(second).signal == signal.SIGTERM


# -- one after the other


def test_a_start_that_is_pending_too_long_is_rejected(stand: Stand) -> None:
    executor = stand.executor()
    executor.start(stand.spec(["/bin/sleep", "600"]))
    stand.started(executor)
    waiting = stand.spec(["/bin/true"], "r2")
    executor.start(waiting, after="r1")
    (event,) = stand.events(executor, lambda events: len(events) > 0)
    assert event == Rejected("r2", None)
    assert not (waiting.run_dir / "train.log").exists()
    executor.stop("r1", "stop", grace=60)
    assert set(stand.ends(executor, "r1")) == {"r1"}
    stand.nothing_more(executor)


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_pending_start_can_be_cancelled(stand: Stand, how: str) -> None:
    executor = stand.executor()
    executor.start(stand.spec(["/bin/sleep", "600"]))
    stand.started(executor)
    waiting = stand.spec(["/bin/true"], "r2")
    executor.start(waiting, after="r1")
    executor.cancel("r2") if how == "cancel" else executor.stop("r2", "stop", 0)
    (event,) = stand.events(executor, lambda events: len(events) > 0)
    assert event == Rejected("r2", None)
    executor.stop("r1", "stop", grace=60)
    stand.end(executor)
    stand.nothing_more(executor)
    assert not (waiting.run_dir / "train.log").exists()


def test_what_has_started_cannot_be_taken_back(stand: Stand) -> None:
    executor = stand.executor()
    executor.start(stand.spec(["/bin/sleep", "600"]))
    pid = stand.started(executor)
    executor.cancel("r1")
    executor.cancel("nobody")
    stand.nothing_more(executor)
    assert stand.alive(pid)


def test_a_pending_start_is_dropped_without_its_executor(stand: Stand) -> None:
    executor, trace = stand.executor(), stand.folder / "trace"
    executor.start(stand.spec(["/bin/sleep", "600"]))
    stand.started(executor)
    executor.start(stand.spec(stand.python(ONCE, trace, 0), "r2"), after="r1")
    executor.stop("r1", "stop", grace=60)
    executor.close()
    assert stand.file("exit.json")["reason"] == "stop"
    other = stand.executor()
    if other.adopt("r2", stand.folder / "r2"):  # it was faster than the end of the executor
        stand.end(other, "r2")
    else:
        assert not trace.exists()


# -- stopping


def test_a_run_that_does_not_go_is_killed_with_all_its_processes(stand: Stand) -> None:
    executor = stand.executor()
    executor.start(stand.spec(stand.python(STUBBORN_FAMILY, stand.folder / "pids"), grace=60))
    pids = stand.pids("pids", 2)
    executor.stop("r1", "stall", grace=0.2)
    end = stand.end(executor)
    assert (end.signal, end.reason) == (signal.SIGKILL, "stall")
    assert not any(map(stand.alive, pids))


def test_a_second_stop_with_less_patience_counts(stand: Stand) -> None:
    executor = stand.executor()
    executor.start(stand.spec(stand.python(STUBBORN_FAMILY, stand.folder / "pids")))
    stand.pids("pids", 2)
    executor.stop("r1", "stop", grace=3600)
    executor.stop("r1", "again", grace=0)
    end = stand.end(executor)
    assert (end.signal, end.reason) == (signal.SIGKILL, "stop")


def test_only_the_stopped_run_ends(stand: Stand) -> None:
    executor = stand.executor()
    for run_id in ("r1", "r2"):
        executor.start(stand.spec(["/bin/sleep", "600"], run_id))
    executor.stop("r2", "stop", grace=60)
    assert set(stand.ends(executor, "r2")) == {"r2"}
    assert stand.alive(stand.file("process.json", "r1")["pid"])
    assert not any(isinstance(event, Ended) for event in executor.poll(0.1))


# -- what a training finds


def test_a_recreated_working_folder_is_the_new_one(stand: Stand) -> None:
    executor, cwd = stand.executor(), stand.folder / "work"
    for run_id in ("r1", "r2"):
        cwd.mkdir()
        (cwd / "here").write_text(run_id)
        executor.start(stand.spec(["/bin/cat", "here"], run_id, cwd=cwd))
        assert stand.end(executor, run_id).ok
        (cwd / "here").unlink()
        cwd.rmdir()
    assert stand.log("r2") == "r2"


def test_the_cores_are_those_of_the_slot(stand: Stand) -> None:
    cores = sorted(os.sched_getaffinity(0))
    executor = stand.executor()
    show = stand.python("import os; print(sorted(os.sched_getaffinity(0)))")
    for run_id, pinned in (("r1", (cores[-1],)), ("r2", ())):
        executor.start(stand.spec(show, run_id, slot=Slot("cpu0", cores=pinned)))
    stand.ends(executor, "r1", "r2")
    assert json.loads(stand.log("r1")) == cores[-1:]
    assert json.loads(stand.log("r2")) == cores


def test_a_run_leads_a_session_of_its_own(stand: Stand) -> None:
    stand.run(stand.python("import os; print([os.getpid(), os.getpgrp(), os.getsid(0)])"))
    pid, group, session = json.loads(stand.log())
    assert pid == group == session


def test_a_run_has_nothing_to_read_and_no_descriptors_of_others(stand: Stand) -> None:
    code = """
import os, sys
assert sys.stdin.read() == ""
for fd in sorted(os.listdir("/proc/self/fd"), key=int):
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        print(fd, os.readlink(f"/proc/self/fd/{fd}"))
"""
    (stand.folder / "held").touch()
    with (stand.folder / "held").open() as held:
        os.set_inheritable(held.fileno(), True)
        assert stand.run(stand.python(code)).ok
    log = stand.folder / "r1/train.log"
    # Beside its streams only the lock on its own folder, by which others see that it is alive.
    assert stand.log().splitlines() == ["0 /dev/null", f"1 {log}", f"2 {log}", f"100 {log.parent}"]


def test_no_signal_is_ignored_or_blocked_in_a_run(stand: Stand) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as it is in the background of a script
    try:
        stand.run(["/bin/cat", "/proc/self/status"])
    finally:
        signal.signal(signal.SIGQUIT, before)
    status = dict(line.split(":", 1) for line in stand.log().splitlines())
    of_the_c_library = 1 << 31 | 1 << 32  # it uses signals 32 and 33 for itself
    assert int(status["SigIgn"], 16) & ~of_the_c_library == 0
    assert int(status["SigBlk"], 16) == 0


# -- devices


def test_a_device_is_given_to_one_run_at_a_time_on_the_whole_machine(stand: Stand) -> None:
    first, second = stand.executor(), stand.executor()
    slot = Slot("gpu0", devices=("0",))
    first.start(stand.spec(["/bin/sleep", "600"], "r1", slot=slot))
    stand.started(first)
    waiting = stand.spec(["/bin/true"], "r2", slot=slot)
    second.start(waiting)
    events = stand.events(second, lambda events: len(events) > 0)
    assert events == [Rejected("r2", str(stand.folder / "r1"))]
    assert not (waiting.run_dir / "train.log").exists()
    first.stop("r1", "stop", 60)
    stand.end(first)
    second.start(waiting)
    assert stand.end(second, "r2").ok


def test_other_devices_and_other_lanes_are_free(stand: Stand) -> None:
    executor = stand.executor()
    slots = [Slot("gpu0", ("0",)), Slot("gpu1", ("1",)), Slot("gpu0.1", ("0",), device_share=1)]
    for i, slot in enumerate(slots):
        executor.start(stand.spec(["/bin/sleep", "600"], f"r{i}", slot=slot))
    events = stand.events(executor, lambda events: len(events) == 3)
    assert {type(event) for event in events} == {Started}


def test_a_run_that_needs_two_devices_takes_both_or_none(stand: Stand) -> None:
    executor = stand.executor()
    executor.start(stand.spec(["/bin/sleep", "600"], "one", slot=Slot("gpu1", ("1",))))
    stand.started(executor, "one")
    executor.start(stand.spec(["/bin/true"], "both", slot=Slot("gpu01", ("0", "1"))))
    assert isinstance(stand.events(executor, lambda events: len(events) > 0)[0], Rejected)
    executor.start(stand.spec(["/bin/true"], "other", slot=Slot("gpu0", ("0",))))
    assert stand.end(executor, "other").ok
