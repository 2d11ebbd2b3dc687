"""Optuna's pruners on any trainer: a run that does clearly worse than those before it is ended early.

The trainer knows nothing of it. Every row of the metric is judged in its order, however many came at once, so that
what is pruned does not depend on how often somebody looks.
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
    """A run and how far it was looked at."""

    trial: int
    """Its number in Optuna's memory."""
    rows: int = 0
    best: float = math.nan
    next_look: float = -math.inf
    """The step from which on it is looked at again."""


@dataclass(frozen=True, slots=True)
class _Complete:
    """A run that ended with a value."""

    steps: list[float]
    values: list[float]
    trial: FrozenTrial

    def at(self, step: float) -> float | None:
        """Its last value up to a step; none before its first and beyond its last row."""
        place = bisect_right(self.steps, step)
        return self.values[place - 1] if place and step <= self.steps[-1] else None


class Pruner:
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
        self._known = 0  # runs ever seen; Optuna's memory numbers them in this order
        complete = self._complete
        by_curve = settings.pruner == "median"

        class Memory(optuna.storages.InMemoryStorage):
            """Optuna's own, except that ended runs are shown with the values that they had at the step in question."""

            def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
                if by_curve:
                    return [run.trial for run in complete]
                return super().get_all_trials(study_id, deepcopy, states)

        self._storage = Memory()
        # Hyperband shares runs among its brackets by the study's name: it must not differ from one engine to the next.
        self._study: Study = optuna.create_study(
            storage=self._storage, study_name="looplab", direction="maximize" if goal == "max" else "minimize"
        )
        self._pruner = _make(settings)

    def ended(self, run_id: str, steps: Sequence[float], values: Sequence[float], value: float | None) -> None:
        """A run has ended; without a value, those after it are not compared with it."""
        from optuna.trial import TrialState, create_trial

        self.doomed(run_id, steps, values)  # what a new engine never saw while it ran
        run = self._followed.pop(run_id)
        if value is None or not math.isfinite(value) or not values:
            self._storage.set_trial_state_values(run.trial, TrialState.FAIL)
            return
        self._storage.set_trial_intermediate_value(run.trial, len(values), values[-1])
        self._storage.set_trial_state_values(run.trial, TrialState.COMPLETE, [value])
        self._complete.append(_Complete(list(steps), list(values), create_trial(value=value)))

    def doomed(self, run_id: str, steps: Sequence[float], values: Sequence[float]) -> str | None:
        """Why the run should end now, if it should; all its rows so far are given, those known already too."""
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
            reason = reason or self._judge(run, row, step, value)
        run.rows = len(values)
        return reason

    def _judge(self, run: _Followed, row: int, step: float, value: float) -> str | None:
        others: list[float] = []
        if self._settings.pruner == "median":
            for other in self._complete:
                then = other.at(step)
                other.trial.intermediate_values = {} if then is None else {row + 1: then}
                others += [] if then is None or math.isnan(then) else [then]
        trial = copy(self._storage.get_trial(run.trial))
        if self._settings.pruner == "median":
            worst = -math.inf if self._goal == "max" else math.inf  # nothing but NaN so far
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
            middle = statistics.median(others)
            return (
                f"the best value so far, {run.best:g}, is worse than the median {middle:g} of {len(others)} ended runs"
            )
        if settings.pruner == "threshold":
            if settings.lower is not None and value < settings.lower:
                return f"the value {value:g} is below {settings.lower:g}"
            return f"the value {value:g} is above {settings.upper:g}"
        best = f"the best 1/{settings.reduction_factor} of the runs that came this far"
        return f"the value {value:g} after {row + 1} rows is not among {best} ({settings.pruner})"


def _better(best: float, value: float, goal: Literal["max", "min"]) -> float:
    if math.isnan(best) or math.isnan(value):
        return value if math.isnan(best) else best
    return max(best, value) if goal == "max" else min(best, value)


def _make(settings: PruneConfig) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, SuccessiveHalvingPruner, ThresholdPruner

    if settings.pruner == "median":
        return MedianPruner(n_startup_trials=settings.startup)
    if settings.pruner == "asha":
        return SuccessiveHalvingPruner(settings.min_resource, settings.reduction_factor)
    if settings.pruner == "hyperband":
        most: int | str = "auto" if settings.max_resource is None else settings.max_resource
        return HyperbandPruner(settings.min_resource, most, settings.reduction_factor)
    lower, upper = settings.lower, settings.upper
    if lower is None and upper is None:
        raise LabError("a threshold pruner needs lower or upper", hint="as in prune: {pruner: threshold, upper: 10}")
    if lower is not None and upper is not None and lower > upper:
        raise LabError(f"a threshold pruner with lower {lower:g} above upper {upper:g} ends every run")
    return ThresholdPruner(lower, upper)
