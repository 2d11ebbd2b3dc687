"""Cases on paper, and the commands that a person types: run.py from mine to case."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import looplab
from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.recipes.esm.esm import cases, evaluate, stages
from looplab.recipes.esm.esm.data import Example

RECIPE = Path(looplab.__file__).parent / "recipes" / "esm"
EXAMPLES = [Example(f"dev-{i + 3}", f"question {i}", "1", "number") for i in range(5)]


def quiet(text: str) -> None:
    pass


@pytest.fixture
def done(config_file: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A config and a run folder in which all stages are complete."""
    config, run_dir = config_file(), tmp_path / "outputs" / "toy" / "first"
    for stage in ("mine", "select", "memory", "eval"):
        stages.STAGES[stage](config, run_dir, quiet)
    return config, run_dir


def test_examples_are_selected_by_index_or_id() -> None:
    assert cases.pick(EXAMPLES, "0, dev-5,0") == [EXAMPLES[0], EXAMPLES[2]]
    with pytest.raises(LabError, match="0 to 4, or an id such as dev-3"):
        cases.pick(EXAMPLES, "5")


def test_the_cases_of_an_evaluation_show_what_was_fixed(done: tuple[Path, Path]) -> None:
    text = (done[1] / "cases" / "cases_T64.md").read_text()
    compared = json.loads((done[1] / "tables" / "compare_T64.json").read_bytes())
    assert f"## Fixed by ESM: {compared['win']}" in text
    assert f"### {compared['win_ids'][0]}" in text
    assert "injected `pair_" in text


def test_a_case_shows_prompt_candidates_decisions_and_segments(done: tuple[Path, Path]) -> None:
    config, run_dir = done
    compared = json.loads((run_dir / "tables" / "compare_T64.json").read_bytes())
    file = stages.case(config, run_dir, f"0,{compared['win_ids'][-1]}", "greedy,esm", "dbg", None, quiet)
    assert file == run_dir / "cases" / "dbg_greedy-esm_T64.md"
    text = file.read_text()
    for part in (
        "Correct answer:",
        "#### greedy: incorrect",
        "#### esm: correct",
        "**Segment 2**: injected",
        "| candidate | cos |",
    ):
        assert part in text
    assert len((run_dir / "eval" / "dbg_ESM_T64" / "per_example.jsonl").read_text().splitlines()) == 2


def test_looking_at_stored_answers_is_not_a_new_reading(config_file: Callable[..., Path], tmp_path: Path) -> None:
    config, run_dir = config_file({"eval.split": "test"}), tmp_path / "outputs" / "toy" / "first"
    for stage in ("mine", "select", "memory", "eval"):
        stages.STAGES[stage](config, run_dir, quiet)
    stages.case(config, run_dir, "0,1", "greedy,esm", "dbg", None, quiet)
    reads = evaluate.reads_file(stages.load(config))
    assert reads.read_text().count('"begin"') == 1
    stages.case(config, run_dir, "0,1", "no_probing", "dbg", None, quiet)  # new answers to test questions
    assert reads.read_text().count('"begin"') == 2


def test_a_tag_that_is_a_path_is_rejected(done: tuple[Path, Path]) -> None:
    with pytest.raises(LabError, match="tag"):
        stages.case(*done, "0", "greedy", "../x", None, quiet)


def test_tuning_uses_half_of_dev_by_the_seed_and_never_the_test(
    done: tuple[Path, Path], config_file: Callable[..., Path]
) -> None:
    _, run_dir = done
    seen = []
    for seed in (1, 2):
        config = config_file({"seed": seed, "eval.artifact_run_dir": str(run_dir), "eval.split": "test"})
        out = run_dir.parent / f"tune{seed}"
        found = stages.run_tune(config, out, quiet)
        assert found["dev/delta"] == pytest.approx(found["dev/accuracy"] - found["dev/greedy_accuracy"])
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == 20
        assert rows[-1]["dev/delta"] == pytest.approx(found["dev/delta"])
        answers = (out / "eval" / "ESM_T64" / "per_example.jsonl").read_text().splitlines()
        seen.append({json.loads(line)["example_id"] for line in answers})
    assert all("-dev-" in name for names in seen for name in names)
    assert seen[0] != seen[1]
    assert not (run_dir.parent / "test_reads.jsonl").exists()


def test_the_recipe_runs_where_it_was_copied_to(config_file: Callable[..., Path], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    shutil.copytree(RECIPE, lab, ignore=shutil.ignore_patterns("__pycache__", "__init__.py", "model"))
    config = config_file({"task.generator.n_train": 16, "task.generator.n_dev": 8})

    def run(*tokenizer: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "run.py",
            tokenizer[0],
            "--config",
            str(config),
            "--run-dir",
            "outputs/a/b",
            *tokenizer[1:],
        ]
        return subprocess.run(command, cwd=lab, capture_output=True, text=True, check=False)

    early = run("eval")
    assert early.returncode == 2
    assert early.stderr.startswith("error: ")
    for stage in ("mine", "select", "memory", "eval"):
        done = run(stage)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["n"] == 8
    made = run("case", "--example-ids", "0", "--max-new-tokens", "32", "--tag", "x")
    assert (lab / made.stdout.splitlines()[-1]).read_text().startswith("# x: tiny dev, T_max 32")


def test_the_lab_passes_its_check(tmp_path: Path) -> None:
    for command in (["init", "esm", str(tmp_path / "lab")], ["check", "--lab", str(tmp_path / "lab")]):
        done = subprocess.run([sys.executable, "-m", "looplab", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_study_tunes_only_online_settings_on_dev() -> None:
    study = load_lab(RECIPE).study(None)
    assert all(knob.startswith("online.") for knob in study.knobs)
    assert study.objective.metric.startswith("dev/")
    assert stages.load(RECIPE / "configs" / "tune.yaml").eval.split == "dev"
