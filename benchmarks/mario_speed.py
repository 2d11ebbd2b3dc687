"""MarioEnv compared with gym-super-mario-bros in Gymnasium's AsyncVectorEnv, in frames of the game per second.

    python benchmarks/mario_speed.py [--quick]

  ours    MarioEnv on the fastest core (nes.c), in SupervisedVectorEnv with one worker per core
  fceumm  the same on the core of stable-retro, which nes.c replaces
  async   gym-super-mario-bros 7.4 on nes-py 8, one process per env, patched to run on NumPy 2, behind an adapter to
          Gymnasium. Its greyscale 84×84 frames are computed by our function, which is faster than the usual ones.
Both hold an action for 4 frames, stack 4 frames, compute the full reward and info of every step, and reset when an
episode ends. Both are built first and measured in turn, so that noise of the machine affects both; figures are medians
over the rounds, the ratio is the median of the ratios within a round. The last line is JSON; `mario_x_async` is the
smaller of the ratios with 2 and with 8 envs, `mario_x_fceumm` the same against fceumm.

Before that, the cores play the same actions, to check that they play the same game: nes.c and fceumm to the bit
(`parity_exact`), nes-py within the differences that are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import time
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # two threads per process would only slow both down

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
from gymnasium.vector import AsyncVectorEnv  # noqa: E402

from looplab.recipes.mario.mario.cores import SIZE, to_grey  # noqa: E402
from looplab.recipes.mario.mario.env import ACTIONS, INFO_FIELDS, MarioEnv  # noqa: E402
from looplab.rl import SupervisedVectorEnv  # noqa: E402

CORES = len(os.sched_getaffinity(0))
SKIP = 4


class WellKnown(gym.Env[Any, Any]):
    """gym-super-mario-bros 7.4 (1-1), patched from outside, with the usual preprocessing."""

    metadata = {"render_modes": []}  # noqa: RUF012 (so in gymnasium)

    def __init__(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            import nes_py._rom as roms
            import nes_py.nes_env as console
            from gym_super_mario_bros.smb_env import SuperMarioBrosEnv
        roms.ROM.header = property(lambda file: file.raw_data[:16].astype(np.int64))
        plain = console.NESEnv._ram_buffer
        console.NESEnv._ram_buffer = lambda env: memoryview(plain(env)).cast("B")  # Python's ints do not overflow
        try:
            self.game = SuperMarioBrosEnv(target=(1, 1))
        finally:
            console.NESEnv._ram_buffer = plain
        keys = {"A": 1, "B": 2, "LEFT": 64, "RIGHT": 128}
        self.buttons = [sum(keys[name] for name in names) for names in ACTIONS["simple"]]
        self.action_space = gym.spaces.Discrete(len(self.buttons))
        self.observation_space = gym.spaces.Box(0, 255, (4, SIZE, SIZE), np.uint8)
        self.stack = np.zeros((4, SIZE, SIZE), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.stack[:] = self.picture(self.game.reset())
        return self.stack.copy(), self.game._get_info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total, over, info, before, screen = 0.0, False, {}, None, None
        for frame in range(SKIP):
            shown, reward, over, info = self.game.step(self.buttons[int(action)])
            total += reward
            if over or frame >= SKIP - 2:
                before, screen = screen, np.ascontiguousarray(shown[8:232, 8:248])
            if over:
                break
        self.stack[:-1] = self.stack[1:]
        self.stack[-1] = to_grey(screen if before is None else np.maximum(before, screen))
        return self.stack.copy(), total, over, False, info

    def picture(self, shown: Any) -> Any:
        return to_grey(np.ascontiguousarray(shown[8:232, 8:248]))


def ours(count: int, core: str = "auto") -> Any:
    makers = [lambda: MarioEnv(stages=((1, 1),), actions="simple", core=core)] * count
    return SupervisedVectorEnv(makers, workers=min(CORES, count), info_fields=INFO_FIELDS)


def theirs(count: int) -> Any:
    return AsyncVectorEnv([WellKnown] * count)


def speed(venv: Any, actions: Any, seconds: float) -> float:
    """Return frames of the game per second, over all envs."""
    venv.step(actions[0])
    done, began = 0, time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        venv.step(actions[done % len(actions)])
        done += 1
    return done * venv.num_envs * SKIP / now


def side_by_side(count: int, rounds: int, seconds: float) -> dict[str, float]:
    venvs = {"ours": ours(count), "fceumm": ours(count, "fceumm"), "async": theirs(count)}
    chance = np.random.default_rng(0)
    actions = chance.integers(len(ACTIONS["simple"]), size=(512, count))
    for venv in venvs.values():
        venv.reset(seed=0)
    table = [{name: speed(venv, actions, seconds) for name, venv in venvs.items()} for _ in range(rounds)]
    for venv in venvs.values():
        venv.close()
    found = {name: statistics.median(row[name] for row in table) for name in venvs}
    found["ratio"], found["core_ratio"] = (
        statistics.median(row["ours"] / row[other] for row in table) for other in ("async", "fceumm")
    )
    print(
        f"{count} envs: ours {found['ours']:,.0f}, with fceumm {found['fceumm']:,.0f}, async {found['async']:,.0f} "
        f"frames/s, {found['core_ratio']:.2f}× and {found['ratio']:.2f}×"
    )
    return found


def path(core: str, actions: list[int]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the infos and observations from the start of 1-1 until the actions or the episode end."""
    env = MarioEnv(core=core, actions="simple")
    observation, info = env.reset(seed=0)
    infos, observations = [info], [observation.tobytes()]
    for action in actions:
        observation, _, terminated, _, info = env.step(action)
        infos.append(info)
        observations.append(observation.tobytes())
        if terminated:
            break
    env.close()
    return infos, observations


