"""The signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the terminal was closed).

A signal that was ignored when the process started stays ignored, as POSIX asks: nohup and shells that start a job in
the background ignore it so that a Ctrl-C, or the end of a terminal, which is meant for others does not end the job.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object]
Handlers = dict[signal.Signals, object]


def install(handler: Handler) -> Handlers:
    """Handle the ending signals that are not ignored; return the handlers that were there before."""
    wanted = [number for number in ENDING if not is_ignored(number)]
    return {number: signal.signal(number, handler) for number in wanted}


def restore(before: Handlers) -> None:
    for number, handler in before.items():
        if handler is not None:  # None: installed by a library in C, which Python cannot restore
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Handle the ending signals within a block."""
    before = install(handler)
    try:
        yield
    finally:
        restore(before)


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def warn_ctrl_c(say: Callable[[str], object], instead: str) -> None:
    """Say what to use instead of Ctrl-C, where that does nothing."""
    if is_ignored(signal.SIGINT):
        say(f"Ctrl-C is ignored here (started in the background): use {instead}")


def reset_inherited() -> None:
    """Undo what no starter of a program means to pass on: blocked ending signals, and an ignored SIGCHLD, with which
    every child process would seem to have succeeded."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGCHLD))
    if is_ignored(signal.SIGCHLD):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
