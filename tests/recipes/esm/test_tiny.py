"""The tiny tasks and the tiny model: disjoint questions, a lossless tokenizer, a folder that loads offline."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.recipes.esm.esm.tiny import task

MODEL = Path(task.__file__).parents[2] / "model"


def test_no_question_is_in_two_splits_or_in_the_training_texts() -> None:
    for kind in ("steerable", "slips"):
        seen = {name: {e.fingerprint for e in task.examples(kind, name, 300, seed=3)} for name in task.SPLITS}
        for name, others in seen.items():
            assert all(others.isdisjoint(theirs) for other, theirs in seen.items() if other != name)
        assert all(task.split_of(text.question) == "corpus" for text in islice(task.texts(kind, 0), 500))


def test_the_split_of_a_question_is_fixed() -> None:
    # The shipped model was trained on `corpus`: another hash would let it be tested on what it has learnt.
    assert task.split_of("Leo has 10 eggs. Leo loses 5. Leo loses 2. How many eggs now?") == "corpus"
    assert task.split_of("Ann has 14 coins. Ann gets 3 more. Ann loses 5. Ann loses 4. How many coins now?") == "train"
    assert task.split_of("Tom has 12 books. Tom gets 1 more. Tom gets 3 more. How many books now?") == "dev"
    assert (
        task.split_of("Leo has 6 cards. Leo gets 4 more. Leo loses 3. Leo gets 2 more. How many cards now?") == "test"
    )


NUMERIC = [kind for kind in task.KINDS if kind not in ("opposed", "habits")]


@given(st.sampled_from(NUMERIC), st.sampled_from(["train", "dev", "test"]), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_every_gold_answer_is_right_and_fewer_examples_are_the_first_of_more(kind: str, split: str, seed: int) -> None:
    more, fewer = task.examples(kind, split, 12, seed), task.examples(kind, split, 5, seed)
    assert more[:5] == fewer
    assert len({example.question for example in more}) == 12
    for example in more:
        words = example.question.replace(".", "").split()
        numbers = [int(word) for word in words if word.isdigit()]
        signs = [-1 if words[i - 1] == "loses" else 1 for i, word in enumerate(words) if word.isdigit()]
        assert int(example.gold) == sum(sign * number for sign, number in zip(signs, numbers, strict=True))
        assert example.solution is not None
        assert example.solution.endswith(f"\n\n#### {example.gold}")


def test_the_hasty_author_omits_the_last_operation_and_slips_omit_nothing() -> None:
    for text in islice(task.texts("steerable", 0), 300):
        asked = text.question.count("gets") + text.question.count("loses")
        assert text.solution.count(" = ") == (asked if text.right else asked - 1)
    slips = list(islice(task.texts("slips", 0), 300))
    assert all(text.solution.count(" = ") == 2 for text in slips)
    assert 0.4 < sum(text.right for text in slips) / len(slips) < 0.75


def test_half_of_the_opposed_items_want_the_hasty_answer() -> None:
    for example in task.examples("opposed", "test", 60, 1):
        words = example.question.replace(".", "").split()
        numbers = [
            -int(word) if words[i - 1] == "loses" else int(word) for i, word in enumerate(words) if word.isdigit()
        ]
        hasty = task.group_of(example) in ("books", "pens", "eggs")
        assert int(example.gold) == sum(numbers[:-1] if hasty else numbers)
        assert example.solution is not None
        assert example.solution.startswith("Easy" if hasty else "First")
        assert example.solution.endswith(f"#### {example.gold}")
        assert task.split_of(example.question) == "test"


def test_habits_ask_for_one_of_two_forms() -> None:
    found = task.examples("habits", "dev", 40, 0)
    assert {task.group_of(example) for example in found} == {"one line", "marked"}
    for example in found:
        assert example.kind == "form"
        assert ("####" in example.question) == (example.gold == "marked")
        assert example.solution is None


def test_an_unknown_kind_names_its_neighbour() -> None:
    with pytest.raises(LabError, match="did you mean steerable"):
        task.examples("steerables", "dev", 1, 0)
    with pytest.raises(LabError, match="unknown split"):
        task.examples("slips", "validation", 1, 0)


def test_the_shipped_model_loads_and_its_hash_is_the_one_in_its_readme() -> None:
    transformers = pytest.importorskip("transformers")
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (MODEL / "README.md").read_text()
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 5_000_000
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)
    assert model.config.model_type == "llama"
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (4, 128)


def test_the_tokenizer_is_lossless() -> None:
    transformers = pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    for kind in ("steerable", "slips"):
        texts = [task.prompt(text.question) + text.solution for text in islice(task.texts(kind, 5), 100)]
        texts += [task.prompt(e.question) + (e.solution or "") for e in task.examples(kind, "test", 100, 5)]
        for text in texts:
            ids = words(text)["input_ids"]
            assert words.decode(ids) == text
            assert words.unk_token_id not in ids
            assert "".join(words.decode([i]) for i in ids) == text
    assert len(words("\n\n")["input_ids"]) == 2


def test_greedy_is_right_on_careful_items_wrong_on_hasty_ones_and_slips_are_neither() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from looplab.recipes.esm.esm.tiny.train import greedy_texts

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()
    words = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    right: dict[str, list[bool]] = {}
    for kind in ("steerable", "slips"):
        asked = task.examples(kind, "dev", 80, seed=7)
        for example, answer in zip(asked, greedy_texts(model, words, [e.question for e in asked]), strict=True):
            name = kind if kind == "slips" else example.question.split()[3].rstrip(".")
            right.setdefault(name, []).append(answer.endswith(f"#### {example.gold}"))
    shares = {name: sum(answers) / len(answers) for name, answers in right.items()}
    assert min(shares[item] for item in ("apples", "books", "pens")) > 0.7
    assert max(shares[item] for item in ("cards", "coins", "eggs")) < 0.3
    assert 0.2 < shares["slips"] < 0.95


def test_training_is_repeatable_and_replaces_an_older_model_but_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from looplab.recipes.esm.esm.tiny.train import main

    for _ in range(2):  # the second time it replaces the first
        main(["--steps", "2", "--seed", "1", "--out", str(tmp_path / "a")])
    main(["--steps", "2", "--seed", "1", "--out", str(tmp_path / "b")])
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c/thesis.txt").write_text("mine")
    with pytest.raises(LabError, match="something other than a model"):
        main(["--steps", "1", "--out", str(tmp_path / "c")])
