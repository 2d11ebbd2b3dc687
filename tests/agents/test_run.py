"""One call: what is started, what it may take, how it ends. The agents are small programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.agents.base import (
    AgentEvent,
    AgentSession,
    AgentSpec,
    Answer,
    Limits,
    Message,
    TokenPrice,
    Trouble,
    Usage,
)
from looplab.agents.log import final_message, read_log
from looplab.agents.run import new_log, run_agent
from looplab.errors import LabError

Ask = Callable[..., Answer]
HANG = """
tell(type="thread.started", thread_id="t1")
message("I begin")
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
away = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"], start_new_session=True, stdout=subprocess.PIPE)
away.stdout.readline()
open("pids", "w").write(f"{os.getpid()} {grandchild.pid} {away.pid}")
os.rename("pids", "started")
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def until(true: Callable[[], object]) -> None:
    """Wait for a condition; the test's own timeout ends it."""
    while not true():
        time.sleep(0.01)


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "started").read_text().split()]


def records(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.log.read_text().splitlines()]


def test_a_turn_gives_its_answer_and_its_log(ask: Ask) -> None:
    seen: list[AgentEvent] = []
    answer = ask(
        """
        prompt = sys.stdin.read()
        tell(type="thread.started", thread_id="t1")
        print("a warning", flush=True)
        print("on stderr", file=sys.stderr)
        tell(type="item.started", item={"type": "command_execution", "command": "false"})
        tell(type="item.completed", item={"type": "command_execution", "aggregated_output": "", "exit_code": 1})
        tell(type="item.completed", item={"type": "file_change", "changes": [{"path": "a.py", "kind": "add"}]})
        message("not yet")
        message("you said " + prompt)
        tell(type="turn.completed", usage={"input_tokens": 100, "cached_input_tokens": 40, "output_tokens": 10})
        """,
        prompt="make it better ☂",
        on_event=seen.append,
    )
    assert (answer.ok, answer.why, answer.exit_code, answer.attempts) == (True, "", 0, 1)
    assert answer.text == "you said make it better ☂"
    assert answer.usage == Usage(100, 40, 10)
    assert answer.session == AgentSession("t1", Usage(100, 40, 10, scope="session"))
    assert answer.summary.commands == answer.summary.failed_commands == 1
    assert (answer.summary.messages, answer.summary.files) == (2, ("a.py",))
    assert seen == list(read_log(answer.log))
    assert '"prompt": "make it better ☂"' in answer.log.read_text()
    assert answer.log.with_suffix(".stderr").read_text() == "on stderr\n"


def test_a_failing_command_inside_does_not_fail_the_turn_but_the_exit_code_does(ask: Ask) -> None:
    body = 'message("done"); tell(type="turn.completed"); sys.exit({})'
    assert ask(body.format(0)).ok
    answer = ask(body.format(1))
    assert (answer.ok, answer.why) == (False, "failed (exit code 1)")


def test_an_agent_without_a_last_event_has_not_answered(ask: Ask) -> None:
    answer = ask('message("half"); print("bad config: no model", file=sys.stderr); sys.exit(1)')
    assert (answer.ok, answer.text) == (False, "half")
    assert answer.why == "ended without an answer (exit code 1): bad config: no model"
    answer = ask('message("half"); sys.stdout.close(); os.kill(os.getpid(), 9)')
    assert answer.why == "ended without an answer (killed by a signal)"
    assert answer.exit_code is None


