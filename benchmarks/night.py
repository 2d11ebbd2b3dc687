"""A night with an agent that misbehaves: python benchmarks/night.py

An autopilot asks a scripted agent for one proposal after the other. Every third call of the agent goes wrong in a way
that is drawn from a seed: it fails, hangs, answers garbage, leaves a pipe or a link where its answer should be, repeats
itself. Now and then the engine is killed (SIGKILL) and resumed. What counts is whether the night reaches its end: all
proposals decided, nothing lost, nothing stuck. Half of the night the agent may repair what it did wrong; in the other
half it may not, and a search stands in for it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import is_failed

LAB = """
study: night
launch: {command: ["{python}", -I, -S, train.py], grace: 2s}
base: base.json
seed: seed
objective: {metric: score, goal: max}
knobs:
  x: {type: int, low: 0, high: 100000}
  seed: {type: int, low: 0, high: 1000}
  resume_mode: {choices: [fresh, continue]}
  resume_from: {type: str}
warm_start: {mode: resume_mode, from: resume_from, checkpoint: [model.pt], arguments: []}
proposers:
  - agent:
      cli: command
      command: [PYTHON, -I, -S, AGENT, SEED]
      wall: WALL
      tries: TRIES
      call_retries: REPEATS
      backoff: 0.1
slots: {count: 1, gpus: none}
"""
AGENT = r"""
import json, os, random, sys, time
sys.stdin.read()
try:
    n = int(open("calls").read())
except (OSError, ValueError):
    n = 0
with open("calls.new", "w") as file:
    file.write(str(n + 1))
os.replace("calls.new", "calls")  # before anything else: a call that hangs counts too
name = "next_config.json"

def propose(*edits, parent="", reason="one more"):
    print(json.dumps({"proposals": [{"edits": edits, "reason": reason, "hypothesis": "", "parent": parent}]}))

def exit_1():
    sys.exit("network error")
def hang():
    time.sleep(3600)
def garbage():
    sys.stdout.buffer.write(random.Random(n).randbytes(4000))
def half_emoji():
    propose(f"x@set={n + 1}", reason="half an emoji \ud83d")
def pipe():
    os.mkfifo(name)
def link():
    os.symlink("/dev/zero", name)
def folder():
    os.makedirs(name + "/inside")
def huge():
    print("x" * 5_000_000)
def deep():
    print("[" * 200_000)
def repeat():
    propose("x@set=1", parent="base")
def seed_only():
    propose("seed@add=1")
def out_of_range():
    propose("x@set=1000000000")
def bad_warm_start():
    propose("resume_mode@set=continue", "resume_from@set=nowhere", f"x@set={n + 1}")
def empty():
    pass

WAYS = [exit_1, hang, garbage, half_emoji, pipe, link, folder, huge, deep, repeat, seed_only, out_of_range,
        bad_warm_start, empty]
if n % 3 == 2:
    order = random.Random(int(sys.argv[1])).sample(range(len(WAYS)), len(WAYS))
    turn = n // 3
    WAYS[order[turn % len(WAYS)]]()
else:
    propose(f"x@set={n + 1}")
