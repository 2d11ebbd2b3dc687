"""The page "Now": what happened since somebody last looked, what runs, what waits, what it has cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from looplab.ledger.feed import StudyFeed
from looplab.ledger.view import ProposalRow, RunRow, StudyView
from looplab.report import wording
from looplab.report.facts import alarms_of, budget_facts, unusable_calls
from looplab.report.html import short
from looplab.report.judged import Judged, judged_now
from looplab.ui.model import LabModel, StudyModel

WINDOW_S = 3600.0
"""Seconds that the lanes of slots show."""
MAX_LANES = 400
LATEST = 12
MAX_QUEUE = 20
MAX_TEXT = 600


def overview(model: LabModel, name: str, *, since: int, window: float = WINDOW_S) -> dict[str, Any]:
    """Return the facts of the page.

    Args:
        since: Number of the last event that the person has seen; 0: none.
        window: Seconds that the lanes show.
    """
    record, study = model.view(name), model.study(name)
    now = time.time()
    facts: dict[str, Any] = {"at": now, "seq": model.seq, "engine": model.engine(name), "problem": model.problem}
    if record is None:
        return {**facts, "counts": {}, "needs": [{"kind": "nothing yet"}]}
    feed = StudyFeed(record.ledger, name)
    judge = judged_now(study.config, record)
    calls = record.agent_calls()
    since_at = _time_of(model, since)
    runs = record.runs()
    alarms = alarms_of(record, judge)
    paused = record.is_paused()
    budget = _budget(study, record)
    return {
        **facts,
        "paused": paused,
        "counts": record.counts(),
        "waiting": record.count_waiting(),
        "judge": _judge(judge, record),
        "since": _since(feed, judge, runs, calls, since=since, since_at=since_at, now=now)
        | ({"alarms": len(alarms)} if since == 0 else {}),
        "alarms": [wording.cut(alarm, MAX_TEXT) for alarm in alarms[-LATEST:]],
        "needs": _needs(model, study, record, judge, calls, alarms=len(alarms), paused=paused),
        "budget": budget,
        "lanes": _lanes(feed, calls, now - window, now),
        "window": window,
        "running": _running(study, runs, now),
        "queue": [_proposal(one) for one in record.waiting(MAX_QUEUE)],
        "planned": [run.id for run in runs if run.state == "planned"][:MAX_QUEUE],
        "verdicts": _latest_verdicts(judge, record),
    }


def _time_of(model: LabModel, seq: int) -> float:
    """Return the time of an event; 0: there is none with this number."""
    ledger = model.ledger
    if ledger is None or seq <= 0:
        return 0.0
    event = next(iter(ledger.events(after=seq - 1)), None)
    return event.at if event is not None else 0.0


def _judge(judge: Judged | None, record: StudyView) -> dict[str, Any] | None:
    if judge is None:
        return None
    return {
        "by": judge.by,
        "headline": judge.headline,
        "champion": judge.champion,
        "base": judge.base,
        "mean": judge.mean,
        "sd": judge.sd,
        "runs": judge.runs,
        "sigma": judge.sigma,
        "floor": judge.floor,
        "gain": gain_of(judge),
        "alpha": judge.alpha,
        "spent": judge.spent,
        "reserved": judge.reserved,
        "held_out": judge.held_out,
        "tests": tests_of(judge, record),
        "champions": [
            {"run": one.run, "at": one.at, "mean": short(one.mean), "sd": short(one.sd), "effect": short(one.effect)}
            for one in judge.judgements
            if one.verdict == "keep"
        ],
    }


def gain_of(judge: Judged) -> dict[str, Any] | None:
    """Return how much better the champion is than the base; None: it is the base, or that is unknown."""
    gain = judge.gain
    if gain is None:
        return None
    return {"effect": gain.effect, "low": gain.low, "high": gain.high, "p": gain.p, "n": gain.n, "paired": gain.paired}


def tests_of(judge: Judged, record: StudyView) -> list[dict[str, Any]]:
    """Return the open tests with their alpha."""
    alphas = {test["run"]: test["alpha"] for test in (record.judge_state() or {}).get("tests", ())}
    return [{"run": one.run, "look": one.look, "runs": one.runs, "alpha": alphas.get(one.run)} for one in judge.tests]


def _since(
    feed: StudyFeed, judge: Judged | None, runs: Sequence[RunRow], calls: Sequence[Mapping[str, Any]], *,
    since: int, since_at: float, now: float,
) -> dict[str, Any]:  # fmt: skip
    """Return what happened after an event, in numbers; the page makes a sentence of them in its language."""
    verdicts: dict[str, int] = {}
    before = None
    for one in judge.judgements if judge is not None else ():
        if one.at > since_at:
            if judge is not None and one.run != judge.base:
                verdicts[one.verdict] = verdicts.get(one.verdict, 0) + 1
        elif one.verdict == "keep":
            before = one.run
    hours = sum(
        max(0.0, (run.ended or now) - max(run.started, since_at)) * run.devices
        for run in runs
        if run.started is not None and (run.ended or now) > since_at
    )
    answered = [call["answer"] for call in calls if call["answer"] and call["answer"]["at"] > since_at]
    own = judge.of(judge.champion) if judge is not None else None
    is_new = judge is not None and judge.champion not in (before, judge.base if since == 0 else before)
    kinds = feed.count_kinds(since)
    return {
        "at": since_at or (min((run.created for run in runs), default=now)),
        "is_first": since == 0,
        "events": sum(kinds.values()),
        "tried": sum(run.role == "trial" and run.created > since_at for run in runs),
        "ended": sum(run.ended is not None and run.ended > since_at for run in runs),
        "failed": sum(
            run.ended is not None and run.ended > since_at and run.status in ("failed", "lost", "timeout")
            for run in runs
        ),
        "verdicts": verdicts,
        "new_champion": judge.champion if is_new and judge is not None else None,
        "effect": None if own is None or not is_new else [own.effect, own.low, own.high, own.against],
        "device_hours": hours / 3600.0,
        "usd": sum(float((answer.get("usage") or {}).get("usd") or 0.0) for answer in answered),
        "tokens": sum(_tokens(answer.get("usage") or {}) for answer in answered),
        "calls": len(answered),
        "alarms": kinds.get("alarm", 0),
        "rejected": kinds.get("rejected", 0),
    }


def _tokens(usage: Mapping[str, Any]) -> int:
    return int(usage.get("input_tokens") or 0) + int(usage.get("output_tokens") or 0)


def _needs(
    model: LabModel, study: StudyModel, record: StudyView, judge: Judged | None, calls: Sequence[Mapping[str, Any]], *,
    alarms: int, paused: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return what a person should look at or do, most urgent first."""
    name = study.config.name
    found: list[dict[str, Any]] = []
    counts, engine = record.counts(), model.engine(name)
    if model.problem is not None:
        found.append({"kind": "problem", "text": model.problem})
    if alarms:
        found.append({"kind": "alarms", "n": alarms})
    ended_early = record.failed_because() if engine is None else None
    if ended_early:
        found.append({"kind": "ended early", "text": wording.cut(wording.plain(ended_early), MAX_TEXT)})
    unfinished = counts.get("running", 0) + counts.get("planned", 0)
    if engine is None and unfinished:
        found.append({"kind": "unfinished", "n": unfinished})
    elif engine is None and record.count_waiting():
        found.append({"kind": "waiting", "n": record.count_waiting()})
    if paused and engine is not None:
        found.append({"kind": "paused"})
    if study.config.objective is None:
        found.append({"kind": "no objective"})
    else:
        different = len(record.not_comparable())
        if different:
            found.append({"kind": "not comparable", "n": different})
    unusable = unusable_calls(calls)
    if unusable and calls and unusable[-1].call == calls[-1]["call"]:
        found.append({"kind": "agent", "text": wording.cut(unusable[-1].why, MAX_TEXT)})
    if judge is not None and judge.by == "test" and judge.spent + judge.reserved >= 0.95 * judge.alpha:
        found.append({"kind": "alpha"})
    if judge is not None and judge.held_out is not None and judge.held_out[0] >= judge.held_out[1]:
        found.append({"kind": "held out"})
    return found


