"""Answer held-out questions with every method, resumably, and count how often the test set was read.

All choices are made on dev. The test set is read once per config: `test_reads.jsonl`, next to the runs, has a line for
each reading, written before the first answer. The same config again is the same reading, and its stored answers are
used; another config is a new reading, and all tables show the count.

The rounding of an answer depends on its batch, so a resumed evaluation forms the same batches: if one answer of a batch
is missing, the whole batch is decoded, and only the missing answers are recorded.

Greedy decoding is deterministic, so `eval.seeds` applies only to what is random: the two controls that sample
directions or permutations, and every method if decode.temperature is above 0.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from looplab.errors import LabError

from . import files, memory, prompts
from .backends.base import Backend, SamplingParams
from .config import EsmSettings
from .data import Example
from .grading import grade
from .memory import Memory
from .mine import row_seed
from .online import Controller, GeneratedAnswer, make_controller, solve

Log = Callable[[str], None]
Row = dict[str, Any]
RANDOM = ("random_direction", "shuffled_retrieval")
"""Controls with their own randomness."""
PLAIN = ("greedy", "majority", "prompt")
"""Methods without a memory."""
CODE = ("online.py", "memory.py", "grading.py", "prompts.py", "backends/*.py")
"""Source files that affect the answers."""


@dataclass(frozen=True)
class Method:
    """A method with one seed."""

    name: str
    """`greedy`, `esm`, a rival or an ablation."""
    seed: int
    first: bool = True
    """Whether it is the first of its seeds."""

    def tag(self, t_max: int, prefix: str = "") -> str:
        """Return the name of its folder in eval/."""
        name = "ESM" if self.name == "esm" else self.name
        return f"{prefix}{name}_T{t_max}" + ("" if self.first else f"_s{self.seed}")


@dataclass
class Report:
    """All answers of one evaluation."""

    split: str
    examples: Sequence[Example]
    t_max: int
    rows: dict[str, list[list[Row]]] = field(default_factory=dict)
    """By method: [seed][question]."""
    test_reads: int = 0
    """Number of this reading of the test set; 0 on dev."""
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds per question, by method; of the questions that were answered in this folder."""

    def correct(self, name: str) -> list[list[bool]]:
        return [[bool(row["correct"]) for row in rows] for rows in self.rows[name]]

    def accuracy(self, name: str) -> float:
        answers = [right for rows in self.correct(name) for right in rows]
        return sum(answers) / len(answers)


def requested_methods(settings: EsmSettings, names: Sequence[str] | None = None) -> list[Method]:
    """Return the methods of the config, once for every seed that makes a difference."""
    methods = list(dict.fromkeys(names or [*settings.eval.methods, *settings.eval.ablations]))
    found = []
    for name in methods:
        varies = (
            settings.decode.temperature > 0
            or name in (*RANDOM, "majority")
            or (name == "esm" and settings.online.variant in RANDOM)
        )
        seeds = list(dict.fromkeys(settings.eval.seeds)) if varies else settings.eval.seeds[:1]
        found += [Method(name, seed, place == 0) for place, seed in enumerate(seeds)]
    return found


def artifact_dir(settings: EsmSettings, run_dir: Path) -> Path:
    """Return the run folder whose memory is used: eval.artifact_run_dir (resolving `latest`), or this one."""
    named = settings.eval.artifact_run_dir
    if named is None:
        return run_dir
    path = Path(named)
    if path.name == "latest":
        pointer = path.parent / "LATEST"
        if not pointer.is_file() or not (name := pointer.read_text().strip()):
            raise LabError(
                f"eval.artifact_run_dir is {named}, but no run there is complete", file=pointer,
                hint="run looplab stage --config CONFIG mine select memory",
            )  # fmt: skip
        path = path.parent / name
    return path


def load_memory(
    settings: EsmSettings, backend: Backend, examples: Sequence[Example], run_dir: Path
) -> tuple[Memory, str]:
    """Load the memory; return it and its hash. Raises LabError if it does not fit or a question was mined for it."""
    folder = artifact_dir(settings, run_dir) / "memory"
    found, meta = memory.load(folder)
    memory.check_fit(meta, settings, backend, folder)
    memory.check_not_mined(meta, {example.fingerprint: example.id for example in examples}, folder)
    parts = ("keys.npy", "vectors.safetensors", "entries.jsonl", "means.safetensors")
    return found, files.digest_files(folder / name for name in parts if (folder / name).exists())


