"""Shared by the tests of `launch`: a stand that builds launch specs and awaits events, and a driver without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from tests.conftest import PATIENCE_S

from looplab.launch.base import Ended, Executor, Exit, LaunchEvent, LaunchSpec, Slot, Started
from looplab.launch.local import LocalExecutor

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


class Stand:
    """A folder for a test's runs, with helpers to start them and await their events."""

    alive = staticmethod(alive)

    def __init__(self, folder: Path, make: Callable[[], Executor]) -> None:
        self.folder = folder
        self._make = make
        self._executors: list[Executor] = []
        self._engines: list[Engine] = []

    def executor(self) -> Executor:
        executor = self._make()
        self._executors.append(executor)
        return executor

    def spec(self, argv: Sequence[str], run_id: str = "r1", **more: Any) -> LaunchSpec:
        run_dir = self.folder / run_id
        run_dir.mkdir(exist_ok=True)
        fields = {"path": argv[0], "cwd": self.folder, "slot": Slot("cpu0"), **more}
        return LaunchSpec(run_id, run_dir, list(argv), **fields)

    @staticmethod
    def python(code: str, *arguments: object) -> list[str]:
        """The argv of a trainer in Python, which starts as fast as it can."""
        return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]

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

    # -- awaiting

    @staticmethod
    def until(condition: Callable[[], T]) -> T:
        """Return the condition's result once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (result := condition()):
            assert time.monotonic() < deadline, "this never came true"
            time.sleep(0.005)
        return result

    @staticmethod
    def events(executor: Executor, enough: Callable[[list[LaunchEvent]], bool]) -> list[LaunchEvent]:
        """Return all events until there are enough."""
        deadline = time.monotonic() + PATIENCE_S
        events: list[LaunchEvent] = []
        while not enough(events):
            assert time.monotonic() < deadline, f"there came only {events}"
            events += executor.poll(1.0)
        return events

    def ends(self, executor: Executor, *run_ids: str) -> dict[str, Exit]:
        """Return how these runs ended, once all of them have."""

        def all_ended(events: list[LaunchEvent]) -> bool:
            return {event.run_id for event in events if isinstance(event, Ended)} >= set(run_ids)

        return {e.run_id: e.exit for e in self.events(executor, all_ended) if isinstance(e, Ended)}

    def end(self, executor: Executor, run_id: str = "r1") -> Exit:
        return self.ends(executor, run_id)[run_id]

    def started(self, executor: Executor, run_id: str = "r1") -> int:
        """Return the pid of the run, once it has started."""

        def was_started(events: list[LaunchEvent]) -> bool:
            return any(isinstance(event, Started) and event.run_id == run_id for event in events)

        events = self.events(executor, was_started)
        assert not any(isinstance(event, Ended) for event in events), events
        pid = next(event.pid for event in events if isinstance(event, Started) and event.run_id == run_id)
        assert pid is not None
        return pid

    def nothing_more(self, executor: Executor) -> None:
        """Assert that the executor reports nothing more."""
        quiet_until = time.monotonic() + 0.1
        while time.monotonic() < quiet_until:
            assert executor.poll(0.02) == []

    # -- looking

    def run(self, argv: Sequence[str], **more: Any) -> Exit:
        """Start a run and return its exit."""
        executor = self.executor()
        executor.start(self.spec(argv, **more))
        return self.end(executor)

    def log(self, run_id: str = "r1") -> str:
        return (self.folder / run_id / "train.log").read_text()

    def file(self, name: str, run_id: str = "r1") -> dict[str, Any]:
        """Return a JSON file of the run, once it exists."""
        path = self.folder / run_id / name
        self.until(path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

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

    # -- leaving nothing behind

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


EXECUTORS: dict[str, Callable[[], Executor]] = {"local": LocalExecutor}


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """A stand with local executors."""
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    stand = Stand(tmp_path, LocalExecutor)
    yield stand
    stand.tidy()


@pytest.fixture(params=EXECUTORS)
def any_stand(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """A stand for each kind of executor, for tests of the contract."""
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    stand = Stand(tmp_path, EXECUTORS[request.param])
    yield stand
    stand.tidy()


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
