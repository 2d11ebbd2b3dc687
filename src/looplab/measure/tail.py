"""Incremental reading of growing files: each byte is returned once, and a restarted file is detected."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from looplab.untrusted import UntrustedError, open_descriptor

CHUNK = 1 << 20
"""Bytes per read."""
PORTION = 1 << 18
"""Bytes per read if time is limited; the clock is checked after each."""
SEAM = 64
"""Bytes before the position that are compared to detect a rewritten file."""
MAX_LINE = 16 << 20
"""Maximum length of a line, in bytes; a longer one is skipped."""
UNREADABLE = b"\0"
"""Returned in place of a line that is too long."""


class Tail:
    """Reads what was appended to `path` since the last call.

    A restarted trainer may rewrite its file: as another file of the same name, as a shorter one, or in place and longer
    than before. The first two show in `stat`; the third shows in the last bytes before the position (the seam), which
    are compared with what was read. In all three cases `on_restart` is called and reading restarts at 0.

    Anything but a regular file (a folder, a pipe, a device, a link to itself) is never read.
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
        """Yield the new bytes in chunks of at most `CHUNK`; an unchanged file costs one `stat`.

        Args:
            until: When to stop (`time.monotonic()`), but not before the first chunk; None: at the end of the file.
        """
        try:
            status = os.stat(self.path)
            if (status.st_ino, status.st_size, status.st_mtime_ns) == self._identity and not self.behind:
                return
            if status.st_size == 0 and self.position == 0:
                return
            # Not kept open: a study may have a thousand files.
            descriptor = open_descriptor(self.path)
        except (OSError, UntrustedError):
            # Missing, not a file, or a transient error of a network disk: the next poll tries again.
            self.behind = False
            return
        try:
            status = os.fstat(descriptor)
            if self.position and self._was_rewritten(status, descriptor):
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

    def _was_rewritten(self, status: os.stat_result, descriptor: int) -> bool:
        if self._identity is not None and status.st_ino != self._identity[0]:
            return True
        if status.st_size < self.position:
            return True
        return os.pread(descriptor, len(self._seam), self.position - len(self._seam)) != self._seam


class LineTail:
    """Complete new lines of a growing text file; a torn last line is buffered until the rest arrives."""

    __slots__ = ("_carriage_returns", "_on_restart", "_parts", "_size", "_tail", "_too_long")

    def __init__(self, path: Path, on_restart: Callable[[], None], *, carriage_returns: bool = False) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self._carriage_returns = carriage_returns
        self._parts: list[bytes] = []
        self._size = 0  # of the buffered parts
        self._too_long = False  # whether the rest of the current line is skipped

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def blocks(self, final: bool = False, until: float | None = None) -> Iterator[list[bytes]]:
        """Yield lists of new lines without their newlines; for `until` see `Tail.chunks`."""
        for chunk in self._tail.chunks(until):
            if self._carriage_returns:
                chunk = chunk.replace(b"\r", b"\n")
            end = chunk.rfind(b"\n")
            if end < 0:
                self._buffer(chunk)
                continue
            lines = chunk[:end].split(b"\n")
            if self._too_long or self._size + len(lines[0]) > MAX_LINE:
                self._clear()
                lines[0] = UNREADABLE
            elif self._parts:
                lines[0] = self._pop_line() + lines[0]
            self._too_long = False
            if end + 1 < len(chunk):
                self._buffer(chunk[end + 1 :])
            yield lines
        if final and self._parts and not self.behind:
            yield [self._pop_line()]

    def _buffer(self, part: bytes) -> None:
        if self._too_long:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_LINE:
            self._clear()
            self._too_long = True

    def _pop_line(self) -> bytes:
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
