"""Train an action-chunking policy on two domains, with a loss that transports features from one to the other.

    python train.py --config_path=configs/baseline.json --steps=2000 --output_dir=outputs/try

Any key of the config can be given as a flag, `--ot.lambda_ot=0.2` or `--ot.lambda_ot 0.2`; a flag wins over the config.
The output_dir must not exist yet. Metrics go to $LOOPLAB_METRICS, else to metrics.jsonl in the output_dir.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the network is tiny: more threads only wait for each other

import numpy as np
import numpy.typing as npt
import torch

HERE = Path(__file__).resolve().parent
if TYPE_CHECKING:
    from looplab.recipes.act_ot.demos import CAMERAS, Demos, load_demos
    from looplab.recipes.act_ot.ot_loss import LossConfig, Transport, transport_loss
    from looplab.recipes.act_ot.pairs import PairSampler, Sampling, pair_episodes
    from looplab.recipes.act_ot.policy import Policy, PolicyConfig, divergence, l1_error
else:  # the files beside this one, wherever the lab was copied to
    from demos import CAMERAS, Demos, load_demos
    from ot_loss import LossConfig, Transport, transport_loss
    from pairs import PairSampler, Sampling, pair_episodes
    from policy import Policy, PolicyConfig, divergence, l1_error

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
MEASURED_ON = 1000
"""Frames of the held-out set that an evaluation looks at, at most."""


# --- the config: defaults, then the file, then the flags


def read_config(arguments: Sequence[str]) -> dict[str, Any]:
    """The config of this run; a ValueError says what is wrong with it."""
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
        place = given
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"--{name}: {parent} is not a group of keys")
        try:
            place[leaf] = json.loads(text)
        except json.JSONDecodeError:
            place[leaf] = text
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"unknown key {min(unknown)}; there are: {', '.join(DEFAULTS)}")
    config = {**DEFAULTS, **given}
    for part in ("dataset", "optimizer", "wandb"):
        unknown = set(config[part]) - set(DEFAULTS[part])
        if unknown:
            raise ValueError(f"unknown key {part}.{min(unknown)}; there are: {', '.join(DEFAULTS[part])}")
        config[part] = {**DEFAULTS[part], **config[part]}
    for key in ("steps", "log_freq", "eval_freq", "batch_size"):
        if type(config[key]) is not int or config[key] < 1:
            raise ValueError(f"{key} is a whole number from 1, not {config[key]!r}")
    if type(config["seed"]) is not int or config["seed"] < 0:
        raise ValueError(f"seed is a whole number from 0, not {config['seed']!r}")
    return config


def read_flags(arguments: Sequence[str]) -> dict[str, str]:
    """`--name=value` and `--name value`."""
    flags: dict[str, str] = {}
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith("--"):
            raise ValueError(f"{argument!r} is no flag; write --name=value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            following = next(waiting, None)
            if following is None or following.startswith("--"):
                raise ValueError(f"--{name} needs a value")
            value = following
        flags[name] = value
    return flags


def read_policy(config: Mapping[str, Any]) -> PolicyConfig:
    """The policy's part. The optimiser may be described there, or in `optimizer`, or in both if they say the same."""
    part = dict(config["policy"])
    for here, there in (("optimizer_lr", "lr"), ("optimizer_weight_decay", "weight_decay")):
        value = config["optimizer"][there]
        if value is not None and part.setdefault(here, value) != value:
            raise ValueError(f"optimizer.{there} is {value} but policy.{here} is {part[here]}; change both together")
    if config["optimizer"]["type"] != "adamw":
        raise ValueError(f"optimizer.type must be adamw, not {config['optimizer']['type']!r}")
    read = PolicyConfig.read(part)
    if read.device.partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise ValueError(f"policy.device must be cpu, cuda or mps, not {read.device!r}")
    if read.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"policy.device is {read.device}, but PyTorch sees no such device; use cpu")
    return read


