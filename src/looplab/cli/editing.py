"""check, propose, edit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import LabContext, find_study, open_context, open_lab
from looplab.config import paths
from looplab.config.edits import apply_edits, parse_edit
from looplab.config.files import read_document
from looplab.config.lab import FIND_OBJECTIVE, LabConfig, StudyConfig, find_lab, load_lab
from looplab.decide.base import Proposal, describe_error, is_environmental
from looplab.decide.queue import read_queue
from looplab.errors import LabError
from looplab.guard.knobs import Knob
from looplab.ledger.catalogue import VariantWrittenEvent
from looplab.ledger.ledger import Ledger
from looplab.ledger.roles import Origin
from looplab.loop.decision import Decider, ProposalRejected
from looplab.loop.flags import edits_of_flags
from looplab.loop.session import check_study, refuse_hopeless
from looplab.loop.setup import RunOptions, Setup, agent_warnings
from looplab.measure.missing import doubt_about
from looplab.report.wording import plural
from looplab.runs.folder import can_be_run, is_run, read_json, study_folder
from looplab.runs.names import random_suffix
from looplab.runs.redact import redact_edits
from looplab.untrusted import real_path

CHECKED_ENTRIES = 1000
"""Entries of a queue's file that `check` shows to the guard."""
SHOWN_ENTRIES = 5
"""Entries of which it says why they will be rejected."""
RECENT_RUNS = 5
"""Latest runs, and latest tries, whose metrics `check` compares with the objective."""


def check(
    folder: Path | None,
    name: str | None,
    cfgs: Sequence[Path] | None,
    mode: str | None,
    json: bool,
    *,
    mended: Mapping[str, Any] | None = None,
) -> None:
    """Check a lab, and show what its runs would be.

    Args:
        mended: What `--fix` found and did before; None: say what it would do.
    """
    from looplab.cli import mending
    from looplab.cli.planning import show_command
    from looplab.loop.preview import base_command
    from looplab.pipeline.plan import missing_artifacts

    lab = open_lab(folder)
    studies = [lab.study(name)] if name else list(lab.studies.values())
    found = mending.preview(lab, studies) if mended is None else None
    checked = []
    missing: list[str] = []
    for study in studies:
        try:
            setup = check_study(
                lab, study, RunOptions(cfgs=tuple(str(real_path(p)) for p in cfgs or ()), mode=mode, informal=True)
            )
        except LabError:
            if found is not None and not json:
                mending.say_preview(found)
            raise
        queues = {entry.queue: len(read_queue(lab.folder / entry.queue)) for entry in study.proposers if entry.queue}
        with lab.at(study, "launch"):
            commands = {base.name: base_command(setup, base) for base in setup.bases}
        artifacts = [missing_artifacts(lab.folder, study, base.config, base.name) for base in setup.bases]
        missing += (warnings := [warning for warning in artifacts if warning is not None])
        missing += (doubts := [*_unmeasured(lab, study), *_unknown_knobs(setup), *_hopeless_entries(setup)])
        warnings += doubts
        warnings = [*agent_warnings(study, lab.folder), *warnings]
        checked.append(
            {
                "study": study.name,
                "bases": [base.name for base in setup.bases],
                "notes": list(setup.notes),
                "queued": sum(queues.values()),
                "slots": [slot.name for slot in setup.slots],
                "argv": {name: command.argv for name, command in commands.items()},
                "commands": {name: command.as_dict() for name, command in commands.items()},
                "knobs": {base.name: setup.guard.knob_values(base.config) for base in setup.bases},
                "seed": setup.seed_route,
                "warnings": warnings,
            }
        )
        if json:
            continue
        output.say(
            f"study {study.name}: {plural(len(setup.bases), 'base config')}, {plural(len(study.knobs), 'knob')}"
            + "".join(f", {plural(count, 'proposal')} in {file}" for file, count in queues.items())
        )
        for note in setup.notes:
            output.say(f"  note: {note}")
        output.say(f"  {_seed_line(setup)}")
        for warning in warnings:
            output.say(f"  WARNING: {warning}")
        output.table(
            ("knob", "legal", *(base.name for base in setup.bases)),
            [
                (path, knob.describe(), *(_knob_values(base.config, knob) for base in setup.bases))
                for path, knob in setup.guard.knobs.items()
            ],
        )
        for name_, command in commands.items():
            output.say(f"command for {name_}: {shlex.join(command.argv)}")
        show_command(next(iter(commands.values())))
        if study is not studies[-1]:
            output.say()
    if json:
        output.print_json(
            {
                "lab": str(lab.folder),
                "studies": checked,
                **(mending.as_dict(found) if found is not None else mended or {}),
            }
        )
        return
    if found is not None:
        mending.say_preview(found)
    noted = missing or ((found.fixes or found.doubts) if found is not None else (mended or {}).get("doubts"))
    output.say("no errors; see the notes above" if noted else "all is well")


