"""The growing end of a file: every byte is handed out once, and a file that begins anew is noticed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from looplab.untrusted import UntrustedError, open_descriptor

CHUNK = 1 << 20
PORTION = 1 << 18
"""Bytes between two looks at the clock, where the time is limited."""
SEAM = 64
LONGEST_LINE = 16 << 20
"""Bytes of a line that are kept; a longer one is skipped."""
UNREADABLE = b"\0"
"""What is returned in place of a line that is too long."""


class Tail:
    """Reads what was appended to `path` since the last time.

    A trainer that starts again may write its file anew: as another file under the same name, as a shorter one, or
    in place and by now longer than what was read. The first two show in `stat`; the third shows in the few bytes
    before the present position (the seam), which are compared with what they were. In all three cases `on_restart`
    is called and reading begins at 0.

    What is not a regular file (a folder, a pipe, a device, a link to itself) is never read.
    """

    __slots__ = ("_identity", "_on_restart", "_seam", "behind", "path", "position")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self.path = path
        self.position = 0
        self.behind = False
        """Whether the last call ran out of time before the end of the file."""
        self._on_restart = on_restart
        self._identity: tuple[int, int, int] | None = None
        self._seam = b""

    def chunks(self, until: float | None = None) -> Iterator[bytes]:
        """The new bytes in pieces of at most `CHUNK`; nothing, for the price of a `stat`, if the file is as it was.

        Args:
            until: When to stop, by `time.monotonic()`, but not before the first piece; None: at the end of the file.
        """
        try:
            status = os.stat(self.path)
            if (status.st_ino, status.st_size, status.st_mtime_ns) == self._identity and not self.behind:
                return
            if status.st_size == 0 and self.position == 0:
                return
            # Opened anew each time: a study may have a thousand files.
            descriptor = open_descriptor(self.path)
        except (OSError, UntrustedError):
            # Not there yet, gone, not a file, or a network disk that hiccups: the next poll asks again.
            self.behind = False
            return
        try:
            status = os.fstat(descriptor)
            if self.position and self._begins_anew(status, descriptor):
                self.position = 0
                self._seam = b""
                self._on_restart()
            self._identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            self.behind = False
            while chunk := os.pread(descriptor, CHUNK if until is None else PORTION, self.position):
                self.position += len(chunk)
                self._seam = (self._seam + chunk)[-SEAM:] if len(chunk) < SEAM else chunk[-SEAM:]
                yield chunk
                if until is not None and time.monotonic() >= until:
                    self.behind = self.position < status.st_size
                    return
        finally:
            os.close(descriptor)

    def _begins_anew(self, status: os.stat_result, descriptor: int) -> bool:
        if self._identity is not None and status.st_ino != self._identity[0]:
            return True
        if status.st_size < self.position:
            return True
        return os.pread(descriptor, len(self._seam), self.position - len(self._seam)) != self._seam


class LineTail:
    """Whole new lines of a growing text file; the torn last one is kept until its rest arrives."""

    __slots__ = ("_carriage_returns", "_on_restart", "_parts", "_size", "_tail", "_too_long")

    def __init__(self, path: Path, on_restart: Callable[[], None], *, carriage_returns: bool = False) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self._carriage_returns = carriage_returns
        self._parts: list[bytes] = []
        self._size = 0  # of the parts
        self._too_long = False  # whether the rest of this line is skipped

    @property
    def position(self) -> int:
        return self._tail.position

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def blocks(self, final: bool = False, until: float | None = None) -> Iterator[list[bytes]]:
        """Lists of new lines, without their ends; `until` as in `Tail.chunks`."""
        for chunk in self._tail.chunks(until):
            if self._carriage_returns:
                chunk = chunk.replace(b"\r", b"\n")
            end = chunk.rfind(b"\n")
            if end < 0:
                self._keep(chunk)
                continue
            lines = chunk[:end].split(b"\n")
            if self._too_long or self._size + len(lines[0]) > LONGEST_LINE:
                self._clear()
                lines[0] = UNREADABLE
            elif self._parts:
                lines[0] = self._whole() + lines[0]
            self._too_long = False
            if end + 1 < len(chunk):
                self._keep(chunk[end + 1 :])
            yield lines
        if final and self._parts and not self.behind:
            yield [self._whole()]

    def _keep(self, part: bytes) -> None:
        if self._too_long:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > LONGEST_LINE:
            self._clear()
            self._too_long = True

    def _whole(self) -> bytes:
        line = b"".join(self._parts)
        self._clear()
        return line

    def _clear(self) -> None:
        self._parts.clear()
        self._size = 0

    def _restart(self) -> None:
        self._clear()
        self._too_long = False
        self._on_restart()
