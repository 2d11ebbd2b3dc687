"""The search proposer: black-box optimization over the knobs, which learns from every run whoever proposed it.

It is stateless: each proposal is sampled from the runs in the ledger with a random state seeded by the study's seed and
the number of proposals so far, so a new engine continues exactly as the old one would have. Runs of the same point are
averaged; points that crashed are infeasible; runs that were stopped early count as far as they got; unfinished points
are pending, so that proposals made together differ.
Points that the guard would reject are never proposed and cost no run.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from looplab import plugins
from looplab.config import paths
from looplab.config.edits import Edit, EditError, Op, apply_edits
from looplab.config.expression import ExpressionError
from looplab.config.files import canonical_json
from looplab.config.lab import ObjectiveConfig, SearchConfig, TieBreak
from looplab.config.paths import same
from looplab.decide.base import Proposal
from looplab.decide.curves import Curve
from looplab.decide.feasible import Repairer
from looplab.decide.history import History, PastRun
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem, Ruling
from looplab.guard.knobs import Knob, KnobTable
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.view import ProposalRow, RunRow, StudyView

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from looplab.decide.belief import BelievedPoint, StudyBelief
    from looplab.decide.surrogate import AcquisitionOptimizer, Region

Params = dict[str, Any]
"""A point as a sampler sees it: a number, or the index of a choice, for each path."""

MAX_DRAWS = 64
"""Draws for one proposal before the sampler gives up."""
OPTUNA_STARTUP = 10
"""Measured points before an Optuna model is used, if the lab sets no `startup`."""
GP_STARTUP = (6, 4, 16)
"""The same for looplab's own Gaussian process: the minimum, how many more than there are knobs, and the maximum."""
MAX_GP_POINTS = 300
"""Points beyond which an exact Gaussian process is slow. From there on TPE takes over; without Optuna, the process is
fitted to a subset of this size."""
EI_CANDIDATES = 64
"""Candidates of TPE for each draw; Optuna's default of 24 is low for many knobs."""
LOCAL_PERIOD = 3
"""With TPE, one proposal in LOCAL_PERIOD is a local step around the best point."""
INITIAL_STEP, MIN_STEP = 0.25, 0.03
"""Standard deviation of such a step, as a share of the axis: at the start of the study, and its lower limit."""
MAX_REPEATS = 3
"""How often the config that the model believes in is repeated at most."""
MIN_STARTUP = 4
"""The fewest measured points before the model is used, if there are earlier studies."""
MIN_EARLIER = 5
"""Measured points from which an earlier study is used."""
MAX_EARLIER_POINTS = 100
"""Points of an earlier study that are used."""
MAX_FROM_EARLIER = 2
"""Points of earlier studies that are tried first."""
MAX_GRID = 100_000
"""Points of the largest grid."""
MAX_STEPS = 1_000
"""Steps of a knob beyond which it is searched as continuous and rounded."""
REPAIR_AFTER = 8
"""Rejected draws after which further draws are repaired, and Optuna's Gaussian process, which is slow and keeps
drawing near the same point, is replaced by TPE."""
DIGITS = 6
"""Significant digits of a drawn number."""
NAMES = {"tpe": "TPE", "cmaes": "CMA-ES", "gp": "a Gaussian process", "random": "random draw", "qmc": "Sobol sequence"}
NEEDS = {
    "auto": ("numpy", "scipy", "threadpoolctl"),
    "tpe": ("optuna", "scipy"),
    "cmaes": ("cmaes", "optuna", "scipy"),
    "gp": ("optuna", "scipy", "torch"),
    "random": ("numpy",),
    "grid": (),
    "qmc": ("numpy", "scipy"),
}
"""The packages that a sampler imports."""
INFEASIBLE_RULES = {"constraint", "derive", "normalise"}
"""Rules of the guard that reject points inside the knobs' ranges; such points are infeasible."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A knob that is searched. Its values have three forms: in the config, as a sampler's parameter, and in [0, 1]."""

    path: str
    knob: Knob
    base: Any
    """Its value in the base config."""
    choices: tuple[Any, ...] = ()
    """The values of a finite knob, numbers in ascending order; empty for a range."""
    ordered: bool = False
    """Whether the choices are ordinal."""
    integer: bool = False

    @classmethod
    def from_knob(cls, path: str, knob: Knob, base: Any) -> Axis | str:
        """Return the axis, or the reason why the knob cannot be searched."""
        kind = knob.python_type(base)
        if knob.choices is not None:
            numbers = all(isinstance(c, int | float) and not isinstance(c, bool) for c in knob.choices)
            ordered = numbers and len(knob.choices) > 2
            choices = tuple(sorted(knob.choices)) if ordered else knob.choices
            return cls(path, knob, base, choices, ordered) if len(choices) > 1 else "it has one choice"
        if kind is bool:
            return cls(path, knob, base, (False, True))
        if kind is str or knob.low is None or knob.high is None:
            return "it has no bounds and no choices"
        axis = cls(path, knob, base, integer=kind is int)
        low, high = axis.bounds
        if not low < high:
            return "it has one value"
        if axis.integer or knob.step is None or (high - low) / knob.step > MAX_STEPS:
            return axis  # very fine steps: searched as continuous, then rounded
        steps = range(round((high - low) / knob.step) + 1)
        return replace(axis, choices=tuple(knob.nearest(low + i * knob.step, 1.0) for i in steps), ordered=True)

    @property
    def bounds(self) -> tuple[Any, Any]:
        """The lowest and the highest parameter."""
        if self.choices:
            return 0, len(self.choices) - 1
        assert self.knob.low is not None
        assert self.knob.high is not None
        low, high, step = self.knob.low, self.knob.high, self.knob.step
        if self.integer:
            low, high = math.ceil(low), math.floor(high)
        if step is not None:  # the last legal value may lie below the upper bound
            high = low + math.floor((high - low) / step + 1e-9) * step
        return low, high

    def distribution(self) -> BaseDistribution:
        """Return the axis as a distribution of Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        low, high = self.bounds
        if self.choices and not self.ordered:
            return CategoricalDistribution(range(len(self.choices)))
        if self.choices or self.integer:
            step = 1 if self.choices else int(self.knob.step or 1)
            return IntDistribution(low, high, log=self.knob.log, step=step)
        return FloatDistribution(low, high, log=self.knob.log)

    def to_param(self, value: Any) -> Any:
        """Return the parameter of a config value; None if it is outside the searched range."""
        if self.choices and self.knob.step is None:
            return next((i for i, choice in enumerate(self.choices) if _equal(choice, value)), None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        if self.choices:
            nearest = min(range(len(self.choices)), key=lambda i: abs(self.choices[i] - value))
            return nearest if self.knob.problem(value, 1.0) is None else None
        low, high = self.bounds
        return self.to_value(value) if low <= value <= high else None

    def to_value(self, param: Any) -> Any:
        """Return the config value of a parameter."""
        if self.choices:
            return self.choices[int(param)]
        low, high = self.bounds
        if not self.integer and self.knob.step is None:
            param = float(f"{param:.{DIGITS}g}")
        return self.knob.nearest(min(max(param, low), high), 1 if self.integer else 1.0)

    def from_unit(self, u: float) -> Any:
        """Map a number in [0, 1] to a parameter."""
        low, high = self.bounds
        if self.choices or self.integer:
            if self.knob.log:
                return min(high, int(math.exp(math.log(low) + u * (math.log(high + 1) - math.log(low)))))
            step = 1 if self.choices else int(self.knob.step or 1)
            return low + step * min((high - low) // step, int(u * ((high - low) // step + 1)))
        if self.knob.log:
            return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
        return low + u * (high - low)

    def to_unit(self, param: Any) -> float:
        """Map a parameter to [0, 1]."""
        low, high = self.bounds
        if self.knob.log:
            low, high, param = math.log(low), math.log(high), math.log(param)
        return float((param - low) / (high - low))


def _equal(a: Any, b: Any) -> bool:
    """Return whether two config values are the same; 1 and 1.0 are, 1 and True are not."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return bool(a == b) if numbers else same(a, b)


