"""The library: greedy selection is exactly greedy, coverage comes first, nothing depends on chance but `random`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.recipes.esm.esm import select


def value(keys: np.ndarray, quality: np.ndarray, chosen: list[int], lam: float, eps: float) -> float:
    """The objective, by its definition."""
    part = select.normalize_rows(keys)[chosen].astype(np.float64)
    gram = part @ part.T + eps * np.eye(len(chosen))
    return float(np.log1p(quality[chosen]).sum() + lam * np.linalg.slogdet(gram)[1])


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 6), st.floats(0, 3), st.booleans())
def test_every_step_of_dpp_is_the_best_step(seed: int, n: int, budget: int, lam: float, twins: bool) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(n, 4)).astype(np.float32)
    if twins and n > 2:
        keys[1] = keys[0] * 3  # the same direction: nearly worthless beside the other
    quality = rng.random(n)
    eps = 1e-2
    chosen = select.dpp(keys, quality, budget, lam, eps)
    assert len(chosen) == len(set(chosen)) == min(budget, n)
    for step in range(len(chosen)):
        before = chosen[:step]
        best = max(value(keys, quality, [*before, i], lam, eps) for i in range(n) if i not in before)
        assert value(keys, quality, chosen[: step + 1], lam, eps) == pytest.approx(best, abs=1e-3)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_what_is_forced_counts_in_the_determinant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(8, 5)).astype(np.float32)
    keys[1] = keys[0]
    quality = rng.random(8) * 0.1
    chosen = select.dpp(keys, quality, 5, 1.0, 1e-4, first=[0])
    assert chosen[0] == 0
    assert 1 not in chosen  # a twin of what is there already


def test_without_diversity_dpp_is_top() -> None:
    keys = np.random.default_rng(0).normal(size=(30, 4))
    quality = np.linspace(0, 1, 30)
    chosen = select.dpp(keys, quality, 7, 0.0, 1e-4)
    assert chosen == list(range(29, 22, -1))


def test_every_control_point_is_covered_before_the_rest() -> None:
    keys = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    points = [1] * 10 + [2, 3]
    quality = np.array([1.0] * 10 + [0.1, 0.2])
    for method in ("dpp", "top", "random"):
        chosen = select.select_indices(keys, quality, points, method, 4, 0.5, 1e-4, minimum=1, seed=0)
        assert len(set(chosen)) == 4
        assert {points[index] for index in chosen} == {1, 2, 3}
    assert select.select_indices(keys, quality, points, "top", 3, 0.5, 1e-4, minimum=0, seed=0) == [0, 1, 2]


def test_random_depends_on_the_seed_alone() -> None:
    keys = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    quality = np.ones(40)

    def chosen(seed: int) -> list[int]:
        return select.select_indices(keys, quality, [1] * 40, "random", 8, 0, 1e-4, 0, seed)

    assert chosen(1) == chosen(1) != chosen(2)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(LabError, match="dpp, top or random"):
        select.select_indices(np.ones((2, 2)), np.ones(2), [1, 1], "best", 1, 0, 1e-4, 0, 0)


def test_selecting_before_mining_says_what_to_run(tmp_path: Path) -> None:
    from looplab.recipes.esm.esm.config import parse_settings as make

    with pytest.raises(LabError, match="mine first"):
        select.run(make({"task": {"dataset": "tiny"}}), tmp_path)
