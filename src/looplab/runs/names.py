"""Names of runs, and paths that stay inside the lab."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from looplab.config.lab import STUDY_NAME
from looplab.errors import LabError
from looplab.untrusted import real_path

ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without characters that are easily confused
_LETTERS = (ALPHABET * 8).encode()
"""The letter of each of the 256 byte values."""


def random_suffix(length: int) -> str:
    return os.urandom(length).translate(_LETTERS).decode()


def run_id(n: int) -> str:
    """Return a run name such as `0007-k3f9`: sorts by age, unique across studies, can be abbreviated to its number."""
    return f"{n:04d}-{random_suffix(4)}"


def check_name(name: object, what: str) -> str:
    """Return the name if it is a valid folder name: not a path, not hidden, not `..`; else raise LabError."""
    if not isinstance(name, str) or not STUDY_NAME.fullmatch(name):
        raise LabError(f"{str(name)[:80]!r} cannot be {what}: letters, digits, `_`, `-`, `.`; it becomes a folder")
    return name


def inside(root: Path, path: str | Path, what: str) -> Path:
    """Return the path as an absolute path below `root`; raise LabError if it leads out of the lab."""
    try:
        full = real_path(root / path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(full)  # fails for a loop of links, which not every Python reports when it resolves a path
    except (ValueError, OSError) as error:  # a NUL, too long, a loop of links
        raise LabError(f"{what}: {str(path)[:80]!r} is not a path: {error}") from None
    if not full.is_relative_to(root.resolve()):
        raise LabError(f"{what}: {path} leads out of the lab {root}", hint="keep what the lab uses inside its folder")
    return full
