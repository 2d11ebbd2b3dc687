"""Makefiles: the variables of a target's recipe, which `make train LR=0.1` replaces."""

from __future__ import annotations

import re

from looplab.onboard.base import Interface, Script, ScriptSetting
from looplab.onboard.readers.environment import parse_number
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.scripts import MAKE

ASSIGNMENT = re.compile(
    r"^(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*(?::{1,3}|\?)?=[ \t]*([^#\n]*?)[ \t]*(?:#.*)?$", re.MULTILINE
)
RULE = re.compile(r"^([^\s:#=][^:#=\n]*):(?!=)([^\n]*)((?:\n\t[^\n]*|\n[ \t]*(?=\n\t))*)", re.MULTILINE)
VARIABLE = re.compile(r"\$[({]([A-Za-z_]\w*)[)}]")


class MakefileReader:
    """Variables with constant values, in the recipes of the targets that were typed and of what they depend on."""

    name = "Makefile"

    def read(self, script: Script) -> Interface | None:
        if script.argv[0] not in MAKE:
            return None
        text = script.text.replace("\\\n", " ")
        rules = {
            target: (inputs.split(), recipe)
            for targets, inputs, recipe in RULE.findall(text)
            for target in targets.split()
        }
        targets = [word for word in script.arguments if word in rules]
        recipe = ""
        for target in targets:  # it grows
            inputs, own = rules[target]
            recipe += own
            targets += [name for name in inputs if name in rules and name not in targets]
        values = dict(ASSIGNMENT.findall(text))
        used: dict[str, None] = {}
        queue = VARIABLE.findall(recipe)
        while queue:
            name = queue.pop(0)
            if name not in used and name in values:
                used[name] = None
                queue += VARIABLE.findall(values[name])
        typed = dict(word.split("=", 1) for word in script.arguments if "=" in word)
        known = {name: parse_number(typed.get(name, values[name])) for name in used}
        settings = [
            ScriptSetting(name, kind_of(value), value)
            for name, value in known.items()
            if isinstance(value, int | float)
        ]
        if not settings:
            return None
        numbers = {setting.name for setting in settings}
        kept = [word for word in script.arguments if word.partition("=")[0] not in numbers]
        base = {setting.name: setting.default for setting in settings}
        command = (*script.prefix, *kept, "{overrides}")
        return Interface(self.name, tuple(settings), command, {"as": "hydra", "only": "all"}, base=base)
