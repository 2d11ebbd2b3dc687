"""Reward shaping by distance, score and time, with a scale that is annealed; and an end for episodes that stand still.

    raw    = distance_weight·max(dx, 0) + score_weight·Δscore + time_weight·Δtime
    scaled = scale·raw
    reward = env_weight·the env's reward + scaled (+ or − terminal_bonus, where an episode terminates)

The parts stay apart in the info: env_reward, shaping_raw, shaping_scaled, shaping_scale, shaping_dx, shaping_bonus.
What is not known in a step is not in its info. The position is the info's x_pos, or, without that, read from the RAM of
the console, and then put into the info.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import gymnasium as gym

from looplab.errors import LabError
from looplab.rl.snapshot import restore, snapshot

FIELDS = (
    "env_reward", "shaping_dx", "shaping_raw", "shaping_scaled", "shaping_scale", "shaping_bonus", "x_pos",
    "stagnation", "ram_parse_successes", "ram_parse_failures",
)  # fmt: skip
"""Everything that the wrapper puts into an info, for the `info_fields` of a vector env."""


@dataclass(frozen=True)
class Ram:
    """Where the console's memory has the position."""

    high: int = 0x6D
    """Address of the page: the position's upper byte."""
    low: int = 0x86
    """Address of the position within the page."""
    give_up: int = 100
    """Failures in a row after which the RAM is not asked any more."""


@dataclass(frozen=True)
class ShapingSettings:
    env_weight: float = 1.0
    """Of the env's own reward; env_reward in the info is without it."""
    distance_weight: float = 0.0125
    """For each step of x forwards."""
    score_weight: float = 0.0
    """For each point."""
    time_weight: float = 0.0
    """For each unit of the env's clock; where that runs down, a positive weight makes time cost something."""
    scale_start: float = 1.0
    scale_final: float = 1.0
    anneal_steps: int = 0
    """Steps of this env, over all episodes, until the final scale."""
    terminal_bonus: float = 0.0
    """Added where an episode terminates with flag_get, subtracted where it terminates without; never scaled."""
    max_jump: float = 100.0
    """A larger change of x in one step is no movement (a new life, a warp, a torn read of RAM) and counts as 0."""
    stagnation: int | None = None
    """Steps without getting further after which an episode is truncated."""
    ram: Ram | None = None
    """None: the RAM is not asked."""


@dataclass
class _Memory:
    """What the next step depends on: plain values, so that they can be a snapshot."""

    steps: int = 0
    x: float | None = None
    furthest: float | None = None
    still: int = 0
    score: float | None = None
    time: float | None = None
    place: list[float] | None = None
    successes: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    given_up: bool = False


class Shaping(gym.Wrapper[Any, Any, Any, Any]):
    """See the module. In the first step after a reset nothing has changed yet: dx, Δscore and Δtime are 0."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        settings: ShapingSettings | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """`tell` gets the hint that the RAM is given up, once; without it the hint goes to stderr."""
        super().__init__(env)
        self.settings = settings or ShapingSettings()
        if self.settings.stagnation is not None and self.settings.stagnation < 1:
            raise LabError(f"stagnation must be at least 1 step, not {self.settings.stagnation}", hint="None: never")
        if self.settings.anneal_steps < 0 or self.settings.max_jump <= 0:
            raise LabError("anneal_steps must not be below 0, and max_jump must be above 0")
        self._tell = tell
        self._memory = _Memory()

    @property
    def scale(self) -> float:
        """Of the next step."""
        s = self.settings
        done = min(1.0, self._memory.steps / s.anneal_steps) if s.anneal_steps else 1.0
        return s.scale_start * (1 - done) + s.scale_final * done

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        m = self._memory
        m.x = m.furthest = m.score = m.time = m.place = None
        m.still = 0
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, given, terminated, truncated, told = super().step(action)
        info = dict(told)  # an env may give the same dict again, which must not show what was put into it
        s, m = self.settings, self._memory
        scale, reward = self.scale, float(given)
        m.steps += 1
        dx = self._moved(info)
        raw = s.distance_weight * max(dx or 0.0, 0.0)
        raw += s.score_weight * self._change("score", info) + s.time_weight * self._change("time", info)
        scaled = scale * raw
        info |= {"env_reward": reward, "shaping_raw": raw, "shaping_scaled": scaled, "shaping_scale": scale}
        if dx is not None:
            info["shaping_dx"] = dx
        if s.terminal_bonus and terminated:
            bonus = info["shaping_bonus"] = s.terminal_bonus if info.get("flag_get") else -s.terminal_bonus
            scaled += bonus
        if s.stagnation is not None and m.still >= s.stagnation and not terminated:
            truncated = info["stagnation"] = True
        return observation, s.env_weight * reward + scaled, terminated, truncated, info

    def snapshot(self) -> dict[str, Any]:
        """The wrapper's own few values, and the env below in its own way."""
        return {"shaping": asdict(self._memory), "env": snapshot(self.env)}

    def restore(self, state: dict[str, Any]) -> None:
        restore(self.env, state["env"])
        known = {field.name for field in fields(_Memory)}
        self._memory = _Memory(**{name: value for name, value in state["shaping"].items() if name in known})

    def _moved(self, info: dict[str, Any]) -> float | None:
        """How x has changed; 0 where there is nothing to compare it with, None where it is not known."""
        s, m = self.settings, self._memory
        place = [float(info[name]) for name in ("life", "world", "stage") if info.get(name) is not None]
        if m.place is not None and place != m.place:
            m.x = m.furthest = m.time = None  # a new life, with a new clock
        m.place = place
        x = self._position(info)
        if x is None:
            return None
        dx = 0.0 if m.x is None else x - m.x
        if abs(dx) > s.max_jump:
            dx, m.furthest = 0.0, None
        m.x = x
        if m.furthest is None or x > m.furthest:
            m.furthest, m.still = x, 0
        else:
            m.still += 1
        return dx

    def _change(self, name: str, info: dict[str, Any]) -> float:
        if info.get(name) is None:
            return 0.0
        before, now = getattr(self._memory, name), float(info[name])
        setattr(self._memory, name, now)
        return 0.0 if before is None else now - before

    def _position(self, info: dict[str, Any]) -> float | None:
        if info.get("x_pos") is not None:
            return float(info["x_pos"])
        ram, m = self.settings.ram, self._memory
        if ram is None:
            return None
        x = None if m.given_up else self._read(ram)
        if x is not None:
            info["x_pos"] = x
        info["ram_parse_successes"], info["ram_parse_failures"] = m.successes, m.failures
        return x

    def _read(self, ram: Ram) -> float | None:
        m = self._memory
        try:
            memory = _ram(self.env.unwrapped)
            x = float(int(memory[ram.high]) << 8 | int(memory[ram.low]))  # ints: bytes of numpy would overflow
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            m.failures += 1
            m.failures_in_a_row += 1
            if m.failures_in_a_row >= ram.give_up:
                m.given_up = True
                self._hint(f"{type(error).__name__}: {error}")
            return None
        m.successes += 1
        m.failures_in_a_row = 0
        return x

    def _hint(self, error: str) -> None:
        text = (
            f"shaping: no x position from the RAM after {self._memory.failures} failures ({error}); it is not asked "
            "any more, so there is no reward for distance. Check the addresses, or let the env put x_pos into its info"
        )
        if self._tell is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._tell(text)


def _ram(env: Any) -> Any:
    """The memory of the console: the attribute `ram`, or what `get_ram()` gives."""
    memory = env.get_ram() if hasattr(env, "get_ram") else env.ram
    return memory() if callable(memory) else memory
