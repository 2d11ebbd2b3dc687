"""plan."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import how_to_continue, open_lab
from looplab.config.lab import LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.judge.simulate import power
from looplab.ledger.ledger import LedgerCopy
from looplab.ledger.roles import Origin, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import ProposalRow
from looplab.loop.judging import judge_settings
from looplab.loop.prepare import FilledCommand, batch_script_of
from looplab.loop.preview import PlannedRun, Preview, preview
from looplab.loop.session import check_study, count_from_now, options_to_resume, relative_to_lab
from looplab.loop.setup import RunOptions, Setup, missing_for_formal
from looplab.report.judged import judged_now
from looplab.report.wording import plural

SHOWN_SLOTS = 8
"""More slots than this are shown as the first and the last one, and their number."""
DEFAULT_RUNS = 120
"""Number of runs that `--power` assumes if the study has no budget."""


def plan(
    folder: Path | None,
    name: str | None,
    options: RunOptions,
    *,
    resume: bool,
    commands: bool = False,
    json: bool = False,
) -> None:
    """Show what `run` would do with these options, or what `resume` would do."""
    if resume and options != RunOptions():
        raise LabError("--resume uses the options of the last `run`", hint="leave out the others")
    lab = open_lab(folder)
    study = lab.study(name)
    with contextlib.closing(LedgerCopy(lab.ledger_path)) as ledger:
        options = options_to_resume(StudyLedger(ledger, study.name), lab.folder) if resume else options
        show_plan(lab, study, options, ledger, commands=commands, resume=resume, json=json)


def show_power(folder: Path | None, name: str | None, runs: int | None, json: bool) -> None:
    """Show which improvements the study's judge finds with its budget, by simulation."""
    lab = open_lab(folder)
    study = lab.study(name)
    if study.judge_rule != "test":
        raise LabError(f"study {study.name} has no test, so there is no power to show", hint="see docs/judge.md")
    budget = runs or study.budget.runs or DEFAULT_RUNS
    metric = study.objective.metric if study.objective else "the objective"
    if not json:
        output.say(
            f"How often the judge detects an improvement of {metric} within {budget} runs, if half of the challengers "
            "have it. Simulated; sd is the standard deviation of the noise."
        )
    found = power(judge_settings(study), budget)
    with contextlib.closing(LedgerCopy(lab.ledger_path)) as ledger:
        judged = judged_now(study, StudyLedger(ledger, study.name))
    sigma = judged.sigma if judged is not None else None
    if json:
        output.print_json({"runs": budget, "noise": sigma, "power": [asdict(one) for one in found]})
        return
    output.table(
        ("improvement", metric, "found", "runs until then"),
        [
            (
                f"{one.effect:g} sd",
                "-" if sigma is None else output.number(one.effect * sigma, 3),
                f"{one.found:.0%}",
                "-" if one.runs is None else f"{one.runs:.0f}",
            )
            for one in found
        ],
    )
    if sigma is None:
        output.say("The noise is not known yet: the first runs of the base measure it.")


