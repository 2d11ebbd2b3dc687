"""The lab book: one line per action, `UTC | action | observation | outcome | next`. People may write in it, too."""

from __future__ import annotations

import os
import re
import stat
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from looplab.runs.folder import put_aside
from looplab.untrusted import UntrustedError, clean_text, open_own, open_regular

NAME = "labbook.md"
HEAD = "# Lab book of {study}\n\nUTC | action | observation | outcome | next\n"


_TAG_OR_LINK = re.compile(r"<(?=[A-Za-z/!?])|(?<=\])\(")


def _cell(text: str) -> str:
    """Return text on one line, escaped so that it adds no column, HTML or link."""
    text = " ".join(clean_text(text).replace("|", "/").split()) if text else ""
    if "<" in text or "](" in text:
        text = _TAG_OR_LINK.sub(r"\\\g<0>", text)
    return text or "-"


@lru_cache(maxsize=8)
def _stamp(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def line(at: float, action: str, observation: str, outcome: str, next_: str) -> str:
    """Return one line of the lab book."""
    return "- " + " | ".join([_stamp(int(at)), *map(_cell, (action, observation, outcome, next_))])


def append(study_dir: Path, study: str, lines: list[str]) -> None:
    """Append lines in one write; existing lines are never changed.

    The study's folder is not created: it may have been moved.
    """
    path = study_dir / NAME
    text = "".join(entry + "\n" for entry in lines)
    if not _is_regular(path):
        if os.path.lexists(path) and not path.is_file():  # a folder or a pipe, which would block the engine
            put_aside(path)
        text = HEAD.format(study=study) + "\n" + text
    descriptor = open_own(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def missing(study_dir: Path, names: list[str], what: str = "run") -> list[str]:
    """Return the names, of ended runs or other things, that have no line yet.

    An engine may die between the record and the lab book.
    """
    try:
        with open_regular(study_dir / NAME) as file:
            text = file.read().decode("utf-8", "replace")
    except (FileNotFoundError, UntrustedError):
        return names
    return [name for name in names if f"| {what} {name} " not in text]  # alarms have a colon there
