"""The guard's rules, each alone: wildcards, computed keys, constraints, and what they say when they fail."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.config import paths
from looplab.config.edits import Edit, Op
from looplab.errors import LabError
from looplab.guard import Guard, Knob

OT: dict[str, Any] = {
    "ot": {
        "lambda_ot": 0.1,
        "window_size": 10,
        "loss_config": {
            "reg": 0.1,
            "features": [
                {"name": "img_side", "use_learned_embed": True, "weight_embed": 0.01, "weight_label": 0.0},
                {"name": "action", "use_learned_embed": False, "weight_embed": 0.0, "weight_label": 5e-4},
            ],
        },
    },
    "policy": {"optimizer_lr": 1e-5},
    "warmup": None,
}
NO_DEAD_FEATURE = "all(f.use_learned_embed or f.weight_label > 0 for f in ot.loss_config.features)"


def guard(
    knobs: dict[str, dict[str, Any]],
    normalise: list[tuple[str, str]] | None = None,
    derive: dict[str, str] | None = None,
    constraints: list[str] | None = None,
) -> Guard:
    made = {path: Knob.make(path, spec) for path, spec in knobs.items()}
    return Guard(made, normalise or [], derive or {}, constraints or [])


OT_GUARD = guard(
    {
        "ot.loss_config.features.*.weight_label": {"type": "float", "low": 0, "high": 1},
        "ot.loss_config.features.1.weight_label": {"type": "float", "low": 0, "high": 0.01},
        "ot.loss_config.features.*.use_learned_embed": {"type": "bool"},
        "ot.loss_config.reg": {"type": "float", "low": 1e-3, "high": 10, "log": True},
        "ot.window_size": {"type": "int", "low": 1, "high": 40},
        "warmup": {"type": "int", "low": 0, "high": 100},
    },
    constraints=[NO_DEAD_FEATURE],
)


def test_a_wildcard_knob_covers_every_item_of_a_list() -> None:
    ruling = OT_GUARD.check(OT, ["ot.loss_config.features.*.weight_label@add=0.001"])
    features = ruling.config["ot"]["loss_config"]["features"]
    assert [feature["weight_label"] for feature in features] == [0.001, 0.0015]
    assert OT_GUARD.knob_values(OT) == {
        "ot.loss_config.features.0.weight_label": 0.0,
        "ot.loss_config.features.1.weight_label": 5e-4,
        "ot.loss_config.features.0.use_learned_embed": True,
        "ot.loss_config.features.1.use_learned_embed": False,
        "ot.loss_config.reg": 0.1,
        "ot.window_size": 10,
        "warmup": None,
    }


def test_a_plain_knob_goes_before_a_wildcard_one() -> None:
    ruling = OT_GUARD.check(OT, ["ot.loss_config.features.*.weight_label@set=0.5"])
    (problem,) = ruling.problems
    assert (problem.key, problem.nearest) == ("ot.loss_config.features.1.weight_label", 0.01)


def test_a_feature_with_both_costs_off_is_rejected_by_the_constraint() -> None:
    (problem,) = OT_GUARD.check(OT, ["ot.loss_config.features.1.weight_label@set=0"]).problems
    assert (problem.rule, problem.key) == ("constraint", NO_DEAD_FEATURE)
    assert problem.message.startswith(f"{NO_DEAD_FEATURE} is false: ot.loss_config.features=")
    assert OT_GUARD.check(OT, ["ot.loss_config.features.0.weight_label@set=0"]).ok


def test_a_key_inside_an_item_that_is_not_a_knob_names_the_wildcard_near_it() -> None:
    (problem,) = OT_GUARD.check(OT, ["ot.loss_config.features.1.weight_embed@set=0.5"]).problems
    assert problem.rule == "not a knob"
    assert "ot.loss_config.features.*.weight_label" in problem.message


def test_an_item_of_a_list_cannot_come_or_go_by_the_way() -> None:
    for edit in ["ot.loss_config.features.0@del", 'ot.loss_config.features@append={"name":"ee"}', "ot@del"]:
        ruling = OT_GUARD.check(OT, [edit])
        assert "not a knob" in {problem.rule for problem in ruling.problems}
        assert ruling.config is None


def test_a_knob_on_a_whole_list_is_checked_as_a_whole() -> None:
    nets = guard({"net.hidden": {"choices": [[64, 64], [256, 256]]}})
    config = {"net": {"hidden": [64, 64], "bias": True}}
    assert nets.check(config, ["net.hidden@set=[256,256]"]).config["net"]["hidden"] == [256, 256]
    for edit in ["net.hidden@set=[64,65]", "net.hidden.0@set=128", "net.hidden.0@del", "net.hidden@append=3"]:
        (problem,) = nets.check(config, [edit]).problems
        assert (problem.key, problem.rule, problem.nearest) == ("net.hidden", "knob range", [64, 64])
    assert nets.knob_values(config) == {"net.hidden": [64, 64]}


def test_a_free_knob_on_items_lets_them_come_and_go() -> None:
    free = guard({"ot.loss_config.features.*": {}})
    ruling = free.check(OT, ["ot.loss_config.features.0@del"])
    assert len(ruling.config["ot"]["loss_config"]["features"]) == 1
    added = free.check(OT, ['ot.loss_config.features@append={"name":"ee"}'])
    assert added.config["ot"]["loss_config"]["features"][2] == {"name": "ee"}


def test_a_null_in_the_config_is_not_set_and_left_alone_but_no_edit_may_set_one() -> None:
    assert OT_GUARD.admit(OT).ok
    assert OT_GUARD.check(OT, ["warmup@set=5"]).config["warmup"] == 5
    (problem,) = OT_GUARD.check(OT, ["ot.window_size@set=null"]).problems
    assert (problem.key, problem.rule) == ("ot.window_size", "knob range")
    optional = guard({"warmup": {"choices": [None, 5, "auto"]}})
    assert optional.check(OT, ["warmup@set=auto"]).config["warmup"] == "auto"
    assert optional.check({"warmup": 5}, ["warmup@set=auto"]).config["warmup"] == "auto"
    assert optional.check({"warmup": 5}, ["warmup@set=null"]).config["warmup"] is None


def test_a_knob_may_be_taken_out_only_where_null_is_legal() -> None:
    (problem,) = OT_GUARD.check(OT, ["ot.window_size@del"]).problems
    assert (problem.key, problem.rule, problem.nearest) == ("ot.window_size", "knob range", 10)
    assert "may not be removed" in problem.message
    ruling = guard({"warmup": {"choices": [None, 5]}}).check({"warmup": 5, "a": 1}, ["warmup@del"])
    assert ruling.config == {"a": 1}
    assert [(change.path, change.removed) for change in ruling.changes] == [("warmup", True)]


def test_a_knob_that_is_not_in_the_config_can_be_added() -> None:
    ruling = guard({"opt.betas.b1": {"type": "float", "low": 0, "high": 1}}).check({"opt": {}}, ["opt.betas.b1@new=0"])
    assert ruling.config == {"opt": {"betas": {"b1": 0.0}}}
    assert type(ruling.config["opt"]["betas"]["b1"]) is float
    filled = guard({"opt.b1": {"type": "float", "low": 0, "high": 1}}).check({"opt": None}, ["opt.b1@new=0.5"])
    assert filled.config == {"opt": {"b1": 0.5}}


def test_without_a_type_a_knob_keeps_the_type_of_the_config() -> None:
    free = guard({"n": {"low": 0, "high": 100}, "x": {"low": 0, "high": 100}})
    config = {"n": 3, "x": 3.0}
    ruling = free.check(config, ["n@mul=1.5", "x@set=4"])
    assert ruling.config == {"n": 5, "x": 4.0}
    assert (type(ruling.config["n"]), type(ruling.config["x"])) == (int, float)
    assert not free.check(config, ["n@set=0.5"]).ok


def test_a_knob_that_was_out_of_range_already_is_a_problem_too() -> None:
    parent = copy.deepcopy(OT)
    parent["ot"]["window_size"] = 99
    (problem,) = OT_GUARD.check(parent, ["ot.loss_config.reg@mul=2"]).problems
    assert problem.key == "ot.window_size"
    assert "99 is above 40 (already in the parent)" in problem.message
    assert OT_GUARD.check(parent, ["ot.window_size@set=40"]).ok


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_under_a_knob_is_a_problem(bad: float) -> None:
    config = copy.deepcopy(OT)
    config["ot"]["loss_config"]["features"][0]["weight_label"] = bad
    config["ot"]["lambda_ot"] = bad  # no knob
    for ruling in [OT_GUARD.admit(config), OT_GUARD.check(config, ["ot.window_size@set=5"])]:
        assert [problem.key for problem in ruling.problems] == ["ot.loss_config.features.0.weight_label"]
        assert "not finite" in ruling.problems[0].message


def test_a_persons_own_config_may_hold_anything_but_bad_knobs() -> None:
    config = {**OT, "notes": ["any", {"thing": math.nan}]}
    assert OT_GUARD.admit(config).ok
    config["ot"] = {**OT["ot"], "window_size": 41}
    (problem,) = OT_GUARD.admit(config).problems
    assert (problem.key, problem.value, problem.nearest) == ("ot.window_size", 41, 40)


def test_admission_gives_values_the_type_of_their_knobs_and_computes_the_rest() -> None:
    made = guard(
        {"lr": {"type": "float", "low": 0, "high": 1}, "n": {"type": "int", "low": 1, "high": 64}},
        normalise=[("n", "ceil_to(n, 4)")],
        derive={"total": "n * 10"},
    )
    ruling = made.admit({"lr": 1, "n": 5.0})
    assert ruling.config == {"lr": 1.0, "n": 8, "total": 80}
    assert (type(ruling.config["lr"]), type(ruling.config["n"])) == (float, int)
    assert [(change.path, change.old, change.new, change.added) for change in ruling.changes] == [
        ("n", 5.0, 8, False),
        ("total", None, 80, True),
    ]
    assert ruling.notes == ("n 5 → 8: ceil_to(n, 4)",)


def test_derived_keys_keep_their_type() -> None:
    made = guard({"n": {"type": "int"}}, derive={"half": "n / 2", "ratio": "n", "big": "n > 3", "name": "'a' + 'b'"})
    ruling = made.check({"n": 4, "half": 1, "ratio": 0.5, "big": False, "name": "x"}, ["n@set=7"])
    assert ruling.config == {"n": 7, "half": 4, "ratio": 7.0, "big": True, "name": "ab"}
    assert type(ruling.config["half"]) is int
    assert type(ruling.config["ratio"]) is float


def test_a_derived_value_of_another_type_is_a_problem() -> None:
    made = guard({"n": {}}, derive={"flag": "n + 1", "name": "n", "size": "'big'", "far": "n * 1e308 * 10"})
    ruling = made.check({"n": 1, "flag": True, "name": "x", "size": 3, "far": 0.0}, ["n@set=2"])
    assert {problem.key: problem.rule for problem in ruling.problems} == dict.fromkeys(
        ["flag", "name", "size", "far"], "derive"
    )
    assert "its value would be 3, but the key has true or false" in ruling.problems[0].message


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ({"normalise": [("n", "ceil_to(n, wrokers)")]}, "normalise"),
        ({"derive": {"total": "n * wrokers"}}, "derive"),
        ({"constraints": ["n % wrokers == 0"]}, "constraint"),
    ],
)
def test_a_missing_name_says_which_key_is_missing_and_what_is_near(rules: dict[str, Any], kind: str) -> None:
    made = guard({"n": {"type": "int"}}, **rules)
    for ruling in [made.check({"n": 1, "workers": 4}, ["n@set=3"]), made.admit({"n": 1, "workers": 4})]:
        (problem,) = ruling.problems
        assert problem.rule == kind
        assert problem.nearest == "workers"
        assert "wrokers is missing in the config; nearest: workers" in problem.message


def test_an_expression_that_cannot_be_computed_is_a_problem_with_the_values() -> None:
    made = guard({"n": {"type": "int"}}, constraints=["10 % n == 0", "log(n) < 5", "n < 'a'"])
    ruling = made.check({"n": 1}, ["n@set=0"])
    assert ["10 % 0" in ruling.problems[0].message, "log(0)" in ruling.problems[1].message] == [True, True]
    assert [problem.rule for problem in ruling.problems] == ["constraint"] * 3


def test_a_derived_key_whose_parent_is_missing_is_a_problem() -> None:
    (problem,) = guard({"n": {}}, derive={"a.b.c": "n"}).check({"n": 1}, []).problems
    assert (problem.key, problem.rule) == ("a.b.c", "derive")
    assert "a.b is not in the config" in problem.message


def test_what_follows_from_a_rejected_value_is_not_reported_again() -> None:
    made = guard(
        {"w": {"type": "int", "low": 1, "high": 8}, "n": {"type": "int", "low": 1, "high": 64}},
        normalise=[("n", "ceil_to(n, w)")],
        derive={"per": "n // w", "twice": "per * 2"},
        constraints=["n % w == 0", "twice / per == 2"],
    )
    config = {"w": 4, "n": 8, "per": 2, "twice": 4}
    for value in (0, 1000):
        ruling = made.check(config, [f"w@set={value}"])
        assert "w" in {problem.key for problem in ruling.problems}
        assert {problem.rule for problem in ruling.problems} <= {"knob range", "constraint"}
    (problem,) = made.check(config, ["w@set=0"]).problems
    assert problem.key == "w"


def test_a_normaliser_that_reads_a_derived_key_reads_the_new_one() -> None:
    made = guard(
        {"n": {"type": "int"}, "mini": {"type": "int", "low": 1, "high": 10_000}},
        normalise=[("mini", "min(mini, batch)")],
        derive={"batch": "n * 100"},
    )
    config = {"n": 10, "mini": 1000, "batch": 1000}
    assert made.check(config, ["n@set=20", "mini@set=1500"]).config == {"n": 20, "mini": 1500, "batch": 2000}
    assert made.check(config, ["n@set=5"]).config == {"n": 5, "mini": 500, "batch": 500}


def test_normalisers_act_in_order_and_until_they_settle() -> None:
    made = guard({"n": {"type": "int"}}, normalise=[("a", "b"), ("b", "c"), ("c", "n")])
    ruling = made.check({"n": 1, "a": 1, "b": 1, "c": 1}, ["n@set=7"])
    assert ruling.config == {"n": 7, "a": 7, "b": 7, "c": 7}
    there_and_back = guard({"n": {"type": "int"}}, normalise=[("n", "ceil_to(n, 28)"), ("n", "min(n, 256)")])
    ruling = there_and_back.check({"n": 1}, ["n@set=255"])
    assert ruling.config == {"n": 256}
    assert ruling.notes == ("n 255 → 280: ceil_to(n, 28)", "n 280 → 256: min(n, 256)")


def test_a_normaliser_that_never_settles_is_a_problem() -> None:
    (problem,) = guard({"n": {"type": "int"}}, normalise=[("n", "n + 1")]).check({"n": 1}, ["n@set=3"]).problems
    assert (problem.key, problem.rule) == ("n", "normalise")
    assert "does not converge" in problem.message


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"derive": {"a": "b", "b": "c", "c": "a"}}, "derived keys depend on each other"),
        ({"derive": {"a": "a + 1"}}, "derived keys depend on each other: a → a"),
        ({"derive": {"x.0.w": "sum(i.w for i in x)"}}, "derived keys depend on each other"),
        ({"derive": {"a": "b +"}}, "derive a = b +"),
        ({"normalise": [("a", "ceiling(a)")]}, "normalise a = ceiling(a)"),
        ({"constraints": ["a = 3"]}, "constraint a = 3"),
        ({"derive": {"a.*.b": "1"}}, "the key must be a single key"),
        ({"normalise": [("", "1")]}, "the key must be a single key"),
        ({"derive": {"a": "1"}, "normalise": [("a", "2")]}, "both normalised and derived"),
        ({"derive": {"a[0]": "1", "a.0": "2"}}, "derived twice"),
    ],
)
def test_rules_that_make_no_sense_are_rejected_when_the_guard_is_made(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError) as caught:
        guard({}, **rules)
    assert words in str(caught.value)


def test_two_knobs_for_one_key_are_rejected() -> None:
    with pytest.raises(LabError, match=r"two knobs for a\.0"):
        guard({"a.0": {}, "a[0]": {}})


def test_edits_are_taken_as_text_or_read() -> None:
    for edits in ["ot.window_size@set=5", ["ot.window_size@set=5"], [Edit("ot.window_size", Op.SET, 5)]]:
        assert OT_GUARD.check(OT, edits).config["ot"]["window_size"] == 5


def test_an_edit_that_cannot_be_read_does_not_hide_the_others() -> None:
    ruling = OT_GUARD.check(
        OT, ["ot.window_size", "ot.window_size@half=2", "ot.loss_config.reg@set=99", "ot.window_size@add=1"]
    )
    assert [problem.rule for problem in ruling.problems] == ["edit", "edit", "knob range"]
    assert {change.path for change in ruling.changes} == {"ot.loss_config.reg", "ot.window_size"}


def test_keys_with_dots_in_them_can_be_knobs_and_derived() -> None:
    made = guard(
        {"observation.state.dim": {"type": "int", "low": 1, "high": 9}}, derive={"total": "observation.state.dim * 2"}
    )
    config = {"observation.state": {"dim": 3}, "total": 6}
    ruling = made.check(config, ["observation.state.dim@set=4"])
    assert ruling.config == {"observation.state": {"dim": 4}, "total": 8}
    assert not made.check(config, ["observation.state.dim@set=99"]).ok


def test_a_derived_key_that_an_edit_takes_out_comes_back() -> None:
    made = guard({"n": {}}, derive={"total": "n * 2"})
    ruling = made.check({"n": 1, "total": 2}, ["total@del"])
    assert ruling.config == {"n": 1, "total": 2}
    assert ruling.changes == ()


_SMALL = guard(
    {
        "a": {"type": "int", "low": 0, "high": 20},
        "b": {"type": "float", "low": 0, "high": 2, "step": 0.25},
        "items.*.w": {"type": "float", "low": 0, "high": 1},
        "mode": {"choices": ["x", "y", 3, None]},
    },
    normalise=[("a", "floor_to(a, 3)"), ("b", "min(b, a / 4)")],
    derive={"sum": "sum(i.w for i in items)", "scaled": "sum * a"},
    constraints=["any(i.w > 0 for i in items)", "mode == 'x' or a > 0"],
)
_PARENT = {
    "a": 9,
    "b": 1.0,
    "items": [{"w": 0.5, "tag": "p"}, {"w": 0.0, "tag": "q"}],
    "mode": "x",
    "sum": 0.5,
    "scaled": 4.5,
    "other": {"x": 1},
}
_EDIT = st.builds(
    lambda path, rest: f"{path}@{rest}",
    st.sampled_from(
        [
            "a",
            "b",
            "items.*.w",
            "items.0.w",
            "items.1.w",
            "mode",
            "sum",
            "scaled",
            "other.x",
            "items.0.tag",
            "items.0",
            "items",
            "c",
        ]
    ),
    st.sampled_from(
        [
            "set=0",
            "set=1",
            "set=0.25",
            "set=7",
            "set=20",
            "set=-1",
            "set=x",
            "set=y",
            "set=3",
            "set=null",
            "set=true",
            "mul=0.5",
            "mul=2",
            "add=1",
            "add=-0.5",
            "max=1",
            "min=0",
            "del",
            "append=1",
            "new=1",
            "new=[]",
            'new={"w":1}',
            "new=0.5",
        ]
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_EDIT, max_size=4))
def test_an_accepted_config_is_legal_and_admitting_it_changes_nothing(edits: list[str]) -> None:
    before = copy.deepcopy(_PARENT)
    ruling = _SMALL.check(_PARENT, edits)
    assert before == _PARENT
    assert _SMALL.check(_PARENT, edits) == ruling
    if not ruling.ok:
        return
    config = ruling.config
    allowed = {"a", "b", "mode", "sum", "scaled", "items.0.w", "items.1.w"}
    assert set(paths.diff(_PARENT, config)) <= allowed
    assert {change.path for change in ruling.changes} == set(paths.diff(_PARENT, config))
    assert config["a"] % 3 == 0
    assert 0 <= config["a"] <= 20
    assert 0 <= config["b"] <= min(2, config["a"] / 4)
    assert any(item["w"] > 0 for item in config["items"])
    assert config["sum"] == sum(item["w"] for item in config["items"])
    assert config["scaled"] == config["sum"] * config["a"]
    again = _SMALL.admit(config)
    assert again.config == config
    assert (again.changes, again.problems) == ((), ())
