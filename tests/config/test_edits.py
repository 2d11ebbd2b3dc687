from __future__ import annotations

import copy
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from looplab.config.edits import Applied, ConfigChange, Edit, EditError, Op, apply_edits, edits_from_partial, parse_edit
from looplab.config.files import canonical_json, read_config, read_document
from looplab.config.paths import diff, find, get, has, same, show


def ot_config() -> dict[str, Any]:
    feature = {"weight_embed": 1.0, "weight_label": 0.01, "use_learned_embed": True}
    return {
        "steps": 3000,
        "batch_size": 8,
        "policy": {"type": "act", "device": "cuda", "pretrained": None},
        "ot": {
            "lambda_ot": 0.1,
            "window_size": 10,
            "sharpness": 0.5,
            "bc_src_weight": 0.9,
            "no_window": False,
            "loss_config": {
                "reg": 0.2,
                "tau_src": 0.5,
                "tau_tgt": 0.5,
                "features": [{"name": name, **feature} for name in ("front", "wrist", "state", "action")],
            },
        },
    }


ACT_OT_EXPRESSIONS = [
    "ot.bc_src_weight@set=0.7",
    "ot.lambda_ot@set=0.10",
    "ot.lambda_ot@set=0.12",
    "ot.lambda_ot@set=0.15",
    "ot.loss_config.features.*.weight_label@mul=0.5",
    "ot.loss_config.features.*.weight_label@set=0.005",
    "ot.loss_config.features.3.weight_label@set=0.002",
    "ot.loss_config.reg@mul=1.5",
    "ot.loss_config.reg@set=0.3",
    "ot.loss_config.reg@set=0.4",
    "ot.loss_config.reg@set=0.5",
    "ot.loss_config.tau_src@set=1.0",
    "ot.loss_config.tau_src@set=2.0",
    "ot.loss_config.tau_src@set=3.0",
    "ot.loss_config.tau_src@set=5.0",
    "ot.loss_config.tau_tgt@set=1.0",
    "ot.loss_config.tau_tgt@set=2.0",
    "ot.loss_config.tau_tgt@set=3.0",
    "ot.loss_config.tau_tgt@set=5.0",
    "ot.sharpness@set=0.75",
    "ot.topk_src_episodes@set=20",
]


def wrong(config: Any, *edits: str, **options: Any) -> EditError:
    with pytest.raises(EditError) as caught:
        apply_edits(config, edits, **options)
    return caught.value


def edited(config: dict[str, Any], *edits: str, **options: Any) -> dict[str, Any]:
    return apply_edits(config, edits, **options).config


