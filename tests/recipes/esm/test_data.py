from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm.config import GeneratorSettings, TaskSettings
from looplab.recipes.esm.esm.data import LETTERS, PUBLISHED, Example, Splits, check_disjoint, load_split, splits
from looplab.recipes.esm.esm.grading import grade

DATA = Path(__file__).parents[4] / "shared" / "data"
NAMES = "abcdefghijklmnopqrstuvwxyz"
SIZES = {"gsm8k": 8792, "arc-c": 2291, "svamp": 1000, "strategyqa": 229, "math500": 500}


def task(dataset: str, root: Path = DATA, **more: Any) -> TaskSettings:
    return TaskSettings(dataset=dataset, data_root=str(root), **more)


def real(dataset: str, **more: Any) -> Splits:
    if not (DATA / dataset).is_dir():
        pytest.skip(f"the real data is not here: {DATA / dataset}")
    return splits(task(dataset, **more))


def every(parts: Splits) -> list[Example]:
    return [*parts.train, *parts.dev, *parts.test]


def write_gsm8k(root: Path, **files: Mapping[str, str]) -> Path:
    """One file for each split, of questions and answers."""
    (root / "gsm8k").mkdir()
    for split, rows in files.items():
        lines = [json.dumps({"question": q, "answer": f"It is <<1+1=2>>so.\nYes.\n#### {a}"}) for q, a in rows.items()]
        (root / "gsm8k" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def questions(first: int, last: int) -> dict[str, str]:
    return {f"What is {i} and 0?": str(i) for i in range(first, last)}


def one_file(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "svamp").mkdir()
    (root / "svamp" / "SVAMP.json").write_text(json.dumps(rows))
    return root


def story(i: int, **more: Any) -> dict[str, Any]:
    return {
        "ID": f"c{i}",
        "Body": f"{NAMES[i % 26]}{NAMES[i // 26]} has {i} eggs",
        "Question": "How many?",
        "Answer": float(i),
        **more,
    }


@pytest.mark.parametrize("dataset", SIZES)
def test_every_row_of_a_published_dataset_is_read_and_its_own_solution_is_right(dataset: str) -> None:
    parts = real(dataset)
    examples = every(parts)
    dropped = 6 if dataset == "arc-c" else 0
    assert len(examples) == SIZES[dataset] - dropped
    assert len({example.id for example in examples}) == len(examples)
    for example in examples:
        assert grade(f"So it is.\n\n#### {example.gold}", example)[1], example
        if example.kind == "choice":
            words = example.choices[LETTERS.index(example.gold)]
            assert grade(f"The answer is {words}", example)[1], example
        else:
            assert example.solution is not None
            assert grade(example.solution, example)[1], example


@pytest.mark.parametrize("dataset", SIZES)
def test_the_splits_of_a_published_dataset_share_no_question(dataset: str) -> None:
    parts = real(dataset)
    check_disjoint(parts)
    assert min(len(parts.train), len(parts.dev), len(parts.test)) >= 20


def test_questions_that_arc_publishes_twice_are_dropped_from_train_with_a_note() -> None:
    parts = real("arc-c")
    assert len(parts.test) == 1172
    assert len(parts.notes) == 1
    assert "6 of 1119" in parts.notes[0]
    assert "Mercury_7268223 = Mercury_7268240" in parts.notes[0]


def test_stories_that_svamp_varies_stay_in_one_part() -> None:
    parts = real("svamp")
    families = [{example.family for example in part} for part in (parts.train, parts.dev, parts.test)]
    assert all(example.family for example in every(parts))
    assert not families[0] & families[2]
    assert not families[0] & families[1]
    assert not families[1] & families[2]


def test_aime_is_one_parquet_file_of_numbers(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"id": i, "problem": f"Find {i}.", "solution": f"So \\boxed{{{a}}}", "answer": a, "url": "", "year": "2024"}
        for i, a in ((60, "204"), (61, "033"))
    ]
    (tmp_path / "aime_2024" / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "aime_2024" / "data" / "train-00000-of-00001.parquet")
    examples = sorted(every(splits(task("aime_2024", tmp_path))), key=lambda example: example.id)
    assert [(example.id, example.gold, example.kind) for example in examples] == [
        ("60", "204", "number"),
        ("61", "33", "number"),
    ]
    assert all(grade(example.solution or "", example)[1] for example in examples)