def read_shares(ot: Mapping[str, Any]) -> tuple[float, float, float]:
    """lambda_ot, batch_ratio and bc_src_weight."""
    if set(ot) - OT_KEYS:
        raise ValueError(f"unknown key ot.{min(set(ot) - OT_KEYS)}; there are: {', '.join(sorted(OT_KEYS))}")
    shares = []
    for key, default in (("lambda_ot", 0.0), ("batch_ratio", 1.0), ("bc_src_weight", 0.9)):
        value = ot.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"ot.{key} is a number from 0, not {value!r}")
        shares.append(float(value))
    if shares[2] > 1:
        raise ValueError(f"ot.bc_src_weight is the share of source frames, from 0 to 1, not {shares[2]}")
    return shares[0], shares[1], shares[2]


# --- where the numbers go


class PlainLogger:
    """What is used where looplab is not installed: the same rows, without its care for threads and kills."""

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
    """A W&B run, or None. What W&B's own variables say goes before the config."""
    part = config["wandb"]
    if part["enable"] is not True:
        return None
    try:
        import wandb
    except ImportError:
        raise SystemExit("wandb.enable is true, but wandb is not installed: pip install wandb") from None
    mode: Any = os.environ.get("WANDB_MODE") or part["mode"]
    return wandb.init(
        mode=mode,
        dir=os.environ.get("WANDB_DIR") or str(output_dir),
        entity=os.environ.get("WANDB_ENTITY") or part["entity"],
        project=os.environ.get("WANDB_PROJECT") or part["project"] or "act_ot",
        config=dict(config),
    )


# --- the training


class Frames:
    """A set of demonstrations, ready for the policy."""

    def __init__(self, demos: Demos, scale: Mapping[str, torch.Tensor], chunk: int, device: str) -> None:
        self.demos, self._scale, self._chunk, self._device = demos, scale, chunk, device

    def __len__(self) -> int:
        return len(self.demos.states)

    def take(self, frames: Ints) -> dict[str, torch.Tensor]:
        """Pictures as bytes, states and actions in standard deviations and, as `raw_…`, as they are."""
        actions, pad = self.demos.chunks(frames, self._chunk)
        raw_states, raw_actions = torch.from_numpy(self.demos.states[frames]), torch.from_numpy(actions)
        batch = {
            "images": torch.from_numpy(self.demos.images[frames]),
            "states": (raw_states - self._scale["state_mean"]) / self._scale["state_std"],
            "actions": (raw_actions - self._scale["action_mean"]) / self._scale["action_std"],
            "pad": torch.from_numpy(pad),
            "raw_states": raw_states[:, None],
            "raw_actions": raw_actions,
        }
        return {name: value.to(self._device) for name, value in batch.items()}


