"""The sum tree: both implementations agree to the bit, and searches follow the weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.rl import sumtree
from looplab.rl.sumtree import SumTree

BACKENDS: list[Literal["c", "numpy"]] = ["c", "numpy"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "c" and sumtree.load_library() is None:
        pytest.skip("no C compiler")
    return request.param


def naive(weights: Any, target: float) -> int:
    """The definition: the first leaf whose cumulative weight exceeds the target."""
    return int(min(np.searchsorted(np.cumsum(weights), target, side="right"), len(weights) - 1))


def test_find_returns_the_leaf_that_covers_each_target(backend: Any) -> None:
    tree = SumTree(40, backend)
    weights = np.arange(1.0, 41.0)  # whole numbers: every sum is exact
    tree.set(np.arange(40), weights)
    targets = np.arange(0.0, weights.sum(), 0.5)
    indices, found = tree.find(targets)
    assert indices.tolist() == [naive(weights, target) for target in targets]
    assert np.array_equal(found, weights[indices])
    assert tree.total == weights.sum()


def test_a_target_beyond_the_total_finds_the_last_leaf_in_use(backend: Any) -> None:
    for size in (1, 15, 16, 17, 257, 5000):
        for used in {1, size // 2 + 1, size}:
            tree = SumTree(size, backend)
            tree.set(np.arange(used), np.full(used, 0.1))
            assert tree.find(np.array([tree.total, 2 * tree.total]))[0].tolist() == [used - 1] * 2


def test_the_last_weight_of_a_repeated_index_wins(backend: Any) -> None:
    tree = SumTree(20, backend)
    tree.set(np.array([3, 17, 3]), np.array([5.0, 1.0, 2.0]))
    assert tree.leaves[[3, 17]].tolist() == [2.0, 1.0]
    assert tree.total == 3.0


def test_invalid_weights_and_indices_are_refused(backend: Any) -> None:
    tree = SumTree(20, backend)
    for indices, weights in (
        ([20], [1.0]),
        ([-1], [1.0]),
        ([0], [0.0]),
        ([0], [np.nan]),
        ([0], [np.inf]),
        ([0, 1], [1.0]),
    ):
        with pytest.raises(LabError):
            tree.set(np.array(indices), np.array(weights))
    with pytest.raises(LabError):
        tree.find(np.array([0.0]))
    assert tree.total == 0.0


@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_both_backends_agree_to_the_bit_and_sums_do_not_drift(seed: int, size: int, rounds: int) -> None:
    if sumtree.load_library() is None:
        pytest.skip("no C compiler")
    rng = np.random.default_rng(seed)
    one, other = SumTree(size, "c"), SumTree(size, "numpy")
    for _ in range(rounds):
        indices = rng.integers(0, size, rng.integers(1, 2 * size + 1))
        weights = np.exp(rng.normal(scale=8, size=len(indices)))
        one.set(indices, weights)
        other.set(indices, weights)
    assert np.array_equal(one._weights, other._weights)
    targets = rng.random(100) * one.total
    assert np.array_equal(one.find(targets)[0], other.find(targets)[0])
    # A tree built from the leaves alone is the same tree: its sums do not depend on history.
    fresh = SumTree(size, "c")
    used = np.flatnonzero(one.leaves)
    fresh.set(used, one.leaves[used])
    assert fresh.total == one.total


@given(st.integers(0, 2**32 - 1), st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_ascending_targets_give_ascending_leaves_with_positive_weight(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(size)
    used = int(rng.integers(1, size + 1))
    tree.set(np.arange(used), np.exp(rng.normal(scale=10, size=used)))
    indices, weights = tree.find(np.sort(rng.random(200)) * tree.total)
    assert (np.diff(indices) >= 0).all()
    assert (weights > 0).all()


SHOW = "from looplab.rl.sumtree import SumTree; print(SumTree(10).backend)"


def run(code: str, tmp_path: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_library_is_compiled_once_into_the_cache(tmp_path: Path) -> None:
    assert run(SHOW, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")) == "c"
    (cached,) = (tmp_path / "cache" / "looplab").iterdir()
    before = cached.stat().st_mtime_ns
    # The second process needs no compiler.
    assert run(SHOW, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="/nowhere") == "c"
    assert cached.stat().st_mtime_ns == before


def test_numpy_is_used_without_a_compiler(tmp_path: Path) -> None:
    assert run(SHOW, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="/nowhere") == "numpy"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_broken_or_missing_cache_is_tolerated(tmp_path: Path) -> None:
    assert run(SHOW, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")) == "c"
    (cached,) = (tmp_path / "cache" / "looplab").iterdir()
    cached.write_bytes(b"torn")
    assert run(SHOW, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")) == "c"
    (tmp_path / "file").write_text("not a folder")
    assert run(SHOW, tmp_path, XDG_CACHE_HOME=str(tmp_path / "file")) == "c"
