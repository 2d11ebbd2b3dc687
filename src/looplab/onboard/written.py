"""What a run wrote outside its folder: files of the lab that changed while it was running."""

from __future__ import annotations

import ast
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from looplab.onboard.base import Script
from looplab.runs.outside import own_output

IGNORED = {"outputs", "__pycache__", "node_modules", "venv", "site-packages"}
UNREAD = {
    *(".pkl", ".pickle", ".joblib", ".npz", ".npy", ".mat", ".h5", ".hdf5", ".parquet", ".feather", ".xlsx"),
    *(".db", ".sqlite", ".sqlite3", ".arrow", ".msgpack"),
}
"""Formats of results that are not read: they need their own packages, or run code when they are opened."""
MAX_ENTRIES = 20_000
MAX_NAMED = 200
_CLOCK_TICK_NS = 50_000_000
Stamps = dict[str, tuple[int, int]]


def files_below(lab: Path) -> Stamps:
    """Return size and modification time of the files of a lab, without its runs, hidden files and caches."""
    found: Stamps = {}
    own = own_output()
    folders = deque([str(lab)])
    left = MAX_ENTRIES
    while folders and left > 0:
        try:
            with os.scandir(folders.popleft()) as listing:
                entries = list(islice(listing, left))
        except OSError:  # removed meanwhile, or not readable
            continue
        left -= len(entries)
        for entry in entries:
            if entry.name.startswith(".") or entry.name in IGNORED:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if (status.st_dev, status.st_ino) in own:
                        continue
                    found[os.path.relpath(entry.path, lab)] = (status.st_size, status.st_mtime_ns)
            except OSError:
                continue
    return found


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file in the lab that changed while a run was running."""

    file: str
    is_new: bool


def written_files(before: Stamps, after: Stamps) -> list[WrittenFile]:
    """Return what changed between two calls of `files_below`."""
    return [WrittenFile(file, file not in before) for file in sorted(after) if before.get(file) != after[file]][
        :MAX_NAMED
    ]


def unread_files(files: Sequence[str]) -> tuple[str, ...]:
    """Return the files that may hold results, in formats that looplab does not read."""
    return tuple(sorted(file for file in files if os.path.splitext(file)[1].lower() in UNREAD))[:MAX_NAMED]


def explain_written(files: Sequence[WrittenFile], *, in_run_dir: bool, beside_script: bool = False) -> str:
    """Return a sentence about files that a run wrote outside its folder, with what to do.

    Args:
        in_run_dir: Whether the run was started in its run folder.
        beside_script: Whether the script may find its output folder by its own path.
    """
    code = [one.file for one in files if one.file.endswith(".py")]
    changed = [one.file for one in files if not one.is_new]
    places = _places([one.file for one in files])
    text = f"it wrote outside its run folder: {', '.join(places[:3])}" + (
        f" and {len(places) - 3} more" if len(places) > 3 else ""
    )
    if code:
        text += f"; {code[0]} is code, so the next run may run a different program"
    elif changed:
        text += f"; {changed[0]} existed before, so runs change each other's results"
    if beside_script:
        return (
            f"{text}. If it writes next to its own source (it uses __file__), pass {{out_dir}} for its output in "
            "launch.command, or run one at a time: slots: {count: 1}"
        )
    if in_run_dir:
        return f"{text}. Give it its own folder: {{out_dir}} in launch.command"
    return f"{text}. Set launch.cwd: run in lab.yaml, or pass {{out_dir}} for its output"


def writes_beside_itself(script: Script) -> bool:
    """Return whether a script has `__file__` in it, by which it may find where to write."""
    return any(
        isinstance(node, ast.Name) and node.id == "__file__" for tree in script.modules for node in ast.walk(tree)
    )


def _places(files: Sequence[str]) -> list[str]:
    """Return files, with several of one folder as that folder."""
    by_folder: dict[str, list[str]] = {}
    for file in files:
        by_folder.setdefault(file.partition("/")[0] if "/" in file else "", []).append(file)
    return [
        place
        for head, names in by_folder.items()
        for place in ([f"{head}/ ({len(names)} files)"] if head and len(names) > 1 else names)
    ]
