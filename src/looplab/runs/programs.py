"""Short-lived helper programs with a time limit, such as an alert command or ssh-keygen."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class ProgramError(Exception):
    """A program could not be started, failed, or took too long; the message continues a sentence that names it."""


def run_program(
    argv: Sequence[str],
    stdin: bytes = b"",
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
) -> bytes:
    """Run a program and return its output if `capture` is set, else empty bytes.

    It runs in its own session: it has no terminal to prompt on, Ctrl-C reaches only the engine, and after `timeout`
    seconds it is killed together with its children.

    Raises:
        ProgramError: It did not start, did not end in time, or its exit code is not 0.
    """
    try:
        process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE if capture else subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise ProgramError(f"cannot be started: {error}") from None
    with process:
        try:
            printed, errors = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise ProgramError(f"was killed after {timeout:g} s") from None
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ProgramError(f"failed with exit code {process.returncode}" + "".join(f": {line[:200]}" for line in last))
    return printed or b""
