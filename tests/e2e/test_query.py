"""`looplab query`, `looplab export` and `looplab.load`: a lab as tables."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest

from looplab import load
from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.report.archive import archive_run
from looplab.report.tables import VIEWS

METRICS = "SELECT r.n, m.metric, m.step, m.value FROM metrics m JOIN runs r ON r.id = m.run ORDER BY ALL"


@pytest.mark.slow
def test_runs_knobs_and_metrics_can_be_asked_for_in_sql(lab) -> None:
    lab.queue("train.lr@set=0.2", ["train.lr@set=0.3", "exit@set=3"])
    lab("run")
    assert lab("query", "SELECT n, status, round(objective, 3) AS loss FROM runs ORDER BY n", "--json").json() == [
        {"n": 1, "status": "ok", "loss": 0.533},
        {"n": 2, "status": "ok", "loss": 0.433},
        {"n": 3, "status": "failed", "loss": None},
    ]
    sql = "SELECT number, min(metrics.value) AS best FROM metrics JOIN knobs USING (study, run) WHERE key = 'train.lr' GROUP BY 1"
    best = {row["number"]: round(row["best"], 3) for row in lab("query", sql, "--json").json()}
    assert best == {0.1: 0.533, 0.2: 0.433, 0.3: 0.333}
    assert lab("query", "SELECT count(*) AS n FROM events WHERE kind = 'ended'", "--json").json() == [{"n": 3}]
    assert lab("query", "SELECT DISTINCT status FROM proposals", "--json").json() == [{"status": "accepted"}]


@pytest.mark.slow
def test_metrics_can_be_asked_for_while_the_run_still_goes_on(lab, until) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()

    def ask(sql: str) -> object:
        return lab("query", sql, "--json").json()[0]

    until(lambda: ask("SELECT count(*) AS n, max(step) AS step FROM metrics") == {"n": 3, "step": 3}, "three points")
    wanted = {"state": "running", "objective": None, "at_work": True}
    until(lambda: ask("SELECT state, objective, seconds > 0 AS at_work FROM runs") == wanted, "a run at work")
    lab.open_gate()
    engine.ended()
    assert ask("SELECT state, status FROM runs") == {"state": "ended", "status": "ok"}


@pytest.mark.slow
def test_the_answer_is_the_same_with_and_without_archives(lab) -> None:
    lab.queue("train.lr@set=0.2")
    lab("run")
    for run in lab.runs():
        assert archive_run(run, load_lab(lab.folder).study(None)) is not None
    with_archives = lab("query", METRICS, "--json").json()
    assert len(with_archives) == 6
    for run in lab.runs():
        (run / "record/metrics.parquet").unlink()
    assert lab("query", METRICS, "--json").json() == with_archives


@pytest.mark.slow
def test_asking_writes_nothing(lab) -> None:
    lab("run")
    before = {name: content for name, (_, content) in lab.tree().items() if not name.endswith(("-wal", "-shm"))}
    lab("query", METRICS)
    lab("query", "DROP TABLE runs", code=2)
    after = {name: content for name, (_, content) in lab.tree().items() if not name.endswith(("-wal", "-shm"))}
    assert after == before


@pytest.mark.slow
def test_in_a_pipe_the_answer_is_plain_columns_and_in_a_terminal_a_table(lab) -> None:
    lab("run")
    sql = "SELECT n, id, NULL AS nothing, 1 / 3 AS third, 'two\nlines' AS text FROM runs"
    lines = lab("query", sql).out.splitlines()
    assert lines[0].split() == ["n", "id", "nothing", "third", "text"]
    assert lines[1].split() == ["1", lab.runs()[0].name, "-", "0.3333333333", "two", "lines"]
    assert len(lines) == 2
    terminal = lab.terminal("query", sql)
    assert terminal.ended() == 0
    assert lab.runs()[0].name in terminal.shown


@pytest.mark.slow
def test_csv_is_for_other_programs(lab) -> None:
    lab.queue("train.lr@set=0.2", reason='say "no",\nthen go')
    lab("run")
    out = lab("query", "SELECT n, reason, parent, n FROM runs ORDER BY n", "--csv").out
    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["n", "reason", "parent", "n_2"]
    assert rows[2][1] == 'say "no",\nthen go'
    assert rows[1][2] == ""
    assert len(rows) == 3


@pytest.mark.slow
def test_a_mistake_in_the_question_names_the_views(lab) -> None:
    lab("run")
    done = lab("query", "SELECT objectiv FROM runs", code=2)
    assert '"objectiv" not found' in done.err
    assert all(view in done.err for view in VIEWS)
    assert len(done.err.splitlines()) == 1
    assert "query takes SELECT" in lab("query", "COPY runs TO 'out.csv'", code=2).err
    assert not (lab.folder / "out.csv").exists()
    assert "not both" in lab("query", "SELECT 1", "--json", "--csv", code=2).err


@pytest.mark.slow
def test_a_question_cannot_read_files_outside_of_the_lab_s_tables(lab) -> None:
    lab("run")
    (lab.aside / "secret.txt").write_text("a secret")
    done = lab("query", f"SELECT content FROM read_text('{lab.aside}/secret.txt')", code=2)
    assert "a secret" not in done.out + done.err
    assert "Permission" in done.err


def test_before_the_first_run_there_is_nothing_to_ask(lab) -> None:
    assert "no ledger yet" in lab("query", "SELECT * FROM runs", code=2).err
    assert "no ledger yet" in lab("export", "--csv", "out", code=2).err
    assert not (lab.folder / ".looplab" / "ledger.db").exists()


@pytest.mark.slow
def test_export_writes_a_file_for_each_view(lab) -> None:
    lab("run")
    told = lab("export", "--csv", "out", "--parquet", lab.aside / "out", "--json").json()
    assert [(file["view"], Path(file["path"]).suffix) for file in told] == [
        (view, suffix) for suffix in (".csv", ".parquet") for view in VIEWS
    ]
    assert {file["view"]: file["rows"] for file in told}["metrics"] == 3
    assert len((lab.folder / "out/metrics.csv").read_text().splitlines()) == 4
    assert sorted(path.stem for path in (lab.aside / "out").iterdir()) == sorted(VIEWS)
    assert "metrics" in lab("export", "--csv", "out").out
    assert "--csv DIR or --parquet DIR" in lab("export", code=2).err
    assert "no study" in lab("export", "--csv", "out", "--study", "other", code=2).err


# -- in Python


@pytest.mark.slow
def test_load_gives_data_frames(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.queue("train.lr@set=0.2")
    lab("run")
    loaded = load(lab=lab.folder)
    assert list(loaded.runs["status"]) == ["ok", "ok"]
    curve = loaded.metrics.pivot_table(index="step", columns="run", values="value")
    assert curve.shape == (3, 2)
    lr = loaded.knobs[loaded.knobs["key"] == "train.lr"].set_index("run")["number"]
    joined = loaded.runs.set_index("id").join(lr)
    assert dict(zip(joined["number"], joined["objective"].round(3), strict=True)) == {0.1: 0.533, 0.2: 0.433}
    assert len(loaded.proposals) == 1
    assert len(loaded.verdicts) == 0
    assert "ended" in set(loaded.events["kind"])
    assert str(lab.folder) in repr(loaded)
    monkeypatch.chdir(lab.runs()[0])
    assert len(load("toy").runs) == 2
    with pytest.raises(LabError, match="no study"):
        load("other")


def test_load_without_pandas_says_what_is_missing(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LabError, match="needs pandas"):
        load(lab=lab.folder)
