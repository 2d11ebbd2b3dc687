"""Does Mario learn? Train for some minutes on this machine, then play new episodes beside a random policy.

    python benchmarks/mario_train.py [--minutes 18] [--episodes 100] [--out FOLDER]

The training is the recipe's own (configs/base.json, total_steps set so high that the clock ends it, by SIGTERM, as a
user would); it goes on where it was if the folder has a checkpoint. Then both policies play the same number of episodes
of 1-1 from the same seeds, which differ in how long Mario waits at the beginning. What counts is how far an episode
came, the largest x_pos; intervals are from resampling episodes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from looplab import trainkit
from looplab.recipes import mario as recipe

FOLDER = Path(next(iter(recipe.__path__)))
sys.path.insert(0, str(FOLDER))
import train as trainer  # noqa: E402 (the recipe's own)
from mario.settings import read_settings  # noqa: E402


def learn(out: Path, minutes: float, more: list[str]) -> None:
    argv = [sys.executable, "train.py", "--config", "configs/base.json", "--out", str(out), *more]
    process = subprocess.Popen(argv, cwd=FOLDER)
    until = time.monotonic() + 60 * minutes
    while process.poll() is None and time.monotonic() < until:
        time.sleep(1)
    if process.poll() is None:
        process.terminate()
    process.wait(120)


def furthest(env: Any, act: Callable[[Any], int], seed: int) -> float:
    seen, info = env.reset(seed=seed)
    far, over = float(info["x_pos"]), False
    while not over:
        seen, _, terminated, truncated, info = env.step(act(seen))
        far, over = max(far, float(info["x_pos"])), bool(terminated or truncated)
    return far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("more", nargs="*", help="flags for train.py, after --")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        out = args.out or Path(name)
        flags = ["--total-steps", "1000000", *args.more]
        if args.minutes > 0:
            learn(out.absolute(), args.minutes, flags)
        loaded = trainkit.newest(out / "checkpoints")
        assert loaded is not None, "no checkpoint was left"
        settings = read_settings(out / "settings.json", {}, {})
        env = trainer.make_env(settings)
        t = settings.train
        policy = trainer.make_policy(env.observation_space, env.action_space, memory=t.memory, width=t.width)
        trainkit.load_into(policy, loaded.state["parts"]["learner"]["policy"])
        rng = np.random.default_rng(1)
        far: dict[str, list[float]] = {"trained": [], "random": []}
        for seed in range(10_000, 10_000 + args.episodes):
            player = trainer.Player(policy, seed)
            far["trained"].append(furthest(env, player, seed))
            far["random"].append(furthest(env, lambda _: int(rng.integers(env.action_space.n)), seed))
        env.close()
    trained, chance = (np.array(far[name]) for name in ("trained", "random"))
    gains = [rng.choice(trained, len(trained)).mean() - rng.choice(chance, len(chance)).mean() for _ in range(10_000)]
    low, high = np.percentile(gains, [2.5, 97.5])
    gap = trained.mean() - chance.mean()
    print(f"after {loaded.step:,} steps: mean furthest x {trained.mean():.0f}, random {chance.mean():.0f}")
    print(f"difference {gap:.0f} [{low:.0f}, {high:.0f}] over {len(trained)} episodes each")
    figures = {"mario_x_trained": round(float(trained.mean()), 1), "mario_x_random": round(float(chance.mean()), 1),
               "gain_low": round(float(low), 1), "gain_high": round(float(high), 1), "steps": loaded.step,
               "minutes": args.minutes, "episodes": args.episodes}  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
