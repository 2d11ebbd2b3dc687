"""The local executor: trainings on this machine, started by a supervisor that outlives the engine."""

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

import orjson

from looplab.errors import LabError
from looplab.launch import supervisor
from looplab.launch.base import Delayed, Ended, Exit, LaunchEvent, LaunchSpec, Rejected, Started, Unreachable
from looplab.runs import clock
from looplab.runs.disk import network_disk
from looplab.runs.folder import record_folder
from looplab.untrusted import UntrustedError, load_json, read_bounded

UNSEEN_S = 2.0
"""How long a started run may stay without `process.json` before its process is looked for."""
LOOK_AGAIN_S = 0.02
GRACE_S, CLEANUP_S = 10.0, 5.0
EARLIER_KEYS = {"keeper": "supervisor", "keeper_start": "supervisor_start", "linger": "cleanup_timeout"}
"""Keys of `process.json` as version 0.1 wrote them: its live runs are adopted too."""
"""For a run of which not even the limits were written down."""
UNSEEN_END = "it ended while neither an engine nor its supervisor was there to see its exit code"
LARGEST_RECORD = 1 << 20
"""Bytes of `process.json` or `exit.json`; a larger file is not what a supervisor writes."""
OVERDUE_S = 5.0
"""Seconds after the end of a run's processes from which on a missing `exit.json` is reported."""
UNWRITTEN_S = 0.2
"""How long after a process `exit.json` may still come from a supervisor that has just ended too."""
FAR_S = 0.2
"""How often a run is looked at whose processes cannot be seen from here."""
CLOCK_SET_S = 1.0
"""By how much the clocks of two engines must differ for the start of an adopted run to be reported again."""
KEEPERS_TRIED = 3


@dataclass(slots=True)
class Adopted:
    """A run that an earlier engine started, or whose supervisor was killed."""

    run_dir: Path
    record_dir: Path
    process: dict[str, Any]
    """What `process.json` says: which process, which supervisor, which limits."""
    group: int
    pidfd: int = -1
    """-1 once the process is gone and only its `exit.json` is awaited."""
    look_at: float = 0.0
    """Once it is gone: when to look whether its supervisor is gone too."""
    deadline: float | None = None
    rest_at: float | None = None
    """When the rest of a run without a supervisor is to be ended; None as long as none was seen."""
    asked: bool = False
    """Whether that rest was asked to go."""
    overdue_at: float | None = None
    """When to report that the supervisor does not write down its end; None: it lives, or that was reported."""
    forged: Exit | None = None
    """An end that was written down while the process was alive: not by its supervisor, and not believed."""


class Where(StrEnum):
    """Where the processes are that `process.json` names."""

    HERE = "here"
    """In this PID namespace, if they are alive."""
    ELSEWHERE = "elsewhere"
    """Alive, or not provably dead, on another host or in another PID namespace."""
    GONE = "gone"
    COPY = "copy"
    """In another folder: this one is a copy of it."""


RECEIVED_BYTES = 1 << 16
"""Read from the supervisor at a time: a larger buffer would be mapped and unmapped by the kernel each time."""


@dataclass(slots=True)
class Stop:
    """That a run is to end."""

    reason: str | None
    """None where it had ended by itself and only its rest is to go."""
    kill_at: float


