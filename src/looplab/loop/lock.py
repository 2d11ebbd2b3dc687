"""One engine a study: a lock that dies with its holder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from looplab.errors import BusyError

LOOK_S = 0.005


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class StudyLock:
    def __init__(self, lab: Path, study: str) -> None:
        self._path = lab / ".looplab" / f"{study}.lock"
        self._study = study
        self._descriptor = -1

    def __enter__(self) -> StudyLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while not _lock(self._descriptor, fcntl.LOCK_EX):
            if not _lock(self._descriptor, fcntl.LOCK_SH):
                holder = os.read(self._descriptor, 100).decode(errors="replace").strip() or "unknown"
                os.close(self._descriptor)
                raise BusyError(
                    f"study {self._study!r} has an engine already (pid {holder})",
                    hint="see it with `looplab attach`, end it with `looplab stop`",
                )
            # Held only by somebody who looks whether there is an engine (`engine_pid`), and for a moment.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            time.sleep(LOOK_S)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def engine_pid(lab: Path, study: str) -> int | None:
    """The pid of the engine that is at work on the study, if any."""
    try:
        descriptor = os.open(lab / ".looplab" / f"{study}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _lock(descriptor, fcntl.LOCK_SH):
            return None
        text = os.read(descriptor, 100).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
