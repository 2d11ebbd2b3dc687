from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.decide.base import Proposal
from looplab.decide.mix import HALF_LIFE, TURN, Mix, credit
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger


@dataclass
class Fake:
    """Proposes as much as it is asked for, up to what it has."""

    name: str
    has: int = 1_000
    problem: str | None = None
    asked: list[int] = field(default_factory=list)
    thinking: bool = False

    def close(self) -> None:
        pass

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        self.asked.append(n)
        given, self.has = min(n, self.has), max(0, self.has - n)
        self.problem = None if given else "nothing left"
        return [Proposal((f"x@set={i}",), "why not", self.name) for i in range(given)]


@pytest.fixture
def study(tmp_path: Path) -> StudyLedger:
    return make_study(tmp_path / "ledger.db")


def make_study(path: Path, goal: str = "min") -> StudyLedger:
    study = StudyLedger(Ledger(path), "s")
    study.open("loss", goal)
    return study


def run(
    study: StudyLedger,
    proposer: str,
    verdict: str | None = None,
    *,
    objective: float | None = None,
    status: str = "ok",
    role: str = "trial",
    point: str = "",
    ended: bool = True,
) -> None:
    """A proposal that became a run, as the engine writes it."""
    with study.ledger.write():
        id_ = study.propose(proposer, ["x@set=1"], "") if role == "trial" else None
        row = study.plan(
            round=1, proposal=id_, proposer=proposer, parent=None, base="b", reason="", config_hash="h", devices=1,
            plan=RunPlan({}), role=role, point=point,
        )  # fmt: skip
        if ended:
            study.ended(
                row.id, status=status, code=0, signal=None, started=1.0, ended=1.0 + row.n, objective=objective,
                files={},
            )  # fmt: skip
        if verdict is not None:
            study.judged(row.id, verdict, {}, {})


def play(study: StudyLedger, mix: Mix, rates: dict[str, float], turns: int, rng: Random, n: int = 1) -> Counter[str]:
    """Simulate a study in which a proposer's runs are kept at its rate; return how often each proposed."""
    chosen: Counter[str] = Counter()
    for _ in range(turns):
        for proposal in mix.propose(study, n):
            chosen[proposal.proposer] += 1
            run(study, proposal.proposer, "keep" if rng.random() < rates[proposal.proposer] else "discard")
    return chosen


# --- credit


def test_credit_follows_the_verdicts(study: StudyLedger) -> None:
    run(study, "a", "keep")
    run(study, "a", "discard")
    run(study, "a", "crash", status="failed")
    run(study, "a", "void")
    run(study, "b", "inconclusive")
    run(study, "b", "discard", point="p")
    run(study, "judge", role="replicate", point="p")
    run(study, "b")
    run(study, "b", ended=False)
    found = credit(study)
    a, b = found["a"], found["b"]
    assert (a.proposals, a.kept, a.partial, a.discarded, a.crashed, a.waiting) == (4, 1, 0, 2, 1, 0)
    assert (b.proposals, b.kept, b.partial, b.discarded, b.crashed, b.waiting) == (4, 0, 2, 0, 0, 2)
    assert set(found) == {"a", "b"}
    assert a.weight + b.weight == pytest.approx(1)


@pytest.mark.parametrize("goal", ["min", "max"])
def test_without_a_judge_a_run_counts_that_was_the_best_so_far(tmp_path: Path, goal: str) -> None:
    study = make_study(tmp_path / "ledger.db", goal)
    sign = 1 if goal == "min" else -1
    run(study, "base", role="base", objective=sign * 5.0)
    for proposer, objective in (("a", 6.0), ("b", 4.0), ("a", 4.5), ("b", 3.0), ("b", 3.0)):
        run(study, proposer, objective=sign * objective)
    run(study, "a", status="failed")
    run(study, "a", ended=False)
    found = credit(study, ("a", "b"))
    assert (found["a"].kept, found["a"].discarded, found["a"].crashed, found["a"].waiting) == (0, 2, 1, 1)
    assert (found["b"].kept, found["b"].discarded) == (2, 1)
    assert found["b"].weight > found["a"].weight


