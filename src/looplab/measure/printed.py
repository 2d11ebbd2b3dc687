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
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

from looplab.measure.splits import KIND_OF, SPLIT, has_split, kind_of_split
from looplab.measure.words import BATCH, EPOCH, INDEX, RANK, has_metric_word, is_never_metric, is_result, is_setting


class Step(NamedTuple):
    """A candidate for a line's step."""

    rank: int
    """The rank of its name; 0 is the most reliable."""
    name: str
    """Its name; empty if it cannot be a metric."""
    value: float
    of: float | None = None
    """The last value that it counts up to, as in `Step [10/600]`; None if that is not printed."""


class Printed(NamedTuple):
    """What was read from one line, or from one table."""

    metrics: list[tuple[str, float]]
    steps: list[Step]
    certain: bool = False
    """Whether these are surely measurements, and not settings that are printed in the same way."""
    split: str | None = None
    """The last split word that applies to a value; None if there is none."""


# Quantifiers are possessive (`*+`) where backtracking over a long run of spaces or digits would be slow.
NUMBER = (
    r"[-+]?(?>\d{1,3}(?:,\d{3})++(?:\.\d++)?|(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d++)?|(?:nan|NaN|inf|Inf|Infinity)\b)"
)
_PAIR = re.compile(
    r"(?<![^\s,;:|/(\[{'\"])(?<!per )"  # a key begins a word
    r"(?P<key>[A-Za-z_][\w./@-]*+)['\"]?"
    r"(?:\s?[(\[](?P<note>\w[\w /.-]{0,15})[)\]])?"  # `loss (val): 0.3`, `time (s): 3`
    r"(?:\s*+(?P<sign>[=:])\s*+|\s++(?:(?:is|was)\s++)?)"
    r"(?P<call>(?:tensor|array|(?:np\.|numpy\.)?float\d{0,3})\()?(?P<wrap>[\['\"])?"
    rf"(?P<value>{NUMBER})"
    r"(?P<of>\s*+/\s*+(?P<total>\d++)(?![\w.]))?"  # `step: 3/10`
    r"(?P<unit>[kKMBGT](?!\w)|\s?%|(?:ms|us|s|sec|it/s|s/it)(?![\w/]))?"
    r"(?(wrap)\s?['\"\]])(?(call)[^()]{0,200}\))"
    r"(?![\w%]|[.,:/-]\d|:\w|\s(?:DEBUG|INFO|WARNING|ERROR)\b)",  # not half of a date, a version, a list, a path
    re.ASCII,
)
"""A name and its value, which may be quoted or an array of one. Between them is a sign, or space (`loss 0.3`)."""
_AFTER_BARE = re.compile(r"\s?(?:\([^()]{0,40}\))?(?:\s*+[|,;/\]\[]|\s*+\Z|\t|\s\s|\s?- )")
"""What follows a value that is printed without a sign, if nothing else belongs to it: `loss 0.3 (0.4) | …`."""
_ALONE = re.compile(
    r"\s*+[A-Za-z_][\w./@-]*+(?:(?: [A-Za-z][\w-]{0,31}){1,2}\s)?\s++[-+]?\d++\.\d++(?:[eE][-+]?\d++)?\s?%?\s*+\Z",
    re.ASCII,
)
"""A name and a number with decimals on a separate line: `  Max 90.0`, `log loss    0.31`."""
_AT_STEP = re.compile(
    r"(?<![^\s,;|(\[])(?P<key>[A-Za-z_][\w./-]*+) @ ?(?P<what>(?i:step|epoch|iter|iteration|update|round) )?"
    r"(?P<step>\d{1,15})(?=\s?[:=]\s)",
    re.ASCII,
)
"""A step behind the name: `Loss/val @ 4: 0.61`."""
_SHARE_FIRST = re.compile(
    r"(?P<before>(?:\A|[|,;:(]|\s-)\s*+)(?P<value>\d{1,3}(?:\.\d{1,15})?)\s?%\s"
    r"(?P<key>(?:[A-Za-z][\w-]{0,31} )?[A-Za-z][\w@-]{0,31})(?=\s*+(?:[|,;)]|\Z))",
    re.ASCII,
)
"""A percentage before its name: `| 62.5% accuracy`."""
_OVER = re.compile(
    rf"(?<![\w.@/-])(?P<what>[A-Za-z][\w@-]{{0,31}}) (?:averaged )?(?:over|across) (?:the |all )?"
    rf"(?:last |past |first )?\d{{1,9}} (?:(?P<split>{SPLIT}) )?[a-z]{{1,16}}(?=\s?[:=]|\s(?:is|was)\s)",
    re.ASCII,
)
"""What a value is the average of, behind its name: `Average reward over the last 100 episodes: 12.3`."""
_OF_MODEL = re.compile(
    r"(?<=\w) of (?:the|our|this) (?:\w{1,16} )?"
    r"(?:model|network|net|classifier|regressor|agent|policy|ensemble|estimator)(?=\s?[:=]|\s(?:is|was)\s)",
    re.ASCII,
)
"""`Accuracy of the model: 0.9`."""
_SQUARE = re.compile(r"(?<=\b[Rr])(?:\^2|²)")
"""`R^2: 0.9` and `R² 0.9` are `R2`."""
_DETECTION = re.compile(
    r"\s?Average (?:Precision|Recall)\s{1,9}\((?P<name>AP|AR)\) @\[ IoU=(?P<iou>[\d.:]{1,16})\s{0,9}\| area=\s{0,9}"
    rf"(?P<area>\w{{1,16}})\s{{0,9}}\| maxDets=\s{{0,9}}(?P<most>\d{{1,9}})\s{{0,9}}\] = (?P<value>{NUMBER})\s*+\Z",
    re.ASCII,
)
"""A line of the summary of COCO's evaluation."""
_MEMORY = re.compile(r"\s?(?:[KMGT]i?B|bytes)\b")
_STEP_IN_WORDS = re.compile(
    r"(?<![^\s,;:|(\[{'\"-])(?<!per )(?P<key>global[ _]step|optimizer step|step|iteration|iter|update|epoch|episode"
    r"|generation|round|ep(?=:?\s?\d{1,9}\s?/\s?\d)|train(?=:\s?\d{1,9}\s?\[))(?:\((?:train|val|test)\))?"
    r"\s*+[:=#]?\s*+[\[(]?\s*+(?P<value>\d++(?:\.\d++)?)(?P<unit>[kKMB](?!\w))?"
    r"(?![\w%]|[.,:-]\d)(?:\s{0,9}/\s{0,9}(?P<of>\d{1,15})\b)?",
    re.IGNORECASE | re.ASCII,
)
_LOCATION = re.compile(r"[:\s]\w{1,64}:\d{1,6}(?=\s[-|>]\s)|:\w{1,64}:\d{1,6}(?=\s)|\(\w{1,64}:\d{1,6}\)", re.ASCII)
"""A place in the code in the prefix of a log line: `__main__:train:88`, `(train:88)`, ` train:88 - `."""
_BATCH_NEXT = re.compile(r"[\])]?\s{0,9}[:|,-]?\s{0,9}[\[(]?\s{0,9}(\d{1,15})\s{0,9}/\s{0,9}(\d{1,15})(?![\w./])")
_BATCH_LATER = re.compile(r"(?:[\[|]|[Bb]atch[:=]?)\s{0,9}(\d{1,15})\s{0,9}/\s{0,9}(\d{1,15})(?![\w./])")
"""The batch after an epoch: `Epoch: [0][10/391]`, `Epoch 1 [Batch 20/100]`, `Epoch 1: 45%|###  | 45/100`."""
_LEADING = re.compile(
    r"(?:\A\s*+|\]\s)(?:\[(?P<index>\d{1,15})(?:/\d{1,15})?\](?:\s?\[(?P<batch>\d{1,15})/(?P<of>\d{1,15})\])?"
    r"|(?P<number>\d{1,15}):)(?=\s)",
    re.ASCII,
)
"""A number without a name before the values: `[10]<tab>loss: 0.3`, `10:<tab>loss: 0.3`, `[0/25][10/1583] loss: 0.3`."""
_PART = re.compile(
    r"(?::\s{0,9}|\]\s?)\[\s{0,9}(\d{1,9})/\s{0,9}(\d{1,9})[\s\]]|\|\s{0,9}(\d{1,9})/(\d{1,9}) \[", re.ASCII
)
"""The progress of an evaluation: `Test: [10/196]`, `Epoch(val) [2][10/79]`."""
_PROGRESS_BAR = re.compile(r"\|\s*+(\d++)/\d++ \[")

