"""From a resolved config to the argv of a trainer: templates, rendered flags, Hydra overrides, environment variables.

No shell is ever involved: a template is a list of arguments, and a variable never splits into two of them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.lab import ConfigRendering as Rendering
from looplab.config.paths import Concrete, find, get, show
from looplab.errors import LabError

PLAIN_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""What argparse takes for a number; any other value with a dash in front it takes for an option."""
HYDRA_KEY = re.compile(r"[A-Za-z_][\w$-]*(\.[\w$-]+)*", re.ASCII)
HYDRA_WORD = re.compile(r"(?!(?:true|false|null|nan|inf)\Z)[a-z_][\w./:-]*", re.ASCII | re.IGNORECASE)
"""A text that needs no quotes in Hydra's override grammar."""
VARIABLES = ("run_dir", "out_dir", "config", "run_id", "study", "lab", "slot", "devices", "python", "seed")
"""What a template may name."""
PLACES = ("{flags}", "{overrides}")
"""Where the rendered config goes in a command."""
VARIABLE = re.compile(r"\{\{|\}\}|\{(?:([A-Za-z_][A-Za-z0-9_]*)|config\.([^{}\s]+))\}")
"""`{name}`, and `{config.KEY}` for a value of the config."""


def fill(template: str, variables: Mapping[str, str], where: str, config: Mapping[str, Any] | None = None) -> str:
    """Replace `{name}` and, with a config, `{config.KEY}`; `{{` and `}}` are plain braces.

    Raises:
        LabError: An unknown name, or a key that the config does not have.
    """

    def replace(match: re.Match[str]) -> str:
        name, key = match.groups()
        if key is not None:
            return match.group(0) if config is None else _text(_value_of(config, key, where))
        if name is None:
            return match.group(0)[0]
        if name not in variables:
            known = ", ".join("{" + known + "}" for known in sorted(variables))
            raise LabError(
                f"{where}: unknown variable {{{name}}}", hint=f"known: {known}; write {{{{ for a plain brace"
            )
        return variables[name]

    return VARIABLE.sub(replace, template)


