"""The default sampler: looplab's own Gaussian process, and TPE for large studies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.lab import SearchConfig, TieBreak
from looplab.decide.axes import Axis, Params
from looplab.decide.feasible import Repairer
from looplab.decide.optuna_models import AfterStartup, TpeModel
from looplab.decide.packages import is_installed
from looplab.decide.points import SearchPoint, params_key, select_points
from looplab.decide.sampling import MAX_DRAWS, Drawn, Sampler, Uniform, describe, generator, startup_draws

if TYPE_CHECKING:
    from looplab.decide.acquisition import AcquisitionOptimizer
    from looplab.decide.space import Region

GP_STARTUP = (6, 4, 16)
"""The same for looplab's own Gaussian process: the minimum, how many more than there are knobs, and the maximum."""
MAX_GP_POINTS = 300
"""Number of points beyond which an exact Gaussian process is slow. From there on TPE takes over; without Optuna, the
process is fitted to a subset of this size."""
MIN_STARTUP = 4
"""The fewest measured points before the model is used, if there are earlier studies."""
MAX_FROM_EARLIER = 2
"""Points of earlier studies that are tried first."""


class AutoSampler:
    """Looplab's own Gaussian process up to MAX_GP_POINTS, then TPE; without Optuna, the process on a subset."""

    def __init__(
        self,
        settings: SearchConfig,
        axes: Sequence[Axis],
        goal: Literal["max", "min"],
        repairer: Repairer,
        further: Sequence[TieBreak] = (),
        earlier: Callable[[], Sequence[Sequence[SearchPoint]]] = tuple,
    ) -> None:
        self._settings = settings
        self.uniform = Uniform(settings, axes)
        self._repairer = repairer
        self._axes = axes
        self._goal: Literal["max", "min"] = goal
        self._random = Uniform(settings.model_copy(update={"sampler": "random"}), axes)
        self._with_optuna = is_installed("optuna")
        self._tpe: Sampler | None = None
        self._earlier = earlier
        self._further = further

    @cached_property
    def acquisition(self) -> AcquisitionOptimizer:
        from looplab.decide.acquisition import AcquisitionOptimizer

        return AcquisitionOptimizer(
            self._axes,
            sign_of(self._goal),
            self._repairer,
            earlier=self._earlier(),
            other_signs=[sign_of(one.goal) for one in self._further],
            per_cost=self._settings.cost is not None,
        )

    @cached_property
    def startup(self) -> int:
        """Measured points before the model is used; fewer if there are earlier studies to learn from."""
        full = self._settings.startup or gp_startup(len(self._axes))
        return full if self._settings.startup or not self._earlier() else max(MIN_STARTUP, full // 2)

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        measured = sum(point.known for point in points)
        if measured < self.startup or all(point.value is None for point in points):
            yield from itertools.islice(self.best_before()[count:], 1)
            yield from startup_draws(self.uniform(count, points, refused), measured, self.startup)
        if self.has_model(points):
            yield from self._suggest(count, points)
        if not self._with_optuna:
            yield from self._random(count, points, refused)
            return
        if self._tpe is None:  # Optuna is slow to import, and most studies never need it
            settings = self._settings.model_copy(update={"sampler": "tpe"})
            self._tpe = AfterStartup(
                settings, Uniform(settings, self._axes), TpeModel(settings, self._axes, self._goal)
            )
        yield from self._tpe(count, points, refused)

    def has_model(self, points: Sequence[SearchPoint]) -> bool:
        """Return whether the Gaussian process is used for this many points."""
        return len(points) <= MAX_GP_POINTS or not self._with_optuna

    def is_allowed(self, params: Params) -> bool:
        """Return whether the guard allows a point."""
        return self._repairer.is_allowed(params)

    def modelled(self, points: list[SearchPoint]) -> list[SearchPoint]:
        """Return the points that the process is fitted to."""
        return select_points(points, MAX_GP_POINTS, self._goal)

    @cache  # noqa: B019 (lives as long as the proposer)
    def best_before(self) -> list[Drawn]:
        """Return the best measured points of earlier studies, by what they predict together."""
        measured = [point for points in self._earlier() for point in points if point.value is not None]
        if not measured:
            return []
        predicted = self.acquisition.prior([point.params for point in measured])
        best: dict[tuple[Any, ...], Drawn] = {}
        for i in predicted.argsort(kind="stable"):
            params = measured[i].params
            best.setdefault(params_key(params), Drawn(params, "the best config of earlier studies with these knobs"))
            if len(best) >= MAX_FROM_EARLIER:
                break
        return list(best.values())

    def inside(self, bounds: Mapping[str, tuple[Any, ...]]) -> Sampler:
        """Return a sampler of a region, by parameters as `SearchSpace.region` takes them."""
        from looplab.decide.space import SearchSpace

        space = SearchSpace(self._axes)
        region = space.region(bounds)

        def draw(count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
            if any(point.value is not None for point in points):
                yield from self._suggest(count, points, region)
            rng = generator(self._settings.seed, count, 3)
            for _ in range(MAX_DRAWS):
                u = rng.random_sample((1, len(self._axes)))
                (row,) = space.snap(region.clip(region.low + u * (region.high - region.low), rng))
                yield Drawn(space.to_params(row), "a random point in the region")

        return draw

    def _suggest(self, count: int, points: list[SearchPoint], region: Region | None = None) -> Iterator[Drawn]:
        subset = self.modelled(points)
        per = f" per {'second' if self._settings.cost == 'seconds' else self._settings.cost}"
        basis = f"the expected improvement{per * (self._settings.cost is not None)} on {describe(points)}"
        basis += f", from {len(subset)} of them" if len(subset) < len(points) else ""
        for params in self.acquisition.suggest(subset, generator(self._settings.seed, count), region):
            yield Drawn(params, basis)


def sign_of(goal: str) -> float:
    """Return 1 to minimize and -1 to maximize."""
    return -1.0 if goal == "max" else 1.0


def gp_startup(n_axes: int) -> int:
    """Return the number of measured points before the Gaussian process is used."""
    fewest, more, most = GP_STARTUP
    return max(fewest, min(n_axes + more, most))
