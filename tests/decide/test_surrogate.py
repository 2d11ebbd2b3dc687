from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import check_grad
from scipy.stats import norm

import looplab.decide.gp as gp
from looplab.decide.acquisition import AcquisitionOptimizer, log_expected_improvement
from looplab.decide.axes import Axis, find_axes
from looplab.decide.feasible import Repairer
from looplab.decide.gp import GaussianProcess, KernelParams, fit_kernel
from looplab.decide.observations import Observations, warped
from looplab.decide.points import SearchPoint
from looplab.decide.sampling import generator
from looplab.decide.space import CHOICE_DISTANCE, SearchSpace
from looplab.guard.guard import Guard, Problem
from looplab.guard.knobs import Knob

KNOBS: dict[str, dict[str, Any]] = {
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "width": {"type": "int", "low": 2, "high": 64},
    "depth": {"type": "int", "low": 1, "high": 4096, "log": True},
    "heads": {"type": "int", "low": 2, "high": 20, "step": 3},
    "batch": {"choices": [32, 64, 128]},
    "opt": {"choices": ["adam", "sgd", "muon"]},
    "drop": {"type": "float", "low": 0, "high": 1, "step": 0.25},
}
BASE: dict[str, Any] = {"lr": 0.1, "width": 8, "depth": 2, "heads": 2, "batch": 32, "opt": "adam", "drop": 0.0}


def make_axes(knobs: dict[str, dict[str, Any]], base: dict[str, Any]) -> list[Axis]:
    axes, left_out = find_axes(Guard({path: Knob.make(path, spec) for path, spec in knobs.items()}), base)
    assert not left_out
    return axes


AXES = make_axes(KNOBS, BASE)
PLANE = make_axes({k: {"type": "float", "low": 0, "high": 1} for k in "xy"}, {"x": 0.5, "y": 0.5})
Params = dict[str, Any]


def only(axes: list[Axis], allowed: Callable[[Params], bool]) -> Repairer:
    """A repairer without a base config, so that refused draws cannot be repaired."""
    return Repairer(axes, Guard({}), lambda params: () if allowed(params) else (Problem("x", None, "rule", "no"),), {})


def play(
    axes: list[Axis], f: Callable[[Params], float | None], n: int, seed: int, allowed: Callable[[Params], bool]
) -> list[SearchPoint]:
    """Evaluate `n` points: the first six random, the others suggested."""
    optimizer = AcquisitionOptimizer(axes, 1.0, only(axes, allowed))
    points: list[SearchPoint] = []
    for i in range(n):
        rng = generator(seed, i)
        if i < 6:
            params = {axis.path: axis.from_unit(float(rng.random_sample())) for axis in axes}
        else:
            params = next(optimizer.suggest(points, rng))
        value = f(params)
        points.append(SearchPoint(params, [] if value is None else [value], crashes=int(value is None)))
    return points


def anything(params: Params) -> bool:
    return True


def bowl(params: Params) -> float:
    return float((params["x"] - 0.3) ** 2 + (params["y"] - 0.6) ** 2)


# --- search space


@given(st.integers(0, 2**31))
def test_every_row_is_a_legal_config_and_reads_back(seed: int) -> None:
    space, rng = SearchSpace(AXES), np.random.RandomState(seed)
    rows = space.from_uniform(rng.random_sample((4, len(AXES))))
    for row in np.vstack([rows, space.perturb(rows, np.full(4, 0.2), rng)]):
        params = space.to_params(row)
        for axis in AXES:
            assert axis.knob.problem(axis.to_value(params[axis.path])) is None
            assert axis.to_param(axis.to_value(params[axis.path])) is not None
        assert space.to_row(params) == pytest.approx(row.tolist(), abs=1e-9)


