"""The contract of metric sources: readers of one file that a trainer writes, each byte read once.

`poll()` returns the points written since the last call. A source never returns a point twice, waits for the rest of a
torn last record instead of failing on it, and costs one `stat` when nothing is new. A file that is replaced or
truncated is read again from its start. Bad records in the middle are skipped and counted in `skipped`. A missing value
stays missing: it never becomes 0. A file that does not exist (yet) is an empty batch, not an error.

The points do not depend on how the file is divided among polls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(slots=True)
class Curve:
    """The points of one metric, in the order in which they were written."""

    steps: list[float] = field(default_factory=list)
    """The step of each point; if the trainer logs none, the index of the row, from 0."""
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
    """Why the file could not be read completely, so that its values are not reliable; None: no problem."""

    @property
    def skipped(self) -> int:
        """The number of records that could not be read."""
        ...

    @property
    def behind(self) -> bool:
        """Whether the last poll ran out of time before the end of the file."""
        ...

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """Return the points written since the last call.

        Args:
            final: Whether the writer exited by itself, so that a last line without its newline is complete. False for
                a writer that was killed: its last line may end in half a number.
            until: When to stop (`time.monotonic()`); the next poll continues. Every poll makes progress. None: read
                to the end.

        Returns:
            The new points by metric name; empty if there are none.
        """
        ...


class SourcePlugin(Protocol):
    """A kind of metric source from another package (entry point group `looplab.sources`); usually a class.

    `measure.sources` in the lab file names it: its place in that list is its rank. Its sources have its name as `kind`.
    """

    def matches(self, name: str) -> bool:
        """Return whether a file of this name, in the run folder or below it, is of this kind."""
        ...

    def __call__(self, path: Path) -> MetricSource:
        """Return the source for a file."""
        ...


def merge(into: Batch, new: Batch) -> None:
    """Append the points of `new` to `into`."""
    for name, curve in new.items():
        if name in into:
            into[name].extend(curve)
        else:
            into[name] = Curve(list(curve.steps), list(curve.values))
