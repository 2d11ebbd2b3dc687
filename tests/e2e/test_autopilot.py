"""The autopilot with an agent that is a small program: what it proposes is checked, run, measured; people can steer."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from tests.e2e.conftest import until

AGENT = '''\
"""Answers by a script: the n-th call does what the n-th entry says."""
import json, os, sys, time
prompt = sys.stdin.read()
lab = os.environ.get("LAB_OF_AGENT") or os.path.dirname(os.getcwd())
calls = os.path.join(lab, "calls")
n = len(os.listdir(calls))
with open(os.path.join(calls, f"{n:03d}.txt"), "w") as file:
    file.write(prompt)
steps = json.load(open(os.path.join(lab, "script.json")))
step = steps[min(n, len(steps) - 1)]
if step.get("hang"):
    time.sleep(600)
if "file" in step:
    with open("next_config.json", "w") as file:
        json.dump(step["file"], file)
print(step.get("text", "done"))
sys.exit(step.get("exit", 0))
'''


@pytest.fixture
def piloted(lab: Any) -> Any:
    lab.write("agent.py", AGENT)
    lab.write("calls/.keep", "")
    (lab.folder / "calls/.keep").unlink()
    agent = {"cli": "command", "command": [sys.executable, "-S", str(lab.folder / "agent.py")], "wall": 600, "tries": 3}
    agent["writable"] = ["calls"]
    lab.configure(proposers=[{"agent": agent}], constraints=["train.batch % 2 == 0"])
    return lab


def script(lab: Any, *steps: dict[str, Any]) -> None:
    lab.write("script.json", json.dumps(steps))


def calls(lab: Any) -> list[str]:
    return [path.read_text() for path in sorted((lab.folder / "calls").iterdir())]


def proposal(*edits: str, **more: str) -> dict[str, Any]:
    return {
        "proposals": [{"edits": list(edits), "reason": "as I said", "hypothesis": "it falls", "parent": "", **more}]
    }


def test_what_the_agent_proposes_is_run_measured_and_written_down(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")}, {"text": json.dumps(proposal("train.lr@set=0.3"))})
    piloted("autopilot", "--runs", "2")
    configs = piloted.all("config.json")
    assert [config["train"]["lr"] for config in configs] == [0.1, 0.2, 0.3]
    about = piloted.all("run.json")[2]
    assert about["proposer"] == "agent"
    assert about["reason"] == "as I said"
    assert about["hypothesis"] == "it falls"
    assert about["parent"] == piloted.runs()[1].name
    assert (piloted.folder / "runs" / piloted.runs()[1].name / "record/run.json").exists()
    assert "as I said" in (piloted.outputs() / "labbook.md").read_text()
    first, second = calls(piloted)
    assert "train.lr: float, 0.001 … 1, log" in first
    assert "train.batch % 2 == 0" in first
    assert piloted.runs()[1].name in second
    assert piloted("verify").code == 0


def test_a_key_that_is_left_out_keeps_the_value_of_the_parent(piloted: Any) -> None:
    """The original merged onto the baseline, and a reward of 474 fell to 0.66."""
    script(
        piloted,
        {"file": {"train": {"lr": 0.3, "batch": 64}}},
        {"file": {"train": {"batch": 128}}},
    )
    piloted("autopilot", "--runs", "2")
    assert piloted.all("config.json")[2]["train"] == {"lr": 0.3, "batch": 128}


def test_a_refused_proposal_goes_back_with_the_reasons_and_is_repaired(piloted: Any) -> None:
    script(
        piloted,
        {"file": proposal("train.batch@set=33")},
        {"file": proposal("train.secret@set=1")},
        {"file": proposal("train.batch@set=34")},
    )
    piloted("autopilot", "--runs", "1")
    assert [config["train"]["batch"] for config in piloted.all("config.json")] == [32, 34]
    _, second, third = calls(piloted)
    assert "train.batch % 2 == 0" in second.split("could not be used")[1]
    assert "train.secret" in third.split("could not be used")[1]
    assert piloted.ask("SELECT count(*) FROM proposals WHERE status='rejected' AND proposer='agent'")[0][0] == 2


def test_after_too_many_bad_answers_others_propose(piloted: Any) -> None:
    script(piloted, {"text": "I would rather not."})
    piloted.write(
        "rules.yaml", 'rules: [{name: more, when: "objective > 0", edits: ["train.lr@mul=2"], reason: try}]\n'
    )
    piloted.configure(proposers=[*piloted.study["proposers"], {"rules": "rules.yaml"}], mix="order")
    done = piloted("autopilot", "--runs", "1")
    assert len(calls(piloted)) == 3
    assert piloted.all("run.json")[1]["proposer"] == "rules"
    assert "no legal proposal after 3 tries" in done.out


def test_a_hanging_agent_is_ended_at_its_limit(piloted: Any) -> None:
    script(piloted, {"hang": True})
    agent = {**piloted.study["proposers"][0]["agent"], "wall": "1s", "tries": 1, "call_retries": 0}
    piloted.configure(proposers=[{"agent": agent}])
    done = piloted("autopilot", "--runs", "1")
    assert "wall limit" in done.out
    assert [about["proposer"] for about in piloted.all("run.json")] == ["base", "search"]


def test_stale_content_of_the_file_never_counts_as_the_answer(piloted: Any) -> None:
    piloted.configure(proposers=[{"agent": {**piloted.study["proposers"][0]["agent"], "tries": 1}}])
    script(piloted, {"file": proposal("train.lr@set=0.2")}, {"text": "nothing comes to my mind"})
    piloted("autopilot", "--runs", "2")
    assert [config["train"]["lr"] for config in piloted.all("config.json")][:2] == [0.1, 0.2]
    assert [about["proposer"] for about in piloted.all("run.json")] == ["base", "agent", "search"]


def test_a_person_may_fill_the_file_instead(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")})
    piloted("autopilot", "--runs", "1")
    piloted.write("proposals/next_config.json", '{"train": {"batch": 8}}')
    piloted("autopilot", "--runs", "1")
    about = piloted.all("run.json")[2]
    assert about["proposer"] == "queue"
    assert piloted.all("config.json")[2]["train"] == {"lr": 0.2, "batch": 8}
    assert json.loads((piloted.folder / "proposals/next_config.json").read_text()) == {}
    assert len(calls(piloted)) == 1


def test_without_an_agent_a_person_fills_the_file(lab: Any) -> None:
    lab.write("proposals/next_config.json", '{"train": {"lr": 0.25}}')
    lab("autopilot", "--runs", "2")
    assert [config["train"]["lr"] for config in lab.all("config.json")] == [0.1, 0.25]


def test_what_people_say_reaches_the_agent(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")})
    piloted("say", "try lower rates")
    piloted("autopilot", "--runs", "1")
    assert "try lower rates" in calls(piloted)[0]


def test_a_budget_of_tokens_ends_the_asking(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")})
    piloted.configure(budget={"usd": 1})
    assert "dollars" in piloted("autopilot", "--runs", "1", code=2).err  # a command cannot tell what it costs


def test_killed_between_answer_and_launch_the_agent_is_not_asked_again(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")}, {"file": proposal("train.lr@set=0.9")})
    engine = piloted.start("autopilot", "--runs", "1")

    def answered() -> bool:
        logs = list((piloted.folder / "agent_runs").glob("*.jsonl")) if (piloted.folder / "agent_runs").exists() else []
        return any("looplab.end" in log.read_text() for log in logs)

    until(answered, "the answer")
    os.kill(engine.pid, 9)
    engine.process.wait()
    piloted("resume")
    assert len(calls(piloted)) == 1
    assert [config["train"]["lr"] for config in piloted.all("config.json")] == [0.1, 0.2]
    assert piloted("verify").code == 0


def test_killed_while_the_agent_thinks_the_agent_ends_too_and_is_asked_again(piloted: Any) -> None:
    script(piloted, {"hang": True}, {"file": proposal("train.lr@set=0.2")})
    engine = piloted.start("autopilot", "--runs", "1")
    until(lambda: len(calls(piloted)) == 1, "the agent")
    os.kill(engine.pid, 9)
    engine.process.wait()
    piloted("resume")
    assert len(calls(piloted)) == 2
    assert piloted.all("config.json")[1]["train"]["lr"] == 0.2


def test_paused_it_starts_nothing_until_it_may_go_on(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")})
    piloted.base(wait="gate")
    engine = piloted.start("autopilot", "--runs", "1")
    piloted.until_at_work()
    piloted("pause")
    piloted.open_gate()
    piloted.until_ended(1)
    until(lambda: "paused" in engine.out, "the pause")
    assert not calls(piloted)
    piloted("resume")
    engine.ended()
    assert len(piloted.runs()) == 2


def test_a_veto_ends_a_run_and_takes_the_best_back(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.3")})
    piloted("autopilot", "--runs", "1")
    assert (piloted.outputs() / "BEST").read_text().strip() == piloted.runs()[1].name
    piloted("veto", "BEST", "--why", "a leak")
    assert (piloted.outputs() / "BEST").read_text().strip() == piloted.runs()[0].name
    assert piloted.runs()[0].name in piloted("show", "BEST").out
    assert piloted("verify").code == 0


def test_the_log_of_an_agent_can_be_read(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2"), "text": "I wrote it down"})
    piloted("autopilot", "--runs", "1")
    assert piloted("agent-log", "--only", "final").out.strip() == "I wrote it down"
    assert "I wrote it down" in piloted("agent-log").out
