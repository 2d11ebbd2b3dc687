"""Prioritized replay (Schaul et al. 2016): transitions come back the more often, the more surprising they were.

    replay = Replay(entries=200_000, memory=2 << 30, seed=0)
    replay.push({"seen": seen, "actions": actions, "rewards": rewards}, priorities)
    sample = replay.sample(256)
    replay.update(sample.indices, errors)

The first push says what an entry consists of, and so how many fit into the memory. Observations of bytes stay bytes.
One number of each entry (a reward, a value, a log-probability) is kept in 16 bits and given back in 32; a number that
16 bits cannot hold widens its field to 32. A state dict is made of plain arrays and continues exactly.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError
from looplab.rl.sumtree import SumTree

Array = NDArray[Any]

TREE_BYTES = 18
"""What the tree takes for each entry: 8 for the weight, 8 for the running sum, a fifteenth of that for their sums."""
LOOK = 1 << 16
"""Entries that the statistics of the priorities look at, at most, evenly spaced."""
HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Sample:
    data: dict[str, Array]
    """By field: [n, ...]."""
    indices: NDArray[np.int64]
    """Where they lie, for `update`; in rising order."""
    weights: NDArray[np.float32]
    """That undo the priorities: (N·P)^−β, divided by the largest of the sample."""

    def tensors(self, device: Any = "cpu") -> dict[str, Any]:
        """The data and the weights as tensors."""
        import torch

        return {name: torch.from_numpy(x).to(device) for name, x in {**self.data, "weights": self.weights}.items()}


class Replay:
    """A ring of entries and the tree over their priorities. Not safe for use from several threads at once."""

    def __init__(
        self,
        entries: int | None = None,
        memory: int | None = None,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_final: float = 1.0,
        beta_entries: int = 1_000_000,
        eps: float = 1e-5,
        interval: int = 1,
        full: Collection[str] = (),
        half: Collection[str] = (),
        seed: int = 0,
        backend: Literal["auto", "c", "numpy"] = "auto",
    ) -> None:
        """
        entries, memory: the capacity, in entries, in bytes, or the smaller of both.
        alpha: how much priorities count; 0 draws all alike.
        beta, beta_final: how far they are undone, rising in a line while `beta_entries` entries are drawn.
        eps: added to every priority, so that none is 0.
        interval: for `due`.
        full, half: fields of floats that are to be kept in 32, or in 16 bits, whatever they look like.
        """
        if entries is None and memory is None:
            raise LabError("a replay needs a capacity", hint="give entries=, memory= (bytes), or both")
        for name, value in (("entries", entries), ("memory", memory), ("interval", interval)):
            if value is not None and value < 1:
                raise LabError(f"{name} of a replay must be at least 1, not {value}")
        for name, number in (("alpha", alpha), ("beta", beta), ("beta_final", beta_final)):
            if not 0 <= number <= 1:
                raise LabError(f"{name} of a replay must be from 0 to 1, not {number}")
        if not eps > 0:
            raise LabError(f"eps of a replay must be above 0, not {eps}")
        self.capacity = 0
        """In entries; 0 until the first push."""
        self.alpha, self.eps, self.interval = alpha, eps, interval
        self._entries, self._memory = entries, memory
        self._beta, self._beta_final, self._beta_entries = beta, beta_final, beta_entries
        self._full, self._half = frozenset(full), frozenset(half)
        self._backend: Literal["auto", "c", "numpy"] = backend
        self._chance = np.random.default_rng(seed)
        self._fields: dict[str, Array] = {}
        self._tree: SumTree | None = None
        self._size = self._next = self._drawn = self._samples = 0
        self._highest = 1.0
        self._unique_last = self._unique_sum = 0.0
        self._time = 0.0
        self._timed = 0

    def __len__(self) -> int:
        return self._size

    @property
    def beta(self) -> float:
        done = min(1.0, self._drawn / self._beta_entries) if self._beta_entries else 1.0
        return self._beta * (1 - done) + self._beta_final * done

    def due(self, step: int, batch: int = 1) -> bool:
        """Whether to sample at this step: every `interval`th, once there are `batch` entries."""
        return step % self.interval == 0 and self._size >= batch

    def push(self, data: Mapping[str, Any], priorities: Any = None) -> None:
        """Add entries: one for each priority, whose shape is that of the data's first axes ([n], [steps, envs], …).

        Without priorities they get the highest one that there was, and the data have one such axis.
        """
        arrays = {name: np.asarray(values) for name, values in data.items()}
        if not arrays:
            raise LabError("an entry of the replay needs at least one field")
        if priorities is None:
            priorities = np.full(len(next(iter(arrays.values()))), self._highest)
        given = np.asarray(priorities)
        count = given.size
        for name, values in arrays.items():
            if values.shape[: given.ndim] != given.shape:
                raise LabError(f"the replay got {given.shape} priorities, and {name} has the shape {values.shape}")
            arrays[name] = values.reshape(count, *values.shape[given.ndim :])
        if self._tree is None:
            self._make({name: (self._kind(name, values), values.shape[1:]) for name, values in arrays.items()})
        self._compare(arrays)
        weights = self._weights(given.reshape(-1))
        if count > self.capacity:
            arrays = {name: values[-self.capacity :] for name, values in arrays.items()}
            weights, count = weights[-self.capacity :], self.capacity
        first = min(count, self.capacity - self._next)
        for name, values in arrays.items():
            room = self._room(name, values)
            room[self._next : self._next + first] = values[:first]
            room[: count - first] = values[first:]
        assert self._tree is not None
        self._tree.set((self._next + np.arange(count)) % self.capacity, weights)
        self._next = (self._next + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    def sample(self, count: int) -> Sample:
        """Draw entries in proportion to priority^alpha, one from each of `count` equal parts of the whole."""
        if count < 1:
            raise LabError(f"a sample of the replay has at least one entry, not {count}")
        if self._tree is None or self._size == 0:
            raise LabError("the replay is empty", hint="ask `due`, or for its length, before sampling")
        began = time.perf_counter()
        total = self._tree.total
        places, weights = self._tree.find((np.arange(count) + self._chance.random(count)) * (total / count))
        data = {}
        for name, room in self._fields.items():
            drawn = room.take(places, axis=0)
            data[name] = drawn.astype(np.float32) if drawn.dtype == np.float16 else drawn
        # (N·w/total)^−β over its maximum, in which N and total cancel out.
        undo = ((weights / weights.min()) ** -self.beta).astype(np.float32)
        self._drawn += count
        self._samples += 1
        self._unique_last = (1 + np.count_nonzero(places[1:] != places[:-1])) / count
        self._unique_sum += self._unique_last
        self._time += 1000 * (time.perf_counter() - began)
        self._timed += 1
        return Sample(data, places, undo)

    def update(self, indices: Any, errors: Any) -> None:
        """New priorities: the sizes of the errors that were found."""
        if self._tree is None:
            raise LabError("the replay is empty: there is nothing to update")
        indices = np.asarray(indices, np.int64)
        if len(indices) and int(indices.max()) >= self._size:
            raise LabError(f"the replay has {self._size} entries, and none at {int(indices.max())}")
        self._tree.set(indices, self._weights(np.asarray(errors).reshape(-1)))

    def statistics(self) -> dict[str, float]:
        """What a row of the metrics says of the replay. What was not measured is not in it."""
        row: dict[str, float] = {"replay_size": self._size, "replay_beta": self.beta}
        if self._tree is not None and self._size:
            looked = self._tree.leaves[:: -(-self._size // LOOK)]
            priorities = np.sort(looked) ** (1 / self.alpha) if self.alpha else np.sort(looked)
            row["replay_priority_mean"] = float(priorities.mean())
            for share in (50, 90, 99):
                row[f"replay_priority_p{share}"] = float(priorities[(len(priorities) - 1) * share // 100])
        if self._samples:
            row["replay_last_unique_ratio"] = self._unique_last
            row["replay_avg_unique_ratio"] = self._unique_sum / self._samples
        if self._timed:
            row["replay_sample_time_ms"] = self._time / self._timed
            self._time, self._timed = 0.0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """Everything, with views of the live arrays: whoever keeps it copies it first."""
        return {
            "fields": {name: room[: self._size] for name, room in self._fields.items()},
            "weights": None if self._tree is None else self._tree.leaves,
            "settings": self._settings(), "capacity": self.capacity, "next": self._next, "drawn": self._drawn,
            "samples": self._samples, "highest": self._highest, "unique": [self._unique_last, self._unique_sum],
            "chance": dict(self._chance.bit_generator.state),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, here in self._settings().items():
            if state["settings"][name] != here:
                raise LabError(f"this replay was saved with {name} {state['settings'][name]}, and has {here} here")
        fields = {name: np.asarray(values) for name, values in state["fields"].items()}
        self._fields, self._tree, self.capacity = {}, None, 0
        if state["weights"] is not None:
            self._make({name: (values.dtype, values.shape[1:]) for name, values in fields.items()}, state["capacity"])
            assert self._tree is not None
            weights = np.asarray(state["weights"])
            for name, values in fields.items():
                self._fields[name][: len(weights)] = values
            self._tree.set(np.arange(len(weights)), weights)
            self._size = len(weights)
        else:
            self._size = 0
        self._next, self._drawn, self._samples = state["next"], state["drawn"], state["samples"]
        self._highest = state["highest"]
        self._unique_last, self._unique_sum = state["unique"]
        self._chance.bit_generator.state = state["chance"]
        self._time, self._timed = 0.0, 0

    def _settings(self) -> dict[str, Any]:
        """What must be the same where a state goes on."""
        return {"entries": self._entries, "memory": self._memory, "alpha": self.alpha}

    def _kind(self, name: str, values: Array) -> Any:
        if values.dtype.kind == "O":
            raise LabError(f"the replay cannot hold objects, as {name} has them")
        if values.dtype.kind != "f":
            return values.dtype
        short = name in self._half or (values.ndim == 1 and name not in self._full)
        return np.dtype(np.float16 if short else np.float32)

    def _make(self, fields: Mapping[str, tuple[Any, tuple[int, ...]]], saved: int | None = None) -> None:
        each = TREE_BYTES + sum(kind.itemsize * int(np.prod(shape)) for kind, shape in fields.values())
        fitting = None if self._memory is None else self._memory // each
        # A field that was widened since takes more room than it did when the saved capacity was found.
        capacity = saved or min(limit for limit in (self._entries, fitting) if limit is not None)
        if capacity < 1:
            raise LabError(f"not one entry of {each} bytes fits into the {self._memory} bytes of the replay")
        self.capacity = capacity
        # Zeros take no memory until they are written to.
        self._fields = {name: np.zeros((capacity, *shape), kind) for name, (kind, shape) in fields.items()}
        self._tree = SumTree(capacity, self._backend)

    def _compare(self, arrays: Mapping[str, Array]) -> None:
        if arrays.keys() != self._fields.keys():
            differ = ", ".join(sorted(arrays.keys() ^ self._fields.keys()))
            raise LabError(f"every push must have the fields of the first: {differ} is not in both")
        for name, values in arrays.items():
            room = self._fields[name]
            if values.shape[1:] != room.shape[1:] or not np.can_cast(values.dtype, room.dtype, "same_kind"):
                raise LabError(
                    f"{name} of the replay was {room.dtype} of shape {room.shape[1:]} in the first push, "
                    f"and is {values.dtype} of shape {values.shape[1:]}"
                )

    def _room(self, name: str, values: Array) -> Array:
        """Where a field is kept; in 32 bits from now on if 16 cannot hold these."""
        room = self._fields[name]
        if room.dtype == np.float16 and values.size:
            with np.errstate(invalid="ignore"):
                too_large = np.isfinite(values) & (np.abs(values) > HALF)
            if too_large.any():
                room = self._fields[name] = room.astype(np.float32)
        return room

    def _weights(self, priorities: Array) -> NDArray[np.float64]:
        sizes = np.abs(priorities.astype(np.float64))
        if len(sizes):
            highest = float(sizes.max())
            if not np.isfinite(highest):
                raise LabError("a priority of the replay is not finite", hint="has the training diverged?")
            self._highest = max(self._highest, highest)
        return (sizes + self.eps) ** self.alpha
