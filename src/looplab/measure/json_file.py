"""A JSON file that is rewritten as a whole from time to time: one point for each number whenever it changes.

Some trainers append rows to a file of such a name instead, one JSON object per line: each row is a point then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from looplab.measure.base import Batch, Curve
from looplab.measure.rows import NOT_METRICS, RowAccumulator, to_float
from looplab.measure.words import is_result
from looplab.untrusted import UntrustedError, load_json, read_bounded

SETTINGS = frozenset({"config", "params", "args", "hparams", "hyperparameters", "settings", "options", "arguments"})
"""Keys that hold a trainer's arguments."""
MAX_SIZE = 16 << 20
"""Maximum size of a file, in bytes; a larger one is not read."""


class JsonFile:
    """Base class for `trainer_summary.json` and `wandb-summary.json`, which differ in their names and steps."""

    def __init__(self, path: Path, separator: str, rename: Callable[[str], str], step_names: tuple[str, ...]) -> None:
        self.path = path
        self.skipped = 0
        """1 while the file cannot be read (half-written or not JSON), else 0."""
        self.problem: str | None = None
        self.behind = False
        self.at_step: float | None = None
        """The step to use if the file names none: the last step of the run in other files."""
        self.has_rows = False
        """Whether it holds curves, and not only last values."""
        self._separator = separator
        self._rename = rename
        self._step_names = step_names
        self._identity: tuple[int, int, int] | None = None
        self._returned: dict[str, float] = {}
        self._points: dict[str, int] = {}
        """Points of curves that were returned, by name."""

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        content = self._read_if_changed()
        if content is None:
            return {}
        values: dict[str, float] = {}
        curves: Batch = {}
        content.pop("_wandb", None)
        flatten_numbers("", content, self._separator, values, curves)
        self.has_rows = bool(curves)
        values = {self._rename(name): value for name, value in values.items()}
        steps = [values[name] for name in self._step_names if name in values]
        step = steps[0] if steps else self.at_step if self.at_step is not None else 0.0
        batch: Batch = {}
        for name, value in values.items():
            # Compared as text, since NaN is not equal to itself.
            if name not in NOT_METRICS and repr(self._returned.get(name)) != repr(value):
                self._returned[name] = value
                batch[name] = Curve([step], [value])
        for name, curve in curves.items():
            name = self._rename(name)
            # The first row of a file with a row per line was a whole document.
            done = self._points.get(name, 1 if name in self._returned else 0)
            if len(curve.steps) > done and name not in batch:
                self._points[name] = len(curve.steps)
                batch[name] = Curve(curve.steps[done:], curve.values[done:])
        return batch

    def _read_if_changed(self) -> dict[str, Any] | None:
        try:
            status = os.stat(self.path)
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if identity == self._identity:
                return None
            data = read_bounded(self.path, MAX_SIZE)
        except OSError:
            return None
        except UntrustedError:  # not a file, or too large; ignored until it changes
            self._identity = identity
            self.skipped = 1
            return None
        self._identity = identity
        content: Any = None
        try:
            content = load_json(data)
        except UntrustedError:
            content = _rows_of_lines(data)
        if isinstance(content, list):
            content = {"history": content}
        self.skipped = 0 if isinstance(content, dict) else 1
        return content if isinstance(content, dict) else None


ROWS = frozenset({"history", "log", "logs", "log_history", "epochs", "steps", "metrics", "results", "curve", "curves"})
"""Names of lists of rows that say nothing about the values in them."""


def _rows_of_lines(data: bytes) -> list[dict[str, Any]] | None:
    """Return the rows of a file with one JSON object per line, of which the last may be incomplete; None: it is not
    such a file."""
    rows: list[dict[str, Any]] = []
    *lines, last = data.strip().split(b"\n")
    for line in lines:
        row: Any = None
        with suppress(UntrustedError):
            row = load_json(line)
        if not isinstance(row, dict):
            return None
        rows.append(row)
    with suppress(UntrustedError):
        row = load_json(last)
        rows += [row] if isinstance(row, dict) else []
    return rows or None


def _add_rows(prefix: str, rows: list[dict[str, Any]], separator: str, curves: Batch) -> None:
    """Collect the results in a list of rows: `[{"epoch": 0, "val": {"loss": 0.3}}, …]`."""
    above = "" if prefix.rpartition(separator)[2].lower() in ROWS else prefix + separator
    found: Batch = {}
    RowAccumulator(separator).fold_rows(rows, found)
    curves |= {above + name: curve for name, curve in found.items() if is_result(above + name)}


def flatten_numbers(prefix: str, value: Any, separator: str, into: dict[str, float], curves: Batch) -> None:
    """Collect the numbers of nested mappings, and lists of numbers that are named after a result: a history."""
    if isinstance(value, dict):
        if "_type" not in value:
            for key, inner in value.items():
                if str(key).lower() not in SETTINGS:
                    flatten_numbers(f"{prefix}{separator}{key}" if prefix else str(key), inner, separator, into, curves)
        return
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        _add_rows(prefix, value, separator, curves)
        return
    if isinstance(value, list):
        points = [point for item in value if (point := to_float(item)) is not None]
        if len(points) == len(value) > 1 and is_result(prefix.rpartition(separator)[2]):
            curves[prefix] = Curve([float(index) for index in range(len(points))], points)
        return
    as_float = to_float(value)
    if as_float is not None:
        into[prefix] = as_float
