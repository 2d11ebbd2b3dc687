"""The supervisor: a small process that starts trainers, outlives the engine, and records how each of them ended.

Run as a script by an isolated interpreter (`python -I -S supervisor.py FD`); it imports nothing of looplab, so it
starts in a few milliseconds and stays small. It exchanges lines of JSON with the engine over the socket FD:

    engine → supervisor   {"op": "env", "env": {...}}             the environment that all starts build on
                          {"op": "start", "id", "dir", "record", "path", "argv", "env", "cwd", "cores", "locks", …}
                          … "record": the folder for train.log, process.json and exit.json
                          … "after": start when that run has ended, so that a slot does not wait for the engine
                          … "attempt": from 2, if the run is tried again in its folder
                          {"op": "stop", "id", "grace", "reason"}
                          {"op": "cancel", "id"}                  drop a pending start
    supervisor → engine   {"ev": "started", "id", "pid", "clock"} clock: monotonic time of the start
                          {"ev": "ended", "id", "exit": {...}}    the content of exit.json
                          {"ev": "busy", "id", "holder"}          not started: a device lock is held, or (null) the
                                                                  start was pending too long, or cancelled, or
                                                                  the run that it waits for was not started
                          {"ev": "exists", "id"}                  the run was started before: nothing was started

Promises:
- A run is started at most once. The new process itself creates `train.log`, exclusively, before it becomes the
  trainer; a second start of the same run fails in the kernel, no matter who asks for it. A further attempt creates
  `attempt-2` (`attempt-3`, …) in the same way, and continues the log.
- `process.json` (which process, which supervisor, its limits) and `exit.json` (code, signal, reason, usage) are
  either complete or absent.
- When the engine dies, trainers continue, and the supervisor stays until the last of them has ended and its end is
  recorded; time limits still apply. On a full disk it retries until the files are written.
- The end of a run means that its whole process group, and whatever escaped from it, is gone. A process belongs to the
  run if it carries a resource limit that the kernel passes on to every descendant (`tag_of`), else by its environment.
  Orphans are re-parented to the supervisor; one that has erased both marks is ended with the last of the runs that may
  have started it.
- A lock on the record folder is held while the supervisor or a process of the run is alive (`is_locked`). It is visible
  from other PID namespaces, where pids mean nothing.
- Durations come from the monotonic clock: `ended` is `started` plus the duration on that clock.
- The record folder is kept open, so a run's files reach it even if the lab is renamed meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False  # importing `typing` would cost as much as all the rest
if TYPE_CHECKING:
    from typing import Any

    Dict = dict[str, Any]

PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_POLL_S = 0.02
"""Seconds between checks for leftover processes of an exited trainer."""
SETTLE_S = 0.02
"""Age in seconds at which a run gets its `process.json`; a shorter run is over before an engine could adopt it."""
RETRY_S = 0.5
"""Seconds between attempts to write a file that could not be written."""
MAX_PENDING_S = 1.0
"""Seconds a start may wait for the run before it; after that, its folder is out of date."""
FIRST_LOCK_FD = 100
RECV_BYTES = 1 << 16
"""Bytes read from the engine at a time; the allocator would map and unmap a larger buffer on every call."""
FULL_PAGE = 4096 - 16
FLOCK = "hhqqi4x"
"""Layout of `struct flock`."""
RLIMIT_LOCKS = 10
"""A resource limit that Linux has not enforced since version 2.4, so its soft value can carry a tag."""
FIRST_TAG = 1 << 62
BEFORE_FORK = (errno.EAGAIN, errno.ENOMEM)
"""Spawn errors that may occur before the new process exists, and therefore before it could claim the folder."""


def boot_id() -> str:
    """Return the kernel's id of the current boot; empty: unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def pid_namespace() -> int:
    """Return the inode of this process's PID namespace, within which pids are valid; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def tag_of(folder: int | str) -> int:
    """Return the tag that marks every process of the run with this record folder; 0 if the folder does not exist.

    The tag is a hash of the folder's inode: moving a lab does not change it, and a copy of a run has a different one.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return 0
    return FIRST_TAG + (status.st_ino * 0x9E3779B97F4A7C15 + status.st_dev * 0xC2B2AE3D27D4EB4F) % FIRST_TAG


