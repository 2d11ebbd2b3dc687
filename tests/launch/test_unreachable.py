"""Runs of other hosts, containers and folders: what cannot be seen from here is neither lost nor started again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from looplab.launch import local, supervisor
from looplab.launch.base import Ended, Unreachable
from looplab.launch.local import Where, is_running, where_is

Harness = Any
"""The value of the fixture `harness`; see conftest.py."""

WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
sys.exit(3)
"""
ADOPTER = """
import sys
from pathlib import Path
from looplab.launch.local import LocalExecutor
executor = LocalExecutor()
print(executor.adopt("r1", Path(sys.argv[1])), flush=True)
ended = False
while not ended:
    for event in executor.poll(1.0):
        name = type(event).__name__
        ended = name == "Ended"
        print(name, event.exit.code if ended else "", event.exit.reason if ended else "", flush=True)
"""


def waiter(harness: Harness) -> list[str]:
    """A trainer that ends with 3 once there is a file `go`."""
    argv: list[str] = harness.python(WAITS, harness.folder / "go")
    return argv


def elsewhere(harness: Harness, **changes: object) -> Path:
    """The folder of a run whose `process.json` is that of another host or namespace."""
    run_dir: Path = harness.folder / "left"
    run_dir.mkdir()
    (run_dir / "train.log").touch()
    process = {
        "pid": 1, "start": 1, "boot": supervisor.boot_id(), "host": os.uname().nodename, "namespace": 1, "supervisor": 1,
        "tag": supervisor.tag_of(str(run_dir)), "locked": True, "started": 1000.0, "clock": 1.0,
    }  # fmt: skip
    (run_dir / "process.json").write_text(json.dumps({**process, **changes}))
    return run_dir


