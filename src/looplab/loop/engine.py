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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from looplab.config.paths import diff
from looplab.decide.base import describe_error, is_environmental
from looplab.errors import LabError
from looplab.judge.base import Judgement
from looplab.launch import supervisor
from looplab.launch.base import Delayed, Executor, Exit, LaunchEvent, LaunchSpec, Rejected, Slot, Started, Unreachable
from looplab.ledger.anchors import Publisher
from looplab.ledger.backup import Backups
from looplab.ledger.catalogue import AlarmEvent
from looplab.ledger.ledger import REPAIR, DamagedError, Ledger
from looplab.ledger.rebuild import check_folders
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.decision import Decider, base_runs, decide_base
from looplab.loop.events import (
    AlarmRaised,
    EngineEvent,
    Listener,
    Note,
    RunAdopted,
    RunEnded,
    RunLaunched,
    VerdictGiven,
    Waiting,
)
from looplab.loop.flags import switch_conditions
from looplab.loop.importing import complete_imports
from looplab.loop.judging import StudyJudge, SummaryWriter, evidence_of, record_judgement
from looplab.loop.models import KeptModel, ModelKeeper
from looplab.loop.place import PlaceMonitor, note_place
from looplab.loop.planning import Planner
from looplab.loop.prepare import PREPARED, Prepared, Preparer
from looplab.loop.remeasure import remeasure
from looplab.loop.setup import Setup, agent_warnings, compared_changes, resolved_configuration
from looplab.loop.warm_start import MODELS
from looplab.loop.watching import WATCHED, RunMonitor
from looplab.measure.base import Batch
from looplab.measure.discover import describe
from looplab.measure.run_metrics import RunMetrics, is_better, left_nothing, summarise, tie_break_value
from looplab.measure.summary import digest
from looplab.report import labbook
from looplab.runs import folder
from looplab.runs.code import code_differences, name_files
from looplab.runs.durable import Syncer
from looplab.runs.redact import redact_text, remember, scrub_file
from looplab.watch.watcher import Alarm

TICK_S = 0.1
"""Seconds that the engine sleeps at most: a person's request is noticed within this time."""
GAUGE_S = 0.5
WATCH_S = 0.2
"""Seconds between two readings of a run's metrics: longer if only people look at them."""
POINT_S = 0.2
SHORT_S = 0.3
"""Runs that take fewer seconds than this on average are prequeued on their slot."""
RECENT = 50
"""Recent runs that are searched for the code that ran last."""
MAX_NAMED = 100
"""Maximum number of changed files or keys in an event."""
REMEMBERED = 1000
"""Recent runs that are checked after a crash for lines missing in the lab book."""
HEARTBEAT_S = 5.0
DEVICE_CHECK_S = 2.0
LEFT_BEHIND = ("metrics.jsonl", "trainer_summary.json")
"""Files of the trainer that must not change after the run has ended."""
SATURATED = (0.0, 1.0, 100.0)
"""Values at which accuracies and success rates saturate: two equal ones prove nothing."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
PORTION_S = 0.1
"""Seconds that reading metrics may take before the engine does everything else again."""


class Ending(StrEnum):
    """How an engine ended."""

    DONE = "done"
    DRAINED = "drained"
    STOPPED = "stopped"
    FAILED = "failed"
    """No base config works, so nothing can be compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    ending: Ending
    why: str
    """Why nothing more is tried, in words."""


