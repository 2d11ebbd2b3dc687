"""Questions in files: the published datasets, and those that a config describes in `task.sources`.

A source is a file or a folder and the keys of its rows. Published datasets are rows of the same form in a table, with
the files to expect and the published numbers of questions.
"""

from __future__ import annotations

import csv
import difflib
import glob
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplab.errors import LabError

from .config import SourceSettings
from .example import LETTERS, Example
from .grading import boxed, number, numbers, written

Row = Mapping[str, Any]
ANY_FORM = (
    "{split}.jsonl", "{split}.json", "{split}.parquet", "{split}.csv", "{split}.tsv",
    "{split}/*.arrow", "**/{split}-*-of-*.parquet", "**/{split}/*.parquet",
)  # fmt: skip
"""Files of a split in a folder: plain ones, saved by `datasets`, and as downloaded from the Hugging Face hub. The first
pattern that matches counts."""
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where the questions of a dataset are, and how to read them."""

    name: str
    source: SourceSettings
    origin: str = ""
    """Where to get it; empty for a source of the config."""
    also: tuple[str, ...] = ()
    """Other places of the files of a split."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Published number of questions by split; of several editions, several. `all`: the whole file."""
    whole: str | None = None
    """File with all questions, used if there are no files of the requested splits."""
    without_answers: Mapping[str, str] = field(default_factory=dict)
    """Splits published without answers, and the split that is evaluated instead."""
    prepare: Callable[[Row], Row] = lambda row: row
    """Makes the keys of `source` from a published row."""

    @property
    def hint(self) -> str:
        """What to change if the files are not as expected."""
        return f"expected {self.origin}" if self.origin else f"change task.sources.{self.name}"


def _svamp(row: Row) -> Row:
    body, gold = row["Body"].strip(), str(row["Answer"]).removesuffix(".0")
    joint = "" if body.endswith((".", ",", "?", "!")) else "," if re.search(r"(^|\. )If [^.]*$", body) else "."
    solution = f"{row['Equation']} = {gold}" if row.get("Equation") else None
    story = re.sub(r"[\d.,]+", "#", body.casefold())
    return {**row, "question": f"{body}{joint} {row['Question'].strip()}", "solution": solution, "family": story}


def _table() -> dict[str, Dataset]:
    def keys(path: str, grader: str, question: str, answer: str, **more: Any) -> SourceSettings:
        given = {"path": path, "grader": grader, "question": question, "answer": answer, **more}
        return SourceSettings.model_validate(given)

    labelled = {"choices": "choices|question.choices", "id": "id"}
    contest = {"solution": "solution", "id": "id|ID|unique_id"}
    rows = (
        Dataset(
            name="gsm8k", source=keys("{split}.jsonl", "number", "question", "answer"),
            also=("main/{split}-*-of-*.parquet",), sizes={"train": (7473,), "test": (1319,)},
            origin="train.jsonl and test.jsonl of openai/grade-school-math",
        ),
        Dataset(
            name="svamp",
            source=keys(
                "{split}.json", "number", "question", "Answer", solution="solution", id="ID", family="family"
            ),
            sizes={"all": (1000,), "train": (700,), "test": (300,)}, whole="SVAMP.json",
            origin="SVAMP.json of arkilpatel/SVAMP", prepare=_svamp,
        ),
        Dataset(
            name="math", source=keys("{split}.jsonl", "math", "problem", "answer|solution", **contest),
            also=("{split}/*/*.json", "*/{split}-*-of-*.parquet"),
            sizes={"train": (7500, 12000), "test": (5000, 500)},
            origin="train.jsonl and test.jsonl of MATH (hendrycks/math), or of openai/prm800k",
        ),
        Dataset(
            name="math500", source=keys("test.jsonl", "math", "problem", "answer", **contest),
            sizes={"all": (500,), "test": (500,)}, whole="test.jsonl",
            origin="test.jsonl of MATH-500, from openai/prm800k",
        ),
        Dataset(
            name="aime_2024",
            source=keys("*.parquet", "number", "problem|Problem", "answer|Answer|solution", **contest),
            sizes={"all": (30,), "test": (30,)}, whole="**/*.parquet",
            origin="one parquet file with the columns id, problem, solution and answer",
        ),
        Dataset(
            name="aime25", source=keys("test.jsonl", "number", "problem|question", "answer", **contest),
            sizes={"all": (30,), "test": (30,)}, whole="*.jsonl",
            origin="test.jsonl of math-ai/aime25, or the two files of opencompass/AIME2025",
        ),
        Dataset(
            name="amc23", source=keys("*.parquet", "number", "question|problem", "answer", **contest),
            sizes={"all": (40,), "test": (40,)}, whole="**/*.parquet", origin="the parquet file of math-ai/amc23",
        ),
        Dataset(
            name="strategyqa", source=keys("{split}.json", "yes_no", "question", "answer", solution="facts", id="qid"),
            sizes={"all": (229,), "dev": (229,), "train": (2061, 1603), "test": (687,)}, whole="dev.json",
            origin="dev.json of eladsegal/strategyqa",
        ),
        Dataset(
            name="arc-c", source=keys("{split}.parquet", "choice", "question", "answerKey", **labelled),
            also=("ARC-Challenge/{split}-*-of-*.parquet",),
            sizes={"train": (1119,), "validation": (299,), "test": (1172,)},
            origin="train.parquet and test.parquet of allenai/ai2_arc, ARC-Challenge",
        ),
        Dataset(
            name="openbookqa",
            source=keys("{split}.parquet", "choice", "question_stem|question.stem", "answerKey", **labelled),
            also=("main/{split}-*-of-*.parquet",), sizes={"train": (4957,), "validation": (500,), "test": (500,)},
            origin="train.parquet and test.parquet of allenai/openbookqa, main",
        ),
        Dataset(
            name="commonsense_qa",
            source=keys("{split}.parquet", "choice", "question.stem|question", "answerKey", **labelled),
            sizes={"train": (9741,), "validation": (1221,)}, without_answers={"test": "validation"},
            origin="train.parquet and validation.parquet of tau/commonsense_qa",
        ),
    )  # fmt: skip
    return {row.name: row for row in rows}


