"""Stage III: the library as a nearest-neighbour index over hidden states, by control point and layer.

A memory is keys.npy (float32, unit rows), vectors.safetensors, entries.jsonl, meta.json and meta.txt. The search is
exact: for a few thousand entries, one matrix product per batch is faster than an approximate index.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from looplab.errors import LabError

from . import files
from .select import normalize_rows

if TYPE_CHECKING:
    from .backends.base import Backend
    from .config import EsmSettings

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.intp]]
Reason = Literal["empty_memory", "no_entries_for_m", "too_few_entries", "low_sim", "ok"]


@dataclass(frozen=True)
class MemoryEntry:
    """One side of a stored pair: incorrect (with the vector towards the correct side) or correct (without a vector)."""

    name: str
    layer: int
    m: int
    """Control point of the key."""
    quality: float
    vector: Floats | None
    """None for the correct side: no steering needed."""


@dataclass(frozen=True)
class RetrievalResult:
    """Result of a query for one row."""

    reason: Reason
    """`ok`, or the gate that rejected the query."""
    n_entries: int
    """Number of entries at this control point."""
    top_sim: float | None
    entries: tuple[int, ...] = ()
    """Indices of the nearest entries, nearest first; empty unless `ok`."""
    sims: tuple[float, ...] = ()


class Memory:
    """Entries by control point and layer."""

    def __init__(
        self,
        keys: Floats,
        entries: Sequence[MemoryEntry],
        normalized: bool = True,
        means: Mapping[tuple[int, int], MemoryEntry] | None = None,
    ) -> None:
        """`means`: the mean over all mined pairs by control point and layer; None: over the entries."""
        self.keys, self.entries, self.normalized, self._means = keys, tuple(entries), normalized, means
        self.layers = tuple(sorted({entry.layer for entry in entries}))
        groups: dict[tuple[int, int], list[int]] = {}
        for index, entry in enumerate(entries):
            groups.setdefault((entry.m, entry.layer), []).append(index)
        self._groups: dict[int, list[tuple[int, Ints, Floats]]] = {}
        for (m, layer), indices in sorted(groups.items()):
            array = np.asarray(indices, dtype=np.intp)
            self._groups.setdefault(m, []).append((layer, array, np.ascontiguousarray(keys[array])))

    def restricted(self, layers: Sequence[int], first_m: int = 1, last_m: int | None = None) -> Memory:
        """Return the memory restricted to these layers and control points."""
        kept = [
            index
            for index, entry in enumerate(self.entries)
            if entry.layer in layers and first_m <= entry.m and (last_m is None or entry.m <= last_m)
        ]
        return Memory(self.keys[kept], [self.entries[index] for index in kept], self.normalized, self._means)

    def retrieve(self, states: Floats, m: int, k: int, min_entries: int, min_sim: float) -> list[RetrievalResult]:
        """Return the `k` nearest entries at control point `m` for each row of `states` [rows, self.layers, d].

        States are compared with keys of the same layer; layers compete by similarity.
        """
        groups = self._groups.get(m, [])
        count = sum(len(indices) for _, indices, _ in groups)
        rejected: Reason | None = None
        if not self.entries:
            rejected = "empty_memory"
        elif count == 0:
            rejected = "no_entries_for_m"
        elif count < min_entries:
            rejected = "too_few_entries"
        if rejected:
            return [RetrievalResult(rejected, count, None)] * len(states)
        queries = normalize_rows(states) if self.normalized else states
        sims = np.concatenate([queries[:, self.layers.index(layer)] @ keys.T for layer, _, keys in groups], axis=1)
        names = np.concatenate([indices for _, indices, _ in groups])
        k = min(k, count)
        near = np.argpartition(-sims, k - 1, axis=1)[:, :k]
        near.sort(axis=1)  # so that ties are in the order of the entries
        order = np.argsort(-np.take_along_axis(sims, near, axis=1), axis=1, kind="stable")
        near = np.take_along_axis(near, order, axis=1)
        found = []
        for row, columns in enumerate(near):
            values = sims[row, columns].tolist()
            if values[0] < min_sim:
                found.append(RetrievalResult("low_sim", count, values[0]))
            else:
                found.append(RetrievalResult("ok", count, values[0], tuple(names[columns].tolist()), tuple(values)))
        return found

    def shuffled(self, seed: int) -> Memory:
        """Control: keep the keys, and permute their values (vector, quality, side) within each layer."""
        rng = np.random.default_rng(seed)
        entries = list(self.entries)
        for layer in self.layers:
            indices = [index for index, entry in enumerate(self.entries) if entry.layer == layer]
            for index, other in zip(indices, rng.permutation(indices), strict=True):
                here, there = self.entries[index], self.entries[other]
                entries[index] = MemoryEntry(there.name, layer, here.m, there.quality, there.vector)
        return Memory(self.keys, entries, self.normalized)

    def randomized(self, seed: int) -> Memory:
        """Control: replace every vector by a random direction of the same norm."""
        entries = []
        for index, entry in enumerate(self.entries):
            vector = entry.vector
            if vector is not None:
                noise = np.random.default_rng([seed, index]).standard_normal(len(vector))
                vector = (noise * (np.linalg.norm(vector) / np.linalg.norm(noise))).astype(np.float32)
            entries.append(MemoryEntry(entry.name, entry.layer, entry.m, entry.quality, vector))
        return Memory(self.keys, entries, self.normalized)

    def means(self) -> dict[int, MemoryEntry]:
        """Return the simple rival: one entry per control point, the mean of its vectors (of all mined pairs if they are
        known, not only of the library), at the layer with the most vectors."""
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
                mean = MemoryEntry(_mean_name(layer, m), layer, m, quality, vectors.mean(axis=0, dtype=np.float32))
                found[m] = (self._means or {}).get((m, layer), mean)
        return found


def _mean_name(layer: int, m: int) -> str:
    return f"mean_L{layer}_m{m:02d}"


def _mined_means(mined: Path) -> tuple[dict[str, Floats], list[dict[str, Any]]]:
    """Return the mean vector of all mined pairs for each control point and layer, and their entries."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in files.read_jsonl(mined / "candidates.jsonl"):
        if row["vector_path"]:
            groups.setdefault((row["control_point_m"], row["layer"]), []).append(row)
    if not groups:
        return {}, []
    raw = files.read_arrays(mined / "vectors.safetensors")
    vectors, rows = {}, []
    for (m, layer), members in sorted(groups.items()):
        name = _mean_name(layer, m)
        vectors[name] = np.stack([raw[row["tool_id"]] for row in members]).mean(axis=0, dtype=np.float32)
        quality = float(np.mean([row["quality"] for row in members]))
        rows.append({"name": name, "layer": layer, "m": m, "quality": quality, "pairs": len(members)})
    return vectors, rows


