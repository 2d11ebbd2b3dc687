"""The memory that a vector env and its workers share: actions, results, and a status line per worker.

It is an anonymous file that lives as long as a process holds it open: nothing is left in /dev/shm, however they die.
Results are double-buffered. A worker that dies during a step spoils only the frame that it was writing; the results
last returned are intact in the other frame, and a replay is compared with them.
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

ArrayTree = Any
"""Arrays nested like a space: an array, or a dict or tuple of trees."""
Array = npt.NDArray[Any]
Allocate = Callable[[tuple[int, ...], Any], Array]
"""Returns an array of a shape and dtype."""

ALIGN = 64
STATUS_SIZE = 8
"""Numbers in the status of a worker. They fill a separate cache line, since every step writes them."""
PROGRESS, PHASE, ENV, STEP_SECONDS, COMMAND, WORKER_SLEEPS, COMPLETED, PARENT_WAITS = range(8)
"""Indices into the status of a worker.

PROGRESS: grows with every call of an env. PHASE: what the worker is doing (IDLE, …). ENV: with which of its envs.
STEP_SECONDS: duration of its last step. COMMAND: the last command it was given. WORKER_SLEEPS: whether it must be woken
for the next command. COMPLETED: the last command it completed without a reply message. PARENT_WAITS: whether the parent
must be woken when a command completes.
"""
MAX_SPIN_STEP = 1e-3
"""Seconds; longer steps are not worth spinning for."""
CROWDED_YIELD = 1.5e-3
"""Seconds; a yield that takes longer means that another process took the core."""
MIN_BACKOFF, MAX_BACKOFF = 64, 4096
"""Waits without spinning after the core was taken; doubled each time that happens again."""
IDLE, BUILDING, STEPPING, RESETTING, TESTING = range(5)
PHASE_NAMES = ("waiting", "building", "stepping", "resetting", "testing snapshots of")

INFO_TYPE_CODES: dict[type, int] = {
    kind: code for code, kind in enumerate((int, float, bool, np.int64, np.float64, np.int32, np.float32), 1)
}
"""Types of info values that survive a round trip through float64; code 0 means that there is no value."""
INFO_TYPES: tuple[type, ...] = (type(None), *INFO_TYPE_CODES)
INFO_DTYPES = (None, *(np.dtype(kind) for kind in INFO_TYPE_CODES))
MAX_EXACT_INT = 2**53


@dataclass(frozen=True, kw_only=True)
class StepFrame:
    """The results of one step of all envs, or of a worker's share of them."""

    observations: ArrayTree
    """Batched, nested like the observation space."""
    rewards: Array
    """float64, as in Gymnasium."""
    terminated: Array
    """bool."""
    truncated: Array
    """bool."""
    info_values: Array
    """[fields, envs]: values of the numeric info fields."""
    info_codes: Array
    """[fields, envs]: their types, see INFO_TYPE_CODES."""

    def slice_envs(self, first: int, end: int) -> StepFrame:
        """Return a view of the envs from `first` to before `end`."""
        return StepFrame(
            observations=map_tree(lambda array: array[first:end], self.observations),
            rewards=self.rewards[first:end],
            terminated=self.terminated[first:end],
            truncated=self.truncated[first:end],
            info_values=self.info_values[:, first:end],
            info_codes=self.info_codes[:, first:end],
        )

    def equals(self, other: StepFrame) -> bool:
        """Return whether both frames are equal to the bit; infos are not compared."""
        mine, theirs = (
            [*tree_leaves(frame.observations), frame.rewards, frame.terminated, frame.truncated]
            for frame in (self, other)
        )
        return all(one.tobytes() == two.tobytes() for one, two in zip(mine, theirs, strict=True))


class SharedBlock:
    """The shared arrays, laid out identically in every process with the same spaces; private memory without a file."""

    def __init__(
        self,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        num_envs: int,
        *,
        workers: int,
        info_fields: int,
        fd: int | None = None,
        create: bool = False,
    ) -> None:
        """
        Args:
            spaces: Observation and action space of one env.
            num_envs: Envs of all workers.
            workers: Number of workers.
            info_fields: Number of numeric info fields.
            fd: File to map; None for private memory.
            create: Set the size of the file first.
        """
        self._spaces, self._num_envs, self._workers, self._info_fields = spaces, num_envs, workers, info_fields
        if fd is None:
            self._allocate(lambda shape, dtype: np.zeros(shape, dtype))
            return
        measuring = _Allocator()
        self._allocate(measuring.allocate)
        if create:
            os.ftruncate(fd, measuring.size)
        self._memory = mmap.mmap(fd, measuring.size)
        self._allocate(_Allocator(self._memory).allocate)

    def _allocate(self, allocate: Allocate) -> None:
        observation_space, action_space = self._spaces
        num_envs, info_fields = self._num_envs, self._info_fields
        self.status = allocate((max(self._workers, 1), STATUS_SIZE), np.float64)
        """[workers, STATUS_SIZE]."""
        self.actions = allocate_batch(action_space, num_envs, allocate)
        self.frames = tuple(
            StepFrame(
                observations=allocate_batch(observation_space, num_envs, allocate),
                rewards=allocate((num_envs,), np.float64),
                terminated=allocate((num_envs,), np.bool_),
                truncated=allocate((num_envs,), np.bool_),
                info_values=allocate((info_fields, num_envs), np.float64),
                info_codes=allocate((info_fields, num_envs), np.uint8),
            )
            for _ in range(2)
        )


