"""Durability in batches: what was written since the last sync goes to the disk together, beside the work.

The death of a process loses nothing that was written. A power cut loses what the kernel had not yet put on the disk;
syncing each file of each run by itself would cost more than starting the run, so one background thread syncs the
file system of the lab when something was written, a few times a second at most (a sync holds up everybody who creates
files meanwhile). What a power cut can take back is therefore the last moment, and the ledger stays consistent: its log
is checksummed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

PAUSE_S = 0.5
"""The shortest time between two syncs."""


class Syncer:
    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._dirty = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looplab-sync", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Something was written: sync it soon."""
        self._dirty.set()

    def close(self) -> None:
        """Sync what is left, and stop."""
        self._closed.set()
        self._dirty.set()
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._dirty.wait()
            self._dirty.clear()
            self._sync()
            self._closed.wait(PAUSE_S)
        self._sync()

    def _sync(self) -> None:
        if hasattr(self._libc, "syncfs"):
            self._libc.syncfs(self._descriptor)  # releases the interpreter lock while it waits for the disk
        else:
            with contextlib.suppress(OSError):
                os.sync()
