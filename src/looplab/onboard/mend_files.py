"""The files that `looplab check --fix` changes: what changes in them, why, and how it is written."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config.files import Document, read_document, write_atomic
from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions


@dataclass(frozen=True, slots=True)
class Fix:
    """One change of a file."""

    file: str
    """Relative to the lab."""
    why: str
    diff: tuple[str, ...]
    """The lines that go (`- …`) and come (`+ …`)."""

    def as_dict(self) -> dict[str, Any]:
        return {"file": self.file, "why": self.why, "diff": list(self.diff)}


@dataclass(frozen=True, slots=True)
class Mending:
    """What can be fixed in a lab, and what a person has to decide."""

    fixes: tuple[Fix, ...]
    doubts: tuple[str, ...]
    files: Mapping[Path, tuple[bytes, bytes]]
    """Content before and after, by file."""

    def apply(self, folder: Path) -> None:
        """Write the fixes; if the lab does not pass its checks afterwards, put the files back.

        Raises:
            LabError: It does not pass.
        """
        for path, (_, new) in self.files.items():
            write_atomic(path, new)
        try:
            lab = load_lab(folder)
            for study in lab.studies.values():
                check_study(lab, study, RunOptions(informal=True))
        except BaseException as error:
            for path, (old, _) in self.files.items():
                write_atomic(path, old)
            if not isinstance(error, LabError):
                raise
            raise LabError(
                f"not everything can be fixed, so nothing was changed: {error.message}", hint=error.hint
            ) from None


class LabFiles:
    """The documents that are changed, and how."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fixes: list[Fix] = []
        self._documents: dict[Path, Document] = {}
        self._before: dict[Path, tuple[str, str]] = {}
        """The current file, and how it would be written without a change."""

    def document(self, path: Path) -> Document:
        if path not in self._documents:
            document = read_document(path)
            self._documents[path] = document
            self._before[path] = (path.read_text(), document.text())
        return self._documents[path]

    def change(self, path: Path, why: str, action: Callable[[Any], None]) -> None:
        """Change the data of a file; a fix is noted if that changes its text."""
        document = self.document(path)
        before = self._text(path)
        action(document.data)
        after = self._text(path)
        lines = changed_lines(before, after)
        if lines:
            name = os.path.relpath(path, self.folder)
            self.fixes.append(Fix(name, why, tuple(lines)))

    def changed(self) -> dict[Path, tuple[bytes, bytes]]:
        found = {}
        for path in self._documents:
            new = self._text(path)
            if new != self._before[path][0]:
                found[path] = (path.read_bytes(), new.encode())
        return found

    def _text(self, path: Path) -> str:
        """Return the text of a document: the lines of the file, except for those that have changed."""
        document = self._documents[path]
        original, unchanged = self._before[path]
        new = document.text()
        if new == unchanged:
            return original
        old_lines, same_lines, new_lines = (text.splitlines(keepends=True) for text in (original, unchanged, new))
        if len(old_lines) != len(same_lines):
            return new
        result: list[str] = []
        matcher = difflib.SequenceMatcher(None, same_lines, new_lines, autojunk=False)
        for tag, start, end, first, last in matcher.get_opcodes():
            result += old_lines[start:end] if tag == "equal" else new_lines[first:last]
        return "".join(result)


def changed_lines(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line.rstrip() for line in lines if line.startswith(("- ", "+ "))]
