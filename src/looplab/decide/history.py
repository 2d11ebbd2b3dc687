"""What a study has seen so far: every ended run with its config and what it measured, read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.ledger.study import RunRow, StudyLedger
from looplab.measure.summary import MetricSummary, from_dict
from looplab.runs import folder


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that has ended."""

    run: RunRow
    config: dict[str, Any]
    metrics: dict[str, MetricSummary]
    steps: float | None


class History:
    """The ended runs of one study; grows with it."""

    def __init__(self, study: StudyLedger, outputs: Path, conditions: str = "") -> None:
        """`conditions`: those of today's call; what was trained under others is not comparable, and left out."""
        self._study = study
        self._outputs = outputs
        self._conditions = conditions
        self._seen: dict[str, PastRun | None] = {}

    def ended(self) -> list[PastRun]:
        """All comparable ended runs whose config is known, oldest first; the ledger's row is always the newest."""
        return list(self._walk())

    def _walk(self) -> Iterator[PastRun]:
        for run in self._study.runs(state="ended"):
            if run.conditions != self._conditions:
                continue
            seen = self._seen.get(run.id)
            if run.id not in self._seen:
                seen = self._seen[run.id] = self._read(run)
            if seen is not None:
                if seen.run != run:  # a verdict came later
                    seen = self._seen[run.id] = PastRun(run, seen.config, seen.metrics, seen.steps)
                yield seen

    def _read(self, run: RunRow) -> PastRun | None:
        run_dir = self._outputs / run.id
        try:
            config = self._study.config_of(run, folder.require(run_dir))
            summary = folder.read_json(run_dir, "summary.json")
        except LabError:  # it never had a folder, or somebody removed it or wrote into it
            return None
        return PastRun(run, config, from_dict(summary.get("metrics", {})), summary.get("steps"))
