"""A ledger that is only read: nothing changes, whoever writes meanwhile and whoever owns the folder."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.ledger.ledger import DamagedError, Ledger, LedgerCopy, OldLedgerError, open_for_reading
from looplab.ledger.schema import VERSION


def add(path: Path, *kinds: str) -> Ledger:
    ledger = Ledger(path)
    for kind in kinds:
        with ledger.write():
            ledger.append_event(kind, "s", None, {})
    return ledger


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events()]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}


def as_stranger(action: Callable[[], bool]) -> bool:
    """Do something in a process of a user who owns nothing here."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            status = 0 if action() else 2
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    yield folder / "ledger.db"
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_an_idle_ledger_is_read_without_leaving_a_file(path: Path) -> None:
    add(path, "a", "b").close()
    before = sorted(path.parent.iterdir()), content(path.parent)
    reader = Ledger.open_readonly(path)
    assert kinds(reader) == ["a", "b"]
    with pytest.raises(LabError, match="reading only"), reader.write():
        pass
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("DELETE FROM events")
    reader.close()
    assert (sorted(path.parent.iterdir()), content(path.parent)) == before


def test_a_reader_sees_what_others_commit_meanwhile(path: Path) -> None:
    add(path, "a").close()
    reader = Ledger.open_readonly(path)
    assert kinds(reader) == ["a"]
    writer = add(path, "b")
    assert kinds(reader) == ["a", "b"]
    with writer.write():
        writer.append_event("c", "s", None, {})
        assert kinds(reader) == ["a", "b"]
    assert kinds(reader) == ["a", "b", "c"]
    with reader.snapshot():
        assert kinds(reader) == ["a", "b", "c"]
        add(path, "d")
        assert kinds(reader) == ["a", "b", "c"]
    assert kinds(reader) == ["a", "b", "c", "d"]


def test_a_reader_survives_that_the_last_writer_leaves(path: Path) -> None:
    writer = add(path, "a")
    reader = Ledger.open_readonly(path)
    writer.close()
    add(path, "b").close()
    assert kinds(reader) == ["a", "b"]
    reader.close()
    assert kinds(Ledger.open_readonly(path)) == ["a", "b"]


def test_a_row_that_is_being_read_survives_a_new_writer(path: Path) -> None:
    add(path, *"abc").close()
    reader = Ledger.open_readonly(path)
    events = reader.events()
    assert next(events).kind == "a"
    writer = add(path, "d")
    assert reader.head()[0] == 4
    assert [event.kind for event in events] == ["b", "c"]
    writer.close()


@pytest.mark.parametrize("state", ["idle", "open", "killed", "without index"])
def test_the_lab_of_somebody_else_can_be_read(path: Path, state: str) -> None:
    if state == "killed" or state == "without index":
        pid = os.fork()
        if pid == 0:
            add(path, "a")
            os._exit(0)  # without closing it
        os.waitpid(pid, 0)
        assert path.with_name("ledger.db-wal").stat().st_size > 0
        if state == "without index":
            path.with_name("ledger.db-shm").unlink()
    else:
        writer = add(path, "a")
        if state == "idle":
            writer.close()
    path.parent.chmod(0o555)
    before = content(path.parent)
    assert as_stranger(lambda: kinds(Ledger.open_readonly(path)) == ["a"])
    assert content(path.parent) == before


def test_a_ledger_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no ledger yet"):
        Ledger.open_readonly(tmp_path / ".looplab" / "ledger.db")
    assert not list(tmp_path.iterdir())
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(DamagedError, match="its journal exists"):
        Ledger.open_readonly(tmp_path / "ledger.db")


def test_a_ledger_of_an_older_version_is_not_upgraded_by_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    add(path, "a").close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE studies RENAME COLUMN judge_state TO docket")
        db.execute("DROP INDEX runs_retried")
        for column in ("attempt", "host", "job", "lost_s"):
            db.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        db.execute("PRAGMA user_version=3")
    db.close()
    before = content(tmp_path)
    with pytest.raises(OldLedgerError, match=f"version 3, and this looplab reads version {VERSION}"):
        Ledger.open_readonly(path)
    reader = open_for_reading(path)
    assert isinstance(reader, LedgerCopy)
    assert kinds(reader) == ["a"]
    assert reader.rows("SELECT judge_state FROM studies") == []
    assert content(tmp_path) == before
    add(path, "b").close()
    assert kinds(Ledger.open_readonly(path)) == ["a", "b"]


def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    add(path, "a").close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()
    with pytest.raises(LabError, match="supports only"):
        open_for_reading(path)


def test_a_damaged_ledger_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(DamagedError, match="cannot open the ledger"):
        Ledger.open_readonly(tmp_path / "ledger.db")
