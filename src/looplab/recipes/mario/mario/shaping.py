"""Reward shaping by distance, score and time with an annealed scale, and truncation of episodes without progress.

    raw    = distance_weight·max(dx, 0) + score_weight·Δscore + time_weight·Δtime
    scaled = scale·raw
    reward = env_weight·(reward of the env) + scaled ± terminal_bonus (in terminal steps)

The info keeps the parts apart: env_reward, shaping_raw, shaping_scaled, shaping_scale, shaping_dx, shaping_bonus. What
is unknown in a step is missing from its info. The position is x_pos of the info; if that is missing, it is read from
the console's RAM and added to the info.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import gymnasium as gym

from looplab.errors import LabError
from looplab.rl.snapshot import restore, snapshot

SHAPING_INFO_FIELDS = (
    "env_reward", "shaping_dx", "shaping_raw", "shaping_scaled", "shaping_scale", "shaping_bonus", "x_pos",
    "stagnation", "ram_parse_successes", "ram_parse_failures",
)  # fmt: skip
"""All info fields that the wrapper adds, for the `info_fields` of a vector env."""


@dataclass(frozen=True)
class RamAddresses:
    """Where the console's memory holds the position."""

    high: int = 0x6D
    """Address of the page, the upper byte of the position."""
    low: int = 0x86
    """Address of the position within the page."""
    max_failures: int = 100
    """Consecutive failures after which the RAM is no longer read."""


@dataclass(frozen=True)
class ShapingSettings:
    env_weight: float = 1.0
    """Weight of the env's own reward; env_reward in the info is unweighted."""
    distance_weight: float = 0.0125
    """Reward per pixel forward."""
    score_weight: float = 0.0
    """Reward per point of the score."""
    time_weight: float = 0.0
    """Reward per unit of the game's clock; the clock runs down, so a positive weight makes time cost reward."""
    scale_start: float = 1.0
    scale_final: float = 1.0
    anneal_steps: int = 0
    """Steps of this env, over all episodes, until `scale_final`."""
    terminal_bonus: float = 0.0
    """Added if an episode terminates with flag_get, subtracted if it terminates without; never scaled."""
    max_jump: float = 100.0
    """Pixels; a larger change of x in one step is not movement (new life, warp, torn RAM read) and counts as 0."""
    stagnation: int | None = None
    """Steps without progress after which an episode is truncated; None: never."""
    ram: RamAddresses | None = None
    """None: never read the RAM."""


@dataclass
class _ShapingState:
    """What the next step depends on, as plain values for snapshots, whose keys these names are."""

    steps: int = 0
    x: float | None = None
    furthest: float | None = None
    still: int = 0
    """Steps since `furthest` last grew."""
    score: float | None = None
    time: float | None = None
    place: list[float] | None = None
    """Life, world and stage."""
    successes: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    given_up: bool = False


