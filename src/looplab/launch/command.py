"""From a resolved config to the argv of a trainer: templates, flags, Hydra overrides and environment variables.

No shell is involved: a template is a list of arguments, and a variable never splits into several arguments.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from looplab.config.lab import ConfigRendering as Rendering
from looplab.config.paths import Concrete, find, get, show
from looplab.errors import LabError

PLAIN_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""What argparse accepts as a negative number; it takes any other value with a leading dash for an option."""
HYDRA_KEY = re.compile(r"[A-Za-z_][\w$-]*(\.[\w$-]+)*", re.ASCII)
HYDRA_WORD = re.compile(r"(?!(?:true|false|null|nan|inf)\Z)[a-z_][\w./:-]*", re.ASCII | re.IGNORECASE)
"""A string that needs no quotes in Hydra's override grammar."""
VARIABLES = ("run_dir", "out_dir", "config", "run_id", "study", "lab", "slot", "devices", "python", "seed")
"""Variables that a template may use."""
CONFIG_PLACEHOLDERS = ("{flags}", "{overrides}")
"""Placeholders for the rendered config in a command."""
VARIABLE = re.compile(r"\{\{|\}\}|\{(config\.[^{}\s]+|[A-Za-z_][\w.-]*)\}")
"""`{name}`, or `{config.KEY}` for a value of the config; `{{` and `}}` are literal braces."""


def replace_variables(template: str, value_of: Callable[[str], str | None]) -> str:
    """Replace each `{name}` with its value; None leaves it unchanged."""

    def replace(match: re.Match[str]) -> str:
        value = match[0][0] if match[1] is None else value_of(match[1])
        return match[0] if value is None else value

    return VARIABLE.sub(replace, template)


def fill_template(
    template: str, variables: Mapping[str, str], where: str, config: Mapping[str, Any] | None = None
) -> str:
    """Replace `{name}` and, with a config, `{config.KEY}`; `{{` and `}}` are literal braces.

    Args:
        where: Names the template in error messages.

    Raises:
        LabError: A variable is unknown, or the config does not have the key.
    """

    def value_of(name: str) -> str | None:
        if name.startswith("config."):
            return None if config is None else _format_value(_config_value(config, name[7:], where))
        if not name.isidentifier():
            return None
        if name not in variables:
            known = ", ".join("{" + known + "}" for known in sorted(variables))
            raise LabError(
                f"{where}: unknown variable {{{name}}}", hint=f"known: {known}; write {{{{ for a literal brace"
            )
        return variables[name]

    return replace_variables(template, value_of)


