"""A config file as an argument: `train.py --config base.yaml`, `train.py base.yaml`."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

from looplab.config.files import read_config
from looplab.config.lab import LAB_FILE
from looplab.errors import LabError
from looplab.onboard.base import MAX_SOURCE, Interface, Script
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.environment import parse_number
from looplab.onboard.readers.flags import read_flags, with_flags
from looplab.onboard.readers.getopt import long_options
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, calls, constant, keyword
from looplab.untrusted import read_bounded

FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".ini": "ini", ".cfg": "ini"}
OF_TOOLS = {
    *("pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", "mypy.ini", "package.json", "package-lock.json"),
    *(LAB_FILE, "poetry.toml", "uv.toml", "ruff.toml", "pyrightconfig.json", "environment.yml", "environment.yaml"),
}
"""Config files of other programs."""
NAMES = re.compile(
    r"(^|[-_])(config|configs|cfg|conf|configuration|params|hparams|hyp|hyps|hyperparameters|hyperparams|settings|opt)([-_]?(file|path|yaml|json|toml|ini))?$"
)
RUNNER = "with_config.py"
"""Name of the small program in the lab."""
SEVERAL = 2
"""Hyper-parameters in a file that make it a config, whatever its name is."""
FOLDERS = (".", "config", "configs", "conf", "cfg", "cfgs")


class ConfigFileReader:
    """A file that the user names, that is the default of an option named after configs, or the only one there is."""

    name = "config file"

    def read(self, script: Script) -> Interface | None:
        words = list(script.arguments)
        place = next(
            (i for i, word in enumerate(words) if config_in(script, word.rpartition("=")[2]) is not None), None
        )
        if place is not None:
            option, sign, value = words[place].rpartition("=")
            words[place] = f"{option}{sign}{{config}}"
            return self._interface(script, value, words)
        if script.tree is None:
            return None
        options = _options(script)
        with_files = [(option, default) for option, default in options if default and config_in(script, default)]
        # A script may have several: that with the most hyper-parameters.
        for option, default in sorted(with_files, key=lambda pair: -_knobs(config_in(script, pair[1] or "") or {})):
            return self._interface(script, str(default), [*words, option, "{config}"])
        there = _files(script)
        named = [name for name in names_in_source(script) if config_in(script, name) is not None]
        reads_argv = "getopt" not in script.imports and any("sys.argv" in ast.unparse(tree) for tree in script.modules)
        if options and options[0][1] is None and (len(there) == 1 or len(named) == 1):
            option = options[0][0]
            file = there[0] if len(there) == 1 else named[0]
            return self._interface(script, file, [*words, *([option] if option.startswith("-") else []), "{config}"])
        if reads_argv and not options and (named or len(there) == 1) and not _are_taken(script):
            return self._interface(script, (named or there)[0], [*words, "{config}"])
        return None

    def _interface(self, script: Script, name: str, words: list[str]) -> Interface:
        base = config_in(script, name) or {}
        words = _with_typed_values(words, base)
        rendering = {"as": "file", "format": FORMATS[Path(name).suffix.lower()]}
        notes = (f"the base config is a copy of {name}",)
        command = (*script.prefix, *words)
        others = _other_sections(script, base)
        unused = _templates(script, name) | others
        settings = tuple(one for one in settings_in(base) if one.name.partition(".")[0] not in unused)
        found = Interface(self.name, settings, command, rendering, base=base, notes=notes)
        return found if _takes_all_keys(script) and not others else with_flags(found, script)


def _are_taken(script: Script) -> bool:
    """Return whether the user has typed every word that the script reads as `sys.argv[N]`, so no config can follow."""
    places = [int(n) for tree in script.modules for n in re.findall(r"\bargv\[(\d+)\]", ast.unparse(tree))]
    return bool(places) and max(places) <= len(script.arguments)


OVERRIDE = re.compile(r"(?P<dashes>-{0,2})(?P<key>[A-Za-z_][\w.-]*)(?:=(?P<value>.+))?")
"""`--training.steps`, `--lr=0.1`, `lr=0.1`."""


def _with_typed_values(words: list[str], base: dict[str, Any]) -> list[str]:
    """Return words that override numbers of the config file, with the place of the value in the config of each run:
    `--training.steps {config.training.steps}`. The base config gets what was typed, since that is what is used."""
    found = list(words)
    for i, word in enumerate(words):
        match = OVERRIDE.fullmatch(word)
        if match is None or not (match["dashes"] or match["value"]):
            continue
        node: Any = base
        *above, last = match["key"].split(".")
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        if (
            not isinstance(node, dict)
            or isinstance(node.get(last), bool)
            or not isinstance(node.get(last), int | float)
        ):
            continue
        is_joined = match["value"] is not None
        text = match["value"] if is_joined else words[i + 1] if i + 1 < len(words) else ""
        number = parse_number(text)
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        node[last] = number
        place = f"{{config.{match['key']}}}"
        if is_joined:
            found[i] = f"{word[: match.start('value')]}{place}"
        else:
            found[i + 1] = place
    return found


class FixedFileReader:
    """A config file whose name is in the source, so that no argument can replace it: `open("config.yaml")`.

    The script is started by `with_config.py`, which opens the file of the run in its place.
    """

    name = "fixed config file"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None or script.python is None or script.program is not None:
            return None
        for name in names_in_source(script):
            file = Path(name)
            is_named = NAMES.search(file.stem.lower()) is not None or file.parent.name in FOLDERS[1:]
            place = next((place for place in (script.folder, script.path.parent) if (place / name).is_file()), None)
            if place is None:
                continue
            shown = os.path.relpath(place / name, script.folder)
            base = config_in(script, shown)
            if base is None or not (is_named or _knobs(base) >= SEVERAL):
                continue
            rendering = {"as": "file", "format": FORMATS[file.suffix.lower()]}
            note = f"the script always reads {shown}: {RUNNER} passes it the config of the run instead"
            command = tuple(_with_typed_values([*with_runner(script, f"{shown}={{config}}")], base))
            others = _other_sections(script, base)
            unused = _templates(script, shown) | others
            settings = tuple(one for one in settings_in(base) if one.name.partition(".")[0] not in unused)
            found = Interface(self.name, settings, command, rendering, base=base, notes=(note,))
            return found if _takes_all_keys(script) and not others else with_flags(found, script)
        return None


ANCHOR = re.compile(r"^([A-Za-z_][\w-]*):[ \t]+&([\w-]+)[ \t]*(?:#.*)?$", re.MULTILINE)


def _templates(script: Script, name: str) -> set[str]:
    """Return the tables of a YAML file that others take over by `<<: *anchor`: their values are read there."""
    if FORMATS[Path(name).suffix.lower()] != "yaml":
        return set()
    text = read_bounded(script.folder / name, MAX_SOURCE).decode("utf-8", "replace")
    return {
        key for key, anchor in ANCHOR.findall(text) if re.search(rf"<<:[ \t]*\[?[^\n]*\*{re.escape(anchor)}\b", text)
    }


def _other_sections(script: Script, base: dict[str, Any]) -> set[str]:
    """Return the tables of a config that has one for each dataset or environment, without that which is used.

    That is the one whose name was typed, or is the default of an option: `--dataset cifar10`.
    """
    sections = {key: value for key, value in base.items() if isinstance(value, dict)}
    typed = {word.rpartition("=")[2] for word in script.arguments} & sections.keys()
    used = typed or _option_texts(script) & sections.keys()
    if len(used) != 1:
        return set()
    (name,) = used
    alike = {key for key, value in sections.items() if value.keys() & sections[name].keys()}
    return alike - {name}


def _option_texts(script: Script) -> set[str]:
    """Return the texts that are defaults of options."""
    found = (
        constant(keyword(call, "default"))
        for tree in script.modules
        for call in calls(tree, "add_argument", "option", "Option")
    )
    return {text for text in found if isinstance(text, str)}


def with_runner(script: Script, config: str = "{config}") -> tuple[str, ...]:
    """Return the command that starts a script through `with_config.py`."""
    words = ("-m", script.module) if script.module else (script.prefix[-1],)
    python = script.prefix[: len(script.prefix) - len(words)]
    return (*python, RUNNER, config, *words, *script.arguments)


def _takes_all_keys(script: Script) -> bool:
    """Whether a script passes its whole config to something, `Config(**config)`, so that no key can be added."""
    return any(
        isinstance(item.value, ast.Name | ast.Call)
        for tree in script.modules
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and call_name(call).rpartition(".")[2][:1].isupper()
        for item in call.keywords
        if item.arg is None and "vars(" not in ast.unparse(item.value)
    )


def _knobs(config: dict[str, Any]) -> int:
    return sum(suggest(setting).role == "knob" for setting in settings_in(config))


def config_in(script: Script, name: str) -> dict[str, Any] | None:
    """Return the content of a config file with at least one number in it."""
    path = script.folder / name
    if Path(name).suffix.lower() not in FORMATS or Path(name).name in OF_TOOLS or not path.is_file():
        return None
    try:
        config = read_config(path)
    except LabError:
        config = _commented_json(path)
    return config if any(setting.kind in ("int", "float") for setting in settings_in(config)) else None


IN_JSON = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/|,(?=\s*(?://[^\n]*\s*|/\*.*?\*/\s*)*[}\]])', re.DOTALL)
"""Texts in JSON; and what some readers of JSON allow: comments, and commas that nothing follows."""


def _commented_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file with comments and trailing commas; empty if it is not one."""
    text = read_bounded(path, MAX_SOURCE).decode("utf-8", "replace") if path.suffix.lower() == ".json" else ""
    try:
        config = json.loads(IN_JSON.sub(lambda match: match[1] or "", text))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _options(script: Script) -> list[tuple[str, str | None]]:
    """Return the flags that are named after configs, each with its default."""
    found: dict[str, str | None] = {}
    for tree in script.modules:
        for call in calls(tree, "add_argument", "option", "Option"):
            words = [word for word in map(constant, call.args) if isinstance(word, str)]
            flag = next((word for word in words if word.startswith("-")), words[0] if words else None)
            flag = next((word for word in words if word.startswith("--")), flag)
            default = constant(keyword(call, "default"))
            if flag is not None and NAMES.search(flag.lstrip("-").lower()):
                found[flag] = default if isinstance(default, str) else None
    flags = read_flags(script)
    for setting in flags.settings if flags is not None else ():
        # The running script knows defaults that are not constants: `ROOT / "configs/base.yaml"`.
        flag = setting.name if setting.positional else setting.flag or f"--{setting.name}"
        if NAMES.search(setting.name.lower()) and isinstance(setting.default, str):
            found[flag] = _from_folder(script, setting.default)
    found |= {f"--{name}": None for name in long_options(script) if NAMES.search(name.lower())}
    return list(found.items())


