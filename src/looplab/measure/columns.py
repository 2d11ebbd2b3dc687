"""Rows of bare numbers in printed text: a count in the first column, and values in the others.

0 0.9084 0.9993          # iter, energy, gradient
1 0.8257 0.9083          0, 0.9084, 0.9993
2 0.7473 0.8221          10, 0.8257, 0.9083
"""

from __future__ import annotations

import re

from looplab.measure.printed import NUMBER, Printed, Step
from looplab.measure.words import INDEX, RANK

MIN_ROWS = 3
"""Rows whose first column must count up evenly; two rows of a matrix may do so by chance."""
MAX_COLUMNS = 32
MAX_LINE = 600
_ROW = re.compile(rf"\s*+{NUMBER}(?:\s*+[,;]\s*+{NUMBER}|\s++{NUMBER}){{1,{MAX_COLUMNS}}}\s*+\Z", re.ASCII)
_BETWEEN = re.compile(r"\s*[,;]\s*|\s+")
_NAME = re.compile(r"[A-Za-z_][\w./@()-]*\Z", re.ASCII)


class NumberColumns:
    """Reads such rows line by line. The names are those of the line above the first row, else `column_2`, …"""

    __slots__ = ("_above", "_is_confirmed", "_names", "_rows")

    def __init__(self) -> None:
        self._above = ""
        """The last line that is not a row."""
        self._rows: list[list[float]] = []
        """Rows until it is certain that the first column is a counter; then only the last row."""
        self._names: list[str] = []
        self._is_confirmed = False

    def read(self, line: str) -> list[Printed]:
        """Return the rows that are certain after this line."""
        if line[:1].strip(" \t-+.0123456789") or len(line) > MAX_LINE or not _ROW.match(line):
            self._above, self._rows, self._is_confirmed = line, [], False
            return []
        row = [float(cell) for cell in _BETWEEN.split(line.strip())]
        if not self._continues(row):
            self._rows, self._is_confirmed = [row], False
            return []
        self._rows.append(row)
        if self._is_confirmed:
            self._rows = self._rows[-2:]
            return [self._printed(row)]
        if len(self._rows) < MIN_ROWS:
            return []
        self._is_confirmed, self._names = True, self._find_names(len(row))
        return [self._printed(one) for one in self._rows]

    def _continues(self, row: list[float]) -> bool:
        """Return whether a row counts on from the last ones."""
        if not self._rows or len(row) != len(self._rows[-1]):
            return False
        ahead = row[0] - self._rows[-1][0]
        if ahead <= 0 or not row[0].is_integer() or not self._rows[-1][0].is_integer():
            return False
        return self._is_confirmed or len(self._rows) < 2 or ahead == self._rows[-1][0] - self._rows[-2][0]

    def _find_names(self, count: int) -> list[str]:
        names = _BETWEEN.split(self._above.strip().lstrip("#%/ "))
        if len(names) == count and all(map(_NAME.match, names)) and len({*names}) == count:
            return names
        return [f"column_{number}" for number in range(1, count + 1)]

    def _printed(self, row: list[float]) -> Printed:
        first, *names = self._names
        step = Step(RANK.get(first.lower(), INDEX), "", row[0])
        return Printed(list(zip(names, row[1:], strict=True)), [step], certain=True)
