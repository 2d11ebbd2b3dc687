"""Super Mario Bros. as a Gymnasium environment.

    env = MarioEnv(stages=((1, 1),), actions="simple")
    observation, info = env.reset(seed=0)          # uint8 (4, 84, 84): the last four pictures, grey
    observation, reward, terminated, truncated, info = env.step(1)

The reward is that of the well-known environment, v + c + d for each frame, each frame's sum within ±15:
v, how far Mario came in x; c, the ticks of the clock (0 or negative); d, −25 where he dies. The parts are in the
info as reward_x, reward_clock, reward_death, before that limit. An episode ends with a death or a won stage, with
`whole_game` only when there is no life left or the last castle is won.

START is not passed on: it would pause the game and its clock, and so a policy could stand still for ever.
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
from .cores import HEIGHT, WIDTH, make_core

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
"""The buttons of each action, by the name of the set."""

INFO_FIELDS = (
    "x_pos", "y_pos", "score", "coins", "time", "life", "world", "stage", "flag_get",
    "reward_x", "reward_clock", "reward_death",
)  # fmt: skip
"""The numbers in every info, for the `info_fields` of a vector env."""
SIZE = 84
LIMIT = 15.0
"""Of the reward of a frame."""
FASTEST = 5
"""Pixels a frame; Mario runs at 2.5. More is no movement but a new place."""
DEATH = -25


class MarioEnv(gym.Env[Array, Any]):
    """See the module. `snapshot` and `restore` are exact, also in another process with the same core."""

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
        stages: (world, stage) pairs; a reset chooses one of them, by its seed, or that in options["stage"].
        actions: the name of a set in ACTIONS, or the buttons of each action.
        frame_skip: frames for which an action is held; the picture is the brightest of the last two.
        frame_stack: pictures in an observation, the newest last.
        noops: up to so many frames without a button at the beginning, chosen by the seed.
        max_steps: steps after which an episode is truncated; None: only the game's own clock ends it.
        whole_game: on to the next life and the next stage.
        core, rom: see `cores.make_core`.
        """
        self.stages = [_stage(pair) for pair in stages]
        self.actions = ACTIONS.get(actions) if isinstance(actions, str) else [tuple(names) for names in actions]
        if not self.actions:
            raise LabError(f"{actions!r} is no set of actions", hint=f"known are {', '.join(ACTIONS)}")
        if not self.stages or frame_skip < 1 or frame_stack < 1 or noops < 0 or (max_steps or 1) < 1:
            raise LabError("a stage, and frame_skip, frame_stack and max_steps of at least 1, are needed")
        if render_mode not in (None, "rgb_array"):
            raise LabError(f"{render_mode!r} is no render_mode here", hint="rgb_array, or None")
        self._buttons = [_buttons(names) & ~game.START for names in self.actions]
        self._skip, self._noops, self._max_steps, self._whole = frame_skip, noops, max_steps, whole_game
        self.render_mode = render_mode
        self.metadata = {**self.metadata, "render_fps": round(60 / frame_skip)}
        self.action_space = gym.spaces.Discrete(len(self._buttons))
        self.observation_space = gym.spaces.Box(0, 255, (frame_stack, SIZE, SIZE), np.uint8)
        self.core = make_core(core, rom)
        self._stack: Array = np.zeros((frame_stack, SIZE, SIZE), np.uint8)
        self._picture: Array | None = None
        """The last frame in colours; kept only if it can be asked for."""
        self._x = self._time = self._steps = 0
        self._over = True

    @property
    def ram(self) -> bytes:
        return self.core.ram

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = self.stages[int(self.np_random.integers(len(self.stages)))]
        frames = 1 + int(self.np_random.integers(self._noops + 1))
        if options and "stage" in options:
            chosen = _stage(options["stage"])
        self.core.reset(*chosen)
        for _ in range(frames):
            self.core.step(0)
        ram = self.core.ram
        self._x, self._time, self._steps, self._over = game.x_position(ram), game.clock(ram), 0, False
        screen = self.core.screen
        self._stack[:] = grey(screen)
        self._keep(screen)
        return self._stack.copy(), {**game.info(ram), "reward_x": 0, "reward_clock": 0, "reward_death": 0}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._over:
            raise LabError("this episode is over, or has not begun", hint="call reset() before step()")
        core, buttons = self.core, self._buttons[int(action)]
        reward, moved, ticks, death = 0.0, 0, 0, 0
        won = terminated = False
        screen = before = None
        for frame in range(self._skip):
            core.step(buttons)
            ram = core.ram
            v, c, d = self._parts(ram)
            moved, ticks, death = moved + v, ticks + c, death + d
            reward += min(LIMIT, max(-LIMIT, v + c + d))
            flag = game.flag(ram)
            won = won or flag
            if self._whole:
                ram, terminated = self._go_on(ram, flag)
            elif d or flag:
                terminated = True
            else:
                ram = game.skip(core, ram)
            if terminated or frame >= self._skip - 2:
                before, screen = screen, core.screen
            if terminated:
                break
        assert screen is not None  # frame_skip is at least 1
        self._keep(screen)
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = grey(screen if before is None else np.maximum(before, screen))
        self._steps += 1
        truncated = not terminated and self._steps == self._max_steps
        self._over = terminated or truncated
        info = game.info(ram)
        info |= {"flag_get": won, "reward_x": moved, "reward_clock": ticks, "reward_death": death}
        return self._stack.copy(), reward, terminated, truncated, info

    def render(self) -> Any:
        return None if self._picture is None else self._picture.copy()

    def close(self) -> None:
        self.core.close()

    def snapshot(self) -> dict[str, Any]:
        """Plain values and arrays."""
        return {
            "core": self.core.name,
            "console": self.core.snapshot(),
            "stack": self._stack.copy(),
            "picture": None if self._picture is None else self._picture.copy(),
            "numbers": [self._x, self._time, self._steps],
            "over": self._over,
            "chance": json.dumps(self.np_random.bit_generator.state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["core"] != self.core.name:
            raise LabError(
                f"this snapshot is of the core {state['core']}, and here is {self.core.name}",
                hint=f"make the environment with core={state['core']!r}",
            )
        if state["stack"].shape != self._stack.shape:
            raise LabError(f"this snapshot has {len(state['stack'])} pictures in a stack, not {len(self._stack)}")
        self.core.restore(state["console"])
        self._stack = state["stack"].copy()
        self._picture = None if state["picture"] is None else state["picture"].copy()
        self._x, self._time, self._steps = state["numbers"]
        self._over = state["over"]
        self.np_random.bit_generator.state = json.loads(state["chance"])

    def _parts(self, ram: bytes) -> tuple[int, int, int]:
        """How far, how many ticks, and whether dead, since the last frame."""
        x, time = game.x_position(ram), game.clock(ram)
        v, c = x - self._x, min(0, time - self._time)
        self._x, self._time = x, time
        return v if -FASTEST <= v <= FASTEST else 0, c, DEATH if game.dying(ram) else 0

    def _go_on(self, ram: bytes, flag: bool) -> tuple[bytes, bool]:
        """To the next life or stage; the memory then, and whether there is none."""
        if game.dying(ram):
            ram = game.next_life(self.core)
        elif flag and ram[game.MODE] == game.WORLD_OVER and ram[game.WORLD] == 7:
            return ram, True  # the princess waits for a button for ever
        else:
            ram = game.skip(self.core, ram)
        return ram, ram[game.LIVES] == game.NO_LIVES

    def _keep(self, screen: Array) -> None:
        if self.render_mode is not None:
            self._picture = screen


def grey(screen: Array) -> Array:
    """84×84 from 224×240 colours, each pixel the mean of the area it covers.

    Rows go 8 to 3, columns 20 to 7. All products and sums are whole numbers below 2²⁴, which float32 holds exactly: the
    result is the same to the bit on every machine, in whatever order a BLAS adds.
    """
    eight = screen.reshape(HEIGHT // 8, 8, WIDTH * 3).astype(np.uint16)
    rows = np.empty((HEIGHT // 8, 3, WIDTH * 3), np.float32)
    rows[:, 0] = 3 * (eight[:, 0] + eight[:, 1]) + 2 * eight[:, 2]
    rows[:, 1] = 3 * (eight[:, 3] + eight[:, 4]) + eight[:, 2] + eight[:, 5]
    rows[:, 2] = 3 * (eight[:, 6] + eight[:, 7]) + 2 * eight[:, 5]
    sums = rows.reshape(-1, 60) @ _COLUMNS
    return (sums * (1 / (8 * 20 * 256)) + 0.5).astype(np.uint8).reshape(SIZE, SIZE)


def _columns() -> NDArray[np.float32]:
    """What each of 20 columns, in three colours, adds to each of 7: its share of the area by the eye's weights."""
    columns = np.arange(20)[:, None]
    wide = np.arange(7)[None, :]
    share = np.clip(np.minimum(7 * columns + 7, 20 * wide + 20) - np.maximum(7 * columns, 20 * wide), 0, None)
    weighted = share[:, None, :] * np.array([77, 150, 29])[None, :, None]
    return np.asarray(weighted.reshape(60, 7), np.float32)


_COLUMNS = _columns()


def _buttons(names: Sequence[str]) -> int:
    buttons = 0
    for name in names:
        if name.upper() not in (*game.BUTTONS, "NOOP"):
            raise LabError(f"{name!r} is no button", hint=f"known are {', '.join(game.BUTTONS)}")
        buttons |= 0 if name.upper() == "NOOP" else 1 << game.BUTTONS.index(name.upper())
    return buttons


def _stage(pair: Sequence[int]) -> tuple[int, int]:
    if len(pair) != 2 or not (1 <= pair[0] <= 8 and 1 <= pair[1] <= 4):
        raise LabError(f"{pair!r} is no stage", hint="a world from 1 to 8 and a stage from 1 to 4, as [1, 1]")
    return int(pair[0]), int(pair[1])
