"""A sampler: small random steps from the best trial. Any Optuna sampler can be offered in this way."""

from __future__ import annotations

from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState


class HillClimbSampler(BaseSampler):
    """Options: the width of a step, as a share of the range."""

    def __init__(self, seed: int, width: float = 0.1) -> None:
        self.rng, self.width, self.random = np.random.RandomState(seed), width, RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}  # looplab passes the space to `sample_relative`

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        best = (min if study.direction.name == "MINIMIZE" else max)(done, key=lambda t: t.value)
        return {name: self.step(study, trial, name, space, best.params[name]) for name, space in search_space.items()}

    def step(self, study: Study, trial: FrozenTrial, name: str, space: Any, value: Any) -> Any:
        if isinstance(space, CategoricalDistribution):
            return self.random.sample_independent(study, trial, name, space) if self.rng.rand() < self.width else value
        low, high, at = np.log([space.low, space.high, value]) if space.log else (space.low, space.high, value)
        moved = np.clip(at + self.width * (high - low) * self.rng.randn(), low, high)
        moved = min(max(float(np.exp(moved) if space.log else moved), space.low), space.high)
        return round(moved) if isinstance(value, int) else moved

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, space: BaseDistribution) -> Any:
        return self.random.sample_independent(study, trial, name, space)
