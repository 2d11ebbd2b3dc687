"""Backups of the ledger: full copies in `.looplab/backups`, made while an engine runs.

The journal has the events. A backup also has what events only reference by hash: the judge's state, plans of runs that
have not started, the options of the last engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from looplab.config.files import sync_file, sync_folder
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger

FOLDER = "backups"
MAX_BACKUPS = 3
MIN_INTERVAL_S = 600.0
"""Seconds between two backups, at least; longer if a backup takes more than a hundredth of that."""
SMALL_BYTES = 64 << 20
"""Ledgers up to this size are also backed up when an engine ends."""


def backups(path: Path) -> list[Path]:
    """Return the backups of the ledger at `path`, newest first."""
    return sorted((path.parent / FOLDER).glob("ledger-*.db"), reverse=True)


def back_up(path: Path) -> Path | None:
    """Back up the current state of the ledger and return the copy; None if this state is already backed up.

    Raises:
        OSError, sqlite3.Error: It cannot be read, or the copy cannot be written.
    """
    folder = path.parent / FOLDER
    if folder.is_symlink():  # old backups in it are deleted
        raise OSError(errno.ELOOP, "is a link, not a folder of the lab", str(folder))
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # engines of other studies back up the same ledger
        return _copy(path, folder)
    finally:
        os.close(lock)


def _copy(path: Path, folder: Path) -> Path | None:
    for leftover in folder.glob(".tmp-*"):
        leftover.unlink(missing_ok=True)
    temporary = folder / f".tmp-{os.getpid()}"
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as source:
        (seq,) = source.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        target = folder / f"ledger-{seq:010d}.db"
        if target.exists() or seq == 0:
            return None
        try:
            with contextlib.closing(sqlite3.connect(temporary)) as copy:
                # An incomplete copy is never used, so it needs neither a journal nor a sync before its end.
                copy.execute("PRAGMA journal_mode=OFF")
                copy.execute("PRAGMA synchronous=OFF")
                source.backup(copy)  # in one step: a stepwise backup restarts when a writer interferes
            sync_file(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(folder)
    for old in backups(path)[MAX_BACKUPS:]:
        old.unlink(missing_ok=True)
    return target


def open_backup(backup: Path) -> sqlite3.Connection:
    """Open a backup for reading, without creating files next to it."""
    return sqlite3.connect(f"{backup.resolve().as_uri()}?immutable=1", uri=True, isolation_level=None)


def intact(backup: Path) -> bool:
    """Return whether a backup can be opened, is complete, and its chain is intact."""
    try:
        with contextlib.closing(open_backup(backup)) as db:
            if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                return False
        with contextlib.closing(_Immutable(backup)) as ledger:
            return ledger.first_broken_link(noted=False) is None and not ledger.missing_columns()
    except (sqlite3.DatabaseError, LabError, ValueError):
        return False


def read_hashes(backup: Path) -> dict[int, str]:
    """Return the hash of every event in a copy of a ledger, by number, oldest first.

    Raises:
        OSError, sqlite3.Error: It cannot be read, or is not a ledger.
    """
    backup.stat()
    with contextlib.closing(open_backup(backup)) as db:
        return dict(db.execute("SELECT seq, hash FROM events ORDER BY seq"))


class _Immutable(Ledger):
    """A backup, opened without creating files next to it."""

    def __init__(self, path: Path) -> None:
        self._set_up(path, None)
        self._db = open_backup(path)
        self._db.row_factory = sqlite3.Row


class Backups:
    """Backs up a ledger from its own thread while an engine runs."""

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda problem: None) -> None:
        self._path = path
        self._tell = tell
        self._closing = threading.Event()
        self._due = 0.0
        self._copies = True
        self._thread = threading.Thread(target=self._run, name="looplab-backup", daemon=True)
        self._thread.start()

    def close(self, *, copy: bool = True) -> None:
        """Stop; with `copy`, begin a last backup if the ledger is small or one is due. `wait` waits for its end."""
        self._copies = copy
        self._closing.set()

    def wait(self) -> None:
        """Wait for the last backup; an impatient person may interrupt it."""
        with contextlib.suppress(KeyboardInterrupt):
            self._thread.join()

    def _run(self) -> None:
        interval = MIN_INTERVAL_S
        while not self._closing.wait(interval):
            interval = max(MIN_INTERVAL_S, 100 * self._back_up())
        with contextlib.suppress(OSError):
            if self._copies and (self._path.stat().st_size <= SMALL_BYTES or time.monotonic() >= self._due):
                self._back_up()

    def _back_up(self) -> float:
        """Make a backup; return how many seconds it took. A failure is reported, never raised."""
        began = time.monotonic()
        try:
            back_up(self._path)
        except (OSError, sqlite3.Error) as error:
            if self._path.exists():  # else the lab was moved or deleted after the study had ended
                self._tell(f"the ledger could not be backed up: {error}")
        took = time.monotonic() - began
        self._due = time.monotonic() + max(MIN_INTERVAL_S, 100 * took)
        return took
