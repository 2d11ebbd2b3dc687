"""Several objectives: dominance, the Pareto front, and the hypervolume that it dominates.

A point is a tuple of values for which smaller is better; `signed` negates objectives that are maximized.
"""

from __future__ import annotations

from collections.abc import Sequence

Values = tuple[float, ...]


def signed(values: Sequence[float], goals: Sequence[str]) -> Values:
    """Return values for which smaller is better."""
    return tuple(-value if goal == "max" else value for value, goal in zip(values, goals, strict=True))


def dominates(a: Values, b: Values) -> bool:
    """Return whether `a` is at least as good as `b` in every objective, and better in one."""
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def pareto_front(points: Sequence[Values]) -> list[int]:
    """Return the indices of the points that no other dominates, in their order; of equal ones the first."""
    seen: set[Values] = set()
    front = []
    for i, point in enumerate(points):
        if point not in seen and not any(dominates(other, point) for other in points):
            front.append(i)
        seen.add(point)
    return front


def hypervolume(points: Sequence[Values], reference: Values) -> float:
    """Return the volume between the points and a reference: how much of the space below it they dominate.

    Sliced along the last objective; exact, and fast for the few dozen points of a front.
    """
    inside = [point for point in points if all(x < r for x, r in zip(point, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return reference[0] - min(point[0] for point in inside)
    levels = sorted({point[-1] for point in inside})
    volume = 0.0
    for level, above in zip(levels, [*levels[1:], reference[-1]], strict=True):
        below = [point[:-1] for point in inside if point[-1] <= level]
        volume += (above - level) * hypervolume([below[i] for i in pareto_front(below)], reference[:-1])
    return volume


def reference_point(points: Sequence[Values]) -> Values:
    """Return the reference point of the hypervolume: the worst value of each objective plus a tenth of its range."""
    columns = list(zip(*points, strict=True))
    return tuple(max(column) + 0.1 * ((max(column) - min(column)) or abs(max(column)) or 1.0) for column in columns)