_FILE = r"\.(?:py|pyx|c|cc|cpp|cu|h|rs|go|js|ts|sh|log|txt|json|yaml|yml|toml)"
_SPLIT_WORD = re.compile(
    rf"(?<![A-Za-z0-9]){SPLIT}(?:\s?(?:[/&+,._-]|and)\s?{SPLIT}){{0,8}}+(?![\w./@-]{{0,64}}{_FILE}\b)", re.ASCII
)
"""`val`, and `Train/Val` as one word, since its value belongs to neither. The bound keeps matching linear."""
_COUNTS = re.compile(
    rf"(?<![\w-])(?:{SPLIT}\s(?:steps|batches|samples|examples|images|iterations)\s?[:=]\s?\d{{1,15}}[\s,;|]{{1,9}}){{2,4}}",
    re.ASCII,
)
"""Sizes of the splits before the values of a line, which are of neither: `Train steps: 25 Val steps: 7 loss: 0.3`."""
_SPLIT_HINTS = ("tr", "val", "test", "tst", "dev", "hold", "held")
_STEP_HINTS = ("step", "iter", "update", "epoch", "episode", "generation", "round", "train:", "ep ", "ep:")
"""Lower-case text that a line must contain for the slower expressions to match."""
_WHOLE_LINE = re.compile(
    rf"\b(?i:split|phase|mode|stage|subset|partition)['\"]?\s*+[:=]\s*+['\"]?(?P<split>{SPLIT})", re.ASCII
)
"""`{"loss": 0.5, "split": "val"}`: the split of every value in the line."""
_METRIC_ON_SPLIT = re.compile(
    rf"(?<!\w)(?P<metric>[A-Za-z][\w@-]*+)\s++(?:\((?P<short>\w{{1,16}})\)\s++)?"
    rf"(?:of the \w{{1,32}} )?(?:(?:on|for|of|over|in)\s++)?(?:the\s++)?"
    rf"(?:\d{{1,9}} )?(?P<split>{SPLIT})(?:\s++(?:set|data|dataset|split|images|samples|examples))?\Z",
    re.ASCII,
)
"""`loss val: 0.3`, `error (MSE) on the test set: 0.9`: the word before the number is the split, not the metric."""
_SETS = frozenset({"set", "data", "dataset", "split", "images", "samples", "examples"})
_ERRORS = frozenset(
    """
    mean squared square absolute root relative percentage median classification misclassification prediction
    reconstruction generalization estimation approximation validation
    """.split()  # noqa: SIM905
)
"""Words before `error` that make it a metric, and not a message."""
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
_SETTINGS = re.compile(
    r"(?:config|namespace|\bargs|arguments|hparams|(?:\b|hyper[-_]?)param(?:eter)?s|settings|\boptions)\w{0,12}['\"]?"
    r"\s?[:=({\[]",
    re.IGNORECASE | re.ASCII,
)
"""What follows are settings: `Namespace(lr=0.1, …`, `config: {'lr': 0.1, …`."""
_SETTINGS_HINTS = ("config", "namespace", "arg", "param", "setting", "option")
_MAX_SETTINGS = 4
_BRACKETS = re.compile(r"[()\[\]{}]")
_AVERAGE = re.compile(rf"\s?\(\s{{0,9}}({NUMBER})\)")
_CALL = re.compile(r"\b(?P<name>[A-Za-z_]\w{0,63})\((?P<arguments>[^()]{0,800})", re.ASCII)
_LEAD = re.compile(r"(?:\A|[|,;:\t\]>)]|\s-|\s\s)\s*+(?P<words>(?:[A-Za-z][\w'-]{0,31} ){1,4})\Z", re.ASCII)
"""The other words of a name, at the beginning of a line or after a separator: `Value function loss: 0.3`."""
_LEAD_LENGTH = 80
_PLAIN_WORDS = frozenset(
    """
    average averaged avg mean running current curr final new overall epoch set minibatch smoothed last this
    and
    """.split()  # noqa: SIM905
)
"""Words before a name that do not make it another metric."""
_PROSE = frozenset(
    """
    a an the of at on in for from to with than per by over until after is was be will are has have did not no new
    more used using reached
    """.split()  # noqa: SIM905
)
_BEST = re.compile(
    rf"\b(?:best|lowest|highest)\W{{1,3}}(?:{SPLIT}\W{{1,3}})?(?:[a-z]{{1,16}} )?\Z", re.IGNORECASE | re.ASCII
)
"""`Best val loss: 0.3` is not another point of `val_loss`."""
_NOTICE = re.compile(r"\b(?:sav|load|writ|stor|restor|resum)(?:ed|ing|e|es)\b", re.IGNORECASE | re.ASCII)

