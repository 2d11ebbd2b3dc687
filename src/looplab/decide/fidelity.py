"""Search with fewer epochs: runs are stopped at rungs, and the promising ones are continued from their checkpoints.

For each run that becomes free, a new config competes with all stopped runs ("freeze–thaw"). The model knows the step of
every value: a stopped run counts with the final value that its curve is extrapolated to (`curves.extrapolate`), and its
standard deviation, in a Gaussian process over the knobs. What the process says about a stopped run without its own
value is combined with its own extrapolation; chosen is the largest expected improvement of the final value on the best
finished run. What ASHA promotes is continued before a new config is started. Instead of the model, ranks alone can
decide: ASHA, Hyperband or successive halving (`rungs`).

A continuation is a separate run, whose parent is the run so far. It is proposed once for each stopped run, whatever
dies, since its source is an idempotency key. Without checkpoints runs are only stopped, by a pruner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from looplab.config.lab import FidelityConfig
from looplab.decide.base import Proposal
from looplab.decide.curves import Curve
from looplab.decide.history import History, PastRun
from looplab.decide.rungs import Rungs, halving, promotable
from looplab.judge.base import Verdict
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.view import RunRow, StudyView

if TYPE_CHECKING:
    from looplab.decide.axes import Params
    from looplab.decide.fidelity_model import FidelityModel
    from looplab.decide.search import SearchProposer

SPREAD_PERIOD = 3
"""One new config in SPREAD_PERIOD fills the space instead of following the model: what learns slowly looks bad at the
first rung, and there, exploring costs a small part of a run."""
MAX_ATTEMPTS = 3
"""How often a run is continued if nothing comes of it (the machine is switched off, say)."""


@dataclass(slots=True)
class Chain:
    """A run and its continuations, which are one training."""

    root: RunRow
    tip: RunRow
    """Its last segment that has measured something; the first one if none has."""
    curve: Curve = ()
    """The objective over all segments, lower is better."""
    open: bool = False
    """Whether a segment is planned or running."""
    failed: bool = False
    finished: bool = False
    can_continue: bool = False
    """Whether the last segment was stopped at a rung."""
    attempts: int = 0
    """Continuations of the tip that have measured nothing."""
    runs: list[str] = field(default_factory=list)

    @property
    def is_stopped(self) -> bool:
        """Whether it can be continued now."""
        return self.can_continue and not self.open and bool(self.curve) and self.attempts < MAX_ATTEMPTS


def find_chains(ended: Sequence[PastRun], still_open: Sequence[RunRow], sign: float) -> list[Chain]:
    """Return the trainings of a study in the order in which they began; repetitions are left out.

    Args:
        ended: The ended runs, oldest first.
        still_open: Planned and running runs.
        sign: 1 to minimize the objective, -1 to maximize it.
    """
    by_run: dict[str, Chain] = {}
    chains: list[Chain] = []
    past = {one.run.id: one for one in ended}
    for run in sorted([*(one.run for one in ended), *still_open], key=lambda run: run.n):
        if run.role not in DECIDED:
            continue
        chain = by_run.get(run.parent or "") if run.role == Role.CONTINUATION else None
        if chain is None:
            chain = Chain(run, run)
            chains.append(chain)
        by_run[run.id] = chain
        chain.runs.append(run.id)
        one = past.get(run.id)
        if one is None:
            chain.open = True
        elif run.verdict == Verdict.VOID:  # what it has measured is not believed, and nothing is continued from it
            chain.curve, chain.finished, chain.can_continue, chain.failed = (), False, False, True
        elif one.curve:
            chain.tip, chain.attempts = run, 0
            chain.curve = tuple((step, sign * value) for step, value in one.curve)
            chain.finished = run.status == "ok"
            chain.can_continue = one.stopped_at_rung
            chain.failed = run.status in ("failed", "timeout")
        else:
            chain.attempts += 1
            chain.failed = run.status in ("failed", "timeout", "ok")
            chain.can_continue = chain.can_continue and not chain.failed
    return chains


class FidelityProposer:
    """The search, with rungs."""

    thinking = False

    def __init__(
        self,
        settings: FidelityConfig,
        search: SearchProposer,
        history: History,
        *,
        goal: Literal["max", "min"],
        can_continue: bool,
    ) -> None:
        """
        Args:
            search: Proposes new configs.
            can_continue: Whether runs leave checkpoints; if not, a pruner stops runs, and nothing is continued.
        """
        self.name = search.name
        self.problem: str | None = None
        self._settings = settings
        self._search = search
        self._history = history
        self._sign = -1.0 if goal == "max" else 1.0
        self._can_continue = can_continue
        self._params: dict[str, Params | None] = {}  # by run
        self._model: FidelityModel | None = None  # needs numpy

    def close(self) -> None:
        self._search.close()

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        self.problem = None
        if not self._can_continue:
            return self._new(study, n)
        ended = self._history.ended()
        chains = find_chains(ended, study.runs_open(), self._sign)
        rungs = Rungs.of(self._settings, whole_steps(chains))
        if rungs is None:
            return self._new(study, n)
        restarted = next((one.run.id for one in ended if one.restarted), None)
        if restarted is not None:
            self.problem = (
                f"no run is continued: run {restarted} started again at its first step, although it had a checkpoint "
                "to resume from; let the trainer resume its step, or remove `fidelity`"
            )
            return self._new(study, n)
        by = self._by_model if self._settings.scheduler == "model" else self._by_rank
        return self._with_spread(study, by(study, n, chains, rungs), chains)

    def _with_spread(self, study: StudyView, proposals: list[Proposal], chains: Sequence[Chain]) -> list[Proposal]:
        """Return the proposals with one new config in SPREAD_PERIOD replaced by one that fills the space."""
        begun = sum(chain.root.role == Role.TRIAL for chain in chains)
        new = [i for i, proposal in enumerate(proposals) if not proposal.continues]
        replaced = [i for k, i in enumerate(new, begun + 1) if k % SPREAD_PERIOD == 0]
        if not replaced:
            return proposals
        besides = [proposals[i] for i in new if i not in replaced]
        found = list(proposals)
        for i, drawn in zip(replaced, self._search.spread(study, len(replaced), besides), strict=False):
            found[i] = replace(drawn, until=proposals[i].until)
        return found

    def _new(self, study: StudyView, n: int, until: float | None = None) -> list[Proposal]:
        proposals = self._search.propose(study, n)
        self.problem = self._search.problem or self.problem
        return [replace(proposal, until=until) for proposal in proposals]

    def _continuation(self, chain: Chain, rungs: Rungs, why: str) -> Proposal:
        last = chain.curve[-1][0]
        until = rungs.next_above(last)
        end = "to its end" if until is None else f"to step {until:g}"
        attempt = f":{chain.attempts + 1}" if chain.attempts else ""
        return Proposal(
            (), f"continued from step {last:g} {end}: {why}", self.name, parent=chain.tip.id,
            source=f"{self.name}:continue:{chain.tip.id}{attempt}", continues=True, until=until,
        )  # fmt: skip

    # -- by ranks

    def _by_rank(self, study: StudyView, n: int, chains: Sequence[Chain], rungs: Rungs) -> list[Proposal]:
        by_name = {chain.root.id: chain for chain in chains}
        curves = {name: chain.curve for name, chain in by_name.items() if chain.curve}
        stopped = {name: chain.curve for name, chain in by_name.items() if chain.is_stopped}
        scheduler = self._settings.scheduler
        has_room = True
        if scheduler == "halving":
            order = [name for name, chain in by_name.items() if chain.root.role != Role.BASE]
            ended = {name for name, chain in by_name.items() if not chain.open}
            names, has_room = halving(rungs, order, curves, stopped, ended)
            found = [self._continuation(by_name[name], rungs, self._rank(rungs)) for name in names[:n]]
        else:
            found = self._promotions(chains, rungs)[:n]
        if not has_room:
            return found
        room = n - len(found)
        if scheduler == "halving":  # a bracket is not longer than its size
            size = rungs.reduction_factor ** len(rungs.steps)
            room = min(room, size - len(order) % size if order else size)
        if scheduler != "hyperband":
            return found + (self._new(study, room, rungs.next_above(0.0)) if room else [])
        count = sum(chain.root.role == Role.TRIAL for chain in chains)
        new = self._new(study, room) if room else []
        return found + [replace(one, until=rungs.first_step(count + i)) for i, one in enumerate(new)]

    def _promotions(self, chains: Sequence[Chain], rungs: Rungs) -> list[Proposal]:
        """Return the continuations of all runs that ASHA promotes."""
        by_name = {chain.root.id: chain for chain in chains}
        curves = {name: chain.curve for name, chain in by_name.items() if chain.curve}
        stopped = {name: chain.curve for name, chain in by_name.items() if chain.is_stopped}
        names = promotable(rungs, curves, stopped)
        return [self._continuation(by_name[name], rungs, self._rank(rungs)) for name in names]

    def _rank(self, rungs: Rungs) -> str:
        return f"among the best 1/{rungs.reduction_factor} at its rung"

    # -- by the model

    def _by_model(self, study: StudyView, n: int, chains: Sequence[Chain], rungs: Rungs) -> list[Proposal]:
        from looplab.decide.fidelity_model import FidelityModel, Option

        first = rungs.next_above(0.0)
        stopped = [chain for chain in chains if chain.is_stopped]
        points = self._search.points(study)
        if sum(point.known for point in points) < self._search.startup or not stopped:
            return self._new(study, n, first)
        if not any(point.value is not None for point in points):  # nothing to extrapolate from
            return self._by_rank(study, n, chains, rungs)
        new = self._new(study, n, first)
        proposals, options = [], []
        for proposal in new:
            params = self._search.params_after(proposal.edits)
            if params is not None:
                proposals.append(proposal)
                options.append(Option(params))
        for chain in stopped:
            params = self._params_of(chain)
            if params is None:
                continue
            why = f"the largest expected improvement per step on {len(points)} points"
            proposals.append(self._continuation(chain, rungs, why))
            options.append(Option(params, chain.curve[-1][0]))
        if self._model is None:
            self._model = FidelityModel(self._search.axes, self._sign)
        gains = self._model.scores(points, options)
        scores = [gain - math.log(rungs.steps_to(option.step)) for gain, option in zip(gains, options, strict=True)]
        ranked = sorted(range(len(options)), key=lambda i: (-scores[i], i))
        chosen = [proposals[i] for i in ranked[:n]]
        # The model may be wrong about the rungs that few runs have reached: a run that ASHA promotes is never left out
        # for a new config.
        continued = [proposal for proposal in chosen if proposal.continues]
        promoted = [one for one in self._promotions(chains, rungs) if one.source not in {p.source for p in continued}]
        left = [proposal for proposal in chosen if not proposal.continues]
        return [*continued, *promoted, *left][:n]

    def _params_of(self, chain: Chain) -> Params | None:
        if chain.tip.id not in self._params:
            config = next(one.config for one in self._history.ended() if one.run.id == chain.tip.id)
            self._params[chain.tip.id] = self._search.params_of(config)
        return self._params[chain.tip.id]


def whole_steps(chains: Sequence[Chain]) -> float | None:
    """Return the last step of a whole run; None if none has finished."""
    last = [chain.curve[-1][0] for chain in chains if chain.finished and chain.curve]
    return statistics.median(last) if last else None
