from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.decide.curves import Curve, extrapolate

STEPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def curve(limit: float, until: float = 32.0, start: float = 3.0) -> Curve:
    """A curve that falls from `start` above its limit to a tenth of that."""
    return tuple((step, limit + start * step ** (-math.log(10) / math.log(32))) for step in STEPS if step <= until)


def test_a_stopped_run_is_expected_to_go_on_as_the_finished_ones_did() -> None:
    finished = [curve(limit) for limit in (0.0, 0.3, 0.5, 0.9, 1.4)]
    for until in (2.0, 8.0, 16.0):
        (estimate,) = extrapolate(finished, [curve(0.7, until)])
        assert estimate is not None
        assert estimate.mean == pytest.approx(0.7 + 0.3, abs=0.1)
        assert curve(0.7, until)[-1][1] > estimate.mean + 0.1  # its last value is not its final one


def test_the_earlier_the_stop_and_the_fewer_the_finished_runs_the_larger_the_doubt() -> None:
    finished = [curve(limit) for limit in (0.0, 0.3, 0.5, 0.9, 1.4)]
    stopped = [curve(0.7, until) for until in (16.0, 8.0, 2.0, 1.0)]
    many, few = ([e.sd for e in extrapolate(f, stopped) if e] for f in (finished, finished[:1]))
    assert many == sorted(many)
    assert all(a < b for a, b in zip(many, few, strict=True))


def test_runs_that_were_stopped_later_teach_how_the_early_part_goes() -> None:
    finished: Curve = ((2.0, 2.0), (16.0, 0.5), (32.0, 0.5))
    late: list[Curve] = [((2.0, 4 * value), (16.0, value)) for value in (0.2, 0.4, 0.6, 0.8, 1.2)]
    early: Curve = ((2.0, 4.0),)
    alone, taught = (extrapolate([finished], [early, *others])[0] for others in ([], late))
    assert alone is not None
    assert taught is not None
    assert alone.mean == pytest.approx(2.5)  # as far from the finished run as it was
    assert taught.mean == pytest.approx(1.0, abs=0.2)  # a quarter of that


def test_without_a_finished_run_nothing_can_be_said() -> None:
    assert extrapolate([], [curve(0.7, 8.0)]) == [None]
    assert extrapolate([((32.0, 1.0),)], [curve(0.7, 8.0)]) == [None]  # its earlier values are not known


def test_steps_may_count_from_0_and_a_stopped_run_may_take_more_steps_than_others() -> None:
    finished = [tuple((step - 1, value) for step, value in curve(limit)) for limit in (0.0, 0.5, 1.0)]
    stopped = [((0.0, 3.7),), tuple((3 * step, value) for step, value in finished[1])]
    first, long = extrapolate(finished, stopped)
    assert first is not None
    assert first.mean == pytest.approx(1.0, abs=0.4)
    assert long is not None
    assert long.mean == pytest.approx(0.8, abs=0.2)


values = st.floats(-1e6, 1e6)
curves = st.lists(st.tuples(st.floats(0, 1e6), values), min_size=1, max_size=6, unique_by=lambda row: row[0]).map(
    lambda rows: tuple(sorted(rows))
)


@given(st.lists(curves, max_size=4), st.lists(curves, max_size=4))
def test_estimates_are_numbers_whatever_the_curves_are(finished: list[Curve], stopped: list[Curve]) -> None:
    estimates = extrapolate(finished, stopped)
    assert len(estimates) == len(stopped)
    for estimate in estimates:
        assert estimate is None or (math.isfinite(estimate.mean) and 0.0 < estimate.sd < math.inf)
