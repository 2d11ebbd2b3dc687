"""Scripts without a command line: constants at the top of the file, or one table of them.

Such a script is started by a small program in the lab, which replaces the constants by the values of the run's config
and leaves the file as it is.
"""

from __future__ import annotations

import ast
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.readers.hydra import kind_of, settings_in
from looplab.onboard.source import constant, module_constants

RUNNER = "with_config.py"
"""Name of the small program in the lab."""


class ConstantsReader:
    """Upper-case constants, and tables such as `CONFIG = {…}`."""

    name = "constants"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None or script.python is None:
            return None
        base: dict[str, Any] = {
            name: value
            for name, value in module_constants(script.tree).items()
            if not name.startswith("_") and isinstance(value, bool | int | float | str)
        }
        base |= tables(script.tree)
        settings = tuple(settings_in(base))
        if not any(setting.kind in ("int", "float") for setting in settings):
            return None
        command = (script.python, RUNNER, "{config}", *script.argv[1:])
        note = f"the script has no options: {RUNNER} sets its constants, and the file stays as it is"
        return Interface(self.name, settings, command, {"as": "file"}, base=base, notes=(note,))


def tables(tree: ast.Module) -> dict[str, dict[str, Any]]:
    """Return the dicts of constants that a module binds at its top level."""
    names = module_constants(tree)
    found: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict):
            table = _dict(node.value, names)
            if table:
                found[node.targets[0].id] = table
    return found


def _dict(node: ast.Dict, names: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = constant(key)
        if not isinstance(name, str):
            continue
        if isinstance(value, ast.Dict):
            inner = _dict(value, names)
            if inner:
                found[name] = inner
        elif (known := constant(value, names)) is not MISSING and isinstance(known, bool | int | float | str):
            found[name] = known
    return found


__all__ = ["RUNNER", "ConstantsReader", "ScriptSetting", "kind_of", "tables"]
