"""Finding the action that moves forward."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from looplab.errors import LabError
from looplab.recipes.mario.mario.forward import probe_forward


class Line(gym.Env[Any, Any]):
    """Action n moves by n − 2; an episode ends beyond x = 50."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(5)
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.x = 40
        return np.zeros(1, np.float32), {"x_pos": self.x}

    def step(self, action: Any) -> Any:
        self.x += int(action) - 2
        return np.zeros(1, np.float32), 0.0, self.x > 50, False, {"x_pos": self.x}

    def close(self) -> None:
        Line.closed += 1


def test_the_action_that_moves_furthest_is_found() -> None:
    probe = probe_forward(Line, range(5), steps=4)
    assert probe.best_action == 4
    assert probe.distances == {0: -8, 1: -4, 2: 0, 3: 4, 4: 8}
    assert probe_forward(Line, [3, 4], steps=100).distances == {3: 11, 4: 12}  # the episode ends early
    assert Line.closed == 2


def test_an_env_without_a_position_is_refused() -> None:
    with pytest.raises(LabError, match="no x_pos"):
        probe_forward(lambda: gym.make("CartPole-v1"), [0, 1], steps=3)
