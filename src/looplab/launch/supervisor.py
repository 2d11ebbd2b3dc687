"""The supervisor: a small process that starts trainers, outlives the engine, and records how each of them ended.

Run as a script by an isolated interpreter (`python -I -S supervisor.py FD`); it imports nothing of looplab, so it
starts in a few milliseconds and stays small. It exchanges lines of JSON with the engine over the socket FD:

    engine → supervisor   {"op": "env", "env": {...}}             the environment that all starts build on
                          {"op": "start", "id", "dir", "record", "path", "argv", "env", "cwd", "cores", "locks", …}
                          … "record": the folder for train.log, process.json and exit.json
                          … "after": start when that run has ended, so that a slot does not wait for the engine
                          {"op": "stop", "id", "grace", "reason"}
                          {"op": "cancel", "id"}                  drop a start that is being held
    supervisor → engine   {"ev": "started", "id", "pid", "at"}
                          {"ev": "ended", "id", "exit": {...}}    the content of exit.json
                          {"ev": "busy", "id", "holder"}          not started: a device lock is held, or (null) the
                                                                  start was held too long, or cancelled
                          {"ev": "exists", "id"}                  the run was started before: nothing was started

Promises:
- A run is started at most once. The new process itself creates `train.log`, exclusively, before it becomes the
  trainer; a second start of the same run fails in the kernel, whoever asks for it.
- `process.json` (which process, which supervisor, its limits) and `exit.json` (code, signal, reason, usage) are
  complete or absent.
- When the engine dies, trainers continue, and the supervisor stays until the last of them has ended and its end is
  recorded; time limits still apply. On a full disk it retries and never forgets.
- The end of a run means that its whole process group, and whatever escaped from it, is gone. A process belongs to the
  run if it carries a resource limit that the kernel passes on to every descendant (`tag_of`), else by its environment.
  Orphans are re-parented to the supervisor; one that has erased both marks is ended with the last of the runs that may
  have started it.
- A lock on the record folder is held while the supervisor or a process of the run lives (`is_locked`). It is visible
  from other PID namespaces, where pids mean nothing.
- Durations come from the monotonic clock: `ended` is `started` plus what that clock measured.
- The record folder is kept open: the files of a run reach it even if the lab is renamed meanwhile.
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
LINGER_CHECK_S = 0.02
SETTLED_S = 0.02
"""A run that lives as long as this gets its `process.json`; a shorter one is over before anybody could adopt it."""
RETRY_S = 0.5
HELD_S = 1.0
"""How long an order may be held for the run before it; after that its folder is no longer up to date."""
FIRST_LOCK_FD = 100
RECEIVED_BYTES = 1 << 16
"""Read from the engine at a time: a larger buffer would be mapped and unmapped by the kernel each time."""
FULL_PAGE = 4096 - 16
FLOCK = "hhqqi4x"
"""The layout of `struct flock`."""
RLIMIT_LOCKS = 10
"""A resource limit that Linux has not enforced since version 2.4: its soft value is free to carry a tag."""
FIRST_TAG = 1 << 62
BEFORE_FORK = (errno.EAGAIN, errno.ENOMEM)
"""Errors of a spawn that may come before there was a new process, and so before the folder could be claimed."""


def boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def pid_namespace() -> int:
    """The inode of this process's PID namespace: pids of one namespace mean nothing in another. 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def tag_of(folder: int | str) -> int:
    """The number that marks every process of the run with this record folder, 0 if there is no such folder.

    It is made of the folder's inode: moving a lab does not change it, and a copy of a run has another one.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return 0
    return FIRST_TAG + (status.st_ino * 0x9E3779B97F4A7C15 + status.st_dev * 0xC2B2AE3D27D4EB4F) % FIRST_TAG


def tag_on(pid: int) -> int:
    """The tag that a process carries, 0 for none. Neither `setsid`, nor an empty environment, nor the death of its
    parent removes it."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            tag = int(file.read().partition(b"Max file locks")[2].split(None, 1)[0])
    except (OSError, IndexError, ValueError):  # ValueError: unlimited
        return 0
    return tag if tag >= FIRST_TAG else 0