def run(settings: EsmSettings, run_dir: Path) -> dict[str, Any]:
    """library/ → memory/."""
    source, target = run_dir / "library", run_dir / "memory"
    rows = files.read_jsonl(source / "library.jsonl")
    if not rows:
        raise LabError("no library", file=source, hint="run the stage select first")
    raw = files.read_arrays(source / "keys.safetensors")
    keys = np.stack([raw[row["tool_id"]] for row in rows]).astype(np.float32)
    if settings.offline_memory.normalize_keys:
        keys = normalize_rows(keys)
    buffer = io.BytesIO()
    np.save(buffer, keys, allow_pickle=False)
    files.atomic_write(target / "keys.npy", buffer.getvalue())
    files.write_arrays(target / "vectors.safetensors", files.read_arrays(source / "vectors.safetensors"))
    files.atomic_write(target / "entries.jsonl", files.to_jsonl(rows))
    files.atomic_write(target / "meta.txt", f"N={len(keys)} H={keys.shape[1]}\n".encode())
    vectors, means = _mined_means(run_dir / "mine")
    files.write_arrays(target / "means.safetensors", vectors)
    meta = {**files.read_json(source / "meta.json"), "normalized": settings.offline_memory.normalize_keys,
            "means": means}  # fmt: skip
    files.write_json(target / "meta.json", meta)
    return {
        "entries": len(keys),
        "width": int(keys.shape[1]),
        "null_entries": sum(not row["vector_path"] for row in rows),
    }


def require(folder: Path) -> None:
    """Raise LabError if the folder contains no memory."""
    if not (folder / "meta.json").is_file():
        raise LabError(
            "no memory",
            file=folder,
            hint="run looplab stage --config CONFIG mine select memory, or set eval.artifact_run_dir",
        )


def load(folder: Path) -> tuple[Memory, dict[str, Any]]:
    """Load a memory and its meta.json from the folder `memory` of a run."""
    require(folder)
    rows, meta = files.read_jsonl(folder / "entries.jsonl"), files.read_json(folder / "meta.json")
    keys = np.load(folder / "keys.npy", allow_pickle=False)
    vectors = files.read_arrays(folder / "vectors.safetensors")
    if len(keys) != len(rows):
        raise LabError(f"{len(keys)} keys but {len(rows)} entries", file=folder, hint="run the stage memory again")
    entries = [
        MemoryEntry(row["tool_id"], row["layer"], row["control_point_m"], row["quality"], vectors.get(row["tool_id"]))
        for row in rows
    ]
    means = None
    if meta.get("means"):  # absent in older memories
        mean_vectors = files.read_arrays(folder / "means.safetensors")
        means = {
            (row["m"], row["layer"]): MemoryEntry(
                row["name"], row["layer"], row["m"], row["quality"], mean_vectors[row["name"]]
            )
            for row in meta["means"]
        }
    return Memory(keys, entries, bool(meta["normalized"]), means), meta


def check_fit(meta: dict[str, Any], settings: EsmSettings, backend: Backend, folder: Path) -> None:
    """Raise LabError, with all differences, if the memory has another model, prompt or delimiter."""
    ours = fit(settings, backend)
    theirs = meta["fit"]
    wrong = [
        f"{name} is {theirs.get(name)!r} in the memory, {value!r} in this config"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if wrong:
        raise LabError(
            "the memory does not fit: " + "; ".join(wrong),
            file=folder,
            hint="mine with this config, or set eval.artifact_run_dir to a run that fits",
        )


def fit(settings: EsmSettings, backend: Backend) -> dict[str, Any]:
    """Return what a memory and the model it steers must have in common."""
    return {
        "model": backend.fingerprint,
        "n_layers": backend.n_layers,
        "width": backend.width,
        "segment_delimiter": settings.control_points.segment_delimiter,
        "prompt": settings.prompt.model_dump(mode="json"),
    }


def check_not_mined(meta: dict[str, Any], fingerprints: dict[str, str], folder: Path) -> None:
    """Raise LabError if a question to evaluate was mined. `fingerprints`: fingerprint → id."""
    both = sorted(set(meta["mined"]) & set(fingerprints))
    if both:
        names = ", ".join(fingerprints[name] for name in both[:5])
        raise LabError(
            f"{len(both)} questions to evaluate were mined for this memory: {names}{' …' if len(both) > 5 else ''}",
            file=folder,
            hint="mined questions cannot be used for evaluation: use the same splits as for mining, or mine again",
        )
