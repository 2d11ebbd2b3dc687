"""Settings of a `SupervisedVectorEnv`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gymnasium.vector import AutoresetMode


@dataclass(frozen=True, kw_only=True)
class VectorEnvSettings:
    workers: int | Literal["auto"] = "auto"
    """Worker processes; 0: none. "auto": as many as cores, or none if they would cost more time than they save."""
    context: Literal["forkserver", "fork"] = "forkserver"
    """Start method of the workers. With "fork", a worker also ends with the thread that started it."""
    info_fields: Sequence[str] = ()
    """Numeric info fields that most steps have; they are passed through shared memory."""
    reset_deadline: float = 60.0
    """Seconds without progress in a reset, or in building an env, after which a worker counts as hung."""
    step_deadline: float = 15.0
    """Seconds without progress in a step after which a worker counts as hung."""
    snapshot_every: int = 200
    """Steps between two snapshots of the envs; 0: never."""
    max_restarts: int = 5
    """Restarts of one worker within `restart_window` seconds; one more raises EnvError."""
    restart_window: float = 300.0
    """Seconds."""
    on_error: Literal["raise", "truncate"] = "raise"
    """What to do if an env fails twice in the same step: raise EnvError, or truncate its episode."""
    start_delay: float = 0.0
    """Seconds between the starts of two workers."""
    serialise_start: bool | str | os.PathLike[str] = False
    """Start workers one at a time, among all processes that lock the same file (True: one file per user)."""
    prewarm: bool = False
    """Make and close one env in this process first, for what is built once per machine."""
    slow_step: float | None = None
    """Seconds after which a step counts as slow; None: never."""
    slow_threshold: int = 5
    """Slow steps within `slow_window` after which the worker's stack traces are written."""
    slow_window: float = 120.0
    """Seconds."""
    diagnostics_dir: str | os.PathLike[str] | None = None
    """Folder for stack traces of slow and lost workers; None: they are not written."""
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP
    """When ended envs are reset."""
    copy: bool = True
    """Return copies of observations; otherwise they are valid until the step after the next."""
