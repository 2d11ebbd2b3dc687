"""Knobs that the trainer uses only under a condition."""

from __future__ import annotations

from typing import Any

import pytest

from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob

BASE: dict[str, Any] = {"opt": {"name": "adam", "momentum": 0.9}, "lr": 0.1}


def make_guard(condition: str = "opt.name == 'sgd'") -> Guard:
    knobs: dict[str, dict[str, Any]] = {
        "opt.name": {"choices": ["adam", "sgd"]},
        "opt.momentum": {"type": "float", "low": 0, "high": 1, "if": condition},
    }
    return Guard({path: Knob.make(path, spec) for path, spec in knobs.items()})


def test_an_edit_of_a_knob_that_is_not_used_is_rejected_with_the_reason() -> None:
    (problem,) = make_guard().check(BASE, ["opt.momentum@set=0.5"]).problems
    assert (problem.key, problem.rule, problem.nearest) == ("opt.momentum", "not used", 0.9)
    assert problem.message == (
        "opt.momentum is not used here, only if opt.name == 'sgd': opt.name='adam'; leave it as it is"
    )


def test_the_edit_that_makes_a_knob_used_may_come_with_it() -> None:
    ruling = make_guard().check(BASE, ["opt.momentum@set=0.5", "opt.name@set=sgd"])
    assert ruling.config == {"opt": {"name": "sgd", "momentum": 0.5}, "lr": 0.1}


def test_a_value_that_is_not_used_stays_where_it_is() -> None:
    sgd = {"opt": {"name": "sgd", "momentum": 0.5}, "lr": 0.1}
    assert make_guard().check(sgd, ["opt.name@set=adam"]).config == {
        "opt": {"name": "adam", "momentum": 0.5},
        "lr": 0.1,
    }
    assert make_guard().admit(BASE).config == BASE


def test_a_condition_that_cannot_be_evaluated_is_reported_with_the_base() -> None:
    (problem,) = make_guard("optimizer == 'sgd'").admit(BASE).problems
    assert "optimizer is missing in the config" in problem.message
    with pytest.raises(LabError, match=r"knob opt\.momentum: if"):
        make_guard("opt.name ==")


def test_where_it_is_used_is_part_of_its_description() -> None:
    assert make_guard().knobs["opt.momentum"].describe() == "float, 0 … 1, only if opt.name == 'sgd'"
