"""Seal files: record their hashes and make them read-only."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from looplab.runs.folder import hash_file

IGNORED = "__pycache__"
"""Folders that are not sealed; Python writes them wherever it can."""


def files_of(root: Path, paths: Iterable[str]) -> Iterator[Path]:
    """Yield every file and link below these paths; links are not followed."""
    for name in paths:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            for folder, folders, files in os.walk(path):
                for link in [entry for entry in folders if Path(folder, entry).is_symlink()]:
                    yield Path(folder, link)
                folders[:] = sorted(entry for entry in folders if entry != IGNORED)
                yield from (Path(folder, file) for file in sorted(files))
        elif path.exists() or path.is_symlink():
            yield path


def seal(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the hash of every file below these paths, by its path relative to the root."""
    found = {}
    for path in files_of(root, paths):
        digest = f"link to {os.readlink(path)}" if path.is_symlink() else hash_file(path)
        if digest is not None:
            found[str(path.relative_to(root))] = digest
    return found


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe each file that was changed, removed or added since it was sealed."""
    found = [f"{name} was {'removed' if name not in now else 'changed'}"
             for name, digest in sorted(before.items()) if now.get(name) != digest]  # fmt: skip
    return found + [f"{name} was added" for name in sorted(set(now) - set(before))]


def digest(seals: Mapping[str, str]) -> str:
    """Return one hash over all seals."""
    return hashlib.sha256(json.dumps(sorted(seals.items())).encode()).hexdigest()


def make_read_only(root: Path, paths: Iterable[str]) -> None:
    """Remove write permission from files and folders. This stops mistakes, not malice."""
    for name in paths:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            for folder, _, _ in os.walk(path, topdown=False):
                _remove_write_permission(Path(folder))
        for file in files_of(root, [name]):
            _remove_write_permission(file)


def _remove_write_permission(path: Path) -> None:
    if not path.is_symlink():
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
