"""Version 1: PPO with one policy shared by all fish.

    python experiments/v1/train.py                       # 128 ponds of 25 fish
    python experiments/v1/train.py --smoke --out /tmp/x  # smoke test of a few seconds

Writes to --out (default: the artifacts folder next to this file): checkpoints/policy.json with its weights,
logs/metrics.jsonl, tb_logs/ (the same for TensorBoard, if it is installed; not in runs of a study), plots/curves.png,
media/episode.gif, schedule.json (declared schedules), schedule_trace.json (actual schedules), settings.json, and
eval.json, the result of the frozen evaluation. `survival_rate` in the log is the expected fraction of fish that survive
an episode at the death rate of that iteration; only eval.json is a result.

SIGTERM saves first (exit code 143). A run that was killed at any moment resumes from resume/ with the same command, and
ends with the same weights and rows, to the bit; with another config or changed code it starts from scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only add overhead to matrices this small

import numpy as np
import torch
from torch import Tensor, nn

from looplab import trainkit
from looplab.errors import LabError
from looplab.rl.metrics import import_summary_writer
from looplab.rl.returns import compute_targets

HERE = Path(__file__).resolve().parent
LAB = HERE.parents[1]
if TYPE_CHECKING:
    from looplab.recipes.fish.evaluate import EPISODES, FORMAT, NUM_FISH, evaluate, load_policy, write_json
    from looplab.recipes.fish.fish_env import NUM_ACTIONS, OBS_DIM, STEPS, FishSchool, Floats, Reward
    from looplab.recipes.fish.pictures import save_curves, save_episode
else:  # the modules of the lab, wherever it was copied to
    sys.path.insert(0, str(LAB))
    from evaluate import EPISODES, FORMAT, NUM_FISH, evaluate, load_policy, write_json
    from fish_env import NUM_ACTIONS, OBS_DIM, STEPS, FishSchool, Floats, Reward
    from pictures import save_curves, save_episode

MIN_ENVS = 64
GIF_SEED = 7


@dataclass(frozen=True)
class FishConfig:
    seed: int = 0
    """Determines the initial weights, the actions, the minibatches and the initial states of the ponds."""
    num_envs: int = 128
    """Parallel ponds; at least 64, because otherwise the samples of an update are too correlated."""
    num_fish: int = NUM_FISH
    """Fish per pond."""
    iterations: int = 60
    """PPO updates."""
    steps: int = 32
    """Rollout steps per pond and iteration."""
    hidden: int = 64
    """Units in each of the two hidden layers of actor and critic."""
    learning_rate: float = 0.001
    """Initial learning rate of Adam."""
    learning_rate_end: float = 0.0001
    """Final value, reached after the fraction `settle` of the iterations."""
    entropy_coef: float = 0.01
    """Initial weight of the entropy bonus."""
    entropy_coef_end: float = 0.001
    """Final value, reached after the fraction `settle` of the iterations."""
    settle: float = 0.8
    """Fraction of the run over which schedules change; after it they stay at their final value."""
    gamma: float = 0.99
    """Discount factor per step."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation."""
    clip: float = 0.2
    """PPO clip range of the probability ratio."""
    epochs: int = 3
    """Epochs over the samples of an iteration."""
    minibatch: int = 8192
    """Samples per optimizer step."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradient clipping."""
    reward_scale: float = 0.05
    """Factor on the rewards, so that values are about 1."""
    density: float = 0.0
    """Reward shaping, see fish_env.Reward."""
    divergence: float = 0.0
    """The same."""


SMOKE = {"num_envs": 4, "iterations": 3, "steps": 16, "minibatch": 512}


class FishDiverged(Exception):
    """The gradient is not finite."""


class FishPolicy(nn.Module):
    """An actor and a critic, as separate networks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.actor = _mlp(hidden, NUM_ACTIONS, 0.01)
        self.critic = _mlp(hidden, 1, 1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log probabilities of all actions, and the values."""
        return torch.log_softmax(self.actor(obs), -1), self.critic(obs).squeeze(-1)


