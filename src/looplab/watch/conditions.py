"""What a rule can look out for, one class for each kind; one object for each rule and run.

A sign is shown every new row once, in order, and says when it has found what it looks for. How the rows were cut into
looks makes no difference to what is found: between two looks a run may write one row or ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import repeat
from math import inf, isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from looplab.config.expression import Expression, ExpressionError, MissingName
from looplab.config.lab import DivergeConfig, PlateauConfig
from looplab.measure.base import Batch, Curve
from looplab.measure.names import FIELDS, MetricNames
from looplab.measure.summary import Directions, Goal, MetricSummary, Summariser

if TYPE_CHECKING:
    from looplab.watch.pruner import Pruner

NEAR = 0.01
"""A metric that has come close to 0 is never called diverged for less than `factor` times this share of its range."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A running run at the moment of a look. Its times, and the look's, are all of one clock."""

    run_id: str
    batch: Batch
    """The rows that are new since the last look, each once."""
    step: float | None
    """The last step; none if there was no row yet."""
    started: float
    """When it began."""
    last_row: float
    """When a new row was last seen; when it began if there was none."""
    budget_used: str | None = None
    """Which budget of the study is used, and how far, as soon as one is."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a sign found."""

    text: str
    """A sentence with the numbers."""
    step: float | None
    """The step it was found at."""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers by name."""


class Condition(Protocol):
    """Looks for one thing in one run."""

    unable: str | None
    """Why it cannot look at present, as for a metric that has not been measured yet."""

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        """What the new rows, or the time that went by, bring to light."""
        ...


class ExpressionCondition:
    """An expression over `step`, `seconds` and metrics.

    It is evaluated once for every step that any metric has, with the values known at that step, when all of that step
    is there: when a row of another step comes, or when a look finds nothing new (several rows, or several files, may
    belong to one step). One that reads `seconds` is evaluated at quiet looks, too.
    """

    def __init__(self, expression: Expression, directions: Directions) -> None:
        self._wanted = _metrics_in(expression)
        self.unable = f"{', '.join(sorted(expression.names))} was not measured" if self._wanted else None
        self._expression = expression
        self._any_time = "seconds" in expression.names
        self._every_step = self._any_time or "step" in expression.names
        self._summariser = Summariser(directions, kept=1)
        self._metrics: dict[str, MetricSummary] = {}
        self._others = {"seconds": 0.0}
        self._names = MetricNames(self._metrics, self._others)
        self._touched: set[str] = set()
        self._open = False  # whether the last step is still to be evaluated

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        self._others["seconds"] = now - run.started
        if not run.batch:
            due, self._open = self._open or self._any_time, False
            return self._evaluate() if due else None
        for step, name, value in self._points(run.batch):
            if self._open and step != self._others["step"]:
                self._open = False
                if found := self._evaluate():
                    return found
            self._others["step"] = step
            if name is not None:
                self._summariser.add({name: Curve([step], [value])})
                self._touched.add(name)
                self.unable = None
            self._open = self._open or name is not None or self._every_step
        return None

    def _points(self, batch: Batch) -> Iterator[tuple[float, str | None, float]]:
        """The points of the wanted metrics by step, and the steps of all others. Each curve keeps its order: where a
        trainer that began again repeats steps, they are repeated."""
        read = {name: curve for name, curve in batch.items() if name.replace("/", ".") in self._wanted}
        others = {tuple(curve.steps) for name, curve in batch.items() if name not in read}
        others -= {tuple(curve.steps) for curve in read.values()}
        streams: list[Iterator[tuple[float, str | None, float]]] = [
            *(zip(curve.steps, repeat(name), curve.values, strict=False) for name, curve in read.items()),
            *(zip(steps, repeat(None), repeat(0.0), strict=False) for steps in others),
        ]
        return streams[0] if len(streams) == 1 else merge(*streams, key=itemgetter(0))

    def _evaluate(self) -> Match | None:
        known = len(self._metrics)
        for name in self._touched:
            summary = self._summariser.summary(name)
            assert summary is not None
            self._metrics[name] = summary
        self._touched.clear()
        if len(self._metrics) != known:
            self._names = MetricNames(self._metrics, self._others)
        self.unable = None
        try:
            value = self._expression.evaluate(self._names)
        except MissingName as error:
            self.unable = f"{error.name} was not measured"
            return None
        except ExpressionError as error:
            self.unable = str(error)
            return None
        if not isinstance(value, bool):
            self.unable = f"`{self._expression}` is {value!r}, neither true nor false"
            return None
        if not value:
            return None
        values = self._expression.values(self._names)
        said = ", ".join(f"{name} = {_number(value)}" for name, value in values.items() if name != "step")
        step = self._others.get("step")
        what = said if step is None else f"{_at(step)}: {said}" if said else _at(step)
        return Match(f"{what} ({self._expression})", step, values)


class NotFinite:
    """NaN or infinity, in any metric or in some."""

    def __init__(self, metrics: list[str] | None) -> None:
        self._metrics = metrics
        self.unable = None if metrics is None else f"{', '.join(metrics)} was not measured"

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        batch = run.batch
        if self._metrics is not None:
            batch = {metric: curve for metric in self._metrics if (curve := _curve(run.batch, metric))}
            if batch:
                self.unable = None
        first: tuple[float, str, float] | None = None
        for name, curve in batch.items():
            if isfinite(sum(curve.values)):
                continue  # the common case, and all of it in one fast pass
            bad = ((step, name, value) for step, value in _points(curve) if not isfinite(value))
            here = next(bad, None)  # none: each was finite, only their sum was not
            if here is not None and (first is None or here[:2] < first[:2]):
                first = here
        if first is None:
            return None
        step, name, value = first
        return Match(f"{_at(step)}: {name} is {_number(value)}", step, {name: value})


class Diverged:
    """A value that is `factor` times worse than the best so far.

    Times worse means: for a metric to be made small, more than best × factor if the best is above 0 and more than
    best ÷ factor if it is below; for one to be made large, the mirror image (an accuracy of 0.9 has got 10 times worse
    below 0.09). Close to 0, where a ratio says little, the value must also lie further from the best than `factor`
    percent of the range of the values so far. Infinity on the bad side has diverged, NaN is not compared.
    """

    def __init__(self, settings: DivergeConfig, goal: Goal) -> None:
        self.unable: str | None = f"{settings.metric} was not measured"
        self._settings = settings
        self._sign = 1.0 if goal == "min" else -1.0  # times this, smaller is better
        self._best: float | None = None
        self._best_step = 0.0
        self._worst = -inf

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        metric, factor, after = self._settings.metric, self._settings.factor, self._settings.after
        curve = _curve(run.batch, metric)
        if curve is None:
            return None
        self.unable = None
        for step, raw in _points(curve):
            if step < after:
                continue
            value = raw * self._sign
            if self._best is not None and value > self._limit(self._best):
                best = self._best * self._sign
                text = f"{_at(step)}: {metric} = {_number(raw)}, more than {factor:g} times worse than its best"
                return Match(
                    f"{text}, {_number(best)} at {_at(self._best_step)}", step, {metric: raw, f"{metric}.best": best}
                )
            if isfinite(value):
                if self._best is None or value < self._best:
                    self._best, self._best_step = value, step
                self._worst = max(self._worst, value)
        return None

    def _limit(self, best: float) -> float:
        if best == self._worst == 0:
            return inf  # nothing but zeros: there is no measure of far away yet
        factor = self._settings.factor
        times = best * factor if best > 0 else best / factor
        return max(times, best + NEAR * factor * (self._worst - best))


class Plateau:
    """No progress for `over` steps. Progress is measured from the last value that was progress, so that many small
    gains add up to one; a value that is not finite is none."""

    def __init__(self, settings: PlateauConfig, goal: Goal) -> None:
        self.unable: str | None = f"{settings.metric} was not measured"
        self._settings = settings
        self._sign = 1.0 if goal == "min" else -1.0
        self._mark: float | None = None
        self._mark_step = 0.0

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        metric, over, least = self._settings.metric, self._settings.over, self._settings.least
        curve = _curve(run.batch, metric)
        if curve is None:
            return None
        self.unable = None
        for step, raw in _points(curve):
            value = raw * self._sign
            if isfinite(value) and (self._mark is None or value < self._mark - least * abs(self._mark)):
                self._mark, self._mark_step = value, step
            elif self._mark is not None and step - self._mark_step >= over:
                mark = self._mark * self._sign
                text = f"{_at(step)}: {metric} = {_number(raw)} has not improved"
                text += f" by {_number(100 * least)} %" if least else ""
                text += f" on {_number(mark)} of {_at(self._mark_step)}, {_number(over)} steps and more ago"
                return Match(text, step, {metric: raw, f"{metric}.best": mark})
        return None


class Stalled:
    """No new row for so many seconds; a run that never wrote one stalls, too."""

    unable: str | None = None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        quiet = now - run.last_row
        if run.batch or quiet < self._seconds:
            return None
        last = "there was none yet" if run.step is None else f"the last was {_at(run.step)}"
        return Match(f"no new row for {_seconds(quiet)}; {last}", run.step, {"seconds": quiet})


class Timeout:
    """A run that has taken so many seconds."""

    unable: str | None = None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        seconds = now - run.started
        if seconds < self._seconds:
            return None
        text = f"it has run for {_seconds(seconds)}, {_seconds(self._seconds)} are allowed"
        return Match(text, run.step, {"seconds": seconds})


class BudgetUsed:
    """The study's wall-clock or device budget is used."""

    unable: str | None = None

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        return None if run.budget_used is None else Match(run.budget_used, run.step)


