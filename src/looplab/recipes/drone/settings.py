"""The config: its keys, and how it is read from a JSON file and from flags such as --train.ent-coef 0.01.

Flags override the file, the file overrides the defaults here. Errors name the key, and nothing is corrected silently:
the batch size must match the environments.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from looplab.errors import LabError

CHOICES: dict[str, tuple[str, ...]] = {
    "env_name": ("drone_hover", "drone_pickplace"),
    "train.optimizer": ("muon", "adam", "adamw"),
    "train.precision": ("float32", "bfloat16", "float16"),
    "train.compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "train.device": ("cpu", "cuda", "mps"),
    "autopilot.resume_mode": ("fresh", "continue"),
    "autopilot.save_strategy": ("best", "latest", "all"),
}
POSITIVE = ("learning_rate", "update_epochs", "bptt_horizon", "total_timesteps", "checkpoint_interval", "adam_eps")
FRACTIONS = ("gamma", "gae_lambda", "adam_beta1", "adam_beta2")
BETAS = ("adam_beta1", "adam_beta2")


@dataclass(frozen=True)
class TrainConfig:
    device: str = "cpu"
    """Device of the network; the simulation always runs on the CPU."""
    seed: int = 42
    """Determines the initial weights, the actions, the minibatches and where drones start."""
    optimizer: str = "muon"
    """muon, adam or adamw."""
    learning_rate: float = 0.003
    """Comparable between the three optimizers."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    ent_coef: float = 0.003
    """Weight of the entropy bonus."""
    gamma: float = 0.99
    """Discount factor per step."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation."""
    clip_coef: float = 0.2
    """PPO clip range of the probability ratio."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    vf_clip_coef: float = 0.2
    """Clip range of the value function."""
    max_grad_norm: float = 1.0
    """Gradient clipping; 0: off."""
    update_epochs: int = 4
    """Epochs over each batch."""
    bptt_horizon: int = 16
    """Rollout steps per drone and update."""
    batch_size: int = 2048
    """Steps of all drones per update: env.num_envs * env.num_drones * vec.num_envs * bptt_horizon."""
    minibatch_size: int = 2048
    """Steps per optimizer step; must divide batch_size."""
    max_minibatch_size: int = 2048
    """Steps per forward pass; larger minibatches accumulate gradients."""
    total_timesteps: int = 1_000_000
    """Steps of all drones in the run."""
    checkpoint_interval: int = 50
    """Updates between two checkpoints."""
    adam_beta1: float = 0.9
    """Decay of the first moment; momentum of Muon."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Epsilon of Adam."""
    torch_deterministic: bool = True
    """Use deterministic kernels only."""
    cpu_offload: bool = False
    """Keep rollouts in host memory; no effect on the CPU."""
    fused: bool = True
    """Simulate and update in C where possible; False: numpy and torch."""
    compile: bool = False
    """Use torch.compile; pays off for long runs of large networks only."""
    compile_fullgraph: bool = True
    """fullgraph of torch.compile."""
    compile_mode: str = "default"
    """mode of torch.compile."""
    precision: str = "float32"
    """Autocast dtype of the network; weights are always float32."""


@dataclass(frozen=True)
class Env:
    num_envs: int = 4
    """Worlds per vector env."""
    num_drones: int = 8
    """Drones per world."""


@dataclass(frozen=True)
class Vec:
    num_workers: int = 1
    """Chunks in which the worlds are stepped, sequentially in this process; does not affect the results."""
    num_envs: int = 4
    """Number of vector envs; a multiple of num_workers."""


@dataclass(frozen=True)
class Autopilot:
    resume_mode: str = "fresh"
    """`continue`: start from the weights of `resume_from`."""
    resume_from: str = "latest"
    """`latest` or `best` run of the study, or the path of a checkpoint."""
    save_strategy: str = "best"
    """`latest`: only the last weights; `best`: also the best ones; `all`: every checkpoint."""


@dataclass(frozen=True)
class DroneConfig:
    env_name: str = "drone_hover"
    """The task."""
    train: TrainConfig = field(default_factory=TrainConfig)
    env: Env = field(default_factory=Env)
    vec: Vec = field(default_factory=Vec)
    autopilot: Autopilot = field(default_factory=Autopilot)

    @property
    def num_agents(self) -> int:
        """Number of drones in all worlds."""
        return self.env.num_envs * self.env.num_drones * self.vec.num_envs


SECTIONS: dict[str, type[TrainConfig | Env | Vec | Autopilot]] = {
    "train": TrainConfig, "env": Env, "vec": Vec, "autopilot": Autopilot,
}  # fmt: skip
TYPES = {"int": int, "float": float, "bool": bool, "str": str}
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
KEYS: dict[str, type[Any]] = {
    "env_name": str,
    **{f"{name}.{f.name}": TYPES[str(f.type)] for name, section in SECTIONS.items() for f in fields(section)},
}
"""Every key and its type."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per key, with dashes or underscores; booleans as --x True, --x False, --x or --no-x."""
    group = parser.add_argument_group("config keys")
    for key, kind in KEYS.items():
        names = list(dict.fromkeys([f"--{key.replace('_', '-')}", f"--{key}"]))
        if kind is bool:
            group.add_argument(*names, dest=key, nargs="?", const="true", metavar="BOOL")
            head, _, last = key.rpartition(".")
            group.add_argument(f"--{head}.no-{last.replace('_', '-')}", dest=key, action="store_const", const="false")
        else:
            group.add_argument(*names, dest=key, metavar=kind.__name__.upper())


