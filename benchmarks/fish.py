"""The fish recipe: steps of 128 environments beside stable-baselines3's and gymnasium's, and what training is worth.

    python benchmarks/fish.py [--quick]

All environments are the same pond with one fish and the same physics, 128 of them, with the same actions:
  school      FishSchool, one numpy program for all of them in one process
  subproc     stable-baselines3's SubprocVecEnv, a process for each (forked; after that it steps as it always does)
  idle        the same with environments that do nothing: the most that any environment can reach in it
  sync        gymnasium's SyncVectorEnv, one after the other in one process
They are measured in turn, so that a noisy machine is noisy for all; the figures are medians over the repeats, the
ratios medians of the ratios within a repeat.

Survival is the share of 25 fish that live through an episode: the frozen evaluation's 32 ponds, for version 1 trained
here (briefly, with --quick) and for fish that act at random, with 95 % intervals over the ponds by bootstrap. Needs the
`rl` extra and stable-baselines3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # 128 processes with two threads each would only slow the peer down
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np

from looplab import recipes

RECIPE = Path(recipes.__file__).parent / "fish"
sys.path.insert(0, str(RECIPE))
from evaluate import bootstrap_interval, evaluate, random_policy  # noqa: E402
from fish_env import NUM_ACTIONS, OBS_DIM, FishSchool  # noqa: E402
from fish_gym import ACTION_SPACE, OBSERVATION_SPACE, FishEnv  # noqa: E402

ENVS = 128
Steps = Callable[[int], None]
"""Makes that many steps of all environments."""


class Idle(gym.Env[Any, Any]):
    """What is left of an environment when it does nothing."""

    observation_space, action_space = OBSERVATION_SPACE, ACTION_SPACE
    nothing = np.zeros(OBS_DIM, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.nothing, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.nothing, 0.0, False, False, {}


def subproc(make: Callable[[], gym.Env[Any, Any]]) -> tuple[Steps, Callable[[], None]]:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([make] * ENVS, start_method="fork")
    envs.seed(0)
    envs.reset()
    rng = np.random.default_rng(0)

    def steps(count: int) -> None:
        for _ in range(count):
            envs.step(rng.integers(0, NUM_ACTIONS, ENVS))

    return steps, envs.close


def sync() -> Steps:
    envs = gym.vector.SyncVectorEnv([FishEnv] * ENVS)
    envs.reset(seed=0)
    rng = np.random.default_rng(0)

    def steps(count: int) -> None:
        for _ in range(count):
            envs.step(rng.integers(0, NUM_ACTIONS, ENVS))

    return steps


def school(num_fish: int = 1) -> Steps:
    ponds = FishSchool(ENVS, num_fish)
    rng = np.random.default_rng(0)

    def steps(count: int) -> None:
        for _ in range(count):
            ponds.step(rng.integers(0, NUM_ACTIONS, (ENVS, num_fish)))

    return steps


def rate(steps: Steps, seconds: float) -> float:
    """Steps of one environment a second, times 128."""
    steps(2)
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        steps(4)
        count += 4
    return count * ENVS / took


def speeds(repeats: int, seconds: float) -> dict[str, float]:
    fish, close_fish = subproc(FishEnv)
    idle, close_idle = subproc(Idle)
    try:
        kinds = {"school": school(), "subproc": fish, "idle": idle, "sync": sync(), "school_25": school(25)}
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(repeats):
            for kind, steps in kinds.items():
                found[kind].append(rate(steps, seconds))
    finally:
        close_fish()
        close_idle()
    figures = {f"{kind}_steps_per_s": round(statistics.median(rates)) for kind, rates in found.items()}
    titles = {
        "school": "FishSchool",
        "subproc": "SubprocVecEnv",
        "idle": "SubprocVecEnv, idle",
        "sync": "SyncVectorEnv",
        "school_25": "FishSchool, 25 fish",
    }
    print(f"{ENVS} environments, one fish each: steps a second, and by how much FishSchool is faster")
    for kind, title in titles.items():
        ratios = [ours / theirs for ours, theirs in zip(found["school"], found[kind], strict=True)]
        ratio = statistics.median(ratios)
        print(
            f"  {title:22} {figures[f'{kind}_steps_per_s']:>10,}   {ratio:6.1f}  [{min(ratios):.1f}, {max(ratios):.1f}]"
        )
        if kind in ("subproc", "idle", "sync"):
            figures[f"vec_x_{kind}_{ENVS}"] = round(ratio, 2)
    return figures


def survival(flags: list[str]) -> dict[str, float]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="looplab-bench-") as folder:
        command = [sys.executable, str(RECIPE / "experiments/v1/train.py"), "--out", folder, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the training failed:\n{done.stderr}")
        trained = json.loads(Path(folder, "eval.json").read_text())
    took = time.perf_counter() - began
    at_random = evaluate(random_policy())
    gained = np.array(trained["survival_values"]) - np.array(at_random["survival_values"])
    low, high = bootstrap_interval(gained)
    figures = {}
    print(f"survival in {trained['episodes']} ponds; trained for {took:.0f} s")
    for key, result in (("survival", trained), ("survival_random", at_random)):
        figures |= {key: result["survival_rate"], f"{key}_low": result["survival_low"]}
        figures[f"{key}_high"] = result["survival_high"]
        print(f"  {key:22} {figures[key]:.3f}  [{figures[f'{key}_low']:.3f}, {figures[f'{key}_high']:.3f}]")
    print(f"  {'gained, pond by pond':22} {gained.mean():.3f}  [{low:.3f}, {high:.3f}]")
    return figures | {"survival_gain": float(gained.mean()), "survival_gain_low": low, "train_s": took}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    options = parser.parse_args()
    flags = ["--seed", str(options.seed), *(["--iterations", "10"] if options.quick else [])]
    figures = speeds(3, 0.3) if options.quick else speeds(5, 1.0)
    figures |= survival(flags)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
