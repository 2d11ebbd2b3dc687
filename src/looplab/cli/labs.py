"""Finding the lab, the study and the ledger that a command speaks of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from looplab.config.lab import Lab, Study, find_lab, load_lab
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.runs.folder import study_folder


@dataclass(frozen=True, slots=True)
class Place:
    lab: Lab
    study: Study
    ledger: Ledger
    record: StudyLedger

    @property
    def outputs(self) -> Path:
        return study_folder(self.lab.folder, self.study.study)


def open_lab(folder: Path | None) -> Lab:
    return load_lab(find_lab(folder or Path.cwd()))


def open_place(folder: Path | None, study: str | None, *, create: bool = False) -> Place:
    lab = open_lab(folder)
    chosen = lab.study(study)
    ledger = Ledger(lab.ledger_path, create=create)
    return Place(lab, chosen, ledger, StudyLedger(ledger, chosen.study))
