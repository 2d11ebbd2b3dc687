"""Run folders of nodes that share no disk with the engine: a run is sent there, and its files are copied back.

The node keeps a run below its own folder, named after the path that the run has on the engine's machine, so that
every engine finds it again. The engine asks for what it does not have yet, in portions: logs and metrics as they grow,
other files when they are complete, at last all of them. What it has is known from its own files (sizes and times, and
the last bytes of logs, which a trainer may cut back), so a copy that was interrupted continues where it was. Links and
special files are left out.

Frozen code is kept on the node for the runs that use it. A host locks a tree (`NAME.lock`, shared) as long as it has
runs with that code; the lock ends with the process. A tree that nobody has locked for an hour is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.launch.base import LaunchSpec
from looplab.runs import tree

PORTION = 8 << 20
"""Bytes of one answer."""
SETTLED_S = 2.0
"""Seconds after its last change after which a file of a running run counts as complete."""
STREAMS = (".jsonl", ".log")
"""Suffixes of files that only grow."""
PARTS = ".mirror"
"""Folder in the record of a run for files that are not complete yet."""
TAIL = 4096
"""Last bytes of a stream by which it is recognized."""
SKIPPED = -1
"""Stands for the time of change of a file that the engine cannot have."""
UNUSED_S = 3600.0
"""Seconds after its last use after which frozen code is removed: longer than the runs of a dead host take to end."""
LOCK = ".lock"
CONFLICTS = {
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR,
    errno.ENOTEMPTY, errno.EPERM,
}  # fmt: skip
"""Errors after which the same file cannot be stored later, either."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file."""

    name: str
    """Relative to the run folder."""
    offset: int
    data: bytes
    size: int
    """Size of the whole file in bytes."""
    mtime_ns: int
    mode: int


Known = Mapping[str, tuple[int, int]]
"""What the engine has: name → time of change (of a stream: checksum of its last bytes) and number of bytes."""


def read_tree(folder: Path) -> dict[str, Any]:
    """Return the content of a folder, to be written by `NodeMirror.write_tree`: files, and links as they are."""
    files, links = [], []
    for top, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(top, name)
            about = path.lstat()
            relative = str(path.relative_to(folder))
            if stat.S_ISLNK(about.st_mode):
                links.append((relative, os.readlink(path)))
            elif stat.S_ISREG(about.st_mode) and "__pycache__" not in path.parts:
                files.append((relative, stat.S_IMODE(about.st_mode), about.st_mtime_ns, path.read_bytes()))
    return {"files": files, "links": links}


