"""From a resolved config to the argv of a trainer: templates, rendered flags, Hydra overrides, environment variables.

No shell is ever involved: a template is a list of arguments, and a variable never splits into two of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from looplab.config.paths import show
from looplab.errors import LabError

VARIABLE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Rendering:
    """How the config reaches the trainer."""

    as_: Literal["file", "flags", "hydra", "env"] = "file"
    format: Literal["json", "yaml", "toml"] = "json"
    """`file`: the format of the file at {config}."""
    case: Literal["kebab", "snake"] = "kebab"
    """`flags`: `--learning-rate` or `--learning_rate`."""
    keys: Literal["dotted", "flat"] = "dotted"
    """`flags`: `--train.learning-rate`, or only the last part, `--learning-rate`."""
    booleans: Literal["switch", "value"] = "switch"
    """`flags`: `--anneal` / `--no-anneal`, or `--anneal True`."""
    separator: Literal["space", "equals"] = "space"
    """`flags`: `--lr 0.1` or `--lr=0.1`."""
    only: Literal["all", "changed"] | None = None
    """Which keys: all, or those that differ from the base (the default for Hydra, which has a base of its own)."""
    prefix: str = ""
    """`env`: what the names begin with."""
    skip: tuple[str, ...] = field(default=())
    """Top-level keys that are not for the trainer."""


def fill(template: str, variables: Mapping[str, str], where: str) -> str:
    """Replace `{name}`; `{{` and `}}` stand for themselves. An unknown name is an error."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0)[0]
        if name not in variables:
            known = ", ".join("{" + known + "}" for known in sorted(variables))
            raise LabError(
                f"{where}: unknown variable {{{name}}}", hint=f"known: {known}; write {{{{ for a plain brace"
            )
        return variables[name]

    return VARIABLE.sub(replace, template)


def build_argv(
    template: Sequence[str],
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    """The argv: the filled template, with the rendered config where `{flags}` stands alone, else after it."""
    argv: list[str] = []
    placed = False
    for part in template:
        if part in ("{flags}", "{overrides}"):
            argv.extend(arguments)
            placed = True
        else:
            argv.append(fill(part, variables, "launch.command"))
    if not placed:
        argv.extend(arguments)
    return [*argv, *extra]


def render(config: Mapping[str, Any], rendering: Rendering, changed: Mapping[str, bool] | None = None) -> list[str]:
    """The config as arguments. `changed` holds the dotted keys that differ from the base; True: the base lacks it."""
    if rendering.as_ == "flags":
        pairs = _pairs(config, rendering, changed)
        flags = [flag for key, value in pairs for flag in _flag(key, value, rendering)]
        names = [flag.split("=")[0] for flag in flags if flag.startswith("--")]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice and rendering.keys == "flat":
            raise LabError(
                f"launch.config: flat keys collide: {', '.join(twice)}", hint="use keys: dotted, or skip: [...]"
            )
        return flags
    if rendering.as_ == "hydra":
        new = {key for key, added in (changed or {}).items() if added}
        pairs = _pairs(config, rendering, changed)
        return [f"{'+' if key in new else ''}{key}={_hydra(value)}" for key, value in pairs]
    return []


def render_environment(config: Mapping[str, Any], rendering: Rendering) -> dict[str, str]:
    """The config as environment variables: `train.learning_rate` is `TRAIN__LEARNING_RATE`."""
    if rendering.as_ != "env":
        return {}
    pairs = _pairs(config, rendering, None)
    return {rendering.prefix + re.sub(r"\W", "__", key).upper(): _text(value) for key, value in pairs}


def _pairs(
    config: Mapping[str, Any], rendering: Rendering, changed: Mapping[str, bool] | None
) -> list[tuple[str, Any]]:
    only = rendering.only or ("changed" if rendering.as_ == "hydra" else "all")

    def wanted(key: str) -> bool:
        if key.split(".")[0] in rendering.skip:
            return False
        if only == "all" or changed is None:
            return True
        return key in changed or any(other.startswith(key + ".") for other in changed)

    return [(key, value) for key, value in _wholes(config) if wanted(key)]


def _wholes(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Dotted keys with their values, a list as one value: that is how trainers take lists on a command line."""
    found: list[tuple[str, Any]] = []

    def walk(node: Any, at: tuple[str | int, ...]) -> None:
        if isinstance(node, Mapping) and node:
            for key, value in node.items():
                walk(value, (*at, key))
        else:
            found.append((show(at), node))

    walk(config, ())
    return found


def _flag(key: str, value: Any, rendering: Rendering) -> list[str]:
    name = key.rpartition(".")[2] if rendering.keys == "flat" else key
    name = "--" + (name.replace("_", "-") if rendering.case == "kebab" else name)
    if value is None:
        return []
    if isinstance(value, bool) and rendering.booleans == "switch":
        head, dot, last = name[2:].rpartition(".")
        no = "no-" if rendering.case == "kebab" else "no_"
        return [name] if value else [f"--{head}{dot}{no}{last}"]
    text = _text(value)
    return [f"{name}={text}"] if rendering.separator == "equals" else [name, text]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list | dict):
        return json.dumps(value)
    return "null" if value is None else repr(value)


def _hydra(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_][\w./:-]*", value) and value.lower() not in ("true", "false", "null", "nan", "inf"):
            return value
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else repr(value)


def find_program(name: str, cwd: Path, env: Mapping[str, str], which: Callable[..., str | None] = shutil.which) -> str:
    """The program's path, as a shell in `cwd` would find it; an error says what to do."""
    if "/" in name:
        path = (cwd / name).resolve() if not os.path.isabs(name) else Path(name)
        if path.is_file() and os.access(path, os.X_OK):
            return str(cwd / name) if not os.path.isabs(name) else name
        why = "is not executable" if path.is_file() else "does not exist"
        raise LabError(f"trainer not found: {path} {why}", hint="see launch.command")
    found = which(name, path=env.get("PATH", os.environ.get("PATH")))
    if found is None:
        raise LabError(
            f"trainer not found: {name!r} is not on PATH", hint="see launch.command; {python} is looplab's own Python"
        )
    return found