@dataclass(slots=True)
class SearchPoint:
    """A point of the search space with the results of all its runs."""

    params: Params
    values: list[float] = field(default_factory=list)
    """The objective of each run that measured one."""
    curves: list[Curve] = field(default_factory=list)
    """The curves of such runs, as far as they are known."""
    stopped: list[Curve] = field(default_factory=list)
    """The curves of runs that were stopped before their end."""
    crashes: int = 0
    """Runs that ended without a value, and proposals that the guard rejected."""
    pending: int = 0
    """Planned and running runs."""
    runs: list[str] = field(default_factory=list)
    """The ids of the runs that measured a value."""
    costs: list[float] = field(default_factory=list)
    """What runs of this point cost: seconds, or a metric."""
    others: list[tuple[float | None, ...]] = field(default_factory=list)
    """The further objectives of each run in `values`, in the order of the lab file."""

    tie_breaks: list[float] = field(default_factory=list)
    """The values of `objective.then`."""
    bonus: float = 0.0
    """Added to the objective, less than its distance to the next value: the order among points that tie."""

    @property
    def value(self) -> float | None:
        """The mean objective; None if nothing is measured yet or at least half of the runs crashed."""
        return math.fsum(self.values) / len(self.values) + self.bonus if len(self.values) > self.crashes else None

    @property
    def infeasible(self) -> bool:
        """Whether the point counts as failed."""
        return self.crashes > 0 and self.value is None and self.partial is None

    @property
    def partial(self) -> Curve | None:
        """The longest curve of a point that no run has finished; None if there is none or half of the runs crashed."""
        if self.values or len(self.stopped) <= self.crashes:
            return None
        return max(self.stopped, key=lambda curve: curve[-1][0])

    @property
    def known(self) -> bool:
        """Whether something was measured there."""
        return self.value is not None or self.partial is not None

    def of_other(self, k: int) -> SearchPoint:
        """Return the point with a further objective in the place of the objective."""
        values = [others[k] for others in self.others]
        return SearchPoint(self.params, [value for value in values if value is not None])


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
        self._history = history
        self.axes, left_out = find_axes(guard, base, fixed)
        self._note = f"not searched: {'; '.join(left_out)}" if left_out else None
        self._run_params: dict[str, Params | None] = {}  # by run
        self._run_keys: dict[str, bytes] = {}  # knob values by run
        self._rejected_params: dict[int, Params | None] = {}  # by proposal
        self._earlier_read: list[tuple[str, list[SearchPoint]]] | None = None
        base_params = {axis.path: axis.to_param(axis.base) for axis in self.axes}
        base_params = {path: param for path, param in base_params.items() if param is not None}
        self._base_params = base_params
        self._filled_base = guard.with_defaults(base)
        self._knob_paths = {axis.path: axis.knob.path for axis in self.axes}
        self._repairer = Repairer(
            self.axes, guard, self._problems, base_params, self._settle if guard.used_if else None
        )
        self._then = objective.then if objective is not None else None
        self._further = objective.pareto if objective is not None and not objective.is_priced else []
        self._earlier = earlier if settings.transfer else None
        self._sampler = None
        if self.axes:
            self._sampler = make_sampler(
                settings, self.axes, goal, self._repairer, further=self._further, earlier=self._earlier_points
            )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        if self._sampler is None:
            self.problem = "no knob can be searched" + (f" ({self._note})" if self._note else "; name some in knobs:")
            return []
        self.problem, self._note = self._note, None
        points, taken = self._collect_points(study)
        n_proposed = study.count_proposals(self.name)
        proposals: list[Proposal] = []
        for count in range(n_proposed, n_proposed + n):
            proposal = self._sample_proposal(count, points, taken)
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
        return self._collect_points(study)[0]

    def params_of(self, config: dict[str, Any]) -> Params | None:
        """Return the point of a config; None if one of its values is outside the search space."""
        return self._to_params(config)

    def params_after(self, edits: Sequence[str]) -> Params | None:
        """Return the point of a proposal."""
        ruling = self._guard.check(self._base, edits)
        return None if ruling.config is None else self._to_params(ruling.config)

    def fill(self, study: StudyView, region: Mapping[str, Sequence[Any]]) -> Proposal:
        """Return the most promising new point of a region; its edits apply to the base config.

        Args:
            region: The lowest and the highest value of numeric knobs, and the allowed values of others, by path.

        Raises:
            LabError: A knob or a value of the region cannot be searched, or nothing new is legal there.
        """
        if not isinstance(self._sampler, _Auto):
            raise LabError("regions need `search` with the sampler auto")
        bounds = self._bounds(region)
        points, taken = self._collect_points(study)
        count = study.count_proposals()
        proposal = self._sample_proposal(count, points, taken, self._sampler.inside(bounds))
        if proposal is None:
            raise LabError(self.problem or "nothing new is legal in this region")
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
        if not isinstance(self._sampler, _Auto):
            return None
        from looplab.decide.belief import believe

        return believe(
            self.axes, self._sampler, self._collect_points(study)[0], self._goal, self._earlier_names(), detail
        )

    def believe_before(self) -> dict[str, Any] | None:
        """Return what earlier studies predict before the first run; None if there are none."""
        if not isinstance(self._sampler, _Auto) or not self._earlier_names():
            return None
        from looplab.decide.belief import believe_before

        return believe_before(self.axes, self._sampler, self._earlier_names(), self._earlier_points(), self._goal)

    def repeat_due(self, study: StudyView) -> BelievedPoint | None:
        """Return the config that the model believes in if it should be run once more; else None.

        The first repetition is always worth its run: with a fixed seed, nothing else shows the noise. Where repeated
        runs measured exactly the same, or differ less than the model doubts, there are no others.
        """
        share = self._settings.repeat_share
        if not share or not isinstance(self._sampler, _Auto):
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
        return [name for name, _ in self._earlier_studies()]

    def _earlier_points(self) -> list[list[SearchPoint]]:
        return [points for _, points in self._earlier_studies()]

    def _earlier_studies(self) -> list[tuple[str, list[SearchPoint]]]:
        """Return the measured points of earlier studies inside this search space; read once."""
        if self._earlier_read is None:
            self._earlier_read = []
            for name, history in self._earlier() if self._earlier is not None else ():
                points: dict[tuple[Any, ...], SearchPoint] = {}
                for past in history.ended():
                    params = self._to_params(past.config)
                    if params is None or past.run.objective is None or not math.isfinite(past.run.objective):
                        continue
                    points.setdefault(_params_key(params), SearchPoint(params)).values.append(past.run.objective)
                if len(points) >= MIN_EARLIER:
                    found = select_points([*points.values()], MAX_EARLIER_POINTS, self._goal)
                    self._earlier_read.append((name, found))
        return self._earlier_read

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
        why = "every draw was a point that has been tried"
        n_rejected = 0
        for trial, (params, basis, spread) in enumerate(itertools.islice(sampler(count, points, refused), MAX_DRAWS)):
            if n_rejected >= REPAIR_AFTER and self._settings.sampler != "grid":  # most of the space is infeasible
                rng = generator(self._settings.seed, count, trial, 2)
                params = self._repairer.repair(params, rng, spread=spread) or params
            edits, ruling = self._rule(params)
            if ruling.config is None:
                why = f"the guard refused the last draw: {ruling.problems[0].message}"
                n_rejected += 1
                refused.append(SearchPoint(params, crashes=1))
                continue
            key = self._key(ruling.config)
            if key in taken:
                refused.append(SearchPoint(params, pending=1))
                continue
            taken.add(key)
            points.append(SearchPoint(self._to_params(ruling.config) or params, pending=1))
            return Proposal(tuple(map(str, edits)), basis, self.name)
        if self._settings.sampler == "grid":
            why = "the grid is exhausted: every point has been tried or is refused by the guard"
        self.problem = f"nothing new to try: {why}"
        return None

    def _problems(self, params: Params) -> tuple[Problem, ...]:
        return self._rule(params)[1].problems

    def _rule(self, params: Params) -> tuple[list[Edit], Ruling]:
        """Return the edits of a point and what the guard says; knobs that are not used there are not edited."""
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
        return [Edit(axis.path, Op.SET, value) for axis, value in values if not _equal(value, axis.base)]

    # -- observations

    def _collect_points(self, study: StudyView) -> tuple[list[SearchPoint], set[bytes]]:
        """Return all points so far, ordered by their first run, and the keys of the configs that were run."""
        runs: list[tuple[RunRow, Params | None]] = []
        curves: dict[str, Curve] = {}
        pasts: dict[str, PastRun] = {}
        for past in self._history.ended():
            run = past.run
            if run.role == Role.IMPORTED and run.id not in self._run_keys and self._guard.admit(past.config).problems:
                self._run_keys[run.id], self._run_params[run.id] = b"", None  # not legal in this lab
            runs.append((run, self._params_of_run(run.id, past.config)))
            curves[run.id] = past.curve
            pasts[run.id] = past
        for run in (run for state in ("planned", "queued", "running") for run in study.runs(state=state)):
            if run.id not in self._run_keys:
                plan = study.plan_of(run.id)
                if plan is None:
                    continue
                self._params_of_run(run.id, plan.config)
            runs.append((run, self._run_params[run.id]))
        points: dict[tuple[Any, ...], SearchPoint] = {}
        for rejected in self._rejected_points(study):
            points.setdefault(_params_key(rejected), SearchPoint(rejected)).crashes += 1
        for run, params in sorted(runs, key=lambda pair: pair[0].n):
            if params is None or (run.state == "ended" and run.started is None and run.status == "stopped"):
                continue  # outside the search space, or cancelled before it started: no information
            if run.role == Role.IMPORTED and run.objective is None and run.status == "ok":
                continue  # the other tool measured another objective
            point = points.setdefault(_params_key(params), SearchPoint(params))
            if run.state != "ended":
                point.pending += 1
            elif run.objective is not None and math.isfinite(run.objective):
                point.values.append(run.objective)
                self._add_details(point, pasts[run.id])
                if curves[run.id]:
                    point.curves.append(curves[run.id])
            elif run.status == "stopped" and curves[run.id]:
                if run.role in DECIDED:  # a repetition counts only if it was finished
                    point.stopped.append(curves[run.id])
            else:
                point.crashes += 1
        if self._then is not None:
            _break_ties(points.values(), self._goal, self._then.goal)
        # Points that another tool has run may be run again here.
        return list(points.values()), {self._run_keys[run.id] for run, _ in runs if run.role != Role.IMPORTED}

    def _add_details(self, point: SearchPoint, past: PastRun) -> None:
        run = past.run
        if run.role != Role.IMPORTED and run.verdict != "void" and run.status == "ok":
            point.runs.append(run.id)
        if past.tie_break is not None:
            point.tie_breaks.append(past.tie_break)
        point.others.append(past.further)
        cost = self._settings.cost
        if cost is not None and run.role != Role.IMPORTED:
            summary = past.metrics.get(cost)
            spent = run.seconds if cost == "seconds" else summary.last if summary is not None else None
            if spent is not None and math.isfinite(spent) and spent > 0:
                point.costs.append(spent)

    def _params_of_run(self, run: str, config: dict[str, Any]) -> Params | None:
        """Return `_to_params`, computed once per run."""
        if run not in self._run_keys:
            self._run_keys[run] = self._key(config)
            self._run_params[run] = self._to_params(config)
        return self._run_params[run]

    def _to_params(self, config: dict[str, Any]) -> Params | None:
        """Return the point of a config; None if one of its values is outside the search space."""
        values = self._guard.knob_values(self._guard.with_defaults(config))
        params = {axis.path: axis.to_param(values.get(axis.path)) for axis in self.axes}
        if None in params.values():
            return None
        return self._settle(params) if self._guard.used_if else params

    def _key(self, config: dict[str, Any]) -> bytes:
        return canonical_json(self._guard.knob_values(self._guard.with_defaults(config)))

    def _rejected_points(self, study: StudyView) -> Iterator[Params]:
        """Yield the points inside the ranges that the guard rejected, whoever proposed them."""
        for row in study.proposals(status="rejected"):
            if row.id not in self._rejected_params:
                self._rejected_params[row.id] = self._params_of_rejected(row)
            params = self._rejected_params[row.id]
            if params is not None:
                yield params

    def _params_of_rejected(self, row: ProposalRow) -> Params | None:
        if not row.problems or any(problem.get("rule") not in INFEASIBLE_RULES for problem in row.problems):
            return None
        parent = self._base if row.parent is None else self._config_of(row.parent)
        try:
            return None if parent is None else self._to_params(apply_edits(parent, row.edits).config)
        except EditError:  # the base config has changed since
            return None

    def _config_of(self, run: str) -> dict[str, Any] | None:
        return next((past.config for past in self._history.ended() if past.run.id == run), None)


