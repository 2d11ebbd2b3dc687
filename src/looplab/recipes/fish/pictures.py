"""What a version shows of itself: curves as a PNG, an episode as a moving GIF. Needs pillow; matplotlib draws nicer."""

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
"""Pixels of a frame."""
EVERY = 5
"""Steps from one frame to the next."""
WATER, FISH, DEAD, PREDATOR = range(1, 5)
PALETTE = [255, 255, 255, 216, 233, 245, 20, 80, 160, 170, 170, 170, 200, 40, 40]
"""Red, green, blue of the ground, and of the four above."""


def save_episode(path: Path, act: Act, num_fish: int, seed: int, steps: int = STEPS) -> None:
    """A GIF of one episode, in twice its speed."""
    school = FishSchool(1, num_fish, seed=seed, restart=False)
    observations, frames = school.observe(), [_frame(school)]
    for number in range(1, steps + 1):
        step = school.step(act(observations))
        observations = step.observations
        if number % EVERY == 0:
            frames.append(_frame(school))
        if step.over[0]:
            break
    moving = io.BytesIO()
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:], duration=250, loop=0)
    _write(path, moving.getvalue())


def _frame(school: FishSchool) -> Image.Image:
    image = Image.new("P", (SIDE, SIDE))
    image.putpalette(PALETTE)
    draw = ImageDraw.Draw(image)
    scale = SIDE / (2.2 * RADIUS)

    def disc(x: float, y: float, radius: float, colour: int) -> None:
        middle, r = (SIDE / 2 + scale * x, SIDE / 2 - scale * y), radius * scale
        draw.ellipse((middle[0] - r, middle[1] - r, middle[0] + r, middle[1] + r), fill=colour)

    disc(0.0, 0.0, RADIUS, WATER)
    for (x, y), (ahead, up), alive in zip(
        school.position[:, 0].T.tolist(), school.heading[:, 0].T.tolist(), school.alive[0].tolist(), strict=True
    ):
        disc(x, y, 0.2, FISH if alive else DEAD)
        if alive:
            disc(x - 0.3 * ahead, y - 0.3 * up, 0.1, FISH)  # the tail
    disc(float(school.predator[0, 0]), float(school.predator[1, 0]), KILL, PREDATOR)
    return image


def save_curves(path: Path, rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> None:
    """One panel for each of the metrics, over the iterations."""
    curves = {name: [row[name] for row in rows] for name in names}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _write(path, _plain_curves(curves))
        return
    figure = Figure(figsize=(7, 2 * len(names)), layout="constrained")
    for place, (name, values) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(len(names), 1, place)
        axes.plot(range(1, len(values) + 1), values)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    axes.set_xlabel("iteration")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    _write(path, drawn.getvalue())


def _plain_curves(curves: Mapping[str, Sequence[float]]) -> bytes:
    width, height = 560, 140
    image = Image.new("RGB", (width, height * len(curves)), "white")
    draw = ImageDraw.Draw(image)
    for place, (name, values) in enumerate(curves.items()):
        top, low, high = place * height, min(values), max(values)
        draw.text((6, top + 4), f"{name}: {low:.4g} ... {high:.4g}, last {values[-1]:.4g}", fill="black")
        x = np.linspace(10, width - 10, len(values))
        y = top + height - 10 - (height - 40) * (np.array(values) - low) / ((high - low) or 1.0)
        draw.rectangle((9, top + 25, width - 9, top + height - 5), outline="lightgrey")
        draw.line([*zip(x.tolist(), y.tolist(), strict=True)], fill=(20, 80, 160), width=2)
    drawn = io.BytesIO()
    image.save(drawn, "PNG")
    return drawn.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
