"""What reading metrics costs: thousands of runs that log a row a second, read by the engine's own `LiveMetrics`.

    python benchmarks/ingest.py [--runs 10000] [--quick]

A process of its own appends the rows, each with the time at which it is written. The reader runs as inside the engine:
a portion, then a pause. `core_share` is CPU time of the reader per second, `lag_s_p99` the age of a row when read.

All runs begin in the same moment, as for an engine that adopts them. `first_pass_s` is the time until every run was
read once: its folder is listed and its files are found. The other figures are counted after every run was read once
more, since rows that waited for the first pass tell its length, not the age of rows later on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from looplab.config.lab import load_lab
from looplab.loop.engine import PORTION_S, TICK_S
from looplab.loop.watching import LiveMetrics

LAB = 'study: s\nlaunch: {command: ["true"]}\nbase: base.json\nobjective: {metric: loss, goal: min}\n'
PATIENCE_S = 600.0
"""Seconds until every run must have been read twice, on a busy machine."""


def write_rows(folders: list[str], began: float, done: Event, written: Any) -> None:
    """Append a row a second to each file."""
    files = [os.open(f"{folder}/metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for folder in folders]
    step = 0
    while not done.is_set():
        for index, file in enumerate(files):
            due = began + step + index / len(files)
            if index % 50 == 0:
                while time.monotonic() < due and not done.is_set():
                    time.sleep(0.005)
            numbers = f'"loss": {1 / (step + 1)}, "lr": 0.1, "acc": 0.5, "grad": 2'
            row = f'{{"step": {step}, "at": {time.monotonic():.3f}, {numbers}}}\n'
            os.write(file, row.encode())
        step += 1
        written.value = step


def measure(runs: int, seconds: float) -> dict[str, float]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="ingest-") as scratch:
        lab = Path(scratch)
        (lab / "lab.yaml").write_text(LAB)
        (lab / "base.json").write_text("{}")
        ids = [f"{n:05d}" for n in range(runs)]
        for run_id in ids:
            (lab / "outputs" / run_id / "record").mkdir(parents=True)
            (lab / "outputs" / run_id / "record" / "run.json").write_text("{}")
            (lab / "outputs" / run_id / "metrics.jsonl").touch()
        study = load_lab(lab).study(None)
        live = LiveMetrics(SimpleNamespace(study=study), lab / "outputs", None, print)  # type: ignore[arg-type]
        running: dict[str, Any] = {run_id: SimpleNamespace(started=1.0) for run_id in ids}
        done, written = multiprocessing.Event(), multiprocessing.Value("q", 0)
        folders = [str(lab / "outputs" / run_id) for run_id in ids]
        writer = multiprocessing.Process(target=write_rows, args=(folders, time.monotonic(), done, written))
        ages: list[np.ndarray] = []
        rows = 0
        counting = False
        read_again: set[str] = set()

        def note(run_id: str, batch: Any) -> Any:
            nonlocal rows
            if first_pass_s is not None:
                read_again.add(run_id)
            points = batch.get("at")
            if counting and points is not None:
                ages.append(time.monotonic() - np.asarray(points.values))
                rows += len(points.values)
            return batch

        writer.start()
        try:
            began = time.monotonic()
            first_pass_s: float | None = None
            cpu = wall = 0.0
            noting: set[str] = set()
            end = began + PATIENCE_S
            while (now := time.monotonic()) < end:
                if not counting and len(read_again) == runs:
                    counting, cpu, wall, end = True, time.process_time(), now, now + seconds
                live.poll(running, (), PORTION_S, None)
                for run_id in live.of_run.keys() - noting:
                    noting.add(run_id)
                    metrics = live.of_run[run_id]
                    metrics.reader = _Noting(metrics.reader, partial(note, run_id))  # type: ignore[assignment]
                if first_pass_s is None and len(noting) == runs:
                    first_pass_s = time.monotonic() - began
                time.sleep(0.0 if live.behind else TICK_S)
            if not counting:
                raise SystemExit(f"only {len(read_again)} of {runs} runs were read twice within {PATIENCE_S:g} s")
            cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        finally:
            done.set()
            writer.join()
        lag = np.concatenate(ages)
        return {
            "runs": runs,
            "rows_per_s": round(rows / wall),
            "core_share": round(cpu / wall, 3),
            "us_per_row": round(1e6 * cpu / rows, 1),
            "lag_s_p50": round(float(np.quantile(lag, 0.5)), 2),
            "lag_s_p99": round(float(np.quantile(lag, 0.99)), 2),
            "period_s": round(live.period, 2),
            "first_pass_s": round(first_pass_s or 0.0, 1),
        }


class _Noting:
    """A reader that also notes the age of its rows."""

    def __init__(self, reader: Any, note: Any) -> None:
        self._reader, self._note = reader, note

    def poll(self, final: bool = False, until: float | None = None) -> Any:
        return self._note(self._reader.poll(final, until))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="8 s of counting instead of 30")
    args = parser.parse_args()
    seconds = 8.0 if args.quick else args.seconds
    for runs in (args.runs // 10, args.runs):
        result = measure(runs, seconds)
        print(" ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    print(json.dumps({**result, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
