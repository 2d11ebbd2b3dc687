"""Steering while the answer is written: at each segment border ask the memory, probe what it offers, decide, go on.

Before segment m the state at the border (control point m − 1) is compared with the entries of that control point.
With Â_i = cos·Q_i and Â_null = max over the retrieved entries without a vector (0 if none), the L best are probed:

    Score_i = β·Â_i + ρ·(mean logprob_i − mean logprob_null)        Score_null = β·Â_null

The best is injected with the factor k_scale·Score_i, unless it is below tau_null or not above Score_null. Segment 1 is
never steered; after M segments the rest is written plainly. Probes do not count against the budget of the answer; they
are reported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from looplab.errors import LabError

from .backends.base import Backend, Injection, Sampling, Session
from .config import OnlineSettings, resolve_layers
from .memory import Entry, Found, Memory

if TYPE_CHECKING:
    from .config import Settings

PROBE_SCALE = 1.0
"""Probes are made with the plain vector: the factor of the commitment is only known from their outcome."""


@dataclass
class Answer:
    """What was written for one question, and how."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    probe_tokens_used: int = 0
    finish_reason: str = "length"
    logprob_sum: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_used(self) -> int:
        return len(self.tokens)


@dataclass
class Choice:
    """What is done at one control point of one row."""

    step: dict[str, Any]
    injection: Injection | None = None


@dataclass
class Candidate:
    """An entry that may be injected."""

    entry: Entry
    sim: float
    ahat: float
    score: float
    conf_gain: float | None = None


Guide = Callable[[Session, Sequence[int], Sequence[int], int], list[Choice]]
"""(session, rows, remaining tokens of each, segment) → what to do for each row."""


def solve(
    backend: Backend, texts: Sequence[str], seeds: Sequence[int], sampling: Sampling,
    delimiter: str, segments: int, guide: Guide | None,
) -> list[Answer]:  # fmt: skip
    """Answer a batch of prompts segment by segment.

    Greedy decoding, which has no guide, makes the same pauses: where nothing is ever injected, a method then makes the
    same calls as greedy, with batches of the same shapes, and has the same bits.
    """
    answers = [Answer() for _ in texts]
    session = backend.open(texts, seeds)
    try:
        live = list(range(len(texts)))
        for m in range(1, segments + 1):
            remaining = [sampling.max_new_tokens - answers[row].tokens_used for row in live]
            choices = guide(session, live, remaining, m) if guide else []
            live = _write(session, answers, live, remaining, choices, delimiter, sampling)
            if not live:
                break
        if live:
            remaining = [sampling.max_new_tokens - answers[row].tokens_used for row in live]
            _write(session, answers, live, remaining, [], None, sampling)
        for row, answer in enumerate(answers):
            answer.text = session.text(row)
    finally:
        session.close()
    return answers


def _write(
    session: Session, answers: Sequence[Answer], rows: Sequence[int], remaining: Sequence[int],
    choices: Sequence[Choice], until: str | None, sampling: Sampling,
) -> list[int]:  # fmt: skip
    """Generate one piece for each row; the rows that can go on."""
    injections = [choice.injection for choice in choices] or [None] * len(rows)
    going = []
    for place, piece in enumerate(session.generate(rows, remaining, injections, until, sampling)):
        answer = answers[rows[place]]
        answer.tokens += piece.tokens
        answer.logprob_sum += sum(piece.logprobs)
        if choices:
            step = choices[place].step
            answer.probe_tokens_used += step["spent_probe"]
            spent = {"spent_commit": len(piece.tokens), "spent_total": step["spent_probe"] + len(piece.tokens)}
            answer.steps.append({**step, **spent, "text": piece.text})
        if piece.finish == "delimiter" and answer.tokens_used < sampling.max_new_tokens:
            going.append(rows[place])
        else:
            answer.finish_reason = "stop" if piece.finish == "eos" else "length"
    return going


def make_guide(settings: Settings, memory: Memory, variant: str, n_layers: int, seed: int = 0) -> Guide:
    """The guide of a variant or control. `seed` is of the control's own randomness."""
    online = settings.online
    if variant == "no_memory":
        memory = memory.restricted(())
    else:
        layers = memory.layers if online.layers is None else resolve_layers(online.layers, n_layers)
        if absent := sorted(set(layers) - set(memory.layers)):
            raise LabError(
                f"online.layers names {absent}, but the memory has entries at {list(memory.layers)} only",
                hint="mine these layers too (offline_mine.candidate_layers), or leave online.layers out",
            )
        memory = memory.restricted(layers, online.min_tool_m, online.max_tool_m)
    if variant == "random_direction":
        memory = memory.randomized(seed)
    elif variant == "shuffled_retrieval":
        memory = memory.shuffled(seed)
    elif variant == "mean_vector":
        return _mean_guide(memory.means(), online)
    return _memory_guide(memory, online, settings.control_points.segment_delimiter, variant != "no_probing")


def _step(m: int, remaining: int, note: str) -> dict[str, Any]:
    return {
        "m": m, "mem_m": m - 1, "remaining_before": remaining, "probe_tokens_per_cand": 0, "spent_probe": 0,
        "did_probe": False, "chosen": None, "chosen_score": None, "chosen_scale": 0.0, "null_ahat": None,
        "candidates": [], "mem_reason": None, "mem_n_entries": 0, "mem_top_sim": None, "note": note,
    }  # fmt: skip


