"""Stages, suites and cases, as a user calls them."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from looplab.launch.devices import Devices
from looplab.launch.slots import make_slots

ALL = ("mine", "select", "memory", "eval")
STAGE = '''\
"""A stage: leaves a folder; `seen.json` in it holds what it saw."""
import json, os, sys, time

stage, run_dir, out = sys.argv[1:]
with open(os.environ["LOOPLAB_CONFIG"]) as file:
    config = json.load(file)
os.makedirs(os.path.join(run_dir, out), exist_ok=True)
begun = time.monotonic()
with open(os.path.join(run_dir, out, "begun"), "a") as file:
    file.write("x")
print(stage, "of", config["task"]["dataset"], flush=True)
if config["wait"] == stage:
    while not os.path.exists("gate"):
        time.sleep(0.01)
if config["fail"] == stage:
    print("something broke", flush=True)
    sys.exit(4)
if stage == "eval":
    with open(os.path.join(run_dir, out, "results.csv"), "w") as file:
        file.write(f"split,acc\\n{config['task']['eval_split']},0.5\\n")
    if config["ablate"]:
        with open(os.path.join(run_dir, out, "ablation.csv"), "w") as file:
            file.write("variant,acc\\nno_memory,0.25\\nno_probing,0.5\\n")
with open(os.path.join(run_dir, out, "seen.json"), "w") as file:
    json.dump({"env": dict(os.environ), "begun": begun, "ended": time.monotonic()}, file)
'''
CASE = """\
import pathlib, sys

run_dir, ids, tokens, methods, tag = sys.argv[1:]
folder = pathlib.Path(run_dir, "cases")
folder.mkdir(exist_ok=True)
(folder / f"{tag}_T{tokens}.md").write_text(f"# {ids} {methods}")
"""


def stage(name: str, out: str, after: str | None, *reads: str) -> dict[str, Any]:
    command = ["{python}", "-S", "stage.py", name, "{run_dir}", out]
    return {"command": command, "after": [after] if after else [], "reads": ["task", "wait", "fail", *reads],
            "code": ["stage.py"], "outputs": [out]}  # fmt: skip


STUDY: dict[str, Any] = {
    "study": "toy",
    "pipeline": {"root": "{outputs.root_dir}/{outputs.run_name}", "run_id": "{outputs.run_id}"},
    "stages": {
        "mine": stage("mine", "mine", None, "mine"),
        "select": stage("select", "library", "mine"),
        "memory": stage("memory", "memory", "select"),
        "eval": stage("eval", "tables", "memory", "ablate"),
    },
    "suite": {
        "fields": {"name": "task.dataset", "eval_split": "task.eval_split"},
        "run_name": "outputs.run_name",
        "tables": {"results.csv": "tables/results.csv", "ablation.csv": "tables/ablation.csv"},
    },
    "case": {
        "command": ["{python}", "case.py", "{run_dir}", "{example_ids}", "{tokens}", "{methods}", "{tag}"],
        "defaults": {"tokens": 256, "methods": "greedy,other"},
        "after": ["memory"],
    },
    "slots": {"gpus": "none", "count": 2},
}
CONFIG: dict[str, Any] = {
    "task": {"dataset": "gsm8k", "eval_split": "test"},
    "mine": {"K": 8},
    "wait": "",
    "fail": "",
    "ablate": False,
    "outputs": {"root_dir": "outputs", "run_name": "gsm8k", "run_id": None},
}


@pytest.fixture
def toy(lab: Any) -> Any:
    lab.write("stage.py", STAGE)
    lab.write("case.py", CASE)
    lab.write("lab.yaml", json.dumps(STUDY))
    lab.write("configs/c.yaml", json.dumps(CONFIG))
    return lab


def seen(lab: Any, pattern: str) -> dict[str, Any]:
    """What the stages saw, by their folder's name."""
    return {str(path.parent.name): json.loads(path.read_text()) for path in lab.folder.glob(f"{pattern}/seen.json")}


