"""Many quadrotors in many worlds at once, in plain numpy: to hover at a place, or to pick a box up and bring it there.

A drone is steered as a flight controller takes it: a collective thrust and three body rates, all within -1 … 1, where
thrust 0 carries the drone's own weight. The rates follow with a lag, the thrust acts along the body's axis.

Every drone has its own observation, action, reward and end. Drones of the same world see each other and can collide;
one that has ended starts again at once, in the same world, while the others fly on. Whatever is random about an episode
follows from the seed, the drone's number and how many episodes it has had: how the worlds are split changes nothing.
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

TASKS = ("drone_hover", "drone_pickplace")
ACTIONS = 4
OBSERVATIONS = 24

GRAVITY = 9.81
DT = 0.04
"""Seconds a step."""
RATE_LAG = 0.08
"""Seconds in which the body rates cover 63 % of the way to what was asked for."""
MOST_RATES = (4.0, 4.0, 2.0)
"""Radians a second, about the body's x, y and z axis."""
DRAG = 0.1
PAYLOAD = 0.2
"""What a box weighs, as a share of the drone."""

CELL = 1.2
"""Metres between the middles of two columns of air; each start and each goal has a column of its own."""
JITTER = 0.3
"""Metres by which starts and goals may lie off the middle of their column."""
MARGIN = 1.5
"""Metres of air around the outermost columns; who leaves it is out."""
CEILING = 4.0
TOUCH = 0.3
"""Metres between the middles of two drones that touch."""
GRIP_HEIGHT = 0.3
"""Metres above the ground at which a box is picked up and set down."""
NEAR, SLOW = 0.3, 0.5
"""Metres from the goal and metres a second that count as being there."""
HOLD = 12
"""Steps in a row that a drone must be there."""
MOST_STEPS = 250
"""Steps after which an episode is over without success."""
CANDIDATES = 8
"""Starts that are looked at; the one farthest from the other drones is taken."""

SUCCESS, CRASH, PICKED = 1.0, -1.0, 0.5
"""Rewards for an end, a collision (or leaving the world), and a box picked up."""
PER_METRE, PER_HOLD, PER_SPIN = 0.1, 0.2, -0.0004
"""Rewards for each metre nearer, for a full hold (as it grows; lost when it breaks), and for spinning."""

STATE = (
    "episode", "position", "velocity", "attitude", "rates", "box", "place", "carrying", "held", "steps", "returned",
)  # fmt: skip
"""The arrays that, with the clock, are all that changes."""


@dataclass(frozen=True)
class Ended:
    """The episodes that ended in a step, one entry each."""

    returned: Floats
    """The sum of rewards."""
    length: Ints
    """Steps."""
    success: Flags
    """Whether the task was done."""
    collision: Flags
    """Whether it touched the ground or another drone."""


@dataclass(frozen=True)
class Step:
    """What a step gave, one row or entry a drone."""

    observations: Floats
    """Of those that ended: the first of the next episode."""
    rewards: Floats
    done: Flags
    """Whether the episode ended with this step. The time that is left is observed, so a time-out is an end as well."""
    ended: Ended


