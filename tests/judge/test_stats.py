"""Student's t against published values, tests, looks and their boundaries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.judge import stats

NUMBERS = st.floats(-1e3, 1e3)


@pytest.mark.parametrize(
    ("tail", "freedom", "t"),
    [
        (0.05, 1, 6.3138),
        (0.025, 2, 4.3027),
        (0.05, 5, 2.0150),
        (0.01, 10, 2.7638),
        (0.005, 23, 2.8073),
        (0.025, 120, 1.9799),
    ],
)
def test_student_t_agrees_with_the_tables(tail: float, freedom: float, t: float) -> None:
    assert stats.t_quantile(tail, freedom) == pytest.approx(t, abs=6e-5)
    assert stats.t_tail(t, freedom) == pytest.approx(tail, rel=1e-4)


def test_one_degree_of_freedom_is_the_cauchy_distribution() -> None:
    for t in (-50.0, -1.0, 0.0, 0.3, 7.0, 1e6):
        assert stats.t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-6, abs=1e-15)


@given(st.floats(-40, 40), st.floats(1, 300))
def test_the_two_tails_add_up_to_one(t: float, freedom: float) -> None:
    assert stats.t_tail(t, freedom) + stats.t_tail(-t, freedom) == pytest.approx(1.0)


def test_a_paired_test_agrees_with_a_textbook() -> None:
    found = stats.paired([1.0, 2.0, 3.0, 4.0])  # t = 2.5 / (1.29099 / 2) = 3.873 with 3 degrees of freedom
    assert found.p() == pytest.approx(0.01523, abs=2e-5)
    assert found.interval() == pytest.approx((0.4457, 4.5543), abs=1e-4)


def test_welch_equals_students_test_for_equal_spreads_and_sizes() -> None:
    found = stats.welch([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    assert (found.effect, found.freedom) == (2.0, pytest.approx(4.0))
    assert found.p() == pytest.approx(0.03525, abs=2e-5)


def test_differences_that_are_similar_by_chance_are_not_certain() -> None:
    assert stats.paired([1.0, 1.0, 1.0]).p() == 0.0
    assert stats.paired([1.0, 1.0, 1.0], least_spread=0.5).p() > 0.01


def test_a_known_spread_makes_a_few_differences_count_for_more_unless_they_spread_further() -> None:
    few = [1.5, 2.0, 2.5]  # spread 0.5
    alone, moderated = stats.paired(few), stats.paired(few, prior=(0.6, 8.0))
    assert moderated.p() < 0.1 * alone.p()
    assert moderated.freedom == 2.0 + 8.0
    assert moderated.error == pytest.approx(math.sqrt((2 * 0.5**2 + 8 * 0.6**2) / 10 / 3))
    assert stats.paired(few, prior=(0.4, 8.0)) == alone  # noisier than what is known


def test_no_difference_at_all_proves_nothing() -> None:
    assert stats.paired([0.0, 0.0, 0.0]).p() == 1.0


@given(st.lists(NUMBERS, min_size=2, max_size=20), st.floats(0.01, 10))
def test_p_of_the_opposite_is_the_other_tail(differences: list[float], least: float) -> None:
    there, back = stats.paired(differences, least), stats.paired([-d for d in differences], least)
    assert there.p() + back.p() == pytest.approx(1.0)


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=6), min_size=1, max_size=5), NUMBERS)
def test_the_noise_does_not_depend_on_where_the_groups_lie(groups: list[list[float]], shift: float) -> None:
    moved = [[value + shift * i for value in group] for i, group in enumerate(groups)]
    here, there = stats.pooled_spread(groups), stats.pooled_spread(moved)
    assert (here is None) == (there is None) == all(len(group) < 2 for group in groups)
    if here and there:
        assert here[0] == pytest.approx(there[0], abs=1e-6)


@given(st.integers(2, 10), st.integers(0, 60), st.floats(1.05, 3), st.floats(1e-6, 0.3), st.floats(0.3, 5))
def test_looks_grow_to_the_last_and_their_boundaries_add_up_to_alpha(
    first: int, more: int, growth: float, alpha: float, power: float
) -> None:
    plan = stats.looks(first, first + more, growth)
    assert plan[0] == first
    assert plan[-1] == first + more
    assert list(plan) == sorted(set(plan))
    boundaries = stats.boundaries(alpha, plan, power)
    assert len(boundaries) == len(plan)
    assert all(boundary > 0 for boundary in boundaries)
    assert math.fsum(boundaries) == pytest.approx(alpha)


@given(st.integers(1, 23), st.floats(-3, 3), st.floats(0.01, 2))
def test_more_effect_means_more_power(n: int, effect: float, more: float) -> None:
    power = [stats.predictive_power(e, 1.0, n, 24, 0.01) for e in (effect, effect + more)]
    assert 0 <= power[0] <= power[1] <= 1
