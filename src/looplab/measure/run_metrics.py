"""The metrics of one run, while it is running and after it has ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplab.config.lab import RUN_FOLDER, ObjectiveConfig, StudyConfig, TieBreak
from looplab.errors import LabError
from looplab.launch.base import Exit
from looplab.ledger.view import RunRow
from looplab.measure.base import Batch, Curve, merge
from looplab.measure.discover import Reader, describe, reader_of
from looplab.measure.missing import explain_missing
from looplab.measure.summary import Directions, Summariser, objective_value, to_dict
from looplab.runs import clock
from looplab.runs.folder import RECORD, read_json, record_file
from looplab.runs.logs import read_tail
from looplab.runs.redact import redact_keys

MAX_LAST_LINE = 300
"""Maximum length of a failed run's last line in its notes, in characters."""


@dataclass(slots=True)
class RunMetrics:
    """The metrics of one run, read incrementally."""

    study: StudyConfig
    run_dir: Path
    reader: Reader = field(init=False)
    summariser: Summariser = field(init=False)
    rest: Batch = field(default_factory=dict)
    """The points that were read after the run had ended."""
    grown: float = field(default_factory=clock.now)
    """Time of the last new row, or of the creation of this object (`runs.clock`)."""
    failed: str | None = None
    """Why reading was given up; None if it was not."""
    finished: bool = False
    """Whether everything was read after the run had ended."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Steps, each at least twice the one before, and the objective there, as if the run had ended."""

    def __post_init__(self) -> None:
        self.reader = reader_of(self.study, self.run_dir)
        self.summariser = Summariser(Directions(self.study.goals), kept=self.study.last_values)

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """Read and return new points; for the arguments see `MetricSource.poll`.

        Raises:
            LabError: The study's settings are wrong. Bad files of the run never raise, see `problems`.
        """
        batch: Batch = {}
        try:
            if self.failed is None:
                batch = self.reader.poll(final, until)
                self._add(batch)
        except LabError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a bad file must not stop the study)
            self.failed = describe(error)
        if batch:
            self.grown = clock.now()
        return batch

    def _add(self, batch: Batch) -> None:
        """Summarise new points, those of the objective in pieces that end where its curve has a step."""
        metric = None if self.study.objective is None else self.study.objective.metric
        for name, points in batch.items():
            begin = 0
            for i, step in enumerate(points.steps if name == metric else ()):
                if not self.curve or (step >= 2.0 * self.curve[-1][0] and step > self.curve[-1][0]):
                    self.summariser.add({name: Curve(points.steps[begin : i + 1], points.values[begin : i + 1])})
                    begin = i + 1
                    value = self.objective()
                    if value is not None:
                        self.curve.append((step, value))
            self.summariser.add({name: Curve(points.steps[begin:], points.values[begin:]) if begin else points})

    def whole_curve(self) -> list[tuple[float, float]]:
        """Return `curve` up to the last point; empty if the objective was not finite there."""
        objective, value = self.study.objective, self.objective()
        last = None if objective is None or value is None else self.summariser.summary(objective.metric)
        if last is None or last.last_step is None or value is None:
            return []
        return [*(point for point in self.curve if point[0] < last.last_step), (last.last_step, value)]

    def finish(self, exit_: Exit, until: float | None = None) -> bool:
        """Read the remaining points of an ended run into `rest`; return False if time ran out before the end."""
        # The last line of a killed run may be torn, and half a number is a wrong number.
        if not self.finished:
            merge(self.rest, self.poll(final=exit_.signal is None, until=until))
            self.finished = self.failed is not None or not self.reader.behind
        return self.finished

    @property
    def problems(self) -> dict[str, str]:
        """What could not be read, and why."""
        return self.reader.problems | ({} if self.failed is None else {"metrics": self.failed})

    def objective(self) -> float | None:
        """Return the objective so far; None if it was not measured or not read completely."""
        objective = self.study.objective
        if objective is None or self.failed is not None or self.reader.is_doubtful(objective.metric):
            return None
        value = objective_value(self.summariser, objective.metric, objective.at)
        for further in objective.pareto if objective.is_priced and value is not None else ():
            amount = _value_of(further, self)
            if amount is None or value is None:
                return None
            value += sign_of(further.goal) * sign_of(objective.goal) * (further.price or 0.0) * amount
        return value

    @property
    def objective_step(self) -> float | None:
        """The last step at which the objective was measured; None if it was not."""
        objective = self.study.objective
        found = None if objective is None else self.summariser.summary(objective.metric)
        return None if found is None else found.last_step

    @property
    def step(self) -> float | None:
        """The largest step so far; None if there is none."""
        return self.reader.last_step


