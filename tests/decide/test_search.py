from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.files import canonical_json
from looplab.config.lab import SearchConfig
from looplab.decide.auto import gp_startup
from looplab.decide.axes import Axis, find_axes
from looplab.decide.base import Proposal
from looplab.decide.history import History
from looplab.decide.points import SearchPoint, select_points
from looplab.decide.search import SearchProposer
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger

BASE: dict[str, Any] = {"lr": 0.1, "width": 8, "batch": 32, "opt": "adam", "warm": True, "name": "x", "a": {"w": 1.0}}
KNOBS: dict[str, dict[str, Any]] = {
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "width": {"type": "int", "low": 2, "high": 64},
    "batch": {"choices": [128, 32, 64]},
    "opt": {"choices": ["adam", "sgd"]},
    "warm": {"type": "bool"},
    "a.*": {"type": "float", "low": 0, "high": 2, "step": 0.25},
}
SAMPLERS = ("auto", "tpe", "cmaes", "gp", "random", "qmc")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Optuna's Gaussian process uses torch, whose threads slow each other down on a busy machine."""
    with contextlib.suppress(ModuleNotFoundError):
        import torch

        torch.set_num_threads(1)


def make_guard(knobs: dict[str, dict[str, Any]], *constraints: str) -> Guard:
    return Guard({path: Knob.make(path, spec) for path, spec in knobs.items()}, constraints=constraints)


class Lab:
    """A study whose runs end at once."""

    def __init__(self, root: Path, guard: Guard, base: dict[str, Any]) -> None:
        self.root, self.guard, self.base = root, guard, base
        root.mkdir(exist_ok=True)
        self.ledger = Ledger(root / "ledger.db")
        self.study = StudyLedger(self.ledger, "s")
        self.study.open("loss", "min")
        with self.ledger.write():
            self.round = self.study.begin_round()

    def proposer(self, sampler: Any = "auto", **settings: Any) -> SearchProposer:
        history = History(self.study, self.root)
        return SearchProposer(SearchConfig(sampler=sampler, **settings), self.guard, self.base, "min", history)

    def plan(self, proposal: Proposal) -> tuple[str, dict[str, Any]]:
        with self.ledger.write():
            number = self.study.propose(proposal.proposer, proposal.edits, proposal.reason, parent=proposal.parent)
            config = self.guard.check(self.base, proposal.edits).config
            run = self.study.plan(
                round=self.round, proposal=number, proposer=proposal.proposer, parent=None, base="b", reason="",
                config_hash=canonical_json(config).decode(), devices=1, plan=RunPlan(config),
            )  # fmt: skip
        return run.id, config

    def end(self, run: str, config: dict[str, Any], value: float | None, status: str = "ok", curve: Any = ()) -> None:
        (self.root / run / "record").mkdir(parents=True)
        (self.root / run / "record/run.json").write_text("{}")
        (self.root / run / "record/summary.json").write_text(json.dumps({"curve": curve}))
        with self.ledger.write():
            self.study.ended(
                run, status=status, code=0, signal=None, started=1.0, ended=2.0, objective=value, files={}
            )  # fmt: skip

    def run(self, value: float | None, *edits: str, status: str = "ok", curve: Any = ()) -> None:
        self.end(*self.plan(Proposal(edits, "", "person")), value, status, curve)

    def go(self, proposer: SearchProposer, n: int, f: Callable[[dict[str, Any]], float | None]) -> list[dict[str, Any]]:
        configs = []
        for _ in range(n):
            (proposal,) = proposer.propose(self.study, 1)
            run, config = self.plan(proposal)
            value = f(config)
            self.end(run, config, value, "ok" if value is not None else "failed")
            configs.append(config)
        return configs


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, make_guard(KNOBS), BASE)


def plane(tmp_path: Path, *constraints: str) -> Lab:
    knobs = {"x": {"type": "float", "low": 0, "high": 1}, "y": {"type": "float", "low": 0, "high": 1}}
    return Lab(tmp_path, make_guard(knobs, *constraints), {"x": 0.9, "y": 0.05})


def bowl(config: dict[str, Any]) -> float:
    return float((config["x"] - 0.3) ** 2 + (config["y"] - 0.6) ** 2)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_proposes_new_legal_points_over_all_kinds_of_knobs(lab: Lab, sampler: str) -> None:
    proposer = lab.proposer(sampler, startup=4)
    configs = lab.go(proposer, 6, lambda c: math.log(c["lr"]) ** 2 + c["width"] / 64)
    for config in configs:
        assert 1e-4 <= config["lr"] <= 1.0
        assert isinstance(config["width"], int)
        assert config["batch"] in (32, 64, 128)
        assert isinstance(config["warm"], bool)
        assert (config["a"]["w"] * 4).is_integer()
        assert config["name"] == "x"
    assert len({canonical_json(config) for config in configs}) == 6


