"""A multi-armed bandit over proposers: Thompson sampling with a Beta posterior per proposer.

The reward of a decided run is 1 if it was kept, PARTIAL if it was at least worth replicates, else 0. Rewards are
discounted with age, since the merits of proposers change during a study; undecided runs do not count. The prior mean of
each proposer is the mean reward of all, and each has at least one proposal in TURN, so none drops out for good. The
choice depends on the seed and the ledger alone. An agent makes at most three of ten proposals until it has earned more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from looplab.decide.base import FallibleProposer, Proposal, Proposer, ask
from looplab.ledger.catalogue import MixEvent
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import StudyView

HALF_LIFE = 20.0
"""Decided runs after which a reward counts half."""
PARTIAL = 0.3
"""Reward of a run that was worth replicates but not kept, or whose verdict is inconclusive."""
PRIOR = 2.0
"""Strength of the prior, in runs."""
TURN = 10
"""Each proposer makes at least one of this many consecutive proposals."""
AGENT_SHARE = 0.3
"""Largest share of an agent in the proposals until it has earned more."""
MIN_DECIDED = 5
"""Minimum number of decided runs before an agent's share can grow to its weight, if no proposer has a larger one."""
CRASHED = ("failed", "timeout", "lost")
"""Statuses of crashed runs."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The record of a proposer in a study."""

    proposals: int
    """All its proposals, including rejected ones."""
    kept: int
    """Runs judged better than the champion; without a judge, runs that were the best so far when they ended."""
    partial: int
    """Runs that were inconclusive, or not kept but worth replicates."""
    discarded: int
    crashed: int
    waiting: int
    """Runs that are not decided yet."""
    good: float
    """Discounted sum of rewards."""
    bad: float
    """Discounted sum of 1 minus the reward."""
    mean: float
    """Posterior mean of the reward, between 0 and 1."""
    weight: float
    """The mean as a share of the sum over all proposers."""

    def draw(self, rng: random.Random) -> float:
        """Sample a mean reward from the posterior."""
        strength = self.good + self.bad + PRIOR
        return rng.betavariate(self.mean * strength, (1 - self.mean) * strength)


class Mix:
    """A proposer that chooses among others."""

    name = "mix"

    def __init__(self, proposers: Sequence[Proposer], seed: int, *, patient: bool = True) -> None:
        """`patient`: whether the others wait for a proposer that is still thinking, so that it gets its share."""
        self.problem: str | None = None
        self._patient = patient
        self._proposers = tuple(proposers)
        self._names = tuple(dict.fromkeys(proposer.name for proposer in proposers))
        self._seed = seed
        self._turn = max(TURN, 2 * len(proposers))

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        return self._proposers

    @property
    def thinking(self) -> bool:
        return any(proposer.thinking for proposer in self._proposers)

    @property
    def failure(self) -> str | None:
        failures = [one.failure for one in self._proposers if isinstance(one, FallibleProposer)]
        return next(filter(None, failures), None)

    @property
    def retry_at(self) -> float | None:
        times = [one.retry_at for one in self._proposers if isinstance(one, FallibleProposer)]
        return min((at for at in times if at is not None), default=None)

    def close(self) -> None:
        for proposer in self._proposers:
            proposer.close()

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        for proposer in self._proposers:
            if proposer.thinking:
                proposals = ask(proposer, study, n)
                if proposals or (proposer.thinking and self._patient):
                    return proposals
        credits = credit(study, self._names)
        weights = {name: round(one.weight, 4) for name, one in credits.items()}
        ranking = self._allocate(study, credits, n)
        shares = Counter(order[0] for order in ranking)
        received: dict[int, list[Proposal]] = {}
        problems: list[str] = []
        unfilled = 0  # the unused shares of the proposers asked so far, passed on to the next one
        for index in dict.fromkeys(chain((order[0] for order in ranking), *ranking)):
            count = shares[index] + unfilled
            if not count:
                continue
            proposer = self._proposers[index]
            received[index] = _without_duplicates(ask(proposer, study, count), received.values())[:count]
            unfilled = 0 if proposer.thinking and self._patient else count - len(received[index])
            if proposer.problem is not None:
                problems.append(f"{proposer.name}: {proposer.problem}")
        self.problem = "; ".join(problems) or None
        proposals = _interleave(received, [order[0] for order in ranking])
        if proposals:
            with study.ledger.write():
                chosen = dict(Counter(proposal.proposer for proposal in proposals))
                study.ledger.record(MixEvent(weights=weights, chosen=chosen), study.name)
        return proposals

    def _allocate(self, study: StudyLedger, credits: Mapping[str, Credit], n: int) -> list[list[int]]:
        """Return, for each of `n` proposals, the indices of the proposers in the order in which to ask them."""
        rng = random.Random(f"{self._seed}:{study.count_proposals()}")  # noqa: S311 (not a secret)
        recent = study.last_proposers(self._names, self._turn - 1)
        ranking = []
        for _ in range(n):
            sampled = {index: credits[one.name].draw(rng) for index, one in enumerate(self._proposers)}
            window = recent[1 - self._turn :]
            capped = {index for index, one in enumerate(self._proposers) if _is_capped(one.name, window, credits)}
            due = {index for index, one in enumerate(self._proposers) if one.name not in window}
            order = sorted(sampled, key=lambda index: (index in capped, index not in due, -sampled[index]))
            ranking.append(order)
            recent.append(self._proposers[order[0]].name)
        return ranking


