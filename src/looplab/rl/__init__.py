"""Reinforcement learning that survives failures: supervised vector envs, replay, learners, exact resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looplab.rl.diagnostics import WorkerReport
    from looplab.rl.snapshot import SnapshotError, Snapshotting
    from looplab.rl.vector import EnvError, SupervisedVectorEnv
    from looplab.rl.vector_settings import VectorEnvSettings

__all__ = [
    "EnvError",
    "SnapshotError",
    "Snapshotting",
    "SupervisedVectorEnv",
    "VectorEnvSettings",
    "WorkerReport",
]

_MODULE_OF = {
    "EnvError": "vector", "SupervisedVectorEnv": "vector", "VectorEnvSettings": "vector_settings",
    "WorkerReport": "diagnostics", "SnapshotError": "snapshot", "Snapshotting": "snapshot",
}  # fmt: skip
"""Modules of the public names, imported on first use: a trainer that needs only the returns does not need Gymnasium."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value
