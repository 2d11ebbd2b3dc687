"""Datasets and their splits: train for mining, dev for tuning, test for a single final evaluation.

No two splits share a question (compared ignoring case, spacing and trailing punctuation). Datasets without splits are
split by a seeded hash of the question, so neither the order of a file nor a sample size moves a question from one split
to another. If published files share a few questions, these stay in test and are dropped from train and dev, with a
note; if they share many, that is an error.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from looplab.errors import LabError

from .config import TaskSettings

Kind = Literal["number", "choice", "math", "yesno"]
SplitName = Literal["train", "dev", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "dev", "test")
LETTERS = "ABCDEFGHIJ"
MAX_OVERLAP = 0.02
"""Maximum fraction of questions that published files may share; more is an error in the files."""


@dataclass(frozen=True)
class Example:
    """One question."""

    id: str
    """Unique in its dataset; `test-12` is row 12 of the file `test`, counted from 0."""
    question: str
    gold: str
    """The correct answer: a number, a letter, LaTeX, or yes/no."""
    kind: Kind
    """How answers are extracted and compared."""
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


@dataclass(frozen=True)
class Splits:
    """The three splits of a task."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    notes: tuple[str, ...] = ()
    """Notes for the user, such as dropped questions."""


@dataclass(frozen=True)
class DatasetSource:
    """Files and format of a published dataset."""

    file: str
    """File name with `{split}`; without it, one file contains all questions."""
    example: Callable[[Mapping[str, Any], str], Example]
    """Converts a row and a default id to an example."""
    origin: str
    """Where to get it."""


def load_split(task: TaskSettings, split: SplitName) -> list[Example]:
    """Return one split of the task. Raises LabError if it is empty."""
    found: list[Example] = getattr(splits(task), split)
    if not found:
        raise LabError(
            f"the {split} split of {task.dataset} is empty",
            hint="change task.dev_fraction, task.test_fraction, task.split_seed or the sizes in task.generator",
        )
    return found


