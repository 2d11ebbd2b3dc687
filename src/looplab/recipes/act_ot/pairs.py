"""Which source frame goes with which target frame: dynamic time warping between episodes, and sampling by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How source frames are drawn for target frames."""

    window_size: int = 0
    """A drawn source frame is moved by up to this many frames, inside its episode."""
    topk_src_episodes: int | None = None
    """Only so many of the nearest source episodes are drawn from; none: all."""
    sharpness: float = 0.0
    """How much a near episode is preferred; 0: not at all."""
    cutoff: float | None = None
    """The distance at which an episode's weight is half; none: weights fall from the first."""
    no_window: bool = False
    """Any frame of the drawn episode, whatever the pairing says."""

    @classmethod
    def read(cls, ot: Mapping[str, Any]) -> "Sampling":
        """From the `ot` part of a config; a ValueError says which key is wrong."""
        window = ot.get("window_size", 0)
        topk = ot.get("topk_src_episodes")
        cutoff = ot.get("cutoff")
        sharpness = ot.get("sharpness", 0.0)
        if type(window) is not int or window < 0:
            raise ValueError(f"ot.window_size is a whole number from 0, not {window!r}")
        if topk is not None and (type(topk) is not int or topk < 1):
            raise ValueError(f"ot.topk_src_episodes is a whole number from 1, or null for all, not {topk!r}")
        for name, value in (("sharpness", sharpness), ("cutoff", 0.0 if cutoff is None else cutoff)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"ot.{name} is a number from 0, not {value!r}")
        return cls(
            window, topk, float(sharpness), None if cutoff is None else float(cutoff), ot.get("no_window") is True
        )


@dataclass(frozen=True)
class Pair:
    """One source episode as a partner of one target episode."""

    source: int
    """The source episode."""
    distance: float
    """The mean distance of paired frames."""
    pairing: tuple[Ints, ...]
    """For each frame of the target episode, the source frames paired with it, both counted in their episodes."""


def warp(cost: Floats) -> tuple[float, list[tuple[int, int]]]:
    """The cheapest way through a cost matrix, from the first corner to the last, without steps back: its mean cost and
    its cells. Of ways that cost the same, the one with more diagonal steps."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf).tolist()  # lists: ten times faster than an array, cell by cell
    total[0][0] = 0.0
    for i, row in enumerate(cost.tolist()):
        above, here = total[i], total[i + 1]
        left = here[0]
        for j, value in enumerate(row):
            nearest = above[j] if above[j] <= above[j + 1] else above[j + 1]
            left = here[j + 1] = value + (nearest if nearest <= left else left)
    way = [(rows - 1, columns - 1)]
    while way[-1] != (0, 0):
        i, j = way[-1]
        steps = ((total[i][j], i - 1, j - 1), (total[i][j + 1], i - 1, j), (total[i + 1][j], i, j - 1))
        _, i, j = min(steps, key=lambda step: step[0])
        way.append((i, j))
    return total[rows][columns] / len(way), way[::-1]


def pair_episodes(source: Sequence[Floats], target: Sequence[Floats]) -> list[list[Pair]]:
    """For each target episode, all source episodes, the nearest first. The distance of two frames is the root mean
    square of their states' differences, in standard deviations of the source."""
    every = np.concatenate(source)
    spread = every.std(axis=0)
    spread[spread == 0] = 1.0
    source = [episode / spread for episode in source]
    found = []
    for episode in target:
        episode = episode / spread
        pairs = []
        for number, other in enumerate(source):
            square = ((episode**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * episode @ other.T).clip(0)
            distance, way = warp(np.sqrt(square / episode.shape[1]))
            partners: list[list[int]] = [[] for _ in episode]
            for i, j in way:
                partners[i].append(j)
            pairs.append(Pair(number, distance, tuple(np.array(p, np.int64) for p in partners)))
        found.append(sorted(pairs, key=lambda pair: pair.distance))
    return found


def weights(distances: Floats, sampling: Sampling) -> Floats:
    """The chances of episodes at these distances. Worked out as logarithms, so that they never all vanish."""
    if sampling.cutoff is None:
        logs = -sampling.sharpness * distances
    else:
        logs = -np.logaddexp(0.0, sampling.sharpness * (distances - sampling.cutoff))
    chances = np.exp(logs - logs.max())
    return np.asarray(chances / chances.sum())


class PairSampler:
    """Draws pairs of a source frame and a target frame, both as places in the whole set."""

    def __init__(
        self, pairs: Sequence[Sequence[Pair]], source_starts: Ints, target_starts: Ints, sampling: Sampling
    ) -> None:
        self._sampling = sampling
        self._pairs = [list(of_one)[: sampling.topk_src_episodes] for of_one in pairs]
        self._chances = [weights(np.array([pair.distance for pair in of_one]), sampling) for of_one in self._pairs]
        self._source_starts = source_starts
        self._target_starts = target_starts

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """`count` pairs; every target frame is as likely as any other."""
        target = rng.integers(0, self._target_starts[-1], count)
        source = np.array([self._partner(int(frame), rng) for frame in target], np.int64)
        return source, target

    def _partner(self, frame: int, rng: np.random.Generator) -> int:
        episode = int(np.searchsorted(self._target_starts, frame, side="right")) - 1
        pair = self._pairs[episode][int(rng.choice(len(self._chances[episode]), p=self._chances[episode]))]
        first, end = int(self._source_starts[pair.source]), int(self._source_starts[pair.source + 1])
        if self._sampling.no_window:
            return int(rng.integers(first, end))
        drawn = first + int(rng.choice(pair.pairing[frame - int(self._target_starts[episode])]))
        moved = drawn + int(rng.integers(-self._sampling.window_size, self._sampling.window_size + 1))
        return min(max(moved, first), end - 1)
