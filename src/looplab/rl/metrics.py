"""The metrics of a reinforcement learning run: every field, its meaning, and the writer of the rows.

`SCHEMA` declares the fields that every run may have. A recipe declares its own with `MetricField` and passes them as
`extra_fields`; a row with any other field is refused. A sum or mean covers the steps since the previous row. A field
that was not measured is missing from its row; it is never 0 instead. docs/metrics-schema.md is generated:

    python -m looplab.rl.metrics > docs/metrics-schema.md
"""

from __future__ import annotations

import importlib
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from looplab.errors import LabError
from looplab.trainkit.atomic import atomic_write
from looplab.trainkit.log import Logger

SCHEMA_VERSION = 1
"""Incremented when a field is added or changes its meaning."""
PHASE_TIMES = ("collect_ms", "learn_ms", "replay_ms", "checkpoint_ms")
"""Time spent in each phase of an update."""
PARQUET_BATCH_ROWS = 20_000
"""Rows in memory at once while a Parquet file is written."""

Stream = Literal["metrics", "monitor", "both"]
Reduction = Literal["sum", "count", "mean", "max", "last", "episode_max"]


@dataclass(frozen=True)
class MetricField:
    """One field of a metrics row.

    A field with `info` is filled by the runner from the infos of the envs.
    """

    name: str
    type: Literal["int", "float", "bool"]
    unit: str
    """Empty for a plain number."""
    meaning: str
    """One sentence for the documentation."""
    since: int = 1
    """Version of the schema that added the field."""
    exact: bool = True
    """Whether a repeated run returns the same value; False if it depends on the clock or the machine."""
    stream: Stream = "metrics"
    """File that contains the field."""
    info: str | None = None
    """Key in the envs' infos that the field is computed from."""
    reduce: Reduction = "last"
    """How the values of `info` in all envs since the previous row become one number.

    "count" counts the steps that have the key; "last" takes the last such step, and of its envs the last; "episode_max"
    takes the maximum of each episode and averages over the episodes that ended.
    """


def _wall_clock(name: str, unit: str, meaning: str, stream: Stream = "metrics") -> MetricField:
    return MetricField(name, "float", unit, meaning, exact=False, stream=stream)


