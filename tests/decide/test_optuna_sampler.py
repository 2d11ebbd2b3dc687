"""looplab's Gaussian process as an Optuna sampler: Optuna's own conformance suite, and what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase

import looplab


class TestConformance(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: looplab.GaussianProcessSampler(seed=0, n_startup_trials=2)


def parabola(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    width = trial.suggest_int("width", 16, 256, step=16)
    kind = trial.suggest_categorical("kind", ["relu", "tanh", None])
    return float((5 + math.log10(lr)) ** 2 / 4 + (width - 128) ** 2 / 1e4 + (kind != "tanh"))


def best_of(sampler: BaseSampler, n: int = 30) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.optimize(parabola, n_trials=n)
    return study


def test_it_finds_better_points_than_random_draws() -> None:
    ours = [best_of(looplab.GaussianProcessSampler(seed=seed)).best_value for seed in range(3)]
    random = [best_of(optuna.samplers.RandomSampler(seed=seed)).best_value for seed in range(3)]
    assert max(ours) < min(random)


def test_the_same_seed_gives_the_same_trials() -> None:
    first, second = (best_of(looplab.GaussianProcessSampler(seed=3), 12) for _ in range(2))
    assert [trial.params for trial in first.trials] == [trial.params for trial in second.trials]
    other = best_of(looplab.GaussianProcessSampler(seed=4), 12)
    assert [trial.params for trial in first.trials] != [trial.params for trial in other.trials]


def test_it_stays_away_from_where_trials_fail() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=looplab.GaussianProcessSampler(seed=1))

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        if x > 0.5:
            raise RuntimeError("out of memory")
        return -x

    study.optimize(objective, n_trials=40, catch=RuntimeError)
    far_off = [trial.params["x"] > 0.6 for trial in study.trials[10:]]
    assert sum(far_off) <= 8  # of 30: it looks for the border, where the best values are
    assert study.best_value < -0.45


def test_what_a_pruned_trial_would_have_returned_is_extrapolated() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=looplab.GaussianProcessSampler(seed=1, n_startup_trials=4))

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -1, 1)
        trial.report((x - 0.3) ** 2 + 1, step=0)
        trial.report((x - 0.3) ** 2, step=1)
        if abs(x) > 0.1 and trial.number % 2:
            raise optuna.TrialPruned
        return (x - 0.3) ** 2

    study.optimize(objective, n_trials=25)
    assert min(abs(trial.params["x"] - 0.3) for trial in study.trials) < 0.01
