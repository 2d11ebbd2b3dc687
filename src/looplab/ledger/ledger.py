"""The ledger: one SQLite file per lab, with an append-only, hash-chained log of events.

Every change is made inside `with ledger.write():`, a transaction, and records an event with `record`. The hash of an
event covers its text and the hash of the previous event, so `verify` finds and locates damage and edits. It does not
detect a deliberate rewrite: anyone who can write the file can recompute all later hashes. Only a head that was
published elsewhere reveals that (`anchors.py`). Several processes may write; SQLite serialises them.

On a local disk SQLite uses a write-ahead log, whose index is shared memory. Hosts do not share memory, so on a network
disk it uses a rollback journal, which needs only locks; such a ledger keeps it, because the disk of one host is the
network disk of another.

Every event is also a line of the journal next to the database (`journal.py`). A database that ends before its journal
has lost events: it can be read, but not written until `looplab reindex` has restored them from the journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config.disk import network_disk
from looplab.config.files import write_atomic
from looplab.errors import LabError
from looplab.ledger import catalogue, journal
from looplab.ledger.journal import MAX_SEQ, Journal, Link
from looplab.ledger.schema import JOURNALLED, TABLES, UPGRADES, VERSION
from looplab.runs.redact import redact_data, redact_text
from looplab.untrusted import dump_json, load_own_json, read_bounded

GENESIS = "0" * 64
HEAD_FILE = "head"
"""File next to the database that repeats the number and hash of the last event."""
MAX_HEAD_BYTES = 1_000
BUSY_TIMEOUT_S = 30.0
"""Seconds to wait for the transaction of another process."""
VERSIONS_SINCE = 5
"""First version of the tables with a table of versions."""
LOGS = ("-wal", "-journal")
"""Suffixes of SQLite's write-ahead log and rollback journal."""
COLUMNS = """
    SELECT t.name || '.' || c.name FROM sqlite_master t, pragma_table_info(t.name) c
    WHERE t.type='table' AND t.name NOT LIKE 'sqlite_%'
"""
"""Query for all columns of a database."""
CHECKPOINT_PAGES = 8000
"""Pages in the write-ahead log before SQLite checkpoints it into the database, which waits for the disk."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the chain."""

    seq: int
    """Its number, from 1."""
    at: float
    """Unix time in seconds."""
    kind: str
    study: str
    run: str | None
    data: dict[str, Any]
    hash: str

    @classmethod
    def of(cls, row: sqlite3.Row) -> Event:
        return cls(row[0], row[1], row[2], row[3], row[4], load_own_json(row[5]), row[6])


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """The first event that breaks the chain."""

    seq: int
    why: str


def link(before: str, seq: int, at: float, kind: str, study: str, run: str | None, data: str) -> str:
    """Return the hash of an event: over the hash of the previous event and its own text."""
    text = f"{before}\n{seq}\n{at!r}\n{kind}\n{study}\n{run or ''}\n{data}"
    return hashlib.sha256(text.encode()).hexdigest()


class DamagedError(LabError):
    """The ledger has lost events, was replaced, or is missing; it must not be written."""

    exit_code = 1


class OldLedgerError(LabError):
    """The ledger was written by an older version; whoever writes to it next upgrades it."""

    def __init__(self, version: int, path: Path) -> None:
        super().__init__(
            f"the ledger has version {version}, and this looplab reads version {VERSION}",
            file=path,
            hint="the next command that writes to it, such as `looplab resume`, upgrades it",
        )


class NewLedgerError(LabError):
    """The ledger was written by a newer version."""

    def __init__(self, version: int, path: Path) -> None:
        super().__init__(f"the ledger has version {version}, but this looplab supports only {VERSION}", file=path)


NOT_YET = "nothing has run in this lab, so there is no ledger yet"
MISSING = "the ledger is missing, but its journal exists"
REPAIR = "`looplab verify` shows the damage, `looplab reindex` repairs it from the journal and the run folders"


