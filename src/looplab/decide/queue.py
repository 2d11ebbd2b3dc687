"""The queue: proposals of people, from a file of the lab or from `looplab propose`, first in, first out.

The file is never written: each entry is identified by its content and its index among equal ones, and the ledger
records which entries were taken. Entries may be added to the file at any time.

A file may have tens of thousands of entries. It is parsed outside transactions, and in a thread if it is large; its
entries are recorded in batches, so that other processes can write to the ledger in between.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import Any

from looplab.config.edits import parse_edit
from looplab.config.files import NotAMapping, canonical_json, read_config, read_document
from looplab.decide.base import Proposal, describe_error
from looplab.errors import LabError
from looplab.ledger.roles import Origin
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import ProposalRow
from looplab.runs.folder import hash_bytes, hash_file

KEYS = {"edits", "reason", "hypothesis", "parent"}
FORM = "as in proposals: [{edits: [train.lr@mul=0.5], reason: the loss is noisy}]"
PORTION = 200
"""Maximum number of proposals recorded in one transaction."""
LARGE = 1 << 15
"""File size in bytes above which it is parsed in a thread; YAML takes about 10 µs per byte."""

Entry = tuple[Proposal, str]
"""A proposal and its source, under which it is recorded only once."""


class QueueProposer:
    """Proposes what waits in the ledger's queue, and fills the queue from a file."""

    name: str = Origin.QUEUE

    def __init__(self, file: Path | None = None, *, background: bool = True) -> None:
        """`background`: parse large files in a thread; False: `refresh` returns when the file is parsed."""
        self._file = file
        self._background = background
        self._stamp: tuple[int, int, int] | None = None
        self._reading: _Reading | None = None
        self._left: deque[Entry] = deque()
        self._digest: str | None = None  # of the file that `_left` comes from
        self.problem: str | None = None

    @property
    def thinking(self) -> bool:
        """Whether the file is being parsed."""
        return self._reading is not None

    @property
    def left(self) -> int:
        """Number of entries of the file that are not recorded yet; some may turn out to be known."""
        return len(self._left)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def refresh(self, study: StudyLedger) -> None:
        if self._file is None:
            return
        if self._reading is None:
            self._start_reading(self._file, study)
        if self._reading is not None and self._reading.done:
            reading, self._reading = self._reading, None
            # If the file is invalid or just being written, the entries read before stay valid.
            self.problem = reading.problem
            if reading.problem is None:
                self._left = deque(reading.entries)
                self._digest = reading.digest
        self._record_portion(study)

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        rows = study.waiting(n)
        if not rows and self._left:
            self._record_portion(study)
            rows = study.waiting(n)
        return [waiting(row) for row in rows]

    def _start_reading(self, file: Path, study: StudyLedger) -> None:
        try:
            stamp = _stamp(file)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            what = "the queue's file does not exist" if missing else f"cannot read the queue's file: {error.strerror}"
            self.problem = str(LabError(what, file=file, hint="see proposers in lab.yaml"))
            self._stamp = None
            return
        if stamp == self._stamp:
            return
        self._stamp = stamp
        digest = hash_file(file)
        if digest is not None and digest == study.queue_taken(file.name):
            self.problem = None
            return
        self._reading = _Reading(file, digest)
        if self._background and stamp[2] > LARGE:
            threading.Thread(target=self._reading.run, name="queue", daemon=True).start()
        else:
            self._reading.run()

    def _record_portion(self, study: StudyLedger) -> None:
        """Record the next entries of the file in the ledger, and once all are recorded, the hash of the file."""
        if not self._left and self._digest is None:
            return
        new: list[Entry] = []
        while self._left and len(new) < PORTION:
            proposal, source = self._left.popleft()
            if not study.has_source(source):
                new.append((proposal, source))
        with study.ledger.write():
            for proposal, source in new:
                study.propose(
                    self.name,
                    proposal.edits,
                    proposal.reason,
                    parent=proposal.parent,
                    hypothesis=proposal.hypothesis,
                    source=source,
                )
            if not self._left and self._digest is not None and self._file is not None:
                study.note_queue_taken(self._file.name, self._digest)
                self._digest = None


class _Reading:
    """One parse of a queue file, possibly in a thread."""

    def __init__(self, file: Path, digest: str | None) -> None:
        self._file = file
        self.entries: list[Entry] = []
        self.digest = digest
        self.problem: str | None = None
        self.done = False

    def run(self) -> None:
        try:
            self.entries = read_queue(self._file)
            if hash_file(self._file) != self.digest:
                self.digest = None  # changed while it was parsed: the hash is not that of the entries
        except Exception as error:  # noqa: BLE001 (no content of a file may crash the engine)
            self.problem = describe_error(error)
        self.done = True


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def waiting(row: ProposalRow) -> Proposal:
    """Return a row of the ledger's queue as a proposal."""
    return Proposal(row.edits, row.reason, row.proposer, row.parent, row.hypothesis, row.id, row.source, row.job)


def read_queue(path: Path) -> list[Entry]:
    """Return the entries of a queue file (`proposals: [...]`).

    Raises:
        LabError: The file is not valid.
    """
    with contextlib.suppress(OSError):
        return _read_queue(path, _stamp(path))
    return _read_queue(path, None)  # raises the error of the missing file


@lru_cache(maxsize=1)
def _read_queue(path: Path, stamp: tuple[int, int, int] | None) -> list[Entry]:
    """Parse a queue file. The last one is cached: it is checked before the engine starts, and read by the engine."""
    try:
        items: Any = read_config(path).get("proposals")
    except NotAMapping as error:
        raise LabError("a queue file must contain a list `proposals:`", file=path, line=error.line, hint=FORM) from None
    if not isinstance(items, list):
        raise LabError("a queue file must contain a list `proposals:`", file=path, hint=FORM)
    counts: dict[str, int] = {}
    entries = []
    for i, entry in enumerate(items):
        try:
            proposal = _parse_entry(i, entry)
        except LabError as error:
            line = read_document(path).line_of(("proposals", i))  # slower than `read_config`, but it has the lines
            raise LabError(error.message, file=path, line=line, hint=error.hint) from None
        content = hash_bytes(canonical_json(entry))[:16]
        counts[content] = counts.get(content, 0) + 1
        entries.append((proposal, f"{path.name}:{content}:{counts[content]}"))
    return entries


def _parse_entry(i: int, entry: Any) -> Proposal:
    unknown = sorted(map(str, set(entry) - KEYS)) if isinstance(entry, dict) else []
    if unknown:
        raise LabError(f"proposal {i + 1}: unknown key {unknown[0]!r}", hint=f"known: {', '.join(sorted(KEYS))}")
    if not isinstance(entry, dict) or not isinstance(entry.get("edits"), list):
        raise LabError(f"proposal {i + 1} needs a list `edits:`", hint=FORM)
    return Proposal(
        tuple(str(parse_edit(str(edit))) for edit in entry["edits"]),
        str(entry.get("reason", "")),
        QueueProposer.name,
        None if entry.get("parent") in (None, "base") else str(entry["parent"]),
        str(entry.get("hypothesis", "")),
    )
