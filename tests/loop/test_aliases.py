"""A study may name its metrics by the canonical names of the optimal-transport recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LOOPLAB = Path(sys.executable).with_name("looplab")
LAB = """
study: s
launch: {command: ["{python}", -I, -S, -c, "print('step: 1 ot_pi_sum: 0.5 l1_loss: 2 other: 3')"]}
base: base.json
objective: {metric: train/ot_pi_sum, goal: max}
measure: {aliases: act_ot}
slots: {count: 1, gpus: none}
"""


def test_other_names_of_a_canonical_metric_are_the_same_metric(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(LAB)
    (tmp_path / "base.json").write_text("{}")
    subprocess.run([LOOPLAB, "run"], cwd=tmp_path, check=True, capture_output=True)
    summary = json.loads(next((tmp_path / "outputs/s").glob("*/record/summary.json")).read_text())
    assert summary["objective"]["value"] == 0.5
    assert {"train/ot_pi_sum", "train/l1_loss", "other"} <= set(summary["metrics"])
    shown = subprocess.run([LOOPLAB, "show"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    rows = [line.split()[:2] for line in shown.splitlines() if line.split()[:1] in (["losses"], ["transport"], ["-"])]
    assert rows == [["losses", "train/l1_loss"], ["transport", "train/ot_pi_sum"], ["-", "other"]]
