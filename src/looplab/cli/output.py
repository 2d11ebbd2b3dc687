"""Printing: rich tables on a terminal, plain aligned columns in a pipe, JSON on request."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from looplab.untrusted import clean_line, clean_text, dump_json, escape_json

if TYPE_CHECKING:
    from rich.console import Console

    from looplab.runs.logs import LogStream

COLOURS = {
    "ok": "green", "failed": "red", "lost": "red", "timeout": "yellow", "stopped": "yellow",
    "running": "cyan", "queued": "yellow", "planned": "dim", "keep": "green", "discard": "red",
    "inconclusive": "yellow",
}  # fmt: skip
LAST_COLUMN = 24
"""Minimum width of a table's last column, which often has sentences; below that it is printed under each row."""
ASCII = {
    "→": "->", "±": "+/-", "…": "...", "–": "-", "—": "-", "−": "-", "×": "x", "·": ".", "█": "#", "▕": "[", "▏": "]",
    "●": "*", "■": "x", "◆": "?", "✗": "!", "›": ">",
}  # fmt: skip
"""Replacements of our own signs on a terminal that is limited to ASCII."""


def is_terminal() -> bool:
    return sys.stdout.isatty()


_printing = threading.Lock()
"""Keeps lines whole: the threads that write reports and archives print too."""


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr (some job schedulers close them). Otherwise the next
    file that is opened would get that descriptor, and the output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            devnull = os.open(os.devnull, os.O_RDWR)
            if devnull != number:
                os.dup2(devnull, number)
                os.close(devnull)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (open until exit)


def accept_any_text() -> None:
    """Let stdout and stderr write characters that their encoding lacks: our own signs as ASCII (`->`), others as
    `\\uXXXX`. A terminal without UTF-8 must not end a study."""
    codecs.register_error("looplab", _replace_signs)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="looplab")


def _replace_signs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(one) or one.encode("ascii", "backslashreplace").decode() for one in lacking), error.end


def say(text: str = "") -> None:
    """Print a line for people, without control codes that untrusted text may contain."""
    _print(clean_text(text), sys.stdout)


def _print(text: str, stream: TextIO) -> None:
    with _printing:
        stream.write(f"{text}\n")
        stream.flush()


def warn(text: str) -> None:
    """Print a line on stderr, without control codes."""
    _print(clean_text(text), sys.stderr)


def show_log(text: str) -> None:
    """Print a program's output: unchanged in a pipe, without control codes on a terminal."""
    if is_terminal():
        text = "\r".join(map(clean_text, text.split("\r")))  # progress bars overwrite their line
    sys.stdout.write(text)
    sys.stdout.flush()


def show_growth(log: LogStream, *, final: bool) -> bool:
    """Print what is new in a log; return whether there was anything."""
    grown = False
    for portion in log.portions(final=final):
        show_log(portion)
        grown = True
    return grown


