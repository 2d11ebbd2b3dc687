"""Rows of named values to curves: which value is the step, which are metrics, which are neither."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf, isfinite, nan
from operator import itemgetter
from typing import Any

from looplab.measure.base import Batch, Curve
from looplab.untrusted import MAX_DEPTH

STEP_NAMES = (
    "step",
    "_step",
    "global_step",
    "trainer/global_step",
    "train_step",
    "total_timesteps",
    "time/total_timesteps",
    "timesteps",
    "agent_steps",
    "train/optimization step",
    "optimization step",
    "iteration",
    "iter",
    "update",
    "epoch",
)
"""What trainers call the step, the surest name first; a row's step is its first of these that holds a number."""

NOT_METRICS = frozenset({"", "time", "timestamp", "_timestamp", "_runtime", "_step", "_wandb"})
"""Clocks and bookkeeping."""

NON_FINITE = {
    "NaN": nan,
    "nan": nan,
    "Infinity": inf,
    "inf": inf,
    "-Infinity": -inf,
    "-inf": -inf,
}
"""The strings that stand for what JSON cannot say."""


def number(value: object) -> float | None:
    """The value as a float if it is a number, a truth value or a non-finite number in words; else nothing."""
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
    """Folds rows into curves, in the order in which they come.

    Once a file has shown one name for its step, a less sure name is a metric like others (a file with `step` may
    have `epoch` too). A row without a step belongs to the last step seen; if there was none, its number, counted
    from 0, is its step.
    """

    __slots__ = ("_last_step", "_plans", "_rank", "_ranks", "_rows", "_separator")

    def __init__(self, separator: str = "/", step_names: Sequence[str] = STEP_NAMES) -> None:
        self._separator = separator
        self._ranks = {name: rank for rank, name in enumerate(step_names)}
        self._plans: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        self.reset()

    def reset(self) -> None:
        self._rank = len(self._ranks)
        self._last_step: float | None = None
        self._rows = 0

    def fold_rows(self, rows: Sequence[dict[str, Any]], batch: Batch) -> None:
        """Add rows; neighbours with the same names are turned into columns at once, which is what makes this fast."""
        start, count = 0, len(rows)
        while start < count:
            first = rows[start].keys()
            end = start + 1
            while end < count and rows[end].keys() == first:
                end += 1
            names = tuple(first)
            if len(names) > 1:
                # By name, not by place: some writers shuffle the names of each row.
                columns = list(zip(*map(itemgetter(*names), rows[start:end]), strict=True))
            else:
                columns = [tuple(row[name] for row in rows[start:end]) for name in names]
            self.fold_columns(names, columns, end - start, batch)
            start = end

    def fold_columns(self, names: tuple[str, ...], columns: Sequence[Sequence[Any]], count: int, batch: Batch) -> None:
        """Add `count` rows that are given as columns; a cell that is no number is missing."""
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
                # Some rows lack the surest name: decide row by row, so that the cut into polls does not matter.
                for row in zip(*columns, strict=True):
                    self.fold_columns(names, [(cell,) for cell in row], 1, batch)
                return
        if not steps:
            steps = self._steps_without_a_name(count)
        self._rows += count
        no_metrics = {index for rank, index in step_columns if rank <= self._rank}
        for index, name in enumerate(names):
            if index not in no_metrics and name not in NOT_METRICS:
                self._fold_column(name, steps, columns[index], batch)

    def _step_columns(self, names: tuple[str, ...]) -> list[tuple[int, int]]:
        plan = self._plans.get(names)
        if plan is None:
            ranks = ((self._ranks.get(name.lower().strip()), index) for index, name in enumerate(names))
            plan = sorted((rank, index) for rank, index in ranks if rank is not None)
            if len(self._plans) < 1000:
                self._plans[names] = plan
        return plan

    def _steps_without_a_name(self, count: int) -> list[float]:
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
                # A dict with a type is a picture, a histogram or a table.
                if "_type" not in cell and depth < MAX_DEPTH:
                    for key, inner in cell.items():
                        self._fold_column(f"{name}{self._separator}{key}", [step], (inner,), batch, depth + 1)
                continue
            value = number(cell)
            if value is not None:
                curve = batch.get(name)
                if curve is None:
                    curve = batch[name] = Curve()
                curve.add(step, value)


def _finite_floats(column: Sequence[Any]) -> list[float]:
    """The column as floats if every cell is a finite number, else nothing."""
    if not set(map(type, column)) <= {float, int}:
        return []
    try:
        floats = list(map(float, column))
    except OverflowError:  # an int of 400 digits
        return []
    # One sum tells for all: it is finite only if every term is.
    return floats if isfinite(sum(floats)) else []
