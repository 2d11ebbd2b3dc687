"""What is known about each worker of a vector env, and when its steps have been slow too often."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerReport:
    """One worker, now."""

    worker: int
    """Its number."""
    envs: tuple[int, ...]
    """The environments it steps."""
    pid: int | None
    """Of its process; None if the environments live in this one."""
    steps: int
    """Steps of all its environments together that were asked of it."""
    restarts: int
    """How often its process was replaced."""
    reasons: tuple[str, ...]
    """Why, the last ones."""
    replayed: int
    """Steps that were made again after restarts."""
    slow_steps: int
    """Steps that took longer than `slow_step`."""
    last_step_ms: float
    """How long its environments took for the last step."""
    rss_bytes: int
    """Memory that its process holds; 0 if that cannot be known."""
    snapshots: str
    """"exact", "unknown" before the first reset, or why its environments cannot be snapshotted."""


def rss(pid: int | None) -> int:
    """The resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class SlowSteps:
    """Says when slow steps have become so many within a window that it is worth a look; once a window."""

    def __init__(self, threshold: int, window: float) -> None:
        self._threshold, self._window = threshold, window
        self._times: deque[float] = deque()
        self._last = float("-inf")

    def add(self, now: float) -> bool:
        """Count one at `now`; True if the stacks should be written."""
        self._times.append(now)
        while self._times[0] < now - self._window:
            self._times.popleft()
        if len(self._times) < self._threshold or now - self._last < self._window:
            return False
        self._last = now
        return True