def test_a_run_that_never_began_says_nothing(study: StudyLedger) -> None:
    run(study, "a", ended=False)
    planned = study.runs(state="planned")[-1]
    how = {"code": None, "signal": None, "started": None, "ended": 1.0, "objective": None, "files": {}}
    with study.ledger.write():
        study.ended(planned.id, status="stopped", **how)  # type: ignore[arg-type]
    assert credit(study)["a"].discarded == 0


def test_old_evidence_fades(study: StudyLedger) -> None:
    run(study, "a", "keep")
    for _ in range(int(HALF_LIFE)):
        run(study, "b", "discard")
    found = credit(study)
    assert found["a"].good == pytest.approx(0.5)
    assert found["b"].bad < HALF_LIFE


def test_crashes_count_against(study: StudyLedger) -> None:
    for _ in range(5):
        run(study, "a", "crash", status="failed")
        run(study, "b", "inconclusive")
    found = credit(study)
    assert found["a"].mean < found["b"].mean


@settings(max_examples=40, deadline=None)
@given(
    fates=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([None, "keep", "discard", "inconclusive", "crash", "void"])),
        max_size=25,
    )
)
def test_weights_are_shares_whatever_happened(
    tmp_path_factory: pytest.TempPathFactory, fates: list[tuple[str, str | None]]
) -> None:
    study = make_study(tmp_path_factory.mktemp("mix") / "ledger.db")
    for proposer, verdict in fates:
        run(study, proposer, verdict, objective=1.0)
    found = credit(study, "abc")
    assert sum(one.weight for one in found.values()) == pytest.approx(1)
    for one in found.values():
        assert 0 < one.mean < 1
        assert one.proposals == one.kept + one.partial + one.discarded + one.crashed + one.waiting


# --- choosing


def test_the_same_seed_and_ledger_lead_to_the_same_choice(study: StudyLedger) -> None:
    rng = Random(1)
    play(study, Mix([Fake("a"), Fake("b"), Fake("c")], 7), {"a": 0.5, "b": 0.3, "c": 0.1}, 15, rng)
    first, second, other = (
        [p.proposer for p in Mix([Fake("a"), Fake("b"), Fake("c")], seed).propose(study, 12)] for seed in (7, 7, 8)
    )
    assert first == second
    assert first != other


def test_a_mix_moves_towards_the_better_one(tmp_path: Path) -> None:
    shares = []
    for seed in range(5):
        study = make_study(tmp_path / str(seed) / "ledger.db")
        chosen = play(study, Mix([Fake("good"), Fake("poor")], seed), {"good": 0.4, "poor": 0.02}, 80, Random(seed))
        shares.append(chosen["good"] / 80)
        assert credit(study)["good"].weight > 0.5
    assert sum(shares) / len(shares) > 0.75


def test_none_starves(study: StudyLedger) -> None:
    for _ in range(30):
        run(study, "good", "keep")
        run(study, "poor", "discard")
    mix = Mix([Fake("good"), Fake("poor")], 0)
    made = []
    for _ in range(60):
        (proposal,) = mix.propose(study, 1)
        made.append(proposal.proposer)
        run(study, proposal.proposer, "keep" if proposal.proposer == "good" else "discard")
    for start in range(len(made) - TURN):
        assert "poor" in made[start : start + TURN]
    assert made.count("poor") <= 12


def test_one_that_has_become_good_is_found_again(study: StudyLedger) -> None:
    mix = Mix([Fake("a"), Fake("b")], 3)
    rng = Random(5)
    early = play(study, mix, {"a": 0.5, "b": 0.0}, 60, rng)
    play(study, mix, {"a": 0.0, "b": 0.5}, 60, rng)
    late = play(study, mix, {"a": 0.0, "b": 0.5}, 60, rng)
    assert early["a"] > early["b"]
    assert late["b"] > late["a"]


