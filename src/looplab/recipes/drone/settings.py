"""The config of a training: its keys, and how it is read from a JSON file and from flags such as --train.ent-coef 0.01.

A flag counts more than the file, the file more than the defaults here. Whatever is wrong is said with the key, and
nothing is mended silently: the batch must be what the environments give.
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
SHARES = ("gamma", "gae_lambda", "adam_beta1", "adam_beta2")
BETAS = ("adam_beta1", "adam_beta2")


@dataclass(frozen=True)
class Train:
    device: str = "cpu"
    """Where the network is; the drones always fly on the CPU."""
    seed: int = 42
    """Drives the first weights, the actions, the order of the minibatches and where drones start."""
    optimizer: str = "muon"
    """muon, adam or adamw."""
    learning_rate: float = 0.003
    """Length of a step; its scale is the same for all three optimizers."""
    anneal_lr: bool = True
    """Whether the learning rate goes down to 0 over the run."""
    ent_coef: float = 0.003
    """Weight of the entropy: how much trying out is worth."""
    gamma: float = 0.99
    """Discount a step."""
    gae_lambda: float = 0.95
    """How far advantages trust what was measured, rather than the critic."""
    clip_coef: float = 0.2
    """By how much the probability of an action may change in an update."""
    vf_coef: float = 0.5
    """Weight of the critic's loss."""
    vf_clip_coef: float = 0.2
    """By how much the critic's value of a state may change in an update."""
    max_grad_norm: float = 1.0
    """Longer gradients are cut; 0: never."""
    update_epochs: int = 4
    """How often each batch is learned from."""
    bptt_horizon: int = 16
    """Steps that every drone flies before an update."""
    batch_size: int = 2048
    """Steps of all drones between two updates: env.num_envs * env.num_drones * vec.num_envs * bptt_horizon."""
    minibatch_size: int = 2048
    """Steps for one optimizer step; divides the batch."""
    max_minibatch_size: int = 2048
    """Steps that go through the network at once: gradients of a larger minibatch are summed up."""
    total_timesteps: int = 1_000_000
    """Steps of all drones in this run."""
    checkpoint_interval: int = 50
    """Updates between two checkpoints."""
    adam_beta1: float = 0.9
    """Decay of the first moment; Muon's momentum."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    torch_deterministic: bool = True
    """Whether only repeatable kernels are used."""
    cpu_offload: bool = False
    """Whether what was flown waits in the host's memory; means nothing on the CPU."""
    compile: bool = False
    """Whether the network is compiled; pays for long runs of large networks only."""
    compile_fullgraph: bool = True
    """Whether a network that cannot be compiled as a whole is an error."""
    compile_mode: str = "default"
    """torch.compile's mode."""
    precision: str = "float32"
    """What the network calculates in; weights are always float32."""


@dataclass(frozen=True)
class Env:
    num_envs: int = 4
    """Worlds in each of the `vec.num_envs` vectors."""
    num_drones: int = 8
    """Drones in a world."""


@dataclass(frozen=True)
class Vec:
    num_workers: int = 1
    """Pieces in which the worlds are stepped, one after the other in this process; never changes what happens."""
    num_envs: int = 4
    """Vectors of worlds; a multiple of the workers."""


@dataclass(frozen=True)
class Autopilot:
    resume_mode: str = "fresh"
    """`continue`: start from the weights that `resume_from` names."""
    resume_from: str = "latest"
    """`latest` or `best` run of the study, or the path of a checkpoint."""
    save_strategy: str = "best"
    """`latest`: the last weights only; `best`: the best ones too; `all`: every checkpoint."""


@dataclass(frozen=True)
class Settings:
    env_name: str = "drone_hover"
    """The task."""
    train: Train = field(default_factory=Train)
    env: Env = field(default_factory=Env)
    vec: Vec = field(default_factory=Vec)
    autopilot: Autopilot = field(default_factory=Autopilot)

    @property
    def agents(self) -> int:
        return self.env.num_envs * self.env.num_drones * self.vec.num_envs


