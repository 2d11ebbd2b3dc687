"""`metrics.jsonl`: one JSON object per line, as written by `trainkit.log()` and many trainers."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from looplab.measure.base import Batch
from looplab.measure.rows import RowAccumulator
from looplab.measure.tail import LineTail


class JsonlSource:
    """Rows such as `{"step": 10, "time": 1712.3, "loss": 0.3}`; nested objects become `outer/inner`."""

    kind = "jsonl"
    problem: str | None = None

    def __init__(self, path: Path, rows: RowAccumulator | None = None) -> None:
        self.path = path
        self.skipped = 0
        self._lines = LineTail(path, self._restart)
        self._rows = rows or RowAccumulator()

    @property
    def behind(self) -> bool:
        return self._lines.behind

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        batch: Batch = {}
        for lines in self._lines.blocks(final, until):
            self._rows.fold_rows(self._parse(lines), batch)
        return batch

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:
            rows = list(map(orjson.loads, lines))
        except orjson.JSONDecodeError:
            pass
        else:
            if set(map(type, rows)) == {dict}:
                return rows
        return [row for line in lines if (row := self._parse_line(line)) is not None]

    def _parse_line(self, line: bytes) -> dict[str, Any] | None:
        row: Any = None
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not line.strip():
                return None
            # Python's json writes bare NaN and Infinity, which only Python's json reads.
            with suppress(ValueError, RecursionError):
                row = json.loads(line, parse_int=float)
        if isinstance(row, dict):
            return row
        self.skipped += 1
        return None

    def _restart(self) -> None:
        self._rows.reset()
