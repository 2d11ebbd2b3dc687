"""Former names in this package. Each works for one more release, with a DeprecationWarning that names the new one."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

NEW_NAMES = {
    "looplab.trainkit.Everything": "looplab.trainkit.TrainingState",
    "looplab.trainkit.Loaded": "looplab.trainkit.Checkpoint",
    "looplab.trainkit.write_whole": "looplab.trainkit.atomic_write",
    "looplab.trainkit.checkpoint.Loaded": "looplab.trainkit.checkpoint.Checkpoint",
    "looplab.trainkit.resume.Everything": "looplab.trainkit.resume.TrainingState",
    "looplab.trainkit.tensors.Broken": "looplab.trainkit.tensors.CorruptCheckpoint",
    "looplab.trainkit.whole.sync_folder": "looplab.trainkit.atomic.fsync_dir",
    "looplab.trainkit.whole.write_whole": "looplab.trainkit.atomic.atomic_write",
}


def renamed(module: str, name: str) -> Any:
    """Return what a former name refers to now; for a module's `__getattr__`. Warns at the line that used the name."""
    new = NEW_NAMES.get(f"{module}.{name}")
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} was renamed to {new}", DeprecationWarning, stacklevel=3)
    new_module, _, new_name = new.rpartition(".")
    return getattr(import_module(new_module), new_name)
