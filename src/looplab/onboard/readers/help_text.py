"""What `--help` prints, for command lines that no other reader knows: docopt, cyclopts, a parser of one's own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from looplab.onboard.base import MISSING, BooleanStyle, Interface, Script, ScriptSetting
from looplab.onboard.readers.arguments import flags_interface, settings_of
from looplab.onboard.readers.environment import parse_number
from looplab.onboard.readers.hydra import kind_of

OPTION = re.compile(
    r"(?:-\w[ ,=]\s*(?:<?\w+>?[ ,]\s*)?)?(?P<flag>--[A-Za-z][\w.-]*)(?:[ =]\[?(?:<[^<>]+>|[A-Z][A-Z0-9_]*)\]?)?"
)
DEFAULT = re.compile(r"(?i)[\[(]\s*(?:[^()\[\]]*,\s*)?default(?:s to)?\s*[:=]?\s*(?P<value>[^\])]+?)\s*[\])]")
CHOICES = re.compile(r"(?i)[\[({]\s*choices:?\s*(?P<values>[^\])}]+?)\s*[\])}]")
BORDER = re.compile(r"^[\s│┃|*]+|[\s│┃|]+$")
MAX_LINES = 2_000
BOOLEANS = {"true": True, "false": False}


class HelpTextReader:
    """Options in the text of `--help` that have a default there. It is asked last: a text says little about types."""

    name = "--help"

    def read(self, script: Script) -> Interface | None:
        if script.python is None:
            return None
        output = script.first_output
        options = [option for parser in output.parsers for option in parser.get("options", ()) if "dest" in option]
        settings = settings_of(options) if options else list(_settings(output.printed))
        return flags_interface(self.name, script, settings) if settings else None


def _settings(printed: str) -> Iterator[ScriptSetting]:
    """Yield the options of a help text that have a default."""
    entries: list[tuple[re.Match[str], str]] = []
    for line in printed.splitlines()[:MAX_LINES]:
        text = BORDER.sub("", line)
        if (option := OPTION.match(text)) is not None:
            entries.append((option, text))
        elif entries and text and line[:1] in (" ", "\t", "│", "┃", "|"):
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {text}")  # its help continues
        elif entries and not text:
            entries.append((entries[-1][0], ""))
    seen: set[str] = set()
    for option, text in entries:
        name = option["flag"][2:]
        default = DEFAULT.search(text)
        if default is None or name in seen or name in ("help", "version"):
            continue
        seen.add(name)
        yield _setting(name, option, text, default["value"].strip("'\""))


def _setting(name: str, option: re.Match[str], text: str, default: str) -> ScriptSetting:
    about = DEFAULT.sub("", CHOICES.sub("", text[option.end() :]))
    about = " ".join(re.sub(r"^(?:\s*--?[\w-]+,?)+", "", about).split()).removesuffix(" .")
    if default.lower() in BOOLEANS:
        boolean: BooleanStyle = "switch" if f"--no-{name}" in text else "value"
        return ScriptSetting(name, "bool", BOOLEANS[default.lower()], help=about, boolean=boolean)
    value = parse_number(default)
    choices = CHOICES.search(text)
    known = tuple(word.strip(" '\"") for word in re.split(r"[,|]", choices["values"])) if choices is not None else None
    if value in ("", "None", "none", "null"):
        value = MISSING
    return ScriptSetting(name, "unknown" if value is MISSING else kind_of(value), value, known, about)
