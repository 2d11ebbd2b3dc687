"""Version 1: PPO, in which every fish is a sample of one policy that all fish share.

    python experiments/v1/train.py                       # 128 ponds of 25 fish
    python experiments/v1/train.py --smoke --out /tmp/x  # does it run at all? a few seconds

Leaves in --out (the artifacts beside this file): checkpoints/policy.json with its weights, logs/metrics.jsonl,
plots/curves.png, media/episode.gif, schedule.json (what the schedules should reach), schedule_trace.json (what they
did), and eval.json, written by the frozen evaluation at the end. `survival_rate` of the log is the share of fish that
would live through an episode at the death rate of that iteration; only eval.json counts as a result.

SIGTERM saves first (exit code 143). Killed at any moment, the same command goes on from what is in resume/, and ends
with the same weights and rows as if nothing had happened; with other settings or changed code it begins anew.
"""

from __future__ import annotations

import argparse
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are small: more threads only wait for each other

import numpy as np
import torch
from torch import Tensor, nn

from looplab import trainkit
from looplab.errors import LabError
from looplab.rl.returns import compute_targets

HERE = Path(__file__).resolve().parent
LAB = HERE.parents[1]
if TYPE_CHECKING:
    from looplab.recipes.fish.evaluate import EPISODES, FORMAT, NUM_FISH, evaluate, load_policy, write_json
    from looplab.recipes.fish.fish_env import ACTIONS, OBSERVATIONS, STEPS, FishSchool, Floats, Reward
    from looplab.recipes.fish.pictures import save_curves, save_episode
else:  # the lab's own files, wherever it was copied to
    sys.path.insert(0, str(LAB))
    from evaluate import EPISODES, FORMAT, NUM_FISH, evaluate, load_policy, write_json
    from fish_env import ACTIONS, OBSERVATIONS, STEPS, FishSchool, Floats, Reward
    from pictures import save_curves, save_episode

LEAST_ENVS = 64
GIF_SEED = 7


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    """Drives the first weights, the actions, the order of the samples and how ponds start."""
    num_envs: int = 128
    """Ponds; at least 64, or the samples of an update are too much alike."""
    num_fish: int = NUM_FISH
    """Fish in a pond."""
    iterations: int = 60
    """How often it plays and learns."""
    steps: int = 32
    """Steps that every pond plays in an iteration."""
    hidden: int = 64
    """Units in each of the two hidden layers, of the actor and of the critic."""
    learning_rate: float = 0.001
    """Of Adam, at the start."""
    learning_rate_end: float = 0.0001
    """From when `settle` of the iterations are over."""
    entropy_coef: float = 0.01
    """What trying out is worth, at the start."""
    entropy_coef_end: float = 0.001
    """From when `settle` of the iterations are over."""
    settle: float = 0.8
    """The share of the run in which schedules move; after it they stay at their end."""
    gamma: float = 0.99
    """Discount a step."""
    gae_lambda: float = 0.95
    """How far advantages trust what was measured, rather than the critic."""
    clip: float = 0.2
    """By how much the probability of an action may change in an iteration."""
    epochs: int = 3
    """How often each sample is learned from."""
    minibatch: int = 8192
    """Samples of one step of Adam."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float = 0.5
    """Longer gradients are cut."""
    reward_scale: float = 0.05
    """Rewards are multiplied by it, so that the critic's values are about 1."""
    density: float = 0.0
    """Reward shaping, see fish_env.Reward."""
    divergence: float = 0.0
    """The same."""


SMOKE = {"num_envs": 4, "iterations": 3, "steps": 16, "minibatch": 512}


class Diverged(Exception):
    """A loss is no finite number any more."""


class Policy(nn.Module):
    """An actor and a critic, apart from each other."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.actor = _layers(hidden, ACTIONS, 0.01)
        self.critic = _layers(hidden, 1, 1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities of the actions, and the values of the states."""
        return torch.log_softmax(self.actor(observations), -1), self.critic(observations).squeeze(-1)


