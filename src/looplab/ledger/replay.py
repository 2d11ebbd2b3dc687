"""Replay of the chain: the tables and files as the events define them.

A column that no event states (older versions state fewer) is not in the replay, and is not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from looplab.config.files import hash_config
from looplab.ledger import pipelines
from looplab.ledger.configuration import configurations
from looplab.ledger.ledger import HEAD_FILE, Event
from looplab.ledger.versions import is_about_versions

Key = tuple[str, str]
"""Study and run."""
Facts = dict[str, Any]
"""Columns of a row."""

PLANNED = {"round": "round", "proposal": "proposal", "proposer": "proposer", "parent": "parent", "base": "base",
           "config_hash": "config", "role": "role", "twin": "twin", "warm": "warm", "n": "n", "reason": "reason",
           "devices": "devices", "point": "point", "seed": "seed"}  # fmt: skip
ENDED = {"status": "status", "exit_code": "code", "signal": "signal", "objective": "objective", "measured": "measured",
         "ended": "ended"}  # fmt: skip
"""Column of a run → its key in the payload."""
UNPLACED = {"verdict": None, "job": None, "lost_s": 0.0}
"""Columns of a run that only later events change."""
_NULLABLE = ("twin", "warm")
"""Keys that `planned` omits if they are None."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Something that differs from the record."""

    what: str
    """ledger | chain | table | file | folder | anchor"""
    where: str
    why: str


