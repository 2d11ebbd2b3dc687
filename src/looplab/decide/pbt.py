"""Population-based training: members are trained side by side, and the worst continue from copies of the best.

Every `interval` steps all members are compared. Those at the bottom continue from the checkpoint of a member at the top
("exploit"), with knobs that are changed a little inside their ranges and the guard ("explore"); all others continue as
they are. The result is a training whose knobs have changed on the way, not a config: what a warm start of one run from
another is to the judge, a copied member is too.

Everything is computed from the ledger. The source of a proposal, `pbt:MEMBER:GENERATION`, makes it unique, whatever
dies.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from looplab.config.edits import Edit, Op
from looplab.config.lab import PbtConfig, SearchConfig
from looplab.decide.axes import Axis
from looplab.decide.base import Proposal
from looplab.decide.fidelity import find_chains, whole_steps
from looplab.decide.history import History, PastRun
from looplab.decide.search import SearchProposer
from looplab.guard.guard import Guard
from looplab.judge.base import Verdict
from looplab.ledger.roles import Role
from looplab.ledger.view import RunRow, StudyView

MAX_REJECTED = 3
"""Proposals for one generation of a member that may be rejected before the member is given up."""
MAX_DRAWS = 32
"""Number of draws of changed knobs; the first that the guard accepts is proposed."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the population in its latest generation."""

    index: int
    generation: int
    run: RunRow | None
    """None: it was never planned."""
    rejected: int
    """Proposals for its next generation that were rejected."""


