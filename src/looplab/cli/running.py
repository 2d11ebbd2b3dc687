"""run, resume, attach, stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from json import dumps as encode_json
from json import loads as decode_json
from pathlib import Path
from typing import Any

from looplab import signals
from looplab.cli import output
from looplab.cli.labs import LabContext, open_for_reading, open_lab, open_place, prepare_study
from looplab.cli.live import LiveView, Row, ScreenState, time_left
from looplab.config.lab import Lab, StudyConfig
from looplab.errors import BusyError, LabError
from looplab.launch.local import (
    LocalExecutor,
    Where,
    find_by_mark,
    is_alive,
    is_running,
    read_process,
    signal_groups,
    where_is,
)
from looplab.ledger.ledger import Ledger, LedgerCopy
from looplab.ledger.study import RunRow, StudyLedger
from looplab.loop.decision import base_runs, decide_base
from looplab.loop.engine import Ending, Engine, Outcome
from looplab.loop.lock import StudyLock, engine_pid
from looplab.loop.planning import EngineEvent, bases_to_run
from looplab.loop.setup import RunOptions, Setup
from looplab.report.writer import ReportWriter
from looplab.runs.folder import record_file, record_folder
from looplab.runs.redact import HIDDEN, redact_argv
from looplab.untrusted import append_own, real_path

STYLES = {
    "rejected": "yellow", "waiting": "yellow", "adopted": "cyan", "round": "bold", "note": "dim",
    "alarm": "bold yellow", "judged": "magenta",
}  # fmt: skip
START_S = 60.0
"""How long a new engine in the background may take to begin before it is assumed to come."""
STOP_S = 30.0
"""How long an engine may take to record the end of its runs, beyond their grace."""


def make_options(
    *,
    cfgs: Sequence[Path] | None = None,
    gpus: Sequence[str] | None = None,
    extra: Sequence[str] | None = None,
    flags: Mapping[str, int | None] | None = None,
    **rest: Any,
) -> RunOptions:
    """Return the options of a call as the parser has found them; `rest` are those that need no conversion."""
    named = [gpu.strip() for part in gpus or () for gpu in part.split(",") if gpu.strip()]
    return RunOptions(
        cfgs=tuple(str(real_path(path)) for path in cfgs or ()),
        gpus=None if not gpus else tuple(named) if named != ["none"] else (),
        extra=tuple(extra or ()),
        flags=tuple(f"{name}={value}" for name, value in (flags or {}).items() if value is not None),
        **rest,
    )


def count_from_now(setup: Setup, ledger: Ledger | LedgerCopy) -> Setup:
    """Count the rounds and runs that a call asks for from now on if it names configs that were never run, or wants them
    again; a call that is repeated continues its count. Notes say which of the named configs are not run."""
    options = setup.options
    if not (options.cfgs or options.again):
        return setup
    record = StudyLedger(ledger, setup.study.name)
    last = None
    with contextlib.suppress(LabError):
        last = last_options(ledger, setup.study.name, setup.lab)
    if last is not None and not options.again and replace(last, since_run=0, since_round=0) == options:
        return replace(setup, options=last)
    done = base_runs(setup, record)
    bases = [decide_base(setup, base) for base in setup.bases]
    if options.again or any(base.key not in done for base in bases):
        used = record.usage()
        return replace(setup, options=replace(options, since_run=used.runs, since_round=used.rounds))
    known = [
        f"{base.base} was run before ({done[base.key][-1].id}) and is not run again; --again runs it once more"
        for base in bases
    ]
    return replace(setup, notes=(*setup.notes, *known))


def run(folder: Path | None, name: str | None, options: RunOptions, *, execute: bool, detach: bool, json: bool) -> None:
    lab = open_lab(folder)
    study = lab.study(name)
    if study.needs_exec and not execute:
        from looplab.cli.planning import show_plan

        output.warn("this study runs only with --exec; this is what it would do:")
        with contextlib.closing(LedgerCopy(lab.ledger_path)) as copy:
            show_plan(lab, study, options, copy, json=json)
        return
    options = replace(options, cfgs=relative_to_lab(lab.folder, options.cfgs))
    setup = prepare_study(lab, study, options)
    if detach and _has_secret(options.extra):
        raise LabError("a secret among the trainer's arguments does not reach a study in the background, since the "
                       "ledger does not keep it", hint="give it in the environment")  # fmt: skip
    with StudyLock(lab.folder, study.name), contextlib.closing(Ledger(lab.ledger_path)) as ledger:
        setup = count_from_now(setup, ledger)
        with ledger.write():
            _save_options(ledger, study.name, setup.options)
        if not detach:
            _work(setup, ledger, json)
            return
    _detach(lab, study, json)


def run_alone(
    lab: Lab, name: str | None, config: Path, *, extra: Sequence[str] = (), informal: bool = False, json: bool = False
) -> None:
    """Run one config now, once: what waits in the queue goes on waiting, and `resume` keeps its options."""
    study = lab.study(name)
    options = RunOptions(cfgs=(str(real_path(config)),), extra=tuple(extra), informal=informal, alone=True)
    setup = prepare_study(lab, study, options)
    with StudyLock(lab.folder, study.name), contextlib.closing(Ledger(lab.ledger_path)) as ledger:
        used = StudyLedger(ledger, study.name).usage()
        _work(replace(setup, options=replace(options, runs=used.runs + 1, rounds=used.rounds + 1)), ledger, json)


def resume(folder: Path | None, name: str | None, detach: bool, json: bool) -> None:
    lab = open_lab(folder)
    study = lab.study(name)
    with contextlib.closing(Ledger(lab.ledger_path, create=False)) as ledger:
        record = StudyLedger(ledger, study.name)
        if engine_pid(lab.folder, study.name) is not None and record.is_paused():
            record.command("resume")
            output.print_json({"study": study.name, "asked": "resume"}) if json else output.say("it goes on")
            return
        options = saved_options(ledger, study.name, lab.folder)
    setup = prepare_study(lab, study, options)
    with StudyLock(lab.folder, study.name), contextlib.closing(Ledger(lab.ledger_path)) as ledger:
        if not detach:
            _work(setup, ledger, json, resumed=True)
            return
    _detach(lab, study, json)


def _has_secret(extra: Sequence[str]) -> bool:
    return redact_argv(extra) != list(extra)


def _save_options(ledger: Ledger, study: str, options: RunOptions) -> None:
    # Escaped, since arguments and paths may be bytes that are not valid Unicode.
    text = encode_json(replace(options, extra=tuple(redact_argv(options.extra))).to_dict())
    before = ledger.one("SELECT value FROM meta WHERE key=?", (f"options:{study}",))
    if before is None or before["value"] != text:
        with ledger.write():
            ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (f"options:{study}", text))
            ledger.record("options", study, text=text)


def relative_to_lab(lab: Path, cfgs: Sequence[str]) -> tuple[str, ...]:
    """Name configs by their path inside the lab, so that it can be moved; those outside keep theirs."""
    root = lab.resolve()
    return tuple(str(Path(name).relative_to(root)) if Path(name).is_relative_to(root) else name for name in cfgs)


def _found_again(lab: Path, name: str) -> str:
    """The path inside the lab of a config that an early version recorded with the lab's own path, which has changed
    since: the longest end of it that the lab has."""
    parts = Path(name).parts
    if not Path(name).is_absolute() or Path(name).exists():
        return name
    ends = (Path(*parts[first:]) for first in range(1, len(parts)))
    return next((str(end) for end in ends if (lab / end).is_file()), name)


def last_options(ledger: Ledger | LedgerCopy, study: str, lab: Path) -> RunOptions:
    """The options of the last `run`."""
    row = ledger.one("SELECT value FROM meta WHERE key=?", (f"options:{study}",))
    if row is None:
        raise LabError(f"study {study!r} was never run", hint="start it with `looplab run`")
    try:
        options = RunOptions.from_dict(decode_json(row["value"]))
    except (AttributeError, TypeError, ValueError):
        raise LabError(
            f"what was said with the last `run` of study {study!r} cannot be read",
            hint="say it again with `looplab run`",
        ) from None
    return replace(options, cfgs=tuple(_found_again(lab, name) for name in relative_to_lab(lab, options.cfgs)))


def saved_options(ledger: Ledger, study: str, lab: Path) -> RunOptions:
    """The options of the last `run`, for one that continues it."""
    options = last_options(ledger, study, lab)
    if any(HIDDEN in word for word in options.extra):
        raise LabError("the last `run` had a secret among the trainer's arguments, which is not kept",
                       hint="go on with `looplab run … -- …`, or give it in the environment")  # fmt: skip
    return options


# -- the engine in this terminal


def drive(setup: Setup, ledger: Ledger, json: bool) -> Outcome:
    """Run the engine here, to its end; the caller holds the study's lock."""
    executor = LocalExecutor()
    live = LiveView(lambda: _engine_snapshot(engine))

    @output.survives_reader
    def show(item: EngineEvent) -> None:
        if json:
            output.print_line({"at": time.time(), "kind": item.kind, "run": item.run, "text": item.text})
        else:
            live.say(item.text, STYLES.get(item.kind, ""))

    def tell(item: EngineEvent) -> None:
        if item.kind == "ended" and item.run is not None:
            desk.ended(item.run)
        show(item)

    desk = ReportWriter(setup.lab, ledger.path, setup.study, lambda problem: tell(EngineEvent("note", problem)))
    engine = Engine(setup, ledger, executor, tell)
    asked = 0
    terminals = output.terminals()

    def interrupted(number: int, frame: object) -> None:
        nonlocal asked
        asked += number == signal.SIGINT
        if number == signal.SIGHUP:  # may come twice, from the shell and from the kernel
            output.mute(*terminals)
        engine.wish("stop" if number == signal.SIGTERM or asked > 1 else "drain")
        executor.wake()

    with (
        signals.handled(interrupted),
        contextlib.closing(desk),
        contextlib.closing(executor),
        live if not json else contextlib.nullcontext(),
    ):
        for note in setup.notes:
            tell(EngineEvent("note", note))
        signals.warn_ctrl_c(lambda note: tell(EngineEvent("note", note)), "`looplab stop`, or SIGTERM")
        desk.catch_up(StudyLedger(ledger, setup.study.name))
        return engine.run()


