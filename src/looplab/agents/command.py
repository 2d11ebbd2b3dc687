"""Any command as an agent: it reads the prompt from stdin or a file, and its output is the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from looplab.agents.base import AgentEvent, AgentSpec, Message, Record, Request, text_of

OUTPUT = "looplab.output"
"""Type of the log record of a printed line."""


def argv(spec: AgentSpec, request: Request) -> list[str]:
    variables = {"{prompt_file}": request.prompt_file, "{schema_file}": request.schema_file}
    args = [*spec.command[1:], *spec.extra_args]
    for name, path in variables.items():
        args = [arg.replace(name, str(path or "")) for arg in args]
    return args


def wants_prompt_file(spec: AgentSpec) -> bool:
    """Whether the command takes the prompt as a file."""
    return any("{prompt_file}" in arg for arg in spec.command[1:] + spec.extra_args)


def side_log(session: str, env: Mapping[str, str]) -> Path | None:
    return None


def events(record: Record) -> list[AgentEvent]:
    return [Message(text_of(record.get("text")))] if record.get("type") == OUTPUT else []