def test_a_hanging_agent_is_ended_at_its_limit_with_all_that_it_started(
    ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def monotonic() -> float:
        """The clock jumps once the agent has started all that it starts, however long that takes."""
        return time.monotonic() + (7200 if (folder / "started").exists() else 0)

    monkeypatch.setattr("looplab.agents.run.time", SimpleNamespace(**{**vars(time), "monotonic": monotonic}))
    answer = ask(HANG, limits=Limits(wall_s=3600, grace_s=0.3))
    assert (answer.ok, answer.why, answer.text) == (False, "wall limit: 3600 s", "I begin")
    assert not any(alive(pid) for pid in pids(folder))
    assert records(answer)[-1]["why"] == "wall limit: 3600 s"


def test_what_a_finished_agent_leaves_running_is_ended(ask: Ask, folder: Path) -> None:
    body = HANG.replace("time.sleep(600)\n", "") + 'message("ok"); tell(type="turn.completed")'
    assert ask(body, limits=Limits(wall_s=PATIENCE_S, grace_s=0.2)).ok
    assert not any(alive(pid) for pid in pids(folder))


def test_an_agent_that_stays_after_its_answer_is_ended_and_the_answer_kept(ask: Ask) -> None:
    answer = ask(
        'message("done"); tell(type="turn.completed"); time.sleep(600)',
        limits=Limits(wall_s=PATIENCE_S, exit_timeout_s=0.1, grace_s=0.2),
    )
    assert (answer.ok, answer.text) == (True, "done")


def test_it_can_be_stopped_from_another_thread(ask: Ask, folder: Path) -> None:
    stop = threading.Event()
    threading.Thread(target=lambda: (until((folder / "started").exists), stop.set()), daemon=True).start()
    assert ask(HANG, limits=Limits(wall_s=PATIENCE_S, grace_s=0.2), stop=stop).why == "stopped"
    assert not any(alive(pid) for pid in pids(folder))


def test_an_interrupt_ends_the_agent(ask: Ask, folder: Path) -> None:
    def interrupt(event: AgentEvent) -> None:
        until((folder / "started").exists)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(HANG, limits=Limits(wall_s=PATIENCE_S, grace_s=0.2), on_event=interrupt)
    assert not any(alive(pid) for pid in pids(folder))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_does_not_outlive_a_killed_looplab(tmp_path: Path, folder: Path, number: int) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import json, os, subprocess, sys, time\ndef tell(**r): pass\ndef message(t): pass\n" + HANG)
    program = (
        "from pathlib import Path\n"
        "from looplab.agents.base import AgentSpec, Limits\n"
        "from looplab.agents.run import run_agent\n"
        f"run_agent(AgentSpec('command', command=({sys.executable!r}, {str(agent)!r})), 'x', cwd=Path({str(folder)!r}),"
        f" log=Path({str(tmp_path / 'log.jsonl')!r}), limits=Limits(grace_s=0.2))\n"
    )
    looplab = subprocess.Popen([sys.executable, "-c", program])
    until((folder / "started").exists)
    assert all(alive(pid) for pid in pids(folder))
    looplab.send_signal(number)
    looplab.wait()
    until(lambda: not any(alive(pid) for pid in pids(folder)))


def test_a_killed_warden_leaves_nothing_either(ask: Ask, folder: Path) -> None:
    def kill_warden() -> None:
        until((folder / "started").exists)
        parent = int(Path(f"/proc/{pids(folder)[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    threading.Thread(target=kill_warden, daemon=True).start()
    answer = ask(HANG, limits=Limits(wall_s=PATIENCE_S, grace_s=0.2))
    assert not answer.ok
    assert "supervisor" in answer.why
    assert not any(alive(pid) for pid in pids(folder))


def test_a_killed_warden_leaves_no_daemon_without_an_environment(ask: Ask, folder: Path) -> None:
    daemon = """
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        with open("new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("new", "daemon")
        os.closerange(0, 1000)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    while not os.path.exists("daemon"):
        time.sleep(0.005)
    """

    def kill_warden() -> None:
        until((folder / "started").exists)
        for pid in pids(folder):
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if b"supervisor.py" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    os.kill(parent, signal.SIGKILL)
                    return

    threading.Thread(target=kill_warden, daemon=True).start()
    answer = ask(textwrap.dedent(daemon) + HANG, limits=Limits(wall_s=PATIENCE_S, grace_s=0.2))
    assert "supervisor" in answer.why
    assert not any(alive(pid) for pid in [*pids(folder), int((folder / "daemon").read_text())])


def test_an_agent_has_default_signals_whatever_looplab_inherited(ask: Ask) -> None:
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM))
    try:
        shown = "subprocess.check_output(['grep', '-E', '^Sig(Ign|Blk):', '/proc/self/status'], text=True)"
        answer = ask(f'message({shown}); tell(type="turn.completed")')
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)
    of_the_c_library = 0b11 << 31
    masks = [int(line.split()[1], 16) & ~of_the_c_library for line in answer.text.splitlines()]
    assert masks == [0, 0]


# -- limits of cost and output


