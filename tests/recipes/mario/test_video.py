"""Videos: the file contains what was played."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from looplab.errors import LabError
from looplab.recipes.mario.mario.video import record_episode, save_video


class Counting(gym.Env[Any, Any]):
    """Renders its step count as a colour; episodes last five steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012
    observation_space = gym.spaces.Discrete(99)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        self.render_mode, self.at = render_mode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.at = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return self.at, 0.5, self.at == 5, False, {"at": self.at}

    def render(self) -> Any:
        return np.full((16, 24, 3), 40 * self.at, np.uint8)


def colours(path: Path) -> list[int]:
    with Image.open(path) as video:
        found = []
        for frame in range(getattr(video, "n_frames", 1)):
            video.seek(frame)
            found.append(int(np.asarray(video.convert("RGB"))[0, 0, 0]))
        return found


@pytest.mark.parametrize("kind", ["gif", "png"])
def test_an_episode_is_written_frame_by_frame(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"episode.{kind}"
    episode = record_episode(Counting(), lambda observation: 1, path)
    assert (episode.steps, episode.reward, episode.info, episode.ended) == (5, 2.5, {"at": 5}, True)
    assert colours(path) == [0, 40, 80, 120, 160, 200]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_long_recording_is_cut_off(tmp_path: Path) -> None:
    episode = record_episode(Counting(), lambda observation: 1, tmp_path / "a.gif", max_steps=3)
    assert (episode.steps, episode.ended) == (3, False)
    assert len(colours(tmp_path / "a.gif")) == 4


def test_a_failing_policy_leaves_no_file(tmp_path: Path) -> None:
    def fail(observation: Any) -> Any:
        raise ZeroDivisionError

    (tmp_path / "a.gif").write_bytes(b"before")
    with pytest.raises(ZeroDivisionError):
        record_episode(Counting(), fail, tmp_path / "a.gif")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.gif", b"before")]


def test_an_env_that_does_not_render_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="does not render"):
        record_episode(Counting(render_mode=None), lambda observation: 1, tmp_path / "a.gif")
    with pytest.raises(LabError, match=r"a\.avi"):
        save_video([np.zeros((4, 4, 3), np.uint8)], tmp_path / "a.avi")
    with pytest.raises(LabError, match="at least one frame"):
        save_video([], tmp_path / "a.gif")


@pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is not None, reason="imageio-ffmpeg is installed")
def test_mp4_without_ffmpeg_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="pip install imageio-ffmpeg"):
        save_video([np.zeros((16, 16, 3), np.uint8)], tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="imageio-ffmpeg is not installed")
def test_mp4_is_written_with_ffmpeg(tmp_path: Path) -> None:
    assert save_video([np.zeros((16, 16, 3), np.uint8)] * 3, tmp_path / "a.mp4").stat().st_size > 0
