"""What a run measured, while it runs and when it has ended."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplab.config.lab import RUN_FOLDER, ObjectiveConfig, StudyConfig, TieBreak
from looplab.errors import LabError
from looplab.launch.base import Exit
from looplab.ledger.study import RunRow
from looplab.measure.base import Batch, merge
from looplab.measure.discover import Reader, describe, reader_of
from looplab.measure.missing import explain_missing
from looplab.measure.summary import Directions, Summariser, check_at, objective_value, to_dict
from looplab.runs import clock
from looplab.runs.folder import RECORD, read_json, record_file
from looplab.runs.logs import read_tail

LAST_LINE = 300
"""Characters of a failed run's last line that are shown."""


@dataclass(slots=True)
class RunMetrics:
    """The metrics of one run, read as they come."""

    study: StudyConfig
    run_dir: Path
    reader: Reader = field(init=False)
    summariser: Summariser = field(init=False)
    polled: float = 0.0
    rest: Batch = field(default_factory=dict)
    """What came with the last reading, after the run had ended."""
    grown: float = field(default_factory=clock.now)
    """When it last had a new row, or was first looked at, by `runs.clock`."""
    failed: str | None = None
    """Why nothing more is read; None: it is."""
    finished: bool = False
    """Whether all was read that the run has left."""

    def __post_init__(self) -> None:
        measure = self.study.measure
        objective = self.study.objective
        goals = dict(measure.goals)
        kept = 1
        if objective is not None:
            kept = check_at(objective.at) or 1
            if objective.then is not None:
                goals[objective.then.metric] = objective.then.goal
                kept = max(kept, check_at(objective.then.at) or 1)
            goals[objective.metric] = objective.goal
        self.reader = reader_of(self.study, self.run_dir)
        self.summariser = Summariser(Directions(goals), kept=kept)

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """Read what is new, and return it; `until` as in `Source.poll`.

        Raises:
            LabError: The study's settings are wrong. What the run contains is never an error, see `problems`.
        """
        batch: Batch = {}
        try:
            if self.failed is None:
                batch = self.reader.poll(final, until)
                self.summariser.add(batch)
        except LabError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever a run leaves is that run's problem)
            self.failed = describe(error)
        if batch:
            self.grown = clock.now()
        self.polled = time.monotonic()
        return batch

    def finish(self, exit_: Exit, until: float | None = None) -> bool:
        """Read what a run has left at its end, into `rest`; False if the time ran out before all was read."""
        # The last line of a run that was killed may be half a line, and half a number is a wrong one.
        if not self.finished:
            merge(self.rest, self.poll(final=exit_.signal is None, until=until))
            self.finished = self.failed is not None or not self.reader.behind
        return self.finished

    @property
    def problems(self) -> dict[str, str]:
        """What of the run could not be read, and why."""
        return self.reader.problems | ({} if self.failed is None else {"metrics": self.failed})

    def objective(self) -> float | None:
        """The objective so far; None where it was not measured, or not read to its end."""
        wanted = self.study.objective
        if wanted is None or self.failed is not None or self.reader.is_doubtful(wanted.metric):
            return None
        return objective_value(self.summariser, wanted.metric, wanted.at)

    @property
    def step(self) -> float | None:
        return self.reader.last_step


def _tie_break(then: TieBreak, gauge: RunMetrics | None) -> dict[str, Any]:
    """The part of `summary.json` about the metric that breaks ties; its value is None where it was not measured."""
    known = gauge is not None and gauge.failed is None and not gauge.reader.is_doubtful(then.metric)
    value = objective_value(gauge.summariser, then.metric, then.at) if gauge is not None and known else None
    return {"metric": then.metric, "goal": then.goal, "at": then.at, "value": value}


def tie_break_value(then: TieBreak | None, run_dir: Path) -> float | None:
    """The recorded value of the metric that breaks ties; None where the run's record has none."""
    if then is None:
        return None
    objective = read_json(run_dir, "summary.json", strict=False).get("objective")
    kept = objective.get("then") if isinstance(objective, dict) else None
    if not isinstance(kept, dict) or (kept.get("metric"), kept.get("at")) != (then.metric, then.at):
        return None
    value = kept.get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_better(wanted: ObjectiveConfig, ours: tuple[float, float | None], theirs: tuple[float, float | None]) -> bool:
    """Whether a run is better than another, each given as its objective and its tie-break value.

    A tie stays a tie where one of them has not measured the metric that would break it.
    """
    if ours[0] != theirs[0]:
        return ours[0] > theirs[0] if wanted.goal == "max" else ours[0] < theirs[0]
    if wanted.then is None or ours[1] is None or theirs[1] is None:
        return False
    return ours[1] > theirs[1] if wanted.then.goal == "max" else ours[1] < theirs[1]


def status_of(exit_: Exit) -> str:
    if exit_.reason == "timeout":
        return "timeout"
    if exit_.reason == "lost":
        return "lost"
    if exit_.reason is not None and exit_.reason != "not started":  # `stop`, or the watch rule that ended it
        return "stopped"
    return "ok" if exit_.code == 0 else "failed"


def left_nothing(run_dir: Path) -> bool:
    """Whether the trainer neither wrote a file nor printed a word: then there is nothing to read."""
    try:
        return os.listdir(run_dir) == [RECORD] and os.lstat(f"{run_dir}/{RECORD}/train.log").st_size == 0
    except OSError:
        return False


def summarise(
    run: RunRow, study: StudyConfig, gauge: RunMetrics | None, exit_: Exit, *, lab: Path, run_dir: Path
) -> tuple[dict[str, Any], str, float | None]:
    """Return `summary.json`, the status and the objective. A run that did not end well has no objective; a metric that
    was not measured is missing, never 0."""
    if gauge is not None:
        gauge.finish(exit_)
    status = status_of(exit_)
    wanted = study.objective
    value = gauge.objective() if gauge is not None and status == "ok" else None
    metrics = gauge.summariser.result() if gauge is not None else {}
    notes = []
    if exit_.message:
        notes.append(exit_.message)
    if status == "failed" and gauge is not None:
        last = read_tail(Path(record_file(gauge.run_dir, "train.log")), lines=1)
        if last:
            notes.append(f"its last line: {last[:LAST_LINE]}")
    if gauge is not None:
        notes += [f"{what} could not be read: {why}" for what, why in gauge.problems.items()]
    if exit_.lingered:
        notes.append("it left processes behind, which were ended")
    if status == "ok" and wanted is not None and value is None:
        found = metrics.get(wanted.metric)
        if gauge is not None and (gauge.failed is not None or gauge.reader.is_doubtful(wanted.metric)):
            notes.append(f"the objective {wanted.metric!r} does not count, since it could not be read to its end")
        elif found is not None:
            notes.append(f"the objective {wanted.metric!r} was not finite at the end")
        else:
            in_run_dir = study.launch.cwd == RUN_FOLDER
            notes.append(
                explain_missing(
                    wanted.metric, metrics, run_dir=run_dir, lab=lab, since=exit_.started, in_run_dir=in_run_dir
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
        "steps": gauge.step if gauge is not None else None,
        "objective": None
        if wanted is None
        else {
            **{"metric": wanted.metric, "goal": wanted.goal, "at": wanted.at, "value": value},
            **({"then": _tie_break(wanted.then, gauge if value is not None else None)} if wanted.then else {}),
        },
        "verdict": None,
        "notes": notes,
        "metrics": to_dict(metrics),
    }
    return summary, status, value
