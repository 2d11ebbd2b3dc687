"""Writing rounds."""

from __future__ import annotations

import time

from looplab.ledger import catalogue
from looplab.ledger.view import StudyView


class RoundWriter(StudyView):
    """Begins and closes rounds."""

    def begin_round(self) -> int:
        row = self.ledger.one("SELECT coalesce(max(n), 0) + 1 FROM rounds WHERE study=?", (self.name,))
        assert row is not None
        n = int(row[0])
        now = time.time()
        self.ledger.execute("INSERT INTO rounds (study, n, created) VALUES (?,?,?)", (self.name, n, now))
        self.ledger.record(catalogue.RoundBeganEvent(round=n), self.name, when=now)
        return n

    def fill_round(self, n: int) -> None:
        """Record that all runs of the round are planned."""
        self.ledger.execute("UPDATE rounds SET filled=1 WHERE study=? AND n=?", (self.name, n))

    def close_round(self, n: int) -> None:
        now = time.time()
        with self.ledger.write():
            self.ledger.execute("UPDATE rounds SET closed=? WHERE study=? AND n=?", (now, self.name, n))
            self.ledger.record(catalogue.RoundEndedEvent(round=n), self.name, when=now)
