"""Runs a program on a kernel that seems to have no Landlock: a seccomp filter answers its system calls with ENOSYS.

python no_landlock.py PROGRAM ARGS…
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_AT_LEAST, JUMP_MORE, RETURN = 0x20, 0x35, 0x25, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
FIRST, LAST = 444, 446  # landlock_create_ruleset … landlock_restrict_self


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def main() -> None:
    instructions = [
        (LOAD, 0, 0, 0),  # the number of the system call
        (JUMP_AT_LEAST, 0, 2, FIRST),
        (JUMP_MORE, 1, 0, LAST),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    buffer = ctypes.create_string_buffer(code)
    program = _Program(len(instructions), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        sys.exit(f"no seccomp: {os.strerror(ctypes.get_errno())}")
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
