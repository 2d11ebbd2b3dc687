"""The training runtime compared with others: vector envs, Mario, replay, PPO, checkpoints, overlapped collection.

    python benchmarks/rl.py [--quick] [--parity] [--only-ppo]

Runs the benchmarks vector.py, mario_speed.py, replay.py and checkpoint.py one after the other, and two more:
  ppo       CartPole, 8 envs, default hyperparameters of Stable-Baselines3: transitions per CPU second of training, ours
            (`ppo_x_torch`: also without fused.c) and theirs in turn; both use one process and one thread. `--parity`:
            also the returns of both after 49,152 transitions, over 10 seeds.
  overlap   the same training with synchronous and overlapped collection, where collecting and learning take about the
            same time (envs that take a fixed time per step, like a game, in their own processes)
The last line is one JSON object with all figures. Libraries and envs that are not installed are skipped with a note.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch

from looplab import trainkit
from looplab.rl import SupervisedVectorEnv
from looplab.rl.collect import Collector, RolloutBuffer, RolloutSource
from looplab.rl.fused import load
from looplab.rl.metrics import MetricsWriter
from looplab.rl.policies import make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.runner import Runner, TrainingPlan

HERE = Path(__file__).parent
ROLLOUT = 2048
WANTED = (
    "vec8_x_async", "vec64_x_async", "fish8_x_async", "fish64_x_async", "fish8_x_sync", "mario_x_async",
    "per_x_cpprb_256", "per_x_cpprb_4096", "ckpt_stall_ms",
)  # fmt: skip


def part(name: str, quick: bool) -> dict[str, Any]:
    """Return the figures of another benchmark, run in a process of its own."""
    argv = [sys.executable, str(HERE / name), *(["--quick"] if quick else [])]
    done = subprocess.run(argv, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(f"{name} was skipped: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no output'}")
        return {}
    print("\n".join(lines[:-1]), flush=True)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# -- PPO compared with Stable-Baselines3


Curve = list[tuple[int, float]]
"""For each rollout: transitions learned from before it, and mean return of the episodes that ended in it."""


def ours(seed: int, updates: int, rollout: int = ROLLOUT, *, fused: bool = True) -> tuple[float, Curve]:
    """Return transitions per CPU second and the learning curve of our PPO."""
    torch.manual_seed(seed)
    envs = SupervisedVectorEnv([partial(gym.make, "CartPole-v1")] * 8, copy=False)
    policy: Any = make_policy(envs.single_observation_space, envs.single_action_space)
    policy.fused = fused
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        metrics = MetricsWriter(trainkit.Logger(path))
        plan = TrainingPlan(updates * rollout * 8, rollout=rollout, save_every=10**9)
        learner = Ppo(policy, PpoSettings(), seed)
        runner = Runner(envs, learner, plan, out_dir=Path(folder), metrics=metrics, seed=seed, echo=lambda _: None)
        began = time.process_time()
        for _ in range(updates):
            runner.update()
        seconds = time.process_time() - began
        runner.source.close()
        runner.checkpoints.close()
        metrics.close()
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    envs.close()
    steps = [0, *(row["global_step"] for row in rows)]
    curve = [(before, row["episode_return_mean"]) for before, row in zip(steps, rows, strict=False)]
    return steps[-1] / seconds, curve


def theirs(seed: int, updates: int, rollout: int = ROLLOUT) -> tuple[float, Curve]:
    """Return the same for Stable-Baselines3."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    ended: list[list[float]] = []

    def listen(now: dict[str, Any], _: Any) -> bool:
        if now["n_steps"] == 0:
            ended.append([])
        ended[-1] += [info["episode"]["r"] for info in now["infos"] if "episode" in info]
        return True

    envs = make_vec_env("CartPole-v1", n_envs=8, seed=seed)
    model = PPO("MlpPolicy", envs, n_steps=rollout, seed=seed, device="cpu")
    began = time.process_time()
    model.learn(updates * rollout * 8, callback=listen)
    seconds = time.process_time() - began
    envs.close()
    curve = [(i * rollout * 8, float(np.mean(returns))) for i, returns in enumerate(ended)]
    return model.num_timesteps / seconds, curve


def ppo(quick: bool) -> dict[str, float]:
    rounds, how = (3, (1, 512)) if quick else (5, (2, ROLLOUT))
    load()  # compiled before the clock runs
    rows = [(ours(seed, *how)[0], ours(seed, *how, fused=False)[0], theirs(seed, *how)[0]) for seed in range(rounds)]
    mine, in_torch, other = (statistics.median(column) for column in zip(*rows, strict=True))
    x_torch, x_sb3 = (statistics.median(row[0] / row[i] for row in rows) for i in (1, 2))
    print(
        f"PPO CartPole, 8 envs, steps per CPU second: {mine:,.0f}, in torch {in_torch:,.0f}: {x_torch:.2f} x, "
        f"Stable-Baselines3 {other:,.0f}: {x_sb3:.2f} x",
        flush=True,
    )
    return {"ppo_x_sb3": round(x_sb3, 2), "ppo_x_torch": round(x_torch, 2), "ppo_steps_s": round(mine)}


