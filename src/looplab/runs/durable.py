"""Batched durability: a background thread flushes all writes since the last sync to disk together.

A crashed process loses nothing that it has written. A power failure loses what the kernel has not yet written to disk.
Syncing every file of every run would cost more than starting the run, so one thread syncs the lab's file system after
writes, every two seconds at most (a sync blocks every process that creates files). A power failure can therefore undo
only the last seconds, and the ledger stays consistent because its log is checksummed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from pathlib import Path

PAUSE_S = 2.0
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

    def close(self) -> None:
        """Sync once more, in the background. The process does not exit before that is done."""
        if not self._closed.is_set():
            self._closed.set()
            self._dirty.set()
            atexit.register(self.wait)

    def wait(self) -> None:
        """Wait for the last sync; an impatient person may interrupt it."""
        with contextlib.suppress(KeyboardInterrupt):
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._dirty.wait()
            self._dirty.clear()
            if not self._closed.is_set():
                self._sync()
                self._closed.wait(PAUSE_S)
        self._sync()
        os.close(self._descriptor)
        atexit.unregister(self.wait)

    def _sync(self) -> None:
        if hasattr(self._libc, "syncfs"):
            self._libc.syncfs(self._descriptor)  # releases the GIL while it waits for the disk
        else:
            with contextlib.suppress(OSError):
                os.sync()
