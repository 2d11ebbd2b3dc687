"""Edits that have no effect, and knobs whose key the base lacks, are told where people look."""

from __future__ import annotations

from typing import Any

import pytest

DERIVED = {"derive": {"steps": "train.batch // 16"}}


@pytest.mark.slow
def test_an_edit_of_a_derived_key_is_told_by_propose_plan_run_and_show(lab: Any) -> None:
    lab.configure(**DERIVED)
    said = "steps is derived: 9 → 2: train.batch // 16"
    proposed = lab("propose", "--change", "steps@set=9", "--change", "train.lr@set=0.2", "--parent", "base")
    assert said in proposed.out
    assert said in lab("plan", "--rounds", "1").out
    assert said in lab("run", "--rounds", "1").out
    assert said in lab("show", "2").out


def test_a_program_that_edits_only_a_derived_key_is_told_the_derivation(lab: Any) -> None:
    lab.configure(**DERIVED, proposers=[{"rules": "rules.yaml"}])
    lab.write("rules.yaml", "rules:\n  - {name: more, when: objective > 0, edits: ['steps@set=9']}\n")
    assert "steps is derived: 9 → 2: train.batch // 16" in lab("run", "--rounds", "2").out


@pytest.mark.slow
def test_rules_and_search_use_a_knob_that_the_base_lacks(lab: Any) -> None:
    knobs = {**lab.study["knobs"], "train.clip": {"type": "float", "low": 0.1, "high": 10, "default": 1}}
    lab.configure(knobs=knobs, proposers=[{"rules": "rules.yaml"}])
    lab.write(
        "rules.yaml",
        "rules:\n  - {name: clip, when: config.train.clip == 1, edits: ['train.clip@mul=2'], once: true}\n",
    )
    assert "1.0 (default)" in lab("check").out
    lab("run", "--rounds", "2")
    assert lab("show", "2", "--json").json()["changes"]["parent"] == {"train.clip": {"new": 2.0}}
    lab.configure(knobs=knobs, proposers=[{"search": "random"}])
    lab("run", "--rounds", "3")
    drawn = lab("show", "LATEST", "--json").json()["changes"]["base"]
    assert "train.clip" in drawn
