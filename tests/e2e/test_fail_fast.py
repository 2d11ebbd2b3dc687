"""A study whose base config does not work stops at once and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

SEARCH = [{"search": {"sampler": "random"}}]


@pytest.fixture
def searched(lab: Any) -> Any:
    lab.configure(proposers=SEARCH, budget={"runs": 6})
    return lab


def test_a_base_that_fails_stops_the_study_and_shows_its_last_line(searched: Any) -> None:
    searched.write(
        "train.py", "import sys\nprint('loading')\nsys.exit('train.py: error: unrecognized: --no-dry-run')\n"
    )
    done = searched("run", "--concurrency", "1", code=1)
    assert searched.count() == 1
    assert "unrecognized: --no-dry-run" in done.out
    assert "unrecognized: --no-dry-run" in searched("show", "1").out
    assert "looplab resume" in done.out
    assert "--keep-going" in done.out


def test_a_base_without_its_objective_stops_the_study_and_names_what_was_measured(searched: Any) -> None:
    searched.configure(objective={"metric": "losss", "goal": "min"})
    done = searched("run", "--concurrency", "1", code=1)
    assert searched.count() == 1
    assert "'losss'" in done.out
    assert "loss" in done.out
    assert "looplab remeasure" in done.out


def test_told_to_keep_going_it_does(searched: Any) -> None:
    searched.base(exit=3)
    searched("run", "--keep-going", code=1)  # no run has a result
    assert searched.count() == 6
    assert searched.count(status="failed") == 6


def test_a_lab_file_may_say_keep_going(searched: Any) -> None:
    searched.base(exit=3)
    searched.configure(keep_going=True)
    searched("run", code=1)
    assert searched.count() == 6


@pytest.mark.slow
def test_a_fixed_trainer_is_tried_again_by_resume(searched: Any) -> None:
    trainer = (searched.folder / "train.py").read_text()
    searched.write("train.py", "raise SystemExit(1)\n")
    searched("run", "--concurrency", "1", code=1)
    searched("resume", code=1)  # it still fails, once more
    assert searched.count() == 2
    searched.write("train.py", trainer)
    searched("resume")
    assert searched.count() == 6
    assert searched.count(role="base") == 3
    assert searched.count(status="ok") == 4
    assert searched("verify").code == 0


def test_one_of_several_bases_that_works_is_enough(searched: Any) -> None:
    searched.base("configs/bad.json", exit=1)
    searched.configure(base=["configs/bad.json", "configs/base.json"])
    searched("run")
    assert searched.count() == 6


def test_all_of_several_bases_must_fail(searched: Any) -> None:
    searched.base("configs/bad.json", exit=1)
    searched.base(exit=2)
    searched.configure(base=["configs/bad.json", "configs/base.json"])
    searched("run", "--concurrency", "1", code=1)
    assert searched.count(role="base") == searched.count() == 2


def test_a_study_in_which_nothing_was_measured_exits_with_1(searched: Any) -> None:
    searched.configure(objective={"metric": "reward", "goal": "max"}, budget={"runs": 2})
    done = searched("run", "--keep-going", code=1)
    assert searched.count(status="ok") == 2
    assert "looplab remeasure" in done.out
