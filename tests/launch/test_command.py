"""From a config to an argv: templates, flags, Hydra overrides, environment variables, programs."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.paths import show
from looplab.errors import LabError
from looplab.launch.command import Rendering, build_argv, fill_template, find_program, render, render_environment

CONFIG: dict[str, Any] = {
    "train": {"learning_rate": 1e-5, "steps": 100, "anneal": True, "clip": False, "note": None},
    "layers": [64, 32],
    "name": "a b",
}


def flags(config: dict[str, Any], **how: Any) -> list[str]:
    return render(config, Rendering(as_="flags", **how))


def hydra(config: dict[str, Any], changed: dict[str, bool] | None = None, **how: Any) -> list[str]:
    return render(config, Rendering(as_="hydra", **how), changed)


# -- templates


def test_variables_are_filled_in_and_double_braces_stand_for_themselves() -> None:
    assert fill_template("{run_dir}/x-{n}", {"run_dir": "/r", "n": "1"}, "here") == "/r/x-1"
    assert fill_template("{{n}} {n}", {"n": "1"}, "here") == "{n} 1"
    assert fill_template("{not a name} {", {}, "here") == "{not a name} {"


def test_what_was_filled_in_is_not_filled_again() -> None:
    assert fill_template("{a}", {"a": "{b}", "b": "no"}, "here") == "{b}"


def test_an_unknown_variable_is_reported_with_the_known_ones() -> None:
    with pytest.raises(LabError, match=r"launch\.env\.X: unknown variable \{dir\}.*\{config\}, \{run_dir\}"):
        fill_template("{dir}", {"run_dir": "/r", "config": "c"}, "launch.env.X")


def test_a_variable_never_becomes_two_arguments() -> None:
    assert build_argv(["{p}", "--out", "{d}"], {"p": "python", "d": "/a b"}) == ["python", "--out", "/a b"]


@pytest.mark.parametrize("place", ["{flags}", "{overrides}"])
def test_the_rendered_config_replaces_its_placeholder(place: str) -> None:
    assert build_argv(["t", place, "--end"], {}, ["--a", "1"], ["--extra"]) == ["t", "--a", "1", "--end", "--extra"]


def test_the_rendered_config_goes_to_the_end_without_a_placeholder() -> None:
    assert build_argv(["t", "--first"], {}, ["--a", "1"], ["--extra"]) == ["t", "--first", "--a", "1", "--extra"]


# -- flags


def test_flags_are_dotted_and_kebab_by_default() -> None:
    assert flags(CONFIG) == [
        "--train.learning-rate", "1e-05", "--train.steps", "100", "--train.anneal", "--train.no-clip",
        "--layers", "[64, 32]", "--name", "a b",
    ]  # fmt: skip


def test_flags_may_be_flat_and_snake() -> None:
    assert flags(CONFIG, keys="flat", case="snake") == [
        "--learning_rate", "1e-05", "--steps", "100", "--anneal", "--no_clip", "--layers", "[64, 32]", "--name", "a b",
    ]  # fmt: skip


def test_flags_may_have_an_equals_sign_and_booleans_a_value() -> None:
    assert flags({"lr": 0.1, "on": True, "off": False}, separator="equals", booleans="value") == [
        "--lr=0.1", "--on=True", "--off=False",
    ]  # fmt: skip
    assert flags({"on": True}, booleans="value") == ["--on", "True"]


def test_nothing_is_said_about_what_is_none() -> None:
    assert flags({"a": None, "b": {"c": None}}) == []
    assert flags({}) == []


def test_lists_and_empty_dicts_are_one_argument() -> None:
    assert flags({"a": [], "b": {}, "c": [{"x": 1}, None, "y"]}) == [
        "--a", "[]", "--b", "{}", "--c", '[{"x": 1}, null, "y"]',
    ]  # fmt: skip


def test_top_level_keys_can_be_skipped() -> None:
    assert flags({"a": {"x": 1}, "b": {"a": 2}, "c": 3}, skip=("a", "c")) == ["--b.a", "2"]


def test_only_what_was_changed_may_be_rendered() -> None:
    rendering = Rendering(as_="flags", only="changed")
    changed = {"train.steps": False, "layers.1": False}
    assert render(CONFIG, rendering, changed) == ["--train.steps", "100", "--layers", "[64, 32]"]


@pytest.mark.parametrize(
    ("config", "how", "name"),
    [
        ({"a": {"lr": 1}, "b": {"lr": 2}}, {"keys": "flat"}, "--lr"),
        ({"a": {"on": True}, "b": {"on": False}}, {"keys": "flat"}, "--on"),
        ({"a_b": 1, "a-b": 2}, {}, "--a-b"),
        ({"a": {"b": 1}, "a.b": 2}, {}, "--a.b"),
    ],
)
def test_keys_that_become_one_flag_are_rejected(config: dict[str, Any], how: dict[str, Any], name: str) -> None:
    with pytest.raises(LabError, match=f"same flag: {re.escape(name)} .*skip"):
        flags(config, **how)


def test_values_that_look_like_flags_collide_with_nothing() -> None:
    assert flags({"a": "--x", "b": "--x"}, keys="flat") == ["--a=--x", "--b=--x"]


def test_a_value_that_argparse_would_take_for_an_option_is_joined_to_its_flag() -> None:
    assert flags({"a": -1, "b": -0.5, "c": -1e-05, "d": "-x"}) == ["--a", "-1", "--b", "-0.5", "--c=-1e-05", "--d=-x"]


def test_a_key_with_a_dot_in_it_is_one_name() -> None:
    config = {"observation.state": {"dim": 7}, "top.key": 1}
    assert flags(config) == ["--observation.state.dim", "7", "--top.key", "1"]
    assert flags(config, keys="flat") == ["--dim", "7", "--top.key", "1"]


keys = st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True).filter(lambda key: not key.startswith("no_"))
scalars = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).filter(lambda text: text != "--"),
    st.booleans(),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.booleans()), max_size=3),
)
configs = st.dictionaries(keys, st.one_of(scalars, st.dictionaries(keys, scalars, min_size=1, max_size=3)), max_size=5)


def parser_for(config: dict[str, Any], rendering: Rendering) -> argparse.ArgumentParser:
    """A trainer's parser that knows these keys."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for (*head, last), value in leaves(config):
        spell = (lambda text: text.replace("_", "-")) if rendering.case == "kebab" else str
        dest = ".".join([*head, last])
        flag = "--" + spell(dest)
        if isinstance(value, bool) and rendering.booleans == "switch":
            parser.add_argument(flag, dest=dest, action="store_true", default=None)
            no = "--" + spell(".".join([*head, "no_" + last]))
            parser.add_argument(no, dest=dest, action="store_false", default=None)
        elif isinstance(value, bool):
            parser.add_argument(flag, dest=dest, type={"True": True, "False": False}.__getitem__)
        else:
            parser.add_argument(flag, dest=dest, type=json.loads if isinstance(value, list) else type(value))
    return parser