def _from_folder(script: Script, name: str) -> str:
    """Return the path of a file of the project as the folder of the lab has it."""
    path, folder = (script.folder / name).resolve(), script.folder.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else name


def _named_by_option(script: Script) -> list[str]:
    """Return the files that are named after what was typed, or the default of an option: `hyperparams/{algo}.yml`."""
    nodes = [node for tree in script.modules for node in ast.walk(tree)]
    ends = [node.values[-1] for node in nodes if isinstance(node, ast.JoinedStr) and len(node.values) > 1]
    suffixes = {text for end in ends if isinstance(text := constant(end), str) and text.lower() in FORMATS}
    if not suffixes:
        return []
    places = ["", *(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))]
    folders = [place for place in dict.fromkeys(places) if len(place) < 100 and _is_folder(script.folder / place)]
    words = dict.fromkeys([*(word.rpartition("=")[2] for word in script.arguments), *sorted(_option_texts(script))])
    names = [os.path.join(place, word + suffix) for word in words if word for place in folders for suffix in suffixes]
    return [name for name in names if (script.folder / name).is_file()]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _files(script: Script) -> list[str]:
    """Return the config files of the project, in the usual places."""
    return [
        str(path.relative_to(script.folder))
        for place in FOLDERS
        for path in sorted((script.folder / place).glob("*"))
        if path.suffix.lower() in FORMATS and config_in(script, str(path.relative_to(script.folder))) is not None
    ]


def names_in_source(script: Script) -> list[str]:
    """Return the texts in the source that could be the name of a config file; of `f"{algo}.yml"`, those that exist."""
    texts = [
        node.value
        for tree in script.modules
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and len(node.value) < 200
        and Path(node.value).suffix.lower() in FORMATS
    ]
    return [*_named_by_option(script), *texts]
