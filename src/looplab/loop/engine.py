"""The engine: propose → guard → launch → measure → record, until the budget is used or nothing is left to try.

It may be killed between any two lines. What is decided is in the ledger before anything is started; what was started
is in the run folders, written by processes that outlive the engine; a new engine begins by comparing the two.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from looplab.decide.base import Proposal
from looplab.decide.queue import QueueProposer
from looplab.errors import LabError
from looplab.guard.guard import Problem
from looplab.launch import keeper
from looplab.launch.base import Event, Executor, Exit, Order, Refused, Slot, Started
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import RunRow, StudyLedger
from looplab.loop.decision import Decider, Decision, Rejected, decide_base
from looplab.loop.measuring import Gauge, left_nothing, summarise
from looplab.loop.prepare import PREPARED, Preparer
from looplab.loop.setup import Setup
from looplab.report import labbook
from looplab.runs import folder
from looplab.runs.durable import Syncer
from looplab.runs.redact import known_secrets, scrub_file

TICK_S = 0.1
"""How long the engine sleeps at most: what a person asks for is seen within this time."""
GAUGE_S = 0.5
POINT_S = 0.2
SHORT_S = 0.3
"""Runs that take less than this on average are queued one behind the other on their slot."""
REMEMBERED = 1000
"""How many of the last runs are looked at after a crash for what was not yet written in the lab book."""
BEAT_S = 5.0
DEVICE_CHECK_S = 2.0
LEFT_BEHIND = ("metrics.jsonl", "trainer_summary.json", "train.log")
"""What a trainer leaves in its folder that must not change afterwards."""
AHEAD = 64
"""A larger round is decided in portions, so that slots need not wait until all of it is."""
NO_LIMIT = 1 << 30
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class Ending(StrEnum):
    """How an engine's work came to its end."""

    DONE = "done"
    DRAINED = "drained"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened, for whoever watches."""

    kind: str
    """note | round | launched | adopted | ended | rejected | waiting"""
    text: str
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    ending: Ending
    why: str
    """Why nothing more is tried."""


@dataclass(slots=True)
class Progress:
    """How far a study is."""

    done: int = 0
    failed: int = 0
    total: int | None = None
    """How many runs there will be at most, where that is known."""
    seconds: float = 0.0
    """What the runs of this engine took together."""
    timed: int = 0

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.timed if self.timed else None


@dataclass(frozen=True, slots=True)
class Ready:
    """A run whose folder is there."""

    run: RunRow
    order: Order
    hashes: dict[str, str]


class HaltError(LabError):
    """The engine cannot go on, but nothing is lost."""

    exit_code = 1


class Engine:
    def __init__(
        self, setup: Setup, ledger: Ledger, executor: Executor, tell: Callable[[News], None] = lambda news: None
    ) -> None:
        self.setup = setup
        self.study = StudyLedger(ledger, setup.study.study)
        self.folder = folder.study_folder(setup.lab, setup.study.study)
        self.running: dict[str, RunRow] = {}
        self.gauges: dict[str, Gauge] = {}
        self.best: RunRow | None = None
        self.draining = False
        self.progress = Progress()
        self._ledger = ledger
        self._executor = executor
        self._tell_now = tell
        self._news: list[News] = []
        self._lines: list[str] = []  # for the lab book
        self._decider = Decider(setup, self.study)
        self._preparer = Preparer(setup)
        self._planned: deque[RunRow] = deque()
        self._plans: dict[str, Decision] = {}
        self._free: deque[Slot] = deque(setup.slots)
        self._bases = [decide_base(base) for base in setup.bases]  # those that may still need a run of their own
        self._filling: tuple[int, int] | None = None  # a round that is not decided to its end: its number, what is left
        self._held: dict[str, Slot] = {}
        self._behind: dict[str, Ready] = {}  # slot → the run that the executor starts there next, by itself
        self._blocked: dict[str, float] = {}  # slot → when to look at its device again
        self._adopting: set[str] = set()
        self._stopping = False
        self._wishes: list[str] = []
        self._complaints: dict[str, str] = {}
        self._secrets = known_secrets({**os.environ, **setup.study.launch.env})
        self._finished: list[tuple[RunRow, Exit]] = []
        self._why = ""
        self._version = -1
        self._latest: RunRow | None = None
        self._pointing = False
        self._pointed = 0.0

    # -- the way of a study

    def run(self) -> Outcome:
        """Work until there is nothing more to do; the study's lock is held by the caller."""
        objective = self.setup.study.objective
        self.study.open(objective.metric if objective else None, objective.goal if objective else "min")
        session = self.study.begin_session(socket.gethostname(), os.getpid(), keeper.start_ticks(os.getpid()))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._syncer = Syncer(self.folder)
        how = "failed"
        gc.freeze()  # what was imported lives as long as the engine: no need to look through it again and again
        try:
            self.study.take_commands()  # what was asked of an engine that is gone
            self._recover()
            beat = time.monotonic()
            while not self._is_over():
                self._obey()
                if self._free:
                    # Two transactions: what is decided is in the ledger before any of it is started.
                    with self._ledger.write():
                        self._plan()
                    with self._ledger.write():
                        self._launch()
                self._listen()
                self._tell_news()
                if time.monotonic() - beat > BEAT_S:
                    self.study.beat(session)
                    beat = time.monotonic()
            ending = Ending.STOPPED if self._stopping else Ending.DRAINED if self.draining else Ending.DONE
            how = ending.value
            return Outcome(ending, self._why)
        except OSError as error:
            if error.errno in FULL:
                raise HaltError(_full(error.strerror or "", error.filename)) from error
            raise HaltError(
                f"{error.strerror or error}: {error.filename or ''}", hint="mend it, then `looplab resume`"
            ) from error
        except sqlite3.OperationalError as error:
            raise HaltError(_full(str(error), self._ledger.path)) from error
        finally:
            with contextlib.suppress(OSError):
                self._tell_news()
                self._point()
            with contextlib.suppress(sqlite3.OperationalError):  # then the halt is being told already
                self.study.end_session(session, how)
            self._syncer.close()

    def _tell(self, news: News) -> None:
        """Told after the transaction: whoever listens may be slow, and the ledger must not wait for them."""
        self._news.append(news)

    def _tell_news(self) -> None:
        self._write_in_book()
        news, self._news = self._news, []
        for item in news:
            self._tell_now(item)

    def slot_of(self, run_id: str) -> str:
        slot = self._held.get(run_id)
        return slot.name if slot else "-"

    def _is_over(self) -> bool:
        if self.running or self._finished or self._behind:
            return False
        if self.draining or self._stopping:
            return True
        if self._planned:
            return False
        with self._ledger.write():
            self._plan()
        return not self._planned

    # -- after a crash

    def _recover(self) -> None:
        """Compare the ledger with the folders: adopt what lives, take in what has ended, queue what never started."""
        self.best = self.study.best()
        counts = self.study.counts()
        self.progress.done = sum(n for state, n in counts.items() if state not in ("planned", "running"))
        self.progress.failed = counts.get("failed", 0)
        self.study.forget_plans()
        slots = {slot.name: slot for slot in self.setup.slots}
        folder.sweep(self.folder)
        unfilled = self.study.unfilled_round()
        if unfilled is not None and not self.setup.options.continuous:
            self._filling = (unfilled, self.setup.round_size - len(self.study.runs(round=unfilled)))
        for run in self.study.runs(state="planned") + self.study.runs(state="running"):
            run_dir = self.folder / run.id
            folder.sweep(run_dir)
            if run_dir.is_dir() and self._executor.adopt(run.id, run_dir):
                name = folder.read_json(run_dir, "run.json").get("slot")
                slot = slots.get(name or "")
                if slot is not None and slot in self._free:
                    self._free.remove(slot)
                    self._held[run.id] = slot
                self._adopting.add(run.id)
                self.running[run.id] = run
                if run.state == "planned":
                    with self._ledger.write():
                        self.study.launched(run.id, name or "?", folder.hash_files(run_dir, PREPARED))
            elif self.study.plan_of(run.id) is None:
                self._finished.append((run, Exit(None, reason="lost", message="its folder is gone", ended=time.time())))
            else:
                if run.state == "running":
                    self.study.returned(run.id, "the engine ended before it was started")
                self._planned.append(run)
        self._planned = deque(sorted(self._planned, key=lambda run: run.n))
        if self._adopting:
            # Those that ended meanwhile are told at once; the rest is alive.
            self._listen(0.0)
            for run_id in self._adopting & self.running.keys():
                self._tell(News("adopted", f"run {run_id} is still at work: adopted", run_id))
        ended = self.study.runs(state="ended", limit=REMEMBERED)
        self._latest = ended[-1] if ended else None
        self._pointing = True
        missing = labbook.missing(self.folder, [run.id for run in ended])
        if missing:
            self._note_in_book([run for run in ended if run.id in missing])

    # -- propose and guard

    def _plan(self) -> None:
        if self.draining or self._stopping or self._planned or self._behind:
            return
        continuous = self.setup.options.continuous
        if not continuous and (self.running or self._finished):
            return
        if self._filling is not None:
            self._fill()
            if self._planned:
                return
        room = self._budget_left()
        if room <= 0:
            return
        current = self.study.open_round()
        if continuous:
            if current is None:
                current = self.study.begin_round()
                self.study.fill_round(current)
            self._decide(current, min(room, len(self._free)))
            self._foresee(room)
            return
        if current is not None:
            self.study.close_round(current)
            self._tell(News("round", f"round {current} is done"))
        limit = self._limit("rounds")
        used = self.study.usage().rounds
        if limit is not None and used >= limit:
            self._why = f"all {limit} round(s) are done"
            return
        n = self.study.begin_round()
        size = min(room, self.setup.round_size)
        planned = self._decide(n, min(size, AHEAD))
        if planned:
            self._filling = (n, size - planned) if planned == AHEAD < size else None
            if self._filling is None:
                self.study.fill_round(n)
            count = planned if self._filling is None else size
            self._tell(News("round", f"round {n}: {count} run(s)"))
            self._book_round(n, count)
            self._foresee(room if limit is None else min(room, (limit - used) * self.setup.round_size))
        else:
            # Nothing to try: the round is as if it had not been.
            self._ledger.execute("DELETE FROM rounds WHERE study=? AND n=?", (self.study.study, n))

    def _book_round(self, n: int, count: int) -> None:
        """A line on what was decided, and on what grounds."""
        wanted = self.setup.study.objective
        seen = "nothing measured yet"
        if self.best is not None and self.best.objective is not None and wanted is not None:
            seen = f"best so far: {self.best.id} with {wanted.metric} = {self.best.objective:.6g}"
        reasons = [run.reason for run in self._planned if run.reason]
        following = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
        self._lines.append(labbook.line(time.time(), f"round {n} decided", seen, f"{count} run(s)", following))

    def _fill(self) -> None:
        """Decide on a few more runs of a large round, while its first ones are at work already."""
        if self._filling is None or len(self._planned) >= AHEAD or self.draining or self._stopping:
            return
        n, left = self._filling
        with self._ledger.write():
            planned = self._decide(n, min(left, 2 * len(self.setup.slots)))
            self._filling = (n, left - planned) if planned and planned < left else None
            if self._filling is None:
                self.study.fill_round(n)

    def _decide(self, round_: int, room: int) -> int:
        """Fill up to `room` places with bases not run yet and with proposals that pass the guard."""
        planned = 0
        if self._bases:
            done = self.study.bases_planned()
            self._bases = [b for b in self._bases if f"{b.base}@{b.config_hash}" not in done]
        while self._bases and planned < room:
            self._take(self._bases.pop(0), round_)
            planned += 1
        while planned < room:
            proposals = self._proposals(room - planned)
            if not proposals:
                break
            for proposal in proposals:
                planned += self._judge_proposal(proposal, round_)
        if not planned:
            problems = "; ".join(problem for problem in self._complaints.values() if problem)
            self._why = problems or "no proposer has anything left to try (add with `looplab propose`)"
        return planned

    def _foresee(self, room: int) -> None:
        """How many runs there will be at most: what the budget leaves, or, if only people propose, what waits."""
        room -= len(self._planned)
        if all(isinstance(proposer, QueueProposer) for proposer in self.setup.proposers):
            room = min(room, self.study.count_waiting())
        known = room < NO_LIMIT // 2
        self.progress.total = self.study.usage().runs + max(0, room) if known else None

    def _proposals(self, n: int) -> list[Proposal]:
        for proposer in self.setup.proposers:
            proposals = proposer.propose(self.study, n)
            if proposer.problem is not None and self._complaints.get(proposer.name) != proposer.problem:
                self._tell(News("note", f"{proposer.name}: {proposer.problem}"))
            self._complaints[proposer.name] = proposer.problem or ""
            if proposals:
                return proposals
        return []

    def _judge_proposal(self, proposal: Proposal, round_: int) -> bool:
        if proposal.id is None:
            id_ = self.study.propose(
                proposal.proposer,
                proposal.edits,
                proposal.reason,
                parent=proposal.parent,
                hypothesis=proposal.hypothesis,
            )
            proposal = replace(proposal, id=id_)
        assert proposal.id is not None
        try:
            decision = self._decider.decide(proposal)
        except Rejected as rejected:
            self.study.reject(proposal.id, [_plain(problem) for problem in rejected.problems])
            self._tell(News("rejected", f"rejected: proposal {proposal.id} ({' '.join(proposal.edits)}): {rejected}"))
            return False
        self._take(decision, round_)
        return True

    def _take(self, decision: Decision, round_: int) -> None:
        devices = max(1, len(self.setup.slots[0].devices))
        run = self.study.plan(
            round=round_, proposal=decision.proposal, proposer=decision.proposer, parent=decision.parent,
            base=decision.base, reason=decision.reason, config_hash=decision.config_hash, devices=devices,
            body=decision.body(),
        )  # fmt: skip
        self._plans[run.id] = decision
        self._planned.append(run)

    # -- budget

    def _limit(self, name: str) -> int | None:
        said: int | None = getattr(self.setup.options, name)
        limit: int | None = said if said is not None else getattr(self.setup.study.budget, name)
        return limit

    def _budget_left(self) -> int:
        """How many runs may still be planned; says why when there are none."""
        budget = self.setup.study.budget
        usage = self.study.usage()
        if budget.wall is not None and usage.wall >= budget.wall:
            self._why = f"the wall-clock budget of {budget.wall:g} s is used"
            return 0
        if budget.device_hours is not None and usage.device_hours >= budget.device_hours:
            self._why = f"the budget of {budget.device_hours:g} device-hours is used"
            return 0
        limit = self._limit("runs")
        if limit is None:
            return NO_LIMIT
        if usage.runs >= limit:
            self._why = f"all {limit} run(s) are done"
        return limit - usage.runs

    # -- launch

    def _launch(self) -> None:
        """Give every free slot its next run."""
        if self.draining or self._stopping:
            return
        now = time.monotonic()
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            ready = None if self._is_blocked(slot, now) else self._prepare(slot)
            if ready is None:
                self._free.append(slot)
                continue
            self._executor.start(ready.order)
            self._launched(ready, slot)

    def _launched(self, ready: Ready, slot: Slot) -> None:
        run = ready.run
        self._plans.pop(run.id, None)
        self._held[run.id] = slot
        self.running[run.id] = run
        self.study.launched(run.id, slot.name, ready.hashes)
        self._tell(News("launched", f"run {run.id} in {slot.name}: {run.reason}", run.id))

    def _queue_behind(self) -> None:
        """Where runs are short, hand over the next run of each slot while the slot is still busy."""
        mean = self.progress.mean_s
        if not self._planned or mean is None or mean > SHORT_S or self.draining or self._stopping:
            return
        for run_id, slot in list(self._held.items()):
            if slot.name not in self._behind:
                ready = self._prepare(slot)
                if ready is not None:
                    self._executor.start(ready.order, after=run_id)
                    self._behind[slot.name] = ready

    def _prepare(self, slot: Slot) -> Ready | None:
        """Make the folder of the next run; None when there is no more. One that cannot be prepared has failed, and the
        next one takes its place."""
        while self._planned:
            run = self._planned.popleft()
            decision = self._plans.get(run.id)
            plan = decision.body() if decision else self.study.plan_of(run.id)
            assert plan is not None
            try:
                order, hashes = self._preparer.prepare(run, plan, slot)
                return Ready(run, order, hashes)
            except LabError as error:
                now = time.time()
                outcome = Exit(None, reason="not started", message=str(error), started=now, ended=now)
                self._finished.append((run, outcome))
        return None

    def _is_blocked(self, slot: Slot, now: float) -> bool:
        """Whether somebody else computes on the slot's device: then it is waited for, unless told to share."""
        if self._blocked.get(slot.name, 0.0) > now:
            return True
        if not slot.devices or not self.setup.devices.present or self.setup.share:
            return False
        for device in slot.devices:
            strangers = self.setup.devices.strangers(device)
            if strangers:
                self._block(slot, f"device {device} is used by {', '.join(map(str, strangers))}")
                return True
        self._blocked.pop(slot.name, None)
        return False

    def _block(self, slot: Slot, why: str) -> None:
        if slot.name not in self._blocked:
            self._tell(News("waiting", f"{slot.name}: {why}; waiting (share: true shares it)"))
        self._blocked[slot.name] = time.monotonic() + DEVICE_CHECK_S

    # -- measure and record

    def _listen(self, timeout: float | None = None) -> None:
        if timeout is None:
            timeout = 0.0 if self._finished else TICK_S
        events = self._executor.poll(timeout)
        if events or self._finished:
            with self._ledger.write():
                for event in events:
                    self._take_in(event)
                # The next run first, the paperwork of the last one after: a device should not wait for a file.
                self._launch()
                finished, self._finished = self._finished, []
                ended = [self._record(run, exit_) for run, exit_ in finished]
                self._queue_behind()
            if ended:
                self._note_in_book(ended)
                newest = max(ended, key=lambda run: run.n)
                self._latest = newest if self._latest is None or newest.n > self._latest.n else self._latest
                self._pointing = True
            self._syncer.request()
        self._fill()
        if self._pointing and time.monotonic() - self._pointed > POINT_S:
            self._point()
        self._read_gauges()

    def _take_in(self, event: Event) -> None:
        if isinstance(event, Started):
            self.study.started(event.run_id, event.pid, event.at)
            if event.run_id in self.running:
                self.running[event.run_id] = replace(self.running[event.run_id], pid=event.pid, started=event.at)
        elif isinstance(event, Refused):
            self._give_back(event)
        else:
            slot = self._held.pop(event.run_id, None)
            self._finished.append((self.running.pop(event.run_id), event.exit))
            if slot is not None and slot.name in self._behind:
                self._launched(self._behind.pop(slot.name), slot)
            elif slot is not None:
                self._free.append(slot)

    def _give_back(self, refused: Refused) -> None:
        """A run that was not started is planned again."""
        for name, ready in list(self._behind.items()):
            if ready.run.id == refused.run_id:
                self._planned.appendleft(self._behind.pop(name).run)
                return
        run = self.running.pop(refused.run_id)
        slot = self._held.pop(refused.run_id)
        self._free.append(slot)
        if refused.holder is not None:
            self._block(slot, f"its device is held by {refused.holder or 'another run'}")
        self.study.returned(run.id, refused.holder or "it was not started in time")
        self._planned.appendleft(run)

    def _record(self, run: RunRow, exit_: Exit) -> RunRow:
        """Read what the run measured and write down how it ended."""
        run_dir = self.folder / run.id
        gauge = self.gauges.pop(run.id, None)
        if gauge is None and not left_nothing(run_dir):
            gauge = Gauge(self.setup.study, run_dir)
        if self._secrets:
            scrub_file(run_dir / "train.log", self._secrets)
        summary, status, objective = summarise(run, self.setup.study, gauge, exit_)
        files: dict[str, str] = {}
        if run_dir.is_dir():
            files["summary.json"] = folder.write_json(run_dir, "summary.json", summary)
            files |= folder.hash_files(run_dir, LEFT_BEHIND if gauge is not None else ("train.log",))
        note = "; ".join(summary["notes"]) or None
        self.study.ended(
            run.id, status=status, code=exit_.code, signal=exit_.signal, started=exit_.started,
            ended=exit_.ended or time.time(), objective=objective, files=files, note=note,
        )  # fmt: skip
        row = run.over(status, exit_.code, exit_.signal, exit_.started, exit_.ended or time.time(), objective)
        self.progress.done += 1
        self.progress.failed += status == "failed"
        if row.seconds is not None:
            self.progress.seconds += row.seconds
            self.progress.timed += 1
        if objective is not None and self._is_better(objective):
            self.best = row
            self.study.set_best(run.id, objective)
        said = f"{status} in {row.seconds or 0:.1f} s"
        if objective is not None and self.setup.study.objective is not None:
            said += f", {self.setup.study.objective.metric} {objective:.6g}" + (" (best)" if self.best is row else "")
        self._tell(News("ended", f"run {run.id} {said}" + (f": {note}" if note else ""), run.id))
        return row

    def _is_better(self, objective: float) -> bool:
        wanted = self.setup.study.objective
        if self.best is None or self.best.objective is None or wanted is None:
            return True
        return objective > self.best.objective if wanted.goal == "max" else objective < self.best.objective

    def _point(self) -> None:
        """LATEST and BEST; not more often than somebody could look at them."""
        self._pointed = time.monotonic()
        if self._latest is not None:
            folder.point(self.folder, "LATEST", self._latest.id)
        if self.best is not None:
            folder.point(self.folder, "BEST", self.best.id)
        self._ledger.anchor()
        self._pointing = False

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
            labbook.append(self.folder, self.study.study, lines)

    def _read_gauges(self) -> None:
        now = time.monotonic()
        for run_id, run in self.running.items():
            if run.started is None and run_id not in self._adopting:
                continue  # it has only just begun
            gauge = self.gauges.get(run_id)
            if gauge is None:
                gauge = self.gauges[run_id] = Gauge(self.setup.study, self.folder / run_id, polled=now)
            if now - gauge.polled > GAUGE_S:
                gauge.poll()

    # -- what people ask

    def wish(self, what: str) -> None:
        """Ask for `stop` or `drain`; may be called from a signal handler. It is done between two steps, so that a run
        which is being started at this moment is not missed."""
        self._wishes.append(what)

    def _stop(self) -> None:
        """End the running trainings; what is planned stays planned."""
        self._stopping = True
        self._why = "stopped"
        self._cancel_behind()
        for run_id in self.running:
            self._executor.stop(run_id, "stop", self.setup.study.launch.grace)

    def _drain(self) -> None:
        """Let the running trainings end; start no more."""
        self.draining = True
        self._why = "drained"
        self._cancel_behind()

    def _cancel_behind(self) -> None:
        for ready in self._behind.values():
            self._executor.cancel(ready.run.id)

    def _obey(self) -> None:
        while self._wishes:
            self._stop() if self._wishes.pop(0) == "stop" else self._drain()
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


def _plain(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in ("key", "value", "rule", "message", "nearest")}


def _full(what: str, where: object) -> str:
    return (
        f"cannot write {where or ''}: {what}. Trainings that run go on and nothing is lost: "
        "make room (or the folder writable), then `looplab resume`"
    )
