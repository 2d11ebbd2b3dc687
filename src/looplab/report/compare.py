"""Compare runs: differences of their configs, their metrics, and their curves on shared axes."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from looplab.config import paths
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.ledger.view import RunRow, StudyView
from looplab.measure.base import Batch, Curve
from looplab.measure.summary import Directions, MetricSummary, Summariser, from_dict
from looplab.report import curves, html, wording
from looplab.report.facts import ARGUMENTS
from looplab.runs import folder

SPARK_WIDTH = 24
MAX_CURVES = 24
"""Maximum number of metrics with curves on the page."""
MISSING = object()
"""Marks a key that a run's config does not have; null is a value."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of all runs, in order; None if a run did not measure it."""

    metric: str
    goal: str
    known: bool
    """Whether the study defines the goal; otherwise it is guessed from the name."""
    last: tuple[float | None, ...]
    best: tuple[float | None, ...]

    def delta(self, place: int) -> float | None:
        """Return the last value of a run minus that of the first run; None for the first."""
        first, mine = self.last[0], self.last[place]
        return None if place == 0 or first is None or mine is None else mine - first


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Configs, metrics and curves of several runs."""

    study: str
    runs: tuple[RunRow, ...]
    """The first is the reference for the others."""
    config: dict[str, tuple[Any, ...]]
    """Keys that differ; `MISSING` if a run does not have the key."""
    metrics: tuple[Compared, ...]
    """The objective first, then metrics of all runs, then those of some."""
    curves: tuple[Batch, ...]
    """Curves of each run, thinned."""


def compare(outputs: Path, study: StudyConfig, record: StudyView, names: Sequence[str]) -> RunComparison:
    """Compare the named runs.

    Raises:
        LabError: Fewer than two different runs, or a run that has not started.
    """
    rows = tuple(dict.fromkeys(record.run(name) for name in names))
    if len(rows) < 2:
        same = f"{' and '.join(names)} are the same run" if len(names) > 1 else "there is only one run"
        raise LabError(f"{same}: nothing to compare", hint="name two or more runs, as in `looplab compare 1 BEST`")
    for row in rows:
        if row.state == "planned":
            raise LabError(f"run {row.id} has not started yet", hint="see `looplab status`")
    directions = Directions(study.goals)
    batches = [curves.read(outputs, row, study) for row in rows]
    summaries = [_summaries(outputs, row, batch, directions) for row, batch in zip(rows, batches, strict=True)]
    configs = [{**record.config_of(row, outputs / row.id), **_arguments(outputs, row)} for row in rows]
    return RunComparison(
        study=study.name,
        runs=rows,
        config=differing(configs),
        metrics=_metrics(summaries, study.objective.metric if study.objective else None, directions),
        curves=tuple({name: curves.thin(curve) for name, curve in batch.items()} for batch in batches),
    )


def _arguments(outputs: Path, row: RunRow) -> dict[str, str]:
    """Return extra arguments of the trainer, beyond launch.command, as a key of the config."""
    extra = folder.read_json(outputs / row.id, "run.json", strict=False).get("extra")
    return {ARGUMENTS: shlex.join(map(str, extra))} if isinstance(extra, list) and extra else {}


def _summaries(outputs: Path, row: RunRow, batch: Batch, directions: Directions) -> dict[str, MetricSummary]:
    """Return the summary of an ended run; for a running one, of its metrics so far."""
    plain = folder.read_json(outputs / row.id, "summary.json").get("metrics") if row.state == "ended" else None
    if plain:
        return from_dict(plain)
    summariser = Summariser(directions, kept=1)
    summariser.add(batch)
    return summariser.result()


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the leaves in which the configs differ."""
    flat = [paths.flatten(config) for config in configs]
    keys = dict.fromkeys(key for leaves in flat for key in leaves)
    found = {}
    for key in keys:
        values = tuple(leaves.get(key, MISSING) for leaves in flat)
        if any(value is MISSING or not paths.same(values[0], value) for value in values):
            found[key] = tuple(value if value is MISSING else wording.value(key, value) for value in values)
    return found


