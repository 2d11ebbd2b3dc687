"""What every backend promises. A subject brings the backend, prompts, and an injection that is sure to be felt.

Between batches of different shapes or orders a promise holds up to rounding, because kernels choose their order of
additions by the shape, by the position of the row and by the CPU: `assert_same` and `assert_drawn_alike` allow for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm.backends import Backend, Completion, GenerationSession, Injection, SamplingParams

GREEDY = SamplingParams(max_new_tokens=64)
WARM = SamplingParams(max_new_tokens=64, temperature=1.0, top_p=0.95, seed=3)


@dataclass(frozen=True)
class Subject:
    backend: Backend
    prompts: tuple[str, ...]
    """Different ones, of different lengths, at least four."""
    strong: Injection
    """Changes the greedy continuation of the first prompt after its first piece."""
    begin: int
    """Tokens of that first piece."""
    tolerance: float
    """How far rounding may move states and log-probabilities between batches."""
    relative: float = 1e-4
    """How far it may move states besides, relative to their size."""
    coarse: bool = False
    """Whether rounding is so coarse that it moves many draws across the border between two tokens."""


def free(
    session: GenerationSession, rows: Sequence[int], limit: int, sampling: SamplingParams = GREEDY
) -> list[Completion]:
    return session.generate(rows, [limit] * len(rows), [None] * len(rows), None, sampling)


def answers(
    subject: Subject, prompts: Sequence[str], seeds: Sequence[int], sampling: SamplingParams
) -> list[Completion]:
    session = subject.backend.start_session(prompts, seeds)
    completions = free(session, range(len(prompts)), 24, sampling)
    session.close()
    return completions


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def joined(*completions: Completion) -> Completion:
    """Consecutive pieces of a row as one."""
    return Completion(
        [token for completion in completions for token in completion.tokens],
        "".join(completion.text for completion in completions),
        [logprob for completion in completions for logprob in completion.logprobs],
        completions[-1].finish,
    )


def assert_same(found: Sequence[Completion], expected: Sequence[Completion], tolerance: float) -> None:
    """The same greedy answers up to rounding: each row up to its first tie.

    After the same prefix two greedy decodings choose different tokens only if these were equally likely, so even the
    log-probabilities of the first tokens that differ agree. What follows has another prefix and cannot be compared.
    """
    for one, other in zip(found, expected, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        tie = next((place for place, (here, there) in enumerate(pairs) if here != there), None)
        if tie is None:
            assert (one.tokens, one.finish) == (other.tokens, other.finish)
        end = None if tie is None else tie + 1
        np.testing.assert_allclose(one.logprobs[:end], other.logprobs[:end], rtol=0, atol=tolerance)


def assert_drawn_alike(found: Sequence[Completion], expected: Sequence[Completion], coarse: bool) -> None:
    """The same sampled answers up to rounding: all but one.

    Rounding moves a draw across the border between two tokens less than once in a thousand answers; draws that depend
    on the batch would change nearly every row. In bfloat16 it moves a few draws in a hundred, so answers only begin
    alike; answers that depend on the batch would do so for half a token on average.
    """
    if coarse:
        pairs = zip(found, expected, strict=True)
        alike = [
            next((n for n, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), len(one.tokens))
            for one, other in pairs
        ]
        assert sum(alike) >= 3 * len(alike)
        return
    assert sum(one.tokens != other.tokens for one, other in zip(found, expected, strict=True)) <= 1


def an_injection_of_scale_zero_is_the_baseline(subject: Subject) -> None:
    count = len(subject.prompts)
    plain = subject.backend.start_session(subject.prompts, range(count))
    zero = subject.backend.start_session(subject.prompts, range(count))
    free(plain, range(count), subject.begin)
    free(zero, range(count), subject.begin)
    nothing = replace(subject.strong, scale=0.0)
    expected = free(plain, range(count), 20)
    found = zero.generate(range(count), [20] * count, [nothing] * count, None, GREEDY)
    assert_same(found, expected, subject.tolerance)


def pieces_without_injection_add_up_to_the_greedy_answer(subject: Subject) -> None:
    whole = answers(subject, subject.prompts, range(len(subject.prompts)), GREEDY)
    session = subject.backend.start_session(subject.prompts, range(len(subject.prompts)))
    for row, expected in enumerate(whole):
        completions = []
        for limit in (1, 2, 5, 16):
            session.hidden_states([row], [0])
            completions += session.generate([row], [limit], [None], None, GREEDY)
        found = joined(*completions)
        assert (session.tokens(row), session.text(row)) == (found.tokens, found.text)
        assert_same([found], [expected], subject.tolerance)


def batch_size_and_order_of_rows_change_nothing_but_rounding(subject: Subject) -> None:
    prompts = list(subject.prompts)
    seeds = list(range(10, 10 + len(prompts)))
    together = answers(subject, prompts, seeds, GREEDY)
    assert_same(answers(subject, prompts[::-1], seeds[::-1], GREEDY), together[::-1], subject.tolerance)
    drawn = answers(subject, prompts, seeds, WARM)
    assert_drawn_alike(answers(subject, prompts[::-1], seeds[::-1], WARM), drawn[::-1], subject.coarse)
    rows = list(zip(prompts, seeds, strict=True))
    assert_same([answers(subject, [text], [seed], GREEDY)[0] for text, seed in rows], together, subject.tolerance)
    assert_drawn_alike([answers(subject, [text], [seed], WARM)[0] for text, seed in rows], drawn, subject.coarse)


def rows_of_a_batch_may_be_at_different_places(subject: Subject) -> None:
    count = len(subject.prompts)
    alone = answers(subject, subject.prompts, range(count), GREEDY)
    session = subject.backend.start_session(subject.prompts, range(count))
    first = [free(session, [row], row + 1)[0] for row in range(count)]
    mixed = list(range(count))[::-1]
    rest = session.generate(mixed, [24 - (row + 1) for row in mixed], [None] * count, None, GREEDY)[::-1]
    found = [joined(*completions) for completions in zip(first, rest, strict=True)]
    assert [session.tokens(row) for row in range(count)] == tokens_of(found)
    assert_same(found, alone, subject.tolerance)


def an_injection_acts_on_its_row_alone_and_is_counted(subject: Subject) -> None:
    count = len(subject.prompts)
    plain = subject.backend.start_session(subject.prompts, range(count))
    steered = subject.backend.start_session(subject.prompts, range(count))
    free(plain, range(count), subject.begin)
    free(steered, range(count), subject.begin)
    before = subject.backend.injections_applied()
    expected = free(plain, range(count), 16)
    assert subject.backend.injections_applied() == before
    wishes = [subject.strong, *[None] * (count - 1)]
    found = steered.generate(range(count), [16] * count, wishes, None, GREEDY)
    assert subject.backend.injections_applied() == before + 1
    assert found[0].tokens != expected[0].tokens
    assert_same(found[1:], expected[1:], subject.tolerance)


def rows_may_carry_different_injections(subject: Subject) -> None:
    count = len(subject.prompts)
    layers = [0, subject.backend.n_layers - 1]
    wishes = [
        replace(subject.strong, layer=layers[row % 2], scale=subject.strong.scale / (row + 1)) for row in range(count)
    ]
    together = subject.backend.start_session(subject.prompts, range(count))
    free(together, range(count), 2)
    found = together.generate(range(count), [10] * count, wishes, None, GREEDY)
    for row in range(count):
        alone = subject.backend.start_session([subject.prompts[row]], [row])
        free(alone, [0], 2)
        assert_same(alone.generate([0], [10], [wishes[row]], None, GREEDY), [found[row]], subject.tolerance)


def a_probe_leaves_no_trace(subject: Subject) -> None:
    count = len(subject.prompts)
    rows = range(count)
    layers = range(subject.backend.n_layers)
    untouched = subject.backend.start_session(subject.prompts, rows)
    probed = subject.backend.start_session(subject.prompts, rows)
    free(untouched, rows, subject.begin)
    free(probed, rows, subject.begin)
    probed.generate(rows, [8] * count, [subject.strong] * count, None, GREEDY, commit=False)  # states not yet known
    states = probed.hidden_states(rows, layers)
    np.testing.assert_allclose(states, untouched.hidden_states(rows, layers), rtol=0, atol=subject.tolerance)
    mixed = [subject.strong if row % 2 else None for row in rows]
    first = probed.generate(rows, [8] * count, [subject.strong] * count, None, WARM, commit=False)
    null = probed.generate(rows, [8] * count, [None] * count, None, WARM, commit=False)
    again = probed.generate(rows, [8] * count, mixed, None, WARM, commit=False)
    assert_drawn_alike(again, [(first if row % 2 else null)[row] for row in rows], subject.coarse)
    np.testing.assert_array_equal(probed.hidden_states(rows, layers), states)
    assert [probed.tokens(row) for row in rows] == [untouched.tokens(row) for row in rows]
    assert [probed.text(row) for row in rows] == [untouched.text(row) for row in rows]
    assert_same(free(probed, rows, 12), free(untouched, rows, 12), subject.tolerance)


def a_committed_injection_stays(subject: Subject) -> None:
    plain = subject.backend.start_session(subject.prompts[:2], [0, 1])
    steered = subject.backend.start_session(subject.prompts[:2], [0, 1])
    last = subject.backend.n_layers - 1
    for session, wish in ((plain, None), (steered, subject.strong)):
        free(session, [0, 1], subject.begin)
        session.generate([0, 1], [1, 1], [wish, None], None, GREEDY)
    here, there = plain.hidden_states([0, 1], [last]), steered.hidden_states([0, 1], [last])
    assert np.abs(here[0] - there[0]).max() > 10 * subject.tolerance
    np.testing.assert_allclose(here[1], there[1], rtol=0, atol=subject.tolerance)


def a_delimiter_of_several_tokens_ends_the_piece(subject: Subject) -> None:
    backend, prompt = subject.backend, subject.prompts[0]
    session = backend.start_session([prompt], [0])
    parts = [free(session, [0], 1)[0] for _ in range(12)]
    texts = [part.text for part in parts]
    pairs = [n for n in range(3, 11) if texts[n] and texts[n + 1]]
    delimiter = texts[pairs[0]] + texts[pairs[0] + 1]
    until = backend.start_session([prompt], [0])
    completion = until.generate([0], [12], [None], delimiter, GREEDY)[0]
    assert completion.finish == "delimiter"
    shortest = next(n for n in range(1, 13) if delimiter in "".join(texts[:n]))
    assert completion.tokens == session.tokens(0)[:shortest]
    assert completion.text == "".join(texts[:shortest])
    assert until.generate([0], [5], [None], "no such text", GREEDY)[0].finish in ("length", "eos")


def the_draws_of_a_row_depend_on_its_seed_alone(subject: Subject) -> None:
    prompts = [subject.prompts[0]] * 8
    drawn = answers(subject, prompts, range(8), WARM)
    assert_drawn_alike(answers(subject, prompts[:3], [5, 0, 5], WARM), [drawn[5], drawn[0], drawn[5]], subject.coarse)
    assert len({tuple(completion.tokens) for completion in drawn}) > 1
    other = answers(subject, prompts, range(8), replace(WARM, seed=4))
    assert tokens_of(other) != tokens_of(drawn)


def states_equal_those_of_a_fresh_prefill(subject: Subject) -> None:
    backend, count = subject.backend, len(subject.prompts)
    layers = range(backend.n_layers)
    session = backend.start_session(subject.prompts, range(count))
    fresh = [backend.start_session([prompt], [0]).hidden_states([0], layers)[0] for prompt in subject.prompts]
    found = session.hidden_states(range(count), layers)
    assert found.shape == (count, backend.n_layers, backend.width)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, fresh, atol=max(subject.tolerance, 1e-4), rtol=subject.relative)
    free(session, range(count), 6)
    longer = [prompt + session.text(row) for row, prompt in enumerate(subject.prompts)]
    fresh = [backend.start_session([prompt], [0]).hidden_states([0], layers)[0] for prompt in longer]
    np.testing.assert_allclose(
        session.hidden_states(range(count), layers), fresh, atol=max(subject.tolerance, 1e-4), rtol=subject.relative
    )
    picked = session.hidden_states([1, 0], [backend.n_layers - 1, 0])
    np.testing.assert_array_equal(picked[0, 1], session.hidden_states([1], [0])[0, 0])


def a_row_that_has_no_room_gives_an_empty_piece(subject: Subject) -> None:
    session = subject.backend.start_session(subject.prompts[:2], [0, 1])
    injections_applied = subject.backend.injections_applied()
    completions = session.generate([0, 1], [0, 3], [subject.strong, None], None, GREEDY)
    assert (completions[0].tokens, completions[0].text, completions[0].finish) == ([], "", "length")
    assert completions[1].tokens
    assert subject.backend.injections_applied() == injections_applied
    assert session.text(0) == ""


def log_probabilities_are_those_of_the_tokens(subject: Subject) -> None:
    session = subject.backend.start_session(subject.prompts, range(len(subject.prompts)))
    for completion in free(session, range(len(subject.prompts)), 10, WARM):
        assert len(completion.logprobs) == len(completion.tokens)
        assert all(-1000 < logprob <= 1e-6 for logprob in completion.logprobs)


def a_call_that_cannot_be_meant_is_refused(subject: Subject) -> None:
    session = subject.backend.start_session(subject.prompts[:2], [0, 1])
    layers = subject.backend.n_layers
    with pytest.raises(LabError, match=f"layers 0 to {layers - 1}"):
        session.generate([0], [4], [replace(subject.strong, layer=layers)], None, GREEDY)
    with pytest.raises(LabError, match="wide"):
        session.generate([0], [4], [replace(subject.strong, vector=np.zeros(3, np.float32))], None, GREEDY)
    with pytest.raises(LabError, match="twice"):
        session.generate([0, 0], [4, 4], [None, None], None, GREEDY)
    with pytest.raises(LabError, match="2 rows, 1 limits"):
        session.generate([0, 1], [4], [None, None], None, GREEDY)


PROMISES: tuple[Callable[[Subject], None], ...] = (
    an_injection_of_scale_zero_is_the_baseline,
    pieces_without_injection_add_up_to_the_greedy_answer,
    batch_size_and_order_of_rows_change_nothing_but_rounding,
    rows_of_a_batch_may_be_at_different_places,
    an_injection_acts_on_its_row_alone_and_is_counted,
    rows_may_carry_different_injections,
    a_probe_leaves_no_trace,
    a_committed_injection_stays,
    a_delimiter_of_several_tokens_ends_the_piece,
    the_draws_of_a_row_depend_on_its_seed_alone,
    states_equal_those_of_a_fresh_prefill,
    a_row_that_has_no_room_gives_an_empty_piece,
    log_probabilities_are_those_of_the_tokens,
    a_call_that_cannot_be_meant_is_refused,
)
