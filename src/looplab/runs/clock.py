"""A clock for recorded durations that is not affected when the system clock is set."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def now() -> float:
    """Return seconds since 1970: the system clock at process start plus the monotonic clock since then.

    The difference of two values is always correct. Time stamps for people may use `time.time`.
    """
    return _OFFSET + time.monotonic()
