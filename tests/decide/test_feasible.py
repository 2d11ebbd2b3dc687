"""Search where the guard refuses most of the space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.decide.test_search import Lab

import looplab
from looplab.config.lab import SearchConfig, load_lab
from looplab.decide.axes import find_axes
from looplab.decide.history import History
from looplab.decide.search import SearchProposer
from looplab.loop.setup import RunOptions, load_bases, make_guard, prepare, unsearched

DRONE = Path(looplab.__file__).parent / "recipes" / "drone"
TOPOLOGY = ("env.num_envs", "env.num_drones", "vec.num_envs", "train.bptt_horizon")


def drone_lab(root: Path) -> tuple[Lab, set[str]]:
    lab = load_lab(DRONE)
    setup = prepare(lab, lab.study(None), RunOptions())
    return Lab(root, setup.guard, setup.bases[0].config), unsearched(setup)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["auto", "random", "tpe", "qmc"])
def test_search_finds_legal_points_below_a_product_with_an_upper_bound(sampler: Any, tmp_path: Path) -> None:
    if sampler == "tpe":
        pytest.importorskip("optuna")
    lab, fixed = drone_lab(tmp_path)
    proposer = SearchProposer(
        SearchConfig(sampler=sampler), lab.guard, lab.base, "max", History(lab.study, lab.root), fixed
    )
    found = []
    for _ in range(22):
        (proposal,) = proposer.propose(lab.study, 1)
        run, config = lab.plan(proposal)  # raises if the guard refuses it
        lab.end(run, config, -abs(config["train"]["ent_coef"] - 0.3))
        found.append(lab.guard.knob_values(config))
    assert len({str(values) for values in found}) == 22
    for key in TOPOLOGY:  # they fill the legal part of the space instead of its edge
        assert len({values[key] for values in found}) >= 6, key
    assert all(64 <= values["train.batch_size"] <= 65536 for values in found)
    assert len({values["train.batch_size"] for values in found}) >= 12


def test_derived_keys_the_seed_and_warm_starts_are_not_searched(tmp_path: Path) -> None:
    lab, fixed = drone_lab(tmp_path)
    axes, _ = find_axes(lab.guard, lab.base, fixed)
    searched = {axis.path for axis in axes}
    assert searched.isdisjoint({"train.batch_size", "train.seed", "autopilot.resume_mode", "autopilot.resume_from"})
    assert searched >= {*TOPOLOGY, "train.learning_rate"}


def test_a_repaired_draw_keeps_what_the_refusal_does_not_depend_on(tmp_path: Path) -> None:
    lab, fixed = drone_lab(tmp_path)
    proposer = SearchProposer(
        SearchConfig(sampler="random"), lab.guard, lab.base, "max", History(lab.study, tmp_path), fixed
    )
    from looplab.decide.sampling import generator

    high = {axis.path: axis.from_unit(1.0) for axis in proposer.axes}
    repaired = proposer._repairer.repair(high, generator(0), spread=False)
    assert repaired is not None
    assert proposer._repairer.is_allowed(repaired)
    assert {key for key in high if repaired[key] != high[key]} <= {*TOPOLOGY, "vec.num_workers"}


def test_the_recipe_lab_is_as_its_users_get_it() -> None:
    lab = load_lab(DRONE)
    study = lab.study(None)
    assert study.knobs["train.batch_size"]["high"] == 65536
    assert load_bases(lab.folder, study, RunOptions(), make_guard(study))


def test_act_ot_searches_the_keys_that_a_config_from_elsewhere_lacks() -> None:
    lab = load_lab(DRONE.with_name("act_ot"))
    study = lab.study(None)
    guard = make_guard(study)
    base = load_bases(lab.folder, study, RunOptions(), guard)[0].config
    short = {**base, "ot": {key: value for key, value in base["ot"].items() if key not in ("no_window", "sharpness")}}
    axes, left_out = find_axes(guard, short)
    assert {"ot.no_window", "ot.sharpness"} <= {axis.path for axis in axes}
    assert left_out == []
    ruling = guard.check(short, ["ot.sharpness@add=2"])
    assert ruling.config["ot"]["sharpness"] == 2.0
