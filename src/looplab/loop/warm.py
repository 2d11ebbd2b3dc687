"""Warm starts: which weights a run begins with, checked and recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.lab import WarmStart
from looplab.config.paths import find, get, set_
from looplab.errors import LabError
from looplab.ledger.study import StudyLedger
from looplab.runs import folder
from looplab.runs.names import inside

CONTINUE = "continue"
MODELS = "models"


def value_at(config: Mapping[str, Any], path: str) -> Any:
    places = find(config, path)
    return get(config, places[0]) if places else None


def begins_with(
    warm: WarmStart | None, config: Mapping[str, Any], lab: Path, outputs: Path, record: StudyLedger | None
) -> dict[str, Any] | None:
    """The weights that a run of this config begins with: `run` (None: of no run of this study), `path`, `sha256`.
    None: it begins afresh. A LabError says what is not there."""
    if warm is None or value_at(config, warm.mode) != CONTINUE:
        return None
    asked = str(value_at(config, warm.source) or "latest")
    run, path = _find(asked, warm, lab, outputs, record)
    digest = folder.hash_file(path)
    if digest is None:
        raise LabError(f"{warm.source}: {asked}: {path} is not there", hint="name a run, a file, latest or best")
    return {"asked": asked, "run": run, "path": str(path), "sha256": digest}


def _find(asked: str, warm: WarmStart, lab: Path, outputs: Path, record: StudyLedger | None) -> tuple[str | None, Path]:
    if asked == "best":
        best = record.best() if record is not None else None
        if best is None:
            raise LabError(f"{warm.source}: there is no best run yet", hint="start afresh")
        return best.id, find_checkpoint(warm, outputs, best.id)
    if asked == "latest":
        for run in reversed(record.runs(status="ok") if record is not None else []):
            with contextlib.suppress(LabError):
                return run.id, find_checkpoint(warm, outputs, run.id)
        raise LabError(f"{warm.source}: no run has left a checkpoint yet", hint="start afresh")
    path = inside(lab, asked, warm.source)
    if path.is_file():
        return _owner(path, outputs), path
    if record is None:
        raise LabError(f"{warm.source}: there is no run {asked!r} yet")
    run = record.run(asked)
    return run.id, find_checkpoint(warm, outputs, run.id)


def find_checkpoint(warm: WarmStart, outputs: Path, run: str) -> Path:
    """Return the checkpoint that a run of the study has left; a LabError says that there is none."""
    for name in warm.checkpoint:
        for place in (outputs / run, outputs / run / "out"):
            found = (place / name).resolve()
            if found.is_file() and found.is_relative_to(outputs.resolve()):
                return found
    raise LabError(f"run {run} left no {' or '.join(warm.checkpoint)}", hint="see warm_start.checkpoint in lab.yaml")


def _owner(path: Path, outputs: Path) -> str | None:
    """The run of this study that left the file, if one did."""
    if not path.is_relative_to(outputs.resolve()):
        return None
    name = path.relative_to(outputs.resolve()).parts[0]
    return name if folder.is_run(outputs / name) else None


def continued(warm: WarmStart, config: dict[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """The same config, beginning with these weights."""
    for key, value in ((warm.mode, CONTINUE), (warm.source, start["path"])):
        for place in find(config, key):
            set_(config, place, value)
    return config


def check_start(start: Mapping[str, Any]) -> None:
    """The weights must be what they were when the run was decided on."""
    digest = folder.hash_file(start["path"])
    if digest != start["sha256"]:
        what = "is gone" if digest is None else "has changed since the run was decided on"
        raise LabError(f"the checkpoint {start['path']} {what}")