def test_the_printed_sequence_works_as_printed(toy: Any) -> None:
    for name in ALL:
        done = toy("stage", "--config", "configs/c.yaml", name)
        assert f"{name} of gsm8k" in done.out
        assert f"{name}: complete" in done.out
    root = toy.folder / "outputs" / "gsm8k"
    (run,) = [path for path in root.iterdir() if path.is_dir()]
    assert (root / "LATEST").read_text() == f"{run.name}\n"
    log = (run / "logs" / "run.log").read_text()
    assert [line for line in log.splitlines() if line[:2] != "=="] == [f"{name} of gsm8k" for name in ALL]
    done = toy("stage", "--config", "configs/c.yaml", *ALL, "--json")
    assert [stage["how"] for stage in done.json()["stages"]] == ["skipped"] * 4
    assert "--new" in toy("stage", "--config", "configs/c.yaml", "mine").out


def test_a_failed_stage_is_told_with_its_last_lines_and_exit_code_1(toy: Any) -> None:
    done = toy("stage", "--config", "configs/c.yaml", "--edit", "fail@set=select", "mine", "select", "--json", code=1)
    told = done.json()
    assert told["status"] == "failed"
    assert told["error"] == "select: exit code 4"
    assert "something broke" in told["tail"]
    done = toy("stage", "--config", "configs/c.yaml", "--edit", "fail@set=select", "select", code=1)
    assert "something broke" in done.out
    assert "select: exit code 4" in done.err


def test_bad_input_is_exit_code_2_and_says_what_to_do(toy: Any) -> None:
    assert "did you mean 'mine'" in toy("stage", "--config", "configs/c.yaml", "mien", code=2).err
    assert "no complete run" in toy("stage", "--config", "configs/c.yaml", "eval", code=2).err
    assert "configs/d.yaml" in toy("stage", "--config", "configs/d.yaml", "mine", code=2).err
    assert not (toy.folder / "outputs").exists()


