"""Curves for the page: runs of different steps on one grid, with the mean and the range of each bucket.

uPlot wants one x for all series, and raw curves of twenty runs are a solid block. So the server puts them on one grid:
the steps themselves if there are few, else equal buckets; per bucket the mean, the smallest and the largest value.
Seeds of one config become one series whose band is the range between them.
"""

from __future__ import annotations

import functools
import math
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplab.config.lab import StudyConfig
from looplab.measure.base import Batch
from looplab.measure.discover import Reader, reader_of
from looplab.report.html import short
from looplab.untrusted import clean_line

MAX_POINTS = 1000
MAX_RUNS = 40
MAX_METRICS = 24
MAX_CACHED = 1_500_000
"""Points of all curves in memory; 16 bytes each."""


@dataclass(slots=True)
class RunCurves:
    """The curves of a run, and the reader that continues them."""

    reader: Reader
    steps: dict[str, array[float]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)
    is_over: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.steps.values()))

    def add(self, batch: Batch) -> None:
        for name, curve in batch.items():
            self.steps.setdefault(name, array("d")).extend(curve.steps)
            self.values.setdefault(name, array("d")).extend(curve.values)


class CurveCache:
    """Curves of the runs that were looked at last. Not thread-safe."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, RunCurves] = OrderedDict()

    def read(self, study: StudyConfig, run_dir: Path, *, is_over: bool) -> RunCurves:
        """Return all curves of a run up to now."""
        followed = self._runs.pop(run_dir, None)
        if followed is None:
            followed = RunCurves(reader_of(study, run_dir))
        if not followed.is_over:
            followed.add(followed.reader.poll(final=is_over))
            followed.is_over = is_over
        self._runs[run_dir] = followed
        total = sum(one.size for one in self._runs.values())
        while total > MAX_CACHED and len(self._runs) > 1:
            _, dropped = self._runs.popitem(last=False)
            total -= dropped.size
        return followed


@dataclass(frozen=True, slots=True)
class CurveRequest:
    """Which runs and metrics to draw, and how."""

    runs: Sequence[tuple[str, str, bool]]
    """Id, first run of its config, and whether it has ended."""
    metrics: Sequence[str]
    """Empty: those that most of the runs have."""
    points: int = 500
    low: float | None = None
    """First step; None: the first of all."""
    high: float | None = None
    log: bool = False
    """Whether buckets have equal widths on a log scale."""
    by_config: bool = True
    """Whether seeds of one config are one series."""


def draw(cache: CurveCache, study: StudyConfig, outputs: Path, request: CurveRequest) -> dict[str, Any]:
    """Return the curves on one grid per metric, as JSON data."""
    read = {id_: cache.read(study, outputs / id_, is_over=over) for id_, _, over in request.runs[:MAX_RUNS]}
    counts = Counter(name for followed in read.values() for name in followed.steps)
    objective = study.objective.metric if study.objective else None
    known = sorted(counts, key=lambda name: (name != objective, -counts[name]))
    chosen = [name for name in request.metrics if name in counts] if request.metrics else known[:MAX_METRICS]
    groups: dict[str, list[str]] = {}
    for id_, lead, _ in request.runs[:MAX_RUNS]:
        groups.setdefault(lead if request.by_config else id_, []).append(id_)
    return {
        "metrics": [clean_line(name) for name in known],
        "charts": [_chart(name, groups, read, request) for name in chosen[:MAX_METRICS]],
        "problems": {id_: list(read[id_].reader.problems.values())[:3] for id_ in read if read[id_].reader.problems},
    }


def _chart(
    metric: str, groups: Mapping[str, Sequence[str]], read: Mapping[str, RunCurves], request: CurveRequest
) -> dict[str, Any]:
    curves = {
        id_: (read[id_].steps[metric], read[id_].values[metric])
        for members in groups.values()
        for id_ in members
        if metric in read[id_].steps
    }
    grid, place, is_exact = _grid([steps for steps, _ in curves.values()], request)
    series = []
    for name, members in groups.items():
        bucketed = [_buckets(*curves[id_], len(grid), place) for id_ in members if id_ in curves]
        if bucketed:
            mean, low, high = bucketed[0] if len(bucketed) == 1 else _band(bucketed)
            series.append({"run": name, "runs": len(bucketed), "mean": mean, "low": low, "high": high})
    return {
        "metric": clean_line(metric),
        "x": [short(step, 9) for step in grid],
        "exact": is_exact,
        "series": series,
    }


FindBucket = Callable[[float], int]
"""Returns the bucket of a step; negative: outside."""
Buckets = tuple[list[float | None], list[float | None], list[float | None]]


def _grid(all_steps: Sequence[array[float]], request: CurveRequest) -> tuple[list[float], FindBucket, bool]:
    """Return the x of each bucket, the function that finds the bucket of a step, and whether each step has its own."""
    points = max(2, min(request.points, MAX_POINTS))
    finite = [step for steps in all_steps for step in (steps[0], steps[-1]) if math.isfinite(step)] or [0.0]
    low = min(finite) if request.low is None else request.low
    high = max(finite) if request.high is None else request.high
    exact = _few_steps(all_steps, low, high, points)
    if exact is not None:
        return exact, functools.partial(_find_exact, exact), True
    if request.log and high > 0:
        first = math.log(low if low > 0 else min(1.0, high / 2))
        width = (math.log(high) - first) / points or 1.0
        grid = [math.exp(first + (n + 0.5) * width) for n in range(points)]
        return (
            grid,
            lambda step: (
                min(points - 1, int((math.log(step) - first) / width)) if step > 0 and low <= step <= high else -1
            ),
            False,
        )
    width = (high - low) / points or 1.0
    grid = [low + (n + 0.5) * width for n in range(points)]
    return grid, lambda step: min(points - 1, int((step - low) / width)) if low <= step <= high else -1, False


def _few_steps(all_steps: Sequence[array[float]], low: float, high: float, points: int) -> list[float] | None:
    """Return all steps between two, sorted; None if they are more than `points`."""
    distinct: set[float] = set()
    for steps in all_steps:
        distinct.update(step for step in steps if low <= step <= high)
        if len(distinct) > points:
            return None
    return sorted(distinct)


def _find_exact(exact: Sequence[float], step: float) -> int:
    at = bisect_left(exact, step)
    return at if at < len(exact) and exact[at] == step else -1


def _buckets(steps: array[float], values: array[float], count: int, place: FindBucket) -> Buckets:
    sums, numbers = [0.0] * count, [0] * count
    low: list[float | None] = [None] * count
    high: list[float | None] = [None] * count
    for step, value in zip(steps, values, strict=True):
        at = place(step)
        if at < 0 or not math.isfinite(value):
            continue
        sums[at] += value
        numbers[at] += 1
        least, most = low[at], high[at]
        low[at] = value if least is None or value < least else least
        high[at] = value if most is None or value > most else most
    mean = [short(total / n) if n else None for total, n in zip(sums, numbers, strict=True)]
    return mean, [short(value) for value in low], [short(value) for value in high]


def _band(members: Sequence[Buckets]) -> Buckets:
    """Return the mean over seeds, and the range of their means."""
    mean: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for means in zip(*(one[0] for one in members), strict=True):
        present = [value for value in means if value is not None]
        mean.append(short(sum(present) / len(present)) if present else None)
        low.append(min(present) if present else None)
        high.append(max(present) if present else None)
    return mean, low, high