class RewardShaping(gym.Wrapper[Any, Any, Any, Any]):
    """See the module. In the first step after a reset, dx, Δscore and Δtime are 0."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        settings: ShapingSettings | None = None,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        """
        Args:
            env: The env to wrap.
            settings: Weights and limits; None for the defaults.
            warn: Receives the one warning that the RAM is no longer read; None prints it to stderr.
        """
        super().__init__(env)
        self.settings = settings or ShapingSettings()
        if self.settings.stagnation is not None and self.settings.stagnation < 1:
            raise LabError(
                f"stagnation must be at least 1 step, not {self.settings.stagnation}", hint="None disables it"
            )
        if self.settings.anneal_steps < 0 or self.settings.max_jump <= 0:
            raise LabError("anneal_steps must not be negative, and max_jump must be positive")
        self._warn = warn
        self._state = _ShapingState()

    @property
    def scale(self) -> float:
        """Scale of the next step."""
        s = self.settings
        progress = min(1.0, self._state.steps / s.anneal_steps) if s.anneal_steps else 1.0
        return s.scale_start * (1 - progress) + s.scale_final * progress

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        state = self._state
        state.x = state.furthest = state.score = state.time = state.place = None
        state.still = 0
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, env_reward, terminated, truncated, env_info = super().step(action)
        info = dict(env_info)  # an env may return the same dict every time, which must not be changed
        s, state = self.settings, self._state
        scale, reward = self.scale, float(env_reward)
        state.steps += 1
        dx = self._update_position(info)
        raw = s.distance_weight * max(dx or 0.0, 0.0)
        raw += s.score_weight * self._update_counter("score", info) + s.time_weight * self._update_counter("time", info)
        scaled = scale * raw
        info |= {"env_reward": reward, "shaping_raw": raw, "shaping_scaled": scaled, "shaping_scale": scale}
        if dx is not None:
            info["shaping_dx"] = dx
        if s.terminal_bonus and terminated:
            bonus = info["shaping_bonus"] = s.terminal_bonus if info.get("flag_get") else -s.terminal_bonus
            scaled += bonus
        if s.stagnation is not None and state.still >= s.stagnation and not terminated:
            truncated = info["stagnation"] = True
        return obs, s.env_weight * reward + scaled, terminated, truncated, info

    def snapshot(self) -> dict[str, Any]:
        """Return the wrapper's own values and a snapshot of the wrapped env."""
        return {"shaping": asdict(self._state), "env": snapshot(self.env)}

    def restore(self, state: dict[str, Any]) -> None:
        restore(self.env, state["env"])
        known = {field.name for field in fields(_ShapingState)}
        self._state = _ShapingState(**{name: value for name, value in state["shaping"].items() if name in known})

    def _update_position(self, info: dict[str, Any]) -> float | None:
        """Return the change of x: 0 if there is nothing to compare it with, None if x is unknown."""
        s, state = self.settings, self._state
        place = [float(info[name]) for name in ("life", "world", "stage") if info.get(name) is not None]
        if state.place is not None and place != state.place:
            state.x = state.furthest = state.time = None  # a new life has a new clock
        state.place = place
        x = self._position(info)
        if x is None:
            return None
        dx = 0.0 if state.x is None else x - state.x
        if abs(dx) > s.max_jump:
            dx, state.furthest = 0.0, None
        state.x = x
        if state.furthest is None or x > state.furthest:
            state.furthest, state.still = x, 0
        else:
            state.still += 1
        return dx

    def _update_counter(self, name: str, info: dict[str, Any]) -> float:
        """Return the change of the score or the time; 0 if it is unknown."""
        if info.get(name) is None:
            return 0.0
        before, now = getattr(self._state, name), float(info[name])
        setattr(self._state, name, now)
        return 0.0 if before is None else now - before

    def _position(self, info: dict[str, Any]) -> float | None:
        """Return x from the info or, if configured, from the RAM; None if it is unknown."""
        if info.get("x_pos") is not None:
            return float(info["x_pos"])
        addresses, state = self.settings.ram, self._state
        if addresses is None:
            return None
        x = None if state.given_up else self._read_ram(addresses)
        if x is not None:
            info["x_pos"] = x
        info["ram_parse_successes"], info["ram_parse_failures"] = state.successes, state.failures
        return x

    def _read_ram(self, addresses: RamAddresses) -> float | None:
        state = self._state
        try:
            ram = _ram_of(self.env.unwrapped)
            x = float(int(ram[addresses.high]) << 8 | int(ram[addresses.low]))  # int: NumPy bytes would overflow
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            state.failures += 1
            state.failures_in_a_row += 1
            if state.failures_in_a_row >= addresses.max_failures:
                state.given_up = True
                self._warn_given_up(f"{type(error).__name__}: {error}")
            return None
        state.successes += 1
        state.failures_in_a_row = 0
        return x

    def _warn_given_up(self, error: str) -> None:
        text = (
            f"shaping: x could not be read from the RAM, {self._state.failures} failures ({error}); it is no longer "
            "read, so distance earns no reward. Check the addresses, or let the env report x_pos in its info"
        )
        if self._warn is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._warn(text)


def _ram_of(env: Any) -> Any:
    """Return the console's memory: the attribute `ram` or the result of `get_ram()`."""
    ram = env.get_ram() if hasattr(env, "get_ram") else env.ram
    return ram() if callable(ram) else ram
