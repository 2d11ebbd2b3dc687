"""Gymnasium interfaces of the ponds. Frozen, like fish_env.py.

`SchoolEnv` is one pond as a VectorEnv: one row per fish. `FishEnv` is one fish of a pond as an Env, for libraries such
as stable-baselines3. A trainer that uses `FishSchool` directly is many times faster than with either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

if TYPE_CHECKING:
    from looplab.recipes.fish.evaluate import Act
    from looplab.recipes.fish.fish_env import KEEP, NUM_ACTIONS, OBS_DIM, FishSchool, Flags, Floats, Ints, Reward
else:
    from evaluate import Act
    from fish_env import KEEP, NUM_ACTIONS, OBS_DIM, FishSchool, Flags, Floats, Ints, Reward

OBSERVATION_SPACE = gym.spaces.Box(-2.0, 2.0, (OBS_DIM,), np.float32)
ACTION_SPACE = gym.spaces.Discrete(NUM_ACTIONS)
MAX_SEED = 2**31


class SchoolEnv(VectorEnv[Floats, Ints, Flags]):
    """One pond of `num_fish` fish, without autoreset: call `reset` when all fish have terminated.

    A dead fish is terminated in every later step, with reward and observation 0; `info["acted"]` marks the rows that
    are transitions.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}  # noqa: RUF012 (so in gymnasium)

    def __init__(self, num_fish: int = 25, reward: Reward | None = None) -> None:
        self.num_envs = num_fish
        self.single_observation_space, self.single_action_space = OBSERVATION_SPACE, ACTION_SPACE
        self.observation_space = batch_space(OBSERVATION_SPACE, num_fish)
        self.action_space = batch_space(ACTION_SPACE, num_fish)
        self._reward = reward
        self._school = FishSchool(1, num_fish, 0, reward, restart=False)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        if isinstance(seed, list):
            raise ValueError("all fish share one pond and one seed: pass a single int")
        super().reset(seed=seed)
        pond_seed = seed if seed is not None else int(self.np_random.integers(MAX_SEED))
        self._school = FishSchool(1, self.num_envs, pond_seed, self._reward, restart=False)
        return self._school.observe()[0], {"acted": np.ones(self.num_envs, np.bool_)}

    def step(self, actions: Ints) -> tuple[Floats, Floats, Flags, Flags, dict[str, Any]]:  # type: ignore[override]
        step = self._school.step(np.asarray(actions)[None])
        alive = self._school.alive[0]
        return step.obs[0], step.rewards[0], ~alive, alive & step.dones[0], {"acted": step.acted[0]}


class FishEnv(gym.Env[Floats, np.int64]):
    """One fish, the first of a pond. The policy `others` controls the other fish; without it they keep swimming."""

    metadata = {"render_modes": []}  # noqa: RUF012 (so in gymnasium)

    def __init__(self, num_fish: int = 1, others: Act | None = None, reward: Reward | None = None) -> None:
        self.observation_space, self.action_space = OBSERVATION_SPACE, ACTION_SPACE
        self._num_fish, self._others, self._reward = num_fish, others, reward
        self._school = FishSchool(1, num_fish, 0, reward, restart=False)
        self._obs = self._school.observe()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        pond_seed = seed if seed is not None else int(self.np_random.integers(MAX_SEED))
        self._school = FishSchool(1, self._num_fish, pond_seed, self._reward, restart=False)
        self._obs = self._school.observe()
        return self._obs[0, 0], {}

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        actions: npt.NDArray[np.int64] = np.full((1, self._num_fish), KEEP, np.int64)
        if self._others is not None and self._num_fish > 1:
            actions[:] = self._others(self._obs)
        actions[0, 0] = action
        step = self._school.step(actions)
        self._obs = step.obs
        died = bool(step.died[0, 0])
        return self._obs[0, 0], float(step.rewards[0, 0]), died, bool(step.dones[0]) and not died, {}
