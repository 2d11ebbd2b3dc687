"""Synthetic demonstrations of a robot arm that carries a block to a plate, in two domains; deterministic.

The source domain has many episodes. The target domain has few, with other colours and light, shifted cameras, and an
arm that is slightly slower and calibrated differently. A third set, also of the target domain, is held out: it is used
neither for training nor for tuning. States and actions are raw: seven joint angles in degrees and the opening of the
gripper in millimetres. The sets are generated once and cached in one .npz file.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

CAMERAS = (
    "observation.images.third_person_cam_color",
    "observation.images.side_cam_color",
    "observation.images.ee_cam_color",
)
SIZE = 32
"""Width and height of an image, in pixels."""
OPEN, CLOSED = 40.0, 10.0
"""Opening of the gripper, in millimetres."""

_ARM_RNG = np.random.default_rng(7)
_LINEAR = _ARM_RNG.normal(size=(7, 3))
_LINEAR *= 45.0 / np.linalg.norm(_LINEAR, axis=1, keepdims=True)  # degrees per unit of length, for every joint
_NONLINEAR = _ARM_RNG.normal(0.0, 1.0, (7, 3))


@dataclass(frozen=True)
class Domain:
    """Appearance and dynamics of one domain."""

    table: tuple[float, float, float]
    """Background colour; RGB from 0 to 1."""
    block: tuple[float, float, float]
    """Colour of the block."""
    plate: tuple[float, float, float]
    """Colour of the plate."""
    hand: tuple[float, float, float]
    """Colour of the gripper."""
    light: float
    """Brightness factor."""
    shade: float
    """Relative darkening from the left to the right edge."""
    offset: tuple[float, float]
    """Camera shift (x, y), in pixels."""
    slowness: float
    """Duration of a movement, relative to the source."""
    gain: float
    """Joint angle gain, relative to the source."""
    bias: float
    """Joint angle offset, in degrees."""


SOURCE = Domain(
    table=(0.25, 0.27, 0.3), block=(0.85, 0.2, 0.15), plate=(0.2, 0.6, 0.9), hand=(0.9, 0.9, 0.9),
    light=1.0, shade=0.0, offset=(0.0, 0.0), slowness=1.0, gain=1.0, bias=0.0,
)  # fmt: skip
TARGET = Domain(
    table=(0.62, 0.55, 0.42), block=(0.2, 0.55, 0.2), plate=(0.75, 0.3, 0.65), hand=(0.15, 0.15, 0.2),
    light=0.8, shade=0.35, offset=(2.5, -2.0), slowness=1.15, gain=1.03, bias=2.0,
)  # fmt: skip


@dataclass(frozen=True)
class Demos:
    """Concatenated episodes; episode e consists of the frames `starts[e]` to `starts[e + 1]` (exclusive)."""

    images: Bytes
    """frames × cameras × 3 × SIZE × SIZE."""
    states: Floats
    """frames × 8."""
    actions: Floats
    """frames × 8: the commanded state of the next frame."""
    starts: Ints
    """First frame of every episode, and the number of frames at the end."""

    @property
    def episodes(self) -> int:
        return len(self.starts) - 1

    def trajectories(self) -> list[npt.NDArray[np.float64]]:
        """Return the states of each episode."""
        return np.split(self.states.astype(np.float64), self.starts[1:-1])

    def select_episodes(self, first: int, end: int) -> "Demos":
        """Return the episodes `first` to `end` (exclusive)."""
        frames = slice(self.starts[first], self.starts[end])
        starts = self.starts[first : end + 1] - self.starts[first]
        return Demos(self.images[frames], self.states[frames], self.actions[frames], starts)

    def chunks(self, frames: Ints, length: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the next `length` actions from each frame, and a mask of those beyond the end of the episode."""
        ends = self.starts[np.searchsorted(self.starts, frames, side="right")]
        indices = frames[:, None] + np.arange(length)
        return self.actions[np.minimum(indices, ends[:, None] - 1)], indices >= ends[:, None]


def load_demos(folder: Path, source: int, target: int, held_out: int) -> tuple[Demos, Demos, Demos]:
    """Load the three sets from the cache in `folder`; generate them first if they are missing.

    Safe with several trainers at once: each writes the same file atomically.
    """
    counts = {"source": source, "target": target, "held_out": held_out}
    cache_key = json.dumps(counts).encode() + Path(__file__).read_bytes()  # editing this file invalidates the cache
    path = folder / f"demos_{hashlib.sha256(cache_key).hexdigest()[:12]}.npz"
    if not path.exists():
        sets = {
            "source": make_demos(SOURCE, source, seed=1),
            "target": make_demos(TARGET, target, seed=2),
            "held_out": make_demos(TARGET, held_out, seed=3),
        }
        arrays = {f"{name}_{key}": value for name, demos in sets.items() for key, value in vars(demos).items()}
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{path.name}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    with np.load(path) as cached:
        loaded = [
            Demos(**{key: cached[f"{name}_{key}"] for key in ("images", "states", "actions", "starts")})
            for name in counts
        ]
    return loaded[0], loaded[1], loaded[2]


