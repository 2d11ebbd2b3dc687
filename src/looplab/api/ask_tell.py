"""Ask and tell: the study decides and records, the caller trains.

An engine runs in a thread. Its executor starts no process: a start is what `ask` returns, an end is what `tell` says.
Each trial is a run like any other, with folder, config, metrics and verdict. If the process dies, the runs that were
asked for and not reported are recorded as lost by the next engine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from looplab.api.study import EngineThread
from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.launch.base import Ended, Exit, LaunchEvent, LaunchSpec, Place, Rejected, Started
from looplab.launch.local import read_exit
from looplab.loop.session import SessionResult
from looplab.loop.setup import Setup
from looplab.runs import folder
from looplab.trainkit.log import Logger


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that the caller trains."""

    run: str
    config: dict[str, Any]
    seed: int | None
    """None: no seed reaches the trainer."""
    folder: Path
    """For checkpoints and other files of the trial."""
    metrics_path: Path


class AskTell:
    """A study that asks its caller to train. Use it as a context manager; leaving it early stops the study.

    with study.ask_tell(runs=20) as loop:
        while (trial := loop.ask()) is not None:
            loop.tell(trial, {"loss": train(**trial.config)})
    """

    def __init__(self, lab: LabConfig, study: StudyConfig, setup: Setup) -> None:
        self._executor = CallerExecutor()
        self._engine = EngineThread(lab, study, setup, executor=lambda: self._executor)

    def __enter__(self) -> AskTell:
        self._engine.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.__exit__(*error)

    @property
    def result(self) -> SessionResult | None:
        """How the study ended, once it has."""
        return self._engine.result

    def ask(self) -> Trial | None:
        """Return the next trial; None if the study is over.

        Waits while the study decides, and while as many trials are out as it has slots.
        """
        while True:
            spec = self._executor.take(0.1)
            if spec is not None:
                record = folder.record_folder(spec.run_dir)
                seed = spec.env.get("LOOPLAB_SEED")
                return Trial(
                    run=spec.run_id,
                    config=folder.read_json(spec.run_dir, "config.json"),
                    seed=int(seed) if seed else None,
                    folder=record.parent,
                    metrics_path=Path(spec.env["LOOPLAB_METRICS"]),
                )
            if self._engine.is_over:
                return None

    def tell(
        self, trial: Trial, metrics: Mapping[str, float] | None = None, *, step: float | None = None, ok: bool = True
    ) -> None:
        """Report a trial's results and its end.

        Args:
            metrics: Values by name; None: they were logged with `log`.
            ok: False if the training failed.
        """
        if metrics is not None:
            self.log(trial, metrics, step=step)
        self._executor.finish(trial.run, Exit(0 if ok else 1, reason=None))

    def log(self, trial: Trial, metrics: Mapping[str, float], *, step: float | None = None) -> None:
        """Report a trial's metrics while it trains; watch rules see them.

        Raises:
            LabError: The trial has ended.
        """
        self._executor.require(trial.run)
        logger = Logger(trial.metrics_path)
        logger.log(dict(metrics), step=step)
        logger.close()


class CallerExecutor:
    """An executor that hands its runs to the caller of `ask`. It keeps the contract's at-most-once start: the log of a
    run is created exclusively."""

    def __init__(self) -> None:
        self._asked: queue.Queue[LaunchSpec] = queue.Queue()
        self._events: queue.Queue[LaunchEvent | None] = queue.Queue()
        self._out: dict[str, tuple[LaunchSpec, float]] = {}
        self._held: dict[str, LaunchSpec] = {}

    def take(self, timeout: float) -> LaunchSpec | None:
        """Return the next run that the engine wants trained, if there is one within `timeout` seconds."""
        try:
            spec = self._asked.get(timeout=timeout)
        except queue.Empty:
            return None
        return spec if spec.run_id in self._out else None  # else it was stopped meanwhile

    def require(self, run_id: str) -> None:
        """Raise LabError unless the run is being trained by the caller."""
        if run_id not in self._out:
            raise LabError(f"run {run_id} has ended, or was not asked for")

    def finish(self, run_id: str, how: Exit) -> None:
        """End a run.

        Raises:
            LabError: It is not one of the runs that are out.
        """
        self.require(run_id)
        spec, started = self._out.pop(run_id)
        ended = Exit(how.code, reason=how.reason, message=how.message, started=started, ended=max(started, time.time()))
        write_atomic(_record(spec) / "exit.json", dump_json(asdict(ended)), sync=False)
        self._events.put(Ended(run_id, ended))
        held = self._held.pop(run_id, None)
        if held is not None:
            self.start(held)

    # -- the contract of an executor

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        if after is not None and after in self._out:
            self._held[after] = spec
            return
        now = time.time()
        try:
            os.close(os.open(_record(spec) / "train.log", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            self._events.put(Ended(spec.run_id, _end_of(_record(spec))))
            return
        self._out[spec.run_id] = (spec, now)
        self._events.put(Started(spec.run_id, Place(os.uname().nodename, os.getpid()), now))
        self._asked.put(spec)

    def cancel(self, run_id: str) -> None:
        for after, spec in list(self._held.items()):
            if spec.run_id == run_id:
                del self._held[after]
                self._events.put(Rejected(run_id, None))

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        with contextlib.suppress(LabError):  # its end was reported at this moment
            self.finish(run_id, Exit(None, reason=reason))

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        record = record_dir or run_dir
        if not (record / "train.log").exists():
            return False
        self._events.put(Ended(run_id, _end_of(record)))
        return True

    def is_alive(self, run_dir: Path, record_dir: Path | None = None) -> bool:
        return any(spec.run_dir == run_dir for spec, _ in self._out.values())

    def stop_detached(self, run_dirs: Sequence[Path], grace: float) -> tuple[list[str], list[str]]:
        return [], []  # a run ends with the process that trains it

    def poll(self, timeout: float) -> list[LaunchEvent]:
        found = []
        try:
            found.append(self._events.get(timeout=timeout))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return [event for event in found if event is not None]

    def wake(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        pass


def _record(spec: LaunchSpec) -> Path:
    return spec.record_dir or spec.run_dir


def _end_of(record_dir: Path) -> Exit:
    """Return how a run of an earlier process ended: lost, unless its end was reported."""
    lost = Exit(None, reason="lost", message="the process that trained it ended before it reported a result")
    return read_exit(record_dir) or lost
