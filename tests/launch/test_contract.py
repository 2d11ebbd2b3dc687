"""What every executor promises, whatever it starts runs with: see `looplab.launch.base`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from looplab.launch.base import Ended, Exit, Rejected, Slot, Started

Stand = Any
"""What the fixture `any_stand` gives; see conftest.py."""

ONCE = "import sys; open(sys.argv[1], 'a').write('started\\n'); sys.exit(int(sys.argv[2]))"
GATED = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write("started\\n")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.005)
sys.exit(int(sys.argv[3]))
"""
STUBBORN_FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


# -- starting and ending


def test_a_run_is_reported_as_started_and_then_as_ended(any_stand: Stand) -> None:
    executor, go = any_stand.executor(), any_stand.folder / "go"
    executor.start(any_stand.spec(any_stand.python(GATED, any_stand.folder / "trace", go, 0)))
    pid = any_stand.started(executor)
    assert any_stand.alive(pid)
    any_stand.nothing_more(executor)
    go.touch()
    (event,) = any_stand.events(executor, lambda events: len(events) > 0)
    assert isinstance(event, Ended)
    assert event.exit.ok
    assert event.exit.code == 0
    any_stand.nothing_more(executor)


def test_a_very_short_run_is_reported_as_ended(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/true"]))
    assert any_stand.end(executor).ok
    any_stand.nothing_more(executor)


def test_a_run_may_have_any_name(any_stand: Stand) -> None:
    executor = any_stand.executor()
    name = 'it\'s "r1" \\ ä'
    executor.start(any_stand.spec(["/bin/true"], name))
    assert any_stand.end(executor, name).ok


def test_the_end_says_when_it_was_and_what_was_used(any_stand: Stand) -> None:
    end = any_stand.run(any_stand.python("x = bytearray(30_000_000)"))
    assert end.started < end.ended
    assert end.user_s + end.system_s > 0
    assert end.max_rss_kb > 30_000
    assert not end.lingered


def test_an_exit_code_is_passed_on(any_stand: Stand) -> None:
    end = any_stand.run(any_stand.python("raise SystemExit(7)"))
    assert (end.code, end.signal, end.reason, end.ok) == (7, None, None, False)
    assert str(end) == "exit code 7"


def test_a_death_by_signal_is_reported_as_such(any_stand: Stand) -> None:
    end = any_stand.run(any_stand.python("import os; os.kill(os.getpid(), 11)"))
    assert (end.code, end.signal, end.reason, end.ok) == (None, signal.SIGSEGV, None, False)
    assert str(end) == "signal 11"


def test_the_exit_is_recorded_in_the_folder(any_stand: Stand) -> None:
    end = any_stand.run(any_stand.python("raise SystemExit(3)"))
    assert Exit.from_dict(any_stand.file("exit.json")) == end


def test_many_runs_at_a_time_each_get_their_own_end(any_stand: Stand) -> None:
    executor = any_stand.executor()
    codes = {f"r{i}": i for i in range(12)}
    for run_id, code in codes.items():
        executor.start(any_stand.spec(any_stand.python(f"raise SystemExit({code})"), run_id))
    ends = any_stand.ends(executor, *codes)
    assert {run_id: end.code for run_id, end in ends.items()} == codes


# -- what cannot be started


@pytest.mark.parametrize("content", [None, "no program at all"])
def test_what_cannot_be_run_is_not_started(any_stand: Stand, content: str | None) -> None:
    program = any_stand.folder / "program"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    executor = any_stand.executor()
    executor.start(any_stand.spec([str(program)]))
    events = any_stand.events(executor, lambda events: len(events) > 0)
    assert [type(event) for event in events] == [Ended]
    end = events[0].exit
    assert (end.code, end.reason, end.ok) == (None, "not started", False)
    assert str(program) in str(end)
    assert any_stand.file("exit.json")["reason"] == "not started"


def test_a_missing_working_folder_is_reported(any_stand: Stand) -> None:
    missing = any_stand.folder / "missing"
    end = any_stand.run(["/bin/true"], cwd=missing)
    assert end.reason == "not started"
    assert str(missing) in end.message


@pytest.mark.parametrize("more", [{"argv": ["/bin/echo", "a\0b"]}, {"env": {"A=B": "1"}}, {"env": {"A": "b\0c"}}])
def test_arguments_that_no_program_can_get_are_reported(any_stand: Stand, more: dict[str, Any]) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(more.pop("argv", ["/bin/true"]), **more))
    assert any_stand.end(executor).reason == "not started"
    executor.start(any_stand.spec(["/bin/true"], "r2"))
    assert any_stand.end(executor, "r2").ok


