"""fire: the parameters of a function as `--name=value`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.readers.arguments import flags_interface
from looplab.onboard.readers.commands import Level, best_command, commands_interface, name_commands, split_at_command
from looplab.onboard.readers.dataclass import tyro_setting
from looplab.onboard.source import calls, constant, module_constants


class FireReader:
    """Parameters of what is passed to `fire.Fire`."""

    name = "fire"

    def read(self, script: Script) -> Interface | None:
        if "fire" not in script.imports:
            return None
        reported = script.introspection.of("fire")
        notes: list[str] = []
        before: list[Level] = []
        words: Sequence[str] = script.arguments
        options: list[dict[str, Any]] = list(reported["options"]) if reported is not None else []
        commands = (reported or {}).get("commands") or []
        if commands and reported is not None:
            typed, command, words = split_at_command(words, commands)
            command = command or best_command(commands)
            options, before = reported["sub"][command], [Level([], command, typed)]
            notes.append(name_commands(commands, command))
        elif not options:
            options = list(_from_source(script))
            if script.introspection.problem:
                notes.append(f"the options come from the source alone: {script.introspection.problem}")
        settings = []
        for option in options:
            setting = tyro_setting(option)
            settings.append(
                ScriptSetting(
                    option["name"],
                    setting.kind,
                    setting.default,
                    setting.choices,
                    setting.help,
                    required=setting.required,
                    boolean="value" if setting.kind == "bool" else None,
                )
            )
        if not settings:
            return None
        if before:
            levels = [*before, Level(settings, None, words)]
            return commands_interface(self.name, script, levels, separator="equals", notes=notes)
        return flags_interface(self.name, script, settings, separator="equals", notes=notes)


def _from_source(script: Script) -> Any:
    for tree in script.modules:
        names = module_constants(tree)
        wanted = {arg.id for call in calls(tree, "Fire") for arg in call.args if isinstance(arg, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + [*node.args.defaults]
                for parameter, default in zip(node.args.args, defaults, strict=True):
                    value = constant(default, names)
                    yield {
                        "name": parameter.arg,
                        "type": ast.unparse(parameter.annotation) if parameter.annotation else None,
                        "default": None if value is MISSING else value,
                        "choices": None,
                        "required": default is None,
                        "help": "",
                    }
