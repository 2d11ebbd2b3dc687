"""Logs of any size as text: in portions, or the last lines alone, with secrets hidden."""

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
"""Characters of a line that is not yet whole."""
BLOCK = 1 << 16
TAIL_LINES, TAIL_BYTES = 20, 1 << 14
LONGEST_END = 16 << 20
"""Bytes at the end of a log in which its last lines are looked for."""


class LogStream:
    """A log that grows, from the present position of its file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may be written in two parts
        self._rest = ""

    def portions(self, *, final: bool) -> Iterator[str]:
        """Yield the new text up to the present end of the file.

        The end of a line that is not yet whole waits until it is, or until nothing more comes: a secret in it must not
        be cut in two.

        Args:
            final: Whether nothing more will be written.
        """
        grown = False
        while data := self._file.read(PORTION):
            grown = True
            text = self._rest + self._decoder.decode(data)
            whole = max(text.rfind("\n"), text.rfind("\r")) + 1
            if not whole and len(text) > LONGEST_PART:  # not a line: it may be cut between two words
                whole = text.rfind(" ") + 1 or len(text)
            self._rest = text[whole:]
            if whole:
                yield redact_text(text[:whole])
        if final or not grown:
            text, self._rest = self._rest + self._decoder.decode(b"", final), ""
            if text:
                yield redact_text(text)


def seek_last_lines(file: BinaryIO, lines: int) -> None:
    """Go to where the last lines begin, reading no more than the end of the file."""
    size = file.seek(0, os.SEEK_END)
    end = b""
    while lines and len(end) < min(size, LONGEST_END) and len(end.splitlines()) <= lines:
        block = min(size - len(end), max(BLOCK, len(end)))
        file.seek(size - len(end) - block)
        end = file.read(block) + end
    kept = end.splitlines(keepends=True)[-lines:] if lines else []
    file.seek(size - sum(map(len, kept)))


def read_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log as a person saw them: of a progress bar, its last state. Empty without a log."""
    try:
        with open_regular(log, follow=False) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except (OSError, UntrustedError):
        return ""
    if size > TAIL_BYTES:
        text = text.partition("\n")[2] or text
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")[-lines:]]
    return "\n".join(redact_text(clean_text(line)).rstrip() for line in shown)
