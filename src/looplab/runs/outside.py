"""Files that a run wrote to the lab, outside its own folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path

MAX_DEPTH = 4
"""Levels of folders that are searched."""
MAX_ENTRIES = 5_000
"""Entries of folders that are looked at."""
PASSED_OVER = frozenset({"__pycache__", "outputs", "venv", "node_modules", "site-packages", "proposals"})
"""Folders that looplab, Python or people write to."""
OF_PEOPLE = (".py", ".pyc", ".ipynb", ".md", ".tmp", ".swp", "~")
"""Endings of files that people and their editors write."""


def own_output() -> set[tuple[int, int]]:
    """Return device and inode of the files that looplab prints to: `looplab run > night.log` writes to the lab, too."""
    found = set()
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            opened = os.fstat(stream)
            found.add((opened.st_dev, opened.st_ino))
    return found


def written_since(folder: Path, since: float, known: Collection[str] = ()) -> list[str]:
    """Return files of a lab that were written since a time: the first one of each entry of the lab's folder.

    Args:
        folder: The lab; its outputs, hidden files, code and notes are left out.
        since: Seconds since the epoch.
        known: Files that looplab or a person writes, relative to the lab.

    Returns:
        Paths relative to the lab, in alphabetical order. A large lab is not searched completely.
    """
    left = MAX_ENTRIES
    found: list[str] = []
    own = own_output()

    def first_in(place: str, name: str, depth: int) -> str | None:
        nonlocal left
        if depth > MAX_DEPTH:
            return None
        try:
            # A folder without new entries is searched only for folders; the top level always for files, too.
            has_new = depth == 1 or os.stat(place).st_mtime >= since
            with os.scandir(place) as listed:
                entries = sorted(islice(listed, max(0, left)), key=lambda entry: entry.name)
        except OSError:
            return None
        for entry in entries:
            left -= 1
            path = f"{name}{entry.name}"
            if entry.name.startswith(".") or entry.name in PASSED_OVER or path in known:
                continue
            new = None
            try:
                if entry.is_dir(follow_symlinks=False):
                    new = first_in(entry.path, f"{path}/", depth + 1)
                elif has_new and not entry.name.endswith(OF_PEOPLE):
                    status = entry.stat(follow_symlinks=False)
                    is_own = (status.st_dev, status.st_ino) in own
                    new = path if status.st_mtime >= since and not is_own else None
            except OSError:
                continue
            if new is not None and depth > 1:
                return new
            if new is not None:
                found.append(new)
        return None

    first_in(str(folder), "", 1)
    return found
