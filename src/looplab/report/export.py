"""Export the tables of a lab: one CSV or Parquet file per view."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.lab import LabConfig
from looplab.errors import LabError
from looplab.report.tables import VIEWS, connect

if TYPE_CHECKING:
    import pyarrow as pa

Form = Literal["csv", "parquet"]
BATCH_ROWS = 100_000
FORMULA = r"^[=+\-@\t\r]"
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True, slots=True)
class Exported:
    """One exported view."""

    view: str
    path: Path
    rows: int


def export(lab: LabConfig, folder: Path, form: Form, study: str | None = None) -> list[Exported]:
    """Write every view to the folder, each file atomically; existing files are replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with connect(lab, study=study) as connection:
            return [
                Exported(view, path, _write(connection.sql(f"FROM {view}").to_arrow_reader(BATCH_ROWS), path, form))
                for view in VIEWS
                for path in [folder / f"{view}.{form}"]
            ]
    except OSError as error:
        raise LabError(f"cannot write: {error.strerror or error}", file=error.filename or folder) from error


def _write(reader: pa.RecordBatchReader, path: Path, form: Form) -> int:
    """Write in batches, so that memory does not grow with the lab; return the number of rows."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    rows = 0
    try:
        with _writer(temporary, form, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(_without_formulas(batch) if form == "csv" else batch)
                rows += batch.num_rows
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _without_formulas(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Prefix texts that a spreadsheet would evaluate with `'`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = []
    for column in batch.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found = pc.and_(
                pc.match_substring_regex(column, FORMULA), pc.invert(pc.match_substring_regex(column, NUMBER))
            )
            if pc.any(found).as_py():
                column = pc.if_else(found, pc.binary_join_element_wise("'", column, ""), column).cast(column.type)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def without_formula(value: Any) -> Any:
    """Return a value for a CSV file; a text that a spreadsheet would evaluate gets the prefix `'`."""
    is_formula = isinstance(value, str) and re.match(FORMULA, value) and not re.match(NUMBER, value)
    return f"'{value}" if is_formula else value


def _writer(path: Path, form: Form, schema: pa.Schema) -> Any:
    if form == "csv":
        from pyarrow import csv

        return csv.CSVWriter(path, schema)
    from pyarrow import parquet

    return parquet.ParquetWriter(path, schema, compression="zstd")