# --- the text of an edit


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("optimizer@set=adam", Edit("optimizer", Op.SET, "adam")),
        ('x@set="adam"', Edit("x", Op.SET, "adam")),
        ("x@set=[1,2]", Edit("x", Op.SET, [1, 2])),
        ('x@set={"a": 1}', Edit("x", Op.SET, {"a": 1})),
        ("x@set=true", Edit("x", Op.SET, True)),
        ("x@set=1e-3", Edit("x", Op.SET, 0.001)),
        ("x@set=null", Edit("x", Op.SET, None)),
        ("x@set=NaN", Edit("x", Op.SET, "NaN")),
        ("x@set=-Infinity", Edit("x", Op.SET, "-Infinity")),
        ("x@set=", Edit("x", Op.SET, "")),
        ("x@set=a=b@c", Edit("x", Op.SET, "a=b@c")),
        ("x@del", Edit("x", Op.DEL)),
        ("user@host@set=1", Edit("user@host", Op.SET, 1)),
        (r"a\=b@mul=2", Edit("a=b", Op.MUL, 2)),
        (r"a\.b[3].*@append=1", Edit(r"a\.b[3].*", Op.APPEND, 1)),
        ("x@add=-3", Edit("x", Op.ADD, -3)),
        ("x@new={}", Edit("x", Op.NEW, {})),
    ],
)
def test_an_edit_is_a_path_an_op_and_a_json_value_or_a_bare_string(text: str, edit: Edit) -> None:
    parsed = parse_edit(text)
    assert parsed == edit
    assert canonical_json(parsed.value) == canonical_json(edit.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("lr=0.1", "`lr@set=0.1`"),
        ("lr", "`lr@set=VALUE`"),
        ("lr=a@b", "`lr@set=a@b`"),
        ("lr@sett=1", "did you mean `set`? the ops are set, mul, add, max, min, del, append, new"),
        ("lr@=1", "the ops are"),
        ("lr@set", "`lr@set=VALUE`"),
        ("lr@set\\", "the ops are"),
        ("lr@del=1", "`lr@del`"),
        ("@set=1", "train.lr@set=0.1"),
        ("lr@mul=fast", "`lr@mul=0.5`"),
        ("lr@mul=true", "`lr@mul=0.5`"),
    ],
)
def test_a_text_that_is_not_an_edit_is_quoted_and_shown_in_the_right_form(text: str, hint: str) -> None:
    with pytest.raises(EditError) as caught:
        parse_edit(text)
    assert f"`{text}`" in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("value", ["1e999", "[1, -1e999]", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_value_that_no_config_can_hold_is_rejected(value: str) -> None:
    with pytest.raises(EditError):
        parse_edit(f"x@set={value}")


@pytest.mark.parametrize("value", [math.nan, [math.inf], {1: 2}, {1, 2}, b"x"])
def test_an_edit_holds_only_what_its_text_can_say(value: Any) -> None:
    with pytest.raises(EditError):
        Edit("x", Op.SET, value)
    with pytest.raises(EditError):
        Edit("x", Op.DEL, 1)


names = st.one_of(
    st.sampled_from(["a", "b", "lr", "a.b", "0", "*", "a=b", "a@set", "x\\", "é", "[0]"]),
    st.text(min_size=1, max_size=5),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["1", "true", "null", "NaN", "1e999", '"', "[", " x", "x ", "a=b", "{}"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=8,
)
configs = st.dictionaries(names, values, max_size=4)
numbers = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6))
paths = st.one_of(
    st.lists(names, min_size=1, max_size=3).map(lambda parts: show(tuple(parts))), st.text(min_size=1, max_size=6)
)


@st.composite
def any_edits(draw: st.DrawFn) -> Edit:
    op = draw(st.sampled_from(Op))
    if op is Op.DEL:
        return Edit(draw(paths), op)
    return Edit(draw(paths), op, draw(numbers if op in (Op.MUL, Op.ADD, Op.MAX, Op.MIN) else values))


@given(any_edits())
def test_the_text_of_an_edit_reads_back_to_the_same_edit(edit: Edit) -> None:
    again = parse_edit(str(edit))
    assert again == edit
    assert canonical_json(again.value) == canonical_json(edit.value)
    assert str(again) == str(edit)


# --- the expressions of an ACT-OT search


@pytest.mark.parametrize("text", ACT_OT_EXPRESSIONS)
def test_every_expression_for_act_ot_applies(text: str) -> None:
    config = ot_config()
    before = copy.deepcopy(config)
    applied = apply_edits(config, [text])
    assert config == before
    edit = parse_edit(text)
    places = find(applied.config, edit.path)
    assert places
    for place in places:
        new = get(applied.config, place)
        if edit.op is Op.SET:
            assert same(new, edit.value)
        else:
            assert new == pytest.approx(get(before, place) * edit.value)
    assert {change.path for change in applied.changes} == set(diff(before, applied.config))


def test_a_starred_edit_acts_on_every_item() -> None:
    applied = apply_edits(ot_config(), ["ot.loss_config.features.*.weight_label@mul=0.5"])
    assert [item["weight_label"] for item in applied.config["ot"]["loss_config"]["features"]] == [0.005] * 4
    assert [change.path for change in applied.changes] == [
        f"ot.loss_config.features.{i}.weight_label" for i in range(4)
    ]


def test_a_variant_is_made_in_one_go() -> None:
    applied = apply_edits(
        ot_config(),
        [
            "ot.loss_config.reg@set=0.4",
            "ot.loss_config.tau_src@set=2.0",
            "ot.lambda_ot@set=0.10",
            "ot.loss_config.features.3.weight_label@set=0.002",
            "ot.topk_src_episodes@set=20",
        ],
    )
    assert applied.changes == (
        ConfigChange("ot.loss_config.reg", 0.2, 0.4),
        ConfigChange("ot.loss_config.tau_src", 0.5, 2.0),
        ConfigChange("ot.loss_config.features.3.weight_label", 0.01, 0.002),
        ConfigChange("ot.topk_src_episodes", None, 20, added=True),
    )
    assert applied.notes == (
        "`ot.lambda_ot@set=0.1` changed nothing",
        "ot.topk_src_episodes was not in the config; added",
    )


# --- the type follows the config


@pytest.mark.parametrize(
    ("edit", "value", "note"),
    [
        ("ot.window_size@mul=2.0", 20, None),
        ("ot.window_size@mul=1.55", 16, "15.5, rounded to 16"),
        ("ot.window_size@mul=0.35", 4, "3.5, rounded to 4"),
        ("ot.window_size@mul=-0.35", -4, "-3.5, rounded to -4"),
        ("ot.window_size@add=0.4", 10, "10.4, rounded to 10"),
        ("ot.window_size@max=12.5", 13, "12.5, rounded to 13"),
        ("ot.window_size@max=3", 10, None),
        ("ot.window_size@min=4", 4, None),
        ("ot.window_size@set=12.0", 12, None),
        ("ot.lambda_ot@add=1", 1.1, None),
        ("ot.lambda_ot@max=2", 2.0, None),
        ("ot.lambda_ot@min=0", 0.0, None),
        ("ot.lambda_ot@set=1", 1.0, None),
        ("policy.type@set=diffusion", "diffusion", None),
        ("policy.type@set=3", "3", 'so 3 became "3"'),
        ("policy.type@set=true", "true", 'so true became "true"'),
        ("policy.type@set=null", None, None),
        ("policy.pretrained@set=[1]", [1], None),
        ("ot.no_window@set=true", True, None),
        ("ot.loss_config.features@set=[]", [], None),
        ("ot.loss_config@set={}", {}, None),
        ("ot.window_size@new=0.5", 0.5, None),
        ("ot.window_size@new=wide", "wide", None),
        ("ot@new=3", 3, None),
    ],
)
def test_the_type_follows_the_config(edit: str, value: Any, note: str | None) -> None:
    applied = apply_edits(ot_config(), [edit])
    assert same(get(applied.config, find(applied.config, parse_edit(edit).path)[0]), value)
    notes = [text for text in applied.notes if "changed nothing" not in text]
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("ot.window_size@set=wide", "the config has an int at ot.window_size, and this is text"),
        ("ot.window_size@set=true", "has an int"),
        ("ot.lambda_ot@set=NaN", "the config has a float at ot.lambda_ot, and this is text"),
        ("ot.lambda_ot@set=false", "has a float"),
        ("ot.lambda_ot@set=[0.1]", "this is a list"),
        ("ot.no_window@set=1", "takes only true or false"),
        ("ot.no_window@set=True", "takes only true or false"),
        ("ot.loss_config@set=3", "has a mapping at ot.loss_config"),
        ("ot.loss_config.features@set={}", "has a list at ot.loss_config.features, and this is a mapping"),
        ("policy.type@set={}", "has text"),
    ],
)
def test_a_value_of_another_type_needs_new(edit: str, message: str) -> None:
    error = wrong(ot_config(), edit)
    assert message in error.message
    assert "use `@new` to change the type" in str(error.hint)
    assert str(parse_edit(edit)) in error.message
    new = str(error.hint).split("`")[3]
    assert has(apply_edits(ot_config(), [new]).config, find(ot_config(), parse_edit(edit).path)[0])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("ot.no_window@mul=2", "ot.no_window is a bool, and `mul` needs a number"),
        ("policy.type@add=1", "is text"),
        ("policy.pretrained@max=1", "is null"),
        ("ot.loss_config.features@min=1", "is a list"),
        ("ot.loss_config.features.*@mul=2", "ot.loss_config.features.0 is a mapping"),
        ("policy.type@append=1", "policy.type is text, and `append` needs a list"),
        ("ot.lambda_ot@mul=1e308", None),
        ("ot.lambda_ot@set=" + "9" * 400, "not a finite number"),
        ("steps@mul=1e306", "not a finite number"),
    ],
)
def test_an_op_that_does_not_fit_is_an_error_that_names_the_place(edit: str, message: str | None) -> None:
    if message is None:
        message = "not a finite number"
        error = wrong(ot_config(), edit, edit, edit)
    else:
        error = wrong(ot_config(), edit)
    assert message in error.message


