"""Tables in printed text: boxes of names and values, and rows of numbers below a header.

| rollout/        |      |        epoch  train_loss  valid_loss  dur
|    ep_rew_mean  | 21.6 |        -----  ----------  ----------  ---
| time/           |      |            1      0.6905      0.6749  0.4
|    total_timesteps | 2048 |         2      0.6648      0.6633  0.4
"""

from __future__ import annotations

import re
from collections.abc import Collection

from looplab.measure.printed import NUMBER, Printed, Step, scaled
from looplab.measure.splits import has_split, kind_of_split
from looplab.measure.words import RANK, is_never_metric, is_result, is_setting

MAX_ROWS = 500
"""Rows of a box; a longer one is read in parts."""
_MAX_HEADER = 400
_BARS = "|│┃║"
_BAR = re.compile(rf"\s*+[{_BARS}]\s*+")
_RULE = re.compile(r"[\s|+:=_*─━═┄┅╌╍┏┓┗┛┡┩├┤┝┥┬┴┼┳┻╇╋┌┐└┘╒╕╘╛╞╡╤╧╪╭╮╰╯-]++\Z")
_GAP = re.compile(r"\s\s+|\t")
_CELL = re.compile(rf"(?P<value>{NUMBER})(?:/(?P<of>\d++))?(?P<unit>[kKMBGT]|\s?%|ms|s)?\Z", re.ASCII)
_LIKE_A_VALUE = re.compile(r"[-+.]?\d|(?:-+|nan|NaN|n/a|N/A|None|inf)\Z")
_PROGRESS = re.compile(r":?\s++\d{1,3}%\|.*|:\s++\d{1,3}%.*")
_NOT_IN_HEADERS = re.compile(r"[=:;{}\"]|(?:\A|(?<!DataLoader)\s)[-+.]?\d")
_TOTALS = frozenset({"all", "avg", "average", "mean", "total", "overall"})
_COUNTS = frozenset({"size", "instances", "images", "support", "nevals", "params"})
"""Columns that are not metrics."""