def test_a_step_changes_a_whole_number_and_a_choice_is_as_far_from_one_other_as_from_the_next() -> None:
    space, rng = SearchSpace(AXES), np.random.RandomState(0)
    row = np.array([space.to_row({"lr": 0.1, "width": 8, "depth": 2, "heads": 2, "batch": 0, "opt": 0, "drop": 0})])
    moved = space.perturb(np.repeat(row, 200, axis=0), np.full(200, 1e-6), rng)
    assert {space.to_params(one)["width"] for one in moved} == {7, 8, 9}
    assert {space.to_params(one)["opt"] for one in moved} == {0, 1, 2}
    others = np.repeat(row, 3, axis=0)
    others[:, [axis.path for axis in AXES].index("opt")] = [0, 1, 2]
    features = space.features(others)
    assert [float(np.sum((features[0] - one) ** 2)) for one in features] == pytest.approx(
        [0.0, *2 * [CHOICE_DISTANCE**2]]
    )


SMALL: list[dict[str, Any]] = [
    {"type": "int", "low": 0, "high": 3},
    {"type": "int", "low": 1, "high": 9, "log": True},
    {"type": "int", "low": 2, "high": 11, "step": 3},
    {"type": "float", "low": 0, "high": 1, "step": 0.25},
    {"choices": ["adam", "sgd", "muon"]},
    {"type": "bool"},
]


