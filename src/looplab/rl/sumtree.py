"""A sum tree: draws numbered entries in proportion to their weights, and takes new weights, both in batches.

Each node has 16 children and is their sum. A sum is always made anew from the children, never corrected by a
difference, so it does not drift. It is added up from the left, and what lies left of each child is kept: a target is
followed down by comparing it with that. Both ways to do this, a small C library and numpy, give the same bits, and the
leaves alone are the whole state.

The library is compiled from sumtree.c by the C compiler of the machine when it is first needed, and kept in
$XDG_CACHE_HOME/looplab (~/.cache/looplab). Without a compiler numpy does it, several times slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError

WIDTH = 16
BITS = 4
SOURCE = Path(__file__).with_name("sumtree.c")
FLAGS = ("-O3", "-std=c99", "-fPIC", "-shared", "-ffp-contract=off")
"""Nothing of this one machine (-march=native): a home folder may be shared by several."""
COMPILERS = ("cc", "gcc", "clang")

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class SumTree:
    """`size` leaves, all of weight 0 at first. The leaves in use are those up to the last that was ever set."""

    def __init__(self, size: int, backend: Literal["auto", "c", "numpy"] = "auto") -> None:
        if size < 1:
            raise LabError(f"a sum tree needs at least one leaf, not {size}")
        self._library = None if backend == "numpy" else library()
        if backend == "c" and self._library is None:
            raise LabError("sumtree.c could not be compiled", hint=f"install a C compiler ({', '.join(COMPILERS)})")
        self.backend = "numpy" if self._library is None else "c"
        self.size = size
        lengths = [-(-size // WIDTH) * WIDTH]
        while lengths[-1] > 1:
            nodes = lengths[-1] // WIDTH
            lengths.append(1 if nodes == 1 else -(-nodes // WIDTH) * WIDTH)
        self._start = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)
        self._weights, self._running = _aligned(sum(lengths)), _aligned(sum(lengths))
        levels = list(zip(self._start, lengths, strict=True))
        self._levels = [self._weights[a : a + n] for a, n in levels]
        self._sums = [self._running[a : a + n].reshape(-1, WIDTH) for a, n in levels[:-1]]
        self._last = -1
        addresses = (self._weights.ctypes.data, self._running.ctypes.data, self._start.ctypes.data)
        self._common = (*addresses, len(lengths))

    @property
    def total(self) -> float:
        return float(self._weights[-1])

    @property
    def leaves(self) -> Floats:
        """The weights that are in use: a view, not to be written to."""
        return self._levels[0][: self._last + 1]

    def set(self, places: Places, weights: Floats) -> None:
        """Give leaves new weights, finite and above 0; of a place that comes twice, the last counts."""
        places = np.array(places, np.int64)
        weights = np.ascontiguousarray(weights, np.float64)
        if len(places) == 0:
            return
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= self.size:
            raise LabError(f"a sum tree of {self.size} leaves has no leaf {low if low < 0 else high}")
        if places.shape != weights.shape or not (weights.min() > 0 and weights.max() < np.inf):
            raise LabError("every leaf needs one weight, finite and above 0")
        self._last = max(self._last, high)
        if self._library is not None:
            self._library.looplab_set(*self._common, places.ctypes.data, weights.ctypes.data, len(places))
            return
        self._levels[0][places] = weights
        for below, sums, here in zip(self._levels[:-1], self._sums, self._levels[1:], strict=True):
            places = places >> BITS
            places = places[np.concatenate([[True], places[1:] != places[:-1]])]
            along = np.zeros((len(places), WIDTH + 1))
            np.cumsum(below.reshape(-1, WIDTH)[places], axis=1, out=along[:, 1:])
            sums[places] = along[:, :-1]
            here[places] = along[:, -1]

    def find(self, targets: Floats) -> tuple[Places, Floats]:
        """The leaves on which targets of [0, total) fall, and their weights. Rising targets give rising leaves."""
        if self._last < 0:
            raise LabError("nothing can be drawn from an empty sum tree")
        targets = np.ascontiguousarray(targets, np.float64)
        if self._library is not None:
            places, weights = np.empty(len(targets), np.int64), np.empty(len(targets))
            self._library.looplab_find(
                *self._common, self._last, targets.ctypes.data, places.ctypes.data, weights.ctypes.data, len(targets)
            )
            return places, weights
        places = np.zeros(len(targets), np.int64)
        rows = np.arange(len(targets))
        for level in range(len(self._levels) - 2, -1, -1):
            along = self._sums[level][places]
            child = (targets[:, None] >= along[:, 1:]).sum(axis=1)
            # Beyond the last leaf all weights are 0, but rounding may lead there.
            child = np.minimum(child, (self._last >> (BITS * level)) - places * WIDTH)
            targets = targets - along[rows, child]
            places = places * WIDTH + child
        return places, self._levels[0][places]


def _aligned(count: int) -> Floats:
    """Zeros that begin a cache line, so that 16 of them are two lines and not three."""
    room = np.zeros(count + 8)
    return room[-(room.ctypes.data // 8) % 8 :][:count]


@functools.cache
def library() -> Any:
    """sumtree.c, compiled; None where that cannot be done. Asked once in a process."""
    source = SOURCE.read_bytes()
    mark = hashlib.sha256(b"\0".join([source, " ".join(FLAGS).encode(), platform.platform().encode()])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "looplab"
    kept = folder / f"sumtree-{mark}.so"
    try:
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                built = _compile(Path(work))
                if built is None:
                    return None
                os.replace(built, kept)  # at once: another process may be about to load it
        return _load(kept)
    except OSError:  # no such home, nothing may be written or executed in it, or the file there is broken
        with tempfile.TemporaryDirectory() as work:
            built = _compile(Path(work))
            try:
                return None if built is None else _load(built)
            except OSError:
                return None


def _compile(folder: Path) -> Path | None:
    target = folder / "sumtree.so"
    for name in COMPILERS:
        compiler = shutil.which(name)
        if compiler is None:
            continue
        try:
            done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(target)], capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            return target
    return None


def _load(path: Path) -> Any:
    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.looplab_set.argtypes = [pointer, pointer, pointer, number, pointer, pointer, number]
    loaded.looplab_find.argtypes = [pointer, pointer, pointer, number, number, pointer, pointer, pointer, number]
    loaded.looplab_set.restype = loaded.looplab_find.restype = None
    return loaded