class Tables:
    """Reads tables line by line."""

    __slots__ = ("_box", "_columns", "_confirmed", "_group", "_split", "_wanted")

    def __init__(self, wanted: Collection[str] = ()) -> None:
        self._wanted = wanted
        """Names that are always metrics."""
        self._box: list[tuple[str, str]] = []
        """Names and values of the current box."""
        self._group = ""
        self._columns: list[str] | None = None
        """The header of the current table; None if there is none."""
        self._confirmed = False
        """Whether a row has followed the header."""
        self._split = ""
        """How the cells of the current table are separated: by bars, by gaps, or by any space."""

    def read(self, line: str) -> tuple[list[Printed], bool]:
        """Return what the line completes, and whether it belongs to a table, so that it is not read otherwise."""
        text = line.strip()
        if not text:
            return [], True
        if text[0] in _BARS and text[-1] in _BARS and len(text) > 1:
            cells = _BAR.split(text[1:-1].strip())
            if len(cells) == 2 and not _LIKE_A_VALUE.match(cells[0]) and not is_rule(text):
                return self._read_box_row(*cells)
        done = self.finish()
        if self._columns is not None:
            if is_rule(text):
                return done, True
            row = self._read_row(text)
            if row is not None:
                self._confirmed = True
                return [*done, row], True
            if not self._confirmed:
                self._columns = None
        return done, self._read_header(text)

    def finish(self) -> list[Printed]:
        """Return the current box, which ends here."""
        box, self._box, self._group = self._box, [], ""
        return [_to_printed(box, self._wanted)] if box else []

    def _read_box_row(self, name: str, text: str) -> tuple[list[Printed], bool]:
        if any(sign in name for sign in ":="):
            return self.finish(), False
        if not text:
            self._group = name if name.endswith("/") else ""
            return [], True
        if not _CELL.match(text):
            done = self.finish()
            self._read_header(f"| {name} | {text} |")
            return done, True
        done = self.finish() if len(self._box) >= MAX_ROWS else []
        self._box.append((self._group + _to_name(name), text))
        return done, True

    def _read_header(self, text: str) -> bool:
        """Take a line as a header; return False if it is not one."""
        if len(text) > _MAX_HEADER:
            return False
        if "%" in text:
            text = _PROGRESS.sub("", text)
        if _NOT_IN_HEADERS.search(text) or is_rule(text):
            return False
        for split in ("bar", "gap", "space"):
            cells = _split_cells(text, split)
            if len(cells) > 1:
                break
        else:
            return False
        names = [_to_name(cell) for cell in cells]
        known = (name == "#" or name.lower() in RANK or is_result(name) or kind_of_split(name) for name in names)
        if not any(known) or (split == "space" and not all(name.lower() in RANK or is_result(name) for name in names)):
            return False
        for i, name in enumerate(names):
            names[i] = name if name not in names[:i] else f"{name}_{names[:i].count(name) + 1}"
        if "#" in names:
            names = [{"#": "step", "E": "epoch"}.get(name, name) for name in names]
        self._columns, self._split, self._confirmed = names, split, False
        return True

    def _read_row(self, text: str) -> Printed | None:
        """Return the values of a row; None if the line is not one."""
        assert self._columns is not None
        columns = self._columns
        text = _PROGRESS.sub("", text[: _MAX_HEADER * 2])
        cells = _split_cells(text, self._split)
        if self._split == "gap" and len(cells) != len(columns):
            spaced = text.split()
            cells = spaced if len(spaced) == len(columns) else cells
        if not cells:
            return None
        is_number = _LIKE_A_VALUE.match(cells[0]) is not None
        # One number more than columns: the row of a class in a report, or of a frame with its index.
        numbered = is_number and cells[0].isdigit() and len(cells) == len(columns) + 1 and self._split == "gap"
        label = "" if is_number and not (numbered and "support" in columns) else cells[0]
        loose = self._split == "bar" and len(columns) > 2
        if not loose and not all(map(_LIKE_A_VALUE.match, cells[1:] if label else cells)):
            return None
        if (label or numbered) and len(cells) == len(columns) + 1:
            cells = cells[1:]
        elif label and 1 < len(cells) < len(columns) and is_result(label):
            return _to_printed([(_to_name(label), cells[1])], self._wanted)
        elif len(cells) != len(columns):
            return None
        pairs = [(name, cell) for name, cell in zip(columns, cells, strict=True) if _CELL.match(cell)]
        if not pairs:
            return None
        has_step = any(name.lower() in RANK for name, _ in pairs)
        if label and not has_step and label.lower() not in _TOTALS:
            label = _to_name(label)
            alone = "metric" in columns[0].lower() and len(columns) == 2
            pairs = [(label if alone else f"{label}/{name}", cell) for name, cell in pairs]
        return _to_printed(pairs, self._wanted)


def is_rule(line: str) -> bool:
    """Return whether a line is only a rule, such as `-----` or `+---+---+`."""
    return _RULE.match(line) is not None


def _split_cells(text: str, split: str) -> list[str]:
    if split == "bar":
        cells = [cell.strip() for cell in _BAR.split(text.strip(_BARS).strip())]
        return cells if len(cells) > 1 else []
    return text.split() if split == "space" else [cell.strip() for cell in _GAP.split(text) if cell.strip()]


def _to_name(cell: str) -> str:
    return re.sub(r"[^\w@%/.#-]+", "_", cell).strip("_")


def _to_printed(pairs: list[tuple[str, str]], wanted: Collection[str]) -> Printed:
    metrics: list[tuple[str, float]] = []
    steps: list[Step] = []
    for name, text in pairs:
        match = _CELL.match(text)
        assert match is not None
        value = scaled(match["value"], match["unit"])
        rank = RANK.get(name.lower())
        if rank is not None:
            steps.append(Step(rank, name, value))
        elif name in wanted or not (is_never_metric(name) or name.rpartition("/")[2].lower() in _COUNTS):
            metrics.append((name, value))
    certain = bool(steps) or any(is_result(name) or name in wanted for name, _ in metrics)
    if not certain:
        metrics = [(name, value) for name, value in metrics if not is_setting(name)]
        certain = any(has_split(name) for name, _ in metrics)
    return Printed(metrics, steps, certain)
