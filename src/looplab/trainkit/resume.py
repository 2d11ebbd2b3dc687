"""Exact resume: all that a training's next step depends on, in one state, and put back where it was.

    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, counters=counters)
    state.resume("checkpoints")
    …
    state.save(checkpoints, step)

It holds the parts' own state dicts, every random generator, the counters, and how long metrics.jsonl was. On resuming,
the metrics are cut back to that length: the steps since then are done again, and their rows must not be there twice.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError
from looplab.trainkit.checkpoint import Checkpoint, Checkpoints, newest
from looplab.trainkit.log import Logger, current
from looplab.trainkit.weights import clean, load_into

_TAIL = 4096
"""Bytes before the cut by which the metrics are known to be the same file."""


class TrainingState:
    """What a training consists of. Restoring refuses whatever is missing, unexpected or of another shape."""

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        rng: bool = True,
        generators: Mapping[str, Any] | None = None,
        parts: Mapping[str, Any] | None = None,
        counters: dict[str, Any] | None = None,
        metrics: Logger | str | os.PathLike[str] | bool = True,
    ) -> None:
        """`parts`: anything more with `state_dict()` and `load_state_dict()`, by name. `rng`: the global generators of
        random, numpy and torch; `generators`: those of your own, of any of these. `counters` is your own dict, which
        restoring changes in place. `metrics`: the logger or file to cut; True is that of `trainkit.log`, False none.
        """
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        self._parts = {name: part for name, part in named.items() if part is not None}
        for name, part in (parts or {}).items():
            if name in named:
                raise LabError(f"a part cannot be called {name!r}", hint=f"give it as {name}=…, or by another name")
            self._parts[name] = part
        self._rng = rng
        self._generators = dict(generators or {})
        self._counters = {} if counters is None else counters
        self._metrics = metrics

    def state(self) -> dict[str, Any]:
        """All of it. Tensors are the live ones, as in a state dict: hand it to `Checkpoints.save`, which copies."""
        return {
            "parts": {name: _take(part) for name, part in self._parts.items()},
            "rng": _global_rng() if self._rng else {},
            "generators": {name: _rng_state(name, it) for name, it in self._generators.items()},
            "counters": dict(self._counters),
            "metrics": None if (logger := self._logger()) is None else _mark(logger.path),
        }

    def restore(self, state: Mapping[str, Any], allow: str | Collection[str] = (), source: object = None) -> list[str]:
        """Put it all back; gives what is not as it was.

        What does not fit is a LabError, unless `allow` names it: "missing", "unexpected", "shape", or "partial" for all
        of them, as for `load_into`. Metrics of another file (a run that goes on in a new folder) are left alone.
        """
        file = None if source is None else str(source)
        if not {"parts", "rng", "generators", "counters", "metrics"} <= set(state):
            raise LabError("this is not the state of a TrainingState", file=file, hint="read it with load() instead")
        allowed = {allow} if isinstance(allow, str) else set(allow)
        differences: list[str] = []
        rng = state["rng"] if self._rng else {}
        for what, ours, theirs in (
            ("part", self._parts, state["parts"]),
            ("generator", self._generators, state["generators"]),
            # One that is only here was not in use when this was saved, and needs nothing.
            ("global generator", set(_global_rng()) & set(rng), rng),
        ):
            kinds = (("missing", set(ours) - set(theirs), "in it"), ("unexpected", set(theirs) - set(ours), "here"))
            for kind, names, where in kinds:
                said = [f"the {what} {name} is missing {where}" for name in sorted(names)]
                differences += said
                if said and not allowed & {kind, "partial"}:
                    raise LabError(f"the state does not fit: {'; '.join(said)}", file=file, hint=f'or allow="{kind}"')
        for name, part in self._parts.items():
            if name in state["parts"]:
                differences += _give(name, part, state["parts"][name], allow, file)
        self._counters.update(state["counters"])
        differences += self._cut_metrics(state["metrics"])
        # Last, because what came before may have drawn random numbers.
        for name, it in self._generators.items():
            if name in state["generators"]:
                _set_rng(name, it, state["generators"][name])
        if self._rng:
            differences += _set_global_rng(state["rng"])
        return differences

    def save(self, checkpoints: Checkpoints, step: int, name: str = "latest") -> Path:
        """A checkpoint of everything; see `Checkpoints.save`."""
        return checkpoints.save(self.state(), step, name, self._counters)

    def resume(
        self, folder: str | os.PathLike[str], allow: str | Collection[str] = (), tell: Callable[[str], object] = print
    ) -> Checkpoint | None:
        """Go on from the newest whole checkpoint under a folder. None, and nothing changed, where there is none."""
        loaded = newest(folder, tell)
        if loaded is not None:
            for difference in self.restore(loaded.state, allow, loaded.path):
                tell(difference)
        return loaded

    def _logger(self) -> Logger | None:
        if isinstance(self._metrics, bool):
            return current() if self._metrics else None
        return self._metrics if isinstance(self._metrics, Logger) else Logger(self._metrics)

    def _cut_metrics(self, mark: Mapping[str, Any] | None) -> list[str]:
        logger = self._logger()
        if mark is None or logger is None or not os.path.exists(logger.path):
            return []
        if _mark(logger.path, mark["bytes"]) != mark:
            return [f"{logger.path} is not the file of the checkpoint: nothing was cut from it"]
        logger.cut(mark["bytes"])
        return []


def _take(part: Any) -> Any:
    state = part.state_dict()
    return clean(state) if hasattr(part, "named_parameters") else state


def _give(name: str, part: Any, state: Any, allow: str | Collection[str], file: str | None) -> list[str]:
    if hasattr(part, "named_parameters"):
        return load_into(part, state, allow, file)
    try:
        part.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"the {name} cannot take its state: {error}", file=file) from error
    return []


def _mark(path: str, size: int | None = None) -> dict[str, Any]:
    """How long a file is, and a hash of its end; or, with `size`, what that was when it was so long."""
    if not os.path.exists(path):
        return {"bytes": 0, "tail": hashlib.sha256().hexdigest()}
    with open(path, "rb") as file:
        there = os.fstat(file.fileno()).st_size
        size = there if size is None else min(size, there)
        file.seek(max(0, size - _TAIL))
        return {"bytes": size, "tail": hashlib.sha256(file.read(min(size, _TAIL))).hexdigest()}


def _global_rng() -> dict[str, Any]:
    """The generators that a process shares; of numpy and torch only where they are in use."""
    states: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_global_rng(states: Mapping[str, Any]) -> list[str]:
    random.setstate(states["python"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    if "torch" in states and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            here, there = torch.cuda.device_count(), len(states["cuda"])
            for device, state in enumerate(states["cuda"][:here]):
                torch.cuda.set_rng_state(state, device)
            if here != there:
                return [f"the state has generators of {there} CUDA devices, and here are {here}"]
    return []


def _rng_state(name: str, it: Any) -> Any:
    if isinstance(it, random.Random):
        return it.getstate()
    if hasattr(it, "bit_generator"):  # numpy's Generator
        return it.bit_generator.state
    if hasattr(it, "get_state"):  # torch's Generator, numpy's RandomState
        return it.get_state() if hasattr(it, "device") else it.get_state(legacy=False)
    raise LabError(f"{name} is a {type(it).__name__}, not a random generator of random, numpy or torch")


def _set_rng(name: str, it: Any, state: Any) -> None:
    try:
        if isinstance(it, random.Random):
            it.setstate(state)
        elif hasattr(it, "bit_generator"):
            it.bit_generator.state = state
        else:
            it.set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise LabError(f"the generator {name} cannot take its state: {error}") from error


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
