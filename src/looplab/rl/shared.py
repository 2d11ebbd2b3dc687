"""The memory that a vector env and its workers share: actions in, results out, and a few cells to watch them by.

It is an anonymous file that lives as long as somebody holds it open: nothing is left in /dev/shm, however they die.
Results have two frames that take turns. A worker that dies in the middle of a step has spoilt the one being written;
what was last returned stands untouched in the other, and a replay is compared with it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from looplab.errors import LabError

Tree = Any
"""Arrays in the nesting of a space: an array, or a dict or tuple of trees."""
Array = npt.NDArray[Any]

ALIGN = 64
CELLS = 8
"""Numbers for each worker, a cache line of its own: they are written in every step."""
COUNT, PHASE, ENV, SECONDS, ORDER, ASLEEP, DONE, AWAITED = range(8)
"""Grows with every call of an environment; what the worker is doing; with which of its environments; its last step;
the last order that it was given; whether it must be woken for the next; the last order that it has done, if it has
nothing to say of that; whether its parent must be woken for that."""
LONG, CROWDED = 1e-3, 1.5e-3
"""Seconds: a step that is too long for waiting awake to be worth it; and who gives way and comes back only then, has
given way to somebody else."""
LEAST_PAUSE, MOST_PAUSE = 64, 4096
"""Steps."""
IDLE, BUILDING, STEPPING, RESETTING, TESTING = range(5)
PHASES = ("waiting", "building", "stepping", "resetting", "testing snapshots of")

KINDS: dict[type, int] = {
    kind: i for i, kind in enumerate((int, float, bool, np.int64, np.float64, np.int32, np.float32), 1)
}
"""Types of info values that fit into a float64 and come out of it as they were; 0 means that there is none."""
TYPES: tuple[type, ...] = (type(None), *KINDS)
DTYPES = (None, *(np.dtype(kind) for kind in KINDS))
EXACT = 2**53


@dataclass(frozen=True)
class Frame:
    """The results of one step of all environments, or of a worker's share of them."""

    observations: Tree
    """Batched, in the nesting of the observation space."""
    rewards: Array
    """float64, as gymnasium has it."""
    terminated: Array
    """bool."""
    truncated: Array
    """bool."""
    values: Array
    """(fields, environments): the infos that are numbers and were named."""
    kinds: Array
    """The type of each of those, see KINDS."""

    def share(self, first: int, end: int) -> Frame:
        """The rows of some environments."""
        return Frame(
            each(lambda array: array[first:end], self.observations),
            self.rewards[first:end],
            self.terminated[first:end],
            self.truncated[first:end],
            self.values[:, first:end],
            self.kinds[:, first:end],
        )

    def same(self, other: Frame) -> bool:
        """Whether both hold the same, to the bit."""
        mine, its = ([*leaves(f.observations), f.rewards, f.terminated, f.truncated] for f in (self, other))
        return all(one.tobytes() == two.tobytes() for one, two in zip(mine, its, strict=True))

    def take(self, other: Frame) -> None:
        """Become a copy of the other."""
        for one, two in zip(leaves(self.observations), leaves(other.observations), strict=True):
            one[...] = two
        self.rewards[...], self.terminated[...], self.truncated[...] = other.rewards, other.terminated, other.truncated
        self.values[...], self.kinds[...] = other.values, other.kinds


class Block:
    """The arrays, laid out the same way in every process that has the same spaces; private without a file."""

    def __init__(
        self,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        num_envs: int,
        workers: int,
        fields: int,
        fd: int | None = None,
        create: bool = False,
    ) -> None:
        layout = (spaces, num_envs, workers, fields)
        if fd is None:
            self._lay(*layout, lambda shape, dtype: np.zeros(shape, dtype))
            return
        ruler = _Ruler()
        self._lay(*layout, ruler.take)
        if create:
            os.ftruncate(fd, ruler.size)
        self.memory = mmap.mmap(fd, ruler.size)
        self._lay(*layout, _Ruler(self.memory).take)

    def _lay(
        self,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        num_envs: int,
        workers: int,
        fields: int,
        take: Callable[[tuple[int, ...], Any], Array],
    ) -> None:
        observed, acted = spaces
        self.cells = take((max(workers, 1), CELLS), np.float64)
        self.actions = batched(acted, num_envs, take)
        self.frames = tuple(
            Frame(
                batched(observed, num_envs, take),
                take((num_envs,), np.float64),
                take((num_envs,), np.bool_),
                take((num_envs,), np.bool_),
                take((fields, num_envs), np.float64),
                take((fields, num_envs), np.uint8),
            )
            for _ in range(2)
        )


