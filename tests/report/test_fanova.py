from __future__ import annotations

import random
from typing import Any

import pytest

from looplab.report import fanova as module
from looplab.report.fanova import MIN_RUNS, fanova


def study(n: int = 60) -> tuple[dict[str, list[Any]], list[float | None]]:
    rng = random.Random(1)
    knobs: dict[str, list[Any]] = {
        "lr": [10 ** rng.uniform(-5, 0) for _ in range(n)],
        "opt": [rng.choice(["adam", "sgd", None]) for _ in range(n)],
        "idle": [rng.random() for _ in range(n)],
        "fixed": [3] * n,
    }
    import math

    objective: list[float | None] = [
        (math.log10(lr) + 3) ** 2 + (1.5 if opt == "sgd" else 0.0)
        for lr, opt in zip(knobs["lr"], knobs["opt"], strict=True)
    ]
    return knobs, objective


def test_the_knob_that_matters_comes_first_and_an_idle_one_is_not_clear() -> None:
    found = fanova(*study())
    assert found is not None
    assert [share.knob for share in found.shares][:2] == ["lr", "opt"]
    assert {share.knob: share.clear for share in found.shares} == {"lr": True, "opt": True, "idle": False}
    assert all(0 <= share.share <= 1 for share in found.shares)
    assert found.runs == 60


def test_it_says_the_same_each_time() -> None:
    assert fanova(*study()) == fanova(*study())


def test_crashed_runs_and_one_that_diverged_change_little() -> None:
    knobs, objective = study()
    objective[3], objective[4], objective[5] = None, float("nan"), 1e30
    found = fanova(knobs, objective)
    assert found is not None
    assert found.runs == 58
    assert found.shares[0].knob == "lr"


def test_with_too_few_runs_or_nothing_that_varies_there_is_no_result() -> None:
    assert fanova(*study(MIN_RUNS - 1)) is None
    assert fanova({"fixed": [1] * 30}, [float(i) for i in range(30)]) is None
    assert fanova({"x": list(range(30))}, [1.0] * 30) is None


@pytest.mark.parametrize("missing", ["optuna", "sklearn"])
def test_without_its_libraries_there_is_no_result(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else real(name))
    assert fanova(*study()) is None
