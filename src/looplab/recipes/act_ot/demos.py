"""Demonstrations of a made-up arm that carries a block to a plate, in two domains, always the same ones.

The source domain has many episodes. The target domain has few, under other colours and light, with moved cameras, and
with an arm that is a little slower and calibrated differently. A third set, of the target domain too, is held out: it
is neither trained nor tuned on. States and actions are raw: seven angles in degrees and the opening of the gripper in
millimetres. The sets are made once and kept as one .npz file.
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
"""Pixels of a camera's edge."""
OPEN, CLOSED = 40.0, 10.0

_ARM = np.random.default_rng(7)
_LINEAR = _ARM.normal(size=(7, 3))
_LINEAR *= 45.0 / np.linalg.norm(_LINEAR, axis=1, keepdims=True)  # degrees for a unit of the table, for every joint
_BENDS = _ARM.normal(0.0, 1.0, (7, 3))


@dataclass(frozen=True)
class Domain:
    """How one domain looks and moves."""

    table: tuple[float, float, float]
    """Colour of the background; colours run from 0 to 1."""
    block: tuple[float, float, float]
    """Colour of what is carried."""
    plate: tuple[float, float, float]
    """Colour of where it is carried to."""
    hand: tuple[float, float, float]
    """Colour of the gripper."""
    light: float
    """Brightness of all pixels."""
    shade: float
    """How much darker the right edge is than the left."""
    offset: tuple[float, float]
    """Pixels by which the cameras are moved."""
    slowness: float
    """How long a movement takes, against the source."""
    gain: float
    """How far a joint turns, against the source."""
    bias: float
    """Degrees that are added to every joint."""


SOURCE = Domain(
    (0.25, 0.27, 0.3), (0.85, 0.2, 0.15), (0.2, 0.6, 0.9), (0.9, 0.9, 0.9), 1.0, 0.0, (0.0, 0.0), 1.0, 1.0, 0.0
)
TARGET = Domain(
    (0.62, 0.55, 0.42), (0.2, 0.55, 0.2), (0.75, 0.3, 0.65), (0.15, 0.15, 0.2), 0.8, 0.35, (2.5, -2.0), 1.15, 1.03, 2.0
)