def test_a_run_in_use_is_exit_code_3_and_says_by_whom(toy: Any, until: Callable[..., Any]) -> None:
    call = ("stage", "--config", "configs/c.yaml", "--run-id", "r", "--edit", "wait@set=mine", "mine")
    first = toy.start(*call)
    until(lambda: "mine of gsm8k" in first.out, "the running stage")
    assert f"in use by pid {first.pid}" in toy(*call, code=3).err
    toy.open_gate()
    first.ended(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_stage_and_the_next_call_resumes_it(toy: Any, until: Any, number: int) -> None:
    call = ("stage", "--config", "configs/c.yaml", "--edit", "wait@set=mine", "mine")
    first = toy.start(*call)
    until(lambda: "mine of gsm8k" in first.out, "the running stage")
    first.send(number)
    done = first.ended(130)
    assert "mine: stop" in done.err
    (run,) = [path for path in (toy.folder / "outputs" / "gsm8k").iterdir() if path.is_dir()]
    assert not (run / "train.log").exists()
    toy.open_gate()
    assert "mine: starts (resumed)" in toy(*call).out
    assert (run / "mine" / "begun").read_text() == "xx"


def test_a_terminal_shows_which_stage_is_at_work(toy: Any, until: Callable[..., Any]) -> None:
    terminal = toy.terminal("stage", "--config", "configs/c.yaml", "--edit", "wait@set=select", "mine", "select")
    until(lambda: re.search(r"select  \d\.\ds", terminal.shown), "the stage with its time")
    toy.open_gate()
    assert terminal.ended() == 0
    assert "select of gsm8k" in terminal.shown


# -- suites

DATASETS = [
    {"name": "gsm8k", "eval_split": "dev"},
    {"name": "svamp", "edits": ["ablate@set=true"]},
    {"name": "math500", "eval_split": "dev"},
]


def write_suite(lab: Any, *datasets: dict[str, Any], **more: Any) -> None:
    block = {"run_name_prefix": "tiny", "stages": list(ALL), "datasets": list(datasets) or DATASETS, **more}
    lab.write("configs/suite.yaml", json.dumps({"suite": block, **CONFIG}))


def table(lab: Any, name: str) -> list[dict[str, str]]:
    (path,) = lab.folder.glob(f"outputs/_suite/*/tables/{name}")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_suite_pins_one_dataset_to_one_device_and_makes_one_table(toy: Any) -> None:
    write_suite(toy)
    done = toy("suite", "--config", "configs/suite.yaml", "--gpus", "0,1", "--id", "s")
    if Devices().why_missing(make_slots(gpus=["0", "1"])):
        assert "note: GPUs 0, 1: this machine has no GPU" in done.out
    spans: dict[str, list[tuple[float, float]]] = {}
    for dataset in ("gsm8k", "svamp", "math500"):
        saw = seen(toy, f"outputs/tiny_{dataset}/s/*")
        assert set(saw) == {"mine", "library", "memory", "tables"}
        (device,) = {about["env"]["CUDA_VISIBLE_DEVICES"] for about in saw.values()}
        assert {about["env"]["LOOPLAB_SLOT"] for about in saw.values()} == {f"gpu{device}"}
        spans.setdefault(device, []).extend((about["begun"], about["ended"]) for about in saw.values())
    assert set(spans) == {"0", "1"}
    for of_device in spans.values():
        of_device.sort()
        assert all(a[1] < b[0] for a, b in pairwise(of_device))
    rows = table(toy, "results.csv")
    assert [row["dataset"] for row in rows] == ["gsm8k", "svamp", "math500"]
    assert [row["split"] for row in rows] == ["dev", "test", "dev"]
    assert rows[0]["run"] == "tiny_gsm8k/s"
    rows = table(toy, "ablation.csv")
    assert [(row["dataset"], row["variant"]) for row in rows] == [("svamp", "no_memory"), ("svamp", "no_probing")]
    assert "results.csv" in done.out
    for dataset in ("gsm8k", "svamp", "math500"):
        config = json.loads((toy.folder / f"outputs/tiny_{dataset}/s/config_resolved.json").read_text())
        assert config["task"]["dataset"] == dataset
        assert config["outputs"] == {"root_dir": "outputs", "run_name": f"tiny_{dataset}", "run_id": "s"}


def test_a_dataset_that_fails_does_not_stop_the_others(toy: Any) -> None:
    write_suite(toy, DATASETS[0], {"name": "svamp", "edits": ["fail@set=select"]}, DATASETS[2])
    done = toy("suite", "--config", "configs/suite.yaml", "--slots", "1", code=1)
    assert "svamp: failed: select: exit code 4" in done.out
    assert "svamp | something broke" in done.out
    assert [row["dataset"] for row in table(toy, "results.csv")] == ["gsm8k", "math500"]
    told = toy("suite", "--config", "configs/suite.yaml", "--json", code=1).json()  # the same suite, found again
    assert [job["status"] for job in told["jobs"]] == ["complete", "failed", "complete"]
    assert {stage["how"] for stage in told["jobs"][0]["stages"]} == {"skipped"}
    assert len(list((toy.folder / "outputs" / "_suite").iterdir())) == 1


def test_a_killed_suite_goes_on_and_starts_nothing_twice(toy: Any, until: Callable[..., Any]) -> None:
    write_suite(toy, *({**dataset, "edits": ["wait@set=select"]} for dataset in DATASETS[:2]), DATASETS[2])
    call = ("suite", "--config", "configs/suite.yaml", "--gpus", "0,1")
    first = toy.start(*call)
    until(lambda: len(list(toy.folder.glob("outputs/tiny_*/*/library/begun"))) == 2, "two running stages")
    os.kill(first.pid, signal.SIGKILL)
    first.ended(None)
    second = toy.start(*call)
    until(lambda: second.out.count("attached to it") == 2, "the second suite to find them")
    toy.open_gate()
    second.ended(0)
    begun = [path.read_text() for path in toy.folder.glob("outputs/tiny_*/*/*/begun")]
    assert begun == ["x"] * 12
    assert len(table(toy, "results.csv")) == 3
    told = toy(*call, "--json").json()
    assert {stage["how"] for job in told["jobs"] for stage in job["stages"]} == {"skipped"}


@pytest.mark.slow
def test_the_first_ctrl_c_lets_stages_end_and_the_second_ends_them(toy: Any, until: Callable[..., Any]) -> None:
    write_suite(toy, {"name": "gsm8k", "edits": ["wait@set=mine"]}, {"name": "svamp", "edits": ["wait@set=mine"]})
    call = ("suite", "--config", "configs/suite.yaml")
    first = toy.start(*call)
    until(lambda: len(list(toy.folder.glob("outputs/tiny_*/*/mine/begun"))) == 2, "two running stages")
    first.send(signal.SIGINT)
    toy.open_gate()
    first.ended(130)
    assert len(list(toy.folder.glob("outputs/tiny_*/*/stages/mine.json"))) == 2
    assert not list(toy.folder.glob("outputs/tiny_*/*/library"))
    toy(*call)
    (toy.folder / "gate").unlink()
    third = toy.start(*call, "--new")
    until(lambda: len(list(toy.folder.glob("outputs/tiny_*/*/mine/begun"))) == 4, "two more running stages")
    third.send(signal.SIGINT)
    until(lambda: "no new stages start" in third.out, "the message that it drains")
    third.send(signal.SIGINT)
    third.ended(130)


def test_a_terminal_shows_the_datasets_of_a_suite_at_work(toy: Any, until: Callable[..., Any]) -> None:
    write_suite(toy, {"name": "gsm8k", "edits": ["wait@set=mine"]}, {"name": "svamp", "edits": ["wait@set=mine"]})
    terminal = toy.terminal("suite", "--config", "configs/suite.yaml", "--slots", "1")
    at_work = r"gsm8k\W.*running.*cpu0.*mine.*mine of gsm8k"
    until(lambda: re.search(at_work, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown)), "the table of the jobs")
    toy.open_gate()
    assert terminal.ended() == 0


