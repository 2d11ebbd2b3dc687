"""Extrapolation of the curves of stopped runs to the full budget.

A run that was stopped early has measured something, but not its objective. From the runs that got further it is learnt,
rung by rung, how a value at one step predicts the value at the next: a Bayesian linear regression for each pair of
rungs, chained up to the end of a finished run. Pruners stop by the value at a rung, so the regression on that value is
not biased by who survived. The result is a mean and a standard deviation of the final value: the larger, the fewer
runs got that far and the further the value is from theirs.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Curve = tuple[tuple[float, float], ...]
"""Steps and the objective there, in ascending order, as a sparse record of a run. The last entry is its end."""

RUNGS_PER_OCTAVE = 4
"""Fractions of the budget are rounded down to powers of 2 ** (1 / RUNGS_PER_OCTAVE)."""
MAX_DEVIATION = 5.0
"""Values further above the median do not count further in a regression; a multiple of the deviation of those below."""
SLOPE_VARIANCE = 0.25
"""Prior variance of a regression's slope; its prior mean is 1: curves stay as far apart as they are."""
RESIDUAL_PRIOR = (0.25, 2.0)
"""Prior variance of the residuals, as a share of the variance at the earlier rung per octave of steps between the two,
and the number of runs that it counts as."""


class Estimate(NamedTuple):
    """A final value that was not measured."""

    mean: float
    sd: float


def extrapolate(finished: Sequence[Curve], stopped: Sequence[Curve]) -> list[Estimate | None]:
    """Return what each stopped run would have measured at its end; None: unknown.

    Lower values are better.
    """
    if not finished or not stopped:
        return [None] * len(stopped)
    everything = (*finished, *stopped)
    first = min(curve[0][0] for curve in everything)
    shift = 1.0 - first if first <= 0 else 0.0  # steps that count from 0
    unit = max(abs(value) for curve in everything for _, value in curve) or 1.0
    budget = statistics.median(curve[-1][0] for curve in finished) + shift
    ended = [_Path(curve, shift, curve[-1][0] + shift, unit) for curve in finished]
    longer = 2.0 ** (1 / RUNGS_PER_OCTAVE)  # a run that was stopped after more steps had a larger budget
    cut = [_Path(curve, shift, max(budget, longer * (curve[-1][0] + shift)), unit) for curve in stopped]
    levels = [min(-1, math.floor(path.octaves[-1] * RUNGS_PER_OCTAVE + 1e-9)) for path in cut]
    rungs = sorted(set(levels))
    links = []
    for below, above in zip(rungs, [*rungs[1:], 0], strict=True):
        pairs = [(path.at(below), path.at(above)) for path in ended]
        pairs += [
            (path.at(below), path.at(above) if level >= above else None)
            for path, level in zip(cut, levels, strict=True)
            if level >= below
        ]
        links.append(_Link.fit([(x, y) for x, y in pairs if x is not None], above - below))
    estimates: list[Estimate | None] = []
    for path, level in zip(cut, levels, strict=True):
        value = path.at(level)
        estimate = None if value is None else Estimate(value, 0.0)
        for link in links[rungs.index(level) :]:
            estimate = None if link is None or estimate is None else link.predict(estimate)
        estimates.append(None if estimate is None else Estimate(unit * estimate.mean, unit * estimate.sd))
    return estimates


class _Path:
    """A curve by the share of the budget."""

    def __init__(self, curve: Curve, shift: float, budget: float, unit: float) -> None:
        self.octaves = [math.log2(step + shift) - math.log2(budget) for step, _ in curve]
        """Logarithm of the share to base 2; 0: the end of a finished run."""
        self._values = [value / unit for _, value in curve]

    def at(self, level: int) -> float | None:
        """Return the interpolated value at a rung; None before the first value."""
        octave = level / RUNGS_PER_OCTAVE
        after = bisect_left(self.octaves, octave - 1e-9)
        if after == len(self.octaves):
            return self._values[-1]
        if after == 0:
            return self._values[0] if self.octaves[0] - octave < 1.5 / RUNGS_PER_OCTAVE else None
        low, high = self.octaves[after - 1], self.octaves[after]
        share = (octave - low) / (high - low) if high > low else 1.0
        return self._values[after - 1] + min(1.0, share) * (self._values[after] - self._values[after - 1])


@dataclass(frozen=True, slots=True)
class _Link:
    """The regression of the values at one rung on those at an earlier one."""

    center: tuple[float, float]
    slope: float
    slope_variance: float
    residual_variance: float
    n: int

    @classmethod
    def fit(cls, pairs: Sequence[tuple[float, float | None]], levels: int) -> _Link | None:
        """Return the regression; None if no run has reached the later rung.

        Args:
            pairs: The values of each run at the two rungs; None: it was stopped before the later one.
            levels: The distance of the two rungs.
        """
        both = [(a, b) for a, b in pairs if b is not None]
        if not both:
            return None
        n = len(both)
        worst = _worst([a for a, _ in pairs]), _worst([b for _, b in both])
        clipped = [(min(a, worst[0]), min(b, worst[1])) for a, b in both]
        x, y = (math.fsum(column) / n for column in zip(*clipped, strict=True))
        xx = math.fsum((a - x) ** 2 for a, _ in clipped)
        xy = math.fsum((a - x) * (b - y) for a, b in clipped)
        spread = statistics.pvariance([min(a, worst[0]) for a, _ in pairs]) or (y - x) ** 2
        prior = max(RESIDUAL_PRIOR[0] * levels / RUNGS_PER_OCTAVE * spread, 1e-18)
        variance, count = prior, RESIDUAL_PRIOR[1]
        for _ in range(3):  # the slope depends on the variance of the residuals, and the reverse
            slope_variance = 1.0 / (xx / variance + 1.0 / SLOPE_VARIANCE)
            slope = max(0.0, slope_variance * (xy / variance + 1.0 / SLOPE_VARIANCE))  # never negative
            residuals = math.fsum((b - y - slope * (a - x)) ** 2 for a, b in clipped)
            variance = (residuals + count * prior) / (n + count)
        return cls((x, y), slope, slope_variance, variance, n)

    def predict(self, given: Estimate) -> Estimate:
        off = given.mean - self.center[0]
        variance = self.residual_variance * (1.0 + 1.0 / self.n) + self.slope_variance * (off**2 + given.sd**2)
        return Estimate(self.center[1] + self.slope * off, math.sqrt(variance + (self.slope * given.sd) ** 2))


def _worst(values: Sequence[float]) -> float:
    """Return the value beyond which others are outliers."""
    median = statistics.median(values)
    better = [median - value for value in values if value <= median]
    return median + MAX_DEVIATION * math.sqrt(math.fsum(gap**2 for gap in better) / len(better))
