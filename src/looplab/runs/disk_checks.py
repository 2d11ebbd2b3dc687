"""Tests of what looplab needs from a disk: exclusive creation, atomic renames, locks, and the server's clock.

All checks run on one host. What another host sees later is bounded by the caches of its mount, which are read from the
mount options.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAMES = 20
RACERS = 8
"""Threads that try to create each of the names."""
RENAMES = 50
CONTENT_BYTES = 1 << 16
MAX_SKEW_S = 2.0
"""Seconds by which the clocks of host and file server may differ."""
CACHE_S = {"nfs": 60.0, "nfs4": 60.0, "cifs": 1.0, "smb3": 1.0, "9p": 0.0, "fuse": 1.0}
"""Seconds for which a client keeps attributes by default, by type of mount."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a folder is on."""

    kind: str
    """As the kernel names it: ext4, nfs4, fuse.sshfs."""
    point: str
    options: tuple[str, ...]

    @property
    def cache_s(self) -> float | None:
        """Seconds for which this host may not see what another host has created or changed; None: unknown."""
        if not {"noac", "actimeo=0"}.isdisjoint(self.options):
            return 0.0
        limits = [re.fullmatch(r"(?:actimeo|acregmax|acdirmax)=(\d+)", option) for option in self.options]
        found = [float(limit[1]) for limit in limits if limit is not None]
        return max(found) if found else CACHE_S.get(self.kind.partition(".")[0])


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """One thing that was tried on a disk."""

    name: str
    ok: bool
    found: str


def mount_of(folder: Path, table: str = "/proc/self/mountinfo") -> Mount | None:
    """Return the mount of an existing folder; None if the kernel does not say."""
    try:
        device, path = os.stat(folder).st_dev, str(folder.resolve())
        lines = Path(table).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: Mount | None = None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
        major, minor = map(int, fields.split(" ")[2].split(":"))
        is_above = point == "/" or path == point or path.startswith(point + "/")
        if is_above and (os.makedev(major, minor) == device or found is None or len(point) >= len(found.point)):
            kind, _, options = rest.split(" ")[:3]
            found = Mount(kind, point, (*fields.split(" ")[5].split(","), *options.split(",")))
    return found


def check_disk(folder: Path) -> list[DiskCheck]:
    """Try out what looplab needs of the disk of a folder; takes less than a second on a local disk.

    Raises:
        OSError: Nothing can be written there.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".looplab-check-", dir=folder))
    try:
        return [_check_exclusive(scratch), _check_rename(scratch), _check_locks(scratch), _check_clock(scratch)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_exclusive(folder: Path) -> DiskCheck:
    def create(path: Path) -> bool:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        tries = {n: [pool.submit(create, folder / f"exclusive{n}") for _ in range(RACERS)] for n in range(NAMES)}
        wrong = sum(sum(one.result() for one in racers) != 1 for racers in tries.values())
    found = "one of several creators wins" if not wrong else f"{wrong} of {NAMES} files had not exactly one creator"
    return DiskCheck("O_EXCL", not wrong, found)


def _check_rename(folder: Path) -> DiskCheck:
    target = folder / "renamed"
    target.write_bytes(b"0" * CONTENT_BYTES)

    def replace() -> None:
        for n in range(RENAMES):
            new = folder / "new"
            new.write_bytes(b"%d" % (n % 10) * CONTENT_BYTES)
            os.replace(new, target)

    torn = absent = reads = 0
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(replace)
        while reads == 0 or not writer.done():
            reads += 1
            try:
                content = target.read_bytes()
                torn += len(content) != CONTENT_BYTES or len(set(content)) != 1
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                absent += 1
        writer.result()
    found = "readers see the old or the new file"
    if absent:  # FUSE and NFS: the name led to a file that was just replaced
        found += f", or for a moment none ({absent} of {reads} reads)"
    return DiskCheck("rename", not torn, f"{torn} of {reads} reads saw parts of files" if torn else found)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_locks(folder: Path) -> DiskCheck:
    with _opened(folder / "lock") as one, _opened(folder / "lock") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return DiskCheck("locks", False, f"not supported: {error.strerror}")
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return DiskCheck("locks", True, "exclusive on this host")
        except OSError as error:
            return DiskCheck("locks", False, f"not supported: {error.strerror}")
    return DiskCheck("locks", False, "two holders have an exclusive lock")


def _check_clock(folder: Path) -> DiskCheck:
    """Compare the time that the file server gives a new file with this host's clock."""
    before = time.time()
    path = folder / "clock"
    path.write_bytes(b"x")
    skew = path.stat().st_mtime - before
    took = time.time() - before
    skew = 0.0 if -0.1 <= skew <= took else skew
    return DiskCheck("clock", abs(skew) <= MAX_SKEW_S, f"{skew:+.1f} s against the file server's")
