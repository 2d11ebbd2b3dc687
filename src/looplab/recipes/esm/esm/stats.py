"""Paired tests and confidence intervals for two methods on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a method with a baseline, question by question."""

    n: int
    delta: float
    """Mean difference of accuracy."""
    ci_low: float
    ci_high: float
    """95 % bootstrap confidence interval of the difference, over questions."""
    win: int
    lose: int
    """Questions that only the method, or only the baseline, answers correctly (first seed)."""
    mcnemar_p: float | None
    """Two-sided exact McNemar test on win and lose; None with several seeds, whose answers are not independent."""


def mcnemar(win: int, lose: int) -> float:
    """Return the two-sided p-value of the exact McNemar test."""
    n, k = win + lose, min(win, lose)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return float(min(1.0, 2 * tail / 2**n))


def bootstrap(differences: Floats, samples: int = 10_000, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, resampling questions.

    Only the counts of the distinct differences matter, so one multinomial draw per sample is enough.
    """
    if len(differences) == 0:
        return math.nan, math.nan
    values, counts = np.unique(differences, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(differences), counts / len(differences), size=samples)
    low, high = np.quantile(draws @ values / len(differences), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_nested(
    differences: Floats, samples: int = 10_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile interval of the mean of differences [seed, question], resampling seeds and questions."""
    seeds, questions = differences.shape
    if seeds == 1 or not questions:
        return bootstrap(differences[0] if seeds else np.zeros(0), samples, seed, level)
    rng = np.random.default_rng(seed)
    means = np.empty(samples)
    for start in range(0, samples, 500):
        count = min(500, samples - start)
        chosen = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=count) / seeds
        asked = rng.multinomial(questions, np.full(questions, 1 / questions), size=count) / questions
        means[start : start + count] = np.einsum("bs,sq,bq->b", chosen, differences, asked, optimize=True)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired(
    baseline: Sequence[Sequence[bool]], method: Sequence[Sequence[bool]], samples: int = 10_000
) -> PairedComparison:
    """Compare answers given as [seed][question]. Each question counts once, with the mean over its seeds."""
    before, after = np.asarray(baseline, dtype=np.float64), np.asarray(method, dtype=np.float64)
    differences = after.mean(axis=0) - before.mean(axis=0)
    win = int((after[0] > before[0]).sum())
    lose = int((after[0] < before[0]).sum())
    low, high = bootstrap(differences, samples)
    delta = float(differences.mean()) if len(differences) else math.nan
    p = mcnemar(win, lose) if len(before) == len(after) == 1 else None
    return PairedComparison(len(differences), delta, low, high, win, lose, p)
