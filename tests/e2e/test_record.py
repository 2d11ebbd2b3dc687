"""verify and reindex: the record is whole, or it is said where not."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing

import pytest


@pytest.fixture(scope="module")
def original(make_shared_lab):
    lab = make_shared_lab("lab")
    lab.queue("train.lr@set=0.3", "train.lr@set=0.9")
    lab("run", "--concurrency", "1")
    return lab


@pytest.fixture
def done(lab, original):
    """A lab in which three runs have ended, for each test a copy to spoil."""
    shutil.copytree(original.folder, lab.folder, dirs_exist_ok=True)
    lab.study = dict(original.study)
    return lab


def tamper(lab, sql: str, *parameters: object) -> None:
    with closing(sqlite3.connect(lab.folder / ".looplab" / "ledger.db")) as db, db:
        assert db.execute(sql, parameters).rowcount == 1


def facts(lab) -> dict:
    """What `status` says of the study, but for what only engines know."""
    (study,) = lab("status", "--json").json()["studies"]
    study["used"].pop("wall")
    study.pop("configured")  # the chain alone has it
    for key in ("proposal", "pid"):
        study["best"].pop(key)
    study["used"]["device_hours"] = round(study["used"]["device_hours"], 9)
    return study


# -- verify


def test_a_record_that_nobody_touched_is_whole(done) -> None:
    out = done("verify").out
    assert "the record is whole" in out
    told = done("verify", "--json").json()
    assert told["whole"] is True
    assert told["files"] >= 3 * 7
    assert told["head"][:16] in out


def test_a_changed_event_is_found(done) -> None:
    seq, run = done.ask("SELECT seq, run FROM events WHERE kind='ended' ORDER BY seq LIMIT 1")[0]
    tamper(done, "UPDATE events SET data=replace(data, '\"ok\"', '\"failed\"') WHERE seq=?", seq)
    out = done("verify", code=1).out
    assert f"chain: event {seq}: event {seq} (ended of run {run}) does not match its hash" in out


def test_a_deleted_event_is_found(done) -> None:
    seq = done.ask("SELECT seq FROM events WHERE kind='launched' LIMIT 1")[0][0]
    tamper(done, "DELETE FROM events WHERE seq=?", seq)
    assert f"event {seq} is missing" in done("verify", code=1).out


def test_a_changed_file_of_a_run_is_found(done) -> None:
    run = done.runs()[1]
    (run / "record/summary.json").write_text((run / "record/summary.json").read_text().replace("0.33", "0.11"))
    out = done("verify", code=1).out
    assert f"file: toy/{run.name}/record/summary.json: the file is not what it was" in out
    assert out.endswith("the record is not whole: 1 finding(s)\n")


def test_a_deleted_file_and_a_deleted_run_are_found(done) -> None:
    first, second, _ = done.runs()
    (first / "record/config.json").unlink()
    shutil.rmtree(second)
    findings = done("verify", "--json", code=1).json()["findings"]
    assert [(finding["what"], finding["where"]) for finding in findings] == [
        ("file", f"toy/{first.name}/record/config.json"),
        ("folder", f"toy/{second.name}"),
    ]


def test_a_changed_row_of_a_table_is_found(done) -> None:
    run = done.runs()[2].name
    tamper(done, "UPDATE runs SET objective=0.0001 WHERE id=?", run)
    assert f"table: toy/{run}: objective is 0.0001 in the table, another in the chain" in done("verify", code=1).out


def test_a_row_that_is_gone_is_found(done) -> None:
    run = done.runs()[0].name
    tamper(done, "DELETE FROM runs WHERE id=?", run)
    assert f"toy/{run}: the chain says that it ended, the table does not know it" in done("verify", code=1).out


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE studies SET best=(SELECT id FROM runs WHERE n=1)",
        "UPDATE runs SET parent='0001-aaaa' WHERE n=2",
        "UPDATE proposals SET edits='[]' WHERE id=1",
        "DELETE FROM events WHERE seq=(SELECT max(seq) FROM events)",
    ],
    ids=["best", "parent", "edits", "last event"],
)
@pytest.mark.parametrize("reindexed", ["no", "whole", "rebuilt"])
def test_other_changes_are_found(done, sql: str, reindexed: str) -> None:
    if reindexed == "rebuilt":
        (done.folder / ".looplab" / "ledger.db").unlink()
    if reindexed != "no":
        done("reindex")
        done("verify")
    tamper(done, sql)
    done("verify", code=1)


def test_the_record_is_whole_while_a_study_runs(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    lab("verify")
    lab.open_gate()
    engine.ended()
    lab("verify")


# -- reindex


def test_a_deleted_ledger_is_rebuilt_from_the_folders(done) -> None:
    before = facts(done)
    for path in (done.folder / ".looplab").glob("ledger.db*"):
        path.unlink()
    assert "study toy: 3 run(s) from their folders" in done("reindex").out
    assert facts(done) == before
    assert "the record is whole" in done("verify").out


def test_a_ledger_of_garbage_is_put_aside_and_rebuilt(done) -> None:
    before = facts(done)
    garbage = b"this is no database" * 1000
    done.write(".looplab/ledger.db", garbage)
    assert "looplab reindex" in done("status", code=2).err
    assert "put aside" in done("reindex").out
    (aside,) = (done.folder / ".looplab").glob("ledger.db.damaged-*")
    assert aside.read_bytes() == garbage
    assert facts(done) == before


def test_reindex_of_a_whole_ledger_changes_nothing(done) -> None:
    before = facts(done)
    done("reindex")
    assert facts(done) == before
    done("verify")


def test_show_is_the_same_after_a_reindex(done) -> None:
    before = done("show", "2").out
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex")
    assert done("show", "2").out == before


def test_after_a_reindex_the_study_goes_on_with_the_next_number(done) -> None:
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex", "--json")
    done("propose", "--change", "train.lr@set=0.25")
    done.configure(proposers=[])
    done("run")
    assert [run["n"] for run in done.all("run.json")] == [1, 2, 3, 4]
    assert done.all("run.json")[3]["parent"] == done.runs()[1].name


def test_after_a_reindex_what_the_queue_had_given_is_not_run_again(done) -> None:
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex")
    done("run")
    assert len(done.runs()) == 3


def test_what_is_recorded_after_a_reindex_is_compared(done) -> None:
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex")
    done("propose", "--change", "train.lr@set=0.25")
    done("run")
    done("verify")
    run = done.runs()[3].name
    for sql in ("UPDATE runs SET objective=1e-9 WHERE id=?", "UPDATE runs SET verdict='keep' WHERE id=?"):
        tamper(done, sql, run)
        assert f"toy/{run}" in done("verify", code=1).out


def test_a_reindex_records_what_it_rebuilt_and_what_was_lost(done) -> None:
    gone = done.runs()[1]
    shutil.rmtree(gone)
    out = done("reindex").out
    assert f"1 run(s) have no folder any more and are lost: {gone.name}" in out
    data = json.loads(done.ask("SELECT data FROM events WHERE kind='reindexed'")[0][0])
    assert data == {"runs": {"toy": 2}, "recovered": 0, "lost": {"toy": [gone.name]}}
    out = done("verify").out
    assert "1 run(s) were lost" in out


def test_a_rebuilt_ledger_says_that_its_chain_is_new(done) -> None:
    (done.folder / ".looplab" / "ledger.db").unlink()
    assert "5 run(s) and proposals that the chain did not know" in done("reindex").out
    assert "5 entries were taken from folders" in done("verify").out


# -- the rules of a study


def test_a_change_of_the_rules_is_recorded_and_shown(done) -> None:
    (first,) = done("status", "--json").json()["studies"][0]["configured"]
    assert first["changes"] == ""
    done("resume")
    assert len(done("status", "--json").json()["studies"][0]["configured"]) == 1  # nothing changed
    knobs = {**done.study["knobs"], "train.lr": {"type": "float", "low": 0.001, "high": 0.5, "log": True}}
    done.configure(knobs=knobs, judge={"alpha": 0.4, "floor": 2})
    done("propose", "--change", "train.lr@set=0.25")
    done("run", "--runs", "6")
    configured = done("status", "--json").json()["studies"][0]["configured"]
    assert len(configured) == 2
    for shown in (done("status").out, done("verify").out, (done.outputs() / "report.md").read_text()):
        assert "knobs.train\\.lr.high 1 → 0.5" in shown.replace("\\\\", "\\"), shown
        assert "judge" in shown
    verdicts = [json.loads(data) for (data,) in done.ask("SELECT data FROM events WHERE kind='judged'")]
    assert verdicts
    assert {verdict["evidence"]["configuration"] for verdict in verdicts} == {configured[1]["hash"]}


def test_a_secret_of_the_lab_file_is_not_in_the_recorded_rules(lab) -> None:
    lab.configure(launch={**lab.study["launch"], "env": {"MY_API_KEY": "hunter2hunter2"}})
    lab("run")
    assert "hunter2" not in lab.ask("SELECT data FROM events WHERE kind='study configured'")[0][0]
