"""Parse one printed line into named metric values and candidates for its step.

Values of different splits never share a name. A name that contains its split (`val_loss`, `loss/train`) is unchanged.
Any other split word (`Val Loss: 0.3`, `[val] loss: 0.3`, `Test set: loss: 0.3, acc: 0.9`) applies to every value after
it, up to the next split word, and prefixes their names: `Val_Loss`, `val_loss`, `Test_loss` and `Test_acc`. Names
depend only on the line and its heading, never on earlier values, so they are the same in every run.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from looplab.measure.rows import NOT_METRICS, STEP_NAMES
from looplab.measure.splits import SPLIT, has_split, kind_of_split
from looplab.measure.summary import METRIC_WORDS

Step = tuple[int, str, float]
"""A candidate for a line's step: the rank of its name, its name (a space if it cannot be a metric), its value."""

# Quantifiers are possessive (`*+`) where backtracking over a long run of spaces or digits would be slow.
NUMBER = (
    r"[-+]?(?>\d{1,3}(?:,\d{3})++(?:\.\d++)?|(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d++)?|(?:nan|NaN|inf|Inf|Infinity)\b)"
)
_PAIR = re.compile(
    r"(?<![^\s,;:|(\[{'\"])(?<!per )"  # a key begins a word
    r"(?P<key>[A-Za-z_][\w./@-]*+)['\"]?"
    rf"(?:\s?[(\[](?P<split>{SPLIT})[)\]])?"  # `loss (val): 0.3`
    r"(?:\s*+(?P<sign>[=:])\s*+|\s++(?=[^\s,;|]*(?:[.eE%]|nan|inf)))"
    rf"(?P<value>{NUMBER})"
    r"(?P<of>\s*+/\s*+\d++(?![\w.]))?"  # `step: 3/10`
    r"(?P<unit>[kKMBGT](?!\w)|%|(?:ms|us|s|sec|it/s|s/it)(?![\w/]))?"
    r"(?![\w%]|[.,:/-]\d|:\w)",  # not half of a date, a clock, a version, a list, a path
    re.ASCII,
)
"""A name and its value. Without a sign between them (`loss 0.3`), they count only after a split word."""
_STEP_IN_WORDS = re.compile(
    r"(?<![^\s,;:|(\[{'\"-])(?<!per )(?P<key>global[ _]step|step|iteration|iter|update|epoch)"
    r"\s*+[:=#]?\s*+[\[(]?\s*+(?P<value>\d++(?:\.\d++)?)(?P<unit>[kKMB](?!\w))?"
    r"(?![\w%]|[.,:-]\d)",
    re.IGNORECASE | re.ASCII,
)
_PROGRESS_BAR = re.compile(r"\|\s*+(\d++)/\d++ \[")

