"""The ledger on a network disk: two FUSE mounts of one folder are two hosts."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from looplab.config import disk, state
from looplab.config.state import LEDGER, StateConfig
from looplab.ledger.ledger import Ledger, open_for_reading
from looplab.ledger.moving import move_ledger

WRITER = """
import sys
from pathlib import Path
from looplab.ledger.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for n in range(int(sys.argv[2])):
    with ledger.write():
        ledger.append_event("written", "s", None, {"n": n})
ledger.close()
"""


def journal_mode(ledger: Ledger) -> str:
    return str(ledger.execute("PRAGMA journal_mode").fetchone()[0])


def add(ledger: Ledger, kind: str) -> None:
    with ledger.write():
        ledger.append_event(kind, "s", None, {})


def test_two_hosts_write_and_nothing_is_lost(shared_disk: tuple[Path, Path]) -> None:
    assert all(disk.network_disk(host) == "FUSE" for host in shared_disk)
    calls = [[sys.executable, "-c", WRITER, str(host / LEDGER), "60"] for host in shared_disk]
    reader = None
    writers = [subprocess.Popen(call) for call in calls]
    while any(writer.poll() is None for writer in writers):
        if reader is None and (shared_disk[0] / LEDGER).exists() and (shared_disk[0] / "head").exists():
            reader = open_for_reading(shared_disk[0] / LEDGER)
        if reader is not None:
            assert reader.first_broken_link(noted=False) is None  # whole at every moment
        time.sleep(0.01)
    assert [writer.returncode for writer in writers] == [0, 0]
    ledger = Ledger(shared_disk[1] / LEDGER)
    assert ledger.head()[0] == 120
    assert ledger.first_broken_link() is None
    assert journal_mode(ledger) == "truncate"
    lines = (shared_disk[0] / "journal.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) >= 120


def test_a_ledger_with_a_write_ahead_log_gives_it_up_on_a_network_disk(shared_disk: tuple[Path, Path]) -> None:
    server = shared_disk[0].parent / "server"
    local = Ledger(server / LEDGER)
    add(local, "written on the server")
    assert journal_mode(local) == "wal"
    local.close()
    remote = Ledger(shared_disk[0] / LEDGER)
    assert journal_mode(remote) == "truncate"
    add(remote, "written on a client")
    # The server sees a local disk, and must not go back while clients write.
    local = Ledger(server / LEDGER)
    assert journal_mode(local) == "truncate"
    add(local, "written on the server")
    add(remote, "written on a client")
    assert (remote.head()[0], remote.first_broken_link()) == (4, None)


def test_a_host_does_not_join_a_ledger_whose_log_is_shared_memory_of_another(
    shared_disk: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looplab.ledger.ledger.BUSY_TIMEOUT_S", 0.1)
    local = Ledger(shared_disk[0].parent / "server" / LEDGER)
    add(local, "written on the server")
    call = [
        sys.executable,
        "-c",
        WRITER.replace("import sys", "import sys, looplab.ledger.ledger as l; l.BUSY_TIMEOUT_S = 0.1", 1),
    ]
    joined = subprocess.run([*call, str(shared_disk[0] / LEDGER), "1"], capture_output=True, text=True, check=False)
    assert joined.returncode != 0
    assert "cannot open the ledger" in joined.stderr
    add(local, "written on the server")
    assert (local.head()[0], local.first_broken_link()) == (2, None)


def test_a_ledger_that_is_moved_to_a_local_disk_has_a_write_ahead_log_again(
    shared_disk: tuple[Path, Path], tmp_path: Path
) -> None:
    lab = shared_disk[0] / "lab"
    (lab / ".looplab").mkdir(parents=True)
    ledger = Ledger(lab / ".looplab" / LEDGER)
    add(ledger, "written on a client")
    ledger.close()
    target = tmp_path / "local" / "lab"
    move_ledger(lab, lab / ".looplab", target)
    moved = Ledger(target / LEDGER)
    assert journal_mode(moved) == "wal"
    assert moved.first_broken_link() is None


def test_readers_of_a_rollback_journal_take_locks(shared_disk: tuple[Path, Path]) -> None:
    ledger = Ledger(shared_disk[0] / LEDGER)
    add(ledger, "first")
    reader = open_for_reading(shared_disk[1] / LEDGER)
    with reader.snapshot():
        assert reader.head()[0] == 1
        impatient = sqlite3.connect(shared_disk[0] / LEDGER, timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            impatient.execute("DELETE FROM events")  # SQLite would write into pages that the reader still reads
    add(ledger, "second")
    assert reader.head()[0] == 2


@pytest.mark.parametrize(("home", "expected"), [("local", "state"), ("network", None)])
def test_a_new_ledger_of_a_lab_on_a_network_disk_goes_to_a_local_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, expected: str | None
) -> None:
    monkeypatch.delenv(state.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remote = [tmp_path / "lab"] + [tmp_path] * (home == "network")
    monkeypatch.setattr(disk, "filesystem_type", lambda folder: 0x6969 if folder in remote else 0)
    (tmp_path / "lab").mkdir()
    found = StateConfig.of(tmp_path / "lab", None).folder
    assert found == (tmp_path / expected / "looplab" if expected else None)
    assert StateConfig.of(tmp_path, None).folder == (None if home == "local" else found)
