"""Paired comparisons: exact tests, intervals that hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from looplab.recipes.esm.esm import stats

counts = st.integers(0, 200)


@given(counts, counts)
def test_mcnemar_is_the_exact_binomial_test(win: int, lose: int) -> None:
    expected = binomtest(win, win + lose).pvalue if win + lose else 1.0
    assert stats.mcnemar(win, lose) == pytest.approx(expected, rel=1e-9)
    assert stats.mcnemar(win, lose) == stats.mcnemar(lose, win)


def test_the_interval_of_equal_answers_is_a_point_at_zero() -> None:
    found = stats.paired([[True, False, True]], [[True, False, True]])
    assert (found.delta, found.ci_low, found.ci_high, found.mcnemar_p) == (0, 0, 0, 1)


def test_the_interval_equals_that_of_resampling_questions_one_by_one() -> None:
    rng = np.random.default_rng(0)
    differences = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.6, 0.3], size=150)
    low, high = stats.bootstrap(differences, samples=20_000)
    drawn = differences[rng.integers(0, 150, size=(20_000, 150))].mean(axis=1)
    assert (low, high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.01)


def test_a_question_counts_once_however_many_seeds_it_has() -> None:
    greedy = [[False, True, False, True]]
    several = [[True, True, False, True]] * 50
    found, single = stats.paired(greedy, several), stats.paired(greedy, several[:1])
    assert (found.ci_low, found.ci_high, found.n) == (single.ci_low, single.ci_high, single.n)
    assert (found.mcnemar_p, single.mcnemar_p) == (None, 1.0)


def test_seeds_of_the_method_are_averaged_for_each_question() -> None:
    found = stats.paired([[False, False]], [[True, False], [False, False]])
    assert found.delta == pytest.approx(0.25)
    assert (found.win, found.lose) == (1, 0)


def test_without_questions_the_result_is_nan() -> None:
    assert all(math.isnan(bound) for bound in stats.bootstrap(np.zeros(0)))


def test_the_interval_over_seeds_and_questions_holds_the_spread_of_the_seeds() -> None:
    rng = np.random.default_rng(0)
    same = np.tile(rng.choice([0.0, 1.0], size=100), (4, 1))
    assert stats.bootstrap_nested(same) == pytest.approx(stats.bootstrap(same[0]), abs=0.01)
    shifted = np.repeat([[0.0], [0.0], [1.0], [1.0]], 100, axis=1)  # the questions agree, the seeds do not
    assert stats.bootstrap_nested(shifted) == pytest.approx((0.0, 1.0))
    assert stats.bootstrap_nested(same[:1]) == stats.bootstrap(same[0])
