"""Stage I: several sampled answers to each question; where right and wrong ones part, the difference of their states.

Questions are sampled in fixed batches. A finished batch is one shard, written whole: the rollouts, and for each
control point and layer the mean state of the right answers and of the wrong ones. A killed mining goes on at the first
batch that has no shard, so no finished question is sampled twice; the candidates are a function of the shards alone.
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
from .backends.base import Backend, Sampling, Session
from .config import MineSettings, resolve_layers
from .data import Example
from .grading import grade
from .memory import fit

if TYPE_CHECKING:
    from .config import Settings

Floats = np.ndarray[Any, np.dtype[np.float32]]
Say = Callable[[str], None]
NO_CONTRAST = 1e-4
"""Means that differ by less than this share of their length come from the same text: there is no direction in it."""


@dataclass
class Rollout:
    """One answer to one question."""

    k: int
    """Its number; −1 is the written solution."""
    text: str = ""
    gen_tokens: int = 0
    pred: str | None = None
    correct: bool = False
    reward: float = 0.0
    states: list[Floats] = field(default_factory=list)
    """For each control point that it has: the states of the last token, [layers, width]."""


@dataclass(frozen=True)
class Pair:
    """Right against wrong for one question, at one control point and layer."""

    m: int
    layer: int
    quality: float
    """Q: mean reward of the right ones minus that of the wrong ones."""
    r_pos_mean: float
    r_neg_mean: float
    n_pos: int
    n_neg: int
    right: Floats
    wrong: Floats


def row_seed(*parts: object) -> int:
    """A seed that depends on these parts alone."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "big")


def rollouts(
    backend: Backend, settings: Settings, examples: Sequence[Example], layers: Sequence[int]
) -> list[list[Rollout]]:
    """K sampled answers to each question, with their states at every control point."""
    wanted = settings.offline_mine
    texts = [backend.wrap(prompts.render(settings.prompt.template, example)) for example in examples]
    found = [[Rollout(k) for k in range(wanted.K)] for _ in examples]
    rows = [one for several in found for one in several]
    seeds = [row_seed(settings.seed, example.fingerprint, k) for example in examples for k in range(wanted.K)]
    session = backend.open([text for text in texts for _ in range(wanted.K)], seeds)
    try:
        _sample(session, settings, rows, layers)
    finally:
        session.close()
    for example, several in zip(examples, found, strict=True):
        for one in several:
            one.pred, one.correct = grade(one.text, example)
            one.reward = float(one.correct) - wanted.eta0 * one.gen_tokens / wanted.max_new_tokens
    if wanted.pos_source != "rollout":
        _add_gold(backend, settings, examples, texts, found, layers)
    return found


def _sample(session: Session, settings: Settings, rows: Sequence[Rollout], layers: Sequence[int]) -> None:
    """Segment by segment: after each delimiter the state is at hand, nothing is computed twice."""
    wanted, points = settings.offline_mine, settings.control_points
    sampling = Sampling(wanted.max_new_tokens, wanted.temperature, wanted.top_p)
    live = list(range(len(rows)))
    for segment in range(1, points.M + 1):
        # The last segment that is steered is M, by the state at the end of M − 1; the rest needs no borders.
        until = points.segment_delimiter if segment < points.M else None
        limits = [wanted.max_new_tokens - rows[row].gen_tokens for row in live]
        pieces = session.generate(live, limits, [None] * len(live), until, sampling)
        going = []
        for row, piece in zip(live, pieces, strict=True):
            rows[row].gen_tokens += len(piece.tokens)
            if piece.finish == "delimiter" and rows[row].gen_tokens < wanted.max_new_tokens:
                going.append(row)
        live = going
        if not live:
            break
        for row, state in zip(live, session.states(live, layers), strict=True):
            rows[row].states.append(state.copy())
    for row, one in enumerate(rows):
        one.text = session.text(row)


