"""Graceful stop on signals: finish the current step, save, exit with the right code.

    with trainkit.stopping(save=save_latest) as stop:
        while step < last and not stop:
            train_one_step()

The first SIGINT, SIGTERM or SIGHUP only makes `stop` true (a signal that was already ignored, by nohup or for a
background job, stays ignored). When the block then ends, `save` runs and the process exits with 130, 143 or 129, as
shells report it. A second signal kills the process immediately.

An exception in the block also runs `save`, then propagates. If a signal came first, the exception is printed and the
exit code is the signal's: a signal to a whole process group often shows up as an exception about killed workers.
A block that ends normally saves nothing; the final save is up to the trainer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from looplab import signals
from looplab.errors import LabError


class Stopper:
    """Handles signals within a `with` block; true once a signal has arrived. In the main thread only."""

    def __init__(self, save: Callable[[], object] | None = None) -> None:
        self.signal: int | None = None
        """The first signal that arrived; None if there was none."""
        self._save = save
        self._previous: signals.Handlers = {}
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str | None:
        """Name of the signal (SIGTERM, …); None if there was none."""
        return None if self.signal is None else signal.Signals(self.signal).name

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise LabError("signals can be handled in the main thread only", hint="open the block there")
        self.signal = None
        self._process = os.getpid()
        self._previous = signals.install(self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if os.getpid() == self._process and self._save is not None and (error is not None or self):
                self._save()
        finally:
            signals.restore(self._previous)
            self._previous = {}
        if self.signal is not None and os.getpid() == self._process:
            if error is not None and not isinstance(error, SystemExit):
                import traceback

                traceback.print_exception(error)
            sys.exit(128 + self.signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker: default behaviour
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal = number
        # The kernel handles the next one, which then also kills a process that hangs outside Python.
        for handled in self._previous:
            signal.signal(handled, signal.SIG_DFL)


stopping = Stopper
"""Alias that reads well: `with stopping(save=…) as stop`."""
