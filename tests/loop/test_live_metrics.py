"""Metrics of running runs are read in turns, less often the more there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.loop import watching
from looplab.loop.engine import PORTION_S, TICK_S
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
    monkeypatch.setattr(watching.time, "thread_time", lambda: 0.0)  # first readings import what they need
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


class FakeTime:
    """One core on which a reading takes as long as it costs; `slower` times as long if others use that core as well."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[RunMetrics], float], slower: float = 1.0
    ) -> None:
        self.now = 100.0
        self.cpu_s = 0.0
        self.read_at: dict[str, list[float]] = {}

        def poll(metrics: RunMetrics, final: bool = False, until: float | None = None) -> Any:
            self.read_at.setdefault(metrics.run_dir.name, []).append(self.now)
            self.cpu_s += cost(metrics)
            self.now += slower * cost(metrics)
            return {}

        monkeypatch.setattr(RunMetrics, "poll", poll)
        monkeypatch.setattr(watching.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching.time, "thread_time", lambda: self.cpu_s)

    def run(self, live: LiveMetrics, running: dict[str, Any], seconds: float) -> None:
        """Poll as the engine does: a portion, then a pause."""
        end = self.now + seconds
        while self.now < end:
            live.poll(running, (), PORTION_S, None)
            self.now += 0.0 if live.behind else TICK_S

    def gaps(self, since: float) -> list[float]:
        """Seconds between consecutive readings of each run, and since its last one."""
        times = [[*(at for at in one if at >= since), self.now] for one in self.read_at.values()]
        return [after - before for one in times for before, after in itertools.pairwise(one)]


def test_the_period_grows_with_the_number_of_runs_and_their_cost(
    live: LiveMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost, count = 0.001, 2000
    time = FakeTime(monkeypatch, lambda metrics: cost)
    time.run(live, runs(10), 5.0)
    assert GAUGE_S <= live.period < GAUGE_S + 2 * TICK_S
    began, used = time.now, time.cpu_s
    time.run(live, runs(count), 60.0)
    assert live.period == pytest.approx(count * cost / READING_SHARE, rel=0.1)
    assert time.cpu_s - used == pytest.approx(READING_SHARE * (time.now - began), rel=0.05)


def test_costly_first_readings_do_not_delay_later_ones(live: LiveMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """The period once followed an average of costs, which first readings raised tenfold: with 10,000 new runs it was
    half a minute, and each run waited that long for its second reading."""
    count, cost, first = 2000, 0.0005, 0.005
    seen: set[str] = set()

    def cost_of(metrics: RunMetrics) -> float:
        return cost if metrics.run_dir.name in seen else first

    time = FakeTime(monkeypatch, cost_of)
    running = runs(count)
    while len(seen) < count:
        time.run(live, running, TICK_S)
        seen |= time.read_at.keys()
    assert time.now - 100.0 < 1.1 * count * first / READING_SHARE
    since = time.now
    time.run(live, running, 30.0)
    usual = count * cost / READING_SHARE
    assert all(at[-1] > since for at in time.read_at.values())
    first_gap = max(next(at for at in one if at > since) - since for one in time.read_at.values())
    assert first_gap < usual + 3 * TICK_S  # nobody waits longer after the first pass than later
    assert max(time.gaps(since)) < 1.2 * usual + 3 * TICK_S


def test_one_costly_file_delays_the_others_by_its_own_time_only(
    live: LiveMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, cost, costly = 2000, 0.0005, 0.5
    time = FakeTime(monkeypatch, lambda metrics: costly if metrics.run_dir.name == "007" else cost)
    running = runs(count)
    time.run(live, running, 20.0)
    since = time.now
    time.run(live, running, 60.0)
    usual = ((count - 1) * cost + costly) / READING_SHARE
    assert {run for run, at in time.read_at.items() if at[-1] > since} == set(running)
    assert max(time.gaps(since)) < usual + costly / READING_SHARE + 3 * TICK_S
    counts = [len([at for at in one if at > since]) for one in time.read_at.values()]
    assert max(counts) - min(counts) <= 1  # in turns


def test_a_busy_machine_takes_nothing_of_the_share_of_reading(
    live: LiveMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A portion of 0.1 s is 0.05 s of CPU time if others use the core: the engine then continues without a pause."""
    time = FakeTime(monkeypatch, lambda metrics: 0.001, slower=2.0)
    time.run(live, runs(2000), 60.0)
    assert time.cpu_s == pytest.approx(READING_SHARE * (time.now - 100.0), rel=0.05)


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
