"""Statistics of the judge: one-sided t-tests, alpha boundaries of several looks, futility.

More is better throughout; callers that minimise negate their values first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

NORMAL = NormalDist()
LEAST_SPREAD = 0.2
"""Lower bound on the spread of differences at the first look, as a fraction of the noise: three runs of a coarse metric
may agree by chance. At later looks it shrinks in proportion to the number of runs."""


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sum_of_squares(values: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean."""
    center = mean(values)
    return math.fsum((value - center) ** 2 for value in values)


def spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation of at least two values."""
    return math.sqrt(sum_of_squares(values) / (len(values) - 1))


def pooled_spread(groups: Iterable[Sequence[float]]) -> tuple[float, int] | None:
    """Return the within-group standard deviation and its degrees of freedom; None if no group has two values."""
    total, freedom = 0.0, 0
    for group in groups:
        if len(group) > 1:
            total += sum_of_squares(group)
            freedom += len(group) - 1
    return (math.sqrt(total / freedom), freedom) if freedom else None


# --- distributions, which scipy is imported for when the first comparison is made


def t_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t with `freedom` degrees of freedom exceeds `t`."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def t_quantile(tail: float, freedom: float) -> float:
    """Return the t that is exceeded with probability `tail`."""
    from scipy.special import stdtrit

    return float(-stdtrit(freedom, tail))


def largest_rate(hits: int, n: int) -> float:
    """Return the upper end of the one-sided 95 % confidence interval of a probability, after `hits` in n trials."""
    from scipy.special import betaincinv

    return 1.0 if hits >= n else float(betaincinv(hits + 1, n - hits, 0.95))


# --- comparisons


@dataclass(frozen=True, slots=True)
class Comparison:
    """Estimated effect and its uncertainty."""

    effect: float
    """Mean difference, challenger minus champion."""
    error: float
    """Standard error of the effect."""
    freedom: float
    """Degrees of freedom of the error."""
    n: int
    """Number of pairs; unpaired: runs of the challenger."""

    def p(self) -> float:
        """Return the one-sided p-value of the null hypothesis that the true effect is at most 0."""
        if self.error == 0.0:
            return 0.0 if self.effect > 0 else 1.0
        return t_tail(self.effect / self.error, self.freedom)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the two-sided confidence interval of the effect."""
        if self.error == 0.0:
            return self.effect, self.effect
        reach = t_quantile(round(0.5 - level / 2.0, 12), self.freedom) * self.error
        return self.effect - reach, self.effect + reach


def paired(
    differences: Sequence[float], least_spread: float = 0.0, prior: tuple[float, float] | None = None
) -> Comparison:
    """Run the paired t-test.

    Args:
        least_spread: Lower bound of the spread, so that a few accidentally similar differences do not look certain.
        prior: A spread that is known from other runs, and its degrees of freedom. The test is then the moderated t: a
            few differences say little about their spread. It is not used for differences that spread more than that.
    """
    n = len(differences)
    here, freedom = max(spread(differences), least_spread), float(n - 1)
    if prior is not None and here <= prior[0]:
        variance = (freedom * here**2 + prior[1] * prior[0] ** 2) / (freedom + prior[1])
        here, freedom = math.sqrt(variance), freedom + prior[1]
    return Comparison(mean(differences), here / math.sqrt(n), freedom, n)


def welch(challenger: Sequence[float], champion: Sequence[float], least_spread: float = 0.0) -> Comparison:
    """Run Welch's t-test for two groups with possibly unequal variances."""
    parts = [max(spread(group), least_spread) ** 2 / len(group) for group in (challenger, champion)]
    variance = math.fsum(parts)
    freedom = float(len(challenger) + len(champion) - 2)
    if variance > 0.0:
        # Squares of fractions of the variance neither overflow nor underflow.
        freedom = 1.0 / math.fsum(
            (part / variance) ** 2 / (len(group) - 1) for part, group in zip(parts, (challenger, champion), strict=True)
        )
    return Comparison(mean(challenger) - mean(champion), math.sqrt(variance), freedom, len(challenger))


# --- several looks at one test


@lru_cache(maxsize=64)
def looks(first: int, max_replicates: int, growth: float) -> tuple[int, ...]:
    """Return the replicate counts of the interim looks: from `first`, growing, to `max_replicates`."""
    plan = [min(first, max_replicates)]
    while plan[-1] < max_replicates:
        following = max(plan[-1] + 1, round(plan[-1] * growth))
        plan.append(max_replicates if following * growth > max_replicates * 1.25 else min(following, max_replicates))
    return tuple(plan)


@lru_cache(maxsize=4096)
def boundaries(alpha: float, plan: tuple[int, ...], power: float) -> tuple[float, ...]:
    """Return the largest p that wins at each look.

    The boundaries add up to `alpha`. By the union bound a null effect therefore passes any of the looks with
    probability `alpha` at most, however the looks depend on each other. After a fraction t of the runs, alpha × t^power
    is spent: little at the early looks, where only a large effect should win.
    """
    spent = [alpha * (n / plan[-1]) ** power for n in plan]
    return tuple(now - before for before, now in zip((0.0, *spent), spent, strict=False))


def predictive_power(effect: float, spread_: float, n: int, max_replicates: int, boundary: float) -> float:
    """Return the probability that a test with `effect` after n of `max_replicates` runs passes `boundary` at the end.

    The true effect has a flat prior; the normal approximation is good enough for a stopping rule.
    """
    needed = NORMAL.inv_cdf(1.0 - boundary) * spread_ / math.sqrt(max_replicates)
    left = spread_ * math.sqrt((max_replicates - n) / (max_replicates * n))
    if left == 0.0:
        return 1.0 if effect > needed else 0.0
    return NORMAL.cdf((effect - needed) / left)