def test_tokens_are_limited_while_it_works(ask: Ask) -> None:
    body = """
    for n in range(1, 100):
        usage = {"input_tokens": 100, "cache_read_input_tokens": 1000, "output_tokens": 10}
        for block in "ab":
            tell(type="assistant", message={"id": f"m{n}", "usage": usage, "content": [{"type": "text", "text": block}]})
        time.sleep(0.005 if n < 4 else 600)
    """
    answer = ask(body, cli="claude", limits=Limits(wall_s=PATIENCE_S, tokens=400, grace_s=0.2))
    assert (answer.ok, answer.why) == (False, "token limit: 440 of 400")
    assert answer.usage == Usage(4400, 4000, 40)


def test_codex_tells_its_tokens_only_in_its_own_file_while_it_works(ask: Ask, tmp_path: Path) -> None:
    body = """
    folder = os.environ["CODEX_HOME"] + "/sessions/2026/11/16"
    os.makedirs(folder)
    tell(type="thread.started", thread_id="01a1-77")
    with open(folder + "/rollout-2026-11-16T00-00-00-01a1-77.jsonl", "w", buffering=1) as file:
        for n in (300, 600):
            info = {"total_token_usage": {"input_tokens": n, "output_tokens": 0}}
            file.write(json.dumps({"type": "event_msg", "payload": {"type": "token_count", "info": info}}) + "\\n")
        time.sleep(600)
    """
    environ = {"PATH": os.environ["PATH"], "CODEX_HOME": str(tmp_path / "codex")}
    answer = ask(body, limits=Limits(wall_s=PATIENCE_S, tokens=500, grace_s=0.2), environ=environ)
    assert answer.why == "token limit: 600 of 500"
    # Resumed without its total: what was before stands in the file.
    body = 'message("x"); tell(type="turn.completed", usage={"input_tokens": 650, "output_tokens": 5})'
    answer = ask(body, environ=environ, resume=AgentSession("01a1-77"))
    assert answer.usage == Usage(50, 0, 5)


def test_dollars_are_limited_by_the_price(ask: Ask) -> None:
    body = 'tell(id="0", msg={"type": "token_count", "input_tokens": 1000000, "output_tokens": 0}); time.sleep(600)'
    answer = ask(body, price=TokenPrice(3.0, 15.0), limits=Limits(wall_s=PATIENCE_S, usd=2.0, grace_s=0.2))
    assert (answer.why, answer.usage.usd) == ("usd limit: $3.0000 of $2", 3.0)


def test_an_answer_that_turns_out_too_dear_is_kept_and_says_so(ask: Ask) -> None:
    answer = ask('message("done"); tell(type="turn.completed", usage=usage(900))', limits=Limits(tokens=500))
    assert (answer.ok, answer.text) == (True, "done")
    assert answer.summary.troubles == ("token limit: 900 of 500",)


def test_a_limit_in_dollars_that_cannot_be_held_is_refused(ask: Ask) -> None:
    with pytest.raises(LabError, match="does not report dollars"):
        ask("", limits=Limits(usd=1))


@pytest.mark.parametrize("printed", ['"x" * 100000', '"x" * 99999 + chr(10)'])
def test_output_without_end_is_limited(ask: Ask, printed: str) -> None:
    body = f"while True: sys.stdout.write({printed})"
    assert (
        ask(body, limits=Limits(wall_s=PATIENCE_S, output_bytes=1_000_000, grace_s=0.2)).why
        == "output limit: 1000000 bytes"
    )


# -- rate limits

REFUSED = 'tell(type="turn.failed", error={"message": "exceeded retry limit, last status: 429 Too Many Requests"})'


def test_after_a_rate_limit_it_is_asked_again_and_waits_longer_each_time(ask: Ask) -> None:
    waits: list[float] = []
    answer = ask(
        f"""
        assert sys.stdin.read() == "do it"
        tell(type="thread.started", thread_id="t1")
        if count() < 3:
            {REFUSED}
            sys.exit(1)
        message("done")
        tell(type="turn.completed")
        """,
        sleep=waits.append,
        chance=lambda: 0.5,
    )
    assert (answer.ok, answer.text, answer.attempts) == (True, "done", 4)
    assert waits == [2.0, 4.0, 8.0]
    assert [r["seconds"] for r in records(answer) if r["type"] == "looplab.wait"] == waits