class Ledger:
    """A connection to the ledger of a lab.

    Args:
        path: The database file.
        create: Create it if it does not exist, unless a journal shows that there was one.
        repair: Open it for `reindex`, even if events are missing.

    Raises:
        DamagedError: The ledger is missing although its journal exists, or cannot be opened.
        LabError: There is no ledger and `create` is False, or it was written by a newer version.
    """

    _file_id: tuple[int, int] | None = None
    _is_checked = True
    _data_version = -1
    _head: tuple[int, str] | None = None

    def __init__(self, path: Path, *, create: bool = True, repair: bool = False) -> None:
        self._set_up(path, Journal(path.with_name(journal.NAME)))
        if not path.exists():
            if not repair and is_missing(path):
                raise DamagedError(MISSING, file=path, hint="`looplab reindex` rebuilds it")
            if not create:
                raise LabError(NOT_YET, hint="start with `looplab run`")
        if create:
            path.parent.mkdir(exist_ok=True)  # never the lab itself
        with _raising_damaged(path):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
            self._db.row_factory = sqlite3.Row
            self._prepare()
            self._file_id = _file_id(path)
        self._is_checked = repair

    def _set_up(self, path: Path, own_journal: Journal | None) -> None:
        self.path = path
        self.journal = own_journal
        self._unjournalled: list[Link] = []  # events that are not in the journal yet
        self._after_commit: list[Callable[[], object]] = []

    @staticmethod
    def open_readonly(path: Path) -> ReadOnlyLedger:
        """Open a ledger without creating, upgrading or writing anything, also while an engine writes to it.

        While somebody has the ledger open, SQLite needs its files `-wal` and `-shm`: read permission is enough. If
        nobody has, the database file alone is read. A log without its index in a folder that is not writable is the
        only case in which a copy is read, as it is now.

        Raises:
            OldLedgerError: It must be upgraded first, by a writer.
            DamagedError: It is missing although its journal exists, or cannot be opened.
            LabError: There is none, or a newer version wrote it.
        """
        return ReadOnlyLedger(path)

    def _prepare(self) -> None:
        in_file = not isinstance(self, LedgerCopy)
        on_network = in_file and network_disk(self.path.parent) is not None
        if on_network:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # reads a write-ahead log without shared memory
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise NewLedgerError(version, self.path)
        rolls_back = on_network or (in_file and version > 0 and os.path.lexists(f"{self.path}-journal"))
        self._set_journal_mode("TRUNCATE" if rolls_back else "WAL")
        if on_network:
            self._db.execute("PRAGMA locking_mode=NORMAL")
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # releases the exclusive lock
        # A commit survives the death of any process. What a power failure may undo is bounded by `runs.durable`.
        # A rollback journal that was not synced may damage the database instead.
        self._db.execute(f"PRAGMA synchronous={'FULL' if rolls_back else 'NORMAL'}")
        self._db.execute("PRAGMA temp_store=MEMORY")
        self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        if version < VERSION:
            with self.write():
                version = self._db.execute("PRAGMA user_version").fetchone()[0]  # others may have upgraded it meanwhile
                scripts = [TABLES] if version == 0 else [UPGRADES[v] for v in range(version, VERSION)]
                for statement in (part for script in scripts for part in script.split(";\n")):
                    if statement.strip():
                        self._db.execute(statement)
                if 0 < version < VERSIONS_SINCE:
                    self._fill_versions()
                self._db.execute(f"PRAGMA user_version={VERSION}")

    def missing_columns(self) -> list[str]:
        """Return the columns that the tables should have and do not have, as `table.column`."""
        with contextlib.closing(sqlite3.connect(":memory:")) as new:
            new.executescript(TABLES)
            expected = [row[0] for row in new.execute(COLUMNS)]
        return sorted({*expected} - {row[0] for row in self.rows(COLUMNS)})

    def create_indexes(self) -> None:
        """Create the indexes that are missing."""
        for statement in TABLES.split(";\n"):
            if re.match(r"\s*CREATE (UNIQUE )?INDEX", statement):
                self._db.execute(statement)

    def _set_journal_mode(self, mode: str) -> None:
        """Switch to a journal mode. While others open a new ledger, SQLite refuses that instead of waiting."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute(f"PRAGMA journal_mode={mode}")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _fill_versions(self) -> None:
        """Fill the table of versions from events of an earlier release."""
        from looplab.ledger import versions

        with contextlib.suppress(ValueError, KeyError, TypeError, LabError):  # damaged events: `verify` reports them
            found = [event for event in self.events(versions.STUDY) if versions.is_about_versions(event)]
            versions.write_table(self, versions.without_forgeries(found))

    def close(self) -> None:
        """Complete the journal, note the head and close the connection."""
        if self._unjournalled:
            self._write_journal()
        if self._head is not None:
            self.note_head()
        if self.journal is not None:
            self.journal.close()
        self._db.close()

    def is_replaced(self) -> bool:
        """Return whether the open file is no longer the ledger: it was deleted, or replaced by another file."""
        return self._file_id is not None and _file_id(self.path) != self._file_id

    def note_head(self) -> None:
        """Write the head of the chain to a file next to the ledger, so that a lost end is noticed.

        Only a head that is in the journal is noted: another process may be about to append the events that it has just
        committed.
        """
        with contextlib.suppress(OSError, sqlite3.Error):  # a disk that is full or read-only is reported elsewhere
            seq, digest = self.head()
            if self.journal is not None and not self._is_journalled(seq):
                self.complete_journal()
                if not self._is_journalled(seq):
                    return
            noted = self.noted_head()
            if (noted is None or noted[0] <= seq) and not self.is_replaced():
                write_atomic(self.path.with_name(HEAD_FILE), f"{seq} {digest}\n".encode(), sync=False)

    def _is_journalled(self, seq: int) -> bool:
        last = self.journal.last() if self.journal is not None else None
        return last is not None and last[0] >= seq

    def noted_head(self) -> tuple[int, str] | None:
        """Return number and hash of the head that was last noted; None if there is none, or it is invalid."""
        try:
            text, digest = read_bounded(self.path.with_name(HEAD_FILE), MAX_HEAD_BYTES).decode("ascii").split()
            seq = int(text)
        except (OSError, ValueError):
            return None
        return (seq, digest) if 0 < seq <= MAX_SEQ else None

    # -- writing

    @contextmanager
    def write(self) -> Iterator[None]:
        """Run the block in one transaction. May be nested; the outermost block commits.

        Raises:
            DamagedError: The ledger was replaced, or has lost events.
        """
        if self._db.in_transaction:
            yield
            return
        if not self.is_replaced():
            self._db.execute("BEGIN IMMEDIATE")  # waits for other writers, one of which may move the ledger
        if self.is_replaced():
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise DamagedError("the ledger was deleted or replaced while it was open", file=self.path, hint=REPAIR)
        version = self.version()
        if version != self._data_version:
            # Another process has written since: read the head again.
            self._head, self._data_version = None, version
        before = len(self._unjournalled)
        try:
            if not self._is_checked:
                self._check_head()
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._head = None
            del self._unjournalled[before:]  # only committed events go to the journal
            self._after_commit.clear()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if self._unjournalled:
            self._write_journal()
        while self._after_commit:
            self._after_commit.pop(0)()

    def after_commit(self, action: Callable[[], object]) -> None:
        """Run an action once the open transaction has committed, and never if it is rolled back."""
        assert self._db.in_transaction
        self._after_commit.append(action)

    def _check_head(self) -> None:
        """Compare the head of the chain with the journal and the noted head, once, before the first write.

        Raises:
            DamagedError: The chain is shorter than it was, or ends differently.
        """
        assert self.journal is not None
        noted, journalled = self.noted_head(), self.journal.last()
        self._compare_head(noted, journalled)
        self._is_checked = True
        if not self.journal.exists():
            if self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, '1')", (JOURNALLED,)).rowcount == 0:
                self.record(catalogue.JournalRewrittenEvent(why="the file was gone"), "")
            self.journal.close()
        elif noted is not None and (last := journalled[0] if journalled else 0) < noted[0]:
            self.record(catalogue.JournalRewrittenEvent(why=f"events {last + 1} to {noted[0]} were gone"), "")
        if noted is None and self.path.with_name(HEAD_FILE).is_file():
            self.record(catalogue.HeadRewrittenEvent(why="it did not say where the chain ends"), "")
            self.after_commit(self.note_head)

    def _compare_head(self, noted: tuple[int, str] | None, journalled: tuple[int, str] | None) -> None:
        """Check that the chain contains the noted head and the last event of the journal.

        Raises:
            DamagedError: It does not.
        """
        for where, last in ((f"noted in {HEAD_FILE}", noted), (f"in {journal.NAME}", journalled)):
            if last is None:
                continue
            seq, digest = last
            found = self.hash_of(seq)
            if found is None:
                why = f"the ledger ends at event {self.head()[0]}, but event {seq} is {where}: events were lost"
                raise DamagedError(why, file=self.path, hint=REPAIR)
            if found != digest:
                why = f"event {seq} is not the one {where}: the ledger was changed or replaced"
                raise DamagedError(why, file=self.path, hint=REPAIR)

    def _write_journal(self) -> None:
        """Append committed events to the journal; if that fails, the next commit tries again."""
        if self.journal is None:
            self._unjournalled.clear()
            return
        with contextlib.suppress(OSError):
            if self.journal.append(self._unjournalled) or self.journal.complete(self._links_after):
                self._unjournalled.clear()

    def complete_journal(self) -> None:
        """Append all events that the journal lacks."""
        if self.journal is not None and self.journal.complete(self._links_after):
            self._unjournalled.clear()

    def _links_after(self, seq: int) -> Iterator[Link]:
        for row in self._db.execute("SELECT * FROM events WHERE seq > ? ORDER BY seq", (seq,)):
            yield Link(*row)

    def savepoint(self) -> _Savepoint:
        """Return a context manager for a part of a transaction: if its block raises, that part is rolled back."""
        return _Savepoint(self)

    def record(
        self, event: catalogue.EventData, study: str, run: str | None = None, *, when: float | None = None
    ) -> int:
        """Append one event to the chain and return its number. A transaction must be open.

        Args:
            event: What happened; secrets in it are redacted.
            study: The study; empty: the whole lab.
            run: The run; None: no single run.
            when: Unix time; None: now.
        """
        return self.append_event(event.kind, study, run, event.to_dict(), when=when, is_clean=event.is_clean)

    def append_event(
        self,
        kind: str,
        study: str,
        run: str | None,
        data: Mapping[str, Any],
        *,
        when: float | None = None,
        is_clean: bool = False,
    ) -> int:
        """Append an event of any kind, which may not be in the catalogue; see `record`.

        Args:
            is_clean: The payload is known to have no secrets.
        """
        assert self._db.in_transaction
        last, before = self._head or self.head()
        seq = last + 1
        at = time.time() if when is None else when
        text = dump_json(data, sort_keys=True)
        if not is_clean and redact_text(text) != text:  # nothing can be removed from the chain later
            text = dump_json(redact_data(dict(data)), sort_keys=True)
        digest = link(before, seq, at, kind, study, run, text)
        entry = Link(seq, at, kind, study, run, text, digest)
        self._db.execute("INSERT INTO events VALUES (?,?,?,?,?,?,?)", entry)
        self._unjournalled.append(entry)
        self._head = (seq, digest)
        return seq

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, parameters)

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> sqlite3.Cursor:
        """Insert a row; with `replace`, in place of the one with its key."""
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        return self._db.execute(f"{verb} INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))

    def sync(self) -> None:
        """Wait until all commits are on disk and survive a power failure."""
        # Only the write-ahead log: SQLite itself syncs what it checkpoints into the database, and closing another
        # descriptor of the database would drop SQLite's locks.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # -- reading

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self._db.execute(sql, parameters).fetchall()

    def each(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[sqlite3.Row]:
        """Return rows one by one; the transaction is open until the last, so read them at once."""
        return self._db.execute(sql, parameters)

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(sql, parameters).fetchone()
        return row

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Return the first column of the first row; None if there is no row."""
        row = self._db.execute(sql, parameters).fetchone()
        return row[0] if row is not None else None

    def limit_cache(self, kilobytes: int) -> None:
        """Limit the memory in which SQLite keeps pages of the file; the system keeps them as well."""
        self._db.execute(f"PRAGMA cache_size=-{kilobytes}")

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Refuse all writes in the block, also where a transaction is open."""
        self._db.execute("PRAGMA query_only=1")
        try:
            yield
        finally:
            self._db.execute("PRAGMA query_only=0")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of the block see the same state, whatever others write meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def event_rows(self, study: str, after: int = 0) -> list[tuple[Any, ...]]:
        """Return the events of a study as they are stored: number, time, kind, study, run, data as text, hash."""
        sql = "SELECT seq, at, kind, study, run, data, hash FROM events WHERE study=? AND seq>? ORDER BY seq"
        return [tuple(row) for row in self.rows(sql, (study, after))]

    def hash_of(self, seq: int) -> str | None:
        """Return the hash of an event; None if there is none with this number."""
        digest: str | None = self.value("SELECT hash FROM events WHERE seq=?", (seq,))
        return digest

    def hashes(self) -> dict[int, str]:
        """Return the hash of every event, by number."""
        return {row[0]: row[1] for row in self._db.execute("SELECT seq, hash FROM events")}

    def studies(self) -> set[str]:
        """Return the names of all studies, those of submitted commands and probes included."""
        return {row[0] for row in self.rows("SELECT name FROM studies")}

    def events(self, study: str | None = None, run: str | None = None, after: int = 0) -> Iterator[Event]:
        """Yield events in order: those of a study or run (None: all), with numbers above `after`."""
        conditions, parameters = ["seq > ?"], [after]  # type: tuple[list[str], list[Any]]
        if study is not None:
            conditions.append("study = ?")
            parameters.append(study)
        if run is not None:
            conditions.append("run = ?")
            parameters.append(run)
        query = f"SELECT * FROM events WHERE {' AND '.join(conditions)} ORDER BY seq"  # noqa: S608 (fixed texts)
        for row in self._db.execute(query, parameters):
            yield Event.of(row)

    def version(self) -> int:
        """Return a number that changes when another process has written."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def head(self) -> tuple[int, str]:
        """Return number and hash of the last event; (0, GENESIS) if there is none."""
        row = self._db.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        return (row[0], row[1]) if row else (0, GENESIS)

    def id(self) -> str | None:
        """Return the random id of the ledger, which copies share; None if an older version created it and it was never
        anchored."""
        number: str | None = self.value("SELECT value FROM meta WHERE key='ledger'")
        return number

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Read invalid UTF-8 with replacement characters instead of raising."""
        self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            yield
        finally:
            self._db.text_factory = str

    def first_broken_link(self, *, noted: bool = True) -> BrokenLink | None:
        """Walk the chain from the beginning and return its first defect; None: it is intact. With `noted` it must also
        contain the noted head."""
        before, expected, head = GENESIS, 1, self.noted_head() if noted else None
        for row in self._db.execute("SELECT seq, at, kind, study, run, data, hash FROM events ORDER BY seq"):
            seq, at, kind, study, run, data, hash_ = row
            if seq != expected:
                return BrokenLink(
                    expected, f"event {expected} is missing" + (f" (and up to {seq - 1})" * (seq - expected > 1))
                )
            if link(before, seq, at, kind, study, run, data) != hash_:
                return BrokenLink(seq, f"event {seq} ({kind}{f' of run {run}' if run else ''}) does not match its hash")
            before, expected = hash_, seq + 1
            if head is not None and head[0] == seq and head[1] != hash_:
                return BrokenLink(seq, f"event {seq} ({kind}) is not the one noted in {HEAD_FILE}")
        if head is not None and head[0] >= expected:
            return BrokenLink(expected, f"the end is cut off: there were {head[0]} events")
        return None


class ReadOnlyLedger(Ledger):
    """A ledger that is only read: nothing is created, upgraded or written. See `Ledger.open_readonly`."""

    def __init__(self, path: Path) -> None:
        self._set_up(path, Journal(path.with_name(journal.NAME)))
        if not path.exists():
            if is_missing(path):
                raise DamagedError(MISSING, file=path, hint="`looplab reindex` rebuilds it")
            raise LabError(NOT_YET, file=path, hint="start with `looplab run`")
        with _raising_damaged(path):
            self._connect()
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            self._db.close()
            raise OldLedgerError(version, path) if version < VERSION else NewLedgerError(version, path)

    def _connect(self) -> None:
        self._connection, self._stamp = connect_readonly(self.path)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA query_only=1")

    @property
    def _db(self) -> sqlite3.Connection:  # type: ignore[override]
        # A file that nobody had open is read without locks. Once somebody writes to it, a connection with locks is
        # needed: SQLite writes to the log first, so what was read up to now is consistent.
        if self._stamp is not None and not self._connection.in_transaction and self._stamp != _Stamp.of(self.path):
            self._connect()  # the old connection stays open for rows that are still being read
        return self._connection

    @contextmanager
    def write(self) -> Iterator[None]:
        raise LabError("the ledger is open for reading only", file=self.path)
        yield  # a generator, like the method that it replaces

    def close(self) -> None:
        self._connection.close()


class LedgerCopy(Ledger):
    """An in-memory copy of the ledger at `path`, empty if there is none; writes to it are lost when it is closed.

    The file itself is only read: an engine may be writing to it, and the reader may lack write permission in the lab.
    """

    def __init__(self, path: Path) -> None:
        self._set_up(path, None)
        # Read before the copy is made: an engine may commit and note events meanwhile.
        self._heads = self.noted_head(), Journal(path.with_name(journal.NAME)).last()
        with _raising_damaged(path):
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            self._db.row_factory = sqlite3.Row
            if path.exists():
                _copy_database(path, self._db)
            self._prepare()

    def check_end(self) -> None:
        """Compare the head of the copied chain with the journal and the noted head, as a ledger does before its first
        write.

        Raises:
            DamagedError: The chain is shorter than it was, ends differently, or is missing.
        """
        if is_missing(self.path):
            raise DamagedError(MISSING, file=self.path, hint="`looplab reindex` rebuilds it")
        self._compare_head(*self._heads)

    def note_head(self) -> None:
        """Do nothing: the head of a copy is not the ledger's."""