def _budget(study: StudyModel, record: StudyView) -> list[dict[str, Any]]:
    """Return each budget with the time at which it ends at the pace so far, in seconds of a running engine."""
    wall = record.shared_usage().wall
    parts = []
    for one in budget_facts(study.config, record):
        left = None
        if one.limit is not None and one.used > 0 and wall > 0:
            left = max(0.0, (one.limit - one.used) / (one.used / wall))
        parts.append({"name": one.name, "used": one.used, "limit": one.limit, "shown": one.shown, "left": left})
    return parts


def _lanes(feed: StudyFeed, calls: Sequence[Mapping[str, Any]], begin: float, now: float) -> dict[str, Any]:
    runs = feed.runs_between(begin)[-MAX_LANES:]
    asked = [
        {"call": call["call"], "begin": call["at"], "end": (call["answer"] or {}).get("at"), "ok": _is_ok(call)}
        for call in calls
        if ((call["answer"] or {}).get("at") or now) >= begin
    ]
    return {
        "runs": [
            {"run": run.id, "slot": run.slot or "", "begin": run.started, "end": run.ended, "state": run.state,
             "status": run.status, "verdict": run.verdict, "role": str(run.role)}
            for run in runs
        ],
        "agents": asked[-MAX_LANES:],
    }  # fmt: skip