@dataclass(slots=True)
class Progress:
    """Progress of a study."""

    done: int = 0
    failed: int = 0
    total: int | None = None
    """Runs that there will be at most; None: unknown."""
    seconds: float = 0.0
    """Total seconds of the runs of this engine."""
    timed: int = 0

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.timed if self.timed else None


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that is prepared to be started."""

    run: RunRow
    spec: LaunchSpec
    prepared: Prepared


class HaltError(LabError):
    """The engine cannot continue, but nothing is lost."""

    exit_code = 1


class _Tolerant:
    """The context manager of `Engine._tolerant`; a class, since a generator would take five times as long."""

    __slots__ = ("_engine", "_run", "_what")

    def __init__(self, engine: Engine, run: RunRow, what: str) -> None:
        self._engine, self._run, self._what = engine, run, what

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return error is not None and self._engine._note_problem(self._run, self._what, error)


WARNINGS = {"alarm": AlarmRaised, "note": Note}


class Engine:
    def __init__(self, setup: Setup, ledger: Ledger, executor: Executor, tell: Listener = lambda event: None) -> None:
        self.setup = setup
        self.study = StudyLedger(ledger, setup.study.name)
        self.folder = folder.study_folder(setup.lab, setup.study.name)
        self.running: dict[str, RunRow] = {}
        self.run_metrics: dict[str, RunMetrics] = {}
        self.best: RunRow | None = None
        self.draining = False
        self.progress = Progress()
        self._ledger = ledger
        self._executor = executor
        self._tell_now = tell
        self._news: list[EngineEvent] = []
        self._lines: list[str] = []  # for the lab book
        self._preparer = Preparer(setup)
        self._base_keys = [decide_base(setup, base).key for base in setup.bases]
        self._study_judge = StudyJudge(setup.study, self.study, self.folder) if setup.study.judge is not None else None
        decider = Decider(setup, self.study)
        self._planner = Planner(
            setup, self.study, decider, self._study_judge, self._tell, self._log_line, executor.wake, warn=self._warn
        )
        self._monitor = None
        if setup.study.watch:
            self._monitor = RunMonitor(setup, self.study, self.folder, self._tell)
        self._models: ModelKeeper | None = None
        if setup.study.warm_start is not None:
            self._models = ModelKeeper(setup.study.warm_start, self.folder, executor.wake, self.study)
        self._budget_used: str | None = None
        self._printed: dict[str, str] = {}  # run → fingerprint of data and evaluator
        self._summaries = SummaryWriter(self.folder)
        self._free: deque[Slot] = deque(setup.slots)
        self._held: dict[str, Slot] = {}
        self._doubt: str | None = None  # why the code of the last run is unknown; reported once
        self._code: tuple[str, Mapping[str, Any]] | None = None  # the run launched last, and its code
        self._prepared: dict[str, Prepared] = {}  # run → the files it was started with
        self._prequeued: dict[str, Ready] = {}  # slot → the run that the executor starts there next
        self._blocked: dict[str, float] = {}  # slot → when to check its device again
        self._adopting: set[str] = set()
        self._unreachable: set[str] = set()  # runs that may be alive on another host, or in another PID namespace
        self._stopping = False
        self._paused = False
        self._requests: list[str] = []
        remember({**os.environ, **setup.study.launch.env})
        self._finished: list[tuple[RunRow, Exit]] = []
        self._ending: dict[str, list[str]] = {}  # ended run → notes on its files
        self._unread = False  # whether the time for reading was used up
        self._why = ""  # why the engine ended, unless the planner says it
        self._failed = False
        self._configuration = self.study.configuration()  # its hash, which verdicts refer to
        self._version = -1
        self._latest: RunRow | None = None
        self._pointers_due = False
        self._pointers_updated = 0.0
        self._anchors: Publisher | None = None
        self._promoted = False

    # -- main loop

    def run(self) -> Outcome:
        """Run the study until nothing is left to do. The caller holds the study's lock."""
        objective = self.setup.study.objective
        complete_imports(self.study, self.folder)
        check_folders(self._ledger, self.setup.lab, self.study.name)
        is_full = not self.setup.options.asked_only
        at = objective.at if objective and is_full else None
        self.study.open(objective.metric if objective else None, objective.goal if objective else "min", at)
        configuration = resolved_configuration(self.setup)
        if not is_full:  # its options do not decide how the study continues
            configuration["options"] = self.study.configured_options() or configuration["options"]
        before, self._configuration = self._configuration, self.study.configure(configuration)
        if is_full and before is not None and before != self._configuration:
            self._alarm_if_reconfigured()
        if is_full and (others := self.study.not_comparable()):
            self._note_now(f"the objective was changed: {len(others)} run(s) are measured again by the new one")
            remeasure(self.setup, self.study, others)
        switched = switch_conditions(self.setup, self.study) if is_full and self.setup.bases else None
        session = self.study.begin_session(socket.gethostname(), os.getpid(), supervisor.start_ticks(os.getpid()))
        folder.make_study_folder(self.folder)
        self._syncer = Syncer(self.folder)
        if self.setup.study.anchor is not None:
            self._anchors = Publisher(self._ledger.path, self.setup.lab, self.setup.study.anchor, self._note_now)
            self._anchors.request()
        backups = Backups(self._ledger.path, self._note_now)
        self._place = PlaceMonitor(self.setup.lab, self.setup.study.name, self._ledger.path)
        move = note_place(self.setup.lab, self.setup.study.name, self._ledger)
        if move is not None:
            self._tell(Note(move.text))
        if switched is not None:
            self._tell(Note(switched))
        how = "failed"
        gc.freeze()  # imported modules live as long as the engine: the collector need not scan them
        try:
            self.study.take_commands()  # requests to an engine that is gone
            self._warn_of_agents()
            self._recover()
            last_heartbeat = time.monotonic()
            while True:
                self._handle_commands()
                # Two transactions: what is decided is in the ledger before any of it is started.
                self._plan()
                if self._is_over():
                    break
                if self._free:
                    self._refresh_capsule()
                    with self._ledger.write():
                        self._launch()
                self._listen()
                if self._models is not None:
                    self._keep_models(self._models.take())
                self._tell_news()
                if time.monotonic() - last_heartbeat > HEARTBEAT_S:
                    self.study.heartbeat(session)
                    last_heartbeat = time.monotonic()
                    if self._monitor is not None and self._monitor.budgets:
                        self._budget_used = self._planner.spent()
            if self._study_judge is not None and not (self.draining or self._stopping or self.setup.options.asked_only):
                with self._ledger.write():
                    self._record_judgement(self._study_judge.close())
                    said = self._study_judge.last_look()
                    if said is not None:
                        self._tell(VerdictGiven(said))
                        self._log_line(labbook.line(time.time(), "end of the study", said, "no promotion", ""))
                self._summaries.write()
            if self._models is not None:
                self._keep_models(self._models.finish())
            self._still_ours()
            ending = Ending.STOPPED if self._stopping else Ending.DRAINED if self.draining else Ending.DONE
            ending = Ending.FAILED if self._failed else ending
            how = ending.value
            return Outcome(ending, self._why or self._planner.why)
        except OSError as error:
            self._still_ours()  # which explains the error
            where = error.filename or self.folder
            if error.errno in FULL:
                raise HaltError(_full(error.strerror or "", where)) from error
            raise HaltError(f"{error.strerror or error}: {where}", hint="mend it, then `looplab resume`") from error
        except sqlite3.OperationalError as error:
            self._still_ours()
            raise HaltError(_full(str(error), self._ledger.path)) from error
        except sqlite3.DatabaseError as error:
            raise DamagedError(f"the ledger is damaged: {error}", file=self._ledger.path, hint=REPAIR) from error
        finally:
            self._planner.close()
            if self._models is not None:
                self._models.close()
            if self._monitor is not None:
                self._monitor.close()
            is_ours = self._place.lost() is None  # else nothing is written where the lab was
            with contextlib.suppress(OSError):
                if is_ours:
                    self._tell_news()
                    self._update_pointers()
            with contextlib.suppress(sqlite3.DatabaseError, LabError):  # then the halt is reported already
                self.study.end_session(session, how, self._why if self._failed else "")
            backups.close(copy=is_ours)
            if self._anchors is not None:
                self._anchors.close()
            self._syncer.close()
            self._place.close()

    def _still_ours(self) -> None:
        """Raise HaltError if the lab, its ledger or the study's lock were moved or replaced: further writes would be
        lost, or land in another lab. Trainings continue, and `resume` adopts them."""
        lost = self._place.lost()
        if lost is not None:
            raise HaltError(lost, hint="trainings that run continue; `looplab resume` at the lab's place adopts them")

    def _tell(self, news: EngineEvent) -> None:
        """Queue an event until the transaction has ended: the ledger must not wait for a slow listener."""
        self._news.append(news)

    def _tell_news(self) -> None:
        self._write_in_book()
        news, self._news = self._news, []
        for item in news:
            self._tell_now(item)

    def _note_now(self, text: str) -> None:
        """Emit a note at once; for threads of the engine, which are never inside its transaction."""
        self._tell_now(Note(text))

    def _log_line(self, line: str) -> None:
        """Queue a line for the lab book."""
        self._lines.append(line)

    def _warn(self, kind: str, text: str) -> None:
        """Report on agents: to listeners, in the lab book and, for an alarm, through the alerts of the watch rules."""
        self._tell(WARNINGS[kind](text))
        self._log_line(labbook.line(time.time(), kind, text, "", ""))
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
        slot = self._held.get(run_id)
        return slot.name if slot else "-"

    def _is_over(self) -> bool:
        """Return whether nothing runs and nothing more will be started; called after planning."""
        running = set(self.running)
        if self.draining or self._stopping:
            running -= self._unreachable  # they stay open, for an engine that can see them
        if running or self._finished or self._prequeued:
            return False
        if self.draining or self._stopping:
            return True
        return not (self._planner.queue or self._planner.thinking or self._planner.resting or self._paused)

    # -- after a crash

    def _recover(self) -> None:
        """Compare the ledger with the folders: adopt live runs, record ended ones, queue those that never started."""
        self.best = self.study.best()
        counts = self.study.counts()
        self.progress.done = sum(n for state, n in counts.items() if state not in ("planned", "running", Role.IMPORTED))
        self.progress.failed = counts.get("failed", 0)
        self.study.forget_plans()
        slots = {slot.name: slot for slot in self.setup.slots}
        folder.sweep(self.folder)
        planned = []
        for run in self.study.runs_open():
            run_dir = self.folder / run.id
            record_dir = folder.record_folder(run_dir)
            folder.sweep(record_dir)
            if run_dir.is_dir() and self._executor.adopt(run.id, run_dir, record_dir):
                name = run.slot
                if name is None:  # the engine was killed before it recorded that
                    name = folder.read_json(run_dir, "run.json", strict=False).get("slot")
                slot = slots.get(name or "")
                if slot is not None and slot in self._free:
                    self._free.remove(slot)
                    self._held[run.id] = slot
                self._adopting.add(run.id)
                self.running[run.id] = run
                if run.state == "planned":
                    with self._ledger.write(), self._tolerant(run, "its record"):
                        files = [folder.record_name(run_dir, file) for file in PREPARED]
                        self.study.launched(run.id, str(name or "?"), folder.hash_files(run_dir, files))
            elif self.study.plan_of(run.id) is None:
                self._finished.append((run, Exit(None, reason="lost", message="its folder is gone", ended=time.time())))
            else:
                if run.state == "running":
                    self.study.returned(run.id, "the engine ended before it was started")
                planned.append(run)
        self._planner.recover(planned)
        if self._study_judge is not None:
            self._study_judge.load()
            for run_id, evidence in self.study.verdicts().items():
                self._summaries.add(run_id, {key: value for key, value in evidence.items() if key != "at"})
            self._summaries.write()
        if self._monitor is not None:
            for run_id, rule in self._monitor.recover(list(self.running.values())):
                self._executor.stop(run_id, f"{WATCHED}{rule}", self.setup.study.launch.grace)
        if self._adopting:
            # Runs that ended meanwhile are reported at once; the others are alive.
            self._listen(0.0)
            for run_id in (self._adopting & self.running.keys()) - self._unreachable:
                self._tell(RunAdopted(f"run {run_id} is still at work: adopted", run_id))
        if self._study_judge is not None:
            # Requests of the judge are not recorded: they are computed again.
            with self._ledger.write():
                self._judge([])
            self._summaries.write()
        ended = [run for run in self.study.runs(state="ended", limit=REMEMBERED) if run.role != Role.IMPORTED]
        self._latest = ended[-1] if ended else None
        if self._models is not None:
            self._recover_models(ended)
        self._pointers_due = True
        missing = labbook.missing(self.folder, [run.id for run in ended])
        if missing:
            self._note_in_book([run for run in ended if run.id in missing])

    def _plan(self) -> None:
        """Plan more runs if a slot is free and no run waits for it."""
        if self.draining or self._stopping:
            return
        self._planner.refresh()
        if self._prequeued or self._paused or self._planner.queue or not self._free:
            return
        with self._ledger.write():
            self._planner.plan(idle=not self.running and not self._finished, free=len(self._free))
        self.progress.total = self._planner.total
        if self._planner.failure is not None:
            self._end_early(self._planner.failure)

    def _end_early(self, why: str) -> None:
        """Start no more runs, and end with a failure when the current ones have ended."""
        self._drain()
        self._failed = True
        self._why = why
        self._tell(AlarmRaised(f"stopping: {why}"))
        self._log_line(
            labbook.line(time.time(), "ended early", why, "starts nothing more", "`looplab resume` continues")
        )

    # -- launch

    def _refresh_capsule(self) -> None:
        """Read the state of the code from git before a transaction begins: it may take long."""
        if self._planner.queue:
            self._preparer.refresh()

    def _launch(self) -> None:
        """Give every free slot its next run."""
        if self.draining or self._stopping or self._paused:
            return
        now = time.monotonic()
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            ready = None if self._is_blocked(slot, now) else self._prepare(slot)
            if ready is None:
                self._free.append(slot)
                continue
            self._executor.start(ready.spec)
            self._launched(ready, slot)

    def _launched(self, ready: Ready, slot: Slot) -> None:
        run = ready.run
        self._planner.plans.pop(run.id, None)
        self._held[run.id] = slot
        self.running[run.id] = run
        self._prepared[run.id] = ready.prepared
        self.study.launched(run.id, slot.name, ready.prepared.hashes)
        self._tell(RunLaunched(f"run {run.id} in {slot.name}: {run.reason}", run.id, slot=slot.name))
        doubt = ready.prepared.doubt
        if doubt is not None and doubt != self._doubt:
            self._tell(AlarmRaised(f"run {run.id}: {doubt}", run.id))
        self._doubt = doubt
        self._alarm_if_code_changed(run, ready.prepared.code)

    def _alarm_if_code_changed(self, run: RunRow, code: Mapping[str, Any] | None) -> None:
        """Raise an alarm if the lab's code differs from that of the run before; inside the transaction."""
        if code is None:
            return
        if self._code is None:
            self._code = self._last_code(run)
        was, old = self._code
        self._code = (run.id, code)
        if old.get("files") == code.get("files"):
            return
        names = code_differences(self.folder, old, code)
        if names:
            said = f"the code differs from that of run {was}: {name_files(names)}"
            text = f"run {run.id}: {said}. Results from before and after the change cannot be compared"
            self.study.alarm(run.id, AlarmEvent(text=text, since=was, code=names[:MAX_NAMED]))
            self._tell(AlarmRaised(text, run.id))
            self._log_line(labbook.line(time.time(), "alarm", text, "", ""))

    def _last_code(self, run: RunRow) -> tuple[str, Mapping[str, Any]]:
        """Return the run that was launched before this one, and the code in its capsule."""
        for one in reversed(self.study.runs(limit=RECENT)):
            if one.id != run.id and one.role not in (Role.IMPORTED, Role.REPRODUCTION) and one.slot is not None:
                return one.id, folder.read_json(self.folder / one.id, "capsule.json", strict=False).get("code") or {}
        return "", {}

    def _alarm_if_reconfigured(self) -> None:
        """Raise an alarm if the lab file changed in a way that affects comparisons between runs."""
        last = self.study.configurations()[-1]
        keys = compared_changes(last.changes)
        if not keys:
            return
        text = f"lab.yaml differs from that of earlier runs: {name_files(keys)}. Verdicts before and after may differ"
        with self._ledger.write():
            self.study.alarm(None, AlarmEvent(text=text, lab_file=keys[:MAX_NAMED]))
        self._tell(AlarmRaised(text))
        self._log_line(labbook.line(time.time(), "alarm", text, "", ""))

    def _prequeue(self) -> None:
        """If runs are short, hand over the next run of each slot while the slot is still busy."""
        mean = self.progress.mean_s
        if not self._planner.queue or mean is None or mean > SHORT_S or self.draining or self._stopping or self._paused:
            return
        for run_id, slot in list(self._held.items()):
            if slot.name not in self._prequeued:
                ready = self._prepare(slot)
                if ready is not None:
                    self._executor.start(ready.spec, after=run_id)
                    self._prequeued[slot.name] = ready

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
                if is_environmental(error):
                    raise
                now = time.time()
                outcome = Exit(None, reason="not started", message=describe_error(error), started=now, ended=now)
                self._finished.append((run, outcome))
        return None

    def _is_blocked(self, slot: Slot, now: float) -> bool:
        """Return whether another process computes on the slot's device, unless devices are shared."""
        if self._blocked.get(slot.name, 0.0) > now:
            return True
        if not slot.devices or not self.setup.devices.present or self.setup.share:
            return False
        for device in slot.devices:
            others = self.setup.devices.other_processes(device)
            if others:
                self._block(slot, f"device {device} is used by {', '.join(map(str, others))}")
                return True
        self._blocked.pop(slot.name, None)
        return False

    def _block(self, slot: Slot, why: str) -> None:
        if slot.name not in self._blocked:
            self._tell(Waiting(f"{slot.name}: {why}; waiting (share: true shares it)"))
        self._blocked[slot.name] = time.monotonic() + DEVICE_CHECK_S

    # -- measure and record

    def _listen(self, timeout: float | None = None) -> None:
        if timeout is None:
            timeout = 0.0 if self._finished else TICK_S
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
                    if self._has_read(run, exit_, run_dir, until):
                        ended.append(self._record(run, exit_, run_dir))
                    else:
                        self._finished.append((run, exit_))
                if self._study_judge is not None and ended:
                    self._judge(ended)
                for run in ended:
                    self._check_base(run)
                self._prequeue()
            self._summaries.write()
            if self._promoted and self._anchors is not None:
                self._anchors.request()
            self._promoted = False
            if ended:
                self._note_in_book(ended)
                newest = max(ended, key=lambda run: run.n)
                self._latest = newest if self._latest is None or newest.n > self._latest.n else self._latest
                self._pointers_due = True
            self._syncer.request()
        if not (self.draining or self._stopping):
            self._planner.fill()
        if self._pointers_due and time.monotonic() - self._pointers_updated > POINT_S:
            self._update_pointers()
        self._read_metrics()

    def _handle_event(self, event: LaunchEvent) -> None:
        if isinstance(event, Started):
            self._unreachable.discard(event.run_id)
            self.study.started(event.run_id, event.pid, event.at)
            if event.run_id in self.running:
                self.running[event.run_id] = replace(self.running[event.run_id], pid=event.pid, started=event.at)
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
            slot = self._held.pop(event.run_id, None)
            self._finished.append((self.running.pop(event.run_id), event.exit))
            if slot is not None and slot.name in self._prequeued:
                self._launched(self._prequeued.pop(slot.name), slot)
            elif slot is not None:
                self._free.append(slot)

    def _requeue(self, refused: Rejected) -> None:
        """Put a run that was not started back into the queue."""
        for name, ready in list(self._prequeued.items()):
            if ready.run.id == refused.run_id:
                self._planner.queue.appendleft(self._prequeued.pop(name).run)
                return
        run = self.running.pop(refused.run_id)
        slot = self._held.pop(refused.run_id)
        del self._prepared[run.id]
        self._free.append(slot)
        if refused.holder is not None:
            self._block(slot, f"its device is held by {refused.holder or 'another run'}")
        self.study.returned(run.id, refused.holder or "it was not started in time")
        self._planner.queue.appendleft(run)

    def _tolerant(self, run: RunRow, what: str) -> _Tolerant:
        """Turn any problem with the files of one run into a recorded note on that run. Problems of the whole lab, such
        as a full disk, still end the engine."""
        return _Tolerant(self, run, what)

    def _note_problem(self, run: RunRow, what: str, error: BaseException) -> bool:
        """Note a problem with the files of one run; return False if it concerns the whole lab."""
        if isinstance(error, sqlite3.Error) or not isinstance(error, Exception):
            return False
        if folder.concerns_lab(error, self.folder):
            return False
        why = describe(error)
        self._ending.setdefault(run.id, []).append(f"{what}: {why}")
        self.study.unreadable(run.id, what, why)
        return True

    def _has_read(self, run: RunRow, exit_: Exit, run_dir: Path, until: float) -> bool:
        """Read the last metrics of an ended run; return False if the time was used up, and the rest is read later."""
        metrics = self.run_metrics.get(run.id)
        if run.id not in self._ending:
            notes = self._ending[run.id] = []
            with self._tolerant(run, "its record"):
                if folder.is_linked(run_dir):
                    led = ", ".join(folder.replace_links(run_dir))
                    notes.append(f"it put a link in the place of its folder ({led}), which was removed")
                changed = self._restore_record(run, run_dir) if os.path.isdir(run_dir) else None
                if changed is not None:
                    notes.append(changed)
                    exit_file = folder.record_file(run_dir, "exit.json")
                    if not exit_file.exists():  # the run has deleted the folder in which it should be
                        folder.write_json(exit_file, asdict(exit_))
            if metrics is None and not left_nothing(run_dir):
                metrics = self.run_metrics[run.id] = RunMetrics(self.setup.study, run_dir)
        return metrics is None or metrics.finish(exit_, until)

    def _record(self, run: RunRow, exit_: Exit, run_dir: Path) -> RunRow:
        """Record how a run ended and what it measured."""
        place = str(run_dir)
        is_there = os.path.isdir(place)
        metrics = self.run_metrics.pop(run.id, None)
        record = folder.record_name(run_dir, "")
        log = f"{record}train.log"
        for what, why in metrics.problems.items() if metrics is not None else ():
            self.study.unreadable(run.id, what, why)
        summary, status, objective = summarise(
            run, self.setup.study, metrics, exit_, lab=self.setup.lab, run_dir=run_dir
        )
        files: dict[str, str] = {}
        # After the last reading: a file that is replaced would be read again from its start.
        with self._tolerant(run, "hiding secrets"):
            left = () if metrics is None else (log, *LEFT_BEHIND)  # None: it has neither printed nor written anything
            files = self._hide_secrets(run, run_dir, left) if is_there else {}
        print_ = self.setup.prints.digest()
        if print_:
            began_with = folder.read_json(run_dir, "run.json", strict=False).get("fingerprint", "")
            self._printed[run.id] = print_ if print_ == began_with else f"{began_with}, then {print_}"
            summary["fingerprint"] = self._printed[run.id]
        row = run.over(status, exit_.code, exit_.signal, exit_.started, exit_.ended or time.time(), objective)
        measured = digest(metrics.summariser.result()) if metrics is not None and objective is not None else None
        notes = self._ending.setdefault(run.id, [])
        if measured is not None:
            with self._tolerant(run, "comparing it with other runs"):
                unchanged = self._alarm_if_unchanged(row, measured)
                if unchanged is not None:
                    notes.append(unchanged)
        summary["measured"] = measured
        ours = (log, f"{record}process.json", f"{record}exit.json")
        for name in (*ours, *LEFT_BEHIND) if metrics is not None else ours:
            try:
                found = folder.hash_file(f"{place}/{name}") if is_there else None
            except Exception as error:
                if not self._note_problem(run, f"hashing {name}", error):
                    raise
            else:
                if found is not None:
                    files[name] = found
        if is_there:
            name = f"{record}summary.json"
            summary["notes"] = [redact_text(one) for one in (*summary["notes"], *notes)]
            noted = len(notes)
            with self._tolerant(run, f"writing {name}"):
                files = {name: folder.write_json(f"{place}/{name}", summary), **files}
            notes = notes[noted:]
        note = redact_text("; ".join([*summary["notes"], *notes])) or None
        del self._ending[run.id]
        self.study.ended(
            run.id, status=status, code=exit_.code, signal=exit_.signal, started=exit_.started,
            ended=row.ended, objective=objective, files=files, note=note, measured=measured,
        )  # fmt: skip
        self.progress.done += 1
        self.progress.failed += status == "failed"
        if row.seconds is not None:
            self.progress.seconds += row.seconds
            self.progress.timed += 1
        if self._monitor is not None:
            with self._tolerant(run, "watch rules"):
                self._monitor.ended(row, metrics, by_itself=exit_.reason is None)
        if self._models is not None and status == "ok":
            self._models.request("latest", row)
        if self._study_judge is None and objective is not None and self._is_better(row, objective):
            self.best = row
            self.study.set_best(run.id, objective)
            if self._models is not None:
                self._models.request("best", row)
        if self._study_judge is not None and (exit_.reason or "").startswith(WATCHED) and run.role in DECIDED:
            row = self._discard_stopped(row, str(exit_.reason).removeprefix(WATCHED))
        said = f"{status} in {row.seconds or 0:.1f} s"
        if objective is not None and self.setup.study.objective is not None:
            said += f", {self.setup.study.objective.metric} {objective:.6g}" + (" (best)" if self.best is row else "")
        note = "; ".join(filter(None, (note, *self._ending.pop(run.id, ()))))
        text = f"run {run.id} {said}" + (f": {note}" if note else "")
        self._tell(
            RunEnded(text, run.id, status=status, objective=objective, seconds=row.seconds, is_best=self.best is row)
        )
        return row

    def _hide_secrets(self, run: RunRow, run_dir: Path, names: Sequence[str]) -> dict[str, str]:
        """Remove secrets from the files of an ended run; return the new hashes of config files that had some."""
        for name in names:  # under these names a trainer can leave anything
            with self._tolerant(run, f"hiding secrets in {name}"), contextlib.suppress(FileNotFoundError):
                if os.stat(f"{run_dir}/{name}").st_size:
                    scrub_file(run_dir / name)
        if not self._preparer.hides(run):
            return {}
        return self._preparer.hide_secrets(run, self.study.config_of(run, run_dir))

    def _check_base(self, run: RunRow) -> None:
        """Start no more runs if no base config works."""
        setup = self.setup
        if run.role != Role.BASE or setup.keep_going or setup.options.asked_only or not setup.is_unusable(run):
            return
        if run.status == "lost":
            self._planner.retry_base(run)
            return
        done = base_runs(setup, self.study)
        latest = [runs[-1] for base in self._base_keys if (runs := done.get(base))]
        if len(latest) < len(self._base_keys) or not all(setup.is_unusable(one) for one in latest):
            return
        self._end_early(f"the base config {run.base} {_trouble_of(run)}, so nothing can be compared with it")

    def _alarm_if_unchanged(self, run: RunRow, measured: str) -> str | None:
        """Return a note if another config measured exactly the same, and raise the alarm once for each set of keys."""
        same = self.study.same_measurement(run, measured)
        if same is None or run.objective in SATURATED:
            return None
        configs = [self.study.config_of(one, self.folder / one.id) for one in (same, run)]
        keys = sorted(diff(*configs))
        named = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        named = named or "the arguments of the trainer"
        text = (
            f"{run.id} differs from {same.id} in {named} and measured exactly the same, to the last digit: the change "
            "changes nothing. Does it reach the trainer?"
        )
        if not any(alarm.get("keys") == keys for alarm in self.study.alarms()):
            self.study.alarm(run.id, AlarmEvent(text=text, same_as=same.id, keys=keys))
            self._tell(AlarmRaised(text, run.id))
            self._log_line(labbook.line(time.time(), "alarm", text, "", ""))
        return f"it measured exactly the same as {same.id}, to the last digit"

    def _restore_record(self, run: RunRow, run_dir: Path) -> str | None:
        """Restore the prepared files that the run has changed, and report them; returns a sentence about them."""
        prepared = self._prepared.pop(run.id, None)
        if prepared is not None:
            changes = folder.restore(run_dir, prepared.hashes, prepared.contents)
        elif folder.record_folder(run_dir) == run_dir:
            return None  # started by an early version
        else:  # started by an earlier engine, or by nobody
            os.makedirs(f"{run_dir}/{folder.RECORD}", exist_ok=True)
            recorded = self.study.launched_files(run.id)
            if self._preparer.hides(run):  # an engine was killed after it had hidden the secrets
                hidden = self._preparer.hidden_files(self.study.config_of(run, run_dir))
                same = {
                    name
                    for name, content in hidden.items()
                    if folder.hash_file(run_dir / name) == folder.hash_bytes(content)
                }
                recorded = {name: digest for name, digest in recorded.items() if name not in same}
            contents = self._preparer.rebuild(run, self.study.plan_of(run.id)) if recorded else {}
            changes = folder.restore(run_dir, recorded, contents)
        if not changes:
            return None
        self.study.record_changed(run.id, changes)
        lost = [change.name for change in changes if not change.restored]
        said = f"the run changed {', '.join(change.name for change in changes)}, which only looplab writes"
        said += f"; what {', '.join(lost)} said is lost" if lost else "; restored"
        self._tell(AlarmRaised(f"run {run.id}: {said}", run.id))
        self._log_line(labbook.line(time.time(), "alarm", f"run {run.id}: {said}", "", ""))
        return said

    # -- judge

    def _judge(self, ended: list[RunRow]) -> None:
        """Let the judge evaluate the ended runs, and record what it decides; inside the transaction."""
        assert self._study_judge is not None
        for run in ended:
            self._study_judge.add_run(run, self._printed.pop(run.id, ""))
        judgement = self._study_judge.evaluate(self.study.runs_open())
        if judgement is not None:
            self._record_judgement(judgement)

    def _discard_stopped(self, run: RunRow, rule: str) -> RunRow:
        """Discard a trial that a watch rule stopped: it has no result, and is not tried again."""
        evidence = {
            "run": run.id,
            "verdict": "discard",
            "why": f"Stopped by the watch rule {rule!r}.",
            "flags": ["stopped"],
            "configuration": self._configuration,
        }
        self.study.judged(run.id, "discard", evidence, self._summaries.add(run.id, evidence))
        return replace(run, verdict="discard")

    def _record_judgement(self, judgement: Judgement) -> None:
        champion = record_judgement(self.study, judgement, self._configuration, self._summaries.add)
        for run_id, verdict, evidence in evidence_of(judgement, self._configuration):
            self._tell(VerdictGiven(f"run {run_id}: {verdict}. {evidence['why']}", run_id, verdict=verdict))
            self._log_line(labbook.line(time.time(), f"judged {run_id}", str(evidence["why"]), verdict, ""))
        for test in judgement.opened:
            self._tell(Note(f"run {test.run} earns replicates (test {test.number}, alpha {test.alpha:.3g})"))
        for alarm in judgement.alarms:
            self._tell(AlarmRaised(alarm))
            self._log_line(labbook.line(time.time(), "alarm", alarm, "", ""))
        if champion is not None:
            self.best = champion
            if self._models is not None:
                self._models.request("best", champion)
            self._pointers_due = self._promoted = True

    def _keep_models(self, copies: Sequence[KeptModel]) -> None:
        """Record copies of checkpoints and name them; after a crash in between, the next engine copies again."""
        for copy in copies:
            with self._ledger.write(), self._tolerant(copy.run, "keeping its model"):
                if copy.error is not None:
                    raise copy.error
                self.study.kept(copy.files)
            notes = self._ending.pop(copy.run.id, [])
            if copy.error is None and not notes:
                try:
                    copy.install()
                except OSError as error:
                    if folder.concerns_lab(error, self.folder):
                        raise
                    notes = [f"its model could not be kept: {describe(error)}"]
            for note in notes:
                self._tell(Note(f"run {copy.run.id}: {note}", copy.run.id))

    def _recover_models(self, ended: Sequence[RunRow]) -> None:
        """Copy or name checkpoints that a killed engine had no time for."""
        assert self._models is not None
        folder.sweep(self.folder / MODELS)
        recorded = self.study.kept_files()
        ok = [run for run in ended if run.status == "ok"]
        latest = max(ok, key=lambda run: run.ended or 0.0, default=None)
        for name, run in (("best", self.best), ("latest", latest)):
            if run is not None and not self._models.is_current(name, run, recorded):
                self._models.request(name, run)

    def _is_better(self, run: RunRow, objective: float) -> bool:
        wanted = self.setup.study.objective
        if run.conditions != (self.best or self.setup).conditions:
            return False
        if self.best is None or self.best.objective is None or wanted is None:
            return True
        ours, theirs = (
            tie_break_value(wanted.then, self.folder / one) if objective == self.best.objective else None
            for one in (run.id, self.best.id)
        )
        return is_better(wanted, (objective, ours), (self.best.objective, theirs))

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
            self._lines.append(labbook.line(run.ended or time.time(), action, observed, outcome, ""))
        self._write_in_book()

    def _write_in_book(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            labbook.append(self.folder, self.study.name, lines)

    def _read_metrics(self) -> None:
        now = time.monotonic()
        every = GAUGE_S if self._monitor is None else WATCH_S
        alarms = []
        running = list(self.running.items())
        if self._unread:  # first those that had no turn last time
            running.sort(key=lambda item: metrics.polled if (metrics := self.run_metrics.get(item[0])) else 0.0)
        self._unread = False
        for run_id, run in running:
            if run.started is None and run_id not in self._adopting:
                continue  # it has just started
            metrics = self.run_metrics.get(run_id)
            if metrics is None:
                metrics = self.run_metrics[run_id] = RunMetrics(self.setup.study, self.folder / run_id, polled=now)
            if now - metrics.polled > every:
                batch = metrics.poll(until=now + PORTION_S)
                if self._monitor is not None:
                    alarms += [(run, alarm) for alarm in self._look(run, metrics, batch)]
                if time.monotonic() > now + PORTION_S:
                    self._unread = True
                    break
        if alarms and self._monitor is not None:
            with self._ledger.write():
                for run, alarm in alarms:
                    self._monitor.apply(run, alarm)
            for run, alarm in alarms:
                if alarm.stops:
                    self._executor.stop(run.id, f"{WATCHED}{alarm.rule}", self.setup.study.launch.grace)

    def _look(self, run: RunRow, metrics: RunMetrics, batch: Batch) -> list[Alarm]:
        """Return the alarms of the watch rules for a run; rules that fail on its metrics are not asked again."""
        assert self._monitor is not None
        if metrics.failed is not None:
            return []
        try:
            return self._monitor.look(run, metrics, batch, self._budget_used)
        except Exception as error:  # noqa: BLE001 (whatever a run measures is that run's problem)
            metrics.failed = f"watch rules: {describe(error)}"
            self._tell(AlarmRaised(f"run {run.id}: {metrics.failed}", run.id))
            return []

    # -- requests

    def request(self, what: Literal["stop", "drain"]) -> None:
        """Ask the engine to end; may be called from a signal handler or another thread. It is done between two steps,
        so that a run which is being started at this moment is not missed."""
        self._requests.append(what)

    def _stop(self) -> None:
        """Stop the current runs; planned runs stay planned."""
        self._stopping = True
        self._why = "stopped"
        self._cancel_behind()
        for run_id in self.running.keys() - self._unreachable:
            self._executor.stop(run_id, "stop", self.setup.study.launch.grace)

    def _drain(self) -> None:
        """Let the current runs end, and start no more."""
        self.draining = True
        self._why = "drained"
        self._cancel_behind()

    def _pause(self, paused: bool) -> None:
        """Start no more runs until resumed; the current ones continue."""
        self._paused = paused
        if paused:
            self._cancel_behind()
        self._tell(Note("paused: starts nothing until `looplab resume`" if paused else "goes on"))

    def _veto(self, run_id: str, why: str) -> None:
        """Invalidate a run: do not start it, or stop it, and exclude it from being best."""
        for run in [run for run in self._planner.queue if run.id == run_id]:
            self._planner.queue.remove(run)
            now = time.time()
            self._finished.append((run, Exit(None, reason="veto", message=why, started=None, ended=now)))
        if run_id in self.running:
            self._executor.stop(run_id, "veto", self.setup.study.launch.grace)
        if self.best is not None and self.best.id == run_id:
            self.best = self.study.best()
            if self._models is not None and self.best is not None:
                self._models.request("best", self.best)

    def _cancel_behind(self) -> None:
        for ready in self._prequeued.values():
            self._executor.cancel(ready.run.id)

    def _handle_commands(self) -> None:
        while self._requests:
            self._stop() if self._requests.pop(0) == "stop" else self._drain()
        version = self._ledger.version()
        if version == self._version:
            return
        self._version = version
        for what, data in self.study.take_commands():
            if what == "drain":
                self._drain()
            elif what == "stop" and data.get("run") is None:
                self._stop()
            elif what == "stop" and data["run"] in self.running:
                self._executor.stop(data["run"], "stop", self.setup.study.launch.grace)
            elif what in ("pause", "resume"):
                self._pause(what == "pause")
            elif what == "veto":
                self._veto(data["run"], data["why"])


def _trouble_of(run: RunRow) -> str:
    if run.status == "ok":
        return f"ran (run {run.id}) but did not measure the objective"
    return f"ended with status {run.status} (run {run.id})"


def _full(what: str, where: object) -> str:
    return (
        f"cannot write {where or ''}: {what}. Trainings that run go on and nothing is lost: "
        "make room (or the folder writable), then `looplab resume`"
    )
