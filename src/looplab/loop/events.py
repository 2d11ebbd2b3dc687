"""What an engine reports to its listeners while it runs.

These events are for live observers of a study: the terminal, a callback, a page. What has to survive is in the
ledger, whose events are another thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something that happened in a running study."""

    kind: ClassVar[str] = ""
    text: str
    """One line for people."""
    run: str | None = None
    """The run it is about, if it is about one."""


@dataclass(frozen=True, slots=True)
class Note(EngineEvent):
    """Something that a person should know and need not act on."""

    kind = "note"


@dataclass(frozen=True, slots=True)
class AlarmRaised(EngineEvent):
    """Something that a person should look at."""

    kind = "alarm"


@dataclass(frozen=True, slots=True)
class Waiting(EngineEvent):
    """The study cannot continue at once: a device is busy, an agent failed, a disk is full."""

    kind = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlanned(EngineEvent):
    """A round was decided."""

    kind = "round"
    round: int
    runs: int
    """Runs of it that are planned so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnded(EngineEvent):
    """All runs of a round have ended."""

    kind = "round"
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLaunched(EngineEvent):
    """A run was handed to the executor."""

    kind = "launched"
    slot: str


@dataclass(frozen=True, slots=True)
class RunAdopted(EngineEvent):
    """A run that an earlier engine started is still running, and this engine continues with it."""

    kind = "adopted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(EngineEvent):
    """A run has ended and is recorded."""

    kind = "ended"
    status: str
    """ok | failed | timeout | stopped | lost"""
    objective: float | None
    """None: not measured, or the run did not end well."""
    seconds: float | None
    is_best: bool
    """Whether it is the best run so far. With a judge, a single run is only a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalRefused(EngineEvent):
    """A proposal did not become a run."""

    kind = "rejected"
    proposal: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven(EngineEvent):
    """The judge decided about a run, or (without a run) summed up the study."""

    kind = "judged"
    verdict: str | None = None
    """keep | discard | inconclusive | crash | void"""


Listener = Callable[[EngineEvent], None]
"""Called in the engine's thread; slow listeners slow the study down."""
