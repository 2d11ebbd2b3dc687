"""How far each version has come, according to the ledger: every step is an event, written before and after it is done.

The events of version X carry the run name `vX` in the study `iterate`; calls of agents are recorded as everywhere. A
process that is killed loses nothing: the next one reads the events and continues with the step that has no end.

Code of an agent can run with the rights of this user (the agent itself, a smoke run, an evaluation that loads the
version), so it may be able to write to the ledger. What a process compares versions with is therefore what it has read
at its start and written itself, held in memory; `VersionLedger.check` finds what others have written, changed or
removed.
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
from looplab.ledger.ledger import GENESIS, BrokenLink, Event, Ledger
from looplab.ledger.study import StudyLedger

STUDY = "iterate"
ALARM = "ledger forged"
"""The event that says what others did to the events of versions, and what these really were (`known`). Its run is the
version whose code ran, which is void."""
FORGED_SHOWN = 3


@dataclass(slots=True)
class Call:
    """One call of the agent."""

    id: str
    log: str
    ask: int
    """The how-manieth time it is asked in this attempt; an interrupted call is asked again under the same number."""
    cli: str
    session: str | None = None
    answered: bool = False
    ok: bool = False
    why: str = ""
    interrupted: bool = False


@dataclass(slots=True)
class Attempt:
    """One attempt at a version: a worktree on a branch of its own."""

    version: int
    n: int
    branch: str
    base: str
    """The commit it starts from."""
    onto: str
    """The lab's branch."""
    begun: int
    """The event's number."""
    prepared: dict[str, Any] | None = None
    calls: list[Call] = field(default_factory=list)
    findings: dict[int, list[GateFinding]] = field(default_factory=dict)
    """By the number of the ask."""
    void: str = ""
    """Why its numbers may not count."""
    forged: str = ""
    """What was done to the ledger while its code ran."""
    measured: Measured | None = None
    measured_ask: int = 0
    ruling: dict[str, Any] | None = None
    end: str | None = None
    """merged | failed | void; None: it is under way."""
    ended: int = 0
    commit: str = ""
    """What was committed for it in the end."""
    why: str = ""

    @property
    def ask(self) -> int:
        """The last ask that was answered; 0: none yet."""
        return max((call.ask for call in self.calls if call.answered and not call.interrupted), default=0)

    @property
    def state(self) -> str:
        if self.end:
            return self.end
        if self.ruling:
            return "judged"
        if self.calls and not self.calls[-1].answered:
            return "agent at work"
        if self.ask in self.findings:
            return "checked"
        return "answered" if self.calls else "prepared" if self.prepared else "begun"


@dataclass(slots=True)
class VersionHistory:
    """Everything that happened to the versions of a lab."""

    attempts: dict[int, list[Attempt]] = field(default_factory=dict)
    champion: int | None = None
    champions: list[int] = field(default_factory=list)
    measured: dict[tuple[int, str], Measured] = field(default_factory=dict)
    """By version and fingerprint of the evaluation."""
    baselines: dict[int, Measured] = field(default_factory=dict)
    """Versions that were there before, as they were measured."""
    spent: float = 0.0
    """The alpha of the tests that were not won."""
    range: tuple[int, int, int] | None = None
    """First and last version and the event of the command that has not come to its end."""

    def last(self, version: int) -> Attempt | None:
        return self.attempts[version][-1] if version in self.attempts else None

    def merged(self) -> dict[int, Attempt]:
        return {version: tries[-1] for version, tries in self.attempts.items() if tries[-1].end == "merged"}


def read(events: Iterable[Event]) -> VersionHistory:
    """What the events of the study come to."""
    story = VersionHistory()
    calls: dict[str, Call] = {}
    for number, event in enumerate(events, 1):  # not as in the chain: of one that was cut off, numbers come again
        _hear(story, calls, event, number)
    return story


def without_forgeries(events: Sequence[Event]) -> list[Event]:
    """The events as this program recorded them: up to the last alarm those that it names, and all that came later."""
    alarms = [place for place, event in enumerate(events) if event.kind == ALARM]
    if not alarms:
        return list(events)
    last = alarms[-1]
    known = [Event(seq, at, kind, STUDY, run, data, "") for seq, at, kind, run, data in events[last].data["known"]]
    return [*known, *events[last:]]


def out_of_place(events: Iterable[Event]) -> list[Event]:
    """Events that were written while an agent or a smoke run was busy, and that this program does not write then."""
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
            # The worktree of the agent may be found removed: then its attempt is closed.
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


def _hear(story: VersionHistory, calls: dict[str, Call], event: Event, number: int) -> None:
    data = event.data
    if event.kind == "iterate began":
        story.range = (data["start"], data["end"], number)
    elif event.kind == "iterate ended":
        story.range = None
    elif event.kind == "agent asked":
        calls[data["call"]] = call = Call(data["call"], data["log"], data["ask"], data["cli"])
        story.attempts[data["version"]][-1].calls.append(call)
    elif event.kind == "agent answered" and data["call"] in calls:
        call = calls[data["call"]]
        call.answered, call.ok, call.why = True, data["ok"], data["why"]
        call.session, call.interrupted = data.get("session"), data.get("interrupted", False)
    elif event.kind == ALARM:
        tries = story.attempts.get(int((event.run or "v0")[1:]))
        if tries and tries[-1].end is None:
            tries[-1].forged = data["why"]
    elif event.run is not None and event.kind.startswith("version "):
        _hear_version(story, int(event.run[1:]), event.kind.removeprefix("version "), data, number)


