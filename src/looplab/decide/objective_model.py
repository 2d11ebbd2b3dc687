"""The posterior of the objective of a study, with earlier studies as its prior mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.decide.gp import JITTER, GaussianProcess, KernelParams
from looplab.decide.observations import ObjectiveScale, Observations
from looplab.decide.points import SearchPoint
from looplab.decide.space import Array

N_FANTASIES = 16
"""Number of joint draws at the pending points over which the expected improvement is averaged."""
RANKING_DRAWS = 128
"""Number of prediction draws for weighting earlier studies."""
MIN_RANKED = 4
"""Minimum number of measured points for weighting earlier studies by how well they rank them."""


class EarlierStudies:
    """Models of earlier studies of the same knobs: a prior mean of the objective, as far as they rank its values.

    The weight of a study is the share of draws in which its predictions rank the measured values better than those of
    all other studies and of the present one, which predicts each value from the others (the ranking-weighted ensemble
    of Feurer and others). It is reduced if such a ranking could also come about by chance.
    """

    def __init__(self, processes: Sequence[GaussianProcess]) -> None:
        self._processes = processes

    def weights(self, features: Array, y: Array, process: GaussianProcess) -> Array:
        """Return the weight of each study, given the values and the process of the present one; their sum is at most 1.

        With fewer than MIN_RANKED values, all studies have the same weight.
        """
        n = len(y)
        if n < MIN_RANKED:
            return np.full(len(self._processes), 1.0 / len(self._processes))
        rng = np.random.RandomState(0)
        order = np.sign(y[:, None] - y)
        losses = []
        for mean, sd in (process.leave_one_out(), *(one.predict(features) for one in self._processes)):
            drawn = mean + sd * rng.standard_normal((RANKING_DRAWS, n))
            wrong = np.sign(drawn[:, :, None] - drawn[:, None, :]) != order
            losses.append((wrong & (order != 0)).sum(axis=(1, 2)) / max(1, np.count_nonzero(order)))
        table = np.array(losses)  # the present study first, so that it wins ties
        wins = np.bincount(table.argmin(axis=0), minlength=len(table)) / RANKING_DRAWS
        by_chance = math.sqrt((2 * n + 5) / (18.0 * n * (n - 1)))  # of the share of wrong pairs
        trust = np.clip((0.5 - table.mean(axis=1)) / (2.0 * by_chance), 0.0, 1.0)
        hopeless = np.median(table, axis=1) > np.quantile(table[0], 0.95)
        return np.asarray((wins * np.where(hopeless, 0.0, trust))[1:])

    def mean(self, features: Array, weights: Array) -> Array:
        """Return the weighted mean of the studies' predictions, which are standardized."""
        means = np.zeros(len(features))
        for weight, process in zip(weights, self._processes, strict=True):
            if weight > 0:
                means += weight * process.predict(features)[0]
        return means


class ObjectiveModel:
    """The posterior of the objective, given the known points of a study."""

    def __init__(
        self,
        *,
        kernel: KernelParams,
        features: Array,
        feature_axis: NDArray[np.intp],
        observations: Observations,
        scale: ObjectiveScale,
        features_of: Callable[[Sequence[SearchPoint]], Array],
        prior_mean: Callable[[Array], Array] | None = None,
        weights: Array | None = None,
    ) -> None:
        """
        Args:
            features_of: Returns the features of points.
            prior_mean: What earlier studies predict, standardized; None: there are none.
            weights: Those of the earlier studies.
        """
        self.kernel = kernel
        self.features = features
        self.features_of = features_of
        self.scale = scale
        self.weights = weights
        self._feature_axis = feature_axis
        self._observations = observations
        self._prior_mean = prior_mean
        y = observations.y if prior_mean is None else observations.y - prior_mean(features)
        self._process = GaussianProcess(kernel, features, feature_axis, y, observations.weights, observations.extra)
        self._y = y

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return the posterior mean and standard deviation of the noise-free objective, standardized."""
        mean, sd = self._process.predict(features)
        return (mean if self._prior_mean is None else mean + self._prior_mean(features)), sd

    def believe(self, points: Sequence[SearchPoint]) -> tuple[Array, Array]:
        """Return the mean and the standard deviation at measured points, standardized, from their own values too.

        What the process calls noise is partly the roughness of the objective, which it cannot resolve. How much of it
        is noise is learnt from points that were run more than once: if repeated runs are equal, a measured value is
        true.
        """
        mean, sd = self.predict(self.features_of(points))
        values = self.scale.standardize([point.value or 0.0 for point in points])
        repeated = [self.scale.standardize(point.values) for point in points if len(point.values) > 1]
        squares = math.fsum(float(((one - one.mean()) ** 2).sum()) for one in repeated)
        freedom = sum(len(one) - 1 for one in repeated)
        total = self.kernel.noise_variance
        noise = min(total, (total + squares) / (1 + freedom)) if squares > 0 or not freedom else 0.0
        noises = noise / np.array([float(len(point.values)) for point in points])
        rough = total - noise
        share = rough / (rough + noises) if rough > 0 else np.zeros(len(points))
        return mean + share * (values - mean), np.sqrt((1 - share) ** 2 * sd**2 + share * noises)

    def with_fantasies(self, pending: Array, rng: np.random.RandomState) -> tuple[Callable[[Array], Any], Array]:
        """Return a prediction by scenario, and the best value at the pending points in each.

        In each scenario the pending points are known, without the noise of a run: nothing is left to gain there.
        """
        _, weights, extra = self._observations
        fantasies = self._process.draw(pending, N_FANTASIES, rng)
        y = np.vstack([np.repeat(self._y[:, None], N_FANTASIES, axis=1), fantasies])
        weights = np.append(weights, np.full(len(pending), np.inf))
        extra = np.append(extra, np.full(len(pending), JITTER * self.kernel.signal_variance))
        x = np.vstack([self.features, pending])
        process = GaussianProcess(self.kernel, x, self._feature_axis, y, weights, extra)
        prior_mean = self._prior_mean or (lambda features: np.zeros(len(features)))

        def predict(features: Array) -> tuple[Array, Array]:
            mean, sd = process.predict(features)
            return mean + prior_mean(features)[:, None], sd

        return predict, np.asarray((fantasies + prior_mean(pending)[:, None]).min(axis=0))
