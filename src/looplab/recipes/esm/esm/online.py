"""Online steering: at each segment boundary retrieve candidates, probe them, decide, continue.

Before segment m the hidden state at the boundary (control point m − 1) is compared with the entries of that control
point. With Â_i = cos·Q_i and Â_null = max over the retrieved entries without a vector (0 if none), the L best are
probed:

    Score_i = β·Â_i + ρ·(mean logprob_i − mean logprob_null)        Score_null = β·Â_null

The best is injected with the factor k_scale·Score_i, unless it is below tau_null or not above Score_null.

That is `probe_rule: score`. Null continues with the model's own first choice, so nearly every vector lowers the
confidence, most of all one that changes the model's mind, while the two cosines Â_i and Â_null often differ by less
than that: the comparison leans towards null. With `probe_rule: rank` the probes decide only between candidates, and Â
alone decides whether to steer and how strongly; a probe then injects exactly what would be committed. Which rule is
better depends on the memory: choose it on dev.

Segment 1 is never steered; after M segments the rest is generated without steering. Probes do not count against the
budget of the answer; they are reported separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from looplab.errors import LabError

from .backends.base import Backend, GenerationSession, Injection, SamplingParams
from .config import OnlineSettings, resolve_layers
from .memory import Memory, MemoryEntry, RetrievalResult

if TYPE_CHECKING:
    from .config import EsmSettings

PROBE_SCALE = 1.0
"""Scale of probes: the final scale depends on their outcome."""


@dataclass
class GeneratedAnswer:
    """The answer to one question, and how it was generated."""

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
class SteeringDecision:
    """What to do at one control point of one row."""

    step: dict[str, Any]
    injection: Injection | None = None


@dataclass
class SteeringCandidate:
    """An entry that may be injected."""

    entry: MemoryEntry
    sim: float
    ahat: float
    score: float
    conf_gain: float | None = None


Controller = Callable[[GenerationSession, Sequence[int], Sequence[int], int], list[SteeringDecision]]
"""(session, rows, remaining tokens per row, segment) → decision per row."""


def solve(
    backend: Backend, texts: Sequence[str], seeds: Sequence[int], sampling: SamplingParams,
    delimiter: str, segments: int, controller: Controller | None,
) -> list[GeneratedAnswer]:  # fmt: skip
    """Answer a batch of prompts segment by segment.

    Greedy decoding, which has no controller, pauses at the same points: if nothing is injected, a method makes the same
    calls as greedy, with the same batch shapes, and its answers are bit-identical.
    """
    answers = [GeneratedAnswer() for _ in texts]
    session = backend.start_session(texts, seeds)
    try:
        active = list(range(len(texts)))
        for m in range(1, segments + 1):
            remaining = [sampling.max_new_tokens - answers[row].tokens_used for row in active]
            decisions = controller(session, active, remaining, m) if controller else []
            active = _generate_segment(session, answers, active, remaining, decisions, delimiter, sampling)
            if not active:
                break
        if active:
            remaining = [sampling.max_new_tokens - answers[row].tokens_used for row in active]
            _generate_segment(session, answers, active, remaining, [], None, sampling)
        for row, answer in enumerate(answers):
            answer.text = session.text(row)
    finally:
        session.close()
    return answers


def _generate_segment(
    session: GenerationSession, answers: Sequence[GeneratedAnswer], rows: Sequence[int], remaining: Sequence[int],
    decisions: Sequence[SteeringDecision], until: str | None, sampling: SamplingParams,
) -> list[int]:  # fmt: skip
    """Generate one segment per row; return the rows that are not finished."""
    injections = [decision.injection for decision in decisions] or [None] * len(rows)
    unfinished = []
    for place, completion in enumerate(session.generate(rows, remaining, injections, until, sampling)):
        answer = answers[rows[place]]
        answer.tokens += completion.tokens
        answer.logprob_sum += sum(completion.logprobs)
        if decisions:
            step = decisions[place].step
            answer.probe_tokens_used += step["spent_probe"]
            spent = {
                "spent_commit": len(completion.tokens),
                "spent_total": step["spent_probe"] + len(completion.tokens),
            }
            answer.steps.append({**step, **spent, "text": completion.text})
        if completion.finish == "delimiter" and answer.tokens_used < sampling.max_new_tokens:
            unfinished.append(rows[place])
        else:
            answer.finish_reason = "stop" if completion.finish == "eos" else "length"
    return unfinished


def make_controller(settings: EsmSettings, memory: Memory, variant: str, n_layers: int, seed: int = 0) -> Controller:
    """Return the controller of a variant or control. `seed` is for the control's own randomness."""
    online = settings.online
    if variant == "no_memory":
        memory = memory.restricted(())
    else:
        layers = memory.layers if online.layers is None else resolve_layers(online.layers, n_layers)
        if absent := sorted(set(layers) - set(memory.layers)):
            raise LabError(
                f"online.layers contains {absent}, but the memory only has entries at {list(memory.layers)}",
                hint="mine these layers too (offline_mine.candidate_layers), or omit online.layers",
            )
        memory = memory.restricted(layers, online.min_tool_m, online.max_tool_m)
    if variant == "random_direction":
        memory = memory.randomized(seed)
    elif variant == "shuffled_retrieval":
        memory = memory.shuffled(seed)
    elif variant == "mean_vector":
        return _mean_vector_controller(memory.means(), online)
    return _memory_controller(memory, online, settings.control_points.segment_delimiter, variant != "no_probing")


