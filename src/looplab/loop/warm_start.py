"""Warm starts: which weights a run begins with, checked and recorded."""

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
from looplab.ledger.study import RunRow, StudyLedger
from looplab.runs import folder
from looplab.untrusted import real_path

CONTINUE = "continue"
CLOCK_STEP_S = 0.05
"""How much the time of a file may differ from the clock: the kernel's clock for files moves in steps."""
MODELS = "models"


def value_at(config: Mapping[str, Any], path: str) -> Any:
    places = find(config, path)
    return get(config, places[0]) if places else None


def resolve(
    warm: WarmStartConfig | None, config: Mapping[str, Any], lab: Path, outputs: Path, record: StudyLedger | None
) -> dict[str, Any] | None:
    """The weights that a run of this config begins with: `run` (None: of no run of this study), `path`, `sha256`.
    None: it begins afresh. A LabError says what is not there."""
    if warm is None or value_at(config, warm.mode) != CONTINUE:
        return None
    asked = str(value_at(config, warm.source) or "latest")
    try:
        run, path = _find(asked, warm, lab, outputs, record)
    except (OSError, RuntimeError, ValueError) as error:  # not a path: too long, with a NUL, or the home of nobody
        raise LabError(f"{warm.source}: {asked[:200]!r} cannot be read: {error}") from None
    digest = folder.hash_file(path)
    if digest is None:
        raise LabError(f"{warm.source}: {asked}: {path} is not there", hint="name a run, a file, latest or best")
    return {"asked": asked, "run": run, "path": str(path), "sha256": digest}


def _find(
    asked: str, warm: WarmStartConfig, lab: Path, outputs: Path, record: StudyLedger | None
) -> tuple[str | None, Path]:
    if asked == "best":
        best = record.best() if record is not None else None
        if best is None:
            raise LabError(f"{warm.source}: there is no best run yet", hint="start afresh")
        return best.id, find_checkpoint(warm, lab, outputs, best, record)
    if asked == "latest":
        for run in reversed(record.runs(status="ok") if record is not None else []):
            with contextlib.suppress(LabError):
                return run.id, find_checkpoint(warm, lab, outputs, run, record)
        raise LabError(
            f"{warm.source}: no run has left a checkpoint yet ({' or '.join(warm.checkpoint)})", hint="start afresh"
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
    """The folders from which weights may be taken."""
    return [lab.resolve(), *(Path(folder).expanduser().resolve() for folder in warm.allow)]


def _check_allowed(path: Path, warm: WarmStartConfig, lab: Path) -> None:
    """Refuse a file outside of the lab, unless the lab file allows its folder."""
    if not any(path.is_relative_to(root) for root in _roots(warm, lab)):
        raise LabError(
            f"{warm.source}: {path} leads out of the lab",
            hint=f"to allow it, write `allow: [{path.parent}]` under warm_start in lab.yaml",
        )


def find_checkpoint(
    warm: WarmStartConfig, lab: Path, outputs: Path, run: RunRow, record: StudyLedger | None = None
) -> Path:
    """The weights that a run left: of the first pattern that matches anything, the newest file.

    Args:
        record: Tells which other runs were running at the same time. Where several write to one folder, nobody knows
            whose files are there.
    """
    for pattern in warm.checkpoint:
        if os.path.isabs(pattern):
            found = _shared(pattern, warm, lab, run, record)
        else:
            found = [
                path
                for place in (outputs / run.id, outputs / run.id / "out")
                for path in _matches(place, pattern)
                if path.is_relative_to(outputs.resolve())
            ]
        if found:
            return max(found, key=lambda path: (_changed_at(path), path.name))
    raise LabError(f"run {run.id} left no {' or '.join(warm.checkpoint)}", hint="see warm_start.checkpoint in lab.yaml")


def _matches(place: Path, pattern: str) -> list[Path]:
    """The regular files that match a pattern below a folder; a name without wildcards is taken as it is."""
    named = place.glob(pattern) if glob.has_magic(pattern) else [place / pattern]
    return [found for path in named if (found := real_path(path)).is_file()]


def _changed_at(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 if it is gone by now."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _shared(pattern: str, warm: WarmStartConfig, lab: Path, run: RunRow, record: StudyLedger | None) -> list[Path]:
    """The files outside of the run folder that were written while the run was running, and no other run."""
    if run.started is None or run.ended is None:
        return []
    for other in record.runs() if record is not None else []:
        overlaps = other.started is not None and other.started < run.ended and (other.ended or math.inf) > run.started
        if other.id != run.id and overlaps:
            raise LabError(
                f"runs {run.id} and {other.id} ran at the same time, so it is not known which of them wrote {pattern}",
                hint="let the trainer write below {run_dir}, or run one at a time (slots: {count: 1})",
            )
    root = Path(pattern).anchor
    found = []
    for path in _matches(Path(root), str(Path(pattern).relative_to(root))):
        _check_allowed(path, warm, lab)
        if run.started - CLOCK_STEP_S <= _changed_at(path) <= run.ended + CLOCK_STEP_S:
            found.append(path)
    return found


def _owner(path: Path, outputs: Path) -> str | None:
    """The run of this study that left the file, if one did."""
    if not path.is_relative_to(outputs.resolve()):
        return None
    name = path.relative_to(outputs.resolve()).parts[0]
    return name if folder.is_run(outputs / name) else None


def continued(warm: WarmStartConfig, config: dict[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
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