def find_axes(guard: Guard, base: dict[str, Any], fixed: Collection[str] = ()) -> tuple[list[Axis], list[str]]:
    """Return the axes that can be searched from this base, and a reason for each knob that cannot.

    Paths in `fixed` and derived keys are left out without a reason.
    """
    axes, left_out = [], []
    present = set()
    for path, _, knob, value in KnobTable(guard.knobs.values()).present(guard.with_defaults(base)):
        present.add(knob.path)
        if path in fixed or path in guard.derived:
            continue
        axis = Axis.from_knob(path, knob, value)
        if isinstance(axis, str):
            left_out.append(f"{path} ({axis})")
        else:
            axes.append(axis)
    absent = "it is not in the base config; give the knob a `default:`"
    left_out += [f"{path} ({absent})" for path in guard.knobs if path not in present]
    return axes, left_out


def _break_ties(points: Iterable[SearchPoint], goal: str, then_goal: str) -> None:
    """Order points with the same objective by their tie-break, over a quarter of the distance to the next value."""
    groups: dict[float, list[SearchPoint]] = {}
    for point in points:
        if point.value is not None and point.tie_breaks:
            groups.setdefault(point.value, []).append(point)
    values = sorted({point.value for group in groups.values() for point in group if point.value is not None})
    gap = min((b - a for a, b in itertools.pairwise(values)), default=abs(values[0]) * 1e-3 or 1.0) if values else 0.0
    for group in groups.values():
        means = [math.fsum(point.tie_breaks) / len(point.tie_breaks) for point in group]
        low, high = min(means), max(means)
        for point, mean in zip(group, means, strict=True):
            if high > low:
                better = (mean - low) / (high - low) if then_goal == "max" else (high - mean) / (high - low)
                point.bonus = (1.0 if goal == "max" else -1.0) * 0.25 * gap * better


