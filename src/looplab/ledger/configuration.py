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
from looplab.runs.clock import format_seconds
from looplab.untrusted import dump_json, load_own_json

MAX_SHOWN = 6
"""Changes that are listed before the rest is only counted."""

COUNTED = {"rounds": "options.rounds", "runs": "options.runs"}
"""Limits of the budget that an option of a call may replace, with its key in the configuration."""


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
    budget: tuple[str, ...] = ()
    """Changes of the budget: `rounds 3 → 4, by --rounds`. They change how long a study runs, not its rules."""

    @property
    def is_budget_only(self) -> bool:
        """Whether nothing but the budget was changed."""
        return bool(self.changes) and not self._rules

    @property
    def _rules(self) -> list[str]:
        """The changed keys that are not of the budget."""
        return [key for key in self.changes if not _is_budget(key)]

    def describe(self) -> str:
        """Return the changes in one line: `judge.alpha 0.05 → 0.4; budget: rounds 3 → 4, by --rounds`."""
        shown = self._rules[:MAX_SHOWN]
        named = ", ".join(
            f"{key.removeprefix('study.')} {_short(self.changes[key].get('old'))} → "
            f"{_short(self.changes[key].get('new'))}"
            for key in shown
        )
        rest = len(self._rules) - len(shown)
        named += f" and {rest} more" if rest else ""
        budget = f"budget: {', '.join(self.budget)}" if self.budget else ""
        return "; ".join(filter(None, (named, budget)))

    def sentence(self, when: str) -> str:
        """Return that, and when, the configuration was changed; a change of the budget alone reads as one.

        Args:
            when: `at 12:00`, `at event 7`.
        """
        changes = self.describe()
        return f"{changes} ({when})" if self.is_budget_only else f"the configuration was changed {when}: {changes}"


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
            budget = tuple(_budget_changes(found[-1].body, body)) if found else ()
            found.append(Configuration(event.seq, event.at, event.data["hash"], body, changes, budget))
    return found


def _is_budget(key: str) -> bool:
    return key.startswith("study.budget.") or key in COUNTED.values()


def _budget_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield the limits that differ, each with what set it: an option of the call, or else the lab file."""
    sides = [_limits(old), _limits(new)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        (before, _), (after, source) = (side.get(name, (None, "lab.yaml")) for side in sides)
        if sides[0].get(name) != sides[1].get(name):
            shown = [_show_limit(name, limit) for limit in (before, after)]
            limit = shown[1] if before == after else " → ".join(shown)
            yield f"{name.replace('_', ' ')} {limit}, by {source}"


def _limits(body: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the limits of a configuration, each with what set it."""
    options = body.get("options") or {}
    limits = {name: (value, "lab.yaml") for name, value in ((body.get("study") or {}).get("budget") or {}).items()}
    given = {name: (options[name], f"--{name}") for name in COUNTED if options.get(name) is not None}
    return {**limits, **given}


def _show_limit(name: str, limit: Any) -> str:
    if limit is None:
        return "unlimited"
    return format_seconds(limit) if name == "wall" and isinstance(limit, int | float) else _short(limit)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:39] + "…"
