"""Audit the record: the chain is intact, and tables and files match it.

Every defect is a finding with its location, never an exception: the audit exists for damaged ledgers.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from looplab.config.files import hash_config
from looplab.errors import LabError
from looplab.ledger import journal, pipelines, versions
from looplab.ledger.backup import FOLDER, backups, read_hashes
from looplab.ledger.journal import Journal
from looplab.ledger.ledger import GENESIS, HEAD_FILE, Event, Ledger
from looplab.ledger.ledger import link as hash_link
from looplab.ledger.replay import Discrepancy, EventReplay, Facts, Key, hash_text
from looplab.ledger.schema import JOURNALLED
from looplab.runs import folder
from looplab.untrusted import UntrustedError, read_bounded

CLOCK_S = 10.0
"""Seconds by which the time in a row may differ from that of its event: early versions read the clock twice."""
TIMES = frozenset({"created", "closed", "started", "ended", "began", "at"})
OUTSIDE = (
    "checkpoints and other files of the trainer, except metrics.jsonl and trainer_summary.json; outputs of stages; "
    "files of versions that git ignores; notes.md; reports; "
    "what people wrote in the lab book; the host of runs on this machine; of running runs, pid and start"
)
"""What the record does not cover, for the output of `verify`."""
MAX_LAB_BOOK_BYTES = 1 << 28
DAMAGE = (sqlite3.DatabaseError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading damaged rows may raise."""
_BOOK_LINE = re.compile(r"- \S+ \| run (\S+) \(round [^|]*+\|([^|]*+)\|([^|]*+)\|")
_SHARED_NAME = re.compile(r"[^-]+-([0-9a-f]{16})(?:\.\w+)*")


