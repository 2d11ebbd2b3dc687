"""Rebuild the ledger: the chain from database, journal and backups; the tables from the chain and the run folders.

Nothing is deleted: an unreadable database, or one that contradicts the chain, is moved aside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.ledger import catalogue, journal, pipelines, versions
from looplab.ledger.audit import events_of
from looplab.ledger.backup import FOLDER, backups, intact, open_backup, read_hashes
from looplab.ledger.journal import MAX_SEQ, Journal, Link
from looplab.ledger.ledger import GENESIS, HEAD_FILE, REPAIR, DamagedError, Ledger, link
from looplab.ledger.replay import ENDED, PLANNED, EventReplay, Facts, Key, hash_text
from looplab.ledger.roles import Origin, Role
from looplab.ledger.schema import JOURNALLED, LAST_NUMBER
from looplab.ledger.writers.runs import keep_config
from looplab.runs import folder
from looplab.runs.code import name_files
from looplab.untrusted import UntrustedError, dump_json

MAX_DIGITS = 12
"""Digits in the number of a run, at most."""
STAMPED = "%Y%m%d-%H%M%S"
FILES = ("run.json", "config.json", "summary.json", "exit.json", "train.log", folder.EARLY_CAPSULE, folder.EARLY_EDITS,
         folder.EARLY_CHANGES)  # fmt: skip
"""Files of a run's record whose hashes are recorded if the run is not in the chain."""


@dataclass(slots=True)
class Reindexed:
    """What `reindex` did."""

    runs: dict[str, int] = field(default_factory=dict)
    """Study → number of run folders found."""
    recovered: int = 0
    """Runs and proposals that were restored from folders, because the chain lacked them or differed."""
    pipelines: int = 0
    """Stages and suites that were recorded from their folders, because the chain lacked them."""
    gone: dict[str, list[str]] = field(default_factory=dict)
    """Study → started runs whose folder is missing; they stay in the table as lost."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Study → runs that were planned, never started, and lost with their plan; they are planned again."""
    renumbered: dict[str, str] = field(default_factory=dict)
    """Run folder with a duplicate number → its new number."""
    judged_again: list[str] = field(default_factory=list)
    """Studies whose judge lost its state; all their runs are judged again."""
    events: int = 0
    """Events that were restored from the journal or a backup."""
    events_lost: int = 0
    """Events that were noted, but were found nowhere."""
    aside: list[str] = field(default_factory=list)
    """Files that were moved aside."""
    backup: str | None = None
    """The backup that replaced a missing or damaged ledger; None: none was needed."""


def restore(path: Path, lab: Path, backup: Path | None = None) -> Reindexed:
    """Replace the ledger by a backup, and bring that up to date from the journal and the run folders.

    Args:
        path: The ledger; it is moved aside.
        lab: The lab.
        backup: The backup; None: the newest intact one.

    Raises:
        LabError: There is no intact backup.
    """
    candidates = [backup] if backup is not None else backups(path)
    chosen = next((one for one in candidates if intact(one)), None)
    if chosen is None:
        why = "there is no intact backup"
        if backup is not None:
            why = f"{backup} is not an intact ledger" if backup.exists() else f"there is no file {backup}"
        raise LabError(why, hint="`looplab reindex` rebuilds the ledger from its journal and the run folders")
    done = Reindexed(backup=str(chosen))
    chain = _longest_chain(path)
    if path.exists():
        done.aside += put_aside(path)
    _copy_backup(chosen, path)
    return reindex(path, lab, done, chain)


def _copy_backup(backup: Path, path: Path) -> None:
    temporary = path.with_name(f".tmp-{os.getpid()}-restore")
    shutil.copyfile(backup, temporary)
    os.replace(temporary, path)