@dataclass(frozen=True)
class Demos:
    """Episodes, one behind the other; episode e is the frames `starts[e]` to `starts[e + 1]`."""

    images: Bytes
    """frames × cameras × 3 × SIZE × SIZE."""
    states: Floats
    """frames × 8."""
    actions: Floats
    """frames × 8: where the arm is told to be in the next frame."""
    starts: Ints
    """One more than there are episodes."""

    @property
    def episodes(self) -> int:
        return len(self.starts) - 1

    def trajectories(self) -> list[npt.NDArray[np.float64]]:
        """The states, episode by episode."""
        return np.split(self.states.astype(np.float64), self.starts[1:-1])

    def part(self, first: int, end: int) -> "Demos":
        """The episodes from `first` to before `end`."""
        frames = slice(self.starts[first], self.starts[end])
        starts = self.starts[first : end + 1] - self.starts[first]
        return Demos(self.images[frames], self.states[frames], self.actions[frames], starts)

    def chunks(self, frames: Ints, length: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """The next `length` actions from each frame, and which of them lie beyond the episode's end."""
        ends = self.starts[np.searchsorted(self.starts, frames, side="right")]
        wanted = frames[:, None] + np.arange(length)
        return self.actions[np.minimum(wanted, ends[:, None] - 1)], wanted >= ends[:, None]


def load_demos(folder: Path, source: int, target: int, held_out: int) -> tuple[Demos, Demos, Demos]:
    """The three sets, from the folder if they are there, else made and put there.

    Trainers that start at the same time make the same file, and each puts it there whole: the last one stays.
    """
    counts = {"source": source, "target": target, "held_out": held_out}
    about = json.dumps(counts).encode() + Path(__file__).read_bytes()  # once this file is changed, they are made anew
    path = folder / f"demos_{hashlib.sha256(about).hexdigest()[:12]}.npz"
    if not path.exists():
        made = {"source": make_demos(SOURCE, source, 1), "target": make_demos(TARGET, target, 2)}
        made["held_out"] = make_demos(TARGET, held_out, 3)
        arrays = {f"{name}_{key}": value for name, demos in made.items() for key, value in vars(demos).items()}
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
    with np.load(path) as kept:
        sets = [
            Demos(**{key: kept[f"{name}_{key}"] for key in ("images", "states", "actions", "starts")})
            for name in counts
        ]
    return sets[0], sets[1], sets[2]


def make_demos(domain: Domain, episodes: int, seed: int) -> Demos:
    """Episodes of one domain; the same arguments give the same pixels."""
    rng = np.random.default_rng(seed)
    images, states, actions, starts = [], [], [], [0]
    for _ in range(episodes):
        hand, grip, block, plate = _episode(rng, domain)
        state = np.column_stack([_joints(hand) * domain.gain + domain.bias, grip])
        images.append(_pictures(rng, domain, hand, block, plate)[:-1])
        states.append(state[:-1])
        actions.append(state[1:])
        starts.append(starts[-1] + len(state) - 1)
    return Demos(
        np.concatenate(images),
        np.concatenate(states).astype(np.float32),
        np.concatenate(actions).astype(np.float32),
        np.array(starts, np.int64),
    )


def _episode(rng: np.random.Generator, domain: Domain) -> tuple[npt.NDArray[np.float64], ...]:
    """Places of the hand, openings of the gripper, places of the block, frame by frame; and the place of the plate."""
    block = np.array([rng.uniform(-0.8, 0.8), rng.uniform(-0.8, 0.1), 0.05])
    plate = np.array([rng.uniform(-0.8, 0.8), rng.uniform(0.35, 0.85), 0.1])
    up = np.array([0.0, 0.0, 0.4])
    start = np.array([rng.uniform(-0.3, 0.3), rng.uniform(-0.2, 0.2), rng.uniform(0.7, 0.9)])
    stops = (  # where to, in how many frames, and the gripper there
        (block + up, 9, OPEN),
        (block, 5, OPEN),
        (block, 3, CLOSED),
        (block + up, 5, CLOSED),
        (plate + up, 9, CLOSED),
        (plate, 5, CLOSED),
        (plate, 3, OPEN),
    )
    pace = domain.slowness * rng.uniform(0.85, 1.15)
    places, grips = [start[None]], [np.array([OPEN])]
    for place, frames, grip in stops:
        t = np.linspace(0.0, 1.0, max(2, round(frames * pace)) + 1)[1:, None]
        smooth = t**3 * (10.0 - 15.0 * t + 6.0 * t * t)  # starts and ends at rest
        places.append(places[-1][-1] + smooth * (place - places[-1][-1]))
        grips.append(grips[-1][-1] + smooth[:, 0] * (grip - grips[-1][-1]))
    hand, gripper = np.concatenate(places), np.concatenate(grips)
    taken = np.flatnonzero(gripper == CLOSED)
    block = np.repeat(block[None], len(hand), axis=0)
    block[taken] = hand[taken]
    block[taken[-1] + 1 :] = plate
    return hand, gripper, block, plate


def _joints(hand: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Angles in degrees that hold the hand there; bent, so that they are no linear copy of the place."""
    angles: npt.NDArray[np.float64] = hand @ _LINEAR.T + 8.0 * np.sin(hand @ _BENDS.T)
    return angles


def _pictures(
    rng: np.random.Generator,
    domain: Domain,
    hand: npt.NDArray[np.float64],
    block: npt.NDArray[np.float64],
    plate: npt.NDArray[np.float64],
) -> Bytes:
    """What the three cameras see in every frame."""
    plates = np.repeat(plate[None], len(hand), axis=0)
    tints = {name: np.array(getattr(domain, name)) + rng.normal(0.0, 0.03, 3) for name in ("table", "block", "plate")}
    across = np.arange(SIZE, dtype=np.float64)
    light = domain.light * (1.0 - domain.shade * across / SIZE)
    views = []
    for camera in range(len(CAMERAS)):
        canvas = np.broadcast_to(tints["table"][:, None, None], (len(hand), 3, SIZE, SIZE)).copy()
        for place, radius, colour in (
            (plates, 4.5, tints["plate"]),
            (block, 3.0, tints["block"]),
            (hand, 1.8, np.array(domain.hand)),
        ):
            x, y = _seen(camera, place, hand)
            far = np.hypot(
                across[None, None, :] - x[:, None, None] - domain.offset[0],
                across[None, :, None] - y[:, None, None] - domain.offset[1],
            )
            cover = np.clip(radius + 0.5 - far, 0.0, 1.0)[:, None]  # the edge is soft, so that small moves show
            canvas += cover * (colour[:, None, None] - canvas)
        views.append(np.clip(canvas * light * 255.0, 0.0, 255.0).astype(np.uint8))
    return np.stack(views, axis=1)


def _seen(camera: int, place: npt.NDArray[np.float64], hand: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The pixel of a place, as x and y: from the front, from the side, and from the hand downwards."""
    middle = SIZE / 2
    if camera == 0:
        return np.stack([middle + 13.0 * place[:, 0], middle + 5.0 + 9.0 * place[:, 1] - 8.0 * place[:, 2]])
    if camera == 1:
        return np.stack([middle + 13.0 * place[:, 1], middle + 9.0 - 16.0 * place[:, 2] + 4.0 * place[:, 0]])
    seen = place - hand
    return np.stack([middle + 12.0 * seen[:, 0], middle + 12.0 * seen[:, 1] - 3.0 * seen[:, 2]])
