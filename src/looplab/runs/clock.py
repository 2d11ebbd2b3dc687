"""A clock for recorded durations that is not affected when the system clock is set, and durations as text."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def now() -> float:
    """Return seconds since 1970: the system clock at process start plus the monotonic clock since then.

    The difference of two values is always correct. Time stamps for people may use `time.time`.
    """
    return _OFFSET + time.monotonic()


def format_seconds(value: float | None) -> str:
    """Return a duration as `4.2s`, `3m05s` or `2h07m`; None: `-`."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
