"""`looplab run`: rounds, totals, slots, and what a run leaves behind."""

from __future__ import annotations

import json
import re
from datetime import datetime
from itertools import pairwise

import pytest


def test_a_round_begins_only_when_the_one_before_is_done(lab) -> None:
    lab.base(sleep=0.05)
    lab.queue(["train.lr@set=0.2", "sleep@set=0.3"], "train.lr@set=0.3", "train.lr@set=0.4", "train.lr@set=0.5")
    lab("run")
    rounds: dict[int, list[dict]] = {}
    for run in lab.runs():
        rounds.setdefault(lab.read(run, "run.json")["round"], []).append(lab.read(run, "seen.json"))
    assert {n: len(seen) for n, seen in rounds.items()} == {1: 2, 2: 2, 3: 1}
    for n in (1, 2):
        assert max(seen["end"] for seen in rounds[n]) < min(seen["start"] for seen in rounds[n + 1])


def test_with_continuous_a_free_slot_gets_the_next_proposal_while_others_still_run(lab) -> None:
    lab.base(wait="gate")
    lab.queue(*(["train.lr@set=0.2", "wait@set="] for _ in range(4)))
    engine = lab.start("run", "--continuous")
    lab.until_ended(4)
    assert lab.ask("SELECT n FROM runs WHERE state='running'") == [(1,)]
    lab.open_gate()
    engine.ended()
    assert lab.count(status="ok") == 5


def test_runs_is_a_total_over_all_restarts(lab) -> None:
    lab.queue(*(f"train.lr@set=0.{n}" for n in range(2, 8)))
    lab("run", "--runs", "2")
    assert len(lab.runs()) == 2
    lab("run", "--runs", "3")
    assert len(lab.runs()) == 3
    done = lab("run", "--runs", "3")
    assert len(lab.runs()) == 3
    assert "all 3 runs are done" in done.out


def test_rounds_is_a_total_over_all_restarts(lab) -> None:
    lab.queue(*(f"train.lr@set=0.{n}" for n in range(2, 8)))
    lab("run", "--rounds", "1")
    assert len(lab.runs()) == 2
    lab("run", "--rounds", "3")
    assert len(lab.runs()) == 6
    assert "all 3 rounds are done; `looplab run --rounds 4` would continue" in lab("run", "--rounds", "3").out
    assert "`looplab run --rounds 4` would continue" in lab("run", "--rounds", "2").out  # not 3, which are done
    assert len(lab.runs()) == 6


def test_a_budget_in_the_lab_file_holds_too(lab) -> None:
    lab.queue(*(f"train.lr@set=0.{n}" for n in range(2, 8)))
    lab.configure(budget={"runs": 3})
    lab("run")
    assert len(lab.runs()) == 3


def test_as_many_trainings_run_at_once_as_concurrency_says(lab) -> None:
    lab.base(meet=3)  # each waits until three are there
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--concurrency", "3")
    assert lab.count(status="ok") == 3


