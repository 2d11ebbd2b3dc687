"""`looplab top`: a live overview of a study in the terminal. Read-only; closing it changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from looplab import signals
from looplab.cli import output
from looplab.cli.labs import find_study, open_for_reading, open_lab
from looplab.config.lab import LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.view import RunRow, StudyView
from looplab.loop.lock import engine_pid
from looplab.measure.base import Curve
from looplab.measure.run_metrics import RunMetrics
from looplab.report import wording
from looplab.report.curves import read
from looplab.report.judged import VerdictFacts
from looplab.report.language import language_of_terminal, speaking, t
from looplab.report.overview import SlotBar, StudyOverview, overview_facts, study_overview
from looplab.runs.clock import format_seconds
from looplab.runs.folder import record_file, study_folder
from looplab.runs.logs import read_tail
from looplab.runs.redact import redact_text
from looplab.untrusted import clean_line, clean_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FRAME_S = 0.5
LEAST_WHY = 16
"""Terminal width below which tables have no reasons."""
REFRESH_S = 2.0
"""Seconds between frames even if nothing was recorded, since elapsed times and live metrics change."""
POLL_S = 0.05
"""Longest time for reading the metrics of one running run."""
KEYS = "j k choose   enter log   c curve   a alarms   tab study   q quit"
BACK = "q back   j k another run"
COLOURS = {
    **output.COLOURS, "crash": "red", "void": "dim", "replicate": "blue", "agent": "magenta", "imported": "dim",
}  # fmt: skip
SIGNS = {"keep": "●", "discard": "■", "inconclusive": "◆", "crash": "✗", "void": "–"}
_KEY = re.compile(rb"\x1b[\[O][A-Z]|.", re.DOTALL)
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a braille character, by row and column."""


@dataclass(slots=True)
class TopReader:
    """Reads the overview of a study, and follows the metrics of its running runs."""

    lab: LabConfig
    ledger: Ledger
    study: StudyConfig
    since_s: float
    metrics: dict[str, RunMetrics] = field(default_factory=dict)

    @property
    def outputs(self) -> Path:
        return study_folder(self.lab.folder, self.study.name)

    @property
    def record(self) -> StudyView:
        return StudyView(self.ledger, self.study.name)

    def overview(self) -> StudyOverview:
        now = time.time()
        engine = engine_pid(self.lab.folder, self.study.name)
        seen = study_overview(self.study, self.record, now=now, engine=engine, since=now - self.since_s)
        running = {one.row.id for one in seen.running}
        self.metrics = {run: one for run, one in self.metrics.items() if run in running}
        for run in running:
            one = self.metrics.setdefault(run, RunMetrics(self.study, self.outputs / run))
            with contextlib.suppress(LabError):
                one.poll(until=time.monotonic() + POLL_S)
        return seen


def top(folder: Path | None, name: str | None, *, once: bool, json: bool, since_s: float) -> None:
    lab = open_lab(folder)
    ledger = open_for_reading(lab)
    studies = list(lab.studies.values())
    reader = TopReader(lab, ledger, find_study(lab, name) if name else _liveliest(lab, ledger, studies), since_s)
    if json:
        output.print_json(overview_facts(reader.overview(), reader.record, reader.metrics.get))
        return
    with speaking(language_of_terminal()):
        _show(reader, studies, once=once)


def _show(reader: TopReader, studies: Sequence[StudyConfig], *, once: bool) -> None:
    if once or not output.is_terminal() or not sys.stdin.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        _console().print(draw(reader.overview(), reader, _width(), None))
    else:
        _Screen(reader, studies).run()


def _liveliest(lab: LabConfig, ledger: Ledger, studies: Sequence[StudyConfig]) -> StudyConfig:
    """Return the study with a running engine, else the one in which a run ended last."""
    if not studies:
        raise LabError("this lab has no study", hint="`looplab status` shows its versions and pipelines")

    def key(study: StudyConfig) -> tuple[bool, float]:
        return engine_pid(lab.folder, study.name) is not None, StudyView(ledger, study.name).last_end() or 0.0

    return max(studies, key=key)


def _width() -> int:
    """Return the width of the terminal; in a pipe wide enough for whole lines."""
    return shutil.get_terminal_size().columns if output.is_terminal() else 400


def _console() -> Console:
    from rich.console import Console

    return Console(width=_width(), highlight=False, no_color=None if output.is_terminal() else True, soft_wrap=False)


# -- drawing


def selectable(seen: StudyOverview) -> list[str]:
    """Return the runs that can be chosen, in the order in which they are drawn."""
    champion = seen.judge.champion if seen.judge is not None else seen.best.id if seen.best is not None else None
    found = [one.row.id for one in seen.running] + [one.run for one in seen.verdicts] + ([champion] if champion else [])
    return list(dict.fromkeys(found))


