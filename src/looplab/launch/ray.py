"""The Ray executor: a slot is a detached actor that hosts a local executor on some node (`ray_host.py`).

Ray chooses the node and the devices. The nodes have looplab installed. They share the lab's folder with this machine,
under the same path, or have their own run folders, which are copied back (`mirror.py`). What is true of a run is in
its record folder, as on one machine: the claim, `process.json`, `exit.json`. `job.json` names the actor before the run
is handed over, so that a later engine finds it.

A run whose actor is dead is over: its supervisor ends it when the actor is gone (`leased.py`), and a node that has lost
the cluster ends its actors. Its own word in `exit.json` wins; without one it is `lost`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from looplab.config.lab import RayConfig
from looplab.errors import LabError
from looplab.launch import supervisor
from looplab.launch.base import (
    Ended,
    ExecutorContext,
    ExecutorTraits,
    Exit,
    LaunchEvent,
    LaunchSpec,
    Queued,
    Rejected,
    Resources,
    Slot,
    Started,
    claim_name,
)
from looplab.launch.local import Where, is_running, read_exit, read_json, read_process, where_is
from looplab.launch.mirror import Chunk, EngineMirror, read_tree
from looplab.launch.ray_host import Host
from looplab.launch.remote import RemoteExecutor, record_of

CONNECT_S = 10.0
"""Seconds that the head of a cluster may take to accept a connection."""
EXCHANGE_S = 30.0
"""Seconds that a host waits for an event before it answers with none."""
PAUSE_S = 0.015
"""Seconds that a start after another run, and the next question for events, wait for further calls to go with them."""
COPY_S = 1.0
"""Seconds between polls of the files of a run on a node without the lab's disk."""
CHECK_S = 0.5
"""Seconds between two looks at hosts that are placed or lost, and at their runs."""
SETTLE_S = 3.0
"""Seconds beyond its grace in which the exit of a run on a lost host may appear."""
PLACE_S = 10.0
"""Seconds that an actor may wait for resources before a host without runs gives its own back."""


@dataclass(slots=True)
class RayRun:
    """A run that was or will be submitted."""

    run_id: str
    run_dir: Path
    record_dir: Path
    attempt: int
    grace: float = 10.0
    stop: str | None = None
    """Reason of a requested stop."""
    over_at: float | None = None
    """When its host was found dead (monotonic)."""
    mirror: EngineMirror | None = None
    """What was copied back so far; None: nothing yet, or the node shares the disk."""
    exit: Exit | None = None
    """Its end, which is reported once its folder is copied."""
    is_copying: bool = False
    copy_at: float = 0.0


