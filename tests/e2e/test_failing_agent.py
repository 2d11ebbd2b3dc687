"""An autopilot whose agent fails, is refused or misbehaves: the night goes on, and everybody can see what happened."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import pytest
from tests.e2e.conftest import until
from tests.e2e.test_autopilot import AGENT, calls, proposal, script


@pytest.fixture
def piloted(lab: Any) -> Any:
    lab.write("agent.py", AGENT)
    (lab.folder / "calls").mkdir()
    command = [sys.executable, "-S", str(lab.folder / "agent.py")]
    settings = {"cli": "command", "command": command, "wall": 600, "tries": 2, "call_retries": 1, "backoff": 0.01,
                "writable": ["calls"]}  # fmt: skip
    lab.configure(proposers=[{"agent": settings}])
    return lab


def change(lab: Any, **settings: Any) -> None:
    lab.configure(proposers=[{"agent": {**lab.study["proposers"][0]["agent"], **settings}}])


def proposers(lab: Any) -> list[str]:
    return [about["proposer"] for about in lab.all("run.json")]


FAILED = {"exit": 1, "text": "network error"}


@pytest.mark.slow
def test_a_failed_call_is_repeated_and_everybody_can_see_it(piloted: Any) -> None:
    script(piloted, FAILED, {"file": proposal("train.lr@set=0.2")}, {"file": proposal("train.lr@set=0.4")})
    done = piloted("autopilot", "--runs", "2")
    assert proposers(piloted) == ["base", "agent", "agent"]
    assert len(calls(piloted)) == 3
    assert "the call failed: failed (exit code 1)" in done.out
    assert "the call failed: failed (exit code 1)" in (piloted.outputs() / "labbook.md").read_text()
    assert "1 of 3 agent calls failed" in piloted("status").out
    told = piloted("status", "--json").json()["studies"][0]["agent_calls"]
    assert told["calls"] == 3
    assert [one["failed"] for one in told["unusable"]] == [True]
    assert "## Agent calls without a usable answer" in (piloted.outputs() / "report.md").read_text()
    assert "1 of 3 agent calls failed" in (piloted.outputs() / "report.html").read_text()
    assert piloted("verify").code == 0


@pytest.mark.slow
def test_with_a_dead_agent_a_search_stands_in_until_all_proposals_are_decided(piloted: Any) -> None:
    script(piloted, FAILED)
    change(piloted, backoff="1h", call_retries=0)
    piloted("autopilot", "--runs", "3")
    assert proposers(piloted) == ["base", "search", "search", "search"]
    assert len(calls(piloted)) == 1, "a dead service is not asked again and again"
    assert "in place of the agent" in piloted.all("run.json")[1]["reason"]


@pytest.mark.parametrize("trouble", [{"env": ["NO_SUCH_KEY"]}, {"command": ["no-such-program"]}])
def test_what_keeps_the_agent_from_starting_does_not_end_the_night(piloted: Any, trouble: dict[str, Any]) -> None:
    script(piloted, FAILED)
    change(piloted, call_retries=0, **trouble)
    done = piloted("autopilot", "--runs", "2")
    assert proposers(piloted) == ["base", "search", "search"]
    assert ("NO_SUCH_KEY, which is not set" if "env" in trouble else "'no-such-program' was not found") in done.out


@pytest.mark.slow
@pytest.mark.parametrize("where", ["command line", "lab file"])
def test_told_to_stop_it_ends_with_an_error_that_is_told_everywhere(piloted: Any, where: str) -> None:
    script(piloted, FAILED)
    if where == "lab file":
        change(piloted, stop_on_failure=True)
    option = ["--stop-on-failure"] if where == "command line" else []
    done = piloted("autopilot", "--runs", "3", *option, code=1)
    why = "2 calls in a row failed: failed (exit code 1)"
    assert proposers(piloted) == ["base"]
    assert why in done.out
    assert why in piloted("status").out
    for name in ("labbook.md", "report.md", "report.html"):
        assert why in (piloted.outputs() / name).read_text(), name
    script(piloted, {"file": proposal("train.lr@set=0.2")}, {"file": proposal("train.lr@set=0.4")}, FAILED)
    shutil.rmtree(piloted.folder / "calls")
    (piloted.folder / "calls").mkdir()
    piloted("resume", code=1)
    assert proposers(piloted) == ["base", "agent", "agent"]


@pytest.mark.slow
def test_where_nothing_can_stand_in_it_waits_and_people_can_still_steer(piloted: Any) -> None:
    script(piloted, FAILED)
    change(piloted, backoff="1h", call_retries=0)
    piloted.configure(knobs={"wait": {"type": "str"}})
    engine = piloted.start("autopilot", "--runs", "2")
    until(lambda: "nothing else to try: the agent is called again" in engine.out, "the wait")
    piloted("propose", "--change", "wait@set=", "--change", "wait@set=nothing", "--reason", "meanwhile")
    piloted.open_gate("nothing")
    piloted.until_ended(2)
    assert proposers(piloted) == ["base", "person"]
    piloted("stop")
    engine.ended(130)


def test_the_wait_before_a_call_is_repeated_can_be_interrupted(piloted: Any) -> None:
    script(piloted, FAILED)
    change(piloted, backoff="1h")
    engine = piloted.start("autopilot", "--runs", "2")
    until(lambda: "called again in 600 s" in engine.out, "the wait")
    piloted("stop")
    engine.ended(130)
    assert len(calls(piloted)) == 1


def test_beside_rules_that_do_not_fire_a_failing_agent_is_waited_for(piloted: Any) -> None:
    script(piloted, FAILED, FAILED, {"file": proposal("train.lr@set=0.2")})
    change(piloted, call_retries=0)
    piloted.write(
        "rules.yaml", 'rules: [{name: never, when: "objective < 0", edits: ["train.lr@mul=2"], reason: no}]\n'
    )
    piloted.configure(proposers=[*piloted.study["proposers"], {"rules": "rules.yaml"}])
    piloted("autopilot", "--runs", "1")
    assert proposers(piloted) == ["base", "agent"]
    assert len(calls(piloted)) == 3


def test_a_repeat_and_another_seed_are_told_apart_and_repaired(piloted: Any) -> None:
    change(piloted, tries=5)
    piloted.configure(knobs={**piloted.study["knobs"], "seed": {"type": "int"}})
    piloted.base(seed=1)
    script(
        piloted,
        {"file": proposal("train.lr@set=0.2")},
        {"file": proposal("seed@set=7")},
        {"file": proposal("train.lr@set=0.2", "seed@set=1", parent="base")},
        {"file": proposal("train.batch@set=32")},
        {"file": proposal("train.lr@set=0.4")},
    )
    piloted("autopilot", "--runs", "2")
    assert [config["train"]["lr"] for config in piloted.all("config.json")] == [0.1, 0.2, 0.4]
    told = [text.rpartition("could not be used")[2] for text in calls(piloted)[2:]]
    first = piloted.runs()[1].name
    assert f"only the seed differs from run {first}" in told[0]
    assert f"an exact repeat of run {first}" in told[1]
    assert "it changes nothing" in told[2]


def test_a_bad_warm_start_goes_back_to_the_agent(piloted: Any) -> None:
    piloted.base(mode="fresh", source="latest")
    piloted.configure(
        knobs={**piloted.study["knobs"], "mode": {"choices": ["fresh", "continue"]}, "source": {"type": "str"}},
        warm_start={"mode": "mode", "from": "source", "checkpoint": ["model.pt"], "arguments": []},
    )
    script(
        piloted,
        {"file": proposal("mode@set=continue", "source@set=0001")},
        {"file": {"train": {"lr": 0.2}, "mode": "fresh", "source": None}},
    )
    piloted("autopilot", "--runs", "1")
    assert "left no model.pt" in calls(piloted)[1].rpartition("could not be used")[2]
    assert piloted.all("config.json")[1]["source"] == "latest"


def test_when_its_tries_are_used_up_the_reasons_are_in_its_next_question(piloted: Any) -> None:
    script(piloted, *[{"file": proposal("train.lr@set=7")}] * 2, {"file": proposal("train.lr@set=0.2")})
    piloted("autopilot", "--runs", "2")
    assert proposers(piloted) == ["base", "search", "agent"]
    third = calls(piloted)[2]
    assert third.partition("Why your earlier answers were rejected")[2].count("train.lr: 7 is above 1") >= 2


def test_what_the_judge_said_of_its_last_proposal_is_in_its_next_question(piloted: Any) -> None:
    piloted.write("next.md", "Improve it.\n{answer}\n")
    change(piloted, prompt="next.md")
    piloted.configure(judge={"baseline_seeds": 3, "replicates": 2})
    script(piloted, {"file": proposal("train.lr@set=0.9")}, {"file": proposal("train.lr@set=0.4")})
    piloted("say", "lower rates, please")
    piloted("autopilot", "--runs", "2")
    first, second = calls(piloted)
    assert "lower rates, please" in first
    run = piloted.ask("SELECT id FROM runs WHERE role='trial' ORDER BY n")[0][0]
    why = json.loads(piloted.ask("SELECT evidence FROM verdicts WHERE run=?", run)[0][0])["why"]
    told = second.partition("Outcome of your latest proposals")[2]
    assert f"run {run} (train.lr@set=0.9)" in told
    assert f"verdict discard: {why}" in told


def test_killed_while_it_waits_for_the_agent_it_continues_the_count(piloted: Any) -> None:
    script(piloted, FAILED, FAILED, {"file": proposal("train.lr@set=0.2")})
    change(piloted, backoff="1h", call_retries=1)
    engine = piloted.start("autopilot", "--runs", "1")
    until(lambda: "the call failed" in engine.out, "the first failure")
    os.kill(engine.pid, 9)
    engine.process.wait()
    change(piloted, backoff="1ms")
    piloted("resume")
    assert len(calls(piloted)) == 2
    assert proposers(piloted) == ["base", "search"]
    book = (piloted.outputs() / "labbook.md").read_text()
    assert book.count("the call failed: failed (exit code 1)") == 2
    assert piloted("verify").code == 0


def test_an_agent_that_removes_the_ledger_does_not_end_in_success(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")})
    text = AGENT.replace("prompt = sys", "import shutil; shutil.rmtree(os.path.join(os.path.dirname(os.getcwd()), "
                         "'.looplab'))\nprompt = sys")  # fmt: skip
    piloted.write("agent.py", text)
    change(piloted, dangerous=True)
    done = piloted("autopilot", "--runs", "1", code=None)
    assert done.code not in (0, None)


def test_a_budget_of_time_that_is_used_while_the_agent_thinks_ends_the_study(piloted: Any) -> None:
    script(piloted, {"hang": True})
    piloted.configure(budget={"wall": "3s"})
    done = piloted("autopilot", "--runs", "3")
    assert "wall-clock budget" in done.out
    assert proposers(piloted) == ["base"]


def test_the_newest_of_two_calls_in_one_second_is_shown(piloted: Any) -> None:
    script(piloted, {"file": proposal("train.lr@set=0.2")})
    piloted("autopilot", "--runs", "1")
    (log,) = (piloted.folder / "agent_runs").glob("*.jsonl")
    for number in (2, 10):
        text = log.read_text().replace('"done"', f'"call {number}"')
        log.with_name(f"{log.stem}-{number}.jsonl").write_text(text)
    log.touch()
    assert piloted("agent-log", "--only", "final").out.strip() == "call 10"
