"""Rungs: the steps at which runs are stopped, and which of the stopped runs are promoted to the next rung.

Pure functions of what the runs have measured, so a new engine promotes what the old one would have. A run is promoted
by continuing it; nothing is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from looplab.config.lab import FidelityConfig
from looplab.decide.curves import Curve

SPAN = 27.0
"""Ratio of the steps of a whole run to those of the first rung, if the lab sets no `min`."""
TOLERANCE = 1e-6
"""Relative difference of steps that count as equal."""


@dataclass(frozen=True, slots=True)
class Rungs:
    """The steps at which runs are stopped, in ascending order; above the last one a run is trained to its end."""

    steps: tuple[float, ...]
    reduction_factor: int

    @classmethod
    def of(cls, settings: FidelityConfig, whole: float | None) -> Rungs | None:
        """Return the rungs; None if they are not known, so that no run can be stopped.

        Args:
            whole: The last step of a whole run; None: unknown.
        """
        factor = settings.reduction_factor
        whole = settings.max or whole
        if whole is None or whole <= 0:
            return None
        first = settings.min if settings.min is not None else whole / SPAN
        n = max(0, math.floor(math.log(whole / first, factor) + 1e-9)) if whole > first else 0
        return cls(tuple(whole / factor**k for k in range(n, 0, -1)), factor)

    def next_above(self, step: float) -> float | None:
        """Return the step of the next rung above a step; None: the end of the run."""
        return next((rung for rung in self.steps if rung > step * (1 + TOLERANCE)), None)

    def steps_to(self, step: float) -> float:
        """Return the number of steps from a step to the next rung, or to the end of the run."""
        return max((self.next_above(step) or self.whole) - step, 1e-9)

    def level(self, curve: Curve) -> int:
        """Return how many rungs a curve has reached."""
        return sum(curve[-1][0] >= rung * (1 - TOLERANCE) for rung in self.steps) if curve else 0

    def value_at(self, curve: Curve, level: int) -> float | None:
        """Return the value with which a run competes at a rung, counted from 1; None if it has not reached it."""
        if level > self.level(curve):
            return None
        return next(value for step, value in curve if step >= self.steps[level - 1] * (1 - TOLERANCE))

    def first_step(self, n: int) -> float | None:
        """Return the step until which the n-th new config is trained in Hyperband, counted from 0.

        Brackets are interleaved. The one that begins at rung k gets a share of the configs so that all brackets need
        about as many steps.
        """
        shares = [1.0 / ((len(self.steps) - k + 1) * step) for k, step in enumerate((*self.steps, self.whole))]
        total = math.fsum(shares)
        given = [0] * len(shares)
        for i in range(n + 1):
            k = max(range(len(shares)), key=lambda k: (shares[k] / total * (i + 1) - given[k], -k))
            given[k] += 1
        return (*self.steps, None)[k]

    @property
    def whole(self) -> float:
        """The last step of a whole run."""
        return self.steps[-1] * self.reduction_factor if self.steps else 1.0


def promotable(rungs: Rungs, curves: Mapping[str, Curve], stopped: Mapping[str, Curve]) -> list[str]:
    """Return the stopped runs that ASHA promotes, those at the highest rung first, then the best.

    At each rung, the best 1/reduction_factor of the runs that have reached it are promoted. More runs at a rung never
    take the promotion of a better run back: the set only loses runs that others have overtaken.

    Args:
        rungs: The rungs.
        curves: All runs that count, whether stopped, running or finished, by name; lower is better.
        stopped: Those of them that can be continued.
    """
    found: list[str] = []
    for level in range(len(rungs.steps), 0, -1):
        values = {name: v for name, curve in curves.items() if (v := rungs.value_at(curve, level)) is not None}
        best = sorted(values, key=lambda name: (values[name], name))[: len(values) // rungs.reduction_factor]
        found += [name for name in best if name in stopped and rungs.level(stopped[name]) == level]
    return found


def halving(
    rungs: Rungs, order: Sequence[str], curves: Mapping[str, Curve], stopped: Mapping[str, Curve], ended: set[str]
) -> tuple[list[str], bool]:
    """Return the runs that synchronous successive halving promotes, and whether the bracket has room for a new config.

    Args:
        rungs: The rungs.
        order: All configs in the order in which they began, by the name of their runs.
        curves: As for `promotable`.
        stopped: As for `promotable`.
        ended: Runs that will not measure anything more unless they are promoted.
    """
    size = rungs.reduction_factor ** len(rungs.steps)
    if not order:
        return [], True
    bracket = order[(len(order) - 1) // size * size :]
    found: list[str] = []
    members = list(bracket)
    for level in range(1, len(rungs.steps) + 1):
        room = size // rungs.reduction_factor ** (level - 1)
        values = {name: v for name in members if (v := rungs.value_at(curves.get(name, ()), level)) is not None}
        if level == 1 and len(members) < room:
            return [], True
        if any(name not in values and name not in ended for name in members):
            return found, False  # the rung is not complete
        members = sorted(values, key=lambda name: (values[name], name))[: max(1, room // rungs.reduction_factor)]
        found += [name for name in members if name in stopped and rungs.level(stopped[name]) == level]
    if any(name not in ended for name in members):
        return found, False
    return found, not found