@dataclass(slots=True)
class RaySlot:
    """The actor of a slot, as this engine knows it."""

    name: str
    """Name of the actor."""
    actor: Any
    is_ready: bool = False
    """Whether the actor has answered."""
    since: float = field(default_factory=time.monotonic)
    seq: int = 0
    """Number of the last event that was read."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    """Calls to be made once it answers."""
    exchange: int = 0
    """Number of the latest exchange with the actor."""
    unanswered: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """Exchange calls that failed: they may have arrived, and are retried."""
    runs: dict[str, RayRun] = field(default_factory=dict)
    told: bool = False
    """Whether it was reported that its runs wait for resources."""

    def awaits(self, call: tuple[Any, ...]) -> bool:
        """Return whether a call is about a run that is not over; the host may have forgotten others."""
        run = self.runs.get(call[1])
        return run is not None and (call[0] != "start" or call[2].attempt == run.attempt)


class RayExecutor(RemoteExecutor):
    """Runs trainers on a Ray cluster; see `Executor` for the contract. One thread makes all calls of Ray.

    Args:
        context: The lab and the study, by which the actors are named.
        config: Options of the lab file.
        resources: What each slot needs.
        patterns: Variables of the engine that runs get, see `passed_on`.

    Raises:
        LabError: Ray is not installed, or the cluster cannot be reached.
    """

    traits = ExecutorTraits(
        name="ray", places="theirs", queues=True, prequeue_depth=10, retries={"lost": 2, "preempted": 2}
    )

    def __init__(
        self,
        context: ExecutorContext,
        config: RayConfig,
        resources: Resources | None = None,
        patterns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(patterns)
        self._config = config
        self._resources = resources or Resources()
        self._ray = connect(config)
        self._host_class = self._ray.remote(Host)  # once: Ray takes long to describe a class to the cluster
        digest = hashlib.sha256(os.fsencode(context.lab.resolve())).hexdigest()[:12]
        self._namespace = f"looplab-{digest}-{context.study}"
        self._slots: dict[str, RaySlot] = {}  # by the name of the slot, or of the actor of an adopted run
        self._slot_of: dict[str, str] = {}  # run → the key of its slot
        self._dead: set[str] = set()  # names of actors that are gone; Ray lists them for a while
        self._code: dict[Path, Any] = {}  # frozen code → a reference to its content
        self._pauses: deque[tuple[float, RaySlot, int]] = deque()  # when to ask which slot, unless it was asked since
        self._lost: dict[str, RayRun] = {}  # runs of dead hosts whose exit is awaited
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="ray", daemon=True)
        self._thread.start()

    # -- the contract

    def capacity(self, planned: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return planned[: max(1, self._fitting(self._ray.cluster_resources()))]

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        self.start_all([(spec, after)])

    def start_all(self, starts: Sequence[tuple[LaunchSpec, str | None]]) -> None:
        for spec, after in starts:
            record_dir = record_of(spec)
            with self._lock:
                if spec.run_id in self._slot_of or spec.run_id in self._lost:
                    continue
                ended = read_exit(record_dir, spec.attempt)
                if ended is not None:
                    self._tell(Ended(spec.run_id, ended))
                    continue
                self._slot_of[spec.run_id] = spec.slot.name
            env = {**self._env, **spec.env}
            placed = replace(spec, run_dir=_absolute(spec.run_dir), record_dir=record_dir, env=env)
            self._inbox.put(lambda placed=placed, after=after: self._hand_over(placed, after))  # type: ignore[misc]

    def cancel(self, run_id: str) -> None:
        self._inbox.put(lambda: self._cancel(run_id))

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        self._inbox.put(lambda: self._stop(run_id, reason, grace))

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        run = RayRun(run_id, _absolute(run_dir), _absolute(record_dir or run_dir), attempt)
        with self._lock:
            if run_id in self._slot_of or run_id in self._lost:
                return True
            ended = read_exit(run.record_dir, attempt)
            if ended is not None:
                self._tell(Ended(run_id, ended))
                return True
            noted = read_json(run.record_dir / "job.json") or {}
            actor = noted.get("actor") if noted.get("attempt", 1) == attempt else None
            if actor is None and not os.path.lexists(run.record_dir / claim_name(attempt)):
                return False
            self._slot_of[run_id] = str(noted.get("slot") or actor)
        self._inbox.put(lambda: self._take_over(run, str(actor)))
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._inbox.put(None)
        self._thread.join()
        self._closed = True
        self._close_events()

    # -- the thread

    def _work(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 (reported by `poll`)
            self._fail(error)

    def _loop(self) -> None:
        check_at = 0.0
        while True:
            timeout = min(CHECK_S, self._pauses[0][0] - time.monotonic()) if self._pauses else CHECK_S
            with contextlib.suppress(queue.Empty):
                task = self._inbox.get(timeout=max(0.0, timeout))
                if task is None:
                    break
                task()
            while self._pauses and self._pauses[0][0] <= time.monotonic():
                _, slot, number = self._pauses.popleft()
                if slot.exchange == number and slot in self._slots.values():
                    self._exchange(slot)
            if time.monotonic() >= check_at:
                self._check()
                check_at = time.monotonic() + CHECK_S
        for slot in self._slots.values():
            if slot.calls:  # they wait in this process until the actor is placed; else the next engine starts them
                slot.actor.exchange.remote(slot.calls, slot.seq, 0.0)
            slot.actor.leave.remote()

    def _hand_over(self, spec: LaunchSpec, after: str | None) -> None:
        """Give a run to the actor of its slot, or to the one that has got it before."""
        assert spec.record_dir is not None
        noted = read_json(spec.record_dir / "job.json") or {}
        slot = None
        if noted.get("actor") and noted.get("attempt", 1) == spec.attempt:
            # An engine was killed after the hand-over, and before that was in the ledger.
            slot = self._find_actor(spec.run_id, str(noted["actor"]))
        if slot is None:
            self._slot_of[spec.run_id] = spec.slot.name
            slot = self._slots.get(spec.slot.name) or self._connect(spec.slot.name)
        run = RayRun(spec.run_id, spec.run_dir, spec.record_dir, spec.attempt, spec.grace)
        slot.runs[spec.run_id] = run
        note = {"actor": slot.name, "slot": spec.slot.name, "attempt": spec.attempt}
        try:
            content = self._content(spec)
            if noted.get("actor") != slot.name or noted.get("attempt", 1) != spec.attempt:
                supervisor.atomic_write(f"{spec.record_dir}/job.json", json.dumps(note))
        except Exception as error:  # noqa: BLE001 (a full disk, a file that is gone, an object store that is full)
            now, why = time.time(), f"cannot hand over {spec.record_dir}: {error}"
            exit_ = Exit(None, reason="not started", message=why, started=now, ended=now, attempt=spec.attempt)
            self._finish(slot, run, exit_)
            return
        self._do(slot, ("start", spec.run_id, spec, after, *content), can_wait=after is not None)

    def _content(self, spec: LaunchSpec) -> tuple[Any, ...]:
        """Return what a node without the lab's disk needs of a run: its folder, and a reference to its code."""
        if self._config.folder is None:
            return ()
        if spec.code is not None and spec.code not in self._code:
            self._code = {spec.code: self._ray.put(read_tree(spec.code))}
        return read_tree(spec.run_dir), [self._code[spec.code]] if spec.code is not None else []

    def _copy(self, slot: RaySlot, run: RayRun) -> None:
        """Request what a run has written since the last call."""
        if run.is_copying or not slot.is_ready:
            return
        run.is_copying, run.copy_at = True, time.monotonic() + COPY_S
        try:
            run.mirror = run.mirror or EngineMirror(run.run_dir, run.record_dir)
        except OSError:
            run.is_copying = False
            return
        answer = slot.actor.changes.remote(str(run.run_dir), run.mirror.known, run.exit is not None)
        is_final = run.exit is not None
        self._ask(slot, answer, lambda slot, answer: self._on_copied(slot, run, answer, is_final))

    def _on_copied(self, slot: RaySlot, run: RayRun, answer: tuple[list[Chunk], list[str]], is_final: bool) -> None:
        run.is_copying = False
        chunks, skipped = answer
        assert run.mirror is not None
        try:
            for chunk in chunks:
                run.mirror.store(chunk)
        except OSError:  # a full disk: the next look may succeed
            return
        if run.exit is None:
            return
        if chunks or not is_final:
            self._copy(slot, run)
            return
        if skipped:
            with contextlib.suppress(OSError):
                text = json.dumps({"node": slot.name, "folder": self._config.folder, "files": sorted(skipped)})
                supervisor.atomic_write(f"{run.record_dir}/not_copied.json", text)
        slot.actor.forget.remote(run.run_id, str(run.run_dir), bool(skipped))
        self._forget(slot, run)
        self._tell(Ended(run.run_id, run.exit))

    def _take_over(self, run: RayRun, actor: str) -> None:
        """Connect to the actor that has a run of an earlier engine."""
        slot = self._find_actor(run.run_id, actor)
        if slot is None:
            self._lose(run)
            return
        slot.runs[run.run_id] = run
        self._do(slot, ("adopt", run.run_id, str(run.run_dir), str(run.record_dir), run.attempt))

    def _find_actor(self, run_id: str, actor: str) -> RaySlot | None:
        """Return the slot of the actor that has a run; None if there is no such actor."""
        key = self._slot_of.get(run_id, actor)
        slot = self._slots.get(key)
        if slot is not None and slot.name != actor:
            key = self._slot_of[run_id] = actor
            slot = self._slots.get(key)
        if slot is None:
            try:
                handle = self._ray.get_actor(actor, namespace=self._namespace)
            except ValueError:
                return None
            slot = self._slots[key] = RaySlot(actor, handle)
            self._ask(slot, slot.actor.hello.remote(), self._on_hello)
        return slot

    def _connect(self, key: str) -> RaySlot:
        """Return the actor of a slot: that of an earlier engine, or a new one."""
        known = {slot.name for slot in self._slots.values()} | self._dead
        for named in self._ray.util.list_named_actors(all_namespaces=True):
            name = named["name"]
            if named["namespace"] == self._namespace and name.rpartition("-")[0] == key and name not in known:
                with contextlib.suppress(ValueError):  # it has ended just now
                    actor = self._ray.get_actor(name, namespace=self._namespace)
                    slot = self._slots[key] = RaySlot(name, actor)
                    self._ask(slot, actor.hello.remote(), self._on_hello)
                    return slot
        return self._create(key)

    def _create(self, key: str) -> RaySlot:
        name = f"{key}-{secrets.token_hex(4)}"  # the old name answers for a while after its node is lost
        options: dict[str, Any] = {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "num_cpus": self._cpus,
            "num_gpus": self._resources.devices or 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": self._config.runtime_env or None,
        }
        if self._config.resources:
            options["resources"] = dict(self._config.resources)
        if self._resources.memory_mb is not None:
            options["memory"] = self._resources.memory_mb << 20
        host = self._host_class.options(**options)
        actor = host.remote(self._config.idle, self._config.folder, self._config.copy_mb << 20)
        slot = self._slots[key] = RaySlot(name, actor)
        self._ask(slot, actor.hello.remote(), self._on_hello)
        return slot

    @property
    def _cpus(self) -> float:
        return float(self._resources.cores or 1)

    def _fitting(self, have: Mapping[str, float]) -> int:
        """Return how many slots these resources are enough for."""
        needs = {"CPU": self._cpus, "GPU": self._resources.devices or 0, **self._config.resources}
        return min(int(have.get(name, 0.0) / amount) for name, amount in needs.items() if amount)

    def _ask(
        self,
        slot: RaySlot,
        answer: Any,
        handle: Callable[[RaySlot, Any], None],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Let the thread handle an answer of a host when it comes."""

        def receive(future: Any) -> None:
            self._inbox.put(lambda: self._on_answer(slot, future, handle, on_failure))

        answer.future().add_done_callback(receive)

    def _on_answer(
        self, slot: RaySlot, future: Any, handle: Callable[[RaySlot, Any], None], on_failure: Callable[[], None]
    ) -> None:
        errors = self._ray.exceptions
        if slot not in self._slots.values():
            return
        try:
            answer = future.result()
        except errors.ActorUnavailableError:  # it may come back, or turn out to be dead
            on_failure()
            timer = threading.Timer(1.0, lambda: self._inbox.put(lambda: self._ask_again(slot)))
            timer.daemon = True
            timer.start()
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, the host does not work)
            self._kill(slot)  # its runs must end before they are started elsewhere
            self._on_death(slot, str(error).strip().splitlines()[:1])
            return
        handle(slot, answer)

    def _ask_again(self, slot: RaySlot) -> None:
        if slot not in self._slots.values():
            return
        if slot.is_ready:
            self._exchange(slot)
        else:
            self._ask(slot, slot.actor.hello.remote(), self._on_hello)

    def _on_hello(self, slot: RaySlot, answer: tuple[int, str]) -> None:
        slot.seq, _ = answer
        slot.is_ready = True
        self._exchange(slot)

    def _do(self, slot: RaySlot, call: tuple[Any, ...], *, can_wait: bool = False) -> None:
        slot.calls.append(call)
        if slot.is_ready and can_wait:
            self._pause(slot)
        elif slot.is_ready:
            self._exchange(slot)

    def _pause(self, slot: RaySlot) -> None:
        """Have an exchange soon, unless there is another one before."""
        self._pauses.append((time.monotonic() + PAUSE_S, slot, slot.exchange))

    def _exchange(self, slot: RaySlot) -> None:
        """Make the calls that wait, and ask for events."""
        again = [call for number in sorted(slot.unanswered) for call in slot.unanswered[number]]
        calls = [call for call in again if slot.awaits(call)] + slot.calls
        slot.calls, slot.unanswered = [], {}
        slot.exchange += 1
        number = slot.exchange

        def on_failure() -> None:
            slot.unanswered[number] = calls

        answer = slot.actor.exchange.remote(calls, slot.seq, EXCHANGE_S)
        self._ask(slot, answer, lambda slot, events: self._on_events(slot, events, number), on_failure)

    def _on_events(self, slot: RaySlot, events: list[tuple[int, LaunchEvent]], number: int) -> None:
        events = [event for event in events if event[0] > slot.seq]
        if events:
            slot.seq = events[-1][0]
        if number == slot.exchange:
            self._pause(slot)
        for _, event in events:
            run = slot.runs.get(getattr(event, "run_id", ""))
            if run is None or (isinstance(event, Ended) and event.exit.attempt != run.attempt):
                continue
            if isinstance(event, Started):
                event = replace(event, place=replace(event.place, job=slot.name))
            if isinstance(event, Ended):
                self._finish(slot, run, event.exit)
            elif isinstance(event, Rejected):
                self._reject(slot, run, event.holder)
            else:
                self._tell(event)

    def _finish(self, slot: RaySlot | None, run: RayRun, exit_: Exit) -> None:
        is_mirrored = self._config.folder is not None and exit_.reason != "not started"
        if is_mirrored and slot is not None and slot in self._slots.values() and run.exit is None:
            run.exit = exit_
            self._copy(slot, run)
            return
        self._forget(slot, run)
        self._tell(Ended(run.run_id, exit_))

    def _reject(self, slot: RaySlot | None, run: RayRun, holder: str | None = None) -> None:
        with contextlib.suppress(OSError):
            os.unlink(run.record_dir / "job.json")
        self._forget(slot, run)
        self._tell(Rejected(run.run_id, holder))

    def _forget(self, slot: RaySlot | None, run: RayRun) -> None:
        with self._lock:
            self._slot_of.pop(run.run_id, None)
            self._lost.pop(run.run_id, None)
        if slot is not None:
            slot.runs.pop(run.run_id, None)
        if run.mirror is not None:
            run.mirror.close()

    def _find(self, run_id: str) -> tuple[RaySlot, RayRun] | None:
        slot = self._slots.get(self._slot_of.get(run_id, ""))
        return (slot, slot.runs[run_id]) if slot is not None and run_id in slot.runs else None

    def _cancel(self, run_id: str) -> None:
        found = self._find(run_id)
        if found is None:
            return
        slot, run = found
        if not slot.is_ready and any(call[:2] == ("start", run_id) for call in slot.calls):
            slot.calls = [call for call in slot.calls if call[1] != run_id]
            self._reject(slot, run)
        else:
            self._do(slot, ("cancel", run_id))

    def _stop(self, run_id: str, reason: str, grace: float) -> None:
        if run_id in self._lost:
            self._lost[run_id].stop = reason
        found = self._find(run_id)
        if found is None:
            return
        slot, run = found
        run.stop, run.grace = run.stop or reason, grace
        if not slot.is_ready and any(call[:2] == ("start", run_id) for call in slot.calls):
            slot.calls = [call for call in slot.calls if call[1] != run_id]
            claimed = supervisor.claim(str(run.record_dir / claim_name(run.attempt)))
            now = time.time()
            ended = Exit(None, reason=reason, message="stopped while queued", ended=now, attempt=run.attempt)
            if claimed:
                text = {"code": None, "signal": None, "reason": reason, "message": ended.message, "ended": now}
                supervisor.atomic_write(
                    str(run.record_dir / "exit.json"), json.dumps(supervisor.with_attempt(text, run.attempt))
                )
            self._finish(slot, run, ended)
        else:
            self._do(slot, ("stop", run_id, reason, grace))

    def _on_death(self, slot: RaySlot, why: list[str]) -> None:
        """Handle the death of a slot's actor and its runs; the next start creates a new actor."""
        for key in [key for key, one in self._slots.items() if one is slot]:
            del self._slots[key]
        self._dead.add(slot.name)
        waiting = {call[1] for call in slot.calls if call[0] == "start"}
        for run in list(slot.runs.values()):
            if run.run_id in waiting:  # it was never submitted
                self._reject(slot, run)
            elif run.exit is not None:  # not all of its files were copied
                self._forget(slot, run)
                self._tell(Ended(run.run_id, run.exit))
            else:
                self._lose(run)

    def _lose(self, run: RayRun) -> None:
        """Await the exit of a run whose host is dead; see `_check`."""
        run.over_at = time.monotonic()
        with self._lock:
            self._lost[run.run_id] = run

    def _kill(self, slot: RaySlot) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(slot.actor, no_restart=True)

    def _check(self) -> None:
        """Settle the runs of dead hosts, and give waiting hosts the resources of idle ones."""
        now = time.monotonic()
        for run in list(self._lost.values()):
            assert run.over_at is not None
            ended = read_exit(run.record_dir, run.attempt)
            if ended is not None:
                self._finish(None, run, ended)
            elif self._config.folder is None and not os.path.lexists(run.record_dir / claim_name(run.attempt)):
                if now > run.over_at + SETTLE_S:
                    self._reject(None, run)
            elif now > run.over_at + run.grace + SETTLE_S and not _is_alive_here(run):
                why = "its node was lost"
                exit_ = Exit(None, reason=run.stop or "lost", message=why, ended=time.time(), attempt=run.attempt)
                self._finish(None, run, exit_)
        if self._config.folder is not None:
            for slot in self._slots.values():
                for run in [run for run in slot.runs.values() if now >= run.copy_at]:
                    self._copy(slot, run)
        waiting = [slot for slot in self._slots.values() if not slot.is_ready and now > slot.since + PLACE_S]
        if not waiting:
            return
        is_full = self._fitting(self._ray.available_resources()) == 0  # else its actor is just starting
        idle = [(key, slot) for key, slot in self._slots.items() if slot.is_ready and not slot.runs and is_full]
        for slot, (key, spare) in zip(waiting, idle, strict=False):
            del self._slots[key]
            self._dead.add(spare.name)
            self._kill(spare)
            slot.since = now
        for slot in waiting:
            if not slot.told:
                slot.told = True
                for run_id in slot.runs:
                    self._tell(Queued(run_id, slot.name, "its actor has no place yet"))


def connect(config: RayConfig) -> Any:
    """Connect this process to a Ray cluster, and return the module.

    Raises:
        LabError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise LabError("the executor ray needs Ray", hint="pip install 'looplab[ray]'") from error
    if ray.is_initialized():
        return ray
    require_listener(config.address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=config.address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unreachable(config.address, why) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray's own would end the engine at once
                signal.signal(number, handler)
    return ray


def _unreachable(address: str, why: str) -> LabError:
    return LabError(
        f"cannot connect to the Ray cluster at {address}: {why}",
        hint="start one with `ray start --head`, or set executor.ray.address; nothing was started",
    )


def require_listener(address: str) -> None:
    """Raise LabError if the address of a cluster does not answer: Ray itself would try for a minute, then abort."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, getattr(error, "strerror", None) or str(error)) from error


def _is_alive_here(run: RayRun) -> bool:
    """Return whether processes of a run are alive on this machine, as those of a local executor may be."""
    process = read_process(run.record_dir, run.attempt)
    is_here = process is not None and where_is(process, run.record_dir) is Where.HERE
    return is_here and is_running(run.run_dir, run.record_dir)


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
