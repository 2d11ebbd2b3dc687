"""Commands under nohup, in the background of a shell, and with whatever else a starter may pass on of its signals."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from looplab.launch.local import is_alive

IGNORING = ("/bin/sh", "-c", """trap '' INT HUP; exec "$@" """, "sh")
"""As `nohup looplab … &` in a script."""
ODD = (
    sys.executable,
    "-c",
    """import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])""",
)
"""Signals blocked, and children reaped by the kernel."""
SHOW_SIGNALS = ("grep", "-E", "^Sig(Ign|Blk):", "/proc/self/status")
OF_THE_C_LIBRARY = 0b11 << 31
CTRL_C = "Ctrl-C is ignored here (started in the background)"


def has_default_signals(text: str) -> bool:
    """Whether no signal is ignored or blocked in what `SHOW_SIGNALS` printed."""
    found = [int(line.split()[1], 16) & ~OF_THE_C_LIBRARY for line in text.splitlines() if line.startswith("Sig")]
    assert found, text
    return not any(found)


def at_work(lab: Any) -> list[int]:
    return [p["pid"] for p in lab.all("process.json") if is_alive(p["pid"], p["start"], p["boot"])]


def start_study(lab: Any, until: Any, *wrapper: str) -> Any:
    """An engine with one training at work and one in the queue."""
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1", wrapper=wrapper)
    lab.until_at_work()
    until(lambda: at_work(lab), "process.json")
    return engine


# -- the engine


def test_an_engine_in_the_background_is_not_ended_by_a_ctrl_c_meant_for_others(lab: Any, until: Any) -> None:
    engine = start_study(lab, until, *IGNORING)
    engine.send(signal.SIGINT)
    engine.send(signal.SIGHUP)
    engine.send(signal.SIGINT)
    lab.open_gate()
    assert CTRL_C in engine.ended().out
    assert lab.count(status="ok") == 2


def test_an_engine_that_ignores_ctrl_c_is_stopped_by_sigterm(lab: Any, until: Any) -> None:
    engine = start_study(lab, until, *IGNORING)
    engine.send(signal.SIGTERM)
    engine.ended(130)
    assert at_work(lab) == []
    assert [summary["status"] for summary in lab.all("summary.json")] == ["stopped"]


def test_an_engine_that_ignores_ctrl_c_is_stopped_by_looplab_stop(lab: Any, until: Any) -> None:
    engine = start_study(lab, until, *IGNORING)
    assert "has stopped" in lab("stop").out
    engine.ended(130)
    assert at_work(lab) == []


def test_a_note_about_ctrl_c_is_told_only_where_it_is_true(lab: Any) -> None:
    assert "Ctrl-C" not in lab("run").out


def test_signals_that_were_blocked_are_heard_and_children_are_seen(lab: Any, until: Any) -> None:
    engine = start_study(lab, until, *ODD)
    engine.send(signal.SIGINT)
    lab.open_gate()
    engine.ended()
    assert [summary["status"] for summary in lab.all("summary.json")] == ["ok"]
    lab.configure(launch={**lab.study["launch"], "command": ["false"]})
    engine = lab.start("resume", wrapper=ODD)
    engine.ended(0)
    assert [exit_["code"] for exit_ in lab.all("exit.json")] == [0, 1]


def test_sighup_drains_and_what_is_printed_to_a_file_goes_on(lab: Any, until: Any) -> None:
    engine = start_study(lab, until)
    for _ in range(3):
        engine.send(signal.SIGHUP)
    lab.open_gate()
    assert "; drained" in engine.ended().out
    assert lab.count(status="ok") == 1


def test_a_study_runs_without_stdin_stdout_and_stderr(lab: Any) -> None:
    closed = ("/bin/sh", "-c", """exec "$@" <&- >&- 2>&-""", "sh")
    lab.queue("train.lr@set=0.3")
    lab.start("run", wrapper=closed).ended()
    assert lab.count(status="ok") == 2
    assert lab("logs", "2").out.splitlines() == ["lr is 0.3", "the end"]
    lab("verify")


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [IGNORING, ODD], ids=["ignored", "blocked"])
def test_a_trainer_has_default_signals_whatever_the_engine_inherited(lab: Any, wrapper: tuple[str, ...]) -> None:
    lab.configure(launch={"command": [*SHOW_SIGNALS]}, objective=None)
    lab.start("run", wrapper=wrapper).ended()
    assert has_default_signals(lab("logs", "1").out)
    lab.start("run", "--detach", "--runs", "2", "--cfgs", lab.base("configs/other.json"), wrapper=wrapper).ended()
    lab.until_ended(2)
    assert has_default_signals(lab("logs", "2").out)


def test_a_trainer_under_nohup_saves_and_stops_at_sigint(lab: Any, until: Any) -> None:
    lab.write(
        "train.py",
        "import os, time\nfrom looplab import trainkit\n"
        "with trainkit.stopping(save=lambda: open('saved', 'w').close()) as stop:\n"
        "    trainkit.log({'loss': 1.0}, step=1)\n"
        "    while not stop:\n        time.sleep(0.01)\n",
    )
    lab.configure(launch={"command": ["{python}", "train.py"]})
    engine = lab.start("run", wrapper=IGNORING)
    lab.until_at_work()
    (pid,) = until(lambda: at_work(lab), "process.json")
    os.kill(pid, signal.SIGINT)
    engine.ended(None)
    assert [exit_["code"] for exit_ in lab.all("exit.json")] == [130]
    assert (lab.folder / "saved").exists()


# -- commands that wait


def test_attach_and_logs_in_the_background_end_with_the_study(lab: Any, until: Any) -> None:
    start_study(lab, until)
    attached = lab.start("attach", wrapper=IGNORING)
    followed = lab.start("logs", "-f", "1", wrapper=IGNORING)
    until(lambda: "attached to study" in attached.out, "the first line")
    until(lambda: "lr is" in followed.out, "the first line of the log")
    for running in (attached, followed):
        assert CTRL_C in running.error
        running.send(signal.SIGINT)
    lab.open_gate()
    attached.ended()
    assert "the end" in followed.ended().out


def test_a_submitted_command_in_the_background_outlives_its_caller(lab: Any, until: Any) -> None:
    script = "while [ ! -e gate ]; do sleep 0.05; done; " + " ".join(f"'{word}'" for word in SHOW_SIGNALS)
    call = ("submit", "--", "/bin/sh", "-c", f"echo began; {script}")
    first = lab.start(*call, wrapper=IGNORING)
    until(lambda: "began" in first.out, "the command")
    assert CTRL_C in first.error
    first.send(signal.SIGINT)
    first.send(signal.SIGTERM)
    assert first.ended(None).code == -signal.SIGTERM
    second = lab.start(*call, wrapper=IGNORING)
    until(lambda: "attached to it" in second.error, "the command, found again")
    second.send(signal.SIGINT)
    lab.open_gate()
    assert has_default_signals(second.ended().out)


# -- stages

WAIT = "import os, time\nprint('began', flush=True)\nwhile not os.path.exists('gate'): time.sleep(0.01)\n"
WAIT_AND_SHOW = WAIT + f"import subprocess\nsubprocess.run({[*SHOW_SIGNALS]!r}, check=True)\n"


@pytest.fixture
def stages(lab: Any) -> Any:
    def stage(after: list[str]) -> dict[str, Any]:
        return {"command": ["{python}", "-S", "stage.py"], "after": after, "reads": [], "outputs": []}

    lab.write("stage.py", WAIT_AND_SHOW)
    study = {
        "study": "toy",
        "pipeline": {"root": "outputs/{name}"},
        "stages": {"first": stage([]), "second": stage(["first"])},
        "case": {"command": ["{python}", "-S", "stage.py"], "after": []},
        "slots": {"gpus": "none", "count": 1},
    }
    lab.write("lab.yaml", json.dumps(study))
    lab.write("configs/c.json", json.dumps({"name": "c"}))
    return lab


STAGE = ("stage", "--config", "configs/c.json", "first", "second")


def test_a_stage_in_the_background_ignores_ctrl_c_and_has_default_signals(stages: Any, until: Any) -> None:
    call = stages.start(*STAGE, wrapper=IGNORING)
    until(lambda: "began" in call.out, "the stage")
    assert f"{CTRL_C}: use SIGTERM (`kill {call.pid}`)" in call.out
    call.send(signal.SIGINT)
    call.send(signal.SIGHUP)
    stages.open_gate()
    out = call.ended().out
    assert has_default_signals(out)
    assert "second: complete" in out


def test_a_stage_in_the_background_is_stopped_by_sigterm(stages: Any, until: Any) -> None:
    call = stages.start(*STAGE, wrapper=IGNORING)
    until(lambda: "began" in call.out, "the stage")
    call.send(signal.SIGTERM)
    assert "first: stop" in call.ended(130).err


def test_a_closed_terminal_lets_a_stage_end_and_begins_no_other(stages: Any, until: Any) -> None:
    terminal = stages.terminal(*STAGE)
    until(lambda: "began" in terminal.shown, "the stage")
    terminal.hang_up()
    stages.open_gate()
    terminal.ended()
    assert terminal.process.returncode == 130
    out = stages(*STAGE).out
    assert "first: skipped" in out
    assert "second: starts (first time)" in out


def test_a_closed_terminal_at_the_last_stage_completes_the_call(stages: Any, until: Any) -> None:
    call = stages.start(*STAGE[:-1])
    until(lambda: "began" in call.out, "the stage")
    call.send(signal.SIGHUP)
    stages.open_gate()
    assert "first: complete" in call.ended().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_case_reaches_what_it_runs(stages: Any, until: Any, number: int) -> None:
    call = stages.start("case", "--config", "configs/c.json", "--tag", "t")
    until(lambda: "began" in call.out, "the case")
    os.kill(call.pid, number)
    assert f"signal {number}" in call.ended(130).err


# -- versions


def test_an_iteration_ends_well_at_sigterm_and_its_agent_with_it(lab: Any, until: Any) -> None:
    project = load_project()
    project.make(lab.folder, lab.aside)
    (lab.aside / "hold-v2").touch()
    agent = lab.aside / "agent.py"
    shown = (
        f"open({str(lab.aside / 'signals')!r}, 'w').write(subprocess.check_output({[*SHOW_SIGNALS]!r}, text=True))\n"
    )
    agent.write_text(agent.read_text().replace("skill =", f"{shown}skill =", 1))
    running = lab.start("iterate", "2", wrapper=IGNORING)
    until((lab.aside / "at-v2").exists, "the agent")
    running.send(signal.SIGINT)
    running.send(signal.SIGTERM)
    done = running.ended(130)
    assert CTRL_C in done.out
    assert "the same command continues from here" in done.err
    assert has_default_signals((lab.aside / "signals").read_text())
    (lab.aside / "hold-v2").unlink()
    lab("iterate", "2")
    assert lab("iterate", "status", "--json").json()["versions"][-1]["state"] == "merged"


def load_project() -> Any:
    import importlib.util

    path = Path(__file__).parents[1] / "iterate" / "project.py"
    spec = importlib.util.spec_from_file_location("signals_project", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["signals_project"] = module
    spec.loader.exec_module(module)
    return module
