"""The ended runs of a study with their configs and metrics, each read from disk once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from looplab.config.lab import ObjectiveConfig
from looplab.decide.curves import Curve
from looplab.errors import LabError
from looplab.ledger.view import RunRow, StudyView
from looplab.measure.run_metrics import further_values, recorded_value
from looplab.measure.summary import MetricSummary, from_dict
from looplab.runs import folder

RUNG = "rung"
"""Name under which the engine stops a run at the step that was planned for it."""
STOPPED_AT_RUNG = f"watch: {RUNG}"
"""Reason in the summary of a run that was stopped to be continued, if it is promising."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that has ended."""

    run: RunRow
    config: dict[str, Any]
    metrics: dict[str, MetricSummary]
    steps: float | None
    """The last step; None if not known."""
    curve: Curve = ()
    """The objective at a few steps, the last of them the end of the run; empty: not known, or not finite there. That of
    a continuation begins with the run that it continues."""
    stopped_at_rung: bool = False
    """Whether it can be continued."""
    restarted: bool = False
    """Whether it was to continue another run, and began with its first step again."""
    tie_break: float | None = None
    """The value of `objective.then`; None: it was not measured."""
    further: tuple[float | None, ...] = ()
    """The values of `objective.pareto`; None: not measured."""


class History:
    """The ended runs of one study, read incrementally."""

    def __init__(
        self, study: StudyView, outputs: Path, conditions: str = "", objective: ObjectiveConfig | None = None,
        newest: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            conditions: Those of the present call; runs made under others are not comparable and left out.
            objective: The present objective; curves of others are left out. None: curves of any objective are taken.
            newest: The number of runs, from the newest on, that are read; None: all.
        """
        self.study = study
        self._outputs = outputs
        self._conditions = conditions
        self._objective = objective
        self._newest = newest
        self._runs: dict[str, PastRun | None] = {}

    def ended(self) -> list[PastRun]:
        """Return all comparable ended runs whose config is known, oldest first, with their current ledger rows."""
        return list(self._walk())

    def _walk(self) -> Iterator[PastRun]:
        for run in self.study.runs(state="ended", limit=self._newest):
            if run.conditions != self._conditions:
                continue
            past = self._runs.get(run.id)
            if run.id not in self._runs:
                past = self._runs[run.id] = self._load(run)
            if past is not None:
                if past.run != run:  # the row has changed, for instance by a verdict
                    past = self._runs[run.id] = replace(past, run=run)
                yield past

    def _load(self, run: RunRow) -> PastRun | None:
        run_dir = self._outputs / run.id
        try:
            config = self.study.config_of(run, folder.require(run_dir))
            summary = folder.read_json(run_dir, "summary.json")
        except LabError:  # the folder never existed, or was removed or damaged
            return None
        metrics, steps = from_dict(summary.get("metrics", {})), summary.get("steps")
        return PastRun(
            run, config, metrics, steps, self._curve(summary),
            tie_break=self._tie_break(summary), further=self._further(summary),
            stopped_at_rung=summary.get("reason") == STOPPED_AT_RUNG and run.status == "stopped",
            restarted=summary.get("restarted") is True,
        )  # fmt: skip

    def _tie_break(self, summary: dict[str, Any]) -> float | None:
        then = self._objective.then if self._objective is not None else None
        measured = summary.get("objective")
        return None if then is None or not isinstance(measured, dict) else recorded_value(then, measured.get("then"))

    def _further(self, summary: dict[str, Any]) -> tuple[float | None, ...]:
        return () if self._objective is None else further_values(self._objective, summary)

    def _curve(self, summary: dict[str, Any]) -> Curve:
        measured, objective = summary.get("objective") or {}, self._objective
        if objective and (measured.get("metric"), measured.get("at")) != (objective.metric, objective.at):
            return ()
        return tuple((float(step), float(value)) for step, value in summary.get("curve") or ())
