"""Trainers that write files of looplab's names into the run folder, or into looplab's own folder in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

NAMES = (
    "config.json", "run.json", "summary.json", "exit.json", "process.json", "train.log", "notes.md", "metrics.parquet",
)  # fmt: skip
"""Files in the record of a run."""

WRITER = f"""
import json, os, shutil, sys
for where in sys.argv[1:]:
    os.makedirs(where, exist_ok=True)
    for name in {NAMES!r}:
        with open(os.path.join(where, name), "w") as file:
            json.dump({{"train": {{"lr": 77}}, "code": 77, "loss": 0.0077, "metrics": {{}}, "status": "failed"}}, file)
exec(open("train.py").read())
"""
"""A trainer that writes all of them into the folders of its arguments, and then trains."""

WIPER = """
import os, shutil
config = open(os.environ["LOOPLAB_CONFIG"]).read()
shutil.rmtree(os.environ["LOOPLAB_RUN_DIR"])
os.mkdir(os.environ["LOOPLAB_RUN_DIR"])
os.environ["LOOPLAB_CONFIG"] = os.path.join(os.environ["LOOPLAB_RUN_DIR"], "copy")
open(os.environ["LOOPLAB_CONFIG"], "w").write(config)
exec(open("train.py").read())
"""
"""A trainer that empties its output folder first."""


def commanded(lab, *arguments: str):
    lab.write("writer.py", WRITER)
    lab.configure(launch={"command": ["{python}", "-S", "writer.py", *arguments], "grace": 5})
    return lab


def move_up(run: Path) -> None:
    """Make a run folder as early versions made them."""
    for path in (run / "record").iterdir():
        path.rename(run / path.name)
    (run / "record").rmdir()


# -- the trainer's own files


@pytest.mark.slow
def test_files_of_looplabs_names_belong_to_the_trainer(lab) -> None:
    commanded(lab, "{out_dir}", "{run_dir}").queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    base, run = lab.runs()
    assert {path.name for path in run.iterdir()} == {*NAMES, "record", "metrics.jsonl", "seen.json"}
    for name in NAMES:
        assert json.loads((run / name).read_text())["code"] == 77, name
    assert lab("diff", "1", "2", "--json").json()["changes"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    told = lab("verify", "--json").json()
    assert (told["whole"], told["notes"]) == (True, [])
    shown = lab("show", "2", "--json").json()
    assert (shown["run"]["status"], shown["run"]["exit_code"]) == ("ok", 0)
    assert shown["changes"]["base"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    assert shown["summary"]["metrics"]["loss"]["last"] == pytest.approx(1 / 3)
    shown = [line for line in lab("show", "2").out.splitlines() if str(lab.folder) not in line]
    assert not re.search(r"\b77\b", "\n".join(shown))
    assert lab("logs", "2").out == "lr is 0.3\nthe end\n"
    assert run.name in (lab.outputs() / "BEST").read_text()
    facts = json.loads((lab.outputs() / "summary.json").read_text())  # of the report
    assert "0.0077" not in json.dumps(facts)
    assert lab("query", "SELECT value FROM knobs WHERE key = 'train.lr' ORDER BY run", "--json").json() == [
        {"value": "0.1"}, {"value": "0.3"},
    ]  # fmt: skip
    assert lab.read(base, "summary.json")["status"] == "ok"


def test_a_search_counts_the_points_that_such_a_trainer_has_measured(lab) -> None:
    commanded(lab, "{out_dir}").configure(
        proposers=[{"search": {}}], knobs={"train.lr": {"type": "float", "low": 0.001, "high": 1, "log": True}}
    )
    out = lab("run", "--runs", "3", "--concurrency", "1").out
    assert "1 of 6 points measured" in out, out


def test_an_engine_that_is_killed_finds_such_a_run_again(lab, until) -> None:
    commanded(lab, "{out_dir}").base(wait="gate")
    engine = lab.start("run", "--runs", "1")
    lab.until_at_work()
    until(lambda: lab.all("process.json"), "process.json")
    os.kill(engine.pid, signal.SIGKILL)
    engine.ended(None)
    resumed = lab.start("run", "--runs", "1")
    until(lambda: ": adopted" in resumed.out, "the adoption")
    lab.open_gate()
    resumed.ended()
    assert lab.ask("SELECT status, exit_code, objective FROM runs") == [("ok", 0, pytest.approx(0.2 + 1 / 3))]
    assert "the record is whole" in lab("verify").out


@pytest.mark.slow
def test_a_ledger_is_rebuilt_from_the_record_of_such_runs(lab) -> None:
    commanded(lab, "{out_dir}")("run")
    before = lab("show", "1").out
    (lab.folder / ".looplab" / "ledger.db").unlink()
    lab("reindex")
    assert lab("show", "1").out == before


# -- runs that write into looplab's folder


@pytest.mark.slow
def test_what_a_run_changes_in_its_record_is_reported_and_restored(lab) -> None:
    commanded(lab, "{run_dir}/record").queue("train.lr@set=0.3")
    # The trainer needs its config from elsewhere: it has just overwritten it.
    lab.write("train.py", (lab.folder / "train.py").read_text().replace('os.environ["LOOPLAB_CONFIG"]', '"own.json"'))
    lab.write("own.json", (lab.folder / "configs/base.json").read_text())
    out = lab("run", "--concurrency", "1").out
    base, run = lab.runs()
    assert out.count("the run changed record/") >= 2, out
    assert [lab.read(path, "config.json")["train"]["lr"] for path in (base, run)] == [0.1, 0.3]
    assert lab("diff", "1", "2", "--json").json()["changes"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    verified = lab("verify").out
    for name in ("config.json", "run.json"):
        assert f"note: toy/{run.name}/record/{name}: the run changed it; restored" in verified
        assert len(list((run / "record").glob(f"{name}.changed-*"))) == 1
    assert "the record is whole" in verified
    shown = lab("show", "2", "--json").json()
    assert (shown["run"]["status"], shown["run"]["exit_code"], shown["about"]["n"]) == ("ok", 0, 2)
    assert shown["changes"]["base"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    assert any("the run changed record/" in note for note in shown["summary"]["notes"])
    assert lab.read(run, "exit.json")["code"] == 0
    before = lab("show", "2").out
    (lab.folder / ".looplab" / "ledger.db").unlink()
    lab("reindex")
    assert lab("show", "2").out == before


def test_a_run_that_empties_its_folder_loses_nothing_of_its_record(lab) -> None:
    lab.write("wiper.py", WIPER)
    lab.configure(launch={"command": ["{python}", "-S", "wiper.py"], "grace": 5})
    out = lab("run").out
    (run,) = lab.runs()
    assert "the run changed record/" in out
    assert lab.read(run, "config.json")["train"]["lr"] == 0.1
    assert (lab.read(run, "summary.json")["status"], lab.read(run, "exit.json")["code"]) == ("ok", 0)
    assert "the record is whole" in lab("verify").out


def test_what_an_adopted_run_changed_and_nobody_can_restore_is_not_believed(lab, until) -> None:
    commanded(lab, "{run_dir}/record").base(wait="gate")
    lab.write("train.py", (lab.folder / "train.py").read_text().replace('os.environ["LOOPLAB_CONFIG"]', '"own.json"'))
    lab.write("own.json", (lab.folder / "configs/base.json").read_text())
    engine = lab.start("run", "--runs", "1")
    until(lambda: list(lab.outputs().glob("*/metrics.jsonl")), "a training at work")
    os.kill(engine.pid, signal.SIGKILL)
    engine.ended(None)
    resumed = lab.start("run", "--runs", "1")
    until(lambda: ": adopted" in resumed.out, "the adoption")
    lab.open_gate()
    out = resumed.ended().out
    assert "what record/run.json said is lost" in out, out
    assert lab.ask("SELECT status, exit_code, objective FROM runs") == [("ok", 0, pytest.approx(0.2 + 1 / 3))]
    (run,) = lab.runs()
    assert lab.read(run, "config.json")["train"]["lr"] == 0.1
    findings = lab("verify", "--json", code=1).json()["findings"]
    assert {finding["where"] for finding in findings} == {f"toy/{run.name}/record/run.json"}
    shown = lab("show", "1", "--json").json()
    assert (shown["about"]["n"], shown["about"]["config_hash"]) == (1, shown["run"]["config_hash"])


# -- configs are read from the ledger


def test_a_config_that_is_gone_or_was_changed_is_still_known(lab) -> None:
    lab.queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    first, second = lab.runs()
    (first / "record/config.json").write_text('{"train": {"lr": 77}}')
    (second / "record/config.json").unlink()
    assert lab("diff", "1", "2", "--json").json()["changes"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    found = lab("query", "SELECT value FROM knobs WHERE key = 'train.lr' ORDER BY run", "--json").json()
    assert found == [{"value": "0.1"}, {"value": "0.3"}]


def test_reindex_takes_configs_from_the_folders(lab) -> None:
    lab.queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    before = lab.ask("SELECT * FROM configs ORDER BY hash")
    assert len(before) == 2
    (lab.folder / ".looplab" / "ledger.db").unlink()
    shutil.rmtree(lab.folder / ".looplab" / "backups")
    (lab.runs()[1] / "record/config.json").write_text('{"train": {"lr": 77}}')
    lab("reindex")
    (found,) = lab.ask("SELECT * FROM configs")
    assert found in before
    assert "not the config that the run was planned with" in lab("diff", "1", "2", code=2).err


# -- labs of early versions


@pytest.fixture
def early(lab):
    """A lab with two runs, made by an early version, but for its ledger."""
    lab.queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    return lab


@pytest.mark.slow
def test_the_runs_of_an_early_version_are_shown_as_before(early) -> None:
    commands = (("show", "2"), ("logs", "2"), ("diff", "1", "2"), ("query", "FROM knobs ORDER BY ALL"))
    before = [early(*command).out for command in commands]
    for run in early.runs():
        move_up(run)
    assert [early(*command).out for command in commands] == before


@pytest.mark.slow
def test_a_ledger_is_rebuilt_from_the_runs_of_an_early_version_and_the_study_goes_on(early) -> None:
    before = early("show", "2").out
    for run in early.runs():
        move_up(run)
    shutil.rmtree(early.folder / ".looplab")
    early("reindex")
    assert early("show", "2").out == before
    assert "the record is whole" in early("verify").out
    early.queue("train.lr@set=0.3", "train.lr@set=0.4")
    early("run", "--concurrency", "1")
    (run,) = early.runs()
    assert early.read(run, "run.json")["n"] == 3
    facts = json.loads((early.outputs() / "summary.json").read_text())
    assert len(facts["runs"]) == 3


@pytest.mark.slow
def test_pipes_and_folders_in_the_place_of_notes_and_lab_book_hold_up_nothing(lab) -> None:
    code = """
