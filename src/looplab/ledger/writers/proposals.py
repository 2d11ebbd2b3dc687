"""Writing proposals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from looplab.ledger import catalogue
from looplab.ledger.plan import Job
from looplab.ledger.view import StudyView
from looplab.runs.redact import redact_data, redact_proposal
from looplab.untrusted import dump_json, load_own_json, mend_text, shorten


class ProposalWriter(StudyView):
    """Records proposals and their rejections."""

    def propose(
        self,
        proposer: str,
        edits: Sequence[str],
        reason: str,
        *,
        parent: str | None = None,
        hypothesis: str = "",
        source: str | None = None,
        job: Job | None = None,
    ) -> int | None:
        """Put a proposal in the queue, without secrets; None if one of this source is there already.

        Args:
            job: A submitted command, instead of edits.
        """
        edits, reason, hypothesis = redact_proposal(
            [mend_text(edit) for edit in edits], shorten(reason), shorten(hypothesis)
        )
        source, parent = (text if text is None else mend_text(text) for text in (source, parent))
        with self.ledger.write():
            if source is not None and self.has_source(source):
                return None
            now = time.time()
            cursor = self.ledger.execute(
                "INSERT INTO proposals (study, created, proposer, source, parent, edits, reason, hypothesis, status)"
                " VALUES (?,?,?,?,?,?,?,?,'waiting')",
                (
                    self.name,
                    now,
                    proposer,
                    source,
                    parent,
                    dump_json(edits if job is None else job.to_dict()),
                    reason,
                    hypothesis,
                ),
            )
            id_ = cursor.lastrowid
            assert id_ is not None
            event = catalogue.ProposedEvent(
                proposal=id_, proposer=proposer, source=source, parent=parent, edits=edits, reason=reason,
                hypothesis=hypothesis, job=None if job is None else job.to_dict(),
            )  # fmt: skip
            self.ledger.record(event, self.name, when=now)
            return id_

    def note_queue_taken(self, file: str, digest: str) -> None:
        self.ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (f"queue:{self.name}:{file}", digest))

    def reject(self, proposal: int, problems: Sequence[Mapping[str, Any]]) -> None:
        """Record that the guard rejected it, and why."""
        text = dump_json(redact_data(list(problems)))
        self.ledger.execute("UPDATE proposals SET status='rejected', problems=? WHERE id=?", (text, proposal))
        self.ledger.record(catalogue.RejectedEvent(proposal=proposal, problems=load_own_json(text)), self.name)
