"""The local executor: trainings on this machine, started by a keeper that outlives the engine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from looplab.launch import keeper
from looplab.launch.base import Ended, Event, Exit, Order, Refused, Started

UNSEEN_S = 2.0
"""How long a started run may stay without `process.json` before it is held to be lost."""
LOOK_AGAIN_S = 0.02


@dataclass(slots=True)
class Adopted:
    """A run that an earlier engine started."""

    run_dir: Path
    pid: int
    ticks: int
    keeper: int
    started: float | None
    pidfd: int
    """-1 once the process is gone and only its `exit.json` is awaited."""
    gone_at: float = 0.0
    kill_at: float | None = None
    reason: str | None = None


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return data if isinstance(data, dict) else None


def is_alive(pid: int, ticks: int, boot: str) -> bool:
    """Whether this very process lives: a pid alone may have been given to another."""
    return boot == keeper.boot_id() and ticks != 0 and keeper.start_ticks(pid) == ticks and not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return True


def find_by_mark(run_dir: Path) -> int | None:
    """The oldest living process that carries the run's mark in its environment."""
    mark = f"LOOPLAB_RUN_DIR={run_dir}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append((keeper.start_ticks(int(entry.name)), int(entry.name)))
    return min(found)[1] if found else None


class LocalExecutor:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._socket: socket.socket | None = None
        self._inbox = b""
        self._running: dict[str, Path] = {}
        self._adopted: dict[str, Adopted] = {}
        self._waiting: dict[str, tuple[Path, float]] = {}
        self._events: list[Event] = []
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ, "wake")

    def wake(self) -> None:
        """Make a `poll` that waits return at once; may be called from a signal handler or another thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    # -- the contract

    def start(self, order: Order) -> None:
        from looplab.launch.slots import lock_paths

        self._running[order.run_id] = order.run_dir
        self._send(
            op="start",
            id=order.run_id,
            dir=str(order.run_dir),
            path=order.path,
            argv=list(order.argv),
            env=dict(order.env),
            cwd=str(order.cwd),
            cores=list(order.slot.cores),
            locks=[str(path) for path in lock_paths(order.slot)],
            label=str(order.run_dir),
            timeout=order.timeout,
            grace=order.grace,
            linger=order.linger,
        )

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        adopted = self._adopted.get(run_id)
        if adopted is None:
            self._send(op="stop", id=run_id, reason=reason, grace=grace)
        elif adopted.kill_at is None:
            adopted.reason = reason
            adopted.kill_at = time.monotonic() + grace
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(adopted.pid, signal.SIGTERM)

    def adopt(self, run_id: str, run_dir: Path) -> bool:
        ended = read_json(run_dir / "exit.json")
        if ended is not None:
            self._events.append(Ended(run_id, Exit.from_dict(ended)))
            return True
        if not (run_dir / "train.log").exists():
            return False
        process = read_json(run_dir / "process.json")
        if process is not None:
            self._watch(run_id, run_dir, process)
        else:
            # Started, but its keeper had no time yet to write down which process it is.
            self._waiting[run_id] = (run_dir, time.monotonic() + UNSEEN_S)
        return True

    def poll(self, timeout: float) -> list[Event]:
        if self._events:
            timeout = 0.0
        elif self._waiting or any(a.pidfd < 0 or a.kill_at for a in self._adopted.values()):
            timeout = min(timeout, LOOK_AGAIN_S)
        for key, _ in self._selector.select(timeout):
            if key.data == "keeper":
                self._listen()
            elif key.data == "wake":
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            else:
                self._gone(key.data)
        if self._waiting or self._adopted:
            self._look_after_adopted()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for adopted in self._adopted.values():
            if adopted.pidfd >= 0:
                os.close(adopted.pidfd)
        if self._socket is not None:
            self._socket.close()
        self._selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # -- the keeper

    def _send(self, **order: object) -> None:
        if self._socket is None:
            self._start_keeper()
        data = orjson.dumps(order) + b"\n"
        assert self._socket is not None
        try:
            self._socket.sendall(data)
        except OSError:
            # The keeper was killed. Its runs live on without it; the next one takes the order.
            self._keeper_lost()
            self._start_keeper()
            self._socket.sendall(data)

    def _start_keeper(self) -> None:
        ours, theirs = socket.socketpair()
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._socket = ours
        self._selector.register(ours, selectors.EVENT_READ, "keeper")
        self._socket.sendall(json.dumps({"op": "env", "env": dict(os.environ)}).encode() + b"\n")

    def _listen(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._keeper_lost()
            return
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            event = orjson.loads(line)
            run_id = event["id"]
            match event["ev"]:
                case "started":
                    self._events.append(Started(run_id, event["pid"], event["at"]))
                case "ended":
                    self._running.pop(run_id, None)
                    self._events.append(Ended(run_id, Exit.from_dict(event["exit"])))
                case "busy":
                    self._running.pop(run_id, None)
                    self._events.append(Refused(run_id, event["holder"]))
                case "exists":
                    run_dir = self._running.pop(run_id)
                    self.adopt(run_id, run_dir)

    def _keeper_lost(self) -> None:
        if self._socket is None:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket, self._inbox = None, b""
        self._keeper.poll()
        running, self._running = self._running, {}
        for run_id, run_dir in running.items():
            if not self.adopt(run_id, run_dir):
                self._events.append(Refused(run_id, "the keeper was killed before it could start the run"))

    # -- runs of earlier engines

    def _watch(self, run_id: str, run_dir: Path, process: dict[str, Any]) -> None:
        pid, ticks = int(process["pid"]), int(process["start"])
        adopted = Adopted(run_dir, pid, ticks, int(process.get("keeper", 0)), process.get("started"), -1)
        self._adopted[run_id] = adopted
        if is_alive(pid, ticks, process.get("boot", "")):
            with contextlib.suppress(ProcessLookupError):
                adopted.pidfd = os.pidfd_open(pid)
        if adopted.pidfd >= 0 and keeper.start_ticks(pid) == ticks:
            self._selector.register(adopted.pidfd, selectors.EVENT_READ, run_id)
        else:
            adopted.gone_at = time.monotonic()

    def _gone(self, run_id: str) -> None:
        adopted = self._adopted[run_id]
        self._selector.unregister(adopted.pidfd)
        os.close(adopted.pidfd)
        adopted.pidfd = -1
        adopted.gone_at = time.monotonic()

    def _look_after_adopted(self) -> None:
        now = time.monotonic()
        for run_id, (run_dir, until) in list(self._waiting.items()):
            process = read_json(run_dir / "process.json")
            if process is None and now > until:
                pid = find_by_mark(run_dir)
                process = {"pid": pid or 0, "start": keeper.start_ticks(pid) if pid else 0, "boot": keeper.boot_id()}
            if process is not None:
                del self._waiting[run_id]
                self._watch(run_id, run_dir, process)
        for run_id, adopted in list(self._adopted.items()):
            if adopted.kill_at is not None and now >= adopted.kill_at:
                adopted.kill_at = now + 1.0
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(adopted.pid, signal.SIGKILL)
            if adopted.pidfd >= 0:
                continue
            ended = read_json(adopted.run_dir / "exit.json")
            if ended is None and now - adopted.gone_at > 0.2 and not self._keeper_lives(adopted.keeper):
                ended = read_json(adopted.run_dir / "exit.json") or {
                    "code": None,
                    "reason": adopted.reason or "lost",
                    "message": "it ended while neither an engine nor its keeper was there to see its exit code",
                    "started": adopted.started,
                    "ended": time.time(),
                }
            if ended is not None:
                del self._adopted[run_id]
                exit_ = Exit.from_dict(ended)
                if adopted.reason and not exit_.reason:
                    exit_ = Exit.from_dict({**ended, "reason": adopted.reason})
                self._events.append(Ended(run_id, exit_))

    @staticmethod
    def _keeper_lives(pid: int) -> bool:
        try:
            return pid > 0 and b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
