"""verify, reindex."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.errors import BusyError
from looplab.ledger import audit as auditing
from looplab.ledger.ledger import Ledger
from looplab.loop.lock import engine_pid
from looplab.loop.submitting import SUFFIX


def verify(folder: Path | None, json: bool) -> None:
    lab = open_lab(folder)
    result = auditing.audit(Ledger(lab.ledger_path, create=False), lab.folder)
    if json:
        output.print_json({**asdict(result), "whole": not result.findings})
        sys.exit(1 if result.findings else 0)
    for finding in (*result.notes, *result.findings):
        output.say(f"{finding.what}: {finding.where}: {finding.why}")
    if result.findings:
        output.say(f"the record is not whole: {len(result.findings)} finding(s)")
    else:
        output.say(f"the record is whole: {result.events} events, {result.files} files; head {result.head[:16]}")
    if result.findings:
        sys.exit(1)


def reindex(folder: Path | None, json: bool) -> None:
    lab = open_lab(folder)
    for study in [*lab.studies, *(study + SUFFIX for study in lab.studies)]:
        if engine_pid(lab.folder, study) is not None:
            raise BusyError(f"an engine is at work on study {study!r}", hint="end it with `looplab stop --drain`")
    ledger, aside = auditing.open_or_replace(lab.ledger_path)
    counted = auditing.reindex(ledger, lab.folder)
    if json:
        output.print_json({"runs": counted, "put_aside": aside and str(aside)})
        return
    if aside is not None:
        output.say(f"the ledger could not be read; it was put aside as {aside.name} and a new chain begins")
    for study, number in counted.items():
        output.say(f"study {study}: {number} run(s) from their folders")
    if not counted:
        output.say("no run folders were found")
