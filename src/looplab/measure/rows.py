"""Turn rows of named values into curves: find the step and the metrics of each row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf, isfinite, nan
from operator import itemgetter
from typing import Any

from looplab.measure.base import Batch, Curve
from looplab.untrusted import MAX_DEPTH

STEP_NAMES = (
    "step", "_step", "global_step", "trainer/global_step", "train_step", "total_timesteps", "time/total_timesteps",
    "timesteps", "agent_steps", "train/optimization step", "optimization step", "iteration", "iter", "update", "epoch",
)  # fmt: skip
"""Names of the step, most reliable first; the step of a row is the first of these that is a number."""

NOT_METRICS = frozenset({"", "time", "timestamp", "_timestamp", "_runtime", "_step", "_wandb"})
"""Clocks and bookkeeping columns."""

NON_FINITE = {"NaN": nan, "nan": nan, "Infinity": inf, "inf": inf, "-Infinity": -inf, "-inf": -inf}
"""Strings for numbers that JSON cannot represent."""


def to_float(value: object) -> float | None:
    """Return a number, a boolean or a non-finite number given as a string as a float; None for anything else."""
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, str):
        return NON_FINITE.get(value)
    return None


class RowAccumulator:
    """Accumulates rows into curves, in the order in which they come.

    Once a file has used one name for its step, less reliable names are ordinary metrics (a file with `step` may also
    have `epoch`). A row without a step gets the last step; if there was none, its index, from 0.
    """

    __slots__ = ("_last_step", "_rank", "_ranked_steps", "_ranks", "_rows", "_separator")

    def __init__(self, separator: str = "/", step_names: Sequence[str] = STEP_NAMES) -> None:
        self._separator = separator
        self._ranks = {name: rank for rank, name in enumerate(step_names)}
        self._ranked_steps: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        self.reset()

    def reset(self) -> None:
        self._rank = len(self._ranks)
        self._last_step: float | None = None
        self._rows = 0

    def fold_rows(self, rows: Sequence[dict[str, Any]], batch: Batch) -> None:
        """Add rows. For speed, consecutive rows with the same names are converted to columns at once."""
        start, count = 0, len(rows)
        while start < count:
            first = rows[start].keys()
            end = start + 1
            while end < count and rows[end].keys() == first:
                end += 1
            names = tuple(first)
            if len(names) > 1:
                # By name, not by position: some writers shuffle the names of each row.
                columns = list(zip(*map(itemgetter(*names), rows[start:end]), strict=True))
            else:
                columns = [tuple(row[name] for row in rows[start:end]) for name in names]
            self.fold_columns(names, columns, end - start, batch)
            start = end

    def fold_columns(self, names: tuple[str, ...], columns: Sequence[Sequence[Any]], count: int, batch: Batch) -> None:
        """Add `count` rows that are given as columns; a cell that is not a number is missing."""
        step_columns = self._step_columns(names)
        steps: list[float] = []
        for rank, index in step_columns:
            if rank > self._rank:
                break
            steps = _finite_floats(columns[index])
            if steps:
                self._rank = rank
                self._last_step = steps[-1]
                break
            if count > 1:
                # Some rows lack the most reliable name: go row by row, so that the division into polls does not matter.
                for row in zip(*columns, strict=True):
                    self.fold_columns(names, [(cell,) for cell in row], 1, batch)
                return
        if not steps:
            steps = self._default_steps(count)
        self._rows += count
        step_indices = {index for rank, index in step_columns if rank <= self._rank}
        for index, name in enumerate(names):
            if index not in step_indices and name not in NOT_METRICS:
                self._fold_column(name, steps, columns[index], batch)

    def _step_columns(self, names: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the rank and the index of each column that may be the step, most reliable first."""
        ranked = self._ranked_steps.get(names)
        if ranked is None:
            ranks = ((self._ranks.get(name.lower().strip()), index) for index, name in enumerate(names))
            ranked = sorted((rank, index) for rank, index in ranks if rank is not None)
            if len(self._ranked_steps) < 1000:
                self._ranked_steps[names] = ranked
        return ranked

    def _default_steps(self, count: int) -> list[float]:
        """Return the steps of rows that have none."""
        if self._last_step is not None:
            return [self._last_step] * count
        return [float(row) for row in range(self._rows, self._rows + count)]

    def _fold_column(self, name: str, steps: list[float], column: Sequence[Any], batch: Batch, depth: int = 0) -> None:
        types = set(map(type, column))
        if types <= {float, int, bool}:
            with suppress(OverflowError):
                values = column if types == {float} else list(map(float, column))
                curve = batch.get(name)
                if curve is None:
                    curve = batch[name] = Curve()
                curve.steps.extend(steps)
                curve.values.extend(values)
                return
        for step, cell in zip(steps, column, strict=True):
            if isinstance(cell, dict):
                # A dict with a type is an image, a histogram or a table.
                if "_type" not in cell and depth < MAX_DEPTH:
                    for key, inner in cell.items():
                        self._fold_column(f"{name}{self._separator}{key}", [step], (inner,), batch, depth + 1)
                continue
            value = to_float(cell)
            if value is not None:
                curve = batch.get(name)
                if curve is None:
                    curve = batch[name] = Curve()
                curve.add(step, value)


def _finite_floats(column: Sequence[Any]) -> list[float]:
    """Return the column as floats if every cell is a finite number, else an empty list."""
    if not set(map(type, column)) <= {float, int}:
        return []
    try:
        floats = list(map(float, column))
    except OverflowError:  # an int of 400 digits
        return []
    # The sum is finite only if every term is.
    return floats if isfinite(sum(floats)) else []