def sign_of(goal: str) -> float:
    """Return 1 if larger is better, else -1."""
    return 1.0 if goal == "max" else -1.0


def _value_of(target: TieBreak, measured: RunMetrics) -> float | None:
    """Return the value of a metric as it counts for the objective; None if it was not measured."""
    if measured.failed is not None or measured.reader.is_doubtful(target.metric):
        return None
    return objective_value(measured.summariser, target.metric, target.at)


def _entry(target: TieBreak, measured: RunMetrics | None) -> dict[str, Any]:
    """Return the entry of `summary.json` for a tie-break or a further objective."""
    value = _value_of(target, measured) if measured is not None else None
    return {"metric": target.metric, "goal": target.goal, "at": target.at, "value": value}


def tie_break_value(then: TieBreak | None, run_dir: Path) -> float | None:
    """Return the recorded value of the metric that breaks ties; None if there is none."""
    if then is None:
        return None
    objective = read_json(run_dir, "summary.json", strict=False).get("objective")
    return recorded_value(then, objective.get("then") if isinstance(objective, dict) else None)


def recorded_value(target: TieBreak, entry: Any) -> float | None:
    """Return the value in an entry of `summary.json`; None if it has none, or is of another metric."""
    if not isinstance(entry, dict) or (entry.get("metric"), entry.get("at")) != (target.metric, target.at):
        return None
    value = entry.get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def further_values(objective: ObjectiveConfig, summary: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return the recorded values of the further objectives; None for those that were not measured."""
    recorded = summary.get("objective")
    entries = recorded.get("pareto") if isinstance(recorded, dict) else None
    if not isinstance(entries, list) or len(entries) != len(objective.pareto):
        return (None,) * len(objective.pareto)
    return tuple(recorded_value(target, entry) for target, entry in zip(objective.pareto, entries, strict=True))


def is_better(objective: ObjectiveConfig, ours: tuple[float, float | None], theirs: tuple[float, float | None]) -> bool:
    """Return whether a run is better than another; both are given as objective and tie-break value.

    A tie is not broken if one of the tie-break values is missing.
    """
    if ours[0] != theirs[0]:
        return ours[0] > theirs[0] if objective.goal == "max" else ours[0] < theirs[0]
    if objective.then is None or ours[1] is None or theirs[1] is None:
        return False
    return ours[1] > theirs[1] if objective.then.goal == "max" else ours[1] < theirs[1]


def status_of(exit_: Exit) -> str:
    """Return the status of an ended run: ok, failed, stopped, timeout or lost."""
    if exit_.reason == "timeout":
        return "timeout"
    if exit_.is_lost:
        return "lost"
    if exit_.reason is not None and exit_.reason != "not started":  # `stop`, or the name of a watch rule
        return "stopped"
    return "ok" if exit_.code == 0 else "failed"


def left_nothing(run_dir: Path) -> bool:
    """Return whether the trainer wrote no file and printed nothing."""
    try:
        return os.listdir(run_dir) == [RECORD] and os.lstat(f"{run_dir}/{RECORD}/train.log").st_size == 0
    except OSError:
        return False


def join_segments(
    summary: dict[str, Any], earlier: Mapping[str, Any], objective: ObjectiveConfig | None
) -> float | None:
    """Let the summary of a continuation begin with the run that it continues; return the objective of both.

    The curve is that of both, without what was measured twice. The objective counts everything if it is the best or the
    first value. A trainer that begins with its first step again has not continued: its summary is its own, with a note.

    Args:
        summary: Changed in place: `curve`, `objective`, `notes`; `restarted` is added.
        earlier: The summary of the run that it continues.
    """
    own, before = summary["curve"], [tuple(point) for point in earlier.get("curve") or ()]
    entry = summary["objective"] or {}
    value: float | None = entry.get("value")
    summary["continues"] = earlier.get("id")
    measured = {"metric": objective.metric, "at": objective.at} if objective is not None else {}
    if not before or any((earlier.get("objective") or measured).get(key, it) != it for key, it in measured.items()):
        return value  # nothing is known about it, or only another objective
    summary["restarted"] = bool(own) and own[0][0] <= before[0][0]
    if summary["restarted"]:
        summary["notes"].append(
            f"it began at step {own[0][0]:g}, although it continues run {earlier.get('id')}, which was stopped at step "
            f"{before[-1][0]:g}: the trainer does not resume its step"
        )
        return value
    if objective is not None and objective.at in ("best", "first"):
        reached = before[-1][1]
        best = max if objective.goal == "max" else min
        own = [(step, reached if objective.at == "first" else best(reached, found)) for step, found in own]
        if value is not None:
            value = entry["value"] = reached if objective.at == "first" else best(reached, value)
    summary["curve"] = [*(point for point in before if not own or point[0] < own[0][0]), *own]
    return value


def summarise(
    run: RunRow, study: StudyConfig, measured: RunMetrics | None, exit_: Exit, *, lab: Path, run_dir: Path
) -> tuple[dict[str, Any], str, float | None]:
    """Return the content of `summary.json`, the status and the objective.

    Only a run with status ok has an objective; a metric that was not measured is missing, never 0.
    """
    if measured is not None:
        measured.finish(exit_)
    status = status_of(exit_)
    objective = study.objective
    value = measured.objective() if measured is not None and status == "ok" else None
    metrics = redact_keys(measured.summariser.result()) if measured is not None else {}
    notes = []
    if exit_.message:
        notes.append(exit_.message)
    if status == "failed" and measured is not None:
        last = read_tail(Path(record_file(measured.run_dir, "train.log")), lines=1)
        if last:
            notes.append(f"its last line: {last[:MAX_LAST_LINE]}")
    if measured is not None:
        notes += [f"{what} could not be read: {why}" for what, why in measured.problems.items()]
    if exit_.lingered:
        notes.append("it left processes behind, which were stopped")
    if status == "ok" and objective is not None and value is None:
        last_summary = metrics.get(objective.metric)
        if measured is not None and (measured.failed is not None or measured.reader.is_doubtful(objective.metric)):
            notes.append(f"the objective {objective.metric!r} does not count, since it could not be read completely")
        elif last_summary is not None:
            notes.append(f"the objective {objective.metric!r} was not finite at the end")
        else:
            in_run_dir = study.launch.cwd == RUN_FOLDER
            notes.append(
                explain_missing(
                    objective.metric, metrics, run_dir=run_dir, lab=lab, since=exit_.started, in_run_dir=in_run_dir
                )
            )
    seconds = max(0.0, exit_.ended - exit_.started) if exit_.ended and exit_.started else None
    summary = {
        "id": run.id,
        "study": run.study,
        "status": status,
        "exit_code": exit_.code,
        "signal": exit_.signal,
        "reason": exit_.reason,
        "seconds": seconds,
        "cpu_s": None if exit_.user_s is None else round(exit_.user_s + (exit_.system_s or 0.0), 3),
        "max_rss_mb": None if exit_.max_rss_kb is None else round(exit_.max_rss_kb / 1024, 1),
        "steps": measured.step if measured is not None else None,
        "objective": None
        if objective is None
        else {
            **{"metric": objective.metric, "goal": objective.goal, "at": objective.at, "value": value},
            **({"then": _entry(objective.then, measured if value is not None else None)} if objective.then else {}),
            **(
                {"pareto": [_entry(one, measured if value is not None else None) for one in objective.pareto]}
                if objective.pareto
                else {}
            ),
        },
        "curve": measured.whole_curve() if measured is not None else [],
        "verdict": None,
        "notes": notes,
        "metrics": to_dict(metrics),
    }
    return summary, status, value
