"""How long the command takes to answer: `looplab --help`, and `looplab status` on a ledger of 100,000 runs.

    python benchmarks/cli.py [--quick]

Beside them, in the same run, an interpreter that does nothing, and one that imports what a comparable tool imports at
its start where it is installed (Optuna). Medians; the machine is noisy.
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

from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger

LOOPLAB = Path(sys.executable).with_name("looplab")
RUNS = 100_000
LAB = """
study: big
launch: {command: ["true"]}
base: base.json
objective: {metric: score, goal: max}
slots: {count: 4, gpus: none}
"""


def make_lab(folder: Path) -> None:
    """A lab whose ledger holds 100,000 runs, written through the ledger's own calls."""
    (folder / "lab.yaml").write_text(LAB)
    (folder / "base.json").write_text("{}")
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    study = StudyLedger(ledger, "big")
    study.open("score", "max")
    now = time.time()
    with ledger.write():
        study.begin_round()
        for i in range(RUNS):
            run = study.plan(
                round=1, proposal=None, proposer="search", parent=None, base="base.json", reason="to fill the ledger",
                config_hash=f"{i:016x}", devices=1, plan=RunPlan({}),
            )  # fmt: skip
            if i < RUNS - 6:
                study.ended(
                    run.id, status="failed" if i % 50 == 0 else "ok", code=0, signal=None, started=now, ended=now + 60,
                    objective=i % 977 / 977, files={},
                )  # fmt: skip
        study.set_best(run.id, 1.0)
    ledger.close()


def median_s(argv: list[str], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    repeats = 7 if parser.parse_args().quick else 21
    with tempfile.TemporaryDirectory(prefix="looplab-bench-") as folder:
        make_lab(Path(folder))
        rows = {
            "python -c pass": median_s([sys.executable, "-c", "pass"], repeats),
            "looplab --help": median_s([str(LOOPLAB), "--help"], repeats),
            "looplab status, 100,000 runs": median_s([str(LOOPLAB), "status", "--lab", folder], repeats),
        }
        if subprocess.run([sys.executable, "-c", "import optuna"], capture_output=True).returncode == 0:
            rows["python -c 'import optuna'"] = median_s([sys.executable, "-c", "import optuna"], max(3, repeats // 3))
    base = rows["looplab --help"]
    for name, seconds in rows.items():
        print(f"{name:32} {seconds * 1000:8.0f} ms  {seconds / base:6.2f} ×")
    figures = {
        "help_s": round(rows["looplab --help"], 3),
        "status_100k_s": round(rows["looplab status, 100,000 runs"], 3),
        "python_s": round(rows["python -c pass"], 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
