"""The ledger: one SQLite file (WAL) a lab, in which everything that happened is appended and chained by hashes.

Every change is made inside `with ledger.write():`, one transaction, and says what happened with `record`. The hash of
an event covers its text and the hash of the event before it, so `verify` finds damage and edits and says where they
are. It does not find a deliberate rewrite: whoever can write the file can compute all later hashes again. Only a head
that was published elsewhere shows that (`anchors.py`). Several processes may write; SQLite lets one in at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from looplab.config.files import write_atomic
from looplab.errors import LabError
from looplab.ledger.schema import TABLES, UPGRADES, VERSION

GENESIS = "0" * 64
HEAD_FILE = "head"
BUSY_S = 30.0
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
        return cls(row[0], row[1], row[2], row[3], row[4], orjson.loads(row[5]), row[6])


@dataclass(frozen=True, slots=True)
class Broken:
    """The first link of the chain that does not hold."""

    seq: int
    why: str


def link(before: str, seq: int, at: float, kind: str, study: str, run: str | None, data: str) -> str:
    """The hash of an event, from the hash of the one before and its own text."""
    text = f"{before}\n{seq}\n{at!r}\n{kind}\n{study}\n{run or ''}\n{data}"
    return hashlib.sha256(text.encode()).hexdigest()


class Ledger:
    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self._head: tuple[int, str] | None = None
        self._seen = -1
        if not create and not path.exists():
            raise LabError("this lab has no ledger yet", hint="start with `looplab run`")
        if create:
            path.parent.mkdir(exist_ok=True)  # never the lab itself
        with _opening(path):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
            self._db.row_factory = sqlite3.Row
            self._prepare()

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
        self._db.close()

    def note_head(self) -> None:
        """Note beside the ledger where its chain ends now, so that an end lost by accident is seen."""
        with contextlib.suppress(OSError, sqlite3.Error):  # a disk that is full or read-only is reported elsewhere
            seq, digest = self.head()
            write_atomic(self.path.with_name(HEAD_FILE), f"{seq} {digest}\n".encode(), sync=False)

    def noted_head(self) -> tuple[int, str] | None:
        """Where the chain ended when that was last noted."""
        try:
            seq, digest = self.path.with_name(HEAD_FILE).read_text().split()
            return int(seq), digest
        except (OSError, ValueError):
            return None

    # -- writing

    @contextmanager
    def write(self) -> Iterator[None]:
        """One transaction: all of it happens or nothing. May be nested; the outermost commits."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        version = self.version()
        if version != self._seen:
            # Another process has written since: the end of the chain is asked for anew.
            self._head, self._seen = None, version
        try:
            yield
        except BaseException:
            self._head = None
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def record(self, kind: str, study: str, run: str | None = None, **data: Any) -> int:
        """Append one event to the chain; the transaction must be open."""
        assert self._db.in_transaction
        last, before = self._head or self.head()
        seq = last + 1
        at = time.time()
        text = orjson.dumps(data, option=orjson.OPT_SORT_KEYS).decode()
        digest = link(before, seq, at, kind, study, run, text)
        self._db.execute("INSERT INTO events VALUES (?,?,?,?,?,?,?)", (seq, at, kind, study, run, text, digest))
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

    def first_broken_link(self) -> Broken | None:
        """Walk the chain from its beginning."""
        before, expected, noted = GENESIS, 1, self.noted_head()
        for row in self._db.execute("SELECT seq, at, kind, study, run, data, hash FROM events ORDER BY seq"):
            seq, at, kind, study, run, data, hash_ = row
            if seq != expected:
                return Broken(
                    expected, f"event {expected} is missing" + (f" (and up to {seq - 1})" * (seq - expected > 1))
                )
            if link(before, seq, at, kind, study, run, data) != hash_:
                return Broken(seq, f"event {seq} ({kind}{f' of run {run}' if run else ''}) does not match its hash")
            before, expected = hash_, seq + 1
            if noted is not None and noted[0] == seq and noted[1] != hash_:
                return Broken(seq, f"event {seq} ({kind}) is not the one noted in .looplab/{HEAD_FILE}")
        if noted is not None and noted[0] >= expected:
            return Broken(expected, f"the end is cut off: there were {noted[0]} events")
        return None


class LedgerCopy(Ledger):
    """A copy in memory of the ledger at `path`, empty if there is none; what is written to it is lost when it closes.

    The file is only read: an engine may be writing to it, and the reader needs no write permission in the lab.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = None
        self._seen = -1
        with _opening(path):
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            self._db.row_factory = sqlite3.Row
            if path.exists():
                _copy_database(path, self._db)
            self._prepare()

    def note_head(self) -> None:
        """The end of a copy's chain is nobody's business."""


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise LabError(
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
    if not wal.exists():
        # Nobody has it open. A reader in WAL mode would leave a -wal and a -shm file behind, or fail where it may not;
        # an immutable database is read without them, but also without a lock: an engine may begin in this moment.
        with contextlib.suppress(sqlite3.DatabaseError):
            back_up("&immutable=1")
            if state() == before:
                return
    back_up("")
