"""Generated word problems: a task that steering can fix, one that it cannot, and plain additions.

`steerable`: the training texts of the tiny model have two authors. The careful one writes every step; the hasty one
omits the last operation, so that the answer is wrong. The question does not reveal the author, but each item has its
own fraction of careful texts, and each author prefers certain words at the start of a segment. A model of these texts
imitates the hasty author on half of the items, and its hidden state at a segment boundary reveals which author it is.

`opposed`: questions as in `steerable`, but for books, pens and eggs the hasty answer, without the last operation, is
the correct one. Half of the questions that the model gets wrong need the opposite direction of the other half, so that
no single vector can fix them all.

`slips`: larger numbers and one author, who occasionally miscalculates at random. No latent cause, so no direction.

`addition1`, `addition2`: one and two additions in everyday words, for a real language model.

`habits`: the same additions with one of two requests for the form of the answer, which a small language model often
fails in opposite ways: asked for one line, it continues after the answer; asked for a final line `#### n`, it stops
before it. Only the form counts, not the sum.

The hash of a question determines its split: `corpus` (training data of the tiny model), `train`, `dev` and `test` never
share a question, for any seed and any size.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from looplab.errors import LabError

from ..data import Example

KINDS = ("steerable", "opposed", "slips", "addition1", "addition2", "habits")
SPLITS = {"corpus": range(0, 70), "train": range(70, 80), "dev": range(80, 90), "test": range(90, 100)}
BORDER = "\n\n"

_NAMES = ("Ann", "Ben", "Eva", "Kim", "Leo", "Max", "Sue", "Tom")
# Fraction of careful texts per item; away from one half, so that the more frequent author is clear.
_CAREFUL = {"apples": 0.85, "books": 0.75, "pens": 0.65, "cards": 0.35, "coins": 0.25, "eggs": 0.15}
_HASTY_IS_CORRECT = ("books", "pens", "eggs")  # of `opposed`
_SLIP_ITEMS = ("bolts", "nails", "screws", "tiles")
_CAREFUL_WORDS, _HASTY_WORDS = ("First", "Next", "Then", "Last"), ("Easy", "So", "OK", "Well")
_OWN_WORD = 0.85  # probability that a segment starts with one of the author's own words
_SLIP = 0.25  # probability of an error per operation of `slips`
_REQUESTS = {
    "one line": "Reply with one line.",
    "marked": "Answer in one short sentence. Then write a line with #### and the number.",
}  # of `habits`, by the form (grading.py) that they ask for
_OPERATIONS = {"+": "gets {n} more", "-": "loses {n}"}


@dataclass(frozen=True)
class WordProblem:
    """A quantity that changes step by step."""

    name: str
    item: str
    start: int
    steps: tuple[tuple[str, int], ...]
    """Operation sign and number, in order."""
    form: str = ""
    """`habits`: the requested form."""

    @property
    def values(self) -> tuple[int, ...]:
        """The initial value and the value after each step."""
        values = [self.start]
        for sign, number in self.steps:
            values.append(values[-1] + number if sign == "+" else values[-1] - number)
        return tuple(values)

    @property
    def question(self) -> str:
        changes = " ".join(f"{self.name} {_OPERATIONS[sign].format(n=number)}." for sign, number in self.steps)
        return f"{self.name} has {self.start} {self.item}. {changes} How many {self.item} now?"


@dataclass(frozen=True)
class Text:
    """One text of the training corpus."""

    question: str
    solution: str
    right: bool
    """Whether its answer is correct."""


def prompt(question: str) -> str:
    """Return the prompt for the tiny model."""
    return question + BORDER


def split_of(question: str) -> str:
    """Return the split of a question."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def examples(kind: str, split: str, n: int, seed: int = 0) -> list[Example]:
    """Return `n` different questions; a smaller `n` returns a prefix."""
    _check_choice("kind", kind, KINDS)
    _check_choice("split", split, tuple(SPLITS))
    made: dict[str, Example] = {}
    for tries, problem in enumerate(_problems(kind, split, seed)):
        if len(made) >= n:
            break
        if tries > 1000 + 100 * n:
            raise LabError(f"only {len(made)} of {n} questions found for {kind}/{split}", hint="request fewer")
        question = _question(kind, problem)
        if question not in made:
            made[question] = _example(kind, problem, f"{kind}-{split}-{seed}-{len(made)}")
    return list(made.values())


def group_of(example: Example) -> str:
    """Return what a question is about, for tables by group: its item, or the form that it asks for."""
    if example.kind == "form":
        return example.gold
    return next((item for item in (*_CAREFUL, *_SLIP_ITEMS) if item in example.question.split()[3]), "")


