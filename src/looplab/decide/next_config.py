"""`proposals/next_config.json`: what a person wants to be tried next, as edits or as a nested partial config.

The file is taken once and then cleared. While an agent is asked, the file is the agent's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.edits import edits_from_partial
from looplab.config.files import write_atomic
from looplab.decide.agent import EMPTY, read_answer, written_in
from looplab.decide.base import Proposal, describe_error, is_environmental
from looplab.decide.queue import waiting
from looplab.errors import LabError
from looplab.ledger.study import StudyLedger


class NextConfig:
    name = "queue"
    thinking = False

    def __init__(self, file: Path, outputs: Path, base: Mapping[str, Any], *, clears: bool = True) -> None:
        self.problem: str | None = None
        self._clears = clears
        """False: the file stays as it is, for a preview."""
        self._file = file
        self._outputs = outputs
        self._base = dict(base)
        self._taken: str | None = None

    def close(self) -> None:
        """Clear the file if what was taken from it is still there: it is in the ledger for good by now."""
        with contextlib.suppress(LabError):
            if self._taken is not None and written_in(self._file) == self._taken:
                self._clear()

    def _clear(self) -> None:
        if self._clears:
            write_atomic(self._file, EMPTY, sync=False)

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        self.problem = None
        try:
            text = written_in(self._file)
        except LabError as error:
            self.problem = str(error)
            return []
        if text is None:
            return []
        calls = study.agent_calls()
        if calls and calls[-1]["answer"] is None:
            return []
        stamp = f"{self._file.stat().st_mtime_ns}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        source = f"{self._file.name}:{stamp}"
        if study.has_source(f"{source}:0"):  # it is in the ledger for good
            self._clear()
            return []
        try:
            self._take(study, text, source)
            self._taken = text
        except Exception as error:  # somebody is writing it this moment, or made a mistake
            if is_environmental(error):
                raise
            self.problem = f"{self._file.name}: {describe_error(error)}"
            return []
        return [waiting(row) for row in study.waiting(n, self.name)]

    def _take(self, study: StudyLedger, text: str, source: str) -> None:
        with study.ledger.write(), study.ledger.savepoint():
            for place, draft in enumerate(read_answer(text)):
                best = study.best() if draft.parent in ("", "best") else None
                if draft.parent not in ("", "best", "base"):
                    best = study.run(draft.parent)
                edits = draft.edits
                if draft.partial is not None:
                    config = study.config_of(best, self._outputs / best.id) if best else self._base
                    edits = tuple(str(edit) for edit in edits_from_partial(draft.partial, config))
                study.propose(
                    self.name, edits, draft.reason or f"from {self._file.name}", parent=best.id if best else None,
                    hypothesis=draft.hypothesis, source=f"{source}:{place}",
                )  # fmt: skip
