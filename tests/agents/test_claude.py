"""What claude's lines mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from looplab.agents.base import (
    AgentEvent,
    AgentSpec,
    Command,
    End,
    FileChange,
    Message,
    Output,
    Request,
    Start,
    Trouble,
    Usage,
)
from looplab.agents.claude import ClaudeAdapter
from looplab.agents.lines import decode
from looplab.errors import LabError

USAGE = {"input_tokens": 60, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 5, "output_tokens": 10}
RESULT = {
    "type": "result",
    "subtype": "success",
    "is_error": False,
    "api_error_status": None,
    "result": "done",
    "session_id": "fef5",
    "total_cost_usd": 0.0017,
    "usage": USAGE,
    "modelUsage": {
        "claude-opus": {
            "inputTokens": 60,
            "outputTokens": 10,
            "cacheReadInputTokens": 40,
            "cacheCreationInputTokens": 5,
        },
        "claude-haiku": {"inputTokens": 7, "outputTokens": 1},
    },
}


def read(*records: dict[str, Any] | str) -> list[AgentEvent]:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    return [event for line in lines for event in ClaudeAdapter().events(decode(line) or {})]


def assistant(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"id": "msg_1", "model": "claude-opus", "content": [*blocks], "usage": USAGE}
    return {"type": "assistant", "message": message, "parent_tool_use_id": None, **more}


def result_of_tool(content: Any, told: Any = None, **more: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "t", "content": content, **more}
    return {"type": "user", "message": {"role": "user", "content": [block]}, "tool_use_result": told}


def tool(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t", "name": name, "input": given}


def test_a_turn_is_read_from_its_start_to_its_end() -> None:
    usage = Usage(105, 40, 10, scope="message", message="msg_1")
    assert read(
        {"type": "system", "subtype": "hook_started"},  # may come before init
        {"type": "system", "subtype": "init", "session_id": "fef5", "model": "claude-opus"},
        assistant({"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look."}),
        assistant(tool("Bash", command="ls", description="x")),
        result_of_tool("a.txt", {"stdout": "a.txt", "stderr": ""}, is_error=False),
        RESULT,
    ) == [
        Start("fef5", "claude-opus"),
        Message("I look."),
        usage,
        Command("ls"),
        usage,
        Output("a.txt", 0),
        Usage(105, 40, 10),
        Usage(112, 40, 11, 0.0017, "session"),
        End(True, "done", "fef5"),
    ]


def test_a_written_file_is_told_when_it_is_written_not_when_that_is_tried() -> None:
    assert [e for e in read(assistant(tool("Write", file_path="a.txt", content="x"))) if not isinstance(e, Usage)] == []
    created = {"type": "create", "filePath": "a.txt", "structuredPatch": []}
    edited = {"filePath": "b.txt", "oldString": "1", "newString": "2", "structuredPatch": [{}]}
    assert read(result_of_tool("File created", created), result_of_tool("ok", edited)) == [
        FileChange("a.txt", "add"),
        FileChange("b.txt", "update"),
    ]
    assert read(result_of_tool("was blocked", "Error: was blocked", is_error=True)) == [Output("was blocked", None)]


def test_the_exit_code_of_a_failed_command_is_in_its_text() -> None:
    assert read(result_of_tool("Exit code 2\nno such file", "Error: Exit code 2", is_error=True)) == [
        Output("Exit code 2\nno such file", 2)
    ]
    assert read(result_of_tool([{"type": "text", "text": "Exit code 2 is bad"}])) == [
        Output("Exit code 2 is bad", None)
    ]


def test_other_tools_are_commands_with_their_input() -> None:
    assert read(assistant(tool("Grep", pattern="loss")))[0] == Command('Grep {"pattern": "loss"}')


def test_what_a_subagent_says_is_not_said_to_us() -> None:
    events = read(assistant({"type": "text", "text": "to my parent"}, parent_tool_use_id="t9"))
    assert [type(event) for event in events] == [Usage]


def test_a_refused_request_is_a_failure_though_it_says_success() -> None:
    text = "API Error: Request rejected (429) · slow down"
    *_, trouble, end = read({**RESULT, "is_error": True, "api_error_status": 429, "result": text})
    assert trouble == Trouble(text, fatal=True, rate_limited=True)
    assert end == End(False, text, "fef5")


@pytest.mark.parametrize("subtype", ["error_during_execution", "error_max_turns", "error_max_budget_usd"])
def test_other_ends_are_failures_with_their_reason(subtype: str) -> None:
    ended = {"type": "result", "subtype": subtype, "is_error": subtype != "error_max_turns", "session_id": "s"}
    assert read(ended) == [Trouble(subtype, fatal=True), End(False, "", "s")]
    assert read({**ended, "errors": ["it broke"]})[0] == Trouble("it broke", fatal=True)


def test_the_programs_own_words_are_trouble_not_a_message() -> None:
    refused = assistant({"type": "text", "text": "API Error: 529 Overloaded."}, error="server_error")
    assert read(refused) == [Trouble("API Error: 529 Overloaded.", rate_limited=True)]
    synthetic = {"type": "assistant", "message": {"model": "<synthetic>", "content": [{"type": "text", "text": "no"}]}}
    assert read(synthetic) == [Trouble("no")]


def test_a_retry_of_its_own_is_trouble_that_passes() -> None:
    retry = {"type": "system", "subtype": "api_retry", "attempt": 1, "max_retries": 10, "error_status": 529}
    (trouble,) = read({**retry, "error": "overloaded"})
    assert isinstance(trouble, Trouble)
    assert (trouble.fatal, trouble.rate_limited) == (False, True)


def test_a_rate_limit_event_says_when_it_ends() -> None:
    def event(**info: Any) -> dict[str, Any]:
        return {"type": "rate_limit_event", "rate_limit_info": info}

    assert read(event(status="allowed", resetsAt=1)) == []
    (warning, rejected) = read(
        event(status="allowed_warning", rateLimitType="five_hour"),
        event(status="rejected", rateLimitType="five_hour", resetsAt=1794790481),
    )
    assert warning == Trouble("rate limit (five_hour): allowed_warning")
    assert rejected == Trouble("rate limit (five_hour): rejected", rate_limited=True, retry_at=1794790481.0)


def test_a_structured_answer_is_the_text() -> None:
    assert read({**RESULT, "structured_output": {"edits": ["a@set=1"]}})[-1] == End(
        True, '{"edits": ["a@set=1"]}', "fef5"
    )


def test_an_older_version_tells_dollars_only() -> None:
    older = {k: v for k, v in RESULT.items() if k != "modelUsage"}
    assert read(older)[1] == Usage(usd=0.0017, scope="session")


@pytest.mark.parametrize(
    "record",
    [
        "no json",
        {"type": "stream_event", "event": {}},
        {"type": "assistant"},
        {"type": "assistant", "message": {"content": "text"}},
        {"type": "user", "message": {"content": "typed by a person"}},
        {"type": "user", "message": None},
        {"type": "rate_limit_event"},
        {"type": "new"},
    ],
)
def test_what_is_not_known_means_nothing(record: Any) -> None:
    assert read(record) == []


def test_the_command_line_is_safe_unless_danger_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ClaudeAdapter().argv(AgentSpec("claude", model="opus"), Request(schema={"type": "object"}, usd=2))
    assert args[:4] == ["-p", "--output-format", "stream-json", "--verbose"]
    assert args[4:8] == ["--permission-mode", "acceptEdits", "--allowedTools", "Read,Glob,Grep"]
    assert args[8:] == ["--model", "opus", "--json-schema", '{"type": "object"}', "--max-budget-usd", "2.000000"]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--dangerously-skip-permissions" in ClaudeAdapter().argv(AgentSpec("claude", dangerous=True), Request())


def test_root_is_told_before_the_start_that_claude_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(LabError, match="root"):
        ClaudeAdapter().argv(AgentSpec("claude", dangerous=True), Request())
    assert ClaudeAdapter().argv(AgentSpec("claude", dangerous=True), Request(env={"IS_SANDBOX": "1"}))
