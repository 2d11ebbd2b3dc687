"""State of each version, replayed from the ledger: every step is an event, written before and after it is done.

The events of version X have the run name `vX` in the study `iterate`; calls of agents are recorded as in any study. A
killed process loses nothing: the next one replays the events and continues with the unfinished step.

Code of an agent can run with the rights of this user (the agent itself, a smoke run, an evaluation that loads the
version), so it may be able to write to the ledger. Versions are therefore compared by events held in memory: those read
at the start of the process and those written by it. `VersionLedger.check` finds what others wrote, changed or removed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from looplab.errors import LabError
from looplab.iterate.gates import GateFinding, Measured
from looplab.judge.base import Verdict
from looplab.ledger.catalogue import EventData, LedgerForgedEvent
from looplab.ledger.ledger import GENESIS, BrokenLink, Event, Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.versions import ALARM, STUDY, without_forgeries, write_table

FORGED_SHOWN = 3
"""Number of forged events that a message lists."""


@dataclass(slots=True)
class Call:
    """One call of the agent."""

    id: str
    log: str
    ask: int
    """Index of this request in the attempt, from 1; a call that repeats an interrupted one has the same index."""
    cli: str
    session: str | None = None
    answered: bool = False
    ok: bool = False
    why: str = ""
    interrupted: bool = False


@dataclass(slots=True)
class Attempt:
    """One attempt at a version: a worktree on its own branch."""

    version: int
    n: int
    branch: str
    base: str
    """Commit it starts from."""
    onto: str
    """The lab's branch."""
    begun: int
    """Position of its first event in the history."""
    began: float = 0.0
    """Unix time of that event."""
    prepared: dict[str, Any] | None = None
    calls: list[Call] = field(default_factory=list)
    findings: dict[int, list[GateFinding]] = field(default_factory=dict)
    """Findings of the gates, by index of the request."""
    void: str = ""
    """Why its results are invalid; empty if they are valid."""
    forged: str = ""
    """How the ledger was tampered with while its code ran; empty if it was not."""
    measured: Measured | None = None
    measured_ask: int = 0
    ruling: dict[str, Any] | None = None
    end: str | None = None
    """merged | failed | void; None while in progress."""
    ended: int = 0
    """Position of its last event in the history."""
    commit: str = ""
    """Final commit; empty if there is none."""
    why: str = ""

    @property
    def ask(self) -> int:
        """Index of the last request that was answered; 0 if none."""
        return max((call.ask for call in self.calls if call.answered and not call.interrupted), default=0)

    @property
    def state(self) -> str:
        """Current step of the attempt, for display."""
        if self.end:
            return self.end
        if self.ruling:
            return "judged"
        if self.calls and not self.calls[-1].answered:
            return "agent running"
        if self.ask in self.findings:
            return "checked"
        return "answered" if self.calls else "prepared" if self.prepared else "begun"


@dataclass(slots=True)
class VersionHistory:
    """Replayed state of all versions of a lab."""

    attempts: dict[int, list[Attempt]] = field(default_factory=dict)
    champion: int | None = None
    champions: list[int] = field(default_factory=list)
    measured: dict[tuple[int, str], Measured] = field(default_factory=dict)
    """Results by version and fingerprint of the evaluation."""
    baselines: dict[int, Measured] = field(default_factory=dict)
    """Results of versions that looplab did not create."""
    spent: float = 0.0
    """Alpha spent by tests that did not promote."""
    range: tuple[int, int, int] | None = None
    """First and last version of the unfinished command, and the position of its event; None if it finished."""

    def last(self, version: int) -> Attempt | None:
        """Return the last attempt at a version."""
        return self.attempts[version][-1] if version in self.attempts else None


def replay(events: Iterable[Event]) -> VersionHistory:
    """Return the state that the events lead to."""
    history = VersionHistory()
    calls: dict[str, Call] = {}
    for number, event in enumerate(events, 1):  # not `seq`: after a truncation of the chain, numbers repeat
        _apply(history, calls, event, number)
    return history


