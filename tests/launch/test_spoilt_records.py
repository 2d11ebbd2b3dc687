"""Record files that a training replaced, and supervisors that cannot write: the executor neither fails nor waits in
silence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from looplab.launch import local, supervisor
from looplab.launch.base import Delayed, Ended
from looplab.launch.local import read_exit, read_process

Harness = Any
"""The value of the fixture `harness`; see conftest.py."""

PROCESS = {"pid": 1, "start": 2, "boot": "b", "supervisor": 3, "supervisor_start": 4, "timeout": None, "grace": 1.0}
ODD: dict[str, object] = {
    "empty": {},
    "a list": [],
    "a text": "x",
    "texts": {"pid": "1", "start": "2", "boot": "b", "supervisor": "3", "code": "0"},
    "large numbers": {**PROCESS, "pid": 10**30, "code": 10**30},
    "negative numbers": {**PROCESS, "pid": -1, "code": -1},
    "lists": {**PROCESS, "start": [], "started": {}, "code": 0, "ended": []},
    "no time": {**PROCESS, "supervisor": float("nan"), "code": 0, "started": float("inf")},
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD.keys())
def test_what_no_supervisor_writes_counts_as_missing(tmp_path: Path, content: object) -> None:
    for name in ("process.json", "exit.json"):
        (tmp_path / name).write_text(json.dumps(content))
    assert read_process(tmp_path) is None
    assert read_exit(tmp_path) is None


@pytest.mark.parametrize("what", ["folder", "pipe", "itself", "zero", "deep", "huge"])
def test_what_is_not_a_small_file_counts_as_missing(tmp_path: Path, what: str) -> None:
    for name in ("process.json", "exit.json"):
        path = tmp_path / name
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "deep":
            path.write_text("[" * 100_000)
        elif what == "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        else:
            path.symlink_to(name if what == "itself" else "/dev/zero")
    assert read_process(tmp_path) is None
    assert read_exit(tmp_path) is None


def test_what_a_supervisor_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "process.json").write_text(json.dumps(PROCESS))
    (tmp_path / "exit.json").write_text(json.dumps({"code": None, "signal": 9, "ended": 1.5, "lingered": True}))
    assert read_process(tmp_path) == PROCESS
    ended = read_exit(tmp_path)
    assert ended is not None
    assert (ended.code, ended.signal, ended.ended, ended.lingered) == (None, 9, 1.5, True)


def test_a_run_whose_record_was_spoilt_is_lost_and_not_started_again(harness: Harness) -> None:
    run_dir = harness.folder / "left"
    run_dir.mkdir()
    (run_dir / "train.log").symlink_to("train.log")
    (run_dir / "process.json").write_text("{}")
    (run_dir / "exit.json").mkdir()
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    assert harness.end(executor, "left").reason == "lost"


def test_a_folder_in_place_of_exit_json_is_put_aside_by_the_supervisor(harness: Harness) -> None:
    code = "import os, sys; os.makedirs(sys.argv[1] + '/exit.json/inner'); sys.exit(3)"
    executor = harness.executor()
    executor.start(harness.spec(harness.python(code, harness.folder / "r1")))
    assert harness.end(executor).code == 3
    ended = harness.until(lambda: read_exit(harness.folder / "r1"))
    assert ended.code == 3
    assert [path.name for path in (harness.folder / "r1").glob("exit.json.changed-*")]


def test_an_end_that_the_supervisor_cannot_write_down_is_reported_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "OVERDUE_S", 0.05)
    run_dir = harness.folder / "left"
    run_dir.mkdir()
    (run_dir / "train.log").touch()
    ours = os.getpid()  # stands in for a supervisor that lives
    process = {"pid": ours, "start": 1, "boot": supervisor.boot_id(), "supervisor": ours}
    (run_dir / "process.json").write_text(json.dumps({**process, "supervisor_start": supervisor.start_ticks(ours)}))
    executor = harness.executor()
    assert executor.adopt("left", run_dir)
    events = harness.events(executor, lambda events: len(events) > 0)
    assert events == [Delayed("left", str(run_dir / "exit.json"))]
    harness.nothing_more(executor)
    (run_dir / "exit.tmp").write_text('{"code": 5}')
    shutil.move(run_dir / "exit.tmp", run_dir / "exit.json")
    events = harness.events(executor, lambda events: len(events) > 0)
    assert [event.exit.code for event in events if isinstance(event, Ended)] == [5]
