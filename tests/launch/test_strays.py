"""Daemons that have left their session, their parent and their environment behind are still ended with their run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looplab.launch import supervisor
from looplab.launch.base import Ended
from looplab.launch.local import find_by_mark

Harness = Any
"""The value of the fixture `harness`; see conftest.py."""

DAEMON = """
import os, resource, sys, time
how, pids, go = sys.argv[1:4]
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    if "erased" in how:
        resource.setrlimit(10, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\\n")
    os.write(write, b"x")
    os.closerange(0, 1000)
    os.chdir("/")
    os.execve("/bin/sleep", ["sleep", "600"], {})
os.read(read, 1)
while "waits" in how and not os.path.exists(go):
    time.sleep(0.005)
sys.exit(3)
"""


@pytest.fixture
def daemons(harness: Harness) -> Iterator[Harness]:
    """The harness; what a failed test has left of daemons is killed."""
    yield harness
    for path in harness.folder.glob("pids*"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):
                if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)


def leaver(harness: Harness, how: str = "", name: str = "pids") -> list[str]:
    """A trainer that leaves a daemon behind, whose pid it writes to a file of this name."""
    code = [sys.executable, "-I", "-S", "-c", DAEMON]
    return [*code, how, str(harness.folder / name), str(harness.folder / f"go-{name}")]


def test_a_daemon_with_an_empty_environment_is_ended_with_its_run(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(leaver(daemons), cleanup_timeout=0.1))
    end = daemons.end(executor)
    (pid,) = daemons.pids("pids")
    assert not daemons.alive(pid)
    assert (end.code, end.lingered) == (3, True)


def test_a_daemon_with_an_empty_environment_is_ended_by_a_stop(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(leaver(daemons, "waits"), cleanup_timeout=600))
    (pid,) = daemons.pids("pids")
    executor.stop("r1", "stop", grace=60)
    assert daemons.end(executor).reason == "stop"
    assert not daemons.alive(pid)


def test_a_daemon_with_an_empty_environment_is_ended_after_its_supervisor_was_killed(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(leaver(daemons, "waits"), cleanup_timeout=0.1))
    (pid,) = daemons.pids("pids")
    trainer = daemons.started(executor)
    daemons.kill(daemons.supervisor_of(trainer))
    (daemons.folder / "go-pids").touch()
    assert daemons.end(executor).reason == "lost"
    assert not daemons.alive(pid)


@pytest.mark.parametrize("how", ["ends by itself", "stop"])
def test_a_daemon_with_an_empty_environment_is_ended_by_the_next_engine(daemons: Harness, how: str) -> None:
    engine = daemons.engine(daemons.spec(leaver(daemons, "waits"), cleanup_timeout=0.1, grace=60))
    (pid,) = daemons.pids("pids")
    daemons.file("process.json")
    supervisor_pid = daemons.supervisor_of(engine.pids["r1"])
    engine.kill()
    daemons.kill(supervisor_pid)
    executor = daemons.executor()
    assert executor.adopt("r1", daemons.folder / "r1")
    if how == "stop":
        executor.stop("r1", "stop", grace=60)
    else:
        (daemons.folder / "go-pids").touch()
    assert daemons.end(executor).reason == ("stop" if how == "stop" else "lost")
    assert not daemons.alive(pid)


def test_a_daemon_is_ended_with_its_own_run_and_not_with_another(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(leaver(daemons, "waits", "pids-1"), "r1", cleanup_timeout=0.1))
    executor.start(daemons.spec(leaver(daemons, "", "pids-2"), "r2", cleanup_timeout=0.1))
    (first,) = daemons.pids("pids-1")
    daemons.end(executor, "r2")
    (second,) = daemons.pids("pids-2")
    assert (daemons.alive(first), daemons.alive(second)) == (True, False)
    (daemons.folder / "go-pids-1").touch()
    daemons.end(executor, "r1")
    assert not daemons.alive(first)


def test_a_daemon_that_erased_every_mark_is_ended_with_the_only_run(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(leaver(daemons, "erased"), cleanup_timeout=0.1))
    daemons.end(executor)
    (pid,) = daemons.pids("pids")
    assert not daemons.alive(pid)


def test_a_daemon_that_erased_every_mark_is_ended_with_the_last_run_that_may_have_started_it(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(leaver(daemons, "erased", "pids-1"), "r1", cleanup_timeout=0.1))
    executor.start(daemons.spec(["/bin/sleep", "600"], "r2"))
    daemons.end(executor, "r1")
    (pid,) = daemons.pids("pids-1")
    executor.start(daemons.spec(["/bin/sleep", "600"], "r3"))  # it began later: it has nothing to do with the daemon
    daemons.started(executor, "r3")
    executor.stop("r2", "stop", grace=60)
    daemons.end(executor, "r2")
    assert not daemons.alive(pid)
    assert not any(isinstance(event, Ended) for event in executor.poll(0.0))


def test_the_supervisor_itself_carries_no_tag(daemons: Harness) -> None:
    executor = daemons.executor()
    executor.start(daemons.spec(["/bin/sleep", "600"]))
    pid = daemons.started(executor)
    assert supervisor.tag_on(pid) == supervisor.tag_of(str(daemons.folder / "r1"))
    assert supervisor.tag_on(daemons.supervisor_of(pid)) == 0
    assert find_by_mark(daemons.folder / "r1") == [pid]


def test_a_tag_says_more_than_a_variable(daemons: Harness) -> None:
    """A lab was moved and another put in its place: the paths in the environment now name the other one."""
    executor = daemons.executor()
    executor.start(daemons.spec(["/bin/sleep", "600"]))
    pid = daemons.started(executor)
    (daemons.folder / "r1").rename(daemons.folder / "moved")
    (daemons.folder / "r1").mkdir()
    assert find_by_mark(daemons.folder / "r1") == []
    assert find_by_mark(daemons.folder / "moved") == [pid]


def test_a_limit_of_the_administrator_is_not_taken_for_a_tag() -> None:
    import resource
    import subprocess

    process = subprocess.Popen(
        ["/bin/sleep", "600"], preexec_fn=lambda: resource.setrlimit(supervisor.RLIMIT_LOCKS, (1000, 1000))
    )
    try:
        assert supervisor.tag_on(process.pid) == 0
    finally:
        process.kill()
        process.wait()
