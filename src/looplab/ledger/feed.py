"""What a page or a screen that is open all the time reads: changes by their event number, in short reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from looplab.ledger.ledger import GENESIS, Event, Ledger, link
from looplab.ledger.view import RunRow, StudyView
from looplab.untrusted import load_own_json

REWRITING = ("judge restarted", "objective changed", "study opened", "recovered", "reindexed")
"""Events after which rows of runs may have changed that no event names."""
MAX_EVENTS = 500


class StudyFeed:
    """Reads what has changed in a study since an event."""

    def __init__(self, ledger: Ledger, study: str) -> None:
        self._ledger = ledger
        self._view = StudyView(ledger, study)

    def runs_since(self, after: int) -> list[RunRow] | None:
        """Return the runs that events after this one are about, and all that have not ended: the start of a run is not
        an event. None: any run may have changed."""
        sql = "SELECT DISTINCT kind, run FROM events WHERE seq>? AND study IN (?, '')"
        found = self._ledger.rows(sql, (after, self._view.name))
        if any(kind in REWRITING for kind, _ in found):
            return None
        runs = {run.id: run for run in self._view.runs_open()}
        for run in {run for _, run in found if run is not None} - set(runs):
            row = self._view.find_run(run)
            if row is not None:
                runs[run] = row
        return list(runs.values())

    def configs(self, hashes: Collection[str]) -> dict[str, str]:
        """Return the texts of configs by their hashes; those of early versions are missing."""
        found = {}
        for digest in hashes:
            row = self._ledger.one("SELECT body FROM configs WHERE hash=?", (digest,))
            if row is not None:
                found[digest] = str(row[0])
        return found

    def events_of(self, kinds: Collection[str], after: int) -> list[Event]:
        """Return the events of some kinds after an event, oldest first."""
        marks = ", ".join("?" * len(kinds))
        sql = f"SELECT * FROM events WHERE study=? AND seq>? AND kind IN ({marks}) ORDER BY seq"  # noqa: S608 (marks)
        return [Event.of(row) for row in self._ledger.rows(sql, (self._view.name, after, *kinds))]


def read_events(
    ledger: Ledger, *, before: int | None = None, after: int = 0, study: str | None = None, run: str | None = None,
    kind: str | None = None, limit: int = MAX_EVENTS,
) -> list[Event]:  # fmt: skip
    """Return the newest events that match, newest first.

    Args:
        before: Only events with a smaller number; None: up to the last.
        after: Only events with a larger number.
    """
    conditions, parameters = ["seq>?"], [after]  # type: tuple[list[str], list[Any]]
    for condition, value in (("seq<?", before), ("study=?", study), ("run=?", run), ("kind=?", kind)):
        if value is not None:
            conditions.append(condition)
            parameters.append(value)
    sql = f"SELECT * FROM events WHERE {' AND '.join(conditions)} ORDER BY seq DESC LIMIT ?"  # noqa: S608 (fixed)
    return [Event.of(row) for row in ledger.rows(sql, (*parameters, min(limit, MAX_EVENTS)))]


def last_anchor(ledger: Ledger) -> Mapping[str, Any] | None:
    """Return when the head was last published, and the data of that event; None: never."""
    sql = "SELECT seq, at, data FROM events WHERE kind='anchored' ORDER BY seq DESC LIMIT 1"
    row = ledger.one(sql)
    return None if row is None else {**load_own_json(row["data"]), "seq": row["seq"], "at": row["at"]}


class ChainCheck:
    """Walks the chain of events in portions, and continues where it was when more is written."""

    def __init__(self) -> None:
        self.checked = 0
        """Number of the last event that was checked."""
        self.broken: str | None = None
        """The first defect; None: there is none so far."""
        self._hash = GENESIS

    def advance(self, ledger: Ledger, portion: int = 1000) -> bool:
        """Check some more events; return whether there are more."""
        sql = "SELECT seq, at, kind, study, run, data, hash FROM events WHERE seq>? ORDER BY seq LIMIT ?"
        rows = [] if self.broken is not None else ledger.rows(sql, (self.checked, portion))
        for seq, at, kind, study, run, data, digest in rows:
            if seq != self.checked + 1:
                self.broken = f"event {self.checked + 1} is missing"
                return False
            if link(self._hash, seq, at, kind, study, run, data) != digest:
                self.broken = f"event {seq} ({kind}) does not match its hash"
                return False
            self.checked, self._hash = seq, digest
        return len(rows) == portion
