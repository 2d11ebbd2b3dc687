"""Extract the answer from a text and compare it with the correct one.

The forms that the prompts ask for come first: `#### answer`, then \\boxed{answer}, then "the answer is …". The fallback
is the last number, single letter, yes or no, or line. Numbers are compared exactly, as fractions: 1,000 = 1000.0 =
$1000, and 50% = 50. Mathematics is compared as text, then by math-verify; other texts ignoring case, spacing and a
final period.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from looplab.errors import LabError

from .example import LETTERS

if TYPE_CHECKING:
    from .example import Example, Kind

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus directly after a word or a bracket is a difference or a hyphen, not a sign.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.])-)?(?:\$\s?-?)?(?:{_DIGITS})(?:\s?/\s?\d+(?![\d.,]*\d))?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_MARKED = re.compile(r"####\s*([^\s#][^\n#]*)")
_HEADING = re.compile(r"\W*(?:step|part|case|problem|solution)\b", re.IGNORECASE)  # "#### Step 3" is Markdown
_ANSWER_IS = re.compile(r"\banswer\s*(?:is\b|:|=)\s*:?\s*([^\n]+)", re.IGNORECASE)
_WORD_OF = {"yes": "yes", "true": "yes", "no": "no", "false": "no"}
_LONGEST = 200
"""Maximum length of a number or formula, in characters; longer ones are degenerate output."""
_SECONDS = 10.0
"""Maximum processor time of a comparison of two formulas, in seconds."""


def grade(text: str, example: Example) -> tuple[str | None, bool]:
    """Return the answer in the text, and whether it is correct."""
    answer = extract(text, example.kind, example.choices)
    return answer, answer is not None and same(answer, example.gold, example.kind)


def extract(text: str, kind: Kind, choices: Sequence[str] = ()) -> str | None:
    """Return the answer in the text: a plain number, a letter, LaTeX, yes/no, or a text."""
    if kind == "number":
        return _number_in(text)
    if kind == "choice":
        return _choice_in(text, choices)
    if kind == "yes_no":
        return _yes_or_no_in(text)
    if kind == "exact":
        return _text_in(text)
    if kind == "form":
        return form_of(text)
    return _formula_in(text)


def same(answer: str, gold: str, kind: Kind) -> bool:
    """Return whether two answers are equivalent."""
    if kind == "number":
        value = number(answer)
        return value is not None and value == number(gold)
    if kind == "math":
        one, other = _plain(answer), _plain(gold)
        words = other.isalpha() and len(other) > 1  # Evelyn is evelyn, but the variable P is not p
        return one == other or (words and one.casefold() == other.casefold()) or _equal_formulas(gold, answer)
    one, other = (" ".join(text.casefold().split()).rstrip(".!") for text in (answer, gold))
    return one == other


def form_of(text: str) -> str:
    """Return the form of an answer: `marked` (it has a line `#### n`), `one line` (with a number), or `other`."""
    if re.search(r"^#### *=? *\$?\d", text, re.MULTILINE):
        return "marked"
    return "one line" if re.fullmatch(r".*\d.*", text.strip()) and text.strip()[-1] in ".!?" else "other"


def number(text: str) -> Fraction | None:
    """Parse a number, with or without commas, $ and %; None for other texts."""
    bare = re.sub(r"[$,\s]|\\[$%,!]", "", text.replace("−", "-")).removesuffix("%").rstrip(".")
    if len(bare) > _LONGEST or not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?", bare):
        return None
    above, _, below = bare.partition("/")
    return Fraction(above) / int(below or 1) if int(below or 1) else None


def written(value: Fraction) -> str:
    """Format as 5, 0.75 or 1/3, whichever is exact."""
    rest, powers = value.denominator, {2: 0, 5: 0}
    for prime in powers:
        while rest % prime == 0:
            rest, powers[prime] = rest // prime, powers[prime] + 1
    if rest != 1:
        return str(value)
    places = max(powers.values())
    scaled = value * 10**places
    if not places:
        return str(scaled.numerator)
    digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{…} with balanced braces; None if there is none."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for sign in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(sign.group(), 0)  # \{ is a sign, not a group
            if not depth:
                return text[start : start + sign.start()].strip()
    return None


def _claims(text: str) -> Iterator[str]:
    """Yield what the text marks as its answer, the most reliable form first."""
    marked = [line for line in _MARKED.findall(text) if not _HEADING.match(line)]
    if marked:
        yield marked[-1]
    inside = boxed(text)
    if inside:
        yield inside
    stated = _ANSWER_IS.findall(text)
    if stated:
        yield stated[-1]


def numbers(text: str) -> list[Fraction]:
    """Return all numbers in a text."""
    text = _FRACTION.sub(r"\1/\2", text.replace("−", "-").replace("\\$", "$").replace("{,}", ",").replace("\\!", ""))
    found = (number(match.group()) for match in _NUMBER.finditer(text))
    return [value for value in found if value is not None]


def _number_in(text: str) -> str | None:
    for claim in _claims(text):
        values = numbers(claim.rsplit("=", 1)[-1]) or numbers(claim)  # "48 / 2 = 24" and "24 apples" mean 24
        if values:
            return written(values[0])
    values = numbers(text)
    return written(values[-1]) if values else None


def _choice_in(text: str, choices: Sequence[str]) -> str | None:
    letters = LETTERS[: len(choices) or 8]
    text = re.sub(r"\*\*|__", "", text)  # emphasis in Markdown
    for claim in _claims(text):
        claim = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^}]*)\}", r"\1", claim).strip(" *_$\"'")
        named = _named(claim, letters, choices)
        leading = named or _first(rf"\(?([{letters}{letters.lower()}])(?:[).:,*]|\s*$)", claim)
        leading = leading or _first(rf"\(?(?:option |choice )?([{letters}])\b", claim)
        if leading:
            return leading.upper()
        rank = _first(r"\(?([1-9])\)?\.?$", claim)
        if rank and int(rank) <= len(letters):
            return letters[int(rank) - 1]
    whole = _named(text.strip(), letters, choices) or _first(rf"\(?([{letters}])\b[).:]?\s*$", text.strip())
    if whole:
        return whole
    judged = re.findall(rf"\b([{letters}])\b\)?\s+(?:is|must be)\s+(?:the\s+)?(?:correct|right|best)\b", text)
    judged = judged or re.findall(rf"\b(?i:option|choice)\s*(?:is\b|:)?\s*\(?([{letters}])\b", text)
    if judged:
        return str(judged[-1])
    marked = re.findall(rf"\(([{letters}])\)|(?:^|\n)\s*([{letters}])[).:]?\s*(?=\n|$)", text)
    if marked:
        return "".join(marked[-1])
    last = text.strip().rsplit("\n", 1)[-1]
    held = [letter for letter, choice in zip(letters, choices, strict=False) if _holds(last, choice)]
    return held[0] if len(held) == 1 else None


def _holds(text: str, words: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(words.rstrip('.'))}(?!\w)", text, re.IGNORECASE))


def _first(pattern: str, text: str) -> str | None:
    found = re.match(pattern, text)
    return str(found.group(1)) if found else None


def _named(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Return the choice with this text; ignoring case only if that is unambiguous. A single letter is not a text."""
    if text.rstrip(".") in tuple(letters):
        return None
    for read in (_plain, lambda formula: _plain(formula).casefold()):
        fits = [letter for letter, choice in zip(letters, choices, strict=False) if read(choice) == read(text)]
        if len(fits) == 1:
            return fits[0]
    return None


