"""Objective values as a Gaussian process is fitted to them: warped, standardized, with the variance of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from looplab.decide.curves import Curve, extrapolate
from looplab.decide.points import SearchPoint
from looplab.decide.space import Array

MIN_FINALS = 3
"""Minimum number of measured points to estimate the scale of values; with fewer, those of stopped runs count too."""
UNKNOWN_VARIANCE = 1e6
"""Variance of an unknown final value."""
MAX_LOG = 50.0
"""Largest logarithm that is undone when a prediction is turned back into the objective."""


class Warp:
    """A monotone map that compresses the upper tail of values (lower is better).

    Values more than one scale above the median count with the logarithm of their distance, so that a few terrible runs
    do not hide the differences between good ones.
    """

    def __init__(self, values: Array) -> None:
        self._unit = float(np.abs(values).max() or 1.0)
        values = values / self._unit
        self._median = float(np.median(values))
        better = self._median - values[values <= self._median]
        self._scale = float(math.sqrt(float((better**2).mean())) or values.std() or 1.0)

    def __call__(self, values: Array) -> Array:
        z = (values / self._unit - self._median) / self._scale
        return np.asarray(np.where(z > 1.0, 1.0 + np.log(np.maximum(z, 1.0)), z))

    def inverse(self, warped: Array) -> Array:
        """Return the values of warped ones."""
        z = np.where(warped > 1.0, np.exp(np.minimum(warped - 1.0, MAX_LOG)), warped)
        return np.asarray((z * self._scale + self._median) * self._unit)


def warped(values: Array) -> Array:
    """Return values (lower is better) with their upper tail compressed, standardized."""
    return standardized(Warp(values)(values))


def standardized(values: Array) -> Array:
    """Return values scaled to mean 0 and variance 1."""
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


@dataclass(frozen=True, slots=True)
class ObjectiveScale:
    """How standardized values are turned back into the objective."""

    warp: Warp
    center: float
    width: float
    sign: float
    """1 if the objective is minimized, -1 if it is maximized."""

    def standardize(self, values: Sequence[float]) -> Array:
        """Return values of the objective, standardized; lower is better."""
        return np.asarray((self.warp(self.sign * np.array(values)) - self.center) / self.width)

    def to_objective(self, mean: Array, sd: Array) -> tuple[Array, Array]:
        """Return means and standard deviations in the unit of the objective."""
        low, middle, high = (
            self.sign * self.warp.inverse(self.center + self.width * (mean + k * sd)) for k in (-1.0, 0.0, 1.0)
        )
        return middle, np.abs(high - low) / 2


class Observations(NamedTuple):
    """Standardized values at points, as the process is fitted to them."""

    y: Array
    weights: Array
    """The number of runs averaged in each value."""
    extra: Array
    """Variance of each value in addition to the noise of a run."""

    @classmethod
    def of_objective(cls, points: Sequence[SearchPoint], sign: float) -> Observations:
        """Return the objective at known points: measured, or extrapolated where all runs were stopped early.

        Extrapolated values have the variance of the extrapolation; where it is impossible, it is almost infinite.
        """
        return cls.with_scale(points, sign)[0]

    @classmethod
    def with_scale(cls, points: Sequence[SearchPoint], sign: float) -> tuple[Observations, ObjectiveScale]:
        """Return `of_objective`, and how to turn the values back."""
        values = np.array([math.nan if point.value is None else sign * point.value for point in points])
        measured = ~np.isnan(values)
        weights = np.array([float(max(1, len(point.values))) for point in points])
        stopped = [_signed(point.partial, sign) for point in points if point.partial is not None]
        finals = values[measured]
        if not stopped:
            warp = Warp(finals)
            y, extra = warp(values), np.zeros(len(points))
        else:
            finished = [_signed(curve, sign) for point in points if point.value is not None for curve in point.curves]
            warp, means, variances = _extrapolated(finals, finished, stopped)
            y, extra = np.empty(len(points)), np.zeros(len(points))
            y[measured], y[~measured], extra[~measured] = warp(finals), means, variances
        center, width = float(y.mean()), float(y.std()) or 1.0
        scale = ObjectiveScale(warp, center, width, sign)
        return cls((y - center) / width, weights, extra / width**2), scale

    @classmethod
    def of_logarithms(cls, values: Sequence[float]) -> Observations:
        """Return the logarithms of positive values, standardized."""
        return cls(standardized(np.log(np.array(values))), np.ones(len(values)), np.zeros(len(values)))

    @classmethod
    def of_failures(cls, points: Sequence[SearchPoint]) -> Observations:
        """Return 0 for success and 1 for failure, standardized."""
        failed = np.array([float(point.infeasible) for point in points])
        return cls(standardized(failed), np.ones(len(failed)), np.zeros(len(failed)))

    def at(self, subset: NDArray[np.intp]) -> Observations:
        return Observations(self.y[subset], self.weights[subset], self.extra[subset])


def _extrapolated(finals: Array, finished: Sequence[Curve], stopped: Sequence[Curve]) -> tuple[Warp, Array, Array]:
    """Return a warp of final values, and the warped means and variances of the final values of stopped runs.

    The extrapolation is that of warped curves: a loss falls by about the same share from rung to rung, whether it is
    large or small. Since the warp should be that of final values, it is first that of the last ones, then that of the
    estimated ones.
    """
    ends = np.array([curve[-1][1] for curve in stopped])
    for _ in range(2):
        warp = Warp(np.append(finals, ends))
        estimates = extrapolate(
            [_warped(curve, warp) for curve in finished], [_warped(curve, warp) for curve in stopped]
        )
        known = [estimate is not None for estimate in estimates]
        unknown = float(warp(finals).mean()) if len(finals) else 0.0
        means = np.array([unknown if estimate is None else estimate.mean for estimate in estimates])
        variances = np.array([UNKNOWN_VARIANCE if estimate is None else estimate.sd**2 for estimate in estimates])
        ends = np.where(known, warp.inverse(means), ends)
    return warp, means, variances


def _warped(curve: Curve, warp: Warp) -> Curve:
    steps, values = zip(*curve, strict=True)
    return tuple(zip(steps, warp(np.array(values)).tolist(), strict=True))


def _signed(curve: Curve, sign: float) -> Curve:
    return tuple((step, sign * value) for step, value in curve)
