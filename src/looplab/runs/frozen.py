"""Frozen code: a copy of a lab's code for runs that wait in a queue, made once for each state of the code.

`_shared/tree-HASH/` of a study looks like the lab: tracked and source files are copies, everything else (data, outputs,
large files, what other links point to) is a link into the lab. `_shared/tree-HASH.json` names the copies with their
hashes; its own hash is in the name. A tree is complete once it has its name, and is removed when no run needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from looplab.errors import LabError
from looplab.runs import tree
from looplab.runs.code import MAX_BYTES, SUFFIXES
from looplab.runs.folder import SHARED, keep_shared, make_own_folder
from looplab.runs.redact import is_secret_file
from looplab.untrusted import UntrustedError, load_json, read_bounded

MAX_TOTAL = 256 << 20
"""Maximum size of all copies together, in bytes."""
MAX_LINKS = 10_000
"""Maximum number of entries next to the code."""
MAX_MANIFEST = 16 << 20
LINKS_S = 1.0
"""Seconds after which entries that are new in the lab are linked into a tree that is used again."""
TRIES = 3
"""How often copying restarts if a file changes in the meantime."""
OMITTED = frozenset({".git", "__pycache__"})
"""Entries that are neither copied nor linked: a tree is not a checkout, and writes its own bytecode."""
OWN = frozenset({".looplab", "outputs"})
"""Top-level folders of a lab that contain no code."""
PREFIX = "tree-"
TEMPORARY = ".tree-"
DAMAGED = ".damaged-"


@dataclass(slots=True)
class FrozenTree:
    """A frozen copy of the code of a lab."""

    lab: Path
    study: Path
    name: str
    """Path of its manifest, relative to the study's folder."""
    files: dict[str, str]
    """Copied files: path in the lab → SHA-256, and ` x` if the file is executable."""
    folders: frozenset[str] = field(init=False)
    """Folders of the tree that are not links, by their path in the lab; the lab itself is `.`."""
    _labs: tuple[Path, Path] = field(init=False, repr=False, compare=False)
    """The lab's folder as it is named, and without links."""

    def __post_init__(self) -> None:
        self._labs = (self.lab, self.lab.resolve())
        self.folders = frozenset(str(parent) for name in self.files for parent in PurePosixPath(name).parents) | {"."}

    @property
    def path(self) -> Path:
        return (self.study / self.name).with_suffix("")

    def moved(self, path: str | Path) -> Path:
        """Return the path in the tree for an absolute path in the lab; other paths are returned unchanged."""
        relative = self._in_lab(path)
        return self.path / relative if relative is not None else Path(path)

    def moved_argv(self, argv: Iterable[str]) -> list[str]:
        """Return a command in which absolute paths of the program and of source files, alone or as `--option=file`, are
        those of the copies. Other files may be written to, so they stay those of the lab."""
        words: list[str] = []
        for word in argv:
            option, sign, name = word.rpartition("=")
            relative = self._in_lab(name) if name.startswith("/") else None
            is_code = not words or os.path.splitext(name)[1] in SUFFIXES
            is_moved = relative is not None and relative in self.files and is_code
            words.append(f"{option}{sign}{self.path / str(relative)}" if is_moved else word)
        return words

    def moved_search_path(self, entries: Iterable[str]) -> list[str]:
        """Return the entries of an import path; those in the lab that contain code point into the tree."""
        found = []
        for entry in entries:
            relative = self._in_lab(entry) if entry.startswith("/") else None
            found.append(str(self.path / relative) if relative is not None and relative in self.folders else entry)
        return found

    def _in_lab(self, path: str | Path) -> str | None:
        """Return the path relative to the lab; None: it is not in the lab."""
        full = Path(os.path.normpath(path))
        for lab in self._labs:
            if full.is_relative_to(lab):
                return str(full.relative_to(lab))
        return None

    def is_intact(self) -> bool:
        """Return whether every copy exists and is unchanged."""
        try:
            is_there = self.path.is_dir() and not self.path.is_symlink()
            return is_there and all(_hash(self.path, name) == digest for name, digest in self.files.items())
        except (OSError, LabError):
            return False

    def added(self, place: Path | None = None) -> list[str]:
        """Return files that a run has created or changed in the tree; bytecode does not count.

        Args:
            place: Where the tree is; None: at its own path.
        """
        root, found = place or self.path, []
        for top, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                relative = os.path.normpath(os.path.relpath(os.path.join(top, name), root))
                if not os.path.islink(os.path.join(top, name)) and not self._is_copy(root, relative):
                    found.append(relative)
        return sorted(found)

    def _is_copy(self, root: Path, name: str) -> bool:
        """Return whether a file below a folder is the copy of this name, unchanged."""
        try:
            return name in self.files and _hash(root, name) == self.files[name]
        except (OSError, LabError):  # a socket, or not readable
            return False