_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_TIME_UNITS = frozenset({"s", "ms", "us", "sec", "secs", "seconds", "min", "h", "it/s", "MB", "GB", "MiB", "GiB"})
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
    split: str | None = None
    """The split word that applies to it, other than one in its key."""
    named: bool = False
    """Whether its key contains a split word."""
    nearest: str | None = None
    """The last split word before it, possibly inside another key."""
    adjacent: bool = False
    """Whether its split word is the word before it."""


def read_line(line: str, heading: str | None = None, wanted: Collection[str] = ()) -> Printed:
    """Read a line.

    Args:
        line: The line.
        heading: The split word of a heading above it; None if there is none.
        wanted: Names that are metrics, whatever their words tell.
    """
    if "maxDets" in line and (detection := _DETECTION.match(line)):
        return Printed([(_detection_name(detection), float(detection["value"]))], [], certain=True)
    if " over " in line or " across " in line:
        line = _OVER.sub(lambda match: f"{match['split'] + ' ' if match['split'] else ''}{match['what']}", line)
    if "^2" in line or "²" in line:
        line = _SQUARE.sub("2", line)
    if " of " in line:
        line = _OF_MODEL.sub("", line)
    if " @" in line:
        line = _AT_STEP.sub(lambda match: f"{match['what'] or 'step '}{match['step']}, {match['key']}", line)
    if "% " in line:
        line = _SHARE_FIRST.sub(_name_first, line)
    lower = line.lower()
    if any(hint in lower for hint in _SETTINGS_HINTS):
        line = _without_settings(line)
        lower = line.lower()
    words = [*_SPLIT_WORD.finditer(line)] if any(hint in lower for hint in _SPLIT_HINTS) else []
    if len(words) > 1 and (counts := _COUNTS.search(line)):
        line = line[: counts.start()] + line[counts.end() :]
        words = [*_SPLIT_WORD.finditer(line)]
    if words and (off := _SWITCHED_OFF.search(line)):
        words = [word for word in words if not off.start() <= word.start() < off.end()]
        heading = f"not_{off['split']}"
    in_words = _steps_in_words(line) if any(hint in lower for hint in _STEP_HINTS) else []
    if words:
        words = [word for word in words if not _LOCATION.match(line, max(0, word.start() - 1))]
    record = bool(words or heading or in_words or "|" in line or line.lstrip().startswith("[") or _ALONE.match(line))
    values: list[_Value] = []
    steps: list[Step] = []
    if ":" in line or "=" in line or record:
        values, steps, spans = _read_pairs(line, wanted, bare=record)
        if words or heading:
            values = _assign_splits(line, values, words, spans, heading)
    ranks = {step.rank for step in steps}
    steps += [step for step in in_words if step.rank not in ranks]
    if not steps and values:
        steps = _steps_without_name(line)
    certain = bool(steps) or any(is_result(value.key) for value in values)
    if not certain and values:
        certain = any(name in wanted for name in _names(values)) if wanted else False
    if not certain and values:
        if any(is_setting(value.key) or _is_size(value) for value in values):
            return Printed([], [])
        certain = any(value.split or value.named for value in values)
    split = next((value.split for value in reversed(values) if value.split), None)
    if split and kind_of_split(split) != "train" and (part := _PART.search(line)):
        # Training continues at its step, and the values up to a batch are not yet those of the split.
        steps = [step for step in steps if step.rank != BATCH]
        if int(part[1] or part[3]) < int(part[2] or part[4]):
            values = []
        values = [_with_average(line, value) for value in values]
    return Printed(
        [(name, value.value) for name, value in zip(_names(values), values, strict=True)], steps, certain, split
    )