def _new_step(m: int, remaining: int, note: str) -> dict[str, Any]:
    return {
        "m": m, "mem_m": m - 1, "remaining_before": remaining, "probe_tokens_per_cand": 0, "spent_probe": 0,
        "did_probe": False, "chosen": None, "chosen_score": None, "chosen_scale": 0.0, "null_ahat": None,
        "candidates": [], "mem_reason": None, "mem_n_entries": 0, "mem_top_sim": None, "note": note,
    }  # fmt: skip


def _mean_vector_controller(means: dict[int, MemoryEntry], online: OnlineSettings) -> Controller:
    """Baseline: always inject one mean vector per control point, scaled by its mean quality."""

    def controller(
        session: GenerationSession, rows: Sequence[int], remaining: Sequence[int], m: int
    ) -> list[SteeringDecision]:
        entry = means.get(m - 1)
        decisions = []
        for left in remaining:
            decision = SteeringDecision(
                _new_step(m, left, "first segment" if m == 1 else "" if entry else "no vectors here")
            )
            if entry is not None and entry.vector is not None:
                score = online.beta * entry.quality
                scale = online.k_scale * score
                decision.injection = Injection(entry.vector, entry.layer, scale)
                decision.step.update(chosen=entry.name, chosen_score=score, chosen_scale=scale)
            decisions.append(decision)
        return decisions

    return controller


def _memory_controller(memory: Memory, online: OnlineSettings, delimiter: str, probing: bool) -> Controller:
    def controller(
        session: GenerationSession, rows: Sequence[int], remaining: Sequence[int], m: int
    ) -> list[SteeringDecision]:
        decisions = [SteeringDecision(_new_step(m, left, "first segment" if m == 1 else "")) for left in remaining]
        if m == 1:
            return decisions
        # An empty memory has no layers, so there are no states to read.
        states = (
            session.hidden_states(rows, memory.layers) if memory.entries else np.zeros((len(rows), 0, 0), np.float32)
        )
        found = memory.retrieve(states, m - 1, online.k_retrieve, online.min_entries, online.min_sim)
        candidate_lists = [
            _select_candidates(memory, one, online, decision) for one, decision in zip(found, decisions, strict=True)
        ]
        if probing and online.rho > 0:
            _probe(session, rows, remaining, candidate_lists, decisions, online, delimiter)
        for decision, candidates in zip(decisions, candidate_lists, strict=True):
            if candidates:
                _decide(decision, candidates, online)
        return decisions

    return controller


