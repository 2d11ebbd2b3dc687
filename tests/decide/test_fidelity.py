"""Rungs, promotions and continuations: the algebra, and what proposers make of a study."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.lab import FidelityConfig, ObjectiveConfig, PbtConfig, SearchConfig
from looplab.decide.curves import Curve
from looplab.decide.fidelity import SPREAD_PERIOD, FidelityProposer, find_chains
from looplab.decide.history import STOPPED_AT_RUNG, History
from looplab.decide.pbt import PbtProposer, _is_sound
from looplab.decide.rungs import Rungs, halving, promotable
from looplab.decide.search import SearchProposer
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.measure.run_metrics import join_segments

RUNGS = Rungs.of(FidelityConfig(), 27.0)
assert RUNGS is not None


def curve(values: list[float], steps: int) -> Curve:
    return tuple((float(step), values[min(step, len(values)) - 1]) for step in range(1, steps + 1))


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.integers(2, 5))
def test_rungs_are_powers_of_the_factor_below_the_whole_run(first: float, ratio: float, factor: int) -> None:
    whole = first * (1 + ratio)
    rungs = Rungs.of(FidelityConfig(min=first, max=whole, reduction_factor=factor), None)
    assert rungs is not None
    steps = (*rungs.steps, whole)
    assert all(above / below == pytest.approx(factor) for below, above in itertools.pairwise(steps))
    assert steps[0] >= first * (1 - 1e-6)
    assert steps[0] / factor < first * (1 + 1e-6)
    step: float | None = 0.0
    climbed = []
    while (step := rungs.next_above(step)) is not None:
        climbed.append(step)
    assert tuple(climbed) == rungs.steps


def test_without_a_finished_run_there_are_no_rungs() -> None:
    assert Rungs.of(FidelityConfig(), None) is None
    assert Rungs.of(FidelityConfig(min=2), None) is None


populations = st.lists(st.tuples(st.floats(-100, 100), st.sampled_from([1, 3, 9, 27])), max_size=40)


@given(populations)
def test_promoted_are_the_best_of_a_rung_and_at_most_their_share(population: list[tuple[float, int]]) -> None:
    curves = {f"{i:03}": curve([value], steps) for i, (value, steps) in enumerate(population)}
    stopped = {name: found for name, found in curves.items() if found[-1][0] < 27}
    found = promotable(RUNGS, curves, stopped)
    assert len(found) == len(set(found))
    for level, step in enumerate(RUNGS.steps, 1):
        here = {name: one[-1][1] for name, one in curves.items() if one[-1][0] >= step}
        waiting = [name for name in here if curves[name][-1][0] == step]
        promoted = [name for name in found if name in waiting]
        assert sum(curves[name][-1][0] > step for name in here) + len(promoted) <= len(here) or not promoted
        assert len(promoted) <= len(here) // 3
        if promoted:
            worst = max(here[name] for name in promoted)
            assert all(here[name] >= worst for name in waiting if name not in promoted)
        assert [RUNGS.level(curves[name]) for name in promoted] == [level] * len(promoted)
    levels = [RUNGS.level(curves[name]) for name in found]
    assert levels == sorted(levels, reverse=True)


@given(populations, st.floats(0, 100))
def test_a_worse_run_takes_no_promotion_away(population: list[tuple[float, int]], gap: float) -> None:
    curves = {f"{i:03}": curve([value], steps) for i, (value, steps) in enumerate(population)}
    stopped = {name: found for name, found in curves.items() if found[-1][0] < 27}
    before = promotable(RUNGS, curves, stopped)
    worst = max([value for value, _ in population], default=0.0)
    more = {**curves, "zzz": curve([worst + gap], 9)}
    after = promotable(RUNGS, more, {**stopped, "zzz": more["zzz"]})
    assert set(before) <= set(after)


def test_hyperband_gives_each_bracket_about_as_many_steps() -> None:
    firsts = [RUNGS.first_step(n) for n in range(200)]
    counts = [firsts.count(step) for step in (*RUNGS.steps, None)]
    assert counts == sorted(counts, reverse=True)
    assert min(counts) > 0
    spent = [count * step * (4 - k) for k, (count, step) in enumerate(zip(counts, (1, 3, 9, 27), strict=True))]
    assert max(spent) < 3 * min(spent)


def test_halving_waits_for_a_rung_and_ends_with_one_run() -> None:
    rungs = Rungs.of(FidelityConfig(min=1), 9.0)
    assert rungs is not None
    chance = random.Random(0)
    quality = {f"{i:02}": chance.random() for i in range(9)}
    curves: dict[str, Curve] = {}
    order: list[str] = []
    trained = 0
    for _ in range(100):
        ended = set(order)
        stopped = {name: found for name, found in curves.items() if found[-1][0] < 9}
        promoted, has_room = halving(rungs, order, curves, stopped, ended)
        if promoted:
            name = promoted[0]
            steps = int(rungs.next_above(curves[name][-1][0]) or 9)
        elif has_room and len(order) < 9:
            name, steps = f"{len(order):02}", 1
            order.append(name)
        else:
            break
        trained += steps - len(curves.get(name, ()))
        curves[name] = curve([quality[name]], steps)
    assert sorted(len(found) for found in curves.values()) == [1] * 6 + [3] * 2 + [9]
    assert len(curves[min(quality, key=lambda name: quality[name])]) == 9
    assert trained == 9 + 3 * 2 + 6
    assert halving(rungs, order, curves, {}, set(order)) == ([], True)


@given(st.lists(st.integers(1, 26), max_size=6, unique=True), st.sampled_from(["last", "best", "first"]), st.integers())
def test_segments_joined_equal_one_run(cuts: list[int], at: Any, seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.random() for _ in range(27)]
    objective = ObjectiveConfig(metric="loss", goal="min", at=at)

    def measured(begin: int, end: int) -> list[tuple[float, float]]:
        part = values[begin:end]
        pick = {"last": lambda k: part[k], "best": lambda k: min(part[: k + 1]), "first": lambda k: part[0]}[at]
        return [(float(begin + k + 1), pick(k)) for k in range(len(part))]

    def summary(run: str, begin: int, end: int) -> dict[str, Any]:
        found = measured(begin, end)
        return {"id": run, "curve": found, "objective": {"value": found[-1][1]}, "notes": []}

    edges = [0, *sorted(cuts), 27]
    joined = summary("0", 0, edges[1])
    value: float | None = joined["objective"]["value"]
    for k in range(1, len(edges) - 1):
        redone = max(1, edges[k] - chance.randrange(2))  # the checkpoint may be older than the last row
        part = summary(str(k), redone, edges[k + 1])
        value = join_segments(part, joined, objective)
        joined = part
    whole = summary("whole", 0, 27)
    assert joined["curve"] == whole["curve"]
    assert value == whole["objective"]["value"]


def test_a_trainer_that_begins_again_has_not_continued() -> None:
    objective = ObjectiveConfig(metric="loss", goal="min")
    part = {"id": "b", "curve": [(1.0, 5.0), (2.0, 4.0)], "objective": {"value": 4.0}, "notes": []}
    assert join_segments(part, {"id": "a", "curve": [[1.0, 3.0]]}, objective) == 4.0
    assert part["restarted"] is True
    assert part["curve"] == [(1.0, 5.0), (2.0, 4.0)]
    assert "does not resume its step" in part["notes"][0]


class ToyStudy:
    """A study whose trainer is a function: the loss falls to a floor that the knob determines."""

    def __init__(self, folder: Path) -> None:
        self.guard = Guard({"x": Knob.make("x", {"type": "float", "low": 0.0, "high": 1.0})})
        self.base = {"x": 0.9}
        self.outputs = folder
        self.ledger = Ledger(folder / "ledger.db")
        self.study = StudyLedger(self.ledger, "toy")
        self.study.open("loss", "min")
        self.history = History(self.study, folder)
        self.trained: list[tuple[str, float]] = []
        with self.ledger.write():
            self.round = self.study.begin_round()
        self.configs: dict[str, dict[str, float]] = {}
        self.run(self.base, "base", None, None, None, Role.BASE, None)

    def loss(self, config: dict[str, float], step: int) -> float:
        return (config["x"] - 0.3) ** 2 + 1.0 / step

    def run(
        self, config: dict[str, float], proposer: str, number: int | None, parent: str | None, start: str | None,
        role: Role, until: float | None, *, status: str = "stopped",
    ) -> str:  # fmt: skip
        with self.ledger.write():
            run = self.study.plan(
                round=self.round, proposal=number, proposer=proposer, parent=parent, base="base", reason="",
                config_hash=json.dumps(config), devices=1, plan=RunPlan(config, until=until), role=role, warm=None,
            )  # fmt: skip
        before = json.loads((self.outputs / start / "record/summary.json").read_text())["curve"] if start else []
        end = 27 if until is None else round(until)
        first = int(before[-1][0]) if before else 0
        self.trained += [(json.dumps(config), step) for step in range(first + 1, end + 1)]
        points = [*before, *([step, self.loss(config, step)] for step in range(first + 1, end + 1))]
        record = self.outputs / run.id / "record"
        record.mkdir(parents=True)
        (record / "run.json").write_text("{}")
        reason = STOPPED_AT_RUNG if end < 27 else None
        (record / "summary.json").write_text(json.dumps({"metrics": {}, "curve": points, "reason": reason}))
        done = end == 27
        with self.ledger.write():
            self.study.ended(
                run.id, status="ok" if done else status, code=0, signal=None, started=1.0, ended=2.0,
                objective=points[-1][1] if done else None, files={},
            )  # fmt: skip
        self.configs[run.id] = config
        return run.id

    def step(self, proposer: FidelityProposer | PbtProposer, n: int = 1) -> int:
        """Run what is proposed; return how much that was."""
        with self.ledger.write():
            proposals = proposer.propose(self.study, n)
            again = proposer.propose(self.study, n)
        assert proposals == again, "a new engine proposes the same"
        for one in proposals:
            with self.ledger.write():
                number = self.study.propose(one.proposer, one.edits, one.reason, parent=one.parent, source=one.source)
            assert number is not None, "it was proposed before"
            parent = self.configs[one.parent] if one.parent else self.base
            ruling = self.guard.check(parent, one.edits)
            assert ruling.config is not None
            role = Role.CONTINUATION if one.continues and not one.edits else Role.TRIAL
            start = one.parent if one.continues else None
            self.run(ruling.config, one.proposer, number, one.parent, start, role, one.until)
        return len(proposals)

    def fidelity(self, **options: Any) -> FidelityProposer:
        search = SearchProposer(SearchConfig(sampler="auto"), self.guard, self.base, "min", self.history)
        return FidelityProposer(FidelityConfig(**options), search, self.history, goal="min", can_continue=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["model", "asha", "hyperband", "halving"])
def test_no_epoch_is_trained_twice_and_the_best_is_found_with_few(tmp_path: Path, scheduler: Any) -> None:
    toy = ToyStudy(tmp_path)
    for _ in range(42):  # a new proposer every time: everything is in the ledger
        assert toy.step(toy.fidelity(scheduler=scheduler)) == 1
    assert len(toy.trained) == len(set(toy.trained))
    finished = [run for run in toy.study.runs() if run.objective is not None and run.role == Role.CONTINUATION]
    assert finished
    assert min(run.objective or 1.0 for run in finished) < 1 / 27 + 0.01
    whole_runs = sum(run.role != Role.CONTINUATION for run in toy.study.runs())
    assert len(toy.trained) < 0.75 * 27 * whole_runs
    toy.ledger.close()


def test_one_new_config_in_three_fills_the_space_whatever_the_model_says(tmp_path: Path) -> None:
    toy = ToyStudy(tmp_path)
    for _ in range(30):
        assert toy.step(toy.fidelity()) == 1
    reasons = [row.reason for row in toy.study.proposals() if not (row.source or "").startswith("search:continue")]
    spread = [reason == "Sobol sequence" for reason in reasons]
    by_model = [reason.startswith("the expected improvement") for reason in reasons]
    assert any(by_model)
    assert spread[2::SPREAD_PERIOD] == [True] * (len(reasons) // SPREAD_PERIOD)
    assert sum(spread) == len(reasons) // SPREAD_PERIOD
    toy.ledger.close()


def test_configs_that_are_proposed_together_differ(tmp_path: Path) -> None:
    toy = ToyStudy(tmp_path)
    for _ in range(3):
        with toy.ledger.write():
            found = toy.fidelity().propose(toy.study, 8)
        new = [one.edits for one in found if not one.continues]
        assert len(new) == len(set(new))
        assert toy.step(toy.fidelity(), 8) == 8
    toy.ledger.close()


def test_a_run_that_is_void_is_never_continued_or_copied(tmp_path: Path) -> None:
    toy = ToyStudy(tmp_path)
    for _ in range(9):
        toy.step(toy.fidelity(scheduler="asha"))
    chains = find_chains(toy.history.ended(), (), 1.0)
    best = min((chain for chain in chains if chain.is_stopped), key=lambda chain: chain.curve[-1][1])
    with toy.ledger.write():
        toy.study.judged(best.tip.id, "void", {"why": "a leak"}, {})
    after = next(chain for chain in find_chains(toy.history.ended(), (), 1.0) if chain.root.id == best.root.id)
    assert (after.is_stopped, after.curve) == (False, ())
    past = next(one for one in toy.history.ended() if one.run.id == best.tip.id)
    assert not _is_sound(past)
    toy.ledger.close()


def test_the_price_of_a_continuation_is_the_steps_to_the_next_rung() -> None:
    rungs = Rungs.of(FidelityConfig(min=1, max=27), None)
    assert rungs is not None
    assert [rungs.steps_to(step) for step in (0, 1, 3, 5, 9)] == pytest.approx([1, 2, 6, 4, 18])


def test_a_population_copies_its_best_members_and_ends(tmp_path: Path) -> None:
    toy = ToyStudy(tmp_path)
    settings_ = PbtConfig(population=6, interval=5)
    while toy.step(PbtProposer(settings_, toy.guard, toy.base, toy.history, goal="min"), 2):
        assert len(toy.configs) < 100
    runs = toy.study.runs()
    by_member: dict[str, list[str]] = {}
    for row in toy.study.proposals():
        _, member, generation = (row.source or "").split(":")
        by_member.setdefault(member, []).append(generation)
    assert by_member == {str(i): [str(g) for g in range(6)] for i in range(6)}
    copies = [run for run in runs if run.role == Role.TRIAL and run.parent is not None]
    assert len(copies) == 5  # one of six, in each of five generations
    for run in copies:
        assert 0.0 <= toy.configs[run.id]["x"] <= 1.0
        assert toy.configs[run.id] != toy.configs[run.parent or ""]
    last = [run.objective for run in runs if run.objective is not None and run.role != Role.BASE]
    assert len(last) == 6
    toy.ledger.close()


def test_without_checkpoints_nothing_is_continued_and_no_run_has_a_rung(tmp_path: Path) -> None:
    toy = ToyStudy(tmp_path)
    search = SearchProposer(SearchConfig(), toy.guard, toy.base, "min", toy.history)
    proposer = FidelityProposer(FidelityConfig(), search, toy.history, goal="min", can_continue=False)
    with toy.ledger.write():
        found = proposer.propose(toy.study, 3)
    assert [(one.continues, one.until) for one in found] == [(False, None)] * 3
    toy.ledger.close()