def set_tag(tag: int, hard: int) -> None:
    """Let the processes that are started from now on carry this tag; `hard`: the limit above it, as it is."""
    try:
        resource.setrlimit(RLIMIT_LOCKS, (tag, hard))
    except (OSError, ValueError):  # an administrator has set a lower limit
        return


def hold(descriptor: int, start: int = 0, length: int = 0) -> bool:
    """Take a shared lock, which lives as long as any process has the descriptor or a copy of it; False: not possible
    on this file system."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, start, length, 0))
    except OSError:
        return False
    return True


def is_held(descriptor: int, start: int = 0, length: int = 0) -> bool:
    """Whether anybody holds a lock there, through another descriptor. Asking takes no lock, so nobody notices."""
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        found = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    except OSError:
        return False
    return bool(found[0] != fcntl.F_UNLCK)


def is_locked(record: str) -> bool:
    """Whether the supervisor or a process of the run with this record folder is alive, in whatever PID namespace."""
    try:
        descriptor = os.open(record, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_held(descriptor)
    finally:
        os.close(descriptor)


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the boot id it names a process for ever."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def atomic_write(path: str, text: str, folder: int = -1) -> None:
    """Write a file atomically; with a descriptor of its folder, wherever that folder is now."""
    directory = None if folder < 0 else folder
    target = path if directory is None else path.rpartition("/")[2]
    temporary = f"{target}.tmp{os.getpid()}"
    content = text.encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o644, dir_fd=directory)
    except FileExistsError:  # of a process that had the same pid, or a link that the training has put there
        temporary += f"-{time.time_ns()}"
        descriptor = os.open(temporary, flags, 0o644, dir_fd=directory)
    try:
        if os.write(descriptor, content) != len(content):  # a disk that fills up takes a part and reports no error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(temporary, target, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)


def encoded(env: dict[str, str]) -> dict[bytes, bytes]:
    """As bytes, which spawn takes as they are; a text and the same as bytes would be two variables of one name."""
    codec, errors = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
    return {name.encode(codec, errors): value.encode(codec, errors) for name, value in env.items()}


def claim(log: str) -> bool:
    """Take the folder for a run that could not be started; False: it was started before."""
    try:
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    except OSError:
        pass  # nobody else can start it either
    return True


class Child:
    """One training, from its start until nothing of it is left."""

    __slots__ = (
        "cleanup_timeout",
        "clock",
        "deadline",
        "emptied",
        "exit",
        "folder",
        "grace",
        "id",
        "kill_at",
        "locked",
        "locks",
        "pid",
        "place",
        "reason",
        "record",
        "settled_at",
        "started",
        "tag",
        "timeout",
    )

    def __init__(self, order: Dict, pid: int, locks: list[int], place: int, tag: int) -> None:
        self.id = order["id"]
        self.folder = order["dir"]
        self.record = order["record"]
        self.pid = pid
        self.locks = locks
        self.place = place
        """A descriptor of the record folder, -1 for none."""
        self.tag = tag
        self.locked = False
        self.started = time.time()
        self.clock = time.monotonic()
        self.settled_at = self.clock + SETTLED_S
        self.timeout = order.get("timeout")
        self.deadline = self.clock + self.timeout if self.timeout else None
        self.grace = order.get("grace", 10.0)
        self.cleanup_timeout = order.get("cleanup_timeout", 5.0)
        self.reason: str | None = None
        self.kill_at: float | None = None
        self.exit: Dict | None = None
        self.emptied = False
        """Whether its process group is known to be gone: from then on its number may be given to another."""


class Supervisor:
    def __init__(self, engine: socket.socket) -> None:
        self.engine = engine
        self.engine_gone = False
        self.inbox = b""
        self.outbox = b""
        self.env: dict[bytes, bytes] = {}
        self.children: dict[int, Child] = {}  # pid → Child, while the first process of the run lives
        self.settling: list[Child] = []  # Children whose process.json is still to be written
        self.leaving: list[Child] = []  # Children whose first process has ended, but not all of its group
        self.unsaved: list[tuple[str, str, int]] = []  # (path, text, folder) that could not be written yet
        self.suspects: dict[int, set[str]] = {}  # an orphan without any mark → the runs that may have started it
        self.held: list[tuple[str, Dict, float]] = []  # (run, the order to be carried out when it is over, until when)
        self.boot = boot_id()
        self.namespace = pid_namespace()
        # Its own tag is that of a run or an agent that has started looplab, or none.
        self.own_tag, self.most_tag = resource.getrlimit(RLIMIT_LOCKS)
        self.host = os.uname().nodename
        self.ticks = start_ticks(os.getpid())
        self.cores = os.sched_getaffinity(0)
        self.defaults: tuple[int, ...] = ()  # signals that a training gets back as they were
        self.kin = -1  # the list of our children, kept open: it is read at the end of every run
        with contextlib.suppress(OSError):
            self.kin = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        engine = self.engine
        engine.setblocking(False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a SIGCHLD that was blocked before would hide every end
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # What is ignored here (some of it since the engine's parent) must not be ignored by a training.
        ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
        self.defaults = (*ignored, signal.SIGCHLD)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        poller = select.poll()
        poller.register(self.wake_r, select.POLLIN)
        poller.register(engine, select.POLLIN)
        while True:
            for descriptor, event in poller.poll(self.patience()):
                if descriptor == self.wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_r, 4096)
                elif event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self.listen()
            self.reap()
            self.settle()
            self.enforce()
            self.give_back()
            self.save_again()
            self.speak()
            if self.engine_gone:
                with contextlib.suppress(KeyError):
                    poller.unregister(engine)
                if not (self.children or self.leaving or self.unsaved):
                    return
            else:
                poller.modify(engine, select.POLLIN | (select.POLLOUT if self.outbox else 0))

    def patience(self) -> float | None:
        """How many milliseconds may pass before something is due."""
        now = time.monotonic()
        due = [t for c in self.children.values() for t in (c.deadline, c.kill_at) if t is not None]
        if self.leaving:
            due.append(now + LINGER_CHECK_S)
        if self.settling:
            due.append(self.settling[0].settled_at)
        if self.unsaved:
            due.append(now + RETRY_S)
        if self.held:
            due.append(self.held[0][2])
        return max(0.0, min(due) - now) * 1000 + 1 if due else None

    # -- talking with the engine

    def listen(self) -> None:
        try:
            data = self.engine.recv(RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.engine_gone = True
            return
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["op"] == "start":
                if order.get("after") and self.is_present(order["after"]):
                    self.held.append((order["after"], order, time.monotonic() + HELD_S))
                else:
                    self.start(order)
            elif order["op"] == "cancel":
                self.give_back(order["id"])
            elif order["op"] == "stop":
                self.give_back(order["id"])
                for child in [*self.children.values(), *self.leaving]:
                    if child.id == order["id"]:
                        self.stop(child, order["reason"], order.get("grace", child.grace))
            elif order["op"] == "env":
                self.env = encoded(order["env"])

    def is_present(self, run_id: str) -> bool:
        """Whether a run is not over."""
        for child in self.children.values():
            if child.id == run_id:
                return True
        return any(child.id == run_id for child in self.leaving) or any(
            order["id"] == run_id for _, order, _ in self.held
        )

    def tell(self, **event: object) -> None:
        if not self.engine_gone:
            self.outbox += json.dumps(event).encode() + b"\n"

    def speak(self) -> None:
        while self.outbox and not self.engine_gone:
            try:
                sent = self.engine.send(self.outbox)
            except BlockingIOError:
                return
            except OSError:
                self.engine_gone = True
                return
            self.outbox = self.outbox[sent:]

    # -- starting

    def start(self, order: Dict) -> None:
        locks: list[int] = []
        log = order["record"] + "/train.log"
        for path in order.get("locks", ()):
            holder = self.lock(path, order["label"], locks)
            if holder is not None:
                self.release(locks)
                self.tell(ev="busy", id=order["id"], lock=path, holder=holder)
                return
        try:
            place = os.open(order["record"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            place = -1
        locked = place >= 0 and hold(place)
        tag = tag_of(place) if place >= 0 else 0
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        inherited = [*locks, place] if locked else locks
        if inherited:
            # The training inherits the device locks: a device stays locked until the last process that uses it is
            # gone. The new numbers are above the old ones, so that none is closed before it is copied.
            first = max(FIRST_LOCK_FD, max(inherited) + 1)
            actions += [(os.POSIX_SPAWN_DUP2, fd, first + i) for i, fd in enumerate(inherited)]
        forking = False
        started = False
        try:
            os.chdir(order["cwd"])
            if order.get("cores"):
                os.sched_setaffinity(0, order["cores"])
            if tag:
                set_tag(tag, self.most_tag)
            forking = True
            pid = os.posix_spawn(
                order["path"],
                order["argv"],
                {**self.env, **encoded(order["env"])},
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=self.defaults,
            )
            started = True
        except FileExistsError:
            self.release(locks)
            self.tell(ev="exists", id=order["id"])
            return
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument, `=` in the name of a variable
            self.release(locks)
            early = not forking or isinstance(error, ValueError) or error.errno in BEFORE_FORK
            if early and not claim(log):
                self.tell(ev="exists", id=order["id"])
                return
            now = time.time()
            message = f"cannot start {order['path']} in {order['cwd']}: {getattr(error, 'strerror', None) or error}"
            outcome = {"code": None, "signal": None, "reason": "not started", "message": message}
            self.finish(order["id"], order["record"], {**outcome, "started": now, "ended": now})
            return
        finally:
            if tag:
                set_tag(self.own_tag, self.most_tag)
            if place >= 0 and not started:
                os.close(place)
            if order.get("cores"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, self.cores)
        child = Child(order, pid, locks, place, tag)
        child.locked = locked
        self.children[pid] = child
        self.settling.append(child)

    def settle(self) -> None:
        """Write down which process a run is, and tell. Not at its very start: reading that of a process which is just
        becoming the trainer takes as long as starting it, and many runs are over before anybody could care."""
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
                self.save(child.record + "/process.json", json.dumps(process), child.place)
                self.tell(ev="started", id=child.id, pid=child.pid, clock=child.clock)

    @staticmethod
    def lock(path: str, label: str, locks: list[int]) -> str | None:
        """Take a device lock; gives who holds it where somebody does."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            return f"nobody, but the lock {path} cannot be taken: {error.strerror}"
        locks.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return os.read(descriptor, 4096).decode(errors="replace").strip()
        with contextlib.suppress(OSError):  # a full disk costs the holder's name, not the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, os.fsencode(label) + b"\n", 0)
        return None

    @staticmethod
    def release(locks: list[int]) -> None:
        for descriptor in locks:
            os.close(descriptor)

    # -- ending

    def stop(self, child: Child, reason: str, grace: float) -> None:
        now = time.monotonic()
        child.reason = child.reason or reason
        if child.exit is not None:
            # It ended by itself; what it left behind is not waited for any longer.
            child.grace = min(child.grace, grace)
            if child.kill_at is not None:
                child.kill_at = min(child.kill_at, now + grace if child.exit["lingered"] else now)
        elif child.kill_at is None:
            child.grace = grace
            child.kill_at = now + grace
            self.signal(child, signal.SIGTERM)
        else:
            child.kill_at = min(child.kill_at, now + grace)

    def enforce(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            if child.deadline is not None and now >= child.deadline:
                child.deadline = None
                self.stop(child, "timeout", child.grace)
            if child.kill_at is not None and now >= child.kill_at:
                child.kill_at = now + 1.0
                self.signal(child, signal.SIGKILL)
        for child in list(self.leaving):
            if not self.rest_of(child):
                self.leaving.remove(child)
                self.done(child)
            elif child.exit is not None and child.kill_at is not None and now >= child.kill_at:
                # First asked to go, then made to.
                self.signal(child, signal.SIGKILL if child.exit["lingered"] else signal.SIGTERM)
                child.exit["lingered"] = True
                child.kill_at = now + child.grace

    def signal(self, child: Child, number: int) -> None:
        for group in self.rest_of(child) or (() if child.exit else (child.pid,)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def rest_of(self, child: Child) -> list[int]:
        """The process groups that are left of a run: its own, and those of processes that left it for a session of
        their own (they are re-parented to the supervisor when their parent ends)."""
        groups = []
        if not child.emptied:
            try:
                os.killpg(child.pid, 0)
                groups.append(child.pid)
            except (ProcessLookupError, PermissionError):
                child.emptied = child.exit is not None
        if child.exit is not None:
            for pid in self.orphans():
                with contextlib.suppress(OSError):
                    if self.belongs(pid, child):
                        groups.append(os.getpgid(pid))
        return groups

    def belongs(self, pid: int, child: Child) -> bool:
        """Whether an orphan is one of this run's processes. One without any mark belongs to the last of the runs that
        were there when it was first seen."""
        os.kill(pid, 0)  # one of another user cannot be ended: the error leaves it alone
        runs = [*self.children.values(), *self.leaving]
        tag = tag_on(pid)
        if tag and any(tag == run.tag for run in runs):
            return tag == child.tag
        marks: list[bytes] = []
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            marks = file.read().split(b"\0")
        if any(os.fsencode(f"LOOPLAB_RUN_DIR={run.folder}") in marks for run in runs):
            return os.fsencode(f"LOOPLAB_RUN_DIR={child.folder}") in marks
        present = {run.id for run in runs}
        self.suspects[pid] = self.suspects.get(pid, present) & present
        return self.suspects[pid] <= {child.id}

    def orphans(self) -> list[int]:
        """The processes that were re-parented to the supervisor."""
        if self.kin < 0:
            return []
        part = text = os.pread(self.kin, 1 << 16, 0)
        while len(part) > FULL_PAGE:  # the kernel returns a page at a time
            part = os.pread(self.kin, 1 << 16, len(text))
            text += part
        return [pid for pid in map(int, text.split()) if pid not in self.children]

    def reap(self) -> None:
        """Collect what has ended; `enforce` then looks for the rest of each run."""
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

    def done(self, child: Child) -> None:
        self.release(child.locks)
        assert child.exit is not None
        self.finish(child.id, child.record, child.exit, child.place)
        for held in [held for held in self.held if held[0] == child.id]:
            _, order, until = held
            if not self.engine_gone and time.monotonic() < until:
                self.held.remove(held)
                self.start(order)

    def give_back(self, run_id: str | None = None) -> None:
        """Refuse the held order of this run, or all that were held for too long."""
        now = time.monotonic()
        for held in list(self.held):
            _, order, until = held
            if order["id"] == run_id or now >= until:
                self.held.remove(held)
                self.tell(ev="busy", id=order["id"], holder=None)

    def finish(self, run_id: str, record: str, outcome: Dict, place: int = -1) -> None:
        text = json.dumps(outcome)
        if place >= 0:
            self.unsaved = [waiting for waiting in self.unsaved if waiting[2] != place]  # which process it was
        if self.save(record + "/exit.json", text, place) and place >= 0:
            os.close(place)  # only now: until its end is written down, a run counts as alive
        if not self.engine_gone:
            self.outbox += f'{{"ev": "ended", "id": {json.dumps(run_id)}, "exit": {text}}}\n'.encode()

    # -- writing down

    def save(self, path: str, text: str, place: int = -1) -> bool:
        """Write a file of the record; False: not yet."""
        for folder in (place, -1) if place >= 0 else (-1,):
            if folder < 0:
                record = os.path.dirname(path)
                if os.path.islink(record) or os.path.islink(os.path.dirname(record)):
                    continue  # the training has put a link in the place of its folder
            try:
                atomic_write(path, text, folder)
                return True
            except (FileNotFoundError, NotADirectoryError):
                continue  # the folder was deleted under us
            except IsADirectoryError:  # a folder of this name, left by the training
                with contextlib.suppress(OSError):
                    os.rename(path, f"{path}.changed-{time.time_ns()}")
                self.unsaved.append((path, text, place))
                return False
            except OSError:
                self.unsaved.append((path, text, place))
                return False
        return True  # there is nothing left to keep

    def save_again(self) -> None:
        waiting, self.unsaved = self.unsaved, []
        for path, text, place in waiting:
            if self.save(path, text, place) and place >= 0 and path.endswith("/exit.json"):
                os.close(place)


if __name__ == "__main__":
    engine_fd = int(sys.argv[1])
    os.set_inheritable(engine_fd, False)  # a training that held it would hide the supervisor's death from the engine
    Supervisor(socket.socket(fileno=engine_fd)).run()
