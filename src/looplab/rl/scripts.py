"""Scripts: actions that are decided beforehand, played in the policy's place at the beginning.

    START:8,RIGHT+B:180

means: START for 8 steps of the env, then RIGHT and B together for 180. Names are buttons joined by "+", in any order
and case; without a number it is one step. NOOP is the action without buttons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError

Array = NDArray[Any]
Play = tuple[int, int]
"""An action's number, and for how many steps."""
NOTHING = frozenset({"NOOP"})


def parse(text: str, actions: Sequence[Sequence[str]]) -> list[Play]:
    """A script in the language above. `actions`: the buttons of each action of the env, in the order of the numbers."""
    numbers: dict[frozenset[str], int] = {}
    for number, buttons in enumerate(actions):
        numbers.setdefault(_combination([buttons] if isinstance(buttons, str) else buttons), number)
    plays = []
    for place, token in enumerate(text.split(","), start=1):
        name, colon, count = (part.strip() for part in token.partition(":"))
        parts = [part.strip() for part in name.split("+")]
        if not all(parts):
            raise LabError(f"part {place} of the script {text!r} names no action", hint="write START:8,RIGHT+B:180")
        wanted = _combination(parts)
        if wanted not in numbers:
            known = ", ".join("+".join(sorted(buttons)) for buttons in numbers)
            raise LabError(f"part {place} of the script is the unknown action {name!r}", hint=f"known are {known}")
        if colon and not (count.isdecimal() and int(count) >= 1):
            raise LabError(f"part {place} of the script needs a number of steps from 1 on, not {count!r}")
        plays.append((numbers[wanted], int(count) if colon else 1))
    return plays


def forward(frames: int, action: int) -> list[Play]:
    """The simplest script: one action, held."""
    if frames < 1 or action < 0:
        raise LabError(f"a script of {frames} steps of action {action} cannot be played")
    return [(action, frames)]


class Script:
    """Acts in each env on its own from the beginning of an episode on: of every episode, or only of the first."""

    def __init__(self, plays: Sequence[Play], envs: int, *, every_episode: bool = True) -> None:
        self._actions = np.repeat([action for action, _ in plays], [steps for _, steps in plays]).astype(np.int64)
        self._every_episode = every_episode
        self._at = np.full(envs, len(self._actions), np.int64)
        self._episodes = np.zeros(envs, np.int64)

    def act(self, begins: Array) -> tuple[Array, Array] | None:
        """The actions for this step and where they hold; None: nowhere. `begins`: where an episode begins with it."""
        length = len(self._actions)
        if begins.any():
            again = begins & (self._every_episode | (self._episodes == 0))
            self._at[begins] = length
            self._at[again] = 0
            self._episodes += begins
        playing = self._at < length
        if not playing.any():
            return None
        actions = self._actions[np.minimum(self._at, length - 1)]
        self._at += playing
        return actions, playing

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at.copy(), "episodes": self._episodes.copy(), "actions": self._actions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not np.array_equal(state["actions"], self._actions):
            raise LabError("this was saved with another script", hint="go on with the same one")
        if len(state["at"]) != len(self._at):
            raise LabError(f"this was saved with a script for {len(state['at'])} envs, and here are {len(self._at)}")
        self._at, self._episodes = np.array(state["at"]), np.array(state["episodes"])


@dataclass(frozen=True)
class Probe:
    best: int
    """The action that led furthest; of several, the first."""
    moved: dict[int, float]
    """By action: how far x changed."""


def probe_forward(make_env: Callable[[], gym.Env[Any, Any]], actions: Sequence[int], frames: int) -> Probe:
    """Which action leads forwards? Each is held for `frames` steps from the same reset, or until the episode ends."""
    if not actions:
        raise LabError("there is no action to probe")
    env = make_env()
    try:
        moved = {int(action): _moved(env, action, frames) for action in actions}
    finally:
        env.close()
    return Probe(max(moved, key=lambda action: moved[action]), moved)


def _moved(env: gym.Env[Any, Any], action: int, frames: int) -> float:
    _, info = env.reset(seed=0)
    seen = [info["x_pos"]] if "x_pos" in info else []
    for _ in range(frames):
        _, _, terminated, truncated, info = env.step(action)
        if "x_pos" in info:
            seen.append(info["x_pos"])
        if terminated or truncated:
            break
    if len(seen) < 2:
        raise LabError(
            "no forward action can be found: the infos have no x_pos",
            hint="wrap the env in looplab.rl.shaping.Shaping with ram=Ram() if it has a console's memory",
        )
    return float(seen[-1]) - float(seen[0])


def _combination(buttons: Sequence[str]) -> frozenset[str]:
    return frozenset(button.upper() for button in buttons) or NOTHING