def run(
    settings: EsmSettings, backend: Backend, examples: Sequence[Example], run_dir: Path, *,
    split: Literal["dev", "test"], methods: Sequence[Method], prefix: str = "", log: Log = print,
    after_batch: Callable[[Report], None] | None = None, own: Mapping[str, EsmSettings] | None = None,
) -> Report:  # fmt: skip
    """Answer all questions with all methods, resuming if possible. `own`: other settings, by method."""
    given = {method: (own or {}).get(method.name, settings) for method in methods}
    if not examples:
        raise LabError(f"no questions to evaluate on {split}")
    loaded_memory, memory_hash = None, ""
    if any(method.name not in PLAIN for method in methods):
        loaded_memory, memory_hash = load_memory(settings, backend, examples, run_dir)
    t_max = settings.decode.max_new_tokens
    report = Report(split, examples, t_max)
    fingerprints = {method: answer_fingerprint(given[method], backend, method, memory_hash) for method in methods}
    folders = {method: run_dir / "eval" / method.tag(t_max, prefix) for method in methods}
    questions = [[example.id, example.fingerprint, example.gold] for example in examples]
    fingerprint = files.digest([sorted(fingerprints.values()), questions])
    if split == "test":
        _copy_answers(settings, fingerprint, run_dir, folders.values())
    done = {method: _stored_answers(folders[method], fingerprints[method]) for method in methods}
    if prefix:  # the same answers may exist without the prefix
        for method in methods:
            _reuse_answers(
                examples, done[method], folders[method], run_dir / "eval" / method.tag(t_max), fingerprints[method]
            )
    if replaced := os.environ.get("LOOPLAB_PREVIOUS"):  # a larger evaluation extends the one that it replaces
        for method in methods:
            other = Path(replaced) / "eval" / method.tag(t_max, prefix)
            _reuse_answers(examples, done[method], folders[method], other, fingerprints[method])
    if split == "test":
        complete = all(example.id in rows for rows in done.values() for example in examples)
        report.test_reads = _count_test_read(settings, fingerprint, run_dir, complete, log)
    controllers = {method: _controller(given[method], loaded_memory, method, backend) for method in methods}
    size = settings.online.batch_size_examples
    # All methods batch by batch, so that partial results can be compared at any time.
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        for method in methods:
            if all(example.id in done[method] for example in batch):
                continue
            start_time = time.process_time()
            rows = _answer(given[method], backend, batch, method, controllers[method])
            spent = {"questions": len(batch), "cpu_seconds": time.process_time() - start_time}
            files.read_jsonl(folders[method] / "seconds.jsonl", repair=True)
            files.append_jsonl(folders[method] / "seconds.jsonl", [spent])
            missing = [row for row in rows if row["example_id"] not in done[method]]
            files.append_jsonl(folders[method] / "per_example.jsonl", missing)
            done[method] |= {row["example_id"]: row for row in missing}
        seen = examples[: start + size]
        report.rows = {}
        for method in methods:
            report.rows.setdefault(method.name, []).append([done[method][example.id] for example in seen])
        if after_batch is not None:
            after_batch(report)
        accuracies = ", ".join(f"{name} {report.accuracy(name):.3f}" for name in report.rows)
        log(f"{split}: {len(seen)}/{len(examples)} questions, {accuracies}")
    for method in methods:
        rows = [done[method][example.id] for example in examples]
        accuracy = sum(row["correct"] for row in rows) / len(rows)
        summary = {"n": len(rows), "acc": accuracy, "T_max": t_max}
        files.atomic_write(folders[method] / "summary.jsonl", files.to_jsonl([summary]))
    for name in report.rows:
        spent_rows = [row for one in methods if one.name == name for row in _seconds(folders[one])]
        if spent_rows:
            asked = sum(row["questions"] for row in spent_rows)
            report.seconds[name] = sum(row["cpu_seconds"] for row in spent_rows) / asked
    if split == "test":
        results = {name: report.accuracy(name) for name in report.rows}
        _record_reading(settings, {"event": "done", "fingerprint": fingerprint, "results": results})
    return report


