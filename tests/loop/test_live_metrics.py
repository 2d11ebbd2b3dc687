"""Metrics of running runs are read in turns, less often the more there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.loop import watching
from looplab.loop.watching import GAUGE_S, READING_SHARE, LiveMetrics
from looplab.measure.run_metrics import RunMetrics

LAB = 'study: s\nlaunch: {command: ["true"]}\nbase: base.json\n'


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were read, in order."""
    found: list[str] = []
    poll = RunMetrics.poll

    def noted(self: RunMetrics, final: bool = False, until: float | None = None) -> Any:
        found.append(self.run_dir.name)
        return poll(self, final, until)

    monkeypatch.setattr(RunMetrics, "poll", noted)
    return found


@pytest.fixture
def live(tmp_path: Path) -> LiveMetrics:
    (tmp_path / "lab.yaml").write_text(LAB)
    (tmp_path / "base.json").write_text("{}")
    setup: Any = SimpleNamespace(study=load_lab(tmp_path).study(None))
    return LiveMetrics(setup, tmp_path, None, lambda event: None)


def runs(n: int) -> dict[str, Any]:
    return {f"{i:03d}": SimpleNamespace(started=1.0) for i in range(n)}


def test_every_run_has_its_turn_however_little_time_there_is(
    live: LiveMetrics, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock)
    running = runs(20)
    live.poll(running, (), 0.1, None)
    assert reads == []  # they have just begun
    clock += GAUGE_S
    for _ in range(20):
        live.poll(running, (), -1.0, None)  # time for one only
    assert sorted(reads) == sorted(running)
    live.poll(running, (), 1.0, None)
    assert len(reads) == 20  # none is due again yet
    clock += GAUGE_S
    live.poll(running, (), 1.0, None)
    assert len(reads) == 40


def test_the_period_grows_with_the_number_of_runs_and_their_cost(live: LiveMetrics) -> None:
    live.poll(runs(1), (), 1.0, None)
    assert live.period == GAUGE_S
    live.poll(runs(10_000), (), 1.0, None)
    assert live.period == pytest.approx(10_000 * watching.READING_COST_S / READING_SHARE)


def test_runs_that_have_not_started_or_have_ended_are_not_read(
    live: LiveMetrics, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock)
    running = runs(3)
    running["001"].started = running["002"].started = None
    live.poll(running, {"002"}, 1.0, None)
    del running["000"]
    clock += GAUGE_S
    live.poll(running, {"002"}, 1.0, None)
    assert reads == ["002"]  # adopted
    running["001"].started = 2.0
    live.poll(running, {"002"}, 1.0, None)
    clock += GAUGE_S
    live.poll(running, {"002"}, 1.0, None)
    assert sorted(reads) == ["001", "002", "002"]
