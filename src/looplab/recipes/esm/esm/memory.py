"""Stage III: the library as an index that can be asked: which entries are nearest to this state, at this point?

A memory is keys.npy (float32, unit rows), vectors.safetensors, entries.jsonl, meta.json and meta.txt. The search is
exact: at a few thousand entries one matrix product for a batch of rows is faster than any approximate index.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from looplab.errors import LabError

from . import files
from .select import unit

if TYPE_CHECKING:
    from .backends.base import Backend
    from .config import Settings

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.intp]]
Reason = Literal["empty_memory", "no_entries_for_m", "too_few_entries", "low_sim", "ok"]


@dataclass(frozen=True)
class Entry:
    """One remembered pair, seen from its wrong side (with the vector that leads to the right one) or its right side."""

    name: str
    layer: int
    m: int
    """The control point that the key was taken at."""
    quality: float
    vector: Floats | None
    """None: the right side, which says that nothing needs to be done."""


@dataclass(frozen=True)
class Found:
    """What the memory answers for one row."""

    reason: Reason
    """`ok`, or which gate said no."""
    n_entries: int
    """How many entries there are for this control point."""
    top_sim: float | None
    entries: tuple[int, ...] = ()
    """Indices of the nearest entries, nearest first; empty unless `ok`."""
    sims: tuple[float, ...] = ()


class Memory:
    """Entries by control point and layer."""

    def __init__(self, keys: Floats, entries: Sequence[Entry], normalized: bool = True) -> None:
        self.keys, self.entries, self.normalized = keys, tuple(entries), normalized
        self.layers = tuple(sorted({entry.layer for entry in entries}))
        groups: dict[tuple[int, int], list[int]] = {}
        for index, entry in enumerate(entries):
            groups.setdefault((entry.m, entry.layer), []).append(index)
        self._groups: dict[int, list[tuple[int, Ints, Floats]]] = {}
        for (m, layer), indices in sorted(groups.items()):
            array = np.asarray(indices, dtype=np.intp)
            self._groups.setdefault(m, []).append((layer, array, np.ascontiguousarray(keys[array])))

    def restricted(self, layers: Sequence[int], first_m: int = 1, last_m: int | None = None) -> Memory:
        """The part of the memory at these layers and control points."""
        kept = [
            index
            for index, entry in enumerate(self.entries)
            if entry.layer in layers and first_m <= entry.m and (last_m is None or entry.m <= last_m)
        ]
        return Memory(self.keys[kept], [self.entries[index] for index in kept], self.normalized)

    def retrieve(self, states: Floats, m: int, k: int, min_entries: int, min_sim: float) -> list[Found]:
        """For each row of `states` [rows, self.layers, d]: its `k` nearest entries at control point `m`.

        A state is compared only with keys of its own layer; the layers compete by similarity.
        """
        groups = self._groups.get(m, [])
        count = sum(len(indices) for _, indices, _ in groups)
        closed: Reason | None = None
        if not self.entries:
            closed = "empty_memory"
        elif count == 0:
            closed = "no_entries_for_m"
        elif count < min_entries:
            closed = "too_few_entries"
        if closed:
            return [Found(closed, count, None)] * len(states)
        queries = unit(states) if self.normalized else states
        sims = np.concatenate([queries[:, self.layers.index(layer)] @ keys.T for layer, _, keys in groups], axis=1)
        names = np.concatenate([indices for _, indices, _ in groups])
        k = min(k, count)
        near = np.argpartition(-sims, k - 1, axis=1)[:, :k]
        near.sort(axis=1)  # so that equal similarities come in the order of the entries
        order = np.argsort(-np.take_along_axis(sims, near, axis=1), axis=1, kind="stable")
        near = np.take_along_axis(near, order, axis=1)
        found = []
        for row, columns in enumerate(near):
            values = sims[row, columns].tolist()
            if values[0] < min_sim:
                found.append(Found("low_sim", count, values[0]))
            else:
                found.append(Found("ok", count, values[0], tuple(names[columns].tolist()), tuple(values)))
        return found

    def shuffled(self, seed: int) -> Memory:
        """A control: the keys stay, what they lead to (vector, quality, side) changes places within its layer."""
        chance = np.random.default_rng(seed)
        entries = list(self.entries)
        for layer in self.layers:
            indices = [index for index, entry in enumerate(self.entries) if entry.layer == layer]
            for index, other in zip(indices, chance.permutation(indices), strict=True):
                here, there = self.entries[index], self.entries[other]
                entries[index] = Entry(there.name, layer, here.m, there.quality, there.vector)
        return Memory(self.keys, entries, self.normalized)

    def randomized(self, seed: int) -> Memory:
        """A control: every vector is replaced by a random direction of the same length."""
        entries = []
        for index, entry in enumerate(self.entries):
            vector = entry.vector
            if vector is not None:
                noise = np.random.default_rng([seed, index]).standard_normal(len(vector))
                vector = (noise * (np.linalg.norm(vector) / np.linalg.norm(noise))).astype(np.float32)
            entries.append(Entry(entry.name, entry.layer, entry.m, entry.quality, vector))
        return Memory(self.keys, entries, self.normalized)

    def means(self) -> dict[int, Entry]:
        """A control: for each control point one entry, the mean of its vectors, at the layer that has most of them."""
        found = {}
        for m, groups in self._groups.items():
            sets = [
                (layer, [self.entries[index] for index in indices if self.entries[index].vector is not None])
                for layer, indices, _ in groups
            ]
            layer, steering = max(sets, key=lambda pair: (len(pair[1]), -pair[0]))
            if steering:
                vectors = np.stack([entry.vector for entry in steering if entry.vector is not None])
                quality = float(np.mean([entry.quality for entry in steering]))
                found[m] = Entry(f"mean_L{layer}_m{m:02d}", layer, m, quality, vectors.mean(axis=0, dtype=np.float32))
        return found


def run(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """library/ → memory/."""
    source, target = run_dir / "library", run_dir / "memory"
    rows = files.read_lines(source / "library.jsonl")
    if not rows:
        raise LabError("there is no library to remember", file=source, hint="run the stage select first")
    raw = files.read_arrays(source / "keys.safetensors")
    keys = np.stack([raw[row["tool_id"]] for row in rows]).astype(np.float32)
    if settings.offline_memory.normalize_keys:
        keys = unit(keys)
    buffer = io.BytesIO()
    np.save(buffer, keys, allow_pickle=False)
    files.write_whole(target / "keys.npy", buffer.getvalue())
    files.write_arrays(target / "vectors.safetensors", files.read_arrays(source / "vectors.safetensors"))
    files.write_whole(target / "entries.jsonl", files.lines_of(rows))
    files.write_whole(target / "meta.txt", f"N={len(keys)} H={keys.shape[1]}\n".encode())
    meta = {**files.read_json(source / "meta.json"), "normalized": settings.offline_memory.normalize_keys}
    files.write_json(target / "meta.json", meta)
    return {
        "entries": len(keys),
        "width": int(keys.shape[1]),
        "null_entries": sum(not row["vector_path"] for row in rows),
    }


def require(folder: Path) -> None:
    """Say how to make a memory where there is none."""
    if not (folder / "meta.json").is_file():
        raise LabError(
            "there is no memory here",
            file=folder,
            hint="make it: looplab stage --config CONFIG mine select memory, or name its run in eval.artifact_run_dir",
        )


def load(folder: Path) -> tuple[Memory, dict[str, Any]]:
    """A memory and its meta.json, from a run's folder `memory`."""
    require(folder)
    rows, meta = files.read_lines(folder / "entries.jsonl"), files.read_json(folder / "meta.json")
    keys = np.load(folder / "keys.npy", allow_pickle=False)
    vectors = files.read_arrays(folder / "vectors.safetensors")
    if len(keys) != len(rows):
        raise LabError(f"{len(keys)} keys but {len(rows)} entries", file=folder, hint="run the stage memory again")
    entries = [
        Entry(row["tool_id"], row["layer"], row["control_point_m"], row["quality"], vectors.get(row["tool_id"]))
        for row in rows
    ]
    return Memory(keys, entries, bool(meta["normalized"])), meta