@pytest.mark.parametrize("sampler", ["auto", "tpe", "cmaes", "gp"])
def test_a_model_gets_closer_than_its_start(tmp_path: Path, sampler: str) -> None:
    lab = plane(tmp_path)
    values = [bowl(config) for config in lab.go(lab.proposer(sampler), 30, bowl)]
    # Ten seeds of each sampler come below 0.35; rounding also decides which way a search takes.
    assert statistics.median(values[20:]) < 0.75 * statistics.median(values[:10])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_new_engine_proposes_what_the_old_one_would_have(lab: Lab, sampler: str) -> None:
    old = lab.proposer(sampler, startup=3)
    lab.go(old, 6, lambda c: None if c["warm"] else c["lr"])
    assert [p.edits for p in old.propose(lab.study, 2)] == [
        p.edits for p in lab.proposer(sampler, startup=3).propose(lab.study, 2)
    ]


def test_another_seed_draws_other_points(lab: Lab) -> None:
    first, second = (lab.proposer(seed=seed).propose(lab.study, 3) for seed in (0, 1))
    assert [p.edits for p in first] != [p.edits for p in second]


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_proposals_made_together_or_during_pending_runs_differ(tmp_path: Path, sampler: str) -> None:
    lab = plane(tmp_path)
    proposer = lab.proposer(sampler)
    lab.go(proposer, 12, bowl)
    together = proposer.propose(lab.study, 4)
    assert len({p.edits for p in together}) == 4
    for proposal in together:
        lab.plan(proposal)
    later = lab.proposer(sampler).propose(lab.study, 4)
    assert not {p.edits for p in together} & {p.edits for p in later}


def test_runs_of_other_proposers_count(tmp_path: Path) -> None:
    lab = plane(tmp_path)
    for i in range(12):
        lab.run(bowl({"x": i / 12, "y": 0.6}), f"x@set={i / 12}", "y@set=0.6")
    for sampler, basis in (("auto", "the expected improvement"), ("tpe", "TPE")):
        (proposal,) = lab.proposer(sampler).propose(lab.study, 1)
        assert proposal.reason == f"{basis} on 12 measured points"


def test_more_knobs_start_with_more_points() -> None:
    assert [gp_startup(n) for n in (1, 2, 4, 10, 30)] == [6, 6, 8, 14, 16]


def test_runs_of_one_point_count_once_with_their_mean(tmp_path: Path) -> None:
    lab = plane(tmp_path)
    for value in (1.0, 2.0, 6.0):
        lab.run(value, "x@set=0.5")
    points = lab.proposer().points(lab.study)
    assert [(p.value, p.infeasible) for p in points] == [(3.0, False)]


def test_numbers_that_are_void_are_not_learnt_from_and_their_config_is_not_repeated(tmp_path: Path) -> None:
    lab = plane(tmp_path)
    lab.run(-1000.0, "x@set=0.5")  # it has read the answers
    lab.run(1.0, "x@set=0.25")
    with lab.ledger.write():
        lab.study.judged(lab.study.run("1").id, "void", {"why": "a leak"}, {})
    proposer = lab.proposer()
    assert [(p.params["x"], p.value) for p in proposer.points(lab.study)] == [(0.25, 1.0)]
    config = lab.guard.check(lab.base, ["x@set=0.5"]).config
    assert config is not None
    assert proposer._collector.key(config) in proposer._collector.collect(lab.study)[1]


@pytest.mark.parametrize("status", ["failed", "timeout", "lost", "stopped", "ok"])
def test_a_run_without_a_value_is_infeasible_whatever_its_status(tmp_path: Path, status: str) -> None:
    lab = plane(tmp_path)
    lab.run(None, "x@set=0.5", status=status)
    lab.run(1.0, "x@set=0.25", status="stopped")
    points = lab.proposer().points(lab.study)
    assert [(p.value, p.infeasible) for p in points] == [(None, True), (1.0, False)]


