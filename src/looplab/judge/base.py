"""What goes into the court and what comes out of it: plain frozen data, so that every decision can be replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from looplab.errors import LabError

DIVERGED = 1e100
"""From this magnitude on a value is as good as infinite, and its square would overflow."""


class Verdict(StrEnum):
    """What the court says about a run."""

    KEEP = "keep"
    DISCARD = "discard"
    INCONCLUSIVE = "inconclusive"
    CRASH = "crash"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How strict the court is."""

    goal: Literal["max", "min"] = "max"
    then: Literal["max", "min"] | None = None
    """The goal of the metric that breaks exact ties; None: a tie is not an improvement."""
    then_metric: str = ""
    by: Literal["test", "ratchet", "deterministic"] = "test"
    """`ratchet`: one run each, any improvement wins. It promotes luck; it is here because people know it.
    `deterministic`: the same config and seed always measure the same, which is checked by one repeat of each winner."""
    alpha: float = 0.05
    """The probability that a study whose challengers are all no better promotes one of them; for the whole study."""
    baseline_seeds: int = 5
    """Seeds of the base, before anything is judged: the noise floor."""
    replicates: int = 3
    """Replicates of a challenger at the first look."""
    max_replicates: int = 24
    """Replicates of a challenger at the last look."""
    min_effect: float = 0.0
    """A smaller improvement is not worth a promotion; in units of the metric."""
    min_relative: float = 0.0
    """The same as a share of the champion's mean; the larger of the two counts."""
    screen: float = 0.5
    """A first run must beat the champion by so many standard deviations of the noise to earn replicates."""
    alpha_share: float = 0.15
    """The part of the alpha still left that the next test gets."""
    growth: float = 1.6
    """Each look has so many times the replicates of the one before."""
    spending: float = 2.0
    """How late a test spends its alpha over its looks: 1 evenly, 3 nearly all of it at the end."""
    futility: float = 0.1
    """A test whose probability to be won in the end is below this stops."""
    implausible: float = 15.0
    """A first run better by so many standard deviations raises an alarm."""
    crashes: int = 2
    """A challenger with so many crashed replicates is a crash."""
    held_out_p: float = 0.1
    """Worse on the held-out metric with a one-sided p below this: no promotion."""

    def __post_init__(self) -> None:
        wrong = [
            (self.goal not in ("max", "min"), "goal", "max or min"),
            (self.by not in ("test", "ratchet", "deterministic"), "by", "test, ratchet or deterministic"),
            (not 0 < self.alpha < 0.5, "alpha", "above 0 and below 0.5"),
            (self.baseline_seeds < 2, "baseline_seeds", "2 or more: one run has no spread"),
            (self.replicates < 2, "replicates", "2 or more: one run has no spread"),
            (self.max_replicates < self.replicates, "max_replicates", f"no less than replicates ({self.replicates})"),
            (not self.min_effect >= 0, "min_effect", "0 or more"),
            (not self.min_relative >= 0, "min_relative", "0 or more"),
            (not 0 < self.alpha_share < 1, "alpha_share", "above 0 and below 1"),
            (not self.growth > 1, "growth", "above 1"),
            (not self.spending > 0, "spending", "above 0"),
            (not 0 <= self.futility < 1, "futility", "from 0 to below 1"),
            (self.crashes < 1, "crashes", "1 or more"),
        ]
        for is_wrong, name, allowed in wrong:
            if is_wrong:
                raise LabError(f"judge.{name} must be {allowed}, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Score:
    """What one run measured."""

    run: str
    seed: int | None
    """None: the trainer has no seed that the lab knows; such runs are compared without pairs."""
    value: float | None
    """None: it crashed or never logged the metric. NaN, infinite and diverged values count as None."""
    cost: float = 0.0
    """Device seconds, with those of the runs that a warm start rests on."""
    fingerprint: str = ""
    """A hash of the evaluator and the data; empty: not known."""
    tie: float | None = None
    """What it measured of the metric that breaks exact ties."""

    @property
    def finite(self) -> bool:
        return self.value is not None and abs(self.value) < DIVERGED  # false for NaN


@dataclass(frozen=True, slots=True)
class Candidate:
    """All runs of one config, whatever their seed."""

    point: str
    """The identity of the config without its seed."""
    run: str
    """Its first run, by which it is known."""
    scores: tuple[Score, ...]
    """The ended runs; the first one is the trial, by which it is selected for replicates."""
    warm: str | None = None
    """The run whose checkpoint it starts from. A point with a warm start is another entrant than the point alone."""
    control: bool = False
    """Run only to be compared with, because the court asked for it: never judged itself."""


@dataclass(frozen=True, slots=True)
class OpenTest:
    """A challenger that earned replicates."""

    run: str
    number: int
    """Its place among the tests of the study, from 1."""
    alpha: float
    """Set when it was opened, before any replicate was seen."""
    look: int = 0
    """Looks taken so far."""


@dataclass(frozen=True, slots=True)
class JudgeState:
    """What was decided so far. The caller keeps it (`as_dict`) and hands it back at the next sitting."""

    champion: str | None = None
    """The first run of the champion."""
    tests: tuple[OpenTest, ...] = ()
    """The tests that are open."""
    opened: int = 0
    """Tests opened so far."""
    spent: float = 0.0
    """The alpha of the tests that are over and were not won. A promotion costs nothing."""
    verdicts: tuple[tuple[str, str], ...] = ()
    """(first run, verdict), in the order in which they were given."""
    alarms: tuple[str, ...] = ()
    """Alarms raised so far; none is raised twice."""

    @property
    def reserved(self) -> float:
        """Alpha held by the open tests."""
        return math.fsum(test.alpha for test in self.tests)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> JudgeState:
        return cls(
            champion=kept["champion"],
            tests=tuple(OpenTest(**test) for test in kept["tests"]),
            opened=kept["opened"],
            spent=kept["spent"],
            verdicts=tuple((run, verdict) for run, verdict in kept["verdicts"]),
            alarms=tuple(kept["alarms"]),
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """A verdict and all that it rests on."""

    run: str
    """The first run of the entrant."""
    point: str
    verdict: Verdict
    why: str
    """A sentence for people."""
    champion: str | None = None
    """The first run of the champion that it was compared with."""
    effect: float | None = None
    """How much better it was, in units of the metric; positive is better, whatever the goal."""
    low: float | None = None
    """The 95 % confidence interval of the effect."""
    high: float | None = None
    p: float | None = None
    """One-sided p-value of the replicates; None where there was no test."""
    boundary: float | None = None
    """What p had to reach at this look."""
    alpha: float | None = None
    """The alpha of the whole test."""
    n: int = 0
    """Runs that the effect rests on: replicates in a test, 1 in the screen."""
    look: int = 0
    sigma: float | None = None
    """The noise: the standard deviation between runs that differ only in their seed."""
    cost: float | None = None
    """Its mean cost, as a multiple of what it was compared with."""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the court asks for."""

    point: str
    warm: str | None
    """Start from this run's checkpoint."""
    seed: int | None
    number: int
    """The how-manieth run of this entrant beyond its trial; with a seed it is the seed minus the base's."""
    why: str
    control: bool = False
    """The champion's config from a challenger's warm start: not a challenger itself."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out metric by seed (any key, where there are no seeds), as measured: the goal is the objective's."""

    champion: Mapping[int, float]
    challenger: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a sitting of the court decided, and what it asks for."""

    state: JudgeState
    verdicts: tuple[Evidence, ...]
    """The new ones."""
    opened: tuple[OpenTest, ...]
    """The new ones."""
    requests: tuple[RunRequest, ...]
    """Runs to do next, the most wanted first; those under way are among them."""
    champion: str | None
    """The first run of the champion after this sitting."""
    alarms: tuple[str, ...]
    """The new ones."""
    sigma: float | None


ReadHeldOut = Callable[[Candidate, Candidate], HeldOut | None]
"""(champion, challenger) → their held-out values, or None when there are none or the budget of readings is used.
Asked only when a promotion hangs on it; asked the same again, it must answer the same."""
