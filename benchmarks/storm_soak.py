"""Two classes of storm.py: a study that goes through all kinds of misfortune, one after the other.

`soak` has a small budget of runs and ends when it is used. `endurance` is a continuous study that lasts as long as the
storm, beside the other attacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm import Storm

RUNS = 30
MOST_HANDLES = 150
"""Open files of an engine; it needs a tenth of that."""
MOST_MB = 600.0
"""Memory of an engine; it needs a third of that, most of it for modules that this process has imported."""
MANY_CONFIGS = 1_000_000
"""Values of the knob in a study that must not run out of configs."""
CLONE_NEWNS = 0x20000
AGENT = """\
import json, os, random, sys, time
sys.stdin.read()
time.sleep(random.random() * 0.4)
edits = [f"x@set={random.randrange(%d)}"]
print(json.dumps({"proposals": [{"edits": edits, "reason": "a guess", "hypothesis": "it falls", "parent": ""}]}))
"""
ADVERSE = """\
/* A slow disk: each call waits. A clock that jumps: from a moment of the monotonic clock on, it is wrong. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
static void wait_for_disk(void) {
    const char *text = getenv("STORM_SLOW_US");
    if (text) usleep((useconds_t)atol(text));
}
#define SLOW(result, name, parameters, arguments) \\
    result name parameters { \\
        static result (*real) parameters; \\
        if (!real) real = (result (*) parameters)dlsym(RTLD_NEXT, #name); \\
        wait_for_disk(); \\
        return real arguments; \\
    }
SLOW(int, fsync, (int fd), (fd))
SLOW(int, fdatasync, (int fd), (fd))
SLOW(int, rename, (const char *a, const char *b), (a, b))
SLOW(int, mkdir, (const char *path, mode_t mode), (path, mode))
SLOW(ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    const char *from = getenv("STORM_JUMP_FROM"), *by = getenv("STORM_JUMP_BY");
    if (!failed && clock == CLOCK_REALTIME && from && by) {
        struct timespec monotonic;
        real(CLOCK_MONOTONIC, &monotonic);
        if ((double)monotonic.tv_sec + monotonic.tv_nsec / 1e9 >= atof(from)) now->tv_sec += atol(by);
    }
    return failed;
}
"""


class Soak:
    """The study, its engine if one runs, and what was done to it."""

    def __init__(self, storm: Storm, *, disk_mb: int = 16, options: tuple[str, ...] = ()) -> None:
        self.storm = storm
        self.disk_mb, self.options = disk_mb, options
        self.rng = storm.rng
        self.outputs = storm.lab / "outputs"
        self.engine: int | None = None
        self.log = Path()
        self.deleted: set[str] = set()
        """Ended runs whose folders were deleted."""
        self.adverse = self._compile()
        self.disk = self._mount()

    def _compile(self) -> Path | None:
        """Build the library for slow disks and wrong clocks; None: there is no C compiler."""
        source, library = self.storm.folder / "adverse.c", self.storm.folder / "adverse.so"
        source.write_text(ADVERSE)
        compiler = shutil.which("cc")
        if compiler is None:
            return None
        built = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"])
        return library if built.returncode == 0 else None

    def _mount(self) -> bool:
        """Give the outputs a small disk of their own, which only this process and its children see."""
        self.outputs.mkdir()
        if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
            return False
        commands = (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={self.disk_mb}m", "none", str(self.outputs)])
        return all(subprocess.run(["mount", *words], capture_output=True).returncode == 0 for words in commands)

    def unmount(self) -> None:
        if self.disk:
            subprocess.run(["umount", "-l", str(self.outputs)], capture_output=True)

    # -- the engine

    def start_engine(self) -> None:
        env = {}
        if self.adverse is not None and self.rng.random() < 0.4:
            env["LD_PRELOAD"] = str(self.adverse)
            if self.rng.random() < 0.5:
                env["STORM_SLOW_US"] = str(self.rng.choice([1_000, 5_000, 20_000]))
            else:
                env["STORM_JUMP_FROM"] = str(time.monotonic() + self.rng.random() * 2)
                env["STORM_JUMP_BY"] = str(self.rng.choice([-86_400 * 400, -3_600, -30, 30, 7_200, 86_400 * 40]))
        self.engine, self.log = self.storm.start("run", *self.options, **env)

    def is_alive(self) -> bool:
        if self.engine is None:
            return False
        done, status = os.waitpid(self.engine, os.WNOHANG)
        if done:
            self._ended(os.waitstatus_to_exitcode(status))
        return self.engine is not None

    def wait(self) -> None:
        if self.engine is not None:
            self._ended(self.storm.end(self.engine))

    def _ended(self, code: int) -> None:
        self.engine = None
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        if "Traceback (most recent call last)" in text or code not in (0, 1, 3, -signal.SIGKILL):
            self.storm.fail("wedged", f"the engine: exit {code}: {text[-400:]}")

    def processes(self, name: str) -> list[int]:
        """The pids under this name in the records of runs that have not ended."""
        found = set()
        for path in self.outputs.glob("toy/*/record/process.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                if not path.with_name("exit.json").exists():
                    found.add(int(json.loads(path.read_text())[name]))
        return sorted(found)

    # -- misfortunes

    def kill_engine(self) -> None:
        if self.is_alive() and self.engine is not None:
            os.kill(self.engine, signal.SIGKILL)
            self.wait()

    def kill_supervisor(self) -> None:
        self._kill(self.processes("supervisor"))

    def kill_training(self) -> None:
        self._kill(self.processes("pid"))

    def kill_agent(self) -> None:
        agent = str(self.storm.lab / "agent.py")
        self._kill([pid for pid in self.storm.with_argument(agent) if pid != self.engine])

    def _kill(self, pids: list[int]) -> None:
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(pids), signal.SIGKILL)

    def kill_page(self) -> None:
        """Open the page, read from it, and kill it in the middle."""
        pid, log = self.storm.start("ui", "--no-open", "--json")
        try:
            until = time.monotonic() + 30
            while time.monotonic() < until and not (log.exists() and log.read_text().strip().endswith("}")):
                time.sleep(0.02)
            with contextlib.suppress(ValueError, KeyError, OSError, urllib.error.URLError):
                address = json.loads(log.read_text())["url"]
                with urllib.request.urlopen(address, timeout=10) as answer:
                    answer.read()
        finally:
            os.kill(pid, signal.SIGKILL)
            self.storm.end(pid)
        if "Traceback (most recent call last)" in log.read_text(errors="replace"):
            self.storm.fail("wedged", f"the page: {log.read_text()[-400:]}")

    def fill_disk(self) -> None:
        if not self.disk:
            return
        filler = self.outputs / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65_536)
        time.sleep(self.rng.random())
        filler.unlink()

    def delete_folder(self) -> None:
        """Delete the folder of a run, ended or not."""
        folders = sorted(path for path in self.outputs.glob("toy/[0-9]*") if path.is_dir())
        if not folders:
            return
        chosen = self.rng.choice(folders)
        if (chosen / "record/summary.json").exists():
            self.deleted.add(chosen.name)
        shutil.rmtree(chosen, ignore_errors=True)

    def read(self) -> None:
        self.storm.call(*self.rng.choice([("status",), ("show",), ("logs",), ("verify",), ("query", "select 1")]))

    def misfortunes(self) -> list[Callable[[], None]]:
        return [
            self.kill_engine, self.kill_engine, self.kill_supervisor, self.kill_training, self.kill_training,
            self.kill_agent, self.kill_page, self.fill_disk, self.delete_folder, self.read,
        ]  # fmt: skip

    # -- the end

    def check_use(self) -> None:
        """An engine has few handles, and does not grow without end."""
        if not self.is_alive():
            return
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (handles := len(os.listdir(f"/proc/{self.engine}/fd"))) > MOST_HANDLES:
                self.storm.fail("wedged", f"the engine has {handles} open files")
            pages = int(Path(f"/proc/{self.engine}/statm").read_text().split()[1])
            if (megabytes := pages * os.sysconf("SC_PAGE_SIZE") / 1e6) > MOST_MB:
                self.storm.fail("wedged", f"the engine has {megabytes:.0f} MB")

    def check(self, least: int = RUNS) -> None:
        """All that was started is in the ledger, once, and has ended; the chain is whole; no clock ran backwards."""
        storm = self.storm
        storm.call("run", codes=(0, 1))
        for _ in range(2):
            storm.call("resume", codes=(0, 1))
        storm.check_started()
        with contextlib.closing(sqlite3.connect(storm.lab / ".looplab/ledger.db")) as db:
            rows = db.execute("SELECT id, n, state, started, ended FROM runs WHERE study='toy'").fetchall()
        if missing := set(storm.started) - {row[0] for row in rows}:
            storm.fail("lost", f"not in the ledger: {sorted(missing)}")
        if len({row[1] for row in rows}) != len(rows):
            storm.fail("twice", "a number was given twice")
        if left := [row[0] for row in rows if row[2] != "ended"]:
            storm.fail("lost", f"not ended: {left}")
        if backwards := [row[0] for row in rows if row[3] and row[4] and row[4] < row[3]]:
            storm.fail("wedged", f"ended before they started: {backwards}")
        if len(rows) < least:
            storm.fail("lost", f"the study ended after {len(rows)} of {least} runs")
        said = storm.call("verify", codes=(0, 1))
        unnamed = sorted(run for run in self.deleted if run not in said)
        if unnamed:
            storm.fail("lost", f"deleted, and verify does not say so: {unnamed}")
        if "chain is broken" in said:
            storm.fail("lost", said[-400:])
        storm.check_outside()


