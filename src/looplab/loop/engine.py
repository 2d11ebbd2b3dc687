"""The engine: propose → guard → launch → measure → record, until the budget is used or nothing is left to try.

It may be killed between any two lines. What is decided is in the ledger before anything is started; what was started
is in the run folders, written by processes that outlive the engine. A new engine starts by comparing the two.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sqlite3
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from looplab.decide.base import describe_error, is_environmental
from looplab.decide.belief import recorded_belief
from looplab.decide.history import STOPPED_AT_RUNG
from looplab.errors import LabError
from looplab.judge.base import Judgement
from looplab.launch import supervisor
from looplab.launch.base import (
    BatchExecutor,
    Delayed,
    Executor,
    Exit,
    LaunchEvent,
    LaunchSpec,
    Queued,
    Rejected,
    Slot,
    SlotsChanged,
    Started,
    Unreachable,
    traits_of,
)
from looplab.launch.pool import SlotPool
from looplab.ledger.anchors import Publisher
from looplab.ledger.backup import Backups
from looplab.ledger.catalogue import BeliefEvent
from looplab.ledger.ledger import REPAIR, DamagedError, Ledger
from looplab.ledger.rebuild import check_folders
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.changes import CodeMonitor, alarm_if_reconfigured
from looplab.loop.commands import EngineControl
from looplab.loop.decision import Decider, base_runs, decide_base
from looplab.loop.events import AlarmRaised, Listener, Note, RunAdopted, RunEnded, RunLaunched, VerdictGiven, Waiting
from looplab.loop.flags import best_run, switch_conditions
from looplab.loop.importing import complete_imports
from looplab.loop.judging import StudyJudge, VerdictRecorder
from looplab.loop.models import ModelKeeper
from looplab.loop.outbox import Outbox
from looplab.loop.outcome import Ending, HaltError, Outcome, Progress
from looplab.loop.place import PlaceMonitor, note_place
from looplab.loop.planning import Planner
from looplab.loop.prepare import PREPARED, Prepared, Preparer
from looplab.loop.recording import Recorder
from looplab.loop.remeasure import remeasure
from looplab.loop.setup import Setup, agent_warnings, resolved_configuration
from looplab.loop.watching import WATCHED, LiveMetrics, RunMonitor
from looplab.measure.run_metrics import is_better, tie_break_value
from looplab.report import labbook
from looplab.report.wording import plural
from looplab.runs import folder
from looplab.runs.code import name_files
from looplab.runs.durable import Syncer
from looplab.runs.redact import remember

TICK_S = 0.1
"""Seconds that the engine sleeps at most: a person's request is noticed within this time."""
POINT_S = 0.2
COLLECTED = 20_000
"""New objects after which the garbage collector runs: hardly any of the engine's objects are in cycles, and Python's
default of 700 costs a short run a twentieth of its time."""
SHORT_S = 0.3
"""Runs that take fewer seconds than this on average are prequeued on their slot."""
GATHER_S = 0.02
"""Seconds that the engine waits at most for more of very short runs to end, while every slot has runs to start: one
transaction for several runs costs little more than for one."""
REMEMBERED = 1000
"""Recent runs that are checked after a crash for lines missing in the lab book."""
HEARTBEAT_S = 5.0
BELIEF_S = 1.0
"""Seconds between two beliefs of the model, at least."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
PRUNE_S = 10.0
"""Seconds between two searches for frozen code that is no longer needed."""
UNFINISHED = ("planned", "queued", "running", Role.IMPORTED)
"""Counts that are not ended runs of the study itself."""
PORTION_S = 0.1
"""Seconds that reading metrics may take before the engine does everything else again."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that is prepared to be started."""

    run: RunRow
    spec: LaunchSpec
    prepared: Prepared


WARNINGS = {"alarm": AlarmRaised, "note": Note}


