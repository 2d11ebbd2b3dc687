from __future__ import annotations

import json
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.lab import parse_at
from looplab.errors import LabError
from looplab.measure.base import Curve
from looplab.measure.summary import (
    Directions,
    MetricSummary,
    Summariser,
    digest,
    from_dict,
    objective_value,
    to_dict,
)


def summarise(*values: float, metric: str = "loss", **goals: str) -> MetricSummary:
    summariser = Summariser(Directions(goals))  # type: ignore[arg-type]
    summariser.add({metric: Curve([float(step * 10) for step in range(len(values))], list(values))})
    return summariser.result()[metric]


def test_first_last_best_and_how_far_it_moved() -> None:
    summary = summarise(4.0, 1.0, 2.0)
    assert (summary.first, summary.last, summary.best, summary.best_step) == (4.0, 2.0, 1.0, 10.0)
    assert (summary.delta, summary.pct, summary.n, summary.nan) == (-2.0, -50.0, 3, 0)
    assert (summary.min, summary.max, summary.last_step) == (1.0, 4.0, 20.0)
    assert summary.mean == pytest.approx(7 / 3)


def test_percent_is_of_the_size_of_the_first_value() -> None:
    assert summarise(-4.0, -2.0).pct == 50.0


def test_percent_of_zero_is_unknown() -> None:
    summary = summarise(0.0, 2.0)
    assert (summary.delta, summary.pct) == (2.0, None)


def test_one_value_does_not_move() -> None:
    summary = summarise(4.0)
    assert (summary.first, summary.last, summary.best, summary.delta, summary.pct, summary.n) == (
        4,
        4,
        4,
        None,
        None,
        1,
    )


def test_best_follows_the_direction() -> None:
    assert summarise(1.0, 3.0, 2.0, metric="reward").best == 3.0
    assert summarise(1.0, 3.0, 2.0, metric="reward", reward="min").best == 1.0


def test_the_best_step_is_where_the_best_was_first_reached() -> None:
    assert summarise(3.0, 1.0, 2.0, 1.0).best_step == 10.0


def test_nan_and_infinity_are_counted_and_never_win() -> None:
    summary = summarise(nan, 3.0, -inf, 2.0, inf)
    assert (summary.first, summary.last, summary.best, summary.n, summary.nan) == (3.0, 2.0, 2.0, 2, 3)
    assert summary.last_is_nan
    assert not summarise(nan, 3.0).last_is_nan


def test_a_metric_that_was_never_finite_has_no_values() -> None:
    summary = summarise(nan, nan)
    assert (summary.first, summary.last, summary.best, summary.best_step, summary.mean) == (
        None,
        None,
        None,
        None,
        None,
    )
    assert (summary.n, summary.nan) == (0, 2)


def test_values_at_the_edge_of_the_range_do_not_become_infinite() -> None:
    summary = summarise(-1.7e308, 1.7e308)
    assert summary.n == 2
    assert summary.delta is None
    assert json.loads(json.dumps(to_dict({"x": summary}), allow_nan=False))


floats = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(
    values=st.lists(floats, min_size=1, max_size=30), cut=st.integers(0, 30), metric=st.sampled_from(["loss", "acc"])
)
def test_a_summary_grows_with_its_batches(values: list[float], cut: int, metric: str) -> None:
    whole, parts = Summariser(), Summariser()
    steps = [float(step) for step in range(len(values))]
    whole.add({metric: Curve(steps, values)})
    for part in (slice(cut), slice(cut, None)):
        parts.add({metric: Curve(steps[part], values[part])})
    one, two = whole.result()[metric], parts.result()[metric]
    assert one.mean == pytest.approx(two.mean)
    assert {name: value for name, value in to_dict({"x": one})["x"].items() if name != "mean"} == {
        name: value for name, value in to_dict({"x": two})["x"].items() if name != "mean"
    }
    finite = [value for value in values if isfinite(value)]
    assert one.n == len(finite)
    assert one.best == (None if not finite else min(finite) if metric == "loss" else max(finite))


@given(values=st.lists(floats, max_size=10))
def test_summaries_survive_json(values: list[float]) -> None:
    summariser = Summariser()
    summariser.add({"x": Curve([0.0] * len(values), values)})
    summaries = summariser.result()
    back = from_dict(json.loads(json.dumps(to_dict(summaries), allow_nan=False)))
    assert repr(back) == repr(summaries)


