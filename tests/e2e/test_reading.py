"""Commands that only read: for somebody who may not write, and on a disk that is mounted read-only."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.iterate.record import VersionLedger
from looplab.ledger.catalogue import IterateBeganEvent
from looplab.ledger.ledger import Ledger

PR_CAPBSET_DROP = 24
CAPABILITIES = (1, 2, 3)
"""DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER: with them root may write whatever the mode says."""
NOBODY = 65534
COPYING = (
    ("query", "SELECT count(*) FROM runs"),
    ("query", "SELECT count(*) FROM metrics"),
    ("plan",),
    ("export", "--csv", "{elsewhere}"),
)
"""Commands that copy the ledger."""
OPENING = (
    ("status",),
    ("status", "--json"),
    ("show", "1"),
    ("logs", "1"),
    ("verify",),
    ("diff", "1", "2"),
    ("compare", "1", "2"),
    ("report", "--to", "{elsewhere}"),
)
"""Commands that open it."""


def may_only_read() -> None:
    """In a child: give up what lets root write everywhere, for the program that it becomes."""
    if os.getuid() == 0:
        for capability in CAPABILITIES:
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def paths_of(folder: Path) -> list[Path]:
    return [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]


@pytest.fixture(params=["the files are read-only", "they are another user's"])
def read_only(lab: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    another = request.param == "they are another user's"
    if another and os.getuid() != 0:
        pytest.skip("only root can give files away")
    lab.queue("train.lr@set=0.2")
    lab("run")
    for path in paths_of(lab.folder):
        if another:
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.chown(path, NOBODY, NOBODY)
        else:
            path.chmod(0o555 if path.is_dir() else 0o444)
    yield lab
    for path in paths_of(lab.folder):
        if another:
            os.chown(path, 0, 0)
        path.chmod(0o755 if path.is_dir() else 0o644)


def read(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "looplab", *args, "--lab", str(folder)]
    return subprocess.run(
        argv, capture_output=True, text=True, preexec_fn=may_only_read, cwd=folder, timeout=PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.parametrize("commands", [COPYING, OPENING])
def test_reading_needs_no_right_to_write(read_only: Any, tmp_path: Path, commands: tuple[tuple[str, ...], ...]) -> None:
    before = {name: content for name, (_, content) in read_only.tree().items()}
    failed = {}
    for command in commands:
        done = read(read_only.folder, *(word.format(elsewhere=tmp_path / "elsewhere") for word in command))
        if done.returncode != 0:
            failed[command] = done.stdout + done.stderr
    assert failed == {}
    assert {name: content for name, (_, content) in read_only.tree().items()} == before


@pytest.mark.slow
def test_a_report_that_cannot_be_written_says_where_it_can(lab: Any, tmp_path: Path) -> None:
    lab("run")
    (tmp_path / "file").touch()
    done = lab("report", "--to", str(tmp_path / "file"), code=2)
    assert "cannot write" in done.err
    lab("report", "--to", str(tmp_path / "there"))
    assert (tmp_path / "there/report.md").exists()


@pytest.mark.slow
def test_a_lab_that_has_only_versions_can_be_verified(tmp_path: Path) -> None:
    (tmp_path / "iterate.yaml").touch()
    VersionLedger(Ledger(tmp_path / ".looplab/ledger.db")).record(IterateBeganEvent(start=2, end=3))
    done = read(tmp_path, "verify")
    assert "the record is whole: 1 events" in done.stdout, done.stderr
    assert "looplab-anchor" in read(tmp_path, "anchor").stdout
