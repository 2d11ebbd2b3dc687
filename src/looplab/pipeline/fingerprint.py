"""Fingerprints: everything that the result of a stage depends on, in named parts, so that changes can be listed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.files import canonical_json, write_atomic
from looplab.config.paths import find, get, leaves, same, show
from looplab.errors import LabError
from looplab.runs.folder import LARGEST_RECORD
from looplab.untrusted import UntrustedError, load_json, open_regular, read_bounded

LARGE = 1 << 16
"""Minimum file size for caching hashes; hashing a smaller file costs no more than a lookup."""
SETTLED_S = 2.0
"""Age in seconds from which hashes are cached; a younger file may be rewritten without a change of its mtime."""
SHOWN = 4
"""Number of changes that a message lists."""
Parts = dict[str, dict[str, Any]]
"""`do`, `config`, `code`, `files`, `upstream`; each maps a name to a value or a hash."""


class Hashes:
    """SHA-256 of files; large files are cached by size, mtime and inode in `.looplab/hashes.json`."""

    def __init__(self, lab: Path) -> None:
        self._path = lab / ".looplab" / "hashes.json"
        self._known: dict[str, list[Any]] = {}
        self._dirty = False
        with contextlib.suppress(FileNotFoundError, ValueError):
            known = load_json(read_bounded(self._path, LARGEST_RECORD))
            self._known = known if isinstance(known, dict) else {}

    def file(self, path: Path) -> str | None:
        """Return the hash of a file; None if it is missing."""
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
                known = self._known.get(str(path))
                if status.st_size >= LARGE and known is not None and known[:3] == stamp:
                    return str(known[3])
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, UntrustedError):
            return None
        if status.st_size >= LARGE and time.time() - status.st_mtime > SETTLED_S:
            self._known[str(path)] = [*stamp, digest]
            self._dirty = True
        return digest

    def tree(self, path: Path) -> str | None:
        """Return the hash of a file, or of a folder and all files below it; None if it is missing."""
        if not path.is_dir():
            return self.file(path)
        listing = {str(file.relative_to(path)): self.file(file) for file in files_below(path)}
        return hashlib.sha256(canonical_json(listing)).hexdigest()

    def save(self) -> None:
        """Write the cache if it changed; drop files that no longer exist."""
        if self._dirty:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._known = {path: known for path, known in self._known.items() if os.path.exists(path)}
            write_atomic(self._path, json.dumps(self._known).encode(), sync=False)
            self._dirty = False


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted; without `__pycache__` and unfinished atomic writes."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(parent, name) for name in names if not name.startswith(".tmp-")]
    return sorted(found)


def config_part(config: Mapping[str, Any], reads: Iterable[str] | None, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the leaves of the config below the prefixes in `reads` (None: all), except those below `without`."""
    ignored = {place for prefix in without if prefix for place in find(config, prefix)}
    left_out = {at for at, _ in leaves(config) if any(at[: len(place)] == place for place in ignored)}
    if reads is None:
        return {show(at): value for at, value in leaves(config) if at not in left_out}
    part: dict[str, Any] = {}
    for prefix in reads:
        for place in find(config, prefix):
            there = get(config, place)
            below = [((*place, *at), value) for at, value in leaves(there)] or [(place, there)]
            part |= {show(at): value for at, value in below if at not in left_out}
    return part


def code_part(lab: Path, patterns: Iterable[str], hashes: Hashes, where: str) -> dict[str, Any]:
    """Return the hash of every file of the lab that matches a pattern.

    Raises:
        LabError: A pattern matches no file.
    """
    part: dict[str, Any] = {}
    for pattern in patterns:
        found = [
            path
            for path in lab.glob(os.path.relpath(lab / pattern, lab))
            if path.is_file() and "__pycache__" not in path.parts
        ]
        if not found:
            raise LabError(f"{where}: {pattern} matches no file in {lab}", hint="list the source files of the stage")
        part |= {str(path.relative_to(lab)): hashes.file(path) for path in found}
    return part


def hash_parts(parts: Parts) -> str:
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def outputs_of(run_dir: Path, outputs: Sequence[str], hashes: Hashes) -> dict[str, list[Any]]:
    """Return size and hash of each file below the outputs of a stage."""
    found: dict[str, list[Any]] = {}
    for name in outputs:
        path = run_dir / name
        for file in files_below(path) if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):
                found[str(file.relative_to(run_dir))] = [file.stat().st_size, hashes.file(file)]
    return found


def changed_outputs(run_dir: Path, recorded: Mapping[str, Sequence[Any]], hashes: Hashes) -> list[str]:
    """Describe the recorded outputs that are missing or modified; additional files are ignored."""
    found = []
    for name, (size, digest) in recorded.items():
        path = run_dir / name
        if not path.is_file():
            found.append(f"{name} is gone")
        elif path.stat().st_size != size or hashes.file(path) != digest:
            found.append(f"{name} was changed")
    return found


def changes(old: Parts, new: Parts) -> list[str]:
    """Describe each difference between two fingerprints."""
    found = []
    for part in dict.fromkeys([*new, *old]):
        before, after = old.get(part, {}), new.get(part, {})
        for name in dict.fromkeys([*before, *after]):
            a, b = before.get(name), after.get(name)
            if name in before and name in after and same(a, b):
                continue
            if part == "config":
                sides = (json.dumps(x, ensure_ascii=False) if held else "-"
                        for x, held in ((a, name in before), (b, name in after)))  # fmt: skip
                found.append(f"{name} {' → '.join(sides)}")
            elif part == "upstream":
                found.append(f"{name} was rebuilt")
            elif part == "do":
                found.append("its command changed")
            else:
                word = "is new" if name not in before or a is None else "is gone" if b is None else "changed"
                found.append(f"{name} {word}")
    return found


def shorten(descriptions: Sequence[str]) -> str:
    """Join the first few descriptions; count the rest."""
    more = f" and {len(descriptions) - SHOWN} more" if len(descriptions) > SHOWN else ""
    return ", ".join(descriptions[:SHOWN]) + more