def mute(*streams: int) -> None:
    """Redirect these file descriptors to /dev/null."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(devnull, stream)
    os.close(devnull)


def terminals() -> list[int]:
    """Return the descriptors of stdout and stderr that are terminals. Call it early: closing one changes the result."""
    return [stream for stream in (1, 2) if os.isatty(stream)]


def survives_reader(action: Callable[..., None]) -> Callable[..., None]:
    """Make an action that prints continue silently when its reader is gone: `looplab run | head`, or a closed
    terminal, must not end a study."""

    def act(*args: Any) -> None:
        try:
            action(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            mute(1)

    return act


def print_json(data: Any) -> None:
    """Print valid JSON, whatever the data and the encoding of stdout."""
    sys.stdout.write(_safe_json(dump_json(data, indent=True)) + "\n")


def print_line(data: Any) -> None:
    """Print one JSON object on one line and flush it, for streams."""
    _print(_safe_json(dump_json(data)), sys.stdout)


def answer(json: bool, data: Any, *lines: str) -> None:
    """Print the result of a command: JSON on request, else lines for people."""
    if json:
        print_json(data)
        return
    for line in lines:
        say(line)


def _safe_json(text: str) -> str:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return escape_json(text, ascii_only=encoding not in ("utf8", "utf8sig"))


def number(value: float | None, digits: int = 5) -> str:
    """Format a number with this many significant digits; None: `-`."""
    return "-" if value is None else f"{value:.{digits}g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table: with colours on a terminal; in a pipe as aligned columns for `awk` and people, never truncated."""
    columns = [clean_line(name) for name in columns]
    listed = [[clean_line(str(cell)) for cell in row] for row in rows]
    title = None if title is None else clean_line(title)
    if is_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        widths = [max(Text(line[i]).cell_len for line in [columns, *listed]) for i in range(len(columns))]
        before_last = sum(widths[:-1]) + 2 * (len(columns) - 1)
        if before_last + widths[-1] > console.width and before_last + LAST_COLUMN > console.width and len(columns) > 2:
            least = [
                widths[0],
                *(max(_longest_word(line[i]) for line in [columns, *listed]) for i in range(1, len(columns))),
            ]
            if widths[-1] > LAST_COLUMN and sum(least[:-1]) + 2 * (len(columns) - 2) <= console.width:
                _stacked_table(console, columns, listed, title, least)
            else:
                _table_of_records(console, columns, listed, title)
            return
        drawn = Table(title_justify="left", header_style="bold", box=None, pad_edge=False)
        drawn.title = None if title is None else Text(title)
        for name in columns:
            drawn.add_column(Text(name), overflow="fold")
        for row in listed:
            drawn.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        console.print(drawn)
        return
    if title:
        print(title)
    widths = [max(len(line[i]) for line in [list(columns), *listed]) for i in range(len(columns))]
    for line in [list(columns), *listed]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()


def _longest_word(text: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.split()), default=0)


def _table_of_records(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None
) -> None:
    """Print a table that is far too wide for the terminal: each row as names and values, without empty ones."""
    from rich.padding import Padding
    from rich.text import Text

    if title is not None:
        console.print(Text(title, style="italic"))
    for row in rows:
        if row[0]:  # empty: another row of the one above
            console.print(Text(row[0], style="bold"))
        line = Text()
        for name, cell in zip(columns[1:], row[1:], strict=True):
            if cell in ("", "-"):
                continue
            pair = Text().append(f"{name} ".lstrip(), style="dim").append(cell, style=COLOURS.get(cell, ""))
            if line and line.cell_len + 2 + pair.cell_len > console.width - 2:
                console.print(Padding(line, (0, 0, 0, 2)))
                line = Text()
            line = line.append("  ").append_text(pair) if line else pair
        if line:
            console.print(Padding(line, (0, 0, 0, 2)))


def _stacked_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None, least: Sequence[int]
) -> None:
    """Print a table that is too wide for the terminal, with the last column below each row.

    Args:
        least: The widths to which columns may be narrowed: those of their longest words.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    widths = [max(Text(line[i]).cell_len for line in [columns, *rows]) for i in range(len(columns) - 1)]
    while sum(widths) + 2 * (len(widths) - 1) > console.width:
        widest = max((width, i) for i, width in enumerate(widths) if width > least[i])[1]
        widths[widest] -= 1
    if title is not None:
        console.print(Text(title, style="italic"))
    for number, row in enumerate([columns, *rows]):
        drawn = Table(show_header=False, box=None, pad_edge=False)
        for width in widths:
            drawn.add_column(width=width, overflow="fold")
        drawn.add_row(*(Text(cell, style=COLOURS.get(cell, "") if number else "bold") for cell in row[:-1]))
        console.print(drawn)
        if number and row[-1]:
            console.print(Padding(Text(row[-1], style="dim"), (0, 0, 0, 4)))


def cell(value: Any) -> str:
    """Format a config value for a table."""
    if value is None or isinstance(value, str):
        return "null" if value is None else value
    if isinstance(value, float):
        return repr(value)
    return dump_json(value)