import contextlib, shutil
study = os.path.dirname(run_dir)
os.mkfifo(os.path.join(run_dir, "record", "notes.md"))
for name in ("labbook.md", "BEST", "LATEST"):
    path = os.path.join(study, name)
    with contextlib.suppress(OSError):  # the other run does the same at the same time
        shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.unlink(path)
        os.mkfifo(path) if name == "labbook.md" else os.makedirs(path + "/x")
"""
    trainer = (lab.folder / "train.py").read_text()
    lab.write("train.py", trainer.replace("seen = {", code + "seen = {"))
    lab.queue("train.lr@set=0.3")
    lab("run")
    lab("resume")
    lab("report")
    assert lab.count(status="ok") == 2
    lab("verify")


# -- runs that put links in the place of looplab's folders


@pytest.mark.parametrize(
    "does",
    [
        "os.rename(run + '/record', run + '/old'); os.symlink(victim, run + '/record')",
        "shutil.rmtree(run + '/record'); os.symlink(victim, run + '/record')",
        "shutil.rmtree(run); os.symlink(victim, run)",
        "os.symlink(victim + '/summary.json', study + '/new'); os.replace(study + '/new', study + '/labbook.md')",
        "os.symlink(victim + '/summary.json', run + f'/record/exit.json.tmp{os.getppid()}')",
        "os.symlink(victim, study + '/plots')",
    ],
)
def test_nothing_is_written_through_a_link_that_a_run_has_left(lab, tmp_path: Path, does: str) -> None:
    victim = tmp_path / "victim"
    (victim / "record").mkdir(parents=True)
    for name in (*NAMES, *(f"record/{name}" for name in NAMES)):
        (victim / name).write_text("kept")
    lab.write(
        "linker.py",
        f"import os, shutil\nrun, victim = os.environ['LOOPLAB_RUN_DIR'], {str(victim)!r}\n"
        f"study = os.path.dirname(run)\n{does}\n",
    )
    lab.configure(launch={"command": ["{python}", "-S", "linker.py"], "grace": 5}, objective=None)
    out = lab("run", "--runs", "1", code=None).out
    lab("report")
    assert {path.read_text() for path in victim.rglob("*") if path.is_file()} == {"kept"}, out
    assert len(list(victim.rglob("*"))) == 2 * len(NAMES) + 1
    (run,) = lab.runs()
    assert lab.read(run, "summary.json")["status"] == "ok"
    assert lab.read(run, "config.json")["train"]["lr"] == 0.1
    assert "the record is whole" in lab("verify").out