def leaves(config: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in config.items():
        found += [((key, inner), v) for inner, v in value.items()] if isinstance(value, dict) else [((key,), value)]
    return found


@given(
    configs,
    st.sampled_from(["kebab", "snake"]),
    st.sampled_from(["switch", "value"]),
    st.sampled_from(["space", "equals"]),
)
def test_what_is_rendered_as_flags_is_read_back_by_argparse(
    config: dict[str, Any], case: Any, booleans: Any, separator: Any
) -> None:
    rendering = Rendering(as_="flags", case=case, booleans=booleans, separator=separator)
    read = vars(parser_for(config, rendering).parse_args(render(config, rendering)))
    assert read == {".".join(key): value for key, value in leaves(config)}


# -- Hydra


def test_hydra_overrides_mark_changed_and_new_keys() -> None:
    config = {"train": {"lr": 0.1, "steps": 5}, "new": {"x": True}, "layers": [1, 2]}
    assert hydra(config, {"train.lr": False, "new.x": True, "layers.0": False}) == [
        "train.lr=0.1", "+new.x=true", "layers=[1,2]",
    ]  # fmt: skip
    assert hydra(config, {}) == []
    assert hydra(config, {"train.lr": False}, only="all")[:2] == ["train.lr=0.1", "train.steps=5"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (1e-5, "1e-05"),
        (float("inf"), "inf"),
        ("adam", "adam"),
        ("a/b.c:d-e_f", "a/b.c:d-e_f"),
        ("", "''"),
        ("a b", "'a b'"),
        ("1", "'1'"),
        ("null", "'null'"),
        ("True", "'True'"),
        ("NaN", "'NaN'"),
        ("a,b", "'a,b'"),
        ("ä", "'ä'"),
        ("it's", r"'it\'s'"),
        ("C:\\x", r"'C:\x'"),
        ("end\\", r"'end\\'"),
        ("\\'", r"'\\\''"),
        (["a", 1, [None]], "[a,1,[null]]"),
        ([{"k": "a b", "l": False}], "[{k:'a b',l:false}]"),
        ({}, "{}"),
    ],
)
def test_values_are_written_in_hydras_grammar(value: object, written: str) -> None:
    # Each of these was read back by Hydra 1.3 as the value it stands for.
    assert hydra({"k": value}) == [f"k={written}"]


@pytest.mark.parametrize("config", [{"a b": 1}, {"a=b": 1}, {"é": 1}, {"0": 1}, {"a.b": 1}, {"k": [{"null": 1}]}])
def test_a_key_that_hydra_cannot_read_is_rejected(config: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="Hydra"):
        hydra(config)


# -- environment variables


def test_a_config_may_be_environment_variables() -> None:
    config = {"train": {"learning_rate": 0.1, "on": True}, "a-b": None, "layers": [1, 2], "x.y": "é"}
    assert render_environment(config, Rendering(as_="env", prefix="MY_")) == {
        "MY_TRAIN__LEARNING_RATE": "0.1",
        "MY_TRAIN__ON": "True",
        "MY_A_B": "null",
        "MY_LAYERS": "[1, 2]",
        "MY_X_Y": "é",
    }
    assert render_environment(config, Rendering(as_="flags")) == {}
    assert render(config, Rendering(as_="env")) == []