@given(st.lists(st.sampled_from(SMALL), min_size=1, max_size=3))
def test_a_small_grid_is_listed_once_each_and_reads_back(specs: list[dict[str, Any]]) -> None:
    knobs = {f"k{i}": spec for i, spec in enumerate(specs)}
    base = {path: spec.get("choices", [spec.get("low", True)])[0] for path, spec in knobs.items()}
    axes = make_axes(knobs, base)
    space = SearchSpace(axes)
    rows = space.all_rows(1024)
    assert rows is not None
    seen = set()
    for row in rows:
        params = space.to_params(row)
        for axis in axes:
            value = axis.to_value(params[axis.path])
            assert axis.knob.problem(value) is None
            assert axis.to_param(value) == params[axis.path]
        assert space.to_row(params) == pytest.approx(row.tolist(), abs=1e-9)  # the kernel sees what is run
        seen.add(tuple(params.values()))
    sizes = [len(axis.choices) or (axis.bounds[1] - axis.bounds[0]) // int(axis.knob.step or 1) + 1 for axis in axes]
    assert len(seen) == len(rows) == math.prod(sizes)
    assert space.all_rows(len(rows) - 1) is None
    assert SearchSpace([*axes, *PLANE]).all_rows(1024) is None


def test_the_last_points_of_an_integer_grid_are_found_too() -> None:
    knobs = {"layers": SMALL[0], "width": SMALL[1], "heads": SMALL[2]}
    axes = make_axes(knobs, {"layers": 0, "width": 1, "heads": 2})
    n = 4 * 9 * 4
    points = play(axes, lambda p: float(p["layers"] + p["width"]), 40, seed=0, allowed=anything)
    best = min(points, key=lambda point: point.value or 0.0)
    assert best.params["layers"] + best.params["width"] == 1
    tried = {tuple(point.params.values()) for point in points[6:]}
    assert len(tried) == 34  # suggestions do not repeat
    optimizer = AcquisitionOptimizer(axes, 1.0, only(axes, anything))
    left = {tuple(params.values()) for params in optimizer.suggest(points, generator(1))}
    assert len(left) == n - len({tuple(point.params.values()) for point in points})
    region = SearchSpace(axes).region({"layers": (1, 2), "width": (3, 5)})
    inside = list(optimizer.suggest(points, generator(1), region))
    assert inside
    assert all(1 <= params["layers"] <= 2 and 3 <= params["width"] <= 5 for params in inside)


def test_a_choice_that_decides_is_found() -> None:
    """Each choice has its optimum elsewhere, and those of the others are far above that of the best one."""
    knobs: dict[str, dict[str, Any]] = {"kind": {"choices": ["a", "b", "c"]}}
    knobs |= {k: {"type": "float", "low": 0, "high": 1} for k in "xy"}
    axes = make_axes(knobs, {"kind": "a", "x": 0.5, "y": 0.5})
    centers = [(0.2, 0.8, 0.5), (0.8, 0.7, 0.25), (0.3, 0.15, 0.0)]  # with the value there

    def loss(params: Params) -> float:
        x, y, level = centers[params["kind"]]
        return level + 2 * (params["x"] - x) ** 2 + 2 * (params["y"] - y) ** 2

    for seed in range(3):
        points = play(axes, loss, 36, seed=seed, allowed=anything)
        assert min(points, key=lambda point: point.value or 0.0).params["kind"] == 2


# --- Gaussian process


def test_the_slope_of_the_loss_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.RandomState(0)
    x, y, weights = rng.random_sample((12, 3)), rng.standard_normal(12), np.array([1.0, 2.0, 3.0] * 4)
    worst = []
    real = gp.minimize

    def checked(loss: Any, first: Any, **options: Any) -> Any:
        for theta in (first, first + 0.3):
            worst.append(check_grad(lambda t: loss(t)[0], lambda t: loss(t)[1], theta))
        return real(loss, first, **options)

    monkeypatch.setattr(gp, "minimize", checked)
    fit_kernel(x, np.array([0, 1, 1]), y, weights)
    assert max(worst) < 1e-4


def test_what_matters_and_how_noisy_it_is_are_learnt() -> None:
    rng = np.random.RandomState(1)
    x = rng.random_sample((60, 3))
    clean = np.sin(6 * x[:, 0])
    feature_axis = np.arange(3)
    quiet, noisy = (
        fit_kernel(x, feature_axis, clean + sd * rng.standard_normal(60), np.ones(60)) for sd in (0.01, 0.7)
    )
    assert quiet.lengthscales[0] < quiet.lengthscales[1:].min()
    assert quiet.noise_variance < 0.05 < noisy.noise_variance


def test_a_process_believes_its_values_and_doubts_far_from_them() -> None:
    x = np.array([[0.1], [0.2], [0.3]])
    process = GaussianProcess(
        KernelParams(np.array([0.1]), signal_variance=1.0, noise_variance=1e-6),
        x,
        np.array([0]),
        np.array([1.0, 0.0, -1.0]),
        np.ones(3),
    )
    mean, sd = process.predict(np.array([[0.1], [0.3], [0.95]]))
    assert mean == pytest.approx([1.0, -1.0, 0.0], abs=0.01)
    assert sd[0] < 0.01 < 0.9 < sd[2]


def test_more_runs_of_a_point_are_believed_more() -> None:
    kernel, x = KernelParams(np.array([0.1]), signal_variance=1.0, noise_variance=1.0), np.array([[0.5]])
    once, often = (
        GaussianProcess(kernel, x, np.array([0]), np.array([1.0]), np.array([n])).predict(x)[0][0] for n in (1.0, 20.0)
    )
    assert once < often < 1.0


def test_the_expected_improvement_is_right_and_never_runs_out() -> None:
    mean, sd = np.array([0.0, 1.0, 4.0]), np.array([1.0, 0.5, 1.0])
    z = (0.5 - mean) / sd
    assert np.exp(log_expected_improvement(mean, sd, 0.5)) == pytest.approx(
        sd * (z * norm.cdf(z) + norm.pdf(z)), rel=1e-6
    )
    far = log_expected_improvement(np.array([10.0, 100.0, 1e4, 1e6]), np.full(4, 0.5), 0.0)
    assert np.all(np.isfinite(far))
    assert np.all(np.diff(far) < 0)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20))
def test_warped_values_keep_their_order_and_stay_numbers(values: list[float]) -> None:
    warped_values = warped(np.array(values))
    assert np.all(np.isfinite(warped_values))
    assert np.all(np.diff(warped_values[np.argsort(values, kind="stable")]) >= -1e-9)


def test_a_terrible_value_leaves_the_others_apart() -> None:
    warped_values = warped(np.array([1.0, 2.0, 3.0, 4.0, 1e9]))
    assert warped_values[3] - warped_values[0] > 0.1


# --- suggestions


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12))
def test_draws_are_legal_whatever_the_points_are(seed: int, n: int) -> None:
    rng = random.Random(seed)
    points = []
    for i in range(n):
        params = {axis.path: axis.from_unit(rng.random()) for axis in AXES}
        kind = rng.randrange(4) if i else 0
        value = rng.choice([0.0, rng.gauss(0, 1), 1e12])
        points.append(SearchPoint(params, [value] * (kind < 2), crashes=int(kind == 2), pending=int(kind == 3)))
    for params in islice(AcquisitionOptimizer(AXES, -1.0, only(AXES, anything)).suggest(points, generator(seed)), 5):
        for axis in AXES:
            assert axis.knob.problem(axis.to_value(params[axis.path])) is None