def _unmeasured(lab: LabConfig, study: StudyConfig) -> list[str]:
    """Return warnings about an objective that is missing, or that none of the latest runs and tries has measured."""
    if study.objective is None:
        return [f"no objective yet, so `looplab run` cannot search: {FIND_OBJECTIVE}"] if study.is_searched else []
    from looplab.cli.objective import last_try
    from looplab.onboard.trial import SUFFIX

    measured: set[str] = set()
    is_complete = False
    for name in (study.name, study.name + SUFFIX):
        for run_dir in _latest_runs(study_folder(lab.folder, name)):
            summary = read_json(run_dir, "summary.json", strict=False)
            metrics = summary.get("metrics") or {}
            measured.update(metrics)
            is_complete = is_complete or (bool(metrics) and summary.get("status") == "ok")
    doubts = [doubt_about(one.metric, measured, complete=is_complete) for one in study.objective.targets[::-1]]
    if doubts[0] is not None:  # printed names are also found with other separators
        tried = last_try(lab, study)
        if tried is not None and tried[1] is not None:
            doubts[0] = None
    return [f"objective: {doubt}" for doubt in doubts if doubt is not None]


def _latest_runs(study: Path) -> list[Path]:
    """Return the newest run folders of a study."""
    try:
        names = sorted(filter(can_be_run, os.listdir(study)), reverse=True)
    except OSError:
        return []
    folders = (study / name for name in names)
    return list(islice((one for one in folders if not one.is_symlink() and is_run(one)), RECENT_RUNS))


def _unknown_knobs(setup: Setup) -> list[str]:
    """Return warnings about knobs that no base config has: probably misspelt."""
    found = []
    for path, knob in setup.guard.knobs.items():
        if knob.has_default or any(paths.find(base.config, knob.path) for base in setup.bases):
            continue
        near = paths.nearest(setup.bases[0].config, path, 1) if setup.bases else []
        found.append(f"no base config has the knob {path}" + (f"; did you mean {near[0]}?" if near else ""))
    return found


def _hopeless_entries(setup: Setup) -> list[str]:
    """Return warnings about entries of the queue's files that the guard rejects whatever they start from."""
    found: list[str] = []
    for entry in setup.study.proposers:
        for proposal, _ in read_queue(setup.lab / entry.queue)[:CHECKED_ENTRIES] if entry.queue else ():
            rulings = [setup.guard.check(base.config, proposal.edits) for base in setup.bases]
            why = [[problem for problem in one.problems if problem.rule == "not a knob"] for one in rulings]
            if why and all(why):
                found.append(f"{entry.queue}: {' '.join(proposal.edits)} will be rejected: {why[0][0]}")
    return found if len(found) <= SHOWN_ENTRIES else [*found[:SHOWN_ENTRIES], f"and {len(found) - SHOWN_ENTRIES} more"]


def _seed_line(setup: Setup) -> str:
    if setup.seed_route is not None:
        return f"seed: reaches the trainer as {setup.seed_route}"
    line = "seed: does not reach the trainer"
    if setup.study.judge is not None and not setup.study.deterministic:
        line += (
            "; the judge can only repeat the same command. Set `seed:` to the config's key, or use {seed} in "
            "launch.command or launch.env"
        )
    return line


def _knob_values(config: dict[str, Any], knob: Knob) -> str:
    found = ", ".join(output.cell(paths.get(config, path)) for path in paths.find(config, knob.path))
    return found or (f"{output.cell(knob.default)} (default)" if knob.has_default else "-")


def propose(
    folder: Path | None,
    name: str | None,
    *,
    change: Sequence[str],
    reason: str,
    hypothesis: str,
    parent: str,
    json: bool,
) -> None:
    parsed = [parse_edit(text) for text in change]
    edits = [str(one) for one in parsed]
    lab = load_lab(find_lab(folder or Path.cwd()))
    refuse_hopeless(lab, find_study(lab, name), parsed)
    context = open_context(folder, name, create=parent in ("best", "base"))
    start = find_parent(context, parent)
    refused, warning = preview_decision(context, Proposal(tuple(edits), reason, Origin.PERSON, start))
    number = queue_proposal(context, edits, reason, parent=start, hypothesis=hypothesis)
    waiting = context.record.count_waiting()
    if json:
        output.print_json(
            {"proposal": number, "edits": edits, "parent": start or "base", "waiting": waiting, "refused": refused,
             "warning": warning}
        )  # fmt: skip
    else:
        output.say(f"proposal {number} is queued ({waiting} waiting): {' '.join(edits)}")
        if refused:
            output.say(f"note: it would currently be rejected: {refused}")
        if warning:
            output.say(f"note: {warning}")


