"""Lines as they come, without secrets; and logs read back."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.agents.base import Command, End, Message, Output, Start, Trouble
from looplab.agents.lines import Lines, Scrubber, decode
from looplab.agents.log import final_message, kind_of, read_log
from looplab.errors import LabError

SECRET = 's3cr3t/with"quote+and-more'


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    whole, pieces = Lines(), Lines()
    expected = [*whole.feed(data), *whole.finish()]
    got = [line for a, b in itertools.pairwise(places) for line in pieces.feed(data[a:b])]
    assert [*got, *pieces.finish()] == expected


def test_a_half_line_waits_for_its_rest() -> None:
    lines = Lines()
    assert list(lines.feed(b'{"a":')) == []
    assert list(lines.feed(b' 1}\r\n{"b"')) == ['{"a": 1}']
    assert list(lines.finish()) == ['{"b"']


def test_a_line_without_end_is_cut_and_the_next_one_is_complete() -> None:
    lines = Lines(longest=10)
    got = [line for _ in range(5) for line in lines.feed(b"x" * 7)]
    assert got == []
    assert list(lines.feed(b"\nnext\n")) == ["x" * 10, "next"]


def test_bytes_that_are_no_text_do_not_break_a_line() -> None:
    (line,) = Lines().feed(b'{"text": "\xff\xfe caf\xc3\xa9"}\n')
    assert decode(line) == {"text": "\ufffd\ufffd café"}


def test_a_secret_is_taken_out_wherever_it_stands_and_the_line_stays_json() -> None:
    scrubber = Scrubber({"MY_LOGIN": SECRET, "WANDB_API_KEY": "0123456789abcdef"}, named=["MY_LOGIN"])
    record = {"a": [f"login {SECRET}!"], "b": {"0123456789abcdef": "sk-" + "a" * 30}, "n": 1, "url": "http://u:pw@host"}
    line, clean = scrubber.line(json.dumps(record))
    assert json.loads(line) == clean == {"a": ["login ***!"], "b": {"***": "***"}, "n": 1, "url": "http://u:***@host"}


def test_a_line_without_secrets_stays_as_it_is() -> None:
    line = '{"url":"http://a","b":"x@y",  "n":1.50}'
    assert Scrubber({}).line(line)[0] == line


def test_named_variables_that_are_addresses_or_models_are_no_secrets() -> None:
    env = {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8000", "ANTHROPIC_MODEL": "claude-opus-4"}
    assert Scrubber(env, named=env).text("http://127.0.0.1:8000 claude-opus-4") == "http://127.0.0.1:8000 claude-opus-4"


def test_half_an_emoji_can_be_written() -> None:
    line, clean = Scrubber({}).line('{"text": "cut \\ud83d"}')
    assert clean == {"text": "cut ?"}
    line.encode()


def log(path: Path, *records: object) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def test_a_log_of_looplab_is_read_back(tmp_path: Path) -> None:
    path = log(
        tmp_path / "a.jsonl",
        {"type": "looplab.start", "cli": "codex", "prompt": "go"},
        {"type": "looplab.warning", "text": "DANGEROUS"},
        {"type": "thread.started", "thread_id": "t1"},
        "a warning that is not JSON\n",
        {"type": "item.started", "item": {"type": "command_execution", "command": "ls"}},
        {"type": "item.completed", "item": {"type": "command_execution", "aggregated_output": "a", "exit_code": 1}},
        {"type": "item.completed", "item": {"type": "agent_message", "text": "done"}},
        {"type": "turn.completed"},
        {"type": "looplab.end", "ok": True, "why": "", "text": "done"},
        '{"type": "torn',
    )
    assert kind_of(path) == "codex"
    events = list(read_log(path))
    assert events == [
        Trouble("DANGEROUS"), Start("t1"), Command("ls"), Output("a", 1), Message("done"), End(True),
    ]  # fmt: skip
    assert final_message(events) == "done"


def test_a_call_that_was_ended_says_so_in_its_log(tmp_path: Path) -> None:
    end = {"type": "looplab.end", "ok": False, "why": "wall limit: 5 s", "text": "", "session": "t1"}
    path = log(tmp_path / "a.jsonl", {"type": "looplab.start", "cli": "claude"}, end)
    assert list(read_log(path)) == [Trouble("wall limit: 5 s", fatal=True), End(False, "", "t1")]


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        ({"type": "thread.started"}, "codex"),
        ({"id": "0", "msg": {"type": "task_started"}}, "codex"),
        ({"type": "command", "command": "ls"}, "codex"),
        ({"type": "system", "subtype": "hook_started"}, "claude"),
        ({"type": "result"}, "claude"),
        ({"type": "looplab.start", "cli": "command"}, "command"),
    ],
)
def test_the_kind_of_a_log_is_seen_in_its_lines(tmp_path: Path, first: dict[str, object], kind: str) -> None:
    assert kind_of(log(tmp_path / "a.jsonl", "Reading prompt from stdin...\n", {"type": "unknown"}, first)) == kind


def test_what_is_no_log_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="not the log of an agent"):
        kind_of(log(tmp_path / "a.jsonl", {"step": 1, "loss": 0.5}))
    with pytest.raises(LabError, match="cannot be read"):
        list(read_log(tmp_path / "none.jsonl"))
