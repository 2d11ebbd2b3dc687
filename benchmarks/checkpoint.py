"""What a checkpoint costs a trainer: 10 million parameters with Adam's moments (120 MB), beside a durable torch.save.

    python benchmarks/checkpoint.py [--quick]

The stall is the time until the trainer may go on. For trainkit that is a copy in memory, the file is written beside the
training; torch.save, made durable as trainkit's is (another name, fsync, rename, fsync of the folder), is all stall.
The write is the whole time until the checkpoint is on the disk, for trainkit with its SHA-256. Loading is into memory,
from the page cache; trainkit's default checks the hash, torch.load checks nothing, so trainkit without the check is
shown too. All take turns within one process, so that a noisy machine is noisy for all: medians, and medians of the
ratios within a turn. What was loaded is compared with what was saved. Files go to a temporary folder, or under
$BENCH_DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from looplab import trainkit

LAYERS, WIDTH = 10, 1000


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    began = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - began), result


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 turns instead of 15")
    repeats = 5 if parser.parse_args().quick else 15
    torch.set_num_threads(1)
    model, optimizer = trained()
    times: dict[str, list[float]] = {}

    def note(name: str, milliseconds: float) -> None:
        times.setdefault(name, []).append(milliseconds)

    with tempfile.TemporaryDirectory(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")) as name:
        file = Path(name, "torch.pt")
        with trainkit.Checkpoints(Path(name, "ours"), keep=1) as checkpoints:
            for turn in range(repeats + 1):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                computed = time.thread_time()
                stall, path = timed(lambda state=state, turn=turn: checkpoints.save(state, turn))
                computed = 1000 * (time.thread_time() - computed)  # without the time that others had the core
                rest, _ = timed(checkpoints.wait)
                theirs, _ = timed(
                    lambda state=state: trainkit.atomic_write(file, lambda opened: torch.save(state, opened))
                )
                load, loaded = timed(lambda path=path: trainkit.load(path))
                assert same(loaded.state, state), "what was loaded is not what was saved"
                del loaded
                unchecked, _ = timed(lambda path=path: trainkit.load(path, check=False))
                torch_load, _ = timed(lambda: torch.load(file, weights_only=True))
                if turn == 0:
                    first = stall  # with the buffer made, which later ones use again
                    continue
                note("stall", stall)
                note("stall_cpu", computed)
                note("write", stall + rest)
                note("torch_write", theirs)
                note("load", load)
                note("load_unchecked", unchecked)
                note("torch_load", torch_load)
        size = file.stat().st_size / 1e6

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{size:.0f} MB; median of {repeats} turns; Python {sys.version.split()[0]}, torch {torch.__version__}")
    print(f"stall  trainkit {median['stall']:7.1f} ms   torch.save {median['torch_write']:7.1f} ms", end="")
    print(f"   (trainkit's is {median['stall_cpu']:.1f} ms of CPU; its first, which makes the buffer: {first:.1f} ms)")
    print(f"write  trainkit {median['write']:7.1f} ms   torch.save {median['torch_write']:7.1f} ms")
    print(f"load   trainkit {median['load']:7.1f} ms   unchecked {median['load_unchecked']:7.1f} ms", end="")
    print(f"   torch.load {median['torch_load']:7.1f} ms")
    figures = {
        "ckpt_stall_ms": round(median["stall"], 2),
        "ckpt_stall_cpu_ms": round(median["stall_cpu"], 2),
        "ckpt_stall_first_ms": round(first, 2),
        "write_ms": round(median["write"], 1),
        "load_ms": round(median["load"], 1),
        "load_unchecked_ms": round(median["load_unchecked"], 1),
        "torch_save_ms": round(median["torch_write"], 1),
        "torch_load_ms": round(median["torch_load"], 1),
        "torch_stall_is_longer_by": round(ratio("torch_write", "stall"), 2),
        "write_by_torch_save": round(ratio("write", "torch_write"), 2),
        "load_by_torch_load": round(ratio("load", "torch_load"), 2),
        "load_unchecked_by_torch_load": round(ratio("load_unchecked", "torch_load"), 2),
        "repeats": repeats,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