def test_a_suite_may_name_its_config_and_its_own_fields(toy: Any) -> None:
    block = {"config": "configs/c.yaml", "datasets": [{"name": "a", "k": 3}], "fields": {"k": "mine.K"},
             "stages": ["mine"], "tables": {"all.csv": "mine/x.csv"}}  # fmt: skip
    toy.write("configs/suite.json", json.dumps({"suite": block}))
    toy("suite", "--config", "configs/suite.json", "--id", "s")
    assert json.loads((toy.folder / "outputs/a/s/config_resolved.json").read_text())["mine"]["K"] == 3


# -- cases


@pytest.mark.slow
def test_a_case_prints_the_file_that_it_made(toy: Any) -> None:
    call = ("case", "--config", "configs/c.yaml", "--example-ids", "0,6", "--tag", "dbg")
    assert "the case needs memory" in toy(*call, code=2).err
    toy("stage", "--config", "configs/c.yaml", *ALL)
    path = Path(toy(*call).out.strip())
    assert path.name == "dbg_T256.md"
    assert path.read_text() == "# 0,6 greedy,other"
    told = toy(*call, "--tokens=8", "--methods", "greedy", "--json").json()
    assert [Path(name).name for name in told["files"]] == ["dbg_T8.md"]


@pytest.mark.slow
def test_a_case_takes_the_options_that_its_command_names(toy: Any) -> None:
    toy("stage", "--config", "configs/c.yaml", *ALL)
    call = ("case", "--config", "configs/c.yaml")
    assert "pass --example-ids, or set case.defaults.example_ids" in toy(*call, code=2).err
    call += ("--example-ids", "0")
    assert "pass --tag" in toy(*call, code=2).err
    assert "no option --tokns (did you mean --tokens?)" in toy(*call, "--tokns", "8", "--tag", "x", code=2).err
    assert "no option --run-dir" in toy(*call, "--run-dir", "x", code=2).err
    assert "--tokens needs a value" in toy(*call, "--tag", "x", "--tokens", code=2).err
    assert "unexpected argument 'x'" in toy(*call, "x", code=2).err
    assert not list(toy.folder.glob("outputs/**/cases"))
    command = ["{python}", "case.py", "{run_dir}", "{mine.K}", "", "", "{tag}"]
    toy.write("lab.yaml", json.dumps({**STUDY, "case": {"command": command}}))
    assert Path(toy(*call[:3], "--tag", "own").out.strip()).read_text() == "# 8 "