def _work(setup: Setup, ledger: Ledger, json: bool, *, resumed: bool = False) -> None:
    """Run the engine here and say what came of it."""
    record = StudyLedger(ledger, setup.study.name)
    before, unfinished = record.usage().runs, record.runs_open()
    outcome = drive(setup, ledger, json)
    counts = record.counts()
    did_nothing = not resumed and not unfinished and record.usage().runs == before
    not_run = _named_not_run(setup, record, did_nothing) if outcome.ending is Ending.DONE else []
    if json:
        best = record.best()
        output.print_line({"ending": outcome.ending, "why": outcome.why, "counts": counts, "best": best and best.id,
                           "not_run": not_run})  # fmt: skip
    else:
        output.say()
        show_leaders(record, setup.study)
        _closing_words(setup, record, outcome.why, counts)
        for line in not_run:
            output.say(f"{line}: {outcome.why}" if outcome.why else line)
        if outcome.ending is not Ending.STOPPED and not _measured_anything(setup, record):
            for line in _what_to_do(setup, record, outcome.ending):
                output.say(line)
    if outcome.ending is Ending.STOPPED:
        sys.exit(130)
    if outcome.ending is Ending.FAILED or not_run:
        sys.exit(1)
    if counts and not counts.get("planned") and not _measured_anything(setup, record):
        sys.exit(1)


