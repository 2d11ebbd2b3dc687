"""Data types: events of an agent, what is called and how (`AgentSpec`, `Limits`), and the `Answer`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Record = Mapping[str, Any]
"""One decoded line of an agent's stream."""
Scope = Literal["message", "call", "session"]


# -- events: one stream for all kinds of agents


@dataclass(frozen=True, slots=True)
class Start:
    """The agent reported its session."""

    session: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the agent."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """The agent started a command or used a tool."""

    command: str


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a command or tool."""

    text: str
    exit_code: int | None = None
    """None if unknown, or for a tool without one."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """The agent changed a file."""

    path: str
    kind: Literal["add", "update", "delete"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and dollars."""

    input_tokens: int = 0
    """All input tokens, cached or not."""
    cached_input_tokens: int = 0
    """Input tokens read from the cache."""
    output_tokens: int = 0
    usd: float | None = None
    """None if the agent does not report it."""
    scope: Scope = "call"
    """What it covers: one message of the model, this call, or the session with all earlier calls."""
    message: str = ""
    """Id of the message, for `message` scope; its usage is reported several times."""

    @property
    def tokens(self) -> int:
        """Tokens that limits count: uncached input and output. Cached input would be counted again in each turn."""
        return self.input_tokens - self.cached_input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error or a warning."""

    text: str
    fatal: bool = False
    """Whether the agent gave up because of it."""
    rate_limited: bool = False
    """Whether waiting helps."""
    retry_at: float | None = None
    """Unix time at which the limit ends; None if unknown."""


@dataclass(frozen=True, slots=True)
class End:
    """The agent has finished."""

    ok: bool
    text: str = ""
    """Final message; empty if it was the last `Message` of the stream."""
    session: str = ""


AgentEvent = Start | Message | Command | Output | FileChange | Usage | Trouble | End


# -- what is called, and how


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Dollars per million tokens, for agents that report only tokens."""

    input: float
    output: float
    cached_input: float | None = None
    """None: the same as `input`."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Which agent, and what it may do. By default it can write only to its folder."""

    cli: str
    """`codex`, `claude`, `command`, or the name of a plug-in."""
    model: str | None = None
    """None: the agent's own default."""
    binary: str | None = None
    """The program; None: its usual name on PATH."""
    command: tuple[str, ...] = ()
    """Program and arguments for `cli: command`; {prompt_file} and {schema_file} are replaced."""
    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = "workspace-write"
    """codex: what commands may write to."""
    network: bool = False
    """codex: whether commands in the sandbox may use the network."""
    permission_mode: Literal["default", "acceptEdits", "plan", "auto", "dontAsk", "bypassPermissions"] = "acceptEdits"
    """claude: what is allowed without asking; there is no user to ask."""
    allowed_tools: tuple[str, ...] = ("Read", "Glob", "Grep")
    """claude: tools that need no permission; `Bash(pytest *)` allows those commands. `acceptEdits` allows edits in its
    folder; Edit or Write in this list, without a path, would be allowed everywhere."""
    writable: tuple[str, ...] = ()
    """Folders that it may write to, in addition to its own and the one for temporary files."""
    confines_itself: bool = False
    """command: whether its program has its own sandbox, which does not work inside another one."""
    extra_args: tuple[str, ...] = ()
    """More arguments of the program."""
    env: tuple[str, ...] = ()
    """Environment variables to pass on, such as OPENAI_API_KEY; their values are never logged."""
    dangerous: bool = False
    """Whether to run without sandbox and permission checks; only for disposable machines."""
    price: TokenPrice | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call. If one is exceeded, the agent and all its processes are killed."""

    wall_s: float = 1800.0
    """Seconds for all attempts and the waits between them."""
    tokens: int | None = None
    usd: float | None = None
    output_bytes: int = 256 << 20
    """Bytes that it may print."""
    log_bytes: int = 16 << 20
    """Bytes kept in the log and in the stderr log; the middle of longer output is dropped."""
    retries: int = 5
    """Number of retries after a rate limit."""
    retry_wait_s: float = 600.0
    """Seconds that all waits together may take."""
    first_wait_s: float = 2.0
    """Seconds of the first wait; it doubles with each retry, with jitter."""
    grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    exit_timeout_s: float = 30.0
    """Seconds that it may stay silent after its end event; it may wait for its own background work."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A conversation that can be resumed."""

    id: str
    total: Usage | None = None
    """Total usage that the agent has reported so far; the total that the next call reports includes it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of what the agent did."""

    messages: int = 0
    commands: int = 0
    failed_commands: int = 0
    files: tuple[str, ...] = ()
    """Changed files, in order of their first change."""
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one call."""

    ok: bool
    text: str
    """Final message; of a failed call, its last message."""
    why: str
    """Why it is not ok; empty if it is."""
    usage: Usage
    """Usage of this call, over all attempts."""
    session: AgentSession | None
    summary: Summary
    seconds: float
    attempts: int
    exit_code: int | None
    """Exit code of the last attempt; None if it was stopped or killed by a signal."""
    log: Path


@dataclass(frozen=True, slots=True)
class Request:
    """What an adapter needs to build a command line."""

    resume: str | None = None
    schema: Mapping[str, Any] | None = None
    """JSON schema of the final message."""
    schema_file: Path | None = None
    """File that contains the schema."""
    prompt_file: Path | None = None
    usd: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the agent."""
    writable: tuple[str, ...] = ()
    """Folders that it may write to, in addition to its own."""


