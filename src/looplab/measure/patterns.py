"""The user's regular expressions, matched so that none can block the engine.

Python's `re` backtracks, and a match cannot be interrupted: `(a+)+$` needs years for a line of 100 letters. A pattern
that provably takes linear time is matched in this process. Any other is matched by a helper process with a CPU time
limit that the kernel enforces; a pattern that exceeds it is no longer used for that file.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from looplab.errors import LabError
from looplab.measure import pattern_helper

LIMIT_S = 1.0
"""CPU time for one pattern and `LINES` lines, in seconds."""
WALL_S = 20.0
"""The same in wall-clock time, for an overloaded machine."""
LINES = 64
"""Lines per request to the helper."""

Groups = dict[str, str | None]
"""The named groups of one match."""


class Patterns:
    """The patterns of one file, without those that took too long."""

    __slots__ = ("_compiled", "_linear", "problem")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [_compile(pattern) for pattern in patterns]
        self._linear = [is_linear(pattern) for pattern in patterns]
        self.problem: str | None = None
        """Why a pattern is no longer used; None if all are."""

    def find(self, lines: Sequence[str]) -> list[list[Groups] | None]:
        """Return the matches of all patterns in each line; None for a line in which none matches."""
        by_line: list[list[Groups] | None] = [None] * len(lines)
        for pattern, linear in list(zip(self._compiled, self._linear, strict=True)):
            size = max(1, len(lines)) if linear else LINES
            for start in range(0, len(lines), size):
                part = lines[start : start + size]
                try:
                    matches = _match_here(pattern, part) if linear else _match_in_helper(pattern, part)
                except TimeoutError:
                    self._give_up(pattern)
                    break
                for i, one in enumerate(matches, start):
                    if one:
                        by_line[i] = (by_line[i] or []) + one
        return by_line

    def _give_up(self, pattern: re.Pattern[str]) -> None:
        i = self._compiled.index(pattern)
        del self._compiled[i], self._linear[i]
        self.problem = (
            f"the pattern {pattern.pattern!r} of measure.stdout takes more than {LIMIT_S:g} s for {LINES} lines and "
            "is no longer used: avoid nested and adjacent repeats"
        )


def _match_here(pattern: re.Pattern[str], lines: Sequence[str]) -> list[list[Groups]]:
    return [[match.groupdict() for match in pattern.finditer(line)] for line in lines]


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise LabError(
            f"the pattern {pattern!r} for printed metrics is not a regular expression: {error}",
            hint="see measure.stdout in the lab file",
        ) from error
    if not compiled.groupindex:
        raise LabError(
            f"the pattern {pattern!r} for printed metrics names no metric",
            hint=r"use named groups, for example 'step (?P<step>\d+) loss (?P<loss>\S+)'",
        )
    return compiled


# -- the helper process


class _Helper:
    """A process that matches patterns; it is killed when this object is deleted."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", pattern_helper.__file__, str(LIMIT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # keeps Ctrl-C away from it
        )
        self.end = weakref.finalize(self, _end, self.process)

    def ask(self, question: bytes) -> bytes:
        """Return the answer, one line; an incomplete line if the process exits.

        Raises:
            TimeoutError: No answer within `WALL_S`.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + WALL_S
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            rest = memoryview(question)
            while rest:
                rest = rest[self.process.stdin.write(rest) :]
            while not answer.endswith(b"\n"):
                ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                part = self.process.stdout.read(1 << 20)
                if not part:
                    break
                answer += part
        return answer


_helpers = threading.local()


def _match_in_helper(pattern: re.Pattern[str], lines: Sequence[str]) -> list[list[Groups]]:
    """Match in the helper of this thread, started on demand.

    Raises:
        TimeoutError: It took too long.
    """
    question = json.dumps([pattern.pattern, list(lines)]).encode() + b"\n"
    for _ in range(2):
        helper: _Helper | None = getattr(_helpers, "one", None)
        if helper is None:
            helper = _helpers.one = _Helper()
        try:
            answer = helper.ask(question)
        except TimeoutError:
            _helpers.one = None
            helper.end()
            raise
        if answer.endswith(b"\n"):
            matches: list[list[Groups]] = json.loads(answer)
            return matches
        _helpers.one = None
        if helper.end() == -signal.SIGVTALRM:
            break
    raise TimeoutError  # or killed twice, possibly because of the pattern


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.wait()


# -- linear patterns

_LAST = 0x17F
_BEYOND = {r"\d": "digit", r"\s": "space", r"\w": "word", "": "other"}
"""Symbols for the characters after `_LAST`, which are distinguished only by their kind."""
_ALPHABET = frozenset(map(chr, range(_LAST + 1))) | frozenset(_BEYOND.values())
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_CHARACTERS = (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY)


def is_linear(pattern: str) -> bool:
    """Return whether searching for a pattern provably takes linear time; False if it is not known.

    True for a sequence of characters and repeated characters, such as `step (?P<step>\\d+) loss (?P<loss>\\S+)`, if
    nothing that follows a repeat can match the repeated characters, so that there is one way to match, and no repeat
    (except at the end, where nothing can fail) can match the first character, so that attempts do not overlap. A
    pattern that begins with `^` is attempted once.
    """
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    if tree.state.flags & ~(re.UNICODE | re.ASCII | re.DOTALL | re.VERBOSE):
        return False
    items = list(tree)
    anchored = bool(items) and items[0] in ((codes.AT, codes.AT_BEGINNING), (codes.AT, codes.AT_BEGINNING_STRING))
    parts = _flatten(items[1:] if anchored else items)
    return parts is not None and len(parts) > 0 and _is_unambiguous(parts, anchored=anchored)


def _flatten(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a sequence with its groups expanded; None if it has parts of other types."""
    parts: list[tuple[Any, Any]] = []
    for code, argument in tree:
        if code is codes.SUBPATTERN and not argument[1] and not argument[2]:
            inner = _flatten(argument[3])
            if inner is None:
                return None
            parts += inner
        elif (
            code in _CHARACTERS
            or (code is codes.AT and argument in (codes.AT_END, codes.AT_END_STRING))
            or (code in _REPEATS and len(argument[2]) == 1 and argument[2][0][0] in _CHARACTERS)
        ):
            parts.append((code, argument))
        else:
            return None
    return parts


