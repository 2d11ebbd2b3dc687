"""Evaluation: resumable, with artifacts that fit, on questions that were not mined, and with the test set counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm import evaluate, files, memory, mine, select
from looplab.recipes.esm.esm.backends.toy import ToyBackend
from looplab.recipes.esm.esm.config import EsmSettings
from looplab.recipes.esm.esm.data import splits
from looplab.recipes.esm.esm.evaluate import Method, Report

Toy = Callable[..., EsmSettings]
ABLATIONS = ["no_memory", "no_probing", "random_direction", "shuffled_retrieval", "mean_vector"]


def quiet(text: str) -> None:
    pass


def offline(settings: EsmSettings, run_dir: Path) -> None:
    mine.run(settings, ToyBackend(), splits(settings.task).train, run_dir, quiet)
    select.run(settings, run_dir)
    memory.run(settings, run_dir)


@pytest.fixture
def mined(toy: Toy, tmp_path: Path) -> Path:
    """A run folder with a memory."""
    run_dir = tmp_path / "outputs" / "toy" / "first"
    offline(toy(), run_dir)
    return run_dir


def answer(settings: EsmSettings, run_dir: Path, log: Callable[[str], None] = quiet, **options: Any) -> Report:
    split = settings.eval.split
    methods = options.pop("methods", None) or evaluate.requested_methods(settings)
    examples = getattr(splits(settings.task), split)
    backend = options.pop("backend", None) or ToyBackend()
    return evaluate.run(settings, backend, examples, run_dir, split=split, methods=methods, log=log, **options)


class NoModel(ToyBackend):
    """Fails as soon as anything is generated."""

    def start_session(self, prompts: Any, seeds: Any) -> Any:
        raise AssertionError("the model was asked")


def test_from_questions_to_a_gain_with_all_controls(toy: Toy, mined: Path) -> None:
    settings = toy({"eval.ablations": ABLATIONS, "eval.seeds": [0, 1]})
    report = answer(settings, mined)
    assert report.accuracy("esm") > report.accuracy("greedy") + 0.2
    assert report.accuracy("no_memory") == report.accuracy("greedy")
    assert report.accuracy("random_direction") == pytest.approx(report.accuracy("greedy"), abs=0.1)
    assert report.test_reads == 0
    hashes = [[row["tokens_hash"] for row in report.rows[name][0]] for name in ("greedy", "no_memory")]
    assert hashes[0] == hashes[1]


def test_only_what_is_random_is_repeated(toy: Toy) -> None:
    settings = toy({"eval.ablations": ABLATIONS, "eval.seeds": [5, 6]})
    tags = [method.tag(64) for method in evaluate.requested_methods(settings)]
    assert [tag for tag in tags if tag.endswith("_s6")] == ["random_direction_T64_s6", "shuffled_retrieval_T64_s6"]
    sampled = evaluate.requested_methods(settings.changed({"decode.temperature": 0.5}))
    assert len(sampled) == 2 * 7


class Counting(ToyBackend):
    """Counts the prompts of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def start_session(self, prompts: Any, seeds: Any) -> Any:
        self.asked.append(len(prompts))
        return super().start_session(prompts, seeds)


