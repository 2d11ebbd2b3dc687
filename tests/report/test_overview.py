"""The facts of the glance: what happened, what runs, what waits and why, what needs a person."""

from __future__ import annotations

import time
from typing import Any

from looplab.ledger.catalogue import AgentAskedEvent
from looplab.report.overview import StudyOverview, study_overview


def look(made: Any, *, since: float = 0.0, engine: int | None = None) -> StudyOverview:
    return study_overview(made.study, made.record, now=time.time(), engine=engine, since=since, window=1e6)


def test_an_empty_study_has_an_overview(maker: Any) -> None:
    seen = look(maker)
    assert seen.headline == "Nothing has been measured yet"
    assert seen.happened.sentence == "Nothing has ended."
    assert (seen.running, seen.queue, seen.blocked, seen.lanes, seen.needs) == ((), (), "", (), ())


def test_what_happened_is_counted_from_a_moment_on(judged_full: Any) -> None:
    ever, now = look(judged_full), look(judged_full, since=time.time() + 1)
    runs = judged_full.record.runs()
    assert ever.happened.ended == sum(run.state == "ended" for run in runs)
    assert ever.happened.tried == sum(run.role == "trial" for run in runs)
    assert sum(ever.happened.verdicts.values()) == sum(ever.judge.counts.values()) if ever.judge else False
    assert "tried" in ever.happened.sentence
    assert ever.judge is not None
    assert ever.headline == ever.judge.headline
    assert (now.happened.tried, now.happened.ended, now.happened.verdicts, now.happened.champion) == (0, 0, {}, None)


def test_verdicts_come_latest_first_with_the_bar_they_had_to_pass(judged_full: Any) -> None:
    verdicts = look(judged_full).verdicts
    assert [one.at for one in verdicts] == sorted((one.at for one in verdicts), reverse=True)
    tested = [one for one in verdicts if one.p is not None]
    assert tested
    for one in tested:
        assert one.bar is not None
        if one.verdict == "keep":
            assert one.p is not None
            assert one.p <= one.bar


def test_lanes_hold_each_run_once_in_its_slot(judged_full: Any) -> None:
    lanes = look(judged_full).lanes
    bars = [bar for lane in lanes for bar in lane.bars]
    assert {bar.id for bar in bars} == {run.id for run in judged_full.record.runs() if run.slot}
    assert all(bar.end is None or bar.end >= bar.begin for bar in bars)
    assert {lane.name for lane in lanes} == {"cpu0"}


def test_the_queue_says_why_it_does_not_move(making: Any, maker: Any) -> None:
    running = maker.plan(making.edited(seed=3), reason="first")
    maker.launch(running)
    maker.plan(making.edited(seed=4), reason="second")
    with maker.ledger.write():
        maker.record.propose("agent", ["model.width@set=64"], "narrower may be enough")
    seen = look(maker)
    assert [one.why for one in seen.queue] == ["second", "narrower may be enough"]
    assert seen.queue[1].what == "model.width@set=64"
    assert seen.blocked == "no engine is running"
    assert [one.kind for one in seen.needs] == ["unfinished"]
    assert "looplab resume" in seen.needs[0].sentence
    busy = look(maker, engine=1)
    assert (busy.blocked, busy.needs) == ("all slots are busy", ())
    assert [one.row.id for one in busy.running] == [running.id]


def test_a_run_that_waits_at_a_scheduler_holds_its_slot_and_needs_an_engine(making: Any, maker: Any) -> None:
    run = maker.plan(making.edited(seed=3), reason="first")
    with maker.ledger.write():
        maker.record.launched(run.id, "slurm0", {}, queued=True)
    assert [(one.kind, one.n) for one in look(maker).needs] == [("unfinished", 1)]
    maker.plan(making.edited(seed=4), reason="second")
    assert look(maker, engine=1).blocked == "all slots are busy"


def test_a_budget_is_projected_at_the_pace_so_far(full: Any) -> None:
    budgets = {one.name: one for one in look(full).budget}
    runs = budgets["runs"]
    assert (runs.used, runs.limit) == (60, 400)
    wall = full.record.shared_usage().wall
    if wall:
        assert runs.left_s is not None
        assert abs(runs.left_s - 340 * wall / 60) < 1e-6 * wall
    else:
        assert (runs.left_s, runs.left) == (None, "")
    assert budgets["rounds"].left_s is None


def test_hostile_text_is_cleaned(making: Any, maker: Any) -> None:
    maker.plan(making.edited(seed=4), reason="\x1b[31mred\x1b[0m \u202eevil")
    assert look(maker).queue[0].why == "red evil"


def test_nobody_waits_for_a_call_of_an_agent_after_its_engine_has_ended(maker: Any) -> None:
    run = maker.train()
    with maker.ledger.write():
        maker.record.record_agent(
            AgentAskedEvent(call="one", log="x.jsonl", n=1, attempt=1, parent=None, cli="command")
        )

    def bars(engine: int | None) -> dict[str, float | None]:
        return {bar.id: bar.end for lane in look(maker, engine=engine).lanes for bar in lane.bars}

    assert bars(engine=1) == {run.id: run.ended, "one": None}
    asked = maker.record.agent_calls()[0]["at"]
    assert bars(engine=None) == {run.id: run.ended, "one": max(asked, run.ended)}
