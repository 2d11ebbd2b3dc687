"""The lab as the page sees it: rows of runs in memory, brought up to date by the ledger's event numbers.

Everything here runs in one thread, which owns the connection to the ledger. A request costs one look at SQLite's
`data_version` unless something was written since. Knobs and metrics of ended runs never change: they are read once, in
short portions between requests, newest runs first, so the page is usable before ten thousand folders are read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from looplab.config import paths
from looplab.config.lab import LAB_FILE, LabConfig, StudyConfig, load_lab
from looplab.errors import LabError
from looplab.guard.knobs import Knob, KnobTable
from looplab.ledger import ledger as ledgers
from looplab.ledger.feed import ChainCheck, StudyFeed
from looplab.ledger.ledger import Ledger, LedgerCopy, has_ledger
from looplab.ledger.roles import COPIES, DECIDED, Origin, Role
from looplab.ledger.view import JOBS_SUFFIX, RunRow, StudyView
from looplab.measure.run_metrics import RunMetrics
from looplab.measure.summary import from_dict
from looplab.report import wording
from looplab.report.html import short
from looplab.report.judged import Judged, judged_now
from looplab.runs import folder
from looplab.ui.files import HeldOutFilter
from looplab.untrusted import clean_line, dump_json, load_json, load_own_json

REFRESH_S = 0.2
"""The ledger is looked at no more often than this, however many pages are open."""
LIVE_S = 1.0
"""Metrics of running runs are read no more often than this."""
PORTION_S = 0.04
"""Seconds of one portion of reading configs and summaries, between which requests are answered."""
PORTION = 500
"""Runs that are read from the ledger at once."""
FIRST_S = 0.25
"""Seconds that the first answer waits for configs and summaries."""
CACHE_KB = 500
"""Memory of SQLite for pages of the ledger; its default is four times as much."""
MAX_COLUMNS = 60
"""Knobs and other config keys, and metrics, each."""
MAX_REASON = 300
MAX_NAME = 200
MAX_RUNNING = 64
"""Running runs whose metrics are followed."""
CORE = (
    "id", "n", "round", "by", "parent", "base", "role", "state", "status", "slot", "created", "started", "ended",
    "objective", "verdict", "seed", "lead", "copy", "reason", "how",
)  # fmt: skip
"""Columns of a row."""
_LEAD, _COPY = CORE.index("lead"), CORE.index("copy")

FindStudy = Callable[[LabConfig, str], StudyConfig]
EnginePid = Callable[[Path, str], int | None]


class Revisions:
    """Values by key, in the order in which they last changed.

    They are kept as JSON, which is what pages get: half of the memory of tuples, and nothing to convert in an answer.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, bytes]] = {}

    def put(self, key: str, value: Sequence[Any], revision: int) -> bool:
        """Set a value; return whether it has changed."""
        text = dump_json(value).encode()
        before = self._values.get(key)
        if before is not None and before[1] == text:
            return False
        self._values.pop(key, None)
        self._values[key] = (revision, text)
        return True

    def since(self, revision: int) -> bytes:
        """Return the values that changed after a revision as a JSON array, oldest change first."""
        found = []
        for changed, text in reversed(self._values.values()):
            if changed <= revision:
                break
            found.append(text)
        return b"[" + b",".join(reversed(found)) + b"]"

    def get(self, key: str) -> list[Any] | None:
        """Return a value; None if there is none."""
        found = self._values.get(key)
        return None if found is None else _decode(found[1])

    def __iter__(self) -> Iterator[list[Any]]:
        return (_decode(text) for _, text in self._values.values())

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)


def _decode(text: bytes) -> list[Any]:
    found: list[Any] = load_own_json(text.decode())
    return found