def test_a_run_that_was_stopped_early_is_known_as_far_as_it_got_and_has_not_failed(tmp_path: Path) -> None:
    lab = plane(tmp_path)
    lab.run(None, "x@set=0.5", status="stopped", curve=[[1, 3.0], [2, 2.0]])
    lab.run(None, "x@set=0.25", status="failed", curve=[[1, 3.0]])
    lab.run(1.0, "x@set=0.75", curve=[[1, 3.0], [9, 1.0]])
    points = lab.proposer().points(lab.study)
    assert [(p.value, p.partial, p.infeasible) for p in points] == [
        (None, ((1.0, 3.0), (2.0, 2.0)), False),
        (None, None, True),
        (1.0, None, False),
    ]


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_the_model_starts_with_runs_that_were_stopped_early(tmp_path: Path, sampler: str) -> None:
    lab = plane(tmp_path)
    for i in range(12):
        config = {"x": 0.05 + 0.075 * i, "y": (0.05 + 0.375 * i) % 1}
        curve = [[step, bowl(config) + 1 / step] for step in (1, 2, 4, 8, 16)]
        stopped = i not in (1, 5)
        edits = (f"x@set={config['x']}", f"y@set={config['y']}")
        value = None if stopped else curve[-1][1]
        lab.run(value, *edits, status="stopped" if stopped else "ok", curve=curve[:2] if stopped else curve)
    (proposal,) = lab.proposer(sampler, startup=10).propose(lab.study, 1)
    assert proposal.reason.endswith(("on 2 measured points and 10 stopped early", "of 12 measured points"))


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp"])
def test_crashes_are_learnt_to_be_avoided(tmp_path: Path, sampler: str) -> None:
    lab = plane(tmp_path)
    configs = lab.go(lab.proposer(sampler), 26, lambda c: None if c["x"] < 0.5 else c["x"])
    # The best values lie right at the edge, on either side of which a search may come down; a search that learns nothing
    # from crashes is drawn to 0. Of the last 8 points at most 3 lie beyond the edge, with six seeds of each sampler.
    assert sum(config["x"] < 0.45 for config in configs[18:]) < 6


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_guard_is_asked_first_so_that_no_proposal_is_refused(tmp_path: Path, sampler: str) -> None:
    lab = plane(tmp_path, "x > y")
    assert all(c["x"] > c["y"] for c in lab.go(lab.proposer(sampler, startup=4), 8, bowl))
    assert lab.study.proposals(status="rejected") == []


def test_what_the_guard_refused_to_others_is_infeasible_but_only_inside_the_ranges(tmp_path: Path) -> None:
    lab = plane(tmp_path, "x > y")
    for edits, rule in ((["x@set=0.01"], "constraint"), (["x@set=7"], "knob range"), (["x@set=0.3"], "duplicate")):
        with lab.ledger.write():
            number = lab.study.propose("person", edits, "")
            assert number is not None
            lab.study.reject(number, [{"rule": rule, "message": "no"}])
    points = lab.proposer().points(lab.study)
    assert [(p.params["x"], p.infeasible) for p in points] == [(0.01, True)]


def test_a_run_outside_of_the_present_ranges_is_left_out_but_not_repeated(tmp_path: Path) -> None:
    lab = plane(tmp_path)
    lab.run(1.0, "x@set=0.9")
    narrow = make_guard({"x": {"type": "float", "low": 0, "high": 0.5}, "y": {"type": "float", "low": 0, "high": 1}})
    lab.guard, lab.base = narrow, {"x": 0.2, "y": 0.1}
    points, taken = lab.proposer()._collector.collect(lab.study)
    assert points == []
    assert len(taken) == 1


def test_a_grid_is_walked_once_and_then_says_that_it_is_exhausted(tmp_path: Path) -> None:
    knobs: dict[str, dict[str, Any]] = {"n": {"type": "int", "low": 1, "high": 3}, "o": {"choices": ["a", "b"]}}
    lab = Lab(tmp_path, make_guard(knobs, "n != 2 or o == 'a'"), {"n": 1, "o": "a"})
    lab.run(0.0)
    proposer = lab.proposer("grid")
    configs = lab.go(proposer, 4, lambda c: 1.0)
    assert {(c["n"], c["o"]) for c in configs} == {(1, "b"), (2, "a"), (3, "a"), (3, "b")}
    assert proposer.propose(lab.study, 1) == []
    assert proposer.problem is not None
    assert "grid is exhausted" in proposer.problem


def test_a_grid_over_a_range_without_a_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="a step or choices for x"):
        plane(tmp_path).proposer("grid")


