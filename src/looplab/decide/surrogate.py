"""A Gaussian process surrogate of the objective, and an optimizer of its expected improvement.

Deliberately small: numpy, scipy, at most a few hundred points. Objective values are warped first, so that a few
terrible runs do not hide the differences between good ones. The noise variance is learnt, and the incumbent is the best
posterior mean, not the luckiest run. A second process models where runs fail. With pending points, the expected
improvement is averaged over draws of what they may turn out to be ("fantasies"), so that proposals made together
differ. Given the same points and the same random state, every process draws the same candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
N_REPAIRED = 4
"""Global candidates that are repaired if the guard refuses most of the space."""
JITTER = 1e-6
"""Noise variance of a draw, as a share of the signal variance; without it, rounding makes covariances indefinite."""
N_FANTASIES = 16
"""Joint draws of the objective at the pending points, over which the expected improvement is averaged."""
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


def warped(values: Array) -> Array:
    """Return values (lower is better) with their upper tail compressed, standardized."""
    return standardized(Warp(values)(values))


def standardized(values: Array) -> Array:
    """Return values scaled to mean 0 and variance 1."""
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


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
        scale = float(y.std()) or 1.0
        return cls((y - y.mean()) / scale, weights, extra / scale**2)

    @classmethod
    def of_failures(cls, points: Sequence[SearchPoint]) -> Observations:
        """Return 0 for success and 1 for failure, standardized."""
        failed = np.array([float(point.infeasible) for point in points])
        return cls(standardized(failed), np.ones(len(failed)), np.zeros(len(failed)))

    def at(self, subset: NDArray[np.intp]) -> Observations:
        return Observations(self.y[subset], self.weights[subset], self.extra[subset])


class AcquisitionOptimizer:
    """Suggests points that maximize the expected improvement times the probability that the run does not fail.

    The acquisition is maximized by random search: uniform candidates, perturbations of the best points, and a few
    rounds of perturbations of the best candidates with shrinking widths.
    """

    def __init__(self, axes: Sequence[Axis], sign: float, repairer: Repairer) -> None:
        """
        Args:
            sign: 1 to minimize the objective, -1 to maximize it.
            repairer: Tells which points the guard allows, and moves others to allowed ones.
        """
        self._space = SearchSpace(axes)
        self._repairer = repairer
        self._is_mostly_infeasible: bool | None = None  # None: not yet estimated
        self._sign = sign
        self._threads = ThreadpoolController()
        self._kernels: dict[bytes, KernelParams] = {}  # by the data of the fit: a new process fits the same

    def suggest(self, points: Sequence[SearchPoint], rng: np.random.RandomState) -> Iterator[Params]:
        """Yield new points that the guard allows, best acquisition first, until all candidates are used up."""
        feasible = {_row_key(np.array(self._space.to_row(point.params))): False for point in points}
        with self._threads.limit(limits=1, user_api="blas"):  # the matrices are small, and the runs need the cores
            candidates, acquisition = self._make_candidates(points, feasible, rng)
        for i in self._feasible_candidates(candidates, acquisition, feasible):
            yield self._space.to_params(candidates[i])

    def _make_candidates(
        self, points: Sequence[SearchPoint], feasible: dict[bytes, bool], rng: np.random.RandomState
    ) -> tuple[Array, Array]:
        """Return candidate rows and their acquisition values."""
        space = self._space
        rows = np.array([space.to_row(point.params) for point in points])
        posterior_mean, acquisition_of = self._fit(space.features(rows), points, rng)
        known = rows[[point.known for point in points]]
        best_points = known[np.argsort(posterior_mean, kind="stable")[:N_TOP]]
        uniform = space.from_uniform(rng.random_sample((N_GLOBAL, rows.shape[1])))
        if self._most_is_refused():
            for i in range(N_REPAIRED):
                params = self._repairer.repair(space.to_params(uniform[i]), rng, spread=True)
                if params is not None:
                    uniform[i] = space.to_row(params)
        local = space.perturb(_repeated(best_points, N_LOCAL), 10 ** rng.uniform(-2.3, -0.3, N_LOCAL), rng)
        candidates = self._settle(np.vstack([uniform, local]))
        acquisition = acquisition_of(candidates)
        for width in 0.15 * 0.4 ** np.arange(N_REFINEMENTS):
            top = list(
                itertools.islice(self._feasible_candidates(candidates, acquisition, feasible, 20 * N_TOP), N_TOP)
            )
            if not top:
                break
            widths = width * 10 ** rng.uniform(-0.7, 0.3, N_REFINED)
            refined = self._settle(space.perturb(_repeated(candidates[top], N_REFINED), widths, rng))
            candidates = np.vstack([candidates, refined])
            acquisition = np.append(acquisition, acquisition_of(refined))
        return candidates, acquisition

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
        space = self._space
        known, failed = (np.array([bool(flag) for flag in flags]) for flags in zip(
            *((point.known, point.infeasible) for point in points), strict=True
        ))  # fmt: skip
        observed = [point for point in points if point.known]
        x, (y, weights, extra) = features[known], self._observe(observed)
        kernel = self._fitted_kernel(x, observed, self._observe)
        process = GaussianProcess(kernel, x, space.feature_axis, y, weights, extra)
        posterior_mean = process.predict(x)[0]
        best = np.full(1, min(mean for mean, p in zip(posterior_mean, observed, strict=True) if p.value is not None))
        pending = features[~known & ~failed]
        if len(pending):  # in each fantasy they are known, without the noise of a run: nothing is left to gain there
            fantasies = process.draw(pending, N_FANTASIES, rng)
            best = np.minimum(best, fantasies.min(axis=0))
            y = np.vstack([np.repeat(y[:, None], N_FANTASIES, axis=1), fantasies])
            weights = np.append(weights, np.full(len(pending), np.inf))
            extra = np.append(extra, np.full(len(pending), JITTER * kernel.signal_variance))
            process = GaussianProcess(kernel, np.vstack([x, pending]), space.feature_axis, y, weights, extra)
        log_success = self._fit_failures(features[known | failed], [p for p in points if p.known or p.infeasible])

        def acquisition_of(rows: Array) -> Array:
            at = space.features(rows)
            mean, sd = process.predict(at)
            scenarios = log_expected_improvement(mean.reshape(len(at), -1), sd[:, None], best)
            return np.asarray(logsumexp(scenarios, axis=1)) + log_success(at)

        return posterior_mean, acquisition_of

    def _observe(self, points: Sequence[SearchPoint]) -> Observations:
        return Observations.of_objective(points, self._sign)

    def _fit_failures(self, x: Array, points: Sequence[SearchPoint]) -> Callable[[Array], Array]:
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
            return np.asarray(log_prob + FAILURE_PENALTY * np.minimum(log_prob - required, 0.0))

        return log_success

    def _fitted_kernel(
        self, x: Array, points: Sequence[SearchPoint], observe: Callable[[Sequence[SearchPoint]], Observations]
    ) -> KernelParams:
        """Return kernel parameters fitted to the first points; how many grows in steps of REFIT_GROWTH."""
        size = 1
        while (larger := size + max(1, int(size * REFIT_GROWTH))) <= len(points):
            size = larger
        subset = np.linspace(0, size - 1, min(size, MAX_FIT_POINTS)).round().astype(np.intp)
        features, observed = x[subset], observe(points[:size]).at(subset)
        key = b"".join(array.tobytes() for array in (features, *observed))
        if key not in self._kernels:
            while len(self._kernels) > 8:
                del self._kernels[next(iter(self._kernels))]
            self._kernels[key] = fit_kernel(features, self._space.feature_axis, *observed)
        return self._kernels[key]


def _signed(curve: Curve, sign: float) -> Curve:
    return tuple((step, sign * value) for step, value in curve)


def _row_key(row: Array) -> bytes:
    return (np.round(row, 9) + 0.0).tobytes()


def _repeated(rows: Array, n: int) -> Array:
    """Return `n` rows: each of the given ones repeated about equally often, in order."""
    return np.repeat(rows, n // len(rows) + 1, axis=0)[:n]