def read_off(curve: Curve, at: int) -> float:
    steps, returns = (np.array(column) for column in zip(*curve, strict=True))
    return float(np.interp(at, steps, returns))


def parity() -> dict[str, float]:
    """Compare returns after 49,152 transitions. Steps in which an env only resets are not
    transitions, so a rollout here has a few less, and one more rollout is needed to interpolate the return."""
    at = 3 * ROLLOUT * 8
    pairs = []
    for seed in range(400, 410):
        mine, other = read_off(ours(seed, 5)[1], at), read_off(theirs(seed, 4)[1], at)
        print(f"  return after {at:,} transitions: {mine:.0f} ours, {other:.0f} theirs", flush=True)
        pairs.append((mine, other))
    gap = np.array([a - b for a, b in pairs])
    rng = np.random.default_rng(0)
    low, high = np.percentile([rng.choice(gap, len(gap)).mean() for _ in range(10_000)], [2.5, 97.5])
    print(f"returns over 10 seeds: difference {gap.mean():.1f} [{low:.1f}, {high:.1f}]")
    return {"ppo_return": round(float(np.mean([a for a, _ in pairs])), 1),
            "sb3_return": round(float(np.mean([b for _, b in pairs])), 1),
            "return_gap_low": round(float(low), 1), "return_gap_high": round(float(high), 1)}  # fmt: skip


# -- overlap


class Slow(gym.Env[Any, Any]):
    """Steps in a fixed time, most of it outside of Python, like an emulator."""

    def __init__(self, seconds: float) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (64,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self._seconds = seconds
        self._left = np.ones((96, 96), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(64, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:  # compute instead of sleeping: a game occupies a core
            self._left @ self._left
        return np.full(64, float(action) / 4, np.float32), 1.0, False, False, {}


def overlap(quick: bool) -> dict[str, float]:
    rounds, updates, steps = (3, 3, 32) if quick else (5, 12, 64)
    envs = SupervisedVectorEnv([partial(Slow, 0.0005)] * 8, workers=1, snapshot_every=0, copy=False)
    space = envs.single_observation_space

    def source_of(overlapped: bool, epochs: int) -> tuple[Ppo, RolloutSource]:
        torch.manual_seed(0)
        policy = make_policy(space, envs.single_action_space, width=512)
        behaviour_policy = copy.deepcopy(policy)
        learner = Ppo(policy, PpoSettings(epochs=epochs, minibatch=256), 0)
        rollouts = [RolloutBuffer.zeros(steps, 8, space, policy) for _ in range(2)]
        collector = Collector(envs, behaviour_policy, learner.flat, seed=0)
        return learner, RolloutSource(collector, (rollouts[0], rollouts[1]), overlap=overlapped)

    def seconds(overlapped: bool, epochs: int) -> tuple[float, float, float]:
        """Return the seconds of an update: in all, collecting, learning."""
        learner, source = source_of(overlapped, epochs)
        learner.learn(source.next_rollout(), source.lag)
        began, waited, learned = time.perf_counter(), 0.0, 0.0
        for _ in range(updates):
            at = time.perf_counter()
            rollout = source.next_rollout()
            between = time.perf_counter()
            learner.learn(rollout, source.lag)
            waited, learned = waited + between - at, learned + time.perf_counter() - between
        whole = time.perf_counter() - began
        source.close()
        return whole / updates, waited / updates, learned / updates

    _, collecting, once = seconds(False, 1)
    more = (seconds(False, 5)[2] - once) / 4  # seconds of an epoch, without the fixed cost of an update
    epochs = max(1, 1 + round((collecting - once) / more))  # so that learning takes as long as collecting
    pairs = [(seconds(False, epochs), seconds(True, epochs)) for _ in range(rounds)]
    envs.close()
    ratio = statistics.median(serial[0] / both[0] for serial, both in pairs)
    serial = pairs[len(pairs) // 2][0]
    print(f"collect {1000 * serial[1]:.0f} ms, learn {1000 * serial[2]:.0f} ms: overlapped is {ratio:.2f} x as fast")
    return {"overlap_x_serial": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parity", action="store_true", help="also compare returns with Stable-Baselines3")
    parser.add_argument("--only-ppo", action="store_true", help="only the comparison with Stable-Baselines3")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in () if args.only_ppo else ("vector.py", "mario_speed.py", "replay.py", "checkpoint.py"):
        results = part(name, args.quick)
        figures |= {key: results[key] for key in WANTED if key in results}
    figures |= ppo(args.quick)
    if not args.only_ppo:
        figures |= overlap(args.quick)
    if args.parity:
        figures |= parity()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
