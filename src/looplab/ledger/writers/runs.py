"""Writing runs: planned, launched, ended, measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from looplab.config.files import dump_json as dump_config
from looplab.config.files import hash_config
from looplab.ledger import catalogue
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.replay import hash_text
from looplab.ledger.roles import Origin, Role
from looplab.ledger.view import RunRow, StudyView
from looplab.runs import folder
from looplab.runs.names import run_id as new_run_id
from looplab.runs.redact import redact_text
from looplab.untrusted import shorten


def keep_config(ledger: Ledger, config_hash: str, config: Mapping[str, Any]) -> None:
    """Store a config once, however many runs have it."""
    ledger.execute("INSERT OR IGNORE INTO configs VALUES (?,?)", (config_hash, dump_config(config).decode()))


class RunWriter(StudyView):
    """Records the life of a run."""

    def plan(
        self,
        *,
        round: int,
        proposal: int | None,
        proposer: str,
        parent: str | None,
        base: str,
        reason: str,
        config_hash: str,
        devices: int,
        plan: RunPlan,
        role: Role = Role.TRIAL,
        point: str = "",
        seed: int | None = None,
        twin: str | None = None,
        warm: str | None = None,
    ) -> RunRow:
        """Record a decision to run. From here on it runs exactly once, whatever crashes."""
        reason = shorten(reason)
        n = self.next_number()
        id_ = new_run_id(n)
        now = time.time()
        self.ledger.execute(
            "INSERT INTO runs (study, id, n, round, proposal, proposer, parent, base, reason, config_hash, state,"
            " created, devices, role, point, seed, twin, warm) VALUES (?,?,?,?,?,?,?,?,?,?,'planned',?,?,?,?,?,?,?)",
            (
                self.name,
                id_,
                n,
                round,
                proposal,
                proposer,
                parent,
                base,
                reason,
                config_hash,
                now,
                devices,
                role,
                point or config_hash,
                seed,
                twin,
                warm,
            ),
        )
        text = dump_config(plan.to_dict()).decode()
        self.ledger.execute("INSERT INTO plans VALUES (?,?,?)", (self.name, id_, text))
        keep_config(self.ledger, config_hash, plan.config)
        if proposal is not None:
            self.ledger.execute(
                "UPDATE proposals SET status='accepted', run=?, round=? WHERE id=?", (id_, round, proposal)
            )
        event = catalogue.PlannedEvent(
            n=n, round=round, proposal=proposal, proposer=proposer, parent=parent, base=base, config=config_hash,
            role=role, reason=reason, devices=devices, point=point or config_hash, seed=seed, plan=hash_text(text),
            twin=twin, warm=warm,
        )  # fmt: skip
        self.ledger.record(event, self.name, id_, when=now)
        self._planned = n  # only the engine plans, and there is one
        return RunRow(
            self.name, id_, n, round, proposal, proposer, parent, base, reason, config_hash, "planned",
            None, None, None, now, None, None, None, None, None, None, devices, role, point or config_hash, seed,
            twin, warm,
        )  # fmt: skip

    def record_import(
        self,
        run: str,
        *,
        n: int,
        base: str,
        reason: str,
        config: Mapping[str, Any],
        point: str,
        seed: int | None,
        status: str,
        objective: float | None,
        files: Mapping[str, str],
        source: Mapping[str, Any],
    ) -> None:
        """Record a run of another tool, as ended.

        Args:
            config: With secrets hidden.
            files: SHA-256 of the files in the run's folder, by their paths.
            source: Where it came from: `kind`, `path`, `digest`.
        """
        now, config_hash, reason = time.time(), hash_config(config), shorten(reason)
        columns = {
            "study": self.name, "id": run, "n": n, "round": 0, "proposer": Origin.IMPORT, "base": base,
            "reason": reason, "config_hash": config_hash, "state": "ended", "status": status, "created": now,
            "ended": now, "objective": objective, "role": Role.IMPORTED, "point": point, "seed": seed,
        }  # fmt: skip
        self.ledger.insert("runs", columns)
        keep_config(self.ledger, config_hash, config)
        event = catalogue.ImportedEvent(
            n=n, round=0, proposal=None, proposer=Origin.IMPORT, parent=None, base=base, config=config_hash,
            role=Role.IMPORTED, reason=reason, devices=1, point=point, seed=seed, status=status, code=None, signal=None,
            ended=now, objective=objective, measured=None, files=dict(files), source=dict(source),
        )  # fmt: skip
        self.ledger.record(event, self.name, run, when=now)

    def launched(
        self, run: str, slot: str, files: Mapping[str, str], *, attempt: int = 1, queued: bool = False
    ) -> None:
        """Record that the run's folder exists and that the executor was asked to start it.

        Args:
            queued: Whether a scheduler decides when it starts.
        """
        state = "queued" if queued else "running"
        self.ledger.execute("UPDATE runs SET state=?, slot=? WHERE study=? AND id=?", (state, slot, self.name, run))
        event = catalogue.LaunchedEvent(
            slot=slot, files=dict(files), attempt=attempt if attempt > 1 else None, queued=queued or None
        )
        self.ledger.record(event, self.name, run)

    def queued(self, run: str, job: str, why: str) -> None:
        """Record that a scheduler has accepted the run."""
        self.ledger.execute("UPDATE runs SET state='queued', job=? WHERE study=? AND id=?", (job, self.name, run))
        self.ledger.record(catalogue.QueuedEvent(job=job, why=why), self.name, run)

    def attempt_ended(self, run: RunRow, *, reason: str, why: str, code: int | None, signal: int | None,
                      started: float | None, ended: float | None) -> RunRow:  # fmt: skip
        """Record that the run was lost by its place and is planned again; return it."""
        before = self.ledger.rows("SELECT lost_s FROM runs WHERE study=? AND id=?", (self.name, run.id))[0][0]
        began = started if started is not None else run.started
        lost_s = before + (max(0.0, ended - began) if began is not None and ended is not None else 0.0)
        self.ledger.execute(
            "UPDATE runs SET state='planned', slot=NULL, pid=NULL, started=NULL, host=NULL, job=NULL, attempt=?,"
            " lost_s=? WHERE study=? AND id=?",
            (run.attempt + 1, lost_s, self.name, run.id),
        )
        event = catalogue.AttemptEndedEvent(
            attempt=run.attempt, reason=reason, why=redact_text(shorten(why)), code=code, signal=signal, started=began,
            ended=ended, host=run.host, job=run.job, lost_s=lost_s,
        )  # fmt: skip
        self.ledger.record(event, self.name, run.id)
        return replace(run, state="planned", slot=None, pid=None, started=None, host=None, job=None,
                       attempt=run.attempt + 1)  # fmt: skip

    def record_changed(self, run: str, changes: Sequence[folder.RecordChange]) -> None:
        """Record which recorded files the run itself has changed."""
        event = catalogue.RecordChangedEvent(changes=[asdict(change) for change in changes])
        self.ledger.record(event, self.name, run)

    def forget_plans(self) -> None:
        """Delete the plans of runs that have ended."""
        with self.ledger.write():
            self.ledger.execute(
                "DELETE FROM plans WHERE study=? AND run IN (SELECT id FROM runs WHERE study=? AND state='ended')",
                (self.name, self.name),
            )

    def started(
        self, run: str, pid: int | None, at: float, *, host: str, job: str | None = None,
        devices: Sequence[str] = (), cores: Sequence[int] = (), was_queued: bool = False,
    ) -> None:  # fmt: skip
        """Record that the run is running.

        Args:
            was_queued: Whether it waited at a scheduler, so that its place and its start are recorded as an event.
        """
        self.ledger.execute(
            "UPDATE runs SET state='running', pid=?, started=?, host=?, job=? WHERE study=? AND id=?",
            (pid, at, host, job, self.name, run),
        )
        if was_queued:
            event = catalogue.StartedEvent(host=host, job=job, devices=list(devices), cores=list(cores), started=at)
            self.ledger.record(event, self.name, run)

    def returned(self, run: str, why: str) -> None:
        """Record that the run could not be started and is planned again."""
        with self.ledger.write():
            self.ledger.execute("UPDATE runs SET state='planned', slot=NULL WHERE study=? AND id=?", (self.name, run))
            self.ledger.record(catalogue.ReturnedEvent(why=why), self.name, run)

    def ended(
        self,
        run: str,
        *,
        status: str,
        code: int | None,
        signal: int | None,
        started: float | None,
        ended: float | None,
        objective: float | None,
        files: Mapping[str, str],
        note: str | None = None,
        measured: str | None = None,
    ) -> None:
        """Record how a run ended and what it measured.

        Args:
            objective: None if the run did not end well or the metric was not measured.
            files: SHA-256 of the files that must not change from now on, by their path in the run folder.
            measured: hash of all that it measured, equal for runs that are equal to the last digit.
        """
        self.ledger.execute(
            "UPDATE runs SET state='ended', status=?, exit_code=?, signal=?, started=coalesce(?, started), ended=?,"
            " objective=?, measured=? WHERE study=? AND id=?",
            (status, code, signal, started, ended, objective, measured, self.name, run),
        )
        event = catalogue.EndedEvent(
            status=status, code=code, signal=signal, started=started, ended=ended, objective=objective,
            measured=measured, files=dict(files), note=redact_text(note) if note else None,
        )  # fmt: skip
        self.ledger.record(event, self.name, run)

    def remeasured(
        self,
        run: str,
        *,
        objective: float | None,
        before: float | None,
        measured: str | None,
        files: Mapping[str, str],
    ) -> None:
        """Record that an ended run was read again; `before` is the objective it had."""
        self.ledger.execute(
            "UPDATE runs SET objective=?, measured=? WHERE study=? AND id=?", (objective, measured, self.name, run)
        )
        event = catalogue.RemeasuredEvent(objective=objective, before=before, measured=measured, files=dict(files))
        self.ledger.record(event, self.name, run)

    def archived(self, runs: Mapping[str, Mapping[str, str]]) -> None:
        """Record the SHA-256 of the archives of ended runs, by run and path in its folder."""
        with self.ledger.write():
            event = catalogue.ArchivedEvent(runs={run: dict(files) for run, files in runs.items()})
            self.ledger.record(event, self.name)

    def kept(self, paths: Mapping[str, str]) -> None:
        """Record the SHA-256 of files that belong to no single run, by their path in the study's folder."""
        if paths:
            self.ledger.record(catalogue.KeptEvent(paths=dict(paths)), self.name)

    def unreadable(self, run: str, what: str, why: str) -> None:
        """Record what of a run could not be read, measured or written down; `what` is a file or a step."""
        self.ledger.record(catalogue.UnreadableEvent(what=what, why=why), self.name, run)

    def alarm(self, run: str | None, event: catalogue.AlarmEvent) -> None:
        """Record something that a person must look at before the results are believed."""
        self.ledger.record(event, self.name, run)

    def set_best(self, run: str | None, objective: float | None) -> None:
        self.ledger.execute("UPDATE studies SET best=? WHERE name=?", (run, self.name))
        self.ledger.record(catalogue.BestEvent(objective=objective), self.name, run)
