"""Curves for charts: which runs to draw, and thinning that preserves their shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from looplab.config.lab import StudyConfig
from looplab.ledger.roles import Origin
from looplab.ledger.view import RunRow
from looplab.measure.base import Batch, Curve
from looplab.measure.discover import reader_of
from looplab.report.facts import RunFacts, StudyFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_DRAWN = 40
MAX_POINTS = 400
MAX_METRICS = 24
MAX_SEEDS = 8
"""Runs of one config that are read for its band."""
_LEADERS, _LATEST, _BASES, _FAILED = 10, 8, 3, 4


def choose(facts: StudyFacts, limit: int = MAX_DRAWN) -> list[RunFacts]:
    """Choose the runs to draw, in order of their numbers: the best, the latest, bases, failures, and a sample."""
    candidates = [run for run in facts.runs if any(metric.n + metric.nan > 1 for metric in run.metrics.values())]
    if len(candidates) <= limit:
        return candidates
    measured = sorted((run for run in candidates if run.objective is not None), key=facts.sort_key)
    lists = [
        [run for run in candidates if facts.best is not None and run.row.id == facts.best.row.id],
        measured[:_LEADERS],
        [run for run in candidates if run.row.state == "running"][-_LATEST:] or candidates[-_LATEST:],
        [run for run in candidates if run.row.proposer == Origin.BASE][:_BASES],
        [run for run in candidates if run.is_failure][-_FAILED:],
    ]
    chosen = {run.row.id: run for some in lists for run in some}
    rest = [run for run in measured or candidates if run.row.id not in chosen]
    room = limit - len(chosen)
    chosen |= {run.row.id: run for run in _evenly_spaced(rest, room)}
    return sorted(list(chosen.values())[:limit], key=lambda run: run.row.n)


def _evenly_spaced(runs: Sequence[RunFacts], room: int) -> list[RunFacts]:
    """Return `room` runs at equal distances."""
    if room <= 0 or len(runs) <= room:
        return list(runs[: max(0, room)])
    return [runs[place * (len(runs) - 1) // max(1, room - 1)] for place in range(room)]


def read(outputs: Path, row: RunRow, study: StudyConfig) -> Batch:
    """Read all metrics of a run from its files; the last line of a killed run may be incomplete."""
    return reader_of(study, outputs / row.id).poll(final=row.status == "ok")


def read_drawn(facts: StudyFacts, study: StudyConfig) -> dict[str, Batch]:
    """Return the thinned curves of the chosen runs, by run id."""
    drawn: dict[str, Batch] = {}
    for run in choose(facts):
        batch = read(facts.folder, run.row, study)
        drawn[run.row.id] = {name: thin(curve) for name, curve in batch.items() if len(curve.values) > 1}
    return drawn


def thin(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """Thin a curve to `limit` points: the first, the last, and the minimum and maximum of each bucket.

    A bucket without finite values keeps one point, so that gaps stay visible.
    """
    steps, values = curve.steps, curve.values
    n = len(values)
    if n <= limit:
        return curve
    if limit < 4:
        indices = [0, n - 1][:limit]
        return Curve([steps[i] for i in indices], [values[i] for i in indices])
    buckets = (limit - 2) // 2
    indices = [0]
    inner = n - 2
    for bucket in range(buckets):
        start, end = 1 + bucket * inner // buckets, 1 + (bucket + 1) * inner // buckets
        part = values[start:end]
        if not isfinite(sum(part)):
            places = [i for i in range(start, end) if isfinite(values[i])]
            if not places:
                indices.append(start)
                continue
            low, high = min(places, key=values.__getitem__), max(places, key=values.__getitem__)
        else:
            low, high = start + part.index(min(part)), start + part.index(max(part))
        indices += [low] if low == high else [low, high] if low < high else [high, low]
    indices.append(n - 1)
    return Curve([steps[i] for i in indices], [values[i] for i in indices])


def metrics_drawn(facts: StudyFacts, drawn: Mapping[str, Batch]) -> list[str]:
    """Return the metrics with curves: the objective, then by number of runs, then in order of logging."""
    counts = Counter(name for batch in drawn.values() for name in batch)
    names = sorted(counts, key=lambda name: (name != facts.metric, -counts[name]))
    return names[:MAX_METRICS]


@dataclass(frozen=True, slots=True)
class Band:
    """The curve of a config on a grid: mean, and the range between its seeds, or within each cell for a single run.

    NaN where it has no value; `low` and `high` are None if there is nothing but the mean.
    """

    mean: NDArray[np.float64]
    low: NDArray[np.float64] | None
    high: NDArray[np.float64] | None
    seeds: int


def read_seeds(facts: StudyFacts, study: StudyConfig, leads: Sequence[str]) -> dict[str, list[Batch]]:
    """Return the curves of the replicates of some runs, by the run that they repeat."""
    found: dict[str, list[Batch]] = {}
    for run in facts.runs:
        if run.into is None or run.into not in leads or run.row.state != "ended":
            continue
        own = found.setdefault(run.into, [])
        if len(own) < MAX_SEEDS - 1:
            batch = read(facts.folder, run.row, study)
            own.append({name: thin(curve) for name, curve in batch.items()})
    return found


def common_grid(curves: Sequence[Curve], limit: int) -> tuple[NDArray[np.float64], bool]:
    """Return the x values at which curves are drawn together: all their steps, or the centres of `limit` equal cells;
    and whether they are cells."""
    import numpy as np

    steps = np.unique(np.concatenate([np.asarray(curve.steps, dtype=float) for curve in curves] or [np.empty(0)]))
    steps = steps[np.isfinite(steps)]
    if len(steps) <= limit:
        return steps, False
    edges = np.linspace(steps[0], steps[-1], limit + 1)
    return (edges[:-1] + edges[1:]) / 2, True


def band(curves: Sequence[Curve], grid: NDArray[np.float64], *, cells: bool) -> Band:
    """Return the curves of one config, one for each seed, as one curve on a grid."""
    import numpy as np

    placed = [_on_grid(curve, grid, cells=cells) for curve in curves]
    means = np.array([mean for mean, _, _ in placed])
    counts = np.isfinite(means).sum(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.where(counts > 0, np.nansum(means, axis=0) / np.maximum(counts, 1), np.nan)
    if len(placed) > 1:
        return Band(mean, np.fmin.reduce(means), np.fmax.reduce(means), len(placed))
    _, low, high = placed[0]
    return Band(mean, low if cells else None, high if cells else None, 1)


def _on_grid(
    curve: Curve, grid: NDArray[np.float64], *, cells: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return mean, minimum and maximum of a curve in each cell, with straight lines between its points; NaN outside it,
    and where it has no finite value."""
    import numpy as np

    steps, values = np.asarray(curve.steps, dtype=float), np.asarray(curve.values, dtype=float)
    nothing = np.full(len(grid), np.nan)
    usable = np.isfinite(steps)
    finite = usable & np.isfinite(values)
    if not finite.any():
        return nothing, nothing, nothing
    if cells:
        width = grid[1] - grid[0]
        place = np.clip(((steps[usable] - grid[0]) / width + 0.5).astype(int), 0, len(grid) - 1)
    else:
        place = np.searchsorted(grid, steps[usable])
    gap = np.zeros(len(grid), dtype=bool)
    gap[place] = True
    own, inside = values[finite], place[np.isfinite(values[usable])]
    sums = np.bincount(inside, own, len(grid))
    counts = np.bincount(inside, minlength=len(grid))
    low, high = np.full(len(grid), np.inf), np.full(len(grid), -np.inf)
    np.minimum.at(low, inside, own)
    np.maximum.at(high, inside, own)
    has = counts > 0
    gap &= ~has
    known = np.flatnonzero(has)
    between = np.zeros(len(grid), dtype=bool)
    between[known[0] : known[-1] + 1] = True
    filled = np.interp(grid, grid[known], sums[known] / counts[known])
    mean = np.where(between & ~gap, filled, np.nan)
    return mean, np.where(has, low, mean), np.where(has, high, mean)
