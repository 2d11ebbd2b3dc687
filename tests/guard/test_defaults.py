"""Knobs whose key the config lacks, and edits that have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob

KNOBS: dict[str, dict[str, Any]] = {
    "ot.topk": {"type": "int", "low": 1, "high": 99, "default": 8},
    "ot.sampling.sharpness": {"type": "float", "low": 0, "high": 20, "default": 2},
    "ot.cutoff": {"choices": [None, 0.5], "default": None},
    "features.*.weight": {"type": "float", "low": 0, "high": 1, "default": 0.5},
    "lr": {"type": "float", "low": 0, "high": 1},
}
BASE: dict[str, Any] = {"ot": {"reg": 0.1}, "features": [{"name": "a"}, {"name": "b", "weight": 1.0}], "lr": 0.1}


def guard(derive: dict[str, str] | None = None, *constraints: str) -> Guard:
    return Guard({path: Knob.make(path, spec) for path, spec in KNOBS.items()}, (), derive, constraints)


@pytest.mark.parametrize(
    ("edit", "place", "value"),
    [
        ("ot.topk@mul=2", ("ot", "topk"), 16),
        ("ot.topk@add=-3", ("ot", "topk"), 5),
        ("ot.topk@set=3", ("ot", "topk"), 3),
        ("ot.sampling.sharpness@mul=1.5", ("ot", "sampling", "sharpness"), 3.0),
        ("ot.cutoff@set=0.5", ("ot", "cutoff"), 0.5),
        ("features.0.weight@mul=0.5", ("features", 0, "weight"), 0.25),
    ],
)
def test_an_edit_starts_from_the_default_of_a_key_that_the_config_lacks(edit: str, place: Any, value: Any) -> None:
    ruling = guard().check(BASE, [edit])
    config: Any = ruling.config
    for part in place:
        config = config[part]
    assert config == value
    assert type(config) is type(value)
    assert any("was not in the config" in note and "its default" in note for note in ruling.notes)


def test_only_what_was_changed_is_added() -> None:
    changed = guard().check(BASE, ["ot.topk@set=3"]).config
    assert changed == {**BASE, "ot": {"reg": 0.1, "topk": 3}}
    assert guard().admit(BASE).config == BASE


def test_to_set_the_default_changes_nothing() -> None:
    ruling = guard().check(BASE, ["ot.topk@set=8", "ot.sampling.sharpness@set=2"])
    assert ruling.config == BASE
    assert not ruling.changes
    assert "changes nothing" in ruling.ineffective


def test_an_empty_mapping_of_the_config_stays() -> None:
    config = {**BASE, "ot": {"reg": 0.1, "sampling": {}}}
    assert guard().check(config, ["lr@set=0.2"]).config == {**config, "lr": 0.2}


def test_constraints_and_derived_keys_read_defaults() -> None:
    ruled = guard({"ot.reg": "ot.topk / 10"}, "ot.topk < 20")
    assert ruled.admit(BASE).config["ot"] == {"reg": 0.8}
    assert ruled.check(BASE, ["ot.topk@set=30"]).problems[0].rule == "constraint"


def test_a_range_still_holds() -> None:
    (problem,) = guard().check(BASE, ["ot.topk@mul=100"]).problems
    assert "above 99" in problem.message


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"type": "int", "low": 1, "high": 9, "default": 10}, "above 9"),
        ({"type": "int", "default": None}, "null"),
        ({"choices": ["a"], "default": "b"}, "is not one of"),
        ({"default": [1]}, "not a single value"),
    ],
)
def test_an_illegal_default_is_a_mistake_in_the_lab_file(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(LabError, match="default") as raised:
        Knob.make("x", spec)
    assert why in str(raised.value)


def test_an_edit_of_a_derived_key_names_the_derivation() -> None:
    ruling = guard({"ot.reg": "lr * 2"}).check({**BASE, "ot": {"reg": 0.2}}, ["ot.reg@set=5"])
    assert ruling.ineffective == ("ot.reg is derived: 5 → 0.2: lr * 2", "changes nothing")


def test_the_inputs_of_a_refusal_include_those_of_derived_keys() -> None:
    ruled = guard({"ot.reg": "ot.topk * lr"}, "ot.reg < 0.9")
    (problem,) = ruled.check(BASE, ["ot.topk@set=90"]).problems
    assert ruled.inputs(problem) >= {"ot.reg", "ot.topk", "lr"}
