"""Token sampling that depends only on the row's seed and the token's position, not on the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Floats, SamplingParams

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash several ints to one 64-bit int (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, sampling_seed: int, position: int) -> float:
    """Return a uniform random number in [0, 1) for one token."""
    return (mix(seed, sampling_seed, position) >> 12) / (1 << 52)


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Row-wise log-softmax in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_probs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_probs


def draw(
    logits: Floats, seeds: Sequence[int], positions: Sequence[int], sampling: SamplingParams
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Sample tokens from [rows, vocabulary] logits; return them and their log probabilities at temperature 1."""
    logprobs = log_softmax(logits)
    rows = np.arange(len(logits))
    if sampling.temperature <= 0:
        chosen = logits.argmax(axis=-1)
    else:
        uniforms = np.array([uniform(s, sampling.seed, p) for s, p in zip(seeds, positions, strict=True)])
        probs = np.exp(log_softmax(logprobs / sampling.temperature))
        if sampling.top_p < 1:
            order = np.argsort(-probs, axis=-1, kind="stable")
            probs = np.take_along_axis(probs, order, axis=-1)
            beyond = np.cumsum(probs, axis=-1) - probs >= sampling.top_p
            beyond[:, 0] = False
            probs[beyond] = 0
        cdf = np.cumsum(probs, axis=-1)
        index = (cdf <= uniforms[:, None] * cdf[:, -1:]).sum(axis=-1)
        chosen = order[rows, index] if sampling.top_p < 1 else index
    return chosen.astype(np.int64), logprobs[rows, chosen].astype(np.float32)
