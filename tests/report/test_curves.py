from __future__ import annotations

import json
from math import isfinite, nan
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.measure.base import Curve
from looplab.report.curves import MAX_DRAWN, choose, read_drawn, thin
from looplab.report.facts import study_facts

values = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([nan, float("inf"), -float("inf")]), max_size=900)


@settings(max_examples=150, deadline=None)
@given(values, st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_order(numbers: list[float], limit: int) -> None:
    curve = Curve([float(step) for step in range(len(numbers))], numbers)
    thinned = thin(curve, limit)
    assert len(thinned.values) <= max(limit, 0)
    assert len(thinned.steps) == len(thinned.values)
    places = [int(step) for step in thinned.steps]
    assert places == sorted(set(places))
    assert all(thinned.values[i] is numbers[place] for i, place in enumerate(places))
    if numbers:
        assert (places[0], places[-1]) == (0, len(numbers) - 1)
    finite = [value for value in numbers if isfinite(value)]
    if finite:
        kept = [value for value in thinned.values if isfinite(value)]
        assert (min(kept), max(kept)) == (min(finite), max(finite))


def test_a_gap_of_many_points_stays_a_gap() -> None:
    numbers = [1.0] * 300 + [nan] * 400 + [2.0] * 300
    assert any(value != value for value in thin(Curve([float(i) for i in range(1000)], numbers), 40).values)


def test_a_large_study_draws_its_best_its_latest_its_base_and_what_runs(making: Any, maker: Any) -> None:
    making.fill(maker, 80, points=5)
    running = maker.plan(making.edited(seed=9))
    (maker.launch(running) / "metrics.jsonl").write_text('{"step": 0, "eval/loss": 3}\n{"step": 1, "eval/loss": 2}\n')
    facts = study_facts(maker.lab, maker.study, maker.record)
    chosen = [run.row.id for run in choose(facts)]
    assert len(chosen) == MAX_DRAWN
    assert chosen == sorted(chosen)
    assert facts.best is not None
    assert {facts.best.row.id, facts.runs[0].row.id, running.id} <= set(chosen)


def test_the_half_line_of_a_killed_run_is_not_drawn(making: Any, maker: Any) -> None:
    run = maker.plan(making.BASE)
    run_dir = maker.launch(run)
    maker.end(run, [], code=143, reason="timeout")
    rows = "".join(json.dumps({"step": step, "eval/loss": 2.5}) + "\n" for step in range(3))
    (run_dir / "metrics.jsonl").write_text(rows + '{"step": 3, "eval/loss": 2}')
    (run_dir / "record/summary.json").write_text(
        json.dumps({"metrics": {"eval/loss": {**dict.fromkeys(("first", "last", "best", "best_step", "delta", "pct")),
                                              "n": 3, "nan": 0, "last_is_nan": False}}})
    )  # fmt: skip
    facts = study_facts(maker.lab, maker.study, maker.record)
    assert read_drawn(facts, maker.study)[run.id]["eval/loss"].values == [2.5, 2.5, 2.5]
