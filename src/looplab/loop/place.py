"""The location of the lab: monitored while an engine runs, and compared between engines.

`.looplab/place` stores host, path and inode of the lab folder at the last engine start. A moved lab has the same inode
at another path. A copy has another inode, and the original still exists.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.ledger.catalogue import CopiedEvent, MovedEvent
from looplab.ledger.ledger import Ledger
from looplab.runs import folder
from looplab.untrusted import dump_json, load_json, mend_text, read_bounded

PLACE_FILE = "place"
LONGEST = 1 << 16
"""Maximum size of the place file, in bytes."""


class PlaceMonitor:
    """Detects that the lab folder, ledger, lock or study folder was moved or replaced since the engine started."""

    def __init__(self, lab: Path, study: str, ledger: Path) -> None:
        self._lab = os.open(lab, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # keeps its inode from being reused
        self._files: dict[str, tuple[str, os.stat_result]] = {}
        for path, what in ((lab, "the lab"), (ledger, "the ledger"), (ledger.with_name(f"{study}.lock"), "the lock")):
            with contextlib.suppress(FileNotFoundError):
                self._files[str(path)] = what, os.stat(path)
        outputs = folder.study_folder(lab, study)
        self._linked = {str(path): os.path.islink(path) for path in (outputs.parent, outputs)}
        self._folders = {path: _stat(path) for path in self._linked}  # None: the engine has not made it yet

    def lost(self) -> str | None:
        """Return what was moved or replaced, as a sentence; None if nothing was. Takes a few microseconds."""
        for path, (what, before) in self._files.items():
            try:
                now = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return f"{what} is no longer at {path}: it was moved or deleted while the engine ran"
            if not os.path.samestat(now, before):
                return f"{what} at {path} is not the one that the engine started with"
        for path, linked in self._linked.items():
            if not linked and os.path.islink(path):
                return f"{path} was replaced by a link while the engine ran"
            folder_before, folder_now = self._folders[path], _stat(path)
            if folder_before is None:
                self._folders[path] = folder_now
            elif folder_now is None or not os.path.samestat(folder_now, folder_before):
                return f"{path} was moved or deleted while the engine ran"
        return None

    def close(self) -> None:
        """Release the lab folder."""
        os.close(self._lab)


@dataclass(frozen=True, slots=True)
class Move:
    """A change of the lab's location since its last engine."""

    kind: str
    """`moved` or `copied`."""
    text: str
    was: dict[str, Any]
    """Former location: `host`, `path` and `inode`."""


def _stat(path: str) -> os.stat_result | None:
    """Return the status of a folder; None if it does not exist."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def find_move(lab: Path) -> Move | None:
    """Compare the lab's location with that of its last engine; None if it is unchanged or unknown."""
    was, here = _read(lab), _here(lab)
    if was is None or (was["host"], was["path"]) == (here["host"], here["path"]):
        return None
    if was["inode"] == here["inode"]:
        return Move("moved", f"the lab was moved here from {was['path']}", was)
    if was["host"] == here["host"]:
        with contextlib.suppress(OSError, ValueError):
            if os.stat(was["path"]).st_ino == was["inode"]:
                text = f"this lab is a copy of {was['path']}, which still exists: its runs are not touched"
                return Move("copied", text, was)
    return Move("moved", f"the lab was at {was['path']} on host {was['host']} before", was)


def note_place(lab: Path, study: str, ledger: Ledger) -> Move | None:
    """Record the lab's location, and return the move or copy since the last engine; None if there is none."""
    move, here = find_move(lab), _here(lab)
    if move is not None:
        with ledger.write():
            event = (MovedEvent if move.kind == MovedEvent.kind else CopiedEvent)(was=move.was, now=here)
            ledger.record(event, study)
    if here != _read(lab):
        folder.write_over(lab / ".looplab" / PLACE_FILE, dump_json(here).encode())
    return move


def _here(lab: Path) -> dict[str, Any]:
    """Return the current location of the lab."""
    path = lab.resolve()
    return {"host": os.uname().nodename, "path": mend_text(str(path)), "inode": path.stat().st_ino}


def _read(lab: Path) -> dict[str, Any] | None:
    """Return the stored location of the lab; None if there is no valid one."""
    try:
        stored = load_json(read_bounded(lab / ".looplab" / PLACE_FILE, LONGEST))
    except (OSError, ValueError):
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("inode"), int):
        return None
    texts = all(isinstance(stored.get(key), str) for key in ("host", "path"))
    return {key: stored[key] for key in ("host", "path", "inode")} if texts else None