def _mean_guide(means: dict[int, Entry], online: OnlineSettings) -> Guide:
    """The simple rival of a memory: one vector for everybody, always, as strong as its mean quality says."""

    def guide(session: Session, rows: Sequence[int], remaining: Sequence[int], m: int) -> list[Choice]:
        entry = means.get(m - 1)
        choices = []
        for left in remaining:
            choice = Choice(_step(m, left, "first segment" if m == 1 else "" if entry else "no vectors here"))
            if entry is not None and entry.vector is not None:
                score = online.beta * entry.quality
                scale = online.k_scale * score
                choice.injection = Injection(entry.vector, entry.layer, scale)
                choice.step.update(chosen=entry.name, chosen_score=score, chosen_scale=scale)
            choices.append(choice)
        return choices

    return guide


def _memory_guide(memory: Memory, online: OnlineSettings, delimiter: str, probing: bool) -> Guide:
    def guide(session: Session, rows: Sequence[int], remaining: Sequence[int], m: int) -> list[Choice]:
        choices = [Choice(_step(m, left, "first segment" if m == 1 else "")) for left in remaining]
        if m == 1:
            return choices
        # Without entries there is nothing to compare, and a state of no layer at all is of no use either.
        states = session.states(rows, memory.layers) if memory.entries else np.zeros((len(rows), 0, 0), np.float32)
        found = memory.retrieve(states, m - 1, online.k_retrieve, online.min_entries, online.min_sim)
        offers = [_offer(memory, one, online, choice) for one, choice in zip(found, choices, strict=True)]
        if probing and online.rho > 0:
            _probe(session, rows, remaining, offers, choices, online, delimiter)
        for choice, offer in zip(choices, offers, strict=True):
            if offer:
                _decide(choice, offer, online)
        return choices

    return guide


def _offer(memory: Memory, found: Found, online: OnlineSettings, choice: Choice) -> list[Candidate]:
    """The L best retrieved entries that have a vector; what null is worth goes into the step."""
    choice.step.update(mem_reason=found.reason, mem_n_entries=found.n_entries, mem_top_sim=found.top_sim)
    if found.reason != "ok":
        return []
    null, offer = [], []
    for index, sim in zip(found.entries, found.sims, strict=True):
        entry = memory.entries[index]
        ahat = sim * entry.quality
        if entry.vector is None:
            null.append(ahat)
        else:
            offer.append(Candidate(entry, sim, ahat, online.beta * ahat))
    choice.step["null_ahat"] = max(null, default=0.0)
    if not offer:
        choice.step["note"] = "only entries without a vector"
    offer.sort(key=lambda one: -one.ahat)
    return offer[: online.L]


def _probe(
    session: Session, rows: Sequence[int], remaining: Sequence[int], offers: Sequence[Sequence[Candidate]],
    choices: Sequence[Choice], online: OnlineSettings, delimiter: str,
) -> None:  # fmt: skip
    """Let the model go on for a few tokens with nothing and with each offer, and see what it is surer of."""
    sampling = Sampling(online.probe_tokens)
    null: dict[int, float] = {}
    for rank in range(-1, max(map(len, offers))):
        places = [place for place, offer in enumerate(offers) if len(offer) > max(rank, 0)]
        if not places:
            continue
        injections = [
            Injection(vector, offers[place][rank].entry.layer, PROBE_SCALE)
            if rank >= 0 and (vector := offers[place][rank].entry.vector) is not None
            else None
            for place in places
        ]
        limits = [min(online.probe_tokens, remaining[place]) for place in places]
        pieces = session.generate([rows[p] for p in places], limits, injections, delimiter, sampling, commit=False)
        for place, piece in zip(places, pieces, strict=True):
            confidence = float(np.mean(piece.logprobs)) if piece.logprobs else 0.0
            step = choices[place].step
            step["spent_probe"] += len(piece.tokens)
            if rank < 0:
                null[place] = confidence
                step.update(did_probe=True, probe_tokens_per_cand=online.probe_tokens)
            else:
                candidate = offers[place][rank]
                candidate.conf_gain = confidence - null[place]
                candidate.score += online.rho * candidate.conf_gain


def _decide(choice: Choice, offer: Sequence[Candidate], online: OnlineSettings) -> None:
    """The best offer, or null: in doubt the model is left alone."""
    best = max(offer, key=lambda one: one.score)
    choice.step["candidates"] = [
        {"name": one.entry.name, "score": one.score, "ahat": one.ahat, "sim": one.sim, "conf_gain": one.conf_gain}
        for one in offer
    ]
    if best.score <= online.beta * choice.step["null_ahat"]:
        choice.step["note"] = "null is as good"
    elif best.score < online.tau_null:
        choice.step["note"] = "below tau_null"
    elif best.entry.vector is not None:
        scale = online.k_scale * best.score
        choice.injection = Injection(best.entry.vector, best.entry.layer, scale)
        choice.step.update(chosen=best.entry.name, chosen_score=best.score, chosen_scale=scale)
