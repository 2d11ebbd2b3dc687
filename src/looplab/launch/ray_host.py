"""The place of one slot on a Ray cluster: a detached actor that hosts a local executor.

Engines come and go; the host stays as long as it has runs. Its events are numbered, and every engine that is connected
reads them from where it began. A host that nobody has called for a while and that has no runs ends itself. If its node
is lost, or the actor is killed, its supervisor ends the runs (`leased.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from looplab.launch import leased
from looplab.launch.base import LATE_DEVICES, Ended, LaunchEvent, LaunchSpec, Place, Rejected, Started
from looplab.launch.local import LocalExecutor

KEPT = 10_000
"""Events that are kept for engines that have not read them yet."""
LEFT_S = 1.0
"""Seconds that an idle host waits for another engine after one has left."""
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class LeasedExecutor(LocalExecutor):
    """A local executor whose runs end with its process."""

    script = leased.__file__


class Host:
    """Runs in the actor. All methods are coroutines on the actor's event loop; one thread owns the executor."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._cores = sorted(os.sched_getaffinity(0))
        self._events: deque[tuple[int, LaunchEvent]] = deque(maxlen=KEPT)
        self._seq = 0
        self._calls: deque[tuple[Any, ...]] = deque()
        self._runs: set[str] = set()
        self._called_at = time.monotonic()
        self._waiting = 0
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

    async def do(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Make calls of the executor, in this order."""
        self._called_at = time.monotonic()
        self._is_left = False
        self._calls.extend(calls)
        self._executor.wake()

    async def leave(self) -> None:
        """An engine ends. If no other one is connected, the host need not wait for the next."""
        self._is_left = True
        self._news.set()

    async def take(self, after: int, timeout: float) -> list[tuple[int, LaunchEvent]]:
        """Return the events after this number; wait for the first."""
        self._waiting += 1
        try:
            if self._seq <= after:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), timeout)
            return [event for event in self._events if event[0] > after]
        finally:
            self._waiting -= 1
            self._called_at = time.monotonic()

    def _work(self) -> None:
        while True:
            while self._calls:
                self._call(*self._calls.popleft())
            events = self._executor.poll(1.0)
            for event in events:
                self._tell(event)
            is_idle = not (self._runs or self._calls or self._waiting)
            if is_idle and time.monotonic() - self._called_at > (LEFT_S if self._is_left else self._idle_s):
                os._exit(0)

    def _call(self, what: str, run_id: str, *arguments: Any) -> None:
        if what == "start":
            spec, after = arguments
            self._runs.add(run_id)
            self._executor.start(self._placed(spec), after)
        elif what == "adopt":
            run_dir, record_dir, attempt = arguments
            self._runs.add(run_id)
            if not self._executor.adopt(run_id, Path(run_dir), Path(record_dir), attempt):
                self._tell(Rejected(run_id, None))
        elif what == "stop":
            self._executor.stop(run_id, *arguments)
        else:
            self._executor.cancel(run_id)

    def _tell(self, event: LaunchEvent) -> None:
        if isinstance(event, Started):
            place = Place(os.uname().nodename, event.pid, None, tuple(self._devices), tuple(self._cores))
            event = replace(event, place=place)
        if isinstance(event, Ended | Rejected):
            self._runs.discard(event.run_id)
        self._seq += 1
        self._events.append((self._seq, event))
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
