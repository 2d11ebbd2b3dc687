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
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import orjson

from looplab.errors import LabError
from looplab.launch import keeper
from looplab.launch.base import Delayed, Ended, Event, Exit, Order, Refused, Started
from looplab.untrusted import UntrustedError, load_json, read_bounded

UNSEEN_S = 2.0
"""How long a started run may stay without `process.json` before its process is looked for."""
LOOK_AGAIN_S = 0.02
GRACE_S, LINGER_S = 10.0, 5.0
"""For a run of which not even the limits were written down."""
LARGEST_RECORD = 1 << 20
"""Bytes of `process.json` or `exit.json`; a larger file is not what a keeper writes."""
OVERDUE_S = 5.0
"""Seconds after the end of a run's processes from which on a missing `exit.json` is reported."""
UNWRITTEN_S = 0.2
"""How long after a process `exit.json` may still come from a keeper that has just ended too."""
KEEPERS_TRIED = 3


@dataclass(slots=True)
class Adopted:
    """A run that an earlier engine started, or whose keeper was killed."""

    run_dir: Path
    record_dir: Path
    process: dict[str, Any]
    """What `process.json` says: which process, which keeper, which limits."""
    group: int
    pidfd: int = -1
    """-1 once the process is gone and only its `exit.json` is awaited."""
    look_at: float = 0.0
    """Once it is gone: when to look whether its keeper is gone too."""
    deadline: float | None = None
    rest_at: float | None = None
    """When the rest of a run without a keeper is to be ended; None as long as none was seen."""
    asked: bool = False
    """Whether that rest was asked to go."""
    overdue_at: float | None = None
    """When to report that the keeper does not write down its end; None: it lives, or that was reported."""
    forged: Exit | None = None
    """An end that was written down while the process was alive: not by its keeper, and not believed."""


@dataclass(slots=True)
class Stop:
    """That a run is to end."""

    reason: str | None
    """None where it had ended by itself and only its rest is to go."""
    kill_at: float


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a record file; None where it is missing, or is anything but a small file with a JSON object."""
    try:
        data = load_json(read_bounded(path, LARGEST_RECORD, follow=False))
    except (OSError, UntrustedError):
        return None
    return data if isinstance(data, dict) else None


def read_process(record_dir: Path) -> dict[str, Any] | None:
    """What `process.json` says; None where it is missing, or is not what a keeper writes."""
    process = read_json(record_dir / "process.json")
    if process is None or not isinstance(process.get("boot"), str):
        return None
    if not all(_is_count(process.get(key)) for key in ("pid", "keeper")):
        return None
    if not all(_is_count(ticks, 1 << 63) for ticks in (process.get("start"), process.get("keeper_start", 0))):
        return None
    amounts = (process.get(key) for key in ("started", "timeout", "grace", "linger"))
    return process if all(value is None or _is_amount(value) for value in amounts) else None


def _is_count(value: object, limit: int = 1 << 31) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]


def read_exit(record_dir: Path) -> Exit | None:
    """How the run ended; None where that is not written down yet, or not as a keeper writes it."""
    ended = read_json(record_dir / "exit.json")
    if ended is None or "code" not in ended:
        return None
    numbers = (ended.get(key) for key in ("started", "ended", "user_s", "system_s", "max_rss_kb"))
    is_sound = (
        all(ended.get(key) is None or _is_count(ended[key]) for key in ("code", "signal"))
        and all(ended.get(key) is None or isinstance(ended[key], str) for key in ("reason", "message"))
        and all(value is None or _is_amount(value) for value in numbers)
    )
    return Exit.from_dict({**ended, "lingered": ended.get("lingered") is True}) if is_sound else None


def is_alive(pid: int, ticks: int, boot: str) -> bool:
    """Whether this very process lives: a pid alone may have been given to another."""
    return boot == keeper.boot_id() and ticks != 0 and keeper.start_ticks(pid) == ticks and not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return True


def find_by_mark(run_dir: Path) -> list[int]:
    """The living processes that carry the run's mark in their environment, oldest first."""
    mark = os.fsencode(f"LOOPLAB_RUN_DIR={run_dir}")
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append((keeper.start_ticks(int(entry.name)), int(entry.name)))
    return [pid for _, pid in sorted(found)]