PUBLISHED = _table()


# ---------------------------------------------------------------------------------------------- files


def read_splits(dataset: Dataset, root: Path, wanted: Sequence[str], notes: list[str]) -> dict[str, list[Example]]:
    """Return the wanted splits; if the dataset is one undivided file, all its questions as `all`.

    Args:
        dataset: What to read.
        root: task.data_root.
        wanted: Names of splits.
        notes: Gets a line for every split that does not have its published size.

    Raises:
        LabError: A file is missing or has another form.
    """
    for split in wanted:
        if split in dataset.without_answers:
            raise LabError(
                f"the answers of {dataset.name} {split} are not published",
                hint=f"set task.eval_split: {dataset.without_answers[split]}",
            )
    pools = _by_file(dataset, root, wanted)
    for split, examples in pools.items():
        _check_ids(dataset, split, examples)
        published = dataset.sizes.get(split, ())
        if published and len(examples) not in published:
            known = " or ".join(map(str, published))
            notes.append(f"{dataset.name} {split} has {len(examples)} questions; {known} were published")
    return pools


def _by_file(dataset: Dataset, root: Path, wanted: Sequence[str]) -> dict[str, list[Example]]:
    path = dataset.source.path
    base = root / dataset.name if dataset.origin else root
    patterns: Sequence[str] = (path, *dataset.also, *ANY_FORM) if "{split}" in path else ANY_FORM
    if not dataset.origin:
        target = base / path
        if target.is_dir() and not (target / "state.json").is_file():
            base = target
        elif "{split}" in path:
            patterns = (path,)
        else:
            files = _saved(target) if target.is_dir() else _glob(base, path)
            return _undivided(dataset, files or _missing(dataset, target))
    found = {split: next(filter(None, (_glob(base, pattern, split) for pattern in patterns)), []) for split in wanted}
    if dataset.whole is not None and not all(found.values()):
        return _undivided(dataset, _glob(base, dataset.whole) or _missing(dataset, base / dataset.whole))
    for split, files in found.items():
        if not files:
            _missing(dataset, base if base == root / path else base / path.replace("{split}", split), split)
    return {split: _examples(dataset, _read(files), split) for split, files in found.items()}


def _glob(base: Path, pattern: str, split: str = "") -> list[Path]:
    """Return the files that match, as `datasets` lists them if it saved them."""
    name = pattern.replace("{split}", glob.escape(split))
    found = [Path(each) for each in sorted(glob.glob(str(Path(glob.escape(str(base))) / name), recursive=True))]
    files = [file for file in found if file.is_file() and ("*" not in pattern or file.suffix in SUFFIXES)]
    folders = sorted({str(file.parent) for file in files})
    if "**" in pattern and len(folders) > 1:
        raise LabError(f"several folders have files {name}: {', '.join(folders)}", file=base, hint="keep one of them")
    return _saved(files[0].parent) if files and (files[0].parent / "state.json").is_file() else files


def _saved(folder: Path) -> list[Path]:
    """Return the files of a dataset that `datasets` saved in this folder."""
    state = next(_rows(folder / "state.json"))
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise LabError("this is not the state of a saved dataset", file=folder / "state.json") from None