def _detection_name(match: re.Match[str]) -> str:
    """Return the usual short name of a line of COCO's summary: `AP`, `AP50`, `AP_small`, `AR_10`."""
    iou = "" if ":" in match["iou"] else f"{float(match['iou']) * 100:.0f}"
    area = "" if match["area"] == "all" else f"_{match['area']}"
    most = f"_{match['most']}" if match["name"] == "AR" and not area else ""
    return f"{match['name']}{iou}{area}{most}"


def _name_first(match: re.Match[str]) -> str:
    """Return a percentage with its name before it; unchanged if it is not the name of a result."""
    key = match["key"].replace(" ", "_")
    is_named = is_result(key) and not key.lower().endswith("mfu")  # how busy the device is
    return f"{match['before']}{key}: {match['value']}%" if is_named else match[0]


def _is_size(value: _Value) -> bool:
    """Return whether a value is the size of a split: `train: 45000`."""
    return value.value.is_integer() and kind_of_split(value.key) is not None


def _without_settings(line: str) -> str:
    """Return a line without printed settings: `{"config": {"lr": 0.1}, "loss": 2}` is `{"", "loss": 2}`."""
    for _ in range(_MAX_SETTINGS):
        match = _SETTINGS.search(line)
        if match is None:
            break
        end = _end_of_brackets(line, match.end() - 1)
        line = line[: match.start()] + (line[end:] if end else "")
    return line


