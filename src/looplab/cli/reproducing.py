"""reproduce, remeasure."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_context
from looplab.cli.running import TerminalSession
from looplab.errors import LabError
from looplab.judge.reproduce import compare
from looplab.judge.stats import pooled_spread
from looplab.ledger.catalogue import ReproducedEvent
from looplab.ledger.roles import COPIES, Origin, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop import remeasure as remeasuring
from looplab.loop import reproduce as reproducing
from looplab.loop.lock import StudyLock, engine_pid
from looplab.loop.session import check_study, last_options
from looplab.loop.submitting import refusal, refuse
from looplab.report.reports import write_reports
from looplab.report.wording import plural
from looplab.runs.folder import make_study_folder, study_folder


def reproduce(folder: Path | None, name: str | None, run: str, tolerance: float | None, keep: bool, json: bool) -> None:
    context = open_context(folder, name)
    lab, study, record = context.lab, context.study, context.record
    original = record.run(run)
    if original.role == Role.IMPORTED:
        raise LabError(
            f"run {original.id} was imported, so it is not recorded how the other tool ran it",
            hint=f"run its config here: `looplab propose --parent {original.id} --change …`",
        )
    if original.objective is None:
        raise LabError(f"run {original.id} has no objective to compare", hint="choose another run")
    capsule = reproducing.read_capsule(record, context.outputs, original.id)
    options = replace(last_options(record, lab.folder), asked_only=True, informal=True)
    setup = check_study(lab, study, options)
    pid = engine_pid(lab.folder, study.name)
    runs = None if options.runs is None else options.runs + options.since_run
    used_up = refusal(study.budget, record, runs)
    if used_up is not None:
        raise LabError(
            f"{original.id} cannot be run again: {used_up}",
            hint="raise the budget in lab.yaml, or with `looplab run --runs N`",
        )
    if not json:
        output.say(f"running again: {shlex.join(map(str, capsule['argv']))}")
        output.say(f"running its Python to list the packages: {capsule['program']}")
    code_notes = reproducing.checkout(lab.folder, context.outputs, original.id, capsule)
    changed = reproducing.differences(lab.folder, context.outputs, capsule, setup.prints)
    if not json:
        for line in code_notes:
            output.say(f"code: {line}")
        for line in changed:
            output.say(f"changed since: {line}")
    proposal = _enqueue(record, original)
    if pid is None:
        with TerminalSession(lab, study, json=json) as session:
            session.drive(setup)
    elif not json:
        output.say(f"the running engine (pid {pid}) will run it when a slot is free")
    repeated = _wait_for_run(record, proposal)
    noise = pooled_spread(_objectives_by_config(record).values())
    result = compare(original.objective, repeated.objective, noise[0] if noise else None, tolerance)
    with context.ledger.write():
        fields = {key: value for key, value in asdict(result).items() if value == value}  # the chain allows no NaN
        context.ledger.record(ReproducedEvent(again=repeated.id, **fields), study.name, original.id)
    if not keep:
        reproducing.drop(lab.folder, original.id)
    if json:
        output.print_line(
            {"run": original.id, "again": repeated.id, "status": repeated.status, "original": original.objective,
             "value": repeated.objective, "noise": noise[0] if noise else None, **asdict(result), "code": code_notes,
             "changed": changed}
        )  # fmt: skip
    else:
        word = "reproduced" if result.same else "NOT reproduced"
        output.say(f"\n{word}: {original.id} as {repeated.id}. {result.why}")
    if not result.same:
        sys.exit(1)


def _enqueue(record: StudyLedger, original: RunRow) -> int:
    """Queue a reproduction under a unique source, so that it can be requested again; return the proposal."""
    times = sum(1 for row in record.proposals() if row.proposer == Origin.AGAIN and row.parent == original.id)
    source = f"{Origin.AGAIN}:{original.id}:{times + 1}"
    proposal = record.propose(Origin.AGAIN, (), f"reproduce {original.id}", parent=original.id, source=source)
    assert proposal is not None
    return proposal


def _wait_for_run(record: StudyLedger, proposal: int) -> RunRow:
    """Wait until the proposal's run has ended, here or in another engine; return the run."""
    while True:
        row = next(row for row in record.proposals() if row.id == proposal)
        if row.run is not None:
            run = record.run(row.run)
            if run.state == "ended":
                return run
        elif row.status == "rejected":
            raise LabError("the reproduction was rejected: " + "; ".join(str(p["message"]) for p in row.problems))
        if record.last_session_ended():
            refuse(record, proposal, "the engine ended before running it")
            raise LabError("the engine ended before running it", hint="`looplab status` shows why; then try again")
        time.sleep(0.1)


def _objectives_by_config(record: StudyLedger) -> dict[str, list[float]]:
    """Group the objectives of runs that differ only in their seed."""
    found: dict[str, list[float]] = {}
    for run in record.runs(status="ok"):
        if run.objective is not None and run.role not in COPIES:
            found.setdefault(run.point, []).append(run.objective)
    return found


def remeasure(folder: Path | None, name: str | None, names: Sequence[str], json: bool) -> None:
    context = open_context(folder, name)
    record, study = context.record, context.study
    if study.objective is None:
        raise LabError(f"study {study.name!r} has no objective", hint="name a metric with `objective` in lab.yaml")
    ended = record.runs(state="ended") if not names else [record.run(one) for one in names]
    setup = check_study(context.lab, study, replace(last_options(record, context.lab.folder), informal=True))
    with StudyLock(context.lab.folder, study.name):
        found = remeasuring.remeasure(setup, record, ended)
        make_study_folder(study_folder(context.lab.folder, study.name))
        write_reports(context.lab.folder, study, record)
    metric = study.objective.metric
    if json:
        output.print_json(remeasuring.describe(found, metric))
    else:
        output.table(
            ("run", f"{metric} before", "now", "note"),
            [(one.run, output.number(one.before, 6), output.number(one.after, 6), one.note) for one in found],
        )
        changed = sum(one.changed for one in found)
        output.say(f"{plural(len(found), 'run')} read again, {changed} changed; `looplab resume` continues the study")
    if not any(one.after is not None for one in found):
        sys.exit(1)
