"""Pairing of source and target frames: dynamic time warping (DTW) between episodes, and sampling of pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PairSamplingConfig:
    """How source frames are sampled for target frames."""

    window_size: int = 0
    """Maximum random shift of the source frame, in frames; it stays within its episode."""
    topk_src_episodes: int | None = None
    """Number of nearest source episodes to sample from; None: all."""
    sharpness: float = 0.0
    """Preference for near episodes; 0: uniform."""
    cutoff: float | None = None
    """Distance at which the sigmoid weight of an episode is 0.5; None: exponential weights."""
    no_window: bool = False
    """Sample any frame of the source episode, regardless of the alignment."""

    @classmethod
    def read(cls, ot: Mapping[str, Any]) -> "PairSamplingConfig":
        """Parse the `ot` section of a config. Raises ValueError with the invalid key."""
        window = ot.get("window_size", 0)
        topk = ot.get("topk_src_episodes")
        cutoff = ot.get("cutoff")
        sharpness = ot.get("sharpness", 0.0)
        if type(window) is not int or window < 0:
            raise ValueError(f"ot.window_size must be an integer ≥ 0, not {window!r}")
        if topk is not None and (type(topk) is not int or topk < 1):
            raise ValueError(f"ot.topk_src_episodes must be an integer ≥ 1, or null for all, not {topk!r}")
        for name, value in (("sharpness", sharpness), ("cutoff", 0.0 if cutoff is None else cutoff)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"ot.{name} must be a number ≥ 0, not {value!r}")
        return cls(
            window_size=window,
            topk_src_episodes=topk,
            sharpness=float(sharpness),
            cutoff=None if cutoff is None else float(cutoff),
            no_window=ot.get("no_window") is True,
        )


@dataclass(frozen=True)
class EpisodePair:
    """DTW alignment of one source episode with one target episode."""

    source: int
    """Index of the source episode."""
    distance: float
    """Mean distance of the aligned frames."""
    alignment: tuple[Ints, ...]
    """For each frame of the target episode, the source frames aligned with it; indices within the episodes."""


def dynamic_time_warping(cost: Floats) -> tuple[float, list[tuple[int, int]]]:
    """Return the mean cost and the cells of the cheapest monotonic path through a cost matrix, from the first corner to
    the last. Ties prefer diagonal steps."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf).tolist()  # lists: ten times faster than numpy, cell by cell
    total[0][0] = 0.0
    for i, row in enumerate(cost.tolist()):
        above, current = total[i], total[i + 1]
        left = current[0]
        for j, value in enumerate(row):
            best = above[j] if above[j] <= above[j + 1] else above[j + 1]
            left = current[j + 1] = value + (best if best <= left else left)
    path = [(rows - 1, columns - 1)]
    while path[-1] != (0, 0):
        i, j = path[-1]
        steps = ((total[i][j], i - 1, j - 1), (total[i][j + 1], i - 1, j), (total[i + 1][j], i, j - 1))
        _, i, j = min(steps, key=lambda step: step[0])
        path.append((i, j))
    return total[rows][columns] / len(path), path[::-1]


def pair_episodes(source: Sequence[Floats], target: Sequence[Floats]) -> list[list[EpisodePair]]:
    """Align each target episode with all source episodes; return them by target episode, nearest first.

    The distance of two frames is the root mean square of the differences of their states, in standard deviations of the
    source.
    """
    std = np.concatenate(source).std(axis=0)
    std[std == 0] = 1.0
    source = [episode / std for episode in source]
    by_target = []
    for episode in target:
        episode = episode / std
        pairs = []
        for index, other in enumerate(source):
            squared = ((episode**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * episode @ other.T).clip(0)
            distance, path = dynamic_time_warping(np.sqrt(squared / episode.shape[1]))
            aligned: list[list[int]] = [[] for _ in episode]
            for i, j in path:
                aligned[i].append(j)
            pairs.append(EpisodePair(index, distance, tuple(np.array(frames, np.int64) for frames in aligned)))
        by_target.append(sorted(pairs, key=lambda pair: pair.distance))
    return by_target


def episode_probs(distances: Floats, sampling: PairSamplingConfig) -> Floats:
    """Return the sampling probabilities of episodes at these distances, computed in log space to avoid underflow."""
    if sampling.cutoff is None:
        log_weights = -sampling.sharpness * distances
    else:
        log_weights = -np.logaddexp(0.0, sampling.sharpness * (distances - sampling.cutoff))
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())


class PairSampler:
    """Samples pairs of a source frame and a target frame, as indices into the concatenated sets."""

    def __init__(
        self,
        pairs: Sequence[Sequence[EpisodePair]],
        source_starts: Ints,
        target_starts: Ints,
        sampling: PairSamplingConfig,
    ) -> None:
        self._sampling = sampling
        self._pairs = [list(nearest)[: sampling.topk_src_episodes] for nearest in pairs]
        self._probs = [episode_probs(np.array([p.distance for p in nearest]), sampling) for nearest in self._pairs]
        self._source_starts = source_starts
        self._target_starts = target_starts

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return `count` source and target frames; target frames are uniform."""
        target = rng.integers(0, self._target_starts[-1], count)
        source = np.array([self._sample_source(int(frame), rng) for frame in target], np.int64)
        return source, target

    def _sample_source(self, frame: int, rng: np.random.Generator) -> int:
        episode = int(np.searchsorted(self._target_starts, frame, side="right")) - 1
        pair = self._pairs[episode][int(rng.choice(len(self._probs[episode]), p=self._probs[episode]))]
        first, end = int(self._source_starts[pair.source]), int(self._source_starts[pair.source + 1])
        if self._sampling.no_window:
            return int(rng.integers(first, end))
        aligned = first + int(rng.choice(pair.alignment[frame - int(self._target_starts[episode])]))
        shifted = aligned + int(rng.integers(-self._sampling.window_size, self._sampling.window_size + 1))
        return min(max(shifted, first), end - 1)
