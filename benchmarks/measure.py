"""What reading metrics costs: W&B and TensorBoard files beside their own readers, and a thousand runs summarised.

    python benchmarks/measure.py [--quick]

The files are written by wandb and tensorboardX themselves, at 10 scalars a row. Readers of the same file are measured
in turn within one process, so that a noisy machine is noisy for all; figures are medians over the repeats, ratios are
medians of the ratios within a repeat, and every reader must have found every point. The files are in memory. They go to
a temporary folder, or under $BENCH_DIR where that is set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from looplab.measure.base import Batch
from looplab.measure.discover import Reader
from looplab.measure.folders import summarise_many
from looplab.measure.jsonl import JsonlSource
from looplab.measure.tensorboard import TensorBoardSource
from looplab.measure.wandb_log import WandbSource

NAMES = [f"train/metric_{number}" for number in range(10)]
RUNS, ROWS = 1000, 1000

WRITE_WANDB = """
import random, sys, wandb
run = wandb.init(project="bench", settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True))
for step in range(int(sys.argv[1])):
    run.log({f"train/metric_{number}": random.random() for number in range(10)})
run.finish()
"""


def count_points(batch: Batch) -> int:
    return sum(len(curve.values) for curve in batch.values())


def timed(read: Callable[[], int], expected: int) -> float:
    began = time.perf_counter()
    found = read()
    seconds = time.perf_counter() - began
    assert found == expected, f"found {found} points of {expected}"
    return seconds


def side_by_side(readers: dict[str, Callable[[], int]], expected: int, repeats: int) -> dict[str, list[float]]:
    """The seconds that each reader took, repeat by repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(repeats):
        for name, read in readers.items():
            seconds[name].append(timed(read, expected))
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(slow, fast, strict=True))


def quiet_wandb(folder: Path) -> dict[str, str]:
    private = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
    switches = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
    }
    return os.environ | private | switches | {"WANDB_DIR": str(folder)}


def by_wandbs_classes(path: Path) -> int:
    """The same file through wandb's own protobuf classes, as short as it goes."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    place, pieces, curves = 7, [], {}
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + 7 : place + 7 + length]
        assert zlib.crc32(piece, zlib.crc32(bytes([kind]))) == checksum
        place += 7 + length
        pieces.append(piece)
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(b"".join(pieces))
            pieces = []
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or ".".join(item.nested_key)
                    if not name.startswith("_"):
                        curves.setdefault(name, []).append(float(json.loads(item.value_json)))
    return sum(map(len, curves.values()))


def by_leet(path: Path, environment: dict[str, str]) -> int:
    """W&B's own viewer, which prints the records as JSON; nobody has parsed them yet."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    out = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    return out.count(b'"type":"history"') * len(NAMES)


def has_leet(environment: dict[str, str]) -> bool:
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--help"]
    return Path(command[0]).exists() and subprocess.run(command, env=environment, capture_output=True).returncode == 0


def bench_wandb(folder: Path, rows: int, repeats: int) -> dict[str, float]:
    if importlib.util.find_spec("wandb") is None:
        print("wandb is not installed: left out")
        return {}
    environment = quiet_wandb(folder)
    subprocess.run([sys.executable, "-c", WRITE_WANDB, str(rows)], env=environment, check=True, cwd=folder)
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    readers: dict[str, Callable[[], int]] = {
        "looplab": lambda: count_points(WandbSource(path).poll()),
        "wandb's protobuf classes": lambda: by_wandbs_classes(path),
    }
    WandbSource(path).poll()
    assert "wandb" not in sys.modules, "looplab reads without wandb"
    by_wandbs_classes(path)
    if has_leet(environment):
        readers["wandb leet inspect --json"] = lambda: by_leet(path, environment)
    seconds = side_by_side(readers, rows * len(NAMES), repeats)
    table(f"W&B file, {rows} rows of 10 scalars", "rows/s", seconds, rows)
    figures = {
        "wandb_rows_per_s": rows / statistics.median(seconds["looplab"]),
        # There is one way of reading, and it does not use wandb.
        "wandb_pure_rows_per_s": rows / statistics.median(seconds["looplab"]),
        "wandb_x_protobuf_classes": ratio(seconds["wandb's protobuf classes"], seconds["looplab"]),
    }
    if "wandb leet inspect --json" in seconds:
        figures["wandb_x_leet"] = ratio(seconds["wandb leet inspect --json"], seconds["looplab"])
    return figures