SCHEMA: tuple[MetricField, ...] = (
    MetricField("step", "int", "", "Global step; in the monitor's file the index of the sample.", stream="both"),
    _wall_clock("time", "s", "When the row was written, as Unix time.", "both"),
    MetricField("global_step", "int", "transitions", "Transitions learned from so far, over all envs."),
    MetricField("global_update", "int", "updates", "Rollouts learned from so far."),
    MetricField("episodes", "int", "episodes", "Episodes that ended since the previous row; episode_* cover these."),
    MetricField("episode_return_mean", "float", "reward", "Mean undiscounted return, including any reward shaping."),
    MetricField("episode_return_max", "float", "reward", "Highest undiscounted return."),
    MetricField("episode_length_mean", "float", "steps", "Mean episode length."),
    MetricField("env_restarts", "int", "episodes", "Episodes truncated because their worker was lost and could not be "
                "replayed.", info="worker_restarted", reduce="count"),
    MetricField("worker_restarts", "int", "restarts", "Workers lost and replaced since the run began.",
                exact=False),
    MetricField("policy_loss", "float", "", "Mean policy loss."),
    MetricField("value_loss", "float", "", "Mean squared error of the value function."),
    MetricField("entropy", "float", "nat", "Mean entropy of the policy."),
    MetricField("grad_norm", "float", "", "Gradient norm before clipping."),
    MetricField("approx_kl", "float", "nat", "Estimated KL divergence between behaviour policy and learner."),
    MetricField("clip_fraction", "float", "", "Fraction of transitions whose probability ratio was clipped."),
    MetricField("explained_variance", "float", "", "1: the values explain the returns; 0 or below: they do not."),
    MetricField("early_stop", "bool", "", "Whether the update stopped early because the KL divergence was too large."),
    MetricField("replay_policy_loss", "float", "", "Policy loss on replayed transitions."),
    MetricField("replay_value_loss", "float", "", "Value loss on replayed transitions."),
    MetricField("replay_size", "int", "entries", "Entries in the replay."),
    MetricField("replay_beta", "float", "", "Exponent of the importance-sampling weights, from 0 to 1."),
    MetricField("replay_priority_mean", "float", "", "Mean priority, before alpha, of up to 65,536 spaced entries."),
    MetricField("replay_priority_p50", "float", "", "Median of these priorities."),
    MetricField("replay_priority_p90", "float", "", "90th percentile of these priorities."),
    MetricField("replay_priority_p99", "float", "", "99th percentile of these priorities."),
    MetricField("replay_last_unique_ratio", "float", "", "Distinct entries in the last batch, divided by its size."),
    MetricField("replay_avg_unique_ratio", "float", "", "Mean of this ratio over all batches so far."),
    _wall_clock("replay_sample_time_ms", "ms", "Mean time to sample a batch."),
    _wall_clock("collect_ms", "ms", "Time spent waiting for rollouts."),
    _wall_clock("learn_ms", "ms", "Time spent learning from rollouts."),
    _wall_clock("replay_ms", "ms", "Time spent on the replay: pushing, sampling, learning."),
    _wall_clock("checkpoint_ms", "ms", "Time that saving blocked the training."),
    _wall_clock("steps_per_second", "1/s", "Transitions per second since this process started training."),
    MetricField("model_compiled", "bool", "", "Whether the policy is compiled by torch.compile."),
    _wall_clock("gpu_util_last", "%", "Last GPU utilization, mean of the visible devices; missing without a GPU."),
    _wall_clock("gpu_util_mean_window", "%", "Mean of the last GPU utilization samples; missing without a GPU."),
    _wall_clock("cpu_percent", "%", "CPU utilization of the machine since the previous sample.", "monitor"),
    _wall_clock("process_cpu_percent", "%", "CPU utilization of the trainer process; 100 is one core.", "monitor"),
    _wall_clock("process_rss_mb", "MB", "Resident memory of the trainer process.", "monitor"),
    _wall_clock("ram_used_mb", "MB", "Memory of the machine that is not available.", "monitor"),
    _wall_clock("ram_total_mb", "MB", "Memory of the machine.", "monitor"),
    _wall_clock("load_1m", "", "Load average over one minute.", "monitor"),
    _wall_clock("gpu_util", "%", "GPU utilization, mean of the visible devices; missing without a GPU.", "monitor"),
    _wall_clock("gpu_memory_used_mb", "MB", "Memory in use on the visible devices.", "monitor"),
    _wall_clock("gpu_memory_total_mb", "MB", "Memory of the visible devices.", "monitor"),
)  # fmt: skip

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How the logger writes numbers that JSON does not have."""


def fields_by_name(extra_fields: Sequence[MetricField] = ()) -> dict[str, MetricField]:
    """Return the schema and the extra fields by name; LabError if a name is declared twice."""
    fields: dict[str, MetricField] = {}
    for field in (*SCHEMA, *extra_fields):
        if field.name in fields:
            raise LabError(
                f"the metric {field.name!r} is declared twice", hint="choose another name for your own field"
            )
        fields[field.name] = field
    return fields


def check_row(row: Mapping[str, Any], fields: Mapping[str, MetricField] | None = None) -> None:
    """Raise LabError if a row has an undeclared field or a value of the wrong type.

    Args:
        row: Values by field name; None is allowed for every field.
        fields: Declared fields by name, see `fields_by_name`; None for the schema alone.
    """
    declared = _SCHEMA_FIELDS if fields is None else fields
    for name, value in row.items():
        field = declared.get(name)
        if field is None:
            raise LabError(
                f"{name!r} is not a declared metric (schema {SCHEMA_VERSION})",
                hint=f"declare it: MetricsWriter(…, extra_fields=[MetricField({name!r}, type, unit, meaning)])",
            )
        if value is not None and not _has_type(field, value):
            raise LabError(f"{name} must be of type {field.type}, not {value!r}")


_SCHEMA_FIELDS = fields_by_name()


def _has_type(field: MetricField, value: Any) -> bool:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return False
    if field.type == "bool":
        return value in (0, 1)
    return field.type == "float" or float(value).is_integer()


class MetricsWriter:
    """Writes rows to metrics.jsonl and, if enabled, to TensorBoard and W&B."""

    def __init__(
        self,
        logger: Logger,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        wandb: Mapping[str, Any] | None = None,
        extra_fields: Sequence[MetricField] = (),
    ) -> None:
        """
        Args:
            logger: Logger of metrics.jsonl.
            tensorboard: Folder for TensorBoard events; None disables them.
            wandb: Arguments of `wandb.init`; None disables W&B.
            extra_fields: Fields of the recipe, beyond the schema.
        """
        self.logger = logger
        self.fields = fields_by_name(extra_fields)
        self._tensorboard_dir = None if tensorboard is None else os.fspath(tensorboard)
        self._summary_writer_class = None if tensorboard is None else import_summary_writer()
        self._summary_writer: Any = None
        self._wandb_run = None if wandb is None else _import_wandb().init(**wandb)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Check a row and write it everywhere."""
        check_row(row, self.fields)
        self.logger.log(row, step=step)
        measured = {name: float(value) for name, value in row.items() if value is not None}
        if self._summary_writer_class is not None:
            if self._summary_writer is None:  # purge_step hides what a killed run wrote after its last checkpoint
                self._summary_writer = self._summary_writer_class(self._tensorboard_dir, purge_step=step)
            for name, value in measured.items():
                self._summary_writer.add_scalar(name, value, step)
        if self._wandb_run is not None:
            self._wandb_run.log(measured, step=step)

    def close(self) -> None:
        self.logger.close()
        if self._summary_writer is not None:
            self._summary_writer.close()
        if self._wandb_run is not None:
            self._wandb_run.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def import_summary_writer() -> Any:
    """Return the class that writes TensorBoard's event files, of torch or of tensorboardX.

    Raises:
        LabError: Neither is installed.
    """
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(name).SummaryWriter
        except ImportError:
            pass
    raise LabError("TensorBoard is not installed", hint="pip install tensorboard")


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise LabError("W&B is not installed", hint="pip install 'looplab[wandb]'") from error
    return wandb


