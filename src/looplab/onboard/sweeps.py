"""W&B sweeps: `sweep.yaml` names the script, the metric and the ranges."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.readers import read_interface
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.scripts import find_script

STARTS = re.compile(r"(?:.*/)?(?:python[0-9.]*|env)|-u")
"""Words of a sweep's command that looplab adds itself."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep file says."""

    script: Script
    interface: Interface
    metric: str | None
    goal: Literal["min", "max"] | None
    knobs: Mapping[str, Mapping[str, Any]]
    """Knobs by name, as in the lab file."""


def is_sweep(path: Path) -> bool:
    """Return whether a file is the definition of a sweep."""
    if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
        return False
    try:
        data = read_config(path)
    except LabError:
        return False
    return isinstance(data.get("parameters"), dict) and ("method" in data or "program" in data)


def read_sweep(path: Path, folder: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        LabError: It names no script, or its parameters have no ranges.
    """
    data = read_config(path)
    program = data.get("program")
    command = data.get("command")
    words = [str(program)] if program else []
    if isinstance(command, list):
        plain = [str(word) for word in command if not str(word).startswith("${")]
        words = [word for word in [*words, *plain] if not STARTS.fullmatch(word)] or words
    if not words:
        raise LabError(f"{path.name} names no program", file=path, hint="program: train.py")
    script = find_script([shlex.split(words[0])[0], *words[1:]], folder)
    knobs, fixed = _parameters(data["parameters"], path)
    found = read_interface(script, {*knobs, *fixed})
    settings = {setting.name.replace("-", "_"): setting for setting in (found.settings if found else ())}
    wanted = {**{name: _middle(spec) for name, spec in knobs.items()}, **fixed}
    if found is None or not set(wanted) & set(settings):
        # The script takes its settings from wandb.config, as the sweep would set it.
        base = tuple(ScriptSetting(name, kind_of(value), value) for name, value in wanted.items())
        found = Interface("W&B sweep", base, script.argv, {"as": "wandb"})
        renamed = dict(knobs)
    else:
        names = {key: setting.name for key, setting in settings.items()}
        values = {names[key]: value for key, value in wanted.items() if key in names}
        found = replace(
            found,
            reader=f"W&B sweep, {found.reader}",
            settings=tuple(
                replace(setting, default=values.get(setting.name, setting.default))
                if setting.default in (None, MISSING) or setting.name in {names.get(key) for key in fixed}
                else setting
                for setting in found.settings
            ),
        )
        renamed = {names[key]: spec for key, spec in knobs.items() if key in names}
    about = data.get("metric") if isinstance(data.get("metric"), dict) else {}
    goal = {"minimize": "min", "maximize": "max"}.get(str(about.get("goal", "minimize")))  # type: ignore[union-attr]
    metric = about.get("name") if about else None
    return Sweep(script, found, str(metric) if metric else None, goal if metric else None, renamed)  # type: ignore[arg-type]


def _parameters(parameters: Mapping[str, Any], path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the knobs of a sweep, and its fixed values."""
    knobs: dict[str, dict[str, Any]] = {}
    fixed: dict[str, Any] = {}
    for name, entry in parameters.items():
        if not isinstance(entry, dict):
            raise LabError(f"parameters.{name} is not a mapping", file=path)
        if "value" in entry:
            fixed[name] = entry["value"]
        elif "values" in entry:
            knobs[name] = {"choices": list(entry["values"])}
        elif "min" in entry and "max" in entry:
            knobs[name] = _range(str(entry.get("distribution", "")), entry)
        elif "parameters" in entry:
            inner, more = _parameters(entry["parameters"], path)
            knobs |= {f"{name}.{key}": spec for key, spec in inner.items()}
            fixed |= {f"{name}.{key}": value for key, value in more.items()}
        elif "mu" in entry and "sigma" in entry:
            low, high = entry["mu"] - 2 * entry["sigma"], entry["mu"] + 2 * entry["sigma"]
            log = "log" in str(entry.get("distribution", ""))
            knobs[name] = {
                "type": "float",
                "low": math.exp(low) if log else low,
                "high": math.exp(high) if log else high,
                **({"log": True} if log else {}),
            }
    return knobs, fixed


def _range(distribution: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    low, high = entry["min"], entry["max"]
    if distribution in ("log_uniform", "q_log_uniform"):  # of the exponent, as older sweeps have it
        low, high = math.exp(low), math.exp(high)
    log = "log" in distribution
    whole = (
        isinstance(low, int) and isinstance(high, int) and not log and distribution in ("", "int_uniform", "q_uniform")
    )
    spec: dict[str, Any] = {"type": "int" if whole else "float", "low": low, "high": high}
    if log:
        spec["log"] = True
    if "q" in entry:
        spec["step"] = entry["q"]
    return spec


def _middle(spec: Mapping[str, Any]) -> Any:
    """Return a value inside a knob's range, for the base config."""
    if "choices" in spec:
        return spec["choices"][len(spec["choices"]) // 2]
    low, high = spec["low"], spec["high"]
    if spec.get("log"):
        return float(f"{math.sqrt(low * high):.3g}")
    return (low + high) // 2 if spec["type"] == "int" else float(f"{(low + high) / 2:.6g}")