def test_waits_differ_by_chance(ask: Ask) -> None:
    waits: list[float] = []
    ask(f"{REFUSED}; sys.exit(1)", sleep=waits.append, limits=Limits(retries=8, retry_wait_s=1e9, wall_s=1e9))
    assert len(waits) == 8
    assert all(2**n <= wait <= 3 * 2**n for n, wait in enumerate(waits))


def test_attempts_and_waits_are_bounded(ask: Ask) -> None:
    waits: list[float] = []
    answer = ask(f"{REFUSED}; sys.exit(1)", sleep=waits.append, limits=Limits(retries=2, wall_s=100))
    assert (answer.attempts, len(waits), answer.ok) == (3, 2, False)
    assert answer.why.startswith("still rate-limited after 3 attempts: failed (exit code 1)")
    waits.clear()
    ask(f"{REFUSED}; sys.exit(1)", sleep=waits.append, limits=Limits(retry_wait_s=7), chance=lambda: 0.5)
    assert waits == [2.0, 4.0]
    waits.clear()
    ask(f"{REFUSED}; sys.exit(1)", sleep=waits.append, limits=Limits(wall_s=1.5), chance=lambda: 0.5)
    assert waits == []


def test_a_limit_that_ends_too_late_is_not_waited_for(ask: Ask) -> None:
    body = """
    tell(type="rate_limit_event", rate_limit_info={"status": "rejected", "resetsAt": 4e9, "rateLimitType": "five_hour"})
    tell(type="result", subtype="success", is_error=True, api_error_status=429, result="no")
    sys.exit(1)
    """
    answer = ask(body, cli="claude", sleep=pytest.fail)
    assert (answer.ok, answer.attempts) == (False, 1)


def test_other_failures_are_not_tried_again(ask: Ask) -> None:
    failed = 'tell(type="turn.failed", error={"message": "You exceeded your current quota (429)"}); sys.exit(1)'
    assert ask(failed, sleep=pytest.fail).attempts == 1


def test_interrupted_work_is_continued_not_restarted(ask: Ask) -> None:
    answer = ask(
        f"""
        prompt = sys.stdin.read()
        tell(type="thread.started", thread_id="t1")
        if count() == 0:
            message("half of it")
            tell(id="0", msg={{"type": "token_count", "input_tokens": 100, "output_tokens": 0}})
            {REFUSED}
            sys.exit(1)
        assert sys.argv[-3:] == ["resume", "t1", "-"], sys.argv
        assert prompt.startswith("You were interrupted")
        message("all of it")
        tell(type="turn.completed", usage=usage(150))
        """,
        sleep=lambda _: None,
    )
    assert (answer.ok, answer.text, answer.attempts) == (True, "all of it", 2)
    assert answer.usage.input_tokens == 150
    assert answer.summary.messages == 2


def test_a_command_that_says_429_is_asked_again_too(ask: Ask) -> None:
    body = 'sys.exit("HTTP 429 Too Many Requests") if count() == 0 else print("fine")'
    assert ask(body, cli="command", sleep=lambda _: None).text == "fine"


# -- streams that misbehave


def test_a_prompt_that_nobody_reads_does_no_harm(ask: Ask) -> None:
    answer = ask('os.close(0); message("done"); tell(type="turn.completed")', prompt="x" * 5_000_000)
    assert answer.ok


def test_a_long_prompt_and_a_long_answer_pass_each_other(ask: Ask) -> None:
    body = """
    for line in sys.stdin:
        message(line.strip())
    tell(type="turn.completed")
    """
    answer = ask(body, prompt="\n".join("y" * 1000 for _ in range(2000)))
    assert (answer.ok, answer.summary.messages) == (True, 2000)


def test_partial_lines_bad_bytes_and_huge_lines_are_read(ask: Ask) -> None:
    answer = ask(
        r"""
        def raw(data):
            os.write(1, data)
            time.sleep(0.02)
        raw(b'{"type": "item.completed", "item": {"type": "agent_me')
        raw(b'ssage", "text": "in two \xff parts"}}' + bytes([10]))
        message("z" * 3_000_000)
        raw(b'{"broken": ' + bytes([10]) + b'\x00\xfe' + bytes([10]))
        tell(type="turn.completed")
        raw(b'{"type": "torn')
        """
    )
    assert (answer.ok, answer.summary.messages, len(answer.text)) == (True, 2, 3_000_000)
    assert next(e.text for e in read_log(answer.log) if isinstance(e, Message)) == "in two \ufffd parts"


