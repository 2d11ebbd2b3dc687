"""`metrics.parquet`: complete metrics of a run, and errors in the background archiver."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.base import Curve
from looplab.report import archive
from looplab.report.archive import Archiver, archive_run, as_table, column, is_archive


def make_study(**measure: Any) -> StudyConfig:
    return StudyConfig.model_validate({"study": "toy", "launch": {"command": ["true"]}, "measure": measure})


def make_run(folder: Path, *rows: dict[str, Any] | str) -> Path:
    (folder / "record").mkdir(parents=True)
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def read(path: Path | None) -> list[tuple[str, float, float]]:
    assert path is not None
    return [(row["metric"], row["step"], row["value"]) for row in pq.read_table(path).to_pylist()]


def test_an_archive_holds_every_point_in_the_order_in_which_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3, "acc": 0.1}, {"step": 2, "loss": 2}, {"step": 2, "loss": 5})
    path = archive_run(run, make_study())
    assert path == run / "record/metrics.parquet"
    assert sorted(read(path)) == [("acc", 1, 0.1), ("loss", 1, 3), ("loss", 2, 2), ("loss", 2, 5)]
    assert [value for metric, _, value in read(path) if metric == "loss"] == [3, 2, 5]
    meta = pq.read_metadata(path)
    assert [meta.schema.column(i).name for i in range(3)] == ["metric", "step", "value"]
    assert {meta.row_group(0).column(i).compression for i in range(3)} == {"ZSTD"}
    assert pa.types.is_dictionary(pq.read_schema(path).field("metric").type)


def test_nan_and_infinities_stay_what_they_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", '{"step": 1, "loss": NaN}\n', '{"step": 2, "loss": "Infinity"}\n')
    values = [value for _, _, value in read(archive_run(run, make_study()))]
    assert math.isnan(values[0])
    assert values[1] == math.inf


def test_all_sources_of_a_run_go_into_its_archive_under_their_canonical_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "l": 3})
    (run / "progress.csv").write_text("step,acc\n1,0.5\n")
    (run / "trainer_summary.json").write_text('{"metrics": {"success": 0.25}}')
    points = read(archive_run(run, make_study(aliases={"loss": ["l"]})))
    assert {metric for metric, _, _ in points} == {"loss", "acc", "success"}


def test_a_last_line_without_its_newline_counts_since_the_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3}, '{"step": 2, "loss": 2}')
    assert [step for _, step, _ in read(archive_run(run, make_study()))] == [1, 2]


def test_where_nothing_was_measured_there_is_no_archive(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    assert archive_run(run, make_study()) is None
    assert archive_run(tmp_path / "not there", make_study()) is None
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["metrics.jsonl"]


def test_an_archive_outlives_the_files_it_was_made_from(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3})
    archive_run(run, make_study())
    (run / "metrics.jsonl").unlink()
    assert archive_run(run, make_study()) is None
    assert read(run / "record/metrics.parquet") == [("loss", 1, 3)]


def test_an_archive_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3})
    archive_run(run, make_study())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 2}\n')
    assert len(read(archive_run(run, make_study()))) == 2
    assert [path.name for path in (run / "record").iterdir()] == ["metrics.parquet"]


def test_a_file_of_that_name_which_the_trainer_wrote_is_never_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3})
    places = run / "metrics.parquet", run / "record/metrics.parquet"
    pq.write_table(pa.table({"mine": [1]}), places[0])
    before = places[0].read_bytes()
    assert archive_run(run, make_study()) == places[1]
    assert places[0].read_bytes() == before
    places[1].write_bytes(before)
    with pytest.raises(LabError, match="not written by looplab"):
        archive_run(run, make_study())
    assert places[1].read_bytes() == before


def test_half_an_archive_is_not_taken_for_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3})
    path = archive_run(run, make_study())
    assert path is not None
    assert is_archive(path)
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-1], whole[: len(whole) // 2], b"\xff\xff\xff\x7fPAR1"):
        path.write_bytes(content)
        assert not is_archive(path)
    assert not is_archive(run / "nothing")
    assert archive.unarchived([run, tmp_path / "not there"]) == [run]


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.dictionaries(st.text(), st.lists(st.tuples(numbers, numbers))))
def test_any_curves_come_back_from_a_table_as_they_were(points: dict[str, list[tuple[float, float]]]) -> None:
    batch = {name: Curve([s for s, _ in pairs], [v for _, v in pairs]) for name, pairs in points.items()}
    rows = as_table(batch).to_pylist()
    expected = [(name, step, value) for name, pairs in points.items() for step, value in pairs]
    assert repr([(row["metric"], row["step"], row["value"]) for row in rows]) == repr(expected)


@given(
    st.lists(st.none() | st.text()),
    st.lists(st.none() | numbers),
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)),
)
def test_a_column_keeps_its_values_and_what_is_missing(
    texts: list[str | None], reals: list[float | None], integers: list[int | None]
) -> None:
    assert column(texts, "TEXT").to_pylist() == texts
    assert repr(column(reals, "REAL").to_pylist()) == repr(reals)
    assert column(integers, "INTEGER").to_pylist() == integers


def test_half_a_surrogate_pair_in_a_name_does_no_harm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", '{"step": 1, "lo\\ud800ss": 3}\n')
    assert read(archive_run(run, make_study())) == [("lo\ufffdss", 1, 3)]


# -- in the background


def test_the_archiver_has_archived_all_runs_when_it_is_closed(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), {"step": n, "loss": n}) for n in range(20)]
    problems: list[str] = []
    archiver = Archiver(make_study(), problems.append)
    for run in runs:
        archiver.submit(run)
    archiver.close()
    assert [read(run / "record/metrics.parquet") for run in runs] == [[("loss", n, n)] for n in range(20)]
    assert problems == []


def test_errors_are_reported_and_the_next_run_is_archived(tmp_path: Path) -> None:
    bad, good = (make_run(tmp_path / name, {"step": 1, "loss": 3}) for name in ("bad", "good"))
    (bad / "record/metrics.parquet").write_text("mine")
    reported: list[str] = []
    archiver = Archiver(make_study(), reported.append)
    archiver.submit(bad)
    archiver.submit(good)
    archiver.close()
    assert is_archive(good / "record/metrics.parquet")
    assert len(reported) == 1
    assert "run bad was not archived" in reported[0]


def test_pyarrow_is_imported_only_when_there_is_something_to_archive_and_pandas_never(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"step": 1, "loss": 3})
    script = f"""
import sys
from pathlib import Path
from looplab.config.lab import StudyConfig
from looplab.report.archive import Archiver
archiver = Archiver(StudyConfig.model_validate({{"study": "toy", "launch": {{"command": ["true"]}}}}), print)
before = "pyarrow" in sys.modules
archiver.submit(Path({str(run)!r}))
archiver.close()
print(before, "pyarrow" in sys.modules, "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
