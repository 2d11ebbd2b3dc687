"""Writing the record of one study; reading is in `view.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from looplab.config.files import hash_config
from looplab.ledger import catalogue
from looplab.ledger.configuration import storable
from looplab.ledger.writers.proposals import ProposalWriter
from looplab.ledger.writers.rounds import RoundWriter
from looplab.ledger.writers.runs import RunWriter
from looplab.ledger.writers.sessions import SessionWriter
from looplab.ledger.writers.verdicts import VerdictWriter
from looplab.runs.redact import redact_data


class StudyLedger(RoundWriter, ProposalWriter, RunWriter, VerdictWriter, SessionWriter):
    """Reads and writes one study. Every change is an event in the chain, in the same transaction."""

    def open(self, objective: str | None, goal: str, at: str | None = None) -> int:
        """Record the study, and any change of its objective between engines.

        Values of another metric, or of another point of the curve, are not comparable: their runs count as not
        measured until they are measured again, and the judge starts over.

        Args:
            at: Where on the curve the objective is; None: as before.

        Returns:
            How many runs lost their objective.
        """
        now = time.time()
        lost = 0
        with self.ledger.write():
            row = self.ledger.one("SELECT objective, goal FROM studies WHERE name=?", (self.name,))
            if row is None:
                self.ledger.execute(
                    "INSERT INTO studies (name, created, objective, goal) VALUES (?,?,?,?)",
                    (self.name, now, objective, goal),
                )
                self.ledger.record(catalogue.StudyOpenedEvent(objective=objective, goal=goal), self.name, when=now)
                return 0
            moved = at is not None and self._recorded_at() not in (None, at)
            if (row["objective"], row["goal"]) == (objective, goal) and not moved:
                return 0
            self.ledger.execute("UPDATE studies SET objective=?, goal=? WHERE name=?", (objective, goal, self.name))
            if row["objective"] is None:  # rebuilt from folders, or a study that had no objective
                self.ledger.record(catalogue.StudyOpenedEvent(objective=objective, goal=goal), self.name)
                return 0
            cleared = row["objective"] != objective or moved
            if cleared:
                sql = "UPDATE runs SET objective=NULL, measured=NULL WHERE study=? AND objective IS NOT NULL"
                lost = self.ledger.execute(sql, (self.name,)).rowcount
            self.ledger.execute("UPDATE studies SET best=NULL WHERE name=?", (self.name,))
            event = catalogue.ObjectiveChangedEvent(objective=objective, goal=goal, cleared=cleared)
            self.ledger.record(event, self.name)
            if self.judge_state() is not None:
                self.restart_judge("the objective was changed")
        return lost

    def configure(self, body: Mapping[str, Any]) -> str:
        """Record the configuration that an engine starts with, if it is not the last one; return its hash."""
        kept = storable(redact_data(body))
        digest = hash_config(kept)
        with self.ledger.write():
            if digest != self.configuration():
                self.ledger.record(catalogue.StudyConfiguredEvent(hash=digest, configuration=kept), self.name)
        return digest

    def save_options(self, options: Mapping[str, Any]) -> None:
        """Keep the options of a call for `resume`, and record them if they differ from the last ones."""
        key = f"options:{self.name}"
        text = json.dumps(options)  # escaped: paths and arguments may be bytes that are not valid Unicode
        with self.ledger.write():
            before = self.ledger.one("SELECT value FROM meta WHERE key=?", (key,))
            if before is None or before["value"] != text:
                self.ledger.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, text))
                self.ledger.record(catalogue.OptionsEvent(text=text), self.name)
