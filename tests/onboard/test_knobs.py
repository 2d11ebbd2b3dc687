"""Ranges of knobs: the default is inside, and nothing in them is illegal."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from looplab.config.expression import compile_expression
from looplab.onboard import knobs
from looplab.onboard.base import Kind, ScriptSetting
from looplab.onboard.knobs import constraints, find_seed, inside, suggest, words_of

WORDS = sorted(
    knobs.RATES | knobs.DECAYS | knobs.SHARES | knobs.NEAR_ONE | knobs.SIZES | knobs.COUNTS | knobs.WEIGHTS
    | knobs.LENGTH | {"warmup", "batch", "tau", "epsilon", "decay", "min", "max", "num", "rate", "learning", "train", "start"}
)  # fmt: skip


def setting(name: str, default: Any, **more: Any) -> ScriptSetting:
    kinds: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
    return ScriptSetting(name, kinds[type(default)], default, **more)


@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    default=st.one_of(
        st.integers(-3, 10**7),
        st.floats(-1, 1e6),
        st.floats(0, 1),
        st.sampled_from([0.9, 0.99, 0.999, 0.9999999, 1.0, 0.0, 1e-8, 3e-4, 0, 1, 2, -1]),
    ),
)
@example(words=["alpha"], default=5e-324)
def test_a_default_is_inside_its_range_and_the_range_is_legal(words: list[str], default: float) -> None:
    name = "_".join(words)
    spec = suggest(setting(name, default)).spec
    if spec is None:
        return
    if "choices" in spec:
        assert default in spec["choices"]
        assert all(choice >= 0 for choice in spec["choices"])
        return
    assert spec["low"] <= default <= spec["high"]
    assert spec["low"] < spec["high"]
    assert spec["low"] >= 0
    if spec.get("log"):
        assert spec["low"] > 0
    if {"dropout", "momentum"} & set(words) and isinstance(default, float) and 0 <= default < 1:
        assert spec["high"] < 1 or set(words) & (knobs.RATES | knobs.DECAYS)


@pytest.mark.parametrize(
    ("name", "default", "role", "spec"),
    [
        ("lr", 1e-3, "knob", {"type": "float", "low": 1e-5, "high": 0.1, "log": True}),
        ("optim.learning_rate", 3e-4, "knob", {"type": "float", "low": 3e-6, "high": 0.03, "log": True}),
        ("learningRate", 0.1, "knob", {"type": "float", "low": 0.001, "high": 1.0, "log": True}),
        ("eta", 0.3, "knob", {"type": "float", "low": 0.003, "high": 1.0, "log": True}),
        ("lr_decay", 0.95, "knob", {"type": "float", "low": 0.5, "high": 0.995}),
        ("batch_size", 64, "knob", {"choices": [16, 32, 64, 128, 256]}),
        ("batch_size", 100, "knob", {"choices": [32, 64, 100, 128, 256, 512]}),
        ("num_minibatches", 4, "knob", {"choices": [1, 2, 4, 8, 16]}),
        ("dropout", 0.0, "knob", {"type": "float", "low": 0.0, "high": 0.7}),
        ("mask_prob", 0.15, "knob", {"type": "float", "low": 0.0, "high": 1.0}),
        ("l1_ratio", 0.5, "knob", {"type": "float", "low": 0.1, "high": 1.0}),
        ("subsample", 0.8, "knob", {"type": "float", "low": 0.1, "high": 1.0}),
        ("gamma", 0.99, "knob", {"type": "float", "low": 0.9, "high": 0.999}),
        ("beta2", 0.999, "knob", {"type": "float", "low": 0.99, "high": 0.9999}),
        ("momentum", 0.0, "knob", {"type": "float", "low": 0.0, "high": 0.99}),
        ("momentum", 0.9, "knob", {"type": "float", "low": 0.0, "high": 0.99}),
        ("lrate", 0.5, "knob", {"type": "float", "low": 0.005, "high": 5.0, "log": True}),
        ("tau", 0.005, "knob", {"type": "float", "low": 0.0005, "high": 0.05, "log": True}),
        ("weight_decay", 0.0, "knob", {"choices": [0.0, 1e-5, 1e-4, 1e-3, 1e-2]}),
        ("n_layer", 6, "knob", {"type": "int", "low": 3, "high": 12}),
        ("n_embd", 384, "knob", {"choices": [96, 192, 384, 768, 1536]}),
        ("epochs", 10, "length", {"type": "int", "low": 2, "high": 40, "log": True}),
        ("train_fraction", 0.8, "other", None),
        ("test_batch_size", 1000, "other", None),
        ("val_split", 0.1, "other", None),
        ("device", "cuda", "other", None),
        ("data_dir", "data", "other", None),
        ("wandb_entity", "me", "other", None),
        ("verbose", 1, "other", None),
        ("num_workers", 4, "other", None),
        ("local_rank", 0, "other", None),
        ("log_interval", 10, "other", None),
        ("max_depth", -1, "doubtful", None),
        ("seed", 0, "seed", None),
        ("random_state", 0, "seed", None),
        ("data_seed", 0, "seed", None),
        ("seed_ratio", 0.5, "other", None),
    ],
)
def test_what_a_setting_looks_like(name: str, default: Any, role: str, spec: dict[str, Any] | None) -> None:
    found = suggest(setting(name, default))
    assert found.role == role
    assert found.spec == (pytest.approx(spec) if spec is not None and "choices" not in spec else spec)


def test_choices_are_knobs_unless_they_are_devices_or_a_whole_catalogue() -> None:
    assert suggest(setting("optimizer", "sgd", choices=("sgd", "adam"))).role == "knob"
    assert suggest(setting("optimizer", "lion", choices=("sgd", "adam"))).role == "other"
    assert suggest(setting("model", "cpu", choices=("cpu", "cuda"))).role == "other"
    assert suggest(setting("arch", "m0", choices=tuple(f"m{i}" for i in range(80)))).role == "doubtful"
    assert suggest(setting("dataset", "a", choices=("a", "b"))).role == "other"


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        (["data_seed", "seed"], "seed"),
        (["split-seed", "random-state"], "random-state"),
        (["data.seed", "seed"], "seed"),
        (["trainer.seed_everything", "lr"], "trainer.seed_everything"),
        (["lr"], None),
    ],
)
def test_the_seed_is_that_of_the_training(names: list[str], seed: str | None) -> None:
    assert find_seed([setting(name, 0) for name in names]) == seed


BASE = {
    "num_envs": 4, "num_steps": 128, "num_minibatches": 4, "n_embd": 64, "n_head": 4, "learning_rate": 1e-3,
    "min_lr": 1e-4, "warmup_steps": 10, "max_steps": 100, "batch_size": 128, "micro_batch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(("prefix", "dash"), list(product(["", "train."], ["_", "-"])))
def test_constraints_hold_for_the_base_config(prefix: str, dash: str) -> None:
    values = {name.replace("_", dash): value for name, value in BASE.items()}
    rules = constraints([prefix + name for name in values], {prefix + name: value for name, value in values.items()})
    assert len(rules) >= 5
    for rule in rules:
        assert compile_expression(rule).evaluate({"train": values} if prefix else values) is True


def test_a_constraint_that_the_defaults_break_is_left_out() -> None:
    assert constraints(["n_head"], {"n_embd": 64, "n_head": 5}) == []
    assert constraints(["lr"], {"n_embd": 64, "n_head": 4, "lr": 0.1}) == []


def test_words_of_a_name() -> None:
    assert words_of("optim.learningRate") == ["optim", "learning", "rate"]
    assert words_of("--no-l2_reg") == ["no", "l2", "reg"]


@pytest.mark.parametrize(
    ("one", "spec"),
    [
        (setting("lr", 0.05, low=0.01, high=0.2), {"type": "float", "low": 0.01, "high": 0.2, "log": True}),
        (setting("batch_size", 32, high=64), {"choices": [8, 16, 32, 64]}),
        (setting("dropout", 0.1, high=0.4995), {"type": "float", "low": 0.0, "high": 0.4995}),
        (setting("rounds", 20, choices=tuple(range(1, 51))), {"type": "int", "low": 5, "high": 50, "log": True}),
        (setting("layers", 2, low=2, high=2), None),
    ],
)
def test_a_range_has_only_values_that_the_script_takes(one: ScriptSetting, spec: Any) -> None:
    assert suggest(one).spec == spec


@pytest.mark.parametrize(("bound", "kind", "below", "above"), [(1, "int", 0, 2), (1.0, "float", 0.999, 1.001)])
def test_an_open_bound_becomes_a_closed_one(bound: float, kind: str, below: float, above: float) -> None:
    assert inside(bound, kind, upper=True) == pytest.approx(below)
    assert inside(bound, kind, upper=False) == pytest.approx(above)
    assert inside(None, kind, upper=True) is None