def bench_tensorboard(folder: Path, rows: int, repeats: int) -> dict[str, float]:
    if importlib.util.find_spec("tensorboard") is None or importlib.util.find_spec("tensorboardX") is None:
        print("tensorboard and tensorboardX are not installed: left out")
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboardX import SummaryWriter

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    writer = SummaryWriter(str(folder))
    for step in range(rows):
        for name in NAMES:
            writer.add_scalar(name, random.random(), step)
    writer.close()
    (path,) = folder.glob("events.*")

    def accumulate() -> int:
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        return sum(len(accumulator.Scalars(tag)) for tag in accumulator.Tags()["scalars"])

    readers = {"looplab": lambda: count_points(TensorBoardSource(path).poll()), "EventAccumulator": accumulate}
    seconds = side_by_side(readers, rows * len(NAMES), repeats)
    table(f"TensorBoard file, {rows} rows of 10 events", "events/s", seconds, rows * len(NAMES))
    return {
        "tb_events_per_s": rows * len(NAMES) / statistics.median(seconds["looplab"]),
        "tb_x_event_accumulator": ratio(seconds["EventAccumulator"], seconds["looplab"]),
    }


def make_runs(folder: Path) -> list[Path]:
    """Runs of 1,000 rows; each is a copy of one with some of the digits changed."""
    rows = [{"step": step, "time": 1.7e9 + step, **{name: random.random() for name in NAMES}} for step in range(ROWS)]
    template = "".join(json.dumps(row) + "\n" for row in rows)
    run_dirs = []
    for number in range(RUNS):
        run_dir = folder / f"{number:04d}"
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text(template.replace('_0": 0.', f'_0": 0.{number}'))
        (run_dir / "train.log").write_text("done\n")
        run_dirs.append(run_dir)
    return run_dirs


def bench_jsonl(path: Path, repeats: int) -> dict[str, float]:
    def by_json() -> int:
        curves: dict[str, list[float]] = {}
        with path.open() as file:
            for line in file:
                for name, value in json.loads(line).items():
                    if name not in ("step", "time"):
                        curves.setdefault(name, []).append(value)
        return sum(map(len, curves.values()))

    readers = {"looplab": lambda: count_points(JsonlSource(path).poll()), "json.loads": by_json}
    seconds = side_by_side(readers, ROWS * len(NAMES), repeats * 5)
    table(f"metrics.jsonl, {ROWS} rows of 10 scalars", "rows/s", seconds, ROWS)
    return {
        "jsonl_rows_per_s": ROWS / statistics.median(seconds["looplab"]),
        "jsonl_x_json_loads": ratio(seconds["json.loads"], seconds["looplab"]),
    }


def bench_summaries(run_dirs: list[Path], repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        summaries = summarise_many(run_dirs)
        seconds.append(time.perf_counter() - began)
        assert all(summary["train/metric_9"].n == ROWS for summary in summaries.values())
    table(f"{RUNS} runs of {ROWS} rows of 10 scalars summarised", "runs/s", {"looplab": seconds}, RUNS)
    return {"summarise_cold_s": statistics.median(seconds)}


def bench_empty_reader(folder: Path) -> dict[str, float]:
    """What a run that measures nothing pays: a reader made and polled once."""
    (folder / "record").mkdir()
    for name in ("run.json", "config.json", "train.log"):
        (folder / "record" / name).write_text("")
    seconds = []
    for _ in range(500):
        began = time.perf_counter()
        Reader(folder).poll()
        seconds.append(time.perf_counter() - began)
    return {"empty_reader_us": statistics.median(seconds) * 1e6}


def table(title: str, unit: str, seconds: dict[str, list[float]], count: int) -> None:
    print(f"\n{title}\n  {'':<28}{'seconds':>10}{unit:>14}{'of the first':>14}")
    first = seconds[next(iter(seconds))]
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"  {name:<28}{median:>10.3f}{count / median:>14,.0f}{1 / ratio(times, first):>13.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter files and fewer repeats; the runs stay 1,000")
    quick = parser.parse_args().quick
    repeats = 3 if quick else 7
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as root:
        folders = [Path(root) / name for name in ("wandb", "tensorboard", "empty", "runs")]
        for folder in folders:
            folder.mkdir()
        figures |= bench_wandb(folders[0], 4_000 if quick else 20_000, repeats)
        figures |= bench_tensorboard(folders[1], 2_000 if quick else 10_000, repeats)
        figures |= bench_empty_reader(folders[2])
        run_dirs = make_runs(folders[3])
        figures |= bench_jsonl(run_dirs[0] / "metrics.jsonl", repeats)
        figures |= bench_summaries(run_dirs, 2 if quick else 3)
    print()
    print(json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main()
