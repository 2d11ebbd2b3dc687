"""Seeds that reach the trainer, and what is said and decided when none does."""

from __future__ import annotations

import json
from typing import Any

import pytest

SEEDED = """\
import json, os, random, sys
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
luck = random.Random(f"{SEED} {config['x']}")
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "score": config["x"] + luck.gauss(0, 0.05), "seconds": os.getpid()}), file=file)
"""


@pytest.fixture
def unseeded(lab: Any) -> Any:
    """A trainer whose seed is fixed inside the script; the score is drawn at random for each config."""
    lab.write("train.py", SEEDED.replace("{SEED}", "1337").replace("config['x'] +", "0 * config['x'] +"))
    lab.write("configs/base.json", '{"x": 0.5, "y": 1}')
    lab.configure(
        objective={"metric": "score", "goal": "max"},
        knobs={"x": {"type": "float", "low": 0, "high": 1}, "y": {"type": "int", "low": 0}},
        judge={"baseline_seeds": 3, "replicates": 3, "max_replicates": 5},
        round_size=6,
        budget={"rounds": 1},
    )
    return lab


def test_a_seed_that_reaches_nobody_promotes_nobody_and_is_an_alarm(unseeded: Any) -> None:
    unseeded.queue("x@set=0.1", "x@set=0.2", "x@set=0.3", "x@set=0.4", "x@set=0.6", "x@set=0.7")
    done = unseeded("run")
    assert unseeded.count(verdict="keep") == 1  # the base
    assert "equal to the last digit" in done.out
    assert "no seed reaches the trainer" in done.out
    assert "seed 2" not in done.out
    assert "p 0" not in unseeded("status").out
    assert "ALARM" in unseeded("status").out
    assert unseeded("verify").code == 0


@pytest.mark.parametrize("where", ["command", "env", "config", "nowhere"])
def test_check_says_whether_a_seed_reaches_the_trainer(unseeded: Any, where: str) -> None:
    command = ["{python}", "-S", "train.py", *(["--seed={seed}"] if where == "command" else [])]
    unseeded.configure(launch={"command": command, "env": {"SEED": "{seed}"} if where == "env" else {}})
    if where == "config":
        unseeded.write("configs/base.json", '{"x": 0.5, "y": 1, "train": {"seed": 7}}')
    said = {
        "command": "{seed} in launch.command",
        "env": "{seed} in launch.env.SEED",
        "config": "train.seed in the config",
        "nowhere": "does not reach the trainer",
    }[where]
    assert said in unseeded("check").out
    assert (unseeded("check", "--json").json()["studies"][0]["seed"] is None) == (where == "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["command", "env"])
def test_seeds_reach_a_trainer_whose_config_has_none(unseeded: Any, where: str) -> None:
    read = "sys.argv[1]" if where == "command" else "os.environ['SEED']"
    unseeded.write("train.py", SEEDED.replace("{SEED}", "{" + read + "}"))
    command = ["{python}", "-S", "train.py", *(["{seed}"] if where == "command" else [])]
    unseeded.configure(launch={"command": command, "env": {"SEED": "{seed}"} if where == "env" else {}})
    unseeded.queue("x@set=0.9")
    done = unseeded("run")
    assert unseeded.count(verdict="keep") == 2, done.out
    seeds = dict(unseeded.ask("SELECT seed, count(*) FROM runs WHERE role IN ('base', 'replicate') GROUP BY seed"))
    assert {1, 2, 3} <= set(seeds)
    best = unseeded("show", "BEST", "--json").json()
    assert best["verdict"]["p"] > 0
    again = unseeded("reproduce", "BEST")  # with the seed it had
    assert again.code == 0, again.out


def test_a_seed_that_is_left_out_of_the_flags_does_not_count_as_one(unseeded: Any) -> None:
    unseeded.write("configs/base.json", '{"x": 0.5, "y": 1, "seed": 3}')
    unseeded.configure(launch={"command": ["{python}", "-S", "train.py"], "config": {"as": "flags", "skip": ["seed"]}})
    assert "does not reach the trainer" in unseeded("check").out
    unseeded.configure(launch={"command": ["{python}", "-S", "train.py", "--seed", "{seed}", "{flags}"],
                               "config": {"as": "flags", "skip": ["seed"]}})  # fmt: skip
    assert "seed in the config" in unseeded("check").out


def test_a_deterministic_study_promotes_what_is_better_and_repeats_it_once(unseeded: Any) -> None:
    unseeded.write("train.py", SEEDED.replace("{SEED}", "0"))
    unseeded.configure(deterministic=True)
    unseeded.queue("x@set=0.9", "x@set=0.1")
    done = unseeded("run")
    assert unseeded.count(verdict="keep") == 2, done.out
    assert unseeded.count(role="replicate") == 2  # the base and the winner, once each
    assert "exactly the same when repeated" in done.out
    assert "ALARM" not in done.out


def test_a_config_whose_change_changes_nothing_is_an_alarm(unseeded: Any) -> None:
    unseeded.configure(judge=None)
    unseeded.queue("y@set=2", "x@set=0.9")
    done = unseeded("run", "--concurrency", "1")
    alarms = [line for line in done.out.splitlines() if "changes nothing" in line]
    assert len(alarms) == 2, done.out  # when it happens and at the end
    assert "0002" in alarms[0]
    assert "0001" in alarms[0]
    assert "y" in alarms[0]
    assert "exactly the same as 0001" in unseeded("show", "2").out
    assert "changes nothing" in unseeded("status").out
    for report in ("report.md", "report.html"):
        assert "changes nothing" in (unseeded.outputs() / report).read_text()
    assert "changes nothing" in (unseeded.outputs() / "labbook.md").read_text()
    events = unseeded.ask("SELECT run, data FROM events WHERE kind='alarm'")
    assert [(run[:4], json.loads(data)["same_as"][:4]) for run, data in events] == [("0002", "0001")]
