"""The prioritized replay: what it samples, what it stores, and that it resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.rl.metrics import check_row
from looplab.rl.replay import TREE_BYTES, PrioritizedReplay
from looplab.trainkit.checkpoint import Checkpoints, newest


def numbered(first: int, count: int) -> dict[str, Any]:
    """Return entries that contain their own number in every field."""
    number = np.arange(first, first + count)
    return {
        "obs": np.repeat(number[:, None] % 256, 6, axis=1).astype(np.uint8).reshape(count, 2, 3),
        "number": number,
        "rewards": (number % 1000).astype(np.float32),
        "terminated": number % 2 == 0,
        "hidden_state": np.zeros((count, 0), np.float32),
        "place": number[:, None] + np.array([[0.25, 0.5]]),
    }


def test_sampling_probabilities_follow_priority_to_the_power_of_alpha() -> None:
    priorities = np.array([0.1, 1.0, 2.0, 5.0, 30.0])
    alpha = 0.7
    replay = PrioritizedReplay(entries=8, alpha=alpha, eps=1e-9, seed=3)
    replay.push({"x": np.arange(5)}, priorities)
    expected = priorities**alpha / (priorities**alpha).sum()
    draws = 40_000
    singles = np.concatenate([replay.sample(1).indices for _ in range(4_000)])
    batches = np.concatenate([replay.sample(400).indices for _ in range(draws // 400)])
    for drawn in (singles, batches):
        counts = np.bincount(drawn, minlength=5)
        chi = ((counts - len(drawn) * expected) ** 2 / (len(drawn) * expected)).sum()
        assert chi < 18.47  # the 0.999 quantile of chi-squared with 4 degrees of freedom


def test_every_stratum_is_sampled_once() -> None:
    replay = PrioritizedReplay(entries=64, alpha=0.0)
    replay.push({"x": np.arange(64)}, np.ones(64))
    assert replay.sample(64).indices.tolist() == list(range(64))  # equal priorities: each entry is one stratum


def test_importance_sampling_weights_correct_for_the_priorities() -> None:
    replay = PrioritizedReplay(entries=8, alpha=1.0, beta=1.0, eps=1e-12)
    replay.push({"x": np.arange(4)}, np.array([1.0, 2.0, 3.0, 4.0]))
    sample = replay.sample(1000)
    probability = np.array([1.0, 2.0, 3.0, 4.0])[sample.indices] / 10
    expected = (4 * probability) ** -1.0
    assert sample.weights == pytest.approx(expected / expected.max(), rel=1e-5)
    assert sample.weights.dtype == np.float32


def test_beta_is_annealed_over_the_sampled_entries() -> None:
    replay = PrioritizedReplay(entries=8, beta=0.4, beta_final=1.0, beta_entries=100)
    replay.push({"x": np.arange(4)})
    results = [replay.beta]
    for _ in range(3):
        replay.sample(50)
        results.append(replay.beta)
    assert results == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_updated_priorities_change_what_is_sampled() -> None:
    replay = PrioritizedReplay(entries=8, alpha=1.0)
    replay.push({"x": np.arange(8)}, np.ones(8))
    replay.update_priorities(np.arange(8), np.array([0, 0, 0, -1e6, 0, 0, 0, 0], np.float32))
    assert set(replay.sample(1000).data["x"].tolist()) == {3}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_the_newest_entries_are_kept_and_the_fields_stay_together(pushes: list[int], capacity: int) -> None:
    replay = PrioritizedReplay(entries=capacity)
    pushed = 0
    for count in pushes:
        replay.push(numbered(pushed, count), np.ones(count))
        pushed += count
    assert len(replay) == min(pushed, capacity)
    if not pushed:
        return
    data = replay.sample(200).data
    assert set(data["number"].tolist()) <= set(range(max(0, pushed - capacity), pushed))
    expected = numbered(0, pushed)
    for name, values in data.items():
        assert np.array_equal(values, expected[name][data["number"]].astype(values.dtype))


def test_float_fields_are_stored_as_float16_and_returned_as_float32() -> None:
    replay = PrioritizedReplay(entries=10, float16_fields=["place"], float32_fields=["values"])
    replay.push({**numbered(0, 4), "values": np.full(4, 1 / 3)}, np.ones(4))
    stored = {name: str(values.dtype) for name, values in replay.state_dict()["fields"].items()}
    assert stored == {"obs": "uint8", "number": "int64", "rewards": "float16", "terminated": "bool",
                    "hidden_state": "float32", "place": "float16", "values": "float32"}  # fmt: skip
    returned = {name: str(values.dtype) for name, values in replay.sample(3).data.items()}
    assert returned == stored | {"rewards": "float32", "place": "float32"}


def test_a_value_out_of_range_of_float16_widens_its_field() -> None:
    replay = PrioritizedReplay(entries=4)
    replay.push({"rewards": np.array([1.5, 2.5])}, np.ones(2))
    replay.push({"rewards": np.array([1e6])}, np.ones(1))
    assert set(replay.sample(300).data["rewards"].tolist()) == {1.5, 2.5, 1e6}
    twin = PrioritizedReplay(entries=4)
    twin.load_state_dict(replay.state_dict())
    assert set(twin.sample(300).data["rewards"].tolist()) == {1.5, 2.5, 1e6}


def test_whole_rollouts_can_be_pushed() -> None:
    replay = PrioritizedReplay(entries=100)
    number = np.arange(12).reshape(4, 3)
    replay.push({"number": number, "obs": np.stack([number, number], -1)}, np.ones((4, 3)))
    assert len(replay) == 12
    data = replay.sample(50).data
    assert data["obs"].shape == (50, 2)
    assert np.array_equal(data["obs"][:, 0], data["number"])


def test_the_capacity_follows_from_max_bytes() -> None:
    entry = 6 + 8 + 2 + 1 + 0 + 8 + TREE_BYTES
    for replay, capacity in (
        (PrioritizedReplay(max_bytes=100 * entry), 100),
        (PrioritizedReplay(entries=40, max_bytes=100 * entry), 40),
        (PrioritizedReplay(entries=400, max_bytes=100 * entry), 100),
    ):
        replay.push(numbered(0, 500), np.ones(500))
        assert (replay.capacity, len(replay)) == (capacity, capacity)
    with pytest.raises(LabError, match="too small for one entry"):
        PrioritizedReplay(max_bytes=10).push(numbered(0, 1), np.ones(1))


def test_entries_without_a_priority_get_the_highest() -> None:
    replay = PrioritizedReplay(entries=8, alpha=1.0, eps=1e-9)
    replay.push({"x": np.arange(2)}, np.array([7.0, 1.0]))
    replay.push({"x": np.arange(2, 3)})
    assert replay.state_dict()["weights"] == pytest.approx([7, 1, 7])


@pytest.mark.parametrize("backend", ["auto", "numpy"])
def test_a_saved_replay_continues_exactly(tmp_path: Path, backend: Any) -> None:
    def advance(replay: PrioritizedReplay, rounds: range) -> list[Any]:
        results = []
        for n in rounds:
            replay.push(numbered(7 * n, 7), np.abs(np.sin(np.arange(7) + n)))
            sample = replay.sample(16)
            replay.update_priorities(sample.indices, np.cos(sample.indices + n))
            row = replay.statistics()
            row.pop("replay_sample_time_ms")
            results.append((sample.indices.tolist(), sample.weights.tolist(), sample.data["number"].tolist(), row))
        return results

    whole = PrioritizedReplay(entries=50, seed=5, backend=backend)
    first, rest = advance(whole, range(12)), advance(whole, range(12, 24))
    part = PrioritizedReplay(entries=50, seed=5, backend=backend)
    assert advance(part, range(12)) == first
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(part.state_dict(), 1)
    loaded = newest(tmp_path)
    assert loaded is not None
    later = PrioritizedReplay(entries=50, seed=99)  # a state saved by NumPy continues with the C library, to the bit
    later.load_state_dict(loaded.state)
    assert advance(later, range(12, 24)) == rest


def test_an_empty_replay_can_be_saved() -> None:
    one, other = PrioritizedReplay(entries=5, seed=1), PrioritizedReplay(entries=5, seed=2)
    other.push({"x": np.arange(3)})
    other.load_state_dict(one.state_dict())
    assert len(other) == 0
    for replay in (one, other):
        replay.push({"x": np.arange(5)})
    assert one.sample(9).indices.tolist() == other.sample(9).indices.tolist()


def test_a_state_with_other_settings_is_refused() -> None:
    saved = PrioritizedReplay(entries=5).state_dict()
    for other in (
        PrioritizedReplay(entries=6),
        PrioritizedReplay(entries=5, alpha=0.5),
        PrioritizedReplay(entries=5, max_bytes=1000),
    ):
        with pytest.raises(LabError, match="was saved with"):
            other.load_state_dict(saved)


def test_statistics_contain_only_what_was_measured() -> None:
    replay = PrioritizedReplay(entries=200, eps=1e-9)
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
    check_row(row)


def test_errors_name_the_cause() -> None:
    for settings_ in ({}, {"entries": 0}, {"entries": 5, "alpha": 2.0}, {"entries": 5, "eps": 0.0}):
        with pytest.raises(LabError):
            PrioritizedReplay(**settings_)  # type: ignore[arg-type]
    replay = PrioritizedReplay(entries=5)
    with pytest.raises(LabError, match="empty"):
        replay.sample(1)
    replay.push({"x": np.arange(3)}, np.ones(3))
    with pytest.raises(LabError, match="these differ: y"):
        replay.push({"x": np.arange(3), "y": np.arange(3)}, np.ones(3))
    with pytest.raises(LabError, match="float64"):
        replay.push({"x": np.ones(3)}, np.ones(3))
    with pytest.raises(LabError, match="shape"):
        replay.push({"x": np.arange(4)}, np.ones(3))
    with pytest.raises(LabError, match="not finite"):
        replay.push({"x": np.arange(1)}, np.array([np.nan]))
    with pytest.raises(LabError, match="index 3 is out of range"):
        replay.update_priorities(np.array([3]), np.ones(1))
    assert len(replay) == 3


def test_a_state_with_older_names_loads() -> None:
    names = ("obs", "next_obs", "log_probs", "hidden_state", "next_hidden_state")
    old_names = ("seen", "next_seen", "logs", "memory", "next_memory")
    replay, resumed = (PrioritizedReplay(entries=4, seed=seed) for seed in (0, 1))
    replay.push({name: np.arange(3.0) for name in names})
    state = replay.state_dict()
    old = {name: value for name, value in state.items() if name not in ("rng", "settings", "fields")}
    old["chance"] = state["rng"]
    old["settings"] = {"entries": 4, "memory": None, "alpha": replay.alpha}
    old["fields"] = {old_names[names.index(name)]: values for name, values in state["fields"].items()}
    resumed.load_state_dict(old)
    for one in (replay, resumed):
        one.push({name: np.arange(3.0) for name in names})
    assert replay.sample(9).indices.tolist() == resumed.sample(9).indices.tolist()
