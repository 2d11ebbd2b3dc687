"""The agent supervisor: a small process between looplab and an agent that leaves nothing of the agent behind.

Run as a script by an isolated interpreter (`python -I -S supervisor.py FD GRACE TAG PROGRAM ARGS…`); it imports nothing
of looplab. It starts the agent in its own session, with the standard streams that it was given itself, and holds one
end of the socket FD. It ends the agent when a byte arrives on the socket, and when looplab dies for any reason, because
that closes the socket. Ending means SIGTERM to every descendant of the agent, wherever it went (the supervisor is a
subreaper, so it inherits orphans), and SIGKILL after GRACE seconds. Processes that a finished agent leaves running are
ended in the same way. All of them carry TAG, a resource limit that is inherited whatever happens to the environment:
looplab uses it to find what is left if the supervisor itself is killed. The last thing it sends is one line:
`exit CODE`, `signal NUMBER` or `error TEXT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
RLIMIT_LOCKS = 10
"""Not enforced by Linux since version 2.4; see launch/supervisor.py."""
CHECK_S = 0.05
"""Seconds between two checks while processes are being ended."""
LEFTOVER_GRACE_S = 2.0
"""Maximum grace period, in seconds, of processes that the agent left running."""
GIVE_UP_S = 10.0
"""Seconds until processes that SIGKILL does not end (another user's, a broken disk) are ignored."""


def descendants() -> list[int]:
    """Return every living descendant of this process."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents[int(name)] = int(parent)
    below, found = {os.getpid()}, 1
    while found:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        found = len(more)
    return sorted(below - {os.getpid()})


def send(number: int) -> None:
    """Send a signal to every descendant."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap(first: int) -> int | None:
    """Reap ended children; return the wait status of the agent if it is one of them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == first:
                status = ended
    return status


def watch(lifeline: socket.socket, wake: int, first: int, grace: float) -> int:
    """Wait until no process of the agent is left; return its wait status."""
    status: int | None = None
    kill_at: float | None = None
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    poller.register(lifeline, select.POLLIN)
    while True:
        end_now = False
        for descriptor, _ in poller.poll(None if kill_at is None else CHECK_S * 1000):
            if descriptor == wake:
                end_now |= any(number != signal.SIGCHLD for number in os.read(wake, 4096))
            else:  # a byte: end the agent; end of file: looplab is gone
                poller.unregister(lifeline)
                end_now = True
        ended = reap(first)
        status = ended if status is None else status
        if status is not None and not descendants():
            return status
        now = time.monotonic()
        if kill_at is None and (end_now or status is not None):
            kill_at = now + (grace if status is None else min(grace, LEFTOVER_GRACE_S))
            send(signal.SIGTERM)
        elif kill_at is not None and now >= kill_at + GIVE_UP_S:
            return signal.SIGKILL if status is None else status
        elif kill_at is not None and now >= kill_at:
            send(signal.SIGKILL)


def main() -> None:
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    lifeline.set_inheritable(False)
    grace, tag, command = float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    with contextlib.suppress(OSError, ValueError):  # the hard limit is lower
        resource.setrlimit(RLIMIT_LOCKS, (tag, resource.getrlimit(RLIMIT_LOCKS)[1]))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # an inherited blocked SIGCHLD would hide every exit
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    handled = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in handled:
        signal.signal(number, lambda *_: None)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    try:
        first = os.posix_spawn(
            command[0], command, os.environ, setsid=True, setsigmask=(), setsigdef=[*handled, *ignored]
        )
    except OSError as error:
        report = f"error {error.strerror}"
    else:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for stream in (0, 1, 2):  # only the agent holds them, so they close when it ends
            os.dup2(nothing, stream)
        code = os.waitstatus_to_exitcode(watch(lifeline, wake_r, first, grace))
        report = f"exit {code}" if code >= 0 else f"signal {-code}"
    with contextlib.suppress(OSError):
        lifeline.sendall(report.encode() + b"\n")


if __name__ == "__main__":
    main()