def test_each_is_asked_once_for_its_share(study: StudyLedger) -> None:
    fakes = [Fake("a"), Fake("b")]
    proposals = Mix(fakes, 0).propose(study, 8)
    shares = Counter(proposal.proposer for proposal in proposals)
    assert len(proposals) == 8
    assert [fake.asked for fake in fakes] == [[shares["a"]], [shares["b"]]]


def test_when_one_has_nothing_the_others_fill_in_and_its_problem_is_reported(study: StudyLedger) -> None:
    for seed in range(6):  # whoever the draw favours
        mix = Mix([Fake("rules", has=0), Fake("search")], seed)
        assert [p.proposer for p in mix.propose(study, 1)] == ["search"]
    run(study, "search", "discard")
    assert [p.proposer for p in mix.propose(study, 5)] == ["search"] * 5  # the other was due, and asked first
    assert mix.problem == "rules: nothing left"


def test_what_the_last_one_leaves_open_is_asked_for_again_and_not_twice_at_once(study: StudyLedger) -> None:
    search = Fake("search")
    mix = Mix([search, Fake("rules", has=0)], 0)
    made = 0
    while made < 6:
        proposals = mix.propose(study, 6 - made)
        made += len(proposals)
        assert proposals
        for proposal in proposals:
            run(study, proposal.proposer, "discard")
    assert made == sum(search.asked) == 6


def test_when_all_have_nothing_every_problem_is_reported_and_nothing_recorded(study: StudyLedger) -> None:
    mix = Mix([Fake("a", has=0), Fake("b", has=0)], 0)
    assert mix.propose(study, 3) == []
    assert sorted((mix.problem or "").split("; ")) == ["a: nothing left", "b: nothing left"]
    assert not [event for event in study.ledger.events() if event.kind == "mix"]


def test_what_waits_in_the_ledger_is_given_once(study: StudyLedger) -> None:
    class Waiting(Fake):
        def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
            return [Proposal(("x@set=1",), "", "queue", id=1)]

    assert len(Mix([Waiting("a"), Waiting("b")], 0).propose(study, 4)) == 1


def test_the_weights_and_the_choice_are_recorded(study: StudyLedger) -> None:
    mix = Mix([Fake("a"), Fake("b")], 0)
    run(study, "a", "keep")
    before = credit(study, ["a", "b"])
    proposals = mix.propose(study, 3)
    (event,) = [event for event in study.ledger.events() if event.kind == "mix"]
    assert event.data["weights"] == {name: round(one.weight, 4) for name, one in before.items()}
    assert event.data["weights"]["a"] > event.data["weights"]["b"]
    assert event.data["chosen"] == dict(Counter(p.proposer for p in proposals))
    assert study.ledger.first_broken_link() is None


def test_an_agent_makes_at_most_three_of_ten_proposals_until_it_has_earned_more() -> None:
    from looplab.decide.mix import AGENT_SHARE, MIN_DECIDED, Credit, _is_capped

    def made(mean: float, weight: float, kept: int) -> Credit:
        return Credit(proposals=9, kept=kept, partial=0, discarded=2, crashed=0, waiting=0, good=kept, bad=2, mean=mean,
                      weight=weight)  # fmt: skip

    equal = {"agent": made(0.5, 0.5, MIN_DECIDED), "search": made(0.5, 0.5, 0)}
    poor = {"agent": made(0.2, 0.3, MIN_DECIDED), "search": made(0.5, 0.7, 0)}
    young = {"agent": made(0.9, 0.8, 1), "search": made(0.2, 0.2, 0)}
    for credits in (poor, young):
        window: list[str] = []
        for _ in range(40):
            window.append("search" if _is_capped("agent", window[-9:], credits) else "agent")
        assert max(window[i : i + 10].count("agent") for i in range(31)) <= 10 * AGENT_SHARE
        assert window.count("agent") >= 10
    assert not _is_capped("agent", ["search", "agent", "search"] * 3, equal)
    assert not _is_capped("search", ["search"] * 9, equal)