def tag_on(pid: int) -> int:
    """Return the tag that a process carries; 0: none. It survives `setsid`, an empty environment and the death of the
    parent."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            tag = int(file.read().partition(b"Max file locks")[2].split(None, 1)[0])
    except (OSError, IndexError, ValueError):  # ValueError: unlimited
        return 0
    return tag if tag >= FIRST_TAG else 0


def set_tag(tag: int, hard: int) -> None:
    """Give this tag to all processes started from now on; `hard` is the unchanged hard limit."""
    try:
        resource.setrlimit(RLIMIT_LOCKS, (tag, hard))
    except (OSError, ValueError):  # an administrator set a lower limit
        return


def hold(descriptor: int, start: int = 0, length: int = 0) -> bool:
    """Take a shared lock, held as long as any process has the descriptor or a duplicate of it. Returns False if the
    file system does not support locks."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, start, length, 0))
    except OSError:
        return False
    return True


def is_held(descriptor: int, start: int = 0, length: int = 0) -> bool:
    """Return whether anyone holds a lock through another descriptor. The query itself takes no lock."""
    query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        conflict = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, query))
    except OSError:
        return False
    return bool(conflict[0] != fcntl.F_UNLCK)


def is_locked(record: str) -> bool:
    """Return whether the supervisor or a process of the run with this record folder is alive, in any PID namespace."""
    try:
        descriptor = os.open(record, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_held(descriptor)
    finally:
        os.close(descriptor)


def start_ticks(pid: int) -> int:
    """Return the process's start in clock ticks since boot; 0: no such process. With the pid and the boot id it
    identifies a process uniquely."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def atomic_write(path: str, text: str, folder: int = -1) -> None:
    """Write a file atomically; with `folder`, a descriptor of its folder, even if that folder was moved."""
    directory = None if folder < 0 else folder
    target = path if directory is None else path.rpartition("/")[2]
    temporary = f"{target}.tmp{os.getpid()}"
    content = text.encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o644, dir_fd=directory)
    except FileExistsError:  # left by a process with the same pid, or a link that the trainer put there
        temporary += f"-{time.time_ns()}"
        descriptor = os.open(temporary, flags, 0o644, dir_fd=directory)
    try:
        if os.write(descriptor, content) != len(content):  # a disk that fills up writes a part and reports no error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(temporary, target, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)


def encode_env(env: dict[str, str]) -> dict[bytes, bytes]:
    """Return the environment as bytes, which spawn passes unchanged. Keys must not mix str and bytes: they would
    become two variables with one name."""
    codec, errors = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
    return {name.encode(codec, errors): value.encode(codec, errors) for name, value in env.items()}


def with_attempt(data: Dict, attempt: int) -> Dict:
    """Return the content of a record file with the attempt it is about; the first one is not named."""
    return data if attempt == 1 else {**data, "attempt": attempt}


def claim(path: str) -> bool:
    """Claim a run that could not be started, by its claim file. Returns False if it was started before."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    except OSError:
        pass  # nobody else can start it either
    return True


class Child:
    """One run, from its start until all its processes are gone."""

    __slots__ = (
        "attempt",
        "cleanup_timeout",
        "clock",
        "deadline",
        "exit",
        "folder",
        "grace",
        "group_gone",
        "id",
        "kill_at",
        "locked",
        "locks",
        "pid",
        "reason",
        "record",
        "record_fd",
        "settled_at",
        "started",
        "tag",
        "timeout",
    )

    def __init__(self, spec: Dict, pid: int, locks: list[int], record_fd: int, tag: int) -> None:
        self.id = spec["id"]
        self.folder = spec["dir"]
        self.record = spec["record"]
        self.attempt = spec.get("attempt", 1)
        self.pid = pid
        self.locks = locks
        """Descriptors of the device locks."""
        self.record_fd = record_fd
        """Descriptor of the record folder; -1: none."""
        self.tag = tag
        self.locked = False
        """Whether the record folder is locked (`is_locked`)."""
        self.started = time.time()
        self.clock = time.monotonic()
        self.settled_at = self.clock + SETTLE_S
        self.timeout = spec.get("timeout")
        self.deadline = self.clock + self.timeout if self.timeout else None
        self.grace = spec.get("grace", 10.0)
        self.cleanup_timeout = spec.get("cleanup_timeout", 5.0)
        self.reason: str | None = None
        self.kill_at: float | None = None
        """When to signal what is left of the run, once it is stopped or its trainer has exited."""
        self.exit: Dict | None = None
        """Content of `exit.json`; None while the trainer is alive."""
        self.group_gone = False
        """Whether the process group is known to be gone; its id may be reused from then on."""


class Supervisor:
    """Starts, stops and reaps the runs of one engine; see the module docstring for the protocol."""

    def __init__(self, engine: socket.socket | None) -> None:
        self.engine = engine
        self.engine_gone = engine is None
        self.inbox = b""
        self.outbox = b""
        self.env: dict[bytes, bytes] = {}
        self.children: dict[int, Child] = {}  # pid → Child, while the trainer process is alive
        self.settling: list[Child] = []  # children whose process.json is not written yet
        self.leaving: list[Child] = []  # children whose trainer has exited, but which may have processes left
        self.unsaved: list[tuple[str, str, int]] = []  # (path, text, folder descriptor) to be written again
        self.suspects: dict[int, set[str]] = {}  # orphan without a mark → runs that may have started it
        self.pending: list[tuple[str, Dict, float]] = []  # (run to wait for, spec to start, deadline)
        self.rejected: set[str] = set()  # runs that were not started, and not asked for again since
        self.place: Dict = {}  # more entries of process.json: the job, its devices and cores
        self.boot = boot_id()
        self.namespace = pid_namespace()
        # The supervisor itself carries a tag if looplab was started by a run or an agent.
        self.own_tag, self.hard_limit = resource.getrlimit(RLIMIT_LOCKS)
        self.host = os.uname().nodename
        self.ticks = start_ticks(os.getpid())
        self.cores = os.sched_getaffinity(0)
        self.default_signals: tuple[int, ...] = ()  # signals that are reset to their default in a trainer
        self.children_fd = -1  # the kernel's list of our children, kept open: it is read at the end of every run
        with contextlib.suppress(OSError):
            self.children_fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        engine = self.engine
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # an inherited block of SIGCHLD would hide every exit
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # A trainer must not inherit signals that are ignored here (some since the engine's parent).
        ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
        self.default_signals = (*ignored, signal.SIGCHLD)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        poller = select.poll()
        poller.register(self.wake_r, select.POLLIN)
        if engine is not None:
            engine.setblocking(False)
            poller.register(engine, select.POLLIN)
        self.begin()
        while True:
            for descriptor, event in poller.poll(self.next_timeout()):
                if descriptor == self.wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_r, 4096)
                elif event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self.receive()
            self.reap()
            self.settle()
            self.enforce_limits()
            self.reject_pending()
            self.retry_saves()
            self.flush()
            self.tick()
            if engine is None or self.engine_gone:
                if engine is not None:
                    with contextlib.suppress(KeyError):
                        poller.unregister(engine)
                if not (self.children or self.leaving or self.unsaved):
                    return
            else:
                poller.modify(engine, select.POLLIN | (select.POLLOUT if self.outbox else 0))

    def begin(self) -> None:
        """Called once, before the first event."""

    def tick(self) -> None:
        """Called after every event, and when a timer is due."""

    def next_timeout(self) -> float | None:
        """Return the milliseconds until the next timer is due; None: there is none."""
        now = time.monotonic()
        due = [t for c in self.children.values() for t in (c.deadline, c.kill_at) if t is not None]
        if self.leaving:
            due.append(now + LEFTOVER_POLL_S)
        if self.settling:
            due.append(self.settling[0].settled_at)
        if self.unsaved:
            due.append(now + RETRY_S)
        if self.pending:
            due.append(self.pending[0][2])
        return max(0.0, min(due) - now) * 1000 + 1 if due else None

    # -- messages from and to the engine

    def receive(self) -> None:
        """Read messages from the engine and act on them."""
        assert self.engine is not None
        try:
            data = self.engine.recv(RECV_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.engine_gone = True
            return
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["op"] == "start":
                after = message.get("after")
                self.rejected.discard(message["id"])
                if after and self.is_present(after):
                    self.pending.append((after, message, time.monotonic() + MAX_PENDING_S))
                elif after in self.rejected:  # what that run was waiting for may still be running
                    self.reject(message["id"])
                else:
                    self.start(message)
            elif message["op"] == "cancel":
                self.reject_pending(message["id"])
            elif message["op"] == "stop":
                self.reject_pending(message["id"])
                for child in [*self.children.values(), *self.leaving]:
                    if child.id == message["id"]:
                        self.stop(child, message["reason"], message.get("grace", child.grace))
            elif message["op"] == "env":
                self.env = encode_env(message["env"])

    def is_present(self, run_id: str) -> bool:
        """Return whether a run is alive or pending."""
        for child in self.children.values():
            if child.id == run_id:
                return True
        return any(child.id == run_id for child in self.leaving) or any(
            spec["id"] == run_id for _, spec, _ in self.pending
        )

    def send(self, **event: object) -> None:
        """Queue an event for the engine; `flush` sends it."""
        if not self.engine_gone:
            self.outbox += json.dumps(event).encode() + b"\n"

    def flush(self) -> None:
        while self.outbox and not self.engine_gone:
            assert self.engine is not None
            try:
                sent = self.engine.send(self.outbox)
            except BlockingIOError:
                return
            except OSError:
                self.engine_gone = True
                return
            self.outbox = self.outbox[sent:]

    # -- starting

    def start(self, spec: Dict) -> None:
        """Start a run: take its device locks, then spawn the trainer, which claims the folder by creating its log."""
        locks: list[int] = []
        log = spec["record"] + "/train.log"
        attempt = spec.get("attempt", 1)
        claimed = log if attempt == 1 else f"{spec['record']}/attempt-{attempt}"
        for path in spec.get("locks", ()):
            holder = self.lock(path, spec["label"], locks)
            if holder is not None:
                self.release(locks)
                self.reject(spec["id"], holder)
                return
        try:
            record_fd = os.open(spec["record"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            record_fd = -1
        locked = record_fd >= 0 and hold(record_fd)
        tag = tag_of(record_fd) if record_fd >= 0 else 0
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, claimed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        if attempt > 1:
            actions.insert(2, (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        inherited = [*locks, record_fd] if locked else locks
        if inherited:
            # The trainer inherits the device locks: a device stays locked until the last process that uses it is
            # gone. The new descriptors are above the old ones, so that none is overwritten before it is duplicated.
            first = max(FIRST_LOCK_FD, max(inherited) + 1)
            actions += [(os.POSIX_SPAWN_DUP2, fd, first + i) for i, fd in enumerate(inherited)]
        forking = False
        started = False
        try:
            os.chdir(spec["cwd"])
            if spec.get("cores"):
                os.sched_setaffinity(0, spec["cores"])
            if tag:
                set_tag(tag, self.hard_limit)
            forking = True
            pid = os.posix_spawn(
                spec["path"],
                spec["argv"],
                {**self.env, **encode_env(spec["env"])},
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=self.default_signals,
            )
            started = True
        except FileExistsError:
            self.release(locks)
            self.send(ev="exists", id=spec["id"])
            return
        except (OSError, ValueError) as error:  # ValueError: NUL in an argument, or `=` in a variable name
            self.release(locks)
            is_unclaimed = not forking or isinstance(error, ValueError) or error.errno in BEFORE_FORK
            if is_unclaimed and not claim(claimed):
                self.send(ev="exists", id=spec["id"])
                return
            now = time.time()
            message = f"cannot start {spec['path']} in {spec['cwd']}: {getattr(error, 'strerror', None) or error}"
            outcome = {"code": None, "signal": None, "reason": "not started", "message": message}
            outcome = with_attempt({**outcome, "started": now, "ended": now}, attempt)
            self.record_exit(spec["id"], spec["record"], outcome)
            self.start_pending(spec["id"])
            return
        finally:
            if tag:
                set_tag(self.own_tag, self.hard_limit)
            if record_fd >= 0 and not started:
                os.close(record_fd)
            if spec.get("cores"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, self.cores)
        child = Child(spec, pid, locks, record_fd, tag)
        child.locked = locked
        self.children[pid] = child
        self.settling.append(child)

    def settle(self) -> None:
        """Write `process.json` and report `started` for runs older than SETTLE_S. Not immediately: reading /proc of a
        process in the middle of exec takes as long as starting it, and short runs never need the file."""
        now = time.monotonic()
        while self.settling and (self.engine_gone or self.settling[0].settled_at <= now):
            child = self.settling.pop(0)
            if child.exit is None:
                process = {
                    "pid": child.pid,
                    "start": start_ticks(child.pid),
                    "boot": self.boot,
                    "host": self.host,
                    "namespace": self.namespace,
                    "tag": child.tag,
                    "locked": child.locked,
                    "started": child.started,
                    "clock": child.clock,
                    "supervisor": os.getpid(),
                    "supervisor_start": self.ticks,
                    "timeout": child.timeout,
                    "grace": child.grace,
                    "cleanup_timeout": child.cleanup_timeout,
                }
                process |= self.place
                text = json.dumps(with_attempt(process, child.attempt))
                self.save(child.record + "/process.json", text, child.record_fd)
                self.send(ev="started", id=child.id, pid=child.pid, clock=child.clock)

    @staticmethod
    def lock(path: str, label: str, locks: list[int]) -> str | None:
        """Take a device lock and append its descriptor to `locks`. Returns None, or the current holder."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            return f"nobody, but the lock file {path} cannot be opened: {error.strerror}"
        locks.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return os.read(descriptor, 4096).decode(errors="replace").strip()
        with contextlib.suppress(OSError):  # a full disk loses the holder's name, not the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, os.fsencode(label) + b"\n", 0)
        return None

    @staticmethod
    def release(locks: list[int]) -> None:
        for descriptor in locks:
            os.close(descriptor)

    # -- ending

    def stop(self, child: Child, reason: str, grace: float) -> None:
        """Send SIGTERM to a run and schedule SIGKILL after `grace` seconds; a second stop can only shorten that."""
        now = time.monotonic()
        child.reason = child.reason or reason
        if child.exit is not None:
            # The trainer has exited by itself: do not wait for its leftover processes any longer.
            child.grace = min(child.grace, grace)
            if child.kill_at is not None:
                child.kill_at = min(child.kill_at, now + grace if child.exit["lingered"] else now)
        elif child.kill_at is None:
            child.grace = grace
            child.kill_at = now + grace
            self.signal(child, signal.SIGTERM)
        else:
            child.kill_at = min(child.kill_at, now + grace)

    def enforce_limits(self) -> None:
        """Apply timeouts, escalate to SIGKILL, and finish runs that have no processes left."""
        now = time.monotonic()
        for child in self.children.values():
            if child.deadline is not None and now >= child.deadline:
                child.deadline = None
                self.stop(child, "timeout", child.grace)
            if child.kill_at is not None and now >= child.kill_at:
                child.kill_at = now + 1.0
                self.signal(child, signal.SIGKILL)
        for child in list(self.leaving):
            if not self.live_groups(child):
                self.leaving.remove(child)
                self.finish(child)
            elif child.exit is not None and child.kill_at is not None and now >= child.kill_at:
                # SIGTERM first, then SIGKILL.
                self.signal(child, signal.SIGKILL if child.exit["lingered"] else signal.SIGTERM)
                child.exit["lingered"] = True
                child.kill_at = now + child.grace

    def signal(self, child: Child, number: int) -> None:
        for group in self.live_groups(child) or (() if child.exit else (child.pid,)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def live_groups(self, child: Child) -> list[int]:
        """Return the live process groups of a run: its own and, after the trainer's exit, those of processes that
        started their own session (orphans are re-parented to the supervisor)."""
        groups = []
        if not child.group_gone:
            try:
                os.killpg(child.pid, 0)
                groups.append(child.pid)
            except (ProcessLookupError, PermissionError):
                child.group_gone = child.exit is not None
        if child.exit is not None:
            for pid in self.orphans():
                with contextlib.suppress(OSError):
                    if self.belongs(pid, child):
                        groups.append(os.getpgid(pid))
        return groups

    def belongs(self, pid: int, child: Child) -> bool:
        """Return whether an orphan is one of this run's processes. An orphan without any mark belongs to the last of
        the runs that were present when it was first seen.

        Raises:
            OSError: The process is gone, or belongs to another user and cannot be signalled.
        """
        os.kill(pid, 0)
        runs = [*self.children.values(), *self.leaving]
        tag = tag_on(pid)
        if tag and any(tag == run.tag for run in runs):
            return tag == child.tag
        variables: list[bytes] = []
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
        if any(os.fsencode(f"LOOPLAB_RUN_DIR={run.folder}") in variables for run in runs):
            return os.fsencode(f"LOOPLAB_RUN_DIR={child.folder}") in variables
        present = {run.id for run in runs}
        self.suspects[pid] = self.suspects.get(pid, present) & present
        return self.suspects[pid] <= {child.id}

    def orphans(self) -> list[int]:
        """Return the processes that were re-parented to the supervisor."""
        if self.children_fd < 0:
            return []
        part = text = os.pread(self.children_fd, 1 << 16, 0)
        while len(part) > FULL_PAGE:  # the kernel returns a page at a time
            part = os.pread(self.children_fd, 1 << 16, len(text))
            text += part
        return [pid for pid in map(int, text.split()) if pid not in self.children]

    def reap(self) -> None:
        """Collect exited processes; `enforce_limits` then handles the leftover processes of each run."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is None:
                self.suspects.pop(pid, None)
                continue
            code, now = os.waitstatus_to_exitcode(status), time.monotonic()
            child.exit = {
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "reason": child.reason,
                "message": None,
                "started": child.started,
                "ended": child.started + now - child.clock,
                "user_s": round(usage.ru_utime, 4),
                "system_s": round(usage.ru_stime, 4),
                "max_rss_kb": usage.ru_maxrss,
                "lingered": False,
            }
            child.kill_at = now + (0.0 if child.reason else child.cleanup_timeout)
            self.leaving.append(child)

    def finish(self, child: Child) -> None:
        """Release the devices of a run, record its exit, and start the runs that were waiting for it."""
        self.release(child.locks)
        assert child.exit is not None
        self.record_exit(child.id, child.record, with_attempt(child.exit, child.attempt), child.record_fd)
        self.start_pending(child.id)

    def start_pending(self, run_id: str) -> None:
        """Start the runs that were waiting for this one."""
        for waiting in [waiting for waiting in self.pending if waiting[0] == run_id]:
            _, spec, deadline = waiting
            if not self.engine_gone and time.monotonic() < deadline:
                self.pending.remove(waiting)
                self.start(spec)

    def reject_pending(self, run_id: str | None = None) -> None:
        """Reject the pending start of this run, and all starts that are pending too long."""
        now = time.monotonic()
        for waiting in list(self.pending):
            _, spec, deadline = waiting
            if waiting in self.pending and (spec["id"] == run_id or now >= deadline):
                self.pending.remove(waiting)
                self.reject(spec["id"])

    def reject(self, run_id: str, holder: str | None = None) -> None:
        """Report that a run was not started, and reject the starts that wait for it."""
        self.rejected.add(run_id)
        self.send(ev="busy", id=run_id, holder=holder)
        for waiting in [waiting for waiting in self.pending if waiting[0] == run_id]:
            if waiting in self.pending:
                self.pending.remove(waiting)
                self.reject(waiting[1]["id"])

    def record_exit(self, run_id: str, record: str, outcome: Dict, record_fd: int = -1) -> None:
        """Write `exit.json`, close the record folder, and report `ended`."""
        text = json.dumps(outcome)
        if record_fd >= 0:
            # A process.json that is still unsaved is obsolete now.
            self.unsaved = [unsaved for unsaved in self.unsaved if unsaved[2] != record_fd]
        if self.save(record + "/exit.json", text, record_fd) and record_fd >= 0:
            os.close(record_fd)  # only now: until its exit is recorded, a run counts as alive
        if not self.engine_gone:
            self.outbox += f'{{"ev": "ended", "id": {json.dumps(run_id)}, "exit": {text}}}\n'.encode()

    # -- record files

    def save(self, path: str, text: str, record_fd: int = -1) -> bool:
        """Write a record file. Returns False if that failed and `retry_saves` will try again."""
        for folder in (record_fd, -1) if record_fd >= 0 else (-1,):
            if folder < 0:
                record = os.path.dirname(path)
                if os.path.islink(record) or os.path.islink(os.path.dirname(record)):
                    continue  # the trainer replaced its folder by a link
            try:
                atomic_write(path, text, folder)
                return True
            except (FileNotFoundError, NotADirectoryError):
                continue  # the folder was deleted
            except IsADirectoryError:  # the trainer left a folder of this name
                with contextlib.suppress(OSError):
                    os.rename(path, f"{path}.changed-{time.time_ns()}")
                self.unsaved.append((path, text, record_fd))
                return False
            except OSError:
                self.unsaved.append((path, text, record_fd))
                return False
        return True  # the folder no longer exists: there is nothing to write to

    def retry_saves(self) -> None:
        unsaved, self.unsaved = self.unsaved, []
        for path, text, record_fd in unsaved:
            if self.save(path, text, record_fd) and record_fd >= 0 and path.endswith("/exit.json"):
                os.close(record_fd)


if __name__ == "__main__":
    engine_fd = int(sys.argv[1])
    os.set_inheritable(engine_fd, False)  # a trainer that held it would hide the supervisor's death from the engine
    Supervisor(socket.socket(fileno=engine_fd)).run()
