"""What a trainer imports: it logs its metrics, says how it ended, learns where it runs and with which config, saves
checkpoints, resumes from them exactly, and ends well when it is told to.

    from looplab import trainkit

    config = trainkit.config("configs/baseline.json")
    trainkit.log({"train/loss": 0.3, "val/accuracy": 0.9}, step=10)
    trainkit.summary({"test/accuracy": 0.91})

    everything = trainkit.Everything(model=model, optimizer=optimizer, counters=counters)
    everything.resume("checkpoints")
    with trainkit.Checkpoints("checkpoints") as checkpoints:
        with trainkit.stopping(save=lambda: everything.save(checkpoints, counters["step"])) as stop:
            while counters["step"] < last and not stop:
                ...

The laboratory and the trainer meet only in files and four variables: LOOPLAB_RUN_DIR, LOOPLAB_METRICS,
LOOPLAB_CONFIG and LOOPLAB_SEED. Without them a trainer runs just as well alone, in its working directory.
This package lives in somebody else's process: it needs nothing but the standard library, and of that the smallest
part; json and pathlib are imported by the calls that return what they make, and the modules of the checkpoints, of
resuming and of stopping when one of their names is first used. Torch and numpy are never imported before a call is
given something of theirs.
"""

from __future__ import annotations

import os

from looplab.errors import LabError
from looplab.trainkit.log import Logger, log, summary

TYPE_CHECKING = False  # the typing module alone would take longer to import than all of this package
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from looplab.trainkit.checkpoint import Checkpoints, Loaded, load, newest
    from looplab.trainkit.resume import Everything
    from looplab.trainkit.state import flatten, unflatten
    from looplab.trainkit.stop import Stopper, stopping
    from looplab.trainkit.weights import clean, load_into
    from looplab.trainkit.whole import write_whole

__all__ = [
    "Checkpoints", "Everything", "Loaded", "Logger", "Stopper", "clean", "config", "flatten", "load", "load_into",
    "log", "newest", "run_dir", "seed", "stopping", "summary", "unflatten", "write_whole",
]  # fmt: skip

_LATER = {
    "Checkpoints": "checkpoint", "Loaded": "checkpoint", "load": "checkpoint", "newest": "checkpoint",
    "Everything": "resume", "flatten": "state", "unflatten": "state", "Stopper": "stop", "stopping": "stop",
    "clean": "weights", "load_into": "weights", "write_whole": "whole",
}  # fmt: skip
"""Names that are imported when they are first used, and from where."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return found


def run_dir() -> Path:
    """The folder of this run: $LOOPLAB_RUN_DIR, else the working directory."""
    from pathlib import Path

    return Path(os.environ.get("LOOPLAB_RUN_DIR") or ".")


def config(default_path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The config of this run, from the JSON file that $LOOPLAB_CONFIG names, else from `default_path`."""
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
    """The seed of this run: $LOOPLAB_SEED, else `default`."""
    text = os.environ.get("LOOPLAB_SEED")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise LabError(f"LOOPLAB_SEED must be a whole number, not {text!r}") from error
