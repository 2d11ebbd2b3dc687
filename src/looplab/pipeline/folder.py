"""The run folder of a pipeline, and the pointer LATEST beside it.

    <root>/<run>/pipeline.json         since when there is this run, and from which config
    <root>/<run>/config_resolved.json  the config of the last call
    <root>/<run>/logs/run.log          what all stages printed
    <root>/<run>/stages/NAME.json      a complete stage: what it was made of, and what it made
    <root>/<run>/stages/NAME.begun.json  a stage that has begun and is not complete
    <root>/<run>/stages/call.json      a call that is not at its end
    <root>/<run>/train.log, process.json, exit.json   of the stage at work
    <root>/LATEST                      the run whose last call came to its end

A run is whole when it has a complete stage and none that has begun and is not complete. LATEST points at whole runs
only: it is moved away before a stage begins in its run, and moved back when the call is at its end.
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
CONFIG = "config_resolved.json"
PROCESS_FILES = ("exit.json", "process.json", "train.log")
"""Of the stage at work; `train.log` is what makes sure that it is started only once, and goes last."""


def read_record(path: Path) -> dict[str, Any] | None:
    """What we have written; None where there is nothing. Not by orjson: NaN and large numbers of a config come back."""
    try:
        data = load_json(read_bounded(path, LARGEST_RECORD))
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) else None


class RunFolder:
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
        """What is written about a stage that is complete; nothing while it is made anew."""
        return None if self.begun(stage) else read_record(self.path / "stages" / f"{stage}.json")

    def begun(self, stage: str) -> dict[str, Any] | None:
        """What is written about a stage that has begun and is not complete."""
        begun = read_record(self.path / "stages" / f"{stage}.begun.json")
        complete = read_record(self.path / "stages" / f"{stage}.json") if begun else None
        # Between the end of a stage and the removal of its mark, both are there.
        return None if begun and complete and complete["attempt"] == begun["attempt"] else begun

    def call(self) -> dict[str, Any] | None:
        return read_record(self.path / "stages" / "call.json")

    def is_whole(self) -> bool:
        stages = self.path / "stages"
        begun = [path.name.removesuffix(".begun.json") for path in stages.glob("*.begun.json")]
        return not any(self.begun(stage) for stage in begun) and any(
            path for path in stages.glob("*.json") if not path.name.endswith(".begun.json") and path.name != "call.json"
        )

    def refuse_links(self) -> None:
        """Raise LabError if a stage has put a link in the place of a folder that looplab writes to."""
        for path in (self.path, self.path / "stages", self.log.parent):
            if path.is_symlink():
                raise LabError("is a link, through which nothing is written", file=path, hint="remove the link")

    def write(self, name: str, data: Any) -> None:
        self.refuse_links()
        write_atomic(self.path / name, dump_json(data))

    def describe(self, study: str, config: str, edits: Sequence[str]) -> None:
        """Write down, once, that there is this run."""
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
        """One call at a time; the lock dies with its holder."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(self.path / ".lock", os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(descriptor, 400).decode(errors="replace").strip() or "somebody"
                raise BusyError(
                    f"run {self.name} is in use by {holder}", file=self.path, hint="wait for it, or take another run"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()} ({what})\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def make_id() -> str:
    return f"{time.strftime('%Y%m%d_%H%M%S')}-{random_suffix(4)}"


def runs_below(root: Path) -> list[RunFolder]:
    """The runs of a root, the newest first."""
    if not root.is_dir():
        return []
    found = [
        RunFolder(path)
        for path in root.iterdir()
        if STUDY_NAME.fullmatch(path.name) and not path.is_symlink() and (path / "pipeline.json").exists()
    ]
    return sorted(found, key=lambda run: (run.created, run.name), reverse=True)


def latest(root: Path) -> RunFolder | None:
    """The run that LATEST points at, if it is whole; else the newest one that is."""
    name = pointed(root, LATEST)
    if name is not None and STUDY_NAME.fullmatch(name) and RunFolder(root / name).is_whole():
        return RunFolder(root / name)
    return next((run for run in runs_below(root) if run.is_whole()), None)


def point_latest(run: RunFolder) -> None:
    if run.is_whole():
        point(run.path.parent, LATEST, run.name)


def unpoint_latest(run: RunFolder) -> None:
    """A stage is about to begin in this run: LATEST must not point at it meanwhile."""
    root = run.path.parent
    if pointed(root, LATEST) != run.name:
        return
    other = next((other for other in runs_below(root) if other.name != run.name and other.is_whole()), None)
    if other is not None:
        point(root, LATEST, other.name)
    else:
        (root / LATEST).unlink(missing_ok=True)


def need_latest(root: Path, why: str) -> RunFolder:
    found = latest(root)
    if found is None:
        raise LabError(f"{root} has no complete run: {why}", hint="run its first stage before, or in the same call")
    return found
