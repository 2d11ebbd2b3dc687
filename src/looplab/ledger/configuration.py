"""The resolved configuration of a study, recorded whenever an engine starts with a different one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from looplab.config.paths import diff
from looplab.config.renamed import rename_keys
from looplab.ledger.catalogue import StudyConfiguredEvent
from looplab.ledger.ledger import Event
from looplab.untrusted import dump_json, load_own_json

MAX_SHOWN = 6
"""Changes that are listed before the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration of a study and how it differs from the previous one."""

    seq: int
    """Number of the event."""
    at: float
    hash: str
    body: dict[str, Any]
    changes: dict[str, dict[str, Any]]
    """Dotted key → `old`, `new` or both. Empty for the first configuration."""

    def describe(self) -> str:
        """Return the changes in one line: `judge.alpha 0.05 → 0.4`."""
        named = [
            f"{key.removeprefix('study.')} {_short(change.get('old'))} → {_short(change.get('new'))}"
            for key, change in list(self.changes.items())[:MAX_SHOWN]
        ]
        rest = len(self.changes) - MAX_SHOWN
        return ", ".join(named) + (f" and {rest} more" if rest > 0 else "")


def storable(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body as the chain will return it: plain JSON types."""
    plain: dict[str, Any] = load_own_json(dump_json(dict(body)))
    return plain


def configurations(events: Iterator[Event]) -> list[Configuration]:
    """Return the configurations of one study, oldest first, from its events."""
    found: list[Configuration] = []
    for event in events:
        if event.kind == StudyConfiguredEvent.kind:
            body = event.data["configuration"]
            if "study" in body:
                body = {**body, "study": rename_keys(body["study"])[0]}
            changes = diff(found[-1].body, body) if found else {}
            found.append(Configuration(event.seq, event.at, event.data["hash"], body, changes))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:39] + "…"
