"""A clock for durations that are kept: when somebody sets the machine's clock, it stays as it was."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 as of the start of this process, carried on by the monotonic clock.

    The difference of two of these is always right. Stamps that only people read may use `time.time`.
    """
    return _OFFSET + time.monotonic()
