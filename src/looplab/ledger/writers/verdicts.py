"""Writing verdicts and the judge's state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from looplab.ledger import catalogue
from looplab.ledger.replay import hash_text
from looplab.ledger.view import StudyView
from looplab.runs.redact import redact_data, redact_text
from looplab.untrusted import dump_json


class VerdictWriter(StudyView):
    """Records what the judge decided."""

    def set_judge_state(self, judge_state: Mapping[str, Any]) -> None:
        """Store the judge's state; the conditions that it belongs to, and its states under others, stay."""
        before = self.judge_state() or {}
        text = dump_json({**{key: before[key] for key in ("conditions", "others") if key in before}, **judge_state})
        self.ledger.execute("UPDATE studies SET judge_state=? WHERE name=?", (text, self.name))
        self.ledger.record(catalogue.JudgeStateEvent(hash=hash_text(text)), self.name)

    def restart_judge(self, why: str) -> None:
        """Take back all verdicts but those of people; their events stay in the chain."""
        self.ledger.execute("UPDATE studies SET judge_state=NULL, best=NULL WHERE name=?", (self.name,))
        self.ledger.execute("UPDATE runs SET verdict=NULL WHERE study=? AND verdict!='void'", (self.name,))
        self.ledger.execute("DELETE FROM verdicts WHERE study=? AND verdict!='void'", (self.name,))
        self.ledger.record(catalogue.JudgeRestartedEvent(why=why), self.name)

    def judged(self, run: str, verdict: str, evidence: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Record a verdict on a run with its evidence, and the files of the run that contain it."""
        text, now = dump_json(evidence), time.time()
        if redact_text(text) != text:
            evidence = redact_data(dict(evidence))
            text = dump_json(evidence)
        self.ledger.execute("UPDATE runs SET verdict=? WHERE study=? AND id=?", (verdict, self.name, run))
        self.ledger.execute("INSERT INTO verdicts VALUES (?,?,?,?,?)", (self.name, run, now, verdict, text))
        event = catalogue.JudgedEvent(verdict=verdict, evidence=dict(evidence), files=dict(files))
        self.ledger.record(event, self.name, run, when=now)

    def watched(self, run: str, rule: str, text: str, stops: bool) -> None:
        """Record that a watch rule fired on a running run."""
        self.ledger.record(catalogue.WatchedEvent(rule=rule, text=text, stops=stops), self.name, run)

    def ask_held_out(self, champion: str, challenger: str, n: int, text: str) -> None:
        self.ledger.record(catalogue.HeldOutReadEvent(against=champion, n=n, text=text), self.name, challenger)
