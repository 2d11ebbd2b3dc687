"""The local executor: runs trainers on this machine, under a supervisor process that outlives the engine."""

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

from looplab.config.disk import network_disk
from looplab.errors import LabError
from looplab.launch import procfs, supervisor
from looplab.launch.base import (
    Delayed,
    Ended,
    ExecutorTraits,
    Exit,
    LaunchEvent,
    LaunchSpec,
    Place,
    Rejected,
    Started,
    Unreachable,
    claim_name,
)
from looplab.launch.slots import lock_paths
from looplab.runs import clock
from looplab.runs.folder import record_folder
from looplab.untrusted import UntrustedError, load_json, read_bounded

PROCESS_FILE_TIMEOUT_S = 2.0
"""Seconds a started run may lack `process.json` before its process is searched for by mark."""
POLL_INTERVAL_S = 0.02
DEFAULT_GRACE_S, DEFAULT_CLEANUP_S = 10.0, 5.0
"""Limits of a run whose `process.json` does not record them."""
EARLIER_KEYS = {"keeper": "supervisor", "keeper_start": "supervisor_start", "linger": "cleanup_timeout"}
"""Keys of `process.json` as version 0.1 wrote them; live runs of that version are adopted too."""
EXIT_NOT_OBSERVED = "it ended while neither an engine nor its supervisor was running, so its exit code is unknown"
MAX_RECORD_BYTES = 1 << 20
"""Size limit of `process.json` and `exit.json`; a supervisor writes far less."""
OVERDUE_S = 5.0
"""Seconds after the end of a run's processes before a missing `exit.json` is reported."""
EXIT_FILE_DELAY_S = 0.2
"""Seconds to wait for `exit.json` after a trainer exits, in case its supervisor is still writing it."""
UNREACHABLE_POLL_S = 0.2
"""Seconds between checks of runs whose processes are not visible from here."""
CLOCK_SET_S = 1.0
"""Seconds between recorded and recomputed start from which an adopted run's start is reported again."""
SUPERVISOR_ATTEMPTS = 3
RECV_BYTES = 1 << 16
"""Bytes read from the supervisor at a time; the allocator would map and unmap a larger buffer on every call."""


@dataclass(slots=True)
class Adopted:
    """A run that an earlier engine started, or whose supervisor was killed."""

    run_dir: Path
    record_dir: Path
    process: dict[str, Any]
    """Content of `process.json`: pid, supervisor and limits."""
    group: int
    """Process group of the trainer."""
    attempt: int = 1
    pidfd: int = -1
    """-1 once the trainer has exited and only `exit.json` is awaited."""
    check_supervisor_at: float = 0.0
    """After the trainer's exit: when to check whether its supervisor is gone too. Monotonic, like all times here."""
    deadline: float | None = None
    """When the run times out; None: no limit."""
    signal_leftovers_at: float | None = None
    """When to signal the leftover processes of a run without a supervisor; None: none were seen yet."""
    leftovers_signalled: bool = False
    """Whether leftover processes were sent SIGTERM."""
    overdue_at: float | None = None
    """When to report a missing `exit.json`; None: the trainer is alive, or it was reported."""
    forged: Exit | None = None
    """An exit recorded while the trainer was still alive: not written by its supervisor, and ignored."""
    ended_before: bool = False
    """Whether the trainer had exited before the run was adopted: its supervisor may not have recorded the exit yet."""


class Where(StrEnum):
    """Location of the processes that `process.json` names."""

    HERE = "here"
    """In this PID namespace, if alive."""
    ELSEWHERE = "elsewhere"
    """Alive, or not provably dead, on another host or in another PID namespace."""
    GONE = "gone"
    """Provably dead."""
    COPY = "copy"
    """They belong to another folder, of which this one is a copy."""


@dataclass(slots=True)
class Stop:
    """A pending request to end a run."""

    reason: str | None
    """None if the trainer had already exited and only leftover processes are to be ended."""
    kill_at: float
    """When to send SIGKILL, on the monotonic clock."""


