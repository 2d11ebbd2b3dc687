"""Repair of infeasible draws: move points that the guard rejects to points that it accepts.

If a constraint couples several knobs, such as a product with an upper bound, nearly all independent draws may be
refused. A refused draw is then rebuilt from the base config, which is legal: one knob after the other, in random order,
is moved towards its drawn value as far as the guard allows, given the others. Only knobs on which the refusal depends
are moved. The guard checks every step, so a repaired draw is always legal.

Where most of the space is refused, repaired draws are also a pool: the knobs that constraints couple are taken from it
together, all others are free, so that a candidate is legal by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from looplab.guard.guard import Guard, Problem

if TYPE_CHECKING:
    import numpy as np

    from looplab.decide.axes import Axis, Params

BISECTIONS = 6
"""Bisection steps to the end of the legal part of an axis; 6 locate it to 1/64 of the axis."""
POOL = 48
"""Legal combinations of the coupled knobs, from which candidates are built."""
SWEEPS = 2
"""Coordinate sweeps over a space-filling draw; later sweeps use the new values of the other axes."""


class Repairer:
    """Decides which points are legal, and repairs the others."""

    def __init__(
        self,
        axes: Sequence[Axis],
        guard: Guard,
        rule: Callable[[Params], Sequence[Problem]],
        base: Mapping[str, Any],
        settle: Callable[[Params], Params] | None = None,
    ) -> None:
        """
        Args:
            rule: Returns the guard's problems with a point; empty: it is legal.
            base: The parameters of the base config, without those outside the searched ranges.
            settle: Returns a point with knobs that are not used there at their base values; None: all are used.
        """
        self.settle = settle
        read = guard.coupled_keys
        self.coupled = frozenset(axis.path for axis in axes if _is_read(axis.path, read))
        """Paths of the axes on which constraints and computed keys depend."""
        self._pool: list[Params] | None = None
        self._axes = axes
        self._guard = guard
        self._rule = rule
        self._base = base

    def is_allowed(self, params: Params) -> bool:
        return not self._rule(params)

    def repair(self, params: Params, rng: np.random.RandomState, *, spread: bool) -> Params | None:
        """Return a legal point near a refused one; None if none is found.

        Args:
            spread: Whether the draw should fill the space. If so, its position on an axis is rescaled to the legal part
                of that axis; otherwise it is moved as little as possible.
        """
        moved = self._involved(self._rule(params))
        everything = [axis for axis in self._axes if axis.path in self._base]
        for axes in (moved, everything):
            repaired = self._rebuild(params, axes, rng, spread=spread) if axes else None
            if repaired is not None and self.is_allowed(repaired):
                return repaired
        return None

    def legal_pool(self) -> Sequence[Params]:
        """Return legal points that are spread over the coupled axes; the others have their base values.

        Empty if the base is not legal.
        """
        if self._pool is None:
            import numpy as np

            rng = np.random.RandomState(0)
            pool = []
            for _ in range(POOL):
                drawn = {
                    axis.path: axis.from_unit(rng.random_sample())
                    if axis.path in self.coupled or axis.path not in self._base
                    else self._base[axis.path]
                    for axis in self._axes
                }
                pool.append(drawn if self.is_allowed(drawn) else self.repair(drawn, rng, spread=True))
            self._pool = [params for params in pool if params is not None]
        return self._pool

    def _rebuild(
        self, params: Params, axes: Sequence[Axis], rng: np.random.RandomState, *, spread: bool
    ) -> Params | None:
        """Move these axes from the base towards the draw, with all others as in the base.

        None if the base is not legal. Few edits keep the guard fast.
        """
        legal: dict[tuple[Any, ...], bool] = {}

        def allowed(point: Params) -> bool:
            key = tuple(point.values())
            if key not in legal:
                legal[key] = not self._rule(point)
            return legal[key]

        current: Params = {**params, **self._base}
        if not allowed(current):
            return None
        for _ in range(SWEEPS if spread else 1):
            for i in rng.permutation(len(axes)):
                current = _move(axes[i], current, params[axes[i].path], allowed, spread=spread)
        return {**params, **{axis.path: current[axis.path] for axis in axes}}

    def _involved(self, problems: Sequence[Problem]) -> list[Axis]:
        """Return the axes on which the problems depend."""
        read = {name for problem in problems for name in self._guard.inputs(problem)}
        return [axis for axis in self._axes if axis.path in self._base and _is_read(axis.path, read)]


def _is_read(path: str, names: Iterable[str]) -> bool:
    """Return whether one of the names is this key, a child of it or a parent of it."""
    return any(name == path or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in names)


def _move(axis: Axis, current: Params, drawn: Any, allowed: Callable[[Params], bool], *, spread: bool) -> Params:
    """Return the point moved along one axis towards the drawn value, as far as it stays legal."""

    def at(u: float) -> Params:
        return {**current, axis.path: axis.from_unit(u)}

    if axis.choices and not axis.ordered:
        moved = {**current, axis.path: drawn}
        return moved if allowed(moved) else current
    start, target = axis.to_unit(current[axis.path]), axis.to_unit(drawn)
    if spread:
        low, high = (_furthest(start, end, lambda u: allowed(at(u))) for end in (0.0, 1.0))
        target = low + target * (high - low)
    else:
        target = _furthest(start, target, lambda u: allowed(at(u)))
    moved = at(target)
    return moved if allowed(moved) else current


def _furthest(legal: float, target: float, allowed: Callable[[float], bool]) -> float:
    """Return the furthest legal position from a legal one towards a target, by bisection."""
    if allowed(target):
        return target
    for _ in range(BISECTIONS):
        middle = (legal + target) / 2
        if allowed(middle):
            legal = middle
        else:
            target = middle
    return legal
