"""A mix of proposers: each is asked as often as its runs have earned, by Thompson sampling on the ledger.

Every decided run of a proposer is evidence: it was kept, it was at least worth replicates, or it was not. Old evidence
fades, since merits change as a study goes on; pending runs say nothing yet. What is expected of a proposer without
evidence is what all of them together achieved, so that trying it costs little; and none falls out for good, since each
is asked again when it has not had a turn for a while. The choice follows from the seed and the ledger alone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from looplab.decide.base import FallibleProposer, Proposal, Proposer, ask
from looplab.ledger.study import StudyLedger

HALF_LIFE = 20.0
"""After so many further decided runs, evidence counts half."""
PARTIAL = 0.3
"""The credit of a run that was worth replicates, or is undecided after all, as a share of one that was kept."""
PRIOR = 2.0
"""How many runs' worth of belief each proposer begins with."""
TURN = 10
"""Each proposer has at least one of so many proposals."""
CRASHED = ("failed", "timeout", "lost")


@dataclass(frozen=True, slots=True)
class Credit:
    """What a proposer has achieved in a study."""

    proposals: int
    """All that it proposed, refused ones among them."""
    kept: int
    """Judged better than the champion; in a study without a judge, the best so far when they ended."""
    partial: int
    """Undecided in the end, or not kept, but worth replicates."""
    discarded: int
    crashed: int
    waiting: int
    """Not decided yet."""
    good: float
    """The evidence for it, faded with age."""
    bad: float
    """The evidence against it, faded with age."""
    mean: float
    """What is expected of its next run, between 0 and 1."""
    weight: float
    """The same as a share among all proposers."""

    def draw(self, rng: random.Random) -> float:
        """A value that its runs may well be worth, given the evidence."""
        strength = self.good + self.bad + PRIOR
        return rng.betavariate(self.mean * strength, (1 - self.mean) * strength)


class Mix:
    name = "mix"

    def __init__(self, proposers: Sequence[Proposer], seed: int, *, patient: bool = True) -> None:
        self.problem: str | None = None
        self._patient = patient
        """Whether the others wait for one that thinks, so that it gets its share."""
        self._proposers = tuple(proposers)
        self._names = tuple(dict.fromkeys(proposer.name for proposer in proposers))
        self._seed = seed
        self._turn = max(TURN, 2 * len(proposers))
        self._weights = {name: 1 / len(self._names) for name in self._names}

    def weights(self) -> dict[str, float]:
        """What is expected of each proposer's runs, as shares, when it was last asked."""
        return dict(self._weights)

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
        self._weights = {name: round(one.weight, 4) for name, one in credits.items()}
        ranking = self._allocate(study, credits, n)
        shares = Counter(order[0] for order in ranking)
        got: dict[int, list[Proposal]] = {}
        problems: list[str] = []
        open_ = 0  # what those asked so far have left of their shares; the next one is asked for that too
        for place in dict.fromkeys(chain((order[0] for order in ranking), *ranking)):
            wanted = shares[place] + open_
            if not wanted:
                continue
            proposer = self._proposers[place]
            got[place] = _new(ask(proposer, study, wanted), got.values())[:wanted]
            open_ = 0 if proposer.thinking and self._patient else wanted - len(got[place])
            if proposer.problem is not None:
                problems.append(f"{proposer.name}: {proposer.problem}")
        self.problem = "; ".join(problems) or None
        proposals = _interleave(got, [order[0] for order in ranking])
        if proposals:
            with study.ledger.write():
                chosen = dict(Counter(proposal.proposer for proposal in proposals))
                study.ledger.record(self.name, study.name, weights=self._weights, chosen=chosen)
        return proposals

    def _allocate(self, study: StudyLedger, credits: Mapping[str, Credit], n: int) -> list[list[int]]:
        """For each of `n` proposals, the places of the proposers in the order in which they should be asked."""
        ledger = study.ledger
        made = ledger.rows("SELECT count(*) FROM proposals WHERE study=?", (study.name,))[0][0]
        rng = random.Random(f"{self._seed}:{made}")  # noqa: S311 (a choice, no secret)
        sql = (
            "SELECT proposer FROM proposals WHERE study=? AND proposer IN (SELECT value FROM json_each(?))"
            " ORDER BY id DESC LIMIT ?"
        )
        rows = ledger.rows(sql, (study.name, json.dumps(self._names), self._turn - 1))
        recent = [row["proposer"] for row in reversed(rows)]
        ranking = []
        for _ in range(n):
            drawn = {place: credits[one.name].draw(rng) for place, one in enumerate(self._proposers)}
            window = recent[1 - self._turn :]
            due = {place for place, one in enumerate(self._proposers) if one.name not in window}
            order = sorted(drawn, key=lambda place: (place not in due, -drawn[place]))
            ranking.append(order)
            recent.append(self._proposers[order[0]].name)
        return ranking


