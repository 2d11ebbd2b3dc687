"""A study at a glance: what happened, what runs, what waits and why, what it costs, what needs a person.

The live page and `looplab top` show these facts. They come from the ledger alone, in a few short reads, so they can be
collected twice a second; metrics of running runs are added by the caller, which follows their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from looplab.agents.log import read_usage
from looplab.config.lab import StudyConfig
from looplab.ledger.roles import Role
from looplab.ledger.view import RunRow, StudyView
from looplab.report import wording
from looplab.report.facts import FAILURES, alarms_of, budget_facts, unusable_calls
from looplab.report.judged import Judged, VerdictFacts, judged_now
from looplab.runs.clock import format_seconds

WINDOW_S = 3600.0
"""Seconds that the lanes of slots show."""
MAX_BARS = 400
LATEST = 12
MAX_QUEUE = 20
MAX_TEXT = 600
_USUAL = 50
"""Ended runs whose median duration is the usual one."""
_ALMOST = 0.95
"""Share of alpha after which a person is notified."""


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened after a moment, in numbers."""

    since: float
    """That moment; 0: the beginning of the study."""
    tried: int
    """Configs that were tried for the first time."""
    ended: int
    failed: int
    verdicts: dict[str, int]
    """Challengers by verdict."""
    champion: str | None
    """The champion, if it was promoted since; else None."""
    verdict: VerdictFacts | None
    """The verdict that promoted it."""
    device_hours: float
    usd: float
    tokens: int
    """Tokens of agents, as their limits count them."""
    calls: int
    alarms: int
    rejected: int
    """Proposals that the guard refused."""

    @property
    def sentence(self) -> str:
        """`14 ideas tried, 2 kept; champion 0034 is better than 0012 by 0.041 [0.033, 0.048]; 3.1 device hours.`"""
        if not (self.tried or self.ended):
            return "Nothing has ended."
        parts = [f"{wording.plural(self.tried, 'idea')} tried"]
        parts += [f"{n} {_PAST.get(verdict, verdict)}" for verdict, n in self.verdicts.items()]
        parts += [f"{wording.plural(self.failed, 'run')} failed"] if self.failed else []
        sentences = [", ".join(parts)]
        own = self.verdict
        if self.champion is not None and own is not None and own.effect is not None:
            sentences.append(f"champion {self.champion} is better than {own.against} by {own.interval}")
        elif self.champion is not None:
            sentences.append(f"new champion {self.champion}")
        costs = [f"{self.device_hours:.2g} device hours"] if self.device_hours >= 0.005 else []
        costs += [f"${self.usd:.2f} for agents"] if self.usd else []
        sentences += [" and ".join(costs)] if costs else []
        return "; ".join(sentences) + "."


