"""A supervisor whose runs live no longer than its engine: for an engine that is itself placed by a scheduler.

`python -I -S leased.py DESCRIPTOR`, like `supervisor.py`. If the process that started it is gone, its place is given
up, and the same runs may soon be started elsewhere; so it ends them, with the reason `lost`. It also ends a run of
which a newer attempt was started. It leaves the process tree of its engine: a scheduler that kills the children of a
dead worker would otherwise kill it before it can end its runs.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or "looplab.launch" in sys.modules:
    from looplab.launch import supervisor
else:  # run as a script: the file next to this one, whatever is on the path
    _SPEC = importlib.util.spec_from_file_location("supervisor", os.path.dirname(__file__) + "/supervisor.py")
    supervisor = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(supervisor)

LOOK_S = 1.0
"""Seconds between checks for newer attempts."""


class LeasedSupervisor(supervisor.Supervisor):  # type: ignore[misc,unused-ignore]
    look_at = 0.0
    is_over = False
    """Whether the runs were ended because the engine is gone."""

    def next_timeout(self) -> float | None:
        due: float | None = super().next_timeout()
        if not self.children:
            return due
        return LOOK_S * 1000 if due is None else min(LOOK_S * 1000, due)

    def tick(self) -> None:
        now = time.monotonic()
        if self.engine_gone and not self.is_over:
            self.is_over = True
            for child in list(self.children.values()):
                self.stop(child, "lost", child.grace)
        if now >= self.look_at:
            self.look_at = now + LOOK_S
            for child in list(self.children.values()):
                if os.path.lexists(f"{child.record}/attempt-{child.attempt + 1}") and child.kill_at is None:
                    self.stop(child, "lost", child.grace)


if __name__ == "__main__":
    engine_fd = int(sys.argv[1])
    if os.fork():
        os._exit(0)
    os.set_inheritable(engine_fd, False)
    LeasedSupervisor(socket.socket(fileno=engine_fd)).run()
