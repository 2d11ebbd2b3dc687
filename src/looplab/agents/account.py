"""What agents cost: of one call, as the agent tells it (`Meter`), and of a whole study (`Account`).

An account may say too much where an agent is unclear, never too little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from looplab.agents.base import Answer, Limits, TokenPrice, Usage


def plus(one: Usage, other: Usage) -> Usage:
    """The sum; dollars that are not known are not counted."""
    known = [usd for usd in (one.usd, other.usd) if usd is not None]
    return Usage(
        one.input_tokens + other.input_tokens,
        one.cached_input_tokens + other.cached_input_tokens,
        one.output_tokens + other.output_tokens,
        sum(known) if known else None,
    )


def minus(total: Usage, before: Usage) -> Usage:
    read = max(0, total.input_tokens - before.input_tokens)
    usd = total.usd
    if usd is not None and before.usd is not None:
        usd = max(0.0, usd - before.usd)
    cached = max(0, total.cached_input_tokens - before.cached_input_tokens)
    return Usage(read, min(read, cached), max(0, total.output_tokens - before.output_tokens), usd)


def contains(total: Usage, part: Usage) -> bool:
    return (
        total.input_tokens >= part.input_tokens
        and total.output_tokens >= part.output_tokens
        and (total.usd is None or part.usd is None or total.usd >= part.usd - 1e-9)
    )


def of_this_call(told: Usage, before: Usage | None, call: Usage | None) -> Usage:
    """What a total that an agent told means for this call.

    A total of the session contains all that was before, and this call on top. One that is too small for that is a
    total of this call alone: versions differ, and some say it anew in each call.
    """
    if before is None:
        return replace(told, scope="call")
    least = before if call is None or not told.input_tokens else replace(plus(before, call), usd=before.usd)
    return minus(told, before) if contains(told, least) else replace(told, scope="call")


def priced(usage: Usage, price: TokenPrice | None) -> Usage:
    """With dollars, where the agent tells none and a price is known."""
    if usage.usd is not None or price is None:
        return usage
    cached_price = price.input if price.cached_input is None else price.cached_input
    fresh = usage.input_tokens - usage.cached_input_tokens
    micro = fresh * price.input + usage.cached_input_tokens * cached_price + usage.output_tokens * price.output
    return replace(usage, usd=micro / 1e6)


class Meter:
    """The usage of one call, from what its stream tells."""

    def __init__(self, before: Usage | None = None) -> None:
        self.before = before
        self.told: Usage | None = None
        """The newest total of the session."""
        self._call: Usage | None = None
        self._messages: dict[str, Usage] = {}

    def add(self, usage: Usage) -> None:
        if usage.scope == "session":
            self.told = usage
        elif usage.scope == "call":
            self._call = usage
        else:  # told again with every block of the message, and growing
            old = self._messages.get(usage.message)
            if old is None or usage.tokens >= old.tokens:
                self._messages[usage.message] = usage

    def add_live(self, usage: Usage) -> None:
        """From the agent's own file, which also holds what was before this call."""
        if self.before is None or contains(usage, self.before):
            self.add(usage)

    @property
    def total(self) -> Usage | None:
        """What the session has cost, as far as it was told: to be handed to the next call of the session."""
        return self.told or self.before

    @property
    def usage(self) -> Usage:
        if self.told is not None:
            mine = of_this_call(self.told, self.before, self._call)
            if self._call is not None and not self.told.input_tokens:  # dollars only
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
    """What agents may cost together; None: no limit."""

    tokens: int | None = None
    usd: float | None = None
    calls: int | None = None

    @property
    def used_up(self) -> str | None:
        """Which of them is used up, if one is."""
        return next((f.name for f in fields(self) if (left := getattr(self, f.name)) is not None and left <= 0), None)

    def within(self, limits: Limits) -> Limits:
        """The limits of one call, so that it cannot take more than this."""
        tokens = [n for n in (limits.tokens, self.tokens) if n is not None]
        usd = [n for n in (limits.usd, self.usd) if n is not None]
        return replace(limits, tokens=min(tokens, default=None), usd=min(usd, default=None))


@dataclass(frozen=True, slots=True)
class Account:
    """The sum of all calls of a study. Made of plain numbers: `to_dict` and `from_dict` lose nothing."""

    calls: int = 0
    failed: int = 0
    attempts: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0
    unpriced: int = 0
    """Calls that used tokens and told no dollars: `usd` is too small by them."""
    seconds: float = 0.0

    def add(self, answer: Answer) -> Account:
        usage = answer.usage
        return Account(
            self.calls + 1,
            self.failed + (not answer.ok),
            self.attempts + answer.attempts,
            self.input_tokens + usage.input_tokens,
            self.cached_input_tokens + usage.cached_input_tokens,
            self.output_tokens + usage.output_tokens,
            self.usd + (usage.usd or 0.0),
            self.unpriced + (usage.usd is None and bool(usage.input_tokens or usage.output_tokens)),
            self.seconds + answer.seconds,
        )

    @property
    def tokens(self) -> int:
        return self.input_tokens - self.cached_input_tokens + self.output_tokens

    def left(self, limit: Allowance) -> Allowance:
        return Allowance(
            None if limit.tokens is None else max(0, limit.tokens - self.tokens),
            None if limit.usd is None else max(0.0, limit.usd - self.usd),
            None if limit.calls is None else max(0, limit.calls - self.calls),
        )

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Account:
        """From what was written, possibly by an older version that knew fewer numbers."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known)


def account_of(answers: Iterable[Answer]) -> Account:
    account = Account()
    for answer in answers:
        account = account.add(answer)
    return account