def _is_capped(name: str, window: Sequence[str], credits: Mapping[str, Credit]) -> bool:
    """Return whether one more proposal would give an agent a larger share than it has earned.

    Args:
        window: Who made the latest proposals.
    """
    if name != "agent" or len(credits) < 2:
        return False
    own = credits[name]
    decided = own.kept + own.partial + own.discarded + own.crashed
    has_earned = decided >= MIN_DECIDED and own.weight >= max(one.weight for one in credits.values())
    share = max(AGENT_SHARE, own.weight) if has_earned else AGENT_SHARE
    return window.count(name) + 1 > max(1.0, share * (len(window) + 1) + 1e-9)


def _without_duplicates(proposals: Iterable[Proposal], received: Iterable[Sequence[Proposal]]) -> list[Proposal]:
    """Drop proposals from the ledger's queue that another proposer has returned already."""
    ids = {proposal.id for others in received for proposal in others} - {None}
    return [proposal for proposal in proposals if proposal.id not in ids]


def _interleave(received: Mapping[int, Sequence[Proposal]], order: Sequence[int]) -> list[Proposal]:
    """Return the proposals in the order of the turns; those that fill another proposer's share come last."""
    left = {index: list(proposals) for index, proposals in received.items()}
    proposals = [left[index].pop(0) for index in order if left.get(index)]
    return [*proposals, *chain.from_iterable(left.values())]


def credit(study: StudyView, names: Sequence[str] | None = None) -> dict[str, Credit]:
    """Return the record of each proposer; None: all that have proposed anything."""
    proposals = study.proposals_by_proposer()
    names = tuple(names if names is not None else proposals)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    decided: list[tuple[str, float]] = []
    for proposer, outcome in _outcomes(study):
        if proposer in outcomes:
            outcomes[proposer][outcome] += 1
            if outcome != "waiting":
                decided.append((proposer, {"kept": 1.0, "partial": PARTIAL}.get(outcome, 0.0)))
    good, bad = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for age, (proposer, reward) in enumerate(reversed(decided)):
        discount = 0.5 ** (age / HALF_LIFE)
        good[proposer] += discount * reward
        bad[proposer] += discount * (1 - reward)
    prior_mean = (sum(good.values()) + 1) / (sum(good.values()) + sum(bad.values()) + 2)
    means = {name: (good[name] + PRIOR * prior_mean) / (good[name] + bad[name] + PRIOR) for name in names}
    total = sum(means.values())
    return {
        name: Credit(
            proposals=proposals.get(name, 0),
            kept=outcomes[name]["kept"],
            partial=outcomes[name]["partial"],
            discarded=outcomes[name]["discarded"],
            crashed=outcomes[name]["crashed"],
            waiting=outcomes[name]["waiting"],
            good=good[name],
            bad=bad[name],
            mean=means[name],
            weight=means[name] / total,
        )
        for name in names
    }


def _outcomes(study: StudyView) -> list[tuple[str, str]]:
    """Return the proposer and the outcome of every proposed run, in the order in which they were planned."""
    maximize = study.goal() == "max"
    runs = study.outcomes()
    judged = study.judge_state() is not None or any(run.verdict for run in runs)
    outcomes: dict[str, str] = {}
    best_value: float | None = None
    for run in sorted(runs, key=lambda run: (run.ended is None, run.ended or 0.0, run.n)):
        if run.role not in DECIDED:
            continue
        value = run.objective
        is_best = value is not None and (best_value is None or (value > best_value if maximize else value < best_value))
        best_value = value if is_best else best_value
        if run.state != "ended":
            outcome = "waiting"
        elif run.verdict == "crash" or (run.verdict is None and run.status in CRASHED):
            outcome = "crashed"
        elif not judged:
            outcome = "kept" if is_best else "discarded"
        elif run.verdict == "keep":
            outcome = "kept"
        elif run.verdict == "inconclusive" or (run.verdict == "discard" and run.is_replicated):
            outcome = "partial"
        else:
            outcome = "waiting" if run.verdict is None else "discarded"
        outcomes[run.id] = outcome
    for run in sorted(runs, key=lambda run: run.n, reverse=True):
        if run.role == Role.CONTINUATION and run.parent in outcomes:
            outcomes[run.parent] = outcomes[run.id]  # the outcome of the whole training
    return [(run.proposer, outcomes[run.id]) for run in runs if run.role == Role.TRIAL]
