"""Formatting of numbers, times and untrusted text in reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import floor, isfinite, log10
from typing import Any

from looplab.measure.digits import with_spread
from looplab.runs.redact import HIDDEN, is_secret, redact_text
from looplab.untrusted import clean_text, dump_json

NOTHING = "–"
BARS = "▁▂▃▄▅▆▇█"
EXACT = 1 << 53
"""Larger integers are written as text, since a browser would round them."""


def number(value: float | None, digits: int = 5) -> str:
    """Return a number with few significant digits; a dash for None."""
    if value is None or not isfinite(value):
        return NOTHING if value is None else str(value)
    return f"{value:.{digits}g}"


def signed(value: float | None, digits: int = 3) -> str:
    """Return a difference with its sign: `+0.0333`, `+3600`."""
    if value is None:
        return NOTHING
    if 1 <= abs(value) < 1e6:  # not +3.6e+03
        digits = max(digits, floor(log10(abs(value))) + 1)
    return "0" if value == 0 else ("+" if value > 0 else "") + number(value, digits)


def mean(value: float | None, sd: float | None, n: int) -> str:
    """Return `0.743 ± 0.012 (n 12)`; for a single run, its value."""
    return number(value, 4) if sd is None else f"{honest(value, sd)} (n {n})"


def honest(value: float | None, spread: float | None) -> str:
    """Return `0.973 ± 0.002`, with the digits that the spread allows; without a spread, only the value."""
    if value is None or spread is None or not isfinite(value):
        return number(value, 4)
    return with_spread(value, spread)


def effect(value: float, low: float | None, high: float | None) -> str:
    """Return `0.21 [0.18, 0.25]`, with decimals that match the width of the interval."""
    if low is None or high is None:
        return number(value, 3)
    width = high - low
    if not 1e-6 < width < 1e6:
        return f"{number(value, 3)} [{number(low, 3)}, {number(high, 3)}]"
    decimals = max(0, -floor(log10(width / 4)))
    return f"{value:z.{decimals}f} [{low:z.{decimals}f}, {high:z.{decimals}f}]"


def bars(values: Sequence[float]) -> str:
    """Draw numbers from 0 to 1 as bars in one line of text."""
    return "".join(BARS[min(7, max(0, int(8 * one)))] for one in values)


def moment(at: float) -> str:
    """Return a Unix time as UTC text."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def plain(text: str) -> str:
    """Return untrusted text without secrets, terminal codes and bidirectional controls."""
    return redact_text(clean_text(text))


def capitalised(text: str) -> str:
    """Return a sentence with a capital first letter."""
    return text[:1].upper() + text[1:]


def cut(text: str, length: int) -> str:
    """Shorten a text to `length` characters."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def value(key: str, raw: Any) -> Any:
    """Return a config value for a report: a number, a bool, a text or None, with secrets hidden."""
    if raw is None or isinstance(raw, bool):
        return raw
    if is_secret(key.rpartition(".")[2], raw):
        return HIDDEN
    if isinstance(raw, int):
        return raw if abs(raw) <= EXACT else str(raw)
    if isinstance(raw, float):
        return raw if isfinite(raw) else str(raw)
    if isinstance(raw, str):
        return plain(raw)
    return plain(dump_json(raw).strip())


def shown(raw: Any) -> str:
    """Return a config value as text."""
    if raw is None or isinstance(raw, bool):
        return {None: "null", True: "true", False: "false"}[raw]
    return f"{raw:.6g}" if isinstance(raw, float) else str(raw)


def change(sides: Mapping[str, Any]) -> str:
    """Return `0.001 → 0.01` for the two sides of a difference."""
    if "old" not in sides:
        return f"{shown(sides['new'])} (new)"
    return f"{shown(sides['old'])} → " + (shown(sides["new"]) if "new" in sides else "(gone)")