def _add_gold(
    backend: Backend, settings: Settings, examples: Sequence[Example], texts: Sequence[str],
    found: list[list[Rollout]], layers: Sequence[int],
) -> None:  # fmt: skip
    """The written solution as one more right answer: its states are those of a model that has read it so far."""
    delimiter, most = settings.control_points.segment_delimiter, settings.control_points.M - 1
    prefixes: list[str] = []
    owners: list[Rollout] = []
    for example, text, several in zip(examples, texts, found, strict=True):
        if not example.solution:
            continue
        solution = example.solution
        if delimiter not in solution:  # written line by line: its lines are its segments
            solution = delimiter.join(line for line in solution.splitlines() if line.strip())
        # Its length in tokens is estimated from the model's own answers; it matters little, as eta0 is small.
        letters = sum(len(one.text) for one in several)
        tokens = round(len(solution) * sum(one.gen_tokens for one in several) / letters) if letters else 0
        reward = 1.0 - settings.offline_mine.eta0 * tokens / settings.offline_mine.max_new_tokens
        gold = Rollout(-1, solution, tokens, example.gold, True, reward)
        several.append(gold)
        segments = solution.split(delimiter)
        for m in range(1, min(len(segments), most + 1)):
            prefixes.append(text + delimiter.join(segments[:m]) + delimiter)
            owners.append(gold)
    if not prefixes:
        return
    session = backend.open(prefixes, [0] * len(prefixes))
    try:
        for owner, state in zip(owners, session.states(range(len(prefixes)), layers), strict=True):
            owner.states.append(state.copy())
    finally:
        session.close()


def contrast(several: Sequence[Rollout], wanted: MineSettings) -> tuple[list[Rollout], list[Rollout]]:
    """The positives and negatives of a question; empty lists if there is nothing to compare."""
    sampled = [one for one in several if one.k >= 0]
    gold = [one for one in several if one.k < 0]
    right = [one for one in sampled if one.correct]
    if wanted.pos_source == "gold" or (wanted.pos_source == "rollout_or_gold" and not right):
        right = gold
    elif len(right) < wanted.min_correct_rollouts:
        return [], []
    wrong = [one for one in sampled if not one.correct]
    if not wanted.require_correct_and_incorrect and not (right and wrong):
        order = sorted(sampled, key=lambda one: (-one.reward, one.k))
        half = len(order) // 2
        right, wrong = order[:half], order[half:]
    if not (right and wrong):
        return [], []
    right.sort(key=lambda one: (-one.reward, one.k))
    wrong.sort(key=lambda one: (one.reward, one.k))
    return right[: wanted.K_pos], wrong[: wanted.K_neg]


def pairs(several: Sequence[Rollout], wanted: MineSettings, layers: Sequence[int]) -> Iterator[Pair]:
    """All pairs of a question with Q > 0 and different states, by control point and layer."""
    positives, negatives = contrast(several, wanted)
    for m in range(1, 1 + max((len(one.states) for one in positives), default=0)):
        right = [one for one in positives if len(one.states) >= m]
        wrong = [one for one in negatives if len(one.states) >= m]
        if not wrong:
            break
        r_pos = float(np.mean([one.reward for one in right]))
        r_neg = float(np.mean([one.reward for one in wrong]))
        if r_pos <= r_neg:
            continue
        plus, minus = (_mean([one.states[m - 1] for one in several]) for several in (right, wrong))
        for place, layer in enumerate(layers):
            if np.linalg.norm(plus[place] - minus[place]) > NO_CONTRAST * np.linalg.norm(plus[place]):
                counts = (len(right), len(wrong))
                yield Pair(m, layer, r_pos - r_neg, r_pos, r_neg, *counts, plus[place], minus[place])


def _mean(states: Sequence[Floats]) -> Floats:
    return np.asarray(np.stack(states).mean(axis=0, dtype=np.float64), dtype=np.float32)