def test_a_config_that_holds_infinity_may_be_capped_but_not_multiplied() -> None:
    assert edited({"clip": math.inf}, "clip@min=5") == {"clip": 5.0}
    assert "not a finite number" in wrong({"clip": math.inf}, "clip@mul=0.5").message
    assert "not a finite number" in wrong({"clip": math.nan}, "clip@max=1").message


def test_a_declared_type_goes_before_what_the_config_holds() -> None:
    types = {"sharpness": float, "layers": int, "tag": str, "flag": bool, "free": int}.get
    config = {"sharpness": 10, "layers": 2.0, "tag": 5, "flag": None, "free": None}
    assert same(edited(config, "sharpness@mul=0.075", types=types)["sharpness"], 0.75)
    assert same(edited(config, "sharpness@set=0.75", types=types)["sharpness"], 0.75)
    assert same(edited(config, "sharpness@set=3", types=types)["sharpness"], 3.0)
    assert same(edited(config, "layers@mul=1.75", types=types)["layers"], 4)
    assert same(edited(config, "tag@set=7", types=types)["tag"], "7")
    assert "flag is declared a bool" in wrong(config, "flag@set=1", types=types).message
    assert "free is declared an int" in wrong(config, "free@set=0.5", types=types).message
    assert same(edited({}, "sharpness@set=3", types=types)["sharpness"], 3.0)


