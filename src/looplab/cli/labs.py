"""Finding the lab, the study and the ledger that a command speaks of, and checking a study before it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from looplab.cli import output
from looplab.config.lab import LAB_FILE, Lab, StudyConfig, find_lab, load_lab
from looplab.ledger import ledger as ledgers
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import JOBS_SUFFIX, StudyLedger
from looplab.runs.folder import study_folder

if TYPE_CHECKING:
    from looplab.loop.setup import RunOptions, Setup


@dataclass(frozen=True, slots=True)
class LabContext:
    lab: Lab
    study: StudyConfig
    ledger: Ledger
    record: StudyLedger

    @property
    def outputs(self) -> Path:
        return study_folder(self.lab.folder, self.study.name)


def open_lab(folder: Path | None) -> Lab:
    lab = load_lab(find_lab(folder or Path.cwd()))
    for note in lab.notes:
        output.warn(note)
    return lab


def find_study(lab: Lab, name: str | None) -> StudyConfig:
    """A study of the lab, or `<study>.jobs`: the one of the commands that were submitted to it."""
    from looplab.loop.submitting import jobs_study

    if name is not None and name not in lab.studies and name.endswith(JOBS_SUFFIX):
        return jobs_study(lab, lab.study(name.removesuffix(JOBS_SUFFIX)))
    return lab.study(name)


def open_record(folder: Path | None) -> Lab:
    """The lab for a command about its record alone: one that has versions and no study, so no lab.yaml, will do."""
    from looplab.iterate.settings import FILE

    start = (folder or Path.cwd()).resolve()
    for place in (start, *start.parents):
        if (place / LAB_FILE).exists():
            break
        if (place / FILE).exists():
            return Lab(place, {})
    return open_lab(folder)


def open_for_reading(lab: Lab) -> Ledger:
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


def prepare_study(lab: Lab, study: StudyConfig, options: RunOptions) -> Setup:
    """Check everything before anything is written or started; mistakes in the lab file are reported with their line."""
    from looplab.decide.queue import read_queue
    from looplab.decide.rules import load_decide, read_rules
    from looplab.guard.knobs import Knob
    from looplab.launch.command import find_program
    from looplab.loop.setup import find_cwd, make_guard, prepare
    from looplab.measure.discover import Reader
    from looplab.measure.stdout import StdoutSource

    for path, spec in study.knobs.items():
        with lab.at(study, "knobs", path):
            Knob.make(path, spec)
    with lab.at(study, "derive" if study.derive else "normalise"):
        make_guard(study)
    with lab.at(study, "launch", "cwd"):
        cwd = find_cwd(lab.folder, study.launch.cwd)
    with lab.at(study, "launch", "command"):
        if "{" not in study.launch.command[0]:
            find_program(study.launch.command[0], cwd, study.launch.env)
    with lab.at(study, "measure", "sources"):
        Reader(lab.folder, study.measure.sources)
    with lab.at(study, "measure", "stdout"):
        StdoutSource(lab.folder, study.measure.stdout)
    for entry in study.proposers:
        if entry.queue:
            read_queue(lab.folder / entry.queue)
        elif entry.rules:
            rules = lab.folder / entry.rules
            (load_decide if rules.suffix == ".py" else read_rules)(rules)
        elif entry.search is not None:
            from looplab.decide.search import check_packages

            with lab.at(study, "proposers"):
                check_packages(entry.search)
    return prepare(lab, study, options)