@pytest.mark.parametrize(
    ("metric", "goal"),
    [
        ("train/lr", "max"),
        ("train/loss", "min"),
        ("eval/offline_eval/avg_l1", "min"),
        ("train/ot_cost/img_side", "min"),
        ("mean_reward", "max"),
        ("rollout/ep_rew_mean", "max"),
        ("success_rate", "max"),
        ("final_survival_rate", "max"),
        ("survival_time", "max"),
        ("val_accuracy", "max"),
        ("valAcc", "max"),
        ("acc1", "max"),
        ("mAP50", "max"),
        ("f1", "max"),
        ("r2", "max"),
        ("sps", "max"),
        ("val_bpb", "min"),
        ("kld_loss", "min"),
        ("perplexity", "min"),
        ("reward_loss", "min"),
        ("accumulated", "min"),
        ("step_time", "min"),
        ("collision_rate", "min"),
        ("something", "min"),
        ("", "min"),
    ],
)
def test_which_way_is_better_is_read_from_the_name(metric: str, goal: str) -> None:
    assert Directions().goal(metric) == goal


def test_explicit_goals_take_precedence() -> None:
    assert Directions({"loss": "max"}).goal("loss") == "max"


def measured() -> Summariser:
    summariser = Summariser()
    summariser.add({"loss": Curve([0, 1, 2, 3], [4.0, 1.0, 2.0, 3.0]), "ends_badly": Curve([0, 1], [1.0, nan])})
    return summariser


@pytest.mark.parametrize(
    ("at", "value"), [("first", 4.0), ("last", 3.0), ("best", 1.0), ("mean(2)", 2.5), ("mean(99)", 2.5)]
)
def test_the_objective_is_one_number_of_the_curve(at: str, value: float) -> None:
    assert objective_value(measured(), "loss", at) == value
    if not at.startswith("mean"):
        assert objective_value(measured().result(), "loss", at) == value


@pytest.mark.parametrize("at", ["first", "last", "best", "mean(2)"])
def test_a_missing_metric_has_no_value(at: str) -> None:
    assert objective_value(measured(), "acc", at) is None
    assert objective_value({}, "acc", at) is None


def test_a_run_that_ends_in_nan_has_no_last_value() -> None:
    assert objective_value(measured(), "ends_badly", "last") is None
    assert objective_value(measured(), "ends_badly", "mean(2)") is None
    assert objective_value(measured(), "ends_badly", "best") == 1.0


def test_nan_before_the_end_is_left_out_of_the_mean() -> None:
    summariser = Summariser()
    summariser.add({"x": Curve([0, 1, 2], [1.0, nan, 3.0])})
    assert objective_value(summariser, "x", "mean(3)") == 2.0
    assert objective_value(summariser, "y", "mean(3)") is None


def test_the_best_of_a_curve_follows_the_goal() -> None:
    summariser = Summariser(Directions({"x": "max"}))
    summariser.add({"x": Curve([0, 1], [1.0, 3.0])})
    assert objective_value(summariser, "x", "best") == 3.0


def test_a_mean_needs_the_values_it_is_of() -> None:
    with pytest.raises(LabError, match="needs the last 3"):
        objective_value(measured().result(), "loss", "mean(3)")
    summariser = Summariser(kept=2)
    summariser.add({"loss": Curve([0, 1, 2], [3.0, 2.0, 1.0])})
    with pytest.raises(LabError, match="needs the last 3"):
        objective_value(summariser, "loss", "mean(3)")


@pytest.mark.parametrize("at", ["", "mean", "mean(0)", "mean(-1)", "median", "max"])
def test_an_objective_at_an_unknown_place_is_an_error(at: str) -> None:
    with pytest.raises(LabError, match="first, last, best"):
        parse_at(at)


def test_metrics_that_repeat_a_setting_do_not_tell_two_runs_apart() -> None:
    def measured(lr: float, loss: float) -> str | None:
        summariser = Summariser()
        summariser.add({"train/lr": Curve([0.0], [lr]), "loss": Curve([0.0], [loss])})
        return digest(summariser.result(), ["optim.lr"])

    assert measured(0.1, 2.0) == measured(0.2, 2.0)
    assert measured(0.1, 2.0) != measured(0.1, 3.0)