def measure(policy: Policy, frames: Frames, kl_weight: float) -> tuple[float, float]:
    """The loss and the error of the actions, as the policy would act: with a latent of 0."""
    every = max(1, -(-len(frames) // MEASURED_ON))
    losses, errors, counts = [], [], []
    with torch.no_grad():
        for some in np.array_split(np.arange(0, len(frames), every), -(-len(frames) // (100 * every))):
            batch = frames.take(some)
            embeds = policy.embed(batch["images"])
            error = l1_error(policy.act(embeds, batch["states"]), batch["actions"], batch["pad"])
            kld = divergence(*policy.encode(batch["states"], batch["actions"], batch["pad"]))
            losses.append(float(error + kl_weight * kld))
            errors.append(float(error))
            counts.append(len(some))
    return float(np.average(losses, weights=counts)), float(np.average(errors, weights=counts))


class Trainer:
    """The policy, its data and its optimiser."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads all of the config; a ValueError says what is wrong with it."""
        torch.manual_seed(config["seed"])
        # Two streams: with and without transport, the same seed trains on the same batches.
        self.bc_rng, self.ot_rng = (np.random.default_rng([config["seed"], stream]) for stream in (0, 1))
        self.settings = read_policy(config)
        ot = config["ot"] or {}
        self.lambda_ot, batch_ratio, self.bc_src_weight = read_shares(ot)
        self.batch_size: int = config["batch_size"]
        self.ot_batch = max(1, int(self.batch_size * batch_ratio))
        self.clip = float(config["optimizer"]["grad_clip_norm"])
        self.loss_config = None
        if self.lambda_ot > 0:
            self.loss_config = LossConfig.read(
                ot.get("loss_config") or {}, CAMERAS, (*CAMERAS, "action", "observation.state")
            )
            sampling = Sampling.read(ot)

        part = config["dataset"]
        counts = [part[f"{name}_episodes"] for name in ("source", "target", "held_out")]
        if any(type(count) is not int or count < 2 for count in counts):
            raise ValueError("dataset.source_episodes, target_episodes and held_out_episodes are whole numbers from 2")
        source, target, held_out = load_demos(HERE / part["root"], *counts)
        train = target.part(0, target.episodes - max(1, target.episodes // 10))
        scale = {}
        for name, values in (("state", "states"), ("action", "actions")):
            both = np.concatenate([getattr(source, values), getattr(train, values)])
            scale[f"{name}_mean"] = torch.from_numpy(both.mean(axis=0))
            scale[f"{name}_std"] = torch.from_numpy(both.std(axis=0))
        self.source, self.target, self.dev, self.held_out = (
            Frames(demos, scale, self.settings.chunk_size, self.settings.device)
            for demos in (source, train, target.part(train.episodes, target.episodes), held_out)
        )
        if self.loss_config is not None:
            pairs = pair_episodes(source.trajectories(), train.trajectories())
            self.sampler = PairSampler(pairs, source.starts, train.starts, sampling)
        self.policy = Policy(self.settings, len(CAMERAS), 8, 8).to(self.settings.device)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.settings.optimizer_lr,
            weight_decay=self.settings.optimizer_weight_decay,
            fused=True,
        )

    def step(self) -> tuple[dict[str, float], Transport | None]:
        """One step of the optimiser; gives what there is to log."""
        policy, settings = self.policy, self.settings
        from_source = int(self.bc_rng.binomial(self.batch_size, self.bc_src_weight))
        batch = joined(
            self.source.take(self.bc_rng.integers(0, len(self.source), from_source)),
            self.target.take(self.bc_rng.integers(0, len(self.target), self.batch_size - from_source)),
        )
        images = batch["images"]
        if self.loss_config is not None:
            drawn = self.sampler.draw(self.ot_batch, self.ot_rng)
            sides = self.source.take(drawn[0]), self.target.take(drawn[1])
            images = torch.cat([images, sides[0]["images"], sides[1]["images"]])  # one pass is cheaper than three
        embeds = policy.embed(images)

        mean, log_variance = policy.encode(batch["states"], batch["actions"], batch["pad"])
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        predicted = policy.act(embeds[: self.batch_size], batch["states"], latent)
        l1 = l1_error(predicted, batch["actions"], batch["pad"])
        kld = divergence(mean, log_variance)
        loss = l1 + settings.kl_weight * kld
        values = {"train/l1_loss": float(l1.detach()), "train/kld_loss": float(kld.detach())}

        transport = None
        if self.loss_config is not None:
            parts = torch.split(embeds[self.batch_size :], self.ot_batch)
            transport = transport_loss(
                self.loss_config,
                (by_camera(parts[0]), by_camera(parts[1])),
                (labels(sides[0]), labels(sides[1])),
            )
            if transport.loss is not None:
                loss = loss + self.lambda_ot * transport.loss
        values["train/loss"] = float(loss.detach())
        if not math.isfinite(values["train/loss"]):
            return values, transport

        # A plan of nearly no mass makes gradients of nearly 0, and with those a processor takes twice as long. They are
        # cut off here only: in the plan itself the smallest numbers count.
        torch.set_flush_denormal(True)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        values["train/grad_norm"] = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), self.clip))
        self.optimizer.step()
        torch.set_flush_denormal(False)
        return values, transport


def joined(*parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def by_camera(embeds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each camera's tokens as one vector; where in the picture something is counts."""
    return {name: embeds[:, i].flatten(1) for i, name in enumerate(CAMERAS)}


def labels(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Raw values: actions and states in degrees and millimetres, whose scale weight_label has to tame, and pixels."""
    pixels = {name: batch["images"][:, i].float() / 255.0 for i, name in enumerate(CAMERAS)}
    return {"action": batch["raw_actions"], "observation.state": batch["raw_states"], **pixels}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        config = read_config(arguments)
        config["seed"] = int(os.environ.get("LOOPLAB_SEED") or config["seed"])
        if not config["output_dir"]:
            raise ValueError("there is no output_dir; give --output_dir=FOLDER")
        output_dir = Path(config["output_dir"])
        if output_dir.exists():
            raise ValueError(f"output_dir {output_dir} exists already; name another one, or remove it")
        trainer = Trainer(config)
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None
    output_dir.mkdir(parents=True)
    logger, run = open_logger(output_dir), open_wandb(config, output_dir)
    window: dict[str, list[float]] = defaultdict(list)
    not_finite = gave_up = 0
    evaluated: dict[str, float] = {}

    for step in range(1, config["steps"] + 1):
        values, transport = trainer.step()
        if transport is not None:
            gave_up += transport.gave_up
            if transport.loss is None:
                not_finite += 1
            else:
                values |= {
                    "train/ot_loss": float(transport.loss.detach()),
                    "train/ot_pi_sum": transport.pi_sum,
                    "train/ot_pi_diag": transport.pi_diag,
                }
            values |= {f"train/ot_cost/{term}": cost for term, cost in transport.costs.items()}
        for name, value in values.items():
            window[name].append(value)
        broken = not math.isfinite(values["train/loss"])
        if step % config["log_freq"] and step % config["eval_freq"] and step < config["steps"] and not broken:
            continue

        # What is logged of the training is the mean since the last row.
        row = {name: float(np.mean(seen)) for name, seen in window.items()}
        row["train/lr"] = trainer.optimizer.param_groups[0]["lr"]
        if transport is not None:
            row |= {"train/ot_not_finite": float(not_finite), "train/ot_gave_up": gave_up / step}
        window.clear()
        if not broken and (step % config["eval_freq"] == 0 or step == config["steps"]):
            avg_loss, avg_l1 = measure(trainer.policy, trainer.dev, trainer.settings.kl_weight)
            evaluated = {"eval/offline_eval/avg_loss": avg_loss, "eval/offline_eval/avg_l1": avg_l1}
            held_out = measure(trainer.policy, trainer.held_out, trainer.settings.kl_weight)[1]
            row |= evaluated | {"eval/held_out/avg_l1": held_out}  # not for people's eyes: it is not printed below
        logger.log(row, step=step)
        if run is not None:
            run.log(row, step=step)
        told = [f"{name} {value:.4g}" for name, value in row.items() if not name.startswith("eval/held_out/")]
        print("  ".join([f"step {step:5d}", *told]), flush=True)
        if broken:
            raise SystemExit(f"train.py: the loss is {values['train/loss']} at step {step}; lower optimizer.lr")

    save(trainer.policy, output_dir / "policy.npz")
    seconds = round(time.perf_counter() - began, 3)
    logger.summary({**evaluated, "steps": config["steps"], "seconds": seconds, "ot_not_finite": not_finite})
    if run is not None:
        run.finish()


def save(policy: Policy, path: Path) -> None:
    """The weights, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **{name: value.cpu().numpy() for name, value in policy.state_dict().items()})
    temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
