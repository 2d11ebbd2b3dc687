"""Returns against hand-computed cases, the definition written out, and a reference."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.rl.returns import targets


def column(*numbers: float) -> Any:
    return np.array(numbers, np.float32)[:, None]


def flags(*marks: int) -> Any:
    return np.array(marks, bool)[:, None]


def test_a_hand_computed_case() -> None:
    # gamma 1/2, lambda 1/2: errors 1 + 2/2 - 1 = 1 and 2 + 4/2 - 2 = 2; the first advantage is 1 + 2/4.
    found = targets(column(1, 2), column(1, 2, 4), flags(0, 0), flags(0, 0), gamma=0.5, lam=0.5)
    assert found.deltas[:, 0].tolist() == [1.5, 2.0]
    assert found.values[:, 0].tolist() == [2.5, 4.0]
    # What the policy gradient of V-trace takes looks one corrected value ahead: 1 + 4/2 - 1, 2 + 4/2 - 2.
    assert found.advantages[:, 0].tolist() == [2.0, 2.0]


def test_a_terminated_episode_is_worth_nothing_beyond_its_end() -> None:
    found = targets(column(1, 0, 5), column(1, 9, 3, 7), flags(1, 0, 0), flags(0, 0, 0), gamma=1.0, lam=1.0)
    assert found.deltas[0, 0] == 0.0
    assert found.advantages[0, 0] == 0.0


def test_a_truncated_episode_is_worth_what_its_last_state_promised() -> None:
    found = targets(column(1, 0, 5), column(1, 9, 3, 7), flags(0, 0, 0), flags(1, 0, 0), gamma=1.0, lam=1.0)
    assert found.deltas[0, 0] == 9.0  # 1 + 9 - 1, and nothing of the episode after it
    assert found.advantages[0, 0] == 9.0


def test_ratios_are_clipped() -> None:
    ratios = column(4.0, 0.25)
    found = targets(column(1, 1), column(0, 0, 0), flags(0, 0), flags(0, 0), gamma=1.0, lam=1.0, ratios=ratios)
    # rho and c are 1 and 1/4: errors 1 and 1/4; the first target is 1 + 1·(1/4).
    assert found.values[:, 0].tolist() == [1.25, 0.25]
    assert found.advantages[:, 0].tolist() == [1.25, 0.25]


def written_out(
    rewards: Any, values: Any, terminated: Any, truncated: Any, gamma: float, lam: float, ratios: Any
) -> Any:
    """V-trace as its paper writes it: a sum over the rest of the episode, for one env."""
    steps = len(rewards)
    rho = np.minimum(ratios, 1.0)
    c = lam * np.minimum(ratios, 1.0)
    out = np.zeros(steps)
    for s in range(steps):
        total, weight = values[s], 1.0
        for t in range(s, steps):
            ahead = 0.0 if terminated[t] else values[t + 1]
            total += weight * rho[t] * (rewards[t] + gamma * ahead - values[t])
            if terminated[t] or truncated[t]:
                break
            weight *= gamma * c[t]
        out[s] = total
    return out


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_targets_are_the_sum_that_the_paper_writes(seed: int, steps: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(steps, 3)), rng.normal(size=(steps + 1, 3))
    terminated, truncated = rng.random((steps, 3)) < 0.2, rng.random((steps, 3)) < 0.2
    ratios = np.exp(rng.normal(size=(steps, 3)))
    found = targets(rewards, values, terminated, truncated, gamma=gamma, lam=lam, ratios=ratios)
    for env in range(3):
        wanted = written_out(
            rewards[:, env], values[:, env], terminated[:, env], truncated[:, env], gamma, lam, ratios[:, env]
        )
        assert found.values[:, env] == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_on_policy_it_is_the_reference_generalised_advantage() -> None:
    from stable_baselines3.common.buffers import RolloutBuffer

    rng = np.random.default_rng(0)
    steps, envs = 16, 4
    rewards, values = rng.normal(size=(steps, envs)), rng.normal(size=(steps + 1, envs))
    terminated = rng.random((steps, envs)) < 0.15
    buffer = RolloutBuffer(
        steps, gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), gae_lambda=0.9, gamma=0.97, n_envs=envs
    )
    begins = np.zeros(envs, bool)
    for t in range(steps):
        zeros = np.zeros((envs, 1), np.float32)
        buffer.add(zeros, zeros, rewards[t], begins, torch.tensor(values[t]), torch.zeros(envs))
        begins = terminated[t]
    buffer.compute_returns_and_advantage(torch.tensor(values[-1]), begins)
    found = targets(rewards, values, terminated, np.zeros_like(terminated), gamma=0.97, lam=0.9)
    assert found.deltas == pytest.approx(buffer.advantages, abs=1e-5)
    assert found.values == pytest.approx(buffer.returns, abs=1e-5)
