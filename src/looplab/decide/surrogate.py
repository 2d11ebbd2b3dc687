"""A Gaussian process surrogate of the objective, and an optimizer of its expected improvement.

Deliberately small: numpy, scipy, at most a few hundred points. Objective values are warped first, so that a few
terrible runs do not hide the differences between good ones. The noise variance is learnt, and the incumbent is the best
posterior mean, not the luckiest run. A second process models where runs fail. With pending points, the expected
improvement is averaged over draws of what they may turn out to be ("fantasies"), so that proposals made together
differ. Earlier studies of the same knobs are a prior mean, as far as they rank the points of this study. Given the same
points and the same random state, every process draws the same candidates.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import erfcx, log_ndtr, logsumexp
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from looplab.decide.curves import Curve, extrapolate

if TYPE_CHECKING:
    from looplab.decide.feasible import Repairer
    from looplab.decide.search import Axis, Params, SearchPoint

Array = NDArray[np.float64]

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
"""Points to which kernel parameters are fitted; an evenly spaced subset is taken from more."""
MIN_FINALS = 3
"""Measured points from which the scale of values is estimated; with fewer, those of stopped runs count too."""
N_GLOBAL, N_LOCAL = 256, 256
"""Initial candidates: uniform over the space, and perturbations of the best points."""
N_TOP = 6
"""Best points, and in each refinement round best candidates, that are perturbed."""
N_REFINEMENTS, N_REFINED = 4, 64
"""Rounds of local refinement, each with a smaller step width, and candidates per round."""
N_FEASIBILITY_SAMPLES = 16
"""Uniform samples that estimate which share of the space the guard allows."""
WEIGHT_CONCENTRATION = 0.3
"""Dirichlet parameter of the random weights of several objectives: below 1, one objective often outweighs the others,
so that the ends of the front are found too."""
N_SCALARIZED = 32
"""Draws of several objectives over which the improvement of their scalarization is averaged."""
JITTER = 1e-6
"""Noise variance of a draw, as a share of the signal variance; without it, rounding makes covariances indefinite."""
N_FANTASIES = 16
"""Joint draws of the objective at the pending points, over which the expected improvement is averaged."""
MAX_LOG = 50.0
"""Largest logarithm that is undone when a prediction is turned back into the objective."""
RANKING_DRAWS = 128
"""Draws of predictions by which earlier studies are weighted."""
MIN_RANKED = 4
"""Measured points from which earlier studies are weighted by how well they rank them."""
MAX_COST_RATIO = 100.0
"""Largest factor by which the predicted cost of two points is taken to differ."""
FAILURE_VARIANCE = 0.05
"""Variance added to the failure model, so that failed neighbours alone never rule a point out."""
FAILURE_WINDOW = 10
"""Latest points whose failure rate sets the success probability required of the next one."""
FAILURE_PENALTY = 20.0
"""Slope of the penalty, in log probability, for falling short of the required success probability."""


class SearchSpace:
    """The axes mapped to the unit cube. A row holds a number in [0, 1] or the index of a choice for each axis."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        bounds = [axis.bounds for axis in axes]
        self._log = [axis.knob.log and not axis.choices for axis in axes]
        self._low = [math.log(low) if log else float(low) for (low, _), log in zip(bounds, self._log, strict=True)]
        self._high = [math.log(high) if log else float(high) for (_, high), log in zip(bounds, self._log, strict=True)]
        self.n_choices = [len(axis.choices) if axis.choices and not axis.ordered else 0 for axis in axes]
        """The number of unordered choices of each axis; 0: the axis is numeric."""
        self._steps = [1.0 if a.choices else float(int(a.knob.step or 1)) if a.integer else 0.0 for a in axes]
        """The distance of legal values on each axis, in its own unit; 0: continuous."""
        self.feature_axis = np.repeat(np.arange(len(axes)), [n or 1 for n in self.n_choices])
        """The axis to which each feature belongs."""

    def to_row(self, params: Params) -> list[float]:
        row = []
        for axis, low, high, log, n in zip(self.axes, self._low, self._high, self._log, self.n_choices, strict=True):
            value = params[axis.path]
            row.append(float(value) if n else ((math.log(value) if log else value) - low) / (high - low))
        return row

    def to_params(self, row: Array) -> Params:
        params: dict[str, Any] = {}
        for i, axis in enumerate(self.axes):
            if self.n_choices[i]:
                value = float(row[i])
            else:
                value = self._low[i] + float(row[i]) * (self._high[i] - self._low[i])
            if self._log[i]:
                value = math.exp(value)
            params[axis.path] = round(value) if axis.choices or axis.integer else value
        return params

    def region(self, bounds: Mapping[str, tuple[Any, ...]]) -> Region:
        """Return the region in which some axes are bounded: by the lowest and the highest parameter, or by choices."""
        low, high = np.zeros(len(self.axes)), np.array([max(0.0, n - 1.0) if n else 1.0 for n in self.n_choices])
        choices: list[tuple[int, ...]] = []
        for i, axis in enumerate(self.axes):
            given = bounds.get(axis.path)
            choices.append(tuple(given) if given is not None and self.n_choices[i] else ())
            if given is not None and not self.n_choices[i]:
                ends = [math.log(end) if self._log[i] else float(end) for end in given]
                low[i], high[i] = ((end - self._low[i]) / (self._high[i] - self._low[i]) for end in ends)
        return Region(low, high, tuple(choices))

    def from_uniform(self, u: Array) -> Array:
        """Map uniform random numbers to legal rows."""
        rows = u.copy()
        for i, n in enumerate(self.n_choices):
            if n:
                rows[:, i] = np.minimum(np.floor(u[:, i] * n), n - 1)
        return self.snap(rows)

    def snap(self, rows: Array) -> Array:
        """Round rows to the nearest legal values, in place."""
        for i, (n, step) in enumerate(zip(self.n_choices, self._steps, strict=True)):
            if n or not step:
                continue
            low, width = self._low[i], self._high[i] - self._low[i]
            if self._log[i]:
                start = math.exp(low)
                rounded = start + step * np.round((np.exp(low + rows[:, i] * width) - start) / step)
                rows[:, i] = np.minimum((np.log(rounded) - low) / width, 1.0)
            else:
                rows[:, i] = np.round(rows[:, i] * width / step) * step / width
        return rows

    def features(self, rows: Array) -> Array:
        """Return the inputs of the kernel: choices one-hot, scaled so that two different ones are at distance 1."""
        columns = []
        for i, n in enumerate(self.n_choices):
            if n:
                columns += [math.sqrt(0.5) * (rows[:, i] == choice) for choice in range(n)]
            else:
                columns.append(rows[:, i])
        return np.column_stack(columns)

    def perturb(self, rows: Array, widths: Array, rng: np.random.RandomState) -> Array:
        """Move a random subset of each row's coordinates, by normal steps whose standard deviation is its width."""
        n, d = rows.shape
        moved = rng.random_sample((n, d)) < np.maximum(2.0 / d, rng.random_sample((n, 1)) ** 2)
        moved[np.arange(n), rng.randint(d, size=n)] = True
        steps = rng.standard_normal((n, d)) * widths[:, None]
        u = rng.random_sample((n, d))
        perturbed = rows.copy()
        for i, n_choices in enumerate(self.n_choices):
            if n_choices:
                moved[:, i] &= rng.random_sample(n) < 0.5
                perturbed[:, i] = np.where(moved[:, i], np.floor(u[:, i] * n_choices), rows[:, i])
                continue
            if self._steps[i]:  # a shorter step would be rounded back
                shortest = 0.75 * self._steps[i] / (self._high[i] - self._low[i])
                steps[:, i] = np.where(np.abs(steps[:, i]) < shortest, np.sign(steps[:, i]) * shortest, steps[:, i])
            x = np.abs(rows[:, i] + np.where(moved[:, i], steps[:, i], 0.0))
            perturbed[:, i] = np.clip(np.where(x > 1.0, 2.0 - x, x), 0.0, 1.0)  # reflected at the bounds
        return self.snap(perturbed)