def reindex(path: Path, lab: Path, done: Reindexed | None = None, chain: Sequence[Link] | None = None) -> Reindexed:
    """Restore the chain, then rebuild the tables from it and from the run folders.

    The caller holds the locks of all studies. After a crash it can simply be run again.

    Args:
        path: The ledger.
        lab: The lab.
        done: What `restore` has done already.
        chain: The chain of a ledger that was moved aside; None: that of the ledger.
    """
    done = done or Reindexed()
    _clear_names(path, done)
    if chain is None:
        chain = _longest_chain(path)
    ledger = _open_or_put_aside(path, chain, done)
    try:
        noted = ledger.noted_head()
        with ledger.write():
            done.events = _add_events(ledger, chain)
            done.events_lost = max(0, noted[0] - ledger.head()[0]) if noted is not None else 0
            done.aside += _put_foreign_backups_aside(ledger)
            _rebuild_tables(ledger, lab, done)
            ledger.execute("INSERT OR IGNORE INTO meta VALUES (?, '1')", (JOURNALLED,))
        _rewrite_journal(ledger, done)
        path.with_name(HEAD_FILE).unlink(missing_ok=True)
        ledger.note_head()
    finally:
        ledger.close()
    return done


# -- the chain


def _longest_chain(path: Path) -> list[Link]:
    """Return the longest chain that database, journal and backups have together.

    An event that is damaged in one of them is taken from another. If database and journal contradict each other, the
    longer chain wins; backups only extend it.
    """
    database = {one.seq: one for one in _database_links(path)}
    last = Journal(path.with_name(journal.NAME)).last()
    noted = max([last[0] if last else 0, *map(_last_of_backup, backups(path))])
    own = _unbroken([database])
    if len(own) == len(database) >= noted:
        return own
    written = {one.seq: one for one in _journal_links(path)}
    copies = [{one.seq: one for one in _backup_links(backup)} for backup in backups(path)]
    return max((_unbroken([*pair, *copies]) for pair in ([database, written], [written, database])), key=len)


def _database_links(path: Path) -> Iterator[Link]:
    """Yield the readable events of the database."""
    with contextlib.suppress(LabError, sqlite3.DatabaseError), contextlib.closing(Ledger(path, create=False)) as ledger:
        yield from map(Link._make, ledger.rows("SELECT seq, at, kind, study, run, data, hash FROM events"))


def _journal_links(path: Path) -> Iterator[Link]:
    try:
        for _, one in Journal(path.with_name(journal.NAME)).read():
            if one is not None:
                yield one
    except (OSError, UntrustedError):
        return


def _backup_links(backup: Path) -> Iterator[Link]:
    with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(open_backup(backup)) as db:
        yield from map(Link._make, db.execute("SELECT seq, at, kind, study, run, data, hash FROM events"))


def _last_of_backup(backup: Path) -> int:
    digits = backup.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _unbroken(sources: Sequence[Mapping[int, Link]]) -> list[Link]:
    """Return the chain from event 1, taking each event from the first source in which it continues the chain."""
    chain: list[Link] = []
    before = GENESIS
    while True:
        seq = len(chain) + 1
        candidates = (source[seq] for source in sources if seq in source)
        found = next((one for one in candidates if link(before, *one[:-1]) == one.hash), None)
        if found is None:
            return chain
        chain.append(found)
        before = found.hash