class StudyModel:
    """One study: its rows, and the values of knobs and metrics in them."""

    def __init__(self, lab: Path, config: StudyConfig) -> None:
        self.config = config
        self.outputs = folder.study_folder(lab, config.name)
        self.hidden = HeldOutFilter(config)
        self.rows = Revisions()
        self.cells = Revisions()
        self.knobs: list[str] = []
        """Columns of config keys; only ever appended to."""
        self.metrics: list[str] = []
        """Columns of metrics; only ever appended to."""
        self.seen = 0
        """Number of the last event that is in the rows."""
        self.revision = 0
        self.polled = 0.0
        self._table = KnobTable([Knob.make(path, spec) for path, spec in config.knobs.items()])
        self._knob_places: dict[str, int] = {}
        self._metric_places: dict[str, int] = {}
        self._base: dict[str, Any] | None = None
        self._owner: dict[str, str] = {}  # the first run by config and start
        self._copies: dict[str, list[str]] = {}  # further runs of a config, by its first run
        self._pending: dict[str, None] = {}  # runs whose config or summary is still to be read, by id
        self._live: dict[str, RunMetrics] = {}
        if config.objective is not None:
            self._metric_place(config.objective.metric)

    @property
    def is_complete(self) -> bool:
        """Whether all configs and summaries were read."""
        return not self._pending

    def refresh(self, ledger: Ledger, *, seq: int) -> None:
        """Bring the rows up to date with the ledger."""
        changed = StudyFeed(ledger, self.config.name).runs_since(self.seen) if self.seen else None
        self.revision += 1
        for run in self._all(ledger) if changed is None else sorted(changed, key=lambda run: run.n):
            is_new = run.id not in self.rows
            if self.rows.put(run.id, self._row(run), self.revision) and (
                is_new or run.state == "ended" or not self._knobs(run.id)
            ):
                self._pending[run.id] = None
            if run.state != "running":
                self._live.pop(run.id, None)
            elif run.id not in self._live and len(self._live) < MAX_RUNNING:
                self._live[run.id] = RunMetrics(self.config, self.outputs / run.id)
        self.seen = seq

    def _all(self, ledger: Ledger) -> Iterator[RunRow]:
        """Yield all runs, in portions: ten thousand rows at once would take as much memory as the whole model."""
        view, last = StudyView(ledger, self.config.name), 0
        while found := view.runs_after(last, PORTION):
            yield from found
            last = found[-1].n

    def fill(self, ledger: Ledger, until: float) -> bool:
        """Read knobs and metrics, newest runs first, until a time (`time.monotonic`); return whether any are left."""
        feed, view = StudyFeed(ledger, self.config.name), StudyView(ledger, self.config.name)
        self.revision += 1
        while self._pending:
            id_, _ = self._pending.popitem()
            run = view.find_run(id_)
            if run is not None:
                knobs, last = self._read_values(feed, ledger, run)
                self._put_cells(id_, knobs, last)
            if time.monotonic() > until:
                break
        return bool(self._pending)

    def poll_live(self) -> None:
        """Read the new metrics of running runs."""
        now = time.monotonic()
        if not self._live or now - self.polled < LIVE_S:
            return
        self.polled = now
        self.revision += 1
        for id_, metrics in list(self._live.items()):
            with contextlib.suppress(LabError, OSError):
                metrics.poll(until=now + PORTION_S)
                last = {name: one.last for name, one in metrics.summariser.result().items()}
                self._put_cells(id_, self._knobs(id_), last)

    def live(self, run: str) -> RunMetrics | None:
        """Return the metrics of a running run; None if it is not followed."""
        return self._live.get(run)

    def lead_of(self, run: str) -> str:
        """Return the first run of the config that a run has."""
        row = self.rows.get(run)
        return run if row is None else str(row[_LEAD])

    def members(self, lead: str) -> list[str]:
        """Return the runs of a config, by its first run, copies last."""
        own = [row for id_ in (lead, *self._copies.get(lead, ())) if (row := self.rows.get(id_)) is not None]
        return [row[0] for row in sorted(own, key=lambda row: (row[_COPY], row[1]))]

    def _row(self, run: RunRow) -> tuple[Any, ...]:
        lead = self._find_lead(run)
        how = None
        if run.state == "ended" and run.status != "ok" and run.role != Role.IMPORTED:
            how = f"signal {run.signal}" if run.signal is not None else f"exit code {run.exit_code}"
        return (
            run.id, run.n, run.round, clean_line(run.proposer, 60), run.parent, run.base, run.role, run.state,
            Role.IMPORTED if run.role == Role.IMPORTED else run.status, run.slot,
            *(None if at is None else round(at, 2) for at in (run.created, run.started, run.ended)),
            short(run.objective, 9), run.verdict, run.seed, lead,
            int(run.role in COPIES and lead != run.id), wording.cut(wording.plain(run.reason), MAX_REASON), how,
        )  # fmt: skip

    def _find_lead(self, run: RunRow) -> str:
        """Return the first run of the same config from the same start, by the rules of `report.judged.points`."""
        known = self.rows.get(run.id)
        if known is not None:
            return str(known[_LEAD])
        start = run.point if run.warm is None else f"{run.point} {run.warm}"
        if run.role == Role.IMPORTED:
            lead = run.id
        elif run.role in DECIDED:
            lead = run.id
            if run.role == Role.CONTINUATION:  # the training as far as it got
                self._owner[start] = lead
            else:
                self._owner.setdefault(start, lead)
        elif run.role in COPIES and run.twin is not None and run.twin in self.rows:
            lead = self.lead_of(run.twin)
        else:
            lead = self._owner.setdefault(start, run.id)
        if lead != run.id:
            self._copies.setdefault(lead, []).append(run.id)
        return lead

    def _read_values(
        self, feed: StudyFeed, ledger: Ledger, run: RunRow
    ) -> tuple[Sequence[Any], dict[str, float | None]]:
        """Return the knobs of a run, and the last value of each metric if it has ended."""
        knobs = self._knobs(run.id)
        if not knobs:
            config = self._config(feed, ledger, run)
            if config is not None:
                knobs = self._knob_values(config, is_base=run.proposer == Origin.BASE)
        last: dict[str, float | None] = {}
        if run.state == "ended":
            summary = folder.read_json(self.outputs / run.id, "summary.json", strict=False)
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                last = {name: one.last for name, one in from_dict(summary.get("metrics", {})).items()}
        return knobs, last

    def _knobs(self, run: str) -> Sequence[Any]:
        """Return the knobs of a run; empty: they were not read yet."""
        cells = self.cells.get(run)
        return () if cells is None else cells[1]

    def _config(self, feed: StudyFeed, ledger: Ledger, run: RunRow) -> dict[str, Any] | None:
        try:
            text = feed.configs([run.config_hash]).get(run.config_hash)
            config = load_json(text) if text is not None else None
            if config is None and run.state == "planned":
                plan = StudyView(ledger, self.config.name).plan_of(run.id)
                config = plan.config if plan is not None else None
            if config is None:
                config = folder.read_json(self.outputs / run.id, "config.json", strict=False) or None
        except (LabError, ValueError):
            return None
        return config if isinstance(config, dict) else None

    def _knob_values(self, config: dict[str, Any], *, is_base: bool) -> list[Any]:
        values: list[Any] = []

        def put(key: str, value: Any) -> None:
            place = self._knob_places.get(key)
            if place is None:
                if len(self.knobs) >= MAX_COLUMNS:
                    return
                place = self._knob_places[key] = len(self.knobs)
                self.knobs.append(clean_line(key, MAX_NAME))
            values.extend([None] * (place + 1 - len(values)))
            shown = wording.value(key, value)
            values[place] = wording.cut(shown, 80) if isinstance(shown, str) else shown

        owned = set()
        for key, _, _, value in self._table.present(config):
            owned.add(key)
            put(key, value)
        if self._base is None and is_base:
            self._base = config
        if self._base is not None:
            for key, sides in paths.diff(self._base, config).items():
                if key not in owned and self._table.owner(key) is None and "new" in sides:
                    put(key, sides["new"])
        return values

    def _metric_place(self, name: str) -> int | None:
        place = self._metric_places.get(name)
        if place is None and len(self.metrics) < MAX_COLUMNS:
            place = self._metric_places[name] = len(self.metrics)
            self.metrics.append(clean_line(name, MAX_NAME))
        return place

    def _put_cells(self, run: str, knobs: Sequence[Any], last: dict[str, float | None]) -> None:
        values: list[float | None] = []
        for name, value in last.items():
            place = None if self.hidden.names(name) else self._metric_place(name)
            if place is not None:
                values.extend([None] * (place + 1 - len(values)))
                values[place] = short(value)
        self.cells.put(run, (run, knobs, values), self.revision)


