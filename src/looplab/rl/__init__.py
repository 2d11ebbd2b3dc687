"""Reinforcement learning that survives: vector envs whose workers may die, replay, learners, exact resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looplab.rl.diagnostics import WorkerReport
    from looplab.rl.snapshot import SnapshotError, Snapshotting
    from looplab.rl.vector import EnvError, SupervisedVectorEnv

__all__ = [
    "EnvError",
    "SnapshotError",
    "Snapshotting",
    "SupervisedVectorEnv",
    "WorkerReport",
]

_LATER = {
    "EnvError": "vector", "SupervisedVectorEnv": "vector", "WorkerReport": "diagnostics", "SnapshotError": "snapshot",
    "Snapshotting": "snapshot",
}  # fmt: skip
"""Names that are imported when they are first used: a trainer that wants the returns alone needs no gymnasium."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return found
