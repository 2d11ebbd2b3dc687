"""The executor contract: start runs in slots, report how they ended, and adopt runs that an earlier engine started.

Executors are asynchronous: `start` and `stop` return immediately, and `poll` returns the events since the last call.
All executors pass the same contract tests. An executor guarantees:

- a run folder is started at most once, no matter who asks and how often;
- a started run outlives the engine, and its exit is written to `exit.json` in its record folder even without an engine;
- `stop` ends the whole process group: SIGTERM, then SIGKILL after `grace` seconds;
- `Ended` is reported once per run, after all processes of the run are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Slot:
    """A place to run: pinned devices and pinned cores."""

    name: str
    """`gpu0`, `gpu0.1`, `cpu3`: stable for the lifetime of the study's engine."""
    devices: tuple[str, ...] = ()
    """Device ids as the driver numbers them; empty for a slot without an accelerator."""
    cores: tuple[int, ...] = ()
    """Cores the run may use; empty: all."""
    device_share: int = 0
    """Index among the `per_gpu` slots on the device, from 0."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything an executor needs to start one run."""

    run_id: str
    run_dir: Path
    argv: Sequence[str]
    path: str
    """Path of the program, already resolved on PATH."""
    cwd: Path
    slot: Slot
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the engine's own environment."""
    timeout: float | None = None
    """Seconds the run may take; None: no limit."""
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    cleanup_timeout: float = 5.0
    """Seconds that leftover processes may live after the trainer exits."""
    record_dir: Path | None = None
    """Folder for `train.log`, `process.json` and `exit.json`; None: the run folder."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended."""

    code: int | None
    """Exit code; None after a signal, or if unknown."""
    signal: int | None = None
    reason: str | None = None
    """Why looplab ended it (`timeout`, `stop`, …), `not started`, or `lost` if nobody observed the exit."""
    message: str | None = None
    started: float | None = None
    """Unix time in seconds, like `ended`."""
    ended: float | None = None
    user_s: float | None = None
    system_s: float | None = None
    max_rss_kb: int | None = None
    lingered: bool = False
    """Whether leftover processes had to be signalled after the trainer exited."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Exit:
        """Build an exit from the content of `exit.json`; unknown keys are ignored."""
        return cls(**{key: value for key, value in data.items() if key in cls.__slots__})

    @property
    def ok(self) -> bool:
        return self.code == 0 and self.reason is None

    def __str__(self) -> str:
        if self.reason in ("not started", "lost"):
            return self.message or self.reason
        how = f"signal {self.signal}" if self.signal is not None else f"exit code {self.code}"
        if self.signal is None and self.code is None:
            how = "exit code unknown"
        return f"{self.reason}: {how}" if self.reason else how


@dataclass(frozen=True, slots=True)
class Started:
    """The run has been alive for a moment. A run that exits sooner is reported by its `Ended` alone; an adopted run is
    reported again if the machine's clock was set since it started."""

    run_id: str
    pid: int | None
    at: float
    """Start as Unix time, in seconds."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over: all its processes are gone."""

    run_id: str
    exit: Exit


@dataclass(frozen=True, slots=True)
class Rejected:
    """The run was not started; it may be started again later."""

    run_id: str
    holder: str | None
    """Holder of the device; None if the device was not the reason (the start was cancelled, lost, or pending too
    long)."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An adopted run may be alive where its processes are not visible: it is waited for and never started again.
    `Ended` follows once its exit is recorded or it is provably dead. `stop` abandons it."""

    run_id: str
    where: str
    """`host a1`, or another PID namespace."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The run is over, but its exit cannot be recorded yet (a full disk, for example); `Ended` follows."""

    run_id: str
    path: str
    """The file that is missing."""


LaunchEvent = Started | Ended | Rejected | Unreachable | Delayed


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What an executor of another package (entry point group `looplab.executors`) is made with, before its options."""

    lab: Path
    study: str


class Executor(Protocol):
    """Starts, stops and adopts runs. All methods return immediately, except `poll`."""

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        """Request the start of a run. `poll` answers with `Started`, `Rejected` or `Ended`.

        Args:
            spec: The run. If its folder was started before, nothing is started and the earlier start is reported.
            after: Id of a run that must end first; None: start at once. A start that is pending too long is rejected.
        """
        ...

    def cancel(self, run_id: str) -> None:
        """Cancel a start that is still pending; `Rejected` follows if it was. Otherwise this has no effect."""
        ...

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        """Request the end of a run: SIGTERM to its process group, then SIGKILL. `Ended` follows.

        Args:
            run_id: The run; an unknown id is ignored.
            reason: Recorded as `Exit.reason`.
            grace: Seconds between SIGTERM and SIGKILL.
        """
        ...

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None) -> bool:
        """Take over a run that an earlier engine started.

        Args:
            run_id: The id to report it under.
            run_dir: Its run folder.
            record_dir: Its record folder, as in its `LaunchSpec`; None: the run folder.

        Returns:
            False if the run was never started. Otherwise True, and `poll` reports its end, at once if it is over.
        """
        ...

    def poll(self, timeout: float) -> list[LaunchEvent]:
        """Return the events since the last call; wait up to `timeout` seconds for the first one.

        Returns:
            Events in the order they were observed; may be empty.
        """
        ...

    def wake(self) -> None:
        """Make a waiting `poll` return immediately. Safe to call from signal handlers and other threads."""
        ...

    def close(self) -> None:
        """Release all resources. Runs continue."""
        ...


@runtime_checkable
class BatchExecutor(Executor, Protocol):
    """An executor to which several starts can be handed over at once, which costs less than one after another."""

    def start_all(self, starts: Sequence[tuple[LaunchSpec, str | None]]) -> None:
        """Request several starts, each as `start` does with this spec and `after`."""
        ...
