"""Finding the lab, the study and the ledger that a command speaks of, and checking a study before it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from looplab.cli import output
from looplab.config.lab import LAB_FILE, LabConfig, StudyConfig, find_lab, load_lab
from looplab.ledger import ledger as ledgers
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import JOBS_SUFFIX, StudyLedger
from looplab.runs.folder import study_folder

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class LabContext:
    lab: LabConfig
    study: StudyConfig
    ledger: Ledger
    record: StudyLedger

    @property
    def outputs(self) -> Path:
        return study_folder(self.lab.folder, self.study.name)


def open_lab(folder: Path | None) -> LabConfig:
    lab = load_lab(find_lab(folder or Path.cwd()))
    for note in lab.notes:
        output.warn(note)
    return lab


def find_study(lab: LabConfig, name: str | None) -> StudyConfig:
    """A study of the lab, or `<study>.jobs`: the one of the commands that were submitted to it."""
    from looplab.loop.submitting import jobs_study

    if name is not None and name not in lab.studies and name.endswith(JOBS_SUFFIX):
        return jobs_study(lab, lab.study(name.removesuffix(JOBS_SUFFIX)))
    return lab.study(name)


def open_record(folder: Path | None) -> LabConfig:
    """The lab for a command about its record alone: one that has versions and no study, so no lab.yaml, will do."""
    from looplab.iterate.settings import FILE

    start = (folder or Path.cwd()).resolve()
    for place in (start, *start.parents):
        if (place / LAB_FILE).exists():
            break
        if (place / FILE).exists():
            return LabConfig(place, {})
    return open_lab(folder)


def open_for_reading(lab: LabConfig) -> Ledger:
    """Open the ledger for a command that does not write to it."""
    return ledgers.open_for_reading(lab.ledger_path)


def open_place(folder: Path | None, study: str | None, *, create: bool = False, reading: bool = False) -> LabContext:
    """The study that a command is about.

    Args:
        create: Make a ledger if there is none.
        reading: The command does not write to the ledger.
    """
    lab = open_lab(folder)
    chosen = find_study(lab, study)
    ledger = open_for_reading(lab) if reading else Ledger(lab.ledger_path, create=create)
    return LabContext(lab, chosen, ledger, StudyLedger(ledger, chosen.name))
