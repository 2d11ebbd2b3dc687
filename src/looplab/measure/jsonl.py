"""`metrics.jsonl`: one JSON object per line, as written by `trainkit.log()` and many trainers."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson

from looplab.measure.base import Batch
from looplab.measure.lines import LineSource


class JsonlSource(LineSource):
    """Rows such as `{"step": 10, "time": 1712.3, "loss": 0.3}`; nested objects become `outer/inner`."""

    kind = "jsonl"

    def _fold(self, raw_lines: list[bytes], batch: Batch) -> None:
        try:
            rows = list(map(orjson.loads, raw_lines))
        except orjson.JSONDecodeError:
            rows = [None]
        if set(map(type, rows)) == {dict}:
            self._rows.fold_rows(rows, batch)
        else:
            super()._fold(raw_lines, batch)

    def _parse(self, line: bytes) -> dict[str, Any] | None:
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