def _params_key(params: Params) -> tuple[Any, ...]:
    return tuple(params.values())


# -- samplers


class Drawn(NamedTuple):
    """A point that a sampler suggests."""

    params: Params
    basis: str
    """How it was chosen, in words; becomes the proposal's reason."""
    spread: bool = False
    """Whether it was drawn to fill the space rather than for its own expected value."""


Sampler = Callable[[int, list[SearchPoint], list[SearchPoint]], Iterator[Drawn]]
"""Yields draws: endlessly, or for a grid until it is exhausted.

Its arguments are the number of proposals so far, all points, and a list to which the caller adds each draw that was
refused or not new.
"""


def make_sampler(
    settings: SearchConfig,
    axes: Sequence[Axis],
    goal: Literal["max", "min"],
    repairer: Repairer,
    *,
    further: Sequence[TieBreak] = (),
    earlier: Callable[[], Sequence[Sequence[SearchPoint]]] = tuple,
) -> Sampler:
    """Return the sampler that the settings name.

    Args:
        further: Objectives beside the first; only `auto` uses them.
        earlier: Returns the points of earlier studies; only `auto` uses them.
    """
    if settings.sampler == "grid":
        return _grid(axes)
    uniform = Uniform(settings, axes)
    if settings.sampler in ("random", "qmc"):
        return uniform
    if settings.sampler == "auto":
        return _Auto(settings, axes, goal, repairer, further, earlier)
    models: dict[str, Callable[..., _Model]] = {"tpe": _Tpe, "gp": _Gp, "cmaes": _Cma}
    if settings.sampler in models:
        return _AfterStartup(settings, uniform, models[settings.sampler](settings, axes, goal))
    make = partial(plugins.make, "samplers", settings.sampler, **settings.options)
    make(seed=settings.seed)  # reports wrong options at once
    return _AfterStartup(settings, uniform, OptunaModel(settings, axes, goal, make))


