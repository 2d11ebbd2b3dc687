"""Write archives and reports in background threads while the engine runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from looplab.config.lab import StudyConfig
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.report.archive import Archiver, unarchived
from looplab.report.reports import write_reports
from looplab.runs.folder import hash_file, study_folder

PAUSE_S = 5.0
"""Minimum seconds between two reports; the pause is at least nine times as long as a report takes."""


class ReportWriter:
    """Archives runs as they end and rewrites the reports. `tell` receives problems; none is raised."""

    def __init__(self, lab: Path, ledger: Path, study: StudyConfig, tell: Callable[[str], None]) -> None:
        self._lab = lab
        self._ledger = ledger
        self._study = study
        self._tell = tell
        self._outputs = study_folder(lab, study.name)
        self._archiver = Archiver(study, tell)
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looplab-report", daemon=True)
        self._thread.start()

    def catch_up(self, record: StudyLedger) -> None:
        """Archive runs that a killed engine left unarchived."""
        ended = [self._outputs / run.id for run in record.runs(state="ended", limit=1000)]
        for run_dir in unarchived(ended):
            self._archiver.submit(run_dir)

    def ended(self, run_id: str) -> None:
        """Archive a run that has ended, and schedule a report."""
        self._archiver.submit(self._outputs / run_id)
        self._due.set()

    def close(self) -> list[Path]:
        """Finish the archives and write the final reports; return their paths."""
        self._closing.set()
        self._due.set()
        self._thread.join()
        self._archiver.close()
        return self._report()

    def _record_archives(self, record: StudyLedger) -> None:
        """Record the hashes of archives written since the last call."""
        runs: dict[str, dict[str, str]] = {}
        while not self._archiver.archived.empty():
            name = self._archiver.archived.get().relative_to(self._outputs)
            digest = hash_file(self._outputs / name)
            if digest is not None:
                runs.setdefault(name.parts[0], {})[str(Path(*name.parts[1:]))] = digest
        if runs:
            record.archived(runs)

    def _run(self) -> None:
        while True:
            self._due.wait()
            if self._closing.is_set():
                return
            self._due.clear()
            began = time.monotonic()
            self._report()
            self._closing.wait(max(PAUSE_S, 9 * (time.monotonic() - began)))

    def _report(self) -> list[Path]:
        if not self._lab.is_dir():
            return []  # the lab was moved away
        try:
            with contextlib.closing(Ledger(self._ledger, create=False)) as ledger:
                record = StudyLedger(ledger, self._study.name)
                if not self._outputs.is_dir() and record.runs(limit=1):
                    return []  # its folder was moved away
                self._record_archives(record)
                return write_reports(self._lab, self._study, record)
        except Exception as error:  # noqa: BLE001 (a report can be written again; the study continues)
            self._tell(f"the reports could not be written: {error or type(error).__name__}")
            return []
