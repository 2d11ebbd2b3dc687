"""The contract of a proposer: it looks at a study and says what to try next.

A proposer only proposes. The guard judges every proposal, the engine runs what passes, and both are recorded; a
proposer must therefore not mind being asked again after a crash for what it has proposed already.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from looplab.errors import LabError
from looplab.ledger.study import StudyLedger
from looplab.untrusted import clean_line

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
MAX_PROBLEM = 1_000
"""Characters of a sentence about what went wrong."""

BEST = "best"
"""As a proposal's parent: the best run at the time when the proposal gets its turn, else the base."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to try next, and why."""

    edits: tuple[str, ...]
    """`path@op=value`, applied to the parent's config."""
    reason: str
    proposer: str
    parent: str | None = None
    """The run whose config the edits apply to, `best`, or None for the base."""
    hypothesis: str = ""
    id: int | None = None
    """Its number in the ledger, where it waits there."""
    source: str | None = None
    """Where it came from, by a name under which it is taken only once."""


class Proposer(Protocol):
    name: str
    problem: str | None
    """What keeps it from proposing at the moment; the engine says so and goes on."""

    @property
    def thinking(self) -> bool:
        """Whether it is still at it: what it gives now is not all, ask again soon."""
        ...

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        """Up to `n` proposals, the most wanted first; none when there is nothing to propose. Called inside a
        transaction, so it must not take long: who needs time thinks elsewhere, and is asked again."""
        ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


def is_environmental(error: Exception) -> bool:
    """Return whether an exception is about the machine (disk, ledger) and not about the data being handled."""
    if isinstance(error, sqlite3.Error):
        return not isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | sqlite3.ProgrammingError)
    return isinstance(error, OSError) and error.errno in FULL_DISK


def describe_error(error: Exception) -> str:
    """Return an exception as one sentence, for the record and for people."""
    if isinstance(error, LabError):
        return clean_line(str(error), MAX_PROBLEM)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return clean_line(f"{where}{os.strerror(error.errno)}", MAX_PROBLEM)
    return clean_line(f"{type(error).__name__}: {error}", MAX_PROBLEM)


def ask(proposer: Proposer, study: StudyLedger, n: int) -> list[Proposal]:
    """Return the proposals of a proposer; if it raises, record that as its problem and return none.

    Trouble with the disk or the ledger is not the proposer's and is raised.
    """
    before = proposer.problem
    try:
        with study.ledger.write(), study.ledger.savepoint():
            return proposer.propose(study, n)
    except Exception as error:
        if is_environmental(error):
            raise
        proposer.problem = f"it failed: {describe_error(error)}"
        if proposer.problem != before:  # it is asked again and again; the record names each problem once
            with study.ledger.write():
                study.ledger.record("proposer failed", study.name, proposer=proposer.name, why=proposer.problem)
        return []


@runtime_checkable
class FallibleProposer(Protocol):
    """A proposer that can fail for a while, such as a service that does not answer, and is then asked again."""

    @property
    def failure(self) -> str | None:
        """Why it gave up; None if it has not, or is asked again."""
        ...

    @property
    def retry_at(self) -> float | None:
        """When it is asked again (`clock.now`) if nobody else proposes; None if it has not given up."""
        ...


@runtime_checkable
class FileProposer(Protocol):
    """A proposer that reads files; `propose` then uses only what is in memory and in the ledger."""

    def refresh(self, study: StudyLedger) -> None:
        """Read what is new, and record it in short transactions. Called outside of any transaction, before planning;
        cheap if nothing is new."""
        ...
