"""The search proposer: black-box optimization over the knobs that learns from every run, whoever proposed it.

It is stateless: each proposal is sampled from the runs in the ledger with a random state seeded by the study's seed and
the number of proposals so far, so a new engine continues exactly as the old one would have. Runs of the same point are
averaged; points that crashed are infeasible; runs that were stopped early count as far as they got; unfinished points
are pending, so that proposals of one batch differ.
Points that the guard would reject are never proposed and cost no run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from looplab.config import paths
from looplab.config.edits import Edit, Op
from looplab.config.expression import ExpressionError
from looplab.config.lab import ObjectiveConfig, SearchConfig
from looplab.decide.auto import AutoSampler, gp_startup
from looplab.decide.axes import Params, equal_values, find_axes
from looplab.decide.base import Proposal
from looplab.decide.collect import PointCollector
from looplab.decide.feasible import Repairer
from looplab.decide.history import History
from looplab.decide.optuna_models import OPTUNA_STARTUP, REPAIR_AFTER
from looplab.decide.packages import check_packages
from looplab.decide.points import SearchPoint
from looplab.decide.samplers import make_sampler
from looplab.decide.sampling import MAX_DRAWS, Sampler, generator
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem, Ruling
from looplab.ledger.roles import Role
from looplab.ledger.view import StudyView

if TYPE_CHECKING:
    from looplab.decide.belief import BelievedPoint, StudyBelief

MAX_REPEATS = 3
"""Maximum number of repeats of the config that the model believes in."""


class SearchProposer:
    name = "search"
    thinking = False

    def __init__(
        self,
        settings: SearchConfig,
        guard: Guard,
        base: dict[str, Any],
        goal: Literal["max", "min"],
        history: History,
        fixed: Collection[str] = (),
        *,
        objective: ObjectiveConfig | None = None,
        earlier: Callable[[], Sequence[tuple[str, History]]] | None = None,
    ) -> None:
        """
        Args:
            base: The config on which the proposals' edits are made.
            goal: Whether the objective is maximized or minimized.
            fixed: Paths of knobs that are not searched, such as the seed and the source of the weights.
            objective: The objective with its tie-break and further objectives; None: it has none of these.
            earlier: Returns earlier studies to learn from, by name; None: there are none.
        """
        check_packages(settings)
        self.problem: str | None = None
        self._settings = settings
        self._guard = guard
        self._base = base
        self._goal: Literal["max", "min"] = goal
        self.axes, left_out = find_axes(guard, base, fixed)
        self._note = f"not searched: {'; '.join(left_out)}" if left_out else None
        base_params = {axis.path: axis.to_param(axis.base) for axis in self.axes}
        base_params = {path: param for path, param in base_params.items() if param is not None}
        self._base_params = base_params
        self._filled_base = guard.with_defaults(base)
        self._knob_paths = {axis.path: axis.knob.path for axis in self.axes}
        self._repairer = Repairer(
            self.axes, guard, self._problems, base_params, self._settle if guard.used_if else None
        )
        self._collector = PointCollector(
            settings, guard, base, history, self.axes, goal=goal, settle=self._settle if guard.used_if else None,
            then=objective.then if objective is not None else None, earlier=earlier if settings.transfer else None,
        )  # fmt: skip
        further = objective.pareto if objective is not None and not objective.is_priced else []
        self._sampler = None
        if self.axes:
            self._sampler = make_sampler(
                settings, self.axes, goal, self._repairer, further=further, earlier=self._earlier_points
            )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        if self._sampler is None:
            self.problem = "no knob can be searched" + (f" ({self._note})" if self._note else "; name some in knobs:")
            return []
        self.problem, self._note = self._note, None
        return self._sample_proposals(study, n)

    def spread(self, study: StudyView, n: int, besides: Sequence[Proposal] = ()) -> list[Proposal]:
        """Return space-filling proposals, whatever was measured; without `auto`, those of the sampler.

        Args:
            besides: Proposals that are made together with them, whose configs are not proposed again.
        """
        sampler = self._sampler.uniform if isinstance(self._sampler, AutoSampler) else self._sampler
        return [] if sampler is None else self._sample_proposals(study, n, sampler, besides)

    def _sample_proposals(
        self, study: StudyView, n: int, sampler: Sampler | None = None, besides: Sequence[Proposal] = ()
    ) -> list[Proposal]:
        points, taken = self._collector.collect(study)
        for ruling in (self._guard.check(self._base, proposal.edits) for proposal in besides):
            if ruling.config is not None:
                taken.add(self._collector.key(ruling.config))
        n_proposed = study.count_proposals(self.name)
        proposals: list[Proposal] = []
        for count in range(n_proposed, n_proposed + n):
            proposal = self._sample_proposal(count, points, taken, sampler)
            if proposal is None:
                break
            proposals.append(proposal)
        return proposals

    @property
    def startup(self) -> int:
        """Measured points before a model is used."""
        default = gp_startup(len(self.axes)) if self._settings.sampler == "auto" else OPTUNA_STARTUP
        return self._settings.startup or default

    def points(self, study: StudyView) -> list[SearchPoint]:
        """Return all points so far, ordered by their first run."""
        return self._collector.collect(study)[0]

    def params_of(self, config: dict[str, Any]) -> Params | None:
        """Return the point of a config; None if one of its values is outside the search space."""
        return self._collector.to_params(config)

    def params_after(self, edits: Sequence[str]) -> Params | None:
        """Return the point of a proposal."""
        ruling = self._guard.check(self._base, edits)
        return None if ruling.config is None else self._collector.to_params(ruling.config)

    def fill(self, study: StudyView, region: Mapping[str, Sequence[Any]]) -> Proposal:
        """Return the most promising new point of a region; its edits apply to the base config.

        Args:
            region: The lowest and the highest value of numeric knobs, and the allowed values of others, by path.

        Raises:
            LabError: A knob or a value of the region cannot be searched, or nothing new is legal there.
        """
        if not isinstance(self._sampler, AutoSampler):
            raise LabError("regions need `search` with the sampler auto")
        bounds = self._bounds(region)
        points, taken = self._collector.collect(study)
        count = study.count_proposals()
        proposal = self._sample_proposal(count, points, taken, self._sampler.inside(bounds))
        if proposal is None:
            raise LabError(self.problem or "no new point in this region is legal")
        return proposal

    def _bounds(self, region: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
        """Return the parameters that bound a region."""
        axes = {axis.path: axis for axis in self.axes}
        bounds: dict[str, tuple[Any, ...]] = {}
        for path, given in region.items():
            axis = axes.get(path)
            if axis is None:
                raise LabError(f"region: {path} is not searched; searched are {', '.join(sorted(axes))}")
            if isinstance(given, str) or not isinstance(given, Sequence) or not given:
                raise LabError(f"region: {path} needs a list: [low, high], or choices")
            if axis.choices and not axis.ordered:
                found = [axis.to_param(value) for value in given]
            else:
                numbers = [v for v in given if isinstance(v, int | float) and not isinstance(v, bool)]
                if len(given) != 2 or len(numbers) != 2 or not all(map(math.isfinite, numbers)):
                    raise LabError(f"region: {path} needs [low, high]")
                ends = min(numbers), max(numbers)
                if axis.choices:
                    inside = [i for i, choice in enumerate(axis.choices) if ends[0] <= choice <= ends[1]]
                    found = [inside[0], inside[-1]] if inside else [None]
                else:
                    low, high = axis.bounds
                    low, high = max(low, ends[0]), min(high, ends[1])
                    if axis.integer:
                        low, high = math.ceil(low), math.floor(high)
                    found = [low, high] if low <= high else [None]
            if None in found:
                raise LabError(f"region: {path} takes {axis.knob.describe()}")
            bounds[path] = tuple(found)
        return bounds

    def believe(self, study: StudyView, *, detail: bool = True) -> StudyBelief | None:
        """Return what the model believes about the study; None without a model, or before it has enough points.

        Args:
            detail: Whether to say what matters and what is uncertain, which takes most of the time.
        """
        if not isinstance(self._sampler, AutoSampler):
            return None
        from looplab.decide.belief import believe

        return believe(
            self.axes, self._sampler, self._collector.collect(study)[0], self._goal, self._earlier_names(), detail
        )

    def belief_slices(self, study: StudyView) -> dict[str, Any] | None:
        """Return what the model predicts along each knob; None without a model, or before it has enough points."""
        if not isinstance(self._sampler, AutoSampler):
            return None
        from looplab.decide.belief import belief_slices

        return belief_slices(self.axes, self._sampler, self._collector.collect(study)[0])

    def believe_before(self) -> dict[str, Any] | None:
        """Return what earlier studies predict before the first run; None if there are none."""
        if not isinstance(self._sampler, AutoSampler) or not self._earlier_names():
            return None
        from looplab.decide.belief import believe_before

        return believe_before(self.axes, self._sampler, self._earlier_names(), self._earlier_points(), self._goal)

    def repeat_due(self, study: StudyView) -> BelievedPoint | None:
        """Return the config that the model believes in if it should be repeated; else None.

        The first repetition is always worth its run: with a fixed seed, nothing else shows the noise. Where repeated
        runs measured exactly the same, or differ less than the model doubts, there are no others.
        """
        share = self._settings.repeat_share
        if not share or not isinstance(self._sampler, AutoSampler):
            return None
        runs = [run for run in study.runs() if run.role != Role.IMPORTED]
        repeats = sum(run.role == Role.REPLICATE and run.proposer == self.name for run in runs)
        if repeats + 1 > share * len(runs):
            return None
        belief = self.believe(study, detail=False)
        if belief is None or belief.is_deterministic:
            return None
        best = belief.best[0]
        if belief.repeated and belief.noise < best.sd:
            return None
        return None if best.runs > MAX_REPEATS or best.is_pending else best

    def _earlier_names(self) -> list[str]:
        return [name for name, _ in self._collector.earlier_studies()]

    def _earlier_points(self) -> list[list[SearchPoint]]:
        return [points for _, points in self._collector.earlier_studies()]

    def _sample_proposal(
        self, count: int, points: list[SearchPoint], taken: set[bytes], sampler: Sampler | None = None
    ) -> Proposal | None:
        """Return a proposal that is new and that the guard allows; None if there is none.

        Its point is added to `points` as pending.

        Args:
            sampler: Samples in the place of the study's own sampler.
        """
        assert self._sampler is not None
        sampler = sampler or self._sampler
        refused: list[SearchPoint] = []
        why = "every draw was already tried"
        n_rejected = 0
        for trial, (params, basis, spread) in enumerate(itertools.islice(sampler(count, points, refused), MAX_DRAWS)):
            if n_rejected >= REPAIR_AFTER and self._settings.sampler != "grid":  # most of the space is infeasible
                rng = generator(self._settings.seed, count, trial, 2)
                params = self._repairer.repair(params, rng, spread=spread) or params
            edits, ruling = self._rule(params)
            if ruling.config is None:
                why = f"the guard rejected the last draw: {ruling.problems[0].message}"
                n_rejected += 1
                refused.append(SearchPoint(params, crashes=1))
                continue
            key = self._collector.key(ruling.config)
            if key in taken:
                refused.append(SearchPoint(params, pending=1))
                continue
            taken.add(key)
            points.append(SearchPoint(self._collector.to_params(ruling.config) or params, pending=1))
            return Proposal(tuple(map(str, edits)), basis, self.name)
        if self._settings.sampler == "grid":
            why = "the grid is exhausted: every point has been tried or is rejected by the guard"
        self.problem = f"nothing new to try: {why}"
        return None

    def _problems(self, params: Params) -> tuple[Problem, ...]:
        if not self._repairer.coupled and not self._guard.used_if:
            return ()  # no rule depends on a knob that is searched, and points are inside of the ranges
        return self._rule(params)[1].problems

    def _rule(self, params: Params) -> tuple[list[Edit], Ruling]:
        """Return the edits of a point and the guard's ruling; knobs that are not used there are not edited."""
        edits = self._edits(params)
        while True:
            ruling = self._guard.check(self._base, edits)
            unused = {problem.key for problem in ruling.problems if problem.rule == "not used"}
            used = [edit for edit in edits if edit.path not in unused]
            if len(used) == len(edits):
                return edits, ruling
            edits = used

    def _settle(self, params: Params) -> Params:
        """Return the point with knobs that are not used there at their base values."""
        settled = dict(params)
        for _ in self.axes:  # whether a knob is used may depend on one that is not
            values = {axis.path: axis.to_value(settled[axis.path]) for axis in self.axes}
            unused = [path for path in self._base_params if not self._is_used(path, values)]
            before, settled = settled, {**settled, **{path: self._base_params[path] for path in unused}}
            if settled == before:
                break
        return settled

    def _is_used(self, path: str, values: Mapping[str, Any]) -> bool:
        condition = self._guard.used_if.get(self._knob_paths[path])
        if condition is None:
            return True

        def lookup(name: str) -> Any:
            if name in values:
                return values[name]
            found = paths.find(self._filled_base, name)
            if not found:
                raise KeyError(name)
            return paths.get(self._filled_base, found[0])

        try:
            return bool(condition.evaluate(lookup))
        except ExpressionError:
            return True

    def _edits(self, params: Params) -> list[Edit]:
        values = [(axis, axis.to_value(params[axis.path])) for axis in self.axes]
        return [Edit(axis.path, Op.SET, value) for axis, value in values if not equal_values(value, axis.base)]