def test_cores_that_do_not_exist_are_reported(any_stand: Stand) -> None:
    assert any_stand.run(["/bin/true"], slot=Slot("cpu0", cores=(100_000,))).reason == "not started"


def test_what_could_not_be_started_is_not_started_later_either(any_stand: Stand) -> None:
    executor, missing, trace = any_stand.executor(), any_stand.folder / "missing", any_stand.folder / "trace"
    executor.start(any_stand.spec(any_stand.python(ONCE, trace, 0), cwd=missing))
    assert any_stand.end(executor).reason == "not started"
    missing.mkdir()
    executor.start(any_stand.spec(any_stand.python(ONCE, trace, 0), cwd=missing))
    assert any_stand.end(executor).reason == "not started"
    assert not trace.exists()


# -- at most once


def test_a_run_that_is_asked_for_twice_is_started_and_ended_once(any_stand: Stand) -> None:
    executor, trace, go = any_stand.executor(), any_stand.folder / "trace", any_stand.folder / "go"
    spec = any_stand.spec(any_stand.python(GATED, trace, go, 4))
    executor.start(spec)
    executor.start(spec)
    any_stand.started(executor)
    executor.start(spec)
    go.touch()
    assert [type(event) for event in any_stand.events(executor, lambda events: len(events) > 0)] == [Ended]
    any_stand.nothing_more(executor)
    assert trace.read_text() == "started\n"


def test_a_run_that_is_over_is_not_started_again(any_stand: Stand) -> None:
    executor, trace = any_stand.executor(), any_stand.folder / "trace"
    spec = any_stand.spec(any_stand.python(ONCE, trace, 4))
    executor.start(spec)
    first = any_stand.end(executor)
    executor.start(spec)
    assert any_stand.end(executor) == first
    assert trace.read_text() == "started\n"


def test_only_one_of_several_executors_starts_a_folder_and_all_report_its_end(any_stand: Stand) -> None:
    executors = [any_stand.executor() for _ in range(3)]
    ids = [f"r{i}" for i in range(5)]
    specs = [any_stand.spec(any_stand.python(ONCE, any_stand.folder / f"{i}.trace", 4), i) for i in ids]
    for spec in specs:
        for executor in executors:
            executor.start(spec)
    for executor in executors:
        assert {end.code for end in any_stand.ends(executor, *ids).values()} == {4}
    assert [(any_stand.folder / f"{i}.trace").read_text() for i in ids] == ["started\n"] * 5


def test_an_executor_does_not_start_what_a_closed_one_has_seen_to_its_end(any_stand: Stand) -> None:
    first, second, trace = any_stand.executor(), any_stand.executor(), any_stand.folder / "trace"
    spec = any_stand.spec(any_stand.python(ONCE, trace, 4))
    first.start(spec)
    any_stand.end(first)
    first.close()
    second.start(spec)
    assert any_stand.end(second).code == 4
    assert trace.read_text() == "started\n"


def test_an_executor_does_not_start_what_a_closed_one_left_running(any_stand: Stand) -> None:
    first, second = any_stand.executor(), any_stand.executor()
    trace, go = any_stand.folder / "trace", any_stand.folder / "go"
    spec = any_stand.spec(any_stand.python(GATED, trace, go, 4))
    first.start(spec)
    any_stand.started(first)
    first.close()
    second.start(spec)
    any_stand.until(trace.exists)
    any_stand.nothing_more(second)
    go.touch()
    assert any_stand.end(second).code == 4
    assert trace.read_text() == "started\n"


