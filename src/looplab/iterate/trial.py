"""Running one of the lab's commands on a version: with a time limit, and so that nothing of it stays behind."""

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

ALSO_PASSED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MPLBACKEND")
GRACE_S = 5.0
KEPT_LINES = 40
"""How many of its last lines are told."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a command ended."""

    ok: bool
    why: str
    """Why it is not ok; empty if it is."""
    tail: str
    """The last lines that it printed."""


def fill(command: Sequence[str], places: Mapping[str, str | Path]) -> list[str]:
    """The command with its places in braces filled in."""
    filled = list(command)
    for name, value in places.items():
        filled = [word.replace(f"{{{name}}}", str(value)) for word in filled]
    return filled


def python_of(lab: Path, venv: bool) -> str:
    """The interpreter of versions: the lab's own `venv` where there is one."""
    own = lab / "venv" / "bin" / "python"
    return str(own) if venv and own.exists() else sys.executable


def run(
    argv: Sequence[str], cwd: Path, log: Path, timeout: float, writable: Sequence[Path] | None = None
) -> TrialOutcome:
    """Run it to its end or its time limit; all that it started ends with it, and with looplab. No secrets reach it.

    Args:
        writable: The folders that it may write to, the one for temporary files first; None: it is not confined.
    """
    env = {name: os.environ[name] for name in (*PASSED_ON, *ALSO_PASSED_ON) if name in os.environ}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", MARK: str(log)}
    try:
        program = find_program(argv[0], cwd, env)
    except LabError as error:
        return TrialOutcome(False, str(error), "")
    command = [program, *argv[1:]]
    if writable is not None:
        env["TMPDIR"] = str(writable[0])
        command = confine.confined(command, writable)
    kill_marked(str(log))  # of a looplab that was killed a moment ago
    tail: deque[str] = deque(maxlen=KEPT_LINES)
    deadline = time.monotonic() + timeout
    late = False

    def watch() -> None:
        nonlocal late
        if not process.ending and time.monotonic() > deadline:
            late = True
            process.end()

    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)  # an agent that can write here may have put a link to a file elsewhere
    with (
        log.open("x", encoding="utf-8", errors="replace") as file,
        AgentProcess(command, env, cwd, GRACE_S) as process,
    ):
        for _, line in process.lines("", watch):
            tail.append(redact_text(line))
            file.write(tail[-1] + "\n")
    why = ""
    if late:
        why = f"it took longer than {timeout:g} s"
    elif process.error:
        why = f"it could not be started: {process.error}"
    elif process.exit_code != 0:
        why = f"exit code {process.exit_code}" if process.exit_code is not None else "it was killed by a signal"
    return TrialOutcome(not why, why, "\n".join(tail))
