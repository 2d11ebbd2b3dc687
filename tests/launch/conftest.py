"""Shared by the tests of `launch`: a harness that builds launch specs and awaits events, and a driver without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from tests.conftest import PATIENCE_S

from looplab.launch.base import Executor, LaunchSpec
from looplab.launch.local import LocalExecutor
from looplab.testing.executors import ExecutorHarness

HERE = Path(__file__).parent
T = TypeVar("T")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Engine:
    """A process that runs an executor, to be killed."""

    process: subprocess.Popen[str]
    pids: dict[str, int] = field(default_factory=dict)
    """The runs that it started."""

    def await_starts(self, n: int) -> None:
        assert self.process.stdout is not None
        while len(self.pids) < n:
            line = self.process.stdout.readline()
            assert line, "the engine ended"
            kind, run_id, pid = json.loads(line)
            if kind == "Started":
                self.pids[run_id] = pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Harness(ExecutorHarness):
    """Local executors, and engines in processes of their own."""

    alive = staticmethod(alive)

    def __init__(self, folder: Path, make: Callable[[], Executor]) -> None:
        super().__init__(folder, make, PATIENCE_S)
        self._engines: list[Engine] = []

    def engine(self, *specs: LaunchSpec, env: dict[str, str] | None = None) -> Engine:
        """Start these runs from an engine in its own process; return once all have started."""
        texts = [json.dumps(asdict(spec), default=str) for spec in specs]
        process = subprocess.Popen(
            [sys.executable, str(HERE / "small_engine.py"), *texts],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        engine = Engine(process)
        self._engines.append(engine)
        engine.await_starts(len(specs))
        return engine

    def pids(self, name: str, n: int = 1) -> list[int]:
        """Return the pids that a trainer wrote to a file, once there are `n`."""
        path = self.folder / name

        def enough() -> list[int]:
            words = path.read_text().split("\n") if path.exists() else []
            return [int(word) for word in words[:-1]] if len(words) > n else []

        return self.until(enough)

    def kill(self, pid: int) -> None:
        """Send SIGKILL and wait until the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.until(lambda: not alive(pid))

    @staticmethod
    def supervisor_of(pid: int) -> int:
        parent = psutil.Process(pid).parent()
        assert parent is not None
        assert any(part.endswith("supervisor.py") for part in parent.cmdline())
        return parent.pid

    def tidy(self) -> None:
        for engine in self._engines:
            engine.kill()
            if engine.process.stdout is not None:
                engine.process.stdout.close()
        for executor in self._executors:
            executor.close()
        mark = f"LOOPLAB_RUN_DIR={self.folder}/".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if any(
                    item.startswith(mark) for item in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                ):
                    os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A harness with local executors."""
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    harness = Harness(tmp_path, LocalExecutor)
    yield harness
    harness.tidy()


@dataclass(frozen=True)
class Driver:
    """A driver whose devices and their processes are listed in a text file."""

    env: dict[str, str]
    """Environment for processes that should see it."""
    table: Path

    def show(self, *devices: Sequence[int]) -> None:
        """Pretend that there are these devices, with these processes on them."""
        lines = [f"GPU-{i:08x} stand-in {' '.join(map(str, pids))}\n" for i, pids in enumerate(devices)]
        temporary = self.table.with_suffix(".new")
        temporary.write_text("".join(lines))
        temporary.replace(self.table)


def build_driver(folder: Path, *flags: str) -> Driver:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in for the NVIDIA driver cannot be built")
    folder.mkdir(parents=True)
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), *flags, str(HERE / "nvml_stand_in.c")]
    subprocess.run(command, check=True)
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    driver = Driver(
        {**env, "LD_LIBRARY_PATH": str(folder), "NVML_STAND_IN": str(folder / "devices")}, folder / "devices"
    )
    driver.show([], [])
    return driver


@pytest.fixture
def nvml(tmp_path: Path) -> Driver:
    """A driver with two idle devices, for subprocesses that get its `env`."""
    return build_driver(tmp_path / "driver")


@pytest.fixture
def old_nvml(tmp_path: Path) -> Driver:
    """The same with the API of an old driver."""
    return build_driver(tmp_path / "driver", "-DOLD_DRIVER")
