"""The contract of proposers, which look at a study and propose what to try next.

A proposer only proposes: the guard checks every proposal, the engine runs those that pass, and both are recorded. After
a crash, a proposer may be asked again for proposals that it has already made.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.ledger.catalogue import ProposerFailedEvent
from looplab.ledger.plan import Job
from looplab.ledger.roles import Origin
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import StudyView
from looplab.untrusted import clean_line

if TYPE_CHECKING:
    from looplab.decide.history import PastRun

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
"""Error numbers of an unusable disk."""
MAX_PROBLEM = 1_000
"""Maximum length of an error description, in characters."""

BEST = "best"
"""Parent of a proposal that applies to the best run at the time when it is planned, or to the base if there is none."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Edits to try next, and why."""

    edits: tuple[str, ...]
    """`path@op=value`, applied to the parent's config."""
    reason: str
    proposer: str
    parent: str | None = None
    """The run whose config the edits apply to, `best`, or None for the base."""
    hypothesis: str = ""
    id: int | None = None
    """Its number in the ledger; None if it is not recorded yet."""
    source: str | None = None
    """An idempotency key: the study accepts one proposal per source. None: no check."""
    job: Job | None = None
    """A submitted command, instead of edits."""
    continues: bool = False
    """Whether the run starts from the checkpoint of its parent, where that was stopped."""
    until: float | None = None
    """Step at which the run is stopped; None: it is trained to its end."""

    @property
    def origin(self) -> Origin:
        return Origin.of(self.proposer)


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer of another package is made with."""

    lab: Path
    guard: Guard
    """Knows the knobs and checks configs: `guard.knobs`, `guard.check(config, edits)`."""
    base: Mapping[str, Any]
    """The first base config."""
    metric: str | None
    """The objective; None: the study has none."""
    goal: Literal["min", "max"]
    ended: Callable[[], Sequence[PastRun]]
    """Returns the ended runs with their configs and metrics, oldest first."""
    wake: Callable[[], None]
    """Call it, from any thread, when proposals are ready: the engine then asks again at once."""


class Proposer(Protocol):
    """Proposes what to try next in a study."""

    name: str
    problem: str | None
    """Why it cannot propose at the moment; None if it can. The engine reports it and continues."""

    @property
    def thinking(self) -> bool:
        """Whether more proposals are on their way, so that it should be polled again soon."""
        ...

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        """Return up to `n` proposals.

        Called inside a transaction, so it must be fast; slow proposers work in a thread and are polled again.

        Args:
            study: The study to propose for.
            n: The maximum number of proposals.

        Returns:
            Proposals, the most promising first; an empty list if there is nothing to propose.
        """
        ...

    def close(self) -> None:
        """Release all resources. Nothing is called afterwards."""
        ...


class PluginProposer:
    """A proposer of another package, which reads the study and cannot write to it."""

    def __init__(self, name: str, proposer: ExternalProposer) -> None:
        self.name = name
        self.problem: str | None = None
        self._proposer = proposer

    @property
    def thinking(self) -> bool:
        try:
            return bool(getattr(self._proposer, "thinking", False))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever another package raises must not end the engine)
            self.problem = f"it failed: {describe_error(error)}"
            return False

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        self.problem = None
        try:
            with study.ledger.read_only():
                found = self._proposer.propose(StudyView(study.ledger, study.name), n)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            raise LabError("a proposer must not write to the ledger") from error
        return [replace(_checked(proposal), proposer=self.name, id=None) for proposal in found[:n]]

    def close(self) -> None:
        close = getattr(self._proposer, "close", None)
        if close is not None:
            with suppress(Exception, SystemExit):
                close()


def _checked(proposal: Proposal) -> Proposal:
    """Return a proposal of another package if its fields have the types that they should have.

    Raises:
        TypeError: They do not.
    """
    texts = {"reason": proposal.reason, "hypothesis": proposal.hypothesis}
    optional = {"parent": proposal.parent, "source": proposal.source}
    texts |= {name: text for name, text in optional.items() if text is not None}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} of a proposal is {text!r}, not a text")
    if not isinstance(proposal.edits, tuple | list) or not all(isinstance(edit, str) for edit in proposal.edits):
        raise TypeError(f"edits of a proposal are {proposal.edits!r}, not a tuple of texts")
    if proposal.until is not None and not isinstance(proposal.until, int | float):
        raise TypeError(f"until of a proposal is {proposal.until!r}, not a number")
    return proposal


class ExternalProposer(Protocol):
    """A proposer from another package (entry point group `looplab.proposers`).

    Usually a class; it is called with a `ProposerContext` and the options in the lab file. It may also have `thinking`
    and `close`, as in `Proposer`.
    """

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        """Return up to `n` proposals, quickly; see `Proposer.propose`."""
        ...


def is_environmental(error: BaseException) -> bool:
    """Return whether an exception is caused by the machine (disk, ledger) and not by the data being handled."""
    if isinstance(error, sqlite3.Error):
        return not isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | sqlite3.ProgrammingError)
    return isinstance(error, OSError) and error.errno in FULL_DISK


def describe_error(error: BaseException) -> str:
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
    """Return the proposals of a proposer; an empty list if it raises, with the error recorded as its problem.

    Args:
        proposer: The proposer to ask.
        study: The study to propose for.
        n: The maximum number of proposals.

    Raises:
        Exception: An error of the disk or the ledger, which is not the proposer's fault.
    """
    previous = proposer.problem
    try:
        with study.ledger.write(), study.ledger.savepoint():
            return proposer.propose(study, n)
    except (Exception, SystemExit) as error:
        if is_environmental(error):
            raise
        proposer.problem = f"it failed: {describe_error(error)}"
        if proposer.problem != previous:  # a proposer is polled; the same problem is recorded once
            with study.ledger.write():
                event = ProposerFailedEvent(proposer=proposer.name, why=proposer.problem)
                study.ledger.record(event, study.name)
        return []


@runtime_checkable
class FallibleProposer(Protocol):
    """A proposer that can fail temporarily, such as a service that does not answer, and is then retried."""

    @property
    def failure(self) -> str | None:
        """Why it gave up; None if it has not, or is being retried."""
        ...

    @property
    def retry_at(self) -> float | None:
        """Time of the next retry (`clock.now`) if no other proposer has proposals; None if it has not given up."""
        ...


@runtime_checkable
class FileProposer(Protocol):
    """A proposer that reads files in `refresh`; its `propose` uses only memory and the ledger."""

    def refresh(self, study: StudyLedger) -> None:
        """Read what is new and record it in short transactions.

        Called before planning, outside any transaction; must be cheap if nothing is new.
        """
        ...
