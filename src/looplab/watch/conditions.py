"""Conditions of watch rules: one class per kind, one object per rule and run.

A condition sees every new row once, in order, and returns a match when it holds. The result does not depend on how the
rows are split into looks: between two looks a run may write one row or ten thousand.
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
from looplab.untrusted import clean_line

if TYPE_CHECKING:
    from looplab.watch.pruner import Pruner

NEAR = 0.01
"""Near zero, divergence also requires a distance of `factor` times this fraction of the metric's range."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A running run at one look. All times are seconds of the clock that `now` comes from."""

    run_id: str
    batch: Batch
    """Rows that are new since the last look."""
    step: float | None
    """Last step; None: no row yet."""
    started: float
    """Start time."""
    last_row: float
    """Time at which a new row was last seen; without one, the start time."""
    budget_used: str | None = None
    """Sentence that names the exhausted budget of the study; None: none is exhausted."""


@dataclass(frozen=True, slots=True)
class Match:
    """Why and where a condition holds."""

    text: str
    """A sentence with the numbers."""
    step: float | None
    """Step at which it holds; None: no row yet."""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers by name."""


@dataclass(frozen=True, slots=True)
class ConditionContext:
    """What a condition of another package (entry point group `looplab.conditions`) is made with, before its options."""

    run_id: str
    directions: Directions
    """Says of each metric whether it is minimised or maximised: `directions.goal("loss")`."""
    objective: str | None
    """The study's objective; None: it has none."""


class Condition(Protocol):
    """One condition on one run."""

    @property
    def unable(self) -> str | None:
        """Why it cannot be evaluated yet, such as a metric that was not measured; None: it can."""
        ...

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        """Process the new rows and the elapsed time; return a match if the condition holds.

        Args:
            run: The run with the rows since the last look.
            now: Current time in seconds, of the same clock as the times of `run`.
        """
        ...


class ExpressionCondition:
    """An expression over `step`, `seconds` and metrics.

    It is evaluated once per step that any metric has, with the values known at that step. Several rows, or several
    files, may belong to one step, so a step is evaluated when it is complete: when a row of another step arrives, or
    when a look finds nothing new. An expression that reads `seconds` is also evaluated at looks without new rows.
    """

    def __init__(self, expression: Expression, directions: Directions) -> None:
        self._metrics_read = _metrics_in(expression)
        self.unable = f"{', '.join(sorted(expression.names))} was not measured" if self._metrics_read else None
        self._expression = expression
        self._any_time = "seconds" in expression.names
        self._every_step = self._any_time or "step" in expression.names
        self._summariser = Summariser(directions, kept=1)
        self._metrics: dict[str, MetricSummary] = {}
        self._others = {"seconds": 0.0}
        self._names = MetricNames(self._metrics, self._others)
        self._touched: set[str] = set()
        self._open = False  # whether the last step has yet to be evaluated

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        self._others["seconds"] = now - run.started
        if not run.batch:
            due, self._open = self._open or self._any_time, False
            return self._evaluate() if due else None
        for step, name, value in self._points(run.batch):
            if self._open and step != self._others["step"]:
                self._open = False
                if match := self._evaluate():
                    return match
            self._others["step"] = step
            if name is not None:
                self._summariser.add({name: Curve([step], [value])})
                self._touched.add(name)
                self.unable = None
            self._open = self._open or name is not None or self._every_step
        return None

    def _points(self, batch: Batch) -> Iterator[tuple[float, str | None, float]]:
        """Yield the points of the metrics that the expression reads, merged by step, and the steps of all others.

        Each curve keeps its order: steps that a restarted trainer repeats are repeated here.
        """
        read = {name: curve for name, curve in batch.items() if name.replace("/", ".") in self._metrics_read}
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
        numbers = ", ".join(f"{name} = {_fmt(value)}" for name, value in values.items() if name != "step")
        step = self._others.get("step")
        text = numbers if step is None else f"{_fmt_step(step)}: {numbers}" if numbers else _fmt_step(step)
        return Match(f"{text} ({self._expression})", step, values)


class NotFinite:
    """NaN or infinity in any metric, or in the named ones."""

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
                continue  # fast path for the common case
            bad = ((step, name, value) for step, value in _points(curve) if not isfinite(value))
            here = next(bad, None)  # None: every value is finite, only their sum overflowed
            if here is not None and (first is None or here[:2] < first[:2]):
                first = here
        if first is None:
            return None
        step, name, value = first
        return Match(f"{_fmt_step(step)}: {name} is {_fmt(value)}", step, {name: value})


