"""The agent proposer: a coding agent reads the facts of the study and says what to try next.

A call takes minutes, so it runs in a thread of its own and the engine goes on meanwhile. What is asked and what is
answered is in the ledger; an answer that came while the engine died is taken from the agent's log, and not asked for
again. Each proposal of an answer is decided on as the engine would decide, without writing anything; what is refused
goes back to the agent with the reasons, a few times. A call that fails is repeated after a wait that doubles with each
failure in a row. Then the agent has given up: others propose, or a search stands in for it, and it is asked again for
the next iteration.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from looplab.agents.account import Account, Allowance
from looplab.agents.base import AgentSession, AgentSpec, Answer, Limits, Summary, TokenPrice
from looplab.agents.integrity import CallGuard
from looplab.agents.lines import named_secrets
from looplab.agents.log import read_end, read_usage
from looplab.agents.process import kill_marked
from looplab.agents.run import check_spec, new_log, run_agent
from looplab.config.edits import edits_from_partial, parse_edit
from looplab.config.files import write_atomic
from looplab.config.lab import AgentConfig, StudyConfig
from looplab.decide.base import Proposal, Proposer, ask, describe_error, is_environmental
from looplab.decide.history import History
from looplab.decide.prompt import SCHEMA, fill, read_template, said_section
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.ledger.study import RunRow, StudyLedger
from looplab.runs import clock
from looplab.runs.redact import redact_data, redact_proposal, redact_text, remember
from looplab.untrusted import MAX_TEXT, UntrustedError, clean_line, load_json, mend, mend_text, read_bounded

NAME = "agent"
EMPTY = b"{}\n"
_BLOCK = re.compile(r"```(?:json)?[^\S\n]*+\n(.*?)```", re.DOTALL)
KEYS = {"edits", "reason", "hypothesis", "parent"}
MAX_ANSWER = 1_000_000
"""Bytes of an answer file."""
MAX_REASON = 300
MAX_REFUSALS = 8
"""Refused answers and proposals that a question names."""
MAX_REFUSAL = 1_000
"""Characters of one of them."""
LAST_LINES = 20
"""Lines at the end of an output that may be its answer."""
MAX_WAIT_S = 600.0
"""The longest wait before an agent whose calls fail is asked again."""
STOPPED = "stopped"
"""Why a call ended that looplab itself has ended."""

Check = Callable[[Proposal], Sequence[Problem]]
Report = Callable[[str, str, str], None]
"""Called with the call's name, what is wrong with it, and what follows."""


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """What an agent wrote, before anybody looked whether it may be."""

    edits: tuple[str, ...]
    partial: Mapping[str, Any] | None
    """A nested partial config instead of edits."""
    reason: str = ""
    hypothesis: str = ""
    parent: str = ""


@dataclass(slots=True)
class _PendingCall:
    """A call that is under way or done."""

    id: str
    n: int
    attempt: int
    """Index of this question for one round, from 1; a repeated call keeps it."""
    parent: str | None
    log: Path
    answer: Answer | None = None
    text: str | None = None
    """What it wrote as its answer, in the file or as its last message."""
    refused: str | None = None
    """Why its answer could not even be read."""
    error: str | None = None
    thread: threading.Thread | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the answer is still to come."""
        return self.answer is None and self.error is None and (self.thread is None or self.thread.is_alive())

    @property
    def failure(self) -> str | None:
        """Why the call failed; None if there is an answer."""
        if self.answer is None:
            return self.error or "the call broke off; see its log"
        return None if self.answer.ok else self.answer.why or "it gave no answer"


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of an agent that a preview leaves out."""

    proposer: str
    cli: str
    """codex | claude | command"""
    runs_at_most: int