def _missing(dataset: Dataset, path: Path, split: str | None = None) -> list[Path]:
    if dataset.origin:
        folder = f"set task.data_root to the folder that contains {dataset.name}/"
        raise LabError(f"data not found: {path}", hint=f"get {dataset.origin}; put it there, or {folder}")
    if path.is_dir():
        there = sorted(file.name for file in path.iterdir() if file.is_dir() or file.suffix in SUFFIXES)
        raise LabError(
            f"no files of the split {split!r} in this folder", file=path,
            hint=f"it has {', '.join(there) or 'no data'}; name its splits in task.train_split and task.eval_split",
        )  # fmt: skip
    raise LabError(f"data not found: {path}", hint=f"put it there, or {dataset.hint}.path or task.data_root")


@dataclass(frozen=True)
class _Line:
    file: Path
    index: int
    row: Row


def _read(files: Sequence[Path]) -> list[_Line]:
    return [_Line(file, index, row) for file in files for index, row in enumerate(_rows(file))]


def _undivided(dataset: Dataset, files: Sequence[Path]) -> dict[str, list[Example]]:
    """Return the questions by the splits that their rows name, otherwise together as `all`."""
    lines = _read(files)
    examples = _examples(dataset, lines, "all" if len(files) > 1 else files[0].stem)
    key = dataset.source.split or "split|Split"
    pools: dict[str, list[Example]] = {}
    for line, example in zip(lines, examples, strict=True):
        name = _value(line.row, key)
        if name is None and (pools.keys() - {"all"} or dataset.source.split):
            raise LabError(f"row {line.index} has no {key!r}, the key of its split", file=line.file, hint=dataset.hint)
        pools.setdefault("all" if name is None else str(name), []).append(example)
    return pools


def _check_ids(dataset: Dataset, split: str, examples: Sequence[Example]) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise LabError(
                f"two questions of {dataset.name} {split} have the id {example.id!r}",
                hint="answers are stored by id; choose another key for `id`, or none",
            )
        seen.add(example.id)


def _examples(dataset: Dataset, lines: Sequence[_Line], prefix: str) -> list[Example]:
    found: list[Example] = []
    for place, line in enumerate(lines):
        try:
            if not isinstance(line.row, Mapping):
                raise BadRow(f"a row must be an object with keys, not {str(line.row)[:40]!r}")
            found.append(make_example(dataset.source, dataset.prepare(line.row), f"{prefix}-{place}"))
        except (BadRow, KeyError, TypeError, AttributeError, ValueError) as error:
            what = str(error) if isinstance(error, BadRow) else f"{type(error).__name__} {error}"
            raise LabError(
                f"row {line.index} does not have the format of {dataset.name}: {what}",
                file=line.file, hint=dataset.hint,
            ) from None  # fmt: skip
    return found


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix in (".parquet", ".arrow"):
        yield from _arrow_rows(path)
        return
    if path.suffix not in SUFFIXES:
        raise LabError(f"cannot read {path.suffix or 'this file'}", file=path, hint=f"use {', '.join(SUFFIXES)}")
    try:
        if path.suffix in (".csv", ".tsv"):
            csv.field_size_limit(sys.maxsize)
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(
                    file, restkey="…", delimiter="\t" if path.suffix == ".tsv" else ",", strict=True
                )
            return
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            # Not splitlines: texts may contain other separators.
            yield from (json.loads(line) for line in text.split("\n") if line.strip())
            return
        whole = json.loads(text)
    except (ValueError, csv.Error) as error:
        raise LabError(f"this is not {path.suffix[1:].upper()}: {error}", file=path) from None
    yield from whole if isinstance(whole, list) else [whole]


def _arrow_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            yield from pq.read_table(path).to_pylist()
            return
        with pa.memory_map(str(path)) as file:
            if file.read(6) == b"ARROW1":
                yield from pa.ipc.open_file(file).read_all().to_pylist()
                return
            file.seek(0)
            for batch in pa.ipc.open_stream(file):  # the form in which `datasets` saves
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise LabError(f"this is not {path.suffix[1:].capitalize()}: {error}", file=path) from None


# ---------------------------------------------------------------------------------------------- rows


class BadRow(Exception):
    """A row without a key, or with a value that cannot be meant."""


def make_example(source: SourceSettings, row: Row, name: str) -> Example:
    """Return the question in a row; `name` is its id if it has none. Raises BadRow."""
    question, raw = _text(row, source.question), _required(row, source.answer)
    answer = raw.strip() if isinstance(raw, str) else raw
    if answer == "":
        raise BadRow(f"{source.answer} is empty")
    marked = _marked(answer) if isinstance(answer, str) else None
    gold = answer if marked is None else marked
    choices: tuple[str, ...] = ()
    if source.grader == "choice":
        labels, choices = _choices(row, source.choices)
        gold = LETTERS[_chosen(gold, labels, choices)]
    elif source.grader == "number":
        gold = _number(gold)
    elif source.grader == "yes_no":
        gold = _yes_or_no(gold)
    else:
        gold = str(gold)
    solution = _solution(row, source, answer if marked is not None else None, gold)
    identity = _value(row, source.id) if source.id else None
    family = _value(row, source.family) if source.family else None
    return Example(
        name if identity is None else str(identity), question, gold, source.grader, choices, solution,
        "" if family is None else str(family),
    )  # fmt: skip


