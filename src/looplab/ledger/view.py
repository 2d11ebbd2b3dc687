"""Reading the record of one study: its runs, proposals, verdicts, budget and sessions."""

from __future__ import annotations

import contextlib
import json
import shlex
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from looplab.errors import LabError
from looplab.ledger.catalogue import ImportedEvent
from looplab.ledger.configuration import Configuration, configurations
from looplab.ledger.ledger import Event, Ledger
from looplab.ledger.plan import Job, RunPlan
from looplab.ledger.roles import Origin, Role
from looplab.ledger.schema import FREQUENT, IS_RARE, LAST_NUMBER
from looplab.runs import clock, folder
from looplab.untrusted import load_own_json, mend_text

JOBS_SUFFIX = ".jobs"
"""The commands submitted to a study are the runs of a study of this name."""
CONDITIONS = "+"
"""Separates the hash of the config from that of the conditions in a run's `point`."""
MAX_RUN_DIGITS = 18
"""Digits of the number of a run; SQLite holds 64 bits."""


def sibling_study(study: str) -> str:
    """Return the name of the study that shares its budget with this one: its submitted commands, or the reverse."""
    return study.removesuffix(JOBS_SUFFIX) if study.endswith(JOBS_SUFFIX) else study + JOBS_SUFFIX