class Drones:
    """`worlds` worlds of `drones` drones each, the first of which has the number `first_world`."""

    def __init__(self, task: str, worlds: int, drones: int, seed: int, first_world: int = 0) -> None:
        self.task, self.worlds, self.drones = task, worlds, drones
        self.carries = task == "drone_pickplace"
        places = drones * 2 if self.carries else drones
        self.side = max(3, int(np.ceil(np.sqrt(places))))
        self.reach = np.float32(self.side * CELL / 2 + MARGIN)
        shape = (worlds, drones)
        self.number = (first_world * drones + np.arange(worlds * drones)).reshape(shape)
        self.world_number = np.broadcast_to(first_world + np.arange(worlds)[:, None], shape)
        self.seed = seed
        self.episode: Ints = np.zeros(shape, np.int64)
        self.clock = 0
        self.position: Floats = np.full((3, *shape), 1e6, np.float32)  # nowhere near anybody, before the first start
        self.velocity: Floats = np.zeros((3, *shape), np.float32)
        self.attitude: Floats = np.zeros((4, *shape), np.float32)
        self.rates: Floats = np.zeros((3, *shape), np.float32)
        self.box: Floats = np.zeros((3, *shape), np.float32)
        self.place: Floats = np.zeros((3, *shape), np.float32)
        self.carrying: Flags = np.zeros(shape, np.bool_)
        self.held: Ints = np.zeros(shape, np.int64)
        self.steps: Ints = np.zeros(shape, np.int64)
        self.returned: Floats = np.zeros(shape, np.float32)
        self._most_rates = np.array(MOST_RATES, np.float32)[:, None, None]
        self._follow = np.float32(1.0 - np.exp(-DT / RATE_LAG))
        self._self = np.eye(drones, dtype=np.float32) * np.float32(1e6)
        self._start(np.ones(shape, np.bool_))

    @property
    def goal(self) -> Floats:
        """Where each drone has to go now: to its box first, then to the place."""
        if not self.carries:
            return self.place
        return np.where(self.carrying, self.place, self.box)

    def step(self, actions: Floats) -> Step:
        """Fly for `DT` seconds; one row of actions a drone."""
        shape = (self.worlds, self.drones)
        asked = np.clip(actions.T, -1.0, 1.0).reshape(ACTIONS, *shape)
        before = _length(self.goal - self.position)
        self._fly(asked)
        self.steps += 1
        self.clock += 1

        distance = _length(self.goal - self.position)
        there = (distance < NEAR) & (_length(self.velocity) < SLOW)
        held_before, self.held = self.held, np.where(there, self.held + 1, 0)
        full = self.held >= HOLD
        done_well = full & (self.carrying | (not self.carries))
        picked = full & ~done_well

        ground = self.position[2] <= 0.0
        touching = (self._neighbours()[1] < TOUCH).any(axis=2)
        out = (np.abs(self.position[:2]) > self.reach).any(axis=0) | (self.position[2] > CEILING)
        crashed = ground | touching | out
        done_well &= ~crashed
        picked &= ~crashed
        done = crashed | done_well | (self.steps >= MOST_STEPS)

        rewards = PER_METRE * (before - distance) + PER_HOLD / HOLD * (self.held - held_before)
        rewards += PER_SPIN * np.square(self.rates).sum(axis=0)
        rewards += SUCCESS * done_well + CRASH * crashed + PICKED * picked
        rewards = rewards.astype(np.float32)
        self.returned += rewards
        ended = Ended(self.returned[done], self.steps[done], done_well[done], (ground | touching)[done])

        self.carrying |= picked
        self.held[picked] = 0
        if done.any():
            self._start(done)
        return Step(self.observe(), rewards.ravel(), done.ravel(), ended)

    def observe(self) -> Floats:
        """What each drone sees, mostly in its own body's frame, scaled to about -1 … 1; one row a drone."""
        turn = _matrix(self.attitude)
        offsets, distances = self._neighbours()
        nearest = distances.argmin(axis=2)[None, :, :, None]
        towards = np.take_along_axis(offsets, nearest, axis=3)[..., 0]
        closing = np.take_along_axis(self.velocity[:, :, None, :], nearest, axis=3)[..., 0] - self.velocity
        gap = np.take_along_axis(distances, nearest[0], axis=2)[..., 0]
        seen = np.exp(-gap)  # far away is as good as not there
        columns = [
            _into(turn, self.goal - self.position) * 0.5,
            _into(turn, self.place - self.position) * 0.5,
            _into(turn, self.velocity) * 0.5,
            turn[2],  # where up is
            self.rates * 0.25,
            _into(turn, (towards / np.maximum(gap, 1e-6)).astype(np.float32)) * seen,
            _into(turn, closing) * seen * 0.5,
            np.stack([self.position[2] * 0.5, self.held / HOLD * 1.0, self.steps / MOST_STEPS - 0.5]),
        ]
        return np.concatenate(columns).reshape(OBSERVATIONS, -1).T.astype(np.float32, order="C")

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on; the arrays are the live ones."""
        return {"clock": self.clock, **{name: getattr(self, name) for name in STATE}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            here, there = getattr(self, name).shape, state[name].shape
            if here != there:
                raise ValueError(f"{name} is {there} in it, {here} here")
        for name in STATE:
            setattr(self, name, np.array(state[name]))
        self.clock = state["clock"]

    def _fly(self, asked: Floats) -> None:
        """Semi-implicit Euler: rates, attitude, velocity, position."""
        self.rates += (asked[1:] * self._most_rates - self.rates) * self._follow
        self.attitude = _turned(self.attitude, self.rates, DT)
        w, x, y, z = self.attitude
        up = np.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])
        thrust = GRAVITY * (1.0 + asked[0]) / (1.0 + PAYLOAD * self.carrying)
        pull = up * thrust - DRAG * self.velocity
        pull[2] -= GRAVITY
        self.velocity += (pull * DT).astype(np.float32)
        self.position += self.velocity * np.float32(DT)

    def _neighbours(self) -> tuple[Floats, Floats]:
        """From each drone to each other of its world: the way (3, worlds, drones, drones) and its length."""
        offsets = self.position[:, :, None, :] - self.position[:, :, :, None]
        return offsets, _length(offsets) + self._self  # nobody is their own neighbour

    def _start(self, who: Flags) -> None:
        """Begin the next episode of these drones.

        Drones that start in the same step get different columns, so they cannot touch each other; of several starts in
        its column each takes the one farthest from those that are flying. Goals are in columns of their own too.
        """
        world, drone = np.nonzero(who)
        self.episode[who] += 1
        chance = self._chances(self.number[who], self.episode[who], 3 * CANDIDATES + 7)
        cells = self.side**2
        # The same for all that start now in a world, so that their columns differ.
        shift = (self._chances(self.world_number[who], np.full(len(world), -1 - self.clock), 1)[0] * cells).astype(int)
        starts = self._columns((drone + shift) % cells, chance[7:].reshape(3, CANDIDATES, -1), 0.6, 2.6)
        gaps = starts[..., None] - self.position[:, world][:, None]
        distances = np.square(gaps).sum(axis=0)
        distances[:, np.arange(len(world)), drone] = np.inf  # where it was itself does not matter
        best = distances.min(axis=2).argmax(axis=0)
        self.position[:, world, drone] = starts[:, best, np.arange(len(world))]
        self.velocity[:, world, drone] = 0.0
        self.rates[:, world, drone] = 0.0
        heading = np.pi * chance[0]
        self.attitude[:, world, drone] = np.stack([np.cos(heading), 0 * heading, 0 * heading, np.sin(heading)])
        if self.carries:
            low = (GRIP_HEIGHT, GRIP_HEIGHT)
            self.box[:, world, drone] = self._columns(drone, chance[1:4], *low)
            self.place[:, world, drone] = self._columns(self.drones + drone, chance[4:7], *low)
        else:
            self.place[:, world, drone] = self._columns(drone, chance[1:4], 0.8, 2.4)
        self.carrying[who] = False
        self.held[who] = 0
        self.steps[who] = 0
        self.returned[who] = 0.0

    def _columns(self, column: Ints, chance: npt.NDArray[np.float64], low: float, high: float) -> Floats:
        """Points in these columns of air, between two heights; `chance` (3, …) says where."""
        middle = (self.side - 1) / 2
        x = (column % self.side - middle) * CELL + (2 * chance[0] - 1) * JITTER
        y = (column // self.side - middle) * CELL + (2 * chance[1] - 1) * JITTER
        return np.stack([x, y, low + (high - low) * chance[2]]).astype(np.float32)

    def _chances(self, number: Ints, episode: Ints, count: int) -> npt.NDArray[np.float64]:
        """`count` uniform numbers for each pair of numbers, by a hash (splitmix64's): no state, no order."""
        with np.errstate(over="ignore"):
            x = np.arange(1, count + 1, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
            for part in (np.full(1, self.seed), number, episode):
                x = _mixed(x + part.astype(np.uint64) * np.uint64(0xD1342543DE82EF95))
        return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _length(vectors: Floats) -> Floats:
    x, y, z = vectors
    length: Floats = np.sqrt(x * x + y * y + z * z)
    return length


def _turned(attitude: Floats, rates: Floats, dt: float) -> Floats:
    """Quaternions (w, x, y, z) after turning for `dt` at these body rates."""
    w, x, y, z = attitude
    p, q, r = rates * np.float32(0.5 * dt)
    turned: Floats = np.stack(
        [w - x * p - y * q - z * r, x + w * p + y * r - z * q, y + w * q + z * p - x * r, z + w * r + x * q - y * p]
    )
    turned /= np.sqrt(np.square(turned).sum(axis=0))
    return turned


def _matrix(attitude: Floats) -> Floats:
    """Rotation matrices (3, 3, …) from the body's frame to the world's."""
    w, x, y, z = attitude
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row) for row in rows])


