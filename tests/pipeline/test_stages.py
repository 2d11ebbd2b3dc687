"""Which stages run, which are skipped, and on what they refuse to build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import StudyConfig, load_lab
from looplab.errors import BusyError, LabError
from looplab.pipeline.folder import latest

ALL = ("mine", "select", "memory", "eval")
DONE = dict.fromkeys(ALL, "complete")
SKIPPED = dict.fromkeys(ALL, "skipped")
RESULT = "acc\n41 7 0 1\n"


def test_four_calls_and_one_call_come_to_the_same(toy: Any) -> None:
    for stage in ALL:
        assert toy(stage) == {stage: "complete"}
        assert toy.latest == toy.runs[0].name
    (run,) = toy.runs
    assert toy.table() == RESULT
    assert toy(*ALL, new=True) == DONE
    assert len(toy.runs) == 2
    assert toy.table() == RESULT
    assert toy.latest == toy.runs[0].name != run.name


def test_what_is_complete_and_unchanged_is_skipped(toy: Any) -> None:
    toy(*ALL)
    assert toy(*ALL) == SKIPPED
    assert toy("mine") == {"mine": "skipped"}
    assert len(toy.runs) == 1
    assert any("unchanged" in text for text in toy.said)


def test_stages_are_run_in_their_order_whatever_the_call_says(toy: Any) -> None:
    assert list(toy("eval", "memory", "mine", "select")) == list(ALL)


def test_no_names_mean_all_stages(toy: Any) -> None:
    assert toy() == DONE


def test_the_run_folder_holds_the_config_and_one_log(toy: Any) -> None:
    toy(*ALL, edits=("eval.beta@set=5",))
    folder = toy.runs[0].path
    config = json.loads((folder / "config_resolved.json").read_text())
    assert config["eval"]["beta"] == 5
    assert config["outputs"]["run_id"] == folder.name
    log = (folder / "logs" / "run.log").read_text()
    assert [line for line in log.splitlines() if not line.startswith("==")] == [
        "mine begins at 0", "mine ends None", "eval says 41 7 0 5",
    ]  # fmt: skip
    for stage in ALL:
        assert f"{stage} starts" in log
        assert f"{stage} complete" in log
    assert not {"train.log", "exit.json", "process.json"} & {path.name for path in folder.iterdir()}
    manifest = json.loads((folder / "stages" / "mine.json").read_text())
    assert list(manifest["outputs"]) == ["mine/rows.txt"]
    assert manifest["parts"]["config"]["mine.n"] == 4
    assert set(manifest["parts"]["code"]) == {"mine.py"}
    assert set(manifest["parts"]["files"]) == {"model.bin"}


@pytest.mark.parametrize(
    ("edit", "again", "why"),
    [
        ("eval.beta@set=2", ("eval",), "eval.beta 1 → 2"),
        ("select.B@set=2", ("select", "memory", "eval"), "select.B 3 → 2"),
        ("model.layer@set=9", (), ""),
    ],
)
def test_only_what_depends_on_a_change_is_run_again(toy: Any, edit: str, again: tuple[str, ...], why: str) -> None:
    toy(*ALL)
    assert toy(*ALL, edits=(edit,)) == SKIPPED | dict.fromkeys(again, "complete")
    assert why in "\n".join(toy.said)
    assert len(toy.runs) == 1


def test_another_config_of_the_first_stage_is_another_run(toy: Any) -> None:
    toy(*ALL)
    assert toy(*ALL, edits=("seed@set=8",)) == DONE
    assert len(toy.runs) == 2
    assert toy("mine", edits=("seed@set=8",)) == {"mine": "skipped"}


def test_changed_code_is_named(toy: Any) -> None:
    toy(*ALL)
    name = toy.runs[0].name
    (toy.folder / "stages.py").write_text((toy.folder / "stages.py").read_text() + "\n# changed\n")
    assert toy(*ALL, run_id=name) == {**DONE, "mine": "skipped"}
    assert "stages.py changed" in "\n".join(toy.said)
    (toy.folder / "model.bin").write_bytes(b"other weights")
    toy("mine", run_id=name)
    assert "mine: starts (rerun: model.bin changed)" in toy.said


def test_lost_outputs_are_made_again(toy: Any) -> None:
    toy(*ALL)
    shutil.rmtree(toy.runs[0].path / "library")
    # Made again with the same bytes: what builds on it need not be.
    assert toy(*ALL) == {**SKIPPED, "select": "complete"}


def test_files_that_come_later_do_not_make_a_stage_stale(toy: Any) -> None:
    toy(*ALL)
    (toy.runs[0].path / "tables" / "mine_too.csv").write_text("x\n")
    assert toy(*ALL) == SKIPPED


def test_force_runs_again_what_is_unchanged(toy: Any) -> None:
    toy(*ALL)
    assert toy("mine", force=True) == {"mine": "complete"}
    assert toy(*ALL) == SKIPPED  # it made the same
    assert toy(*ALL, force=True) == DONE


def test_a_stage_does_not_build_on_a_stale_one(toy: Any) -> None:
    toy(*ALL)
    with pytest.raises(LabError) as caught:
        toy("memory", edits=("select.B@set=1",))
    assert "memory cannot use select" in str(caught.value)
    assert "select.B 3 → 1" in str(caught.value)
    assert "--edit select.B@set=1 select memory" in str(caught.value.hint)
    # The stale one may be further up.
    with pytest.raises(LabError, match="select, which it builds on"):
        toy("eval", edits=("select.B@set=1",))
    assert toy("select", "memory", edits=("select.B@set=1",)) == {"select": "complete", "memory": "complete"}
    assert toy("eval", edits=("select.B@set=1",)) == {"eval": "complete"}


def test_a_later_stage_without_any_run_says_what_is_missing(toy: Any) -> None:
    with pytest.raises(LabError, match="no complete run: select builds on mine"):
        toy("select")
    with pytest.raises(LabError, match="a new run has no mine"):
        toy("select", new=True)
    with pytest.raises(LabError, match="has no run 'nothing'"):
        toy("select", run_id="nothing")


def test_runs_can_be_named(toy: Any) -> None:
    toy("mine", run_id="first")
    toy("mine", run_id="second")
    assert toy("select", run_id="first") == {"select": "complete"}
    assert toy.latest == "first"
    assert toy("memory", run_id="latest") == {"memory": "complete"}
    assert {run.name for run in toy.runs} == {"first", "second"}
    assert toy("mine", edits=("outputs.run_id@new=third",)) == {"mine": "complete"}
    assert toy.latest == "third"
    with pytest.raises(LabError, match="did you mean third"):
        toy("select", run_id="thirt")


def test_a_failed_stage_leaves_latest_where_it_was_and_is_resumed(toy: Any) -> None:
    toy(*ALL)
    first = toy.latest
    assert toy("mine", state="failed", edits=("seed@set=9", "mine.exit@set=3")) == {"mine": "failed"}
    assert "exit code 3" in toy.last.error
    assert toy.last.tail() == ["mine begins at 0", "mine ends None", f"== {toy.last.tail()[-1][3:]}"]
    assert toy.latest == first
    assert toy("mine", state="failed", edits=("seed@set=9", "mine.exit@set=3")) == {"mine": "failed"}
    assert len(toy.runs) == 2
    assert "mine begins at 4\n" in toy.runs[0].log.read_text()


def test_a_resumed_stage_finds_what_it_left_and_another_one_does_not(toy: Any) -> None:
    toy("mine", state="failed", run_id="r", edits=("mine.exit@set=1",))
    toy("mine", state="failed", run_id="r", edits=("mine.exit@set=1",))
    assert "mine begins at 4\n" in "".join(toy.said)  # continues after its rows
    (toy.runs[0].path / "mine" / "more.txt").write_text("left behind")
    toy("mine", run_id="r")
    assert "mine begins at 0\n" in "".join(toy.said)
    assert not (toy.runs[0].path / "mine" / "more.txt").exists()
    assert "restarted: mine.exit 1 → 0" in "".join(toy.said)


def test_outputs_that_were_there_before_the_first_attempt_are_left_alone(toy: Any) -> None:
    theirs = toy.root / "r" / "mine" / "theirs.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("by hand")
    toy("mine", run_id="r")
    assert theirs.read_text() == "by hand"


def test_a_stage_that_makes_nothing_is_not_complete(toy: Any) -> None:
    (toy.folder / "stages.py").write_text("def select(config, run_dir):\n    pass\n")
    assert toy("mine", "select", state="failed") == {"mine": "complete", "select": "failed"}
    assert "did not write library" in toy.last.error
    assert toy.runs[0].complete("select") is None
    assert toy.latest is None


def test_a_broken_entry_is_reported_in_the_log(toy: Any) -> None:
    (toy.folder / "stages.py").write_text("def other(config, run_dir):\n    pass\n")
    toy("mine", "select", state="failed")
    assert any("stages.py has no function select" in line for line in toy.last.tail())


def test_latest_does_not_point_at_a_run_with_an_incomplete_stage(toy: Any) -> None:
    toy(*ALL, run_id="old")
    toy("mine", state="failed", run_id="young", edits=("mine.exit@set=1",))
    assert toy.latest == "old"
    (toy.root / "LATEST").write_text("young\n")  # as something else may have written it
    assert latest(toy.root).name == "old"


def state_of(folder: Path) -> dict[str, str]:
    """Return the outputs, manifests and config of a run, and LATEST."""
    names = ("mine", "library", "memory", "tables", "stages", "config_resolved.json")
    files = [path for name in names for path in [folder / name, *(folder / name).rglob("*")] if path.is_file()]
    kept = {str(path.relative_to(folder)): path.read_text() for path in files if path.name != "call.json"}
    return kept | {"LATEST": (folder.parent / "LATEST").read_text()}


@pytest.mark.parametrize("edit", ["mine.exit@set=1", "select.B@new='x'"])
def test_a_stage_that_fails_leaves_what_was_finished(toy: Any, edit: str) -> None:
    toy(*ALL, run_id="r")
    before = state_of(toy.root / "r")
    toy(edit.split(".")[0], state="failed", run_id="r", edits=(edit,))
    assert state_of(toy.root / "r") == before
    assert "the outputs of its last complete attempt are unchanged" in "".join(toy.said)


def test_a_failed_attempt_is_resumed_from_what_it_wrote(toy: Any) -> None:
    toy(*ALL, run_id="r")
    for start in (0, 4, 4):
        toy("mine", state="failed", run_id="r", edits=("mine.exit@set=1",))
        assert f"mine begins at {start}\n" in "".join(toy.said)
    assert (toy.root / "r" / "partial" / "mine" / "mine" / "rows.txt").exists()
    assert toy(*ALL, run_id="r") == SKIPPED  # the first config again: nothing was lost
    assert toy("mine", run_id="r", edits=("mine.n@set=5",)) == {"mine": "complete"}
    assert not (toy.root / "r" / "partial" / "mine").exists()


def test_replaced_outputs_are_kept(toy: Any) -> None:
    toy(*ALL, run_id="r")
    tables = [toy.table(toy.runs[0])]
    for beta in (2, 3, 4):
        toy("eval", run_id="r", edits=(f"eval.beta@set={beta}",))
        tables.append(toy.table(toy.runs[0]))
    kept = sorted((toy.root / "r" / "previous" / "eval").iterdir())
    assert [path.name for path in kept] == ["2", "3"]
    assert [(path / "tables" / "results.csv").read_text() for path in kept] == tables[1:3]


def test_keys_that_a_stage_ignores_do_not_make_it_stale(toy: Any) -> None:
    lab = json.loads((toy.folder / "lab.yaml").read_text())
    lab["stages"]["mine"]["ignores"] = ["mine.sleep"]
    (toy.folder / "lab.yaml").write_text(json.dumps(lab))
    toy(*ALL, run_id="r")
    assert toy(*ALL, run_id="r", edits=("mine.sleep@set=0.001",)) == SKIPPED
    assert json.loads((toy.root / "r" / "config_resolved.json").read_text())["mine"]["sleep"] == 0.001


RESOLVE = """\
import json, sys

