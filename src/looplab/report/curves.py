"""Curves for charts: which runs to draw, and thinning that preserves their shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from looplab.config.lab import StudyConfig
from looplab.ledger.roles import Origin
from looplab.ledger.view import RunRow
from looplab.measure.base import Batch, Curve
from looplab.measure.discover import reader_of
from looplab.report.facts import RunFacts, StudyFacts

MAX_DRAWN = 40
MAX_POINTS = 400
MAX_METRICS = 24
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


def read_drawn(facts: StudyFacts, study: StudyConfig, *, points: int = MAX_POINTS) -> dict[str, Batch]:
    """Return the thinned curves of the chosen runs, by run id."""
    drawn: dict[str, Batch] = {}
    for run in choose(facts):
        batch = read(facts.folder, run.row, study)
        drawn[run.row.id] = {name: thin(curve, points) for name, curve in batch.items() if len(curve.values) > 1}
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
    counts: dict[str, int] = {}
    for batch in drawn.values():
        for name in batch:
            counts[name] = counts.get(name, 0) + 1
    names = sorted(counts, key=lambda name: (name != facts.metric, -counts[name]))
    return names[:MAX_METRICS]
