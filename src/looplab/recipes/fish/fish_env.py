"""A predator and schools of fish in round ponds, many at once, in plain numpy. Frozen: versions must not change it.

Every fish has its own action, observation, reward and death; one policy may steer them all, but never with one action.
A dead fish stays where it died and gives no more transitions: `Step.acted` says whose entries mean anything. A pond is
over after 500 steps, or when all its fish are dead. Then it starts again at once (unless `restart` is off).

The predator is heavy: it falls with a constant pull towards the living fish that is nearest, and bounces off the wall.
On a straight line it is faster than a fish; fish turn better. What is random is only how an episode starts: it follows
from the pond's seed, which is `seed` plus its number, and from how many episodes it has had. So pond 5 of a hundred is
the same, step by step, as a single pond with that seed.
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
"""Of the pond."""
DT = 0.1
"""Seconds a step."""
STEPS = 500
"""Steps after which an episode is over, with whoever is still alive."""
VISION = RADIUS / 3
"""How far a fish sees the predator and other fish, all around."""
KILL = 0.7
"""Fish nearer to the predator than this die."""

FISH_SPEED = 2.0
"""Most a fish swims, a second."""
FASTER = 0.5
"""By how much an action changes the speed."""
TURN = np.pi / 6
"""By how much an action changes the heading."""
KEEP, LEFT, RIGHT, SPEED_UP, SLOW_DOWN = range(5)
ACTIONS = 5

PULL = 0.5
"""The predator's acceleration towards the nearest living fish."""
PREDATOR_START = 1.5
PREDATOR_SPEED = 4.0
"""Its speed at the start, and its most."""
BOUNCE = 0.85
"""The share of its speed that it keeps at the wall."""
START_GAP = 2.0
"""How near to the predator a fish may start."""

OWN, NEIGHBOURS = 11, 7
OBSERVATIONS = OWN + NEIGHBOURS
"""What a fish sees of itself, the wall, the predator and the time; what it sees of other fish."""

STATE = ("episode", "clock", "position", "heading", "speed", "alive", "death_step", "predator", "velocity")
"""The arrays of a school that are all that changes."""

_COS = np.array([1, np.cos(TURN), np.cos(TURN), 1, 1], np.float32)
_SIN = np.array([0, np.sin(TURN), -np.sin(TURN), 0, 0], np.float32)
_CHANGE = np.array([0, 0, 0, FASTER, -FASTER], np.float32)


@dataclass(frozen=True)
class Reward:
    """What a living fish is paid for a step: 0.1 * (2 + 5 * distance - wall - density + divergence), less for death.

    The distance is that to the predator in units of the vision, at most 1. Trainers may shape it; the evaluation uses
    the defaults.
    """

    death: float = 50.0
    """Taken for being killed, not scaled."""
    wall: float = 2.0
    """Taken for touching the wall; less, the farther away, and nothing from 1 on."""
    density: float = 0.0
    """Taken for seeing the whole school, above `density_target`."""
    density_target: float = 0.3
    """The share of the other fish that a fish may see for nothing."""
    divergence: float = 0.0
    """Given for swimming against the fish in sight; half of it for swimming across them."""


@dataclass(frozen=True)
class Step:
    """What a step gave; one row a pond, one column a fish."""

    observations: Floats
    """Of the state to act on next (ponds, fish, 18): after the restart, where the pond was over; 0 for the dead."""
    rewards: Floats
    """0 for those that were dead already."""
    acted: Flags
    """Who was alive before the step: only these are transitions."""
    died: Flags
    """Who was killed in this step."""
    over: Flags
    """Which ponds ended with this step; one entry a pond."""


@dataclass(frozen=True)
class _Seen:
    gap: Floats
    """From each fish to the predator."""
    wall: Floats
    """From each fish to the wall."""
    count: Floats
    """How many fish each sees."""
    centre: Floats
    """The way to the middle of those (2, ponds, fish); 0 if there are none. So are the next two."""
    course: Floats
    """Their mean heading."""
    nearest: Floats
    """The way to the nearest of them."""


