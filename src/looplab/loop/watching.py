"""Monitoring of running runs: alarms are recorded, stop or requeue the run, and are sent as alerts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from threading import Thread

from looplab.config.edits import parse_edit
from looplab.config.lab import AlertConfig
from looplab.decide.history import RUNG
from looplab.decide.rules import resolve
from looplab.decide.rungs import TOLERANCE
from looplab.guard.knobs import KnobTable
from looplab.ledger.roles import DECIDED, Origin
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.events import AlarmRaised, Listener, Note
from looplab.loop.setup import Setup
from looplab.measure.base import Batch
from looplab.measure.discover import describe, reader_of
from looplab.measure.run_metrics import RunMetrics
from looplab.measure.summary import Directions
from looplab.report.wording import plural
from looplab.runs import clock, folder
from looplab.watch.alert import send
from looplab.watch.watcher import Alarm, RunSnapshot, Watcher, names

REMEMBERED = 200
"""Number of ended runs that are replayed to a pruner when an engine starts."""
WATCHED = "watch: "
"""Start of the reason of a stop by a watch rule."""
GAUGE_S = 0.5
WATCH_S = 0.2
"""Seconds between two readings of a run's metrics: longer if only people look at them, and if there are many runs."""
READING_SHARE = 0.42
"""Share of one core that reading may use; the time between two readings is stretched accordingly."""
CREDIT_S = 0.35
"""Maximum CPU time that reading may use in a burst after it has used less than its share."""
ALERT_S = 15.0
"""Seconds to wait for each pending alert when the engine ends."""


