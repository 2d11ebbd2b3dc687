"""Printed metrics: `key: value` and `key=value` pairs in `train.log`, or matches of the user's own patterns."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Sequence
from math import inf, isfinite, nan
from pathlib import Path

from looplab.measure.base import Batch, Curve
from looplab.measure.columns import NumberColumns
from looplab.measure.json_file import flatten_numbers
from looplab.measure.lines import LineSource
from looplab.measure.patterns import Groups, Patterns
from looplab.measure.printed import (
    NUMBER,
    Printed,
    Step,
    has_step,
    is_bare_heading,
    is_ruled_heading,
    read_heading,
    read_line,
    scaled,
)
from looplab.measure.splits import has_split, kind_of_split
from looplab.measure.tables import Tables, is_rule
from looplab.measure.words import BATCH, EPOCH, INDEX, ITERATIONS, RANK, is_never_metric, is_result, is_setting
from looplab.untrusted import UntrustedError, load_json

MAX_LINE = 4096
"""Bytes of a line that are read; the rest is ignored."""
LAST_LINE = "last_line"
"""Metric of an output that names none and whose last line is a lone number."""
MAX_JSON = 256 << 10
"""Characters of an indented JSON object that is read as a whole."""
MAX_HELD = 10_000
"""Names that are held back because they may be settings; further ones are ignored."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_IN_NUMBERS = "+-.,:/%" + string.ascii_letters + string.digits


