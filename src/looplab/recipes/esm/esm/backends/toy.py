"""A toy language model in numpy for tests and demos: takes milliseconds, has no weights, and can be steered.

Asked for a sum it first writes its "mind" (slow or fast), then one addition per segment. With a fast mind it skips the
last addition, so that the answer is wrong. The mind is one direction of the hidden state, so an injection along it
changes the outcome. Questions with the word "slip" go wrong at random, and no direction helps. The delimiter "\\n\\n"
is two tokens, and the second may contain text beyond it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from .base import Completion, Finish, Floats, Injection, SamplingParams, check_request
from .draw import draw, mix
from .split import SplitSession

EOS = 0
VOCABULARY = ("", "Mind:", " slow", " fast", ".", "\n", "\n#### ", "+", "=", *"0123456789")
TOKEN = {text: number for number, text in enumerate(VOCABULARY)}
LAYERS, WIDTH = 4, 16
LOGIT_MARGIN = 30.0
"""Logit margin of valid tokens over invalid ones."""
MIND_WEIGHT = 3.0
"""Weight of the mind in the decision about the last addition."""


@dataclass(frozen=True)
class ToyProblem:
    """A question for the toy model."""

    question: str
    gold: str
    """The correct sum."""
    solution: str
    """What a slow mind writes."""


def make_problem(number: int, slips: bool = False) -> ToyProblem:
    """Return question `number`; all are different."""
    first, second, third = 2 + number // 400, 3 + number // 20 % 20, 4 + number % 20
    things = ("apples", "stones", "birds", "coins")[number % 4]
    question = f"{'A slip is near. ' if slips else ''}{first} and {second} and {third} {things}. How many?\n"
    script = _scripts(question)[0]
    return ToyProblem(question, str(first + second + third), "".join(script))


class ToyBackend:
    """See the contract in `base.py`."""

    name = "toy"
    n_layers = LAYERS
    width = WIDTH
    fingerprint = (
        "toy-" + hashlib.sha256(repr((VOCABULARY, LAYERS, WIDTH, LOGIT_MARGIN, MIND_WEIGHT)).encode()).hexdigest()[:16]
    )

    def __init__(self, max_num_seqs: int = 64) -> None:
        self.max_num_seqs = max_num_seqs
        self._injections_applied = 0

    def apply_chat_template(self, prompt: str) -> str:
        return prompt

    def start_session(self, prompts: Sequence[str], seeds: Sequence[int]) -> ToySession | SplitSession:
        if len(prompts) > self.max_num_seqs:
            return SplitSession(partial(ToySession, self), prompts, seeds, self.max_num_seqs)
        return ToySession(self, prompts, seeds)

    def injections_applied(self) -> int:
        return self._injections_applied

    def close(self) -> None:
        pass


@dataclass
class _ToyRow:
    prompt: str
    seed: int
    tokens: list[int] = field(default_factory=list)
    push: float = 0.0
    """Sum of the committed injections along the mind's direction."""
    ended: bool = False

    def text(self) -> str:
        return "".join(VOCABULARY[token] for token in self.tokens)


