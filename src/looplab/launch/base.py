"""The contract of an executor: it starts runs in slots, says how they ended, and finds again those still alive.

An executor is asynchronous: `start` and `stop` return at once, `poll` hands over what happened since. All executors
pass the same contract tests. What an executor must promise:

- a run folder is started at most once, whoever asks and however often;
- a started run outlives the engine, and its end is written to `exit.json` in its record folder even when no engine is
  there;
- `stop` ends the whole process group: SIGTERM, then SIGKILL after `grace`;
- `Ended` comes once per run, after everything of the run is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Slot:
    """A place to run: pinned devices and pinned cores."""

    name: str
    """`gpu0`, `gpu0.1`, `cpu3`: stable for the life of the study's engine."""
    devices: tuple[str, ...] = ()
    """Device ids as the driver numbers them; empty for a slot without an accelerator."""
    cores: tuple[int, ...] = ()
    """Cores the run may use; empty: all."""
    device_share: int = 0
    """Which of the `per_gpu` places on its device this is."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """All that an executor needs to start one run."""

    run_id: str
    run_dir: Path
    argv: Sequence[str]
    path: str
    """The program, found on PATH already."""
    cwd: Path
    slot: Slot
    env: Mapping[str, str] = field(default_factory=dict)
    """What the run gets on top of the engine's own environment."""
    timeout: float | None = None
    grace: float = 10.0
    cleanup_timeout: float = 5.0
    """How long what a training leaves behind may live on after it, before it is ended."""
    record_dir: Path | None = None
    """The folder for `train.log`, `process.json` and `exit.json`; None: the run folder."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended."""

    code: int | None
    """The exit code; None after a signal, or where it could not be learnt."""
    signal: int | None = None
    reason: str | None = None
    """Why looplab ended it (`timeout`, `stop`, …), `not started`, or `lost` when nobody saw it end."""
    message: str | None = None
    started: float | None = None
    ended: float | None = None
    user_s: float | None = None
    system_s: float | None = None
    max_rss_kb: int | None = None
    lingered: bool = False

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Exit:
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
    """The run has lived for a moment. One that ends before that is reported by its `Ended` alone; an adopted one is
    reported again if the machine's clock was set since it started."""

    run_id: str
    pid: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    run_id: str
    exit: Exit


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nothing was started: try again later."""

    run_id: str
    holder: str | None
    """Who holds the device; None where nobody does (an order that was cancelled, waited too long, or got lost)."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An adopted run may be alive where its processes cannot be seen: its end is awaited, and it is never started
    again. `Ended` follows when its end is written down, or when it is dead beyond doubt. A `stop` gives it up."""

    run_id: str
    where: str
    """`host a1`, or another PID namespace."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The run is over, but its end cannot be written down, as on a full disk; `Ended` comes when it is."""

    run_id: str
    path: str
    """The file that is missing."""


LaunchEvent = Started | Ended | Rejected | Unreachable | Delayed


class Executor(Protocol):
    def start(self, order: LaunchSpec, after: str | None = None) -> None:
        """Ask for a run to be started, at once or when the run `after` is over; the answer is a `Started`, a `Rejected`
        or an `Ended` from `poll`. An order that would have to wait long is refused."""
        ...

    def cancel(self, run_id: str) -> None:
        """Take back an order that still waits; if it does, `Rejected` comes."""
        ...

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        """Ask for a run to be ended."""
        ...

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None) -> bool:
        """Take over a run that an earlier engine started; `record_dir` as in its order.

        Returns:
            False if the run was never started. Otherwise `poll` reports its end, at once if it is over already.
        """
        ...

    def poll(self, timeout: float) -> list[LaunchEvent]:
        """What happened; waits up to `timeout` seconds for something to happen."""
        ...

    def wake(self) -> None:
        """Make a `poll` that waits return at once; may be called from a signal handler or another thread."""
        ...

    def close(self) -> None:
        """Let go. Runs go on."""
        ...
