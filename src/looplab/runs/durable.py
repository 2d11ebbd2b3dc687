"""Batched durability: a background thread flushes all writes since the last sync to disk together.

A crashed process loses nothing that it has written. A power failure loses what the kernel has not yet written to disk.
Syncing every file of every run would cost more than starting the run, so one thread syncs the lab's file system after
writes, at most a few times per second (a sync blocks every process that creates files). A power failure can therefore
undo only the last moment, and the ledger stays consistent because its log is checksummed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

PAUSE_S = 0.5
"""Minimum number of seconds between two syncs."""


class Syncer:
    """Syncs the file system of a folder in a background thread."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._dirty = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looplab-sync", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Schedule a sync of what has been written."""
        self._dirty.set()

    def finish(self) -> None:
        """Begin the last sync, of everything that is written by now; `close` waits for it."""
        self._closed.set()
        self._dirty.set()

    def close(self) -> None:
        """Sync once more and stop the thread."""
        self.finish()
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
            self._libc.syncfs(self._descriptor)  # releases the GIL while it waits for the disk
        else:
            with contextlib.suppress(OSError):
                os.sync()
