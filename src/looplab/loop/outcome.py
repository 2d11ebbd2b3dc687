"""How far an engine is, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from looplab.errors import LabError
from looplab.ledger.view import RunRow


class Ending(StrEnum):
    """How an engine ended."""

    DONE = "done"
    DRAINED = "drained"
    STOPPED = "stopped"
    FAILED = "failed"
    """No base config works, so nothing can be compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    ending: Ending
    why: str
    """Why nothing more is tried, in words."""


@dataclass(slots=True)
class Progress:
    """Progress of a study."""

    done: int = 0
    failed: int = 0
    total: int | None = None
    """Maximum number of runs; None: unknown."""
    seconds: float = 0.0
    """Total seconds of the runs of this engine."""
    timed: int = 0

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.timed if self.timed else None

    def add(self, run: RunRow) -> None:
        """Count a run that has ended."""
        self.done += 1
        self.failed += run.status == "failed"
        if run.seconds is not None:
            self.seconds += run.seconds
            self.timed += 1


class HaltError(LabError):
    """The engine cannot continue, but nothing is lost."""

    exit_code = 1
