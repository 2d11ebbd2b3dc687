"""Best by one metric, then by another one: what decides between runs whose objectives are exactly equal."""

from __future__ import annotations

import json
from typing import Any

import pytest

TRAIN = """\
import json, os
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    row = {"step": 1, "success_rate": config["success"]}
    if config["reward"] > -100:
        row["mean_reward"] = config["reward"]
    print(json.dumps(row), file=file)
"""
OBJECTIVE = {"metric": "success_rate", "goal": "max", "then": {"metric": "mean_reward", "goal": "max"}}


@pytest.fixture
def ties(lab: Any) -> Any:
    lab.write("train.py", TRAIN)
    lab.write("configs/base.json", json.dumps({"success": 0.5, "reward": 1.0}))
    lab.configure(
        objective=OBJECTIVE,
        knobs={"success": {"type": "float", "low": 0, "high": 1}, "reward": {"type": "float"}},
        round_size=1,
        slots={"count": 1},
        modes={},
    )
    return lab


def point(success: float, reward: float) -> list[str]:
    return [f"success@set={success}", f"reward@set={reward}"]


def best(lab: Any) -> Any:
    return lab.read(lab.outputs() / (lab.outputs() / "BEST").read_text().strip(), "config.json")


@pytest.mark.slow
def test_the_best_run_is_the_best_by_success_then_by_reward(ties: Any) -> None:
    ties.queue(point(1.0, 2.0), point(1.0, 3.0), point(1.0, -101.0), point(1.0, 2.5), point(0.9, 9.0))
    ties("run")
    assert best(ties) == {"success": 1.0, "reward": 3.0}
    told = ties.read(ties.runs()[2], "summary.json")["objective"]["then"]
    assert told == {"metric": "mean_reward", "goal": "max", "at": "last", "value": 3.0}
    assert "ties by mean_reward = 3" in ties("status").out
    (status,) = json.loads(ties("status", "--json").out)["studies"]
    assert status["tie_break"] == {"metric": "mean_reward", "goal": "max", "at": "last", "best": 3.0}
    ties("report")
    assert "exact ties by `mean_reward`, last value, larger is better" in (ties.outputs() / "report.md").read_text()
    assert json.loads((ties.outputs() / "summary.json").read_text())["objective"]["then"]["metric"] == "mean_reward"


@pytest.mark.slow
def test_another_engine_and_another_reading_come_to_the_same(ties: Any) -> None:
    ties.queue(point(1.0, 3.0))
    ties("run")
    ties.queue(point(1.0, 2.0))
    ties("run")
    assert best(ties)["reward"] == 3.0
    ties.configure(objective={**OBJECTIVE, "then": {"metric": "mean_reward", "goal": "min"}})
    ties("remeasure")
    assert best(ties)["reward"] == 2.0


def test_a_ratchet_breaks_ties_in_the_same_way(ties: Any) -> None:
    ties.configure(judge="ratchet")
    ties.queue(point(0.5, 2.0), point(0.5, 1.5))
    ties("run")
    assert best(ties) == {"success": 0.5, "reward": 2.0}


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ({"metric": "success_rate", "goal": "max"}, "a different metric"),
        ({"metric": "mean_reward"}, "'objective.then.goal' is missing"),
    ],
)
def test_a_tie_break_that_makes_no_sense_is_refused(ties: Any, then: dict[str, str], said: str) -> None:
    ties.configure(objective={**OBJECTIVE, "then": then})
    assert said in ties("check", code=2).err
