"""Datasets without code: files, folders and keys in the config; the published ones by name; mining one for another."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm import files, stages
from looplab.recipes.esm.esm.backends.toy import make_problem
from looplab.recipes.esm.esm.config import EsmSettings, GeneratorSettings, SourceSettings, TaskSettings, parse_settings
from looplab.recipes.esm.esm.data import Example, Splits, splits
from looplab.recipes.esm.esm.grading import grade
from looplab.recipes.esm.esm.prompts import render
from looplab.recipes.esm.esm.sources import PUBLISHED, BadRow, make_example

pa = pytest.importorskip("pyarrow")

DATA = Path(__file__).parents[4] / "shared" / "data"
Rows = list[dict[str, Any]]


def sums(first: int, last: int) -> Rows:
    return [{"q": f"What is {i} and 1?", "a": str(i + 1), "n": i} for i in range(first, last)]


def own(root: Path, path: str, **more: Any) -> TaskSettings:
    source = {"path": path, "grader": "number", "question": "q", "answer": "a"} | more.pop("source", {})
    return TaskSettings.model_validate({"dataset": "sums", "data_root": str(root), "sources": {"sums": source}, **more})


def asked(examples: Sequence[Example]) -> set[str]:
    return {example.question for example in examples}


# Files


def write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))


def write_csv(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        table.writeheader()
        table.writerows(rows)


def write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def save_to_disk(folder: Path, rows: Rows) -> None:
    """As `Dataset.save_to_disk` of Hugging Face writes it, in two files."""
    folder.mkdir(parents=True)
    half = len(rows) // 2
    names = [f"data-{n:05d}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "data-00000-of-00009.arrow").write_bytes(b"left behind by an earlier save")


FORMS: dict[str, tuple[str, Callable[[Path, Rows], None]]] = {
    "jsonl": ("{split}.jsonl", write_jsonl),
    "json": ("{split}.json", write_json),
    "csv": ("{split}.csv", write_csv),
    "tsv": ("{split}.tsv", write_csv),
    "parquet": ("{split}.parquet", write_parquet),
    "hub": ("data/{split}-00000-of-00001-9f3a.parquet", write_parquet),
    "converted": ("default/{split}/0000.parquet", write_parquet),
    "saved": ("{split}", save_to_disk),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_has_a_file_or_a_folder_for_each_split(form: str, tmp_path: Path) -> None:
    name, write = FORMS[form]
    for split, rows in (("train", sums(0, 40)), ("test", sums(40, 50))):
        write(tmp_path / "sums" / name.format(split=split), rows)
    parts = splits(own(tmp_path, "sums"))
    assert asked(parts.test) == {row["q"] for row in sums(40, 50)}
    assert asked([*parts.train, *parts.dev]) == {row["q"] for row in sums(0, 40)}
    assert {example.id for example in parts.test} == {f"test-{i}" for i in range(10)}
    assert all(grade(f"#### {example.gold}", example)[1] for example in parts.test)


def test_files_of_any_name_are_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "mine_these.jsonl", sums(0, 20))
    write_jsonl(tmp_path / "exam.jsonl", sums(20, 30))
    parts = splits(own(tmp_path, "{split}.jsonl", train_split="mine_these", eval_split="exam"))
    assert asked(parts.test) == {row["q"] for row in sums(20, 30)}
    with pytest.raises(LabError, match=r"data not found: .*test\.jsonl"):
        splits(own(tmp_path, "{split}.jsonl", train_split="mine_these"))


def test_one_file_is_divided_by_its_own_key_or_by_the_hash(tmp_path: Path) -> None:
    rows = [{**row, "fold": "test" if row["n"] % 4 == 0 else "train"} for row in sums(0, 80)]
    write_jsonl(tmp_path / "all.jsonl", rows)
    by_key = splits(own(tmp_path, "all.jsonl", source={"split": "fold"}))
    assert asked(by_key.test) == {row["q"] for row in rows if row["fold"] == "test"}
    by_hash = splits(own(tmp_path, "all.jsonl"))
    assert len([*by_hash.train, *by_hash.dev, *by_hash.test]) == 80
    assert "divided by their hash" in by_hash.notes[0]
    with pytest.raises(LabError, match="row 0 has no 'part'"):
        splits(own(tmp_path, "all.jsonl", source={"split": "part"}))


def test_a_saved_dataset_without_splits_is_one_file(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved", sums(0, 60))
    parts = splits(own(tmp_path, "saved"))
    assert len([*parts.train, *parts.dev, *parts.test]) == 60


def test_the_path_may_be_absolute(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "elsewhere" / "all.jsonl", sums(0, 40))
    assert splits(own(tmp_path / "datasets", str(tmp_path / "elsewhere" / "all.jsonl"))).test


def test_two_folders_that_fit_are_an_error_and_not_one_dataset(tmp_path: Path) -> None:
    for config in ("main", "socratic"):
        write_parquet(tmp_path / "sums" / config / "train-00000-of-00001.parquet", sums(0, 9))
    with pytest.raises(LabError, match=r"several folders .*main.*socratic"):
        splits(own(tmp_path, "sums"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"question": "problem"}, "no 'problem', only q, a, n"),
        ({"answer": "nn"}, "did you mean 'n'"),
        ({"grader": "yes_no"}, "must be yes or no, not '2'"),
        ({"answer": "q"}, "must be a number, not 'What is"),
        ({"question": "n"}, "n must be a text"),
        ({"id": "same"}, "have the id 'x'"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_what_to_change(
    change: dict[str, str], told: str, tmp_path: Path
) -> None:
    rows = [{**row, "q": f"{row['q']} {row['n']}"} for row in sums(0, 9)]
    write_jsonl(tmp_path / "all.jsonl", [{"q": row["q"], "a": row["a"], "n": row["n"]} for row in rows])
    if "id" in change:
        write_jsonl(tmp_path / "all.jsonl", [{**row, "same": "x"} for row in rows])
    with pytest.raises(LabError) as caught:
        splits(own(tmp_path, "all.jsonl", source=change))
    assert told in str(caught.value)
    assert "sums" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.jsonl", '{"q": 1', "this is not JSONL"),
        ("x.json", '{"data": []}', "no 'q', only data"),
        ("x.jsonl", "7\n", "must be an object"),
        ("x.csv", 'q,a\n"open,1\n', "this is not CSV"),
        ("x.parquet", "text", "this is not Parquet"),
        ("x.arrow", "text", "this is not Arrow"),
        ("x.xlsx", "text", "cannot read .xlsx"),
    ],
)
def test_a_file_in_another_form_is_an_error_in_words(name: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LabError) as caught:
        splits(own(tmp_path, name))
    assert told in str(caught.value)


def test_a_missing_split_says_what_is_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sums" / "train.jsonl", sums(0, 9))
    write_jsonl(tmp_path / "sums" / "validation.jsonl", sums(9, 12))
    with pytest.raises(LabError, match=r"split 'test'.*train\.jsonl, validation\.jsonl"):
        splits(own(tmp_path, "sums"))
    assert len(splits(own(tmp_path, "sums", eval_split="validation")).test) == 3


# Rows


def example(row: dict[str, Any], grader: str, **keys: Any) -> Example:
    return make_example(SourceSettings.model_validate({"path": "x", "grader": grader, **keys}), row, "x-0")


@pytest.mark.parametrize(
    ("choices", "answer", "gold"),
    [
        (["wood", "iron", "wool"], "B", "B"),
        (["wood", "iron", "wool"], "b", "B"),
        (["wood", "iron", "wool"], "iron", "B"),
        (["wood", "iron", "wool"], 1, "B"),
        (["wood", "iron", "wool"], "1", "B"),
        (["2", "1", "0"], 1, "B"),
        ({"label": ["A", "B"], "text": ["wood", "iron"]}, "B", "B"),
        ({"label": ["1", "2"], "text": ["wood", "iron"]}, "2", "B"),
        ({"text": ["iron", "wood"], "label": ["K", "L"]}, "L", "B"),
        ({"A": "wood", "B": "iron"}, "B", "B"),
        ([{"label": "A", "text": "wood"}, {"label": "B", "text": "iron"}], "B", "B"),
        (["wood", "iron"], "It is a metal.\n#### B", "B"),
    ],
)
def test_the_right_choice_is_a_label_a_letter_a_text_or_an_index(choices: Any, answer: Any, gold: str) -> None:
    found = example({"question": "What?", "choices": choices, "answer": answer}, "choice", choices="choices")
    assert found.gold == gold
    assert render("auto", found).count("iron") <= 1


def test_choices_may_have_a_column_each() -> None:
    row = {"question": "What?", "opa": "wood", "opb": "iron", "cop": 1}
    assert example(row, "choice", choices=["opa", "opb"], answer="cop").choices == ("wood", "iron")


@pytest.mark.parametrize("answer", ["steel", "C", 2, True])
def test_an_answer_that_is_none_of_the_choices_is_an_error(answer: Any) -> None:
    with pytest.raises(BadRow, match="none of the choices wood, iron"):
        example({"question": "What?", "choices": ["wood", "iron"], "answer": answer}, "choice", choices="choices")


def test_an_answer_that_may_be_two_choices_is_an_error() -> None:
    with pytest.raises(BadRow, match="several of the choices"):
        example({"question": "What?", "choices": ["1", "0"], "answer": "1"}, "choice", choices="choices")


@pytest.mark.parametrize(
    ("grader", "answer", "gold", "right", "wrong"),
    [
        ("number", "033", "33", "#### 33", "#### 3"),
        ("number", 27.0, "27", "so 27", "so 28"),
        ("number", "$1,200", "1200", "1200.0", "120"),
        ("number", "336^\\circ", "336", "\\boxed{336}", "63"),
        ("number", "Two.\nThree <<1+2=3>>3.\n#### 3", "3", "#### 3", "#### 2"),
        ("math", "As $x=1$, it is $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{2}"),
        ("math", "\\boxed{7}", "7", "It is $7$", "It is $8$"),
        ("yes_no", True, "yes", "#### yes", "#### no"),
        ("yes_no", "No", "no", "False.", "True."),
        ("yes_no", 1, "yes", "yes", "no"),
        ("exact", "New  York", "New  York", "#### new york.", "#### York"),
        ("exact", "Ada", "Ada", "I think so.\n\n**Ada**", "Ada and Bob"),
    ],
)
def test_answers_are_read_as_their_grader_needs_them(
    grader: str, answer: Any, gold: str, right: str, wrong: str
) -> None:
    found = example({"question": "What?", "answer": answer}, grader)
    assert found.gold == gold
    assert grade(right, found)[1]
    assert not grade(wrong, found)[1]
    assert found.solution is None or grade(found.solution, found)[1]


def test_a_solution_ends_with_the_answer() -> None:
    keys = {"solution": "steps"}
    assert example({"question": "What?", "answer": "3", "steps": ["One.", "Two."]}, "number", **keys).solution == (
        "One.\n\nTwo.\n\n#### 3"
    )
    marked = "So \\boxed{3}."
    assert example({"question": "What?", "answer": "3", "steps": marked}, "math", **keys).solution == marked
    assert example({"question": "What?", "answer": "3", "steps": "So."}, "math", **keys).solution == "So.\n\n\\boxed{3}"
    assert example({"question": "What?", "answer": "a\n#### 3"}, "number").solution == "a\n\n#### 3"


def test_keys_lead_into_rows_and_have_alternatives() -> None:
    keys = {"question": "data.problem|text", "answer": "data.gold.0", "id": "meta.id"}
    nested = {"data": {"problem": "What?", "gold": ["4", "5"]}, "meta": {"id": 9}}
    found = example(nested, "number", **keys)
    assert (found.question, found.gold, found.id) == ("What?", "4", "9")
    assert example({"text": "Who?", "data.gold.0": "4"}, "number", **keys).question == "Who?"


def test_a_question_is_not_read_as_a_template() -> None:
    found = example({"question": "Is {choices} or {question}?", "answer": "a"}, "exact")
    assert render("Q: {question} A:", found) == "Q: Is {choices} or {question}? A:"
    assert "Is {choices}" in render("auto", found)


def test_choices_are_required_where_they_are_graded() -> None:
    for change in ({"grader": "choice"}, {"grader": "number", "choices": "x"}):
        with pytest.raises(LabError, match="grader: choice"):
            parse_settings({"task": {"dataset": "x", "sources": {"x": {"path": "x.csv", **change}}}})


def test_a_mistyped_key_of_a_source_is_named() -> None:
    with pytest.raises(LabError, match=r"unknown key task\.sources\.x\.qestion, did you mean question"):
        parse_settings({"task": {"dataset": "x", "sources": {"x": {"path": "x", "grader": "math", "qestion": "q"}}}})


# Published datasets


LABELLED = {"label": ["A", "B", "C"], "text": ["wood", "iron", "wool"]}
HUB: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "gsm8k": ("main/{split}-00000-of-00001.parquet", lambda i: {"question": f"{i}?", "answer": f"It is.\n#### {i}"}),
    "svamp": (
        "data/{split}-00000-of-00001.parquet",
        lambda i: {"ID": f"c{i}", "Body": f"{i} eggs.", "Question": "How many?", "Equation": "1", "Answer": f"{i}.0"},
    ),
    "math": ("algebra/{split}-00000-of-00001.parquet", lambda i: {"problem": f"{i}?", "solution": f"So $\\boxed{{{i}}}$"}),
    "math500": ("{split}.jsonl", lambda i: {"problem": f"{i}?", "answer": str(i), "unique_id": f"u{i}"}),
    "aime_2024": (
        "data/{split}-00000-of-00001.parquet",
        lambda i: {"id": i, "problem": f"{i}?", "solution": f"\\boxed{{{i}}}", "answer": f"0{i}"},
    ),
    "aime25": ("{split}.jsonl", lambda i: {"id": str(i), "problem": f"{i}?", "answer": str(i)}),
    "amc23": (
        "data/{split}-00000-of-00001.parquet", lambda i: {"id": i, "question": f"{i}?", "answer": float(i), "url": ""}
    ),
    "strategyqa": ("{split}.json", lambda i: {"qid": f"q{i}", "question": f"{i}?", "answer": i % 2 == 0, "facts": ["A."]}),
    "arc-c": (
        "ARC-Challenge/{split}-00000-of-00001.parquet",
        lambda i: {"id": f"M{i}", "question": f"{i}?", "choices": LABELLED, "answerKey": "B"},
    ),
    "openbookqa": (
        "main/{split}-00000-of-00001.parquet",
        lambda i: {"id": f"7-{i}", "question_stem": f"{i}?", "choices": LABELLED, "answerKey": "B"},
    ),
    "commonsense_qa": (
        "data/{split}-00000-of-00001.parquet",
        lambda i: {"id": f"x{i}", "question": f"{i}?", "question_concept": "c", "choices": LABELLED, "answerKey": "B"},
    ),
}  # fmt: skip


def put(root: Path, dataset: str, split: str, first: int, last: int) -> None:
    name, row = HUB[dataset]
    path = root / dataset / name.format(split=split)
    rows = [row(i) for i in range(first, last)]
    {".parquet": write_parquet, ".jsonl": write_jsonl, ".json": write_json}[path.suffix](path, rows)


def test_the_registry_has_the_datasets_of_the_papers() -> None:
    assert set(PUBLISHED) == set(HUB)
    assert PUBLISHED["math"].sizes["train"] == (7500, 12000)
    assert all(row.name == name and row.origin and row.sizes for name, row in PUBLISHED.items())


@pytest.mark.parametrize("dataset", HUB)
def test_a_published_dataset_is_read_by_name_as_the_hub_has_it_and_its_size_is_checked(
    dataset: str, tmp_path: Path
) -> None:
    test = "validation" if dataset == "commonsense_qa" else "test"
    put(tmp_path, dataset, "train", 10, 40)
    put(tmp_path, dataset, test, 40, 44)
    parts = splits(TaskSettings(dataset=dataset, data_root=str(tmp_path), eval_split=test))
    assert len(parts.test) == 4
    assert len(parts.train) + len(parts.dev) == 30
    for found in parts.test:
        assert grade(found.solution or f"#### {found.gold}", found)[1]
    published = PUBLISHED[dataset].sizes[test]
    expected = f"{dataset} {test} has 4 questions; {' or '.join(map(str, published))} were published"
    assert expected in parts.notes


def test_math_is_also_read_from_its_original_folders(tmp_path: Path) -> None:
    for split, numbers in (("train", range(20)), ("test", range(20, 24))):
        for i in numbers:
            path = tmp_path / "math" / split / ("algebra" if i % 2 else "geometry") / f"{i}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"problem": f"{i}?", "level": "1", "solution": f"So \\boxed{{{i}}}"}))
    assert sorted(found.gold for found in splits(TaskSettings(dataset="math", data_root=str(tmp_path))).test) == [
        "20", "21", "22", "23",
    ]  # fmt: skip


def test_answers_that_are_not_published_are_not_missing_data(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"commonsense_qa test are not published .*eval_split: validation"):
        splits(TaskSettings(dataset="commonsense_qa", data_root=str(tmp_path)))


def test_a_source_replaces_a_published_dataset_of_its_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "my.jsonl", sums(0, 40))
    source = {"path": "my.jsonl", "grader": "number", "question": "q", "answer": "a"}
    task = {"dataset": "gsm8k", "data_root": str(tmp_path), "sources": {"gsm8k": source}}
    assert len(splits(TaskSettings.model_validate(task)).test) > 5


# Mining one dataset for another


def test_math_is_mined_and_all_of_math500_is_evaluated(tmp_path: Path) -> None:
    if not (DATA / "math500").is_dir():
        pytest.skip(f"the real data is not here: {DATA / 'math500'}")
    put(tmp_path, "math", "train", 0, 100)
    (tmp_path / "math500").symlink_to(DATA / "math500")
    task = TaskSettings(dataset="math500", train_dataset="math", data_root=str(tmp_path))
    parts = splits(task)
    assert len(parts.test) == 500
    assert len(parts.train) + len(parts.dev) == 100
    assert not any("math500" in note for note in parts.notes)  # its published size


@pytest.mark.parametrize("dataset", ["aime_2024", "svamp", "strategyqa"])
def test_a_dataset_of_one_file_is_evaluated_whole(dataset: str, tmp_path: Path) -> None:
    put(tmp_path, "gsm8k", "train", 100, 140)
    if dataset == "aime_2024":
        put(tmp_path, dataset, "train", 0, 30)  # its only file is named so
    else:
        path = tmp_path / dataset / {"svamp": "SVAMP.json", "strategyqa": "dev.json"}[dataset]
        write_json(path, [HUB[dataset][1](i) for i in range(30)])
    assert len(splits(TaskSettings(dataset=dataset, train_dataset="gsm8k", data_root=str(tmp_path))).test) == 30
    with pytest.raises(LabError, match=f"'held-out', but {dataset} has no splits"):
        splits(TaskSettings(dataset=dataset, train_dataset="gsm8k", data_root=str(tmp_path), eval_split="held-out"))


def test_questions_that_are_mined_and_evaluated_are_refused_between_datasets_too(tmp_path: Path) -> None:
    put(tmp_path, "math", "test", 0, 100)
    put(tmp_path, "math500", "test", 50, 60)
    crossed = {"dataset": "math500", "train_dataset": "math", "train_split": "test", "data_root": str(tmp_path)}
    with pytest.raises(LabError, match="10 of 100 questions of math test are also in math500 test"):
        splits(TaskSettings.model_validate(crossed))
    put(tmp_path, "math500", "test", 99, 199)
    parts = splits(TaskSettings.model_validate(crossed))
    assert len(parts.test) == 100
    assert len(parts.train) + len(parts.dev) == 99
    assert "1 of 100 questions of math test are also in math500 test and were dropped" in parts.notes[-1]


def test_generated_questions_may_be_mined_for_a_published_test(tmp_path: Path) -> None:
    put(tmp_path, "gsm8k", "test", 0, 30)
    make = GeneratorSettings(n_train=12, n_dev=5, n_test=3)
    parts = splits(TaskSettings(dataset="gsm8k", train_dataset="tiny", data_root=str(tmp_path), generator=make))
    assert [len(parts.train), len(parts.dev), len(parts.test)] == [12, 5, 30]
    write_json(tmp_path / "strategyqa" / "dev.json", [HUB["strategyqa"][1](i) for i in range(9)])
    crossed = {"dataset": "strategyqa", "train_dataset": "tiny", "eval_split": "dev", "data_root": str(tmp_path)}
    assert len(splits(TaskSettings.model_validate(crossed)).test) == 9


def test_the_stem_of_a_question_may_recur_with_other_choices(tmp_path: Path) -> None:
    def rows(first: int, words: Sequence[str]) -> Rows:
        return [
            {"question": f"Which? {i % 20}", "answer": words[0], "choices": [f"{word}{i}" for word in words]}
            for i in range(first, first + 20)
        ]

    for split, words in (("train", "ab"), ("test", "cd")):
        made = [{**row, "answer": row["choices"][0]} for row in rows(0, words)]
        write_jsonl(
            tmp_path / "q" / f"{split}.jsonl", made + [{**r, "question": f"{split} {r['question']}"} for r in made]
        )
    source = {"path": "q", "grader": "choice", "choices": "choices"}
    task = TaskSettings.model_validate({"dataset": "q", "data_root": str(tmp_path), "sources": {"q": source}})
    parts = splits(task)
    assert len(parts.test) == 40
    assert len(parts.train) + len(parts.dev) == 20  # the other 20 have a stem of test, and were dropped
    assert "20 of 40" in parts.notes[-1]


def test_an_unknown_dataset_to_mine_is_named_with_its_key() -> None:
    with pytest.raises(LabError, match=r"unknown dataset 'maths' in task\.train_dataset \(did you mean math"):
        splits(TaskSettings(dataset="tiny", train_dataset="maths"))


def test_a_suite_mines_once_for_several_tests() -> None:
    found = parse_settings({
        "task": {"dataset": "math500", "train_dataset": "math"},
        "prompt": {"template": "auto"},
        "suite": {"datasets": [{"name": "math500"}, {"name": "gsm8k", "train_dataset": "gsm8k"}]},
    })  # fmt: skip
    assert [(one.task.dataset, one.task.train_dataset) for one in found.members()] == [
        ("math500", "math"), ("gsm8k", "gsm8k"),
    ]  # fmt: skip


# Splits of generated questions


def generated(dataset: str, **more: Any) -> Splits:
    make = GeneratorSettings(n_train=12, n_dev=5, n_test=7)
    return splits(TaskSettings(dataset=dataset, generator=make, **more))


@pytest.mark.parametrize("dataset", ["tiny", "reasoning-gym/chain_sum"])
def test_the_splits_of_a_generated_dataset_are_those_that_the_config_names(dataset: str) -> None:
    if dataset != "tiny":
        pytest.importorskip("reasoning_gym")
    plain = generated(dataset)
    swapped = generated(dataset, train_split="test", eval_split="train")
    assert (swapped.train, swapped.dev, swapped.test) == (plain.test, plain.dev, plain.train)
    turned = generated(dataset, train_split="dev", dev_split="test", eval_split="train")
    assert (turned.train, turned.dev, turned.test) == (plain.dev, plain.test, plain.train)
    with pytest.raises(LabError, match=f"eval_split is 'dev', which {dataset} has for tuning"):
        generated(dataset, eval_split="dev")
    with pytest.raises(LabError, match=f"'validation', but {dataset} has train and dev and test"):
        generated(dataset, eval_split="validation")


# The whole pipeline


def test_a_dataset_of_ones_own_goes_through_all_stages(toy: Callable[..., EsmSettings], tmp_path: Path) -> None:
    rows = [{"ask": make_problem(i).question, "gold": make_problem(i).gold} for i in range(90)]
    write_csv(tmp_path / "additions.csv", rows)
    source = {"path": "additions.csv", "grader": "number", "question": "ask", "answer": "gold"}
    settings = toy({
        "task": {"dataset": "additions", "data_root": str(tmp_path), "sources": {"additions": source}},
        "prompt.template": "{question}",
    })  # fmt: skip
    config = tmp_path / "config.json"
    files.write_json(config, settings.plain())
    said: list[str] = []
    for stage in ("mine", "select", "memory", "eval"):
        row = stages.STAGES[stage](config, tmp_path / "run", said.append)
    assert row["dataset"] == "additions"
    assert any("divided by their hash" in line for line in said)
    assert row["ESM"] > row["Greedy-CoT"]


def test_the_dataset_that_the_guide_describes_is_read(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    page = Path(__file__).parents[3] / "docs" / "esm.md"
    raw = YAML(typ="safe").load(page.read_text().split("```yaml\n")[1].split("```")[0])
    raw["task"]["data_root"] = str(tmp_path)
    for split, first in (("train", 0), ("test", 30)):
        rows = [{"data": {"stem": f"{i}?", "options": ["no", "yes"]}, "key": "B"} for i in range(first, first + 30)]
        write_jsonl(tmp_path / "exam" / f"{split}.jsonl", rows)
    settings = parse_settings(raw)
    found = splits(settings.task).test
    assert len(found) == 30
    assert "A. no\nB. yes" in render(settings.prompt.template, found[0])
