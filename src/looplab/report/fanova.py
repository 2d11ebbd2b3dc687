"""Share of the objective's variance that each knob explains, by fANOVA: a forest of regression trees over all knobs.

Unlike the share by groups, it does not credit one knob for another that was changed with it. It needs Optuna and
scikit-learn; if they are missing, or if there are too few runs for a forest, the share by groups is used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import isfinite, log
from typing import TYPE_CHECKING, Any

from looplab.report.importance import Importance, Share, winsorised

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LABEL = "explained by this knob alone, by fANOVA (a forest over all knobs together)"
MIN_RUNS = 20
"""Minimum number of measured runs; with fewer, a forest overfits."""
WIDE = 100.0
"""Positive numbers that span at least this factor are log-transformed."""
DUMMIES = 3
"""Number of random knobs, which show the share of a knob without effect."""
SEED = 0


def fanova(knobs: Mapping[str, Sequence[Any]], objective: Sequence[float | None]) -> Importance | None:
    """Return the share of each knob; None if it cannot be computed. Values are in the order of the runs."""
    measured = [i for i, value in enumerate(objective) if value is not None and isfinite(value)]
    if len(measured) < MIN_RUNS or find_spec("optuna") is None or find_spec("sklearn") is None:
        return None
    target = winsorised([float(objective[i] or 0.0) for i in measured])
    columns = {knob: _column([values[i] for i in measured]) for knob, values in knobs.items()}
    columns = {knob: column for knob, column in columns.items() if len(set(column)) > 1}
    if min(target) == max(target) or not columns:
        return None
    rng = random.Random(SEED)  # noqa: S311 (not a secret)
    dummies = [f"\0 {i}" for i in range(DUMMIES)]
    shares = _shares({**columns, **{name: [rng.random() for _ in measured] for name in dummies}}, target)
    chance = max(shares[name] for name in dummies)
    found = [
        Share(knob, shares[knob], len(set(column)), shares[knob] > 2.0 * chance) for knob, column in columns.items()
    ]
    return Importance(tuple(sorted(found, key=lambda share: -share.share)), len(measured))


def _column(values: Sequence[Any]) -> list[Any]:
    """Return numbers as floats, log-transformed if they span a wide range; other values as text."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v) for v in values):
        wide = min(values) > 0 and max(values) >= WIDE * min(values)
        return [log(v) if wide else float(v) for v in values]
    return ["not set" if v is None else json.dumps(v, sort_keys=True, default=str) for v in values]


def _shares(columns: Mapping[str, Sequence[Any]], target: Sequence[float]) -> dict[str, float]:
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from optuna.importance import FanovaImportanceEvaluator

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space: dict[str, BaseDistribution] = {}
    for knob, column in columns.items():
        numbers = isinstance(column[0], float)
        space[knob] = (
            FloatDistribution(min(column), max(column)) if numbers else CategoricalDistribution(sorted(set(column)))
        )
    study = optuna.create_study()
    for i, value in enumerate(target):
        params = {knob: column[i] for knob, column in columns.items()}
        study.add_trial(optuna.create_trial(params=params, distributions=space, value=value))
    found = FanovaImportanceEvaluator(seed=SEED).evaluate(study)
    return {knob: float(share) for knob, share in found.items()}
