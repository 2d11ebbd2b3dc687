"""Facts about processes from /proc. A process that is gone raises OSError unless a function says otherwise.

`supervisor.py`, a script that imports nothing of looplab, reads /proc itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator


def pids() -> Iterator[int]:
    """Yield the ids of all processes."""
    return map(int, filter(str.isdigit, os.listdir("/proc")))


def environ(pid: int) -> list[bytes]:
    """Return the variables of a process at its start, as `NAME=value`."""
    return _read(pid, "environ").split(b"\0")


def argv(pid: int) -> list[bytes]:
    return _read(pid, "cmdline").split(b"\0")


def name(pid: int) -> str:
    return os.fsdecode(_read(pid, "comm").strip())


def parent(pid: int) -> int:
    return int(_state(pid)[1])


def is_zombie(pid: int) -> bool:
    """Return whether the process is a zombie or does not exist."""
    try:
        return _state(pid)[0] == b"Z"
    except (OSError, IndexError):
        return True


def _state(pid: int) -> list[bytes]:
    """Return the fields of `stat` after the name, which may contain anything: the state, the parent, …"""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, file: str) -> bytes:
    with open(f"/proc/{pid}/{file}", "rb") as opened:
        return opened.read()
