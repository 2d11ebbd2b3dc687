"""The pipelines of a lab as its ledger knows them, for `status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from looplab.ledger.ledger import Ledger
from looplab.ledger.pipelines import Facts, latest_stages, read_rows

UNFINISHED = "unfinished"
"""State of something that started, has no recorded end, and is not running: the same command continues it."""


def pipelines_of(ledger: Ledger, lab: Path, study: str | None = None) -> tuple[list[Facts], list[Facts]]:
    """Return the run folders with their stages, and the suites, in the order in which they were used last.

    Args:
        ledger: The ledger.
        lab: The lab.
        study: A study; None: all.
    """
    rows = read_rows(ledger)
    runs: list[Facts] = []
    running: set[str] = set()  # ids of runs with a running stage
    for folder, stages in latest_stages(rows).items():
        place = lab / folder
        is_live = any(row["state"] == "running" for row in stages.values()) and _is_running(place)
        if is_live:
            running.add(place.name)
        shown: list[dict[str, Any]] = []
        for row in stages.values():
            facts = row if is_live else _without_running(row)
            shown.append({key: value for key, value in facts.items() if key not in ("study", "folder")})
        runs.append({"study": next(iter(stages.values()))["study"], "folder": folder, "stages": shown})
    suites = [
        {**(row if row["id"] in running else _without_running(row)), "jobs": json.loads(row["jobs"])}
        for row in rows["suites"].values()
    ]
    return [one for one in runs if study in (None, one["study"])], [s for s in suites if study in (None, s["study"])]


def _is_running(place: Path) -> bool:
    from looplab.launch.local import is_running  # slow to import, and rarely needed

    return is_running(place, place)


def _without_running(row: Facts) -> Facts:
    return {**row, "state": UNFINISHED} if row["state"] == "running" else row