def read_config(file: Path, flags: Mapping[str, str | None]) -> DroneConfig:
    """Read the file, override it with the flags, validate. Raises LabError."""
    from_file = _flatten(_load(file), file)
    from_flags = {key: _parse_flag(key, text) for key in KEYS if (text := flags.get(key)) is not None}
    values = {**from_file, **from_flags}
    for key, value in values.items():
        values[key] = _check_type(key, value, file if key not in from_flags else None)
    sections: dict[str, Any] = {
        name: section(**{f.name: values[f"{name}.{f.name}"] for f in fields(section) if f"{name}.{f.name}" in values})
        for name, section in SECTIONS.items()
    }
    config = DroneConfig(**sections, **({"env_name": values["env_name"]} if "env_name" in values else {}))
    _validate(config)
    return config


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read the config: {error.strerror}", file=file, hint="see --config") from error
    except UnicodeDecodeError as error:
        raise LabError("the config is not UTF-8 text", file=file) from error
    except json.JSONDecodeError as error:
        raise LabError(f"the config is not JSON: {error.msg}", file=file, line=error.lineno) from error
    if not isinstance(loaded, dict):
        raise LabError("the config must be a JSON object", file=file)
    return loaded


def _flatten(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in config.items():
        if isinstance(value, dict):
            flat.update({f"{section}.{name}": inner for name, inner in value.items()})
        else:
            flat[section] = value
    for key in flat:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise LabError(f"unknown key {key!r}", file=file, hint=f"did you mean {near[0]!r}?" if near else None)
    return flat


def _parse_flag(key: str, text: str) -> Any:
    """Convert the text of a flag to the key's type; text that cannot be converted is rejected later."""
    kind = KEYS[key]
    try:
        if kind is int:
            number = float(text)
            return int(text) if text.lstrip("+-").isdigit() else int(number) if number.is_integer() else number
        if kind is float:
            return float(text)
    except (ValueError, OverflowError):
        return text
    return {"true": True, "false": False}.get(text.lower(), text) if kind is bool else text


def _check_type(key: str, value: Any, file: Path | None) -> Any:
    kind = KEYS[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind or value != value:
        raise LabError(f"{key} must be {TYPE_NAMES[kind]}, not {value!r}", file=file)
    return value


def _validate(config: DroneConfig) -> None:
    flat = {"env_name": config.env_name}
    for section in SECTIONS:
        flat.update({f"{section}.{name}": value for name, value in asdict(getattr(config, section)).items()})
    for key, choices in CHOICES.items():
        if flat[key] not in choices:
            raise LabError(f"{key} must be one of {', '.join(choices)}, not {flat[key]!r}")
    train, env, vec = config.train, config.env, config.vec
    sizes = {f"env.{f.name}": getattr(env, f.name) for f in fields(env)}
    sizes |= {f"vec.{f.name}": getattr(vec, f.name) for f in fields(vec)}
    sizes |= {f"train.{name}": getattr(train, name) for name in POSITIVE}
    for key, value in sizes.items():
        if not value > 0:
            raise LabError(f"{key} must be > 0, not {value}")
    for name in FRACTIONS:
        if not 0.0 <= getattr(train, name) <= 1.0:
            raise LabError(f"train.{name} must be between 0 and 1, not {getattr(train, name)}")
    for name in BETAS:
        if getattr(train, name) == 1.0:
            raise LabError(f"train.{name} must be < 1")
    if vec.num_envs % vec.num_workers:
        raise LabError(
            f"vec.num_envs ({vec.num_envs}) must be a multiple of vec.num_workers ({vec.num_workers})",
            hint=f"the next one is {-(-vec.num_envs // vec.num_workers) * vec.num_workers}",
        )
    steps = config.num_agents * train.bptt_horizon
    if train.batch_size != steps:
        raise LabError(
            f"train.batch_size is {train.batch_size}, but the environments produce {steps} steps per update: "
            f"env.num_envs {env.num_envs} * env.num_drones {env.num_drones} * vec.num_envs {vec.num_envs} "
            f"* train.bptt_horizon {train.bptt_horizon}",
            hint=f"set train.batch_size, train.minibatch_size and train.max_minibatch_size to {steps}",
        )
    for large, small in (("batch_size", "minibatch_size"), ("minibatch_size", "max_minibatch_size")):
        total, part = getattr(train, large), getattr(train, small)
        if part < 1 or (total % part if small == "minibatch_size" or part < total else 0):
            raise LabError(f"train.{small} ({part}) must divide train.{large} ({total})")
