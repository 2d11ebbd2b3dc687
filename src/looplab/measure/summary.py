"""Summaries of curves (first, last, best, change), and the value of the objective."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Literal

from looplab.config.lab import parse_at
from looplab.errors import LabError
from looplab.measure.base import Batch, Curve

Goal = Literal["max", "min"]

KEPT = 100
"""The number of last values of each metric that a summariser keeps for `mean(k)`, by default."""

_MAX_WORDS = frozenset({
    "accuracy", "acc", "reward", "rew", "return", "returns", "ret", "success", "score", "survival", "alive", "r2", "f1",
    "auc", "auroc", "bleu", "rouge", "iou", "dice", "map", "precision", "recall", "psnr", "ssim", "elo", "elbo",
    "likelihood", "loglik", "nmi", "mcc", "ndcg", "mrr", "prec", "top1", "top3", "top5", "top10", "miou", "jaccard",
    "kappa", "spearman", "pearson", "cider", "meteor", "chrf", "winrate", "purity", "hits", "ap", "ar", "sps", "fps",
    "throughput", "lr", "ari", "aucpr", "auprc", "concordance", "gini", "pck", "pesq", "qwk", "sdr", "sensitivity",
    "sisdr", "sisnr", "snr", "specificity", "stoi", "uar",
})  # fmt: skip
_MIN_WORDS = frozenset({
    "loss", "error", "err", "l1", "l2", "mse", "mae", "rmse", "nll", "ppl", "perplexity", "bpb", "bpc", "kld", "kl",
    "cost", "logloss", "mape", "brier", "bic", "aic", "inertia", "wer", "cer", "fid", "time", "regret", "bpd", "lpips",
    "fvd", "eer", "mpjpe", "crps", "smape", "rmsle", "deviance", "xent", "ade", "chamfer", "emd", "fde", "hamming",
    "mase", "mdape", "medae", "mre", "nmse", "nrmsd", "nrmse", "rmspe", "rrmse", "wape", "wasserstein",
})  # fmt: skip
_NEGATED = frozenset({"neg", "negative"})
METRIC_WORDS = _MAX_WORDS | _MIN_WORDS
"""Words in metric names that tell their direction."""


class Directions:
    """The direction of each metric: whether larger or smaller is better.

    Explicit goals take precedence; then the words of the metric's name, its last part first, and there the last known
    word (`reward_loss` is a loss, a negative log-likelihood too); else smaller is better.
    """

    __slots__ = ("_goals", "explicit")

    def __init__(self, explicit: Mapping[str, Goal] | None = None) -> None:
        self.explicit: dict[str, Goal] = dict(explicit or {})
        self._goals: dict[str, Goal] = dict(self.explicit)

    def goal(self, metric: str) -> Goal:
        goal = self._goals.get(metric)
        if goal is None:
            goal = self._goals[metric] = _goal_by_name(metric)
        return goal


def _goal_by_name(metric: str) -> Goal:
    for part in (metric.rsplit("/", 1)[-1], metric):
        words = [
            word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", part).lower()) if word
        ]
        if "survival" in words:
            return "max"
        for i, word in reversed(list(enumerate(words))):
            for form in (word, word.rstrip("0123456789")):
                if form in _MAX_WORDS:
                    return "max" if _NEGATED.isdisjoint(words[:i]) else "min"
                if form in _MIN_WORDS:
                    return "max" if words[0] == "neg" and i > 1 else "min"  # scikit-learn: neg_mean_squared_error
    return "min"


_CLOCKS = frozenset(
    {
        *("time", "times", "timestamp", "clock", "seconds", "second", "secs", "sec", "ms", "duration", "elapsed"),
        *("eta", "wall", "runtime", "sps", "fps", "speed", "throughput"),
        *("memory", "mem", "rss", "vram", "gpu", "cpu", "util", "utilization", "load", "pid"),
    }
)
"""Words in the names of metrics that differ between identical trainings."""


def is_clock(metric: str) -> bool:
    """Return whether a metric measures the machine rather than the training, so that identical runs differ in it."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric).lower())
    return not _CLOCKS.isdisjoint(words) or "per_sec" in metric or "/s" in metric


def plain_name(name: str) -> str:
    """Return the last part of a name in lower-case letters and digits: `optim.learning-rate` is `learningrate`."""
    return re.sub(r"[^a-z0-9]", "", re.split(r"[./]", name)[-1].lower())


def digest(metrics: Mapping[str, MetricSummary], settings: Collection[str] = ()) -> str | None:
    """Return a hash of a run's metrics without times and memory, equal for bit-identical runs; None without metrics.

    Args:
        settings: Names of settings. A metric of such a name repeats what the trainer was given, and is left out.
    """
    echoed = {plain_name(name) for name in settings}
    values = [
        (name, m.first, m.last, m.best, m.best_step, m.last_step, m.min, m.max, m.n, m.nan)
        for name, m in sorted(metrics.items())
        if m.n and not is_clock(name) and plain_name(name) not in echoed
    ]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16] if values else None


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric of one run in a few numbers; statistics are over the finite values."""

    first: float | None
    """The first value; None if no value was finite."""
    last: float | None
    """The last value."""
    best: float | None
    """The best value, by the metric's direction."""
    best_step: float | None
    """The step at which the best was first reached."""
    delta: float | None
    """last - first; None for fewer than two values, so that a single final value never looks like a plateau."""
    pct: float | None
    """delta in percent of |first|; None if delta is None or first is 0."""
    n: int
    """The number of finite values."""
    nan: int
    """The number of values that were NaN or infinite."""
    last_is_nan: bool
    """Whether the very last point was NaN or infinite; `last` is then an earlier value."""
    last_step: float | None = None
    """The step of the very last point."""
    min: float | None = None
    """The smallest value."""
    max: float | None = None
    """The largest value."""
    mean: float | None = None
    """The mean of all values."""


