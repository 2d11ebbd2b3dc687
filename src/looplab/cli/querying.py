"""query, export."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.errors import LabError


def query(folder: Path | None, sql: str, json: bool, csv: bool) -> None:
    from looplab.report import tables

    if json and csv:
        raise LabError("use --json or --csv, not both")
    lab = open_lab(folder)
    with tables.connect(lab, views=tables.views_of(sql)) as connection:
        answer = tables.ask(connection, sql)
    names = _distinct(answer.column_names)
    rows = list(zip(*(column.to_pylist() for column in answer.columns), strict=True))
    if json:
        output.print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif csv:
        _print_csv(names, rows)
    else:
        output.table(names, [[_cell(value) for value in row] for row in rows])


def export(folder: Path | None, csv: Path | None, parquet: Path | None, study: str | None, json: bool) -> None:
    from looplab.report import export as exporting

    if csv is None and parquet is None:
        raise LabError("no destination given", hint="--csv DIR or --parquet DIR")
    lab = open_lab(folder)
    written: list[exporting.Exported] = []
    if csv is not None:
        written += exporting.export(lab, csv, "csv", study)
    if parquet is not None:
        written += exporting.export(lab, parquet, "parquet", study)
    if json:
        output.print_json([{"view": file.view, "path": str(file.path), "rows": file.rows} for file in written])
    else:
        output.table(("view", "rows", "file"), [(file.view, str(file.rows), str(file.path)) for file in written])


def _distinct(names: list[str]) -> list[str]:
    """Number columns of the same name, so that each is a distinct key."""
    counts: Counter[str] = Counter()
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return distinct


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.10g}"
    return " ".join((output.cell(value) if isinstance(value, list | dict) else str(value)).splitlines())


def _print_csv(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    import csv

    from looplab.report.export import without_formula

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(without_formula, names))
    writer.writerows(map(without_formula, row) for row in rows)