def _value_of(config: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a dotted key, for `{config.KEY}`."""
    places = find(config, key)
    if len(places) == 1 and not isinstance(value := get(config, places[0]), Mapping):
        return value
    known = [show(at) for at, _ in _wholes(config)]
    near = difflib.get_close_matches(key, known, 3) or known
    shown = ", ".join(near[:8]) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
    what = "is not one value" if places else "is not in the config"
    raise LabError(f"{where}: {{config.{key}}}: {key} {what}", hint=f"keys: {shown}")


def check_templates(
    command: Sequence[str], env: Mapping[str, str], configs: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Raise a LabError if a template names what is not there.

    Args:
        configs: The base configs by their names, for `{config.KEY}`.
    """
    known = dict.fromkeys(VARIABLES, "")
    checked: dict[str, Mapping[str, Any] | None] = {"": None} if not configs else dict(configs)
    for base, config in checked.items():
        at = f" ({base})" if base else ""
        for part in command:
            if part not in PLACES:
                fill(part, known, f"launch.command{at}", config)
        for name, value in env.items():
            fill(value, known, f"launch.env.{name}{at}", config)


def build_argv(
    template: Sequence[str],
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
    extra: Sequence[str] = (),
    files_in: Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """The argv: the filled template, with the rendered config in place of the word `{flags}`, or at the end.

    With `files_in`, for a trainer that starts in another folder, the template and `extra` may name files of that
    folder, which become absolute paths.
    """
    argv: list[str] = []
    placed = False
    for part in template:
        if part in PLACES:
            argv.extend(arguments)
            placed = True
        else:
            argv.append(_absolute(fill(part, variables, "launch.command", config), files_in, program=not argv))
    if not placed:
        argv.extend(arguments)
    return [*argv, *(_absolute(word, files_in) for word in extra)]


def _absolute(word: str, folder: Path | None, *, program: bool = False) -> str:
    """The word, as an absolute path if it is a file of the folder, alone or as `--option=file`. A program without a
    slash is looked for on PATH, and folders stay: they may be modules (`-m package`) or places to write to."""
    if folder is None or (program and "/" not in word):
        return word
    option, sign, name = word.rpartition("=")
    try:
        return f"{option}{sign}{folder / name}" if name and (folder / name).is_file() else word
    except (OSError, ValueError):  # not a path: too long, or with a NUL
        return word


def render(config: Mapping[str, Any], rendering: Rendering, changed: Mapping[str, bool] | None = None) -> list[str]:
    """The config as arguments. `changed` holds the dotted keys that differ from the base; True: the base lacks it."""
    if rendering.as_ == "flags":
        found = [(at, value) for at, value in _pairs(config, rendering, changed) if value is not None]
        pairs = [(_name(at, rendering), value) for at, value in found]
        hint = "use keys: dotted, or skip: [...]" if rendering.keys == "flat" else "use case: snake, or skip: [...]"
        _refuse_collisions([name for name, _ in pairs], "two keys become the same flag", hint)
        return [flag for at, value in found for flag in _flag(at, value, rendering)]
    if rendering.as_ == "hydra":
        new = {key for key, added in (changed or {}).items() if added}
        pairs = [(show(at), value) for at, value in _pairs(config, rendering, changed)]
        return [f"{'+' if key in new else ''}{_hydra_key(key)}={_hydra(value)}" for key, value in pairs]
    return []


def render_environment(config: Mapping[str, Any], rendering: Rendering) -> dict[str, str]:
    """The config as environment variables: `train.learning_rate` is `TRAIN__LEARNING_RATE`."""
    if rendering.as_ != "env":
        return {}
    pairs = [
        (rendering.prefix + "__".join(re.sub(r"\W", "_", str(part)) for part in at).upper(), value)
        for at, value in _pairs(config, rendering, None)
    ]
    _refuse_collisions([name for name, _ in pairs], "two keys become the same variable", "use skip: [...]")
    return {name: _text(value) for name, value in pairs}


def _refuse_collisions(names: Sequence[str], what: str, hint: str) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise LabError(f"launch.config: {what}: {', '.join(sorted(twice))}", hint=hint)


def _pairs(
    config: Mapping[str, Any], rendering: Rendering, changed: Mapping[str, bool] | None
) -> list[tuple[Concrete, Any]]:
    only = rendering.only or ("changed" if rendering.as_ == "hydra" else "all")

    def wanted(at: Concrete) -> bool:
        if rendering.leaves_out(at):
            return False
        if only == "all" or changed is None:
            return True
        key = show(at)
        return key in changed or any(other.startswith(key + ".") for other in changed)

    return [(at, value) for at, value in _wholes(config) if wanted(at)]


def _wholes(config: Mapping[str, Any]) -> list[tuple[Concrete, Any]]:
    """All values with their places, a list as one value: that is how trainers take lists on a command line."""
    found: list[tuple[Concrete, Any]] = []

    def walk(node: Mapping[str, Any], trail: Concrete) -> None:
        for key, value in node.items():
            if isinstance(value, Mapping) and value:
                walk(value, (*trail, key))
            else:
                found.append(((*trail, key), value))

    walk(config, ())
    return found


def _name(at: Concrete, rendering: Rendering) -> str:
    name = str(at[-1]) if rendering.keys == "flat" else ".".join(map(str, at))
    return "--" + (name.replace("_", "-") if rendering.case == "kebab" else name)


def _flag(at: Concrete, value: Any, rendering: Rendering) -> list[str]:
    name = _name(at, rendering)
    if isinstance(value, bool):
        style = "present" if ".".join(map(str, at)) in rendering.store_true else rendering.booleans
        if style == "present":
            return [name] if value else []
        if style == "switch":
            head, dot, last = name[2:].rpartition(".")
            no = "no-" if rendering.case == "kebab" else "no_"
            return [name] if value else [f"--{head}{dot}{no}{last}"]
        if style == "empty" and not value:
            return [f"{name}="] if rendering.separator == "equals" else [name, ""]
    if isinstance(value, list) and rendering.lists == "spread":
        texts = [_text(item) for item in value]
        odd = next((text for text in texts if text.startswith("-") and not PLAIN_NEGATIVE.fullmatch(text)), None)
        if odd is not None:
            raise LabError(
                f"launch.config: {name}: {odd!r} in a list would be taken for an option", hint="use lists: json"
            )
        return [name, *texts]
    text = _text(value)
    if rendering.separator == "equals" or (text.startswith("-") and not PLAIN_NEGATIVE.fullmatch(text)):
        return [f"{name}={text}"]
    return [name, text]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list | dict):
        return json.dumps(value)
    return "null" if value is None else repr(value)


def _hydra_key(key: str, also: re.Pattern[str] = HYDRA_KEY) -> str:
    if not HYDRA_KEY.fullmatch(key) or not also.fullmatch(key):
        raise LabError(
            f"launch.config: Hydra's command line has no way to write the key {key!r}",
            hint="rename it, or hand the config over as a file",
        )
    return key


def _hydra(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if isinstance(value, str):
        if HYDRA_WORD.fullmatch(value):
            return value
        # Between quotes a backslash stands for itself, but not those in front of a quote.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value) + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_hydra_key(str(key), HYDRA_WORD)}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else repr(value)


def find_program(name: str, cwd: Path, env: Mapping[str, str], which: Callable[..., str | None] = shutil.which) -> str:
    """The program's path, as a shell in `cwd` would find it; an error says what to do."""
    if "/" in name:
        program = cwd / name  # an absolute name stays as it is
        if program.is_file() and os.access(program, os.X_OK):
            return str(program)
        why = "is not executable" if program.is_file() else "is a folder" if program.is_dir() else "does not exist"
        raise LabError(f"trainer not found: {program} {why}", hint="see launch.command")
    path = env.get("PATH", os.environ.get("PATH", os.defpath))
    found = which(name, path=os.pathsep.join(os.path.join(cwd, folder) for folder in path.split(os.pathsep)))
    if found is None:
        raise LabError(
            f"trainer not found: {name!r} is not on PATH", hint="see launch.command; {python} is looplab's own Python"
        )
    return found