def _end_of_brackets(line: str, start: int) -> int:
    """Return the end of the brackets that open at `start`, or directly after it; 0 if they do not end in the line."""
    depth = 0
    for match in _BRACKETS.finditer(line, start):
        if not depth and line[start : match.start()].strip(" :='\""):
            return 0
        depth += 1 if match[0] in "([{" else -1
        if depth <= 0:
            return match.end() if depth == 0 else 0
    return 0


def _with_average(line: str, value: _Value) -> _Value:
    """Return a value with the average that is printed behind it: `Loss: 6.881 (6.902)`."""
    average = _AVERAGE.match(line, value.end)
    return value._replace(value=scaled(average[1], None)) if average else value


def _steps_in_words(line: str) -> list[Step]:
    """Return the steps that are printed as words and a number, with or without a sign: `Epoch 3/10`, `step: 5`."""
    steps = []
    for match in _STEP_IN_WORDS.finditer(line):
        key = match["key"].lower().replace(" ", "_")
        rank = RANK.get(key, EPOCH)
        of = float(match["of"]) if match["of"] else None
        steps.append(Step(rank, "", scaled(match["value"], match["unit"]), of))
        if rank == EPOCH and (
            batch := _BATCH_NEXT.match(line, match.end()) or _BATCH_LATER.search(line, match.end(), match.end() + 200)
        ):
            steps.append(Step(BATCH, "", float(batch[1]), float(batch[2])))
    return steps


def _steps_without_name(line: str) -> list[Step]:
    """Return the step of a line that names none: a number before the values, or the position of a progress bar."""
    if leading := _LEADING.search(line):
        if leading["batch"]:
            epoch, batch = Step(EPOCH, "", float(leading["index"])), Step(BATCH, "", float(leading["batch"]))
            return [epoch, batch._replace(of=float(leading["of"]))]
        return [Step(INDEX, "", float(leading["index"] or leading["number"]))]
    bar = _PROGRESS_BAR.search(line)
    return [Step(INDEX, "", float(bar[1]))] if bar else []


