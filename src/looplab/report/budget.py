"""The budget of a study: how much of it is used, and when it ends at the pace so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from looplab.agents.account import account_of
from looplab.config.lab import StudyConfig
from looplab.ledger.view import StudyView
from looplab.report import wording
from looplab.report.language import t
from looplab.runs.clock import format_seconds


@dataclass(frozen=True, slots=True)
class BudgetFacts:
    """Usage of one budget."""

    name: str
    used: float
    limit: float | None
    shown: str
    """Usage and limit as text."""
    left_s: float | None
    """Seconds of a running engine until it is used up at the pace so far; None: no limit, or no pace yet."""

    @property
    def left(self) -> str:
        """`about 2h07m left`; empty if that is unknown."""
        return "" if self.left_s is None else t("about {time} left", time=format_seconds(self.left_s))


def budget_facts(study: StudyConfig, record: StudyView) -> tuple[BudgetFacts, ...]:
    """Return the usage of each budget as the engine counts it, including submitted commands and agents.

    Limits of rounds and runs from the command line replace the budget's, and are about this study alone.
    """
    used, limits, agents = record.shared_usage(), study.budget, account_of(record)
    options = record.configured_options() or {}
    saved = _saved_options(record)

    def limit_of(name: str, since: str) -> int | None:
        given = options.get(name)
        # A call with configs of its own counts from its start.
        counted_from = saved.get(since) or 0 if given is not None and saved.get(name) == given else 0
        limit: int | None = getattr(limits, name) if given is None else given + counted_from
        return limit

    rounds, runs = limit_of("rounds", "since_round"), limit_of("runs", "since_run")
    submitted = used.runs - record.usage().runs if options.get("runs") else 0

    def one(name: str, spent: float, limit: float | None, show: Callable[[Any], str]) -> BudgetFacts:
        shown, left = show(spent), None
        if limit is not None:  # an earlier call, or `reproduce`, may have been allowed more
            shown += f" (budget {show(limit)})" if spent > limit else f" of {show(limit)}"
            left = (limit - spent) * used.wall / spent if 0 < spent < limit and used.wall > 0 else None
        return BudgetFacts(name, spent, limit, shown, left)

    parts = [
        one("rounds", used.rounds, rounds, lambda n: f"{n:g}"),
        one("runs", used.runs - submitted, runs, lambda n: f"{n:g}"),
        one("wall clock", used.wall, limits.wall, format_seconds),
        one("device hours", used.device_hours, limits.device_hours, lambda n: f"{n:.3g}"),
    ]
    if submitted:
        parts[1] = replace(parts[1], shown=f"{parts[1].shown} (and {submitted} submitted)")
    if agents.calls or limits.tokens is not None:
        parts.append(one("agents' tokens", agents.tokens, limits.tokens, lambda n: f"{n:,}"))
    if agents.calls or limits.usd is not None:
        unpriced = f" (and {wording.plural(agents.unpriced, 'call')} without a price)" if agents.unpriced else ""
        dollars = one("agents' cost", agents.usd, limits.usd, lambda n: f"${n:.2f}")
        parts.append(replace(dollars, shown=dollars.shown + unpriced))
    return tuple(parts)


def _saved_options(record: StudyView) -> Mapping[str, Any]:
    """Return the options of the last call; empty if there are none, or they cannot be read."""
    try:
        saved = record.saved_options()
    except ValueError:
        return {}
    return saved if isinstance(saved, dict) else {}
