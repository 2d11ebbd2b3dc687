"""The metrics of a reinforcement learning run: every field, its meaning, and where the rows go.

This is the one place that knows the names. A row with any other is refused, docs/metrics-schema.md is made from here

    python -m looplab.rl.metrics > docs/metrics-schema.md

and the columns of metrics.parquet have the types that stand here. Sums and means run from one row to the next. A field
that was not measured is missing in a row; it is never 0 for that.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from looplab.errors import LabError
from looplab.trainkit.atomic import atomic_write
from looplab.trainkit.log import Logger

SCHEMA_VERSION = 1
"""Counts up when a field is added, or means something else."""
TIMES = ("collect_ms", "learn_ms", "replay_ms", "checkpoint_ms")
"""The phases of an update."""
BATCH = 20_000
"""Rows that are in memory at once while a Parquet file is written."""


@dataclass(frozen=True)
class Field:
    name: str
    type: Literal["int", "float", "bool"]
    unit: str
    """Empty: a plain number."""
    meaning: str
    since: int = 1
    """The version of the schema that brought it."""
    exact: bool = True
    """Whether a repetition of the run gives the same value; False for what depends on the clock or the machine."""
    stream: Literal["metrics", "monitor", "both"] = "metrics"
    """Which file has it."""


def _clock(name: str, unit: str, meaning: str, stream: Literal["metrics", "monitor", "both"] = "metrics") -> Field:
    return Field(name, "float", unit, meaning, exact=False, stream=stream)


SCHEMA: tuple[Field, ...] = (
    Field("step", "int", "", "The global step; in the monitor's file the number of the sample.", stream="both"),
    _clock("time", "s", "When the row was written, since 1970.", "both"),
    Field("global_step", "int", "transitions", "Transitions that were learned from so far, of all envs together."),
    Field("global_update", "int", "updates", "Rollouts that were learned from so far."),
    Field("episodes", "int", "episodes", "Episodes that ended since the last row; episode_* are over these."),
    Field("episode_return_mean", "float", "reward", "Mean sum of the rewards, shaping included, of an episode."),
    Field("episode_return_max", "float", "reward", "Largest such sum."),
    Field("episode_length_mean", "float", "steps", "Mean length."),
    Field("episode_max_x_mean", "float", "px", "Mean of the furthest x of each episode."),
    Field("env_mean_x_pos", "float", "px", "Mean x over all steps in which it was known."),
    Field("env_max_x_pos", "float", "px", "Furthest x of any step."),
    Field("env_distance_delta_sum", "float", "px", "Sum of all changes of x (shaping_dx), backwards ones included."),
    Field("env_shaping_raw_sum", "float", "reward", "Sum of the shaping before its scale, without the env's reward."),
    Field("env_shaping_scaled_sum", "float", "reward", "Sum of the shaping as it was added to the rewards."),
    Field("env_shaping_last_dx", "float", "px", "Change of x in the last step, of the last env that told it."),
    Field("env_shaping_last_raw", "float", "reward", "Shaping before its scale in that step."),
    Field("env_shaping_last_scaled", "float", "reward", "Shaping as it was added in that step."),
    Field("env_shaping_scale", "float", "", "Scale of the shaping in that step."),
    Field("env_shaping_parse_fail", "int", "failures", "Failures so far to read x from RAM, of that env."),
    Field("env_stagnations", "int", "episodes", "Episodes truncated for want of progress."),
    Field("env_restarts", "int", "episodes", "Episodes truncated with a lost worker that could not be replayed."),
    Field("policy_loss", "float", "", "Mean loss of the policy."),
    Field("value_loss", "float", "", "Mean squared error of the values."),
    Field("entropy", "float", "nat", "Mean entropy of the policy."),
    Field("grad_norm", "float", "", "Length of the gradient before it is clipped."),
    Field("approx_kl", "float", "nat", "Estimated divergence between the policy that acted and the one that learns."),
    Field("clip_fraction", "float", "", "Share of transitions whose ratio of probabilities was clipped."),
    Field("explained_variance", "float", "", "1: the values explain the returns; 0 or less: they do not."),
    Field("early_stop", "bool", "", "Whether the update ended early because the divergence was too large."),
    Field("replay_policy_loss", "float", "", "Loss of the policy on what the replay gave."),
    Field("replay_value_loss", "float", "", "Loss of the values on what the replay gave."),
    Field("replay_size", "int", "entries", "Entries in the replay."),
    Field("replay_beta", "float", "", "How far the priorities are undone by weights, from 0 to 1."),
    Field("replay_priority_mean", "float", "", "Mean priority, before alpha, of at most 65,536 spaced entries."),
    Field("replay_priority_p50", "float", "", "Median of these priorities."),
    Field("replay_priority_p90", "float", "", "90th percentile."),
    Field("replay_priority_p99", "float", "", "99th percentile."),
    Field("replay_last_unique_ratio", "float", "", "Different entries in the last sample, divided by its size."),
    Field("replay_avg_unique_ratio", "float", "", "Mean of this over all samples so far."),
    _clock("replay_sample_time_ms", "ms", "Mean time to draw a sample."),
    _clock("collect_ms", "ms", "Time spent waiting for rollouts."),
    _clock("learn_ms", "ms", "Time spent learning from rollouts."),
    _clock("replay_ms", "ms", "Time spent on the replay: adding, drawing, learning."),
    _clock("checkpoint_ms", "ms", "Time that saving held up the training."),
    _clock("steps_per_second", "1/s", "Transitions a second since this process began to train."),
    Field("model_compiled", "bool", "", "Whether the policy is compiled by torch.compile."),
    _clock("gpu_util_last", "%", "Last reading of the GPU's use, mean of the visible devices; missing without."),
    _clock("gpu_util_mean_window", "%", "Mean of the last readings; missing without a GPU."),
    _clock("cpu_percent", "%", "Use of all processors of the machine since the last sample.", "monitor"),
    _clock("process_cpu_percent", "%", "Use by the trainer's process; 100 is one processor.", "monitor"),
    _clock("process_rss_mb", "MB", "Memory of the trainer's process.", "monitor"),
    _clock("ram_used_mb", "MB", "Memory of the machine that is not available.", "monitor"),
    _clock("ram_total_mb", "MB", "Memory of the machine.", "monitor"),
    _clock("load_1m", "", "Processes that wanted to run, over the last minute.", "monitor"),
    _clock("gpu_util", "%", "Use of the GPU, mean over the visible devices; missing without a GPU.", "monitor"),
    _clock("gpu_memory_used_mb", "MB", "Memory in use on the visible devices.", "monitor"),
    _clock("gpu_memory_total_mb", "MB", "Memory of the visible devices.", "monitor"),
)  # fmt: skip

_KNOWN = {field.name: field for field in SCHEMA}
_OTHERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How the logger writes what JSON has no number for."""