def _yes_or_no_in(text: str) -> str | None:
    for claim in _claims(text):
        first = re.search(r"\b(yes|no|true|false)\b", claim, re.IGNORECASE)
        if first:
            return _WORD_OF[first.group().lower()]
    words = re.findall(r"\b(yes|no|true|false)\b", text, re.IGNORECASE)
    return _WORD_OF[words[-1].lower()] if words else None


def _text_in(text: str) -> str | None:
    """Return the marked answer, otherwise the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    claim = next(_claims(text), lines[-1] if lines else None)
    return None if claim is None else claim.strip(" *_`\"'")


def _formula_in(text: str) -> str | None:
    claim = boxed(text)
    if claim:
        return claim
    claim = next(_claims(text), None)
    if claim:
        formula = re.search(r"\$([^$]+)\$", claim)
        return (formula.group(1) if formula else claim).strip().rstrip(".")
    formulas = re.findall(r"\$([^$]+)\$", text)
    if formulas:
        return str(formulas[-1]).strip()
    values = numbers(text)
    return written(values[-1]) if values else None


def _plain(formula: str) -> str:
    """Remove formatting from a formula."""
    text = re.sub(r"\\(?:left|right|[,!;: ]|displaystyle|quad)(?![a-zA-Z])", "", formula)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\^\{?\\circ\}?|\\%|\\\$|[$%]", "", text)
    return re.sub(r"\s+", "", text).rstrip(".")


@lru_cache(maxsize=4096)
def _equal_formulas(gold: str, answer: str) -> bool:
    """Compare with math-verify; False if it cannot parse one of the two."""
    if max(len(gold), len(answer)) > _LONGEST or _explodes(answer):
        return False
    try:
        from math_verify import parse, verify
    except ImportError:
        raise LabError("math-verify is not installed", hint="pip install math-verify") from None

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off
    try:
        with _limit_processor_time(_SECONDS):
            right, given = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
            return bool(right and given and verify(right, given, timeout_seconds=None))
    except _OutOfTime:
        return False


class _OutOfTime(BaseException):
    """Not an Exception: sympy and math-verify catch those."""


@contextmanager
def _limit_processor_time(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime after this much processor time. By the clock, a busy machine would grade differently.

    Signals reach the main thread only: in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _explodes(formula: str) -> bool:
    """Return whether a formula has nested powers, huge exponents or factorials, which would take forever to expand."""
    return bool(re.search(r"\^\s*\{?\s*\d+\s*\^|\^\s*\{?\s*\d{4,}|\d{4,}\s*\)?\s*!|!\s*!", formula))