def _new(proposals: Iterable[Proposal], had: Iterable[Sequence[Proposal]]) -> list[Proposal]:
    """Without those that wait in the ledger and were given by another proposer already."""
    ids = {proposal.id for given in had for proposal in given} - {None}
    return [proposal for proposal in proposals if proposal.id not in ids]


def _interleave(got: Mapping[int, Sequence[Proposal]], order: Sequence[int]) -> list[Proposal]:
    """In the order of the turns; what fills a place that its owner left open comes last."""
    left = {place: list(proposals) for place, proposals in got.items()}
    proposals = [left[place].pop(0) for place in order if left.get(place)]
    return [*proposals, *chain.from_iterable(left.values())]


def credit(study: StudyLedger, names: Sequence[str] | None = None) -> dict[str, Credit]:
    """What each proposer has achieved; of all that proposed anything if no names are given."""
    counted = study.ledger.rows("SELECT proposer, count(*) FROM proposals WHERE study=? GROUP BY 1", (study.name,))
    proposals = {row[0]: int(row[1]) for row in counted}
    names = tuple(names if names is not None else proposals)
    fates: dict[str, Counter[str]] = {name: Counter() for name in names}
    decided: list[tuple[str, float]] = []
    for proposer, fate in _fates(study):
        if proposer in fates:
            fates[proposer][fate] += 1
            if fate != "waiting":
                decided.append((proposer, {"kept": 1.0, "partial": PARTIAL}.get(fate, 0.0)))
    good, bad = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for age, (proposer, worth) in enumerate(reversed(decided)):
        fresh = 0.5 ** (age / HALF_LIFE)
        good[proposer] += fresh * worth
        bad[proposer] += fresh * (1 - worth)
    usual = (sum(good.values()) + 1) / (sum(good.values()) + sum(bad.values()) + 2)
    means = {name: (good[name] + PRIOR * usual) / (good[name] + bad[name] + PRIOR) for name in names}
    whole = sum(means.values())
    return {
        name: Credit(
            proposals=proposals.get(name, 0),
            kept=fates[name]["kept"],
            partial=fates[name]["partial"],
            discarded=fates[name]["discarded"],
            crashed=fates[name]["crashed"],
            waiting=fates[name]["waiting"],
            good=good[name],
            bad=bad[name],
            mean=means[name],
            weight=means[name] / whole,
        )
        for name in names
    }


def _fates(study: StudyLedger) -> list[tuple[str, str]]:
    """What became of every proposed run, with its proposer, in the order in which they were planned."""
    row = study.ledger.one("SELECT goal, judge_state FROM studies WHERE name=?", (study.name,))
    larger = row is not None and row["goal"] == "max"
    runs = [run for run in study.runs() if run.state != "ended" or run.started is not None]  # others never were
    repeated = {run.point for run in runs if run.role == "replicate"}
    judged = (row is not None and row["judge_state"] is not None) or any(run.verdict for run in runs)
    fates: dict[str, str] = {}
    bar: float | None = None
    for run in sorted(runs, key=lambda run: (run.ended is None, run.ended or 0.0, run.n)):
        if run.role not in ("base", "trial"):
            continue
        value = run.objective
        best = value is not None and (bar is None or (value > bar if larger else value < bar))
        bar = value if best else bar
        if run.state != "ended":
            fate = "waiting"
        elif run.verdict == "crash" or (run.verdict is None and run.status in CRASHED):
            fate = "crashed"
        elif not judged:
            fate = "kept" if best else "discarded"
        elif run.verdict == "keep":
            fate = "kept"
        elif run.verdict == "inconclusive" or (run.verdict == "discard" and run.point in repeated):
            fate = "partial"
        else:
            fate = "waiting" if run.verdict is None else "discarded"
        fates[run.id] = fate
    return [(run.proposer, fates[run.id]) for run in runs if run.role == "trial"]
