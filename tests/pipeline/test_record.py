"""Pipelines in the ledger: what is recorded, found again, verified and rebuilt."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.launch.base import Slot
from looplab.launch.local import LocalExecutor
from looplab.ledger import catalogue
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.pipelines import PipelineLedger, Rows, latest_stages, read_rows
from looplab.ledger.rebuild import reindex
from looplab.ledger.schema import VERSION
from looplab.pipeline.case import run_case
from looplab.pipeline.driver import StopRequest, drive
from looplab.pipeline.overview import pipelines_of
from looplab.pipeline.plan import choose_run, make_plan
from looplab.pipeline.recording import open_record
from looplab.pipeline.runner import HERE
from looplab.pipeline.suite import make_runs, make_suite

ALL = ("mine", "select", "memory", "eval")


@contextlib.contextmanager
def opened(toy: Any) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(toy.folder / ".looplab/ledger.db")) as ledger:
        yield ledger


def rows(toy: Any) -> Rows:
    with opened(toy) as ledger:
        return read_rows(ledger)


def kinds(toy: Any) -> list[str]:
    with opened(toy) as ledger:
        return [event.kind for event in ledger.events()]


def findings(toy: Any) -> list[tuple[str, str, str]]:
    with opened(toy) as ledger:
        return [(one.what, one.where, one.why) for one in audit(ledger, toy.folder).findings]


def unrecorded(toy: Any, *stages: str, **more: Any) -> None:
    """Run stages without a ledger, as a version without one did."""
    one = toy.make(*stages, **more)
    one.open()
    with contextlib.closing(LocalExecutor()) as executor:
        drive([one], [HERE], executor, StopRequest())
    assert one.state == "complete"


def run_suite(toy: Any, *names: str) -> None:
    path = toy.folder / "suite.yaml"
    block = {"datasets": [{"name": name} for name in names], "stages": ["mine"], "config": "config.json"}
    path.write_text(json.dumps({"suite": {**block, "fields": {"name": "seed_name"}}}))
    lab = load_lab(toy.folder)
    made = make_suite(lab, lab.study(None), path, "s")
    with (
        contextlib.closing(LocalExecutor()) as executor,
        made.lock(),
        open_record(lab, "steer", toy.said.append) as record,
    ):
        began = made.begin(record)
        runs = make_runs(made, lambda job, text: None, record=record)
        drive(runs, [Slot("cpu0"), Slot("cpu1")], executor, StopRequest())
        made.end(runs, record, began)


def test_a_call_records_its_stages_and_makes_the_ledger(toy: Any) -> None:
    toy("mine", "select")
    assert kinds(toy) == ["stage began", "stage ended"] * 2
    (row, _) = rows(toy)["stages"].values()
    made = toy.runs[0].complete("mine")
    assert row == {
        "study": "steer", "folder": f"outputs/toy/{toy.runs[0].name}", "stage": "mine", "attempt": 1,
        "state": "complete", "why": "first time", "fingerprint": made["fingerprint"], "config": made["config"],
        "outputs": made["outputs_digest"], "slot": "here", "began": made["began"], "ended": made["ended"],
        "seconds": made["seconds"],
    }  # fmt: skip
    assert findings(toy) == []


def test_the_ledger_is_where_the_lab_keeps_it(toy: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPLAB_STATE_DIR", str(tmp_path / "state"))
    toy("mine")
    assert not (toy.folder / ".looplab/ledger.db").exists()
    with contextlib.closing(Ledger(load_lab(toy.folder).ledger_path, create=False)) as ledger:
        assert [event.kind for event in ledger.events()] == ["stage began", "stage ended"]


def test_what_is_skipped_is_not_recorded_again(toy: Any) -> None:
    toy("mine", "select")
    before = kinds(toy)
    toy("mine", "select")
    assert kinds(toy) == before


def test_a_failed_stage_is_recorded_with_its_reason_and_each_attempt_has_a_row(toy: Any) -> None:
    toy("mine", state="failed", run_id="r", edits=("mine.exit@set=3",))
    toy("mine", state="failed", run_id="r", edits=("mine.exit@set=3",))
    toy("mine", run_id="r")
    found = [(row["attempt"], row["state"], row["why"]) for row in rows(toy)["stages"].values()]
    assert [one[:2] for one in found] == [(1, "failed"), (2, "failed"), (3, "complete")]
    assert found[0][2] == "exit code 3"
    assert findings(toy) == []


def test_a_complete_stage_that_is_not_recorded_yet_is_recorded_by_the_next_call(toy: Any) -> None:
    unrecorded(toy, "mine")
    assert not (toy.folder / ".looplab/ledger.db").exists()
    assert toy("mine") == {"mine": "skipped"}
    assert kinds(toy) == ["stage ended"]
    assert [row["state"] for row in rows(toy)["stages"].values()] == ["complete"]


def test_a_complete_stage_is_recorded_before_it_is_run_again(toy: Any) -> None:
    unrecorded(toy, "mine")
    toy("mine", force=True)
    assert kinds(toy) == ["stage ended", "stage began", "stage ended"]
    assert [row["attempt"] for row in rows(toy)["stages"].values()] == [1, 2]


@pytest.mark.parametrize("state", ["running", "ended"])
def test_an_attempt_of_a_killed_call_is_recorded_by_the_next(toy: Any, state: str) -> None:
    """With other inputs, so that it is not resumed."""
    toy("mine", state="failed", run_id="r", edits=("mine.exit@set=3",))
    shutil.rmtree(toy.folder / ".looplab")
    path = toy.runs[0].path / "stages/mine.begun.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": state}))
    toy("mine", run_id="r")
    found = [(row["state"], row["attempt"]) for row in rows(toy)["stages"].values()]
    assert found == [("lost" if state == "running" else "failed", 1), ("complete", 2)]
    assert findings(toy) == []


def test_a_ledger_that_cannot_be_written_does_not_stop_a_stage(toy: Any) -> None:
    (toy.folder / ".looplab").mkdir()
    (toy.folder / ".looplab/ledger.db").write_bytes(b"not a ledger" * 100)
    assert toy("mine") == {"mine": "complete"}
    assert any("not recorded in the ledger" in said for said in toy.said)


def test_a_ledger_that_is_lost_while_a_stage_runs_does_not_stop_it(toy: Any) -> None:
    one = toy.make("mine", "select")
    lab = load_lab(toy.folder)
    with contextlib.closing(LocalExecutor()) as executor, open_record(lab, "steer", toy.said.append) as one.record:
        one.open()
        (toy.folder / ".looplab/ledger.db").unlink()
        drive([one], [HERE], executor, StopRequest())
    assert one.state == "complete"
    assert any(said.startswith("mine: not recorded in the ledger") for said in toy.said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), "its manifest is gone"),
        (lambda path: path.write_text("{"), "cannot be read"),
        (lambda path: path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0', 1)),
         "another fingerprint"),
        (lambda path: path.write_text(path.read_text().replace('outputs_digest": "', 'outputs_digest": "0')),
         "other outputs"),
        (lambda path: shutil.rmtree(path.parent.parent), "the run folder of the pipeline is gone"),
    ],
)  # fmt: skip
def test_verify_finds_what_folders_do_not_say_any_more(toy: Any, change: Any, said: str) -> None:
    toy("mine", "select")
    path = toy.runs[0].path / "stages/mine.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert findings(toy) == []
    change(path)
    assert [said in why for _, _, why in findings(toy)] == [True]


def test_verify_finds_a_changed_table(toy: Any) -> None:
    toy("mine", "select")
    with opened(toy) as ledger:
        ledger.execute("UPDATE stages SET fingerprint='x' WHERE stage='mine'")
        ledger.execute("DELETE FROM stages WHERE stage='select'")
    found = findings(toy)
    assert {why for _, _, why in found} == {
        "fingerprint is 'x' in the table, another in the chain",
        "it is in the chain, but not in the table",
    }


@pytest.mark.parametrize("lost", ["database", "all"])
def test_reindex_restores_pipelines_from_the_journal_or_from_their_folders(toy: Any, lost: str) -> None:
    toy("mine", state="failed", run_id="r", edits=("mine.exit@set=3",))
    toy(*ALL, run_id="r")
    run_suite(toy, "a", "b")
    before = rows(toy)
    for path in (toy.folder / ".looplab").glob("ledger.db*" if lost == "database" else "*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    done = reindex(toy.folder / ".looplab/ledger.db", toy.folder)
    after = rows(toy)
    if lost == "database":
        assert after == before
        assert done.pipelines == 0
    else:  # only what is complete
        complete = {key: row for key, row in before["stages"].items() if row["state"] == "complete"}
        assert after["stages"] == complete
        assert after["suites"] == before["suites"]
        assert done.pipelines == len(complete) + 1
    assert findings(toy) == []
    assert reindex(toy.folder / ".looplab/ledger.db", toy.folder).pipelines == 0


def test_a_suite_and_its_datasets_are_recorded(toy: Any) -> None:
    run_suite(toy, "a", "b")
    assert kinds(toy)[0] == "suite began"
    assert kinds(toy)[-1] == "suite ended"
    (suite,) = rows(toy)["suites"].values()
    assert (suite["id"], suite["state"], json.loads(suite["jobs"])) == (
        "s",
        "complete",
        {"a": "complete", "b": "complete"},
    )
    assert len(latest_stages(rows(toy))) == 2
    run_suite(toy, "a", "b")
    assert len(rows(toy)["suites"]) == 1
    assert findings(toy) == []


def test_a_case_is_recorded(toy: Any) -> None:
    lab_file = json.loads((toy.folder / "lab.yaml").read_text())
    case = {"command": ["{python}", "-S", "-c", "open(r'{run_dir}/cases/{tag}.md', 'w')"], "defaults": {"tag": "one"}}
    (toy.folder / "lab.yaml").write_text(json.dumps({**lab_file, "case": case}))
    toy("mine")
    lab = load_lab(toy.folder)
    plan = make_plan(lab, lab.study(None), json.loads((toy.folder / "config.json").read_text()), "config.json", (), ())
    with open_record(lab, "steer", toy.said.append) as record:
        run_case(plan, choose_run(plan, None), {}, record=record)
    (row,) = rows(toy)["cases"].values()
    assert (row["tag"], row["exit_code"], json.loads(row["files"])) == ("one", 0, ["cases/one.md"])
    assert findings(toy) == []


def test_what_began_and_does_not_run_is_shown_as_unfinished(toy: Any) -> None:
    toy("mine")
    with opened(toy) as ledger:
        begun = {"stage": "select", "attempt": 1, "state": "running", "fingerprint": "f", "began": 1e12, "why": "x"}
        PipelineLedger(ledger, toy.folder, "steer").stage(toy.runs[0].path, begun)
        runs, suites = pipelines_of(ledger, toy.folder)
        assert pipelines_of(ledger, toy.folder, "other") == ([], [])
    assert [(row["stage"], row["state"]) for row in runs[0]["stages"]] == [
        ("mine", "complete"),
        ("select", "unfinished"),
    ]
    assert suites == []


def test_secrets_are_not_recorded(toy: Any) -> None:
    token = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"
    with opened(toy) as ledger:
        record = {
            "stage": "mine",
            "attempt": 1,
            "state": "ended",
            "fingerprint": "f",
            "began": 1.0,
            "why": f"no {token}",
        }
        PipelineLedger(ledger, toy.folder, "steer").stage(toy.folder / "outputs/x", record)
        assert token not in json.dumps([event.data for event in ledger.events()])
        assert [row["why"] for row in read_rows(ledger)["stages"].values()] == ["no ***"]
        assert not PipelineLedger(ledger, toy.folder, "steer").stage(toy.folder / "outputs/x", record), "it is known"


def test_an_engine_and_a_pipeline_may_write_at_the_same_time(toy: Any) -> None:
    toy("mine")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ledger = Ledger(toy.folder / ".looplab/ledger.db")
            for n in range(200):
                with ledger.write():
                    ledger.append_event("heartbeat", "other", None, {"n": n})
            status = 0
        finally:
            os._exit(status)
    for _ in range(3):
        toy("mine", "select", force=True)
    assert os.waitpid(pid, 0)[1] == 0
    assert kinds(toy).count("heartbeat") == 200
    assert kinds(toy).count("stage ended") == 7
    assert findings(toy) == []


def test_a_ledger_of_an_earlier_version_gets_the_tables(toy: Any) -> None:
    unrecorded(toy, "mine")
    with opened(toy) as ledger:
        with ledger.write():
            ledger.record(
                catalogue.VersionBegunEvent(attempt=1, branch="looplab/v2", base="b", onto="main"), "iterate", "v2"
            )
        for table in ("stages", "suites", "cases", "versions"):
            ledger.execute(f"DROP TABLE {table}")
        ledger.execute("DROP INDEX runs_retried")
        for column in ("attempt", "host", "job", "lost_s"):
            ledger.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        ledger.execute("PRAGMA user_version=4")
    with opened(toy) as ledger:
        assert ledger.rows("PRAGMA user_version")[0][0] == VERSION
        assert [tuple(row)[:4] for row in ledger.rows("SELECT * FROM versions")] == [("iterate", 2, 1, "begun")]
    assert toy("mine") == {"mine": "skipped"}
    assert [row["state"] for row in rows(toy)["stages"].values()] == ["complete"]
    assert findings(toy) == []
