"""The real codex and the real claude, with a scripted model on loopback: no account, no network, no cost.

`make agents` installs them. They are found through
LOOPLAB_CODEX and LOOPLAB_CLAUDE, in `.agents/`, or on PATH.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agents_model import CACHED, INPUT, OUTPUT, PROVIDER, Hang, Model, Refuse, Say, Step, UseTool, new_home, program
from tests.conftest import PATIENCE_S

from looplab.agents.base import AgentSpec, Answer, Command, Limits
from looplab.agents.log import final_message, kind_of, read_log
from looplab.agents.run import run_agent

pytestmark = pytest.mark.agents
Talk = Callable[..., tuple[Answer, Model]]


@pytest.fixture
def home() -> Iterator[Path]:
    with new_home() as folder:
        yield folder


@pytest.fixture
def talk(home: Path, tmp_path: Path) -> Talk:
    def talk(
        cli: Any, script: Sequence[Step], limits: Limits | None = None, spec: dict[str, Any] | None = None, **more: Any
    ) -> tuple[Answer, Model]:
        with Model(script) as model:
            more.pop("made", lambda _: None)(model)
            # Nothing of this machine's environment: no account, no other address than the loopback one.
            environ = {"PATH": os.environ["PATH"], "HOME": str(home)}
            names: tuple[str, ...] = ()
            if cli == "codex":
                (home / "codex" / "config.toml").write_text(PROVIDER.format(url=model.url))
                environ["CODEX_HOME"] = str(home / "codex")
            else:
                given = {
                    "ANTHROPIC_BASE_URL": model.url,
                    "ANTHROPIC_API_KEY": "not-a-real-key",
                    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                    "CLAUDE_CODE_MAX_RETRIES": "0",
                }
                environ |= given
                names = tuple(given)
            answer = run_agent(
                AgentSpec(cli, binary=program(cli), env=names, **(spec or {})),
                more.pop("prompt", "write the file"),
                cwd=home / "work",
                log=tmp_path / f"{cli}.jsonl",
                limits=limits or Limits(wall_s=PATIENCE_S, grace_s=2),
                environ=environ,
                **more,
            )
            return answer, model

    return talk


def write(cli: str, name: str, text: str) -> UseTool:
    if cli == "codex":
        return UseTool("exec_command", {"cmd": f"echo {text} > {name}"})
    return UseTool("Write", {"file_path": name, "content": f"{text}\n"})


both = pytest.mark.parametrize("cli", ["codex", "claude"])


@both
def test_a_turn_writes_a_file_by_a_real_tool(talk: Talk, home: Path, cli: str) -> None:
    answer, model = talk(cli, [write(cli, "hello.txt", "hello"), Say("done")])
    assert (answer.ok, answer.why, answer.text) == (True, "", "done")
    assert (home / "work" / "hello.txt").read_text() == "hello\n"
    assert (answer.usage.input_tokens, answer.usage.cached_input_tokens) == (2 * INPUT, 2 * CACHED)
    assert answer.usage.output_tokens == 2 * OUTPUT
    assert "write the file" in str(model.requests[0])
    assert kind_of(answer.log) == cli
    assert final_message(read_log(answer.log)) == "done"
    if cli == "codex":
        assert any(isinstance(event, Command) and "echo hello" in event.command for event in read_log(answer.log))
    else:
        assert answer.summary.files == ("hello.txt",)
        assert answer.usage.usd is not None


@both
def test_a_refused_request_is_tried_again(talk: Talk, cli: str) -> None:
    waits: list[float] = []
    answer, _ = talk(cli, [Refuse(), Say("at last")], sleep=waits.append)
    assert (answer.ok, answer.text, answer.attempts, len(waits)) == (True, "at last", 2, 1)


@both
def test_work_that_a_rate_limit_interrupted_is_gone_on_with(talk: Talk, home: Path, cli: str) -> None:
    answer, model = talk(cli, [write(cli, "a.txt", "1"), Refuse(), Say("finished")], sleep=lambda _: None)
    assert (answer.ok, answer.text, answer.attempts) == (True, "finished", 2)
    assert "write the file" in str(model.requests[-1])  # the session remembers what was asked
    assert "You were interrupted" in str(model.requests[-1])
    assert (home / "work" / "a.txt").read_text() == "1\n"


@both
def test_a_hang_is_killed_at_its_limit(talk: Talk, cli: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Model] = []

    def monotonic() -> float:
        """The clock jumps once the model was asked, however long the agent took to start."""
        return time.monotonic() + (7200 if models[0].asked.is_set() else 0)

    monkeypatch.setattr("looplab.agents.run.time", SimpleNamespace(**{**vars(time), "monotonic": monotonic}))
    answer, _ = talk(cli, [Hang()], limits=Limits(wall_s=3600, grace_s=1), made=models.append)
    assert (answer.ok, answer.why) == (False, "wall limit: 3600 s")
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _is_of(pid, answer.log)]


@both
def test_a_call_is_stopped_in_the_middle(talk: Talk, cli: str) -> None:
    stop = threading.Event()
    answer, _ = talk(cli, [Hang()], stop=stop, on_event=lambda _: stop.set())
    assert answer.why == "stopped"


@both
def test_each_call_of_a_session_is_counted_once(talk: Talk, cli: str) -> None:
    first, _ = talk(cli, [Say("one")])
    second, model = talk(cli, [Say("two")], resume=first.session, prompt="and now")
    assert (second.ok, second.text) == (True, "two")
    assert "one" in str(model.requests[0])  # it is the same conversation
    assert first.usage.input_tokens == second.usage.input_tokens == INPUT
    third, _ = talk(cli, [Say("three")], resume=second.session, prompt="and now")
    assert third.usage.input_tokens == INPUT
    assert third.usage.output_tokens == OUTPUT


def test_codex_is_ended_when_it_has_used_its_tokens(talk: Talk) -> None:
    step = INPUT - CACHED + OUTPUT
    script: list[Step] = [write("codex", "a.txt", "1")] * 3 + [Hang()]
    answer, _ = talk("codex", script, limits=Limits(wall_s=PATIENCE_S, tokens=2 * step, grace_s=1))
    assert answer.why == f"token limit: {3 * step} of {2 * step}"


@both
def test_the_answer_follows_a_schema(talk: Talk, cli: str) -> None:
    properties = {"edit": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["edit"], "additionalProperties": False}
    given = {"edit": "lr@mul=2"}
    step = UseTool("StructuredOutput", given) if cli == "claude" else Say('{"edit": "lr@mul=2"}')
    answer, model = talk(cli, [step], schema=schema)
    assert answer.ok
    assert answer.text == '{"edit": "lr@mul=2"}'
    assert "edit" in str(model.requests[0])


def test_claude_uses_a_tool_only_if_it_was_allowed(talk: Talk, home: Path) -> None:
    script: list[Step] = [UseTool("Bash", {"command": 'python3 -c \'open("x", "w")\'', "description": "x"}), Say("ok")]
    answer, _ = talk("claude", script)
    assert answer.ok
    assert not (home / "work" / "x").exists()
    answer, _ = talk("claude", script, spec={"allowed_tools": ("Bash(python3 *)",)})
    assert answer.ok
    assert (home / "work" / "x").exists()


def test_codex_writes_only_in_its_folder(talk: Talk, home: Path) -> None:
    # Its sandbox lets it write to the temporary folder too, where this checkout may lie: so, somewhere else.
    with tempfile.TemporaryDirectory(prefix=".looplab-test-", dir=Path.home()) as elsewhere:
        command = f"echo 1 > inside.txt; echo 1 > {elsewhere}/outside.txt"
        answer, model = talk("codex", [UseTool("exec_command", {"cmd": command}), Say("ok")])
        assert answer.ok
        assert "exited with code 1" in str(model.requests[-1])  # told to the model; the stream says nothing of it
        assert (home / "work" / "inside.txt").exists()
        assert not list(Path(elsewhere).iterdir())


def _is_of(pid: str, log: Path) -> bool:
    try:
        return f"LOOPLAB_AGENT_LOG={log}".encode() in Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False
