"""One engine per study: a lock that is released when its holder dies.

The engine holds an exclusive lock on `<study>.lock` next to the ledger, and a shared lock on that folder itself, at an
offset that is specific to the study. If the file is deleted, the next engine still sees the second lock. A check for a
running engine takes no lock.

Some network disks keep locks from other hosts. There the holder also touches the file every few seconds: while it does,
engines of other hosts are refused, whatever their own lock says. Ages are compared with those of a new file, which has
the time of the same file server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
import time
import zlib
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from looplab.config.disk import network_disk
from looplab.config.state import state_folder
from looplab.errors import BusyError, LabError
from looplab.launch.supervisor import FLOCK, hold, is_held
from looplab.runs.folder import put_aside
from looplab.untrusted import UntrustedError, open_descriptor

INHERITED_S = 5.0
"""Seconds to wait for a lock whose holder is dead: a forked child shares the lock until it calls exec."""

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
TOUCH_S = 5.0
"""Seconds between two signs of life of a holder on a network disk."""
SILENT_S = 30.0
"""Seconds without a sign of life after which a holder on another host is dead."""


def _lock(descriptor: int) -> bool:
    """Try to lock the file exclusively; return False if another process holds it."""
    request = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:  # any other error says that this disk cannot lock
        return False
    return True


def _leads_to(path: Path, descriptor: int) -> bool:
    """Return whether the path refers to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _read_holder(descriptor: int) -> tuple[str, str]:
    """Return pid and host in the lock file as text; either may be empty."""
    pid, _, host = os.pread(descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
    return pid, host


def _is_gone(pid: str) -> bool:
    """Return whether the process of this host with this pid no longer exists; False if that is unknown."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except (ValueError, PermissionError):
        return False
    return False


def _lives_elsewhere(descriptor: int, folder: Path) -> bool:
    """Return whether the lock file names a holder on another host that has recently shown a sign of life."""
    _, host = _read_holder(descriptor)
    if host in ("", os.uname().nodename) or network_disk(folder) is None:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as new:
            now = os.fstat(new.fileno()).st_mtime
    except OSError:  # the folder may be read-only for us
        now = time.time()
    return now - os.fstat(descriptor).st_mtime < SILENT_S


class StudyLock:
    """Context manager that holds the lock of a study.

    Raises:
        BusyError: Another engine holds it.
        LabError: The lock file cannot be created or locked.
    """

    def __init__(self, lab: Path, study: str) -> None:
        self._path = state_folder(lab) / f"{study}.lock"
        self._study = study
        self._descriptor = self._folder = -1
        self._closing: Event | None = None  # of the thread that touches the file, on a network disk
        self._toucher: Thread | None = None

    def __enter__(self) -> StudyLock:
        place = _place_of(self._study)
        try:
            with contextlib.suppress(FileExistsError):
                self._path.parent.mkdir()  # without parents, so that a lab that was moved away is not recreated
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            while not _leads_to(self._path, self._descriptor):  # retry if the file was deleted before it was locked
                self._close_file()
                with contextlib.suppress(FileNotFoundError):
                    if not stat.S_ISREG(os.lstat(self._path).st_mode):
                        put_aside(self._path)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags, 0o644)
                if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                    raise OSError(errno.EINVAL, "it is not a file")
                deadline = time.monotonic() + INHERITED_S
                while (
                    not _lock(self._descriptor)
                    or is_held(self._folder, place, 1)
                    or _lives_elsewhere(self._descriptor, self._path.parent)
                ):
                    pid, host = _read_holder(self._descriptor)
                    is_here = host in ("", os.uname().nodename)
                    if not (is_here and _is_gone(pid)) or time.monotonic() > deadline:
                        where = f"pid {pid or 'unknown'}" + ("" if is_here else f" on host {host}")
                        raise BusyError(
                            f"study {self._study!r} has an engine already ({where})",
                            hint="follow it with `looplab attach`, stop it with `looplab stop`"
                            + ("" if is_here else f"; if that host is gone, try again in {SILENT_S:g} s"),
                        )
                    time.sleep(0.005)
            hold(self._folder, place, 1)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {os.uname().nodename}".encode(), 0)
            if network_disk(self._path.parent) is not None:
                self._closing = Event()
                self._toucher = Thread(target=self._touch, args=(self._closing,), name="looplab-lock", daemon=True)
                self._toucher.start()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                hint = ""
                if error.errno in NO_LOCKS:
                    hint = "this disk has no locks (Lustre needs the mount option flock): keep the ledger on a local "
                    hint += "disk, with `state_dir` in lab.yaml or LOOPLAB_STATE_DIR"
                raise LabError(f"cannot lock the study: {error.strerror}", file=self._path, hint=hint) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _touch(self, closing: Event) -> None:
        while not closing.wait(TOUCH_S):
            with contextlib.suppress(OSError):  # a server that is away for a moment
                os.utime(self._descriptor)

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _close(self) -> None:
        if self._closing is not None and self._toucher is not None:
            self._closing.set()
            self._toucher.join()
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # other hosts need not wait
            self._closing = self._toucher = None
        self._close_file()
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1


def _place_of(study: str) -> int:
    """Return the offset of the study's lock on the folder; locks on folders have offsets, as on files."""
    return (len(study) << 32) + zlib.crc32(study.encode())


def engine_pid(lab: Path, study: str) -> int | None:
    """Return the pid of the study's engine; 0 if an engine runs but its pid is unknown, None if none runs."""
    folder = state_folder(lab)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        running = is_held(descriptor, _place_of(study), 1)
    finally:
        os.close(descriptor)
    try:
        descriptor = open_descriptor(folder / f"{study}.lock")
    except (OSError, UntrustedError):
        return 0 if running else None
    try:
        # Check the file as well: not every file system supports locks on folders.
        if not running and not is_held(descriptor) and not _lives_elsewhere(descriptor, folder):
            return None
        pid, host = _read_holder(descriptor)
        return int(pid) if pid.isdigit() and host in ("", os.uname().nodename) else 0
    finally:
        os.close(descriptor)