def _encode_message(message: dict[str, Any]) -> bytes:
    """Return a message to the supervisor as a line of JSON, without the newline."""
    try:
        return orjson.dumps(message)
    except TypeError:  # paths that are not valid Unicode, which only escaped JSON preserves
        return json.dumps(message).encode()


def _encode_start(spec: LaunchSpec, after: str | None, folder: str, record: str) -> bytes:
    """Return the message that starts a run."""
    attempt = {"attempt": spec.attempt} if spec.attempt > 1 else {}
    return _encode_message(
        {
            **attempt,
            "op": "start",
            "id": spec.run_id,
            "after": after,
            "dir": folder,
            "record": record,
            "path": spec.path,
            "argv": list(spec.argv),
            # This variable marks every process of the run, whatever its session or parent.
            "env": {**spec.env, "LOOPLAB_RUN_DIR": folder},
            "cwd": str(spec.cwd),
            "cores": list(spec.slot.cores),
            "locks": [str(path) for path in lock_paths(spec.slot)],
            "label": folder,
            "timeout": spec.timeout,
            "grace": spec.grace,
            "cleanup_timeout": spec.cleanup_timeout,
        }
    )


def _decode_message(line: bytes) -> dict[str, Any]:
    """Return a message of the supervisor."""
    try:
        return orjson.loads(line)  # type: ignore[no-any-return]
    except orjson.JSONDecodeError:  # escaped paths that are not valid Unicode
        return json.loads(line)  # type: ignore[no-any-return]


def _absolute(path: Path) -> str:
    """Return a path as absolute text; most are absolute already, and `abspath` would split and join them again."""
    text = str(path)
    return text if text.startswith("/") and ".." not in text else os.path.abspath(text)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a record file; None if it is missing, too large, or not a JSON object."""
    try:
        data = load_json(read_bounded(path, MAX_RECORD_BYTES, follow=False))
    except (OSError, UntrustedError):
        return None
    return data if isinstance(data, dict) else None


def read_process(record_dir: Path, attempt: int | None = None) -> dict[str, Any] | None:
    """Return the content of `process.json`; None if it is missing, or not as a supervisor writes it.

    Args:
        record_dir: The record folder of the run.
        attempt: The attempt that it must be about; None: any.
    """
    process = read_json(record_dir / "process.json")
    if process is None or not isinstance(process.get("boot"), str):
        return None
    if attempt is not None and process.get("attempt", 1) != attempt:
        return None
    for old, new in EARLIER_KEYS.items():
        if old in process:
            process.setdefault(new, process.pop(old))
    if not all(_is_count(process.get(key)) for key in ("pid", "supervisor")) or process["pid"] < 1:
        return None
    if not all(_is_count(ticks, 1 << 63) for ticks in (process.get("start"), process.get("supervisor_start", 0))):
        return None
    counts = {"namespace": 1 << 63, "tag": 1 << 63}
    invalid = [key for key, limit in counts.items() if key in process and not _is_count(process[key], limit)]
    amounts = ("started", "clock", "timeout", "grace", "cleanup_timeout")
    invalid += [key for key in amounts if process.get(key) is not None and not _is_amount(process[key])]
    return {key: value for key, value in process.items() if key not in invalid}


def _is_count(value: object, limit: int = 1 << 31) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]


def read_exit(record_dir: Path, attempt: int | None = None) -> Exit | None:
    """Return how the run ended; None if `exit.json` is missing, or not as a supervisor writes it.

    Args:
        record_dir: The record folder of the run.
        attempt: The attempt that it must be about; None: any.
    """
    ended = read_json(record_dir / "exit.json")
    if ended is None or "code" not in ended:
        return None
    if attempt is not None and ended.get("attempt", 1) != attempt:
        return None
    amounts = (ended.get(key) for key in ("started", "ended", "user_s", "system_s", "max_rss_kb"))
    is_valid = (
        all(ended.get(key) is None or _is_count(ended[key]) for key in ("code", "signal", "attempt"))
        and all(ended.get(key) is None or isinstance(ended[key], str) for key in ("reason", "message"))
        and all(value is None or _is_amount(value) for value in amounts)
    )
    return Exit.from_dict({**ended, "lingered": ended.get("lingered") is True}) if is_valid else None


def is_alive(pid: int, ticks: int, boot: str) -> bool:
    """Return whether this exact process is alive; the start time and boot id guard against a reused pid."""
    is_same = boot == supervisor.boot_id() and ticks != 0 and supervisor.start_ticks(pid) == ticks
    return is_same and not procfs.is_zombie(pid)


def where_is(process: dict[str, Any] | None, record_dir: Path) -> Where:
    """Return where the processes of a run are. A pid from another host or PID namespace proves nothing.

    Args:
        process: Content of `process.json`; None if there is no such file.
        record_dir: The record folder of the run.
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
    # A lock on a local disk is visible to everyone who can use that disk; on a network disk it may be local to a host.
    is_lock_visible = process.get("locked") and network_disk(record_dir) is None
    return Where.GONE if is_lock_visible else Where.ELSEWHERE


