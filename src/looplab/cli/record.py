"""verify, anchor, reindex."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_for_reading, open_lab, open_record
from looplab.config.lab import AnchorConfig
from looplab.errors import BusyError
from looplab.ledger import anchors
from looplab.ledger import audit as auditing
from looplab.ledger.ledger import Ledger
from looplab.ledger.proof import prove
from looplab.ledger.study import JOBS_SUFFIX
from looplab.loop.lock import engine_pid


def verify(
    folder: Path | None, against: Sequence[str], ledger_id: str | None, allowed: Path | None, json: bool
) -> None:
    lab = open_record(folder)
    ledger = open_for_reading(lab)
    result = auditing.audit(ledger, lab.folder)
    proof = prove(ledger, lab.folder, lab.anchors, against, ledger_id=ledger_id, allowed=allowed)
    findings = [*result.findings, *proof.findings]
    if json:
        compared = {"compared": proof.anchors, "up_to": proof.up_to, "proof": proof.sentence, "notes": proof.notes}
        output.print_json({**asdict(result), "findings": findings, "whole": not findings, "anchors": compared})
    else:
        for finding in findings:
            output.say(f"{finding.what}: {finding.where}: {finding.why}")
        for note in (*result.notes, *proof.notes):
            output.say(f"note: {note}")
        if findings:
            output.say(f"the record is not whole: {len(findings)} finding(s)")
        else:
            head = f"{result.events}:{result.head}"
            output.say(f"the record is whole: {result.events} events, {result.files} files; head {head}")
            output.say(proof.sentence)
    if findings:
        sys.exit(1)


def anchor(folder: Path | None, file: Path | None, json: bool) -> None:
    lab = open_record(folder)
    configs = lab.anchors
    if file is not None:
        key = next((config.sign for config in configs if config.sign), None)
        configs = [AnchorConfig(file=str(file.expanduser().absolute()), sign=key)]
    with contextlib.closing(Ledger(lab.ledger_path, create=False)) as ledger:
        done = anchors.publish(ledger, lab.folder, configs)
    if json:
        output.print_json(
            {"line": done.anchor.line, **asdict(done.anchor), "where": done.where, "problems": done.problems}
        )
    else:
        output.say(done.anchor.line)
    for name, why in done.problems.items():
        output.warn(f"{name}: {why}")
    if not done.where:
        output.warn("it was not published: keep this line where nobody who can write the lab can change it")
    if done.problems:
        sys.exit(1)


def reindex(folder: Path | None, json: bool) -> None:
    lab = open_lab(folder)
    for study in [*lab.studies, *(study + JOBS_SUFFIX for study in lab.studies)]:
        if engine_pid(lab.folder, study) is not None:
            raise BusyError(f"an engine is at work on study {study!r}", hint="end it with `looplab stop --drain`")
    ledger, aside = auditing.open_or_replace(lab.ledger_path)
    with contextlib.closing(ledger):
        done = auditing.reindex(ledger, lab.folder)
    if json:
        output.print_json({**asdict(done), "put_aside": aside and str(aside)})
        return
    if aside is not None:
        output.say(f"the ledger could not be read; it was put aside as {aside.name} and a new chain begins")
    for study, number in done.runs.items():
        output.say(f"study {study}: {number} run(s) from their folders")
    if done.recovered:
        output.say(f"{done.recovered} run(s) and proposals that the chain did not know were recorded from folders")
    for study, runs in done.lost.items():
        shown = ", ".join(runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
        output.say(f"study {study}: {len(runs)} run(s) have no folder any more and are lost: {shown}")
    if not done.runs:
        output.say("no run folders were found")