def test_with_concurrency_1_trainings_run_one_after_the_other(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    seen = lab.all("seen.json")
    assert len(seen) == 3
    assert all(a["end"] < b["start"] for a, b in pairwise(seen))


def test_a_mode_is_edits_on_the_base(lab) -> None:
    lab("run", "--mode", "quick")
    (run,) = lab.runs()
    assert lab.read(run, "config.json")["steps"] == 1
    assert lab.read(run, "summary.json")["metrics"]["loss"]["n"] == 1


def test_a_proposal_in_a_mode_keeps_the_edits_of_the_mode(lab) -> None:
    lab.queue("train.lr@set=0.2")
    lab("run", "--mode", "quick")
    assert [config["steps"] for config in lab.all("config.json")] == [1, 1]


def test_what_follows_two_dashes_goes_to_the_trainer(lab) -> None:
    lab("run", "--", "--steps", "5", "--json", "a b", "$HOME")
    assert lab.all("seen.json")[0]["argv"] == ["--steps", "5", "--json", "a b", "$HOME"]


def test_a_stray_word_is_a_mistake_and_not_an_argument_of_the_trainer(lab) -> None:
    before = lab.tree()
    assert "toy" in lab("run", "toy", code=2).err
    assert lab.tree() == before


def test_several_base_configs_are_the_first_round(lab) -> None:
    lab.base("a.json", train={"lr": 0.2})
    lab.base("b.json", train={"lr": 0.3})
    lab.base("c.json", train={"lr": 0.4})
    lab("run", "--cfgs", "a.json", "b.json", "c.json", "--concurrency", "2")
    about = lab.all("run.json")
    assert [(run["base"], run["round"], run["proposer"]) for run in about] == [
        ("a.json", 1, "base"),
        ("b.json", 1, "base"),
        ("c.json", 1, "base"),
    ]
    assert [config["train"]["lr"] for config in lab.all("config.json")] == [0.2, 0.3, 0.4]


def test_base_configs_may_be_named_with_an_equals_sign_and_again(lab) -> None:
    for name in "abc":
        lab.base(f"{name}.json", steps=ord(name))
    lab("run", "--cfgs=a.json", "b.json", "--cfgs", "c.json")
    assert [run["base"] for run in lab.all("run.json")] == ["a.json", "b.json", "c.json"]


def test_base_configs_are_found_from_where_the_user_stands(lab) -> None:
    lab("run", "--cfgs", "base.json", cwd=lab.folder / "configs")
    assert [run["base"] for run in lab.all("run.json")] == ["configs/base.json"]


def test_a_base_config_is_run_once_and_again_only_when_its_content_changed(lab) -> None:
    lab("run")
    lab("run")
    assert len(lab.runs()) == 1
    lab.base(steps=4)
    lab("run")
    assert [config["steps"] for config in lab.all("config.json")] == [3, 4]


def test_a_study_that_needs_exec_only_shows_its_plan_without_the_word(lab) -> None:
    lab.configure(needs_exec=True)
    before = lab.tree()
    done = lab("run")
    assert "--exec" in done.err
    assert "configs/base.json" in done.out
    assert lab.tree() == before
    lab("run", "--exec")
    assert len(lab.runs()) == 1


def test_the_plan_of_a_study_that_needs_exec_is_json_where_asked(lab) -> None:
    lab.configure(needs_exec=True)
    done = lab("run", "--json")
    assert [run["base"] for run in done.json()["runs"]] == ["configs/base.json"]
    assert "--exec" in done.err


def test_latest_and_best_point_to_their_runs(lab) -> None:
    lab.queue("train.lr@set=0.3", "train.lr@set=0.9")
    lab("run", "--concurrency", "1")
    ids = [run.name for run in lab.runs()]
    assert (lab.outputs() / "LATEST").read_text() == ids[2] + "\n"
    assert (lab.outputs() / "BEST").read_text() == ids[1] + "\n"


def test_a_proposal_starts_from_the_best_run_where_it_says_so(lab) -> None:
    lab.queue(["train.lr@set=0.3"], ["train.batch@mul=2"], parent="best")
    lab("run", "--concurrency", "1")
    first, second, third = lab.all("run.json")
    assert second["parent"] == first["id"]
    assert third["parent"] == second["id"]
    assert lab.all("config.json")[2]["train"] == {"lr": 0.3, "batch": 64}


def test_a_run_leaves_all_its_files_with_what_they_promise(lab) -> None:
    lab.queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1", "--", "--flag")
    base, run = lab.runs()
    assert {path.name for path in (run / "record").iterdir()} >= {
        *("run.json", "config.json"),
        *("train.log", "summary.json", "exit.json"),
    }
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "record", "seen.json"]

    about = lab.read(run, "run.json")
    assert (about["id"], about["study"], about["n"], about["round"]) == (run.name, "toy", 2, 2)
    assert (about["proposer"], about["reason"], about["parent"], about["base"]) == (
        "queue",
        "try 1",
        None,
        "configs/base.json",
    )
    assert about["slot"] == "cpu0"
    assert about["argv"][1:] == ["-S", "train.py", "--flag"]

    assert lab.read(run, "config.json") == {**lab.read(base, "config.json"), "train": {"lr": 0.3, "batch": 32}}
    assert about["edits"] == ["train.lr@set=0.3"]
    assert about["changes"] == {
        "parent": {"train.lr": {"old": 0.1, "new": 0.3}},
        "base": {"train.lr": {"old": 0.1, "new": 0.3}},
    }
    capsule = about["capsule"]
    assert capsule["argv"] == about["argv"]
    assert capsule["env"]["LOOPLAB_RUN_ID"] == run.name
    assert (lab.outputs() / capsule["python"]["packages"]).is_file()
    assert capsule["machine"]["cores"] >= 1

    assert (run / "record/train.log").read_text() == "lr is 0.3\nthe end\n"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]

    summary = lab.read(run, "summary.json")
    assert (summary["status"], summary["exit_code"], summary["signal"]) == ("ok", 0, None)
    loss = summary["metrics"]["loss"]
    assert (loss["first"], loss["n"], loss["best_step"]) == (1.0, 3, 3)
    assert loss["last"] == loss["best"] == steps[2]["loss"]
    assert summary["objective"] == {"metric": "loss", "goal": "min", "at": "last", "value": steps[2]["loss"]}

    exit_ = lab.read(run, "exit.json")
    assert (exit_["code"], exit_["signal"], exit_["reason"]) == (0, None, None)
    assert exit_["started"] <= exit_["ended"]
    assert lab.read(base, "run.json")["changes"] == {"parent": {}, "base": {}}


