"""Run many calls on run folders at once, one per slot, on an executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looplab.errors import LabError
from looplab.launch.base import Ended, Executor, LaunchEvent, Rejected, Slot
from looplab.launch.pool import SlotPool
from looplab.pipeline.runner import StageRun

POLL_S = 0.1
"""Seconds between two polls of the executor."""


@dataclass
class StopRequest:
    """What the user asked for while stages run; set by signal handlers."""

    drain: bool = False
    """Start no more stages."""
    stop: bool = False
    """Stop running stages."""
    hurry: bool = False
    """Do not wait for the grace period."""

    @property
    def ends(self) -> bool:
        return self.drain or self.stop


def drive(
    runs: Sequence[StageRun],
    slots: Sequence[Slot],
    executor: Executor,
    request: StopRequest,
    *,
    why_busy: Callable[[Slot], str | None] | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
    tick: Callable[[], None] = lambda: None,
    closed: Callable[[StageRun], None] = lambda run: None,
) -> None:
    """Run the stages of all runs, one run per slot, until each is complete, failed or stopped.

    Args:
        runs: Calls to run; those with a stage that is still running are resumed first, in their slot.
        slots: Slots to use.
        executor: Starts and stops the stages.
        request: Polled for drain and stop requests.
        why_busy: Returns why a slot cannot be used now (see `SlotPool`); None: every slot can.
        on_wait: Called with a sentence when a slot begins to wait for its device.
        tick: Called after every poll.
        closed: Called when a run has finished.
    """
    driver = _Driver(runs, SlotPool(slots, why_busy, on_wait), executor, request, closed)
    try:
        while True:
            driver.start_waiting()
            if not driver.has_work():
                break
            driver.stop_running()
            for event in executor.poll(POLL_S):
                driver.handle(event)
            for run in driver.running.values():
                run.copy_output()
            tick()
    finally:
        for run in runs:
            run.close()
    driver.give_up_waiting()


class _Driver:
    """The state of `drive`."""

    def __init__(
        self, runs: Sequence[StageRun], pool: SlotPool[None], executor: Executor, request: StopRequest,
        closed: Callable[[StageRun], None],
    ) -> None:  # fmt: skip
        self.running: dict[str, StageRun] = {}
        """Name of a stage for the executor → its run."""
        self._previous = {run.name: slot for run in runs if (slot := run.running_slot()) is not None}
        self._waiting = deque(sorted(runs, key=lambda run: run.name not in self._previous))
        self._pool = pool
        self._executor = executor
        self._request = request
        self._closed = closed
        self._stopped: dict[str, bool] = {}  # stages that were asked to stop, and whether in a hurry

    def has_work(self) -> bool:
        return bool(self.running) or (bool(self._waiting) and not self._request.ends)

    def start_waiting(self) -> None:
        """Give every usable slot a run."""
        while self._waiting and not self._request.ends:
            run = self._waiting[0]
            slot = self._pool.claim(run.name, self._previous.pop(run.name, None))
            if slot is None:
                slot = self._pool.take()
                if slot is None:
                    run.blocked = "; ".join(self._pool.waits())
                    return
                self._pool.hold(run.name, slot)
            self._waiting.popleft()
            run.slot, run.blocked = slot, ""
            try:
                if run.state == "waiting":
                    run.open()
            except LabError as error:
                run.state, run.error = "failed", str(error)
            self._advance(run)

    def _advance(self, run: StageRun) -> None:
        """Start the run's next stage, or close the run."""
        try:
            if run.state == "running" and run.has_more and self._request.ends:
                run.state, run.error = "stopped", "stopped before it finished"
            name = run.next(self._executor, run.slot) if run.state == "running" else None
        except LabError as error:
            run.state, run.error, name = "failed", str(error), None
        if name is not None:
            self.running[name] = run
            return
        run.close()
        self._pool.release(run.name)
        self._closed(run)

    def handle(self, event: LaunchEvent) -> None:
        if isinstance(event, Ended):
            run = self.running.pop(event.run_id)
            try:
                run.ended(event.exit)
            except (LabError, OSError) as error:  # what a stage does to its folder must not end the others
                run.state, run.error = "failed", f"{run.stage}: {error}"
            self._advance(run)
        elif isinstance(event, Rejected):
            run = self.running.pop(event.run_id)
            self._pool.reject(run.name, event.holder)
            self._waiting.appendleft(run)

    def stop_running(self) -> None:
        """Stop the running stages if the user asked for it."""
        for name, run in self.running.items() if self._request.stop else ():
            if self._stopped.get(name) != self._request.hurry:
                self._stopped[name] = self._request.hurry
                grace = 0.0 if self._request.hurry else run.plan.stages[run.stage or ""].grace
                self._executor.stop(name, "stop", grace)

    def give_up_waiting(self) -> None:
        """Close the runs that did not get a slot before the user asked to end."""
        for run in self._waiting:
            error = "not started" if run.state == "waiting" else "stopped before it finished"
            run.state, run.error, run.blocked = "stopped", error, ""
            self._closed(run)
