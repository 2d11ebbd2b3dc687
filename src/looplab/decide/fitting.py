"""Fitting the models of a study: its objective, what runs cost, and where they fail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from looplab.decide.axes import Params
from looplab.decide.gp import GaussianProcess, KernelParams, fit_kernel, fit_subset
from looplab.decide.objective_model import EarlierStudies, ObjectiveModel
from looplab.decide.observations import MIN_FINALS, Observations
from looplab.decide.points import SearchPoint
from looplab.decide.space import Array, SearchSpace

MAX_COST_RATIO = 100.0
"""Largest factor by which the predicted costs of two points may differ."""
FAILURE_VARIANCE = 0.05
"""Variance added to the failure model, so that failed neighbours alone never rule a point out."""
FAILURE_WINDOW = 10
"""Latest points whose failure rate sets the success probability required of the next one."""
FAILURE_PENALTY = 20.0
"""Slope of the penalty, in log probability, for falling short of the required success probability."""


class ModelFitter:
    """Fits models of the objective, of the cost and of failures to points; kernel parameters are fitted once."""

    def __init__(self, space: SearchSpace, sign: float, earlier: Sequence[Sequence[SearchPoint]] = ()) -> None:
        """
        Args:
            sign: 1 to minimize the objective, -1 to maximize it.
            earlier: The points of each earlier study of the same axes; each has a measured one.
        """
        self._space = space
        self._sign = sign
        self._kernels: dict[bytes, KernelParams] = {}  # by the data of the fit: a new process fits the same
        self._weights: dict[bytes, Array] = {}  # of earlier studies, by the data of the fit
        self._earlier_points = [[point for point in points if point.known] for points in earlier]
        self._earlier: EarlierStudies | None = None

    def features(self, points: Sequence[SearchPoint]) -> Array:
        return self._space.features(np.array([self._space.to_row(point.params) for point in points]))

    def fit_objective(
        self, features: Array, points: Sequence[SearchPoint], sign: float, *, transfer: bool
    ) -> ObjectiveModel:
        known = np.array([point.known for point in points])
        observed = [point for point in points if point.known]

        def observe(given: Sequence[SearchPoint]) -> Observations:
            return Observations.of_objective(given, sign)

        x, (observations, scale) = features[known], Observations.with_scale(observed, sign)
        shared: dict[str, Any] = {
            "features": x, "feature_axis": self._space.feature_axis, "observations": observations, "scale": scale,
            "features_of": self.features,
        }  # fmt: skip
        if not (transfer and self._earlier_points):
            return ObjectiveModel(kernel=self._fitted_kernel(x, observed, observe), **shared)
        earlier = self._fitted_earlier()
        weights = self._earlier_weights(earlier, x, observed, observe)

        def prior_mean(at: Array) -> Array:
            return earlier.mean(at, weights)

        kernel = self._fitted_kernel(x, observed, observe, prior_mean)
        return ObjectiveModel(kernel=kernel, prior_mean=prior_mean, weights=weights, **shared)

    def fit_cost(self, features: Array, points: Sequence[SearchPoint]) -> Callable[[Array], Array] | None:
        """Return the predicted logarithm of a run's cost; None if fewer than MIN_FINALS points have one."""
        paid = np.array([bool(point.costs) for point in points])
        costs = [statistics.fmean(point.costs) for point in points if point.costs]
        if len(costs) < MIN_FINALS:
            return None
        logs = np.log(np.array(costs))
        center, width = float(logs.mean()), float(logs.std()) or 1.0
        priced = [point for point in points if point.costs]
        x = features[paid]

        def observe(given: Sequence[SearchPoint]) -> Observations:
            return Observations.of_logarithms([statistics.fmean(point.costs) for point in given])

        kernel = self._fitted_kernel(x, priced, observe)
        process = GaussianProcess(kernel, x, self._space.feature_axis, *observe(priced))
        limit = 0.5 * math.log(MAX_COST_RATIO)

        def log_cost(at: Array) -> Array:
            return np.asarray(center + np.clip(width * process.predict(at)[0], -limit, limit))

        return log_cost

    def fit_failures(
        self, x: Array, points: Sequence[SearchPoint], penalty: float = FAILURE_PENALTY
    ) -> Callable[[Array], Array]:
        """Return the log probability of success, with a penalty where it is below what is required.

        The higher the recent failure rate, the higher the success probability that is required.
        """
        failed = np.array([float(point.infeasible) for point in points])
        if not failed.any():
            return lambda features: np.zeros(len(features))
        kernel = self._fitted_kernel(x, points, Observations.of_failures)
        process = GaussianProcess(kernel, x, self._space.feature_axis, *Observations.of_failures(points))
        threshold = float((0.5 - failed.mean()) / (failed.std() or 1.0))
        required = math.log(min(0.95, 3.0 * float(failed[-FAILURE_WINDOW:].mean()) + 1e-3))

        def log_success(features: Array) -> Array:
            mean, sd = process.predict(features)
            log_prob = log_ndtr((threshold - mean) / np.sqrt(sd**2 + FAILURE_VARIANCE))
            return np.asarray(log_prob + penalty * np.minimum(log_prob - required, 0.0))

        return log_success

    def prior(self, at: Sequence[Params]) -> Array:
        """Return what earlier studies predict before the first run of this one, standardized; lower is better."""
        earlier = self._fitted_earlier()
        n = len(self._earlier_points)
        features = self._space.features(np.array([self._space.to_row(params) for params in at]))
        return earlier.mean(features, np.full(n, 1.0 / n))

    def _fitted_earlier(self) -> EarlierStudies:
        if self._earlier is None:
            processes = []
            for points in self._earlier_points:
                x = self.features(points)
                observations = Observations.of_objective(points, self._sign)
                kernel = self._fitted_kernel(x, points, lambda given: Observations.of_objective(given, self._sign))
                processes.append(GaussianProcess(kernel, x, self._space.feature_axis, *observations))
            self._earlier = EarlierStudies(processes)
        return self._earlier

    def _earlier_weights(
        self, earlier: EarlierStudies, x: Array, points: Sequence[SearchPoint],
        observe: Callable[[Sequence[SearchPoint]], Observations],
    ) -> Array:  # fmt: skip
        """Return the weights of the earlier studies by the points to which kernel parameters are fitted."""
        subset, size = fit_subset(len(points))
        observed = observe(points[:size]).at(subset)
        key = b"".join(array.tobytes() for array in (x[subset], *observed))
        if key not in self._weights:
            while len(self._weights) > 8:
                del self._weights[next(iter(self._weights))]
            kernel = self._fitted_kernel(x, points, observe)
            process = GaussianProcess(kernel, x[subset], self._space.feature_axis, *observed)
            self._weights[key] = earlier.weights(x[subset], observed.y, process)
        return self._weights[key]

    def _fitted_kernel(
        self, x: Array, points: Sequence[SearchPoint], observe: Callable[[Sequence[SearchPoint]], Observations],
        prior_mean: Callable[[Array], Array] | None = None,
    ) -> KernelParams:  # fmt: skip
        """Return kernel parameters fitted to the first points; how many grows in steps of REFIT_GROWTH."""
        subset, size = fit_subset(len(points))
        features, observed = x[subset], observe(points[:size]).at(subset)
        if prior_mean is not None:
            observed = observed._replace(y=observed.y - prior_mean(features))
        key = b"".join(array.tobytes() for array in (features, *observed))
        if key not in self._kernels:
            while len(self._kernels) > 16:
                del self._kernels[next(iter(self._kernels))]
            self._kernels[key] = fit_kernel(features, self._space.feature_axis, *observed)
        return self._kernels[key]
