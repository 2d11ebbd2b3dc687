"""Ask a script which options it takes: `--help`, in a separate process, under a time limit.

The process runs the script up to the point where it parses its command line. `hook.py` writes down the parser, so that
types, defaults and choices need not be guessed from the text of the help. The process cannot change the project: what
it writes goes to a folder that is removed afterwards, and where the kernel has Landlock, everything else is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.agents.confine import COMPLETE, confined, landlock_version
from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.untrusted import UntrustedError, clean_line, load_json, read_bounded

if TYPE_CHECKING:
    from looplab.onboard.base import Script

HELP_S = 90.0
"""Seconds that `--help` may take; importing a framework can take half of them."""
DOOR_S = 30.0
"""The same for a script that was not understood, and is started to learn why."""
MAX_RECORD = 4 << 20
MAX_SHOWN = 300
MAX_PRINTED = 400_000
YAML_KEY = re.compile(r"[A-Za-z_][\w.-]*:(\s|$)")
HOOKED = ("absl", "click", "fire", "typer", "tyro")
"""Frameworks other than argparse that have their own command line."""
BUILT_ON_ARGPARSE = (
    *("argparse", "configargparse", "draccus", "hydra", "jsonargparse", "lightning", "pyrallis", "pytorch_lightning"),
    *("simple_parsing", "tap"),
)
PARSES = ("parse_args", "parse_known_args", "parse_intermixed_args", "HfArgumentParser", "parse_args_into_dataclasses")
"""Functions that read a command line."""
NO_COMMAND_LINE = "it has no command line that looplab knows"


@dataclass(frozen=True, slots=True)
class Introspection:
    """What a script reveals about its command line."""

    parsers: tuple[dict[str, Any], ...] = ()
    """The parsers that it made, in the order in which they parsed."""
    problem: str | None = None
    """Why nothing was learnt, as a sentence; None: it ended well."""
    printed: str = ""
    """The end of its output."""

    def of(self, framework: str) -> dict[str, Any] | None:
        """Return the last parser of a framework."""
        return next((parser for parser in reversed(self.parsers) if parser.get("framework") == framework), None)


def introspect(script: Script, timeout: float = HELP_S, *, always: bool = False) -> Introspection:
    """Start the script with `--help` and return what it reveals.

    Nothing is trained: a script that is asked for help ends when it parses its arguments. It gets no input and no GPU.

    Args:
        always: Start it even if nothing in it reads a command line, to learn why it cannot be understood.
    """
    if script.python is None:
        return Introspection(problem="it is not a Python script")
    if not always and not _reads_a_command_line(script):
        return Introspection(problem=NO_COMMAND_LINE)
    with tempfile.TemporaryDirectory(prefix="looplab-init-") as scratch:
        out = Path(scratch, "parsers.json")
        frameworks = [name for name in HOOKED if name in script.imports]
        if _calls(script, "parse_known_args") and _calls(script, "parse_args"):
            frameworks.append("parses_again")
        try:
            printed, code = _run(script, [*script.arguments, "--help"], Path(scratch), frameworks, timeout)
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
        return Introspection((), NO_COMMAND_LINE, printed)
    return Introspection((), f"`--help` failed: {_last_line(printed, code)}", printed)


def _reads_a_command_line(script: Script) -> bool:
    return _calls(script, *PARSES) or bool(script.imports & {*HOOKED, *BUILT_ON_ARGPARSE})


def _calls(script: Script, *names: str) -> bool:
    from looplab.onboard.source import calls

    return any(True for tree in script.modules for _ in calls(tree, *names))


def ask(script: Script, arguments: Sequence[str], timeout: float = HELP_S) -> tuple[dict[str, Any] | None, str | None]:
    """Start the script with arguments that make it print its config as YAML, and return that.

    Returns:
        The config, or None and why there is none. Lines before the YAML, such as a logo or a warning, are skipped.
    """
    if script.python is None:
        return None, "it is not a Python script"
    try:
        with tempfile.TemporaryDirectory(prefix="looplab-init-") as scratch:
            printed, code = _run(script, arguments, Path(scratch), (), timeout, stderr=False)
    except OSError as error:
        return None, f"{script.python} cannot be started: {error.strerror}"
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


def run_helper(script: Script, helper: Path, arguments: Sequence[str]) -> Any:
    """Start a program of looplab with the script's Python, and return the JSON that it prints; None: it failed."""
    python = shutil.which(script.python or "python") or str(script.python)
    try:
        done = subprocess.run(
            [python, str(helper), *arguments], cwd=script.folder, capture_output=True, timeout=HELP_S, check=False
        )
        return load_json(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, UntrustedError):
        return None


def _run(
    script: Script,
    arguments: Sequence[str],
    scratch: Path,
    frameworks: Sequence[str],
    timeout: float,
    *,
    stderr: bool = True,
) -> tuple[str, int | None]:
    """Run a script under `hook.py`, without input and GPU.

    Args:
        scratch: Where the hook writes parsers.json, and the script its files.
        frameworks: Packages whose command lines are recorded.
        stderr: Whether what it prints there is part of the result.

    Returns:
        The end of its output, and its exit code (None: too slow).
    """
    target = [str(script.program or script.path)] if script.program or not script.module else ["-m", script.module]
    hook, out = Path(__file__).with_name("hook.py"), scratch / "parsers.json"
    python = shutil.which(script.python or "python") or str(script.python)
    command = [python, str(hook), str(out), str(scratch), ",".join(frameworks), *target, *arguments]
    if landlock_version() >= COMPLETE:
        command = confined(command, [scratch, *_caches(script.folder)])
    env = {
        **os.environ,
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1",
        "MPLCONFIGDIR": str(scratch),
        "TMPDIR": str(scratch),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    process = subprocess.Popen(
        command,
        cwd=script.folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if stderr else subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):  # itself, and what it has started
            os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        printed, _ = process.communicate()
    return printed[-MAX_PRINTED:].decode("utf-8", "replace"), code


def _caches(folder: Path) -> list[Path]:
    """Return the folders in which packages keep compiled code and fonts, unless the project is in one of them."""
    home = Path.home()
    places = [home / name for name in (".cache", ".config", ".triton", ".nv") if (home / name).is_dir()]
    return [place for place in places if not folder.resolve().is_relative_to(place.resolve())]


def _last_line(printed: str, code: int | None) -> str:
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), f"exit code {code}")
    return clean_line(last, MAX_SHOWN)
