"""The page "Now": the facts of `report.overview` as JSON, with the metrics of running runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from looplab.ledger.view import StudyView
from looplab.report import wording
from looplab.report.html import short
from looplab.report.judged import Judged
from looplab.report.overview import MAX_TEXT, WINDOW_S, LiveRun, StudyOverview, study_overview
from looplab.ui.model import LabModel, StudyModel


def overview(model: LabModel, name: str, *, since: int, window: float = WINDOW_S) -> dict[str, Any]:
    """Return the facts of the page.

    Args:
        since: Number of the last event that the person has seen; 0: none.
        window: Seconds that the lanes show.
    """
    record, study = model.view(name), model.study(name)
    now, engine = time.time(), model.engine(name)
    facts: dict[str, Any] = {"at": now, "seq": model.seq, "engine": engine, "problem": model.problem}
    if record is None:
        return {**facts, "counts": {}, "needs": [{"kind": "nothing yet"}]}
    since_at = _time_of(model, since)
    found = study_overview(study.config, record, now=now, engine=engine, since=since_at, window=window)
    problem = [] if model.problem is None else [{"kind": "problem", "text": model.problem}]
    evidence = record.verdicts()
    return {
        **facts,
        "paused": found.paused,
        "counts": found.counts,
        "waiting": found.waiting,
        "judge": _judge(found.judge, record),
        "since": _since(found, is_first=since == 0),
        "alarms": found.alarms,
        "needs": [*problem, *map(asdict, found.needs)],
        "budget": [asdict(one) for one in found.budget],
        "lanes": [asdict(one) for one in found.lanes],
        "running": [_running(study, one) for one in found.running],
        "queue": [asdict(one) for one in found.queue],
        "verdicts": [verdict_facts(one.run, evidence[one.run]) for one in found.verdicts if one.run in evidence],
    }


def _time_of(model: LabModel, seq: int) -> float:
    """Return the time of an event; 0: there is none with this number."""
    ledger = model.ledger
    if ledger is None or seq <= 0:
        return 0.0
    event = next(iter(ledger.events(after=seq - 1)), None)
    return event.at if event is not None else 0.0


def _since(found: StudyOverview, *, is_first: bool) -> dict[str, Any]:
    """Return what happened, in numbers; the page makes a sentence of them in its language."""
    happened = found.happened
    own = happened.verdict
    facts = {key: value for key, value in asdict(happened).items() if key not in ("since", "verdict", "champion")}
    return {
        **facts,
        "at": happened.since,
        "is_first": is_first,
        "new_champion": happened.champion,
        "effect": None if own is None else [own.effect, own.low, own.high, own.against],
        "alarms": len(found.alarms) if is_first else happened.alarms,
    }


def _judge(judge: Judged | None, record: StudyView) -> dict[str, Any] | None:
    if judge is None:
        return None
    return {
        **judge_facts(judge, record),
        "champions": [
            {"run": one.run, "at": one.at, "mean": short(one.mean)} for one in judge.judgements if one.verdict == "keep"
        ],
    }


def judge_facts(judge: Judged, record: StudyView) -> dict[str, Any]:
    """Return the state of the judge without its verdicts."""
    names = ("by", "headline", "champion", "base", "mean", "sd", "runs", "sigma", "noise_runs", "noise_points", "floor",
             "counts", "alpha", "spent", "reserved", "held_out")  # fmt: skip
    alphas = {test["run"]: test["alpha"] for test in (record.judge_state() or {}).get("tests", ())}
    return {
        **{name: getattr(judge, name) for name in names},
        "gain": None if judge.gain is None else asdict(judge.gain),
        "tests": [{**asdict(one), "alpha": alphas.get(one.run)} for one in judge.tests],
        "alarms": judge.alarms,
    }


def _running(study: StudyModel, one: LiveRun) -> dict[str, Any]:
    run, metrics = one.row, study.live(one.row.id)
    return {
        "run": run.id,
        "slot": run.slot,
        "role": str(run.role),
        "twin": run.twin,
        "started": run.started,
        "usual": one.usual_s,
        "step": metrics.step if metrics else None,
        "objective": short(metrics.objective()) if metrics else None,
        "reason": wording.cut(wording.plain(run.reason), MAX_TEXT),
    }


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