def held(run_dir: Path) -> int:
    """A lock on the folder, as a supervisor holds it."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    assert supervisor.hold(descriptor)
    return descriptor


# -- where the processes are


def test_a_lock_on_a_folder_is_seen_without_being_taken(tmp_path: Path) -> None:
    descriptor = held(tmp_path)
    assert [supervisor.is_locked(str(tmp_path)) for _ in range(3)] == [True] * 3
    os.close(descriptor)
    assert not supervisor.is_locked(str(tmp_path))
    assert not supervisor.is_locked(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("changes", "locked", "where"),
    [
        ({}, True, Where.ELSEWHERE),
        ({}, False, Where.GONE),
        ({"locked": False}, False, Where.ELSEWHERE),
        ({"namespace": supervisor.pid_namespace()}, False, Where.HERE),
        ({"boot": "other"}, False, Where.GONE),
        ({"boot": "other", "host": "other"}, True, Where.ELSEWHERE),
        ({"boot": "other", "host": "other"}, False, Where.GONE),
        ({"boot": "other", "host": "other", "locked": False}, False, Where.ELSEWHERE),
        ({"tag": 5}, False, Where.COPY),
    ],
)
def test_a_run_is_gone_only_if_that_is_proven(
    harness: Harness, changes: dict[str, object], locked: bool, where: Where
) -> None:
    run_dir = elsewhere(harness, **changes)
    descriptor = held(run_dir) if locked else os.open("/", os.O_RDONLY)
    assert where_is(local.read_process(run_dir), run_dir) is where
    os.close(descriptor)


def test_a_free_lock_on_a_network_disk_proves_nothing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = elsewhere(harness, boot="other", host="other")
    monkeypatch.setattr(local, "network_disk", lambda folder: "NFS")
    assert where_is(local.read_process(run_dir), run_dir) is Where.ELSEWHERE
    assert is_running(run_dir, run_dir)


@pytest.mark.parametrize("odd", ["nan", [], None, "1", 1e999])
def test_a_process_file_with_odd_values_is_read_without_them(harness: Harness, odd: object) -> None:
    run_dir = elsewhere(
        harness, clock=odd, started=odd, tag=odd, namespace=odd, grace=odd, timeout=odd, cleanup_timeout=odd
    )
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    assert harness.end(executor, "left").reason == "lost"


# -- what becomes of them


def test_an_unreachable_run_is_reported_and_ends_with_what_is_written_down(harness: Harness) -> None:
    run_dir = elsewhere(harness)
    descriptor = held(run_dir)
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    (event,) = harness.events(executor, bool)
    assert isinstance(event, Unreachable)
    (run_dir / "exit.json").write_text(json.dumps({"code": 7}))
    assert executor.poll(0.3) == []  # what is alive has not ended, whoever says so
    os.close(descriptor)
    assert harness.end(executor, "left").code == 7


def test_an_unreachable_run_whose_last_process_is_gone_is_lost(harness: Harness) -> None:
    run_dir = elsewhere(harness)
    descriptor = held(run_dir)
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    assert executor.poll(0.3) == [Unreachable("left", "another PID namespace or container")]
    os.close(descriptor)
    assert harness.end(executor, "left").reason == "lost"


def test_an_unreachable_run_of_another_host_ends_with_what_that_host_writes(harness: Harness) -> None:
    run_dir = elsewhere(harness, boot="other", host="other", locked=False)
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    assert harness.events(executor, bool) == [Unreachable("left", "host other")]
    assert executor.poll(0.3) == []
    (run_dir / "exit.json").write_text(json.dumps({"code": 0}))
    assert harness.end(executor, "left").ok


def test_a_stop_abandons_an_unreachable_run(harness: Harness) -> None:
    run_dir = elsewhere(harness, boot="other", host="other", locked=False)
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    executor.stop("left", "stop", grace=60)
    end = harness.end(executor, "left")
    assert end.reason == "stop"
    assert "abandoned" in str(end.message)


def test_an_unreachable_run_is_not_started_again(harness: Harness) -> None:
    run_dir = elsewhere(harness, boot="other", host="other", locked=False)
    executor = harness.executor()
    executor.start(harness.spec(["/bin/true"], run_dir.name))
    assert harness.events(executor, bool) == [Unreachable("left", "host other")]


def test_a_run_in_another_namespace_is_waited_for_and_not_lost(harness: Harness) -> None:
    new_namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*new_namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no permission to make a PID namespace")
    engine = harness.engine(harness.spec(waiter(harness)))
    harness.file("process.json")
    engine.kill()
    adopter = subprocess.Popen(
        [*new_namespace, sys.executable, "-c", ADOPTER, str(harness.folder / "r1")], stdout=subprocess.PIPE, text=True
    )
    assert adopter.stdout is not None
    assert [adopter.stdout.readline().strip() for _ in range(2)] == ["True", "Unreachable"]
    (harness.folder / "go").touch()
    assert adopter.stdout.readline().split() == ["Ended", "3", "None"]
    adopter.wait()
    adopter.stdout.close()


# -- copies and moved folders


def test_a_copy_of_a_run_neither_adopts_nor_ends_the_processes_of_the_original(harness: Harness) -> None:
    first = harness.executor()
    first.start(harness.spec(waiter(harness)))
    pid = harness.started(first)
    shutil.copytree(harness.folder / "r1", harness.folder / "copy")
    assert not is_running(harness.folder / "copy", harness.folder / "copy")
    second = harness.executor()
    assert second.adopt("r1", harness.folder / "copy")
    second.stop("r1", "stop", grace=0)
    end = harness.end(second)
    assert end.reason == "lost"
    assert "copy" in str(end.message)
    assert harness.alive(pid)
    (harness.folder / "go").touch()
    assert harness.end(first).code == 3


@pytest.mark.parametrize("supervisor_lives", [True, False])
def test_a_run_whose_folder_was_moved_is_adopted_at_the_new_place(harness: Harness, supervisor_lives: bool) -> None:
    engine = harness.engine(harness.spec(waiter(harness), grace=60))
    harness.file("process.json")
    supervisor_pid = harness.supervisor_of(engine.pids["r1"])
    engine.kill()
    if not supervisor_lives:
        harness.kill(supervisor_pid)
    (harness.folder / "r1").rename(harness.folder / "moved")
    executor = harness.executor()
    assert executor.adopt("r1", harness.folder / "moved")
    assert not any(isinstance(event, Ended) for event in executor.poll(0.1))
    (harness.folder / "go").touch()
    assert harness.end(executor).code == (3 if supervisor_lives else None)
    assert (harness.folder / "moved" / "exit.json").exists() == supervisor_lives
    assert not (harness.folder / "r1").exists()
