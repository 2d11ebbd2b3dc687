"""The growing end of a file: every byte is handed out once, and a file that begins anew is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK = 1 << 20
SEAM = 64
LONGEST_LINE = 16 << 20


class Tail:
    """Reads what was appended to `path` since the last time.

    A trainer that starts again may write its file anew: as another file under the same name, as a shorter one, or
    in place and by now longer than what was read. The first two show in `stat`; the third shows in the few bytes
    before the present position (the seam), which are compared with what they were. In all three cases `on_restart`
    is called and reading begins at 0.
    """

    __slots__ = ("_identity", "_on_restart", "_seam", "path", "position")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self.path = path
        self.position = 0
        self._on_restart = on_restart
        self._identity: tuple[int, int, int] | None = None
        self._seam = b""

    def chunks(self) -> Iterator[bytes]:
        """The new bytes in pieces of at most `CHUNK`; nothing, for the price of a `stat`, if the file is as it was."""
        try:
            status = os.stat(self.path)
            if (status.st_ino, status.st_size, status.st_mtime_ns) == self._identity:
                return
            if status.st_size == 0 and self.position == 0:
                return
            # Opened anew each time: a study may have a thousand files.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # Not there yet, gone, or a network disk that hiccups: the next poll asks again.
            return
        try:
            status = os.fstat(descriptor)
            if self.position and self._begins_anew(status, descriptor):
                self.position = 0
                self._seam = b""
                self._on_restart()
            self._identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            while chunk := os.pread(descriptor, CHUNK, self.position):
                self.position += len(chunk)
                self._seam = (self._seam + chunk)[-SEAM:] if len(chunk) < SEAM else chunk[-SEAM:]
                yield chunk
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

    __slots__ = ("_carriage_returns", "_on_restart", "_parts", "_tail")

    def __init__(self, path: Path, on_restart: Callable[[], None], *, carriage_returns: bool = False) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self._carriage_returns = carriage_returns
        self._parts: list[bytes] = []

    @property
    def position(self) -> int:
        return self._tail.position

    def blocks(self, final: bool = False) -> Iterator[list[bytes]]:
        """Lists of new lines, without their ends."""
        for chunk in self._tail.chunks():
            if self._carriage_returns:
                chunk = chunk.replace(b"\r", b"\n")
            end = chunk.rfind(b"\n")
            if end < 0:
                self._parts.append(chunk)
                if len(self._parts) > LONGEST_LINE // CHUNK and sum(map(len, self._parts)) > LONGEST_LINE:
                    # Not a line at all: hand it out as one that nobody can read, rather than hold it for ever.
                    yield self._whole()
                continue
            lines = chunk[:end].split(b"\n")
            if self._parts:
                lines[0] = self._whole()[0] + lines[0]
            if end + 1 < len(chunk):
                self._parts.append(chunk[end + 1 :])
            yield lines
        if final and self._parts:
            yield self._whole()

    def _whole(self) -> list[bytes]:
        line = b"".join(self._parts)
        self._parts.clear()
        return [line]

    def _restart(self) -> None:
        self._parts.clear()
        self._on_restart()
