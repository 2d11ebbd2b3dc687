"""Write a lab for a script: lab.yaml with comments, and its base config."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from looplab.config.lab import LAB_FILE
from looplab.errors import LabError
from looplab.measure.summary import Directions
from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.introspect import NO_COMMAND_LINE
from looplab.onboard.knobs import Suggestion, constraints, find_seed, suggest, unused_settings, words_of
from looplab.onboard.output_folder import (
    OUTPUT,
    PROJECT_PATH,
    is_project_module,
    own_output_words,
    predicted_output,
    relative_inputs,
    relative_output,
)
from looplab.onboard.readers.arguments import FIRST_SEED
from looplab.onboard.readers.config_file import RUNNER
from looplab.onboard.readers.constants import fixed_seed
from looplab.onboard.readers.hydra import search_groups
from looplab.onboard.scripts import MAKE
from looplab.onboard.source import call_name, keyword
from looplab.onboard.typed import given_values

MANY = 60
"""Settings beyond which only those that look like hyper-parameters are part of the base config."""
RUNS = 20
"""`budget.runs` of a new lab."""
SEED_WORD = "seed={seed}"
"""What `with_config.py` gets for a seed that is a constant of the script."""
JUDGE = "judge: {baseline_seeds: 3}"
NO_OBJECTIVE = "# objective: {metric: …, goal: min}"
"""Start of the placeholder line for the objective."""


@dataclass(frozen=True, slots=True)
class NewLab:
    """The files of a lab, and what to say about it."""

    files: Mapping[str, str]
    """Content by name."""
    knobs: tuple[str, ...]
    ranges: tuple[str, ...]
    """The knobs with their defaults and ranges, for people."""
    seed: str | None
    """Config key of the seed; None: the script has none."""
    is_seed_constant: bool
    """Whether the seed is a constant of the script that each run replaces."""
    objective: str | None
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Draft:
    """What is decided setting by setting."""

    base: dict[str, Any] = field(default_factory=dict)
    knobs: list[tuple[ScriptSetting, Suggestion]] = field(default_factory=list)
    doubtful: list[tuple[ScriptSetting, Suggestion]] = field(default_factory=list)
    seed: str | None = None
    fixed: list[str] = field(default_factory=list)
    """Words of the command that are kept as given."""
    missing: list[ScriptSetting] = field(default_factory=list)


def make_lab(
    script: Script,
    interface: Interface,
    *,
    objective: str | None = None,
    goal: str | None = None,
    name: str | None = None,
    specs: Mapping[str, Mapping[str, Any]] | None = None,
) -> NewLab:
    """Return a lab for a script.

    Args:
        objective: The metric that counts; None: not known yet.
        goal: `min` or `max`; None: by the metric's name.
        name: The study; None: the name of the script.
        specs: Knobs that are known; None: they are guessed.

    Raises:
        LabError: The script needs settings that were not given.
    """
    if specs is None:
        interface = search_groups(script, interface)
    draft = _draft(script, interface)
    if specs is not None:
        known = {setting.name: setting for setting in interface.settings}
        draft.knobs = [
            (known.get(key, ScriptSetting(key, "unknown")), Suggestion("knob", spec)) for key, spec in specs.items()
        ]
        draft.doubtful = []
        for setting, _ in draft.knobs:
            if interface.base is None and setting.default is not MISSING and setting.default is not None:
                _put(draft.base, setting.name, setting.default)
    if draft.missing:
        needed = " ".join(
            f"--{setting.name} …" if not setting.positional else setting.name.upper() for setting in draft.missing
        )
        asked = "introspection" in vars(script) and script.introspection.problem
        names = ", ".join(setting.name for setting in draft.missing)
        if asked and asked != NO_COMMAND_LINE:
            raise LabError(
                f"{script.name} did not answer `--help` ({asked}); according to its source it needs {names}",
                hint=f"make `{shlex.join(script.prefix)} --help` work here, or pass them: {needed}",
            )
        raise LabError(f"{script.name} needs {names}", hint=f"pass it: looplab init {script.name} {needed}")
    stem = script.path.parent.name if script.path.stem == "__main__" else script.path.stem
    stem = script.name if script.program is not None else script.arguments[0] if script.argv[0] in MAKE else stem
    study = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).lstrip("_.-") or "study"
    base_file = f"{study}.base.json"
    in_run_folder, links = starts_in_run_folder(script)
    cwd = "run" if in_run_folder and not _has_input_folder(interface, draft, script.folder) else None
    if cwd is None:
        typed = {word.partition("=")[0] for word in script.arguments}
        for words in predicted_output(interface, script.folder):
            draft.fixed += words if words[0].partition("=")[0] not in typed else []
    else:
        draft.fixed = _from_lab(draft.fixed, script.folder)
    command = own_output_words(_command(script, interface, draft), script.folder, relative=cwd is None)
    moved = relative_output(draft.base) if cwd is not None else []
    if draft.seed is None:
        command = _with_seed(script, command) or command
    is_seed_constant = SEED_WORD in command
    lines = [f"# Made by `looplab init` from {script.name} ({interface.reader}). `looplab check` shows what it does."]
    lines += [f"study: {study}", "launch:", f"  command: {flow(command)}"]
    if interface.rendering:
        lines.append(f"  config: {flow(dict(interface.rendering))}")
    env = {**(PROJECT_PATH if cwd and is_project_module(script) else {}), **interface.env}
    if env:
        lines.append(f"  env: {flow(env)}")
    if cwd:
        lines.append("  cwd: run  # it writes to its working folder, so each run gets its own")
        if links:
            lines.append(f"  links: {flow(links)}  # files that it reads from there")
    lines.append(f"base: {base_file}")
    lines += _objective_lines(objective, goal)
    lines += ["knobs:" if draft.knobs else "knobs: {}"]
    for setting, suggestion in draft.knobs:
        lines.append(f"  {_key(setting)}: {flow(dict(suggestion.spec or {}))}{_comment(setting)}")
    if draft.doubtful or interface.offers:
        lines += ["  # Perhaps also:", *(f"  # {offer}" for offer in interface.offers)]
        lines += [
            f"  # {_key(setting)}: {flow(dict(suggestion.spec))}{_comment(setting)}"
            for setting, suggestion in draft.doubtful
            if suggestion.spec
        ]
    rules = constraints([setting.name for setting, _ in draft.knobs], dict(_leaves(draft.base)))
    if rules:
        lines += ["constraints:", *(f"  - {json.dumps(rule)}" for rule in rules)]
    if draft.seed is not None:
        lines.append(f"seed: {json.dumps(draft.seed)}")
    if draft.seed is not None or is_seed_constant:
        lines.append(JUDGE if objective is not None else f"# {JUDGE}")
    else:
        lines.append("# No seed was found, so runs cannot be repeated with other seeds, and nothing is judged.")
    lines += ["proposers: [{search: auto}]", f"budget: {{runs: {RUNS}}}"]
    files = {LAB_FILE: "\n".join(lines) + "\n", base_file: json.dumps(draft.base, indent=2) + "\n"}
    if RUNNER in command:
        files[RUNNER] = (Path(__file__).with_name(RUNNER)).read_text()
    return NewLab(
        files=files,
        knobs=tuple(setting.name for setting, _ in draft.knobs),
        ranges=tuple(_range(setting, suggestion.spec or {}) for setting, suggestion in draft.knobs),
        seed=draft.seed,
        is_seed_constant=is_seed_constant,
        objective=objective,
        notes=(*interface.notes, *moved),
    )


def _range(setting: ScriptSetting, spec: Mapping[str, Any]) -> str:
    """Return a knob in a few words: `lr 0.1 [0.001 … 1, log]`, `optimizer sgd [sgd | adam]`."""
    default = "" if setting.default in (MISSING, None) else f" {setting.default}"
    if "choices" in spec:
        return f"{setting.name}{default} [{' | '.join(map(str, spec['choices']))}]"
    if "low" not in spec or "high" not in spec:
        return f"{setting.name}{default}"
    return f"{setting.name}{default} [{spec['low']:g} … {spec['high']:g}{', log' if spec.get('log') else ''}]"


def _draft(script: Script, interface: Interface) -> _Draft:
    draft = _Draft()
    arguments = list(script.arguments if interface.typed is None else interface.typed)
    for word in _leading_words(script, interface) if interface.typed is None else ():
        if word in arguments:
            arguments.remove(word)  # part of the command already
    values, draft.fixed = given_values(arguments, interface.settings) if interface.base is None else ({}, arguments)
    is_big = len(interface.settings) > MANY
    if interface.base is not None:
        draft.base = json.loads(json.dumps(interface.base, default=str))  # a date becomes a text
    draft.seed = find_seed(interface.settings)
    unused = unused_settings(interface.settings, values)
    groups = {name.rpartition(".")[0] for name in (setting.name for setting in interface.settings) if "." in name}
    for setting in interface.settings:
        if interface.base is None and setting.name in groups and not setting.required:
            continue  # `--model resnet` next to `--model.width 64`: a base config has one or the other
        value = values.get(setting.name, setting.default)
        here = replace(setting, default=value)
        suggestion = suggest(here)
        if setting.name in interface.specs:
            suggestion = replace(suggestion, spec=interface.specs[setting.name])
        if setting.name in unused and suggestion.role == "knob" and setting.name not in values:
            suggestion = replace(suggestion, role="doubtful")
        if setting.name == draft.seed:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                value = FIRST_SEED
                if interface.base is not None:
                    _put(draft.base, setting.name, value)
        elif value is MISSING:
            if setting.required and setting.name not in values and not _is_given(setting, draft.fixed):
                draft.missing.append(setting)
            continue
        wanted = (
            setting.name == draft.seed
            or suggestion.role == "knob"
            or (suggestion.role == "length" and value != 0)  # 0: the script computes it
            or (suggestion.role == "doubtful" and not is_big)
        )
        is_passed = wanted or setting.positional or setting.name in values
        if interface.base is None and is_passed and value is not None:
            _put(draft.base, setting.name, value)
        if suggestion.role == "knob" and suggestion.spec:
            draft.knobs.append((here, suggestion))
        elif suggestion.role in ("doubtful", "length") and suggestion.spec and wanted:
            draft.doubtful.append((here, suggestion))
    return draft


def _has_input_folder(interface: Interface, draft: _Draft, folder: Path) -> bool:
    """Return whether a value of the config, or a default, is a folder of the project that is read from."""
    names = {setting.name: setting.default for setting in interface.settings} | dict(_leaves(draft.base))
    return any(isinstance(value, str) and _is_input_folder(name, value, folder) for name, value in names.items())


def _is_input_folder(option: str, value: str, folder: Path) -> bool:
    if not value or value.startswith(("/", "~", "-", "{")) or not value.strip("./") or OUTPUT & set(words_of(option)):
        return False
    try:
        return (folder / value).is_dir()
    except (OSError, ValueError):
        return False


def _from_lab(words: Sequence[str], folder: Path) -> list[str]:
    """Return typed words for a trainer that starts in its run folder: folders that are read from are in the lab.

    Files need no change: they become absolute paths when a run starts.
    """
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        option, sign, value = word.rpartition("=")
        is_option = before.startswith("-") or bool(sign)
        is_input = is_option and _is_input_folder(option or before, value, folder)
        found.append(f"{option}{sign}{{lab}}/{os.path.normpath(value)}" if is_input else word)
    return found


def _is_given(setting: ScriptSetting, words: Sequence[str]) -> bool:
    if setting.positional:
        return any(not word.startswith("-") for word in words)
    flags = {flag.replace("_", "-") for flag in (f"--{setting.name}", setting.flag or "", *setting.aliases)}
    return any(word.partition("=")[0].replace("_", "-") in flags for word in words)


def _command(script: Script, interface: Interface, draft: _Draft) -> list[str]:
    command = list(interface.command)
    if interface.base is None and draft.fixed:
        at = len(script.prefix) + len(_leading_words(script, interface))
        command[at:at] = draft.fixed
    left_out = {f"{{config.{item.name}}}" for item in interface.settings if item.positional and not _has(draft, item)}
    return [word for word in command if word not in left_out]


def _with_seed(script: Script, command: Sequence[str]) -> list[str] | None:
    """Return the command of a script whose seed is a constant, so that each run has its own; None: that cannot be."""
    words = ["-m", script.module] if script.module else [script.prefix[-1]]
    python = list(script.prefix[: len(script.prefix) - len(words)])
    if (
        script.tree is None
        or script.program is not None
        or (script.module is not None and script.package_root is not None)
        or len(python) != 1
        or list(command[: len(script.prefix)]) != [*python, *words]
        or RUNNER in command
        or fixed_seed(script.tree, names=True) is None
    ):
        return None
    return [*python, RUNNER, SEED_WORD, *words, *command[len(script.prefix) :]]


def _has(draft: _Draft, setting: ScriptSetting) -> bool:
    node: Any = draft.base
    for part in setting.name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _leading_words(script: Script, interface: Interface) -> list[str]:
    """Return the words of the command between the script and its settings, such as `train` of `cli.py train`."""
    if interface.leading is not None:
        return list(interface.leading)
    return list(takewhile(lambda word: "{" not in word, interface.command[len(script.prefix) :]))


def _objective_lines(objective: str | None, goal: str | None) -> list[str]:
    if objective is None:
        return [f"{NO_OBJECTIVE}  # `looplab try` shows what the script measures"]
    return [f"objective: {{metric: {json.dumps(objective)}, goal: {goal or Directions().goal(objective)}}}"]


def _put(base: dict[str, Any], name: str, value: Any) -> None:
    *above, last = name.split(".")
    for part in above:
        base = base.setdefault(part, {})
    base[last] = value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested config by dotted name."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _key(setting: ScriptSetting) -> str:
    return setting.name if re.fullmatch(r"[A-Za-z_][\w.-]*", setting.name) else json.dumps(setting.name)


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_][\w./-]*", value)
        and value.lower() not in ("true", "false", "null", "yes", "no", "on", "off")
    ):
        return value
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)


def _comment(setting: ScriptSetting) -> str:
    text = " ".join(setting.help.split())
    text = re.sub(r"\s*\((?:[^()]{0,60}, )?default[:=]?.*?\)", "", text).strip()
    text = re.sub(r"[\s;,.]*\bdefaults?(?: value)?\s?[:=]\s?\S*$", "", text, flags=re.IGNORECASE)
    return f"  # {text[:90]}" if text else ""


def starts_in_run_folder(script: Script) -> tuple[bool, list[str]]:
    """Return whether a script should be started in its run folder, and what it then needs there.

    It should if it writes relative paths, and reads none, or if it writes metrics: what it reads is linked then. With a
    module of the project, which is found from the project's folder alone, only metrics count.
    """
    if script.tree is None:
        return False, []
    called = {
        call_name(node).rpartition(".")[2]
        for tree in script.modules
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and not (call_name(node) == "logging.basicConfig" and not keyword(node, "filename"))
    }
    links = relative_inputs(script)
    return bool(called & (METRIC_WRITERS if links or is_project_module(script) else WRITERS)), links


METRIC_WRITERS = {
    *("SummaryWriter", "CSVLogger", "TensorBoardLogger", "LightningCLI", "FileHandler", "basicConfig", "to_csv"),
    *("writer", "DictWriter"),
}
"""Functions that usually write a file with metrics."""
WRITERS = {*METRIC_WRITERS, "Trainer", "mkdir", "makedirs", "save", "savez", "dump", "savefig"}
"""Functions that usually write a file."""