def parity(games: int = 6, steps: int = 200) -> dict[str, float]:
    """Compare the cores over the same actions, as long as both play."""
    gaps = dict.fromkeys(("x_pos", "time", "score"), 0)
    alike = compared = exact = 0
    for seed in range(games):
        chance = np.random.default_rng(seed)
        held = chance.integers(2, 10, size=steps)
        actions = np.repeat(chance.choice([1, 3, 4, 4, 4], size=steps), held)[:steps].tolist()
        played = path("auto", actions)
        exact += played == path("fceumm", actions)
        one, other = played[0], path("nes-py", actions)[0]
        pairs = list(zip(one, other, strict=False))
        compared += len(pairs)
        alike += abs(len(one) - len(other)) <= 1
        gaps = {name: max(gap, *(abs(a[name] - b[name]) for a, b in pairs)) for name, gap in gaps.items()}
    print(
        f"parity: {compared} steps in {games} games; with fceumm, {exact} games are the same to the bit; with nes-py,"
    )
    print(f"  largest differences {gaps}, {alike} games end within a step")
    ratios = {"parity_alike": alike / games, "parity_exact": exact / games}
    return {f"parity_{name}_gap": float(gap) for name, gap in gaps.items()} | ratios


def measure(quick: bool = False) -> dict[str, float]:
    found = parity(2 if quick else 6)
    for count in (2,) if quick else (2, 8):
        figures = side_by_side(count, 5 if quick else 7, 0.6 if quick else 3.0)
        found |= {
            f"mario{count}_frames": figures["ours"],
            f"mario{count}_async_frames": figures["async"],
            f"mario{count}_x_async": figures["ratio"],
            f"mario{count}_x_fceumm": figures["core_ratio"],
        }
    for other in ("async", "fceumm"):
        found[f"mario_x_{other}"] = min(found[f"mario2_x_{other}"], found.get(f"mario8_x_{other}", math.inf))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 envs only, and shorter rounds")
    result = measure(parser.parse_args().quick)
    sys.stdout.flush()
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
