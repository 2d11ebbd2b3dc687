"""The executor contract: start runs in slots, report how they ended, and adopt runs that an earlier engine started.

Executors are asynchronous: `start` and `stop` return immediately, and `poll` returns the events since the last call.
All executors pass the same contract tests (`looplab.testing`). An executor guarantees:

- an attempt at a run is started at most once, no matter who asks and how often (`claim_name`);
- a started run outlives the engine, and its exit is written to `exit.json` in its record folder even without an engine;
- `stop` ends the whole process group: SIGTERM, then SIGKILL after `grace` seconds;
- `Ended` is reported once per attempt, after all processes of the run are gone;
- the run's own word (`exit.json`, its heartbeat) wins over that of a scheduler, and a run that a scheduler no longer
  lists is not over because of that;
- what a run writes to its folder is visible in `run_dir` on the engine's host before `Ended`.

An attempt goes `Queued` (only where a scheduler decides) → `Started` → `Ended`. All clocks of a run (stall, timeout,
budget) begin with `Started`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

LATE_DEVICES = "{looplab.devices}"
"""Stands for the devices in a command and in variables until the launcher on the node knows them."""
LOST = ("lost", "preempted")
"""Exit reasons that are the fault of the place, not of the run: it may be retried (`retry` in lab.yaml)."""
STOP = "stop"
"""Exit reason of a run that a person stopped, alone or with its study."""


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
    fixed: bool = True
    """Whether devices and cores are known before the start; False: the executor chooses them, and reports them with
    `Started`. It then also sets the variables that name the devices, on the machine where the run is."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a run needs, for an executor that chooses the place. None: as set in the executor's options."""

    devices: int | None = None
    """Number of GPUs or other accelerators."""
    cores: int | None = None
    memory_mb: int | None = None
    time_s: float | None = None
    """Seconds after which the scheduler may end the run; longer than its own `timeout`."""
    constraints: Mapping[str, str] = field(default_factory=dict)
    """Scheduler-specific requirements, by option: `{"constraint": "a100"}`."""


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
    """Variables of the run. They are added to the environment of the engine as it was when the executor was made; on
    another machine, to what is passed on of it (`remote.passed_on`), and to what the scheduler sets there."""
    timeout: float | None = None
    """Seconds the run may take; None: no limit."""
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    cleanup_timeout: float = 5.0
    """Seconds that leftover processes may live after the trainer exits."""
    record_dir: Path | None = None
    """Folder for `train.log`, `process.json` and `exit.json`; None: the run folder."""
    resources: Resources = Resources()
    attempt: int = 1
    """Attempt at this run, from 1. Attempt n + 1 is requested only after the end of attempt n was reported."""
    secrets: frozenset[str] = frozenset()
    """Names in `env` whose values must not be written to a file."""
    code: Path | None = None
    """Frozen copy of the lab's code that it runs from; None: the lab itself."""


def claim_name(attempt: int) -> str:
    """Return the file in the record folder whose exclusive creation is the start of an attempt."""
    return "train.log" if attempt == 1 else f"attempt-{attempt}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is."""

    host: str
    pid: int | None = None
    job: str | None = None
    """Id of the job at its scheduler; None: there is no scheduler."""
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended."""

    code: int | None
    """Exit code; None after a signal, or if unknown."""
    signal: int | None = None
    reason: str | None = None
    """Why looplab ended it (`timeout`, `stop`, …), `not started`, or `lost` if the exit was not observed."""
    message: str | None = None
    started: float | None = None
    """Unix time in seconds, like `ended`."""
    ended: float | None = None
    user_s: float | None = None
    system_s: float | None = None
    max_rss_kb: int | None = None
    lingered: bool = False
    """Whether leftover processes had to be signalled after the trainer exited."""
    attempt: int = 1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Exit:
        """Build an exit from the content of `exit.json`; unknown keys are ignored."""
        return cls(**{key: value for key, value in data.items() if key in cls.__slots__})

    @property
    def ok(self) -> bool:
        return self.code == 0 and self.reason is None

    @property
    def is_lost(self) -> bool:
        """Whether the place failed, not the run."""
        return self.reason in LOST

    def __str__(self) -> str:
        if self.reason == "not started" or self.is_lost:
            return self.message or str(self.reason)
        how = f"signal {self.signal}" if self.signal is not None else f"exit code {self.code}"
        if self.signal is None and self.code is None:
            how = "exit code unknown"
        return f"{self.reason}: {how}" if self.reason else how


@dataclass(frozen=True, slots=True)
class Queued:
    """A scheduler has accepted the run; reported again when `why` changes."""

    run_id: str
    job: str
    """Id of the job at the scheduler."""
    why: str
    """Why it waits, in the scheduler's words: `Resources`, `Priority`."""


