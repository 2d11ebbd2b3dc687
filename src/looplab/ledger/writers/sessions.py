"""Writing sessions of engines, calls of agents, and requests to a running engine."""

from __future__ import annotations

import time
from typing import Any

from looplab.ledger import catalogue
from looplab.ledger.view import StudyView
from looplab.runs import clock
from looplab.runs.redact import redact_text
from looplab.untrusted import dump_json, load_own_json, shorten


class SessionWriter(StudyView):
    """Records engines, agents and people that work on the study."""

    def begin_session(self, host: str, pid: int, ticks: int) -> int:
        now = clock.now()  # in all columns: what a session used does not depend on the machine's clock
        with self.ledger.write():
            cursor = self.ledger.execute(
                "INSERT INTO sessions (study, host, pid, ticks, began, seen) VALUES (?,?,?,?,?,?)",
                (self.name, host, pid, ticks, now, now),
            )
            assert cursor.lastrowid is not None
            event = catalogue.EngineBeganEvent(session=cursor.lastrowid, host=host, pid=pid, ticks=ticks)
            self.ledger.record(event, self.name, when=now)
            return cursor.lastrowid

    def heartbeat(self, session: int) -> None:
        self.ledger.execute("UPDATE sessions SET seen=? WHERE id=?", (clock.now(), session))

    def end_session(self, session: int, how: str, why: str = "") -> None:
        with self.ledger.write():
            now = clock.now()
            self.ledger.execute("UPDATE sessions SET seen=?, ended=?, how=? WHERE id=?", (now, now, how, session))
            event = catalogue.EngineEndedEvent(session=session, how=how, why=shorten(why))
            self.ledger.record(event, self.name, when=now)

    def record_agent(
        self,
        event: catalogue.AgentAskedEvent | catalogue.AgentAnsweredEvent | catalogue.FilesChangedEvent,
        when: float | None = None,
    ) -> None:
        """Record the start or the end of a call, or files that changed meanwhile."""
        self.ledger.record(event, self.name, when=when)

    def agent_unconfined(self, text: str) -> None:
        """Record that an agent of this study can write outside its folder."""
        self.ledger.record(catalogue.AgentNotConfinedEvent(text=text), self.name)

    def say(self, text: str) -> None:
        """Record a message of a person to the agents."""
        with self.ledger.write():
            self.ledger.record(catalogue.SaidEvent(text=shorten(text)), self.name)

    def steered(self, what: str, *, who: str, where: str, run: str | None = None) -> None:
        """Record who did something on the live page, in the transaction of what they did."""
        self.ledger.record(catalogue.SteeredEvent(what=what, who=who, where=where), self.name, run)

    def command(self, what: str, *, run: str | None = None, why: str | None = None) -> None:
        now = time.time()
        why = None if why is None else redact_text(why)
        data = {key: value for key, value in (("run", run), ("why", why)) if value is not None}
        with self.ledger.write():
            self.ledger.execute(
                "INSERT INTO commands (study, at, what, data) VALUES (?,?,?,?)",
                (self.name, now, what, dump_json(data)),
            )
            self.ledger.record(catalogue.AskedEvent(what=what, why=why), self.name, run, when=now)

    def take_commands(self) -> list[tuple[str, dict[str, Any]]]:
        rows = self.ledger.rows("SELECT id, what, data FROM commands WHERE study=? AND done IS NULL", (self.name,))
        if rows:
            with self.ledger.write():
                self.ledger.execute(
                    "UPDATE commands SET done=? WHERE study=? AND done IS NULL", (time.time(), self.name)
                )
        return [(row["what"], load_own_json(row["data"])) for row in rows]
