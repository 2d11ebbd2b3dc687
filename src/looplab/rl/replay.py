"""Prioritized experience replay (Schaul et al. 2016).

    replay = PrioritizedReplay(entries=200_000, max_bytes=2 << 30, seed=0)
    replay.push({"obs": obs, "actions": actions, "rewards": rewards}, priorities)
    batch = replay.sample(256)
    replay.update_priorities(batch.indices, td_errors)

The first push defines the fields of an entry, and so how many entries fit into `max_bytes`. Byte observations stay
bytes. Float fields with one number per entry (a reward, a value, a log-probability) are stored as float16 and returned
as float32; a value out of range widens its field to float32. The state dict consists of plain arrays; a loaded replay
continues bit-exactly.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError
from looplab.rl.renamed import rename_keys, rename_transition_fields
from looplab.rl.sumtree import SumTree

Array = NDArray[Any]

TREE_BYTES = 18
"""Bytes of the sum tree per entry: 8 for the weight, 8 for the prefix sum, and 1/15 of that for the inner nodes."""
MAX_INSPECTED = 1 << 16
"""Maximum number of evenly spaced entries that the priority statistics inspect."""
FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class ReplayBatch:
    data: dict[str, Array]
    """[n, ...] by field."""
    indices: NDArray[np.int64]
    """Positions of the entries, ascending; for `update_priorities`."""
    weights: NDArray[np.float32]
    """Importance-sampling weights (N·P)^−β, divided by the largest of the batch."""


class PrioritizedReplay:
    """A ring buffer with a sum tree over the priorities. Not thread-safe."""

    def __init__(
        self,
        entries: int | None = None,
        max_bytes: int | None = None,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_final: float = 1.0,
        beta_entries: int = 1_000_000,
        eps: float = 1e-5,
        float32_fields: Collection[str] = (),
        float16_fields: Collection[str] = (),
        seed: int = 0,
        backend: Literal["auto", "c", "numpy"] = "auto",
    ) -> None:
        """
        Args:
            entries: Capacity in entries; None if only `max_bytes` limits it.
            max_bytes: Capacity in bytes; None if only `entries` limits it. The smaller of both applies.
            alpha: Exponent of the priorities; 0 samples uniformly.
            beta: Initial exponent of the importance-sampling weights.
            beta_final: Final exponent, reached linearly.
            beta_entries: Sampled entries until `beta_final` is reached.
            eps: Added to every priority, so that none is 0.
            float32_fields: Float fields to store as float32 whatever their shape.
            float16_fields: Float fields to store as float16 whatever their shape.
            seed: Seeds the sampling.
            backend: Implementation of the sum tree; "auto" takes C if a compiler is available.

        Raises:
            LabError: No capacity is given, or a value is out of range.
        """
        if entries is None and max_bytes is None:
            raise LabError("a replay needs a capacity", hint="pass entries=, max_bytes=, or both")
        for name, value in (("entries", entries), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise LabError(f"{name} of a replay must be at least 1, not {value}")
        for name, exponent in (("alpha", alpha), ("beta", beta), ("beta_final", beta_final)):
            if not 0 <= exponent <= 1:
                raise LabError(f"{name} of a replay must be from 0 to 1, not {exponent}")
        if not eps > 0:
            raise LabError(f"eps of a replay must be above 0, not {eps}")
        self.capacity = 0
        """In entries; 0 before the first push."""
        self.alpha, self.eps = alpha, eps
        self._entries, self._max_bytes = entries, max_bytes
        self._beta, self._beta_final, self._beta_entries = beta, beta_final, beta_entries
        self._float32_fields, self._float16_fields = frozenset(float32_fields), frozenset(float16_fields)
        self._backend: Literal["auto", "c", "numpy"] = backend
        self._rng = np.random.default_rng(seed)
        self._fields: dict[str, Array] = {}
        self._tree: SumTree | None = None
        self._size = self._next = self._num_sampled = self._num_batches = 0
        self._max_priority = 1.0
        self._last_unique_ratio = self._unique_ratio_sum = 0.0
        self._sample_ms = 0.0
        self._timed_batches = 0

    def __len__(self) -> int:
        return self._size

    @property
    def beta(self) -> float:
        """Present exponent of the importance-sampling weights."""
        progress = min(1.0, self._num_sampled / self._beta_entries) if self._beta_entries else 1.0
        return self._beta * (1 - progress) + self._beta_final * progress

    def push(self, data: Mapping[str, Any], priorities: Any = None) -> None:
        """Add entries, overwriting the oldest.

        Args:
            data: Arrays by field; their leading axes are those of `priorities` ([n], [steps, envs], …).
            priorities: One per entry; None gives all entries the highest priority so far (one leading axis, [n]).

        Raises:
            LabError: The fields, shapes or dtypes differ from the first push, or a priority is not finite.
        """
        arrays = {name: np.asarray(values) for name, values in data.items()}
        if not arrays:
            raise LabError("a replay entry needs at least one field")
        if priorities is None:
            priorities = np.full(len(next(iter(arrays.values()))), self._max_priority)
        new_priorities = np.asarray(priorities)
        count = new_priorities.size
        for name, values in arrays.items():
            if values.shape[: new_priorities.ndim] != new_priorities.shape:
                raise LabError(f"{name} has shape {values.shape}; its first axes must be {new_priorities.shape}")
            arrays[name] = values.reshape(count, *values.shape[new_priorities.ndim :])
        if self._tree is None:
            self._allocate(
                {name: (self._storage_dtype(name, values), values.shape[1:]) for name, values in arrays.items()}
            )
        self._check_fields(arrays)
        weights = self._tree_weights(new_priorities.reshape(-1))
        if count > self.capacity:
            arrays = {name: values[-self.capacity :] for name, values in arrays.items()}
            weights, count = weights[-self.capacity :], self.capacity
        first = min(count, self.capacity - self._next)
        for name, values in arrays.items():
            stored = self._storage_for(name, values)
            stored[self._next : self._next + first] = values[:first]
            stored[: count - first] = values[first:]
        assert self._tree is not None
        self._tree.set((self._next + np.arange(count)) % self.capacity, weights)
        self._next = (self._next + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    def sample(self, count: int) -> ReplayBatch:
        """Draw `count` entries with probability proportional to priority^alpha, one from each of `count` equal strata.

        Raises:
            LabError: The replay is empty, or `count` is below 1.
        """
        if count < 1:
            raise LabError(f"a replay batch needs at least one entry, not {count}")
        if self._tree is None or self._size == 0:
            raise LabError("the replay is empty", hint="check len(replay) before sampling")
        start = time.perf_counter()
        total = self._tree.total
        indices, weights = self._tree.find((np.arange(count) + self._rng.random(count)) * (total / count))
        data = {}
        for name, stored in self._fields.items():
            values = stored.take(indices, axis=0)
            data[name] = values.astype(np.float32) if values.dtype == np.float16 else values
        # (N·w/total)^−β divided by its maximum: N and total cancel out.
        is_weights = ((weights / weights.min()) ** -self.beta).astype(np.float32)
        self._num_sampled += count
        self._num_batches += 1
        self._last_unique_ratio = (1 + np.count_nonzero(indices[1:] != indices[:-1])) / count
        self._unique_ratio_sum += self._last_unique_ratio
        self._sample_ms += 1000 * (time.perf_counter() - start)
        self._timed_batches += 1
        return ReplayBatch(data, indices, is_weights)

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        """Set the priorities of sampled entries to the absolute values of their TD errors."""
        if self._tree is None:
            raise LabError("the replay is empty; there is nothing to update")
        indices = np.asarray(indices, np.int64)
        if len(indices) and int(indices.max()) >= self._size:
            raise LabError(f"the replay has {self._size} entries; index {int(indices.max())} is out of range")
        self._tree.set(indices, self._tree_weights(np.asarray(td_errors).reshape(-1)))

    def statistics(self) -> dict[str, float]:
        """Return the replay's metrics; what was not measured is missing."""
        row: dict[str, float] = {"replay_size": self._size, "replay_beta": self.beta}
        if self._tree is not None and self._size:
            inspected = np.sort(self._tree.leaves[:: -(-self._size // MAX_INSPECTED)])
            priorities = inspected ** (1 / self.alpha) if self.alpha else inspected
            row["replay_priority_mean"] = float(priorities.mean())
            for percent in (50, 90, 99):
                row[f"replay_priority_p{percent}"] = float(priorities[(len(priorities) - 1) * percent // 100])
        if self._num_batches:
            row["replay_last_unique_ratio"] = self._last_unique_ratio
            row["replay_avg_unique_ratio"] = self._unique_ratio_sum / self._num_batches
        if self._timed_batches:
            row["replay_sample_time_ms"] = self._sample_ms / self._timed_batches
            self._sample_ms, self._timed_batches = 0.0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state. Arrays are views of the live ones: copy them to keep them."""
        return {
            "fields": {name: stored[: self._size] for name, stored in self._fields.items()},
            "weights": None if self._tree is None else self._tree.leaves,
            "settings": self._checked_settings(), "capacity": self.capacity, "next": self._next,
            "drawn": self._num_sampled, "samples": self._num_batches, "highest": self._max_priority,
            "unique": [self._last_unique_ratio, self._unique_ratio_sum],
            "rng": dict(self._rng.bit_generator.state),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            LabError: The state was saved with another capacity or another `alpha`.
        """
        state = rename_keys(state)
        saved = {"max_bytes" if name == "memory" else name: value for name, value in state["settings"].items()}
        for name, value in self._checked_settings().items():
            if saved[name] != value:
                raise LabError(f"this replay was saved with {name}={saved[name]}, but has {name}={value} now")
        fields = {name: np.asarray(values) for name, values in rename_transition_fields(state["fields"]).items()}
        self._fields, self._tree, self.capacity = {}, None, 0
        if state["weights"] is not None:
            self._allocate(
                {name: (values.dtype, values.shape[1:]) for name, values in fields.items()}, state["capacity"]
            )
            assert self._tree is not None
            weights = np.asarray(state["weights"])
            for name, values in fields.items():
                self._fields[name][: len(weights)] = values
            self._tree.set(np.arange(len(weights)), weights)
            self._size = len(weights)
        else:
            self._size = 0
        self._next, self._num_sampled, self._num_batches = state["next"], state["drawn"], state["samples"]
        self._max_priority = state["highest"]
        self._last_unique_ratio, self._unique_ratio_sum = state["unique"]
        self._rng.bit_generator.state = state["rng"]
        self._sample_ms, self._timed_batches = 0.0, 0

    def _checked_settings(self) -> dict[str, Any]:
        """Return the settings that must not change between saving and loading."""
        return {"entries": self._entries, "max_bytes": self._max_bytes, "alpha": self.alpha}

    def _storage_dtype(self, name: str, values: Array) -> Any:
        if values.dtype.kind == "O":
            raise LabError(f"{name} contains Python objects, which a replay cannot store")
        if values.dtype.kind != "f":
            return values.dtype
        is_half = name in self._float16_fields or (values.ndim == 1 and name not in self._float32_fields)
        return np.dtype(np.float16 if is_half else np.float32)

    def _allocate(self, fields: Mapping[str, tuple[Any, tuple[int, ...]]], saved_capacity: int | None = None) -> None:
        """Make the ring for fields of these dtypes and shapes."""
        entry_bytes = TREE_BYTES + sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in fields.values())
        fitting = None if self._max_bytes is None else self._max_bytes // entry_bytes
        # The saved capacity wins: a field that was widened since makes entries larger than they were at first.
        capacity = saved_capacity or min(limit for limit in (self._entries, fitting) if limit is not None)
        if capacity < 1:
            raise LabError(f"max_bytes={self._max_bytes} is too small for one entry of {entry_bytes} bytes")
        self.capacity = capacity
        # The kernel commits zeroed pages only when they are written to.
        self._fields = {name: np.zeros((capacity, *shape), dtype) for name, (dtype, shape) in fields.items()}
        self._tree = SumTree(capacity, self._backend)

    def _check_fields(self, arrays: Mapping[str, Array]) -> None:
        """Raise LabError unless these arrays fit the fields of the first push."""
        if arrays.keys() != self._fields.keys():
            differ = ", ".join(sorted(arrays.keys() ^ self._fields.keys()))
            raise LabError(f"every push must have the fields of the first push; these differ: {differ}")
        for name, values in arrays.items():
            stored = self._fields[name]
            if values.shape[1:] != stored.shape[1:] or not np.can_cast(values.dtype, stored.dtype, "same_kind"):
                raise LabError(
                    f"{name} was {stored.dtype} of shape {stored.shape[1:]} in the first push, "
                    f"and is {values.dtype} of shape {values.shape[1:]} now"
                )

    def _storage_for(self, name: str, values: Array) -> Array:
        """Return the array of a field, widened from float16 to float32 if these values need it."""
        stored = self._fields[name]
        if stored.dtype == np.float16 and values.size:
            with np.errstate(invalid="ignore"):
                too_large = np.isfinite(values) & (np.abs(values) > FLOAT16_MAX)
            if too_large.any():
                stored = self._fields[name] = stored.astype(np.float32)
        return stored

    def _tree_weights(self, priorities: Array) -> NDArray[np.float64]:
        """Return (|priority| + eps)^alpha and track the highest priority."""
        magnitudes = np.abs(priorities.astype(np.float64))
        if len(magnitudes):
            highest = float(magnitudes.max())
            if not np.isfinite(highest):
                raise LabError("a replay priority is not finite", hint="has the training diverged?")
            self._max_priority = max(self._max_priority, highest)
        return (magnitudes + self.eps) ** self.alpha