def test_keys_that_become_one_variable_are_rejected() -> None:
    with pytest.raises(LabError, match="same variable: A__B"):
        render_environment({"a": {"b": 1}, "A": {"B": 2}}, Rendering(as_="env"))


@given(configs)
def test_every_key_has_its_variable(config: dict[str, Any]) -> None:
    try:
        env = render_environment(config, Rendering(as_="env"))
    except LabError:
        return  # a__b beside a: {b: …}
    assert len(env) == len(leaves(config))
    for key, value in leaves(config):
        if isinstance(value, str):
            assert env["__".join(key).upper()] == value, show(key)


# -- programs


def test_a_program_is_found_on_the_path_of_the_run(tmp_path: Path) -> None:
    program = tmp_path / "bin/train"
    program.parent.mkdir()
    program.write_text("#!/bin/true\n")
    program.chmod(0o755)
    assert find_program("train", Path("/"), {"PATH": f"/nowhere:{program.parent}"}) == str(program)
    assert find_program("train", tmp_path, {"PATH": "bin:/usr/bin"}) == str(program)
    assert find_program("bin/train", tmp_path, {}) == str(program)
    assert find_program(str(program), Path("/"), {}) == str(program)


def test_a_program_is_found_on_the_path_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_program("true", Path("/"), {}) in ("/usr/bin/true", "/bin/true")
    monkeypatch.delenv("PATH")
    assert find_program("true", Path("/"), {}) in ("/usr/bin/true", "/bin/true")


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    for name, why in [("./plain", "not executable"), ("./folder", "a folder"), ("./none", "does not exist")]:
        with pytest.raises(LabError, match=rf"/{name[2:]} .*{why} .*launch\.command"):
            find_program(name, tmp_path, {})
    with pytest.raises(LabError, match=r"'no-such-trainer' is not on PATH.*launch\.command"):
        find_program("no-such-trainer", tmp_path, {})


# -- what argparse takes


def test_store_true_switches_are_given_or_left_out() -> None:
    config = {"wandb": True, "neptune": False, "train": {"compile": False, "anneal_lr": True}}
    assert flags(config, booleans="present") == ["--wandb", "--train.anneal-lr"]
    mixed = flags(config, booleans="value", store_true=["wandb", "neptune", "train.compile"])
    assert mixed == ["--wandb", "--train.anneal-lr", "True"]


@pytest.mark.parametrize("separator", ["space", "equals"])
def test_a_false_that_argparse_reads_by_bool_stays_false(separator: str) -> None:
    """`type=bool` takes every text but the empty one for true, "False" too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=bool, default=True)
    parser.add_argument("--anneal", type=bool, default=False)
    wanted = {"compile": False, "anneal": True}
    assert vars(parser.parse_args(flags(wanted, booleans="empty", separator=separator))) == wanted
    assert parser.parse_args(flags(wanted, booleans="value")).compile is True


def test_lists_are_one_value_or_several() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="*")
    assert parser.parse_args(flags({"layers": [64, -32]}, lists="spread")).layers == [64, -32]
    assert parser.parse_args(flags({"layers": []}, lists="spread")).layers == []
    assert flags({"layers": [64, 32]}) == ["--layers", "[64, 32]"]
    with pytest.raises(LabError, match="would be read as an option"):
        flags({"names": ["a", "-b"]}, lists="spread")
    with pytest.raises(ValueError, match="separator: space"):
        Rendering(as_="flags", lists="spread", separator="equals")


def test_any_key_may_be_skipped_with_what_is_below_it() -> None:
    config = {"env": {"num_envs": 4, "num_drones": 8}, "autopilot": {"mode": "x"}, "env_name": "e"}
    assert flags(config, skip=["env.num_drones", "autopilot", "env_name"]) == ["--env.num-envs", "4"]


# -- values of the config in a command

COMMAND = ["puffer", "train", "{config.env_name}", "{flags}", "--out={config.train.steps}"]


def test_a_command_may_name_values_of_the_config() -> None:
    config = {**CONFIG, "env_name": "puffer_drone"}
    assert build_argv(COMMAND, {}, ["--a"], config=config) == ["puffer", "train", "puffer_drone", "--a", "--out=100"]
    assert fill_template(
        "{config.train.anneal} {config.layers} {config.layers.0} {config}", {"config": "/c"}, "x", config
    ) == ("True [64, 32] 64 /c")


def test_a_missing_config_key_is_reported_with_similar_ones() -> None:
    with pytest.raises(LabError, match=r"launch\.command: \{config\.train\.step\}.*not in the config.*train\.steps"):
        fill_template("{config.train.step}", {}, "launch.command", CONFIG)
    with pytest.raises(LabError, match="is not a single value"):
        fill_template("{config.train}", {}, "launch.command", CONFIG)
