"""A training that is killed at any moment and restarted ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

TRAINER = Path(__file__).with_name("trainer.py")
KINDS = ("ppo", "ppo-overlap", "impala-per", "impala-per-overlap", "ppo-memory")
STEPS = 4 * 16 * 40


class Server:
    """Starts trainings quickly, by forking."""

    def __init__(self) -> None:
        argv = [sys.executable, str(TRAINER), "serve"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, out: Path, kind: str, workers: int = 0) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        out.mkdir(exist_ok=True)
        self.process.stdin.write(f"{out} {kind} {STEPS} {workers}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def finish(self, out: Path, kind: str) -> dict[str, str]:
        return result(self.start(out, kind), out)


def result(pid: int, out: Path) -> dict[str, str]:
    while alive(pid):
        time.sleep(0.01)
    written: dict[str, str] = json.loads((out / "result.json").read_text())
    return written


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.kill()
    server.process.wait()


def killed_until_done(server: Server, out: Path, kind: str, kills: int, seed: int) -> dict[str, str]:
    """Kill a training at random moments after its first row, then let it finish."""
    rng = random.Random(seed)
    for _ in range(kills):
        rows = len(lines(out))
        pid = server.start(out, kind)
        while alive(pid) and len(lines(out)) <= rows:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.5)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.002)
    return server.finish(out, kind)


def lines(out: Path) -> list[str]:
    path = out / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_resumes_exactly(kind: str, tmp_path: Path, server: Server) -> None:
    whole = server.finish(tmp_path / "whole", kind)
    assert killed_until_done(server, tmp_path / "killed", kind, kills=2, seed=1) == whole


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_fifty_kills_change_nothing(kind: str, tmp_path: Path, server: Server) -> None:
    whole = server.finish(tmp_path / "whole", kind)
    for seed in range(13):
        assert killed_until_done(server, tmp_path / f"killed{seed}", kind, kills=1, seed=seed) == whole


@pytest.mark.slow
def test_a_signal_saves_and_sets_the_exit_code(tmp_path: Path, server: Server) -> None:
    whole = server.finish(tmp_path / "whole", "ppo")
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, str(TRAINER), str(out), "ppo", str(STEPS), "0"])
    while not lines(out):
        time.sleep(0.005)
    process.terminate()
    assert process.wait(PATIENCE_S) == 143
    assert (out / "checkpoints" / "latest").exists()
    assert server.finish(out, "ppo") == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "impala-per-overlap"])
def test_killed_workers_change_nothing(kind: str, tmp_path: Path, server: Server) -> None:
    whole = server.finish(tmp_path / "whole", kind)
    out = tmp_path / "out"
    pid = server.start(out, kind, workers=2)
    rng = random.Random(0)
    kills = 0
    while alive(pid) and not (lines(out) and children(pid)):
        time.sleep(0.002)
    while alive(pid) and kills < 6:
        workers, logged = sorted(children(pid)), len(lines(out))
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
                kills += 1
        # Two kills during one replay end the episode, as documented: wait until the training has gone on.
        while alive(pid) and len(lines(out)) == logged:
            time.sleep(0.002)
        time.sleep(0.02 * rng.random())
    assert kills
    assert result(pid, out) == whole


def children(pid: int) -> set[int]:
    try:
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()