_FILE = r"\.(?:py|pyx|c|cc|cpp|cu|h|rs|go|js|ts|sh|log|txt|json|yaml|yml|toml)"
_SPLIT_WORD = re.compile(
    rf"(?<![A-Za-z0-9]){SPLIT}(?:\s?(?:[/&+,._-]|and)\s?{SPLIT}){{0,8}}+(?![\w./@-]{{0,64}}{_FILE}\b)", re.ASCII
)
"""`val`, and `Train/Val` as one word, since its value belongs to neither. The bound keeps matching linear."""
_SPLIT_HINTS = ("tr", "val", "test", "tst", "dev", "hold", "held")
_STEP_HINTS = ("step", "iter", "update", "epoch")
"""Lower-case text that a line must contain for the slower expressions to match."""
_WHOLE_LINE = re.compile(
    rf"\b(?i:split|phase|mode|stage|subset|partition)['\"]?\s*+[:=]\s*+['\"]?(?P<split>{SPLIT})", re.ASCII
)
"""`{"loss": 0.5, "split": "val"}`: the split of every value in the line."""
_METRIC_ON_SPLIT = re.compile(
    rf"(?<!\w)(?P<metric>[A-Za-z][\w@-]*+)\s++(?:(?:on|for|of|over|in)\s++)?(?:the\s++)?(?P<split>{SPLIT})"
    r"(?:\s++(?:set|data|dataset|split))?\Z",
    re.ASCII,
)
"""`loss val: 0.3`, `accuracy on the test set: 0.9`: the word before the number is the split, not the metric."""
_SETS = frozenset({"set", "data", "dataset", "split"})
_WORD_BEFORE = re.compile(r"(?<![\w.@/-])(?P<word>[A-Za-z][\w@-]*+(?: \d{1,2})?)(?:'s)?[^\w]*\Z", re.ASCII)
_HEADING = re.compile(r"[=*#-]{2,}+.*[=*#-]{2,}\s*\Z|.*:\s*\Z", re.ASCII)
_MAX_HEADING = 80
_AROUND_HEADINGS = frozenset({
    *("a", "the", "on", "now", "start", "starting", "begin", "beginning", "run", "running", "epoch", "round", "step"),
    *("phase", "mode", "stage", "loop", "pass", "set", "data", "dataset", "split", "model"),
    *("metrics", "results", "scores"),
})  # fmt: skip
"""Words that a heading without a sign may have in addition to its split word: `Running validation`, `[Test set]`."""
_SWITCHED_OFF = re.compile(rf"(?<![A-Za-z0-9])(?P<split>{SPLIT})['\"]?\s*+[:=]\s*+(?i:false|no|off)\b", re.ASCII)
"""`is_training=False`: the values of the line belong to any split but this."""

