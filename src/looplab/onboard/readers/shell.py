"""Shell scripts that pass their arguments on: `python train.py "$@"`."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from looplab.onboard.base import Interface, Script
from looplab.onboard.source import constant  # noqa: F401

PASSES_ON = re.compile(r'"?\$(@|\*|\{@\}|\{\*\})"?')
PYTHON = re.compile(r"^(?:exec\s+)?(?:\S*/)?python[0-9.]*$")


class ShellReader:
    """A shell script whose Python command gets what the script gets."""

    name = "shell"

    def read(self, script: Script) -> Interface | None:
        if script.python is not None:
            return None
        inner = self._inner(script)
        if inner is None:
            return None
        from looplab.onboard.readers import read_interface

        found = read_interface(inner)
        if found is None:
            return None
        words = tuple(part for part in found.command[len(inner.prefix) :])
        return replace(found, reader=f"shell, then {found.reader}", command=(*script.argv, *words))

    def _inner(self, script: Script) -> Script | None:
        """Return the Python script that the last line with `$@` calls."""
        from looplab.onboard.scripts import find_script

        joined = script.text.replace("\\\n", " ")
        for line in reversed(joined.splitlines()):
            if not PASSES_ON.search(line) or line.lstrip().startswith("#"):
                continue
            try:
                words = shlex.split(PASSES_ON.sub("", line), comments=True)
            except ValueError:
                continue
            while words and not PYTHON.match(words[0]):
                words = words[1:]
            if len(words) > 1:
                words = [word for word in words if "$" not in word]
                return find_script(words, script.folder)
        return None