def hash_text(text: str) -> str:
    """Return the short hash by which an event references a text in a table."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class EventReplay:
    """The state that the chain defines, row by row and file by file."""

    studies: dict[str, Facts] = field(default_factory=dict)
    rounds: dict[tuple[str, int], Facts] = field(default_factory=dict)
    runs: dict[Key, Facts] = field(default_factory=dict)
    proposals: dict[int, Facts] = field(default_factory=dict)
    sessions: dict[int, Facts] = field(default_factory=dict)
    verdicts: dict[Key, list[Facts]] = field(default_factory=dict)
    commands: list[Facts] = field(default_factory=list)
    plans: dict[Key, str] = field(default_factory=dict)
    """Hashes of the plans of planned runs."""
    files: dict[Key, dict[str, str]] = field(default_factory=dict)
    kept: dict[str, dict[str, str]] = field(default_factory=dict)
    """Study → hashes of files that do not belong to a single run, by their path in the study's folder."""
    kept_before: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """(study, path) → hashes of earlier versions of such files."""
    options: dict[str, str] = field(default_factory=dict)
    """Study → options of its last engine, as stored."""
    pipelines: pipelines.Rows = field(default_factory=dict)
    """Rows of stages, suites and cases."""
    version_events: list[Event] = field(default_factory=list)
    configured: dict[str, list[Event]] = field(default_factory=dict)
    rebuilds: list[Event] = field(default_factory=list)
    early: set[str] = field(default_factory=set)
    """Studies that an early version began, whose chain does not have the judge's state."""
    restored: list[str] = field(default_factory=list)
    """Files that a run changed and the engine restored at its end, as notes."""
    other_notes: list[str] = field(default_factory=list)

    def apply(self, event: Event) -> Iterator[Discrepancy]:
        """Apply an event; yield what contradicts earlier events.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: The event does not have the data of its kind.
        """
        study, data = event.study, event.data
        key = (study, event.run or "")
        match event.kind:
            case "study opened" | "objective changed":
                facts = self.studies.setdefault(study, {"opened": event.at, "best": None})
                facts.update(objective=data["objective"], goal=data["goal"])
                if event.kind == "objective changed":
                    facts["best"] = None
                if data.get("cleared"):
                    for run in (run for (one, _), run in self.runs.items() if one == study):
                        run.update(objective=None, measured=None)
            case "round began":
                self.rounds[study, data["round"]] = {"created": event.at, "closed": None}
            case "round ended":
                self.rounds.setdefault((study, data["round"]), {})["closed"] = event.at
            case "proposed":
                self._propose(event.study, data, {"created": event.at})
            case "rejected":
                self.proposals.setdefault(data["proposal"], {}).update(status="rejected", problems=data["problems"])
            case "planned":
                self.runs[key] = {"state": "planned", **UNPLACED, "created": event.at, **_planned(data)}
                self._accept(event.run, data)
                if "plan" in data:
                    self.plans[key] = data["plan"]
            case "imported":
                self.runs[key] = {"state": "ended", **UNPLACED, "created": event.at, **_planned(data)}
                self.runs[key] |= _named(data, ENDED)
            case "launched":
                state = "queued" if data.get("queued") else "running"
                self.runs.setdefault(key, {}).update(state=state, slot=data["slot"], attempt=data.get("attempt", 1))
            case "queued":
                self.runs.setdefault(key, {}).update(state="queued", job=data["job"])
            case "started":
                self.runs.setdefault(key, {}).update(state="running", host=data["host"], job=data["job"])
            case "attempt ended":
                again = {"state": "planned", "slot": None, "started": None, "host": None, "job": None}
                attempt = data["attempt"] + 1
                self.runs.setdefault(key, {}).update(again, attempt=attempt, lost_s=data["lost_s"])
            case "returned":
                self.runs.setdefault(key, {}).update(state="planned", slot=None)
            case "ended":
                self.runs.setdefault(key, {}).update(state="ended", **_named(data, ENDED))
                if data.get("started") is not None:
                    self.runs[key]["started"] = data["started"]
            case "remeasured":
                self.runs.setdefault(key, {}).update(_named(data, {"objective": "objective", "measured": "measured"}))
            case "best":
                self.studies.setdefault(study, {})["best"] = event.run
                self.studies[study].setdefault("bests", []).append(event.run)
            case "judged":
                self.runs.setdefault(key, {})["verdict"] = data["verdict"]
                verdict = {"at": event.at, "verdict": data["verdict"], "evidence": data["evidence"]}
                self.verdicts.setdefault(key, []).append(verdict)
                yield from self._check_verdict(event)
            case "judge state":
                self.studies.setdefault(study, {})["judge_state"] = data["hash"]
            case "judge restarted":
                self.restart_judge(study)
                self.other_notes.append(
                    f"study {study}: the judge restarted at event {event.seq}, with its full alpha: {data['why']}"
                )
            case "record changed":
                self.restored += [
                    f"{event.study}/{event.run}/{change['name']}: the run changed it; restored"
                    for change in data["changes"]
                    if change["restored"]
                ]
            case "scrubbed":
                names = ", ".join(data["files"])
                whose = f" of run {event.run}" if event.run else ""
                self.other_notes.append(f"secrets were removed from {names}{whose}")
            case "study configured":
                self.configured.setdefault(study, []).append(event)
                if hash_config(data["configuration"]) != data["hash"]:
                    yield Discrepancy("chain", f"event {event.seq}", "the configuration does not match its hash")
            case "engine began":
                if "session" in data:
                    facts = _named(data, {"host": "host", "pid": "pid", "ticks": "ticks"})
                    self.sessions[data["session"]] = {"study": study, "began": event.at, "ended": None, **facts}
                    if "opened" in self.studies.get(study, {}) and study not in self.early:
                        self.studies[study].setdefault("judge_state", None)
                else:
                    self.early.add(study)
            case "engine ended":
                if "session" in data:
                    self.sessions.setdefault(data["session"], {}).update(ended=event.at, how=data["how"])
            case "options":
                self.options[study] = data["text"]
            case "asked":
                what = {name: value for name, value in data.items() if name != "what"}
                if event.run is not None:
                    what["run"] = event.run
                self.commands.append({"study": study, "at": event.at, "what": data["what"], "data": what})
            case "archived":
                for run, files in data["runs"].items():
                    self.files.setdefault((study, run), {}).update(files)
            case "kept":
                kept = self.kept.setdefault(study, {})
                for path, digest in kept.items():
                    if path in data["paths"] and data["paths"][path] != digest:
                        self.kept_before.setdefault((study, path), set()).add(digest)
                kept.update(data["paths"])
            case kind if kind in pipelines.KINDS:
                pipelines.apply(self.pipelines, kind, study, data)
            case "journal rewritten":
                self.other_notes.append(f"the journal was rewritten at event {event.seq}: {data['why']}")
            case "head rewritten":
                self.other_notes.append(f"{HEAD_FILE} was rewritten at event {event.seq}: {data['why']}")
            case "recovered":
                self._recover(key, data)
            case "reindexed":
                self.rebuilds.append(event)
                self._forget(data)
        if is_about_versions(event):
            self.version_events.append(event)
        if event.run is not None and data.get("files"):
            self.files.setdefault(key, {}).update(data["files"])

    def _propose(self, study: str, data: Mapping[str, Any], facts: Facts) -> None:
        facts |= {"study": study, "status": "waiting", "run": None, "problems": None}
        facts |= _named(data, {name: name for name in ("proposer", "parent", "edits", "reason", "hypothesis")})
        if "source" in data:
            facts["source"] = data["source"]
        if "job" in data:
            facts["edits"] = data["job"]
        self.proposals[data["proposal"]] = facts

    def _accept(self, run: str | None, data: Mapping[str, Any]) -> None:
        if data.get("proposal") is not None:
            self.proposals.setdefault(data["proposal"], {}).update(status="accepted", run=run, round=data["round"])

    def restart_judge(self, study: str) -> None:
        """Forget the judge's verdicts on a study; vetoes by people stay."""
        self.studies.setdefault(study, {}).update(best=None, judge_state=None)
        for key, facts in self.runs.items():
            if key[0] == study and facts.get("verdict") != "void":
                facts["verdict"] = None
        for key in [key for key in self.verdicts if key[0] == study]:
            self.verdicts[key] = [one for one in self.verdicts[key] if one["verdict"] == "void"]

    def _check_verdict(self, event: Event) -> Iterator[Discrepancy]:
        named = event.data["evidence"].get("configuration")
        known = self.configured.get(event.study)
        if named is not None and known and known[-1].data["hash"] != named:
            why = f"the verdict names the configuration {named}, but {known[-1].data['hash']} was in force"
            yield Discrepancy("chain", f"event {event.seq}", why)

    def _recover(self, key: Key, data: Mapping[str, Any]) -> None:
        """Apply a run or proposal that `reindex` restored from its folder, because the chain lacked it or differed."""
        if "proposed" in data:
            self._propose(key[0], data["proposed"], {})
            self.proposals[data["proposed"]["proposal"]].update(status="accepted")
            if "run" in data["proposed"]:
                self.proposals[data["proposed"]["proposal"]]["run"] = data["proposed"]["run"]
            else:
                del self.proposals[data["proposed"]["proposal"]]["run"]
            return
        facts = _planned(data["planned"])
        if self.proposals.get(facts.get("proposal", 0), {}).get("status") == "waiting":
            self._accept(key[1], data["planned"])
        if data.get("ended") is None:
            facts["state"] = data.get("state", "running")
        else:
            facts |= {"state": "ended", **_named(data["ended"], ENDED)}
        self.runs[key] = facts | {"verdict": data.get("verdict")}
        if "files" not in data:
            self.files.pop(key, None)

    def _forget(self, data: Mapping[str, Any]) -> None:
        """Remove runs that the rebuilt tables lack: runs that had not started and whose plan was lost; in early
        versions, runs whose folder was missing."""
        for study, numbers in data.get("rounds", {}).items():
            for n in numbers:
                self.rounds.setdefault((study, n), {})
        for study, runs in data.get("gone", {}).items():
            for run in runs:
                self.files.pop((study, run), None)
                self.plans.pop((study, run), None)
        for name in ("lost", "dropped"):
            for study, runs in data.get(name, {}).items():
                for run in runs:
                    facts = self.runs.pop((study, run), {})
                    for one in (self.files, self.plans, self.verdicts):
                        one.pop((study, run), None)
                    if name == "dropped" and facts.get("proposal") in self.proposals:
                        self.proposals[facts["proposal"]].update(status="waiting", run=None, round=None)

    def notes(self) -> Iterator[str]:
        """Yield what is not wrong, but worth knowing for a reader of the record."""
        yield from self.restored
        yield from self.other_notes
        for study, events in self.configured.items():
            for one in configurations(iter(events))[1:]:
                yield f"study {study}: {one.sentence(f'at event {one.seq}')}"
        for event in self.rebuilds:
            lost = sum(map(len, {**event.data.get("lost", {}), **event.data.get("gone", {})}.values()))
            note = (
                f"the tables were rebuilt at event {event.seq}: {event.data.get('recovered', 0)} "
                f"entries were restored from folders, {lost} run(s) were lost"
            )
            if event.data.get("events_lost"):
                note += f", {event.data['events_lost']} event(s) were lost"
            if event.data.get("new_chain"):
                note += "; the chain is new: nothing before it is proven"
            yield note


def _planned(data: Mapping[str, Any]) -> Facts:
    facts = _named(data, PLANNED)
    return facts | {name: data.get(name) for name in _NULLABLE}


def _named(data: Mapping[str, Any], names: Mapping[str, str]) -> Facts:
    return {column: data[name] for column, name in names.items() if name in data}
