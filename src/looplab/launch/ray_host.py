"""The place of one slot on a Ray cluster: a detached actor that hosts a local executor.

Engines come and go; the host stays as long as it has runs. Its events are numbered, and every engine that is connected
reads them from where it began. A host without calls and without runs exits after a while. If its node
is lost, or the actor is killed, its supervisor ends the runs (`leased.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from looplab.launch import leased
from looplab.launch.base import (
    LATE_DEVICES,
    Ended,
    Exit,
    LaunchEvent,
    LaunchSpec,
    Place,
    Rejected,
    Started,
    claim_name,
)
from looplab.launch.local import LocalExecutor
from looplab.launch.mirror import Chunk, Known, NodeMirror

KEPT = 10_000
"""Events that are kept for engines that have not read them yet."""
LEFT_S = 1.0
"""Seconds that an idle host waits for another engine after one has left."""
GATHER_S = 0.003
"""Seconds that the first event waits for others: a run ends and the next one starts at nearly the same time."""
BUSY_GATHER_S = 0.02
"""The same while further runs wait here, so that the slot does not need the engine."""
PRUNE_S = 60.0
"""Seconds between two looks for frozen code on this node that no run needs any more."""
UNCOPIED_S = 3600.0
"""Seconds that a host without runs waits for an engine to copy their files."""
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class LeasedExecutor(LocalExecutor):
    """A local executor whose runs end with its process."""

    script = leased.__file__


class Host:
    """Runs in the actor. All methods are coroutines on the actor's event loop; one thread owns the executor."""

    def __init__(self, idle_s: float, folder: str | None = None, limit: int = 0) -> None:
        self._idle_s = idle_s
        self._mirror = NodeMirror(Path(folder), limit) if folder is not None else None
        self._devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._cores = sorted(os.sched_getaffinity(0))
        self._events: deque[tuple[int, LaunchEvent]] = deque(maxlen=KEPT)
        self._seq = 0
        self._events_lock = threading.Lock()
        self._calls: deque[tuple[Any, ...]] = deque()
        self._runs: set[str] = set()
        self._started: dict[str, Started] = {}  # runs that have started and not ended
        self._uncopied: set[str] = set()  # runs whose folder no engine has copied yet
        self._called_at = time.monotonic()
        self._waiting = 0
        self._newest = 0  # number of the latest exchange
        self._is_left = False  # whether an engine has left, and none has come since
        self._news = asyncio.Event()
        self._loop = asyncio.get_event_loop()
        self._executor = LeasedExecutor()
        threading.Thread(target=self._work, name="looplab-host", daemon=True).start()

    async def hello(self) -> tuple[int, str]:
        """Return the number of the last event, and the name of the node."""
        self._called_at = time.monotonic()
        self._is_left = False
        return self._seq, os.uname().nodename

    async def changes(self, run_dir: str, known: Known, final: bool) -> tuple[list[Chunk], list[str]]:
        """Return what an engine does not have of a run folder; see `NodeMirror.changes`."""
        self._called_at = time.monotonic()
        assert self._mirror is not None
        return await asyncio.to_thread(self._mirror.changes, run_dir, known, final=final)

    async def forget(self, run_id: str, run_dir: str, keep: bool) -> None:
        """Remove the folder of a run that an engine has copied, unless it was too large to copy."""
        self._uncopied.discard(run_id)
        if self._mirror is not None and not keep:
            await asyncio.to_thread(self._mirror.forget, run_dir)

    async def leave(self) -> None:
        """Disconnect an engine. If no other one is connected, the host need not wait for the next."""
        self._is_left = True
        self._supersede()

    async def exchange(
        self, calls: Sequence[tuple[Any, ...]], after: int, timeout: float
    ) -> list[tuple[int, LaunchEvent]]:
        """Make calls of the executor, in this order; then return the events after this number, or wait for the first.

        An earlier exchange that still waits returns nothing: one call of Ray for each run is enough.
        """
        self._is_left = False
        if calls:
            self._calls.extend(calls)
            self._executor.wake()
        mine = self._supersede()
        ends_at = self._loop.time() + timeout
        self._waiting += 1
        try:
            while (left := ends_at - self._loop.time()) > 0:
                self._news.clear()
                if self._seq > after or self._newest != mine:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
            if self._seq > after:
                await asyncio.sleep(BUSY_GATHER_S if len(self._runs) > 1 else GATHER_S)
            return self._events_after(after) if self._newest == mine else []
        finally:
            self._waiting -= 1
            self._called_at = time.monotonic()

    def _events_after(self, number: int) -> list[tuple[int, LaunchEvent]]:
        with self._events_lock:  # the other thread adds some meanwhile
            return list(takewhile(lambda event: event[0] > number, reversed(self._events)))[::-1]

    def _supersede(self) -> int:
        """Let the exchange that waits return, and return the number of the next."""
        self._newest += 1
        self._news.set()
        return self._newest

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001 (a host that does not work must be gone: its runs end, and start elsewhere)
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        prune_at = 0.0
        while True:
            if self._mirror is not None and time.monotonic() >= prune_at:
                self._mirror.prune_code()
                prune_at = time.monotonic() + PRUNE_S
            while self._calls:
                self._call(*self._calls.popleft())
            events = self._executor.poll(1.0)
            for event in events:
                self._tell(event)
            is_idle = not (self._runs or self._calls or self._waiting)
            patience = UNCOPIED_S if self._uncopied else LEFT_S if self._is_left else self._idle_s
            if is_idle and time.monotonic() - self._called_at > patience:
                os._exit(0)

    def _call(self, what: str, run_id: str, *arguments: Any) -> None:
        if what == "start":
            spec, after, *content = arguments
            if run_id in self._runs:  # another engine has handed it over
                if run_id in self._started:
                    self._tell(self._started[run_id])
                return
            if self._mirror is not None and self._is_claimed(spec):
                if spec.code is not None:
                    self._mirror.hold_code(run_id, spec.code)
                self._call("adopt", run_id, spec.run_dir, spec.record_dir, spec.attempt)
                return
            self._runs.add(run_id)
            if self._mirror is not None:
                self._uncopied.add(run_id)
            if content and self._mirror is not None:
                try:
                    spec = self._received(spec, *content)
                except Exception as error:  # noqa: BLE001 (a full disk, a folder that cannot be made, a lost object)
                    now, why = time.time(), f"its folder cannot be copied to {os.uname().nodename}: {error}"
                    exit_ = Exit(None, reason="not started", message=why, started=now, ended=now, attempt=spec.attempt)
                    self._uncopied.discard(run_id)
                    self._tell(Ended(run_id, exit_))
                    return
            self._executor.start(self._placed(spec), after)
        elif what == "adopt":
            run_dir, record_dir, attempt = arguments
            if self._mirror is not None:
                mirrored = self._mirror.run_dir(run_dir)
                run_dir, record_dir = mirrored, mirrored / os.path.relpath(record_dir, run_dir)
            self._runs.add(run_id)
            if not self._executor.adopt(run_id, Path(run_dir), Path(record_dir), attempt):
                self._tell(Rejected(run_id, None))
            elif run_id in self._started:  # the engine before may not have heard of it
                self._tell(self._started[run_id])
        elif what == "stop":
            self._executor.stop(run_id, *arguments)
        else:
            self._executor.cancel(run_id)

    def _is_claimed(self, spec: LaunchSpec) -> bool:
        """Return whether a run was started before in the folder that it has on this node."""
        assert self._mirror is not None
        assert spec.record_dir is not None
        record = self._mirror.run_dir(spec.run_dir) / os.path.relpath(spec.record_dir, spec.run_dir)
        return os.path.lexists(record / claim_name(spec.attempt))

    def _received(self, spec: LaunchSpec, files: Any, code: Sequence[Any]) -> LaunchSpec:
        """Write the prepared folder of a run, and its code if this node does not have it; return the spec for here.

        Args:
            files: Content of its folder.
            code: A reference to the content of its code, or nothing.
        """
        import ray

        assert self._mirror is not None
        self._mirror.write_tree(self._mirror.run_dir(spec.run_dir), files)
        if spec.code is not None:
            self._mirror.hold_code(spec.run_id, spec.code)
        if code and spec.code is not None and not self._mirror.code(spec.code).is_dir():
            self._mirror.write_code(spec.code, ray.get(code[0]))
        return self._mirror.moved(spec)

    def _tell(self, event: LaunchEvent) -> None:
        if isinstance(event, Started):
            place = Place(os.uname().nodename, event.pid, None, tuple(self._devices), tuple(self._cores))
            event = self._started[event.run_id] = replace(event, place=place)
        if isinstance(event, Ended | Rejected):
            self._runs.discard(event.run_id)
            self._started.pop(event.run_id, None)
            if self._mirror is not None:
                self._mirror.release_code(event.run_id)
        if isinstance(event, Rejected) or (isinstance(event, Ended) and event.exit.reason == "not started"):
            self._uncopied.discard(event.run_id)
        with self._events_lock:
            self._events.append((self._seq + 1, event))
            self._seq += 1
        if not self._news.is_set():  # `exchange` clears it before it looks at the number
            self._loop.call_soon_threadsafe(self._news.set)

    def _placed(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the spec with the devices that Ray gave to this actor."""
        devices = ",".join(self._devices)
        ours = {name: os.environ[name] for name in DEVICE_VARIABLES if name in os.environ}
        env = {**spec.env, **{name: value for name, value in ours.items() if name not in spec.env}}
        env = {name: value.replace(LATE_DEVICES, devices) for name, value in env.items()}
        env |= {"LOOPLAB_DEVICES": devices, "LOOPLAB_CORES": ",".join(map(str, self._cores))}
        argv = [word.replace(LATE_DEVICES, devices) for word in spec.argv]
        return replace(spec, argv=argv, env=env, slot=replace(spec.slot, devices=(), cores=()))
