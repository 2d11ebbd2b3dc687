"""One knob: what it takes, how it says no, and what it offers instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.guard import Knob


def knob(**spec: Any) -> Knob:
    return Knob.make("train.x", spec)


@pytest.mark.parametrize(
    ("spec", "value", "coerced"),
    [
        ({"type": "float", "low": 1e-6, "high": 1, "log": True}, 1, 1.0),
        ({"type": "float", "low": 0, "high": 1}, 0, 0.0),
        ({"type": "int", "low": 1, "high": 256}, 3.0, 3),
        ({"type": "int", "low": 1e3, "high": 1e9}, 10_000_000, 10_000_000),
        ({"type": "int", "low": 1, "high": 9, "step": 4}, 5, 5),
        ({"type": "float", "low": 0, "high": 1, "step": 0.1}, 0.1 * 3, 0.1 * 3),
        ({"type": "bool"}, False, False),
        ({"type": "str"}, "", ""),
        ({"choices": ["muon", "adam"]}, "adam", "adam"),
        ({"choices": [16, 32]}, 32.0, 32),
        ({"type": "float", "choices": [1, 2.5]}, 1, 1.0),
        ({"choices": [None, 0.1, "auto"]}, None, None),
        ({"choices": [[64, 64], [256, 256]]}, [64, 64], [64, 64]),
        ({"low": 1, "high": 8}, 4, 4),
        ({}, "anything", "anything"),
        ({}, [1, {"a": 2}], [1, {"a": 2}]),
    ],
)
def test_a_legal_value_is_coerced_to_the_type_of_the_knob(spec: dict[str, Any], value: Any, coerced: Any) -> None:
    made = knob(**spec)
    assert made.problem(value) is None
    assert made.check(value)[0] == coerced
    assert type(made.check(value)[0]) is type(coerced)
    assert made.nearest(value) == coerced


@pytest.mark.parametrize(
    ("spec", "value", "words", "nearest"),
    [
        ({"type": "float", "low": 0, "high": 1}, 1.5, "above 1", 1.0),
        ({"type": "float", "low": 1e-6, "high": 1}, 0, "below 1e-06", 1e-6),
        ({"type": "float", "low": 0, "high": 1}, math.nan, "not finite", 0.0),
        ({"type": "float", "low": 0, "high": 1}, math.inf, "not finite", 1.0),
        ({"type": "float"}, -math.inf, "not finite", 0.0),
        ({"type": "float", "low": 0, "high": 1}, True, "not a number", 1.0),
        ({"type": "float", "low": 0, "high": 1}, "0.25", "not a number", 0.25),
        ({"type": "float", "low": 0, "high": 1}, 10**400, "too large", 1.0),
        ({"type": "float", "low": 2, "high": 3}, None, "null is not a number", 2.0),
        ({"type": "int", "low": 1, "high": 256}, 3.7, "not a whole number", 4),
        ({"type": "int", "low": 1, "high": 256}, True, "not a whole number", 1),
        ({"type": "int", "low": 1, "high": 256}, 300, "above 256", 256),
        ({"type": "int", "low": 2, "high": 14, "step": 4}, 9, "not in steps of 4 from 2", 10),
        ({"type": "int", "low": 2, "high": 13, "step": 4}, 99, "above 13", 10),
        ({"type": "int", "high": -5, "step": 2}, 3, "above -5", -6),
        ({"type": "float", "low": 0, "high": 0.3, "step": 0.1}, 0.29, "not in steps of 0.1", 0.3),
        ({"type": "bool"}, 1, "not true or false", True),
        ({"type": "bool"}, "no", "not true or false", False),
        ({"type": "str"}, 5, "not text", "5"),
        ({"choices": ["muon", "adam", "adamw"]}, "Adam-W", "not one of 'muon', 'adam', 'adamw'", "adamw"),
        ({"choices": [16, 32, 64]}, 40, "not one of 16, 32, 64", 32),
        ({"choices": [16, 32, 64]}, math.inf, "not one of", 64),
        ({"choices": [0, 1]}, True, "not one of", 1),
        ({"choices": [True, False]}, 1, "not one of", True),
        ({}, [1.0, math.nan], "not finite", None),
    ],
)
def test_an_illegal_value_is_rejected_with_the_nearest_legal_one(
    spec: dict[str, Any], value: Any, words: str, nearest: Any
) -> None:
    made = knob(**spec)
    assert words in (made.problem(value) or "")
    assert made.nearest(value) == nearest
    assert type(made.nearest(value)) is type(nearest)


def test_without_a_type_the_value_in_the_config_decides() -> None:
    free = knob(low=0, high=10)
    assert (
        free.problem(0.5, like=3)
        == "0.5 is not a whole number (the config has 3; to allow it, give the knob `type: float`)"
    )
    assert free.problem(0.5, like=3.0) is None
    assert free.check(4, like=3.0)[0] == 4.0
    assert type(free.check(4, like=3.0)[0]) is float
    assert type(free.check(4)[0]) is int
    assert free.python_type(3) is int
    assert free.python_type(3.0) is float
    assert free.python_type() is None
    assert knob().problem("x", like=True) == "'x' is not true or false"
    assert knob().problem(1, like="x") == "1 is not text"
    assert knob(type="float").python_type(3) is float


def test_a_config_that_holds_1_for_a_fraction_does_not_make_it_an_int() -> None:
    rate = knob(low=1e-6, high=1)
    assert rate.python_type(1) is float
    assert rate.problem(0.5, like=1) is None


def test_choices_give_the_type_where_they_agree() -> None:
    assert knob(choices=["a", "b"]).python_type(3) is str
    assert knob(choices=[1, 2]).python_type() is int
    assert knob(choices=[1, 2.5]).python_type() is float
    assert knob(choices=[True, False]).python_type() is bool
    assert knob(choices=[None, 1]).python_type() is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"low": 2, "high": 1}, "low 2 is above high 1"),
        ({"low": math.nan}, "low takes a finite number, not nan"),
        ({"high": math.inf}, "high takes a finite number, not inf"),
        ({"low": "1e-6"}, "low takes a number, not '1e-6'"),
        ({"low": True}, "low takes a number, not True"),
        ({"log": True, "high": 1}, "log needs a low above 0"),
        ({"log": True, "low": 0, "high": 1}, "log needs a low above 0"),
        ({"log": "yes", "low": 1}, "log takes true or false"),
        ({"log": True, "low": 1, "high": 9, "step": 2}, "log and step exclude each other"),
        ({"step": 0}, "step takes a number above 0"),
        ({"type": "int", "low": 0.5}, "low: an int needs a whole number, not 0.5"),
        ({"type": "int", "step": 1.5}, "step: an int needs a whole number"),
        ({"type": "bool", "low": 0}, "low is for numbers"),
        ({"type": "str", "step": 1}, "step is for numbers"),
        ({"type": "flaot"}, "did you mean 'float'?"),
        ({"type": "tensor"}, "'int', 'float', 'bool' or 'str'"),
        ({"choices": []}, "choices takes at least 1 entry"),
        ({"choices": None}, "choices: null is not a list"),
        ({"choices": "abc"}, "choices takes a list"),
        ({"choices": [1, math.nan]}, "not finite"),
        ({"choices": [1, 2], "low": 0}, "choices and low exclude each other"),
        ({"type": "int", "choices": [1, "two"]}, "a choice does not fit the type int"),
        ({"min": 1}, "did you mean 'low'?"),
        ({"hihg": 1}, "did you mean 'high'?"),
        ({"colour": 1}, "known: type, low, high, log, step, choices, default"),
    ],
)
def test_a_knob_that_makes_no_sense_is_rejected_when_it_is_made(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError) as caught:
        knob(**spec)
    assert words in str(caught.value)
    assert "knob train.x" in str(caught.value)


def test_a_knob_needs_a_path_and_a_mapping() -> None:
    for path in ["", "a..b", ".a"]:
        with pytest.raises(LabError, match="not a path"):
            Knob.make(path, {})
    with pytest.raises(LabError, match="takes keys with values"):
        Knob.make("a", [0, 1])  # type: ignore[arg-type]


def test_a_knob_describes_itself() -> None:
    assert knob(type="float", low=1e-6, high=1, log=True).describe() == "float, 1e-06 … 1, log"
    assert knob(type="int", low=2, step=4).describe() == "int, at least 2, in steps of 4"
    assert knob(high=3).describe() == "at most 3"
    assert knob(choices=["a", None, 1.5, True]).describe() == "one of 'a', null, 1.5, true"
    assert knob().describe() == "any value of its type"


_FINITE = st.integers(-1_000, 1_000) | st.floats(-1e3, 1e3, allow_nan=False)
_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.lists(st.floats(), max_size=2)
)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()) and draw(st.booleans()):
        return {
            "choices": draw(st.lists(st.none() | st.booleans() | _FINITE | st.text(max_size=4), min_size=1, max_size=4))
        }
    kind = draw(st.sampled_from([None, "int", "float", "bool", "str"]))
    spec: dict[str, Any] = {"type": kind}
    if kind in ("bool", "str"):
        return spec
    numbers = st.integers(-1_000, 1_000) if kind == "int" else _FINITE
    low, high = sorted([draw(numbers), draw(numbers)])
    spec |= {"low": draw(st.sampled_from([low, None])), "high": draw(st.sampled_from([high, None]))}
    if draw(st.booleans()):
        spec["step"] = draw(st.integers(1, 50) if kind == "int" else st.floats(0.01, 50) | st.integers(1, 50))
    return spec


@settings(max_examples=500, deadline=None)
@given(spec=specs(), value=_VALUES, like=_VALUES.filter(lambda value: not isinstance(value, list)))
@example(spec={"type": "float", "low": 0.1, "high": 0.1, "step": 7.0}, value=3, like=None)
@example(spec={"type": None, "low": 0.2, "high": 0.8}, value=5, like=3)
@example(spec={"type": "float", "step": 0.01}, value=1.7e308, like=None)
def test_the_nearest_value_is_always_legal(spec: dict[str, Any], value: Any, like: Any) -> None:
    made = knob(**spec)
    nearest = made.nearest(value, like)
    assert made.problem(nearest, like) is None
    assert made.nearest(nearest, like) == nearest
    if made.problem(value, like) is None:
        assert nearest == value
    if isinstance(nearest, float):
        assert math.isfinite(nearest)


@settings(max_examples=300, deadline=None)
@given(spec=specs(), value=st.integers(-2_000, 2_000) | st.floats(-2e3, 2e3, allow_nan=False), other=_FINITE)
def test_no_legal_number_is_much_nearer_than_the_nearest(spec: dict[str, Any], value: float, other: float) -> None:
    made = knob(**spec)
    nearest = made.nearest(value)
    numbers = [x for x in (nearest, other) if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) == 2 and made.problem(other) is None:
        assert abs(nearest - value) <= abs(other - value) + 1e-6
