"""The ledger: one SQLite file (WAL) a lab, in which everything that happened is appended and chained by hashes.

Every change is made inside `with ledger.write():`, one transaction, and says what happened with `record`. The hash of
an event covers its text and the hash of the event before it, so `verify` finds damage and edits and says where they
are. It does not find a deliberate rewrite: whoever can write the file can compute all later hashes again. Only a head
that was published elsewhere shows that (`anchors.py`). Several processes may write; SQLite lets one in at a time.

Every event is also a line of the journal beside the database (`journal.py`). A database that ends before its journal
has lost events: it can be read, but nothing is written to it until `looplab reindex` has taken them from the journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config.files import write_atomic
from looplab.errors import LabError
from looplab.ledger import journal
from looplab.ledger.journal import MAX_SEQ, Journal, Link
from looplab.ledger.schema import JOURNALLED, TABLES, UPGRADES, VERSION
from looplab.runs.redact import redact_data, redact_text
from looplab.untrusted import dump_json, load_own_json, read_bounded

GENESIS = "0" * 64
HEAD_FILE = "head"
MAX_HEAD = 1_000
"""Bytes of the file that notes the head."""
BUSY_S = 30.0
OWN_WORDS = {"planned", "launched", "proposed", "ended", "judged", "best", "round began", "round ended"}
"""Events without texts from outside, or whose texts were redacted before; the others are looked at for secrets."""
CHECKPOINT_PAGES = 8000
"""How far the log grows before it is folded into the database, which waits for the disk."""


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    at: float
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
    """The first link of the chain that does not hold."""

    seq: int
    why: str


def link(before: str, seq: int, at: float, kind: str, study: str, run: str | None, data: str) -> str:
    """The hash of an event, from the hash of the one before and its own text."""
    text = f"{before}\n{seq}\n{at!r}\n{kind}\n{study}\n{run or ''}\n{data}"
    return hashlib.sha256(text.encode()).hexdigest()


class DamagedError(LabError):
    """The ledger has lost events, is another one than it was, or is gone; nothing may be written to it."""

    exit_code = 1


GONE = "the ledger is gone, but its journal is there"
REPAIR = "`looplab verify` names the damage, `looplab reindex` repairs it from the journal and the run folders"


class Ledger:
    """A connection to the ledger of a lab.

    Args:
        create: Create it if there is none, unless there once was one.
        repair: Open it for `reindex`: also where events are missing.
    """

    def __init__(self, path: Path, *, create: bool = True, repair: bool = False) -> None:
        self.path = path
        self._head: tuple[int, str] | None = None
        self._seen = -1
        self._fresh: list[Link] = []  # events of the open transaction
        self._is_checked = True
        self._place: tuple[int, int] | None = None
        self.journal: Journal | None = Journal(path.with_name(journal.NAME))
        if not path.exists():
            if not repair and has_ledger(path):
                raise DamagedError(GONE, file=path, hint="`looplab reindex` rebuilds it")
            if not create:
                raise LabError("this lab has no ledger yet", hint="start with `looplab run`")
        if create:
            path.parent.mkdir(exist_ok=True)  # never the lab itself
        with _opening(path):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
            self._db.row_factory = sqlite3.Row
            self._prepare()
            self._place = _place_of(path)
        self._is_checked = repair

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise LabError(f"the ledger is of version {version}, this looplab knows {VERSION}", file=self.path)
        self._db.execute("PRAGMA journal_mode=WAL")
        # A commit survives the death of any process. What a power cut may take back is bounded by `runs.durable`.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA temp_store=MEMORY")
        self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        if version < VERSION:
            with self.write():
                scripts = [TABLES] if version == 0 else [UPGRADES[v] for v in range(version, VERSION)]
                for statement in (part for script in scripts for part in script.split(";\n")):
                    if statement.strip():
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        if self._head is not None:
            self.note_head()
        if self._fresh:
            self._write_journal()
        if self.journal is not None:
            self.journal.close()
        self._db.close()

    def is_replaced(self) -> bool:
        """Return whether the file that is open is no longer the ledger: it was deleted, or another one put there."""
        return self._place is not None and _place_of(self.path) != self._place

    def note_head(self) -> None:
        """Note beside the ledger where its chain ends now, so that an end lost by accident is seen."""
        with contextlib.suppress(OSError, sqlite3.Error):  # a disk that is full or read-only is reported elsewhere
            seq, digest = self.head()
            noted = self.noted_head()
            if (noted is None or noted[0] <= seq) and not self.is_replaced():
                write_atomic(self.path.with_name(HEAD_FILE), f"{seq} {digest}\n".encode(), sync=False)

    def noted_head(self) -> tuple[int, str] | None:
        """Return where the chain ended when that was last noted; None if nothing is, or nothing that can be true."""
        try:
            seq, digest = read_bounded(self.path.with_name(HEAD_FILE), MAX_HEAD).decode("ascii").split()
            number = int(seq)
        except (OSError, ValueError):
            return None
        return (number, digest) if 0 < number <= MAX_SEQ else None

    # -- writing

    @contextmanager
    def write(self) -> Iterator[None]:
        """One transaction: all of it happens or nothing. May be nested; the outermost commits."""
        if self._db.in_transaction:
            yield
            return
        if self.is_replaced():
            raise DamagedError("the ledger was deleted or replaced while it was open", file=self.path, hint=REPAIR)
        self._db.execute("BEGIN IMMEDIATE")
        version = self.version()
        if version != self._seen:
            # Another process has written since: the end of the chain is read again.
            self._head, self._seen = None, version
        unwritten = len(self._fresh)
        try:
            if not self._is_checked:
                self._check_end()
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._head = None
            del self._fresh[unwritten:]  # the journal has only what was committed
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if self._fresh:
            self._write_journal()

    def _check_end(self) -> None:
        """Compare the end of the chain with the journal and the noted head, once, before the first write.

        Raises:
            DamagedError: The chain ends before, or otherwise than, it did.
        """
        assert self.journal is not None
        self._compare_end(self.noted_head(), self.journal.last())
        self._is_checked = True
        if not self.journal.exists():
            if self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, '1')", (JOURNALLED,)).rowcount == 0:
                self.record("journal rewritten", "", why="the file was gone")
            self.journal.close()

    def _compare_end(self, noted: tuple[int, str] | None, written: tuple[int, str] | None) -> None:
        """Raise DamagedError if the chain does not have the noted head, or the last event of the journal."""
        for where, last in ((f"noted in {HEAD_FILE}", noted), (f"in {journal.NAME}", written)):
            if last is None:
                continue
            seq, digest = last
            row = self._db.execute("SELECT hash FROM events WHERE seq=?", (seq,)).fetchone()
            if row is None:
                why = f"the ledger ends at event {self.head()[0]}, but event {seq} is {where}: events were lost"
                raise DamagedError(why, file=self.path, hint=REPAIR)
            if row[0] != digest:
                why = f"event {seq} is not the one {where}: the ledger was changed or is another one"
                raise DamagedError(why, file=self.path, hint=REPAIR)

    def _write_journal(self) -> None:
        """Append what was committed to the journal; what does not succeed now is made up for with the next commit."""
        if self.journal is None:
            self._fresh.clear()
            return
        with contextlib.suppress(OSError):
            if self.journal.append(self._fresh) or self.journal.complete(self._links_after):
                self._fresh.clear()

    def complete_journal(self) -> None:
        """Append to the journal what it lacks."""
        if self.journal is not None and self.journal.complete(self._links_after):
            self._fresh.clear()

    def _links_after(self, seq: int) -> Iterator[Link]:
        for row in self._db.execute("SELECT * FROM events WHERE seq > ? ORDER BY seq", (seq,)):
            yield Link(*row)

    def savepoint(self) -> _Savepoint:
        """Inside a transaction: what is written in this block is undone if the block raises."""
        return _Savepoint(self)

    def record(self, kind: str, study: str, run: str | None = None, *, when: float | None = None, **data: Any) -> int:
        """Append one event to the chain; the transaction must be open. `when`: None for now."""
        assert self._db.in_transaction
        last, before = self._head or self.head()
        seq = last + 1
        at = time.time() if when is None else when
        text = dump_json(data, sort_keys=True)
        if kind not in OWN_WORDS and redact_text(text) != text:  # what is in the chain can never be taken out
            text = dump_json(redact_data(data), sort_keys=True)
        digest = link(before, seq, at, kind, study, run, text)
        event = Link(seq, at, kind, study, run, text, digest)
        self._db.execute("INSERT INTO events VALUES (?,?,?,?,?,?,?)", event)
        self._fresh.append(event)
        self._head = (seq, digest)
        return seq

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, parameters)

    def sync(self) -> None:
        """Wait until what is committed is on the disk, where a power cut cannot take it back."""
        # The log alone: what was moved from it into the database is synced by SQLite, and closing another descriptor
        # of the database would drop SQLite's locks.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # -- reading

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self._db.execute(sql, parameters).fetchall()

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(sql, parameters).fetchone()
        return row

    def events(self, study: str | None = None, run: str | None = None, after: int = 0) -> Iterator[Event]:
        wanted, parameters = ["seq > ?"], [after]  # type: tuple[list[str], list[Any]]
        if study is not None:
            wanted.append("study = ?")
            parameters.append(study)
        if run is not None:
            wanted.append("run = ?")
            parameters.append(run)
        query = f"SELECT * FROM events WHERE {' AND '.join(wanted)} ORDER BY seq"  # noqa: S608 (fixed texts)
        for row in self._db.execute(query, parameters):
            yield Event.of(row)

    def version(self) -> int:
        """A number that changes when another process has written."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def head(self) -> tuple[int, str]:
        """The last link: its number and hash."""
        row = self._db.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        return (row[0], row[1]) if row else (0, GENESIS)

    def id(self) -> str | None:
        """The random id of the ledger, which a copy keeps; None: made by an older version and never anchored."""
        row = self._db.execute("SELECT value FROM meta WHERE key='ledger'").fetchone()
        return row[0] if row else None

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Read texts that are not UTF-8 with replacement characters instead of failing."""
        self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            yield
        finally:
            self._db.text_factory = str

    def first_broken_link(self, *, noted: bool = True) -> BrokenLink | None:
        """Walk the chain from its beginning; with `noted` it must also reach the noted head."""
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
                return BrokenLink(seq, f"event {seq} ({kind}) is not the one noted in .looplab/{HEAD_FILE}")
        if head is not None and head[0] >= expected:
            return BrokenLink(expected, f"the end is cut off: there were {head[0]} events")
        return None


class LedgerCopy(Ledger):
    """A copy in memory of the ledger at `path`, empty if there is none; what is written to it is lost when it closes.

    The file is only read: an engine may be writing to it, and the reader needs no write permission in the lab.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = None
        self._seen = -1
        self._fresh = []
        self._is_checked = True
        self.journal = None
        self._place = None
        # Before the copy: an engine may be writing, and notes what it has committed.
        self._ends = self.noted_head(), Journal(path.with_name(journal.NAME)).last()
        with _opening(path):
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            self._db.row_factory = sqlite3.Row
            if path.exists():
                _copy_database(path, self._db)
            self._prepare()

    def check_end(self) -> None:
        """Compare the end of the copied chain with the journal and the noted head, as a ledger does before it is
        written to.

        Raises:
            DamagedError: The chain ends before, or otherwise than, it did.
        """
        if not self.path.exists() and has_ledger(self.path):
            raise DamagedError(GONE, file=self.path, hint="`looplab reindex` rebuilds it")
        self._compare_end(*self._ends)

    def note_head(self) -> None:
        """The end of a copy's chain is nobody's business."""