def _into(turn: Floats, vectors: Floats) -> Floats:
    """Vectors of the world in the frame of the body."""
    seen: Floats = turn[0] * vectors[0] + turn[1] * vectors[1] + turn[2] * vectors[2]
    return seen


class Fleet:
    """All worlds, stepped in `workers` pieces one after the other; what happens does not depend on how many."""

    def __init__(self, task: str, worlds: int, drones: int, seed: int, workers: int = 1) -> None:
        share = worlds // workers
        self.pieces = [Drones(task, share, drones, seed, i * share) for i in range(workers)]

    def observe(self) -> Floats:
        return np.concatenate([piece.observe() for piece in self.pieces])

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": [piece.state_dict() for piece in self.pieces]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for piece, its in zip(self.pieces, state["pieces"], strict=True):
            piece.load_state_dict(its)

    def step(self, actions: Floats) -> Step:
        parts = np.split(actions, len(self.pieces))
        steps = [piece.step(part) for piece, part in zip(self.pieces, parts, strict=True)]
        if len(steps) == 1:
            return steps[0]
        ended = [step.ended for step in steps]
        return Step(
            np.concatenate([step.observations for step in steps]),
            np.concatenate([step.rewards for step in steps]),
            np.concatenate([step.done for step in steps]),
            Ended(
                np.concatenate([each.returned for each in ended]),
                np.concatenate([each.length for each in ended]),
                np.concatenate([each.success for each in ended]),
                np.concatenate([each.collision for each in ended]),
            ),
        )
