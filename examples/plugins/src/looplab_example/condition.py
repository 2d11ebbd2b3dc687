"""A watch condition: a metric that grows by more than a factor from one step to the next."""

from __future__ import annotations

from looplab.watch.conditions import ConditionContext, Match, RunSnapshot


class JumpCondition:
    """Options: the metric (by default the objective), and the factor."""

    def __init__(self, context: ConditionContext, metric: str | None = None, factor: float = 3.0) -> None:
        self.metric, self.factor = metric or context.objective or "loss", factor
        self.last: float | None = None
        self.unable: str | None = f"{self.metric} was not measured"

    def look(self, run: RunSnapshot, now: float) -> Match | None:
        curve = run.batch.get(self.metric)
        if curve is None:
            return None
        self.unable = None
        for step, value in zip(curve.steps, curve.values, strict=True):
            last, self.last = self.last, value
            if last is not None and value > self.factor * abs(last):
                text = f"step {step:g}: {self.metric} jumped from {last:g} to {value:g}"
                return Match(text, step, {self.metric: value})
        return None
