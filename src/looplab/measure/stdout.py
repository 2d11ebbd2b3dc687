"""What a trainer prints: `key: value` and `key=value` pairs in `train.log`, or what the user's own patterns find."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from looplab.measure.base import Batch, Curve
from looplab.measure.patterns import Groups, Patterns
from looplab.measure.printed import NUMBER, RANK, Step, has_step, is_bare_heading, read_heading, read_line, scaled
from looplab.measure.rows import STEP_NAMES
from looplab.measure.splits import kind_of_split
from looplab.measure.tail import LineTail

LONGEST_LINE = 4096
"""Bytes of a line that are read; the rest of a longer one is ignored."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_IN_NUMBERS = "+-.,:/%" + string.ascii_letters + string.digits


class StdoutSource:
    """Pairs and patterns in printed text.

    A line's step is its `step`, `iter`, `epoch` … whatever its form (`step: 100`, `Epoch 3/10`, `iter=1.2K`); a line
    without one belongs to the last step seen; if there was none, to the number of its line among the lines that
    hold metrics. Where a user's pattern matches a line, the pattern alone says what is in it.
    """

    kind = "stdout"
    problem: str | None = None

    def __init__(self, path: Path, patterns: Sequence[str] = ()) -> None:
        self.path = path
        self.skipped = 0
        self._patterns = Patterns(patterns) if patterns else None
        self._lines = LineTail(path, self._restart, carriage_returns=True)
        self._restart()

    @property
    def position(self) -> int:
        return self._lines.position

    @property
    def behind(self) -> bool:
        return self._lines.behind

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        batch: Batch = {}
        for lines in self._lines.blocks(final, until):
            texts = [_decode(line) for line in lines if line and not line.isspace()]
            if self._patterns is None:
                for text in texts:
                    self._read(text, None, batch)
                continue
            for text, matches in zip(texts, self._patterns.find(texts), strict=True):
                self._read(text, matches, batch)
            self.problem = self._patterns.problem
        return batch

    def _restart(self) -> None:
        self._rank = len(STEP_NAMES)
        self._last_step: float | None = None
        self._matching_lines = 0
        self._heading: tuple[int, str, bool] | None = None
        """The indent and the split word of the heading above, and whether only lines indented deeper belong to it."""
        self._under: set[str] | None = None
        """The metrics below a heading that is only a word; None below any other."""

    def _read(self, line: str, matches: Sequence[Groups] | None, batch: Batch) -> None:
        metrics, steps = self._read_pairs(line) if matches is None else _read_groups(matches)
        self._note_step(steps)
        metrics += [(name, value) for rank, name, value in steps if rank > self._rank and name == name.strip()]
        if not metrics:
            return
        step = self._last_step if self._last_step is not None else float(self._matching_lines)
        self._matching_lines += 1
        for name, value in metrics:
            curve = batch.get(name)
            if curve is None:
                curve = batch[name] = Curve()
            curve.add(step, value)

    def _read_pairs(self, line: str) -> tuple[list[tuple[str, float]], list[Step]]:
        """Read the pairs of a line, under the heading above it if there is one.

        A heading counts for the lines below it that are indented deeper. Where they are not indented, nothing marks
        where they end: it then counts for the lines that follow at once, hold metrics and name no step. One of the
        training split does not, since what follows later would be training as well, without the heading. One that is
        only a word (`Evaluating...`) counts until a name comes a second time.
        """
        indent = len(line) - len(line.lstrip())
        if self._heading is not None:
            above, split, indented = self._heading
            if indent > above:
                self._heading = (above, split, True)
            elif indented or has_step(line):
                self._heading = None
        metrics, steps = read_line(line, self._heading[1] if self._heading is not None else None)
        if metrics and self._heading is not None and self._under is not None and not self._heading[2]:
            if self._under & {name for name, _ in metrics}:
                self._heading = None
                metrics, steps = read_line(line)
            else:
                self._under |= {name for name, _ in metrics}
        if not metrics:
            if heading := read_heading(line):
                self._heading = (indent, heading, kind_of_split(heading) == "train")
                self._under = set() if is_bare_heading(line) else None
            elif self._heading is not None and indent <= self._heading[0]:
                self._heading = None
        return metrics, steps

    def _note_step(self, steps: list[Step]) -> None:
        usable = [entry for entry in steps if entry[0] <= self._rank and isfinite(entry[2])]
        if usable:
            self._rank, _, self._last_step = min(usable, key=lambda entry: entry[0])


def _read_groups(matches: Sequence[Groups]) -> tuple[list[tuple[str, float]], list[Step]]:
    """Return the metrics and the steps that the user's patterns have found in a line."""
    metrics: list[tuple[str, float]] = []
    steps: list[Step] = []
    for groups in matches:
        for name, text in groups.items():
            value = _value(text)
            if value is None:
                continue
            if name.lower() in RANK:
                steps.append((RANK[name.lower()], name, value))
            else:
                metrics.append((name, value))
    return metrics, steps


def _decode(line: bytes) -> str:
    """The text of a line without terminal codes, up to the limit; what the limit cuts through, which may be a number,
    is left out."""
    text = line[:LONGEST_LINE].decode("utf-8", "replace")
    text = text if len(line) <= LONGEST_LINE else text.rstrip(_IN_NUMBERS)
    return _ANSI.sub("", text) if "\x1b" in text else text


_VALUE = re.compile(rf"\s*+({NUMBER})([kKMBGT]|%)?\s*+[,;]?\s*+$", re.ASCII)


def _value(text: str | None) -> float | None:
    match = _VALUE.match(text) if text else None
    return scaled(match[1], match[2]) if match else None
