"""Write a lab for a script: lab.yaml with comments, and its base config."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from looplab.config.lab import LAB_FILE
from looplab.errors import LabError
from looplab.measure.summary import Directions
from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.knobs import Suggestion, constraints, find_seed, suggest
from looplab.onboard.readers.arguments import FIRST_SEED
from looplab.onboard.readers.config_file import RUNNER
from looplab.onboard.source import call_name

MANY = 60
"""Settings beyond which only those that look like hyper-parameters are part of the base config."""
RUNS = 20
"""`budget.runs` of a new lab."""
JUDGE = "judge: {baseline_seeds: 3}"
NO_OBJECTIVE = "# objective: {metric: …, goal: min}"
"""Start of the line that says that there is no objective yet."""


@dataclass(frozen=True, slots=True)
class NewLab:
    """The files of a lab, and what to say about it."""

    files: Mapping[str, str]
    """Content by name."""
    knobs: tuple[str, ...]
    seed: str | None
    """Config key of the seed; None: the script has none."""
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
    """Words of the command that are kept as they were given."""
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
        raise LabError(
            f"{script.path.name} needs {', '.join(setting.name for setting in draft.missing)}",
            hint=f"give what it needs: looplab init {script.path.name} {needed}",
        )
    stem = script.path.parent.name if script.path.stem == "__main__" else script.path.stem
    study = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).lstrip("_.-") or "study"
    base_file = f"{study}.base.json"
    command = _command(script, interface, draft)
    cwd = "run" if starts_in_run_folder(script) else None
    lines = [
        f"# Made by `looplab init` from {script.path.name} ({interface.reader}). `looplab check` shows what it does."
    ]
    lines += [f"study: {study}", "launch:", f"  command: {_flow(command)}"]
    if interface.rendering:
        lines.append(f"  config: {_flow(dict(interface.rendering))}")
    if interface.env:
        lines.append(f"  env: {_flow(dict(interface.env))}")
    if cwd:
        lines.append("  cwd: run  # it writes next to where it is started: each run gets its own folder")
    lines.append(f"base: {base_file}")
    lines += _objective_lines(objective, goal)
    lines += ["knobs:" if draft.knobs else "knobs: {}"]
    for setting, suggestion in draft.knobs:
        lines.append(f"  {_key(setting)}: {_flow(dict(suggestion.spec or {}))}{_comment(setting)}")
    if draft.doubtful or interface.offers:
        lines += ["  # Perhaps also:", *(f"  # {offer}" for offer in interface.offers)]
        lines += [
            f"  # {_key(setting)}: {_flow(dict(suggestion.spec))}{_comment(setting)}"
            for setting, suggestion in draft.doubtful
            if suggestion.spec
        ]
    rules = constraints([setting.name for setting, _ in draft.knobs], dict(_leaves(draft.base)))
    if rules:
        lines += ["constraints:", *(f"  - {json.dumps(rule)}" for rule in rules)]
    if draft.seed is not None:
        lines += [f"seed: {json.dumps(draft.seed)}", JUDGE if objective is not None else f"# {JUDGE}"]
    else:
        lines.append("# No seed was found, so runs cannot be repeated with another one, and nothing is judged.")
    lines += ["proposers: [{search: auto}]", f"budget: {{runs: {RUNS}}}"]
    files = {LAB_FILE: "\n".join(lines) + "\n", base_file: json.dumps(draft.base, indent=2) + "\n"}
    if RUNNER in command:
        files[RUNNER] = (Path(__file__).with_name(RUNNER)).read_text()
    return NewLab(files, tuple(setting.name for setting, _ in draft.knobs), draft.seed, objective, interface.notes)


def _draft(script: Script, interface: Interface) -> _Draft:
    draft = _Draft()
    arguments = list(script.arguments)
    for word in _leading_words(script, interface):
        if word in arguments:
            arguments.remove(word)  # part of the command already
    values, draft.fixed = given_values(arguments, interface.settings) if interface.base is None else ({}, arguments)
    is_big = len(interface.settings) > MANY
    if interface.base is not None:
        draft.base = json.loads(json.dumps(interface.base, default=str))  # a date becomes a text
    draft.seed = find_seed(interface.settings)
    groups = {name.rpartition(".")[0] for name in (setting.name for setting in interface.settings) if "." in name}
    for setting in interface.settings:
        if interface.base is None and setting.name in groups and not setting.required:
            continue  # `--model resnet` beside `--model.width 64`: a base config has one or the other
        value = values.get(setting.name, setting.default)
        here = ScriptSetting(setting.name, setting.kind, value, setting.choices, setting.help)
        suggestion = suggest(here)
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


def given_values(words: Sequence[str], settings: Sequence[ScriptSetting]) -> tuple[dict[str, Any], list[str]]:
    """Split what a person typed after the script into values of settings and words that stay as they are."""
    by_flag = _by_flag(settings)
    by_word = {setting.word: setting for setting in settings if setting.word is not None}
    positional = [setting for setting in settings if setting.positional]
    values: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, sign, text = word.partition("=")
        setting, on = next(
            (by_flag[way] for way in (flag, flag.replace("_", "-"), _snake(flag)) if way in by_flag), (None, True)
        )
        if setting is None and positional and not word.startswith("-") and positional[0].kind != "unknown":
            first = positional.pop(0)
            values[first.name] = _parse(word, first)
            continue
        if setting is None:
            rest.append(word)
            continue
        takes = not sign and setting.boolean not in ("present", "absent", "switch")
        if setting.kind == "bool":
            takes = takes and bool(queue) and queue[0].lower() in BOOLEANS
        several = setting.spread and takes
        taken: list[str] = []
        while takes and queue and not _is_flag(queue[0], by_flag) and (several or not taken):
            taken.append(queue.pop(0))
        if suggest(setting).role == "other" or setting.kind == "unknown":
            rest += [word, *taken]
        elif setting.kind == "bool" and not sign and not taken:
            values[setting.name] = on
        elif several:
            values[setting.name] = [_number(item) for item in taken]
        else:
            values[setting.name] = _parse(text if sign else "".join(taken[:1]), setting)
    for i, word in enumerate(rest):
        held = by_word.get("".join(re.split("([:=])", word, maxsplit=1)[:2]))
        if held is not None:
            values[held.name], rest[i] = held.default, f"{held.word}{{config.{held.name}}}"
    return values, rest


BOOLEANS = {"1", "0", "true", "false", "yes", "no", "on", "off"}


def _by_flag(settings: Sequence[ScriptSetting]) -> dict[str, tuple[ScriptSetting, bool]]:
    """Return the setting of each flag, and for a bool what the flag makes of it."""
    found: dict[str, tuple[ScriptSetting, bool]] = {}
    for setting in settings:
        if setting.positional:
            continue
        if setting.boolean in ("switch", "absent"):
            parent, dot, last = setting.name.rpartition(".")
            found[setting.off or f"--{parent}{dot}no-{last}"] = (setting, False)
        if setting.boolean != "absent":
            for flag in (setting.flag or f"--{setting.name}", *setting.aliases):
                found[flag] = (setting, True)
    return found


def _snake(flag: str) -> str:
    dashes = len(flag) - len(flag.lstrip("-"))
    return flag[:dashes] + flag[dashes:].replace("-", "_")


def _is_flag(word: str, known: Mapping[str, Any]) -> bool:
    """Return whether a word is a flag, rather than a negative number or another value."""
    return word.startswith("--") or word.partition("=")[0] in known


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parse(text: str, setting: ScriptSetting) -> Any:
    try:
        if setting.kind == "int":
            return int(text)
        if setting.kind == "float":
            return float(text)
    except ValueError:
        return text
    if setting.kind == "bool":
        return text.lower() in ("1", "true", "yes", "on")
    return text


def _is_given(setting: ScriptSetting, words: Sequence[str]) -> bool:
    if setting.positional:
        return any(not word.startswith("-") for word in words)
    return any(word.partition("=")[0].replace("_", "-") == f"--{setting.name}".replace("_", "-") for word in words)


def _command(script: Script, interface: Interface, draft: _Draft) -> list[str]:
    command = list(interface.command)
    if interface.base is None and draft.fixed:
        at = len(script.prefix) + len(_leading_words(script, interface))
        command[at:at] = draft.fixed
    left_out = {f"{{config.{item.name}}}" for item in interface.settings if item.positional and not _has(draft, item)}
    return [word for word in command if word not in left_out]


def _has(draft: _Draft, setting: ScriptSetting) -> bool:
    node: Any = draft.base
    for part in setting.name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _leading_words(script: Script, interface: Interface) -> list[str]:
    """Return the words of the command between the script and its settings, such as `train` of `cli.py train`."""
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


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
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
    text = re.sub(r"\s*\(default:?.*?\)", "", text)
    return f"  # {text[:90]}" if text else ""


def starts_in_run_folder(script: Script) -> bool:
    """Return whether a script should be started in its run folder: it writes relative paths, and reads none."""
    if script.tree is None or (script.module is not None and script.package_root is None):
        return False  # a module of the project is found from the project's folder alone
    writes = False
    for tree in script.modules:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value != script.path.name
                and _is_input(node.value, script.folder)
            ):
                return False
            if isinstance(node, ast.Call):
                writes = writes or call_name(node).rpartition(".")[2] in WRITERS
    return writes


WRITERS = {
    "SummaryWriter",
    "CSVLogger",
    "TensorBoardLogger",
    "LightningCLI",
    "Trainer",
    "mkdir",
    "makedirs",
    "save",
    "savez",
    "to_csv",
    "dump",
    "savefig",
}
"""Functions that usually write a file."""


def _is_input(text: str, folder: Path) -> bool:
    """Return whether a text is the relative path of something that exists."""
    if not text or len(text) > 200 or "\n" in text or text.startswith(("/", "~", "-")) or text in (".", "..", "./"):
        return False
    if "/" not in text and "." not in text:
        return False
    try:
        return (folder / text).exists()
    except (OSError, ValueError):
        return False