config = json.load(open(sys.argv[1]))
if unknown := set(config["eval"]) - {"beta", "artifact_run_dir", "gamma"}:
    sys.exit(f"error: {sys.argv[1]}:3: unknown key eval.{unknown.pop()}")
config["eval"].setdefault("gamma", 0.5)
print(json.dumps(config))
"""


def test_a_config_is_checked_and_completed_before_anything_is_touched(toy: Any) -> None:
    (toy.folder / "resolve.py").write_text(RESOLVE)
    lab = json.loads((toy.folder / "lab.yaml").read_text())
    lab["pipeline"]["resolve"] = ["{python}", "resolve.py", "{config}"]
    (toy.folder / "lab.yaml").write_text(json.dumps(lab))
    toy(*ALL, run_id="r")
    assert json.loads((toy.root / "r" / "config_resolved.json").read_text())["eval"]["gamma"] == 0.5
    before = state_of(toy.root / "r")
    with pytest.raises(LabError, match=r"config.json \(with eval.betta@new=2\) was rejected: .*unknown key eval.betta"):
        toy("eval", run_id="r", edits=("eval.betta@new=2",))
    assert state_of(toy.root / "r") == before
    assert toy(*ALL, run_id="r", edits=("eval.gamma@new=0.5",)) == SKIPPED  # the default, written out


def test_the_next_stage_continues_after_a_failed_one(toy: Any) -> None:
    toy("mine")
    good = (toy.folder / "stages.py").read_text()
    (toy.folder / "stages.py").write_text("def select(config, run_dir):\n    raise SystemExit(1)\n")
    toy("select", state="failed")
    assert toy.latest is None
    (toy.folder / "stages.py").write_text(good)
    assert toy("select") == {"select": "complete"}
    assert len(toy.runs) == 1
    assert toy.latest == toy.runs[0].name


def test_two_calls_on_one_run_do_not_meet(toy: Any) -> None:
    toy("mine", run_id="r")
    with toy.runs[0].lock("somebody's test"), pytest.raises(BusyError, match=r"in use by pid \d+ on .*somebody's test"):
        toy("mine", run_id="r")


# -- artifacts of another run


def eval_only(toy: Any, value: str, *edits: str, **more: Any) -> Any:
    moved = (f"eval.artifact_run_dir@set={value}", "outputs.run_name@set=online")
    return toy("eval", edits=(*moved, *edits), **more)


def test_one_offline_run_serves_many_online_ones(toy: Any) -> None:
    toy("mine", "select", "memory")
    offline = toy.runs[0].name
    root = toy.folder / "outputs" / "online"
    assert eval_only(toy, "outputs/toy/latest") == {"eval": "complete"}
    assert eval_only(toy, "outputs/toy/latest") == {"eval": "skipped"}
    assert eval_only(toy, "outputs/toy/latest", "eval.beta@set=3") == {"eval": "complete"}
    runs = [path for path in root.iterdir() if path.is_dir()]
    assert len(runs) == 2
    for run in runs:
        config = json.loads((run / "config_resolved.json").read_text())
        assert config["eval"]["artifact_run_dir"] == f"outputs/toy/{offline}"
        assert "41 7 0" in (run / "tables" / "results.csv").read_text()
    toy("mine", "select", "memory", new=True)
    assert eval_only(toy, "outputs/toy/latest", "eval.beta@set=3") == {"eval": "complete"}  # of the new latest


def test_artifacts_must_be_complete_and_fit(toy: Any) -> None:
    with pytest.raises(LabError, match=r"no complete run: eval.artifact_run_dir names the latest run"):
        eval_only(toy, "outputs/toy/latest")
    toy("mine", "select", run_id="half")
    with pytest.raises(LabError, match=r"memory of .*half cannot be used: it has not been run"):
        eval_only(toy, "outputs/toy/half")
    toy("memory", run_id="half")
    with pytest.raises(LabError) as caught:
        eval_only(toy, "outputs/toy/half", "model.layer@set=4", "model.path@set=x.bin")
    assert "model.layer is 4 here and 3 there" in str(caught.value)
    assert "model.path is 'x.bin' here and 'model.bin' there" in str(caught.value)
    toy("mine", "select", run_id="half", edits=("select.B@set=1",))
    with pytest.raises(LabError, match=r"memory of .* cannot be used: select was rebuilt"):
        eval_only(toy, "outputs/toy/half")
    with pytest.raises(LabError, match="leads out of the lab"):
        eval_only(toy, "../elsewhere")


# -- the lab file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mine": {"comand": ["x"]}}, "unknown key 'stages.mine.comand'"),
        ({"mine": {"outputs": ["mine"]}}, "a stage is a command or an entry"),
        ({"mine": {"entry": "nothing"}}, "not a function"),
        ({"mine": {"entry": "a:b", "outputs": ["../x"]}}, "below the run folder"),
        ({"mine": {"entry": "a:b", "outputs": ["logs/x"]}}, "reserved for looplab"),
        ({"a": {"entry": "a:b", "after": ["b"]}, "b": {"entry": "a:b", "after": ["a"]}}, "wait for each other: a, b"),
        ({"mine": {"entry": "a:b"}, "select": {"entry": "a:b", "after": ["mien"]}}, "did you mean 'mine'"),
        ({"a": {"entry": "a:b", "outputs": ["x"]}, "b": {"entry": "a:b", "outputs": ["x/y"]}}, "must have one writer"),
    ],
)
def test_mistakes_in_the_lab_file_are_named(toy: Any, change: dict[str, Any], message: str) -> None:
    (toy.folder / "lab.yaml").write_text(json.dumps({"study": "toy", "stages": change}))
    with pytest.raises(LabError, match=message):
        load_lab(toy.folder)


def test_a_study_needs_a_launch_unless_it_has_stages(toy: Any) -> None:
    (toy.folder / "lab.yaml").write_text("study: toy\n")
    with pytest.raises(LabError, match="'launch' is missing"):
        load_lab(toy.folder)
    study = StudyConfig.model_validate({"study": "toy", "stages": {"mine": {"entry": "a:b"}}})
    assert "stage" in study.launch.command


@pytest.mark.parametrize(
    ("lab", "message"),
    [
        ({"pipeline": {"root": "../{outputs.run_name}"}}, "leads out of the lab"),
        ({"pipeline": {"root": "{outputs.run_nam}"}}, "neither a variable nor a key"),
        ({"pipeline": {"root": "outputs/{study}"}}, "the folder of the study's own runs"),
        ({"stages": {"mine": {"command": ["nothing-like-this"]}}}, "stages.mine.command: 'nothing-like-this' is not"),
        ({"stages": {"mine": {"entry": "a:b", "code": ["*.rs"]}}}, r"\*.rs matches no file"),
    ],
)
def test_mistakes_are_reported_before_anything_is_made(toy: Any, lab: dict[str, Any], message: str) -> None:
    known = json.loads((toy.folder / "lab.yaml").read_text())
    (toy.folder / "lab.yaml").write_text(json.dumps({**known, **lab}))
    with pytest.raises(LabError, match=message):
        toy("mine")
    assert not (toy.folder / "outputs").exists()


def test_a_name_that_is_not_a_stage_gets_the_nearest(toy: Any) -> None:
    with pytest.raises(LabError, match="did you mean 'memory'"):
        toy("memroy")


@pytest.mark.parametrize("name", ["../../../../escaped", "..", "a/b", "/tmp/escaped", ".hidden"])
@pytest.mark.parametrize("new", [True, False])
def test_the_name_of_a_run_does_not_lead_out(toy: Any, name: str, new: bool) -> None:
    with pytest.raises(LabError, match="cannot be a run's name"):
        toy.make("mine", run_id=name, new=new)
    with pytest.raises(LabError, match="cannot be a run's name"):
        toy.make("mine", edits=(f"outputs.run_id@new={name}",), new=new)
    assert not toy.root.exists()


def test_a_run_that_is_a_link_to_elsewhere_is_refused(toy: Any) -> None:
    elsewhere = toy.folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pipeline.json").write_text('{"created": 1}')
    toy.root.mkdir(parents=True)
    (toy.root / "r").symlink_to(elsewhere)
    (toy.root / "LATEST").write_text("../../../elsewhere\n")
    with pytest.raises(LabError, match="leads out of the lab"):
        toy.make("mine", run_id="r")
    assert toy("mine") == {"mine": "complete"}
    assert [path.name for path in elsewhere.iterdir()] == ["pipeline.json"]


def test_clearing_outputs_does_not_follow_a_link_in_the_middle(toy: Any) -> None:
    victim = toy.folder.parent / "victim/sub"
    victim.mkdir(parents=True)
    (victim / "file").write_text("precious")
    lab = json.loads((toy.folder / "lab.yaml").read_text())
    lab["stages"]["mine"]["outputs"] = ["mine", "l/sub"]
    (toy.folder / "lab.yaml").write_text(json.dumps(lab))
    (toy.folder / "mine.py").write_text(
        f"import os, sys\nos.makedirs(sys.argv[2] + '/mine')\nos.symlink({str(victim.parent)!r}, sys.argv[2] + '/l')\n"
    )
    toy("mine", run_id="r")
    toy("mine", run_id="r", state="failed", edits=("seed@set=8",))
    assert "is a link or a file, not a folder" in toy.last.error
    assert (victim / "file").read_text() == "precious"


@pytest.mark.parametrize("name", ["stages", "logs"])
def test_nothing_is_written_through_a_folder_that_a_stage_has_replaced_by_a_link(toy: Any, name: str) -> None:
    victim = toy.folder.parent / "victim"
    victim.mkdir()
    (victim / ".tmp-1-x").touch()
    (toy.folder / "mine.py").write_text(
        "import os, shutil, sys\nos.makedirs(sys.argv[2] + '/mine')\n"
        f"shutil.rmtree(sys.argv[2] + '/{name}')\nos.symlink({str(victim)!r}, sys.argv[2] + '/{name}')\n"
    )
    toy("mine", run_id="r", state="failed")
    assert "is a link, and looplab does not write through links" in toy.last.error
    with pytest.raises(LabError, match="is a link"):
        toy("mine", run_id="r")
    assert [path.name for path in victim.iterdir()] == [".tmp-1-x"]
