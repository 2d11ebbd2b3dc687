"""The tables of a lab as files that other programs read: one CSV or Parquet file a view."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.lab import Lab
from looplab.errors import LabError
from looplab.report.tables import VIEWS, connect

if TYPE_CHECKING:
    import pyarrow as pa

Form = Literal["csv", "parquet"]
BATCH_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Exported:
    """One view that was written."""

    view: str
    path: Path
    rows: int


def export(lab: Lab, folder: Path, form: Form, study: str | None = None) -> list[Exported]:
    """Write every view into the folder, each file whole; a file of the same name is replaced."""
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
    """Batch by batch, so that memory does not grow with the lab; gives the number of rows."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    rows = 0
    try:
        with _writer(temporary, form, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
                rows += batch.num_rows
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _writer(path: Path, form: Form, schema: pa.Schema) -> Any:
    if form == "csv":
        from pyarrow import csv

        return csv.CSVWriter(path, schema)
    from pyarrow import parquet

    return parquet.ParquetWriter(path, schema, compression="zstd")