def unexpected_events(events: Iterable[Event]) -> list[Event]:
    """Return events written during an agent's call or a smoke run that looplab does not write at that time."""
    found: list[Event] = []
    asked = checking = None
    for event in events:
        kind, run = event.kind, event.run
        if kind == "agent asked":
            asked = (event.data["call"], f"v{event.data['version']}")
        elif kind == "agent answered" and asked is not None and event.data["call"] == asked[0]:
            asked = None
        elif kind.startswith("iterate ") or kind == ALARM:
            continue
        elif asked is not None:
            # If the agent's worktree was removed, its attempt is closed.
            if run != asked[1] or kind not in ("version closing", "version committed", "version failed"):
                found.append(event)
            elif kind == "version failed":
                asked = None
        elif kind == "version checking":
            checking = run
        elif kind == "version checked" and run == checking:
            checking = None
        elif checking is not None:
            measures = kind in ("version measuring", "version measured") and event.data["ask"] is not None
            if run != checking or not measures:
                found.append(event)
    return found


def _apply(history: VersionHistory, calls: dict[str, Call], event: Event, number: int) -> None:
    data = event.data
    if event.kind == "iterate began":
        history.range = (data["start"], data["end"], number)
    elif event.kind == "iterate ended":
        history.range = None
    elif event.kind == "agent asked":
        calls[data["call"]] = call = Call(data["call"], data["log"], data["ask"], data["cli"])
        history.attempts[data["version"]][-1].calls.append(call)
    elif event.kind == "agent answered" and data["call"] in calls:
        call = calls[data["call"]]
        call.answered, call.ok, call.why = True, data["ok"], data["why"]
        call.session, call.interrupted = data.get("session"), data.get("interrupted", False)
    elif event.kind == ALARM:
        tries = history.attempts.get(int((event.run or "v0")[1:]))
        if tries and tries[-1].end is None:
            tries[-1].forged = data["why"]
    elif event.run is not None and event.kind.startswith("version "):
        _apply_version_event(history, int(event.run[1:]), event.kind.removeprefix("version "), data, number, event.at)


def _apply_version_event(
    history: VersionHistory, version: int, step: str, data: dict[str, Any], number: int, at: float
) -> None:
    tries = history.attempts.get(version, [])
    if step == "begun":
        attempt = Attempt(version, data["attempt"], data["branch"], data["base"], data["onto"], number, at)
        history.attempts.setdefault(version, []).append(attempt)
    elif step == "champion":
        history.champion = version
        history.champions.append(version)
    elif step == "measured":
        measured = Measured(data["value"], tuple(data["values"]))
        history.measured[version, data["fingerprint"]] = measured
        if data["ask"] is None:
            history.baselines[version] = measured
        else:
            tries[-1].measured, tries[-1].measured_ask = measured, data["ask"]
    elif not tries:
        return
    elif step == "prepared":
        tries[-1].prepared, tries[-1].base = data, data["base"]
    elif step == "committed":
        tries[-1].commit = data["commit"]
    elif step == "checked":
        tries[-1].findings[data["ask"]] = [GateFinding(**finding) for finding in data["findings"]]
        tries[-1].void = data.get("void", "")
    elif step == "judged":
        tries[-1].ruling = data
        if data["verdict"] != Verdict.KEEP and data.get("alpha"):
            history.spent = math.fsum((history.spent, data["alpha"]))
    elif step in ("merged", "failed"):
        tries[-1].end = "merged" if step == "merged" else data["how"]
        tries[-1].commit, tries[-1].branch, tries[-1].why = data["commit"], data["branch"], data.get("why", "")
        tries[-1].ended = number


