"""How costs grow: with the number of runs (10 to 100,000), metric rows, knobs, slots and studies; and where each bends.

    python benchmarks/scaling.py [--quick]

A cost that should not depend on the size (recording a run) bends at the first size at which it is more than twice that
of the smallest. One that is proportional to the size (reading rows), or begins with the start of a process, bends where
one more item costs more than twice the least seen before. A curve that does not bend has its largest size instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch import fresh_folder
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.measure.jsonl import JsonlSource
from measure import count_points

LOOPLAB = str(Path(sys.executable).with_name("looplab"))
LAB = """
study: big
launch: {command: ["true"]}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 1000000}}
slots: {count: %d, gpus: none, cores: none}
"""
Curve = dict[int, float]
"""Size → seconds."""


def timed(act: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def make_lab(folder: Path, slots: int = 4) -> tuple[Ledger, StudyLedger]:
    folder.mkdir(parents=True)
    (folder / "lab.yaml").write_text(LAB % slots)
    (folder / "base.json").write_text('{"x": 0}')
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    study = StudyLedger(ledger, "big")
    study.open("score", "max")
    return ledger, study


def add_run(study: StudyLedger, number: int) -> None:
    run = study.plan(
        round=1, proposal=None, proposer="search", parent=None, base="base.json", reason="to fill the ledger",
        config_hash=f"{number:016x}", devices=1, plan=RunPlan({}),
    )  # fmt: skip
    study.ended(
        run.id, status="ok", code=0, signal=None, started=1e9, ended=1e9 + 60, objective=number % 977 / 977, files={}
    )


def with_runs(folder: Path, sizes: list[int], repeats: int) -> dict[str, Curve]:
    """`looplab status`, `looplab plan` and recording one run, on one ledger that grows."""
    curves: dict[str, Curve] = {"status": {}, "decision": {}, "record": {}}
    ledger, study = make_lab(folder)
    with ledger.write():
        study.begin_round()
    count = 0

    def record() -> None:
        nonlocal count
        with ledger.write():
            add_run(study, count)
        count += 1

    for size in sizes:
        with ledger.write():
            for number in range(count, size):
                add_run(study, number)
        count = max(count, size)
        curves["record"][size] = timed(record, 30)
        curves["status"][size] = timed(lambda: call("status", "--lab", str(folder)), repeats)
        curves["decision"][size] = timed(lambda: call("plan", "--lab", str(folder)), repeats)
    ledger.close()
    return curves


def with_rows(folder: Path, sizes: list[int], repeats: int) -> dict[str, Curve]:
    curve: Curve = {}
    for size in sizes:
        path = folder / f"{size}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"step": {i}, "loss": 0.{i}, "acc": 0.{i}5}}\n' for i in range(size)))

        def read(path: Path = path) -> None:
            source = JsonlSource(path)
            while count_points(source.poll()):
                pass

        curve[size] = timed(read, repeats)
    return {"rows": curve}


def with_knobs(sizes: list[int], repeats: int) -> dict[str, Curve]:
    curve: Curve = {}
    for size in sizes:
        knobs = {f"part{i % 10}.x{i}": {"type": "float", "low": 0, "high": 1} for i in range(size)}
        config: dict[str, dict[str, float]] = {}
        for key in knobs:
            section, _, name = key.partition(".")
            config.setdefault(section, {})[name] = 0.5
        guard = Guard({path: Knob.make(path, spec) for path, spec in knobs.items()})
        edits = [f"{key}@set=0.25" for key in knobs]
        curve[size] = timed(lambda guard=guard, config=config, edits=edits: guard.check(config, edits), repeats)
    return {"knobs": curve}


def with_slots(folder: Path, sizes: list[int], runs: int) -> dict[str, Curve]:
    """Seconds of an engine with so many slots for a fixed number of runs of `true`."""
    curve: Curve = {}
    for size in sizes:
        ledger, study = make_lab(folder / str(size), size)
        with ledger.write():
            for i in range(1, runs):
                study.propose("person", [f"x@set={i}"], "benchmark")
        ledger.close()
        call_ = ["run", "--lab", str(folder / str(size)), "--runs", str(runs), "--keep-going"]
        curve[size] = timed(lambda call_=call_: call(*call_, codes=(0, 1)), 1)
    return {"slots": curve}


def with_studies(folder: Path, sizes: list[int], repeats: int) -> dict[str, Curve]:
    curve: Curve = {}
    for size in sizes:
        lab = folder / str(size)
        lab.mkdir(parents=True)
        studies = "\n".join(f"  - study: s{i}" for i in range(size))
        (lab / "lab.yaml").write_text(f'launch: {{command: ["true"]}}\nbase: base.json\nstudies:\n{studies}\n')
        (lab / "base.json").write_text("{}")
        curve[size] = timed(lambda lab=lab: call("status", "--lab", str(lab)), repeats)
    return {"studies": curve}


def call(*words: str, codes: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run([LOOPLAB, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode not in codes:
        raise RuntimeError(f"looplab {' '.join(words)}: {done.stderr}")


def bend_of(curve: Curve, *, flat: bool) -> int:
    """Return the first size at which a cost grows faster than it should; the largest size if it never does."""
    sizes = sorted(curve)
    if flat:
        return next((size for size in sizes if curve[size] > 2 * curve[sizes[0]]), sizes[-1])
    least = None
    for before, size in itertools.pairwise(sizes):
        each = max(0.0, curve[size] - curve[before]) / (size - before)
        if least is not None and each > 2 * least and curve[size] > 1.2 * curve[before]:
            return size
        least = each if least is None else max(min(each, least), curve[sizes[0]] / 1000 / sizes[-1])
    return sizes[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="up to 10,000 runs, under 60 s")
    quick = parser.parse_args().quick
    repeats = 3 if quick else 7
    root = fresh_folder()
    try:
        curves = {
            **with_runs(root / "runs", [10, 100, 1_000, 10_000, *([] if quick else [100_000])], repeats),
            **with_rows(root / "rows", [100, 1_000, 10_000, 100_000, *([] if quick else [1_000_000])], repeats),
            **with_knobs([10, 100, 1_000], repeats),
            **with_slots(root / "slots", [1, 4, 16, 64] if quick else [1, 4, 16, 64, 256], 100 if quick else 1_000),
            **with_studies(root / "studies", [1, 10, 100] if quick else [1, 10, 100, 1_000], repeats),
        }  # fmt: skip
    finally:
        shutil.rmtree(root, ignore_errors=True)
    figures: dict[str, Any] = {}
    for name, curve in curves.items():
        bend = bend_of(curve, flat=name in ("record", "slots"))
        shown = "  ".join(f"{size:,}: {1000 * seconds:.4g} ms" for size, seconds in curve.items())
        said = "does not bend" if bend == max(curve) else f"bends at {bend:,}"
        print(f"{name:10} {shown}  ({said})")
        figures[f"{name}_bends_at"] = bend
        figures[f"{name}_{max(curve)}_s"] = round(curve[max(curve)], 6)
    figures["curves"] = {
        name: {str(size): round(seconds, 6) for size, seconds in curve.items()} for name, curve in curves.items()
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
