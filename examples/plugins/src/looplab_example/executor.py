"""An executor: runs on this machine, and keeps a list of what was started and how it ended."""

from __future__ import annotations

from looplab.launch.base import ExecutorContext, LaunchEvent
from looplab.launch.local import LocalExecutor


class ListingExecutor(LocalExecutor):
    """Options: the name of the list, in the lab."""

    def __init__(self, context: ExecutorContext, file: str = "launches.txt") -> None:
        super().__init__()
        self.file = context.lab / file

    def poll(self, timeout: float) -> list[LaunchEvent]:
        events = super().poll(timeout)
        with self.file.open("a") as file:
            file.writelines(f"{type(event).__name__} {event.run_id}\n" for event in events)
        return events
