"""`looplab plan`: what would be run, without a trace."""

from __future__ import annotations

import json
import shlex
import shutil
from typing import Any

import pytest

RULES = """
rules:
  - {name: raise lr, when: "loss.last > 0", edits: ["train.lr@mul=2"], reason: the loss is high}
"""


def test_plan_of_a_new_lab_writes_nothing(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    before = lab.tree()
    out = lab("plan").out
    assert "configs/base.json" in out
    assert "train.lr 0.1 → 0.2" in out
    assert "nothing was written or started" in out
    assert lab.tree() == before


@pytest.mark.slow
def test_plan_of_a_lab_that_has_run_writes_nothing(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--rounds", "1")
    before = lab.tree()
    lab("plan")
    lab("plan", "--json")
    assert lab.tree() == before


@pytest.mark.slow
def test_plan_writes_nothing_while_an_engine_is_at_work(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    runs = [path.name for path in lab.runs()]
    assert runs[0] in lab("plan").out
    assert [path.name for path in lab.runs()] == runs
    lab.open_gate()
    engine.ended()
    assert lab.ask("SELECT count(*) FROM runs") == [(1,)]


@pytest.mark.slow
def test_plan_shows_what_would_be_rejected_and_why(lab) -> None:
    lab.queue("train.lr@set=7", "nothing.here@mul=2")
    lab.configure(slots={"count": 3, "gpus": "none"})
    out = lab("plan").out
    assert "would be rejected: train.lr@set=7: train.lr: 7 is above 1" in out
    assert "would be rejected: nothing.here@mul=2:" in out
    told = lab("plan", "--json").json()
    assert [rejected["edits"] for rejected in told["rejected"]] == [["train.lr@set=7"], ["nothing.here@mul=2"]]


@pytest.mark.slow
def test_what_was_planned_is_what_is_run(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3", "train.lr@set=0.4")
    for round_ in (1, 2):
        told = lab("plan", "--json").json()
        lab("run", "--rounds", str(round_))
        run = [lab.read(path, "config.json") for path in lab.runs() if lab.read(path, "run.json")["round"] == round_]
        assert [entry["config"] for entry in told["runs"]] == run
    assert lab("plan", "--json").json()["runs"] == []


@pytest.mark.slow
def test_plan_counts_what_the_budget_leaves(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--runs", "1")
    assert "no runs would be planned: 1 run is done" in lab("plan", "--runs", "1").out
    assert len(lab("plan", "--runs", "2", "--json").json()["runs"]) == 1


@pytest.mark.slow
def test_plan_says_when_nothing_is_left(lab) -> None:
    lab("run")
    assert "no runs would be planned: no proposer has anything left to try" in lab("plan").out


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--keep-going",)], ids=["base again", "keep going"])
def test_plan_after_a_base_that_failed(lab, option: tuple[str, ...]) -> None:
    lab.base(exit=1)
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3", "train.lr@set=0.4")
    lab("run", "--rounds", "1", code=1)
    planned_and_run(lab, "--rounds", "2", *option, code=1)


@pytest.mark.slow
def test_plan_refuses_a_ledger_that_run_would_refuse(lab) -> None:
    lab("run", "--runs", "1")
    database = lab.folder / ".looplab" / "ledger.db"
    old = database.read_bytes()
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3", "train.lr@set=0.4")
    lab("run", "--runs", "2")
    shutil.copytree(lab.runs()[0], lab.runs()[0].with_name("0009-copy"))
    assert lab("plan", code=1).err == lab("run", code=1).err
    shutil.rmtree(lab.outputs() / "0009-copy")
    planned_and_run(lab, "--runs", "3")
    database.write_bytes(old)
    refused = lab("plan", code=1).err
    assert refused == lab("run", code=1).err
    assert "events were lost" in refused
    database.unlink()
    assert lab("plan", code=1).err == lab("run", code=1).err


def test_plan_takes_mode_and_configs_as_run_does(lab) -> None:
    lab.base("other.json", train={"lr": 0.7})
    (entry,) = lab("plan", "--mode", "quick", "--cfgs", "other.json", "--json").json()["runs"]
    assert (entry["base"], entry["config"]["steps"], entry["config"]["train"]["lr"]) == ("other.json", 1, 0.7)


def test_plan_names_the_slots(lab) -> None:
    told = lab("plan", "--gpus", "0,1", "--json").json()
    assert [(slot["name"], slot["devices"]) for slot in told["slots"]] == [("gpu0", ["0"]), ("gpu1", ["1"])]


def planned_and_run(lab: Any, *options: str, code: int = 0) -> None:
    """What `plan` shows is what `run` then does."""
    before = lab.tree()
    told = lab("plan", *options, "--json").json()["runs"]
    assert lab.tree() == before
    known = len(lab.runs())
    lab("run", *options, code=code)
    run = lab.runs()[known : known + len(told)]
    about = [lab.read(path, "run.json") for path in run]
    for key, name in {"n": "n", "round": "round", "role": "role", "by": "proposer", "seed": "seed", "reason": "reason",
                      "config_hash": "config_hash", "base": "base"}.items():  # fmt: skip
        assert [entry[key] for entry in told] == [facts[name] for facts in about]
    assert [entry["config"] for entry in told] == [lab.read(path, "config.json") for path in run]


@pytest.mark.slow
def test_plan_shows_a_rule_that_fires(lab) -> None:
    lab.write("rules.yaml", RULES)
    lab.configure(proposers=[{"rules": "rules.yaml"}])
    lab("run", "--rounds", "1")
    out = lab("plan").out
    assert "train.lr 0.1 → 0.2" in out
    assert "the loss is high" in out
    planned_and_run(lab, "--rounds", "2")
    assert len(lab.runs()) == 2


def test_plan_runs_the_labs_own_decide(lab) -> None:
    lab.write("rules.py", 'def decide(summary, history):\n    return [{"edits": {"train.lr@set": 0.5}}]\n')
    lab.configure(proposers=[{"rules": "rules.py"}])
    lab("run", "--rounds", "1")
    planned_and_run(lab, "--rounds", "2")
    assert lab.all("config.json")[1]["train"]["lr"] == 0.5


@pytest.mark.slow
def test_plan_shows_the_seeds_of_the_noise_floor(lab) -> None:
    lab.base(seed=7)
    lab.configure(judge={"baseline_seeds": 2})
    told = lab("plan", "--json").json()
    assert [(entry["role"], entry["by"], entry["seed"]) for entry in told["runs"]] == [
        ("base", "base", 7),
        ("replicate", "judge", 8),
    ]
    assert told["runs"][1]["twin"] == told["runs"][0]["id"] == "0001-xxxx"
    planned_and_run(lab)
    assert len(lab.runs()) == 2


@pytest.mark.slow
def test_plan_shows_what_the_search_will_draw(lab) -> None:
    for sampler in ("random", "qmc", "grid"):
        lab.configure(
            proposers=[{"search": {"sampler": sampler, "seed": 3}}],
            knobs={"train.lr": {"choices": [0.1, 0.2, 0.3]}, "train.batch": {"choices": [1, 2, 4, 8, 16, 32, 64]}},
        )
        planned_and_run(lab, "--runs", str(len(lab.runs()) + 3))


def test_plan_says_that_an_agent_will_be_asked_and_does_not_ask(lab) -> None:
    asked = {"cli": "command", "command": ["touch", str(lab.aside / "asked")]}
    lab.configure(proposers=[{"agent": asked}], round_size=3)
    before = lab.tree()
    assert "the agent (command) will be called, for up to 2 runs" in lab("plan").out
    told = lab("plan", "--json").json()
    assert told["asks"] == [{"proposer": "agent", "cli": "command", "runs_at_most": 2}]
    assert [entry["by"] for entry in told["runs"]] == ["base"]
    assert lab.tree() == before
    assert not (lab.aside / "asked").exists()


def test_plan_leaves_the_next_config_where_it_is(lab) -> None:
    lab.configure(proposers=[{"agent": {"cli": "command", "command": ["false"]}}])
    lab.write("proposals/next_config.json", json.dumps({"train": {"lr": 0.4}}))
    before = lab.tree()
    told = lab("plan", "--json").json()
    assert [(entry["by"], entry["edits"]) for entry in told["runs"]] == [("base", []), ("queue", ["train.lr@set=0.4"])]
    assert lab.tree() == before


@pytest.mark.slow
def test_submitted_commands_use_the_budget_that_plan_shows(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab.configure(budget={"runs": 2})
    assert len(lab("plan", "--json").json()["runs"]) == 2
    lab("submit", "--", "true")
    assert len(lab("plan", "--json").json()["runs"]) == 1
    lab("submit", "--again", "--", "true")
    assert "no runs would be planned: all 2 runs are done, 2 of them submitted commands" in lab("plan").out


@pytest.mark.slow
def test_plan_shows_a_run_that_somebody_wants_to_see_again_with_edits(lab) -> None:
    """What a watch rule has sent back comes first, before the next round."""
    lab.base(wait="gate", steps=6)
    lab.configure(
        watch=[{"name": "too long", "when": "step >= 5", "requeue": ["steps@set=2"]}],
        knobs={**lab.study["knobs"], "steps": {"type": "int", "low": 1, "high": 9}},
        launch={"command": ["{python}", "-S", "train.py"], "grace": 0.2},
    )
    engine = lab.start("run", "--runs", "1")
    lab.until_ended(1)
    engine.ended(None)
    lab.open_gate()
    (entry,) = lab("plan", "--json").json()["runs"]
    assert (entry["by"], entry["round"], entry["config"]["steps"]) == ("watch", 1, 2)
    planned_and_run(lab, "--runs", "2")


@pytest.mark.slow
def test_plan_touches_nothing_after_an_engine_was_killed(lab) -> None:
    lab.base(wait="gate", seed=1)
    lab.configure(judge={"baseline_seeds": 2}, proposers=[{"search": "random"}])
    engine = lab.start("run", "--rounds", "1")
    lab.until_at_work(2)
    engine.process.kill()
    engine.process.wait()

    def files() -> dict[str, tuple[int, bytes]]:
        return {name: content for name, content in lab.tree().items() if not name.endswith("-shm")}

    before = files()
    told = lab("plan", "--json").json()
    lab("plan")
    assert files() == before  # SQLite's own shared memory apart, which holds no data
    assert [entry["id"] for entry in told["unfinished"]][:2] == [path.name for path in lab.runs()]
    assert [(entry["by"], entry["state"]) for entry in told["unfinished"]] == [
        ("base", "running"),
        ("judge", "running"),
        ("search", "planned"),
    ]
    assert told["runs"] == []
    assert "the next round is planned when they have ended" in told["why_none"]
    lab.open_gate()
    lab("resume")
    assert [entry["id"] for entry in told["unfinished"]] == [path.name for path in lab.runs()][:3]


def test_plan_shows_the_command_of_what_would_start(lab) -> None:
    lab.configure(launch={"command": ["{python}", "train.py", "--out", "{run_dir}", "{flags}"], "config": "flags"})
    lab.queue("train.lr@set=0.2")
    words = ["--api-key", "sk-0123456789abcdef", "two words"]
    told = lab("plan", "--json", "--", *words).json()
    assert [entry["id"] for entry in told["runs"]] == ["0001-xxxx", "0002-xxxx"]
    for entry, lr in zip(told["runs"], ("0.1", "0.2"), strict=True):
        argv = entry["argv"]
        assert argv[1:4] == ["train.py", "--out", str(lab.outputs() / entry["id"])]
        assert argv[argv.index("--train.lr") + 1] == lr
        assert argv[-3:] == ["--api-key", "***", "two words"]
    done = lab("plan", "--", *words)
    assert f"command for run 0001-xxxx: {shlex.join(told['runs'][0]['argv'])}" in done.out
    assert "sk-" not in done.out + json.dumps(told)


def test_plan_says_which_run_could_not_be_started(lab) -> None:
    lab.configure(launch={"command": ["{python}", "train.py"], "config": {"as": "flags", "keys": "flat"}})
    lab.base(train={"sleep": 1})
    assert "two keys become the same flag: --sleep" in lab("plan").out
    assert "two keys become the same flag: --sleep" in lab("check", code=2).err


@pytest.mark.slow
def test_plan_takes_the_options_of_the_last_run_where_asked(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    assert "never run" in lab("plan", "--resume", code=2).err
    lab("run", "--runs", "1", "--mode", "quick")
    assert "1 run is done" in lab("plan", "--resume").out
    assert len(lab("plan", "--json").json()["runs"]) == 2
    assert "leave out the others" in lab("plan", "--resume", "--runs", "2", code=2).err


def test_plan_in_a_terminal_is_a_table(lab) -> None:
    lab.queue("train.lr@set=0.2")
    terminal = lab.terminal("plan")
    assert terminal.ended() == 0
    assert "round" in terminal.shown
    assert "configs/base.json" in terminal.shown


@pytest.mark.slow
def test_the_power_of_a_study_is_shown_before_it_begins(lab) -> None:
    assert "no test" in lab("plan", "--power", code=2).err
    lab.configure(judge={"baseline_seeds": 3, "max_replicates": 6})
    before = lab.tree()
    told = lab("plan", "--power", "--runs", "30", "--json").json()
    assert told["runs"] == 30
    assert told["noise"] is None
    shares = [one["found"] for one in told["power"]]
    assert shares[0] < shares[-1]
    assert "3 sd" in lab("plan", "--power", "--runs", "10").out
    assert lab.tree() == before


def test_the_batch_script_of_a_slurm_job_is_shown_without_a_slurm(lab: Any) -> None:
    options = {"partition": "gpu", "jobs": 2000, "setup": ["module load cuda"]}
    lab.configure(executor={"slurm": options}, resources={"devices": 1, "cores": 8}, slots=None)
    out = lab("plan").out
    lines = [line.strip() for line in out.splitlines()]
    assert {"#SBATCH --partition=gpu", "#SBATCH --gres=gpu:1", "#SBATCH --cpus-per-task=8"} <= {*lines}
    assert lines.index("#!/bin/sh") < lines.index("module load cuda")
    assert "slots: slurm0, … (2000 in all), slurm1999" in out
    assert "nothing was written or started" in out
