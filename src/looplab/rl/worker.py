"""A worker process: builds its share of the envs and executes the vector env's commands, into the shared block.

Every command is a number in the worker's status. For a plain step that number is all, and so is its completion.
Everything else is also sent as a message, over one pipe in each direction: the letter M, the length in eight bytes, and
a pickle, which only ever passes between these two processes. Both sides poll the status briefly before they block,
because waking a process takes longer than many steps; a byte in a pipe wakes them. A worker never outlives its parent.
Its failure is reported: a Python error by a message, a crash in native code by faulthandler, which writes into an
anonymous file that the parent holds open.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import random
import signal
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from types import TracebackType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from looplab.rl.group import EMPTY_REPLY, EnvCommand, EnvGroup, EnvReply
from looplab.rl.shared import (
    COMMAND,
    COMPLETED,
    PARENT_WAITS,
    WORKER_SLEEPS,
    MemoryFence,
    SharedBlock,
    SpinWait,
)
from looplab.rl.snapshot import SnapshotError

BUILT, MESSAGE, WAKE = b"b", b"M", b"w"
"""First bytes in the pipes: an env was built; a message follows; nothing but a wake-up."""
MESSAGE_COMMAND = 4
"""Code of a command that comes as a message.

Codes 0 to 3 are plain steps: bit 0 is the index of the frame, bit 1 requests a snapshot. The number in the status is
the code plus COMMAND_CODES times the number of commands so far.
"""
COMMAND_CODES = 8
SPACES_COMMAND = float(COMMAND_CODES + MESSAGE_COMMAND)
"""The first command, which brings the spaces."""
SPIN_SECONDS = 250e-6
"""How long an idle worker spins before it blocks. The worker on the last core does not spin; the parent needs one."""
LENGTH = struct.Struct("<Q")
PR_SET_PDEATHSIG = 1


class InheritedFd:
    """A file descriptor that reaches a new process whatever its start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.fd)

    def __setstate__(self, duplicate: Any) -> None:
        self.fd = duplicate.detach()


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to start."""

    worker: int
    """Index of the worker."""
    workers: int
    """Number of workers."""
    first: int
    """Index of its first env."""
    num_envs: int
    """Envs of all workers."""
    env_fns: bytes
    """Gymnasium's registered envs and the functions that make this worker's envs, by cloudpickle."""
    autoreset_mode: AutoresetMode
    info_fields: tuple[str, ...]
    """Numeric info fields that go into the shared block."""
    commands: InheritedFd
    """Pipe to read commands from."""
    replies: InheritedFd
    """Pipe to write replies to."""
    memory: InheritedFd
    """File of the shared block."""
    stacks: InheritedFd
    """File for faulthandler's stack traces."""
    fds_to_close: tuple[int, ...]
    """The parent's ends of the pipes, which a forked process inherits."""
    seed: int
    """Seeds the process's global random generators; the same for all successors, so that they can replay."""


class _ParentExited(Exception):
    """The parent has closed its end of the pipe."""


class WorkerFailureReporter:
    """Context manager that sends the parent the exception that ends the worker, and exits the process silently."""

    def __init__(self, replies: int) -> None:
        self._replies = replies

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, _ParentExited):
            os._exit(0)
        with contextlib.suppress(BrokenPipeError):
            send(self._replies, ("died", "".join(traceback.format_exception(kind, error, trace))))
        os._exit(1)


