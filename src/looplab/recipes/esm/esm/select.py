"""Stage II: select a small library from the candidates, by quality and diversity of their keys.

`dpp` greedily maximizes Σ log(1+Q) + λ·logdet(K_S + εI), where K is the matrix of cosines of the keys. The gain of a
candidate depends only on its Schur complement, which each selection reduces by the squared product with one new
orthonormal direction: one matrix-vector product per step, without a kernel matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from looplab.errors import LabError

from . import files

if TYPE_CHECKING:
    from .config import EsmSettings

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
TINY = 1e-12
"""Lower bound of Schur complements, which keeps the logarithm finite if ε is 0."""


def normalize_rows(keys: Floats) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Scale rows to unit length; rows of zeros stay zero."""
    norms = np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.asarray(keys / np.where(norms > 0, norms, 1), dtype=np.float32)


def dpp(
    keys: Floats, quality: Sequence[float] | Floats, budget: int, lam: float, eps: float, first: Sequence[int] = ()
) -> list[int]:
    """Return indices in order of selection. Those in `first` are selected first, and count in the determinant."""
    unit_keys = normalize_rows(np.asarray(keys))
    n, width = unit_keys.shape
    budget = min(budget, n)
    gain = np.log1p(np.asarray(quality, dtype=np.float64))
    schur = np.einsum("nd,nd->n", unit_keys, unit_keys, dtype=np.float64) + eps
    basis = np.zeros((budget, width), dtype=np.float32)
    free = np.ones(n, dtype=bool)
    chosen: list[int] = []
    forced = list(dict.fromkeys(first))[:budget]
    while len(chosen) < budget:
        if len(chosen) < len(forced):
            index = forced[len(chosen)]
        else:
            score = gain + lam * np.log(np.maximum(schur, TINY))
            score[~free] = -np.inf
            index = int(np.argmax(score))
        step = len(chosen)
        chosen.append(index)
        free[index] = False
        key = unit_keys[index]
        # Gram-Schmidt on the keys, each extended by √ε in its own dimension.
        direction = (key - (basis[:step] @ key) @ basis[:step]) / math.sqrt(max(float(schur[index]), TINY))
        basis[step] = direction
        schur -= np.square(unit_keys @ direction, dtype=np.float64)
    return chosen


def best_per_control_point(points: Sequence[int], quality: Sequence[float] | Floats, minimum: int) -> list[int]:
    """Return the `minimum` best candidates of every control point."""
    order = sorted(range(len(points)), key=lambda index: (points[index], -float(quality[index]), index))
    taken: dict[int, int] = {}
    chosen = []
    for index in order:
        if taken.get(points[index], 0) < minimum:
            taken[points[index]] = taken.get(points[index], 0) + 1
            chosen.append(index)
    return chosen


def select_indices(
    keys: Floats, quality: Floats, points: Sequence[int], method: str, budget: int, lam: float, eps: float,
    minimum: int, seed: int,
) -> list[int]:  # fmt: skip
    """Return the indices of the library: coverage first, the rest by the method."""
    forced = best_per_control_point(points, quality, minimum)[:budget]
    if method == "dpp":
        return dpp(keys, quality, budget, lam, eps, forced)
    others = [index for index in range(len(points)) if index not in set(forced)]
    if method == "top":
        others.sort(key=lambda index: (-float(quality[index]), index))
    elif method == "random":
        others = [others[i] for i in np.random.default_rng(seed).permutation(len(others))]
    else:
        raise LabError(f"offline_select.method is {method!r}", hint="use dpp, top or random")
    return (forced + others)[:budget]


def run(settings: EsmSettings, run_dir: Path) -> dict[str, Any]:
    """mine/ → library/."""
    source, target = run_dir / "mine", run_dir / "library"
    if not (source / "candidates.jsonl").is_file():
        raise LabError("no candidates", file=source, hint="run the stage mine first")
    rows = files.read_jsonl(source / "candidates.jsonl")
    if not rows:
        raise LabError(
            "mining found no candidates: no question has correct and incorrect rollouts that differ at a control point",
            file=source / "candidates.jsonl",
            hint="use more questions, a higher offline_mine.K or temperature, or an easier or harder task",
        )
    keys, vectors = files.read_arrays(source / "keys.safetensors"), files.read_arrays(source / "vectors.safetensors")
    matrix = np.stack([keys[row["tool_id"]] for row in rows])
    quality = np.array([row["quality"] for row in rows])
    wanted = settings.offline_select
    chosen = select_indices(
        matrix, quality, [row["control_point_m"] for row in rows], wanted.method, wanted.B, wanted.lambda_diversity,
        wanted.epsilon, wanted.min_per_control_point, settings.seed,
    )  # fmt: skip
    library = []
    for lib_id, index in enumerate(chosen):
        kept = {name: value for name, value in rows[index].items() if name not in ("task", "example_id")}
        library.append({"lib_id": lib_id, **kept})
    names = [row["tool_id"] for row in library]
    files.write_arrays(target / "keys.safetensors", {name: keys[name] for name in names})
    files.write_arrays(target / "vectors.safetensors", {name: vectors[name] for name in names if name in vectors})
    files.write_json(target / "meta.json", files.read_json(source / "meta.json"))
    files.atomic_write(target / "library.jsonl", files.to_jsonl(library))
    points = sorted({row["control_point_m"] for row in library})
    return {"candidates": len(rows), "library": len(library), "control_points": points, "method": wanted.method}
