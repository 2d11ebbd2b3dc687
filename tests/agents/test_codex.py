"""What codex's lines mean: today's and the older ones."""

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
from looplab.agents.codex import CodexAdapter, last_message_file
from looplab.agents.lines import decode


def read(*lines: str) -> list[AgentEvent]:
    return [event for line in lines for event in CodexAdapter().events(decode(line) or {})]


def item(kind: str, **fields: Any) -> str:
    return json.dumps({"type": "item.completed", "item": {"id": "item_1", "type": kind, **fields}})


def test_a_turn_is_read_from_its_start_to_its_end() -> None:
    assert read(
        '{"type":"thread.started","thread_id":"01a1"}',
        '{"type":"turn.started"}',
        '{"type":"item.started","item":{"type":"command_execution","command":"/bin/bash -lc ls","aggregated_output":"",'
        '"exit_code":null,"status":"in_progress"}}',
        item("command_execution", command="ls", aggregated_output="a.txt\n", exit_code=0, status="completed"),
        item("reasoning", text="hm"),
        item("agent_message", text="done"),
        '{"type":"turn.completed","usage":{"input_tokens":200,"cached_input_tokens":80,"cache_write_input_tokens":0,'
        '"output_tokens":20,"reasoning_output_tokens":0}}',
    ) == [
        Start("01a1"),
        Command("/bin/bash -lc ls"),
        Output("a.txt\n", 0),
        Message("done"),
        Usage(200, 80, 20, scope="session"),
        End(True),
    ]


def test_usage_of_an_older_version_lacks_fields() -> None:
    assert read('{"type":"turn.completed","usage":{"input_tokens":7,"output_tokens":2}}')[0] == Usage(
        7, 0, 2, scope="session"
    )
    assert read('{"type":"turn.completed"}') == [End(True)]
    assert read('{"type":"turn.completed","usage":{"input_tokens":null,"output_tokens":"many"}}')[0] == Usage(
        scope="session"
    )


def test_an_error_line_is_not_the_end_but_a_failed_turn_is() -> None:
    assert read('{"type":"error","message":"Reconnecting... 1/5"}') == [Trouble("Reconnecting... 1/5")]
    text = "exceeded retry limit, last status: 429 Too Many Requests"
    assert read(json.dumps({"type": "turn.failed", "error": {"message": text}})) == [
        Trouble(text, fatal=True, rate_limited=True),
        End(False),
    ]


def test_a_warning_item_is_no_failure() -> None:
    assert read(item("error", message="Model metadata for `x` not found.")) == [
        Trouble("Model metadata for `x` not found.")
    ]


@pytest.mark.parametrize(
    ("text", "limited"),
    [
        ("unexpected status 529 overloaded", True),
        ("Rate limit reached for gpt-5", True),
        ("You exceeded your current quota (429 insufficient_quota)", False),
        ("You've hit your usage limit. Try again in 3 days.", False),
        ("error in line 429 of the config", False),
    ],
)
def test_waiting_helps_against_a_rate_limit_but_not_against_an_empty_purse(text: str, limited: bool) -> None:
    (trouble, _) = read(json.dumps({"type": "turn.failed", "error": {"message": text}}))
    assert isinstance(trouble, Trouble)
    assert trouble.rate_limited is limited


def test_changed_files_are_told_unless_the_change_failed() -> None:
    changes = [{"path": "a.py", "kind": "add"}, {"path": "b.py", "kind": "update"}, {"path": "c.py", "kind": "delete"}]
    assert read(item("file_change", changes=changes, status="completed")) == [
        FileChange("a.py", "add"),
        FileChange("b.py", "update"),
        FileChange("c.py", "delete"),
    ]
    assert read(item("file_change", changes=changes, status="failed")) == []


def test_tools_and_searches_are_commands() -> None:
    call = {"type": "mcp_tool_call", "server": "db", "tool": "query", "arguments": {"q": 1}}
    assert read(json.dumps({"type": "item.started", "item": call})) == [Command('db.query {"q": 1}')]
    assert read(item("mcp_tool_call", result={"content": [{"type": "text", "text": "42"}]}, error=None)) == [
        Output("42")
    ]
    assert read(item("mcp_tool_call", result=None, error={"message": "no"})) == [Output("no")]
    assert read(item("web_search", query="sinkhorn")) == [Command("web_search sinkhorn")]


