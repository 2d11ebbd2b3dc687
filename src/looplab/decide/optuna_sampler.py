"""looplab's Gaussian process as a sampler for Optuna studies, without a lab.

    study = optuna.create_study(sampler=looplab.GaussianProcessSampler(seed=0))

It is the process behind `search: auto`: values are warped, noise is learnt, failed trials are modelled, and trials that
run at the same time differ. Needs numpy and scipy, no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from looplab.config.lab import SearchConfig
from looplab.decide.acquisition import AcquisitionOptimizer
from looplab.decide.auto import MAX_GP_POINTS, gp_startup
from looplab.decide.axes import Axis
from looplab.decide.curves import Curve
from looplab.decide.feasible import Repairer
from looplab.decide.points import SearchPoint, select_points
from looplab.decide.sampling import Uniform, generator
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob


class GaussianProcessSampler(BaseSampler):
    """Expected improvement of a Gaussian process with a Matérn 5/2 kernel; for one objective.

    Failed trials, infinite values and violated constraints count as infeasible. The value of a pruned trial is
    extrapolated from its intermediate values and those of the trials that got further. Parameters that not all trials
    have are drawn at random.

    Args:
        seed: Makes a study with one job reproducible; None: drawn at random.
        n_startup_trials: Measured trials before the process is used; the first are spread evenly. None: by the number
            of parameters.
    """

    def __init__(self, seed: int | None = None, n_startup_trials: int | None = None) -> None:
        self._seed = random.getrandbits(31) if seed is None else seed
        self._startup = n_startup_trials
        self._independent = RandomSampler(seed=self._seed)
        self._search_space = IntersectionSearchSpace()

    def reseed_rng(self) -> None:
        self._seed = random.getrandbits(31)
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        space = self._search_space.calculate(study)
        return {name: distribution for name, distribution in space.items() if not distribution.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if study._is_multi_objective():
            raise ValueError("GaussianProcessSampler does not support multi-objective studies")
        if not search_space:
            return {}
        space = _space(tuple(search_space.items()), self._seed, study.direction == StudyDirection.MAXIMIZE)
        points = space.points(study.get_trials(deepcopy=False), trial.number)
        params = None
        startup = gp_startup(len(search_space)) if self._startup is None else self._startup
        if sum(point.known for point in points) >= startup and any(point.value is not None for point in points):
            subset = select_points(points, MAX_GP_POINTS, space.goal)
            params = next(space.acquisition.suggest(subset, generator(self._seed, trial.number)), None)
        if params is None:
            params = next(space.uniform(trial.number, points, [])).params
        return {name: space.to_value(name, params[name]) for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if study._is_multi_objective():
            raise ValueError("GaussianProcessSampler does not support multi-objective studies")
        return self._independent.sample_independent(study, trial, param_name, param_distribution)


class _Space:
    """Optuna's distributions as the axes of a search."""

    def __init__(self, distributions: Mapping[str, BaseDistribution], seed: int, maximize: bool) -> None:
        self.goal: Literal["max", "min"] = "max" if maximize else "min"
        self._distributions = distributions
        self._axes = {name: _axis(name, distribution) for name, distribution in distributions.items()}
        axes = list(self._axes.values())
        self.uniform = Uniform(SearchConfig(sampler="qmc", seed=seed), axes)
        unconstrained = Repairer(axes, Guard({}), lambda params: (), {})
        self.acquisition = AcquisitionOptimizer(axes, -1.0 if maximize else 1.0, unconstrained)

    def points(self, trials: Sequence[FrozenTrial], current: int) -> list[SearchPoint]:
        """Return what the trials have measured, merged where they have the same parameters."""
        points: dict[tuple[Any, ...], SearchPoint] = {}
        for trial in trials:
            params = {name: self._to_param(trial, name) for name in self._axes}
            if trial.number == current or None in params.values():
                continue  # the one to be sampled, or outside the space
            point = points.setdefault(tuple(params.values()), SearchPoint(params))
            value, curve = _value(trial), _curve(trial)
            if trial.state == TrialState.RUNNING:
                point.pending += 1
            elif trial.state == TrialState.PRUNED and value is not None:
                point.stopped.append(curve)
            elif value is not None:
                point.values.append(value)
                if curve:
                    point.curves.append((*curve[:-1], (curve[-1][0], value)))
            elif trial.state.is_finished():
                point.crashes += 1
        return list(points.values())

    def to_value(self, name: str, param: Any) -> Any:
        """Return the value that Optuna knows for a parameter of the search."""
        distribution = self._distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            return distribution.choices[int(param)]
        return self._axes[name].to_value(param)

    def _to_param(self, trial: FrozenTrial, name: str) -> Any:
        if name not in trial.params:
            return None
        distribution = self._distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            return int(distribution.to_internal_repr(trial.params[name]))
        return self._axes[name].to_param(trial.params[name])


@lru_cache(maxsize=16)
def _space(distributions: tuple[tuple[str, BaseDistribution], ...], seed: int, maximize: bool) -> _Space:
    """Return the space of these distributions; its fitted kernels are kept from trial to trial."""
    return _Space(dict(distributions), seed, maximize)


def _axis(name: str, distribution: BaseDistribution) -> Axis:
    if isinstance(distribution, CategoricalDistribution):
        return Axis(name, Knob(name), None, choices=tuple(range(len(distribution.choices))))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    is_int = isinstance(distribution, IntDistribution)
    knob = Knob(
        name,
        type="int" if is_int else "float",
        low=distribution.low,
        high=distribution.high,
        log=distribution.log,
        step=distribution.step,
    )
    axis = Axis.from_knob(name, knob, distribution.low)
    assert isinstance(axis, Axis), axis
    return axis


def _value(trial: FrozenTrial) -> float | None:
    """Return what a trial measured; None: nothing that can be compared."""
    if any(violation > 0 for violation in (getattr(trial, "constraints", None) or {}).values()):
        return None
    value = trial.value if trial.state == TrialState.COMPLETE else None
    if trial.state == TrialState.PRUNED and trial.intermediate_values:  # a value that was not finite is a failure
        value = trial.intermediate_values[max(trial.intermediate_values)]
    return value if value is not None and math.isfinite(value) else None


def _curve(trial: FrozenTrial) -> Curve:
    """Return the finite intermediate values at steps that at least double, and the last one."""
    rows = sorted((step, value) for step, value in trial.intermediate_values.items() if math.isfinite(value))
    kept: list[tuple[float, float]] = []
    for step, value in rows:
        if not kept or step >= max(2 * kept[-1][0], kept[-1][0] + 1) or step == rows[-1][0]:
            kept.append((step, value))
    return tuple(kept)
