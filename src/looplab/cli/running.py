"""run, resume, attach, stop."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from looplab import signals
from looplab.cli import output
from looplab.cli.labs import LabContext, how_to_continue, open_context, open_for_reading, open_lab
from looplab.cli.live import LiveScreen, LiveView, Row, ScreenState, time_left
from looplab.config.lab import LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger, LedgerCopy
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.events import EngineEvent
from looplab.loop.flags import best_run
from looplab.loop.lock import engine_pid
from looplab.loop.outcome import Ending, Outcome
from looplab.loop.session import (
    Session,
    SessionResult,
    check_detachable,
    check_study,
    options_to_resume,
    relative_to_lab,
    start_detached,
    stop_study,
)
from looplab.loop.setup import RunOptions, Setup
from looplab.report.wording import change
from looplab.runs.clock import format_seconds
from looplab.runs.folder import read_changes, record_file
from looplab.untrusted import real_path

LEADERS = 12
"""Configs in the final table."""
STYLES = {
    "rejected": "yellow", "waiting": "yellow", "adopted": "cyan", "round": "bold", "note": "dim",
    "alarm": "bold yellow", "judged": "magenta",
}  # fmt: skip


def make_options(
    *,
    cfgs: Sequence[Path] | None = None,
    gpus: Sequence[str] | None = None,
    extra: Sequence[str] | None = None,
    flags: Mapping[str, int | None] | None = None,
    **rest: Any,
) -> RunOptions:
    """Build the options of a call from the parser's values; `rest` needs no conversion."""
    named = [gpu.strip() for part in gpus or () for gpu in part.split(",") if gpu.strip()]
    return RunOptions(
        cfgs=tuple(str(real_path(path)) for path in cfgs or ()),
        gpus=None if not gpus else tuple(named) if named != ["none"] else (),
        extra=tuple(extra or ()),
        flags=tuple(f"{name}={value}" for name, value in (flags or {}).items() if value is not None),
        **rest,
    )


def run(folder: Path | None, name: str | None, options: RunOptions, *, execute: bool, detach: bool, json: bool) -> None:
    lab = open_lab(folder)
    study = lab.study(name)
    if study.needs_exec and not execute:
        from looplab.cli.planning import show_plan

        output.warn("this study starts runs only with --exec. It would run:")
        with contextlib.closing(LedgerCopy(lab.ledger_path)) as copy:
            show_plan(lab, study, options, copy, json=json)
        return
    options = replace(options, cfgs=relative_to_lab(lab.folder, options.cfgs))
    setup = check_study(lab, study, options)
    if detach:
        check_detachable(options)
    with TerminalSession(lab, study, json=json) as session:
        setup = session.begin(setup)
        if not detach:
            _show_result(session, setup, session.run(setup), json)
            return
    _detach(lab, study, json)


def run_alone(
    lab: LabConfig,
    name: str | None,
    config: Path,
    *,
    extra: Sequence[str] = (),
    informal: bool = False,
    json: bool = False,
) -> None:
    """Run one config once, now. The queue keeps waiting, and `resume` keeps its options."""
    study = lab.study(name)
    options = RunOptions(cfgs=(str(real_path(config)),), extra=tuple(extra), informal=informal, alone=True)
    setup = check_study(lab, study, options)
    with TerminalSession(lab, study, json=json) as session:
        setup = session.once(setup)
        _show_result(session, setup, session.run(setup), json)


def resume(folder: Path | None, name: str | None, detach: bool, json: bool, executor: str | None = None) -> None:
    lab = open_lab(folder)
    study = lab.study(name)
    with contextlib.closing(Ledger(lab.ledger_path, create=False)) as ledger:
        record = StudyLedger(ledger, study.name)
        if engine_pid(lab.folder, study.name) is not None and record.is_paused():
            record.command("resume")
            output.answer(json, {"study": study.name, "asked": "resume"}, "the study continues")
            return
        options = options_to_resume(record, lab.folder)
    setup = check_study(lab, study, options if executor is None else replace(options, executor=executor))
    with TerminalSession(lab, study, json=json) as session:
        if executor is not None:
            session.keep_options(setup.options)
        if not detach:
            _show_result(session, setup, session.run(setup, resumed=True), json)
            return
    _detach(lab, study, json)


# -- the engine in this terminal


class TerminalSession(Session):
    """A session whose engine is shown here: a live view in a terminal, lines in a pipe, JSON lines on request."""

    def __init__(self, lab: LabConfig, study: StudyConfig, *, json: bool) -> None:
        terminals = output.terminals()
        super().__init__(lab, study, listeners=[self._show], on_hangup=lambda: output.mute(*terminals))
        self._json = json
        self._view: LiveScreen = LiveView(lambda: _engine_snapshot(self.engine) if self.engine is not None else None)

    def drive(self, setup: Setup) -> Outcome:
        with self._view if not self._json else contextlib.nullcontext():
            return super().drive(setup)

    @output.survives_reader
    def _show(self, event: EngineEvent) -> None:
        if self._json:
            output.print_line({"at": time.time(), "kind": event.kind, "run": event.run, "text": event.text})
        else:
            self._view.say(event.text, STYLES.get(event.kind, ""))