def show_plan(
    lab: LabConfig,
    study: StudyConfig,
    options: RunOptions,
    ledger: LedgerCopy,
    *,
    commands: bool = False,
    resume: bool = False,
    json: bool = False,
) -> None:
    options = replace(options, cfgs=relative_to_lab(lab.folder, options.cfgs))
    setup = check_study(lab, study, replace(options, informal=True))
    missing = (
        []
        if options.informal
        else missing_for_formal(setup.study, setup.slots, setup.devices, setup.bases, options.extra)
    )
    if not resume:
        setup = count_from_now(replace(setup, options=options), ledger)
    found = preview(setup, ledger)
    if json:
        output.print_json(_as_dict(setup, found, missing))
        return
    slots = [s.name + (f" (cores {','.join(map(str, s.cores))})" if s.cores else "") for s in setup.slots]
    if len(slots) > SHOWN_SLOTS:
        slots[1:-1] = [f"… ({len(slots)} in all)"]
    output.say(f"study {study.name}, slots: {', '.join(slots)}")
    for note in (*setup.notes, *found.notes):
        if found.why_none is None or not note.endswith(found.why_none):  # reported below
            output.say(f"note: {note}")
    if found.unfinished:
        names = ", ".join(f"{planned.row.id} ({planned.row.state})" for planned in found.unfinished)
        output.say(f"first, {plural(len(found.unfinished), 'unfinished run')}: {names}")
    if found.runs:
        output.table(
            ("run", "round", "role", "by", "from", "changes", "why"),
            [_table_row(planned) for planned in found.runs],
            title="then:" if found.unfinished else "the next runs:",
        )
    for planned in found.runs:
        is_repeat = planned.row.role in (Role.BASE, Role.REPLICATE, Role.CONFIRMATION)
        if not is_repeat or Origin.of(planned.row.proposer).is_person:
            for note in planned.plan.notes:
                output.say(f"note on run {planned.row.n}: {note}")
    if found.why_none is not None:
        output.say(f"no runs would be planned: {found.why_none}{how_to_continue(found.why_none)}")
    for ask in found.asks:
        output.say(f"the {ask.proposer} ({ask.cli}) will be called, for up to {plural(ask.runs_at_most, 'run')}")
    if found.undecided and not found.asks:
        output.say(f"{plural(found.undecided, 'more run')} of the round will be planned while these run")
    for row in found.rejected:
        output.say(f"would be rejected: {' '.join(row.edits)}: {_reasons(row)}")
    for planned in (*found.unfinished, *found.runs):
        if planned.problem is not None:
            output.say(f"run {planned.row.id} could not be started: {planned.problem}")
    placed = [p for p in (*found.unfinished, *found.runs) if p.row.state == "planned" and p.command is not None]
    for planned in placed if commands else placed[:1]:
        assert planned.command is not None
        output.say(f"command for run {planned.row.id}: {shlex.join(planned.command.argv)}")
        if commands:
            show_command(planned.command)
    script = batch_script_of(setup, placed[0].command) if placed and placed[0].command is not None else None
    if script is not None:
        output.say(f"batch script for run {placed[0].row.id}:")
        for line in script.splitlines():
            output.say(f"  {line}")
    if placed and not commands:
        output.say("`looplab plan --commands` shows the command, folder and environment of every run")
    for requirement in missing:
        output.say(f"`run` would refuse: it needs {requirement}")
    output.say("nothing was written or started")


def _as_dict(setup: Setup, found: Preview, missing: list[str]) -> dict[str, Any]:
    return {
        "study": setup.study.name,
        "slots": [{"name": s.name, "devices": s.devices, "cores": s.cores} for s in setup.slots],
        "missing": missing,
        "notes": [*setup.notes, *found.notes],
        "unfinished": [_run_as_dict(planned) for planned in found.unfinished],
        "runs": [_run_as_dict(planned) for planned in found.runs],
        "asks": [asdict(ask) for ask in found.asks],
        "undecided": found.undecided,
        "rejected": [{"by": row.proposer, "parent": row.parent, "edits": row.edits, "reason": row.reason,
                      "why": _reasons(row)} for row in found.rejected],
        "why_none": found.why_none,
        "batch_script": next((script for planned in (*found.unfinished, *found.runs)
                              if planned.command is not None
                              and (script := batch_script_of(setup, planned.command)) is not None), None),
    }  # fmt: skip


def _run_as_dict(planned: PlannedRun) -> dict[str, Any]:
    row, plan = planned.row, planned.plan
    return {
        "id": row.id,
        "n": row.n,
        "state": row.state,
        "round": row.round,
        "role": row.role,
        "by": row.proposer,
        "reason": row.reason,
        "parent": row.parent,
        "base": row.base,
        "twin": row.twin,
        "seed": row.seed,
        "config_hash": row.config_hash,
        "edits": plan.edits,
        "changes": plan.diff_parent,
        "notes": plan.notes,
        "config": plan.config,
        "slot": planned.slot.name,
        "extra": plan.extra,
        **(planned.command.as_dict() if planned.command else {"argv": [], "env": {}, "cwd": None, "folder": None}),
        "problem": planned.problem,
    }


def show_command(command: FilledCommand) -> None:
    """Print the folder a run starts in, and the variables that looplab adds to its environment."""
    output.say(f"  folder: {command.folder}" + (f"   started in: {command.cwd}" * (command.cwd != command.folder)))
    output.say("  environment: " + " ".join(f"{name}={shlex.quote(value)}" for name, value in command.env.items()))


def _table_row(planned: PlannedRun) -> tuple[str, ...]:
    row = planned.row
    return (
        str(row.n), str(row.round), row.role, row.proposer, row.parent or row.base or "-",
        _changes(planned.plan.diff_parent), row.reason,
    )  # fmt: skip


def _changes(diff: Mapping[str, Mapping[str, Any]]) -> str:
    changed = [
        f"{key} {output.cell(change.get('old', '-'))} → {output.cell(change.get('new', '-'))}"
        for key, change in diff.items()
    ]
    return ", ".join(changed) or "-"


def _reasons(row: ProposalRow) -> str:
    return "; ".join(str(problem["message"]) for problem in row.problems)
