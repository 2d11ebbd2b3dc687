"""What a trainer prints: `key: value` and `key=value` pairs in `train.log`, or what the user's own patterns find."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from looplab.errors import LabError
from looplab.measure.base import Batch, Curve
from looplab.measure.rows import NOT_METRICS, STEP_NAMES
from looplab.measure.tail import LineTail

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|NaN|inf|Inf|Infinity)\b)"
_PAIR = re.compile(
    r"(?<![^\s,;:|(\[{'\"])(?<!per )"  # a key begins a word
    r"(?:(?P<split>(?:train|training|val|valid|validation|test|eval|dev)) )?"  # `val loss: 0.3` is not `loss`
    r"(?P<key>[A-Za-z_][\w./@-]*)['\"]?"
    r"(?:\s*=\s*|\s*:\s*)"
    rf"(?P<value>{_NUMBER})"
    r"(?P<of>\s*/\s*\d+(?![\w.]))?"  # `step: 3/10`
    r"(?P<unit>[kKMBGT](?!\w)|%|(?:ms|us|s|sec|it/s|s/it)(?![\w/]))?"
    r"(?![\w%]|[.,:/-]\d|:\w)",  # not half of a date, a clock, a version, a list, a path
    re.ASCII,
)
_STEP_IN_WORDS = re.compile(
    r"(?<![^\s,;:|(\[{'\"-])(?<!per )(?P<key>global[ _]step|step|iteration|iter|update|epoch)"
    r"\s*[:=#]?\s*[\[(]?\s*(?P<value>\d+(?:\.\d+)?)(?P<unit>[kKMB](?!\w))?"
    r"(?![\w%]|[.,:-]\d)",
    re.IGNORECASE | re.ASCII,
)
_PROGRESS_BAR = re.compile(r"\|\s*(\d+)/\d+ \[")
_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_RANK = {name: rank for rank, name in enumerate(STEP_NAMES)} | {"global step": STEP_NAMES.index("global_step")}

_NEVER_METRICS = NOT_METRICS | {
    *("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "TRACE"),
    *("cuda", "gpu", "cpu", "mps", "xpu", "tpu", "device", "localhost", "host", "port", "http", "https"),
    *("pid", "rank", "local_rank", "world_size", "seed", "line", "version", "date", "eta", "ETA", "elapsed"),
}
_A_FILE_OR_AN_ERROR = re.compile(
    r"\.(?:py|pyx|c|cc|cpp|cu|h|rs|go|js|ts|sh|log|txt|json|yaml|yml|toml)$|[a-z](?:Error|Exception|Warning)$"
)


class StdoutSource:
    """Pairs and patterns in printed text.

    A line's step is its `step`, `iter`, `epoch` … whatever its form (`step: 100`, `Epoch 3/10`, `iter=1.2K`); a line
    without one belongs to the last step seen; if there was none, to the number of its line among the lines that
    hold metrics. Where a user's pattern matches a line, the pattern alone says what is in it.
    """

    kind = "stdout"

    def __init__(self, path: Path, patterns: Sequence[str] = ()) -> None:
        self.path = path
        self.skipped = 0
        self._patterns = [_compiled(pattern) for pattern in patterns]
        self._lines = LineTail(path, self._restart, carriage_returns=True)
        self._restart()

    @property
    def position(self) -> int:
        return self._lines.position

    def poll(self, final: bool = False) -> Batch:
        batch: Batch = {}
        for lines in self._lines.blocks(final):
            for line in lines:
                if line:
                    self._read(line.decode("utf-8", "replace"), batch)
        return batch

    def _restart(self) -> None:
        self._rank = len(STEP_NAMES)
        self._last_step: float | None = None
        self._matching_lines = 0

    def _read(self, line: str, batch: Batch) -> None:
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        found = self._match_patterns(line)
        if found is None:
            found = _pairs(line)
        metrics, steps = found
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

    def _note_step(self, steps: list[tuple[int, str, float]]) -> None:
        usable = [entry for entry in steps if entry[0] <= self._rank and isfinite(entry[2])]
        if usable:
            self._rank, _, self._last_step = min(usable, key=lambda entry: entry[0])

    def _match_patterns(self, line: str) -> tuple[list[tuple[str, float]], list[tuple[int, str, float]]] | None:
        metrics: list[tuple[str, float]] = []
        steps: list[tuple[int, str, float]] = []
        matched = False
        for pattern in self._patterns:
            for match in pattern.finditer(line):
                matched = True
                for name, text in match.groupdict().items():
                    value = _value(text)
                    if value is None:
                        continue
                    if name.lower() in _RANK:
                        steps.append((_RANK[name.lower()], name, value))
                    else:
                        metrics.append((name, value))
        return (metrics, steps) if matched else None


def _pairs(line: str) -> tuple[list[tuple[str, float]], list[tuple[int, str, float]]]:
    """The metrics of a line, and what may be its step: (rank of the name, name, value)."""
    metrics: list[tuple[str, float]] = []
    steps: list[tuple[int, str, float]] = []
    seen = set()
    if ":" in line or "=" in line:
        for match in _PAIR.finditer(line):
            key, of, unit = match["key"], match["of"], match["unit"]
            rank = _RANK.get(key.lower())
            if key in _NEVER_METRICS or (of and rank is None) or _A_FILE_OR_AN_ERROR.search(key):
                continue
            value = _scaled(match["value"], unit)
            if rank is not None:
                steps.append((rank, key, value))
                seen.add(rank)
            else:
                metrics.append((f"{match['split']}_{key}" if match["split"] else key, value))
    for match in _STEP_IN_WORDS.finditer(line):
        rank = _RANK[match["key"].lower().replace(" ", "_")]
        if rank not in seen:
            # The space marks it as no metric, should a surer name be known.
            steps.append((rank, " ", _scaled(match["value"], match["unit"])))
    if not steps and (bar := _PROGRESS_BAR.search(line)):
        steps.append((len(STEP_NAMES), " ", float(bar[1])))
    return metrics, steps


def _scaled(text: str, unit: str | None) -> float:
    return float(text.replace(",", "")) * _UNITS.get(unit or "", 1.0)


_VALUE = re.compile(rf"\s*({_NUMBER})([kKMBGT]|%)?\s*[,;]?\s*$", re.ASCII)


def _value(text: str | None) -> float | None:
    match = _VALUE.match(text) if text else None
    return _scaled(match[1], match[2]) if match else None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise LabError(
            f"the pattern {pattern!r} for printed metrics is not a regular expression: {error}",
            hint="see measure.stdout in the lab file",
        ) from error
    if not compiled.groupindex:
        raise LabError(
            f"the pattern {pattern!r} for printed metrics names no metric",
            hint=r"name what it finds, for example 'step (?P<step>\d+) loss (?P<loss>\S+)'",
        )
    return compiled
