"""Dominance, the Pareto front and its hypervolume."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.decide.pareto import Values, dominates, hypervolume, pareto_front, reference_point, signed

SIZE = 4


def points(dimension: int) -> st.SearchStrategy[list[Values]]:
    return st.lists(st.tuples(*[st.integers(0, SIZE - 1)] * dimension), min_size=1, max_size=12)  # type: ignore[arg-type]


FRONTS = st.integers(1, 3).flatmap(points)


@given(FRONTS)
def test_dominance_is_a_strict_partial_order(found: list[Values]) -> None:
    for a, b, c in itertools.product(found[:5], repeat=3):
        assert not dominates(a, a)
        assert not (dominates(a, b) and dominates(b, a))
        assert dominates(a, c) or not (dominates(a, b) and dominates(b, c))


@given(FRONTS)
def test_everything_outside_the_front_is_dominated_by_it_and_nothing_on_it_is(found: list[Values]) -> None:
    front = [found[i] for i in pareto_front(found)]
    assert len({*front}) == len(front) > 0
    assert not any(dominates(a, b) for a in found for b in front)
    assert all(point in front or any(dominates(other, point) for other in front) for point in found)


@settings(max_examples=60)
@given(FRONTS)
def test_the_hypervolume_counts_the_dominated_cells_of_a_grid(found: list[Values]) -> None:
    dimension = len(found[0])
    cells = itertools.product(range(SIZE), repeat=dimension)
    dominated = sum(any(all(x <= y for x, y in zip(point, cell, strict=True)) for point in found) for cell in cells)
    reference = (float(SIZE),) * dimension
    assert hypervolume(found, reference) == pytest.approx(dominated)
    assert hypervolume([found[i] for i in pareto_front(found)], reference) == pytest.approx(dominated)


@given(FRONTS, st.data())
def test_one_more_point_never_makes_the_hypervolume_smaller(found: list[Values], data: st.DataObject) -> None:
    more = [*found, *data.draw(points(len(found[0])))]
    reference = reference_point(more)
    assert hypervolume(more, reference) >= hypervolume(found, reference)
    assert all(x < r for point in more for x, r in zip(point, reference, strict=True))


def test_maximized_objectives_are_turned_around() -> None:
    assert signed((0.9, 3.0), ("max", "min")) == (-0.9, 3.0)