class Diverged:
    """A value that is more than `factor` times worse than the best so far.

    For a metric to minimise, this is a value above best × factor if the best is positive, or above best ÷ factor if it
    is negative; for a metric to maximise, the mirror image (an accuracy of 0.9 is 10 times worse below 0.09). Near 0,
    where a ratio means little, the value must also be further from the best than `factor` percent of the range so far.
    Infinity on the bad side counts as diverged; NaN is ignored.
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
                text = f"{_fmt_step(step)}: {metric} = {_fmt(raw)}, more than {factor:g} times worse than its best"
                return Match(
                    f"{text}, {_fmt(best)} at {_fmt_step(self._best_step)}", step, {metric: raw, f"{metric}.best": best}
                )
            if isfinite(value):
                if self._best is None or value < self._best:
                    self._best, self._best_step = value, step
                self._worst = max(self._worst, value)
        return None

    def _limit(self, best: float) -> float:
        if best == self._worst == 0:
            return inf  # only zeros so far: there is no scale yet
        factor = self._settings.factor
        times = best * factor if best > 0 else best / factor
        return max(times, best + NEAR * factor * (self._worst - best))


class Plateau:
    """No progress for `over` steps.

    Progress is measured from the last value that was progress, so many small gains add up. Values that are not finite
    are never progress.
    """

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
                text = f"{_fmt_step(step)}: {metric} = {_fmt(raw)} has not improved"
                text += f" by {_fmt(100 * least)} %" if least else ""
                text += f" on {_fmt(mark)} at {_fmt_step(self._mark_step)}, at least {_fmt(over)} steps ago"
                return Match(text, step, {metric: raw, f"{metric}.best": mark})
        return None


class Stalled:
    """No new row for the given number of seconds, or none at all since the start."""

    unable: str | None = None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        idle = now - run.last_row
        if run.batch or idle < self._seconds:
            return None
        last = "there was none yet" if run.step is None else f"the last was {_fmt_step(run.step)}"
        return Match(f"no new row for {_fmt_seconds(idle)}; {last}", run.step, {"seconds": idle})


class Timeout:
    """A run that has taken at least the given number of seconds."""

    unable: str | None = None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        seconds = now - run.started
        if seconds < self._seconds:
            return None
        text = f"it has run for {_fmt_seconds(seconds)}; the limit is {_fmt_seconds(self._seconds)}"
        return Match(text, run.step, {"seconds": seconds})


class BudgetUsed:
    """The study's wall-clock or device budget is exhausted."""

    unable: str | None = None

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        return None if run.budget_used is None else Match(run.budget_used, run.step)


class PluginCondition:
    """A condition of another package. If it raises, it is not called again for this run, and the reason is reported
    when the run ends."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._failure: str | None = None

    @property
    def unable(self) -> str | None:
        try:
            unable = self._failure or self._condition.unable
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as below)
            unable = self._describe(error)
        return unable if unable is None else clean_line(str(unable), 1_000)

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        if self._failure is not None:
            return None
        try:
            found = self._condition.look(run, now)
            if found is not None and not (isinstance(found, Match) and isinstance(found.text, str)):
                raise TypeError(f"it returned {found!r}, not a Match or None")
            return found
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever another package raises must not end the engine)
            self._failure = self._describe(error)
            return None

    @staticmethod
    def _describe(error: BaseException) -> str:
        return clean_line(f"it failed: {type(error).__name__}: {error}", 1_000)


class PrunerCondition:
    """A run that a pruner gives up after comparing it with earlier runs."""

    def __init__(self, run_id: str, metric: str, pruner: Pruner) -> None:
        self.unable: str | None = f"{metric} was not measured"
        self._run_id = run_id
        self._metric = metric
        self._pruner = pruner
        self._rows = Curve()  # all rows so far: the pruner compares runs at the same step

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        curve = _curve(run.batch, self._metric)
        if curve is None:
            return None
        self.unable = None
        rows = self._rows
        match = None
        for step, value in _points(curve):
            rows.add(step, value)
            if match is None and (why := self._pruner.prune_reason(self._run_id, rows.steps, rows.values)):
                match = Match(why, step, {self._metric: value})
        return match

    def ended(self, value: float | None, rest: Batch) -> None:
        """Record the finished run with the pruner; `rest` are the rows that no look has seen."""
        curve = _curve(rest, self._metric)
        if curve is not None:
            self.unable = None
            self._rows.extend(curve)
        self._pruner.ended(self._run_id, self._rows.steps, self._rows.values, value)


def _metrics_in(expression: Expression) -> set[str]:
    """Return the dotted names of the metrics that the expression may read."""
    names = {name.replace("/", ".") for name in expression.names}
    names |= {head for head, _, tail in (name.rpartition(".") for name in names) if tail in FIELDS}
    return names - {"", "step", "seconds"}


def _curve(batch: Batch, metric: str) -> Curve | None:
    """Return a metric's curve by its name or, as in expressions, its name with dots for slashes."""
    if metric in batch:
        return batch[metric]
    return next((curve for name, curve in batch.items() if name.replace("/", ".") == metric), None)


def _points(curve: Curve) -> Iterator[tuple[float, float]]:
    return zip(curve.steps, curve.values, strict=True)


def _fmt_step(step: float) -> str:
    return f"step {_fmt(step)}"


def _fmt_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _fmt(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if value != value:
        return "NaN"
    if value in (inf, -inf):
        return "infinity" if value > 0 else "-infinity"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
