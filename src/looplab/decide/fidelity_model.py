"""What a new config and the stopped runs promise: the expected improvement of final values not measured yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from looplab.decide.acquisition import log_expected_improvement
from looplab.decide.gp import GaussianProcess, KernelParams, fit_kernel, fit_subset
from looplab.decide.observations import Observations
from looplab.decide.space import Array, SearchSpace

if TYPE_CHECKING:
    from looplab.decide.axes import Axis, Params
    from looplab.decide.points import SearchPoint


@dataclass(frozen=True, slots=True)
class Option:
    """A training that could come next."""

    params: Params
    step: float = 0.0
    """The step at which it was stopped; 0: it is a new config."""


class FidelityModel:
    """A Gaussian process over the knobs on final values, measured or extrapolated from the curves of stopped runs."""

    def __init__(self, axes: Sequence[Axis], sign: float) -> None:
        """
        Args:
            sign: 1 to minimize the objective, -1 to maximize it.
        """
        self._space = SearchSpace(axes)
        self._sign = sign
        self._threads = ThreadpoolController()
        self._kernels: dict[bytes, KernelParams] = {}

    def scores(self, points: Sequence[SearchPoint], options: Sequence[Option]) -> list[float]:
        """Return the logarithm of the expected improvement of each option's final value on the best finished run.

        Args:
            points: All points of the study, at least one with a finished run; the stopped runs are among them.
        """
        with self._threads.limit(limits=1, user_api="blas"):  # the matrices are small, and the runs need the cores
            return self._scores([point for point in points if point.known], options)

    def _scores(self, known: Sequence[SearchPoint], options: Sequence[Option]) -> list[float]:
        space = self._space
        x = space.features(np.array([space.to_row(point.params) for point in known]))
        observed = Observations.of_objective(known, self._sign)
        kernel = self._kernel(x, observed)
        noise = kernel.noise_variance
        own_mean, own_variance = self._own_values(kernel, x, observed)
        measured = np.array([point.value is not None for point in known])
        best = float(own_mean[measured].min())
        index = {tuple(point.params.values()): i for i, point in enumerate(known)}
        process = GaussianProcess(kernel, x, space.feature_axis, *observed)
        rows = space.features(np.array([space.to_row(option.params) for option in options]))
        mean, sd = process.predict(rows)
        variance = sd**2 + noise
        for k, option in enumerate(options):
            i = index.get(tuple(option.params.values())) if option.step else None
            if i is not None:
                mean[k], variance[k] = own_mean[i], own_variance[i]
        return list(log_expected_improvement(mean, np.sqrt(np.maximum(variance, 1e-10)), best))

    def _own_values(self, kernel: KernelParams, x: Array, observed: Observations) -> tuple[Array, Array]:
        """Return mean and variance of the final value of each point's own run, given all measurements.

        What the other points say about it (leave-one-out) and its own extrapolated value are independent estimates.
        """
        at = x / kernel.lengthscales[self._space.feature_axis]
        d2 = cdist(at, at, "sqeuclidean")
        r = np.sqrt(5.0 * d2)
        k = kernel.signal_variance * (1.0 + r + 5.0 / 3.0 * d2) * np.exp(-r)
        k.flat[:: len(k) + 1] += kernel.noise_variance / observed.weights + observed.extra + 1e-8
        inverse = cho_solve(cho_factor(k, lower=True, check_finite=False), np.eye(len(k)), check_finite=False)
        diagonal = np.diag(inverse)
        without = observed.y - (inverse @ observed.y) / diagonal
        prior = np.maximum(1.0 / diagonal - observed.extra, 1e-10)
        extra = np.maximum(observed.extra, 1e-10)
        weight = prior / (prior + extra)
        return without + weight * (observed.y - without), prior * extra / (prior + extra)

    def _kernel(self, x: Array, observed: Observations) -> KernelParams:
        """Return kernel parameters fitted to the first points; how many grows in steps of REFIT_GROWTH."""
        subset, _ = fit_subset(len(x))
        features, values = x[subset], observed.at(subset)
        key = b"".join(array.tobytes() for array in (features, *values))
        if key not in self._kernels:
            self._kernels = {key: fit_kernel(features, self._space.feature_axis, *values)}
        return self._kernels[key]
