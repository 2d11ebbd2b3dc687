"""Find the action that moves Mario forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from looplab.errors import LabError


@dataclass(frozen=True)
class ForwardProbe:
    best_action: int
    """The action that moved furthest; the first of several."""
    distances: dict[int, float]
    """Change of x in pixels, by action."""


def probe_forward(make_env: Callable[[], gym.Env[Any, Any]], actions: Sequence[int], steps: int) -> ForwardProbe:
    """Hold each action for `steps` env steps from the same reset and compare how far it moves.

    Raises:
        LabError: There is no action to probe, or the infos have no x_pos.
    """
    if not actions:
        raise LabError("there is no action to probe")
    env = make_env()
    try:
        distances = {int(action): _distance(env, action, steps) for action in actions}
    finally:
        env.close()
    return ForwardProbe(max(distances, key=lambda action: distances[action]), distances)


def _distance(env: gym.Env[Any, Any], action: int, steps: int) -> float:
    """Return the change of x while an action is held, until the episode ends at the latest."""
    _, info = env.reset(seed=0)
    positions = [info["x_pos"]] if "x_pos" in info else []
    for _ in range(steps):
        _, _, terminated, truncated, info = env.step(action)
        if "x_pos" in info:
            positions.append(info["x_pos"])
        if terminated or truncated:
            break
    if len(positions) < 2:
        raise LabError(
            "the forward action cannot be probed: the infos have no x_pos",
            hint="wrap the env in RewardShaping with ram=RamAddresses() to read the position from memory",
        )
    return float(positions[-1]) - float(positions[0])
