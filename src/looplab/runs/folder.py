"""The folder of a run: what stands in it, and how it comes to be whole.

`run.json` is written last: a folder that has it is whole, and one that has not is not yet a run. The first process of
the training creates `train.log`; the keeper adds `process.json` and `exit.json`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, read_config, write_atomic
from looplab.errors import LabError

EMPTY = hashlib.sha256(b"").hexdigest()
SHARED = "_shared"
"""Beside the runs of a study: what many of them have in common, named by its hash."""


def study_folder(lab: Path, study: str) -> Path:
    return lab / "outputs" / study


def create(folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Make the run folder with these files, `run.json` last; gives the SHA-256 of each.

    A folder that is there already (prepared before the engine died, but never started) is brought up to date.
    """
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    names = sorted(files, key="run.json".__eq__)
    target = str(folder)
    try:
        os.mkdir(target)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(target)
    except FileExistsError:
        for name in names:
            write_atomic(f"{target}/{name}", files[name], sync=False)
        return hashes
    for name in names:
        descriptor = os.open(f"{target}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if os.write(descriptor, files[name]) != len(files[name]):  # a disk that fills up takes a part, silently
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        finally:
            os.close(descriptor)
    return hashes


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the run; empty where it is missing."""
    path = folder / name
    return read_config(path) if path.exists() else {}


def add_note(folder: Path, text: str) -> None:
    """Add a line to what is concluded about a run."""
    with contextlib.suppress(FileNotFoundError), (folder / "notes.md").open("a", encoding="utf-8") as file:
        file.write(f"- {text}\n")


def write_json(folder: Path, name: str, data: Mapping[str, Any]) -> str:
    """Write a JSON file of the run whole; gives its SHA-256. The data is our own, and finite."""
    content = dump_json(dict(data), finite=True)
    write_atomic(f"{folder}/{name}", content, sync=False)
    return hashlib.sha256(content).hexdigest()


def point(study: Path, name: str, run_id: str) -> None:
    """Set LATEST or BEST: one line, replaced atomically."""
    write_atomic(study / name, f"{run_id}\n".encode(), sync=False)


def pointed(study: Path, name: str) -> str | None:
    try:
        return (study / name).read_text().strip() or None
    except FileNotFoundError:
        return None


def keep_shared(study: Path, content: bytes, prefix: str, suffix: str) -> str:
    """Store what many runs share once, by its hash; gives its path relative to the study's folder."""
    name = f"{prefix}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
    path = study / SHARED / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    return f"{SHARED}/{name}"


def run_folders(study: Path) -> list[Path]:
    """All run folders of a study, oldest first."""
    if not study.is_dir():
        return []
    return sorted(p for p in study.iterdir() if p.is_dir() and p.name[0] not in "._" and (p / "run.json").exists())


def hash_file(path: Path | str) -> str | None:
    """The SHA-256 of a file; None where it is missing."""
    try:
        if os.stat(path).st_size == 0:
            return EMPTY
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each of these files that is there."""
    digests = ((name, hash_file(f"{folder}/{name}")) for name in names)
    return {name: digest for name, digest in digests if digest is not None}


def sweep(folder: Path) -> None:
    """Remove what a writer of ours that was killed left half done; nothing else that is hidden."""
    for path in folder.glob(".tmp-*"):
        path.unlink(missing_ok=True)


def require(folder: Path) -> Path:
    if not (folder / "run.json").exists():
        raise LabError(f"there is no run folder {folder}")
    return folder
