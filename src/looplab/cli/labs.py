"""Find and open the lab, the study and the ledger of a command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from looplab.cli import output
from looplab.config.lab import ITERATE_FILE, LAB_FILE, LabConfig, StudyConfig, find_lab, load_lab
from looplab.ledger import ledger as ledgers
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import JOBS_SUFFIX, RunRow
from looplab.runs.folder import study_folder


def how_to_continue(why: str) -> str:
    """Return what to call after a study ended because its rounds or runs are done; empty: it ended otherwise."""
    done = re.match(r"(?:all )?(\d+) (round|run)s? (?:is|are) done", why)
    return f"; `looplab run --{done[2]}s {int(done[1]) + 1}` would continue" if done else ""


@dataclass(frozen=True, slots=True)
class LabContext:
    """A study with its lab and its open ledger."""

    lab: LabConfig
    study: StudyConfig
    ledger: Ledger
    record: StudyLedger

    @property
    def outputs(self) -> Path:
        return study_folder(self.lab.folder, self.study.name)


def open_lab(folder: Path | None, *, draft: bool = False) -> LabConfig:
    """Open the lab of a command; with `draft`, its objective may still be missing."""
    lab = load_lab(find_lab(folder or Path.cwd()), draft=draft)
    for note in lab.notes:
        output.warn(note)
    return lab


def find_study(lab: LabConfig, name: str | None) -> StudyConfig:
    """Return a study of the lab, or `<study>.jobs`: the study of the commands submitted to it."""
    if name is not None and name not in lab.studies and name.endswith(JOBS_SUFFIX):
        from looplab.loop.submitting import jobs_study  # with the engine's rooms, which `ui` and `status` do without

        return jobs_study(lab, lab.study(name.removesuffix(JOBS_SUFFIX)))
    return lab.study(name)


def open_record(folder: Path | None) -> LabConfig:
    """Return the lab of a command that needs only the record; it may have versions and no lab.yaml."""
    start = (folder or Path.cwd()).resolve()
    for parent in (start, *start.parents):
        if (parent / LAB_FILE).exists():
            break
        if (parent / ITERATE_FILE).exists():
            return LabConfig(parent, {})
    return open_lab(folder)


def open_for_reading(lab: LabConfig) -> Ledger:
    """Open the ledger for a command that does not write to it."""
    return ledgers.open_for_reading(lab.ledger_path)


def open_context(folder: Path | None, study: str | None, *, create: bool = False, reading: bool = False) -> LabContext:
    """Open the study of a command.

    Args:
        folder: A folder of the lab; None for the current one.
        study: Its name; None if the lab has only one.
        create: Create the ledger if it does not exist.
        reading: Open the ledger for reading only.
    """
    lab = open_lab(folder)
    chosen = find_study(lab, study)
    path = lab.claim_ledger() if create else lab.ledger_path
    ledger = ledgers.open_for_reading(path) if reading else Ledger(path, create=create)
    return LabContext(lab, chosen, ledger, StudyLedger(ledger, chosen.name))


def recorded_notes(ledger: Ledger, run: RunRow) -> list[str]:
    """Return the notes in the ledger on a run that ended before it had a folder."""
    events = ledger.events(run.study, run.id)
    return [event.data["note"] for event in events if event.kind == "ended" and "note" in event.data]
