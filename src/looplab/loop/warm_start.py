"""Warm starts: find, check and record the initial weights of a run."""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.lab import WarmStartConfig
from looplab.config.paths import find, get, set_
from looplab.errors import LabError
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.runs import folder
from looplab.untrusted import real_path

CONTINUE = "continue"
"""Value of the mode key in a config that asks for a warm start."""
CLOCK_STEP_S = 0.05
"""Tolerance for file times, in seconds: the kernel's clock for file times is coarse."""
MODELS = "models"
"""Folder of the study with copies of the best and the latest checkpoint."""


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, or at its first match; None if there is none."""
    places = find(config, path)
    return get(config, places[0]) if places else None


def resolve(
    warm: WarmStartConfig | None, config: Mapping[str, Any], lab: Path, outputs: Path, record: StudyLedger | None
) -> dict[str, Any] | None:
    """Find the initial weights for a run of this config.

    Args:
        record: None if the study has no ledger yet.

    Returns:
        `asked` (the value in the config), `run` (None if the weights are not from a run of this study), `path` and
        `sha256`. None if the run starts from scratch.

    Raises:
        LabError: The weights do not exist, or may not be used.
    """
    if warm is None or value_at(config, warm.mode) != CONTINUE:
        return None
    asked = str(value_at(config, warm.source) or "latest")
    try:
        run, path = _find(asked, warm, lab, outputs, record)
    except (OSError, RuntimeError, ValueError) as error:  # not a valid path: too long, with a NUL, or an unknown ~user
        raise LabError(f"{warm.source}: {asked[:200]!r} cannot be read: {error}") from None
    digest = folder.hash_file(path)
    if digest is None:
        raise LabError(f"{warm.source}: {asked}: {path} is not there", hint="name a run, a file, latest or best")
    return {"asked": asked, "run": run, "path": str(path), "sha256": digest}


def _find(
    asked: str, warm: WarmStartConfig, lab: Path, outputs: Path, record: StudyLedger | None
) -> tuple[str | None, Path]:
    """Return the run (None if not of this study) and the file that `asked` refers to.

    Args:
        asked: `best`, `latest`, a file or a run id.
    """
    if asked == "best":
        best = record.best() if record is not None else None
        if best is None:
            raise LabError(f"{warm.source}: there is no best run yet", hint="start from scratch")
        return best.id, find_checkpoint(warm, lab, outputs, best, record)
    if asked == "latest":
        for run in reversed(record.runs(status="ok") if record is not None else []):
            with contextlib.suppress(LabError):
                return run.id, find_checkpoint(warm, lab, outputs, run, record)
        raise LabError(
            f"{warm.source}: no run has left a checkpoint yet ({' or '.join(warm.checkpoint)})",
            hint="start from scratch",
        )
    path = real_path(lab / Path(asked).expanduser())
    if path.is_file():
        _check_allowed(path, warm, lab)
        return _owner(path, outputs), path
    if "/" in asked:
        _check_allowed(path, warm, lab)
        raise LabError(f"{warm.source}: {asked} does not exist", hint="name a run, a file, latest or best")
    if record is None:
        raise LabError(f"{warm.source}: there is no run {asked!r} yet")
    run = record.run(asked)
    return run.id, find_checkpoint(warm, lab, outputs, run, record)


def _roots(warm: WarmStartConfig, lab: Path) -> list[Path]:
    """Return the folders from which weights may be loaded."""
    return [lab.resolve(), *(Path(folder).expanduser().resolve() for folder in warm.allow)]


def _check_allowed(path: Path, warm: WarmStartConfig, lab: Path) -> None:
    """Raise a LabError for a file outside the lab, unless the lab file allows its folder."""
    if not any(path.is_relative_to(root) for root in _roots(warm, lab)):
        raise LabError(
            f"{warm.source}: {path} leads out of the lab",
            hint=f"to allow it, write `allow: [{path.parent}]` under warm_start in lab.yaml",
        )


def find_checkpoint(
    warm: WarmStartConfig, lab: Path, outputs: Path, run: RunRow, record: StudyLedger | None = None
) -> Path:
    """Return the checkpoint of a run: the newest match of the first pattern that has any.

    Args:
        record: Used to detect runs that overlapped in time: if several write to one shared folder, the owner of a
            file is unknown.

    Raises:
        LabError: There is no checkpoint, or its owner is unknown.
    """
    for pattern in warm.checkpoint:
        if os.path.isabs(pattern):
            matches = _shared(pattern, warm, lab, run, record)
        else:
            matches = [
                path
                for place in (outputs / run.id, outputs / run.id / "out")
                for path in _matches(place, pattern)
                if path.is_relative_to(outputs.resolve())
            ]
        if matches:
            return max(matches, key=lambda path: (_changed_at(path), path.name))
    raise LabError(f"run {run.id} left no {' or '.join(warm.checkpoint)}", hint="see warm_start.checkpoint in lab.yaml")


def _matches(place: Path, pattern: str) -> list[Path]:
    """Return the regular files below a folder that match a pattern; a name without wildcards is used as is."""
    named = place.glob(pattern) if glob.has_magic(pattern) else [place / pattern]
    return [file for path in named if (file := real_path(path)).is_file()]


def _changed_at(path: Path) -> float:
    """Return the modification time of a file in Unix seconds; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _shared(pattern: str, warm: WarmStartConfig, lab: Path, run: RunRow, record: StudyLedger | None) -> list[Path]:
    """Return the files outside the run folder that were written while this run was running.

    Raises:
        LabError: Another run was running at the same time, or a file is in a folder that is not allowed.
    """
    if run.started is None or run.ended is None:
        return []
    for other in record.runs() if record is not None else []:
        overlaps = other.started is not None and other.started < run.ended and (other.ended or math.inf) > run.started
        if other.id != run.id and overlaps:
            raise LabError(
                f"runs {run.id} and {other.id} ran at the same time, so it is unknown which of them wrote {pattern}",
                hint="let the trainer write below {run_dir}, or run one at a time (slots: {count: 1})",
            )
    root = Path(pattern).anchor
    files = []
    for path in _matches(Path(root), str(Path(pattern).relative_to(root))):
        _check_allowed(path, warm, lab)
        if run.started - CLOCK_STEP_S <= _changed_at(path) <= run.ended + CLOCK_STEP_S:
            files.append(path)
    return files


def _owner(path: Path, outputs: Path) -> str | None:
    """Return the run of this study whose folder contains the file; None if there is none."""
    if not path.is_relative_to(outputs.resolve()):
        return None
    name = path.relative_to(outputs.resolve()).parts[0]
    return name if folder.is_run(outputs / name) else None


def continued(warm: WarmStartConfig, config: dict[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Set the config to start from these weights; changes it in place and returns it."""
    for key, value in ((warm.mode, CONTINUE), (warm.source, start["path"])):
        for place in find(config, key):
            set_(config, place, value)
    return config


def check_start(start: Mapping[str, Any]) -> None:
    """Check that the weights are unchanged since the run was planned.

    Raises:
        LabError: The checkpoint is gone or has changed.
    """
    digest = folder.hash_file(start["path"])
    if digest != start["sha256"]:
        what = "is gone" if digest is None else "has changed since the run was planned"
        raise LabError(f"the checkpoint {start['path']} {what}")