def _named_not_run(setup: Setup, record: StudyLedger, did_nothing: bool) -> list[str]:
    """Return a sentence for each config named in the call that it has not run: the budget left no room, or the config
    was run before and the call has run nothing else either."""
    if not (setup.options.cfgs or setup.options.again):
        return []
    left = bases_to_run(setup, record, [decide_base(setup, base) for base in setup.bases])
    told = [f"{base.base} was not run (give it room with --rounds or --runs)" for base in left]
    if did_nothing and not left:
        told = [f"{base.name} was run before and is not run again (see --again)" for base in setup.bases]
    return told


def _measured_anything(setup: Setup, record: StudyLedger) -> bool:
    """Whether a run of the study ended well and, if there is an objective, measured it."""
    return record.has_result(measured=setup.study.objective is not None)


def _what_to_do(setup: Setup, record: StudyLedger, ending: Ending) -> list[str]:
    """The next steps of a study in which no run has a result."""
    counts = record.counts()
    objective = setup.study.objective
    steps = []
    if counts.get("ok") and objective is not None:
        steps.append(
            f"no run measured {objective.metric!r}: correct `objective` or `measure` in lab.yaml, then "
            "`looplab remeasure` reads the ended runs again and `looplab resume` continues"
        )
    if counts.get("failed") or counts.get("timeout"):
        steps.append("fix the trainer or its config, then `looplab resume` runs the base config again")
    if ending is Ending.FAILED:
        steps.append("`looplab run --keep-going` continues although no base config works")
    return steps