def is_failed(call: Mapping[str, Any]) -> bool:
    """Whether a call of `agent_calls` has failed by itself; one that looplab has ended has not."""
    answer = call["answer"]
    return answer is not None and not answer["ok"] and not answer.get("interrupted")


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as the ledger knows it."""

    study: str
    id: str
    n: int
    """The number of the run in its study, from 1."""
    round: int
    proposal: int | None
    proposer: str
    parent: str | None
    """The run it starts from; None: a base config."""
    base: str | None
    """The base config at the root of its ancestry."""
    reason: str
    config_hash: str
    state: str
    """planned | queued (at a scheduler) | running | ended"""
    status: str | None
    """Once ended: ok | failed | stopped | timeout | lost"""
    slot: str | None
    pid: int | None
    created: float
    started: float | None
    ended: float | None
    exit_code: int | None
    signal: int | None
    objective: float | None
    verdict: str | None
    devices: int
    role: Role
    point: str
    """The hash of its config without the seed: runs of one point differ by chance only. Ends with `+` and the hash of
    the conditions if the call had some: arguments for the trainer, another number of steps."""
    seed: int | None
    twin: str | None
    """The run that it repeats."""
    warm: str | None
    """The run whose checkpoint it starts from."""
    attempt: int = 1
    """The current or last attempt, from 1."""
    host: str | None = None
    """Machine of that attempt."""
    job: str | None = None
    """Its id at the scheduler; None: it has none."""

    def as_ended(
        self,
        status: str,
        code: int | None,
        signal: int | None,
        started: float | None,
        ended: float,
        objective: float | None,
    ) -> RunRow:
        """Return the run as ended. Written out, since `dataclasses.replace` takes three times as long."""
        return RunRow(
            self.study, self.id, self.n, self.round, self.proposal, self.proposer, self.parent, self.base, self.reason,
            self.config_hash, "ended", status, self.slot, self.pid, self.created, started or self.started, ended, code,
            signal, objective, self.verdict, self.devices, self.role, self.point, self.seed, self.twin, self.warm,
            self.attempt, self.host, self.job,
        )  # fmt: skip

    @property
    def conditions(self) -> str:
        """A hash of the conditions that it was trained under; runs of other ones are not compared with it."""
        return self.point.partition(CONDITIONS)[2]

    @property
    def base_key(self) -> str:
        """The name and the content of its base config, and the conditions; for runs of a base."""
        return f"{self.base}@{self.config_hash}" + (CONDITIONS + self.conditions if self.conditions else "")

    @property
    def seconds(self) -> float | None:
        return None if self.started is None else max(0.0, (self.ended or clock.now()) - self.started)


@dataclass(frozen=True, slots=True)
class ProposalRow:
    """A proposal and its outcome."""

    id: int
    proposer: str
    source: str | None
    parent: str | None
    """A run, `best`, or None for the base."""
    edits: tuple[str, ...]
    reason: str
    hypothesis: str
    status: str
    problems: tuple[dict[str, Any], ...]
    run: str | None
    created: float
    job: Job | None = None
    """The submitted command; None: it has edits instead."""

    @property
    def words(self) -> tuple[str, ...]:
        """What is proposed, for people: the edits, or the command."""
        return self.edits if self.job is None else (shlex.join(self.job.argv),)


@dataclass(frozen=True, slots=True)
class BudgetUsage:
    """What a study has used so far, over all its engines."""

    rounds: int
    runs: int
    wall: float
    """Seconds during which an engine was running."""
    device_hours: float


class Totals(NamedTuple):
    """Runs of a study with the same state, status and role."""

    state: str
    status: str | None
    role: str
    runs: int
    device_seconds: float


_RUN_COLUMNS = ", ".join(field.name for field in fields(RunRow))
_PLACES = {field.name: index for index, field in enumerate(fields(RunRow))}
_ROLE = _PLACES["role"]
_REPEATED = tuple(_PLACES[name] for name in ("study", "proposer", "base", "state", "status", "slot", "verdict", "host"))
"""Columns with few different texts: SQLite returns each as an object of its own, which is half the memory of a row."""


def _run(row: sqlite3.Row) -> RunRow:
    values = list(row)
    values[_ROLE] = Role.of(values[_ROLE])
    for place in _REPEATED:
        if values[place] is not None:
            values[place] = intern(values[place])
    return RunRow(*values)


class RunOutcome(NamedTuple):
    """The outcome of a run: the columns of `RunRow` that the credit of proposers depends on."""

    id: str
    n: int
    proposer: str
    parent: str | None
    """Of a continuation; None for others."""
    role: Role
    state: str
    status: str | None
    verdict: str | None
    objective: float | None
    ended: float | None
    is_replicated: bool
    """Whether its config was run with other seeds."""


def _job(kept: Any) -> Job | None:
    """Return a submitted command from its proposal; None if it cannot be read."""
    with contextlib.suppress(LabError, KeyError, TypeError, ValueError):
        return Job.from_dict(kept) if isinstance(kept, dict) else Job.from_edits(kept)
    return None


def _proposal(row: sqlite3.Row) -> ProposalRow:
    edits = load_own_json(row["edits"])
    job = _job(edits) if row["proposer"] == Origin.JOB else None
    return ProposalRow(
        row["id"],
        row["proposer"],
        row["source"],
        row["parent"],
        () if job is not None else tuple(edits),
        row["reason"],
        row["hypothesis"],
        row["status"],
        tuple(load_own_json(row["problems"])) if row["problems"] else (),
        row["run"],
        row["created"],
        job,
    )


def _indexed(kind: str) -> str:
    """Return what a query for events of a kind must add to use the index, if there is one."""
    return "" if kind in FREQUENT else f" AND {IS_RARE}"


class StudyView:
    """Reads one study. Proposers, reports and pages get it; nothing here writes."""

    def __init__(self, ledger: Ledger, study: str) -> None:
        self.ledger = ledger
        self.name = study
        self._planned = 0  # number of the last planned run, once known

    def _recorded_at(self) -> str | None:
        """Return where on the curve the objective is according to the last recorded configuration."""
        recorded = self._recorded_objectives()
        return recorded[-1][1].get("at") if recorded else None

    def _recorded_objectives(self) -> list[tuple[float, dict[str, Any]]]:
        """Return the objectives of all recorded configurations with their times, oldest first."""
        sql = "SELECT at, data FROM events WHERE study=? AND kind='study configured' ORDER BY seq"  # there is an index
        bodies = (
            (row["at"], load_own_json(row["data"])["configuration"]) for row in self.ledger.rows(sql, (self.name,))
        )
        return [(at, (body.get("study") or {}).get("objective") or {}) for at, body in bodies]

    def goal(self) -> str:
        """Return whether the objective is minimised or maximised: `min` or `max`."""
        return self.ledger.value("SELECT goal FROM studies WHERE name=?", (self.name,)) or "min"

    def events_of(self, kind: str, run: str | None = None) -> list[dict[str, Any]]:
        """Return the data of all events of a kind, oldest first, each with its `run`."""
        condition = f"study=? AND kind=?{_indexed(kind)} AND (? IS NULL OR run=?)"
        sql = f"SELECT run, data FROM events WHERE {condition} ORDER BY seq"  # noqa: S608
        rows = self.ledger.rows(sql, (self.name, kind, run, run))
        return [{**load_own_json(row["data"]), "run": row["run"]} for row in rows]

    def count_events(self, since: float, kinds: Sequence[str]) -> dict[str, int]:
        """Return how many events of some kinds were recorded after a time."""
        sql = (
            "SELECT kind, count(*) FROM events WHERE study=? AND at>? AND kind IN (SELECT value FROM json_each(?))"
            " GROUP BY kind"
        )
        return {row[0]: int(row[1]) for row in self.ledger.rows(sql, (self.name, since, json.dumps(list(kinds))))}

    def last_data(self, kind: str) -> dict[str, Any] | None:
        """Return the data of the study's last event of a kind; None if there is none."""
        sql = f"SELECT data FROM events WHERE study=? AND kind=?{_indexed(kind)} ORDER BY seq DESC LIMIT 1"  # noqa: S608
        data = self.ledger.value(sql, (self.name, kind))
        return dict(load_own_json(data)) if data is not None else None

    def objective(self) -> str | None:
        """Return the metric by which the runs in the table were measured."""
        metric: str | None = self.ledger.value("SELECT objective FROM studies WHERE name=?", (self.name,))
        return metric

    def objective_changed_at(self) -> float:
        """Return when an engine last started with another objective than the one before; 0: never."""
        changed, before = 0.0, None
        for at, objective in self._recorded_objectives():
            now = (objective.get("metric"), objective.get("at"))
            if before not in (None, now):
                changed = at
            before = now
        return changed

    def configuration(self) -> str | None:
        """Return the hash of the last recorded configuration."""
        return (self.last_data("study configured") or {}).get("hash")

    def configured_options(self) -> dict[str, Any] | None:
        """Return the options in the last recorded configuration."""
        found = self.configurations()
        return found[-1].body.get("options") if found else None

    def configurations(self) -> list[Configuration]:
        """Return all recorded configurations, oldest first."""
        sql = "SELECT * FROM events WHERE study=? AND kind='study configured' ORDER BY seq"
        return configurations(map(Event.of, self.ledger.rows(sql, (self.name,))))

    # -- options of the last call

    def saved_options(self) -> Any:
        """Return the options of the last call as they were saved; None if there was none.

        Raises:
            ValueError: They cannot be read.
        """
        text = self.ledger.value("SELECT value FROM meta WHERE key=?", (f"options:{self.name}",))
        return json.loads(text) if text is not None else None

    # -- rounds

    def open_round(self) -> int | None:
        sql = "SELECT n FROM rounds WHERE study=? AND closed IS NULL ORDER BY n DESC LIMIT 1"
        n: int | None = self.ledger.value(sql, (self.name,))
        return n

    def unfilled_round(self) -> int | None:
        """Return the round that an engine was planning when it was interrupted; None: there is none."""
        sql = "SELECT n FROM rounds WHERE study=? AND closed IS NULL AND filled=0"
        n: int | None = self.ledger.value(sql, (self.name,))
        return n

    # -- proposals

    def has_source(self, source: str) -> bool:
        """Return whether a proposal of this source was ever recorded."""
        return self.ledger.one("SELECT 1 FROM proposals WHERE study=? AND source=?", (self.name, source)) is not None

    def queue_taken(self, file: str) -> str | None:
        """Return the hash of a queue file when all its entries were last in the ledger; None: they never were."""
        digest: str | None = self.ledger.value("SELECT value FROM meta WHERE key=?", (f"queue:{self.name}:{file}",))
        return digest

    def waiting(self, limit: int, proposer: str | None = None) -> list[ProposalRow]:
        """Return the proposals in the queue, oldest first."""
        where = "status='waiting' AND (? IS NULL OR proposer=?) ORDER BY id LIMIT ?"
        return self._select_proposals(where, proposer, proposer, limit)

    def requeued(self, limit: int) -> list[ProposalRow]:
        """Return the proposals in the queue by watch rules, and by people who reproduce a run, oldest first."""
        where = "status='waiting' AND proposer IN ('watch', 'again') ORDER BY id LIMIT ?"
        return self._select_proposals(where, limit, index="INDEXED BY proposals_requeued")

    def count_waiting(self) -> int:
        return int(self.ledger.value("SELECT count(*) FROM proposals WHERE study=? AND status='waiting'", (self.name,)))

    def proposals(self, status: str | None = None) -> list[ProposalRow]:
        return self._select_proposals("(? IS NULL OR status=?) ORDER BY id", status, status)

    def _select_proposals(self, where: str, *parameters: object, index: str = "") -> list[ProposalRow]:
        sql = f"SELECT * FROM proposals {index} WHERE study=? AND {where}"  # noqa: S608 (fixed texts)
        return [_proposal(row) for row in self.ledger.each(sql, (self.name, *parameters))]

    def proposal(self, number: int) -> ProposalRow:
        row = self.ledger.one("SELECT * FROM proposals WHERE id=?", (number,)) if 0 <= number < 1 << 63 else None
        if row is None:
            raise LabError(f"there is no proposal {number}")
        return _proposal(row)

    def count_proposals(self, proposer: str | None = None) -> int:
        """Return how many proposals there were, of one proposer or of all."""
        sql = "SELECT count(*) FROM proposals WHERE study=? AND (? IS NULL OR proposer=?)"
        return int(self.ledger.value(sql, (self.name, proposer, proposer)))

    def proposals_by_proposer(self) -> dict[str, int]:
        """Return how many proposals each proposer made, by name."""
        sql = "SELECT proposer, count(*) FROM proposals WHERE study=? GROUP BY proposer ORDER BY proposer"
        return {row[0]: int(row[1]) for row in self.ledger.rows(sql, (self.name,))}

    def last_proposers(self, names: Sequence[str], limit: int) -> list[str]:
        """Return who made the last proposals, oldest first, of these proposers."""
        sql = (
            "SELECT proposer FROM proposals WHERE study=? AND proposer IN (SELECT value FROM json_each(?))"
            " ORDER BY id DESC LIMIT ?"
        )
        return [row[0] for row in self.ledger.rows(sql, (self.name, json.dumps(list(names)), limit))][::-1]

    def proposals_from(self, prefix: str) -> list[tuple[ProposalRow, int | None]]:
        """Return the proposals whose source begins with `prefix:`, oldest first, each with its round."""
        sql = "SELECT * FROM proposals WHERE study=? AND source >= ? AND source < ? ORDER BY id"
        rows = self.ledger.rows(sql, (self.name, f"{prefix}:", f"{prefix};"))
        return [(_proposal(row), row["round"]) for row in rows]

    def count_before(self, proposal: int) -> int:
        """Return how many proposals and planned runs are ahead of a proposal in the queue."""
        queries = (
            "SELECT count(*) FROM proposals WHERE study=? AND id<? AND status='waiting'",
            "SELECT count(*) FROM runs WHERE study=? AND proposal<? AND state='planned'",
        )
        return sum(int(self.ledger.value(sql, (self.name, proposal))) for sql in queries)

    # -- runs

    def progress(self) -> tuple[int, int, str | None, int]:
        """Return the number of ended runs, of all runs, the best run, and the last round: what proposals depend on."""
        sql = (
            "SELECT (SELECT count(*) FROM runs WHERE study=? AND state='ended'), (SELECT count(*) FROM runs WHERE"
            " study=?), (SELECT best FROM studies WHERE name=?), (SELECT max(n) FROM rounds WHERE study=?)"
        )
        ended, runs, best, round_ = self.ledger.rows(sql, (self.name,) * 4)[0]
        return ended, runs, best, round_ or 0

    def last_end(self) -> float | None:
        """Return when the last run ended; None: none has."""
        ended: float | None = self.ledger.value("SELECT max(ended) FROM runs WHERE study=?", (self.name,))
        return ended

    def find_run(self, run: str) -> RunRow | None:
        """Return a run by its id; None if there is none."""
        return self._select_run("id=?", run)

    def _select_run(self, where: str, *parameters: object) -> RunRow | None:
        sql = f"SELECT {_RUN_COLUMNS} FROM runs WHERE study=? AND {where}"  # noqa: S608 (fixed texts)
        row = self.ledger.one(sql, (self.name, *parameters))
        return _run(row) if row is not None else None

    def _select_runs(self, where: str, *parameters: object, index: str = "") -> list[RunRow]:
        sql = f"SELECT {_RUN_COLUMNS} FROM runs {index} WHERE study=? AND {where}"  # noqa: S608 (fixed texts)
        return [_run(row) for row in self.ledger.each(sql, (self.name, *parameters))]

    def imports(self) -> dict[str, dict[str, Any]]:
        """Return where the imported runs came from, by run: `kind`, `path`, `digest`."""
        return {one["run"]: one["source"] for one in self.events_of(ImportedEvent.kind)}

    def next_number(self) -> int:
        """Return the number of the next run; only for whoever holds the study's lock."""
        return (self._planned or self._last_run()) + 1

    def _last_run(self) -> int:
        """Return the number of the last run, even if it was planned, never started, and lost with its plan."""
        sql = (
            "SELECT max(coalesce((SELECT max(n) FROM runs WHERE study=?), 0),"
            " coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key=?), 0))"
        )
        return int(self.ledger.value(sql, (self.name, LAST_NUMBER + self.name)))

    def plan_of(self, run: str) -> RunPlan | None:
        """Return the plan of a run; None once the run has ended and it is forgotten."""
        sql = (
            "SELECT plans.body, configs.body AS config FROM plans JOIN runs ON runs.study=plans.study AND id=plans.run"
            " LEFT JOIN configs ON hash=config_hash WHERE plans.study=? AND plans.run=?"
        )
        row = self.ledger.one(sql, (self.name, run))
        if row is None:
            return None
        config = json.loads(row["config"]) if row["config"] is not None else None  # also reads ints beyond 64 bits
        return RunPlan.from_dict(json.loads(row["body"]), config)

    def config_of(self, run: RunRow, run_dir: Path) -> dict[str, Any]:
        """Return the config of a run.

        Args:
            run_dir: The run's folder, for runs of early versions, whose config is not in the ledger.

        Raises:
            LabError: Neither the ledger nor the folder has it as it was when the run was planned.
        """
        body = self.ledger.value("SELECT body FROM configs WHERE hash=?", (run.config_hash,))
        return json.loads(body) if body is not None else folder.read_config_of(run_dir, run.config_hash)

    def launched_files(self, run: str) -> dict[str, str]:
        """Return the SHA-256 of the files that the run had when it was last launched; of a file from which secrets were
        removed since, its SHA-256 after that."""
        sql = (
            "SELECT kind, data FROM events WHERE study=? AND run=? AND kind IN ('launched', 'ended', 'scrubbed')"
            " ORDER BY seq"
        )
        files: dict[str, str] = {}
        for kind, text in self.ledger.rows(sql, (self.name, run)):
            recorded = load_own_json(text)["files"]
            files = (
                recorded if kind == "launched" else files | {name: recorded[name] for name in files if name in recorded}
            )
        return files

    def recorded_files(self, run: str) -> dict[str, str]:
        """Return the SHA-256 of all files of a run that must not change, by their path in the run folder."""
        files: dict[str, str] = {}
        sql = "SELECT data FROM events WHERE study=? AND (run=? OR kind='archived') ORDER BY seq"
        for (text,) in self.ledger.rows(sql, (self.name, run)):
            data = load_own_json(text)
            files |= data.get("files") or data.get("runs", {}).get(run, {})
        return files

    def files_at_end(self) -> dict[str, dict[str, str]]:
        """Return the SHA-256 of the files of every ended run as they were last recorded, by run and by path in its
        folder."""
        found: dict[str, dict[str, str]] = {}
        sql = (
            "SELECT run, data FROM events WHERE study=? AND run IS NOT NULL"
            " AND kind IN ('imported', 'ended', 'recovered', 'remeasured', 'scrubbed') ORDER BY seq"
        )
        for run, text in self.ledger.each(sql, (self.name,)):
            found.setdefault(run, {}).update(load_own_json(text).get("files") or {})
        return found

    def kept_files(self) -> dict[str, str]:
        """Return the last recorded SHA-256 of files that belong to no single run, by path in the study's folder."""
        files: dict[str, str] = {}
        for event in self.events_of("kept"):
            files |= event["paths"]
        return files

    def same_measurement(self, run: RunRow, measured: str) -> RunRow | None:
        """Return the first run of another config that measured exactly the same."""
        return self._select_run("measured=? AND point!=? ORDER BY n LIMIT 1", measured, run.point)

    def alarms(self) -> list[dict[str, Any]]:
        """Return the alarms, oldest first, each with its `run` and `text`."""
        return self.events_of("alarm")

    def bests(self) -> list[str]:
        """Return the runs that were ever best, in that order."""
        return [event["run"] for event in self.events_of("best") if event["run"] is not None]

    def best(self) -> RunRow | None:
        best = self.ledger.value("SELECT best FROM studies WHERE name=?", (self.name,))
        return self.run(best) if best else None

    def run(self, name: str) -> RunRow:
        """Return a run by its id, its number, or the beginning of its id; LATEST and BEST are names too.

        LATEST is the newest run that has started; the newest planned one if none has.
        """
        name = mend_text(name)
        where, parameters = "id=?", (name,)  # type: tuple[str, tuple[Any, ...]]
        if name.upper() == "LATEST":
            newest = "SELECT max(n) FROM runs WHERE study=? AND role!='imported'"
            where = f"n=coalesce(({newest} AND state!='planned'), ({newest}))"
            parameters = (self.name, self.name)
        elif name.upper() == "BEST":
            where, parameters = "id=(SELECT best FROM studies WHERE name=?)", (self.name,)
        elif name.isdecimal() and len(name) <= MAX_RUN_DIGITS:
            where, parameters = "n=?", (int(name),)
        found = self._select_run(where, *parameters)
        if found is None and len(name) >= 4:
            similar = self._select_runs("substr(id, 1, ?)=?", len(name), name)
            if len(similar) > 1:
                raise LabError(f"{name!r} could be any of {', '.join(run.id for run in similar[:5])}")
            found = similar[0] if similar else None
        if found is None:
            known = self.ledger.rows("SELECT id FROM runs WHERE study=? ORDER BY n DESC LIMIT 3", (self.name,))
            hint = f"the latest are {', '.join(r['id'] for r in known)}" if known else "the study has no runs yet"
            if known and not name.isdecimal():
                hint += "; LATEST and BEST are names too"
            raise LabError(f"study {self.name!r} has no run {name!r}", hint=hint)
        return found

    def runs(
        self, *, state: str | None = None, status: str | None = None, round: int | None = None, limit: int | None = None
    ) -> list[RunRow]:
        """Return runs, oldest first; with `limit` the newest of them."""
        where, parameters = ["true"], []  # type: tuple[list[str], list[Any]]
        for name, value in (("state", state), ("status", status), ("round", round)):
            if value is not None:
                where.append(f"{name}=?")
                parameters.append(value)
        order = "n"
        if state is not None and state != "ended":  # there is an index of the unfinished runs
            where.append("state!='ended'")
            order = "+n"  # else SQLite would walk all runs in this order
        condition = f"{' AND '.join(where)} ORDER BY {order}"
        if limit is None:
            return self._select_runs(condition, *parameters)
        return self._select_runs(f"{condition} DESC LIMIT ?", *parameters, limit)[::-1]

    def outcomes(self) -> list[RunOutcome]:
        """Return the outcomes of all runs that were not cancelled before they started, oldest first."""
        sql = (
            "SELECT id, n, proposer, iif(role=?, parent, NULL), role, state, status, verdict, objective, ended, point"
            " FROM runs WHERE study=? AND (state!='ended' OR started IS NOT NULL) ORDER BY n"
        )
        replicates = (
            "SELECT DISTINCT point FROM runs WHERE study=? AND role=? AND (state!='ended' OR started IS NOT NULL)"
        )
        replicated = {row[0] for row in self.ledger.each(replicates, (self.name, Role.REPLICATE))}
        found = []
        for row in self.ledger.each(sql, (Role.CONTINUATION, self.name)):
            id_, n, proposer, parent, role, state, status, verdict, objective, ended, point = row
            status, verdict = (None if one is None else intern(one) for one in (status, verdict))
            found.append(
                RunOutcome(
                    id_, n, intern(proposer), parent, Role.of(role), intern(state), status, verdict, objective, ended,
                    point in replicated,
                )
            )  # fmt: skip
        return found

    def runs_after(self, n: int, limit: int) -> list[RunRow]:
        """Return the first runs with a larger number, oldest first: all runs in portions, which takes little memory."""
        return self._select_runs("n>? ORDER BY n LIMIT ?", n, limit)

    def runs_since(self, at: float, limit: int) -> list[RunRow]:
        """Return the newest runs that were started and had not ended before a time, oldest first."""
        where = "started IS NOT NULL AND coalesce(ended, ?)>=? ORDER BY n DESC LIMIT ?"
        return self._select_runs(where, at, at, limit)[::-1]

    def proposers_of(self, role: Role) -> set[str]:
        """Return who proposed runs of a role."""
        sql = "SELECT DISTINCT proposer FROM runs WHERE study=? AND role=?"
        return {str(row[0]) for row in self.ledger.rows(sql, (self.name, role))}

    def counts_since(self, at: float, now: float) -> list[tuple[str, str | None, int, int, float]]:
        """Return role, status, runs started after a time, runs ended after it, and device seconds since then."""
        sql = (
            "SELECT role, status, total(started>?), total(ended>?),"
            " total(max(0, coalesce(ended, ?) - max(started, ?)) * devices)"
            " FROM runs WHERE study=? GROUP BY role, status"
        )
        found = self.ledger.rows(sql, (at, at, now, at, self.name))
        return [(role, status, int(started), int(ended), seconds) for role, status, started, ended, seconds in found]

    def totals(self) -> list[Totals]:
        """Return number and device time of the runs by state, status and role."""
        # Ended runs are read from the index `runs_totals`, the others from `runs_open`.
        # Where nothing was started, the term is NULL and is not summed.
        columns = (
            "SELECT state, status, role, count(*), total(max(0, coalesce(ended, ?) - started) * devices) FROM runs"
        )
        sql = (
            f"{columns} WHERE study=? AND state='ended' GROUP BY status, role"
            f" UNION ALL {columns} WHERE study=? AND state!='ended' GROUP BY state, role"
        )
        return [Totals(*row) for row in self.ledger.rows(sql, (clock.now(), self.name) * 2)]

    def counts(self, totals: Iterable[Totals] | None = None) -> dict[str, int]:
        """Return the number of runs that are planned, queued, running, ok, failed, …; imported ones count as such."""
        counts: dict[str, int] = {}
        for some in self.totals() if totals is None else totals:
            ended = some.status or "ended"
            name = Role.IMPORTED if some.role == Role.IMPORTED else ended if some.state == "ended" else some.state
            counts[name] = counts.get(name, 0) + some.runs
        return counts

    def lost_attempts(self, run: str) -> list[str]:
        """Return why the earlier attempts at a run ended: `lost` or `preempted` each."""
        sql = (
            "SELECT data FROM events INDEXED BY events_attempts"
            " WHERE study=? AND run=? AND kind='attempt ended' ORDER BY seq"
        )
        return [load_own_json(row["data"])["reason"] for row in self.ledger.rows(sql, (self.name, run))]

    def has_result(self, *, measured: bool) -> bool:
        """Return whether any run ended well; with `measured`, also with an objective."""
        sql = (
            "SELECT 1 FROM runs WHERE study=? AND status='ok' AND role!='imported' AND (objective IS NOT NULL OR ?)"
            " LIMIT 1"
        )
        return self.ledger.one(sql, (self.name, not measured)) is not None

    def not_comparable(self) -> list[RunRow]:
        """Return the runs that ended well, were measured by another objective, and were not measured again since."""
        changed = self.objective_changed_at()
        if not changed:
            return []
        return self._select_runs("status='ok' AND objective IS NULL AND coalesce(ended, 0) < ? ORDER BY n", changed)

    def runs_open(self) -> list[RunRow]:
        """Return the runs that are planned or running."""
        # SQLite's planner would read all runs, in their order, to find the few.
        return self._select_runs("state != 'ended' ORDER BY n", index="INDEXED BY runs_open")

    def runs_of(self, point: str, warm: str | None = None) -> list[str]:
        """Return the runs of a config with any seed that started from these weights; without imported ones."""
        sql = "SELECT id FROM runs WHERE study=? AND point=? AND warm IS ? AND role!='imported' ORDER BY n"
        return [row["id"] for row in self.ledger.rows(sql, (self.name, point, warm))]

    def runs_by(self, proposer: str, limit: int) -> list[RunRow]:
        """Return the last trials of a proposer, oldest first."""
        return self._select_runs("proposer=? AND role='trial' ORDER BY n DESC LIMIT ?", proposer, limit)[::-1]

    def started_from(self, warm: str | None) -> RunRow:
        """Return the first run that started from these weights."""
        found = self._select_run("warm=? ORDER BY n LIMIT 1", warm)
        if found is None:
            raise LabError(f"no run started from {warm}")
        return found

    def base_runs(self) -> dict[str, list[RunRow]]:
        """Return the runs of the base configs, oldest first, by their `base_key`."""
        found: dict[str, list[RunRow]] = {}
        for run in self._select_runs("role='base' ORDER BY n"):
            found.setdefault(run.base_key, []).append(run)
        return found

    # -- verdicts

    def judge_state(self) -> dict[str, Any] | None:
        state = self.ledger.value("SELECT judge_state FROM studies WHERE name=?", (self.name,))
        return load_own_json(state) if state else None

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Return the last verdict on each run with its evidence, in chronological order."""
        sql = "SELECT run, at, verdict, evidence FROM verdicts WHERE study=? ORDER BY rowid"
        found: dict[str, dict[str, Any]] = {}
        for row in self.ledger.rows(sql, (self.name,)):
            found.pop(row["run"], None)
            found[row["run"]] = {**load_own_json(row["evidence"]), "verdict": row["verdict"], "at": row["at"]}
        return found

    def void_runs(self) -> list[str]:
        """Return the runs whose last verdict is `void`."""
        sql = "SELECT id FROM runs WHERE study=? AND verdict='void'"
        return [row[0] for row in self.ledger.rows(sql, (self.name,))]

    def watched_rules(self, run: str) -> list[tuple[str, bool]]:
        """Return the watch rules that have fired on a run, and whether they stop it."""
        return [(data["rule"], data["stops"]) for data in self.events_of("watched", run)]

    def held_out_reads(self) -> int:
        """Return how often the held-out metric was read so far."""
        sql = f"SELECT count(*) FROM events WHERE study=? AND kind='held-out read' AND {IS_RARE}"  # noqa: S608
        return int(self.ledger.value(sql, (self.name,)))

    def held_out_text(self) -> str | None:
        """Return the sentence about the last reading of the held-out metric; None: it was not read yet."""
        return (self.last_data("held-out read") or {}).get("text")

    # -- budget

    def usage(self, totals: Iterable[Totals] | None = None) -> BudgetUsage:
        rounds = self.ledger.value("SELECT count(*) FROM rounds WHERE study=?", (self.name,))
        sql = "SELECT total(max(0, coalesce(ended, seen) - began)) FROM sessions WHERE study=?"
        wall = self.ledger.value(sql, (self.name,))
        found = self.totals() if totals is None else list(totals)
        imported = sum(some.runs for some in found if some.role == Role.IMPORTED)
        sql = "SELECT total(lost_s * devices) FROM runs INDEXED BY runs_retried WHERE study=? AND attempt > 1"
        lost = self.ledger.value(sql, (self.name,))
        hours = (lost + sum(some.device_seconds for some in found)) / 3600
        return BudgetUsage(rounds, self._last_run() - imported, wall, hours)

    def sibling(self) -> StudyView:
        """Return the study of the commands submitted to this one; of those commands, the study itself."""
        return StudyView(self.ledger, sibling_study(self.name))

    def shared_usage(
        self, totals: Iterable[Totals] | None = None, submitted: Iterable[Totals] | None = None
    ) -> BudgetUsage:
        """Return what the study and the commands submitted to it have used of their common budget.

        Args:
            totals: Those of the study, if they are known.
            submitted: Those of the commands, if they are known.
        """
        own, other = self.usage(totals), self.sibling().usage(submitted)
        if not other.runs and not other.wall:
            return own
        wall, until = 0.0, 0.0
        sql = "SELECT began, coalesce(ended, seen) FROM sessions WHERE study IN (?,?) ORDER BY began"
        for began, last in self.ledger.rows(sql, (self.name, sibling_study(self.name))):
            wall += max(0.0, last - max(began, until))
            until = max(until, last)
        return BudgetUsage(own.rounds, own.runs + other.runs, wall, own.device_hours + other.device_hours)

    # -- sessions

    def last_event(self, kind: str) -> int:
        """Return the number of the study's last event of a kind; 0 if there is none."""
        sql = f"SELECT max(seq) FROM events WHERE study=? AND kind=?{_indexed(kind)}"  # noqa: S608
        return self.ledger.value(sql, (self.name, kind)) or 0

    def failed_because(self) -> str | None:
        """Return why the last engine ended before its work was done; None if it did not, or is running."""
        last = self.last_session()
        if last is None or last["ended"] is None or last["how"] != "failed":
            return None
        return (self.last_data("engine ended") or {}).get("why") or None

    def last_session(self) -> sqlite3.Row | None:
        return self.ledger.one("SELECT * FROM sessions WHERE study=? ORDER BY id DESC LIMIT 1", (self.name,))

    def last_session_ended(self) -> bool:
        last = self.last_session()
        return last is None or last["ended"] is not None

    # -- agents

    def agent_calls(self) -> list[dict[str, Any]]:
        """Return all calls, oldest first, each with its answer under `answer` (None: not yet). Both have the number
        (`seq`) and the time (`at`) of their event."""
        sql = (
            "SELECT seq, at, kind, data FROM events WHERE study=? AND kind IN ('agent asked', 'agent answered')"
            " ORDER BY seq"
        )
        calls: dict[str, dict[str, Any]] = {}
        for seq, at, kind, text in self.ledger.rows(sql, (self.name,)):
            data = {**load_own_json(text), "seq": seq, "at": at}
            if kind == "agent asked":
                calls[data["call"]] = {**data, "answer": None}
            elif data["call"] in calls:
                calls[data["call"]]["answer"] = data
        return list(calls.values())

    def messages(self, limit: int = 20) -> list[str]:
        sql = f"SELECT data FROM events WHERE study=? AND kind='said' AND {IS_RARE} ORDER BY seq DESC LIMIT ?"  # noqa: S608
        return [load_own_json(row["data"])["text"] for row in self.ledger.rows(sql, (self.name, limit))][::-1]

    # -- requests to a running engine

    def is_paused(self) -> bool:
        """Return whether the last request to pause or resume was to pause."""
        sql = "SELECT what FROM commands WHERE study=? AND what IN ('pause', 'resume') ORDER BY id DESC LIMIT 1"
        return bool(self.ledger.value(sql, (self.name,)) == "pause")
