"""One worker as the vector env sees it: a process, two pipes to it, and all that it takes to start it again.

Nobody here waits for ever: a worker that makes no progress is asked for its stacks and then lost, as is one that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import numpy as np

from looplab.rl.diagnostics import SlowStepDetector, WorkerReport, rss_bytes
from looplab.rl.group import NOTHING, Order
from looplab.rl.shared import (
    ASLEEP,
    AWAITED,
    BUILDING,
    COUNT,
    DONE,
    ENV,
    IDLE,
    ORDER,
    PHASE,
    PHASES,
    RESETTING,
    SECONDS,
    Fence,
    Linger,
)
from looplab.rl.worker import BUILT, KINDS, LENGTH, LETTER, MESSAGE, WAKE, Fd, Start, pack, serve

TICK = 0.1
"""Seconds between looks at a worker that has not answered yet."""
MOMENT = 50e-6
"""Seconds before we sleep over an answer; meanwhile a worker may run in our place, and need not wake us after it."""
GRACE = 0.5
"""Seconds that workers have to close their environments, and to write their stacks."""
DYING = 10.0
"""Seconds that a worker may take to end after it has closed its pipe: longer on a busy machine, or for a core dump."""
UNTESTED = "not tested before the first reset"


class Lost(Exception):
    """A worker is gone, or has to go."""

    def __init__(self, kind: Literal["error", "crash", "hang"], reason: str, env: int | None, phase: int, trace: str):
        super().__init__(reason)
        self.kind, self.reason, self.env, self.phase, self.trace = kind, reason, env, phase, trace


class WorkerProcess:
    """One worker as its parent sees it: a process, two pipes, and what it takes to make it again."""

    def __init__(
        self,
        index: int,
        first: int,
        end: int,
        context: str,
        deadlines: tuple[float, float],
        slow_step: float | None,
        slow: SlowStepDetector,
    ) -> None:
        self.index, self.first, self.end = index, first, end
        self.plan: tuple[Any, ...] = ()
        self.cell: Any = None
        self.exact: str | None = UNTESTED
        """None if its snapshots are exact, otherwise why there are none."""
        self.base: bytes | None = None
        """Its last snapshot; None stands for environments as they were built."""
        self.base_at: int | None = 0
        """How many orders had been done then; None if what came since is too long."""
        self.anew: list[int] | None = None
        """Seeds for a reset that comes before everything in the log."""
        self.restarts = self.replayed = self.slow_steps = 0
        self.reasons: deque[str] = deque(maxlen=20)
        self.times: deque[float] = deque()
        self.stack_folder: Path | None = None
        self._context = multiprocessing.get_context(context)
        self._reset_deadline, self._step_deadline = deadlines
        self._slow_step, self._slow = slow_step, slow
        self._process: Any = None
        self._built = self._given = 0
        self._order = -1.0
        self._done = 0.0
        self._fence, self._linger = Fence(), Linger(MOMENT)
        self._chance = int(np.random.SeedSequence().generate_state(1)[0])
        self._poll = select.poll()
        self._stacks = os.memfd_create(f"looplab-stacks-{index}")
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)

    def start(self) -> None:
        """A new process, which builds the environments and then says what they are."""
        workers, num_envs, makers, mode, fields, memory = self.plan
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._orders, False)
        os.ftruncate(self._stacks, 0)
        self._built = self._given = 0
        if self.cell is not None:
            self.cell[PHASE], self.cell[ASLEEP], self.cell[DONE] = BUILDING, 0.0, 0.0
        forked = self._context.get_start_method() == "fork"
        start = Start(
            self.index, workers, self.first, num_envs, makers, mode, fields, Fd(orders), Fd(answers), Fd(memory),
            Fd(self._stacks), (self._orders, self._answers) if forked else (), self._chance,
        )  # fmt: skip
        self._process = self._context.Process(  # type: ignore[attr-defined]
            target=serve, args=(start,), name=f"env-worker-{self.index}", daemon=True
        )
        with _without_main():
            self._process.start()
        os.close(orders)
        os.close(answers)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except ProcessLookupError:  # dead already: that will be noticed
            self._pidfd = os.open(os.devnull, os.O_RDONLY)
        self._poll.register(self._answers, select.POLLIN)

    def give(self, order: Order | None, at: int, snap: bool) -> None:
        """Hand out an order, or a plain step; whether it arrives is seen when the answer is awaited."""
        if self._process is None:
            return
        if order is None or (order.kind == "step" and not any(self.first <= i < self.end for i in order.skip)):
            self._given += KINDS
            self.cell[AWAITED], self._done = 0.0, self.cell[DONE]
            self._fence()
            self._order = self.cell[ORDER] = float(self._given + (at | (snap and self.exact is None) << 1))
            self._fence()
            if self.cell[ASLEEP]:
                self._wake()
            return
        snap = snap and (self.exact is None or (self.exact == UNTESTED and order.kind in ("reset", "load")))
        share = order.share(self.first, self.end)
        if order.kind == "step":
            share = Order("step", skip=share.skip)
        self.ask(("order", share, at, 1 - at, snap, snap and self.exact == UNTESTED))

    def ask(self, message: Any, patient: bool = True) -> None:
        """Send a message; it is lost if the worker is, and cut off if the worker takes none for too long."""
        if self._process is None:
            return
        self._given += KINDS
        self._order = float(self._given + LETTER)
        if self.cell is not None:
            self.cell[ORDER] = self._order
        data = memoryview(WAKE + pack(message))
        gate = select.poll()
        gate.register(self._orders, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError):
            while data and gate.poll(self._reset_deadline * 1e3 if patient else 0):
                data = data[os.write(self._orders, data[: select.PIPE_BUF]) :]

    def _wake(self) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._orders, WAKE)

    def wait(self) -> Any:
        """The answer. Lost if the worker dies over it, or makes no progress."""
        if self._process is None:
            reason = f"worker {self.index} was ended: an order was interrupted"
            raise Lost("crash", reason, None, IDLE, "")
        if self._at_once():
            return NOTHING
        began = since = time.monotonic()
        count, slow = -1.0, False
        received = bytearray()
        missing = 1
        while missing > 0:
            if not received and self.cell is not None and self.cell[DONE] == self._order:
                self._fence()
                return NOTHING
            if not self._poll.poll(self._patience(slow) * 1e3):
                self._wake()  # it may have fallen asleep just when its order came
                now = time.monotonic()
                if self.cell is not None and self.cell[COUNT] != count:
                    count, since = self.cell[COUNT], now if count >= 0 else since
                if self._slow_step is not None and not slow and now - began > self._slow_step:
                    slow = True
                    self._note_slow(now)
                if now - since > self._limit():
                    raise self._hang(now - since)
                continue
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise self._crash()
            if not received:
                self._built += part.partition(MESSAGE)[0].count(BUILT)
                part = part.lstrip(BUILT + WAKE)
                since = time.monotonic()
            received += part
            if len(received) > LENGTH.size:
                missing = 1 + LENGTH.size + LENGTH.unpack_from(received, 1)[0] - len(received)
        message = pickle.loads(memoryview(received)[1 + LENGTH.size :])  # noqa: S301 (from our own worker)
        if isinstance(message, tuple) and message[0] == "died":
            env, phase = self._where()
            last = message[1].strip().splitlines()[-1]
            raise Lost("error", f"{_doing(env, phase)} raised {last}", env, phase, message[1])
        return message

    def _at_once(self) -> bool:
        """Whether a plain step is done within a moment; otherwise the worker will wake us."""
        cell = self.cell
        if cell is None or int(self._order) % KINDS > 1:  # the answer is a message
            return False
        if not self._linger(cell, DONE, self._done) or cell[DONE] != self._order:
            cell[AWAITED] = 1.0
            self._fence()
            return False
        self._fence()
        return True

    def _patience(self, slow: bool) -> float:
        return TICK if self._slow_step is None or slow else min(TICK, self._slow_step)

    def _limit(self) -> float:
        _, phase = self._where()
        return self._reset_deadline if phase in (BUILDING, RESETTING) else self._step_deadline

    def _where(self) -> tuple[int | None, int]:
        """The environment that the worker is busy with, and what it does with it."""
        if self.cell is None or int(self.cell[PHASE]) == BUILDING:
            return min(self.first + self._built, self.end - 1), BUILDING
        phase = int(self.cell[PHASE])
        return None if phase == IDLE else self.first + int(self.cell[ENV]), phase

    def _crash(self) -> Lost:
        self._process.join(DYING)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        env, phase = self._where()
        return Lost("crash", f"worker {self.index} {how} while {_doing(env, phase)}", env, phase, self._read_stacks())

    def _hang(self, seconds: float) -> Lost:
        env, phase = self._where()
        reason = f"worker {self.index} made no progress for {seconds:.1f} s while {_doing(env, phase)}"
        return Lost("hang", reason, env, phase, self._ask_stacks())

    def _ask_stacks(self) -> str:
        """Where the worker is in its code; empty if it does not say so, as a stopped one."""
        before = len(self._read_stacks())
        self._signal(signal.SIGUSR1)
        until = time.monotonic() + GRACE
        text, more = "", ""
        while (not text or more != text) and time.monotonic() < until:
            time.sleep(0.02)
            text, more = more, self._read_stacks()[before:]
        return more

    def _read_stacks(self) -> str:
        return os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")

    def _note_slow(self, now: float) -> None:
        self.slow_steps += 1
        if self._slow.add(now) and self.stack_folder is not None:
            env, phase = self._where()
            reason = f"worker {self.index} is slow while {_doing(env, phase)}"
            write_stacks(self.stack_folder, "slow_step_trace", reason, self._ask_stacks())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # it is gone
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End the process at once; nothing happens if there is none."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._process = None
        self._poll.unregister(self._answers)
        for fd in (self._orders, self._answers, self._pidfd):
            os.close(fd)

    def finish(self, until: float) -> None:
        """Wait for the process to end by itself until then, and leave nothing open."""
        if self._process is not None:
            self._process.join(max(until - time.monotonic(), 0.0))
            self.kill()
        os.close(self._stacks)

    def report(self, steps: int) -> WorkerReport:
        pid = None if self._process is None else self._process.pid
        last = 0.0 if self.cell is None else self.cell[SECONDS] * 1e3
        return WorkerReport(
            self.index, tuple(range(self.first, self.end)), pid, steps * (self.end - self.first), self.restarts,
            tuple(self.reasons), self.replayed, self.slow_steps, last, rss_bytes(pid) if pid else 0,
            self.exact or "exact",
        )  # fmt: skip


def _doing(env: int | None, phase: int) -> str:
    if phase == IDLE:
        return "waiting"
    return f"{PHASES[phase]} its environments" if env is None else f"{PHASES[phase]} environment {env}"


def write_stacks(folder: Path, name: str, reason: str, stacks: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}_{math.floor(time.time())}.log", "a", encoding="utf-8") as file:
        file.write(f"{reason}\n{stacks}\n")


@contextlib.contextmanager
def start_lock(serialise: bool | str | os.PathLike[str]) -> Iterator[None]:
    """Held while a worker builds its environments; freed by the kernel if we die."""
    if serialise is False:
        yield
        return
    path = Path(tempfile.gettempdir(), f"looplab-env-start-{os.getuid()}.lock") if serialise is True else serialise
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_starting = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keeps a new process from importing the trainer's script: it may load much, and need not be ready for that."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def preload(context: str) -> None:
    """Let the fork server import what workers need, so that a new one is there in milliseconds."""
    chosen = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])
    if context == "forkserver" and chosen == ["__main__"]:  # otherwise somebody has decided on it
        multiprocessing.get_context("forkserver").set_forkserver_preload(["looplab.rl.worker"])
