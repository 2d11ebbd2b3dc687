"""verify, anchor, reindex, restore."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_for_reading, open_lab, open_record
from looplab.config.lab import AnchorConfig, LabConfig
from looplab.errors import BusyError
from looplab.ledger import anchors, rebuild
from looplab.ledger import audit as auditing
from looplab.ledger.ledger import DamagedError, Ledger
from looplab.ledger.proof import Proof, prove
from looplab.ledger.view import JOBS_SUFFIX
from looplab.loop.lock import engine_pid
from looplab.report.wording import plural


def verify(
    folder: Path | None, against: Sequence[str], ledger_id: str | None, allowed: Path | None, json: bool
) -> None:
    lab = open_record(folder)
    proof = Proof(0)
    try:
        ledger = open_for_reading(lab)
    except DamagedError as error:
        result = auditing.audit_unreadable(lab.ledger_path, str(error))
    else:
        running = {study for study in lab.studies if engine_pid(lab.folder, study) is not None}
        result = auditing.audit(ledger, lab.folder, running)
        with contextlib.suppress(*auditing.DAMAGE if result.findings else ()):
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
            output.say(f"the record is not whole: {plural(len(findings), 'finding')}")
        else:
            head = f"{result.events}:{result.head}"
            output.say(f"the record is whole: {result.events} events, {result.files} files; head {head}")
            output.say(proof.sentence)
        output.say(f"not covered: {result.outside}")
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
        output.warn("not published: keep this line where nobody with write access to the lab can change it")
    if done.problems:
        sys.exit(1)


def reindex(folder: Path | None, json: bool) -> None:
    lab = _idle_lab(folder)
    _print_rebuild(rebuild.reindex(lab.claim_ledger(), lab.folder), json)


def restore(folder: Path | None, backup: Path | None, json: bool) -> None:
    lab = _idle_lab(folder)
    _print_rebuild(rebuild.restore(lab.claim_ledger(), lab.folder, backup), json)


def _idle_lab(folder: Path | None) -> LabConfig:
    """Open the lab.

    Raises:
        BusyError: An engine is running in it.
    """
    lab = open_lab(folder)
    for study in [*lab.studies, *(study + JOBS_SUFFIX for study in lab.studies)]:
        if engine_pid(lab.folder, study) is not None:
            raise BusyError(f"an engine is running for study {study!r}", hint="stop it with `looplab stop --drain`")
    return lab


def _print_rebuild(done: rebuild.Reindexed, json: bool) -> None:
    if json:
        output.print_json(asdict(done))
        return
    if done.backup:
        output.say(f"the ledger was restored from the backup {Path(done.backup).name}")
    if done.aside:
        what = "the previous files" if done.backup else "damaged files"
        output.say(f"{what} were moved aside: {', '.join(done.aside)}")
    if done.events:
        output.say(f"{plural(done.events, 'event was', 'events were')} recovered from the journal and the backups")
    if done.events_lost:
        output.say(
            f"{plural(done.events_lost, 'event is', 'events are')} lost: not in the ledger, its journal or a backup"
        )
    for study, number in done.runs.items():
        output.say(f"study {study}: {plural(number, 'run')} rebuilt from folders")
    if done.recovered:
        output.say(
            f"{plural(done.recovered, 'run or proposal', 'runs and proposals')} not in the chain, recorded from folders"
        )
    if done.pipelines:
        output.say(
            f"{plural(done.pipelines, 'stage or suite', 'stages and suites')} not in the chain, recorded from folders"
        )
    for study, runs in done.gone.items():
        output.say(f"study {study}: {plural(len(runs), 'run')} without a folder, lost: {_shorten(runs)}")
    for study, runs in done.dropped.items():
        output.say(
            f"study {study}: {plural(len(runs), 'planned run')} not started, to be planned again: {_shorten(runs)}"
        )
    for study in done.judged_again:
        output.say(f"study {study}: the judge's state is lost; the next engine judges all runs again")
    for run, new in done.renumbered.items():
        output.say(f"{run} had the same number as another run; it is now number {new}")
    if not done.runs and not done.pipelines:
        output.say("no run folders were found")


def _shorten(runs: Sequence[str]) -> str:
    return ", ".join(runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