class _Allocator:
    """Allocates aligned arrays one after the other in a memory map; without one, it only measures their size."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.size = 0
        self._memory = memory

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        offset = self.size
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.size = offset + -(-max(size, 1) // ALIGN) * ALIGN
        if self._memory is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, self._memory, offset)


class MemoryFence:
    """A full memory barrier: writes before a call are visible to other processes before writes and reads after it.

    Python offers only locks for this: operations before a release cannot be reordered past the next acquire.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self) -> None:
        self._acquire()
        self._release()
        self._acquire()
        self._release()


class SpinWait:
    """Polls a worker's status for a moment before its caller blocks, because waking a process takes longer.

    It yields the core between two polls. If another process takes the core, spinning is suspended for a number of waits
    that grows each time. It does not spin for long steps.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long to spin; 0 disables spinning."""
        self._seconds = seconds
        self._suspended = 0
        """Waits left without spinning."""
        self._backoff = MIN_BACKOFF

    def __call__(self, status: Any, index: int, old: float) -> bool:
        """Return whether `status[index]` differs from `old`, now or within the moment."""
        if self._suspended:
            self._suspended -= 1
        elif self._seconds and status[STEP_SECONDS] < MAX_SPIN_STEP:
            last = time.perf_counter()
            deadline = last + self._seconds
            while status[index] == old:
                os.sched_yield()
                now = time.perf_counter()
                if now - last > CROWDED_YIELD:
                    self._suspended, self._backoff = self._backoff, min(2 * self._backoff, MAX_BACKOFF)
                    break
                if now > deadline:
                    break
                last = now
            else:
                self._backoff = max(self._backoff - 1, MIN_BACKOFF)
        return bool(status[index] != old)


def allocate_batch(space: gym.Space[Any], num_envs: int, allocate: Allocate) -> ArrayTree:
    """Return arrays with one row per env, nested like the space; LabError if its values have no fixed size."""
    if isinstance(space, Dict):
        return {name: allocate_batch(part, num_envs, allocate) for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(allocate_batch(part, num_envs, allocate) for part in space.spaces)
    if isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        return allocate((num_envs, *(space.shape or ())), space.dtype)
    raise LabError(
        f"{space} has no fixed size", hint="use Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them"
    )


def map_tree(function: Callable[[Array], Array], tree: ArrayTree) -> ArrayTree:
    """Apply a function to every array of a tree."""
    if isinstance(tree, dict):
        return {name: map_tree(function, part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, part) for part in tree)
    return function(tree)


def tree_leaves(tree: ArrayTree) -> Iterator[Array]:
    """Yield the arrays of a tree in a fixed order."""
    if isinstance(tree, dict | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tree_leaves(part)
    else:
        yield tree


def write_rows(rows: ArrayTree, items: Sequence[Any]) -> None:
    """Write one item into each row of a tree of arrays; the items are nested like the tree."""
    if isinstance(rows, dict):
        for name, part in rows.items():
            write_rows(part, [item[name] for item in items])
    elif isinstance(rows, tuple):
        for i, part in enumerate(rows):
            write_rows(part, [item[i] for item in items])
    else:
        rows[...] = items


def copy_row(tree: ArrayTree, i: int) -> Any:
    """Return a copy of one row of a tree of arrays."""
    if isinstance(tree, dict):
        return {name: copy_row(part, i) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(copy_row(part, i) for part in tree)
    return tree[i].copy()


def write_batch(tree: ArrayTree, batch: Any, name: str) -> None:
    """Write a batch into a tree of arrays; LabError if its shape or dtype does not fit. `name` is for the message."""
    if isinstance(tree, dict | tuple):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            write_batch(tree[key], batch[key], f"{name}[{key!r}]")
        return
    array = np.asarray(batch)
    if array.shape != tree.shape:
        raise LabError(f"{name} must have shape {tree.shape}, not {array.shape}")
    if not np.can_cast(array.dtype, tree.dtype, "same_kind"):
        raise LabError(f"{name} must be {tree.dtype}, not {array.dtype}")
    tree[...] = array
