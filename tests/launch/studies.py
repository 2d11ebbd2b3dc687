"""Studies on an executor, driven by the installed command: engines are killed, and nothing is lost or started twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import PATIENCE_S
from tests.loop.killing import RUNS, check_nothing_lost, make_lab

COMMAND = Path(sys.executable).with_name("looplab")


def make_study(folder: Path, executor: str, *, seconds: float, slots: int) -> Path:
    """A study of 40 runs, each of which notes that it was executed, and takes so many seconds."""
    make_lab(folder)
    trainer = folder / "train.py"
    trainer.write_text(trainer.read_text().replace("0.02 + x % 5 * 0.02", str(seconds)))
    config = folder / "lab.yaml"
    text = config.read_text().replace("count: 2", f"count: {slots}").replace("round_size: 7\n", "")
    config.write_text(f"{text}executor: {executor}\n")
    return folder


def start_engine(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    log = open(folder / "engine.log", "ab")  # noqa: SIM115 (the engine has it)
    return subprocess.Popen([COMMAND, *words, "--lab", str(folder)], stdout=log, stderr=log)


def executed(folder: Path) -> list[str]:
    path = folder / "executed"
    return path.read_text().split() if path.exists() else []


def until(condition: Callable[[], bool], engine: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and engine.poll() is None:
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.01)


def kill_engines(folder: Path, *, kills: int, seed: int) -> None:
    """Kill engines of the study at random moments, let one finish, and check that nothing was lost or run twice."""
    chance = random.Random(seed)
    words: tuple[str, ...] = ("run", "--runs", str(RUNS))
    for _ in range(kills):
        engine = start_engine(folder, *words)
        count = len(executed(folder))
        until(lambda count=count: len(executed(folder)) > count, engine)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.4))
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        words = ("resume",)
    engine = start_engine(folder, *words)
    assert engine.wait(PATIENCE_S) in (0, 1), (folder / "engine.log").read_text()
    check_nothing_lost(folder)
