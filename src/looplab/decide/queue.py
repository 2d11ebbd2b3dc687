"""The queue: what people want to be tried, from a file of the lab or from `looplab propose`, first come, first served.

The file is only read, never rewritten: each entry is known by its content and its place among equal ones, and what
was taken stands in the ledger. Entries may be added to the file at any time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from looplab.config.edits import parse_edit
from looplab.config.files import canonical_json, read_document
from looplab.decide.base import Proposal, describe_error, is_environmental
from looplab.errors import LabError
from looplab.ledger.study import ProposalRow, StudyLedger

KEYS = {"edits", "reason", "hypothesis", "parent"}


class QueueProposer:
    name = "queue"
    thinking = False

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._read_at: tuple[int, int] | None = None
        self.problem: str | None = None

    def close(self) -> None:
        """There is nothing to let go of."""

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        try:
            self._take_in(study)
            self.problem = None
        except Exception as error:
            # Somebody is writing it this moment, or made a mistake: what was taken in before is still good.
            if is_environmental(error):
                raise
            self.problem = describe_error(error)
        return [waiting(row) for row in study.waiting(n)]

    def _take_in(self, study: StudyLedger) -> None:
        """Put new entries of the file into the ledger's queue."""
        if self._file is None:
            return
        try:
            status = self._file.stat()
        except FileNotFoundError as error:
            raise LabError(
                "the queue's file is not there", file=self._file, hint="see proposers in lab.yaml"
            ) from error
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._read_at:
            return
        with study.ledger.write():
            for proposal, source in read_queue(self._file):
                study.propose(
                    self.name,
                    proposal.edits,
                    proposal.reason,
                    parent=proposal.parent,
                    hypothesis=proposal.hypothesis,
                    source=source,
                )
        self._read_at = stamp


def waiting(row: ProposalRow) -> Proposal:
    """A proposal that waits in the ledger."""
    return Proposal(row.edits, row.reason, row.proposer, row.parent, row.hypothesis, row.id, row.source)


def read_queue(path: Path) -> list[tuple[Proposal, str]]:
    """The entries of a queue file (`proposals: [...]`), each with the name under which it is taken only once."""
    document = read_document(path)
    listed: Any = document.plain().get("proposals")
    if not isinstance(listed, list):
        raise LabError("a queue file holds a list `proposals:`", file=path)
    seen: dict[str, int] = {}
    found = []
    for i, entry in enumerate(listed):
        line = document.line_of(("proposals", i))
        if not isinstance(entry, dict) or not isinstance(entry.get("edits"), list):
            raise LabError(f"proposal {i + 1} needs a list `edits:`", file=path, line=line)
        unknown = sorted(set(entry) - KEYS)
        if unknown:
            raise LabError(
                f"unknown key {unknown[0]!r}", file=path, line=line, hint=f"known: {', '.join(sorted(KEYS))}"
            )
        try:
            edits = tuple(str(parse_edit(str(edit))) for edit in entry["edits"])
        except LabError as error:
            raise LabError(error.message, file=path, line=line, hint=error.hint) from None
        content = hashlib.sha256(canonical_json(entry)).hexdigest()[:16]
        seen[content] = seen.get(content, 0) + 1
        proposal = Proposal(
            edits,
            str(entry.get("reason", "")),
            QueueProposer.name,
            None if entry.get("parent") in (None, "base") else str(entry["parent"]),
            str(entry.get("hypothesis", "")),
        )
        found.append((proposal, f"{path.name}:{content}:{seen[content]}"))
    return found