def _hear_version(story: VersionHistory, version: int, step: str, data: dict[str, Any], seq: int) -> None:
    tries = story.attempts.get(version, [])
    if step == "begun":
        attempt = Attempt(version, data["attempt"], data["branch"], data["base"], data["onto"], seq)
        story.attempts.setdefault(version, []).append(attempt)
    elif step == "champion":
        story.champion = version
        story.champions.append(version)
    elif step == "measured":
        measured = Measured(data["value"], tuple(data["values"]))
        story.measured[version, data["fingerprint"]] = measured
        if data["ask"] is None:
            story.baselines[version] = measured
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
            story.spent = math.fsum((story.spent, data["alpha"]))
    elif step in ("merged", "failed"):
        tries[-1].end = "merged" if step == "merged" else data["how"]
        tries[-1].commit, tries[-1].branch, tries[-1].why = data["commit"], data["branch"], data.get("why", "")
        tries[-1].ended = seq


class VersionLedger:
    """The ledger of the versions: writes events, and returns what they come to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.study = StudyLedger(ledger, STUDY)
        self._stored = self._read_rows()
        """The rows of the study in the ledger, as far as they were checked."""
        self._events = without_forgeries([_event(row) for row in self._stored.values()])
        """The events that this process goes by."""
        self._head = ledger.head()
        self._file = self._identity()
        self._broken: BrokenLink | None = None

    def story(self) -> VersionHistory:
        return read(self._events)

    def begin(self) -> str:
        """Check the chain before any code of an agent runs; call it once, before `check`.

        Returns:
            What was recorded while code of an agent ran in an earlier process, and is not from there; empty: nothing.

        Raises:
            LabError: The chain is broken, so what is compared with cannot be trusted.
        """
        self._broken = self.ledger.first_broken_link()
        known = [event.data.get("broken") for event in self._events if event.kind == ALARM]
        if self._broken is not None and asdict(self._broken) not in known:
            raise LabError(
                f"the ledger is damaged, so versions cannot be compared with earlier ones: {self._broken.why}",
                file=self.ledger.path,
                hint="`looplab verify` shows more; restore the ledger from a backup",
            )
        odd = out_of_place(self._events)
        if not odd:
            return ""
        begun = [event.run for event in self._events if event.kind == "version begun" and event not in odd]
        version = int((begun[-1] or "v0")[1:]) if begun else None
        why = _not_from_here([(event.seq, event.kind, event.run) for event in odd])
        self._events = [event for event in self._events if event not in odd]
        self._alarm(version, why)
        return why

    def note(self, kind: str, version: int | None = None, **data: Any) -> None:
        with self._writing():
            self.ledger.record(kind, STUDY, None if version is None else f"v{version}", **data)

    def asked(self, call: str, **data: Any) -> None:
        with self._writing():
            self.study.asked_agent(call, **data)

    def answered(self, call: str, **data: Any) -> None:
        with self._writing():
            self.study.agent_answered(call, **data)

    def check(self, version: int) -> str:
        """Compare the ledger with what this process knows of it; call it after code of an agent has run.

        What is found is recorded as an alarm of the version, once, and the story continues as it is known here.

        Returns:
            What others did to the ledger; empty: nothing.

        Raises:
            LabError: The ledger is not the same file any more.
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
        found = [_not_from_here([(row[0], row[2], row[4]) for row in foreign])] if foreign else []
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
        self.note(ALARM, version, why=why, known=known, broken=asdict(self._broken) if self._broken else None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction whose events are from here."""
        with self.ledger.write():
            last = self.ledger.head()[0]
            continues = self._hash_of(self._head[0]) == self._head[1]
            yield
            written = self._read_rows(after=last)
            self._stored |= written
            self._events += map(_event, written.values())
            if continues:  # else the chain was rewritten, which the next check must find
                self._head = self.ledger.head()

    def _read_rows(self, after: int = 0) -> dict[int, tuple[Any, ...]]:
        sql = "SELECT seq, at, kind, study, run, data, hash FROM events WHERE study=? AND seq>? ORDER BY seq"
        return {row[0]: tuple(row) for row in self.ledger.rows(sql, (STUDY, after))}

    def _hash_of(self, seq: int) -> str:
        row = self.ledger.one("SELECT hash FROM events WHERE seq=?", (seq,))
        return row[0] if row else GENESIS

    def _identity(self) -> tuple[int, int] | None:
        """Which file the ledger's path leads to; None: to no file."""
        try:
            status = os.stat(self.ledger.path)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def _event(row: tuple[Any, ...]) -> Event:
    seq, at, kind, study, run, data, digest = row
    return Event(seq, at, kind, study, run, orjson.loads(data), digest)


def _not_from_here(events: Sequence[tuple[int, str, str | None]]) -> str:
    named = ", ".join(f"{seq} ({kind}{f' of {run}' if run else ''})" for seq, kind, run in events[:FORGED_SHOWN])
    return f"the ledger has events of versions that are not from here: {named}"


def told(findings: Sequence[GateFinding]) -> list[dict[str, Any]]:
    """Findings as plain data; text that no UTF-8 can hold is mended."""

    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    return [{"ok": f.ok, "what": f.what, "why": clean(f.why), "warning": f.warning} for f in findings]
