"""The memory: nearest entries of the same layer and control point, gates, controls that change what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.recipes.esm.esm import memory
from looplab.recipes.esm.esm.memory import Memory, MemoryEntry
from looplab.recipes.esm.esm.select import normalize_rows

WIDTH = 6


def make(n: int = 40, seed: int = 0, layers: tuple[int, ...] = (1, 3), points: tuple[int, ...] = (1, 2)) -> Memory:
    rng = np.random.default_rng(seed)
    keys = normalize_rows(rng.normal(size=(n, WIDTH)))
    entries = [
        MemoryEntry(
            f"e{i}", layers[i % len(layers)], points[i // len(layers) % len(points)], float(rng.random()),
            rng.normal(size=WIDTH).astype(np.float32) if rng.random() < 0.6 else None,
        )
        for i in range(n)
    ]  # fmt: skip
    return Memory(keys, entries)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 30), st.integers(1, 5))
def test_retrieval_finds_what_a_plain_loop_finds(seed: int, n: int, k: int, rows: int) -> None:
    held = make(n, seed)
    states = np.random.default_rng(seed + 1).normal(size=(rows, len(held.layers), WIDTH)).astype(np.float32)
    for row, found in enumerate(held.retrieve(states, 1, k, 1, -1.0)):
        expected = sorted(
            (
                float(held.keys[i] @ normalize_rows(states[row, held.layers.index(entry.layer)]))
                for i, entry in enumerate(held.entries)
                if entry.m == 1
            ),
            reverse=True,
        )[:k]
        assert found.sims == pytest.approx(expected, abs=1e-5)  # float32 products of unit vectors: off by 1e-6 at most
        assert all(held.entries[i].m == 1 for i in found.entries)


def test_a_row_gets_the_same_answer_alone_and_among_others() -> None:
    held = make()
    states = np.random.default_rng(5).normal(size=(7, 2, WIDTH)).astype(np.float32)
    together = held.retrieve(states, 2, 5, 1, 0.0)
    alone = [held.retrieve(states[row : row + 1], 2, 5, 1, 0.0)[0] for row in range(7)]
    # The nearest two of these similarities are 0.004 apart, and rounding moves them by 1e-6 at most.
    assert [one.entries for one in together] == [one.entries for one in alone]


def test_each_gate_reports_its_reason() -> None:
    held, states = make(), np.ones((1, 2, WIDTH), np.float32)

    def reason(of: Memory, m: int = 1, least: int = 1, sim: float = -1.0) -> str:
        return of.retrieve(states, m, 4, least, sim)[0].reason

    assert reason(held.restricted(())) == "empty_memory"
    assert reason(held, m=9) == "no_entries_for_m"
    assert reason(held, least=1000) == "too_few_entries"
    assert reason(held, sim=1.0) == "low_sim"
    assert reason(held) == "ok"


def test_a_rejected_query_returns_no_entries() -> None:
    found = make().retrieve(np.ones((1, 2, WIDTH), np.float32), 1, 4, 1, 1.0)[0]
    assert found.entries == ()
    assert found.top_sim is not None
    assert found.n_entries == 20


def test_a_restricted_memory_has_only_its_layers_and_points() -> None:
    part = make().restricted((3,), first_m=2, last_m=2)
    assert {(entry.layer, entry.m) for entry in part.entries} == {(3, 2)}
    assert part.layers == (3,)


def test_random_directions_keep_the_length_and_nothing_else() -> None:
    held = make()
    other, again = held.randomized(0), held.randomized(0)
    for before, after, same in zip(held.entries, other.entries, again.entries, strict=True):
        assert (before.vector is None) == (after.vector is None)
        if before.vector is not None and after.vector is not None and same.vector is not None:
            assert np.linalg.norm(after.vector) == pytest.approx(np.linalg.norm(before.vector), rel=1e-5)
            assert not np.allclose(before.vector, after.vector)
            assert np.array_equal(after.vector, same.vector)


def test_shuffling_moves_what_keys_lead_to_within_their_layer() -> None:
    held = make()
    other = held.shuffled(0)
    assert np.array_equal(held.keys, other.keys)
    assert [(entry.layer, entry.m) for entry in held.entries] == [(entry.layer, entry.m) for entry in other.entries]
    for layer in held.layers:
        before = {entry.name for entry in held.entries if entry.layer == layer}
        assert before == {entry.name for entry in other.entries if entry.layer == layer}
    assert [entry.name for entry in held.entries] != [entry.name for entry in other.entries]


def test_the_mean_vector_is_the_mean_of_one_layer_and_point() -> None:
    held = make()
    for m, entry in held.means().items():
        vectors = [e.vector for e in held.entries if e.m == m and e.layer == entry.layer and e.vector is not None]
        assert entry.vector == pytest.approx(np.mean(vectors, axis=0), abs=1e-5)


def test_a_missing_memory_is_reported_with_a_hint(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(LabError, match="mine select memory"):
        memory.load(Path(str(tmp_path)))