def has_ledger(path: Path) -> bool:
    """Return whether there is a ledger, or was one."""
    return any(os.path.lexists(file) for file in (path, path.with_name(journal.NAME), path.with_name(HEAD_FILE)))


def is_missing(path: Path) -> bool:
    """Return whether there was a ledger, which is gone. Its file is looked for again at the end: somebody may be just
    creating it."""
    return not path.exists() and has_ledger(path) and not path.exists()


class _Savepoint:
    """See `Ledger.savepoint`. A class, because every run uses one and a generator is several times slower."""

    __slots__ = ("_before", "_ledger")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        ledger = self._ledger
        assert ledger._db.in_transaction
        self._before = ledger._head, len(ledger._unjournalled), len(ledger._after_commit)
        ledger._db.execute("SAVEPOINT attempt")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ledger = self._ledger
        if kind is None:
            ledger._db.execute("RELEASE attempt")
            return
        if ledger._db.in_transaction:
            ledger._db.execute("ROLLBACK TO attempt")
            ledger._db.execute("RELEASE attempt")
        ledger._head, unjournalled, actions = self._before
        del ledger._unjournalled[unjournalled:]
        del ledger._after_commit[actions:]


def open_for_reading(path: Path) -> Ledger:
    """Open a ledger for reading; one of an older version as an upgraded copy in memory."""
    try:
        return Ledger.open_readonly(path)
    except OldLedgerError:
        return LedgerCopy(path)


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _raising_damaged(path: Path) -> Iterator[None]:
    """Turn database errors into a DamagedError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise DamagedError(
            f"cannot open the ledger: {error}",
            file=path,
            hint="check that the folder is writable and the disk is not full; `looplab reindex` rebuilds a damaged "
            "ledger",
        ) from error


@dataclass(frozen=True, slots=True)
class _Stamp:
    """State of a database file that nobody has open."""

    modified: int
    size: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp | None:
        """Return the state; None if the file is missing, or somebody may have it open: it has a write-ahead log while
        it is open, and a rollback journal always."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        if any(os.path.lexists(f"{path}{suffix}") for suffix in LOGS):
            return None
        return cls(status.st_mtime_ns, status.st_size, status.st_ino)