class _Ruler:
    """Cuts arrays out of the memory one after the other; without memory it only measures."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.size = 0
        self._memory = memory

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        at = self.size
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.size = at + -(-max(size, 1) // ALIGN) * ALIGN
        if self._memory is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, self._memory, at)


class Fence:
    """What this process wrote before a call is seen by others before what it writes after it, and it reads only then.

    Locks are all that Python has for it: what comes before a release cannot pass the next acquire.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self) -> None:
        self._acquire()
        self._release()
        self._acquire()
        self._release()


class Linger:
    """Waits awake for a moment, because to be woken takes longer; giving way to everybody else meanwhile.

    Where others want the core, to give way costs a slice of their time: then it is left alone for a while, the longer
    the more often that happens. Where steps are long it is not worth it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rest = 0
        self._pause = LEAST_PAUSE

    def __call__(self, cell: Any, index: int, old: float) -> bool:
        """Whether the number in a worker's cell is another one now, or becomes so."""
        if self._rest:
            self._rest -= 1
        elif self._seconds and cell[SECONDS] < LONG:
            last = time.perf_counter()
            until = last + self._seconds
            while cell[index] == old:
                os.sched_yield()
                now = time.perf_counter()
                if now - last > CROWDED:
                    self._rest, self._pause = self._pause, min(2 * self._pause, MOST_PAUSE)
                    break
                if now > until:
                    break
                last = now
            else:
                self._pause = max(self._pause - 1, LEAST_PAUSE)
        return bool(cell[index] != old)


def batched(space: gym.Space[Any], num_envs: int, take: Callable[[tuple[int, ...], Any], Array]) -> Tree:
    """A row for each environment, in arrays that `take` hands out."""
    if isinstance(space, Dict):
        return {name: batched(part, num_envs, take) for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(batched(part, num_envs, take) for part in space.spaces)
    if isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        return take((num_envs, *(space.shape or ())), space.dtype)
    raise LabError(
        f"{space} has no fixed size", hint="use Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them"
    )


def each(change: Callable[[Array], Array], tree: Tree) -> Tree:
    """The tree of the changed arrays."""
    if isinstance(tree, dict):
        return {name: each(change, part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(each(change, part) for part in tree)
    return change(tree)


def leaves(tree: Tree) -> Iterator[Array]:
    """The arrays of a tree, in a fixed order."""
    if isinstance(tree, dict | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    else:
        yield tree


def put(rows: Tree, items: Sequence[Any]) -> None:
    """Write one item a row; `rows` is a tree of arrays with as many rows, the items have its nesting."""
    if isinstance(rows, dict):
        for name, part in rows.items():
            put(part, [item[name] for item in items])
    elif isinstance(rows, tuple):
        for i, part in enumerate(rows):
            put(part, [item[i] for item in items])
    else:
        rows[...] = items


def row(tree: Tree, i: int) -> Any:
    """A copy of one row, in the nesting of the space."""
    if isinstance(tree, dict):
        return {name: row(part, i) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(row(part, i) for part in tree)
    return tree[i].copy()


def copy_in(tree: Tree, given: Any, what: str) -> None:
    """Write a batch that somebody gave; LabError if it has another shape, or values that would not survive."""
    if isinstance(tree, dict | tuple):
        names = list(tree) if isinstance(tree, dict) else range(len(tree))
        for name in names:
            copy_in(tree[name], given[name], f"{what}[{name!r}]")
        return
    array = np.asarray(given)
    if array.shape != tree.shape:
        raise LabError(f"{what} must have the shape {tree.shape}, not {array.shape}")
    if not np.can_cast(array.dtype, tree.dtype, "same_kind"):
        raise LabError(f"{what} must be {tree.dtype}, not {array.dtype}")
    tree[...] = array
