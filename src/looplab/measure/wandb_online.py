"""Runs that live on a W&B server, read through W&B's own client: what they measured, and with which config.

The server is the one that WANDB_BASE_URL names, the key stands in WANDB_API_KEY; both are the client's business, and
this module never sees the key.
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

ROWS_A_PAGE = 1000


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """A run on the server, in a few numbers."""

    id: str
    """The id in its address."""
    name: str
    """The name that people see."""
    state: str
    """running | finished | crashed | failed | killed | …"""
    created: str
    """When it began, as ISO text."""
    url: str
    """Where it can be looked at."""
    metrics: dict[str, MetricSummary]
    """The summary of each metric, over its whole history."""
    steps: float | None
    """The last step; none if nothing was measured."""


def fetch_runs(
    entity: str,
    project: str,
    limit: int,
    aliases: Mapping[str, Sequence[str]] | None = None,
    goals: Mapping[str, Goal] | None = None,
) -> Iterator[OnlineRun]:
    """The newest runs of a project, at most `limit`, each as soon as its history is read."""
    what = f"{entity}/{project}"
    with _refusals_told(what):
        runs = _connect().runs(what, order="-created_at", per_page=min(limit, 50))
        for run in islice(runs, limit):
            yield _read(run, aliases or {}, goals or {})


def fetch_config(entity: str, project: str, run: str) -> dict[str, Any]:
    """The config of a run, without W&B's own entries."""
    what = f"{entity}/{project}/{run}"
    with _refusals_told(what):
        config: dict[str, Any] = dict(_connect().run(what).config)
    if not config:
        raise LabError(f"the run {what} has no config")
    return config


def _connect() -> Any:
    import wandb

    return wandb.Api()


@contextmanager
def _refusals_told(what: str) -> Iterator[None]:
    """Whatever the client, the network or the server say against it becomes one line for people."""
    refusals = _refusals()
    if not os.environ.get("WANDB_API_KEY"):
        raise LabError("WANDB_API_KEY is not set", hint="put your key into the environment: export WANDB_API_KEY=…")
    try:
        yield
    except refusals as error:
        raise LabError(f"W&B, {what}: {_in_short(error)}", hint=_server()) from error


def _refusals() -> tuple[type[Exception], ...]:
    try:
        from wandb.errors import Error
    except ImportError:
        raise LabError("this needs the W&B client", hint="pip install 'looplab[wandb]'") from None
    kinds: list[type[Exception]] = [Error, OSError, ValueError]
    with suppress(ImportError):  # older clients speak to the server by themselves
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError

        kinds.append(WandbApiFailedError)
    return tuple(kinds)


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _server() -> str:
    server = os.environ.get("WANDB_BASE_URL")
    return (
        f"the server is {server}, as WANDB_BASE_URL says" if server else "is the name right, and the key valid there?"
    )


def _read(run: Any, aliases: Mapping[str, Sequence[str]], goals: Mapping[str, Goal]) -> OnlineRun:
    batch = _curves(run)
    summariser = Summariser(Directions(goals), kept=1)
    summariser.add(_renamed(batch, aliases))
    return OnlineRun(
        id=run.id,
        name=run.name or run.id,
        state=run.state,
        created=str(run.created_at),
        url=run.url,
        metrics=summariser.result(),
        steps=max((curve.steps[-1] for curve in batch.values() if curve.steps), default=None),
    )


def _curves(run: Any) -> Batch:
    """The whole history, not a sample of it; where there is none, the last values, a point each."""
    batch: Batch = {}
    folder = RowAccumulator(".", step_names=("_step",))
    rows = _rows(run)
    while page := list(islice(rows, ROWS_A_PAGE)):
        folder.fold_rows(page, batch)
    if not batch:
        folder.fold_rows([dict(run.summary_metrics or {})], batch)
    return batch


def _rows(run: Any) -> Iterator[dict[str, Any]]:
    """The rows of the history, each once: a row may be both in a file that the server made and in what is newer."""
    options: dict[str, Any] = {"page_size": _page_size(run)}
    if "use_cache" in signature(run.scan_history).parameters:
        options["use_cache"] = False  # the client keeps files by their number, although they change while a run goes on
    seen: set[Any] = set()
    for row in run.scan_history(**options):
        step = row.get("_step")
        if step is None or step not in seen:
            seen.add(step)
            yield row


def _page_size(run: Any) -> int:
    """The client pages by steps, not by rows: where steps are far apart, a page must span many of them."""
    rows = run.history_line_count or 0
    steps = run.lastHistoryStep + 1
    return max(ROWS_A_PAGE, ROWS_A_PAGE * steps // rows) if rows > 0 else ROWS_A_PAGE


def _renamed(batch: Batch, aliases: Mapping[str, Sequence[str]]) -> Batch:
    """By canonical names; where a run has several names of one metric, the canonical one is believed first."""
    renamed = dict(batch)
    for name, others in aliases.items():
        for other in others:
            curve = renamed.pop(other, None)
            if curve is not None:
                renamed.setdefault(name, curve)
    return renamed
