"""A config file as an argument: `train.py --config base.yaml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.onboard.base import Interface, Script
from looplab.onboard.readers.arguments import ArgparseReader
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import calls, constant, keyword

FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
NAMES = re.compile(
    r"(^|[-_])(config|cfg|conf|configuration|params|hparams|settings)([-_]?(file|path|yaml|json|toml))?$"
)


class ConfigFileReader:
    """A file that the user names, or that is the default of an option named after configs."""

    name = "config file"

    def read(self, script: Script) -> Interface | None:
        words = list(script.arguments)
        place = next((i for i, word in enumerate(words) if _config(script, word.rpartition("=")[2]) is not None), None)
        if place is not None:
            option, sign, value = words[place].rpartition("=")
            words[place] = f"{option}{sign}{{config}}"
            return self._interface(script, value, words)
        for option, default in _defaults(script):
            if _config(script, default) is not None:
                return self._interface(script, default, [*words, option, "{config}"])
        literal = _opened_file(script)
        if literal is not None:
            return None  # the script opens a fixed name: nothing can be passed
        return None

    def _interface(self, script: Script, name: str, words: list[str]) -> Interface:
        base = _config(script, name) or {}
        rendering = {"as": "file", "format": FORMATS[Path(name).suffix.lower()]}
        notes = (f"the base config is {name}",)
        return Interface(
            self.name, tuple(settings_in(base)), (*script.prefix, *words), rendering, base=base, notes=notes
        )


def _config(script: Script, name: str) -> dict[str, Any] | None:
    """Return the content of a config file with at least one number in it."""
    path = script.folder / name
    if Path(name).suffix.lower() not in FORMATS or not path.is_file():
        return None
    try:
        config = read_config(path)
    except LabError:
        return None
    return config if any(setting.kind in ("int", "float") for setting in settings_in(config)) else None


def _defaults(script: Script) -> list[tuple[str, str]]:
    """Return the options that are named after configs and have a file name as their default."""
    reader = ArgparseReader()
    found = []
    for tree in script.modules:
        for call in calls(tree, "add_argument", "option"):
            flag = next(
                (word for word in map(constant, call.args) if isinstance(word, str) and word.startswith("--")), None
            )
            default = constant(keyword(call, "default"))
            if flag is not None and isinstance(default, str) and NAMES.search(flag.lstrip("-").lower()):
                found.append((flag, default))
    del reader
    return found


def _opened_file(script: Script) -> str | None:
    return None
