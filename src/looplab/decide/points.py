"""What a study has measured, by point: the data that all samplers and models work with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from looplab.decide.axes import Params
from looplab.decide.curves import Curve


@dataclass(slots=True)
class SearchPoint:
    """A point of the search space with the results of all its runs."""

    params: Params
    values: list[float] = field(default_factory=list)
    """The objective of each run that measured one."""
    curves: list[Curve] = field(default_factory=list)
    """The known curves of such runs."""
    stopped: list[Curve] = field(default_factory=list)
    """The curves of runs that were stopped before their end."""
    crashes: int = 0
    """Runs that ended without a value, and proposals that the guard rejected."""
    pending: int = 0
    """Planned and running runs."""
    runs: list[str] = field(default_factory=list)
    """The ids of the runs that measured a value."""
    costs: list[float] = field(default_factory=list)
    """What runs of this point cost: seconds, or a metric."""
    others: list[tuple[float | None, ...]] = field(default_factory=list)
    """The further objectives of each run in `values`, in the order of the lab file."""

    tie_breaks: list[float] = field(default_factory=list)
    """The values of `objective.then`."""
    bonus: float = 0.0
    """Added to the objective, less than its distance to the next value: the order among points that tie."""

    @property
    def value(self) -> float | None:
        """The mean objective; None if nothing is measured yet or at least half of the runs crashed."""
        return math.fsum(self.values) / len(self.values) + self.bonus if len(self.values) > self.crashes else None

    @property
    def infeasible(self) -> bool:
        """Whether the point counts as failed."""
        return self.crashes > 0 and self.value is None and self.partial is None

    @property
    def partial(self) -> Curve | None:
        """The longest curve of a point that no run has finished; None if there is none or half of the runs crashed."""
        if self.values or len(self.stopped) <= self.crashes:
            return None
        return max(self.stopped, key=lambda curve: curve[-1][0])

    @property
    def known(self) -> bool:
        """Whether something was measured there."""
        return self.value is not None or self.partial is not None

    def of_other(self, k: int) -> SearchPoint:
        """Return the point with a further objective in place of the objective."""
        values = [others[k] for others in self.others]
        return SearchPoint(self.params, [value for value in values if value is not None])


def params_key(params: Params) -> tuple[Any, ...]:
    return tuple(params.values())


def break_ties(points: Iterable[SearchPoint], goal: str, then_goal: str) -> None:
    """Order points with the same objective by their tie-break, over a quarter of the distance to the next value."""
    groups: dict[float, list[SearchPoint]] = {}
    for point in points:
        if point.value is not None and point.tie_breaks:
            groups.setdefault(point.value, []).append(point)
    values = sorted({point.value for group in groups.values() for point in group if point.value is not None})
    gap = min((b - a for a, b in itertools.pairwise(values)), default=abs(values[0]) * 1e-3 or 1.0) if values else 0.0
    for group in groups.values():
        means = [math.fsum(point.tie_breaks) / len(point.tie_breaks) for point in group]
        low, high = min(means), max(means)
        for point, mean in zip(group, means, strict=True):
            if high > low:
                better = (mean - low) / (high - low) if then_goal == "max" else (high - mean) / (high - low)
                point.bonus = (1.0 if goal == "max" else -1.0) * 0.25 * gap * better


def select_points(points: list[SearchPoint], limit: int, goal: Literal["max", "min"]) -> list[SearchPoint]:
    """Return at most `limit` points in their order: one third the best, one third the newest, the rest evenly spaced.

    The newest include pending points.
    """
    if len(points) <= limit:
        return points
    sign = -1.0 if goal == "max" else 1.0
    third = limit // 3
    measured = [(sign * point.value, i) for i, point in enumerate(points) if point.value is not None]
    chosen = {i for _, i in sorted(measured)[:third]} | set(range(len(points) - third, len(points)))
    rest = [i for i in range(len(points)) if i not in chosen]
    room = limit - len(chosen)
    chosen |= {rest[k * len(rest) // room] for k in range(room)}
    return [points[i] for i in sorted(chosen)]