def test_the_log_is_there_while_the_agent_works(ask: Ask, tmp_path: Path) -> None:
    log = tmp_path / "live.jsonl"

    def look(event: AgentEvent) -> None:
        assert "half way" in log.read_text()
        (tmp_path / "lab" / "seen").touch()

    body = """
    message("half way")
    while not os.path.exists("seen"):
        time.sleep(0.01)
    tell(type="turn.completed")
    """
    assert ask(body, log=log, on_event=look).ok


# -- environment and secrets


def test_an_agent_gets_little_of_the_environment_and_keys_only_by_name(ask: Ask) -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": "/h",
        "OPENAI_API_KEY": "key-number-one",
        "ANTHROPIC_API_KEY": "key-number-two",
        "PYTHONPATH": "/nowhere",
        "CODEX_HOME": "/c",
    }
    body = 'message(json.dumps(sorted(os.environ))); tell(type="turn.completed")'
    names = json.loads(ask(body, environ=environ, env=("OPENAI_API_KEY",)).text)
    assert {*names} - {"LC_CTYPE"} == {
        "PATH", "HOME", "OPENAI_API_KEY", "CODEX_HOME", "LOOPLAB_AGENT_LOG", "TMPDIR",
    }  # fmt: skip
    with pytest.raises(LabError, match="MISSING_KEY"):
        ask(body, environ=environ, env=("MISSING_KEY",))


def test_secrets_never_land(ask: Ask, tmp_path: Path) -> None:
    key = 'pa"ss-wörd-17'
    answer = ask(
        """
        key = os.environ["MY_LOGIN"]
        message("the key is " + key)
        print(key, file=sys.stderr)
        print("plain " + key)
        tell(type="turn.completed")
        """,
        prompt=f"use {key}",
        environ={"PATH": os.environ["PATH"], "MY_LOGIN": key},
        env=("MY_LOGIN",),
    )
    assert answer.text == "the key is ***"
    written = "".join(file.read_text() for file in answer.log.parent.iterdir())
    assert written.count("***") == 5  # prompt, message, plain line, stderr, final text
    for form in (key, json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]):
        assert form not in written


# -- what is refused before the start


def test_a_missing_program_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"npm install -g @openai/codex"):
        run_agent(AgentSpec("codex"), "x", cwd=tmp_path, log=tmp_path / "log", environ={"PATH": str(tmp_path)})
    with pytest.raises(LabError, match="full path"):
        run_agent(AgentSpec("command", command=("no-such",)), "x", cwd=tmp_path, log=tmp_path / "log")


@pytest.mark.parametrize(
    "settings",
    [
        {"sandbox": "danger-full-access"},
        {"permission_mode": "bypassPermissions"},
        {"extra_args": ("--dangerously-bypass-approvals-and-sandbox",)},
        {"extra_args": ("--yolo",)},
        {"extra_args": ("-c", 'sandbox_mode="danger-full-access"')},
    ],
)
def test_danger_must_be_meant(ask: Ask, settings: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="do anything"):
        ask("", **settings)


def test_danger_is_loud(ask: Ask) -> None:
    seen: list[AgentEvent] = []
    body = 'message(" ".join(sys.argv)); tell(type="turn.completed")'
    answer = ask(body, dangerous=True, on_event=seen.append)
    assert "--dangerously-bypass-approvals-and-sandbox" in answer.text
    assert isinstance(seen[0], Trouble)
    assert "DANGEROUS" in seen[0].text
    assert "DANGEROUS" in answer.log.read_text()


def test_a_prompt_longer_than_claude_reads_is_refused(ask: Ask) -> None:
    with pytest.raises(LabError, match="10 MB"):
        ask("", cli="claude", prompt="x" * 10_000_001)


