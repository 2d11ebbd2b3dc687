"""The code of a lab: a hash of every source file, and the differences between two runs.

Git records more (see `capsule`), but not every lab is in git, and git does not know the content of untracked files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looplab.runs.folder import SHARED, hash_file, keep_shared
from looplab.untrusted import UntrustedError, load_json, read_bounded

SUFFIXES = frozenset(
    {
        *(".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".java", ".jl", ".lua", ".m"),
        *(".r", ".R", ".sh", ".bash", ".js", ".ts", ".scala", ".kt", ".f90"),
    }
)
SKIPPED = frozenset(
    {
        *("outputs", "agent_runs", "proposals", "wandb", "data", "datasets", "checkpoints", "venv", "node_modules"),
        *("__pycache__", "site-packages"),
    }
)
MAX_FILES = 1_000
MAX_ENTRIES = 10_000
"""Maximum number of folder entries to visit."""
MAX_DEPTH = 6
MAX_BYTES = 4 << 20
"""Maximum size of a source file; larger files are not hand-written."""
MAX_LISTING = 1 << 20
SHOWN = 5
"""Maximum number of files to name when code differs."""


class CodeFiles:
    """Hashes of a lab's source files; unchanged files are not read again."""

    def __init__(self, lab: Path) -> None:
        self._lab = lab
        self._known: dict[str, tuple[tuple[int, int, int], str]] = {}

    def now(self) -> dict[str, str]:
        """Return the first half of the SHA-256 of each source file, by its path in the lab."""
        found: dict[str, str] = {}
        for name, status in _source_files(self._lab):
            stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
            known = self._known.get(name)
            if known is None or known[0] != stamp:
                try:
                    digest = hash_file(self._lab / name)
                except OSError:
                    continue
                known = self._known[name] = (stamp, (digest or "")[:32])
            found[name] = known[1]
        return found

    def keep(self, study: Path) -> str | None:
        """Store the listing once next to the study's runs; return its name, or None if there is no source file."""
        listing = self.now()
        if not listing:
            return None
        return keep_shared(study, json.dumps(listing, indent=1, sort_keys=True).encode(), "files", ".json")


def _source_files(lab: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield source files in a fixed order, at most `MAX_FILES`."""
    files = entries = 0
    waiting = [("", 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            listed = sorted(os.scandir(lab / folder), key=lambda entry: entry.name)
        except OSError:
            continue
        subfolders = []
        for entry in listed:
            entries += 1
            if entries > MAX_ENTRIES or files >= MAX_FILES:
                return
            name = f"{folder}{entry.name}"
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name[0] != "." and entry.name not in SKIPPED and depth < MAX_DEPTH:
                        subfolders.append((f"{name}/", depth + 1))
                    continue
                suffix = os.path.splitext(entry.name)[1]
                if entry.name[0] == "." or (suffix and suffix not in SUFFIXES) or not entry.is_file():
                    continue
                status = entry.stat()
            except OSError:
                continue
            is_program = suffix or status.st_mode & 0o111
            if is_program and status.st_size <= MAX_BYTES:
                files += 1
                yield name, status
        waiting += subfolders[::-1]


def code_differences(study: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between the code of two capsules: names of files or commits.

    Empty if the code is the same or unknown.
    """
    before, after = (_read_listing(study, code.get("files")) for code in (old, new))
    if before is not None and after is not None:
        return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if old.get("commit") and new.get("commit"):
        if old["commit"] != new["commit"]:
            return [f"commit {str(old['commit'])[:12]} → {str(new['commit'])[:12]}"]
        if old.get("patch") != new.get("patch"):
            return ["uncommitted changes"]
    return []


def _read_listing(study: Path, name: object) -> dict[str, str] | None:
    if not isinstance(name, str) or not name.startswith(f"{SHARED}/files-") or "/" in name[len(SHARED) + 1 :]:
        return None
    try:
        listing = load_json(read_bounded(study / name, MAX_LISTING, follow=False))
    except (OSError, UntrustedError):
        return None
    return listing if isinstance(listing, dict) else None


def name_files(names: list[str], shown: int = SHOWN) -> str:
    """Return the first few names and the number of the others."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
