"""Proving the record, and rebuilding its tables from the run folders."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from looplab.config.files import hash_config
from looplab.errors import LabError
from looplab.ledger.ledger import ANCHOR, Event, Ledger
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
    """chain | table | file | folder"""
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Audit:
    events: int
    head: str
    files: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    """What was changed once and has been restored: the record is whole."""


def audit(ledger: Ledger, lab: Path) -> Audit:
    """Walk the chain; then compare the tables and every recorded file with what the chain says of them."""
    findings: list[Finding] = []
    seq, head = ledger.head()
    broken = ledger.first_broken_link()
    if broken is not None:
        findings.append(Finding("chain", f"event {broken.seq}", broken.why))
    told = _Told()
    for event in ledger.events():
        if broken is None or event.seq < broken.seq:
            told.hear(event)
    if broken is None:
        findings.extend(_compare_tables(ledger, told))
    count = 0
    for (study, run), files in told.files.items():
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
    return Audit(seq, head, count, tuple(findings), tuple(told.restored))


@dataclass(slots=True)
class _Told:
    """What the chain amounts to."""

    planned: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    ended: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    proposed: dict[int, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, str | None] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)
    restored: list[Finding] = field(default_factory=list)
    """Files that a run has changed, and the engine restored at its end."""
    rebuilt: bool = False
    """Whether tables were rebuilt from folders: then they may know what the chain does not."""

    def hear(self, event: Event) -> None:
        key = (event.study, event.run or "")
        match event.kind:
            case "planned":
                self.planned[key] = event.data
            case "ended":
                self.ended[key] = event.data
            case "proposed":
                self.proposed[event.data["proposal"]] = event.data
            case "best":
                self.best[event.study] = event.run
            case "judged":
                self.verdicts[key] = event.data["verdict"]
            case "record changed":
                self.restored += [
                    Finding("file", f"{event.study}/{event.run}/{change['name']}", "the run changed it; restored")
                    for change in event.data["changes"]
                    if change["restored"]
                ]
            case "objective changed":
                self.best[event.study] = None
            case "reindexed":
                self.rebuilt = True
        if event.run is not None and event.data.get("files"):
            self.files.setdefault(key, {}).update(event.data["files"])


def _compare_tables(ledger: Ledger, told: _Told) -> Iterator[Finding]:
    ended = dict(told.ended)
    for row in ledger.rows("SELECT * FROM runs"):
        key = (row["study"], row["id"])
        where = f"{row['study']}/{row['id']}"
        sides = [(PLANNED, told.planned.get(key), "was planned")]
        if row["state"] == "ended":
            sides.append((ENDED, ended.pop(key, None), "has ended"))
        for columns, said, what in sides:
            if said is None:
                if not told.rebuilt:
                    yield Finding("table", where, f"the table says that it {what}, the chain does not")
                continue
            if told.rebuilt and columns is PLANNED:
                said = {**said, "proposal": row["proposal"]}  # proposals got new numbers
            for column, name in columns.items():
                if row[column] != said.get(name):
                    yield Finding("table", where, f"{column} is {row[column]!r} in the table, another in the chain")
        if not told.rebuilt and row["verdict"] != told.verdicts.get(key):
            yield Finding("table", where, f"the verdict is {row['verdict']!r} in the table, another in the chain")
    for row in ledger.rows("SELECT hash, body FROM configs"):
        if hash_config(json.loads(row["body"])) != row["hash"]:
            yield Finding("table", f"config {row['hash']}", "the config in the table has another hash")
    for study, run in ended:
        yield Finding("table", f"{study}/{run}", "the chain says that it ended, the table does not know it")
    if told.rebuilt:
        return
    for row in ledger.rows("SELECT * FROM proposals"):
        said = told.proposed.get(row["id"], {})
        same = said.get("edits") == orjson.loads(row["edits"]) and said.get("parent") == row["parent"]
        if not same or said.get("reason") != row["reason"]:
            yield Finding("table", f"proposal {row['id']}", "it is not in the chain as it is in the table")
    for row in ledger.rows("SELECT name, best FROM studies"):
        if row["best"] != told.best.get(row["name"]):
            yield Finding("table", row["name"], f"the best run is {row['best']!r} in the table, another in the chain")


def open_or_replace(path: Path) -> tuple[Ledger, Path | None]:
    """The ledger; one that cannot be opened is put aside under another name, never deleted."""
    if not path.exists():
        path.with_name(ANCHOR).unlink(missing_ok=True)  # of the chain that is gone
    try:
        ledger = Ledger(path)
        ledger.rows("PRAGMA quick_check")
        return ledger, None
    except (LabError, sqlite3.DatabaseError):
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.with_name(ANCHOR).unlink(missing_ok=True)  # of the chain that was put aside
        return Ledger(path), aside


def reindex(ledger: Ledger, lab: Path) -> dict[str, int]:
    """Rebuild studies, rounds and runs from the folders. Runs that are planned but have no folder yet stay."""
    counted: dict[str, int] = {}
    with ledger.write():
        ledger.execute("DELETE FROM runs WHERE NOT (state='planned' AND id IN (SELECT run FROM plans))")
        ledger.execute("DELETE FROM rounds")
        for study_dir in sorted(p for p in (lab / "outputs").glob("*") if p.is_dir() and p.name[0] not in "._"):
            study = study_dir.name
            rows = [_row_of(study, run_dir) for run_dir in folder.run_folders(study_dir)]
            for row in rows:
                ledger.execute("DELETE FROM runs WHERE study=? AND (id=? OR n=?)", (study, row["id"], row["n"]))
                names = ", ".join(row)
                marks = ", ".join("?" * len(row))
                ledger.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(row.values()))  # noqa: S608
                _rebuild_proposal(ledger, study, study_dir / row["id"], row)
                _rebuild_config(ledger, study_dir / row["id"], row["config_hash"])
            counted[study] = len(rows)
            _rebuild_study(ledger, study, study_dir, rows)
        ledger.record("reindexed", "", runs=counted)
    return counted


def _row_of(study: str, run_dir: Path) -> dict[str, Any]:
    about = folder.read_json(run_dir, "run.json")
    summary = folder.read_json(run_dir, "summary.json")
    process = folder.read_json(run_dir, "process.json")
    exit_ = folder.read_json(run_dir, "exit.json")
    return {
        "study": study,
        "id": run_dir.name,
        "n": about["n"],
        "round": about["round"],
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
        "verdict": (summary.get("verdict") or {}).get("verdict"),
        "devices": max(1, len(about.get("devices", []))),
        "role": about.get("role") or ("base" if about["proposer"] == "base" else "trial"),
        "point": about.get("point") or about["config_hash"],
        "seed": about.get("seed"),
        "twin": about.get("twin"),
        "warm": about.get("warm"),
    }


def _rebuild_proposal(ledger: Ledger, study: str, run_dir: Path, row: dict[str, Any]) -> None:
    """The proposal that a run was made from, so that it is not taken once more."""
    source = folder.read_json(run_dir, "run.json").get("source")
    if source is None or ledger.one("SELECT 1 FROM proposals WHERE study=? AND source=?", (study, source)):
        return
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
    ledger.execute("UPDATE runs SET proposal=? WHERE study=? AND id=?", (cursor.lastrowid, study, row["id"]))


def _rebuild_config(ledger: Ledger, run_dir: Path, config_hash: str) -> None:
    with contextlib.suppress(LabError):  # the file is not what it was, or gone: the ledger's own config stays
        config = folder.read_config_of(run_dir, config_hash)
        ledger.execute("DELETE FROM configs WHERE hash=?", (config_hash,))
        keep_config(ledger, config_hash, config)


def _rebuild_study(ledger: Ledger, study: str, study_dir: Path, rows: list[dict[str, Any]]) -> None:
    now = time.time()
    first = min((row["created"] for row in rows), default=now)
    best = folder.pointed(study_dir, "BEST")
    rounds = ledger.rows("SELECT coalesce(max(round), 0) FROM runs WHERE study=?", (study,))[0][0]
    ledger.execute("INSERT OR IGNORE INTO studies (name, created) VALUES (?,?)", (study, first))
    ledger.execute("UPDATE studies SET best=? WHERE name=?", (best, study))
    open_rounds = {row[0] for row in ledger.rows("SELECT round FROM runs WHERE study=? AND state!='ended'", (study,))}
    for n in range(1, rounds + 1):
        closed = None if n in open_rounds or n == rounds else now
        ledger.execute("INSERT INTO rounds VALUES (?,?,?,?,1)", (study, n, first, closed))
