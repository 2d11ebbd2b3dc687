"""The config of a Mario training: its keys, read from a JSON file, from flags, and from the variables of resume.sh.

A variable counts more than the file, a flag more than both. An unknown key is an error with its nearest neighbour.
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
class Game:
    world: int = 1
    stage: int = 1
    action_type: str = "simple"
    """right_only, simple, complex or extended."""
    frame_skip: int = 4
    frame_stack: int = 4
    noops: int = 30
    """Up to so many frames without a button at the beginning of an episode, so that no two are the same."""
    max_steps: int | None = None
    """Steps after which an episode is truncated."""
    core: str = "auto"
    """auto, fceumm, nes-py."""
    num_envs: int = 8
    workers: int | None = None
    """Processes; None: as many as cores; 0: none."""


@dataclass(frozen=True)
class Supervision:
    parent_prewarm: bool = False
    """Make and close one env in this process first."""
    worker_start_delay: float = 0.0
    """Seconds between the starts of two workers."""
    serialise_start: bool = False
    """Workers start one after the other, also those of other trainings (a file lock)."""
    env_reset_timeout: float = 60.0
    env_step_timeout: float = 15.0
    """Seconds after which a worker counts as hung; it is then replaced and its steps are made again."""
    snapshot_every: int = 64
    """Steps between two snapshots of the envs."""
    slow_step: float = 5.0
    """Seconds from which on a step counts as slow."""
    slow_step_trace_threshold: int = 5
    slow_step_trace_window: float = 120.0
    """So many slow steps within so many seconds, and the worker's stacks are written."""


@dataclass(frozen=True)
class Shape:
    env_weight: float = 0.01
    """Of the game's own reward, which is up to 15 a frame."""
    distance_weight: float = 0.0125
    score_weight: float = 0.0
    time_weight: float = 0.0
    scale_start: float = 0.2
    scale_final: float = 0.1
    anneal_steps: int = 50_000
    terminal_bonus: float = 0.3
    stagnation: int | None = 200
    """Steps without getting further after which an episode is truncated."""
    ram_x_parse: bool = False
    """Read the position from RAM where the env does not tell it."""
    ram_x_high: int = 0x6D
    ram_x_low: int = 0x86


@dataclass(frozen=True)
class Script:
    sequence: str = ""
    """Such as START:8,RIGHT+B:180: actions at the beginning of the first episode of each env."""
    forward_frames: int = 0
    """Steps forwards at the beginning of the first episodes; `sequence` counts more."""
    forward_action: int | None = None
    """Which action that is; None: RIGHT+B."""
    probe_forward: int = 0
    """Try every action for so many steps first, and take the one that leads furthest."""
    every_episode: bool = False


@dataclass(frozen=True)
class Train:
    seed: int = 0
    algorithm: str = "ppo"
    """ppo, or impala: each rollout is learned from once."""
    returns: str = "vtrace"
    """impala: vtrace or gae."""
    total_steps: int = 1_000_000
    """Steps of all envs together; each is `frame_skip` frames."""
    rollout_steps: int = 128
    learning_rate: float = 2.5e-4
    anneal: bool = True
    gamma: float = 0.95
    lam: float = 0.95
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    epochs: int = 3
    minibatch: int = 256
    clip: float = 0.2
    width: int = 256
    memory: int = 0
    """Numbers that a recurrent policy carries; 0: none."""
    overlap_collect: bool = True
    """Collect the next rollout while learning from this one."""
    compile: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Replayed:
    enabled: bool = False
    """Prioritized replay; for impala."""
    entries: int = 200_000
    max_memory_gb: float = 2.0
    """The replay is made smaller where it would need more."""
    alpha: float = 0.6
    beta: float = 0.4
    beta_final: float = 1.0
    beta_samples: int = 1_000_000
    batch: int = 256
    per_sample_interval: int = 4
    """Updates between two samples; every step is put in."""


@dataclass(frozen=True)
class Records:
    log_interval: int = 5
    """Updates between two rows."""
    checkpoint_interval: int = 50
    """Updates between two checkpoints."""
    monitor_period: float = 5.0
    enable_tensorboard: bool = False
    enable_wandb: bool = False
    record_video: bool = False
    """A video of one episode at the end."""


