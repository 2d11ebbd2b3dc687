"""The training runtime beside its peers: vector envs, Mario, replay, PPO, checkpoints, overlapped collection.

    python benchmarks/rl.py [--quick] [--parity]

Each part is a benchmark of its own (vector.py, mario_speed.py, replay.py, checkpoint.py), run here one after the other,
with two more:
  ppo       CartPole, 8 envs, Stable-Baselines3's default hyper-parameters: transitions a second of training, here and
            there in turn. `--parity`: also the returns of both after 50,000 steps over 10 seeds.
  overlap   the same training with collection and learning in turns and overlapped, where both take about as long
            (envs that take a fixed time for a step, as a game does, in processes of their own)
The last line is one JSON object with the figures of all. Peers and envs that are not installed are left out, and said.
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
from looplab.rl.collect import Collector, Rollout, Source
from looplab.rl.metrics import Sinks
from looplab.rl.policies import make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.runner import Plan, Runner

HERE = Path(__file__).parent
WANTED = (
    "vec8_x_async", "vec64_x_async", "fish8_x_async", "fish64_x_async", "fish8_x_sync", "mario_x_async",
    "per_x_cpprb_256", "per_x_cpprb_4096", "ckpt_stall_ms",
)  # fmt: skip


def part(name: str, quick: bool) -> dict[str, Any]:
    """The figures of another benchmark, in a process of its own."""
    argv = [sys.executable, str(HERE / name), *(["--quick"] if quick else [])]
    done = subprocess.run(argv, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(f"{name} was left out: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no output'}")
        return {}
    print("\n".join(lines[:-1]), flush=True)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# -- PPO beside Stable-Baselines3


def ours(seed: int, steps: int) -> tuple[float, float]:
    """Transitions a second, and the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    envs = SupervisedVectorEnv([partial(gym.make, "CartPole-v1")] * 8, copy=False)
    policy = make_policy(envs.single_observation_space, envs.single_action_space)
    with tempfile.TemporaryDirectory() as folder:
        sinks = Sinks(trainkit.Logger(Path(folder, "metrics.jsonl")))
        learner = Ppo(policy, PpoSettings(), seed)
        plan = Plan(steps, rollout=2048, save_every=10**9)
        runner = Runner(envs, learner, plan, Path(folder), sinks, seed, tell=lambda text: None)
        ended: list[float] = []
        add = runner.tally.add

        def listen(rewards: Any, terminated: Any, truncated: Any, valid: Any, infos: Any) -> None:
            over = terminated | truncated
            if over.any():
                ended.extend((runner.tally.returns + rewards)[over].tolist())
            add(rewards, terminated, truncated, valid, infos)

        runner.tally.add = listen  # type: ignore[method-assign]
        began = time.perf_counter()
        while runner.counters["global_update"] < steps // (8 * 2048):  # as many rollouts as there
            runner.update()
        seconds = time.perf_counter() - began
        done = runner.counters["global_step"]
        runner.source.close()
        runner.checkpoints.close()
        sinks.close()
    envs.close()
    return done / seconds, float(np.mean(ended[-100:]))


def theirs(seed: int, steps: int) -> tuple[float, float]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=8, seed=seed)
    model = PPO("MlpPolicy", envs, n_steps=2048, seed=seed, device="cpu")
    began = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - began
    returns = [float(episode["r"]) for episode in model.ep_info_buffer or []]
    envs.close()
    return model.num_timesteps / seconds, float(np.mean(returns))


def ppo(quick: bool) -> dict[str, float]:
    rounds, steps = (2, 16_384) if quick else (5, 16_384 * 2)
    pairs = [(ours(seed, steps)[0], theirs(seed, steps)[0]) for seed in range(rounds)]
    ratio = statistics.median(a / b for a, b in pairs)
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"PPO CartPole, 8 envs: {mine:,.0f} steps/s, Stable-Baselines3 {other:,.0f}: {ratio:.2f} x", flush=True)
    return {"ppo_x_sb3": round(ratio, 2), "ppo_steps_s": round(mine)}


