"""Pruners, alone: curves go in, reasons to prune come out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.lab import PruneConfig
from looplab.watch.pruner import Pruner


def pruner(kind: Any, goal: Any = "min", **settings: Any) -> Pruner:
    return Pruner(PruneConfig(pruner=kind, **settings), goal)


def curve(level: float, n: int = 10) -> tuple[list[float], list[float]]:
    return [float(i) for i in range(n)], [level + 1 / (i + 1) for i in range(n)]


def trained(kind: Any, levels: list[float], **settings: Any) -> Pruner:
    made = pruner(kind, **settings)
    for i, level in enumerate(levels):
        made.ended(f"r{i}", *curve(level), level)
    return made


def test_a_run_worse_than_the_median_of_finished_ones_is_pruned_with_the_numbers() -> None:
    made = trained("median", [1, 2, 3, 4, 5])
    why = made.prune_reason("new", *curve(4, 3))
    assert why is not None
    assert "5" in why
    assert "median 4 of 5 finished runs at step 0" in why
    assert made.prune_reason("good", *curve(1, 3)) is None


def test_with_a_maximum_as_goal_it_is_the_other_way_round() -> None:
    made = trained("median", [1, 2, 3, 4, 5], goal="max")
    assert made.prune_reason("new", *curve(1, 3)) is not None
    assert made.prune_reason("good", *curve(5, 3)) is None


def test_nothing_is_pruned_before_enough_runs_have_ended_or_in_the_warmup() -> None:
    assert trained("median", [1, 2, 3]).prune_reason("new", *curve(9)) is None
    made = trained("median", [1, 2, 3, 4, 5], warmup=6)
    assert made.prune_reason("new", *curve(9, 6)) is None
    why = made.prune_reason("new", *curve(9, 7))
    assert why is not None
    assert "step 6" in why


def test_every_limits_how_often_a_run_is_evaluated() -> None:
    made = trained("median", [1, 2, 3, 4, 5], every=4, warmup=1)
    assert made.prune_reason("new", [0.0, 1.0], [0.0, 9.0]) is None  # the best so far is good
    looked = trained("median", [1, 2, 3, 4, 5], every=4)
    assert looked.prune_reason("new", [0.0], [1.5]) is None
    assert looked.prune_reason("new", [0.0, 1.0, 2.0, 3.0], [1.5, 9, 9, 9]) is None


def test_ended_runs_that_logged_at_other_steps_are_compared_by_their_last_value_before() -> None:
    made = pruner("median", startup=1)
    made.ended("r", [0.0, 10.0, 20.0], [3.0, 2.0, 1.0], 1.0)
    assert made.prune_reason("new", [15.0], [2.5]) is not None
    assert made.prune_reason("other", [15.0], [1.5]) is None
    assert made.prune_reason("longer", [30.0], [99.0]) is None  # no run got this far


def test_failed_runs_are_not_compared_with() -> None:
    made = pruner("median", startup=1)
    made.ended("crashed", *curve(0), None)
    made.ended("nan", *curve(0), math.nan)
    made.ended("empty", [], [], 1.0)
    assert made.prune_reason("new", *curve(9)) is None


@pytest.mark.parametrize("kind", ["median", "asha", "threshold"])
def test_a_run_of_only_nan_is_pruned(kind: str) -> None:
    made = trained(kind, [1, 2, 3, 4, 5], **({"upper": 100} if kind == "threshold" else {}))
    why = made.prune_reason("new", [0.0, 1.0], [math.nan, math.nan])
    assert why is not None
    assert "NaN" in why


def test_one_nan_among_good_values_does_not_hurt_the_median() -> None:
    made = trained("median", [1, 2, 3, 4, 5])
    assert made.prune_reason("new", [0.0, 1.0, 2.0], [1.5, math.nan, 1.2]) is None


def test_halving_keeps_the_best_third_at_each_rung() -> None:
    made = pruner("asha", reduction_factor=3)
    reasons = [made.prune_reason(f"r{i}", *curve(level, 1)) for i, level in enumerate([5, 4, 6, 7, 3, 8])]
    assert [reason is None for reason in reasons] == [True, True, False, False, True, False]
    assert reasons[2] is not None
    assert "best 1/3" in reasons[2]


def test_runs_that_ended_under_an_earlier_engine_count_in_the_rungs() -> None:
    made = trained("asha", [1, 2, 3, 4, 5, 6])
    assert made.prune_reason("bad", *curve(9, 1)) is not None
    assert made.prune_reason("good", *curve(0, 1)) is None


def test_hyperband_prunes_bad_ones_and_is_the_same_each_time() -> None:
    def reasons() -> list[bool]:
        made = pruner("hyperband", max_resource=9)
        return [made.prune_reason(f"r{i}", *curve((7 * i) % 11, 9)) is not None for i in range(22)]

    first = reasons()
    assert first == reasons()
    assert 0 < sum(first) < 22


def test_a_threshold_is_kept_on_both_sides() -> None:
    made = pruner("threshold", lower=0.0, upper=10.0)
    assert made.prune_reason("a", [0.0], [5.0]) is None
    above, below = made.prune_reason("a", [0.0, 1.0], [5.0, 11.0]), made.prune_reason("b", [0.0], [-1.0])
    assert above == "the value 11 is above 10 at step 1"
    assert below == "the value -1 is below 0 at step 0"


@pytest.mark.parametrize("kind", ["median", "asha", "hyperband"])
@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=12), cuts=st.sets(st.integers(1, 12)))
def test_it_does_not_matter_how_many_rows_come_at_once(kind: str, values: list[float], cuts: set[int]) -> None:
    steps = [float(i) for i in range(len(values))]
    whole = trained(kind, [1, 2, 3, 4, 5]).prune_reason("new", steps, values)
    made = trained(kind, [1, 2, 3, 4, 5])
    parts = [
        made.prune_reason("new", steps[:end], values[:end])
        for end in sorted({*cuts, len(values)})
        if end <= len(values)
    ]
    assert next((why for why in parts if why is not None), None) == whole