@dataclass(frozen=True)
class Settings:
    env: Game = field(default_factory=Game)
    vector: Supervision = field(default_factory=Supervision)
    reward: Shape = field(default_factory=Shape)
    script: Script = field(default_factory=Script)
    train: Train = field(default_factory=Train)
    replay: Replayed = field(default_factory=Replayed)
    log: Records = field(default_factory=Records)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


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
"""Short flags and the keys they set; every key is also a flag by its own name: --train.gamma 0.98."""
VARIABLES = {
    "ACTION_TYPE": "env.action_type", "NUM_ENVS": "env.num_envs", "WORLD": "env.world", "STAGE": "env.stage",
    "TOTAL_STEPS": "train.total_steps", "ROLLOUT": "train.rollout_steps",
    "REWARD_DISTANCE_WEIGHT": "reward.distance_weight", "REWARD_SCALE_START": "reward.scale_start",
    "REWARD_SCALE_FINAL": "reward.scale_final", "REWARD_SCALE_ANNEAL_STEPS": "reward.anneal_steps",
    "SCRIPTED_SEQUENCE": "script.sequence", "SCRIPTED_FORWARD_FRAMES": "script.forward_frames",
    "FORWARD_ACTION_ID": "script.forward_action", "PROBE_FORWARD": "script.probe_forward",
    "ENABLE_RAM_X_PARSE": "reward.ram_x_parse", "RAM_X_HIGH": "reward.ram_x_high", "RAM_X_LOW": "reward.ram_x_low",
    "PER_SAMPLE_INTERVAL": "replay.per_sample_interval",
}  # fmt: skip
"""Variables of resume.sh. DISABLE_OVERLAP=1 is known too."""


def keys() -> dict[str, Any]:
    """Every dotted key with its type."""
    found: dict[str, Any] = {}
    for section in fields(Settings):
        part = section.default_factory
        hints = get_type_hints(part)
        found |= {f"{section.name}.{one.name}": hints[one.name] for one in fields(part)}  # type: ignore[arg-type]
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    short = {key: name for name, key in FLAGS.items()}
    for key, kind in keys().items():
        names = [f"--{key.replace('_', '-')}", *([f"--{short[key]}"] if key in short else [])]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
        parser.add_argument(*names, dest=key, default=None, metavar="VALUE", **switch)


def read_settings(path: Path | None, flags: Mapping[str, Any], variables: Mapping[str, str]) -> Settings:
    """`flags`: as add_flags gives them; those that are None were not said."""
    given: dict[str, Any] = {}
    if path is not None:
        given = _flat(path)
    for name, key in VARIABLES.items():
        if variables.get(name):
            given[key] = variables[name]
    if variables.get("DISABLE_OVERLAP") == "1":
        given["train.overlap_collect"] = False
    known = keys()
    given |= {key: value for key, value in flags.items() if key in known and value is not None}
    settings = Settings()
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(s.name for s in fields(Settings))}"
            raise LabError(f"unknown key {key!r}", file=path, hint=hint)
        section, name = key.split(".")
        part = replace(getattr(settings, section), **{name: _typed(key, known[key], value, path)})
        settings = replace(settings, **{section: part})
    return settings


def _flat(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LabError(f"cannot read the config: {error.strerror}", file=path) from error
    except json.JSONDecodeError as error:
        raise LabError(f"the config is not JSON: {error.msg}", file=path, line=error.lineno) from error
    if not isinstance(loaded, dict) or not all(isinstance(part, dict) for part in loaded.values()):
        raise LabError("the config must be an object of sections", file=path)
    return {f"{section}.{name}": value for section, part in loaded.items() for name, value in part.items()}


def _typed(key: str, kind: Any, value: Any, path: Path | None) -> Any:
    optional = type(None) in get_args(kind)
    base = next((one for one in get_args(kind) if one is not type(None)), kind)
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
        made = base(value)
    except (KeyError, ValueError, TypeError):
        raise LabError(f"{key} takes a value of the type {base.__name__}, not {value!r}", file=path) from None
    if base is int and made != value:
        raise LabError(f"{key} takes a whole number, not {value!r}", file=path)
    if key in CHOICES and made not in CHOICES[key]:
        raise LabError(f"{key} takes one of {', '.join(CHOICES[key])}, not {made!r}", file=path)
    return made
