"""Checkpoints of weights and optimizer, written atomically, and the lookup of the one to continue from."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError  # only the exception: files are loaded with weights_only
from typing import TYPE_CHECKING, Any

import torch

from looplab import trainkit
from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.drone.ppo import DronePolicy
    from looplab.recipes.drone.settings import DroneConfig, TrainConfig


def save(
    path: Path, policy: DronePolicy, optimizer: torch.optim.Optimizer, config: DroneConfig, lifetime_steps: int
) -> None:
    content = {
        "env_name": config.env_name,
        "optimizer_name": config.train.optimizer,
        "lifetime_steps": lifetime_steps,
        "policy": trainkit.clean(policy.state_dict()),
        "optimizer": optimizer.state_dict(),
    }
    trainkit.atomic_write(path, lambda file: torch.save(content, file))


def load(
    path: Path, policy: DronePolicy, optimizer: torch.optim.Optimizer, train: TrainConfig
) -> tuple[int, list[str]]:
    """Load the weights, and the state of the optimizer if it has the same type.

    Returns:
        The number of steps the weights were trained for, and notes for the user.
    """
    content = _read(path, train.device)
    trainkit.load_into(policy, content["policy"], source=path)
    if content["optimizer_name"] != train.optimizer:
        note = f"weights only: the checkpoint's optimizer is {content['optimizer_name']}, ours is {train.optimizer}"
        return int(content["lifetime_steps"]), [note]
    optimizer.load_state_dict(content["optimizer"])
    for group in optimizer.param_groups:  # moments from the checkpoint, hyperparameters from this run
        group.update(lr=train.learning_rate, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps)
    return int(content["lifetime_steps"]), []


def _read(path: Path, device: str) -> dict[str, Any]:
    if not path.is_file():
        raise LabError("no such checkpoint", file=path)
    try:
        content = torch.load(path, map_location=device, weights_only=True) if zipfile.is_zipfile(path) else None
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise LabError(f"cannot read the checkpoint: {str(error).splitlines()[0]}", file=path) from error
    if not isinstance(content, dict) or not {"policy", "optimizer", "optimizer_name", "lifetime_steps"} <= set(content):
        raise LabError("this is not a checkpoint of this trainer", file=path)
    return content


def find(out: Path, config: DroneConfig) -> Path | None:
    """Return the checkpoint that `autopilot` selects: a path, or that of the latest or best run next to `out`.

    None means to start fresh.
    """
    resume_from = config.autopilot.resume_from
    if config.autopilot.resume_mode == "fresh":
        return None
    if resume_from not in ("latest", "best"):
        return Path(resume_from)
    runs = out.resolve().parent
    if resume_from == "latest":
        saved = [path for path in runs.glob("*/checkpoints/latest.pt") if path.parent.parent != out.resolve()]
        if saved:
            return max(saved, key=lambda path: path.stat().st_mtime_ns)
    elif (runs / "BEST").is_file():
        folder = runs / (runs / "BEST").read_text().strip() / "checkpoints"
        return folder / "best.pt" if (folder / "best.pt").is_file() else folder / "latest.pt"
    raise LabError(
        f"autopilot.resume_from is {resume_from!r}, but no run in {runs} has such a checkpoint",
        hint="set autopilot.resume_mode to fresh, or resume_from to the path of a checkpoint",
    )


def identity(config: DroneConfig, weights: Path | None, code: Iterable[Path]) -> str:
    """Hash config, initial weights and code. A run resumes only from a state with the same hash."""
    digest = hashlib.sha256(json.dumps([asdict(config), str(weights)]).encode())
    for file in code:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
