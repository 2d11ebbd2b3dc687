"""A small Gaussian process: a Matérn 5/2 kernel with one lengthscale per axis, fitted by maximum a posteriori."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from looplab.decide.space import Array

LENGTHSCALE_PRIOR = (0.15, 0.6)
"""Log-normal prior of the lengthscale: median relative to √d, and log standard deviation. With longer lengthscales, few
points in many dimensions look like a slope whose minimum lies outside the space."""
SIGNAL_PRIOR = (1.0, 1.0)
"""Log-normal prior of the signal variance: median, and log standard deviation."""
NOISE_PRIOR = (0.02, 1.5)
"""Log-normal prior of the noise variance, as a share of the values' variance: median, and log standard deviation."""
REFIT_GROWTH = 0.1
"""Kernel parameters are refitted when the number of points has grown by this share."""
MAX_FIT_POINTS = 128
"""Maximum number of points to fit kernel parameters to; beyond it, an evenly spaced subset is used."""
JITTER = 1e-6
"""Noise variance of a draw, as a share of the signal variance; without it, rounding makes covariances indefinite."""


@dataclass(frozen=True, slots=True)
class KernelParams:
    """Parameters of a Matérn 5/2 kernel with automatic relevance determination, and of the noise."""

    lengthscales: Array
    """One per axis."""
    signal_variance: float
    noise_variance: float
    """The variance of a single run's value around the objective at its point."""


def matern52(squared_distance: Array) -> tuple[Array, Array]:
    """Return the correlation, and -6/5 of its derivative with respect to the squared distance."""
    r = np.sqrt(5.0 * squared_distance)
    decay = np.exp(-r)
    slope = (1.0 + r) * decay
    return slope + squared_distance * (5.0 / 3.0) * decay, slope


def fit_kernel(
    features: Array, feature_axis: NDArray[np.intp], y: Array, weights: Array, extra: Array | float = 0.0
) -> KernelParams:
    """Return the maximum a posteriori kernel parameters.

    Args:
        features: One row per value.
        feature_axis: The axis of each feature; the features of one axis share a lengthscale.
        y: Values of about mean 0 and variance 1.
        weights: The number of runs averaged in each value; its noise variance is divided by it.
        extra: Variance of each value in addition to the noise.
    """
    n, d = len(y), int(feature_axis.max()) + 1
    distances = np.zeros((d, n, n))
    for column, axis in zip(features.T, feature_axis, strict=True):
        distances[axis] += (column[:, None] - column[None, :]) ** 2
    squared_distances = distances.reshape(d, -1)
    lengthscale, signal, noise = LENGTHSCALE_PRIOR, SIGNAL_PRIOR, NOISE_PRIOR
    prior_mean = np.array(
        [math.log(lengthscale[0]) + 0.5 * math.log(d)] * d + [math.log(signal[0]), math.log(noise[0])]
    )
    prior_std = np.array([lengthscale[1]] * d + [signal[1], noise[1]])

    def negative_log_posterior(theta: Array) -> tuple[float, Array]:
        """Return the loss and its gradient at the logarithms of all parameters."""
        inverse = np.exp(-2.0 * theta[:d])
        signal_variance, noise_variance = math.exp(theta[d]), math.exp(theta[d + 1])
        covariance, slope = matern52((inverse @ squared_distances).reshape(n, n))
        covariance *= signal_variance
        k = covariance.copy()
        k.flat[:: n + 1] += noise_variance / weights + extra + 1e-8
        try:
            factor = cho_factor(k, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(theta)
        alpha = cho_solve(factor, y, check_finite=False)
        w = cho_solve(factor, np.eye(n), check_finite=False) - np.outer(alpha, alpha)
        z = (theta - prior_mean) / prior_std
        loss = 0.5 * y @ alpha + np.log(np.diag(factor[0])).sum() + 0.5 * z @ z
        grad = z / prior_std
        grad[:d] += 0.5 * (5.0 / 3.0) * signal_variance * inverse * (squared_distances @ (w * slope).ravel())
        grad[d] += 0.5 * np.sum(w * covariance)
        grad[d + 1] += 0.5 * noise_variance * np.sum(np.diag(w) / weights)
        return float(loss), grad

    longest = math.log(20.0) + 0.5 * math.log(d)
    bounds = [(math.log(0.02), longest)] * d + [(-4.0, 4.0), (math.log(1e-5), 1.5)]
    noisy_start = np.append(prior_mean[:d] - 1.0, [0.0, math.log(0.3)])  # a second mode: shorter scales, more noise
    optima = [
        minimize(negative_log_posterior, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
        for start in (prior_mean, noisy_start)
    ]
    best = np.exp(min(optima, key=lambda optimum: float(optimum.fun)).x)
    return KernelParams(lengthscales=best[:d], signal_variance=float(best[d]), noise_variance=float(best[d + 1]))


def fit_subset(n: int) -> tuple[NDArray[np.intp], int]:
    """Return which of `n` points kernel parameters are fitted to: some of the first ones, and how many these are."""
    size = 1
    while (larger := size + max(1, int(size * REFIT_GROWTH))) <= n:
        size = larger
    return np.linspace(0, size - 1, min(size, MAX_FIT_POINTS)).round().astype(np.intp), size


class GaussianProcess:
    """A zero-mean Gaussian process conditioned on values."""

    def __init__(
        self, kernel: KernelParams, features: Array, feature_axis: NDArray[np.intp], y: Array, weights: Array,
        extra: Array | float = 0.0,
    ) -> None:  # fmt: skip
        """See `fit_kernel` for the arguments; `y` may have one column per scenario, and so has the mean then."""
        self._kernel = kernel
        self._lengthscales = kernel.lengthscales[feature_axis]
        self._x = features / self._lengthscales
        k = kernel.signal_variance * matern52(cdist(self._x, self._x, "sqeuclidean"))[0]
        k.flat[:: len(y) + 1] += kernel.noise_variance / weights + extra + 1e-8
        self._factor = cho_factor(k, lower=True, check_finite=False)
        self._alpha = cho_solve(self._factor, y, check_finite=False)
        self._y = y

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return the posterior mean and standard deviation of the noise-free objective."""
        k, v = self._project(features / self._lengthscales)
        variance = self._kernel.signal_variance - np.einsum("ij,ij->j", v, v)
        return k.T @ self._alpha, np.sqrt(np.maximum(variance, 1e-10))

    def draw(self, features: Array, n: int, rng: np.random.RandomState) -> Array:
        """Return `n` joint draws of the noise-free objective, one per column."""
        at = features / self._lengthscales
        k, v = self._project(at)
        covariance = self._kernel.signal_variance * matern52(cdist(at, at, "sqeuclidean"))[0] - v.T @ v
        covariance.flat[:: len(at) + 1] += JITTER * self._kernel.signal_variance
        root = cho_factor(covariance, lower=True, check_finite=False)[0]
        return np.asarray((k.T @ self._alpha)[:, None] + np.tril(root) @ rng.standard_normal((len(at), n)))

    def leave_one_out(self) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each value, predicted from all others."""
        precision = np.diag(cho_solve(self._factor, np.eye(len(self._y)), check_finite=False))
        return self._y - self._alpha / precision, 1.0 / np.sqrt(precision)

    def _project(self, at: Array) -> tuple[Array, Array]:
        """Return the covariance of the values with these scaled features, and its whitened form."""
        k = self._kernel.signal_variance * matern52(cdist(self._x, at, "sqeuclidean"))[0]
        return k, solve_triangular(self._factor[0], k, lower=True, check_finite=False)