def read_heading(line: str) -> str | None:
    """Return the split word of a line that is the heading of those below it: `Test Error:`, `=== Validation ===`."""
    if len(line) > _MAX_HEADING or not (_HEADING.match(line) or is_bare_heading(line)):
        return None
    words = [*_SPLIT_WORD.finditer(line)]
    return _clean_word(words[-1]) if words else None


def is_ruled_heading(line: str) -> bool:
    """Return whether a line is a heading between rules that only names a split: `--- train ---`, `== Test set ==`."""
    text = line.strip()
    return text[:2].strip("=*#-") == text[-2:].strip("=*#-") == "" and is_bare_heading(text.strip("=*#- "))


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


def _read_pairs(
    line: str, wanted: Collection[str], *, bare: bool
) -> tuple[list[_Value], list[Step], list[tuple[int, int, int]]]:
    """Return the values of a line, its steps, and the spans of both: start and end of the key, and the end."""
    values: list[_Value] = []
    steps: list[Step] = []
    spans = []
    previous = 0
    calls = _setting_calls(line) if "(" in line and "=" in line else []
    notice: bool | None = None
    for match in _PAIR.finditer(line):
        key, unit, sign = match["key"], match["unit"], match["sign"]
        (start, key_end), end = match.span("key"), match.end()
        if not sign:
            if not bare or not _is_bare_pair(line, match):
                continue
            notice = _NOTICE.search(line) is not None if notice is None else notice
            if notice:
                continue
        before, previous = line[previous:start], end
        if line[start - 1 : start] in (":", "(", " ") and not has_metric_word(key) and _LOCATION.match(line, start - 1):
            continue
        if key not in wanted and (
            (is_never_metric(key) and not _is_measured(line, key, start, key_end))
            or (len(key) > 1 and key.lower() in _PROSE)
            or _FILE_OR_ERROR.search(key)
            or _MEMORY.match(line, match.end("value"))
        ):
            continue
        if calls and any(begin <= start < stop for begin, stop in calls):
            continue
        rank = RANK.get(key.lower())
        total = float(match["total"]) if match["of"] else None
        if rank is not None:
            bar = _PROGRESS_BAR.search(line, end - 1) if unit == "%" else None
            if bar is not None:  # `Steps:  10%|#         | 50/500 [00:31<04:10]`
                steps.append(Step(rank, "", float(bar[1])))
            elif (sign or rank < EPOCH) and not match["note"] and unit != "%":
                steps.append(Step(rank, key, scaled(match["value"], unit), total))
        elif _is_position(line, match):
            continue
        else:
            value = scaled(match["value"], unit)
            note = match["note"]
            if note and kind_of_split(note.split()[0]) and note.split()[-1] in _SETS:
                note = note.split()[0]  # (test set)
            bracketed = note if note and kind_of_split(note) else None
            key = _full_key(line, key, before, start)
            if note and not bracketed and note not in _TIME_UNITS and sign:
                key = f"{key}_{note.replace(' ', '_')}"
            values.append(_Value(key, value / total if total else value, start, key_end, end, before, bracketed))
        spans.append((start, key_end, end))
    return values, steps, spans


def _is_measured(line: str, key: str, start: int, key_end: int) -> bool:
    """Return whether a word that is not a metric by itself is part of one: `squared error`, `accuracy on test data`."""
    if key.lower() == "error":
        word = line[max(0, start - 32) : start].split(" ")
        return len(word) > 1 and not word[-1] and (word[-2].lower() in _ERRORS or kind_of_split(word[-2]) is not None)
    return key.lower() in _SETS and _find_metric_on_split(line, 0, key_end) is not None


def _is_position(line: str, match: re.Match[str]) -> bool:
    """Return whether a number is a position and not a value: `Train: 3/10`, `Train: 45%|####`, `Train: 0 [10/1251]`."""
    key, end = match["key"], match.end()
    if match["of"]:
        return not (int(match["total"]) and has_metric_word(key))
    if match["unit"] == "%" and line.startswith("|", end):
        return True
    return key.lower() in KIND_OF and line[end : end + 2].strip().startswith("[")


