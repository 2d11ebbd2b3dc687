"""Reports on the workers of a vector env, and detection of repeated slow steps."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class WorkerReport:
    """The present state of one worker."""

    worker: int
    """Index of the worker."""
    envs: tuple[int, ...]
    """Indices of its envs."""
    pid: int | None
    """Process id; None if the envs run in this process."""
    steps: int
    """Env steps requested so far, over all its envs."""
    restarts: int
    """Times that its process was replaced."""
    reasons: tuple[str, ...]
    """Reasons of the last restarts."""
    replayed: int
    """Steps replayed after restarts."""
    slow_steps: int
    """Steps that took longer than `slow_step`."""
    last_step_ms: float
    """Duration of the last step of all its envs, in milliseconds."""
    rss_bytes: int
    """Resident memory of its process; 0 if unknown."""
    snapshots: str
    """"exact", or why its envs have no exact snapshots."""


class RestartLog:
    """Counts the restarts of all workers, and appends a line for each to `worker_restarts.log`, one line at a time.

    A killed trainer loses none: the next process that uses the folder continues the count.
    """

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: Folder of the log, created by the first restart; None: only count.
        """
        self._path = None if folder is None else folder / "worker_restarts.log"
        self.count = 0
        if self._path is not None and self._path.exists():
            self.count = self._path.read_bytes().count(b"\n")

    def add(self, worker: int, reason: str) -> None:
        """Record that a worker was lost and is replaced."""
        self.count += 1
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with open(self._path, "ab", buffering=0) as file:
            file.write(f"{now} worker {worker}: {' '.join(reason.split())}\n".encode())


def rss_bytes(pid: int | None) -> int:
    """Return the resident memory of a process (None: this one); 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class SlowStepDetector:
    """Detects `threshold` slow steps within `window` seconds, at most once per window."""

    def __init__(self, threshold: int, window: float) -> None:
        self._threshold, self._window = threshold, window
        self._times: deque[float] = deque()
        self._last_alarm = float("-inf")

    def add(self, now: float) -> bool:
        """Count a slow step at the time `now`; return True if the stack traces should be written."""
        self._times.append(now)
        while self._times[0] < now - self._window:
            self._times.popleft()
        if len(self._times) < self._threshold or now - self._last_alarm < self._window:
            return False
        self._last_alarm = now
        return True
