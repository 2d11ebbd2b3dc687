"""Live rules on real processes: a run that goes wrong is ended at once and tried again with edits."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

SLOW = '''\
"""Writes a row, then waits; the row says how large the mass is, as the config's reg makes it."""
import json, math, os, time
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
mass = math.exp(-58 / config["reg"])
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    for step in range(0, 500, 50):
        print(json.dumps({"step": step, "train/ot_pi_sum": mass, "loss": 1.0 / (step + 1)}), file=file, flush=True)
        if step == 300:
            if mass < 1e-6:
                time.sleep(600)
'''
RULE = {"name": "no mass", "when": "300 <= step <= 500 and train.ot_pi_sum < 1e-6", "requeue": ["reg@add=2"]}


@pytest.fixture
def watched(lab: Any) -> Any:
    lab.write("train.py", SLOW)
    lab.write("configs/base.json", '{"reg": 1.0}')
    lab.configure(
        objective={"metric": "loss", "goal": "min"},
        knobs={"reg": {"type": "float", "low": 0.1, "high": 6}},
        watch=[RULE],
        budget={"rounds": 1},
        round_size=1,
    )
    return lab


def test_a_hopeless_run_is_stopped_and_tried_again(watched: Any) -> None:
    done = watched("run")
    first, second, third = watched.runs()
    assert [watched.read(run, "config.json")["reg"] for run in (first, second, third)] == [1.0, 3.0, 5.0]
    assert [watched.read(run, "summary.json")["status"] for run in (first, second, third)] == [
        "stopped",
        "stopped",
        "ok",
    ]
    assert watched.read(second, "run.json")["proposer"] == "watch"
    assert watched.read(second, "run.json")["parent"] == first.name
    assert "train.ot_pi_sum" in watched.read(second, "run.json")["reason"]
    assert "no mass" in done.out
    assert watched("verify").code == 0


@pytest.mark.slow
def test_a_stopped_trial_has_had_its_chance(watched: Any) -> None:
    watched.write("configs/base.json", '{"reg": 5.0}')
    watched.configure(judge={"baseline_seeds": 2, "replicates": 2, "max_replicates": 2}, budget={"rounds": 2})
    watched.queue("reg@set=1")
    watched("run")
    stopped = [summary for summary in watched.all("summary.json") if summary["status"] == "stopped"]
    assert {summary["verdict"]["verdict"] for summary in stopped} == {"discard"}
    assert watched("verify").code == 0


def test_a_requeue_stops_at_the_edge_of_the_knob(watched: Any) -> None:
    watched.configure(watch=[{**RULE, "when": "step >= 300"}], knobs={"reg": {"type": "float", "low": 0.1, "high": 2}})
    done = watched("run", code=1)  # no run came to its end
    assert [watched.read(run, "config.json")["reg"] for run in watched.runs()] == [1.0, 2.0]
    assert "there is nothing left to change" in done.out


def test_a_run_is_sent_back_only_so_often(watched: Any) -> None:
    watched.configure(watch=[{**RULE, "requeue": ["reg@add=0.01"], "requeues": 2}])
    watched("run", code=1)
    assert len(watched.runs()) == 3


def test_a_rule_may_only_note_and_alert(watched: Any) -> None:
    write = "import sys; open('alert.json', 'w').write(sys.stdin.read())"
    alert = {"command": [sys.executable, "-I", "-S", "-c", write]}
    watched.write("configs/base.json", '{"reg": 5.0}')
    watched.configure(watch=[{"when": "step == 300", "note": "half way", "alert": alert}])
    watched("run")
    (run,) = watched.runs()
    assert watched.read(run, "summary.json")["status"] == "ok"
    assert "half way" in (run / "record/notes.md").read_text()
    assert json.loads((watched.folder / "alert.json").read_text())["run"] == run.name


@pytest.mark.parametrize(
    ("rule", "loss", "said"),
    [
        ({"nan": True}, "float('nan')", "loss is NaN"),
        ({"diverge": {"metric": "loss", "factor": 10, "after": 100}}, "9.0 if step > 200 else 0.1", "times worse"),
        ({"prune": {"pruner": "threshold", "upper": 2.0, "warmup": 100}}, "5.0", "prune threshold"),
        ({"prune": {"pruner": "median", "startup": 1, "warmup": 100}}, "5.0", "prune median"),
    ],
    ids=["nan", "diverge", "threshold", "median"],
)
def test_what_has_gone_wrong_is_ended(watched: Any, rule: dict[str, Any], loss: str, said: str) -> None:
    bad = SLOW.replace("1.0 / (step + 1)", f"({loss}) if config['reg'] == 2 else 1.0 / (step + 1)")
    watched.write("train.py", bad.replace("if mass < 1e-6", "if config['reg'] == 2"))
    watched.write("configs/base.json", '{"reg": 5.0}')
    watched.configure(watch=[rule], budget={"rounds": 2})
    watched.queue("reg@set=2")
    done = watched("run")
    assert [watched.read(run, "summary.json")["status"] for run in watched.runs()] == ["ok", "stopped"]
    assert said in done.out


@pytest.mark.slow
def test_a_run_that_writes_nothing_more_is_ended(watched: Any) -> None:
    watched.write("train.py", SLOW.replace("if mass < 1e-6", "if config['reg'] == 2"))
    watched.configure(watch=[{"stall": "3s"}], budget={"rounds": 2})
    watched.queue("reg@set=2")
    done = watched("run", code=None)
    # The first writes all of its rows at once; on a machine that is busy enough it, too, may be late with them.
    assert [watched.read(run, "summary.json")["status"] for run in watched.runs()][1:] == ["stopped"]
    assert "no new row" in done.out


def test_a_run_that_was_to_be_stopped_when_the_engine_died_is_stopped_by_the_next(watched: Any, until: Any) -> None:
    engine = watched.start("run")
    until(lambda: watched.ask("SELECT 1 FROM events WHERE kind='watched'"), "the order to stop")
    os.kill(engine.pid, 9)
    engine.process.wait()
    watched("resume")
    regs = [watched.read(run, "config.json")["reg"] for run in watched.runs()]
    assert regs == [1.0, 3.0, 5.0]


def test_a_rule_that_cannot_work_is_told_before_anything_runs(watched: Any) -> None:
    watched.configure(watch=[{"when": "step > 3", "requeue": ["rge@mul=2"]}])
    done = watched("run", code=2)
    assert "rge" in done.err
    assert not watched.runs()
