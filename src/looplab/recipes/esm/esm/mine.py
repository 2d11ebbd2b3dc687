"""Stage I: sample rollouts for each question; contrast the hidden states of correct and incorrect ones.

Questions are sampled in fixed batches. A finished batch is one shard, written atomically: the rollouts, and for each
control point and layer the mean hidden state of the correct and of the incorrect rollouts. An interrupted run resumes
at the first batch without a shard, so no question is sampled twice; the candidates are a function of the shards alone.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from looplab.errors import LabError

from . import files, prompts
from .backends.base import Backend, GenerationSession, SamplingParams
from .config import MineSettings, resolve_layers
from .data import Example
from .grading import grade
from .memory import fit

if TYPE_CHECKING:
    from .config import EsmSettings

Floats = np.ndarray[Any, np.dtype[np.float32]]
Log = Callable[[str], None]
NO_CONTRAST = 1e-4
"""Minimum relative difference of the means; below it the texts are the same, and there is no direction."""


@dataclass
class MinedRollout:
    """One sampled answer to a question."""

    k: int
    """Index of the sample; −1 is the reference solution."""
    text: str = ""
    gen_tokens: int = 0
    pred: str | None = None
    correct: bool = False
    reward: float = 0.0
    states: list[Floats] = field(default_factory=list)
    """Hidden states of the last token at each control point, [layers, width]."""


@dataclass(frozen=True)
class ContrastPair:
    """Correct versus incorrect rollouts of one question, at one control point and layer."""

    m: int
    layer: int
    quality: float
    """Q: mean reward of the correct minus that of the incorrect rollouts."""
    r_pos_mean: float
    r_neg_mean: float
    n_pos: int
    n_neg: int
    right: Floats
    wrong: Floats


def row_seed(*parts: object) -> int:
    """Hash the parts to a seed."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "big")


def sample_rollouts(
    backend: Backend, settings: EsmSettings, examples: Sequence[Example], layers: Sequence[int]
) -> list[list[MinedRollout]]:
    """Sample K answers to each question, with their hidden states at every control point."""
    mining = settings.offline_mine
    texts = [backend.apply_chat_template(prompts.render(settings.prompt.template, example)) for example in examples]
    found = [[MinedRollout(k) for k in range(mining.K)] for _ in examples]
    rows = [rollout for group in found for rollout in group]
    seeds = [row_seed(settings.seed, example.fingerprint, k) for example in examples for k in range(mining.K)]
    session = backend.start_session([text for text in texts for _ in range(mining.K)], seeds)
    try:
        _sample(session, settings, rows, layers)
    finally:
        session.close()
    for example, group in zip(examples, found, strict=True):
        for rollout in group:
            rollout.pred, rollout.correct = grade(rollout.text, example)
            rollout.reward = float(rollout.correct) - mining.eta0 * rollout.gen_tokens / mining.max_new_tokens
    if mining.pos_source != "rollout":
        _add_gold(backend, settings, examples, texts, found, layers)
    return found


def _sample(
    session: GenerationSession, settings: EsmSettings, rows: Sequence[MinedRollout], layers: Sequence[int]
) -> None:
    """Sample segment by segment; after each delimiter the hidden states are available without recomputation."""
    mining, points = settings.offline_mine, settings.control_points
    sampling = SamplingParams(mining.max_new_tokens, mining.temperature, mining.top_p)
    active = list(range(len(rows)))
    for segment in range(1, points.M + 1):
        # Segment M is the last one that is steered, by the state at the end of M − 1; the rest needs no delimiters.
        until = points.segment_delimiter if segment < points.M else None
        limits = [mining.max_new_tokens - rows[row].gen_tokens for row in active]
        completions = session.generate(active, limits, [None] * len(active), until, sampling)
        unfinished = []
        for row, completion in zip(active, completions, strict=True):
            rows[row].gen_tokens += len(completion.tokens)
            if completion.finish == "delimiter" and rows[row].gen_tokens < mining.max_new_tokens:
                unfinished.append(row)
        active = unfinished
        if not active:
            break
        for row, state in zip(active, session.hidden_states(active, layers), strict=True):
            rows[row].states.append(state.copy())
    for row, rollout in enumerate(rows):
        rollout.text = session.text(row)