# --- what exists and what does not


def test_append_and_del() -> None:
    config = {"l": [1, 2, 3, 4], "d": {"a": 1, "b": 2}, "m": [[1], [2]]}
    applied = apply_edits(config, ["l@append=five", "d.a@del", "m.*@append=0"])
    assert applied.config == {"l": [1, 2, 3, 4, "five"], "d": {"b": 2}, "m": [[1, 0], [2, 0]]}
    assert applied.changes == (
        ConfigChange("l.4", None, "five", added=True),
        ConfigChange("d.a", 1, None, removed=True),
        ConfigChange("m.0.1", None, 0, added=True),
        ConfigChange("m.1.1", None, 0, added=True),
    )
    assert edited(config, "l.*@del", "d.*@del") == {"l": [], "d": {}, "m": [[1], [2]]}
    assert edited(config, "l.1@del") == {**config, "l": [1, 3, 4]}


def test_set_adds_a_leaf_under_every_parent_and_says_so() -> None:
    applied = apply_edits({"f": [{"w": 1}, {"w": 2}]}, ["f.*.scale@set=0.5"])
    assert applied.config == {"f": [{"w": 1, "scale": 0.5}, {"w": 2, "scale": 0.5}]}
    assert applied.notes == ("f.0.scale was not in the config; added", "f.1.scale was not in the config; added")


def test_set_acts_on_the_matches_alone_if_there_are_any() -> None:
    assert edited({"f": [{"w": 1}, {"v": 2}]}, "f.*.w@set=5") == {"f": [{"w": 5}, {"v": 2}]}


@pytest.mark.parametrize(
    ("name", "sibling"),
    [
        ("learning-rate", "learning_rate"),
        ("learningRate", "learning_rate"),
        ("LEARNING_RATE", "learning_rate"),
        ("learnin_rate", "learning_rate"),
        ("learning_rates", "learning_rate"),
        ("layer_1", "layer1"),
    ],
)
def test_a_new_name_that_is_nearly_an_old_one_is_taken_for_a_slip(name: str, sibling: str) -> None:
    config = {"train": {"learning_rate": 0.1, "layer1": 3}}
    error = wrong(config, f"train.{name}@set=1")
    assert f"train.{sibling}" in error.message
    assert f"`train.{name}@new=1`" in str(error.hint)
    assert edited(config, f"train.{name}@new=1")["train"][name] == 1