def test_a_solution_is_in_segments_without_the_calculators_notes(tmp_path: Path) -> None:
    write_gsm8k(tmp_path, train=questions(0, 40), test=questions(40, 60))
    assert splits(task("gsm8k", tmp_path)).test[0].solution == "It is so.\n\nYes.\n\n#### 40"


def test_dev_is_cut_off_train_by_the_question_and_not_by_its_place(tmp_path: Path) -> None:
    write_gsm8k(tmp_path, train=questions(0, 200), test=questions(200, 220))
    before = splits(task("gsm8k", tmp_path))
    (tmp_path / "turned").mkdir()
    turned = dict(reversed(questions(0, 200).items()))
    after = splits(task("gsm8k", write_gsm8k(tmp_path / "turned", train=turned, test=questions(200, 220))))
    assert {example.question for example in before.dev} == {example.question for example in after.dev}
    assert 20 < len(before.dev) < 80
    assert len(before.train) + len(before.dev) == 200
    other = splits(task("gsm8k", tmp_path, split_seed=1))
    assert {example.id for example in other.dev} != {example.id for example in before.dev}


def test_a_published_dev_file_is_used_when_it_is_named(tmp_path: Path) -> None:
    write_gsm8k(tmp_path, train=questions(0, 10), valid=questions(10, 15), test=questions(15, 20))
    parts = splits(task("gsm8k", tmp_path, dev_split="valid"))
    assert [len(parts.train), len(parts.dev), len(parts.test)] == [10, 5, 5]


def test_a_few_shared_questions_are_dropped_with_a_note(tmp_path: Path) -> None:
    test = questions(200, 300) | {"  what IS 7 and   0": "7"}
    parts = splits(task("gsm8k", write_gsm8k(tmp_path, train=questions(0, 200), test=test)))
    assert len(parts.train) + len(parts.dev) == 199
    assert len(parts.test) == 101
    assert "train-7 = test-100" in parts.notes[-1]


def test_files_that_share_many_questions_are_rejected(tmp_path: Path) -> None:
    write_gsm8k(tmp_path, train=questions(0, 200), test=questions(190, 300))
    with pytest.raises(LabError, match="train-190 = test-0"):
        splits(task("gsm8k", tmp_path))


def test_parts_that_overlap_are_refused_with_a_pair() -> None:
    one, twin = Example("a", "What  is it?", "1", "number"), Example("b", "what is IT", "1", "number")
    with pytest.raises(LabError, match="a = b"):
        check_disjoint(Splits([one], [], [twin]))
    with pytest.raises(LabError, match="train and dev"):
        check_disjoint(Splits([one], [twin], []))


def test_one_file_is_divided_whole_and_without_order(tmp_path: Path) -> None:
    parts = splits(task("svamp", one_file(tmp_path, [story(i) for i in range(300)])))
    assert len(every(parts)) == 300
    assert 100 < len(parts.test) < 200
    assert parts.test != [example for example in parts.test if int(example.id[1:]) >= 300 - len(parts.test)]


def test_one_file_with_split_fields_is_divided_by_them(tmp_path: Path) -> None:
    rows = [story(i, Split="test" if i % 2 else "train") for i in range(100)]
    parts = splits(task("svamp", one_file(tmp_path, rows)))
    assert len(parts.test) == 50
    assert all(int(example.id[1:]) % 2 for example in parts.test)
    with pytest.raises(LabError, match="train and test"):
        splits(task("svamp", tmp_path, dev_split="validation"))