def connect_readonly(path: Path) -> tuple[sqlite3.Connection, _Stamp | None]:
    """Connect to a database that others may be writing to, and leave its folder as it is.

    Returns:
        The connection, and the state of the file if it is read without locks; it is then invalid once that changes.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro"
    stamp = _Stamp.of(path)
    if stamp is not None:
        # Without a log nobody has it open. An ordinary reader would leave an empty log behind, or fail
        # where it may not create one.
        return sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None), stamp
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
        if os.access(path.parent, os.W_OK):
            raise
        return _read_copy(path), None
    return connection, None


def _read_copy(path: Path) -> sqlite3.Connection:
    """Return a copy in memory of a database whose log was left behind in a read-only folder."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with tempfile.TemporaryDirectory(prefix="looplab-") as scratch:
        for name in (path.name, *(f"{path.name}{suffix}" for suffix in LOGS)):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(name), f"{scratch}/{name}")
        with contextlib.closing(sqlite3.connect(f"{scratch}/{path.name}")) as source:
            source.backup(memory)
    return memory


def _copy_database(path: Path, target: sqlite3.Connection) -> None:
    """Copy a consistent snapshot of a database, with SQLite's online backup."""
    while True:
        source, stamp = connect_readonly(path)
        with contextlib.closing(source):
            try:
                source.backup(target)
            except sqlite3.DatabaseError:
                if stamp is None or _Stamp.of(path) == stamp:
                    raise
        if stamp is None or _Stamp.of(path) == stamp:
            return