@pytest.mark.parametrize("name", ["layer2", "layer12", "layer", "warmup"])
def test_names_that_differ_in_digits_alone_are_different_names(name: str) -> None:
    assert edited({"layer1": 3}, f"{name}@set=1") == {"layer1": 3, name: 1}


def test_a_path_that_means_nothing_names_the_nearest() -> None:
    for edit in ("ot.loss_config.regg@mul=2", "ot.los_config.reg@set=2", "loss_config.reg@add=1", "ot.reg@del"):
        error = wrong(ot_config(), edit)
        assert "the config has no" in error.message
        assert "ot.loss_config.reg" in str(error.hint)
    assert "ot.loss_config.features.*.weight_label" in str(
        wrong(ot_config(), "ot.loss_config.features.*.weight_lable@mul=2").hint
    )


def test_only_a_mapping_takes_new_keys() -> None:
    assert "features is a list" in wrong(ot_config(), "ot.loss_config.features.9@set=1").message
    assert "is a list and takes no keys" in wrong(ot_config(), "ot.loss_config.features.9@new=1").message
    assert "ot.lambda_ot is a float" in wrong(ot_config(), "ot.lambda_ot.x@set=1").message
    assert "ot.lambda_ot is a float" in wrong(ot_config(), "ot.lambda_ot.x.y@new=1").message
    for edit in ("ot.@set=1", "ot.@new=1", "nowhere.*@new=1"):
        assert "the config has no" in wrong(ot_config(), edit).message


def test_new_makes_the_parents_that_are_missing() -> None:
    applied = apply_edits(
        {"a": {"n": None}, "f": [{}, {}]}, ["a.b.c@new=1", "a.n.x@new=2", "f.*.g.h@new=[3]", r"o\.s@new=4"]
    )
    assert applied.config == {
        "a": {"n": {"x": 2}, "b": {"c": 1}},
        "f": [{"g": {"h": [3]}}, {"g": {"h": [3]}}],
        "o.s": 4,
    }
    assert applied.config["f"][0]["g"]["h"] is not applied.config["f"][1]["g"]["h"]
    assert [(change.path, change.added) for change in applied.changes] == [
        ("a.b.c", True),
        ("a.n", False),
        ("f.0.g.h", True),
        ("f.1.g.h", True),
        (r"o\.s", True),
    ]
    assert len(applied.notes) == 5


def test_keys_with_dots_are_edited_without_escapes() -> None:
    config = {"observation.state": {"shape": [7]}}
    assert edited(config, "observation.state.shape.0@mul=2") == {"observation.state": {"shape": [14]}}
    assert edited(config, "observation.state.std@set=1.0") == {"observation.state": {"shape": [7], "std": 1.0}}


# --- the record of changes


def test_edits_of_one_place_make_one_change() -> None:
    assert apply_edits({"x": 1}, ["x@mul=2", "x@add=3"]).changes == (ConfigChange("x", 1, 5),)
    assert apply_edits({"x": 1}, ["x@del", "x@set=7"]).changes == (ConfigChange("x", 1, 7),)
    assert apply_edits({"y": 1}, ["x@set=1", "x@del"]).changes == ()
    assert apply_edits({"x": 1}, ["x@mul=2", "x@add=-1"]).changes == ()
    assert apply_edits({}, ["x.y@new=1", "x.y@del"]).changes == (ConfigChange("x", None, {}, added=True),)


def test_a_change_of_a_container_holds_the_changes_inside() -> None:
    applied = apply_edits({"a": {"b": 1}}, ["a.b@mul=5", "a@set={}", "a.c@set=2"])
    assert applied.changes == (ConfigChange("a", {"b": 1}, {"c": 2}),)


def test_items_taken_out_of_a_list_are_named_by_their_old_index() -> None:
    applied = apply_edits({"l": [1, 2, 3]}, ["l.1@del"])
    assert applied.changes == (ConfigChange("l.1", 2, None, removed=True),)
    applied = apply_edits({"l": [{"w": 1}, {"v": 2}, {"w": 3}]}, ["l.*@del"])
    assert [change.path for change in applied.changes] == ["l.0", "l.1", "l.2"]