def find_by_mark(run_dir: Path, record_dir: Path | None = None) -> list[int]:
    """Return the live processes that carry a run's mark, oldest first: its tag or, without a tag, its variable.

    A supervisor carries the tag while it starts the run; it is not one of the run's processes.
    """
    run_tag = supervisor.tag_of(str(record_dir or run_dir))
    mark = os.fsencode(f"LOOPLAB_RUN_DIR={run_dir}")
    found = []
    for pid in procfs.pids():
        tag = supervisor.tag_on(pid)
        with contextlib.suppress(OSError):
            if tag and tag != run_tag:
                continue
            if mark in procfs.environ(pid) or (tag and not _is_supervisor(pid)):
                os.kill(pid, 0)  # raises for a process of another user, which cannot be signalled
                if not procfs.is_zombie(pid):
                    found.append((supervisor.start_ticks(pid), pid))
    return [pid for _, pid in sorted(found)]


def _is_supervisor(pid: int) -> bool:
    """Return whether a process was started as a supervisor."""
    return any(word.endswith(b"/looplab/launch/supervisor.py") for word in procfs.argv(pid)[:4])


def signal_groups(pids: Iterable[int], number: int) -> None:
    """Send a signal to the process groups of these processes."""
    groups = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            group = os.getpgid(pid)
            if group > 1:
                groups.add(group)
            else:  # the leader is outside this PID namespace; group 0 would mean our own
                os.kill(pid, number)
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def stop_without_engine(run_dirs: Sequence[Path], grace: float) -> tuple[list[str], list[str]]:
    """End runs that have no engine: SIGTERM, then SIGKILL after `grace` seconds.

    Returns:
        Folder names of the runs that were stopped, and of those whose processes are not visible from here.
    """
    found: list[tuple[Path, Path, dict[str, Any]]] = []
    unreachable = []
    for run_dir in run_dirs:
        record_dir = record_folder(run_dir)
        process = read_process(record_dir)
        where = where_is(process, record_dir)
        if where is Where.ELSEWHERE:
            unreachable.append(run_dir.name)
        elif where is Where.HERE and (is_running(run_dir, record_dir) or find_by_mark(run_dir, record_dir)):
            found.append((run_dir, record_dir, process or {}))

    def signal_all(number: int) -> bool:
        """Signal every remaining process (0: only check); return whether there is one."""
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
    return [run_dir.name for run_dir, _, _ in found], unreachable


def is_running(run_dir: Path, record_dir: Path) -> bool:
    """Return whether a run may be alive.

    Decided by its trainer process; if that is unknown, by any process with its mark. A run whose processes are not
    visible from here counts as alive until proven dead.
    """
    process = read_process(record_dir)
    match where_is(process, record_dir):
        case Where.ELSEWHERE:
            return True
        case Where.GONE | Where.COPY:
            return False
    if process is None:
        return bool(find_by_mark(run_dir, record_dir))
    return is_alive(process["pid"], process["start"], process["boot"])