def test_a_declined_command_has_no_exit_code() -> None:
    assert read(item("command_execution", command="rm", aggregated_output="", exit_code=None, status="declined")) == [
        Output("", None)
    ]


def test_the_old_form_with_msg_is_read() -> None:
    def old(**msg: Any) -> str:
        return json.dumps({"id": "0", "msg": msg})

    assert read(
        old(type="session_configured", session_id="s1", model="o3"),
        old(type="task_started"),
        old(type="exec_command_begin", call_id="1", command=["bash", "-lc", "ls -l"], cwd="/x"),
        old(type="exec_command_end", call_id="1", stdout="out", stderr="err", exit_code=2),
        old(type="patch_apply_begin", changes={"a.py": {"add": {"content": ""}}, "b.py": {"type": "delete"}}),
        old(type="agent_reasoning", text="hm"),
        old(type="agent_message", message="v3 done"),
        old(type="token_count", input_tokens=10, cached_input_tokens=4, output_tokens=3, total_tokens=13),
        old(type="token_count", info={"total_token_usage": {"input_tokens": 20, "output_tokens": 6}}),
        old(type="token_count", info=None),
        old(type="stream_error", message="stream disconnected; retrying"),
        old(type="task_complete", last_agent_message="v3 done"),
    ) == [
        Start("s1", "o3"),
        Command("bash -lc 'ls -l'"),
        Output("outerr", 2),
        FileChange("a.py", "add"),
        FileChange("b.py", "delete"),
        Message("v3 done"),
        Usage(10, 4, 3, scope="session"),
        Usage(20, 0, 6, scope="session"),
        Trouble("stream disconnected; retrying"),
        End(True, "v3 done"),
    ]


def test_an_aborted_old_turn_failed() -> None:
    assert read('{"id":"0","msg":{"type":"turn_aborted","reason":"interrupted"}}')[-1] == End(False)


def test_the_oldest_form_is_read() -> None:
    assert read(
        '{"type":"command","command":"python train.py","output":"ok","exit_code":0}',
        '{"type":"command","command":["ls"]}',
        '{"type":"message","text":"v2 done"}',
        '{"type":"message","role":"assistant","content":[{"type":"output_text","text":"v3 done"}]}',
        '{"type":"message","role":"user","content":"go"}',
    ) == [
        Command("python train.py"),
        Output("ok", 0),
        Command("ls"),
        Message("v2 done"),
        Message("v3 done"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "warning: something",
        '{"type":"item.comp',
        "[1, 2]",
        '{"type":"shiny.new","x":1}',
        '{"type":"item.completed"}',
        '{"type":"item.completed","item":null}',
        '{"type":"item.completed","item":{"type":"file_change","changes":null}}',
        '{"type":["thread.started"]}',
        '{"msg":"text"}',
        "{" * 100_000,
    ],
)
def test_what_is_not_known_means_nothing(line: str) -> None:
    assert read(line) == []


def test_the_command_line_is_safe_unless_danger_is_meant() -> None:
    assert CodexAdapter().argv(AgentSpec("codex", model="gpt-5"), Request(writable=("/tmp/a b",))) == [
        "exec", "--json", "--skip-git-repo-check", "--sandbox", "workspace-write",
        "-c", "sandbox_workspace_write.exclude_slash_tmp=true",
        "-c", "sandbox_workspace_write.exclude_tmpdir_env_var=true",
        "-c", 'sandbox_workspace_write.writable_roots=["/tmp/a b"]', "--model", "gpt-5", "-",
    ]  # fmt: skip
    dangerous = CodexAdapter().argv(AgentSpec("codex", dangerous=True), Request(resume="01a1"))
    assert dangerous[-4:] == ["--dangerously-bypass-approvals-and-sandbox", "resume", "01a1", "-"]
    assert "--sandbox" not in dangerous


def test_the_file_of_the_last_message_is_found_in_the_arguments() -> None:
    assert last_message_file(("-c", "x=1", "-o", "out.txt")) == "out.txt"
    assert last_message_file(("--output-last-message=out.txt",)) == "out.txt"
    assert last_message_file(("-o",)) is None
    assert last_message_file(()) is None
