"""The settings of a Mario training, read from a JSON file, the environment variables of resume.sh, and flags.

Variables override the file; flags override both. An unknown key is an error that suggests the nearest known key.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from looplab.errors import LabError


@dataclass(frozen=True)
class EnvSettings:
    world: int = 1
    stage: int = 1
    action_type: str = "simple"
    """Action set: right_only, simple, complex or extended."""
    frame_skip: int = 4
    """Frames that each action is held."""
    frame_stack: int = 4
    """Frames in an observation."""
    noops: int = 30
    """Maximum number of random no-op frames at the start of an episode."""
    max_steps: int | None = None
    """Steps after which an episode is truncated; None: never."""
    core: str = "auto"
    """Emulator: auto, builtin, fceumm or nes-py."""
    num_envs: int = 8
    workers: int | None = None
    """Worker processes; None: as many as cores; 0: none."""


@dataclass(frozen=True)
class VectorSettings:
    parent_prewarm: bool = False
    """Make and close one env in this process before the workers start."""
    worker_start_delay: float = 0.0
    """Seconds between the starts of two workers."""
    serialise_start: bool = False
    """Start workers one at a time, across all trainings on this machine (by a file lock)."""
    env_reset_timeout: float = 60.0
    """Seconds without progress in a reset after which a worker counts as hung and is replaced."""
    env_step_timeout: float = 15.0
    """Seconds without progress in a step after which a worker counts as hung and is replaced."""
    snapshot_every: int = 64
    """Steps between two snapshots of the envs."""
    slow_step: float = 5.0
    """Seconds after which a step counts as slow."""
    slow_step_trace_threshold: int = 5
    """Slow steps within `slow_step_trace_window` after which the worker's stack traces are written."""
    slow_step_trace_window: float = 120.0
    """Seconds."""


@dataclass(frozen=True)
class RewardSettings:
    env_weight: float = 0.01
    """Weight of the game's own reward, which is up to 15 per frame."""
    distance_weight: float = 0.0125
    """Reward per pixel forward, before scaling."""
    score_weight: float = 0.0
    time_weight: float = 0.0
    scale_start: float = 0.2
    scale_final: float = 0.1
    anneal_steps: int = 50_000
    """Steps of an env until the scale reaches `scale_final`."""
    terminal_bonus: float = 0.3
    """Added when a stage is won, subtracted when Mario dies."""
    stagnation: int | None = 200
    """Steps without progress after which an episode is truncated; None: never."""
    ram_x_parse: bool = False
    """Read the position from RAM if the info has none."""
    ram_x_high: int = 0x6D
    """Address of the position's upper byte."""
    ram_x_low: int = 0x86
    """Address of the position's lower byte."""


@dataclass(frozen=True)
class ScriptSettings:
    sequence: str = ""
    """Actions at the start of the first episode of each env, for example START:8,RIGHT+B:180."""
    forward_frames: int = 0
    """Steps forward at the start of the first episode of each env; `sequence` takes precedence."""
    forward_action: int | None = None
    """Index of the forward action; None: RIGHT+B."""
    probe_forward: int = 0
    """Steps to hold each action before training, to find the one that moves furthest; 0: do not probe."""
    every_episode: bool = False
    """Play the script in every episode, not only in the first."""


@dataclass(frozen=True)
class TrainSettings:
    seed: int = 0
    algorithm: str = "ppo"
    """ppo or impala."""
    returns: str = "vtrace"
    """Return estimator of impala: vtrace or gae."""
    total_steps: int = 1_000_000
    """Env steps over all envs; each is `frame_skip` frames."""
    rollout_steps: int = 128
    """Steps of each env per update."""
    learning_rate: float = 2.5e-4
    anneal: bool = True
    """Decrease the learning rate linearly to 0."""
    gamma: float = 0.95
    lam: float = 0.95
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    epochs: int = 3
    minibatch: int = 256
    clip: float = 0.2
    width: int = 256
    """Units of the hidden layer."""
    memory: int = 0
    """Size of the recurrent hidden state; 0 for a feed-forward policy."""
    overlap_collect: bool = True
    """Collect the next rollout while learning from this one."""
    compile: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class ReplaySettings:
    enabled: bool = False
    """Use a prioritized replay; impala only."""
    entries: int = 200_000
    max_memory_gb: float = 2.0
    """Limit of the replay's memory; its capacity is reduced to fit."""
    alpha: float = 0.6
    beta: float = 0.4
    beta_final: float = 1.0
    beta_samples: int = 1_000_000
    """Sampled transitions until `beta_final` is reached."""
    batch: int = 256
    """Transitions per batch."""
    per_sample_interval: int = 4
    """Updates between two batches; every transition is stored."""


