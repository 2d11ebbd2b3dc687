"""Printed metrics: `key: value` and `key=value` pairs in `train.log`, or matches of the user's own patterns."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from looplab.measure.base import Batch, Curve
from looplab.measure.lines import LineSource
from looplab.measure.patterns import Groups, Patterns
from looplab.measure.printed import NUMBER, RANK, Step, has_step, is_bare_heading, read_heading, read_line, scaled
from looplab.measure.rows import STEP_NAMES
from looplab.measure.splits import kind_of_split

MAX_LINE = 4096
"""Bytes of a line that are read; the rest is ignored."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_IN_NUMBERS = "+-.,:/%" + string.ascii_letters + string.digits


class StdoutSource(LineSource):
    """Metrics in printed text.

    The step of a line is its `step`, `iter`, `epoch` … in any form (`step: 100`, `Epoch 3/10`, `iter=1.2K`). A line
    without one gets the last step; if there was none, its index among the lines with metrics. If a user's pattern
    matches a line, only the pattern determines its metrics.
    """

    kind = "stdout"

    def __init__(self, path: Path, patterns: Sequence[str] = ()) -> None:
        super().__init__(path, carriage_returns=True)
        self._patterns = Patterns(patterns) if patterns else None
        self.on_restart()

    def _fold(self, raw_lines: list[bytes], batch: Batch) -> None:
        texts = [_decode(line) for line in raw_lines if line and not line.isspace()]
        found = [None] * len(texts) if self._patterns is None else self._patterns.find(texts)
        for text, matches in zip(texts, found, strict=True):
            self._add_line(text, matches, batch)
        self.problem = self._patterns.problem if self._patterns is not None else None

    def on_restart(self) -> None:
        self._rank = len(STEP_NAMES)
        self._last_step: float | None = None
        self._matching_lines = 0
        self._heading: tuple[int, str, bool] | None = None
        """Indent and split word of the current heading, and whether only more deeply indented lines belong to it."""
        self._names_below: set[str] | None = None
        """The metrics so far below a heading that is a bare word; None below any other heading."""

    def _add_line(self, line: str, matches: Sequence[Groups] | None, batch: Batch) -> None:
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

        A heading applies to the more deeply indented lines below it. If they are not indented, nothing marks their
        end: it then applies to the lines that follow directly, have metrics and no step. A training heading does not,
        since later training lines have no heading either. A bare word (`Evaluating...`) applies until a name is
        repeated.
        """
        indent = len(line) - len(line.lstrip())
        if self._heading is not None:
            above, split, indented = self._heading
            if indent > above:
                self._heading = (above, split, True)
            elif indented or has_step(line):
                self._heading = None
        metrics, steps = read_line(line, self._heading[1] if self._heading is not None else None)
        if metrics and self._heading is not None and self._names_below is not None and not self._heading[2]:
            if self._names_below & {name for name, _ in metrics}:
                self._heading = None
                metrics, steps = read_line(line)
            else:
                self._names_below |= {name for name, _ in metrics}
        if not metrics:
            if heading := read_heading(line):
                self._heading = (indent, heading, kind_of_split(heading) == "train")
                self._names_below = set() if is_bare_heading(line) else None
            elif self._heading is not None and indent <= self._heading[0]:
                self._heading = None
        return metrics, steps

    def _note_step(self, steps: list[Step]) -> None:
        usable = [entry for entry in steps if entry[0] <= self._rank and isfinite(entry[2])]
        if usable:
            self._rank, _, self._last_step = min(usable, key=lambda entry: entry[0])


def _read_groups(matches: Sequence[Groups]) -> tuple[list[tuple[str, float]], list[Step]]:
    """Return the metrics and the steps in the matches of the user's patterns."""
    metrics: list[tuple[str, float]] = []
    steps: list[Step] = []
    for groups in matches:
        for name, text in groups.items():
            value = _parse_value(text)
            if value is None:
                continue
            if name.lower() in RANK:
                steps.append((RANK[name.lower()], name, value))
            else:
                metrics.append((name, value))
    return metrics, steps


def _decode(line: bytes) -> str:
    """Return the text of a line up to MAX_LINE, without terminal codes and without a word that the limit cuts."""
    text = line[:MAX_LINE].decode("utf-8", "replace")
    text = text if len(line) <= MAX_LINE else text.rstrip(_IN_NUMBERS)
    return _ANSI.sub("", text) if "\x1b" in text else text


_VALUE = re.compile(rf"\s*+({NUMBER})([kKMBGT]|%)?\s*+[,;]?\s*+$", re.ASCII)


def _parse_value(text: str | None) -> float | None:
    match = _VALUE.match(text) if text else None
    return scaled(match[1], match[2]) if match else None
