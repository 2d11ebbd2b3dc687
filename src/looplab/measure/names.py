"""How expressions call metrics: `train.ot_pi_sum.last` is the last value of `train/ot_pi_sum`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplab.measure.summary import MetricSummary

FIELDS = ("first", "last", "best", "best_step", "delta", "pct", "n", "nan", "last_step", "min", "max", "mean")


class MetricNames:
    """Looks names up for an expression: metrics with dots for slashes, with or without a field (`last` if none is
    said), and whatever else is given by name. What was not measured, or is not known (the `delta` of a single value),
    is missing: an expression that reads it says so, and is neither true nor false."""

    __slots__ = ("_dotted", "_metrics", "_others")

    def __init__(self, metrics: Mapping[str, MetricSummary], others: Mapping[str, Any] | None = None) -> None:
        self._metrics = metrics
        self._others = {} if others is None else others
        self._dotted = {name.replace("/", "."): name for name in metrics}

    def __call__(self, name: str) -> Any:
        name = name.replace("/", ".")
        metric, field = self._dotted.get(name), "last"
        if metric is None:
            head, _, tail = name.rpartition(".")
            if head in self._dotted and tail in FIELDS:
                metric, field = self._dotted[head], tail
        if metric is not None:
            summary = self._metrics[metric]
            # A metric that ended in NaN has a last value that is not a number, and no comparison with it is true.
            value = float("nan") if field == "last" and summary.last_is_nan else getattr(summary, field)
            if value is None:
                raise KeyError(name)
            return value
        return self._others[name]
