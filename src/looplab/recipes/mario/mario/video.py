"""Videos of episodes: GIF or animated PNG by Pillow, MP4 if imageio-ffmpeg is installed."""

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
SUFFIXES = (".gif", ".png", ".mp4")


@dataclass(frozen=True)
class RecordedEpisode:
    steps: int
    reward: float
    """Sum over all steps."""
    info: dict[str, Any]
    """Info of the last step."""
    ended: bool
    """False if `max_steps` cut the recording off."""


def record_episode(
    env: gym.Env[Any, Any],
    act: Callable[[Any], Any],
    path: str | Path,
    *,
    seed: int | None = None,
    max_steps: int = 5_000,
) -> RecordedEpisode:
    """Play one episode and write its video.

    Args:
        env: Env with render_mode "rgb_array".
        act: Maps an observation to an action.
        path: Video file; its suffix decides the format.
        seed: Seed of the reset.
        max_steps: Steps after which the recording stops.

    Raises:
        LabError: The env does not render, or the format is not supported.
    """
    if env.render_mode != "rgb_array":
        raise LabError("this env does not render images", hint='make it with render_mode="rgb_array"')
    episodes: list[RecordedEpisode] = []

    def play() -> Iterator[Array]:
        obs, info = env.reset(seed=seed)
        yield _render(env)
        total, ended, steps = 0.0, False, 0
        while not ended and steps < max_steps:
            obs, reward, terminated, truncated, info = env.step(act(obs))
            total, ended, steps = total + float(reward), bool(terminated or truncated), steps + 1
            yield _render(env)
        episodes.append(RecordedEpisode(steps=steps, reward=total, info=dict(info), ended=ended))

    save_video(play(), path, fps=float(env.metadata.get("render_fps", 15)))
    return episodes[0]


def save_video(frames: Iterable[Array], path: str | Path, *, fps: float = 15) -> Path:
    """Write frames (height, width, 3) as a video in the format of the file's suffix, atomically."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise LabError(f"{path.name} is not a supported video format", hint=f"supported are {', '.join(SUFFIXES)}")
    remaining = iter(frames)
    first = next(remaining, None)
    if first is None:
        raise LabError("a video needs at least one frame", file=path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix.lower())
    os.close(handle)
    temporary = Path(name)
    try:
        if path.suffix.lower() == ".mp4":
            _write_mp4(first, remaining, temporary, fps)
        else:
            _write_pillow(first, remaining, temporary, fps)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _write_pillow(first: Array, rest: Iterator[Array], path: Path, fps: float) -> None:
    from PIL import Image

    def to_image(frame: Array) -> Any:
        image = Image.fromarray(frame)
        # The console has 64 colours and shows 25 at once, so a palette of 64 is lossless.
        return image if path.suffix == ".png" else image.quantize(64, method=Image.Quantize.FASTOCTREE)

    # GIF durations are multiples of 10 ms.
    duration_ms = 1000 / fps if path.suffix == ".png" else 10 * max(2, round(100 / fps))
    images = map(to_image, rest)
    # Pillow iterates twice over the frames of a PNG.
    append_images = list(images) if path.suffix == ".png" else images
    to_image(first).save(path, save_all=True, append_images=append_images, duration=duration_ms, loop=0)


def _write_mp4(first: Array, rest: Iterator[Array], path: Path, fps: float) -> None:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise LabError("MP4 needs imageio-ffmpeg", hint="pip install imageio-ffmpeg, or use a .gif file")
    height, width = first.shape[:2]
    writer = importlib.import_module("imageio_ffmpeg").write_frames(str(path), (width, height), fps=fps)
    writer.send(None)
    try:
        writer.send(np.ascontiguousarray(first))
        for frame in rest:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()


def _render(env: gym.Env[Any, Any]) -> Array:
    frame: Any = env.render()
    return np.asarray(frame, np.uint8)