def test_json_of_run_is_one_object_a_line_and_ends_with_the_outcome(lab) -> None:
    lab.queue("train.lr@set=0.3", "train.lr@set=5")
    lines = lab("run", "--json").lines()
    kinds = [line.get("kind") for line in lines]
    assert kinds.count("launched") == kinds.count("ended") == 2
    assert "rejected" in kinds
    assert lines[-1]["ending"] == "done"
    assert lines[-1]["counts"] == {"ok": 2}
    assert lines[-1]["best"] == lab.runs()[1].name


def test_the_lab_book_has_a_line_for_each_decision_and_each_run(lab) -> None:
    lab.queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    base, run = (path.name for path in lab.runs())
    book = (lab.outputs() / "labbook.md").read_text()
    assert book.startswith("# Lab book of toy\n")
    lines = [line[2:].split(" | ") for line in book.splitlines() if line.startswith("- ")]
    assert [line[1] for line in lines] == [
        "round 1 decided",
        f"run {base} (round 1, base): base config configs/base.json",
        "round 2 decided",
        f"run {run} (round 2, queue): try 1",
    ]
    assert f"best so far: {base}" in lines[2][2]
    assert lines[2][4] == "try 1"
    assert re.fullmatch(r"loss = 0\.3333\d*", lines[3][2])
    assert lines[3][3] == "ok, best so far"
    for line in lines:
        datetime.strptime(line[0], "%Y-%m-%dT%H:%M:%SZ")


def test_a_proposal_that_the_guard_refuses_is_told_and_the_others_run(lab) -> None:
    lab.queue("train.lr@set=7", "train.lr@set=0.3")
    done = lab("run")
    assert "train.lr: 7 is above 1" in done.out
    assert lab.count(status="ok") == 2
    assert lab.ask("SELECT status FROM proposals ORDER BY id") == [("rejected",), ("accepted",)]


def test_a_study_whose_runs_all_fail_exits_with_1_and_says_where_to_look(lab) -> None:
    lab.base(exit=3)
    done = lab("run", code=1)
    (run,) = lab.runs()
    assert f"looplab logs {run.name}" in done.out
    assert lab.read(run, "summary.json")["exit_code"] == 3
    assert not (lab.outputs() / "BEST").exists()


def test_a_run_over_its_time_is_ended_and_the_next_one_starts(lab) -> None:
    lab.base(wait="never")
    lab.configure(launch={**lab.study["launch"], "timeout": "2s"})
    lab.queue("wait@set=")
    lab("run", "--concurrency", "1", "--keep-going", code=None)
    first, second = (summary["status"] for summary in lab.all("summary.json"))
    assert first == "timeout"
    assert second in ("ok", "timeout")  # a machine may be so busy that even this one takes too long


@pytest.mark.slow
def test_two_studies_of_a_lab_are_run_apart(lab) -> None:
    common = {key: value for key, value in lab.study.items() if key != "study"}
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in common.items())
    lab.write("lab.yaml", text + 'studies: [{"study": "one"}, {"study": "two", "objective": null}]\n')
    done = lab("run", code=2)
    assert "--study" in done.err
    lab("run", "--study", "one")
    lab("run", "--study", "two")
    assert len(lab.runs("one")) == len(lab.runs("two")) == 1
    assert [study["study"] for study in lab("status", "--json").json()["studies"]] == ["one", "two"]
