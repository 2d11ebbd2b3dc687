"""What people and other processes ask of an engine: to end, to drain, to pause, to stop or invalidate a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from looplab.launch.base import STOP, Executor
from looplab.launch.pool import SlotPool
from looplab.ledger.study import StudyLedger
from looplab.loop.events import Listener, Note


class EngineControl:
    """Requests to an engine, and whether it may still start runs.

    Args:
        study: The study, whose commands in the ledger are obeyed.
        executor: Stops runs, and cancels those that are prequeued.
        pool: The slots of the engine.
        running: The current runs, by id.
        unreachable: Those of them that cannot be seen from here.
        grace: Seconds between SIGTERM and SIGKILL.
        tell: Receives notes.
    """

    def __init__(
        self, study: StudyLedger, executor: Executor, pool: SlotPool[Any], running: Mapping[str, Any],
        unreachable: AbstractSet[str], *, grace: float, tell: Listener,
    ) -> None:  # fmt: skip
        self.draining = False
        self.stopping = False
        self.paused = False
        self.failed = False
        """Whether the engine ends because something is wrong."""
        self.why = ""
        """Why the engine ends; empty: the planner knows."""
        self._study = study
        self._executor = executor
        self._pool = pool
        self._running = running
        self._unreachable = unreachable
        self._grace = grace
        self._tell = tell
        self._version = -1
        self._requests: list[str] = []

    @property
    def ending(self) -> bool:
        """Whether no more runs will ever be started."""
        return self.draining or self.stopping

    @property
    def may_start(self) -> bool:
        return not (self.draining or self.stopping or self.paused)

    def request(self, what: Literal["stop", "drain"]) -> None:
        """Ask the engine to end; may be called from a signal handler or another thread. It is done between two steps,
        so that a run which is being started at this moment is not missed."""
        self._requests.append(what)

    def handle(self, veto: Callable[[str, str], None]) -> None:
        """Obey the new requests of this process, and the new commands of others.

        Args:
            veto: Called with a run that is declared void, and why.
        """
        while self._requests:
            self.stop() if self._requests.pop(0) == "stop" else self.drain()
        version = self._study.ledger.version()
        if version == self._version:
            return
        self._version = version
        for what, data in self._study.take_commands():
            if what == "drain":
                self.drain()
            elif what == "stop" and data.get("run") is None:
                self.stop()
            elif what == "stop" and data["run"] in self._running:
                self.stop_run(data["run"], STOP)
            elif what in ("pause", "resume"):
                self.pause(what == "pause")
            elif what == "veto":
                veto(data["run"], data["why"])

    def stop_run(self, run_id: str, reason: str) -> None:
        """Stop one run, for the recorded reason."""
        self._executor.stop(run_id, reason, self._grace)

    def stop(self) -> None:
        """Stop the current runs; planned runs stay planned."""
        self.stopping = True
        self.why = "stopped"
        self._cancel_prequeued()
        for run_id in self._running.keys() - self._unreachable:
            self.stop_run(run_id, STOP)

    def drain(self) -> None:
        """Let the current runs end, and start no more."""
        self.draining = True
        self.why = "drained"
        self._cancel_prequeued()

    def fail(self, why: str) -> None:
        """Start no more runs, and end with a failure when the current ones have ended."""
        self.drain()
        self.failed = True
        self.why = why

    def pause(self, paused: bool) -> None:
        """Start no more runs until resumed; the current ones continue."""
        self.paused = paused
        if paused:
            self._cancel_prequeued()
        self._tell(Note("paused: no run starts until `looplab resume`" if paused else "continuing"))

    def _cancel_prequeued(self) -> None:
        for run_id in self._pool.prequeued():
            self._executor.cancel(run_id)