class _RunningSummary:
    """The running summary of one metric."""

    __slots__ = (
        "best",
        "best_step",
        "first",
        "last",
        "last_is_nan",
        "last_step",
        "max",
        "min",
        "n",
        "nan",
        "tail",
        "total",
    )

    def __init__(self, kept: int) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.best: float | None = None
        self.best_step: float | None = None
        self.last_step: float | None = None
        self.last_is_nan = False
        self.min: float | None = None
        self.max: float | None = None
        self.total = 0.0
        self.n = 0
        self.nan = 0
        self.tail: deque[float] = deque(maxlen=kept)

    def add(self, curve: Curve, goal: Goal) -> None:
        steps, values = curve.steps, curve.values
        if not values:
            return
        self.last_step = steps[-1]
        self.last_is_nan = not isfinite(values[-1])
        self.tail.extend(values[-(self.tail.maxlen or 1) :])
        total = sum(values)
        if not isfinite(total):
            # At least one value is not finite, or the sum overflows: check each.
            finite = [(step, value) for step, value in zip(steps, values, strict=True) if isfinite(value)]
            self.nan += len(values) - len(finite)
            if not finite:
                return
            steps, values = [step for step, _ in finite], [value for _, value in finite]
            total = sum(values)
        low, high = min(values), max(values)
        best = high if goal == "max" else low
        if self.best is None or (best > self.best if goal == "max" else best < self.best):
            self.best = best
            self.best_step = steps[values.index(best)]
        if self.first is None:
            self.first = values[0]
        self.last = values[-1]
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        self.total += total
        self.n += len(values)

    def result(self) -> MetricSummary:
        delta = pct = None
        if self.n >= 2 and self.first is not None and self.last is not None:
            delta = _finite(self.last - self.first)
            if delta is not None and self.first != 0:
                pct = _finite(100.0 * delta / abs(self.first))
        return MetricSummary(
            first=self.first,
            last=self.last,
            best=self.best,
            best_step=self.best_step,
            delta=delta,
            pct=pct,
            n=self.n,
            nan=self.nan,
            last_is_nan=self.last_is_nan,
            last_step=self.last_step,
            min=self.min,
            max=self.max,
            mean=_finite(self.total / self.n) if self.n else None,
        )


class Summariser:
    """Summarises metrics incrementally; memory does not grow with the length of the curves."""

    __slots__ = ("_directions", "_kept", "_running")

    def __init__(self, directions: Directions | None = None, *, kept: int = KEPT) -> None:
        """`kept`: the number of last values of each metric that are available to `mean(k)`."""
        self._directions = directions or Directions()
        self._kept = kept
        self._running: dict[str, _RunningSummary] = {}

    def add(self, batch: Batch) -> None:
        for name, curve in batch.items():
            running = self._running.get(name)
            if running is None:
                running = self._running[name] = _RunningSummary(self._kept)
            running.add(curve, self._directions.goal(name))

    def result(self) -> dict[str, MetricSummary]:
        """Return the summaries by name."""
        return {name: running.result() for name, running in self._running.items()}

    def summary(self, metric: str) -> MetricSummary | None:
        """Return the summary of one metric; None if it was not measured."""
        running = self._running.get(metric)
        return None if running is None else running.result()

    def mean_of_last(self, metric: str, k: int) -> float | None:
        """Return the mean of the last k values without those that are not finite; None if the metric was not measured,
        or its last value is not finite.

        Raises:
            LabError: Fewer than k values are kept.
        """
        running = self._running.get(metric)
        if running is None:
            return None
        if len(running.tail) < min(k, running.n + running.nan):
            raise _missing_values(metric, k)
        last = list(running.tail)[-k:]
        if not last or not isfinite(last[-1]):
            return None
        finite = [value for value in last if isfinite(value)]
        return _finite(sum(finite) / len(finite))


def objective_value(measured: Summariser | Mapping[str, MetricSummary], metric: str, at: str = "last") -> float | None:
    """Return the value of the objective; None if the metric is missing.

    NaN is never a value: a run whose last point is not finite has no `last` and no `mean(k)`. Earlier points that are
    not finite are left out of the mean.

    Raises:
        LabError: `at` is not valid, or needs last values that are not there.
    """
    k = parse_at(at)
    if isinstance(measured, Summariser) and k is not None:
        return measured.mean_of_last(metric, k)
    summary = measured.summary(metric) if isinstance(measured, Summariser) else measured.get(metric)
    if summary is None:
        return None
    if at == "first":
        return summary.first
    if at == "best":
        return summary.best
    if k is not None:
        raise _missing_values(metric, k)
    return None if summary.last_is_nan else summary.last


def _missing_values(metric: str, k: int) -> LabError:
    return LabError(f"mean({k}) of {metric!r} needs the last {k} values, which are not kept")


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


_FIELDS = tuple(field.name for field in fields(MetricSummary))


def to_dict(summaries: Mapping[str, MetricSummary]) -> dict[str, dict[str, Any]]:
    """Return plain values for JSON."""
    return {name: {field: getattr(summary, field) for field in _FIELDS} for name, summary in summaries.items()}


def from_dict(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, MetricSummary]:
    """Return the summaries from the output of `to_dict`; unknown fields are ignored."""
    return {
        name: MetricSummary(**{field: entry[field] for field in _FIELDS if field in entry})
        for name, entry in plain.items()
    }
