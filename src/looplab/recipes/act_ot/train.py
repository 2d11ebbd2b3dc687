"""Train an action-chunking policy on two domains, with an optimal-transport loss that aligns their features.

    python train.py --config_path=configs/baseline.json --steps=2000 --output_dir=outputs/try

Flags override keys of the config: `--ot.lambda_ot=0.2` or `--ot.lambda_ot 0.2`. The output_dir must not exist yet.
Metrics are written to $LOOPLAB_METRICS, or to metrics.jsonl in the output_dir.
"""

import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only add overhead to a network this small

import numpy as np
import numpy.typing as npt
import torch

HERE = Path(__file__).resolve().parent
if TYPE_CHECKING:
    from looplab.recipes.act_ot.demos import CAMERAS, Demos, load_demos
    from looplab.recipes.act_ot.ot_loss import LossConfig, TransportLoss, transport_loss
    from looplab.recipes.act_ot.pairs import PairSampler, PairSamplingConfig, pair_episodes
    from looplab.recipes.act_ot.policy import ActPolicy, PolicyConfig, kl_divergence, masked_l1_loss
else:  # the modules next to this file, wherever the lab was copied to
    from demos import CAMERAS, Demos, load_demos
    from ot_loss import LossConfig, TransportLoss, transport_loss
    from pairs import PairSampler, PairSamplingConfig, pair_episodes
    from policy import ActPolicy, PolicyConfig, kl_divergence, masked_l1_loss

Ints = npt.NDArray[np.int64]
DEFAULTS: dict[str, Any] = {
    "steps": 2000,
    "log_freq": 50,
    "eval_freq": 200,
    "batch_size": 8,
    "num_workers": 0,
    "seed": 1000,
    "output_dir": None,
    "dataset": {"root": "data", "source_episodes": 99, "target_episodes": 20, "held_out_episodes": 20},
    "policy": {},
    "optimizer": {"type": "adamw", "lr": None, "weight_decay": None, "grad_clip_norm": 10.0},
    "wandb": {"enable": False, "mode": "offline", "entity": None, "project": None, "disable_artifact": True},
    "ot": None,
}
OT_KEYS = {"lambda_ot", "window_size", "topk_src_episodes", "sharpness", "cutoff", "no_window", "batch_ratio"}
OT_KEYS |= {"bc_src_weight", "loss_config"}
MAX_EVAL_FRAMES = 1000
"""Maximum number of frames per evaluation."""


# --- config: defaults, then the file, then the flags


