"""A log of bounded size: the beginning and the end, with a line between them that says how much was dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from looplab.errors import LabError

PER_LINE = 64
"""Overhead in bytes of a line held in memory."""


class BoundedLog:
    """Appends lines to a file. Once the first half is full, the last lines are held in memory until it is closed."""

    def __init__(
        self, path: Path, limit: int, render: Callable[[str], str], omitted: Callable[[int, int], str]
    ) -> None:
        """
        Args:
            limit: Bytes of all lines together.
            render: Returns the text to write for a line; not called for dropped lines and for those added as clean.
            omitted: Returns the line that says how many lines and characters were dropped.
        """
        self._path = path
        self._render = render
        self._omitted = omitted
        self._room = self._half = limit // 2
        self._held: deque[tuple[str, bool]] = deque()
        self._held_size = 0
        self._dropped = [0, 0]
        self._is_full = False
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> BoundedLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._write_rest()

    def add(self, line: str, *, clean: bool = False) -> None:
        """Append a line; a clean one is written unchanged."""
        if not self._is_full:
            data = self._rendered(line, clean)
            if len(data) <= self._room:
                self._room -= len(data)
                self._write(data)
                return
            self._is_full = True
        self._held.append((line, clean))
        self._held_size += len(line) + PER_LINE
        while self._held_size > self._half and len(self._held) > 1:
            self._drop(self._held.popleft()[0])

    def _drop(self, line: str) -> None:
        self._held_size -= len(line) + PER_LINE
        self._dropped[0] += 1
        self._dropped[1] += len(line)

    def _write_rest(self) -> None:
        rest: deque[bytes] = deque()
        room = self._half
        while self._held:
            line, clean = self._held.pop()
            data = self._rendered(line, clean)
            if len(data) > room:
                self._held.append((line, clean))
                break
            room -= len(data)
            rest.appendleft(data)
        for line, _ in self._held:
            self._drop(line)
        self._held.clear()
        if self._dropped[0]:
            self._write(self._omitted(*self._dropped).encode() + b"\n")
        for data in rest:
            self._write(data)

    def _rendered(self, line: str, clean: bool) -> bytes:
        """Return the bytes of a line; one that is larger than half of the log is cut."""
        data = (line if clean else self._render(line)).encode("utf-8", "replace") + b"\n"
        if len(data) > self._half:
            data = self._render(line[: self._half // 16] + "…").encode("utf-8", "replace") + b"\n"
        return data

    def _write(self, data: bytes) -> None:
        with writing(self._path):
            self._file.write(data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a LabError that names the log."""
    try:
        yield
    except OSError as error:
        raise LabError(f"the agent's log cannot be written: {error.strerror}", file=path) from None
