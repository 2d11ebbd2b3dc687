"""Adapters of all kinds of agents: looplab's own and those of plug-ins."""

from __future__ import annotations

from functools import cache

from looplab import plugins
from looplab.agents.base import AgentAdapter
from looplab.agents.claude import ClaudeAdapter
from looplab.agents.codex import CodexAdapter
from looplab.agents.command import CommandAdapter
from looplab.errors import LabError

BUILT_IN: dict[str, type[AgentAdapter]] = {"codex": CodexAdapter, "claude": ClaudeAdapter, "command": CommandAdapter}


def adapter_names() -> list[str]:
    """Return the names of all kinds of agents."""
    return [*BUILT_IN, *(name for name in plugins.names("agents") if name not in BUILT_IN)]


@cache
def find_adapter(name: str) -> AgentAdapter:
    """Return the adapter of this name.

    Raises:
        LabError: There is none, or its package cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name not in plugins.names("agents"):
        raise LabError(f"there is no agent {name!r}", hint=f"one of {', '.join(adapter_names())}")
    adapter = plugins.load("agents", name)()
    if not isinstance(adapter, AgentAdapter):
        raise LabError(f"the agent {name!r} is not a subclass of looplab.agents.base.AgentAdapter")
    return adapter
