"""Fingerprints: what the result of a stage depends on, in parts, so that a change can be named."""

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
"""Files below this size are read each time: that costs no more than looking them up."""
SETTLED_S = 2.0
"""A file that was written more recently may be written again within one tick of its clock: its hash is not kept."""
SHOWN = 4
"""How many changes are named."""
Parts = dict[str, dict[str, Any]]
"""`do`, `config`, `code`, `files`, `upstream`; each maps a name to a value or a hash."""


class Hashes:
    """SHA-256 of files; those of large files are kept by size, time and inode in `.looplab/hashes.json`."""

    def __init__(self, lab: Path) -> None:
        self._path = lab / ".looplab" / "hashes.json"
        self._known: dict[str, list[Any]] = {}
        self._new = False
        with contextlib.suppress(FileNotFoundError, ValueError):
            known = load_json(read_bounded(self._path, LARGEST_RECORD))
            self._known = known if isinstance(known, dict) else {}

    def file(self, path: Path) -> str | None:
        """The hash of a file; None where it is missing."""
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                mark = [status.st_size, status.st_mtime_ns, status.st_ino]
                known = self._known.get(str(path))
                if status.st_size >= LARGE and known is not None and known[:3] == mark:
                    return str(known[3])
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, UntrustedError):
            return None
        if status.st_size >= LARGE and time.time() - status.st_mtime > SETTLED_S:
            self._known[str(path)] = [*mark, digest]
            self._new = True
        return digest

    def tree(self, path: Path) -> str | None:
        """The hash of a file, or of a folder with all that is in it; None where it is missing."""
        if not path.is_dir():
            return self.file(path)
        listing = {str(file.relative_to(path)): self.file(file) for file in files_below(path)}
        return hashlib.sha256(canonical_json(listing)).hexdigest()

    def save(self) -> None:
        if self._new:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._known = {path: known for path, known in self._known.items() if os.path.exists(path)}
            write_atomic(self._path, json.dumps(self._known).encode(), sync=False)
            self._new = False


def files_below(folder: Path) -> list[Path]:
    """All files of a folder, in the order of their names; caches and half-written files are none."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(place, name) for name in names if not name.startswith(".tmp-")]
    return sorted(found)


def config_part(config: Mapping[str, Any], reads: Iterable[str] | None, without: str | None = None) -> dict[str, Any]:
    """The leaves of the config that count; `without` is a key that never does."""
    left_out = set(find(config, without)) if without else set()
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
    part: dict[str, Any] = {}
    for pattern in patterns:
        found = [
            path
            for path in lab.glob(os.path.relpath(lab / pattern, lab))
            if path.is_file() and "__pycache__" not in path.parts
        ]
        if not found:
            raise LabError(f"{where}: {pattern} matches no file in {lab}", hint="it names what the stage is made of")
        part |= {str(path.relative_to(lab)): hashes.file(path) for path in found}
    return part


def hash_parts(parts: Parts) -> str:
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def outputs_of(run_dir: Path, outputs: Sequence[str], hashes: Hashes) -> dict[str, list[Any]]:
    """The files that a stage has left, with their sizes and hashes."""
    found: dict[str, list[Any]] = {}
    for name in outputs:
        path = run_dir / name
        for file in files_below(path) if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):
                found[str(file.relative_to(run_dir))] = [file.stat().st_size, hashes.file(file)]
    return found


def changed_outputs(run_dir: Path, recorded: Mapping[str, Sequence[Any]], hashes: Hashes) -> list[str]:
    """Which of the files that a stage has left are no longer what they were. More files may have come."""
    changes = []
    for name, (size, digest) in recorded.items():
        path = run_dir / name
        if not path.is_file():
            changes.append(f"{name} is gone")
        elif path.stat().st_size != size or hashes.file(path) != digest:
            changes.append(f"{name} was changed")
    return changes


def changes(old: Parts, new: Parts) -> list[str]:
    """What differs between two fingerprints, in words."""
    told = []
    for part in dict.fromkeys([*new, *old]):
        before, after = old.get(part, {}), new.get(part, {})
        for name in dict.fromkeys([*before, *after]):
            a, b = before.get(name), after.get(name)
            if name in before and name in after and same(a, b):
                continue
            if part == "config":
                here = (json.dumps(x, ensure_ascii=False) if held else "-"
                        for x, held in ((a, name in before), (b, name in after)))  # fmt: skip
                told.append(f"{name} {' → '.join(here)}")
            elif part == "upstream":
                told.append(f"{name} was made anew")
            elif part == "do":
                told.append("its command is another one")
            else:
                word = "is new" if name not in before or a is None else "is gone" if b is None else "changed"
                told.append(f"{name} {word}")
    return told


def in_short(told: Sequence[str]) -> str:
    more = f" and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return ", ".join(told[:SHOWN]) + more
