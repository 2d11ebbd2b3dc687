"""Checkpoints: weights and optimizer, whole or not at all, and what a run may continue from."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError  # only the exception: files are read with weights_only
from typing import TYPE_CHECKING, Any

import torch

from looplab import trainkit
from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.drone.ppo import Policy
    from looplab.recipes.drone.settings import Settings, Train


def save(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, settings: Settings, lifetime_steps: int) -> None:
    content = {
        "env_name": settings.env_name,
        "optimizer_name": settings.train.optimizer,
        "lifetime_steps": lifetime_steps,
        "policy": trainkit.clean(policy.state_dict()),
        "optimizer": optimizer.state_dict(),
    }
    trainkit.atomic_write(path, lambda file: torch.save(content, file))


def load(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, train: Train) -> tuple[int, list[str]]:
    """Put a checkpoint's weights into the policy, and its moments into the optimizer where that is of the same kind.

    Gives the steps that went into it, and what is worth saying.
    """
    content = _read(path, train.device)
    trainkit.load_into(policy, content["policy"], source=path)
    if content["optimizer_name"] != train.optimizer:
        said = f"weights only: the checkpoint's optimizer is {content['optimizer_name']}, ours is {train.optimizer}"
        return int(content["lifetime_steps"]), [said]
    optimizer.load_state_dict(content["optimizer"])
    for group in optimizer.param_groups:  # the moments are the checkpoint's, the knobs are this run's
        group.update(lr=train.learning_rate, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps)
    return int(content["lifetime_steps"]), []


def _read(path: Path, device: str) -> dict[str, Any]:
    if not path.is_file():
        raise LabError("there is no such checkpoint", file=path)
    try:
        content = torch.load(path, map_location=device, weights_only=True) if zipfile.is_zipfile(path) else None
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise LabError(f"the checkpoint cannot be read: {str(error).splitlines()[0]}", file=path) from error
    if not isinstance(content, dict) or not {"policy", "optimizer", "optimizer_name", "lifetime_steps"} <= set(content):
        raise LabError("this is no checkpoint of this trainer", file=path)
    return content


def find(out: Path, settings: Settings) -> Path | None:
    """What `autopilot` says to continue from: a path, or the latest or best run beside `out`; None: start fresh."""
    wanted = settings.autopilot.resume_from
    if settings.autopilot.resume_mode == "fresh":
        return None
    if wanted not in ("latest", "best"):
        return Path(wanted)
    beside = out.resolve().parent
    if wanted == "latest":
        saved = [path for path in beside.glob("*/checkpoints/latest.pt") if path.parent.parent != out.resolve()]
        if saved:
            return max(saved, key=lambda path: path.stat().st_mtime_ns)
    elif (beside / "BEST").is_file():
        folder = beside / (beside / "BEST").read_text().strip() / "checkpoints"
        return folder / "best.pt" if (folder / "best.pt").is_file() else folder / "latest.pt"
    raise LabError(
        f"autopilot.resume_from is {wanted!r}, but no run in {beside} has such a checkpoint",
        hint="set autopilot.resume_mode to fresh, or name a checkpoint's path",
    )


def identity(settings: Settings, weights: Path | None, code: Iterable[Path]) -> str:
    """What makes a training this one: only the same settings, first weights and code go on with what it left."""
    digest = hashlib.sha256(json.dumps([asdict(settings), str(weights)]).encode())
    for file in code:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
