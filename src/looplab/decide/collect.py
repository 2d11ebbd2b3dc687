"""Reading the points of a study from its ledger: ended, stopped and pending runs, and rejected proposals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from looplab.config.edits import EditError, apply_edits
from looplab.config.files import canonical_json
from looplab.config.lab import SearchConfig, TieBreak
from looplab.decide.axes import Axis, Params
from looplab.decide.curves import Curve
from looplab.decide.history import History, PastRun
from looplab.decide.points import SearchPoint, break_ties, params_key, select_points
from looplab.guard.guard import Guard
from looplab.judge.base import Verdict
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.view import ProposalRow, RunRow, StudyView

MIN_EARLIER = 5
"""Minimum number of measured points for an earlier study to be used."""
MAX_EARLIER_POINTS = 100
"""Points of an earlier study that are used."""
INFEASIBLE_RULES = {"constraint", "derive", "normalise"}
"""Rules of the guard that reject points inside the knobs' ranges; such points are infeasible."""


class PointCollector:
    """Reads the points of a study from its ledger and its history; each run is processed once."""

    def __init__(
        self,
        settings: SearchConfig,
        guard: Guard,
        base: dict[str, Any],
        history: History,
        axes: Sequence[Axis],
        *,
        goal: Literal["max", "min"],
        then: TieBreak | None,
        settle: Callable[[Params], Params] | None,
        earlier: Callable[[], Sequence[tuple[str, History]]] | None,
    ) -> None:
        """
        Args:
            base: The config on which the edits of rejected proposals were made.
            goal: Whether the objective is maximized or minimized.
            then: The tie-break; None: there is none.
            settle: Moves knobs that are not used at a point to their base values; None: all are used.
            earlier: Returns earlier studies to learn from, by name; None: there are none.
        """
        self._settings = settings
        self._guard = guard
        self._base = base
        self._history = history
        self._axes = axes
        self._goal: Literal["max", "min"] = goal
        self._then = then
        self._settle = settle
        self._earlier = earlier
        self._run_params: dict[str, Params | None] = {}  # by run
        self._run_keys: dict[str, bytes] = {}  # knob values by run
        self._rejected_params: dict[int, Params | None] = {}  # by proposal
        self._earlier_read: list[tuple[str, list[SearchPoint]]] | None = None

    def collect(self, study: StudyView) -> tuple[list[SearchPoint], set[bytes]]:
        """Return all points so far, ordered by their first run, and the keys of the configs that were run."""
        runs: list[tuple[RunRow, Params | None]] = []
        curves: dict[str, Curve] = {}
        pasts: dict[str, PastRun] = {}
        for past in self._history.ended():
            run = past.run
            if run.role == Role.IMPORTED and run.id not in self._run_keys and self._guard.admit(past.config).problems:
                self._run_keys[run.id], self._run_params[run.id] = b"", None  # not legal in this lab
            runs.append((run, self._params_of_run(run.id, past.config)))
            curves[run.id] = past.curve
            pasts[run.id] = past
        for run in (run for state in ("planned", "queued", "running") for run in study.runs(state=state)):
            if run.id not in self._run_keys:
                plan = study.plan_of(run.id)
                if plan is None:
                    continue
                self._params_of_run(run.id, plan.config)
            runs.append((run, self._run_params[run.id]))
        points: dict[tuple[Any, ...], SearchPoint] = {}
        for rejected in self._rejected_points(study):
            points.setdefault(params_key(rejected), SearchPoint(rejected)).crashes += 1
        for run, params in sorted(runs, key=lambda pair: pair[0].n):
            if params is None or (run.state == "ended" and run.started is None and run.status == "stopped"):
                continue  # outside the search space, or cancelled before it started: no information
            if run.verdict == Verdict.VOID:
                continue  # its numbers are not believed, but its config is not proposed again
            if run.role == Role.IMPORTED and run.objective is None and run.status == "ok":
                continue  # the other tool measured another objective
            point = points.setdefault(params_key(params), SearchPoint(params))
            if run.state != "ended":
                point.pending += 1
            elif run.objective is not None and math.isfinite(run.objective):
                point.values.append(run.objective)
                self._add_details(point, pasts[run.id])
                if curves[run.id]:
                    point.curves.append(curves[run.id])
            elif run.status == "stopped" and curves[run.id]:
                if run.role in DECIDED:  # a repetition counts only if it was finished
                    point.stopped.append(curves[run.id])
            else:
                point.crashes += 1
        if self._then is not None:
            break_ties(points.values(), self._goal, self._then.goal)
        # Points that another tool has run may be run again here.
        return list(points.values()), {self._run_keys[run.id] for run, _ in runs if run.role != Role.IMPORTED}

    def earlier_studies(self) -> list[tuple[str, list[SearchPoint]]]:
        """Return the measured points of earlier studies inside this search space; read once."""
        if self._earlier_read is None:
            self._earlier_read = []
            for name, history in self._earlier() if self._earlier is not None else ():
                points: dict[tuple[Any, ...], SearchPoint] = {}
                for past in history.ended():
                    params = self.to_params(past.config)
                    if params is None or past.run.objective is None or not math.isfinite(past.run.objective):
                        continue
                    if past.run.verdict == Verdict.VOID:
                        continue
                    points.setdefault(params_key(params), SearchPoint(params)).values.append(past.run.objective)
                if len(points) >= MIN_EARLIER:
                    found = select_points([*points.values()], MAX_EARLIER_POINTS, self._goal)
                    self._earlier_read.append((name, found))
        return self._earlier_read

    def to_params(self, config: dict[str, Any]) -> Params | None:
        """Return the point of a config; None if one of its values is outside the search space."""
        values = self._guard.knob_values(self._guard.with_defaults(config))
        params = {axis.path: axis.to_param(values.get(axis.path)) for axis in self._axes}
        if None in params.values():
            return None
        return params if self._settle is None else self._settle(params)

    def key(self, config: dict[str, Any]) -> bytes:
        return canonical_json(self._guard.knob_values(self._guard.with_defaults(config)))

    def _add_details(self, point: SearchPoint, past: PastRun) -> None:
        run = past.run
        if run.role != Role.IMPORTED and run.status == "ok":
            point.runs.append(run.id)
        if past.tie_break is not None:
            point.tie_breaks.append(past.tie_break)
        point.others.append(past.further)
        cost = self._settings.cost
        if cost is not None and run.role != Role.IMPORTED:
            summary = past.metrics.get(cost)
            spent = run.seconds if cost == "seconds" else summary.last if summary is not None else None
            if spent is not None and math.isfinite(spent) and spent > 0:
                point.costs.append(spent)

    def _params_of_run(self, run: str, config: dict[str, Any]) -> Params | None:
        """Return `to_params`, computed once per run."""
        if run not in self._run_keys:
            self._run_keys[run] = self.key(config)
            self._run_params[run] = self.to_params(config)
        return self._run_params[run]

    def _rejected_points(self, study: StudyView) -> Iterator[Params]:
        """Yield the points inside the ranges that the guard rejected, whoever proposed them."""
        for row in study.proposals(status="rejected"):
            if row.id not in self._rejected_params:
                self._rejected_params[row.id] = self._params_of_rejected(row)
            params = self._rejected_params[row.id]
            if params is not None:
                yield params

    def _params_of_rejected(self, row: ProposalRow) -> Params | None:
        if not row.problems or any(problem.get("rule") not in INFEASIBLE_RULES for problem in row.problems):
            return None
        parent = self._base if row.parent is None else self._config_of(row.parent)
        try:
            return None if parent is None else self.to_params(apply_edits(parent, row.edits).config)
        except EditError:  # the base config has changed since
            return None

    def _config_of(self, run: str) -> dict[str, Any] | None:
        return next((past.config for past in self._history.ended() if past.run.id == run), None)
