"""A base for metric sources that read text files line by line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.measure.base import Batch
from looplab.measure.rows import RowAccumulator
from looplab.measure.tail import LineTail


class LineSource:
    """Reads a text file line by line. A subclass sets `kind`, says which files it reads, and parses a line.

    class TsvSource(LineSource):
        kind = "tsv"

        @staticmethod
        def matches(name):
            return name.endswith(".tsv")

        def parse_line(self, line):
            step, loss = line.split("\\t")
            return {"step": int(step), "loss": float(loss)}
    """

    kind = ""
    problem: str | None = None

    def __init__(self, path: Path, *, rows: RowAccumulator | None = None, carriage_returns: bool = False) -> None:
        self.path = path
        self.skipped = 0
        self._lines = LineTail(path, self._restart, carriage_returns=carriage_returns)
        self._rows = rows or RowAccumulator()

    @staticmethod
    def matches(name: str) -> bool:
        """Return whether a file of this name is of this kind."""
        raise NotImplementedError

    def parse_line(self, line: str) -> Mapping[str, Any] | None:
        """Return the values of a line by name, with its `step` if it has one; None: the line has no values.

        A ValueError, or any error of indexing or types, counts the line as skipped.
        """
        raise NotImplementedError

    def on_restart(self) -> None:
        """Forget what was read, such as a header: the file was replaced, and is read again from its start."""

    @property
    def behind(self) -> bool:
        """Whether the last poll ran out of time before the end of the file."""
        return self._lines.behind

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """Return the points written since the last call; see `MetricSource.poll`."""
        batch: Batch = {}
        for lines in self._lines.blocks(final, until):
            self._fold(lines, batch)
        return batch

    def _fold(self, raw_lines: list[bytes], batch: Batch) -> None:
        """Add the points of some lines to a batch."""
        self._rows.fold_rows([row for line in raw_lines if (row := self._parse(line)) is not None], batch)

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = self.parse_line(line.decode("utf-8", "replace").rstrip("\r\n"))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            self.skipped += 1
            return None
        return dict(row) if row is not None else None

    def _restart(self) -> None:
        self._rows.reset()
        self.on_restart()
