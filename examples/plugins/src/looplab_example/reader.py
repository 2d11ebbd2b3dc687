"""A reader: scripts that take their settings as `-Dlr=0.1`, with a table of defaults."""

from __future__ import annotations

import ast

from looplab.onboard.base import Interface, Kind, Script, ScriptSetting

KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}


class DefineReader:
    """`DEFAULTS = {"lr": 0.1}` in a script that looks for words with `-D`."""

    name = "define"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None or "'-D'" not in ast.unparse(script.tree):
            return None
        for node in script.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULTS":
                values = ast.literal_eval(node.value)
                settings = tuple(ScriptSetting(key, KINDS[type(value)], value) for key, value in values.items())
                names = {key: f"-D{key}" for key in values}
                rendering = {"as": "flags", "booleans": "value", "separator": "equals", "names": names}
                return Interface(self.name, settings, (*script.prefix, "{flags}"), rendering)
        return None