def soak(storm: Storm) -> None:
    """Kills of engine, supervisor, trainings, page and agent, a full and a slow disk, wrong clocks, deleted folders."""
    storm.extra = f"import time; time.sleep({storm.rng.choice([0.1, 0.3])})\n"
    _build(storm, configs=101, budget={"runs": RUNS}, round_size=4)
    with _closing(Soak(storm)) as study:
        for _ in range(storm.rng.randrange(8, 20)):
            _strike(study)
        study.wait()
        study.check()


def endurance(storm: Storm) -> None:
    """A continuous study that suffers all of this for as long as the storm lasts."""
    until = time.monotonic() + 0.9 * storm.seconds  # the rest is for looking at what is left of it
    storm.extra = "import time; time.sleep(0.5)\n"
    knobs = {"x": {"type": "int", "low": 0, "high": MANY_CONFIGS}, "note": {"type": "str"}}
    _build(storm, configs=MANY_CONFIGS, knobs=knobs)
    with _closing(Soak(storm, disk_mb=16 + int(0.2 * storm.seconds), options=("--continuous",))) as study:
        while time.monotonic() < until:
            _strike(study)
        storm.call("stop", "--drain")
        study.wait()
        with contextlib.closing(sqlite3.connect(storm.lab / ".looplab/ledger.db")) as db:
            (count,) = db.execute("SELECT count(*) FROM runs").fetchone()
        lab = json.loads((storm.lab / "lab.yaml").read_text())
        (storm.lab / "lab.yaml").write_text(json.dumps({**lab, "budget": {"runs": count + 2}}))
        study.check(least=max(3, int(storm.seconds / 20)))


def _build(storm: Storm, *, configs: int, **settings: Any) -> None:
    agent = {"cli": "command", "command": [sys.executable, "-S", str(storm.lab / "agent.py")], "wall": 60, "tries": 2,
             "call_retries": 1, "backoff": 0.01}  # fmt: skip
    storm.build(queue=12, proposers=[{"queue": "queue.json"}, {"agent": agent}], **settings)
    (storm.lab / "agent.py").write_text(AGENT % configs)


def _strike(study: Soak) -> None:
    """Wait for a moment with an engine running, then do one of the misfortunes."""
    if not study.is_alive():
        study.start_engine()
    time.sleep(study.rng.random())
    study.rng.choice(study.misfortunes())()
    study.check_use()


@contextlib.contextmanager
def _closing(study: Soak) -> Iterator[Soak]:
    try:
        yield study
    finally:
        if study.engine is not None:
            os.killpg(study.engine, signal.SIGKILL)
            os.waitpid(study.engine, 0)
        study.unmount()
