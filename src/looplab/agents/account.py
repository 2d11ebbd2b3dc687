"""Cost of agents: of one call, from its stream (`Meter`), and of a study (`Account`).

If an agent's report is ambiguous, the account may be too high, never too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from looplab.agents.base import Limits, TokenPrice, Usage
from looplab.agents.log import read_usage
from looplab.ledger.view import StudyView


def plus(one: Usage, other: Usage) -> Usage:
    """Return the sum; unknown dollars are not counted."""
    known = [usd for usd in (one.usd, other.usd) if usd is not None]
    return Usage(
        one.input_tokens + other.input_tokens,
        one.cached_input_tokens + other.cached_input_tokens,
        one.output_tokens + other.output_tokens,
        sum(known) if known else None,
    )


def minus(total: Usage, before: Usage) -> Usage:
    """Return the difference, never negative."""
    read = max(0, total.input_tokens - before.input_tokens)
    usd = total.usd
    if usd is not None and before.usd is not None:
        usd = max(0.0, usd - before.usd)
    cached = max(0, total.cached_input_tokens - before.cached_input_tokens)
    return Usage(read, min(read, cached), max(0, total.output_tokens - before.output_tokens), usd)


def contains(total: Usage, part: Usage) -> bool:
    """Return whether a total is large enough to include a part."""
    return (
        total.input_tokens >= part.input_tokens
        and total.output_tokens >= part.output_tokens
        and (total.usd is None or part.usd is None or total.usd >= part.usd - 1e-9)
    )


def of_this_call(reported: Usage, before: Usage | None, call: Usage | None) -> Usage:
    """Return the usage of this call from the total that an agent reported.

    A total of the session includes all earlier calls and this one. If it is too small for that, it is the total of this
    call alone: versions of agents differ.
    """
    if before is None:
        return replace(reported, scope="call")
    least = before if call is None or not reported.input_tokens else replace(plus(before, call), usd=before.usd)
    return minus(reported, before) if contains(reported, least) else replace(reported, scope="call")


def priced(usage: Usage, price: TokenPrice | None) -> Usage:
    """Add dollars if the agent reports none and a price is known."""
    if usage.usd is not None or price is None:
        return usage
    cached_price = price.input if price.cached_input is None else price.cached_input
    fresh = usage.input_tokens - usage.cached_input_tokens
    micro = fresh * price.input + usage.cached_input_tokens * cached_price + usage.output_tokens * price.output
    return replace(usage, usd=micro / 1e6)


class Meter:
    """Usage of one call, from the reports in its stream."""

    def __init__(self, before: Usage | None = None) -> None:
        self.before = before
        self.session_total: Usage | None = None
        """Latest total of the session."""
        self._call: Usage | None = None
        self._messages: dict[str, Usage] = {}

    def add(self, usage: Usage) -> None:
        """Take a report of the stream into account."""
        if usage.scope == "session":
            self.session_total = usage
        elif usage.scope == "call":
            self._call = usage
        else:  # reported again, and growing, with every block of the message
            old = self._messages.get(usage.message)
            if old is None or usage.tokens >= old.tokens:
                self._messages[usage.message] = usage

    def add_live(self, usage: Usage) -> None:
        """Count a report from the agent's own file, which also contains reports of earlier calls."""
        if self.before is None or contains(usage, self.before):
            self.add(usage)

    @property
    def total(self) -> Usage | None:
        """Reported total of the session, for its next call."""
        return self.session_total or self.before

    @property
    def usage(self) -> Usage:
        """Usage of this call."""
        if self.session_total is not None:
            mine = of_this_call(self.session_total, self.before, self._call)
            if self._call is not None and not self.session_total.input_tokens:  # dollars only
                return replace(self._call, usd=mine.usd)
            return mine
        if self._call is not None:
            return self._call
        total = Usage()
        for usage in self._messages.values():
            total = plus(total, usage)
        return total


@dataclass(frozen=True, slots=True)
class Allowance:
    """Budget of all agents together; None: no limit."""

    tokens: int | None = None
    usd: float | None = None
    calls: int | None = None

    @property
    def used_up(self) -> str | None:
        """Name of a budget that is used up; None if there is none."""
        return next((f.name for f in fields(self) if (left := getattr(self, f.name)) is not None and left <= 0), None)

    def within(self, limits: Limits) -> Limits:
        """Return the limits of one call, reduced to this budget."""
        tokens = [n for n in (limits.tokens, self.tokens) if n is not None]
        usd = [n for n in (limits.usd, self.usd) if n is not None]
        return replace(limits, tokens=min(tokens, default=None), usd=min(usd, default=None))


@dataclass(frozen=True, slots=True)
class Account:
    """Sum of all calls of a study."""

    calls: int = 0
    failed: int = 0
    attempts: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0
    unpriced: int = 0
    """Calls with tokens but without dollars; `usd` does not include them."""
    seconds: float = 0.0

    def add(self, usage: Usage, *, ok: bool, seconds: float, attempts: int) -> Account:
        """Return the account with one more call."""
        return Account(
            self.calls + 1,
            self.failed + (not ok),
            self.attempts + attempts,
            self.input_tokens + usage.input_tokens,
            self.cached_input_tokens + usage.cached_input_tokens,
            self.output_tokens + usage.output_tokens,
            self.usd + (usage.usd or 0.0),
            self.unpriced + (usage.usd is None and bool(usage.input_tokens or usage.output_tokens)),
            self.seconds + seconds,
        )

    @property
    def tokens(self) -> int:
        return self.input_tokens - self.cached_input_tokens + self.output_tokens

    def left(self, limit: Allowance) -> Allowance:
        """Return what is left of a budget."""
        return Allowance(
            None if limit.tokens is None else max(0, limit.tokens - self.tokens),
            None if limit.usd is None else max(0.0, limit.usd - self.usd),
            None if limit.calls is None else max(0, limit.calls - self.calls),
        )

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Account:
        """Read an account, possibly written by an older version with fewer fields."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known)


def account_of(study: StudyView) -> Account:
    """Return what agents have cost in this study."""
    account = Account()
    for call in study.agent_calls():
        answer = call["answer"]
        if answer is not None:
            account = account.add(
                read_usage(answer["usage"]), ok=answer["ok"], seconds=answer.get("seconds", 0.0),
                attempts=answer.get("attempts", 1),
            )  # fmt: skip
    return account
