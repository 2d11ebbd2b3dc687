"""One engine per study: a lock that is released when its holder dies.

The engine holds an exclusive lock on `<study>.lock` next to the ledger, and a shared lock on that folder itself, at an
offset that is specific to the study. If the file is deleted, the next engine still sees the second lock. A check for a
running engine takes no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
import zlib
from pathlib import Path
from types import TracebackType

from looplab.config.state import state_folder
from looplab.errors import BusyError, LabError
from looplab.launch.supervisor import FLOCK, hold, is_held
from looplab.runs.disk import refuse_network_disk
from looplab.untrusted import UntrustedError, open_descriptor

INHERITED_S = 5.0
"""Seconds to wait for a lock whose holder is dead: a forked child shares the lock until it calls exec."""


def _lock(descriptor: int) -> bool:
    """Try to lock the file exclusively; return False if another process holds it."""
    request = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _leads_to(path: Path, descriptor: int) -> bool:
    """Whether the path refers to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _read_pid(descriptor: int) -> str:
    """Return the pid in the lock file as text; may be empty."""
    return os.pread(descriptor, 100, 0).decode(errors="replace").strip()


def _is_gone(holder: str) -> bool:
    """Whether the process whose pid is in the lock file no longer exists; False if that is unknown."""
    try:
        os.kill(int(holder), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except (ValueError, PermissionError):
        return False
    return False


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

    def __enter__(self) -> StudyLock:
        place = _place_of(self._study)
        try:
            with contextlib.suppress(FileExistsError):
                self._path.parent.mkdir()  # without parents, so that a lab that was moved away is not recreated
            refuse_network_disk(self._path.parent)
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            while not _leads_to(self._path, self._descriptor):  # retry if the file was deleted before it was locked
                self._close_file()
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags, 0o644)
                if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                    raise OSError(errno.EINVAL, "it is not a file")
                deadline = time.monotonic() + INHERITED_S
                while not _lock(self._descriptor) or is_held(self._folder, place, 1):
                    holder = _read_pid(self._descriptor) or "unknown"
                    if not _is_gone(holder) or time.monotonic() > deadline:
                        raise BusyError(
                            f"study {self._study!r} has an engine already (pid {holder})",
                            hint="see it with `looplab attach`, end it with `looplab stop`",
                        )
                    time.sleep(0.005)
            hold(self._folder, place, 1)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                hint = "" if os.path.isfile(self._path) else "remove what is there: looplab creates the file"
                raise LabError(f"cannot lock the study: {error.strerror}", file=self._path, hint=hint) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _close(self) -> None:
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
        if not running and not is_held(descriptor):
            return None
        text = _read_pid(descriptor)
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
