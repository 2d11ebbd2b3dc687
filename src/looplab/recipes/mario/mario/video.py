"""An episode to look at: GIF or animated PNG with Pillow, MP4 if imageio-ffmpeg is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError

Array = NDArray[np.uint8]
KINDS = (".gif", ".png", ".mp4")


@dataclass(frozen=True)
class Episode:
    steps: int
    reward: float
    """The sum over the steps."""
    info: dict[str, Any]
    """Of the last step."""
    over: bool
    """False: it was cut off at the greatest number of steps."""


def record(
    env: gym.Env[Any, Any],
    act: Callable[[Any], Any],
    path: str | Path,
    *,
    seed: int | None = None,
    most_steps: int = 5_000,
) -> Episode:
    """Play one episode, write its video, and tell what happened. `env` renders rgb_array; `act` maps observations."""
    if env.render_mode != "rgb_array":
        raise LabError("this environment gives no pictures", hint='make it with render_mode="rgb_array"')
    found: list[Episode] = []

    def play() -> Iterator[Array]:
        observation, info = env.reset(seed=seed)
        yield _picture(env)
        total, over, steps = 0.0, False, 0
        while not over and steps < most_steps:
            observation, reward, terminated, truncated, info = env.step(act(observation))
            total, over, steps = total + float(reward), bool(terminated or truncated), steps + 1
            yield _picture(env)
        found.append(Episode(steps, total, dict(info), over))

    save_video(play(), path, fps=float(env.metadata.get("render_fps", 15)))
    return found[0]


def save_video(pictures: Iterable[Array], path: str | Path, *, fps: float = 15) -> Path:
    """Write pictures (height, width, 3) as a video of the kind that the name's end says. Never half a file."""
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise LabError(f"{path.name} is no kind of video known here", hint=f"let the name end in {', '.join(KINDS)}")
    each = iter(pictures)
    first = next(each, None)
    if first is None:
        raise LabError("a video needs at least one picture", file=path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix.lower())
    os.close(handle)
    temporary = Path(name)
    try:
        if path.suffix.lower() == ".mp4":
            _mp4(first, each, temporary, fps)
        else:
            _pillow(first, each, temporary, fps)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _pillow(first: Array, rest: Iterator[Array], path: Path, fps: float) -> None:
    from PIL import Image

    def image(picture: Array) -> Any:
        whole = Image.fromarray(picture)
        # the console has 64 colours and shows 25 at once, so that a palette loses nothing
        return whole if path.suffix == ".png" else whole.quantize(64, method=Image.Quantize.FASTOCTREE)

    # GIF counts in hundredths of a second
    milliseconds = 1000 / fps if path.suffix == ".png" else 10 * max(2, round(100 / fps))
    others = map(image, rest)
    # Pillow goes twice over the pictures of a PNG
    following = list(others) if path.suffix == ".png" else others
    image(first).save(path, save_all=True, append_images=following, duration=milliseconds, loop=0)


def _mp4(first: Array, rest: Iterator[Array], path: Path, fps: float) -> None:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise LabError("MP4 needs imageio-ffmpeg", hint="pip install imageio-ffmpeg, or let the name end in .gif")
    height, width = first.shape[:2]
    writer = importlib.import_module("imageio_ffmpeg").write_frames(str(path), (width, height), fps=fps)
    writer.send(None)
    try:
        writer.send(np.ascontiguousarray(first))
        for picture in rest:
            writer.send(np.ascontiguousarray(picture))
    finally:
        writer.close()


def _picture(env: gym.Env[Any, Any]) -> Array:
    picture: Any = env.render()
    return np.asarray(picture, np.uint8)
