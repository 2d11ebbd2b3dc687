"""The drone recipe: agent steps per second of its training and its simulation, compared with torch and PufferLib.

    python benchmarks/drone.py [--quick] [--returns SEEDS]

  train   the training of configs/baseline_quick.json (128 drones) and configs/baseline_full.json (1,792): update and
          simulation in C, and with `train.fused` False, that is in torch and numpy, in turn
  env     the simulation alone, 1,792 drones, with actions that are given: drones.c and numpy, in turn
  returns only with `--returns`: what the quick training has learned at its end, in C and in torch and numpy, over
          several seeds. Rounding differs, so two trainings of one seed part; their means over seeds must not.
  puffer  PufferLib 3.0.0, if `make pufferlib` installed it into .pufferlib: its trainer on its own C drone environment,
          with as many drones, the same horizon, minibatch and epochs, and networks of the same size; and that
          environment alone. Another task (16 observations here, 24 there), so only the speed can be compared.
All times are CPU seconds of one process with one thread, so that other programs affect them less. Figures are medians
over the rounds, ratios are medians of the ratios within a round. The last line is JSON: `agent_steps_s` and `x_before`
(against torch and numpy) are those of the quick profile, `full_…` of the other; `x_puffer` and `env_x_puffer` are null
without PufferLib.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from looplab import recipes

RECIPE = Path(recipes.__file__).parent / "drone"
PUFFERLIB = Path(os.environ.get("LOOPLAB_PUFFERLIB", Path(__file__).parents[1] / ".pufferlib"))
sys.path.insert(0, str(RECIPE))  # as in a lab, where the trainer is a script

from drones import Fleet  # noqa: E402
from settings import read_config  # noqa: E402
from train import DroneTrainer  # noqa: E402

PUFFER = """
import contextlib, io, json, sys, time
import torch
import pufferlib.vector
from pufferlib import pufferl
from pufferlib.ocean.drone.drone import Drone

drones, horizon, epochs, updates, steps = map(int, sys.argv[1:])
torch.set_num_threads(1)

def net(outputs):
    sizes = [(16, 64), (64, 64), (64, outputs)]
    layers = [layer for a, b in sizes for layer in (torch.nn.Linear(a, b), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1])

class Policy(torch.nn.Module):
    hidden_size = 64

    def __init__(self):
        super().__init__()
        self.actor, self.critic = net(4), net(1)
        self.log_std = torch.nn.Parameter(torch.zeros(1, 4))

    def forward_eval(self, obs, state=None):
        mean = self.actor(obs)
        return torch.distributions.Normal(mean, self.log_std.expand_as(mean).exp()), self.critic(obs)

    def forward(self, obs, state=None):
        shape = obs.shape
        return self.forward_eval(obs.reshape(-1, shape[-1]))

with contextlib.redirect_stdout(io.StringIO()):
    sys.argv = sys.argv[:1]
    args = pufferl.load_config("puffer_drone")
    batch = drones * horizon
    args["train"] |= dict(
        device="cpu", use_rnn=False, bptt_horizon=horizon, batch_size=batch, minibatch_size=batch,
        max_minibatch_size=batch, update_epochs=epochs, compile=False, total_timesteps=10**9, env="puffer_drone",
    )
    envs = pufferlib.vector.make(Drone, env_kwargs={"num_envs": drones}, backend=pufferlib.vector.Serial, num_envs=1)
    trainer = pufferl.PuffeRL(args["train"], envs, Policy())
    trainer.print_dashboard = lambda *args, **named: None
    for update in range(updates + 2):
        if update == 2:
            began = time.process_time()
        trainer.evaluate()
        trainer.train()
    train = updates * batch / (time.process_time() - began)
    trainer.utilization.stop()
    env = Drone(num_envs=1792)
    env.reset(seed=0)
    actions = torch.randn(1792, 4, generator=torch.Generator().manual_seed(0)).mul(0.3).numpy()
    began = time.process_time()
    for _ in range(steps):
        env.step(actions)
    env = steps * 1792 / (time.process_time() - began)
