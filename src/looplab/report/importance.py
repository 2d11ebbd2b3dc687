"""Share of the objective's variance that each knob explains by itself.

The measured runs are grouped by the value of one knob (quantiles for numbers, equal values otherwise); the share is the
variance between the groups over the total. More groups explain more by chance, so the share is adjusted for their
number (adjusted R²): a knob without effect has a share near 0. Knobs that were changed together share the credit, which
is why every report says "explained by this knob alone".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

MIN_RUNS = 8
"""Minimum number of measured runs."""
MAX_BINS = 8
LABEL = "explained by this knob alone"
_UNSET = "not set"


@dataclass(frozen=True, slots=True)
class Share:
    """Importance of one knob."""

    knob: str
    share: float
    """Share of the objective's variance, from 0 to 1."""
    groups: int
    """Number of groups of its values."""
    clear: bool
    """Whether it exceeds what a knob without effect would show by chance."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Importance of all knobs."""

    shares: tuple[Share, ...]
    """Largest first; without knobs that have one value in all measured runs."""
    runs: int
    """Number of measured runs."""
    note: str | None = None
    """Why there is no result; None if there is one."""


def importance(knobs: Mapping[str, Sequence[Any]], objective: Sequence[float | None]) -> Importance:
    """Return the share of each knob; values and objectives are in the order of the runs."""
    measured = [place for place, value in enumerate(objective) if value is not None]
    runs = len(measured)
    if runs < MIN_RUNS:
        return Importance((), runs, f"needs at least {MIN_RUNS} measured runs; there are {runs}")
    target = winsorised([float(value) for value in objective if value is not None])
    if min(target) == max(target):
        return Importance((), runs, "all measured runs have the same objective")
    shares = []
    for knob, values in knobs.items():
        groups = group([values[place] for place in measured])
        if len(set(groups)) > 1:
            shares.append(_share(knob, groups, target))
    note = None if shares else "no knob has more than one value among the measured runs"
    return Importance(tuple(sorted(shares, key=lambda share: -share.share)), runs, note)


def _share(knob: str, groups: Sequence[Any], target: Sequence[float]) -> Share:
    members: dict[Any, list[float]] = {}
    for label, value in zip(groups, target, strict=True):
        members.setdefault(label, []).append(value)
    n, k = len(target), len(members)
    explained = 1.0 - sum(map(_squares, members.values())) / _squares(target)
    corrected = 1.0 - (1.0 - explained) * (n - 1) / (n - k)
    # Without effect, `explained` has a beta distribution with this mean and standard deviation.
    mean = (k - 1) / (n - 1)
    sd = sqrt(2.0 * (k - 1) * (n - k) / ((n - 1) ** 2 * (n + 1)))
    return Share(knob, min(1.0, max(0.0, corrected)), k, explained > mean + 3.0 * sd)


def group(values: Sequence[Any]) -> list[Any]:
    """Return a group label for each value; equal values get the same label."""
    if all(value is None or _is_number(value) for value in values):
        return _bins(values)
    labels = [_UNSET if value is None else json.dumps(value, sort_keys=True, default=str) for value in values]
    counts = Counter(labels)
    # A value that was tried once has no variance: such values form one group.
    return [label if counts[label] > 1 else "once" for label in labels]


def _bins(values: Sequence[Any]) -> list[Any]:
    counts = Counter(value for value in values if value is not None)
    n = sum(counts.values())
    bins = max(2 if n < 12 else 3, min(MAX_BINS, int(sqrt(n) / 1.5)))  # three bins can show a valley, two cannot
    if len(counts) <= bins:
        return [_UNSET if value is None else value for value in values]
    labels: dict[Any, int] = {}
    before = 0
    for value in sorted(counts):
        labels[value] = int((before + counts[value] / 2) * bins / n)
        before += counts[value]
    return [_UNSET if value is None else labels[value] for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def winsorised(values: list[float]) -> list[float]:
    """Scale values to 0–1 and clip outliers at 1.5 interquartile ranges, so that one diverged run does not dominate."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered) - 1) // 4]
    margin = 1.5 * (high - low)
    if margin > 0.0:
        values = [min(max(value, low - margin), high + margin) for value in values]
    least, most = min(values), max(values)
    if least == most:
        return [0.0] * len(values)
    # Halved, since the difference of two floats may overflow.
    return [(value / 2 - least / 2) / (most / 2 - least / 2) for value in values]


def _squares(values: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
