"""Metrics and configs of runs on a W&B server, read through W&B's own client.

The client takes the server from WANDB_BASE_URL and the key from WANDB_API_KEY; this module never reads the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from typing import Any

from looplab.errors import LabError
from looplab.measure.base import Batch
from looplab.measure.rows import RowAccumulator
from looplab.measure.summary import Directions, Goal, MetricSummary, Summariser

ROWS_PER_PAGE = 1000


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """A run on the server, with summaries of its metrics."""

    id: str
    """The id in its address."""
    name: str
    """The display name."""
    state: str
    """running | finished | crashed | failed | killed | …"""
    created: str
    """Creation time in ISO format."""
    url: str
    """Address of its page."""
    metrics: dict[str, MetricSummary]
    """The summary of each metric, over its whole history."""
    steps: float | None
    """The last step; None if nothing was measured."""


def fetch_runs(
    entity: str,
    project: str,
    limit: int,
    aliases: Mapping[str, Sequence[str]] | None = None,
    goals: Mapping[str, Goal] | None = None,
) -> Iterator[OnlineRun]:
    """Yield the newest runs of a project, at most `limit`, each as soon as its history is read.

    Raises:
        LabError: The client is not installed, the key is not set, or the server refused.
    """
    what = f"{entity}/{project}"
    with _client_errors(what):
        runs = _connect().runs(what, order="-created_at", per_page=min(limit, 50))
        for run in islice(runs, limit):
            yield _summarise(run, aliases or {}, goals or {})


def fetch_config(entity: str, project: str, run: str) -> dict[str, Any]:
    """Return the config of a run, without W&B's own entries.

    Raises:
        LabError: As for `fetch_runs`, or the run has no config.
    """
    what = f"{entity}/{project}/{run}"
    with _client_errors(what):
        config: dict[str, Any] = dict(_connect().run(what).config)
    if not config:
        raise LabError(f"the run {what} has no config")
    return config


def _connect() -> Any:
    import wandb

    return wandb.Api()


@contextmanager
def _client_errors(what: str) -> Iterator[None]:
    """Turn errors of the client, the network and the server into a LabError of one line."""
    error_types = _error_types()
    if not os.environ.get("WANDB_API_KEY"):
        raise LabError("WANDB_API_KEY is not set", hint="put your key into the environment: export WANDB_API_KEY=…")
    try:
        yield
    except error_types as error:
        raise LabError(f"W&B, {what}: {_describe(error)}", hint=_hint()) from error


def _error_types() -> tuple[type[Exception], ...]:
    try:
        from wandb.errors import Error
    except ImportError:
        raise LabError("this needs the W&B client", hint="pip install 'looplab[wandb]'") from None
    kinds: list[type[Exception]] = [Error, OSError, ValueError]
    with suppress(ImportError):  # older clients do not use a service process
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError

        kinds.append(WandbApiFailedError)
    return tuple(kinds)


def _describe(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _hint() -> str:
    server = os.environ.get("WANDB_BASE_URL")
    return (
        f"the server is {server}, as WANDB_BASE_URL says" if server else "is the name right, and the key valid there?"
    )


def _summarise(run: Any, aliases: Mapping[str, Sequence[str]], goals: Mapping[str, Goal]) -> OnlineRun:
    batch = _fetch_curves(run)
    summariser = Summariser(Directions(goals), kept=1)
    summariser.add(_rename(batch, aliases))
    return OnlineRun(
        id=run.id,
        name=run.name or run.id,
        state=run.state,
        created=str(run.created_at),
        url=run.url,
        metrics=summariser.result(),
        steps=max((curve.steps[-1] for curve in batch.values() if curve.steps), default=None),
    )


def _fetch_curves(run: Any) -> Batch:
    """Return the whole history, not a sample; without a history, the last value of each metric."""
    batch: Batch = {}
    accumulator = RowAccumulator(".", step_names=("_step",))
    rows = _fetch_rows(run)
    while page := list(islice(rows, ROWS_PER_PAGE)):
        accumulator.fold_rows(page, batch)
    if not batch:
        accumulator.fold_rows([dict(run.summary_metrics or {})], batch)
    return batch


def _fetch_rows(run: Any) -> Iterator[dict[str, Any]]:
    """Yield each row of the history once; a row may be both in an exported file and among newer rows."""
    options: dict[str, Any] = {"page_size": _page_size(run)}
    if "use_cache" in signature(run.scan_history).parameters:
        options["use_cache"] = False  # the client caches files by number although they change while the run continues
    steps: set[Any] = set()
    for row in run.scan_history(**options):
        step = row.get("_step")
        if step is None or step not in steps:
            steps.add(step)
            yield row


def _page_size(run: Any) -> int:
    """Return the page size in steps: the client pages by steps, not rows, and steps may be far apart."""
    rows = run.history_line_count or 0
    steps = run.lastHistoryStep + 1
    return max(ROWS_PER_PAGE, ROWS_PER_PAGE * steps // rows) if rows > 0 else ROWS_PER_PAGE


def _rename(batch: Batch, aliases: Mapping[str, Sequence[str]]) -> Batch:
    """Rename metrics to their canonical names; if several names of a metric occur, the canonical one is preferred."""
    renamed = dict(batch)
    for name, others in aliases.items():
        for other in others:
            curve = renamed.pop(other, None)
            if curve is not None:
                renamed.setdefault(name, curve)
    return renamed