def _add_gold(
    backend: Backend, settings: EsmSettings, examples: Sequence[Example], texts: Sequence[str],
    found: list[list[MinedRollout]], layers: Sequence[int],
) -> None:  # fmt: skip
    """Add the reference solution as one more correct answer, with the hidden states of a model that reads it."""
    delimiter, most = settings.control_points.segment_delimiter, settings.control_points.M - 1
    prefixes: list[str] = []
    owners: list[MinedRollout] = []
    for example, text, group in zip(examples, texts, found, strict=True):
        if not example.solution:
            continue
        solution = example.solution
        if delimiter not in solution:  # use its lines as segments
            solution = delimiter.join(line for line in solution.splitlines() if line.strip())
        # Estimate its length in tokens from the rollouts; it matters little, because eta0 is small.
        letters = sum(len(rollout.text) for rollout in group)
        tokens = round(len(solution) * sum(rollout.gen_tokens for rollout in group) / letters) if letters else 0
        reward = 1.0 - settings.offline_mine.eta0 * tokens / settings.offline_mine.max_new_tokens
        gold = MinedRollout(-1, solution, tokens, example.gold, True, reward)
        group.append(gold)
        segments = solution.split(delimiter)
        for m in range(1, min(len(segments), most + 1)):
            prefixes.append(text + delimiter.join(segments[:m]) + delimiter)
            owners.append(gold)
    if not prefixes:
        return
    session = backend.start_session(prefixes, [0] * len(prefixes))
    try:
        for owner, state in zip(owners, session.hidden_states(range(len(prefixes)), layers), strict=True):
            owner.states.append(state.copy())
    finally:
        session.close()


def contrast(group: Sequence[MinedRollout], mining: MineSettings) -> tuple[list[MinedRollout], list[MinedRollout]]:
    """Return the positives and negatives of a question; empty lists if there is no contrast."""
    sampled = [rollout for rollout in group if rollout.k >= 0]
    gold = [rollout for rollout in group if rollout.k < 0]
    right = [rollout for rollout in sampled if rollout.correct]
    if mining.pos_source == "gold" or (mining.pos_source == "rollout_or_gold" and not right):
        right = gold
    elif len(right) < mining.min_correct_rollouts:
        return [], []
    wrong = [rollout for rollout in sampled if not rollout.correct]
    if not mining.require_correct_and_incorrect and not (right and wrong):
        order = sorted(sampled, key=lambda rollout: (-rollout.reward, rollout.k))
        half = len(order) // 2
        right, wrong = order[:half], order[half:]
    if not (right and wrong):
        return [], []
    right.sort(key=lambda rollout: (-rollout.reward, rollout.k))
    wrong.sort(key=lambda rollout: (rollout.reward, rollout.k))
    return right[: mining.K_pos], wrong[: mining.K_neg]


def contrast_pairs(
    group: Sequence[MinedRollout], mining: MineSettings, layers: Sequence[int]
) -> Iterator[ContrastPair]:
    """Yield the pairs of a question with Q > 0 and different states, by control point and layer."""
    positives, negatives = contrast(group, mining)
    for m in range(1, 1 + max((len(rollout.states) for rollout in positives), default=0)):
        right = [rollout for rollout in positives if len(rollout.states) >= m]
        wrong = [rollout for rollout in negatives if len(rollout.states) >= m]
        if not wrong:
            break
        r_pos = float(np.mean([rollout.reward for rollout in right]))
        r_neg = float(np.mean([rollout.reward for rollout in wrong]))
        if r_pos <= r_neg:
            continue
        plus, minus = (_mean([rollout.states[m - 1] for rollout in group]) for group in (right, wrong))
        for place, layer in enumerate(layers):
            if np.linalg.norm(plus[place] - minus[place]) > NO_CONTRAST * np.linalg.norm(plus[place]):
                counts = (len(right), len(wrong))
                yield ContrastPair(m, layer, r_pos - r_neg, r_pos, r_neg, *counts, plus[place], minus[place])


def _mean(states: Sequence[Floats]) -> Floats:
    return np.asarray(np.stack(states).mean(axis=0, dtype=np.float64), dtype=np.float32)


def run(
    settings: EsmSettings, backend: Backend, examples: Sequence[Example], run_dir: Path, log: Log = print
) -> dict[str, Any]:
    """Mine all questions into mine/, resuming an interrupted run."""
    folder = run_dir / "mine"
    mining = settings.offline_mine
    if not examples:
        raise LabError("no questions to mine", hint="check task.train_split and task.max_train_examples")
    layers = resolve_layers(mining.candidate_layers, backend.n_layers)
    plan = _plan(settings, backend, examples)
    _check_plan(folder, plan)
    if (folder / "candidates.jsonl").is_file():
        log("mine: already complete")
        return dict(files.read_json(folder / "meta.json")["counts"])
    batches = [
        examples[i : i + mining.batch_size_examples] for i in range(0, len(examples), mining.batch_size_examples)
    ]
    shards = [folder / "shards" / f"{number:05d}.safetensors" for number in range(len(batches))]
    # The shards are authoritative: rollouts.jsonl is rewritten from them after a kill.
    done = [shard for shard in shards if shard.is_file()]
    lines = [line for shard in done for line in files.read_note(shard)["rollouts"]]
    files.atomic_write(folder / "rollouts.jsonl", files.to_jsonl(lines))
    if done:
        log(f"mine: {len(done)} of {len(batches)} batches done, resuming")
    for number, (batch, shard) in enumerate(zip(batches, shards, strict=True)):
        if shard.is_file():
            continue
        found = sample_rollouts(backend, settings, batch, layers)
        note = _write_shard(shard, settings, batch, found, layers)
        files.append_jsonl(folder / "rollouts.jsonl", note["rollouts"])
        right = np.mean([rollout.correct for group in found for rollout in group if rollout.k >= 0])
        log(f"mine: batch {number + 1}/{len(batches)}, {right:.0%} of rollouts correct, {len(note['pairs'])} pairs")
    counts = finalize(folder, shards, settings, plan | {"layers": list(layers), "fit": fit(settings, backend)})
    shutil.rmtree(folder / "shards")
    return counts


