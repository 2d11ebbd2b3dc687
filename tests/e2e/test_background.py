"""Detach, attach, stop, resume, and what signals do."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

from looplab.launch.local import is_alive


def trainings(lab) -> list[int]:
    """The pids of trainings that are alive."""
    found = []
    for process in lab.all("process.json"):
        if is_alive(process["pid"], process["start"], process["boot"]):
            found.append(process["pid"])
    return found


def until_known(lab, until, n: int = 1) -> None:
    """Wait until so many trainings run and their process.json is written."""
    lab.until_at_work(n)
    until(lambda: len(trainings(lab)) >= n, "process.json")


def hangs(lab, pid: int, until) -> bool:
    """Make a process stand still; not while it writes in the ledger, which would lock out everybody."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: b") T " in Path(f"/proc/{pid}/stat").read_bytes(), "standstill")
    with closing(sqlite3.connect(lab.folder / ".looplab" / "ledger.db", timeout=0, isolation_level=None)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
        except sqlite3.OperationalError:
            os.kill(pid, signal.SIGCONT)
            return False
    return True


# -- in the background


@pytest.mark.slow
def test_a_detached_study_survives_its_terminal(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("wait@set=")
    script = f"{sys.executable} -m looplab run --detach --concurrency 1; echo DONE $?; exec sleep 60"
    terminal = lab.terminal("-c", script, program="/bin/sh")
    until(lambda: "DONE 0" in terminal.shown, "the prompt")
    assert "survives this terminal" in terminal.shown
    engine = lab.engine()
    until_known(lab, until)
    terminal.hang_up()
    os.killpg(terminal.process.pid, signal.SIGKILL)
    terminal.process.wait()
    assert lab.engine() == engine
    assert len(trainings(lab)) == 1
    lab.open_gate()
    until(lambda: lab.engine() is None, "the end of the engine")
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok", "ok"]


@pytest.mark.slow
def test_detach_says_who_runs_and_where_the_log_is(lab) -> None:
    lab.base(wait="gate")
    told = lab("run", "--detach", "--json").json()
    assert told["study"] == "toy"
    assert told["pid"] == lab.engine()
    lab.until_at_work()
    lab.open_gate()
    lab("attach", code=None)  # ends with the engine, which may have ended already
    assert "round 1: 1 run" in Path(told["log"]).read_text()


def test_a_study_that_cannot_run_is_refused_before_it_is_detached(lab) -> None:
    lab.write("configs/base.json", "{")
    done = lab("run", "--detach", code=2)
    assert "configs/base.json" in done.err
    assert not (lab.folder / ".looplab").exists()


def test_attach_shows_a_study_and_ends_with_it(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3")
    lab("run", "--detach", "--concurrency", "1")
    lab.until_at_work()
    attached = lab.start("attach")
    first = lab.runs()[0].name
    until(lambda: f"; running: {first}" in attached.out, "the running trainings")
    lab.open_gate()
    out = attached.ended().out
    second = lab.runs()[1].name
    assert f"run {first} ok" in out
    assert f"run {second} in cpu0" in out
    assert f"run {second} ok" in out
    assert f"{second} *" in out  # the final table, with the best run marked


def test_attach_in_json_prints_events(lab, until) -> None:
    lab.base(wait="gate")
    lab("run", "--detach")
    lab.until_at_work()
    attached = lab.start("attach", "--json")
    until(lambda: attached.out, "the first line")
    lab.open_gate()
    events = attached.ended().lines()
    assert events[0]["running"] == [lab.runs()[0].name]
    assert "ended" in [event["kind"] for event in events]
    assert all(event["study"] == "toy" for event in events)


@pytest.mark.slow
def test_ctrl_c_in_attach_leaves_the_study_alone(lab, until) -> None:
    lab.base(wait="gate")
    lab("run", "--detach")
    lab.until_at_work()
    terminal = lab.terminal("attach")
    until(lambda: lab.runs()[0].name in terminal.shown, "the running training on the screen")
    terminal.type(b"\x03")
    assert terminal.ended() == 130
    assert lab.engine() is not None
    lab.open_gate()
    lab.until_ended(1)
    assert lab.count(status="ok") == 1


def test_attach_without_an_engine_says_what_to_do(lab) -> None:
    lab("run")
    assert "looplab resume" in lab("attach", code=2).err


@pytest.mark.slow
def test_a_second_engine_is_refused(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    for command in (["run"], ["run", "--detach"], ["resume"], ["reindex"]):
        done = lab(*command, code=3)
        assert "looplab stop" in done.err
    assert str(engine.pid) in lab("run", code=3).err
    lab.open_gate()
    engine.ended()
    assert lab.count() == 1


# -- stop


@pytest.mark.slow
def test_stop_ends_the_trainings_now_and_resume_runs_the_rest(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("wait@set=")
    lab("run", "--detach", "--concurrency", "1")
    until_known(lab, until)
    assert "has stopped" in lab("stop").out
    assert lab.engine() is None
    assert trainings(lab) == []
    assert lab.all("summary.json")[0]["status"] == "stopped"
    lab("resume")
    assert [summary["status"] for summary in lab.all("summary.json")] == ["stopped", "ok"]


def test_a_trainer_that_will_not_go_is_killed(lab, until) -> None:
    trainer = (lab.folder / "train.py").read_text()
    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    lab.write("train.py", ignore + trainer)
    lab.base(wait="never")
    lab.configure(launch={**lab.study["launch"], "grace": 0.2})
    lab("run", "--detach")
    until_known(lab, until)
    lab("stop")
    assert trainings(lab) == []
    (exit_,) = lab.all("exit.json")
    assert (exit_["signal"], exit_["reason"]) == (signal.SIGKILL, "stop")


@pytest.mark.slow
def test_drain_lets_what_runs_end_and_resume_runs_the_rest(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3", "train.lr@set=0.4")
    lab("run", "--detach", "--concurrency", "1")
    lab.until_at_work()
    assert "starts no new runs" in lab("stop", "--drain").out
    lab.open_gate()
    until(lambda: lab.engine() is None, "the end of the engine")
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok"]
    lab("resume")
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok"] * 3


@pytest.mark.slow
def test_resume_keeps_the_options_of_the_last_run(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3", "train.lr@set=0.4")
    lab("run", "--detach", "--concurrency", "1", "--mode", "quick", "--runs", "2", "--", "--flag")
    lab.until_at_work()
    lab("stop", "--drain")
    lab.open_gate()
    until(lambda: lab.engine() is None, "the end of the engine")
    lab("resume")
    assert [config["steps"] for config in lab.all("config.json")] == [1, 1]
    assert [seen["argv"] for seen in lab.all("seen.json")] == [["--flag"], ["--flag"]]


def test_stop_of_one_run_frees_its_slot_and_the_study_goes_on(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("wait@set=")
    engine = lab.start("run", "--concurrency", "1")
    until_known(lab, until)
    (run,) = lab.runs()
    assert f"run {run.name} has stopped" in lab("stop", "1").out
    engine.ended()
    assert [summary["status"] for summary in lab.all("summary.json")] == ["stopped", "ok"]


def test_stop_of_a_run_that_has_ended_says_so(lab) -> None:
    lab("run")
    assert "is not running: it is ok" in lab("stop", "1").out


def test_stop_without_an_engine_ends_what_is_still_alive(lab, until) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    until_known(lab, until)
    engine.process.kill()
    engine.process.wait()
    (run,) = lab.runs()
    assert len(trainings(lab)) == 1
    assert run.name in lab("stop").out
    assert trainings(lab) == []
    assert "no training is alive" in lab("stop").out
    lab("resume", code=1)
    assert lab.all("summary.json")[0]["status"] == "failed"


def test_a_wish_that_the_last_engine_did_not_hear_is_not_obeyed_by_the_next_one(lab, until) -> None:
    lab.base(wait="gate")
    lab.configure(launch={**lab.study["launch"], "grace": 0.1})
    engine = lab.start("run")
    until_known(lab, until)
    until(lambda: hangs(lab, engine.pid, until), "a moment in which the engine holds nothing")
    lab("stop", "--drain")
    engine.process.kill()
    engine.process.wait()
    lab.queue("train.lr@set=0.3")
    lab.open_gate()
    lab("resume")
    assert lab.count(status="ok") == 2


# -- signals


def test_ctrl_c_once_drains(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3")
    terminal = lab.terminal("run", "--concurrency", "1")
    lab.until_at_work()
    terminal.type(b"\x03")
    until(lambda: "draining" in terminal.shown, "word that it drains")
    lab.open_gate()
    assert terminal.ended() == 0
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok"]
    lab("resume")
    assert lab.count(status="ok") == 2


def test_ctrl_c_twice_stops(lab, until) -> None:
    lab.base(wait="gate")
    terminal = lab.terminal("run")
    until_known(lab, until)
    terminal.type(b"\x03")
    until(lambda: "draining" in terminal.shown, "word that it drains")
    terminal.type(b"\x03")
    assert terminal.ended() == 130
    assert trainings(lab) == []
    assert lab.all("summary.json")[0]["status"] == "stopped"


def test_ctrl_c_reaches_no_training(lab, until) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    until_known(lab, until)
    engine.send(signal.SIGINT)
    lab.open_gate()
    engine.ended()
    assert lab.all("exit.json")[0]["code"] == 0


def test_sigterm_stops(lab, until) -> None:
    lab.base(wait="gate")
    engine = lab.start("run", "--json")
    until_known(lab, until)
    os.kill(engine.pid, signal.SIGTERM)
    lines = engine.ended(code=130).lines()
    assert lines[-1]["ending"] == "stopped"
    assert trainings(lab) == []
    assert lab.all("exit.json")[0]["reason"] == "stop"


def test_a_signal_that_comes_while_a_run_is_prepared_holds_for_this_run_too(lab, until) -> None:
    slow = "#!/bin/sh\ntouch asked\nwhile [ ! -e answer ]; do sleep 0.01; done\nexit 1\n"
    lab.write("bin/git", slow).chmod(0o755)  # the capsule asks it for the commit
    (lab.folder / ".git").mkdir()
    lab.base(sleep=3)
    engine = lab.start("run", env={"PATH": f"{lab.folder}/bin:{os.environ['PATH']}"})
    until((lab.folder / "asked").exists, "the question for the commit")
    os.kill(engine.pid, signal.SIGTERM)
    lab.open_gate("answer")
    engine.ended(code=130)
    assert "ok" not in [summary["status"] for summary in lab.all("summary.json")]


def test_a_closed_terminal_drains(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3")
    terminal = lab.terminal("run", "--concurrency", "1")
    until_known(lab, until)
    terminal.hang_up()
    os.kill(terminal.process.pid, signal.SIGHUP)  # the shell may send one as well
    lab.open_gate()
    assert terminal.process.wait(PATIENCE_S) == 0
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok"]
    assert lab.ask("SELECT how FROM sessions") == [("drained",)]
    lab("resume")
    assert lab.count(status="ok") == 2
    lab("verify")


def test_trainings_outlive_a_killed_engine_and_resume_adopts_them(lab, until) -> None:
    lab.base(wait="gate")
    killed = lab.start("run")
    until_known(lab, until)
    before = trainings(lab)
    killed.send(signal.SIGKILL)
    killed.process.wait()
    assert trainings(lab) == before
    engine = lab.start("resume")
    until(lambda: "adopted" in engine.out, "the adoption")
    lab.open_gate()
    engine.ended()
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok"]


@pytest.mark.parametrize("json", [False, True])
def test_a_reader_that_goes_away_does_not_end_the_study(lab, json: bool) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3", "train.lr@set=0.4")
    reader, writer = os.pipe()
    engine = lab.start("run", "--concurrency", "1", *["--json"] * json, stdout=writer)
    os.close(writer)
    lab.until_at_work()
    os.close(reader)
    lab.open_gate()
    assert engine.process.wait(PATIENCE_S) == 0
    assert lab.count(status="ok") == 3
    lab("verify")