def draw(seen: StudyOverview, reader: TopReader, width: int, chosen: str | None) -> RenderableType:
    """Return one frame."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(seen), Text(seen.headline + t("."), style="bold")]
    ago = format_seconds(reader.since_s)
    parts.append(Text(t("Last {time}: {what}", time=ago, what=seen.happened.sentence)))
    for alarm in seen.alarms[-3:]:
        parts.append(Text(t("ALARM") + " ", style="bold red").append(clean_line(alarm), style="default"))
    for need in seen.needs:
        if need.kind != "alarms":
            parts.append(Text(t("needs attention") + ": ", style="yellow").append(clean_line(need.sentence)))
    parts.append(_budgets(seen, width))
    if seen.lanes:
        parts += [Text(), *_lanes(seen, width)]
    if seen.running:
        parts += [Text(), _running(seen, reader, chosen, width)]
    if seen.queue:
        parts += [Text(), *_queue(seen, width)]
    if seen.verdicts:
        parts += [Text(), _verdicts(seen.verdicts, chosen, width)]
    return Group(*parts)


def _head(seen: StudyOverview) -> RenderableType:
    from rich.text import Text

    state = "no engine" if seen.engine is None else "paused" if seen.paused else "running"
    text = Text().append(f"{clean_line(seen.study)}  ", style="bold")
    text.append(t(state), style={"running": "green", "paused": "yellow"}.get(state, "dim"))
    text.append(time.strftime("  %H:%M:%S", time.localtime(seen.at)), style="dim")
    counts = "  ".join(f"{n} {t(status)}" for status, n in sorted(seen.counts.items(), key=lambda item: -item[1]))
    text.append(f"  {counts}" + ("  " + t("{n} proposed", n=seen.waiting) if seen.waiting else ""))
    if seen.metric is not None:
        text.append(f"  {clean_line(seen.metric)} {seen.champion_shown}", style="bold green")
    return text


def _columns(names: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], width: int) -> RenderableType:
    """Return aligned columns of (text, style); the columns `what` and `why` share the rest of the width.

    `why`, the last, is left out where it would have room for a word or two, and then others that do not fit.
    """
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    wide = [i for i, name in enumerate(names) if name in ("what", "why")]
    heads = [t(name) if name else "" for name in names]
    widths = [max(cell_len(text) for text in (name, *(row[i][0] for row in rows))) for i, name in enumerate(heads)]
    room = width - sum(size + 2 for i, size in enumerate(widths) if i not in wide)
    if names[-1] == "why" and room // len(wide) - 2 < min(LEAST_WHY, widths[-1]):
        return _columns(names[:-1], [row[:-1] for row in rows], width)
    if not wide and room < -2 and len(names) > 2:  # a column that is cut off would have a wrong number in it
        return _columns(names[:-1], [row[:-1] for row in rows], width)
    for i in wide:
        widths[i] = min(widths[i], max(8, room // len(wide) - 2))
    drawn = Text(no_wrap=True, overflow="crop")
    for row in [[(name, "dim") for name in heads], *rows]:
        for (text, style), size in zip(row, widths, strict=True):
            cut = text if cell_len(text) <= size else set_cell_size(text, size - 1) + "…"
            drawn.append(set_cell_size(cut, size), style=style).append("  ")
        drawn.rstrip()
        drawn.append("\n")
    drawn.rstrip()
    return drawn


def _budgets(seen: StudyOverview, width: int) -> RenderableType:
    from rich.text import Text

    text = Text()
    gap = "   " if width >= 140 else "\n"
    for one in seen.budget:
        if one.limit is None and not one.used:
            continue
        part = None if not one.limit else min(1.0, one.used / one.limit)
        bar = "" if part is None else "▕" + "█" * round(8 * part) + "·" * (8 - round(8 * part)) + "▏ "
        shown = ", ".join(filter(None, (one.shown, one.left)))
        text.append(f"{t(one.name)} ", style="dim").append(bar).append(shown + gap)
    text.rstrip()
    return text


def _lanes(seen: StudyOverview, width: int) -> Iterator[RenderableType]:
    """Return one line per slot: the last hour, a character for each part of it."""
    from rich.cells import cell_len
    from rich.text import Text

    label = max(cell_len(lane.name) for lane in seen.lanes[:12])
    cells = max(20, min(120, width - label - 2))
    begin = seen.at - 3600.0
    for lane in seen.lanes[:12]:
        text = Text().append(clean_line(lane.name).ljust(label + 1), style="dim")
        for cell in range(cells):
            middle = begin + (cell + 0.5) * 3600.0 / cells
            bar = _bar_at(lane.bars, middle, seen.at, 3600.0 / cells)
            text.append("█" if bar else "·", style=COLOURS.get(bar.kind, "white") if bar else "dim")
        yield text
    begin_at, end_at = t("an hour ago"), t("now")
    space = " " * max(1, cells - cell_len(begin_at) - cell_len(end_at))
    yield Text(" " * (label + 1) + begin_at + space + end_at, style="dim")


def _bar_at(bars: Sequence[SlotBar], at: float, now: float, width: float) -> SlotBar | None:
    """Return the latest bar that is in a cell around a moment."""
    begin, end = at - width / 2, at + width / 2
    return next((bar for bar in reversed(bars) if bar.begin <= end and (bar.end or now) >= begin), None)


def _mark(run: str, chosen: str | None) -> tuple[str, str]:
    return ("›" if run == chosen else " ", "bold")


def _running(seen: StudyOverview, reader: TopReader, chosen: str | None, width: int) -> RenderableType:
    rows = []
    for one in seen.running[:20]:
        run, metrics = one.row, reader.metrics[one.row.id]
        usual = " " + t("of ~{time}", time=format_seconds(one.usual_s)) if one.usual_s else ""
        cells = (run.slot or "-", output.number(metrics.step, 7), output.number(metrics.objective(), 4),
                 format_seconds(run.seconds) + usual, clean_line(run.proposer, 16))  # fmt: skip
        why = clean_line(wording.plain(run.reason), 300)
        rows.append([_mark(run.id, chosen), (run.id, "cyan"), *((text, "") for text in cells), (why, "dim")])
    metric = clean_line(seen.metric or "objective", 24)
    return _columns(("", "running", "slot", "step", metric, "time", "by", "why"), rows, width)


def _queue(seen: StudyOverview, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    blocked = f" ({seen.blocked})" if seen.blocked else ""
    yield Text(t("queue: {n}", n=len(seen.queue)) + blocked, style="dim")
    rows = [
        [
            (one.name, ""),
            (clean_line(one.by, 16), ""),
            (clean_line(one.what, 200), ""),
            (clean_line(one.why, 300), "dim"),
        ]
        for one in seen.queue[:5]
    ]
    yield _columns(("next", "by", "what", "why"), rows, width)


def _verdicts(verdicts: Sequence[VerdictFacts], chosen: str | None, width: int) -> RenderableType:
    rows = []
    for one in verdicts[:8]:
        p = t("no test") if one.p is None else wording.number(one.p, 2)
        bar = "" if one.bar is None else f" / {wording.number(one.bar, 2)}"
        verdict = (f"{SIGNS.get(one.verdict, ' ')} {t(one.verdict)}", COLOURS.get(one.verdict, ""))
        cells = [(text, "") for text in (one.interval, p + bar, str(one.n))]
        rows.append([_mark(one.run, chosen), (one.run, ""), verdict, *cells, (clean_line(one.why, 300), "dim")])
    return _columns(("", "judged", "verdict", "better by, 95 %", "p / boundary", "n", "why"), rows, width)


def braille(curve: Curve, width: int, height: int) -> list[str]:
    """Draw a curve with braille dots, two by four in each character."""
    points = [(x, y) for x, y in zip(curve.steps, curve.values, strict=True) if isfinite(x) and isfinite(y)]
    rows = [[0] * width for _ in range(height)]
    if points:
        (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
        before: tuple[int, int] | None = None
        for x, y in points:
            column = round((x - left) / (right - left) * (2 * width - 1)) if right > left else 0
            row = round((high - y) / (high - low) * (4 * height - 1)) if high > low else 2 * height
            start = before or (column, row)
            steps = max(1, abs(column - start[0]), abs(row - start[1]))
            for i in range(steps + 1):  # a line from the point before
                at_x = start[0] + round((column - start[0]) * i / steps)
                at_y = start[1] + round((row - start[1]) * i / steps)
                rows[at_y // 4][at_x // 2] |= DOTS[at_y % 4][at_x % 2]
            before = column, row
    return ["".join(chr(0x2800 + cell) for cell in row) for row in rows]


# -- the live screen


class _Screen:
    """The alternate screen with keys; the terminal is restored however it ends."""

    def __init__(self, reader: TopReader, studies: Sequence[StudyConfig]) -> None:
        self._reader = reader
        self._studies = studies
        self._chosen: str | None = None
        self._view = "main"
        self._seen: StudyOverview | None = None

    def run(self) -> None:
        import termios
        import tty

        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        console = _console()
        with contextlib.suppress(KeyboardInterrupt), signals.handled(_interrupt):
            try:
                tty.setcbreak(stdin)
                with console.screen(hide_cursor=True):
                    self._loop(console, stdin)
            finally:
                termios.tcsetattr(stdin, termios.TCSADRAIN, before)

    def _loop(self, console: Console, stdin: int) -> None:
        version, drawn_at = -1, 0.0
        size: tuple[int, int] = (0, 0)
        is_pressed = False
        while True:
            now_version = self._reader.ledger.version()
            now_size = shutil.get_terminal_size()
            if is_pressed or now_version != version or now_size != size or time.monotonic() - drawn_at > REFRESH_S:
                if not is_pressed or self._seen is None:
                    self._seen = self._reader.overview()
                version, size, drawn_at = now_version, now_size, time.monotonic()
                self._draw(console, *size)
            ready, _, _ = select.select([stdin], [], [], FRAME_S)
            is_pressed = bool(ready)
            if ready and not all(map(self._press, _KEY.findall(os.read(stdin, 256)))):
                return

    def _draw(self, console: Console, width: int, height: int) -> None:
        assert self._seen is not None
        runs = selectable(self._seen)
        if self._chosen not in runs:
            self._chosen = runs[0] if runs else None
        console.width = width
        bodies = {"log": self._log, "curve": self._curve, "alarms": self._alarms}
        if self._view == "main":
            body = draw(self._seen, self._reader, width, self._chosen)
        else:
            body = bodies[self._view](width, height - 2)
        with console.capture() as captured:
            console.print(body)
        keys = t(KEYS) if self._view == "main" else t(BACK)
        text = "\x1b[K\n".join(captured.get().split("\n")[: height - 1])
        sys.stdout.write(f"\x1b[H{text}\x1b[J\x1b[{height};1H\x1b[2m{keys[: width - 1]}\x1b[0m")
        sys.stdout.flush()

    def _press(self, keys: bytes) -> bool:
        """Act on a key; return False to end."""
        assert self._seen is not None
        runs = selectable(self._seen)
        step = {b"j": 1, b"\x1b[B": 1, b"\x1bOB": 1, b"k": -1, b"\x1b[A": -1, b"\x1bOA": -1}.get(keys)
        if keys in (b"q", b"\x1b", b"\x04"):
            if self._view == "main":
                return False
            self._view = "main"
        elif step is not None and runs:
            at = runs.index(self._chosen) if self._chosen in runs else 0
            self._chosen = runs[max(0, min(len(runs) - 1, at + step))]
        elif keys in (b"\r", b"\n", b"l") and self._chosen:
            self._view = "log"
        elif keys == b"c" and self._chosen:
            self._view = "curve"
        elif keys == b"a":
            self._view = "alarms"
        elif keys == b"\t":
            names = [study.name for study in self._studies]
            at = names.index(self._reader.study.name) if self._reader.study.name in names else -1
            self._reader.study = self._studies[(at + 1) % len(names)]
            self._reader.metrics, self._seen, self._view = {}, self._reader.overview(), "main"
        return True

    def _row(self) -> RunRow:
        return self._reader.record.run(self._chosen or "LATEST")

    def _log(self, width: int, height: int) -> RenderableType:
        from rich.text import Text

        run = self._row()
        tail = redact_text(read_tail(record_file(self._reader.outputs / run.id, "train.log"), height))
        text = clean_text(tail).splitlines()[-(height - 1) :] or [t("nothing was printed")]
        return Text(
            f"{run.id}: {t(run.status or run.state)}\n" + "\n".join(line[:width] for line in text), no_wrap=True
        )

    def _curve(self, width: int, height: int) -> RenderableType:
        from rich.text import Text

        run, study = self._row(), self._reader.study
        batch = read(self._reader.outputs, run, study)
        metric = (
            study.objective.metric if study.objective and study.objective.metric in batch else next(iter(batch), None)
        )
        if metric is None:
            return Text(t("{run} has no curve yet", run=run.id))
        curve = batch[metric]
        finite = [value for value in curve.values if isfinite(value)]
        lines = braille(curve, max(10, width - 12), max(4, height - 4))
        ends = [wording.number(max(finite, default=None), 4), wording.number(min(finite, default=None), 4)]
        labels = [ends[0], *[""] * (len(lines) - 2), ends[1]]
        drawn = "\n".join(f"{label:>10} {line}" for label, line in zip(labels, lines, strict=True))
        first, last = (wording.number(end(curve.steps), 7) for end in (min, max))
        steps = f"{'':>10} {t('step {first} to {last}', first=first, last=last)}"
        return Text(f"{run.id}: {clean_line(metric)}\n{drawn}\n{steps}", no_wrap=True)

    def _alarms(self, width: int, height: int) -> RenderableType:
        from rich.text import Text

        assert self._seen is not None
        return Text("\n\n".join(map(clean_text, self._seen.alarms)) or t("no alarms"))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