def check_packages(settings: SearchConfig) -> None:
    """Raise a LabError that names the packages that the sampler needs and that are not installed."""
    missing = [name for name in NEEDS.get(settings.sampler, ("optuna", "scipy")) if not _is_installed(name)]
    if missing:
        packages = "looplab[search]" if missing != ["torch"] else "torch"
        without = "grid, random, qmc and auto work without Optuna" if "optuna" in missing else ""
        raise LabError(
            f"search: {settings.sampler} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed",
            hint="; ".join(filter(None, (f"pip install '{packages}'", without))),
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def _grid(axes: Sequence[Axis]) -> Sampler:
    """Return a sampler of all points of the grid, in order. Raises LabError if an axis is continuous."""
    sides = []
    for axis in axes:
        step = axis.knob.step if axis.knob.step is not None else 1 if axis.integer else None
        low, high = axis.bounds
        if axis.choices:
            sides.append(list(range(len(axis.choices))))
        elif step is None:
            raise LabError(f"a grid needs a step or choices for {axis.path}", hint="or use sampler: qmc")
        else:
            sides.append([axis.to_value(low + i * step) for i in range(round((high - low) / step) + 1)])
    size = math.prod(map(len, sides))
    if size > MAX_GRID:
        raise LabError(f"the grid has {size:,} points, more than {MAX_GRID:,}", hint="or use sampler: qmc")
    paths = [axis.path for axis in axes]

    def draw(count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        tried = {_params_key(point.params) for point in points}
        for i, values in enumerate(itertools.product(*sides)):
            if values not in tried:
                yield Drawn(dict(zip(paths, values, strict=True)), f"point {i + 1} of a grid of {size}")

    return draw


class Uniform:
    """Uniform draws: independent ones, or a scrambled Sobol sequence, which leaves no gaps."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis]) -> None:
        self._settings = settings
        self._axes = axes
        self._sequence: list[Any] = []  # the first points of the Sobol sequence

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        sobol = self._settings.sampler != "random"
        for i in itertools.count(count):
            u = self._sobol(i) if sobol else self._random(count, i - count)
            yield Drawn(self._to_params(u), NAMES["qmc" if sobol else "random"], spread=True)

    def _to_params(self, u: Sequence[float]) -> Params:
        return {axis.path: axis.from_unit(float(x)) for axis, x in zip(self._axes, u, strict=True)}

    def _random(self, count: int, trial: int) -> Any:
        return generator(self._settings.seed, count, trial).random_sample(len(self._axes))

    def _sobol(self, i: int) -> Any:
        if i >= len(self._sequence):
            from scipy.stats import qmc

            sequence = qmc.Sobol(len(self._axes), seed=self._settings.seed)
            self._sequence = sequence.random_base2(max(6, i.bit_length())).tolist()
        return self._sequence[i]


def generator(*seeds: int) -> np.random.RandomState:
    """Return a random state that depends on all the seeds."""
    import numpy as np

    return np.random.RandomState(np.random.SeedSequence([seed % 2**32 for seed in seeds]).generate_state(4))


def _startup_draws(draws: Iterator[Drawn], measured: int, startup: int) -> Iterator[Drawn]:
    for drawn in draws:
        yield drawn._replace(basis=f"spread evenly at the start: {measured} of {startup} points measured")


def _describe(points: Sequence[SearchPoint]) -> str:
    crashed, stopped = sum(point.infeasible for point in points), sum(point.partial is not None for point in points)
    measured = f"{sum(point.value is not None for point in points)} measured points"
    others = [f"{stopped} stopped early"] * (stopped > 0) + [f"{crashed} that failed"] * (crashed > 0)
    return measured + (f" and {' and '.join(others)}" if others else "")


class _AfterStartup:
    """A model, preceded by a space-filling startup phase."""

    def __init__(self, settings: SearchConfig, uniform: Uniform, model: _Model) -> None:
        self._settings = settings
        self._startup = settings.startup or OPTUNA_STARTUP
        self._uniform = uniform
        self._model = model

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        measured = sum(point.known for point in points)
        if measured < self._startup:
            yield from _startup_draws(self._uniform(count, points, refused), measured, self._startup)
        if self._settings.sampler == "tpe" and count % LOCAL_PERIOD == LOCAL_PERIOD - 1:
            yield from itertools.islice(self._around_best(count, points, measured), MAX_DRAWS // 4)
        basis = f"{NAMES.get(self._settings.sampler, self._settings.sampler)} on {_describe(points)}"
        for trial in itertools.count():
            yield Drawn(self._model.draw(generator(self._settings.seed, count, trial), points, refused), basis)

    def _around_best(self, count: int, points: list[SearchPoint], measured: int) -> Iterator[Drawn]:
        """Yield local steps from the best point, shorter as the study grows: a model of few points overlooks these."""
        sign = -1.0 if self._model.goal == "max" else 1.0
        values = [(sign * point.value, i) for i, point in enumerate(points) if point.value is not None]
        if not values:
            return
        best = points[min(values)[1]].params
        width = max(MIN_STEP, INITIAL_STEP * 0.5 ** (measured / 20))
        for trial in itertools.count():
            rng = generator(self._settings.seed, count, trial, 1)
            params = dict(best)
            axes = self._model.axes
            chosen = [axis for axis in axes if rng.rand() < 2.0 / len(axes)] or [axes[rng.randint(len(axes))]]
            for axis in chosen:
                if axis.choices and not axis.ordered:
                    params[axis.path] = rng.randint(len(axis.choices))
                else:
                    u = abs(axis.to_unit(params[axis.path]) + width * rng.randn())
                    params[axis.path] = axis.from_unit(min(1.0, max(0.0, u if u <= 1.0 else 2.0 - u)))
            yield Drawn(params, f"a step from the best of {measured} measured points")


class _Auto:
    """Looplab's own Gaussian process up to MAX_GP_POINTS, then TPE; without Optuna, the process on a subset."""

    def __init__(
        self,
        settings: SearchConfig,
        axes: Sequence[Axis],
        goal: Literal["max", "min"],
        repairer: Repairer,
        further: Sequence[TieBreak] = (),
        earlier: Callable[[], Sequence[Sequence[SearchPoint]]] = tuple,
    ) -> None:
        self._settings = settings
        self._uniform = Uniform(settings, axes)
        self._repairer = repairer
        self._axes = axes
        self._goal: Literal["max", "min"] = goal
        self._random = Uniform(settings.model_copy(update={"sampler": "random"}), axes)
        self._with_optuna = _is_installed("optuna")
        self._tpe: Sampler | None = None
        self._earlier = earlier
        self._further = further

    @cached_property
    def acquisition(self) -> AcquisitionOptimizer:
        from looplab.decide.surrogate import AcquisitionOptimizer

        return AcquisitionOptimizer(
            self._axes,
            _sign(self._goal),
            self._repairer,
            earlier=self._earlier(),
            other_signs=[_sign(one.goal) for one in self._further],
            per_cost=self._settings.cost is not None,
        )

    @cached_property
    def startup(self) -> int:
        """Measured points before the model is used; fewer if there are earlier studies to learn from."""
        full = self._settings.startup or gp_startup(len(self._axes))
        return full if self._settings.startup or not self._earlier() else max(MIN_STARTUP, full // 2)

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        measured = sum(point.known for point in points)
        if measured < self.startup or all(point.value is None for point in points):
            yield from itertools.islice(self.best_before()[count:], 1)
            yield from _startup_draws(self._uniform(count, points, refused), measured, self.startup)
        if self.has_model(points):
            yield from self._suggest(count, points)
        if not self._with_optuna:
            yield from self._random(count, points, refused)
            return
        if self._tpe is None:  # Optuna is slow to import, and most studies never need it
            settings = self._settings.model_copy(update={"sampler": "tpe"})
            self._tpe = make_sampler(settings, self._axes, self._goal, self._repairer)
        yield from self._tpe(count, points, refused)

    def has_model(self, points: Sequence[SearchPoint]) -> bool:
        """Return whether the Gaussian process is used for so many points."""
        return len(points) <= MAX_GP_POINTS or not self._with_optuna

    def is_allowed(self, params: Params) -> bool:
        """Return whether the guard allows a point."""
        return self._repairer.is_allowed(params)

    def modelled(self, points: list[SearchPoint]) -> list[SearchPoint]:
        """Return the points that the process is fitted to."""
        return select_points(points, MAX_GP_POINTS, self._goal)

    @cache  # noqa: B019 (lives as long as the proposer)
    def best_before(self) -> list[Drawn]:
        """Return the best measured points of earlier studies, by what they predict together."""
        measured = [point for points in self._earlier() for point in points if point.value is not None]
        if not measured:
            return []
        predicted = self.acquisition.prior([point.params for point in measured])
        best: dict[tuple[Any, ...], Drawn] = {}
        for i in predicted.argsort(kind="stable"):
            params = measured[i].params
            best.setdefault(_params_key(params), Drawn(params, "the best config of earlier studies of these knobs"))
            if len(best) >= MAX_FROM_EARLIER:
                break
        return list(best.values())

    def inside(self, bounds: Mapping[str, tuple[Any, ...]]) -> Sampler:
        """Return a sampler of a region, by parameters as `SearchSpace.region` takes them."""
        from looplab.decide.surrogate import SearchSpace

        space = SearchSpace(self._axes)
        region = space.region(bounds)

        def draw(count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
            if any(point.value is not None for point in points):
                yield from self._suggest(count, points, region)
            rng = generator(self._settings.seed, count, 3)
            for _ in range(MAX_DRAWS):
                u = rng.random_sample((1, len(self._axes)))
                (row,) = space.snap(region.clip(region.low + u * (region.high - region.low), rng))
                yield Drawn(space.to_params(row), "a random point of the region")

        return draw

    def _suggest(self, count: int, points: list[SearchPoint], region: Region | None = None) -> Iterator[Drawn]:
        subset = self.modelled(points)
        per = f" per {'second' if self._settings.cost == 'seconds' else self._settings.cost}"
        basis = f"the expected improvement{per * (self._settings.cost is not None)} on {_describe(points)}"
        basis += f", from {len(subset)} of them" if len(subset) < len(points) else ""
        for params in self.acquisition.suggest(subset, generator(self._settings.seed, count), region):
            yield Drawn(params, basis)


def _sign(goal: str) -> float:
    """Return 1 to minimize and -1 to maximize."""
    return -1.0 if goal == "max" else 1.0


def gp_startup(n_axes: int) -> int:
    """Return the number of measured points before the Gaussian process is used."""
    fewest, more, most = GP_STARTUP
    return max(fewest, min(n_axes + more, most))


def select_points(points: list[SearchPoint], limit: int, goal: Literal["max", "min"]) -> list[SearchPoint]:
    """Return at most `limit` points in their order: one third the best, one third the newest, the rest evenly spaced.

    The newest include pending points.
    """
    if len(points) <= limit:
        return points
    sign = -1.0 if goal == "max" else 1.0
    third = limit // 3
    measured = [(sign * point.value, i) for i, point in enumerate(points) if point.value is not None]
    chosen = {i for _, i in sorted(measured)[:third]} | set(range(len(points) - third, len(points)))
    rest = [i for i in range(len(points)) if i not in chosen]
    room = limit - len(chosen)
    chosen |= {rest[k * len(rest) // room] for k in range(room)}
    return [points[i] for i in sorted(chosen)]


class _Model(ABC):
    """An Optuna-based model of the points."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        self.axes = axes
        self.goal = goal
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = {axis.path: axis.distribution() for axis in axes}
        self._trials: dict[tuple[Any, ...], FrozenTrial] = {}

    @abstractmethod
    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        """Return the next point to try."""

    def _ask(self, sampler: BaseSampler, points: Sequence[SearchPoint]) -> Params:
        """Return the next point of an Optuna sampler; infeasible points count as the worst value."""
        from optuna.storages import InMemoryStorage
        from optuna.study import create_study

        values = [value for value in (point.value for point in points) if value is not None]
        worst = (min if self.goal == "max" else max)(values, default=0.0)
        trials = [self._trial(i + 1, point, worst) for i, point in enumerate(points)]

        class TrialStorage(InMemoryStorage):
            """Returns the trials without copying them for each draw."""

            def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
                return trials if states is None else [trial for trial in trials if trial.state in states]

        storage = TrialStorage()
        study = create_study(storage=storage, direction="maximize" if self.goal == "max" else "minimize")
        trial = storage.get_trial(storage.create_new_trial(study._study_id))
        return dict(sampler.sample_relative(study, trial, self._space))

    def _trial(self, number: int, point: SearchPoint, worst: float) -> FrozenTrial:
        from optuna.trial import TrialState, create_trial

        infeasible, partial = point.infeasible, point.partial or ()
        value = worst if infeasible else point.value
        key = (*point.params.values(), value, infeasible, partial)
        trial = self._trials.get(key)
        if trial is None:
            unmeasured = TrialState.PRUNED if partial else TrialState.RUNNING
            trial = self._trials[key] = create_trial(
                state=unmeasured if value is None else TrialState.COMPLETE,
                value=value,
                params=point.params,
                distributions=self._space,
                intermediate_values={int(step): reached for step, reached in partial},
                constraints={"failed": 1.0 if infeasible else -1.0},
            )
        trial.number = number
        return trial


class _Tpe(_Model):
    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        from optuna.samplers import TPESampler

        sampler = TPESampler(seed=rng.randint(2**31), n_startup_trials=0, n_ei_candidates=EI_CANDIDATES)
        return self._ask(sampler, [*points, *refused])


class OptunaModel(_Model):
    """Any Optuna sampler, created for each draw; the plug-ins in `looplab.samplers` return one."""

    def __init__(
        self,
        settings: SearchConfig,
        axes: Sequence[Axis],
        goal: Literal["max", "min"],
        make: Callable[..., BaseSampler],
    ) -> None:
        """
        Args:
            make: Called with the keyword `seed`.
        """
        super().__init__(settings, axes, goal)
        self._make = make

    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        return self._ask(self._make(seed=rng.randint(2**31)), [*points, *refused])


class _Gp(_Model):
    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        super().__init__(settings, axes, goal)
        self._tpe = _Tpe(settings, axes, goal)

    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        from optuna.samplers import GPSampler

        if len(refused) >= REPAIR_AFTER:
            return self._tpe.draw(rng, points, refused)
        sampler = GPSampler(seed=rng.randint(2**31), n_startup_trials=0, warn_independent_sampling=False)
        return self._ask(sampler, [*points, *refused])


class _Cma(_Model):
    """CMA-ES on numeric axes, replayed over all points in their order; TPE on categorical axes."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        super().__init__(settings, axes, goal)
        self._startup = settings.startup or OPTUNA_STARTUP
        self._numeric = [axis for axis in axes if axis.ordered or not axis.choices]
        self._tpe = _Tpe(settings, axes, goal)

    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        params = {} if len(self._numeric) == len(self.axes) > 1 else self._tpe.draw(rng, points, refused)
        if len(self._numeric) < 2:
            return params
        return {**params, **self._evolve(rng, points)}

    def _evolve(self, rng: np.random.RandomState, points: list[SearchPoint]) -> Params:
        import numpy as np
        from cmaes import CMA  # type: ignore[import-untyped]

        sign = -1.0 if self.goal == "max" else 1.0
        evaluated = [
            (np.array([axis.to_unit(point.params[axis.path]) for axis in self._numeric]),
             math.inf if point.value is None else sign * point.value)
            for point in points
            if point.value is not None or point.infeasible
        ]  # fmt: skip
        start, later = evaluated[: self._startup], evaluated[self._startup :]
        best = sorted(start, key=lambda pair: pair[1])[: max(1, len(start) // 4)]
        bounds = np.array([[0.0, 1.0]] * len(self._numeric))
        mean = np.mean([x for x, _ in best], axis=0)
        cma = CMA(mean=mean, sigma=0.2, bounds=bounds, seed=rng.randint(2**31))
        size = cma.population_size
        for i in range(len(later) // size):
            cma.tell(later[i * size : (i + 1) * size])
        asked = cma.ask()
        return {axis.path: axis.from_unit(float(x)) for axis, x in zip(self._numeric, asked, strict=True)}
