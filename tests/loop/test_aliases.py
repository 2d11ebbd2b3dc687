"""A lab file may give metrics other names, and groups for `looplab show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.loop.setup import compared_changes

LOOPLAB = Path(sys.executable).with_name("looplab")
LAB = """
study: s
launch: {command: ["{python}", -I, -S, -c, "print('step: 1 mass: 0.5 l1: 2 other: 3')"]}
base: base.json
objective: {metric: train/mass, goal: max}
measure:
  aliases: {train/l1_loss: l1, train/mass: [total, mass]}
  groups: {transport: [train/mass, train/never], losses: train/l1_loss}
slots: {count: 1, gpus: none}
"""


def test_other_names_of_a_metric_are_the_same_metric_and_groups_order_the_table(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(LAB)
    (tmp_path / "base.json").write_text("{}")
    subprocess.run([LOOPLAB, "run"], cwd=tmp_path, check=True, capture_output=True)
    summary = json.loads(next((tmp_path / "outputs/s").glob("*/record/summary.json")).read_text())
    assert summary["objective"]["value"] == 0.5
    assert {"train/mass", "train/l1_loss", "other"} <= set(summary["metrics"])
    shown = subprocess.run([LOOPLAB, "show"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    rows = [line.split()[:2] for line in shown.splitlines() if line.split()[:1] in (["losses"], ["transport"], ["-"])]
    assert rows == [["transport", "train/mass"], ["losses", "train/l1_loss"], ["-", "other"]]


def test_aliases_have_no_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(LAB.replace("{train/l1_loss: l1, train/mass: [total, mass]}", "standard"))
    with pytest.raises(LabError, match=r"measure\.aliases takes keys with values, not 'standard'"):
        load_lab(tmp_path)


def test_groups_do_not_change_what_runs_are_compared_by() -> None:
    changes = ["study.measure.groups.losses", "study.measure.aliases.loss", "study.measure.goals.mass"]
    assert compared_changes(changes) == ["measure.aliases.loss", "measure.goals.mass"]