def check_fit(meta: dict[str, Any], settings: Settings, backend: Backend, folder: Path) -> None:
    """Refuse a memory of another model, prompt or delimiter, with all differences in one message."""
    ours = fit(settings, backend)
    theirs = meta["fit"]
    wrong = [
        f"{name} is {theirs.get(name)!r} there, {value!r} here"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if wrong:
        raise LabError(
            "the memory does not fit: " + "; ".join(wrong),
            file=folder,
            hint="mine with this config, or name a run that fits in eval.artifact_run_dir",
        )


def fit(settings: Settings, backend: Backend) -> dict[str, Any]:
    """What a memory and the model that it steers must have in common."""
    return {
        "model": backend.fingerprint,
        "n_layers": backend.n_layers,
        "width": backend.width,
        "segment_delimiter": settings.control_points.segment_delimiter,
        "prompt": settings.prompt.model_dump(mode="json"),
    }


def check_apart(meta: dict[str, Any], fingerprints: dict[str, str], folder: Path) -> None:
    """Refuse to evaluate on a question that was mined. `fingerprints`: of the question → its id."""
    both = sorted(set(meta["mined"]) & set(fingerprints))
    if both:
        names = ", ".join(fingerprints[name] for name in both[:5])
        raise LabError(
            f"{len(both)} questions to evaluate were mined for this memory: {names}{' …' if len(both) > 5 else ''}",
            file=folder,
            hint="what was mined cannot be evaluated on: use the splits of the config that mined, or mine again",
        )
