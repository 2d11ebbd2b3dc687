"""A sum tree: samples indexed leaves in proportion to their weights and updates weights, both in batches.

Each node has 16 children and is their sum. A sum is always recomputed from the children, never corrected by a
difference, so it does not drift. Children are added from the left and the prefix sums are stored: a search descends by
comparing its target with them. The two implementations, a small C library and NumPy, agree to the bit, and the leaves
alone are the whole state.

The library is compiled from sumtree.c on first use (see `native`). Without a compiler NumPy is used, which is several
times slower.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError
from looplab.rl import native

WIDTH = 16
BITS = 4
SOURCE = Path(__file__).with_name("sumtree.c")

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class SumTree:
    """A tree of `size` leaves with weight 0. The leaves in use are those up to the highest index ever set."""

    def __init__(self, size: int, backend: Literal["auto", "c", "numpy"] = "auto") -> None:
        if size < 1:
            raise LabError(f"a sum tree needs at least one leaf, not {size}")
        self._library = None if backend == "numpy" else load_library()
        if backend == "c" and self._library is None:
            raise LabError(
                "sumtree.c could not be compiled", hint=f"install a C compiler ({', '.join(native.COMPILERS)})"
            )
        self.backend = "numpy" if self._library is None else "c"
        self.size = size
        lengths = [-(-size // WIDTH) * WIDTH]
        while lengths[-1] > 1:
            nodes = lengths[-1] // WIDTH
            lengths.append(1 if nodes == 1 else -(-nodes // WIDTH) * WIDTH)
        self._start = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)
        self._weights, self._prefix_sums = _aligned_zeros(sum(lengths)), _aligned_zeros(sum(lengths))
        levels = list(zip(self._start, lengths, strict=True))
        self._levels = [self._weights[a : a + n] for a, n in levels]
        self._level_prefix_sums = [self._prefix_sums[a : a + n].reshape(-1, WIDTH) for a, n in levels[:-1]]
        self._last = -1
        addresses = (self._weights.ctypes.data, self._prefix_sums.ctypes.data, self._start.ctypes.data)
        self._common = (*addresses, len(lengths))

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._weights[-1])

    @property
    def leaves(self) -> Floats:
        """Weights of the leaves in use, as a read-only view."""
        return self._levels[0][: self._last + 1]

    def set(self, indices: Indices, weights: Floats) -> None:
        """Set the weights of leaves, which must be finite and positive; the last value of a repeated index wins."""
        indices = np.array(indices, np.int64)
        weights = np.ascontiguousarray(weights, np.float64)
        if len(indices) == 0:
            return
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.size:
            raise LabError(f"leaf {low if low < 0 else high} is out of range for a sum tree of {self.size} leaves")
        if indices.shape != weights.shape or not (weights.min() > 0 and weights.max() < np.inf):
            raise LabError("every leaf needs one weight, finite and positive")
        self._last = max(self._last, high)
        if self._library is not None:
            self._library.looplab_set(*self._common, indices.ctypes.data, weights.ctypes.data, len(indices))
            return
        self._levels[0][indices] = weights
        for children, prefix_sums, parents in zip(
            self._levels[:-1], self._level_prefix_sums, self._levels[1:], strict=True
        ):
            indices = indices >> BITS
            indices = indices[np.concatenate([[True], indices[1:] != indices[:-1]])]
            sums = np.zeros((len(indices), WIDTH + 1))
            np.cumsum(children.reshape(-1, WIDTH)[indices], axis=1, out=sums[:, 1:])
            prefix_sums[indices] = sums[:, :-1]
            parents[indices] = sums[:, -1]

    def find(self, targets: Floats) -> tuple[Indices, Floats]:
        """Return the leaves that cover targets in [0, total), and their weights. Ascending targets keep their order."""
        if self._last < 0:
            raise LabError("cannot sample from an empty sum tree")
        targets = np.ascontiguousarray(targets, np.float64)
        if self._library is not None:
            indices, weights = np.empty(len(targets), np.int64), np.empty(len(targets))
            self._library.looplab_find(
                *self._common, self._last, targets.ctypes.data, indices.ctypes.data, weights.ctypes.data, len(targets)
            )
            return indices, weights
        indices = np.zeros(len(targets), np.int64)
        rows = np.arange(len(targets))
        for level in range(len(self._levels) - 2, -1, -1):
            prefix_sums = self._level_prefix_sums[level][indices]
            child = (targets[:, None] >= prefix_sums[:, 1:]).sum(axis=1)
            # Rounding may lead beyond the last leaf, where all weights are 0.
            child = np.minimum(child, (self._last >> (BITS * level)) - indices * WIDTH)
            targets = targets - prefix_sums[rows, child]
            indices = indices * WIDTH + child
        return indices, self._levels[0][indices]


def _aligned_zeros(count: int) -> Floats:
    """Return zeros aligned to a cache line, so that 16 children take two lines and not three."""
    buffer = np.zeros(count + 8)
    return buffer[-(buffer.ctypes.data // 8) % 8 :][:count]


@functools.cache
def load_library() -> Any:
    """Return the compiled sumtree.c; None if it cannot be compiled."""
    library = native.load_library(SOURCE)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.looplab_set.argtypes = [pointer, pointer, pointer, number, pointer, pointer, number]
    library.looplab_find.argtypes = [pointer, pointer, pointer, number, number, pointer, pointer, pointer, number]
    library.looplab_set.restype = library.looplab_find.restype = None
    return library