def find_parent(context: LabContext, name: str) -> str | None:
    """Return what a proposal starts from: the id of a run, `best`, or None for the base."""
    if name in ("best", "base"):
        return None if name == "base" else name
    return context.record.run(name).id


def queue_proposal(
    context: LabContext, edits: Sequence[str], reason: str, *, parent: str | None, hypothesis: str
) -> int:
    """Add a person's proposal to the queue; return its number."""
    objective = context.study.objective
    if context.record.objective() is None:  # otherwise an engine decides what the runs are measured by
        context.record.open(objective.metric if objective else None, objective.goal if objective else "min")
    number = context.record.propose(Origin.PERSON, edits, reason, parent=parent, hypothesis=hypothesis)
    assert number is not None
    return number


def preview_decision(context: LabContext, proposal: Proposal) -> tuple[str | None, str | None]:
    """Return why the proposal would be rejected now (None: it would not), and a warning if it would be run."""
    setup = check_study(context.lab, context.study, RunOptions(informal=True))
    try:
        return None, Decider(setup, context.record).decide(proposal).warning
    except Exception as error:
        if is_environmental(error):
            raise
        return str(error) if isinstance(error, ProposalRejected) else describe_error(error), None


def edit(
    folder: Path | None,
    study: str | None,
    *,
    base: Path | None,
    changes: Sequence[str],
    flags: Mapping[str, int | None],
    reason: str,
    out_dir: Path | None,
    run: bool,
    run_options: Mapping[str, Any],
    json: bool,
) -> None:
    if base is None:
        raise LabError("no config given", hint="looplab edit BASE --change path@op=value")
    set_flags = [f"{name}={value}" for name, value in flags.items() if value is not None]
    if not changes and not set_flags:
        raise LabError("no change given", hint="--change 'train.lr@mul=2'")
    document = read_document(base)
    target = out_dir or base.parent
    lab = _lab_around(folder, target)
    mapped = edits_of_flags(_flag_keys(lab, study), set_flags, {base.name: document.plain()})
    changes = [*changes, *(flag.edit for flag in mapped)]
    applied = apply_edits(document.data, changes)
    if run and lab is None:
        raise LabError(
            f"{target} is not in a lab, so the variant cannot run", hint="name a lab with --lab, or omit --run"
        )
    target.mkdir(parents=True, exist_ok=True)
    while True:
        variant = target / f"{base.stem}_{random_suffix(6)}{base.suffix}"
        if not variant.exists():
            break
    document.with_data(applied.config).save(variant)
    if lab is not None:
        _record_variant(lab, variant, base, changes, reason)
    if json:
        payload = {
            "variant": str(variant),
            "parent": str(base),
            "reason": reason,
            "changes": {c.path: {"old": c.old, "new": c.new} for c in applied.changes},
            "notes": [*(flag.describe() for flag in mapped), *applied.notes],
            "recorded": lab is not None,
        }
        (output.print_line if run else output.print_json)(payload)  # the run's lines follow
    else:
        for c in applied.changes:
            old = "(new)" if c.added else output.cell(c.old)
            output.say(f"  {c.path}: {old} → {'(removed)' if c.removed else output.cell(c.new)}")
        for note in (*(flag.describe() for flag in mapped), *applied.notes):
            output.say(f"  note: {note}")
        output.say(str(variant))
    if run and lab is not None:
        from looplab.cli.running import run_alone

        run_alone(lab, study, variant, json=json, **run_options)


def _flag_keys(lab: LabConfig | None, study: str | None) -> Mapping[str, str]:
    """Config keys of the flags, from the lab file; empty if the study is ambiguous."""
    if lab is None or (study is None and len(lab.studies) > 1):
        return {}
    return lab.study(study).flags


def _lab_around(folder: Path | None, target: Path) -> LabConfig | None:
    """Return the lab whose ledger records the variant; None: the target is not in a lab."""
    try:
        found = find_lab(folder or real_path(target))
    except LabError:
        if folder is not None:
            raise
        return None
    return load_lab(found)


def _record_variant(lab: LabConfig, variant: Path, base: Path, changes: Sequence[str], reason: str) -> None:
    ledger = Ledger(lab.claim_ledger())
    with ledger.write():
        event = VariantWrittenEvent(
            variant=os.path.relpath(variant, lab.folder),
            parent=os.path.relpath(base, lab.folder),
            edits=list(redact_edits(changes)),
            reason=reason,
        )
        ledger.record(event, "")