class FishSchool:
    """`num_envs` ponds with a predator and `num_fish` fish each."""

    def __init__(
        self, num_envs: int, num_fish: int = 25, seed: int = 0, reward: Reward | None = None, restart: bool = True
    ) -> None:
        if num_envs < 1 or num_fish < 1:
            raise ValueError(f"a school needs a pond and a fish at least, not {num_envs} ponds of {num_fish}")
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
        """When each fish died; 500 for those that live."""
        self.predator: Floats = np.zeros((2, num_envs), np.float32)
        self.velocity: Floats = np.zeros((2, num_envs), np.float32)
        """The predator's."""
        self._ponds = np.arange(num_envs)
        self._others = ~np.eye(num_fish, dtype=np.bool_)
        self._start(np.ones(num_envs, np.bool_))

    def step(self, actions: npt.NDArray[np.integer]) -> Step:
        """Swim for `DT` seconds; one action for each fish (ponds, fish), of which those of the dead do not matter."""
        if actions.shape != self.alive.shape:
            raise ValueError(f"the actions must be {self.alive.shape}, one for each fish, not {actions.shape}")
        acted = self.alive.copy()
        self._swim(actions, acted)
        self._hunt(acted)
        self.clock += 1
        died = acted & (_length(self.position - self.predator[:, :, None]) < KILL)
        self.alive &= ~died
        self.death_step = np.where(died, self.clock[:, None], self.death_step)
        seen = self._look()
        rewards = np.where(acted, self._pay(seen, died), np.float32(0.0))
        over = (self.clock >= STEPS) | ~self.alive.any(axis=1)
        if self.restart and over.any():
            self._start(over)
            seen = self._look()
        return Step(self._observe(seen), rewards, acted, died, over)

    def observe(self) -> Floats:
        """What each fish sees in its own frame: ahead and to the left; scaled to about -1 … 1; (ponds, fish, 18)."""
        return self._observe(self._look())

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on; the arrays are the live ones."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            here, there = getattr(self, name).shape, state[name].shape
            if here != there:
                raise ValueError(f"{name} is {there} in it, {here} here")
        for name in STATE:
            setattr(self, name, np.array(state[name]))

    def _swim(self, actions: npt.NDArray[np.integer], acted: Flags) -> None:
        turn_cos, turn_sin = _COS[actions], _SIN[actions]
        x, y = self.heading
        turned = np.stack([x * turn_cos - y * turn_sin, x * turn_sin + y * turn_cos])
        turned /= _length(turned)  # or rounding errors would grow
        self.heading = np.where(acted, turned, self.heading)
        self.speed = np.where(acted, np.clip(self.speed + _CHANGE[actions], 0.0, FISH_SPEED), 0.0).astype(np.float32)
        self.position += self.heading * self.speed * np.float32(DT)
        self.position /= np.maximum(_length(self.position) / np.float32(RADIUS), 1.0)  # the wall stops them

    def _hunt(self, acted: Flags) -> None:
        way = self.position - self.predator[:, :, None]
        distance = np.where(acted, _length(way), np.float32(np.inf))
        prey = distance.argmin(axis=1)
        gap = distance[self._ponds, prey]
        pull = np.where(np.isfinite(gap), np.float32(PULL * DT) / np.maximum(gap, 1e-6), 0.0)
        self.velocity += way[:, self._ponds, prey] * pull.astype(np.float32)
        self.velocity /= np.maximum(_length(self.velocity) / np.float32(PREDATOR_SPEED), 1.0)
        self.predator += self.velocity * np.float32(DT)
        out = _length(self.predator)
        beyond = out > RADIUS
        if beyond.any():
            normal = self.predator / np.maximum(out, 1e-6)
            outwards = (self.velocity * normal).sum(axis=0)
            bounced = (self.velocity - 2 * np.maximum(outwards, 0.0) * normal) * np.float32(BOUNCE)
            self.velocity = np.where(beyond, bounced, self.velocity)
            self.predator = np.where(beyond, normal * np.float32(RADIUS), self.predator)

    def _look(self) -> _Seen:
        gap = _length(self.position - self.predator[:, :, None])
        wall = np.float32(RADIUS) - _length(self.position)
        if self.num_fish == 1:
            nobody = np.zeros_like(self.position)
            return _Seen(gap, wall, nobody[0], nobody, nobody, nobody)
        way = self.position[:, :, None, :] - self.position[:, :, :, None]
        distance = np.where(self._others & self.alive[:, None, :], _length(way), np.float32(np.inf))
        visible = distance < VISION
        count = visible.sum(axis=2).astype(np.float32)
        at_least_one: Floats = np.maximum(count, np.float32(1.0))
        share = visible.astype(np.float32) / at_least_one[:, :, None]
        closest = distance.argmin(axis=2)[None, :, :, None]
        nearest = np.take_along_axis(way, closest, axis=3)[..., 0] * (count > 0)
        return _Seen(
            gap, wall, count, (way * share).sum(axis=3), (self.heading[:, :, None, :] * share).sum(axis=3), nearest
        )

    def _pay(self, seen: _Seen, died: Flags) -> Floats:
        pay = self.reward
        safe = 5.0 * np.minimum(seen.gap / np.float32(VISION), 1.0)
        rewards = 2.0 + safe - pay.wall * np.maximum(1.0 - seen.wall, 0.0)
        if pay.density:
            crowd = seen.count / max(self.num_fish - 1, 1)
            rewards = rewards - pay.density * np.maximum(crowd - pay.density_target, 0.0)
        if pay.divergence:
            against = (1.0 - (self.heading * seen.course).sum(axis=0)) / 2
            rewards = rewards + pay.divergence * np.where(seen.count > 0, against, 0.0)
        paid: Floats = (0.1 * rewards - pay.death * died).astype(np.float32)
        return paid

    def _observe(self, seen: _Seen) -> Floats:
        near = (seen.gap < VISION).astype(np.float32)
        out = self.position / np.maximum(np.float32(RADIUS) - seen.wall, 1e-6)
        to_predator = (self.predator[:, :, None] - self.position) * (near / np.float32(VISION))
        closing = (self.velocity[:, :, None] - self.heading * self.speed) * (near / np.float32(PREDATOR_SPEED))
        columns = [
            seen.wall / np.float32(RADIUS),
            *self._ahead(out),
            self.speed / np.float32(FISH_SPEED),
            near,
            np.minimum(seen.gap / np.float32(VISION), 1.0),
            *self._ahead(to_predator),
            *self._ahead(closing),
            np.broadcast_to((self.clock / STEPS).astype(np.float32)[:, None], near.shape),
            seen.count / max(self.num_fish - 1, 1),
            *self._ahead(seen.centre / np.float32(VISION)),
            *self._ahead(seen.course),
            *self._ahead(seen.nearest / np.float32(VISION)),
        ]
        return np.stack([column * self.alive for column in columns], axis=2).astype(np.float32)

    def _ahead(self, vectors: Floats) -> tuple[Floats, Floats]:
        """Vectors of the pond in each fish's own frame: how far ahead, how far to the left."""
        (x, y), (east, north) = self.heading, vectors
        return east * x + north * y, north * x - east * y

    def _start(self, which: Flags) -> None:
        """Begin the next episode of these ponds."""
        self.episode[which] += 1
        for pond in np.flatnonzero(which):
            rng = np.random.default_rng([self.seed + int(pond), int(self.episode[pond])])
            course = 2 * np.pi * rng.random()
            angle, heading = 2 * np.pi * rng.random((2, self.num_fish))
            low, high = START_GAP, RADIUS - 1.0
            # Every piece of water is as likely as another of its size.
            distance = np.sqrt(low**2 + (high**2 - low**2) * rng.random(self.num_fish))
            self.position[:, pond] = distance * np.stack([np.cos(angle), np.sin(angle)])
            self.heading[:, pond] = np.stack([np.cos(heading), np.sin(heading)])
            self.velocity[:, pond] = PREDATOR_START * np.array([np.cos(course), np.sin(course)])
        self.predator[:, which] = 0.0
        self.speed[which] = FISH_SPEED / 2
        self.alive[which] = True
        self.death_step[which] = STEPS
        self.clock[which] = 0


def _length(vectors: Floats) -> Floats:
    x, y = vectors
    length: Floats = np.sqrt(x * x + y * y)
    return length
