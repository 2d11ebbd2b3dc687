"""A lab as SQL tables: real runs of two studies."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import PATIENCE_S

from looplab.config.lab import LabConfig, load_lab
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.report import archive, tables
from looplab.report.tables import VIEWS, ask, connect, views_of

LOOPLAB = Path(sys.executable).with_name("looplab")
TRAINER = """
import os, sys
x = int(open(sys.argv[1]).read().split('"x":')[1].split(",")[0])
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    for step in range(1, 4):
        log.write('{"step": %d, "score": %d}\\n' % (step, x * step))
sys.exit(3 if x == 7 else 0)
"""
LAB = """
launch: {command: ["{python}", -I, -S, train.py, "{config}"]}
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 1000}, kind: {choices: [a, b]}}
slots: {count: 2, gpus: none}
base: base.json
studies:
  - study: one
    derive: {twice: 2 * x}
    proposers: [{queue: queue.yaml}]
  - study: two
    measure: {aliases: {points: [score]}}
    objective: {metric: points, goal: max}
"""
BASE = {"x": 1, "kind": "a", "twice": 2, "untouched": {"deep": [1, None]}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab in a folder with special characters, with four runs of one study and one of another."""
    folder = tmp_path_factory.mktemp("labs") / "it's [a] lab*"
    folder.mkdir()
    (folder / "lab.yaml").write_text(LAB)
    (folder / "base.json").write_text(json.dumps(BASE))
    (folder / "train.py").write_text(TRAINER)
    edits = [["x@set=5"], ["x@set=7"], ["x@set=3", "kind@set=b"], ["x@set=5000"]]
    (folder / "queue.yaml").write_text(json.dumps({"proposals": [{"edits": e, "reason": f"try {e}"} for e in edits]}))
    for study in ("one", "two"):
        subprocess.run(
            [LOOPLAB, "run", "--study", study], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S
        )
    return folder


@pytest.fixture
def lab(made: Path, tmp_path: Path) -> LabConfig:
    """A copy, without archives."""
    folder = tmp_path / made.name
    shutil.copytree(made, folder)
    for path in folder.glob("outputs/*/*/record/metrics.parquet"):
        path.unlink()
    return load_lab(folder)


@pytest.fixture(scope="module")
def archived(
    made: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LabConfig, duckdb.DuckDBPyConnection]]:
    """A copy with all archives, and a connection to it, for tests that change nothing."""
    folder = tmp_path_factory.mktemp("archived") / made.name
    shutil.copytree(made, folder)
    lab = load_lab(folder)
    archive_all(lab)
    with connect(lab) as connection:
        yield lab, connection


def rows(lab: LabConfig, sql: str, **options: Any) -> list[tuple[Any, ...]]:
    with connect(lab, **options) as connection:
        return [tuple(row.values()) for row in ask(connection, sql).to_pylist()]


def archive_all(lab: LabConfig) -> None:
    for study in lab.studies.values():
        for run in sorted((lab.folder / "outputs" / study.name).glob("0*")):
            archive.archive_run(run, study)


def test_runs_of_all_studies_stand_in_one_table(lab: LabConfig) -> None:
    assert rows(lab, "SELECT study, n, status, objective FROM runs ORDER BY study, n") == [
        ("one", 1, "ok", 3),
        ("one", 2, "ok", 15),
        ("one", 3, "failed", None),
        ("one", 4, "ok", 9),
        ("two", 1, "ok", 3),
    ]


def test_a_run_knows_its_folder_and_how_long_it_took(lab: LabConfig) -> None:
    for run, folder, seconds, started, ended in rows(lab, "SELECT id, folder, seconds, started, ended FROM runs"):
        assert Path(folder, "record/run.json").exists()
        assert Path(folder).name == run
        assert seconds == ended - started


def test_every_column_of_the_ledger_is_there(lab: LabConfig) -> None:
    with sqlite3.connect(lab.ledger_path) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
    assert [row[0] for row in rows(lab, "DESCRIBE runs")] == [*columns, "seconds", "folder"]


def test_metrics_are_the_same_from_archives_and_from_the_trainers_files(lab: LabConfig) -> None:
    sql = "SELECT * FROM metrics ORDER BY ALL"
    live = rows(lab, sql)
    assert len(live) == 15
    assert {(study, metric) for study, _, metric, _, _ in live} == {("one", "score"), ("two", "points")}
    archive_all(lab)
    assert len(list(lab.folder.glob("outputs/*/*/record/metrics.parquet"))) == 5
    assert rows(lab, sql) == live
    next(lab.folder.glob("outputs/one/*/record/metrics.parquet")).unlink()
    assert rows(lab, sql) == live
    for path in lab.folder.glob("outputs/*/*/metrics.jsonl"):
        if path.with_name("record").joinpath("metrics.parquet").exists():
            path.unlink()  # an archive is enough
    assert rows(lab, sql) == live


