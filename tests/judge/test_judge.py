"""The judge's policy: noise floor, screen, paired tests, alpha, tripwires, warm starts, the held-out metric."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.judge import stats
from looplab.judge.base import (
    Candidate,
    Evidence,
    HeldOut,
    Judgement,
    JudgeSettings,
    JudgeState,
    ReadHeldOut,
    Score,
    Verdict,
)
from looplab.judge.judge import Judge

Value = Callable[[str, str | None, int], float | None]
"""(point, warm start, number) → what the run measures."""


@dataclass
class Lab:
    """Runs what the judge requests, one run after the other, from a table of values."""

    value: Value
    settings: JudgeSettings = field(default_factory=JudgeSettings)
    seeds: bool = True
    held_out: ReadHeldOut | None = None
    budget: int = 200
    state: JudgeState = field(default_factory=JudgeState)
    candidates: list[Candidate] = field(default_factory=list)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    controls: int = 0
    runs: int = 0

    def score(self, point: str, warm: str | None, number: int, again: bool = False) -> Score:
        self.runs += 1
        cost = 1.0 if warm is None else 2.0
        name = f"{point}-{warm or 'cold'}-{number}{f'-again-{self.runs}' if again else ''}"
        value = self.value(point, warm, number)
        seed = 100 + number if self.seeds else None
        return Score(name, seed, value, cost, "evaluator", order=self.runs, again=again)

    def enter(self, point: str, warm: str | None = None, control: bool = False, number: int = 0) -> None:
        score = self.score(point, warm, number)
        self.candidates.append(Candidate(point, score.run, (score,), warm, control))

    def evaluate(self) -> Judgement:
        judgement = Judge(self.settings).evaluate(self.state, self.candidates, self.held_out)
        self.state = judgement.state
        self.alarms += judgement.alarms
        self.evidence |= {evidence.point: evidence for evidence in judgement.verdicts}
        spent = self.state.spent + self.state.reserved
        assert spent <= self.settings.alpha * (1 + 1e-12)
        return judgement

    def settle(self) -> None:
        """Run what is requested until nothing is."""
        while (requests := self.evaluate().requests) and self.runs < self.budget:
            for request in requests:
                known = [(e.point, e.warm) for e in self.candidates]
                if (request.point, request.warm) in known:
                    place = known.index((request.point, request.warm))
                    candidate = self.candidates[place]
                    more = self.score(request.point, request.warm, request.number, request.again)
                    self.candidates[place] = replace(candidate, scores=(*candidate.scores, more))
                else:
                    self.controls += request.control
                    self.enter(request.point, request.warm, request.control, request.number)

    def challenge(self, *points: str) -> Evidence:
        for point in points:
            self.enter(point)
            self.settle()
        return self.evidence[points[-1]]

    def replicates(self, point: str) -> int:
        return sum(len(candidate.scores) - 1 for candidate in self.candidates if candidate.point == point)


def noise(*key: object) -> float:
    return random.Random(repr(key)).gauss(0.0, 1.0)


def world(truth: dict[str, float], salt: int = 0) -> Value:
    return lambda point, warm, number: truth.get(point, 0.0) + noise(salt, point, warm, number)


def lab(truth: dict[str, float] | None = None, salt: int = 0, **more: object) -> Lab:
    made = Lab(world(truth or {}, salt), **more)  # type: ignore[arg-type]
    made.enter("base")
    made.settle()
    return made


def test_the_base_runs_with_its_baseline_seeds_before_anything_is_judged() -> None:
    made = Lab(world({}))
    made.enter("base")
    made.enter("other")
    judgement = made.evaluate()
    assert not judgement.verdicts
    assert judgement.champion == "base-cold-0"
    assert [(request.point, request.seed) for request in judgement.requests] == [
        ("base", 100 + n) for n in (1, 2, 3, 4)
    ]
    made.settle()
    assert made.evidence["base"].verdict is Verdict.KEEP
    assert made.evidence["base"].n == 5


def test_a_clear_improvement_is_promoted_with_its_numbers() -> None:
    made = lab({"good": 4.0})
    found = made.challenge("good")
    assert found.verdict is Verdict.KEEP
    assert made.state.champion == "good-cold-0"
    assert found.champion == "base-cold-0"
    assert found.p is not None
    assert found.boundary is not None
    assert found.p <= found.boundary
    assert found.low is not None
    assert found.high is not None
    assert found.effect is not None
    assert 0 < found.low < found.effect < found.high
    assert made.state.spent == 0.0  # a promotion costs nothing


def test_replicates_are_on_the_champions_seeds_and_the_trial_does_not_count() -> None:
    made = lab()
    made.candidates.append(Candidate("lucky", "lucky", (Score("lucky", 100, 5.0, 1.0, "evaluator"),)))
    requests = [(request.point, request.seed) for request in made.evaluate().requests]
    assert requests == [("lucky", 101), ("lucky", 102), ("lucky", 103)]


def test_a_lucky_trial_is_found_out() -> None:
    made = Lab(lambda point, warm, n: 5.0 if (point, n) == ("lucky", 0) else noise(point, n))
    made.challenge("base", "lucky")
    assert made.evidence["lucky"].verdict in (Verdict.DISCARD, Verdict.INCONCLUSIVE)
    assert made.state.champion == "base-cold-0"


def test_a_challenger_that_fails_the_screen_is_decided_after_one_run() -> None:
    made = Lab(
        lambda point, warm, n: {"worse": -2.0, "hair": 0.2}.get(point, 0.0) + (noise(n) if point == "base" else 0)
    )
    made.challenge("base", "worse", "hair")
    assert made.evidence["worse"].verdict is Verdict.DISCARD
    assert made.evidence["hair"].n == made.evidence["worse"].n == 1
    assert made.state.opened == 0


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_hopeless_challenger_gets_few_replicates(salt: int) -> None:
    made = Lab(lambda point, warm, n: 9.0 if (point, n) == ("bad", 0) else noise(salt, point, n) - 2 * (point == "bad"))
    found = made.challenge("base", "bad")
    assert found.verdict is Verdict.DISCARD
    assert made.replicates("bad") <= 8


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_alpha_is_never_exceeded_and_a_second_evaluation_changes_nothing(salt: int, gain: float, seeds: bool) -> None:
    made = Lab(world({f"p{i}": gain * (i % 2) for i in range(12)}, salt), seeds=seeds)
    made.enter("base")
    for i in range(12):
        made.enter(f"p{i}")
        made.settle()  # `evaluate` checks alpha
        second, third = made.evaluate(), made.evaluate()
        assert second == third
        assert not second.verdicts
        assert not second.alarms
        assert JudgeState.from_dict(json.loads(json.dumps(made.state.as_dict()))) == made.state


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_goal_and_the_order_of_the_scores_do_not_matter(salt: int, rng: random.Random) -> None:
    truth = {"a": 1.0, "b": 2.0, "c": -1.0, "d": 0.0}
    up, down = lab(truth, salt), Lab(lambda *key: -(world(truth, salt)(*key) or 0.0), JudgeSettings(goal="min"))
    up.challenge(*truth)
    down.challenge("base", *truth)
    assert up.state == down.state
    assert [e.effect for e in up.evidence.values()] == [e.effect for e in down.evidence.values()]
    # Everything at once, in any order.
    mixed = []
    for candidate in up.candidates:
        rest = list(candidate.scores[1:])
        rng.shuffle(rest)
        mixed.append(replace(candidate, scores=(candidate.scores[0], *rest)))
    judge = Judge(JudgeSettings())
    assert judge.evaluate(JudgeState(), mixed) == judge.evaluate(JudgeState(), up.candidates)


def test_a_lost_test_costs_its_whole_alpha_even_when_it_stopped_early() -> None:
    made = Lab(lambda point, warm, n: 9.0 if (point, n) == ("bad", 0) else noise(point, n) - 5 * (point == "bad"))
    found = made.challenge("base", "bad")
    assert found.look == 1
    assert made.state.spent == found.alpha == pytest.approx(made.settings.alpha_share * made.settings.alpha)


def test_pairs_see_what_seeds_hide() -> None:
    def value(point: str, warm: str | None, n: int) -> float:
        return 3 * noise("seed", n) + 0.3 * noise(point, n) + (1.0 if point == "good" else 0.0)

    paired, unpaired = Lab(value), Lab(lambda p, w, n: value(p, w, n if p == "base" else n + 500), seeds=False)
    assert paired.challenge("base", "good").verdict is Verdict.KEEP
    assert paired.replicates("good") <= 8
    assert unpaired.challenge("base", "good").verdict is not Verdict.KEEP


def test_without_seeds_a_large_effect_is_still_found() -> None:
    made = Lab(world({"good": 5.0}), seeds=False)
    assert made.challenge("base", "good").verdict is Verdict.KEEP
    assert {score.seed for candidate in made.candidates for score in candidate.scores} == {None}


def test_what_earlier_tests_say_about_the_noise_saves_pairs_of_a_large_effect() -> None:
    """A few pairs say little about their own spread."""
    pairs = {False: 0, True: 0}
    for salt in range(30):
        for known in pairs:
            made = lab({"good": 2.0, **{f"same {i}": 0.0 for i in range(8)}}, salt=salt)
            if known:
                made.challenge(*(f"same {i}" for i in range(8)))
            made.state = replace(made.state, spent=0.0, opened=0)  # the same alpha for both
            made.challenge("good")
            pairs[known] += made.replicates("good")
    assert pairs[True] < pairs[False]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 1e200, -1e300])
@pytest.mark.parametrize("goal", ["max", "min"])
@pytest.mark.parametrize("by", ["test", "ratchet"])
def test_what_is_not_a_number_wins_nothing(value: float | None, goal: str, by: str) -> None:
    made = Lab(lambda p, w, n: value if p == "nan" else noise(p, n), JudgeSettings(goal=goal, by=by))  # type: ignore[arg-type]
    assert made.challenge("base", "nan").verdict is Verdict.CRASH
    assert made.state.champion == "base-cold-0"


def test_a_base_that_crashed_makes_room_for_the_next() -> None:
    made = Lab(lambda p, w, n: None if p == "broken" else noise(p, n))
    made.enter("broken")
    made.enter("works")
    made.settle()
    assert made.evidence["broken"].verdict is Verdict.CRASH
    assert made.state.champion == "works-cold-0"


def test_a_challenger_whose_replicates_crash_is_a_crash_and_is_not_asked_for_again() -> None:
    made = Lab(lambda p, w, n: (9.0 if n == 0 else None) if p == "frail" else noise(p, n))
    found = made.challenge("base", "frail")
    assert found.verdict is Verdict.CRASH
    assert made.replicates("frail") == 3
    assert not made.state.tests


def test_one_crashed_replicate_is_replaced_by_the_next_seed_and_flagged() -> None:
    made = Lab(lambda p, w, n: None if (p, n) == ("good", 2) else noise(p, n) + 6 * (p == "good"))
    found = made.challenge("base", "good")
    assert found.verdict is Verdict.KEEP
    assert "crashed with 1 of its seeds" in found.flags


@pytest.mark.parametrize("by", ["test", "ratchet"])
def test_another_seed_is_not_a_change(by: str) -> None:
    made = Lab(world({}), JudgeSettings(by=by))  # type: ignore[arg-type]
    made.challenge("base")
    made.candidates.append(Candidate("base", "again", (Score("again", 7, 99.0, 1.0, "evaluator"),)))
    judgement = made.evaluate()
    assert [(e.run, e.verdict, e.flags) for e in judgement.verdicts] == [("again", Verdict.DISCARD, ("no change",))]
    assert judgement.champion == "base-cold-0"


@pytest.mark.parametrize("by", ["test", "ratchet"])
@pytest.mark.parametrize("fingerprint", ["other", ""])
def test_another_evaluator_makes_a_challenger_void(by: str, fingerprint: str) -> None:
    made = Lab(world({}), JudgeSettings(by=by))  # type: ignore[arg-type]
    made.challenge("base")
    made.candidates.append(Candidate("cheat", "cheat", (Score("cheat", 100, 99.0, 1.0, fingerprint),)))
    judgement = made.evaluate()
    assert judgement.verdicts[0].verdict is Verdict.VOID
    assert judgement.alarms
    assert judgement.sigma == pytest.approx(made.evaluate().sigma)


def test_an_evaluator_that_changes_during_the_replicates_makes_the_challenger_void() -> None:
    made = lab({"good": 4.0})
    made.enter("good")
    made.evaluate()
    candidate = made.candidates[-1]
    made.candidates[-1] = replace(candidate, scores=(*candidate.scores, Score("late", 101, 9.0, 1.0, "other")))
    assert made.evaluate().verdicts[0].verdict is Verdict.VOID
    assert not made.state.tests


def test_a_champions_run_from_another_evaluator_is_left_out_with_an_alarm() -> None:
    made = lab()
    candidate = made.candidates[0]
    made.candidates[0] = replace(candidate, scores=(*candidate.scores, Score("odd", 105, 999.0, 1.0, "other")))
    judgement = made.evaluate()
    assert "odd" in judgement.alarms[0]
    assert judgement.sigma is not None
    assert judgement.sigma < 10


def test_an_implausible_jump_is_repeated_and_flagged() -> None:
    made = lab({"leak": 50.0})
    made.enter("leak")
    judgement = made.evaluate()
    assert "implausible" in judgement.alarms[0]
    assert not judgement.verdicts
    assert len(judgement.requests) == 3
    made.settle()
    assert "implausible jump" in made.evidence["leak"].flags


def test_an_improvement_smaller_than_asked_for_is_not_kept() -> None:
    made = Lab(lambda p, w, n: 0.1 * noise(p, n) + 0.5 * (p == "bit"), JudgeSettings(min_effect=0.7))
    assert made.challenge("base", "bit").verdict is Verdict.DISCARD
    relative = Lab(lambda p, w, n: 100 + 0.1 * noise(p, n) + 0.5 * (p == "bit"), JudgeSettings(min_relative=0.004))
    assert relative.challenge("base", "bit").verdict is Verdict.KEEP


@pytest.mark.parametrize("seeds", [True, False])
def test_repeats_that_are_equal_to_the_last_digit_promote_nothing(seeds: bool) -> None:
    made = Lab(lambda p, w, n: {"base": 0.9594, "good": 1.0267, "worse": 0.9}[p], seeds=seeds)
    found = made.challenge("base", "good")
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "equal to the last digit" in found.why
    assert made.state.champion == made.evidence["base"].run
    assert any("equal to the last digit" in alarm for alarm in made.alarms)
    assert made.replicates("good") == 3  # no more are spent on it
    assert made.challenge("worse").verdict is Verdict.DISCARD


@pytest.mark.parametrize("seeds", [True, False])
def test_repeats_that_differ_only_by_rounding_promote_nothing(seeds: bool) -> None:
    """A training that is repeated without a new seed, on kernels that add in another order each time."""
    made = Lab(
        lambda p, w, n: {"base": 0.9594, "good": 1.0267}[p] * (1 + 2e-7 * (n % 3)) if p != "worse" else 0.9, seeds=seeds
    )
    found = made.challenge("base", "good")
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "equal up to rounding" in found.why
    assert made.state.champion == made.evidence["base"].run
    assert any("equal up to rounding" in alarm for alarm in made.alarms)


def test_equal_repeats_of_the_base_alone_do_not_hide_a_challenger_that_varies() -> None:
    """A base at chance level measures the same with every seed; the challenger shows that seeds do reach the trainer."""
    made = Lab(lambda p, w, n: 0.1 if p == "base" else 0.9 + 0.01 * noise(p, n))
    assert made.challenge("base", "good").verdict is Verdict.KEEP


def test_a_challenger_whose_repeats_are_equal_is_not_promoted_although_the_base_varies() -> None:
    made = Lab(lambda p, w, n: 0.9567 if p == "good" else 0.5 + 0.01 * noise(p, n))
    assert made.challenge("base", "good").verdict is Verdict.INCONCLUSIVE
    assert any("good" in alarm and "equal to the last digit" in alarm for alarm in made.alarms)


@pytest.mark.parametrize("limit", [0.0, 1.0, 100.0])
def test_a_metric_at_its_limit_may_be_equal_with_every_seed(limit: float) -> None:
    made = Lab(lambda p, w, n: limit if p == "perfect" else limit - 0.2 + 0.01 * noise(p, n))
    assert made.challenge("base", "perfect").verdict is Verdict.KEEP


def test_a_coarse_metric_that_agrees_by_chance_is_promoted_once_it_differs() -> None:
    made = Lab(lambda p, w, n: (0.9 + 0.01 * (n > 3)) if p == "good" else 0.5 + 0.01 * noise(p, n))
    assert made.challenge("base", "good").verdict is Verdict.KEEP
    assert made.replicates("good") == 5


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(-1e6, 1e6), min_size=1), st.booleans())
def test_a_trainer_that_no_seed_reaches_never_promotes_anybody(truth: dict[str, float], seeds: bool) -> None:
    made = Lab(lambda p, w, n: truth.get(p, 0.0), seeds=seeds)
    made.challenge("base", *truth)
    assert [e.point for e in made.evidence.values() if e.verdict is Verdict.KEEP] == ["base"]


def test_a_deterministic_study_repeats_each_winner_once_and_has_no_statistics() -> None:
    truth = {"base": 1.0, "good": 1.25, "same": 1.25, "less": 0.5}
    made = Lab(lambda p, w, n: truth[p], JudgeSettings(by="deterministic"))
    made.challenge("base", "good", "same", "less")
    assert made.evidence["good"].verdict is Verdict.KEEP
    assert made.evidence["good"].p is None
    assert made.evidence["good"].flags == ("deterministic, no statistics",)
    assert [made.evidence[p].verdict for p in ("same", "less")] == [Verdict.DISCARD] * 2
    assert [made.replicates(p) for p in truth] == [1, 1, 0, 0]
    assert not made.alarms


@pytest.mark.parametrize("noisy", ["base", "good"])
def test_a_study_that_is_declared_deterministic_and_is_not_promotes_nothing(noisy: str) -> None:
    made = Lab(lambda p, w, n: (p == "good") + 1e-9 * n * (p == noisy), JudgeSettings(by="deterministic"))
    assert made.challenge("base", "good").verdict is Verdict.INCONCLUSIVE
    assert any("deterministic" in alarm for alarm in made.alarms)


def test_a_deterministic_challenger_that_is_worse_held_out_is_not_promoted() -> None:
    made = Lab(lambda p, w, n: float(p == "good"), JudgeSettings(by="deterministic", min_effect=0.5))
    made.held_out = lambda champion, challenger: HeldOut({0: 1.0}, {0: 0.9})
    assert made.challenge("base", "good").verdict is Verdict.INCONCLUSIVE
    made = Lab(lambda p, w, n: 0.4 * (p == "bit"), JudgeSettings(by="deterministic", min_effect=0.5))
    assert made.challenge("base", "bit").verdict is Verdict.DISCARD


def test_a_warm_start_is_compared_with_the_champions_config_from_the_same_start() -> None:
    def value(point: str, warm: str | None, n: int) -> float:
        return noise(point, warm, n) + (5.0 if warm else 0.0) + (4.0 if point == "better" else 0.0)

    made = Lab(value)
    made.challenge("base")
    made.enter("more", warm="parent")
    requests = made.evaluate().requests
    assert [(w.point, w.warm, w.seed, w.control) for w in requests] == [("base", "parent", 100, True)]
    made.settle()
    assert made.evidence["more"].verdict is not Verdict.KEEP  # it only trained longer
    assert made.controls == 1

    made.enter("better", warm="parent")
    made.settle()
    found = made.evidence["better"]
    assert found.verdict is Verdict.KEEP
    assert found.effect is not None
    assert found.effect < 7  # without the 5 of the extra training
    assert any("warm start" in flag for flag in found.flags)
    assert found.cost == pytest.approx(1.0)


def test_the_champion_trained_further_is_not_another_config() -> None:
    made = lab()
    made.enter("base", warm="parent")
    judgement = made.evaluate()
    assert [(e.verdict, e.flags) for e in judgement.verdicts] == [(Verdict.DISCARD, ("no change",))]


def test_more_compute_is_flagged() -> None:
    made = Lab(world({"good": 5.0}))
    made.challenge("base")
    made.enter("good")
    made.candidates[-1] = replace(made.candidates[-1], scores=(replace(made.candidates[-1].scores[0], cost=9.0),))
    made.settle()
    assert any("the cost" in flag for flag in made.evidence["good"].flags)


def held(gain: float, asked: list[str]) -> ReadHeldOut:
    def read(champion: Candidate, challenger: Candidate) -> HeldOut | None:
        asked.append(challenger.point)
        seeds = range(101, 107)
        return HeldOut({s: noise(s) for s in seeds}, {s: noise(s) + gain + 0.1 * noise("c", s) for s in seeds})

    return read


def test_the_held_out_metric_is_read_only_at_a_promotion() -> None:
    asked: list[str] = []
    made = Lab(world({"bad": -3.0, "good": 4.0}), held_out=held(+1.0, asked))
    made.challenge("base", "bad", "good")
    assert asked == ["good"]
    assert made.evidence["good"].verdict is Verdict.KEEP
    assert "held-out metric read" in made.evidence["good"].flags


def test_better_on_the_objective_and_worse_held_out_is_not_promoted() -> None:
    made = Lab(world({"overfit": 4.0}), held_out=held(-1.0, []))
    found = made.challenge("base", "overfit")
    assert found.verdict is Verdict.INCONCLUSIVE
    assert made.state.champion == "base-cold-0"
    assert any("held-out" in alarm for alarm in made.alarms)
    assert made.state.spent > 0


def test_a_held_out_budget_that_is_used_up_is_flagged() -> None:
    made = Lab(world({"good": 4.0}), held_out=lambda champion, challenger: None)
    found = made.challenge("base", "good")
    assert found.verdict is Verdict.KEEP
    assert "held-out metric not read" in found.flags


def test_open_tests_continue_against_a_new_champion_with_their_alpha() -> None:
    made = lab({"first": 6.0, "second": 6.0})
    made.enter("first")
    made.enter("second")
    opened = made.evaluate().opened
    assert [test.number for test in opened] == [1, 2]
    assert opened[1].alpha < opened[0].alpha
    made.settle()
    assert made.evidence["first"].verdict is Verdict.KEEP
    assert made.evidence["second"].champion == "first-cold-0"
    assert made.evidence["second"].alpha == opened[1].alpha


def test_a_closed_study_leaves_no_candidate_without_a_verdict() -> None:
    made = lab({"good": 1.0})
    made.candidates.append(Candidate("open", "open", (Score("open", 100, 4.0, 1.0, "evaluator"),)))
    made.evaluate()
    assert made.state.tests
    closed = Judge(made.settings).close(made.state, made.candidates)
    assert [(e.run, e.verdict) for e in closed.verdicts] == [("open", Verdict.INCONCLUSIVE)]
    assert not closed.state.tests
    assert not closed.requests


def test_the_ratchet_takes_any_improvement_and_says_what_it_is() -> None:
    made = Lab(lambda p, w, n: {"base": 1.0, "hair": 1.0001, "less": 1.0}[p], JudgeSettings(by="ratchet"))
    made.challenge("base", "hair", "less")
    assert made.evidence["hair"].verdict is Verdict.KEEP
    assert made.evidence["hair"].flags == ("single run, no statistics",)
    assert made.evidence["less"].verdict is Verdict.DISCARD
    assert made.runs == 3


def test_nothing_is_judged_while_the_base_still_runs() -> None:
    judge = Judge(JudgeSettings())
    for candidates in ([], [Candidate("base", "b", ()), Candidate("x", "x", (Score("x", 0, 1.0),))]):
        judgement = judge.evaluate(JudgeState(), candidates)
        assert (judgement.verdicts, judgement.requests, judgement.champion) == ((), (), None)


def test_the_state_of_another_study_is_a_mistake() -> None:
    with pytest.raises(LabError, match="not among the candidates"):
        Judge(JudgeSettings()).evaluate(JudgeState(champion="gone"), [Candidate("b", "b", (Score("b", 0, 1.0),))])


@pytest.mark.parametrize(
    "wrong", [{"alpha": 0.0}, {"baseline_seeds": 1}, {"replicates": 1}, {"max_replicates": 2}, {"goal": "up"}]
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(LabError, match=f"judge.{next(iter(wrong))}"):
        JudgeSettings(**wrong)  # type: ignore[arg-type]


# -- exact ties


@dataclass
class TieLab(Lab):
    """Every run measures the same objective; the second metric comes from a table."""

    ties: dict[str, float | None] = field(default_factory=dict)

    def score(self, point: str, warm: str | None, number: int, again: bool = False) -> Score:
        return replace(super().score(point, warm, number, again), tie=self.ties[point])


@pytest.mark.parametrize("by", ["ratchet", "deterministic"])
@pytest.mark.parametrize(("goal", "winner"), [("max", "more"), ("min", "less")])
def test_an_exact_tie_is_broken_by_the_second_metric(by: str, goal: str, winner: str) -> None:
    ties: dict[str, float | None] = {"base": 1.0, "none": None, "same": 1.0, "more": 2.0, "less": 0.5}
    settings = JudgeSettings(by=by, then=goal, then_metric="mean_reward", min_effect=0.1)  # type: ignore[arg-type]
    made = TieLab(lambda p, w, n: 0.75, settings, ties=ties)
    for point in ("base", "none", "same", "more", "less"):
        made.enter(point)
        made.settle()
    kept = [point for point, evidence in made.evidence.items() if evidence.verdict is Verdict.KEEP]
    assert kept == ["base", winner]
    assert "decided by the tie-break" in made.evidence[winner].flags
    assert "better on mean_reward" in made.evidence[winner].why
    assert made.evidence[winner].effect == 0.0


def test_a_better_objective_counts_whatever_the_second_metric_says() -> None:
    ties: dict[str, float | None] = {"base": 1.0, "good": 0.0, "bad": 9.0}
    values = {"base": 0.5, "good": 0.6, "bad": 0.4}
    made = TieLab(lambda p, w, n: values[p], JudgeSettings(by="ratchet", then="max"), ties=ties)
    for point in ("base", "good", "bad"):
        made.enter(point)
        made.settle()
    assert made.state.champion == "good-cold-0"
    assert made.evidence["bad"].verdict is Verdict.DISCARD


def test_without_a_second_metric_a_tie_is_not_an_improvement() -> None:
    made = TieLab(lambda p, w, n: 0.75, JudgeSettings(by="ratchet"), ties={"base": 1.0, "more": 2.0})
    made.enter("base")
    made.settle()
    assert made.challenge("more").verdict is Verdict.DISCARD


def test_a_test_of_seeds_decides_on_the_objective_alone_and_says_so() -> None:
    ties: dict[str, float | None] = {"base": 1.0, "more": 2.0}
    settings = JudgeSettings(then="max", then_metric="mean_reward")
    made = TieLab(lambda p, w, n: 1.0, settings, ties=ties)
    made.enter("base")
    made.settle()
    evidence = made.challenge("more")
    assert evidence.verdict is Verdict.DISCARD
    assert "better on mean_reward" in evidence.why
    assert "on the objective alone" in evidence.why


# --- confirmation


def drifting(per_run: float, salt: int = 0) -> Lab:
    """A study whose every run adds to all later ones, and whose repeats draw their noise anew."""
    made = Lab(lambda point, warm, number: 0.0)
    made.value = lambda point, warm, number: per_run * made.runs + noise(salt, made.runs)
    return made


def test_a_champion_that_repeats_exactly_is_confirmed_by_one_run() -> None:
    made = lab({"good": 4.0})
    found = made.challenge("good")
    assert found.verdict is Verdict.KEEP
    assert found.why.startswith("Better: ")
    assert "run again" in found.why
    again = [score for score in made.candidates[0].scores if score.again]
    assert [score.value for score in again] == [
        next(score.value for score in made.candidates[0].scores if score.seed == again[0].seed)
    ]


def test_a_champion_that_does_not_repeat_exactly_runs_all_seeds_of_the_test_again() -> None:
    made = Lab(lambda point, warm, number: (6.0 if point == "good" else 0.0) + noise(point, number, made.runs))
    made.enter("base")
    made.settle()
    found = made.challenge("good")
    assert found.verdict is Verdict.KEEP
    before = [score.seed for score in made.candidates[0].scores if score.order <= 5]
    again = [score.seed for score in made.candidates[0].scores if score.again]
    assert again == before[1:]  # the base's first run is in no pair; later seeds are newer than the challenger
    assert not any("no longer" in alarm for alarm in made.alarms)


@pytest.mark.parametrize("salt", range(8))
def test_a_victory_over_the_old_champion_is_none_over_the_new_one(salt: int) -> None:
    """Two equally good configs beat the base at the same time; one is promoted, and the other is no better."""
    gains = {"base": 0.0, "one": 9.0, "other": 9.0}
    made = Lab(lambda point, warm, number: gains[point] + noise(salt, point, number, made.runs))
    made.enter("base")
    made.settle()
    made.enter("one")
    made.enter("other")
    made.settle()
    first, second = [made.evidence[point] for point in ("one", "other")]
    if second.champion != "base-cold-0":
        first, second = second, first
    assert (second.verdict, second.champion) == (Verdict.KEEP, "base-cold-0")
    assert "run again" in second.why
    assert first.champion == second.run
    assert first.verdict is not Verdict.KEEP
    assert "run again" not in first.why


def test_without_confirmation_the_first_look_that_is_won_promotes() -> None:
    made = lab({"good": 4.0}, settings=JudgeSettings(confirm=False))
    assert made.challenge("good").verdict is Verdict.KEEP
    assert not any(score.again for candidate in made.candidates for score in candidate.scores)


def test_drift_promotes_nobody_and_raises_an_alarm() -> None:
    promoted = alarmed = unconfirmed = 0
    for salt in range(20):
        for confirm in (True, False):
            made = drifting(0.1, salt)
            made.settings = JudgeSettings(confirm=confirm)
            made.enter("base")
            made.settle()
            for n in range(12):
                made.enter(f"c{n}")
                made.settle()
            kept = sum(evidence.verdict is Verdict.KEEP for point, evidence in made.evidence.items() if point != "base")
            if confirm:
                promoted += kept > 0
                alarmed += any("no longer measures what it did" in alarm for alarm in made.alarms)
            else:
                unconfirmed += kept > 0
    assert unconfirmed >= 15
    assert promoted <= 3
    assert alarmed >= 10


def test_a_crashed_confirmation_is_left_out_of_the_pairs() -> None:
    def value(point: str, warm: str | None, number: int) -> float | None:
        repeated = point == "base" and any(score.seed == 100 + number for score in made.candidates[0].scores)
        return None if repeated and number == 1 else (6.0 if point == "good" else 0.0) + noise(point, number, made.runs)

    made = Lab(lambda point, warm, number: noise(point, number))
    made.enter("base")
    made.value = value
    made.settle()
    assert made.challenge("good").verdict is Verdict.KEEP


def test_without_seeds_the_champion_runs_again_as_often_as_the_challenger() -> None:
    made = Lab(lambda point, warm, number: (9.0 if point == "good" else 0.0) + noise(point, made.runs), seeds=False)
    made.enter("base")
    made.settle()
    baseline = len(made.candidates[0].scores)
    found = made.challenge("good")
    assert found.verdict is Verdict.KEEP
    assert len(made.candidates[0].scores) >= baseline + found.n


def test_a_verdict_says_which_rate_of_collapse_its_runs_cannot_exclude() -> None:
    made = lab({"good": 4.0})
    found = made.challenge("good")
    assert re.search(rf"0 of {found.n} runs collapsed; the true rate may be up to \d+%", found.why)
    assert stats.largest_rate(0, 13) == pytest.approx(0.206, abs=1e-3)
    assert stats.largest_rate(13, 13) == 1.0


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_largest_rate_grows_with_the_hits(case: tuple[int, int]) -> None:
    hits, n = case
    assert hits / n <= stats.largest_rate(hits, n) <= 1.0
    if hits:
        assert stats.largest_rate(hits - 1, n) <= stats.largest_rate(hits, n)


# --- the best mean


def test_the_best_mean_wins_without_a_test_and_says_so() -> None:
    made = Lab(world({"good": 2.0, "bad": -3.0}, 3), JudgeSettings(by="mean", replicates=4))
    made.enter("base")
    made.settle()
    assert len(made.candidates[0].scores) == 4
    found = made.challenge("bad")
    assert found.verdict is Verdict.DISCARD
    assert found.n == 1
    found = made.challenge("good")
    assert found.verdict is Verdict.KEEP
    assert found.n == 4
    assert found.flags == ("best mean, no proof",)
    assert "may be luck" in found.why
    assert made.state.champion == "good-cold-0"
    assert made.state.spent == 0.0


def test_the_best_mean_works_without_seeds() -> None:
    made = Lab(world({"good": 3.0}), JudgeSettings(by="mean"), seeds=False)
    made.enter("base")
    made.settle()
    assert made.challenge("good").verdict is Verdict.KEEP