class StdoutSource(LineSource):
    """Metrics in printed text.

    The step of a line is its `step`, `iter`, `epoch` … in any form (`step: 100`, `Epoch 3/10`, `iter=1.2K`). A line
    without one gets the last step; if there was none, its index among the lines with metrics. If a user's pattern
    matches a line, only the pattern determines its metrics. If no line names a metric and the last one is a number
    alone, that number is `last_line`; an objective of that name is read in any case.
    """

    kind = "stdout"

    def __init__(self, path: Path, patterns: Sequence[str] = (), wanted: Collection[str] = ()) -> None:
        """
        Args:
            path: The file.
            patterns: The user's regular expressions.
            wanted: Names that are metrics, whatever their words tell.
        """
        super().__init__(path, carriage_returns=True)
        self._wanted = wanted
        self._patterns = Patterns(patterns) if patterns else None
        self.on_restart()

    def _fold(self, raw_lines: list[bytes], batch: Batch) -> None:
        texts = [_decode(line) for line in raw_lines if line and not line.isspace()]
        found = [None] * len(texts) if self._patterns is None else self._patterns.find(texts)
        for text, matches in zip(texts, found, strict=True):
            self._add_line(text, matches, batch)
        self.problem = self._patterns.problem if self._patterns is not None else None

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        batch = super().poll(final, until)
        if batch:
            self._has_metrics = True
        if final and not self.behind:
            self._finish(batch)
        return batch

    def on_restart(self) -> None:
        self._rank = INDEX
        self._is_rank_sure = False
        """Whether a line with metrics had the step; a lone step may be a setting."""
        self._has_both = False
        """Whether a line had an iteration next to a more reliable step, so that they are different counts."""
        self._last_step: float | None = None
        self._epoch = self._batch = -1.0
        self._first_epoch = 1.0
        self._before = 0.0
        """Steps in earlier epochs, if the trainer counts its steps from the beginning of each epoch."""
        self._matching_lines = 0
        self._heading: tuple[int, str, bool] | None = None
        """Indent and split word of the current heading, and whether only more deeply indented lines belong to it."""
        self._is_heading_fresh = False
        """Whether the last line was the heading."""
        self._names_below: set[str] | None = None
        """The metrics so far below a heading that is a bare word; None below any other heading."""
        self._last_split: str | None = None
        self._tables = Tables(self._wanted)
        self._columns = NumberColumns()
        self._is_in_table = False
        self._table_split: str | None = None
        """The split word of the heading above the current table; None if there is none."""
        self._block: tuple[int, str] | None = None
        """Indent and opening bracket of a block over several lines: a model, or a config; None outside."""
        self._is_training = False
        """Whether any line so far was surely one of measurements."""
        self._held: dict[str, tuple[float, float]] = {}
        """Values before the first measurement that may be settings, with their steps."""
        self._last_held: list[str] = []
        """The names in the last line, if they were held back."""
        self._json: list[str] = []
        """The lines so far of an indented JSON object; empty outside."""
        self._json_size = 0
        self._last_number: float | None = None
        """The last line, if it is a lone number."""
        self._has_metrics = False
        """Whether any line so far had a metric."""

    def _add_line(self, line: str, matches: Sequence[Groups] | None, batch: Batch) -> None:
        if self._json or (matches is None and line.rstrip() == "{"):
            self._add_json_line(line, batch)
            return
        self._last_number = _parse_value(line)
        if matches is not None:
            self._add(_read_groups(matches), batch)
            return
        self._add_text(line, batch)

    def _add_text(self, line: str, batch: Batch) -> None:
        """Add a line that no pattern of the user matches."""
        tables, in_table = self._tables.read(line)
        for table in tables:
            self._add_table(table, batch)
        self._last_held = []
        if in_table and not self._is_in_table:
            self._table_split, self._heading = self._heading and self._heading[1], None
        self._is_in_table = in_table
        if in_table:
            return
        rows = self._columns.read(line)
        for row in rows:
            self._add(row, batch)
        if not rows and not self._is_in_block(line):
            self._add(self._read_pairs(line), batch)

    def _add_json_line(self, line: str, batch: Batch) -> None:
        """Collect the lines of an indented JSON object; they are read one by one if it turns out not to be one."""
        self._json.append(line)
        self._json_size += len(line)
        is_end = line.rstrip() == "}"
        if not is_end and self._json_size < MAX_JSON and (len(self._json) == 1 or line[:1] in " \t}"):
            return
        lines, self._json, self._json_size = self._json, [], 0
        if is_end and (printed := _read_json("\n".join(lines))) is not None:
            self._last_number, self._last_held = None, []
            self._add(printed, batch)
            return
        for one in lines:
            self._add_text(one, batch)

    def _add_table(self, table: Printed, batch: Batch) -> None:
        """Add a table, or a row of one, under the heading above it if there is one."""
        split = self._table_split
        if split is not None:
            names = [name if has_split(name) else f"{split}_{name}" for name, _ in table.metrics]
            metrics = [(name, value) for name, (_, value) in zip(names, table.metrics, strict=True)]
            table = table._replace(metrics=metrics, certain=True)
        self._add(table, batch)

    def _finish(self, batch: Batch) -> None:
        """Add what only the end of the text decides: a last table, and values in the very last line of the text."""
        lines, self._json, self._json_size = self._json, [], 0
        for line in lines:
            self._add_text(line, batch)
        for table in self._tables.finish():
            self._add_table(table, batch)
        if not self._is_training:
            for name in self._last_held:
                batch.setdefault(name, Curve()).add(*self._held[name])
        self._last_held = []
        is_wanted = LAST_LINE in self._wanted or not self._has_metrics
        if self._last_number is not None and is_wanted:
            batch.setdefault(LAST_LINE, Curve()).add(self._last_step or 0.0, self._last_number)
        self._last_number = None

    def _add(self, printed: Printed, batch: Batch) -> None:
        metrics, steps = printed.metrics, printed.steps
        self._last_split = printed.split or self._last_split
        self._note_step(steps, bool(metrics))
        if self._rank < BATCH:  # which contains the epoch
            metrics += [(step.name, step.value) for step in steps if step.rank == EPOCH and step.name]
        if not metrics:
            return
        self._is_rank_sure = self._is_rank_sure or self._last_step is not None
        step = self._last_step if self._last_step is not None else float(self._matching_lines)
        self._matching_lines += 1
        self._is_training = self._is_training or printed.certain
        for name, value in metrics:
            if not self._is_training:
                if name not in self._held and len(self._held) >= MAX_HELD:
                    continue
                before = self._held.setdefault(name, (step, value))
                if before == (step, value) or before[1] == value:
                    self._last_held.append(name)
                    continue
                # A setting has one value: this is a curve.
                if isfinite(before[0]):
                    batch.setdefault(name, Curve()).add(*before)
                    self._held[name] = (inf, nan)
            batch.setdefault(name, Curve()).add(step, value)

    def _is_in_block(self, line: str) -> bool:
        """Return whether a line is in a block of settings, such as a printed model or config, or opens or closes one.

        In a block of braces, which may be a printed dictionary of results, lines with the name of a result count.
        """
        text = line.strip()
        if self._block is not None:
            indent, bracket = self._block
            is_outer = len(line) - len(line.lstrip()) <= indent
            closes = is_outer and text[0] in ")]}"
            if closes or has_step(line) or (is_outer and text[-1] not in ",([{"):
                self._block = None
                return closes
            key = text.split(":", 1)[0].strip("'\" ")
            return bracket != "{" or not (is_result(key) or key in self._wanted)
        if text[-1] in "({[" and not has_step(line):
            self._block = (len(line) - len(line.lstrip()), text[-1])
            return True
        return False

    def _read_pairs(self, line: str) -> Printed:
        """Read the pairs of a line, under the heading above it if there is one.

        A heading applies to the more deeply indented lines below it. If they are not indented, nothing marks their
        end: it then applies to the lines that follow directly, have metrics and no step. A training heading does not,
        unless it is between rules, since later training lines have no heading either. A bare word (`Evaluating...`)
        applies until a name is repeated.
        """
        indent = len(line) - len(line.lstrip())
        is_fresh, self._is_heading_fresh = self._is_heading_fresh, False
        if self._heading is not None:
            above, split, indented = self._heading
            if indent > above:
                self._heading = (above, split, True)
            elif indented or has_step(line):
                self._heading = None
        above_it = self._heading[1] if self._heading is not None else None
        if above_it is None and line.lstrip().startswith("* "):
            above_it = self._last_split  # ` * Acc@1 63.1`: the result of the lines above
        printed = read_line(line, above_it, self._wanted)
        if printed.metrics and self._heading is not None and self._names_below is not None and not self._heading[2]:
            if self._names_below & {name for name, _ in printed.metrics}:
                self._heading = None
                printed = read_line(line, wanted=self._wanted)
            else:
                self._names_below |= {name for name, _ in printed.metrics}
        if not printed.metrics:
            if heading := read_heading(line):
                is_train = kind_of_split(heading) == "train" and not is_ruled_heading(line)
                self._heading = (indent, heading, is_train)
                self._is_heading_fresh = True
                self._names_below = set() if is_bare_heading(line) else None
            elif self._heading is not None and indent <= self._heading[0] and not (is_fresh and is_rule(line)):
                self._heading = None
        return printed

    def _note_step(self, steps: list[Step], has_metrics: bool) -> None:
        steps = [step for step in steps if isfinite(step.value)]
        if has_metrics:
            highest = self._rank if self._is_rank_sure else EPOCH
            usable = [step for step in steps if step.rank <= max(highest, self._rank)]
        else:
            usable = [step for step in steps if step.rank == self._rank or not self._is_rank_sure]
        ranks = {step.rank for step in steps}
        self._has_both = self._has_both or (self._rank in ranks and not ranks.isdisjoint(ITERATIONS - {self._rank}))
        if not usable and not self._has_both and self._rank < min(ITERATIONS):
            usable = [step for step in steps if step.rank in ITERATIONS]  # another word for the same
            self._last_step = usable[0].value if usable else self._last_step
            return
        if not usable:
            return
        best = min(usable, key=lambda step: step.rank)
        self._rank = best.rank
        epoch = next((step.value for step in steps if step.rank == EPOCH), None)
        self._last_step = best.value if epoch is None or best.rank >= EPOCH else self._count_epochs(best, epoch)

    def _count_epochs(self, step: Step, epoch: float) -> float:
        """Return a step that grows over the epochs, from one that starts again with each epoch.

        A named step (`Epoch 2, step 10/600`) may also count through all epochs; it does not if it was seen to fall.
        """
        if epoch == 0:
            self._first_epoch = 0.0
        if epoch < self._epoch:  # the training starts again
            self._before = 0.0
        if step.rank == BATCH or (epoch > self._epoch and step.value <= self._batch):
            epochs = epoch - self._first_epoch
            self._before = epochs * step.of if step.of else self._before + self._batch
        self._epoch, self._batch = epoch, step.value
        return max(0.0, self._before) + step.value


