"""Proving the record, and rebuilding its tables from the run folders."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from looplab.config.files import hash_config
from looplab.errors import LabError
from looplab.ledger.configuration import configurations
from looplab.ledger.ledger import HEAD_FILE, Event, Ledger
from looplab.ledger.study import keep_config
from looplab.runs import folder

PLANNED = {"round": "round", "proposal": "proposal", "proposer": "proposer", "parent": "parent", "base": "base",
           "config_hash": "config", "twin": "twin", "warm": "warm"}  # fmt: skip
ENDED = {"status": "status", "exit_code": "code", "signal": "signal", "objective": "objective"}
"""Columns of a run with the names under which the chain says the same."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was recorded."""

    what: str
    """chain | table | file | folder | anchor"""
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Audit:
    events: int
    head: str
    files: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What is not wrong, but what somebody who believes the record should know."""


def audit(ledger: Ledger, lab: Path) -> Audit:
    """Walk the chain; then compare the tables and every recorded file with what the chain says of them."""
    findings: list[Finding] = []
    seq, head = ledger.head()
    broken = ledger.first_broken_link()
    if broken is not None:
        findings.append(Finding("chain", f"event {broken.seq}", broken.why))
    replay = Replay()
    for event in ledger.events():
        if broken is None or event.seq < broken.seq:
            findings.extend(replay.apply(event))
    if broken is None:
        findings.extend(_compare_tables(ledger, replay))
    count = 0
    for (study, run), files in replay.files.items():
        run_dir = folder.study_folder(lab, study) / run
        if not run_dir.is_dir():
            findings.append(Finding("folder", f"{study}/{run}", "the run's folder is gone"))
            continue
        for name, digest in files.items():
            count += 1
            now = folder.hash_file(run_dir / name)
            if now != digest:
                why = "the file is gone" if now is None else "the file is not what it was when it was recorded"
                findings.append(Finding("file", f"{study}/{run}/{name}", why))
    return Audit(seq, head, count, tuple(findings), tuple(replay.notes()))


Key = tuple[str, str]
"""Study and run."""


@dataclass(slots=True)
class Replay:
    """What the tables and files must be, according to the chain."""

    planned: dict[Key, dict[str, Any]] = field(default_factory=dict)
    ended: dict[Key, dict[str, Any]] = field(default_factory=dict)
    files: dict[Key, dict[str, str]] = field(default_factory=dict)
    proposed: dict[int, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, str | None] = field(default_factory=dict)
    verdicts: dict[Key, str | None] = field(default_factory=dict)
    configured: dict[str, list[Event]] = field(default_factory=dict)
    rebuilds: list[Event] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    """Files that a run has changed, and the engine restored at its end."""

    def apply(self, event: Event) -> Iterator[Finding]:
        """Take an event into account; yield what contradicts the events before it."""
        key, data = (event.study, event.run or ""), event.data
        match event.kind:
            case "planned":
                self.planned[key] = data
            case "ended":
                self.ended[key] = data
            case "remeasured":
                self.ended[key] = {**self.ended.get(key, {}), "objective": data["objective"]}
            case "proposed":
                self.proposed[data["proposal"]] = data
            case "best":
                self.best[event.study] = event.run
            case "judged":
                self.verdicts[key] = data["verdict"]
                yield from self._check_verdict(event)
            case "record changed":
                self.restored += [
                    f"{event.study}/{event.run}/{change['name']}: the run changed it; restored"
                    for change in data["changes"]
                    if change["restored"]
                ]
            case "scrubbed":
                names = ", ".join(data["files"])
                self.restored.append(
                    f"secrets were taken out of {names}" + (f" of run {event.run}" if event.run else "")
                )
            case "objective changed":
                self.best[event.study] = None
            case "judge restarted":
                self.best[event.study] = None
                for (study, run), verdict in self.verdicts.items():
                    if study == event.study and verdict != "void":
                        self.verdicts[study, run] = None
            case "study configured":
                self.configured.setdefault(event.study, []).append(event)
                if hash_config(data["configuration"]) != data["hash"]:
                    yield Finding("chain", f"event {event.seq}", "the configuration does not match its hash")
            case "recovered":
                self._recover(key, data)
            case "reindexed":
                self.rebuilds.append(event)
                self._forget(data)
        if event.run is not None and data.get("files"):
            self.files.setdefault(key, {}).update(data["files"])

    def _check_verdict(self, event: Event) -> Iterator[Finding]:
        named = event.data["evidence"].get("configuration")
        known = self.configured.get(event.study)
        if named is not None and known and known[-1].data["hash"] != named:
            why = f"the verdict names the configuration {named}, but {known[-1].data['hash']} was in force"
            yield Finding("chain", f"event {event.seq}", why)

    def _recover(self, key: Key, data: Mapping[str, Any]) -> None:
        """A run or a proposal that `reindex` took from its folder, since the chain did not know it, or otherwise."""
        if "proposed" in data:
            self.proposed[data["proposed"]["proposal"]] = data["proposed"]
            return
        self.planned[key] = data["planned"]
        self.verdicts[key] = data["verdict"]
        self.files.pop(key, None)
        if data["ended"] is None:
            self.ended.pop(key, None)
        else:
            self.ended[key] = data["ended"]

    def _forget(self, data: Mapping[str, Any]) -> None:
        """Runs whose folder was gone when the tables were rebuilt: the tables do not know them any more."""
        for study, runs in data.get("lost", {}).items():
            for run in runs:
                for facts in (self.planned, self.ended, self.files, self.verdicts):
                    facts.pop((study, run), None)

    def notes(self) -> Iterator[str]:
        yield from self.restored
        for study, events in self.configured.items():
            for one in configurations(iter(events))[1:]:
                yield f"study {study}: the configuration was changed at event {one.seq}: {one.describe()}"
        for event in self.rebuilds:
            lost = sum(map(len, event.data.get("lost", {}).values()))
            yield (
                f"the tables were rebuilt from the run folders at event {event.seq}: {event.data.get('recovered', 0)} "
                f"entries were taken from folders, {lost} run(s) were lost"
            )


def _compare_tables(ledger: Ledger, replay: Replay) -> Iterator[Finding]:
    ended = dict(replay.ended)
    for row in ledger.rows("SELECT * FROM runs"):
        key = (row["study"], row["id"])
        where = f"{row['study']}/{row['id']}"
        sides = [(PLANNED, replay.planned.get(key), "was planned")]
        if row["state"] == "ended":
            sides.append((ENDED, ended.pop(key, None), "has ended"))
        for columns, said, what in sides:
            if said is None:
                yield Finding("table", where, f"the table says that it {what}, the chain does not")
                continue
            for column, name in columns.items():
                if row[column] != said.get(name):
                    yield Finding("table", where, f"{column} is {row[column]!r} in the table, another in the chain")
        if row["verdict"] != replay.verdicts.get(key):
            yield Finding("table", where, f"the verdict is {row['verdict']!r} in the table, another in the chain")
    for row in ledger.rows("SELECT hash, body FROM configs"):
        if hash_config(json.loads(row["body"])) != row["hash"]:
            yield Finding("table", f"config {row['hash']}", "the config in the table has another hash")
    for study, run in ended:
        yield Finding("table", f"{study}/{run}", "the chain says that it ended, the table does not know it")
    for row in ledger.rows("SELECT * FROM proposals"):
        said = replay.proposed.get(row["id"], {})
        same = said.get("edits") == orjson.loads(row["edits"]) and said.get("parent") == row["parent"]
        if not same or said.get("reason") != row["reason"]:
            yield Finding("table", f"proposal {row['id']}", "it is not in the chain as it is in the table")
    for row in ledger.rows("SELECT name, best FROM studies"):
        if row["best"] != replay.best.get(row["name"]):
            yield Finding("table", row["name"], f"the best run is {row['best']!r} in the table, another in the chain")


def open_or_replace(path: Path) -> tuple[Ledger, Path | None]:
    """The ledger; one that cannot be opened is put aside under another name, never deleted."""
    if not path.exists():
        path.with_name(HEAD_FILE).unlink(missing_ok=True)  # of the chain that is gone
    try:
        ledger = Ledger(path)
        ledger.rows("PRAGMA quick_check")
        return ledger, None
    except (LabError, sqlite3.DatabaseError):
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.with_name(HEAD_FILE).unlink(missing_ok=True)  # of the chain that was put aside
        return Ledger(path), aside


@dataclass(frozen=True, slots=True)
class Reindexed:
    """What `reindex` did."""

    runs: dict[str, int]
    """Runs by study, as found in the folders."""
    recovered: int
    """Runs and proposals that the chain did not know, or knew otherwise, and that were taken from folders."""
    lost: dict[str, list[str]]
    """Runs by study that the chain knows and no folder has."""


def reindex(ledger: Ledger, lab: Path) -> Reindexed:
    """Rebuild studies, rounds and runs from the folders. Runs that are planned but have no folder yet stay.

    What the folders say and the chain does not is recorded as `recovered`, so that the chain explains every row again.
    """
    replay = Replay()
    for event in ledger.events():
        for _ in replay.apply(event):
            pass
    counted: dict[str, int] = {}
    recovered = 0
    with ledger.write():
        ledger.execute("DELETE FROM runs WHERE NOT (state='planned' AND id IN (SELECT run FROM plans))")
        ledger.execute("DELETE FROM rounds")
        for study_dir in sorted(p for p in (lab / "outputs").glob("*") if p.is_dir() and p.name[0] not in "._"):
            study = study_dir.name
            rows = [_row_of(study, run_dir, replay) for run_dir in folder.run_folders(study_dir)]
            for row in rows:
                ledger.execute("DELETE FROM runs WHERE study=? AND (id=? OR n=?)", (study, row["id"], row["n"]))
                names = ", ".join(row)
                marks = ", ".join("?" * len(row))
                ledger.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(row.values()))  # noqa: S608
                recovered += _rebuild_proposal(ledger, study, study_dir / row["id"], row)
                recovered += _record_run(ledger, row, replay)
                _rebuild_config(ledger, study_dir / row["id"], row["config_hash"])
            counted[study] = len(rows)
            _rebuild_study(ledger, study, study_dir, rows, replay)
        known = {(row["study"], row["id"]) for row in ledger.rows("SELECT study, id FROM runs")}
        lost: dict[str, list[str]] = {}
        for study, run in replay.planned:
            if (study, run) not in known:
                lost.setdefault(study, []).append(run)
        ledger.record("reindexed", "", runs=counted, recovered=recovered, lost=lost)
    return Reindexed(counted, recovered, lost)


def _record_run(ledger: Ledger, row: Mapping[str, Any], replay: Replay) -> int:
    """Record the run as its folder tells it, unless the chain says the same already; return how many were recorded."""
    key = (row["study"], row["id"])
    sides: list[tuple[dict[str, str], dict[str, Any] | None]] = [(PLANNED, replay.planned.get(key))]
    if row["state"] == "ended":
        sides.append((ENDED, replay.ended.get(key)))
    elif key in replay.ended:
        sides.append((ENDED, None))
    same = all(
        said is not None and all(row.get(column) == said.get(name) for column, name in columns.items())
        for columns, said in sides
    )
    if same and row["verdict"] == replay.verdicts.get(key):
        return 0
    ledger.record(
        "recovered", *key, planned={name: row.get(column) for column, name in PLANNED.items()},
        ended={name: row[column] for column, name in ENDED.items()} if row["state"] == "ended" else None,
        verdict=row["verdict"],
    )  # fmt: skip
    return 1


def _row_of(study: str, run_dir: Path, replay: Replay) -> dict[str, Any]:
    """The row of a run: what happened from its folder, what was decided from the chain where that knows the run."""
    said = replay.planned.get((study, run_dir.name), {})
    about = folder.read_json(run_dir, "run.json")
    summary = folder.read_json(run_dir, "summary.json")
    process = folder.read_json(run_dir, "process.json")
    exit_ = folder.read_json(run_dir, "exit.json")
    return {
        "study": study,
        "id": run_dir.name,
        "n": about["n"],
        "round": about["round"],
        "proposal": said.get("proposal"),
        "proposer": about["proposer"],
        "parent": about.get("parent"),
        "base": about.get("base"),
        "reason": about.get("reason", ""),
        "config_hash": about["config_hash"],
        "state": "ended" if summary else "running",
        "status": summary.get("status"),
        "slot": about.get("slot"),
        "pid": process.get("pid"),
        "created": about["created"],
        "started": exit_.get("started") or process.get("started"),
        "ended": exit_.get("ended"),
        "exit_code": summary.get("exit_code"),
        "signal": summary.get("signal"),
        "objective": (summary.get("objective") or {}).get("value"),
        "verdict": replay.verdicts.get((study, run_dir.name))
        if said
        else (summary.get("verdict") or {}).get("verdict"),
        "devices": max(1, len(about.get("devices", []))),
        "role": about.get("role") or ("base" if about["proposer"] == "base" else "trial"),
        "point": about.get("point") or about["config_hash"],
        "seed": about.get("seed"),
        "twin": about.get("twin"),
        "warm": about.get("warm"),
        "measured": summary.get("measured"),
    }


def _rebuild_proposal(ledger: Ledger, study: str, run_dir: Path, row: dict[str, Any]) -> int:
    """Rebuild the proposal that a run was made from, so that it is not taken once more; return how many were."""
    source = folder.read_json(run_dir, "run.json").get("source")
    if source is None or ledger.one("SELECT 1 FROM proposals WHERE study=? AND source=?", (study, source)):
        return 0
    about, override = folder.read_json(run_dir, "run.json"), folder.read_json(run_dir, "override.json")
    cursor = ledger.execute(
        "INSERT INTO proposals"
        " (study, round, created, proposer, source, parent, edits, reason, hypothesis, run, status)"
        " VALUES (?,?,?,?,?,?,?,?,?,?,'accepted')",
        (
            study,
            row["round"],
            row["created"],
            row["proposer"],
            source,
            row["parent"],
            orjson.dumps(override.get("edits", [])).decode(),
            row["reason"],
            about.get("hypothesis", ""),
            row["id"],
        ),
    )
    row["proposal"] = cursor.lastrowid
    ledger.execute("UPDATE runs SET proposal=? WHERE study=? AND id=?", (cursor.lastrowid, study, row["id"]))
    ledger.record("recovered", study, proposed={
        "proposal": cursor.lastrowid, "proposer": row["proposer"], "parent": row["parent"],
        "edits": override.get("edits", []), "reason": row["reason"], "hypothesis": about.get("hypothesis", ""),
    })  # fmt: skip
    return 1


def _rebuild_config(ledger: Ledger, run_dir: Path, config_hash: str) -> None:
    with contextlib.suppress(LabError):  # the file is not what it was, or gone: the ledger's own config stays
        config = folder.read_config_of(run_dir, config_hash)
        ledger.execute("DELETE FROM configs WHERE hash=?", (config_hash,))
        keep_config(ledger, config_hash, config)


def _rebuild_study(ledger: Ledger, study: str, study_dir: Path, rows: list[dict[str, Any]], replay: Replay) -> None:
    now = time.time()
    first = min((row["created"] for row in rows), default=now)
    best = replay.best.get(study)
    if best is None or best not in {row["id"] for row in rows}:
        best = folder.pointed(study_dir, "BEST")
        if best != replay.best.get(study):
            objective = next((row["objective"] for row in rows if row["id"] == best), None)
            ledger.record("best", study, best, objective=objective)
    rounds = ledger.rows("SELECT coalesce(max(round), 0) FROM runs WHERE study=?", (study,))[0][0]
    ledger.execute("INSERT OR IGNORE INTO studies (name, created) VALUES (?,?)", (study, first))
    ledger.execute("UPDATE studies SET best=? WHERE name=?", (best, study))
    open_rounds = {row[0] for row in ledger.rows("SELECT round FROM runs WHERE study=? AND state!='ended'", (study,))}
    for n in range(1, rounds + 1):
        closed = None if n in open_rounds or n == rounds else now
        ledger.execute("INSERT INTO rounds VALUES (?,?,?,?,1)", (study, n, first, closed))