class PbtProposer:
    """Proposes the next generation when all members have ended the present one."""

    name = "pbt"
    thinking = False

    def __init__(
        self,
        settings: PbtConfig,
        guard: Guard,
        base: dict[str, Any],
        history: History,
        *,
        goal: Literal["max", "min"],
        fixed: Collection[str] = (),
    ) -> None:
        """
        Args:
            base: The config on which the edits of the first generation are made.
            fixed: Paths of knobs that are not changed, such as the seed and the source of the weights.
        """
        self.problem: str | None = None
        self._settings = settings
        self._guard = guard
        self._history = history
        self._sign = -1.0 if goal == "max" else 1.0
        sampler = SearchConfig(sampler="qmc", seed=settings.seed)
        self._first = SearchProposer(sampler, guard, base, goal, history, fixed)
        self._first.name = self.name

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        self.problem = None
        members = self._members(study)
        new = [member for member in members if member.run is None and member.rejected < MAX_REJECTED]
        if new:
            return self._begin(study, new[:n])
        past = {one.run.id: one for one in self._history.ended()}
        alive = [member for member in members if member.run is not None]
        generation = min((member.generation for member in alive), default=0)
        present = [member for member in alive if member.generation == generation]
        if any(member.run is not None and member.run.state != "ended" for member in present):
            return []  # the generation is not complete
        return self._next_generation(study, members, generation, past)[:n]

    def _begin(self, study: StudyView, members: list[Member]) -> list[Proposal]:
        found = self._first.propose(study, len(members))
        self.problem = self._first.problem
        return [
            Proposal(
                one.edits, f"member {member.index + 1} of {self._settings.population}", self.name,
                source=self._source(member.index, 0, member.rejected), until=self._settings.interval,
            )
            for member, one in zip(members, found, strict=False)
        ]  # fmt: skip

    def _members(self, study: StudyView) -> list[Member]:
        latest: dict[int, tuple[int, str]] = {}
        rejected: dict[tuple[int, int], int] = {}
        for row in study.proposals():
            parts = (row.source or "").split(":")
            if row.proposer != self.name or len(parts) < 3:
                continue
            index, generation = int(parts[1]), int(parts[2])
            if row.run is None:
                rejected[index, generation] = rejected.get((index, generation), 0) + 1
            elif index not in latest or generation >= latest[index][0]:
                latest[index] = (generation, row.run)
        runs = {run.id: run for run in study.runs()}
        members = []
        for index in range(self._settings.population):
            generation, run = latest.get(index, (-1, ""))
            times = rejected.get((index, generation + 1), 0)
            members.append(Member(index, generation, runs.get(run), times))
        return members

    def _next_generation(
        self, study: StudyView, members: list[Member], generation: int, past: dict[str, PastRun]
    ) -> list[Proposal]:
        """Return proposals for all members of a complete generation that have none for the next one yet.

        The members are compared by the values of that generation, also if some have gone on since.
        """
        ended: dict[int, PastRun] = {}
        sources = {(self._parse(row.source)): row.run for row in study.proposals() if row.proposer == self.name}
        for member in members:
            run = sources.get((member.index, generation))
            if run is not None and run in past:
                ended[member.index] = past[run]
        values = {index: self._sign * one.curve[-1][1] for index, one in ended.items() if one.curve and _is_sound(one)}
        ranked = sorted(values, key=lambda index: (values[index], index))
        donors = [index for index in ranked if ended[index].stopped_at_rung]
        if not donors:
            return []  # all have finished, or failed
        k = max(1, int(self._settings.quantile * len(members)))
        bottom = set(ranked[max(len(ranked) - k, k) :]) | {m.index for m in members if m.index not in values}
        whole = whole_steps(find_chains(self._history.ended(), (), self._sign))
        found = []
        for member in members:
            if member.generation != generation or member.rejected >= MAX_REJECTED:
                continue
            rng = random.Random(f"{self._settings.seed} {member.index} {generation} {member.rejected}")  # noqa: S311
            one = ended.get(member.index)
            if one is not None and one.run.status == "ok":
                continue  # trained to its end
            copied = member.index in bottom or one is None or not one.stopped_at_rung
            donor = ended[rng.choice(donors[:k])] if copied else one
            assert donor is not None
            edits: tuple[str, ...] = ()
            if copied:
                edits = self._explore(donor.config, rng)
                why = f"member {member.index + 1} continues from run {donor.run.id}, one of the best, with new knobs"
            else:
                why = f"member {member.index + 1} continues"
            until: float | None = donor.curve[-1][0] + self._settings.interval
            if whole is not None and until is not None and until >= whole:
                until = None
            found.append(
                Proposal(
                    edits, why, self.name, parent=donor.run.id, continues=True, until=until,
                    source=self._source(member.index, generation + 1, member.rejected),
                )
            )  # fmt: skip
        return found

    def _explore(self, config: dict[str, Any], rng: random.Random) -> tuple[str, ...]:
        """Return edits that change the knobs of a config a little; the guard allows them, if any draw was allowed."""
        edits: list[Edit] = []
        params = self._first.params_of(config)
        for _ in range(MAX_DRAWS):
            edits = []
            for axis in self._first.axes if params is not None else ():
                old = params[axis.path] if params is not None else None
                value = axis.to_value(self._perturb(axis, old, rng))
                if value != axis.to_value(old):
                    edits.append(Edit(axis.path, Op.SET, value))
            if edits and not self._guard.check(config, edits).problems:
                break
        return tuple(map(str, edits))

    def _perturb(self, axis: Axis, param: Any, rng: random.Random) -> Any:
        if rng.random() < self._settings.resample:
            return axis.from_unit(rng.random())
        if axis.choices:
            low, high = axis.bounds
            return min(max(param + rng.choice((-1, 1)), low), high) if axis.ordered else param
        factor = self._settings.perturb if rng.random() < 0.5 else 1.0 / self._settings.perturb
        low, high = axis.bounds
        moved = param * factor
        if axis.integer and round(moved) == param:
            moved = param + (1 if factor > 1 else -1)
        return min(max(moved, low), high)

    def _source(self, index: int, generation: int, rejected: int) -> str:
        return f"{self.name}:{index}:{generation}" + (f":{rejected}" if rejected else "")

    @staticmethod
    def _parse(source: str | None) -> tuple[int, int]:
        parts = (source or "").split(":")
        return (int(parts[1]), int(parts[2])) if len(parts) >= 3 else (-1, -1)


def _is_sound(past: PastRun) -> bool:
    is_own = past.run.role in (Role.TRIAL, Role.CONTINUATION)
    return is_own and past.run.status in ("ok", "stopped") and past.run.verdict != Verdict.VOID
