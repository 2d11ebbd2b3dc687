"""The agent proposer: a coding agent reads the facts of the study and says what to try next.

A call takes minutes, so it runs in a thread of its own and the engine goes on meanwhile. What is asked and what is
answered is in the ledger; an answer that came while the engine died is taken from the agent's log, and not asked for
again. What the guard refuses goes back to the agent with the reasons, a few times; then others may propose.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from looplab.agents.account import Account, Allowance
from looplab.agents.base import AgentSpec, Answer, Limits, Price, Session, Summary
from looplab.agents.lines import named_secrets
from looplab.agents.log import read_end, read_usage
from looplab.agents.process import kill_marked
from looplab.agents.run import check_spec, new_log, run_agent
from looplab.config.edits import edits_from_partial, parse_edit
from looplab.config.files import write_atomic
from looplab.config.lab import Agent, Study
from looplab.decide.base import Proposal, describe_error, is_environmental
from looplab.decide.history import History
from looplab.decide.prompt import SCHEMA, fill, read_template
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.ledger.study import RunRow, StudyLedger
from looplab.runs.redact import redact_text, remember
from looplab.untrusted import MAX_TEXT, UntrustedError, clean_line, load_json, mend, mend_text, read_bounded

NAME = "agent"
EMPTY = b"{}\n"
_BLOCK = re.compile(r"```(?:json)?[^\S\n]*+\n(.*?)```", re.DOTALL)
KEYS = {"edits", "reason", "hypothesis", "parent"}
MAX_ANSWER = 1_000_000
"""Bytes of an answer file."""
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Draft:
    """What an agent wrote, before anybody looked whether it may be."""

    edits: tuple[str, ...]
    partial: Mapping[str, Any] | None
    """A nested partial config instead of edits."""
    reason: str = ""
    hypothesis: str = ""
    parent: str = ""


@dataclass(slots=True)
class _Call:
    """A call that is under way or done."""

    id: str
    n: int
    attempt: int
    """The how-manieth time it is asked for one round, from 1."""
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
        self, settings: Agent, study: Study, guard: Guard, lab: Path, outputs: Path, history: History,
        base: Mapping[str, Any], left: Callable[[], str], wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.problem: str | None = None
        self._settings = settings
        self._study = study
        self._guard = guard
        self._outputs = outputs
        self._history = history
        self._base = dict(base)
        self._left = left
        self._wake = wake
        self._logs = lab / "agent_runs"
        self._file = lab / settings.answer
        self._template = read_template(lab / settings.prompt if settings.prompt else None)
        self._spec = spec_of(settings)
        remember({}, named_secrets(os.environ, self._spec.env))
        self._allowance = Allowance(study.budget.tokens, study.budget.usd)
        check_spec(self._spec, self._limits())
        self._call: _Call | None = None
        self._session: Session | None = None
        self._recovered = False
        self._unfinished: Path | None = None  # the log of a call that an earlier engine began
        self._stop = threading.Event()

    @property
    def thinking(self) -> bool:
        return self._call is not None

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        self.problem = None
        if not self._recovered:
            self._recover(study)
        if self._call is None:
            account = account_of(study)
            used = account.left(self._allowance).used_up
            if used is not None:
                self.problem = f"the budget of {used} for agents is used"
                return []
            self._ask(study, n, 1, "")
        call = self._call
        assert call is not None
        if call.is_pending:
            return []
        self._call = None
        return self._take(study, call)

    def close(self) -> None:
        """End the agent; what it had answered by then is in its log."""
        self._stop.set()
        if self._call is not None and self._call.thread is not None:
            self._call.thread.join()

    # -- asking

    def _limits(self, account: Account | None = None) -> Limits:
        settings = self._settings
        limits = Limits(settings.wall, settings.tokens, settings.usd, retries=settings.retries)
        return (account or Account()).left(self._allowance).within(limits)

    def _ask(self, study: StudyLedger, n: int, attempt: int, refused: str) -> None:
        """Begin a call; `refused` says why the answer before was no good."""
        parent, config = self._parent(study)
        prompt = fill(
            self._template, self._study, self._guard, study, self._history, self._outputs, parent=parent,
            parent_config=config, n=n, answer=str(self._file), budget=self._left(),
        )  # fmt: skip
        session = self._session if attempt > 1 else None
        if refused:
            prompt = refused if session is not None else f"{prompt}\n{refused}"
        if self._unfinished is not None:  # it ends with its engine, unless its warden was killed too
            kill_marked(str(self._unfinished.absolute()))
            self._unfinished = None
        log = new_log(self._logs, self._study.study)
        call = self._call = _Call(log.stem, n, attempt, parent.id if parent else None, log)
        # What stands in the file from before is no answer to this.
        # It is removed, not emptied: claude writes no file that exists and that it has not read.
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        limits = self._limits(account_of(study))
        study.asked_agent(call.id, log=log.name, n=n, attempt=attempt, parent=call.parent, cli=self._spec.cli)
        call.thread = threading.Thread(target=self._work, args=(call, prompt, session, limits), name="agent")
        call.thread.start()

    def _work(self, call: _Call, prompt: str, session: Session | None, limits: Limits) -> None:
        """In the thread: ask, and keep what was written where it can be found again."""
        try:
            answer = run_agent(
                self._spec, prompt, cwd=self._file.parent, log=call.log, limits=limits, resume=session, schema=SCHEMA,
                stop=self._stop,
            )  # fmt: skip
            self._collect(call, answer)
            call.answer = answer
        except LabError as error:
            call.error = str(error)
        except Exception as error:  # noqa: BLE001 (nobody else would report what ends a thread)
            call.error = describe_error(error)
        finally:
            self._wake()

    def _collect(self, call: _Call, answer: Answer) -> None:
        """Set the text of the answer: what is in the file or was kept of it, else the last message."""
        kept = call.log.with_suffix(".answer.json")
        try:
            written = written_in(self._file)
            if written is not None:
                self._keep(call, written)
            call.text = written or written_in(kept) or answer.text
        except LabError as error:
            call.refused = str(error)

    def _keep(self, call: _Call, written: str) -> None:
        """Put what was written aside and clear the file: nobody else shall take it for their own."""
        write_atomic(call.log.with_suffix(".answer.json"), mend_text(written).encode(), sync=False)
        write_atomic(self._file, EMPTY, sync=False)

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

    def _take(self, study: StudyLedger, call: _Call) -> list[Proposal]:
        answer = call.answer
        if answer is None:
            self.problem = call.error or "the call broke off; see its log"
            study.agent_answered(call.id, ok=False, why=self.problem, usage={})
            return []
        self._session = answer.session
        usage = {key: value for key, value in asdict(answer.usage).items() if key not in ("scope", "message")}
        study.agent_answered(
            call.id, ok=answer.ok, why=answer.why, usage=usage, seconds=round(answer.seconds, 3),
            attempts=answer.attempts, session=answer.session.id if answer.session else None,
        )  # fmt: skip
        if not answer.ok:
            self.problem = f"it gave no answer: {answer.why}"
            return []
        return self._read(study, call, call.text or "")

    def _read(self, study: StudyLedger, call: _Call, text: str) -> list[Proposal]:
        """The proposals of an answer that may be; if none may, the agent hears why."""
        proposals: list[Proposal] = []
        refused: list[str] = []
        drafts: list[Draft] = []
        try:
            if call.refused is not None:
                refused.append(call.refused)
            else:
                drafts = read_answer(text)[: call.n]
        except LabError as error:
            refused.append(str(error))
        for place, draft in enumerate(drafts):
            proposal, problems = self._judge(study, call, place, draft)
            if problems:
                id_ = study.propose(
                    NAME, proposal.edits, proposal.reason, parent=proposal.parent, hypothesis=proposal.hypothesis,
                    source=proposal.source,
                )  # fmt: skip
                if id_ is not None:
                    study.reject(id_, [{"key": p.key, "value": p.value, "rule": p.rule, "message": p.message,
                                        "nearest": p.nearest} for p in problems])  # fmt: skip
                refused.append(f"{' '.join(proposal.edits)}: " + "; ".join(p.message for p in problems))
            else:
                proposals.append(proposal)
        if proposals:
            return proposals
        if call.attempt < self._settings.tries and not self._stop.is_set():
            told = "\n".join(f"- {why}" for why in refused) or "- there was no proposal in it"
            self._ask(study, call.n, call.attempt + 1, f"Your last answer could not be used:\n{told}\nAnswer again.")
        else:
            self.problem = f"no legal proposal after {call.attempt} tries: {'; '.join(refused) or 'nothing proposed'}"
        return []

    def _judge(self, study: StudyLedger, call: _Call, place: int, draft: Draft) -> tuple[Proposal, list[Problem]]:
        source = f"{NAME}:{call.id}:{place}"
        try:
            run, config = self._parent(study, draft.parent or call.parent or "base")
            edits = draft.edits
            if draft.partial is not None:
                edits = tuple(str(edit) for edit in edits_from_partial(draft.partial, config))
            ruling = self._guard.check(config, edits)
            problems = list(ruling.problems)
            if not problems and not ruling.changes:
                problems = [Problem("config", list(edits), "edit", "it changes nothing")]
        except Exception as error:  # the agent learns what is wrong with it
            if is_environmental(error):
                raise
            run, edits, problems = None, draft.edits, [Problem("proposal", None, "edit", describe_error(error))]
        proposal = Proposal(edits, draft.reason, NAME, run.id if run else None, draft.hypothesis, None, source)
        return proposal, problems

    def _recover(self, study: StudyLedger) -> None:
        """A call that an engine before this one began: its answer counts, if it came to its end."""
        self._recovered = True
        calls = study.agent_calls()
        if not calls or calls[-1]["answer"] is not None:
            return
        last = calls[-1]
        log = self._logs / last["log"]
        try:
            answer = read_end(log)
        except (LabError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            answer = None  # not what looplab has written
        call = _Call(last["call"], last["n"], last["attempt"], last["parent"], log)
        if answer is None:
            self._unfinished = log
            study.agent_answered(call.id, ok=False, why="looplab ended before it had answered", usage={})
            return
        # The file was cleared before it was asked, so what it holds now is the answer.
        self._collect(call, answer)
        call.answer = answer
        self._call = call


class UnaskedAgent(AgentProposer):
    """The agent in a preview: an answer that is already there counts; where it would be asked, that is noted in `asks`,
    and it never answers."""

    def __init__(
        self, settings: Agent, study: Study, guard: Guard, lab: Path, outputs: Path, history: History,
        base: Mapping[str, Any], left: Callable[[], str], asks: list[Ask],
    ) -> None:  # fmt: skip
        super().__init__(settings, study, guard, lab, outputs, history, base, left)
        self._asks = asks

    def _ask(self, study: StudyLedger, n: int, attempt: int, refused: str) -> None:
        self._asks.append(Ask(self.name, self._spec.cli, n))
        self._call = _Call("", n, attempt, None, Path())

    def _keep(self, call: _Call, written: str) -> None:
        """The file stays as it is."""


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


def spec_of(settings: Agent) -> AgentSpec:
    price = settings.price
    return AgentSpec(
        settings.cli, settings.model, settings.binary, tuple(settings.command), network=settings.network,
        extra_args=tuple(settings.extra), env=tuple(settings.env), dangerous=settings.dangerous,
        price=Price(price.input, price.output, price.cached_input) if price is not None else None,
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


def read_answer(text: str) -> list[Draft]:
    """The proposals in an agent's words: JSON, alone or in a fenced block; edits, or a nested partial config."""
    if len(text) > MAX_ANSWER:
        raise LabError(f"the answer has more than {MAX_ANSWER:,} characters")
    found = _json_in(text)
    if isinstance(found, dict) and isinstance(found.get("proposals"), list):
        found = found["proposals"]
    entries = found if isinstance(found, list) else [found]
    if entries and all(isinstance(entry, str) for entry in entries):
        entries = [{"edits": entries}]
    return [_draft(entry) for entry in entries if entry not in ({}, None)]