def _open_or_put_aside(path: Path, chain: Sequence[Link], done: Reindexed) -> Ledger:
    """Open the ledger; a database that is damaged or contradicts the longest chain is moved aside first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        ledger = None
        try:
            ledger = Ledger(path, repair=True)
            is_sound = [row[0] for row in ledger.rows("PRAGMA integrity_check(1)")] == ["ok"]
            broken = ledger.first_broken_link(noted=False)
            last = ledger.head()[0]
            is_prefix = not chain or last == 0 or ledger.hash_of(last) == chain[last - 1].hash
            if is_sound and broken is None and is_prefix and not ledger.missing_columns():
                ledger.create_indexes()
                return ledger
        except (LabError, sqlite3.DatabaseError, ValueError):
            pass
        if ledger is not None:
            ledger._db.close()
        done.aside += put_aside(path)
    backup = next((one for one in backups(path) if intact(one) and _is_prefix(one, chain)), None)
    if backup is not None:
        done.backup = str(backup)
        _copy_backup(backup, path)
    return Ledger(path, repair=True)


def _is_prefix(backup: Path, chain: Sequence[Link]) -> bool:
    """Return whether the chain of the backup is a prefix of `chain`."""
    with contextlib.closing(open_backup(backup)) as db:
        seq, digest = db.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    return not chain or (seq <= len(chain) and chain[seq - 1].hash == digest)


def _clear_names(path: Path, done: Reindexed) -> None:
    """Move aside anything that has the name of a ledger file but is not one: a folder, a pipe, a link."""
    for name in (HEAD_FILE, journal.NAME, FOLDER):
        one = path.with_name(name)
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(one).st_mode
            if not (stat.S_ISDIR(mode) if name == FOLDER else stat.S_ISREG(mode)):
                os.rename(one, aside := _aside(one))
                done.aside.append(aside.name)


def _aside(path: Path) -> Path:
    """Return a free name to move a file aside to."""
    stamp = time.strftime(STAMPED, time.gmtime())
    number = 0
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{stamp}{f'-{number}' * (number > 0)}")):
        number += 1
    return aside


def put_aside(path: Path) -> list[str]:
    """Rename the database with its write-ahead log, which holds the last writes; return the new names."""
    aside = _aside(path)
    names = []
    for suffix in ("-wal", "-shm", ""):  # the database last: an interruption before leaves it in place
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
            names.append(f"{aside.name}{suffix}")
    return names[::-1]


def _add_events(ledger: Ledger, chain: Sequence[Link]) -> int:
    """Insert the events that the database lacks; return their number."""
    missing = [one for one in chain if one.seq > ledger.head()[0]]
    for one in missing:
        ledger.execute("INSERT INTO events VALUES (?,?,?,?,?,?,?)", one)
    return len(missing)


def _rewrite_journal(ledger: Ledger, done: Reindexed) -> None:
    """Rewrite the journal unless it matches the chain line by line; the old one is moved aside."""
    assert ledger.journal is not None
    known = ledger.hashes()
    expected, same = 1, True
    with contextlib.suppress(OSError, UntrustedError):
        for _, one in ledger.journal.read():
            same = same and one is not None and one.seq == expected and known.get(one.seq) == one.hash
            same = same and one is not None and link(known.get(expected - 1, GENESIS), *one[:-1]) == one.hash
            expected += 1
    if ledger.journal.exists() and not same:
        path = ledger.journal.path
        aside = _aside(path)
        ledger.journal.close()
        os.replace(path, aside)
        done.aside.append(aside.name)
    ledger.complete_journal()


def _put_foreign_backups_aside(ledger: Ledger) -> list[str]:
    """Rename the backups that are not prefixes of the chain, or cannot be read; return their new names."""
    known = ledger.hashes()
    names = []
    for backup in backups(ledger.path):
        with contextlib.suppress(OSError, sqlite3.DatabaseError):
            if all(known.get(seq) == digest for seq, digest in read_hashes(backup).items()):
                continue
        os.rename(backup, aside := _aside(backup))
        names.append(f"{FOLDER}/{aside.name}")
    return names


# -- the tables


def _rebuild_tables(ledger: Ledger, lab: Path, done: Reindexed) -> None:
    is_new = ledger.head()[0] == 0
    replay = EventReplay()
    for past in events_of(ledger):
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            for _ in replay.apply(past):
                pass
    old = {(row["study"], row["id"]): dict(row) for row in ledger.rows("SELECT * FROM runs")}
    plans = {(row["study"], row["run"]) for row in ledger.rows("SELECT study, run FROM plans")}
    folders = _run_folders(lab)
    rows: dict[Key, Facts] = {}
    highest: dict[str, int] = {}
    for key, facts in replay.runs.items():
        highest[key[0]] = max(highest.get(key[0], 0), facts.get("n") or _number_of(key[1]))
        if key in folders:
            continue
        if facts.get("state") == "planned" and key not in plans:
            done.dropped.setdefault(key[0], []).append(key[1])
        elif facts.get("state") == "planned":
            rows[key] = {**old.get(key, {}), **facts}
        else:
            rows[key] = {**_row_defaults(key), **old.get(key, {}), **facts}
            if facts.get("state") != "ended":
                rows[key] |= {"state": "ended", "status": "lost"}
            done.gone.setdefault(key[0], []).append(key[1])
    for key, run_dir in folders.items():
        rows[key] = _row_of(key, run_dir, old.get(key, {}), replay)
        highest[key[0]] = max(highest.get(key[0], 0), rows[key]["n"])
        done.runs[key[0]] = done.runs.get(key[0], 0) + 1
    _renumber_duplicates(rows, highest, done)
    _replace_rows(ledger, "runs", [_with_key(key, row) for key, row in rows.items()])
    _rebuild_proposals(ledger, replay, done)
    for key, run_dir in folders.items():
        done.recovered += _recover_proposal(ledger, key, run_dir, rows[key])
    for key, row in rows.items():
        done.recovered += _record_run(ledger, key, row, replay, folders.get(key))
        if key in folders:
            _rebuild_config(ledger, folders[key], row["config_hash"])
    rounds = _rebuild_rounds(ledger, replay, rows)
    _rebuild_studies(ledger, lab, replay, rows, done)
    _rebuild_rest(ledger, replay)
    done.pipelines = pipelines.rebuild(ledger, lab, replay.pipelines)
    with contextlib.suppress(KeyError, TypeError, ValueError):  # damaged events: `verify` reports them
        versions.write_table(ledger, versions.without_forgeries(replay.version_events))
    for study, text in replay.options.items():
        ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (f"options:{study}", text))
    for study, number in highest.items():
        ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (LAST_NUMBER + study, str(number)))
    event = catalogue.ReindexedEvent(
        runs=done.runs, recovered=done.recovered, pipelines=done.pipelines, gone=done.gone, dropped=done.dropped,
        rounds=rounds, renumbered=done.renumbered, from_journal=done.events, aside=done.aside,
        events_lost=done.events_lost, new_chain=is_new, judged_again=done.judged_again,
        backup=done.backup and os.path.basename(done.backup),
    )  # fmt: skip
    ledger.record(event, "")


def _run_folders(lab: Path) -> dict[Key, Path]:
    found = {}
    for study_dir in sorted(p for p in (lab / "outputs").glob("*") if folder.can_be_run(p.name) and p.is_dir()):
        for run_dir in folder.run_folders(study_dir):
            found[study_dir.name, run_dir.name] = run_dir
    return found


def _number_of(run: str) -> int:
    """Return the number at the start of a run id; 0 if there is none."""
    digits = run.partition("-")[0]
    return int(digits) if digits.isdecimal() and len(digits) <= MAX_DIGITS else 0


def _row_defaults(key: Key) -> Facts:
    return {"n": _number_of(key[1]), "reason": "", "devices": 1, "created": 0.0}


def _with_key(key: Key, row: Facts) -> Facts:
    return {"study": key[0], "id": key[1], **row}


def _row_of(key: Key, run_dir: Path, old: Facts, replay: EventReplay) -> Facts:
    """Return the row of a run: from the chain, else from its folder, which also knows what happened since."""
    recorded = replay.runs.get(key)
    names = ("run.json", "summary.json", "process.json", "exit.json")
    about, summary, process, exit_ = (folder.read_json(run_dir, name, strict=False) for name in names)
    objective, verdict, devices = summary.get("objective"), summary.get("verdict"), about.get("devices")
    config_hash, proposer = _text(about, "config_hash") or "", _text(about, "proposer") or "?"
    row = {
        "n": _number_of(key[1]) or _integer(about, "n") or 0,
        "round": 0 if about.get("role") == Role.IMPORTED else _integer(about, "round") or 1,
        "proposal": None,
        "proposer": proposer,
        "parent": _text(about, "parent"),
        "base": _text(about, "base"),
        "reason": _text(about, "reason") or "",
        "config_hash": config_hash,
        "state": "ended" if _text(summary, "status") else "running",
        "status": _text(summary, "status"),
        "slot": _text(about, "slot"),
        "pid": _integer(process, "pid"),
        "host": _text(process, "host"),
        "job": _text(process, "job"),
        "created": _number(about, "created") or 0.0,
        "started": _number(exit_, "started") or _number(process, "started"),
        "ended": _number(exit_, "ended"),
        "exit_code": _integer(summary, "exit_code"),
        "signal": _integer(summary, "signal"),
        "objective": _number(objective, "value") if isinstance(objective, dict) else None,
        "verdict": _text(verdict, "verdict") if isinstance(verdict, dict) and not recorded else None,
        "devices": max(1, len(devices) if isinstance(devices, list) else 1),
        "role": _text(about, "role") or (Role.BASE if proposer == Origin.BASE else Role.TRIAL),
        "point": _text(about, "point") or config_hash,
        "seed": _integer(about, "seed"),
        "twin": _text(about, "twin"),
        "warm": _text(about, "warm"),
        "measured": _text(summary, "measured"),
    }
    if recorded is None:
        return row
    newer_in_folder = {"state", "status", "objective", "measured", "exit_code", "signal", "slot", "started", "ended"}
    if recorded.get("state") == "ended":
        newer_in_folder = set()
    known = {column: value for column, value in recorded.items() if column not in newer_in_folder}
    return row | {column: old[column] for column in ("pid", "host", "job") if old.get(column)} | known


def _text(data: Mapping[str, Any], key: str) -> str | None:
    """Return a string of a run's record; None if the value is missing or has another type."""
    value = data.get(key)
    return value if isinstance(value, str) else None


