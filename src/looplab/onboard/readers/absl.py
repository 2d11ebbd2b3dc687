"""absl flags: `--learning_rate=0.1`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from looplab.onboard.base import MISSING, BooleanStyle, Interface, Kind, Script, ScriptSetting
from looplab.onboard.readers.arguments import flags_interface
from looplab.onboard.source import calls, constant, module_constants

DEFINERS: dict[str, Kind] = {
    "DEFINE_float": "float",
    "DEFINE_integer": "int",
    "DEFINE_bool": "bool",
    "DEFINE_boolean": "bool",
    "DEFINE_string": "str",
    "DEFINE_enum": "str",
}
CONFIGS = ("DEFINE_config_file", "DEFINE_config_dict")
"""Flags of ml_collections: `--config.lr=0.1`."""
TYPES: dict[str, Kind] = {
    "float": "float",
    "int": "int",
    "bool": "bool",
    "string": "str",
    "string enum": "str",
    "str": "str",
}


class AbslReader:
    """Flags of `absl.flags.DEFINE_*`."""

    name = "absl"

    def read(self, script: Script) -> Interface | None:
        if not script.imports & {"absl", "ml_collections", "tensorflow"} or not any(
            True for tree in script.modules for _ in calls(tree, *DEFINERS, *CONFIGS)
        ):
            return None
        reported = script.introspection.of("absl")
        notes: list[str] = []
        if reported is not None:
            settings = [
                replace(
                    _make(
                        option["name"],
                        TYPES.get(option["type"], "unknown"),
                        option["default"],
                        option["choices"],
                        option["help"],
                        required=option["required"],
                    ),
                    low=option.get("low"),
                    high=option.get("high"),
                )
                for option in reported["options"]
            ]
        else:
            settings = list(self._from_source(script))
            notes.append(f"the options come from the source alone: {script.introspection.problem}")
        if not settings:
            return None
        return flags_interface(self.name, script, settings, separator="equals", notes=notes)

    def _from_source(self, script: Script) -> Any:
        for tree in script.modules:
            names = module_constants(tree)
            for call in calls(tree, *DEFINERS):
                words = [constant(item, names) for item in call.args]
                kind = DEFINERS[call.func.attr if hasattr(call.func, "attr") else call.func.id]  # type: ignore[attr-defined]
                if words and isinstance(words[0], str):
                    text = next((word for word in words[2:] if isinstance(word, str)), "")
                    choices = next((word for word in words[2:] if isinstance(word, list)), None)
                    yield _make(words[0], kind, words[1] if len(words) > 1 else MISSING, choices, text)


def _make(name: str, kind: Kind, default: Any, choices: Any, text: str, *, required: bool = False) -> ScriptSetting:
    if kind == "float" and isinstance(default, int) and not isinstance(default, bool):
        default = float(default)
    if isinstance(default, list):
        kind, default = "unknown", MISSING  # several flags, or a text with commas
    known = tuple(choices) if choices else None
    boolean: BooleanStyle | None = "value" if kind == "bool" else None
    return ScriptSetting(name, kind, default, known, text, required=required, boolean=boolean)
