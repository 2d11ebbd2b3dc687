"""claude: `claude -p --output-format stream-json --verbose`.

`is_error`, not `subtype`, says whether it succeeded (a refused request has the subtype `success`). Each block of a
message is a separate line and repeats the usage of the whole message. Whether `total_cost_usd` includes the earlier
calls of a resumed session depends on the version; account.py infers it from the numbers of `modelUsage`.
"""

from __future__ import annotations

import json
import os
import re
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
    Scope,
    Start,
    Trouble,
    Usage,
    count_of,
    is_rate_limit,
    part_of,
    text_of,
)
from looplab.errors import LabError

WRITES_FILES = {"Write", "Edit", "MultiEdit", "NotebookEdit"}
EXIT_CODE = re.compile(r"Exit code (\d+)")


class ClaudeAdapter(AgentAdapter):
    """`claude -p`."""

    program = "claude"
    install_hint = "install it with `npm install -g @anthropic-ai/claude-code`, or set its path with `binary`"
    reports_usd = True
    max_prompt_bytes = 10_000_000

    def argv(self, spec: AgentSpec, request: Request) -> list[str]:
        args = ["-p", "--output-format", "stream-json", "--verbose"]
        if spec.dangerous:
            if os.geteuid() == 0 and "IS_SANDBOX" not in request.env:
                raise LabError(
                    "claude does not run as root without permissions",
                    hint="remove `dangerous`, run looplab as another user, or, in a container, pass env IS_SANDBOX",
                )
            args += ["--dangerously-skip-permissions"]
        else:
            args += ["--permission-mode", spec.permission_mode]
        if spec.allowed_tools:
            args += ["--allowedTools", ",".join(spec.allowed_tools)]
        if spec.model:
            args += ["--model", spec.model]
        if request.schema is not None:
            args += ["--json-schema", json.dumps(request.schema)]
        if request.usd is not None and not request.resume:
            args += ["--max-budget-usd", f"{request.usd:.6f}"]
        if request.resume:
            args += ["--resume", request.resume]
        return [*args, *spec.extra_args]

    def events(self, record: Record) -> list[AgentEvent]:
        kind = record.get("type")
        if kind == "system":
            return _system(record)
        if kind == "assistant":
            return _assistant(record)
        if kind == "user":
            return _user(record)
        if kind == "rate_limit_event":
            return _rate_limit(part_of(record, "rate_limit_info"))
        if kind == "result":
            return _result(record)
        return []

    def state_paths(self, env: Mapping[str, str]) -> list[Path]:
        if not env.get("HOME"):
            return []
        folder = Path(env.get("CLAUDE_CONFIG_DIR") or Path(env["HOME"], ".claude"))
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            return []
        settings = Path(env["HOME"], ".claude.json")
        return [folder, settings] if settings.is_file() else [folder]

    def asks_permission(self, spec: AgentSpec) -> bool:
        return "Bash" not in spec.allowed_tools

    def keeps_session(self, spec: AgentSpec) -> bool:
        return "--no-session-persistence" not in spec.extra_args


def _system(record: Record) -> list[AgentEvent]:
    if record.get("subtype") == "init":
        return [Start(text_of(record.get("session_id")), text_of(record.get("model")))]
    if record.get("subtype") == "api_retry":
        status, error = record.get("error_status"), text_of(record.get("error"))
        text = f"request failed ({status} {error}), attempt {record.get('attempt')} of {record.get('max_retries')}"
        return [Trouble(text, rate_limited=is_rate_limit(error, status))]
    return []


def _assistant(record: Record) -> list[AgentEvent]:
    message = part_of(record, "message")
    content = message.get("content")
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    if record.get("error") or message.get("model") == "<synthetic>":  # from the program, not the model
        text = text_of(blocks)
        return [Trouble(text, rate_limited=is_rate_limit(text) or record.get("error") == "rate_limit")]
    found: list[AgentEvent] = []
    for block in blocks:
        if block.get("type") == "text" and not record.get("parent_tool_use_id"):  # not from a subagent
            found.append(Message(text_of(block.get("text"))))
        elif block.get("type") == "tool_use" and block.get("name") not in WRITES_FILES:
            tool_input = part_of(block, "input")
            shown = tool_input.get("command") if block.get("name") == "Bash" else None
            name_and_input = f"{block.get('name')} {json.dumps(tool_input, ensure_ascii=False)}"
            found.append(Command(shown if isinstance(shown, str) else name_and_input))
    return found + _usage(part_of(message, "usage"), "message", text_of(message.get("id")))


def _user(record: Record) -> list[AgentEvent]:
    result = part_of(record, "tool_use_result")
    path = result.get("filePath")
    if isinstance(path, str) and (result.get("type") in ("create", "update") or "structuredPatch" in result):
        return [FileChange(path, "add" if result.get("type") == "create" else "update")]
    content = part_of(record, "message").get("content")
    found: list[AgentEvent] = []
    for block in content if isinstance(content, list) else []:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            text = text_of(block.get("content"))
            code = EXIT_CODE.match(text) if block.get("is_error") else None
            found.append(Output(text, int(code[1]) if code else 0 if "stdout" in result else None))
    return found


def _rate_limit(info: Mapping[str, Any]) -> list[AgentEvent]:
    status = info.get("status")
    if status in (None, "allowed"):
        return []
    until = info.get("resetsAt")
    text = f"rate limit ({info.get('rateLimitType') or 'unknown'}): {status}"
    retry_at = float(until) if isinstance(until, int | float) else None
    return [Trouble(text, rate_limited=status == "rejected", retry_at=retry_at)]


def _result(record: Record) -> list[AgentEvent]:
    found = _usage(part_of(record, "usage"), "call") + _session_usage(record)
    session = text_of(record.get("session_id"))
    text = text_of(record.get("result"))
    if record.get("structured_output") is not None:
        text = json.dumps(record["structured_output"], ensure_ascii=False)
    if not record.get("is_error") and record.get("subtype") == "success":
        return [*found, End(True, text, session)]
    why = text or text_of(record.get("errors")) or str(record.get("subtype"))
    limited = is_rate_limit(why, record.get("api_error_status"))
    return [*found, Trouble(why, fatal=True, rate_limited=limited), End(False, text, session)]


def _usage(usage: Mapping[str, Any], scope: Scope, message: str = "") -> list[AgentEvent]:
    if not usage:
        return []
    cached = count_of(usage, "cache_read_input_tokens")
    read = count_of(usage, "input_tokens") + cached + count_of(usage, "cache_creation_input_tokens")
    return [Usage(read, cached, count_of(usage, "output_tokens"), scope=scope, message=message)]


def _session_usage(record: Record) -> list[AgentEvent]:
    """Return the usage of all models, including subagents, with dollars."""
    cost = record.get("total_cost_usd")
    usd = float(cost) if isinstance(cost, int | float) else None
    models = [each for each in part_of(record, "modelUsage").values() if isinstance(each, Mapping)]
    if usd is None and not models:
        return []
    cached = sum(count_of(each, "cacheReadInputTokens") for each in models)
    fresh = sum(count_of(each, key) for each in models for key in ("inputTokens", "cacheCreationInputTokens"))
    return [Usage(fresh + cached, cached, sum(count_of(each, "outputTokens") for each in models), usd, "session")]
