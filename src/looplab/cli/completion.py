"""Shell completion after `looplab show <Tab>`: runs and studies of the current lab."""

from __future__ import annotations

import contextlib

OFFERED = 30
"""Most runs that are offered, the newest."""


def complete_runs(incomplete: str) -> list[str]:
    """Return BEST, LATEST and the newest runs that begin like the word; nothing where there is no lab or no run yet."""
    names = ["BEST", "LATEST"]
    with contextlib.suppress(Exception):  # a shell that completes has no place for a message
        from looplab.cli.labs import open_context

        record = open_context(None, None, reading=True).record
        names += [run.id for run in reversed(record.runs())]
    return [name for name in names if name.lower().startswith(incomplete.lower())][:OFFERED]


def complete_studies(incomplete: str) -> list[str]:
    """Return the studies of the lab that begin like the word."""
    with contextlib.suppress(Exception):
        from looplab.cli.labs import open_lab

        return [name for name in open_lab(None).studies if name.startswith(incomplete)]
    return []
