"""Scripts with several commands, `cli.py --seed 1 train --lr 0.1`: the one that trains, and the options before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting, flag_rendering
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.arguments import FIRST_SEED
from looplab.onboard.typed import given_values

SHOWN = 8
"""Commands of a program that are listed."""


@dataclass(frozen=True, slots=True)
class Level:
    """A program or a command of it: its own options, and the command that follows them."""

    settings: Sequence[ScriptSetting]
    command: str | None = None
    """None: it is the last."""
    typed: Sequence[str] = ()
    """What a person typed for it."""


def best_command(names: Sequence[str]) -> str:
    """Return the command that trains, by its name."""
    for wanted in ("train", "fit", "run", "learn"):
        for name in names:
            if wanted in name.lower():
                return name
    return names[0]


def name_commands(commands: Collection[str], chosen: str) -> str:
    """Return a sentence about the commands of a program, and the one that the lab calls."""
    shown = list(commands)[:SHOWN]
    more = f" and {len(commands) - SHOWN} more" if len(commands) > SHOWN else ""
    return f"its commands are {', '.join(shown)}{more}; the lab calls `{chosen}`"


def split_at_command(words: Sequence[str], commands: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the words before the first command, the command (None: none was typed), and the words after it."""
    at = next((i for i, word in enumerate(words) if word in commands), None)
    return ([], None, list(words)) if at is None else (list(words[:at]), words[at], list(words[at + 1 :]))


def commands_interface(
    reader: str, script: Script, levels: Sequence[Level], *, separator: str = "space", notes: Sequence[str] = ()
) -> Interface:
    """Return the interface of a script with commands.

    Options must be written before the command that follows their level, so one level has them as `{flags}`: that with
    the most. Of the others, the seed and the numbers that matter are words of their own: `--seed {config.seed}`.
    """
    chosen = max(range(len(levels)), key=lambda index: (len(levels[index].settings), index))
    names = {setting.name for setting in levels[chosen].settings}
    words: list[str] = []
    leading: list[str] = []
    elsewhere: list[ScriptSetting] = []
    for index, level in enumerate(levels):
        if index == chosen:
            leading = list(words)
            words += [f"{{config.{setting.name}}}" for setting in level.settings if setting.positional]
            words.append("{flags}")
        else:
            values, rest = given_values(level.typed, level.settings)
            known = [_in_words(replace(one, default=values.get(one.name, one.default))) for one in level.settings]
            mine = [one for one in known if one is not None and one.name not in names]
            words += rest
            for setting in mine:
                words += [setting.flag or f"--{setting.name}", f"{{config.{setting.name}}}"]
                names.add(setting.name)
            elsewhere += mine
        words += [level.command] if level.command is not None else []
    main = levels[chosen]
    rendering = flag_rendering(main.settings, separator=separator)
    skipped = [setting.name for setting in (*elsewhere, *main.settings) if setting.positional or setting in elsewhere]
    if skipped:
        rendering["skip"] = skipped
    return Interface(
        reader,
        (*main.settings, *elsewhere),
        (*script.prefix, *words),
        rendering,
        notes=tuple(notes),
        leading=tuple(leading),
        typed=tuple(main.typed),
    )


def _in_words(setting: ScriptSetting) -> ScriptSetting | None:
    """Return a setting that can be a word of the command with a place for its value; None: it is left as it is."""
    role = suggest(setting).role
    if role == "seed" and setting.default in (None, MISSING):
        setting = replace(setting, default=FIRST_SEED)
    is_wanted = role in ("seed", "knob") or (role == "length" and setting.default != 0)
    if not is_wanted or setting.positional or setting.kind == "bool" or setting.spread:
        return None
    return None if setting.default in (None, MISSING) else setting
