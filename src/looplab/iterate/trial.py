"""Run one of the lab's commands on a version, with a timeout, and kill every process that it started."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from looplab.agents import confine
from looplab.agents.process import MARK, AgentProcess, kill_marked
from looplab.agents.run import PASSED_ON
from looplab.errors import LabError
from looplab.launch.command import find_program
from looplab.runs.redact import redact_text

MORE_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MPLBACKEND")
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
TAIL_LINES = 40
"""Lines of output in the outcome."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Outcome of a command."""

    ok: bool
    why: str
    """Why it is not ok; empty if it is."""
    tail: str
    """Its last lines of output."""


def fill_command(command: Sequence[str], variables: Mapping[str, str | Path]) -> list[str]:
    """Replace `{name}` in each word by the variable of that name."""
    filled = list(command)
    for name, value in variables.items():
        filled = [word.replace(f"{{{name}}}", str(value)) for word in filled]
    return filled


def python_of(lab: Path, venv: bool) -> str:
    """Return the Python that runs versions: that of the lab's `venv` if it exists, else looplab's."""
    own = lab / "venv" / "bin" / "python"
    return str(own) if venv and own.exists() else sys.executable


def run(
    argv: Sequence[str], cwd: Path, log: Path, timeout: float, writable: Sequence[Path] | None = None
) -> TrialOutcome:
    """Run a command until it exits or times out. Its processes end with it, and with looplab; it sees no secrets.

    Args:
        argv: The command.
        cwd: Its working directory.
        log: File for its output.
        timeout: Seconds.
        writable: Folders that it may write to, the one for temporary files first; None: it is not confined.
    """
    env = {name: os.environ[name] for name in (*PASSED_ON, *MORE_VARIABLES) if name in os.environ}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", MARK: str(log)}
    try:
        program = find_program(argv[0], cwd, env)
    except LabError as error:
        return TrialOutcome(False, str(error), "")
    command = [program, *argv[1:]]
    if writable is not None:
        env["TMPDIR"] = str(writable[0])
        command = confine.confined(command, writable)
    kill_marked(str(log))  # left over from a looplab that was killed
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    deadline = time.monotonic() + timeout
    timed_out = False

    def watch() -> None:
        nonlocal timed_out
        if not process.ending and time.monotonic() > deadline:
            timed_out = True
            process.end()

    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)  # an agent that can write here may have replaced it by a link
    with (
        log.open("x", encoding="utf-8", errors="replace") as file,
        AgentProcess(command, env, cwd, GRACE_S) as process,
    ):
        for _, line in process.lines("", watch):
            tail.append(redact_text(line))
            file.write(tail[-1] + "\n")
    why = ""
    if timed_out:
        why = f"it took longer than {timeout:g} s"
    elif process.error:
        why = f"it could not be started: {process.error}"
    elif process.exit_code != 0:
        why = f"exit code {process.exit_code}" if process.exit_code is not None else "it was killed by a signal"
    return TrialOutcome(not why, why, "\n".join(tail))