def _mlp(hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    linear = [nn.Linear(OBS_DIM, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


@dataclass(frozen=True)
class FishRollout:
    """Transitions of all fish in an iteration; axes: time, fish of all ponds."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    """Log probabilities of the actions under the behaviour policy."""
    values: Tensor
    """Values under the behaviour policy."""
    rewards: Tensor
    acted: Tensor
    """Whether the fish was alive; all other entries are invalid."""
    died: Tensor
    dones: Tensor
    """Whether the fish died or its episode ended. The time is observed, so a time-out is a termination too."""


class FishTrainer:
    def __init__(self, config: FishConfig) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(config.seed)
        self.config = config
        self.policy = FishPolicy(config.hidden)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.learning_rate, eps=1e-5)
        reward = Reward(density=config.density, divergence=config.divergence)
        # Disjoint from the seeds of the evaluation.
        self.school = FishSchool(config.num_envs, config.num_fish, 1_000_000 * (config.seed + 1), reward)
        # Staggered, so that the ponds are not all at the same step and the samples of an update are less correlated.
        self.school.clock[:] = np.arange(config.num_envs) * STEPS // config.num_envs
        self.obs = self.school.observe()

    def schedules(self, iteration: int) -> dict[str, float]:
        """Return the scheduled values of an iteration (from 1). Final values are reached before the last iteration."""
        config = self.config
        progress = min(1.0, (iteration - 1) / max(1.0, config.settle * (config.iterations - 1)))
        return {
            name: (1.0 - progress) * start + progress * end for name, (start, end) in declared_schedules(config).items()
        }

    @torch.no_grad()
    def collect(self) -> tuple[FishRollout, Tensor]:
        """Collect a rollout; return it and the values of the observations after it."""
        columns: list[list[Tensor]] = [[] for _ in fields(FishRollout)]
        for _ in range(self.config.steps):
            obs = self._flat(self.obs)
            log_probs, values = self.policy(obs)
            actions = torch.multinomial(log_probs.exp(), 1).squeeze(-1)
            step = self.school.step(actions.numpy().reshape(self.school.alive.shape))
            row = (
                obs, actions, log_probs.gather(-1, actions[:, None]).squeeze(-1), values,
                torch.from_numpy(step.rewards).flatten() * self.config.reward_scale,
                *(torch.from_numpy(f).flatten() for f in (step.acted, step.died, step.died | step.dones[:, None])),
            )  # fmt: skip
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            self.obs = step.obs
        return FishRollout(*(torch.stack(column) for column in columns)), self.policy(self._flat(self.obs))[1]

    def update(self, rollout: FishRollout, next_values: Tensor, entropy_coef: float) -> dict[str, float]:
        """Run one PPO update; return losses averaged over the minibatches."""
        config = self.config
        advantages = compute_advantages(rollout, next_values, config.gamma, config.gae_lambda)
        returns = advantages + rollout.values
        columns = (rollout.obs, rollout.actions, rollout.log_probs, advantages, returns)
        flat = [column[rollout.acted] for column in columns]
        stats: list[Tensor] = []
        for _ in range(config.epochs):
            for minibatch in torch.split(torch.randperm(len(flat[0])), config.minibatch):
                obs, actions, old_log_probs, adv, ret = (column[minibatch] for column in flat)
                log_probs, values = self.policy(obs)
                ratio = (log_probs.gather(-1, actions[:, None]).squeeze(-1) - old_log_probs).exp()
                adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
                clipped_ratio = ratio.clamp(1 - config.clip, 1 + config.clip)
                policy_loss = -torch.minimum(adv * ratio, adv * clipped_ratio).mean()
                value_loss = 0.5 * (values - ret).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + config.value_coef * value_loss - entropy_coef * entropy
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
                if not math.isfinite(float(norm)):
                    raise FishDiverged(f"the gradient is {float(norm)}; lower learning_rate ({config.learning_rate})")
                self.optimizer.step()
                approx_kl = (ratio - 1 - ratio.log()).mean()
                stats.append(torch.stack([policy_loss, value_loss, entropy, approx_kl]).detach())
        names = ("policy_loss", "value_loss", "entropy", "approx_kl")
        losses = dict(zip(names, torch.stack(stats).mean(0).tolist(), strict=True))
        unexplained = (flat[4] - rollout.values[rollout.acted]).var() / flat[4].var().clamp(min=1e-12)
        return {**losses, "explained_variance": float(1.0 - unexplained)}

    def _flat(self, obs: Floats) -> Tensor:
        # Copied, because BLAS may round differently for another memory alignment, and numpy's alignment is arbitrary.
        return torch.tensor(obs).view(-1, OBS_DIM)


def compute_advantages(rollout: FishRollout, next_values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation per fish; entries of dead fish are invalid."""
    values, dones = torch.cat([rollout.values, next_values[None]]).numpy(), rollout.dones.numpy()
    found = compute_targets(rollout.rewards.numpy(), values, dones, np.zeros_like(dones), gamma=gamma, lam=gae_lambda)
    return torch.from_numpy(found.advantages)


def declared_schedules(config: FishConfig) -> dict[str, tuple[float, float]]:
    """Return the initial and the final value of each schedule."""
    return {
        "learning_rate": (config.learning_rate, config.learning_rate_end),
        "entropy_coef": (config.entropy_coef, config.entropy_coef_end),
    }


def save_policy(folder: Path, policy: FishPolicy, iteration: int) -> None:
    """Save the weights first, then policy.json, so that policy.json always names a complete file."""
    folder.mkdir(parents=True, exist_ok=True)
    linear = [layer for layer in policy.actor if isinstance(layer, nn.Linear)]
    arrays: dict[str, Any] = {}
    for number, layer in enumerate(linear):
        arrays[f"w{number}"] = np.ascontiguousarray(layer.weight.detach().numpy().T)
        arrays[f"b{number}"] = layer.bias.detach().numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    name = f"policy_{iteration:06d}.npz"
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    sizes = [OBS_DIM, *(layer.out_features for layer in linear)]
    write_json(
        folder / "policy.json",
        {"format": FORMAT, "weights": name, "sizes": sizes, "activation": "tanh", "iteration": iteration},
    )
    for old in folder.glob("policy_*.npz"):
        if old.name != name:
            old.unlink()


def identity(config: FishConfig, smoke: bool) -> str:
    """Hash config and code. A run resumes only from a state with the same hash."""
    digest = hashlib.sha256(json.dumps([asdict(config), smoke]).encode())
    for code in (Path(__file__), LAB / "fish_env.py"):
        digest.update(hashlib.sha256(code.read_bytes()).digest())
    return digest.hexdigest()


def restore(trainer: FishTrainer, training_state: trainkit.TrainingState, folder: Path, identity: str) -> bool:
    """Restore the interrupted run in this folder; return False if there is none."""
    checkpoint = trainkit.newest(folder)
    if checkpoint is None or checkpoint.counters.get("identity") != identity:
        if checkpoint is not None:
            print(f"{folder} belongs to another config or other code: deleted, starting from scratch")
        return False
    for note in training_state.restore(checkpoint.state, source=checkpoint.path):
        print(note)
    trainer.obs = trainer.school.observe()
    print(f"resuming from {checkpoint.path} at iteration {checkpoint.step}")
    return True


def open_tensorboard(folder: Path, iteration: int) -> Any:
    """Return a writer of TensorBoard events that hides events from `iteration` on; None if it is not installed."""
    if iteration == 1:  # events of a previous run
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
    try:
        return import_summary_writer()(str(folder), purge_step=iteration)
    except LabError as error:
        print(f"no events in {folder}: {error}")
        return None


def run(config: FishConfig, out: Path, smoke: bool) -> dict[str, Any]:
    """Train, write all artifacts to `out`, and return the result of the evaluation. A signal raises SystemExit."""
    trainer = FishTrainer(config)
    # The lab reads metrics.jsonl from the top of the run folder.
    in_lab = "LOOPLAB_RUN_DIR" in os.environ and out.resolve() == trainkit.run_dir().resolve()
    log_file = out / "metrics.jsonl" if in_lab else out / "logs" / "metrics.jsonl"
    write_json(out / "settings.json", asdict(config))
    write_json(out / "schedule.json", {n: {"start": a, "end": b} for n, (a, b) in declared_schedules(config).items()})
    rows: list[dict[str, float]] = []
    counters: dict[str, Any] = {"identity": identity(config, smoke), "samples": 0, "seconds": 0.0, "rows": rows}
    resume_folder = out / "resume"
    with (
        trainkit.Logger(log_file) as logger,
        trainkit.Checkpoints(resume_folder, keep=1) as states,
        contextlib.ExitStack() as stack,
    ):
        parts = {"school": trainer.school}
        training_state = trainkit.TrainingState(
            model=trainer.policy, optimizer=trainer.optimizer, parts=parts, counters=counters, metrics=logger
        )
        if restore(trainer, training_state, resume_folder, counters["identity"]):
            rows = counters["rows"]
        else:  # the folder may contain files of a previous run
            shutil.rmtree(resume_folder, ignore_errors=True)
            log_file.unlink(missing_ok=True)
        board = None if in_lab else open_tensorboard(out / "tb_logs", len(rows) + 1)
        if board is not None:
            stack.callback(board.close)

        def log(row: dict[str, float], step: int) -> None:
            logger.log(row, step=step)
            if board is not None:
                for name, value in row.items():
                    board.add_scalar(name, value, step)

        start_time = time.perf_counter() - counters["seconds"]
        with trainkit.stopping() as stop:
            for iteration in range(len(rows) + 1, config.iterations + 1):
                scheduled = trainer.schedules(iteration)
                for group in trainer.optimizer.param_groups:
                    group["lr"] = scheduled["learning_rate"]
                rollout, next_values = trainer.collect()
                losses = trainer.update(rollout, next_values, scheduled["entropy_coef"])
                samples, deaths = int(rollout.acted.sum()), int(rollout.died.sum())
                counters["samples"] += samples
                counters["seconds"] = time.perf_counter() - start_time
                row = {
                    "survival_rate": (1.0 - deaths / samples) ** STEPS,
                    "mean_reward": float(rollout.rewards[rollout.acted].mean()) / config.reward_scale,
                    "alive": samples / rollout.acted.numel(),
                    **losses,
                    **scheduled,
                    "samples": counters["samples"],
                    "sps": counters["samples"] / counters["seconds"],
                }
                rows.append(row)
                log(row, iteration)
                stopped = bool(stop)
                if iteration % 10 == 0 or iteration == config.iterations or stopped:
                    save_policy(out / "checkpoints", trainer.policy, iteration)
                    names = (*scheduled, "survival_rate")
                    trace = [{"iteration": i, **{n: r[n] for n in names}} for i, r in enumerate(rows, 1)]
                    write_json(out / "schedule_trace.json", {"trace": trace})
                    if board is not None:
                        board.flush()
                    training_state.save(states, iteration)
                    print(
                        f"{iteration:4}/{config.iterations}  survival {row['survival_rate']:.3f}  reward "
                        f"{row['mean_reward']:.3f}  entropy {row['entropy']:.2f}  {row['sps']:,.0f} samples/s",
                        flush=True,
                    )
                if stopped:
                    print(f"stopped by {stop.name}; run the same command to resume")
                    break
        policy = load_policy(out / "checkpoints")
        result = evaluate(policy, 2 if smoke else EPISODES) | {"policy_sha256": policy.sha256}
        write_json(out / "eval.json", result)
        scores = {f"eval/{name}": result[name] for name in ("survival_rate", "min_survival", "mean_return")}
        log(scores, config.iterations)
        logger.summary({**scores, "samples": counters["samples"], "seconds": time.perf_counter() - start_time})
    save_curves(out / "plots" / "curves.png", rows, ("survival_rate", "mean_reward", "entropy", "value_loss"))
    save_episode(out / "media" / "episode.gif", policy, config.num_fish, GIF_SEED, 50 if smoke else STEPS)
    shutil.rmtree(resume_folder)
    return result


def read_config(file: Path | None, flags: dict[str, Any]) -> FishConfig:
    """Merge defaults, file and flags; flags take precedence. Raises LabError."""
    given: Any = {}
    if file is not None:
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise LabError(f"cannot read the config: {error.strerror}", file=file) from error
        except ValueError as error:  # neither UTF-8 nor JSON
            raise LabError(f"the config is not JSON: {error}", file=file) from error
    kinds: dict[str, type[Any]] = {field.name: type(field.default) for field in fields(FishConfig)}
    if not isinstance(given, dict):
        raise LabError("the config must be a JSON object", file=file)
    if unknown := sorted(given.keys() - kinds.keys()):
        raise LabError(f"unknown keys: {', '.join(unknown)}", file=file, hint=f"known keys: {', '.join(kinds)}")
    smoke = SMOKE if flags.pop("smoke") else {}
    values = {**given, **smoke, **{name: value for name, value in flags.items() if value is not None}}
    for name, value in values.items():
        kind: type[Any] = kinds[name]
        if kind is float and type(value) is int:
            values[name] = value = float(value)
        if type(value) is not kind or not math.isfinite(value):
            raise LabError(f"{name} must be {'an integer' if kind is int else 'a number'}, not {value!r}", file=file)
        minimum = 1 if kind is int and name != "seed" else 0
        if value < minimum:
            raise LabError(f"{name} must be at least {minimum}, not {value}", file=file)
    config = FishConfig(**values)
    if config.num_envs < MIN_ENVS and not smoke:
        raise LabError(f"num_envs is {config.num_envs}, but must be at least {MIN_ENVS}", hint="or use --smoke")
    for name in ("gamma", "gae_lambda", "settle"):
        if getattr(config, name) > 1:
            raise LabError(f"{name} must be between 0 and 1, not {getattr(config, name)}", file=file)
    return config


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, help="JSON file with any of the keys below")
    parser.add_argument("--out", type=Path, default=HERE / "artifacts")
    parser.add_argument("--smoke", action="store_true", help="smoke test: tiny, takes a few seconds")
    for field in fields(FishConfig):
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        parser.add_argument(*names, dest=field.name, type=type(field.default), help=f"default: {field.default}")
    flags = vars(parser.parse_args())
    out, file, smoke = flags.pop("out"), flags.pop("config"), flags["smoke"]
    try:
        config = read_config(file, flags)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "settings.json", asdict(config))
        result = run(config, out, smoke)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except FishDiverged as error:
        print(f"the training diverged: {error}", file=sys.stderr)
        return 1
    low, high = result["survival_low"], result["survival_high"]
    print(f"survival {result['survival_rate']:.3f} [{low:.3f}, {high:.3f}] in {result['episodes']} episodes: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