def parity() -> dict[str, float]:
    """The mean return of the last 100 episodes within 49,152 steps (three rollouts of 2,048 steps of 8 envs)."""
    pairs = [(ours(seed, 49_152)[1], theirs(seed, 49_152)[1]) for seed in range(100, 110)]
    for mine, other in pairs:
        print(f"  returns of the last 100 episodes: {mine:.0f} here, {other:.0f} there", flush=True)
    gap = np.array([a - b for a, b in pairs])
    rng = np.random.default_rng(0)
    low, high = np.percentile([rng.choice(gap, len(gap)).mean() for _ in range(10_000)], [2.5, 97.5])
    print(f"returns over 10 seeds: difference {gap.mean():.1f} [{low:.1f}, {high:.1f}]")
    return {"ppo_return": round(float(np.mean([a for a, _ in pairs])), 1),
            "sb3_return": round(float(np.mean([b for _, b in pairs])), 1),
            "return_gap_low": round(float(low), 1), "return_gap_high": round(float(high), 1)}  # fmt: skip


# -- overlap


class Slow(gym.Env[Any, Any]):
    """Takes a fixed time for a step, most of it outside of Python, as an emulator does."""

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
        while time.thread_time() < until:  # work, not sleep: it takes a core as a game does
            self._left @ self._left
        return np.full(64, float(action) / 4, np.float32), 1.0, False, False, {}


def overlap(quick: bool) -> dict[str, float]:
    rounds, updates = (2, 6) if quick else (5, 12)
    envs = SupervisedVectorEnv([partial(Slow, 0.0005)] * 8, workers=1, snapshot_every=0, copy=False)
    space = envs.single_observation_space

    def source_of(overlapped: bool, epochs: int) -> tuple[Ppo, Source]:
        torch.manual_seed(0)
        policy = make_policy(space, envs.single_action_space, width=512)
        acting = copy.deepcopy(policy)
        learner = Ppo(policy, PpoSettings(epochs=epochs, minibatch=256), 0)
        rollouts = [Rollout.empty(64, 8, space, policy) for _ in range(2)]
        collector = Collector(envs, policy, acting, learner.flat, 0)
        return learner, Source(collector, (rollouts[0], rollouts[1]), overlap=overlapped)

    def seconds(overlapped: bool, epochs: int) -> tuple[float, float, float]:
        """Of an update: all of it, collecting, learning."""
        learner, source = source_of(overlapped, epochs)
        learner.learn(source.take(), source.lag)
        began, waited, learned = time.perf_counter(), 0.0, 0.0
        for _ in range(updates):
            at = time.perf_counter()
            rollout = source.take()
            between = time.perf_counter()
            learner.learn(rollout, source.lag)
            waited, learned = waited + between - at, learned + time.perf_counter() - between
        whole = time.perf_counter() - began
        source.close()
        return whole / updates, waited / updates, learned / updates

    _, collecting, once = seconds(False, 1)
    epochs = max(1, round(collecting / once))  # so that learning takes about as long
    pairs = [(seconds(False, epochs), seconds(True, epochs)) for _ in range(rounds)]
    envs.close()
    ratio = statistics.median(serial[0] / both[0] for serial, both in pairs)
    serial = pairs[len(pairs) // 2][0]
    print(f"collect {1000 * serial[1]:.0f} ms, learn {1000 * serial[2]:.0f} ms: overlapped is {ratio:.2f} x as fast")
    return {"overlap_x_serial": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parity", action="store_true", help="compare returns with Stable-Baselines3's too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in ("vector.py", "mario_speed.py", "replay.py", "checkpoint.py"):
        told = part(name, args.quick)
        figures |= {key: told[key] for key in WANTED if key in told}
    figures |= ppo(args.quick) | overlap(args.quick)
    if args.parity:
        figures |= parity()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
