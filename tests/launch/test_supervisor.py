"""The supervisor: what a training leaves behind, disks that are full, and the small things it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looplab.launch import supervisor
from looplab.launch.base import Ended, Slot

Harness = Any
"""The value of the fixture `harness`; see conftest.py."""

LEAVES = """
import os, signal, sys, time
print(os.getpid(), flush=True)
how, pids, go = sys.argv[1:4]
read, write = os.pipe()
if os.fork() == 0:
    if "daemon" in how:
        os.setsid()
        if os.fork():
            os._exit(0)
    if "stubborn" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\\n")
    os.write(write, b"x")
    while not os.path.exists(go):
        time.sleep(0.005)
    os._exit(0)
os.read(read, 1)
sys.exit(3)
"""


def leaver(harness: Harness, how: str) -> list[str]:
    """A trainer that ends with 3 and leaves a process behind, which lives until there is a file `go`."""
    argv: list[str] = harness.python(LEAVES, how, harness.folder / "pids", harness.folder / "go")
    return argv


def await_end_of_the_trainer(harness: Harness) -> int:
    """The number that it had, which is free again unless its group lives."""
    pid = int(harness.log())
    harness.until(lambda: not Path(f"/proc/{pid}").exists())
    return pid


# -- what a training leaves behind


@pytest.mark.parametrize("how", ["child", "daemon"])
def test_what_is_left_behind_may_end_by_itself_and_is_waited_for(harness: Harness, how: str) -> None:
    executor = harness.executor()
    executor.start(harness.spec(leaver(harness, how), cleanup_timeout=600))
    (pid,) = harness.pids("pids")
    for _ in range(5):
        assert not any(isinstance(event, Ended) for event in executor.poll(0.05))
    assert harness.alive(pid)
    (harness.folder / "go").touch()
    end = harness.end(executor)
    assert not harness.alive(pid)
    assert (end.code, end.lingered, end.reason) == (3, False, None)


@pytest.mark.parametrize("how", ["child", "daemon", "stubborn child", "stubborn daemon"])
def test_leftover_processes_are_ended_before_the_run_is_reported_as_ended(harness: Harness, how: str) -> None:
    executor = harness.executor()
    executor.start(harness.spec(leaver(harness, how), cleanup_timeout=0.1, grace=0.1 if "stubborn" in how else 600))
    end = harness.end(executor)
    (pid,) = harness.pids("pids")
    assert not harness.alive(pid)
    assert (end.code, end.lingered, end.reason) == (3, True, None)
    assert harness.file("exit.json")["lingered"]


@pytest.mark.parametrize("how", ["child", "daemon"])
def test_what_lingers_is_ended_without_an_engine_too(harness: Harness, how: str) -> None:
    executor = harness.executor()
    executor.start(harness.spec(leaver(harness, how), cleanup_timeout=0.3))
    executor.close()
    end = harness.file("exit.json")
    (pid,) = harness.pids("pids")
    assert not harness.alive(pid)
    assert (end["code"], end["lingered"]) == (3, True)


def test_a_daemon_of_a_stopped_run_is_ended_without_waiting(harness: Harness) -> None:
    executor = harness.executor()
    code = LEAVES.replace("sys.exit(3)", "time.sleep(600)")
    executor.start(
        harness.spec(
            harness.python(code, "daemon", harness.folder / "pids", harness.folder / "go"), cleanup_timeout=600
        )
    )
    (pid,) = harness.pids("pids")
    executor.stop("r1", "stop", grace=60)
    end = harness.end(executor)
    assert not harness.alive(pid)
    assert (end.signal, end.reason) == (signal.SIGTERM, "stop")


@pytest.mark.parametrize("how", ["child", "daemon", "stubborn daemon"])
def test_a_stop_ends_what_lingers(harness: Harness, how: str) -> None:
    executor = harness.executor()
    executor.start(harness.spec(leaver(harness, how), cleanup_timeout=600, grace=600))
    (pid,) = harness.pids("pids")
    await_end_of_the_trainer(harness)
    executor.stop("r1", "stop", grace=0.1)
    end = harness.end(executor)
    assert not harness.alive(pid)
    assert (end.code, end.reason, end.lingered) == (3, None, True)


def test_the_rest_of_one_run_is_not_taken_for_that_of_another(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(leaver(harness, "daemon"), "r1", cleanup_timeout=600))
    (pid,) = harness.pids("pids")
    executor.start(harness.spec(["/bin/true"], "r2", cleanup_timeout=0))
    end = harness.end(executor, "r2")
    assert end.ok
    assert not end.lingered
    assert harness.alive(pid)


def test_a_group_number_that_went_to_another_is_left_alone(harness: Harness) -> None:
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last_pid, os.W_OK):
        pytest.skip("the next process number can only be chosen by root")
    executor = harness.executor()
    executor.start(harness.spec(leaver(harness, "stubborn daemon"), cleanup_timeout=600, grace=600))
    (stray,) = harness.pids("pids")
    group = await_end_of_the_trainer(harness)
    executor.start(harness.spec(["/bin/true"], "r2"))
    assert set(harness.ends(executor, "r2")) == {"r2"}  # and so the supervisor has seen the group gone
    other = None
    for _ in range(100):
        last_pid.write_text(str(group - 1))
        other = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        if other.pid == group:
            break
        other.kill()
        other.wait()
    assert other is not None
    try:
        if other.pid != group:
            pytest.skip("others were always faster to take the number")
        executor.stop("r1", "stop", grace=0.1)
        assert harness.end(executor).lingered
        assert not harness.alive(stray)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# -- the supervisor itself


def test_the_supervisor_lives_as_long_as_the_last_of_its_runs(harness: Harness) -> None:
    engine = harness.engine(*(harness.spec(["/bin/sleep", "600"], run_id) for run_id in ("r1", "r2")))
    supervisor_pid = harness.supervisor_of(engine.pids["r1"])
    engine.kill()
    harness.kill(engine.pids["r1"])
    assert harness.file("exit.json", "r1")["signal"] == signal.SIGKILL
    assert harness.alive(supervisor_pid)
    harness.kill(engine.pids["r2"])
    harness.until(lambda: not harness.alive(supervisor_pid))
    assert harness.file("exit.json", "r2")["signal"] == signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_supervisor_does_not_go_when_it_is_asked_to(harness: Harness, number: signal.Signals) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    supervisor_pid = harness.supervisor_of(harness.started(executor))
    os.kill(supervisor_pid, number)
    executor.start(harness.spec(["/bin/true"], "r2"))
    assert harness.end(executor, "r2").ok
    assert harness.alive(supervisor_pid)


def test_a_supervisor_without_runs_goes_with_its_engine(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"]))
    supervisor_pid = harness.supervisor_of(harness.started(executor))
    executor.stop("r1", "stop", grace=60)
    harness.end(executor)
    assert harness.alive(supervisor_pid)
    executor.close()
    harness.until(lambda: not harness.alive(supervisor_pid))


def test_a_run_folder_that_is_deleted_does_not_stop_the_supervisor(harness: Harness) -> None:
    executor = harness.executor()
    spec = harness.spec(["/bin/sleep", "600"])
    executor.start(spec)
    harness.started(executor)
    for path in spec.run_dir.iterdir():
        path.unlink()
    spec.run_dir.rmdir()
    executor.stop("r1", "stop", grace=60)
    assert harness.end(executor).reason == "stop"
    executor.start(harness.spec(["/bin/true"], "r2"))
    assert harness.end(executor, "r2").ok


def test_a_missing_run_folder_is_reported(harness: Harness) -> None:
    executor = harness.executor()
    spec = harness.spec(["/bin/true"])
    spec.run_dir.rmdir()
    executor.start(spec)
    assert harness.end(executor).reason == "not started"


def test_the_process_file_says_which_process_it_is(harness: Harness) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"], timeout=500.0, grace=4.0, cleanup_timeout=3.0))
    pid = harness.started(executor)
    supervisor_pid = harness.supervisor_of(pid)
    written = harness.file("process.json")
    assert written.pop("started") > 0
    assert written == {
        "pid": pid,
        "start": supervisor.start_ticks(pid),
        "boot": supervisor.boot_id(),
        "supervisor": supervisor_pid,
        "supervisor_start": supervisor.start_ticks(supervisor_pid),
        "host": os.uname().nodename,
        "namespace": os.stat("/proc/self/ns/pid").st_ino,
        "tag": supervisor.tag_of(str(harness.folder / "r1")),
        "locked": True,
        "clock": written["clock"],
        "timeout": 500.0,
        "grace": 4.0,
        "cleanup_timeout": 3.0,
    }


def test_the_supervisor_needs_nothing_but_the_standard_library() -> None:
    code = """
