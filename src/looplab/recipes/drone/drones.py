"""Vectorized quadrotor simulation. Tasks: hover at a target, or pick up a box and deliver it.

Actions are those of a flight controller: collective thrust and three body rates, all within -1 … 1; thrust 0 balances
the drone's own weight. The rates follow with a lag, the thrust acts along the body's z axis.

Every drone has its own observation, action, reward and episode. Drones of the same world see each other and can
collide. A drone whose episode has ended is reset immediately, while the others continue. All randomness of an episode
is a function of the seed, the drone's index and its episode number, so that results do not depend on how the worlds are
split.

This file is the definition, in plain numpy. drones.c computes the same steps several times faster, with the same bits.
It is used where it can be compiled, and only while this file is unchanged (drones.c has its hash).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from looplab.rl.native import ISA_FLAGS, detect_isa, load_library

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

TASKS = ("drone_hover", "drone_pickplace")
ACTION_DIM = 4
OBS_DIM = 24

GRAVITY = 9.81
DT = 0.04
"""Seconds per step."""
RATE_LAG = 0.08
"""Time constant of the body rates, in seconds."""
MAX_RATES = (4.0, 4.0, 2.0)
"""Maximum body rates about x, y and z, in radians per second."""
DRAG = 0.1
PAYLOAD = 0.2
"""Mass of a box, relative to the drone."""

CELL = 1.2
"""Size of the grid cells, in metres; every start and every target is in its own cell."""
JITTER = 0.3
"""Maximum offset of starts and targets from the centre of their cell, in metres."""
MARGIN = 1.5
"""Width of the border around the grid, in metres; drones that leave it crash."""
CEILING = 4.0
TOUCH = 0.3
"""Distance between the centres of two colliding drones, in metres."""
GRIP_HEIGHT = 0.3
"""Height at which boxes are picked up and delivered, in metres."""
NEAR, SLOW = 0.3, 0.5
"""Maximum distance (metres) and speed (metres per second) at which a drone counts as at its goal."""
HOLD = 12
"""Consecutive steps that a drone must stay at its goal."""
MAX_EPISODE_STEPS = 250
"""Steps after which an episode ends without success."""
CANDIDATES = 8
"""Candidate start positions; the one farthest from the other drones is used."""

SUCCESS, CRASH, PICKED = 1.0, -1.0, 0.5
"""Rewards for success, for a collision or leaving the world, and for picking up a box."""
PER_METRE, PER_HOLD, PER_SPIN = 0.1, 0.2, -0.0004
"""Rewards per metre of progress, per complete hold (paid as it grows, lost when it breaks), and for spinning."""

STATE = (
    "episode", "position", "velocity", "attitude", "rates", "box", "target", "carrying",
    "hold_steps", "steps", "returns",
)  # fmt: skip
"""The arrays that make up the state, together with the clock."""


@dataclass(frozen=True)
class FinishedEpisodes:
    """The episodes that ended in a step, one entry each."""

    returns: Floats
    """Undiscounted sum of rewards."""
    lengths: Ints
    """Number of steps."""
    success: Flags
    collision: Flags
    """Whether the drone touched the ground or another drone."""


@dataclass(frozen=True)
class DroneStep:
    """Result of a step, one row or entry per drone."""

    obs: Floats
    """For drones whose episode ended: the first observation of the next one."""
    rewards: Floats
    dones: Flags
    """Whether the episode ended with this step. The remaining time is observed, so a time-out is a termination too."""
    finished: FinishedEpisodes


class Drones:
    """`worlds` worlds of `drones` drones each; `first_world` is the index of the first one."""

    def __init__(
        self, task: str, worlds: int, drones: int, seed: int, first_world: int = 0, *, compiled: bool = True
    ) -> None:
        """`compiled`: use drones.c if possible."""
        self.task, self.worlds, self.drones = task, worlds, drones
        self.carries = task == "drone_pickplace"
        cells = drones * 2 if self.carries else drones
        self.side = max(3, int(np.ceil(np.sqrt(cells))))
        self.half_width = np.float32(self.side * CELL / 2 + MARGIN)
        shape = (worlds, drones)
        self.drone_index = (first_world * drones + np.arange(worlds * drones)).reshape(shape)
        self.world_index = np.broadcast_to(first_world + np.arange(worlds)[:, None], shape)
        self.seed = seed
        self.episode: Ints = np.zeros(shape, np.int64)
        self.clock = 0
        self.position: Floats = np.full((3, *shape), 1e6, np.float32)  # far from all others before the first reset
        self.velocity: Floats = np.zeros((3, *shape), np.float32)
        self.attitude: Floats = np.zeros((4, *shape), np.float32)
        self.rates: Floats = np.zeros((3, *shape), np.float32)
        self.box: Floats = np.zeros((3, *shape), np.float32)
        self.target: Floats = np.zeros((3, *shape), np.float32)
        self.carrying: Flags = np.zeros(shape, np.bool_)
        self.hold_steps: Ints = np.zeros(shape, np.int64)
        self.steps: Ints = np.zeros(shape, np.int64)
        self.returns: Floats = np.zeros(shape, np.float32)
        self._max_rates = np.array(MAX_RATES, np.float32)[:, None, None]
        self._rate_gain = np.float32(1.0 - np.exp(-DT / RATE_LAG))
        self._self = np.eye(drones, dtype=np.float32) * np.float32(1e6)
        self._reset(np.ones(shape, np.bool_))
        self._library: Any = None
        self.reason_not_compiled: str | None = None
        """Why drones.c is not used although it was wanted."""
        if compiled:
            self._library, self.reason_not_compiled = load_compiled()
        self._first_world = first_world
        self._world: _World | None = None
        self._arrays: list[Any] = []
        self._scratch: Floats = np.zeros(16 * worlds * drones, np.float32)

    @property
    def goal(self) -> Floats:
        """Current goal of each drone: its box first, then its target."""
        if not self.carries:
            return self.target
        return np.where(self.carrying, self.target, self.box)

    def step(self, actions: Floats) -> DroneStep:
        """Simulate `DT` seconds; `actions` has one row per drone."""
        if self._library is not None:
            return self._compiled_step(actions)
        shape = (self.worlds, self.drones)
        commands = np.clip(actions.T, -1.0, 1.0).reshape(ACTION_DIM, *shape)
        previous_distance = _norm(self.goal - self.position)
        self._integrate(commands)
        self.steps += 1
        self.clock += 1

        distance = _norm(self.goal - self.position)
        at_goal = (distance < NEAR) & (_norm(self.velocity) < SLOW)
        previous_hold, self.hold_steps = self.hold_steps, np.where(at_goal, self.hold_steps + 1, 0)
        held = self.hold_steps >= HOLD
        success = held & (self.carrying | (not self.carries))
        picked = held & ~success

        ground = self.position[2] <= 0.0
        colliding = (self._neighbours()[1] < TOUCH).any(axis=2)
        outside = (np.abs(self.position[:2]) > self.half_width).any(axis=0) | (self.position[2] > CEILING)
        crashed = ground | colliding | outside
        success &= ~crashed
        picked &= ~crashed
        dones = crashed | success | (self.steps >= MAX_EPISODE_STEPS)

        rewards = PER_METRE * (previous_distance - distance) + PER_HOLD / HOLD * (self.hold_steps - previous_hold)
        rewards += PER_SPIN * np.square(self.rates).sum(axis=0)
        rewards += SUCCESS * success + CRASH * crashed + PICKED * picked
        rewards = rewards.astype(np.float32)
        self.returns += rewards
        finished = FinishedEpisodes(
            returns=self.returns[dones],
            lengths=self.steps[dones],
            success=success[dones],
            collision=(ground | colliding)[dones],
        )

        self.carrying |= picked
        self.hold_steps[picked] = 0
        if dones.any():
            self._reset(dones)
        return DroneStep(obs=self.observe(), rewards=rewards.ravel(), dones=dones.ravel(), finished=finished)

    def observe(self) -> Floats:
        """Return the observations, mostly in the body frame, scaled to about -1 … 1; one row per drone."""
        rotation = _rotation_matrix(self.attitude)
        offsets, distances = self._neighbours()
        nearest = distances.argmin(axis=2)[None, :, :, None]
        direction = np.take_along_axis(offsets, nearest, axis=3)[..., 0]
        relative_velocity = np.take_along_axis(self.velocity[:, :, None, :], nearest, axis=3)[..., 0] - self.velocity
        distance = np.take_along_axis(distances, nearest[0], axis=2)[..., 0]
        proximity = _exp_minus(distance)  # distant neighbours fade out
        features = [
            _to_body_frame(rotation, self.goal - self.position) * 0.5,
            _to_body_frame(rotation, self.target - self.position) * 0.5,
            _to_body_frame(rotation, self.velocity) * 0.5,
            rotation[2],  # the world's z axis
            self.rates * 0.25,
            _to_body_frame(rotation, (direction / np.maximum(distance, 1e-6)).astype(np.float32)) * proximity,
            _to_body_frame(rotation, relative_velocity) * proximity * 0.5,
            np.stack([self.position[2] * 0.5, self.hold_steps / HOLD * 1.0, self.steps / MAX_EPISODE_STEPS - 0.5]),
        ]
        return np.concatenate(features).reshape(OBS_DIM, -1).T.astype(np.float32, order="C")

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state; arrays are not copied."""
        return {"clock": self.clock, **{name: getattr(self, name) for name in STATE}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            expected, actual = getattr(self, name).shape, state[name].shape
            if actual != expected:
                raise ValueError(f"{name} has the shape {actual}, expected {expected}")
        for name in STATE:
            setattr(self, name, np.array(state[name]))
        self.clock = state["clock"]

    def _compiled_step(self, actions: Floats) -> DroneStep:
        """Do in C what `step` does."""
        self.clock += 1
        arrays = [getattr(self, name) for name in STATE]
        if self._world is None or any(map(operator.is_not, arrays, self._arrays)):
            self._arrays = arrays
            addresses = {name: array.ctypes.data for name, array in zip(STATE, arrays, strict=True)}
            self._world = _World(
                worlds=self.worlds, drones=self.drones, carries=self.carries, side=self.side, seed=self.seed,
                first_world=self._first_world, half_width=self.half_width, rate_gain=self._rate_gain,
                scratch=self._scratch.ctypes.data, **addresses,
            )  # fmt: skip
        self._world.clock = self.clock
        actions = np.ascontiguousarray(actions, np.float32)
        count = self.worlds * self.drones
        floats, lengths = np.empty((OBS_DIM + 2, count), np.float32), np.empty(count, np.int64)
        dones, success, collision = flags = np.empty((3, count), np.bool_)
        obs, (rewards, returns) = floats[:-2], floats[-2:]
        start, start_flags = floats.ctypes.data, flags.ctypes.data
        result = _Result(
            start, start + 4 * OBS_DIM * count, start_flags, start + 4 * (OBS_DIM + 1) * count, lengths.ctypes.data,
            start_flags + count, start_flags + 2 * count,
        )  # fmt: skip
        n = self._library.drones_step(ctypes.addressof(self._world), actions.ctypes.data, ctypes.addressof(result))
        finished = FinishedEpisodes(
            returns=returns[:n], lengths=lengths[:n], success=success[:n], collision=collision[:n]
        )
        return DroneStep(obs=obs.reshape(count, OBS_DIM), rewards=rewards, dones=dones, finished=finished)

    def _integrate(self, commands: Floats) -> None:
        """Semi-implicit Euler: rates, attitude, velocity, position."""
        self.rates += (commands[1:] * self._max_rates - self.rates) * self._rate_gain
        self.attitude = _rotate(self.attitude, self.rates, DT)
        w, x, y, z = self.attitude
        up = np.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])
        thrust = GRAVITY * (1.0 + commands[0]) / np.where(self.carrying, np.float32(1.0 + PAYLOAD), np.float32(1.0))
        acceleration = up * thrust - DRAG * self.velocity
        acceleration[2] -= GRAVITY
        self.velocity += acceleration * DT
        self.position += self.velocity * np.float32(DT)

    def _neighbours(self) -> tuple[Floats, Floats]:
        """Return offsets (3, worlds, drones, drones) and distances from each drone to the others of its world."""
        offsets = self.position[:, :, None, :] - self.position[:, :, :, None]
        return offsets, _norm(offsets) + self._self  # no drone is its own neighbour

    def _reset(self, mask: Flags) -> None:
        """Start the next episode of these drones.

        Drones that are reset in the same step start in different cells, so that they cannot collide. Each uses the
        candidate position in its cell that is farthest from the other drones. Targets are in separate cells too.
        """
        world, drone = np.nonzero(mask)
        self.episode[mask] += 1
        uniform = self._uniform(self.drone_index[mask], self.episode[mask], 3 * CANDIDATES + 7)
        cells = self.side**2
        # The same for all drones of a world that are reset now, so that their cells differ.
        shift = (self._uniform(self.world_index[mask], np.full(len(world), -1 - self.clock), 1)[0] * cells).astype(int)
        starts = self._positions((drone + shift) % cells, uniform[7:].reshape(3, CANDIDATES, -1), 0.6, 2.6)
        offsets = starts[..., None] - self.position[:, world][:, None]
        distances = np.square(offsets).sum(axis=0)
        distances[:, np.arange(len(world)), drone] = np.inf  # its own last position does not matter
        best = distances.min(axis=2).argmax(axis=0)
        self.position[:, world, drone] = starts[:, best, np.arange(len(world))]
        self.velocity[:, world, drone] = 0.0
        self.rates[:, world, drone] = 0.0
        cosine, sine = _half_turn(uniform[0])
        self.attitude[:, world, drone] = np.stack([cosine, 0 * cosine, 0 * sine, sine])
        if self.carries:
            heights = (GRIP_HEIGHT, GRIP_HEIGHT)
            self.box[:, world, drone] = self._positions(drone, uniform[1:4], *heights)
            self.target[:, world, drone] = self._positions(self.drones + drone, uniform[4:7], *heights)
        else:
            self.target[:, world, drone] = self._positions(drone, uniform[1:4], 0.8, 2.4)
        self.carrying[mask] = False
        self.hold_steps[mask] = 0
        self.steps[mask] = 0
        self.returns[mask] = 0.0

    def _positions(self, cell: Ints, uniform: npt.NDArray[np.float64], low: float, high: float) -> Floats:
        """Return positions in these cells, between two heights, from uniform random numbers (3, …)."""
        centre = (self.side - 1) / 2
        x = (cell % self.side - centre) * CELL + (2 * uniform[0] - 1) * JITTER
        y = (cell // self.side - centre) * CELL + (2 * uniform[1] - 1) * JITTER
        return np.stack([x, y, low + (high - low) * uniform[2]]).astype(np.float32)

    def _uniform(self, index: Ints, episode: Ints, count: int) -> npt.NDArray[np.float64]:
        """Return `count` uniform random numbers per (index, episode), from a stateless hash (splitmix64)."""
        with np.errstate(over="ignore"):
            x = np.arange(1, count + 1, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
            for key in (np.full(1, self.seed), index, episode):
                x = _splitmix64(x + key.astype(np.uint64) * np.uint64(0xD1342543DE82EF95))
        return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


class _World(ctypes.Structure):
    """As in drones.c."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("worlds", "drones", "carries", "side", "seed", "first_world", "clock")],
        ("half_width", ctypes.c_float), ("rate_gain", ctypes.c_float),
        *[
            (name, ctypes.c_void_p)
            for name in (
                "episode", "hold_steps", "steps", "position", "velocity", "attitude", "rates", "box", "target",
                "returns", "carrying", "scratch",
            )
        ],
    ]  # fmt: skip


class _Result(ctypes.Structure):
    """As in drones.c."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("obs", "rewards", "dones", "returns", "lengths", "success", "collision")
    ]  # fmt: skip


@functools.cache
def load_compiled() -> tuple[Any, str | None]:
    """Return the library of drones.c, or None and why it is not used."""
    here = Path(__file__)
    source = here.with_suffix(".c")
    if not source.is_file():
        return None, "there is no drones.c"
    hashes = re.findall(r"sha256 of drones\.py: ([0-9a-f]{64})", source.read_text())
    if hashes != [sha256(here.read_bytes()).hexdigest()]:
        return None, "drones.py was changed, and drones.c does not have its hash"
    library = load_library(source, *ISA_FLAGS[detect_isa()])
    if library is None:
        return None, "drones.c could not be compiled"
    library.drones_step.argtypes = [ctypes.c_void_p] * 3
    library.drones_step.restype = ctypes.c_int64
    return library, None


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _exp_minus(x: Floats) -> Floats:
    """Return exp(-x) for x >= 0, by operations that round alike everywhere; np.exp depends on the machine."""
    x = np.minimum(x, np.float32(87.0))
    n = (x * np.float32(-1.44269504) + np.float32(12582912.0)) - np.float32(12582912.0)
    r = (-x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1 / 5040) * r + np.float32(1 / 720)
    p = ((p * r + np.float32(1 / 120)) * r + np.float32(1 / 24)) * r + np.float32(1 / 6)
    p = (p * r + np.float32(0.5)) * (r * r)
    result: Floats = np.ldexp((p + r) + np.float32(1.0), n.astype(np.int32))
    return result


def _half_turn(u: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return cos and sin of pi * u for u in 0 … 1, by operations that round alike everywhere."""
    t = (u - 0.5) * np.pi
    square = t * t
    cosine = sine = np.ones_like(u)
    for k in range(18, 0, -2):
        cosine = 1.0 - square / (k * (k - 1)) * cosine
        sine = 1.0 - square / (k * (k + 1)) * sine
    return -t * sine, cosine


def _norm(vectors: Floats) -> Floats:
    x, y, z = vectors
    norm: Floats = np.sqrt(x * x + y * y + z * z)
    return norm


def _rotate(attitude: Floats, rates: Floats, dt: float) -> Floats:
    """Integrate quaternions (w, x, y, z) for `dt` seconds at these body rates."""
    w, x, y, z = attitude
    p, q, r = rates * np.float32(0.5 * dt)
    rotated: Floats = np.stack(
        [w - x * p - y * q - z * r, x + w * p + y * r - z * q, y + w * q + z * p - x * r, z + w * r + x * q - y * p]
    )
    rotated /= np.sqrt(np.square(rotated).sum(axis=0))
    return rotated


def _rotation_matrix(attitude: Floats) -> Floats:
    """Return the rotation matrices (3, 3, …) from the body frame to the world frame."""
    w, x, y, z = attitude
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row) for row in rows])


def _to_body_frame(rotation: Floats, vectors: Floats) -> Floats:
    rotated: Floats = rotation[0] * vectors[0] + rotation[1] * vectors[1] + rotation[2] * vectors[2]
    return rotated


class Fleet:
    """All worlds, stepped sequentially in `workers` chunks; the results do not depend on their number."""

    def __init__(
        self, task: str, worlds: int, drones: int, seed: int, workers: int = 1, *, compiled: bool = True
    ) -> None:
        size = worlds // workers
        self.chunks = [Drones(task, size, drones, seed, i * size, compiled=compiled) for i in range(workers)]

    def observe(self) -> Floats:
        return np.concatenate([chunk.observe() for chunk in self.chunks])

    def state_dict(self) -> dict[str, Any]:
        return {"chunks": [chunk.state_dict() for chunk in self.chunks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for chunk, chunk_state in zip(self.chunks, state["chunks"], strict=True):
            chunk.load_state_dict(chunk_state)

    def step(self, actions: Floats) -> DroneStep:
        if len(self.chunks) == 1:
            return self.chunks[0].step(actions)
        split = np.split(actions, len(self.chunks))
        steps = [chunk.step(part) for chunk, part in zip(self.chunks, split, strict=True)]
        finished = [step.finished for step in steps]
        return DroneStep(
            obs=np.concatenate([step.obs for step in steps]),
            rewards=np.concatenate([step.rewards for step in steps]),
            dones=np.concatenate([step.dones for step in steps]),
            finished=FinishedEpisodes(
                returns=np.concatenate([episodes.returns for episodes in finished]),
                lengths=np.concatenate([episodes.lengths for episodes in finished]),
                success=np.concatenate([episodes.success for episodes in finished]),
                collision=np.concatenate([episodes.collision for episodes in finished]),
            ),
        )