@dataclass(frozen=True, slots=True)
class KernelParams:
    """Parameters of a Matérn 5/2 kernel with automatic relevance determination, and of the noise."""

    lengthscales: Array
    """One per axis."""
    signal_variance: float
    noise_variance: float
    """The variance of a single run's value around the objective at its point."""


def _matern52(squared_distance: Array) -> tuple[Array, Array]:
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
        covariance, slope = _matern52((inverse @ squared_distances).reshape(n, n))
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
        k = kernel.signal_variance * _matern52(cdist(self._x, self._x, "sqeuclidean"))[0]
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
        covariance = self._kernel.signal_variance * _matern52(cdist(at, at, "sqeuclidean"))[0] - v.T @ v
        covariance.flat[:: len(at) + 1] += JITTER * self._kernel.signal_variance
        root = cho_factor(covariance, lower=True, check_finite=False)[0]
        return np.asarray((k.T @ self._alpha)[:, None] + np.tril(root) @ rng.standard_normal((len(at), n)))

    def leave_one_out(self) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each value, predicted from all others."""
        precision = np.diag(cho_solve(self._factor, np.eye(len(self._y)), check_finite=False))
        return self._y - self._alpha / precision, 1.0 / np.sqrt(precision)

    def _project(self, at: Array) -> tuple[Array, Array]:
        """Return the covariance of the values with these scaled features, and its whitened form."""
        k = self._kernel.signal_variance * _matern52(cdist(self._x, at, "sqeuclidean"))[0]
        return k, solve_triangular(self._factor[0], k, lower=True, check_finite=False)


def log_expected_improvement(mean: Array, sd: Array, best: float | Array) -> Array:
    """Return the logarithm of the expected improvement below `best`, finite also far above it."""
    z = (best - mean) / sd
    near = np.maximum(z, -1.0)
    log_near = np.log(np.exp(-0.5 * near**2) / math.sqrt(2 * math.pi) + near * np.exp(log_ndtr(near)))
    far = np.minimum(z, -1.0)  # there, the two terms nearly cancel
    rest = np.log1p(-np.abs(far) * math.sqrt(0.5 * math.pi) * erfcx(np.abs(far) / math.sqrt(2.0)) * (1 - 1e-12))
    return np.asarray(np.log(sd) + np.where(z > -1.0, log_near, -0.5 * far**2 - 0.5 * math.log(2 * math.pi) + rest))


class Warp:
    """A monotone map that compresses the upper tail of values (lower is better).

    Values more than one scale above the median count with the logarithm of their distance, so that a few terrible runs
    do not hide the differences between good ones.
    """

    def __init__(self, values: Array) -> None:
        self._unit = float(np.abs(values).max() or 1.0)
        values = values / self._unit
        self._median = float(np.median(values))
        better = self._median - values[values <= self._median]
        self._scale = float(math.sqrt(float((better**2).mean())) or values.std() or 1.0)

    def __call__(self, values: Array) -> Array:
        z = (values / self._unit - self._median) / self._scale
        return np.asarray(np.where(z > 1.0, 1.0 + np.log(np.maximum(z, 1.0)), z))

    def inverse(self, warped: Array) -> Array:
        """Return the values of warped ones."""
        z = np.where(warped > 1.0, np.exp(np.minimum(warped - 1.0, MAX_LOG)), warped)
        return np.asarray((z * self._scale + self._median) * self._unit)


def warped(values: Array) -> Array:
    """Return values (lower is better) with their upper tail compressed, standardized."""
    return standardized(Warp(values)(values))


def standardized(values: Array) -> Array:
    """Return values scaled to mean 0 and variance 1."""
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


@dataclass(frozen=True, slots=True)
class ObjectiveScale:
    """How standardized values are turned back into the objective."""

    warp: Warp
    center: float
    width: float
    sign: float
    """1 if the objective is minimized, -1 if it is maximized."""

    def standardize(self, values: Sequence[float]) -> Array:
        """Return values of the objective, standardized; lower is better."""
        return np.asarray((self.warp(self.sign * np.array(values)) - self.center) / self.width)

    def to_objective(self, mean: Array, sd: Array) -> tuple[Array, Array]:
        """Return means and standard deviations in the unit of the objective."""
        low, middle, high = (
            self.sign * self.warp.inverse(self.center + self.width * (mean + k * sd)) for k in (-1.0, 0.0, 1.0)
        )
        return middle, np.abs(high - low) / 2


class Observations(NamedTuple):
    """Standardized values at points, as the process is fitted to them."""

    y: Array
    weights: Array
    """The number of runs averaged in each value."""
    extra: Array
    """Variance of each value in addition to the noise of a run."""

    @classmethod
    def of_objective(cls, points: Sequence[SearchPoint], sign: float) -> Observations:
        """Return the objective at known points: measured, or extrapolated where all runs were stopped early.

        Extrapolated values have the variance of the extrapolation; where it is impossible, it is almost infinite.
        """
        return cls.with_scale(points, sign)[0]

    @classmethod
    def with_scale(cls, points: Sequence[SearchPoint], sign: float) -> tuple[Observations, ObjectiveScale]:
        """Return `of_objective`, and how to turn the values back."""
        values = np.array([math.nan if point.value is None else sign * point.value for point in points])
        measured = ~np.isnan(values)
        weights = np.array([float(max(1, len(point.values))) for point in points])
        partial = [point.partial or () for point in points]
        reached = [sign * curve[-1][1] for curve in partial if curve]
        finals = values[measured]
        warp = Warp(finals if len(finals) >= MIN_FINALS else np.append(finals, reached))
        y, extra = warp(np.where(measured, values, 0.0)), np.zeros(len(points))
        if reached:
            finished = [_signed(curve, sign) for point in points if point.value is not None for curve in point.curves]
            estimates = extrapolate(finished, [_signed(curve, sign) for curve in partial if curve])
            center = float(y[measured].mean()) if measured.any() else 0.0
            for i, estimate in zip(np.flatnonzero(~measured), estimates, strict=True):
                if estimate is None:
                    y[i], extra[i] = center, 1e6
                else:
                    low, y[i], high = warp(estimate.mean + estimate.sd * np.array([-1.0, 0.0, 1.0]))
                    extra[i] = ((high - low) / 2) ** 2
        center, width = float(y.mean()), float(y.std()) or 1.0
        scale = ObjectiveScale(warp, center, width, sign)
        return cls((y - center) / width, weights, extra / width**2), scale

    @classmethod
    def of_logarithms(cls, values: Sequence[float]) -> Observations:
        """Return the logarithms of positive values, standardized."""
        return cls(standardized(np.log(np.array(values))), np.ones(len(values)), np.zeros(len(values)))

    @classmethod
    def of_failures(cls, points: Sequence[SearchPoint]) -> Observations:
        """Return 0 for success and 1 for failure, standardized."""
        failed = np.array([float(point.infeasible) for point in points])
        return cls(standardized(failed), np.ones(len(failed)), np.zeros(len(failed)))

    def at(self, subset: NDArray[np.intp]) -> Observations:
        return Observations(self.y[subset], self.weights[subset], self.extra[subset])


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


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the space, as bounds of rows."""

    low: Array
    high: Array
    choices: tuple[tuple[int, ...], ...]
    """The choices that are allowed on each unordered axis; empty: all of them, or the axis is numeric."""

    def clip(self, rows: Array, rng: np.random.RandomState) -> Array:
        """Return the rows moved into the region."""
        clipped = np.clip(rows, self.low, self.high)
        for i, allowed in enumerate(self.choices):
            if allowed:
                drawn = rng.choice(np.array(allowed), len(rows))
                clipped[:, i] = np.where(np.isin(rows[:, i], allowed), rows[:, i], drawn)
        return np.asarray(clipped)