def _draft(entry: Any) -> Draft:
    if not isinstance(entry, dict):
        raise LabError(f"a proposal is an object with `edits`, not {type(entry).__name__}")
    words = {key: str(entry.get(key) or "") for key in ("reason", "hypothesis", "parent")}
    given = entry.get("edits", entry.get("config"))
    if given is None:
        # A partial config by itself, with or without a reason beside it.
        return Draft((), {key: value for key, value in entry.items() if key not in KEYS}, **words)
    if isinstance(given, dict):
        return Draft((), given, **words)
    if not isinstance(given, list) or not all(isinstance(edit, str) for edit in given):
        raise LabError("`edits` is a list of texts such as train.lr@mul=0.5")
    return Draft(tuple(str(parse_edit(edit)) for edit in given), None, **words)


def _json_in(text: str) -> Any:
    why = ""
    for candidate in (text, *reversed(_BLOCK.findall(text))):
        try:
            return mend(load_json(candidate), max_text=MAX_TEXT)
        except UntrustedError as error:
            if candidate.lstrip()[:1] in "{[":  # meant as JSON
                why = why or clean_line(str(error), MAX_REASON)
    raise LabError(
        f"the answer {why}" if why else "the answer holds no JSON",
        hint='answer with {"proposals": [{"edits": […], …}]}',
    )