print(json.dumps({"train": train, "env": env}))
"""


def training_speed(profile: str, fused: bool, updates: int) -> float:
    """Return the agent steps per CPU second of a training, after its first two updates."""
    config = read_config(RECIPE / "configs" / f"baseline_{profile}.json", {"train.fused": str(fused)})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = DroneTrainer(config, Path(folder), "")
        for update in range(updates + 2):
            if update == 2:
                began = time.process_time()
            trainer._update(10**6)
        return updates * config.train.batch_size / (time.process_time() - began)


def learned(seed: int, fused: bool, steps: int) -> dict[str, float]:
    """Return the means over the last 1,000 episodes of a training of the quick profile."""
    edits = {"train.fused": str(fused), "train.seed": str(seed), "train.total_timesteps": str(steps)}
    config = read_config(RECIPE / "configs" / "baseline_quick.json", edits)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = DroneTrainer(config, Path(folder), "")
        updates = steps // config.train.batch_size
        for _ in range(updates):
            trainer._update(updates)
        return {name: mean for name, mean in trainer.episodes.means().items() if mean is not None}


def compare_returns(seeds: int, steps: int = 1_000_000) -> dict[str, Any]:
    """Print what both learned for each seed, and return the mean difference with its 95 % interval over seeds."""
    rows = []
    for seed in range(seeds):
        in_c, in_torch = learned(seed, True, steps), learned(seed, False, steps)
        rows.append((in_c["mean_reward"], in_torch["mean_reward"], in_c["success_rate"], in_torch["success_rate"]))
        c, torch_, won, torch_won = rows[-1]
        print(
            f"seed {seed}: return {c:.2f} in C, {torch_:.2f} in torch; success {won:.3f}, {torch_won:.3f}", flush=True
        )
    table = np.array(rows)
    gap = table[:, 0] - table[:, 1]
    rng = np.random.default_rng(0)
    low, high = np.percentile([rng.choice(gap, len(gap)).mean() for _ in range(10_000)], [2.5, 97.5])
    print(f"difference of the returns {gap.mean():.3f} [{low:.3f}, {high:.3f}] over {seeds} seeds")
    return {
        "return_c": round(float(table[:, 0].mean()), 3), "return_torch": round(float(table[:, 1].mean()), 3),
        "return_gap_low": round(float(low), 3), "return_gap_high": round(float(high), 3),
        "success_c": round(float(table[:, 2].mean()), 3), "success_torch": round(float(table[:, 3].mean()), 3),
    }  # fmt: skip


def env_speed(compiled: bool, steps: int) -> float:
    """Return the agent steps per CPU second of the simulation."""
    fleet = Fleet("drone_hover", 224, 8, seed=0, compiled=compiled)
    actions = np.random.default_rng(0).normal(0, 0.3, (1792, 4)).astype(np.float32)
    began = time.process_time()
    for _ in range(steps):
        fleet.step(actions)
    return steps * 1792 / (time.process_time() - began)


def puffer_speed(updates: int, steps: int) -> dict[str, float] | None:
    """Return the same figures of PufferLib, with the topology of the quick profile; None without it."""
    python = PUFFERLIB / "bin" / "python"
    if not python.exists():
        return None
    numbers = [str(n) for n in (128, 16, 4, updates, steps)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([python, "-c", PUFFER, *numbers], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        print(f"PufferLib failed: {done.stderr.strip().splitlines()[-1]}")
        return None
    speeds: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--returns", type=int, metavar="SEEDS", help="compare only what is learned, over seeds")
    args = parser.parse_args()
    if args.returns:
        print(json.dumps(compare_returns(args.returns)))
        return
    rounds, scale = (3, 1) if args.quick else (7, 3)
    table: dict[str, list[float]] = {}
    for _ in range(rounds):
        row = {
            "quick": training_speed("quick", True, 60 * scale),
            "quick in torch": training_speed("quick", False, 15 * scale),
            "full": training_speed("full", True, 3 * scale),
            "full in torch": training_speed("full", False, 1 * scale),
            "env": env_speed(True, 300 * scale),
            "env in numpy": env_speed(False, 60 * scale),
        }
        if (puffer := puffer_speed(10 * scale, 300 * scale)) is not None:
            row |= {f"puffer {name}": speed for name, speed in puffer.items()}
        for name, speed in row.items():
            table.setdefault(name, []).append(speed)
    medians = {name: statistics.median(speeds) for name, speeds in table.items()}
    for name, speed in medians.items():
        print(f"{name:>16} {speed:>12,.0f} agent steps per CPU second")
    if "puffer env" not in table:
        print("no figures of PufferLib (`make pufferlib` installs it): they are null")

    def ratio(ours: str, other: str) -> float | None:
        pairs = zip(table[ours], table.get(other, []), strict=False)
        ratios = [a / b for a, b in pairs]
        return round(statistics.median(ratios), 2) if ratios else None

    figures: dict[str, Any] = {
        "agent_steps_s": round(medians["quick"]),
        "x_before": ratio("quick", "quick in torch"),
        "x_puffer": ratio("quick", "puffer train"),
        "full_agent_steps_s": round(medians["full"]),
        "full_x_before": ratio("full", "full in torch"),
        "env_steps_s": round(medians["env"]),
        "env_x_before": ratio("env", "env in numpy"),
        "env_x_puffer": ratio("env", "puffer env"),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
