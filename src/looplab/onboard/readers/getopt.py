"""getopt: long options by name, defaults in the variables of the same names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.readers.arguments import flags_interface
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import calls, constant

FUNCTIONS = ("getopt", "gnu_getopt")


class GetoptReader:
    """`getopt.getopt(sys.argv[1:], "l:", ["lr=", "epochs="])`."""

    name = "getopt"

    def read(self, script: Script) -> Interface | None:
        if "getopt" not in script.imports:
            return None
        first = _first_constants(script)
        settings = []
        for name in long_options(script):
            value = first.get(name.replace("-", "_"), MISSING)
            if value is not MISSING and value is not None:
                settings.append(ScriptSetting(name, kind_of(value), value))
        settings = [setting for setting in settings if setting.kind in ("int", "float", "str")]
        return flags_interface(self.name, script, settings) if settings else None


def long_options(script: Script) -> Iterator[str]:
    """Yield the long options that take a value."""
    for tree in script.modules:
        for call in calls(tree, *FUNCTIONS):
            for item in call.args[2:3]:
                names = constant(item)
                yield from (
                    name[:-1]
                    for name in (names if isinstance(names, list) else ())
                    if isinstance(name, str) and name.endswith("=")
                )


def _first_constants(script: Script) -> dict[str, Any]:
    """Return the constants that variables of the script are bound to first, wherever that is."""
    found: dict[str, Any] = {}
    for tree in script.modules:
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        for node in sorted(assigned, key=lambda node: node.lineno):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for one, value in pairs:
                    if isinstance(one, ast.Name) and one.id not in found and constant(value) is not MISSING:
                        found[one.id] = constant(value)
    return found
