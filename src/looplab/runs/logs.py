"""Logs of any size as text, in portions or only the last lines, with secrets hidden."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from looplab.runs.redact import redact_text
from looplab.untrusted import UntrustedError, clean_text, open_regular

PORTION = 1 << 20
LONGEST_PART = 1 << 20
"""Maximum number of characters of an incomplete line."""
BLOCK = 1 << 16
TAIL_LINES, TAIL_BYTES = 20, 1 << 16
LONGEST_END = 16 << 20
"""Bytes at the end of a log that are searched for its last lines."""


class LogStream:
    """A growing log, from the current position of its file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be split between two writes
        self._rest = ""

    def portions(self, *, final: bool) -> Iterator[str]:
        """Yield the new text up to the current end of the file.

        An incomplete last line is held back until it is complete or the file stops growing, so that a secret in it is
        not cut in two.

        Args:
            final: Whether nothing more will be written.
        """
        grown = False
        while data := self._file.read(PORTION):
            grown = True
            text = self._rest + self._decoder.decode(data)
            complete = max(text.rfind("\n"), text.rfind("\r")) + 1
            if not complete and len(text) > LONGEST_PART:  # too long for a line: cut it between two words
                complete = text.rfind(" ") + 1 or len(text)
            self._rest = text[complete:]
            if complete:
                yield redact_text(text[:complete])
        if final or not grown:
            text, self._rest = self._rest + self._decoder.decode(b"", final), ""
            if text:
                yield redact_text(text)


def seek_last_lines(file: BinaryIO, lines: int) -> None:
    """Seek to the start of the last lines, reading only the end of the file."""
    size = file.seek(0, os.SEEK_END)
    end = b""
    while lines and len(end) < min(size, LONGEST_END) and len(end.splitlines()) <= lines:
        block = min(size - len(end), max(BLOCK, len(end)))
        file.seek(size - len(end) - block)
        end = file.read(block) + end
    last_lines = end.splitlines(keepends=True)[-lines:] if lines else []
    file.seek(size - sum(map(len, last_lines)))


def read_tail(log: Path, lines: int = TAIL_LINES, *, start: int = 0) -> str:
    """Return the last lines of a log as a terminal shows them (a progress bar in its last state); empty: no log.

    Args:
        start: Offset of the part of the log that is looked at.
    """
    try:
        with open_regular(log, follow=False) as file:
            begin = file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except (OSError, UntrustedError):
        return ""
    if begin > start:
        text = text.partition("\n")[2] or text
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")[-lines:]]
    return "\n".join(redact_text(clean_text(line)).rstrip() for line in shown)
