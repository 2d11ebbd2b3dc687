"""Old names of keys of the lab file."""

from __future__ import annotations

from pathlib import Path

import pytest

from looplab.config.lab import load_lab
from looplab.errors import LabError

LAB = """study: toy
launch: {command: ["true"], linger: 3s}
objective: {metric: loss, goal: min}
judge:
  floor: 4
  most: 9
"""


def lab_of(folder: Path, text: str) -> Path:
    (folder / "lab.yaml").write_text(text)
    return folder


def test_old_names_work_and_are_noted_with_their_line(tmp_path: Path) -> None:
    lab = load_lab(lab_of(tmp_path, LAB))
    study = lab.study("toy")
    assert study.judge is not None
    assert (study.launch.cleanup_timeout, study.judge.baseline_seeds, study.judge.max_replicates) == (3.0, 4, 9)
    assert [note.partition(";")[0] for note in lab.notes] == [
        "lab.yaml:2: launch.linger is now launch.cleanup_timeout",
        "lab.yaml:5: judge.floor is now judge.baseline_seeds",
        "lab.yaml:6: judge.most is now judge.max_replicates",
    ]


def test_new_names_need_no_note(tmp_path: Path) -> None:
    text = LAB.replace("linger", "cleanup_timeout").replace("floor", "baseline_seeds").replace("most", "max_replicates")
    assert load_lab(lab_of(tmp_path, text)).notes == ()


def test_both_names_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"unknown key 'judge.floor'"):
        load_lab(lab_of(tmp_path, LAB + "  baseline_seeds: 5\n"))