def test_a_finite_space_that_is_used_up_says_so(tmp_path: Path) -> None:
    lab = Lab(tmp_path, make_guard({"o": {"choices": ["a", "b"]}}), {"o": "a"})
    lab.run(0.0)
    proposer = lab.proposer()
    assert len(proposer.propose(lab.study, 5)) == 1
    assert proposer.problem is not None
    assert "already tried" in proposer.problem


def test_a_knob_that_cannot_be_searched_is_named_once(tmp_path: Path) -> None:
    knobs: dict[str, dict[str, Any]] = {
        "x": {"type": "float", "low": 0, "high": 1}, "free": {"type": "float"}, "gone": {"choices": [1, 2]},
    }  # fmt: skip
    lab = Lab(tmp_path, make_guard(knobs), {"x": 0.5, "free": 1.0})
    proposer = lab.proposer()
    assert proposer.propose(lab.study, 1)
    assert proposer.problem is not None
    assert "free (it has no bounds and no choices)" in proposer.problem
    assert "gone (it is not in the base config; give the knob a `default:`)" in proposer.problem
    proposer.propose(lab.study, 1)
    assert proposer.problem is None


def test_without_any_searchable_knob_the_problem_says_so(tmp_path: Path) -> None:
    lab = Lab(tmp_path, make_guard({"free": {"type": "float"}}), {"free": 1.0})
    proposer = lab.proposer()
    assert proposer.propose(lab.study, 1) == []
    assert proposer.problem is not None
    assert "no knob can be searched" in proposer.problem


