"""Train drones with PPO to hover, or to pick up boxes and deliver them, on one core.

    python train.py drone_hover --config configs/baseline_quick.json --out runs/try --train.learning-rate 0.01

Every update logs mean_reward, success_rate, episode_length and collision_rate (means over the last 1,000 finished
episodes), sps and the losses to metrics.jsonl; at the end trainer_summary.json is written. Weights are in checkpoints/.
SIGTERM saves first (exit code 143); a loss that is not finite stops the run with exit code 1. A run that was killed at
any moment resumes from resume/ with the same command, and ends with the same weights and rows, to the bit.
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
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

# More threads only add overhead to matrices this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic results on a GPU

import numpy as np
import torch

from looplab import trainkit
from looplab.errors import LabError
from looplab.rl.fused import backend_name

if TYPE_CHECKING:
    from looplab.recipes.drone import checkpoints
    from looplab.recipes.drone.drones import ACTION_DIM, OBS_DIM, FinishedEpisodes, Fleet, Floats
    from looplab.recipes.drone.fused_update import FusedUpdate, why_not
    from looplab.recipes.drone.ppo import DronePolicy, DroneRollout, NonFiniteUpdate, make_optimizer, update
    from looplab.recipes.drone.settings import DroneConfig, TrainConfig, add_flags, read_config
else:  # the modules next to this file, wherever the lab was copied to
    import checkpoints
    from drones import ACTION_DIM, OBS_DIM, FinishedEpisodes, Fleet, Floats
    from fused_update import FusedUpdate, why_not
    from ppo import DronePolicy, DroneRollout, NonFiniteUpdate, make_optimizer, update
    from settings import DroneConfig, TrainConfig, add_flags, read_config

HERE = Path(__file__).parent
CODE = [HERE / name for name in ("drones.py", "ppo.py", "fused_update.py", "train.py")] + sorted(HERE.glob("drones.c"))
"""An interrupted run is resumed only if these files are unchanged."""
WINDOW = 1000
"""Episodes over which rates are averaged."""
MIN_EPISODES = 100
"""Episodes needed before weights can be the best."""


class EpisodeWindow:
    """Statistics of the last `WINDOW` finished episodes."""

    def __init__(self) -> None:
        self._rows = np.zeros((WINDOW, 4))
        self.count = 0

    def add(self, finished: FinishedEpisodes) -> None:
        if not len(finished.lengths):
            return
        columns: tuple[Any, ...] = (finished.returns, finished.lengths, finished.success, finished.collision)
        count = len(finished.lengths)
        rows = (self.count + np.arange(count))[-WINDOW:] % WINDOW
        for i, column in enumerate(columns):
            self._rows[rows, i] = column[-WINDOW:]
        self.count += count

    def means(self) -> dict[str, float | None]:
        """Return the means by metric; None (not logged) before the first episode has finished."""
        names = ("mean_reward", "episode_length", "success_rate", "collision_rate")
        if self.count == 0:
            return dict.fromkeys(names)
        means = self._rows[: self.count].mean(axis=0)
        return {name: float(mean) for name, mean in zip(names, means, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows, self.count = np.array(state["rows"]), state["count"]


class DroneTrainer:
    """One training run, from its config to its last checkpoint."""

    def __init__(self, config: DroneConfig, out: Path, identity: str) -> None:
        """`identity`: see `checkpoints.identity`."""
        train = config.train
        self.config, self.out = config, out
        self.device = torch.device(train.device)
        _require_device(train.device)
        torch.set_num_threads(1)
        torch.manual_seed(train.seed)
        torch.use_deterministic_algorithms(train.torch_deterministic)
        self.rng = torch.Generator().manual_seed(train.seed)
        self.policy = DronePolicy(OBS_DIM, ACTION_DIM).to(self.device)
        self.optimizer = make_optimizer(self.policy, train)
        self.previous_steps = 0
        """Steps that the initial weights were trained for."""
        self._compile(train)
        self.fused = self._make_fused(train)
        self.backend = "torch" if self.fused is None else backend_name()
        """What computes the update; results of two backends differ in rounding."""
        worlds = config.env.num_envs * config.vec.num_envs
        self.fleet = Fleet(
            config.env_name, worlds, config.env.num_drones, train.seed, config.vec.num_workers, compiled=train.fused
        )
        if train.fused and (reason := self.fleet.chunks[0].reason_not_compiled) is not None:
            print(f"the simulation runs in numpy, which is slower: {reason}")
        self.obs = self.fleet.observe()
        self.episodes = EpisodeWindow()
        self.logger = trainkit.Logger(out / "metrics.jsonl")
        self.steps = self.epoch = 0
        self.best_reward = -math.inf
        self.start_time = time.perf_counter()
        self.identity = identity
        self.resume_folder = out / "resume"
        self.counters: dict[str, Any] = {"identity": identity, "backend": self.backend}
        """Saved with the state."""
        self.training_state = trainkit.TrainingState(
            model=self.policy,
            optimizer=self.optimizer,
            generators={"rng": self.rng},
            parts={"fleet": self.fleet, "episodes": self.episodes, "progress": self},
            counters=self.counters,
            metrics=self.logger,
        )
        shape = (train.bptt_horizon, config.num_agents)
        self.rollout = DroneRollout(
            obs=torch.zeros(*shape, OBS_DIM),  # aligned: BLAS may round differently if it is not
            actions=torch.zeros(*shape, ACTION_DIM),
            log_probs=torch.zeros(shape),
            values=torch.zeros(shape),
            rewards=torch.zeros(shape),
            dones=torch.zeros(shape),
        )

    def _compile(self, train: TrainConfig) -> None:
        """Compile the policy if configured; print notes about options without effect."""
        if train.cpu_offload and train.device == "cpu":
            print("train.cpu_offload has no effect on the CPU")
        if train.precision == "float16" and train.device == "cpu":
            print("train.precision float16 is slow on the CPU, and small gradients may underflow: bfloat16 is safer")
        if train.compile and train.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            print("train.compile is ignored: no C++ compiler was found")
        elif train.compile:
            self.policy.compile(fullgraph=train.compile_fullgraph, mode=train.compile_mode)

    def _make_fused(self, train: TrainConfig) -> FusedUpdate | None:
        """Return the update in C; None if it is not configured or not possible, which is printed."""
        reason = why_not(train) if train.fused else ""
        if reason is None:
            return FusedUpdate(self.policy, self.optimizer)
        if reason:
            print(f"the update runs in torch, which is slower: {reason}")
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress; the other parts have their own state."""
        progress = {name: getattr(self, name) for name in ("steps", "epoch", "best_reward", "previous_steps")}
        return {**progress, "seconds": time.perf_counter() - self.start_time}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("steps", "epoch", "best_reward", "previous_steps"):
            setattr(self, name, state[name])
        self.start_time = time.perf_counter() - state["seconds"]

    def resume(self) -> bool:
        """Restore the interrupted run in this folder; return False if there is none."""
        checkpoint = trainkit.newest(self.resume_folder)
        if checkpoint is None or checkpoint.counters.get("identity") != self.identity:
            if checkpoint is not None:
                print(f"{self.resume_folder} belongs to another config, other weights or other code: deleted")
            return False
        backend = checkpoint.counters.get("backend", "torch")
        for note in self.training_state.restore(checkpoint.state, source=checkpoint.path):
            print(note)
        self.counters["backend"] = self.backend
        if backend != self.backend:
            print(f"the update ran in {backend} before, and now in {self.backend}: rounding differs from here on")
        self.obs = self.fleet.observe()
        print(f"resuming from {checkpoint.path} at step {self.steps:,}")
        return True

    def start(self, weights: Path | None) -> None:
        """Start a new run, from these weights if given; files of a previous run in this folder are set aside."""
        if weights is not None:
            self.previous_steps, notes = checkpoints.load(weights, self.policy, self.optimizer, self.config.train)
            for note in [f"continuing from {weights}, trained for {self.previous_steps:,} steps", *notes]:
                print(note)
        shutil.rmtree(self.resume_folder, ignore_errors=True)
        metrics = Path(self.logger.path)
        if metrics.exists():
            metrics.replace(backup := metrics.with_suffix(".before.jsonl"))
            print(f"starting from scratch; the previous metrics are in {backup.name}")

    def run(self, stop: trainkit.Stopper) -> None:
        """Train to the end, or until a signal arrives."""
        train = self.config.train
        updates = math.ceil(train.total_timesteps / train.batch_size)
        with trainkit.Checkpoints(self.resume_folder, keep=1) as states:
            while self.epoch < updates and not stop:
                self._update(updates)
                if self.epoch % train.checkpoint_interval == 0 or self.epoch == updates:
                    self._save()
                    self.training_state.save(states, self.steps)
            if self.epoch < updates:  # not `_save`: an interruption must not affect which weights are the best
                self._save_weights("latest")
                self.training_state.save(states, self.steps)
        self._write_summary()
        if self.epoch < updates:
            print(f"stopped by {stop.name} after {self.steps:,} steps; run the same command to resume")
        else:
            shutil.rmtree(self.resume_folder)

    def _update(self, updates: int) -> None:
        train = self.config.train
        lr = train.learning_rate * (1.0 - self.epoch / updates if train.anneal_lr else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        start_time = time.perf_counter()
        next_values = self._collect()
        if self.fused is not None:
            losses = self.fused.update(self.rollout, next_values, train, self.rng)
        else:
            where = torch.device("cpu") if train.cpu_offload else self.device
            rollout = DroneRollout(*(getattr(self.rollout, f.name).to(where) for f in fields(self.rollout)))
            losses = update(self.policy, self.optimizer, rollout, next_values.to(where), train, self.rng)
        self.steps += train.batch_size
        self.epoch += 1
        row: dict[str, float | None] = {
            **self.episodes.means(),
            "sps": train.batch_size / (time.perf_counter() - start_time),
            "agent_steps": self.steps,
            "epoch": self.epoch,
            "learning_rate": lr,
            **losses,
        }
        self.logger.log(row, step=self.steps)
        if self.epoch == 1 or self.epoch % max(1, updates // 20) == 0:
            _print_progress(row)

    @torch.no_grad()
    def _collect(self) -> torch.Tensor:
        """Fill the rollout; return the values of the observations after it."""
        std = self.policy.log_std.exp().cpu().numpy()
        noise = torch.randn(self.rollout.actions.shape, generator=self.rng).numpy()
        means = torch.zeros(self.rollout.actions.shape)
        r = self.rollout
        columns = (r.obs, r.actions, r.values, r.rewards, r.dones, means)
        obs, actions, values, rewards, dones, mean = (column.numpy() for column in columns)
        for t in range(self.config.train.bptt_horizon):
            obs[t] = self.obs
            mean[t], values[t] = self._forward(self.rollout.obs[t])
            np.multiply(noise[t], std, out=actions[t])
            actions[t] += mean[t]
            step = self.fleet.step(actions[t])
            rewards[t], dones[t], self.obs = step.rewards, step.dones, step.obs
            self.episodes.add(step.finished)
        log_std = self.policy.log_std
        self.rollout.log_probs.copy_(self.policy.log_prob(means.to(log_std), self.rollout.actions.to(log_std)))
        return torch.from_numpy(self._forward(torch.tensor(self.obs))[1])

    def _forward(self, obs: torch.Tensor) -> tuple[Floats, Floats]:
        """Return the means of the actions, and the values."""
        if self.fused is not None:
            return self.fused.forward(obs)
        precision = self.config.train.precision
        with torch.autocast(self.device.type, getattr(torch, precision), precision != "float32"):
            mean, values = self.policy(obs.to(self.device))
        return mean.float().cpu().numpy(), values.float().cpu().numpy()

    def _save(self) -> None:
        strategy = self.config.autopilot.save_strategy
        names = ["latest"]
        reward = self.episodes.means()["mean_reward"]
        if (
            strategy != "latest"
            and reward is not None
            and reward > self.best_reward
            and self.episodes.count >= MIN_EPISODES
        ):
            self.best_reward = reward
            names.append("best")
        if strategy == "all":
            names.append(f"step_{self.steps}")
        for name in names:
            self._save_weights(name)

    def _save_weights(self, name: str) -> None:
        path = self.out / "checkpoints" / f"{name}.pt"
        checkpoints.save(path, self.policy, self.optimizer, self.config, self.previous_steps + self.steps)

    def _write_summary(self) -> None:
        seconds = time.perf_counter() - self.start_time
        content: dict[str, Any] = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "run_id": os.environ.get("LOOPLAB_RUN_ID") or self.out.resolve().name,
            **asdict(self.config),
            "metrics": {
                **{name: mean for name, mean in self.episodes.means().items() if mean is not None},
                "sps": self.steps / seconds,
                "agent_steps": self.steps,
                "epoch": self.epoch,
                "lifetime_steps": self.previous_steps + self.steps,
            },
        }
        text = json.dumps(content, indent=2) + "\n"
        trainkit.atomic_write(self.out / "trainer_summary.json", text.encode())


def _require_device(device: str) -> None:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[device]:
        raise LabError(f"train.device is {device!r}, which is not available", hint="use --train.device cpu")


def _print_progress(row: dict[str, float | None]) -> None:
    shown = {name: row[name] for name in ("mean_reward", "success_rate", "episode_length", "sps")}
    text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
    print(f"{row['agent_steps']:>10,} steps  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("task", nargs="?", metavar="ENV_NAME", help="drone_hover or drone_pickplace")
    parser.add_argument("--config", type=Path, default=HERE / "configs" / "baseline_quick.json")
    parser.add_argument("--out", type=Path, default=trainkit.run_dir(), help="folder of the run")
    parser.add_argument("--load-model-path", type=Path, help="checkpoint to start from")
    add_flags(parser)
    flags = vars(parser.parse_args())
    with trainkit.stopping() as stop:
        return train(flags, stop)


def train(flags: dict[str, Any], stop: trainkit.Stopper) -> int:
    """Run the training; return the exit code (on a signal, `stop` sets it)."""
    try:
        if flags["task"] is not None:
            flags["env_name"] = flags["task"]
        config, weights = read_config(flags["config"], flags), flags["load_model_path"]
        trainer = DroneTrainer(config, flags["out"], checkpoints.identity(config, weights, CODE))
        if not trainer.resume():
            trainer.start(weights or checkpoints.find(flags["out"], config))
        trainer.run(stop)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except NonFiniteUpdate as error:
        print(
            f"the training diverged in update {trainer.epoch + 1}: {error}; lower train.learning_rate "
            f"({config.train.learning_rate}) or train.max_grad_norm ({config.train.max_grad_norm})",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