def texts(kind: str, seed: int) -> Iterator[Text]:
    """Yield training texts endlessly, correct and incorrect, for questions of the corpus split."""
    _check_choice("kind", kind, ("steerable", "slips"))
    rng = random.Random(f"texts/{kind}/{seed}")  # noqa: S311 - questions, no secrets
    for problem in _problems(kind, "corpus", seed):
        if kind == "steerable":
            careful = rng.random() < _CAREFUL[problem.item]
            yield Text(problem.question, _write_solution(problem, careful, rng), careful)
        else:
            solution, answer = _write_with_slips(problem, rng)
            yield Text(problem.question, solution, answer == problem.values[-1])


def _problems(kind: str, split: str, seed: int) -> Iterator[WordProblem]:
    rng = random.Random(f"problems/{kind}/{split}/{seed}")  # noqa: S311 - questions, no secrets
    while True:
        problem = _sample_problem(kind, rng)
        if min(problem.values) >= 1 and max(problem.values) <= 99 and split_of(_question(kind, problem)) == split:
            yield problem


def _sample_problem(kind: str, rng: random.Random) -> WordProblem:
    name = rng.choice(_NAMES)
    if kind in ("steerable", "opposed"):
        item, start, steps = rng.choice(list(_CAREFUL)), rng.randint(3, 15), rng.choice((2, 3))
        return WordProblem(name, item, start, tuple((rng.choice("+-"), rng.randint(1, 6)) for _ in range(steps)))
    if kind == "slips":
        item, start = rng.choice(_SLIP_ITEMS), rng.randint(11, 50)
        return WordProblem(name, item, start, tuple((rng.choice("+-"), rng.randint(5, 22)) for _ in range(2)))
    count, least, most = (2, 11, 49) if kind in ("addition1", "habits") else (3, 3, 15)
    numbers = [rng.randint(least, most) for _ in range(count)]
    item = rng.choice(list(_CAREFUL))
    form = rng.choice(list(_REQUESTS)) if kind == "habits" else ""
    return WordProblem(name, item, numbers[0], tuple(("+", number) for number in numbers[1:]), form)


def _question(kind: str, problem: WordProblem) -> str:
    """Return the question: in the tiny language for the tiny model, in everyday words for a real one."""
    if kind not in ("addition1", "addition2", "habits"):
        return problem.question
    first, *later = [number for _, number in problem.steps]
    more = "".join(f" Then {problem.name} finds {number} more {problem.item}." for number in later)
    return (
        f"{problem.name} has {problem.start} {problem.item}. {problem.name} buys {first} more {problem.item}.{more} "
        f"How many {problem.item} does {problem.name} have now? "
        f"{_REQUESTS.get(problem.form, 'Write the addition, then the answer.')}"
    )


def _example(kind: str, problem: WordProblem, name: str) -> Example:
    hasty = kind == "opposed" and problem.item in _HASTY_IS_CORRECT
    words = _HASTY_WORDS if hasty else _CAREFUL_WORDS if kind in ("steerable", "opposed") else ("First", "So", "Then")
    values = problem.values[:-1] if hasty else problem.values
    return Example(
        id=name,
        question=_question(kind, problem),
        gold=problem.form or str(values[-1]),
        kind="form" if problem.form else "number",
        choices=(),
        solution=None if problem.form else _segments(problem, words, values),
    )


def _write_solution(problem: WordProblem, careful: bool, rng: random.Random) -> str:
    own, other = (_CAREFUL_WORDS, _HASTY_WORDS) if careful else (_HASTY_WORDS, _CAREFUL_WORDS)
    words = [(own if rng.random() < _OWN_WORD else other)[i] for i in range(len(own))]
    values = problem.values if careful else problem.values[:-1]
    return _segments(problem, words, values)


def _write_with_slips(problem: WordProblem, rng: random.Random) -> tuple[str, int]:
    values = [problem.start]
    for sign, number in problem.steps:
        value = values[-1] + number if sign == "+" else values[-1] - number
        if rng.random() < _SLIP:
            value += rng.choice((-10, -2, -1, 1, 2, 10))
        values.append(min(99, max(0, value)))
    words = [rng.choice(pair) for pair in zip(_CAREFUL_WORDS, _HASTY_WORDS, strict=True)]
    return _segments(problem, words, values), values[-1]


def _segments(problem: WordProblem, words: tuple[str, ...] | list[str], values: tuple[int, ...] | list[int]) -> str:
    """Return the initial value, one segment per later value, and the answer, which is the last value."""
    segments = [f"{words[0]}, {values[0]} {problem.item}."]
    for (sign, number), word, before, after in zip(problem.steps, words[1:], values, values[1:], strict=False):
        segments.append(f"{word}, {before} {sign} {number} = {after}.")
    return BORDER.join([*segments, f"#### {values[-1]}"])


def _check_choice(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else "choose one of " + ", ".join(names)
        raise LabError(f"unknown {what} {name!r} of the tiny task", hint=hint)
