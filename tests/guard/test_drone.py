"""The whole guard of a drone study: 33 knobs, rounded environments, derived batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.config import paths
from looplab.guard import Guard, Knob

FULL: dict[str, Any] = {
    "env_name": "puffer_drone_pp",
    "train": {
        "learning_rate": 0.003,
        "ent_coef": 0.12,
        "seed": 42,
        "batch_size": 28672,
        "minibatch_size": 28672,
        "max_minibatch_size": 28672,
        "bptt_horizon": 16,
        "update_epochs": 4,
        "gae_lambda": 0.95,
        "gamma": 0.99,
        "clip_coef": 0.2,
        "vf_clip_coef": 0.2,
        "total_timesteps": 10_000_000,
        "optimizer": "muon",
        "vf_coef": 2.0,
        "max_grad_norm": 1.5,
        "checkpoint_interval": 200,
        "adam_beta1": 0.95,
        "adam_beta2": 0.999,
        "adam_eps": 1e-12,
        "anneal_lr": True,
        "torch_deterministic": True,
        "cpu_offload": False,
        "compile": False,
        "compile_fullgraph": True,
        "compile_mode": "max-autotune-no-cudagraphs",
        "precision": "float32",
        "device": "mps",
        "data_dir": "experiments",
    },
    "env": {"num_envs": 4, "num_drones": 8},
    "vec": {"backend": "Multiprocessing", "num_workers": 28, "num_envs": 56, "seed": 42},
    "autopilot": {"resume_mode": "fresh", "resume_from": "latest", "save_strategy": "best"},
}
SPECS: dict[str, dict[str, Any]] = {
    "train.learning_rate": {"type": "float", "low": 1e-6, "high": 1, "log": True},
    "train.ent_coef": {"type": "float", "low": 0, "high": 1},
    "train.seed": {"type": "int", "low": 0, "high": 2**31 - 1},
    "train.bptt_horizon": {"type": "int", "low": 1, "high": 512},
    "train.update_epochs": {"type": "int", "low": 1, "high": 32},
    "train.gae_lambda": {"type": "float", "low": 0, "high": 1},
    "train.gamma": {"type": "float", "low": 0, "high": 0.999999},
    "train.clip_coef": {"type": "float", "low": 0, "high": 1},
    "train.vf_clip_coef": {"type": "float", "low": 0, "high": 10},
    "train.total_timesteps": {"type": "int", "low": 1e3, "high": 1e9, "log": True},
    "train.optimizer": {"choices": ["muon", "adam", "adamw"]},
    "train.vf_coef": {"type": "float", "low": 0, "high": 10},
    "train.max_grad_norm": {"type": "float", "low": 0, "high": 100},
    "train.checkpoint_interval": {"type": "int", "low": 1, "high": 1_000_000},
    "train.adam_beta1": {"type": "float", "low": 0, "high": 0.999999},
    "train.adam_beta2": {"type": "float", "low": 0, "high": 0.999999},
    "train.adam_eps": {"type": "float", "low": 1e-14, "high": 1e-2, "log": True},
    "train.anneal_lr": {"type": "bool"},
    "train.torch_deterministic": {"type": "bool"},
    "train.cpu_offload": {"type": "bool"},
    "train.compile": {"type": "bool"},
    "train.compile_fullgraph": {"type": "bool"},
    "train.precision": {"choices": ["float32", "bfloat16", "float16"]},
    "train.compile_mode": {"choices": ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]},
    "train.device": {"choices": ["mps", "cpu"]},
    "train.batch_size": {"type": "int", "low": 64, "high": 65536},
    "env.num_envs": {"type": "int", "low": 1, "high": 256},
    "env.num_drones": {"type": "int", "low": 1, "high": 256},
    "vec.num_workers": {"type": "int", "low": 1, "high": 256},
    "vec.num_envs": {"type": "int", "low": 1, "high": 256},
    "autopilot.resume_mode": {"choices": ["fresh", "continue"]},
    "autopilot.resume_from": {"type": "str"},
    "autopilot.save_strategy": {"choices": ["best", "latest", "all"]},
}
NORMALISE = [("vec.num_envs", "ceil_to(vec.num_envs, vec.num_workers)")]
# Written so that the order in the file is not the order in which they can be computed.
DERIVE = {
    "train.max_minibatch_size": "train.minibatch_size",
    "train.minibatch_size": "train.batch_size",
    "train.batch_size": "env.num_envs * env.num_drones * vec.num_envs * train.bptt_horizon",
}
CONSTRAINTS = ["vec.num_envs % vec.num_workers == 0", "train.minibatch_size <= train.batch_size"]
KNOBS = {path: Knob.make(path, spec) for path, spec in SPECS.items()}
GUARD = Guard(KNOBS, NORMALISE, DERIVE, CONSTRAINTS)


def test_the_full_profile_is_admitted_as_it_is() -> None:
    ruling = GUARD.admit(FULL)
    assert ruling.ok
    assert ruling.config == FULL
    assert ruling.config is not FULL
    assert ruling.changes == ()
    assert ruling.config["train"]["batch_size"] == 28672


def test_the_quick_profile_derives_its_batch() -> None:
    ruling = GUARD.check(FULL, ["vec.num_envs@set=4", "vec.num_workers@set=4", "train.total_timesteps@set=1e6"])
    train = ruling.config["train"]
    assert (train["batch_size"], train["minibatch_size"], train["max_minibatch_size"]) == (2048, 2048, 2048)
    assert type(train["batch_size"]) is int
    assert (train["total_timesteps"], type(train["total_timesteps"])) == (1_000_000, int)
    changed = {change.path: (change.old, change.new) for change in ruling.changes}
    assert changed == {
        "vec.num_envs": (56, 4),
        "vec.num_workers": (28, 4),
        "train.total_timesteps": (10_000_000, 1_000_000),
        "train.batch_size": (28672, 2048),
        "train.minibatch_size": (28672, 2048),
        "train.max_minibatch_size": (28672, 2048),
    }


def test_environments_are_rounded_up_to_the_workers_with_a_note() -> None:
    ruling = GUARD.check(FULL, ["vec.num_envs@set=30", "vec.num_workers@set=4"])
    config = ruling.config
    assert config["vec"]["num_envs"] == 32
    assert config["train"]["batch_size"] == 4 * 8 * 32 * 16
    assert "vec.num_envs 30 → 32: ceil_to(vec.num_envs, vec.num_workers)" in ruling.notes
    assert next(change for change in ruling.changes if change.path == "vec.num_envs").new == 32


def test_a_rounded_value_must_still_be_in_range() -> None:
    ruling = GUARD.check(FULL, ["vec.num_envs@set=255", "env.num_envs@set=1", "env.num_drones@set=1"])
    (problem,) = ruling.problems
    assert (problem.key, problem.value, problem.rule, problem.nearest) == ("vec.num_envs", 280, "knob range", 256)
    assert "280 is above 256 (normalised as ceil_to(vec.num_envs, vec.num_workers))" in problem.message
    assert ruling.config is None


def test_a_derived_value_must_be_in_the_range_of_its_key() -> None:
    (problem,) = GUARD.check(FULL, ["train.bptt_horizon@set=64"]).problems
    assert (problem.key, problem.value) == ("train.batch_size", 114688)
    assert "derived as env.num_envs * env.num_drones" in problem.message


def test_without_the_normaliser_the_constraint_shows_its_values() -> None:
    guard = Guard(KNOBS, derive=DERIVE, constraints=CONSTRAINTS)
    (problem,) = guard.check(FULL, ["vec.num_envs@set=30", "vec.num_workers@set=4"]).problems
    assert problem.rule == "constraint"
    assert problem.message == "vec.num_envs % vec.num_workers == 0 is false: vec.num_envs=30, vec.num_workers=4"
    assert problem.value == {"vec.num_envs": 30, "vec.num_workers": 4}


def test_a_whole_number_is_a_fine_learning_rate() -> None:
    ruling = GUARD.check(FULL, ["train.learning_rate@set=1"])
    assert ruling.config["train"]["learning_rate"] == 1.0
    assert type(ruling.config["train"]["learning_rate"]) is float


@pytest.mark.parametrize(
    ("edit", "nearest"),
    [
        ("train.learning_rat@set=0.01", "train.learning_rate"),
        ("train.entropy_coef@set=0.01", "train.ent_coef"),
        ("learning_rate@mul=2", "train.learning_rate"),
        ("vec.num_env@set=4", "vec.num_envs"),
        ("env.drones@new=4", "env.num_drones"),
    ],
)
def test_an_unknown_key_is_rejected_naming_the_nearest_knob(edit: str, nearest: str) -> None:
    (problem,) = GUARD.check(FULL, [edit]).problems
    assert problem.rule == "not a knob"
    assert problem.nearest == nearest
    assert nearest in problem.message


def test_a_key_of_the_config_that_is_not_a_knob_is_rejected() -> None:
    for edit in [
        "vec.backend@set=Serial",
        "train.data_dir@set=/tmp",
        "vec.seed@add=1",
        "train.data_dir@del",
        "vec@del",
    ]:
        ruling = GUARD.check(FULL, [edit])
        assert {problem.rule for problem in ruling.problems} >= {"not a knob"}, edit
        assert ruling.config is None


def test_every_problem_is_reported_at_once() -> None:
    edits = [
        "train.gamma@set=1.5",
        "train.optimizer@set=adamm",
        "train.lerning_rate@set=0.1",
        "train.compile@set=3",
        "train.update_epochs@set=2.5",
        "train.ent_coef@st=0.1",
        "train.seed@set=-1",
        "vec.num_workers@set=0",
        "train.clip_coef@mul=0.5",
    ]
    ruling = GUARD.check(FULL, edits)
    found = {problem.key: (problem.rule, problem.nearest) for problem in ruling.problems}
    assert found == {
        "train.gamma": ("knob range", 0.999999),
        "train.optimizer": ("knob range", "adam"),
        "train.lerning_rate": ("not a knob", "train.learning_rate"),
        "train.compile": ("edit", False),
        "train.update_epochs": ("edit", 2),
        "train.ent_coef": ("edit", None),
        "train.seed": ("knob range", 0),
        # The modulo by 0 that follows from it is not reported.
        "vec.num_workers": ("knob range", 1),
    }
    assert len(ruling.problems) == len(found)
    assert ruling.config is None
    assert "train.clip_coef" in {change.path for change in ruling.changes}


def test_an_edit_of_a_derived_key_is_overridden_with_a_note() -> None:
    ruling = GUARD.check(FULL, ["train.batch_size@set=4096", "vec.num_envs@set=28"])
    assert ruling.config["train"]["batch_size"] == 14336
    assert any("train.batch_size is derived: 4096 → 14336" in note for note in ruling.notes)
    right = GUARD.check(FULL, ["train.batch_size@set=14336", "vec.num_envs@set=28"])
    assert right.ok
    assert not any("derived" in note for note in right.notes)


def test_edits_that_change_nothing_are_not_a_problem_but_noted() -> None:
    for edits in [
        [],
        ["train.gamma@set=0.99"],
        ["train.gamma@mul=1"],
        ["vec.num_envs@set=30"],
        ["train.batch_size@set=9"],
    ]:
        ruling = GUARD.check(FULL, edits)
        assert ruling.ok
        assert ruling.changes == ()
        assert ruling.config == FULL
        assert "changes nothing" in ruling.notes


def test_the_parent_is_never_touched() -> None:
    before = copy.deepcopy(FULL)
    GUARD.check(FULL, ["vec.num_envs@set=5", "train.gamma@set=7", "autopilot@del"])
    GUARD.admit(FULL)
    assert before == FULL


def test_the_values_of_the_knobs_are_listed_by_path() -> None:
    values = GUARD.knob_values(FULL)
    assert len(values) == len(SPECS)
    assert values["vec.num_envs"] == 56
    assert values["autopilot.resume_from"] == "latest"
    assert "vec.backend" not in values


# --- whatever is proposed ---

_LEAVES = [*SPECS, "train.minibatch_size", "train.max_minibatch_size", "vec.backend", "train.nope", "nope"]
_VALUES = st.one_of(
    st.integers(-5, 300),
    st.integers(0, 10**10),
    st.floats(-2, 2, allow_nan=False),
    st.sampled_from(["adam", "cpu", "all", "best", "", True, False, None, 1e-5, [1], {"a": 1}, 64.0]),
)
_EDITS = st.one_of(
    st.builds(
        lambda path, op, value: f"{path}@{op}={value}",
        st.sampled_from(_LEAVES),
        st.sampled_from(["mul", "add", "max", "min"]),
        st.sampled_from([0.5, 1, 2, 3, -1, 0.99]),
    ),
    st.builds(lambda path, value: f"{path}@set={_json(value)}", st.sampled_from(_LEAVES), _VALUES),
    st.builds(lambda path, value: f"{path}@new={_json(value)}", st.sampled_from(_LEAVES), _VALUES),
    st.builds(lambda path: f"{path}@del", st.sampled_from([*SPECS, "vec", "train.data_dir"])),
)
_LEGAL = st.one_of(
    [
        st.builds(lambda path, value: f"{path}@set={value}", st.just(path), st.sampled_from(values))
        for path, values in {
            "train.learning_rate": [1, 1e-6, 0.02],
            "train.bptt_horizon": [1, 8, 16],
            "env.num_envs": [1, 2, 4],
            "env.num_drones": [1, 4, 8],
            "vec.num_workers": [1, 3, 7, 28],
            "vec.num_envs": [1, 5, 30, 56],
            "train.optimizer": ["adam", "muon"],
            "train.compile": ["true", "false"],
            "train.minibatch_size": [7],
        }.items()
    ]
)


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


@settings(max_examples=300, deadline=None)
@given(st.lists(_EDITS | _LEGAL, max_size=5) | st.lists(_LEGAL, max_size=6))
def test_what_the_guard_lets_pass_is_legal_and_what_it_does_is_repeatable(edits: list[str]) -> None:
    ruling = GUARD.check(FULL, edits)
    assert GUARD.check(FULL, edits) == ruling
    if not ruling.ok:
        assert ruling.config is None
        assert all(problem.message for problem in ruling.problems)
        return
    config = ruling.config
    for path, value in GUARD.knob_values(config).items():
        assert KNOBS[path].problem(value) is None
        assert type(value) is KNOBS[path].python_type()
    assert config["vec"]["num_envs"] % config["vec"]["num_workers"] == 0
    batch = (
        config["env"]["num_envs"]
        * config["env"]["num_drones"]
        * config["vec"]["num_envs"]
        * config["train"]["bptt_horizon"]
    )
    assert all(config["train"][key] == batch for key in ("batch_size", "minibatch_size", "max_minibatch_size"))
    differing = paths.diff(FULL, config)
    assert set(differing) <= {*SPECS, *DERIVE, "vec.num_envs"}
    assert {change.path for change in ruling.changes} == set(differing)
    again = GUARD.admit(config)
    assert again.ok
    assert again.config == config
    assert again.changes == ()
