"""Simulated studies: what a judge detects with a number of runs, before you pay for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from looplab.judge.base import Candidate, JudgeSettings, JudgeState, Score
from looplab.judge.judge import Judge

EFFECTS = (0.5, 1.0, 2.0, 3.0)
"""True improvements that `power` tries, in standard deviations of the noise."""
SHARE = 0.5
"""Share of the challengers that are better."""

Measure = Callable[[int, int, bool], float]
"""(config, seed, whether it repeats an earlier run) → what the run measures; config 0 is the base."""


@dataclass(frozen=True, slots=True)
class SimulatedStudy:
    """Result of a simulated study."""

    promotions: int
    false: int
    """Promotions of a challenger that is not better than the champion it replaced."""
    first_true: int | None
    """Runs used when the first challenger that is better was promoted; None: there was none."""
    runs: int


def simulate(judge: Judge, truth: Sequence[float], measure: Measure, budget: int) -> SimulatedStudy:
    """Run a whole study, run by run as an engine would: what the judge requests goes first.

    Args:
        truth: What the base and the challengers are worth, in the order in which they are proposed. Larger is better.
    """
    names = [f"r{i}" for i in range(len(truth))]
    numbers = {name: i for i, name in enumerate(names)}
    scores: list[list[Score]] = [[] for _ in names]
    state, judgement = JudgeState(), None
    runs = proposed = promotions = false = 0
    first_true = None

    def run(config: int, seed: int, again: bool = False) -> None:
        nonlocal runs
        runs += 1
        value = measure(config, seed, again)
        scores[config].append(Score(f"{names[config]}-{seed}-{runs}", seed, value, order=runs, again=again))

    while runs < budget:
        if judgement is not None and judgement.requests:
            for request in judgement.requests[: budget - runs]:
                assert request.seed is not None
                run(numbers[request.point], request.seed, request.again)
        elif proposed < len(names):
            run(proposed, 0)
            proposed += 1
        else:
            break
        before = state.champion
        candidates = [Candidate(n, n, tuple(s)) for n, s in zip(names[:proposed], scores, strict=False)]
        judgement = judge.evaluate(state, candidates)
        state = judgement.state
        for evidence in judgement.verdicts:
            if evidence.verdict == "keep" and before is not None and evidence.run != names[0]:
                promotions += 1
                is_better = truth[numbers[evidence.run]] > truth[numbers[evidence.champion or before]]
                false += not is_better
                if is_better and first_true is None:
                    first_true = runs
    return SimulatedStudy(promotions, false, first_true, runs)


@dataclass(frozen=True, slots=True)
class Power:
    """What a judge finds of improvements of one size."""

    effect: float
    """In standard deviations of the noise."""
    found: float
    """Share of the studies that promote a better config."""
    runs: float | None
    """Median number of runs until then; None: no study did."""


def power(settings: JudgeSettings, budget: int, studies: int = 60, seed: int = 0) -> list[Power]:
    """Return what studies with this judge and this many runs find, by the size of the true improvement.

    Half of the challengers are better by the effect, all runs have normal noise that is not shared between configs, and
    a repeat with the same seed draws a new one.
    """
    judge = Judge(settings)
    sign = 1.0 if settings.goal == "max" else -1.0
    found = []
    for effect in EFFECTS:
        took = []
        for study in range(studies):
            rng = random.Random(f"{seed}-{effect}-{study}")  # noqa: S311 (a simulation)
            truth = [0.0, *(effect * (rng.random() < SHARE) for _ in range(budget))]

            def measure(
                config: int, _seed: int, _again: bool, truth: list[float] = truth, rng: random.Random = rng
            ) -> float:
                return sign * (truth[config] + rng.gauss(0.0, 1.0))

            first = simulate(judge, truth, measure, budget).first_true
            if first is not None:
                took.append(first)
        found.append(Power(effect, len(took) / studies, median(took) if took else None))
    return found
