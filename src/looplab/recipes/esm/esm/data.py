"""Questions with their answers, and the three parts they are divided into: train is mined, dev is tuned on, test is
looked at once.

No two parts share a question (compared without case, spacing and the punctuation at the end). What a dataset does not
divide itself is divided by a seeded hash of the question's text, so neither the order of a file nor a sample size
moves a question from one part to another. Where published files share a question by chance, it stays in the test and
is dropped from what is mined and tuned on, with a note; where they share many, they are not two splits: an error.
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
Part = Literal["train", "dev", "test"]
PARTS: tuple[Part, ...] = ("train", "dev", "test")
LETTERS = "ABCDEFGHIJ"
BY_CHANCE = 0.02
"""Published files may share this part of their questions; more is a mistake in the files, not chance."""


@dataclass(frozen=True)
class Example:
    """One question."""

    id: str
    """Unique in its dataset; `test-12` is row 12 of the file `test`, counted from 0."""
    question: str
    gold: str
    """The right answer: a number, a letter, LaTeX, or yes/no."""
    kind: Kind
    """How an answer is read and compared."""
    choices: tuple[str, ...] = ()
    """For `choice`: what A, B, C … stand for."""
    solution: str | None = None
    """A written solution in segments, ending in the answer, where the dataset has one."""
    family: str = ""
    """Questions that vary one story; where we divide a dataset, a family stays together."""

    @cached_property
    def fingerprint(self) -> str:
        """The same for two questions that differ only in case, spacing or the punctuation at the end."""
        words = " ".join(self.question.casefold().split()).rstrip(" .:?!")
        return hashlib.sha256(words.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Splits:
    """The three parts of a task."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    notes: tuple[str, ...] = ()
    """What a reader should know, such as questions that were dropped."""


@dataclass(frozen=True)
class Source:
    """How a published dataset lies on the disk."""

    file: str
    """The file of a split, with `{split}` in its name; without it, one file that holds everything."""
    example: Callable[[Mapping[str, Any], str], Example]
    """Makes an example of a row and the id it has if the dataset gives none."""
    origin: str
    """Where a person gets it."""


def load_split(task: TaskSettings, split: Part) -> list[Example]:
    """One part of the task; empty is an error."""
    found: list[Example] = getattr(splits(task), split)
    if not found:
        raise LabError(
            f"the {split} part of {task.dataset} is empty",
            hint="change task.dev_fraction, task.test_fraction, task.split_seed or the sizes in task.generator",
        )
    return found


def splits(task: TaskSettings) -> Splits:
    """All three parts, of the sizes that the task asks for, without a question in common."""
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
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
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
    """Refuse parts that share a question."""
    for one, other in (("train", "test"), ("dev", "test"), ("train", "dev")):
        pairs = _shared(getattr(parts, one), getattr(parts, other))
        if pairs:
            mine, theirs = pairs[0]
            raise LabError(
                f"{one} and {other} share {len(pairs)} questions, "
                f"the first {mine.id} = {theirs.id}: {mine.question[:80]!r}",
                hint="what is mined or tuned on must not be tested on",
            )


def _shared(one: Iterable[Example], other: Iterable[Example]) -> list[tuple[Example, Example]]:
    """The questions of `one` that are in `other`, each with its twin."""
    twins = {example.fingerprint: example for example in other}
    return [(example, twins[example.fingerprint]) for example in one if example.fingerprint in twins]


