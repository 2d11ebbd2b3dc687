"""A Gaussian process surrogate of the objective, and an optimizer of its expected improvement.

Deliberately small: numpy, scipy, at most a few hundred points. Objective values are warped first, so that a few
terrible runs do not hide the differences between good ones. The noise variance is learnt, and the incumbent is the best
posterior mean, not the luckiest run. A second process models where runs fail. With pending points, the expected
improvement is averaged over draws of what they may turn out to be ("fantasies"), so that proposals of one batch
differ. Earlier studies of the same knobs are a prior mean, as far as they rank the points of this study. Given the same
points and the same random state, every process draws the same candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import erfcx, log_ndtr, logsumexp
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from looplab.decide.axes import Axis, Params
from looplab.decide.fitting import ModelFitter
from looplab.decide.objective_model import ObjectiveModel
from looplab.decide.points import SearchPoint
from looplab.decide.space import Array, Region, SearchSpace, row_key

if TYPE_CHECKING:
    from looplab.decide.feasible import Repairer

N_GLOBAL, N_LOCAL = 256, 256
"""Initial candidates: uniform over the space, and perturbations of the best points."""
N_TOP = 6
"""Best points, and in each refinement round best candidates, that are perturbed."""
MAX_ENUMERATED = 1024
"""Maximum size of a finite space for which all points are candidates."""
N_REFINEMENTS, N_REFINED = 4, 64
"""Rounds of local refinement, each with a smaller step width, and candidates per round."""
N_FEASIBILITY_SAMPLES = 16
"""Uniform samples that estimate which share of the space the guard allows."""
WEIGHT_CONCENTRATION = 0.3
"""Dirichlet parameter of the random weights of several objectives: below 1, one objective often outweighs the others,
so that the ends of the front are found too."""
N_SCALARIZED = 32
"""Number of draws over which the improvement of a scalarization of several objectives is averaged."""


def log_expected_improvement(mean: Array, sd: Array, best: float | Array) -> Array:
    """Return the logarithm of the expected improvement below `best`, finite also far above it."""
    z = (best - mean) / sd
    near = np.maximum(z, -1.0)
    log_near = np.log(np.exp(-0.5 * near**2) / math.sqrt(2 * math.pi) + near * np.exp(log_ndtr(near)))
    far = np.minimum(z, -1.0)  # there, the two terms nearly cancel
    rest = np.log1p(-np.abs(far) * math.sqrt(0.5 * math.pi) * erfcx(np.abs(far) / math.sqrt(2.0)) * (1 - 1e-12))
    return np.asarray(np.log(sd) + np.where(z > -1.0, log_near, -0.5 * far**2 - 0.5 * math.log(2 * math.pi) + rest))


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
        self._all_rows = self._space.all_rows(MAX_ENUMERATED)
        self._fitter = ModelFitter(self._space, sign, earlier)
        self._sign = sign
        self._other_signs = tuple(other_signs)
        self._per_cost = per_cost
        self._threads = ThreadpoolController()

    def suggest(
        self, points: Sequence[SearchPoint], rng: np.random.RandomState, region: Region | None = None
    ) -> Iterator[Params]:
        """Yield new points that the guard allows, best acquisition first, until all candidates are used up.

        Args:
            region: The part of the space to suggest points in; None: all of it.
        """
        feasible = {row_key(np.array(self._space.to_row(point.params))): False for point in points}
        with self._one_thread():
            candidates, acquisition = self._make_candidates(points, feasible, rng, region)
        for i in self._feasible_candidates(candidates, acquisition, feasible):
            yield self._space.to_params(candidates[i])

    def model(self, points: Sequence[SearchPoint]) -> ObjectiveModel:
        """Return the posterior of the objective; at least one point must be measured."""
        with self._one_thread():
            return self._fitter.fit_objective(self._fitter.features(points), points, self._sign, transfer=True)

    def model_of_earlier(self, points: Sequence[SearchPoint]) -> ObjectiveModel:
        """Return the posterior of an earlier study, by itself."""
        with self._one_thread():
            return self._fitter.fit_objective(self._fitter.features(points), points, self._sign, transfer=False)

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
            log_success = self._fitter.fit_failures(self._fitter.features(ended), ended, penalty=0.0)
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

    def prior(self, at: Sequence[Params]) -> Array:
        """Return `ModelFitter.prior`."""
        with self._one_thread():
            return self._fitter.prior(at)

    def _one_thread(self) -> Any:
        return self._threads.limit(limits=1, user_api="blas")  # the matrices are small, and the runs need the cores

    def _make_candidates(
        self, points: Sequence[SearchPoint], feasible: dict[bytes, bool], rng: np.random.RandomState,
        region: Region | None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return candidate rows and their acquisition values."""
        space = self._space
        rows = np.array([space.to_row(point.params) for point in points])
        posterior_mean, acquisition_of = self._fit(space.features(rows), points, rng)
        if self._all_rows is not None:  # a small grid: nothing is left to chance, or out
            candidates = self._settle(self._all_rows if region is None else region.select(self._all_rows))
            return candidates, acquisition_of(candidates)
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
            key = row_key(candidates[i])
            if key not in feasible:
                feasible[key] = self._repairer.is_allowed(self._space.to_params(candidates[i]))
            if feasible[key]:
                yield int(i)

    def _fit(
        self, features: Array, points: Sequence[SearchPoint], rng: np.random.RandomState
    ) -> tuple[Array, Callable[[Array], Array]]:
        """Return the posterior mean at the known points, and the acquisition function of rows."""
        model = self._fitter.fit_objective(features, points, self._sign, transfer=True)
        posterior_mean = model.predict(model.features)[0]
        improvement = self._several_objectives(model, features, points, rng) if self._other_signs else None
        if improvement is None:
            improvement = self._one_objective(model, posterior_mean, features, points, rng)
        ended = np.array([point.known or point.infeasible for point in points])
        log_success = self._fitter.fit_failures(features[ended], [p for p in points if p.known or p.infeasible])
        log_cost = self._fitter.fit_cost(features, points) if self._per_cost else None

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
            models.append(self._fitter.fit_objective(features, views, sign, transfer=False))
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


def _repeated(rows: Array, n: int) -> Array:
    """Return `n` rows: each of the given ones repeated about equally often, in order."""
    return np.repeat(rows, n // len(rows) + 1, axis=0)[:n]
