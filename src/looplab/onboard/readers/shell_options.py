"""Shell scripts with options of their own: `getopts "l:e:" opt`, `while … case $1 in --lr) LR=$2`."""

from __future__ import annotations

import re

from looplab.onboard.base import Interface, Script, ScriptSetting
from looplab.onboard.readers.arguments import flags_interface
from looplab.onboard.readers.environment import parse_number
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.readers.shell import assigned_values

PATTERN = r"-{0,2}[A-Za-z][\w-]*=?\*?"
VALUE = r"[\"']?\$(?:OPTARG|2|\{OPTARG\}|\{2\}|\{(?:1|i|arg)#\*=\})"
BRANCH = re.compile(
    rf"^[ \t]*\(?[\"']?(?P<flags>{PATTERN}(?:[\"']?[ \t]*\|[ \t]*[\"']?{PATTERN})*)[\"']?[ \t]*\)\s*"
    rf"(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)={VALUE}",
    re.MULTILINE,
)
"""A branch of `case` in which a variable gets the value of an option."""
GETOPTS = re.compile(r"\bgetopts[ \t]+[\"']?:?([A-Za-z0-9:]+)")


class ShellOptionsReader:
    """Options that a shell script puts into variables, with the values that it gives them first."""

    name = "shell options"

    def read(self, script: Script) -> Interface | None:
        if script.python is not None:
            return None
        values = assigned_values(BRANCH.sub("", script.text))
        letters = "".join(GETOPTS.findall(script.text))
        settings: dict[str, ScriptSetting] = {}
        joined = False
        for match in BRANCH.finditer(script.text):
            words = re.split(r"[\"'\s|]+", match["flags"])
            flags = [f"-{word}" if f"{word}:" in letters else word.rstrip("=*") for word in words]
            flags = sorted((flag for flag in flags if flag.startswith("-")), key=lambda flag: not flag.startswith("--"))
            default = parse_number(values.get(match["name"], "$"))
            if not flags or default == "" or (isinstance(default, str) and "$" in default):
                continue
            joined = joined or "#*=" in match[0]
            name = flags[0].lstrip("-") if flags[0].startswith("--") else match["name"]
            flag = None if flags[0] == f"--{name}" else flags[0]
            settings.setdefault(
                name, ScriptSetting(name, kind_of(default), default, flag=flag, aliases=tuple(flags[1:]))
            )
        if not settings:
            return None
        separator = "equals" if joined else "space"
        return flags_interface(self.name, script, list(settings.values()), separator=separator)