def _message(order: dict[str, Any]) -> bytes:
    """Return an order for the supervisor as a line of JSON."""
    try:
        return orjson.dumps(order)
    except TypeError:  # paths that are not valid Unicode, which only escaped JSON keeps exactly
        return json.dumps(order).encode()


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a record file; None where it is missing, or is anything but a small file with a JSON object."""
    try:
        data = load_json(read_bounded(path, LARGEST_RECORD, follow=False))
    except (OSError, UntrustedError):
        return None
    return data if isinstance(data, dict) else None


def read_process(record_dir: Path) -> dict[str, Any] | None:
    """What `process.json` says; None where it is missing, or is not what a supervisor writes."""
    process = read_json(record_dir / "process.json")
    if process is None or not isinstance(process.get("boot"), str):
        return None
    for old, new in EARLIER_KEYS.items():
        if old in process:
            process.setdefault(new, process.pop(old))
    if not all(_is_count(process.get(key)) for key in ("pid", "supervisor")) or process["pid"] < 1:
        return None
    if not all(_is_count(ticks, 1 << 63) for ticks in (process.get("start"), process.get("supervisor_start", 0))):
        return None
    counts = {"namespace": 1 << 63, "tag": 1 << 63}
    odd = [key for key, limit in counts.items() if key in process and not _is_count(process[key], limit)]
    amounts = ("started", "clock", "timeout", "grace", "cleanup_timeout")
    odd += [key for key in amounts if process.get(key) is not None and not _is_amount(process[key])]
    return {key: value for key, value in process.items() if key not in odd}


def _is_count(value: object, limit: int = 1 << 31) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]


def read_exit(record_dir: Path) -> Exit | None:
    """How the run ended; None where that is not written down yet, or not as a supervisor writes it."""
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
    return boot == supervisor.boot_id() and ticks != 0 and supervisor.start_ticks(pid) == ticks and not is_zombie(pid)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return True


def where_is(process: dict[str, Any] | None, record_dir: Path) -> Where:
    """Where to look for the processes of a run. Nothing may be concluded from a pid of another host or namespace.

    Args:
        process: What `process.json` says; None if there is no such file.
    """
    if process is None:
        return Where.HERE
    same_boot = process["boot"] == supervisor.boot_id()
    if same_boot and process.get("tag", 0) not in (0, supervisor.tag_of(str(record_dir))):
        return Where.COPY
    if same_boot and process.get("namespace", 0) in (0, supervisor.pid_namespace()):
        return Where.HERE
    if supervisor.is_locked(str(record_dir)):
        return Where.ELSEWHERE
    if same_boot:
        return Where.GONE if process.get("locked") else Where.ELSEWHERE
    if process.get("host") in (None, os.uname().nodename):
        return Where.GONE  # this machine has booted since
    # Locks on a local disk are seen by everybody who can use that disk; those on a network disk may be local.
    known = process.get("locked") and network_disk(record_dir) is None
    return Where.GONE if known else Where.ELSEWHERE


def find_by_mark(run_dir: Path, record_dir: Path | None = None) -> list[int]:
    """The living processes that carry the mark of a run, oldest first: its tag, or without any tag its variable.

    A supervisor has the tag for the moment in which it starts the run, and is not one of its processes.
    """
    wanted = supervisor.tag_of(str(record_dir or run_dir))
    mark = os.fsencode(f"LOOPLAB_RUN_DIR={run_dir}")
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            pid = int(entry.name)
            tag = supervisor.tag_on(pid)
            with contextlib.suppress(OSError):
                if tag and tag != wanted:
                    continue
                is_marked = mark in Path(entry.path, "environ").read_bytes().split(b"\0")
                if is_marked or (tag and not _is_supervisor(Path(entry.path))):
                    os.kill(pid, 0)  # one of another user cannot be ended
                    if not is_zombie(pid):
                        found.append((supervisor.start_ticks(pid), pid))
    return [pid for _, pid in sorted(found)]


def _is_supervisor(process: Path) -> bool:
    """Whether a process in /proc was started as a supervisor."""
    argv = (process / "cmdline").read_bytes().split(b"\0")
    return any(word.endswith(b"/looplab/launch/supervisor.py") for word in argv[:4])


def signal_groups(pids: Iterable[int], number: int) -> None:
    """Send a signal to the process groups of these processes."""
    groups = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            group = os.getpgid(pid)
            if group > 1:
                groups.add(group)
            else:  # its leader is outside of this PID namespace, and 0 would be our own group
                os.kill(pid, number)
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def stop_without_engine(run_dirs: Sequence[Path], grace: float) -> tuple[list[str], list[str]]:
    """End runs that live without an engine: SIGTERM, and SIGKILL after `grace` seconds.

    Returns:
        The names of the folders of the runs that were stopped, and of those whose processes cannot be seen from here.
    """
    found: list[tuple[Path, Path, dict[str, Any]]] = []
    unseen = []
    for run_dir in run_dirs:
        record_dir = record_folder(run_dir)
        process = read_process(record_dir)
        where = where_is(process, record_dir)
        if where is Where.ELSEWHERE:
            unseen.append(run_dir.name)
        elif where is Where.HERE and (is_running(run_dir, record_dir) or find_by_mark(run_dir, record_dir)):
            found.append((run_dir, record_dir, process or {}))

    def signal_all(number: int) -> bool:
        """Signal every process that is left; return whether there is one."""
        is_left = False
        for run_dir, record_dir, process in found:
            pids = find_by_mark(run_dir, record_dir)
            if process and is_alive(process["pid"], process["start"], process["boot"]):
                pids.append(process["pid"])
            if number:
                signal_groups(pids, number)
            is_left |= bool(pids)
        return is_left

    signal_all(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and signal_all(0):
        time.sleep(0.05)
    signal_all(signal.SIGKILL)
    return [run_dir.name for run_dir, _, _ in found], unseen


def is_running(run_dir: Path, record_dir: Path) -> bool:
    """Whether a run may be alive: its first process; where that is not known, any with its mark; where its processes
    cannot be seen from here, as long as nothing proves the contrary."""
    process = read_process(record_dir)
    match where_is(process, record_dir):
        case Where.ELSEWHERE:
            return True
        case Where.GONE | Where.COPY:
            return False
    if process is None:
        return bool(find_by_mark(run_dir, record_dir))
    return is_alive(process["pid"], process["start"], process["boot"])


def describe(pid: int) -> dict[str, Any]:
    """What `process.json` would say about a process that was found by its mark."""
    parent = 0
    with contextlib.suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        if b"/launch/supervisor.py\0" not in Path(f"/proc/{parent}/cmdline").read_bytes():
            parent = 0
    return {
        "pid": pid,
        "start": supervisor.start_ticks(pid),
        "boot": supervisor.boot_id(),
        "supervisor": parent,
        "supervisor_start": supervisor.start_ticks(parent) if parent else 0,
    }


def _stamp(started: float) -> float:
    """When a process started, from what the monotonic clock of this machine showed then."""
    return clock.now() - (time.monotonic() - started)


def _lost(message: str, process: dict[str, Any] | None) -> Exit:
    """The end of a run that nobody saw."""
    started, ended = (process or {}).get("started"), clock.now()
    if process and started is not None and "clock" in process and process["boot"] == supervisor.boot_id():
        ended = started + time.monotonic() - process["clock"]
    return Exit(None, reason="lost", message=message, started=started, ended=max(ended, started or 0.0))


class LocalExecutor:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._socket: socket.socket | None = None
        self._inbox = b""
        self._running: dict[str, tuple[str, str]] = {}  # run → its folder and its record folder
        self._adopted: dict[str, Adopted] = {}
        self._waiting: dict[str, tuple[Path, Path, float]] = {}  # run → its folders, and until when
        self._far: dict[str, tuple[Path, Path]] = {}  # run that cannot be seen from here → its folders
        self._far_at = 0.0  # when they were last looked at
        self._stops: dict[str, Stop] = {}
        self._held: dict[
            str, tuple[str, LaunchSpec, float]
        ] = {}  # run → (the adopted run before it, its order, until when)
        self._events: list[LaunchEvent] = []
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ, "wake")
        self._start_supervisor()  # now, so that it is up when the first run is decided on

    def wake(self) -> None:
        """Make a `poll` that waits return at once; may be called from a signal handler or another thread."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nothing waits
            os.write(self._wake_w, b"x")

    # -- the contract

    def start(self, order: LaunchSpec, after: str | None = None) -> None:
        from looplab.launch.slots import lock_paths

        run_id, folder = order.run_id, os.path.abspath(order.run_dir)
        record = folder if order.record_dir is None else os.path.abspath(order.record_dir)
        if self._knows(run_id):
            return
        if after in self._adopted or after in self._waiting or after in self._far:
            # The supervisor of that run is another one, or dead: it is waited for here.
            self._held[run_id] = (after, order, time.monotonic() + supervisor.HELD_S)
            return
        line = _message(
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
                "cleanup_timeout": order.cleanup_timeout,
            }
        )
        for _ in range(KEEPERS_TRIED):
            if self._send(line):
                self._running[run_id] = folder, record
                return
        raise LabError("the process that keeps the trainings ends as soon as it is started", file=supervisor.__file__)

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        if run_id in self._held:
            self._refuse(run_id, None)
        if not self._knows(run_id):
            return
        adopted = self._adopted.get(run_id)
        kill_at = time.monotonic() + grace
        if run_id in self._far and not find_by_mark(*self._far[run_id]):
            self._give_up(run_id, reason)
            return
        if run_id in self._stops:
            self._stops[run_id].kill_at = min(self._stops[run_id].kill_at, kill_at)
        else:
            self._stops[run_id] = Stop(reason if adopted is None or adopted.pidfd >= 0 else None, kill_at)
            if adopted is not None:
                self._signal(adopted, signal.SIGTERM)
            elif run_id in self._far:
                signal_groups(find_by_mark(*self._far[run_id]), signal.SIGTERM)
        if run_id in self._running:
            # Should the supervisor be dead, this makes the run an adopted one, and `_watch` passes the stop on.
            self._send(_message({"op": "stop", "id": run_id, "reason": reason, "grace": grace}))

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
        if ended is not None and not is_running(run_dir, record_dir):
            self._end(run_id, ended)
            return True
        if not os.path.lexists(record_dir / "train.log"):
            return False
        where = where_is(process, record_dir)
        if where is Where.COPY:
            self._end(run_id, _lost("this folder is a copy; the run belongs to the folder that was copied", process))
        elif where is Where.ELSEWHERE:
            self._lose_sight(run_id, run_dir, record_dir, process)
        elif process is not None:
            self._watch(run_id, run_dir, record_dir, process)
        else:
            # Started, but its supervisor had no time yet to write down which process it is.
            self._waiting[run_id] = (run_dir, record_dir, time.monotonic() + UNSEEN_S)
        return True

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if self._events:
            timeout = 0.0
        elif self._waiting or self._adopted or self._far:
            timeout = min(timeout, self._patience())
        for key, _ in self._selector.select(timeout):
            if key.data == "supervisor":
                self._listen()
            elif key.data == "wake":
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            else:
                self._gone(key.data)
        if self._waiting or self._adopted:
            self._look_after_adopted()
        if self._far and time.monotonic() - self._far_at >= FAR_S:
            self._look_far()
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
        return (
            run_id in self._running
            or run_id in self._adopted
            or run_id in self._waiting
            or run_id in self._far
            or run_id in self._held
        )

    def _end(self, run_id: str, exit_: Exit) -> None:
        if self._stops:
            self._stops.pop(run_id, None)
        self._events.append(Ended(run_id, exit_))

    # -- the supervisor

    def _send(self, line: bytes) -> bool:
        """Give the supervisor an order. False: it was killed; its runs live on without it and are adopted."""
        try:
            if self._socket is None:
                self._start_supervisor()
            assert self._socket is not None
            self._socket.sendall(line + b"\n")
        except ConnectionError:
            while self._socket is not None:  # what it said before its end, and the end
                self._listen()
            return False
        return True

    def _start_supervisor(self) -> None:
        ours, theirs = socket.socketpair()
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._socket = ours
        self._selector.register(ours, selectors.EVENT_READ, "supervisor")
        self._socket.sendall(json.dumps({"op": "env", "env": dict(os.environ)}).encode() + b"\n")

    def _listen(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(RECEIVED_BYTES)
        except OSError:
            data = b""
        if not data:
            self._supervisor_lost()
            return
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            event = json.loads(line)  # its texts may hold paths that are not valid Unicode
            run_id = event["id"]
            match event["ev"]:
                case "started":
                    self._events.append(Started(run_id, event["pid"], _stamp(event["clock"])))
                case "ended":
                    self._running.pop(run_id, None)
                    self._end(run_id, Exit.from_dict(event["exit"]))
                case "busy":
                    self._refuse(run_id, event["holder"])
                case "exists":
                    if not self.adopt(run_id, *map(Path, self._running.pop(run_id))):
                        self._refuse(run_id, None)  # its folder vanished meanwhile

    def _refuse(self, run_id: str, why: str | None) -> None:
        self._running.pop(run_id, None)
        self._stops.pop(run_id, None)
        self._held.pop(run_id, None)
        self._events.append(Rejected(run_id, why))

    def _supervisor_lost(self) -> None:
        if self._socket is None:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket, self._inbox = None, b""
        self._supervisor.poll()
        running, self._running = self._running, {}
        for run_id, (folder, record) in running.items():
            if not self.adopt(run_id, Path(folder), Path(record)):
                self._refuse(run_id, None)
            elif run_id in self._waiting:  # for what nobody will write any more
                self._waiting[run_id] = (Path(folder), Path(record), time.monotonic() + UNWRITTEN_S)

    # -- runs of earlier engines

    def _patience(self) -> float:
        """How long nothing needs to be looked at."""
        if self._waiting or self._stops or self._held or any(adopted.pidfd < 0 for adopted in self._adopted.values()):
            return LOOK_AGAIN_S
        due = [self._far_at + FAR_S] if self._far else []
        due += [adopted.deadline for adopted in self._adopted.values() if adopted.deadline is not None]
        return max(LOOK_AGAIN_S, min(due) - time.monotonic()) if due else inf

    def _watch(self, run_id: str, run_dir: Path, record_dir: Path, process: dict[str, Any]) -> None:
        pid, now = int(process["pid"]), time.monotonic()
        adopted = self._adopted[run_id] = Adopted(run_dir, record_dir, process, group=pid)
        if process.get("timeout") and "clock" in process:
            adopted.deadline = process["clock"] + process["timeout"]
        if is_alive(pid, process["start"], process["boot"]):
            with contextlib.suppress(ProcessLookupError):
                adopted.group = os.getpgid(pid)
                adopted.pidfd = os.pidfd_open(pid)
        if adopted.pidfd >= 0:
            adopted.forged = read_exit(record_dir)
            self._selector.register(adopted.pidfd, selectors.EVENT_READ, run_id)
            if "clock" in process:
                started = _stamp(process["clock"])
                if abs(started - process.get("started", 0.0)) > CLOCK_SET_S:
                    self._events.append(Started(run_id, pid, started))
            if supervisor.start_ticks(pid) != process["start"]:  # it ended just now, and its number went to another
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
        if adopted.pidfd < 0:
            signal_groups(find_by_mark(adopted.run_dir, adopted.record_dir), number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(adopted.group, number)

    def _look_after_adopted(self) -> None:
        now = time.monotonic()
        for run_id, (run_dir, record_dir, until) in list(self._waiting.items()):
            process = read_process(record_dir)
            if process is None and read_exit(record_dir) is not None and not find_by_mark(run_dir, record_dir):
                process = describe(0)
            if process is None and now > until:
                process = describe(next(iter(find_by_mark(run_dir, record_dir)), 0))
                if not process["pid"] and supervisor.is_locked(str(record_dir)):
                    del self._waiting[run_id]
                    self._lose_sight(run_id, run_dir, record_dir, None)
                    continue
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
                self.stop(run_id, "timeout", adopted.process.get("grace", GRACE_S))

    def _look_after_held(self) -> None:
        now = time.monotonic()
        for run_id, (after, order, until) in list(self._held.items()):
            if now >= until:
                self._refuse(run_id, None)
            elif not self._knows(after):
                del self._held[run_id]
                self.start(order)

    def _look_after_ended(self, run_id: str, adopted: Adopted, now: float) -> None:
        ended = self._read_end(adopted)
        stop = self._stops.get(run_id)
        if ended is None and now >= adopted.look_at and not self._is_kept(adopted):
            if self._rest_is_left(adopted, now):
                adopted.look_at = now + UNWRITTEN_S
                return
            ended = self._read_end(adopted) or replace(
                _lost(UNSEEN_END, adopted.process),
                reason=(stop and stop.reason) or "lost",
                lingered=adopted.asked,
            )
        if ended is None and adopted.overdue_at is not None and now >= adopted.overdue_at:
            adopted.overdue_at = now + OVERDUE_S
            if not find_by_mark(adopted.run_dir):  # else its supervisor waits for what it left behind
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
        """Return whether a run without a supervisor has processes left, and end them as its supervisor would."""
        if not find_by_mark(adopted.run_dir, adopted.record_dir):
            return False
        if adopted.rest_at is None:
            adopted.rest_at = now + adopted.process.get("cleanup_timeout", CLEANUP_S)
        elif now >= adopted.rest_at:
            self._signal(adopted, signal.SIGKILL if adopted.asked else signal.SIGTERM)
            adopted.asked = True
            adopted.rest_at = now + adopted.process.get("grace", GRACE_S)
        return True

    # -- runs that cannot be seen from here

    def _lose_sight(self, run_id: str, run_dir: Path, record_dir: Path, process: dict[str, Any] | None) -> None:
        self._far[run_id] = run_dir, record_dir
        host = (process or {}).get("host") or "another host"
        here = host == os.uname().nodename or process is None
        self._events.append(Unreachable(run_id, "another PID namespace or container" if here else f"host {host}"))

    def _look_far(self) -> None:
        """End the runs whose end is written down, or which are dead beyond doubt; watch those that came into sight."""
        self._far_at = now = time.monotonic()
        for run_id, (run_dir, record_dir) in list(self._far.items()):
            process = read_process(record_dir)
            locked = supervisor.is_locked(str(record_dir))
            where = where_is(process, record_dir)
            if process is None:
                where = Where.ELSEWHERE if locked else Where.GONE
            ended = read_exit(record_dir)
            stop = self._stops.get(run_id)
            if where is Where.HERE and process is not None:
                del self._far[run_id]
                self._watch(run_id, run_dir, record_dir, process)
            elif (ended is not None and not locked) or where is not Where.ELSEWHERE:
                del self._far[run_id]
                ended = ended or _lost(UNSEEN_END, process)
                if stop is not None and ended.reason in (None, "lost"):
                    ended = replace(ended, reason=stop.reason)
                self._end(run_id, ended)
            elif stop is not None and now >= stop.kill_at:
                stop.kill_at = now + 1.0
                signal_groups(find_by_mark(run_dir, record_dir), signal.SIGKILL)

    def _give_up(self, run_id: str, reason: str) -> None:
        """End a run on a person's word, although its processes cannot be seen."""
        process = read_process(self._far.pop(run_id)[1])
        message = "given up: it was started where this engine cannot see its processes, and may still run there"
        self._end(run_id, replace(_lost(message, process), reason=reason))

    @staticmethod
    def _is_kept(adopted: Adopted) -> bool:
        """Whether the supervisor of the run lives: then it holds the limits and writes down the end."""
        process = adopted.process
        return is_alive(process.get("supervisor", 0), process.get("supervisor_start", 0), process.get("boot", ""))
