"""Call an agent once: start it, follow its stream, enforce limits, retry after a rate limit.

    answer = run_agent(AgentSpec("codex"), "make the tests pass", cwd=folder, log=new_log(folder / "agent_runs", "v3"))

The agent's output is written to the log as it arrives, with secrets redacted, and its stderr to a file next to it; of
very long output the log has the beginning and the end. The agent can write to its folder and to one for temporary files
(sandbox.py). Whatever happens to the agent or to looplab, no process of the agent outlives the call (supervisor.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from looplab.agents import command, confine
from looplab.agents.account import Meter, plus, priced
from looplab.agents.adapters import find_adapter
from looplab.agents.base import (
    AgentEvent,
    AgentSession,
    AgentSpec,
    Answer,
    Command,
    End,
    FileChange,
    Limits,
    Message,
    Output,
    Request,
    Start,
    Summary,
    TokenPrice,
    Trouble,
    Usage,
    is_rate_limit,
)
from looplab.agents.bounded import BoundedLog, writing
from looplab.agents.lines import Scrubber, decode
from looplab.agents.process import MARK, AgentProcess
from looplab.agents.sandbox import confinement_of, writable_folders
from looplab.config.lab import AgentProgram
from looplab.errors import LabError
from looplab.measure.tail import LineTail
from looplab.runs.redact import redact_argv
from looplab.untrusted import append_own

PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TMPDIR", "TZ",
    "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "CODEX_HOME", "CLAUDE_CONFIG_DIR", "VIRTUAL_ENV",
)  # fmt: skip
"""Environment variables that every agent gets; others, such as keys, only if `AgentSpec.env` names them."""
UNSAFE = ("danger-full-access", "bypassPermissions", "--yolo", "--dangerously-", "--allow-dangerously-")
TEMPORARY = "tmp"
"""Subfolder of a call for temporary files."""
MAX_PRINTED = 1_000_000
"""Characters of a command's output, in complete lines from the end, that are its answer."""
MAX_FILES = 10_000
"""Maximum number of changed files that are listed."""
CONTINUE = "You were interrupted by a rate limit. Continue where you left off; the original request still applies."


def spec_of(program: AgentProgram, lab: Path | None = None) -> AgentSpec:
    """Return how to run an agent; with `lab`, its writable folders are paths below the lab."""
    folders = program.writable if lab is None else [str(lab / Path(name).expanduser()) for name in program.writable]
    return AgentSpec(
        program.cli, program.model, program.binary, tuple(program.command), network=program.network,
        extra_args=tuple(program.extra), env=tuple(program.env), dangerous=program.dangerous, writable=tuple(folders),
        price=TokenPrice(**dict(program.price)) if program.price is not None else None,
    )  # fmt: skip


def check_spec(spec: AgentSpec, limits: Limits | None = None) -> None:
    """Raise LabError if an agent cannot be called with these settings."""
    risky = [a for a in (spec.sandbox, spec.permission_mode, *spec.extra_args) if any(word in a for word in UNSAFE)]
    if risky and not spec.dangerous:
        raise LabError(
            f"{risky[0]!r} lets the agent do anything on this machine",
            hint="set `dangerous: true` if this is intended, and only on a disposable machine",
        )
    adapter = find_adapter(spec.cli)
    adapter.check(spec)
    if limits is not None and limits.usd is not None and not adapter.reports_usd and spec.price is None:
        raise LabError(
            f"{spec.cli} does not report dollars, so a limit of ${limits.usd:g} cannot be enforced",
            hint="set its price per million tokens, or limit tokens instead",
        )


def find_program(spec: AgentSpec, path: str | None) -> str:
    """Return the full path of the agent's program; raise LabError if it is not found."""
    adapter = find_adapter(spec.cli)
    name = adapter.find_program(spec)
    found = shutil.which(name, path=path)
    if found is None:
        raise LabError(f"the agent's program {name!r} was not found", hint=adapter.install_hint)
    return os.path.abspath(found)


