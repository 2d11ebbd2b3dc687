"""What the executors of clusters share: a queue of events, the environment of runs, and stops without an engine."""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from looplab.errors import LabError
from looplab.launch.base import Ended, LaunchEvent, LaunchSpec, Rejected, claim_name
from looplab.launch.local import read_exit, read_json
from looplab.runs.folder import record_folder

STUBBORN_S = 30.0
"""Seconds beyond the grace to wait for the end of runs without an engine."""
KEPT_HERE = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOST(NAME)?|TMPDIR|TEMP|TMP|TERM|TERM_.*|COLUMNS|LINES|WINDOWID|STY|TMUX.*|DISPLAY|WAYLAND_.*"
    r"|XAUTHORITY|XDG_(RUNTIME|SESSION).*|DBUS_.*|SSH_.*|GPG_.*|SUDO_.*|MAIL|LS_COLORS|INVOCATION_ID|JOURNAL_STREAM"
    r"|(CUDA|HIP|ROCR|NVIDIA|ZE)_VISIBLE_DEVICES|ZE_AFFINITY_MASK|SLURM_(?!CONF$).*|SLURMD_.*|SRUN_.*|SQUEUE_.*|RAY_.*"
    r"|LOOPLAB_.*"
)
"""Variables of the engine's machine, terminal and login: they mean nothing on another machine, or something else."""


def passed_on(environment: Mapping[str, str], patterns: Iterable[str] | None = None) -> dict[str, str]:
    """Return the variables of the engine that its runs get on other machines.

    Args:
        environment: The environment of the engine.
        patterns: Names or patterns (`HF_*`) of variables; None: all, except those that belong to this machine.
    """
    if patterns is None:
        return {name: value for name, value in environment.items() if not KEPT_HERE.fullmatch(name)}
    wanted = list(patterns)
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in wanted)}


def record_of(spec: LaunchSpec) -> Path:
    """Return the record folder of a run, as an absolute path."""
    return Path(os.path.abspath(spec.record_dir or spec.run_dir))


class RemoteExecutor:
    """Base of executors whose runs are on other machines. Subclasses add `start`, `stop` and `adopt`.

    Args:
        patterns: See `passed_on`.
    """

    request_file = "job.json"
    """File in the record folder that says which attempt was requested last."""
    settle_s = STUBBORN_S
    """Seconds beyond the grace in which a stopped run may end."""

    def __init__(self, patterns: Iterable[str] | None = None) -> None:
        self._env = passed_on(os.environ, patterns)
        self._events: deque[LaunchEvent] = deque()
        self._lock = threading.RLock()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._failure: Exception | None = None

    def _fail(self, error: Exception) -> None:
        """Let the next `poll` report that the thread of the executor has ended: nothing would happen any more."""
        self._failure = error
        self.wake()

    def _tell(self, event: LaunchEvent) -> None:
        self._events.append(event)
        self.wake()

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if not self._events:
            select.select([self._wake_r], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        found = []
        while self._events:
            found.append(self._events.popleft())
        if self._failure is not None and not found:
            why = str(self._failure).strip().splitlines()[:1] or [type(self._failure).__name__]
            raise LabError(
                f"the executor has failed: {why[0]}", hint="trainings that run continue; `looplab resume` adopts them"
            ) from self._failure
        return found

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: `poll` will return anyway; closed: nothing waits
            os.write(self._wake_w, b"x")

    def _close_events(self) -> None:
        os.close(self._wake_r)
        os.close(self._wake_w)

    def is_alive(self, run_dir: Path, record_dir: Path | None = None) -> bool:
        record_dir = record_dir or run_dir
        attempt = self._attempt(record_dir)
        return self._was_requested(record_dir, attempt) and read_exit(record_dir, attempt) is None

    def stop_detached(self, run_dirs: Sequence[Path], grace: float) -> tuple[list[str], list[str]]:
        waiting = {}
        for run_dir in run_dirs:
            record_dir = record_folder(run_dir)
            attempt = self._attempt(record_dir)
            if self.is_alive(run_dir, record_dir) and self.adopt(str(run_dir), run_dir, record_dir, attempt):
                self.stop(str(run_dir), "stop", grace)
                waiting[str(run_dir)] = run_dir.name
        stopped, deadline = [], time.monotonic() + grace + self.settle_s
        while waiting and time.monotonic() < deadline:
            for event in self.poll(0.5):
                if isinstance(event, Ended | Rejected) and event.run_id in waiting:
                    stopped.append(waiting.pop(event.run_id))
        return stopped, list(waiting.values())

    def _attempt(self, record_dir: Path) -> int:
        return int((read_json(record_dir / self.request_file) or {}).get("attempt", 1))

    def _was_requested(self, record_dir: Path, attempt: int) -> bool:
        return os.path.lexists(record_dir / claim_name(attempt))

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        raise NotImplementedError

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        raise NotImplementedError