def check(row: Mapping[str, Any], more: Sequence[Field] = ()) -> None:
    """Refuse a row with a name that is not in the schema, or a value that does not fit its type. `more`: your own."""
    known = {**_KNOWN, **{field.name: field for field in more}} if more else _KNOWN
    for name, value in row.items():
        field = known.get(name)
        if field is None:
            raise LabError(
                f"{name!r} is not a field of the metrics (schema {SCHEMA_VERSION})",
                hint="add a Field to looplab.rl.metrics.SCHEMA, or give your own as Sinks(more=…)",
            )
        if value is not None and not _fits(field, value):
            raise LabError(f"{name} must be of type {field.type}, not {value!r}")


def _fits(field: Field, value: Any) -> bool:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return False
    if field.type == "bool":
        return value in (0, 1)
    return field.type == "float" or float(value).is_integer()


class Sinks:
    """Where rows go: metrics.jsonl always, TensorBoard and W&B if asked for."""

    def __init__(
        self,
        metrics: Logger,
        tensorboard: str | os.PathLike[str] | None = None,
        wandb: Mapping[str, Any] | None = None,
        more: Sequence[Field] = (),
    ) -> None:
        """`tensorboard`: its folder. `wandb`: what `wandb.init` gets. `more`: fields beyond the schema."""
        self.metrics = metrics
        self._more = tuple(more)
        self._folder = None if tensorboard is None else os.fspath(tensorboard)
        self._writer: Any = None
        self._board = None if tensorboard is None else _tensorboard()
        self._run = None if wandb is None else _wandb().init(**wandb)

    def log(self, row: Mapping[str, Any], step: int) -> None:
        check(row, self._more)
        self.metrics.log(row, step=step)
        known = {name: float(value) for name, value in row.items() if value is not None}
        if self._board is not None:
            if self._writer is None:  # what a killed run wrote beyond its checkpoint is hidden
                self._writer = self._board(self._folder, purge_step=step)
            for name, value in known.items():
                self._writer.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(known, step=step)

    def close(self) -> None:
        self.metrics.close()
        if self._writer is not None:
            self._writer.close()
        if self._run is not None:
            self._run.finish()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LabError("TensorBoard is not installed", hint="pip install tensorboard") from error
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise LabError("W&B is not installed", hint="pip install 'looplab[wandb]'") from error
    return wandb


def rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a metrics or monitor file, one by one. Lines that a kill has torn are left out."""
    import orjson

    with open(path, "rb") as file:
        for line in file:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield row


def exact_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows without what depends on the clock or the machine: those of an exact repetition are equal."""
    inexact = {field.name for field in SCHEMA if not field.exact}
    return [{name: value for name, value in row.items() if name not in inexact} for row in rows(path)]


def to_parquet(jsonl: str | os.PathLike[str], target: str | os.PathLike[str], more: Sequence[Field] = ()) -> int:
    """Write a metrics or monitor file as Parquet, whole or not at all; gives the number of rows.

    The same input gives the same bytes. The columns are the names that occur, in the order of the schema, then of the
    alphabet; a name that is in no schema is a float, or a string where it has anything but numbers.
    """
    if not Path(jsonl).exists():
        raise LabError("there are no metrics to convert", file=jsonl)
    import pyarrow as pa

    types = {field.name: field.type for field in (*SCHEMA, *more)}
    kinds = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
    seen: dict[str, str] = {}
    for row in rows(jsonl):
        for name, value in row.items():
            kind: str = types.get(name, "float")
            if name not in types and not (value is None or isinstance(value, int | float) or value in _OTHERS):
                kind = "text"
            elif kind == "int" and isinstance(value, float) and not value.is_integer():
                kind = "float"  # the logger allows a fraction as a step
            seen[name] = _wider(seen.get(name), kind)
    order = [name for name in types if name in seen] + sorted(seen.keys() - types.keys())
    schema = pa.schema(
        [(name, kinds[seen[name]]) for name in order],
        metadata={"looplab.metrics.schema": str(SCHEMA_VERSION)},
    )
    count = 0

    def write(file: BinaryIO) -> None:
        nonlocal count
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in _batches(rows(jsonl)):
                columns = [
                    pa.array([_cast(row.get(field.name), seen[field.name]) for row in batch], field.type)
                    for field in schema
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
                count += len(batch)

    atomic_write(target, write)
    return count


def _wider(one: str | None, other: str) -> str:
    if one is None or one == other:
        return other
    return "text" if "text" in (one, other) else "float"


def _cast(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "text":
        return str(value)
    number = value if isinstance(value, int | float) else _OTHERS.get(str(value))
    if number is None or kind == "float":
        return number
    if not math.isfinite(number):
        return None
    return bool(number) if kind == "bool" else int(number)


def _batches(source: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in source:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def document() -> str:
    """docs/metrics-schema.md."""
    lines = [
        "# Metrics of reinforcement learning", "",
        f"Schema version {SCHEMA_VERSION}. Made from `src/looplab/rl/metrics.py` by `python -m looplab.rl.metrics`.",
        "", "A field that was not measured is missing in a row, and never 0 for that. Sums and means run from one row",
        "to the next. Fields marked *clock* depend on the clock or the machine; the others are equal in a repetition.",
    ]  # fmt: skip
    for title, streams in (("metrics.jsonl", ("metrics", "both")), ("monitor.jsonl", ("monitor", "both"))):
        lines += ["", f"## {title}", "", "| field | type | unit | since | | meaning |", "|---|---|---|---|---|---|"]
        for field in SCHEMA:
            if field.stream in streams:
                clock = "" if field.exact else "*clock*"
                lines.append(
                    f"| `{field.name}` | {field.type} | {field.unit} | {field.since} | {clock} | {field.meaning} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
