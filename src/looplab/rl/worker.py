"""A worker process: it builds its share of the environments and does what the vector env asks, into the shared block.

Every order is a number in the worker's cell of the shared block, and a plain step is no more than that, nor is its end.
Everything else is a message besides, by one pipe there and another back: the letter M, eight bytes of length, and a
pickle, which only ever passes between these two processes. Both sides look at the cell for a moment before they sleep,
giving way to everybody else: to wake a process takes longer than many a step. A byte in a pipe wakes them.
A worker never outlives its parent, and what it dies of is told: a Python error by message, a crash in native code by
faulthandler, which writes into a file in memory that the parent holds, too.
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

from looplab.errors import LabError
from looplab.rl.group import NOTHING, Answer, EnvGroup, Order
from looplab.rl.shared import ASLEEP, AWAITED, DONE, ORDER, Block, Fence, Linger
from looplab.rl.snapshot import SnapshotError

BUILT, MESSAGE, WAKE = b"b", b"M", b"w"
LETTER = 4
"""The kind of an order that comes by message; 0 to 3 are plain steps: into which frame, and whether to take a snapshot.
A number in the cell is a kind and the count of orders before, times KINDS."""
KINDS = 8
FIRST = float(KINDS + LETTER)
"""The order that brings the spaces."""
MOMENT = 250e-6
"""Seconds before a worker without an order sleeps. On every core but one: somebody has to give the orders."""
LENGTH = struct.Struct("<Q")
PR_SET_PDEATHSIG = 1


class Fd:
    """A file descriptor that reaches a new process by whatever way that process is started."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, sent: Any) -> None:
        self.number = sent.detach()


@dataclass(frozen=True)
class Start:
    """What a worker is told when it starts."""

    worker: int
    """Its number."""
    workers: int
    """How many there are."""
    first: int
    """The number of its first environment."""
    num_envs: int
    """Of all workers together."""
    makers: bytes
    """What is registered with gymnasium, and the functions that make its environments, by cloudpickle."""
    mode: AutoresetMode
    """When ended environments are reset."""
    fields: tuple[str, ...]
    """The infos that go into the block."""
    orders: Fd
    """Where orders come from."""
    answers: Fd
    """Where answers go."""
    memory: Fd
    """The block."""
    stacks: Fd
    """Where faulthandler writes."""
    close: tuple[int, ...]
    """Ends of pipes that a forked process has, and should not."""
    chance: int
    """Seeds the process's own random generators: for all its successors the same, so that they can replay it."""


class _ParentGone(Exception):
    """There is nobody left to work for."""


class _Confession:
    """Sends what a worker dies of, and ends the process without a word on the terminal."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, _ParentGone):
            os._exit(0)
        with contextlib.suppress(BrokenPipeError):
            send(self._answers, ("died", "".join(traceback.format_exception(kind, error, at))))
        os._exit(1)


def serve(start: Start) -> None:
    """The life of a worker."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its workers
    for fd in start.close:
        os.close(fd)
    _let_go_of_the_fork_server()
    faulthandler.enable(start.stacks.number)
    faulthandler.register(signal.SIGUSR1, start.stacks.number)
    with _Confession(start.answers.number):
        _work(start, start.orders.number, start.answers.number)


def _let_go_of_the_fork_server() -> None:
    """Its children hold it alive, and a stopped one would for ever: then neither would end with the trainer."""
    held = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if held is not None:
        os.close(held)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]


def _work(start: Start, orders: int, answers: int) -> None:
    random.seed(start.chance)
    np.random.seed(start.chance)
    registered, makers = cloudpickle.loads(start.makers)
    for spec in registered:
        gym.registry.setdefault(spec.id, spec)
    group = EnvGroup(makers, start.first, start.mode, start.fields)
    group.shared_generators = True
    for maker in makers:
        group.envs.append(maker())
        os.write(answers, BUILT)
    one = group.envs[0]
    for i, env in enumerate(group.envs):
        if env.observation_space != one.observation_space or env.action_space != one.action_space:
            raise LabError(f"environment {start.first + i} has other spaces than environment {start.first}")
    send(answers, ("built", one.observation_space, one.action_space, dict(one.metadata), one.render_mode))
    spaces = receive(orders)
    block = Block(spaces, start.num_envs, start.workers, len(start.fields), start.memory.number)
    group.attach(block, start.worker)
    plain = Order("step")
    cell, order = block.cells[start.worker].data, FIRST
    fence = Fence()
    linger = Linger(MOMENT if start.worker < len(os.sched_getaffinity(0)) - 1 else 0.0)
    while True:
        order = _next(order, cell, orders, linger, fence)
        kind = int(order) % KINDS
        if kind != LETTER:
            at = kind & 1
            if kind & 2:
                send(answers, group.perform(plain, at, 1 - at, True, False))
            elif infos := group.step(at, 1 - at):
                send(answers, Answer(infos))
            else:
                fence()
                cell[DONE] = order
                fence()
                if cell[AWAITED]:
                    os.write(answers, WAKE)
            continue
        message = receive(orders)
        if message[0] == "order":
            send(answers, group.perform(*message[1:]))
        elif message[0] == "replay":
            send(answers, _replay(group, *message[1:]))
        elif message[0] == "anew":
            group.begin(message[1])
            send(answers, NOTHING)
        elif message[0] == "close":
            group.close()
            return


def _next(last: float, cell: Any, orders: int, linger: Linger, fence: Fence) -> float:
    """The order after the last one."""
    while not linger(cell, ORDER, last):
        cell[ASLEEP] = 1.0
        fence()
        if cell[ORDER] == last and not os.read(orders, 1):
            raise _ParentGone
        cell[ASLEEP] = 0.0
    fence()
    return float(cell[ORDER])


def _replay(group: EnvGroup, base: bytes | None, orders: Sequence[Order], at: int) -> str | None:
    """Become what the former worker was: its snapshot, then all orders since; why not, if that cannot be."""
    try:
        if base is not None:
            group.restore(base)
    except SnapshotError as error:
        return error.message
    for order in orders:
        group.perform(order, at, at, False, False)
    return None


def send(fd: int, message: Any) -> None:
    """Write a message, however long it takes: for workers."""
    data = memoryview(pack(message))
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> Any:
    """Wait for a message: for workers. It ends with its parent."""
    while _exactly(fd, 1) == WAKE:
        pass
    (length,) = LENGTH.unpack(_exactly(fd, LENGTH.size))
    return pickle.loads(_exactly(fd, length))  # noqa: S301 (from our own parent)


def pack(message: Any) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return MESSAGE + LENGTH.pack(len(data)) + data


def _exactly(fd: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise _ParentGone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
