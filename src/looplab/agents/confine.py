"""Confine a program with Landlock: it may read everything, and write only to the given folders.

Run as a script by an isolated interpreter (`python -I -S confine.py PATH… -- PROGRAM ARGS…`); it imports nothing of
looplab. The kernel enforces the limits for the program and all its descendants; from Landlock 6 on, they also cannot
signal processes outside. Devices are writable as far as the caller says. The network, and the mode, owner and times of
files, are not restricted.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from stat import S_ISDIR

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PR_SET_NO_NEW_PRIVS = 38
WRITE_FILE, TRUNCATE, REFER = 1 << 1, 1 << 14, 1 << 13
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
SCOPE_SIGNAL = 2
COMPLETE = 3
"""The first version of Landlock that prevents all changes of content; before it, any file can be truncated."""
ALL_DEVICES = ("/dev",)
AGENT_DEVICES = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts"),
    *("/dev/shm", "/dev/nvidia*", "/dev/dri", "/dev/kfd"),  # noqa: S108 (shared memory is made for this)
)
"""Patterns of devices that programs need; no disks."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _BeneathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers; 0 if none."""
    return max(0, int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)))


def confined(argv: Sequence[str], writable: Iterable[Path], devices: Iterable[str] = ALL_DEVICES) -> list[str]:
    """Return a command line that runs `argv` with write access only to these folders, files and devices.

    Args:
        argv: The command, its program as a full path.
        writable: Folders and files.
        devices: Patterns of device files.
    """
    paths = [str(path.resolve()) for path in writable]
    paths += [path for pattern in devices for path in sorted(glob.glob(pattern))]
    return [sys.executable, "-I", "-S", __file__, *paths, "--", *argv]


def restrict(writable: Iterable[str]) -> None:
    """Permanently restrict writing by this process to these paths.

    Raises:
        OSError: The kernel refused, or one of the paths is missing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = landlock_version()
    rights = WRITE_FILE | MAKE_AND_REMOVE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)

    def call(*args: object) -> int:
        result = int(libc.syscall(*args))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    attributes = _Ruleset(rights, 0, SCOPE_SIGNAL)
    ruleset = call(CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes) if version >= 6 else 8, 0)
    for path in writable:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if S_ISDIR(os.fstat(parent).st_mode) else rights & (WRITE_FILE | TRUNCATE)
        call(ADD_RULE, ruleset, 1, ctypes.byref(_BeneathRule(allowed, parent)), 0)
        os.close(parent)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def main() -> None:
    split = sys.argv.index("--")
    try:
        restrict(sys.argv[1:split])
        os.execv(sys.argv[split + 1], sys.argv[split + 1 :])
    except OSError as error:
        sys.exit(f"cannot be confined or started: {error}")


if __name__ == "__main__":
    main()