def test_a_program_that_cannot_run_is_an_answer_that_says_so(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    answer = run_agent(AgentSpec("codex", binary=str(program)), "x", cwd=tmp_path, log=tmp_path / "log.jsonl")
    assert answer.why == "could not be started: No such file or directory"


def test_a_log_that_cannot_be_written_is_said_before_the_start(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="log cannot be written"):
        ask("", log=tmp_path / "file" / "log.jsonl")


# -- the rest


def test_an_old_last_message_does_not_pass_for_the_answer(ask: Ask, folder: Path) -> None:
    (folder / "last.txt").write_text("of yesterday")
    assert not ask("sys.exit(1)", extra_args=("-o", "last.txt")).ok
    assert not (folder / "last.txt").exists()


def test_the_schema_reaches_each_agent_in_its_way(ask: Ask) -> None:
    schema = {"type": "object"}
    body = 'message(open(sys.argv[sys.argv.index("--output-schema") + 1]).read()); tell(type="turn.completed")'
    assert json.loads(ask(body, schema=schema).text) == schema
    body = 'i = sys.argv.index("--json-schema"); tell(type="result", subtype="success", result=sys.argv[i + 1])'
    assert json.loads(ask(body, cli="claude", schema=schema).text) == schema
    body = "print(open(sys.argv[1]).read())"
    assert json.loads(ask(body, cli="command", command=("{schema_file}",), schema=schema).text) == schema


def test_any_command_is_an_agent(ask: Ask) -> None:
    answer = ask('print("you said"); print(sys.stdin.read())', cli="command", prompt="hello")
    assert (answer.ok, answer.text) == (True, "you said\nhello")
    assert final_message(read_log(answer.log)) == "you said\nhello"
    assert answer.session is None
    body = "print(open(sys.argv[1][2:]).read(), repr(sys.stdin.read()))"
    assert ask(body, cli="command", command=("@={prompt_file}",), prompt="from a file").text == "from a file ''"
    answer = ask('print("half"); sys.exit("it broke")', cli="command")
    assert (answer.ok, answer.text, answer.why) == (False, "half", "failed (exit code 1): it broke")


def test_a_new_log_never_takes_an_old_name(tmp_path: Path) -> None:
    logs = {new_log(tmp_path / "agent_runs", "v3") for _ in range(3)}
    assert len(logs) == 3
    assert all(log.name.endswith(".jsonl") and "-v3" in log.name for log in logs)


def test_calls_in_threads_do_not_mix(tmp_path: Path, folder: Path) -> None:
    answers: dict[int, str] = {}

    def call(n: int) -> None:
        spec = AgentSpec("command", command=(sys.executable, "-c", "import sys; print(sys.stdin.read())"))
        answers[n] = run_agent(spec, f"prompt {n}", cwd=folder, log=tmp_path / f"{n}.jsonl").text

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"prompt {n}" for n in range(4)}


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path: Path) -> Iterator[None]:
    """No test leaves a process of its agent; a supervisor whose looplab was killed needs a moment to end."""
    yield
    until(lambda: not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if carries(pid, tmp_path)])


def carries(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return f"LOOPLAB_AGENT_LOG={folder}/".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


MEASURED = """
import resource, sys
from pathlib import Path
from looplab.agents.base import AgentSpec, Limits
from looplab.agents.run import run_agent
def ask(body, log):
    spec = AgentSpec("command", command=(sys.executable, "-S", "-c", body))
    return run_agent(spec, "", cwd=Path(sys.argv[1]), log=Path(sys.argv[1], log), limits=Limits(wall_s=600))
ask("print(1)", "small.jsonl")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answer = ask(sys.argv[2], "large.jsonl")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(answer.ok, answer.text.splitlines()[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "sys.stdout.write('x' * 200_000_000 + '\\n')",
        "[sys.stdout.write('progress \\n' * 100_000) for _ in range(220)]",
        "[sys.stdout.write(('{' + 'y' * 8_000 + '\\n') * 100) for _ in range(250)]",
        "[sys.stderr.write('x' * 1_000_000) for _ in range(200)]",
        "[sys.stderr.write('warning: something\\n' * 50_000) for _ in range(210)]",
    ],
    ids=["a line", "short lines", "long lines", "an error line", "errors"],
)
def test_an_agent_that_prints_200_mb_costs_little_memory_and_its_last_line_is_found(tmp_path: Path, body: str) -> None:
    agent = f"import sys\n{body}\nprint('the answer')"
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), agent], capture_output=True, text=True, check=True
    )
    kilobytes, answer = done.stdout.splitlines()
    assert answer == "True the answer"
    assert int(kilobytes) < 50_000
    written = sum(path.stat().st_size for path in tmp_path.glob("large.*"))
    assert written < (18 << 20)
