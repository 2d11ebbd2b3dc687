"""Studies: every rival in the table, choices on dev only, a plan that cannot change, and exact resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

import looplab
from looplab.errors import LabError
from looplab.recipes.esm.esm import evaluate, files, study
from looplab.recipes.esm.esm.backends.toy import ToyBackend
from looplab.recipes.esm.esm.study import Study, StudyPlan

RECIPE = Path(looplab.__file__).parent / "recipes" / "esm"
GRID = {"online.k_scale": [1.0], "online.layers": [[2], [3]]}
METHODS = [
    "greedy", "prompt", "majority", "mean_vector", "esm", "no_probing", "shuffled_retrieval", "random_direction"
]  # fmt: skip


def quiet(text: str) -> None:
    pass


def make_plan(**changes: Any) -> StudyPlan:
    config = {
        "model": {"backend": "toy"},
        "task": {"dataset": "tiny", "generator": {"kind": "addition2", "n_train": 24, "n_dev": 20, "n_test": 30}},
        "prompt": {"template": "tiny"},
        "decode": {"max_new_tokens": 64},
        "control_points": {"M": 4},
        "offline_mine": {"max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0, "candidate_layers": [2, 3],
                         "batch_size_examples": 8},
        "online": {"batch_size_examples": 10},
        "eval": {"bootstrap": 200, "prompt_line": "Be exact."},
    }  # fmt: skip
    plain = {"title": "A test", "expect": "Nothing", "config": config, "methods": METHODS, "seeds": [0, 1],
             "tune": {"esm": GRID, "mean_vector": GRID, "majority": {"eval.vote_temperature": [0.5, 1.0]}},
             "like": dict.fromkeys(("no_probing", "shuffled_retrieval", "random_direction"), "esm")}  # fmt: skip
    return StudyPlan.model_validate(plain | changes)


def make(folder: Path, **changes: Any) -> Study:
    return study.prepare("test", make_plan(**changes), None, folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, dict[str, Any]]:
    made = make(tmp_path_factory.mktemp("study"))
    return made, study.run(made, quiet)


def test_every_rival_is_in_the_table_with_interval_test_tokens_and_seconds(done: tuple[Study, dict[str, Any]]) -> None:
    made, result = done
    rows = {row["method"]: row for row in result["methods"]}
    assert list(rows) == METHODS
    assert rows["esm"]["acc"] > rows["greedy"]["acc"]
    assert rows["random_direction"]["acc"] == pytest.approx(rows["greedy"]["acc"], abs=0.1)
    for name, row in rows.items():
        assert row["n"] == 30
        assert row["tokens"] > 0
        assert row["cpu_seconds"] is not None
        if name != "greedy":
            assert row["minus_greedy_low"] <= row["minus_greedy"] <= row["minus_greedy_high"]
            assert 0 <= row["mcnemar_p_greedy"] <= 1
    text = (made.folder / "tables" / "results.md").read_text()
    for shown in ("majority vote", "one mean vector", "one more line in the prompt", "random direction"):
        assert f"| {shown} |" in text
    assert text.startswith(f"**{result['headline']}**")
    assert len((made.folder / "tables" / "results.csv").read_text().splitlines()) == 1 + len(METHODS)


def test_voting_gets_at_least_the_tokens_of_esm(done: tuple[Study, dict[str, Any]]) -> None:
    _, result = done
    rows = {row["method"]: row for row in result["methods"]}
    assert rows["majority"]["tokens"] >= rows["esm"]["tokens"] + rows["esm"]["probe_tokens"]
    assert result["chosen"]["0"]["majority"]["eval.vote_samples"] >= study.MIN_VOTES


def test_seeds_mine_other_questions_and_share_dev_and_test(done: tuple[Study, dict[str, Any]]) -> None:
    made, result = done
    mined = [{one.fingerprint for one in made.questions(seed)[0]} for seed in (0, 1)]
    assert len(mined[0]) == len(mined[1]) == 24
    assert not mined[0] & mined[1]
    assert made.questions(0)[1:] == made.questions(1)[1:]
    rows = {row["method"]: row for row in result["methods"]}
    assert (rows["esm"]["seeds"], rows["greedy"]["seeds"]) == (2, 1)


def test_each_seed_reads_the_test_once_and_after_the_choice(done: tuple[Study, dict[str, Any]]) -> None:
    made, _ = done
    for seed in (0, 1):
        lines = files.read_jsonl(made.folder / f"seed-{seed}" / "test_reads.jsonl")
        assert [line["event"] for line in lines] == ["begin", "done"]
        chosen = (made.run_dir(seed) / "chosen.json").stat().st_mtime
        assert chosen <= lines[0]["time"] + 1
        tried = files.read_json(made.run_dir(seed) / "chosen.json")["tried"]
        assert len(tried["esm"]) == len(tried["mean_vector"]) == 2
        assert tried["esm"][0]["accuracy"] <= max(one["accuracy"] for one in tried["esm"])


def test_a_finished_study_asks_no_model(done: tuple[Study, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    made, result = done

    def asked(*given: Any) -> Any:
        raise AssertionError("the model was asked")

    monkeypatch.setattr(ToyBackend, "start_session", asked)
    again = study.run(made, quiet)
    assert again["methods"] == result["methods"]


def test_another_plan_is_refused(done: tuple[Study, dict[str, Any]]) -> None:
    made, _ = done
    with pytest.raises(LabError, match="another plan"):
        make(made.folder, seeds=[0])


def test_an_unfinished_study_is_reported_as_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, seeds=[0])
    with pytest.raises(LabError, match="no test question"):
        study.report(made, quiet)
    answer, calls = evaluate._answer, []

    def interrupted(settings: Any, backend: Any, batch: Any, method: Any, controller: Any) -> Any:
        if settings.eval.split == "test":
            calls.append(method.name)
            if len(calls) > len(METHODS) + 2:  # in the second batch
                raise KeyboardInterrupt
        return answer(settings, backend, batch, method, controller)

    monkeypatch.setattr(evaluate, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.run(made, quiet)
    found = study.report(made, quiet)
    assert found["n_test"] == 10
    assert "unfinished: 10 of 30 test questions" in found["headline"]


def test_a_killed_study_continues_to_the_same_tables(tmp_path: Path, done: tuple[Study, dict[str, Any]]) -> None:
    """SIGKILL at any time; what was answered is not asked again."""
    plan = tmp_path / "plan.json"
    plan.write_text(make_plan().model_dump_json())
    code = (
        "import sys; from pathlib import Path; from looplab.recipes.esm.esm import study\n"
        "plan = study.StudyPlan.model_validate_json(Path(sys.argv[1]).read_text())\n"
        "study.run(study.prepare('test', plan, None, Path(sys.argv[2])), lambda text: None)"
    )
    folder = tmp_path / "out"
    command = [sys.executable, "-c", code, str(plan), str(folder)]

    def answered() -> int:
        return sum(file.read_bytes().count(b"\n") for file in folder.glob("seed-*/eval/*/per_example.jsonl"))

    for wanted in (1, 100, 260):
        process = subprocess.Popen(command)
        start_time = time.monotonic()
        while process.poll() is None and answered() < wanted and time.monotonic() - start_time < PATIENCE_S:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    for seed in (0, 1):
        for name in METHODS:
            tag = evaluate.Method(name, 0).tag(64)
            one, other = (
                [json.loads(line) for line in (root / f"seed-{seed}" / "eval" / tag / "per_example.jsonl").open()]
                for root in (folder, done[0].folder)
                if (root / f"seed-{seed}" / "eval" / tag).is_dir()
            ) if seed == 0 or name not in study.ONCE else ([], [])  # fmt: skip
            assert one == other


@pytest.mark.parametrize("name", ["opposed", "habits"])
def test_the_shipped_plans_are_complete(name: str) -> None:
    plan = study.load_plan(RECIPE / "studies" / f"{name}.yaml")
    assert {"greedy", "majority", "mean_vector", "esm", "no_probing", "shuffled_retrieval", "random_direction"} <= set(
        plan.methods
    )
    assert set(plan.tune["mean_vector"]) == {"online.k_scale", "online.layers"}  # the rival has its own
    rehearsal = plan.rehearsal()
    seeds = [one.config["task"]["generator"]["seed"] for one in (plan, rehearsal)]
    assert seeds[0] != seeds[1], "a rehearsal must not read the test questions"


def test_a_mistake_in_a_plan_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"no study 'nothing'.*available: habits, opposed"):
        study.load_plan(RECIPE / "studies" / "nothing.yaml")
    file = tmp_path / "plan.yaml"
    file.write_text("title: T\nexpect: E\nconfig: {}\nmethods: [greedy, esm, magic]\n")
    with pytest.raises(LabError, match="unknown method 'magic'"):
        study.load_plan(file)
    file.write_text("title: T\nexpect: E\nconfig: {}\nmethods: [greedy, esm]\nseed: [1]\n")
    with pytest.raises(LabError, match="seed"):
        study.load_plan(file)
    for like in ("{no_probing: mean_vector}", "{no_probing: greedy}", "{esm: no_probing}"):
        methods = "methods: [greedy, esm, no_probing]"
        file.write_text(f"title: T\nexpect: E\nconfig: {{}}\n{methods}\nlike: {like}\n")
        with pytest.raises(LabError, match="cannot use the settings of"):
            study.load_plan(file)


def test_the_command_runs_a_rehearsal_and_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE / "run.py"), "study", "opposed", "--quick", "--backend", "toy"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"greedy", "esm", "majority", "mean_vector", "random_direction", "n_test", "headline"} <= set(found)
    assert (tmp_path / "out" / "tables" / "results.md").is_file()
    again = subprocess.run(
        [*command, "--report", "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    assert json.loads(again.stdout.splitlines()[-1]) == found
