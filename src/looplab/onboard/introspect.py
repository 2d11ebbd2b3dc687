"""Ask a script what it takes: `--help`, in a process of its own, under a time limit.

The process runs the script up to the point where it parses its command line. `hook.py` writes down the parser, so that
types, defaults and choices need not be guessed from the text of the help.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.untrusted import clean_line, load_json, read_bounded

if TYPE_CHECKING:
    from looplab.onboard.base import Script

HELP_S = 90.0
"""Seconds that `--help` may take; importing a framework can take half of them."""
MAX_RECORD = 4 << 20
MAX_SHOWN = 300
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

    Nothing is trained: a script that is asked for help ends when it parses its arguments. It gets no input, no GPU, and
    nowhere to write but a temporary folder as its working folder's outputs.
    """
    if script.python is None:
        return Introspection(problem="it is not a Python script")
    hook = Path(__file__).with_name("hook.py")
    with tempfile.TemporaryDirectory(prefix="looplab-init-") as scratch:
        out = Path(scratch, "parsers.json")
        target = ["-m", script.module] if script.module else [str(script.path)]
        frameworks = ",".join(name for name in HOOKED if name in script.imports)
        env = {**os.environ, "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
               "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        command = [script.python, str(hook), str(out), frameworks, *target]
        try:
            done = subprocess.run(
                command, cwd=script.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, timeout=timeout, start_new_session=True,
            )  # fmt: skip
            printed, code = done.stdout[-20_000:].decode("utf-8", "replace"), done.returncode
        except subprocess.TimeoutExpired as error:
            printed, code = (error.stdout or b"")[-20_000:].decode("utf-8", "replace"), None
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
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), f"exit code {code}")
    return Introspection((), f"`--help` failed: {clean_line(last, MAX_SHOWN)}", printed)
