"""The sampler that the settings of a search name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from looplab import plugins
from looplab.config.lab import SearchConfig, TieBreak
from looplab.decide.auto import AutoSampler
from looplab.decide.axes import Axis
from looplab.decide.feasible import Repairer
from looplab.decide.optuna_models import AfterStartup, CmaModel, DrawModel, GpModel, OptunaModel, TpeModel
from looplab.decide.points import SearchPoint
from looplab.decide.sampling import Sampler, Uniform, grid


def make_sampler(
    settings: SearchConfig,
    axes: Sequence[Axis],
    goal: Literal["max", "min"],
    repairer: Repairer,
    *,
    further: Sequence[TieBreak] = (),
    earlier: Callable[[], Sequence[Sequence[SearchPoint]]] = tuple,
) -> Sampler:
    """Return the sampler that the settings name.

    Args:
        further: Objectives after the first; only `auto` uses them.
        earlier: Returns the points of earlier studies; only `auto` uses them.
    """
    if settings.sampler == "grid":
        return grid(axes)
    uniform = Uniform(settings, axes)
    if settings.sampler in ("random", "qmc"):
        return uniform
    if settings.sampler == "auto":
        return AutoSampler(settings, axes, goal, repairer, further, earlier)
    models: dict[str, Callable[..., DrawModel]] = {"tpe": TpeModel, "gp": GpModel, "cmaes": CmaModel}
    if settings.sampler in models:
        return AfterStartup(settings, uniform, models[settings.sampler](settings, axes, goal))
    make = partial(plugins.make, "samplers", settings.sampler, **settings.options)
    make(seed=settings.seed)  # reports wrong options at once
    return AfterStartup(settings, uniform, OptunaModel(settings, axes, goal, make))
