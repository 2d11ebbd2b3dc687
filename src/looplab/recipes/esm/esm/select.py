"""Stage II: from many candidates to a small library, by quality and by difference of their keys.

`dpp` is the greedy maximum of Σ log(1+Q) + λ·logdet(K_S + εI), K being the cosines of the keys. Each unselected
candidate's gain needs only its Schur complement, and that falls by the square of its product with one new orthonormal
direction per selection: a matrix-vector product a step, no kernel matrix.
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
    from .config import Settings

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
TINY = 1e-12
"""A Schur complement is never below ε in exact arithmetic; this keeps its logarithm finite if ε is 0."""


def unit(keys: Floats) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of length 1; a row of zeros stays one."""
    norms = np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.asarray(keys / np.where(norms > 0, norms, 1), dtype=np.float32)


def dpp(
    keys: Floats, quality: Sequence[float] | Floats, budget: int, lam: float, eps: float, first: Sequence[int] = ()
) -> list[int]:
    """Indices in the order of their selection. Those in `first` are taken first, and count in the determinant."""
    unit_keys = unit(np.asarray(keys))
    n, width = unit_keys.shape
    budget = min(budget, n)
    gain = np.log1p(np.asarray(quality, dtype=np.float64))
    rest = np.einsum("nd,nd->n", unit_keys, unit_keys, dtype=np.float64) + eps
    basis = np.zeros((budget, width), dtype=np.float32)
    free = np.ones(n, dtype=bool)
    chosen: list[int] = []
    forced = list(dict.fromkeys(first))[:budget]
    while len(chosen) < budget:
        if len(chosen) < len(forced):
            index = forced[len(chosen)]
        else:
            score = gain + lam * np.log(np.maximum(rest, TINY))
            score[~free] = -np.inf
            index = int(np.argmax(score))
        step = len(chosen)
        chosen.append(index)
        free[index] = False
        key = unit_keys[index]
        # Gram-Schmidt in the space of the keys, each with √ε in a dimension of its own, which others do not see.
        direction = (key - (basis[:step] @ key) @ basis[:step]) / math.sqrt(max(float(rest[index]), TINY))
        basis[step] = direction
        rest -= np.square(unit_keys @ direction, dtype=np.float64)
    return chosen


def covering(points: Sequence[int], quality: Sequence[float] | Floats, least: int) -> list[int]:
    """The `least` best of every control point, control point by control point."""
    order = sorted(range(len(points)), key=lambda index: (points[index], -float(quality[index]), index))
    taken: dict[int, int] = {}
    chosen = []
    for index in order:
        if taken.get(points[index], 0) < least:
            taken[points[index]] = taken.get(points[index], 0) + 1
            chosen.append(index)
    return chosen


def choose(
    keys: Floats, quality: Floats, points: Sequence[int], method: str, budget: int, lam: float, eps: float,
    least: int, seed: int,
) -> list[int]:  # fmt: skip
    """Which candidates make the library: coverage first, the rest by the method."""
    forced = covering(points, quality, least)[:budget]
    if method == "dpp":
        return dpp(keys, quality, budget, lam, eps, forced)
    others = [index for index in range(len(points)) if index not in set(forced)]
    if method == "top":
        others.sort(key=lambda index: (-float(quality[index]), index))
    elif method == "random":
        others = [others[i] for i in np.random.default_rng(seed).permutation(len(others))]
    else:
        raise LabError(f"offline_select.method is {method!r}", hint="it can be dpp, top or random")
    return (forced + others)[:budget]


def run(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """mine/ → library/."""
    source, target = run_dir / "mine", run_dir / "library"
    if not (source / "candidates.jsonl").is_file():
        raise LabError("there are no candidates to select from", file=source, hint="run the stage mine first")
    rows = files.read_lines(source / "candidates.jsonl")
    if not rows:
        raise LabError(
            "mining found no candidate: no question had both right and wrong rollouts that differ at a control point",
            file=source / "candidates.jsonl",
            hint="more questions, a higher offline_mine.K or temperature, or an easier or harder task",
        )
    keys, vectors = files.read_arrays(source / "keys.safetensors"), files.read_arrays(source / "vectors.safetensors")
    matrix = np.stack([keys[row["tool_id"]] for row in rows])
    quality = np.array([row["quality"] for row in rows])
    wanted = settings.offline_select
    chosen = choose(
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
    files.write_whole(target / "library.jsonl", files.lines_of(library))
    points = sorted({row["control_point_m"] for row in library})
    return {"candidates": len(rows), "library": len(library), "control_points": points, "method": wanted.method}
