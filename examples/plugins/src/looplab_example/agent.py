"""An agent: the adapter of a program that reads its prompt from stdin and prints JSON lines."""

from __future__ import annotations

from looplab.agents.base import AgentAdapter, AgentEvent, AgentSpec, End, Message, Record, Request, Usage


class ParrotAdapter(AgentAdapter):
    """`{"say": "…"}` for each message, `{"done": true, "tokens": 12}` at the end."""

    program = "looplab-parrot"

    def argv(self, spec: AgentSpec, request: Request) -> list[str]:
        return ["--resume", request.resume, *spec.extra_args] if request.resume else [*spec.extra_args]

    def events(self, record: Record) -> list[AgentEvent]:
        if isinstance(record.get("say"), str):
            return [Message(record["say"])]
        if record.get("done") is True:
            tokens = record.get("tokens")
            return [Usage(output_tokens=tokens if isinstance(tokens, int) else 0), End(True)]
        return []