def test_a_damaged_archive_or_one_of_a_strange_form_is_passed_over(lab: LabConfig) -> None:
    live = rows(lab, "SELECT * FROM metrics ORDER BY ALL")
    archive_all(lab)
    first, second, *_ = sorted(lab.folder.glob("outputs/one/*/record/metrics.parquet"))
    first.write_bytes(first.read_bytes()[:-5])
    pq.write_table(pa.table({"mine": [1]}), second)
    assert rows(lab, "SELECT * FROM metrics ORDER BY ALL") == live


def test_a_question_for_one_run_opens_only_its_archive(lab: LabConfig) -> None:
    archive_all(lab)
    with connect(lab) as connection:
        (run,) = ask(connection, "SELECT id FROM runs WHERE study = 'two'").to_pylist()
        sql = f"EXPLAIN ANALYZE SELECT * FROM metrics WHERE study = 'two' AND run = '{run['id']}'"
        assert "Scanning Files: 1/5" in str(connection.execute(sql).fetchall())


def test_an_archive_of_a_run_that_is_not_ended_is_not_believed(lab: LabConfig) -> None:
    archive_all(lab)
    with sqlite3.connect(lab.ledger_path) as db:
        db.execute("UPDATE runs SET state = 'running', status = NULL WHERE study = 'two'")
    (log,) = lab.folder.glob("outputs/two/*/metrics.jsonl")
    with log.open("a") as file:
        file.write('{"step": 4, "score": 44}\n{"step": 5, "sco')
    sql = "SELECT step, value FROM metrics WHERE study = 'two' ORDER BY step"
    assert rows(lab, sql) == [(1, 1), (2, 2), (3, 3), (4, 44)]


def test_a_planned_run_is_in_the_table_before_it_has_a_folder(lab: LabConfig) -> None:
    ledger = Ledger(lab.ledger_path)
    record = StudyLedger(ledger, "two")
    with ledger.write():
        record.plan(
            round=1, proposal=None, proposer="person", parent=None, base="base.json", reason="later", config_hash="00",
            devices=1, plan=RunPlan({}),
        )  # fmt: skip
    ledger.close()
    assert rows(lab, "SELECT state, seconds FROM runs WHERE study = 'two' ORDER BY n")[1] == ("planned", None)
    assert rows(lab, "SELECT count(DISTINCT run) FROM metrics WHERE study = 'two'") == [(1,)]


def test_knobs_are_what_may_change_and_what_did(lab: LabConfig) -> None:
    found = rows(
        lab, "SELECT r.n, k.key, k.value, k.number FROM knobs k JOIN runs r ON r.id = k.run AND r.study = 'one'"
    )
    by_run = {n: {key: (value, number) for m, key, value, number in found if m == n} for n in (1, 2, 3, 4)}
    assert by_run[1] == {"x": ("1", 1), "kind": ("a", None), "twice": ("2", 2)}
    assert by_run[2] == {"x": ("5", 5), "kind": ("a", None), "twice": ("10", 10)}
    assert by_run[4]["kind"] == ("b", None)
    assert {row[0] for row in rows(lab, "SELECT DISTINCT key FROM knobs WHERE study = 'two'")} == {"x", "kind"}


def test_a_config_value_of_any_type_is_text(lab: LabConfig) -> None:
    config = '{"x": NaN, "kind": "b\\ud800", "big": 1' + "0" * 400 + ', "flag": true, "none": null}'
    with sqlite3.connect(lab.ledger_path) as db:
        db.execute("UPDATE runs SET config_hash='00' WHERE study='two'")
        db.execute("INSERT INTO configs VALUES ('00', ?)", (config,))
    (path,) = lab.folder.glob("outputs/two/*/record/run.json")
    path.write_text(json.dumps({"changes": {"base": {key: {"new": 1} for key in ("big", "flag", "none")}}}))
    sql = "SELECT key, value, number IS NULL FROM knobs WHERE study = 'two' ORDER BY key"
    assert rows(lab, sql) == [
        ("big", "1" + "0" * 400, True),
        ("flag", "true", True),
        ("kind", "b?", True),
        ("none", "null", True),
        ("x", "NaN", False),
    ]