def test_a_failing_start_does_not_touch_a_live_run(any_stand: Stand) -> None:
    first, second = any_stand.executor(), any_stand.executor()
    first.start(any_stand.spec(["/bin/sleep", "600"]))
    pid = any_stand.started(first)
    second.start(any_stand.spec(["/bin/sleep", "600"], cwd=any_stand.folder / "missing"))
    any_stand.nothing_more(second)
    assert any_stand.alive(pid)
    assert not (any_stand.folder / "r1/exit.json").exists()
    first.stop("r1", "stop", 10)
    assert any_stand.end(first).reason == "stop"
    assert any_stand.end(second).signal == signal.SIGTERM


# -- one after the other


def test_a_start_after_another_run_happens_when_that_run_is_over(any_stand: Stand) -> None:
    executor, go = any_stand.executor(), any_stand.folder / "go"
    executor.start(any_stand.spec(any_stand.python(GATED, any_stand.folder / "first", go, 0)))
    any_stand.until((any_stand.folder / "first").exists)
    executor.start(any_stand.spec(any_stand.python(ONCE, any_stand.folder / "second", 0), "r2"), after="r1")
    go.touch()
    events = any_stand.events(
        executor, lambda events: {e.run_id for e in events if not isinstance(e, Started)} == {"r1", "r2"}
    )
    told = [event for event in events if not isinstance(event, Started)]
    assert [event.run_id for event in told] == ["r1", "r2"]
    assert told[0].exit.ok
    if isinstance(told[1], Ended):  # else it was held for too long on a busy machine
        assert told[1].exit.started >= told[0].exit.ended
        assert (any_stand.folder / "second").exists()