class AgentProposer:
    name = NAME

    def __init__(
        self, settings: AgentConfig, study: StudyConfig, guard: Guard, lab: Path, outputs: Path, history: History,
        base: Mapping[str, Any], left: Callable[[], str], wake: Callable[[], None] = lambda: None, *,
        check: Check | None = None, report: Report = lambda call, why, outcome: None,
        stand_in: Callable[[], Proposer | None] = lambda: None,
        tell: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:  # fmt: skip
        """Make a proposer that asks an agent.

        Args:
            left: Returns what the budget leaves, in words.
            wake: Called from the thread of a call when it is over.
            check: Returns why a proposal would be rejected; only the guard is asked if not given.
            report: Told of every call that failed and every answer that was refused.
            stand_in: Returns the proposer that fills in after the agent gave up; None if there is none.
            tell: Gets what people must know of files that were changed: its kind (`note` or `alarm`) and a sentence.
        """
        self.problem: str | None = None
        self.failure: str | None = None
        """Why the agent gave up; None once it is asked again."""
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
        self._unfinished: Path | None = None  # the log of a call that an earlier engine began
        self._stop = threading.Event()
        self._attempt = 1  # of the next call, from 1; counts refused answers of one iteration
        self._failures = 0  # failed calls in a row
        self._ask_at = 0.0  # not asked before, on `clock.now`
        self._retrying = False  # whether a failed call is repeated at `_ask_at`
        self._given_up = 0  # iterations in a row that it gave up
        self._gave_up_at = 0.0

    @property
    def thinking(self) -> bool:
        return self._call is not None or self._retrying

    @property
    def retry_at(self) -> float | None:
        """When it is asked again (`clock.now`) if nobody else proposes; None if it has not given up."""
        if self.failure is None or self.thinking:
            return None
        return max(self._ask_at, self._gave_up_at + self._wait(self._given_up))

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        self.problem = None
        if not self._recovered:
            self._recover(study)
        if self._call is None:
            if clock.now() < self._ask_at:
                return [] if self._retrying else self._propose_instead(study, n)
            used = account_of(study).left(self._allowance).used_up
            if used is not None:
                self.problem = f"the budget of {used} for agents is used"
                self._retrying = False
                self.failure = None  # a used budget is not a failure: nobody stands in
                return []
            self._ask(study, n, self._attempt)
        call = self._call
        assert call is not None
        if call.is_pending:
            return []
        self._call = None
        proposals = self._take(study, call)
        return proposals if proposals or self.thinking else self._propose_instead(study, n)

    def close(self) -> None:
        """End the agent; what it had answered by then is in its log."""
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

    def _wait(self, times: int) -> float:
        """Seconds to wait after something went wrong so many times in a row."""
        return min(MAX_WAIT_S, self._settings.backoff * 2.0 ** min(times - 1, 30)) if times else 0.0

    def _ask(self, study: StudyLedger, n: int, attempt: int) -> None:
        """Begin a call. Whatever keeps it from beginning is a failure of the call."""
        self._retrying = False
        self.failure = None
        parent, config = self._parent(study)
        call = _PendingCall(
            f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}", n, attempt, parent.id if parent else None, Path()
        )
        session = self._session if attempt > 1 and not self._failures else None
        prompt = ""
        try:
            if self._unfinished is not None:  # it ends with its engine, unless its supervisor was killed too
                kill_marked(str(self._unfinished.absolute()))
                self._unfinished = None
            prompt = self._prompt(study, n, attempt, parent, config, session)
            # What is in the file from before is not an answer to this question.
            # It is removed, not emptied: claude writes no file that exists and that it has not read.
            self._file.parent.mkdir(parents=True, exist_ok=True)
            remove(self._file)
            self._files.prepare(study)
            call.log = new_log(self._logs, self._study.name)
            call.id = call.log.stem
        except Exception as error:
            if is_environmental(error):
                raise
            call.error = f"it cannot be asked: {describe_error(error)}"
        limits = self._limits(account_of(study))
        study.asked_agent(call.id, log=call.log.name, n=n, attempt=attempt, parent=call.parent, cli=self._spec.cli)
        self._call = call
        if call.error is None:
            call.thread = threading.Thread(target=self._work, args=(call, prompt, session, limits), name="agent")
            call.thread.start()

    def _prompt(
        self, study: StudyLedger, n: int, attempt: int, parent: RunRow | None, config: Mapping[str, Any],
        session: AgentSession | None,
    ) -> str:  # fmt: skip
        """The question; after a refused answer, with the reasons at its end."""
        refused = refusals_of(study)
        last = refused.pop() if attempt > 1 and refused else []
        told = "\n".join(f"- {why}" for why in last)
        again = f"Your last answer could not be used:\n{told}\nAnswer again." if last else ""
        if session is not None and again:  # the rest is in the conversation
            return again + said_section(study)
        earlier = [why for reasons in refused for why in reasons]
        prompt = fill(
            self._template, self._study, self._guard, study, self._history, self._outputs, parent=parent,
            parent_config=config, n=n, answer=str(self._file), budget=self._left(), refused=earlier[-MAX_REFUSALS:],
        )  # fmt: skip
        return f"{prompt}\n{again}" if again else prompt

    def _work(self, call: _PendingCall, prompt: str, session: AgentSession | None, limits: Limits) -> None:
        """In the thread: ask, and keep what was written where it can be found again."""
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
        except Exception as error:  # noqa: BLE001 (nobody else would report what ends a thread)
            call.error = describe_error(error)
        finally:
            self._wake()

    def _collect(self, call: _PendingCall, answer: Answer) -> None:
        """Set the text of the answer: what is in the file or was kept of it, else the last message."""
        kept = call.log.with_suffix(".answer.json")
        try:
            written = written_in(self._file)
            if written is not None:
                self._keep(call, written)
            call.text = written or written_in(kept) or answer.text
        except LabError as error:
            call.refused = str(error)

    def _keep(self, call: _PendingCall, written: str) -> None:
        """Put what was written aside and clear the file: nobody else shall take it for their own."""
        write_atomic(call.log.with_suffix(".answer.json"), mend_text(written).encode(), sync=False)
        write_atomic(self._file, EMPTY, sync=False)

    def _clear_unusable(self) -> None:
        """Remove an answer file that can never be read, so that people do not stumble over it."""
        remove_unusable(self._file)

    def _parent(self, study: StudyLedger, name: str = "") -> tuple[RunRow | None, dict[str, Any]]:
        """The run that edits apply to, and its config: the one that is named, else the champion, else the base."""
        run = study.best() if name in ("", "best") else None if name == "base" else study.run(name)
        if run is None:
            return None, self._base
        try:
            return run, study.config_of(run, self._outputs / run.id)
        except LabError:
            return None, self._base

    # -- what came of it

    def _take(self, study: StudyLedger, call: _PendingCall) -> list[Proposal]:
        """Record how a call ended; return its proposals, ask again, or give up."""
        answer = call.answer
        told: dict[str, Any] = {"usage": {}}
        if answer is not None:
            self._session = answer.session
            usage = {key: value for key, value in asdict(answer.usage).items() if key not in ("scope", "message")}
            told = {"usage": usage, "seconds": round(answer.seconds, 3), "attempts": answer.attempts,
                    "session": answer.session.id if answer.session else None}  # fmt: skip
        void = self._files.rule(study, call.id)
        if void is not None:
            told["void"] = void
            call.refused = f"{void}. Write to {self._file} and nowhere else"
        failure = call.failure
        if failure is not None:
            failure = clean_line(failure, MAX_REFUSAL)
            study.agent_answered(call.id, when=clock.now(), ok=False, why=failure, **told)
            self._clear_unusable()
            self._attempt = call.attempt
            self._count_failure(call.id, failure, self._failures + 1, clock.now())
            return []
        self._failures = 0
        proposals, refused = self._read(study, call)
        told |= {"accepted": len(proposals), "refused": refused}
        study.agent_answered(call.id, ok=True, why="", **told)
        if refused:
            self._clear_unusable()
        if proposals:
            self._attempt, self._given_up, self.failure = 1, 0, None
            return proposals
        why = "; ".join(refused)
        if call.attempt < self._settings.tries and not self._stop.is_set():
            self._report(call.id, f"its answer is refused: {why}", f"asked again, try {call.attempt + 1}")
            self._ask(study, call.n, call.attempt + 1)
        else:
            self._give_up(f"no legal proposal after {call.attempt} tries: {why}", clock.now())
            self._report(call.id, f"its answer is refused: {why}", f"gave up after {call.attempt} tries")
        return []

    def _count_failure(self, call: str, why: str, times: int, at: float) -> None:
        """A call has failed, so many times in a row: repeat it later, or give up."""
        self._failures = times
        self._ask_at = at + self._wait(times)
        self._retrying = times <= self._settings.call_retries
        wait = f"asked again in {self._wait(times):.3g} s"
        if not self._retrying:
            calls = "one call" if times == 1 else f"{times} calls in a row"
            self._give_up(f"{calls} failed: {why}", at)
            wait = f"gave up for now; {wait} at the earliest"
        self._report(call, f"the call failed: {why}", wait)

    def _give_up(self, why: str, at: float) -> None:
        """Leave this iteration to others."""
        self._attempt = 1
        self._given_up += 1
        self._gave_up_at = at
        self.failure = clean_line(why, MAX_REFUSAL)

    def _propose_instead(self, study: StudyLedger, n: int) -> list[Proposal]:
        """The proposals of whoever stands in for the agent after it gave up."""
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
            self.problem = f"{self.failure}; {self._stand_in.name}, which stands in: {why}"
        return [replace(one, reason=f"in place of the agent: {one.reason}") for one in proposals]

    def _read(self, study: StudyLedger, call: _PendingCall) -> tuple[list[Proposal], list[str]]:
        """The proposals of an answer that may be run, and why the others may not."""
        proposals: list[Proposal] = []
        refused: list[str] = []
        drafts: list[DraftProposal] = []
        try:
            if call.refused is not None:
                raise LabError(call.refused)
            drafts = read_answer(call.text or "")[: call.n]
            if not drafts:
                refused.append("there was no proposal in it")
        except LabError as error:
            refused.append(str(error))
        for place, draft in enumerate(drafts):
            proposal, problems = self._judge(study, call, place, draft)
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

    def _judge(
        self, study: StudyLedger, call: _PendingCall, place: int, draft: DraftProposal
    ) -> tuple[Proposal, list[Problem]]:
        source = f"{NAME}:{call.id}:{place}"
        run: RunRow | None = None
        edits = draft.edits
        try:
            run, config = self._parent(study, draft.parent or call.parent or "base")
            edits = edits_of(draft, config, self._guard)
            edits, reason, hypothesis = redact_proposal(edits, draft.reason, draft.hypothesis)
            proposal = Proposal(edits, reason, NAME, run.id if run else None, hypothesis, None, source)
            return proposal, list(self._check(proposal) if self._check else self._ask_guard(config, edits))
        except Exception as error:  # the agent learns what is wrong with it
            if is_environmental(error):
                raise
            proposal = Proposal(edits, draft.reason, NAME, None, draft.hypothesis, None, source)
            return proposal, [Problem("proposal", None, "edit", describe_error(error))]

    def _ask_guard(self, config: dict[str, Any], edits: Sequence[str]) -> Sequence[Problem]:
        ruling = self._guard.check(config, edits)
        if not ruling.problems and not ruling.changes:
            return [Problem("config", list(edits), "edit", "it changes nothing")]
        return ruling.problems

    # -- after a crash

    def _recover(self, study: StudyLedger) -> None:
        """Continue where an earlier engine was: use an answer that came, and count the failures in a row."""
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
        """Count the calls that failed in a row before the engine crashed. After an orderly end the count starts at 0:
        whoever starts the study again may have repaired the agent."""
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
            self._ask_at = at + self._wait(self._failures)
            self._retrying = self._failures <= self._settings.call_retries
            if not self._retrying:
                self._give_up(f"{self._failures} calls in a row failed: {answer['why']}", at)

    def _recover_call(self, study: StudyLedger, last: Mapping[str, Any]) -> None:
        """A call that an engine before this one began: its answer counts, if it came to its end."""
        log = self._logs / last["log"]
        try:
            answer = read_end(log)
        except (LabError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            answer = None  # not what looplab has written
        call = _PendingCall(last["call"], last["n"], last["attempt"], last["parent"], log)
        if answer is None or (not answer.ok and answer.why == STOPPED):
            self._unfinished = log
            self._attempt = call.attempt
            why = "looplab ended before it had answered"
            study.agent_answered(call.id, ok=False, why=why, usage=asdict(answer.usage) if answer else {},
                                 interrupted=True)  # fmt: skip
            return
        self._files.recover(call.id)
        # The file was cleared before it was asked, so what it holds now is the answer.
        self._collect(call, answer)
        call.answer = answer
        self._call = call


class UnaskedAgent(AgentProposer):
    """The agent in a preview: an answer that is already there counts; where it would be asked, that is noted in `asks`,
    and it never answers."""

    def __init__(self, *given: Any, asks: list[Ask], **named: Any) -> None:
        super().__init__(*given, **named)
        self._asks = asks
        self._files.looks_only = True

    def _ask(self, study: StudyLedger, n: int, attempt: int) -> None:
        self._asks.append(Ask(self.name, self._spec.cli, n))
        self._retrying = False
        self._call = _PendingCall("", n, attempt, None, Path())

    def _keep(self, call: _PendingCall, written: str) -> None:
        """The file stays as it is."""

    def _clear_unusable(self) -> None:
        """The file stays as it is."""


def remove(path: Path) -> None:
    """Remove whatever is there: a file, a link, a pipe or a folder.

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
    """Remove everything but a file of a size that can be read."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ANSWER:
            remove(path)
    except OSError:
        pass  # the next question removes it, or says why not


def edits_of(draft: DraftProposal, config: dict[str, Any], guard: Guard | None) -> tuple[str, ...]:
    """The edits of a draft. In a nested partial config, a null where none is legal means that the key is not given."""
    if draft.partial is None:
        return draft.edits
    edits = edits_from_partial(draft.partial, config)
    given = [edit for edit in edits if edit.value is not None or guard is None or guard.takes_null(config, edit.path)]
    return tuple(map(str, given))


def refusals_of(study: StudyLedger) -> list[list[str]]:
    """Why answers of the agent were refused, one list for each answer, oldest first, back to the last one of which
    something was used."""
    found: list[list[str]] = []
    for call in reversed(study.agent_calls()):
        answer = call["answer"] or {}
        reasons = answer.get("refused")
        if isinstance(reasons, list) and reasons:
            found.append([clean_line(str(why), MAX_REFUSAL) for why in reasons[:MAX_REFUSALS]])
        if answer.get("accepted") or len(found) >= MAX_REFUSALS:
            break
    return found[::-1]


def written_in(path: Path) -> str | None:
    """Return what somebody wrote into the file since it was cleared; None if there is nothing.

    Raises:
        LabError: It cannot be an answer: a link, a pipe, or too large.
    """
    try:
        text = read_bounded(path, MAX_ANSWER, follow=False).decode("utf-8", "replace")
    except UntrustedError as error:
        raise LabError(str(error), file=path) from None
    except OSError:
        return None
    return None if text.strip() in ("", "{}") else redact_text(text)


def spec_of(settings: AgentConfig, lab: Path) -> AgentSpec:
    price = settings.price
    return AgentSpec(
        settings.cli, settings.model, settings.binary, tuple(settings.command), network=settings.network,
        extra_args=tuple(settings.extra), env=tuple(settings.env), dangerous=settings.dangerous,
        writable=tuple(str(lab / Path(name).expanduser()) for name in settings.writable),
        price=TokenPrice(price.input, price.output, price.cached_input) if price is not None else None,
    )  # fmt: skip


def account_of(study: StudyLedger) -> Account:
    """What agents have cost in this study."""
    account = Account()
    for call in study.agent_calls():
        answer = call["answer"]
        if answer is not None:
            usage = read_usage(answer["usage"])
            seconds, attempts = answer.get("seconds", 0.0), answer.get("attempts", 1)
            account = account.add(Answer(answer["ok"], "", "", usage, None, Summary(), seconds, attempts, None, Path()))
    return account


def read_answer(text: str, *, is_file: bool = False) -> list[DraftProposal]:
    """The proposals in an agent's words: JSON, alone or in a fenced block; edits, or a nested partial config.

    Args:
        is_file: Whether the text is the content of a JSON file, in which everything is meant as JSON.

    Raises:
        LabError: There are none in it; it says why, with line and column where the text is meant as JSON.
    """
    if len(text) > MAX_ANSWER:
        raise LabError(f"the answer has more than {MAX_ANSWER:,} characters")
    found = _json_in(text, is_file)
    if isinstance(found, dict) and isinstance(found.get("proposals"), list):
        found = found["proposals"]
    entries = found if isinstance(found, list) else [found]
    if entries and all(isinstance(entry, str) for entry in entries):
        entries = [{"edits": entries}]
    return [_draft(entry) for entry in entries if entry not in ({}, None)]


def _draft(entry: Any) -> DraftProposal:
    if not isinstance(entry, dict):
        raise LabError(f"a proposal is an object with `edits`, not {type(entry).__name__}")
    words = {key: str(entry.get(key) or "") for key in ("reason", "hypothesis", "parent")}
    given = entry.get("edits", entry.get("config"))
    if given is None:
        # A partial config by itself, with or without a reason beside it.
        return DraftProposal((), {key: value for key, value in entry.items() if key not in KEYS}, **words)
    if isinstance(given, dict):
        return DraftProposal((), given, **words)
    if not isinstance(given, list) or not all(isinstance(edit, str) for edit in given):
        raise LabError("`edits` is a list of texts such as train.lr@mul=0.5")
    return DraftProposal(tuple(str(parse_edit(edit)) for edit in given), None, **words)


def _last_answer(text: str) -> list[str]:
    """The last line that is an object with proposals or edits: a program may print anything before its answer."""
    for line in reversed(text.splitlines()[-LAST_LINES:]):
        if line.startswith("{"):
            with contextlib.suppress(UntrustedError):
                found = load_json(line)
                if isinstance(found, dict) and not found.keys().isdisjoint(("proposals", "edits")):
                    return [line]
    return []


def _json_in(text: str, is_file: bool) -> Any:
    why = ""
    for candidate in (text, *reversed(_BLOCK.findall(text)), *_last_answer(text)):
        try:
            return redact_data(mend(load_json(candidate), max_text=MAX_TEXT))
        except UntrustedError as error:
            if is_file or candidate.lstrip()[:1] in "{[":  # meant as JSON
                why = why or clean_line(str(error), MAX_REASON)
    raise LabError(
        f"the answer {why}" if why else "the answer holds no JSON",
        hint='answer with {"proposals": [{"edits": […], …}]}',
    )