def _config_value(config: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a dotted key, for `{config.KEY}`."""
    matches = find(config, key)
    if len(matches) == 1 and not isinstance(value := get(config, matches[0]), Mapping):
        return value
    known = [show(path) for path, _ in _leaves(config)]
    similar = difflib.get_close_matches(key, known, 3) or known
    shown = ", ".join(similar[:8]) + (f" and {len(similar) - 8} more" if len(similar) > 8 else "")
    problem = "is not a single value" if matches else "is not in the config"
    raise LabError(f"{where}: {{config.{key}}}: {key} {problem}", hint=f"keys: {shown}")


def check_templates(
    command: Sequence[str], env: Mapping[str, str], configs: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Check that templates use only variables and config keys that exist.

    Args:
        command: The template of the command.
        env: The templates of environment variables.
        configs: The base configs by name, for `{config.KEY}`; None: such keys are not checked.

    Raises:
        LabError: A variable or key does not exist.
    """
    known = dict.fromkeys(VARIABLES, "")
    checked: dict[str, Mapping[str, Any] | None] = {"": None} if not configs else dict(configs)
    for base, config in checked.items():
        suffix = f" ({base})" if base else ""
        for part in command:
            if part not in CONFIG_PLACEHOLDERS:
                fill_template(part, known, f"launch.command{suffix}", config)
        for name, value in env.items():
            fill_template(value, known, f"launch.env.{name}{suffix}", config)


def build_argv(
    template: Sequence[str],
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
    extra: Sequence[str] = (),
    files_in: Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the argv of a trainer.

    Args:
        template: The command; its variables are replaced.
        variables: Values of the variables.
        arguments: The rendered config; replaces `{flags}` or `{overrides}`, else goes to the end.
        extra: Arguments after all others.
        files_in: For a trainer that starts in another folder: files of this folder become absolute paths.
        config: The config, for `{config.KEY}`.
    """
    argv: list[str] = []
    has_placeholder = False
    for part in template:
        if part in CONFIG_PLACEHOLDERS:
            argv.extend(arguments)
            has_placeholder = True
        else:
            word = fill_template(part, variables, "launch.command", config)
            argv.append(_absolute_if_file(word, files_in, program=not argv))
    if not has_placeholder:
        argv.extend(arguments)
    return [*argv, *(_absolute_if_file(word, files_in) for word in extra)]


def _absolute_if_file(word: str, folder: Path | None, *, program: bool = False) -> str:
    """Return the argument with a file of the folder, alone or as `--option=file`, as an absolute path.

    A program without a slash is left to PATH. Folders are unchanged: they may be modules (`-m package`) or output
    folders.
    """
    if folder is None or (program and "/" not in word):
        return word
    option, sign, name = word.rpartition("=")
    try:
        return f"{option}{sign}{folder / name}" if name and (folder / name).is_file() else word
    except (OSError, ValueError):  # not a path: too long, or with a NUL
        return word


def render(config: Mapping[str, Any], rendering: Rendering, changed: Mapping[str, bool] | None = None) -> list[str]:
    """Return the config as command-line arguments.

    Args:
        config: The resolved config.
        rendering: How to write it.
        changed: Dotted keys that differ from the base config, True for those it lacks; None: render all keys.
    """
    if rendering.as_ == "flags":
        pairs = [(path, value) for path, value in rendered_leaves(config, rendering, changed) if value is not None]
        hint = (
            "use keys: dotted, or skip: [...]" if rendering.keys == "flat" else "use case: as_written, or skip: [...]"
        )
        _reject_duplicates([flag_of(path, rendering) for path, _ in pairs], "two keys become the same flag", hint)
        return [word for path, value in pairs for word in flag_words(path, value, rendering)]
    if rendering.as_ == "hydra":
        new = {key for key, added in (changed or {}).items() if added}
        overrides = [(show(path), value) for path, value in rendered_leaves(config, rendering, changed)]
        return [f"{'+' if key in new else ''}{_hydra_key(key)}={_hydra_value(value)}" for key, value in overrides]
    return []


def render_environment(config: Mapping[str, Any], rendering: Rendering) -> dict[str, str]:
    """Return the config as environment variables: `train.learning_rate` becomes `TRAIN__LEARNING_RATE`."""
    if rendering.as_ != "env":
        return {}
    pairs = [
        (rendering.prefix + "__".join(re.sub(r"\W", "_", str(part)) for part in path).upper(), value)
        for path, value in rendered_leaves(config, rendering, None)
    ]
    _reject_duplicates([name for name, _ in pairs], "two keys become the same variable", "use skip: [...]")
    return {name: _format_value(value) for name, value in pairs}


def _reject_duplicates(names: Sequence[str], problem: str, hint: str) -> None:
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise LabError(f"launch.config: {problem}: {', '.join(sorted(duplicates))}", hint=hint)


def rendered_leaves(
    config: Mapping[str, Any], rendering: Rendering, changed: Mapping[str, bool] | None = None
) -> list[tuple[Concrete, Any]]:
    """Return the leaves that the rendering includes: neither skipped nor, with `only: changed`, unchanged."""
    only = rendering.only or ("changed" if rendering.as_ == "hydra" else "all")

    def is_included(path: Concrete) -> bool:
        if rendering.leaves_out(path):
            return False
        if only == "all" or changed is None:
            return True
        key = show(path)
        return key in changed or any(other.startswith(key + ".") for other in changed)

    return [(path, value) for path, value in _leaves(config) if is_included(path)]


def _leaves(config: Mapping[str, Any]) -> list[tuple[Concrete, Any]]:
    """Return all values with their paths. A list is one value, as on a trainer's command line."""
    leaves: list[tuple[Concrete, Any]] = []

    def walk(node: Mapping[str, Any], parent: Concrete) -> None:
        for key, value in node.items():
            if isinstance(value, Mapping) and value:
                walk(value, (*parent, key))
            else:
                leaves.append(((*parent, key), value))

    walk(config, ())
    return leaves


def flag_of(path: Sequence[str | int], rendering: Rendering) -> str:
    """Return the flag of a key: `--train.learning-rate`; for a bool in `names`, both of its words."""
    if (given := rendering.names.get(".".join(map(str, path)))) is not None:
        return given
    name = str(path[-1]) if rendering.keys == "flat" else ".".join(map(str, path))
    return "--" + (name.replace("_", "-") if rendering.case == "kebab" else name)


def flag_words(path: Concrete, value: Any, rendering: Rendering) -> list[str]:
    """Return the words of one option: its name and its value."""
    name = flag_of(path, rendering)
    if isinstance(value, bool) and "/" in name:
        word = name.split("/", 1)[0 if value else 1]
        return [word] if word else []
    if isinstance(value, bool):
        style = "present" if ".".join(map(str, path)) in rendering.store_true else rendering.booleans
        if style == "present":
            return [name] if value else []
        if style == "switch":
            parent, dot, last = name[2:].rpartition(".")
            negation = "no_" if rendering.case == "snake" else "no-"
            return [name] if value else [f"--{parent}{dot}{negation}{last}"]
        if style == "empty" and not value:
            return [f"{name}="] if rendering.separator == "equals" else [name, ""]
    if isinstance(value, list) and rendering.lists == "spread":
        items = [_format_item(item) for item in value]
        ambiguous = next((item for item in items if item.startswith("-") and not PLAIN_NEGATIVE.fullmatch(item)), None)
        if ambiguous is not None:
            raise LabError(
                f"launch.config: {name}: {ambiguous!r} in a list would be read as an option", hint="use lists: json"
            )
        return [name, *items]
    text = _format_value(value)
    if rendering.separator == "equals" or (text.startswith("-") and not PLAIN_NEGATIVE.fullmatch(text)):
        return [f"{name}={text}"]
    return [name, text]


def _format_item(value: Any) -> str:
    """Return an item of a spread list; a negative number without an exponent, which argparse takes for an option."""
    if isinstance(value, float) and value < 0 and math.isfinite(value):
        return f"{Decimal(repr(value)):f}"
    return _format_value(value)


def _format_value(value: Any) -> str:
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
            f"launch.config: Hydra's override grammar cannot express the key {key!r}",
            hint="rename it, or pass the config as a file",
        )
    return key


def _hydra_value(value: Any) -> str:
    """Return a value in Hydra's override grammar."""
    if isinstance(value, str):
        if HYDRA_WORD.fullmatch(value):
            return value
        # Between quotes a backslash is literal, except before a quote.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value) + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra_value, value)) + "]"
    if isinstance(value, dict):
        items = (f"{_hydra_key(str(key), HYDRA_WORD)}:{_hydra_value(item)}" for key, item in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else repr(value)


def find_program(name: str, cwd: Path, env: Mapping[str, str], which: Callable[..., str | None] = shutil.which) -> str:
    """Return the path of a program, as a shell in `cwd` would find it.

    Raises:
        LabError: It does not exist or is not executable.
    """
    if "/" in name:
        program = cwd / name  # an absolute name is unchanged
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
