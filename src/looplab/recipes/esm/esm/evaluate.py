"""Answer held-out questions with every method, resumably, and keep account of how often the test set was looked at.

Every choice belongs on dev. The test set is read once for a config: `test_reads.jsonl` beside the runs has a line for
each reading, written before the first answer. The same config again is the same reading, and its stored answers are
used; another config is the next reading, and all tables carry the count.

An answer's rounding depends on the batch it is decoded in, so an interrupted evaluation forms the same batches again:
where one answer of a batch is missing the whole batch is decoded, and only the missing answers are recorded.

Greedy decoding is deterministic, so `eval.seeds` repeats only what is random: the two controls that draw directions
or permutations, and every method if decode.temperature is above 0.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from looplab.errors import LabError

from . import files, memory, prompts
from .backends.base import Backend, Sampling
from .config import Settings
from .data import Example
from .grading import grade
from .memory import Memory
from .mine import row_seed
from .online import Answer, Guide, make_guide, solve

Say = Callable[[str], None]
Row = dict[str, Any]
RANDOM = ("random_direction", "shuffled_retrieval")
"""Controls that draw something of their own."""
CODE = ("online.py", "memory.py", "grading.py", "prompts.py", "backends/*.py")
"""Source whose change may change an answer."""


@dataclass(frozen=True)
class Method:
    """One way to answer, with one seed."""

    name: str
    """`greedy`, `esm` or an ablation."""
    seed: int
    first: bool = True
    """Whether it is the first of its seeds."""

    def tag(self, t_max: int, prefix: str = "") -> str:
        """The name of its folder below eval/."""
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
    """Which reading of the test set this is; 0 on dev."""

    def correct(self, name: str) -> list[list[bool]]:
        return [[bool(row["correct"]) for row in rows] for rows in self.rows[name]]

    def accuracy(self, name: str) -> float:
        answers = [right for rows in self.correct(name) for right in rows]
        return sum(answers) / len(answers)


def methods(settings: Settings, names: Sequence[str] | None = None) -> list[Method]:
    """What the config asks for; each name once for every seed that makes a difference."""
    wanted = list(dict.fromkeys(names or [*settings.eval.methods, *settings.eval.ablations]))
    found = []
    for name in wanted:
        varies = (
            settings.decode.temperature > 0 or name in RANDOM or (name == "esm" and settings.online.variant in RANDOM)
        )
        seeds = list(dict.fromkeys(settings.eval.seeds)) if varies else settings.eval.seeds[:1]
        found += [Method(name, seed, place == 0) for place, seed in enumerate(seeds)]
    return found


def artifact_dir(settings: Settings, run_dir: Path) -> Path:
    """The run folder whose memory is used: eval.artifact_run_dir, through LATEST if it ends so, else this one."""
    named = settings.eval.artifact_run_dir
    if named is None:
        return run_dir
    path = Path(named)
    if path.name == "latest":
        pointer = path.parent / "LATEST"
        if not pointer.is_file() or not (name := pointer.read_text().strip()):
            raise LabError(
                f"eval.artifact_run_dir is {named}, but no run is complete there", file=pointer,
                hint="make the memory first: looplab stage --config CONFIG mine select memory",
            )  # fmt: skip
        path = path.parent / name
    return path


def load_memory(settings: Settings, backend: Backend, examples: Sequence[Example], run_dir: Path) -> tuple[Memory, str]:
    """The memory that the config names, if it fits this model and no question in it is evaluated; and its hash."""
    folder = artifact_dir(settings, run_dir) / "memory"
    found, meta = memory.load(folder)
    memory.check_fit(meta, settings, backend, folder)
    memory.check_apart(meta, {example.fingerprint: example.id for example in examples}, folder)
    return found, files.digest_files([folder / name for name in ("keys.npy", "vectors.safetensors", "entries.jsonl")])


def run(
    settings: Settings, backend: Backend, examples: Sequence[Example], run_dir: Path, *,
    split: Literal["dev", "test"], wanted: Sequence[Method], prefix: str = "", say: Say = print,
    after_batch: Callable[[Report], None] | None = None, own: Mapping[str, Settings] | None = None,
) -> Report:  # fmt: skip
    """Answer all questions with all methods, or what is left of them. `own`: other online settings, by method."""
    given = {method: (own or {}).get(method.name, settings) for method in wanted}
    if not examples:
        raise LabError(f"there is no question to evaluate on {split}")
    held, held_hash = None, ""
    if any(method.name != "greedy" for method in wanted):
        held, held_hash = load_memory(settings, backend, examples, run_dir)
    t_max = settings.decode.max_new_tokens
    report = Report(split, examples, t_max)
    ways = {method: way(given[method], backend, method, held_hash) for method in wanted}
    folders = {method: run_dir / "eval" / method.tag(t_max, prefix) for method in wanted}
    questions = [[example.id, example.fingerprint, example.gold] for example in examples]
    fingerprint = files.digest([sorted(ways.values()), questions])
    if split == "test":
        _take_over(settings, fingerprint, run_dir, folders.values())
    done = {method: _begun(folders[method], ways[method]) for method in wanted}
    if prefix:  # the same answers may be there without it
        for method in wanted:
            _borrow(examples, done[method], folders[method], run_dir / "eval" / method.tag(t_max), ways[method])
    if split == "test":
        complete = all(example.id in rows for rows in done.values() for example in examples)
        report.test_reads = _read_test(settings, fingerprint, run_dir, complete, say)
    guides = {method: _guide(given[method], held, method, backend) for method in wanted}
    size = settings.online.batch_size_examples
    # Batch by batch through all methods, so that a comparison on what is done so far is possible at any time.
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        for method in wanted:
            if all(example.id in done[method] for example in batch):
                continue
            rows = _answer(given[method], backend, batch, method, guides[method])
            missing = [row for row in rows if row["example_id"] not in done[method]]
            files.append_lines(folders[method] / "per_example.jsonl", missing)
            done[method] |= {row["example_id"]: row for row in missing}
        seen = examples[: start + size]
        report.rows = {}
        for method in wanted:
            report.rows.setdefault(method.name, []).append([done[method][example.id] for example in seen])
        if after_batch is not None:
            after_batch(report)
        said = ", ".join(f"{name} {report.accuracy(name):.3f}" for name in report.rows)
        say(f"{split}: {len(seen)}/{len(examples)} questions, {said}")
    for method in wanted:
        rows = [done[method][example.id] for example in examples]
        accuracy = sum(row["correct"] for row in rows) / len(rows)
        summary = {"n": len(rows), "acc": accuracy, "T_max": t_max}
        files.write_whole(folders[method] / "summary.jsonl", files.lines_of([summary]))
    if split == "test":
        results = {name: report.accuracy(name) for name in report.rows}
        _note_reading(settings, {"event": "done", "fingerprint": fingerprint, "results": results})
    return report


def way(settings: Settings, backend: Backend, method: Method, held_hash: str) -> str:
    """The fingerprint of what an answer of this method depends on beside the question.

    The batch is left out: it changes an answer only where two tokens are equally likely up to rounding, and a smaller
    batch size after running out of memory is not another reading of the test set.
    """
    plain = settings.plain()
    counted = {name: plain[name] for name in ("seed", "prompt", "decode", "control_points")}
    counted |= {"name": method.name, "seed": method.seed}
    if method.name != "greedy":
        online = {key: value for key, value in plain["online"].items() if key != "batch_size_examples"}
        counted |= {"online": online, "memory": held_hash}
    here = Path(__file__).parent
    code = files.digest_files(file for pattern in CODE for file in here.glob(pattern))
    return files.digest([counted, backend.fingerprint, code])


def _begun(folder: Path, fingerprint: str) -> dict[str, Row]:
    """The answers that are there already, by question. Those that came about another way are removed."""
    file = folder / "plan.json"
    if not file.is_file() or files.read_json(file)["fingerprint"] != fingerprint:
        shutil.rmtree(folder, ignore_errors=True)
        files.write_json(file, {"fingerprint": fingerprint})
    return {row["example_id"]: row for row in files.read_lines(folder / "per_example.jsonl", repair=True)}


def _borrow(examples: Sequence[Example], done: dict[str, Row], folder: Path, other: Path, fingerprint: str) -> None:
    """Take answers over from another folder if they came about in the same way."""
    if (other / "plan.json").is_file() and files.read_json(other / "plan.json")["fingerprint"] == fingerprint:
        wanted = {example.id for example in examples} - set(done)
        rows = [row for row in files.read_lines(other / "per_example.jsonl") if row["example_id"] in wanted]
        files.append_lines(folder / "per_example.jsonl", rows)
        done |= {row["example_id"]: row for row in rows}


def _guide(settings: Settings, held: Memory | None, method: Method, backend: Backend) -> Guide | None:
    if method.name == "greedy" or held is None:
        return None
    variant = settings.online.variant if method.name == "esm" else method.name
    return make_guide(settings, held, variant, backend.n_layers, row_seed(settings.seed, method.seed))


def _answer(
    settings: Settings, backend: Backend, examples: Sequence[Example], method: Method, guide: Guide | None
) -> list[Row]:
    decode, points = settings.decode, settings.control_points
    texts = [backend.wrap(prompts.render(settings.prompt.template, example)) for example in examples]
    seeds = [row_seed(settings.seed, method.seed, "eval", example.fingerprint) for example in examples]
    sampling = Sampling(decode.max_new_tokens, decode.temperature, decode.top_p)
    answers = solve(backend, texts, seeds, sampling, points.segment_delimiter, points.M, guide)
    return [_row(settings, example, answer) for example, answer in zip(examples, answers, strict=True)]


def _row(settings: Settings, example: Example, answer: Answer) -> Row:
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


def reads_file(settings: Settings) -> Path:
    return Path(settings.outputs.root_dir) / settings.outputs.run_name / "test_reads.jsonl"


def _take_over(settings: Settings, fingerprint: str, run_dir: Path, folders: Iterable[Path]) -> None:
    """Copy the answers of a reading that was the same and lies in another run."""
    for line in files.read_lines(reads_file(settings)):
        if line["event"] == "begin" and line["fingerprint"] == fingerprint:
            for folder in folders:
                source = Path(line["run_dir"]) / "eval" / folder.name
                if not folder.exists() and (source / "summary.jsonl").is_file():
                    shutil.copytree(source, folder)


def _read_test(settings: Settings, fingerprint: str, run_dir: Path, complete: bool, say: Say) -> int:
    """Which reading of the test set this is. Answers that are all there, and a reading begun before, are no new one."""
    with _locked(reads_file(settings)) as file:
        begun = [line for line in files.read_lines(file, repair=True) if line["event"] == "begin"]
        same = [line for line in begun if line["fingerprint"] == fingerprint]
        if same or (complete and begun):
            reading = int(same[0]["reading"]) if same else len(begun)
            say(f"test: no new reading; these are answers of reading {reading}")
            return reading
        plain = settings.plain()
        what = {name: plain[name] for name in ("seed", "task", "decode", "online", "eval")}
        reading = len(begun) + 1
        line = {"event": "begin", "fingerprint": fingerprint, "reading": reading, "run_dir": str(run_dir.resolve())}
        files.append_lines(file, [{**line, "time": time.time(), "what": what}])
    if reading > 1:
        say(f"test: this is reading {reading} of the test set; a result that was chosen by it is no test result")
    return reading


def _note_reading(settings: Settings, line: Row) -> None:
    with _locked(reads_file(settings)) as file:
        if line not in files.read_lines(file, repair=True):
            files.append_lines(file, [line])


@contextmanager
def _locked(file: Path) -> Iterator[Path]:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(descriptor)
