"""The lab file of the recipe: its suites and its cases."""

from __future__ import annotations

from pathlib import Path

from looplab import recipes
from looplab.config.files import read_config
from looplab.config.lab import load_lab
from looplab.pipeline.case import case_argv
from looplab.pipeline.folder import RunFolder
from looplab.pipeline.plan import make_plan
from looplab.pipeline.suite import Dataset, dataset_config, make_suite, read_suite

RECIPE = Path(recipes.__file__).parent / "esm"


def test_the_suite_of_the_recipe_has_one_run_per_task_and_the_tables_of_the_method() -> None:
    lab = load_lab(RECIPE)
    suite = make_suite(lab, lab.study(None), RECIPE / "configs/suite_tiny.yaml", "s")
    assert [str(job.run.path.relative_to(RECIPE)) for job in suite.jobs] == [
        "outputs/suite_tiny_steerable/s",
        "outputs/suite_tiny_slips/s",
    ]
    assert [job.plan.config["task"]["generator"]["kind"] for job in suite.jobs] == ["steerable", "slips"]
    assert suite.settings.tables == {
        "suite_main_results.csv": "tables/main_results_single.csv",
        "suite_ablation_long.csv": "tables/ablation.csv",
    }


def test_every_short_name_of_a_dataset_reaches_its_key() -> None:
    settings, base, _ = read_suite(RECIPE / "configs/suite_tiny.yaml", RECIPE, load_lab(RECIPE).study(None).suite)
    entry = {"name": "svamp", "prompt_template": "svamp_0shot", "data_root": "d", "train_split": "train",
             "eval_split": "test", "max_train_examples": 10, "max_eval_examples": None, "max_new_tokens": 9}  # fmt: skip
    config = dataset_config(settings, base, Dataset.model_validate(entry))
    assert config["task"] == {"dataset": "svamp", "data_root": "d", "train_split": "train", "eval_split": "test",
                              "max_train_examples": 10, "max_eval_examples": None}  # fmt: skip
    assert (config["prompt"]["template"], config["decode"]["max_new_tokens"]) == ("svamp_0shot", 9)


def test_the_options_of_a_case_reach_its_command(tmp_path: Path) -> None:
    lab = load_lab(RECIPE)
    plan = make_plan(lab, lab.study(None), read_config(RECIPE / "configs/debug.yaml"), "configs/debug.yaml", ())
    options = {"example_ids": "0,6", "methods": "greedy", "tag": "dbg"}
    argv = case_argv(plan, RunFolder(tmp_path), tmp_path / "c.json", options)
    assert argv[-8:] == ["--example-ids", "0,6", "--max-new-tokens", "64", "--methods", "greedy", "--tag", "dbg"]
