"""The contract of a proposer: it looks at a study and says what to try next.

A proposer only proposes. The guard judges every proposal, the engine runs what passes, and both are recorded; a
proposer must therefore not mind being asked again after a crash for what it has proposed already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from looplab.ledger.study import StudyLedger

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


@runtime_checkable
class FileProposer(Protocol):
    """A proposer that reads files; `propose` then uses only what is in memory and in the ledger."""

    def refresh(self, study: StudyLedger) -> None:
        """Read what is new, and record it in short transactions. Called outside of any transaction, before planning;
        cheap if nothing is new."""
        ...
