"""The Slurm executor with commands that answer as a test says: what a real cluster does rarely, or late."""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.config.lab import SlurmConfig
from looplab.errors import LabError
from looplab.launch import slurm
from looplab.launch.base import Ended, LaunchEvent, LaunchSpec, Queued, Rejected, Slot, Started
from looplab.launch.slurm import SlurmExecutor

Answer = tuple[int, str, str]
LIMIT = (1, "", "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (QOSMaxSubmitJob)")


class ScriptedSlurm(SlurmExecutor):
    """Asks a function instead of Slurm."""

    def __init__(self, answer: Callable[..., Answer], config: SlurmConfig | None = None) -> None:
        self.answer = answer
        self.calls: list[tuple[str, ...]] = []
        super().__init__(config=config or SlurmConfig(poll=0.02, lease=0.5))

    def _slurm(self, *argv: str, text: str | None = None, env: Mapping[str, str] | None = None) -> Answer:
        self.calls.append(argv)
        return self.answer(*argv)

    def count(self, command: str) -> int:
        return sum(argv[0] == command for argv in self.calls)


@pytest.fixture
def made() -> Iterator[list[SlurmExecutor]]:
    executors: list[SlurmExecutor] = []
    yield executors
    for executor in executors:
        executor.close()


def spec(folder: Path, run_id: str = "r1", **more: Any) -> LaunchSpec:
    (folder / run_id).mkdir()
    argv = ["/bin/true"]
    return LaunchSpec(run_id, folder / run_id, argv, argv[0], folder, Slot("slurm0", fixed=False), **more)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.005)
    return found


def first(executor: SlurmExecutor, *kinds: type) -> LaunchEvent:
    """Return the first event that is of one of these kinds."""
    found: list[LaunchEvent] = []
    until(lambda: found.extend(event for event in executor.poll(0.05) if isinstance(event, kinds)) or found)
    return found[0]


def test_a_run_that_slurm_does_not_accept_yet_waits_and_is_not_given_back(
    tmp_path: Path, made: list[SlurmExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "RESUBMIT_S", 0.02)
    monkeypatch.setattr(slurm, "SETTLE_S", 0.05)
    accepts = threading.Event()

    def answer(command: str, *_: str) -> Answer:
        if command == "sbatch":
            return (0, "7\n", "") if accepts.is_set() else LIMIT
        return (0, "7|PENDING|Priority|x\n" if accepts.is_set() else "", "")

    executor = ScriptedSlurm(answer)
    made.append(executor)
    executor.start(spec(tmp_path))
    until(lambda: executor.count("sbatch") > 10 and executor.count("squeue") > 10)
    time.sleep(2 * slurm.SETTLE_S)
    events = executor.poll(0.0)
    assert [type(event) for event in events] == [Queued], events
    accepts.set()
    until(lambda: json.loads((tmp_path / "r1/job.json").read_text())["id"] == "7")
    assert not [event for event in executor.poll(0.0) if isinstance(event, Ended | Rejected)]


def test_a_run_that_was_cancelled_is_not_submitted(tmp_path: Path, made: list[SlurmExecutor]) -> None:
    executor = ScriptedSlurm(lambda *argv: (0, "7\n" if argv[0] == "sbatch" else "", ""))
    made.append(executor)
    with executor._lock:  # the thread has made up its mind, and waits
        executor.start(spec(tmp_path))
        due = list(executor._jobs.values())
        executor.cancel("r1")
    executor._submit(due)
    assert executor.count("sbatch") == 0
    assert not (tmp_path / "r1/job.json").exists()


def test_secrets_of_many_runs_fit_into_their_variables(
    tmp_path: Path, made: list[SlurmExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, prints in (("sbatch", "cat >/dev/null; echo 7"), ("squeue", ":"), ("scancel", ":")):
        (programs / name).write_text(f"#!/bin/sh\n{prints}\n")
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    executor = SlurmExecutor(config=SlurmConfig(poll=60.0))
    made.append(executor)
    executor.start_all(
        [(spec(tmp_path, f"r{i}", env={"KEY": "x" * 60_000}, secrets=frozenset({"KEY"})), None) for i in range(4)]
    )
    executor.start(spec(tmp_path, "large", env={"KEY": "x" * 200_000}, secrets=frozenset({"KEY"})))
    ended = first(executor, Ended)
    assert isinstance(ended, Ended)
    assert (ended.run_id, ended.exit.reason) == ("large", "not started")
    assert "cannot be executed" in (ended.exit.message or "")
    until(lambda: all(json.loads((tmp_path / f"r{i}/job.json").read_text())["id"] for i in range(4)))
    assert "x" * 100 not in (tmp_path / "r1/launch.json").read_text()


def test_an_adopted_run_has_run_since_it_started(tmp_path: Path, made: list[SlurmExecutor]) -> None:
    run = tmp_path / "r1"
    run.mkdir()
    (run / "train.log").touch()
    (run / "job.json").write_text(json.dumps({"key": "k", "index": None, "attempt": 1, "id": "7"}))
    started = time.time() - 3600.0
    process = {"pid": 1, "start": 1, "boot": "b", "supervisor": 1, "host": "n1", "started": started, "job": "7"}
    (run / "process.json").write_text(json.dumps(process))
    executor = ScriptedSlurm(lambda *argv: (0, "7|RUNNING|None|k\n", ""))
    made.append(executor)
    assert executor.adopt("r1", run)
    event = first(executor, Started)
    assert isinstance(event, Started)
    assert event.at == started


def test_an_error_of_the_thread_is_reported_and_not_waited_for(tmp_path: Path, made: list[SlurmExecutor]) -> None:
    def answer(*argv: str) -> Answer:
        raise ZeroDivisionError("as a mistake would be")

    executor = ScriptedSlurm(answer)
    made.append(executor)
    executor.start(spec(tmp_path))
    with pytest.raises(LabError, match="the executor has failed: as a mistake would be"):
        until(lambda: [event for event in executor.poll(0.05) if isinstance(event, Ended)])
