"""Git by its command line, with nothing that a repository's configuration could start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from looplab.errors import LabError

GIT_S = 300.0
NEUTRAL = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "core.fsmonitor=false")
NOBODY = ("-c", "user.name=looplab", "-c", "user.email=looplab@localhost")


def git(
    where: Path,
    *args: str,
    env: dict[str, str] | None = None,
    ok: bool = False,
    timeout: float = GIT_S,
    alone: bool = False,
) -> str:
    """Return what git prints; with `ok`, an empty text where it fails.

    Hooks and file system monitors do not run: agents can write to the repository. Variables such as GIT_DIR are
    ignored. System and user configuration stay in effect, since `safe.directory` is set there. `alone` runs git in a
    session of its own, out of reach of a Ctrl-C for the engine.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    clean |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **(env or {})}
    try:
        done = subprocess.run(
            ["git", *NEUTRAL, *args], cwd=where, env=clean, capture_output=True, timeout=timeout,
            stdin=subprocess.DEVNULL, start_new_session=alone,
        )  # fmt: skip
    except FileNotFoundError:
        raise LabError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"git {args[0]} took longer than {timeout:g} s") from None
    if done.returncode != 0:
        if ok:
            return ""
        said = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
        raise LabError(f"git {' '.join(args[:2])} did not work: {said}", file=where)
    return done.stdout.decode(errors="surrogateescape").rstrip("\n")