def _plan(settings: EsmSettings, backend: Backend, examples: Sequence[Example]) -> dict[str, Any]:
    plain = settings.plain()
    counted = {name: plain[name] for name in ("seed", "prompt", "control_points", "offline_mine")}
    mined = [example.fingerprint for example in examples]
    return {"fingerprint": files.digest([counted, backend.fingerprint, mined]), "mined": mined}


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Raise LabError if the folder contains another run."""
    file = folder / "plan.json"
    if not file.is_file():
        files.write_json(file, plan)
    elif files.read_json(file)["fingerprint"] != plan["fingerprint"]:
        raise LabError(
            "this folder contains a run with other settings, questions or another model", file=folder,
            hint="use another run folder, or delete this one",
        )  # fmt: skip


def _write_shard(
    shard: Path,
    settings: EsmSettings,
    batch: Sequence[Example],
    found: Sequence[Sequence[MinedRollout]],
    layers: Sequence[int],
) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    right: list[Floats] = []
    wrong: list[Floats] = []
    for example, group in zip(batch, found, strict=True):
        for rollout in group:
            source = "gold" if rollout.k < 0 else "rollout"
            lines.append({
                "task": settings.task.dataset, "example_id": example.id, "k": rollout.k, "source": source,
                "reward": rollout.reward, "correct": rollout.correct, "pred": rollout.pred, "gold": example.gold,
                "gen_tokens": rollout.gen_tokens, "text": rollout.text,
            })  # fmt: skip
        for pair in contrast_pairs(group, settings.offline_mine, layers):
            rows.append({
                "layer": pair.layer, "control_point_m": pair.m, "quality": pair.quality, "reward_gap": pair.quality,
                "r_pos_mean": pair.r_pos_mean, "r_neg_mean": pair.r_neg_mean, "n_pos": pair.n_pos, "n_neg": pair.n_neg,
                "task": settings.task.dataset, "example_id": example.id,
            })  # fmt: skip
            right.append(pair.right)
            wrong.append(pair.wrong)
    note = {"rollouts": lines, "pairs": rows}
    empty = np.zeros((0, 1), dtype=np.float32)
    files.write_arrays(
        shard, {"right": np.stack(right) if right else empty, "wrong": np.stack(wrong) if wrong else empty}, note
    )
    return note


def finalize(folder: Path, shards: Sequence[Path], settings: EsmSettings, meta: dict[str, Any]) -> dict[str, Any]:
    """Write the keep_top_C best pairs of all shards. Ties: by question, control point, layer."""
    notes = [files.read_note(shard) for shard in shards]
    order = [(number, place) for number, note in enumerate(notes) for place in range(len(note["pairs"]))]
    # Shards list their pairs by question, control point, layer, and the sort is stable.
    order.sort(key=lambda where: -notes[where[0]]["pairs"][where[1]]["quality"])
    order = order[: settings.offline_mine.keep_top_C]
    arrays = {number: files.read_arrays(shards[number]) for number in sorted({number for number, _ in order})}
    rows: list[dict[str, Any]] = []
    keys: dict[str, Floats] = {}
    vectors: dict[str, Floats] = {}
    for pair_id, (number, place) in enumerate(order):
        pair = notes[number]["pairs"][place]
        right, wrong = arrays[number]["right"][place], arrays[number]["wrong"][place]
        stem = f"pair_{pair_id:05d}"
        for side, key in (("wrong", wrong), ("right", right)):
            name = f"{stem}_L{pair['layer']}_m{pair['control_point_m']:02d}_{side}"
            keys[name] = key
            if side == "wrong":
                vectors[name] = right - wrong
            rows.append({
                "tool_id": name, "tool_name": f"{stem}_{side}", "entry_type": side, "key_path": "keys.safetensors",
                "vector_path": "vectors.safetensors" if side == "wrong" else None, "pair_id": pair_id, **pair,
            })  # fmt: skip
    sampled = [line for note in notes for line in note["rollouts"] if line["k"] >= 0]
    counts = {
        "questions": len(meta["mined"]),
        "rollouts": len(sampled),
        "rollout_accuracy": round(sum(line["correct"] for line in sampled) / len(sampled), 4),
        "with_contrast": len({pair["example_id"] for note in notes for pair in note["pairs"]}),
        "pairs": sum(len(note["pairs"]) for note in notes),
        "kept": len(order),
    }
    files.write_arrays(folder / "keys.safetensors", keys)
    files.write_arrays(folder / "vectors.safetensors", vectors)
    files.write_json(folder / "meta.json", {**meta, "counts": counts, "task": settings.task.model_dump(mode="json")})
    files.atomic_write(folder / "candidates.jsonl", files.to_jsonl(rows))  # last: marks the stage as complete
    return counts
