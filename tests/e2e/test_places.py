"""Labs that are renamed, copied, or continued from a container; daemons that outlive engine and supervisor."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from looplab.launch.local import is_alive

NEW_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(os.path.join(lab, "new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(lab, "new"), os.path.join(lab, "daemon"))
    os.closerange(0, 1000)
    os.execve("/bin/sleep", ["sleep", "600"], {})
"""


def living(lab: Any) -> list[int]:
    """The pids of the trainings that are alive."""
    return [p["pid"] for p in lab.all("process.json") if is_alive(p["pid"], p["start"], p["boot"])]


def kill_supervisors(lab: Any) -> None:
    for process in lab.all("process.json"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["supervisor"], signal.SIGKILL)


def killed(lab: Any, until: Any, *args: str | Path) -> int:
    """Start an engine, wait until its first training runs, and kill the engine; gives the training's pid."""
    engine = lab.start("run", *args)
    lab.until_at_work()
    until(lambda: lab.all("process.json"), "process.json")
    engine.process.kill()
    engine.process.wait()
    (pid,) = living(lab)
    return pid


@pytest.mark.slow
def test_a_lab_that_is_renamed_while_it_runs_stops_with_one_line_and_is_resumed_elsewhere(
    lab: Any, until: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    trainer = (lab.folder / "train.py").read_text()  # it opens nothing by its path once it runs
    lab.write("train.py", trainer.replace('os.path.join(run_dir, "seen.json")', "os.devnull"))
    config = lab.base("configs/other.json", wait=str(gate))
    engine = lab.start("run", "--cfgs", config)
    lab.until_at_work()
    until(lambda: lab.all("process.json"), "process.json")
    old = lab.folder
    lab.folder = old.rename(old.with_name("renamed"))
    done = engine.ended(code=1)
    assert "the lab is no longer at" in done.err
    assert len(done.err.strip().splitlines()) <= 2  # what is wrong, and a hint
    assert not old.exists()
    gate.touch()
    assert "was moved here from" in lab("resume").out
    assert lab.count(status="ok") == 1
    assert not old.exists()
    lab("verify")


def test_a_training_outside_is_not_lost_when_a_container_resumes(lab: Any, until: Any, tmp_path: Path) -> None:
    if subprocess.run([*NEW_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no permission to make a PID namespace")
    gate = tmp_path / "gate"
    lab.base(wait=str(gate))
    killed(lab, until)
    inside = lab.start("resume", "--json", wrapper=NEW_NAMESPACE)
    until(lambda: "cannot be seen from here" in inside.out, "word of the training outside")
    assert lab.count(state="running") == 1
    gate.touch()
    inside.ended()
    assert lab.count(status="ok") == 1
    assert lab.count() == 1


@pytest.mark.slow
def test_a_copy_of_a_lab_leaves_the_trainings_of_the_original_alone(lab: Any, until: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    lab.base(wait=str(gate))
    pid = killed(lab, until)
    copy = Path(shutil.copytree(lab.folder, tmp_path / "copy"))
    assert "is a copy of" in lab("status", "--lab", copy).out
    lab("stop", "--lab", copy)
    gate.touch()  # for what the copy starts itself
    assert "is a copy of" in lab("resume", "--lab", copy, code=None).out
    lab("resume")
    assert lab.all("exit.json")[0]["code"] == 0
    assert lab.all("exit.json")[0]["signal"] is None
    assert lab.count(status="ok") == 1
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stop", "resume"])
def test_a_daemon_without_an_environment_does_not_outlive_engine_and_supervisor(
    lab: Any, until: Any, tmp_path: Path, command: str
) -> None:
    gate = tmp_path / "gate"
    trainer = (lab.folder / "train.py").read_text()
    lab.write("train.py", trainer.replace('if config["meet"]', DAEMON + 'if config["meet"]', 1))
    lab.base(wait=str(gate))
    lab.configure(launch={**lab.study["launch"], "cleanup_timeout": 0.1})
    killed(lab, until)
    daemon = int(until(lambda: (lab.folder / "daemon").exists() and (lab.folder / "daemon").read_text(), "a daemon"))
    kill_supervisors(lab)
    if command == "resume":
        gate.touch()
    lab(command, code=None)
    until(lambda: b"sleep" not in cmdline(daemon), "the daemon's end")


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