class RunMonitor:
    """Applies the watch rules of a study to its running runs."""

    def __init__(self, setup: Setup, record: StudyLedger, outputs: Path, tell: Listener) -> None:
        study = setup.study
        self._study = study
        self._record = record
        self._outputs = outputs
        self._lab = setup.lab
        self._conditions = setup.conditions
        self._knobs = KnobTable(setup.guard.knobs.values())
        self._tell = tell
        self._watcher = Watcher(study.watch, Directions(study.goals), study.objective)
        self._impatient = {
            name
            for name, rule in zip(names(study.watch), study.watch, strict=True)
            if rule.kind in ("when", "plateau", "prune")
        }
        self._told: set[str] = set()
        self._until: dict[str, float | None] = {}  # run → the step at which it is stopped
        self._alerts: list[Thread] = []
        self.budgets = any(rule.budget for rule in study.watch)
        """Whether any rule watches the budget."""

    def recover(self, running: list[RunRow]) -> list[tuple[str, str]]:
        """Restore the state of pruners and rules after an engine restart.

        Args:
            running: Runs that are still running.

        Returns:
            Runs that a rule had decided to stop before the engine died, each with the name of that rule.
        """
        if any(rule.prune for rule in self._study.watch):
            for run in self._record.runs(status="ok", limit=REMEMBERED):
                if run.conditions != self._conditions:
                    continue
                batch = reader_of(self._study, self._outputs / run.id).poll(final=True)
                self._watcher.ended(run.id, run.objective, batch)
        stopped = []
        for run in running:
            for rule, stops in self._record.watched_rules(run.id):
                self._watcher.recall(run.id, rule)
                if rule == RUNG:
                    self._until[run.id] = None
                if stops:
                    stopped.append((run.id, rule))
        return stopped

    def look(self, run: RunRow, metrics: RunMetrics, batch: Batch, budget_used: str | None) -> list[Alarm]:
        """Check new measurements of a running run against the rules.

        Args:
            batch: Rows measured since the last call.
            budget_used: Which budget is used up, in words; None if none is.
        """
        started = run.started or run.created
        live = RunSnapshot(run.id, batch, metrics.step, started, max(metrics.grown, started), budget_used)
        alarms = self._watcher.look(live, clock.now())
        if run.role in DECIDED:
            return alarms + self._at_rung(run, metrics)
        # Replicates run to their end, however they perform; only broken ones are stopped.
        return [alarm for alarm in alarms if alarm.rule not in self._impatient]

    def _at_rung(self, run: RunRow, metrics: RunMetrics) -> list[Alarm]:
        """Return the alarm that stops a run at its rung, once, as soon as its objective was measured there."""
        if run.id not in self._until:
            plan = self._record.plan_of(run.id)
            self._until[run.id] = None if plan is None else plan.until
        until, step = self._until[run.id], metrics.objective_step
        if until is None or step is None or step < until * (1 - TOLERANCE):
            return []
        self._until[run.id] = None
        text = f"reached step {step:g} of {until:g}; it can be continued from there"
        return [Alarm(RUNG, run.id, True, (), 0, None, None, text, step, {})]

    def apply(self, run: RunRow, alarm: Alarm) -> None:
        """Record an alarm and its consequences; must be called inside a transaction, before the run is stopped."""
        self._record.watched(run.id, alarm.rule, alarm.text, alarm.stops)
        message = f"{alarm.rule}: {alarm.text}" + (f" — {alarm.note}" if alarm.note else "")
        if alarm.requeue:
            message += f"; {self._requeue(run, alarm)}"
        elif alarm.stops:
            message += "; stopped"
        self._tell(AlarmRaised(f"run {run.id}: {message}", run.id))
        if alarm.note:
            folder.add_note(self._outputs / run.id, f"{alarm.rule}: {alarm.text}: {alarm.note}")
        if alarm.alert is not None:
            self._alert(alarm.alert, {"study": run.study, **alarm.plain()})

    def alert_all(self, text: str) -> None:
        """Send an alarm that does not concern a single run to every alert target of the rules, once each."""
        targets = [rule.alert for rule in self._study.watch if rule.alert is not None]
        for place, alert in enumerate(targets):
            if alert not in targets[:place]:
                self._alert(alert, {"study": self._study.name, "rule": "agent", "text": text})

    def _alert(self, alert: AlertConfig, payload: dict[str, object]) -> None:
        self._alerts = [thread for thread in self._alerts if thread.is_alive()]
        self._alerts.append(send(alert, payload, lambda why: self._tell(Note(why)), folder=self._lab))

    def close(self) -> None:
        """Wait for pending alerts."""
        for thread in self._alerts:
            thread.join(ALERT_S)

    def _requeue(self, run: RunRow, alarm: Alarm) -> str:
        """Propose the run again with the edits of the rule; return what was done, in words."""
        if run.role not in DECIDED:
            return "stopped; a replicate is not requeued with edits"
        depth, before = 0, run
        while before.proposer == Origin.WATCH and before.parent is not None:
            depth, before = depth + 1, self._record.run(before.parent)
        if depth >= alarm.requeues:
            return f"stopped; it was already requeued {plural(depth, 'time')}"
        config = self._record.config_of(run, self._outputs / run.id)
        resolved, stuck = resolve(config, [parse_edit(edit) for edit in alarm.requeue], {}, self._knobs)
        if not resolved:
            return f"stopped; there is nothing left to change: {'; '.join(stuck)}"
        edits = [str(edit) for edit in resolved]
        source = f"{Origin.WATCH}:{run.id}:{alarm.rule}"
        id_ = self._record.propose(Origin.WATCH, edits, f"{alarm.rule}: {alarm.text}", parent=run.id, source=source)
        return f"requeued with {' '.join(edits)}" if id_ is not None else "already requeued"

    def ended(self, run: RunRow, metrics: RunMetrics | None, by_itself: bool) -> None:
        """Pass a finished run to the pruners, after a check of its last measurements.

        A run that crashes on a NaN, for example, can still be requeued with edits.

        Args:
            metrics: Its measurements; None if there are none.
            by_itself: Whether the trainer exited on its own, so that the rules still apply.
        """
        rest = metrics.rest if metrics is not None else {}
        if by_itself and metrics is not None:
            self._until[run.id] = None  # it ended on its own
            for batch in (rest, {}):
                for alarm in self.look(run, metrics, batch, None):
                    self.apply(run, replace(alarm, stops=False))
            rest = {}
        self._until.pop(run.id, None)
        for unable in self._watcher.ended(run.id, run.objective, rest):
            if unable not in self._told:
                self._told.add(unable)
                self._tell(Note(unable))


