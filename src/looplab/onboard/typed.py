"""What a person typed after a script: values of its settings, and words that stay unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from looplab.onboard.base import MISSING, ScriptSetting
from looplab.onboard.knobs import suggest

BOOLEANS = {"1", "0", "true", "false", "yes", "no", "on", "off"}


def given_values(words: Sequence[str], settings: Sequence[ScriptSetting]) -> tuple[dict[str, Any], list[str]]:
    """Split what a person typed after the script into values of settings and words that stay unchanged."""
    by_flag = _by_flag(settings)
    by_word = {setting.word: setting for setting in settings if setting.word is not None}
    positional = [setting for setting in settings if setting.positional]
    values: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, sign, text = word.partition("=")
        setting, on = next(
            (by_flag[way] for way in (flag, flag.replace("_", "-"), _snake(flag)) if way in by_flag), (None, True)
        )
        if setting is None and positional and not word.startswith("-") and positional[0].kind != "unknown":
            first = positional.pop(0)
            values[first.name] = _parse(word, first)
            continue
        if setting is None:
            rest.append(word)
            continue
        takes = not sign and setting.boolean not in ("present", "absent", "switch")
        if setting.kind == "bool":
            takes = takes and bool(queue) and queue[0].lower() in BOOLEANS
        several = setting.spread and takes
        taken: list[str] = []
        while takes and queue and not _is_flag(queue[0], by_flag) and (several or not taken):
            taken.append(queue.pop(0))
        value: Any
        if setting.kind == "bool" and not sign and not taken:
            value = on
        elif several:
            value = [_number(item) for item in taken]
            if setting.kind in ("int", "float") and len(value) == 1:
                value = value[0]
        else:
            value = _parse(text if sign else "".join(taken[:1]), setting)
        # A required option has no default; its type follows from the typed value.
        known = setting if setting.default not in (MISSING, None) else replace(setting, default=value)
        if setting.kind == "unknown" or suggest(known).role == "other":
            rest += [word, *taken]
        else:
            values[setting.name] = value
    for i, word in enumerate(rest):
        held = by_word.get("".join(re.split("([:=])", word, maxsplit=1)[:2]))
        if held is not None:
            values[held.name], rest[i] = held.default, f"{held.word}{{config.{held.name}}}"
    return values, rest


def _by_flag(settings: Sequence[ScriptSetting]) -> dict[str, tuple[ScriptSetting, bool]]:
    """Return the setting of each flag, and for a bool what the flag makes of it."""
    found: dict[str, tuple[ScriptSetting, bool]] = {}
    for setting in settings:
        if setting.positional:
            continue
        if setting.boolean in ("switch", "absent"):
            parent, dot, last = setting.name.rpartition(".")
            found[setting.off or f"--{parent}{dot}no-{last}"] = (setting, False)
        if setting.boolean != "absent":
            for flag in (setting.flag or f"--{setting.name}", *setting.aliases):
                found[flag] = (setting, True)
    return found


def _snake(flag: str) -> str:
    dashes = len(flag) - len(flag.lstrip("-"))
    return flag[:dashes] + flag[dashes:].replace("-", "_")


def _is_flag(word: str, known: Mapping[str, Any]) -> bool:
    """Return whether a word is a flag, rather than a negative number or another value."""
    return word.startswith("--") or word.partition("=")[0] in known


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parse(text: str, setting: ScriptSetting) -> Any:
    try:
        if setting.kind == "int":
            return int(text)
        if setting.kind == "float":
            return float(text)
    except ValueError:
        return text
    if setting.kind == "bool":
        return text.lower() in ("1", "true", "yes", "on")
    return text
