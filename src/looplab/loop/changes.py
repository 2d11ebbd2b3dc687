"""Alarms about changes that make runs of a study incomparable: of the lab's code, and of the lab file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.ledger.catalogue import AlarmEvent
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.events import AlarmRaised
from looplab.loop.outbox import Outbox
from looplab.loop.prepare import Prepared, Preparer
from looplab.loop.setup import compared_changes
from looplab.runs import folder
from looplab.runs.code import code_differences, name_files

RECENT = 50
"""Recent runs that are searched for the code that ran last."""
MAX_NAMED = 100
"""Maximum number of changed files or keys in an event."""


class CodeMonitor:
    """Compares the code of each launched run with that of the run before."""

    def __init__(self, study: StudyLedger, outputs: Path, outbox: Outbox) -> None:
        self._study = study
        self._outputs = outputs
        self._outbox = outbox
        self._doubt: str | None = None  # why the code of the last run is unknown; reported once
        self._last: tuple[str, Mapping[str, Any]] | None = None  # the run launched last, and its code

    def launched(self, run: RunRow, prepared: Prepared) -> None:
        """Raise an alarm if the code changed, or is not known; inside the transaction."""
        if prepared.doubt is not None and prepared.doubt != self._doubt:
            self._outbox.tell(AlarmRaised(f"run {run.id}: {prepared.doubt}", run.id))
        self._doubt = prepared.doubt
        code = prepared.code
        if code is None:
            return
        was, old = self._last or self._last_code(run)
        self._last = (run.id, code)
        if old.get("files") == code.get("files"):
            return
        names = code_differences(self._outputs, old, code)
        if names:
            said = f"the code differs from that of run {was}: {name_files(names)}"
            text = f"run {run.id}: {said}. Results from before and after the change cannot be compared"
            self._study.alarm(run.id, AlarmEvent(text=text, since=was, code=names[:MAX_NAMED]))
            self._outbox.alarm(text, run.id)

    def started(self, run_id: str, prepared: Prepared | None, preparer: Preparer) -> None:
        """Raise an alarm if code that is not frozen changed while the run waited in a queue: its capsule has the code
        from before."""
        if prepared is None or prepared.code is None or "frozen" in prepared.code:
            return
        names = code_differences(self._outputs, prepared.code, preparer.current_code())
        if names:
            said = f"the code changed while it was queued: {name_files(names)}"
            text = f"run {run_id}: {said}. It runs the new code, but its capsule has the old code"
            self._study.alarm(run_id, AlarmEvent(text=text, code=names[:MAX_NAMED]))
            self._outbox.alarm(text, run_id)

    def _last_code(self, run: RunRow) -> tuple[str, Mapping[str, Any]]:
        """Return the run that was launched before this one, and the code in its capsule."""
        for one in reversed(self._study.runs(limit=RECENT)):
            if one.id != run.id and one.role not in (Role.IMPORTED, Role.REPRODUCTION) and one.slot is not None:
                return one.id, folder.read_capsule(self._outputs / one.id).get("code") or {}
        return "", {}


def alarm_if_reconfigured(study: StudyLedger, outbox: Outbox) -> None:
    """Raise an alarm if the lab file changed in a way that affects comparisons between runs."""
    keys = compared_changes(study.configurations()[-1].changes)
    if not keys:
        return
    text = f"lab.yaml differs from that of earlier runs: {name_files(keys)}. Verdicts before and after may differ"
    with study.ledger.write():
        study.alarm(None, AlarmEvent(text=text, lab_file=keys[:MAX_NAMED]))
    outbox.alarm(text)