class VersionLedger:
    """Records events of versions, replays them, and detects tampering."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.study = StudyLedger(ledger, STUDY)
        self._stored = self._read_rows()
        """Rows of the study in the ledger, as last checked."""
        self._events = without_forgeries([_event(row) for row in self._stored.values()])
        """Events that this process trusts."""
        self._head = ledger.head()
        self._file = self._identity()
        self._broken: BrokenLink | None = None

    def history(self) -> VersionHistory:
        """Return the current state of all versions."""
        return replay(self._events)

    def begin(self) -> str:
        """Check the chain before any code of an agent runs; call it once, before `check`.

        Returns:
            Which events others wrote while code of an agent ran in an earlier process; empty if none.

        Raises:
            LabError: The chain is broken, so earlier results cannot be trusted.
        """
        self._broken = self.ledger.first_broken_link()
        known = [event.data.get("broken") for event in self._events if event.kind == ALARM]
        if self._broken is not None and asdict(self._broken) not in known:
            raise LabError(
                f"the ledger is damaged, so versions cannot be compared with earlier ones: {self._broken.why}",
                file=self.ledger.path,
                hint="see `looplab verify`; restore the ledger from a backup",
            )
        foreign = unexpected_events(self._events)
        if not foreign:
            return ""
        begun = [event.run for event in self._events if event.kind == "version begun" and event not in foreign]
        version = int((begun[-1] or "v0")[1:]) if begun else None
        why = _describe_foreign([(event.seq, event.kind, event.run) for event in foreign])
        self._events = [event for event in self._events if event not in foreign]
        self._alarm(version, why)
        return why

    def record(self, event: EventData, version: int | None = None) -> None:
        """Record an event, of a version or (None) of the study."""
        with self._writing():
            self.ledger.record(event, STUDY, None if version is None else f"v{version}")

    def check(self, version: int) -> str:
        """Compare the ledger with the events held in memory; call it after code of an agent has run.

        Tampering is recorded once, as an alarm of the version; the history continues from the events in memory.

        Returns:
            What others did to the ledger; empty if nothing.

        Raises:
            LabError: The ledger was replaced by another file.
        """
        if self._identity() != self._file:
            raise LabError(
                f"the ledger was removed or replaced by another file while code of v{version} ran",
                file=self.ledger.path,
                hint="restore it from a backup; nothing was merged",
            )
        rows = self._read_rows()
        foreign = [row for seq, row in rows.items() if seq not in self._stored]
        changed = [row for seq, row in self._stored.items() if seq not in rows or rows[seq][:-1] != row[:-1]]
        found = [_describe_foreign([(row[0], row[2], row[4]) for row in foreign])] if foreign else []
        if changed:
            named = ", ".join(
                f"{row[0]} ({row[2]}{f' of {row[4]}' if row[4] else ''})" for row in changed[:FORGED_SHOWN]
            )
            found.append(f"{len(changed)} event(s) of versions were changed or removed: {named}")
        if self._hash_of(self._head[0]) != self._head[1]:
            found.append(f"the chain was rewritten up to event {self._head[0]} or later")
        broken = self.ledger.first_broken_link()
        if broken is not None and broken != self._broken:
            found.append(f"the chain is broken: {broken.why}")
        if not found:
            return ""
        why = "; ".join(found)
        self._broken, self._stored = broken, rows
        self._alarm(version, why)
        return why

    def _alarm(self, version: int | None, why: str) -> None:
        known = [
            [event.seq, event.at, event.kind, event.run, {k: v for k, v in event.data.items() if k != "known"}]
            for event in self._events
        ]
        self._head = self.ledger.head()
        broken = asdict(self._broken) if self._broken else None
        self.record(LedgerForgedEvent(why=why, known=known, broken=broken), version)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Open a transaction and add its events to those in memory."""
        with self.ledger.write():
            last = self.ledger.head()[0]
            continues = self._hash_of(self._head[0]) == self._head[1]
            yield
            written = self._read_rows(after=last)
            self._stored |= written
            self._events += map(_event, written.values())
            write_table(self.ledger, self._events)
            if continues:  # otherwise the chain was rewritten, which the next check must find
                self._head = self.ledger.head()

    def _read_rows(self, after: int = 0) -> dict[int, tuple[Any, ...]]:
        return {row[0]: row for row in self.ledger.event_rows(STUDY, after)}

    def _hash_of(self, seq: int) -> str:
        return self.ledger.hash_of(seq) or GENESIS

    def _identity(self) -> tuple[int, int] | None:
        """Return device and inode of the ledger; None if there is no file."""
        try:
            status = os.stat(self.ledger.path)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def _event(row: tuple[Any, ...]) -> Event:
    seq, at, kind, study, run, data, digest = row
    return Event(seq, at, kind, study, run, orjson.loads(data), digest)


def _describe_foreign(events: Sequence[tuple[int, str, str | None]]) -> str:
    named = ", ".join(f"{seq} ({kind}{f' of {run}' if run else ''})" for seq, kind, run in events[:FORGED_SHOWN])
    return f"the ledger has events of versions that looplab did not write: {named}"


def findings_to_json(findings: Sequence[GateFinding]) -> list[dict[str, Any]]:
    """Return findings as plain data, with characters that UTF-8 cannot encode replaced."""

    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    return [{"ok": f.ok, "what": f.what, "why": clean(f.why), "warning": f.warning} for f in findings]
