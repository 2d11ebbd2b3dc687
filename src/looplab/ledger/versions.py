"""Versions of code in the ledger: the table `versions`, derived from the events of the study `iterate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.ledger.catalogue import LedgerForgedEvent
from looplab.ledger.ledger import Event, Ledger
from looplab.runs.code import name_files
from looplab.runs.git import COMMIT, GIT_S, PLAIN_DIFF, git, isolated

STUDY = "iterate"
"""The study whose events describe versions."""
ALARM = LedgerForgedEvent.kind
"""Event that records tampering with the events of versions, and the true events (`known`). Its run is the version whose
code ran, which is void."""
VERDICTS = {"failed": "crash", "void": "void"}
"""State of an attempt without a verdict of the judge → its verdict."""

Facts = dict[str, Any]


def is_about_versions(event: Event) -> bool:
    return event.study == STUDY and (event.kind.startswith("version ") or event.kind == ALARM)


def without_forgeries(events: Sequence[Event]) -> list[Event]:
    """Return the events that looplab recorded: those that the last alarm lists as true, and all later ones."""
    alarms = [index for index, event in enumerate(events) if event.kind == ALARM]
    if not alarms:
        return list(events)
    last = alarms[-1]
    known = [Event(seq, at, kind, STUDY, run, data, "") for seq, at, kind, run, data in events[last].data["known"]]
    return [*known, *events[last:]]


def rows_of(events: Iterable[Event]) -> dict[tuple[int, int], Facts]:
    """Return the rows that true events define, by version and attempt."""
    rows: dict[tuple[int, int], Facts] = {}
    last: dict[int, tuple[int, int]] = {}  # version → its last attempt
    for event in events:
        if event.run is None or not event.kind.startswith("version "):
            continue
        version, step, data = int(event.run[1:]), event.kind.removeprefix("version "), event.data
        if step == "begun":
            last[version] = (version, data["attempt"])
            rows[last[version]] = _new_row(version, data["attempt"], "begun", event.at, data)
        elif step == "measured" and version not in last:
            last[version] = (version, 0)
            rows[last[version]] = _new_row(version, 0, "baseline", event.at, {"folder": data.get("folder")})
        row = rows.get(last.get(version, (0, 0)))
        if row is not None:
            _apply(row, step, data, event.at)
        if step == "champion":
            for one in rows.values():
                one["champion"] = int(one is row)
    return rows


def _new_row(version: int, attempt: int, state: str, at: float, data: Facts) -> Facts:
    return {"study": STUDY, "version": version, "attempt": attempt, "state": state, "folder": data.get("folder"),
            "branch": data.get("branch"), "revision": None, "code": None, "metric": None, "value": None,
            "verdict": None, "why": "", "champion": 0, "began": at, "ended": None}  # fmt: skip


def _apply(row: Facts, step: str, data: Facts, at: float) -> None:
    if step in ("prepared", "checked"):
        row["state"] = step
    elif step == "measured" and (data["ask"] is None) == (row["state"] == "baseline"):
        row.update(metric=data.get("metric"), value=data["value"])
    elif step == "judged":
        row.update(state="judged", verdict=str(data["verdict"]), why=data["why"])
    elif step in ("merged", "failed"):
        state = "merged" if step == "merged" else data["how"]
        row.update(state=state, revision=data["commit"], branch=data["branch"], code=data.get("code"), ended=at,
                   verdict=VERDICTS.get(state, row["verdict"]), why=data.get("why", row["why"]))  # fmt: skip


def write_table(ledger: Ledger, events: Iterable[Event]) -> None:
    """Make the table say what these true events say; inside a transaction."""
    ledger.execute("DELETE FROM versions")
    for row in rows_of(events).values():
        ledger.insert("versions", row)


def read_versions(ledger: Ledger) -> list[Facts]:
    """Return all attempts at versions, in order."""
    return [dict(row) for row in ledger.rows("SELECT * FROM versions ORDER BY version, attempt")]


def compare_code(rows: Iterable[Facts], lab: Path) -> Iterator[tuple[str, str, str]]:
    """Yield merged versions whose code is gone or changed since: what, where and why, as in a finding. Versions of
    earlier releases, which did not record their code, are not compared."""
    merged = [
        row for row in rows if row["state"] == "merged" and row["code"] and COMMIT.fullmatch(str(row["revision"]))
    ]
    if not merged:
        return
    try:
        with isolated(lab, timeout=GIT_S) as (_, env):
            for row in merged:
                why = _why_changed(row, lab, env)
                if why is not None:
                    yield "file", f"v{row['version']}", why
    except LabError as error:
        yield "file", "versions", f"their code cannot be compared: {error.message}"


def _why_changed(row: Facts, lab: Path, env: dict[str, str]) -> str | None:
    """Return how the code of a version differs from what was judged; None if it does not."""
    commit, folder = row["revision"], row["folder"]
    if git(lab, "rev-parse", "--verify", "--end-of-options", f"{commit}:./{folder}", env=env, ok=True) != row["code"]:
        return "its code is not in git any more"
    changed = git(lab, "diff", *PLAIN_DIFF, "--name-only", commit, "--", folder, env=env).splitlines()
    return f"its code is not what was judged: {name_files(changed, 3)}" if changed else None
