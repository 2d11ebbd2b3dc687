"""A study with a judge: noise first, replicates on the same seeds, verdicts, a held-out metric."""

from __future__ import annotations

import json
from typing import Any

import pytest

NOISY = """\
import json, os, random
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
luck = random.Random(f"{config['seed']}")
own = random.Random(f"{config['seed']} {config['x']}")
score = config["x"] + luck.gauss(0, 0.1) + own.gauss(0, 0.02)
held_out = {held_out}
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "score": score, "held_out": held_out}), file=file)
"""


@pytest.fixture
def judged(lab: Any) -> Any:
    lab.write("train.py", NOISY.replace("{held_out}", "score"))
    lab.write("configs/base.json", '{"x": 0.5, "seed": 3}')
    lab.configure(
        objective={"metric": "score", "goal": "max"},
        holdout={"metric": "held_out", "budget": 1},
        knobs={"x": {"type": "float", "low": 0, "high": 1}, "seed": {"type": "int", "low": 0}},
        judge={"baseline_seeds": 4, "replicates": 3, "max_replicates": 8},
        round_size=3,
        budget={"rounds": 2},
    )
    return lab


def verdicts(lab: Any) -> dict[str, str]:
    """The verdicts by what the config's x is."""
    found = {}
    for run, verdict in lab.ask("SELECT id, verdict FROM runs WHERE verdict IS NOT NULL AND role != 'base'"):
        found[f"{lab.read(lab.outputs() / run, 'config.json')['x']}"] = verdict
    return found


def test_the_better_config_is_kept_and_the_worse_one_is_not_repeated(judged: Any) -> None:
    judged.queue("x@set=0.9", "x@set=0.1")
    judged("run")
    assert verdicts(judged)["0.9"] == "keep"
    assert verdicts(judged)["0.1"] == "discard"
    runs = [judged.read(run, "config.json") for run in judged.runs()]
    assert sum(run["x"] == 0.1 for run in runs) == 1
    base_seeds = {run["seed"] for run in runs if run["x"] == 0.5}
    assert {3, 4, 5, 6} <= base_seeds  # the noise floor
    assert {run["seed"] for run in runs if run["x"] == 0.9} <= base_seeds  # pairs
    best = judged.outputs() / (judged.outputs() / "BEST").read_text().strip()
    assert judged.read(best, "config.json")["x"] == 0.9
    evidence = judged.read(best, "summary.json")["verdict"]
    assert evidence["verdict"] == "keep"
    assert evidence["low"] < evidence["effect"] < evidence["high"]
    assert evidence["effect"] == pytest.approx(0.4, abs=0.1)
    assert "judged" in (judged.outputs() / "labbook.md").read_text()
    assert judged("verify").code == 0


def test_a_change_that_does_nothing_is_not_promoted(judged: Any) -> None:
    judged.queue("x@set=0.5001", "x@set=0.4999", "x@set=0.5002")
    judged("run")
    assert "keep" not in verdicts(judged).values()
    best = judged.outputs() / (judged.outputs() / "BEST").read_text().strip()
    assert judged.read(best, "config.json")["x"] == 0.5


def test_another_seed_is_no_change(judged: Any) -> None:
    judged.queue("seed@set=4", "seed@set=1000")
    judged("run")
    assert judged.count(role="trial") == 0
    roles = [run["role"] for run in judged.all("run.json") if run["seed"] == 1000]
    assert roles == ["replicate"]
    assert "keep" not in verdicts(judged).values()


def test_a_crash_and_a_nan_win_nothing(judged: Any) -> None:
    text = (judged.folder / "train.py").read_text()
    judged.write(
        "train.py", text.replace("held_out = ", "score = float('nan') if config['x'] == 1 else score\nheld_out = ")
    )
    judged.queue("x@set=1")
    judged("run")
    assert verdicts(judged) == {"1.0": "crash"}