@dataclass(frozen=True, slots=True)
class Started:
    """The run has been alive for a moment. A run that exits sooner is reported by its `Ended` alone; an adopted run is
    reported again if it was not running when its engine ended, or if the machine's clock was set since it started."""

    run_id: str
    place: Place
    at: float
    """Start as Unix time of the engine's host, in seconds."""

    @property
    def pid(self) -> int | None:
        return self.place.pid


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
    """An adopted run may be alive where its processes are not visible: the engine waits for it and never restarts it.
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


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """Slots of the executor came or went. The runs of a slot that went are reported by separate events."""

    up: tuple[Slot, ...] = ()
    down: tuple[str, ...] = ()
    """Names of slots."""


LaunchEvent = Queued | Started | Ended | Rejected | Unreachable | Delayed | SlotsChanged


@dataclass(frozen=True, slots=True)
class ExecutorTraits:
    """What an executor can do, and what its runs find."""

    name: str = "local"
    places: Literal["ours", "theirs"] = "ours"
    """Who chooses the devices and cores of a run: the engine (`ours`), or the executor (`theirs`)."""
    queues: bool = False
    """Whether a run may wait at a scheduler between `start` and `Started`."""
    prequeues: bool = True
    """Whether `start(spec, after=run)` starts faster than a start after the end of that run."""
    prequeue_depth: int = 8
    """Number of very short runs that may be prequeued for one slot."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Further attempts at a run by reason of its end (`LOST`), unless lab.yaml sets them."""


def traits_of(executor: object) -> ExecutorTraits:
    """Return the traits of an executor; an executor without any runs its trainers on this machine."""
    traits = getattr(executor, "traits", None)
    return traits if isinstance(traits, ExecutorTraits) else ExecutorTraits()


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What an executor of another package (entry point group `looplab.executors`) is made with, before its options."""

    lab: Path
    study: str


class Executor(Protocol):
    """Starts, stops and adopts runs. All methods return immediately, except `poll` and `stop_detached`.

    An executor may have an attribute `traits` (`ExecutorTraits`), and be a `PlacingExecutor` or a `BatchExecutor`.
    """

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

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        """Take over a run that an earlier engine started.

        Args:
            run_id: The id to report it under.
            run_dir: Its run folder.
            record_dir: Its record folder, as in its `LaunchSpec`; None: the run folder.
            attempt: The attempt, as in its `LaunchSpec`.

        Returns:
            False if the attempt was never requested. Otherwise True, and `poll` reports its end, at once if it is over;
            `Queued` and `Started` may come before, and `Rejected` if it turns out that it was never started.
        """
        ...

    def is_alive(self, run_dir: Path, record_dir: Path | None = None) -> bool:
        """Return whether a run may be alive, whoever started it."""
        ...

    def stop_detached(self, run_dirs: Sequence[Path], grace: float) -> tuple[list[str], list[str]]:
        """End runs that have no engine: SIGTERM, then SIGKILL after `grace` seconds. Waits for their end.

        Returns:
            Folder names of the runs that were stopped, and of those that may be alive and could not be ended.
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
class PlacingExecutor(Executor, Protocol):
    """An executor that knows how many runs it can have at a time."""

    def capacity(self, planned: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Return the slots to begin with; later changes are reported as `SlotsChanged`.

        Args:
            planned: The slots that the lab file and the call ask for.
        """
        ...


@runtime_checkable
class BatchExecutor(Executor, Protocol):
    """An executor that can start several runs in one call, which costs less than one call per run."""

    def start_all(self, starts: Sequence[tuple[LaunchSpec, str | None]]) -> None:
        """Request several starts, each as `start` does with this spec and `after`."""
        ...
