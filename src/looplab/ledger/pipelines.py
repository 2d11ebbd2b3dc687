"""Pipelines in the ledger: stages, suites and cases.

The folder is the truth about a stage (`stages/NAME.json`, `stages/NAME.begun.json`); an event is written after the
file. Everything in an event comes from such a file, so that a call that finds one which is not in the ledger yet,
because the call before was killed or an older version made it, records the same.

The payload of an event has the columns of its row, and a row depends on one event only: the last one with its key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.ledger import catalogue
from looplab.ledger.ledger import Ledger
from looplab.runs.redact import redact_data
from looplab.untrusted import UntrustedError, dump_json, load_json, load_own_json, read_bounded

KEYS = {"stages": ("folder", "stage", "began"), "suites": ("folder",), "cases": ("folder", "tag", "began")}
"""Table → the columns that identify a row."""
COLUMNS = {
    "stages": ("study", "folder", "stage", "attempt", "state", "why", "fingerprint", "config", "outputs", "slot",
               "began", "ended", "seconds"),
    "suites": ("study", "id", "folder", "fingerprint", "state", "jobs", "began", "ended"),
    "cases": ("study", "folder", "tag", "exit_code", "config", "files", "began", "ended"),
}  # fmt: skip
KINDS = {"stage began": "stages", "stage ended": "stages", "suite began": "suites", "suite ended": "suites",
         "case ended": "cases"}  # fmt: skip
"""Kind of event → its table."""
MAX_MANIFEST_BYTES = 1 << 26
MAX_DEPTH = 8
"""Depth below the lab at which folders of pipelines are searched."""

Facts = dict[str, Any]
Rows = dict[str, dict[tuple[Any, ...], Facts]]
"""Table → key → row."""


def row_of(kind: str, study: str, data: Mapping[str, Any]) -> tuple[str, Facts]:
    """Return the table of an event and the row that it defines."""
    table = KINDS[kind]
    row = {column: data.get(column) for column in COLUMNS[table]} | {"study": study}
    for column in ("jobs", "files"):
        if column in row:
            row[column] = dump_json(data[column], sort_keys=True)
    return table, row


def apply(rows: Rows, kind: str, study: str, data: Mapping[str, Any]) -> None:
    """Apply an event to the rows."""
    table, row = row_of(kind, study, data)
    rows.setdefault(table, {})[key_of(table, row)] = row


def key_of(table: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[column] for column in KEYS[table])


def stage_event(folder: str, record: Mapping[str, Any]) -> catalogue.EventData:
    """Return the event for a record of a stage: its manifest, or the record of an attempt."""
    state = record.get("state", "complete")
    common: Facts = {
        "folder": folder,
        "stage": record["stage"],
        "attempt": record["attempt"],
        "state": record.get("outcome", "failed") if state == "ended" else state,
        "why": record.get("why", ""),
        "fingerprint": record["fingerprint"],
        "config": record.get("config"),
        "slot": record.get("slot"),
        "began": record["began"],
    }
    if state == "running":
        return catalogue.StageBeganEvent(**common)
    return catalogue.StageEndedEvent(
        **common, outputs=record.get("outputs_digest"), ended=record.get("ended"), seconds=record.get("seconds")
    )


class PipelineLedger:
    """Records the pipelines of a study. Every method is one short transaction; what is known is not recorded again."""

    def __init__(self, ledger: Ledger, lab: Path, study: str) -> None:
        self._ledger = ledger
        self._lab = os.path.realpath(lab)
        self._study = study

    def stage(self, folder: Path, record: Mapping[str, Any]) -> bool:
        """Record a stage as its manifest, or the record of its attempt, says; return whether that was new."""
        return self._record(stage_event(self._relative(folder), record))

    def suite(
        self, folder: Path, suite: str, fingerprint: str, jobs: Mapping[str, str], *, began: float,
        ended: float | None = None,
    ) -> bool:  # fmt: skip
        """Record that a call of a suite began (without `ended`) or ended, with the state of each dataset."""
        place = self._relative(folder)
        if ended is None:
            return self._record(
                catalogue.SuiteBeganEvent(
                    id=suite, folder=place, fingerprint=fingerprint, state="running", jobs=jobs, began=began
                )
            )
        state = next((one for one in ("failed", "stopped") if one in jobs.values()), "complete")
        return self._record(
            catalogue.SuiteEndedEvent(
                id=suite, folder=place, fingerprint=fingerprint, state=state, jobs=jobs, began=began, ended=ended
            )
        )

    def case(
        self, folder: Path, tag: str, config: str, *, exit_code: int, files: Sequence[Path], began: float, ended: float
    ) -> bool:
        """Record a case."""
        names = [os.path.relpath(path, folder) for path in files]
        place = self._relative(folder)
        return self._record(
            catalogue.CaseEndedEvent(
                folder=place, tag=tag, exit_code=exit_code, config=config, files=names, began=began,
                ended=ended,
            )
        )  # fmt: skip

    def _relative(self, folder: Path) -> str:
        return os.path.relpath(os.path.realpath(folder), self._lab)

    def _record(self, event: catalogue.EventData) -> bool:
        table, row = row_of(event.kind, self._study, redact_data(event.to_dict()))
        if self._is_known(event.kind, table, row):
            return False
        with self._ledger.write():
            if self._is_known(event.kind, table, row):  # another process was faster
                return False
            seq = self._ledger.record(event, self._study)
            (stored,) = self._ledger.rows("SELECT data FROM events WHERE seq=?", (seq,))
            self._ledger.insert(*row_of(event.kind, self._study, load_own_json(stored["data"])), replace=True)
        return True

    def _is_known(self, kind: str, table: str, row: Facts) -> bool:
        where = " AND ".join(f"{column}=?" for column in KEYS[table])
        found = self._ledger.one(f"SELECT * FROM {table} WHERE {where}", key_of(table, row))  # noqa: S608 (fixed names)
        return found is not None and (kind == "stage began" or dict(found) == row)


# -- reading


def read_rows(ledger: Ledger) -> Rows:
    """Return all rows, in the order in which they began."""
    return {
        table: {
            key_of(table, row): row
            for row in map(dict, ledger.rows(f"SELECT * FROM {table} ORDER BY began"))  # noqa: S608 (fixed names)
        }
        for table in KEYS
    }


def latest_stages(rows: Rows) -> dict[str, dict[str, Facts]]:
    """Return the last attempt of each stage, by run folder and stage; the folder used last comes last."""
    found: dict[str, dict[str, Facts]] = {}
    for row in sorted(rows.get("stages", {}).values(), key=lambda row: row["began"]):
        stages = found.pop(row["folder"], {})
        found[row["folder"]] = {**stages, row["stage"]: row}
    return found


# -- verify and reindex


def compare_folders(rows: Rows, lab: Path) -> Iterator[tuple[str, str, str]]:
    """Yield where folders differ from the record of their complete stages: what, where and why, as in a finding."""
    for folder, stages in latest_stages(rows).items():
        if not (lab / folder).is_dir():
            yield "folder", folder, "the run folder of the pipeline is gone"
            continue
        for stage, row in stages.items():
            where = f"{folder}/stages/{stage}.json"
            begun = _read(lab / folder / "stages" / f"{stage}.begun.json")
            if row["state"] != "complete" or (begun is not None and begun.get("attempt", 0) > row["attempt"]):
                continue  # an attempt that is not recorded yet has removed the manifest
            manifest = _read(lab / where)
            if manifest is None:
                yield "file", where, "the stage was complete, but its manifest is gone or cannot be read"
            elif manifest.get("fingerprint") != row["fingerprint"]:
                yield "file", where, "it has another fingerprint than the one recorded"
            elif row["outputs"] is not None and manifest.get("outputs_digest") != row["outputs"]:
                yield "file", where, "it lists other outputs than those recorded"


def rebuild(ledger: Ledger, lab: Path, rows: Rows) -> int:
    """Replace the tables by these rows, and record what only folders have; return how many entries that were."""
    for table in KEYS:
        ledger.execute(f"DELETE FROM {table}")  # noqa: S608 (fixed names)
        for row in rows.get(table, {}).values():
            ledger.insert(table, row, replace=True)
    recovered = 0
    for folder, name in _pipeline_folders(lab):
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):  # not a record of ours
            about = _read(folder / name) or {}
            record = PipelineLedger(ledger, lab, str(about.get("study", "")))
            if name == "pipeline.json":
                recovered += sum(record.stage(folder, manifest) for manifest in _manifests(folder))
            elif about.get("study"):
                recovered += _recover_suite(record, folder, about)
    return recovered


def _manifests(folder: Path) -> Iterator[Facts]:
    for path in sorted((folder / "stages").glob("*.json")):
        begun = path.with_name(f"{path.stem}.begun.json")
        if path.name != "call.json" and not path.name.endswith(".begun.json") and not begun.exists():
            manifest = _read(path)
            if manifest is not None and manifest.get("stage") == path.stem:
                yield manifest


def _recover_suite(record: PipelineLedger, folder: Path, about: Mapping[str, Any]) -> bool:
    summary = _read(folder / "summary.json")
    if summary is None or "ended" not in summary:
        return False
    jobs = {job["name"]: job["status"] for job in summary["jobs"]}
    return record.suite(folder, about["id"], about["key"], jobs, began=summary["began"], ended=summary["ended"])


def _pipeline_folders(lab: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of pipelines and suites below the lab, with the name of the file that describes each."""
    for place, folders, files in os.walk(lab):
        depth = len(Path(place).relative_to(lab).parts)
        name = next((name for name in ("pipeline.json", "suite.json") if name in files), None)
        if name is not None:
            yield Path(place), name
        is_leaf = name is not None or depth >= MAX_DEPTH
        folders[:] = [] if is_leaf else sorted(one for one in folders if not one.startswith("."))


def _read(path: Path) -> Facts | None:
    try:
        data = load_json(read_bounded(path, MAX_MANIFEST_BYTES))
    except (OSError, UntrustedError, ValueError):
        return None
    return data if isinstance(data, dict) else None
