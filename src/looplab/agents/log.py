"""Read logs of agents: those that looplab wrote, and original ones of codex and claude."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from looplab.agents.adapters import adapter_names, find_adapter
from looplab.agents.base import AgentEvent, AgentSession, Answer, End, Message, Summary, Trouble, Usage
from looplab.agents.lines import LONGEST_RECORD, Lines, decode
from looplab.errors import LabError

CHUNK = 1 << 20
CODEX = {"command", "message", "error", "event_msg", "session_meta"}
CLAUDE = {"system", "assistant", "user", "result", "stream_event", "rate_limit_event"}


def kind_of(path: Path) -> str:
    """Return the kind of agent that wrote this log."""
    for record in _records(path):
        kind = record.get("type")
        if kind == "looplab.start" and record.get("cli") in adapter_names():
            return str(record["cli"])
        if isinstance(record.get("msg"), dict) or str(kind).startswith(("thread.", "turn.", "item.")) or kind in CODEX:
            return "codex"
        if kind in CLAUDE:
            return "claude"
    raise LabError("not the log of an agent", file=path, hint="logs are the .jsonl files in agent_runs/")


def read_log(path: Path) -> Iterator[AgentEvent]:
    """Yield the events of a log, in order. Unreadable lines (an incomplete last one) and unknown ones are skipped."""
    adapter = find_adapter(kind_of(path))
    ended = False
    for record in _records(path):
        kind = record.get("type")
        if kind == "looplab.warning":
            yield Trouble(str(record.get("text")))
        elif kind == "looplab.omitted":
            yield Trouble(f"{record.get('lines')} lines with {record.get('characters')} characters were dropped here")
        elif kind == "looplab.wait":
            yield Trouble(f"waited {record.get('seconds')} s: {record.get('why')}", rate_limited=True)
            ended = False
        elif kind == "looplab.end":
            if not ended or not record.get("ok"):
                if record.get("why"):
                    yield Trouble(str(record["why"]), fatal=True)
                yield End(bool(record.get("ok")), str(record.get("text", "")), str(record.get("session", "")))
        else:
            for event in adapter.events(record):
                ended |= isinstance(event, End)
                yield event


def read_end(path: Path) -> Answer | None:
    """Return the answer of a call from its log; None if it did not finish."""
    try:
        last = None
        for record in _records(path):
            last = record if record.get("type") == "looplab.end" else last
    except LabError:
        return None
    if last is None:
        return None
    usage = read_usage(last.get("usage"))
    session = AgentSession(last["session"]) if last.get("session") else None
    return Answer(
        bool(last["ok"]), last.get("text") or "", last.get("why") or "", usage, session, Summary(),
        last.get("seconds") or 0.0, last.get("attempts") or 1, last.get("exit_code"), path,
    )  # fmt: skip


def read_usage(data: Any) -> Usage:
    """Return the usage in a record; values that are not numbers are ignored."""
    known = {"input_tokens", "cached_input_tokens", "output_tokens", "usd"}
    pairs = data.items() if isinstance(data, dict) else ()
    return Usage(**{key: value for key, value in pairs if key in known and type(value) in (int, float)})


def final_message(events: Iterable[AgentEvent]) -> str:
    """Return the text of the end, else the last message; empty if there is none."""
    text = ""
    for event in events:
        if isinstance(event, Message) or (isinstance(event, End) and event.text):
            text = event.text
    return text


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = Lines(LONGEST_RECORD)
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                yield from filter(None, map(decode, lines.feed(data)))
    except OSError as error:
        raise LabError(f"cannot be read: {error.strerror}", file=path) from None
    yield from filter(None, map(decode, lines.finish()))
