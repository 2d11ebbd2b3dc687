"""Does Mario learn? Train for some minutes on this machine, then play new episodes beside a random policy.

    python benchmarks/mario_train.py [--minutes 18] [--episodes 100] [--out FOLDER]
    python benchmarks/mario_train.py --speed [--against OTHER/src] [--rounds 5] [--updates 12]

The training is the recipe's own (configs/base.json, total_steps set so high that the clock ends it, by SIGTERM, as a
user would); it goes on where it was if the folder has a checkpoint. Then both policies play the same number of episodes
of 1-1 from the same seeds, which differ in how long Mario waits at the beginning. What counts is how far an episode
came, the largest x_pos; intervals are from resampling episodes. The last line is JSON.

`--speed` measures the same training instead: frames of the game per second, and processor time per 1,000 frames of the
trainer and its workers, without the first two updates. `--against` alternates with the code of another source tree, for
example a worktree of an older commit, and compares the weights at the end, which must be the same to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
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

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from looplab import trainkit
from looplab.recipes import mario as recipe

FOLDER = Path(next(iter(recipe.__path__)))
WARM_UP = 2
"""Updates before the measurement starts."""
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


def measure_updates(updates: int, out: Path) -> dict[str, Any]:
    """Train for a number of updates with the recipe's own settings, and return what they took."""
    import psutil

    torch.set_num_threads(1)
    settings = read_settings(FOLDER / "configs/base.json", {}, {})
    t = settings.train
    torch.manual_seed(t.seed)
    envs = trainer.make_envs(settings, out)
    try:
        policy = trainer.make_policy(envs.single_observation_space, envs.single_action_space, width=t.width)
        learner = trainer.make_learner(settings, policy)
        plan = trainer.TrainingPlan(
            10**9, rollout=t.rollout_steps, overlap=t.overlap_collect, log_every=10**6, save_every=10**6
        )
        with trainer.MetricsWriter(trainkit.Logger(out / "metrics.jsonl"), extra_fields=trainer.FIELDS) as metrics:
            runner = trainer.Runner(envs, learner, plan, out_dir=out, metrics=metrics, seed=t.seed)
            workers = [psutil.Process(report.pid) for report in envs.diagnostics() if report.pid]

            def processor_seconds() -> float:
                return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in workers)

            for update in range(WARM_UP + updates):
                if update == WARM_UP:
                    start, used = time.perf_counter(), processor_seconds()
                runner.update()
            runner.source.wait()
            wall, used = time.perf_counter() - start, processor_seconds() - used
            runner.source.close()
    finally:
        envs.close()
    frames = updates * t.rollout_steps * envs.num_envs * settings.env.frame_skip
    weights = learner.flat.vector.detach().numpy().tobytes()
    return {
        "frames_s": frames / wall, "cpu_ms_per_1000_frames": 1e6 * used / frames,
        "weights": hashlib.sha256(weights).hexdigest()[:16],
    }  # fmt: skip


def compare_speed(against: Path | None, rounds: int, updates: int) -> None:
    """Measure in new processes, alternately with the other source tree if there is one, and print a line of JSON."""
    own = Path(trainkit.__file__).parents[2]
    trees = {"ours": own} | ({} if against is None else {"against": against.resolve()})
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            argv = [sys.executable, __file__, "--measure", "--updates", str(updates)]
            env = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, found[name][-1], flush=True)
    figures: dict[str, Any] = {}
    for key in ("frames_s", "cpu_ms_per_1000_frames"):
        for name, rows in found.items():
            figures[f"{name}_{key}"] = round(statistics.median(row[key] for row in rows), 1)
    if against is not None:
        pairs = list(zip(found["ours"], found["against"], strict=True))
        figures["frames_x"] = round(statistics.median(a["frames_s"] / b["frames_s"] for a, b in pairs), 2)
        key = "cpu_ms_per_1000_frames"
        figures["cpu_x"] = round(statistics.median(b[key] / a[key] for a, b in pairs), 2)
        figures["same_weights"] = len({row["weights"] for rows in found.values() for row in rows}) == 1
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="measure the speed of the training")
    parser.add_argument("--against", type=Path, default=None, help="another source tree (its src) to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("more", nargs="*", help="flags for train.py, after --")
    args = parser.parse_args()
    if args.measure:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure_updates(args.updates, Path(name))))
        return
    if args.speed:
        compare_speed(args.against, args.rounds, args.updates)
        return
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
