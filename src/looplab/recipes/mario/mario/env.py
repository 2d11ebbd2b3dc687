"""Super Mario Bros. as a Gymnasium environment.

    env = MarioEnv(stages=((1, 1),), actions="simple")
    obs, info = env.reset(seed=0)                  # uint8 (4, 84, 84): the last four frames, greyscale
    obs, reward, terminated, truncated, info = env.step(1)

The reward is that of gym-super-mario-bros: v + c + d per frame, clipped to ±15, where v is the change of x, c the
change of the clock (0 or negative), and d is −25 if Mario dies. The info has the unclipped parts as reward_x,
reward_clock and reward_death. An episode ends with a death or a won stage; with `whole_game`, when no life is left or
the last castle is won.

START is not passed to the game: it would pause the game and its clock, and a policy could stall for ever.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError

from . import game
from .cores import SIZE, make_core

Array = NDArray[np.uint8]

_RIGHT = ((), ("RIGHT",), ("RIGHT", "A"), ("RIGHT", "B"), ("RIGHT", "A", "B"))
_SIMPLE = (*_RIGHT, ("A",), ("LEFT",))
_LEFT = (("LEFT", "A"), ("LEFT", "B"), ("LEFT", "A", "B"))
ACTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "right_only": _RIGHT,
    "simple": _SIMPLE,
    "complex": (*_SIMPLE, *_LEFT, ("DOWN",), ("UP",)),
    "extended": (
        (), ("START",), ("RIGHT",), ("RIGHT", "B"), ("RIGHT", "A"), ("RIGHT", "A", "B"),
        ("START", "RIGHT"), ("START", "RIGHT", "B"),
    ),
}  # fmt: skip
"""Buttons of each action, by the name of the action set."""

INFO_FIELDS = (
    "x_pos", "y_pos", "score", "coins", "time", "life", "world", "stage", "flag_get",
    "reward_x", "reward_clock", "reward_death",
)  # fmt: skip
"""Numeric fields of every info, for the `info_fields` of a vector env."""
MAX_FRAME_REWARD = 15.0
MAX_SPEED = 5
"""Pixels per frame; Mario runs at 2.5. A larger change of x is not movement but another place."""
DEATH_REWARD = -25


class MarioEnv(gym.Env[Array, Any]):
    """See the module. Snapshots are exact, also in another process with the same core."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (so in gymnasium)

    def __init__(
        self,
        *,
        stages: Sequence[Sequence[int]] = ((1, 1),),
        actions: str | Sequence[Sequence[str]] = "simple",
        frame_skip: int = 4,
        frame_stack: int = 4,
        noops: int = 0,
        max_steps: int | None = None,
        whole_game: bool = False,
        core: str = "auto",
        rom: str | Path | None = None,
        render_mode: str | None = None,
    ) -> None:
        """
        Args:
            stages: (world, stage) pairs; a reset chooses one by its seed, or takes options["stage"].
            actions: Name of a set in ACTIONS, or the buttons of each action.
            frame_skip: Frames that an action is held; the observation is the pixel-wise maximum of the last two.
            frame_stack: Frames in an observation, the newest last.
            noops: Maximum number of no-op frames after a reset, chosen by the seed.
            max_steps: Steps after which an episode is truncated; None: only the game's own clock ends it.
            whole_game: Continue with the next life and the next stage.
            core: Emulator, see `cores.make_core`.
            rom: File of the game, see `cores.make_core`.
            render_mode: "rgb_array" or None.

        Raises:
            LabError: An argument is invalid, or the emulator or the game is missing.
        """
        self.stages = [_check_stage(pair) for pair in stages]
        self.actions = ACTIONS.get(actions) if isinstance(actions, str) else [tuple(names) for names in actions]
        if not self.actions:
            raise LabError(f"{actions!r} is not an action set", hint=f"known are {', '.join(ACTIONS)}")
        if not self.stages or frame_skip < 1 or frame_stack < 1 or noops < 0 or (max_steps or 1) < 1:
            raise LabError(
                "stages must not be empty; frame_skip, frame_stack and max_steps must be at least 1, noops at least 0"
            )
        if render_mode not in (None, "rgb_array"):
            raise LabError(f"render_mode {render_mode!r} is not supported", hint="use rgb_array, or None")
        self._buttons = [_button_mask(names) & ~game.START for names in self.actions]
        self._frame_skip, self._noops, self._max_steps, self._whole_game = frame_skip, noops, max_steps, whole_game
        self.render_mode = render_mode
        self.metadata = {**self.metadata, "render_fps": round(60 / frame_skip)}
        self.action_space = gym.spaces.Discrete(len(self._buttons))
        self.observation_space = gym.spaces.Box(0, 255, (frame_stack, SIZE, SIZE), np.uint8)
        self._core_name, self._rom = core, rom
        self.core = make_core(core, rom)
        self._stack: Array = np.zeros((frame_stack, SIZE, SIZE), np.uint8)
        self._last_screen: Array | None = None
        """The last frame in colour; None unless the env renders."""
        self._x = self._time = self._steps = 0
        self._ended = True

    @property
    def ram(self) -> bytes:
        """The console's memory."""
        return self.core.ram

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = self.stages[int(self.np_random.integers(len(self.stages)))]
        frames = 1 + int(self.np_random.integers(self._noops + 1))
        if options and "stage" in options:
            chosen = _check_stage(options["stage"])
        self.core.reset(*chosen)
        for frame in range(frames):
            self.core.step(0, frame == frames - 1)
        ram = self.core.ram
        self._x, self._time, self._steps, self._ended = game.x_position(ram), game.clock(ram), 0, False
        self._stack[:] = self.core.grey(self.core.picture)
        self._store_screen()
        return self._stack.copy(), {**game.read_info(ram), "reward_x": 0, "reward_clock": 0, "reward_death": 0}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._ended:
            raise LabError("this episode has ended or has not started", hint="call reset() before step()")
        core, buttons = self.core, self._buttons[int(action)]
        reward, moved, ticks, death = 0.0, 0, 0, 0
        won = terminated = False
        picture = last_picture = None
        for frame in range(self._frame_skip):
            core.step(buttons, frame >= self._frame_skip - 2)
            ram = core.ram
            v, c, d = self._reward_parts(ram)
            moved, ticks, death = moved + v, ticks + c, death + d
            reward += min(MAX_FRAME_REWARD, max(-MAX_FRAME_REWARD, v + c + d))
            won_now = game.stage_won(ram)
            won = won or won_now
            if self._whole_game:
                ram, terminated = self._continue_game(ram, won_now)
            elif d or won_now:
                terminated = True
            else:
                ram = game.skip_transition(core, ram)
            if terminated or frame >= self._frame_skip - 2:
                last_picture, picture = picture, core.picture
            if terminated:
                break
        assert picture is not None  # frame_skip is at least 1
        self._store_screen()
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = core.grey(picture, last_picture)
        self._steps += 1
        truncated = not terminated and self._steps == self._max_steps
        self._ended = terminated or truncated
        info = game.read_info(ram)
        info |= {"flag_get": won, "reward_x": moved, "reward_clock": ticks, "reward_death": death}
        return self._stack.copy(), reward, terminated, truncated, info

    def render(self) -> Any:
        return None if self._last_screen is None else self._last_screen.copy()

    def close(self) -> None:
        self.core.close()

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain values and arrays."""
        return {
            "core": self.core.name,
            "console": self.core.snapshot(),
            "stack": self._stack.copy(),
            "picture": None if self._last_screen is None else self._last_screen.copy(),
            "numbers": [self._x, self._time, self._steps],
            "over": self._ended,
            "chance": json.dumps(self.np_random.bit_generator.state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["core"] != self.core.name and self._core_name == "auto":  # the snapshot decides
            core = make_core(state["core"], self._rom)
            self.core.close()
            self.core = core
        if state["core"] != self.core.name:
            raise LabError(
                f"this snapshot was taken with the core {state['core']}, not {self.core.name}",
                hint=f"make the environment with core={state['core']!r}",
            )
        if state["stack"].shape != self._stack.shape:
            raise LabError(f"this snapshot has {len(state['stack'])} stacked frames, not {len(self._stack)}")
        self.core.restore(state["console"])
        self._stack = state["stack"].copy()
        self._last_screen = None if state["picture"] is None else state["picture"].copy()
        self._x, self._time, self._steps = state["numbers"]
        self._ended = state["over"]
        self.np_random.bit_generator.state = json.loads(state["chance"])

    def _reward_parts(self, ram: bytes) -> tuple[int, int, int]:
        """Return the parts of this frame's reward: movement, clock, death."""
        x, time = game.x_position(ram), game.clock(ram)
        v, c = x - self._x, min(0, time - self._time)
        self._x, self._time = x, time
        return v if -MAX_SPEED <= v <= MAX_SPEED else 0, c, DEATH_REWARD if game.is_dying(ram) else 0

    def _continue_game(self, ram: bytes, won: bool) -> tuple[bytes, bool]:
        """Skip to the next life or stage; return the memory then, and whether the game is over."""
        if game.is_dying(ram):
            ram = game.skip_death(self.core)
        elif won and ram[game.MODE] == game.WORLD_OVER and ram[game.WORLD] == 7:
            return ram, True  # the final screen waits for a button for ever
        else:
            ram = game.skip_transition(self.core, ram)
        return ram, ram[game.LIVES] == game.NO_LIVES

    def _store_screen(self) -> None:
        if self.render_mode is not None:
            self._last_screen = self.core.screen


def _button_mask(names: Sequence[str]) -> int:
    """Return the buttons as a byte, see `game.BUTTONS`."""
    buttons = 0
    for name in names:
        if name.upper() not in (*game.BUTTONS, "NOOP"):
            raise LabError(f"{name!r} is not a button", hint=f"known are {', '.join(game.BUTTONS)}")
        buttons |= 0 if name.upper() == "NOOP" else 1 << game.BUTTONS.index(name.upper())
    return buttons


def _check_stage(pair: Sequence[int]) -> tuple[int, int]:
    if len(pair) != 2 or not (1 <= pair[0] <= 8 and 1 <= pair[1] <= 4):
        raise LabError(
            f"{pair!r} is not a stage", hint="use a world from 1 to 8 and a stage from 1 to 4, for example [1, 1]"
        )
    return int(pair[0]), int(pair[1])
