"""One question of a dataset."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["number", "math", "choice", "yes_no", "exact", "form"]
"""How answers are extracted and compared; see grading.py."""
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Example:
    """One question."""

    id: str
    """Unique in its split; `test-12` is row 12 of the split `test`, counted from 0."""
    question: str
    gold: str
    """The correct answer: a number, LaTeX, a letter, yes/no, or a text."""
    kind: Kind
    choices: tuple[str, ...] = ()
    """For `choice`: the options A, B, C …"""
    solution: str | None = None
    """Reference solution in segments, ending with the answer, if the dataset has one."""
    family: str = ""
    """Questions that vary one story have the same family, and stay in one split."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the question, ignoring case, spacing and trailing punctuation."""
        words = " ".join(self.question.casefold().split()).rstrip(" .:?!")
        return hashlib.sha256(words.encode()).hexdigest()[:16]
