"""The contract of a metric source: one kind of file a trainer leaves behind, read once and never again.

A source belongs to one file. `poll()` returns what was written since the last call and nothing else; a source
never re-reads what it has already returned, never fails on a torn last record (it waits for the rest), and costs
one `stat` when nothing is new. A file that is replaced or truncated is read again from its start. Bad records in
the middle are skipped and counted in `skipped`. A missing value is missing: it never becomes 0. A file that is not
there (yet) is an empty batch, not an error.

However a file is cut into polls, the points that come out are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(slots=True)
class Curve:
    """The points of one metric, in the order in which they were written."""

    steps: list[float] = field(default_factory=list)
    """The step of each point; where the trainer logs none, the number of the row, counted from 0."""
    values: list[float] = field(default_factory=list)
    """The value of each point; NaN and infinities are kept as such."""

    def add(self, step: float, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def extend(self, other: Curve) -> None:
        self.steps.extend(other.steps)
        self.values.extend(other.values)


Batch = dict[str, Curve]
"""New points by metric name."""


class MetricSource(Protocol):
    """One file of metrics."""

    kind: str
    """`jsonl`, `csv`, `stdout`, …"""
    path: Path
    problem: str | None
    """Why the file could not be read as it should be, so that what it says is not to be relied on; None: it could."""

    @property
    def skipped(self) -> int:
        """How many records could not be read."""
        ...

    @property
    def position(self) -> int:
        """How many bytes of the file were read so far; the same number before and after a poll: nothing was new."""
        ...

    @property
    def behind(self) -> bool:
        """Whether the last poll ran out of time: what the file holds beyond its position is still to be read."""
        ...

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """The points written since the last call.

        `final` says that the writer ended by itself: a last line without its newline is then a whole line. Leave it
        off for a writer that was killed, whose last line may be half a number. `until` is when to stop, by
        `time.monotonic()`: the rest is read by the next poll, and something is read by each.
        """
        ...


def merge(into: Batch, new: Batch) -> None:
    """Append the points of `new` to `into`."""
    for name, curve in new.items():
        if name in into:
            into[name].extend(curve)
        else:
            into[name] = Curve(list(curve.steps), list(curve.values))


def points(batches: Sequence[Batch]) -> int:
    return sum(len(curve.values) for batch in batches for curve in batch.values())
