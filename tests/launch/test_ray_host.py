"""The host of a slot on a Ray cluster, without Ray: its thread and its event loop."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.launch import ray_host
from looplab.launch.base import LaunchEvent, Place, Rejected, Started
from looplab.launch.ray_host import Host


class ScriptedExecutor:
    """Reports the events that a test puts into its queue; an exception is raised."""

    def __init__(self) -> None:
        self.script: queue.SimpleQueue[LaunchEvent | Exception] = queue.SimpleQueue()

    def wake(self) -> None:
        """Do nothing: `poll` returns soon."""

    def adopt(self, *_: Any) -> bool:
        return True

    def poll(self, _: float) -> list[LaunchEvent]:
        try:
            found = self.script.get(timeout=0.01)
        except queue.Empty:
            return []
        if isinstance(found, Exception):
            raise found
        return [found]


@pytest.fixture
def exited(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hosts of the test have a scripted executor. Set when one of them would have ended its process."""
    ended = threading.Event()
    monkeypatch.setattr(ray_host, "LeasedExecutor", ScriptedExecutor)
    monkeypatch.setattr(ray_host.os, "_exit", lambda code: ended.set())
    hosts: list[Host] = []
    made = Host.__init__

    def make(host: Host, *arguments: Any) -> None:
        made(host, *arguments)
        hosts.append(host)

    monkeypatch.setattr(Host, "__init__", make)
    yield ended
    for host in hosts:
        host._executor.script.put(KeyError("the test is over"))  # type: ignore[attr-defined]
    assert not hosts or ended.wait(PATIENCE_S)


def test_a_start_that_no_engine_has_read_is_reported_to_the_next_one(exited: threading.Event, tmp_path: Path) -> None:
    async def scenario() -> list[tuple[int, LaunchEvent]]:
        host = Host(1e9)
        host._executor.script.put(Started("r1", Place("here", 7), 5.0))  # type: ignore[attr-defined]
        while (await host.hello())[0] == 0:
            await asyncio.sleep(0.005)
        seq, _ = await host.hello()
        return await host.exchange([("adopt", "r1", str(tmp_path), str(tmp_path), 1)], seq, PATIENCE_S)

    (found,) = asyncio.run(scenario())
    assert isinstance(found[1], Started)
    assert (found[1].run_id, found[1].at, found[1].pid) == ("r1", 5.0, 7)


def test_events_can_be_read_while_others_are_added(exited: threading.Event) -> None:
    number = 5000

    async def scenario() -> list[str]:
        host, found = Host(1e9), list[str]()
        adding = threading.Thread(target=lambda: [host._tell(Rejected(str(i), None)) for i in range(number)])
        adding.start()
        while adding.is_alive():
            host._events_after(0)
        while len(found) < number:
            for _, event in await host.exchange([], len(found), 1.0):
                assert isinstance(event, Rejected)
                found.append(event.run_id)
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert asyncio.run(scenario()) == [str(i) for i in range(number)]
    finally:
        sys.setswitchinterval(interval)


def test_a_host_that_does_not_work_ends(exited: threading.Event) -> None:
    async def scenario() -> None:
        Host(1e9)._executor.script.put(KeyError("a mistake"))  # type: ignore[attr-defined]

    asyncio.run(scenario())
    assert exited.wait(PATIENCE_S)
