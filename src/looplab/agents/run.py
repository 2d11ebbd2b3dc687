"""Ask an agent one thing: start it, follow its stream, hold its limits, ask again after a rate limit.

    answer = run_agent(AgentSpec("codex"), "make the tests pass", cwd=folder, log=new_log(folder / "agent_runs", "v3"))

What the agent prints goes to the log as it comes, without secrets, and its errors to a file beside it; of very much
output the log has the beginning and the end. The agent can write to its folder and to one for temporary files
(sandbox.py). Whatever happens, to the agent or to looplab, nothing that it started outlives the call (supervisor.py).
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
from typing import IO, Any

from looplab.agents import claude, codex, command, confine
from looplab.agents.account import Meter, plus, priced
from looplab.agents.base import (
    Adapter,
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
    Trouble,
    Usage,
    is_rate_limit,
)
from looplab.agents.bounded import BoundedLog
from looplab.agents.lines import Scrubber, decode
from looplab.agents.process import MARK, AgentProcess
from looplab.agents.sandbox import confinement_of, state_of, writable_folders
from looplab.errors import LabError
from looplab.measure.tail import LineTail
from looplab.runs.redact import redact_argv
from looplab.untrusted import append_own

ADAPTERS: dict[str, Adapter] = {"codex": codex, "claude": claude, "command": command}
PACKAGES = {"codex": "@openai/codex", "claude": "@anthropic-ai/claude-code"}
PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TMPDIR", "TZ",
    "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "CODEX_HOME", "CLAUDE_CONFIG_DIR", "VIRTUAL_ENV",
)  # fmt: skip
"""What every agent gets of the environment; anything else, keys above all, only by its name in `AgentSpec.env`."""
DANGER = ("danger-full-access", "bypassPermissions", "--yolo", "--dangerously-", "--allow-dangerously-")
TEMPORARY = "tmp"
"""The folder for temporary files, below that of a call."""
MAX_PRINTED = 1_000_000
"""Characters of what a command prints that are its answer: the last ones, in whole lines."""
MAX_FILES = 10_000
"""Changed files that are named."""
GO_ON = "You were interrupted by a rate limit. Go on where you were; what was asked at first still holds."


def check_spec(spec: AgentSpec, limits: Limits | None = None) -> None:
    """Whether this agent can be asked in this way; LabError if not."""
    risky = [a for a in (spec.sandbox, spec.permission_mode, *spec.extra_args) if any(word in a for word in DANGER)]
    if risky and not spec.dangerous:
        raise LabError(
            f"{risky[0]!r} lets the agent do anything on this machine",
            hint="say `dangerous: true` if that is meant, and only on a machine that may be lost",
        )
    if spec.cli == "command" and not spec.command:
        raise LabError("an agent of the kind `command` needs a command", hint="command: [my-agent, '{prompt_file}']")
    if limits is not None and limits.usd is not None and spec.cli != "claude" and spec.price is None:
        raise LabError(
            f"{spec.cli} does not tell dollars, so a limit of ${limits.usd:g} cannot be held",
            hint="give its price per million tokens, or limit tokens instead",
        )


def find_program(spec: AgentSpec, path: str | None) -> str:
    name = spec.command[0] if spec.cli == "command" else spec.binary or spec.cli
    found = shutil.which(name, path=path)
    if found is None:
        package = PACKAGES.get(spec.cli)
        hint = f"install it with `npm install -g {package}`, or say where it is with `binary`" if package else None
        raise LabError(f"the agent's program {name!r} is not there", hint=hint or "give its full path")
    return os.path.abspath(found)


def agent_env(spec: AgentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in spec.env if name not in environ]
    if missing:
        raise LabError(f"the agent is to get {', '.join(missing)}, which is not set", hint="export it before you start")
    return {name: environ[name] for name in (*PASSED_ON, *spec.env) if name in environ}


def new_log(folder: Path, name: str) -> Path:
    """A new, empty `<stamp>-<name>.jsonl`; never one that exists."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 10_000):
        path = folder / (f"{stamp}-{name}.jsonl" if number == 1 else f"{stamp}-{name}-{number}.jsonl")
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise LabError(f"too many logs of the name {name!r} in one second", file=folder)


