"""The agent proposer: a coding agent reads the facts of the study and proposes what to try next.

A call takes minutes, so it runs in its own thread while the engine continues. Questions and answers are recorded in the
ledger; an answer that arrived while the engine crashed is read from the agent's log instead of being asked for again.
Each proposal of an answer is checked as the engine would check it, without writing anything. If all are refused, the
agent is called again with the reasons, a few times. A failed call is retried with exponential backoff. After too many
refusals or failures the agent gives up: other proposers or a stand-in search take over, and it is called again for the
next iteration.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.agents.account import Account, Allowance, account_of
from looplab.agents.base import AgentSession, Answer, Limits
from looplab.agents.integrity import CallGuard
from looplab.agents.lines import named_secrets
from looplab.agents.log import read_end
from looplab.agents.process import kill_marked
from looplab.agents.run import check_spec, new_log, run_agent, spec_of
from looplab.config.edits import Op, edits_from_partial, parse_edit
from looplab.config.files import write_atomic
from looplab.config.lab import AgentConfig, StudyConfig
from looplab.decide.base import Proposal, Proposer, ask, describe_error, is_environmental
from looplab.decide.belief import describe
from looplab.decide.history import History
from looplab.decide.prompt import SCHEMA, notes_section, read_template, render_prompt
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.ledger.catalogue import AgentAnsweredEvent, AgentAskedEvent
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow, StudyView
from looplab.runs import clock
from looplab.runs.redact import redact_data, redact_proposal, redact_text, remember
from looplab.untrusted import MAX_TEXT, UntrustedError, clean_line, load_json, mend, mend_text, read_bounded

if TYPE_CHECKING:
    from looplab.decide.search import SearchProposer

NAME = "agent"
EMPTY = b"{}\n"
"""Content of a cleared answer file."""
_BLOCK = re.compile(r"```(?:json)?[^\S\n]*+\n(.*?)```", re.DOTALL)
KEYS = {"edits", "reason", "hypothesis", "parent", "region"}
MAX_ANSWER = 1_000_000
"""Maximum size of an answer file, in bytes."""
MAX_REASON = 300
"""Maximum length of quoted edits and parser errors, in characters."""
MAX_REFUSALS = 8
"""Refusals that a question quotes."""
MAX_REFUSAL = 1_000
"""Maximum length of one refusal, in characters."""
LAST_LINES = 20
"""Lines at the end of an output that are searched for the answer."""
MAX_WAIT_S = 600.0
"""Upper limit of the backoff, in seconds."""
STOPPED = "stopped"
"""Reason recorded for a call that looplab itself stopped."""

Check = Callable[[Proposal], Sequence[Problem]]
Report = Callable[[str, str, str], None]
"""Called with the id of a call, what went wrong, and what happens next."""


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """A proposal as the agent wrote it, not checked yet."""

    edits: tuple[str, ...]
    partial: Mapping[str, Any] | None
    """A nested partial config instead of edits; None if there are edits."""
    reason: str = ""
    hypothesis: str = ""
    parent: str = ""
    region: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Ranges or choices of knobs in which the search chooses the point; empty: the edits say everything."""


@dataclass(slots=True)
class _PendingCall:
    """A call of the agent, running or finished."""

    id: str
    n: int
    attempt: int
    """Index of this question for one round, from 1; a repeated call keeps it."""
    parent: str | None
    log: Path
    answer: Answer | None = None
    text: str | None = None
    """The answer, from the file or the last message; None if there is none."""
    refused: str | None = None
    """Why the answer is refused as a whole; None if it is not."""
    error: str | None = None
    thread: threading.Thread | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the call is still running."""
        return self.answer is None and self.error is None and (self.thread is None or self.thread.is_alive())

    @property
    def failure(self) -> str | None:
        """Why the call failed; None if there is an answer."""
        if self.answer is None:
            return self.error or "the call was interrupted; see its log"
        return None if self.answer.ok else self.answer.why or "it returned no answer"


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of an agent that a preview does not make."""

    proposer: str
    cli: str
    """codex | claude | command"""
    runs_at_most: int
    """The number of proposals that would be requested."""