import sys
before = set(sys.modules)
exec(compile(open(sys.argv[1]).read(), "supervisor.py", "exec"), {"__name__": "supervisor"})
print(*sorted({"looplab", "orjson", "typing", "subprocess", "pathlib", "asyncio"} & set(sys.modules) - before))
"""
    argv = [sys.executable, "-I", "-S", "-c", code, supervisor.__file__]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == ""


# -- disks that are full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]).returncode != 0
    ):
        pytest.skip("a small disk can only be mounted by root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_an_end_that_finds_the_disk_full_is_written_when_there_is_room(harness: Harness, small_disk: Path) -> None:
    run_dir = small_disk / "r1"
    run_dir.mkdir()
    (harness.folder / "r1").symlink_to(run_dir)
    fill = """
import sys
with open(sys.argv[1], "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        sys.exit(3)
"""
    executor = harness.executor()
    executor.start(harness.spec(harness.python(fill, small_disk / "ballast")))
    assert harness.end(executor).code == 3
    supervisor_pid = executor._supervisor.pid
    executor.close()
    assert harness.alive(supervisor_pid)
    harness.until(lambda: not [path for path in run_dir.iterdir() if path.name.startswith("exit.json")])
    (small_disk / "ballast").unlink()
    assert harness.file("exit.json")["code"] == 3
    harness.until(lambda: not harness.alive(supervisor_pid))


def test_a_file_that_was_only_partly_taken_is_not_left_behind(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
import supervisor
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    supervisor.atomic_write(sys.argv[2], '{"code": 0, "reason": null}')
except OSError as error:
    print(error.strerror)
"""
    target = tmp_path / "exit.json"
    folder = str(Path(supervisor.__file__).parent)
    found = subprocess.run([sys.executable, "-I", "-c", code, folder, str(target)], capture_output=True, text=True)
    assert found.stdout == "No space left on device\n", found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    supervisor.atomic_write(str(tmp_path / "exit.json"), json.dumps({"code": 0}))
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]
    assert json.loads((tmp_path / "exit.json").read_text()) == {"code": 0}


def test_cores_of_one_run_do_not_stay_with_the_next(harness: Harness) -> None:
    cores = sorted(os.sched_getaffinity(0))
    executor = harness.executor()
    executor.start(harness.spec(["/nonexistent"], "r1", slot=Slot("cpu0", cores=(cores[0],))))
    executor.start(harness.spec(harness.python("import os; print(sorted(os.sched_getaffinity(0)))"), "r2"))
    harness.ends(executor, "r1", "r2")
    assert json.loads(harness.log("r2")) == cores


def test_a_line_of_runs_continues_after_one_that_cannot_be_started(harness: Harness) -> None:
    executor = harness.executor()
    programs = [harness.python("print(1)"), ["/nonexistent"], harness.python("print(3)"), harness.python("print(4)")]
    specs = [harness.spec(argv, f"r{n}") for n, argv in enumerate(programs)]
    executor.start_all([(spec, f"r{n - 1}" if n else None) for n, spec in enumerate(specs)])
    ends = harness.ends(executor, *(spec.run_id for spec in specs))
    assert [ends[spec.run_id].ok for spec in specs] == [True, False, True, True]
    assert ends["r1"].reason == "not started"
    started = [ends[spec.run_id].started for spec in specs]
    assert started == sorted(started)
