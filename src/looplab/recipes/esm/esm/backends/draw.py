"""Drawing a token so that it depends on the row's seed and the token's position alone, never on the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Floats, Sampling

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 64-bit number out of several, by rounds of the splitmix64 finaliser."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, sampling_seed: int, position: int) -> float:
    """A number in [0, 1) for one token."""
    return (mix(seed, sampling_seed, position) >> 12) / (1 << 52)


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Row-wise, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normed: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed


def draw(
    logits: Floats, seeds: Sequence[int], positions: Sequence[int], sampling: Sampling
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Tokens drawn from [rows, vocabulary] logits, and their log-probability at temperature 1."""
    logprobs = log_softmax(logits)
    rows = np.arange(len(logits))
    if sampling.temperature <= 0:
        chosen = logits.argmax(axis=-1)
    else:
        points = np.array([uniform(s, sampling.seed, p) for s, p in zip(seeds, positions, strict=True)])
        weights = np.exp(log_softmax(logprobs / sampling.temperature))
        if sampling.top_p < 1:
            order = np.argsort(-weights, axis=-1, kind="stable")
            weights = np.take_along_axis(weights, order, axis=-1)
            beyond = np.cumsum(weights, axis=-1) - weights >= sampling.top_p
            beyond[:, 0] = False
            weights[beyond] = 0
        ladder = np.cumsum(weights, axis=-1)
        place = (ladder <= points[:, None] * ladder[:, -1:]).sum(axis=-1)
        chosen = order[rows, place] if sampling.top_p < 1 else place
    return chosen.astype(np.int64), logprobs[rows, chosen].astype(np.float32)