class AgentProposer:
    name = NAME

    def __init__(
        self, settings: AgentConfig, study: StudyConfig, guard: Guard, lab: Path, outputs: Path, history: History,
        base: Mapping[str, Any], left: Callable[[], str], wake: Callable[[], None] = lambda: None, *,
        check: Check | None = None, report: Report = lambda call, why, outcome: None,
        stand_in: Callable[[], Proposer | None] = lambda: None,
        tell: Callable[[str, str], None] = lambda kind, text: None,
        search: Callable[[], SearchProposer | None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            left: Returns the remaining budget in words.
            wake: Called from the thread of a call when it has finished.
            check: Returns why a proposal would be rejected; None: only the guard checks it.
            report: Called for every failed call and every refused answer.
            stand_in: Returns the proposer that takes over after the agent gave up; None if there is none.
            tell: Called with a kind (`note` or `alarm`) and a sentence about files that were changed.
            search: Returns a search over the knobs, whose model the agent sees and which fills regions; None if there
                is none.
        """
        self.problem: str | None = None
        self.failure: str | None = None
        """Why the agent gave up; None if it has not, or is being asked again."""
        self._settings = settings
        self._study = study
        self._guard = guard
        self._outputs = outputs
        self._history = history
        self._base = dict(base)
        self._left = left
        self._wake = wake
        self._check = check
        self._report = report
        self._make_stand_in = stand_in
        self._search = cache(search)
        self._stand_in: Proposer | None = None
        self._logs = lab / "agent_runs"
        self._file = lab / settings.answer
        self._template = read_template(lab / settings.prompt if settings.prompt else None)
        self._spec = spec_of(settings, lab)
        self._files = CallGuard(self._spec, lab, outputs, study, self._file, tell)
        remember({}, named_secrets(os.environ, self._spec.env))
        self._allowance = Allowance(study.budget.tokens, study.budget.usd)
        check_spec(self._spec, self._limits())
        self._call: _PendingCall | None = None
        self._session: AgentSession | None = None
        self._recovered = False
        self._unfinished: Path | None = None  # the log of a call that an earlier engine started
        self._stop = threading.Event()
        self._attempt = 1  # of the next call; counts refused answers in one iteration
        self._failures = 0  # failed calls in a row
        self._ask_at = 0.0  # the earliest time of the next call (`clock.now`)
        self._retrying = False  # whether a failed call is retried at `_ask_at`
        self._given_up = 0  # iterations in a row in which it gave up
        self._gave_up_at = 0.0

    @property
    def thinking(self) -> bool:
        return self._call is not None or self._retrying

    @property
    def retry_at(self) -> float | None:
        """Time of the next retry (`clock.now`) if no other proposer has proposals; None if it has not given up."""
        if self.failure is None or self.thinking:
            return None
        return max(self._ask_at, self._gave_up_at + self._backoff(self._given_up))

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        self.problem = None
        if not self._recovered:
            self._recover(study)
        if self._call is None:
            if clock.now() < self._ask_at:
                return [] if self._retrying else self._propose_instead(study, n)
            used = account_of(study).left(self._allowance).used_up
            if used is not None:
                self.problem = f"the budget of {used} for agents is used up"
                self._retrying = False
                self.failure = None  # not a failure: there is no stand-in
                return []
            self._ask(study, n, self._attempt)
        call = self._call
        assert call is not None
        if call.is_pending:
            return []
        self._call = None
        proposals = self._finish_call(study, call)
        return proposals if proposals or self.thinking else self._propose_instead(study, n)

    def close(self) -> None:
        """Stop the agent; its answer so far is in its log."""
        self._stop.set()
        if self._call is not None and self._call.thread is not None:
            self._call.thread.join()
        if self._stand_in is not None:
            self._stand_in.close()

    # -- asking

    def _limits(self, account: Account | None = None) -> Limits:
        settings = self._settings
        limits = Limits(settings.wall, settings.tokens, settings.usd, retries=settings.retries,
                        log_bytes=settings.log_mb << 20)  # fmt: skip
        return (account or Account()).left(self._allowance).within(limits)

    def _backoff(self, times: int) -> float:
        """Return the backoff in seconds after this many failures in a row."""
        return min(MAX_WAIT_S, self._settings.backoff * 2.0 ** min(times - 1, 30)) if times else 0.0

    def _ask(self, study: StudyLedger, n: int, attempt: int) -> None:
        """Start a call; an error before the start counts as a failed call."""
        self._retrying = False
        self.failure = None
        parent, config = self._parent(study)
        call = _PendingCall(
            f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}", n, attempt, parent.id if parent else None, Path()
        )
        session = self._session if attempt > 1 and not self._failures else None
        prompt = ""
        try:
            if self._unfinished is not None:  # it dies with its engine, unless its supervisor was killed too
                kill_marked(str(self._unfinished.absolute()))
                self._unfinished = None
            prompt = self._prompt(study, n, attempt, parent, config, session)
            # An old file is not an answer to this question. It is removed, not emptied: claude does not overwrite an
            # existing file that it has not read.
            self._file.parent.mkdir(parents=True, exist_ok=True)
            remove(self._file)
            self._files.prepare(study)
            call.log = new_log(self._logs, self._study.name)
            call.id = call.log.stem
        except Exception as error:
            if is_environmental(error):
                raise
            call.error = f"it cannot be called: {describe_error(error)}"
        limits = self._limits(account_of(study))
        event = AgentAskedEvent(
            call=call.id, log=call.log.name, n=n, attempt=attempt, parent=call.parent, cli=self._spec.cli
        )
        study.record_agent(event)
        self._call = call
        if call.error is None:
            call.thread = threading.Thread(target=self._run_call, args=(call, prompt, session, limits), name="agent")
            call.thread.start()

    def _prompt(
        self, study: StudyLedger, n: int, attempt: int, parent: RunRow | None, config: Mapping[str, Any],
        session: AgentSession | None,
    ) -> str:  # fmt: skip
        """Return the question; after a refused answer it ends with the reasons."""
        refused = refusals_of(study)
        last = refused.pop() if attempt > 1 and refused else []
        reasons = "\n".join(f"- {why}" for why in last)
        retry = f"Your last answer could not be used:\n{reasons}\nAnswer again." if last else ""
        if session is not None and retry:  # the rest is in the conversation
            return retry + notes_section(study)
        earlier = [why for answer in refused for why in answer]
        objective = self._study.objective
        prompt = render_prompt(
            self._template, self._study, self._guard, study, self._history, self._outputs, parent=parent,
            parent_config=config, n=n, answer=str(self._file), budget=self._left(), refused=earlier[-MAX_REFUSALS:],
            model=self._beliefs(study, objective.metric) if objective is not None else (),
        )  # fmt: skip
        return f"{prompt}\n{retry}" if retry else prompt

    def _beliefs(self, study: StudyView, metric: str) -> list[str]:
        """Return what the model of the search believes, in sentences; empty if there is none yet."""
        try:
            search = self._search()
            belief = search.believe(study) if search is not None else None
        except Exception as error:  # the agent is called without it
            if is_environmental(error):
                raise
            return []
        return describe(belief, metric) if belief is not None else []

    def _run_call(self, call: _PendingCall, prompt: str, session: AgentSession | None, limits: Limits) -> None:
        """Run the call in its thread, and save the answer next to its log."""
        try:
            self._files.begin(call.id)
            answer = run_agent(
                self._spec, prompt, cwd=self._file.parent, log=call.log, limits=limits, resume=session, schema=SCHEMA,
                stop=self._stop,
            )  # fmt: skip
            self._files.finish()
            self._collect(call, answer)
            call.answer = answer
        except LabError as error:
            call.error = str(error)
        except Exception as error:  # noqa: BLE001 (an error in a thread would be lost)
            call.error = describe_error(error)
        finally:
            self._wake()

    def _collect(self, call: _PendingCall, answer: Answer) -> None:
        """Set the text of the answer: the answer file or its saved copy, else the last message."""
        saved = call.log.with_suffix(".answer.json")
        try:
            written = written_in(self._file)
            if written is not None:
                self._save_answer(call, written)
            call.text = written or written_in(saved) or answer.text
        except LabError as error:
            call.refused = str(error)

    def _save_answer(self, call: _PendingCall, written: str) -> None:
        """Copy the answer next to the log and clear the file, so that it is not taken for a person's proposal."""
        write_atomic(call.log.with_suffix(".answer.json"), mend_text(written).encode(), sync=False)
        write_atomic(self._file, EMPTY, sync=False)

    def _clear_unusable(self) -> None:
        """Remove an answer file that can never be read."""
        remove_unusable(self._file)

    def _parent(self, study: StudyLedger, name: str = "") -> tuple[RunRow | None, dict[str, Any]]:
        """Return the run that edits apply to and its config: the named run, else the champion, else the base (None)."""
        run = study.best() if name in ("", "best") else None if name == "base" else study.run(name)
        if run is None:
            return None, self._base
        try:
            return run, study.config_of(run, self._outputs / run.id)
        except LabError:
            return None, self._base

    # -- answers

    def _finish_call(self, study: StudyLedger, call: _PendingCall) -> list[Proposal]:
        """Record how a call ended; return its proposals, ask again, or give up."""
        answer = call.answer
        outcome: dict[str, Any] = {"usage": {}}
        if answer is not None:
            self._session = answer.session
            usage = {key: value for key, value in asdict(answer.usage).items() if key not in ("scope", "message")}
            outcome = {"usage": usage, "seconds": round(answer.seconds, 3), "attempts": answer.attempts,
                       "session": answer.session.id if answer.session else None}  # fmt: skip
        void = self._files.rule(study, call.id)
        if void is not None:
            outcome["void"] = void
            call.refused = f"{void}. Write to {self._file} and nowhere else"
        failure = call.failure
        if failure is not None:
            failure = clean_line(failure, MAX_REFUSAL)
            study.record_agent(AgentAnsweredEvent(call=call.id, ok=False, why=failure, **outcome), when=clock.now())
            self._clear_unusable()
            self._attempt = call.attempt
            self._count_failure(call.id, failure, self._failures + 1, clock.now())
            return []
        self._failures = 0
        proposals, refused = self._check_answer(study, call)
        outcome |= {"accepted": len(proposals), "refused": refused}
        study.record_agent(AgentAnsweredEvent(call=call.id, ok=True, why="", **outcome))
        if refused:
            self._clear_unusable()
        if proposals:
            self._attempt, self._given_up, self.failure = 1, 0, None
            return proposals
        why = "; ".join(refused)
        if call.attempt < self._settings.tries and not self._stop.is_set():
            self._report(call.id, f"its answer was rejected: {why}", f"called again, try {call.attempt + 1}")
            self._ask(study, call.n, call.attempt + 1)
        else:
            self._give_up(f"no legal proposal after {call.attempt} tries: {why}", clock.now())
            self._report(call.id, f"its answer was rejected: {why}", f"gave up after {call.attempt} tries")
        return []

    def _count_failure(self, call: str, why: str, times: int, at: float) -> None:
        """Record the failure of a call, the `times`-th in a row: schedule a retry, or give up."""
        self._failures = times
        self._ask_at = at + self._backoff(times)
        self._retrying = times <= self._settings.call_retries
        wait = f"called again in {self._backoff(times):.3g} s"
        if not self._retrying:
            calls = "one call" if times == 1 else f"{times} calls in a row"
            self._give_up(f"{calls} failed: {why}", at)
            wait = f"gave up for now; {wait} at the earliest"
        self._report(call, f"the call failed: {why}", wait)

    def _give_up(self, why: str, at: float) -> None:
        """Leave this iteration to other proposers."""
        self._attempt = 1
        self._given_up += 1
        self._gave_up_at = at
        self.failure = clean_line(why, MAX_REFUSAL)

    def _propose_instead(self, study: StudyLedger, n: int) -> list[Proposal]:
        """Return the proposals of the stand-in if the agent gave up."""
        if self.failure is None:
            return []
        self.problem = self.failure
        if self._stand_in is None:
            self._stand_in = self._make_stand_in()
        if self._stand_in is None:
            return []
        proposals = ask(self._stand_in, study, n)
        if not proposals:
            why = self._stand_in.problem or "it has nothing to propose"
            self.problem = f"{self.failure}; {self._stand_in.name}, the stand-in: {why}"
        return [replace(one, reason=f"in place of the agent: {one.reason}") for one in proposals]

    def _check_answer(self, study: StudyLedger, call: _PendingCall) -> tuple[list[Proposal], list[str]]:
        """Return the proposals of an answer that may be run, and why the others may not."""
        proposals: list[Proposal] = []
        refused: list[str] = []
        drafts: list[DraftProposal] = []
        try:
            if call.refused is not None:
                raise LabError(call.refused)
            drafts = read_answer(call.text or "")[: call.n]
            if not drafts:
                refused.append("it contained no proposal")
        except LabError as error:
            refused.append(str(error))
        for i, draft in enumerate(drafts):
            proposal, problems = self._check_draft(study, call, i, draft)
            if not problems:
                proposals.append(proposal)
                continue
            id_ = study.propose(
                NAME, proposal.edits, proposal.reason, parent=proposal.parent, hypothesis=proposal.hypothesis,
                source=proposal.source,
            )  # fmt: skip
            if id_ is not None:
                study.reject(id_, [{"key": p.key, "value": p.value, "rule": p.rule, "message": p.message,
                                    "nearest": p.nearest} for p in problems])  # fmt: skip
            edits = clean_line(" ".join(proposal.edits), MAX_REASON)
            refused.append(f"{edits}: " + "; ".join(p.message for p in problems))
        return proposals, [clean_line(redact_text(why), MAX_REFUSAL) for why in refused[:MAX_REFUSALS]]

    def _check_draft(
        self, study: StudyLedger, call: _PendingCall, i: int, draft: DraftProposal
    ) -> tuple[Proposal, list[Problem]]:
        """Return a draft as a proposal, and the reasons to reject it."""
        source = f"{NAME}:{call.id}:{i}"
        run: RunRow | None = None
        edits = draft.edits
        try:
            if draft.region:
                return self._fill(study, draft, source)
            run, config = self._parent(study, draft.parent or call.parent or "base")
            edits = edits_of(draft, config, self._guard)
            edits, reason, hypothesis = redact_proposal(edits, draft.reason, draft.hypothesis)
            proposal = Proposal(edits, reason, NAME, run.id if run else None, hypothesis, None, source)
            return proposal, list(self._check(proposal) if self._check else self._ask_guard(config, edits))
        except Exception as error:  # reported to the agent
            if is_environmental(error):
                raise
            proposal = Proposal(edits, draft.reason, NAME, None, draft.hypothesis, None, source)
            return proposal, [Problem("proposal", None, "edit", describe_error(error))]

    def _fill(self, study: StudyLedger, draft: DraftProposal, source: str) -> tuple[Proposal, list[Problem]]:
        """Return the point of a region that the search chooses, as a proposal of the agent."""
        search = self._search()
        if search is None:
            raise LabError("a region needs numpy, scipy and an objective; name values instead")
        filled = search.fill(study, {**draft.region, **_fixed_by(draft.edits)})
        reason = f"{draft.reason} (chosen in its region by {filled.reason})"
        edits, reason, hypothesis = redact_proposal(filled.edits, reason, draft.hypothesis)
        proposal = Proposal(edits, reason, NAME, None, hypothesis, None, source)
        return proposal, list(self._check(proposal) if self._check else self._ask_guard(self._base, edits))

    def _ask_guard(self, config: dict[str, Any], edits: Sequence[str]) -> Sequence[Problem]:
        ruling = self._guard.check(config, edits)
        if not ruling.problems and not ruling.changes:
            return [Problem("config", list(edits), "edit", "it changes nothing")]
        return ruling.problems

    # -- after a crash

    def _recover(self, study: StudyLedger) -> None:
        """Continue where an earlier engine stopped: use an answer that arrived, and count the failures in a row."""
        self._recovered = True
        calls = study.agent_calls()
        if not calls:
            return
        last = calls[-1]
        is_open = last["answer"] is None
        self._continue_count(study, calls[:-1] if is_open else calls)
        if is_open:
            self._recover_call(study, last)

    def _continue_count(self, study: StudyLedger, calls: Sequence[Mapping[str, Any]]) -> None:
        """Count the calls that failed in a row before the engine crashed.

        After an orderly exit the count restarts at 0: the agent may have been repaired since.
        """
        ended = study.last_event("engine ended")
        failed: list[Mapping[str, Any]] = []
        for call in reversed(calls):
            answer = call["answer"]
            if answer is None or answer.get("interrupted"):
                continue
            if answer["ok"] or answer["seq"] < ended:
                break
            failed.append(call)
        if not failed:
            return
        self._failures = len(failed)
        if failed[0] is calls[-1]:
            answer = failed[0]["answer"]
            at = min(clock.now(), answer["at"])
            self._attempt = failed[0]["attempt"]
            self._ask_at = at + self._backoff(self._failures)
            self._retrying = self._failures <= self._settings.call_retries
            if not self._retrying:
                self._give_up(f"{self._failures} calls in a row failed: {answer['why']}", at)

    def _recover_call(self, study: StudyLedger, last: Mapping[str, Any]) -> None:
        """Use the answer of a call that an earlier engine started, if the call finished."""
        log = self._logs / last["log"]
        try:
            answer = read_end(log)
        except (LabError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            answer = None  # not written by looplab
        call = _PendingCall(last["call"], last["n"], last["attempt"], last["parent"], log)
        if answer is None or (not answer.ok and answer.why == STOPPED):
            self._unfinished = log
            self._attempt = call.attempt
            why = "looplab ended before it had answered"
            usage = asdict(answer.usage) if answer else {}
            study.record_agent(AgentAnsweredEvent(call=call.id, ok=False, why=why, usage=usage, interrupted=True))
            return
        self._files.recover(call.id)
        # The file was removed before the call, so its present content is the answer.
        self._collect(call, answer)
        call.answer = answer
        self._call = call


class UnaskedAgent(AgentProposer):
    """The agent in a preview: an existing answer is used; instead of a call, an entry is added to `asks`."""

    def __init__(self, *args: Any, asks: list[Ask], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asks = asks
        self._files.looks_only = True

    def _ask(self, study: StudyLedger, n: int, attempt: int) -> None:
        self._asks.append(Ask(self.name, self._spec.cli, n))
        self._retrying = False
        self._call = _PendingCall("", n, attempt, None, Path())

    def _save_answer(self, call: _PendingCall, written: str) -> None:
        """Do nothing: a preview leaves the file as it is."""

    def _clear_unusable(self) -> None:
        """Do nothing: a preview leaves the file as it is."""


def remove(path: Path) -> None:
    """Remove a file, link, pipe or folder.

    Raises:
        OSError: It cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        if not path.is_dir() or path.is_symlink():
            raise
        shutil.rmtree(path)


def remove_unusable(path: Path) -> None:
    """Remove anything but a regular file of readable size."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ANSWER:
            remove(path)
    except OSError:
        pass  # the next call removes it, or reports why it cannot


def edits_of(draft: DraftProposal, config: dict[str, Any], guard: Guard | None) -> tuple[str, ...]:
    """Return the edits of a draft. In a partial config, a null that is not legal means that the key is left out.

    Raises:
        LabError: The draft is a region.
    """
    if draft.region:
        raise LabError("only an agent of the study can propose a region; name values instead")
    if draft.partial is None:
        return draft.edits
    edits = edits_from_partial(draft.partial, config)
    edits = [edit for edit in edits if edit.value is not None or guard is None or guard.takes_null(config, edit.path)]
    return tuple(map(str, edits))


def refusals_of(study: StudyLedger) -> list[list[str]]:
    """Return the reasons why answers were refused since the last accepted one, one list per answer, oldest first."""
    refusals: list[list[str]] = []
    for call in reversed(study.agent_calls()):
        answer = call["answer"] or {}
        reasons = answer.get("refused")
        if isinstance(reasons, list) and reasons:
            refusals.append([clean_line(str(why), MAX_REFUSAL) for why in reasons[:MAX_REFUSALS]])
        if answer.get("accepted") or len(refusals) >= MAX_REFUSALS:
            break
    return refusals[::-1]


def written_in(path: Path) -> str | None:
    """Return what was written to the file since it was cleared; None if nothing was.

    Raises:
        LabError: The file is a link, a pipe, or too large.
    """
    try:
        text = read_bounded(path, MAX_ANSWER, follow=False).decode("utf-8", "replace")
    except UntrustedError as error:
        raise LabError(str(error), file=path) from None
    except OSError:
        return None
    return None if text.strip() in ("", "{}") else redact_text(text)


def read_answer(text: str, *, is_file: bool = False) -> list[DraftProposal]:
    """Parse the proposals of an answer: JSON, alone or in a fenced block, with edits or a nested partial config.

    Args:
        is_file: Whether the text is the content of a file that must be JSON.

    Raises:
        LabError: There is no proposal in it; JSON errors come with line and column.
    """
    if len(text) > MAX_ANSWER:
        raise LabError(f"the answer has more than {MAX_ANSWER:,} characters")
    data = _find_json(text, is_file)
    if isinstance(data, dict) and isinstance(data.get("proposals"), list):
        data = data["proposals"]
    entries = data if isinstance(data, list) else [data]
    if entries and all(isinstance(entry, str) for entry in entries):
        entries = [{"edits": entries}]
    return [_parse_draft(entry) for entry in entries if entry not in ({}, None)]


def _parse_draft(entry: Any) -> DraftProposal:
    if not isinstance(entry, dict):
        raise LabError(f"a proposal must be an object with `edits`, not {type(entry).__name__}")
    words: dict[str, Any] = {key: str(entry.get(key) or "") for key in ("reason", "hypothesis", "parent")}
    words["region"] = _parse_region(entry.get("region") or {})
    edits = entry.get("edits", entry.get("config"))
    if edits is None and words["region"]:
        edits = []
    if edits is None:
        # A bare partial config, with or without a reason.
        return DraftProposal((), {key: value for key, value in entry.items() if key not in KEYS}, **words)
    if isinstance(edits, dict):
        return DraftProposal((), edits, **words)
    if not isinstance(edits, list) or not all(isinstance(edit, str) for edit in edits):
        raise LabError("`edits` must be a list of strings such as train.lr@mul=0.5")
    return DraftProposal(tuple(str(parse_edit(edit)) for edit in edits), None, **words)


def _parse_region(region: Any) -> dict[str, list[Any]]:
    """Return a region that is written as an object, or as texts such as `train.lr=[1e-4, 1e-3]`."""
    if isinstance(region, list):
        pairs = [str(one).partition("=") for one in region]
        try:
            region = {path.strip(): load_json(values) for path, _, values in pairs}
        except UntrustedError:
            region = None
    if not isinstance(region, dict) or not all(isinstance(values, list) for values in region.values()):
        raise LabError("`region` must be a list of ranges or choices such as train.lr=[1e-4, 1e-3]")
    return region


def _fixed_by(edits: Sequence[str]) -> dict[str, list[Any]]:
    """Return the edits that accompany a region as a region of one value each."""
    fixed = {}
    for text in edits:
        edit = parse_edit(text)
        if edit.op is not Op.SET:
            raise LabError(f"{text}: together with a region, an edit must set a value")
        is_number = isinstance(edit.value, int | float) and not isinstance(edit.value, bool)
        fixed[edit.path] = [edit.value, edit.value] if is_number else [edit.value]
    return fixed


def _last_answer(text: str) -> list[str]:
    """Return the last line that is an object with proposals or edits; a program may print anything before it."""
    for line in reversed(text.splitlines()[-LAST_LINES:]):
        if line.startswith("{"):
            with contextlib.suppress(UntrustedError):
                data = load_json(line)
                if isinstance(data, dict) and not data.keys().isdisjoint(("proposals", "edits", "region")):
                    return [line]
    return []


def _find_json(text: str, is_file: bool) -> Any:
    """Return the JSON of an answer: the whole text, its last fenced block, or its last line."""
    why = ""
    for candidate in (text, *reversed(_BLOCK.findall(text)), *_last_answer(text)):
        try:
            return redact_data(mend(load_json(candidate), max_text=MAX_TEXT))
        except UntrustedError as error:
            if is_file or candidate.lstrip()[:1] in "{[":  # intended as JSON
                why = why or clean_line(str(error), MAX_REASON)
    raise LabError(
        f"the answer {why}" if why else "the answer contains no JSON",
        hint='answer with {"proposals": [{"edits": […], …}]}',
    )