def has_ledger(path: Path) -> bool:
    """Return whether there is a ledger, or was one."""
    return any(os.path.lexists(one) for one in (path, path.with_name(journal.NAME), path.with_name(HEAD_FILE)))


class _Savepoint:
    """`Ledger.savepoint`. A class, since each run passes one: a generator would take several times as long."""

    __slots__ = ("_before", "_ledger")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        ledger = self._ledger
        assert ledger._db.in_transaction
        self._before = ledger._head, len(ledger._fresh)
        ledger._db.execute("SAVEPOINT attempt")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ledger = self._ledger
        if kind is None:
            ledger._db.execute("RELEASE attempt")
            return
        if ledger._db.in_transaction:
            ledger._db.execute("ROLLBACK TO attempt")
            ledger._db.execute("RELEASE attempt")
        ledger._head, unwritten = self._before
        del ledger._fresh[unwritten:]


def open_for_reading(path: Path) -> Ledger:
    """Open a ledger to look at it; a reader who may not write, or a read-only disk, gets a copy in memory."""
    if not path.exists() or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return Ledger(path, create=False)
    return LedgerCopy(path)


def _place_of(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise DamagedError(
            f"cannot open the ledger: {error}",
            file=path,
            hint="is the folder writable and the disk not full? a damaged ledger is rebuilt by `looplab reindex`",
        ) from error


def _copy_database(path: Path, target: sqlite3.Connection) -> None:
    """Copy a database as it is at one moment, with SQLite's online backup."""
    wal = path.with_name(f"{path.name}-wal")

    def state() -> tuple[int, int, bool]:
        status = path.stat()
        return status.st_mtime_ns, status.st_size, wal.exists()

    def back_up(options: str) -> None:
        uri = f"{path.resolve().as_uri()}?mode=ro{options}"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as source:
            source.backup(target)

    before = state()
    if not os.access(path.parent, os.W_OK) and wal.exists():
        # SQLite cannot read a log in a folder where it may not create its index: a copy can be read.
        with tempfile.TemporaryDirectory(prefix="looplab-") as scratch:
            for name in (path.name, wal.name):
                shutil.copyfile(path.with_name(name), f"{scratch}/{name}")
            with contextlib.closing(sqlite3.connect(f"{scratch}/{path.name}")) as source:
                source.backup(target)
        return
    if not wal.exists():
        # Nobody has it open. A reader in WAL mode would leave a -wal and a -shm file behind, or fail where it may not;
        # an immutable database is read without them, but also without a lock: an engine may begin in this moment.
        with contextlib.suppress(sqlite3.DatabaseError):
            back_up("&immutable=1")
            if state() == before:
                return
    back_up("")
