"""check, propose, edit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import LabContext, open_lab, open_place
from looplab.config import paths
from looplab.config.edits import apply_edits, parse_edit
from looplab.config.files import read_document
from looplab.config.lab import LabConfig, find_lab, load_lab
from looplab.decide.base import Proposal, describe_error, is_environmental
from looplab.decide.queue import read_queue
from looplab.errors import LabError
from looplab.guard.knobs import Knob
from looplab.ledger.ledger import Ledger
from looplab.loop.decision import Decider, ProposalRejected
from looplab.loop.flags import edits_of_flags
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions, Setup, agent_warnings
from looplab.runs.disk import refuse_network_disk
from looplab.runs.names import random_suffix
from looplab.runs.redact import redact_edits
from looplab.untrusted import real_path


def check(folder: Path | None, name: str | None, cfgs: Sequence[Path] | None, mode: str | None, json: bool) -> None:
    from looplab.cli.planning import show_command
    from looplab.loop.preview import base_command

    lab = open_lab(folder)
    refuse_network_disk(lab.folder)
    studies = [lab.study(name)] if name else list(lab.studies.values())
    told = []
    for study in studies:
        setup = check_study(
            lab, study, RunOptions(cfgs=tuple(str(real_path(p)) for p in cfgs or ()), mode=mode, informal=True)
        )
        queued = sum(len(read_queue(lab.folder / entry.queue)) for entry in study.proposers if entry.queue)
        with lab.at(study, "launch"):
            commands = {base.name: base_command(setup, base) for base in setup.bases}
        told.append(
            {
                "study": study.name,
                "bases": [base.name for base in setup.bases],
                "notes": list(setup.notes),
                "queued": queued,
                "slots": [slot.name for slot in setup.slots],
                "argv": {name: command.argv for name, command in commands.items()},
                "commands": {name: command.as_dict() for name, command in commands.items()},
                "knobs": {base.name: setup.guard.knob_values(base.config) for base in setup.bases},
                "seed": setup.seed_route,
                "warnings": agent_warnings(study, lab.folder),
            }
        )
        if json:
            continue
        output.say(
            f"study {study.name}: {len(setup.bases)} base config(s), {len(study.knobs)} knob(s), {queued} queued"
        )
        for note in setup.notes:
            output.say(f"  note: {note}")
        output.say(f"  {_seed_line(setup)}")
        for warning in agent_warnings(study, lab.folder):
            output.say(f"  WARNING: {warning}")
        output.table(
            ("knob", "legal", *(base.name for base in setup.bases)),
            [
                (path, knob.describe(), *(_values(base.config, knob) for base in setup.bases))
                for path, knob in setup.guard.knobs.items()
            ],
        )
        for name_, command in commands.items():
            output.say(f"the command of {name_}: {shlex.join(command.argv)}")
        show_command(next(iter(commands.values())))
        output.say("all is well" if study is studies[-1] else "")
    if json:
        output.print_json({"lab": str(lab.folder), "studies": told})


def _seed_line(setup: Setup) -> str:
    if setup.seed_route is not None:
        return f"seed: reaches the trainer as {setup.seed_route}"
    line = "seed: none reaches the trainer"
    if setup.study.judge is not None and not setup.study.deterministic:
        line += (
            "; the judge can only repeat the same command. Name the config's key with `seed:`, or write {seed} in "
            "launch.command or launch.env"
        )
    return line


def _values(config: dict[str, Any], knob: Knob) -> str:
    found = ", ".join(output.cell(paths.get(config, place)) for place in paths.find(config, knob.path))
    return found or (f"{output.cell(knob.default)} (default)" if knob.has_default else "-")


def propose(
    folder: Path | None,
    name: str | None,
    change: Sequence[str],
    reason: str,
    hypothesis: str,
    parent: str,
    json: bool,
) -> None:
    edits = [str(parse_edit(text)) for text in change]
    place = open_place(folder, name, create=parent in ("best", "base"))
    if parent not in ("best", "base"):
        parent = place.record.run(parent).id
    refused, warning = _foresee(place, Proposal(tuple(edits), reason, "person", None if parent == "base" else parent))
    objective = place.study.objective
    if place.record.objective() is None:  # else a running engine, or the next one, says what the runs are measured by
        place.record.open(objective.metric if objective else None, objective.goal if objective else "min")
    number = place.record.propose(
        "person", edits, reason, parent=None if parent == "base" else parent, hypothesis=hypothesis
    )
    waiting = place.record.count_waiting()
    if json:
        told = {"proposal": number, "edits": edits, "parent": parent, "waiting": waiting, "refused": refused,
                "warning": warning}  # fmt: skip
        output.print_json(told)
    else:
        output.say(f"proposal {number} waits ({waiting} in the queue): {' '.join(edits)}")
        if refused:
            output.say(f"note: as things are, it will be rejected: {refused}")
        if warning:
            output.say(f"note: {warning}")


def _foresee(place: LabContext, proposal: Proposal) -> tuple[str | None, str | None]:
    """Why the guard would refuse the proposal if its turn were now, and what a person should know if it would not."""
    setup = check_study(place.lab, place.study, RunOptions(informal=True))
    try:
        return None, Decider(setup, place.record).decide(proposal).warning
    except Exception as error:
        if is_environmental(error):
            raise
        return str(error) if isinstance(error, ProposalRejected) else describe_error(error), None


def edit(
    base: Path | None,
    changes: Sequence[str],
    flags: Mapping[str, int | None],
    reason: str,
    out_dir: Path | None,
    run: bool,
    alone: Mapping[str, Any],
    folder: Path | None,
    study: str | None,
    json: bool,
) -> None:
    if base is None:
        raise LabError("which config?", hint="looplab edit BASE --change path@op=value")
    given = [f"{name}={value}" for name, value in flags.items() if value is not None]
    if not changes and not given:
        raise LabError("no change given", hint="--change 'train.lr@mul=2'")
    document = read_document(base)
    target = out_dir or base.parent
    lab = _lab_around(folder, target)
    mapped = edits_of_flags(_keys_of_flags(lab, study), given, {base.name: document.plain()})
    changes = [*changes, *(flag.edit for flag in mapped)]
    applied = apply_edits(document.data, changes)
    if run and lab is None:
        raise LabError(f"{target} lies in no lab, so there is nothing to run it with", hint="give --lab, or no --run")
    target.mkdir(parents=True, exist_ok=True)
    while True:
        variant = target / f"{base.stem}_{random_suffix(6)}{base.suffix}"
        if not variant.exists():
            break
    document.with_data(applied.config).save(variant)
    if lab is not None:
        _record(lab, variant, base, changes, reason)
    if json:
        told = {
            "variant": str(variant),
            "parent": str(base),
            "reason": reason,
            "changes": {c.path: {"old": c.old, "new": c.new} for c in applied.changes},
            "notes": [*(flag.describe() for flag in mapped), *applied.notes],
            "recorded": lab is not None,
        }
        (output.print_line if run else output.print_json)(told)  # the lines of the run follow
    else:
        for c in applied.changes:
            old = "(new)" if c.added else output.cell(c.old)
            output.say(f"  {c.path}: {old} → {'(removed)' if c.removed else output.cell(c.new)}")
        for note in (*(flag.describe() for flag in mapped), *applied.notes):
            output.say(f"  note: {note}")
        output.say(str(variant))
    if run and lab is not None:
        from looplab.cli.running import run_alone

        run_alone(lab, study, variant, json=json, **alone)


def _keys_of_flags(lab: LabConfig | None, study: str | None) -> Mapping[str, str]:
    """What the lab file says about the keys that flags edit; nothing if it is not clear which study is meant."""
    if lab is None or (study is None and len(lab.studies) > 1):
        return {}
    return lab.study(study).flags


def _lab_around(folder: Path | None, target: Path) -> LabConfig | None:
    """The lab whose ledger gets parent and reason; outside of a lab there is none to write to."""
    try:
        found = find_lab(folder or real_path(target))
    except LabError:
        if folder is not None:
            raise
        return None
    return load_lab(found)


def _record(lab: LabConfig, variant: Path, base: Path, changes: Sequence[str], reason: str) -> None:
    ledger = Ledger(lab.ledger_path)
    with ledger.write():
        ledger.record(
            "variant written",
            "",
            variant=os.path.relpath(variant, lab.folder),
            parent=os.path.relpath(base, lab.folder),
            edits=list(redact_edits(changes)),
            reason=reason,
        )