def show_leaders(record: StudyLedger, study: StudyConfig, limit: int = 12) -> None:
    """The final table: a row for each config that was tried, the best first."""
    from looplab.report.judged import points

    objective = study.objective
    sign = -1.0 if objective and objective.goal == "max" else 1.0
    found = list(points(record.runs()).values())
    best = record.best()
    leaders = [point for point in found if objective and point.mean is not None]
    leaders.sort(
        key=lambda point: (
            best is None or point.run.conditions != best.conditions,  # trained otherwise: not comparable
            best is None or point.run.id != best.id or not study.judge,
            sign * (point.mean or 0),
        )
    )
    shown = leaders[:limit]
    taken = {point.run.id for point in shown}
    rest = [point for point in found if point.run.id not in taken]
    shown += rest[len(rest) - min(len(rest), limit - len(shown)) :]
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
                output.seconds(point.run.seconds),
                point.run.reason,
            )
            for point in shown
        ],
    )


def _closing_words(setup: Setup, record: StudyLedger, why: str, counts: dict[str, int]) -> None:
    outputs = setup.lab / "outputs" / setup.study.name
    parts = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    output.say(f"\n{parts}" + (f"; {why}" if why else ""))
    if counts.get("failed"):
        bad = record.runs(status="failed", limit=1)[0]
        printed = record_file(outputs / bad.id, "train.log").exists()
        output.say(
            f"a failed run: `looplab {'logs' if printed else 'show'} {bad.id}` shows "
            + ("what it printed" if printed else "why")
        )
    from looplab.report.facts import alarms_of
    from looplab.report.judged import judged_now

    court = judged_now(setup.study, record)
    best = record.best()
    for alarm in alarms_of(record, court):
        output.say(f"ALARM: {alarm}")
    if court is not None:
        if court.champion is None:
            output.say(court.headline)
        else:
            output.say(f"champion: {court.champion}, {court.standing}   {outputs / court.champion}")
    elif best is not None:
        output.say(f"best: {best.id} (one run is a hint, not a result)   {outputs / best.id}")
    output.say(f"lab book: {outputs / 'labbook.md'}")
    output.say(f"report: {outputs / 'report.html'}")


def _engine_snapshot(engine: Engine) -> ScreenState:
    rows = []
    for run in list(engine.running.values()):
        gauge = engine.run_metrics.get(run.id)
        rows.append(
            Row(run, engine.slot_of(run.id), gauge.step if gauge else None, gauge.objective() if gauge else None)
        )
    objective = engine.setup.study.objective
    progress = engine.progress
    total = progress.total
    return ScreenState(
        engine.study.name,
        objective.metric if objective else "objective",
        tuple(rows),
        progress.done,
        total,
        progress.failed,
        engine.best,
        time_left(progress.done, total, progress.mean_s, len(engine.setup.slots)),
        "draining: starts nothing more" if engine.draining else "",
    )


# -- the engine in the background


def _detach(lab: Lab, study: StudyConfig, json: bool) -> None:
    """Start `resume` in a session of its own, and wait until it is really at work."""
    log = lab.folder / ".looplab" / f"{study.name}.log"
    argv = [sys.executable, "-m", "looplab", "resume", "--lab", str(lab.folder), "--study", study.name]
    with append_own(log) as file:
        start = file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, cwd=lab.folder
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_bytes()[start:].decode(errors="replace").strip()
            if process.returncode in (0, 1):  # it has done all that there was to do
                break
            error = BusyError if process.returncode == BusyError.exit_code else LabError
            raise error(f"the engine ended at once: {said.removeprefix('looplab: ')}")
        if engine_pid(lab.folder, study.name) == process.pid:
            break
        time.sleep(0.02)
    if json:
        output.print_json({"pid": process.pid, "log": str(log), "study": study.name})
    else:
        output.say(f"study {study.name} runs in the background (pid {process.pid}); it survives this terminal")
        output.say(f"watch: looplab attach   stop: looplab stop   log: {log}")


def attach(folder: Path | None, name: str | None, json: bool) -> None:
    place = open_place(folder, name, reading=True)
    study = place.study.name
    pid = engine_pid(place.lab.folder, study)
    if pid is None:
        raise LabError(
            f"no engine is at work on study {study!r}", hint="`looplab status` shows it, `looplab resume` goes on"
        )
    seq, _ = place.ledger.head()
    gauges: dict[str, Any] = {}
    live = LiveView(lambda: _ledger_snapshot(place, gauges))
    running = [run.id for run in place.record.runs(state="running")]
    signals.warn_ctrl_c(output.warn, f"SIGTERM (`kill {os.getpid()}`), which leaves the study alone")
    with live if not json else contextlib.nullcontext():
        if json:
            output.print_line({"kind": "attached", "study": study, "engine": pid, "running": running})
        else:
            live.say(f"attached to study {study} (pid {pid}); at work: {', '.join(running) or 'nothing'}", "dim")
        while True:
            alive = engine_pid(place.lab.folder, study) is not None
            for event in place.ledger.events(study, after=seq):
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
        show_leaders(place.record, place.study)