def make_demos(domain: Domain, episodes: int, seed: int) -> Demos:
    """Generate episodes of one domain. The same arguments produce the same pixels."""
    rng = np.random.default_rng(seed)
    images, states, actions, starts = [], [], [], [0]
    for _ in range(episodes):
        hand, gripper, block, plate = _simulate(rng, domain)
        state = np.column_stack([_joint_angles(hand) * domain.gain + domain.bias, gripper])
        images.append(_render(rng, domain, hand=hand, block=block, plate=plate)[:-1])
        states.append(state[:-1])
        actions.append(state[1:])
        starts.append(starts[-1] + len(state) - 1)
    return Demos(
        np.concatenate(images),
        np.concatenate(states).astype(np.float32),
        np.concatenate(actions).astype(np.float32),
        np.array(starts, np.int64),
    )


def _simulate(rng: np.random.Generator, domain: Domain) -> tuple[npt.NDArray[np.float64], ...]:
    """Return per frame the positions of the hand, the gripper openings and the positions of the block; and the position
    of the plate."""
    block = np.array([rng.uniform(-0.8, 0.8), rng.uniform(-0.8, 0.1), 0.05])
    plate = np.array([rng.uniform(-0.8, 0.8), rng.uniform(0.35, 0.85), 0.1])
    up = np.array([0.0, 0.0, 0.4])
    start = np.array([rng.uniform(-0.3, 0.3), rng.uniform(-0.2, 0.2), rng.uniform(0.7, 0.9)])
    waypoints = (  # position, frames to reach it, gripper opening there
        (block + up, 9, OPEN),
        (block, 5, OPEN),
        (block, 3, CLOSED),
        (block + up, 5, CLOSED),
        (plate + up, 9, CLOSED),
        (plate, 5, CLOSED),
        (plate, 3, OPEN),
    )
    pace = domain.slowness * rng.uniform(0.85, 1.15)
    positions, openings = [start[None]], [np.array([OPEN])]
    for position, frames, opening in waypoints:
        t = np.linspace(0.0, 1.0, max(2, round(frames * pace)) + 1)[1:, None]
        smooth = t**3 * (10.0 - 15.0 * t + 6.0 * t * t)  # minimum jerk: starts and ends at rest
        positions.append(positions[-1][-1] + smooth * (position - positions[-1][-1]))
        openings.append(openings[-1][-1] + smooth[:, 0] * (opening - openings[-1][-1]))
    hand, gripper = np.concatenate(positions), np.concatenate(openings)
    grasped = np.flatnonzero(gripper == CLOSED)
    block = np.repeat(block[None], len(hand), axis=0)
    block[grasped] = hand[grasped]
    block[grasped[-1] + 1 :] = plate
    return hand, gripper, block, plate


def _joint_angles(position: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the joint angles, in degrees, for a position of the hand; a nonlinear function of it."""
    angles: npt.NDArray[np.float64] = position @ _LINEAR.T + 8.0 * np.sin(position @ _NONLINEAR.T)
    return angles


def _render(
    rng: np.random.Generator,
    domain: Domain,
    *,
    hand: npt.NDArray[np.float64],
    block: npt.NDArray[np.float64],
    plate: npt.NDArray[np.float64],
) -> Bytes:
    """Render the images of the three cameras for every frame."""
    plates = np.repeat(plate[None], len(hand), axis=0)
    colours = {name: np.array(getattr(domain, name)) + rng.normal(0.0, 0.03, 3) for name in ("table", "block", "plate")}
    pixels = np.arange(SIZE, dtype=np.float64)
    light = domain.light * (1.0 - domain.shade * pixels / SIZE)
    views = []
    for camera in range(len(CAMERAS)):
        canvas = np.broadcast_to(colours["table"][:, None, None], (len(hand), 3, SIZE, SIZE)).copy()
        for position, radius, colour in (
            (plates, 4.5, colours["plate"]),
            (block, 3.0, colours["block"]),
            (hand, 1.8, np.array(domain.hand)),
        ):
            x, y = _project(camera, position, hand)
            distance = np.hypot(
                pixels[None, None, :] - x[:, None, None] - domain.offset[0],
                pixels[None, :, None] - y[:, None, None] - domain.offset[1],
            )
            alpha = np.clip(radius + 0.5 - distance, 0.0, 1.0)[:, None]  # anti-aliased, so that small motions show
            canvas += alpha * (colour[:, None, None] - canvas)
        views.append(np.clip(canvas * light * 255.0, 0.0, 255.0).astype(np.uint8))
    return np.stack(views, axis=1)


def _project(camera: int, position: npt.NDArray[np.float64], hand: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the pixel coordinates (x, y) of a position. Camera 0: front, 1: side, 2: on the hand, looking down."""
    centre = SIZE / 2
    if camera == 0:
        return np.stack([centre + 13.0 * position[:, 0], centre + 5.0 + 9.0 * position[:, 1] - 8.0 * position[:, 2]])
    if camera == 1:
        return np.stack([centre + 13.0 * position[:, 1], centre + 9.0 - 16.0 * position[:, 2] + 4.0 * position[:, 0]])
    relative = position - hand
    return np.stack([centre + 12.0 * relative[:, 0], centre + 12.0 * relative[:, 1] - 3.0 * relative[:, 2]])
