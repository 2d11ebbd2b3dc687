"""Episode statistics: returns, lengths, and the metrics that are computed from infos."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from looplab.rl.episode_stats import EpisodeStats
from looplab.rl.metrics import SCHEMA, MetricField

FIELDS = (
    *SCHEMA,
    MetricField("height_sum", "float", "m", "Sum.", info="height", reduce="sum"),
    MetricField("height_count", "int", "", "Count.", info="height", reduce="count"),
    MetricField("height_mean", "float", "m", "Mean.", info="height", reduce="mean"),
    MetricField("height_max", "float", "m", "Maximum.", info="height", reduce="max"),
    MetricField("height_last", "float", "m", "Last.", info="height"),
    MetricField("episode_max_height", "float", "m", "Mean maximum.", info="height", reduce="episode_max"),
)


def add(stats: EpisodeStats, heights: list[float | None], ended: list[int], valid: list[int] | None = None) -> None:
    """Add a step of two envs with a reward of 1; None is a missing info."""
    known = np.array([height is not None for height in heights])
    infos = {"height": np.array([height or 0.0 for height in heights]), "_height": known} if known.any() else {}
    valid = [1, 1] if valid is None else valid
    stats.add(np.array(valid, float), np.array(ended, bool), np.zeros(2, bool), np.array(valid, bool), infos)


def test_every_reduction_covers_the_steps_since_the_last_row() -> None:
    stats = EpisodeStats(2, FIELDS)
    add(stats, [-3.0, -5.0], [0, 0])
    add(stats, [-4.0, None], [1, 0])
    add(stats, [9.0, -7.0], [0, 1], valid=[0, 1])  # the first env only resets: its info does not count
    assert stats.pop_row() == {
        "height_sum": -19.0, "height_count": 4.0, "height_mean": -4.75, "height_max": -3.0, "height_last": -7.0,
        "episode_max_height": -4.0, "episodes": 2.0, "episode_return_mean": 2.5, "episode_return_max": 3.0,
        "episode_length_mean": 2.5,
    }  # fmt: skip
    assert stats.pop_row() == {}


def test_what_was_not_measured_is_missing_and_never_0() -> None:
    stats = EpisodeStats(2, FIELDS)
    add(stats, [None, None], [1, 0])
    assert stats.pop_row().keys() == {"episodes", "episode_return_mean", "episode_return_max", "episode_length_mean"}


def test_a_lost_worker_is_counted_by_its_reason() -> None:
    stats = EpisodeStats(2)
    infos = {"worker_restarted": np.array(["killed", None], object), "_worker_restarted": np.array([True, False])}
    stats.add(np.zeros(2), np.zeros(2, bool), np.array([True, False]), np.ones(2, bool), infos)
    assert stats.pop_row()["env_restarts"] == 1.0


def test_a_saved_state_continues() -> None:
    one, other = EpisodeStats(2, FIELDS), EpisodeStats(2, FIELDS)
    add(one, [1.0, 2.0], [1, 0])
    other.load_state_dict(one.state_dict())
    for stats in (one, other):
        add(stats, [3.0, 4.0], [0, 1])
    assert other.pop_row() == one.pop_row()


def test_a_state_of_an_older_version_loads() -> None:
    old: dict[str, Any] = {
        "returns": np.array([0.0, 2.0]), "lengths": np.array([0, 2]), "furthest": np.array([0.0, 40.0]),
        "sums": {"height_sum": 7.0}, "last": {"height_last": 3.0}, "ended": [[5.0, 4, 30.0]], "steps": 6,
        "x": [100.0, 40.0, 4],
    }  # fmt: skip
    stats = EpisodeStats(2, FIELDS)
    stats.load_state_dict(old)
    add(stats, [None, None], [0, 1])
    row = stats.pop_row()
    assert (row["height_sum"], row["height_last"], row["height_max"], row["height_mean"]) == (7.0, 3.0, 40.0, 25.0)
    assert row["episode_max_height"] == pytest.approx((30 + 40) / 2)
    assert (row["episode_return_mean"], row["episode_length_mean"]) == (4.0, 3.5)
