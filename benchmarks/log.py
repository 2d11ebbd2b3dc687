"""What logging costs a trainer: rows a second at 10 scalars a row, beside its peers, and the time to import trainkit.

    python benchmarks/log.py [--quick]

Every peer hands each row to the system before the next one (a flush or a commit), as trainkit does; only wandb and
trackio have no way to do so and write in the background. TensorBoard, wandb, MLflow (into its SQLite store) and trackio
take part where they are installed (`pip install --group bench`). All are measured in turn within the same process, so
that a noisy machine is noisy for all; the figures are medians over the repeats, the ratios medians of the ratios within
a repeat. The scalars are random doubles, 16 to 17 digits each: the slowest to write. Files go to a temporary folder, or
under $BENCH_DIR where that is set.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import logging
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path

from looplab import trainkit

NAMES = [f"train/metric_{number}" for number in range(10)]
ROWS = [{name: random.random() for name in NAMES} for _ in range(1000)]
PORTION = 20
"""Rows between two looks at the clock."""
Write = Callable[[dict[str, float], int], object]


@contextmanager
def trainkit_log(folder: Path) -> Iterator[Write]:
    path = folder / "trainkit.jsonl"
    os.environ["LOOPLAB_METRICS"] = str(path)
    yield trainkit.log
    with path.open() as file:
        for step, line in enumerate(file):
            row = json.loads(line)
            assert row["step"] == step, f"row {step} is missing"
            assert {name: row[name] for name in NAMES} == ROWS[step % len(ROWS)], f"row {step} is not exact"


@contextmanager
def json_flush(folder: Path) -> Iterator[Write]:
    with (folder / "json.jsonl").open("a") as file:

        def write(row: dict[str, float], step: int) -> None:
            file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")
            file.flush()

        yield write


@contextmanager
def csv_flush(folder: Path) -> Iterator[Write]:
    with (folder / "rows.csv").open("a", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "time", *NAMES])

        def write(row: dict[str, float], step: int) -> None:
            writer.writerow([step, time.time(), *row.values()])
            file.flush()

        yield write


@contextmanager
def sqlite_wal(folder: Path) -> Iterator[Write]:
    base = sqlite3.connect(folder / "rows.sqlite", isolation_level=None)
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = NORMAL")
    base.execute(f"CREATE TABLE metrics (step INTEGER, time REAL, {', '.join(f'm{n} REAL' for n in range(10))})")
    insert = f"INSERT INTO metrics VALUES ({', '.join('?' * 12)})"

    def write(row: dict[str, float], step: int) -> None:
        base.execute(insert, (step, time.time(), *row.values()))

    yield write
    base.close()


@contextmanager
def tensorboard(folder: Path) -> Iterator[Write]:
    if importlib.util.find_spec("tensorboardX"):
        from tensorboardX import SummaryWriter
    else:
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(row: dict[str, float], step: int) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    yield write
    writer.close()


@contextmanager
def wandb_offline(folder: Path) -> Iterator[Write]:
    import wandb

    run = wandb.init(mode="offline", dir=str(folder), project="bench", settings=wandb.Settings(silent=True))
    yield run.log
    run.finish()


@contextmanager
def mlflow_sqlite(folder: Path) -> Iterator[Write]:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.set_experiment("bench")
    mlflow.start_run()

    def write(row: dict[str, float], step: int) -> None:
        mlflow.log_metrics(row, step=step)

    yield write
    mlflow.end_run()


@contextmanager
def trackio_local(folder: Path) -> Iterator[Write]:
    os.environ.update(TRACKIO_DIR=str(folder / "trackio"), HF_HUB_OFFLINE="1")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints how to open its dashboard
        import trackio

        trackio.init(project="bench", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    yield lambda row, step: trackio.log(row, step=step)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        trackio.finish()


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


def contestants() -> dict[str, Callable[[Path], AbstractContextManager[Write]]]:
    found = {
        "trainkit.log": trainkit_log,
        "json.dumps + flush": json_flush,
        "csv.writer + flush": csv_flush,
        "sqlite WAL insert": sqlite_wal,
    }
    if installed("tensorboardX") or installed("torch", "tensorboard"):
        found["TensorBoard + flush"] = tensorboard
    if installed("wandb"):
        found["wandb offline, async"] = wandb_offline
    if installed("mlflow", "sqlalchemy", "alembic"):
        found["MLflow, SQLite"] = mlflow_sqlite
    if installed("trackio"):
        found["trackio, async"] = trackio_local
    return found


def speed(write: Write, first: int, seconds: float) -> tuple[float, int]:
    """Rows a second over about `seconds`, and the step after the last."""
    began = now = time.perf_counter()
    step = first
    while now - began < seconds:
        for number in range(step, step + PORTION):
            write(ROWS[number % len(ROWS)], number)
        step += PORTION
        now = time.perf_counter()
    return (step - first) / (now - began), step


def import_times(folder: Path, repeats: int) -> dict[str, float]:
    """Milliseconds: the import as seen inside a fresh interpreter, and what it adds to the life of the process.

    Bytecode is cached, as it is for any installed package.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    timed = "import time; a = time.perf_counter(); from looplab import trainkit; print(time.perf_counter() - a)"

    def run(code: str) -> tuple[float, str]:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
        return 1000 * (time.perf_counter() - began), done.stdout

    for code in ("pass", timed):
        run(code)
    inside, added = [], []
    for _ in range(repeats):
        bare, _ = run("pass")
        whole, _ = run("from looplab import trainkit")
        inside.append(1000 * float(run(timed)[1]))
        added.append(whole - bare)
    return {"import_ms": statistics.median(inside), "import_process_ms": statistics.median(added)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter repeats: under 10 seconds in all")
    options = parser.parse_args()
    repeats, seconds, imports = (5, 0.2, 9) if options.quick else (9, 0.5, 21)

    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        with ExitStack() as stack:
            writers = {peer: stack.enter_context(opened(folder)) for peer, opened in contestants().items()}
            steps = {peer: speed(write, 0, 0.05)[1] for peer, write in writers.items()}  # warm
            for _ in range(repeats):
                for peer, write in writers.items():
                    rate, steps[peer] = speed(write, steps[peer], seconds)
                    speeds.setdefault(peer, []).append(rate)
        startup = import_times(folder, imports)

    print(f"10 scalars a row, each row flushed; median of {repeats} repeats; Python {sys.version.split()[0]}")
    ours = speeds["trainkit.log"]
    peers = {}
    for peer, rates in speeds.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, rates, strict=True))
        peers[peer] = {"rows_per_s": round(statistics.median(rates)), "trainkit_is_faster_by": round(ratio, 2)}
        print(f"{peer:<20} {statistics.median(rates):>9,.0f} rows/s   trainkit is {ratio:5.2f} × as fast")
    print(f"import trainkit: {startup['import_ms']:.1f} ms inside a fresh interpreter, ", end="")
    print(f"{startup['import_process_ms']:.1f} ms of the whole process; median of {imports}")
    figures = {
        "rows_per_s": peers.pop("trainkit.log")["rows_per_s"],
        **{name: round(value, 2) for name, value in startup.items()},
        "repeats": repeats,
        "peers": peers,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
