"""Proving the record, and rebuilding its tables from the run folders."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.runs import folder

COMPARED = ("status", "exit_code", "signal", "objective")


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


def audit(ledger: Ledger, lab: Path) -> Audit:
    """Walk the chain; then compare the tables and every recorded file with what the chain says of them."""
    findings: list[Finding] = []
    seq, head = ledger.head()
    broken = ledger.first_broken_link()
    if broken is not None:
        findings.append(Finding("chain", f"event {broken.seq}", broken.why))
    recorded: dict[tuple[str, str], dict[str, str]] = {}
    ended: dict[tuple[str, str], dict[str, Any]] = {}
    for event in ledger.events():
        if event.run is None or (broken is not None and event.seq >= broken.seq):
            continue
        key = (event.study, event.run)
        if event.kind == "reindexed":
            continue
        if "files" in event.data:
            recorded.setdefault(key, {}).update(event.data["files"])
        if event.kind == "ended":
            ended[key] = event.data
    if broken is None:
        findings.extend(_compare_tables(ledger, ended))
    count = 0
    for (study, run), files in recorded.items():
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
    return Audit(seq, head, count, tuple(findings))


def _compare_tables(ledger: Ledger, ended: dict[tuple[str, str], dict[str, Any]]) -> Iterator[Finding]:
    for row in ledger.rows("SELECT * FROM runs WHERE state='ended'"):
        said = ended.pop((row["study"], row["id"]), None)
        where = f"{row['study']}/{row['id']}"
        if said is None:
            if not _was_reindexed(ledger):
                yield Finding("table", where, "the table says that it ended, the chain does not")
            continue
        for name in COMPARED:
            if row[name] != said.get("code" if name == "exit_code" else name):
                yield Finding("table", where, f"{name} is {row[name]!r} in the table, another in the chain")
    for study, run in ended:
        yield Finding("table", f"{study}/{run}", "the chain says that it ended, the table does not know it")


def _was_reindexed(ledger: Ledger) -> bool:
    return ledger.one("SELECT 1 FROM events WHERE kind='reindexed' LIMIT 1") is not None


def open_or_replace(path: Path) -> tuple[Ledger, Path | None]:
    """The ledger; one that cannot be opened is put aside under another name, never deleted."""
    try:
        ledger = Ledger(path)
        ledger.rows("PRAGMA quick_check")
        return ledger, None
    except (LabError, sqlite3.DatabaseError):
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
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
        "started": process.get("started") or exit_.get("started"),
        "ended": exit_.get("ended"),
        "exit_code": summary.get("exit_code"),
        "signal": summary.get("signal"),
        "objective": (summary.get("objective") or {}).get("value"),
        "verdict": summary.get("verdict"),
        "devices": max(1, len(about.get("devices", []))),
    }


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
        ledger.execute("INSERT INTO rounds VALUES (?,?,?,?)", (study, n, first, closed))