def _select_candidates(
    memory: Memory, found: RetrievalResult, online: OnlineSettings, decision: SteeringDecision
) -> list[SteeringCandidate]:
    """Return the L best retrieved entries with a vector; store the value of null in the step."""
    decision.step.update(mem_reason=found.reason, mem_n_entries=found.n_entries, mem_top_sim=found.top_sim)
    if found.reason != "ok":
        return []
    null, candidates = [], []
    for index, sim in zip(found.entries, found.sims, strict=True):
        entry = memory.entries[index]
        ahat = sim * entry.quality
        if entry.vector is None:
            null.append(ahat)
        else:
            candidates.append(SteeringCandidate(entry, sim, ahat, online.beta * ahat))
    decision.step["null_ahat"] = max(null, default=0.0)
    if not candidates:
        decision.step["note"] = "only entries without a vector"
    candidates.sort(key=lambda one: -one.ahat)
    return candidates[: online.L]


def _probe(
    session: GenerationSession, rows: Sequence[int], remaining: Sequence[int],
    candidate_lists: Sequence[Sequence[SteeringCandidate]], decisions: Sequence[SteeringDecision],
    online: OnlineSettings, delimiter: str,
) -> None:  # fmt: skip
    """Generate a few tokens without steering and with each candidate, and compare the confidence."""
    sampling = SamplingParams(online.probe_tokens)
    null: dict[int, float] = {}
    for rank in range(-1, max(map(len, candidate_lists))):
        places = [place for place, candidates in enumerate(candidate_lists) if len(candidates) > max(rank, 0)]
        if not places:
            continue
        injections = [_probe_injection(candidate_lists[place][rank], online) if rank >= 0 else None for place in places]
        limits = [min(online.probe_tokens, remaining[place]) for place in places]
        completions = session.generate([rows[p] for p in places], limits, injections, delimiter, sampling, commit=False)
        for place, completion in zip(places, completions, strict=True):
            confidence = float(np.mean(completion.logprobs)) if completion.logprobs else 0.0
            step = decisions[place].step
            step["spent_probe"] += len(completion.tokens)
            if rank < 0:
                null[place] = confidence
                step.update(did_probe=True, probe_tokens_per_cand=online.probe_tokens)
            else:
                candidate = candidate_lists[place][rank]
                candidate.conf_gain = confidence - null[place]
                candidate.score += online.rho * candidate.conf_gain


def _probe_injection(candidate: SteeringCandidate, online: OnlineSettings) -> Injection | None:
    """Return what a probe injects: with `rank` exactly what would be committed, with `score` the vector itself."""
    if candidate.entry.vector is None:
        return None
    scale = PROBE_SCALE if online.probe_rule == "score" else online.k_scale * online.beta * candidate.ahat
    return Injection(candidate.entry.vector, candidate.entry.layer, scale)


def _decide(decision: SteeringDecision, candidates: Sequence[SteeringCandidate], online: OnlineSettings) -> None:
    """Choose the best candidate, or null: in doubt the model is not steered."""
    best = max(candidates, key=lambda one: one.score)
    score = best.score if online.probe_rule == "score" else online.beta * best.ahat
    decision.step["candidates"] = [
        {"name": one.entry.name, "score": one.score, "ahat": one.ahat, "sim": one.sim, "conf_gain": one.conf_gain}
        for one in candidates
    ]
    if score <= online.beta * decision.step["null_ahat"]:
        decision.step["note"] = "null is as good"
    elif score < online.tau_null:
        decision.step["note"] = "below tau_null"
    elif best.entry.vector is not None:
        scale = online.k_scale * score
        decision.injection = Injection(best.entry.vector, best.entry.layer, scale)
        decision.step.update(chosen=best.entry.name, chosen_score=score, chosen_scale=scale)
