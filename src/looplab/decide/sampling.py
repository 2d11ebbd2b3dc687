"""Samplers as streams of draws, and the samplers that need no model: uniform, Sobol sequence, grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from looplab.config.lab import SearchConfig
from looplab.decide.axes import Axis, Params
from looplab.decide.points import SearchPoint, params_key
from looplab.errors import LabError

if TYPE_CHECKING:
    import numpy as np

MAX_DRAWS = 64
"""Draws for one proposal before the sampler gives up."""
MAX_GRID = 100_000
"""Points of the largest grid."""
NAMES = {"qmc": "Sobol sequence", "random": "random draw"}


class Drawn(NamedTuple):
    """A point that a sampler suggests."""

    params: Params
    basis: str
    """How it was chosen, in words; becomes the proposal's reason."""
    spread: bool = False
    """Whether it was drawn to fill the space rather than for its own expected value."""


Sampler = Callable[[int, list[SearchPoint], list[SearchPoint]], Iterator[Drawn]]
"""Yields draws: endlessly, or for a grid until it is exhausted.

Its arguments are the number of proposals so far, all points, and a list to which the caller adds each draw that was
refused or not new.
"""


def generator(*seeds: int) -> np.random.RandomState:
    """Return a random state that depends on all the seeds."""
    import numpy as np

    return np.random.RandomState(np.random.SeedSequence([seed % 2**32 for seed in seeds]).generate_state(4))


class Uniform:
    """Uniform draws: independent ones, or a scrambled Sobol sequence, which leaves no gaps."""

    def __init__(self, settings: SearchConfig, axes: Sequence[Axis]) -> None:
        self._settings = settings
        self._axes = axes
        self._sequence: list[Any] = []  # the first points of the Sobol sequence

    def __call__(self, count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        sobol = self._settings.sampler != "random"
        for i in itertools.count(count):
            u = self._sobol(i) if sobol else self._random(count, i - count)
            yield Drawn(self._to_params(u), NAMES["qmc" if sobol else "random"], spread=True)

    def _to_params(self, u: Sequence[float]) -> Params:
        return {axis.path: axis.from_unit(float(x)) for axis, x in zip(self._axes, u, strict=True)}

    def _random(self, count: int, trial: int) -> Any:
        return generator(self._settings.seed, count, trial).random_sample(len(self._axes))

    def _sobol(self, i: int) -> Any:
        if i >= len(self._sequence):
            from scipy.stats import qmc

            sequence = qmc.Sobol(len(self._axes), seed=self._settings.seed)
            self._sequence = sequence.random_base2(max(6, i.bit_length())).tolist()
        return self._sequence[i]


def grid(axes: Sequence[Axis]) -> Sampler:
    """Return a sampler of all points of the grid, in order. Raises LabError if an axis is continuous."""
    sides = []
    for axis in axes:
        step = axis.knob.step if axis.knob.step is not None else 1 if axis.integer else None
        low, high = axis.bounds
        if axis.choices:
            sides.append(list(range(len(axis.choices))))
        elif step is None:
            raise LabError(f"a grid needs a step or choices for {axis.path}", hint="or use sampler: qmc")
        else:
            sides.append([axis.to_value(low + i * step) for i in range(round((high - low) / step) + 1)])
    size = math.prod(map(len, sides))
    if size > MAX_GRID:
        raise LabError(f"the grid has {size:,} points, more than {MAX_GRID:,}", hint="or use sampler: qmc")
    paths = [axis.path for axis in axes]

    def draw(count: int, points: list[SearchPoint], refused: list[SearchPoint]) -> Iterator[Drawn]:
        tried = {params_key(point.params) for point in points}
        for i, values in enumerate(itertools.product(*sides)):
            if values not in tried:
                yield Drawn(dict(zip(paths, values, strict=True)), f"point {i + 1} of a grid of {size}")

    return draw


def startup_draws(draws: Iterator[Drawn], measured: int, startup: int) -> Iterator[Drawn]:
    for drawn in draws:
        yield drawn._replace(basis=f"spread evenly at the start: {measured} of {startup} points measured")


def describe(points: Sequence[SearchPoint]) -> str:
    crashed, stopped = sum(point.infeasible for point in points), sum(point.partial is not None for point in points)
    measured = f"{sum(point.value is not None for point in points)} measured points"
    others = [f"{stopped} stopped early"] * (stopped > 0) + [f"{crashed} that failed"] * (crashed > 0)
    return measured + (f" and {' and '.join(others)}" if others else "")
