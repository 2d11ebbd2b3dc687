"""Code or a lab file that changes during a study is told in alarms, verdicts and reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

TRAIN = """\
import json, os
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    noise = (config["seed"] * 7919 % 13) / 1000
    print(json.dumps({"step": 1, "score": config["x"] + noise}), file=file)
"""


@pytest.fixture
def judged(lab: Any) -> Any:
    lab.write("train.py", TRAIN)
    lab.write("configs/base.json", json.dumps({"x": 0.0, "seed": 0}))
    lab.configure(
        objective={"metric": "score", "goal": "max"},
        knobs={"x": {"type": "float", "low": -1, "high": 1}},
        judge={"baseline_seeds": 3, "replicates": 2, "max_replicates": 3},
        seed="seed",
    )
    lab("run", "--rounds", "1")
    return lab


def verdict(lab: Any) -> dict[str, Any]:
    (text,) = lab.ask("SELECT evidence FROM verdicts ORDER BY rowid DESC LIMIT 1")[0]
    return json.loads(text)


def test_a_changed_trainer_is_told_on_the_terminal_in_the_book_status_verdict_and_report(judged: Any) -> None:
    lab = judged
    lab.write("train.py", TRAIN.replace('config["x"] + noise', 'config["x"] + noise + 0.1'))
    lab.write("helpers/new.py", "x = 1\n")
    lab("propose", "--change", "x@set=0.001", "--parent", "base")
    done = lab("run", "--rounds", "2")
    said = "the code differs from that of run"
    assert said in done.out
    assert "helpers/new.py, train.py" in done.out
    assert said in (lab.outputs() / "labbook.md").read_text()
    assert any(said in alarm for alarm in lab("status", "--json").json()["studies"][0]["alarms"])
    evidence = verdict(lab)
    assert "the code differs: helpers/new.py, train.py" in evidence["flags"]
    assert "The code differs: helpers/new.py, train.py between the runs" in evidence["why"]
    events = lab.ask("SELECT data FROM events WHERE kind='judged' ORDER BY seq DESC LIMIT 1")
    assert "the code differs" in events[0][0]
    assert "code differs" in (lab.outputs() / "report.md").read_text()
    assert "whole" in lab("verify").out
    alarms = f"SELECT 1 FROM events WHERE kind='alarm' AND data LIKE '%{said}%'"
    before = len(lab.ask(alarms))
    lab("propose", "--change", "x@set=0.002", "--parent", "base")
    lab("run", "--rounds", "3")
    assert len(lab.ask(alarms)) == before == 1  # told once


def test_a_changed_lab_file_is_told(judged: Any) -> None:
    lab = judged
    lab.configure(judge={"baseline_seeds": 3, "replicates": 2, "max_replicates": 3, "alpha": 0.2}, budget={"rounds": 9})
    lab("propose", "--change", "x@set=-0.5", "--parent", "base")
    done = lab("run", "--rounds", "2")
    assert "lab.yaml differs from that of earlier runs: judge.alpha" in done.out
    assert any("judge.alpha" in alarm for alarm in lab("status", "--json").json()["studies"][0]["alarms"])
    assert "lab.yaml differs: judge.alpha" in verdict(lab)["flags"]


def test_what_does_not_matter_raises_no_alarm(judged: Any) -> None:
    lab = judged
    lab.configure(budget={"rounds": 9}, slots={"count": 1, "gpus": "none"})
    lab.write("notes.md", "a thought\n")
    lab("propose", "--change", "x@set=-0.5", "--parent", "base")
    lab("run", "--rounds", "2")
    assert lab("status", "--json").json()["studies"][0]["alarms"] == []
    assert not any("differs" in flag for flag in verdict(lab)["flags"])


def test_a_lab_without_git_says_that_only_hashes_of_its_code_are_recorded(lab: Any) -> None:
    assert "not in git" in lab("check").out
    assert "not in git" in lab("run", "--rounds", "1").out
    capsule = lab.read(lab.runs()[0], "run.json")["capsule"]
    listing = json.loads((lab.outputs() / capsule["code"]["files"]).read_text())
    assert "train.py" in listing
    assert not any(name.startswith("outputs") for name in listing)
