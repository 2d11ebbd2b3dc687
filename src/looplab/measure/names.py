"""Names of metrics in expressions: `train.loss.last` is the last value of `train/loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplab.measure.summary import MetricSummary

FIELDS = ("first", "last", "best", "best_step", "delta", "pct", "n", "nan", "last_step", "min", "max", "mean")


class MetricNames:
    """Name lookup for expressions: metrics with dots for slashes and an optional field (default `last`), and others.

    A value that was not measured or is undefined (the `delta` of a single value) raises KeyError: an expression that
    reads it is neither true nor false.
    """

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
            # If the last value is NaN, comparisons with `last` must be false.
            value = float("nan") if field == "last" and summary.last_is_nan else getattr(summary, field)
            if value is None:
                raise KeyError(name)
            return value
        return self._others[name]