def test_proposals_verdicts_and_events_are_there(lab: LabConfig) -> None:
    found = rows(lab, "SELECT status, count(*) FROM proposals GROUP BY status ORDER BY status")
    assert found == [("accepted", 3), ("rejected", 1)]
    assert rows(lab, "SELECT edits::JSON->>0 FROM proposals WHERE status = 'rejected'") == [("x@set=5000",)]
    assert rows(lab, "SELECT * FROM verdicts") == []
    assert rows(lab, "SELECT count(*) FROM events WHERE kind = 'ended'") == [(5,)]


def test_one_study_can_be_asked_alone(lab: LabConfig) -> None:
    archive_all(lab)
    for view in ("runs", "metrics", "knobs", "events"):
        assert rows(lab, f"SELECT DISTINCT study FROM {view}", study="two") == [("two",)]
    assert rows(lab, "SELECT count(*) FROM proposals", study="two") == [(0,)]
    with pytest.raises(LabError, match="no study 'twoo'"):
        connect(lab, study="twoo")


def test_a_study_that_left_the_lab_file_is_still_there(lab: LabConfig) -> None:
    text = (lab.folder / "lab.yaml").read_text()
    (lab.folder / "lab.yaml").write_text(text[: text.index("  - study: two")])
    lab = load_lab(lab.folder)
    assert list(lab.studies) == ["one"]
    assert rows(lab, "SELECT count(*) FROM metrics", study="two") == [(3,)]
    assert rows(lab, "SELECT count(*) FROM knobs", study="two") == [(0,)]


def test_asking_while_somebody_writes_waits_for_nobody_and_changes_nothing(lab: LabConfig) -> None:
    ledger = Ledger(lab.ledger_path)
    with ledger.write():
        ledger.append_event("note", "one", None, {})
        before = rows(lab, "SELECT count(*) FROM events")
    assert rows(lab, "SELECT count(*) FROM events") == [(before[0][0] + 1,)]
    assert ledger.first_broken_link() is None
    ledger.close()


def test_outputs_may_lie_behind_a_link(lab: LabConfig, tmp_path: Path) -> None:
    archive_all(lab)
    (lab.folder / "outputs").rename(tmp_path / "disk")
    (lab.folder / "outputs").symlink_to(tmp_path / "disk")
    assert rows(lab, "SELECT count(*) FROM metrics") == [(15,)]


def test_a_lab_without_a_ledger_is_an_error(tmp_path: Path, lab: LabConfig) -> None:
    shutil.rmtree(lab.ledger_path.parent)
    with pytest.raises(LabError, match="no ledger yet"):
        connect(lab)
    assert not lab.ledger_path.exists()
    lab.ledger_path.parent.mkdir()
    lab.ledger_path.write_text("not a database, but some text that is long enough to be taken for one")
    with pytest.raises(LabError, match="cannot open the ledger"):
        connect(lab)


# -- what a question may not do


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE runs",
        "DELETE FROM runs",
        "UPDATE runs SET objective = 1",
        "INSERT INTO verdicts VALUES ('one', 'x', 0, 'keep', '')",
        "CREATE TABLE mine AS SELECT 1",
        "COPY runs TO '{file}'",
        "COPY (PIVOT knobs ON key USING first(number)) TO '{file}'",
        "EXPLAIN ANALYZE COPY runs TO '{file}'",
        "EXPORT DATABASE '{file}'",
        "ATTACH '{file}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "PRAGMA enable_profiling",
        "CALL pragma_version()",
        "SELECT 1; SELECT 2",
        "",
        "-- nothing",
    ],
)
def test_only_questions_pass(archived: tuple[LabConfig, duckdb.DuckDBPyConnection], tmp_path: Path, sql: str) -> None:
    lab, connection = archived
    before = {path: path.read_bytes() for path in lab.folder.rglob("*.parquet")}
    files = [tmp_path / "written", next(iter(before))]
    for file in files:
        with pytest.raises(LabError):
            ask(connection, sql.format(file=str(file).replace("'", "''")))
    assert not files[0].exists()
    assert before == {path: path.read_bytes() for path in lab.folder.rglob("*.parquet")}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM read_parquet('{folder}/*')",
        "SELECT * FROM read_text('{lab}/lab.yaml')",
        "SELECT * FROM read_text('{run}/../../lab.yaml')",
        "SELECT * FROM read_csv('https://example.org/x.csv')",
        "SELECT * FROM local_variable",
    ],
)
def test_a_question_reads_nothing_but_the_lab_s_own_tables(
    archived: tuple[LabConfig, duckdb.DuckDBPyConnection], tmp_path: Path, sql: str
) -> None:
    lab, connection = archived
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    local_variable = pa.table({"a": [1]})
    run = next(lab.folder.glob("outputs/one/0*"))
    names = {"file": secret, "folder": tmp_path, "lab": lab.folder, "run": run}
    with pytest.raises(LabError):
        ask(connection, sql.format(**{name: str(path).replace("'", "''") for name, path in names.items()}))
    assert local_variable.num_rows == 1


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "FROM runs SELECT id",
        "WITH best AS (SELECT max(objective) AS o FROM runs) SELECT * FROM best;",
        "VALUES (1), (2)",
        "DESCRIBE knobs",
        "SUMMARIZE runs",
        "SHOW TABLES",
        "PIVOT knobs ON key USING first(number) GROUP BY run;",
        "SELECT to_timestamp(created), [1, 2], {'a': 1}, 1.5::DECIMAL(4, 2), 'x'::BLOB, INTERVAL 1 DAY FROM runs",
    ],
)
def test_questions_of_any_form_are_answered(archived: tuple[LabConfig, duckdb.DuckDBPyConnection], sql: str) -> None:
    assert len(ask(archived[1], sql)) > 0


