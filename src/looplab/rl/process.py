"""The parent's side of a worker: its process, the pipes to it, and what is needed to start it again.

No wait is unbounded: a worker that makes no progress is asked for its stack traces and then counts as lost, as does one
that died.
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
from gymnasium.vector import AutoresetMode

from looplab.rl.diagnostics import SlowStepDetector, WorkerReport, rss_bytes
from looplab.rl.group import EMPTY_REPLY, EnvCommand
from looplab.rl.shared import (
    BUILDING,
    COMMAND,
    COMPLETED,
    ENV,
    IDLE,
    PARENT_WAITS,
    PHASE,
    PHASE_NAMES,
    PROGRESS,
    RESETTING,
    STEP_SECONDS,
    WORKER_SLEEPS,
    MemoryFence,
    SpinWait,
)
from looplab.rl.vector_settings import VectorEnvSettings
from looplab.rl.worker import (
    BUILT,
    COMMAND_CODES,
    LENGTH,
    MESSAGE,
    MESSAGE_COMMAND,
    WAKE,
    InheritedFd,
    WorkerSpec,
    pack,
    run_worker,
)

POLL_SECONDS = 0.1
"""Time between two looks at a worker that has not replied yet."""
SPIN_SECONDS = 50e-6
"""How long the parent spins before it blocks; workers may use its core meanwhile and need not wake it."""
GRACE_SECONDS = 0.5
"""Time that workers get to close their envs, and to write their stack traces."""
EXIT_TIMEOUT = 10.0
"""Seconds that a worker may take to exit after closing its pipe: on a busy machine, or to dump core."""
UNTESTED = "not tested before the first reset"


class WorkerLost(Exception):
    """A worker has died or must be killed."""

    def __init__(
        self, kind: Literal["error", "crash", "hang"], reason: str, *, env: int | None, phase: int, trace: str
    ) -> None:
        """
        Args:
            kind: A Python exception, the death of the process, or no progress.
            reason: What happened, in one line.
            env: Index of the env it was working on; None if it was idle.
            phase: What it was doing with it.
            trace: Traceback or stack traces; may be empty.
        """
        super().__init__(reason)
        self.kind, self.reason, self.env, self.phase, self.trace = kind, reason, env, phase, trace


class WorkerProcess:
    """One worker, which can be started any number of times."""

    def __init__(
        self,
        index: int,
        settings: VectorEnvSettings,
        *,
        envs: range,
        workers: int,
        num_envs: int,
        env_fns: bytes,
        memory_fd: int,
    ) -> None:
        """
        Args:
            index: Index of the worker.
            settings: Settings of the vector env.
            envs: Indices of its envs.
            workers: Number of workers.
            num_envs: Envs of all workers.
            env_fns: Registered envs and functions that make its envs, by cloudpickle.
            memory_fd: File of the shared block.
        """
        self.index, self.first, self.end = index, envs.start, envs.stop
        self.status: Any = None
        """Its status in the shared block; None before that exists."""
        self.snapshot_defect: str | None = UNTESTED
        """Why its envs have no exact snapshots; None if they have."""
        self.snapshot: bytes | None = None
        """Its last snapshot; None for newly built envs."""
        self.snapshot_at: int | None = 0
        """Commands completed before that snapshot; None if more have followed than can be replayed."""
        self.reset_seeds: list[int] | None = None
        """Seeds of a reset that precedes everything in the replay log; None if there is none."""
        self.restarts = self.replayed = self.slow_steps = 0
        self.reasons: deque[str] = deque(maxlen=20)
        self.restart_times: deque[float] = deque()
        self._settings, self._workers, self._num_envs = settings, workers, num_envs
        self._env_fns, self._memory_fd = env_fns, memory_fd
        self._diagnostics_dir = None if settings.diagnostics_dir is None else Path(settings.diagnostics_dir)
        self._slow_detector = SlowStepDetector(settings.slow_threshold, settings.slow_window)
        self._context = multiprocessing.get_context(settings.context)
        self._process: Any = None
        self._num_built = self._num_sent = 0
        self._command = -1.0
        """Number of the last command."""
        self._completed_before = 0.0
        """Value of COMPLETED when the last command was sent."""
        self._fence, self._spin = MemoryFence(), SpinWait(SPIN_SECONDS)
        self._seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._poll = select.poll()
        self._stacks_fd = os.memfd_create(f"looplab-stacks-{index}")
        fcntl.fcntl(self._stacks_fd, fcntl.F_SETFL, os.O_APPEND)

    def start(self) -> None:
        """Start a new process, which builds the envs and then sends their description."""
        command_reader, self._command_pipe = os.pipe()
        self._reply_pipe, reply_writer = os.pipe()
        os.set_blocking(self._command_pipe, False)
        os.ftruncate(self._stacks_fd, 0)
        self._num_built = self._num_sent = 0
        if self.status is not None:
            self.status[PHASE], self.status[WORKER_SLEEPS], self.status[COMPLETED] = BUILDING, 0.0, 0.0
        forked = self._context.get_start_method() == "fork"
        spec = WorkerSpec(
            worker=self.index,
            workers=self._workers,
            first=self.first,
            num_envs=self._num_envs,
            env_fns=self._env_fns,
            autoreset_mode=AutoresetMode(self._settings.autoreset_mode),
            info_fields=tuple(self._settings.info_fields),
            commands=InheritedFd(command_reader),
            replies=InheritedFd(reply_writer),
            memory=InheritedFd(self._memory_fd),
            stacks=InheritedFd(self._stacks_fd),
            fds_to_close=(self._command_pipe, self._reply_pipe) if forked else (),
            seed=self._seed,
        )
        self._process = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker, args=(spec,), name=f"env-worker-{self.index}", daemon=True
        )
        with _hide_main_module():
            self._process.start()
        os.close(command_reader)
        os.close(reply_writer)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except ProcessLookupError:  # already dead, which the next wait notices
            self._pidfd = os.open(os.devnull, os.O_RDONLY)
        self._poll.register(self._reply_pipe, select.POLLIN)

    def send_command(self, command: EnvCommand | None, frame: int, take_snapshot: bool) -> None:
        """Send a command without waiting; a lost worker is noticed by `wait`.

        Args:
            command: The command for all envs; None is a plain step.
            frame: Index of the frame for the results.
            take_snapshot: Request a snapshot after the command, if this worker has exact ones.
        """
        if self._process is None:
            return
        if command is None or (
            command.kind == "step" and not any(self.first <= i < self.end for i in command.truncate)
        ):
            self._num_sent += COMMAND_CODES
            self.status[PARENT_WAITS], self._completed_before = 0.0, self.status[COMPLETED]
            self._fence()
            with_snapshot = take_snapshot and self.snapshot_defect is None
            self._command = self.status[COMMAND] = float(self._num_sent + (frame | with_snapshot << 1))
            self._fence()
            if self.status[WORKER_SLEEPS]:
                self._wake()
            return
        untested = self.snapshot_defect == UNTESTED
        take_snapshot = take_snapshot and (
            self.snapshot_defect is None or (untested and command.kind in ("reset", "load"))
        )
        share = command.slice_envs(self.first, self.end)
        if command.kind == "step":
            share = EnvCommand("step", truncate=share.truncate)
        self.send_message(("execute", share, frame, 1 - frame, take_snapshot, take_snapshot and untested))

    def send_message(self, message: Any, *, block: bool = True) -> None:
        """Send a message. It is dropped if the worker is lost, and cut off if the worker reads nothing for too long."""
        if self._process is None:
            return
        self._num_sent += COMMAND_CODES
        self._command = float(self._num_sent + MESSAGE_COMMAND)
        if self.status is not None:
            self.status[COMMAND] = self._command
        data = memoryview(WAKE + pack(message))
        writable = select.poll()
        writable.register(self._command_pipe, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError):
            while data and writable.poll(self._settings.reset_deadline * 1e3 if block else 0):
                data = data[os.write(self._command_pipe, data[: select.PIPE_BUF]) :]

    def _wake(self) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._command_pipe, WAKE)

    def wait(self) -> Any:
        """Return the reply to the last command.

        Raises:
            WorkerLost: The worker died, failed, or made no progress.
        """
        if self._process is None:
            reason = f"worker {self.index} was ended: a command was interrupted"
            raise WorkerLost("crash", reason, env=None, phase=IDLE, trace="")
        if self._spin_until_completed():
            return EMPTY_REPLY
        start = last_progress = time.monotonic()
        progress, is_slow = -1.0, False
        received = bytearray()
        missing = 1
        while missing > 0:
            if not received and self.status is not None and self.status[COMPLETED] == self._command:
                self._fence()
                return EMPTY_REPLY
            if not self._poll.poll(self._poll_timeout(is_slow) * 1e3):
                self._wake()  # the worker may have fallen asleep just when the command came
                now = time.monotonic()
                if self.status is not None and self.status[PROGRESS] != progress:
                    last_progress = now if progress >= 0 else last_progress
                    progress = self.status[PROGRESS]
                slow_step = self._settings.slow_step
                if slow_step is not None and not is_slow and now - start > slow_step:
                    is_slow = True
                    self._record_slow_step(now)
                if now - last_progress > self._deadline():
                    raise self._lost_by_hang(now - last_progress)
                continue
            part = os.read(self._reply_pipe, 1 << 20)
            if not part:
                raise self._lost_by_crash()
            if not received:
                self._num_built += part.partition(MESSAGE)[0].count(BUILT)
                part = part.lstrip(BUILT + WAKE)
                last_progress = time.monotonic()
            received += part
            if len(received) > LENGTH.size:
                missing = 1 + LENGTH.size + LENGTH.unpack_from(received, 1)[0] - len(received)
        message = pickle.loads(memoryview(received)[1 + LENGTH.size :])  # noqa: S301 (from our own worker)
        if isinstance(message, tuple) and message[0] == "died":
            env, phase = self._location()
            error = message[1].strip().splitlines()[-1]
            reason = f"{_describe_activity(env, phase)} raised {error}"
            raise WorkerLost("error", reason, env=env, phase=phase, trace=message[1])
        return message

    def _spin_until_completed(self) -> bool:
        """Return whether a plain step completes while spinning; otherwise the worker will wake us."""
        status = self.status
        if status is None or int(self._command) % COMMAND_CODES > 1:  # the reply is a message
            return False
        if not self._spin(status, COMPLETED, self._completed_before) or status[COMPLETED] != self._command:
            status[PARENT_WAITS] = 1.0
            self._fence()
            return False
        self._fence()
        return True

    def _poll_timeout(self, is_slow: bool) -> float:
        slow_step = self._settings.slow_step
        return POLL_SECONDS if slow_step is None or is_slow else min(POLL_SECONDS, slow_step)

    def _deadline(self) -> float:
        """Return the seconds that the current activity may take without progress."""
        _, phase = self._location()
        settings = self._settings
        return settings.reset_deadline if phase in (BUILDING, RESETTING) else settings.step_deadline

    def _location(self) -> tuple[int | None, int]:
        """Return the env that the worker is working on (None if idle), and the phase."""
        if self.status is None or int(self.status[PHASE]) == BUILDING:
            return min(self.first + self._num_built, self.end - 1), BUILDING
        phase = int(self.status[PHASE])
        return None if phase == IDLE else self.first + int(self.status[ENV]), phase

    def _lost_by_crash(self) -> WorkerLost:
        self._process.join(EXIT_TIMEOUT)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        env, phase = self._location()
        reason = f"worker {self.index} {how} while {_describe_activity(env, phase)}"
        return WorkerLost("crash", reason, env=env, phase=phase, trace=self._read_stacks())

    def _lost_by_hang(self, seconds: float) -> WorkerLost:
        env, phase = self._location()
        reason = f"worker {self.index} made no progress for {seconds:.1f} s while {_describe_activity(env, phase)}"
        return WorkerLost("hang", reason, env=env, phase=phase, trace=self._request_stacks())

    def _request_stacks(self) -> str:
        """Return the worker's present stack traces; empty if it does not respond, for example when stopped."""
        before = len(self._read_stacks())
        self._signal(signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_SECONDS
        text, more = "", ""
        while (not text or more != text) and time.monotonic() < deadline:
            time.sleep(0.02)
            text, more = more, self._read_stacks()[before:]
        return more

    def _read_stacks(self) -> str:
        return os.pread(self._stacks_fd, 1 << 20, 0).decode(errors="replace")

    def _record_slow_step(self, now: float) -> None:
        self.slow_steps += 1
        if self._slow_detector.add(now) and self._diagnostics_dir is not None:
            env, phase = self._location()
            reason = f"worker {self.index} is slow while {_describe_activity(env, phase)}"
            write_stacks(self._diagnostics_dir, "slow_step_trace", reason, self._request_stacks())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # the process is gone
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill the process, if there is one."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._process = None
        self._poll.unregister(self._reply_pipe)
        for fd in (self._command_pipe, self._reply_pipe, self._pidfd):
            os.close(fd)

    def close(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic clock) for the process to exit, then kill it; close all descriptors."""
        if self._process is not None:
            self._process.join(max(deadline - time.monotonic(), 0.0))
            self.kill()
        os.close(self._stacks_fd)

    def report(self, steps: int) -> WorkerReport:
        """Return the worker's present state. `steps`: steps of the vector env so far."""
        pid = None if self._process is None else self._process.pid
        return WorkerReport(
            worker=self.index,
            envs=tuple(range(self.first, self.end)),
            pid=pid,
            steps=steps * (self.end - self.first),
            restarts=self.restarts,
            reasons=tuple(self.reasons),
            replayed=self.replayed,
            slow_steps=self.slow_steps,
            last_step_ms=0.0 if self.status is None else self.status[STEP_SECONDS] * 1e3,
            rss_bytes=rss_bytes(pid) if pid else 0,
            snapshots=self.snapshot_defect or "exact",
        )


def _describe_activity(env: int | None, phase: int) -> str:
    if phase == IDLE:
        return "waiting"
    return f"{PHASE_NAMES[phase]} its environments" if env is None else f"{PHASE_NAMES[phase]} environment {env}"


def write_stacks(folder: Path, name: str, reason: str, stacks: str) -> None:
    """Append stack traces to a file in `folder` whose name contains the time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}_{math.floor(time.time())}.log", "a", encoding="utf-8") as file:
        file.write(f"{reason}\n{stacks}\n")


@contextlib.contextmanager
def start_lock(serialise: bool | str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock under which workers start one at a time; the kernel releases it if this process dies.

    Args:
        serialise: False: no lock; True: one lock file per user; otherwise the lock file.
    """
    if serialise is False:
        yield
        return
    path = Path(tempfile.gettempdir(), f"looplab-env-start-{os.getuid()}.lock") if serialise is True else serialise
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_main_module_lock = threading.Lock()


@contextlib.contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keep a new process from importing the trainer's script, which may be slow or not import-safe."""
    with _main_module_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def preload_fork_server(context: str) -> None:
    """Let the fork server import what workers need, so that a new worker starts in milliseconds."""
    modules = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])
    if context == "forkserver" and modules == ["__main__"]:  # otherwise the trainer has chosen the modules itself
        multiprocessing.get_context("forkserver").set_forkserver_preload(["looplab.rl.worker"])