class LogFileSource(StdoutSource):
    """Metrics in a log file that the trainer writes itself, in the formats of printed text."""

    kind = "log_file"


def _read_groups(matches: Sequence[Groups]) -> Printed:
    """Return the metrics and the steps in the matches of the user's patterns."""
    metrics: list[tuple[str, float]] = []
    steps: list[Step] = []
    for groups in matches:
        for name, text in groups.items():
            value = _parse_value(text)
            if value is None:
                continue
            if name.lower() in RANK:
                steps.append(Step(RANK[name.lower()], name, value))
            else:
                metrics.append((name, value))
    return Printed(metrics, steps, certain=True)


def _read_json(text: str) -> Printed | None:
    """Return the numbers of a printed JSON object, nested ones with slashes; None if it is not JSON, or not nested."""
    try:
        content = load_json(text)
    except UntrustedError:
        return None
    if not isinstance(content, dict) or not any(isinstance(value, dict) for value in content.values()):
        return None  # line by line, a heading above it applies
    values: dict[str, float] = {}
    flatten_numbers("", content, "/", values, {})
    steps = [Step(RANK[name.lower()], name, value) for name, value in values.items() if name.lower() in RANK]
    metrics = [
        (name, value)
        for name, value in values.items()
        if name.lower() not in RANK and not is_never_metric(name.rpartition("/")[2])
    ]
    results = [name for name, _ in metrics if is_result(name.rpartition("/")[2])]
    return Printed(
        metrics, steps, certain=bool(results) and not any(is_setting(name.rpartition("/")[2]) for name in values)
    )


def _decode(line: bytes) -> str:
    """Return the text of a line up to MAX_LINE, without terminal codes and without a word that the limit cuts."""
    text = line[:MAX_LINE].decode("utf-8", "replace")
    text = text if len(line) <= MAX_LINE else text.rstrip(_IN_NUMBERS)
    return _ANSI.sub("", text) if "\x1b" in text else text


_VALUE = re.compile(rf"\s*+({NUMBER})\s?([kKMBGT]|%)?\s*+[,;]?\s*+$", re.ASCII)


def _parse_value(text: str | None) -> float | None:
    match = _VALUE.match(text) if text else None
    return scaled(match[1], match[2]) if match else None
