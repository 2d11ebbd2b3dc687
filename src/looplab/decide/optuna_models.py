"""Optuna's samplers as models of a study: TPE, its Gaussian process, CMA-ES, and any other one."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.lab import SearchConfig
from looplab.decide.axes import Axis, Params
from looplab.decide.points import SearchPoint
from looplab.decide.sampling import MAX_DRAWS, Drawn, Uniform, describe, generator, startup_draws

if TYPE_CHECKING:
    import numpy as np
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

OPTUNA_STARTUP = 10
"""Measured points before an Optuna model is used, if the lab sets no `startup`."""
EI_CANDIDATES = 64
"""Candidates of TPE for each draw; Optuna's default of 24 is low for many knobs."""
LOCAL_PERIOD = 3
"""With TPE, one proposal in LOCAL_PERIOD is a local step around the best point."""
INITIAL_STEP, MIN_STEP = 0.25, 0.03
"""Standard deviation of such a step, as a share of the axis: at the start of the study, and its lower limit."""
REPAIR_AFTER = 8
"""Number of rejected draws after which further draws are repaired, and Optuna's Gaussian process, which is slow and
keeps drawing near the same point, is replaced by TPE."""
NAMES = {"tpe": "TPE", "cmaes": "CMA-ES", "gp": "a Gaussian process"}


class AfterStartup:
    """A model, preceded by a space-filling startup phase."""

    def __init__(self, settings: SearchConfig, uniform: Uniform, model: DrawModel) -> None:
        self._settings = settings
        self._startup = settings.startup or OPTUNA_STARTUP
        self._uniform = uniform
        self._model = model

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        measured = sum(point.known for point in points)
        if measured < self._startup:
            yield from startup_draws(self._uniform(count, points, refused), measured, self._startup)
        if self._settings.sampler == "tpe" and count % LOCAL_PERIOD == LOCAL_PERIOD - 1:
            yield from itertools.islice(self._around_best(count, points, measured), MAX_DRAWS // 4)
        basis = f"{NAMES.get(self._settings.sampler, self._settings.sampler)} on {describe(points)}"
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


class DrawModel(ABC):
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


class TpeModel(DrawModel):
    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        from optuna.samplers import TPESampler

        sampler = TPESampler(seed=rng.randint(2**31), n_startup_trials=0, n_ei_candidates=EI_CANDIDATES)
        return self._ask(sampler, [*points, *refused])


class OptunaModel(DrawModel):
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


class GpModel(DrawModel):
    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        super().__init__(settings, axes, goal)
        self._tpe = TpeModel(settings, axes, goal)

    def draw(self, rng: np.random.RandomState, points: list[SearchPoint], refused: list[SearchPoint]) -> Params:
        from optuna.samplers import GPSampler

        if len(refused) >= REPAIR_AFTER:
            return self._tpe.draw(rng, points, refused)
        sampler = GPSampler(seed=rng.randint(2**31), n_startup_trials=0, warn_independent_sampling=False)
        return self._ask(sampler, [*points, *refused])


class CmaModel(DrawModel):
    """CMA-ES on numeric axes, replayed over all points in their order; TPE on categorical axes."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis], goal: Literal["max", "min"]) -> None:
        super().__init__(settings, axes, goal)
        self._startup = settings.startup or OPTUNA_STARTUP
        self._numeric = [axis for axis in axes if axis.ordered or not axis.choices]
        self._tpe = TpeModel(settings, axes, goal)

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
