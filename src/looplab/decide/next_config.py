"""`proposals/next_config.json`: a person's proposal, as edits or as a nested partial config.

The file is read once and then cleared. While an agent is being asked, the file belongs to the agent.
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
from looplab.ledger.roles import Origin
from looplab.ledger.study import StudyLedger


class NextConfig:
    name: str = Origin.QUEUE
    thinking = False

    def __init__(
        self, file: Path, outputs: Path, base: Mapping[str, Any], *, guard: Guard | None = None, clears: bool = True
    ) -> None:
        """`clears`: whether the file is cleared once it is recorded; False in a preview."""
        self.problem: str | None = None
        self._guard = guard
        self._clears = clears
        self._file = file
        self._outputs = outputs
        self._base = dict(base)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

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
            # Committed: after a crash before this line, the next engine finds the proposals by their source.
            if self._clears and written_in(self._file) == text:
                write_atomic(self._file, EMPTY, sync=False)
        except Exception as error:  # a mistake, or a file that is being written
            if is_environmental(error):
                raise
            self.problem = f"{self._file.name}: {describe_error(error)}"

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        return [waiting(row) for row in study.waiting(n, self.name)]

    def _record(self, study: StudyLedger, text: str, source: str) -> None:
        drafts = []
        for draft in read_answer(text, is_file=True):
            parent = study.best() if draft.parent in ("", "best") else None
            if draft.parent not in ("", "best", "base"):
                parent = study.run(draft.parent)
            config = self._base
            if draft.partial is not None and parent is not None:
                config = study.config_of(parent, self._outputs / parent.id)
            drafts.append((draft, edits_of(draft, config, self._guard), parent.id if parent else None))
        with study.ledger.write():
            for i, (draft, edits, parent_id) in enumerate(drafts):
                study.propose(
                    self.name, edits, draft.reason or f"from {self._file.name}", parent=parent_id,
                    hypothesis=draft.hypothesis, source=f"{source}:{i}",
                )  # fmt: skip
