"""The tables of a lab as CSV and Parquet files."""

from __future__ import annotations

import csv
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from looplab.config.lab import LabConfig, load_lab
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.report.export import export
from looplab.report.tables import VIEWS
from looplab.runs import folder

REASON = 'a "reason",\nwith a second line'


@pytest.fixture
def lab(tmp_path: Path) -> LabConfig:
    """Two studies of one ended run each, written as an engine writes them."""
    text = "launch: {command: [train]}\nknobs: {x: {type: int}}\nstudies: [{study: one}, {study: two}]\n"
    (tmp_path / "lab.yaml").write_text(text)
    lab = load_lab(tmp_path)
    ledger = Ledger(lab.ledger_path)
    for study in lab.studies:
        record = StudyLedger(ledger, study)
        record.open("score", "max")
        with ledger.write():
            run = record.plan(
                round=1, proposal=None, proposer="base", parent=None, base="base.json", reason=REASON, config_hash="00",
                devices=1, plan=RunPlan({"x": 5}),
            )  # fmt: skip
            record.ended(
                run.id, status="ok", code=0, signal=None, started=1.5, ended=4.0, objective=0.25, files={}
            )  # fmt: skip
        files = {"run.json": b"{}", "config.json": b'{"x": 5}'}
        folder.make_study_folder(folder.study_folder(lab.folder, study))
        folder.create(folder.study_folder(lab.folder, study) / run.id, files)
        log = folder.study_folder(lab.folder, study) / run.id / "metrics.jsonl"
        log.write_text('{"step": 1, "score": 0.1}\n{"step": 2, "score": "NaN"}\n')
    ledger.close()
    return lab


def test_every_view_becomes_a_csv_file_that_any_reader_understands(lab: LabConfig, tmp_path: Path) -> None:
    written = export(lab, tmp_path / "new" / "out", "csv")
    assert [(file.view, file.path.name) for file in written] == [(view, f"{view}.csv") for view in VIEWS]
    assert sorted(path.name for path in (tmp_path / "new/out").iterdir()) == sorted(f"{view}.csv" for view in VIEWS)
    with (tmp_path / "new/out/runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert [run["study"] for run in runs] == ["one", "two"]
    assert runs[0]["reason"] == REASON
    assert (runs[0]["objective"], runs[0]["seconds"], runs[0]["parent"]) == ("0.25", "2.5", "")
    with (tmp_path / "new/out/metrics.csv").open(newline="") as file:
        assert [row[2:] for row in csv.reader(file)][:3] == [
            ["metric", "step", "value"],
            ["score", "1", "0.1"],
            ["score", "2", "nan"],
        ]
    assert (tmp_path / "new/out/verdicts.csv").read_text().startswith('"study","run"')


def test_parquet_files_hold_the_same_with_their_types(lab: LabConfig, tmp_path: Path) -> None:
    written = export(lab, tmp_path / "out", "parquet")
    assert {file.view: file.rows for file in written} == {
        "runs": 2,
        "metrics": 4,
        "proposals": 0,
        "verdicts": 0,
        "knobs": 2,
        "events": pq.read_metadata(tmp_path / "out/events.parquet").num_rows,
        **dict.fromkeys(("stages", "suites", "cases", "versions"), 0),
    }
    found = duckdb.sql(f"SELECT objective, n, reason FROM '{tmp_path}/out/runs.parquet'").fetchall()
    assert found == [(0.25, 1, REASON)] * 2
    assert pq.read_table(tmp_path / "out/knobs.parquet").to_pylist()[0]["number"] == 5


def test_one_study_can_be_exported_alone(lab: LabConfig, tmp_path: Path) -> None:
    written = export(lab, tmp_path / "out", "csv", study="two")
    assert {file.view: file.rows for file in written if file.view in ("runs", "metrics", "knobs")} == {
        "runs": 1,
        "metrics": 2,
        "knobs": 1,
    }


def test_an_export_replaces_the_one_before_and_leaves_other_files(lab: LabConfig, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    export(lab, tmp_path / "out", "csv", study="two")
    export(lab, tmp_path / "out", "csv")
    assert len((tmp_path / "out/metrics.csv").read_text().splitlines()) == 5
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*(f"{view}.csv" for view in VIEWS), "notes.txt"}


def test_where_nothing_can_be_written_the_error_says_so(lab: LabConfig, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(LabError, match="cannot write"):
        export(lab, tmp_path / "taken", "csv")
    (tmp_path / "out/runs.csv").mkdir(parents=True)
    with pytest.raises(LabError, match="cannot write"):
        export(lab, tmp_path / "out", "csv")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["runs.csv"]