@pytest.mark.parametrize(
    ("edits", "new"),
    [
        (["l.0@del", "l.0@del"], [[3]]),
        (["l.0@del", "l.0.0@mul=9"], [[18], [3]]),
        (["l.1.0@mul=9", "l.0@del"], [[18], [3]]),
        (["l@append=4", "l.0@del"], [[2], [3], 4]),
        (["l.0.0@del", "l.0@del"], [[2], [3]]),
        (["l.0@del", "l.0.0@del"], [[], [3]]),
        (["l.0@del", "l@append=4"], [[2], [3], 4]),
    ],
)
def test_a_list_whose_items_moved_between_edits_is_one_change(edits: list[str], new: list[Any]) -> None:
    assert apply_edits({"l": [[1], [2], [3]]}, edits).changes == (ConfigChange("l", [[1], [2], [3]], new),)


def test_a_single_text_is_taken_as_one_edit() -> None:
    assert apply_edits({"x": 1}, "x@set=2").config == {"x": 2}


# --- partial configs


def test_a_partial_config_is_a_list_of_edits() -> None:
    edits = edits_from_partial({"ot": {"lambda_ot": 0.2, "loss_config": {"reg": 1}}, "steps": 5}, ot_config())
    assert list(map(str, edits)) == ["ot.lambda_ot@set=0.2", "ot.loss_config.reg@set=1", "steps@set=5"]


def test_lists_and_mappings_without_counterpart_are_whole_values() -> None:
    config = {"l": [1, 2], "n": None, "d": {"x": 1}}
    edits = edits_from_partial({"l": [3], "n": {"a": 1}, "new": {"b": {}}, "d": {}}, config)
    assert list(map(str, edits)) == ["l@set=[3]", 'n@set={"a":1}', 'new@set={"b":{}}']
    assert edited(config, *map(str, edits)) == {"l": [3], "n": {"a": 1}, "d": {"x": 1}, "new": {"b": {}}}


def test_a_partial_config_may_use_paths_and_indices_as_keys() -> None:
    config = {"train": {"lr": 0.1}, "f": [{"w": 1}, {"w": 2}], "a.b": {"c": 1}}
    edits = edits_from_partial({"train.lr": 0.2, "f": {"1": {"w": 5}}, "f.*.w": 7, "a.b": {"c": 2}, "x.y": 1}, config)
    assert list(map(str, edits)) == [
        "train.lr@set=0.2",
        "f.1.w@set=5",
        "f.0.w@set=7",
        "f.1.w@set=7",
        r"a\.b.c@set=2",
        r"x\.y@set=1",
    ]


def test_a_partial_config_that_no_edit_can_express_is_an_error() -> None:
    with pytest.raises(EditError, match="finite"):
        edits_from_partial({"lr": math.nan}, {"lr": 0.1})


@given(configs)
def test_a_config_taken_as_partial_of_itself_changes_nothing(config: dict[str, Any]) -> None:
    edits = edits_from_partial(config, config)
    applied = apply_edits(config, edits)
    assert same(applied.config, config)
    assert applied.changes == ()


# --- the algebra