def _show_result(session: Session, setup: Setup, result: SessionResult, json: bool) -> None:
    """Print the result of a session, and exit with its code."""
    outcome, record = result.outcome, session.record
    if json:
        output.print_line({"ending": outcome.ending, "why": outcome.why, "counts": result.counts, "best": result.best,
                           "not_run": list(result.not_run)})  # fmt: skip
    else:
        output.say()
        show_leaders(record, setup.study)
        _show_summary(setup, record, outcome.why, result.counts)
        for line in result.not_run:
            output.say(f"{line}: {outcome.why}" if outcome.why else line)
        if outcome.ending is not Ending.STOPPED and not result.has_result:
            for line in (*_why_failed(setup, record), *_next_steps(setup, result)):
                output.say(line)
    if outcome.ending is Ending.STOPPED:
        sys.exit(130)
    if not result.ok:
        sys.exit(1)


def _why_failed(setup: Setup, record: StudyLedger) -> list[str]:
    """Return why the last run failed, if its output shows that."""
    failed = record.runs(status="failed")
    if not failed:
        return []
    from looplab.onboard.trial import diagnose_run

    found = diagnose_run(setup.lab, setup.study, failed[-1])
    return [f"why {failed[-1].id} failed: {found}"] if found is not None else []


def _next_steps(setup: Setup, result: SessionResult) -> list[str]:
    """Advice for a study in which no run has a result."""
    objective = setup.study.objective
    steps = []
    if result.counts.get("ok") and objective is not None:
        steps.append(
            f"no run measured {objective.metric!r}: correct `objective` or `measure` in lab.yaml, then "
            "`looplab remeasure` re-reads the finished runs and `looplab resume` continues"
        )
    if result.counts.get("failed") or result.counts.get("timeout"):
        steps.append("fix the trainer or its config, then `looplab resume` reruns the base config")
    if result.outcome.ending is Ending.FAILED:
        steps.append("`looplab run --keep-going` continues without a working base config")
    return steps


def show_leaders(record: StudyLedger, study: StudyConfig) -> None:
    """Print the final table: one row per config, the best first."""
    from looplab.report.judged import points

    objective = study.objective
    sign = -1.0 if objective and objective.goal == "max" else 1.0
    found = list(points(record.runs()).values())
    best = record.best()
    leaders = [point for point in found if objective and point.mean is not None]
    leaders.sort(
        key=lambda point: (
            best is None or point.run.conditions != best.conditions,  # trained under other conditions: not comparable
            best is None or point.run.id != best.id or not study.judge,
            sign * (point.mean or 0),
        )
    )
    shown = leaders[:LEADERS]
    taken = {point.run.id for point in shown}
    rest = [point for point in found if point.run.id not in taken]
    shown += rest[len(rest) - min(len(rest), LEADERS - len(shown)) :]
    metric = objective.metric if objective else "objective"
    columns = ("run", "round", "by", "status", metric, *(("verdict",) if study.judge else ()), "time", "why")
    output.table(
        columns,
        [
            (
                point.run.id + (" *" if best and point.run.id == best.id else ""),
                str(point.run.round),
                point.run.proposer,
                point.run.status or point.run.state,
                point.shown if point.mean is not None else "-",
                *((point.run.verdict or "-",) if study.judge else ()),
                format_seconds(point.run.seconds),
                point.run.reason,
            )
            for point in shown
        ],
    )


def _show_summary(setup: Setup, record: StudyLedger, why: str, counts: dict[str, int]) -> None:
    outputs = setup.lab / "outputs" / setup.study.name
    parts = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    output.say(f"\n{parts}" + (f"; {why}{how_to_continue(why)}" if why else ""))
    if counts.get("failed"):
        bad = record.runs(status="failed", limit=1)[0]
        printed = record_file(outputs / bad.id, "train.log").exists()
        output.say(
            f"a failed run: `looplab {'logs' if printed else 'show'} {bad.id}` shows "
            + ("what it printed" if printed else "why")
        )
    from looplab.report.facts import alarms_of
    from looplab.report.judged import judged_now

    judged = judged_now(setup.study, record)
    best = record.best()
    for alarm in alarms_of(record, judged):
        output.say(f"ALARM: {alarm}")
    if judged is not None:
        if judged.champion is None:
            output.say(judged.headline)
        else:
            output.say(f"champion: {judged.champion}, {judged.standing}   {outputs / judged.champion}")
            changed = read_changes(outputs / judged.champion, strict=False).get("base") or {}
            if changed:
                output.say("its changes: " + ", ".join(f"{key} {change(sides)}" for key, sides in changed.items()))
    elif best is not None:
        from looplab.decide.belief import describe_best, recorded_belief

        belief = recorded_belief(record)
        if belief is not None and setup.study.objective is not None and belief.best[0].run == best.id:
            output.say(f"{describe_best(belief, setup.study.objective.metric)}   {outputs / best.id}")
            luckiest = best_run(setup.study, record, best.conditions, outputs)
            if luckiest is not None and luckiest.id != best.id:
                output.say(f"the luckiest run: {luckiest.id} with {output.number(luckiest.objective)}")
        else:
            output.say(f"best: {best.id} (one run is a hint, not a result)   {outputs / best.id}")
    output.say(f"lab book: {outputs / 'labbook.md'}")
    output.say(f"report: {outputs / 'report.html'}")
    if best is not None:
        inside = Path.cwd().is_relative_to(setup.lab)
        place = "" if inside else f"cd {shlex.quote(os.path.relpath(setup.lab))} && "
        output.say(f"next: {place}looplab ui, or looplab show BEST")


