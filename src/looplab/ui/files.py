"""Logs and files of runs for the page: bounded, inside their folder, without secrets and the held-out metric."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.discover import kind_of
from looplab.runs.folder import PRIVATE, RECORD, record_name
from looplab.runs.redact import is_secret_file, redact_text
from looplab.runs.tree import open_parent
from looplab.untrusted import READING, clean_text, mend_text

LOG_BYTES = 256 << 10
"""Bytes of a log in one answer."""
TAIL_BYTES = 64 << 10
"""Bytes from the end with which a log begins."""
TEXT_BYTES = 256 << 10
PICTURE_BYTES = 8 << 20
MAX_FILES = 400
MAX_DEPTH = 4
HIDDEN_LINE = "[a line with the held-out metric is not shown]"
PICTURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
"""Pictures by their first bytes; what a name says does not count."""


class HeldOutFilter:
    """Removes the lines of a text that name the held-out metric of a study, however its name is punctuated."""

    def __init__(self, study: StudyConfig) -> None:
        self._pattern: re.Pattern[str] | None = None
        if study.holdout is not None:
            words = re.findall(r"[^\W_]+", study.holdout.metric)
            joined = r"[\W_]{0,3}".join(map(re.escape, words)) or re.escape(study.holdout.metric)
            self._pattern = re.compile(rf"(?<![^\W_]){joined}(?![^\W_])", re.IGNORECASE)

    @property
    def is_active(self) -> bool:
        """Whether the study has a held-out metric."""
        return self._pattern is not None

    def names(self, text: str) -> bool:
        """Return whether a text names the metric."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def clean(self, text: str) -> str:
        """Return the text without those lines."""
        if self._pattern is None:
            return text
        return "\n".join(HIDDEN_LINE if self.names(line) else line for line in text.split("\n"))


def shown_text(raw: bytes, hidden: HeldOutFilter) -> str:
    """Return bytes of a log or file as text that may be shown: a progress bar in its last state, without secrets,
    terminal codes and the held-out metric."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in raw.decode("utf-8", "replace").split("\n"))
    return hidden.clean(redact_text(clean_text("\n".join(lines))))


def read_log(run_dir: Path, begin: int | None, *, is_over: bool, hidden: HeldOutFilter) -> dict[str, Any]:
    """Return the next complete lines of a run's log.

    Args:
        begin: Offset to continue from; None: near the end.
        is_over: Whether the run has ended, so that a last line without its newline is complete.
    """
    try:
        with _open_inside(run_dir, record_name(run_dir, "train.log")) as file:
            size = os.fstat(file).st_size
            is_new = begin is None or begin > size or begin < 0
            start = max(0, size - TAIL_BYTES) if begin is None or is_new else begin
            data = os.pread(file, LOG_BYTES, start)
    except (OSError, LabError):
        return {"text": "", "next": 0, "start": 0, "size": 0, "reset": begin not in (None, 0), "more": False}
    if is_new and start:
        skipped = data.find(b"\n") + 1
        data, start = data[skipped:], start + skipped
    is_end = start + len(data) >= size
    whole = len(data) if is_over and is_end else data.rfind(b"\n") + 1
    if not whole and len(data) == LOG_BYTES:  # no line is that long: a secret in it could be cut in two
        return {"text": "[a very long line is not shown]\n", "next": start + len(data), "start": start, "size": size,
                "reset": is_new, "more": not is_end}  # fmt: skip
    text = shown_text(data[:whole], hidden)
    return {"text": text, "next": start + whole, "start": start, "size": size, "reset": is_new, "more": not is_end}


def list_files(root: Path) -> list[dict[str, Any]]:
    """Return names, sizes and times of the files below a folder, without links."""
    found: list[dict[str, Any]] = []
    for path, status in _walk(root, 0):
        name = mend_text(os.path.relpath(path, root))
        found.append({"name": name, "bytes": status.st_size, "at": status.st_mtime})
        if len(found) >= MAX_FILES:
            break
    return sorted(found, key=lambda one: (one["name"].startswith(RECORD + "/"), one["name"]))


def _walk(place: str | Path, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with os.scandir(place) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)[: 2 * MAX_FILES]
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH and not entry.name.startswith("."):
                    yield from _walk(entry.path, depth + 1)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path, entry.stat(follow_symlinks=False)
        except OSError:
            continue


@dataclass(frozen=True, slots=True)
class ShownFile:
    """The content of a file as the page gets it."""

    media: str
    """`text/plain`, or the type of a picture by its content."""
    content: bytes


def read_file(root: Path, name: str, hidden: HeldOutFilter) -> ShownFile:
    """Return a file below a folder: a picture, or the beginning of a text.

    Raises:
        LabError: There is no such file inside the folder, or it may not be shown.
    """
    base = name.rpartition("/")[2]
    if is_secret_file(base):
        raise LabError(f"{name} is not shown: its name says that it has secrets")
    if hidden.is_active and kind_of(base) is not None and base != "train.log":
        raise LabError(f"{name} is not shown: it may have the held-out metric in it")
    try:
        with _open_inside(root, name) as file:
            status = os.fstat(file)
            if name.startswith(RECORD + "/") and stat.S_IMODE(status.st_mode) == PRIVATE:
                raise LabError(f"{name} is not shown: it has secrets")
            head = os.pread(file, 16, 0)
            media = next((media for magic, media in PICTURES.items() if head.startswith(magic)), None)
            if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
                media = "image/webp"
            if media is not None:
                if status.st_size > PICTURE_BYTES:
                    raise LabError(f"{name} is not shown: it is larger than {PICTURE_BYTES >> 20} MB")
                return ShownFile(media, os.pread(file, PICTURE_BYTES, 0))
            data = os.pread(file, TEXT_BYTES, 0)
    except OSError as error:
        raise LabError(f"{name} cannot be read: {error.strerror}") from None
    if b"\0" in data:
        raise LabError(f"{name} is neither a text nor a picture")
    is_cut = status.st_size > len(data)
    if is_cut:
        data = data[: data.rfind(b"\n") + 1]
    if base != "train.log" and hidden.names(data.decode("utf-8", "replace")):  # its values may be on other lines
        raise LabError(f"{name} is not shown: the held-out metric is in it")
    note = f"\n[cut: the file has {status.st_size:,} bytes]" if is_cut else ""
    return ShownFile("text/plain; charset=utf-8", (shown_text(data, hidden) + note).encode("utf-8", "replace"))


@contextlib.contextmanager
def _open_inside(root: Path, name: str) -> Iterator[int]:
    """Open a regular file below a folder, without following links, and yield its descriptor."""
    with open_parent(root, name) as (parent, last):
        file = os.open(last, READING | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise LabError(f"{name} is not a file")
        yield file
    finally:
        os.close(file)
