"""Plots of a version: learning curves as PNG, an episode as GIF. Needs pillow; uses matplotlib if installed."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from looplab.recipes.fish.evaluate import Act
    from looplab.recipes.fish.fish_env import KILL, RADIUS, STEPS, FishSchool
else:
    from evaluate import Act
    from fish_env import KILL, RADIUS, STEPS, FishSchool

SIDE = 200
"""Width and height of a frame, in pixels."""
EVERY = 5
"""Steps per frame."""
WATER, FISH, DEAD, PREDATOR = range(1, 5)
PALETTE = [255, 255, 255, 216, 233, 245, 20, 80, 160, 170, 170, 170, 200, 40, 40]
"""RGB of the background, then of the four above."""


def save_episode(path: Path, act: Act, num_fish: int, seed: int, steps: int = STEPS) -> None:
    """Save one episode as a GIF, at twice its speed."""
    school = FishSchool(1, num_fish, seed=seed, restart=False)
    obs, frames = school.observe(), [_draw_frame(school)]
    for step_number in range(1, steps + 1):
        step = school.step(act(obs))
        obs = step.obs
        if step_number % EVERY == 0:
            frames.append(_draw_frame(school))
        if step.dones[0]:
            break
    gif = io.BytesIO()
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], duration=250, loop=0)
    _write(path, gif.getvalue())


def _draw_frame(school: FishSchool) -> Image.Image:
    image = Image.new("P", (SIDE, SIDE))
    image.putpalette(PALETTE)
    draw = ImageDraw.Draw(image)
    scale = SIDE / (2.2 * RADIUS)

    def disc(x: float, y: float, radius: float, colour: int) -> None:
        centre, r = (SIDE / 2 + scale * x, SIDE / 2 - scale * y), radius * scale
        draw.ellipse((centre[0] - r, centre[1] - r, centre[0] + r, centre[1] + r), fill=colour)

    disc(0.0, 0.0, RADIUS, WATER)
    for (x, y), (dx, dy), alive in zip(
        school.position[:, 0].T.tolist(), school.heading[:, 0].T.tolist(), school.alive[0].tolist(), strict=True
    ):
        disc(x, y, 0.2, FISH if alive else DEAD)
        if alive:
            disc(x - 0.3 * dx, y - 0.3 * dy, 0.1, FISH)  # the tail
    disc(float(school.predator[0, 0]), float(school.predator[1, 0]), KILL, PREDATOR)
    return image


def save_curves(path: Path, rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> None:
    """Plot one panel per metric over the iterations."""
    curves = {name: [row[name] for row in rows] for name in names}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _write(path, _plain_curves(curves))
        return
    figure = Figure(figsize=(7, 2 * len(names)), layout="constrained")
    for index, (name, values) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(len(names), 1, index)
        axes.plot(range(1, len(values) + 1), values)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    axes.set_xlabel("iteration")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    _write(path, png.getvalue())


def _plain_curves(curves: Mapping[str, Sequence[float]]) -> bytes:
    width, height = 560, 140
    image = Image.new("RGB", (width, height * len(curves)), "white")
    draw = ImageDraw.Draw(image)
    for index, (name, values) in enumerate(curves.items()):
        top, low, high = index * height, min(values), max(values)
        draw.text((6, top + 4), f"{name}: {low:.4g} ... {high:.4g}, last {values[-1]:.4g}", fill="black")
        x = np.linspace(10, width - 10, len(values))
        y = top + height - 10 - (height - 40) * (np.array(values) - low) / ((high - low) or 1.0)
        draw.rectangle((9, top + 25, width - 9, top + height - 5), outline="lightgrey")
        draw.line([*zip(x.tolist(), y.tolist(), strict=True)], fill=(20, 80, 160), width=2)
    png = io.BytesIO()
    image.save(png, "PNG")
    return png.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