_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
RANK = {name: rank for rank, name in enumerate(STEP_NAMES)} | {"global step": STEP_NAMES.index("global_step")}
"""Reliability of each name of the step; 0 is the most reliable."""
_NEVER_METRICS = NOT_METRICS | {
    *("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "TRACE"),
    *("cuda", "gpu", "cpu", "mps", "xpu", "tpu", "device", "localhost", "host", "port", "http", "https"),
    *("pid", "rank", "local_rank", "world_size", "seed", "line", "version", "date", "eta", "ETA", "elapsed"),
}
_FILE_OR_ERROR = re.compile(rf"{_FILE}$|[a-z](?:Error|Exception|Warning)$")
_WITHOUT_SPLIT = frozenset({"lr", "learning_rate", "grad_norm", "weight_decay"})
"""Values of the optimizer; a split word applies to them only if it is adjacent."""


class _Value(NamedTuple):
    """One value of a line."""

    key: str
    """Its name, without split or disambiguation."""
    value: float
    start: int
    key_end: int
    end: int
    """Position in the line."""
    before: str
    """The text between the previous pair and its key."""
    bracketed: str | None
    """The split word in brackets after its key; None if there is none."""
    bare: bool
    """Whether there is no sign between the key and the value."""
    split: str | None = None
    """The split word that applies to it, other than one in its key."""
    named: bool = False
    """Whether its key contains a split word."""
    nearest: str | None = None
    """The last split word before it, possibly inside another key."""
    adjacent: bool = False
    """Whether its split word is the word before it."""


def read_line(line: str, heading: str | None = None) -> tuple[list[tuple[str, float]], list[Step]]:
    """Return the metrics of a line, and candidates for its step. `heading` is the split word of a heading above it."""
    lower = line.lower()
    words = [*_SPLIT_WORD.finditer(line)] if any(hint in lower for hint in _SPLIT_HINTS) else []
    if words and (off := _SWITCHED_OFF.search(line)):
        words = [word for word in words if not off.start() <= word.start() < off.end()]
        heading = f"not_{off['split']}"
    values: list[_Value] = []
    steps: list[Step] = []
    if ":" in line or "=" in line or words or heading:
        values, steps, spans = _read_pairs(line, bare=bool(words or heading))
        if words or heading:
            values = _assign_splits(line, values, words, spans, heading)
    ranks = {rank for rank, _, _ in steps}
    if any(hint in lower for hint in _STEP_HINTS):
        for match in _STEP_IN_WORDS.finditer(line):
            rank = RANK[match["key"].lower().replace(" ", "_")]
            if rank not in ranks:
                # The space keeps it from becoming a metric if a more reliable name is known.
                steps.append((rank, " ", scaled(match["value"], match["unit"])))
    if not steps and (bar := _PROGRESS_BAR.search(line)):
        steps.append((len(STEP_NAMES), " ", float(bar[1])))
    return [(name, value.value) for name, value in zip(_names(values), values, strict=True)], steps


def read_heading(line: str) -> str | None:
    """Return the split word of a line that is the heading of those below it: `Test Error:`, `=== Validation ===`."""
    if len(line) > _MAX_HEADING or not (_HEADING.match(line) or is_bare_heading(line)):
        return None
    words = [*_SPLIT_WORD.finditer(line)]
    return _clean_word(words[-1]) if words else None


def is_bare_heading(line: str) -> bool:
    """Return whether a line only names the next split, without a heading's sign: `[Validation]`, `Evaluating...`."""
    words = re.findall(r"[A-Za-z_-]+", line)
    return not _HEADING.match(line) and all(
        word.lower() in _AROUND_HEADINGS or kind_of_split(word) is not None or not word.strip("_-") for word in words
    )


def has_step(line: str) -> bool:
    return _STEP_IN_WORDS.search(line) is not None


def scaled(text: str, unit: str | None) -> float:
    return float(text.replace(",", "")) * _UNITS.get(unit or "", 1.0)


def _read_pairs(line: str, *, bare: bool) -> tuple[list[_Value], list[Step], list[tuple[int, int, int]]]:
    """Return the values of a line, its steps, and the spans of both: start and end of the key, and the end."""
    values: list[_Value] = []
    steps: list[Step] = []
    spans = []
    previous = 0
    for match in _PAIR.finditer(line):
        key, unit, sign = match["key"], match["unit"], match["sign"]
        if not sign and not (bare and _is_metric(key)):
            continue
        (start, key_end), end = match.span("key"), match.end()
        before, previous = line[previous:start], end
        if key in _NEVER_METRICS or _FILE_OR_ERROR.search(key):
            continue
        rank = RANK.get(key.lower())
        if rank is not None:
            steps.append((rank, key, scaled(match["value"], unit)))
        elif match["of"] or (unit == "%" and line.startswith("|", end)):  # `Train: 3/10`, a progress bar
            continue
        else:
            value = scaled(match["value"], unit)
            values.append(_Value(key, value, start, key_end, end, before, match["split"], bare=not sign))
        spans.append((start, key_end, end))
    return values, steps, spans


def _assign_splits(
    line: str, values: list[_Value], words: list[re.Match[str]], spans: list[tuple[int, int, int]], heading: str | None
) -> list[_Value]:
    """Find the split of each value; bare values without one are dropped."""
    inside: dict[int, str] = {}
    separate = []
    for word in words:
        at = bisect_right(spans, word.start(), key=itemgetter(0)) - 1
        if at >= 0 and word.start() < spans[at][1]:
            inside[spans[at][0]] = _clean_word(word)
        else:
            separate.append(word)
    ahead, behind = _divide(line, separate, {end for _, _, end in spans})
    line_split = _WHOLE_LINE.search(line) if separate else None
    split = nearest = line_split["split"] if line_split else heading
    counted = None
    split_end, upcoming = -1, 0
    assigned = []
    for value in values:
        while upcoming < len(ahead) and ahead[upcoming].start() < value.start:
            split = nearest = _clean_word(ahead[upcoming])
            split_end = ahead[upcoming].end()
            upcoming += 1
        key, own = value.key, value.bracketed or inside.get(value.start)
        adjacent = split_end >= 0 and not line[split_end : value.start].strip(" \t.'s")
        if value.bracketed:
            key = f"{key}_{own}"
        elif (on := _read_metric_on_split(line, value, own)) is not None:
            key, split, split_end, adjacent = f"{on[0]}_{on[1]}", on[1], value.key_end, False
            own = split
        elif key == own and value.value.is_integer():
            counted = own  # `val: 3 loss: 0.5`
        effective = split if adjacent or not _has_no_split(key, own is not None) else None
        if effective is None and own is None and counted is not None and _is_metric(key):
            effective = counted
        if effective or own or not value.bare:
            assigned.append(
                value._replace(key=key, split=effective, named=own is not None, nearest=nearest, adjacent=adjacent)
            )
        nearest = own or nearest
    return _qualify(assigned, behind)


def _read_metric_on_split(line: str, value: _Value, own: str | None) -> tuple[str, str] | None:
    """Return the metric and the split if they precede the number in this order; else None."""
    if value.key != own and value.key.lower() not in _SETS:
        return None
    on = _METRIC_ON_SPLIT.search(line, value.start - len(value.before), value.key_end)
    return (on["metric"], on["split"]) if on and _is_metric(on["metric"]) else None


def _divide(
    line: str, words: list[re.Match[str]], ends: set[int]
) -> tuple[list[re.Match[str]], list[tuple[int, re.Match[str]]]]:
    """Separate split words that apply to what follows from those that apply to what precedes them.

    The latter come with the end of the preceding value: `loss: 0.3 (val)`, and `loss: 0.3 [val]` at the end of a line.
    """
    if not words or (")" not in line and "]" not in line):
        return words, []
    brackets = {"()", "[]"} if line[words[-1].end() :].strip() == "]" else {"()"}
    ahead, behind = [], []
    for word in words:
        start, end = word.span()
        if line[start - 1 : start] + line[end : end + 1] in brackets:
            end_before = len(line[: start - 1].rstrip())
            if end_before in ends:
                behind.append((end_before, word))
                continue
        ahead.append(word)
    return ahead, behind


def _qualify(values: list[_Value], behind: list[tuple[int, re.Match[str]]]) -> list[_Value]:
    """Apply split words that follow their values: to the adjacent value, and to earlier ones without a split."""
    upcoming = 0
    for i, value in enumerate(values):
        while upcoming < len(behind) and behind[upcoming][0] < value.end:
            upcoming += 1
        if upcoming == len(behind):
            break
        end, word = behind[upcoming]
        counts = not value.split or (value.end == end and not value.adjacent)
        if counts and not _has_no_split(value.key, value.named):
            values[i] = value._replace(split=_clean_word(word))
    return values


def _has_no_split(key: str, named: bool) -> bool:
    """Return whether split words elsewhere in the line do not apply to a key."""
    return named or key.lower() in _WITHOUT_SPLIT


def _clean_word(word: re.Match[str]) -> str:
    return word[0] if word[0].isalpha() else re.sub(r"[^\w-]+", "_", word[0])


def _is_metric(word: str) -> bool:
    return any(part.rstrip("0123456789") in METRIC_WORDS for part in re.split(r"[^a-z0-9]+", word.lower()))


def _names(values: Sequence[_Value]) -> list[str]:
    """Return the names of a line's values: their keys, prefixed by their split words.

    If two names are then equal although different words precede them, they also contain the word before the key, or a
    number.
    """
    names = [f"{value.split}_{value.key}" if value.split else value.key for value in values]
    if len(set(names)) == len(names):
        return names
    alike = defaultdict(list)
    for i, name in enumerate(names):
        alike[name].append(i)
    before = [_words_before(value) for value in values]
    ambiguous = [indices for indices in alike.values() if len({before[i] for i in indices}) > 1]
    taken: dict[str, object] = {name: None for name, indices in alike.items() if indices not in ambiguous}
    for indices in ambiguous:
        for i in sorted(indices, key=lambda i: before[i][0] is not None):
            owner, word, _ = before[i]
            name = unique = "_".join(part for part in (owner, word, values[i].key) if part)
            number = 1
            while taken.setdefault(unique, (values[i].key, before[i])) != (values[i].key, before[i]):
                number += 1
                unique = f"{name}_{number}"
            names[i] = unique
    return names


def _words_before(value: _Value) -> tuple[str | None, str | None, bool]:
    """Return what distinguishes a value from others of its name.

    That is its split, the word before its key, and whether the split is that word.
    """
    match = _WORD_BEFORE.search(value.before)
    word = match["word"].replace(" ", "_") if match else None
    if word and (word in _NEVER_METRICS or word.split("_")[0].lower() in RANK or has_split(word)):
        word = None
    return value.split or (None if value.named else value.nearest), word, value.adjacent
