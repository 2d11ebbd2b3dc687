"""Writing the record of one study; reading is in `view.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from looplab.config.files import dump_json as dump_config
from looplab.config.files import hash_config
from looplab.ledger import catalogue
from looplab.ledger.configuration import storable
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import Job, RunPlan
from looplab.ledger.replay import hash_text
from looplab.ledger.roles import Origin, Role
from looplab.ledger.view import RunRow, StudyView
from looplab.runs import clock, folder
from looplab.runs.names import run_id as new_run_id
from looplab.runs.redact import redact_data, redact_proposal, redact_text
from looplab.untrusted import dump_json, load_own_json, mend_text, shorten


def keep_config(ledger: Ledger, config_hash: str, config: Mapping[str, Any]) -> None:
    """Store a config once, however many runs have it."""
    ledger.execute("INSERT OR IGNORE INTO configs VALUES (?,?)", (config_hash, dump_config(config).decode()))


class StudyLedger(StudyView):
    """Reads and writes one study. Every change is an event in the chain, in the same transaction."""

    def open(self, objective: str | None, goal: str, at: str | None = None) -> int:
        """Make the study known; what it is measured by may change between engines, and that is recorded.

        Values of another metric, or taken elsewhere on the curve, are not comparable: their runs count as not measured
        until they are measured again, and the judge starts over.

        Args:
            at: Where on the curve the objective is; None: as before.

        Returns:
            How many runs lost their objective.
        """
        now = time.time()
        lost = 0
        with self.ledger.write():
            row = self.ledger.one("SELECT objective, goal FROM studies WHERE name=?", (self.name,))
            if row is None:
                self.ledger.execute(
                    "INSERT INTO studies (name, created, objective, goal) VALUES (?,?,?,?)",
                    (self.name, now, objective, goal),
                )
                self.ledger.record(catalogue.StudyOpenedEvent(objective=objective, goal=goal), self.name, when=now)
                return 0
            moved = at is not None and self._recorded_at() not in (None, at)
            if (row["objective"], row["goal"]) == (objective, goal) and not moved:
                return 0
            self.ledger.execute("UPDATE studies SET objective=?, goal=? WHERE name=?", (objective, goal, self.name))
            if row["objective"] is None:  # rebuilt from folders, or a study that had no objective
                self.ledger.record(catalogue.StudyOpenedEvent(objective=objective, goal=goal), self.name)
                return 0
            cleared = row["objective"] != objective or moved
            if cleared:
                sql = "UPDATE runs SET objective=NULL, measured=NULL WHERE study=? AND objective IS NOT NULL"
                lost = self.ledger.execute(sql, (self.name,)).rowcount
            self.ledger.execute("UPDATE studies SET best=NULL WHERE name=?", (self.name,))
            event = catalogue.ObjectiveChangedEvent(objective=objective, goal=goal, cleared=cleared)
            self.ledger.record(event, self.name)
            if self.judge_state() is not None:
                self.restart_judge("the objective was changed")
        return lost

    def configure(self, body: Mapping[str, Any]) -> str:
        """Record the configuration that an engine starts with, if it is not the last one; return its hash."""
        kept = storable(redact_data(body))
        digest = hash_config(kept)
        with self.ledger.write():
            if digest != self.configuration():
                self.ledger.record(catalogue.StudyConfiguredEvent(hash=digest, configuration=kept), self.name)
        return digest

    # -- options of the last call

    def save_options(self, options: Mapping[str, Any]) -> None:
        """Keep the options of a call for `resume`, and record them if they differ from the last ones."""
        key = f"options:{self.name}"
        text = json.dumps(options)  # escaped: paths and arguments may be bytes that are not valid Unicode
        with self.ledger.write():
            before = self.ledger.one("SELECT value FROM meta WHERE key=?", (key,))
            if before is None or before["value"] != text:
                self.ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, text))
                self.ledger.record(catalogue.OptionsEvent(text=text), self.name)

    # -- rounds

    def begin_round(self) -> int:
        row = self.ledger.one("SELECT coalesce(max(n), 0) + 1 FROM rounds WHERE study=?", (self.name,))
        assert row is not None
        n = int(row[0])
        now = time.time()
        self.ledger.execute("INSERT INTO rounds (study, n, created) VALUES (?,?,?)", (self.name, n, now))
        self.ledger.record(catalogue.RoundBeganEvent(round=n), self.name, when=now)
        return n

    def fill_round(self, n: int) -> None:
        """All runs of the round are decided on."""
        self.ledger.execute("UPDATE rounds SET filled=1 WHERE study=? AND n=?", (self.name, n))

    def close_round(self, n: int) -> None:
        now = time.time()
        with self.ledger.write():
            self.ledger.execute("UPDATE rounds SET closed=? WHERE study=? AND n=?", (now, self.name, n))
            self.ledger.record(catalogue.RoundEndedEvent(round=n), self.name, when=now)

    # -- proposals

    def propose(
        self,
        proposer: str,
        edits: Sequence[str],
        reason: str,
        *,
        parent: str | None = None,
        hypothesis: str = "",
        source: str | None = None,
        job: Job | None = None,
    ) -> int | None:
        """Put a proposal in the queue, without secrets; None if one of this source is there already.

        Args:
            job: A submitted command, instead of edits.
        """
        edits, reason, hypothesis = redact_proposal(
            [mend_text(edit) for edit in edits], shorten(reason), shorten(hypothesis)
        )
        source, parent = (text if text is None else mend_text(text) for text in (source, parent))
        with self.ledger.write():
            if source is not None and self.has_source(source):
                return None
            now = time.time()
            cursor = self.ledger.execute(
                "INSERT INTO proposals (study, created, proposer, source, parent, edits, reason, hypothesis, status)"
                " VALUES (?,?,?,?,?,?,?,?,'waiting')",
                (
                    self.name,
                    now,
                    proposer,
                    source,
                    parent,
                    dump_json(edits if job is None else job.to_dict()),
                    reason,
                    hypothesis,
                ),
            )
            id_ = cursor.lastrowid
            assert id_ is not None
            event = catalogue.ProposedEvent(
                proposal=id_, proposer=proposer, source=source, parent=parent, edits=edits, reason=reason,
                hypothesis=hypothesis, job=None if job is None else job.to_dict(),
            )  # fmt: skip
            self.ledger.record(event, self.name, when=now)
            return id_

    def note_queue_taken(self, file: str, digest: str) -> None:
        self.ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (f"queue:{self.name}:{file}", digest))

    def reject(self, proposal: int, problems: Sequence[Mapping[str, Any]]) -> None:
        """The guard said no, and why."""
        text = dump_json(redact_data(list(problems)))
        self.ledger.execute("UPDATE proposals SET status='rejected', problems=? WHERE id=?", (text, proposal))
        self.ledger.record(catalogue.RejectedEvent(proposal=proposal, problems=load_own_json(text)), self.name)

    # -- runs

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
        """Decide on a run. From here on it will be run, once, whatever dies in between."""
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
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        self.ledger.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", tuple(columns.values()))  # noqa: S608
        keep_config(self.ledger, config_hash, config)
        event = catalogue.ImportedEvent(
            n=n, round=0, proposal=None, proposer=Origin.IMPORT, parent=None, base=base, config=config_hash,
            role=Role.IMPORTED, reason=reason, devices=1, point=point, seed=seed, status=status, code=None, signal=None,
            ended=now, objective=objective, measured=None, files=dict(files), source=dict(source),
        )  # fmt: skip
        self.ledger.record(event, self.name, run, when=now)

    def launched(self, run: str, slot: str, files: Mapping[str, str]) -> None:
        """The run's folder is there and the executor has its order."""
        self.ledger.execute("UPDATE runs SET state='running', slot=? WHERE study=? AND id=?", (slot, self.name, run))
        self.ledger.record(catalogue.LaunchedEvent(slot=slot, files=dict(files)), self.name, run)

    def record_changed(self, run: str, changes: Sequence[folder.RecordChange]) -> None:
        """Recorded files that the run itself has changed."""
        event = catalogue.RecordChangedEvent(changes=[asdict(change) for change in changes])
        self.ledger.record(event, self.name, run)

    def forget_plans(self) -> None:
        """Plans of runs that have ended are not needed any more."""
        with self.ledger.write():
            self.ledger.execute(
                "DELETE FROM plans WHERE study=?1 AND run IN (SELECT id FROM runs WHERE study=?1 AND state='ended')",
                (self.name,),
            )

    def started(self, run: str, pid: int | None, at: float) -> None:
        self.ledger.execute("UPDATE runs SET pid=?, started=? WHERE study=? AND id=?", (pid, at, self.name, run))

    def returned(self, run: str, why: str) -> None:
        """The run could not start and goes back to the planned ones."""
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

    # -- verdicts

    def set_judge_state(self, judge_state: Mapping[str, Any]) -> None:
        """Keep what the judge has decided; under which conditions, and what it decided under others, stays."""
        before = self.judge_state() or {}
        text = dump_json({**{key: before[key] for key in ("conditions", "others") if key in before}, **judge_state})
        self.ledger.execute("UPDATE studies SET judge_state=? WHERE name=?", (text, self.name))
        self.ledger.record(catalogue.JudgeStateEvent(hash=hash_text(text)), self.name)

    def restart_judge(self, why: str) -> None:
        """Take back all verdicts but those of people; the events that gave them stay in the chain."""
        self.ledger.execute("UPDATE studies SET judge_state=NULL, best=NULL WHERE name=?", (self.name,))
        self.ledger.execute("UPDATE runs SET verdict=NULL WHERE study=? AND verdict!='void'", (self.name,))
        self.ledger.execute("DELETE FROM verdicts WHERE study=? AND verdict!='void'", (self.name,))
        self.ledger.record(catalogue.JudgeRestartedEvent(why=why), self.name)

    def judged(self, run: str, verdict: str, evidence: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """A verdict on a run, with all that it rests on, and the files of the run that say so."""
        text, now = dump_json(evidence), time.time()
        if redact_text(text) != text:
            evidence = redact_data(dict(evidence))
            text = dump_json(evidence)
        self.ledger.execute("UPDATE runs SET verdict=? WHERE study=? AND id=?", (verdict, self.name, run))
        self.ledger.execute("INSERT INTO verdicts VALUES (?,?,?,?,?)", (self.name, run, now, verdict, text))
        event = catalogue.JudgedEvent(verdict=verdict, evidence=dict(evidence), files=dict(files))
        self.ledger.record(event, self.name, run, when=now)

    def watched(self, run: str, rule: str, text: str, stops: bool) -> None:
        """What a watch rule saw in a running run."""
        self.ledger.record(catalogue.WatchedEvent(rule=rule, text=text, stops=stops), self.name, run)

    def ask_held_out(self, champion: str, challenger: str, n: int, text: str) -> None:
        self.ledger.record(catalogue.HeldOutReadEvent(against=champion, n=n, text=text), self.name, challenger)

    # -- sessions

    def begin_session(self, host: str, pid: int, ticks: int) -> int:
        now = clock.now()  # in all columns: what a session used does not depend on the machine's clock
        with self.ledger.write():
            cursor = self.ledger.execute(
                "INSERT INTO sessions (study, host, pid, ticks, began, seen) VALUES (?,?,?,?,?,?)",
                (self.name, host, pid, ticks, now, now),
            )
            assert cursor.lastrowid is not None
            event = catalogue.EngineBeganEvent(session=cursor.lastrowid, host=host, pid=pid, ticks=ticks)
            self.ledger.record(event, self.name, when=now)
            return cursor.lastrowid

    def heartbeat(self, session: int) -> None:
        self.ledger.execute("UPDATE sessions SET seen=? WHERE id=?", (clock.now(), session))

    def end_session(self, session: int, how: str, why: str = "") -> None:
        with self.ledger.write():
            now = clock.now()
            self.ledger.execute("UPDATE sessions SET seen=?, ended=?, how=? WHERE id=?", (now, now, how, session))
            event = catalogue.EngineEndedEvent(session=session, how=how, why=shorten(why))
            self.ledger.record(event, self.name, when=now)

    # -- agents

    def record_agent(
        self,
        event: catalogue.AgentAskedEvent | catalogue.AgentAnsweredEvent | catalogue.FilesChangedEvent,
        when: float | None = None,
    ) -> None:
        """Record the start or the end of a call, or files that changed meanwhile."""
        self.ledger.record(event, self.name, when=when)

    def agent_unconfined(self, text: str) -> None:
        """Record that an agent of this study can write outside its folder."""
        self.ledger.record(catalogue.AgentNotConfinedEvent(text=text), self.name)

    def say(self, text: str) -> None:
        """What a person wants agents to know."""
        with self.ledger.write():
            self.ledger.record(catalogue.SaidEvent(text=shorten(text)), self.name)

    # -- requests to a running engine

    def command(self, what: str, *, run: str | None = None, why: str | None = None) -> None:
        now = time.time()
        why = None if why is None else redact_text(why)
        data = {key: value for key, value in (("run", run), ("why", why)) if value is not None}
        with self.ledger.write():
            self.ledger.execute(
                "INSERT INTO commands (study, at, what, data) VALUES (?,?,?,?)",
                (self.name, now, what, dump_json(data)),
            )
            self.ledger.record(catalogue.AskedEvent(what=what, why=why), self.name, run, when=now)

    def take_commands(self) -> list[tuple[str, dict[str, Any]]]:
        rows = self.ledger.rows("SELECT id, what, data FROM commands WHERE study=? AND done IS NULL", (self.name,))
        if rows:
            with self.ledger.write():
                self.ledger.execute(
                    "UPDATE commands SET done=? WHERE study=? AND done IS NULL", (time.time(), self.name)
                )
        return [(row["what"], load_own_json(row["data"])) for row in rows]