def test_the_same_points_lead_to_the_same_suggestions_whatever_came_before() -> None:
    points = play(PLANE, bowl, 14, 0, anything)
    used = AcquisitionOptimizer(PLANE, 1.0, only(PLANE, anything))
    for n in (6, 9, 12):
        next(used.suggest(points[:n], generator(0, n)))
    first, second, other = (
        list(islice(optimizer.suggest(points, generator(seed, 14)), 3))
        for optimizer, seed in ((used, 0), (AcquisitionOptimizer(PLANE, 1.0, only(PLANE, anything)), 0), (used, 1))
    )
    assert first == second
    assert first != other


def test_pending_points_are_avoided() -> None:
    points = play(PLANE, bowl, 6, 0, anything)
    optimizer = AcquisitionOptimizer(PLANE, 1.0, only(PLANE, anything))
    first = next(optimizer.suggest(points, generator(0, 6)))
    second = next(optimizer.suggest([*points, SearchPoint(first, pending=1)], generator(0, 6)))
    assert math.dist(first.values(), second.values()) > 0.01


def test_proposals_made_together_spread_however_noisy_the_runs_are() -> None:
    closest = []
    for seed in range(4):
        noise = random.Random(seed)
        points = play(PLANE, lambda p, noise=noise: bowl(p) + noise.gauss(0, 0.2), 16, seed, anything)  # type: ignore[misc]
        optimizer = AcquisitionOptimizer(PLANE, 1.0, only(PLANE, anything))
        for i in range(8):
            points.append(SearchPoint(next(optimizer.suggest(points, generator(seed, 16 + i))), pending=1))
        batch = [tuple(point.params.values()) for point in points[16:]]
        closest.append(statistics.median(min(math.dist(a, b) for b in batch if b is not a) for a in batch))
    assert statistics.median(closest) > 0.05  # 0.18; with the noise of a run at pending points 0.005


def test_draws_of_a_process_have_its_mean_and_deviation() -> None:
    x = np.array([[0.1], [0.4]])
    kernel = KernelParams(np.array([0.2]), signal_variance=2.0, noise_variance=0.1)
    process = GaussianProcess(kernel, x, np.array([0]), np.array([1.0, -1.0]), np.ones(2))
    at = np.array([[0.1], [0.3], [0.9], [0.9]])
    draws, (mean, sd) = process.draw(at, 4000, np.random.RandomState(0)), process.predict(at)
    assert draws.mean(axis=1) == pytest.approx(mean, abs=0.1)
    assert draws.std(axis=1) == pytest.approx(sd, rel=0.1)
    assert draws[2] == pytest.approx(draws[3], abs=0.02)  # the same point, in every draw


def test_stopped_runs_show_the_way_and_their_values_are_not_taken_as_final() -> None:
    def curve(params: Params, until: int) -> tuple[tuple[float, float], ...]:
        return tuple((float(step), bowl(params) + 1 / step) for step in (1, 2, 4, 8, 16) if step <= until)

    rng = random.Random(0)
    drawn = [{"x": rng.random(), "y": rng.random()} for _ in range(24)]
    by_chance = sorted(drawn, key=bowl)
    finished, stopped = (
        by_chance[-4:],
        by_chance[:-4],
    )  # only the worst were finished: the others know where it is better
    ended = [SearchPoint(p, [curve(p, 16)[-1][1]], curves=[curve(p, 16)]) for p in finished]
    cut = [SearchPoint(p, stopped=[curve(p, 2)]) for p in stopped]
    optimizer = AcquisitionOptimizer(PLANE, 1.0, only(PLANE, anything))
    taught, untaught = (bowl(next(optimizer.suggest(points, generator(0)))) for points in (ended + cut, ended))
    assert taught < 0.02 < untaught
    values, _, doubt = Observations.of_objective([*ended, *cut], 1.0)
    assert values[len(ended) :].max() < values[: len(ended)].max()  # though all that they have measured is worse
    assert doubt[: len(ended)].max() == 0.0 < doubt[len(ended) :].min()