def _is_ok(call: Mapping[str, Any]) -> bool | None:
    return None if call["answer"] is None else bool(call["answer"].get("ok"))


def _running(study: StudyModel, runs: Sequence[RunRow], now: float) -> list[dict[str, Any]]:
    ended = [run.seconds for run in runs if run.status == "ok" and run.seconds is not None and run.role != "imported"]
    usual = median(ended[-50:]) if ended else None
    found = []
    for run in runs:
        if run.state != "running":
            continue
        metrics = study.live(run.id)
        found.append(
            {"run": run.id, "slot": run.slot, "by": run.proposer, "role": str(run.role), "twin": run.twin,
             "started": run.started, "usual": usual, "step": metrics.step if metrics else None,
             "objective": short(metrics.objective()) if metrics else None,
             "reason": wording.cut(wording.plain(run.reason), MAX_TEXT)}
        )  # fmt: skip
    return found


def _proposal(one: ProposalRow) -> dict[str, Any]:
    return {
        "id": one.id,
        "by": one.proposer,
        "edits": [wording.cut(wording.plain(edit), 200) for edit in one.words],
        "reason": wording.cut(wording.plain(one.reason), MAX_TEXT),
        "parent": one.parent,
        "at": one.created,
    }


def _latest_verdicts(judge: Judged | None, record: StudyView) -> list[dict[str, Any]]:
    if judge is None:
        return []
    evidence = record.verdicts()
    return [verdict_facts(one.run, evidence[one.run]) for one in judge.judgements[-LATEST:][::-1]]


def verdict_facts(run: str, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict with its evidence and its bar, for the page."""
    numbers = ("effect", "low", "high", "p", "boundary", "alpha", "sigma", "cost")
    return {
        "run": run,
        "verdict": evidence.get("verdict"),
        "at": evidence.get("at"),
        "against": evidence.get("champion"),
        "n": evidence.get("n", 0),
        "look": evidence.get("look", 0),
        "why": wording.cut(wording.plain(str(evidence.get("why", ""))), MAX_TEXT),
        "flags": [wording.plain(str(flag)) for flag in evidence.get("flags", ())],
        **{name: short(evidence.get(name)) for name in numbers},
    }
