"""Names of runs, and paths that stay inside the lab."""

from __future__ import annotations

import os
from pathlib import Path

from looplab.errors import LabError

ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # nothing that reads like something else


def random_suffix(length: int) -> str:
    return "".join(ALPHABET[byte % len(ALPHABET)] for byte in os.urandom(length))


def run_id(n: int) -> str:
    """`0007-k3f9`: sorts by age, is unique beyond the study, and can be called by its number."""
    return f"{n:04d}-{random_suffix(4)}"


def inside(root: Path, path: str | Path, what: str) -> Path:
    """The path, made absolute from `root`; an error if it leads out of the lab."""
    full = (root / path).resolve()
    if not full.is_relative_to(root.resolve()):
        raise LabError(f"{what}: {path} leads out of the lab {root}", hint="keep what the lab uses inside its folder")
    return full