def _describe_process(pid: int) -> dict[str, Any]:
    """Return what `process.json` would hold for a process that was found by its mark; pid 0: for a dead one."""
    parent = 0
    with contextlib.suppress(OSError, IndexError):
        parent = procfs.parent(pid)
        if not _is_supervisor(parent):
            parent = 0
    return {
        "pid": pid,
        "start": supervisor.start_ticks(pid),
        "boot": supervisor.boot_id(),
        "supervisor": parent,
        "supervisor_start": supervisor.start_ticks(parent) if parent else 0,
    }


def _unix_time(monotonic: float) -> float:
    """Convert a time of this machine's monotonic clock to Unix time."""
    return clock.now() - (time.monotonic() - monotonic)


def _lost_exit(message: str, process: dict[str, Any] | None) -> Exit:
    """Return the exit of a run whose end nobody observed."""
    started, ended = (process or {}).get("started"), clock.now()
    if process and started is not None and "clock" in process and process["boot"] == supervisor.boot_id():
        ended = started + time.monotonic() - process["clock"]
    return Exit(None, reason="lost", message=message, started=started, ended=max(ended, started or 0.0))


class LocalExecutor:
    """Runs trainers on this machine; see `Executor` and `BatchExecutor` for the contract.

    New runs are started by a supervisor process. Runs of an earlier engine, or of a supervisor that was killed, are
    adopted: watched by pidfd, with their limits enforced here if their supervisor is gone.
    """

    traits = ExecutorTraits()
    script = supervisor.__file__
    """The program of the supervisor."""

    def __init__(self) -> None:
        self._host = os.uname().nodename
        self._selector = selectors.DefaultSelector()
        self._socket: socket.socket | None = None
        self._inbox = b""
        self._running: dict[str, tuple[str, str, int]] = {}  # run → (run folder, record folder, attempt)
        self._adopted: dict[str, Adopted] = {}
        # Adopted runs whose process.json is still awaited: run → (run folder, record folder, attempt, deadline)
        self._unidentified: dict[str, tuple[Path, Path, int, float]] = {}
        self._unreachable: dict[str, tuple[Path, Path, int]] = {}  # run → (run folder, record folder, attempt)
        self._unreachable_checked_at = 0.0
        self._stops: dict[str, Stop] = {}
        # Starts that wait for an adopted run: run → (that run, spec, deadline)
        self._pending: dict[str, tuple[str, LaunchSpec, float]] = {}
        self._rejected: set[str] = set()  # runs that were not started, and not asked for again since
        self._events: list[LaunchEvent] = []
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ, "wake")
        self._start_supervisor()  # now, so that it is ready before the first run

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: `poll` will wake anyway; closed: nobody waits
            os.write(self._wake_w, b"x")

    # -- the contract

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        self.start_all([(spec, after)])

    def start_all(self, starts: Sequence[tuple[LaunchSpec, str | None]]) -> None:
        lines: list[bytes] = []
        folders: dict[str, tuple[str, str, int]] = {}
        for spec, after in starts:
            if self._knows(spec.run_id):
                continue
            self._rejected.discard(spec.run_id)
            if after in self._rejected:  # what that run was waiting for may still be running
                self._reject(spec.run_id, None)
                continue
            if (
                after in self._adopted
                or after in self._unidentified
                or after in self._unreachable
                or after in self._pending
            ):
                # That run has another supervisor, or none: wait for it here.
                self._pending[spec.run_id] = (after, spec, time.monotonic() + supervisor.MAX_PENDING_S)
                continue
            folder = _absolute(spec.run_dir)
            record = folder if spec.record_dir is None else _absolute(spec.record_dir)
            folders[spec.run_id] = folder, record, spec.attempt
            lines.append(_encode_start(spec, after, folder, record))
        if not lines:
            return
        for _ in range(SUPERVISOR_ATTEMPTS):
            if self._send(b"\n".join(lines)):
                self._running |= folders
                return
        raise LabError("the supervisor process exits as soon as it is started", file=supervisor.__file__)

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        if run_id in self._pending:
            self._reject(run_id, None)
        if not self._knows(run_id):
            return
        adopted = self._adopted.get(run_id)
        kill_at = time.monotonic() + grace
        if run_id in self._unreachable and not find_by_mark(*self._unreachable[run_id][:2]):
            self._abandon(run_id, reason)
            return
        if run_id in self._stops:
            self._stops[run_id].kill_at = min(self._stops[run_id].kill_at, kill_at)
        else:
            self._stops[run_id] = Stop(reason if adopted is None or adopted.pidfd >= 0 else None, kill_at)
            if adopted is not None:
                self._signal(adopted, signal.SIGTERM)
            elif run_id in self._unreachable:
                signal_groups(find_by_mark(*self._unreachable[run_id][:2]), signal.SIGTERM)
        if run_id in self._running:
            # If the supervisor is dead, `_send` adopts the run, and `_watch` applies the stop.
            self._send(_encode_message({"op": "stop", "id": run_id, "reason": reason, "grace": grace}))

    def cancel(self, run_id: str) -> None:
        if run_id in self._pending:
            self._reject(run_id, None)
        if run_id in self._running:
            self._send(orjson.dumps({"op": "cancel", "id": run_id}))

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        if self._knows(run_id):
            return True
        run_dir = Path(os.path.abspath(run_dir))
        record_dir = run_dir if record_dir is None else Path(os.path.abspath(record_dir))
        process, ended = read_process(record_dir, attempt), read_exit(record_dir, attempt)
        if ended is not None and not is_running(run_dir, record_dir) and not supervisor.is_locked(str(record_dir)):
            self._end(run_id, ended)
            return True
        if not os.path.lexists(record_dir / claim_name(attempt)):
            return False
        where = where_is(process, record_dir)
        if where is Where.COPY:
            message = "this folder is a copy; the run belongs to the original folder"
            self._end(run_id, _lost_exit(message, process))
        elif where is Where.ELSEWHERE:
            self._report_unreachable(run_id, run_dir, record_dir, attempt, process)
        elif process is not None:
            self._watch(run_id, run_dir, record_dir, attempt, process)
        else:
            # Started, but its supervisor has not written process.json yet.
            self._unidentified[run_id] = (run_dir, record_dir, attempt, time.monotonic() + PROCESS_FILE_TIMEOUT_S)
        return True

    def is_alive(self, run_dir: Path, record_dir: Path | None = None) -> bool:
        return is_running(run_dir, record_dir or run_dir)

    def stop_detached(self, run_dirs: Sequence[Path], grace: float) -> tuple[list[str], list[str]]:
        return stop_without_engine(run_dirs, grace)

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if self._events:
            timeout = 0.0
        elif self._unidentified or self._adopted or self._unreachable:
            timeout = min(timeout, self._until_next_check())
        for key, _ in self._selector.select(timeout):
            if key.data == "supervisor":
                self._receive()
            elif key.data == "wake":
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            else:
                self._on_trainer_exit(key.data)
        if self._unidentified or self._adopted:
            self._check_adopted()
        if self._unreachable and time.monotonic() - self._unreachable_checked_at >= UNREACHABLE_POLL_S:
            self._check_unreachable()
        if self._pending:
            self._check_pending()
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
            or run_id in self._unidentified
            or run_id in self._unreachable
            or run_id in self._pending
        )

    def _end(self, run_id: str, exit_: Exit) -> None:
        if self._stops:
            self._stops.pop(run_id, None)
        self._events.append(Ended(run_id, exit_))

    # -- the supervisor

    def _send(self, line: bytes) -> bool:
        """Send a message to the supervisor. Returns False if it was killed; its runs continue and are adopted."""
        try:
            if self._socket is None:
                self._start_supervisor()
            assert self._socket is not None
            self._socket.sendall(line + b"\n")
        except ConnectionError:
            while self._socket is not None:  # its last events, then end of file
                self._receive()
            return False
        return True

    def _start_supervisor(self) -> None:
        ours, theirs = socket.socketpair()
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", self.script, str(theirs.fileno())],
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

    def _receive(self) -> None:
        """Read messages from the supervisor and queue their events."""
        assert self._socket is not None
        try:
            data = self._socket.recv(RECV_BYTES)
        except OSError:
            data = b""
        if not data:
            self._on_supervisor_exit()
            return
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            event = _decode_message(line)
            run_id = event["id"]
            match event["ev"]:
                case "started":
                    place = Place(self._host, event["pid"])
                    self._events.append(Started(run_id, place, _unix_time(event["clock"])))
                case "ended":
                    self._running.pop(run_id, None)
                    self._end(run_id, Exit.from_dict(event["exit"]))
                case "busy":
                    self._reject(run_id, event["holder"])
                case "exists":
                    folder, record, attempt = self._running.pop(run_id)
                    if not self.adopt(run_id, Path(folder), Path(record), attempt):
                        self._reject(run_id, None)  # its folder was deleted meanwhile

    def _reject(self, run_id: str, holder: str | None) -> None:
        self._running.pop(run_id, None)
        self._stops.pop(run_id, None)
        self._pending.pop(run_id, None)
        self._rejected.add(run_id)
        self._events.append(Rejected(run_id, holder))
        for waiting in [waiting for waiting, (after, *_) in self._pending.items() if after == run_id]:
            self._reject(waiting, None)

    def _on_supervisor_exit(self) -> None:
        """Adopt the runs of a supervisor that was killed."""
        if self._socket is None:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        self._socket, self._inbox = None, b""
        self._supervisor.poll()
        running, self._running = self._running, {}
        for run_id, (folder, record, attempt) in running.items():
            if not self.adopt(run_id, Path(folder), Path(record), attempt):
                self._reject(run_id, None)
            elif run_id in self._unidentified:  # nobody will write its process.json any more
                self._unidentified[run_id] = (*self._unidentified[run_id][:3], time.monotonic() + EXIT_FILE_DELAY_S)

    # -- runs of earlier engines

    def _until_next_check(self) -> float:
        """Return the seconds until an adopted run needs a check."""
        has_exited = any(adopted.pidfd < 0 for adopted in self._adopted.values())
        if self._unidentified or self._stops or self._pending or has_exited:
            return POLL_INTERVAL_S
        due = [self._unreachable_checked_at + UNREACHABLE_POLL_S] if self._unreachable else []
        due += [adopted.deadline for adopted in self._adopted.values() if adopted.deadline is not None]
        return max(POLL_INTERVAL_S, min(due) - time.monotonic()) if due else inf

    def _watch(self, run_id: str, run_dir: Path, record_dir: Path, attempt: int, process: dict[str, Any]) -> None:
        """Watch an adopted run whose process is known, by pidfd if it is alive."""
        pid, now = int(process["pid"]), time.monotonic()
        adopted = self._adopted[run_id] = Adopted(run_dir, record_dir, process, group=pid, attempt=attempt)
        if process.get("timeout") and "clock" in process:
            adopted.deadline = process["clock"] + process["timeout"]
        if is_alive(pid, process["start"], process["boot"]):
            with contextlib.suppress(ProcessLookupError):
                adopted.group = os.getpgid(pid)
                adopted.pidfd = os.pidfd_open(pid)
        if adopted.pidfd >= 0:
            adopted.forged = read_exit(record_dir, attempt)
            self._selector.register(adopted.pidfd, selectors.EVENT_READ, run_id)
            if "clock" in process:
                started = _unix_time(process["clock"])
                if abs(started - process.get("started", 0.0)) > CLOCK_SET_S:
                    self._events.append(Started(run_id, Place(self._host, pid), started))
            if supervisor.start_ticks(pid) != process["start"]:  # it exited just now, and its pid was reused
                self._on_trainer_exit(run_id)
        adopted.check_supervisor_at = now + EXIT_FILE_DELAY_S
        if adopted.pidfd < 0:
            adopted.ended_before = True
            adopted.overdue_at = now + OVERDUE_S
        if run_id in self._stops:
            self._signal(adopted, signal.SIGTERM)

    def _on_trainer_exit(self, run_id: str) -> None:
        """Stop watching the pidfd of an adopted run; from now on its `exit.json` is awaited."""
        adopted = self._adopted[run_id]
        self._selector.unregister(adopted.pidfd)
        os.close(adopted.pidfd)
        adopted.pidfd = -1
        adopted.check_supervisor_at = time.monotonic() + EXIT_FILE_DELAY_S
        adopted.overdue_at = time.monotonic() + OVERDUE_S

    @staticmethod
    def _signal(adopted: Adopted, number: int) -> None:
        """Signal the run's process group; after the trainer's exit, all processes with the run's mark, because the
        group id may have been reused."""
        if adopted.pidfd < 0:
            signal_groups(find_by_mark(adopted.run_dir, adopted.record_dir), number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(adopted.group, number)

    def _check_adopted(self) -> None:
        """Identify adopted runs, enforce limits and stops, and handle trainers that have exited."""
        now = time.monotonic()
        for run_id, (run_dir, record_dir, attempt, deadline) in list(self._unidentified.items()):
            process = read_process(record_dir, attempt)
            if (
                process is None
                and read_exit(record_dir, attempt)
                and not find_by_mark(run_dir, record_dir)
                and not supervisor.is_locked(str(record_dir))
            ):
                process = _describe_process(0)
            if process is None and now > deadline:
                process = _describe_process(next(iter(find_by_mark(run_dir, record_dir)), 0))
                if not process["pid"] and supervisor.is_locked(str(record_dir)):
                    del self._unidentified[run_id]
                    self._report_unreachable(run_id, run_dir, record_dir, attempt, None)
                    continue
            if process is not None:
                del self._unidentified[run_id]
                self._watch(run_id, run_dir, record_dir, attempt, process)
        for run_id, adopted in list(self._adopted.items()):
            stop = self._stops.get(run_id)
            if stop is not None and now >= stop.kill_at:
                stop.kill_at = now + 1.0
                self._signal(adopted, signal.SIGKILL)
            if adopted.pidfd < 0:
                self._check_exited(run_id, adopted, now)
            elif adopted.deadline is not None and now >= adopted.deadline and not self._has_supervisor(adopted):
                adopted.deadline = None
                self.stop(run_id, "timeout", adopted.process.get("grace", DEFAULT_GRACE_S))

    def _check_pending(self) -> None:
        """Start the runs whose predecessor has ended; reject those that are pending too long."""
        now = time.monotonic()
        for run_id, (after, spec, deadline) in list(self._pending.items()):
            if run_id not in self._pending:  # rejected with the run that it was waiting for
                continue
            if now >= deadline:
                self._reject(run_id, None)
            elif not self._knows(after):
                del self._pending[run_id]
                self.start(spec)

    def _check_exited(self, run_id: str, adopted: Adopted, now: float) -> None:
        """Report the end of a run whose trainer has exited, once it is recorded or nobody is left to record it."""
        ended = self._read_genuine_exit(adopted)
        stop = self._stops.get(run_id)
        if ended is None and now >= adopted.check_supervisor_at and not self._has_supervisor(adopted):
            if self._end_leftovers(adopted, now):
                adopted.check_supervisor_at = now + EXIT_FILE_DELAY_S
                return
            ended = self._read_genuine_exit(adopted) or replace(
                _lost_exit(EXIT_NOT_OBSERVED, adopted.process),
                reason=(stop and stop.reason) or "lost",
                attempt=adopted.attempt,
                lingered=adopted.leftovers_signalled,
            )
        if ended is None and adopted.overdue_at is not None and now >= adopted.overdue_at:
            adopted.overdue_at = now + OVERDUE_S
            if not find_by_mark(adopted.run_dir):  # else its supervisor is waiting for leftover processes
                adopted.overdue_at = None
                self._events.append(Delayed(run_id, str(adopted.record_dir / "exit.json")))
        if ended is not None:
            del self._adopted[run_id]
            if stop is not None and not ended.reason:
                ended = replace(ended, reason=stop.reason)
            self._end(run_id, ended)

    @staticmethod
    def _read_genuine_exit(adopted: Adopted) -> Exit | None:
        if adopted.ended_before and supervisor.is_locked(str(adopted.record_dir)):
            return None  # what is there may be the trainer's
        ended = read_exit(adopted.record_dir, adopted.attempt)
        return None if ended == adopted.forged else ended

    def _end_leftovers(self, adopted: Adopted, now: float) -> bool:
        """End the leftover processes of a run without a supervisor, as its supervisor would; return whether any are
        alive."""
        if not find_by_mark(adopted.run_dir, adopted.record_dir):
            return False
        if adopted.signal_leftovers_at is None:
            adopted.signal_leftovers_at = now + adopted.process.get("cleanup_timeout", DEFAULT_CLEANUP_S)
        elif now >= adopted.signal_leftovers_at:
            self._signal(adopted, signal.SIGKILL if adopted.leftovers_signalled else signal.SIGTERM)
            adopted.leftovers_signalled = True
            adopted.signal_leftovers_at = now + adopted.process.get("grace", DEFAULT_GRACE_S)
        return True

    # -- runs whose processes are not visible from here

    def _report_unreachable(
        self, run_id: str, run_dir: Path, record_dir: Path, attempt: int, process: dict[str, Any] | None
    ) -> None:
        self._unreachable[run_id] = run_dir, record_dir, attempt
        host = (process or {}).get("host") or "another host"
        is_same_host = host == os.uname().nodename or process is None
        where = "another PID namespace or container" if is_same_host else f"host {host}"
        self._events.append(Unreachable(run_id, where))

    def _check_unreachable(self) -> None:
        """End the runs whose exit is recorded or that are provably dead; watch those that have become visible."""
        self._unreachable_checked_at = now = time.monotonic()
        for run_id, (run_dir, record_dir, attempt) in list(self._unreachable.items()):
            process = read_process(record_dir, attempt)
            locked = supervisor.is_locked(str(record_dir))
            where = where_is(process, record_dir)
            if process is None:
                where = Where.ELSEWHERE if locked else Where.GONE
            ended = read_exit(record_dir, attempt)
            stop = self._stops.get(run_id)
            if where is Where.HERE and process is not None:
                del self._unreachable[run_id]
                self._watch(run_id, run_dir, record_dir, attempt, process)
            elif (ended is not None and not locked) or where is not Where.ELSEWHERE:
                del self._unreachable[run_id]
                ended = ended or replace(_lost_exit(EXIT_NOT_OBSERVED, process), attempt=attempt)
                if stop is not None and ended.reason in (None, "lost"):
                    ended = replace(ended, reason=stop.reason)
                self._end(run_id, ended)
            elif stop is not None and now >= stop.kill_at:
                stop.kill_at = now + 1.0
                signal_groups(find_by_mark(run_dir, record_dir), signal.SIGKILL)

    def _abandon(self, run_id: str, reason: str) -> None:
        """End a run by request although its processes are not visible."""
        _, record_dir, attempt = self._unreachable.pop(run_id)
        process = read_process(record_dir, attempt)
        message = "abandoned: it was started where this engine cannot see its processes, and may still be running there"
        self._end(run_id, replace(_lost_exit(message, process), reason=reason))

    @staticmethod
    def _has_supervisor(adopted: Adopted) -> bool:
        """Return whether the run's supervisor is alive: then it enforces the limits and records the exit."""
        process = adopted.process
        return is_alive(process.get("supervisor", 0), process.get("supervisor_start", 0), process.get("boot", ""))