def answer_fingerprint(settings: EsmSettings, backend: Backend, method: Method, memory_hash: str) -> str:
    """Return the fingerprint of everything that an answer of this method depends on, besides the question.

    The batch size is excluded: it changes an answer only if two tokens are equally likely up to rounding, and a smaller
    batch size after running out of memory is not a new reading of the test set.
    """
    plain = settings.plain()
    counted = {name: plain[name] for name in ("seed", "prompt", "decode", "control_points")}
    counted |= {"name": method.name, "seed": method.seed}
    if method.name == "majority":
        counted |= {"votes": [plain["eval"]["vote_samples"], plain["eval"]["vote_temperature"]]}
    elif method.name == "prompt":
        counted |= {"line": plain["eval"]["prompt_line"]}
    elif method.name != "greedy":
        online = {key: value for key, value in plain["online"].items() if key != "batch_size_examples"}
        counted |= {"online": online, "memory": memory_hash}
    here = Path(__file__).parent
    code = files.digest_files(file for pattern in CODE for file in here.glob(pattern))
    return files.digest([counted, backend.fingerprint, code])


def _seconds(folder: Path) -> list[Row]:
    return files.read_jsonl(folder / "seconds.jsonl")


def _stored_answers(folder: Path, fingerprint: str) -> dict[str, Row]:
    """Return the stored answers by question; answers with another fingerprint are deleted."""
    file = folder / "plan.json"
    if not file.is_file() or files.read_json(file)["fingerprint"] != fingerprint:
        shutil.rmtree(folder, ignore_errors=True)
        files.write_json(file, {"fingerprint": fingerprint})
    return {row["example_id"]: row for row in files.read_jsonl(folder / "per_example.jsonl", repair=True)}


def _reuse_answers(
    examples: Sequence[Example], done: dict[str, Row], folder: Path, other: Path, fingerprint: str
) -> None:
    """Copy answers from another folder with the same fingerprint."""
    if (other / "plan.json").is_file() and files.read_json(other / "plan.json")["fingerprint"] == fingerprint:
        methods = {example.id for example in examples} - set(done)
        rows = [row for row in files.read_jsonl(other / "per_example.jsonl") if row["example_id"] in methods]
        files.append_jsonl(folder / "per_example.jsonl", rows)
        done |= {row["example_id"]: row for row in rows}


def _controller(
    settings: EsmSettings, loaded_memory: Memory | None, method: Method, backend: Backend
) -> Controller | None:
    if method.name in PLAIN or loaded_memory is None:
        return None
    variant = settings.online.variant if method.name == "esm" else method.name
    return make_controller(settings, loaded_memory, variant, backend.n_layers, row_seed(settings.seed, method.seed))


def _answer(
    settings: EsmSettings, backend: Backend, examples: Sequence[Example], method: Method, controller: Controller | None
) -> list[Row]:
    decode, points = settings.decode, settings.control_points
    if method.name == "majority":
        return _vote(settings, backend, examples, method)
    if method.name == "prompt":
        line = settings.eval.prompt_line
        return _answer(
            settings, backend, [replace(one, question=f"{one.question} {line}") for one in examples],
            Method("greedy", method.seed), None,
        )  # fmt: skip
    texts = [backend.apply_chat_template(prompts.render(settings.prompt.template, example)) for example in examples]
    seeds = [row_seed(settings.seed, method.seed, "eval", example.fingerprint) for example in examples]
    sampling = SamplingParams(decode.max_new_tokens, decode.temperature, decode.top_p)
    answers = solve(backend, texts, seeds, sampling, points.segment_delimiter, points.M, controller)
    return [_row(settings, example, answer) for example, answer in zip(examples, answers, strict=True)]