_PAST = {"keep": "kept", "discard": "discarded", "crash": "crashed"}


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a person should look at or do."""

    kind: str
    """alarms, ended early, unfinished, waiting, paused, no objective, not comparable, agent, alpha or held out."""
    n: int = 0
    text: str = ""

    @property
    def sentence(self) -> str:
        """What to do about it, with the command."""
        one = {
            "alarms": f"{wording.plural(self.n, 'alarm')}: check before you trust the results",
            "ended early": f"the last engine ended early: {self.text}",
            "unfinished": f"{wording.plural(self.n, 'run')} unfinished and no engine: `looplab resume`",
            "waiting": f"{wording.plural(self.n, 'proposal')} waiting and no engine: `looplab run`",
            "paused": "paused: `looplab resume` continues",
            "no objective": "no objective: `looplab objective METRIC`",
            "not comparable": f"{wording.plural(self.n, 'run')} measured by another objective: `looplab remeasure`",
            "agent": f"the last agent call was of no use: {self.text}",
            "alpha": "alpha is almost spent: little can be promoted any more",
            "held out": "the held-out metric was read as often as its budget allows",
        }
        return one[self.kind]


@dataclass(frozen=True, slots=True)
class BudgetForecast:
    """Usage of one budget, and when it ends at the present pace."""

    name: str
    used: float
    limit: float | None
    shown: str
    left_s: float | None
    """Seconds of a running engine until it is used up; None: no limit, or no pace yet."""


@dataclass(frozen=True, slots=True)
class SlotBar:
    """A run in the lane of its slot, or a call in that of agents."""

    id: str
    """Run, or call of an agent."""
    begin: float
    end: float | None
    """None: still running."""
    kind: str
    """Verdict, else `replicate`, else status or state; `agent` for calls."""


@dataclass(frozen=True, slots=True)
class SlotLane:
    """What ran in a slot, oldest first."""

    name: str
    bars: tuple[SlotBar, ...]


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A running run."""

    row: RunRow
    usual_s: float | None
    """Median seconds of the last runs that ended well; None if there are none."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """A planned run or a waiting proposal."""

    name: str
    """Run id, or `proposal 12`."""
    by: str
    what: str
    """Edits or command; for a planned run, what it is for."""
    why: str


@dataclass(frozen=True, slots=True)
class StudyOverview:
    """A study at one moment."""

    study: str
    at: float
    metric: str | None
    goal: str
    engine: int | None
    """Pid of its engine; 0: unknown, None: none runs."""
    paused: bool
    counts: dict[str, int]
    """Runs by status or state."""
    waiting: int
    """Proposals in the queue."""
    judge: Judged | None
    best: RunRow | None
    """Without a judge: the best run."""
    happened: Happened
    alarms: tuple[str, ...]
    needs: tuple[Need, ...]
    """Most urgent first."""
    budget: tuple[BudgetForecast, ...]
    lanes: tuple[SlotLane, ...]
    running: tuple[LiveRun, ...]
    queue: tuple[QueuedWork, ...]
    """Planned runs first."""
    blocked: str
    """Why the queue does not move; empty if it does or is empty."""
    verdicts: tuple[VerdictFacts, ...]
    """The latest first."""

    @property
    def headline(self) -> str:
        """What is known by now."""
        if self.judge is not None:
            return self.judge.headline
        if self.best is None:
            return "Nothing has been measured yet"
        return f"Best so far: {self.best.id} with {self.metric} {wording.number(self.best.objective, 4)} (one run)"

    @property
    def champion_shown(self) -> str:
        """Mean and spread of the champion; without a judge, the value of the best run."""
        if self.judge is not None:
            return wording.mean(self.judge.mean, self.judge.sd, self.judge.runs)
        return wording.number(self.best.objective, 4) if self.best is not None else wording.NOTHING


def study_overview(
    study: StudyConfig,
    record: StudyView,
    *,
    now: float,
    engine: int | None,
    since: float = 0.0,
    window: float = WINDOW_S,
) -> StudyOverview:
    """Collect the facts.

    Args:
        study: The study.
        record: Its record.
        now: Present time.
        engine: Pid of its engine; None if none runs.
        since: What happened is counted from this time on.
        window: Seconds that the lanes of slots show.
    """
    runs = record.runs()
    judge = judged_now(study, record)
    calls = record.agent_calls()
    alarms = alarms_of(record, judge)
    paused = record.is_paused()
    counts = record.counts()
    queue = _queue(record, runs)
    running = [run for run in runs if run.state == "running"]
    return StudyOverview(
        study=study.name,
        at=now,
        metric=study.objective.metric if study.objective else None,
        goal=study.objective.goal if study.objective else "min",
        engine=engine,
        paused=paused,
        counts=counts,
        waiting=record.count_waiting(),
        judge=judge,
        best=record.best() if judge is None else None,
        happened=_happened(record, judge, runs, calls, since=since, now=now),
        alarms=tuple(wording.cut(alarm, MAX_TEXT) for alarm in alarms[-LATEST:]),
        needs=tuple(_needs(study, record, judge, calls, counts, alarms=len(alarms), paused=paused, engine=engine)),
        budget=forecasts(study, record),
        lanes=_lanes(runs, calls, begin=now - window, now=now),
        running=_live(runs, running),
        queue=queue,
        blocked=_blocked(engine=engine, paused=paused, running=len(running)) if queue else "",
        verdicts=judge.judgements[-LATEST:][::-1] if judge is not None else (),
    )


def _happened(
    record: StudyView,
    judge: Judged | None,
    runs: Sequence[RunRow],
    calls: Sequence[Mapping[str, Any]],
    *,
    since: float,
    now: float,
) -> Happened:
    verdicts: dict[str, int] = {}
    before = judge.base if judge is not None else None
    for one in judge.judgements if judge is not None else ():
        if judge is not None and one.at > since and one.run != judge.base:
            verdicts[one.verdict] = verdicts.get(one.verdict, 0) + 1
        elif one.verdict == "keep" and one.at <= since:
            before = one.run
    champion = judge.champion if judge is not None and judge.champion != before else None
    ended = [run for run in runs if run.ended is not None and run.ended > since and run.role != Role.IMPORTED]
    seconds = sum(
        max(0.0, (run.ended or now) - max(run.started, since)) * run.devices for run in runs if run.started is not None
    )
    usages = [read_usage(call["answer"]["usage"]) for call in calls if call["answer"] and call["answer"]["at"] > since]
    kinds = record.count_events(since, ("alarm", "rejected"))
    return Happened(
        since=since,
        tried=sum(run.role == Role.TRIAL and run.created > since for run in runs),
        ended=len(ended),
        failed=sum(run.status in FAILURES for run in ended),
        verdicts=verdicts,
        champion=champion,
        verdict=judge.of(champion) if judge is not None and champion is not None else None,
        device_hours=seconds / 3600.0,
        usd=sum(usage.usd or 0.0 for usage in usages),
        tokens=sum(usage.tokens for usage in usages),
        calls=len(usages),
        alarms=kinds.get("alarm", 0),
        rejected=kinds.get("rejected", 0),
    )


def _needs(
    study: StudyConfig,
    record: StudyView,
    judge: Judged | None,
    calls: Sequence[Mapping[str, Any]],
    counts: Mapping[str, int],
    *,
    alarms: int,
    paused: bool,
    engine: int | None,
) -> list[Need]:
    found = [Need("alarms", alarms)] if alarms else []
    ended_early = record.failed_because() if engine is None else None
    if ended_early:
        found.append(Need("ended early", text=wording.cut(wording.plain(ended_early), MAX_TEXT)))
    unfinished = counts.get("running", 0) + counts.get("planned", 0)
    if engine is None and unfinished:
        found.append(Need("unfinished", unfinished))
    elif engine is None and record.count_waiting():
        found.append(Need("waiting", record.count_waiting()))
    if paused and engine is not None:
        found.append(Need("paused"))
    if study.objective is None:
        found.append(Need("no objective"))
    else:
        different = len(record.not_comparable())
        found += [Need("not comparable", different)] if different else []
    unusable = unusable_calls(calls)
    if unusable and unusable[-1].call == calls[-1]["call"]:
        found.append(Need("agent", text=wording.cut(unusable[-1].why, MAX_TEXT)))
    if judge is not None and judge.by == "test" and judge.spent + judge.reserved >= _ALMOST * judge.alpha:
        found.append(Need("alpha"))
    if judge is not None and judge.held_out is not None and judge.held_out[0] >= judge.held_out[1]:
        found.append(Need("held out"))
    return found


def forecasts(study: StudyConfig, record: StudyView) -> tuple[BudgetForecast, ...]:
    """Return each budget with the time at which it ends at the pace so far."""
    wall = record.shared_usage().wall

    def left(used: float, limit: float | None) -> float | None:
        return None if limit is None or used <= 0 or wall <= 0 else max(0.0, (limit - used) * wall / used)

    return tuple(
        BudgetForecast(one.name, one.used, one.limit, one.shown, left(one.used, one.limit))
        for one in budget_facts(study, record)
    )


def _lanes(
    runs: Sequence[RunRow], calls: Sequence[Mapping[str, Any]], *, begin: float, now: float
) -> tuple[SlotLane, ...]:
    seen = [run for run in runs if run.started is not None and (run.ended or now) >= begin and run.slot][-MAX_BARS:]
    lanes: dict[str, list[SlotBar]] = {}
    for run in seen:
        lanes.setdefault(run.slot or "", []).append(SlotBar(run.id, run.started or 0.0, run.ended, _kind(run)))
    answered = [(call, (call["answer"] or {}).get("at")) for call in calls]
    asked = [SlotBar(call["call"], call["at"], end, "agent") for call, end in answered if (end or now) >= begin]
    found = [SlotLane(name, tuple(bars)) for name, bars in sorted(lanes.items())]
    return tuple(found) + ((SlotLane("agents", tuple(asked[-MAX_BARS:])),) if asked else ())


def _kind(run: RunRow) -> str:
    if run.verdict:
        return run.verdict
    return "replicate" if run.twin and run.status == "ok" else run.status or run.state


def _live(runs: Sequence[RunRow], running: Sequence[RunRow]) -> tuple[LiveRun, ...]:
    ended = [
        run.seconds for run in runs if run.status == "ok" and run.seconds is not None and run.role != Role.IMPORTED
    ]
    usual = median(ended[-_USUAL:]) if ended else None
    return tuple(LiveRun(run, usual) for run in running)


def _queue(record: StudyView, runs: Sequence[RunRow]) -> tuple[QueuedWork, ...]:
    planned = [
        QueuedWork(run.id, run.proposer, f"{run.role} of {run.twin}" if run.twin else str(run.role), _text(run.reason))
        for run in runs
        if run.state == "planned"
    ]
    waiting = [
        QueuedWork(f"proposal {one.id}", one.proposer, _text("  ".join(one.words)), _text(one.reason))
        for one in record.waiting(MAX_QUEUE)
    ]
    return tuple((planned + waiting)[:MAX_QUEUE])


def _text(words: str) -> str:
    return wording.cut(wording.plain(words), MAX_TEXT)


def _blocked(*, engine: int | None, paused: bool, running: int) -> str:
    if engine is None:
        return "no engine is running"
    if paused:
        return "paused"
    return "all slots are busy" if running else "about to start"


def describe_left(forecast: BudgetForecast) -> str:
    """Return `about 2h07m left`; empty if that is unknown."""
    return "" if forecast.left_s is None else f"about {format_seconds(forecast.left_s)} left"