def run(
    settings: Settings, backend: Backend, examples: Sequence[Example], run_dir: Path, say: Say = print
) -> dict[str, Any]:
    """Mine all questions into mine/, or go on with a mining that was interrupted."""
    folder = run_dir / "mine"
    wanted = settings.offline_mine
    if not examples:
        raise LabError("there is no question to mine", hint="look at task.train_split and task.max_train_examples")
    layers = resolve_layers(wanted.candidate_layers, backend.n_layers)
    plan = _plan(settings, backend, examples)
    _check_plan(folder, plan)
    if (folder / "candidates.jsonl").is_file():
        say("mine: complete already")
        return dict(files.read_json(folder / "meta.json")["counts"])
    batches = [
        examples[i : i + wanted.batch_size_examples] for i in range(0, len(examples), wanted.batch_size_examples)
    ]
    shards = [folder / "shards" / f"{number:05d}.safetensors" for number in range(len(batches))]
    # The shards are the truth: what a kill left in rollouts.jsonl is written again from them.
    done = [shard for shard in shards if shard.is_file()]
    lines = [line for shard in done for line in files.read_note(shard)["rollouts"]]
    files.write_whole(folder / "rollouts.jsonl", files.lines_of(lines))
    if done:
        say(f"mine: {len(done)} of {len(batches)} batches are there, going on")
    for number, (batch, shard) in enumerate(zip(batches, shards, strict=True)):
        if shard.is_file():
            continue
        found = rollouts(backend, settings, batch, layers)
        note = _write_shard(shard, settings, batch, found, layers)
        files.append_lines(folder / "rollouts.jsonl", note["rollouts"])
        right = np.mean([one.correct for several in found for one in several if one.k >= 0])
        say(f"mine: batch {number + 1}/{len(batches)}, {right:.0%} of rollouts right, {len(note['pairs'])} pairs")
    counts = finalise(folder, shards, settings, plan | {"layers": list(layers), "fit": fit(settings, backend)})
    shutil.rmtree(folder / "shards")
    return counts


def _plan(settings: Settings, backend: Backend, examples: Sequence[Example]) -> dict[str, Any]:
    plain = settings.plain()
    counted = {name: plain[name] for name in ("seed", "prompt", "control_points", "offline_mine")}
    mined = [example.fingerprint for example in examples]
    return {"fingerprint": files.digest([counted, backend.fingerprint, mined]), "mined": mined}


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Shards of another mining must not mix with this one."""
    file = folder / "plan.json"
    if not file.is_file():
        files.write_json(file, plan)
    elif files.read_json(file)["fingerprint"] != plan["fingerprint"]:
        raise LabError(
            "this folder holds a mining with other settings, questions or model", file=folder,
            hint="use another run folder, or remove this one",
        )  # fmt: skip


def _write_shard(
    shard: Path, settings: Settings, batch: Sequence[Example], found: Sequence[Sequence[Rollout]], layers: Sequence[int]
) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    right: list[Floats] = []
    wrong: list[Floats] = []
    for example, several in zip(batch, found, strict=True):
        for one in several:
            source = "gold" if one.k < 0 else "rollout"
            lines.append({
                "task": settings.task.dataset, "example_id": example.id, "k": one.k, "source": source,
                "reward": one.reward, "correct": one.correct, "pred": one.pred, "gold": example.gold,
                "gen_tokens": one.gen_tokens, "text": one.text,
            })  # fmt: skip
        for pair in pairs(several, settings.offline_mine, layers):
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


def finalise(folder: Path, shards: Sequence[Path], settings: Settings, meta: dict[str, Any]) -> dict[str, Any]:
    """The keep_top_C best pairs of all shards. Equal qualities: the earlier question, control point, layer first."""
    notes = [files.read_note(shard) for shard in shards]
    order = [(number, place) for number, note in enumerate(notes) for place in range(len(note["pairs"]))]
    # A shard holds its pairs by question, control point, layer, and the sort is stable.
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
    files.write_whole(folder / "candidates.jsonl", files.lines_of(rows))  # last: it says that mining is complete
    return counts
