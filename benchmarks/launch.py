"""What a run costs: 1,000 runs of `true` on 4 slots, durable, beside a bare pool of subprocesses.

    python benchmarks/launch.py [--quick] [--executor ray|slurm|simulated]

Durable: each run has its folder, config, capsule, hashes, summary and its place in the ledger. The two are measured
alternately in the same process, so that a noisy machine is noisy for both; ratios are medians over the repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch_cluster
from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.outcome import Ending
from looplab.loop.setup import RunOptions, prepare

SLOTS = 4
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_TOPDIR_FL = 0x80086601, 0x40086602, 0x00020000
LAB = """
study: bench
launch: {command: ["true"]}
base: base.json
knobs: {x: {type: int, low: 0, high: 1000000}}
slots: {count: 4, gpus: none, cores: none}
round_size: %d
"""


def bare(n: int) -> float:
    """The same processes, started by four threads, and nothing else."""
    began = time.perf_counter()
    with ThreadPoolExecutor(SLOTS) as pool:
        done = list(pool.map(lambda _: subprocess.run(["true"]).returncode, range(n)))
    assert done == [0] * n
    return time.perf_counter() - began


def ours(n: int, root: Path) -> tuple[float, list[float]]:
    """A study of n runs; the time from the engine's first line to its last, and the gaps between runs on a slot."""
    lab_dir = root / f"lab{time.monotonic_ns()}"
    lab_dir.mkdir()
    (lab_dir / "lab.yaml").write_text(LAB % n)
    (lab_dir / "base.json").write_text('{"x": 0, "train": {"lr": 0.1, "steps": 1000}}')
    lab = load_lab(lab_dir)
    ledger = Ledger(lab.ledger_path)
    record = StudyLedger(ledger, "bench")
    record.open(None, "min")
    with ledger.write():
        for i in range(1, n):
            record.propose("person", [f"x@set={i}"], "benchmark")
    setup = prepare(lab, lab.study(None), RunOptions(rounds=1))
    began = time.perf_counter()
    with StudyLock(lab.folder, "bench"):
        executor = LocalExecutor()
        outcome = Engine(setup, ledger, executor).run()
        executor.close()
    took = time.perf_counter() - began
    os.sync()  # the last sync of the study goes on in the background: it must not slow down the other side
    runs = record.runs()
    assert outcome.ending is Ending.DONE
    assert len(runs) == n
    assert {run.status for run in runs} == {"ok"}, [run for run in runs if run.status != "ok"][:2]
    assert ledger.first_broken_link() is None
    assert all((lab_dir / "outputs/bench" / run.id / "record/summary.json").exists() for run in runs)
    slots: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        slots.setdefault(run.slot or "", []).append((run.started or 0.0, run.ended or 0.0))
    gaps = []
    for times in slots.values():
        times.sort()
        gaps += [1000 * (later[0] - earlier[1]) for earlier, later in itertools.pairwise(times)]
    return took, gaps


def fresh_folder() -> Path:
    """A folder whose subfolders ext4 spreads over the disk (`chattr +T`). Without it, ext4 puts new files next to those
    that an earlier benchmark has just deleted, and for a minute steps over each deleted inode: 20 times slower, for
    whoever creates files there."""
    folder = Path(tempfile.mkdtemp(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")))
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        flags = struct.unpack("l", fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, struct.pack("l", 0)))[0]
        fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, struct.pack("l", flags | FS_TOPDIR_FL))
    os.close(descriptor)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--executor", choices=["local", "slurm", "ray", "simulated"], default="local")
    options = parser.parse_args()
    if options.executor != "local":
        return launch_cluster.main(options.executor, fresh_folder(), quick=options.quick)
    n = 1000
    repeats = options.repeats or (3 if options.quick else 7)
    root = fresh_folder()
    try:
        bare(100), ours(100, root)  # warm
        pairs = [(bare(n), ours(n, root)) for _ in range(repeats)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    ratios = [took / pool for pool, (took, _) in pairs]
    gaps = [gap for _, (_, gap) in pairs for gap in gap]
    ms = statistics.median(took for _, (took, _) in pairs) / n * 1000
    bare_ms = statistics.median(pool for pool, _ in pairs) / n * 1000
    print(f"{n} runs of `true` on {SLOTS} slots, {repeats} repeats, {os.cpu_count()} cores")
    print(f"bare pool      {bare_ms:6.2f} ms a run     1.00 ×")
    print(f"looplab        {ms:6.2f} ms a run   {statistics.median(ratios):6.2f} ×   (folder, config, ledger, hashes)")
    print(f"exit → next start on the same slot: median {statistics.median(gaps):.2f} ms")
    figures = {
        "x_bare": round(statistics.median(ratios), 3),
        "ms_per_run": round(ms, 3),
        "gap_ms_median": round(statistics.median(gaps), 3),
        "bare_ms_per_run": round(bare_ms, 3),
        "repeats": repeats,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