def _stamp_copied(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the state of a ledger's files. A copy in memory is made of a ledger that is being created, or is of an
    older version until an engine upgrades it."""
    stamps = []
    for file in (path, path.with_name(f"{path.name}-wal")):
        with contextlib.suppress(OSError):
            status = os.stat(file)
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


class LabModel:
    """The lab: its file, its ledger, and a model of each study that was asked for.

    Args:
        lab: The lab.
        find_study: Returns a study of the lab by its name.
        engine_pid: Returns the pid of a study's engine; None: none runs.
    """

    def __init__(self, lab: LabConfig, *, find_study: FindStudy, engine_pid: EnginePid) -> None:
        self.lab = lab
        self.epoch = secrets.token_hex(6)
        """Changes when revisions start over, so that pages read everything again."""
        self.problem: str | None = None
        """Why the ledger or the lab file cannot be read; None: it can."""
        self.seq = 0
        self.chain = ChainCheck()
        """How much of the ledger's chain was checked so far."""
        self._find_study = find_study
        self._engine_pid = engine_pid
        self._ledger: Ledger | None = None
        self._inode: tuple[int, int] | None = None
        self._copied: tuple[tuple[int, int], ...] | None = None  # the state of the file, if the ledger is a copy of it
        self._version = -1
        self._looked = 0.0
        self._lab_stamp = self._stamp_lab()
        self._studies: dict[str, StudyModel] = {}
        self._judged: dict[str, tuple[int, Judged | None]] = {}

    @property
    def ledger(self) -> Ledger | None:
        """The last opened ledger; None: there is none yet."""
        return self._ledger

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def studies(self) -> list[str]:
        """Return the names of the studies: those of the lab file, and submitted commands."""
        names = list(self.lab.studies)
        known = self._ledger.studies() if self._ledger is not None else set()
        return names + [name + JOBS_SUFFIX for name in names if name + JOBS_SUFFIX in known]

    def study(self, name: str) -> StudyModel:
        """Return the model of a study.

        Raises:
            LabError: There is no such study.
        """
        if name not in self._studies:
            if name not in self.studies():
                raise LabError(f"there is no study {name!r}")
            self._studies[name] = StudyModel(self.lab.folder, self._find_study(self.lab, name))
            self._version = -1
        return self._studies[name]

    def engine(self, study: str) -> int | None:
        """Return the pid of a study's engine; None: none runs."""
        return self._engine_pid(self.lab.folder, study)

    def refresh(self, *names: str) -> None:
        """Bring these studies up to date, unless that was just done."""
        models = [self.study(name) for name in names]
        if any(model.seen == 0 for model in models):
            self._version = -1
        now = time.monotonic()
        if now - self._looked < REFRESH_S and self._version != -1:
            return
        self._looked = now
        self._reload_lab()
        try:
            self._open()
            ledger = self._ledger
            if ledger is None:
                return
            version = ledger.version()
            if version != self._version:
                seq, _ = ledger.head()
                if seq < self.seq:
                    self._start_over()
                self.seq = seq
                for name in self._studies:
                    self.study(name).refresh(ledger, seq=seq)
                self._version = version
            self.problem = None
        except (LabError, sqlite3.Error, OSError) as error:
            self.problem = str(error)
            self._drop_ledger()
        for model in self._studies.values():
            model.poll_live()

    def fill(self, until: float) -> bool:
        """Read configs and summaries until a time; return whether any are left."""
        left = False
        if self._ledger is not None:
            with contextlib.suppress(LabError, sqlite3.Error, OSError):
                for model in list(self._studies.values()):
                    left |= not model.is_complete and model.fill(self._ledger, until)
        return left

    def changes(self, name: str, after: int, epoch: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return what changed in a study after a revision; everything if it is of another epoch.

        Returns:
            The state of the study, and the rows and cells that changed, each as a JSON array.
        """
        self.refresh(name)
        model = self.study(name)
        fresh = epoch != self.epoch or after <= 0
        if fresh:
            after = 0
            self.fill(time.monotonic() + FIRST_S)
        state = {
            "epoch": self.epoch,
            "fresh": fresh,
            "next": model.revision,
            "seq": self.seq,
            "at": time.time(),
            "runs": len(model.rows),
            "engine": self.engine(name),
            "paused": self._ledger is not None and StudyView(self._ledger, name).is_paused(),
            "complete": model.is_complete,
            "problem": self.problem,
            "columns": CORE if fresh else None,
            "knobs": model.knobs,
            "metrics": model.metrics,
        }
        return state, {"rows": model.rows.since(after), "cells": model.cells.since(after)}

    def judged(self, name: str) -> Judged | None:
        """Return the state of a study's judge, computed once for each state of the ledger; None: it has none."""
        view = self.view(name)
        if view is None:
            return None
        seq, found = self._judged.get(name, (-1, None))
        if seq != self.seq:
            found = judged_now(self.study(name).config, view)
            self._judged[name] = self.seq, found
        return found

    def view(self, name: str) -> StudyView | None:
        """Return the record of a study; None: there is no ledger yet."""
        self.refresh(name)
        return None if self._ledger is None else StudyView(self._ledger, name)

    def _stamp_lab(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.lab.folder / LAB_FILE)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def _reload_lab(self) -> None:
        """Read the lab file again if it has changed; one with a mistake is ignored until it is fixed."""
        stamp = self._stamp_lab()
        if stamp is None or stamp == self._lab_stamp:
            return
        self._lab_stamp = stamp
        try:
            self.lab = load_lab(self.lab.folder)
        except LabError:
            return
        self._start_over()

    def _start_over(self) -> None:
        self.epoch = secrets.token_hex(6)
        self._judged.clear()
        self._version = -1
        known = self.studies()
        self._studies = {
            name: StudyModel(self.lab.folder, self._find_study(self.lab, name))
            for name in self._studies
            if name in known
        }

    def _open(self) -> None:
        """Open the ledger; again if it was created or replaced since."""
        path = self.lab.ledger_path
        try:
            status = os.stat(path)
            inode = (status.st_dev, status.st_ino)
        except OSError:
            inode = None
        copied = _stamp_copied(path) if isinstance(self._ledger, LedgerCopy) else None
        if self._ledger is not None and inode == self._inode and copied == self._copied:
            return
        had = self._ledger is not None
        self._drop_ledger()
        if inode is None and not has_ledger(path):
            return
        copied = _stamp_copied(path)
        self._ledger = ledgers.open_for_reading(path)
        self._copied = copied if isinstance(self._ledger, LedgerCopy) else None
        self._ledger.limit_cache(CACHE_KB)
        self._inode = inode
        self._version = -1
        if had:
            self._start_over()

    def _drop_ledger(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.close()
        self._ledger, self._version = None, -1