class LiveMetrics:
    """Reads the metrics of running runs, in turns, and asks the watch rules.

    All runs have the same period, so the run that was read longest ago is always the next one. The period is not
    computed from what readings cost: reading stops when its share of the CPU is used up and continues there. A costly
    reading (the first one of a run, a file with a million rows) therefore delays the next ones by its own time only.

    Args:
        setup: The study.
        outputs: Its folder.
        monitor: Its watch rules; None: there are none.
        tell: Receives alarms.
    """

    def __init__(self, setup: Setup, outputs: Path, monitor: RunMonitor | None, tell: Listener) -> None:
        self.of_run: dict[str, RunMetrics] = {}
        self._shortest_s = GAUGE_S if monitor is None else WATCH_S
        self.period = self._shortest_s
        """Seconds between two readings of the same run, as seen last."""
        self.behind = False
        """Whether the last poll ended because its time was up, although reading may use more of the CPU."""
        self._study = setup.study
        self._outputs = outputs
        self._monitor = monitor
        self._tell = tell
        self._queue: deque[tuple[float, str]] = deque()  # when a run was read last (`time.monotonic()`), oldest first
        self._queued: set[str] = set()  # the runs in that queue
        self._credit_s = 0.0  # CPU time that may be used for reading; negative after a costly one
        self._polled = -inf  # when `poll` was called last

    def poll(
        self, running: Mapping[str, RunRow], adopted: Collection[str], portion_s: float, budget_used: str | None
    ) -> list[tuple[RunRow, Alarm]]:
        """Read what is due, for about `portion_s` seconds; return the alarms of the watch rules."""
        now = time.monotonic()
        self._credit_s = min(CREDIT_S, self._credit_s + READING_SHARE * (now - self._polled))
        self._polled = now
        for run_id in sorted(running.keys() - self._queued):
            if running[run_id].started is not None or run_id in adopted:  # else it was just launched, or is queued
                self._queued.add(run_id)
                self._queue.append((now, run_id))
        alarms: list[tuple[RunRow, Alarm]] = []
        self.behind = False
        spent = time.thread_time()
        while self._queue and self._credit_s > 0.0:
            last, run_id = self._queue[0]
            if run_id not in running:  # it has ended
                self._queue.popleft()
                self._queued.discard(run_id)
                continue
            if now < last + self._shortest_s:
                break
            run = running[run_id]
            metrics = self.of_run.get(run_id)
            if metrics is None:
                metrics = self.of_run[run_id] = RunMetrics(self._study, self._outputs / run_id)
            batch = metrics.poll(until=now + portion_s)
            if self._monitor is not None:
                alarms += [(run, alarm) for alarm in self._look(self._monitor, run, metrics, batch, budget_used)]
            before, spent = spent, time.thread_time()
            self._credit_s -= spent - before
            read = time.monotonic()
            self.period = read - last
            self._queue.popleft()
            self._queue.append((read, run_id))
            if read > now + portion_s:
                self.behind = self._credit_s > 0.0
                break  # the others are first next time
        return alarms

    def _look(
        self, monitor: RunMonitor, run: RunRow, metrics: RunMetrics, batch: Batch, budget_used: str | None
    ) -> list[Alarm]:
        """Return the alarms of the watch rules for a run; rules that fail on its metrics are not evaluated again."""
        if metrics.failed is not None:
            return []
        try:
            return monitor.look(run, metrics, batch, budget_used)
        except Exception as error:  # noqa: BLE001 (whatever a run measures is that run's problem)
            metrics.failed = f"watch rules: {describe(error)}"
            self._tell(AlarmRaised(f"run {run.id}: {metrics.failed}", run.id))
            return []