def _describe(kind: str, run: str | None, data: dict[str, Any]) -> str:
    if kind == "ended":
        value = data.get("objective")
        return f"run {run} {data['status']}" + (f", {value:.6g}" if value is not None else "")
    if kind == "launched":
        return f"run {run} in {data['slot']}"
    if kind == "rejected":
        return f"proposal {data['proposal']} is rejected: " + "; ".join(str(p["message"]) for p in data["problems"])
    return f"round {data['round']} is done" if kind == "round ended" else f"round {data['round']} begins"


def _ledger_snapshot(place: LabContext, gauges: dict[str, Any]) -> ScreenState:
    from looplab.measure.run_metrics import RunMetrics

    ledger = open_for_reading(place.lab)  # the drawing thread needs a connection of its own
    try:
        record = StudyLedger(ledger, place.study.name)
        rows = []
        for run in record.runs(state="running"):
            gauge = gauges.setdefault(run.id, RunMetrics(place.study, place.outputs / run.id))
            gauge.poll()
            rows.append(Row(run, run.slot or "-", gauge.step, gauge.objective()))
        counts = record.counts()
        done = sum(number for state, number in counts.items() if state not in ("planned", "running"))
        objective = place.study.objective
        return ScreenState(
            place.study.name, objective.metric if objective else "objective", tuple(rows), done,
            record.usage().runs, counts.get("failed", 0), record.best(), None,
        )  # fmt: skip
    finally:
        ledger.close()


# -- stop


def stop(folder: Path | None, name: str | None, run_name: str | None, drain: bool, json: bool) -> None:
    place = open_place(folder, name)
    study = place.study.name
    run_row = place.record.run(run_name) if run_name else None
    pid = engine_pid(place.lab.folder, study)
    if run_row is not None and run_row.state != "running":
        told = f"run {run_row.id} is not running: it is {run_row.status or run_row.state}"
    elif pid is not None and drain:
        place.record.command("drain")
        told = f"the engine (pid {pid}) starts nothing more and ends with what runs; `looplab resume` goes on"
    elif pid is not None:
        place.record.command("stop", run=run_row.id if run_row else None)
        who = f"run {run_row.id}" if run_row else f"the engine (pid {pid})"
        told = f"{who} has stopped" if _await_stop(place, run_row) else f"{who} was asked to stop, and is still at work"
    elif drain:
        told = "no engine is at work: nothing will be started"
    else:
        told = _stop_orphans(place, [run_row] if run_row else place.record.runs(state="running"))
    if json:
        output.print_json({"study": study, "engine": pid, "did": told})
    else:
        output.say(told)


def _await_stop(place: LabContext, run_row: RunRow | None) -> bool:
    deadline = time.monotonic() + place.study.launch.grace + STOP_S
    while time.monotonic() < deadline:
        if run_row is not None:
            if place.record.run(run_row.id).state == "ended":
                return True
        elif engine_pid(place.lab.folder, place.study.name) is None:
            return True
        time.sleep(0.05)
    return False


def _stop_orphans(place: LabContext, runs: Sequence[RunRow]) -> str:
    """Trainings that live without an engine: ended directly, recorded by the next `resume`."""
    found: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
    unseen = []
    for row in runs:
        run_dir = place.outputs / row.id
        record_dir = record_folder(run_dir)
        process = read_process(record_dir)
        where = where_is(process, record_dir)
        if where is Where.ELSEWHERE:
            unseen.append(row.id)
        elif where is Where.HERE and (is_running(run_dir, record_dir) or find_by_mark(run_dir, record_dir)):
            found[row.id] = run_dir, record_dir, process or {}

    def signal_all(number: int) -> bool:
        """Whether anything of them is alive."""
        alive = False
        for run_dir, record_dir, process in found.values():
            pids = find_by_mark(run_dir, record_dir)
            if process and is_alive(process["pid"], process["start"], process["boot"]):
                pids.append(process["pid"])
            if number:
                signal_groups(pids, number)
            alive |= bool(pids)
        return alive

    signal_all(signal.SIGTERM)
    deadline = time.monotonic() + place.study.launch.grace
    while time.monotonic() < deadline and signal_all(0):
        time.sleep(0.05)
    signal_all(signal.SIGKILL)
    told = f"stopped {', '.join(found)} (`looplab resume` records it)" if found else "no training is alive"
    if unseen:
        told += f"; {', '.join(unseen)} may run on another host or in another container, and cannot be ended from here"
    return f"no engine is running; {told}"