class PrunerCondition:
    """A run that will not be among the good ones, by a pruner that has seen the others."""

    def __init__(self, run_id: str, metric: str, pruner: Pruner) -> None:
        self.unable: str | None = f"{metric} was not measured"
        self._run_id = run_id
        self._metric = metric
        self._pruner = pruner
        self._rows = Curve()  # all so far: the pruner compares runs at the same step

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        curve = _curve(run.batch, self._metric)
        if curve is None:
            return None
        self.unable = None
        rows = self._rows
        found = None
        for step, value in _points(curve):
            rows.add(step, value)
            if found is None and (why := self._pruner.doomed(self._run_id, rows.steps, rows.values)):
                found = Match(why, step, {self._metric: value})
        return found

    def ended(self, value: float | None, rest: Batch) -> None:
        """Let the pruner learn from the run and from the rows that it has not been shown."""
        curve = _curve(rest, self._metric)
        if curve is not None:
            self.unable = None
            self._rows.extend(curve)
        self._pruner.ended(self._run_id, self._rows.steps, self._rows.values, value)


def _metrics_in(expression: Expression) -> set[str]:
    """The names that a metric would have, with dots, to be read by the expression."""
    names = {name.replace("/", ".") for name in expression.names}
    names |= {head for head, _, tail in (name.rpartition(".") for name in names) if tail in FIELDS}
    return names - {"", "step", "seconds"}


def _curve(batch: Batch, metric: str) -> Curve | None:
    """A metric's curve, by its name or, as in expressions, with dots for slashes."""
    if metric in batch:
        return batch[metric]
    return next((curve for name, curve in batch.items() if name.replace("/", ".") == metric), None)


def _points(curve: Curve) -> Iterator[tuple[float, float]]:
    return zip(curve.steps, curve.values, strict=True)


def _at(step: float) -> str:
    return f"step {_number(step)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if value != value:
        return "NaN"
    if value in (inf, -inf):
        return "infinite" if value > 0 else "minus infinite"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