def _is_unambiguous(parts: list[tuple[Any, Any]], *, anchored: bool) -> bool:
    first = frozenset() if anchored else _matched(parts[0])
    if not anchored and parts[0][0] is not codes.LITERAL:
        return False
    for i, part in enumerate(parts):
        if part[0] not in _REPEATS:
            continue
        repeated = _matched(part)
        if i + 1 < len(parts) and repeated & first:
            return False
        for after in parts[i + 1 :]:
            if repeated & _matched(after):
                return False
            if after[0] not in _REPEATS or after[1][0] > 0:
                break
    return True


def _matched(part: tuple[Any, Any]) -> frozenset[str]:
    """Return the symbols of the alphabet that a part matches."""
    code, argument = part
    if code is codes.AT:
        return frozenset()
    if code in _REPEATS:
        return _matched(argument[2][0])
    if code is codes.ANY:
        return _ALPHABET
    if code is codes.LITERAL:
        return frozenset({_symbol(argument)})
    if code is codes.NOT_LITERAL:
        return _ALPHABET - {chr(argument)}
    return _matched_by_set(argument)


def _symbol(number: int) -> str:
    """Return the character itself, or its kind if it is not in the alphabet."""
    char = chr(number)
    return char if number <= _LAST else next(kind for name, kind in _BEYOND.items() if re.match(name, char))


def _in_category(name: str, symbol: str) -> bool:
    if len(symbol) > 1:
        return symbol == _BEYOND[name] or (name == r"\w" and symbol == "digit")
    return re.match(name, symbol) is not None


def _matched_by_set(items: Any) -> frozenset[str]:
    negated = any(code is codes.NEGATE for code, _ in items)
    matched: set[str] = set()
    for code, argument in items:
        if code is codes.LITERAL:
            # A set that excludes one character of a kind still matches the others.
            matched |= {_symbol(argument)} - (set(_BEYOND.values()) if negated else set())
        elif code is codes.RANGE:
            matched |= set(map(chr, range(argument[0], min(argument[1], _LAST) + 1)))
            matched |= set(_BEYOND.values()) if argument[1] > _LAST and not negated else set()
        elif code is not codes.NEGATE:  # a category
            name = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[str(argument).rpartition("_")[2]]
            inside = {symbol for symbol in _ALPHABET if _in_category(name, symbol)}
            matched |= _ALPHABET - inside if "_NOT_" in str(argument) else inside
    return frozenset(_ALPHABET - matched if negated else matched)