@dataclass(frozen=True)
class LogSettings:
    log_interval: int = 5
    """Updates between two rows of metrics."""
    checkpoint_interval: int = 50
    """Updates between two checkpoints."""
    monitor_period: float = 5.0
    """Seconds between two samples of the machine's load."""
    enable_tensorboard: bool = False
    enable_wandb: bool = False
    record_video: bool = False
    """Record a video of one episode at the end."""


@dataclass(frozen=True)
class MarioSettings:
    env: EnvSettings = field(default_factory=EnvSettings)
    vector: VectorSettings = field(default_factory=VectorSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    script: ScriptSettings = field(default_factory=ScriptSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    log: LogSettings = field(default_factory=LogSettings)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide what is learned, by dotted key: a resumed run must share them."""
        free = set(FREE_KEYS) if self.train.anneal else {*FREE_KEYS, "train.total_steps"}
        return {
            f"{section}.{name}": value
            for section, values in self.as_dict().items()
            for name, value in values.items()
            if section not in FREE_SECTIONS and f"{section}.{name}" not in free
        }


FREE_SECTIONS = ("vector", "log")
FREE_KEYS = ("env.workers", "train.device", "train.compile")
"""Settings that a resumed run may change: they do not decide what is learned."""
CHOICES = {
    "env.action_type": ("right_only", "simple", "complex", "extended"),
    "train.algorithm": ("ppo", "impala"),
    "train.returns": ("vtrace", "gae"),
}
FLAGS = {
    "world": "env.world", "stage": "env.stage", "action-type": "env.action_type", "frame-skip": "env.frame_skip",
    "frame-stack": "env.frame_stack", "num-envs": "env.num_envs", "workers": "env.workers", "core": "env.core",
    "parent-prewarm-all": "vector.parent_prewarm", "worker-start-delay": "vector.worker_start_delay",
    "env-reset-timeout": "vector.env_reset_timeout", "step-timeout": "vector.env_step_timeout",
    "slow-step-trace-threshold": "vector.slow_step_trace_threshold",
    "slow-step-trace-window": "vector.slow_step_trace_window",
    "reward-distance-weight": "reward.distance_weight", "reward-scale-start": "reward.scale_start",
    "reward-scale-final": "reward.scale_final", "reward-scale-anneal-steps": "reward.anneal_steps",
    "stagnation": "reward.stagnation", "enable-ram-x-parse": "reward.ram_x_parse",
    "ram-x-high-addr": "reward.ram_x_high", "ram-x-low-addr": "reward.ram_x_low",
    "scripted-sequence": "script.sequence", "scripted-forward-frames": "script.forward_frames",
    "forward-action-id": "script.forward_action", "probe-forward-actions": "script.probe_forward",
    "seed": "train.seed", "algorithm": "train.algorithm", "total-steps": "train.total_steps",
    "rollout-steps": "train.rollout_steps", "learning-rate": "train.learning_rate", "device": "train.device",
    "overlap-collect": "train.overlap_collect", "compile": "train.compile", "per": "replay.enabled",
    "per-sample-interval": "replay.per_sample_interval", "log-interval": "log.log_interval",
    "checkpoint-interval": "log.checkpoint_interval", "enable-tensorboard": "log.enable_tensorboard",
    "enable-wandb": "log.enable_wandb", "record-video": "log.record_video",
}  # fmt: skip
"""Short flags and their keys; every key is also a flag: --train.gamma 0.98."""
VARIABLES = {
    "ACTION_TYPE": "env.action_type", "NUM_ENVS": "env.num_envs", "WORLD": "env.world", "STAGE": "env.stage",
    "TOTAL_STEPS": "train.total_steps", "ROLLOUT": "train.rollout_steps",
    "REWARD_DISTANCE_WEIGHT": "reward.distance_weight", "REWARD_SCALE_START": "reward.scale_start",
    "REWARD_SCALE_FINAL": "reward.scale_final", "REWARD_SCALE_ANNEAL_STEPS": "reward.anneal_steps",
    "SCRIPTED_SEQUENCE": "script.sequence", "SCRIPTED_FORWARD_FRAMES": "script.forward_frames",
    "FORWARD_ACTION_ID": "script.forward_action", "PROBE_FORWARD": "script.probe_forward",
    "ENABLE_RAM_X_PARSE": "reward.ram_x_parse", "RAM_X_HIGH": "reward.ram_x_high", "RAM_X_LOW": "reward.ram_x_low",
    "PER": "replay.enabled", "PER_SAMPLE_INTERVAL": "replay.per_sample_interval",
    "ENABLE_TENSORBOARD": "log.enable_tensorboard", "ENABLE_WANDB": "log.enable_wandb",
}  # fmt: skip
"""Environment variables of resume.sh and their keys. DISABLE_OVERLAP=1 sets train.overlap_collect to false."""
OWN_PREFIXES = ("REWARD_", "SCRIPTED_", "RAM_X", "PROBE_", "FORWARD_", "PER_")
"""A variable that begins so and is not known is a mistake, not a variable of another program."""


def key_types() -> dict[str, Any]:
    """Return the type of every dotted key."""
    types: dict[str, Any] = {}
    for section in fields(MarioSettings):
        section_class = section.default_factory
        hints = get_type_hints(section_class)
        types |= {f"{section.name}.{key.name}": hints[key.name] for key in fields(section_class)}  # type: ignore[arg-type]
    return types


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every key, and the short flags."""
    short = {key: name for name, key in FLAGS.items()}
    for key, key_type in key_types().items():
        names = [f"--{key.replace('_', '-')}", *([f"--{short[key]}"] if key in short else [])]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if key_type is bool else {}
        parser.add_argument(*names, dest=key, default=None, metavar="VALUE", **switch)


def read_settings(path: Path | None, flags: Mapping[str, Any], variables: Mapping[str, str]) -> MarioSettings:
    """Merge the file, the environment variables and the flags into settings.

    Args:
        path: JSON file; None for the defaults.
        flags: Values by key, as parsed by `add_flags`; None means that a flag was not given.
        variables: Environment variables.

    Raises:
        LabError: The file is invalid, a key is unknown, or a value has the wrong type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_flat(path)
    _reject_unknown_variables(variables)
    for name, key in VARIABLES.items():
        if variables.get(name):
            values[key] = variables[name]
    if variables.get("DISABLE_OVERLAP") == "1":
        values["train.overlap_collect"] = False
    known = key_types()
    values |= {key: value for key, value in flags.items() if key in known and value is not None}
    settings = MarioSettings()
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"sections are {', '.join(s.name for s in fields(MarioSettings))}"
            )
            raise LabError(f"unknown key {key!r}", file=path, hint=hint)
        section, name = key.split(".")
        part = replace(getattr(settings, section), **{name: _convert(key, known[key], value, path)})
        settings = replace(settings, **{section: part})
    script = settings.script
    if script.probe_forward and not (script.forward_frames or script.sequence):
        raise LabError(
            "script.probe_forward looks for the forward action, but no script uses it",
            hint="set SCRIPTED_FORWARD_FRAMES (--scripted-forward-frames) as well",
        )
    return settings


def _reject_unknown_variables(variables: Mapping[str, str]) -> None:
    """Raise LabError for a variable that looks like one of resume.sh and is not."""
    known = {*VARIABLES, "DISABLE_OVERLAP"}
    for name in sorted(set(variables) - known):
        near = difflib.get_close_matches(name, known, 1, cutoff=0.0 if name.startswith(OWN_PREFIXES) else 0.8)
        if near:
            raise LabError(f"unknown environment variable {name}", hint=f"did you mean {near[0]}?")


def _read_flat(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file by dotted key."""
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LabError(f"cannot read the config: {error.strerror}", file=path) from error
    except json.JSONDecodeError as error:
        raise LabError(f"the config is not JSON: {error.msg}", file=path, line=error.lineno) from error
    if not isinstance(loaded, dict) or not all(isinstance(part, dict) for part in loaded.values()):
        raise LabError("the config must be an object of sections", file=path)
    return {f"{section}.{name}": value for section, part in loaded.items() for name, value in part.items()}


def _convert(key: str, key_type: Any, value: Any, path: Path | None) -> Any:
    """Return a value in the type of its key; LabError if that is impossible."""
    optional = type(None) in get_args(key_type)
    base = next((member for member in get_args(key_type) if member is not type(None)), key_type)
    if value is None or (optional and value in ("none", "null", "")):
        if optional:
            return None
        raise LabError(f"{key} needs a value", file=path)
    try:
        if base is bool:
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        if base is int and isinstance(value, str):
            return int(value, 0)  # addresses are written 0x6D
        if base is str and not isinstance(value, str):
            raise ValueError
        if base in (int, float) and isinstance(value, bool):
            raise ValueError
        converted = base(value)
    except (KeyError, ValueError, TypeError):
        raise LabError(f"{key} must be of type {base.__name__}, not {value!r}", file=path) from None
    if base is int and converted != value:
        raise LabError(f"{key} must be a whole number, not {value!r}", file=path)
    if key in CHOICES and converted not in CHOICES[key]:
        raise LabError(f"{key} must be one of {', '.join(CHOICES[key])}, not {converted!r}", file=path)
    return converted
