"""Exact resume: save and restore everything that the next training step depends on.

    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, counters=counters)
    state.resume("checkpoints")
    …
    state.save(checkpoints, step)

The state contains the state dicts of all parts, every random number generator, the counters, the settings, and the
length of metrics.jsonl. Resuming truncates the metrics to that length, because the steps since then will run again and
must not be logged twice.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError
from looplab.trainkit.checkpoint import Checkpoint, Checkpoints, intact
from looplab.trainkit.log import Logger, default_logger
from looplab.trainkit.weights import clean, load_into

_TAIL = 4096
"""Bytes before the saved length that are hashed to recognize the metrics file."""


class TrainingState:
    """The complete state of a training run. Restoring is strict: missing, unexpected or reshaped parts are errors."""

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
        settings: Mapping[str, Any] | None = None,
        metrics: Logger | str | os.PathLike[str] | bool = True,
    ) -> None:
        """
        Args:
            model, optimizer, scheduler, scaler: Anything with `state_dict()` and `load_state_dict()`.
            parts: More such objects, by name.
            rng: Include the global generators of random, numpy and torch.
            generators: Your own generators (random.Random, numpy's or torch's), by name.
            counters: A dict of plain values. Restoring updates it in place.
            settings: Nested dicts of plain values that a resumed run must share with the run that saved the state.
                None: not compared.
            metrics: The logger or file to truncate. True: the one of `trainkit.log`; False: none.
        """
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        self._parts = {name: part for name, part in named.items() if part is not None}
        for name, part in (parts or {}).items():
            if name in named:
                raise LabError(f"a part cannot be named {name!r}", hint=f"pass it as {name}=…, or rename it")
            self._parts[name] = part
        self._rng = rng
        self._generators = dict(generators or {})
        self._counters = {} if counters is None else counters
        self._settings = settings
        self._metrics = metrics

    def state(self) -> dict[str, Any]:
        """Return the state. Tensors are not copied, as in a state dict; `Checkpoints.save` copies them."""
        return {
            "parts": {name: _part_state(part) for name, part in self._parts.items()},
            "rng": _global_rng() if self._rng else {},
            "generators": {name: _rng_state(name, rng) for name, rng in self._generators.items()},
            "counters": dict(self._counters),
            "settings": None if self._settings is None else dict(flatten_settings(self._settings)),
            "metrics": None if (logger := self._logger()) is None else _file_mark(logger.path),
        }

    def restore(self, state: Mapping[str, Any], allow: str | Collection[str] = (), source: object = None) -> list[str]:
        """Restore a state.

        A metrics file that is not the one of the checkpoint (a run that continues in a new folder) is left alone.

        Args:
            state: What `state()` returned.
            allow: Differences to accept: "missing", "unexpected", "shape", or "partial" for all three, see `load_into`;
                and "settings".
            source: File to name in error messages.

        Returns:
            One line for each accepted difference.

        Raises:
            LabError: There are differences that `allow` does not accept.
        """
        file = None if source is None else str(source)
        if not {"parts", "rng", "generators", "counters", "metrics"} <= set(state):
            raise LabError("this is not the state of a TrainingState", file=file, hint="use load() instead")
        allowed = {allow} if isinstance(allow, str) else set(allow)
        differences = self._changed_settings(state.get("settings"), "settings" in allowed, file)
        allow = allowed - {"settings"}
        rng = state["rng"] if self._rng else {}
        for what, ours, theirs in (
            ("part", self._parts, state["parts"]),
            ("generator", self._generators, state["generators"]),
            # A global generator that is missing in the state was not in use when it was saved: not a difference.
            ("global generator", set(_global_rng()) & set(rng), rng),
        ):
            for kind, names, side in (
                ("missing", set(ours) - set(theirs), "saved"),
                ("unexpected", set(theirs) - set(ours), "current"),
            ):
                found = [f"the {what} {name} is missing in the {side} state" for name in sorted(names)]
                differences += found
                if found and not allowed & {kind, "partial"}:
                    raise LabError(
                        f"the state does not fit: {'; '.join(found)}",
                        file=file,
                        hint=f'accept this with allow="{kind}"',
                    )
        for name, part in self._parts.items():
            if name in state["parts"]:
                differences += _load_part(name, part, state["parts"][name], allow, file)
        self._counters.update(state["counters"])
        differences += self._truncate_metrics(state["metrics"])
        # Last, because the steps above may have drawn random numbers.
        for name, generator in self._generators.items():
            if name in state["generators"]:
                _set_rng(name, generator, state["generators"][name])
        if self._rng:
            differences += _set_global_rng(state["rng"])
        return differences

    def save(self, checkpoints: Checkpoints, step: int, name: str = "latest") -> Path:
        """Save a checkpoint; see `Checkpoints.save`."""
        return checkpoints.save(self.state(), step, name, self._counters)

    def resume(
        self,
        folder: str | os.PathLike[str],
        allow: str | Collection[str] = (),
        tell: Callable[[str], object] = print,
        *,
        skip_unfit: bool = False,
    ) -> Checkpoint | None:
        """Restore the newest intact checkpoint under a folder.

        Args:
            folder: Where to look; see `newest`.
            allow: Differences to accept; see `restore`.
            tell: Called with one line of text for every skipped checkpoint and every accepted difference.
            skip_unfit: Skip checkpoints that do not fit, as in a folder that holds several runs.

        Returns:
            The checkpoint, or None if there is none; nothing is changed then.

        Raises:
            LabError: The newest checkpoint does not fit; with `skip_unfit`, none does.
        """
        misfit: LabError | None = None
        for loaded in intact(folder, tell):
            try:
                differences = self.restore(loaded.state, allow, loaded.path)
            except LabError as error:
                if not skip_unfit:
                    raise
                misfit = misfit or error
                tell(f"skipped, because it does not fit: {error}")
                continue
            for difference in differences:
                tell(difference)
            return loaded
        if misfit is not None:
            raise misfit
        return None

    def _changed_settings(self, saved: Mapping[str, Any] | None, accept: bool, file: str | None) -> list[str]:
        """Return a line for each setting that differs from the saved ones; LabError unless they are accepted."""
        if self._settings is None or saved is None:
            return []
        present, missing = dict(flatten_settings(self._settings)), object()
        changes = [
            f"{name}: {_shown(saved, name)} → {_shown(present, name)}"
            for name in sorted({*saved, *present})
            if saved.get(name, missing) != present.get(name, missing)
        ]
        if changes and not accept:
            raise LabError(
                f"this checkpoint was saved with other settings: {'; '.join(changes)}",
                file=file,
                hint='use the same settings or another folder, or accept this with allow="settings" (--allow-changes)',
            )
        return [f"setting changed since the checkpoint: {change}" for change in changes]

    def _logger(self) -> Logger | None:
        if isinstance(self._metrics, bool):
            return default_logger() if self._metrics else None
        return self._metrics if isinstance(self._metrics, Logger) else Logger(self._metrics)

    def _truncate_metrics(self, mark: Mapping[str, Any] | None) -> list[str]:
        logger = self._logger()
        if mark is None or logger is None or not os.path.exists(logger.path):
            return []
        if _file_mark(logger.path, mark["bytes"]) != mark:
            return [f"{logger.path} is not the metrics file of the checkpoint: not truncated"]
        logger.truncate(mark["bytes"])
        return []


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting, lists as they are in JSON."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


def _part_state(part: Any) -> Any:
    state = part.state_dict()
    return clean(state) if hasattr(part, "named_parameters") else state


def _load_part(name: str, part: Any, state: Any, allow: str | Collection[str], file: str | None) -> list[str]:
    if hasattr(part, "named_parameters"):
        return load_into(part, state, allow, file)
    try:
        part.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"cannot restore the {name}: {error}", file=file) from error
    return []


def _file_mark(path: str, size: int | None = None) -> dict[str, Any]:
    """Return the length of a file and a hash of its last bytes, as if it ended after `size` bytes if that is given."""
    if not os.path.exists(path):
        return {"bytes": 0, "tail": hashlib.sha256().hexdigest()}
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        size = length if size is None else min(size, length)
        file.seek(max(0, size - _TAIL))
        return {"bytes": size, "tail": hashlib.sha256(file.read(min(size, _TAIL))).hexdigest()}


def _global_rng() -> dict[str, Any]:
    """Return the states of the global generators; those of numpy and torch only if they are imported."""
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
            current, saved = torch.cuda.device_count(), len(states["cuda"])
            for device, state in enumerate(states["cuda"][:current]):
                torch.cuda.set_rng_state(state, device)
            if current != saved:
                return [f"the state has generators of {saved} CUDA devices, but this machine has {current}"]
    return []


def _rng_state(name: str, rng: Any) -> Any:
    if isinstance(rng, random.Random):
        return rng.getstate()
    if hasattr(rng, "bit_generator"):  # numpy's Generator
        return rng.bit_generator.state
    if hasattr(rng, "get_state"):  # torch's Generator, numpy's RandomState
        return rng.get_state() if hasattr(rng, "device") else rng.get_state(legacy=False)
    raise LabError(f"{name} is a {type(rng).__name__}, not a random generator of random, numpy or torch")


def _set_rng(name: str, rng: Any, state: Any) -> None:
    try:
        if isinstance(rng, random.Random):
            rng.setstate(state)
        elif hasattr(rng, "bit_generator"):
            rng.bit_generator.state = state
        else:
            rng.set_state(state)
    except (ValueError, TypeError, RuntimeError) as error:
        raise LabError(f"cannot restore the generator {name}: {error}") from error


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
