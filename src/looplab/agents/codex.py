"""codex: `codex exec --json`, with its current stream format and the two older ones.

`usage` is the total of the thread with all earlier calls, and is reported only at the end of a turn; while it runs, the
same numbers are in the thread's own file under CODEX_HOME. It reports no dollars and has no limits.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.agents.base import (
    AgentAdapter,
    AgentEvent,
    AgentSpec,
    Command,
    End,
    FileChange,
    Message,
    Output,
    Record,
    Request,
    Start,
    Trouble,
    Usage,
    count_of,
    is_rate_limit,
    part_of,
    text_of,
)


class CodexAdapter(AgentAdapter):
    """`codex exec --json`."""

    program = "codex"
    install_hint = "install it with `npm install -g @openai/codex`, or set its path with `binary`"
    confines_itself = True

    def argv(self, spec: AgentSpec, request: Request) -> list[str]:
        args = ["exec", "--json", "--skip-git-repo-check"]
        if spec.dangerous:
            args += ["--dangerously-bypass-approvals-and-sandbox"]
        else:
            args += ["--sandbox", spec.sandbox]
            # By default its commands may write to /tmp and $TMPDIR, where a lab may be, and to folders in config.toml.
            settings = {
                "exclude_slash_tmp": True,
                "exclude_tmpdir_env_var": True,
                "writable_roots": [*map(str, request.writable)],
            }
            for name, value in settings.items():
                args += ["-c", f"sandbox_workspace_write.{name}={json.dumps(value, ensure_ascii=False)}"]
            if spec.network:
                args += ["-c", "sandbox_workspace_write.network_access=true"]
        if spec.model:
            args += ["--model", spec.model]
        if request.schema_file:
            args += ["--output-schema", str(request.schema_file)]
        args += spec.extra_args
        if request.resume:
            args += ["resume", request.resume]
        return [*args, "-"]

    def events(self, record: Record) -> list[AgentEvent]:
        kind = record.get("type")
        if kind == "thread.started":
            return [Start(text_of(record.get("thread_id")))]
        if kind in ("item.started", "item.completed"):
            return _item(part_of(record, "item"), done=kind == "item.completed")
        if kind == "turn.completed":
            return [*_usage(part_of(record, "usage")), End(True)]
        if kind == "turn.failed":
            return _failed(text_of(part_of(record, "error")) or "the turn failed")
        if kind == "error":  # also for requests that it retries: only a failed turn is the end
            text = text_of(record.get("message"))
            return [Trouble(text, rate_limited=is_rate_limit(text))]
        if isinstance(record.get("msg"), Mapping):
            return _old_event(record["msg"])
        if kind == "event_msg":  # a line of the thread's own file
            return _old_event(part_of(record, "payload"))
        if kind == "command":
            return _old_command(record)
        if kind == "message":
            text = text_of(record)
            return [Message(text)] if text and record.get("role", "assistant") == "assistant" else []
        return []

    def side_log(self, session: str, env: Mapping[str, str]) -> Path | None:
        home = Path(env.get("CODEX_HOME") or Path(env.get("HOME", "/"), ".codex"))
        # The name is checked: it comes from the agent and becomes a pattern.
        if not session.replace("-", "").isalnum():
            return None
        return next((home / "sessions").glob(f"*/*/*/rollout-*{session}.jsonl"), None)

    def keeps_session(self, spec: AgentSpec) -> bool:
        return "--ephemeral" not in spec.extra_args

    def stale_answer(self, spec: AgentSpec) -> str | None:
        return last_message_file(spec.extra_args)


def last_message_file(args: tuple[str, ...]) -> str | None:
    """Return the file of `-o`, None if there is none.

    It is written only when a turn completes, so an old one must be removed first, or it would be taken for the answer.
    """
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in ("-o", "--output-last-message"):
            return value if equals else next(iter(args[index + 1 :]), None)
    return None


def _item(item: Mapping[str, Any], done: bool) -> list[AgentEvent]:
    kind = item.get("type")
    if kind == "command_execution":
        if not done:
            return [Command(_command(item.get("command")))]
        return [Output(text_of(item.get("aggregated_output")), _code(item.get("exit_code")))]
    if kind == "mcp_tool_call":
        if not done:
            arguments = json.dumps(item.get("arguments"), ensure_ascii=False)
            return [Command(f"{item.get('server')}.{item.get('tool')} {arguments}")]
        return [Output(text_of(part_of(item, "error")) or text_of(part_of(item, "result")))]
    if not done:
        return []
    if kind == "agent_message":
        return [Message(text_of(item.get("text")))]
    if kind == "file_change" and item.get("status") != "failed":
        changes = item.get("changes")
        return [
            change
            for entry in (changes if isinstance(changes, list) else [])
            if isinstance(entry, Mapping)
            for change in _change(entry.get("path"), entry.get("kind"))
        ]
    if kind == "web_search":
        return [Command(f"web_search {text_of(item.get('query'))}")]
    if kind == "error":  # a warning: an unknown model, something deprecated
        return [Trouble(text_of(item.get("message")))]
    return []


def _old_event(msg: Mapping[str, Any]) -> list[AgentEvent]:
    kind = msg.get("type")
    if kind == "session_configured":
        return [Start(text_of(msg.get("session_id")), text_of(msg.get("model")))]
    if kind == "exec_command_begin":
        return [Command(_command(msg.get("command")))]
    if kind == "exec_command_end":
        parts = [text_of(msg.get(key)) for key in ("stdout", "stderr")]
        text = text_of(msg.get("aggregated_output")) or "".join(parts)
        return [Output(text, _code(msg.get("exit_code")))]
    if kind == "patch_apply_begin":
        changes = part_of(msg, "changes")
        return [change for path, how in changes.items() for change in _change(path, _change_kind(how))]
    if kind == "agent_message":
        return [Message(text_of(msg.get("message")))]
    if kind == "token_count":
        info = part_of(msg, "info")
        return _usage(part_of(info, "total_token_usage") or (msg if "input_tokens" in msg else {}))
    if kind == "task_complete":
        return [End(True, text_of(msg.get("last_agent_message")))]
    if kind == "turn_aborted":
        return _failed(f"the turn was aborted: {text_of(msg.get('reason'))}")
    if kind in ("error", "stream_error"):
        text = text_of(msg.get("message"))
        return [Trouble(text, rate_limited=is_rate_limit(text))]
    return []


def _old_command(record: Record) -> list[AgentEvent]:
    found: list[AgentEvent] = [Command(_command(record.get("command")))]
    if "output" in record or "exit_code" in record:
        found.append(Output(text_of(record.get("output")), _code(record.get("exit_code"))))
    return found


def _failed(text: str) -> list[AgentEvent]:
    return [Trouble(text, fatal=True, rate_limited=is_rate_limit(text)), End(False)]


def _usage(usage: Mapping[str, Any]) -> list[AgentEvent]:
    if not usage:
        return []
    read, cached, written = (count_of(usage, f"{key}_tokens") for key in ("input", "cached_input", "output"))
    return [Usage(read, min(read, cached), written, scope="session")]


def _change(path: object, kind: object) -> list[FileChange]:
    if isinstance(kind, Mapping):
        kind = kind.get("type")
    known = {"add": "add", "delete": "delete", "update": "update"}
    return [FileChange(path, known.get(str(kind), "update"))] if isinstance(path, str) else []  # type: ignore[arg-type]


def _change_kind(how: object) -> object:
    """Return the kind of a change: old patches have `{"add": {...}}`, later ones `{"type": "add"}`."""
    if isinstance(how, Mapping) and "type" not in how:
        return next(iter(how), "update")
    return how


def _command(command: object) -> str:
    """Return the command line; a list is quoted for the shell."""
    return shlex.join(map(str, command)) if isinstance(command, list) else text_of(command)


def _code(code: object) -> int | None:
    return code if isinstance(code, int) else None