class Engine:
    def __init__(self, setup: Setup, ledger: Ledger, executor: Executor, tell: Listener = lambda event: None) -> None:
        self.setup = setup
        self.study = StudyLedger(ledger, setup.study.name)
        self.folder = folder.study_folder(setup.lab, setup.study.name)
        self.running: dict[str, RunRow] = {}
        self.best: RunRow | None = None
        self.progress = Progress()
        self._ledger = ledger
        self._executor = executor
        self._batch = executor if isinstance(executor, BatchExecutor) else None
        self._traits = traits_of(executor)
        self._outbox = Outbox(self.folder, setup.study.name, tell)
        self._tell = self._outbox.tell
        self._preparer = Preparer(setup, freezes=self._traits.queues and setup.study.executor.freeze)
        self._base_keys = [decide_base(setup, base).key for base in setup.bases]
        self._study_judge = StudyJudge(setup.study, self.study, self.folder) if setup.study.judge is not None else None
        decider = Decider(setup, self.study)
        self._planner = Planner(
            setup, self.study, decider, self._study_judge, self._tell, self._outbox.log_line, executor.wake,
            warn=self._warn,
        )  # fmt: skip
        self._monitor = RunMonitor(setup, self.study, self.folder, self._tell) if setup.watches else None
        self._live = LiveMetrics(setup, self.folder, self._monitor, self._tell)
        self.run_metrics = self._live.of_run
        self._recorder = Recorder(setup, self.study, self.folder, self._preparer, self._outbox, self.run_metrics)
        self._code = CodeMonitor(self.study, self.folder, self._outbox)
        self._models: ModelKeeper | None = None
        if setup.study.warm_start is not None:
            self._models = ModelKeeper(setup.study.warm_start, self.folder, executor.wake, self.study)
        self._budget_used: str | None = None
        self._verdicts = VerdictRecorder(self.study, self.folder, self._outbox)
        checks_devices = setup.devices.present and not setup.share
        self._pool: SlotPool[Ready] = SlotPool(
            setup.slots, setup.devices.why_busy if checks_devices else None, lambda text: self._tell(Waiting(text))
        )
        self._adopting: set[str] = set()
        self._unreachable: set[str] = set()  # runs that may be alive on another host, or in another PID namespace
        self.control = EngineControl(
            self.study, executor, self._pool, self.running, self._unreachable, grace=setup.study.launch.grace,
            tell=self._tell,
        )  # fmt: skip
        remember({**os.environ, **setup.study.launch.env})
        self._finished: list[tuple[RunRow, Exit]] = []
        self._retried: list[RunRow] = []
        """Runs of the open transaction that are attempted again: once that is in the ledger, they are queued."""
        self._pruned_at = 0.0
        self._added_files: list[str] = []  # files that runs have written into frozen code, as reported last
        self._latest: RunRow | None = None
        self._pointers_due = False
        self._pointers_updated = 0.0
        self._anchors: Publisher | None = None
        self._promoted = False
        self._luckiest: RunRow | None = None
        """The run with the best objective, in a study without a judge."""
        self._has_belief = False
        self._belief_due = False
        self._belief_at = 0.0  # the earliest time of the next belief (`time.monotonic()`)

    # -- main loop

    def run(self) -> Outcome:
        """Run the study until nothing is left to do. The caller holds the study's lock."""
        complete_imports(self.study, self.folder)
        check_folders(self._ledger, self.setup.lab, self.study.name)
        switched = self._configure()
        session = self.study.begin_session(socket.gethostname(), os.getpid(), supervisor.start_ticks(os.getpid()))
        folder.make_study_folder(self.folder)
        self._syncer = Syncer(self.folder)
        if self.setup.study.anchor is not None:
            self._anchors = Publisher(self._ledger.path, self.setup.lab, self.setup.study.anchor, self._outbox.tell_now)
            self._anchors.request()
        self._backups = Backups(self._ledger.path, self._outbox.tell_now)
        self._place = PlaceMonitor(self.setup.lab, self.setup.study.name, self._ledger.path)
        move = note_place(self.setup.lab, self.setup.study.name, self._ledger)
        for text in (move.text if move is not None else None, switched):
            if text is not None:
                self._tell(Note(text))
        how = "failed"
        gc.freeze()  # imported modules live as long as the engine: the collector need not scan them
        thresholds = gc.get_threshold()
        gc.set_threshold(COLLECTED, *thresholds[1:])
        try:
            self.study.take_commands()  # requests to an engine that is gone
            self._warn_of_agents()
            self._recover()
            self._loop(session)
            outcome = self._conclude()
            how = outcome.ending.value
            return outcome
        except OSError as error:
            self._still_ours()  # which explains the error
            where = error.filename or self.folder
            if error.errno in FULL:
                raise HaltError(_full(error.strerror or "", where)) from error
            raise HaltError(f"{error.strerror or error}: {where}", hint="mend it, then `looplab resume`") from error
        except sqlite3.OperationalError as error:
            self._still_ours()
            raise HaltError(_full(str(error), self._ledger.path)) from error
        except DamagedError:
            self._still_ours()
            raise
        except sqlite3.DatabaseError as error:
            self._still_ours()
            raise DamagedError(f"the ledger is damaged: {error}", file=self._ledger.path, hint=REPAIR) from error
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()  # a Python session may go on for long, and modules expect to be collected at its exit
            self._close(session, how)

    def _configure(self) -> str | None:
        """Record the objective and the configuration; return a sentence if the conditions of the call changed."""
        objective = self.setup.study.objective
        is_full = not self.setup.options.asked_only
        at = objective.at if objective and is_full else None
        self.study.open(objective.metric if objective else None, objective.goal if objective else "min", at)
        configuration = resolved_configuration(self.setup)
        if not is_full:  # its options do not decide how the study continues
            configuration["options"] = self.study.configured_options() or configuration["options"]
        before, now = self.study.configuration(), self.study.configure(configuration)
        self._verdicts.configuration = now
        if not is_full:
            return None
        if before is not None and before != now:
            alarm_if_reconfigured(self.study, self._outbox)
        if others := self.study.not_comparable():
            changed = plural(len(others), "run is", "runs are")
            self._outbox.tell_now(f"the objective was changed: {changed} measured again by the new one")
            remeasure(self.setup, self.study, others)
        return switch_conditions(self.setup, self.study) if self.setup.bases else None

    def _loop(self, session: int) -> None:
        last_heartbeat = time.monotonic()
        while True:
            self._handle_commands()
            # Two transactions: what is decided is in the ledger before any of it is started.
            self._plan()
            if self._is_over():
                return
            if self._pool.free and self._planner.queue:
                self._refresh_capsule()
                with self._ledger.write():
                    self._launch()
            self._listen()
            self._update_belief()
            if self._models is not None:
                self._models.keep(self._models.take(), self._recorder, self._outbox)
            self._outbox.flush()
            if time.monotonic() - last_heartbeat > HEARTBEAT_S:
                self.study.heartbeat(session)
                last_heartbeat = time.monotonic()
                if self._monitor is not None and self._monitor.budgets:
                    self._budget_used = self._planner.spent()

    def _conclude(self) -> Outcome:
        """Give the last verdicts and wait for the last copies, after the last run."""
        control = self.control
        if not (control.failed or control.stopping):
            self._update_belief(final=True)
        if self._study_judge is not None and not (control.ending or self.setup.options.asked_only):
            with self._ledger.write():
                self._record_judgement(self._study_judge.close())
                said = self._study_judge.last_look()
                if said is not None:
                    self._tell(VerdictGiven(said))
                    self._outbox.log("end of the study", said, "no promotion")
            self._verdicts.write_summaries()
        if self._models is not None:
            self._models.keep(self._models.finish(), self._recorder, self._outbox)
        self._still_ours()
        self._prune_code()
        ending = Ending.STOPPED if control.stopping else Ending.DRAINED if control.draining else Ending.DONE
        return Outcome(Ending.FAILED if control.failed else ending, control.why or self._planner.why)

    def _close(self, session: int, how: str) -> None:
        self._planner.close()
        if self._models is not None:
            self._models.close()
        if self._monitor is not None:
            self._monitor.close()
        is_ours = self._place.lost() is None  # else nothing is written where the lab was
        with contextlib.suppress(OSError):
            if is_ours:
                self._outbox.flush()
                self._update_pointers()
        with contextlib.suppress(sqlite3.DatabaseError, LabError):  # then the halt is reported already
            self.study.end_session(session, how, self.control.why if self.control.failed else "")
        if self._anchors is not None:
            self._anchors.close()
        self._backups.close(copy=is_ours)
        self._syncer.close()  # meanwhile: a backup syncs itself
        self._place.close()
        self._backups.wait()  # whoever has run a study may move or delete its lab

    def _still_ours(self) -> None:
        """Raise HaltError if the lab, its ledger or the study's lock were moved or replaced: further writes would be
        lost, or land in another lab. Trainings continue, and `resume` adopts them."""
        lost = self._place.lost()
        if lost is not None:
            raise HaltError(lost, hint="trainings that run continue; `looplab resume` at the lab's place adopts them")

    def _warn(self, kind: str, text: str) -> None:
        """Report on agents: to listeners, in the lab book and, for an alarm, through the alerts of the watch rules."""
        self._tell(WARNINGS[kind](text))
        self._outbox.log(kind, text)
        if kind == "alarm" and self._monitor is not None:
            self._monitor.alert_all(text)

    def _warn_of_agents(self) -> None:
        """Report once which agents of the study can write outside their folders."""
        if self.setup.options.jobs is not None or self.setup.options.asked_only:
            return
        for warning in agent_warnings(self.setup.study, self.setup.lab):
            with self._ledger.write():
                self.study.agent_unconfined(warning)
            self._warn("alarm", warning)

    def slot_of(self, run_id: str) -> str:
        slot = self._pool.slot_of(run_id)
        return slot.name if slot else "-"

    def _is_over(self) -> bool:
        """Return whether nothing runs and nothing more will be started; called after planning."""
        ending = self.control.ending
        # Unreachable runs stay open, for an engine that can see them.
        running = self.running.keys() - self._unreachable if ending else self.running
        if running or self._finished or self._pool.prequeued():
            return False
        planner = self._planner
        return ending or not (planner.queue or planner.thinking or planner.resting or self.control.paused)

    # -- after a crash

    def _recover(self) -> None:
        """Compare the ledger with the folders: adopt live runs, record ended ones, queue those that never started."""
        self.best = self._luckiest = self.study.best()
        self._has_belief = self._study_judge is None and recorded_belief(self.study) is not None
        if self._has_belief:
            self._luckiest = best_run(self.setup.study, self.study, self.setup.conditions, self.folder)
        counts = self.study.counts()
        self.progress.done = sum(n for state, n in counts.items() if state not in UNFINISHED)
        self.progress.failed = counts.get("failed", 0)
        self.study.forget_plans()
        folder.sweep(self.folder)
        planned = []
        for run in self.study.runs_open():
            run_dir = self.folder / run.id
            record_dir = folder.record_folder(run_dir)
            folder.sweep(record_dir)
            if run_dir.is_dir() and self._adopt(run, run_dir, record_dir):
                name = run.slot
                if name is None:  # the engine was killed before it recorded that
                    name = folder.read_json(run_dir, "run.json", strict=False).get("slot")
                self._pool.claim(run.id, name)
                self._adopting.add(run.id)
                self.running[run.id] = run
                if run.state == "planned":
                    with self._ledger.write(), self._recorder.tolerant(run, "its record"):
                        files = [folder.record_name(run_dir, file) for file in PREPARED]
                        self.study.launched(
                            run.id, str(name or "?"), folder.hash_files(run_dir, files),
                            attempt=run.attempt, queued=self._traits.queues,
                        )  # fmt: skip
            elif self.study.plan_of(run.id) is None or (
                # It was handed over, and its folder was deleted: whether it has started cannot be known any more.
                run.state != "planned" and not folder.record_file(run_dir, "run.json").exists()
            ):
                self._finished.append((run, Exit(None, reason="lost", message="its folder is gone", ended=time.time())))
            else:
                if run.state in ("queued", "running"):
                    self.study.returned(run.id, "the engine ended before it was started")
                planned.append(run)
        self._prune_code()
        self._planner.recover(planned)
        if self._study_judge is not None:
            self._study_judge.load()
            self._verdicts.complete_summaries()
        if self._monitor is not None:
            for run_id, rule in self._monitor.recover(list(self.running.values())):
                self.control.stop_run(run_id, f"{WATCHED}{rule}")
        if self._adopting:
            # Runs that ended meanwhile are reported at once; the others are alive.
            self._listen(0.0)
            for run_id in (self._adopting & self.running.keys()) - self._unreachable:
                state = "queued" if self.running[run_id].state == "queued" else "running"
                self._tell(RunAdopted(f"run {run_id} is still {state}: adopted", run_id))
        if self._study_judge is not None:
            # Requests of the judge are not recorded: they are computed again.
            with self._ledger.write():
                self._judge([])
            self._verdicts.write_summaries()
        ended = [run for run in self.study.runs(state="ended", limit=REMEMBERED) if run.role != Role.IMPORTED]
        self._latest = ended[-1] if ended else None
        if self._models is not None:
            self._models.recover(self.best, ended, self.study.kept_files())
        self._pointers_due = True
        missing = labbook.missing(self.folder, [run.id for run in ended])
        if missing:
            self._note_in_book([run for run in ended if run.id in missing])

    def _adopt(self, run: RunRow, run_dir: Path, record_dir: Path) -> bool:
        # The first attempt is not named: executors of plug-ins may know no others.
        more = (run.attempt,) if run.attempt > 1 else ()
        return self._executor.adopt(run.id, run_dir, record_dir, *more)

    def _plan(self) -> None:
        """Plan more runs if a slot is free and no run waits for it."""
        if self.control.ending:
            return
        self._planner.refresh()
        if self._pool.prequeued() or self.control.paused or self._planner.queue or not self._pool.free:
            return
        with self._ledger.write():
            self._planner.plan(idle=not self.running and not self._finished, free=self._pool.free)
        self.progress.total = self._planner.total
        if self._planner.failure is not None:
            self._end_early(self._planner.failure)

    def _fill_round(self) -> None:
        if not self.control.ending:
            self._planner.fill()

    def _end_early(self, why: str) -> None:
        """Start no more runs, and end with a failure when the current ones have ended."""
        self.control.fail(why)
        self._tell(AlarmRaised(f"stopping: {why}"))
        self._outbox.log("ended early", why, "starts nothing more", "`looplab resume` continues")

    # -- launch

    def _refresh_capsule(self) -> None:
        """Read the state of the code from git before a transaction begins: it may take long."""
        if self._planner.queue:
            self._preparer.refresh()

    def _prune_code(self) -> None:
        """Remove frozen code that no open run needs."""
        self._pruned_at = time.monotonic()
        if self._preparer.freezer is None:
            return
        added = self._preparer.freezer.prune(run.id for run in self.study.runs_open())
        if added and added != self._added_files:
            text = f"runs have written into their frozen code, which is kept: {name_files(added)} in {self.folder}"
            self._tell(Note(f"{text}; let them write to {{out_dir}}"))
        self._added_files = added

    def _launch(self) -> None:
        """Give every free slot its next run."""
        while self._planner.queue and self.control.may_start:
            slot = self._pool.take()
            if slot is None:
                return
            ready = self._prepare(slot)
            if ready is None:
                self._pool.put_back(slot)
                return
            self._executor.start(ready.spec)
            self._pool.hold(ready.run.id, slot)
            self._launched(ready, slot)

    def _launched(self, ready: Ready, slot: Slot) -> None:
        run = ready.run
        self._planner.plans.pop(run.id, None)
        self.running[run.id] = run
        self._recorder.prepared[run.id] = ready.prepared
        self.study.launched(run.id, slot.name, ready.prepared.hashes, attempt=run.attempt, queued=self._traits.queues)
        said = run.reason if run.attempt == 1 else f"attempt {run.attempt}"
        self._tell(RunLaunched(f"run {run.id} in {slot.name}: {said}", run.id, slot=slot.name))
        self._code.launched(run, ready.prepared)

    def _prequeue(self) -> None:
        """If runs are short, hand over the next run of each slot while the slot is still busy; several if they are so
        short that they would end before the next one is handed over."""
        mean = self.progress.mean_s
        if (
            not self._traits.prequeues
            or not self._planner.queue
            or mean is None
            or mean > SHORT_S
            or not self.control.may_start
        ):
            return
        starts = []
        for n in range(1, self._traits.prequeue_depth + 1 if mean < SHORT_S / 10 else 2):
            for run_id, slot in self._pool.without_successors(n):
                ready = self._prepare(slot)
                if ready is not None:
                    starts.append((ready.spec, run_id))
                    self._pool.prequeue(ready.run.id, slot, ready)
        if self._batch is not None:
            self._batch.start_all(starts)
        else:
            for spec, after in starts:
                self._executor.start(spec, after)

    def _gather(self) -> None:
        """Wait until about half of the prequeued runs of each slot have ended, if runs are very short."""
        depth, mean = self._traits.prequeue_depth, self.progress.mean_s
        if mean is not None and mean < SHORT_S / 10 and not (self._pool.free or self._pool.without_successors(depth)):
            time.sleep(min(GATHER_S, mean * depth / 2))

    def _prepare(self, slot: Slot) -> Ready | None:
        """Create the folder of the next run; None if none is queued. A run that cannot be prepared has failed, and the
        next one takes its place."""
        while self._planner.queue:
            run = self._planner.queue.popleft()
            decision = self._planner.plans.get(run.id)
            plan = decision.plan if decision else self.study.plan_of(run.id)
            assert plan is not None
            try:
                spec, prepared = self._preparer.prepare(run, plan, slot)
                return Ready(run, spec, prepared)
            except Exception as error:  # whatever its config contains, the others are run
                self._still_ours()
                if is_environmental(error):
                    raise
                now = time.time()
                outcome = Exit(None, reason="not started", message=describe_error(error), started=now, ended=now)
                self._finished.append((run, outcome))
        return None

    # -- measure and record

    def _listen(self, timeout: float | None = None) -> None:
        if timeout is None:
            timeout = 0.0 if self._finished or self._live.behind else TICK_S
            if timeout:
                self._gather()
        events = self._executor.poll(timeout)
        self._still_ours()
        if events or self._finished:
            self._refresh_capsule()
            with self._ledger.write():
                for event in events:
                    self._handle_event(event)
                # Start the next run before recording the last one: a device must not wait for a file.
                self._launch()
                until = time.monotonic() + PORTION_S
                finished, self._finished = self._finished, []
                ended = []
                for run, exit_ in finished:
                    run_dir = self.folder / run.id
                    if self._recorder.has_read(run, exit_, run_dir, until):
                        ended.append(self._record(run, exit_, run_dir))
                    else:
                        self._finished.append((run, exit_))
                if self._study_judge is not None and ended:
                    self._judge(ended)
                planned_again = sum(self._check_base(run) for run in ended)
                if not planned_again:  # else it could be started before it is committed
                    self._prequeue()
                self._fill_round()
            self._planner.queue.extendleft(reversed(self._retried))
            self._retried.clear()
            self._verdicts.write_summaries()
            if self._promoted and self._anchors is not None:
                self._anchors.request()
            self._promoted = False
            if ended:
                self._note_in_book(ended)
                newest = max(ended, key=lambda run: run.n)
                self._latest = newest if self._latest is None or newest.n > self._latest.n else self._latest
                self._pointers_due = True
                freezer = self._preparer.freezer
                if freezer is not None and freezer.has_old and time.monotonic() - self._pruned_at > PRUNE_S:
                    self._prune_code()
            self._syncer.request()
        else:
            self._fill_round()
        if self._pointers_due and time.monotonic() - self._pointers_updated > POINT_S:
            self._update_pointers()
        self._read_metrics()

    def _handle_event(self, event: LaunchEvent) -> None:
        if isinstance(event, Started):
            self._unreachable.discard(event.run_id)
            if event.run_id in self.running:
                self._started(event)
        elif isinstance(event, Queued):
            self._queued(event)
        elif isinstance(event, SlotsChanged):
            self._pool.add(event.up)
            self._pool.remove(event.down)
        elif isinstance(event, Rejected):
            self._requeue(event)
        elif isinstance(event, Unreachable):
            self._unreachable.add(event.run_id)
            self._tell(
                Waiting(
                    f"run {event.run_id} was started in {event.where}, where its processes cannot be seen from here; "
                    f"waiting for its end (`looplab stop {event.run_id}` gives it up)",
                    event.run_id,
                )
            )
        elif isinstance(event, Delayed):
            said = f"run {event.run_id} has ended, but {event.path} cannot be written: is the disk full or read-only?"
            self._tell(Waiting(f"{said} Waiting until it can", event.run_id))
        else:
            self._unreachable.discard(event.run_id)
            if event.run_id not in self.running:
                early = self._pool.forget(event.run_id)
                if early is None:
                    return
                self._launched(early, early.spec.slot)  # prequeued, and started before its turn
            run = self.running.pop(event.run_id)
            if event.exit.reason is None or not self._try_again(run, event.exit):
                self._finished.append((run, event.exit))
            successor = self._pool.release(event.run_id)
            if successor is not None:
                slot, ready = successor
                self._launched(ready, slot)

    def _started(self, event: Started) -> None:
        """Record where a run is, and when it started."""
        run, place = self.running[event.run_id], event.place
        self.study.started(
            run.id, place.pid, event.at, host=place.host, job=place.job, devices=place.devices, cores=place.cores,
            was_queued=self._traits.queues,
        )  # fmt: skip
        self.running[run.id] = replace(
            run, state="running", pid=place.pid, started=event.at, host=place.host, job=place.job
        )
        if self._traits.queues:
            where = f"job {place.job} on {place.host}" if place.job else place.host
            self._tell(Note(f"run {run.id} runs: {where}", run.id))
            self._code.started(run.id, self._recorder.prepared.get(run.id), self._preparer)

    def _queued(self, event: Queued) -> None:
        run = self.running.get(event.run_id)
        if run is None:
            return
        self.study.queued(run.id, event.job, event.why)
        self.running[run.id] = replace(run, state="queued", job=event.job)
        self._tell(Waiting(f"run {run.id} is queued: job {event.job} ({event.why})", run.id))

    def _try_again(self, run: RunRow, exit_: Exit) -> bool:
        """Plan another attempt at a run that was lost by its place; return False if the policy allows no more."""
        if not exit_.is_lost or exit_.attempt != run.attempt:
            return False
        reason = str(exit_.reason)
        allowed = self.setup.study.retry.allowed(reason, self._traits.retries)
        before = self.study.lost_attempts(run.id).count(reason) if allowed else 0
        if before >= allowed or self.study.plan_of(run.id) is None:
            return False
        again = self.study.attempt_ended(
            run, reason=reason, why=str(exit_), code=exit_.code, signal=exit_.signal, started=exit_.started,
            ended=exit_.ended or time.time(),
        )  # fmt: skip
        self._recorder.prepared.pop(run.id, None)
        self.run_metrics.pop(run.id, None)
        self._adopting.discard(run.id)
        self._retried.append(again)
        text = (
            f"run {run.id}: attempt {run.attempt} was {reason} ({exit_}); it is tried again ({before + 1} of {allowed})"
        )
        self._tell(Note(text, run.id))
        self._outbox.log(f"run {run.id}: attempt {run.attempt}", str(exit_), "tried again")
        return True

    def _requeue(self, refused: Rejected) -> None:
        """Put a run that was not started back into the queue."""
        ready = self._pool.forget(refused.run_id)
        if ready is not None:
            self._planner.queue.appendleft(ready.run)
            return
        run = replace(self.running.pop(refused.run_id), state="planned", slot=None, job=None)
        self._recorder.prepared.pop(run.id, None)
        self._adopting.discard(run.id)
        self._pool.reject(run.id, refused.holder)
        self.study.returned(run.id, refused.holder or "it was not started in time")
        self._planner.queue.appendleft(run)

    def _record(self, run: RunRow, exit_: Exit, run_dir: Path) -> RunRow:
        """Record how a run ended and what it measured, and what follows from it."""
        row, metrics, note = self._recorder.record(run, exit_, run_dir)
        objective, wanted = row.objective, self.setup.study.objective
        self.progress.add(row)
        if self._monitor is not None:
            with self._recorder.tolerant(run, "watch rules"):
                self._monitor.ended(row, metrics, by_itself=exit_.reason is None)
        if self._models is not None and row.status == "ok":
            self._models.request("latest", row)
        if self._study_judge is None and objective is not None and self._is_better(row, objective):
            self._luckiest = row
            if not self._has_belief:
                self._set_best(row)
        self._belief_due = self._belief_due or objective is not None
        by_rule = (exit_.reason or "").startswith(WATCHED) and exit_.reason != STOPPED_AT_RUNG
        if self._study_judge is not None and by_rule and run.role in DECIDED:
            row = self._verdicts.discard_stopped(row, str(exit_.reason).removeprefix(WATCHED))
        is_best = self.best is row
        said = f"{row.status} in {row.seconds or 0:.1f} s"
        if objective is not None and wanted is not None:
            said += f", {wanted.metric} {objective:.6g}" + (" (best)" if is_best else "")
        note = "; ".join(filter(None, (note, *self._recorder.take_notes(run.id))))
        text = f"run {run.id} {said}" + (f": {note}" if note else "")
        self._tell(
            RunEnded(text, run.id, status=row.status or "", objective=objective, seconds=row.seconds, is_best=is_best)
        )
        return row

    def _set_best(self, run: RunRow) -> None:
        self.best = run
        self.study.set_best(run.id, run.objective)
        if self._models is not None:
            self._models.request("best", run)

    def _update_belief(self, *, final: bool = False) -> None:
        """Ask the model of the search which config it believes in, if runs have ended since.

        Without a judge, this is the best run. At most one twentieth of the time is spent on it before the end.
        """
        began = time.monotonic()
        if not self._belief_due or (began < self._belief_at and not final):
            return
        self._belief_due = False
        belief = self._planner.believe()
        self._belief_at = began + BELIEF_S + 20.0 * (time.monotonic() - began)
        if belief is None:
            return
        with self._ledger.write():
            self._ledger.record(BeliefEvent(**belief.to_dict()), self.study.name)
            if self._study_judge is None:
                self._has_belief = True
                if self.best is None or belief.best[0].run != self.best.id:
                    self._set_best(self.study.run(belief.best[0].run))
                    self._pointers_due = True

    def _check_base(self, run: RunRow) -> bool:
        """Start no more runs if no base config works; return whether a lost one was planned again."""
        setup = self.setup
        if run.role != Role.BASE or setup.keep_going or setup.options.asked_only or not setup.is_unusable(run):
            return False
        if run.status == "lost":
            self._planner.retry_base(run)
            return True
        done = base_runs(setup, self.study)
        latest = [runs[-1] for base in self._base_keys if (runs := done.get(base))]
        if len(latest) < len(self._base_keys) or not all(setup.is_unusable(one) for one in latest):
            return False
        self._end_early(f"the base config {run.base} {_trouble_of(run)}, so nothing can be compared with it")
        return False

    # -- judge

    def _judge(self, ended: list[RunRow]) -> None:
        """Let the judge evaluate the ended runs, and record what it decides; inside the transaction."""
        assert self._study_judge is not None
        for run in ended:
            self._study_judge.add_run(run, self._recorder.fingerprints.pop(run.id, ""))
        judgement = self._study_judge.evaluate(self.study.runs_open())
        if judgement is not None:
            self._record_judgement(judgement)

    def _record_judgement(self, judgement: Judgement) -> None:
        champion = self._verdicts.record(judgement)
        if champion is not None:
            self.best = champion
            if self._models is not None:
                self._models.request("best", champion)
            self._pointers_due = self._promoted = True

    def _is_better(self, run: RunRow, objective: float) -> bool:
        wanted = self.setup.study.objective
        best = self._luckiest
        if run.conditions != (best or self.setup).conditions:
            return False
        if best is None or best.objective is None or wanted is None:
            return True
        ours, theirs = (
            tie_break_value(wanted.then, self.folder / one) if objective == best.objective else None
            for one in (run.id, best.id)
        )
        return is_better(wanted, (objective, ours), (best.objective, theirs))

    def _update_pointers(self) -> None:
        """Update LATEST and BEST."""
        self._pointers_updated = time.monotonic()
        if self._latest is not None:
            folder.point(self.folder, "LATEST", self._latest.id)
        if self.best is not None:
            folder.point(self.folder, "BEST", self.best.id)
        self._ledger.note_head()
        self._pointers_due = False

    def _note_in_book(self, runs: list[RunRow]) -> None:
        wanted = self.setup.study.objective
        for run in runs:
            observed = "no objective measured"
            if run.objective is not None and wanted is not None:
                observed = f"{wanted.metric} = {run.objective:.6g}"
            action = f"run {run.id} (round {run.round}, {run.proposer}): {run.reason}"
            outcome = f"{run.status}" + (", best so far" if self.best is not None and self.best.id == run.id else "")
            self._outbox.log(action, observed, outcome, at=run.ended)
        self._outbox.write_book()

    def _read_metrics(self) -> None:
        alarms = self._live.poll(self.running, self._adopting, PORTION_S, self._budget_used)
        if alarms and self._monitor is not None:
            with self._ledger.write():
                for run, alarm in alarms:
                    self._monitor.apply(run, alarm)
            for run, alarm in alarms:
                if alarm.stops:
                    self.control.stop_run(run.id, f"{WATCHED}{alarm.rule}")

    # -- requests

    def request(self, what: Literal["stop", "drain"]) -> None:
        """Ask the engine to end; may be called from a signal handler or another thread."""
        self.control.request(what)

    def _handle_commands(self) -> None:
        self.control.handle(self._veto)

    def _veto(self, run_id: str, why: str) -> None:
        """Invalidate a run: do not start it, or stop it, and exclude it from being best."""
        for run in [run for run in self._planner.queue if run.id == run_id]:
            self._planner.queue.remove(run)
            now = time.time()
            self._finished.append((run, Exit(None, reason="veto", message=why, started=None, ended=now)))
        if run_id in self.running:
            self.control.stop_run(run_id, "veto")
        if self.best is not None and self.best.id == run_id:
            self.best = self.study.best()
            self._luckiest = best_run(self.setup.study, self.study, self.setup.conditions, self.folder)
            self._belief_due = True
            if self._models is not None and self.best is not None:
                self._models.request("best", self.best)


def _trouble_of(run: RunRow) -> str:
    if run.status == "ok":
        return f"ran (run {run.id}) but did not measure the objective"
    return f"ended with status {run.status} (run {run.id})"


def _full(what: str, where: object) -> str:
    return (
        f"cannot write {where or ''}: {what}. Running trainings continue and nothing is lost: "
        "make room (or the folder writable), then `looplab resume`"
    )
