"""Scripts: fixed action sequences that are played in place of the policy when an episode starts.

    START:8,RIGHT+B:180

means: the action START for 8 env steps, then RIGHT and B together for 180. An action is named by its buttons, joined by
"+" in any order and case; without a number it lasts one step. NOOP is the action without buttons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError

Array = NDArray[Any]
HeldAction = tuple[int, int]
"""Index of an action, and the number of steps it lasts."""
NO_BUTTONS = frozenset({"NOOP"})


def parse_script(text: str, actions: Sequence[Sequence[str]]) -> list[HeldAction]:
    """Parse a script in the language above.

    Args:
        text: The script.
        actions: The buttons of each action of the env, by action index.

    Raises:
        LabError: A part of the script is malformed or names an unknown action.
    """
    index_of: dict[frozenset[str], int] = {}
    for index, buttons in enumerate(actions):
        index_of.setdefault(_normalise([buttons] if isinstance(buttons, str) else buttons), index)
    script = []
    for position, part in enumerate(text.split(","), start=1):
        name, colon, steps = (word.strip() for word in part.partition(":"))
        buttons = [button.strip() for button in name.split("+")]
        if not all(buttons):
            raise LabError(
                f"part {position} of the script {text!r} names no action", hint="example: START:8,RIGHT+B:180"
            )
        combination = _normalise(buttons)
        if combination not in index_of:
            known = ", ".join("+".join(sorted(names)) for names in index_of)
            raise LabError(f"part {position} of the script is the unknown action {name!r}", hint=f"known are {known}")
        if colon and not (steps.isdecimal() and int(steps) >= 1):
            raise LabError(f"part {position} of the script needs a number of steps of at least 1, not {steps!r}")
        script.append((index_of[combination], int(steps) if colon else 1))
    return script


def _normalise(buttons: Sequence[str]) -> frozenset[str]:
    return frozenset(button.upper() for button in buttons) or NO_BUTTONS


class ActionScript:
    """Plays a script in each env from the start of its episodes: of every episode, or only of the first."""

    def __init__(self, script: Sequence[HeldAction], num_envs: int, *, every_episode: bool = True) -> None:
        self._actions = np.repeat([action for action, _ in script], [steps for _, steps in script]).astype(np.int64)
        self._every_episode = every_episode
        self._positions = np.full(num_envs, len(self._actions), np.int64)
        self._episodes = np.zeros(num_envs, np.int64)

    def act(self, episode_starts: Array) -> tuple[Array, Array] | None:
        """Return the scripted actions of this step and the mask of the envs they apply to; None if there are none.

        Args:
            episode_starts: Whether each env starts an episode with this step, [envs].
        """
        length = len(self._actions)
        if episode_starts.any():
            restarting = episode_starts & (self._every_episode | (self._episodes == 0))
            self._positions[episode_starts] = length
            self._positions[restarting] = 0
            self._episodes += episode_starts
        playing = self._positions < length
        if not playing.any():
            return None
        actions = self._actions[np.minimum(self._positions, length - 1)]
        self._positions += playing
        return actions, playing

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._positions.copy(), "episodes": self._episodes.copy(), "actions": self._actions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; LabError if it is of another script or another number of envs."""
        if not np.array_equal(state["actions"], self._actions):
            raise LabError("this checkpoint was saved with another script", hint="resume with the same script")
        if len(state["at"]) != len(self._positions):
            raise LabError(
                f"this checkpoint was saved with a script for {len(state['at'])} envs, not {len(self._positions)}"
            )
        self._positions, self._episodes = np.array(state["at"]), np.array(state["episodes"])
