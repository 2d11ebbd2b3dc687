"""Messages of an engine, held back until its transaction has ended: the ledger must not wait for a slow listener."""

from __future__ import annotations

import time
from pathlib import Path

from looplab.loop.events import AlarmRaised, EngineEvent, Listener, Note
from looplab.report import labbook


class Outbox:
    """Events for listeners and lines for the lab book."""

    def __init__(self, outputs: Path, study: str, deliver: Listener) -> None:
        self._outputs = outputs
        self._study = study
        self._deliver = deliver
        self._events: list[EngineEvent] = []
        self._lines: list[str] = []

    def tell(self, event: EngineEvent) -> None:
        """Queue an event."""
        self._events.append(event)

    def tell_now(self, text: str) -> None:
        """Emit a note at once; for threads of the engine, which are never inside its transaction."""
        self._deliver(Note(text))

    def log_line(self, line: str) -> None:
        """Queue a line for the lab book."""
        self._lines.append(line)

    def log(self, action: str, observed: str, outcome: str = "", follow_up: str = "", at: float | None = None) -> None:
        """Queue a line for the lab book, from its parts."""
        self._lines.append(labbook.line(time.time() if at is None else at, action, observed, outcome, follow_up))

    def alarm(self, text: str, run: str | None = None) -> None:
        """Queue an alarm, for listeners and for the lab book."""
        self.tell(AlarmRaised(text, run))
        self.log("alarm", text)

    def write_book(self) -> None:
        """Append the queued lines to the lab book."""
        lines, self._lines = self._lines, []
        if lines:
            labbook.append(self._outputs, self._study, lines)

    def flush(self) -> None:
        """Write the lab book and emit the queued events."""
        self.write_book()
        events, self._events = self._events, []
        for event in events:
            self._deliver(event)
