from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from looplab.config.files import dump_json, hash_config
from looplab.errors import LabError
from looplab.ledger.audit import audit
from looplab.ledger.backup import back_up, backups, intact
from looplab.ledger.journal import Journal, Link
from looplab.ledger.ledger import DamagedError, Ledger, LedgerCopy
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.runs import folder

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
datas = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda k: k not in ("kind", "study", "run")), plain, max_size=3
)
events = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["s", "t"]), datas), min_size=1, max_size=12)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


def fill(ledger: Ledger, told: list[tuple[str, str, dict[str, object]]]) -> None:
    for kind, study, data in told:
        with ledger.write():
            ledger.append_event(kind, study, None, data)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events)
def test_what_is_recorded_can_be_read_and_the_chain_holds(tmp_path_factory: pytest.TempPathFactory, told: list) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("l") / "ledger.db")
    fill(ledger, told)
    assert [(e.kind, e.study, e.data) for e in ledger.events()] == told
    assert ledger.first_broken_link() is None
    ledger.close()


@settings(max_examples=60, deadline=None)
@given(events, st.data())
def test_any_change_of_the_past_is_found_at_its_place(
    tmp_path_factory: pytest.TempPathFactory, told: list, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("l") / "ledger.db"
    ledger = Ledger(path)
    fill(ledger, told)
    ledger.close()
    seq = data.draw(st.integers(1, len(told)))
    change = data.draw(st.sampled_from(["data", "kind", "at", "study", "hash", "swap", "delete"]))
    db = sqlite3.connect(path)
    if change == "delete":
        if seq == len(told):  # the end cut off is seen by the files of the runs, not by the chain
            return
        db.execute("DELETE FROM events WHERE seq=?", (seq,))
    elif change == "swap":
        other = seq % len(told) + 1
        rows = [
            db.execute("SELECT kind, study, data, at FROM events WHERE seq=?", (n,)).fetchone() for n in (seq, other)
        ]
        if rows[0] == rows[1]:
            return
        db.execute("UPDATE events SET kind=?, study=?, data=?, at=? WHERE seq=?", (*rows[1], seq))
        db.execute("UPDATE events SET kind=?, study=?, data=?, at=? WHERE seq=?", (*rows[0], other))
        seq = min(seq, other)
    elif change == "at":
        db.execute("UPDATE events SET at=at+1 WHERE seq=?", (seq,))
    else:
        db.execute(f"UPDATE events SET {change}={change} || 'x' WHERE seq=?", (seq,))
    db.commit()
    db.close()
    broken = Ledger(path).first_broken_link()
    assert broken is not None
    assert broken.seq == seq


def test_a_failed_transaction_leaves_nothing(ledger: Ledger) -> None:
    def fail() -> None:
        with ledger.write():
            ledger.append_event("b", "s", None, {})
            raise RuntimeError

    fill(ledger, [("a", "s", {})])
    with pytest.raises(RuntimeError):
        fail()
    fill(ledger, [("c", "s", {})])
    assert [e.kind for e in ledger.events()] == ["a", "c"]
    assert ledger.first_broken_link() is None


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    code = (
        "import sys; from pathlib import Path; from looplab.ledger.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "for i in range(100):\n"
        "    with ledger.write():\n"
        "        ledger.append_event('x', sys.argv[2], None, {'i': i}); ledger.append_event('y', sys.argv[2], None, {'i': i})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name], env=os.environ) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    ledger = Ledger(path)
    assert ledger.head()[0] == 600
    assert ledger.first_broken_link() is None
    for name in "abc":
        assert [e.data["i"] for e in ledger.events(name) if e.kind == "x"] == list(range(100))


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(LabError, match="version 99"):
        Ledger(path)


def test_garbage_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(LabError, match="reindex"):
        Ledger(path)


def plan(study: StudyLedger, **changes: object) -> str:
    facts: dict = {
        "round": 1, "proposal": None, "proposer": "queue", "parent": None, "base": "b.json", "reason": "",
        "config_hash": hash_config({}), "devices": 2, "plan": RunPlan({}),
    }  # fmt: skip
    with study.ledger.write():
        return study.plan(**{**facts, **changes}).id


def test_a_source_is_taken_only_once(ledger: Ledger) -> None:
    study = StudyLedger(ledger, "s")
    study.open(None, "min")
    assert study.propose("queue", ["x@set=1"], "why", source="f:1") == 1
    assert study.propose("queue", ["x@set=1"], "why", source="f:1") is None
    assert study.count_waiting() == 1


def test_usage_is_a_total_over_all_engines(ledger: Ledger) -> None:
    study = StudyLedger(ledger, "s")
    study.open(None, "min")
    for began, seen, ended in ((0, 100, 100), (1000, 1060, None)):
        ledger.execute(
            "INSERT INTO sessions (study, host, pid, ticks, began, seen, ended) VALUES ('s','h',1,1,?,?,?)",
            (began, seen, ended),
        )
    with ledger.write():
        study.begin_round()
    run = plan(study)
    with ledger.write():
        study.ended(run, status="ok", code=0, signal=None, started=0.0, ended=1800.0, objective=None, files={})
    plan(study)  # not started: it has used nothing
    usage = study.usage()
    assert (usage.rounds, usage.runs, usage.wall, usage.device_hours) == (1, 2, 160.0, 1.0)


def test_totals_are_read_from_indexes_alone_and_agree_with_the_rows(ledger: Ledger) -> None:
    study, other = StudyLedger(ledger, "s"), StudyLedger(ledger, "t")
    with ledger.write():
        for one in (study, other):
            one.open(None, "min")
        for i, status in enumerate(("ok", "ok", "failed", "lost", "", "running")):
            for one in (study, other)[: 1 + i % 2]:
                run = plan(one, devices=2)
                if status == "running":
                    one.launched(run, "slot0", {})
                elif status:
                    one.ended(run, status=status, code=0, signal=None, started=100.0 if status != "lost" else None,
                              ended=160.0 + i, objective=None, files={})  # fmt: skip
        study.record_import("old", n=9, base="b", reason="", config={}, point="p", seed=None, status="ok",
                            objective=1.0, files={}, source={})  # fmt: skip
    assert study.counts() == {"ok": 2, "failed": 1, "lost": 1, "planned": 1, "running": 1, "imported": 1}
    assert other.counts() == {"ok": 1, "lost": 1, "running": 1}
    assert study.usage().device_hours == pytest.approx(2 * (60 + 61 + 62) / 3600)
    assert study.usage(study.totals()) == study.usage()
    queries: list[str] = []
    ledger._db.set_trace_callback(queries.append)
    study.totals()
    ledger._db.set_trace_callback(None)
    steps = [row["detail"] for row in ledger.rows(f"EXPLAIN QUERY PLAN {queries[-1]}")]
    read = [step for step in steps if step.startswith(("SEARCH", "SCAN"))]
    assert ["runs_totals" in step or "runs_open" in step for step in read] == [True, True]
    assert any("COVERING INDEX runs_totals" in step for step in read)


def test_runs_are_found_by_their_state(ledger: Ledger) -> None:
    study = StudyLedger(ledger, "s")
    study.open(None, "min")
    names = [plan(study) for _ in range(5)]
    with ledger.write():
        for name in (names[3], names[1]):
            study.launched(name, "0", {})
        study.ended(names[0], status="ok", code=0, signal=None, started=0.0, ended=1.0, objective=None, files={})
    assert [run.id for run in study.runs(state="running")] == [names[1], names[3]]
    assert [run.id for run in study.runs(state="planned", limit=1)] == [names[4]]
    assert [run.id for run in study.runs(state="ended")] == [names[0]]
    assert [run.id for run in study.runs()] == names


def test_a_run_is_found_by_id_number_and_beginning(ledger: Ledger) -> None:
    study = StudyLedger(ledger, "s")
    study.open("m", "max")
    first, second = plan(study), plan(study)
    assert study.run(first).n == 1
    assert study.run("2").id == second
    assert study.run(second[:6]).id == second
    assert study.run("latest").id == second
    with pytest.raises(LabError, match="no run '77'"):
        study.run("77")


def test_the_latest_run_is_the_newest_that_has_started(ledger: Ledger) -> None:
    """Runs that are planned and wait for a slot have neither a folder nor a log; without others, it is one of them."""
    study = StudyLedger(ledger, "toy")
    study.open("loss", "min")
    with ledger.write():
        study.begin_round()
        first, second = plan(study), plan(study)
        assert study.run("LATEST").id == second
        study.ended(first, status="ok", code=0, signal=None, started=0.0, ended=1.0, objective=None, files={})
        assert study.run("latest").id == first


def test_a_new_ledger_can_be_opened_by_many_at_once(tmp_path: Path) -> None:
    for n in range(20):
        path, start = tmp_path / f"{n}/ledger.db", threading.Barrier(8)

        def open_one(path: Path = path, start: threading.Barrier = start) -> int:
            start.wait()
            ledger = Ledger(path)
            with ledger.write():
                ledger.execute("INSERT INTO meta VALUES (?, '')", (f"opened by {threading.get_ident()}",))
            count = len(ledger.rows("SELECT * FROM meta WHERE key LIKE 'opened by %'"))
            ledger.close()
            return count

        with ThreadPoolExecutor(8) as pool:
            counts = [future.result() for future in [pool.submit(open_one) for _ in range(8)]]
        assert max(counts) == 8


def test_commands_are_taken_once(ledger: Ledger) -> None:
    study = StudyLedger(ledger, "s")
    study.command("stop")
    study.command("veto", run="0001-a", why="no")
    assert study.take_commands() == [("stop", {}), ("veto", {"run": "0001-a", "why": "no"})]
    assert study.take_commands() == []


def test_files_of_early_versions_are_verified_where_they_are(ledger: Ledger, tmp_path: Path) -> None:
    study = StudyLedger(ledger, "s")
    study.open(None, "min")
    run = plan(study)
    run_dir = tmp_path / "outputs/s" / run
    run_dir.mkdir(parents=True)
    for name in ("run.json", "config.json"):
        (run_dir / name).write_text("{}")
    with ledger.write():
        study.launched(run, "cpu0", folder.hash_files(run_dir, ["run.json", "config.json"]))
    assert audit(ledger, tmp_path).findings == ()
    (run_dir / "config.json").write_text('{"x": 1}')
    assert [finding.where for finding in audit(ledger, tmp_path).findings] == [f"s/{run}/config.json"]


# -- a copy


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}


def test_what_is_written_to_a_copy_is_never_seen_in_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    fill(ledger, [("a", "s", {"n": 1})])
    ledger.close()
    before = files(tmp_path)
    copy = LedgerCopy(tmp_path / "ledger.db")
    fill(copy, [("b", "s", {"n": 2})])
    assert [event.kind for event in copy.events()] == ["a", "b"]
    copy.close()
    assert files(tmp_path) == before
    assert not list(tmp_path.glob("*-shm"))


def test_a_copy_holds_what_an_open_ledger_has_committed_and_no_more(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    fill(ledger, [("a", "s", {})])
    with ledger.write():
        ledger.append_event("b", "s", None, {})
        before = files(tmp_path)
        copy = LedgerCopy(tmp_path / "ledger.db")
        assert [event.kind for event in copy.events()] == ["a"]
        copy.close()
        assert files(tmp_path) == before
    copy = LedgerCopy(tmp_path / "ledger.db")
    assert [event.kind for event in copy.events()] == ["a", "b"]


def test_a_copy_holds_what_a_killed_process_has_committed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        fill(Ledger(tmp_path / "ledger.db"), [("a", "s", {}), ("b", "s", {})])
        os._exit(0)  # without closing it
    os.waitpid(pid, 0)
    assert (tmp_path / "ledger.db-wal").stat().st_size > 0
    before = files(tmp_path)
    assert [event.kind for event in LedgerCopy(tmp_path / "ledger.db").events()] == ["a", "b"]
    assert files(tmp_path) == before


def test_the_copy_of_a_ledger_that_is_not_there_is_empty_and_makes_none(tmp_path: Path) -> None:
    copy = LedgerCopy(tmp_path / ".looplab" / "ledger.db")
    fill(copy, [("a", "s", {})])
    copy.close()
    assert not list(tmp_path.iterdir())


def test_a_damaged_ledger_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(LabError, match="cannot open the ledger"):
        LedgerCopy(tmp_path / "ledger.db")


@pytest.mark.parametrize("writing", [False, True])
def test_a_copy_needs_no_permission_to_write(writing: bool) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    ledger = Ledger(folder / "ledger.db")
    try:
        fill(ledger, [("a", "s", {})])
        if not writing:
            ledger.close()
        folder.chmod(0o555)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                status = 0 if [event.kind for event in LedgerCopy(folder / "ledger.db").events()] == ["a"] else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


# -- configs


def test_a_config_is_kept_once_as_it_is(ledger: Ledger, tmp_path: Path) -> None:
    config = {"z": 1, "a": {"big": 10**30, "inf": float("inf"), "one": 1.0, "text": "ä\ud800"}}
    study = StudyLedger(ledger, "s")
    study.open(None, "min")
    runs = [plan(study, config_hash=hash_config(config), plan=RunPlan(config, notes=("x",))) for _ in range(3)]
    assert len(ledger.rows("SELECT * FROM configs")) == 1
    for run in runs:
        assert repr(study.config_of(study.run(run), tmp_path)) == repr(config)
        assert repr(study.plan_of(run)) == repr(RunPlan(config, notes=("x",)))


def test_a_changed_config_is_found(ledger: Ledger, tmp_path: Path) -> None:
    study = StudyLedger(ledger, "s")
    study.open(None, "min")
    plan(study, config_hash=hash_config({"x": 1}), plan=RunPlan({"x": 1}))
    assert audit(ledger, tmp_path).findings == ()
    ledger.execute("UPDATE configs SET body='{\"x\": 2}'")
    assert [finding.where for finding in audit(ledger, tmp_path).findings] == [f"config {hash_config({'x': 1})}"]


def test_runs_of_an_early_version_have_their_config_in_their_folder(tmp_path: Path) -> None:
    config = {"z": 10**30, "a": 1.0}
    ledger = Ledger(tmp_path / "ledger.db")
    StudyLedger(ledger, "s").open(None, "min")
    runs = [plan(StudyLedger(ledger, "s"), config_hash=hash_config(config)) for _ in range(2)]
    with ledger.write():
        ledger.execute("UPDATE plans SET body=?", (dump_json({"config": config}).decode(),))
        ledger.execute("DELETE FROM plans WHERE run=?", (runs[0],))
        for what in ("TABLE configs", "INDEX runs_measured", "INDEX events_alarm", "INDEX events_configured"):
            ledger.execute(f"DROP {what}")
        ledger.execute("DROP INDEX events_agents")
        ledger.execute("DROP INDEX runs_retried")
        for column in ("measured", "attempt", "host", "job", "lost_s"):
            ledger.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        ledger.execute("ALTER TABLE studies RENAME COLUMN judge_state TO docket")
        ledger.execute("PRAGMA user_version=2")
    ledger.close()
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    assert study.plan_of(runs[1]) == RunPlan(config)
    run_dir = tmp_path / runs[0]
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    (run_dir / "config.json").write_bytes(dump_json(config))
    assert study.config_of(study.run(runs[0]), run_dir) == config
    (run_dir / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(LabError, match="not the config that the run was planned with"):
        study.config_of(study.run(runs[0]), run_dir)
    with pytest.raises(LabError, match="no run folder"):
        study.config_of(study.run(runs[0]), tmp_path / "gone")


# -- the journal


def journal_of(path: Path) -> list[Link]:
    return [link for _, link in Journal(path.with_name("journal.jsonl")).read() if link is not None]


def links_of(ledger: Ledger) -> list[Link]:
    return [Link(*row) for row in ledger.rows("SELECT * FROM events ORDER BY seq")]


@given(
    st.lists(
        st.tuples(st.text(max_size=5), st.text(max_size=5), st.dictionaries(st.text(), st.text())),
        min_size=1,
        max_size=8,
    )
)
def test_the_journal_has_every_event_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, told: list) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("l") / "ledger.db")
    fill(ledger, told)
    assert journal_of(ledger.path) == links_of(ledger)
    assert len(links_of(ledger)) == len(told)


def test_what_is_not_committed_is_not_in_the_journal(ledger: Ledger) -> None:
    fill(ledger, [("a", "s", {})])
    with contextlib.suppress(RuntimeError), ledger.write():
        ledger.append_event("b", "s", None, {})
        raise RuntimeError
    with ledger.write():
        with contextlib.suppress(RuntimeError), ledger.savepoint():
            ledger.append_event("c", "s", None, {})
            raise RuntimeError
        ledger.append_event("d", "s", None, {})
    assert [link.kind for link in journal_of(ledger.path)] == ["a", "d"]
    assert journal_of(ledger.path) == links_of(ledger)


def test_several_processes_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    pids = []
    for name in "abc":
        pid = os.fork()
        if pid == 0:
            ledger = Ledger(path)
            for i in range(60):
                fill(ledger, [("x", name, {"i": i}), ("y", name, {"i": i})])
            ledger.close()
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    ledger = Ledger(path)
    fill(ledger, [("last", "s", {})])
    assert journal_of(path) == links_of(ledger)


@pytest.mark.parametrize("spoil", [b'{"seq": 99', b"", b"\xff\xfe\n", b"nonsense\n"])
def test_a_journal_that_a_killed_writer_left_is_completed(ledger: Ledger, spoil: bytes) -> None:
    fill(ledger, [("a", "s", {}), ("b", "s", {})])
    ledger.close()
    path = ledger.path.with_name("journal.jsonl")
    first, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + spoil)
    again = Ledger(ledger.path)
    fill(again, [("c", "s", {})])
    assert journal_of(path) == links_of(again)


