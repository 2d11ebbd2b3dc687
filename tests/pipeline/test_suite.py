"""What a suite's file may say, and how its datasets share devices."""

from __future__ import annotations

import fcntl
import json
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.errors import BusyError, LabError
from looplab.launch.base import Slot
from looplab.launch.local import LocalExecutor
from looplab.pipeline.driver import StopRequest, drive
from looplab.pipeline.suite import Suite, make_runs, make_suite

BASE: dict[str, Any] = {
    "seed": 7,
    "model": {"path": "model.bin"},
    "task": {"dataset": "", "data_root": "datasets"},
    "prompt": {"template": "plain"},
    "mine": {"n": 2, "sleep": 0.0, "wait": "", "exit": 0},
    "select": {"B": 3},
    "memory": {},
    "eval": {"beta": 1, "artifact_run_dir": None},
    "outputs": {"root_dir": "outputs", "run_name": "toy", "run_id": None},
}


def suite(toy: Any, block: dict[str, Any], suite_id: str | None = None, **more: Any) -> Suite:
    path = toy.folder / "suite.yaml"
    path.write_text(json.dumps({"suite": block, **BASE}))
    lab = load_lab(toy.folder)
    return make_suite(lab, lab.study(None), path, suite_id, **more)


def run(made: Suite, *slots: Slot) -> dict[str, str]:
    executor = LocalExecutor()
    made.begin()
    runs = make_runs(made, lambda job, text: None)
    try:
        drive(runs, slots or (Slot("cpu0"),), executor, StopRequest())
    finally:
        executor.close()
    made.end(runs)
    return {one.name: one.state for one in runs}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, "'suite.datasets' is missing"),
        ({"datasets": [{"name": "a", "eval_splt": "x"}]}, "did you mean 'eval_split'"),
        ({"datasets": [{"name": "a"}, {"name": "a"}]}, "a is named twice"),
        ({"datasets": [{"name": "../a"}]}, "cannot name a folder"),
        ({"datasets": [{"name": "a", "edits": ["seed=1"]}]}, r"suite.datasets.0.edits: .*seed=1"),
        ({"datasets": [{"name": "a", "edits": ["no.such.key@mul=2"]}]}, "dataset a: .*no no.such.key"),
        ({"datasets": [{"name": "a"}], "stage": ["mine"]}, "unknown key 'suite.stage', did you mean 'stages'"),
        ({"datasets": [{"name": "a"}], "stages": ["eval"]}, "eval builds on memory"),
        ({"datasets": [{"name": "a"}], "stages": ["evil"]}, "did you mean 'eval'"),
        ({"datasets": [{"name": "a"}, {"name": "b"}], "run_name": "task.other"}, "the same run folder"),
        ({"datasets": [{"name": "a"}], "config": "config.json"}, "keep one of them"),
        ({"datasets": [{"name": "a"}], "tables": {"../x.csv": "y"}}, "not the name of a CSV file"),
        ({"datasets": [{"name": "a"}], "fields": "x"}, "suite.fields"),
        ({"datasets": [{"name": "a"}], "run_name": None, "run_name_prefix": "b"}, "run_name_prefix needs run_name"),
        ({"datasets": [{"name": "a"}, {"name": "b"}], "run_name": None}, "the same run folder"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(toy: Any, block: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        suite(toy, block)
    assert not (toy.folder / "outputs").exists()


def test_short_names_of_the_lab_file_and_of_the_suite_reach_their_config_keys(toy: Any) -> None:
    entry = {"name": "svamp", "template": "svamp_0shot", "eval_split": "test", "tokens": None}
    again = {"name": "svamp", "label": "short", "tokens": 64}
    block = {"run_name_prefix": "tiny", "fields": {"tokens": "decode.tokens"}, "datasets": [entry, again]}
    made = suite(toy, block, "s")
    config = made.jobs[0].plan.config
    assert config["task"] == {"dataset": "svamp", "data_root": "datasets", "eval_split": "test"}
    assert (config["prompt"]["template"], config["decode"]["tokens"]) == ("svamp_0shot", None)
    assert made.jobs[0].run.path == toy.folder / "outputs" / "tiny_svamp" / "s"
    assert made.jobs[1].plan.config["task"]["dataset"] == "svamp"
    assert made.jobs[1].plan.config["decode"] == {"tokens": 64}
    assert made.jobs[1].run.path == toy.folder / "outputs" / "tiny_short" / "s"
    assert made.folder == toy.folder / "outputs" / "_suite" / "s"


def test_without_declarations_a_suite_edits_only_what_its_datasets_say(toy: Any) -> None:
    study = {key: value for key, value in json.loads((toy.folder / "lab.yaml").read_text()).items() if key != "suite"}
    (toy.folder / "lab.yaml").write_text(json.dumps(study))
    made = suite(toy, {"datasets": [{"name": "a", "edits": ["seed@set=8"]}]}, "s")
    assert made.jobs[0].plan.config == {**BASE, "seed": 8}
    assert made.settings.tables == {}
    with pytest.raises(LabError, match="unknown key 'template'; define it in fields"):
        suite(toy, {"datasets": [{"name": "a", "template": "x"}]}, "s")


def test_the_same_suite_is_found_again_and_another_one_is_not(toy: Any) -> None:
    block = {"datasets": [{"name": "a"}]}
    made = suite(toy, block)
    made.folder.mkdir(parents=True)
    made.begin()
    assert suite(toy, block).id == made.id
    assert suite(toy, block, new=True).id != made.id
    assert suite(toy, {"datasets": [{"name": "a", "edits": ["seed@set=8"]}]}).id != made.id


def test_a_running_suite_is_not_run_by_a_second_one(toy: Any) -> None:
    made = suite(toy, {"datasets": [{"name": "a"}]}, "s")
    with made.lock(), pytest.raises(BusyError, match="suite s is in use by pid"), made.lock():
        pass


def test_tables_are_made_of_what_is_complete_with_the_names_in_front(toy: Any) -> None:
    datasets = [{"name": "a"}, {"name": "b", "edits": ["mine.exit@set=1"]},
                {"name": "a", "label": "c", "edits": ["eval.beta@set=2"]}]  # fmt: skip
    made = suite(toy, {"datasets": datasets}, "s")
    made.folder.mkdir(parents=True)
    assert run(made) == {"a": "complete", "b": "failed", "c": "complete"}
    table = (made.folder / "tables" / "results.csv").read_text()
    assert table == "dataset,label,run,acc\na,a,a/s,7 0 1\na,c,c/s,7 0 2\n"
    assert not (made.folder / "tables" / "ablation.csv").exists()
    summary = json.loads((made.folder / "summary.json").read_text())
    assert [job["status"] for job in summary["jobs"]] == ["complete", "failed", "complete"]
    assert "mine ends" in summary["jobs"][1]["tail"]


def test_a_dataset_waits_for_a_device_that_somebody_holds(toy: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path))
    made = suite(toy, {"datasets": [{"name": "a"}], "stages": ["mine"]}, "s")
    made.folder.mkdir(parents=True)
    executor = LocalExecutor()
    runs = make_runs(made, lambda job, text: None)
    said: list[str] = []
    waited: list[str] = []
    with (tmp_path / "gpu-0.0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def tick() -> None:
            waited.append(runs[0].blocked)
            if runs[0].blocked and not lock.closed:
                lock.close()

        try:
            drive(runs, [Slot("gpu0", ("0",))], executor, StopRequest(), on_wait=said.append, tick=tick)
        finally:
            executor.close()
    assert runs[0].state == "complete"
    assert any(why.startswith("gpu0: its device is held by") for why in waited)
    assert len(said) == 1
    assert "mine ends 0\n" in runs[0].run.log.read_text()


def test_a_dataset_takes_another_slot_if_its_device_is_held(toy: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path))
    made = suite(toy, {"datasets": [{"name": "a"}, {"name": "b"}], "stages": ["mine"]}, "s")
    made.folder.mkdir(parents=True)
    executor = LocalExecutor()
    runs = make_runs(made, lambda job, text: None)
    with (tmp_path / "gpu-0.0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            drive(runs, [Slot("gpu0", ("0",)), Slot("gpu1", ("1",))], executor, StopRequest())
        finally:
            executor.close()
    assert [one.state for one in runs] == ["complete", "complete"]
    for one in runs:
        assert "mine ends 1\n" in one.run.log.read_text()
        assert (one.run.complete("mine") or {})["slot"] == "gpu1"


def test_a_device_that_another_process_uses_is_waited_for(toy: Any) -> None:
    made = suite(toy, {"datasets": [{"name": "a"}], "stages": ["mine"]}, "s")
    made.folder.mkdir(parents=True)
    executor = LocalExecutor()
    runs = make_runs(made, lambda job, text: None)
    said: list[str] = []
    busy = ["device 0 is used by python (pid 7)", None]
    try:
        drive(runs, [Slot("cpu0")], executor, StopRequest(), why_busy=lambda slot: busy.pop(0), on_wait=said.append)
    finally:
        executor.close()
    assert runs[0].state == "complete"
    assert said == ["cpu0: device 0 is used by python (pid 7); waiting (share: true shares it)"]


def test_a_dataset_that_waits_for_its_device_is_stopped_with_the_suite(
    toy: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path))
    made = suite(toy, {"datasets": [{"name": "a"}, {"name": "b"}], "stages": ["mine"]}, "s")
    made.folder.mkdir(parents=True)
    executor = LocalExecutor()
    runs = make_runs(made, lambda job, text: None)
    request = StopRequest()
    closed: list[str] = []

    def tick() -> None:
        request.drain = request.drain or bool(runs[0].blocked)

    with (tmp_path / "gpu-0.0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            drive(
                runs, [Slot("gpu0", ("0",))], executor, request, tick=tick, closed=lambda run: closed.append(run.name)
            )
        finally:
            executor.close()
    assert [one.state for one in runs] == ["stopped", "stopped"]
    assert [one.error for one in runs] == ["stopped before it finished", "not started"]
    assert closed == ["a", "b"]
    assert run(made) == {"a": "complete", "b": "complete"}


def test_a_table_is_not_made_from_a_file_outside_the_lab(toy: Any) -> None:
    outside = toy.folder.parent / "outside.csv"
    outside.write_text("secret\n1\n")
    for source in ("../../../../outside.csv", str(outside), "link.csv"):
        made = suite(toy, {"datasets": [{"name": "a"}], "stages": ["mine"], "tables": {"t.csv": source}}, "s")
        made.jobs[0].run.path.mkdir(parents=True, exist_ok=True)
        if source == "link.csv":
            (made.jobs[0].run.path / source).symlink_to(outside)
        with pytest.raises(LabError, match="leads out of the lab"):
            made.collect(["a"])


@pytest.mark.parametrize("name", ["../x", "..", "a/b"])
def test_the_id_of_a_suite_does_not_lead_out(toy: Any, name: str) -> None:
    with pytest.raises(LabError, match="cannot be a suite's id"):
        suite(toy, {"datasets": [{"name": "a"}], "stages": ["mine"]}, name)
    made = suite(toy, {"datasets": [{"name": "a"}], "stages": ["mine"]}, "fine")
    made.folder.mkdir(parents=True)
    (made.folder / "suite.json").write_text(json.dumps({"id": name, "key": made.key, "created": 1}))
    with pytest.raises(LabError, match="cannot be a suite's id"):
        suite(toy, {"datasets": [{"name": "a"}], "stages": ["mine"]})


def test_the_tables_of_a_suite_are_not_written_through_a_link(toy: Any) -> None:
    outside = toy.folder.parent / "outside"
    outside.mkdir()
    settings = {"datasets": [{"name": "a"}], "stages": ["mine"], "tables": {"t.csv": "t.csv"}}
    made = suite(toy, settings, "s")
    made.jobs[0].run.path.mkdir(parents=True)
    (made.jobs[0].run.path / "t.csv").write_text("a\n1\n")
    made.folder.mkdir(parents=True)
    (made.folder / "tables").symlink_to(outside)
    with pytest.raises(LabError, match="is a link"):
        made.collect(["a"])
    with pytest.raises(LabError, match="leads out of the lab"):
        suite(toy, settings, "s")
    assert not list(outside.iterdir())