_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit."""

    events: int
    """Number of events in the chain."""
    head: str
    """Hash of the last event."""
    files: int
    """Number of files that were compared."""
    findings: tuple[Discrepancy, ...]
    notes: tuple[str, ...] = ()
    """What is not wrong, but worth knowing for a reader of the record."""
    outside: str = OUTSIDE


def audit(ledger: Ledger, lab: Path, running: Collection[str] = ()) -> Audit:
    """Walk the chain; then compare the journal, the tables and every recorded file with it.

    Args:
        ledger: The ledger.
        lab: The lab.
        running: Studies with a running engine, whose pointers may lag behind.
    """
    findings: list[Discrepancy] = []
    seq, head, replay = 0, "", EventReplay()
    with _collecting(findings, "ledger", ledger.path.name), ledger.lenient():
        seq, head = ledger.head()
        findings.extend(_check_database(ledger))
        broken = ledger.first_broken_link()
        if broken is not None:
            findings.append(Discrepancy("chain", f"event {broken.seq}", broken.why))
        with _collecting(findings, "chain", "events"):
            for event in ledger.events():
                if broken is not None and event.seq >= broken.seq:
                    break
                with _collecting(findings, "chain", f"event {event.seq}"):
                    findings.extend(replay.apply(event))
        if broken is None:
            findings.extend(_compare_tables(ledger, replay))
        if broken is None or _only_noted_differs(ledger):
            findings.extend(_compare_journal(ledger, replay))
            findings.extend(_compare_backups(ledger, replay))
    count = 0
    unfinished: list[str] = []
    for where, run_dir, files in _recorded(lab, replay):
        staged = folder.staged_import(run_dir)
        if not run_dir.is_dir() and staged.is_dir():
            unfinished.append(f"{where}: its import was interrupted; `looplab import` or `run` completes it")
            run_dir = staged
        if not run_dir.is_dir():
            findings.append(Discrepancy("folder", where, "the run's folder is gone"))
            continue
        for name, digest in files.items():
            count += 1
            try:
                now = folder.hash_file(run_dir / name)
            except OSError as error:
                findings.append(Discrepancy("file", f"{where}/{name}", f"cannot be read: {error.strerror}"))
                continue
            if now is not None and now in replay.kept_before.get((where, name), ()):
                unfinished.append(f"{where}/{name} is an earlier version; the next engine replaces it")
            elif now != digest:
                why = "the file is gone" if now is None else "the file is not what it was when it was recorded"
                findings.append(Discrepancy("file", f"{where}/{name}", why))
        why = "the file appeared after the run had ended"
        findings.extend(Discrepancy("file", f"{where}/{name}", why) for name in folder.appeared(run_dir, files))
    notes = [*replay.notes(), *unfinished]
    for study in replay.studies:
        study_dir = folder.study_folder(lab, study)
        with _collecting(findings, "folder", study):
            findings.extend(_unknown_folders(study, study_dir, replay))
            findings.extend(_shared_files(study, study_dir))
            findings.extend(_lab_book(study, study_dir, ledger, replay))
            if study not in running:
                findings.extend(_pointers(study, study_dir, replay, notes))
    with _collecting(findings, "folder", "pipelines"):
        findings.extend(Discrepancy(*one) for one in pipelines.compare_folders(replay.pipelines, lab))
    with _collecting(findings, "file", "versions"):
        findings.extend(Discrepancy(*one) for one in versions.compare_code(_version_rows(replay).values(), lab))
    return Audit(seq, head, count, tuple(findings), tuple(notes))


def audit_unreadable(path: Path, why: str) -> Audit:
    """Return the audit of a ledger that cannot be opened, with what its journal still proves."""
    findings = [Discrepancy("ledger", path.name, why)]
    notes = []
    last = Journal(path.with_name(journal.NAME)).last()
    if last is not None:
        notes.append(f"the journal ends at event {last[0]}; `looplab reindex` rebuilds the ledger from it")
    return Audit(0, "", 0, tuple(findings), tuple(notes))


@contextmanager
def _collecting(findings: list[Discrepancy], what: str, where: str) -> Iterator[None]:
    """Turn the exceptions of damaged data into findings."""
    try:
        yield
    except DAMAGE as error:
        findings.append(Discrepancy(what, where, f"cannot be read: {type(error).__name__}: {error}"))
    except OSError as error:
        findings.append(Discrepancy(what, where, f"cannot be read: {error.strerror or error}"))
    except LabError as error:
        findings.append(Discrepancy(what, where, str(error)))


def _check_database(ledger: Ledger) -> Iterator[Discrepancy]:
    for row in ledger.rows("PRAGMA integrity_check(20)"):
        if row[0] != "ok":
            yield Discrepancy("ledger", ledger.path.name, str(row[0]))
    missing = ledger.missing_columns()
    if missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        yield Discrepancy("ledger", ledger.path.name, f"columns are missing: {named}")


def _recorded(lab: Path, replay: EventReplay) -> Iterator[tuple[str, Path, Mapping[str, str]]]:
    for (study, run), files in replay.files.items():
        yield f"{study}/{run}", folder.study_folder(lab, study) / run, files
    for study, files in replay.kept.items():
        yield study, folder.study_folder(lab, study), files


# -- tables


def _compare_tables(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    findings: list[Discrepancy] = []
    tables: dict[str, Callable[[], Iterable[Discrepancy]]] = {
        "studies": lambda: _compare_studies(ledger, replay),
        "rounds": lambda: _compare_rounds(ledger, replay),
        "proposals": lambda: _compare_proposals(ledger, replay),
        "runs": lambda: _compare_runs(ledger, replay),
        "plans": lambda: _compare_plans(ledger, replay),
        "configs": lambda: _compare_configs(ledger, replay),
        "verdicts": lambda: _compare_verdicts(ledger, replay),
        "sessions": lambda: _compare_sessions(ledger, replay),
        "commands": lambda: _compare_commands(ledger, replay),
        "meta": lambda: _compare_options(ledger, replay),
        "stages, suites, cases": lambda: _compare_pipelines(ledger, replay),
        "versions": lambda: _compare_versions(ledger, replay),
    }
    for name, compare in tables.items():
        with _collecting(findings, "table", name):
            findings.extend(compare())
    yield from findings


def _differences(where: str, row: Mapping[str, Any] | sqlite3.Row, facts: Facts) -> Iterator[Discrepancy]:
    """Yield the columns in which a row differs from the chain."""
    for column, recorded in facts.items():
        value = row[column]
        if value == recorded:
            continue
        if column in TIMES and value is not None and recorded is not None and abs(value - recorded) < CLOCK_S:
            continue
        yield Discrepancy("table", where, f"{column} is {value!r} in the table, another in the chain")


def _compare_rows(
    rows: Iterable[tuple[_K, Mapping[str, Any] | sqlite3.Row]],
    recorded: Mapping[_K, Facts],
    describe: Callable[[_K], str],
) -> Iterator[Discrepancy]:
    """Compare the rows of a table with those that the chain defines, by their keys."""
    present = set()
    for key, row in rows:
        present.add(key)
        if key in recorded:
            yield from _differences(describe(key), row, recorded[key])
        else:
            yield Discrepancy("table", describe(key), "it is in the table, but not in the chain")
    for key in recorded.keys() - present:
        yield Discrepancy("table", describe(key), "it is in the chain, but not in the table")


def _compare_studies(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    known = {row["name"]: row for row in ledger.rows("SELECT name, objective, goal, best, judge_state FROM studies")}
    for name, facts in replay.studies.items():
        if name not in known:
            yield Discrepancy("table", name, "the study is in the chain, but not in the table")
            continue
        row = dict(known[name])
        if row["judge_state"] is not None:
            row["judge_state"] = hash_text(row["judge_state"])
        compared = {column: value for column, value in facts.items() if column in row}
        yield from _differences(name, row, compared)


def _compare_rounds(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    is_complete = all("rounds" in event.data for event in replay.rebuilds)
    rows = (((row["study"], row["n"]), row) for row in ledger.rows("SELECT * FROM rounds"))
    compared = ((key, row) for key, row in rows if is_complete or key in replay.rounds)
    yield from _compare_rows(compared, replay.rounds, lambda key: f"{key[0]} round {key[1]}")


def _compare_proposals(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    rows = ((row["id"], _decoded_proposal(row)) for row in ledger.rows("SELECT * FROM proposals"))
    yield from _compare_rows(rows, replay.proposals, lambda number: f"proposal {number}")


def _decoded_proposal(row: sqlite3.Row) -> Facts:
    problems = json.loads(row["problems"]) if row["problems"] else None
    return {**dict(row), "edits": json.loads(row["edits"]), "problems": problems}


def _compare_runs(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    rows = (((row["study"], row["id"]), row) for row in ledger.rows("SELECT * FROM runs"))
    yield from _compare_rows(rows, replay.runs, "/".join)


def _compare_plans(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    rows = ledger.rows("SELECT study, run, body FROM plans")
    for row in rows:
        recorded = replay.plans.get((row["study"], row["run"]))
        if recorded is not None and hash_text(row["body"]) != recorded:
            yield Discrepancy("table", f"{row['study']}/{row['run']}", "its plan is not the one in the chain")
    kept = {(row["study"], row["run"]) for row in rows}
    for study, run in replay.plans.keys() - kept:
        if replay.runs.get((study, run), {}).get("state") == "planned":
            yield Discrepancy("table", f"{study}/{run}", "its plan is missing, so it cannot start")


def _compare_configs(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    known = set()
    for row in ledger.rows("SELECT hash, body FROM configs"):
        known.add(row["hash"])
        if hash_config(json.loads(row["body"])) != row["hash"]:
            yield Discrepancy("table", f"config {row['hash']}", "the config in the table has another hash")
    # Early versions recorded neither plans nor configs.
    needed = {replay.runs[key]["config_hash"]: key for key in replay.plans if key in replay.runs}
    for digest in needed.keys() - known:
        why = f"the config of {'/'.join(needed[digest])} is missing; `looplab reindex` restores it from run folders"
        yield Discrepancy("table", f"config {digest}", why)


def _compare_verdicts(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    found: dict[Key, list[Facts]] = {}
    for row in ledger.rows("SELECT study, run, at, verdict, evidence FROM verdicts ORDER BY rowid"):
        stored: Facts = {"at": row["at"], "verdict": row["verdict"], "evidence": json.loads(row["evidence"])}
        found.setdefault((row["study"], row["run"]), []).append(stored)
    for study, run in found.keys() | replay.verdicts.keys():
        rows, recorded = found.get((study, run), []), replay.verdicts.get((study, run), [])
        where = f"verdict on {study}/{run}"
        if len(rows) != len(recorded):
            yield Discrepancy("table", where, f"{len(rows)} in the table, {len(recorded)} in the chain")
        for verdict, facts in zip(rows, recorded, strict=False):
            yield from _differences(where, verdict, facts)


def _compare_sessions(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    first = min(replay.sessions, default=math.inf)  # early versions did not record the number
    rows = ((row["id"], row) for row in ledger.rows("SELECT * FROM sessions") if row["id"] >= first)
    yield from _compare_rows(rows, replay.sessions, lambda number: f"session {number}")


def _compare_commands(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    rows = ledger.rows("SELECT study, at, what, data FROM commands ORDER BY id")
    if len(rows) != len(replay.commands):
        yield Discrepancy("table", "commands", f"{len(rows)} in the table, {len(replay.commands)} in the chain")
    for row, facts in zip(rows, replay.commands, strict=False):
        data = {name: value for name, value in json.loads(row["data"]).items() if value is not None}
        yield from _differences(f"command {facts['what']}", {**dict(row), "data": data}, facts)


def _compare_options(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    for study, text in replay.options.items():
        row = ledger.one("SELECT value FROM meta WHERE key=?", (f"options:{study}",))
        if row is None or row["value"] != text:
            yield Discrepancy("table", study, "the options of its last engine are not those in the chain")


def _compare_pipelines(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    for table, rows in pipelines.read_rows(ledger).items():
        yield from _compare_rows(rows.items(), replay.pipelines.get(table, {}), _label(table))


def _compare_versions(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    rows = (((row["version"], row["attempt"]), row) for row in versions.read_versions(ledger))
    yield from _compare_rows(rows, _version_rows(replay), _label("versions"))


def _label(table: str) -> Callable[[tuple[Any, ...]], str]:
    return lambda key: f"{table} {' '.join(map(str, key))}"


def _version_rows(replay: EventReplay) -> dict[tuple[int, int], Facts]:
    return versions.rows_of(versions.without_forgeries(replay.version_events))


# -- journal and head


def _compare_journal(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    if ledger.journal is None:
        return
    head, noted = ledger.head()[0], ledger.noted_head()  # before the journal is read: an engine may be writing
    if head and noted is None:
        if os.path.lexists(ledger.path.with_name(HEAD_FILE)):
            yield Discrepancy(
                "file", HEAD_FILE, "it does not say where the chain ended; `looplab reindex` writes it again"
            )
        else:
            replay.other_notes.append(f"{HEAD_FILE} is missing; it notes where the chain ends, and is written again")
    if not ledger.journal.exists():
        if ledger.one("SELECT 1 FROM meta WHERE key=?", (JOURNALLED,)) is not None:
            yield Discrepancy("file", journal.NAME, "the journal is gone; the next write creates it again")
        return
    hashes = ledger.hashes()
    expected, is_damaged = 1, False
    try:
        for number, link in ledger.journal.read():
            if link is None:
                is_damaged = True
                yield Discrepancy("file", journal.NAME, f"line {number} is damaged; `looplab reindex` writes it again")
            elif link.seq > head:
                # The engine may have added events since the chain was read.
                if ledger.head()[0] < link.seq:
                    why = f"event {link.seq} is in the journal, but the ledger ends at {head}: events were lost"
                    yield Discrepancy("chain", f"event {head + 1}", why)
                return
            elif hashes.get(link.seq) != link.hash:
                yield Discrepancy("chain", f"event {link.seq}", "it is another one in the journal")
                return
            elif hash_link(hashes.get(link.seq - 1, GENESIS), *link[:-1]) != link.hash:
                is_damaged = True
                yield Discrepancy("file", journal.NAME, f"line {number} is damaged; `looplab reindex` writes it again")
            else:
                if link.seq > expected and not is_damaged:
                    why = f"line {number} is event {link.seq}, but event {expected} comes next"
                    yield Discrepancy("file", journal.NAME, f"{why}; `looplab reindex` writes it again")
                is_damaged = is_damaged and link.seq < expected
                expected = max(expected, link.seq + 1)
    except (OSError, UntrustedError) as error:
        yield Discrepancy("file", journal.NAME, f"cannot be read: {error}; `looplab reindex` writes it again")
        return
    if noted is not None and expected <= noted[0]:  # it is written before the head is noted
        why = f"events {expected} to {noted[0]} were removed from it; the next write completes it"
        yield Discrepancy("file", journal.NAME, why)
    elif expected <= head:
        replay.other_notes.append(f"the journal ends at event {expected - 1}; the next write completes it")


def _only_noted_differs(ledger: Ledger) -> bool:
    """Return whether the chain is intact and long enough, but has another event at the noted head: then it was
    rewritten, and its copies show where."""
    noted = ledger.noted_head()
    return noted is not None and noted[0] <= ledger.head()[0] and ledger.first_broken_link(noted=False) is None


def _compare_backups(ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    """Compare each backup with the beginning of the chain."""
    if any(one.get("ended") for one in replay.sessions.values()) and not backups(ledger.path):
        replay.other_notes.append(f"{FOLDER} has no backup of the ledger; the next engine makes one")
    for path in backups(ledger.path):
        name = f"{FOLDER}/{path.name}"
        try:
            copied = read_hashes(path)
        except (OSError, *DAMAGE) as error:
            if path.exists():  # else an engine has replaced it with a newer one
                replay.other_notes.append(f"{name} cannot be read: {error}")
            continue
        own = ledger.hashes()
        other = next((seq for seq, digest in copied.items() if own.get(seq) != digest), None)
        if other is not None:
            head = max(own, default=0)
            why = f"it is another one in {name}" if other <= head else f"it is in {name}, but the ledger ends at {head}"
            yield Discrepancy("chain", f"event {other}", why)
            return


# -- files of a study


def _unknown_folders(study: str, study_dir: Path, replay: EventReplay) -> Iterator[Discrepancy]:
    for path in folder.run_folders(study_dir):
        if (study, path.name) not in replay.runs:
            yield Discrepancy("folder", f"{study}/{path.name}", "a run folder that the chain does not know")


def _shared_files(study: str, study_dir: Path) -> Iterator[Discrepancy]:
    try:
        names = sorted(os.listdir(study_dir / folder.SHARED))
    except OSError:
        return
    for name in names:
        match = _SHARED_NAME.fullmatch(name)
        if match is None:
            continue
        digest = folder.hash_file(study_dir / folder.SHARED / name)
        if digest is not None and not digest.startswith(match[1]):
            yield Discrepancy(
                "file", f"{study}/{folder.SHARED}/{name}", "its content does not have the hash in its name"
            )


def _pointers(study: str, study_dir: Path, replay: EventReplay, notes: list[str]) -> Iterator[Discrepancy]:
    for name in ("BEST", "LATEST"):
        where = f"{study}/{name}"
        try:
            pointed = folder.pointed(study_dir, name)
        except (OSError, ValueError) as error:
            yield Discrepancy("file", where, f"cannot be read: {error}")
            continue
        if pointed is None:
            continue
        best = replay.studies[study].get("best")
        if (study, pointed) not in replay.runs:
            yield Discrepancy("file", where, f"it names {pointed}, which the chain does not know")
        elif name == "BEST" and best is not None and pointed != best:
            if any(pointed == run for run in replay.studies[study].get("bests", ())):
                notes.append(f"{where} names an earlier best run; the next engine corrects it")
            else:
                yield Discrepancy("file", where, f"it names {pointed}; the best run is {best}")


def _lab_book(study: str, study_dir: Path, ledger: Ledger, replay: EventReplay) -> Iterator[Discrepancy]:
    """Yield lines of the lab book that contradict the chain. Lines that name no run are people's own."""
    try:
        text = read_bounded(study_dir / "labbook.md", MAX_LAB_BOOK_BYTES).decode(errors="replace")
    except (OSError, UntrustedError):
        return
    lines = {}
    for line in text.splitlines():
        match = _BOOK_LINE.match(line)
        if match is not None and (study, match[1]) in replay.runs:
            lines[line] = match
    if not lines:
        return
    objectives: dict[str, set[str]] = {}
    for row in ledger.rows(
        "SELECT run, data FROM events WHERE study=? AND kind IN ('ended', 'remeasured', 'recovered')", (study,)
    ):
        data = json.loads(row["data"])
        value = (data.get("ended") or {}).get("objective") if "planned" in data else data.get("objective")
        if "planned" in data and value is None:
            continue  # restored from a folder that no longer states it
        objectives.setdefault(row["run"], set()).add("" if value is None else f"{value:.6g}")
    for match in lines.values():
        run, observed, outcome = match[1], match[2].strip(), match[3].strip()
        facts = replay.runs[study, run]
        shown = observed.rpartition(" = ")[2] if " = " in observed else ""
        if shown not in objectives.get(run, {shown}):
            yield Discrepancy(
                "file", f"{study}/labbook.md", f"the line of run {run} says {observed!r}, the chain does not"
            )
        elif facts.get("status") is not None and not outcome.startswith(facts["status"]):
            yield Discrepancy(
                "file", f"{study}/labbook.md", f"the line of run {run} says {outcome!r}, the chain does not"
            )


def events_of(ledger: Ledger) -> Iterator[Event]:
    """Yield events until the first one that cannot be read."""
    try:
        yield from ledger.events()
    except (*DAMAGE, LabError):
        return
