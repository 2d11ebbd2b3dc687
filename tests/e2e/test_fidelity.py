"""Runs that are stopped at rungs and continued from their checkpoints, with the installed command."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.ledger.ledger import Ledger
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow

LOOPLAB = str(Path(sys.executable).with_name("looplab"))
TRAINER = """
import argparse, json, os, time
parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--resume")
options = parser.parse_args()
config = json.load(open(options.config))
state = {"epoch": 0, "x": 8.0}
if options.resume:
    state = json.load(open(options.resume))
out = os.environ["LOOPLAB_RUN_DIR"]
log = open(os.environ["LOOPLAB_METRICS"], "a")
with open(os.environ["TRAINED"], "a") as trained:
    while state["epoch"] < 9:
        state = {"epoch": state["epoch"] + 1, "x": state["x"] * (1 - config["rate"])}
        with open(f"{out}/state.tmp", "w") as file:
            json.dump(state, file)
        os.replace(f"{out}/state.tmp", f"{out}/state.json")
        log.write(json.dumps({"step": state["epoch"], "loss": abs(state["x"] - 0.1)}) + "\\n")
        log.flush()
        trained.write(json.dumps([config["rate"], state["epoch"]]) + "\\n")
        trained.flush()
        time.sleep(PACE)
"""
LAB = """
study: thaw
launch:
  command: ["{python}", -I, -S, train.py, "{config}"]
  env: {TRAINED: "{lab}/trained.jsonl"}
base: base.json
objective: {metric: loss, goal: min}
knobs: {rate: {type: float, low: 0.01, high: 0.9, log: true}}
proposers: [PROPOSER]
budget: {runs: RUNS}
slots: {count: 1, gpus: none}
"""
WARM = """
warm_start: {mode: start.mode, from: start.from, checkpoint: state.json, arguments: [--resume, "{checkpoint}"]}
"""


def make_lab(folder: Path, proposer: str, *, runs: int, pace: float, warm: bool = True) -> Path:
    folder.mkdir()
    (folder / "lab.yaml").write_text(LAB.replace("PROPOSER", proposer).replace("RUNS", str(runs)) + WARM * warm)
    (folder / "base.json").write_text('{"rate": 0.02, "start": {"mode": "fresh", "from": "latest"}}')
    (folder / "train.py").write_text(TRAINER.replace("PACE", str(pace)))
    return folder


def looplab(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LOOPLAB, *words, "--lab", str(folder)], capture_output=True, text=True, check=False)


def ended_runs(folder: Path) -> list[RunRow]:
    ledger = Ledger(load_lab(folder).ledger_path)
    try:
        return StudyLedger(ledger, "thaw").runs(state="ended")
    finally:
        ledger.close()


def summary(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "outputs/thaw" / run / "record/summary.json").read_text())
    return found


def check_continuations(folder: Path) -> int:
    """Check every continuation against a training of the same config in one piece; return how many there are."""
    runs = {run.id: run for run in ended_runs(folder)}
    continued = [run for run in runs.values() if run.role == Role.CONTINUATION]
    assert len({run.parent for run in continued}) == len(continued), "a run was continued twice"
    for run in continued:
        assert run.parent is not None
        before = runs[run.parent]
        assert (before.status, before.point, before.seed, before.warm) == ("stopped", run.point, run.seed, run.warm)
        config = json.loads((folder / "outputs/thaw" / run.id / "record/config.json").read_text())
        about = summary(folder, run.id)
        assert about["continues"] == before.id
        steps = [step for step, _ in about["curve"]]
        assert steps == sorted(set(steps))
        assert steps[0] == summary(folder, before.id)["curve"][0][0]
        for step, value in about["curve"] if run.warm is None else ():  # else its first epochs had other knobs
            x = 8.0
            for _ in range(int(step)):
                x *= 1 - config["rate"]
            assert value == abs(x - 0.1)
        if run.status == "ok":
            assert run.objective == about["curve"][-1][1]
    return len(continued)


@pytest.mark.slow
def test_promising_runs_continue_where_they_were_stopped_and_no_epoch_is_trained_twice(tmp_path: Path) -> None:
    folder = make_lab(tmp_path / "lab", "{search: {fidelity: {min: 1}, startup: 3}}", runs=12, pace=0.6)
    done = looplab(folder, "run")
    assert done.returncode == 0, done.stderr
    assert check_continuations(folder) >= 2
    trained = [line for line in (folder / "trained.jsonl").read_text().splitlines() if line]
    runs = ended_runs(folder)
    assert any(run.status == "ok" and run.role == Role.CONTINUATION for run in runs)
    # The trainer is stopped after an epoch was saved, so at most the epoch that was under way is lost.
    assert len(trained) - len(set(trained)) <= sum(run.status == "stopped" for run in runs)
    assert looplab(folder, "verify").returncode == 0
    assert looplab(folder, "report").returncode == 0


@pytest.mark.slow
def test_a_killed_engine_continues_every_run_once(tmp_path: Path) -> None:
    folder = make_lab(tmp_path / "lab", "{search: {fidelity: {min: 1, max: 9, scheduler: asha}}}", runs=10, pace=0.3)
    chance = random.Random(3)
    log = folder / "trained.jsonl"
    log.touch()
    for _ in range(6):
        process = subprocess.Popen([LOOPLAB, "run", "--lab", str(folder)], stdout=subprocess.DEVNULL)
        enough = len(log.read_text().splitlines()) + chance.randrange(1, 5)
        while len(log.read_text().splitlines()) < enough and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = looplab(folder, "run")
    assert done.returncode == 0, done.stderr
    assert len(ended_runs(folder)) == 10
    check_continuations(folder)
    assert looplab(folder, "verify").returncode == 0


@pytest.mark.slow
def test_the_worst_members_of_a_population_continue_from_the_best(tmp_path: Path) -> None:
    folder = make_lab(tmp_path / "lab", "{pbt: {population: 4, interval: 3}}", runs=13, pace=0.3)
    done = looplab(folder, "run")
    assert done.returncode == 0, done.stderr
    check_continuations(folder)
    runs = {run.id: run for run in ended_runs(folder)}
    copies = [run for run in runs.values() if run.role == Role.TRIAL and run.warm is not None]
    assert copies, "nobody was copied"
    for run in copies:
        assert run.warm == run.parent
        assert run.warm is not None
        assert runs[run.warm].status == "stopped"
        assert summary(folder, run.id)["curve"][0][0] > summary(folder, run.warm)["curve"][0][0]
    assert sum(run.status == "ok" for run in runs.values()) >= 2


def test_check_says_what_rungs_need(tmp_path: Path) -> None:
    folder = make_lab(tmp_path / "lab", "{search: {fidelity: true}}", runs=3, pace=0.0, warm=False)
    said = looplab(folder, "check")
    assert said.returncode == 0, said.stderr
    assert "never continued, since there is no warm_start" in " ".join((said.stdout + said.stderr).split())
    folder = make_lab(tmp_path / "other", "{pbt: {interval: 3}}", runs=3, pace=0.0, warm=False)
    said = looplab(folder, "check")
    assert said.returncode != 0
    assert "pbt needs checkpoints" in said.stdout + said.stderr
