"""Ask a script what it takes: `--help`, in a process of its own, under a time limit.

The process runs the script up to the point where it parses its command line. `hook.py` writes down the parser, so that
types, defaults and choices need not be guessed from the text of the help.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.untrusted import clean_line, load_json, read_bounded

if TYPE_CHECKING:
    from looplab.onboard.base import Script

HELP_S = 90.0
"""Seconds that `--help` may take; importing a framework can take half of them."""
MAX_RECORD = 4 << 20
MAX_SHOWN = 300
MAX_PRINTED = 400_000
YAML_KEY = re.compile(r"[A-Za-z_][\w.-]*:(\s|$)")
HOOKED = ("absl", "click", "fire", "typer", "tyro")
"""Frameworks that have a command line of their own, beside argparse."""


@dataclass(frozen=True, slots=True)
class Introspection:
    """What a script told about itself."""

    parsers: tuple[dict[str, Any], ...] = ()
    """The parsers that it made, in the order in which they parsed."""
    problem: str | None = None
    """Why nothing was learnt, as a sentence; None: it ended well."""
    printed: str = ""
    """The end of what it printed."""

    def of(self, framework: str) -> dict[str, Any] | None:
        """Return the last parser of a framework."""
        return next((parser for parser in reversed(self.parsers) if parser.get("framework") == framework), None)


def introspect(script: Script, timeout: float = HELP_S) -> Introspection:
    """Start the script with `--help` and return what it told.

    Nothing is trained: a script that is asked for help ends when it parses its arguments. It gets no input and no GPU.
    """
    if script.python is None:
        return Introspection(problem="it is not a Python script")
    hook = Path(__file__).with_name("hook.py")
    with tempfile.TemporaryDirectory(prefix="looplab-init-") as scratch:
        out = Path(scratch, "parsers.json")
        target = ["-m", script.module] if script.module else [str(script.path)]
        frameworks = ",".join(name for name in HOOKED if name in script.imports)
        command = [script.python, str(hook), str(out), frameworks, *target]
        try:
            printed, code = _run(command, script.folder, timeout)
        except OSError as error:
            return Introspection(problem=f"{script.python} cannot be started: {error.strerror}")
        parsers: tuple[dict[str, Any], ...] = ()
        if out.exists():
            found = load_json(read_bounded(out, MAX_RECORD))
            parsers = tuple(item for item in found if isinstance(item, dict)) if isinstance(found, list) else ()
    if parsers:
        return Introspection(parsers, None, printed)
    if code is None:
        return Introspection((), f"`--help` did not end within {timeout:g} s", printed)
    if code == 0:
        return Introspection((), "it has no command line that looplab knows", printed)
    return Introspection((), f"`--help` failed: {_last_line(printed, code)}", printed)


def ask(script: Script, arguments: Sequence[str], timeout: float = HELP_S) -> tuple[dict[str, Any] | None, str | None]:
    """Start the script with arguments that make it print its config as YAML, and return that.

    Returns:
        The config, or None and why there is none. Lines before the YAML, such as a logo or a warning, are skipped.
    """
    try:
        printed, code = _run([*script.prefix, *arguments], script.folder, timeout, stderr=False)
    except OSError as error:
        return None, f"{script.prefix[0]} cannot be started: {error.strerror}"
    lines = printed.splitlines()
    starts = [i for i, line in enumerate(lines) if YAML_KEY.match(line)]
    with tempfile.TemporaryDirectory(prefix="looplab-init-") as scratch:
        file = Path(scratch, "config.yaml")
        for start in starts[:20]:
            file.write_text("\n".join(lines[start:]))
            with contextlib.suppress(LabError):
                return read_config(file), None
    if code is None:
        return None, f"it did not end within {timeout:g} s"
    return None, _last_line(printed, code) if printed.strip() else f"it printed nothing (exit code {code})"


def _run(command: Sequence[str], folder: Path, timeout: float, *, stderr: bool = True) -> tuple[str, int | None]:
    """Run a program without input and GPU; return the end of what it printed, and its exit code (None: too slow)."""
    env = {
        **os.environ,
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if stderr else subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        code = None
    return out[-MAX_PRINTED:].decode("utf-8", "replace"), code


def _last_line(printed: str, code: int | None) -> str:
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), f"exit code {code}")
    return clean_line(last, MAX_SHOWN)