def _vote(settings: EsmSettings, backend: Backend, examples: Sequence[Example], method: Method) -> list[Row]:
    """Sample answers to each question; the most frequent one counts, the first of them if several are."""
    samples, points = settings.eval.vote_samples, settings.control_points
    texts = [backend.apply_chat_template(prompts.render(settings.prompt.template, example)) for example in examples]
    seeds = [
        row_seed(settings.seed, method.seed, "vote", example.fingerprint, sample)
        for example in examples
        for sample in range(samples)
    ]
    sampling = SamplingParams(settings.decode.max_new_tokens, settings.eval.vote_temperature, settings.decode.top_p)
    repeated = [text for text in texts for _ in range(samples)]
    answers = solve(backend, repeated, seeds, sampling, points.segment_delimiter, points.M, None)
    rows = []
    for place, example in enumerate(examples):
        given = [_row(settings, example, answer) for answer in answers[place * samples : (place + 1) * samples]]
        counts = Counter(row["pred"] for row in given if row["pred"] is not None)
        winner = max(counts, key=lambda pred: counts[pred]) if counts else None  # the first of equals
        chosen = next(row for row in given if row["pred"] == winner)
        tokens = sum(row["tokens_used"] for row in given)
        rows.append({
            **chosen, "tokens_used": tokens, "budget_used": tokens,
            "votes": [{"pred": row["pred"], "tokens_used": row["tokens_used"]} for row in given],
        })  # fmt: skip
    return rows


def _row(settings: EsmSettings, example: Example, answer: GeneratedAnswer) -> Row:
    pred, correct = grade(answer.text, example)
    row: Row = {
        "task": settings.task.dataset, "example_id": example.id, "pred": pred, "gold": example.gold,
        "correct": correct, "tokens_used": answer.tokens_used,
        "budget_used": answer.tokens_used + answer.probe_tokens_used,
        "probe_tokens_used": answer.probe_tokens_used, "finish_reason": answer.finish_reason,
        "tokens_hash": files.digest(answer.tokens), "text": answer.text, "steps": answer.steps,
    }  # fmt: skip
    if settings.decode.logprobs:
        row["mean_logprob"] = answer.logprob_sum / max(1, answer.tokens_used)
    return row


# ------------------------------------------------------------------------------------------- readings of the test set


def reads_file(settings: EsmSettings) -> Path:
    return Path(settings.outputs.root_dir) / settings.outputs.run_name / "test_reads.jsonl"


def _copy_answers(settings: EsmSettings, fingerprint: str, run_dir: Path, folders: Iterable[Path]) -> None:
    """Copy the answers of the same reading in another run."""
    for line in files.read_jsonl(reads_file(settings)):
        if line["event"] == "begin" and line["fingerprint"] == fingerprint:
            for folder in folders:
                source = Path(line["run_dir"]) / "eval" / folder.name
                if not folder.exists() and (source / "summary.jsonl").is_file():
                    shutil.copytree(source, folder)


def _count_test_read(settings: EsmSettings, fingerprint: str, run_dir: Path, complete: bool, log: Log) -> int:
    """Return the number of this reading of the test set. Complete answers and resumed readings are not new readings."""
    with _locked(reads_file(settings)) as file:
        begun = [line for line in files.read_jsonl(file, repair=True) if line["event"] == "begin"]
        same = [line for line in begun if line["fingerprint"] == fingerprint]
        if same or (complete and begun):
            reading = int(same[0]["reading"]) if same else len(begun)
            log(f"test: no new reading; these are answers of reading {reading}")
            return reading
        plain = settings.plain()
        what = {name: plain[name] for name in ("seed", "task", "decode", "online", "eval")}
        reading = len(begun) + 1
        line = {"event": "begin", "fingerprint": fingerprint, "reading": reading, "run_dir": str(run_dir.resolve())}
        files.append_jsonl(file, [{**line, "time": time.time(), "what": what}])
    if reading > 1:
        log(f"test: this is reading {reading} of the test set; a result selected on it is not a test result")
    return reading


def _record_reading(settings: EsmSettings, line: Row) -> None:
    with _locked(reads_file(settings)) as file:
        if line not in files.read_jsonl(file, repair=True):
            files.append_jsonl(file, [line])


@contextmanager
def _locked(file: Path) -> Iterator[Path]:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(descriptor)