def _is_running(run_dir: Path, process: dict[str, Any] | None) -> bool:
    """Whether the run's process is alive; without knowing which one that is, whether any with its mark is."""
    if process is None:
        return bool(find_by_mark(run_dir))
    return is_alive(process["pid"], process["start"], process["boot"])


def describe(pid: int) -> dict[str, Any]:
    """What `process.json` would say about a process that was found by its mark."""
    parent = 0
    with contextlib.suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        if b"/launch/keeper.py\0" not in Path(f"/proc/{parent}/cmdline").read_bytes():
            parent = 0
    return {
        "pid": pid,
        "start": keeper.start_ticks(pid),
        "boot": keeper.boot_id(),
        "keeper": parent,
        "keeper_start": keeper.start_ticks(parent) if parent else 0,
    }


class LocalExecutor:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._socket: socket.socket | None = None
        self._inbox = b""
        self._running: dict[str, tuple[Path, Path]] = {}  # run → its folder and its record folder
        self._adopted: dict[str, Adopted] = {}
        self._waiting: dict[str, tuple[Path, Path, float]] = {}  # run → its folders, and until when
        self._stops: dict[str, Stop] = {}
        self._held: dict[str, tuple[str, Order, float]] = {}  # run → (the adopted run before it, its order, until when)
        self._events: list[Event] = []
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ, "wake")
        self._start_keeper()  # now, so that it is up when the first run is decided on

    def wake(self) -> None:
        """Make a `poll` that waits return at once; may be called from a signal handler or another thread."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nothing waits
            os.write(self._wake_w, b"x")

    # -- the contract

    def start(self, order: Order, after: str | None = None) -> None:
        from looplab.launch.slots import lock_paths

        run_id, folder = order.run_id, os.path.abspath(order.run_dir)
        record = folder if order.record_dir is None else os.path.abspath(order.record_dir)
        if self._knows(run_id):
            return
        if after in self._adopted or after in self._waiting:
            # The keeper of that run is another one, or dead: it is waited for here.
            self._held[run_id] = (after, order, time.monotonic() + keeper.HELD_S)
            return
        line = orjson.dumps(
            {
                "op": "start",
                "id": run_id,
                "after": after,
                "dir": folder,
                "record": record,
                "path": order.path,
                "argv": list(order.argv),
                # By this mark every process of the run is known, wherever it went.
                "env": {**order.env, "LOOPLAB_RUN_DIR": folder},
                "cwd": str(order.cwd),
                "cores": list(order.slot.cores),
                "locks": [str(path) for path in lock_paths(order.slot)],
                "label": folder,
                "timeout": order.timeout,
                "grace": order.grace,
                "linger": order.linger,
            }
        )
        for _ in range(KEEPERS_TRIED):
            if self._send(line):
                self._running[run_id] = Path(folder), Path(record)
                return
        raise LabError("the process that keeps the trainings ends as soon as it is started", file=keeper.__file__)

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        if run_id in self._held:
            self._refuse(run_id, None)
        if not self._knows(run_id):
            return
        adopted = self._adopted.get(run_id)
        kill_at = time.monotonic() + grace
        if run_id in self._stops:
            self._stops[run_id].kill_at = min(self._stops[run_id].kill_at, kill_at)
        else:
            self._stops[run_id] = Stop(reason if adopted is None or adopted.pidfd >= 0 else None, kill_at)
            if adopted is not None:
                self._signal(adopted, signal.SIGTERM)
        if run_id in self._running:
            # Should the keeper be dead, this makes the run an adopted one, and `_watch` passes the stop on.
            self._send(orjson.dumps({"op": "stop", "id": run_id, "reason": reason, "grace": grace}))

    def cancel(self, run_id: str) -> None:
        if run_id in self._held:
            self._refuse(run_id, None)
        if run_id in self._running:
            self._send(orjson.dumps({"op": "cancel", "id": run_id}))

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None) -> bool:
        if self._knows(run_id):
            return True
        run_dir = Path(os.path.abspath(run_dir))
        record_dir = run_dir if record_dir is None else Path(os.path.abspath(record_dir))
        process, ended = read_process(record_dir), read_exit(record_dir)
        if ended is not None and not _is_running(run_dir, process):
            self._end(run_id, ended)
            return True
        if not os.path.lexists(record_dir / "train.log"):
            return False
        if process is not None:
            self._watch(run_id, run_dir, record_dir, process)
        else:
            # Started, but its keeper had no time yet to write down which process it is.
            self._waiting[run_id] = (run_dir, record_dir, time.monotonic() + UNSEEN_S)
        return True

    def poll(self, timeout: float) -> list[Event]:
        if self._events:
            timeout = 0.0
        elif self._waiting or self._adopted:
            timeout = min(timeout, self._patience())
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
        if self._held:
            self._look_after_held()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._wake_w < 0:
            return
        for adopted in self._adopted.values():
            if adopted.pidfd >= 0:
                os.close(adopted.pidfd)
        if self._socket is not None:
            self._socket.close()
        self._selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)
        self._wake_w = -1

    def _knows(self, run_id: str) -> bool:
        return run_id in self._running or run_id in self._adopted or run_id in self._waiting or run_id in self._held

    def _end(self, run_id: str, exit_: Exit) -> None:
        if self._stops:
            self._stops.pop(run_id, None)
        self._events.append(Ended(run_id, exit_))

    # -- the keeper

    def _send(self, line: bytes) -> bool:
        """Give the keeper an order. False: it was killed; its runs live on without it and are adopted."""
        try:
            if self._socket is None:
                self._start_keeper()
            assert self._socket is not None
            self._socket.sendall(line + b"\n")
        except ConnectionError:
            while self._socket is not None:  # what it said before its end, and the end
                self._listen()
            return False
        return True

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
                    self._end(run_id, Exit.from_dict(event["exit"]))
                case "busy":
                    self._refuse(run_id, event["holder"])
                case "exists":
                    if not self.adopt(run_id, *self._running.pop(run_id)):
                        self._refuse(run_id, None)  # its folder vanished meanwhile

    def _refuse(self, run_id: str, why: str | None) -> None:
        self._running.pop(run_id, None)
        self._stops.pop(run_id, None)
        self._held.pop(run_id, None)
        self._events.append(Refused(run_id, why))

    def _keeper_lost(self) -> None:
        if self._socket is None:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket, self._inbox = None, b""
        self._keeper.poll()
        running, self._running = self._running, {}
        for run_id, folders in running.items():
            if not self.adopt(run_id, *folders):
                self._refuse(run_id, None)
            elif run_id in self._waiting:  # for what nobody will write any more
                self._waiting[run_id] = (*folders, time.monotonic() + UNWRITTEN_S)

    # -- runs of earlier engines

    def _patience(self) -> float:
        """How long nothing needs to be looked at."""
        if self._waiting or self._stops or self._held or any(adopted.pidfd < 0 for adopted in self._adopted.values()):
            return LOOK_AGAIN_S
        due = [adopted.deadline for adopted in self._adopted.values() if adopted.deadline is not None]
        return max(LOOK_AGAIN_S, min(due) - time.monotonic()) if due else inf

    def _watch(self, run_id: str, run_dir: Path, record_dir: Path, process: dict[str, Any]) -> None:
        pid, now = int(process["pid"]), time.monotonic()
        adopted = self._adopted[run_id] = Adopted(run_dir, record_dir, process, group=pid)
        if process.get("timeout") and process.get("started"):
            adopted.deadline = now + process["started"] + process["timeout"] - time.time()
        if is_alive(pid, process["start"], process["boot"]):
            with contextlib.suppress(ProcessLookupError):
                adopted.group = os.getpgid(pid)
                adopted.pidfd = os.pidfd_open(pid)
        if adopted.pidfd >= 0:
            adopted.forged = read_exit(record_dir)
            self._selector.register(adopted.pidfd, selectors.EVENT_READ, run_id)
            if keeper.start_ticks(pid) != process["start"]:  # it ended just now, and its number went to another
                self._gone(run_id)
        adopted.look_at = now + UNWRITTEN_S
        if adopted.pidfd < 0:
            adopted.overdue_at = now + OVERDUE_S
        if run_id in self._stops:
            self._signal(adopted, signal.SIGTERM)

    def _gone(self, run_id: str) -> None:
        adopted = self._adopted[run_id]
        self._selector.unregister(adopted.pidfd)
        os.close(adopted.pidfd)
        adopted.pidfd = -1
        adopted.look_at = time.monotonic() + UNWRITTEN_S
        adopted.overdue_at = time.monotonic() + OVERDUE_S

    @staticmethod
    def _signal(adopted: Adopted, number: int) -> None:
        """Signal the process group of the run; once its first process is gone, whatever carries its mark: the number
        of the group may belong to another by then."""
        groups = {adopted.group}
        if adopted.pidfd < 0:
            groups = set()
            for pid in find_by_mark(adopted.run_dir):
                with contextlib.suppress(ProcessLookupError):
                    groups.add(os.getpgid(pid))
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _look_after_adopted(self) -> None:
        now = time.monotonic()
        for run_id, (run_dir, record_dir, until) in list(self._waiting.items()):
            process = read_process(record_dir)
            if process is None and read_exit(record_dir) is not None and not _is_running(run_dir, None):
                process = describe(0)
            if process is None and now > until:
                process = describe(next(iter(find_by_mark(run_dir)), 0))
            if process is not None:
                del self._waiting[run_id]
                self._watch(run_id, run_dir, record_dir, process)
        for run_id, adopted in list(self._adopted.items()):
            stop = self._stops.get(run_id)
            if stop is not None and now >= stop.kill_at:
                stop.kill_at = now + 1.0
                self._signal(adopted, signal.SIGKILL)
            if adopted.pidfd < 0:
                self._look_after_ended(run_id, adopted, now)
            elif adopted.deadline is not None and now >= adopted.deadline and not self._is_kept(adopted):
                adopted.deadline = None
                self.stop(run_id, "timeout", adopted.process["grace"])

    def _look_after_held(self) -> None:
        now = time.monotonic()
        for run_id, (after, order, until) in list(self._held.items()):
            if now >= until:
                self._refuse(run_id, None)
            elif after not in self._adopted and after not in self._waiting:
                del self._held[run_id]
                self.start(order)

    def _look_after_ended(self, run_id: str, adopted: Adopted, now: float) -> None:
        ended = self._read_end(adopted)
        stop = self._stops.get(run_id)
        if ended is None and now >= adopted.look_at and not self._is_kept(adopted):
            if self._rest_is_left(adopted, now):
                adopted.look_at = now + UNWRITTEN_S
                return
            ended = self._read_end(adopted) or Exit(
                code=None,
                reason=(stop and stop.reason) or "lost",
                message="it ended while neither an engine nor its keeper was there to see its exit code",
                started=adopted.process.get("started"),
                ended=time.time(),
                lingered=adopted.asked,
            )
        if ended is None and adopted.overdue_at is not None and now >= adopted.overdue_at:
            adopted.overdue_at = now + OVERDUE_S
            if not find_by_mark(adopted.run_dir):  # else its keeper waits for what it left behind
                adopted.overdue_at = None
                self._events.append(Delayed(run_id, str(adopted.record_dir / "exit.json")))
        if ended is not None:
            del self._adopted[run_id]
            if stop is not None and not ended.reason:
                ended = replace(ended, reason=stop.reason)
            self._end(run_id, ended)

    @staticmethod
    def _read_end(adopted: Adopted) -> Exit | None:
        ended = read_exit(adopted.record_dir)
        return None if ended == adopted.forged else ended

    def _rest_is_left(self, adopted: Adopted, now: float) -> bool:
        """Whether a run without a keeper has processes left; they are ended as its keeper would have ended them."""
        if not find_by_mark(adopted.run_dir):
            return False
        if adopted.rest_at is None:
            adopted.rest_at = now + adopted.process.get("linger", LINGER_S)
        elif now >= adopted.rest_at:
            self._signal(adopted, signal.SIGKILL if adopted.asked else signal.SIGTERM)
            adopted.asked = True
            adopted.rest_at = now + adopted.process.get("grace", GRACE_S)
        return True

    @staticmethod
    def _is_kept(adopted: Adopted) -> bool:
        """Whether the keeper of the run lives: then it holds the limits and writes down the end."""
        process = adopted.process
        return is_alive(process.get("keeper", 0), process.get("keeper_start", 0), process.get("boot", ""))
