"""The contract of executors: see `looplab.launch.base`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from looplab.launch.base import (
    Ended,
    Executor,
    Exit,
    LaunchEvent,
    LaunchSpec,
    Queued,
    Rejected,
    Slot,
    SlotsChanged,
    Started,
    claim_name,
    traits_of,
)

T = TypeVar("T")
Answer = Ended | Rejected

ONCE = "import sys; open(sys.argv[1], 'a').write('started\\n'); sys.exit(int(sys.argv[2]))"
GATED = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write("started\\n")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.005)
sys.exit(int(sys.argv[3]))
"""


def _require_prequeues(executor: Executor) -> None:
    if not traits_of(executor).prequeues:
        pytest.skip("this executor does not prequeue runs")


def _answers(events: Sequence[LaunchEvent]) -> list[Answer]:
    """Return the last events of runs."""
    return [event for event in events if isinstance(event, Ended | Rejected)]


class ExecutorHarness:
    """A folder for the runs of a test, with helpers to start them and to wait for their events.

    Args:
        folder: An empty folder.
        make: Makes an executor.
        patience_s: Seconds to wait for something that must happen.
    """

    def __init__(self, folder: Path, make: Callable[[], Executor], patience_s: float) -> None:
        self.folder = folder
        self._make = make
        self._patience_s = patience_s
        self._executors: list[Executor] = []

    def executor(self) -> Executor:
        """Return a new executor, which is closed after the test."""
        executor = self._make()
        self._executors.append(executor)
        return executor

    def spec(self, argv: Sequence[str], run_id: str = "r1", **more: Any) -> LaunchSpec:
        """Return the spec of a run in its own folder."""
        run_dir = self.folder / run_id
        run_dir.mkdir(exist_ok=True)
        fields = {"path": argv[0], "cwd": self.folder, "slot": Slot("cpu0"), **more}
        return LaunchSpec(run_id, run_dir, list(argv), **fields)

    @staticmethod
    def python(code: str, *arguments: object) -> list[str]:
        """Return the argv of a trainer in Python, which starts as fast as it can."""
        return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]

    # -- waiting

    def until(self, condition: Callable[[], T]) -> T:
        """Return the condition's result once it is true."""
        deadline = time.monotonic() + self._patience_s
        while not (result := condition()):
            assert time.monotonic() < deadline, "this never came true"
            time.sleep(0.005)
        return result

    def events(self, executor: Executor, enough: Callable[[list[LaunchEvent]], bool]) -> list[LaunchEvent]:
        """Return all events until there are enough, without those of the queue of a scheduler and of slots."""
        deadline = time.monotonic() + self._patience_s
        events: list[LaunchEvent] = []
        while not enough(events):
            assert time.monotonic() < deadline, f"only {events} came"
            events += [event for event in executor.poll(1.0) if not isinstance(event, Queued | SlotsChanged)]
        return events

    def ends(self, executor: Executor, *run_ids: str) -> dict[str, Exit]:
        """Return how these runs ended, once all of them have."""

        def all_ended(events: list[LaunchEvent]) -> bool:
            return {event.run_id for event in events if isinstance(event, Ended)} >= set(run_ids)

        return {e.run_id: e.exit for e in self.events(executor, all_ended) if isinstance(e, Ended)}

    def end(self, executor: Executor, run_id: str = "r1") -> Exit:
        """Return how a run ended, once it has."""
        return self.ends(executor, run_id)[run_id]

    def started(self, executor: Executor, run_id: str = "r1") -> int:
        """Return the pid of a run, once it has started; 0 if the executor does not know it."""

        def was_started(events: list[LaunchEvent]) -> bool:
            return any(isinstance(event, Started) and event.run_id == run_id for event in events)

        events = self.events(executor, was_started)
        assert not any(isinstance(event, Ended) for event in events), events
        return next(event.pid or 0 for event in events if isinstance(event, Started) and event.run_id == run_id)

    @staticmethod
    def nothing_more(executor: Executor) -> None:
        """Assert that the executor reports nothing more, except that a run is queued or runs."""
        quiet_until = time.monotonic() + 0.1
        while time.monotonic() < quiet_until:
            assert not [
                event for event in executor.poll(0.02) if not isinstance(event, Queued | SlotsChanged | Started)
            ]

    # -- looking

    def run(self, argv: Sequence[str], **more: Any) -> Exit:
        """Start a run and return its exit."""
        executor = self.executor()
        executor.start(self.spec(argv, **more))
        return self.end(executor)

    def log(self, run_id: str = "r1") -> str:
        """Return what a run has printed so far."""
        return (self.folder / run_id / "train.log").read_text()

    def file(self, name: str, run_id: str = "r1") -> dict[str, Any]:
        """Return a JSON file of a run, once it exists."""
        path = self.folder / run_id / name
        self.until(path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        """Close all executors, and stop what still runs."""
        for executor in self._executors:
            executor.close()
        sweeper = self._make()
        folders = [path for path in self.folder.iterdir() if path.is_dir()]
        adopted = []
        for path in folders:
            last = 1 + len(list(path.glob("attempt-*")))
            if sweeper.adopt(path.name, path, attempt=last):
                adopted.append(path.name)
        for run_id in adopted:
            sweeper.stop(run_id, "end of the test", 0.0)
        self.ends(sweeper, *adopted)
        sweeper.close()


class ExecutorContract:
    """What every executor guarantees, whatever it starts runs with. Subclasses define `make_executor`."""

    patience_s = 60.0
    """Seconds to wait for something that must happen; a scheduler may need more."""

    def make_executor(self) -> Executor:
        """Return a new executor. Several may exist at the same time."""
        raise NotImplementedError

    @pytest.fixture
    def harness(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExecutorHarness]:
        monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
        folder = tmp_path / "runs"
        folder.mkdir()
        harness = ExecutorHarness(folder, self.make_executor, self.patience_s)
        yield harness
        harness.close()

    # -- starting and ending

    def test_a_run_is_reported_as_started_and_then_as_ended(self, harness: ExecutorHarness) -> None:
        executor, go = harness.executor(), harness.folder / "go"
        executor.start(harness.spec(harness.python(GATED, harness.folder / "trace", go, 0)))
        harness.started(executor)
        harness.nothing_more(executor)
        go.touch()
        (event,) = harness.events(executor, lambda events: len(events) > 0)
        assert isinstance(event, Ended)
        assert event.exit.ok
        assert event.exit.code == 0
        harness.nothing_more(executor)

    def test_a_very_short_run_is_reported_as_ended(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        executor.start(harness.spec(["/bin/true"]))
        assert harness.end(executor).ok
        harness.nothing_more(executor)

    def test_a_run_may_have_any_name(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        name = 'it\'s "r1" \\ ä'
        executor.start(harness.spec(["/bin/true"], name))
        assert harness.end(executor, name).ok

    def test_an_exit_code_is_passed_on(self, harness: ExecutorHarness) -> None:
        end = harness.run(harness.python("raise SystemExit(7)"))
        assert (end.code, end.signal, end.reason, end.ok) == (7, None, None, False)
        assert str(end) == "exit code 7"

    def test_a_death_by_signal_is_reported_as_such(self, harness: ExecutorHarness) -> None:
        end = harness.run(harness.python("import os; os.kill(os.getpid(), 11)"))
        assert (end.code, end.signal, end.reason, end.ok) == (None, signal.SIGSEGV, None, False)
        assert str(end) == "signal 11"

    def test_the_exit_is_recorded_in_the_folder(self, harness: ExecutorHarness) -> None:
        end = harness.run(harness.python("raise SystemExit(3)"))
        assert Exit.from_dict(harness.file("exit.json")) == end

    def test_many_runs_at_a_time_each_get_their_own_end(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        codes = {f"r{i}": i for i in range(12)}
        for run_id, code in codes.items():
            executor.start(harness.spec(harness.python(f"raise SystemExit({code})"), run_id))
        ends = harness.ends(executor, *codes)
        assert {run_id: end.code for run_id, end in ends.items()} == codes

    # -- what cannot be started

    @pytest.mark.parametrize("content", [None, "no program at all"])
    def test_what_cannot_be_run_is_not_started(self, harness: ExecutorHarness, content: str | None) -> None:
        program = harness.folder / "program"
        if content is not None:
            program.write_text(content)
            program.chmod(0o755)
        executor = harness.executor()
        executor.start(harness.spec([str(program)]))
        events = harness.events(executor, lambda events: len(events) > 0)
        assert [type(event) for event in events] == [Ended]
        assert isinstance(events[0], Ended)
        end = events[0].exit
        assert (end.code, end.reason, end.ok) == (None, "not started", False)
        assert str(program) in str(end)
        assert harness.file("exit.json")["reason"] == "not started"

    def test_a_missing_working_folder_is_reported(self, harness: ExecutorHarness) -> None:
        missing = harness.folder / "missing"
        end = harness.run(["/bin/true"], cwd=missing)
        assert end.reason == "not started"
        assert str(missing) in (end.message or "")

    @pytest.mark.parametrize("more", [{"argv": ["/bin/echo", "a\0b"]}, {"env": {"A=B": "1"}}, {"env": {"A": "b\0c"}}])
    def test_arguments_that_no_program_can_get_are_reported(
        self, harness: ExecutorHarness, more: dict[str, Any]
    ) -> None:
        executor = harness.executor()
        executor.start(harness.spec(**{"argv": ["/bin/true"], **more}))
        assert harness.end(executor).reason == "not started"
        executor.start(harness.spec(["/bin/true"], "r2"))
        assert harness.end(executor, "r2").ok

    def test_what_could_not_be_started_is_not_started_later_either(self, harness: ExecutorHarness) -> None:
        executor, missing, trace = harness.executor(), harness.folder / "missing", harness.folder / "trace"
        executor.start(harness.spec(harness.python(ONCE, trace, 0), cwd=missing))
        assert harness.end(executor).reason == "not started"
        missing.mkdir()
        executor.start(harness.spec(harness.python(ONCE, trace, 0), cwd=missing))
        assert harness.end(executor).reason == "not started"
        assert not trace.exists()

    # -- at most once

    def test_a_run_that_is_asked_for_twice_is_started_and_ended_once(self, harness: ExecutorHarness) -> None:
        executor, trace, go = harness.executor(), harness.folder / "trace", harness.folder / "go"
        spec = harness.spec(harness.python(GATED, trace, go, 4))
        executor.start(spec)
        executor.start(spec)
        harness.started(executor)
        executor.start(spec)
        go.touch()
        assert [type(event) for event in harness.events(executor, lambda events: len(events) > 0)] == [Ended]
        harness.nothing_more(executor)
        assert trace.read_text() == "started\n"

    def test_a_run_that_is_over_is_not_started_again(self, harness: ExecutorHarness) -> None:
        executor, trace = harness.executor(), harness.folder / "trace"
        spec = harness.spec(harness.python(ONCE, trace, 4))
        executor.start(spec)
        first = harness.end(executor)
        executor.start(spec)
        assert harness.end(executor) == first
        assert trace.read_text() == "started\n"

    def test_only_one_of_several_executors_starts_a_folder_and_all_report_its_end(
        self, harness: ExecutorHarness
    ) -> None:
        executors = [harness.executor() for _ in range(3)]
        ids = [f"r{i}" for i in range(5)]
        specs = [harness.spec(harness.python(ONCE, harness.folder / f"{i}.trace", 4), i) for i in ids]
        for spec in specs:
            for executor in executors:
                executor.start(spec)
        for executor in executors:
            assert {end.code for end in harness.ends(executor, *ids).values()} == {4}
        assert [(harness.folder / f"{i}.trace").read_text() for i in ids] == ["started\n"] * 5

    def test_an_executor_does_not_start_what_a_closed_one_has_seen_to_its_end(self, harness: ExecutorHarness) -> None:
        first, second, trace = harness.executor(), harness.executor(), harness.folder / "trace"
        spec = harness.spec(harness.python(ONCE, trace, 4))
        first.start(spec)
        harness.end(first)
        first.close()
        second.start(spec)
        assert harness.end(second).code == 4
        assert trace.read_text() == "started\n"

    def test_an_executor_does_not_start_what_a_closed_one_left_running(self, harness: ExecutorHarness) -> None:
        first, second = harness.executor(), harness.executor()
        trace, go = harness.folder / "trace", harness.folder / "go"
        spec = harness.spec(harness.python(GATED, trace, go, 4))
        first.start(spec)
        harness.started(first)
        first.close()
        second.start(spec)
        harness.until(trace.exists)
        harness.nothing_more(second)
        go.touch()
        assert harness.end(second).code == 4
        assert trace.read_text() == "started\n"

    # -- one after the other: executors that prequeue

    def test_a_start_after_another_run_happens_when_that_run_is_over(self, harness: ExecutorHarness) -> None:
        executor, go = harness.executor(), harness.folder / "go"
        _require_prequeues(executor)
        executor.start(harness.spec(harness.python(GATED, harness.folder / "first", go, 0)))
        harness.until((harness.folder / "first").exists)
        executor.start(harness.spec(harness.python(ONCE, harness.folder / "second", 0), "r2"), after="r1")
        go.touch()
        ended = _answers(harness.events(executor, lambda events: {e.run_id for e in _answers(events)} == {"r1", "r2"}))
        assert [event.run_id for event in ended] == ["r1", "r2"]
        first, second = ended
        assert isinstance(first, Ended)
        assert first.exit.ok
        if isinstance(second, Ended):  # else it was held for too long on a busy machine
            assert (second.exit.started or 0.0) >= (first.exit.ended or 0.0)
            assert (harness.folder / "second").exists()

    def test_a_start_after_a_finished_or_unknown_run_happens_at_once(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        _require_prequeues(executor)
        executor.start(harness.spec(["/bin/true"]))
        harness.end(executor)
        for i, before in enumerate(["r1", "nobody"]):
            executor.start(harness.spec(["/bin/true"], f"after-{i}"), after=before)
            assert harness.end(executor, f"after-{i}").ok

    def test_every_start_after_a_run_is_answered(self, harness: ExecutorHarness) -> None:
        executor, ids = harness.executor(), ["a", "b", "c"]
        _require_prequeues(executor)
        executor.start(harness.spec(["/bin/sleep", "600"]))
        harness.started(executor)
        for run_id in ids:
            executor.start(harness.spec(["/bin/true"], run_id), after="r1")
        executor.stop("r1", "stop", grace=60)
        harness.events(executor, lambda events: {e.run_id for e in _answers(events)} == {"r1", *ids})

    def test_a_start_after_a_run_that_was_not_started_is_rejected(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        _require_prequeues(executor)
        executor.start(harness.spec(["/bin/sleep", "600"]))
        harness.started(executor)
        executor.start(harness.spec(["/bin/true"], "r2"), after="r1")
        executor.cancel("r2")
        events = harness.events(executor, lambda events: bool(_answers(events)))
        assert [type(event) for event in _answers(events)] == [Rejected]
        executor.start(harness.spec(["/bin/true"], "r3"), after="r2")  # by an engine that does not know it yet
        events = harness.events(executor, lambda events: bool(_answers(events)))
        assert [(type(event), event.run_id) for event in _answers(events)] == [(Rejected, "r3")]
        executor.start(harness.spec(["/bin/true"], "r2"))
        assert harness.end(executor, "r2").ok
        executor.start(harness.spec(["/bin/true"], "r3"), after="r2")
        assert harness.end(executor, "r3").ok
        executor.stop("r1", "stop", grace=60)
        harness.end(executor)

    # -- stopping

    def test_a_stopped_run_is_asked_to_go(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        code = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(600)
"""
        executor.start(harness.spec(harness.python(code)))
        harness.started(executor)
        harness.until(lambda: "ready" in harness.log())
        executor.stop("r1", "stop", grace=60)
        end = harness.end(executor)
        assert (end.code, end.signal, end.reason, end.ok) == (5, None, "stop", False)
        assert str(end) == "stop: exit code 5"
        harness.nothing_more(executor)

    def test_a_stop_right_after_the_start_is_not_lost(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        executor.start(harness.spec(["/bin/sleep", "600"]))
        executor.stop("r1", "stop", grace=60)
        assert harness.end(executor).reason == "stop"

    def test_stopping_what_is_over_or_unknown_does_nothing(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        executor.stop("nobody", "stop", grace=0)
        executor.start(harness.spec(["/bin/true"]))
        harness.end(executor)
        executor.stop("r1", "stop", grace=0)
        harness.nothing_more(executor)

    def test_a_run_that_ended_by_itself_keeps_its_own_reason(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        executor.start(harness.spec(["/bin/true"]))
        harness.file("exit.json")
        executor.stop("r1", "stop", grace=0)
        assert harness.end(executor).ok

    # -- time limits

    def test_a_run_over_its_time_is_ended(self, harness: ExecutorHarness) -> None:
        end = harness.run(["/bin/sleep", "600"], timeout=0.2)
        assert (end.signal, end.reason) == (signal.SIGTERM, "timeout")

    def test_a_run_within_its_time_is_left_alone(self, harness: ExecutorHarness) -> None:
        assert harness.run(["/bin/sleep", "0.1"], timeout=600).ok

    def test_a_time_limit_holds_when_the_executor_is_gone(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        executor.start(harness.spec(["/bin/sleep", "600"], timeout=0.2))
        executor.close()
        end = harness.file("exit.json")
        assert (end["reason"], end["signal"]) == ("timeout", signal.SIGTERM)

    # -- what a training finds

    def test_output_and_errors_appear_in_the_log_in_order(self, harness: ExecutorHarness) -> None:
        code = "import os; [os.write(fd, text) for fd, text in [(1, b'one\\n'), (2, b'two\\n'), (1, b'three\\n')]]"
        harness.run(harness.python(code))
        assert harness.log() == "one\ntwo\nthree\n"

    def test_the_arguments_arrive_as_they_are(self, harness: ExecutorHarness) -> None:
        arguments = ["a b", "$HOME", "*", "", "it's", '"q"', "ä\n", "--x=1"]
        harness.run(harness.python("import json, sys; print(json.dumps(sys.argv[1:]))", *arguments))
        assert json.loads(harness.log()) == arguments

    def test_the_working_folder_is_the_requested_one(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        for name in ("a", "b"):
            (harness.folder / name).mkdir()
            executor.start(harness.spec(["/bin/pwd"], f"in-{name}", cwd=harness.folder / name))
        harness.ends(executor, "in-a", "in-b")
        assert [harness.log(f"in-{name}").strip() for name in ("a", "b")] == [
            f"{harness.folder}/{n}" for n in ("a", "b")
        ]

    def test_a_run_sees_the_environment_of_the_engine_and_its_own_on_top(
        self, harness: ExecutorHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OF_THE_ENGINE", "e")
        monkeypatch.setenv("OF_BOTH", "engine's")
        monkeypatch.setenv("LOOPLAB_RUN_DIR", "/of/another/run")
        harness.run(["/usr/bin/env", "-0"], env={"OF_BOTH": "run's", "OF_THE_RUN": "r"})
        pairs = [item.split("=", 1) for item in harness.log().split("\0")[:-1]]
        seen = dict(pairs)
        assert len(seen) == len(pairs)
        assert (seen["OF_THE_ENGINE"], seen["OF_BOTH"], seen["OF_THE_RUN"]) == ("e", "run's", "r")
        assert seen["LOOPLAB_RUN_DIR"] == str(harness.folder / "r1")

    # -- taking over

    def test_a_folder_that_was_never_started_is_not_adopted(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        spec = harness.spec(["/bin/true"])
        assert not executor.adopt("r1", spec.run_dir)
        assert not executor.adopt("r2", Path("/nonexistent"))
        harness.nothing_more(executor)

    def test_a_run_that_ended_meanwhile_is_reported_at_once(self, harness: ExecutorHarness) -> None:
        before = harness.run(harness.python("raise SystemExit(7)"))
        executor = harness.executor()
        assert executor.adopt("r1", harness.folder / "r1")
        assert executor.poll(0.0) == [Ended("r1", before)]
        harness.nothing_more(executor)

    def test_what_still_runs_is_taken_over_by_the_next_executor(self, harness: ExecutorHarness) -> None:
        first, second, go = harness.executor(), harness.executor(), harness.folder / "go"
        first.start(harness.spec(harness.python(GATED, harness.folder / "trace", go, 7)))
        harness.started(first)
        first.close()
        assert second.adopt("r1", harness.folder / "r1")
        harness.nothing_more(second)
        go.touch()
        end = harness.end(second)
        assert (end.code, end.reason) == (7, None)
        harness.nothing_more(second)

    # -- attempts

    def test_a_second_attempt_is_started_once_in_the_same_folder_and_continues_the_log(
        self, harness: ExecutorHarness
    ) -> None:
        executor, other = harness.executor(), harness.executor()
        argv = harness.python("print('hello'); raise SystemExit(4)")
        first = harness.run(argv)
        spec = harness.spec(argv, attempt=2)
        assert not other.adopt("r1", spec.run_dir, attempt=2)
        executor.start(spec)
        second = harness.end(executor)
        other.start(spec)
        assert harness.end(other) == second
        assert (first.attempt, second.attempt) == (1, 2)
        assert harness.log() == "hello\nhello\n"
        assert (spec.run_dir / claim_name(2)).exists()

    def test_an_attempt_that_still_runs_is_adopted_as_that_attempt(self, harness: ExecutorHarness) -> None:
        harness.run(["/bin/true"])
        first, second, go = harness.executor(), harness.executor(), harness.folder / "go"
        first.start(harness.spec(harness.python(GATED, harness.folder / "trace", go, 7), attempt=2))
        harness.started(first)
        first.close()
        assert second.adopt("r1", harness.folder / "r1", attempt=2)
        harness.nothing_more(second)
        go.touch()
        end = harness.end(second)
        assert (end.code, end.attempt) == (7, 2)

    # -- without an engine

    def test_a_run_without_an_engine_is_seen_and_stopped(self, harness: ExecutorHarness) -> None:
        first, second, record = harness.executor(), harness.executor(), harness.folder / "r1/record"
        record.mkdir(parents=True)
        spec = harness.spec(["/bin/sleep", "600"], record_dir=record)
        assert not second.is_alive(spec.run_dir, record)
        first.start(spec)
        harness.started(first)
        first.close()
        assert second.is_alive(spec.run_dir, record)
        stopped, unreachable = second.stop_detached([spec.run_dir], 10.0)
        assert (stopped, unreachable) == (["r1"], [])
        harness.until(lambda: not second.is_alive(spec.run_dir, record))
        assert second.adopt("r1", spec.run_dir, record)
        assert not harness.end(second).ok

    def test_the_start_names_the_host(self, harness: ExecutorHarness) -> None:
        executor = harness.executor()
        executor.start(harness.spec(["/bin/sleep", "600"]))
        events = harness.events(executor, lambda events: any(isinstance(event, Started) for event in events))
        (started,) = [event for event in events if isinstance(event, Started)]
        assert started.place.host
        executor.stop("r1", "stop", grace=10)
        harness.end(executor)

    # -- the record folder

    def test_the_files_of_the_executor_are_in_the_record_folder(self, harness: ExecutorHarness) -> None:
        record = harness.folder / "r1/record"
        record.mkdir(parents=True)
        executor = harness.executor()
        argv = harness.python("print('hello'); open('train.log', 'w'); open('exit.json', 'w'); raise SystemExit(3)")
        spec = harness.spec(argv, cwd=harness.folder / "r1", record_dir=record)
        executor.start(spec)
        end = harness.end(executor)
        assert end.code == 3
        assert Exit.from_dict(harness.file("record/exit.json")) == end
        assert (record / "train.log").read_text() == "hello\n"
        assert (harness.folder / "r1/train.log").read_text() == ""
        executor.start(spec)  # once is enough
        assert harness.end(executor).code == 3
        assert (record / "train.log").read_text() == "hello\n"
