"""Any command as an agent: it reads the prompt from stdin or a file, and its output is the answer."""

from __future__ import annotations

from looplab.agents.base import AgentAdapter, AgentEvent, AgentSpec, Message, Record, Request, text_of
from looplab.errors import LabError

OUTPUT = "looplab.output"
"""Type of the log record of a printed line."""


class CommandAdapter(AgentAdapter):
    """`cli: command`."""

    install_hint = "set its full path"
    prints_text = True

    def argv(self, spec: AgentSpec, request: Request) -> list[str]:
        variables = {"{prompt_file}": request.prompt_file, "{schema_file}": request.schema_file}
        args = [*spec.command[1:], *spec.extra_args]
        for name, path in variables.items():
            args = [arg.replace(name, str(path or "")) for arg in args]
        return args

    def events(self, record: Record) -> list[AgentEvent]:
        return [Message(text_of(record.get("text")))] if record.get("type") == OUTPUT else []

    def check(self, spec: AgentSpec) -> None:
        if not spec.command:
            raise LabError("an agent with `cli: command` needs a command", hint="command: [my-agent, '{prompt_file}']")

    def find_program(self, spec: AgentSpec) -> str:
        return spec.command[0]

    def wants_prompt_file(self, spec: AgentSpec) -> bool:
        return any("{prompt_file}" in arg for arg in spec.command[1:] + spec.extra_args)