class NodeMirror:
    """The folder of a node.

    Args:
        root: It is created when it is needed.
        limit: Maximum number of bytes that are copied back for one run.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._locks: dict[str, int] = {}  # name of frozen code → descriptor of its lock
        self._users: dict[str, str] = {}  # run → name of its code

    def run_dir(self, run_dir: str | Path) -> Path:
        """Return the folder on this node of a run with this folder on the engine's machine."""
        digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
        return self._root / "runs" / f"{digest}-{Path(run_dir).name}"

    def code(self, code: str | Path) -> Path:
        return self._root / "code" / Path(code).name

    def write_tree(self, target: Path, content: Mapping[str, Any]) -> None:
        """Write files and links; a folder that exists is completed."""
        target.mkdir(parents=True, exist_ok=True)
        for name, mode, mtime_ns, data in content["files"]:
            with tree.open_parent(target, name, create=True) as (parent, last):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(last, dir_fd=parent)
                descriptor = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=parent)
                with open(descriptor, "wb") as file:
                    file.write(data)
                os.utime(last, ns=(mtime_ns, mtime_ns), dir_fd=parent)
        for name, text in content["links"]:
            with tree.open_parent(target, name, create=True) as (parent, last), contextlib.suppress(FileExistsError):
                os.symlink(text, last, dir_fd=parent)

    def write_code(self, code: str | Path, content: Mapping[str, Any]) -> None:
        """Write frozen code under its name, once it is complete."""
        target = self.code(code)
        building = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
        try:
            self.write_tree(building, content)
            with contextlib.suppress(OSError):  # another slot of this node has done the same
                os.rename(building, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def hold_code(self, run_id: str, code: str | Path) -> None:
        """Keep frozen code on this node until the run releases it or this process ends. Call it before a look whether
        the code is there."""
        name = self.code(code).name
        self._users[run_id] = name
        if name not in self._locks:
            descriptor = self._lock(name, fcntl.LOCK_SH)
            assert descriptor is not None
            self._locks[name] = descriptor
        os.utime(self._locks[name])

    def release_code(self, run_id: str) -> None:
        """Note that a run no longer needs its code; it is removed later, since the next run often has the same."""
        name = self._users.pop(run_id, None)
        if name is not None and name not in self._users.values():
            descriptor = self._locks.pop(name)
            with contextlib.suppress(OSError):
                os.utime(descriptor)
            os.close(descriptor)

    def prune_code(self) -> None:
        """Remove frozen code that no host has used for `UNUSED_S`, and leftovers of killed hosts."""
        for descriptor in self._locks.values():
            with contextlib.suppress(OSError):
                os.utime(descriptor)
        with contextlib.suppress(OSError):
            for entry in os.listdir(self._root / "code"):
                with contextlib.suppress(OSError):  # another host removes it, or the next call tries again
                    self._prune(entry)

    def _prune(self, entry: str) -> None:
        path = self._root / "code" / entry
        if entry.startswith("."):
            if time.time() - path.lstat().st_mtime > UNUSED_S:
                shutil.rmtree(path, ignore_errors=True)
            return
        name = entry.removesuffix(LOCK)
        if name in self._locks or (entry != name and path.with_name(name).exists()):
            return
        descriptor = self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            return
        try:
            if time.time() - os.fstat(descriptor).st_mtime > UNUSED_S:
                gone = path.with_name(f".{name}-{secrets.token_hex(4)}")
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path.with_name(name), gone)
                os.unlink(path.with_name(name + LOCK))
                shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(descriptor)

    def _lock(self, name: str, how: int) -> int | None:
        """Return the descriptor of the locked file of frozen code, which is created; None: another process has it."""
        path = self._root / "code" / f"{name}{LOCK}"
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, how)
                if os.fstat(descriptor).st_nlink:  # else it was removed between opening and locking
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def moved(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the spec with the paths of this node."""
        moves = {str(spec.run_dir): str(self.run_dir(spec.run_dir))}
        if spec.code is not None:
            moves[str(spec.code)] = str(self.code(spec.code))

        def moved(text: str) -> str:
            for old, new in moves.items():
                text = text.replace(old, new)
            return text

        return replace(
            spec,
            run_dir=Path(moved(str(spec.run_dir))),
            record_dir=Path(moved(str(spec.record_dir))) if spec.record_dir is not None else None,
            argv=[moved(word) for word in spec.argv],
            path=moved(spec.path),
            cwd=Path(moved(str(spec.cwd))),
            env={name: moved(value) for name, value in spec.env.items()},
        )

    def changes(self, run_dir: str | Path, known: Known, *, final: bool) -> tuple[list[Chunk], list[str]]:
        """Return the next portion of what the engine does not have, and files that are left out because they are too
        large; no chunks: it has everything.

        Args:
            final: Whether the run is over, so that all files are complete.
        """
        found: list[Chunk] = []
        skipped: list[str] = []
        room, total = PORTION, 0
        for name, about in sorted(self._files(self.run_dir(run_dir)), key=lambda file: (not _is_stream(file[0]), file)):
            total += about.st_size
            if total > self._limit:
                total -= about.st_size
                skipped.append(name)
                continue
            version, have = known.get(name, (None, 0))
            if version == SKIPPED:
                skipped.append(name)
                continue
            if _is_stream(name):
                offset = have if self._begins_with(run_dir, name, about.st_size, version, have) else 0
            else:
                if not final and time.time() - about.st_mtime < SETTLED_S:
                    continue
                offset = have if version == about.st_mtime_ns else 0
                if version == about.st_mtime_ns and have == about.st_size:
                    continue
            is_new = name not in known or (not _is_stream(name) and offset == 0)
            if room <= 0 or (offset == have == about.st_size and not is_new):
                continue
            with contextlib.suppress(OSError, LabError):  # it is gone, or a link was put in the place of its folder
                data = self._read(self.run_dir(run_dir), name, offset, room)
                room -= len(data) + 1024
                mode = stat.S_IMODE(about.st_mode)
                found.append(Chunk(name, offset, data, about.st_size, about.st_mtime_ns, mode))
        return found, skipped

    def _begins_with(self, run_dir: str | Path, name: str, size: int, version: int | None, have: int) -> bool:
        """Return whether a stream begins with what the engine has; else it was cut back, and may have grown since."""
        if have > size:
            return False
        try:
            return zlib.crc32(self._read(self.run_dir(run_dir), name, max(0, have - TAIL), min(have, TAIL))) == version
        except (OSError, LabError):
            return False

    def forget(self, run_dir: str | Path) -> None:
        """Remove the folder of a run that the engine has."""
        shutil.rmtree(self.run_dir(run_dir), ignore_errors=True)

    @staticmethod
    def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
        for top, _, names in os.walk(root):
            for name in names:
                with contextlib.suppress(OSError):
                    about = os.lstat(os.path.join(top, name))
                    if stat.S_ISREG(about.st_mode):
                        yield os.path.relpath(os.path.join(top, name), root), about

    @staticmethod
    def _read(root: Path, name: str, offset: int, size: int) -> bytes:
        with tree.open_parent(root, name) as (parent, last):
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)


def _is_stream(name: str) -> bool:
    return name.endswith(STREAMS)


class EngineMirror:
    """The copy of a run folder on the engine's machine."""

    def __init__(self, run_dir: Path, record_dir: Path) -> None:
        self._run_dir = run_dir
        self._parts = record_dir / PARTS
        self.known: dict[str, tuple[int, int]] = {}
        for top, folders, names in os.walk(run_dir):
            folders[:] = [name for name in folders if name != PARTS]
            for name in names:
                path = os.path.join(top, name)
                about = os.lstat(path)
                relative = os.path.relpath(path, run_dir)
                if not _is_stream(relative) or not stat.S_ISREG(about.st_mode):
                    self.known[relative] = (about.st_mtime_ns, about.st_size)
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    self.known[relative] = (_tail(descriptor, about.st_size), about.st_size)
                finally:
                    os.close(descriptor)

    def store(self, chunk: Chunk) -> None:
        """Add a part of a file; a file other than a stream appears when it is complete.

        A file that cannot be stored, because something else has its name or that of its folder, is not asked for again.

        Raises:
            LabError: Its name leads out of the folder.
            OSError: It cannot be stored now.
        """
        tree.parts_of(chunk.name)
        try:
            self._store(chunk)
        except LabError:
            self.known[chunk.name] = (SKIPPED, 0)
        except OSError as error:
            if error.errno not in CONFLICTS:
                raise
            self.known[chunk.name] = (SKIPPED, 0)

    def _store(self, chunk: Chunk) -> None:
        if _is_stream(chunk.name):
            with tree.open_parent(self._run_dir, chunk.name, create=True) as (parent, last):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(last, flags, chunk.mode | 0o600, dir_fd=parent)
                try:
                    if os.fstat(descriptor).st_size > chunk.offset:
                        os.ftruncate(descriptor, chunk.offset)
                    _write_all(descriptor, chunk.data, chunk.offset)
                    have = chunk.offset + len(chunk.data)
                    self.known[chunk.name] = (_tail(descriptor, have), have)
                finally:
                    os.close(descriptor)
            return
        self._parts.mkdir(exist_ok=True)
        part = self._parts / hashlib.sha256(os.fsencode(f"{chunk.name}\0{chunk.mtime_ns}")).hexdigest()[:24]
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, chunk.data, chunk.offset)
            have = chunk.offset + len(chunk.data)
            if have >= chunk.size:
                os.ftruncate(descriptor, chunk.size)
                os.fchmod(descriptor, chunk.mode & 0o777)
                os.utime(descriptor, ns=(chunk.mtime_ns, chunk.mtime_ns))
        finally:
            os.close(descriptor)
        if have >= chunk.size:
            with tree.open_parent(self._run_dir, chunk.name, create=True) as (parent, last):
                os.rename(part, last, dst_dir_fd=parent)
        self.known[chunk.name] = (chunk.mtime_ns, have)

    def close(self) -> None:
        """Remove what is left of files that never became complete."""
        shutil.rmtree(self._parts, ignore_errors=True)


def _tail(descriptor: int, size: int) -> int:
    """Return the checksum of the last bytes of a file of this size."""
    return zlib.crc32(os.pread(descriptor, min(size, TAIL), max(0, size - TAIL)))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
