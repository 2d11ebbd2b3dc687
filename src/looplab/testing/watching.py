"""The contracts of watch conditions and alerts: see `looplab.watch`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.measure.base import Batch, Curve
from looplab.measure.summary import Directions
from looplab.testing.sources import INHERITED
from looplab.watch.alert import AlertPlugin
from looplab.watch.conditions import Condition, ConditionContext, Match, RunSnapshot


class ConditionContract:
    """What every watch condition guarantees. Subclasses define `make_condition`, `matching` and `harmless`."""

    matching: dict[str, list[float]] = {}  # noqa: RUF012 (subclasses replace it)
    """Metrics, one value per step, of a run on which the condition holds at some point."""
    harmless: dict[str, list[float]] = {}  # noqa: RUF012
    """Metrics of a run on which it never holds."""

    def make_condition(self, context: ConditionContext) -> Condition:
        """Return the condition for one run."""
        raise NotImplementedError

    def _look(self, rows: Mapping[str, list[float]], cuts: list[int]) -> list[Match]:
        """Return all matches while the run logs its rows, a look at each cut and one at the end."""
        condition = self.make_condition(ConditionContext("r1", Directions(), next(iter(rows), None)))
        n = max(map(len, rows.values()), default=0)
        matches, before = [], 0
        for cut in [*sorted(cut % (n + 1) for cut in cuts), n, n]:
            batch: Batch = {
                name: Curve([float(step) for step in range(before, min(cut, len(values)))], values[before:cut])
                for name, values in rows.items()
                if values[before:cut]
            }
            step = float(cut - 1) if cut else None
            match = condition.look(RunSnapshot("r1", batch, step, 0.0, float(cut)), float(cut))
            assert match is None or isinstance(match, Match)
            assert condition.unable is None or isinstance(condition.unable, str)
            matches += [match] if match is not None else []
            before = cut
        return matches

    def test_it_holds_where_it_should_and_says_why(self) -> None:
        first, *_ = self._look(self.matching, list(range(100)))
        assert first.text
        assert "\n" not in first.text
        json.dumps(first.values)

    def test_it_never_holds_on_a_harmless_run(self) -> None:
        assert self._look(self.harmless, list(range(100))) == []

    @settings(max_examples=25, deadline=None, suppress_health_check=INHERITED)
    @given(cuts=st.lists(st.integers(0, 1000), max_size=8))
    def test_it_does_not_depend_on_how_often_it_is_polled(self, cuts: list[int]) -> None:
        first = [match.step for match in self._look(self.matching, list(range(100)))][:1]
        assert [match.step for match in self._look(self.matching, cuts)][:1] == first

    def test_a_run_without_its_metrics_does_not_make_it_fail(self) -> None:
        assert self._look({"another/metric": [1.0, 2.0, 3.0]}, [1, 2]) == []


class AlertContract:
    """What every alert guarantees. Subclasses define `make_alert` and `received`."""

    def make_alert(self) -> AlertPlugin:
        """Return the alert, which sends to where `received` looks."""
        raise NotImplementedError

    def received(self) -> list[str]:
        """Return the texts that have arrived."""
        raise NotImplementedError

    def test_alarms_arrive_with_and_without_a_run(self) -> None:
        alert = self.make_alert()
        run: dict[str, Any] = {
            "study": "s", "rule": "nan", "run": "0001", "step": 3.0, "text": "step 3: loss is NaN",
            "values": {"loss": "NaN"}, "stops": True, "requeue": [], "note": None,
        }  # fmt: skip
        alert.send(run)
        alert.send({"study": "s", "rule": "agent", "text": "the agent gave up"})
        texts = self.received()
        assert any("step 3: loss is NaN" in text for text in texts)
        assert any("the agent gave up" in text for text in texts)
