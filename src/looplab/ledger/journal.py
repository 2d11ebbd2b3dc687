"""The journal: a second copy of every event, one line of JSON each, in an append-only file next to the database.

With it, the chain survives the loss of the database: `looplab reindex` restores the events, and an engine does not
start if the database is shorter than its journal (a damaged log, an old copy put back).

A line is written after the commit, never before: every event in the journal was committed, and a journal that ends
early is completed from the database. Several processes append, one at a time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from looplab.untrusted import UntrustedError, dump_json, load_json, open_regular

NAME = "journal.jsonl"
_DATA = b',"data":'
_TAIL_BYTES = 1 << 16
MAX_SEQ = (1 << 63) - 1
"""Largest integer that SQLite can store."""
MAX_LINE = 1 << 26
"""Size limit of one event in bytes; a longer line was not written by the ledger."""


class Link(NamedTuple):
    """An event as it is hashed: a row of the table `events`."""

    seq: int
    at: float
    kind: str
    study: str
    run: str | None
    data: str
    """The payload as JSON, byte for byte."""
    hash: str

    def line(self) -> bytes:
        """Return the event as a line of the journal."""
        head = dump_json(
            {"seq": self.seq, "at": self.at, "kind": self.kind, "study": self.study, "run": self.run, "hash": self.hash}
        )
        return f'{head[:-1]},"data":{self.data}}}\n'.encode()

    @classmethod
    def parse(cls, line: bytes) -> Link | None:
        """Parse a line of the journal; None if it is not an event."""
        split = line.find(_DATA)
        if split < 0 or not line.endswith(b"}"):
            return None
        try:
            head = load_json(line[:split] + b"}")
            data = line[split + len(_DATA) : -1].decode()
            link = cls(head["seq"], head["at"], head["kind"], head["study"], head["run"], data, head["hash"])
        except (UntrustedError, UnicodeDecodeError, KeyError, TypeError):
            return None
        return link if type(link.seq) is int and 0 < link.seq <= MAX_SEQ and isinstance(link.hash, str) else None


class Journal:
    """The journal of a ledger; the file is opened on the first append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._end: tuple[int, int] | None = None  # (file size, number of the last event) after the last append

    def last(self) -> tuple[int, str] | None:
        """Return number and hash of the last complete event; None if there is no journal, or no event in it."""
        try:
            with open_regular(self.path, follow=False) as file:
                size = file.seek(0, os.SEEK_END)
                span = min(size, _TAIL_BYTES)
                while True:
                    file.seek(size - span)
                    lines = file.read(span).split(b"\n")[:-1]  # anything after the last line break is torn
                    complete = lines if span == size else lines[1:]
                    for line in reversed(complete):
                        link = Link.parse(line)
                        if link is not None:
                            return link.seq, link.hash
                    if span == size or span >= MAX_LINE:
                        return None
                    span = min(size, span * 16)
        except (OSError, UntrustedError):
            return None

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def read(self) -> Iterator[tuple[int, Link | None]]:
        """Yield every line with its number, from 1; None for a damaged line. A torn last line is omitted.

        Raises:
            OSError, UntrustedError: The file cannot be opened.
        """
        with open_regular(self.path, follow=False) as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) < MAX_LINE:
                        return
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE)
                    yield number, None
                else:
                    yield number, Link.parse(line[:-1])

    def append(self, links: Sequence[Link]) -> bool:
        """Append events that directly follow the last one. Returns False if another process holds or has changed the
        file; then call `complete`."""
        with _Locked(self) as descriptor:
            if descriptor is None or self._end is None:  # it was opened just now, or again
                return False
            if self._end != (os.fstat(descriptor).st_size, links[0].seq - 1):
                return False
            self._write(descriptor, links)
            return True

    def complete(self, after: Any) -> bool:
        """Append all missing events; `after(seq)` returns the events after that number. Returns False if another
        process holds the file."""
        with _Locked(self) as descriptor:
            if descriptor is None:
                return False
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                self._cut_torn_line(descriptor, size)
            last = self.last()
            self._end = (os.fstat(descriptor).st_size, last[0] if last else 0)
            links = list(after(self._end[1]))
            if links:
                self._write(descriptor, links)
            return True

    def _write(self, descriptor: int, links: Sequence[Link]) -> None:
        content = b"".join(link.line() for link in links)
        size = os.fstat(descriptor).st_size
        remaining = memoryview(content)
        try:
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
        except OSError:
            os.ftruncate(descriptor, size)  # a partial line would look like damage
            raise
        self._end = (size + len(content), links[-1].seq)

    def _cut_torn_line(self, descriptor: int, size: int) -> None:
        """Truncate the file after its last line break: a writer was killed in the middle of a write."""
        end = size
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            line_break = os.pread(descriptor, end - start, start).rfind(b"\n")
            if line_break >= 0:
                os.ftruncate(descriptor, start + line_break + 1)
                return
            end = start
        os.ftruncate(descriptor, 0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._end = None

    def open(self) -> int:
        """Return a descriptor for appending; reopens the file if it was replaced."""
        if self._descriptor is not None:
            try:
                opened, current = os.fstat(self._descriptor), os.stat(self.path, follow_symlinks=False)
                if (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino):
                    return self._descriptor
            except FileNotFoundError:
                pass
            self.close()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(self.path, flags, 0o644)
        return self._descriptor


class _Locked:
    """Locks the journal for one writer; yields its descriptor, or None if another process holds the lock."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._locked: int | None = None

    def __enter__(self) -> int | None:
        descriptor = self._journal.open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        self._locked = descriptor
        return descriptor

    def __exit__(self, *_: object) -> None:
        if self._locked is not None:
            fcntl.flock(self._locked, fcntl.LOCK_UN)