def run_worker(spec: WorkerSpec) -> None:
    """Run a worker until its parent closes it. Never returns: the process exits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its workers
    for fd in spec.fds_to_close:
        os.close(fd)
    _release_fork_server()
    faulthandler.enable(spec.stacks.fd)
    faulthandler.register(signal.SIGUSR1, spec.stacks.fd)
    with WorkerFailureReporter(spec.replies.fd):
        _serve(spec, spec.commands.fd, spec.replies.fd)


def _release_fork_server() -> None:
    """Close the descriptor by which this process keeps the fork server alive.

    A stopped worker would otherwise keep it alive for ever, and neither would end with the trainer.
    """
    alive_fd = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive_fd is not None:
        os.close(alive_fd)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]


def _serve(spec: WorkerSpec, commands: int, replies: int) -> None:
    """Build the envs, then execute commands until the parent sends "close"."""
    group = _build_envs(spec, replies)
    one = group.envs[0]
    send(replies, ("built", one.observation_space, one.action_space, dict(one.metadata), one.render_mode))
    spaces = receive(commands)
    block = SharedBlock(
        spaces, spec.num_envs, workers=spec.workers, info_fields=len(spec.info_fields), fd=spec.memory.fd
    )
    group.attach(block, spec.worker)
    plain_step = EnvCommand("step")
    status, number = block.status[spec.worker].data, SPACES_COMMAND
    fence = MemoryFence()
    spin = SpinWait(SPIN_SECONDS if spec.worker < len(os.sched_getaffinity(0)) - 1 else 0.0)
    while True:
        number = _wait_for_command(number, status, commands, spin, fence)
        code = int(number) % COMMAND_CODES
        if code != MESSAGE_COMMAND:
            frame = code & 1
            if code & 2:
                send(replies, group.execute(plain_step, frame, 1 - frame, True, False))
            elif infos := group.step(frame, 1 - frame):
                send(replies, EnvReply(infos))
            else:
                fence()
                status[COMPLETED] = number
                fence()
                if status[PARENT_WAITS]:
                    os.write(replies, WAKE)
            continue
        message = receive(commands)
        if message[0] == "execute":
            send(replies, group.execute(*message[1:]))
        elif message[0] == "replay":
            send(replies, _replay(group, *message[1:]))
        elif message[0] == "reset_all":
            group.reset_all(message[1])
            send(replies, EMPTY_REPLY)
        elif message[0] == "close":
            group.close()
            return


def _build_envs(spec: WorkerSpec, replies: int) -> EnvGroup:
    random.seed(spec.seed)
    np.random.seed(spec.seed)
    registered, env_fns = cloudpickle.loads(spec.env_fns)
    for env_spec in registered:
        gym.registry.setdefault(env_spec.id, env_spec)
    group = EnvGroup(env_fns, spec.first, spec.autoreset_mode, spec.info_fields)
    group.owns_global_rngs = True
    group.build(lambda: os.write(replies, BUILT))
    return group


def _wait_for_command(last: float, status: Any, commands: int, spin: SpinWait, fence: MemoryFence) -> float:
    """Return the number of the next command after `last`."""
    while not spin(status, COMMAND, last):
        status[WORKER_SLEEPS] = 1.0
        fence()
        if status[COMMAND] == last and not os.read(commands, 1):
            raise _ParentExited
        status[WORKER_SLEEPS] = 0.0
    fence()
    return float(status[COMMAND])


def _replay(group: EnvGroup, base: bytes | None, commands: Sequence[EnvCommand], frame: int) -> str | None:
    """Restore the former worker's snapshot and repeat all commands since; return why that is impossible, or None."""
    try:
        if base is not None:
            group.restore(base)
    except SnapshotError as error:
        return error.message
    for command in commands:
        group.execute(command, frame, frame, False, False)
    return None


def send(fd: int, message: Any) -> None:
    """Write a message, blocking as long as necessary; for workers."""
    data = memoryview(pack(message))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> Any:
    """Wait for a message; for workers. Ends the worker if its parent has exited."""
    while _read_exactly(fd, 1) == WAKE:
        pass
    (length,) = LENGTH.unpack(_read_exactly(fd, LENGTH.size))
    return pickle.loads(_read_exactly(fd, length))  # noqa: S301 (from our own parent)


def pack(message: Any) -> bytes:
    """Return a message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return MESSAGE + LENGTH.pack(len(data)) + data


def _read_exactly(fd: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise _ParentExited
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
