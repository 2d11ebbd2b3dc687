"""SIGKILL at random moments: whatever is killed, the same call again comes to the same result."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.errors import BusyError
from looplab.launch.local import LocalExecutor
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.pipelines import latest_stages, read_rows
from looplab.pipeline.driver import StopRequest, drive
from looplab.pipeline.runner import HERE

ALL = ("mine", "select", "memory", "eval")
EDITS = ("mine.n@set=12", "mine.sleep@set=0.004", "select.B@set=12")
ROWS = [str(7 * n) for n in range(12)]
RESULT = f"acc\n{' '.join(ROWS)[::-1]} 1\n"
KILLS = 36


class Zygote:
    def __init__(self, lab: Path) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("zygote.py")), str(lab)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def start(self, *stages: str, edits: tuple[str, ...] = EDITS) -> int:
        """Fork a caller; return its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"stages": stages, "edits": edits}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def ended(self) -> int:
        """Return the wait status of the caller; 0 if it succeeded."""
        return self._line()

    def _line(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture
def zygote(toy: Any) -> Iterator[Zygote]:
    made = Zygote(toy.folder)
    yield made
    made.close()


def below(pid: int) -> list[int]:
    """Return the descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_alone(toy: Any) -> None:
    assert not (toy.folder / "twice").exists(), "two stages ran in one run"


def check(toy: Any) -> None:
    """Check the invariants."""
    check_alone(toy)
    for run in toy.runs:
        if run.complete("mine"):
            assert (run.path / "mine" / "rows.txt").read_text().split() == ROWS
        if run.complete("eval"):
            assert toy.table(run) == RESULT
    if toy.latest is not None:
        run = next(run for run in toy.runs if run.name == toy.latest)
        assert run.is_consistent()


def check_record(toy: Any) -> None:
    """Check that the ledger says what the folders say."""
    with contextlib.closing(Ledger(toy.folder / ".looplab/ledger.db")) as ledger:
        assert not audit(ledger, toy.folder).findings
        rows = read_rows(ledger)
    for folder, stages in latest_stages(rows).items():
        run = next(run for run in toy.runs if folder == os.path.relpath(run.path, toy.folder))
        for stage in ALL:
            made = run.complete(stage)
            if made is not None:
                facts = stages[stage]
                assert (facts["state"], facts["began"], facts["attempt"]) == (
                    "complete",
                    made["began"],
                    made["attempt"],
                )
    latest = latest_stages(rows)[os.path.relpath(toy.runs[0].path, toy.folder)]
    assert [row["state"] for row in latest.values()] == ["complete"] * len(ALL)
    open_ = [row for row in rows["stages"].values() if row["state"] == "running"]
    assert not [row for row in open_ if row["folder"] == os.path.relpath(toy.runs[0].path, toy.folder)]


@pytest.mark.slow
def test_calls_that_are_killed_come_to_the_same_result(toy: Any, zygote: Zygote) -> None:
    dice = random.Random(5)
    for n in range(KILLS):
        pid = zygote.start(*ALL)
        time.sleep(dice.uniform(0.0, 0.35))
        # The caller alone; with all that it has started, as in a power cut; or a process of the stage.
        whom = dice.choice(("caller", "all", "stage"))
        kill({"caller": [pid], "all": [pid, *below(pid)], "stage": below(pid)[1:]}[whom])
        came_to_its_end = zygote.ended() == 0
        check(toy)
        if came_to_its_end:  # there is nothing more to kill: start over
            (toy.folder / "mine.py").write_text((toy.folder / "mine.py").read_text() + f"# {n}\n")
    zygote.start(*ALL)
    assert zygote.ended() == 0
    check(toy)
    run = toy.runs[0]
    assert toy.latest == run.name
    assert toy.table(run) == RESULT
    assert not list((run.path / "stages").glob("*.begun.json"))
    assert toy(*ALL, edits=EDITS) == dict.fromkeys(ALL, "skipped")
    check_record(toy)


def test_a_stage_continues_without_its_caller_and_the_next_call_attaches_to_it(toy: Any, zygote: Zygote) -> None:
    edits = ("mine.wait@set=gate",)
    pid = zygote.start("mine", edits=edits)
    until(lambda: toy.runs and (toy.runs[0].path / "mine" / "rows.txt").exists())
    kill([pid])
    zygote.ended()
    (toy.folder / "gate").touch()
    assert toy("mine", edits=edits) == {"mine": "complete"}
    assert len(toy.runs) == 1
    assert toy.runs[0].complete("mine")["attempt"] == 1  # not started twice
    log = toy.runs[0].log.read_text()
    assert log.count("mine begins at") == log.count("mine ends") == 1


def test_a_running_later_stage_is_attached_to_behind_stages_that_are_skipped(toy: Any, zygote: Zygote) -> None:
    edits = ("select.wait@new=gate",)
    pid = zygote.start("mine", "select", edits=edits)
    until(lambda: toy.runs and (toy.runs[0].begun("select") or {}).get("state") == "running")
    until(lambda: (toy.runs[0].path / "process.json").exists())  # the one of mine was removed before
    kill([pid])
    zygote.ended()
    gate, twice = toy.folder / "gate", toy.folder / "twice"
    second = toy.make("mine", "select", edits=edits)
    second.say = lambda text: gate.touch() if "attached to it" in text else None
    executor = LocalExecutor()
    drive([second], [HERE], executor, StopRequest(), tick=lambda: gate.touch() if twice.exists() else None)
    executor.close()
    assert [done.how for done in second.done] == ["skipped", "complete"]
    assert toy.runs[0].complete("select")["attempt"] == 1
    assert toy.runs[0].log.read_text().count("select starts") == 1
    check_alone(toy)


def test_a_running_stage_is_not_joined_by_one_of_another_config(toy: Any, zygote: Zygote) -> None:
    pid = zygote.start("mine", edits=("mine.wait@set=gate",))
    until(lambda: toy.runs and (toy.runs[0].path / "process.json").exists())
    kill([pid])
    zygote.ended()
    name = toy.runs[0].name
    with pytest.raises(BusyError, match="still running"):
        toy("mine", run_id=name)
    (toy.folder / "gate").touch()
    until(lambda: (toy.runs[0].path / "exit.json").exists())
    assert toy("mine", run_id=name) == {"mine": "complete"}


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
