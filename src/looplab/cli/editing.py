"""check, propose, edit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_lab, open_place, prepare_study
from looplab.config import paths
from looplab.config.edits import apply_edits, parse_edit
from looplab.config.files import read_document
from looplab.config.lab import find_lab, load_lab
from looplab.decide.queue import read_queue
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.loop.setup import Options
from looplab.runs.names import random_suffix


def check(folder: Path | None, name: str | None, cfgs: Sequence[Path] | None, mode: str | None, json: bool) -> None:
    lab = open_lab(folder)
    studies = [lab.study(name)] if name else list(lab.studies.values())
    told = []
    for study in studies:
        setup = prepare_study(
            lab, study, Options(cfgs=tuple(str(p.resolve()) for p in cfgs or ()), mode=mode, informal=True)
        )
        queued = sum(len(read_queue(lab.folder / entry.queue)) for entry in study.proposers if entry.queue)
        told.append(
            {
                "study": study.study,
                "bases": [base.name for base in setup.bases],
                "notes": list(setup.notes),
                "queued": queued,
                "slots": [slot.name for slot in setup.slots],
                "knobs": {base.name: setup.guard.knob_values(base.config) for base in setup.bases},
            }
        )
        if json:
            continue
        output.say(
            f"study {study.study}: {len(setup.bases)} base config(s), {len(study.knobs)} knob(s), {queued} queued"
        )
        for note in setup.notes:
            output.say(f"  note: {note}")
        output.table(
            ("knob", "legal", *(base.name for base in setup.bases)),
            [
                (path, knob.describe(), *(_values(base.config, path) for base in setup.bases))
                for path, knob in setup.guard.knobs.items()
            ],
        )
        output.say("all is well" if study is studies[-1] else "")
    if json:
        output.print_json({"lab": str(lab.folder), "studies": told})


def _values(config: dict[str, Any], path: str) -> str:
    return ", ".join(output.cell(paths.get(config, place)) for place in paths.find(config, path)) or "-"


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
    place = open_place(folder, name, create=True)
    if parent not in ("best", "base"):
        parent = place.record.run(parent).id
    objective = place.study.objective
    place.record.open(objective.metric if objective else None, objective.goal if objective else "min")
    number = place.record.propose(
        "person", edits, reason, parent=None if parent == "base" else parent, hypothesis=hypothesis
    )
    waiting = place.record.count_waiting()
    if json:
        output.print_json({"proposal": number, "edits": edits, "parent": parent, "waiting": waiting})
    else:
        output.say(f"proposal {number} waits ({waiting} in the queue): {' '.join(edits)}")


def edit(
    base: Path | None,
    changes: Sequence[str],
    reason: str,
    out_dir: Path | None,
    run: bool,
    extra: Sequence[str],
    folder: Path | None,
    study: str | None,
    json: bool,
) -> None:
    if base is None:
        raise LabError("which config?", hint="looplab edit BASE --change path@op=value")
    if not changes:
        raise LabError("no change given", hint="--change 'train.lr@mul=2'")
    document = read_document(base)
    applied = apply_edits(document.data, changes)
    folder_out = out_dir or base.parent
    folder_out.mkdir(parents=True, exist_ok=True)
    while True:
        variant = folder_out / f"{base.stem}_{random_suffix(6)}{base.suffix}"
        if not variant.exists():
            break
    document.with_data(applied.config).save(variant)
    recorded = _record(variant, base, changes, reason, folder)
    if json:
        output.print_json(
            {
                "variant": str(variant),
                "parent": str(base),
                "reason": reason,
                "changes": {c.path: {"old": c.old, "new": c.new} for c in applied.changes},
                "notes": list(applied.notes),
                "recorded": recorded,
            }
        )
    else:
        for c in applied.changes:
            old = "(new)" if c.added else output.cell(c.old)
            output.say(f"  {c.path}: {old} → {'(removed)' if c.removed else output.cell(c.new)}")
        for note in applied.notes:
            output.say(f"  note: {note}")
        output.say(str(variant))
    if run:
        command = [sys.executable, "-m", "looplab", "run", "--cfgs", str(variant), "--exec"]
        command += ["--lab", str(folder)] * bool(folder) + ["--study", study or ""] * bool(study)
        command += ["--json"] * json + ["--", *extra] * bool(extra)
        sys.stdout.flush()
        os.execv(command[0], command)


def _record(variant: Path, base: Path, changes: Sequence[str], reason: str, folder: Path | None) -> bool:
    """Parent and reason go into the ledger of the lab; outside of a lab there is none to write to."""
    try:
        lab = load_lab(find_lab(folder or variant.parent.resolve()))
    except LabError:
        if folder is not None:
            raise
        return False
    ledger = Ledger(lab.ledger_path)
    with ledger.write():
        ledger.record(
            "variant written",
            "",
            variant=os.path.relpath(variant, lab.folder),
            parent=os.path.relpath(base, lab.folder),
            edits=list(changes),
            reason=reason,
        )
    return True
