"""A lab as SQL tables: runs, metrics, proposals, verdicts, knobs and events of all its studies; stages, suites and
cases of its pipelines; versions of its code.

The ledger is read once, as a snapshot. Archives of metrics are read in place, when a query needs them; runs without an
archive are read from the trainer's files. A connection can read nothing else on the machine, and `ask` accepts only
queries.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from looplab.config import paths
from looplab.config.lab import LabConfig
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger, open_for_reading
from looplab.report import archive
from looplab.runs import clock, folder

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_ORDER = {"runs": "study, n", "proposals": "id", "verdicts": "study, at", "events": "seq", "stages": "began",
          "suites": "began", "cases": "began", "versions": "version, attempt"}  # fmt: skip
LEDGER_VIEWS = tuple(_ORDER)
VIEWS = ("runs", "metrics", "proposals", "verdicts", "knobs", "events", "stages", "suites", "cases", "versions")

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "temp_directory": "",
}
_LOCKED = ("python_enable_replacements=false", "enable_external_access=false", "lock_configuration=true")


class _Run(NamedTuple):
    """What is needed to find the files of a run."""

    study: str
    id: str
    state: str
    folder: Path
    config_hash: str
    config: str | None
    """JSON; None for a run of an early version of looplab, whose config is only in its folder."""


def connect(lab: LabConfig, *, views: Collection[str] = VIEWS, study: str | None = None) -> duckdb.DuckDBPyConnection:
    """Return a DuckDB connection with these views of one study, or of all (None), as of now."""
    import duckdb

    tables, runs = _read_ledger(lab, study, with_configs="knobs" in views)
    connection = duckdb.connect(":memory:", config=_CONFIG)
    for view in LEDGER_VIEWS:
        if view in views:
            _add(connection, view, tables[view])
    if "knobs" in views:
        _add(connection, "knobs", _knobs(lab, runs))
    archives = _add_metrics(connection, lab, runs) if "metrics" in views else []
    _lock(connection, archives)
    return connection


def _lock(connection: duckdb.DuckDBPyConnection, readable: Sequence[str] = ()) -> None:
    """Restrict the connection permanently to reading these files and memory."""
    allowed = ", ".join(_literal(path) for path in readable)
    for setting in (f"allowed_paths=[{allowed}]", *_LOCKED):
        connection.execute(f"SET {setting}")


def ask(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    """Run one query; raise LabError if it is not a query or fails."""
    import duckdb

    try:
        _check(connection, sql)
        return connection.sql(sql).to_arrow_table()
    except duckdb.Error as error:
        raise LabError(_short(error), hint=f"tables: {', '.join(VIEWS)}; `describe runs` shows columns") from None


def views_of(sql: str) -> tuple[str, ...]:
    """Return the views that a query names; all of them if that cannot be determined."""
    import duckdb

    with closing(duckdb.connect(":memory:", config=_CONFIG)) as connection:
        _lock(connection)
        try:
            named = connection.get_table_names(sql)
        except duckdb.Error:
            return VIEWS
    found = tuple(view for view in VIEWS if view in {name.lower() for name in named})
    return found or VIEWS


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise LabError unless this is a single read-only query."""
    from duckdb import StatementType

    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise LabError("one statement at a time" if statements else "empty query", hint="write one SELECT")
    kind = statements[0].type
    if kind == StatementType.SELECT or (kind == StatementType.MULTI and _is_pivot(connection, sql)):
        return
    raise LabError(f"{kind.name} is not a query", hint="query takes SELECT and the like; other commands change a lab")


