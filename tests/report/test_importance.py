from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.report.importance import MIN_RUNS, group, importance


def shares(knobs: dict[str, list[Any]], objective: list[float | None]) -> dict[str, float]:
    return {share.knob: share.share for share in importance(knobs, objective).shares}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["line", "valley", "category", "few"]), st.integers(80, 200))
def test_the_knob_that_drives_the_objective_gets_most(seed: int, shape: str, runs: int) -> None:
    chance = random.Random(seed)
    noise: dict[str, list[Any]] = {f"noise{i}": [chance.random() for _ in range(runs)] for i in range(4)}
    noise["noisy category"] = [chance.choice("abc") for _ in range(runs)]
    if shape == "category":
        driver: list[Any] = [chance.choice(["adam", "sgd", "muon"]) for _ in range(runs)]
        effect = [{"adam": 1.0, "sgd": 3.0, "muon": 0.0}[value] for value in driver]
    elif shape == "few":
        driver = [chance.choice([16, 32, 64]) for _ in range(runs)]
        effect = [value / 16 for value in driver]
    else:
        driver = [chance.random() for _ in range(runs)]
        effect = [8 * (value - 0.5) ** 2 if shape == "valley" else 3 * value for value in driver]
    found = importance({**noise, "driver": driver}, [value + chance.gauss(0, 0.1) for value in effect])
    assert found.shares[0].knob == "driver"
    assert found.shares[0].clear
    assert found.shares[0].share > 0.5
    assert found.shares[0].share > 2 * found.shares[1].share


def test_pure_noise_explains_next_to_nothing() -> None:
    total, clear, cases = 0.0, 0, 0
    for seed in range(30):
        chance = random.Random(seed)
        knobs: dict[str, list[Any]] = {f"k{i}": [chance.random() for _ in range(120)] for i in range(4)}
        knobs["category"] = [chance.choice("abcdefgh") for _ in range(120)]
        knobs["all different"] = [f"run {i}" for i in range(120)]
        found = importance(knobs, [chance.gauss(0, 1) for _ in range(120)])
        total += sum(share.share for share in found.shares)
        clear += sum(share.clear for share in found.shares)
        cases += len(found.shares)
    assert total / cases < 0.02
    assert clear / cases < 0.06


def test_too_few_runs_are_reported() -> None:
    found = importance({"x": [1, 2, 3, 4, 5, 6, 7, 8]}, [1.0, None, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert found.shares == ()
    assert found.runs == 7
    assert str(MIN_RUNS) in (found.note or "")


@pytest.mark.parametrize(
    ("knobs", "objective", "note"),
    [
        ({"x": list(range(10))}, [0.1] * 10, "same objective"),
        ({"x": [3] * 10}, [float(i) for i in range(10)], "more than one value"),
        ({}, [float(i) for i in range(10)], "more than one value"),
    ],
)
def test_where_there_is_nothing_to_explain_it_says_so(
    knobs: dict[str, list[Any]], objective: list[float | None], note: str
) -> None:
    found = importance(knobs, objective)
    assert found.shares == ()
    assert note in (found.note or "")


def test_one_diverged_run_decides_nothing() -> None:
    chance = random.Random(1)
    driver = [chance.random() for _ in range(60)]
    other = [chance.random() for _ in range(60)]
    objective: list[float | None] = [value + chance.gauss(0, 0.02) for value in driver]
    objective[7] = 1e300
    assert shares({"driver": driver, "other": other}, objective)["driver"] > 0.7


def test_a_key_that_some_configs_lack_is_a_group_of_its_own() -> None:
    values = [None, None, None, None, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    objective: list[float | None] = [9.0, 9.1, 9.2, 9.0, 1.0, 1.1, 1.0, 1.2, 1.0, 1.1]
    assert shares({"optional": values}, objective)["optional"] > 0.9


scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1e300, 1e300) | st.text(max_size=2)
objectives = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(scalars, objectives), max_size=40))
def test_whatever_the_values_a_share_is_between_nothing_and_all(rows: list[tuple[Any, float | None]]) -> None:
    found = importance({"x": [value for value, _ in rows]}, [objective for _, objective in rows])
    assert all(0.0 <= share.share <= 1.0 for share in found.shares)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-10, 10) | st.none(), min_size=1, max_size=60))
def test_equal_numbers_stay_together_and_groups_keep_their_order(values: list[float | None]) -> None:
    labels = group(values)
    pairs = sorted((value, label) for value, label in zip(values, labels, strict=True) if value is not None)
    for (a, first), (b, second) in pairwise(pairs):
        assert first <= second
        assert a != b or first == second
