"""A Gaussian process of the study's values, and where it expects to improve on them most.

Small on purpose: numpy, scipy, a few hundred points at most. Terrible values are drawn in first, so that they do not
hide what the good ones differ in; noise is learnt, and the best so far is what the process believes, not the luckiest
run. A second process learns where runs fail. Points still at work count as what is expected of them, so that proposals
made together differ. The same points and the same random numbers give the same draws, in whatever process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import erfcx, log_ndtr
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from looplab.decide.feasible import Repairer
    from looplab.decide.search import Axis, Params, SearchPoint

Array = NDArray[np.float64]

SCALE, SCALE_SPREAD = 0.15, 0.6
"""How far a value usually tells of others, as a share of an axis (times the root of their number); and by what power of
e it may well be off. Longer ones make few points in many axes look like a slope that ends outside."""
SIGNAL_SPREAD = 1.0
NOISE, NOISE_SPREAD = 0.02, 1.5
"""The usual share of noise in the variance of the values."""
GROWTH = 0.1
"""The shape is learnt again when there are so many more points, as a share."""
MOST = 128
"""Points from which a shape is learnt; of more, some are taken evenly."""
WIDE, LOCAL = 256, 256
"""Candidates from everywhere, and from around the best points."""
TOPS = 6
"""Best points, and best candidates, around which is looked."""
ROUNDS, PER_ROUND = 4, 64
"""How often is looked around the best candidates, nearer each time, and at how many places."""
SAMPLED = 16
"""Draws by which it is found out how much of the space the guard allows."""
REPAIRED = 4
"""Candidates from everywhere that are moved to legal places, where the guard refuses most of the space."""
DOUBT = 0.05
"""Variance that keeps a place from being ruled out by the failures of its neighbours."""
RECENT = 10
STEEP = 20.0
"""The more of the last points failed, the surer the next place must be; how much it costs not to be."""


class SearchSpace:
    """The axes as the sides of a unit cube. A row is a place on each: a share of it, or the number of a choice."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        bounds = [axis.bounds for axis in axes]
        self._log = [axis.knob.log and not axis.choices for axis in axes]
        self._low = [math.log(low) if log else float(low) for (low, _), log in zip(bounds, self._log, strict=True)]
        self._high = [math.log(high) if log else float(high) for (_, high), log in zip(bounds, self._log, strict=True)]
        self.kinds = [len(axis.choices) if axis.choices and not axis.ordered else 0 for axis in axes]
        self._steps = [1.0 if a.choices else float(int(a.knob.step or 1)) if a.whole else 0.0 for a in axes]
        self.owner = np.repeat(np.arange(len(axes)), [kind or 1 for kind in self.kinds])
        """The axis of each feature."""

    def row(self, params: Params) -> list[float]:
        found = []
        for axis, low, high, log, kind in zip(self.axes, self._low, self._high, self._log, self.kinds, strict=True):
            value = params[axis.path]
            found.append(float(value) if kind else ((math.log(value) if log else value) - low) / (high - low))
        return found

    def params(self, row: Array) -> Params:
        found: dict[str, Any] = {}
        for i, axis in enumerate(self.axes):
            value = float(row[i]) if self.kinds[i] else self._low[i] + float(row[i]) * (self._high[i] - self._low[i])
            if self._log[i]:
                value = math.exp(value)
            found[axis.path] = round(value) if axis.choices or axis.whole else value
        return found

    def uniform(self, shares: Array) -> Array:
        """Places from numbers between 0 and 1."""
        rows = shares.copy()
        for i, kind in enumerate(self.kinds):
            if kind:
                rows[:, i] = np.minimum(np.floor(shares[:, i] * kind), kind - 1)
        return self.snap(rows)

    def snap(self, rows: Array) -> Array:
        """Moved to the next legal place."""
        for i, (kind, step) in enumerate(zip(self.kinds, self._steps, strict=True)):
            if kind or not step:
                continue
            low, width = self._low[i], self._high[i] - self._low[i]
            if self._log[i]:
                start = math.exp(low)
                whole = start + step * np.round((np.exp(low + rows[:, i] * width) - start) / step)
                rows[:, i] = np.minimum((np.log(whole) - low) / width, 1.0)
            else:
                rows[:, i] = np.round(rows[:, i] * width / step) * step / width
        return rows

    def features(self, rows: Array) -> Array:
        """Rows such that two of them are as far apart as they are different: 1 for another choice."""
        columns = []
        for i, kind in enumerate(self.kinds):
            if kind:
                columns += [math.sqrt(0.5) * (rows[:, i] == choice) for choice in range(kind)]
            else:
                columns.append(rows[:, i])
        return np.column_stack(columns)

    def around(self, rows: Array, widths: Array, rng: np.random.RandomState) -> Array:
        """Each row with some of its places moved, by about its width."""
        n, d = rows.shape
        moved = rng.random_sample((n, d)) < np.maximum(2.0 / d, rng.random_sample((n, 1)) ** 2)
        moved[np.arange(n), rng.randint(d, size=n)] = True
        steps = rng.standard_normal((n, d)) * widths[:, None]
        other = rng.random_sample((n, d))
        found = rows.copy()
        for i, kind in enumerate(self.kinds):
            if kind:
                moved[:, i] &= rng.random_sample(n) < 0.5
                found[:, i] = np.where(moved[:, i], np.floor(other[:, i] * kind), rows[:, i])
                continue
            if self._steps[i]:  # a step is at least one
                least = 0.75 * self._steps[i] / (self._high[i] - self._low[i])
                steps[:, i] = np.where(np.abs(steps[:, i]) < least, np.sign(steps[:, i]) * least, steps[:, i])
            place = np.abs(rows[:, i] + np.where(moved[:, i], steps[:, i], 0.0))
            found[:, i] = np.clip(np.where(place > 1.0, 2.0 - place, place), 0.0, 1.0)
        return self.snap(found)


