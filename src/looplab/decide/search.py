"""The search proposer: an optimiser over the knobs, told everything that the study has seen, whoever proposed it.

Nothing is kept between two proposals but what can be read again: each is drawn from the ledger's runs with a random
number generator that is seeded by the study's seed and the number of proposals so far. A new engine therefore goes on
exactly as the old one would have. Runs of one point count as one, with the mean of their values; points that crashed
are infeasible; points still at work are told as pending, so that proposals made together differ. The guard is asked
before anything is proposed: what it would refuse costs no run.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from looplab.config.edits import Edit, EditError, Op, apply_edits
from looplab.config.files import canonical_json
from looplab.config.lab import SearchConfig
from looplab.config.paths import same
from looplab.decide.base import Proposal
from looplab.decide.feasible import Repairer
from looplab.decide.history import History
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.guard.knobs import Knob, KnobTable
from looplab.ledger.study import IMPORTED, ProposalRow, RunRow, StudyLedger

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Params = dict[str, Any]
"""A point as a sampler sees it: a number, or the place among the choices, for each path."""

TRIES = 64
"""Draws for one proposal before the sampler counts as having nothing new that the guard allows."""
STARTUP = 10
"""Measured points before one of Optuna's models is relied on, if the lab does not say."""
EARLY = 6
"""The same for looplab's own Gaussian process, which makes more of few points."""
MANY = 300
"""Points beyond which a Gaussian process of all of them would be slow. TPE takes over, since it knows enough by then;
where Optuna is not installed, the process continues with a selection of so many points."""
CANDIDATES = 64
"""Draws of TPE from which it takes the most promising; Optuna's 24 are few where there are many knobs."""
LOCAL = 3
"""One draw in LOCAL beside TPE is a local step around the best point."""
WIDE, NARROW = 0.25, 0.03
"""How far such a step goes on each axis, as a share of it: at the beginning, and at least."""
MAX_GRID = 100_000
MAX_STEPS = 1_000
PATIENCE = 8
"""Refused draws after which further ones are repaired, and a Gaussian process, which is slow and draws near the same
place again, gives way to TPE."""
DIGITS = 6
"""Significant digits of a drawn number: more say nothing, and nobody can read them."""
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
INSIDE = {"constraint", "derive", "normalise"}
"""Rules of the guard whose refusal says something about a point inside the knobs' ranges."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One knob that is searched."""

    path: str
    knob: Knob
    base: Any
    """Its value in the base config."""
    choices: tuple[Any, ...] = ()
    """Its values, where there are only so many; numbers in rising order."""
    ordered: bool = False
    """Whether neighbours among the choices are alike."""
    whole: bool = False

    @classmethod
    def of(cls, path: str, knob: Knob, base: Any) -> Axis | str:
        """The axis, or why there is none."""
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
        axis = cls(path, knob, base, whole=kind is int)
        low, high = axis.bounds
        if not low < high:
            return "it has one value"
        if axis.whole or knob.step is None or (high - low) / knob.step > MAX_STEPS:
            return axis  # what is drawn between very fine steps is moved to the next one
        steps = range(round((high - low) / knob.step) + 1)
        return replace(axis, choices=tuple(knob.nearest(low + i * knob.step, 1.0) for i in steps), ordered=True)

    @property
    def bounds(self) -> tuple[Any, Any]:
        if self.choices:
            return 0, len(self.choices) - 1
        assert self.knob.low is not None
        assert self.knob.high is not None
        low, high, step = self.knob.low, self.knob.high, self.knob.step
        if self.whole:
            low, high = math.ceil(low), math.floor(high)
        if step is not None:  # the last legal value may lie below the upper bound
            high = low + math.floor((high - low) / step + 1e-9) * step
        return low, high

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        low, high = self.bounds
        if self.choices and not self.ordered:
            return CategoricalDistribution(range(len(self.choices)))
        if self.choices or self.whole:
            step = 1 if self.choices else int(self.knob.step or 1)
            return IntDistribution(low, high, log=self.knob.log, step=step)
        return FloatDistribution(low, high, log=self.knob.log)

    def take(self, value: Any) -> Any:
        """A config's value as a parameter; None where it lies outside of what is searched."""
        if self.choices and self.knob.step is None:
            return next((i for i, choice in enumerate(self.choices) if _alike(choice, value)), None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        if self.choices:
            near = min(range(len(self.choices)), key=lambda i: abs(self.choices[i] - value))
            return near if self.knob.problem(value, 1.0) is None else None
        low, high = self.bounds
        return self.give(value) if low <= value <= high else None

    def give(self, param: Any) -> Any:
        """A parameter as it stands in the config."""
        if self.choices:
            return self.choices[int(param)]
        low, high = self.bounds
        if not self.whole and self.knob.step is None:
            param = float(f"{param:.{DIGITS}g}")
        return self.knob.nearest(min(max(param, low), high), 1 if self.whole else 1.0)

    def at(self, share: float) -> Any:
        """The parameter at a place between 0 and 1 of the axis."""
        low, high = self.bounds
        if self.choices or self.whole:
            if self.knob.log:
                return min(high, int(math.exp(math.log(low) + share * (math.log(high + 1) - math.log(low)))))
            step = 1 if self.choices else int(self.knob.step or 1)
            return low + step * min((high - low) // step, int(share * ((high - low) // step + 1)))
        if self.knob.log:
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return low + share * (high - low)

    def share(self, param: Any) -> float:
        """The place of a parameter on the axis, from 0 to 1."""
        low, high = self.bounds
        if self.knob.log:
            low, high, param = math.log(low), math.log(high), math.log(param)
        return float((param - low) / (high - low))


def _alike(a: Any, b: Any) -> bool:
    """The same value; 1 and 1.0 are."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return bool(a == b) if numbers else same(a, b)


@dataclass(slots=True)
class SearchPoint:
    """A point that was tried, or is being tried."""

    params: Params
    values: list[float] = field(default_factory=list)
    crashes: int = 0
    pending: int = 0

    @property
    def value(self) -> float | None:
        """The mean of what was measured; None if it mostly crashes, or is still at work."""
        return math.fsum(self.values) / len(self.values) if len(self.values) > self.crashes else None

    @property
    def infeasible(self) -> bool:
        return self.crashes > 0 and self.value is None


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
    ) -> None:
        """`fixed`: paths of knobs that are not searched, such as the seed and where weights come from."""
        check_packages(settings)
        self.problem: str | None = None
        self._settings = settings
        self._guard = guard
        self._base = base
        self._goal: Literal["max", "min"] = goal
        self._history = history
        self.axes, left_out = find_axes(guard, base, fixed)
        self._note = f"not searched: {'; '.join(left_out)}" if left_out else None
        self._params: dict[str, Params | None] = {}  # by run
        self._known: dict[str, bytes] = {}  # the knobs' values of each run
        self._refused: dict[int, Params | None] = {}  # by proposal
        known = {axis.path: axis.take(axis.base) for axis in self.axes}
        known = {path: param for path, param in known.items() if param is not None}
        self._repairer = Repairer(self.axes, guard, self._problems, known)
        self._draw = make_sampler(settings, self.axes, goal, self._repairer) if self.axes else None

    def close(self) -> None:
        """There is nothing to let go of."""

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        if self._draw is None:
            self.problem = "no knob can be searched" + (f" ({self._note})" if self._note else "; name some in knobs:")
            return []
        self.problem, self._note = self._note, None
        points, taken = self._look(study)
        sql = "SELECT count(*) FROM proposals WHERE study=? AND proposer=?"
        before = int(study.ledger.rows(sql, (study.name, self.name))[0][0])
        proposals: list[Proposal] = []
        for count in range(before, before + n):
            found = self._next(count, points, taken)
            if found is None:
                break
            proposals.append(found)
        return proposals

    def _next(self, count: int, points: list[SearchPoint], taken: set[bytes]) -> Proposal | None:
        """One proposal that is new and that the guard allows; it counts as pending from then on."""
        assert self._draw is not None
        refused: list[SearchPoint] = []
        why = "every draw was a point that has been tried"
        illegal = 0
        for trial, (params, basis, spread) in enumerate(itertools.islice(self._draw(count, points, refused), TRIES)):
            if illegal >= PATIENCE and self._settings.sampler != "grid":  # most of the space is not allowed
                rng = generator(self._settings.seed, count, trial, 2)
                params = self._repairer.repair(params, rng, spread=spread) or params
            edits = self._edits(params)
            ruling = self._guard.check(self._base, edits)
            if ruling.config is None:
                why = f"the guard refused the last draw: {ruling.problems[0].message}"
                illegal += 1
                refused.append(SearchPoint(params, crashes=1))
                continue
            key = self._key(ruling.config)
            if key in taken:
                refused.append(SearchPoint(params, pending=1))
                continue
            taken.add(key)
            points.append(SearchPoint(self._place(ruling.config) or params, pending=1))
            return Proposal(tuple(map(str, edits)), basis, self.name)
        if self._settings.sampler == "grid":
            why = "the grid is exhausted: every point of it has been tried or is refused by the guard"
        self.problem = f"nothing new to try: {why}"
        return None

    def _problems(self, params: Params) -> tuple[Problem, ...]:
        return self._guard.check(self._base, self._edits(params)).problems

    def _edits(self, params: Params) -> list[Edit]:
        given = [(axis, axis.give(params[axis.path])) for axis in self.axes]
        return [Edit(axis.path, Op.SET, value) for axis, value in given if not _alike(value, axis.base)]

    # -- what the study has seen

    def _look(self, study: StudyLedger) -> tuple[list[SearchPoint], set[bytes]]:
        """Every point so far, in the order of its first run, and the knobs' values that need not be tried again."""
        found: list[tuple[RunRow, Params | None]] = []
        for seen in self._history.ended():
            if seen.run.role == IMPORTED and seen.run.id not in self._known and self._guard.admit(seen.config).problems:
                self._known[seen.run.id], self._params[seen.run.id] = b"", None  # not legal here
            found.append((seen.run, self._placed(seen.run.id, seen.config)))
        for run in [*study.runs(state="planned"), *study.runs(state="running")]:
            if run.id not in self._known:
                plan = study.plan_of(run.id)
                if plan is None:
                    continue
                self._placed(run.id, plan.config)
            found.append((run, self._params[run.id]))
        points: dict[tuple[Any, ...], SearchPoint] = {}
        for refused in self._rejected(study):
            points.setdefault(_where(refused), SearchPoint(refused)).crashes += 1
        for run, params in sorted(found, key=lambda pair: pair[0].n):
            if params is None or (run.state == "ended" and run.started is None and run.status == "stopped"):
                continue  # outside of what is searched, or cancelled before it began: says nothing
            if run.role == IMPORTED and run.objective is None and run.status == "ok":
                continue  # another tool measured something else
            point = points.setdefault(_where(params), SearchPoint(params))
            if run.state != "ended":
                point.pending += 1
            elif run.objective is not None and math.isfinite(run.objective):
                point.values.append(run.objective)
            else:
                point.crashes += 1
        # What another tool has tried may well be tried here.
        return list(points.values()), {self._known[run.id] for run, _ in found if run.role != IMPORTED}

    def _placed(self, run: str, config: dict[str, Any]) -> Params | None:
        if run not in self._known:
            self._known[run] = self._key(config)
            self._params[run] = self._place(config)
        return self._params[run]

    def _place(self, config: dict[str, Any]) -> Params | None:
        """A config as a point; None where one of its values lies outside."""
        values = self._guard.knob_values(self._guard.with_defaults(config))
        params = {axis.path: axis.take(values.get(axis.path)) for axis in self.axes}
        return None if None in params.values() else params

    def _key(self, config: dict[str, Any]) -> bytes:
        return canonical_json(self._guard.knob_values(self._guard.with_defaults(config)))

    def _rejected(self, study: StudyLedger) -> Iterator[Params]:
        """Points inside the ranges that the guard refused, whoever proposed them."""
        for row in study.proposals(status="rejected"):
            if row.id not in self._refused:
                self._refused[row.id] = self._place_refused(row)
            params = self._refused[row.id]
            if params is not None:
                yield params

    def _place_refused(self, row: ProposalRow) -> Params | None:
        if not row.problems or any(problem.get("rule") not in INSIDE for problem in row.problems):
            return None
        parent = self._base if row.parent is None else self._config_of(row.parent)
        try:
            return None if parent is None else self._place(apply_edits(parent, row.edits).config)
        except EditError:  # the config is another one by now
            return None

    def _config_of(self, run: str) -> dict[str, Any] | None:
        return next((seen.config for seen in self._history.ended() if seen.run.id == run), None)


def find_axes(guard: Guard, base: dict[str, Any], fixed: Collection[str] = ()) -> tuple[list[Axis], list[str]]:
    """The knobs that can be searched from this base, and why the others cannot; `fixed` are left out silently."""
    axes, left_out = [], []
    present = set()
    for path, _, knob, value in KnobTable(guard.knobs.values()).present(guard.with_defaults(base)):
        present.add(knob.path)
        if path in fixed or path in guard.derived:
            continue
        axis = Axis.of(path, knob, value)
        if isinstance(axis, str):
            left_out.append(f"{path} ({axis})")
        else:
            axes.append(axis)
    absent = "it is not in the base config; give the knob a `default:`"
    left_out += [f"{path} ({absent})" for path in guard.knobs if path not in present]
    return axes, left_out


def _where(params: Params) -> tuple[Any, ...]:
    return tuple(params.values())


# -- samplers: each gives draws without end (the grid: all there are) with what they rest on


class Drawn(NamedTuple):
    """A point that a sampler wants to try."""

    params: Params
    basis: str
    """What it rests on, in words."""
    spread: bool = False
    """Whether it was drawn to fill the space rather than for its own worth."""


Draw = Callable[[int, list[SearchPoint], list[SearchPoint]], Iterator[Drawn]]
"""From the number of proposals so far, all points, and a list that grows by the draws that were refused."""


def make_sampler(settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"], repairer: Repairer) -> Draw:
    if settings.sampler == "grid":
        return _grid(axes)
    uniform = _Uniform(settings, axes)
    if settings.sampler in ("random", "qmc"):
        return uniform
    if settings.sampler == "auto":
        return _Auto(settings, axes, goal, repairer)
    models: dict[str, Callable[..., _Model]] = {"tpe": _Tpe, "gp": _Gp, "cmaes": _Cma}
    return _AfterStartup(settings, uniform, models[settings.sampler](settings, axes, goal))


def check_packages(settings: SearchConfig) -> None:
    """Raise a LabError that names the packages which this sampler needs and which are not installed."""
    missing = [name for name in NEEDS[settings.sampler] if not _is_installed(name)]
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


def _grid(axes: Sequence[Axis]) -> Draw:
    sides = []
    for axis in axes:
        step = axis.knob.step if axis.knob.step is not None else 1 if axis.whole else None
        low, high = axis.bounds
        if axis.choices:
            sides.append(list(range(len(axis.choices))))
        elif step is None:
            raise LabError(f"a grid needs a step or choices for {axis.path}", hint="or take sampler: qmc")
        else:
            sides.append([axis.give(low + i * step) for i in range(round((high - low) / step) + 1)])
    size = math.prod(map(len, sides))
    if size > MAX_GRID:
        raise LabError(f"the grid has {size:,} points, more than {MAX_GRID:,}", hint="or take sampler: qmc")
    paths = [axis.path for axis in axes]

    def draw(count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        tried = {_where(point.params) for point in points}
        for i, values in enumerate(itertools.product(*sides)):
            if values not in tried:
                yield Drawn(dict(zip(paths, values, strict=True)), f"point {i + 1} of a grid of {size}")

    return draw


class _Uniform:
    """Draws that look at nothing: independent ones, or a scrambled Sobol sequence, which leaves no gaps."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis]) -> None:
        self._settings = settings
        self._axes = axes
        self._ahead: list[Any] = []  # the beginning of the sequence

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        sobol = self._settings.sampler != "random"
        for i in itertools.count(count):
            shares = self._sobol(i) if sobol else self._random(count, i - count)
            yield Drawn(self.params(shares), NAMES["qmc" if sobol else "random"], spread=True)

    def params(self, shares: Sequence[float]) -> Params:
        return {axis.path: axis.at(float(share)) for axis, share in zip(self._axes, shares, strict=True)}

    def _random(self, count: int, trial: int) -> Any:
        return generator(self._settings.seed, count, trial).random_sample(len(self._axes))

    def _sobol(self, i: int) -> Any:
        if i >= len(self._ahead):
            from scipy.stats import qmc

            sequence = qmc.Sobol(len(self._axes), seed=self._settings.seed)
            self._ahead = sequence.random_base2(max(6, i.bit_length())).tolist()
        return self._ahead[i]


def generator(*seeds: int) -> np.random.RandomState:
    import numpy as np

    return np.random.RandomState(np.random.SeedSequence([seed % 2**32 for seed in seeds]).generate_state(4))


def _evenly(draws: Iterator[Drawn], measured: int, startup: int) -> Iterator[Drawn]:
    for drawn in draws:
        yield drawn._replace(basis=f"spread evenly at the start: {measured} of {startup} points measured")


def _seen(points: Sequence[SearchPoint]) -> str:
    crashed = sum(point.infeasible for point in points)
    measured = f"{sum(point.value is not None for point in points)} measured points"
    return measured + (f" and {crashed} that failed" if crashed else "")


class _AfterStartup:
    """A model, once there is enough to learn from; before that, points spread evenly."""

    def __init__(self, settings: SearchConfig, uniform: _Uniform, model: _Model) -> None:
        self._settings = settings
        self._startup = settings.startup or STARTUP
        self._uniform = uniform
        self._model = model

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        measured = sum(point.value is not None for point in points)
        if measured < self._startup:
            yield from _evenly(self._uniform(count, points, refused), measured, self._startup)
        if self._settings.sampler == "tpe" and count % LOCAL == LOCAL - 1:
            yield from itertools.islice(self._around_best(count, points, measured), TRIES // 4)
        basis = f"{NAMES[self._settings.sampler]} on {_seen(points)}"
        for trial in itertools.count():
            yield Drawn(self._model.draw(generator(self._settings.seed, count, trial), points, refused), basis)

    def _around_best(self, count: int, points: list[SearchPoint], measured: int) -> Iterator[Drawn]:
        """Small steps from the best point, smaller as the study goes on: what a model of few points overlooks."""
        sign = -1.0 if self._model.goal == "max" else 1.0
        found = [(sign * point.value, i) for i, point in enumerate(points) if point.value is not None]
        if not found:
            return
        best = points[min(found)[1]].params
        width = max(NARROW, WIDE * 0.5 ** (measured / 20))
        for trial in itertools.count():
            rng = generator(self._settings.seed, count, trial, 1)
            params = dict(best)
            axes = self._model.axes
            chosen = [axis for axis in axes if rng.rand() < 2.0 / len(axes)] or [axes[rng.randint(len(axes))]]
            for axis in chosen:
                if axis.choices and not axis.ordered:
                    params[axis.path] = rng.randint(len(axis.choices))
                else:
                    share = abs(axis.share(params[axis.path]) + width * rng.randn())
                    params[axis.path] = axis.at(min(1.0, max(0.0, share if share <= 1.0 else 2.0 - share)))
            yield Drawn(params, f"a step from the best of {measured} measured points")


class _Auto:
    """Looplab's own Gaussian process while there are few enough points for it, then TPE; or, without Optuna, the
    process of a selection of the points."""

    def __init__(
        self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"], repairer: Repairer
    ) -> None:
        from looplab.decide.surrogate import AcquisitionOptimizer

        self._settings = settings
        self._startup = settings.startup or EARLY
        self._uniform = _Uniform(settings, axes)
        self._improver = AcquisitionOptimizer(axes, -1.0 if goal == "max" else 1.0, repairer)
        self._repairer = repairer
        self._axes = axes
        self._goal: Literal["max", "min"] = goal
        self._random = _Uniform(settings.model_copy(update={"sampler": "random"}), axes)
        self._with_optuna = _is_installed("optuna")
        self._tpe: Draw | None = None

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        measured = sum(point.value is not None for point in points)
        if measured < self._startup:
            yield from _evenly(self._uniform(count, points, refused), measured, self._startup)
        if len(points) <= MANY or not self._with_optuna:
            some = select_points(points, MANY, self._goal)
            basis = f"the expected improvement on {_seen(points)}"
            basis += f", from {len(some)} of them" if len(some) < len(points) else ""
            for params in self._improver.draws(some, generator(self._settings.seed, count)):
                yield Drawn(params, basis)
        if not self._with_optuna:
            yield from self._random(count, points, refused)
            return
        if self._tpe is None:  # Optuna takes a while to import, and most studies never come here
            settings = self._settings.model_copy(update={"sampler": "tpe"})
            self._tpe = make_sampler(settings, self._axes, self._goal, self._repairer)
        yield from self._tpe(count, points, refused)


def select_points(points: list[SearchPoint], most: int, goal: Literal["max", "min"]) -> list[SearchPoint]:
    """At most so many of the points, in their order: a third the best, a third the newest, and others evenly between
    the oldest and the newest. The newest include those that are still running."""
    if len(points) <= most:
        return points
    sign = -1.0 if goal == "max" else 1.0
    third = most // 3
    measured = [(sign * point.value, i) for i, point in enumerate(points) if point.value is not None]
    chosen = {i for _, i in sorted(measured)[:third]} | set(range(len(points) - third, len(points)))
    rest = [i for i in range(len(points)) if i not in chosen]
    room = most - len(chosen)
    chosen |= {rest[k * len(rest) // room] for k in range(room)}
    return [points[i] for i in sorted(chosen)]


class _Model(ABC):
    """A sampler that learns from the points."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        self.axes = axes
        self.goal = goal
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = {axis.path: axis.distribution() for axis in axes}
        self._trials: dict[tuple[Any, ...], FrozenTrial] = {}

    @abstractmethod
    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        """The next point to try."""

    def _ask(self, sampler: BaseSampler, points: Sequence[SearchPoint]) -> Params:
        """What Optuna's sampler makes of the points."""
        from optuna.storages import InMemoryStorage
        from optuna.study import create_study

        values = [value for value in (point.value for point in points) if value is not None]
        worst = (min if self.goal == "max" else max)(values, default=0.0)
        told = [self._trial(i + 1, point, worst) for i, point in enumerate(points)]

        class Observation(InMemoryStorage):
            """The points as trials, without a copy of each for each draw."""

            def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
                return told if states is None else [trial for trial in told if trial.state in states]

        storage = Observation()
        study = create_study(storage=storage, direction="maximize" if self.goal == "max" else "minimize")
        trial = storage.get_trial(storage.create_new_trial(study._study_id))
        return dict(sampler.sample_relative(study, trial, self._space))

    def _trial(self, number: int, point: SearchPoint, worst: float) -> FrozenTrial:
        from optuna.trial import TrialState, create_trial

        infeasible = point.infeasible
        value = worst if infeasible else point.value
        key = (*point.params.values(), value, infeasible)
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = create_trial(
                state=TrialState.RUNNING if value is None else TrialState.COMPLETE,
                value=value,
                params=point.params,
                distributions=self._space,
                constraints={"failed": 1.0 if infeasible else -1.0},
            )
        trial.number = number
        return trial


class _Tpe(_Model):
    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        from optuna.samplers import TPESampler

        sampler = TPESampler(seed=rng.randint(2**31), n_startup_trials=0, n_ei_candidates=CANDIDATES)
        return self._ask(sampler, [*points, *refused])


class _Gp(_Model):
    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        super().__init__(settings, axes, goal)
        self._tpe = _Tpe(settings, axes, goal)

    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        from optuna.samplers import GPSampler

        if len(refused) >= PATIENCE:
            return self._tpe.draw(rng, points, refused)
        sampler = GPSampler(seed=rng.randint(2**31), n_startup_trials=0, warn_independent_sampling=False)
        return self._ask(sampler, [*points, *refused])


class _Cma(_Model):
    """CMA-ES on the numbers, run again over all points in their order; TPE on what has no order."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        super().__init__(settings, axes, goal)
        self._startup = settings.startup or STARTUP
        self._numbers = [axis for axis in axes if axis.ordered or not axis.choices]
        self._tpe = _Tpe(settings, axes, goal)

    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        params = {} if len(self._numbers) == len(self.axes) > 1 else self._tpe.draw(rng, points, refused)
        if len(self._numbers) < 2:
            return params
        return {**params, **self._evolve(rng, points)}

    def _evolve(self, rng: np.random.RandomState, points: list[SearchPoint]) -> Params:
        import numpy as np
        from cmaes import CMA  # type: ignore[import-untyped]

        sign = -1.0 if self.goal == "max" else 1.0
        told = [
            (np.array([axis.share(point.params[axis.path]) for axis in self._numbers]),
             math.inf if point.value is None else sign * point.value)
            for point in points
            if point.value is not None or point.infeasible
        ]  # fmt: skip
        start, later = told[: self._startup], told[self._startup :]
        best = sorted(start, key=lambda pair: pair[1])[: max(1, len(start) // 4)]
        bounds = np.array([[0.0, 1.0]] * len(self._numbers))
        mean = np.mean([place for place, _ in best], axis=0)
        cma = CMA(mean=mean, sigma=0.2, bounds=bounds, seed=rng.randint(2**31))
        size = cma.population_size
        for i in range(len(later) // size):
            cma.tell(later[i * size : (i + 1) * size])
        place = cma.ask()
        return {axis.path: axis.at(float(x)) for axis, x in zip(self._numbers, place, strict=True)}