def test_only_what_differs_from_the_base_is_edited_and_numbers_are_short(lab: Lab) -> None:
    for proposal in lab.proposer().propose(lab.study, 8):
        assert proposal.parent is None
        assert proposal.proposer == "search"
        for edit in proposal.edits:
            path, _, value = edit.partition("@set=")
            assert json.dumps(BASE.get(path, BASE["a"]["w"])) != value
            assert len(value.strip('"').replace("0.", "").replace(".", "").lstrip("0")) <= 7


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make it look as if these packages were not installed."""
    monkeypatch.setattr("looplab.decide.packages.find_spec", lambda name: None if name in packages else find_spec(name))


@pytest.mark.parametrize(
    ("sampler", "needs"),
    [
        ("auto", "scipy"),
        ("auto", "threadpoolctl"),
        ("tpe", "optuna"),
        ("cmaes", "cmaes"),
        ("qmc", "scipy"),
        ("random", "numpy"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, sampler: str, needs: str
) -> None:
    without(monkeypatch, needs)
    with pytest.raises(LabError, match=rf"search: {sampler} needs {needs}, which is not installed.*looplab\[search\]"):
        lab.proposer(sampler)


def test_torch_is_not_part_of_the_search_extra(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch")
    with pytest.raises(LabError, match=r"needs torch, which is not installed.*pip install 'torch'"):
        lab.proposer("gp")


@pytest.mark.parametrize("sampler", ["auto", "random", "grid", "qmc"])
def test_the_samplers_of_looplab_itself_need_no_optuna(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    without(monkeypatch, "optuna", "cmaes", "sklearn", "torch")
    lab = Lab(tmp_path / "lab", make_guard({"width": {"type": "int", "low": 1, "high": 64}}), dict(BASE))
    assert len(lab.proposer(sampler).propose(lab.study, 8)) == 8


def test_without_optuna_a_large_study_continues_with_a_selection_of_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looplab.decide.auto.MAX_GP_POINTS", 12)
    without(monkeypatch, "optuna")
    lab = plane(tmp_path)
    proposer = lab.proposer()
    lab.go(proposer, 40, bowl)
    proposals = proposer.propose(lab.study, 3)
    assert {proposal.reason for proposal in proposals} == {
        "the expected improvement on 40 measured points, from 12 of them"
    }
    assert len({proposal.edits for proposal in proposals}) == 3


def test_a_selection_of_points_holds_the_best_and_the_newest_in_their_order() -> None:
    points = [SearchPoint({"x": i}, values=[float((i - 20) ** 2)]) for i in range(100)] + [
        SearchPoint({"x": 100}, pending=1)
    ]
    some = select_points(points, 30, "min")
    places = [point.params["x"] for point in some]
    assert len(places) == 30
    assert places == sorted(places)
    assert {*range(16, 25), *range(91, 101)} <= set(places)
    assert any(30 < place < 90 for place in places)
    assert select_points(points, 101, "min") == points
    assert {99, 98} <= {point.params["x"] for point in select_points(points[:-1], 30, "max")}


def test_a_large_study_continues_with_tpe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looplab.decide.auto.MAX_GP_POINTS", 11)
    lab = plane(tmp_path)
    proposer = lab.proposer()
    lab.go(proposer, 12, bowl)
    reasons = {proposal.reason for proposal in proposer.propose(lab.study, 3)}
    assert reasons <= {"TPE on 12 measured points", "a step from the best of 12 measured points"}


SPECS = st.one_of(
    st.tuples(st.integers(-50, 50), st.integers(1, 100), st.sampled_from([None, 1, 3])).map(
        lambda t: {"type": "int", "low": t[0], "high": t[0] + t[1] + 3} | ({"step": t[2]} if t[2] else {})
    ),
    st.tuples(st.floats(-5, 5), st.floats(0.5, 10), st.sampled_from([None, 0.1, 0.25])).map(
        lambda t: {"type": "float", "low": t[0], "high": t[0] + t[1]} | ({"step": t[2]} if t[2] else {})
    ),
    st.tuples(st.floats(1e-8, 1), st.floats(1.5, 1e6)).map(
        lambda t: {"type": "float", "low": t[0], "high": t[0] * t[1], "log": True}
    ),
    st.tuples(st.integers(1, 20), st.integers(1, 500)).map(
        lambda t: {"type": "int", "low": t[0], "high": t[0] + t[1], "log": True}
    ),
    st.sampled_from([{"choices": [1, 2.5, 10]}, {"choices": ["a", None, "b"]}, {"choices": [[1], [2]]}]),
)


@given(SPECS, st.floats(0, 1, exclude_max=True))
def test_any_place_of_an_axis_is_legal_and_reads_back(spec: dict[str, Any], share: float) -> None:
    knob = Knob.make("k", spec)
    axis = Axis.from_knob("k", knob, None)
    assert isinstance(axis, Axis)
    value = axis.to_value(axis.from_unit(share))
    assert knob.problem(value) is None
    taken = axis.to_param(value)
    assert axis.to_value(taken) == value
    assert axis.distribution()._contains(axis.distribution().to_internal_repr(taken))
    assert -1e-9 <= axis.to_unit(taken) <= 1 + 1e-9


def test_numeric_choices_are_ordered_and_a_star_matches_every_key() -> None:
    axes, left_out = find_axes(make_guard(KNOBS), {**BASE, "a": {"w": 1.0, "v": 0.5}})
    assert left_out == []
    assert {axis.path for axis in axes} == {"lr", "width", "batch", "opt", "warm", "a.w", "a.v"}
    batch = next(axis for axis in axes if axis.path == "batch")
    assert (batch.choices, batch.ordered) == ((32, 64, 128), True)


# --- conditional knobs

CONDITIONAL: dict[str, dict[str, Any]] = {
    "opt": {"choices": ["adam", "sgd"]},
    "momentum": {"type": "float", "low": 0, "high": 0.99, "if": "opt == 'sgd'"},
    "nesterov": {"type": "bool", "if": "opt == 'sgd' and momentum > 0.5"},
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_knobs_are_searched_only_where_they_are_used(tmp_path: Path, sampler: str) -> None:
    base = {"opt": "adam", "momentum": 0.3, "nesterov": False, "lr": 0.1}
    lab = Lab(tmp_path, make_guard(CONDITIONAL), base)

    def loss(config: dict[str, Any]) -> float:
        used = abs(config["momentum"] - 0.8) if config["opt"] == "sgd" else 0.5
        return math.log10(config["lr"] / 0.01) ** 2 + used

    configs = lab.go(lab.proposer(sampler, startup=4), 9, loss)
    assert {config["opt"] for config in configs} == {"adam", "sgd"}
    for config in configs:
        if config["opt"] == "adam":
            assert config["momentum"] == 0.3
        if config["opt"] == "adam" or config["momentum"] <= 0.5:
            assert config["nesterov"] is False
    assert len({config["momentum"] for config in configs}) > 2


def test_points_that_differ_only_in_what_is_not_used_are_the_same_to_the_model(tmp_path: Path) -> None:
    base = {"opt": "adam", "momentum": 0.3, "nesterov": False, "lr": 0.1}
    proposer = Lab(tmp_path, make_guard(CONDITIONAL), base).proposer()
    adam, sgd = ({**base, "momentum": 0.7, "nesterov": True, "opt": opt} for opt in ("adam", "sgd"))
    assert proposer.params_of(adam) == proposer.params_of(base)
    assert proposer.params_of(sgd) != proposer.params_of({**sgd, "momentum": 0.6})
