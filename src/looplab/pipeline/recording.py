"""Open the ledger for a pipeline. It is optional: the folder is the truth about a stage."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator

from looplab.config.lab import LabConfig
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.pipelines import PipelineLedger


@contextlib.contextmanager
def open_record(lab: LabConfig, study: str, say: Callable[[str], None]) -> Iterator[PipelineLedger | None]:
    """Yield the record of a study's pipelines, created if the lab has no ledger yet. None if the ledger is damaged or
    cannot be written, which is reported: stages run without it, and a later call or `reindex` records them."""
    try:
        ledger = Ledger(lab.claim_ledger())
    except (LabError, OSError, sqlite3.Error) as error:
        say(f"stages are not recorded in the ledger: {error}")
        yield None
        return
    with contextlib.closing(ledger):
        yield PipelineLedger(ledger, lab.folder, study)
