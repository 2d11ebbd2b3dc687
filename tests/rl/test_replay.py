"""The prioritized replay: what it draws, what it keeps, and that it goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.rl.metrics import check
from looplab.rl.replay import TREE_BYTES, Replay
from looplab.trainkit.checkpoint import Checkpoints, newest


def numbered(first: int, count: int) -> dict[str, Any]:
    """Entries that say which they are, in every field."""
    number = np.arange(first, first + count)
    return {
        "seen": np.repeat(number[:, None] % 256, 6, axis=1).astype(np.uint8).reshape(count, 2, 3),
        "number": number,
        "rewards": (number % 1000).astype(np.float32),
        "terminated": number % 2 == 0,
        "memory": np.zeros((count, 0), np.float32),
        "place": number[:, None] + np.array([[0.25, 0.5]]),
    }


def test_draws_follow_the_priorities_to_the_power_of_alpha() -> None:
    priorities = np.array([0.1, 1.0, 2.0, 5.0, 30.0])
    alpha = 0.7
    replay = Replay(entries=8, alpha=alpha, eps=1e-9, seed=3)
    replay.push({"x": np.arange(5)}, priorities)
    wanted = priorities**alpha / (priorities**alpha).sum()
    draws = 40_000
    singles = np.concatenate([replay.sample(1).indices for _ in range(4_000)])
    batches = np.concatenate([replay.sample(400).indices for _ in range(draws // 400)])
    for drawn in (singles, batches):
        counts = np.bincount(drawn, minlength=5)
        chi = ((counts - len(drawn) * wanted) ** 2 / (len(drawn) * wanted)).sum()
        assert chi < 18.47  # the 0.999 quantile of chi-squared with 4 degrees of freedom


def test_every_stratum_is_drawn_once() -> None:
    replay = Replay(entries=64, alpha=0.0)
    replay.push({"x": np.arange(64)}, np.ones(64))
    assert replay.sample(64).indices.tolist() == list(range(64))  # all alike: each is its own stratum


def test_importance_weights_undo_the_priorities() -> None:
    replay = Replay(entries=8, alpha=1.0, beta=1.0, eps=1e-12)
    replay.push({"x": np.arange(4)}, np.array([1.0, 2.0, 3.0, 4.0]))
    sample = replay.sample(1000)
    chance = np.array([1.0, 2.0, 3.0, 4.0])[sample.indices] / 10
    wanted = (4 * chance) ** -1.0
    assert sample.weights == pytest.approx(wanted / wanted.max(), rel=1e-5)
    assert sample.weights.dtype == np.float32


def test_beta_rises_with_the_entries_that_were_drawn() -> None:
    replay = Replay(entries=8, beta=0.4, beta_final=1.0, beta_entries=100)
    replay.push({"x": np.arange(4)})
    seen = [replay.beta]
    for _ in range(3):
        replay.sample(50)
        seen.append(replay.beta)
    assert seen == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_an_update_changes_what_is_drawn() -> None:
    replay = Replay(entries=8, alpha=1.0)
    replay.push({"x": np.arange(8)}, np.ones(8))
    replay.update(np.arange(8), np.array([0, 0, 0, -1e6, 0, 0, 0, 0], np.float32))
    assert set(replay.sample(1000).data["x"].tolist()) == {3}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_the_newest_entries_are_kept_and_the_fields_stay_together(pushes: list[int], capacity: int) -> None:
    replay = Replay(entries=capacity)
    pushed = 0
    for count in pushes:
        replay.push(numbered(pushed, count), np.ones(count))
        pushed += count
    assert len(replay) == min(pushed, capacity)
    if not pushed:
        return
    data = replay.sample(200).data
    assert set(data["number"].tolist()) <= set(range(max(0, pushed - capacity), pushed))
    wanted = numbered(0, pushed)
    for name, values in data.items():
        assert np.array_equal(values, wanted[name][data["number"]].astype(values.dtype))


def test_fields_are_kept_small_and_given_back_as_they_are_used() -> None:
    replay = Replay(entries=10, half=["place"], full=["values"])
    replay.push({**numbered(0, 4), "values": np.full(4, 1 / 3)}, np.ones(4))
    kept = {name: str(values.dtype) for name, values in replay.state_dict()["fields"].items()}
    assert kept == {"seen": "uint8", "number": "int64", "rewards": "float16", "terminated": "bool",
                    "memory": "float32", "place": "float16", "values": "float32"}  # fmt: skip
    given = {name: str(values.dtype) for name, values in replay.sample(3).data.items()}
    assert given == kept | {"rewards": "float32", "place": "float32"}


def test_a_number_that_16_bits_cannot_hold_widens_its_field() -> None:
    replay = Replay(entries=4)
    replay.push({"rewards": np.array([1.5, 2.5])}, np.ones(2))
    replay.push({"rewards": np.array([1e6])}, np.ones(1))
    assert set(replay.sample(300).data["rewards"].tolist()) == {1.5, 2.5, 1e6}
    twin = Replay(entries=4)
    twin.load_state_dict(replay.state_dict())
    assert set(twin.sample(300).data["rewards"].tolist()) == {1.5, 2.5, 1e6}


def test_whole_rollouts_can_be_pushed() -> None:
    replay = Replay(entries=100)
    number = np.arange(12).reshape(4, 3)
    replay.push({"number": number, "seen": np.stack([number, number], -1)}, np.ones((4, 3)))
    assert len(replay) == 12
    data = replay.sample(50).data
    assert data["seen"].shape == (50, 2)
    assert np.array_equal(data["seen"][:, 0], data["number"])


def test_the_capacity_follows_from_the_memory() -> None:
    entry = 6 + 8 + 2 + 1 + 0 + 8 + TREE_BYTES
    for replay, capacity in (
        (Replay(memory=100 * entry), 100),
        (Replay(entries=40, memory=100 * entry), 40),
        (Replay(entries=400, memory=100 * entry), 100),
    ):
        replay.push(numbered(0, 500), np.ones(500))
        assert (replay.capacity, len(replay)) == (capacity, capacity)
    with pytest.raises(LabError, match="not one entry"):
        Replay(memory=10).push(numbered(0, 1), np.ones(1))


def test_new_entries_without_a_priority_get_the_highest() -> None:
    replay = Replay(entries=8, alpha=1.0, eps=1e-9)
    replay.push({"x": np.arange(2)}, np.array([7.0, 1.0]))
    replay.push({"x": np.arange(2, 3)})
    assert replay.state_dict()["weights"] == pytest.approx([7, 1, 7])


@pytest.mark.parametrize("backend", ["auto", "numpy"])
def test_a_saved_replay_goes_on_exactly(tmp_path: Path, backend: Any) -> None:
    def go(replay: Replay, rounds: range) -> list[Any]:
        seen = []
        for n in rounds:
            replay.push(numbered(7 * n, 7), np.abs(np.sin(np.arange(7) + n)))
            sample = replay.sample(16)
            replay.update(sample.indices, np.cos(sample.indices + n))
            row = replay.statistics()
            row.pop("replay_sample_time_ms")
            seen.append((sample.indices.tolist(), sample.weights.tolist(), sample.data["number"].tolist(), row))
        return seen

    whole = Replay(entries=50, seed=5, backend=backend)
    first, rest = go(whole, range(12)), go(whole, range(12, 24))
    part = Replay(entries=50, seed=5, backend=backend)
    assert go(part, range(12)) == first
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(part.state_dict(), 1)
    loaded = newest(tmp_path)
    assert loaded is not None
    later = Replay(entries=50, seed=99)  # what was saved without the library goes on with it, and to the same bits
    later.load_state_dict(loaded.state)
    assert go(later, range(12, 24)) == rest


def test_an_empty_replay_can_be_saved_too() -> None:
    one, other = Replay(entries=5, seed=1), Replay(entries=5, seed=2)
    other.push({"x": np.arange(3)})
    other.load_state_dict(one.state_dict())
    assert len(other) == 0
    for replay in (one, other):
        replay.push({"x": np.arange(5)})
    assert one.sample(9).indices.tolist() == other.sample(9).indices.tolist()


def test_a_state_of_other_settings_is_refused() -> None:
    saved = Replay(entries=5).state_dict()
    for other in (Replay(entries=6), Replay(entries=5, alpha=0.5), Replay(entries=5, memory=1000)):
        with pytest.raises(LabError, match="was saved with"):
            other.load_state_dict(saved)


def test_statistics_have_only_what_was_measured() -> None:
    replay = Replay(entries=200, eps=1e-9)
    assert replay.statistics() == {"replay_size": 0, "replay_beta": 0.4}
    replay.push({"x": np.arange(101)}, np.arange(101.0))
    row = replay.statistics()
    assert "replay_sample_time_ms" not in row
    assert row["replay_priority_mean"] == pytest.approx(50)
    assert [row[f"replay_priority_p{share}"] for share in (50, 90, 99)] == pytest.approx([50, 90, 99])
    sample = replay.sample(64)
    row = replay.statistics()
    assert row["replay_last_unique_ratio"] == len(set(sample.indices.tolist())) / 64
    assert row["replay_sample_time_ms"] > 0
    assert "replay_sample_time_ms" not in replay.statistics()
    check(row)


def test_sampling_is_due_at_the_interval_once_there_is_enough() -> None:
    replay = Replay(entries=10, interval=3)
    assert not replay.due(3)
    replay.push({"x": np.arange(5)})
    assert [step for step in range(10) if replay.due(step, batch=5)] == [0, 3, 6, 9]
    assert not replay.due(3, batch=6)


def test_a_sample_can_be_had_as_tensors() -> None:
    replay = Replay(entries=10)
    replay.push(numbered(0, 5), np.ones(5))
    sample = replay.sample(4)
    tensors = sample.tensors()
    assert tensors["seen"].dtype == torch.uint8
    assert tensors["weights"].shape == (4,)


def test_mistakes_are_named() -> None:
    for settings_ in ({}, {"entries": 0}, {"entries": 5, "alpha": 2.0}, {"entries": 5, "eps": 0.0}):
        with pytest.raises(LabError):
            Replay(**settings_)  # type: ignore[arg-type]
    replay = Replay(entries=5)
    with pytest.raises(LabError, match="empty"):
        replay.sample(1)
    replay.push({"x": np.arange(3)}, np.ones(3))
    with pytest.raises(LabError, match="y is not in both"):
        replay.push({"x": np.arange(3), "y": np.arange(3)}, np.ones(3))
    with pytest.raises(LabError, match="float64"):
        replay.push({"x": np.ones(3)}, np.ones(3))
    with pytest.raises(LabError, match="shape"):
        replay.push({"x": np.arange(4)}, np.ones(3))
    with pytest.raises(LabError, match="not finite"):
        replay.push({"x": np.arange(1)}, np.array([np.nan]))
    with pytest.raises(LabError, match="none at 3"):
        replay.update(np.array([3]), np.ones(1))
    assert len(replay) == 3
