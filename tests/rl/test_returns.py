"""Returns and advantages against hand-computed cases, the definition, and a reference implementation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.rl.returns import compute_targets


def column(*numbers: float) -> Any:
    return np.array(numbers, np.float32)[:, None]


def flags(*bits: int) -> Any:
    return np.array(bits, bool)[:, None]


def test_a_hand_computed_case() -> None:
    # gamma 1/2, lambda 1/2: TD errors 1 + 2/2 - 1 = 1 and 2 + 4/2 - 2 = 2; the first advantage is 1 + 2/4.
    targets = compute_targets(column(1, 2), column(1, 2, 4), flags(0, 0), flags(0, 0), gamma=0.5, lam=0.5)
    assert targets.advantages[:, 0].tolist() == [1.5, 2.0]
    assert targets.returns[:, 0].tolist() == [2.5, 4.0]
    # What the policy gradient of V-trace takes looks one corrected value next_value: 1 + 4/2 - 1, 2 + 4/2 - 2.
    assert targets.pg_advantages[:, 0].tolist() == [2.0, 2.0]


def test_a_terminated_episode_is_not_bootstrapped() -> None:
    targets = compute_targets(column(1, 0, 5), column(1, 9, 3, 7), flags(1, 0, 0), flags(0, 0, 0), gamma=1.0, lam=1.0)
    assert targets.advantages[0, 0] == 0.0
    assert targets.pg_advantages[0, 0] == 0.0


def test_a_truncated_episode_bootstraps_from_the_value_of_its_final_observation() -> None:
    targets = compute_targets(column(1, 0, 5), column(1, 9, 3, 7), flags(0, 0, 0), flags(1, 0, 0), gamma=1.0, lam=1.0)
    assert targets.advantages[0, 0] == 9.0  # 1 + 9 - 1, and nothing from the next episode
    assert targets.pg_advantages[0, 0] == 9.0


def test_ratios_are_clipped() -> None:
    ratios = column(4.0, 0.25)
    targets = compute_targets(
        column(1, 1), column(0, 0, 0), flags(0, 0), flags(0, 0), gamma=1.0, lam=1.0, ratios=ratios
    )
    # rho and c are 1 and 1/4: TD errors 1 and 1/4; the first return is 1 + 1·(1/4).
    assert targets.returns[:, 0].tolist() == [1.25, 0.25]
    assert targets.pg_advantages[:, 0].tolist() == [1.25, 0.25]


def vtrace_definition(
    rewards: Any, values: Any, terminated: Any, truncated: Any, gamma: float, lam: float, ratios: Any
) -> Any:
    """V-trace as defined in the paper: a sum over the rest of the episode, for one env."""
    steps = len(rewards)
    rho = np.minimum(ratios, 1.0)
    c = lam * np.minimum(ratios, 1.0)
    out = np.zeros(steps)
    for s in range(steps):
        total, weight = values[s], 1.0
        for t in range(s, steps):
            next_value = 0.0 if terminated[t] else values[t + 1]
            total += weight * rho[t] * (rewards[t] + gamma * next_value - values[t])
            if terminated[t] or truncated[t]:
                break
            weight *= gamma * c[t]
        out[s] = total
    return out


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_returns_match_the_definition_of_the_paper(seed: int, steps: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(steps, 3)), rng.normal(size=(steps + 1, 3))
    terminated, truncated = rng.random((steps, 3)) < 0.2, rng.random((steps, 3)) < 0.2
    ratios = np.exp(rng.normal(size=(steps, 3)))
    targets = compute_targets(rewards, values, terminated, truncated, gamma=gamma, lam=lam, ratios=ratios)
    for env in range(3):
        expected = vtrace_definition(
            rewards[:, env], values[:, env], terminated[:, env], truncated[:, env], gamma, lam, ratios[:, env]
        )
        assert targets.returns[:, env] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_on_policy_targets_match_the_gae_of_stable_baselines3() -> None:
    from stable_baselines3.common.buffers import RolloutBuffer

    rng = np.random.default_rng(0)
    steps, envs = 16, 4
    rewards, values = rng.normal(size=(steps, envs)), rng.normal(size=(steps + 1, envs))
    terminated = rng.random((steps, envs)) < 0.15
    buffer = RolloutBuffer(
        steps, gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), gae_lambda=0.9, gamma=0.97, n_envs=envs
    )
    episode_starts = np.zeros(envs, bool)
    for t in range(steps):
        zeros = np.zeros((envs, 1), np.float32)
        buffer.add(zeros, zeros, rewards[t], episode_starts, torch.tensor(values[t]), torch.zeros(envs))
        episode_starts = terminated[t]
    buffer.compute_returns_and_advantage(torch.tensor(values[-1]), episode_starts)
    targets = compute_targets(rewards, values, terminated, np.zeros_like(terminated), gamma=0.97, lam=0.9)
    assert targets.advantages == pytest.approx(buffer.advantages, abs=1e-5)
    assert targets.returns == pytest.approx(buffer.returns, abs=1e-5)
