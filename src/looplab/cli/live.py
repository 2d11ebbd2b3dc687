"""The live view of a study: its slots, the best run, a progress bar with the time left. In a pipe: lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

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


class LiveView:
    """Draws snapshots inside a `with` block; `say` prints a line above them."""

    def __init__(self, snapshot: Callable[[], ScreenState | None]) -> None:
        self._snapshot = snapshot
        self._live: Any = None

    def __enter__(self) -> LiveView:
        if output.is_terminal():
            from rich.live import Live as RichLive

            self._live = RichLive(get_renderable=self._draw, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def say(self, text: str, style: str = "") -> None:
        if self._live is None:
            output.say(f"{time.strftime('%H:%M:%S')} {text}")
        else:
            from rich.text import Text

            line = Text(f"{time.strftime('%H:%M:%S')} ", style="dim")
            line.append(clean_text(text), style=style)
            self._live.console.print(line)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._snapshot()
        if now is None:
            return Text("")
        slots = Table(box=None, pad_edge=False, header_style="bold", expand=False)
        for name in ("slot", "run", "step", now.metric, "time", "why"):
            slots.add_column(Text(clean_line(name)), no_wrap=True, max_width=48)
        for row in now.running:
            slots.add_row(
                row.slot,
                row.run.id,
                output.number(row.step, 7),
                output.number(row.objective),
                format_seconds(row.run.seconds),
                Text(clean_line(row.run.reason, 200), style="dim"),
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
