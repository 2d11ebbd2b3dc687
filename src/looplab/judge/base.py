"""Inputs and outputs of the judge: plain frozen data, so that every decision can be replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from looplab.errors import LabError

DIVERGED = 1e100
"""Values of at least this magnitude count as infinite: their squares would overflow."""


RULES = ("test", "ratchet", "mean", "deterministic")


class Verdict(StrEnum):
    """The judge's decision about a run."""

    KEEP = "keep"
    DISCARD = "discard"
    INCONCLUSIVE = "inconclusive"
    CRASH = "crash"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The policy of the judge."""

    goal: Literal["max", "min"] = "max"
    then: Literal["max", "min"] | None = None
    """Goal of the metric that breaks exact ties; None: a tie is not an improvement."""
    then_metric: str = ""
    """Name of that metric, for messages."""
    by: Literal["test", "ratchet", "mean", "deterministic"] = "test"
    """`ratchet`: one run each, any improvement wins. It promotes luck and is offered because it is common practice.
    `mean`: the best mean of `replicates` runs wins, without a test.
    `deterministic`: a config with a fixed seed always measures the same; one repeat of each winner checks this."""
    alpha: float = 0.05
    """Bound on the probability that a study whose challengers are all no better promotes any of them."""
    baseline_seeds: int = 5
    """Runs of the base before anything is judged; their spread is the noise floor."""
    replicates: int = 3
    """Replicates of a challenger at the first look."""
    max_replicates: int = 28
    """Replicates of a challenger at the last look."""
    min_effect: float = 0.0
    """Smallest improvement worth a promotion, in units of the metric."""
    min_relative: float = 0.0
    """The same as a fraction of the champion's mean; the larger of the two applies."""
    screen: float = 0.5
    """Standard deviations of the noise by which a first run must beat the champion to earn replicates."""
    alpha_share: float = 0.3
    """Fraction of the remaining alpha that the next test receives."""
    growth: float = 1.6
    """Factor by which the number of replicates grows from look to look."""
    spending: float = 2.0
    """Exponent of the alpha-spending function: 1 spends evenly, 3 nearly everything at the last look."""
    futility: float = 0.1
    """A test stops when its predictive power falls below this probability."""
    implausible: float = 15.0
    """A first run that is better by this many standard deviations of the noise raises an alarm."""
    crashes: int = 2
    """Number of crashed replicates that makes the challenger's verdict `crash`."""
    confirm: bool = True
    """Before a promotion, the champion runs again on the seeds of the test that were measured before the challenger was
    proposed, and must lose again."""
    held_out_p: float = 0.1
    """A challenger that is worse on the held-out metric with a one-sided p below this is not promoted."""

    def __post_init__(self) -> None:
        checks = [
            (self.goal not in ("max", "min"), "goal", "max or min"),
            (self.by not in RULES, "by", "test, ratchet, mean or deterministic"),
            (not 0 < self.alpha < 0.5, "alpha", "above 0 and below 0.5"),
            (self.baseline_seeds < 2, "baseline_seeds", "2 or more, since one run has no spread"),
            (self.replicates < 2, "replicates", "2 or more, since one run has no spread"),
            (self.max_replicates < self.replicates, "max_replicates", f"at least replicates ({self.replicates})"),
            (not self.min_effect >= 0, "min_effect", "0 or more"),
            (not self.min_relative >= 0, "min_relative", "0 or more"),
            (not 0 < self.alpha_share < 1, "alpha_share", "above 0 and below 1"),
            (not self.growth > 1, "growth", "above 1"),
            (not self.spending > 0, "spending", "above 0"),
            (not 0 <= self.futility < 1, "futility", "from 0 to below 1"),
            (self.crashes < 1, "crashes", "1 or more"),
        ]
        for is_invalid, name, allowed in checks:
            if is_invalid:
                raise LabError(f"judge.{name} must be {allowed}, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Score:
    """The measurement of one run."""

    run: str
    seed: int | None
    """None: the lab does not control the trainer's seed; such runs are compared unpaired."""
    value: float | None
    """None: the run crashed or never logged the metric. NaN, infinite and diverged values count as None."""
    cost: float = 0.0
    """Device seconds, including those of the runs that its warm start builds on."""
    fingerprint: str = ""
    """Hash of the evaluator and the data; empty: unknown."""
    tie: float | None = None
    """Value of the metric that breaks exact ties; None: not measured."""
    order: int = 0
    """Number of the run in its study: later runs have higher ones."""
    again: bool = False
    """A confirmation: a seed that was measured before, repeated because the judge asked for it."""

    @property
    def finite(self) -> bool:
        return self.value is not None and abs(self.value) < DIVERGED  # false for NaN


@dataclass(frozen=True, slots=True)
class Candidate:
    """All runs of one config with any seed."""

    point: str
    """Identity of the config without its seed."""
    run: str
    """Name of its first run, which identifies the candidate."""
    scores: tuple[Score, ...]
    """The finished runs. The first is the trial, which decides whether the candidate is replicated."""
    warm: str | None = None
    """Run whose checkpoint it starts from; None: from scratch. A point with a warm start is a separate candidate."""
    control: bool = False
    """A run that the judge requested only as a comparison; never judged itself."""


@dataclass(frozen=True, slots=True)
class OpenTest:
    """The sequential test of a challenger that passed the screen."""

    run: str
    number: int
    """Index among the tests of the study, from 1."""
    alpha: float
    """Fixed when the test opens, before any replicate is seen."""
    look: int = 0
    """Interim looks taken so far."""
    confirming: bool = False
    """Whether a look was won, so that from now on the champion's runs from before the challenger no longer count."""


@dataclass(frozen=True, slots=True)
class JudgeState:
    """Decisions so far. The caller stores it (`as_dict`) and passes it to the next evaluation."""

    champion: str | None = None
    """First run of the champion; None: no base has run yet."""
    tests: tuple[OpenTest, ...] = ()
    """The open tests."""
    opened: int = 0
    """Number of tests opened so far."""
    spent: float = 0.0
    """Alpha of the closed tests that were not won. A promotion costs nothing."""
    verdicts: tuple[tuple[str, str], ...] = ()
    """(first run, verdict) in chronological order."""
    alarms: tuple[str, ...] = ()
    """Alarms raised so far; each is raised once."""

    @property
    def reserved(self) -> float:
        """Alpha held by the open tests."""
        return math.fsum(test.alpha for test in self.tests)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JudgeState:
        return cls(
            champion=data["champion"],
            tests=tuple(OpenTest(**test) for test in data["tests"]),
            opened=data["opened"],
            spent=data["spent"],
            verdicts=tuple((run, verdict) for run, verdict in data["verdicts"]),
            alarms=tuple(data["alarms"]),
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """A verdict and the numbers behind it."""

    run: str
    """First run of the candidate."""
    point: str
    verdict: Verdict
    why: str
    """One readable sentence."""
    champion: str | None = None
    """First run of the champion that it was compared with; None: no comparison."""
    effect: float | None = None
    """Improvement in units of the metric; positive is better, whatever the goal. None: not measured."""
    low: float | None = None
    """Lower end of the 95 % confidence interval of the effect."""
    high: float | None = None
    """Upper end of the interval."""
    p: float | None = None
    """One-sided p-value of the replicates; None: there was no test."""
    boundary: float | None = None
    """Largest p that would have won at this look."""
    alpha: float | None = None
    """Alpha of the whole test."""
    n: int = 0
    """Runs behind the effect: replicates in a test, 1 in the screen."""
    look: int = 0
    """Looks taken, including this one; 0: no test."""
    sigma: float | None = None
    """Noise: standard deviation between runs that differ only in their seed; None: unknown."""
    cost: float | None = None
    """Mean cost as a multiple of the rival's; None: unknown."""
    flags: tuple[str, ...] = ()
    """Remarks that readers of the verdict should know, such as `implausible jump`."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the judge asks for."""

    point: str
    warm: str | None
    """Run whose checkpoint to start from; None: from scratch."""
    seed: int | None
    """None: the lab does not control the trainer's seed."""
    number: int
    """Index of this replicate, from 1; in a study with seeds, its seed minus the base's."""
    why: str
    control: bool = False
    """The champion's config from a challenger's warm start; not a challenger itself."""
    again: bool = False
    """A confirmation: the champion has run with this seed before."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out values by seed (any key if there are no seeds), as measured, with the objective's goal."""

    champion: Mapping[int, float]
    challenger: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of one evaluation."""

    state: JudgeState
    """State to pass to the next evaluation."""
    verdicts: tuple[Evidence, ...]
    """New verdicts."""
    opened: tuple[OpenTest, ...]
    """Tests opened by this evaluation."""
    requests: tuple[RunRequest, ...]
    """Runs needed next, most important first; includes runs that are already in progress."""
    champion: str | None
    """First run of the champion after this evaluation; None: no base has run yet."""
    alarms: tuple[str, ...]
    """New alarms."""
    sigma: float | None
    """Noise: standard deviation between runs that differ only in their seed; None: unknown."""


ReadHeldOut = Callable[[Candidate, Candidate], HeldOut | None]
"""(champion, challenger) → their held-out values; None if there are none or the read budget is used up.

Called only when a promotion depends on it. The same arguments must always return the same values."""