def test_a_sample_is_seeded_nested_and_not_the_first_rows(tmp_path: Path) -> None:
    write_gsm8k(tmp_path, train=questions(0, 200), test=questions(200, 400))
    few = splits(task("gsm8k", tmp_path, max_train_examples=10, max_eval_examples=20))
    more = splits(task("gsm8k", tmp_path, max_train_examples=30, max_eval_examples=40, max_dev_examples=5))
    assert [len(few.train), len(few.dev), len(few.test)] == [10, 20, 20]
    assert [len(more.train), len(more.dev), len(more.test)] == [30, 5, 40]
    assert set(few.test) < set(more.test)
    assert few == splits(task("gsm8k", tmp_path, max_train_examples=10, max_eval_examples=20))
    assert {example.id for example in few.test} != {f"test-{i}" for i in range(20)}
    seeded = splits(task("gsm8k", tmp_path, max_eval_examples=20, split_seed=3))
    assert seeded.test != few.test


@pytest.mark.parametrize("dataset", PUBLISHED)
def test_missing_data_says_what_was_looked_for_and_how_to_get_it(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(LabError) as caught:
        splits(task(dataset, tmp_path, eval_split="validation" if dataset == "commonsense_qa" else "test"))
    assert str(tmp_path / dataset) in str(caught.value)
    assert PUBLISHED[dataset].origin in str(caught.value)
    assert "data_root" in str(caught.value)


def test_an_unknown_dataset_is_told_with_a_near_one() -> None:
    with pytest.raises(LabError, match="did you mean gsm8k"):
        splits(task("gsm8"))


@pytest.mark.parametrize("line", ['{"question": "Who?"}', '{"question": 1', '{"question": "Who?", "answer": "He."}'])
def test_a_row_in_another_form_is_named_with_its_file(line: str, tmp_path: Path) -> None:
    write_gsm8k(tmp_path, train=questions(0, 10), test=questions(10, 20))
    (tmp_path / "gsm8k" / "test.jsonl").write_text(line + "\n")
    with pytest.raises(LabError, match=r"test\.jsonl"):
        splits(task("gsm8k", tmp_path))


def test_an_empty_split_is_an_error_when_it_is_loaded() -> None:
    empty = task("tiny", generator=GeneratorSettings(n_train=3, n_dev=0, n_test=3))
    assert len(load_split(empty, "train")) == 3
    with pytest.raises(LabError, match="the dev split of tiny is empty"):
        load_split(empty, "dev")


@pytest.mark.parametrize("kind", ["steerable", "slips", "addition1", "addition2"])
def test_our_own_tasks_are_disjoint_and_their_solutions_right(kind: str) -> None:
    make = GeneratorSettings.model_validate({"kind": kind, "n_train": 40, "n_dev": 30, "n_test": 50})
    parts = splits(task("tiny", generator=make))
    assert [len(parts.train), len(parts.dev), len(parts.test)] == [40, 30, 50]
    assert all(grade(example.solution or "", example)[1] for example in every(parts))


@pytest.mark.parametrize("kind", ["gsm_symbolic", "basic_arithmetic", "chain_sum"])
def test_generated_questions_fall_into_parts_by_their_text(kind: str) -> None:
    pytest.importorskip("reasoning_gym")
    small, large = (
        splits(task(f"reasoning-gym/{kind}", generator=GeneratorSettings(n_train=n, n_dev=10, n_test=20)))
        for n in (10, 40)
    )
    assert [len(large.train), len(large.dev), len(large.test)] == [40, 10, 20]
    assert small.test == large.test
    assert small.train == large.train[:10]
    assert all(grade(example.solution or f"#### {example.gold}", example)[1] for example in every(large))


def test_a_generator_that_runs_out_of_questions_says_so() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    make = GeneratorSettings(n_train=300, n_dev=1, n_test=1, options=options)
    with pytest.raises(LabError, match="too few different questions"):
        splits(task("reasoning-gym/chain_sum", generator=make))


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("chain_sm", {}, "did you mean chain_sum"),
        ("chain_sum", {"terms": 3}, "terms"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "max_terms"),
        ("countdown", {}, "not numbers"),
    ],
)
def test_a_generator_that_cannot_be_used_is_told_why(kind: str, options: dict[str, Any], told: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(LabError, match=told):
        splits(task(f"reasoning-gym/{kind}", generator=GeneratorSettings(options=options)))