def _metrics(
    summaries: Sequence[Mapping[str, MetricSummary]], objective: str | None, directions: Directions
) -> tuple[Compared, ...]:
    counts = Counter(name for summary in summaries for name in summary)
    shared = [name for name, count in counts.items() if count > 1]
    shared.sort(key=lambda name: (name != objective, -counts[name]))
    return tuple(
        Compared(
            metric=name,
            goal=directions.goal(name),
            known=name in directions.explicit,
            last=tuple(summary[name].last if name in summary else None for summary in summaries),
            best=tuple(summary[name].best if name in summary else None for summary in summaries),
        )
        for name in shared
    )


def spark(curve: Curve | None, steps: tuple[float, float], values: tuple[float, float], width: int) -> str:
    """Draw a curve in one line of text, on the given axes; cells before the first finite value are blank."""
    if curve is None:
        return ""
    first, last = steps
    low, high = values
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if isfinite(value) and isfinite(step):
            cells[min(width - 1, int(_fraction(step, first, last) * width))].append(value)
    drawn = ""
    reached = max((i for i, cell in enumerate(cells) if cell), default=-1)
    last_mean: float | None = None
    for cell in cells[: reached + 1]:
        if cell:
            last_mean = sum(cell) / len(cell)
        # Between two points of a coarse curve, repeat the last one.
        drawn += " " if last_mean is None else wording.bars([_fraction(last_mean, low, high)])
    return drawn.ljust(width)


def _fraction(value: float, low: float, high: float) -> float:
    """Return the position of a value between `low` and `high`, from 0 to 1; halved, since `high - low` may overflow."""
    return min(1.0, max(0.0, (value / 2 - low / 2) / (high / 2 - low / 2))) if high > low else 0.5


def sparks(comparison: RunComparison, metric: str, width: int = SPARK_WIDTH) -> list[str]:
    """Draw one metric of each run on shared axes; empty texts if there are no curves."""
    own = [batch.get(metric) for batch in comparison.curves]
    values = [value for curve in own if curve for value in curve.values if isfinite(value)]
    steps = [step for curve in own if curve for step in curve.steps if isfinite(step)]
    if not values or not any(curve and len(curve.values) > 1 for curve in own):
        return [""] * len(own)
    return [spark(curve, (min(steps), max(steps)), (min(values), max(values)), width) for curve in own]


def compare_page(comparison: RunComparison) -> str:
    """Return an HTML page with the tables, and the curves of all runs on shared axes."""
    names = [metric.metric for metric in comparison.metrics]
    names += [name for batch in comparison.curves for name in batch]
    with_curve = {name for batch in comparison.curves for name, curve in batch.items() if len(curve.values) > 1}
    drawn = [name for name in dict.fromkeys(names) if name in with_curve][:MAX_CURVES]
    data = {
        "study": comparison.study,
        "runs": [
            {
                "id": row.id,
                "status": row.status or row.state,
                "by": row.proposer,
                "round": row.round,
                "why": wording.cut(wording.plain(row.reason), 2000),
            }
            for row in comparison.runs
        ],
        "config": [
            (key, [None if value is MISSING else wording.cut(wording.shown(value), 200) for value in values])
            for key, values in comparison.config.items()
        ],
        "metrics": [
            (compared.metric, compared.goal, compared.known, _short(compared.last), _short(compared.best))
            for compared in comparison.metrics
        ],
        "curves": [
            (
                name,
                [
                    (place, *html.packed(batch[name]))
                    for place, batch in enumerate(comparison.curves)
                    if name in batch and batch[name].values
                ],
            )
            for name in drawn
        ],
    }
    return html.page(f"{comparison.study}: runs side by side – looplab", data, "compare.js")


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [html.short(value, 8) for value in values]
