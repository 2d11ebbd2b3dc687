"""An agent and the search in one study: regions that the search fills, and the agent's share of the proposals."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.e2e.test_autopilot import AGENT, calls, proposal, script

TURN = 10
SHARE = 3


@pytest.fixture
def shared(lab: Any) -> Any:
    """A lab with the scripted agent and a search beside it."""
    lab.write("agent.py", AGENT)
    (lab.folder / "calls").mkdir()
    command = [sys.executable, "-S", str(lab.folder / "agent.py")]
    agent = {"cli": "command", "command": command, "wall": 600, "tries": 3, "writable": ["calls"]}
    lab.configure(proposers=[{"search": {"sampler": "auto", "startup": 4, "repeat_share": 0}}, {"agent": agent}])
    return lab


def region(*ranges: str, edits: tuple[str, ...] = (), **more: str) -> dict[str, Any]:
    answer = proposal(*edits, **more)
    answer["proposals"][0]["region"] = list(ranges)
    return answer


def by_agent(lab: Any) -> list[Any]:
    return [
        config
        for about, config in zip(lab.all("run.json"), lab.all("config.json"), strict=True)
        if about["proposer"] == "agent"
    ]


@pytest.mark.slow
def test_a_region_of_the_agent_is_filled_by_the_search_and_run(shared: Any) -> None:
    agent = shared.study["proposers"][1]
    shared.configure(proposers=[agent], round_size=1)
    script(
        shared,
        {"file": region("train.lr=[0.2, 0.4]", "train.batch=[10, 20]")},
        {"file": region("train.lr=[0.5, 0.6]", edits=("train.batch@set=7",))},
        {"file": region("train.lr=[3, 4]")},  # outside of the knob
        {"file": region("train.width=[1, 2]")},  # not a knob
        {"file": region("train.lr=[0.01, 0.02]")},
    )
    shared("autopilot", "--runs", "3")
    first, second, third = by_agent(shared)
    assert 0.2 <= first["train"]["lr"] <= 0.4
    assert 10 <= first["train"]["batch"] <= 20
    assert 0.5 <= second["train"]["lr"] <= 0.6
    assert second["train"]["batch"] == 7
    assert 0.01 <= third["train"]["lr"] <= 0.02
    reasons = [about["reason"] for about in shared.all("run.json") if about["proposer"] == "agent"]
    assert all(reason.startswith("as I said (chosen in its region by ") for reason in reasons)
    prompts = calls(shared)
    assert len(prompts) == 5
    assert "region: train.lr takes" in prompts[3]
    assert "region: train.width is not searched; searched are" in prompts[4]
    assert shared("verify").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("good", [False, True])
def test_in_a_live_mix_the_agent_has_its_share_and_no_more_until_it_has_earned_it(shared: Any, good: bool) -> None:
    shared.configure(mix="bandit", round_size=1, slots={"count": 1, "gpus": "none"}, budget={"runs": 31})
    if good:  # closer to the optimum each time, with a search that draws from the wrong end
        answers = [proposal(f"train.lr@set={0.3 - 0.05 * 0.7**i:.6f}") for i in range(31)]
        knobs = {**shared.study["knobs"], "train.lr": {"type": "float", "low": 0.001, "high": 1, "log": True}}
        search = {"search": {"sampler": "random", "repeat_share": 0}}
        shared.configure(knobs=knobs, proposers=[search, shared.study["proposers"][1]])
    else:
        answers = [proposal(f"train.lr@set={0.9 + 0.003 * i:.4f}") for i in range(31)]
    script(shared, *({"file": answer} for answer in answers))
    shared("run")
    made = [name for (name,) in shared.ask("SELECT proposer FROM proposals ORDER BY id")]
    windows = [made[i : i + TURN].count("agent") for i in range(len(made) - TURN + 1)]
    assert len(by_agent(shared)) == made.count("agent") == len(calls(shared))
    assert min(windows) >= 1
    if not good:  # the last question carries what the model of the search believes
        *_, prompt = calls(shared)
        assert "Beliefs of a Gaussian process over all runs" in prompt
        for words in ("best: run ", "what matters (share of the predicted variance): train.lr ", "least known: "):
            assert words in prompt
    if good:
        assert max(windows[:5]) <= SHARE  # nothing is decided yet
        assert max(windows) > SHARE
    else:
        assert max(windows) <= SHARE
    assert shared("verify").code == 0
