"""Planning: base configs, runs that the judge requests, runs that watch rules requeue, and proposals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from looplab.decide.base import (
    MAX_PROBLEM,
    FallibleProposer,
    FileProposer,
    Proposal,
    Proposer,
    ask,
    describe_error,
    is_environmental,
)
from looplab.decide.history import History
from looplab.decide.mix import Mix
from looplab.decide.queue import QueueProposer, waiting
from looplab.errors import LabError
from looplab.guard.guard import Problem
from looplab.judge.base import JudgeState, RunRequest
from looplab.ledger.catalogue import BeliefBeforeEvent
from looplab.ledger.roles import DECIDED, Origin, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import BudgetUsage, RunRow, is_failed
from looplab.loop.decision import Decider, Decision, ProposalRejected, base_runs, decide_base
from looplab.loop.events import Listener, Note, ProposalRefused, RoundEnded, RoundPlanned, Waiting
from looplab.loop.judging import StudyJudge
from looplab.loop.setup import Setup, make_proposers
from looplab.loop.submitting import time_spent
from looplab.report import labbook
from looplab.report.wording import plural
from looplab.runs import clock, folder
from looplab.runs.redact import redact_proposal, redact_text
from looplab.untrusted import clean_line

if TYPE_CHECKING:
    from looplab.decide.agent import Ask
    from looplab.decide.belief import StudyBelief
    from looplab.decide.search import SearchProposer

AHEAD = 64
"""A larger round is decided in portions, so that slots need not wait until all of it is. At most as many runs wait."""
NO_LIMIT = 1 << 30
COSTLY_S = 0.002
KEPT_RATIO = 20.0
"""How long a costly sum over all runs is used, in multiples of the CPU time that it took."""
CALLS_CHECKED = 200
"""Number of latest agent calls that are looked up in the lab book after a crash."""


ResultT = TypeVar("ResultT")


class Rationed(Generic[ResultT]):
    """A function whose cost grows with the study; limited to a twentieth of the time.

    A call that took less than `COSTLY_S` of CPU time is made each time. The result of a longer one is kept for a while.
    """

    def __init__(self, function: Callable[[], ResultT]) -> None:
        self._function = function
        self._results: list[ResultT] = []  # the last one
        self._due = 0.0  # when it is called again (`time.monotonic()`)

    def __call__(self) -> ResultT:
        if not self._results or time.monotonic() >= self._due:
            used = time.thread_time()
            self._results = [self._function()]
            used = time.thread_time() - used
            self._due = time.monotonic() + (KEPT_RATIO * used if used > COSTLY_S else 0.0)
        return self._results[0]


class Planner:
    """Plans runs; each is in the ledger before it is in the queue. Called inside a transaction."""

    def __init__(self, setup: Setup, study: StudyLedger, decider: Decider, study_judge: StudyJudge | None,
                 tell: Listener, book: Callable[[str], None],
                 wake: Callable[[], None] = lambda: None, asks: list[Ask] | None = None,
                 warn: Callable[[str, str], None] = lambda kind, text: None) -> None:  # fmt: skip
        """With `asks`, for a preview: no agent is called and no file is changed; the calls are collected there."""
        self.queue: deque[RunRow] = deque()
        """Decided on, waiting for a slot."""
        self.plans: dict[str, Decision] = {}
        self.why = ""
        """Why nothing more is decided on."""
        self.failure: str | None = None
        """Why the study ends before its work is done: an agent gave up, and the study is to stop then."""
        self.total: int | None = None
        """Maximum number of runs, if known."""
        self._setup = setup
        self._study = study
        self._decider = decider
        self._study_judge = study_judge
        self._tell = tell
        self._book = book
        outputs = folder.study_folder(setup.lab, study.name)
        history = History(study, outputs, setup.conditions, setup.study.objective)
        self._proposers = make_proposers(
            setup, history, outputs, self._left, wake, asks, check=self._check, report=self._report_call, tell=warn
        )
        self._search = find_search(self._proposers)
        self._file_proposers = [one for one in self._proposers if isinstance(one, FileProposer)]
        self._bases = [decide_base(setup, base) for base in setup.bases]  # those that may still need a run
        self._filling: tuple[int, int] | None = None  # a round that is not decided to its end: its number, what is left
        self._complaints: dict[str, str] = {}
        self._resting: float | None = None  # until then (`clock.now`) only people are polled: the others have nothing
        self._has_room = True
        # Sums over all runs. How many there are is counted apart, and never old.
        self._totals = Rationed(study.totals)
        self._submitted = Rationed(study.sibling().totals)
        self._waiting = Rationed(study.count_waiting)
        self._stops_on_failure = setup.options.stop_on_failure or any(
            entry.agent is not None and entry.agent.stop_on_failure for entry in setup.study.proposers
        )

    def recover(self, planned: list[RunRow]) -> None:
        """Take over the planned runs of an earlier engine, and a round whose planning was interrupted."""
        self._complete_book()
        self.queue = deque(sorted(planned, key=lambda run: run.n))
        if not (self._setup.keep_going or self._setup.options.asked_only):
            done = base_runs(self._setup, self._study)
            for base in self._bases:
                runs = done.get(base.key, ())
                if runs and all(self._setup.is_unusable(run) for run in runs):
                    self.retry_base(runs[-1])
        unfilled = self._study.unfilled_round()
        if unfilled is not None and not self._setup.options.continuous:
            decided = [run for run in self._study.runs(round=unfilled) if run.role in DECIDED]
            self._filling = (unfilled, self._setup.round_size - len(decided))

    def retry_base(self, run: RunRow) -> None:
        """Plan a base config again if its run was lost, failed or measured nothing, before everything else."""
        done = base_runs(self._setup, self._study)
        base = next((base for base in self._bases if any(one.id == run.id for one in done.get(base.key, ()))), None)
        if base is None or self._room() <= 0:
            return
        self._bases.remove(base)
        with self._study.ledger.write():
            self._take(replace(base, reason=f"{base.reason}, once more: run {run.id} {run.status}"), run.round)
        self.queue.rotate(1)

    @property
    def thinking(self) -> bool:
        """Whether a proposer is still working, so that an empty queue does not mean the end."""
        return self._has_room and any(proposer.thinking for proposer in self._proposers)

    @property
    def resting(self) -> bool:
        """Whether nothing can be proposed until a failed proposer is called again."""
        return self._has_room and self._resting is not None

    @property
    def undecided(self) -> int:
        """Runs of the current round that are planned later, while its first ones run."""
        return self._filling[1] if self._filling is not None else 0

    def close(self) -> None:
        for proposer in self._proposers:
            proposer.close()

    def refresh(self) -> None:
        """Read proposal files that people changed. Called outside any transaction, since it may take long."""
        for proposer in self._file_proposers:
            proposer.refresh(self._study)

    def plan(self, idle: bool, free: int) -> None:
        """Plan more runs if it is time to; `idle`: nothing runs or waits to be recorded."""
        if self.queue:
            return
        self._follow_up(free)
        continuous = self._setup.options.continuous
        if self._setup.options.asked_only:
            self.why = self.why or "everything requested is done"
            return
        if self.queue or not (continuous or idle):
            return
        if self._filling is not None:
            self.fill()
            if self.queue or self._filling is not None:
                return
        room = self._room()
        self._has_room = room > 0
        if room <= 0:
            return
        if continuous:
            current = self._study.open_round()
            if current is None:
                current = self._study.begin_round()
                self._study.fill_round(current)
            self._decide(current, min(room, free))
            self._foresee(room)
            return
        self._plan_round(room)

    def _plan_round(self, room: int) -> None:
        current = self._study.open_round()
        if current is not None and not self.thinking:
            self._study.close_round(current)
            self._tell(RoundEnded(f"round {current} is done", round=current))
        limit = self._limit("rounds")
        used = self._study.usage().rounds - self._since("rounds")
        if limit is not None and used >= limit:
            self.why = all_done(used, "round")
            return
        size = min(room, self._setup.round_size)
        # The slots of a large round begin as soon as each has a run and a successor; `fill` plans the rest.
        portion = size if size <= AHEAD else min(AHEAD, 2 * len(self._setup.slots))
        planned = self._decide(None, portion)
        if not planned:
            return
        n = self.queue[0].round
        self._filling = (n, size - planned) if planned < size and (planned == portion or self.thinking) else None
        if self._filling is None:
            self._study.fill_round(n)
        count = len(self.queue) if self._filling is None else size
        self._tell(RoundPlanned(f"round {n}: {plural(count, 'run')}", round=n, runs=count))
        self._book_round(n, count)
        self._foresee(room if limit is None else min(room, (limit - used) * self._setup.round_size))

    def fill(self) -> None:
        """Plan a few more runs of a round while its first ones run."""
        if self._filling is None or len(self.queue) >= AHEAD:
            return
        n, left = self._filling
        with self._study.ledger.write():
            planned = self._decide(n, min(left, 2 * len(self._setup.slots)))
            more = planned < left and (planned > 0 or self.thinking)
            self._filling = (n, left - planned) if more else None
            if self._filling is None:
                self._study.fill_round(n)

    def believe(self) -> StudyBelief | None:
        """Return what the model of the search believes; None if there is none yet."""
        if self._search is None:
            return None
        try:
            return self._search.believe(self._study)
        except Exception as error:  # a belief is information: the study continues without
            if is_environmental(error):
                raise
            self._tell(Note(f"the model of the search failed: {describe_error(error)}"))
            self._search = None
            return None

    def _believe_before(self) -> None:
        """Record what earlier studies predict, before the first run."""
        if self._search is None or self._study.runs(limit=1) or self._study.last_event("belief before"):
            return
        belief = self._search.believe_before()
        if belief is not None:
            names = ", ".join(one["study"] for one in belief["studies"])
            self._study.ledger.record(BeliefBeforeEvent(**belief), self._study.name)
            self._tell(Note(f"the search learns from {names}"))

    def _repeat_believed(self, round_: int | None) -> RunRow | None:
        """Plan one more run of the config that the model believes in, if that is due; without a judge only."""
        search = self._search
        if self._study_judge is not None or search is None:
            return None
        try:
            best = search.repeat_due(self._study)
        except Exception as error:  # the study continues without
            if is_environmental(error):
                raise
            return None
        if best is None:
            return None
        twin = self._study.run(best.run)
        seed = None if twin.seed is None else twin.seed + best.runs
        try:
            plan = self._decider.plan_of(twin)
        except LabError:  # its folder is gone
            return None
        why = f"best posterior mean: {best.mean:.5g} ± {best.sd:.2g} after {plural(best.runs, 'run')}"
        return self._take(self._decider.repeat(twin, plan, seed, why, by=search.name), round_)

    def _follow_up(self, free: int) -> None:
        """Plan what the open round still needs: replicates for the judge, and requeued runs."""
        wants = self._study_judge.requests if self._study_judge is not None else ()
        requeued = self._study.requeued(AHEAD)
        if not self._setup.study.watch and any(row.proposer == Origin.WATCH for row in requeued):
            requeued = self._study.waiting(AHEAD, Origin.AGAIN)  # those of rules that are gone stay where they are
        if not wants and not requeued:
            return
        room = self._room()
        round_ = self._study.open_round() or self._study.usage().rounds
        if room <= 0 or not round_:
            return
        room = min(room, free if self._setup.options.continuous else AHEAD)
        for row in requeued[:room]:
            room -= self._propose(waiting(row), round_)
        under_way = {(run.point, run.warm, run.seed): run for run in self._study.runs_open()}
        counted: dict[tuple[str, str | None], int] = {}
        for point, warm, _ in under_way:
            counted[point, warm] = counted.get((point, warm), 0) + 1
        for request in wants:
            if room <= 0:
                break
            key = (request.point, request.warm)
            if request.seed is not None:
                if (*key, request.seed) in under_way:
                    continue
            elif counted.get(key, 0) > 0:  # without seeds, one is as good as the other
                counted[key] -= 1
                continue
            room -= self._repeat(request, round_)

    def _repeat(self, request: RunRequest, round_: int) -> bool:
        """Plan a run that the judge requests; return whether that was possible."""
        try:
            twin = self._study.run(self._study.runs_of(request.point, None if request.control else request.warm)[0])
            if request.control:
                source = self._study.started_from(request.warm)
                decision = self._decider.control(twin, source, request.seed, request.why)
            else:
                decision = self._decider.repeat(twin, self._decider.plan_of(twin), request.seed, request.why)
                if request.again:
                    decision = replace(decision, role=Role.CONFIRMATION)
        except LabError as error:
            self._tell(Note(f"the judge requested {request.point} again, but {error}"))
            return False
        self._take(decision, round_)
        return True

    def _book_round(self, n: int, count: int) -> None:
        """Write a line in the lab book: what was decided, and why."""
        wanted = self._setup.study.objective
        seen = "nothing measured yet"
        best = self._study.best()
        if best is not None and best.objective is not None and wanted is not None:
            seen = f"best so far: {best.id} with {wanted.metric} = {best.objective:.6g}"
        repeats = (Role.REPLICATE, Role.CONFIRMATION)
        reasons = [run.reason for run in self.queue if run.reason and run.role not in repeats]
        following = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
        self._book(labbook.line(time.time(), f"round {n} decided", seen, plural(count, "run"), following))

    def _decide(self, round_: int | None, room: int) -> int:
        """Plan up to `room` runs: base configs that were not run yet, and proposals that pass the guard.

        Args:
            round_: The round; None: a new one begins with the first run.
        """
        planned = 0
        self._believe_before()
        if self._bases:
            self._bases = bases_to_run(self._setup, self._study, self._bases)
        while self._bases and planned < room:
            base = self._bases.pop(0)
            run = self._take(base, round_)
            round_ = run.round
            planned += 1
            if self._study_judge is not None and base.base == self._setup.bases[0].name and not self._has_judged():
                self._plan_baseline(run, base, round_)
                room = planned + min(room - planned, max(0, self._room()))
        if planned < room and not self._setup.options.autopilot:
            repeated = self._repeat_believed(round_)
            if repeated is not None:
                round_ = repeated.round
                planned += 1
        while planned < room:
            proposals = self._proposals(room - planned)
            if not proposals:
                break
            accepted = 0
            for proposal in proposals:
                if self._propose(proposal, round_):
                    accepted += 1
                    round_ = self.queue[-1].round
            planned += accepted
            if not accepted and all(proposal.id is None for proposal in proposals):
                break  # a program whose every proposal is refused would never end
        if not planned and not self.thinking:
            problems = "; ".join(problem for problem in self._complaints.values() if problem)
            self.why = problems or "no proposer has anything left to try (add a proposal with `looplab propose`)"
            self._rest()
        return planned

    def _rest(self) -> None:
        """Wait for a failed proposer, if there is one: no other proposer has anything to propose."""
        times = [one.retry_at for one in self._proposers if isinstance(one, FallibleProposer)]
        until = min((at for at in times if at is not None), default=None)
        if until is not None and self._resting is None and self.failure is None:
            wait = max(0.0, until - clock.now())
            self._tell(Waiting(f"nothing else to try: the agent is called again in {wait:.0f} s"))
        self._resting = until

    def _has_judged(self) -> bool:
        kept = self._study.judge_state()
        return kept is not None and JudgeState.from_dict(kept) != JudgeState()

    def _plan_baseline(self, run: RunRow, base: Decision, round_: int) -> None:
        """Plan the noise floor: the base config with as many seeds as the judge needs."""
        assert self._study_judge is not None
        room = self._room()
        for k in range(1, min(self._study_judge.baseline_seeds, 1 + max(0, room))):
            seed = None if base.seed is None else base.seed + k
            what = f"run {k + 1} (no seed reaches the trainer)" if seed is None else f"seed {seed}"
            decision = self._decider.repeat(run, base.plan, seed, f"noise floor: the base, {what}")
            self._take(decision, round_)

    def _foresee(self, room: int) -> None:
        """Estimate the number of runs: what the budget leaves or, if only people propose, what waits."""
        room -= len(self.queue)
        queues = [proposer for proposer in self._proposers if isinstance(proposer, QueueProposer)]
        if len(queues) == len(self._proposers):
            room = min(room, self._waiting() + sum(queue.left for queue in queues))
        known = room < NO_LIMIT // 2
        self.total = self._study.usage(self._totals()).runs + max(0, room) if known else None

    def _proposals(self, n: int) -> list[Proposal]:
        if self._resting is not None and clock.now() >= self._resting:
            self._resting = None
        for proposer in self._proposers:
            if self._resting is not None and not Origin.of(proposer.name).is_person:
                continue
            proposals = ask(proposer, self._study, n)
            if proposer.problem is not None and self._complaints.get(proposer.name) != proposer.problem:
                self._tell(Note(f"{proposer.name}: {proposer.problem}"))
            self._complaints[proposer.name] = proposer.problem or ""
            if self._stops_on_failure and isinstance(proposer, FallibleProposer) and proposer.failure is not None:
                self.failure = f"{proposer.name}: {proposer.failure}"
                return []
            if proposals or (proposer.thinking and not self._setup.options.continuous):
                return proposals
        return []

    def _check(self, proposal: Proposal) -> Sequence[Problem]:
        """Return why a proposal would be rejected, without writing anything."""
        try:
            self._decider.decide(proposal)
        except ProposalRejected as rejected:
            return rejected.problems
        return ()

    def _report_call(self, call: str, why: str, outcome: str) -> None:
        """Report an agent call without a usable answer."""
        why = clean_line(redact_text(why), MAX_PROBLEM)
        self._tell(Waiting(f"agent, call {call}: {why}; {outcome}"))
        self._book(_call_line(time.time(), call, why, outcome))

    def _complete_book(self) -> None:
        """Write lab-book lines of failed calls that a killed engine did not write."""
        failed = [call for call in self._study.agent_calls()[-CALLS_CHECKED:] if is_failed(call)]
        path = folder.study_folder(self._setup.lab, self._study.name)
        missing = set(labbook.missing(path, [call["call"] for call in failed], "agent call"))
        for call in failed:
            if call["call"] in missing:
                why = clean_line(redact_text(str(call["answer"]["why"])), MAX_PROBLEM)
                self._book(_call_line(call["answer"]["at"], call["call"], f"the call failed: {why}", ""))

    def _propose(self, proposal: Proposal, round_: int | None) -> bool:
        """Check a proposal and plan its run; return whether it became one."""
        if proposal.id is None:
            edits, reason, hypothesis = redact_proposal(proposal.edits, proposal.reason, proposal.hypothesis)
            proposal = replace(proposal, edits=edits, reason=reason, hypothesis=hypothesis)
            id_ = self._study.propose(
                proposal.proposer, proposal.edits, proposal.reason, parent=proposal.parent,
                hypothesis=proposal.hypothesis, source=proposal.source,
            )  # fmt: skip
            if id_ is None:
                return False  # it was taken before
            proposal = replace(proposal, id=id_)
        assert proposal.id is not None
        try:
            with self._study.ledger.savepoint():
                decision = self._decider.decide(proposal)
                self._take(decision, round_)
        except ProposalRejected as rejected:
            problems = rejected.problems
        except Exception as error:  # whatever one proposal contains, the study continues
            if is_environmental(error):
                raise
            problems = (Problem("proposal", None, "edit", describe_error(error)),)
        else:
            if decision.ineffective:
                self._tell(Note(f"proposal {proposal.id} ({' '.join(proposal.edits)}): {decision.warning}"))
            return True
        self._study.reject(proposal.id, [_plain(problem) for problem in problems])
        why = "; ".join(problem.message for problem in problems)
        text = f"rejected: proposal {proposal.id} ({' '.join(proposal.edits) or proposal.reason}): {why}"
        messages = tuple(problem.message for problem in problems)
        self._tell(ProposalRefused(text, proposal=proposal.id, problems=messages))
        return False

    def _take(self, decision: Decision, round_: int | None) -> RunRow:
        if round_ is None:
            round_ = self._study.begin_round()
        run = self._study.plan(
            round=round_, proposal=decision.proposal, proposer=decision.proposer, parent=decision.parent,
            base=decision.base, reason=decision.reason, config_hash=decision.config_hash,
            devices=max(1, len(self._setup.slots[0].devices)), plan=decision.plan, role=decision.role,
            point=decision.point, seed=decision.seed, twin=decision.twin, warm=decision.warm,
        )  # fmt: skip
        self.plans[run.id] = decision
        self.queue.append(run)
        return run

    # -- budget

    def _limit(self, name: str) -> int | None:
        said: int | None = getattr(self._setup.options, name)
        limit: int | None = said if said is not None else getattr(self._setup.study.budget, name)
        return limit

    def _since(self, name: str) -> int:
        """Return the number of rounds or runs before the call from which the limit counts."""
        options = self._setup.options
        if getattr(options, name) is None:
            return 0
        return options.since_round if name == "rounds" else options.since_run

    def _used(self) -> BudgetUsage:
        """Return what was used of the budget, which the study shares with its submitted commands."""
        totals = self._totals()
        usage = self._study.shared_usage(totals, self._submitted())
        # A number of runs on the command line applies to this study only.
        return usage if self._setup.options.runs is None else replace(usage, runs=self._study.usage(totals).runs)

    def spent(self, usage: BudgetUsage | None = None) -> str | None:
        """Return which time budget is used up, in words; None: none is."""
        return time_spent(self._setup.study.budget, usage or self._used())

    def _left(self) -> str:
        """Return what the budget leaves, in words."""
        usage = self._used()
        budget = self._setup.study.budget
        limits = [("rounds", usage.rounds, "round"), ("runs", usage.runs, "run")]
        said = [
            plural(max(0, limit - used + self._since(name)), what)
            for name, used, what in limits
            if (limit := self._limit(name)) is not None
        ]
        if budget.wall is not None:
            said.append(f"{max(0.0, budget.wall - usage.wall) / 60:.0f} minutes")
        if budget.device_hours is not None:
            said.append(f"{max(0.0, budget.device_hours - usage.device_hours):.1f} device-hours")
        return ", ".join(said) or "no limit is set"

    def _room(self) -> int:
        """Return how many runs may still be planned; set `why` if there are none."""
        usage = self._used()
        spent = self.spent(usage)
        if spent is not None:
            self.why = spent
            return 0
        limit = self._limit("runs")
        if limit is None:
            return NO_LIMIT
        runs = usage.runs - self._since("runs")
        if runs >= limit:
            submitted = usage.runs - self._study.usage(self._totals()).runs
            self.why = all_done(runs, "run") + (f", {submitted} of them submitted commands" * (submitted > 0))
        return limit - runs


def all_done(count: int, what: str) -> str:
    """Return `all 3 rounds are done`: as many as the budget allows, or more if it allowed more before."""
    return f"1 {what} is done" if count == 1 else f"all {count} {what}s are done"


def find_search(proposers: Sequence[Proposer]) -> SearchProposer | None:
    """Return the search among the proposers, including those in a mix; None if there is none."""
    for proposer in proposers:
        if isinstance(proposer, Mix):
            return find_search(proposer.proposers)
        if proposer.name == "search":
            from looplab.decide.search import SearchProposer

            if isinstance(proposer, SearchProposer):
                return proposer
    return None


def bases_to_run(setup: Setup, study: StudyLedger, bases: Sequence[Decision]) -> list[Decision]:
    """Return the base configs that this call has to run: never run before, or wanted again."""
    done = base_runs(setup, study)
    if not setup.options.again:
        return [base for base in bases if base.key not in done]
    wanted = []
    since = [run for run in study.runs() if run.n > setup.options.since_run and run.base is not None]
    for base in bases:
        first = next((run for run in done.get(base.key, ()) if not setup.is_unusable(run)), None)
        if first is None:
            if not any(run.n > setup.options.since_run for run in done.get(base.key, ())):
                wanted.append(base)
        elif not any(run.twin == first.id and run.proposer == base.proposer for run in since):
            # With the same seed it is not evidence about the spread.
            role = Role.REPLICATE if base.seed is None else Role.REPRODUCTION
            wanted.append(replace(base, role=role, twin=first.id, reason=f"{base.reason}, again"))
    return wanted


def _call_line(at: float, call: str, why: str, outcome: str) -> str:
    return labbook.line(at, f"agent call {call}", why, outcome, "")


def _plain(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in ("key", "value", "rule", "message", "nearest")}
