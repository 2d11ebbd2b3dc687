"""What looplab takes of an autopilot's iteration beyond the agent and the training: python benchmarks/autopilot.py

The agent is a small program that answers at once and the training one that ends at once, so that what is left is
looplab: the prompt, the ledger, the guard, the run folder, the summary, the lab book. Both are timed by looplab's own
record (the seconds of each call and of each run) and subtracted from the wall time of the whole. The bare loop beside
it starts the same two programs one after the other and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.setup import RunOptions, prepare

LAB = """
study: bench
launch: {command: ["{python}", -I, -S, train.py]}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 100000}}
proposers: [{agent: {cli: command, command: [PYTHON, -I, -S, AGENT], wall: 30s}}]
slots: {count: 1, gpus: none}
"""
AGENT = """
import os, sys
n = len(os.listdir(".")) and sys.stdin.read().count("\\n- run ")
print('{"proposals": [{"edits": ["x@add=1"], "reason": "one more", "hypothesis": "", "parent": ""}]}')
"""
TRAIN = """
import os
x = int(open(os.environ["LOOPLAB_CONFIG"]).read().split('"x":')[1].split("}")[0])
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write('{"step": 0, "score": %d}\\n' % x)
"""


def make_lab(folder: Path) -> Path:
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.py").write_text(TRAIN)
    (folder / "base.json").write_text('{"x": 0}')
    agent = json.dumps(str(folder / "agent.py"))
    (folder / "lab.yaml").write_text(LAB.replace("PYTHON", json.dumps(sys.executable)).replace("AGENT", agent))
    return folder


def piloted(folder: Path, runs: int) -> tuple[float, float, float]:
    """Milliseconds an iteration: all of it, of that the agent, of that the training."""
    lab = load_lab(folder)
    setup = prepare(lab, lab.study(None), RunOptions(rounds=runs + 1, autopilot=True))
    ledger = Ledger(lab.ledger_path)
    with StudyLock(folder, "bench"):
        executor = LocalExecutor()
        began = time.perf_counter()
        Engine(setup, ledger, executor).run()
        wall = time.perf_counter() - began
        executor.close()
    record = StudyLedger(ledger, "bench")
    ended = record.runs(state="ended")
    assert len(ended) == runs + 1, f"{len(ended)} runs"
    agent = sum(call["answer"]["seconds"] for call in record.agent_calls())
    training = sum((run.ended or 0.0) - (run.started or 0.0) for run in ended)
    return 1000 * wall / runs, 1000 * agent / runs, 1000 * training / runs


def bare(folder: Path, runs: int) -> float:
    """Milliseconds an iteration of a loop that starts the same programs and does nothing else."""
    env = {"LOOPLAB_CONFIG": str(folder / "base.json"), "LOOPLAB_METRICS": str(folder / "metrics.jsonl")}
    began = time.perf_counter()
    for _ in range(runs):
        python = [sys.executable, "-I", "-S"]
        subprocess.run([*python, "agent.py"], cwd=folder, input=b"prompt", stdout=subprocess.PIPE, check=True)
        subprocess.run([*python, "train.py"], cwd=folder, env=env, check=True)
    return 1000 * (time.perf_counter() - began) / runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    runs, repeats = (10, 3) if args.quick else (args.runs, args.repeats)
    rows = []
    for number in range(repeats):
        with tempfile.TemporaryDirectory(prefix="looplab-bench-") as place:
            whole, agent, training = piloted(make_lab(Path(place) / "lab"), runs)
            loop = bare(Path(place) / "lab", runs)
        rows.append((whole - agent - training, whole, agent, training, loop))
        print(
            f"{number + 1}/{repeats}: {whole:.1f} ms an iteration, agent {agent:.1f}, training {training:.1f}, "
            f"looplab {rows[-1][0]:.1f}; bare loop {loop:.1f}",
            file=sys.stderr,
        )
    overhead, whole, agent, training, loop = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"an iteration takes {whole:.1f} ms: agent {agent:.1f}, training {training:.1f}, looplab {overhead:.1f}")
    print(f"a bare loop with the same programs: {loop:.1f} ms; with looplab it takes {whole / loop:.2f} times as long")
    figures = {"overhead_ms": overhead, "iteration_ms": whole, "agent_ms": agent, "training_ms": training}
    print(json.dumps({**{k: round(v, 2) for k, v in figures.items()}, "x_bare": round(whole / loop, 3)}))


if __name__ == "__main__":
    main()