def test_a_stopped_run_says_something_about_good_configs_even_if_finished_ones_are_close_together() -> None:
    """With the scale of finished values alone, everything that is not finished is noise."""

    def curve(final: float, until: int = 27) -> Any:
        return tuple((step, final + 0.5 / step**2) for step in (1, 3, 9, 27) if step <= until)

    finals = (0.0450, 0.0452, 0.0455, 0.0460)
    finished = [SearchPoint({}, [curve(final)[-1][1]], curves=[curve(final)]) for final in finals]
    stopped = [SearchPoint({}, stopped=[curve(final, 9)]) for final in (0.048, 0.06, 0.09, 0.15, 0.4)]
    y, _, extra = Observations.of_objective([*finished, *stopped], 1.0)
    own = y[len(finished) :]
    assert (np.diff(own) > 0).all()  # better stopped runs are better
    assert math.sqrt(extra[len(finished)]) < 0.6  # the best of them is in doubt by a part of the spread of all values
    assert (extra[: len(finished)] == 0).all()


def test_where_runs_fail_is_avoided() -> None:
    failures = 0
    for seed in (1, 2):
        points = play(PLANE, lambda p: None if p["x"] > 0.5 else bowl(p), 26, seed, anything)
        assert any(point.infeasible for point in points[:6])
        failures += sum(point.infeasible for point in points[10:])
    assert failures <= 10  # 2 or 3 of a seed's 16 are usual, 5 at most of 24 seeds; by chance it would be 8


def test_a_best_place_at_the_edge_of_where_runs_fail_is_found() -> None:
    points = play(PLANE, lambda p: None if p["x"] < 0.4 else bowl(p), 26, 1, anything)
    # 0.01 at best; all of 24 seeds come below 0.0115, and of 26 random points one in twenty below 0.015.
    assert min(point.value for point in points if point.value is not None) < 0.015


def test_only_what_is_allowed_is_drawn_and_the_best_of_it_is_found() -> None:
    points = play(PLANE, bowl, 25, 0, lambda p: p["x"] > p["y"])
    assert all(point.params["x"] > point.params["y"] for point in points[6:])
    # 0.045 at best, on the edge; all of 24 seeds come below 0.0465.
    assert min(bowl(point.params) for point in points[6:]) < 0.05


def test_a_finite_space_is_drawn_once_each() -> None:
    axes = make_axes({"o": {"choices": ["a", "b", "c"]}, "n": {"type": "int", "low": 0, "high": 2}}, {"o": "a", "n": 0})
    points = play(axes, lambda p: float(p["n"] - p["o"]), 6, 0, anything)
    tried = {tuple(point.params.values()) for point in points}
    left = [
        tuple(params.values())
        for params in AcquisitionOptimizer(axes, 1.0, only(axes, anything)).suggest(points, generator(0))
    ]
    assert not tried & set(left)
    assert tried | set(left) == {(o, n) for o in range(3) for n in range(3)}


def test_a_noisy_bowl_is_searched_better_than_by_chance() -> None:
    axes = make_axes({k: {"type": "float", "low": 0, "high": 1} for k in "abcd"}, dict.fromkeys("abcd", 0.5))

    def clean(params: Params) -> float:
        return float(sum((value - 0.3) ** 2 for value in params.values()))

    drawn, chance = [], []
    for seed in range(5):
        noise = random.Random(seed)
        points = play(axes, lambda p, noise=noise: clean(p) + noise.gauss(0, 0.03), 30, seed, anything)  # type: ignore[misc]
        drawn.append(clean(min(points, key=lambda point: point.values[0]).params))
        rng = random.Random(seed)
        by_chance = [{axis.path: rng.random() for axis in axes} for _ in range(30)]
        chance.append(clean(min(by_chance, key=lambda p: clean(p) + noise.gauss(0, 0.03))))
    assert sum(drawn) < 0.75 * sum(chance)  # groups of five seeds come to 0.17 … 0.41
