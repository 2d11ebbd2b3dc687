from __future__ import annotations

import copy
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from looplab.config.paths import (
    delete,
    diff,
    find,
    find_parents,
    flatten,
    get,
    has,
    leaves,
    matches,
    nearest,
    parse,
    same,
    set_,
    show,
)

CONFIG: dict[str, Any] = {
    "train": {"lr": 0.1, "steps": 100},
    "features": [{"name": "a", "w": 1.0}, {"name": "b", "w": 2.0}, {"name": "c"}],
    "observation.state": {"shape": [7], "a.b": 1},
    "empty": {},
    "none": [],
}

keys = st.one_of(
    st.sampled_from(["a", "b", "a.b", "0", "1", "*", "", "a[0]", "x=y", "\\", "a\\", "."]), st.text(max_size=4)
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)
configs = st.dictionaries(keys, values, max_size=4)


def places(node: Any, trail: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [trail] if trail else []
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        found += places(value, (*trail, key))
    return found


def test_a_path_is_split_at_its_dots() -> None:
    assert parse("train.lr") == ("train", "lr")
    assert parse("lr") == ("lr",)


def test_a_backslash_takes_the_next_character_as_it_is() -> None:
    assert parse(r"a\.b.c") == ("a.b", "c")
    assert parse(r"a\\.b") == ("a\\", "b")
    assert parse(r"a\[0\]") == ("a[0]",)


def test_brackets_are_another_way_to_write_an_index() -> None:
    assert parse("features[3].x") == parse("features.3.x") == ("features", "3", "x")
    assert parse("m[0][1]") == ("m", "0", "1")
    assert parse("[0].x") == ("0", "x")
    assert parse("a[b].c") == ("a[b]", "c")
    assert find(CONFIG, "features[*].w") == find(CONFIG, "features.*.w")


def test_a_star_means_every_child_in_the_order_of_the_config() -> None:
    assert find(CONFIG, "features.*.name") == [
        ("features", 0, "name"),
        ("features", 1, "name"),
        ("features", 2, "name"),
    ]
    assert find(CONFIG, "train.*") == [("train", "lr"), ("train", "steps")]
    assert find(CONFIG, "features.*.w") == [("features", 0, "w"), ("features", 1, "w")]


def test_an_escaped_star_is_a_key() -> None:
    config = {"*": 1, "a": 2}
    assert find(config, r"\*") == [("*",)]
    assert find(config, "*") == [("*",), ("a",)]


def test_a_key_with_dots_is_found_without_escapes() -> None:
    assert find(CONFIG, "observation.state.shape.0") == [("observation.state", "shape", 0)]
    assert find(CONFIG, "observation.state.a.b") == [("observation.state", "a.b")]


def test_the_shortest_key_that_leads_somewhere_wins() -> None:
    config = {"a": {"b": 1}, "a.b": {"c": 2}}
    assert find(config, "a.b") == [("a", "b")]
    assert find(config, r"a\.b") == [("a.b",)]
    assert find(config, "a.b.c") == [("a.b", "c")]


def test_an_index_is_digits_within_the_list() -> None:
    for path in ("features.3", "features.-1", "features.01", "features.x", "train.lr.0", "features." + "9" * 5000):
        assert find(CONFIG, path) == []


def test_numbers_as_keys_are_found_by_their_text() -> None:
    assert find({"names": {0: "cat", 1: "dog"}}, "names.1") == [("names", 1)]


def test_parents_are_the_dicts_that_would_take_the_last_segment() -> None:
    assert find_parents(CONFIG, "new") == [()]
    assert find_parents(CONFIG, "train.new") == [("train",)]
    assert find_parents(CONFIG, "features.*.new") == [("features", 0), ("features", 1), ("features", 2)]
    assert find_parents(CONFIG, "observation.state.new") == [("observation.state",)]
    assert find_parents(CONFIG, "features.new") == []
    assert find_parents(CONFIG, "nowhere.new") == []
    assert find_parents(CONFIG, "train.*") == []


def test_places_are_read_set_and_deleted() -> None:
    config: dict[str, Any] = {"l": [1, 2, 3], "d": {"x": 1}}
    set_(config, ("l", 0), 9)
    set_(config, ("d", "y"), 2)
    delete(config, ("l", 1))
    delete(config, ("d", "x"))
    assert config == {"l": [9, 3], "d": {"y": 2}}
    assert get(config, ("l", 1)) == 3
    assert has(config, ("l", 1))
    assert not has(config, ("l", 2))
    assert not has(config, ("l", -1))
    assert not has(config, ("l", "0"))
    assert not has(config, ("d", "y", "z"))


def test_leaves_are_scalars_and_empty_containers() -> None:
    assert dict(leaves({"a": {"b": 1, "c": []}, "d": {}, "e": [None]})) == {
        ("a", "b"): 1,
        ("a", "c"): [],
        ("d",): {},
        ("e", 0): None,
    }
    assert list(leaves({})) == []


def test_flatten_escapes_the_dots_of_keys() -> None:
    assert flatten({"observation.state": {"shape": [7]}, "a": 1}) == {r"observation\.state.shape.0": 7, "a": 1}


def test_nearest_finds_a_slip_and_a_wrong_parent() -> None:
    assert nearest(CONFIG, "train.lrr")[0] == "train.lr"
    assert nearest(CONFIG, "optim.steps")[0] == "train.steps"
    assert "train.lr" in nearest(CONFIG, "lr")
    assert nearest(CONFIG, "zzzzzz") == []
    assert len(nearest(CONFIG, "features.0.nam", n=2)) == 2


def test_nearest_of_a_starred_path_names_the_items_of_a_list_once() -> None:
    near = nearest(CONFIG, "features.*.nmae")
    assert near[0] == "features.*.name"
    assert len(near) == len(set(near))
    assert find(CONFIG, near[0])


def test_a_pattern_matches_by_segment() -> None:
    assert matches("features.*.w", ("features", 3, "w"))
    assert not matches("features.*.w", ("features", "w"))
    assert not matches("features.*.w", ("features", 3, "v", "w"))
    assert matches("features.3.w", ("features", 3, "w"))
    assert matches("observation.state.shape", ("observation.state", "shape"))
    assert matches("*.state", ("observation", "state"))
    assert not matches(r"\*", ("a",))
    assert not matches("a", ())


def test_a_difference_names_only_what_differs() -> None:
    old = {"a": 1, "b": {"c": 2, "gone": 3}, "l": [1, 2], "n": math.nan, "t": 1}
    new = {"a": 1, "b": {"c": 5, "come": None}, "l": [1], "n": math.nan, "t": 1.0}
    assert diff(old, new) == {
        "b.c": {"old": 2, "new": 5},
        "b.gone": {"old": 3},
        "l.1": {"old": 2},
        "t": {"old": 1, "new": 1.0},
        "b.come": {"new": None},
    }


def test_one_and_true_differ() -> None:
    assert diff({"a": 1}, {"a": True}) == {"a": {"old": 1, "new": True}}
    assert not same([1], [True])
    assert same({"a": [math.nan]}, {"a": [math.nan]})


@given(configs)
def test_the_text_of_a_place_leads_back_to_it(config: dict[str, Any]) -> None:
    for place in places(config):
        assert find(config, show(place)) == [place]
        assert matches(show(place), place)


@given(configs, st.text(alphabet="ab.*[]0\\=", max_size=8))
def test_every_match_exists_and_fits_the_pattern(config: dict[str, Any], path: str) -> None:
    for place in find(config, path):
        assert has(config, place)
        assert matches(path, place)


@given(configs)
def test_nothing_differs_from_itself(config: dict[str, Any]) -> None:
    assert diff(config, config) == {}
    assert same(config, config)


@given(configs, configs)
def test_a_difference_applied_to_the_old_leaves_gives_the_new_leaves(old: dict[str, Any], new: dict[str, Any]) -> None:
    result = flatten(old)
    for path, change in diff(old, new).items():
        if "new" in change:
            result[path] = change["new"]
        else:
            del result[path]
    assert same(result, flatten(new))


@given(configs, st.data())
def test_a_difference_between_configs_of_one_shape_is_that_of_their_leaves(
    config: dict[str, Any], data: st.DataObject
) -> None:
    new = copy.deepcopy(config)
    for place, _ in list(leaves(config)):
        if data.draw(st.booleans()):
            set_(new, place, data.draw(st.sampled_from([0, 0.0, False, None, "", math.nan, {}, []])))
    before, after = dict(leaves(config)), dict(leaves(new))
    changed = [place for place in before if not same(before[place], after[place])]
    assert same(diff(config, new), {show(place): {"old": before[place], "new": after[place]} for place in changed})
    assert list(diff(config, new)) == [show(place) for place in changed]
