"""Defining a study in Python: knob types, and `create_study`, which writes the lab file that the command line reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab.api.functions import find_target
from looplab.config.files import write_atomic
from looplab.config.lab import LAB_FILE, check_definition
from looplab.errors import LabError
from looplab.untrusted import read_bounded

if TYPE_CHECKING:
    from looplab.api.study import Study

MARK = "# Written by looplab.create_study; sha256 of what follows:"
MAX_LAB_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Float:
    """A knob with real values from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    """Whether a search draws on a log scale."""
    step: float | None = None


@dataclass(frozen=True, slots=True)
class Int:
    """A knob with whole values from `low` to `high`, both included."""

    low: int
    high: int
    log: bool = False
    step: int | None = None


class Choice:
    """A knob with these values only."""

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        if not values:
            raise LabError("a Choice needs at least one value")
        self.values = values

    def __repr__(self) -> str:
        return f"Choice({', '.join(map(repr, self.values))})"


KnobSpec = Float | Int | Choice | Mapping[str, Any]
Trainer = Callable[..., Any] | Sequence[str]


def create_study(
    folder: Path | str,
    name: str = "study",
    *,
    trainer: Trainer,
    base: Mapping[str, Any],
    knobs: Mapping[str, KnobSpec],
    metric: str,
    goal: Literal["min", "max"],
    overwrite: bool = False,
    **sections: Any,
) -> Study:
    """Define a study and write its lab file; the command line then knows it too.

    The same call again changes nothing; a call with another definition replaces the lab file that an earlier call
    wrote. Runs that were recorded stay, and the change is recorded when the study is next run.

    Args:
        folder: The lab; it is created if it does not exist.
        trainer: A function of the config (a dict), or a command such as `["{python}", "train.py", "{config}"]`.
            A function is run in its own process for each run. One of an installed package, or of a module in `folder`,
            is called by its name; one of a notebook or script is written to `trainers/` in the lab, as source. It may
            log with `looplab.trainkit`, and may return a dict of metrics, or the value of `metric`.
        base: The base config, written to `<name>.json`.
        knobs: What may be changed, by dotted path: `Float`, `Int`, `Choice`, or a mapping as in the lab file.
        metric: The metric that counts, and its `goal`.
        overwrite: Replace a lab file that was written or changed by hand.
        sections: Further keys of the lab file: `judge`, `slots`, `budget`, `proposers`, `watch`, … By default an
            optimiser searches the knobs.

    Raises:
        LabError: Something in the definition is wrong, or the lab file was written by hand.
    """
    from looplab.api.study import open_lab

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    command = find_target(trainer, root, metric) if callable(trainer) else list(trainer)
    definition = {
        "study": name,
        "launch": {"command": command, **sections.pop("launch", {})},
        "base": f"{name}.json",
        "objective": {"metric": metric, "goal": goal, **sections.pop("objective", {})},
        "knobs": {path: _knob(spec) for path, spec in knobs.items()},
        "proposers": [{"search": "auto"}],
        **{key: value for key, value in sections.items() if value is not None},
    }
    text = _to_json(definition, LAB_FILE)
    config = _to_json(base, f"{name}.json").encode()
    check_definition(json.loads(text), root)  # before anything is written
    _write_lab_file(root / LAB_FILE, text, overwrite=overwrite)
    path = root / f"{name}.json"
    if not path.exists() or path.read_bytes() != config:
        write_atomic(path, config)
    return open_lab(root).study(name)


def _knob(spec: KnobSpec) -> dict[str, Any]:
    if isinstance(spec, Choice):
        return {"choices": list(spec.values)}
    if isinstance(spec, Float | Int):
        kind = "float" if isinstance(spec, Float) else "int"
        found: dict[str, Any] = {"type": kind, "low": spec.low, "high": spec.high}
        if spec.log:
            found["log"] = True
        if spec.step is not None:
            found["step"] = spec.step
        return found
    return dict(spec)


def _to_json(data: Mapping[str, Any], file: str) -> str:
    try:
        return json.dumps(dict(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise LabError(f"the definition of the study cannot be written to {file}: {error}") from None


def _write_lab_file(path: Path, body: str, *, overwrite: bool) -> None:
    """Write the lab file: JSON, which is YAML too, below a line with its hash."""
    text = f"{MARK} {hashlib.sha256(body.encode()).hexdigest()}\n{body}"
    if path.exists():
        present = read_bounded(path, MAX_LAB_FILE).decode(errors="replace")
        if present == text:
            return
        head, _, rest = present.partition("\n")
        is_ours = head == f"{MARK} {hashlib.sha256(rest.encode()).hexdigest()}"
        if not is_ours and not overwrite:
            raise LabError(
                "was written or changed by hand, and the study is defined otherwise there",
                file=path,
                hint="open the study with looplab.open(folder).study(name), or pass overwrite=True",
            )
    write_atomic(path, text.encode())