class AcquisitionOptimizer:
    """Suggests points that maximize the expected improvement times the probability that the run does not fail.

    The acquisition is maximized by random search: uniform candidates, perturbations of the best points, and a few
    rounds of perturbations of the best candidates with shrinking widths. With several objectives, the improvement is
    that of their Chebyshev distance from the best values, with random weights for each suggestion, so that the
    suggestions together approach the whole Pareto front.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        sign: float,
        repairer: Repairer,
        *,
        earlier: Sequence[Sequence[SearchPoint]] = (),
        other_signs: Sequence[float] = (),
        per_cost: bool = False,
    ) -> None:
        """
        Args:
            sign: 1 to minimize the objective, -1 to maximize it.
            repairer: Tells which points the guard allows, and moves others to allowed ones.
            earlier: The points of each earlier study of the same axes; each has a measured one.
            other_signs: The signs of further objectives, as in `SearchPoint.others`.
            per_cost: Whether the improvement is divided by the predicted cost of the run.
        """
        self._space = SearchSpace(axes)
        self._repairer = repairer
        self._is_mostly_infeasible: bool | None = None  # None: not yet estimated
        self._sign = sign
        self._other_signs = tuple(other_signs)
        self._per_cost = per_cost
        self._threads = ThreadpoolController()
        self._kernels: dict[bytes, KernelParams] = {}  # by the data of the fit: a new process fits the same
        self._weights: dict[bytes, Array] = {}  # of earlier studies, by the data of the fit
        self._earlier_points = [[point for point in points if point.known] for points in earlier]
        self._earlier: EarlierStudies | None = None

    def suggest(
        self, points: Sequence[SearchPoint], rng: np.random.RandomState, region: Region | None = None
    ) -> Iterator[Params]:
        """Yield new points that the guard allows, best acquisition first, until all candidates are used up.

        Args:
            region: The part of the space to suggest points in; None: all of it.
        """
        feasible = {_row_key(np.array(self._space.to_row(point.params))): False for point in points}
        with self._one_thread():
            candidates, acquisition = self._make_candidates(points, feasible, rng, region)
        for i in self._feasible_candidates(candidates, acquisition, feasible):
            yield self._space.to_params(candidates[i])

    def model(self, points: Sequence[SearchPoint]) -> ObjectiveModel:
        """Return the posterior of the objective; at least one point must be measured."""
        with self._one_thread():
            return self._fit_model(self._features(points), points, self._sign, transfer=True)

    def model_of_earlier(self, points: Sequence[SearchPoint]) -> ObjectiveModel:
        """Return the posterior of an earlier study, by itself."""
        with self._one_thread():
            return self._fit_model(self._features(points), points, self._sign, transfer=False)

    def predict(self, model: ObjectiveModel, points: Sequence[Params]) -> tuple[Array, Array]:
        """Return the mean and the standard deviation at points, standardized; lower is better."""
        with self._one_thread():
            return model.predict(self._space.features(np.array([self._space.to_row(params) for params in points])))

    def believe(self, model: ObjectiveModel, points: Sequence[SearchPoint]) -> tuple[Array, Array]:
        """Return `ObjectiveModel.believe`."""
        with self._one_thread():
            return model.believe(points)

    def success_probability(self, points: Sequence[SearchPoint], at: Sequence[Params]) -> Array:
        """Return the probability that a run at each place does not fail."""
        ended = [point for point in points if point.known or point.infeasible]
        with self._one_thread():
            log_success = self._fit_failures(self._features(ended), ended, penalty=0.0)
            return np.exp(log_success(self._space.features(np.array([self._space.to_row(one) for one in at]))))

    def random_points(self, n: int, rng: np.random.RandomState) -> list[Params]:
        """Return uniform draws, without asking the guard."""
        rows = self._settle(self._space.from_uniform(rng.random_sample((n, len(self._space.axes)))))
        return [self._space.to_params(row) for row in rows]

    def importance(self, model: ObjectiveModel, n: int = 128) -> list[float]:
        """Return, for each axis, the share of the predicted variance that disappears if it is fixed (total Sobol)."""
        rng = np.random.RandomState(0)
        rows, others = (self._space.from_uniform(rng.random_sample((n, len(self._space.axes)))) for _ in range(2))
        with self._one_thread():
            mean = model.predict(self._space.features(rows))[0]
            effects = []
            for i in range(len(self._space.axes)):
                changed = rows.copy()
                changed[:, i] = others[:, i]
                effects.append(float(((model.predict(self._space.features(changed))[0] - mean) ** 2).mean()) / 2)
        total = float(mean.var()) or 1.0
        return [min(1.0, effect / total) for effect in effects]

    def _one_thread(self) -> Any:
        return self._threads.limit(limits=1, user_api="blas")  # the matrices are small, and the runs need the cores

    def _features(self, points: Sequence[SearchPoint]) -> Array:
        return self._space.features(np.array([self._space.to_row(point.params) for point in points]))

    def _make_candidates(
        self, points: Sequence[SearchPoint], feasible: dict[bytes, bool], rng: np.random.RandomState,
        region: Region | None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return candidate rows and their acquisition values."""
        space = self._space
        rows = np.array([space.to_row(point.params) for point in points])
        posterior_mean, acquisition_of = self._fit(space.features(rows), points, rng)
        known = rows[[point.known for point in points]]
        best_points = known[np.argsort(posterior_mean, kind="stable")[:N_TOP]]

        def inside(drawn: Array) -> Array:
            return self._settle(drawn if region is None else space.snap(region.clip(drawn, rng)))

        u = rng.random_sample((N_GLOBAL, rows.shape[1]))
        uniform = space.from_uniform(u)
        if region is not None:
            numeric = [n == 0 for n in space.n_choices]
            uniform = space.snap(np.where(numeric, region.low + u * (region.high - region.low), uniform))
        if self._most_is_refused():
            uniform = self._legal(uniform, rng)
        local = space.perturb(_repeated(best_points, N_LOCAL), 10 ** rng.uniform(-2.3, -0.3, N_LOCAL), rng)
        candidates = inside(np.vstack([uniform, local]))
        acquisition = acquisition_of(candidates)
        for width in 0.15 * 0.4 ** np.arange(N_REFINEMENTS):
            top = list(
                itertools.islice(self._feasible_candidates(candidates, acquisition, feasible, 20 * N_TOP), N_TOP)
            )
            if not top:
                break
            widths = width * 10 ** rng.uniform(-0.7, 0.3, N_REFINED)
            refined = inside(space.perturb(_repeated(candidates[top], N_REFINED), widths, rng))
            candidates = np.vstack([candidates, refined])
            acquisition = np.append(acquisition, acquisition_of(refined))
        return candidates, acquisition

    def _legal(self, rows: Array, rng: np.random.RandomState) -> Array:
        """Return the rows with legal combinations of the knobs that constraints couple."""
        legal = [self._space.to_row(params) for params in self._repairer.legal_pool()]
        columns = [i for i, axis in enumerate(self._space.axes) if axis.path in self._repairer.coupled]
        if not legal or not columns:
            return rows
        drawn = np.array(legal)[rng.randint(len(legal), size=len(rows))]
        rows = rows.copy()
        rows[:, columns] = drawn[:, columns]
        return rows

    def _settle(self, rows: Array) -> Array:
        """Return the rows with knobs that are not used there at their base values, so that they do not matter."""
        settle = self._repairer.settle
        if settle is None:
            return rows
        return np.array([self._space.to_row(settle(self._space.to_params(row))) for row in rows])

    def _most_is_refused(self) -> bool:
        """Return whether the guard refuses more than three quarters of the space."""
        if self._is_mostly_infeasible is None:
            u = np.random.RandomState(0).random_sample((N_FEASIBILITY_SAMPLES, len(self._space.axes)))
            rows = self._space.from_uniform(u)
            legal = sum(self._repairer.is_allowed(self._space.to_params(row)) for row in rows)
            self._is_mostly_infeasible = 4 * legal < N_FEASIBILITY_SAMPLES
        return self._is_mostly_infeasible

    def _feasible_candidates(
        self, candidates: Array, acquisition: Array, feasible: dict[bytes, bool], limit: int | None = None
    ) -> Iterator[int]:
        """Yield the indices of candidates that are new and allowed, best acquisition first.

        Args:
            feasible: Answers of the guard by row; False for points that were tried. New answers are added.
            limit: The number of candidates to look at; None: all.
        """
        for i in np.argsort(-acquisition, kind="stable")[:limit]:
            key = _row_key(candidates[i])
            if key not in feasible:
                feasible[key] = self._repairer.is_allowed(self._space.to_params(candidates[i]))
            if feasible[key]:
                yield int(i)

    def _fit(
        self, features: Array, points: Sequence[SearchPoint], rng: np.random.RandomState
    ) -> tuple[Array, Callable[[Array], Array]]:
        """Return the posterior mean at the known points, and the acquisition function of rows."""
        model = self._fit_model(features, points, self._sign, transfer=True)
        posterior_mean = model.predict(model.features)[0]
        improvement = self._several_objectives(model, features, points, rng) if self._other_signs else None
        if improvement is None:
            improvement = self._one_objective(model, posterior_mean, features, points, rng)
        ended = np.array([point.known or point.infeasible for point in points])
        log_success = self._fit_failures(features[ended], [p for p in points if p.known or p.infeasible])
        log_cost = self._fit_cost(features, points) if self._per_cost else None

        def acquisition_of(rows: Array) -> Array:
            at = self._space.features(rows)
            value = improvement(at) + log_success(at)
            return value if log_cost is None else value - log_cost(at)

        return posterior_mean, acquisition_of

    def _one_objective(
        self, model: ObjectiveModel, posterior_mean: Array, features: Array, points: Sequence[SearchPoint],
        rng: np.random.RandomState,
    ) -> Callable[[Array], Array]:  # fmt: skip
        """Return the logarithm of the expected improvement, averaged over what pending points may turn out to be."""
        observed = [point for point in points if point.known]
        best = np.full(1, min(mean for mean, p in zip(posterior_mean, observed, strict=True) if p.value is not None))
        pending = features[[not point.known and not point.infeasible for point in points]]
        predict: Callable[[Array], tuple[Array, Array]] = model.predict
        if len(pending):
            predict, best_pending = model.with_fantasies(pending, rng)
            best = np.minimum(best, best_pending)

        def log_improvement(at: Array) -> Array:
            mean, sd = predict(at)
            scenarios = log_expected_improvement(mean.reshape(len(at), -1), sd[:, None], best)
            return np.asarray(logsumexp(scenarios, axis=1))

        return log_improvement

    def _several_objectives(
        self, model: ObjectiveModel, features: Array, points: Sequence[SearchPoint], rng: np.random.RandomState
    ) -> Callable[[Array], Array] | None:
        """Return the log improvement of a random scalarization; None if a further objective was never measured."""
        models = [model]
        for k, sign in enumerate(self._other_signs):
            views = [point.of_other(k) for point in points]
            if sum(view.value is not None for view in views) < 2:
                return None
            models.append(self._fit_model(features, views, sign, transfer=False))
        weights = rng.dirichlet(np.full(len(models), WEIGHT_CONCENTRATION))
        noise = rng.standard_normal((len(models), 1, N_SCALARIZED))
        measured = features[[point.value is not None for point in points]]
        ideal = np.array([one.predict(measured)[0].min() for one in models])

        def scalarized(values: Array) -> Array:
            """Return the augmented Chebyshev distance from the best values; the first axis is the objective."""
            shape = (-1,) + (1,) * (values.ndim - 1)
            gaps = weights.reshape(shape) * (values - ideal.reshape(shape))
            return np.asarray(gaps.max(axis=0) + 0.05 * gaps.sum(axis=0))

        pending = features[[not point.known and not point.infeasible for point in points]]
        at_known = np.vstack([measured, pending]) if len(pending) else measured
        best = float(scalarized(np.array([one.predict(at_known)[0] for one in models])).min())

        def log_improvement(at: Array) -> Array:
            predictions = [one.predict(at) for one in models]
            mean, sd = (np.array([p[i] for p in predictions]) for i in range(2))
            drawn = scalarized(mean[:, :, None] + sd[:, :, None] * noise)
            gain = np.maximum(best - drawn, 0.0).mean(axis=1)
            return np.asarray(np.log(gain + 1e-9) - 1e-3 * scalarized(mean))

        return log_improvement

    def _fit_model(
        self, features: Array, points: Sequence[SearchPoint], sign: float, *, transfer: bool
    ) -> ObjectiveModel:
        known = np.array([point.known for point in points])
        observed = [point for point in points if point.known]

        def observe(given: Sequence[SearchPoint]) -> Observations:
            return Observations.of_objective(given, sign)

        x, (observations, scale) = features[known], Observations.with_scale(observed, sign)
        shared: dict[str, Any] = {
            "features": x, "feature_axis": self._space.feature_axis, "observations": observations, "scale": scale,
            "features_of": self._features,
        }  # fmt: skip
        if not (transfer and self._earlier_points):
            return ObjectiveModel(kernel=self._fitted_kernel(x, observed, observe), **shared)
        earlier = self._fitted_earlier()
        weights = self._earlier_weights(earlier, x, observed, observe)

        def prior_mean(at: Array) -> Array:
            return earlier.mean(at, weights)

        kernel = self._fitted_kernel(x, observed, observe, prior_mean)
        return ObjectiveModel(kernel=kernel, prior_mean=prior_mean, weights=weights, **shared)

    def _fitted_earlier(self) -> EarlierStudies:
        if self._earlier is None:
            processes = []
            for points in self._earlier_points:
                x = self._features(points)
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
        subset, size = _fit_subset(len(points))
        observed = observe(points[:size]).at(subset)
        key = b"".join(array.tobytes() for array in (x[subset], *observed))
        if key not in self._weights:
            while len(self._weights) > 8:
                del self._weights[next(iter(self._weights))]
            kernel = self._fitted_kernel(x, points, observe)
            process = GaussianProcess(kernel, x[subset], self._space.feature_axis, *observed)
            self._weights[key] = earlier.weights(x[subset], observed.y, process)
        return self._weights[key]

    def prior(self, at: Sequence[Params]) -> Array:
        """Return what earlier studies predict before the first run of this one, standardized; lower is better."""
        earlier = self._fitted_earlier()
        n = len(self._earlier_points)
        with self._one_thread():
            features = self._space.features(np.array([self._space.to_row(params) for params in at]))
            return earlier.mean(features, np.full(n, 1.0 / n))

    def _fit_cost(self, features: Array, points: Sequence[SearchPoint]) -> Callable[[Array], Array] | None:
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

    def _fit_failures(
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

    def _fitted_kernel(
        self, x: Array, points: Sequence[SearchPoint], observe: Callable[[Sequence[SearchPoint]], Observations],
        prior_mean: Callable[[Array], Array] | None = None,
    ) -> KernelParams:  # fmt: skip
        """Return kernel parameters fitted to the first points; how many grows in steps of REFIT_GROWTH."""
        subset, size = _fit_subset(len(points))
        features, observed = x[subset], observe(points[:size]).at(subset)
        if prior_mean is not None:
            observed = observed._replace(y=observed.y - prior_mean(features))
        key = b"".join(array.tobytes() for array in (features, *observed))
        if key not in self._kernels:
            while len(self._kernels) > 16:
                del self._kernels[next(iter(self._kernels))]
            self._kernels[key] = fit_kernel(features, self._space.feature_axis, *observed)
        return self._kernels[key]


def _fit_subset(n: int) -> tuple[NDArray[np.intp], int]:
    """Return which of `n` points kernel parameters are fitted to: some of the first ones, and how many these are."""
    size = 1
    while (larger := size + max(1, int(size * REFIT_GROWTH))) <= n:
        size = larger
    return np.linspace(0, size - 1, min(size, MAX_FIT_POINTS)).round().astype(np.intp), size


def _signed(curve: Curve, sign: float) -> Curve:
    return tuple((step, sign * value) for step, value in curve)


def _row_key(row: Array) -> bytes:
    return (np.round(row, 9) + 0.0).tobytes()


def _repeated(rows: Array, n: int) -> Array:
    """Return `n` rows: each of the given ones repeated about equally often, in order."""
    return np.repeat(rows, n // len(rows) + 1, axis=0)[:n]