# -- a study whose runs are pipelines


@pytest.mark.slow
def test_without_a_launch_a_run_of_the_study_is_all_of_its_stages(toy: Any) -> None:
    toy.write("lab.yaml", json.dumps({**STUDY, "base": "configs/c.yaml"}))
    toy("run", "--informal")
    (run,) = toy.runs()
    assert (run / "pipeline" / "tables" / "results.csv").exists()
    assert toy.read(run, "exit.json")["code"] == 0
    assert len(toy("status", "--json").json()["pipelines"]) > 0
    toy("verify")


# -- the page


@pytest.mark.slow
def test_pipelines_are_part_of_the_record(toy: Any) -> None:
    toy("stage", "--config", "configs/c.yaml", "mine")
    toy("stage", "--config", "configs/c.yaml", "--edit", 'fail@set="select"', "mine", "select", "--run-id", "r", code=1)
    suite = {"datasets": [{"name": "one"}], "stages": ["mine"], "config": "configs/c.yaml"}
    toy.write("suite.yaml", json.dumps({"suite": suite}))
    toy("suite", "--config", "suite.yaml", "--id", "s")
    status = toy("status", "--json").json()
    shown = {run["folder"]: [(row["stage"], row["state"]) for row in run["stages"]] for run in status["pipelines"]}
    assert shown["outputs/gsm8k/r"] == [("mine", "complete"), ("select", "failed")]
    assert shown["outputs/one/s"] == [("mine", "complete")]
    assert [(one["id"], one["state"], one["jobs"]) for one in status["suites"]] == [
        ("s", "complete", {"one": "complete"})
    ]
    assert re.search(r"outputs/gsm8k/r +mine complete, select failed", toy("status").out)
    (row,) = toy("query", "SELECT why FROM stages WHERE state = 'failed'", "--json").json()
    assert row == {"why": "exit code 4"}
    assert "the record is whole" in toy("verify").out
    (toy.folder / "outputs/one/s/stages/mine.json").unlink()
    assert "outputs/one/s/stages/mine.json: the stage was complete, but" in toy("verify", code=1).out
    toy("suite", "--config", "suite.yaml", "--id", "s")
    toy("verify")


@pytest.mark.slow
def test_the_page_about_pipelines_works_as_printed(lab: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    shown = []
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if kind == "sh":
            shown += [shlex.split(line, comments=True) for line in text.splitlines()]
        else:
            lab.write(text.splitlines()[0].removeprefix("# "), text)
    assert len(shown) == 9
    said = [lab(*words[1:]).out for words in shown]
    assert said[2].count("skipped") == 2
    assert "mine: skipped" in said[3]
    assert "rerun: eval.beta 1.0 → 2.0" in said[3]
    assert said[4].endswith("case.md\n")
    table = (lab.folder / "outputs/_suite/first/tables/results.csv").read_text()
    assert table == "dataset,run,rows,score\nfew,tiny_few/first,2,2.0\nmany,tiny_many/first,20,20.0\n"