def test_a_deleted_journal_is_rewritten_and_that_is_recorded(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, [("a", "s", {})])
    ledger.close()
    ledger.path.with_name("journal.jsonl").unlink()
    again = Ledger(ledger.path)
    assert [finding.where for finding in audit(again, tmp_path).findings] == ["journal.jsonl"]
    fill(again, [("b", "s", {})])
    assert [link.kind for link in journal_of(ledger.path)] == ["a", "journal rewritten", "b"]
    assert not audit(again, tmp_path).findings
    assert any("the journal was rewritten" in note for note in audit(again, tmp_path).notes)


def test_a_head_that_is_not_in_the_journal_yet_is_not_noted(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, [("a", "s", {})])
    ledger.note_head()
    noted = ledger.noted_head()
    with open(ledger.path.with_name("journal.jsonl")) as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # another process that has committed and is about to append
        fill(ledger, [("b", "s", {})])
        ledger.note_head()
        assert ledger.noted_head() == noted == (1, ledger.hash_of(1))
        assert not audit(ledger, tmp_path).findings
    ledger.note_head()
    assert ledger.noted_head() == ledger.head() == (2, ledger.hash_of(2))


def test_events_that_come_while_the_journal_is_compared_are_not_missed_in_it(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(ledger, [("a", "s", {})])
    ledger.note_head()
    engine, read = Ledger(ledger.path), Journal.read

    def read_slowly(journal: Journal) -> Iterator[tuple[int, Link | None]]:
        yield from read(journal)
        fill(engine, [("b", "s", {})])
        engine.note_head()

    monkeypatch.setattr(Journal, "read", read_slowly)
    assert not audit(ledger, tmp_path).findings
    engine.close()


@pytest.mark.parametrize("spoil", ["delete", "replace", "folder", "pipe", "truncate"])
def test_whatever_becomes_of_the_journal_of_an_open_ledger_the_next_event_is_written(
    ledger: Ledger, spoil: str
) -> None:
    assert ledger.journal is not None
    path = ledger.journal.path
    fill(ledger, [("a", "s", {}), ("b", "s", {})])
    if spoil == "truncate":
        path.write_bytes(b"")
    else:
        path.unlink()
    match spoil:
        case "replace":
            path.write_text("no event\n")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    fill(ledger, [("c", "s", {}), ("d", "s", {})])
    ledger.close()
    assert [event.kind for event in Ledger(ledger.path, repair=True).events()] == ["a", "b", "c", "d"]
    if spoil in ("delete", "truncate"):
        assert [one.kind for one in journal_of(ledger.path)] == ["a", "b", "c", "d"]


def test_a_ledger_that_has_lost_its_end_can_be_read_but_not_written(ledger: Ledger) -> None:
    fill(ledger, [("a", "s", {}), ("b", "s", {})])
    ledger.close()
    db = sqlite3.connect(ledger.path)
    db.execute("DELETE FROM events WHERE seq=2")
    db.commit()
    db.close()
    for name in ("head", "journal.jsonl"):
        again = Ledger(ledger.path)
        assert [event.kind for event in again.events()] == ["a"]
        with pytest.raises(DamagedError, match="events were lost"):
            fill(again, [("c", "s", {})])
        again.close()
        if name == "head":  # the journal alone is enough
            ledger.path.with_name("head").unlink()


def test_nothing_is_written_to_a_ledger_that_was_replaced(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger, [("a", "s", {})])
    (tmp_path / "other").mkdir()
    other = Ledger(tmp_path / "other" / "ledger.db")
    other.close()
    os.replace(other.path, ledger.path)
    with pytest.raises(DamagedError, match="replaced"):
        fill(ledger, [("b", "s", {})])
    ledger.path.unlink()
    with pytest.raises(DamagedError, match="replaced"):
        fill(ledger, [("b", "s", {})])
    with pytest.raises(DamagedError, match="its journal exists"):
        Ledger(ledger.path)
    assert not ledger.path.exists()


def test_a_backup_is_whole_and_only_the_last_ones_are_kept(ledger: Ledger) -> None:
    made = []
    for number in range(5):
        fill(ledger, [(f"e{number}", "s", {})])
        made.append(back_up(ledger.path))
        assert back_up(ledger.path) is None  # nothing is new
    assert backups(ledger.path) == made[:1:-1]
    assert all(map(intact, backups(ledger.path)))
    newest = backups(ledger.path)[0]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2 :] = b"\x00" * (len(content) - len(content) // 2)
    newest.write_bytes(content)
    assert not intact(newest)


@pytest.mark.parametrize(
    "ask",
    [
        lambda study: study.last_event("belief"),
        lambda study: study.last_data("engine ended"),
        lambda study: study.events_of("kept"),
        lambda study: study.messages(),
        lambda study: study.held_out_reads(),
        lambda study: study.bests(),
    ],
)
def test_rare_events_are_found_without_reading_those_of_every_run(
    tmp_path: Path, ask: Callable[[StudyLedger], object]
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    study = StudyLedger(ledger, "toy")
    study.open("loss", "min")
    asked: list[str] = []
    ledger._db.set_trace_callback(asked.append)
    ask(study)
    ledger._db.set_trace_callback(None)
    (query,) = asked
    plan = " ".join(row[3] for row in ledger.rows(f"EXPLAIN QUERY PLAN {query}"))
    assert "events_rare" in plan