def _share(seed: int, purpose: str, text: str) -> float:
    """A number in 0..1 that depends on nothing but the seed and the text."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _sample(examples: list[Example], most: int | None, seed: int) -> list[Example]:
    """A seeded sample in the order of the file; a smaller one is part of a larger one."""
    if most is None or most >= len(examples):
        return examples
    by_chance = sorted(range(len(examples)), key=lambda i: _share(seed, "sample", f"{examples[i].fingerprint}/{i}"))
    return [examples[i] for i in sorted(by_chance[:most])]


def _cut(examples: list[Example], fraction: float, seed: int, purpose: str) -> tuple[list[Example], list[Example]]:
    """The rest, and about `fraction` of the examples; twins and families stay together."""
    chosen = [_share(seed, purpose, example.family or example.fingerprint) < fraction for example in examples]
    return (
        [example for example, yes in zip(examples, chosen, strict=True) if not yes],
        [example for example, yes in zip(examples, chosen, strict=True) if yes],
    )


# ---------------------------------------------------------------------------------------------- published files


def _published(task: TaskSettings, source: Source) -> Splits:
    folder = Path(task.data_root) / task.dataset
    if "{split}" in source.file:
        names = [name for name in (task.train_split, task.dev_split, task.eval_split) if name is not None]
        pools = {name: _read(folder, source, name) for name in names}
    else:
        pools = _divided(task, folder, source)
        _only(task, tuple(pools))
    train, test = pools[task.train_split], pools[task.eval_split]
    notes: list[str] = []
    if task.dev_split is not None:
        dev = _without(pools[task.dev_split], task.dev_split, test, task.eval_split, notes)
        train = _without(train, task.train_split, dev, task.dev_split, notes)
        train = _without(train, task.train_split, test, task.eval_split, notes)
    else:
        train = _without(train, task.train_split, test, task.eval_split, notes)
        train, dev = _cut(train, task.dev_fraction, task.split_seed, "dev")
    return Splits(train, dev, test, tuple(notes))


def _without(
    examples: list[Example], name: str, kept: list[Example], kept_name: str, notes: list[str]
) -> list[Example]:
    """`examples` without the questions of `kept`."""
    pairs = _shared(examples, kept)
    if not pairs:
        return examples
    mine, theirs = pairs[0]
    seen = f"{len(pairs)} of {len(examples)} questions of {name} are also in {kept_name}"
    if len(pairs) > BY_CHANCE * min(len(examples), len(kept)):
        raise LabError(
            f"{seen}, the first {mine.id} = {theirs.id}: {mine.question[:80]!r}",
            hint="these are not two splits; check the files, and task.train_split, dev_split and eval_split",
        )
    notes.append(f"{seen} and were dropped from {name}: {', '.join(f'{a.id} = {b.id}' for a, b in pairs)}")
    dropped = {mine.id for mine, _ in pairs}
    return [example for example in examples if example.id not in dropped]


def _divided(task: TaskSettings, folder: Path, source: Source) -> dict[str, list[Example]]:
    """One file: by the rows' own `split` field if they have one, else by the hash of the question."""
    path = _find(folder, source.file, source)
    rows = list(_rows(path))
    examples = [_example(source, row, f"{path.stem}-{i}", path, i) for i, row in enumerate(rows)]
    given = [next((str(row[key]) for key in row if key.lower() == "split"), None) for row in rows]
    if any(given):
        pools: dict[str, list[Example]] = {}
        for name, example in zip(given, examples, strict=True):
            pools.setdefault(name or "", []).append(example)
        return pools
    train, test = _cut(examples, task.test_fraction, task.split_seed, "test")
    return {"train": train, "test": test}


def _only(task: TaskSettings, names: tuple[str, ...]) -> None:
    """The task may name no split but these."""
    for key in ("train_split", "dev_split", "eval_split"):
        name = getattr(task, key)
        if name is not None and name not in names:
            raise LabError(
                f"task.{key} is {name!r}, but {task.dataset} has {' and '.join(names)}",
                hint="leave dev_split out to divide the training questions" if key == "dev_split" else None,
            )


def _read(folder: Path, source: Source, split: str) -> list[Example]:
    path = _find(folder, source.file.format(split=split), source)
    return [_example(source, row, f"{split}-{i}", path, i) for i, row in enumerate(_rows(path))]


