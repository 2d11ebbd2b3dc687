"""Moving the ledger of a lab to another folder, such as one on a local disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from pathlib import Path

from looplab.config.files import sync_folder
from looplab.config.state import LEDGER, LEDGER_FILES, home, make_state_folder, set_pointer
from looplab.errors import LabError
from looplab.ledger.backup import FOLDER
from looplab.ledger.catalogue import LedgerMovedEvent
from looplab.ledger.ledger import Ledger
from looplab.runs.names import random_suffix

SUFFIXES = ("-wal", "-shm", "-journal")


def move_ledger(lab: Path, source: Path, target: Path) -> None:
    """Move the ledger of a lab from one folder to another, with its journal and backups.

    The caller holds the locks of all studies. The files are copied first; from the moment at which the lab points to
    the copy, that is the ledger, and the old files are put aside. A process that is killed leaves one of the two.

    Raises:
        LabError: The ledger cannot be read or copied, or has lost events.
    """
    try:
        if target != home(lab):
            make_state_folder(lab, target)
        if any(os.path.lexists(target / name) for name in LEDGER_FILES):
            _put_aside(target)  # of a move that was interrupted, or of an earlier one
        with contextlib.closing(Ledger(source / LEDGER, create=False)) as ledger, ledger.write():  # nobody else writes
            ledger.complete_journal()
            _copy(source, target)
            set_pointer(lab, target)
            sync_folder(home(lab))
            _put_aside(source)
    except (OSError, sqlite3.Error) as error:
        raise LabError(f"the ledger cannot be moved to {target}: {error}") from error
    with contextlib.closing(Ledger(target / LEDGER, create=False)) as ledger, ledger.write():
        ledger.record(LedgerMovedEvent(was=str(source), now=str(target)), "")


def _copy(source: Path, target: Path) -> None:
    temporary = target / f".tmp-{os.getpid()}-move"
    uri = f"{(source / LEDGER).resolve().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(uri, uri=True)) as old,
        contextlib.closing(sqlite3.connect(temporary)) as new,
    ):
        new.execute("PRAGMA synchronous=FULL")
        old.backup(new)
    for name in LEDGER_FILES[1:]:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source / name, target / name)
    if (source / FOLDER).is_dir():
        shutil.copytree(source / FOLDER, target / FOLDER, dirs_exist_ok=True)
    os.replace(temporary, target / LEDGER)
    sync_folder(target)


def _put_aside(folder: Path) -> None:
    """Move the files of a ledger into a folder of their own."""
    aside = folder / f"moved-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{random_suffix(4)}"
    aside.mkdir()
    for name in (*LEDGER_FILES[1:], FOLDER, *(LEDGER + suffix for suffix in SUFFIXES), LEDGER):
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder / name, aside / name)
