"""The words of this room: what agents do (events), who is asked and how (`AgentSpec`, `Limits`), what comes back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Record = Mapping[str, Any]
"""One decoded line of an agent's stream."""
Scope = Literal["message", "call", "session"]


# -- what an agent does: one stream for all kinds


@dataclass(frozen=True, slots=True)
class Start:
    """The agent said which session this is."""

    session: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """The agent said something."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """The agent began a command, or used a tool."""

    command: str


@dataclass(frozen=True, slots=True)
class Output:
    """What a command or tool gave."""

    text: str
    exit_code: int | None = None
    """None: not known, or a tool that has none."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """The agent changed a file."""

    path: str
    kind: Literal["add", "update", "delete"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and dollars."""

    input_tokens: int = 0
    """All that was read, from the cache or not."""
    cached_input_tokens: int = 0
    """The part of it that came from the cache."""
    output_tokens: int = 0
    usd: float | None = None
    """None: the agent does not tell."""
    scope: Scope = "call"
    """What it is the sum of: one message of the model, this call, or the session with all earlier calls."""
    message: str = ""
    """Of `message` scope: which one. The same message is told several times."""

    @property
    def tokens(self) -> int:
        """What limits count: read anew, and written. What came from the cache would be counted again in each turn."""
        return self.input_tokens - self.cached_input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something went wrong, or nearly."""

    text: str
    fatal: bool = False
    """Whether the agent gave up because of it."""
    rate_limited: bool = False
    """Whether waiting helps."""
    retry_at: float | None = None
    """When the limit ends (seconds since 1970), where that was told."""


@dataclass(frozen=True, slots=True)
class End:
    """The agent is done."""

    ok: bool
    text: str = ""
    """The final message; empty where the stream has it as its last `Message`."""
    session: str = ""


AgentEvent = Start | Message | Command | Output | FileChange | Usage | Trouble | End


# -- who is asked, and how


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Dollars for a million tokens, for agents that tell tokens only."""

    input: float
    output: float
    cached_input: float | None = None
    """The same as `input` if not said."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Which agent, and what it may do. The defaults are safe: it writes in its folder and nowhere else."""

    cli: Literal["codex", "claude", "command"]
    model: str | None = None
    """The agent's own default if not said."""
    binary: str | None = None
    """The program; looked for on PATH under its usual name if not said."""
    command: tuple[str, ...] = ()
    """`command`: the program and its arguments; {prompt_file} and {schema_file} are replaced."""
    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = "workspace-write"
    """codex: what commands may touch."""
    network: bool = False
    """codex: whether commands in the sandbox reach the network."""
    permission_mode: Literal["default", "acceptEdits", "plan", "auto", "dontAsk", "bypassPermissions"] = "acceptEdits"
    """claude: what is allowed without asking; nobody is there to be asked."""
    allowed_tools: tuple[str, ...] = ("Read", "Glob", "Grep")
    """claude: tools that need no permission; `Bash(pytest *)` allows those commands. `acceptEdits` allows edits in its
    folder; Edit or Write in this list, without a path, would be allowed everywhere."""
    writable: tuple[str, ...] = ()
    """Folders that it may write to, beside its own and the one for temporary files."""
    confines_itself: bool = False
    """command: its program has a sandbox of its own, which does not work inside another one."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of the program."""
    env: tuple[str, ...] = ()
    """Names of variables to pass on, such as OPENAI_API_KEY: the values are taken when it starts and never logged."""
    dangerous: bool = False
    """No sandbox, no permissions. Only inside a machine that may be lost."""
    price: TokenPrice | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may take. What is passed ends the agent and all that it started."""

    wall_s: float = 1800.0
    """All attempts and the waits between them."""
    tokens: int | None = None
    usd: float | None = None
    output_bytes: int = 256 << 20
    """What it may print."""
    log_bytes: int = 16 << 20
    """How much of it is kept in the log, and of its errors beside it: the first half and the last one."""
    retries: int = 5
    """How often it is asked again after a rate limit."""
    retry_wait_s: float = 600.0
    """The longest that the waits may take together."""
    first_wait_s: float = 2.0
    """The first wait; each further one is twice as long, more or less by chance."""
    grace_s: float = 10.0
    """From the request to end until it is made to."""
    linger_s: float = 30.0
    """How long it may stay silent after its end (it may wait for background work of its own)."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A conversation that can be gone on with."""

    id: str
    total: Usage | None = None
    """What the agent said it had cost so far. The next call tells a total again, which contains this one."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How much the agent did."""

    messages: int = 0
    commands: int = 0
    failed_commands: int = 0
    files: tuple[str, ...] = ()
    """Files that it changed, each once, in the order of their first change."""
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call."""

    ok: bool
    text: str
    """The final message; of a call that failed, the last one there was."""
    why: str
    """Why it is not ok; empty if it is."""
    usage: Usage
    """Of this call alone, all attempts together."""
    session: AgentSession | None
    summary: Summary
    seconds: float
    attempts: int
    exit_code: int | None
    """Of the last attempt; None if it was ended, or died of a signal."""
    log: Path


@dataclass(frozen=True, slots=True)
class Request:
    """What an adapter needs to know to put together a command line."""

    resume: str | None = None
    schema: Mapping[str, Any] | None = None
    """What the final message must look like (JSON schema)."""
    schema_file: Path | None = None
    """The same as a file."""
    prompt_file: Path | None = None
    usd: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment it will have."""
    writable: tuple[str, ...] = ()
    """Folders that it may write to, beside its own."""


class Adapter(Protocol):
    """One kind of agent. A module is one: these are its functions."""

    def argv(self, spec: AgentSpec, request: Request) -> list[str]:
        """The command line, without the program. Raises LabError for what this agent cannot or may not do."""

    def events(self, record: Record) -> list[AgentEvent]:
        """What one line of its stream means; nothing for what is not known."""

    def side_log(self, session: str, env: Mapping[str, str]) -> Path | None:
        """A file where the agent tells its usage while it works, if it does so only there."""


# -- what adapters have in common

_SLOW_DOWN = re.compile(
    r"too many requests|rate.?limit|overloaded|(?:status|code|http|error)\W{0,3}(?:429|529)\b|\((?:429|529)\)", re.I
)
_NO_CREDIT = re.compile(r"insufficient_quota|exceeded your current quota|credit balance|usage limit|billing", re.I)


def is_rate_limit(text: str, status: object = None) -> bool:
    """Whether waiting a little helps. An empty purse is refused in the same way, but stays empty."""
    return (status in (429, 529) or bool(_SLOW_DOWN.search(text))) and not _NO_CREDIT.search(text)


def text_of(value: object) -> str:
    """A text, or the texts of a list of content blocks."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(text_of(part) for part in value if isinstance(part, str | Mapping))
    if isinstance(value, Mapping):
        return text_of(next((value[key] for key in ("text", "message", "content") if key in value), ""))
    return ""


def count_of(record: Mapping[str, Any], key: str) -> int:
    """A number of tokens; 0 where it is missing, as in older versions."""
    value = record.get(key)
    return max(0, int(value)) if isinstance(value, int) and not isinstance(value, bool) else 0


def part_of(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under this key; an empty one if there is none."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}
