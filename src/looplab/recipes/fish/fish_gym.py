"""The ponds behind gymnasium's interfaces, for learners that expect one. Frozen, like the ponds themselves.

`SchoolEnv` is one pond as gymnasium's VectorEnv: a row for each fish, with its own action, observation, reward and end.
`FishEnv` is one fish of a pond as a plain Env, for stable-baselines3 and the like. A trainer that knows `FishSchool`
itself is many times faster than with either.
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
    from looplab.recipes.fish.fish_env import ACTIONS, KEEP, OBSERVATIONS, FishSchool, Flags, Floats, Ints, Reward
else:
    from evaluate import Act
    from fish_env import ACTIONS, KEEP, OBSERVATIONS, FishSchool, Flags, Floats, Ints, Reward

SEES = gym.spaces.Box(-2.0, 2.0, (OBSERVATIONS,), np.float32)
DOES = gym.spaces.Discrete(ACTIONS)
MOST_SEED = 2**31


class SchoolEnv(VectorEnv[Floats, Ints, Flags]):
    """One pond of `num_fish` fish. It does not restart by itself: call `reset` when all have ended.

    A dead fish is terminated in every step that follows, with a reward and an observation of 0; `info["acted"]` says
    which rows are transitions.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}  # noqa: RUF012 (so in gymnasium)

    def __init__(self, num_fish: int = 25, reward: Reward | None = None) -> None:
        self.num_envs = num_fish
        self.single_observation_space, self.single_action_space = SEES, DOES
        self.observation_space = batch_space(SEES, num_fish)
        self.action_space = batch_space(DOES, num_fish)
        self._reward = reward
        self._school = FishSchool(1, num_fish, 0, reward, restart=False)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        if isinstance(seed, list):
            raise ValueError("the fish share one pond, and so one seed: give a single number")
        super().reset(seed=seed)
        chosen = seed if seed is not None else int(self.np_random.integers(MOST_SEED))
        self._school = FishSchool(1, self.num_envs, chosen, self._reward, restart=False)
        return self._school.observe()[0], {"acted": np.ones(self.num_envs, np.bool_)}

    def step(self, actions: Ints) -> tuple[Floats, Floats, Flags, Flags, dict[str, Any]]:  # type: ignore[override]
        step = self._school.step(np.asarray(actions)[None])
        alive = self._school.alive[0]
        return step.observations[0], step.rewards[0], ~alive, alive & step.over[0], {"acted": step.acted[0]}


class FishEnv(gym.Env[Floats, np.int64]):
    """One fish: the first of a pond. The others, if there are any, do what `others` says; without it they swim on."""

    metadata = {"render_modes": []}  # noqa: RUF012 (so in gymnasium)

    def __init__(self, num_fish: int = 1, others: Act | None = None, reward: Reward | None = None) -> None:
        self.observation_space, self.action_space = SEES, DOES
        self._num_fish, self._others, self._reward = num_fish, others, reward
        self._school = FishSchool(1, num_fish, 0, reward, restart=False)
        self._seen = self._school.observe()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = seed if seed is not None else int(self.np_random.integers(MOST_SEED))
        self._school = FishSchool(1, self._num_fish, chosen, self._reward, restart=False)
        self._seen = self._school.observe()
        return self._seen[0, 0], {}

    def step(self, action: np.int64) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        actions: npt.NDArray[np.int64] = np.full((1, self._num_fish), KEEP, np.int64)
        if self._others is not None and self._num_fish > 1:
            actions[:] = self._others(self._seen)
        actions[0, 0] = action
        step = self._school.step(actions)
        self._seen = step.observations
        died = bool(step.died[0, 0])
        return self._seen[0, 0], float(step.rewards[0, 0]), died, bool(step.over[0]) and not died, {}