def read_config(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the config of this run. Raises ValueError if it is invalid."""
    flags = read_flags(arguments)
    path = Path(flags.pop("config_path", HERE / "configs" / "baseline.json"))
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno} is not JSON: {error.msg}") from None
    for name, text in flags.items():
        *parents, leaf = name.split(".")
        section = given
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ValueError(f"--{name}: {parent} is not a section")
        try:
            section[leaf] = json.loads(text)
        except json.JSONDecodeError:
            section[leaf] = text
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"unknown key {min(unknown)}; known keys: {', '.join(DEFAULTS)}")
    config = {**DEFAULTS, **given}
    for part in ("dataset", "optimizer", "wandb"):
        unknown = set(config[part]) - set(DEFAULTS[part])
        if unknown:
            raise ValueError(f"unknown key {part}.{min(unknown)}; known keys: {', '.join(DEFAULTS[part])}")
        config[part] = {**DEFAULTS[part], **config[part]}
    for key in ("steps", "log_freq", "eval_freq", "batch_size"):
        if type(config[key]) is not int or config[key] < 1:
            raise ValueError(f"{key} must be an integer ≥ 1, not {config[key]!r}")
    if type(config["seed"]) is not int or config["seed"] < 0:
        raise ValueError(f"seed must be an integer ≥ 0, not {config['seed']!r}")
    return config


def read_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Parse `--name=value` and `--name value`."""
    flags: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("--"):
            raise ValueError(f"{argument!r} is not a flag; write --name=value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            following = next(remaining, None)
            if following is None or following.startswith("--"):
                raise ValueError(f"--{name} needs a value")
            value = following
        flags[name] = value
    return flags


def read_policy(config: Mapping[str, Any]) -> PolicyConfig:
    """Read the `policy` section. The optimizer's keys may be there, in `optimizer`, or in both if they agree."""
    section = dict(config["policy"])
    for policy_key, key in (("optimizer_lr", "lr"), ("optimizer_weight_decay", "weight_decay")):
        value = config["optimizer"][key]
        if value is not None and section.setdefault(policy_key, value) != value:
            raise ValueError(
                f"optimizer.{key} is {value} but policy.{policy_key} is {section[policy_key]}; change both together"
            )
    if config["optimizer"]["type"] != "adamw":
        raise ValueError(f"optimizer.type must be adamw, not {config['optimizer']['type']!r}")
    policy = PolicyConfig.read(section)
    if policy.device.partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise ValueError(f"policy.device must be cpu, cuda or mps, not {policy.device!r}")
    if policy.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"policy.device is {policy.device}, but PyTorch finds no such device; use cpu")
    return policy


def read_ot_weights(ot: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return lambda_ot, batch_ratio and bc_src_weight."""
    if set(ot) - OT_KEYS:
        raise ValueError(f"unknown key ot.{min(set(ot) - OT_KEYS)}; known keys: {', '.join(sorted(OT_KEYS))}")
    shares = []
    for key, default in (("lambda_ot", 0.0), ("batch_ratio", 1.0), ("bc_src_weight", 0.9)):
        value = ot.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"ot.{key} must be a number ≥ 0, not {value!r}")
        shares.append(float(value))
    if shares[2] > 1:
        raise ValueError(f"ot.bc_src_weight is the fraction of source frames, from 0 to 1, not {shares[2]}")
    return shares[0], shares[1], shares[2]


# --- logging


class PlainLogger:
    """Fallback if looplab is not installed: the same rows, but not safe against threads and kills."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        row = {"step": step, "time": round(time.time(), 3), **{k: v for k, v in metrics.items() if v is not None}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: v if math.isfinite(v) else str(v) for k, v in row.items()}) + "\n")

    def summary(self, metrics: Mapping[str, Any]) -> None:
        (self.path.parent / "trainer_summary.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def open_logger(output_dir: Path) -> Any:
    path = Path(os.environ.get("LOOPLAB_METRICS") or output_dir / "metrics.jsonl")
    try:
        from looplab import trainkit
    except ImportError:
        return PlainLogger(path)
    return trainkit.Logger(path)


def open_wandb(config: Mapping[str, Any], output_dir: Path) -> Any:
    """Start a W&B run; None if disabled. W&B's environment variables override the config."""
    section = config["wandb"]
    if section["enable"] is not True:
        return None
    try:
        import wandb
    except ImportError:
        raise SystemExit("wandb.enable is true, but wandb is not installed: pip install wandb") from None
    mode: Any = os.environ.get("WANDB_MODE") or section["mode"]
    return wandb.init(
        mode=mode,
        dir=os.environ.get("WANDB_DIR") or str(output_dir),
        entity=os.environ.get("WANDB_ENTITY") or section["entity"],
        project=os.environ.get("WANDB_PROJECT") or section["project"] or "act_ot",
        config=dict(config),
    )


# --- training


class Frames:
    """Batches from a set of demonstrations, as the policy expects them."""

    def __init__(self, demos: Demos, stats: Mapping[str, torch.Tensor], chunk_size: int, device: str) -> None:
        self.demos, self._stats, self._chunk_size, self._device = demos, stats, chunk_size, device

    def __len__(self) -> int:
        return len(self.demos.states)

    def batch(self, frames: Ints) -> dict[str, torch.Tensor]:
        """Return uint8 images, and states and actions both standardized and raw (`raw_…`)."""
        actions, pad = self.demos.chunks(frames, self._chunk_size)
        raw_states, raw_actions = torch.from_numpy(self.demos.states[frames]), torch.from_numpy(actions)
        batch = {
            "images": torch.from_numpy(self.demos.images[frames]),
            "states": (raw_states - self._stats["state_mean"]) / self._stats["state_std"],
            "actions": (raw_actions - self._stats["action_mean"]) / self._stats["action_std"],
            "pad": torch.from_numpy(pad),
            "raw_states": raw_states[:, None],
            "raw_actions": raw_actions,
        }
        return {name: value.to(self._device) for name, value in batch.items()}


def evaluate(policy: ActPolicy, frames: Frames, kl_weight: float) -> tuple[float, float]:
    """Return the mean loss and L1 error of the actions, predicted as at inference: with a latent of 0."""
    stride = max(1, -(-len(frames) // MAX_EVAL_FRAMES))
    losses, l1_errors, counts = [], [], []
    with torch.no_grad():
        for indices in np.array_split(np.arange(0, len(frames), stride), -(-len(frames) // (100 * stride))):
            batch = frames.batch(indices)
            embeds = policy.embed(batch["images"])
            l1 = masked_l1_loss(policy.act(embeds, batch["states"]), batch["actions"], batch["pad"])
            kld = kl_divergence(*policy.encode(batch["states"], batch["actions"], batch["pad"]))
            losses.append(float(l1 + kl_weight * kld))
            l1_errors.append(float(l1))
            counts.append(len(indices))
    return float(np.average(losses, weights=counts)), float(np.average(l1_errors, weights=counts))


class ActTrainer:
    """Policy, data and optimizer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError if the config is invalid."""
        torch.manual_seed(config["seed"])
        # Separate streams, so that the same seed trains on the same batches with and without transport.
        self.bc_rng, self.ot_rng = (np.random.default_rng([config["seed"], stream]) for stream in (0, 1))
        self.policy_config = read_policy(config)
        ot = config["ot"] or {}
        self.lambda_ot, batch_ratio, self.bc_src_weight = read_ot_weights(ot)
        self.batch_size: int = config["batch_size"]
        self.ot_batch_size = max(1, int(self.batch_size * batch_ratio))
        self.max_grad_norm = float(config["optimizer"]["grad_clip_norm"])
        self.loss_config = None
        if self.lambda_ot > 0:
            self.loss_config = LossConfig.read(
                ot.get("loss_config") or {}, CAMERAS, (*CAMERAS, "action", "observation.state")
            )
            sampling = PairSamplingConfig.read(ot)

        dataset = config["dataset"]
        counts = [dataset[f"{name}_episodes"] for name in ("source", "target", "held_out")]
        if any(type(count) is not int or count < 2 for count in counts):
            raise ValueError("dataset.source_episodes, target_episodes and held_out_episodes must be integers ≥ 2")
        source, target, held_out = load_demos(HERE / dataset["root"], *counts)
        train = target.select_episodes(0, target.episodes - max(1, target.episodes // 10))
        stats = {}
        for name, values in (("state", "states"), ("action", "actions")):
            both = np.concatenate([getattr(source, values), getattr(train, values)])
            stats[f"{name}_mean"] = torch.from_numpy(both.mean(axis=0))
            stats[f"{name}_std"] = torch.from_numpy(both.std(axis=0))
        self.source, self.target, self.validation, self.held_out = (
            Frames(demos, stats, self.policy_config.chunk_size, self.policy_config.device)
            for demos in (source, train, target.select_episodes(train.episodes, target.episodes), held_out)
        )
        if self.loss_config is not None:
            pairs = pair_episodes(source.trajectories(), train.trajectories())
            self.sampler = PairSampler(pairs, source.starts, train.starts, sampling)
        self.policy = ActPolicy(self.policy_config, len(CAMERAS), 8, 8).to(self.policy_config.device)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.policy_config.optimizer_lr,
            weight_decay=self.policy_config.optimizer_weight_decay,
            fused=True,
        )

    def step(self) -> tuple[dict[str, float], TransportLoss | None]:
        """Run one optimizer step; return the metrics, and the transport loss if there is one."""
        policy = self.policy
        num_source = int(self.bc_rng.binomial(self.batch_size, self.bc_src_weight))
        batch = concat(
            self.source.batch(self.bc_rng.integers(0, len(self.source), num_source)),
            self.target.batch(self.bc_rng.integers(0, len(self.target), self.batch_size - num_source)),
        )
        images = batch["images"]
        if self.loss_config is not None:
            source_frames, target_frames = self.sampler.sample(self.ot_batch_size, self.ot_rng)
            ot_source, ot_target = self.source.batch(source_frames), self.target.batch(target_frames)
            images = torch.cat([images, ot_source["images"], ot_target["images"]])  # one pass is faster than three
        embeds = policy.embed(images)

        mean, log_var = policy.encode(batch["states"], batch["actions"], batch["pad"])
        latent = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        predicted = policy.act(embeds[: self.batch_size], batch["states"], latent)
        l1 = masked_l1_loss(predicted, batch["actions"], batch["pad"])
        kld = kl_divergence(mean, log_var)
        loss = l1 + self.policy_config.kl_weight * kld
        metrics = {"train/l1_loss": float(l1.detach()), "train/kld_loss": float(kld.detach())}

        transport = None
        if self.loss_config is not None:
            source_embeds, target_embeds = torch.split(embeds[self.batch_size :], self.ot_batch_size)
            transport = transport_loss(
                self.loss_config,
                (by_camera(source_embeds), by_camera(target_embeds)),
                (labels(ot_source), labels(ot_target)),
            )
            if transport.loss is not None:
                loss = loss + self.lambda_ot * transport.loss
        metrics["train/loss"] = float(loss.detach())
        if not math.isfinite(metrics["train/loss"]):
            return metrics, transport

        # A plan with almost no mass produces denormal gradients, which are twice as slow on a CPU. They are flushed to
        # 0 here only, because the plan itself needs them.
        torch.set_flush_denormal(True)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        metrics["train/grad_norm"] = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), self.max_grad_norm))
        self.optimizer.step()
        torch.set_flush_denormal(False)
        return metrics, transport


def concat(*batches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def by_camera(embeds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each camera's tokens as one vector, so that positions in the image matter."""
    return {name: embeds[:, i].flatten(1) for i, name in enumerate(CAMERAS)}


def labels(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the raw values: actions and states in degrees and millimetres (weight_label must account for that scale),
    and pixels."""
    pixels = {name: batch["images"][:, i].float() / 255.0 for i, name in enumerate(CAMERAS)}
    return {"action": batch["raw_actions"], "observation.state": batch["raw_states"], **pixels}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    start_time = time.perf_counter()
    try:
        config = read_config(arguments)
        config["seed"] = int(os.environ.get("LOOPLAB_SEED") or config["seed"])
        if not config["output_dir"]:
            raise ValueError("output_dir is missing; pass --output_dir=FOLDER")
        output_dir = Path(config["output_dir"])
        if output_dir.exists():
            raise ValueError(f"output_dir {output_dir} already exists; choose another one, or delete it")
        trainer = ActTrainer(config)
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None
    output_dir.mkdir(parents=True)
    logger, run = open_logger(output_dir), open_wandb(config, output_dir)
    window: dict[str, list[float]] = defaultdict(list)
    not_finite = numerical_errors = 0
    evaluated: dict[str, float] = {}

    for step in range(1, config["steps"] + 1):
        metrics, transport = trainer.step()
        if transport is not None:
            numerical_errors += transport.numerical_errors
            if transport.loss is None:
                not_finite += 1
            else:
                metrics |= {
                    "train/ot_loss": float(transport.loss.detach()),
                    "train/ot_pi_sum": transport.pi_sum,
                    "train/ot_pi_diag": transport.pi_diag,
                }
            metrics |= {f"train/ot_cost/{term}": cost for term, cost in transport.costs.items()}
        for name, value in metrics.items():
            window[name].append(value)
        diverged = not math.isfinite(metrics["train/loss"])
        if step % config["log_freq"] and step % config["eval_freq"] and step < config["steps"] and not diverged:
            continue

        # Training metrics are logged as means since the last row.
        row = {name: float(np.mean(values)) for name, values in window.items()}
        row["train/lr"] = trainer.optimizer.param_groups[0]["lr"]
        if transport is not None:
            row |= {"train/ot_not_finite": float(not_finite), "train/ot_gave_up": numerical_errors / step}
        window.clear()
        if not diverged and (step % config["eval_freq"] == 0 or step == config["steps"]):
            avg_loss, avg_l1 = evaluate(trainer.policy, trainer.validation, trainer.policy_config.kl_weight)
            evaluated = {"eval/offline_eval/avg_loss": avg_loss, "eval/offline_eval/avg_l1": avg_l1}
            held_out = evaluate(trainer.policy, trainer.held_out, trainer.policy_config.kl_weight)[1]
            row |= evaluated | {"eval/held_out/avg_l1": held_out}  # not for tuning, so it is not printed below
        logger.log(row, step=step)
        if run is not None:
            run.log(row, step=step)
        shown = [f"{name} {value:.4g}" for name, value in row.items() if not name.startswith("eval/held_out/")]
        print("  ".join([f"step {step:5d}", *shown]), flush=True)
        if diverged:
            raise SystemExit(f"train.py: the loss is {metrics['train/loss']} at step {step}; lower optimizer.lr")

    save(trainer.policy, output_dir / "policy.npz")
    seconds = round(time.perf_counter() - start_time, 3)
    logger.summary({**evaluated, "steps": config["steps"], "seconds": seconds, "ot_not_finite": not_finite})
    if run is not None:
        run.finish()


def save(policy: ActPolicy, path: Path) -> None:
    """Write the weights atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **{name: value.cpu().numpy() for name, value in policy.state_dict().items()})
    temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
