"""Optuna's pruners for any trainer: stop a run early that is clearly worse than earlier runs.

The trainer needs no support for it. Rows are evaluated one by one in their order, so the decision does not depend on
how often the run is looked at.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.lab import PruneConfig
from looplab.errors import LabError

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.study import Study
    from optuna.trial import FrozenTrial


@dataclass(slots=True)
class _Followed:
    """A running run and how far it has been evaluated."""

    trial: int
    """Its trial number in Optuna's storage."""
    rows: int = 0
    """Rows evaluated so far."""
    best: float = math.nan
    """Best value so far; NaN: none."""
    next_look: float = -math.inf
    """Step of the next evaluation."""


@dataclass(frozen=True, slots=True)
class _Complete:
    """A finished run with an objective value."""

    steps: list[float]
    values: list[float]
    trial: FrozenTrial

    def at(self, step: float) -> float | None:
        """Return its last value up to a step; None before its first and after its last row."""
        index = bisect_right(self.steps, step)
        return self.values[index - 1] if index and step <= self.steps[-1] else None


class Pruner:
    """An Optuna pruner with the runs of a study."""

    def __init__(self, settings: PruneConfig, goal: Literal["max", "min"]) -> None:
        try:
            import optuna
        except ModuleNotFoundError as error:
            raise LabError(
                "pruning needs Optuna, which is not installed", hint="pip install 'looplab[search]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._settings = settings
        self._goal = goal
        self._complete: list[_Complete] = []
        self._followed: dict[str, _Followed] = {}
        self._known = 0  # runs ever seen; Optuna's storage numbers them in this order
        complete = self._complete
        by_curve = settings.pruner == "median"

        class Memory(optuna.storages.InMemoryStorage):
            """Optuna's storage, except that finished runs appear with their values at the step in question."""

            def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
                if by_curve:
                    return [run.trial for run in complete]
                return super().get_all_trials(study_id, deepcopy, states)

        self._storage = Memory()
        # Hyperband assigns runs to brackets by the study's name, so the name must be the same in every engine.
        self._study: Study = optuna.create_study(
            storage=self._storage, study_name="looplab", direction="maximize" if goal == "max" else "minimize"
        )
        self._pruner = _optuna_pruner(settings)

    def ended(self, run_id: str, steps: Sequence[float], values: Sequence[float], value: float | None) -> None:
        """Record a finished run; later runs are not compared with a run without a value.

        Args:
            run_id: The finished run.
            steps: Steps of all its rows.
            values: The metric at those steps.
            value: Its objective; None: it has none.
        """
        from optuna.trial import TrialState, create_trial

        self.prune_reason(run_id, steps, values)  # rows that this engine has not seen
        run = self._followed.pop(run_id)
        if value is None or not math.isfinite(value) or not values:
            self._storage.set_trial_state_values(run.trial, TrialState.FAIL)
            return
        self._storage.set_trial_intermediate_value(run.trial, len(values), values[-1])
        self._storage.set_trial_state_values(run.trial, TrialState.COMPLETE, [value])
        self._complete.append(_Complete(list(steps), list(values), create_trial(value=value)))

    def prune_reason(self, run_id: str, steps: Sequence[float], values: Sequence[float]) -> str | None:
        """Return why the run should be pruned now, or None to continue.

        Args:
            run_id: The running run.
            steps: Steps of all its rows so far, including those of earlier calls.
            values: The metric at those steps.
        """
        from optuna.trial import TrialState, create_trial

        run = self._followed.get(run_id)
        if run is None:
            self._study.add_trial(create_trial(state=TrialState.RUNNING))
            run = self._followed[run_id] = _Followed(self._known)
            self._known += 1
        reason = None
        for row in range(run.rows, len(values)):
            step, value = steps[row], values[row]
            run.best = _better(run.best, value, self._goal)
            if step < self._settings.warmup or step < run.next_look:
                continue
            if self._settings.every is not None:
                run.next_look = (math.floor(step / self._settings.every) + 1) * self._settings.every
            reason = reason or self._evaluate(run, row, step, value)
        run.rows = len(values)
        return reason

    def _evaluate(self, run: _Followed, row: int, step: float, value: float) -> str | None:
        others: list[float] = []
        if self._settings.pruner == "median":
            for other in self._complete:
                then = other.at(step)
                other.trial.intermediate_values = {} if then is None else {row + 1: then}
                others += [] if then is None or math.isnan(then) else [then]
        trial = copy(self._storage.get_trial(run.trial))
        if self._settings.pruner == "median":
            worst = -math.inf if self._goal == "max" else math.inf  # only NaN so far
            value_then = worst if math.isnan(run.best) else run.best
        else:
            value_then = value
        trial.intermediate_values = {row + 1: value_then}
        if not self._pruner.prune(self._study, trial):
            return None
        return f"{self._why(run, row, value, others)} at step {step:g}"

    def _why(self, run: _Followed, row: int, value: float, others: Sequence[float]) -> str:
        settings = self._settings
        if math.isnan(value) and (settings.pruner != "median" or math.isnan(run.best)):
            return "the value is NaN"
        if settings.pruner == "median":
            median = statistics.median(others)
            return (
                f"the best value so far, {run.best:g}, is worse than the median {median:g}"
                f" of {len(others)} finished runs"
            )
        if settings.pruner == "threshold":
            if settings.lower is not None and value < settings.lower:
                return f"the value {value:g} is below {settings.lower:g}"
            return f"the value {value:g} is above {settings.upper:g}"
        best = f"the best 1/{settings.reduction_factor} of the runs that got this far"
        return f"the value {value:g} after {row + 1} rows is not among {best} ({settings.pruner})"


def _better(best: float, value: float, goal: Literal["max", "min"]) -> float:
    if math.isnan(best) or math.isnan(value):
        return value if math.isnan(best) else best
    return max(best, value) if goal == "max" else min(best, value)


def _optuna_pruner(settings: PruneConfig) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, SuccessiveHalvingPruner, ThresholdPruner

    if settings.pruner == "median":
        return MedianPruner(n_startup_trials=settings.startup)
    if settings.pruner == "asha":
        return SuccessiveHalvingPruner(settings.min_resource, settings.reduction_factor)
    if settings.pruner == "hyperband":
        max_resource: int | str = "auto" if settings.max_resource is None else settings.max_resource
        return HyperbandPruner(settings.min_resource, max_resource, settings.reduction_factor)
    return ThresholdPruner(settings.lower, settings.upper)
