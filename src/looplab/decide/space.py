"""The axes as a unit cube: how points become rows of numbers, and rows become features of a kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.decide.axes import Axis, Params

Array = NDArray[np.float64]

CHOICE_DISTANCE = 0.6
"""Distance of two different choices, where a numeric axis has length 1. With the prior of the lengthscale, one changed
choice of several then says something about the others from the first runs on."""


class SearchSpace:
    """The axes mapped to the unit cube. A row holds a number in [0, 1] or the index of a choice for each axis."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        bounds = [axis.bounds for axis in axes]
        self._log = [axis.knob.log and not axis.choices for axis in axes]
        self._low = [math.log(low) if log else float(low) for (low, _), log in zip(bounds, self._log, strict=True)]
        self._high = [math.log(high) if log else float(high) for (_, high), log in zip(bounds, self._log, strict=True)]
        self.n_choices = [len(axis.choices) if axis.choices and not axis.ordered else 0 for axis in axes]
        """The number of unordered choices of each axis; 0: the axis is numeric."""
        self._steps = [1.0 if a.choices else float(int(a.knob.step or 1)) if a.integer else 0.0 for a in axes]
        """The distance of legal values on each axis, in its own unit; 0: continuous."""
        self.feature_axis = np.repeat(np.arange(len(axes)), [n or 1 for n in self.n_choices])
        """The axis to which each feature belongs."""

    def to_row(self, params: Params) -> list[float]:
        row = []
        for axis, low, high, log, n in zip(self.axes, self._low, self._high, self._log, self.n_choices, strict=True):
            value = params[axis.path]
            row.append(float(value) if n else ((math.log(value) if log else value) - low) / (high - low))
        return row

    def to_params(self, row: Array) -> Params:
        params: dict[str, Any] = {}
        for i, axis in enumerate(self.axes):
            if self.n_choices[i]:
                value = float(row[i])
            else:
                value = self._low[i] + float(row[i]) * (self._high[i] - self._low[i])
            if self._log[i]:
                value = math.exp(value)
            params[axis.path] = round(value) if axis.choices or axis.integer else value
        return params

    def region(self, bounds: Mapping[str, tuple[Any, ...]]) -> Region:
        """Return the region in which some axes are bounded: by the lowest and the highest parameter, or by choices."""
        low, high = np.zeros(len(self.axes)), np.array([max(0.0, n - 1.0) if n else 1.0 for n in self.n_choices])
        choices: list[tuple[int, ...]] = []
        for i, axis in enumerate(self.axes):
            given = bounds.get(axis.path)
            choices.append(tuple(given) if given is not None and self.n_choices[i] else ())
            if given is not None and not self.n_choices[i]:
                ends = [math.log(end) if self._log[i] else float(end) for end in given]
                low[i], high[i] = ((end - self._low[i]) / (self._high[i] - self._low[i]) for end in ends)
        return Region(low, high, tuple(choices))

    def all_rows(self, limit: int) -> Array | None:
        """Return a row for each point of a finite space; None if an axis is continuous, or there are more points."""
        sides: list[Array] = []
        for i, (n, step) in enumerate(zip(self.n_choices, self._steps, strict=True)):
            if n:
                sides.append(np.arange(float(n)))
                continue
            if not step:
                return None
            low, high = ((math.exp(end) if self._log[i] else end) for end in (self._low[i], self._high[i]))
            if (high - low) / step >= limit:
                return None
            values = low + step * np.arange(round((high - low) / step) + 1)
            position = np.log(values) if self._log[i] else values
            sides.append(np.asarray((position - self._low[i]) / (self._high[i] - self._low[i])))
        if math.prod(map(len, sides)) > limit:
            return None
        return self.snap(np.stack([side.ravel() for side in np.meshgrid(*sides, indexing="ij")], axis=1))

    def from_uniform(self, u: Array) -> Array:
        """Map uniform random numbers to legal rows."""
        rows = u.copy()
        for i, n in enumerate(self.n_choices):
            if n:
                rows[:, i] = np.minimum(np.floor(u[:, i] * n), n - 1)
        return self.snap(rows)

    def snap(self, rows: Array) -> Array:
        """Round rows to the nearest legal values, in place."""
        for i, (n, step) in enumerate(zip(self.n_choices, self._steps, strict=True)):
            if n or not step:
                continue
            low, width = self._low[i], self._high[i] - self._low[i]
            if self._log[i]:
                start = math.exp(low)
                rounded = start + step * np.round((np.exp(low + rows[:, i] * width) - start) / step)
                rows[:, i] = np.minimum((np.log(rounded) - low) / width, 1.0)
            else:
                rows[:, i] = np.round(rows[:, i] * width / step) * step / width
        return rows

    def features(self, rows: Array) -> Array:
        """Return the inputs of the kernel; choices are one-hot, two different ones at distance CHOICE_DISTANCE."""
        columns = []
        for i, n in enumerate(self.n_choices):
            if n:
                columns += [CHOICE_DISTANCE * math.sqrt(0.5) * (rows[:, i] == choice) for choice in range(n)]
            else:
                columns.append(rows[:, i])
        return np.column_stack(columns)

    def perturb(self, rows: Array, widths: Array, rng: np.random.RandomState) -> Array:
        """Move a random subset of each row's coordinates, by normal steps whose standard deviation is its width."""
        n, d = rows.shape
        moved = rng.random_sample((n, d)) < np.maximum(2.0 / d, rng.random_sample((n, 1)) ** 2)
        moved[np.arange(n), rng.randint(d, size=n)] = True
        steps = rng.standard_normal((n, d)) * widths[:, None]
        u = rng.random_sample((n, d))
        perturbed = rows.copy()
        for i, n_choices in enumerate(self.n_choices):
            if n_choices:
                moved[:, i] &= rng.random_sample(n) < 0.5
                perturbed[:, i] = np.where(moved[:, i], np.floor(u[:, i] * n_choices), rows[:, i])
                continue
            if self._steps[i]:  # a shorter step would be rounded back
                shortest = 0.75 * self._steps[i] / (self._high[i] - self._low[i])
                steps[:, i] = np.where(np.abs(steps[:, i]) < shortest, np.sign(steps[:, i]) * shortest, steps[:, i])
            x = np.abs(rows[:, i] + np.where(moved[:, i], steps[:, i], 0.0))
            perturbed[:, i] = np.clip(np.where(x > 1.0, 2.0 - x, x), 0.0, 1.0)  # reflected at the bounds
        return self.snap(perturbed)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the space, as bounds of rows."""

    low: Array
    high: Array
    choices: tuple[tuple[int, ...], ...]
    """The choices that are allowed on each unordered axis; empty: all of them, or the axis is numeric."""

    def select(self, rows: Array) -> Array:
        """Return the rows that lie in the region."""
        inside = np.all((rows >= self.low - 1e-9) & (rows <= self.high + 1e-9), axis=1)
        for i, allowed in enumerate(self.choices):
            if allowed:
                inside &= np.isin(rows[:, i], allowed)
        return rows[inside]

    def clip(self, rows: Array, rng: np.random.RandomState) -> Array:
        """Return the rows moved into the region."""
        clipped = np.clip(rows, self.low, self.high)
        for i, allowed in enumerate(self.choices):
            if allowed:
                drawn = rng.choice(np.array(allowed), len(rows))
                clipped[:, i] = np.where(np.isin(rows[:, i], allowed), rows[:, i], drawn)
        return np.asarray(clipped)


def row_key(row: Array) -> bytes:
    return (np.round(row, 9) + 0.0).tobytes()
