"""CSV logs with a header line, such as `progress.csv` and `metrics.csv`."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from looplab.measure.base import Batch
from looplab.measure.lines import LineSource

DELIMITERS = ",;\t"


class CsvSource(LineSource):
    """Each column is a metric; a cell that is not a number is missing.

    A header that is repeated in mid-file (by a restarted trainer that appends) is not a row. Some loggers rewrite the
    whole file with a wider header when a new metric appears: rows that were already returned are then not returned
    again.
    """

    kind = "csv"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._header: tuple[str, ...] = ()
        self._header_line = ""
        self._delimiter = ","
        self._returned = 0
        self._previous: tuple[tuple[str, ...], int] | None = None
        self._repeats = 0

    def on_restart(self) -> None:
        self._previous = (self._header, self._returned)
        self._header = ()
        self._returned = 0

    def _fold(self, raw_lines: list[bytes], batch: Batch) -> None:
        lines = [line for raw in raw_lines if (line := raw.decode("utf-8", "replace").rstrip("\r")).strip()]
        start = 0
        for index, line in enumerate(lines):
            if not self._header:
                self._read_first_line(line)
                start = index + 1
            elif line == self._header_line or (not _starts_with_number(line) and self._is_another_header(line)):
                self._fold_block(lines[start:index], batch)
                self._set_header(line)
                start = index + 1
        self._fold_block(lines[start:], batch)

    def _read_first_line(self, line: str) -> None:
        line = line.removeprefix("\ufeff")
        if line.startswith("#{") or (line.startswith("#") and not any(sign in line for sign in DELIMITERS)):
            return  # a comment, such as that of Stable-Baselines3's Monitor
        self._delimiter = max(DELIMITERS, key=line.count)
        cells = self._split(line)
        if all(cell == "" or _parse_float(cell) is not None for cell in cells):
            self.skipped += 1
            return
        self._set_header(line)
        if self._previous is not None:
            header, returned = self._previous
            self._repeats = returned if set(header) < set(self._header) else 0
            self._previous = None

    def _set_header(self, line: str) -> None:
        self._header_line = line
        self._header = tuple(cell.strip().lstrip("#").strip() for cell in self._split(line))

    def _is_another_header(self, line: str) -> bool:
        cells = [cell.strip() for cell in self._split(line)]
        return (
            len(set(cells)) == len(cells)
            and not set(cells).isdisjoint(self._header)
            and all(cell and _parse_float(cell) is None for cell in cells)
        )

    def _split(self, line: str) -> list[str]:
        if '"' not in line:
            return line.split(self._delimiter)
        try:
            return next(csv.reader([line], delimiter=self._delimiter), [])
        except csv.Error:
            return []

    def _fold_block(self, lines: list[str], batch: Batch) -> None:
        if not lines:
            return
        width = len(self._header)
        rows = [cells for cells in map(self._split, lines) if len(cells) == width]
        self.skipped += len(lines) - len(rows)
        if not rows:
            return
        repeated = min(self._repeats, len(rows))
        if repeated:
            self._repeats -= repeated
            self._fold_cells(rows[:repeated], {})
            rows = rows[repeated:]
        if rows:
            self._fold_cells(rows, batch)

    def _fold_cells(self, rows: list[list[str]], batch: Batch) -> None:
        self._returned += len(rows)
        columns = [_parse_column(column) for column in zip(*rows, strict=True)]
        self._rows.fold_columns(self._header, columns, len(rows), batch)


_NUMBER_START = re.compile(r"[\s\"]*[-+.\d]")


def _starts_with_number(line: str) -> bool:
    return _NUMBER_START.match(line) is not None


def _parse_column(column: tuple[str, ...]) -> list[float] | list[float | None]:
    try:
        return list(map(float, column))
    except ValueError:
        return [_parse_float(cell) for cell in column]


def _parse_float(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