def read_rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics or monitor file, without lines that a kill has left incomplete."""
    import orjson

    with open(path, "rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def exact_rows(path: str | os.PathLike[str], extra_fields: Sequence[MetricField] = ()) -> list[dict[str, Any]]:
    """Return the rows without the fields that depend on the clock or the machine.

    An exact repetition of a run has equal rows.
    """
    inexact = {field.name for field in (*SCHEMA, *extra_fields) if not field.exact}
    return [{name: value for name, value in row.items() if name not in inexact} for row in read_rows(path)]


def to_parquet(
    jsonl: str | os.PathLike[str], target: str | os.PathLike[str], extra_fields: Sequence[MetricField] = ()
) -> int:
    """Convert a metrics or monitor file to Parquet, atomically, and return the number of rows.

    The same input returns the same bytes. Columns are the fields that occur, in the order of their declaration.
    Undeclared fields follow in alphabetical order, as floats, or as strings if they contain anything but numbers.
    """
    if not Path(jsonl).exists():
        raise LabError("there are no metrics to convert", file=jsonl)
    import pyarrow as pa

    declared = {field.name: field.type for field in (*SCHEMA, *extra_fields)}
    arrow_types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
    columns: dict[str, str] = {}
    for row in read_rows(jsonl):
        for name, value in row.items():
            kind: str = declared.get(name, "float")
            if name not in declared and not (value is None or isinstance(value, int | float) or value in _NON_FINITE):
                kind = "text"
            elif kind == "int" and isinstance(value, float) and not value.is_integer():
                kind = "float"  # the logger allows fractional steps
            columns[name] = _common_type(columns.get(name), kind)
    order = [name for name in declared if name in columns] + sorted(columns.keys() - declared.keys())
    schema = pa.schema(
        [(name, arrow_types[columns[name]]) for name in order],
        metadata={"looplab.metrics.schema": str(SCHEMA_VERSION)},
    )
    count = 0

    def write(file: BinaryIO) -> None:
        nonlocal count
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            rows = read_rows(jsonl)
            while batch := list(islice(rows, PARQUET_BATCH_ROWS)):
                arrays = [
                    pa.array([_to_type(row.get(field.name), columns[field.name]) for row in batch], field.type)
                    for field in schema
                ]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
                count += len(batch)

    atomic_write(target, write)
    return count


def _common_type(one: str | None, other: str) -> str:
    """Return the narrowest column type that holds both."""
    if one is None or one == other:
        return other
    return "text" if "text" in (one, other) else "float"


def _to_type(value: Any, column_type: str) -> Any:
    """Return a value of a row as its column stores it; None if the column cannot."""
    if value is None:
        return None
    if column_type == "text":
        return str(value)
    number = value if isinstance(value, int | float) else _NON_FINITE.get(str(value))
    if number is None or column_type == "float":
        return number
    if not math.isfinite(number):
        return None
    return bool(number) if column_type == "bool" else int(number)


def render_docs() -> str:
    """Return the text of docs/metrics-schema.md."""
    lines = [
        "# Metrics of reinforcement learning", "",
        f"Schema version {SCHEMA_VERSION}, from `src/looplab/rl/metrics.py` by `python -m looplab.rl.metrics`.",
        "", "A field that was not measured is missing from its row; it is never 0 instead. A sum or mean covers the",
        "steps since the previous row. Fields marked *clock* depend on the clock or the machine; all others are equal",
        "when a run is repeated.",
    ]  # fmt: skip
    for title, streams in (("metrics.jsonl", ("metrics", "both")), ("monitor.jsonl", ("monitor", "both"))):
        lines += ["", f"## {title}", "", "| field | type | unit | since | | meaning |", "|---|---|---|---|---|---|"]
        for field in SCHEMA:
            if field.stream in streams:
                clock = "" if field.exact else "*clock*"
                lines.append(
                    f"| `{field.name}` | {field.type} | {field.unit} | {field.since} | {clock} | {field.meaning} |"
                )
    lines += ["", EXTENDING.strip()]
    return "\n".join(lines) + "\n"


EXTENDING = """
## Fields of your own

These are the fields of every run. A recipe or trainer declares more, with name, type, unit and meaning; a row with an
undeclared field is refused. A field with `info` is computed by the runner from the infos of the envs; `reduce` is one
of `sum`, `count`, `mean`, `max`, `last` and `episode_max`. Other fields come from the runner's `extra_metrics`.

    from looplab import trainkit
    from looplab.rl.metrics import MetricField, MetricsWriter, to_parquet

    FIELDS = (
        MetricField("env_lap_time_mean", "float", "s", "Mean time of a lap.", info="lap_time", reduce="mean"),
        MetricField("track_temperature", "float", "°C", "Temperature of the track.", exact=False),
    )
    writer = MetricsWriter(trainkit.Logger("metrics.jsonl"), extra_fields=FIELDS)
    to_parquet("metrics.jsonl", "metrics.parquet", extra_fields=FIELDS)

Recipes declare the metrics of their own games this way.
"""

if __name__ == "__main__":
    print(render_docs(), end="")