class ToySession:
    """Rows of text; the model is a function of the text and of `push`."""

    def __init__(self, backend: ToyBackend, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        self._backend = backend
        self._rows = [_ToyRow(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def hidden_states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        held = [self._rows[row] for row in rows]
        out = [_hidden(row.prompt + row.text(), row.push, layer) for row in held for layer in layers]
        return np.array(out, dtype=np.float32).reshape(len(rows), len(layers), WIDTH)

    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: SamplingParams,
        commit: bool = True,
    ) -> list[Completion]:
        check_request(rows, limits, injections, LAYERS, WIDTH)
        completions = [Completion([], "", [], "eos" if self._rows[row].ended else "length") for row in rows]
        work = [replace(self._rows[row], tokens=list(self._rows[row].tokens)) for row in rows]
        active = [i for i, row in enumerate(work) if limits[i] > 0 and not row.ended]
        for i in active:
            injection = injections[i]
            if injection is not None:
                work[i].push += injection.scale * float(injection.vector @ _mind_directions()[injection.layer])
                self._backend._injections_applied += 1
        while active:
            logits = np.stack([_logits(work[i].prompt + work[i].text(), work[i].push) for i in active])
            places = [len(work[i].tokens) for i in active]
            tokens, logprobs = draw(logits, [work[i].seed for i in active], places, sampling)
            for i, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
                work[i].tokens.append(token)
                completions[i].tokens.append(token)
                completions[i].text += VOCABULARY[token]
                completions[i].logprobs.append(logprob)
            unfinished = []
            for i in active:
                finish = _finish(completions[i], limits[i], until)
                if finish is None:
                    unfinished.append(i)
                else:
                    completions[i].finish = finish
                    work[i].ended = finish == "eos"
            active = unfinished
        if commit:
            for row, result in zip(rows, work, strict=True):
                self._rows[row] = result
        return completions

    def park(self) -> None:
        """Nothing to do: everything is in host memory."""

    resume = park

    def text(self, row: int) -> str:
        return self._rows[row].text()

    def tokens(self, row: int) -> list[int]:
        return list(self._rows[row].tokens)

    def close(self) -> None:
        self._rows = []


def _finish(completion: Completion, limit: int, until: str | None) -> Finish | None:
    if completion.tokens[-1] == EOS:
        return "eos"
    if until and until in completion.text:
        return "delimiter"
    return "length" if len(completion.tokens) >= limit else None


def _split(text: str) -> tuple[str, str]:
    """Split a text into the question and the answer so far."""
    place = text.find("Mind:")
    return (text, "") if place < 0 else (text[:place], text[place:])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=4096)
def _scripts(question: str) -> tuple[tuple[str, ...], ...]:
    """Return all possible answers as tokens: for each mind the correct one, then the one with the slip or omission."""
    numbers = [int(found) for found in re.findall(r"\d{1,6}", question)][:8] or [_hash(question) % 10, 1]
    lines = []
    total = numbers[0]
    for number in numbers[1:]:
        lines.append((*str(total), "+", *str(number), "=", *str(total + number), "\n"))
        total += number
    full = tuple(token for line in lines[:-1] for token in (*line, "\n")) + (lines[-1] if lines else ())
    slipped = str(total)[:-1] + str((total + 1) % 10)
    if "slip" in question:
        wrong = (*full[: -1 - len(str(total))], *slipped, "\n", "\n#### ", *slipped, "")
    else:
        hasty = tuple(token for line in lines[:-1] for token in (*line, "\n"))[:-1]
        wrong = (*hasty, "\n#### ", *str(total - numbers[-1] if lines else total), "")
    right = (*full, "\n#### ", *str(total), "")
    return tuple(("Mind:", mind, ".", "\n", "\n", *end) for mind in (" slow", " fast") for end in (right, wrong))


def _mind(text: str, push: float) -> float:
    question, answer = _split(text)
    if answer.startswith("Mind: slow"):
        return 1.0 + push
    if answer.startswith("Mind: fast"):
        return -1.0 + push
    return _inclination(question) + push


def _inclination(question: str) -> float:
    """Return the initial mind for a question, in −1.2 … 0.8: more often fast."""
    return (mix(_hash(question)) % 2001) / 1000 - 1.2


def _logits(text: str, push: float) -> Floats:
    question, answer = _split(text)
    following = set()
    for script in _scripts(question):
        whole = "".join(script)
        if whole.startswith(answer):
            place = 0
            for token in script:
                if place == len(answer):
                    following.add(token)
                    break
                place += len(token)
    logits = np.full(len(VOCABULARY), -LOGIT_MARGIN, dtype=np.float32)
    for token in following or {""}:
        logits[TOKEN[token]] = 0.0
    if {" slow", " fast"} <= following:
        logits[TOKEN[" slow"]] = _mind(text, push)
    elif len(following) == 2 and "\n#### " in following:  # continue, or skip the last addition
        logits[TOKEN[min(following - {"\n#### "})]] = MIND_WEIGHT * _mind(text, push)
    elif len(following) == 2:  # the last digit: a slip, regardless of the mind
        logits[TOKEN[_scripts(question)[0][-2]]] = (_hash("slip" + question) % 2001) / 1000 - 1.0
    return logits


@lru_cache(maxsize=1)
def _mind_directions() -> Floats:
    """Return the direction of the mind in each layer, as unit vectors."""
    rows = np.random.default_rng(7).normal(size=(LAYERS, WIDTH))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def _noise(key: str) -> Floats:
    return np.random.default_rng(_hash(key)).normal(size=WIDTH).astype(np.float32) / np.float32(WIDTH**0.5)


def _hidden(text: str, push: float, layer: int) -> Floats:
    """Return a hidden state: the mind, clearer in higher layers, plus noise that depends on the text."""
    question, _ = _split(text)
    mind = _mind_directions()[layer] * np.float32(_mind(text, push) * (layer + 1) / LAYERS)
    return np.asarray(mind + 0.4 * _noise(f"{layer} {question}") + 0.2 * _noise(f"{layer} {text[-4:]}"), np.float32)
