"""Printing: rich tables on a terminal, plain aligned columns in a pipe, JSON where asked."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

COLOURS = {
    "ok": "green", "failed": "red", "lost": "red", "timeout": "yellow", "stopped": "yellow",
    "running": "cyan", "planned": "dim", "keep": "green", "discard": "red", "inconclusive": "yellow",
}  # fmt: skip


def is_terminal() -> bool:
    return sys.stdout.isatty()


_printing = threading.Lock()
"""Threads print whole lines: reports and archives are written beside the engine and report problems."""


def say(text: str = "") -> None:
    with _printing:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def mute(*streams: int) -> None:
    """Continue without a reader on these file descriptors."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def terminals() -> list[int]:
    """Which of stdout and stderr are a terminal. A terminal that was closed is none any more: ask before."""
    return [stream for stream in (1, 2) if os.isatty(stream)]


def survives_reader(action: Callable[..., None]) -> Callable[..., None]:
    """Make an action that prints continue silently once nobody reads: `looplab run | head`, or a closed terminal, must
    not end a study."""

    def act(*args: Any) -> None:
        try:
            action(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            mute(1)

    return act


def print_json(data: Any) -> None:
    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2, default=str).decode() + "\n")


def print_line(data: Any) -> None:
    """One JSON object on one line, at once: for streams."""
    say(orjson.dumps(data, default=str).decode())


def number(value: float | None, digits: int = 5) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    """`4.2s`, `3m05s`, `2h07m`."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """A table for people on a terminal; in a pipe, columns that `awk` and eyes can read, never cut."""
    listed = [[str(cell) for cell in row] for row in rows]
    if is_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        for name in columns:
            drawn.add_column(name, overflow="fold")
        for row in listed:
            drawn.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        Console().print(drawn)
        return
    if title:
        print(title)
    widths = [max(len(line[i]) for line in [list(columns), *listed]) for i in range(len(columns))]
    for line in [list(columns), *listed]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()


def cell(value: Any) -> str:
    """A config value in a table."""
    if value is None or isinstance(value, str):
        return "null" if value is None else value
    if isinstance(value, float):
        return repr(value)
    return orjson.dumps(value, default=str).decode()
