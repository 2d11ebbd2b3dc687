"""verify, reindex."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.errors import BusyError
from looplab.ledger import audit as auditing
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import JOBS_SUFFIX
from looplab.loop.lock import engine_pid


def verify(folder: Path | None, json: bool) -> None:
    lab = open_lab(folder)
    result = auditing.audit(Ledger(lab.ledger_path, create=False), lab.folder)
    if json:
        output.print_json({**asdict(result), "whole": not result.findings})
        sys.exit(1 if result.findings else 0)
    for finding in result.findings:
        output.say(f"{finding.what}: {finding.where}: {finding.why}")
    for note in result.notes:
        output.say(f"note: {note}")
    if result.findings:
        output.say(f"the record is not whole: {len(result.findings)} finding(s)")
        sys.exit(1)
    output.say(f"the record is whole: {result.events} events, {result.files} files; head {result.head[:16]}")


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
