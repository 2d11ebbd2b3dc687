"""Prioritized replay compared with cpprb: entries per second that are sampled, with data and weights, and updated.

    python benchmarks/replay.py [--quick]

Both hold the same million transitions (two observations of 4 floats, an action, a reward, a flag; our reward is stored
in 16 bits, theirs in 32) and do the same work: sample a batch, gather it, compute the importance-sampling weights, and
update the priorities, including alpha. They are measured in turn within the same process, so that noise of the machine
affects both; figures are medians over the repeats, ratios are medians of the ratios within a repeat. "numpy" is ours
without a C compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer

from looplab.rl import sumtree
from looplab.rl.replay import PrioritizedReplay

ENTRIES = 1_000_000
BATCHES = (256, 4096)
ALPHA, BETA = 0.6, 0.4
Turn = Callable[[int], None]


def transitions(rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    data = {
        "obs": rng.random((ENTRIES, 4), np.float32), "next_obs": rng.random((ENTRIES, 4), np.float32),
        "act": rng.integers(0, 4, ENTRIES), "rew": rng.random(ENTRIES, np.float32), "done": rng.random(ENTRIES) < 0.01,
    }  # fmt: skip
    return data, rng.exponential(size=ENTRIES)


def ours(data: dict[str, Any], priorities: Any, backend: Any) -> Turn:
    replay = PrioritizedReplay(entries=ENTRIES, alpha=ALPHA, beta=BETA, backend=backend)
    replay.push(data, priorities)
    td_errors = np.random.default_rng(1).exponential(size=max(BATCHES)).astype(np.float32)

    def turn(batch: int) -> None:
        sample = replay.sample(batch)
        replay.update_priorities(sample.indices, td_errors[:batch])

    return turn


def theirs(data: dict[str, Any], priorities: Any) -> Turn:
    fields = {"obs": {"shape": 4}, "next_obs": {"shape": 4}, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    buffer = PrioritizedReplayBuffer(ENTRIES, fields, alpha=ALPHA)
    buffer.add(**data, priorities=priorities)
    td_errors = np.random.default_rng(1).exponential(size=max(BATCHES)).astype(np.float32)

    def turn(batch: int) -> None:
        sample = buffer.sample(batch, BETA)
        buffer.update_priorities(sample["indexes"], td_errors[:batch])

    return turn


def speed(turn: Turn, batch: int, seconds: float) -> float:
    began = now = time.perf_counter()
    turns = 0
    while now - began < seconds:
        for _ in range(4):
            turn(batch)
        turns += 4
        now = time.perf_counter()
    return batch * turns / (now - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter repeats: about 10 seconds in total")
    options = parser.parse_args()
    repeats, seconds = (5, 0.15) if options.quick else (9, 0.4)
    began = time.perf_counter()
    compiled = sumtree.load_library() is not None
    print(f"library ready after {1000 * (time.perf_counter() - began):.1f} ms (compiled: {compiled})")
    data, priorities = transitions(np.random.default_rng(0))
    contestants = {
        "looplab": ours(data, priorities, "auto"),
        "looplab, numpy": ours(data, priorities, "numpy"),
        "cpprb": theirs(data, priorities),
    }
    figures: dict[str, Any] = {"entries": ENTRIES, "repeats": repeats, "compiled": compiled}
    for batch in BATCHES:
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in contestants.values():
            speed(turn, batch, 0.05)
        for _ in range(repeats):
            for name, turn in contestants.items():
                speeds[name].append(speed(turn, batch, seconds))
        print(f"\nB={batch}, {ENTRIES:,} entries, medians of {repeats}")
        for name, values in speeds.items():
            ratio = statistics.median(a / b for a, b in zip(values, speeds["cpprb"], strict=True))
            print(f"  {name:16} {statistics.median(values):12,.0f} entries/s   {ratio:5.2f} × cpprb")
            if name != "cpprb":
                key = "per" if name == "looplab" else "numpy"
                figures[f"{key}_x_cpprb_{batch}"] = round(ratio, 2)
                figures[f"{key}_entries_per_s_{batch}"] = round(statistics.median(values))
        figures[f"cpprb_entries_per_s_{batch}"] = round(statistics.median(speeds["cpprb"]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
