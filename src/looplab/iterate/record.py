"""How far each version has come, as the ledger tells it: every step is an event, written before and after it is done.

The events of version X carry the run name `vX` in the study `iterate`; calls of agents are recorded as everywhere. A
process that is killed loses nothing: the next one reads the events and goes on with the step that has no end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from looplab.iterate.gates import Finding, Measured
from looplab.judge.base import Verdict
from looplab.ledger.ledger import Event, Ledger
from looplab.ledger.study import StudyLedger

STUDY = "iterate"


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
    findings: dict[int, list[Finding]] = field(default_factory=dict)
    """By the number of the ask."""
    void: str = ""
    """Why its numbers may not count."""
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
class Story:
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


def read(ledger: Ledger) -> Story:
    """What the events of the study come to."""
    story = Story()
    calls: dict[str, Call] = {}
    for event in ledger.events(STUDY):
        _hear(story, calls, event)
    return story


def _hear(story: Story, calls: dict[str, Call], event: Event) -> None:
    data = event.data
    if event.kind == "iterate began":
        story.range = (data["start"], data["end"], event.seq)
    elif event.kind == "iterate ended":
        story.range = None
    elif event.kind == "agent asked":
        calls[data["call"]] = call = Call(data["call"], data["log"], data["ask"], data["cli"])
        story.attempts[data["version"]][-1].calls.append(call)
    elif event.kind == "agent answered" and data["call"] in calls:
        call = calls[data["call"]]
        call.answered, call.ok, call.why = True, data["ok"], data["why"]
        call.session, call.interrupted = data.get("session"), data.get("interrupted", False)
    elif event.run is not None and event.kind.startswith("version "):
        _hear_version(story, int(event.run[1:]), event.kind.removeprefix("version "), data, event.seq)


def _hear_version(story: Story, version: int, step: str, data: dict[str, Any], seq: int) -> None:
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
        tries[-1].findings[data["ask"]] = [Finding(**finding) for finding in data["findings"]]
        tries[-1].void = data.get("void", "")
    elif step == "judged":
        tries[-1].ruling = data
        if data["verdict"] != Verdict.KEEP and data.get("alpha"):
            story.spent = math.fsum((story.spent, data["alpha"]))
    elif step in ("merged", "failed"):
        tries[-1].end = "merged" if step == "merged" else data["how"]
        tries[-1].commit, tries[-1].branch, tries[-1].why = data["commit"], data["branch"], data.get("why", "")
        tries[-1].ended = seq


class Book:
    """The ledger of the versions: writes events, and reads the story back."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.study = StudyLedger(ledger, STUDY)

    def story(self) -> Story:
        return read(self.ledger)

    def note(self, kind: str, version: int | None = None, **data: Any) -> None:
        with self.ledger.write():
            self.ledger.record(kind, STUDY, None if version is None else f"v{version}", **data)

    def meddled(self, call: str) -> bool:
        """Whether something about versions was recorded between the question of a call and its answer: that is not
        from here, so it is from the agent."""
        under_way = False
        for event in self.ledger.events(STUDY):
            if event.kind in ("agent asked", "agent answered") and event.data["call"] == call:
                under_way = event.kind == "agent asked"
            elif under_way and not event.kind.startswith("iterate "):
                return True
        return False

    def asked(self, call: str, **data: Any) -> None:
        with self.ledger.write():
            self.study.asked_agent(call, **data)

    def answered(self, call: str, **data: Any) -> None:
        with self.ledger.write():
            self.study.agent_answered(call, **data)


def told(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as plain data; text that no UTF-8 can hold is mended."""

    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    return [{"ok": f.ok, "what": f.what, "why": clean(f.why), "warning": f.warning} for f in findings]
