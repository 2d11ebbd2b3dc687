"""A small lab in a folder of its own, and the installed command, run as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.config.state import state_folder

COMMAND = Path(sys.executable).with_name("looplab")

TRAINER = '''\
"""Trains nothing, but behaves like something that does; `seen.json` holds what it saw."""
import json, os, sys, time

start = time.monotonic()
with open(os.environ["LOOPLAB_CONFIG"]) as file:
    config = json.load(file)
run_dir, lab = os.environ["LOOPLAB_RUN_DIR"], os.environ["LOOPLAB_LAB"]


def wait_for(ready):
    while not ready():
        if time.monotonic() > start + 600:
            sys.exit("waited too long")
        time.sleep(0.01)


print("lr is", config["train"]["lr"], flush=True)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    for step in range(1, config["steps"] + 1):
        print(json.dumps({"step": step, "loss": abs(config["train"]["lr"] - 0.3) + 1 / step}), file=file, flush=True)
if config["meet"]:  # as many as this must be at work at the same time
    open(os.path.join(lab, f"here-{os.environ['LOOPLAB_RUN_ID']}"), "w").close()
    wait_for(lambda: sum(name.startswith("here-") for name in os.listdir(lab)) >= config["meet"])
if config["wait"]:  # until this file is there
    wait_for(lambda: os.path.exists(os.path.join(lab, config["wait"])))
time.sleep(config["sleep"])
seen = {
    "argv": sys.argv[1:],
    "env": dict(os.environ),
    "cwd": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
    "start": start,
    "end": time.monotonic(),
}
with open(os.path.join(run_dir, "seen.json"), "w") as file:
    json.dump(seen, file)
print("the end", flush=True)
sys.exit(config["exit"])
'''

BASE = {"train": {"lr": 0.1, "batch": 32}, "steps": 3, "sleep": 0.0, "wait": "", "meet": 0, "exit": 0}

STUDY: dict[str, Any] = {
    "study": "toy",
    "launch": {"command": ["{python}", "-S", "train.py"], "grace": 5},
    "base": "configs/base.json",
    "modes": {"quick": ["steps@set=1"]},
    "objective": {"metric": "loss", "goal": "min"},
    "knobs": {
        "train.lr": {"type": "float", "low": 0.001, "high": 1, "log": True},
        "train.batch": {"type": "int", "low": 1, "high": 256},
        "sleep": {"type": "float", "low": 0},
        "wait": {"type": "str"},
        "exit": {"type": "int"},
    },
    "slots": {"count": 2, "gpus": "none"},
}


RECORDED = {
    "run.json", "config.json", "process.json", "exit.json", "summary.json", "train.log", "notes.md", "metrics.parquet",
}  # fmt: skip
"""What looplab itself writes about a run."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Running:
    """A running command."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._out = out
        self._err = err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def error(self) -> str:
        return self._err.read_text()

    def send(self, number: int) -> None:
        """To the whole process group, as a terminal does."""
        os.killpg(self.pid, number)

    def ended(self, code: int | None = 0) -> Done:
        found = self.process.wait(PATIENCE_S)
        return checked(Done(found, self.out, self.error), code)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, argv: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        os.set_blocking(self.master, False)
        self._shown = b""

    @property
    def shown(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):  # EIO: nobody writes to it any more
            while data := os.read(self.master, 65536):
                self._shown += data
        return self._shown.decode(errors="replace")

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def ended(self) -> int:
        until(lambda: self.shown is not None and self.process.poll() is not None, "the end of a command")
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the window: everybody who belongs to it is told."""
        os.close(self.master)
        self.master = -1

    def clear_away(self) -> None:
        if self.master >= 0:
            os.close(self.master)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def checked(done: Done, code: int | None) -> Done:
    assert "Traceback" not in done.err, done.err
    assert code is None or done.code == code, f"exit {done.code}\n{done.out}\n{done.err}"
    return done


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; gives what it gave."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited in vain for {what}")
        time.sleep(0.01)
    return found


def file_of(run: Path, name: str) -> Path:
    return run / "record" / name if name in RECORDED else run / name