class FrozenCode:
    """The frozen trees of one study.

    Args:
        lab: The lab.
        study: The folder of the study.
    """

    def __init__(self, lab: Path, study: Path) -> None:
        self._lab = Path(os.path.abspath(lab))
        self._study = Path(os.path.abspath(study))
        self._trees: dict[str, FrozenTree] = {}  # trees that this engine has made or checked, by name
        self._linked_at: dict[str, float] = {}

    def freeze(self, names: Iterable[str]) -> FrozenTree:
        """Return the tree of the current code; it is made if there is none yet.

        Args:
            names: Tracked and source files, relative to the lab.

        Raises:
            LabError: The code cannot be frozen: it is too large, or changes all the time.
        """
        listed = sorted(names)
        for _ in range(TRIES):
            files = self._current(listed)
            manifest = json.dumps(files, indent=1, sort_keys=True).encode()
            digest = hashlib.sha256(manifest).hexdigest()[:16]
            found = FrozenTree(self._lab, self._study, f"{SHARED}/{PREFIX}{digest}.json", files)
            keep_shared(self._study, manifest, PREFIX[:-1], ".json")
            is_known = found.name in self._trees and found.path.is_dir()
            if is_known or found.is_intact() or self._make(found):
                self._trees[found.name] = found
                self.link(found)
                return found
        raise LabError("the code changed while it was being copied", hint="wait, or `executor: {freeze: false}`")

    def open(self, name: object) -> FrozenTree | None:
        """Return the tree of this name, as a capsule has it; None: it is gone or was changed."""
        found = self._trees.get(str(name)) or self._read(name)
        if found is None or not found.is_intact():
            return None
        self._trees[found.name] = found
        return found

    def _read(self, name: object) -> FrozenTree | None:
        """Return the tree of a manifest, whether it exists or not; None: it has no valid manifest."""
        if not isinstance(name, str) or PurePosixPath(name).parent != PurePosixPath(SHARED):
            return None
        try:
            content = read_bounded(self._study / name, MAX_MANIFEST, follow=False)
            files = load_json(content)
        except (OSError, UntrustedError):
            return None
        if name != f"{SHARED}/{PREFIX}{hashlib.sha256(content).hexdigest()[:16]}.json" or not isinstance(files, dict):
            return None
        return FrozenTree(self._lab, self._study, name, files)

    def link(self, frozen: FrozenTree) -> None:
        """Link what has been added to the lab next to the code since the tree was made."""
        if time.monotonic() - self._linked_at.get(frozen.name, -LINKS_S) >= LINKS_S:
            self._link(frozen, frozen.path)
            self._linked_at[frozen.name] = time.monotonic()

    def prune(self, needed: Iterable[str]) -> list[str]:
        """Remove all trees but these, and leftovers of killed engines. A tree to which a run has added files is kept.

        Returns:
            The files that runs have added, relative to the study's folder.
        """
        kept, added = {PurePosixPath(name).stem for name in needed}, []
        try:
            entries = sorted(os.listdir(self._study / SHARED))
        except OSError:
            return []
        for entry in entries:
            name, damaged, _ = entry.partition(DAMAGED)
            is_over = entry.startswith(PREFIX) and (damaged or entry not in kept)
            found = self._read(f"{SHARED}/{name}.json") if is_over else None
            if found is not None and (files := found.added(self._study / SHARED / entry)):
                added += [f"{SHARED}/{entry}/{name}" for name in files]
            elif found is not None or entry.startswith(TEMPORARY):
                self._trees.pop(f"{SHARED}/{entry}.json", None)
                with contextlib.suppress(OSError, LabError):  # the next engine tries again
                    tree.make_writable(self._study / SHARED, entry)
                    tree.remove(self._study / SHARED, entry)
        return added

    @property
    def count(self) -> int:
        """Number of trees that this engine knows."""
        return len(self._trees)

    def _current(self, names: Iterable[str]) -> dict[str, str]:
        """Return the files to copy, with their hashes. Links, secrets, large and missing files are left out."""
        files, total = {}, 0
        for name in names:
            parts = tree.parts_of(name)
            if parts[0] in OWN or OMITTED.intersection(parts) or is_secret_file(name):
                continue
            with contextlib.suppress(OSError, LabError):  # a link, or in a folder that is a link, or not readable
                size, digest = _measure(self._lab, name)
                if size is not None:
                    total += size
                    files[str(PurePosixPath(*parts))] = digest
            if total > MAX_TOTAL:
                raise LabError(
                    f"the code is larger than {MAX_TOTAL >> 20} MB", hint="untrack data, or `executor: {freeze: false}`"
                )
        return files

    def _make(self, frozen: FrozenTree) -> bool:
        """Copy the files, and give the tree its name once it is complete; return False if a file has changed."""
        shared = self._study / SHARED
        make_own_folder(shared)
        building = shared / f"{TEMPORARY}{secrets.token_hex(8)}"
        building.mkdir()
        try:
            for name, digest in frozen.files.items():
                if not tree.copy(self._lab, building, name) or _hash(building, name) != digest:
                    return False
                copied = building / name
                copied.chmod(stat.S_IMODE(copied.stat().st_mode) & ~0o222)
            self._link(frozen, building)
            if os.path.lexists(frozen.path):  # a run, or a crash of the machine, has damaged it
                os.rename(frozen.path, f"{frozen.path}{DAMAGED}{secrets.token_hex(4)}")
            os.rename(building, frozen.path)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return True

    def _link(self, frozen: FrozenTree, target: Path) -> None:
        """Link everything next to the copied files."""
        links = 0
        for folder in frozen.folders:
            for name, kept in self._entries(frozen, folder):
                links += 1
                if links > MAX_LINKS:
                    raise LabError(
                        f"more than {MAX_LINKS} files are beside the code",
                        hint="move data to a folder of its own, or `executor: {freeze: false}`",
                    )
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.symlink(kept, target / folder / name)

    def _entries(self, frozen: FrozenTree, folder: str) -> Iterator[tuple[str, str]]:
        """Yield the entries of a folder of the lab that are not copied, with what their links contain."""
        with contextlib.suppress(OSError), os.scandir(self._lab / folder) as listed:
            for entry in listed:
                relative = os.path.normpath(f"{folder}/{entry.name}")
                if entry.name in OMITTED or relative in frozen.files or relative in frozen.folders:
                    continue
                original = str(self._lab / relative)
                if entry.is_symlink():
                    text = os.readlink(entry.path)
                    ends = os.path.normpath(os.path.join(self._lab / folder, text))
                    if not os.path.isabs(text) and Path(ends).is_relative_to(self._lab):
                        original = text  # the same file or folder, in the tree
                yield entry.name, original


def _measure(root: Path, name: str) -> tuple[int | None, str]:
    """Return size and hash of a regular file below a folder; None if it is something else or too large. Links are not
    followed."""
    with tree.open_parent(root, name) as (parent, last):
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
            return None, ""
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return about.st_size, f"{digest} x" if about.st_mode & 0o100 else digest


def _hash(root: Path, name: str) -> str:
    return _measure(root, name)[1]