def _find(folder: Path, name: str, source: Source) -> Path:
    found = sorted(folder.rglob(name)) if "*" in name else [path for path in (folder / name,) if path.is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise LabError(f"several files fit {name}: {', '.join(map(str, found))}", hint="keep one", file=folder)
    raise LabError(
        f"the data is not here: looked for {folder / name}",
        hint=f"it is {source.origin}; put it there, or set task.data_root to the folder that holds {folder.name}/",
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
        lines = (line for line in text.split("\n") if line.strip())  # not splitlines: a text may hold other separators
        yield from json.loads(text) if path.suffix == ".json" else map(json.loads, lines)
    except ValueError as error:
        raise LabError(f"this is not {path.suffix[1:].upper()}: {error}", file=path) from None


def _example(source: Source, row: Mapping[str, Any], name: str, path: Path, index: int) -> Example:
    try:
        return source.example(row, name)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LabError(
            f"row {index} is not in the form of this dataset: {type(error).__name__} {error}",
            file=path,
            hint=f"expected is {source.origin}",
        ) from None


def _in_segments(text: str) -> str:
    """A solution that is written in lines, with a blank line between the steps."""
    return text if "\n\n" in text else re.sub(r"\n+", "\n\n", text)


def _gsm8k(row: Mapping[str, Any], name: str) -> Example:
    steps, gold = row["answer"].rsplit("####", 1)
    shown = re.sub(r"<<.*?>>", "", steps)  # the calculator's notes are not part of the text
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
    "gsm8k": Source("{split}.jsonl", _gsm8k, "train.jsonl and test.jsonl of openai/grade-school-math"),
    "arc-c": Source("{split}.parquet", _arc, "train.parquet and test.parquet of allenai/ai2_arc, ARC-Challenge"),
    "svamp": Source("SVAMP.json", _svamp, "SVAMP.json of arkilpatel/SVAMP"),
    "strategyqa": Source("dev.json", _strategyqa, "dev.json of eladsegal/strategyqa"),
    "math500": Source("test.jsonl", _math500, "test.jsonl of MATH-500, from openai/prm800k"),
    "aime_2024": Source("*.parquet", _aime, "one parquet file with the columns id, problem, solution and answer"),
}


# ---------------------------------------------------------------------------------------------- generated questions


def _tiny(task: TaskSettings) -> Splits:
    from .tiny.task import examples

    _only(task, PARTS)
    make = task.generator
    sizes = {"train": make.n_train, "dev": make.n_dev, "test": make.n_test}
    train, dev, test = (examples(make.kind, part, sizes[part], make.seed) for part in PARTS)
    return Splits(train, dev, test)


def _reasoning_gym(task: TaskSettings, kind: str) -> Splits:
    """Questions of one stream; each falls into its part by the hash of its text, until all parts are full."""
    from .grading import number

    _only(task, PARTS)
    make = task.generator
    wanted = {"train": make.n_train, "dev": make.n_dev, "test": make.n_test}
    total = sum(wanted.values())
    found: dict[str, dict[str, Example]] = {part: {} for part in PARTS}
    for i, item in enumerate(_stream(kind, 1000 + 20 * total, make.seed, make.options)):
        if number(item["answer"]) is None:
            raise LabError(
                f"{task.dataset} has answers that are not numbers, such as {item['answer'][:40]!r}",
                hint="choose a task with one number as the answer: gsm_symbolic, basic_arithmetic, chain_sum",
            )
        steps = item["metadata"].get("answer_cot")
        solution = _in_segments(steps) if isinstance(steps, str) else None
        example = Example(f"{kind}-{make.seed}-{i}", item["question"].strip(), item["answer"], "number", (), solution)
        part = PARTS[int(_share(task.split_seed, "part", example.fingerprint) * len(PARTS))]
        if len(found[part]) < wanted[part]:
            found[part].setdefault(example.fingerprint, example)
        if all(len(found[part]) == wanted[part] for part in PARTS):
            train, dev, test = (list(found[part].values()) for part in PARTS)
            return Splits(train, dev, test)
    sizes = ", ".join(f"{len(found[part])} of {wanted[part]} for {part}" for part in PARTS)
    raise LabError(f"{task.dataset} has too few different questions: {sizes}", hint="ask for fewer in task.generator")


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
        raise LabError(f"reasoning-gym refuses task.generator.options for {kind}: {error}") from None
    for i in range(size):
        yield made[i]