@pytest.mark.parametrize("command", [("stop",), ("stop", "LATEST")], ids=["study", "run"])
def test_replicates_that_a_person_stopped_are_no_crashes_and_are_made_again(
    judged: Any, until: Any, command: tuple[str, ...]
) -> None:
    text = (judged.folder / "train.py").read_text()
    wait = "import time\nwhile config['x'] == 0.9 and config['seed'] != 3 and not os.path.exists('gate'): time.sleep(0.02)\n"
    judged.write("train.py", text.replace("luck = ", wait + "luck = ", 1))
    judged.queue("x@set=0.9")
    judged("run", "--detach", "--concurrency", "1")
    waiting = "SELECT count(*) FROM runs WHERE role='replicate' AND state='running' AND reason LIKE 'replicate 1 of%'"
    until(lambda: judged.ask(waiting) == [(1,)], "the replicate of the challenger")
    judged(*command)
    (judged.folder / "gate").touch()
    if command == ("stop",):
        judged("resume")
    until(lambda: judged.engine() is None, "the end of the engine")
    assert verdicts(judged) == {"0.9": "keep"}
    (stopped,) = [summary for summary in judged.all("summary.json") if summary["status"] == "stopped"]
    assert stopped["reason"] == "stop"
    evidence = json.loads(judged.ask("SELECT evidence FROM verdicts WHERE verdict='keep'")[-1][0])
    assert "0 of" in evidence["why"]


def test_better_on_the_objective_and_worse_held_out_is_an_alarm_and_no_promotion(judged: Any) -> None:
    judged.write("train.py", NOISY.replace("{held_out}", "score - 2 * config['x']"))
    judged.queue("x@set=0.9")
    done = judged("run")
    assert verdicts(judged)["0.9"] == "inconclusive"
    assert "held-out" in done.out
    best = judged.outputs() / (judged.outputs() / "BEST").read_text().strip()
    assert judged.read(best, "config.json")["x"] == 0.5


def test_the_held_out_metric_is_read_before_a_promotion_only_and_shown_nowhere(judged: Any) -> None:
    judged.queue("x@set=0.9", "x@set=0.1")
    judged("run")
    asked = judged.ask("SELECT run FROM events WHERE kind='held-out read'")
    assert len(asked) == 1
    for run in judged.runs():
        assert "held_out" not in (run / "record/summary.json").read_text()
    assert "held_out" not in judged("query", "SELECT DISTINCT metric FROM metrics").out
    assert "held_out" not in (judged.outputs() / "report.html").read_text().replace("lab.yaml", "")


def test_a_study_that_promotes_nobody_reads_it_once_at_its_end(judged: Any) -> None:
    judged.configure(judge={"baseline_seeds": 4, "replicates": 3, "max_replicates": 3})
    judged.queue("x@set=0.52", "x@set=0.53", "x@set=0.54")
    done = judged("run")
    assert "keep" not in verdicts(judged).values()
    asked = judged.ask("SELECT data FROM events WHERE kind='held-out read'")
    assert len(asked) == 1
    assert "Held out, " in done.out
    assert "95 % interval" in (judged.outputs() / "report.md").read_text()


def test_a_ratchet_keeps_the_best_single_run_and_says_so(judged: Any) -> None:
    judged.configure(judge="ratchet", holdout=None)
    judged.queue("x@set=0.9", "x@set=0.1")
    judged("run")
    assert verdicts(judged)["0.9"] == "keep"
    assert len(judged.runs()) == 3
    evidence = judged.read(judged.runs()[1], "summary.json")["verdict"]
    assert "single run" in json.dumps(evidence)


def test_numbers_measured_by_another_evaluator_are_void(judged: Any) -> None:
    judged.write("evaluate.py", "one")
    judged.configure(evaluator=["evaluate.py"])
    judged.queue("x@set=0.9")
    judged("run", "--rounds", "1", "--runs", "4")  # the floor
    judged.write("evaluate.py", "another")
    judged("run", "--rounds", "2")
    assert verdicts(judged)["0.9"] == "void"


def test_without_a_judge_nothing_is_repeated(judged: Any) -> None:
    judged.configure(judge=None, holdout=None)
    judged.queue("x@set=0.9")
    done = judged("run")
    assert len(judged.runs()) == 2
    assert "hint" in done.out


def test_a_person_may_ask_for_the_same_again(judged: Any) -> None:
    judged("run", "--rounds", "1", "--runs", "4")
    judged("propose", "--change", "x@set=0.5", "--parent", "base")
    judged("run", "--rounds", "2", "--runs", "5")
    assert judged.all("run.json")[-1]["role"] == "replicate"


def test_a_program_may_not_propose_what_was_tried(judged: Any) -> None:
    judged.write(
        "rules.py", "def decide(summary, history):\n    return [{'edits': ['seed@add=1'], 'reason': 'luck'}]\n"
    )
    judged.configure(proposers=[{"rules": "rules.py"}], judge=None, holdout=None)
    done = judged("run")
    assert len(judged.runs()) == 1
    assert "seed" in done.out