def _value(row: Any, key: str) -> Any:
    """Return the value of a key such as `a.b` or `a|b`; None if the row has none."""
    for path in key.split("|"):
        value = row
        for part in [path] if path in row else path.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit():
                value = value[int(part)] if int(part) < len(value) else None
            else:
                value = None
        if value is not None:
            return value
    return None


def _required(row: Row, key: str) -> Any:
    value = _value(row, key)
    if value is None:
        near = difflib.get_close_matches(key, row, n=1)
        raise BadRow(f"no {key!r}, did you mean {near[0]!r}?" if near else f"no {key!r}, only {', '.join(row)}")
    return value


def _text(row: Row, key: str) -> str:
    value = _required(row, key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{key} must be a text, not {str(value)[:40]!r}")
    return value


def _marked(text: str) -> str | None:
    """Return the answer that a solution marks with `####` or \\boxed{}."""
    return text.rsplit("####", 1)[1].strip() if "####" in text else boxed(text)


def _number(value: Any) -> str:
    found = number(str(value))
    if found is None:
        others = numbers(str(value))  # 336^\circ
        found = others[0] if len(others) == 1 else None
    if found is None or isinstance(value, bool):
        raise BadRow(f"the answer must be a number, not {str(value)[:40]!r}")
    return written(found)


def _yes_or_no(value: Any) -> str:
    words = {"true": "yes", "yes": "yes", "1": "yes", "false": "no", "no": "no", "0": "no"}
    found = words.get(str(value).strip().casefold())
    if found is None:
        raise BadRow(f"the answer must be yes or no, not {str(value)[:40]!r}")
    return found


def _choices(row: Row, key: str | list[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return labels and texts: of a list, of {label: […], text: […]}, of {A: …, B: …}, or of one key per choice."""
    if key is None:
        raise BadRow("the grader `choice` needs `choices`")
    value: Any = [_required(row, each) for each in key] if isinstance(key, list) else _required(row, key)
    labels: list[Any] = []
    if isinstance(value, Mapping) and {"label", "text"} <= set(value):
        labels, value = list(value["label"]), list(value["text"])
    elif isinstance(value, Mapping):
        labels, value = list(value), list(value.values())
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        labels, value = [each["label"] for each in value], [each["text"] for each in value]
    if isinstance(value, str) or not 2 <= len(value) <= len(LETTERS):
        raise BadRow(f"there must be 2 to {len(LETTERS)} choices, not {str(value)[:60]!r}")
    return tuple(str(label).strip() for label in labels), tuple(str(each).strip() for each in value)


def _chosen(answer: Any, labels: tuple[str, ...], choices: tuple[str, ...]) -> int:
    """Return the index of the right choice, which is named by its label, its text, its letter, or its index from 0."""
    name = str(answer).strip()
    fits = {labels.index(name)} if name in labels else set()
    if not fits:
        index = {int(name)} if name.isdigit() and int(name) < len(choices) else set()
        texts = {place for place, choice in enumerate(choices) if choice == name}
        letter = {LETTERS.index(name.upper())} if len(name) == 1 and name.upper() in LETTERS[: len(choices)] else set()
        fits = index if index and isinstance(answer, int) else index | texts | letter
    if len(fits) != 1:
        raise BadRow(f"the answer {name[:40]!r} is {'several' if fits else 'none'} of the choices {', '.join(choices)}")
    return fits.pop()


def _solution(row: Row, source: SourceSettings, answer: str | None, gold: str) -> str | None:
    """Return the reference solution, which ends with the answer: of its own key, or of the answer's text."""
    value = _value(row, source.solution) if source.solution else None
    if value is None and answer is not None:
        shown = re.sub(r"<<[^<>]*>>", "", answer)  # calculator annotations
        steps, mark, _ = shown.rpartition("####")
        if mark:
            return in_segments(f"{steps.strip()}\n#### {gold}") if steps.strip() else None
        return None if re.fullmatch(r"\W*\\f?boxed\s*\{.*\}\W*", shown, re.DOTALL) else shown
    if isinstance(value, list):
        value = "\n\n".join(str(part).strip() for part in value)
    if not isinstance(value, str) or not value.strip():
        return None
    if _marked(value) is not None:
        return value
    return f"{value.strip()}\n\n" + (f"\\boxed{{{gold}}}" if source.grader == "math" else f"#### {gold}")


def in_segments(text: str) -> str:
    """Separate the lines of a solution by blank lines."""
    return text if "\n\n" in text else re.sub(r"\n+", "\n\n", text)