PARTS: dict[str, type[Train | Env | Vec | Autopilot]] = {
    "train": Train, "env": Env, "vec": Vec, "autopilot": Autopilot,
}  # fmt: skip
KINDS = {"int": int, "float": float, "bool": bool, "str": str}
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
KEYS: dict[str, type[Any]] = {
    "env_name": str,
    **{f"{part}.{f.name}": KINDS[str(f.type)] for part, made in PARTS.items() for f in fields(made)},
}
"""Every key with its type."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each key, with dashes or underscores; booleans as --x True, --x False, --x or --no-x."""
    group = parser.add_argument_group("config keys")
    for key, kind in KEYS.items():
        names = list(dict.fromkeys([f"--{key.replace('_', '-')}", f"--{key}"]))
        if kind is bool:
            group.add_argument(*names, dest=key, nargs="?", const="true", metavar="BOOL")
            head, _, last = key.rpartition(".")
            group.add_argument(f"--{head}.no-{last.replace('_', '-')}", dest=key, action="store_const", const="false")
        else:
            group.add_argument(*names, dest=key, metavar=kind.__name__.upper())


def read_settings(file: Path, flags: Mapping[str, str | None]) -> Settings:
    """The file under the flags, checked."""
    given = _flatten(_load(file), file)
    said = {key: _parsed(key, text) for key in KEYS if (text := flags.get(key)) is not None}
    values = {**given, **said}
    for key, value in values.items():
        values[key] = _typed(key, value, file if key not in said else None)
    parts: dict[str, Any] = {
        part: made(**{f.name: values[f"{part}.{f.name}"] for f in fields(made) if f"{part}.{f.name}" in values})
        for part, made in PARTS.items()
    }
    settings = Settings(**parts, **({"env_name": values["env_name"]} if "env_name" in values else {}))
    _check(settings)
    return settings


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
    found: dict[str, Any] = {}
    for part, value in config.items():
        found.update(
            {f"{part}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {part: value}
        )
    for key in found:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise LabError(f"unknown key {key!r}", file=file, hint=f"did you mean {near[0]!r}?" if near else None)
    return found


def _parsed(key: str, text: str) -> Any:
    """A flag's text as a value; what cannot be read stays text and is refused with the key."""
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


def _typed(key: str, value: Any, file: Path | None) -> Any:
    kind = KEYS[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind or value != value:
        raise LabError(f"{key} takes {NAMES[kind]}, not {value!r}", file=file)
    return value


def _check(settings: Settings) -> None:
    flat = {"env_name": settings.env_name}
    for part in PARTS:
        flat.update({f"{part}.{name}": value for name, value in asdict(getattr(settings, part)).items()})
    for key, choices in CHOICES.items():
        if flat[key] not in choices:
            raise LabError(f"{key} must be one of {', '.join(choices)}, not {flat[key]!r}")
    train, env, vec = settings.train, settings.env, settings.vec
    sizes = {f"env.{f.name}": getattr(env, f.name) for f in fields(env)}
    sizes |= {f"vec.{f.name}": getattr(vec, f.name) for f in fields(vec)}
    sizes |= {f"train.{name}": getattr(train, name) for name in POSITIVE}
    for key, value in sizes.items():
        if not value > 0:
            raise LabError(f"{key} must be above 0, not {value}")
    for name in SHARES:
        if not 0.0 <= getattr(train, name) <= 1.0:
            raise LabError(f"train.{name} must be within 0 … 1, not {getattr(train, name)}")
    for name in BETAS:
        if getattr(train, name) == 1.0:
            raise LabError(f"train.{name} must be below 1: with 1 nothing is ever learned")
    if vec.num_envs % vec.num_workers:
        raise LabError(
            f"vec.num_envs ({vec.num_envs}) must be a multiple of vec.num_workers ({vec.num_workers})",
            hint=f"the next one is {-(-vec.num_envs // vec.num_workers) * vec.num_workers}",
        )
    whole = settings.agents * train.bptt_horizon
    if train.batch_size != whole:
        raise LabError(
            f"train.batch_size is {train.batch_size}, but the drones give {whole} steps an update: env.num_envs "
            f"{env.num_envs} * env.num_drones {env.num_drones} * vec.num_envs {vec.num_envs} * train.bptt_horizon "
            f"{train.bptt_horizon}",
            hint=f"set train.batch_size, train.minibatch_size and train.max_minibatch_size to {whole}",
        )
    for large, small in (("batch_size", "minibatch_size"), ("minibatch_size", "max_minibatch_size")):
        whole, piece = getattr(train, large), getattr(train, small)
        if piece < 1 or (whole % piece if small == "minibatch_size" or piece < whole else 0):
            raise LabError(f"train.{small} ({piece}) must divide train.{large} ({whole})")
