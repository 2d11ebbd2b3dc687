"""Reinforcement learning that survives: vector envs whose workers may die, and snapshots of environments."""

from __future__ import annotations

from looplab.rl.diagnostics import WorkerReport
from looplab.rl.snapshot import SnapshotError, Snapshotting, restore, snapshot
from looplab.rl.vector import EnvError, SupervisedVectorEnv

__all__ = [
    "EnvError",
    "SnapshotError",
    "Snapshotting",
    "SupervisedVectorEnv",
    "WorkerReport",
    "restore",
    "snapshot",
]