@dataclass(frozen=True, slots=True)
class KernelParams:
    """What was learnt about how values vary."""

    scales: Array
    """For each axis, how far apart two values still tell of each other."""
    signal: float
    """The variance of what the knobs explain."""
    noise: float
    """The variance of what they do not."""


def _matern(r2: Array) -> tuple[Array, Array]:
    """The correlation at a squared distance, and -6/5 of its slope."""
    r = np.sqrt(5.0 * r2)
    decay = np.exp(-r)
    slope = (1.0 + r) * decay
    return slope + r2 * (5.0 / 3.0) * decay, slope


def fit_shape(features: Array, owner: NDArray[np.intp], y: Array, weights: Array) -> KernelParams:
    """The most plausible shape; `weights` is how many runs stand behind each value."""
    n, d = len(y), int(owner.max()) + 1
    apart = np.zeros((d, n, n))
    for column, axis in zip(features.T, owner, strict=True):
        apart[axis] += (column[:, None] - column[None, :]) ** 2
    flat = apart.reshape(d, -1)
    usual = np.array([math.log(SCALE) + 0.5 * math.log(d)] * d + [0.0, math.log(NOISE)])
    spread = np.array([SCALE_SPREAD] * d + [SIGNAL_SPREAD, NOISE_SPREAD])

    def loss(theta: Array) -> tuple[float, Array]:
        inverse = np.exp(-2.0 * theta[:d])
        signal, noise = math.exp(theta[d]), math.exp(theta[d + 1])
        near, slope = _matern((inverse @ flat).reshape(n, n))
        near *= signal
        k = near.copy()
        k.flat[:: n + 1] += noise / weights + 1e-8
        try:
            factor = cho_factor(k, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(theta)
        alpha = cho_solve(factor, y, check_finite=False)
        w = cho_solve(factor, np.eye(n), check_finite=False) - np.outer(alpha, alpha)
        off = (theta - usual) / spread
        value = 0.5 * y @ alpha + np.log(np.diag(factor[0])).sum() + 0.5 * off @ off
        grad = off / spread
        grad[:d] += 0.5 * (5.0 / 3.0) * signal * inverse * (flat @ (w * slope).ravel())
        grad[d] += 0.5 * np.sum(w * near)
        grad[d + 1] += 0.5 * noise * np.sum(np.diag(w) / weights)
        return float(value), grad

    longest = math.log(20.0) + 0.5 * math.log(d)
    bounds = [(math.log(0.02), longest)] * d + [(-4.0, 4.0), (math.log(1e-5), 1.5)]
    rough = np.append(usual[:d] - 1.0, [0.0, math.log(0.3)])  # the other story: shorter ways, more noise
    found = [
        minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
        for first in (usual, rough)
    ]
    best = np.exp(min(found, key=lambda end: float(end.fun)).x)
    return KernelParams(best[:d], float(best[d]), float(best[d + 1]))


class GaussianProcess:
    """A Gaussian process that has seen some values."""

    def __init__(self, shape: KernelParams, features: Array, owner: NDArray[np.intp], y: Array, weights: Array) -> None:
        self._shape = shape
        self._by = shape.scales[owner]
        self._x = features / self._by
        k = shape.signal * _matern(cdist(self._x, self._x, "sqeuclidean"))[0]
        k.flat[:: len(y) + 1] += shape.noise / weights + 1e-8
        self._factor = cho_factor(k, lower=True, check_finite=False)
        self._alpha = cho_solve(self._factor, y, check_finite=False)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """The expected value at each place, without noise, and how uncertain it is."""
        k = self._shape.signal * _matern(cdist(self._x, features / self._by, "sqeuclidean"))[0]
        v = solve_triangular(self._factor[0], k, lower=True, check_finite=False)
        variance = self._shape.signal - np.einsum("ij,ij->j", v, v)
        return k.T @ self._alpha, np.sqrt(np.maximum(variance, 1e-10))


def log_improvement(mean: Array, sd: Array, best: float) -> Array:
    """The logarithm of the expected improvement below `best`."""
    z = (best - mean) / sd
    near = np.maximum(z, -1.0)
    value = np.log(np.exp(-0.5 * near**2) / math.sqrt(2 * math.pi) + near * np.exp(log_ndtr(near)))
    far = np.minimum(z, -1.0)  # there, the two terms nearly cancel
    rest = np.log1p(-np.abs(far) * math.sqrt(0.5 * math.pi) * erfcx(np.abs(far) / math.sqrt(2.0)) * (1 - 1e-12))
    return np.asarray(np.log(sd) + np.where(z > -1.0, value, -0.5 * far**2 - 0.5 * math.log(2 * math.pi) + rest))


def warped(values: Array) -> Array:
    """Values (the smaller, the better) of mean 0 and variance 1. What is much worse than the middle counts as worse,
    but only by the logarithm of how much, so that a few terrible runs do not hide what the good ones differ in."""
    values = values / (np.abs(values).max() or 1.0)
    middle = np.median(values)
    better = middle - values[values <= middle]
    z = (values - middle) / (math.sqrt(float((better**2).mean())) or values.std() or 1.0)
    z = np.where(z > 1.0, 1.0 + np.log(np.maximum(z, 1.0)), z)
    return standard(z)


def standard(values: Array) -> Array:
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


class AcquisitionOptimizer:
    """Draws where the expected improvement, times the chance that the run does not fail, is largest."""

    def __init__(self, axes: Sequence[Axis], sign: float, repairer: Repairer) -> None:
        self._cube = SearchSpace(axes)
        self._repairer = repairer
        self._is_tight: bool | None = None
        """Whether most of the space is not allowed; None: not yet known."""
        self._sign = sign
        """Times a value: what is to be small."""
        self._threads = ThreadpoolController()
        self._shapes: dict[bytes, KernelParams] = {}  # by what it was learnt from: a new process learns the same

    def draws(self, points: Sequence[SearchPoint], rng: np.random.RandomState) -> Iterator[Params]:
        """The best place first; then others that were looked at, as long as they are new and the guard allows them."""
        known = {_key(np.array(self._cube.row(point.params))): False for point in points}
        with self._threads.limit(limits=1, user_api="blas"):  # the matrices are small, and the cores are the runs'
            some, worth = self._candidates(points, known, rng)
        for i in self._open(some, worth, known):
            yield self._cube.params(some[i])

    def _candidates(
        self, points: Sequence[SearchPoint], known: dict[bytes, bool], rng: np.random.RandomState
    ) -> tuple[Array, Array]:
        """Rows and what they are worth: from everywhere, from around the best points, and around the best of those."""
        cube = self._cube
        rows = np.array([cube.row(point.params) for point in points])
        believed, score = self._learn(cube.features(rows), points)
        measured = rows[[point.value is not None for point in points]]
        tops = measured[np.argsort(believed, kind="stable")[:TOPS]]
        everywhere = cube.uniform(rng.random_sample((WIDE, rows.shape[1])))
        if self._most_is_refused():
            for i in range(REPAIRED):
                params = self._repairer.repair(cube.params(everywhere[i]), rng, spread=True)
                if params is not None:
                    everywhere[i] = cube.row(params)
        local = cube.around(_repeated(tops, LOCAL), 10 ** rng.uniform(-2.3, -0.3, LOCAL), rng)
        some = np.vstack([everywhere, local])
        worth = score(some)
        for width in 0.15 * 0.4 ** np.arange(ROUNDS):
            keep = list(itertools.islice(self._open(some, worth, known, 20 * TOPS), TOPS))
            if not keep:
                break
            new = cube.around(_repeated(some[keep], PER_ROUND), width * 10 ** rng.uniform(-0.7, 0.3, PER_ROUND), rng)
            some, worth = np.vstack([some, new]), np.append(worth, score(new))
        return some, worth

    def _most_is_refused(self) -> bool:
        if self._is_tight is None:
            shares = np.random.RandomState(0).random_sample((SAMPLED, len(self._cube.axes)))
            rows = self._cube.uniform(shares)
            legal = sum(self._repairer.is_allowed(self._cube.params(row)) for row in rows)
            self._is_tight = 4 * legal < SAMPLED
        return self._is_tight

    def _open(self, some: Array, worth: Array, known: dict[bytes, bool], most: int | None = None) -> Iterator[int]:
        """The rows that may be proposed, the best first; `known` grows by what the guard says of them."""
        for i in np.argsort(-worth, kind="stable")[:most]:
            key = _key(some[i])
            if key not in known:
                known[key] = self._repairer.is_allowed(self._cube.params(some[i]))
            if known[key]:
                yield int(i)

    def _learn(self, features: Array, points: Sequence[SearchPoint]) -> tuple[Array, Callable[[Array], Array]]:
        """What is believed of the measured points, and what any rows are worth trying."""
        cube = self._cube
        values = np.array([math.nan if point.value is None else self._sign * point.value for point in points])
        failed = np.array([point.infeasible for point in points])
        measured = ~np.isnan(values)
        waiting = features[~measured & ~failed]
        x, y = features[measured], warped(values[measured])
        weights = np.array([float(max(1, len(point.values))) for point in points])[measured]
        shape = self._shape(x, values[measured], weights, warped)
        process = GaussianProcess(shape, x, cube.owner, y, weights)
        believed = process.predict(x)[0]
        if len(waiting):  # as if they had given what is expected of them: then there is little to learn beside them
            y, weights = np.append(y, process.predict(waiting)[0]), np.append(weights, np.ones(len(waiting)))
            process = GaussianProcess(shape, np.vstack([x, waiting]), cube.owner, y, weights)
        survival = self._survival(features[measured | failed], failed[measured | failed])

        def score(rows: Array) -> Array:
            places = cube.features(rows)
            return log_improvement(*process.predict(places), float(believed.min())) + survival(places)

        return believed, score

    def _survival(self, x: Array, failed: NDArray[np.bool_]) -> Callable[[Array], Array]:
        """The logarithm of the chance that a run does not fail."""
        if not failed.any():
            return lambda places: np.zeros(len(places))
        y, weights = failed.astype(np.float64), np.ones(len(failed))
        shape = self._shape(x, y, weights, standard)
        process = GaussianProcess(shape, x, self._cube.owner, standard(y), weights)
        half = float((0.5 - y.mean()) / (y.std() or 1.0))
        bar = math.log(min(0.95, 3.0 * float(y[-RECENT:].mean()) + 1e-3))

        def chance(places: Array) -> Array:
            mean, sd = process.predict(places)
            log = log_ndtr((half - mean) / np.sqrt(sd**2 + DOUBT))
            return np.asarray(log + STEEP * np.minimum(log - bar, 0.0))

        return chance

    def _shape(self, x: Array, y: Array, weights: Array, scaled: Callable[[Array], Array]) -> KernelParams:
        """Learnt again only when there is a tenth more to learn from: until then, from the points of that time."""
        size = 1
        while (more := size + max(1, int(size * GROWTH))) <= len(y):
            size = more
        some = np.linspace(0, size - 1, min(size, MOST)).round().astype(int)
        x, y, weights = x[some], y[some], weights[some]
        key = x.tobytes() + y.tobytes() + weights.tobytes()
        if key not in self._shapes:
            while len(self._shapes) > 8:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = fit_shape(x, self._cube.owner, scaled(y), weights)
        return self._shapes[key]


def _key(row: Array) -> bytes:
    return (np.round(row, 9) + 0.0).tobytes()


def _repeated(rows: Array, n: int) -> Array:
    return np.repeat(rows, n // len(rows) + 1, axis=0)[:n]
