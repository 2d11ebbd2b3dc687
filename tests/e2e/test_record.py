"""verify, anchor and reindex: the record is whole, or it is said where not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing

import pytest
from tests.e2e.conftest import TRAINER

from looplab.ledger.ledger import GENESIS, Ledger, link


@pytest.fixture(scope="module")
def original(make_shared_lab):
    lab = make_shared_lab("lab")
    written = 'os.path.join(run_dir, "record", "process.json")'  # not for a run that is over within milliseconds
    wait = f"wait_for(lambda: os.path.exists({written}))\n"
    lab.write("train.py", TRAINER.replace("seen = {", f"{wait}seen = {{", 1))
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


def forge(lab) -> int:
    """Improve the result of the first run, then compute all hashes again and the head beside the ledger: what whoever
    can write the lab can do. Returns the number of the changed event."""
    with closing(sqlite3.connect(lab.folder / ".looplab" / "ledger.db")) as db, db:
        changed, run = db.execute("SELECT seq, run FROM events WHERE kind='ended' ORDER BY seq LIMIT 1").fetchone()
        db.execute("UPDATE events SET data=json_set(data, '$.objective', 0.001) WHERE seq=?", (changed,))
        db.execute("UPDATE runs SET objective=0.001 WHERE id=?", (run,))
        head = GENESIS
        for row in db.execute("SELECT seq, at, kind, study, run, data FROM events ORDER BY seq").fetchall():
            head = link(head, *row)
            db.execute("UPDATE events SET hash=? WHERE seq=?", (head, row[0]))
    (lab.folder / ".looplab/journal.jsonl").unlink()
    shutil.rmtree(lab.folder / ".looplab/backups")
    ledger = Ledger(lab.folder / ".looplab" / "ledger.db", repair=True)
    ledger.complete_journal()
    ledger.close()
    lab.write(".looplab/head", f"{row[0]} {head}\n")
    book = lab.outputs() / "labbook.md"
    lines = [
        re.sub(r"= \S+", "= 0.001", line) if f"run {run} " in line else line for line in book.read_text().splitlines()
    ]
    book.write_text("\n".join(lines) + "\n")
    return int(changed)


def facts(lab) -> dict:
    """What `status` says of the study, but for what only engines know."""
    (study,) = lab("status", "--json").json()["studies"]
    study["used"].pop("wall")
    study.pop("configured")  # the chain alone has it
    for key in ("proposal", "pid", "host"):
        study["best"].pop(key)
    study["used"]["device_hours"] = round(study["used"]["device_hours"], 9)
    return study


# -- verify


@pytest.mark.slow
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
    assert "\nthe record is not whole: 1 finding\n" in out


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
    assert f"toy/{run}: it is in the chain, but not in the table" in done("verify", code=1).out


@pytest.mark.slow
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


def test_without_an_anchor_a_rewritten_chain_is_not_found_and_verify_says_that_it_could_not(done) -> None:
    forge(done)
    out = done("verify").out
    assert "no anchor: detects accidental damage and careless edits, not a deliberate rewrite" in out


@pytest.mark.slow
def test_a_copy_that_was_forgotten_or_kept_names_the_first_event_that_was_rewritten(done, tmp_path) -> None:
    for name in ("ledger.db", "journal.jsonl"):
        shutil.copy(done.folder / ".looplab" / name, tmp_path)
        assert "compared with" in done("verify", "--against", tmp_path / name).out
    shutil.copytree(done.folder / ".looplab/backups", tmp_path / "backups")
    changed = forge(done)
    for name in ("ledger.db", "journal.jsonl"):
        out = done("verify", "--against", tmp_path / name, code=1).out
        assert f"the last anchor before it that matches is event {changed - 1}, so it is the first that was" in out
    shutil.copytree(tmp_path / "backups", done.folder / ".looplab/backups")
    assert f"chain: event {changed}: it is another one in backups/ledger-" in done("verify", code=1).out
    (done.folder / ".looplab" / "journal.jsonl").write_bytes((tmp_path / "journal.jsonl").read_bytes())
    assert f"chain: event {changed}: it is another one in the journal" in done("verify", code=1).out


@pytest.mark.slow
def test_a_backup_of_another_chain_is_put_aside_by_reindex(done) -> None:
    (backup,) = (done.folder / ".looplab/backups").glob("*.db")
    content = backup.read_bytes()
    forge(done)
    backup.parent.mkdir()
    backup.write_bytes(content)
    (backup.parent / "ledger-9999999999.db").write_bytes(b"not a database")
    assert "ledger-9999999999.db cannot be read" in done("verify", code=1).out
    assert f"backups/{backup.name}.damaged-" in done("reindex").out
    assert not list(backup.parent.glob("*.db"))
    ((event,),) = done.ask("SELECT data FROM events WHERE kind='reindexed'")
    assert len(json.loads(event)["aside"]) == 2
    done("verify")


def test_the_record_is_whole_while_a_study_runs(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    lab("verify")
    lab.open_gate()
    engine.ended()
    lab("verify")


# -- anchors


def anchored(lab) -> list[tuple[int, dict]]:
    """The anchors that the chain mentions, with the numbers of their events."""
    rows = lab.ask("SELECT seq, data FROM events WHERE kind='anchored' ORDER BY seq")
    return [(seq, json.loads(data)) for seq, data in rows]


def git_init(lab) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    who = ("-c", "user.name=me", "-c", "user.email=me@here")
    for words in (("init", "--quiet"), ("add", "lab.yaml"), (*who, "commit", "--quiet", "-m", "start")):
        subprocess.run(["git", *words], cwd=lab.folder, env=lab.env, check=True)


@pytest.mark.slow
def test_a_rewritten_chain_is_caught_by_git_by_a_file_and_by_a_hash(lab, tmp_path, until) -> None:
    git_init(lab)
    file = tmp_path / "elsewhere.txt"
    lab.configure(anchor={"git": True, "file": str(file)})
    lab.base(wait="gate")
    engine = lab.start("run")
    until(lambda: anchored(lab), "the anchor of the start")
    lab.open_gate()
    engine.ended()
    told = lab("verify", "--json").json()
    assert told["anchors"]["compared"] == 2, "when the engine began and when it ended"
    assert told["anchors"]["up_to"] == anchored(lab)[-1][1]["seq"]
    out = lab("verify").out
    assert f"compared with 2 anchors up to event {told['anchors']['up_to']}; later events are protected only" in out
    head = lab("status", "--json").json()["record"]
    assert f"head {head['seq']}:{head['hash']}" in out
    lab("verify", "--against", "git", "--against", f"{head['seq']}:{head['hash'][:12]}")
    changed = forge(lab)
    (_, first), (_, last) = anchored(lab)
    assert first["seq"] < changed <= last["seq"]
    for words in ((), ("--against", "git"), ("--against", file)):
        out = lab("verify", *words, code=1).out
        assert f"event {last['seq']} is not the one that was anchored on {last['at']}" in out
        assert f"matches is event {first['seq']}, so the rewriting lies in {first['seq'] + 1}–{last['seq']}" in out
    assert "no event has this hash" in lab("verify", "--against", head["hash"], code=1).out
    assert lab("verify", "--against", "nonsense", code=2).err.count("anchor line") == 1


def test_the_anchor_of_a_promotion_does_not_wait_for_the_end(lab, until) -> None:
    lab.queue("train.lr@set=0.3", ["train.lr@set=0.9", "wait@set=gate"])
    lab.configure(anchor={"file": "anchors.txt"}, judge={"by": "ratchet"})
    engine = lab.start("run", "--concurrency", "1")
    lab.until_ended(2)
    best = until(lambda: lab.ask("SELECT max(seq) FROM events WHERE kind='best' AND run LIKE '0002%'")[0][0], "a best")
    until(lambda: any(anchor["seq"] >= best for _, anchor in anchored(lab)), "the anchor of a promotion")
    lab.open_gate()
    engine.ended()
    lab("verify")


@pytest.mark.slow
def test_no_target_stops_a_study(lab, tmp_path) -> None:
    lab.configure(anchor={"file": str(tmp_path), "git": True, "command": ["false"], "sign": "no-such-key"})
    out = lab("run").out
    for name in ("file", "git", "command false", "sign"):
        assert out.count(f"anchor: {name}") == 1
    assert lab.count(status="ok") == 1
    assert len(lab.ask("SELECT * FROM events WHERE kind='anchor failed'")) == 4
    assert "no anchor:" in lab("verify").out
    assert "command false: false failed with exit code 1" in lab("anchor", code=1).err


@pytest.mark.slow
def test_an_engine_killed_between_publishing_and_recording_leaves_a_whole_record(lab) -> None:
    lab.configure(anchor={"file": "anchors.txt", "command": ["sh", "-c", "kill -9 $PPID"]})
    lab.start("run").ended(-signal.SIGKILL)
    assert len((lab.folder / "anchors.txt").read_text().splitlines()) == 1
    assert anchored(lab) == []
    assert "compared with 1 anchor up to event" in lab("verify").out
    lab.configure(anchor={"file": "anchors.txt"})
    lab("resume")
    lines = (lab.folder / "anchors.txt").read_text().splitlines()
    assert len(anchored(lab)) == len(lines) - 1 >= 1
    assert f"compared with {len(lines)} anchors up to event" in lab("verify").out


@pytest.mark.slow
def test_anchor_prints_the_line_to_keep(done, tmp_path) -> None:
    first = done("anchor")
    assert "not published" in first.err
    told = done("anchor", "--json").json()
    assert told["line"].split()[:5] == first.out.split()[:5]
    assert anchored(done) == [], "printing publishes nothing"
    done("anchor", "--lab", done.folder, "--file", "kept.txt", cwd=tmp_path)
    done("verify", "--lab", done.folder, "--against", "kept.txt", cwd=tmp_path)
    done("verify", "--against", first.out.strip())
    forge(done)
    done("verify", "--against", first.out.strip(), code=1)


@pytest.mark.slow
def test_a_cut_off_tail_is_found_even_where_head_and_journal_were_cut_too(done, tmp_path) -> None:
    done("say", "one")
    done("say", "two")
    done("anchor", "--file", tmp_path / "kept.txt")
    tamper(done, "DELETE FROM events WHERE seq=(SELECT max(seq) FROM events)")
    tamper(done, "DELETE FROM events WHERE seq=(SELECT max(seq) FROM events)")
    (done.folder / ".looplab" / "head").unlink()
    assert "events were lost" in done("verify", code=1).out
    journal = done.folder / ".looplab/journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-2]))
    done("verify")
    assert "the end is cut off" in done("verify", "--against", tmp_path / "kept.txt", code=1).out


@pytest.mark.slow
def test_signed_anchors_are_checked(lab, tmp_path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    allowed = tmp_path / "allowed"
    allowed.write_text(f"me@here {key.with_suffix('.pub').read_text()}")
    lab.configure(anchor={"file": "anchors.txt", "sign": str(key)})
    lab("run")
    told = lab("verify", "--json", "--allowed-signers", allowed).json()["anchors"]
    assert told["compared"] == len(anchored(lab)) >= 1
    allowed.write_text("")
    assert "not signed by an allowed signer" in lab("verify", "--allowed-signers", allowed, code=1).out


def test_a_mistake_in_the_anchor_of_the_lab_file_is_named_with_its_line(lab) -> None:
    lab.configure(anchor={"gti": True})
    err = lab("check", code=2).err
    assert f"lab.yaml:{lab.line('anchor')}" in err
    assert "unknown key 'anchor.gti', did you mean 'git'?" in err


@pytest.mark.slow
def test_the_reports_show_the_head_to_keep(done) -> None:
    done("report")
    head = done("status", "--json").json()["record"]
    for name in ("report.md", "report.html"):
        assert f"{head['seq']}:{head['hash']}" in (done.outputs() / name).read_text()


# -- reindex


@pytest.mark.slow
def test_a_deleted_ledger_is_rebuilt_from_the_folders(done) -> None:
    before = facts(done)
    for path in (done.folder / ".looplab").glob("ledger.db*"):
        path.unlink()
    assert "study toy: 3 runs rebuilt from folders" in done("reindex").out
    assert facts(done) == before
    assert "the record is whole" in done("verify").out


@pytest.mark.slow
def test_a_ledger_of_garbage_is_put_aside_and_rebuilt(done) -> None:
    before = facts(done)
    garbage = b"this is no database" * 1000
    done.write(".looplab/ledger.db", garbage)
    assert "looplab reindex" in done("status", code=1).err
    assert "moved aside" in done("reindex").out
    (aside,) = (done.folder / ".looplab").glob("ledger.db.damaged-*")
    assert aside.read_bytes() == garbage
    assert facts(done) == before


@pytest.mark.slow
def test_reindex_of_a_whole_ledger_changes_nothing(done) -> None:
    before = facts(done)
    done("reindex")
    assert facts(done) == before
    done("verify")


@pytest.mark.slow
def test_show_is_the_same_after_a_reindex(done) -> None:
    before = done("show", "2").out
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex")
    assert done("show", "2").out == before


@pytest.mark.slow
def test_after_a_reindex_the_study_goes_on_with_the_next_number(done) -> None:
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex", "--json")
    done("propose", "--change", "train.lr@set=0.25")
    done.configure(proposers=[])
    done("run")
    assert [run["n"] for run in done.all("run.json")] == [1, 2, 3, 4]
    assert done.all("run.json")[3]["parent"] == done.runs()[1].name


@pytest.mark.slow
def test_after_a_reindex_what_the_queue_had_given_is_not_run_again(done) -> None:
    (done.folder / ".looplab" / "ledger.db").unlink()
    done("reindex")
    done("run")
    assert len(done.runs()) == 3


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_reindex_records_what_it_rebuilt_and_what_was_lost(done) -> None:
    gone = done.runs()[1]
    shutil.rmtree(gone)
    out = done("reindex").out
    assert f"1 run without a folder, lost: {gone.name}" in out
    data = json.loads(done.ask("SELECT data FROM events WHERE kind='reindexed'")[0][0])
    assert (data["runs"], data["recovered"], data["gone"]) == ({"toy": 2}, 0, {"toy": [gone.name]})
    out = done("verify").out
    assert "1 run(s) were lost" in out


@pytest.mark.slow
def test_a_ledger_without_its_journal_begins_a_new_chain_and_says_so(done) -> None:
    shutil.rmtree(done.folder / ".looplab")
    assert "3 run folders but no runs in the ledger; `looplab reindex`" in done("status").out
    assert "5 runs and proposals not in the chain" in done("reindex").out
    out = done("verify").out
    assert "5 entries were restored from folders" in out
    assert "the chain is new: nothing before it is proven" in out
    # From now on what was found is covered.
    (done.runs()[0] / "record/summary.json").write_text("{}")
    assert "summary.json: the file is not what it was" in done("verify", code=1).out


@pytest.mark.slow
def test_the_chain_is_brought_back_from_the_journal(done) -> None:
    shutil.rmtree(done.folder / ".looplab/backups")
    events = done.ask("SELECT seq, hash FROM events ORDER BY seq")
    for path in (done.folder / ".looplab").glob("ledger.db*"):
        path.unlink()
    for command in ("status", "run", "resume", "verify"):
        answer = done(command, code=1)
        assert "reindex" in answer.out + answer.err
        assert not (done.folder / ".looplab/ledger.db").exists()
    assert f"{len(events)} events were recovered from the journal" in done("reindex").out
    assert done.ask(f"SELECT seq, hash FROM events WHERE seq <= {len(events)} ORDER BY seq") == events
    assert "the record is whole" in done("verify").out
    (done.runs()[0] / "record/summary.json").write_text("{}")
    done("verify", code=1)


@pytest.mark.slow
def test_a_backup_is_taken_for_a_ledger_that_is_gone_and_completed_from_the_journal(done) -> None:
    done("say", "after the backup")
    before = done("status", "--json").json()["studies"][0]
    for path in (done.folder / ".looplab").glob("ledger.db*"):
        path.unlink()
    out = done("reindex").out
    assert "the ledger was restored from the backup" in out
    assert "2 events were recovered from the journal" in out
    after = done("status", "--json").json()["studies"][0]
    assert {**after, "head": None} == {**before, "head": None}
    done("verify")


def damage(lab, name: str, content: bytes = b"\0" * 100) -> None:
    """Overwrite the beginning of a file beside the ledger."""
    path = lab.folder / ".looplab" / name
    path.write_bytes(content + path.read_bytes()[len(content) :])


@pytest.mark.slow
def test_an_event_that_is_damaged_in_one_copy_is_taken_from_another(done) -> None:
    events = done.ask("SELECT seq, hash FROM events ORDER BY seq")
    before = facts(done)
    lines = (done.folder / ".looplab/journal.jsonl").read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b'"', b"'", 3)
    done.write(".looplab/journal.jsonl", b"".join(lines).decode())
    damage(done, "ledger.db")
    assert "lost" not in done("reindex").out
    assert done.ask(f"SELECT seq, hash FROM events WHERE seq <= {len(events)} ORDER BY seq") == events
    assert facts(done) == before
    done("verify")


@pytest.mark.slow
def test_runs_whose_plans_were_lost_are_not_run_again_and_the_best_one_stays(done) -> None:
    best = facts(done)["best"]["id"]
    shutil.rmtree(done.folder / ".looplab/backups")
    text = (done.folder / ".looplab/journal.jsonl").read_text()
    kept = text[: text.index('"kind":"planned"')]
    done.write(".looplab/journal.jsonl", kept[: kept.rindex("\n") + 1])
    damage(done, "ledger.db")
    assert "are lost" in done("reindex").out
    assert facts(done)["best"]["id"] == best
    assert done.ask("SELECT count(*) FROM proposals WHERE status='waiting'") == [(0,)]
    done("resume")
    assert len(done.runs()) == 3
    assert facts(done)["best"]["id"] == best
    done("verify")


ODD_FILES = {
    "head with a number beyond 64 bits": ("head", "9" * 30 + " " + "a" * 64),
    "head that says nothing": ("head", "\ufffd"),
    "head that is a pipe": ("head", "pipe"),
    "head that is a folder": ("head", "folder"),
    "journal that is a pipe": ("journal.jsonl", "pipe"),
    "journal that is a folder": ("journal.jsonl", "folder"),
    "journal with a number beyond 64 bits": (
        "journal.jsonl",
        '{"seq":99999999999999999999,"at":1.0,"kind":"x","study":"","run":null,"hash":"a","data":{}}\n',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_FILES)
def test_whatever_is_beside_the_ledger_is_named_and_repaired(done, name: str) -> None:
    file, content = ODD_FILES[name]
    path = done.folder / ".looplab" / file
    if content in ("pipe", "folder"):
        path.unlink()
        os.mkfifo(path) if content == "pipe" else path.mkdir()
    else:
        path.write_text(content if file == "head" else path.read_text() + content)
    assert file in done("verify", code=1).out
    done("resume")
    done("reindex")
    done("verify")
    assert len(done.runs()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("table", ["sessions", "meta", "events", "column of runs"])
def test_a_table_or_column_that_is_gone_is_named_and_made_again(done, table: str) -> None:
    before = facts(done)
    events = done.ask("SELECT seq, hash FROM events ORDER BY seq")
    home = done.folder / ".looplab"
    for path in (home / "ledger.db", *(home / "backups").iterdir()):  # an engine may have made a backup of the damage
        with closing(sqlite3.connect(path)) as db, db:
            if table == "column of runs":
                db.execute("ALTER TABLE runs DROP COLUMN warm")
            else:
                db.execute(f"DROP TABLE {table}")
    assert ("no such table: events" if table == "events" else "columns are missing") in done("verify", code=1).out
    done("reindex")
    assert done.ask(f"SELECT seq, hash FROM events WHERE seq <= {len(events)} ORDER BY seq") == events
    assert facts(done) == before
    done("verify")
    done("resume")
    assert len(done.runs()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("command", ["reindex", "restore"])
def test_no_event_of_a_damaged_database_is_lost_while_it_can_be_read(done, command: str) -> None:
    """Not even without a journal, if only an index is damaged."""
    done("say", "after the backup")
    events = done.ask("SELECT seq, hash FROM events ORDER BY seq")
    path = done.folder / ".looplab/ledger.db"
    with closing(sqlite3.connect(path)) as db:
        ((page,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name='runs_point'").fetchall()
        ((size,),) = db.execute("PRAGMA page_size").fetchall()
    content = bytearray(path.read_bytes())
    content[(page - 1) * size + 3 : (page - 1) * size + 5] = b"\0\0"  # the index has no entries
    path.write_bytes(content)
    (done.folder / ".looplab/journal.jsonl").unlink()
    assert "missing from index runs_point" in done("verify", code=1).out
    assert "lost" not in done(command).out
    assert done.ask(f"SELECT seq, hash FROM events WHERE seq <= {len(events)} ORDER BY seq") == events
    done("verify")


@pytest.mark.slow
def test_a_flipped_bit_in_the_journal_is_found_at_its_line_and_mended(done) -> None:
    path = done.folder / ".looplab/journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if '"kind":"planned"' in line)
    path.write_text("".join([*lines[:number], lines[number].replace('"round":1', '"round":2'), *lines[number + 1 :]]))
    assert f"journal.jsonl: line {number + 1} is damaged" in done("verify", code=1).out
    done("reindex")
    assert path.read_text().splitlines(keepends=True)[: len(lines)] == lines
    done("verify")


@pytest.mark.slow
def test_a_gap_in_the_journal_is_found_and_closed(done) -> None:
    path = done.folder / ".looplab/journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[8:]))
    assert "line 6 is event 9, but event 6 comes next" in done("verify", code=1).out
    done("reindex")
    done("verify")


@pytest.mark.slow
@pytest.mark.parametrize(
    "about",
    [
        "no JSON",
        '{"n": "x", "round": [1], "created": {}, "devices": 5, "reason": 7, "source": ["a"], "seed": 1.5}',
        '{"n": 1e300, "round": 1000000000000000000000, "proposer": null, "slot": {}}',
    ],
)
def test_reindex_takes_in_every_run_folder_whatever_it_says(done, about: str) -> None:
    (done.runs()[1] / "record/run.json").write_text(about)
    (done.runs()[1] / "record/override.json").write_text('{"edits": 3}')
    (done.runs()[2] / "record/summary.json").write_text('{"objective": [], "verdict": 1, "notes": 2, "metrics": []}')
    unnamed = os.fsencode(done.outputs()) + b"/0009-\xff/record"
    os.makedirs(unnamed)
    with open(unnamed + b"/run.json", "w") as file:
        file.write('{"n": 9}')
    shutil.rmtree(done.folder / ".looplab")
    done("reindex")
    assert done.ask("SELECT count(*), count(DISTINCT n) FROM runs") == [(3, 3)]
    done("verify")
    done("status")
    assert "running" in done("show", "3").out  # what it measured is not known; the next engine reads it again


def test_restore_puts_the_ledger_aside_and_loses_nothing(done) -> None:
    done("say", "after the backup")
    tamper(done, "UPDATE runs SET objective=1e-9 WHERE n=1")
    assert "moved aside" in done("restore").out
    assert done.ask("SELECT count(*) FROM events WHERE kind='said'") == [(1,)]
    done("verify")
    (done.folder / ".looplab/backups").rename(done.folder / "elsewhere")
    assert "there is no intact backup" in done("restore", code=2).err
    (backup, *_) = (done.folder / "elsewhere").iterdir()
    assert f"the ledger was restored from the backup {backup.name}" in done("restore", backup).out
    done("verify")


@pytest.mark.slow
def test_an_engine_refuses_a_ledger_that_has_lost_its_end_and_nothing_runs_twice(done) -> None:
    """An old copy of the ledger was put back: without a check, runs would get numbers that were given already."""
    old = done.folder / "old.db"
    (backup, *_) = sorted((done.folder / ".looplab/backups").iterdir())
    shutil.copy(backup, old)
    done("propose", "--change", "train.lr@set=0.25")
    done("run")
    done("propose", "--change", "train.lr@set=0.26")
    runs = [run.name for run in done.runs()]
    shutil.copy(old, done.folder / ".looplab/ledger.db")
    for _ in range(2):
        assert "looplab reindex" in done("resume", code=1).err
        assert "reindex" in done("say", "hello", code=1).err
        assert [run.name for run in done.runs()] == runs
        assert "the end is cut off" in done("verify", code=1).out
    for name in ("journal.jsonl", "head"):  # without these the run folders say it
        shutil.move(done.folder / ".looplab" / name, done.folder / name)
    assert "the ledger does not know 1 run folder(s)" in done("run", code=1).err
    for name in ("journal.jsonl", "head"):
        shutil.move(done.folder / name, done.folder / ".looplab" / name)
    done("reindex")
    done("verify")
    done("run")
    assert [run["n"] for run in done.all("run.json")] == [1, 2, 3, 4, 5]
    done("verify")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE runs SET reason='another' WHERE n=2",
        "UPDATE runs SET seed=7 WHERE n=2",
        "UPDATE runs SET role='base' WHERE n=2",
        "UPDATE runs SET point='0' WHERE n=2",
        "UPDATE runs SET started=started-3600 WHERE n=2",
        "UPDATE runs SET status='lost' WHERE n=2",
        "UPDATE runs SET n=n+100 WHERE n=2",
        "UPDATE runs SET job='123' WHERE n=2",
        "UPDATE runs SET lost_s=3600 WHERE n=2",
        "UPDATE proposals SET hypothesis='another' WHERE id=1",
        "UPDATE proposals SET status='waiting' WHERE id=1",
        "INSERT INTO verdicts VALUES ('toy', (SELECT id FROM runs LIMIT 1), 0, 'keep', '{}')",
        "UPDATE rounds SET closed=closed-3600 WHERE n=1",
        "UPDATE sessions SET began=began-3600",
        "DELETE FROM sessions",
        "UPDATE studies SET goal='max'",
        "INSERT INTO commands (study, at, what, data) VALUES ('toy', 0, 'stop', '{}')",
        "UPDATE events SET data='{broken' WHERE seq=5",
        "UPDATE runs SET n='text' WHERE n=2",
        "UPDATE proposals SET edits='[broken' WHERE id=1",
        "DELETE FROM configs WHERE hash=(SELECT config_hash FROM runs WHERE n=2)",
        "UPDATE studies SET judge_state='{}'",
    ],
)
def test_whatever_the_tables_show_is_compared(done, sql: str) -> None:
    tamper(done, sql)
    assert "the record is not whole" in done("verify", code=1).out
    done("reindex")
    done("verify")


@pytest.mark.slow
@pytest.mark.parametrize("data", ["5", '{"message": "another"}', "'"])
def test_a_command_is_what_the_chain_says_and_is_obeyed_once(done, data: str) -> None:
    done("veto", "3", "--reason", "a mistake")
    tamper(done, "UPDATE commands SET done=1.5, data=?", data)
    assert "table: command" in done("verify", code=1).out
    done("reindex")
    done("verify")
    assert done.ask("SELECT done FROM commands") == [(1.5,)]


@pytest.mark.parametrize("name", ["exit.json", "process.json", "metrics.parquet", "run.json", "train.log"])
def test_whatever_file_is_recorded_is_compared(done, name: str) -> None:
    path = done.runs()[1] / "record" / name
    path.write_bytes(path.read_bytes() + b" ")
    assert f"record/{name}: the file is not what it was" in done("verify", code=1).out


def test_measurements_that_appear_after_the_end_are_found_and_not_read(done) -> None:
    (run,) = (run for run in done.runs() if run.name.startswith("0002"))
    assert not (run / "trainer_summary.json").exists()
    (run / "trainer_summary.json").write_text('{"loss": 0.0001}')
    found = done("verify", code=1).out
    assert f"{run.name}/trainer_summary.json: the file appeared after the run had ended" in found
    assert "1 finding" in found
    done.configure(measure={"sources": ["trainer_summary"]})
    assert "trainer_summary.json has changed since the run ended" in done("remeasure", code=None).out
    assert not done.ask("SELECT 1 FROM runs WHERE objective=0.0001")


def test_an_emptied_journal_and_a_damaged_head_are_found_and_what_writes_them_again_is_recorded(done) -> None:
    home = done.folder / ".looplab"
    (home / "journal.jsonl").write_text("")
    found = done("verify", code=1).out
    assert "journal.jsonl: events 1 to" in found
    assert "were removed from it" in found
    done("say", "hello")
    assert "the journal was rewritten at event" in done("verify").out
    (home / "head").write_text("junk")
    assert "head: it does not say where the chain ended" in done("verify", code=1).out
    done("say", "hello")
    assert "head was rewritten at event" in done("verify").out
    kinds = [kind for (kind,) in done.ask("SELECT kind FROM events WHERE kind LIKE '%rewritten' ORDER BY seq")]
    assert kinds == ["journal rewritten", "head rewritten"]


def test_backups_that_are_gone_are_noted(done) -> None:
    assert "no backup" not in done("verify").out
    shutil.rmtree(done.folder / ".looplab/backups")
    assert "backups has no backup of the ledger" in done("verify").out


def test_pointers_shared_files_and_the_lab_book_are_compared(done) -> None:
    out = done.outputs()
    runs = [run.name for run in done.runs()]
    bests = [run for (run,) in done.ask("SELECT run FROM events WHERE kind='best'")]
    other = next(run for run in runs if run not in bests)
    (out / "BEST").write_text(f"{other}\n")
    book = (out / "labbook.md").read_text()
    (out / "labbook.md").write_text(book.replace("loss = ", "loss = 0.000", 1) + "- somebody's own line\n")
    (shared, *_) = (out / "_shared").iterdir()
    shared.write_bytes(shared.read_bytes() + b" ")
    (out / "LATEST").write_text("9999-none\n")
    found = done("verify", code=1).out
    for words in ("toy/BEST: it names", "toy/LATEST: it names", "toy/labbook.md: the line of run", "_shared/"):
        assert words in found, found
    assert "4 findings" in found


# -- the rules of a study


@pytest.mark.slow
def test_a_change_of_the_rules_is_recorded_and_shown(done) -> None:
    (first,) = done("status", "--json").json()["studies"][0]["configured"]
    assert first["changes"] == ""
    done("resume")
    assert len(done("status", "--json").json()["studies"][0]["configured"]) == 1  # nothing changed
    knobs = {**done.study["knobs"], "train.lr": {"type": "float", "low": 0.001, "high": 0.5, "log": True}}
    done.configure(knobs=knobs, judge={"alpha": 0.4, "baseline_seeds": 2})
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


def test_rules_that_changed_before_a_reproduction_are_recorded(done) -> None:
    (run,) = done.ask("SELECT id FROM runs WHERE n=1")[0]
    done("reproduce", run)
    assert len(done("status", "--json").json()["studies"][0]["configured"]) == 1  # nothing changed
    done.configure(judge={"alpha": 0.4, "baseline_seeds": 2})
    done("reproduce", run)
    first, second = done("status", "--json").json()["studies"][0]["configured"]
    assert second["changes"].startswith("judge null → ")
    verdicts = [json.loads(data) for (data,) in done.ask("SELECT data FROM events WHERE kind='judged'")]
    assert {verdict["evidence"]["configuration"] for verdict in verdicts} == {second["hash"]} != {first["hash"]}
    done("verify")


def test_a_secret_of_the_lab_file_is_not_in_the_recorded_rules(lab) -> None:
    lab.configure(launch={**lab.study["launch"], "env": {"MY_API_KEY": "hunter2hunter2"}})
    lab("run")
    assert "hunter2" not in lab.ask("SELECT data FROM events WHERE kind='study configured'")[0][0]