def agent_env(spec: AgentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the agent; raise LabError if a variable that it names is not set."""
    missing = [name for name in spec.env if name not in environ]
    if missing:
        raise LabError(f"the agent needs {', '.join(missing)}, which is not set", hint="export it before you start")
    return {name: environ[name] for name in (*PASSED_ON, *spec.env) if name in environ}


def new_log(folder: Path, name: str, *, time_last: bool = False) -> Path:
    """Create a new, empty log `<timestamp>-<name>.jsonl`, with `time_last` `<name>-<timestamp>.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"{name}-{stamp}" if time_last else f"{stamp}-{name}"
    for number in range(1, 10_000):
        path = folder / (f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl")
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise LabError(f"too many logs named {name!r} in one second", file=folder)


def run_agent(
    spec: AgentSpec,
    prompt: str,
    *,
    cwd: Path,
    log: Path,
    limits: Limits | None = None,
    resume: AgentSession | None = None,
    schema: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    on_event: Callable[[AgentEvent], None] | None = None,
    stop: threading.Event | None = None,
    sleep: Callable[[float], object] | None = None,
    chance: Callable[[], float] = random.random,
) -> Answer:
    """Call the agent and wait for its answer.

    Args:
        spec: The agent and what it may do.
        prompt: The request; secrets are redacted.
        cwd: Folder of the agent, which it can write to.
        log: File for its output; its stderr goes to the same name with `.stderr`.
        limits: Limits of the call.
        resume: AgentSession to continue; None starts a new one.
        schema: JSON schema of the final message.
        environ: The environment, `os.environ` by default.
        on_event: Called with each event.
        stop: Ends the agent once set, from another thread.
        sleep: Waits between retries.
        chance: Returns random numbers from 0 to 1, for jitter.

    Returns:
        The answer. A failure after the start is an answer that is not ok and says why.

    Raises:
        LabError: The agent cannot be started, or its log cannot be written.
    """
    limits = limits or Limits()
    environ = os.environ if environ is None else environ
    check_spec(spec, limits)
    limit = find_adapter(spec.cli).max_prompt_bytes
    if limit is not None and len(prompt.encode("utf-8", "replace")) > limit:
        raise LabError(
            f"the prompt is longer than the {limit // 1_000_000} MB that {spec.cli} reads",
            hint="put long content into files",
        )
    if not cwd.is_dir():
        raise LabError(f"the agent's folder {cwd} does not exist")
    with tempfile.TemporaryDirectory(prefix="looplab-agent-", ignore_cleanup_errors=True) as scratch:
        os.mkdir(f"{scratch}/{TEMPORARY}")
        call = _AgentCall(spec, limits, cwd, log, environ, Path(scratch), on_event, stop or threading.Event())
        return call.run(prompt, resume, schema, sleep or call.stop.wait, chance)


class _AgentCall:
    """One call with its log, its deadline and its attempts."""

    def __init__(
        self,
        spec: AgentSpec,
        limits: Limits,
        cwd: Path,
        log: Path,
        environ: Mapping[str, str],
        scratch: Path,
        on_event: Callable[[AgentEvent], None] | None,
        stop: threading.Event,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.cwd = cwd
        self.log = log.absolute()
        self.adapter = find_adapter(spec.cli)
        self.scratch = scratch
        self.env = {**agent_env(spec, environ), "TMPDIR": f"{scratch}/{TEMPORARY}", MARK: str(self.log)}
        self.program = find_program(spec, environ.get("PATH"))
        self.scrubber = Scrubber(environ, spec.env)
        self.on_event = on_event
        self.stop = stop
        self.started = time.monotonic()
        self.deadline = self.started + limits.wall_s
        self.spent = Usage()  # by earlier attempts
        self.confinement = confinement_of(spec)
        self.writable: list[Path] | None = None  # None: not confined by the kernel

    def run(
        self,
        prompt: str,
        resume: AgentSession | None,
        schema: Mapping[str, Any] | None,
        sleep: Callable[[float], object],
        chance: Callable[[], float],
    ) -> Answer:
        prompt, scratch = self.scrubber.text(prompt), self.scratch
        folders = [scratch / TEMPORARY, *writable_folders(self.spec, self.cwd)]
        request = Request(
            resume.id if resume else None, schema, usd=self.limits.usd, env=self.env, writable=tuple(map(str, folders))
        )
        if self.confinement.by == "kernel":
            self.writable = [self.cwd, *folders, *self.adapter.state_paths(self.env)]
        if schema is not None:
            request = replace(request, schema_file=scratch / "schema.json")
            (scratch / "schema.json").write_text(json.dumps(schema))
        if self.adapter.wants_prompt_file(self.spec):
            request = replace(request, prompt_file=scratch / "prompt.md")
            (scratch / "prompt.md").write_text(prompt, encoding="utf-8", errors="replace")
        argv = [self.program, *self.adapter.argv(self.spec, request)]
        self._begin(argv, prompt)
        waited, attempt, state = 0.0, 0, None
        while True:
            attempt += 1
            stale = self.adapter.stale_answer(self.spec)
            if stale is not None:
                (self.cwd / stale).unlink(missing_ok=True)
            state = self._attempt(argv, "" if request.prompt_file else prompt, resume, state)
            self.spent = plus(self.spent, priced(state.meter.usage, self.spec.price))
            pause = self._pause(state, attempt, waited, chance)
            if pause is None:
                return self._end(state, attempt)
            self._log_record({"type": "looplab.wait", "attempt": attempt, "seconds": round(pause, 3), "why": state.why})
            sleep(pause)
            waited += pause
            if self.stop.is_set():
                state.why = "stopped"
                return self._end(state, attempt)
            if state.progress and state.session and self.adapter.keeps_session(self.spec):
                # Its work is in the session; a new one would repeat it.
                resume, prompt = AgentSession(state.session, state.meter.total), CONTINUE
                argv = [self.program, *self.adapter.argv(self.spec, replace(request, resume=state.session))]

    def _pause(self, state: _AttemptState, attempt: int, waited: float, chance: Callable[[], float]) -> float | None:
        """Return the seconds to wait before a retry; None: do not retry."""
        if not state.rate_limited or self.stop.is_set():
            return None
        pause = self.limits.first_wait_s * 2.0 ** (attempt - 1) * (0.5 + chance())
        if state.retry_at is not None:
            pause = max(pause, state.retry_at - time.time())
        late = time.monotonic() + pause >= self.deadline
        if attempt > self.limits.retries or waited + pause > self.limits.retry_wait_s or late:
            state.why = f"still rate-limited after {attempt} attempts: {state.why}"
            return None
        return pause

    # -- one attempt

    def _attempt(
        self, argv: list[str], prompt: str, resume: AgentSession | None, earlier: _AttemptState | None
    ) -> _AttemptState:
        state = _AttemptState(Meter(resume.total if resume else None), resume.id if resume else "")
        if earlier is not None:
            state.counts, state.files, state.troubles = earlier.counts, earlier.files, earlier.troubles
        if resume and resume.total is None:  # earlier usage may be in the agent's own file
            self._read_side_log(state)
            state.meter = Meter(state.meter.session_total)
        if self.writable is not None:
            argv = confine.confined(argv, self.writable, confine.AGENT_DEVICES)
        printed, count = _LastLines(MAX_PRINTED), 0
        with self._files() as (out, err), AgentProcess(argv, self.env, self.cwd, self.limits.grace_s) as process:
            for stream, line in process.lines(prompt, lambda: self._watch(state, process)):
                if stream == "stderr":
                    state.last_error = line if line.strip() else state.last_error
                    err.add(line)
                elif self.adapter.prints_text:
                    printed.add(line)
                    out.add(line)
                    count += 1
                    if self.on_event is not None:
                        self.on_event(Message(self.scrubber.text(line)))
                elif line.startswith("{"):
                    clean, record = self.scrubber.line(line)
                    out.add(clean, clean=True)
                    for event in self.adapter.events(record) if record is not None else []:
                        self._handle(state, event)
                else:
                    out.add(line)
        state.last_error = self.scrubber.text(state.last_error[:MAX_PRINTED]).strip()
        if self.adapter.prints_text:
            if count:
                state.add(Message(self.scrubber.text(printed.last())))
                state.counts = state.counts[0] + count - 1, *state.counts[1:]
            if not state.why:
                self._handle(state, End(process.exit_code == 0, self.scrubber.text(printed.text())))
        state.close(process)
        if not state.why and (over := self._exceeded_cost(state)):
            # It was reported only with the answer, which has been paid for: keep the answer; the account includes it.
            state.troubles = (*state.troubles, over)
        return state

    def _handle(self, state: _AttemptState, event: AgentEvent) -> None:
        state.add(event)
        if self.on_event is not None:
            self.on_event(event)

    def _watch(self, state: _AttemptState, process: AgentProcess) -> None:
        """End the agent if a limit is exceeded; called often."""
        if process.ending:
            return
        now = time.monotonic()
        if state.ended is not None:
            if now - process.last_line > self.limits.exit_timeout_s or now > self.deadline or self.stop.is_set():
                process.end()  # it has answered; that it stays is not a failure
            return
        if self.limits.tokens is not None or self.limits.usd is not None:
            self._read_side_log(state)
        state.why = self._exceeded_limit(state, process.printed, now)
        if state.why:
            process.end()

    def _exceeded_limit(self, state: _AttemptState, printed: int, now: float) -> str:
        if self.stop.is_set():
            return "stopped"
        if now > self.deadline:
            return f"wall limit: {self.limits.wall_s:g} s"
        if printed > self.limits.output_bytes:
            return f"output limit: {self.limits.output_bytes} bytes"
        return self._exceeded_cost(state)

    def _exceeded_cost(self, state: _AttemptState) -> str:
        limits, usage = self.limits, plus(self.spent, priced(state.meter.usage, self.spec.price))
        if limits.tokens is not None and usage.tokens > limits.tokens:
            return f"token limit: {usage.tokens} of {limits.tokens}"
        if limits.usd is not None and usage.usd is not None and usage.usd > limits.usd:
            return f"usd limit: ${usage.usd:.4f} of ${limits.usd:g}"
        return ""

    def _read_side_log(self, state: _AttemptState) -> None:
        if state.side is None and state.session:
            path = self.adapter.side_log(state.session, self.env)
            state.side = LineTail(path, lambda: None) if path else None
        for block in state.side.blocks() if state.side else ():
            for line in block:
                for event in self.adapter.events(decode(line.decode("utf-8", "replace")) or {}):
                    if isinstance(event, Usage):
                        state.meter.add_live(event)

    # -- the log

    @contextlib.contextmanager
    def _files(self) -> Iterator[tuple[BoundedLog, BoundedLog]]:
        limit = self.limits.log_bytes
        render = self._printed if self.adapter.prints_text else self.scrubber.text
        errors = self.log.with_suffix(".stderr")
        with (
            BoundedLog(self.log, limit, render, _omitted_record) as out,
            BoundedLog(errors, limit, self.scrubber.text, _omitted_text) as err,
        ):
            yield out, err

    def _printed(self, line: str) -> str:
        return json.dumps({"type": command.OUTPUT, "text": self.scrubber.text(line)}, ensure_ascii=False)

    def _log_record(self, record: Mapping[str, Any]) -> None:
        """Append a record of looplab's own; adapters ignore it."""
        clean = self.scrubber.value({**record, "at": round(time.time(), 3)})
        with writing(self.log):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with append_own(self.log) as file:
                file.write(json.dumps(clean, ensure_ascii=False).encode() + b"\n")

    def _begin(self, argv: list[str], prompt: str) -> None:
        start = {"cli": self.spec.cli, "argv": redact_argv(argv), "cwd": str(self.cwd), "prompt": prompt}
        self._log_record({"type": "looplab.start", **start, "confined": self.confinement.by})
        text = self.confinement.warning
        if text:
            self._log_record({"type": "looplab.warning", "text": text})
            if self.on_event is not None:
                self.on_event(Trouble(text))

    def _end(self, state: _AttemptState, attempts: int) -> Answer:
        session = AgentSession(state.session, state.meter.total) if state.session else None
        answer = Answer(
            ok=not state.why,
            text=state.text,
            why=state.why,
            usage=self.spent,
            session=session,
            summary=state.summary(),
            seconds=time.monotonic() - self.started,
            attempts=attempts,
            exit_code=state.exit_code,
            log=self.log,
        )
        outcome = {"ok": answer.ok, "why": answer.why, "text": answer.text, "session": state.session}
        numbers = {"usage": asdict(answer.usage), "seconds": round(answer.seconds, 3), "attempts": attempts}
        self._log_record({"type": "looplab.end", **outcome, **numbers, "exit_code": answer.exit_code})
        return answer


def _omitted_record(lines: int, characters: int) -> str:
    return json.dumps({"type": "looplab.omitted", "lines": lines, "characters": characters})


def _omitted_text(lines: int, characters: int) -> str:
    return f"[looplab: {lines:,} lines with {characters:,} characters were dropped here]"


class _LastLines:
    """The last lines of an output, at least one, up to a number of characters."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[str] = deque()
        self._size = 0

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._size += len(line) + 1
        while self._size > self._limit and len(self._lines) > 1:
            self._size -= len(self._lines.popleft()) + 1

    def last(self) -> str:
        return self._lines[-1]

    def text(self) -> str:
        return "\n".join(self._lines)


@dataclass(slots=True)
class _AttemptState:
    """State of one attempt, updated by its events."""

    meter: Meter
    session: str = ""
    text: str = ""
    why: str = ""
    """Why it failed; while it runs, the limit that was exceeded."""
    ended: End | None = None
    progress: bool = False
    """Whether the model has done anything."""
    last_error: str = ""
    fatal: Trouble | None = None
    rate_limited: bool = False
    retry_at: float | None = None
    exit_code: int | None = None
    side: LineTail | None = None
    counts: tuple[int, int, int] = (0, 0, 0)
    files: dict[str, None] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()

    def add(self, event: AgentEvent) -> None:
        """Update the state with an event."""
        messages, commands, failures = self.counts
        if isinstance(event, Start | End):
            self.session = event.session or self.session
        if isinstance(event, Message | Command | FileChange):
            self.progress = True
        if isinstance(event, Message):
            self.text = event.text
            self.counts = messages + 1, commands, failures
        elif isinstance(event, Command):
            self.counts = messages, commands + 1, failures
        elif isinstance(event, Output):
            self.counts = messages, commands, failures + bool(event.exit_code)
        elif isinstance(event, FileChange):
            if len(self.files) < MAX_FILES:
                self.files[event.path] = None
        elif isinstance(event, Usage):
            self.meter.add(event)
        elif isinstance(event, Trouble):
            self.troubles = (*self.troubles, event.text)[-20:]
            self.fatal = event if event.fatal else self.fatal
            self.rate_limited = event.rate_limited
            self.retry_at = event.retry_at or self.retry_at
        elif isinstance(event, End):
            self.ended = event
            self.text = event.text or self.text

    def close(self, process: AgentProcess) -> None:
        """Record the exit of the process, and why it failed, if it did."""
        self.exit_code = process.exit_code
        limited = self.rate_limited
        self.rate_limited = False
        if self.why:
            return  # a limit
        if process.error:
            self.why = f"could not be started: {process.error}"
        elif self.ended is not None and self.ended.ok and (process.exit_code == 0 or process.ending):
            return
        else:
            how = f"exit code {self.exit_code}" if self.exit_code is not None else "killed by a signal"
            shown = self.fatal.text if self.fatal else self.last_error or next(reversed(self.troubles), "")
            what = "failed" if self.ended is not None else "ended without an answer"
            self.why = f"{what} ({how}){f': {shown}' if shown else ''}"
            self.rate_limited = self.fatal.rate_limited if self.fatal else limited or is_rate_limit(self.last_error)

    def summary(self) -> Summary:
        return Summary(*self.counts, files=tuple(self.files), troubles=self.troubles)