def _is_pivot(connection: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Return whether this is a PIVOT. COPY and CREATE of a PIVOT have the same type, but only it replaces a table."""
    import duckdb

    try:
        connection.extract_statements(f"FROM (\n{sql.rstrip().rstrip(';')}\n)")
    except duckdb.ParserException:
        return False
    return True


def _short(error: Exception) -> str:
    """Return the message of DuckDB without the excerpt of the statement."""
    text = str(error).split("\n\nLINE ")[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _add(connection: duckdb.DuckDBPyConnection, name: str, table: pa.Table) -> None:
    """Copy the rows, so that queries do not call back into Python."""
    connection.register("_copied", table)
    connection.execute(f"CREATE TABLE {name} AS FROM _copied")
    connection.unregister("_copied")


# -- the ledger


def _read_ledger(lab: LabConfig, study: str | None, with_configs: bool) -> tuple[dict[str, pa.Table], list[_Run]]:
    """Return the tables of the ledger and its runs, from one snapshot."""
    path = lab.ledger_path
    configs: dict[str, str] = {}
    try:
        with closing(open_for_reading(path)) as db, db.snapshot():
            _check_study(db, lab, study)
            tables = {name: _read_table(db, name, study) for name in LEDGER_VIEWS}
            if with_configs:
                configs = {row["hash"]: row["body"] for row in db.rows("SELECT hash, body FROM configs")}
    except sqlite3.DatabaseError as error:
        raise LabError(
            f"cannot read the ledger: {error}",
            file=path,
            hint="`looplab reindex` rebuilds a damaged ledger",
        ) from error
    runs = [
        _Run(
            row["study"],
            row["id"],
            row["state"],
            Path(os.path.abspath(folder.study_folder(lab.folder, row["study"]) / row["id"])),
            row["config_hash"],
            configs.get(row["config_hash"]),
        )
        for row in tables["runs"].select(["study", "id", "state", "config_hash"]).to_pylist()
    ]
    tables["runs"] = _with_folder(tables["runs"], runs)
    return tables, runs


def _check_study(db: Ledger, lab: LabConfig, study: str | None) -> None:
    """Raise LabError if the study is unknown; one that was removed from the lab file is known by its runs."""
    if study is not None and not db.execute("SELECT 1 FROM runs WHERE study=? LIMIT 1", (study,)).fetchone():
        lab.study(study)


def _read_table(db: Ledger, name: str, study: str | None) -> pa.Table:
    import pyarrow as pa

    kinds = {row[1]: row[2] for row in db.execute(f"PRAGMA table_info({name})")}
    sql = f"SELECT * FROM {name} WHERE ? IS NULL OR study=? ORDER BY {_ORDER[name]}"  # noqa: S608 (fixed texts)
    rows = db.execute(sql, (study, study)).fetchall()
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(kinds)
    arrays = [archive.column(column, kind) for column, kind in zip(columns, kinds.values(), strict=True)]
    return pa.Table.from_arrays(arrays, list(kinds))


def _with_folder(table: pa.Table, runs: Sequence[_Run]) -> pa.Table:
    """Add columns for the duration of each run so far, in seconds, and its folder."""
    now = clock.now()
    began, ended = table["started"].to_pylist(), table["ended"].to_pylist()
    seconds = [None if b is None else max(0.0, (e or now) - b) for b, e in zip(began, ended, strict=True)]
    table = table.append_column("seconds", archive.column(seconds, "REAL"))
    return table.append_column("folder", archive.column([str(run.folder) for run in runs], "TEXT"))


# -- metrics


def _add_metrics(connection: duckdb.DuckDBPyConnection, lab: LabConfig, runs: Sequence[_Run]) -> list[str]:
    """Create the view over archives and other runs; return the paths that it must be able to read."""
    archives: list[str] = []
    live: list[_Run] = []
    for run in runs:
        path = folder.record_file(run.folder, archive.NAME)
        if run.state == "ended" and archive.is_archive(path):
            archives.append(str(path))
        elif run.state != "planned" and run.folder.is_dir():
            live.append(run)
    connection.execute("CREATE SCHEMA live")
    _add(connection, "live.metrics", _read_live(lab, live))
    sql = "SELECT study, run, metric, step, value FROM live.metrics"
    if archives:
        patterns = [_escape_glob(path) for path in archives]
        listed = ", ".join(map(_literal, patterns))
        location = f"replace(filename, '/{folder.RECORD}/{archive.NAME}', '/{archive.NAME}')"
        names = f"split_part({location}, '/', -3), split_part({location}, '/', -2)"
        sql += f" UNION ALL SELECT {names}, metric, step, value FROM read_parquet([{listed}], filename=true)"  # noqa: S608
        archives += [pattern for pattern in patterns if "[" in pattern]
    connection.execute(f"CREATE VIEW metrics AS {sql}")
    return archives


def _escape_glob(path: str) -> str:
    """Escape the glob characters of a path."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def _read_live(lab: LabConfig, runs: Sequence[_Run]) -> pa.Table:
    """Read the points of runs without an archive from the trainers' files."""
    import pyarrow as pa

    parts = [_with_names("", "", archive.as_table({}))]
    for run in runs:
        measured = archive.measured(run.folder, lab.studies.get(run.study), final=run.state == "ended")
        points = archive.as_table(measured)
        parts.append(_with_names(run.study, run.id, points))
    return pa.concat_tables(parts)


def _with_names(study: str, run: str, points: pa.Table) -> pa.Table:
    import pyarrow as pa

    zeros = pa.Array.from_buffers(pa.int32(), len(points), [None, pa.py_buffer(bytes(4 * len(points)))])
    names = [pa.DictionaryArray.from_arrays(zeros, archive.column([name], "TEXT")) for name in (study, run)]
    return pa.Table.from_arrays([*names, *points.columns], ["study", "run", *points.column_names])


# -- knobs


def _knobs(lab: LabConfig, runs: Sequence[_Run]) -> pa.Table:
    """Return the leaves of each run's config that are knobs, or that differ from the base in any run of the study.

    So every run has a value for each key that one of them changed.
    """
    import pyarrow as pa

    configs: dict[str, list[tuple[str, dict[paths.Concrete, Any]]]] = {}
    changed: dict[str, set[str]] = {}
    for run in runs:
        try:
            config = json.loads(run.config) if run.config else folder.read_config_of(run.folder, run.config_hash)
            diff = folder.read_changes(folder.require(run.folder))
        except LabError:  # it has no folder yet, or its folder was changed
            continue
        configs.setdefault(run.study, []).append((run.id, dict(paths.leaves(config))))
        changed.setdefault(run.study, set()).update(diff.get("base", {}))
    columns: dict[str, list[Any]] = {"study": [], "run": [], "key": [], "value": [], "number": []}
    for study, configs_of_study in configs.items():
        patterns = list(lab.studies[study].knobs) if study in lab.studies else []
        names: dict[paths.Concrete, str | None] = {}
        for run_id, leaves in configs_of_study:
            for key, value in _selected_leaves(leaves, patterns, changed[study], names):
                columns["study"].append(study)
                columns["run"].append(run_id)
                columns["key"].append(key)
                columns["value"].append(_as_text(value))
                columns["number"].append(_as_float(value))
    arrays = [archive.column(values, "REAL" if name == "number" else "TEXT") for name, values in columns.items()]
    return pa.Table.from_arrays(arrays, list(columns))


def _selected_leaves(
    leaves: dict[paths.Concrete, Any],
    patterns: Sequence[str],
    changed: Collection[str],
    names: dict[paths.Concrete, str | None],
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves that are listed; `names` caches the name of each path, None if it is not listed."""
    for place, value in leaves.items():
        if place not in names:
            key = paths.show(place)
            is_listed = key in changed or any(paths.matches(pattern, place) for pattern in patterns)
            names[place] = key if is_listed else None
        if (name := names[place]) is not None:
            yield name, value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
