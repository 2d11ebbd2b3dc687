"""The live view of a study: its slots, the best run, a progress bar with the time left. In a pipe: lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from looplab.cli import output
from looplab.ledger.view import RunRow
from looplab.runs.clock import format_seconds
from looplab.untrusted import clean_line, clean_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Row:
    """A running training in the view."""

    run: RunRow
    slot: str
    step: float | None
    objective: float | None


@dataclass(frozen=True, slots=True)
class ScreenState:
    """State of a study at one moment."""

    study: str
    metric: str
    running: tuple[Row, ...]
    done: int
    total: int | None
    """Total number of runs; None: unknown."""
    failed: int
    best: RunRow | None
    left_s: float | None
    """Estimated seconds left; None: unknown."""
    note: str = ""


def time_left(done: int, total: int | None, mean_s: float | None, slots: int) -> float | None:
    """Estimate the seconds left from the mean duration of a run; None: unknown."""
    return None if total is None or mean_s is None else (total - done) * mean_s / max(1, slots)


class LiveScreen:
    """Prints lines; on a terminal, inside a `with` block, with a live drawing below them."""

    def __init__(self, draw: Callable[[], RenderableType], *, json: bool = False) -> None:
        self._renderable = draw
        self._json = json
        self._live: Any = None

    def __enter__(self) -> Self:
        if not self._json and output.is_terminal():
            from rich.live import Live

            self._live = Live(get_renderable=self._renderable, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the time."""
        now = time.strftime("%H:%M:%S")
        if self._live is None:
            (output.warn if self._json else output.say)(f"{now} {text}")
        else:
            from rich.text import Text

            self._live.console.print(Text(f"{now} ", style="dim").append(clean_text(text), style=style))

    def write(self, text: str) -> None:
        """Print the output of a program."""
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(clean_text(text.rstrip("\n"))))
        elif not self._json:
            output.show_log(text)


class LiveView(LiveScreen):
    """Draws snapshots of a study."""

    def __init__(self, snapshot: Callable[[], ScreenState | None]) -> None:
        super().__init__(self._draw)
        self._snapshot = snapshot

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._snapshot()
        if now is None:
            return Text("")
        slots = Table(box=None, pad_edge=False, header_style="bold", expand=False)
        for name in ("slot", "run", "step", now.metric, "time"):
            slots.add_column(Text(clean_line(name)), no_wrap=True, max_width=48)
        slots.add_column("why", max_width=48)  # the only column that gives way where there is little room
        for row in now.running:
            slots.add_row(
                row.slot,
                row.run.id,
                output.number(row.step, 7),
                output.number(row.objective),
                format_seconds(row.run.seconds),
                Text(clean_line(row.run.reason, 200), style="dim", no_wrap=True, overflow="ellipsis"),
            )
        bar = Table.grid(padding=(0, 1))
        head = f"{now.done}" + (f"/{now.total}" if now.total is not None else "") + " runs"
        cells: list[RenderableType] = [Text(head, style="bold")]
        if now.total:
            cells.append(ProgressBar(total=now.total, completed=now.done, width=30))
        if now.left_s is not None:
            cells.append(Text(f"about {format_seconds(now.left_s)} left"))
        if now.failed:
            cells.append(Text(f"{now.failed} failed", style="red"))
        if now.best is not None:
            cells.append(Text(f"best {output.number(now.best.objective)} ({now.best.id})", style="green"))
        bar.add_row(*cells)
        parts: list[RenderableType] = [slots, bar]
        if now.note:
            parts.append(Text(clean_line(now.note), style="yellow"))
        return Group(*parts)