def splits(task: TaskSettings) -> Splits:
    """Return all three splits, in the requested sizes, without shared questions."""
    name, _, kind = task.dataset.partition("/")
    if task.dataset == "tiny":
        found = _tiny(task)
    elif name == "reasoning-gym" and kind:
        found = _reasoning_gym(task, kind)
    elif task.dataset in SOURCES:
        found = _published(task, SOURCES[task.dataset])
    else:
        names = [*SOURCES, "reasoning-gym/gsm_symbolic", "tiny"]
        near = difflib.get_close_matches(task.dataset, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
        raise LabError(f"unknown dataset {task.dataset!r} in task.dataset", hint=hint)
    check_disjoint(found)
    most_dev = task.max_dev_examples or task.max_eval_examples
    return Splits(
        _sample(found.train, task.max_train_examples, task.split_seed),
        _sample(found.dev, most_dev, task.split_seed),
        _sample(found.test, task.max_eval_examples, task.split_seed),
        found.notes,
    )


def check_disjoint(parts: Splits) -> None:
    """Raise LabError if two splits share a question."""
    for one, other in (("train", "test"), ("dev", "test"), ("train", "dev")):
        pairs = _shared(getattr(parts, one), getattr(parts, other))
        if pairs:
            mine, theirs = pairs[0]
            raise LabError(
                f"{one} and {other} share {len(pairs)} questions, "
                f"the first {mine.id} = {theirs.id}: {mine.question[:80]!r}",
                hint="questions used for mining or tuning must not be in test",
            )


def _shared(one: Iterable[Example], other: Iterable[Example]) -> list[tuple[Example, Example]]:
    """Return the questions of `one` that are also in `other`, as pairs."""
    twins = {example.fingerprint: example for example in other}
    return [(example, twins[example.fingerprint]) for example in one if example.fingerprint in twins]


def _hash_fraction(seed: int, purpose: str, text: str) -> float:
    """Hash seed and text to a number in [0, 1)."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _sample(examples: list[Example], limit: int | None, seed: int) -> list[Example]:
    """Return a seeded sample in file order; smaller samples are subsets of larger ones."""
    if limit is None or limit >= len(examples):
        return examples
    by_chance = sorted(
        range(len(examples)), key=lambda i: _hash_fraction(seed, "sample", f"{examples[i].fingerprint}/{i}")
    )
    return [examples[i] for i in sorted(by_chance[:limit])]


def _split_off(
    examples: list[Example], fraction: float, seed: int, purpose: str
) -> tuple[list[Example], list[Example]]:
    """Split off about `fraction` of the examples; duplicates and families stay together. Return (rest, split)."""
    chosen = [_hash_fraction(seed, purpose, example.family or example.fingerprint) < fraction for example in examples]
    return (
        [example for example, yes in zip(examples, chosen, strict=True) if not yes],
        [example for example, yes in zip(examples, chosen, strict=True) if yes],
    )


# ---------------------------------------------------------------------------------------------- published files


def _published(task: TaskSettings, source: DatasetSource) -> Splits:
    folder = Path(task.data_root) / task.dataset
    if "{split}" in source.file:
        names = [name for name in (task.train_split, task.dev_split, task.eval_split) if name is not None]
        pools = {name: _read(folder, source, name) for name in names}
    else:
        pools = _divide_file(task, folder, source)
        _check_split_names(task, tuple(pools))
    train, test = pools[task.train_split], pools[task.eval_split]
    notes: list[str] = []
    if task.dev_split is not None:
        dev = _drop_shared(pools[task.dev_split], task.dev_split, test, task.eval_split, notes)
        train = _drop_shared(train, task.train_split, dev, task.dev_split, notes)
        train = _drop_shared(train, task.train_split, test, task.eval_split, notes)
    else:
        train = _drop_shared(train, task.train_split, test, task.eval_split, notes)
        train, dev = _split_off(train, task.dev_fraction, task.split_seed, "dev")
    return Splits(train, dev, test, tuple(notes))


def _drop_shared(
    examples: list[Example], name: str, kept: list[Example], kept_name: str, notes: list[str]
) -> list[Example]:
    """Return `examples` without the questions of `kept`."""
    pairs = _shared(examples, kept)
    if not pairs:
        return examples
    mine, theirs = pairs[0]
    seen = f"{len(pairs)} of {len(examples)} questions of {name} are also in {kept_name}"
    if len(pairs) > MAX_OVERLAP * min(len(examples), len(kept)):
        raise LabError(
            f"{seen}, the first {mine.id} = {theirs.id}: {mine.question[:80]!r}",
            hint="these are not two splits; check the files, and task.train_split, dev_split and eval_split",
        )
    notes.append(f"{seen} and were dropped from {name}: {', '.join(f'{a.id} = {b.id}' for a, b in pairs)}")
    dropped = {mine.id for mine, _ in pairs}
    return [example for example in examples if example.id not in dropped]


def _divide_file(task: TaskSettings, folder: Path, source: DatasetSource) -> dict[str, list[Example]]:
    """Split one file by the rows' `split` field, or by the hash of the question."""
    path = _find(folder, source.file, source)
    rows = list(_rows(path))
    examples = [_example(source, row, f"{path.stem}-{i}", path, i) for i, row in enumerate(rows)]
    given = [next((str(row[key]) for key in row if key.lower() == "split"), None) for row in rows]
    if any(given):
        pools: dict[str, list[Example]] = {}
        for name, example in zip(given, examples, strict=True):
            pools.setdefault(name or "", []).append(example)
        return pools
    train, test = _split_off(examples, task.test_fraction, task.split_seed, "test")
    return {"train": train, "test": test}


def _check_split_names(task: TaskSettings, names: tuple[str, ...]) -> None:
    """Raise LabError if the task refers to other splits."""
    for key in ("train_split", "dev_split", "eval_split"):
        name = getattr(task, key)
        if name is not None and name not in names:
            raise LabError(
                f"task.{key} is {name!r}, but {task.dataset} has {' and '.join(names)}",
                hint="omit dev_split to split the training questions" if key == "dev_split" else None,
            )


def _read(folder: Path, source: DatasetSource, split: str) -> list[Example]:
    path = _find(folder, source.file.format(split=split), source)
    return [_example(source, row, f"{split}-{i}", path, i) for i, row in enumerate(_rows(path))]


def _find(folder: Path, name: str, source: DatasetSource) -> Path:
    found = sorted(folder.rglob(name)) if "*" in name else [path for path in (folder / name,) if path.is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise LabError(f"several files match {name}: {', '.join(map(str, found))}", hint="keep one", file=folder)
    raise LabError(
        f"data not found: {folder / name}",
        hint=f"get {source.origin}; put it there, or set task.data_root to the folder that contains {folder.name}/",
    )


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from pq.read_table(path).to_pylist()
        except pa.ArrowInvalid as error:
            raise LabError(f"this is not a parquet file: {error}", file=path) from None
        return
    try:
        text = path.read_text(encoding="utf-8")
        lines = (
            line for line in text.split("\n") if line.strip()
        )  # not splitlines: texts may contain other separators
        yield from json.loads(text) if path.suffix == ".json" else map(json.loads, lines)
    except ValueError as error:
        raise LabError(f"this is not {path.suffix[1:].upper()}: {error}", file=path) from None


def _example(source: DatasetSource, row: Mapping[str, Any], name: str, path: Path, index: int) -> Example:
    try:
        return source.example(row, name)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LabError(
            f"row {index} does not have the format of this dataset: {type(error).__name__} {error}",
            file=path,
            hint=f"expected {source.origin}",
        ) from None


def _in_segments(text: str) -> str:
    """Separate the lines of a solution by blank lines."""
    return text if "\n\n" in text else re.sub(r"\n+", "\n\n", text)


def _gsm8k(row: Mapping[str, Any], name: str) -> Example:
    steps, gold = row["answer"].rsplit("####", 1)
    shown = re.sub(r"<<.*?>>", "", steps)  # calculator annotations
    gold = gold.strip().replace(",", "")
    return Example(name, row["question"], gold, "number", (), _in_segments(f"{shown.strip()}\n#### {gold}"))


def _arc(row: Mapping[str, Any], name: str) -> Example:
    gold = LETTERS[list(row["choices"]["label"]).index(row["answerKey"])]  # some rows are labelled 1, 2, 3, 4
    return Example(str(row["id"]), row["question"], gold, "choice", tuple(row["choices"]["text"]))


def _svamp(row: Mapping[str, Any], name: str) -> Example:
    body, gold = row["Body"].strip(), str(row["Answer"]).removesuffix(".0")
    joint = "" if body.endswith((".", ",", "?", "!")) else "," if re.search(r"(^|\. )If [^.]*$", body) else "."
    solution = f"{row['Equation']} = {gold}\n\n#### {gold}" if row.get("Equation") else None
    question, story = f"{body}{joint} {row['Question'].strip()}", re.sub(r"[\d.,]+", "#", body.casefold())
    return Example(str(row.get("ID", name)), question, gold, "number", (), solution, story)


def _strategyqa(row: Mapping[str, Any], name: str) -> Example:
    if not isinstance(row["answer"], bool):
        raise ValueError("answer must be true or false")
    gold = "yes" if row["answer"] else "no"
    facts = [fact.strip() for fact in row.get("facts", [])]
    solution = "\n\n".join([*facts, f"#### {gold}"]) if facts else None
    return Example(str(row.get("qid", name)), row["question"], gold, "yesno", (), solution)


def _math500(row: Mapping[str, Any], name: str) -> Example:
    return Example(str(row.get("unique_id", name)), row["problem"], row["answer"], "math", (), row.get("solution"))


def _aime(row: Mapping[str, Any], name: str) -> Example:
    gold = str(int(row["answer"]))  # from 0 to 999, some written as 033
    return Example(str(row.get("id", name)), row["problem"], gold, "number", (), row.get("solution"))


SOURCES = {
    "gsm8k": DatasetSource("{split}.jsonl", _gsm8k, "train.jsonl and test.jsonl of openai/grade-school-math"),
    "arc-c": DatasetSource("{split}.parquet", _arc, "train.parquet and test.parquet of allenai/ai2_arc, ARC-Challenge"),
    "svamp": DatasetSource("SVAMP.json", _svamp, "SVAMP.json of arkilpatel/SVAMP"),
    "strategyqa": DatasetSource("dev.json", _strategyqa, "dev.json of eladsegal/strategyqa"),
    "math500": DatasetSource("test.jsonl", _math500, "test.jsonl of MATH-500, from openai/prm800k"),
    "aime_2024": DatasetSource(
        "*.parquet", _aime, "one parquet file with the columns id, problem, solution and answer"
    ),
}


# ---------------------------------------------------------------------------------------------- generated questions


def _tiny(task: TaskSettings) -> Splits:
    from .tiny.task import examples

    _check_split_names(task, SPLIT_NAMES)
    make = task.generator
    sizes = {"train": make.n_train, "dev": make.n_dev, "test": make.n_test}
    train, dev, test = (examples(make.kind, part, sizes[part], make.seed) for part in SPLIT_NAMES)
    return Splits(train, dev, test)


def _reasoning_gym(task: TaskSettings, kind: str) -> Splits:
    """Assign the questions of one stream to splits by their hash, until all splits are full."""
    from .grading import number

    _check_split_names(task, SPLIT_NAMES)
    make = task.generator
    wanted = {"train": make.n_train, "dev": make.n_dev, "test": make.n_test}
    total = sum(wanted.values())
    found: dict[str, dict[str, Example]] = {part: {} for part in SPLIT_NAMES}
    for i, item in enumerate(_stream(kind, 1000 + 20 * total, make.seed, make.options)):
        if number(item["answer"]) is None:
            raise LabError(
                f"{task.dataset} has answers that are not numbers, such as {item['answer'][:40]!r}",
                hint="choose a task with one number as the answer: gsm_symbolic, basic_arithmetic, chain_sum",
            )
        steps = item["metadata"].get("answer_cot")
        solution = _in_segments(steps) if isinstance(steps, str) else None
        example = Example(f"{kind}-{make.seed}-{i}", item["question"].strip(), item["answer"], "number", (), solution)
        part = SPLIT_NAMES[int(_hash_fraction(task.split_seed, "part", example.fingerprint) * len(SPLIT_NAMES))]
        if len(found[part]) < wanted[part]:
            found[part].setdefault(example.fingerprint, example)
        if all(len(found[part]) == wanted[part] for part in SPLIT_NAMES):
            train, dev, test = (list(found[part].values()) for part in SPLIT_NAMES)
            return Splits(train, dev, test)
    sizes = ", ".join(f"{len(found[part])} of {wanted[part]} for {part}" for part in SPLIT_NAMES)
    raise LabError(f"{task.dataset} has too few different questions: {sizes}", hint="request fewer in task.generator")


def _stream(kind: str, size: int, seed: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise LabError("reasoning-gym is not installed", hint="pip install reasoning-gym") from None
    if kind not in DATASETS:
        near = difflib.get_close_matches(kind, DATASETS, n=1)
        raise LabError(f"reasoning-gym has no task {kind!r}", hint=f"did you mean {near[0]}?" if near else None)
    try:
        made = reasoning_gym.create_dataset(kind, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise LabError(f"reasoning-gym rejects task.generator.options for {kind}: {error}") from None
    for i in range(size):
        yield made[i]