class AgentAdapter:
    """One kind of agent: how its program is called, and what the lines of its output mean.

    Plug-ins (entry point group `looplab.agents`) are subclasses; `argv` and `events` are all that most of them need. An
    agent whose program reads a prompt from stdin and prints its answer needs no adapter: `cli: command`.
    """

    program = ""
    """The usual name of its program."""
    install_hint = "set its full path with `binary`"
    """What to do if the program is not found."""
    reports_usd = False
    """Whether it reports dollars, so that a limit on them can be enforced without a price."""
    confines_itself = False
    """Whether its program has its own sandbox, which does not work inside another one."""
    prints_text = False
    """Whether its output is its answer, rather than a stream of JSON lines."""
    max_prompt_bytes: int | None = None
    """The longest prompt that it reads; None: no limit."""

    def argv(self, spec: AgentSpec, request: Request) -> list[str]:
        """Return the command line, without the program. The prompt is passed on stdin, unless `wants_prompt_file`.

        Args:
            spec: The agent and what it may do.
            request: The call.

        Raises:
            LabError: The agent does not support, or must not be given, what the spec asks for.
        """
        raise NotImplementedError

    def events(self, record: Record) -> list[AgentEvent]:
        """Return the events of one line of its stream; empty for unknown lines.

        Args:
            record: The decoded line.
        """
        return []

    def check(self, spec: AgentSpec) -> None:
        """Raise LabError if an agent cannot be called with these settings."""

    def find_program(self, spec: AgentSpec) -> str:
        """Return the name or the path of its program."""
        return spec.binary or self.program

    def side_log(self, session: str, env: Mapping[str, str]) -> Path | None:
        """Return the file in which the agent reports its usage while it runs; None if its stream has it.

        Args:
            session: Id of the session.
            env: Environment of the agent.
        """
        return None

    def state_paths(self, env: Mapping[str, str]) -> list[Path]:
        """Return the existing folders and files in which its program stores sessions and credentials.

        Missing folders are created, as the program itself would do.
        """
        return []

    def asks_permission(self, spec: AgentSpec) -> bool:
        """Return whether its own permissions restrict what it can change, where nothing else does."""
        return False

    def keeps_session(self, spec: AgentSpec) -> bool:
        """Return whether a call can be continued by a later one with the id that `Start` reports."""
        return not self.prints_text

    def wants_prompt_file(self, spec: AgentSpec) -> bool:
        """Return whether the prompt is passed as a file, `Request.prompt_file`."""
        return False

    def stale_answer(self, spec: AgentSpec) -> str | None:
        """Return a file, relative to its folder, that an earlier call may have left and that is removed; None: none."""
        return None


# -- helpers of adapters

_SLOW_DOWN = re.compile(
    r"too many requests|rate.?limit|overloaded|(?:status|code|http|error)\W{0,3}(?:429|529)\b|\((?:429|529)\)", re.I
)
_NO_CREDIT = re.compile(r"insufficient_quota|exceeded your current quota|credit balance|usage limit|billing", re.I)


def is_rate_limit(text: str, status: object = None) -> bool:
    """Return whether waiting helps. Quota exhaustion also returns 429, but does not recover."""
    return (status in (429, 529) or bool(_SLOW_DOWN.search(text))) and not _NO_CREDIT.search(text)


def text_of(value: object) -> str:
    """Return a text, or the joined texts of content blocks."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(text_of(part) for part in value if isinstance(part, str | Mapping))
    if isinstance(value, Mapping):
        return text_of(next((value[key] for key in ("text", "message", "content") if key in value), ""))
    return ""


def count_of(record: Mapping[str, Any], key: str) -> int:
    """Return a number of tokens; 0 if it is missing, as in older versions."""
    value = record.get(key)
    return max(0, int(value)) if isinstance(value, int) and not isinstance(value, bool) else 0


def part_of(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key; an empty one if there is none."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}