def _engine_snapshot(engine: Engine) -> ScreenState:
    rows = []
    for run in list(engine.running.values()):
        metrics = engine.run_metrics.get(run.id)
        step, value = (metrics.step, metrics.objective()) if metrics else (None, None)
        rows.append(Row(run, engine.slot_of(run.id), step, value))
    objective = engine.setup.study.objective
    progress = engine.progress
    return ScreenState(
        study=engine.study.name,
        metric=objective.metric if objective else "objective",
        running=tuple(rows),
        done=progress.done,
        total=progress.total,
        failed=progress.failed,
        best=engine.best,
        left_s=time_left(progress.done, progress.total, progress.mean_s, len(engine.setup.slots)),
        note="draining: no new runs start" if engine.control.draining else "",
    )


# -- the engine in the background


def _detach(lab: LabConfig, study: StudyConfig, json: bool) -> None:
    pid, log = start_detached(lab, study)
    output.answer(
        json,
        {"pid": pid, "log": str(log), "study": study.name},
        f"study {study.name} is running in the background (pid {pid}) and survives this terminal",
        f"watch: looplab attach   stop: looplab stop   log: {log}",
    )


def attach(folder: Path | None, name: str | None, json: bool) -> None:
    context = open_context(folder, name, reading=True)
    study = context.study.name
    pid = engine_pid(context.lab.folder, study)
    if pid is None:
        raise LabError(
            f"no engine is running for study {study!r}",
            hint="`looplab status` shows its state, `looplab resume` continues it",
        )
    seq, _ = context.ledger.head()
    metrics_by_run: dict[str, Any] = {}
    live = LiveView(lambda: _ledger_snapshot(context, metrics_by_run))
    running = [run.id for run in context.record.runs(state="running")]
    signals.warn_ctrl_c(output.warn, f"SIGTERM (`kill {os.getpid()}`), which leaves the study running")
    with live if not json else contextlib.nullcontext():
        if json:
            output.print_line({"kind": "attached", "study": study, "engine": pid, "running": running})
        else:
            live.say(f"attached to study {study} (pid {pid}); running: {', '.join(running) or 'nothing'}", "dim")
        while True:
            alive = engine_pid(context.lab.folder, study) is not None
            for event in context.ledger.events(study, after=seq):
                seq = event.seq
                if json:
                    output.print_line(asdict(event))
                elif event.kind in ("launched", "ended", "round began", "round ended", "rejected"):
                    live.say(_describe(event.kind, event.run, event.data))
            if not alive:
                break
            time.sleep(0.2)
    if not json:
        output.say()
        show_leaders(context.record, context.study)


def _describe(kind: str, run: str | None, data: dict[str, Any]) -> str:
    if kind == "ended":
        value = data.get("objective")
        return f"run {run} {data['status']}" + (f", {value:.6g}" if value is not None else "")
    if kind == "launched":
        return f"run {run} in {data['slot']}"
    if kind == "rejected":
        return f"proposal {data['proposal']} is rejected: " + "; ".join(str(p["message"]) for p in data["problems"])
    return f"round {data['round']} is done" if kind == "round ended" else f"round {data['round']} begins"


def _ledger_snapshot(context: LabContext, metrics_by_run: dict[str, Any]) -> ScreenState:
    from looplab.measure.run_metrics import RunMetrics

    ledger = open_for_reading(context.lab)  # the drawing thread needs its own connection
    try:
        record = StudyLedger(ledger, context.study.name)
        rows = []
        for run in (*record.runs(state="queued"), *record.runs(state="running")):
            metrics = metrics_by_run.setdefault(run.id, RunMetrics(context.study, context.outputs / run.id))
            metrics.poll()
            rows.append(Row(run, run.slot or "-", metrics.step, metrics.objective()))
        counts = record.counts()
        done = sum(number for state, number in counts.items() if state not in ("planned", "queued", "running"))
        objective = context.study.objective
        return ScreenState(
            study=context.study.name, metric=objective.metric if objective else "objective", running=tuple(rows),
            done=done, total=record.usage().runs, failed=counts.get("failed", 0), best=record.best(), left_s=None,
        )  # fmt: skip
    finally:
        ledger.close()


# -- stop


def stop(folder: Path | None, name: str | None, run_name: str | None, drain: bool, json: bool) -> None:
    context = open_context(folder, name)
    run_row = context.record.run(run_name) if run_name else None
    pid = engine_pid(context.lab.folder, context.study.name)
    done = stop_study(context.lab, context.study, context.record, run_row, drain=drain)
    output.answer(json, {"study": context.study.name, "engine": pid, "did": done}, done)