def test_a_start_after_a_finished_or_unknown_run_happens_at_once(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/true"]))
    any_stand.end(executor)
    for i, before in enumerate(["r1", "nobody"]):
        executor.start(any_stand.spec(["/bin/true"], f"after-{i}"), after=before)
        assert any_stand.end(executor, f"after-{i}").ok


def test_every_start_after_a_run_is_answered(any_stand: Stand) -> None:
    executor, ids = any_stand.executor(), ["a", "b", "c"]
    executor.start(any_stand.spec(["/bin/sleep", "600"]))
    any_stand.started(executor)
    for run_id in ids:
        executor.start(any_stand.spec(["/bin/true"], run_id), after="r1")
    executor.stop("r1", "stop", grace=60)
    any_stand.events(executor, lambda events: {e.run_id for e in events if not isinstance(e, Started)} == {"r1", *ids})


def test_a_start_that_is_pending_too_long_is_rejected(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/sleep", "600"]))
    any_stand.started(executor)
    waiting = any_stand.spec(["/bin/true"], "r2")
    executor.start(waiting, after="r1")
    (event,) = any_stand.events(executor, lambda events: len(events) > 0)
    assert event == Rejected("r2", None)
    assert not (waiting.run_dir / "train.log").exists()
    executor.stop("r1", "stop", grace=60)
    assert set(any_stand.ends(executor, "r1")) == {"r1"}
    any_stand.nothing_more(executor)


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_pending_start_can_be_cancelled(any_stand: Stand, how: str) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/sleep", "600"]))
    any_stand.started(executor)
    waiting = any_stand.spec(["/bin/true"], "r2")
    executor.start(waiting, after="r1")
    executor.cancel("r2") if how == "cancel" else executor.stop("r2", "stop", 0)
    (event,) = any_stand.events(executor, lambda events: len(events) > 0)
    assert event == Rejected("r2", None)
    executor.stop("r1", "stop", grace=60)
    any_stand.end(executor)
    any_stand.nothing_more(executor)
    assert not (waiting.run_dir / "train.log").exists()


def test_what_has_started_cannot_be_taken_back(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/sleep", "600"]))
    pid = any_stand.started(executor)
    executor.cancel("r1")
    executor.cancel("nobody")
    any_stand.nothing_more(executor)
    assert any_stand.alive(pid)


def test_a_pending_start_is_dropped_without_its_executor(any_stand: Stand) -> None:
    executor, trace = any_stand.executor(), any_stand.folder / "trace"
    executor.start(any_stand.spec(["/bin/sleep", "600"]))
    any_stand.started(executor)
    executor.start(any_stand.spec(any_stand.python(ONCE, trace, 0), "r2"), after="r1")
    executor.stop("r1", "stop", grace=60)
    executor.close()
    assert any_stand.file("exit.json")["reason"] == "stop"
    other = any_stand.executor()
    if other.adopt("r2", any_stand.folder / "r2"):  # it was faster than the end of the executor
        any_stand.end(other, "r2")
    else:
        assert not trace.exists()


# -- stopping


def test_a_stopped_run_is_asked_to_go(any_stand: Stand) -> None:
    executor = any_stand.executor()
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(600)"
    executor.start(any_stand.spec(any_stand.python(code)))
    any_stand.started(executor)
    any_stand.until(lambda: "ready" in any_stand.log())
    executor.stop("r1", "stop", grace=60)
    end = any_stand.end(executor)
    assert (end.code, end.signal, end.reason, end.ok) == (5, None, "stop", False)
    assert str(end) == "stop: exit code 5"
    any_stand.nothing_more(executor)


def test_a_run_that_does_not_go_is_killed_with_all_its_processes(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(any_stand.python(STUBBORN_FAMILY, any_stand.folder / "pids"), grace=60))
    pids = any_stand.pids("pids", 2)
    executor.stop("r1", "stall", grace=0.2)
    end = any_stand.end(executor)
    assert (end.signal, end.reason) == (signal.SIGKILL, "stall")
    assert not any(map(any_stand.alive, pids))


def test_a_second_stop_with_less_patience_counts(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(any_stand.python(STUBBORN_FAMILY, any_stand.folder / "pids")))
    any_stand.pids("pids", 2)
    executor.stop("r1", "stop", grace=3600)
    executor.stop("r1", "again", grace=0)
    end = any_stand.end(executor)
    assert (end.signal, end.reason) == (signal.SIGKILL, "stop")


def test_a_stop_right_after_the_start_is_not_lost(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/sleep", "600"]))
    executor.stop("r1", "stop", grace=60)
    assert any_stand.end(executor).reason == "stop"


def test_only_the_stopped_run_ends(any_stand: Stand) -> None:
    executor = any_stand.executor()
    for run_id in ("r1", "r2"):
        executor.start(any_stand.spec(["/bin/sleep", "600"], run_id))
    executor.stop("r2", "stop", grace=60)
    assert set(any_stand.ends(executor, "r2")) == {"r2"}
    assert any_stand.alive(any_stand.file("process.json", "r1")["pid"])
    assert not any(isinstance(event, Ended) for event in executor.poll(0.1))


def test_stopping_what_is_over_or_unknown_does_nothing(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.stop("nobody", "stop", grace=0)
    executor.start(any_stand.spec(["/bin/true"]))
    any_stand.end(executor)
    executor.stop("r1", "stop", grace=0)
    any_stand.nothing_more(executor)


def test_a_run_that_ended_by_itself_keeps_its_own_reason(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/true"]))
    any_stand.file("exit.json")
    executor.stop("r1", "stop", grace=0)
    assert any_stand.end(executor).ok


# -- time limits


def test_a_run_over_its_time_is_ended(any_stand: Stand) -> None:
    end = any_stand.run(["/bin/sleep", "600"], timeout=0.2)
    assert (end.signal, end.reason) == (signal.SIGTERM, "timeout")


def test_a_run_within_its_time_is_left_alone(any_stand: Stand) -> None:
    assert any_stand.run(["/bin/sleep", "0.1"], timeout=600).ok


def test_a_time_limit_holds_when_the_executor_is_gone(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/sleep", "600"], timeout=0.2))
    executor.close()
    end = any_stand.file("exit.json")
    assert (end["reason"], end["signal"]) == ("timeout", signal.SIGTERM)


# -- what a training finds


def test_output_and_errors_appear_in_the_log_in_order(any_stand: Stand) -> None:
    code = "import os; [os.write(fd, text) for fd, text in [(1, b'one\\n'), (2, b'two\\n'), (1, b'three\\n')]]"
    any_stand.run(any_stand.python(code))
    assert any_stand.log() == "one\ntwo\nthree\n"


def test_the_arguments_arrive_as_they_are(any_stand: Stand) -> None:
    arguments = ["a b", "$HOME", "*", "", "it's", '"q"', "ä\n", "--x=1"]
    any_stand.run(any_stand.python("import json, sys; print(json.dumps(sys.argv[1:]))", *arguments))
    assert json.loads(any_stand.log()) == arguments


def test_the_working_folder_is_the_requested_one(any_stand: Stand) -> None:
    executor = any_stand.executor()
    for name in ("a", "b"):
        (any_stand.folder / name).mkdir()
        executor.start(any_stand.spec(["/bin/pwd"], f"in-{name}", cwd=any_stand.folder / name))
    any_stand.ends(executor, "in-a", "in-b")
    assert [any_stand.log(f"in-{name}").strip() for name in ("a", "b")] == [
        f"{any_stand.folder}/{n}" for n in ("a", "b")
    ]


def test_a_recreated_working_folder_is_the_new_one(any_stand: Stand) -> None:
    executor, cwd = any_stand.executor(), any_stand.folder / "work"
    for run_id in ("r1", "r2"):
        cwd.mkdir()
        (cwd / "here").write_text(run_id)
        executor.start(any_stand.spec(["/bin/cat", "here"], run_id, cwd=cwd))
        assert any_stand.end(executor, run_id).ok
        (cwd / "here").unlink()
        cwd.rmdir()
    assert any_stand.log("r2") == "r2"


def test_a_run_sees_the_environment_of_the_engine_and_its_own_on_top(
    any_stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_ENGINE", "e")
    monkeypatch.setenv("OF_BOTH", "engine's")
    monkeypatch.setenv("LOOPLAB_RUN_DIR", "/of/another/run")
    any_stand.run(["/usr/bin/env", "-0"], env={"OF_BOTH": "run's", "OF_THE_RUN": "r"})
    pairs = [item.split("=", 1) for item in any_stand.log().split("\0")[:-1]]
    seen = dict(pairs)
    assert len(seen) == len(pairs)
    assert (seen["OF_THE_ENGINE"], seen["OF_BOTH"], seen["OF_THE_RUN"]) == ("e", "run's", "r")
    assert seen["LOOPLAB_RUN_DIR"] == str(any_stand.folder / "r1")


def test_the_cores_are_those_of_the_slot(any_stand: Stand) -> None:
    cores = sorted(os.sched_getaffinity(0))
    executor = any_stand.executor()
    show = any_stand.python("import os; print(sorted(os.sched_getaffinity(0)))")
    for run_id, pinned in (("r1", (cores[-1],)), ("r2", ())):
        executor.start(any_stand.spec(show, run_id, slot=Slot("cpu0", cores=pinned)))
    any_stand.ends(executor, "r1", "r2")
    assert json.loads(any_stand.log("r1")) == cores[-1:]
    assert json.loads(any_stand.log("r2")) == cores


def test_a_run_leads_a_session_of_its_own(any_stand: Stand) -> None:
    any_stand.run(any_stand.python("import os; print([os.getpid(), os.getpgrp(), os.getsid(0)])"))
    pid, group, session = json.loads(any_stand.log())
    assert pid == group == session


def test_a_run_has_nothing_to_read_and_no_descriptors_of_others(any_stand: Stand) -> None:
    code = """
import os, sys
assert sys.stdin.read() == ""
for fd in sorted(os.listdir("/proc/self/fd"), key=int):
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        print(fd, os.readlink(f"/proc/self/fd/{fd}"))
"""
    (any_stand.folder / "held").touch()
    with (any_stand.folder / "held").open() as held:
        os.set_inheritable(held.fileno(), True)
        assert any_stand.run(any_stand.python(code)).ok
    log = any_stand.folder / "r1/train.log"
    # Beside its streams only the lock on its own folder, by which others see that it is alive.
    assert any_stand.log().splitlines() == ["0 /dev/null", f"1 {log}", f"2 {log}", f"100 {log.parent}"]


def test_no_signal_is_ignored_or_blocked_in_a_run(any_stand: Stand) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as it is in the background of a script
    try:
        any_stand.run(["/bin/cat", "/proc/self/status"])
    finally:
        signal.signal(signal.SIGQUIT, before)
    status = dict(line.split(":", 1) for line in any_stand.log().splitlines())
    of_the_c_library = 1 << 31 | 1 << 32  # it uses signals 32 and 33 for itself
    assert int(status["SigIgn"], 16) & ~of_the_c_library == 0
    assert int(status["SigBlk"], 16) == 0


# -- taking over


def test_a_folder_that_was_never_started_is_not_adopted(any_stand: Stand) -> None:
    executor = any_stand.executor()
    spec = any_stand.spec(["/bin/true"])
    assert not executor.adopt("r1", spec.run_dir)
    assert not executor.adopt("r2", Path("/nonexistent"))
    any_stand.nothing_more(executor)


def test_a_run_that_ended_meanwhile_is_reported_at_once(any_stand: Stand) -> None:
    before = any_stand.run(any_stand.python("raise SystemExit(7)"))
    executor = any_stand.executor()
    assert executor.adopt("r1", any_stand.folder / "r1")
    assert executor.poll(0.0) == [Ended("r1", before)]
    any_stand.nothing_more(executor)


def test_what_still_runs_is_taken_over_by_the_next_executor(any_stand: Stand) -> None:
    first, second, go = any_stand.executor(), any_stand.executor(), any_stand.folder / "go"
    first.start(any_stand.spec(any_stand.python(GATED, any_stand.folder / "trace", go, 7)))
    any_stand.started(first)
    first.close()
    assert second.adopt("r1", any_stand.folder / "r1")
    any_stand.nothing_more(second)
    go.touch()
    end = any_stand.end(second)
    assert (end.code, end.reason) == (7, None)
    any_stand.nothing_more(second)


# -- devices


def test_a_device_is_given_to_one_run_at_a_time_on_the_whole_machine(any_stand: Stand) -> None:
    first, second = any_stand.executor(), any_stand.executor()
    slot = Slot("gpu0", devices=("0",))
    first.start(any_stand.spec(["/bin/sleep", "600"], "r1", slot=slot))
    any_stand.started(first)
    waiting = any_stand.spec(["/bin/true"], "r2", slot=slot)
    second.start(waiting)
    events = any_stand.events(second, lambda events: len(events) > 0)
    assert events == [Rejected("r2", str(any_stand.folder / "r1"))]
    assert not (waiting.run_dir / "train.log").exists()
    first.stop("r1", "stop", 60)
    any_stand.end(first)
    second.start(waiting)
    assert any_stand.end(second, "r2").ok


def test_other_devices_and_other_lanes_are_free(any_stand: Stand) -> None:
    executor = any_stand.executor()
    slots = [Slot("gpu0", ("0",)), Slot("gpu1", ("1",)), Slot("gpu0.1", ("0",), device_share=1)]
    for i, slot in enumerate(slots):
        executor.start(any_stand.spec(["/bin/sleep", "600"], f"r{i}", slot=slot))
    events = any_stand.events(executor, lambda events: len(events) == 3)
    assert {type(event) for event in events} == {Started}


def test_a_run_that_needs_two_devices_takes_both_or_none(any_stand: Stand) -> None:
    executor = any_stand.executor()
    executor.start(any_stand.spec(["/bin/sleep", "600"], "one", slot=Slot("gpu1", ("1",))))
    any_stand.started(executor, "one")
    executor.start(any_stand.spec(["/bin/true"], "both", slot=Slot("gpu01", ("0", "1"))))
    assert isinstance(any_stand.events(executor, lambda events: len(events) > 0)[0], Rejected)
    executor.start(any_stand.spec(["/bin/true"], "other", slot=Slot("gpu0", ("0",))))
    assert any_stand.end(executor, "other").ok


# -- the record folder


def test_the_files_of_the_executor_are_in_the_record_folder(any_stand: Stand) -> None:
    record = any_stand.folder / "r1/record"
    record.mkdir(parents=True)
    executor = any_stand.executor()
    argv = any_stand.python("print('hello'); open('train.log', 'w'); open('exit.json', 'w'); raise SystemExit(3)")
    spec = any_stand.spec(argv, cwd=any_stand.folder / "r1", record_dir=record)
    executor.start(spec)
    end = any_stand.end(executor)
    assert end.code == 3
    assert Exit.from_dict(any_stand.file("record/exit.json")) == end
    assert (record / "train.log").read_text() == "hello\n"
    assert (any_stand.folder / "r1/train.log").read_text() == ""
    executor.start(spec)  # once is enough
    assert any_stand.end(executor).code == 3
    assert (record / "train.log").read_text() == "hello\n"