def _integer(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if type(value) is int and abs(value) <= MAX_SEQ else None


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_SEQ else None


def _renumber_duplicates(rows: dict[Key, Facts], highest: dict[str, int], done: Reindexed) -> None:
    """Renumber all but the first of several runs with the same number: an early bug, or folders copied in."""
    taken: set[tuple[str, int]] = set()
    for (study, run), row in sorted(rows.items(), key=lambda one: (one[0][0], one[1]["created"])):
        if (study, row["n"]) in taken or row["n"] < 1:
            highest[study] += 1
            row["n"] = highest[study]
            done.renumbered[f"{study}/{run}"] = str(row["n"])
        taken.add((study, row["n"]))


def _replace_rows(ledger: Ledger, table: str, rows: Sequence[Facts]) -> None:
    ledger.execute(f"DELETE FROM {table}")  # noqa: S608 (fixed names)
    for row in rows:
        ledger.insert(table, row)


def _rebuild_proposals(ledger: Ledger, replay: EventReplay, done: Reindexed) -> None:
    dropped = {(study, run) for study, runs in done.dropped.items() for run in runs}
    old = {row["id"]: dict(row) for row in ledger.rows("SELECT * FROM proposals")}
    rows = []
    for number, facts in replay.proposals.items():
        row: Facts = {"id": number, "created": 0.0, "proposer": "?", "reason": "", "status": "waiting", "edits": []}
        row |= {name: value for name, value in old.get(number, {}).items() if name not in ("edits", "problems")}
        row |= facts
        if (row.get("study"), row.get("run")) in dropped:
            row |= {"status": "waiting", "run": None, "round": None}
        row["edits"] = dump_json(row["edits"])
        row["problems"] = dump_json(row["problems"]) if row.get("problems") else None
        if row.get("study"):
            rows.append(row)
    _replace_rows(ledger, "proposals", rows)


def _recover_proposal(ledger: Ledger, key: Key, run_dir: Path, row: Facts) -> int:
    """Restore the proposal of a run, so that it is not accepted a second time; return how many were restored."""
    study, run = key
    if row["proposal"] is not None:
        return 0
    about = folder.read_json(run_dir, "run.json", strict=False)
    source = _text(about, "source")
    overrides = about.get("edits") or folder.read_json(run_dir, folder.EARLY_EDITS, strict=False).get("edits")
    edits = [edit for edit in overrides if isinstance(edit, str)] if isinstance(overrides, list) else []
    job = {"job": folder.read_json(run_dir, "config.json", strict=False)} if row["proposer"] == Origin.JOB else {}
    if source is not None:
        sql, parameters = "source=?", [source]
    else:  # from a person or an agent; the chain only lost that it became a run
        sql = "source IS NULL AND status='waiting' AND proposer=? AND reason=? AND edits=?"
        parameters = [row["proposer"], row["reason"], dump_json(edits)]
    sql = f"SELECT id, status FROM proposals WHERE study=? AND {sql} ORDER BY id"  # noqa: S608 (fixed texts)
    known = ledger.one(sql, (study, *parameters))
    if known is not None and known["status"] == "waiting":
        accepted = (run, row["round"], known["id"])
        ledger.execute("UPDATE proposals SET status='accepted', run=?, round=? WHERE id=?", accepted)
        ledger.execute("UPDATE runs SET proposal=? WHERE study=? AND id=?", (known["id"], study, run))
        row["proposal"] = known["id"]  # included in the event that recovers the run
    if known is not None or source is None:
        return 0
    proposal = {"proposer": row["proposer"], "parent": row["parent"], "reason": row["reason"], "source": source,
                "hypothesis": _text(about, "hypothesis") or "", "run": run}  # fmt: skip
    columns = {"study": study, "round": row["round"], "created": row["created"], "status": "accepted", **proposal}
    columns["edits"] = dump_json(job.get("job", edits))
    cursor = ledger.insert("proposals", columns)
    row["proposal"] = cursor.lastrowid
    ledger.execute("UPDATE runs SET proposal=? WHERE study=? AND id=?", (cursor.lastrowid, study, run))
    recovered = {"proposal": cursor.lastrowid, "edits": edits, **job, **proposal}
    ledger.record(catalogue.RecoveredEvent(proposed=recovered), study)
    return 1


def _record_run(ledger: Ledger, key: Key, row: Facts, replay: EventReplay, run_dir: Path | None) -> int:
    """Record the run as it is in the table, unless the chain has the same; return how many were recorded."""
    recorded = replay.runs.get(key)
    if recorded is not None and all(row.get(column) == value for column, value in recorded.items()):
        return 0
    ended = row["state"] == "ended"
    files = {}
    if run_dir is not None:
        names = [folder.record_name(run_dir, name) for name in FILES if ended or name not in ("exit.json", "train.log")]
        files = {**replay.files.get(key, {}), **folder.hash_files(run_dir, names)} if recorded is None else {}
    event = catalogue.RecoveredEvent(
        planned={name: row.get(column) for column, name in PLANNED.items()},
        ended={name: row.get(column) for column, name in ENDED.items()} if ended else None,
        state=row["state"],
        verdict=row.get("verdict"),
        files=files,
    )
    ledger.record(event, *key)
    return 1


def _rebuild_config(ledger: Ledger, run_dir: Path, config_hash: str) -> None:
    with contextlib.suppress(LabError):  # the file is missing or was changed: keep the ledger's own config
        config = folder.read_config_of(run_dir, config_hash)
        ledger.execute("DELETE FROM configs WHERE hash=?", (config_hash,))
        keep_config(ledger, config_hash, config)


def _rebuild_rounds(ledger: Ledger, replay: EventReplay, rows: Mapping[Key, Facts]) -> dict[str, list[int]]:
    """Rebuild the rounds; return those that are not in the chain, by study."""
    old = {(row["study"], row["n"]): dict(row) for row in ledger.rows("SELECT * FROM rounds")}
    unknown: dict[str, list[int]] = {}
    rounds: dict[tuple[str, int], Facts] = {
        key: {"created": 0.0, "filled": 1, **old.get(key, {}), **facts} for key, facts in replay.rounds.items()
    }
    for (study, _), row in rows.items():
        key = (study, row["round"])
        if key not in rounds and row.get("role") != Role.IMPORTED:
            rounds[key] = {"filled": 1, **old.get(key, {}), "created": row["created"], "closed": None}
            unknown.setdefault(study, []).append(row["round"])
    open_ = {(study, row["round"]) for (study, _), row in rows.items() if row["state"] != "ended"}
    last = {study: max(n for one, n in rounds if one == study) for study, _ in rounds}
    for study, numbers in unknown.items():
        for n in numbers:
            if (study, n) not in open_ and n != last[study]:
                rounds[study, n]["closed"] = time.time()
    _replace_rows(ledger, "rounds", [{"study": study, "n": n, **facts} for (study, n), facts in rounds.items()])
    return unknown


def _rebuild_studies(
    ledger: Ledger, lab: Path, replay: EventReplay, rows: Mapping[Key, Facts], done: Reindexed
) -> None:
    for study in {*replay.studies, *(study for study, _ in rows)}:
        facts = replay.studies.get(study, {})
        first = min((row["created"] for (one, _), row in rows.items() if one == study), default=time.time())
        ledger.execute(
            "INSERT OR IGNORE INTO studies (name, created) VALUES (?,?)", (study, facts.get("opened", first))
        )
        best = facts.get("best")
        found = [run for one, run in rows if one == study and replay.runs.get((one, run), {}).get("state") != "ended"]
        if best is None or (study, best) not in rows or found:
            with contextlib.suppress(OSError, ValueError):
                # A run whose end is not in the chain may be the best one, which is not in the chain either.
                pointed = folder.pointed(folder.study_folder(lab, study), "BEST")
                best = pointed if "best" not in facts or pointed in found else best
            best = best if (study, best) in rows else None
            if best != facts.get("best"):
                objective = rows[study, best]["objective"] if best else None
                ledger.record(catalogue.BestEvent(objective=objective), study, best)
        columns: Facts = {column: facts[column] for column in ("objective", "goal") if column in facts}
        columns["best"] = best
        for column, value in columns.items():
            ledger.execute(f"UPDATE studies SET {column}=? WHERE name=?", (value, study))  # noqa: S608 (fixed names)
        judge_state = ledger.rows("SELECT judge_state FROM studies WHERE name=?", (study,))[0]["judge_state"]
        if (
            "judge_state" in facts
            and (hash_text(judge_state) if judge_state is not None else None) != facts["judge_state"]
        ):
            # The chain has only the hash of the judge's state. A lost or older state is useless: all remaining runs
            # are judged again from the beginning.
            ledger.execute("UPDATE studies SET judge_state=NULL WHERE name=?", (study,))
            if facts["judge_state"] is not None:
                ledger.execute("UPDATE runs SET verdict=NULL WHERE study=? AND verdict!='void'", (study,))
                ledger.execute("UPDATE studies SET best=NULL WHERE name=?", (study,))
                ledger.record(catalogue.JudgeRestartedEvent(why="its state was lost with the ledger"), study)
                replay.restart_judge(study)
                done.judged_again.append(study)


def _rebuild_rest(ledger: Ledger, replay: EventReplay) -> None:
    verdicts = [
        {"study": study, "run": run, "at": one["at"], "verdict": one["verdict"], "evidence": dump_json(one["evidence"])}
        for (study, run), given in replay.verdicts.items()
        for one in given
    ]
    _replace_rows(ledger, "verdicts", sorted(verdicts, key=lambda row: float(row["at"])))
    old = {row["id"]: dict(row) for row in ledger.rows("SELECT * FROM sessions")}
    first = min(replay.sessions, default=None)
    sessions = [row for number, row in old.items() if first is None or number < first]
    for number, facts in replay.sessions.items():
        ended = facts.get("ended") or facts.get("began", 0.0)
        row = {"host": "?", "pid": 0, "ticks": 0, "seen": ended, **old.get(number, {}), "id": number, **facts}
        sessions.append(row)
    _replace_rows(ledger, "sessions", sessions)
    commands = [{**facts, "data": dump_json(facts["data"]), "done": time.time()} for facts in replay.commands]
    done = [row["done"] for row in ledger.rows("SELECT done FROM commands ORDER BY id")]
    if len(done) == len(commands):  # else it is not known which are done: none is obeyed twice
        for command, at in zip(commands, done, strict=True):
            command["done"] = at if at is None or isinstance(at, float) else command["done"]
    _replace_rows(ledger, "commands", commands)


def check_folders(ledger: Ledger, lab: Path, study: str) -> None:
    """Check that all run folders of a study are in the ledger; otherwise run numbers would be assigned twice.

    Raises:
        DamagedError: There are run folders that are not in the ledger.
    """
    unknown = unknown_folders(ledger, lab, study)
    if unknown:
        why = f"the ledger does not know {len(unknown)} run folder(s) of this study: {name_files(unknown, 3)}"
        raise DamagedError(why, file=ledger.path, hint=REPAIR)


def unknown_folders(ledger: Ledger, lab: Path, study: str) -> list[str]:
    """Return the run folders of a study that are not in the ledger, which has lost events."""
    study_dir = folder.study_folder(lab, study)
    try:
        names = [entry.name for entry in os.scandir(study_dir) if folder.can_be_run(entry.name)]
    except OSError:
        return []
    known = {row[0] for row in ledger.rows("SELECT id FROM runs WHERE study=?", (study,))}
    return sorted(name for name in names if name not in known and folder.is_run(study_dir / name))