def place_of(data: st.DataObject, config: Any) -> tuple[str | int, ...]:
    trail: tuple[str | int, ...] = ()
    node = config
    while isinstance(node, dict | list) and node and (not trail or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        trail, node = (*trail, key), node[key]
    return trail


@given(st.integers(), numbers, st.sampled_from([Op.MUL, Op.ADD, Op.MAX, Op.MIN]))
def test_an_int_stays_an_int_nearest_to_the_exact_result_and_within_a_bound(old: int, value: float, op: Op) -> None:
    new = apply_edits({"x": old}, [Edit("x", op, value)]).config["x"]
    assert type(new) is int
    a, b = Fraction(old), Fraction(repr(value))
    exact = {Op.MUL: a * b, Op.ADD: a + b, Op.MAX: max(a, b), Op.MIN: min(a, b)}[op]
    if op is Op.MAX:
        assert exact <= new < exact + 1
    elif op is Op.MIN:
        assert exact - 1 < new <= exact
    else:
        assert abs(new - exact) <= Fraction(1, 2)
        assert abs(new - exact) < Fraction(1, 2) or abs(new) > abs(exact)


@given(st.floats(-1e100, 1e100), numbers, st.sampled_from([Op.MUL, Op.ADD, Op.MAX, Op.MIN]))
def test_a_float_stays_a_float(old: float, value: float, op: Op) -> None:
    new = apply_edits({"x": old}, [Edit("x", op, value)]).config["x"]
    assert type(new) is float
    a, b = Fraction(repr(old)), Fraction(repr(value))
    assert new == float({Op.MUL: a * b, Op.ADD: a + b, Op.MAX: max(a, b), Op.MIN: min(a, b)}[op])


def test_arithmetic_goes_by_the_digits_that_people_see() -> None:
    assert apply_edits({"lr": 0.1}, ["lr@mul=3"]).config == {"lr": 0.3}
    assert apply_edits({"lr": 0.1}, ["lr@add=0.2"]).config == {"lr": 0.3}


def test_a_fraction_set_on_an_int_makes_it_a_float_and_says_so() -> None:
    applied = apply_edits({"ot": {"sharpness": 10}}, ["ot.sharpness@set=0.75"])
    assert applied.config == {"ot": {"sharpness": 0.75}}
    assert "was the int 10" in applied.notes[0]


@given(st.data(), configs, st.lists(any_edits(), max_size=3))
def test_the_input_is_never_changed_and_never_shared(
    data: st.DataObject, config: dict[str, Any], edits: list[Edit]
) -> None:
    if config:
        place = place_of(data, config)
        edits.insert(0, Edit(show(place), Op.NEW, data.draw(values)))
    before = json.dumps(config)
    texts = list(map(str, edits))
    try:
        applied: Applied | None = apply_edits(config, edits)
    except EditError:
        applied = None
    assert json.dumps(config) == before
    if applied is not None:
        scribble(applied.config)
        assert json.dumps(config) == before
        assert list(map(str, edits)) == texts


def scribble(node: Any) -> None:
    for child in list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else ():
        scribble(child)
    if isinstance(node, dict):
        node["scribble"] = 1
    elif isinstance(node, list):
        node.append("scribble")


@given(st.data(), configs, values)
def test_what_is_set_is_read_back(data: st.DataObject, config: dict[str, Any], value: Any) -> None:
    assume(config)
    place = place_of(data, config)
    assert same(get(apply_edits(config, [Edit(show(place), Op.NEW, value)]).config, place), value)
    try:
        new = get(apply_edits(config, [Edit(show(place), Op.SET, value)]).config, place)
    except EditError:
        old = get(config, place)
        assert old is not None
        assert type(old) is not type(value)
    else:
        assert same(new, value) or new == value or new == json.dumps(value)


@given(st.data(), configs)
def test_edits_one_by_one_give_what_they_give_together(data: st.DataObject, config: dict[str, Any]) -> None:
    edits: list[Edit] = []
    step = config
    for _ in range(data.draw(st.integers(1, 4))):
        edit = data.draw(any_edits())
        if step and data.draw(st.booleans()):
            edit = Edit(show(place_of(data, step)), edit.op, edit.value)
        try:
            step = apply_edits(step, [edit]).config
        except EditError:
            continue
        edits.append(edit)
    together = apply_edits(config, edits)
    assert same(together.config, step)
    # The changes say where the two differ and nothing else, and they tell the truth.
    roots = [change.path for change in together.changes]
    assert len(set(roots)) == len(roots)
    assert bool(roots) == (not same(config, step))
    for change in together.changes:
        if not change.removed:
            assert same(get(step, find(step, change.path)[0]), change.new)
        if not change.added:
            assert same(get(config, find(config, change.path)[0]), change.old)
    for path in diff(config, step) if not any(change.removed for change in together.changes) else ():
        assert any(path == root or path.startswith(f"{root}.") or root.startswith(f"{path}.") for root in roots)


# --- documents with comments

YAML_TEXT = """\
# The drone.
train:
  lr: 1e-3   # per step
  steps: 100

# What to watch.
features:
  - name: front  # the first
    w: 1.0
  # the second
  - name: wrist
    w: 2.0
# The end.
tag: 'x'  # quoted
"""


def test_comments_of_a_yaml_file_survive_edits(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML_TEXT)
    document = read_document(path)
    applied = apply_edits(
        document.data,
        ["train.lr@mul=0.1", "train.warmup@set=5", "features.*.w@add=1", "tag@set=y", "features.0.scale@set=2"],
    )
    edited_document = document.with_data(applied.config)
    assert edited_document.text() == (
        YAML_TEXT.replace("1e-3   #", "0.0001 #")
        .replace("steps: 100\n", "steps: 100\n  warmup: 5\n")
        .replace("w: 1.0\n", "w: 2.0\n    scale: 2\n")
        .replace("    w: 2.0\n# The", "    w: 3.0\n# The")
        .replace("'x'", "'y'")
    )
    assert document.text() == YAML_TEXT
    edited_document.save(tmp_path / "d.yaml")
    assert same(read_config(tmp_path / "d.yaml"), edited_document.plain())
    assert applied.changes[0] == ConfigChange("train.lr", 0.001, 0.0001)
    assert {type(value) for change in applied.changes for value in (change.old, change.new)} <= {
        float,
        int,
        str,
        type(None),
    }


def test_comments_below_what_is_deleted_survive(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML_TEXT)
    document = read_document(path)
    text = document.with_data(apply_edits(document.data, ["train.steps@del", "features.1@del"]).config).text()
    assert "# What to watch.\nfeatures:" in text
    assert "# The end.\ntag:" in text
    assert "steps" not in text


def test_a_document_and_its_plain_data_are_edited_alike(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML_TEXT)
    edits = [
        "train.lr@mul=0.5",
        "train.steps@mul=1.555",
        "features.*.w@max=1.5",
        "features.0@del",
        "a.b@new={}",
        "tag@del",
    ]
    document = read_document(path)
    of_document = apply_edits(document.data, edits)
    of_plain = apply_edits(read_config(path), edits)
    assert same(document.with_data(of_document.config).plain(), of_plain.config)
    assert of_document.changes == of_plain.changes
    assert of_document.notes == of_plain.notes


def test_what_an_anchor_shares_is_reported_with_the_edited_place(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("base: &b\n  x: 1 # one\n  y: 2\nmore:\n  <<: *b\n  z: 3\nalso: *b\nflag: &f true\n")
    document = read_document(path)
    applied = apply_edits(document.data, ["base.x@set=5", "more.y@mul=2", "flag@set=false"])
    assert applied.changes == (
        ConfigChange("base.x", 1, 5),
        ConfigChange("more.y", 2, 4),
        ConfigChange("flag", True, False),
        ConfigChange("also.x", 1, 5),
    )
    assert applied.notes == ("also.x changed too: the file shares it by an anchor",)
    new = document.with_data(applied.config)
    new.save(tmp_path / "d.yaml")
    assert read_config(tmp_path / "d.yaml") == new.plain()
    assert new.plain()["more"] == {"x": 1, "y": 4, "z": 3}


def test_comments_of_a_toml_file_survive_edits(tmp_path: Path) -> None:
    text = '# top\ntitle = "x" # name\nbits = [true, 1] # bits\n\n[train] # learn\nlr = 1e-3 # per step\n\n[[f]]\nw = 1.0 # w\n'
    path = tmp_path / "c.toml"
    path.write_text(text)
    document = read_document(path)
    applied = apply_edits(
        document.data, ["train.lr@mul=10", "f.*.w@set=3", "bits.0@set=false", "train.n@set=1", "title@set=y"]
    )
    new = document.with_data(applied.config)
    assert new.plain() == {"title": "y", "bits": [False, 1], "train": {"lr": 0.01, "n": 1}, "f": [{"w": 3.0}]}
    for comment in ("# top", "# name", "# bits", "# learn", "# per step", "# w"):
        assert comment in new.text()
    assert document.text() == text
    assert ConfigChange("bits.0", True, False) in applied.changes
    assert "cannot represent" in wrong(document.data, "train.lr@set=null").message
