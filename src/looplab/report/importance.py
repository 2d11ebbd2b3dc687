"""How much of the objective's variance each knob explains by itself.

The measured runs are put into groups by the value of one knob (quantiles for numbers, equal values for everything
else), and the variance between the groups is compared with the whole. More groups explain more by luck alone, so the
share is corrected for their number: a knob that does nothing comes out near 0. Knobs that were changed together share
the credit, which is why every report says "explained by this knob alone".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

MIN_RUNS = 8
"""With fewer measured runs nothing is said."""
MAX_BINS = 8
LABEL = "explained by this knob alone"
_UNSET = "not set"


@dataclass(frozen=True, slots=True)
class Share:
    """What one knob explains."""

    knob: str
    share: float
    """0 … 1, of the objective's variance."""
    groups: int
    """Into how many groups its values were put."""
    clear: bool
    """Whether that is more than a knob without any effect would show by chance."""


@dataclass(frozen=True, slots=True)
class Importance:
    shares: tuple[Share, ...]
    """The largest first; knobs that have one value in all measured runs are left out."""
    runs: int
    """How many measured runs it rests on."""
    note: str | None = None
    """Why nothing is said, where that is so."""


def importance(knobs: Mapping[str, Sequence[Any]], objective: Sequence[float | None]) -> Importance:
    """The share of each knob; the values of a knob and the objectives stand in the order of the runs."""
    measured = [place for place, value in enumerate(objective) if value is not None]
    runs = len(measured)
    if runs < MIN_RUNS:
        return Importance((), runs, f"needs at least {MIN_RUNS} measured runs; there are {runs}")
    target = _pulled_in([float(value) for value in objective if value is not None])
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
    # Without any effect, `explained` follows a beta distribution with this mean and spread.
    mean = (k - 1) / (n - 1)
    spread = sqrt(2.0 * (k - 1) * (n - k) / ((n - 1) ** 2 * (n + 1)))
    return Share(knob, min(1.0, max(0.0, corrected)), k, explained > mean + 3.0 * spread)


def group(values: Sequence[Any]) -> list[Any]:
    """A label for each value; equal values never part."""
    if all(value is None or _is_number(value) for value in values):
        return _bins(values)
    labels = [_UNSET if value is None else json.dumps(value, sort_keys=True, default=str) for value in values]
    counts = Counter(labels)
    # A value that was tried once tells nothing about its spread: such values stand together.
    return [label if counts[label] > 1 else "once" for label in labels]


def _bins(values: Sequence[Any]) -> list[Any]:
    counts = Counter(value for value in values if value is not None)
    n = sum(counts.values())
    bins = max(2 if n < 12 else 3, min(MAX_BINS, int(sqrt(n) / 1.5)))  # three see a valley, two do not
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


def _pulled_in(values: list[float]) -> list[float]:
    """The values on a scale from 0 to 1, those far outside the middle half moved to its fence: one diverged run decides
    nothing."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered) - 1) // 4]
    reach = 1.5 * (high - low)
    if reach > 0.0:
        values = [min(max(value, low - reach), high + reach) for value in values]
    least, most = min(values), max(values)
    if least == most:
        return [0.0] * len(values)
    # By halves, since the distance of two floats may be too large for a float.
    return [(value / 2 - least / 2) / (most / 2 - least / 2) for value in values]


def _squares(values: Sequence[float]) -> float:
    """The sum of squared distances from the mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
