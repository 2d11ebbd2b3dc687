"""The archive of a run: all metrics from its sources in one `metrics.parquet`, for fast queries.

Long form: `metric`, `step`, `value`, one row per point, in order of writing. The trainer's own files are unchanged and
remain the source of truth: a deleted archive is rebuilt from them.
"""

from __future__ import annotations

import queue
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.files import write_atomic
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.base import Batch
from looplab.measure.discover import Reader, reader_of
from looplab.runs.folder import is_linked, record_file
from looplab.untrusted import UntrustedError, open_regular

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "metrics.parquet"
_MARK = "looplab.metrics"
"""Key in the footer of our archives; distinguishes them from a trainer's file of the same name."""
_MAGIC = b"PAR1"
_FOOTER_LIMIT = 1 << 20


def measured(run_dir: Path, study: StudyConfig | None, *, final: bool) -> Batch:
    """Read all points of a run from its files; `final` as in `Source.poll`."""
    reader = Reader(run_dir) if study is None else reader_of(study, run_dir)
    return reader.poll(final)


def as_table(batch: Batch) -> pa.Table:
    """Return the points as an Arrow table of `metric`, `step` and `value`."""
    import pyarrow as pa

    curves = [(name, curve) for name, curve in batch.items() if curve.values]
    numbers = array("i")
    for number, (_, curve) in enumerate(curves):
        numbers.extend(array("i", [number]) * len(curve.values))
    indices = pa.Array.from_buffers(pa.int32(), len(numbers), [None, pa.py_buffer(numbers)])
    metric = pa.DictionaryArray.from_arrays(indices, column([name for name, _ in curves], "TEXT"))
    step = column([step for _, curve in curves for step in curve.steps], "REAL")
    value = column([value for _, curve in curves for value in curve.values], "REAL")
    return pa.Table.from_arrays([metric, step, value], ["metric", "step", "value"])


def column(values: Sequence[Any], kind: Literal["TEXT", "REAL", "INTEGER"]) -> pa.Array:
    """Return values of one type, some of them None, as an Arrow array.

    `pyarrow.array` would import pandas if it is installed, which costs more than everything else here.
    """
    import pyarrow as pa

    count = len(values)
    valid = None
    if None in values:
        bits = bytearray(-(-count // 8))
        for i, value in enumerate(values):
            if value is not None:
                bits[i >> 3] |= 1 << (i & 7)
        valid = pa.py_buffer(bytes(bits))
    if kind == "TEXT":
        # JSON may contain lone surrogates, UTF-8 may not.
        texts = [b"" if value is None else value.encode("utf-8", "replace") for value in values]
        ends = array("q", accumulate(map(len, texts), initial=0))
        buffers = [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
        return pa.Array.from_buffers(pa.large_string(), count, buffers)
    code, type_ = ("d", pa.float64()) if kind == "REAL" else ("q", pa.int64())
    filled = values if valid is None else [0 if value is None else value for value in values]
    return pa.Array.from_buffers(type_, count, [valid, pa.py_buffer(array(code, filled))])


def archive_run(run_dir: Path, study: StudyConfig) -> Path | None:
    """Write the archive of an ended run atomically; return its path, None if nothing was measured."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    batch = measured(run_dir, study, final=True)
    if not any(curve.values for curve in batch.values()):
        return None
    if is_linked(run_dir):
        raise LabError("is a link, and looplab does not write through links", file=run_dir)
    path = record_file(run_dir, NAME)
    if path.exists() and not is_archive(path):
        raise LabError("this file was not written by looplab and is not overwritten", file=path, hint="rename it")
    table = as_table(batch).replace_schema_metadata({_MARK: "1"})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=["metric"])
    write_atomic(path, sink.getvalue().to_pybytes(), sync=False)
    return path


def is_archive(path: Path) -> bool:
    """Return whether this is a complete archive of ours, judged by its footer."""
    try:
        with open_regular(path, follow=False) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 8))
            end = file.read(8)
            if len(end) < 8 or end[4:] != _MAGIC:
                return False
            length = int.from_bytes(end[:4], "little")
            if length > min(_FOOTER_LIMIT, size - 12):
                return False
            file.seek(size - 8 - length)
            return _MARK.encode() in file.read(length)
    except (OSError, UntrustedError):
        return False


class Archiver:
    """Archives runs one after the other in a background thread.

    Errors are passed to `tell`, never raised: a missing archive loses nothing.
    """

    def __init__(self, study: StudyConfig, tell: Callable[[str], None]) -> None:
        self._study = study
        self._tell = tell
        self._pool = ThreadPoolExecutor(1, "looplab-archive")
        self.archived: queue.SimpleQueue[Path] = queue.SimpleQueue()
        """Archives that are written and not yet recorded in the ledger."""

    def submit(self, run_dir: Path) -> None:
        """Queue a run for archiving."""
        self._pool.submit(archive_run, run_dir, self._study).add_done_callback(
            lambda done: self._record_outcome(run_dir, done)
        )

    def close(self) -> None:
        """Archive all queued runs and shut down."""
        self._pool.shutdown()

    def _record_outcome(self, run_dir: Path, done: Future[Path | None]) -> None:
        error = done.exception()
        if error is not None:
            self._tell(f"run {run_dir.name} was not archived: {error or type(error).__name__}")
        elif (path := done.result()) is not None:
            self.archived.put(path)


def unarchived(run_dirs: Iterable[Path]) -> list[Path]:
    """Return the run folders without an archive."""
    return [run_dir for run_dir in run_dirs if run_dir.is_dir() and not is_archive(record_file(run_dir, NAME))]