class LabFolder:
    """A lab on the disk, with the words to work on it."""

    command = COMMAND

    def __init__(self, folder: Path, aside: Path) -> None:
        self.folder = folder
        self.aside = aside
        """For what does not belong to the lab: output, locks, a home."""
        self.study: dict[str, Any] = dict(STUDY)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("LOOPLAB_", "CUDA_", "COV_", "PYTEST_"))}
        self.env |= {"HOME": str(aside), "LOOPLAB_LOCK_DIR": str(aside / "locks"), "PYTHONHASHSEED": "0"}
        self._started: list[Running] = []
        self._terminals: list[Terminal] = []
        aside.mkdir(parents=True)
        (folder / "configs").mkdir(parents=True)
        self.write("train.py", TRAINER)
        self.base()
        self.configure()

    # -- its files

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def base(self, name: str = "configs/base.json", **changes: Any) -> Path:
        """Write a base config; `train={"lr": 1}` changes only the learning rate."""
        config: dict[str, Any] = {**BASE, **changes, "train": {**BASE["train"], **changes.get("train", {})}}  # type: ignore[dict-item]
        return self.write(name, json.dumps(config, indent=2) + "\n")

    def configure(self, **changes: Any) -> None:
        """Write `lab.yaml`, a line for each key; None leaves a key out."""
        self.study = {key: value for key, value in {**self.study, **changes}.items() if value is not None}
        self.write("lab.yaml", "".join(f"{key}: {json.dumps(value)}\n" for key, value in self.study.items()))

    def queue(self, *edits: str | list[str], reason: str = "", parent: str | None = None) -> None:
        """Write the queue's file, an entry for each edit (or list of edits), and put it in `lab.yaml`."""
        entries = [[edit] if isinstance(edit, str) else edit for edit in edits]
        lines = [
            json.dumps({"edits": entry, "reason": reason or f"try {n}"} | ({"parent": parent} if parent else {}))
            for n, entry in enumerate(entries, 1)
        ]
        self.write("queue.yaml", "proposals:\n" + "".join(f"  - {line}\n" for line in lines))
        self.configure(proposers=[{"queue": "queue.yaml"}])

    def line(self, key: str) -> int:
        """The line of a key in `lab.yaml`."""
        lines = (self.folder / "lab.yaml").read_text().splitlines()
        return next(n for n, line in enumerate(lines, 1) if line.startswith(f"{key}:"))

    def open_gate(self, name: str = "gate") -> None:
        self.write(name, "")

    def tree(self) -> dict[str, tuple[int, bytes]]:
        """Every file below the lab, with its time and its bytes."""
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mtime_ns, path.read_bytes())
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    # -- its runs

    def outputs(self, study: str = "toy") -> Path:
        return self.folder / "outputs" / study

    def runs(self, study: str = "toy") -> list[Path]:
        """The run folders, oldest first."""
        return sorted(path.parents[1] for path in self.outputs(study).glob("[0-9]*/record/run.json"))

    def read(self, run: Path, name: str) -> Any:
        """A JSON file of the run: of its record, or of the trainer."""
        return json.loads(file_of(run, name).read_text())

    def all(self, name: str, study: str = "toy") -> list[Any]:
        """A JSON file of every run that has it, oldest run first."""
        return [self.read(run, name) for run in self.runs(study) if file_of(run, name).exists()]

    def ask(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """What the ledger says; nothing as long as there is none."""
        path = state_folder(self.folder) / "ledger.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as db:
            try:
                return db.execute(sql, parameters).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return []
                raise

    def count(self, **wanted: Any) -> int:
        """How many runs are like this: `count(state="running")`."""
        where = " AND ".join(f"{key}=?" for key in wanted) or "1"
        rows = self.ask(f"SELECT count(*) FROM runs WHERE {where}", *wanted.values())
        return int(rows[0][0]) if rows else 0

    def until_at_work(self, n: int = 1) -> None:
        """Wait until so many trainings have begun to measure."""

        def at_work() -> bool:
            self.check_started()
            begun = [(run / "metrics.jsonl").exists() and not file_of(run, "exit.json").exists() for run in self.runs()]
            return sum(begun) >= n

        until(at_work, f"{n} running training(s)")

    def until_ended(self, n: int) -> None:
        def ended() -> bool:
            self.check_started()
            return self.count(state="ended") >= n

        until(ended, f"the end of {n} run(s)")

    def check_started(self) -> None:
        """There is no point in waiting for what a command does that has failed."""
        for running in self._started:
            assert not running.process.poll(), running.error

    # -- the command

    def __call__(
        self, *args: str | Path, code: int | None = 0, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Done:
        """Run the command to its end, in a pipe, and check its exit code (None: any)."""
        done = subprocess.run(
            [COMMAND, *map(str, args)],
            cwd=cwd or self.folder,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return checked(Done(done.returncode, done.stdout, done.stderr), code)

    def start(
        self,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        wrapper: Sequence[str] = (),
    ) -> Running:
        """Start the command and return at once; its output goes to a file, or to the descriptor `stdout`.

        `wrapper` is a command that becomes this one.
        """
        n = len(self._started)
        out, err = self.aside / f"out{n}", self.aside / f"err{n}"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [*wrapper, COMMAND, *map(str, args)],
                cwd=self.folder,
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out_file if stdout is None else stdout,
                stderr=err_file,
                start_new_session=True,
            )
        self._started.append(Running(process, out, err))
        return self._started[-1]

    def terminal(self, *args: str | Path, program: str | Path = COMMAND) -> Terminal:
        """Start the command in a terminal."""
        self._terminals.append(Terminal([str(program), *map(str, args)], self.folder, self.env))
        return self._terminals[-1]

    def engine(self, study: str = "toy") -> int | None:
        """The pid of the running engine, as `status` reports it."""
        facts = self("status", "--study", study, "--json").json()
        pid: int | None = facts["studies"][0]["engine"]
        return pid

    def clear_away(self) -> None:
        """End processes that a failed test may have left running."""
        for terminal in self._terminals:
            terminal.clear_away()
        for running in self._started:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
        mark = os.fsencode(f"LOOPLAB_LAB={self.folder}")
        home = os.fsencode(f"HOME={self.aside}")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    if mark in environ or home in environ:
                        os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def maker(folder: Path) -> Iterator[Callable[[str], LabFolder]]:
    made: list[LabFolder] = []

    def make(name: str = "lab") -> LabFolder:
        made.append(LabFolder(folder / name, folder / f"beside-{name}"))
        return made[-1]

    yield make
    for lab in made:
        lab.clear_away()


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[Callable[[str], LabFolder]]:
    """Makes labs, where a test needs several."""
    with maker(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LabFolder]]:
    """Makes labs that the tests of one file only look at."""
    with maker(tmp_path_factory.mktemp("shared")) as make:
        yield make


@pytest.fixture
def lab(make_lab: Callable[[str], LabFolder]) -> LabFolder:
    """A lab with one base config, two slots, and a trainer that takes a few milliseconds."""
    return make_lab("lab")


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], Any], str], Any]:
    return until