def run_agent(
    spec: AgentSpec,
    prompt: str,
    *,
    cwd: Path,
    log: Path,
    limits: Limits | None = None,
    resume: AgentSession | None = None,
    schema: Mapping[str, Any] | None = None,
    extra_env: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    on_event: Callable[[AgentEvent], None] | None = None,
    stop: threading.Event | None = None,
    sleep: Callable[[float], object] | None = None,
    chance: Callable[[], float] = random.random,
) -> Answer:
    """Ask the agent and wait for its answer. LabError only for what is wrong before it starts; what goes wrong later
    is an answer that is not ok and says why. `stop`, once set, ends the agent from another thread."""
    limits = limits or Limits()
    environ = os.environ if environ is None else environ
    check_spec(spec, limits)
    if spec.cli == "claude" and len(prompt.encode("utf-8", "replace")) > claude.LONGEST_PROMPT:
        raise LabError("the prompt is longer than the 10 MB that claude reads", hint="put what is long into files")
    if not cwd.is_dir():
        raise LabError(f"the agent's folder {cwd} is not there")
    with tempfile.TemporaryDirectory(prefix="looplab-agent-", ignore_cleanup_errors=True) as scratch:
        os.mkdir(f"{scratch}/{TEMPORARY}")
        extra_env = {**(extra_env or {}), "TMPDIR": f"{scratch}/{TEMPORARY}"}
        call = _AgentCall(spec, limits, cwd, log, environ, {**(extra_env or {})}, on_event, stop or threading.Event())
        return call.run(prompt, resume, schema, Path(scratch), sleep or call.stop.wait, chance)


