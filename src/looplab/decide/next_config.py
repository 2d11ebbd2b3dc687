"""`proposals/next_config.json`: what a person wants to be tried next, as edits or as a nested partial config.

The file is taken once and then cleared. While an agent is asked, the file is the agent's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.files import write_atomic
from looplab.decide.agent import EMPTY, edits_of, read_answer, written_in
from looplab.decide.base import Proposal, describe_error, is_environmental
from looplab.decide.queue import waiting
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.ledger.study import StudyLedger


class NextConfig:
    name = "queue"
    thinking = False

    def __init__(
        self, file: Path, outputs: Path, base: Mapping[str, Any], *, guard: Guard | None = None, clears: bool = True
    ) -> None:
        self.problem: str | None = None
        self._guard = guard
        self._clears = clears
        """False: the file stays as it is, for a preview."""
        self._file = file
        self._outputs = outputs
        self._base = dict(base)

    def close(self) -> None:
        """There is nothing to release."""

    def refresh(self, study: StudyLedger) -> None:
        self.problem = None
        try:
            text = written_in(self._file)
        except LabError as error:
            self.problem = str(error)
            return
        if text is None:
            return
        calls = study.agent_calls()
        if calls and calls[-1]["answer"] is None:
            return
        try:
            stamp = f"{self._file.stat().st_mtime_ns}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            source = f"{self._file.name}:{stamp}"
            if not study.has_source(f"{source}:0"):
                self._record(study, text, source)
            # The proposals are committed. An engine that is killed before this line finds them by their source.
            if self._clears and written_in(self._file) == text:
                write_atomic(self._file, EMPTY, sync=False)
        except Exception as error:  # a mistake, or somebody is writing the file at this moment
            if is_environmental(error):
                raise
            self.problem = f"{self._file.name}: {describe_error(error)}"

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        return [waiting(row) for row in study.waiting(n, self.name)]

    def _record(self, study: StudyLedger, text: str, source: str) -> None:
        found = []
        for draft in read_answer(text, is_file=True):
            best = study.best() if draft.parent in ("", "best") else None
            if draft.parent not in ("", "best", "base"):
                best = study.run(draft.parent)
            config = self._base
            if draft.partial is not None and best is not None:
                config = study.config_of(best, self._outputs / best.id)
            found.append((draft, edits_of(draft, config, self._guard), best.id if best else None))
        with study.ledger.write():
            for place, (draft, edits, parent) in enumerate(found):
                study.propose(
                    self.name, edits, draft.reason or f"from {self._file.name}", parent=parent,
                    hypothesis=draft.hypothesis, source=f"{source}:{place}",
                )  # fmt: skip
