"""The library that a trainer imports: metrics, config, seed, checkpoints, exact resume, and a clean stop on signals.

    from looplab import trainkit

    config = trainkit.config("configs/baseline.json")
    trainkit.log({"train/loss": 0.3, "val/accuracy": 0.9}, step=10)
    trainkit.summary({"test/accuracy": 0.91})

    state = trainkit.TrainingState(model=model, optimizer=optimizer, counters=counters)
    state.resume("checkpoints")
    with trainkit.Checkpoints("checkpoints") as checkpoints:
        with trainkit.stopping(save=lambda: state.save(checkpoints, counters["step"])) as stop:
            while counters["step"] < last and not stop:
                ...

The laboratory and the trainer communicate through files and four environment variables only: LOOPLAB_RUN_DIR,
LOOPLAB_METRICS, LOOPLAB_CONFIG and LOOPLAB_SEED. Without them the trainer runs standalone, in its working directory.

This package lives in the trainer's process, so it depends on the standard library only and imports in about a
millisecond: json and pathlib are imported by the functions that need them, and the modules for checkpoints, resuming
and stopping when one of their names is first used. Torch and numpy are never imported, unless a checkpoint that is
loaded contains their tensors.
"""

from __future__ import annotations

import os

from looplab.errors import LabError
from looplab.trainkit.log import Logger, log, summary

TYPE_CHECKING = False  # importing typing would take longer than importing this whole package
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from looplab.trainkit.atomic import atomic_write
    from looplab.trainkit.checkpoint import Checkpoint, Checkpoints, load, newest
    from looplab.trainkit.resume import TrainingState
    from looplab.trainkit.state import flatten, unflatten
    from looplab.trainkit.stop import Stopper, stopping
    from looplab.trainkit.weights import clean, load_into

__all__ = [
    "Checkpoint", "Checkpoints", "Logger", "Stopper", "TrainingState", "atomic_write", "clean", "config", "flatten",
    "load", "load_into", "log", "newest", "run_dir", "seed", "stopping", "summary", "unflatten",
]  # fmt: skip

_LAZY = {
    "Checkpoint": "checkpoint", "Checkpoints": "checkpoint", "load": "checkpoint", "newest": "checkpoint",
    "TrainingState": "resume", "flatten": "state", "unflatten": "state", "Stopper": "stop", "stopping": "stop",
    "clean": "weights", "load_into": "weights", "atomic_write": "atomic",
}  # fmt: skip
"""Names that are imported on first use, and the module that defines them."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        return value
    if name in ("Everything", "Loaded", "write_whole"):
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_dir() -> Path:
    """Return the folder of this run: $LOOPLAB_RUN_DIR, or the working directory."""
    from pathlib import Path

    return Path(os.environ.get("LOOPLAB_RUN_DIR") or ".")


def config(default_path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Load the config of this run from the JSON file $LOOPLAB_CONFIG, or from `default_path` if that is not set."""
    import json

    path = os.environ.get("LOOPLAB_CONFIG") or default_path
    if path is None:
        raise LabError("this run has no config", hint="set LOOPLAB_CONFIG to a JSON file, or call config(default_path)")
    try:
        with open(path, encoding="utf-8") as file:
            loaded = json.load(file)
    except OSError as error:
        raise LabError(f"cannot read the config: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise LabError("the config is not UTF-8 text", file=path) from error
    except json.JSONDecodeError as error:
        raise LabError(f"the config is not JSON: {error.msg}", file=path, line=error.lineno) from error
    if not isinstance(loaded, dict):
        raise LabError(f"the config must be a JSON object, not a {type(loaded).__name__}", file=path)
    return loaded


def seed(default: int = 0) -> int:
    """Return the seed of this run: $LOOPLAB_SEED, or `default` if that is not set."""
    text = os.environ.get("LOOPLAB_SEED")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise LabError(f"LOOPLAB_SEED must be a whole number, not {text!r}") from error
