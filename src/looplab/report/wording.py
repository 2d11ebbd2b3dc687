"""How reports write numbers, times and text that came from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import floor, isfinite, log10
from typing import Any

from looplab.runs.redact import HIDDEN, is_secret, redact_text
from looplab.untrusted import clean_text, dump_json

NOTHING = "–"
EXACT = 1 << 53
"""Larger ints are told as text: a browser would round them."""


def number(value: float | None, digits: int = 5) -> str:
    if value is None or not isfinite(value):
        return NOTHING if value is None else str(value)
    return f"{value:.{digits}g}"


def signed(value: float | None, digits: int = 3) -> str:
    if value is None:
        return NOTHING
    return "0" if value == 0 else ("+" if value > 0 else "") + number(value, digits)


def mean(value: float | None, sd: float | None, n: int) -> str:
    """`0.743 ± 0.012 (n 12)`; of a single run, its value."""
    if sd is None:
        return number(value)
    return f"{number(value, 4)} ± {number(sd, 2)} (n {n})"


def effect(value: float, low: float | None, high: float | None) -> str:
    """`0.21 [0.18, 0.25]`, with as many decimals as the interval is worth."""
    if low is None or high is None:
        return number(value, 3)
    width = high - low
    if not 1e-6 < width < 1e6:
        return f"{number(value, 3)} [{number(low, 3)}, {number(high, 3)}]"
    decimals = max(0, -floor(log10(width / 4)))
    return f"{value:z.{decimals}f} [{low:z.{decimals}f}, {high:z.{decimals}f}]"


def bars(values: Sequence[float]) -> str:
    """Numbers from 0 to 1 in one line of text."""
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * one)))] for one in values)


def seconds(value: float | None) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if value is None:
        return NOTHING
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def plain(text: str) -> str:
    """Text from a log, a config or a proposer: no secrets, no terminal codes, nothing that turns the line around."""
    return redact_text(clean_text(text))


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def value(key: str, given: Any) -> Any:
    """A config value for a report: a number, a truth, a text or nothing; what looks like a secret is hidden."""
    if given is None or isinstance(given, bool):
        return given
    if is_secret(key.rpartition(".")[2], given):
        return HIDDEN
    if isinstance(given, int):
        return given if abs(given) <= EXACT else str(given)
    if isinstance(given, float):
        return given if isfinite(given) else str(given)
    if isinstance(given, str):
        return plain(given)
    return plain(dump_json(given).strip())


def to_json(data: Any) -> str:
    return dump_json(data)


def shown(given: Any) -> str:
    """The same as text."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    return f"{given:.6g}" if isinstance(given, float) else str(given)


def change(sides: Mapping[str, Any]) -> str:
    """`0.001 → 0.01`, for the two sides of a difference."""
    if "old" not in sides:
        return f"{shown(sides['new'])} (new)"
    return f"{shown(sides['old'])} → " + (shown(sides["new"]) if "new" in sides else "(gone)")
