"""Shell scripts around a Python script: `python train.py --epochs 10 "$@"`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from looplab.errors import LabError
from looplab.onboard.base import Interface, Script, ScriptSetting
from looplab.onboard.typed import given_values

PASSES_ON = re.compile(r'"?\$(?:[@*]|\{[@*]\})"?')
PYTHON = re.compile(r"(?:\S*/)?(?:python[0-9.]*|torchrun|accelerate|deepspeed)|\$\{?PYTHON[^\s/]*")
ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\$\{[^}\n]*\}|[^\s\"']*)\s*(?:#.*)?$",
    re.MULTILINE,
)
DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=([^}]*)\}")
"""A variable that gets a value where it has none: `: "${SEED:=13}"`."""
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\})")
ENDS = re.compile(r"[|;&]|[12]?>")
"""Where a command of a shell line ends."""


class ShellReader:
    """A shell script whose Python command gets what the script gets, or gets nothing and can be called directly."""

    name = "shell"

    def read(self, script: Script) -> Interface | None:
        if script.python is not None:
            return None
        from looplab.onboard.readers import read_interface

        for line in self._python_lines(script):
            passes_on = PASSES_ON.search(line) is not None
            inner = self._inner(script, PASSES_ON.sub("", line))
            found = read_interface(inner) if inner is not None else None
            if found is None or inner is None:
                continue
            if passes_on:
                words = found.command[len(inner.prefix) :]
                if found.base is not None:
                    words = words[len(inner.arguments) :]
                settings = tuple(_given(setting, line, inner.arguments) for setting in found.settings)
                reader = f"shell, then {found.reader}"
                return replace(found, reader=reader, settings=settings, command=(*script.prefix, *words))
            note = f"{script.name} passes no arguments on, so the lab calls its command itself"
            if found.base is not None:
                return replace(found, notes=(*found.notes, note))
            settings = tuple(_given(setting, line, inner.arguments) for setting in found.settings)
            _, rest = given_values(inner.arguments, found.settings)
            command = (*inner.prefix, *rest, *found.command[len(inner.prefix) :])
            return replace(found, settings=settings, notes=(*found.notes, note), command=command)
        return None

    @staticmethod
    def _python_lines(script: Script) -> list[str]:
        """Return the lines that start Python, those that pass arguments on first."""
        text = script.text.replace("\\\n", " ")
        values = assigned_values(text)
        lines = [_filled(line, values) for line in text.splitlines()]
        found = [line for line in lines if PYTHON.search(line) and not line.lstrip().startswith("#")]
        return sorted(found, key=lambda line: PASSES_ON.search(line) is None)

    @staticmethod
    def _inner(script: Script, line: str) -> Script | None:
        """Return the Python script of a line, with those of its words that are constants."""
        from looplab.onboard.scripts import find_script

        try:
            words = shlex.split(ENDS.split(line, maxsplit=1)[0], comments=True)
        except ValueError:
            return None
        while words and not PYTHON.fullmatch(words[0]):
            words = words[1:]
        if len(words) < 2:
            return None
        kept: list[str] = []
        for word in words[1:]:
            if "$" in word and kept and kept[-1].startswith("-"):
                kept.pop()  # a flag with a value that only the shell knows
            elif "$" not in word:
                kept.append(word)
        try:
            return find_script(["python" if "$" in words[0] else words[0], *kept], script.folder)
        except LabError:
            return None


def assigned_values(text: str) -> dict[str, str]:
    """Return the values that a shell script gives to its variables, the last one of each."""
    return {name: value.strip("\"'") for name, value in [*DEFAULT.findall(text), *ASSIGNMENT.findall(text)]}


def _filled(line: str, values: Mapping[str, str]) -> str:
    """Return a line with the variables whose values the script has; `${LR:-0.1}` has its own."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name.startswith("PYTHON"):
            return match[0]
        own = values.get(name, match[3])
        if own is not None and (nested := VARIABLE.fullmatch(own)) and nested[3] is not None:
            own = nested[3].strip("\"'")  # LR=${LR:-0.1}
        return match[0] if own is None or "$" in own else own

    return VARIABLE.sub(value, line)


def _given(setting: ScriptSetting, line: str, arguments: Sequence[str]) -> ScriptSetting:
    """Return a setting with the value that the shell script gives it; what follows on the line wins over that."""
    if not re.search(rf"--{re.escape(setting.name)}(?=[\s=]|$)", line):
        return setting
    values, _ = given_values(arguments, [setting])
    return replace(setting, required=False, default=values.get(setting.name, setting.default))
