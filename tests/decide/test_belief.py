"""What the model believes, and what else it takes into account: earlier studies, cost, ties, regions, trade-offs."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.decide.test_search import Lab, make_guard, plane
from tests.decide.test_surrogate import only

from looplab.config.lab import ObjectiveConfig, SearchConfig
from looplab.decide.acquisition import AcquisitionOptimizer
from looplab.decide.axes import find_axes
from looplab.decide.base import Proposal
from looplab.decide.belief import StudyBelief, describe
from looplab.decide.history import History
from looplab.decide.pareto import hypervolume
from looplab.decide.points import SearchPoint, break_ties
from looplab.decide.sampling import generator
from looplab.decide.search import SearchProposer
from looplab.errors import LabError

Params = dict[str, Any]
CUBE = {name: {"type": "float", "low": 0, "high": 1} for name in ("x", "y", "z")}


def axes() -> Any:
    return find_axes(make_guard(CUBE), dict.fromkeys(CUBE, 0.5))[0]


def bowl(params: Params) -> float:
    return float(5 * (params["x"] - 0.3) ** 2 + 2 * (params["y"] - 0.7) ** 2 + 0.2 * params["z"])


def sampled(n: int, f: Callable[[Params], float], seed: int, sd: float = 0.0) -> list[SearchPoint]:
    rng = random.Random(seed)
    points = []
    for _ in range(n):
        params = {name: rng.random() for name in CUBE}
        points.append(SearchPoint(params, [f(params) + rng.gauss(0, sd)], runs=[f"r{len(points)}"]))
    return points


# -- belief


def test_the_believed_config_is_better_than_the_luckiest_where_runs_are_noisy(tmp_path: Path) -> None:
    believed, lucky = [], []
    for seed in range(5):
        lab = plane(tmp_path / str(seed))
        rng = random.Random(seed)
        truth: dict[str, float] = {}
        values: dict[str, float] = {}
        for _ in range(40):
            run, config = lab.plan(Proposal((f"x@set={rng.random()}", f"y@set={rng.random()}"), "", "person"))
            truth[run] = 3 * (config["x"] - 0.4) ** 2 + 3 * (config["y"] - 0.6) ** 2
            values[run] = truth[run] + rng.gauss(0, 0.6)
            lab.end(run, config, values[run])
        belief = lab.proposer().believe(lab.study)
        assert belief is not None
        believed.append(truth[belief.best[0].run])
        lucky.append(truth[min(values, key=lambda run: values[run])])
        assert 0.2 < belief.noise < 1.5
        again = StudyBelief.from_dict(belief.to_dict())
        assert again == belief
        assert describe(again, "loss")[0].startswith(f"best: run {belief.best[0].run}")
    assert statistics.fmean(believed) < 0.6 * statistics.fmean(lucky)


def test_the_model_says_what_matters_what_fails_and_what_is_pending(tmp_path: Path) -> None:
    lab = Lab(tmp_path, make_guard(CUBE), dict.fromkeys(CUBE, 0.5))
    rng = random.Random(0)
    for i in range(24):
        x, y, z = (rng.random() for _ in CUBE)
        fails = y > 0.75
        lab.run(None if fails else (x - 0.3) ** 2, f"x@set={x}", f"y@set={y}", f"z@set={z}",
                status="failed" if fails else "ok")  # fmt: skip
        assert i or lab.proposer().believe(lab.study) is None  # too few points
    lab.plan(Proposal(("x@set=0.111",), "", "person"))
    belief = lab.proposer().believe(lab.study)
    assert belief is not None
    assert next(iter(belief.importance)) == "x"
    assert belief.importance["x"] > 0.8
    assert belief.pending == 1
    assert any(text.startswith("y >=") for text in belief.failing)
    assert all(place["sd"] > belief.best[0].sd for place in belief.uncertain)


def test_identical_repetitions_are_noticed(tmp_path: Path) -> None:
    lab = plane(tmp_path)
    for i in range(8):
        lab.run(i / 10, f"x@set={i / 10}")
    lab.run(0.0, "x@set=0")
    belief = lab.proposer().believe(lab.study)
    assert belief is not None
    assert belief.is_deterministic
    assert (belief.best[0].runs, belief.repeated) == (2, 1)


# -- legal by construction


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999), bound=st.sampled_from([64, 1000, 65_536]))
def test_candidates_of_a_tightly_constrained_space_are_legal_by_construction(
    seed: int, bound: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("a", "b", "c", "d")
    knobs: dict[str, Any] = {name: {"type": "int", "low": 1, "high": 256} for name in names}
    knobs["free"] = {"type": "float", "low": 0, "high": 1}
    guard = make_guard(knobs, f"a * b * c * d <= {bound}")
    base = {**dict.fromkeys(names, 2), "free": 0.5}
    lab = Lab(tmp_path_factory.mktemp("lab"), guard, base)
    proposer = lab.proposer(seed=seed)
    repairer = proposer._repairer
    assert repairer.coupled == {*names}
    pool = repairer.legal_pool()
    assert len(pool) >= 40
    assert all(repairer.is_allowed({**params, "free": random.Random(seed).random()}) for params in pool)
    optimizer = AcquisitionOptimizer(proposer.axes, 1.0, repairer)
    rows = optimizer._legal(optimizer._space.from_uniform(generator(seed).random_sample((64, 5))), generator(seed))
    assert all(repairer.is_allowed(optimizer._space.to_params(row)) for row in rows)
    assert len({tuple(row[:4]) for row in rows}) > 20


# -- earlier studies


def regret(earlier: list[SearchPoint] | None, seed: int, n: int = 14) -> float:
    """Return what a search of n runs leaves, after 4 random ones; they are the same with and without transfer."""
    optimizer = AcquisitionOptimizer(axes(), 1.0, only(axes(), lambda params: True),
                                     earlier=[] if earlier is None else [earlier])  # fmt: skip
    points = sampled(4, bowl, seed)
    for i in range(n):
        params = next(optimizer.suggest(points, generator(seed, i)))
        points.append(SearchPoint(params, [bowl(params)]))
    return min(point.value or 0.0 for point in points)


def test_an_earlier_study_helps_if_it_is_related_and_does_no_harm_if_it_is_not() -> None:
    seeds = range(5)
    without = statistics.fmean(regret(None, seed, 6) for seed in seeds)
    related = sampled(40, lambda params: 10 + 3 * bowl({**params, "x": params["x"] - 0.05}), 99)
    assert statistics.fmean(regret(related, seed, 6) for seed in seeds) < 0.5 * without
    rng = random.Random(3)
    long_without = statistics.fmean(regret(None, seed) for seed in seeds)
    for unrelated in (lambda params: -bowl(params), lambda params: rng.random()):
        left = statistics.fmean(regret(sampled(40, unrelated, 98), seed) for seed in seeds)
        assert left < 2.0 * long_without + 0.01


def test_weights_of_earlier_studies_follow_how_well_they_predict() -> None:
    studies = [sampled(40, f, 99) for f in (bowl, lambda params: -bowl(params))]
    optimizer = AcquisitionOptimizer(axes(), 1.0, only(axes(), lambda params: True), earlier=studies)
    weights = optimizer.model(sampled(8, bowl, 1)).weights
    assert weights is not None
    assert weights[0] > 0.3
    assert weights[1] == 0.0
    assert weights.sum() <= 1.0 + 1e-9


def test_the_best_of_earlier_studies_is_tried_first_and_shown_before_the_first_run(tmp_path: Path) -> None:
    old = plane(tmp_path / "old")
    for x, y in itertools.product((0.1, 0.4, 0.7), repeat=2):
        old.run((x - 0.4) ** 2 + (y - 0.7) ** 2, f"x@set={x}", f"y@set={y}")
    lab = plane(tmp_path / "new")
    history = History(lab.study, lab.root)

    def make(transfer: bool) -> SearchProposer:
        return SearchProposer(SearchConfig(transfer=transfer), lab.guard, lab.base, "min", history,
                              earlier=lambda: [("old", History(old.study, old.root))])  # fmt: skip

    (first,) = make(True).propose(lab.study, 1)
    assert {*first.edits} == {"x@set=0.4", "y@set=0.7"}
    before = make(True).believe_before()
    assert before is not None
    assert before["studies"][0]["study"] == "old"
    assert before["studies"][0]["best"] == before["first"][0] == {"x": 0.4, "y": 0.7}
    assert make(False).believe_before() is None
    assert {*make(False).propose(lab.study, 1)[0].edits} != {*first.edits}


# -- regions, cost, ties, several objectives


def test_a_region_is_filled_inside_its_bounds(tmp_path: Path) -> None:
    knobs: dict[str, Any] = {
        "lr": {"type": "float", "low": 1e-5, "high": 1.0, "log": True},
        "width": {"type": "int", "low": 1, "high": 64},
        "opt": {"choices": ["sgd", "adam", "lion"]},
        "batch": {"choices": [16, 32, 64, 128]},
    }
    base = {"lr": 0.1, "width": 8, "opt": "sgd", "batch": 32}
    lab = Lab(tmp_path, make_guard(knobs), base)
    proposer = lab.proposer()
    region = {"lr": [1e-4, 1e-3], "width": [10, 12], "opt": ["adam", "lion"], "batch": [60, 200]}
    for i in range(12):
        proposal = proposer.fill(lab.study, region)
        run, config = lab.plan(proposal)
        assert 1e-4 <= config["lr"] <= 1e-3
        assert 10 <= config["width"] <= 12
        assert config["opt"] in ("adam", "lion")
        assert config["batch"] in (64, 128)
        lab.end(run, config, float(i))
    for bad in ({"lr": [2.0, 3.0]}, {"nothing": [1, 2]}, {"opt": ["none"]}, {"lr": "low"}, {"lr": [1]}):
        with pytest.raises(LabError, match="region"):
            proposer.fill(lab.study, bad)


def test_cheap_runs_are_preferred_if_cost_counts() -> None:
    points = sampled(12, lambda params: (params["x"] - 0.5) ** 2, 1)
    for point in points:
        point.costs.append(1.0 + 100.0 * point.params["y"])

    def mean_y(per_cost: bool) -> float:
        optimizer = AcquisitionOptimizer(axes(), 1.0, only(axes(), lambda params: True), per_cost=per_cost)
        drawn = [next(optimizer.suggest(points, generator(seed)))["y"] for seed in range(6)]
        return statistics.fmean(drawn)

    assert mean_y(True) < 0.2 < mean_y(False)


def test_ties_are_ordered_by_the_second_criterion_and_never_change_the_first() -> None:
    points = [
        SearchPoint({"x": i}, [value], tie_breaks=[then])
        for i, (value, then) in enumerate([(0.5, 9.0), (1.0, 1.0), (1.0, 3.0), (1.0, 2.0)])
    ]
    break_ties(points, "max", "max")
    ranked = sorted(points, key=lambda point: point.value or 0.0)
    assert [point.params["x"] for point in ranked] == [0, 1, 3, 2]
    assert all(abs(point.bonus) <= 0.125 for point in points)


def test_several_objectives_approach_the_whole_front() -> None:
    def values(params: Params) -> tuple[float, float]:
        far = 3 * (params["y"] - 0.5) ** 2 + 3 * (params["z"] - 0.5) ** 2
        return params["x"] ** 2 + far, (1 - params["x"]) ** 2 + far

    def volume(drawn: list[Params]) -> float:
        return hypervolume([values(params) for params in drawn], (2.5, 2.5))

    searched, by_chance = [], []
    for seed in range(3):
        optimizer = AcquisitionOptimizer(axes(), 1.0, only(axes(), lambda params: True), other_signs=[1.0])
        points = sampled(6, lambda params: values(params)[0], seed)
        for point in points:
            point.others.append((values(point.params)[1],))
        for i in range(18):
            params = next(optimizer.suggest(points, generator(seed, i)))
            first, second = values(params)
            points.append(SearchPoint(params, [first], others=[(second,)]))
        searched.append(volume([point.params for point in points]))
        by_chance.append(volume([point.params for point in sampled(24, bowl, seed + 50)]))
        near = [point.params["x"] for point in points[6:] if abs(point.params["y"] - 0.5) < 0.2]
        assert max(near) - min(near) > 0.5
    assert statistics.fmean(searched) > statistics.fmean(by_chance)


def test_an_objective_with_prices_is_one_trade_off_and_names_must_differ() -> None:
    priced = ObjectiveConfig.model_validate(
        {"metric": "acc", "goal": "max", "pareto": [{"metric": "ms", "goal": "min", "price": 0.01}]}
    )
    assert priced.is_priced
    for bad in (
        [{"metric": "acc", "goal": "min"}],
        [{"metric": "ms", "goal": "min", "price": 1}, {"metric": "mb", "goal": "min"}],
        [{"metric": "ms", "goal": "min", "price": -1}],
    ):
        with pytest.raises(ValueError, match="pareto"):
            ObjectiveConfig.model_validate({"metric": "acc", "goal": "max", "pareto": bad})


def test_fifty_knobs_absent_ones_too_are_searched(tmp_path: Path) -> None:
    knobs: dict[str, Any] = {f"k{i}": {"type": "float", "low": 0, "high": 1, "default": 0.5} for i in range(50)}
    lab = Lab(tmp_path, make_guard(knobs), {})
    proposer = lab.proposer()
    assert len(proposer.axes) == 50
    configs = lab.go(proposer, 20, lambda config: (config.get("k0", 0.5) - 0.2) ** 2)
    assert len({str(config) for config in configs}) == 20