def _is_bare_pair(line: str, match: re.Match[str]) -> bool:
    """Return whether a name and a number without a sign between them are a metric: `loss 0.3`, `| tokens 300 |`."""
    key, start, end = match["key"], match.start(), match.end()
    before = line[max(0, start - 2) : start]
    separated = not before.strip() or before[-1] == "\t" or before.rstrip()[-1] in "|,;:/]["
    alone = _AFTER_BARE.match(line, end) is not None and separated
    if alone and not before.strip():  # two spaces, a tab, or the beginning of the line
        alone = "\t" in before or len(before) == 2 or not line[:start].strip()
    decimal = match["unit"] is not None or not match["value"].isdigit()
    if decimal and kind_of_split(key) is not None and "." in match["value"] and has_step(line):
        return True  # `epoch 3 train 0.31 val 0.44`
    if not (alone or (decimal and has_metric_word(key))):
        return False
    word = line[max(0, start - 32) : start].split()[-1:]
    return not word or word[0].lower() not in _PROSE


def _full_key(line: str, key: str, before: str, start: int) -> str:
    """Return a key with the words before it that belong to it: `Value_function_loss`, `learning_rate`."""
    if key.lower() in _SETS or kind_of_split(key) is not None or before[-1:] != " " or not before[-2:-1].isalnum():
        return key
    lead = _LEAD.search(line, max(0, start - _LEAD_LENGTH, start - len(before) - 1), start)
    if lead is None:
        return key
    words = lead["words"].split()
    if any(word.lower() in _PROSE for word in words):
        return key
    kept = [
        word
        for word in words
        if word.lower() not in _PLAIN_WORDS
        and word.lower() not in ("best", "lowest", "highest")
        and not has_split(word)
        and not is_never_metric(word)
        and not word.endswith("'s")
    ]
    return "_".join((*kept, key))


def _setting_calls(line: str) -> list[tuple[int, int]]:
    """Return the spans of calls whose arguments are settings: `Dropout(p=0.5)`, but not `Eval(loss=0.5)`."""
    return [
        match.span("arguments")
        for match in _CALL.finditer(line)
        if not has_split(match["name"]) and not any(map(is_result, re.findall(r"(\w+)=", match["arguments"])))
    ]


def _assign_splits(
    line: str, values: list[_Value], words: list[re.Match[str]], spans: list[tuple[int, int, int]], heading: str | None
) -> list[_Value]:
    """Find the split of each value."""
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
        if effective is None and own is None and counted is not None and has_metric_word(key):
            effective = counted
        assigned.append(
            value._replace(key=key, split=effective, named=own is not None, nearest=nearest, adjacent=adjacent)
        )
        nearest = own or nearest
    return _qualify(assigned, behind)


def _read_metric_on_split(line: str, value: _Value, own: str | None) -> tuple[str, str] | None:
    """Return the metric and the split if they precede the number in this order; else None."""
    if value.key != own and value.key.lower() not in _SETS:
        return None
    return _find_metric_on_split(line, value.start - len(value.before), value.key_end)


def _find_metric_on_split(line: str, start: int, end: int) -> tuple[str, str] | None:
    on = _METRIC_ON_SPLIT.search(line, start, end)
    if on is None:
        return None
    metric = on["short"] if on["short"] and has_metric_word(on["short"]) else on["metric"]
    return (metric, on["split"]) if has_metric_word(metric) else None


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


def _names(values: Sequence[_Value]) -> list[str]:
    """Return the names of a line's values: their keys, prefixed by their split words.

    If two names are then equal although different words precede them, they also contain the word before the key, or a
    number.
    """
    names = [f"{value.split}_{value.key}" if value.split else value.key for value in values]
    names = [
        f"best_{name}" if "est" in value.before.lower() and _BEST.search(value.before) else name
        for name, value in zip(names, values, strict=True)
    ]
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
    if word and (is_never_metric(word) or word.split("_")[0].lower() in RANK or has_split(word)):
        word = None
    return value.split or (None if value.named else value.nearest), word, value.adjacent