class _AgentCall:
    """One call: its log, its deadline, its attempts."""

    def __init__(
        self,
        spec: AgentSpec,
        limits: Limits,
        cwd: Path,
        log: Path,
        environ: Mapping[str, str],
        extra_env: dict[str, str],
        on_event: Callable[[AgentEvent], None] | None,
        stop: threading.Event,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.cwd = cwd
        self.log = log.absolute()
        self.adapter = ADAPTERS[spec.cli]
        self.env = {**agent_env(spec, environ), **extra_env, MARK: str(self.log)}
        self.program = find_program(spec, environ.get("PATH"))
        self.scrubber = Scrubber({**environ, **extra_env}, spec.env)
        self.on_event = on_event
        self.stop = stop
        self.started = time.monotonic()
        self.deadline = self.started + limits.wall_s
        self.spent = Usage()  # by the attempts before this one
        self.confinement = confinement_of(spec)
        self.writable: list[Path] | None = None  # where the kernel lets it write; None: everywhere

    def run(
        self,
        prompt: str,
        resume: AgentSession | None,
        schema: Mapping[str, Any] | None,
        scratch: Path,
        sleep: Callable[[float], object],
        chance: Callable[[], float],
    ) -> Answer:
        prompt = self.scrubber.text(prompt)
        folders = [scratch / TEMPORARY, *writable_folders(self.spec, self.cwd)]
        request = Request(
            resume.id if resume else None, schema, usd=self.limits.usd, env=self.env, writable=tuple(map(str, folders))
        )
        if self.confinement.by == "kernel":
            self.writable = [self.cwd, *folders, *state_of(self.spec, self.env)]
        if schema is not None:
            request = replace(request, schema_file=scratch / "schema.json")
            (scratch / "schema.json").write_text(json.dumps(schema))
        if self.spec.cli == "command" and command.wants_prompt_file(self.spec):
            request = replace(request, prompt_file=scratch / "prompt.md")
            (scratch / "prompt.md").write_text(prompt, encoding="utf-8", errors="replace")
        argv = [self.program, *self.adapter.argv(self.spec, request)]
        self._begin(argv, prompt)
        waited, attempt, story = 0.0, 0, None
        while True:
            attempt += 1
            old = codex.last_message_file(self.spec.extra_args) if self.spec.cli == "codex" else None
            if old is not None:
                (self.cwd / old).unlink(missing_ok=True)
            story = self._attempt(argv, "" if request.prompt_file else prompt, resume, story)
            self.spent = plus(self.spent, priced(story.meter.usage, self.spec.price))
            pause = self._pause(story, attempt, waited, chance)
            if pause is None:
                return self._end(story, attempt)
            self._note({"type": "looplab.wait", "attempt": attempt, "seconds": round(pause, 3), "why": story.why})
            sleep(pause)
            waited += pause
            if self.stop.is_set():
                story.why = "stopped"
                return self._end(story, attempt)
            if story.progress and story.session and not self._forgets():
                # What it did is in the session: asked anew, it would do it twice.
                resume, prompt = AgentSession(story.session, story.meter.total), GO_ON
                argv = [self.program, *self.adapter.argv(self.spec, replace(request, resume=story.session))]

    def _pause(self, story: _Story, attempt: int, waited: float, chance: Callable[[], float]) -> float | None:
        """How long to wait before it is asked again; None if it is not."""
        if not story.rate_limited or self.stop.is_set():
            return None
        pause = self.limits.first_wait_s * 2.0 ** (attempt - 1) * (0.5 + chance())
        if story.retry_at is not None:
            pause = max(pause, story.retry_at - time.time())
        late = time.monotonic() + pause >= self.deadline
        if attempt > self.limits.retries or waited + pause > self.limits.retry_wait_s or late:
            story.why = f"rate limit, still after {attempt} attempts: {story.why}"
            return None
        return pause

    def _forgets(self) -> bool:
        """Whether it was told to keep no sessions."""
        return self.spec.cli == "command" or bool({"--ephemeral", "--no-session-persistence"} & {*self.spec.extra_args})

    # -- one attempt

    def _attempt(self, argv: list[str], prompt: str, resume: AgentSession | None, earlier: _Story | None) -> _Story:
        story = _Story(Meter(resume.total if resume else None), resume.id if resume else "")
        if earlier is not None:
            story.counts, story.files, story.troubles = earlier.counts, earlier.files, earlier.troubles
        if resume and resume.total is None:  # what was before may stand in the agent's own file
            self._read_side_log(story)
            story.meter = Meter(story.meter.told)
        if self.writable is not None:
            argv = confine.confined(argv, self.writable, confine.AGENT_DEVICES)
        printed, count = _LastLines(MAX_PRINTED), 0
        with self._files() as (out, err), AgentProcess(argv, self.env, self.cwd, self.limits.grace_s) as process:
            for stream, line in process.lines(prompt, lambda: self._watch(story, process)):
                if stream == "stderr":
                    story.last_error = line if line.strip() else story.last_error
                    err.add(line)
                elif self.spec.cli == "command":
                    printed.add(line)
                    out.add(line)
                    count += 1
                    if self.on_event is not None:
                        self.on_event(Message(self.scrubber.text(line)))
                elif line.startswith("{"):
                    clean, record = self.scrubber.line(line)
                    out.add(clean, clean=True)
                    for event in self.adapter.events(record) if record is not None else []:
                        self._tell(story, event)
                else:
                    out.add(line)
        story.last_error = self.scrubber.text(story.last_error[:MAX_PRINTED]).strip()
        if self.spec.cli == "command":
            if count:
                story.add(Message(self.scrubber.text(printed.last())))
                story.counts = story.counts[0] + count - 1, *story.counts[1:]
            if not story.why:
                self._tell(story, End(process.exit_code == 0, self.scrubber.text(printed.text())))
        story.close(process)
        if not story.why and (over := self._too_dear(story)):
            # It was told only with the answer, which is paid for: it is kept, and the account knows.
            story.troubles = (*story.troubles, over)
        return story

    def _tell(self, story: _Story, event: AgentEvent) -> None:
        story.add(event)
        if self.on_event is not None:
            self.on_event(event)

    def _watch(self, story: _Story, process: AgentProcess) -> None:
        """Called often: is a limit passed?"""
        if process.ending:
            return
        now = time.monotonic()
        if story.ended is not None:
            if now - process.last_line > self.limits.linger_s or now > self.deadline or self.stop.is_set():
                process.end()  # its answer is there; that it stays is no failure
            return
        if self.limits.tokens is not None or self.limits.usd is not None:
            self._read_side_log(story)
        story.why = self._passed(story, process.printed, now)
        if story.why:
            process.end()

    def _passed(self, story: _Story, printed: int, now: float) -> str:
        if self.stop.is_set():
            return "stopped"
        if now > self.deadline:
            return f"wall limit: {self.limits.wall_s:g} s"
        if printed > self.limits.output_bytes:
            return f"output limit: {self.limits.output_bytes} bytes"
        return self._too_dear(story)

    def _too_dear(self, story: _Story) -> str:
        limits, usage = self.limits, plus(self.spent, priced(story.meter.usage, self.spec.price))
        if limits.tokens is not None and usage.tokens > limits.tokens:
            return f"token limit: {usage.tokens} of {limits.tokens}"
        if limits.usd is not None and usage.usd is not None and usage.usd > limits.usd:
            return f"usd limit: ${usage.usd:.4f} of ${limits.usd:g}"
        return ""

    def _read_side_log(self, story: _Story) -> None:
        if story.side is None and story.session:
            path = self.adapter.side_log(story.session, self.env)
            story.side = LineTail(path, lambda: None) if path else None
        for block in story.side.blocks() if story.side else ():
            for line in block:
                for event in self.adapter.events(decode(line.decode("utf-8", "replace")) or {}):
                    if isinstance(event, Usage):
                        story.meter.add_live(event)

    # -- the log

    @contextlib.contextmanager
    def _files(self) -> Iterator[tuple[BoundedLog, BoundedLog]]:
        limit = self.limits.log_bytes
        render = self._printed if self.spec.cli == "command" else self.scrubber.text
        errors = self.log.with_suffix(".stderr")
        with (
            BoundedLog(self.log, limit, render, _omitted_record) as out,
            BoundedLog(errors, limit, self.scrubber.text, _omitted_text) as err,
        ):
            yield out, err

    def _printed(self, line: str) -> str:
        return json.dumps({"type": command.OUTPUT, "text": self.scrubber.text(line)}, ensure_ascii=False)

    def _open(self, path: Path) -> IO[bytes]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return append_own(path)
        except OSError as error:
            raise LabError(f"the agent's log cannot be written: {error.strerror}", file=path) from None

    def _write(self, file: IO[bytes], line: str) -> None:
        try:
            file.write(line.encode() + b"\n")
        except OSError as error:
            raise LabError(f"the agent's log cannot be written: {error.strerror}", file=self.log) from None

    def _note(self, record: Mapping[str, Any]) -> None:
        """A line of looplab's own; the readers of agents' lines pass over it."""
        with self._open(self.log) as file:
            clean = self.scrubber.value({**record, "at": round(time.time(), 3)})
            self._write(file, json.dumps(clean, ensure_ascii=False))

    def _begin(self, argv: list[str], prompt: str) -> None:
        start = {"cli": self.spec.cli, "argv": redact_argv(argv), "cwd": str(self.cwd), "prompt": prompt}
        self._note({"type": "looplab.start", **start, "confined": self.confinement.by})
        text = self.confinement.warning
        if text:
            self._note({"type": "looplab.warning", "text": text})
            if self.on_event is not None:
                self.on_event(Trouble(text))

    def _end(self, story: _Story, attempts: int) -> Answer:
        session = AgentSession(story.session, story.meter.total) if story.session else None
        answer = Answer(
            ok=not story.why,
            text=story.text,
            why=story.why,
            usage=self.spent,
            session=session,
            summary=story.summary(),
            seconds=time.monotonic() - self.started,
            attempts=attempts,
            exit_code=story.exit_code,
            log=self.log,
        )
        told = {"ok": answer.ok, "why": answer.why, "text": answer.text, "session": story.session}
        numbers = {"usage": asdict(answer.usage), "seconds": round(answer.seconds, 3), "attempts": attempts}
        self._note({"type": "looplab.end", **told, **numbers, "exit_code": answer.exit_code})
        return answer


def _omitted_record(lines: int, characters: int) -> str:
    return json.dumps({"type": "looplab.omitted", "lines": lines, "characters": characters})


def _omitted_text(lines: int, characters: int) -> str:
    return f"[looplab: {lines:,} lines with {characters:,} characters are left out here]"


class _LastLines:
    """The last lines of an output, of about so many characters together; at least one."""

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
class _Story:
    """What the events of one attempt come to."""

    meter: Meter
    session: str = ""
    text: str = ""
    why: str = ""
    """Why it failed; while it runs, which limit was passed."""
    ended: End | None = None
    progress: bool = False
    """Whether the model has done anything yet."""
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
        """The process is gone: was it a success?"""
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
