"""Find secrets that were recorded by mistake, and remove them from files.

Nothing can be removed from the chain of events without breaking it. A secret in it must be revoked.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.ledger.catalogue import ScrubbedEvent
from looplab.ledger.ledger import Ledger
from looplab.runs.folder import RECORD, hash_file
from looplab.runs.redact import known_secrets, redact_bytes, redact_data, redact_text, remember
from looplab.untrusted import UntrustedError, open_regular

ROOTS = ("outputs", ".looplab", "agent_runs")
SHAPED = "it looks like a secret"
CHUNK = 4 << 20
OVERLAP = 1 << 16
"""Bytes that are searched twice, because a secret may cross the border of two chunks."""
PEEK = 1 << 13
"""Bytes at the start of a file that are checked for NUL, the sign of a binary file."""


@dataclass(frozen=True, slots=True)
class Leak:
    """A secret in a file or in the ledger, without its value."""

    what: str
    """file | binary | table | event"""
    where: str
    """The file relative to the lab, or the table and the row."""
    why: str
    """How it was recognised."""


class SecretFinder:
    """Recognises secrets: those of an environment, explicit values, and everything that looks like one."""

    def __init__(self, env: Mapping[str, str], values: Mapping[str, str] | None = None) -> None:
        """`values`: further secrets, by their label in a report."""
        self._labels: dict[str, str] = {}
        for label, value in (values or {}).items():
            self._labels[value] = f"the value of {label}"
        for name, value in env.items():
            for secret in known_secrets({name: value}):
                self._labels[os.fsdecode(secret)] = f"the value of ${name}"
        remember(env, self._labels)

    def look_at_text(self, text: str) -> str | None:
        """Return how a secret in the text is recognised; None if there is none."""
        for value, label in self._labels.items():
            if value in text:
                return label
        if redact_text(text) != text:
            return SHAPED
        if text[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                data = json.loads(text)
                if redact_data(data) != data:
                    return SHAPED
        return None

    def look_at_bytes(self, data: bytes, *, binary: bool) -> str | None:
        for value, label in self._labels.items():
            if os.fsencode(value) in data:
                return label
        return None if binary or redact_bytes(data) == data else SHAPED


def find_leaks(ledger: Ledger | None, lab: Path, finder: SecretFinder) -> Iterator[Leak]:
    """Search the ledger and all files that looplab and trainers have written."""
    if ledger is not None:
        yield from _in_ledger(ledger, finder)
    running = set() if ledger is None else _running_configs(ledger, lab)
    for root in ROOTS:
        for path in _files_below(lab / root):
            if path not in running:
                yield from _in_file(path, lab, finder)


def _in_ledger(ledger: Ledger, finder: SecretFinder) -> Iterator[Leak]:
    tables = [row["name"] for row in ledger.rows("SELECT name FROM sqlite_master WHERE type='table' ORDER BY name")]
    for table in tables:
        for row in ledger.execute(f'SELECT rowid AS at_row, * FROM "{table}"'):  # noqa: S608 (the ledger's own tables)
            for value in tuple(row)[1:]:
                why = finder.look_at_text(value) if isinstance(value, str) else None
                if why is not None:
                    is_event = table == "events"
                    where = f"event {row['seq']} ({row['kind']})" if is_event else f"{table}, row {row['at_row']}"
                    yield Leak("event" if is_event else "table", where, why)
                    break


def _running_configs(ledger: Ledger, lab: Path) -> set[Path]:
    """Return the config files of unfinished runs: they contain the secrets that the trainer needs."""
    rows = ledger.rows("SELECT study, id FROM runs WHERE state != 'ended'")
    names = ("config.json", "config.yaml", "config.toml")
    return {lab / "outputs" / study / run / RECORD / name for study, run in rows for name in names}


def _files_below(root: Path) -> Iterator[Path]:
    """Yield all files except the ledger and git checkouts."""
    for folder, folders, files in os.walk(root):
        if ".git" in folders or ".git" in files:
            folders.clear()
            continue
        folders.sort()
        for name in sorted(files):
            if not name.startswith(("ledger.db", ".tmp-")):
                yield Path(folder, name)


def _in_file(path: Path, lab: Path, finder: SecretFinder) -> Iterator[Leak]:
    with contextlib.suppress(OSError, UntrustedError), open_regular(path, follow=False) as file:
        before = b""
        binary: bool | None = None
        while chunk := file.read(CHUNK):
            binary = b"\0" in chunk[:PEEK] if binary is None else binary
            why = finder.look_at_bytes(before + chunk, binary=binary)
            if why is not None:
                yield Leak("binary" if binary else "file", str(path.relative_to(lab)), why)
                return
            before = chunk[-OVERLAP:]


def scrub(ledger: Ledger, lab: Path, leaks: list[Leak]) -> dict[str, dict[str, str | None]]:
    """Remove secrets from text files; return the old and new hash of each rewritten file.

    The event that explains the new hashes is recorded first: after an interruption, the next call writes the same
    content.
    """
    cleaned: dict[str, tuple[Path, dict[str, str | None]]] = {}
    for leak in leaks:
        if leak.what == "file":
            path = lab / leak.where
            temporary = _write_clean(path)
            cleaned[leak.where] = temporary, {"old": hash_file(path), "new": hash_file(temporary)}
    by_run: dict[tuple[str, str | None], dict[str, dict[str, Any]]] = {}
    for name, (_, hashes) in cleaned.items():
        study, run, rest = _owner(ledger, name)
        by_run.setdefault((study, run), {})[rest] = hashes
    with ledger.write():
        for (study, run), files in by_run.items():
            new = {name: hashes["new"] for name, hashes in files.items()}
            old = {name: hashes["old"] for name, hashes in files.items()}
            ledger.record(ScrubbedEvent(files=new, before=old), study, run)
    for name, (temporary, _) in cleaned.items():
        temporary.replace(lab / name)
    return {name: hashes for name, (_, hashes) in cleaned.items()}


def _owner(ledger: Ledger, name: str) -> tuple[str, str | None, str]:
    """Return study, run and path in the run folder of a file; for other files ("", None, path in the lab)."""
    parts = Path(name).parts
    if len(parts) > 3 and parts[0] == "outputs":
        sql = "SELECT 1 FROM runs WHERE study=? AND id=?"
        if ledger.one(sql, parts[1:3]) is not None:
            return parts[1], parts[2], str(Path(*parts[3:]))
    return "", None, name


def _write_clean(path: Path) -> Path:
    """Write a copy of the file without secrets next to it. Blocks end at line breaks, so that no secret is split."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    temporary.unlink(missing_ok=True)
    with open_regular(path, follow=False) as file, open(temporary, "xb") as clean:
        os.fchmod(clean.fileno(), os.fstat(file.fileno()).st_mode & 0o777)
        while block := file.read(CHUNK):
            clean.write(redact_bytes(block + file.readline()))
        clean.flush()
        os.fsync(clean.fileno())
    return temporary