def test_a_wrong_question_is_answered_in_short_with_the_names_of_the_views(lab: LabConfig) -> None:
    with connect(lab) as connection:
        with pytest.raises(LabError) as caught:
            ask(connection, "SELECT objectiv FROM runs")
        assert '"objectiv" not found' in caught.value.message
        assert '"objective"' in caught.value.message
        assert "\n" not in caught.value.message
        assert all(view in (caught.value.hint or "") for view in VIEWS)
        with pytest.raises(LabError, match="does not exist"):
            ask(connection, "SELECT * FROM run")
        with pytest.raises(LabError, match="syntax error"):
            ask(connection, "SELEC * FROM runs")


def test_only_the_views_that_a_question_names_are_made() -> None:
    assert views_of("SELECT * FROM runs r JOIN Knobs k ON r.id = k.run") == ("runs", "knobs")
    assert views_of("WITH m AS (FROM metrics) SELECT * FROM m") == ("metrics",)
    assert views_of("DESCRIBE runs") == ("runs",)
    for unclear in ("SHOW TABLES", "PIVOT knobs ON key USING first(number)", "SELEC", "", "SELECT 1"):
        assert views_of(unclear) == VIEWS


def test_the_tables_of_a_connection_are_the_views_and_no_more(lab: LabConfig) -> None:
    assert {row[0] for row in rows(lab, "SHOW TABLES")} == set(VIEWS)
    assert {row[0] for row in rows(lab, "SHOW TABLES", views=("runs", "metrics"))} == {"runs", "metrics"}


WRITING = (
    "EXPORT DATABASE '{here}/made'",
    "COPY (SELECT 1) TO '{here}/made.csv'",
    "COPY (SELECT 1 AS a) TO '{here}/made' (FORMAT csv, PARTITION_BY a)",
    "ATTACH '{here}/made.db'",
    "ATTACH '{here}/made.db' AS x (TYPE sqlite)",
    "CREATE PERSISTENT SECRET made (TYPE s3)",
    "CREATE TABLE made AS FROM read_csv('{here}/secret.csv')",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{here}/made.csv'",
    "PREPARE x AS COPY (SELECT 1) TO '{here}/made.csv'",
    "SET profiling_output='{here}/made'",
    "PRAGMA profiling_output='{here}/made'",
    "SET temp_directory='{here}/made'",
    "SET enable_external_access=true",
    "CALL enable_logging(storage='file', storage_config={{'path': '{here}/made'}})",
    "IMPORT DATABASE '{here}'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SELECT 1; COPY (SELECT 1) TO '{here}/made.csv'",
    "FROM query('COPY (SELECT 1) TO ''{here}/made.csv''')",
    "FROM read_csv('{here}/secret.csv')",
    "FROM '{here}/secret.csv'",
    "FROM sniff_csv('{here}/secret.csv')",
    "FROM glob('{here}/*')",
    "SUMMARIZE '{here}/secret.csv'",
    "PIVOT (FROM read_csv('{here}/secret.csv')) ON a",
    "FROM 'https://localhost/a.parquet'",
)


@pytest.mark.parametrize("sql", WRITING)
def test_looking_for_the_views_of_a_question_makes_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secret.csv").write_text("a\n1\n")
    sql = sql.format(here=tmp_path)
    views_of(sql)
    with duckdb.connect(":memory:", config=tables._CONFIG) as connection:
        tables._lock(connection)
        with pytest.raises(LabError):
            ask(connection, sql)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
