"""Ending a training well: a signal is looked at between two steps, and what was learned is saved.

    with trainkit.stopping(save=save_latest) as stop:
        while step < last and not stop:
            train_one_step()

The first SIGINT, SIGTERM or SIGHUP only makes `stop` true (one that was ignored before, by nohup or for a job in the
background, stays ignored). When the block is left because of it, `save` runs and the process exits with 130, 143 or
129, as shells count it. A second signal ends the process at once, whatever it does.
An exception in the block runs `save` too and goes on its way, to a traceback and exit code 1; if a signal was there
first, it is printed and the exit code is the signal's, because killed workers are what a signal to a whole process
group often looks like. A block that just ends saves nothing: that is the trainer's own last save.
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
    """Takes the signals while its block runs; true once one has come."""

    def __init__(self, save: Callable[[], object] | None = None) -> None:
        self.signal: int | None = None
        """The signal that came first."""
        self._save = save
        self._before: signals.Handlers = {}
        self._process = os.getpid()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str | None:
        """The name of the signal: SIGTERM, …"""
        return None if self.signal is None else signal.Signals(self.signal).name

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise LabError("signals can be taken in the main thread only", hint="open the block there")
        self.signal = None
        self._process = os.getpid()
        self._before = signals.install(self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if os.getpid() == self._process and self._save is not None and (error is not None or self):
                self._save()
        finally:
            signals.restore(self._before)
            self._before = {}
        if self.signal is not None and os.getpid() == self._process:
            if error is not None and not isinstance(error, SystemExit):
                import traceback

                traceback.print_exception(error)
            sys.exit(128 + self.signal)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker: it ends as if nobody had taken the signal
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal = number
        # The next one is the kernel's, so that it ends even a process that hangs outside of Python.
        for taken in self._before:
            signal.signal(taken, signal.SIG_DFL)


stopping = Stopper
"""The same, as it reads best: `with stopping(save=…) as stop`."""
