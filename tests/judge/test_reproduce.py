"""A repetition is the same when it lies inside the noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.judge.reproduce import compare

VALUES = st.floats(-1e6, 1e6)


@given(VALUES, st.none() | st.floats(0, 10))
def test_equal_is_always_the_same(value: float, sigma: float | None) -> None:
    assert compare(value, value, sigma).same


@given(VALUES, VALUES, st.floats(0, 10))
def test_it_does_not_matter_which_came_first(a: float, b: float, sigma: float) -> None:
    assert compare(a, b, sigma).same == compare(b, a, sigma).same


def test_inside_the_noise_is_the_same_and_beyond_it_is_not() -> None:
    assert compare(0.90, 0.93, sigma=0.01).same
    found = compare(0.90, 0.95, sigma=0.01)
    assert not found.same
    assert found.difference == pytest.approx(0.05)
    assert "beyond" in found.why


def test_without_a_noise_floor_only_equal_is_the_same() -> None:
    found = compare(0.9, 0.9000001)
    assert not found.same
    assert "not known" in found.why


def test_a_tolerance_overrules_the_noise() -> None:
    assert not compare(0.90, 0.93, sigma=1.0, tolerance=0.01).same


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_a_number_reproduces_nothing(value: float | None) -> None:
    assert not compare(value, value, 1.0).same


def test_a_negative_noise_is_a_mistake() -> None:
    with pytest.raises(LabError, match="sigma"):
        compare(1.0, 1.0, sigma=-1.0)
