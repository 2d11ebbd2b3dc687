"""Sums: of one call, over resumed sessions, and of a study."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.agents.account import Account, Allowance, Meter, minus, plus, priced
from looplab.agents.base import Answer, Limits, Summary, TokenPrice, Usage

counts = st.integers(0, 10**9)
dollars = st.none() | st.integers(0, 1000).map(lambda cents: cents / 100)


def account_of(answers: Iterable[Answer]) -> Account:
    account = Account()
    for one in answers:
        account = account.add(one.usage, ok=one.ok, seconds=one.seconds, attempts=one.attempts)
    return account


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    read = draw(counts)
    return Usage(read, draw(st.integers(0, read)), draw(counts), draw(dollars))


def total(usage: Usage) -> Usage:
    return replace(usage, scope="session")


def answer(usage: Usage, ok: bool = True) -> Answer:
    return Answer(ok, "", "" if ok else "failed", usage, None, Summary(), 1.5, 1, 0, Path("log"))


@given(usages(), usages())
def test_a_resumed_total_gives_back_what_the_call_cost(before: Usage, call: Usage) -> None:
    before = replace(before, usd=before.usd or 0.0)
    call = replace(call, usd=call.usd or 0.0)
    meter = Meter(total(before))
    meter.add(total(plus(before, call)))
    got = meter.usage
    assert (got.input_tokens, got.cached_input_tokens, got.output_tokens) == (
        call.input_tokens,
        call.cached_input_tokens,
        call.output_tokens,
    )
    assert got.usd == pytest.approx(call.usd)


@given(usages(), usages())
def test_no_difference_is_below_nothing(one: Usage, other: Usage) -> None:
    left = minus(one, other)
    assert 0 <= left.cached_input_tokens <= left.input_tokens
    assert left.tokens >= 0


def test_a_thread_of_three_calls_is_counted_once() -> None:
    before: Usage | None = None
    told = [
        Usage(100, 40, 10, scope="session"),
        Usage(200, 80, 20, scope="session"),
        Usage(300, 120, 30, scope="session"),
    ]
    spent = []
    for usage in told:
        meter = Meter(before)
        meter.add(usage)
        spent.append(meter.usage)
        before = meter.total
    assert spent == [Usage(100, 40, 10)] * 3


def test_a_version_that_counts_each_call_separately_is_noticed() -> None:
    meter = Meter(Usage(100, 40, 10, 0.5, "session"))
    meter.add(Usage(60, 0, 5, scope="call"))
    meter.add(Usage(110, 0, 12, 0.6, "session"))  # more than before, but too little for both calls
    assert meter.usage == Usage(110, 0, 12, 0.6)
    meter = Meter(Usage(100, 40, 10, 0.5, "session"))
    meter.add(Usage(70, 0, 3, 0.2, "session"))
    assert meter.usage == Usage(70, 0, 3, 0.2)


def test_dollars_alone_go_with_the_tokens_of_the_call() -> None:
    meter = Meter(Usage(usd=0.5, scope="session"))
    meter.add(Usage(60, 0, 5, scope="call"))
    meter.add(Usage(usd=0.7, scope="session"))
    assert meter.usage.usd == pytest.approx(0.2)
    assert meter.usage.tokens == 65


def test_a_message_that_is_told_with_each_of_its_blocks_counts_once() -> None:
    meter = Meter()
    for output in (1, 1, 8):
        meter.add(Usage(100, 40, output, scope="message", message="msg_1"))
    meter.add(Usage(200, 90, 2, scope="message", message="msg_2"))
    assert meter.usage == Usage(300, 130, 10)
    meter.add(Usage(310, 130, 20, scope="call"))
    assert meter.usage == Usage(310, 130, 20)


def test_what_stands_in_the_agents_file_from_earlier_calls_is_not_counted_again() -> None:
    meter = Meter(Usage(200, 0, 20, scope="session"))
    for old in (Usage(100, 0, 10, scope="session"), Usage(200, 0, 20, scope="session")):
        meter.add_live(old)
    assert meter.usage.tokens == 0
    meter.add_live(Usage(250, 0, 30, scope="session"))
    assert meter.usage.tokens == 60


def test_a_session_that_was_ended_before_it_told_anything_keeps_its_old_total() -> None:
    before = Usage(200, 0, 20, scope="session")
    assert Meter(before).total == before


def test_a_price_makes_dollars_where_none_are_told() -> None:
    price = TokenPrice(input=2.0, output=10.0, cached_input=0.5)
    assert priced(Usage(3_000_000, 1_000_000, 100_000), price).usd == pytest.approx(4.0 + 0.5 + 1.0)
    assert priced(Usage(3_000_000, 1_000_000, 0), TokenPrice(2.0, 10.0)).usd == pytest.approx(6.0)
    assert priced(Usage(1, usd=0.1), price).usd == 0.1
    assert priced(Usage(1), None).usd is None


def test_a_study_adds_up_and_says_what_it_does_not_know() -> None:
    account = account_of(
        [answer(Usage(100, 40, 10, 0.5)), answer(Usage(50, 0, 5), ok=False), answer(Usage(), ok=False)]
    )
    assert (account.calls, account.failed, account.tokens, account.usd) == (3, 2, 125, 0.5)
    assert account.unpriced == 1
    assert account.seconds == pytest.approx(4.5)


@given(st.lists(usages(), max_size=5))
def test_an_account_survives_json(spent: list[Usage]) -> None:
    account = account_of(answer(usage) for usage in spent)
    assert Account.from_dict(json.loads(json.dumps(account.to_dict()))) == account


def test_an_account_of_an_older_version_is_read() -> None:
    assert Account.from_dict({"calls": 2, "usd": 1.0, "forgotten": 9}) == Account(calls=2, usd=1.0)


def test_what_is_left_limits_the_next_call() -> None:
    account = account_of([answer(Usage(100, 40, 10, 1.5))])
    left = account.left(Allowance(tokens=100, usd=2.0, calls=5))
    assert left == Allowance(tokens=30, usd=0.5, calls=4)
    assert left.used_up is None
    assert left.within(Limits(tokens=50, usd=0.2)) == Limits(tokens=30, usd=0.2)
    assert left.within(Limits()) == Limits(tokens=30, usd=0.5)
    assert account.left(Allowance(usd=1.0)).used_up == "usd"
    assert account.left(Allowance()) == Allowance()
    assert Allowance().within(Limits()) == Limits()
