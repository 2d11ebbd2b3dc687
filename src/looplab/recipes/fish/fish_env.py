"""A vectorized environment in plain numpy: a predator and a school of fish in each of many round ponds.

Frozen: versions must not change this file.

Every fish has its own action, observation, reward and termination; one policy may control all of them, but not with a
single action. A dead fish stays where it died and yields no more transitions; `FishStep.acted` marks the valid entries.
An episode of a pond ends after 500 steps, or when all its fish are dead. The pond is then reset (unless `restart` is
off).

The predator is heavy: it accelerates towards the nearest living fish, and bounces off the wall. It is faster than a
fish on a straight line; fish turn better. Only the initial state is random: it is a function of the pond's seed, which
is `seed` plus its index, and of the episode number. So pond 5 of a hundred is identical, step by step, to a single pond
with that seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

RADIUS = 10.0
"""Radius of the pond."""
DT = 0.1
"""Seconds per step."""
STEPS = 500
"""Maximum length of an episode."""
VISION = RADIUS / 3
"""Distance up to which a fish sees the predator and other fish, in all directions."""
KILL = 0.7
"""Fish closer to the predator than this die."""

FISH_SPEED = 2.0
"""Maximum speed of a fish, per second."""
SPEED_CHANGE = 0.5
"""Change of the speed per action."""
TURN = np.pi / 6
"""Change of the heading per action, in radians."""
KEEP, LEFT, RIGHT, SPEED_UP, SLOW_DOWN = range(5)
NUM_ACTIONS = 5

PULL = 0.5
"""Acceleration of the predator towards the nearest living fish."""
PREDATOR_START = 1.5
PREDATOR_SPEED = 4.0
"""Initial and maximum speed of the predator."""
BOUNCE = 0.85
"""Fraction of its speed that the predator keeps when it bounces off the wall."""
START_GAP = 2.0
"""Minimum initial distance of a fish from the predator."""

OWN, NEIGHBOURS = 11, 7
"""Features about the fish itself, the wall, the predator and the time; features about other fish."""
OBS_DIM = OWN + NEIGHBOURS

STATE = ("episode", "clock", "position", "heading", "speed", "alive", "death_step", "predator", "velocity")
"""The arrays that make up the state."""

_COS = np.array([1, np.cos(TURN), np.cos(TURN), 1, 1], np.float32)
_SIN = np.array([0, np.sin(TURN), -np.sin(TURN), 0, 0], np.float32)
_SPEED_CHANGE = np.array([0, 0, 0, SPEED_CHANGE, -SPEED_CHANGE], np.float32)


@dataclass(frozen=True)
class Reward:
    """Reward of a living fish per step: 0.1 * (2 + 5 * distance - wall - density + divergence), minus `death`.

    The distance is that to the predator in units of VISION, at most 1. Trainers may change the weights; the evaluation
    uses the defaults.
    """

    death: float = 50.0
    """Penalty for being killed, not scaled by 0.1."""
    wall: float = 2.0
    """Penalty at the wall; falls linearly to 0 at a distance of 1."""
    density: float = 0.0
    """Penalty per fraction of the school in sight above `density_target`."""
    density_target: float = 0.3
    """Fraction of the other fish that may be in sight without penalty."""
    divergence: float = 0.0
    """Bonus for swimming in the opposite direction of the fish in sight; half of it for perpendicular."""


@dataclass(frozen=True)
class FishStep:
    """Result of a step; one row per pond, one column per fish."""

    obs: Floats
    """Next observations (ponds, fish, 18), after the reset where an episode ended; 0 for dead fish."""
    rewards: Floats
    """0 for fish that were already dead."""
    acted: Flags
    """Alive before the step; only these entries are transitions."""
    died: Flags
    """Killed in this step."""
    dones: Flags
    """Episode ended with this step; one entry per pond."""


@dataclass(frozen=True)
class _Surroundings:
    """What each fish senses."""

    predator_distance: Floats
    wall_distance: Floats
    neighbours: Floats
    """Number of fish in sight."""
    centre: Floats
    """Offset to their centre (2, ponds, fish); 0 if there are none, like the next two."""
    mean_heading: Floats
    nearest: Floats
    """Offset to the nearest of them."""


class FishSchool:
    """`num_envs` ponds with a predator and `num_fish` fish each."""

    def __init__(
        self, num_envs: int, num_fish: int = 25, seed: int = 0, reward: Reward | None = None, restart: bool = True
    ) -> None:
        if num_envs < 1 or num_fish < 1:
            raise ValueError(f"num_envs and num_fish must be at least 1, not {num_envs} and {num_fish}")
        self.num_envs, self.num_fish, self.seed, self.restart = num_envs, num_fish, seed, restart
        self.reward = reward or Reward()
        shape = (num_envs, num_fish)
        self.episode: Ints = np.zeros(num_envs, np.int64)
        self.clock: Ints = np.zeros(num_envs, np.int64)
        self.position: Floats = np.zeros((2, *shape), np.float32)
        self.heading: Floats = np.zeros((2, *shape), np.float32)
        self.speed: Floats = np.zeros(shape, np.float32)
        self.alive: Flags = np.zeros(shape, np.bool_)
        self.death_step: Ints = np.zeros(shape, np.int64)
        """Step at which each fish died; 500 for survivors."""
        self.predator: Floats = np.zeros((2, num_envs), np.float32)
        self.velocity: Floats = np.zeros((2, num_envs), np.float32)
        """Velocity of the predator."""
        self._ponds = np.arange(num_envs)
        self._others = ~np.eye(num_fish, dtype=np.bool_)
        self._reset(np.ones(num_envs, np.bool_))

    def step(self, actions: npt.NDArray[np.integer]) -> FishStep:
        """Simulate `DT` seconds; one action per fish (ponds, fish), ignored for dead fish."""
        if actions.shape != self.alive.shape:
            raise ValueError(f"the actions must have the shape {self.alive.shape}, one per fish, not {actions.shape}")
        acted = self.alive.copy()
        self._move_fish(actions, acted)
        self._move_predator(acted)
        self.clock += 1
        died = acted & (_norm(self.position - self.predator[:, :, None]) < KILL)
        self.alive &= ~died
        self.death_step = np.where(died, self.clock[:, None], self.death_step)
        surroundings = self._sense()
        rewards = np.where(acted, self._rewards(surroundings, died), np.float32(0.0))
        dones = (self.clock >= STEPS) | ~self.alive.any(axis=1)
        if self.restart and dones.any():
            self._reset(dones)
            surroundings = self._sense()
        return FishStep(obs=self._observe(surroundings), rewards=rewards, acted=acted, died=died, dones=dones)

    def observe(self) -> Floats:
        """Return the observations (ponds, fish, 18): in each fish's own frame, scaled to about -1 … 1."""
        return self._observe(self._sense())

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state; arrays are not copied."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            expected, actual = getattr(self, name).shape, state[name].shape
            if actual != expected:
                raise ValueError(f"{name} has the shape {actual}, expected {expected}")
        for name in STATE:
            setattr(self, name, np.array(state[name]))

    def _move_fish(self, actions: npt.NDArray[np.integer], acted: Flags) -> None:
        turn_cos, turn_sin = _COS[actions], _SIN[actions]
        x, y = self.heading
        turned = np.stack([x * turn_cos - y * turn_sin, x * turn_sin + y * turn_cos])
        turned /= _norm(turned)  # keeps rounding errors from growing
        self.heading = np.where(acted, turned, self.heading)
        self.speed = np.where(acted, np.clip(self.speed + _SPEED_CHANGE[actions], 0.0, FISH_SPEED), 0.0).astype(
            np.float32
        )
        self.position += self.heading * self.speed * np.float32(DT)
        self.position /= np.maximum(_norm(self.position) / np.float32(RADIUS), 1.0)  # the wall stops them

    def _move_predator(self, acted: Flags) -> None:
        offset = self.position - self.predator[:, :, None]
        distance = np.where(acted, _norm(offset), np.float32(np.inf))
        prey = distance.argmin(axis=1)
        prey_distance = distance[self._ponds, prey]
        pull = np.where(np.isfinite(prey_distance), np.float32(PULL * DT) / np.maximum(prey_distance, 1e-6), 0.0)
        self.velocity += offset[:, self._ponds, prey] * pull.astype(np.float32)
        self.velocity /= np.maximum(_norm(self.velocity) / np.float32(PREDATOR_SPEED), 1.0)
        self.predator += self.velocity * np.float32(DT)
        radius = _norm(self.predator)
        beyond = radius > RADIUS
        if beyond.any():
            normal = self.predator / np.maximum(radius, 1e-6)
            outward_speed = (self.velocity * normal).sum(axis=0)
            bounced = (self.velocity - 2 * np.maximum(outward_speed, 0.0) * normal) * np.float32(BOUNCE)
            self.velocity = np.where(beyond, bounced, self.velocity)
            self.predator = np.where(beyond, normal * np.float32(RADIUS), self.predator)

    def _sense(self) -> _Surroundings:
        predator_distance = _norm(self.position - self.predator[:, :, None])
        wall_distance = np.float32(RADIUS) - _norm(self.position)
        if self.num_fish == 1:
            zeros = np.zeros_like(self.position)
            return _Surroundings(
                predator_distance=predator_distance, wall_distance=wall_distance, neighbours=zeros[0],
                centre=zeros, mean_heading=zeros, nearest=zeros,
            )  # fmt: skip
        offset = self.position[:, :, None, :] - self.position[:, :, :, None]
        distance = np.where(self._others & self.alive[:, None, :], _norm(offset), np.float32(np.inf))
        visible = distance < VISION
        count = visible.sum(axis=2).astype(np.float32)
        at_least_one: Floats = np.maximum(count, np.float32(1.0))
        weights = visible.astype(np.float32) / at_least_one[:, :, None]
        closest = distance.argmin(axis=2)[None, :, :, None]
        nearest = np.take_along_axis(offset, closest, axis=3)[..., 0] * (count > 0)
        return _Surroundings(
            predator_distance=predator_distance,
            wall_distance=wall_distance,
            neighbours=count,
            centre=(offset * weights).sum(axis=3),
            mean_heading=(self.heading[:, :, None, :] * weights).sum(axis=3),
            nearest=nearest,
        )

    def _rewards(self, surroundings: _Surroundings, died: Flags) -> Floats:
        weights = self.reward
        safety = 5.0 * np.minimum(surroundings.predator_distance / np.float32(VISION), 1.0)
        rewards = 2.0 + safety - weights.wall * np.maximum(1.0 - surroundings.wall_distance, 0.0)
        if weights.density:
            density = surroundings.neighbours / max(self.num_fish - 1, 1)
            rewards = rewards - weights.density * np.maximum(density - weights.density_target, 0.0)
        if weights.divergence:
            divergence = (1.0 - (self.heading * surroundings.mean_heading).sum(axis=0)) / 2
            rewards = rewards + weights.divergence * np.where(surroundings.neighbours > 0, divergence, 0.0)
        total: Floats = (0.1 * rewards - weights.death * died).astype(np.float32)
        return total

    def _observe(self, surroundings: _Surroundings) -> Floats:
        near = (surroundings.predator_distance < VISION).astype(np.float32)
        outward = self.position / np.maximum(np.float32(RADIUS) - surroundings.wall_distance, 1e-6)
        to_predator = (self.predator[:, :, None] - self.position) * (near / np.float32(VISION))
        relative_velocity = (self.velocity[:, :, None] - self.heading * self.speed) * (
            near / np.float32(PREDATOR_SPEED)
        )
        features = [
            surroundings.wall_distance / np.float32(RADIUS),
            *self._to_own_frame(outward),
            self.speed / np.float32(FISH_SPEED),
            near,
            np.minimum(surroundings.predator_distance / np.float32(VISION), 1.0),
            *self._to_own_frame(to_predator),
            *self._to_own_frame(relative_velocity),
            np.broadcast_to((self.clock / STEPS).astype(np.float32)[:, None], near.shape),
            surroundings.neighbours / max(self.num_fish - 1, 1),
            *self._to_own_frame(surroundings.centre / np.float32(VISION)),
            *self._to_own_frame(surroundings.mean_heading),
            *self._to_own_frame(surroundings.nearest / np.float32(VISION)),
        ]
        return np.stack([feature * self.alive for feature in features], axis=2).astype(np.float32)

    def _to_own_frame(self, vectors: Floats) -> tuple[Floats, Floats]:
        """Rotate vectors into each fish's own frame: (ahead, left)."""
        (x, y), (east, north) = self.heading, vectors
        return east * x + north * y, north * x - east * y

    def _reset(self, mask: Flags) -> None:
        """Start the next episode of these ponds."""
        self.episode[mask] += 1
        for pond in np.flatnonzero(mask):
            rng = np.random.default_rng([self.seed + int(pond), int(self.episode[pond])])
            direction = 2 * np.pi * rng.random()
            angle, heading = 2 * np.pi * rng.random((2, self.num_fish))
            low, high = START_GAP, RADIUS - 1.0
            # Uniform over the area.
            distance = np.sqrt(low**2 + (high**2 - low**2) * rng.random(self.num_fish))
            self.position[:, pond] = distance * np.stack([np.cos(angle), np.sin(angle)])
            self.heading[:, pond] = np.stack([np.cos(heading), np.sin(heading)])
            self.velocity[:, pond] = PREDATOR_START * np.array([np.cos(direction), np.sin(direction)])
        self.predator[:, mask] = 0.0
        self.speed[mask] = FISH_SPEED / 2
        self.alive[mask] = True
        self.death_step[mask] = STEPS
        self.clock[mask] = 0


def _norm(vectors: Floats) -> Floats:
    x, y = vectors
    norm: Floats = np.sqrt(x * x + y * y)
    return norm
