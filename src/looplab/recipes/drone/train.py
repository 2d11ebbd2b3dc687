"""Train drones to hover, or to pick up boxes and bring them somewhere, by PPO on one core.

    python train.py drone_hover --config configs/baseline_quick.json --out runs/try --train.learning-rate 0.01

Every update it logs mean_reward, success_rate, episode_length and collision_rate (means of the last 1,000 episodes that
ended), sps and the losses to metrics.jsonl; at the end it writes trainer_summary.json. Weights are in checkpoints/.
SIGTERM saves first (exit code 143); a loss that is no number ends the run with exit code 1. Killed at any moment, the
same command goes on from what is in resume/, and ends with the same weights and rows as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The matrices are small: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what repeatable results need on a GPU

import numpy as np
import torch

from looplab import trainkit
from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.drone import checkpoints
    from looplab.recipes.drone.drones import ACTIONS, OBSERVATIONS, Ended, Fleet, Floats
    from looplab.recipes.drone.ppo import Diverged, Policy, Rollout, make_optimizer, update
    from looplab.recipes.drone.settings import Settings, Train, add_flags, read_settings
else:  # the files beside this one, also where they were copied to be changed
    import checkpoints
    from drones import ACTIONS, OBSERVATIONS, Ended, Fleet, Floats
    from ppo import Diverged, Policy, Rollout, make_optimizer, update
    from settings import Settings, Train, add_flags, read_settings

HERE = Path(__file__).parent
CODE = [HERE / name for name in ("drones.py", "ppo.py", "train.py")]
"""What an interrupted training must have in common with the one that goes on."""
WINDOW = 1000
"""Episodes that the logged rates are about."""
ENOUGH = 100
"""Episodes below which a mean is no ground to call weights the best."""


class Episodes:
    """The last `WINDOW` episodes that ended."""

    def __init__(self) -> None:
        self._rows = np.zeros((WINDOW, 4))
        self.count = 0

    def add(self, ended: Ended) -> None:
        rows = np.stack([ended.returned, ended.length, ended.success, ended.collision], axis=1)
        self._rows[(self.count + np.arange(len(rows)))[-WINDOW:] % WINDOW] = rows[-WINDOW:]
        self.count += len(rows)

    def means(self) -> dict[str, float | None]:
        """None, and so nowhere logged, before the first episode has ended."""
        names = ("mean_reward", "episode_length", "success_rate", "collision_rate")
        if self.count == 0:
            return dict.fromkeys(names)
        means = self._rows[: self.count].mean(axis=0)
        return {name: float(mean) for name, mean in zip(names, means, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows, self.count = np.array(state["rows"]), state["count"]


class Trainer:
    """One training from its settings to its last checkpoint."""

    def __init__(self, settings: Settings, out: Path, identity: str) -> None:
        """`identity`: of the training, see checkpoints.py."""
        train = settings.train
        self.settings, self.out = settings, out
        self.device = torch.device(train.device)
        _require_device(train.device)
        torch.set_num_threads(1)
        torch.manual_seed(train.seed)
        torch.use_deterministic_algorithms(train.torch_deterministic)
        self.chance = torch.Generator().manual_seed(train.seed)
        self.policy = Policy(OBSERVATIONS, ACTIONS).to(self.device)
        self.optimizer = make_optimizer(self.policy, train)
        self.before = 0
        """Steps that went into the weights before this run."""
        self._tune(train)
        worlds = settings.env.num_envs * settings.vec.num_envs
        self.fleet = Fleet(settings.env_name, worlds, settings.env.num_drones, train.seed, settings.vec.num_workers)
        self.observation = self.fleet.observe()
        self.episodes = Episodes()
        self.logger = trainkit.Logger(out / "metrics.jsonl")
        self.steps = self.epoch = 0
        self.best = -math.inf
        self.began = time.perf_counter()
        self.identity = identity
        self.resume = out / "resume"
        self.training_state = trainkit.TrainingState(
            model=self.policy,
            optimizer=self.optimizer,
            generators={"chance": self.chance},
            parts={"fleet": self.fleet, "episodes": self.episodes, "progress": self},
            counters={"identity": identity},
            metrics=self.logger,
        )
        kept = torch.device("cpu") if train.cpu_offload else self.device
        shape = (train.bptt_horizon, settings.agents)
        one = [torch.zeros(shape, device=kept) for _ in range(4)]
        self.rollout = Rollout(
            torch.zeros(*shape, OBSERVATIONS, device=kept), torch.zeros(*shape, ACTIONS, device=kept), *one
        )

    def _tune(self, train: Train) -> None:
        """Compile where asked; say once what means nothing here."""
        if train.cpu_offload and train.device == "cpu":
            print("train.cpu_offload means nothing on the CPU: all is in the host's memory already")
        if train.precision == "float16" and train.device == "cpu":
            print("train.precision float16 is slow on the CPU, and small gradients may vanish: bfloat16 is safer")
        if train.compile and train.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            print("train.compile is left out: there is no C++ compiler")
        elif train.compile:
            self.policy.compile(fullgraph=train.compile_fullgraph, mode=train.compile_mode)

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the other parts have states of their own."""
        counted = {name: getattr(self, name) for name in ("steps", "epoch", "best", "before")}
        return {**counted, "seconds": time.perf_counter() - self.began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.epoch, self.best, self.before = (state[n] for n in ("steps", "epoch", "best", "before"))
        self.began = time.perf_counter() - state["seconds"]

    def go_on(self) -> bool:
        """Take up the training that was interrupted here; false where there is none."""
        left = trainkit.newest(self.resume)
        if left is None or left.counters.get("identity") != self.identity:
            if left is not None:
                print(f"{self.resume} is of other settings, weights or code, and is removed")
            return False
        for note in self.training_state.restore(left.state, source=left.path):
            print(note)
        self.observation = self.fleet.observe()
        print(f"going on from {left.path}: {self.steps:,} steps are done")
        return True

    def begin(self, weights: Path | None) -> None:
        """Start from these weights, or from none; what another training left here does not mix with ours."""
        if weights is not None:
            self.before, notes = checkpoints.load(weights, self.policy, self.optimizer, self.settings.train)
            for note in [f"continuing from {weights}, {self.before:,} steps old", *notes]:
                print(note)
        shutil.rmtree(self.resume, ignore_errors=True)
        rows = Path(self.logger.path)
        if rows.exists():
            rows.replace(aside := rows.with_suffix(".before.jsonl"))
            print(f"beginning anew; the rows of before are in {aside.name}")

    def run(self, stop: trainkit.Stopper) -> None:
        """Train to the end, or until told to stop."""
        train = self.settings.train
        updates = math.ceil(train.total_timesteps / train.batch_size)
        with trainkit.Checkpoints(self.resume, keep=1) as states:
            while self.epoch < updates and not stop:
                self._update(updates)
                if self.epoch % train.checkpoint_interval == 0 or self.epoch == updates:
                    self._save()
                    self.training_state.save(states, self.steps)
            if self.epoch < updates:  # the best is judged where it is without an interruption too
                self._save_weights("latest")
                self.training_state.save(states, self.steps)
        self._summarise()
        if self.epoch < updates:
            print(f"stopped by {stop.name} after {self.steps:,} steps; the same command goes on from there")
        else:
            shutil.rmtree(self.resume)

    def _update(self, updates: int) -> None:
        train = self.settings.train
        rate = train.learning_rate * (1.0 - self.epoch / updates if train.anneal_lr else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        began = time.perf_counter()
        after = self._fly()
        losses = update(self.policy, self.optimizer, self.rollout, after, train, self.chance)
        self.steps += train.batch_size
        self.epoch += 1
        row: dict[str, float | None] = {
            **self.episodes.means(),
            "sps": train.batch_size / (time.perf_counter() - began),
            "agent_steps": self.steps,
            "epoch": self.epoch,
            "learning_rate": rate,
            **losses,
        }
        self.logger.log(row, step=self.steps)
        if self.epoch == 1 or self.epoch % max(1, updates // 20) == 0:
            _tell(row)

    @torch.no_grad()
    def _fly(self) -> torch.Tensor:
        """Fill the rollout; gives the critic's values of what comes after it."""
        std = self.policy.log_std.exp()
        for t in range(self.settings.train.bptt_horizon):
            observation, mean, value = self._look(self.observation)
            noise = torch.randn(mean.shape, generator=self.chance).to(self.device)
            action = mean + std * noise
            self.rollout.observations[t] = observation
            self.rollout.actions[t] = action
            self.rollout.log_probs[t] = self.policy.log_prob(mean, action)
            self.rollout.values[t] = value
            step = self.fleet.step(action.cpu().numpy())
            self.rollout.rewards[t] = torch.from_numpy(step.rewards)
            self.rollout.done[t] = torch.from_numpy(step.done)
            self.observation = step.observations
            self.episodes.add(step.ended)
        return self._look(self.observation)[2].to(self.rollout.values.device)

    def _look(self, observation: Floats) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        precision = self.settings.train.precision
        # A copy, because BLAS may round differently at another alignment, and NumPy's is chance.
        seen = torch.tensor(observation, device=self.device)
        with torch.autocast(self.device.type, getattr(torch, precision), precision != "float32"):
            mean, value = self.policy(seen)
        return seen, mean.float(), value.float()

    def _save(self) -> None:
        strategy = self.settings.autopilot.save_strategy
        names = ["latest"]
        reward = self.episodes.means()["mean_reward"]
        if strategy != "latest" and reward is not None and reward > self.best and self.episodes.count >= ENOUGH:
            self.best = reward
            names.append("best")
        if strategy == "all":
            names.append(f"step_{self.steps}")
        for name in names:
            self._save_weights(name)

    def _save_weights(self, name: str) -> None:
        path = self.out / "checkpoints" / f"{name}.pt"
        checkpoints.save(path, self.policy, self.optimizer, self.settings, self.before + self.steps)

    def _summarise(self) -> None:
        seconds = time.perf_counter() - self.began
        content: dict[str, Any] = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "run_id": os.environ.get("LOOPLAB_RUN_ID") or self.out.resolve().name,
            **asdict(self.settings),
            "metrics": {
                **{name: mean for name, mean in self.episodes.means().items() if mean is not None},
                "sps": self.steps / seconds,
                "agent_steps": self.steps,
                "epoch": self.epoch,
                "lifetime_steps": self.before + self.steps,
            },
        }
        text = json.dumps(content, indent=2) + "\n"
        trainkit.atomic_write(self.out / "trainer_summary.json", text.encode())


def _require_device(device: str) -> None:
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[device]:
        raise LabError(f"train.device is {device!r}, which is not there", hint="use --train.device cpu")


def _tell(row: dict[str, float | None]) -> None:
    shown = {name: row[name] for name in ("mean_reward", "success_rate", "episode_length", "sps")}
    text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
    print(f"{row['agent_steps']:>10,} steps  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("task", nargs="?", metavar="ENV_NAME", help="drone_hover or drone_pickplace")
    parser.add_argument("--config", type=Path, default=HERE / "configs" / "baseline_quick.json")
    parser.add_argument("--out", type=Path, default=trainkit.run_dir(), help="the folder of the run")
    parser.add_argument("--load-model-path", type=Path, help="a checkpoint to continue from")
    add_flags(parser)
    flags = vars(parser.parse_args())
    with trainkit.stopping() as stop:
        return train(flags, stop)


def train(flags: dict[str, Any], stop: trainkit.Stopper) -> int:
    """Gives the exit code; a signal's is the stopper's."""
    try:
        if flags["task"] is not None:
            flags["env_name"] = flags["task"]
        settings, given = read_settings(flags["config"], flags), flags["load_model_path"]
        trainer = Trainer(settings, flags["out"], checkpoints.identity(settings, given, CODE))
        if not trainer.go_on():
            trainer.begin(given or checkpoints.find(flags["out"], settings))
        trainer.run(stop)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Diverged as error:
        print(
            f"the training diverged in update {trainer.epoch + 1}: {error}; lower train.learning_rate "
            f"({settings.train.learning_rate}) or train.max_grad_norm ({settings.train.max_grad_norm})",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