@pytest.mark.parametrize("kept", [0, 1, 16, 25, 39])
def test_an_interrupted_evaluation_forms_the_same_batches_and_has_the_same_bytes(
    toy: Toy, mined: Path, kept: int
) -> None:
    settings = toy({"online.batch_size_examples": 16})
    whole = answer(settings, mined)
    file = mined / "eval" / "ESM_T64" / "per_example.jsonl"
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + lines[kept][:30])  # the last line is torn
    backend = Counting()
    assert answer(settings, mined, backend=backend).rows == whole.rows
    assert backend.asked == [16, 16, 8][kept // 16 :]
    assert file.read_bytes() == content


def test_a_recorded_answer_is_never_replaced(toy: Toy, mined: Path) -> None:
    answer(toy(), mined)
    file = mined / "eval" / "ESM_T64" / "per_example.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:25]))
    backend = Counting()
    answer(toy({"online.batch_size_examples": 10}), mined, backend=backend)  # 20 to 29 are one batch
    assert backend.asked == [10, 10]
    assert file.read_bytes().splitlines(keepends=True)[:25] == lines[:25]
    assert [row["example_id"] for row in files.read_jsonl(file)] == [f"addition2-dev-0-{n}" for n in range(40)]


def test_greedy_and_no_memory_make_the_same_calls(toy: Toy, mined: Path) -> None:
    """Hence the same bits on any CPU, not only the same tokens."""
    calls: list[tuple[Any, ...]] = []

    class Recording(ToyBackend):
        def start_session(self, prompts: Any, seeds: Any) -> Any:
            session = super().start_session(prompts, seeds)
            generate = session.generate

            def recorded(*given: Any, **options: Any) -> Any:
                calls.append((*map(str, given), options))
                return generate(*given, **options)

            session.generate = recorded  # type: ignore[method-assign]
            calls.append((tuple(prompts), tuple(seeds)))
            return session

    for name in ("greedy", "no_memory"):
        answer(toy(), mined, methods=[Method(name, 0)], backend=Recording())
    half = len(calls) // 2
    assert half > 2
    assert calls[:half] == calls[half:]


def test_a_complete_evaluation_generates_nothing(toy: Toy, mined: Path) -> None:
    first = answer(toy(), mined)
    assert answer(toy(), mined, backend=NoModel()).rows == first.rows


def test_answers_of_other_settings_are_not_reused(toy: Toy, mined: Path) -> None:
    answer(toy(), mined)
    other = answer(toy({"online.k_scale": 0.0}), mined)
    assert other.accuracy("esm") == other.accuracy("greedy")


def test_the_same_config_reads_the_test_set_once(toy: Toy, mined: Path) -> None:
    settings = toy({"eval.split": "test"})
    messages: list[str] = []
    first = answer(settings, mined)
    again = answer(settings, mined, messages.append, backend=NoModel())
    assert first.test_reads == again.test_reads == 1
    assert again.rows == first.rows
    assert "no new reading" in messages[0]
    lines = files.read_jsonl(evaluate.reads_file(settings))
    assert [line["event"] for line in lines] == ["begin", "done"]
    assert lines[1]["results"] == {name: first.accuracy(name) for name in ("greedy", "esm")}


def test_another_run_of_the_same_config_gets_the_stored_answers(toy: Toy, mined: Path) -> None:
    first = answer(toy({"eval.split": "test"}), mined)
    settings = toy({"eval.split": "test", "eval.artifact_run_dir": str(mined)})
    second = answer(settings, mined.parent / "second", backend=NoModel())
    assert second.test_reads == 1
    assert second.rows == first.rows


def test_another_config_is_a_new_reading(toy: Toy, mined: Path) -> None:
    answer(toy({"eval.split": "test"}), mined)
    messages: list[str] = []
    changed = toy({"eval.split": "test", "online.k_scale": 2.0})
    assert answer(changed, mined, messages.append).test_reads == 2
    assert "reading 2 of the test set" in messages[0]
    assert answer(toy({"eval.split": "test"}), mined).test_reads == 1  # back to the first: no third


def test_a_reading_counts_when_it_starts(toy: Toy, mined: Path) -> None:
    settings = toy({"eval.split": "test"})
    with pytest.raises(AssertionError, match="asked"):
        answer(settings, mined, backend=NoModel())
    assert answer(toy({"eval.split": "test", "online.beta": 2.0}), mined).test_reads == 2


def test_dev_is_not_counted(toy: Toy, mined: Path) -> None:
    answer(toy(), mined)
    assert not evaluate.reads_file(toy()).exists()


def test_a_memory_of_another_model_is_rejected_with_all_differences(toy: Toy, mined: Path) -> None:
    class Other(ToyBackend):
        fingerprint = "other"
        width = 32

    with pytest.raises(
        LabError,
        match=r"model is 'toy-.*' in the memory, 'other' in this config; width is 16 in the memory, 32 in this config",
    ):
        answer(toy(), mined, backend=Other())
    with pytest.raises(LabError, match="segment_delimiter"):
        answer(toy({"control_points.segment_delimiter": "."}), mined)


def test_questions_that_were_mined_cannot_be_evaluated(toy: Toy, mined: Path) -> None:
    settings = toy()
    examples = [*splits(settings.task).dev, splits(settings.task).train[3]]
    with pytest.raises(LabError, match=r"1 questions .* mined .* addition2-train-0-3"):
        evaluate.run(settings, ToyBackend(), examples, mined, split="dev", methods=[Method("esm", 0)], log=quiet)


def test_artifacts_are_found_through_latest(toy: Toy, mined: Path) -> None:
    (mined.parent / "LATEST").write_text(mined.name + "\n")
    settings = toy({"eval.artifact_run_dir": str(mined.parent / "latest")})
    assert evaluate.artifact_dir(settings, Path("x")) == mined
    assert answer(settings, mined.parent / "online").accuracy("esm") > 0.5
    (mined.parent / "LATEST").unlink()
    with pytest.raises(LabError, match="mine select memory"):
        evaluate.artifact_dir(settings, Path("x"))


def test_missing_artifacts_are_reported_with_a_hint(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="looplab stage --config CONFIG mine select memory"):
        answer(toy(), tmp_path / "nothing")


def test_a_changed_memory_is_another_experiment(toy: Toy, mined: Path) -> None:
    answer(toy({"eval.split": "test"}), mined)
    shutil.rmtree(mined / "library")
    shutil.rmtree(mined / "memory")
    settings = toy({"eval.split": "test", "offline_select.B": 8})
    select.run(settings, mined)
    memory.run(settings, mined)
    assert answer(settings, mined).test_reads == 2


def test_a_baseline_can_have_its_own_settings_within_one_reading(toy: Toy, mined: Path) -> None:
    settings = toy({"eval.split": "test", "eval.ablations": ["no_probing"]})
    report = answer(settings, mined, own={"no_probing": toy({"online.k_scale": 0.0})})
    assert report.accuracy("no_probing") == report.accuracy("greedy") < report.accuracy("esm")
    assert report.test_reads == 1


def test_a_majority_vote_counts_answers_and_pays_for_all_of_them(toy: Toy, mined: Path) -> None:
    settings = toy({"eval.methods": ["greedy", "majority"], "eval.vote_samples": 5, "eval.vote_temperature": 1.0})
    report = answer(settings, mined)
    for row in report.rows["majority"][0]:
        preds = [vote["pred"] for vote in row["votes"]]
        assert len(preds) == 5
        assert preds.count(row["pred"]) == max(map(preds.count, preds))
        assert row["tokens_used"] == row["budget_used"] == sum(vote["tokens_used"] for vote in row["votes"])
    assert report.rows["majority"] == answer(settings, mined, backend=NoModel()).rows["majority"]
    fewer = answer(settings.changed({"eval.vote_samples": 3}), mined)
    assert all(len(row["votes"]) == 3 for row in fewer.rows["majority"][0])


def test_the_line_of_the_prompt_baseline_reaches_the_model(toy: Toy, mined: Path) -> None:
    asked: list[str] = []

    class Listening(ToyBackend):
        def start_session(self, prompts: Any, seeds: Any) -> Any:
            asked.extend(prompts)
            return super().start_session(prompts, seeds)

    answer(toy({"eval.prompt_line": "Be exact."}), mined, methods=[Method("prompt", 0)], backend=Listening())
    assert asked
    assert all("now? Write the addition, then the answer. Be exact." in text for text in asked)


def test_rivals_need_no_memory(toy: Toy, tmp_path: Path) -> None:
    report = answer(toy({"eval.methods": ["greedy", "majority", "prompt"]}), tmp_path / "nothing")
    assert set(report.seconds) == {"greedy", "majority", "prompt"}


def test_a_method_has_its_own_settings_from_the_config(toy: Toy, mined: Path) -> None:
    settings = toy({"eval.ablations": ["mean_vector"], "eval.own": {"mean_vector": {"k_scale": 0.0}}})
    report = answer(settings, mined, own=settings.own())
    assert report.accuracy("mean_vector") == report.accuracy("greedy") < report.accuracy("esm")
    with pytest.raises(LabError, match="k_scal"):
        toy({"eval.own": {"mean_vector": {"k_scal": 0.0}}}).own()


def test_the_mean_vector_is_that_of_all_mined_pairs_not_of_the_library(toy: Toy, mined: Path) -> None:
    settings = toy({"offline_select.B": 8})
    select.run(settings, mined)
    memory.run(settings, mined)
    held, _ = memory.load(mined / "memory")
    rows = [row for row in files.read_jsonl(mined / "mine" / "candidates.jsonl") if row["vector_path"]]
    vectors = files.read_arrays(mined / "mine" / "vectors.safetensors")
    for m, mean in held.means().items():
        pairs = [vectors[row["tool_id"]] for row in rows if (row["control_point_m"], row["layer"]) == (m, mean.layer)]
        assert len(pairs) > 8
        assert mean.vector == pytest.approx(np.mean(pairs, axis=0), abs=1e-5)