def _layers(hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    linear = [nn.Linear(OBSERVATIONS, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


@dataclass(frozen=True)
class Rollout:
    """What all fish did in an iteration; the first axis is time, the second the fish of all ponds."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    """Of the actions, when they were chosen."""
    values: Tensor
    """What the critic said then."""
    rewards: Tensor
    acted: Tensor
    """Whether the fish was alive: the rest is no sample."""
    died: Tensor
    done: Tensor
    """Whether it died, or its pond was over, with this step. The time is observed, so the end of a pond is an end."""


class Trainer:
    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.policy = Policy(settings.hidden)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.learning_rate, eps=1e-5)
        reward = Reward(density=settings.density, divergence=settings.divergence)
        # Far from the seeds of the evaluation.
        self.school = FishSchool(settings.num_envs, settings.num_fish, 1_000_000 * (settings.seed + 1), reward)
        # Ponds that all began now would always be equally old, and samples of an update alike.
        self.school.clock[:] = np.arange(settings.num_envs) * STEPS // settings.num_envs
        self.observation = self.school.observe()

    def schedules(self, iteration: int) -> dict[str, float]:
        """What holds in this iteration (1, 2, …). The end is reached with iterations to go, not after the last one."""
        settings = self.settings
        moved = min(1.0, (iteration - 1) / max(1.0, settings.settle * (settings.iterations - 1)))
        return {name: (1.0 - moved) * start + moved * end for name, (start, end) in declared(settings).items()}

    @torch.no_grad()
    def play(self) -> tuple[Rollout, Tensor]:
        """What the fish did in some steps, and the critic's values of what comes after."""
        columns: list[list[Tensor]] = [[] for _ in fields(Rollout)]
        for _ in range(self.settings.steps):
            seen = self._flat(self.observation)
            log_probs, values = self.policy(seen)
            actions = torch.multinomial(log_probs.exp(), 1).squeeze(-1)
            step = self.school.step(actions.numpy().reshape(self.school.alive.shape))
            row = (
                seen, actions, log_probs.gather(-1, actions[:, None]).squeeze(-1), values,
                torch.from_numpy(step.rewards).flatten() * self.settings.reward_scale,
                *(torch.from_numpy(flag).flatten() for flag in (step.acted, step.died, step.died | step.over[:, None])),
            )  # fmt: skip
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            self.observation = step.observations
        return Rollout(*(torch.stack(column) for column in columns)), self.policy(self._flat(self.observation))[1]

    def learn(self, rollout: Rollout, after: Tensor, entropy_coef: float) -> dict[str, float]:
        """One PPO update; gives means over the minibatches."""
        settings = self.settings
        gained = advantages(rollout, after, settings.gamma, settings.gae_lambda)
        target = gained + rollout.values
        columns = (rollout.observations, rollout.actions, rollout.log_probs, gained, target)
        flat = [column[rollout.acted] for column in columns]
        seen: list[Tensor] = []
        for _ in range(settings.epochs):
            for piece in torch.split(torch.randperm(len(flat[0])), settings.minibatch):
                observations, actions, log_probs_before, gain, goal = (column[piece] for column in flat)
                log_probs, values = self.policy(observations)
                ratio = (log_probs.gather(-1, actions[:, None]).squeeze(-1) - log_probs_before).exp()
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
                limited = ratio.clamp(1 - settings.clip, 1 + settings.clip)
                policy_loss = -torch.minimum(gain * ratio, gain * limited).mean()
                value_loss = 0.5 * (values - goal).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + settings.value_coef * value_loss - entropy_coef * entropy
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), settings.max_grad_norm)
                if not math.isfinite(float(norm)):
                    raise Diverged(f"the gradient is {float(norm)}; lower learning_rate ({settings.learning_rate})")
                self.optimizer.step()
                kl = (ratio - 1 - ratio.log()).mean()
                seen.append(torch.stack([policy_loss, value_loss, entropy, kl]).detach())
        names = ("policy_loss", "value_loss", "entropy", "approx_kl")
        losses = dict(zip(names, torch.stack(seen).mean(0).tolist(), strict=True))
        left = (flat[4] - rollout.values[rollout.acted]).var() / flat[4].var().clamp(min=1e-12)
        return {**losses, "explained_variance": float(1.0 - left)}

    def _flat(self, observation: Floats) -> Tensor:
        # A copy, because BLAS may round differently at another alignment, and NumPy's is chance.
        return torch.tensor(observation).view(-1, OBSERVATIONS)


def advantages(rollout: Rollout, after: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation, for each fish along its own life; entries of the dead mean nothing."""
    values, done = torch.cat([rollout.values, after[None]]).numpy(), rollout.done.numpy()
    found = compute_targets(rollout.rewards.numpy(), values, done, np.zeros_like(done), gamma=gamma, lam=gae_lambda)
    return torch.from_numpy(found.advantages)


def declared(settings: Settings) -> dict[str, tuple[float, float]]:
    """Where each schedule starts and ends."""
    return {
        "learning_rate": (settings.learning_rate, settings.learning_rate_end),
        "entropy_coef": (settings.entropy_coef, settings.entropy_coef_end),
    }


def save_policy(folder: Path, policy: Policy, iteration: int) -> None:
    """Weights first, then the layout that names them: at any moment policy.json belongs to a whole file."""
    folder.mkdir(parents=True, exist_ok=True)
    linear = [layer for layer in policy.actor if isinstance(layer, nn.Linear)]
    arrays: dict[str, Any] = {}
    for number, layer in enumerate(linear):
        arrays[f"w{number}"] = np.ascontiguousarray(layer.weight.detach().numpy().T)
        arrays[f"b{number}"] = layer.bias.detach().numpy()
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    name = f"policy_{iteration:06d}.npz"
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(packed.getvalue())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    sizes = [OBSERVATIONS, *(layer.out_features for layer in linear)]
    write_json(
        folder / "policy.json",
        {"format": FORMAT, "weights": name, "sizes": sizes, "activation": "tanh", "iteration": iteration},
    )
    for old in folder.glob("policy_*.npz"):
        if old.name != name:
            old.unlink()


def identity(settings: Settings, smoke: bool) -> str:
    """What makes a training this one: only the same settings and the same code go on with what it left."""
    digest = hashlib.sha256(json.dumps([asdict(settings), smoke]).encode())
    for code in (Path(__file__), LAB / "fish_env.py"):
        digest.update(hashlib.sha256(code.read_bytes()).digest())
    return digest.hexdigest()


def go_on(trainer: Trainer, everything: trainkit.Everything, folder: Path, identity: str) -> bool:
    """Take up the training that was interrupted here; false where there is none."""
    left = trainkit.newest(folder)
    if left is None or left.counters.get("identity") != identity:
        if left is not None:
            print(f"{folder} is of other settings or other code, and is removed: beginning anew")
        return False
    for note in everything.restore(left.state, source=left.path):
        print(note)
    trainer.observation = trainer.school.observe()
    print(f"going on from {left.path}: {left.step} iterations are done")
    return True


def run(settings: Settings, out: Path, smoke: bool) -> dict[str, Any]:
    """Train, leave everything in `out`, and give what the frozen evaluation says. A signal ends in SystemExit."""
    trainer = Trainer(settings)
    # A lab reads metrics.jsonl from its run folder itself.
    in_lab = "LOOPLAB_RUN_DIR" in os.environ and out.resolve() == trainkit.run_dir().resolve()
    log_file = out / "metrics.jsonl" if in_lab else out / "logs" / "metrics.jsonl"
    write_json(out / "schedule.json", {n: {"start": a, "end": b} for n, (a, b) in declared(settings).items()})
    rows: list[dict[str, float]] = []
    done: dict[str, Any] = {"identity": identity(settings, smoke), "samples": 0, "seconds": 0.0, "rows": rows}
    resume = out / "resume"
    with trainkit.Logger(log_file) as logger, trainkit.Checkpoints(resume, keep=1) as states:
        parts = {"school": trainer.school}
        everything = trainkit.Everything(
            model=trainer.policy, optimizer=trainer.optimizer, parts=parts, counters=done, metrics=logger
        )
        if go_on(trainer, everything, resume, done["identity"]):
            rows = done["rows"]
        else:  # what is here is of a training that this one replaces
            shutil.rmtree(resume, ignore_errors=True)
            log_file.unlink(missing_ok=True)
        began = time.perf_counter() - done["seconds"]
        with trainkit.stopping() as stop:
            for iteration in range(len(rows) + 1, settings.iterations + 1):
                now = trainer.schedules(iteration)
                for group in trainer.optimizer.param_groups:
                    group["lr"] = now["learning_rate"]
                rollout, after = trainer.play()
                losses = trainer.learn(rollout, after, now["entropy_coef"])
                lived, deaths = int(rollout.acted.sum()), int(rollout.died.sum())
                done["samples"] += lived
                done["seconds"] = time.perf_counter() - began
                row = {
                    "survival_rate": (1.0 - deaths / lived) ** STEPS,
                    "mean_reward": float(rollout.rewards[rollout.acted].mean()) / settings.reward_scale,
                    "alive": lived / rollout.acted.numel(),
                    **losses,
                    **now,
                    "samples": done["samples"],
                    "sps": done["samples"] / done["seconds"],
                }
                rows.append(row)
                logger.log(row, step=iteration)
                stopped = bool(stop)
                if iteration % 10 == 0 or iteration == settings.iterations or stopped:
                    save_policy(out / "checkpoints", trainer.policy, iteration)
                    names = (*now, "survival_rate")
                    trace = [{"iteration": i, **{n: r[n] for n in names}} for i, r in enumerate(rows, 1)]
                    write_json(out / "schedule_trace.json", {"trace": trace})
                    everything.save(states, iteration)
                    print(
                        f"{iteration:4}/{settings.iterations}  survival {row['survival_rate']:.3f}  reward "
                        f"{row['mean_reward']:.3f}  entropy {row['entropy']:.2f}  {row['sps']:,.0f} samples/s",
                        flush=True,
                    )
                if stopped:
                    print(f"stopped by {stop.name}; the same command goes on from there")
                    break
        policy = load_policy(out / "checkpoints")
        result = evaluate(policy, 2 if smoke else EPISODES) | {"policy_sha256": policy.sha256}
        write_json(out / "eval.json", result)
        scores = {f"eval/{name}": result[name] for name in ("survival_rate", "min_survival", "mean_return")}
        logger.log(scores, step=settings.iterations)
        logger.summary({**scores, "samples": done["samples"], "seconds": time.perf_counter() - began})
    save_curves(out / "plots" / "curves.png", rows, ("survival_rate", "mean_reward", "entropy", "value_loss"))
    save_episode(out / "media" / "episode.gif", policy, settings.num_fish, GIF_SEED, 50 if smoke else STEPS)
    shutil.rmtree(resume)
    return result


def read_settings(config: Path | None, flags: dict[str, Any]) -> Settings:
    """Flags count more than the file, the file more than the defaults."""
    given: Any = {}
    if config is not None:
        try:
            given = json.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            raise LabError(f"cannot read the config: {error.strerror}", file=config) from error
        except ValueError as error:  # neither UTF-8 nor JSON
            raise LabError(f"the config is not JSON: {error}", file=config) from error
    kinds: dict[str, type[Any]] = {field.name: type(field.default) for field in fields(Settings)}
    if not isinstance(given, dict):
        raise LabError("the config must be a JSON object", file=config)
    if unknown := sorted(given.keys() - kinds.keys()):
        raise LabError(f"unknown keys: {', '.join(unknown)}", file=config, hint=f"there are: {', '.join(kinds)}")
    smoke = SMOKE if flags.pop("smoke") else {}
    values = {**given, **smoke, **{name: value for name, value in flags.items() if value is not None}}
    for name, value in values.items():
        kind: type[Any] = kinds[name]
        if kind is float and type(value) is int:
            values[name] = value = float(value)
        if type(value) is not kind or not math.isfinite(value):
            raise LabError(f"{name} takes a {'whole ' if kind is int else ''}number, not {value!r}", file=config)
        least = 1 if kind is int and name != "seed" else 0
        if value < least:
            raise LabError(f"{name} must be {least} or more, not {value}", file=config)
    settings = Settings(**values)
    if settings.num_envs < LEAST_ENVS and not smoke:
        raise LabError(f"num_envs is {settings.num_envs}, but {LEAST_ENVS} is the least", hint="or try --smoke")
    for name in ("gamma", "gae_lambda", "settle"):
        if getattr(settings, name) > 1:
            raise LabError(f"{name} must be within 0 … 1, not {getattr(settings, name)}", file=config)
    return settings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, help="JSON with any of the keys below")
    parser.add_argument("--out", type=Path, default=HERE / "artifacts")
    parser.add_argument("--smoke", action="store_true", help="tiny: does it run at all?")
    for field in fields(Settings):
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        parser.add_argument(*names, dest=field.name, type=type(field.default), help=f"default: {field.default}")
    flags = vars(parser.parse_args())
    out, config, smoke = flags.pop("out"), flags.pop("config"), flags["smoke"]
    try:
        settings = read_settings(config, flags)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "settings.json", asdict(settings))
        result = run(settings, out, smoke)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Diverged as error:
        print(f"the training diverged: {error}", file=sys.stderr)
        return 1
    low, high = result["survival_low"], result["survival_high"]
    print(f"survival {result['survival_rate']:.3f} [{low:.3f}, {high:.3f}] in {result['episodes']} episodes: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