"""
TRAIN = """
import json, os
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write('{"step": 0, "score": %d}\\n' % config["x"])
"""


@dataclass(frozen=True, slots=True)
class Night:
    iterations: int
    """Proposals that were asked for."""
    decided_share: float
    """The share of them that became runs."""
    lost: int
    """Runs that did not end well, calls without a recorded end, decisions made twice, findings of `looplab verify`."""
    wedged: int
    """1: the autopilot did not end by itself."""
    exit_code: int | None
    seconds: float
    calls: int
    failed_calls: int
    refused_answers: int
    by_agent: int
    """Runs that the agent proposed; the others are of the search that stood in for it."""
    kills: int


def make_lab(folder: Path, seed: int, wall: float, retries: int) -> Path:
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.py").write_text(TRAIN)
    (folder / "base.json").write_text(json.dumps({"x": 0, "seed": 1, "resume_mode": "fresh", "resume_from": "latest"}))
    words = {"PYTHON": sys.executable, "AGENT": str(folder / "agent.py"), "SEED": str(seed), "WALL": wall}
    words |= {"TRIES": 1 + retries, "REPEATS": retries}
    text = LAB
    for word, value in words.items():
        text = text.replace(word, json.dumps(value))
    (folder / "lab.yaml").write_text(text)
    return folder


def spend(
    folder: Path,
    iterations: int,
    *,
    seed: int = 0,
    wall: float = 5.0,
    retries: int = 1,
    kills: int = 0,
    patience: float,
) -> Night:
    """Spend a night in a new lab.

    Args:
        wall: The agent's limit, in seconds.
        retries: How often it may repair an answer, and how often a failed call is repeated.
        patience: Seconds after which an autopilot that has not ended counts as wedged.
    """
    make_lab(folder, seed, wall, retries)
    looplab = [sys.executable, "-m", "looplab"]
    chance = random.Random(seed)
    command = [*looplab, "autopilot", "--runs", str(iterations), "--lab", str(folder)]
    began = time.monotonic()
    exit_code: int | None = None
    killed = 0
    with (folder / "night.log").open("wb") as log:
        while True:
            engine = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            left = patience - (time.monotonic() - began)
            is_killed = killed < kills
            try:
                exit_code = engine.wait(min(left, chance.uniform(1.0, 8.0)) if is_killed else max(0.0, left))
                break
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()
            if not is_killed:
                break
            killed += 1
            if was_begun(folder):
                command = [*looplab, "resume", "--lab", str(folder)]
    seconds = time.monotonic() - began
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    try:
        study = StudyLedger(ledger, "night")
        runs = study.runs()
        trials = [run for run in runs if run.role == "trial"]
        calls = study.agent_calls()
        # The same config twice is a decision that was made twice, but for runs that a person asked for.
        doubled = sum(count - 1 for count in Counter((run.point, run.seed, run.warm) for run in runs).values())
        lost = sum(run.status != "ok" for run in runs) + sum(call["answer"] is None for call in calls) + doubled
        findings = audit(ledger, folder).findings
        for finding in findings:
            print(finding, file=sys.stderr)
        return Night(
            iterations=iterations,
            decided_share=round(len(trials) / iterations, 4),
            lost=lost + len(findings),
            wedged=int(exit_code is None),
            exit_code=exit_code,
            seconds=round(seconds, 1),
            calls=len(calls),
            failed_calls=sum(map(is_failed, calls)),
            refused_answers=sum(bool((call["answer"] or {}).get("refused")) for call in calls),
            by_agent=sum(run.proposer == "agent" for run in trials),
            kills=killed,
        )
    finally:
        ledger.close()


def was_begun(folder: Path) -> bool:
    """Whether an engine was killed late enough for `looplab resume` to know how to continue."""
    path = folder / ".looplab" / "ledger.db"
    if not path.exists():
        return False
    ledger = Ledger(path)
    try:
        return ledger.one("SELECT 1 FROM meta WHERE key='options:night'") is not None
    finally:
        ledger.close()


def together(nights: Sequence[Night]) -> Night:
    """The halves of a night as one."""
    added = ("iterations", "lost", "wedged", "calls", "failed_calls", "refused_answers", "by_agent", "kills")
    sums = {name: sum(getattr(night, name) for night in nights) for name in added}
    decided = sum(night.decided_share * night.iterations for night in nights)
    codes = [night.exit_code for night in nights]
    return Night(
        **sums,
        decided_share=round(decided / sums["iterations"], 4),
        exit_code=None if None in codes else max(code for code in codes if code is not None),
        seconds=round(sum(night.seconds for night in nights), 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 iterations and two kills")
    args = parser.parse_args()
    iterations, kills = (20, 2) if args.quick else (args.iterations, args.kills)
    nights = []
    for retries, part in ((1, iterations - iterations // 2), (0, iterations // 2)):
        with tempfile.TemporaryDirectory(prefix="looplab-bench-") as place:
            night = spend(
                Path(place) / "lab",
                part,
                seed=args.seed + retries,
                wall=2.0 if args.quick else 5.0,
                retries=retries,
                kills=(kills + retries) // 2,
                patience=60.0 * iterations,
            )
            nights.append(night)
            if night.wedged or night.exit_code or night.lost or night.decided_share != 1:
                print((Path(place) / "lab" / "night.log").read_text(errors="replace")[-4000:], file=sys.stderr)
    night = together(nights)
    print(
        f"{night.iterations} iterations in {night.seconds} s: {night.calls} calls of the agent, {night.failed_calls} "
        f"failed, {night.refused_answers} answers refused; {night.by_agent} runs by the agent, the rest by the search "
        f"that stood in; {night.kills} kills; exit code {night.exit_code}"
    )
    print(json.dumps(asdict(night)))


if __name__ == "__main__":
    main()
