"""The run folder of a pipeline, and the LATEST pointer next to it.

    <root>/<run>/pipeline.json         when the run was created, and from which config
    <root>/<run>/config_resolved.json  config of the last stage or call that is complete
    <root>/<run>/config_call.json      config of a call that has not finished
    <root>/<run>/previous, partial     outputs of other attempts: see kept.py
    <root>/<run>/logs/run.log          output of all stages
    <root>/<run>/stages/NAME.json      manifest of a complete stage: its fingerprint and its outputs
    <root>/<run>/stages/NAME.begun.json  a stage that started and is not complete
    <root>/<run>/stages/call.json      a call that has not finished
    <root>/<run>/train.log, process.json, exit.json   files of the running stage
    <root>/LATEST                      the run whose last call finished

A run is consistent if it has a complete stage and no started one that is incomplete. LATEST points at consistent runs
only: it moves away before a stage starts in its run, and back when the call has finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import STUDY_NAME
from looplab.errors import BusyError, LabError
from looplab.runs import tree
from looplab.runs.folder import LARGEST_RECORD, point, pointed
from looplab.runs.names import random_suffix
from looplab.untrusted import load_json, open_own, read_bounded

LATEST = "LATEST"
CONFIG, CALL_CONFIG = "config_resolved.json", "config_call.json"
PROCESS_FILES = ("exit.json", "process.json", "train.log")
"""Files of the running stage, in order of removal. `train.log` goes last: it prevents a second start."""


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a JSON record; None if missing or unreadable. Not with orjson: configs may hold NaN and large integers."""
    try:
        data = load_json(read_bounded(path, LARGEST_RECORD))
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) else None


class RunFolder:
    """One run of a pipeline on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path / "logs" / "run.log"

    @property
    def created(self) -> float:
        about = read_record(self.path / "pipeline.json")
        return float(about["created"]) if about else 0.0

    def complete(self, stage: str) -> dict[str, Any] | None:
        """Return the manifest of a complete stage; None while it is being rebuilt."""
        return None if self.begun(stage) else read_record(self.path / "stages" / f"{stage}.json")

    def begun(self, stage: str) -> dict[str, Any] | None:
        """Return the record of a stage that started and is not complete."""
        begun = read_record(self.path / "stages" / f"{stage}.begun.json")
        complete = read_record(self.path / "stages" / f"{stage}.json") if begun else None
        # Between the end of a stage and the removal of its start record, both exist.
        return None if begun and complete and complete["attempt"] == begun["attempt"] else begun

    def call(self) -> dict[str, Any] | None:
        """Return the call that has not finished."""
        return read_record(self.path / "stages" / "call.json")

    def is_consistent(self) -> bool:
        """Return whether a stage is complete and no started one is incomplete."""
        stages = self.path / "stages"
        begun = [path.name.removesuffix(".begun.json") for path in stages.glob("*.begun.json")]
        return not any(self.begun(stage) for stage in begun) and any(
            path for path in stages.glob("*.json") if not path.name.endswith(".begun.json") and path.name != "call.json"
        )

    def refuse_links(self) -> None:
        """Raise LabError if a stage has replaced a folder that looplab writes to by a link."""
        for path in (self.path, self.path / "stages", self.log.parent):
            if path.is_symlink():
                raise LabError("is a link, and looplab does not write through links", file=path, hint="remove the link")

    def write(self, name: str, data: Any) -> None:
        self.refuse_links()
        write_atomic(self.path / name, dump_json(data))

    def describe(self, study: str, config: str, edits: Sequence[str]) -> None:
        """Write `pipeline.json`, unless it exists."""
        if not (self.path / "pipeline.json").exists():
            about = {"id": self.name, "created": time.time(), "study": study, "config": config, "edits": list(edits)}
            self.write("pipeline.json", about)

    def remove(self, name: str) -> None:
        tree.remove(self.path, name)

    def clear_process(self) -> None:
        for name in PROCESS_FILES:
            self.remove(name)

    @contextlib.contextmanager
    def lock(self, what: str) -> Iterator[None]:
        """Hold the run for one call; the lock is released when its process exits."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(self.path / ".lock", os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(descriptor, 400).decode(errors="replace").strip() or "another process"
                raise BusyError(
                    f"run {self.name} is in use by {holder}", file=self.path, hint="wait for it, or use another run"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()} ({what})\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def make_id() -> str:
    return f"{time.strftime('%Y%m%d_%H%M%S')}-{random_suffix(4)}"


def runs_below(root: Path) -> list[RunFolder]:
    """Return the runs of a root, newest first."""
    if not root.is_dir():
        return []
    found = [
        RunFolder(path)
        for path in root.iterdir()
        if STUDY_NAME.fullmatch(path.name) and not path.is_symlink() and (path / "pipeline.json").exists()
    ]
    return sorted(found, key=lambda run: (run.created, run.name), reverse=True)


def latest(root: Path) -> RunFolder | None:
    """Return the run that LATEST points at if it is consistent, else the newest consistent run."""
    name = pointed(root, LATEST)
    if name is not None and STUDY_NAME.fullmatch(name) and RunFolder(root / name).is_consistent():
        return RunFolder(root / name)
    return next((run for run in runs_below(root) if run.is_consistent()), None)


def point_latest(run: RunFolder) -> None:
    if run.is_consistent():
        point(run.path.parent, LATEST, run.name)


def unpoint_latest(run: RunFolder) -> None:
    """Move LATEST away from this run, because a stage is about to start in it."""
    root = run.path.parent
    if pointed(root, LATEST) != run.name:
        return
    other = next((other for other in runs_below(root) if other.name != run.name and other.is_consistent()), None)
    if other is not None:
        point(root, LATEST, other.name)
    else:
        (root / LATEST).unlink(missing_ok=True)


def need_latest(root: Path, why: str) -> RunFolder:
    """Return the latest run; raise LabError with `why` if there is none."""
    found = latest(root)
    if found is None:
        raise LabError(f"{root} has no complete run: {why}", hint="run its first stage beforehand, or in the same call")
    return found
