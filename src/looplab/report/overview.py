"""A study at a glance: what happened, what is running, what waits and why, what it costs, what needs attention.

The live page and `looplab top` show these facts, and `overview_facts` has them as JSON for both. They come from the
ledger alone, in a few short reads, so they can be collected twice a second; metrics of running runs are added by the
caller, which follows their files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from looplab.agents.log import read_usage
from looplab.config.lab import StudyConfig
from looplab.ledger.roles import Role
from looplab.ledger.view import RunRow, StudyView
from looplab.measure.run_metrics import RunMetrics
from looplab.report import wording
from looplab.report.budget import BudgetFacts, budget_facts
from looplab.report.facts import FAILURES, alarms_of, unusable_calls
from looplab.report.html import short
from looplab.report.judged import Judged, VerdictFacts, judged_now
from looplab.report.language import in_each, t

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
    """Counts of what happened since a given time."""

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
            return t("Nothing has ended.")
        parts = [t("{n} {n|idea|ideas} tried", n=self.tried)]
        parts += [f"{n} {t(_PAST.get(verdict, verdict))}" for verdict, n in self.verdicts.items()]
        parts += [t("{n} {n|run|runs} failed", n=self.failed)] if self.failed else []
        sentences = [", ".join(parts)]
        own = self.verdict
        if self.champion is not None and own is not None and own.effect is not None:
            key = "champion {run} is better than {against} by {effect}"
            sentences.append(t(key, run=self.champion, against=own.against, effect=own.interval))
        elif self.champion is not None:
            sentences.append(t("new champion {run}", run=self.champion))
        costs = [t("{n} device hours", n=f"{self.device_hours:.2g}")] if self.device_hours >= 0.005 else []
        costs += [t("${n} for agents", n=f"{self.usd:.2f}")] if self.usd else []
        sentences += [", ".join(costs)] if costs else []
        return "; ".join(sentences) + t(".")


_PAST = {"keep": "kept", "discard": "discarded", "crash": "crashed"}


NEEDS = {
    "problem": "The ledger cannot be read: {text}",
    "alarms": "{n} {n|alarm|alarms} to check before you trust the results",
    "ended early": "The last engine ended early: {text}",
    "unfinished": "{n} unfinished {n|run|runs}, but no engine is running: looplab resume",
    "waiting": "{n} {n|proposal waits|proposals wait}, but no engine is running: looplab run",
    "paused": "The study is paused",
    "no objective": "The study has no objective: looplab objective METRIC",
    "not comparable": "{n} {n|run was|runs were} measured with another objective: looplab remeasure",
    "agent": "The last agent call failed: {text}",
    "alpha": "Alpha is almost used up: hardly anything can still be promoted",
    "held out": "The held-out metric may no longer be read",
    "nothing yet": "Nothing has run yet: looplab plan shows what would run, looplab run starts it",
}
"""What a person should look at or do, as the page and the terminal say it."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a person should look at or do."""

    kind: str
    """One of `NEEDS`."""
    n: int = 0
    text: str = ""

    @property
    def sentence(self) -> str:
        """What to do about it, with the command."""
        return t(NEEDS[self.kind], n=self.n, text=self.text)


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
    budget: tuple[BudgetFacts, ...]
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
            return t("Nothing has been measured yet")
        value = wording.number(self.best.objective, 4)
        return t(
            "Best so far: {run} with {metric} {value} (one run)", run=self.best.id, metric=self.metric, value=value
        )

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
    since: float,
    window: float = WINDOW_S,
    judge: Judged | None = None,
) -> StudyOverview:
    """Collect the facts.

    Args:
        study: The study.
        record: Its record.
        now: Present time.
        engine: Pid of its engine; None if none runs.
        since: What happened is counted from this time on.
        window: Seconds that the lanes of slots show.
        judge: The state of its judge, if the caller has it already.
    """
    judge = judged_now(study, record) if judge is None else judge
    calls = record.agent_calls()
    alarms = alarms_of(record, judge)
    paused = record.is_paused()
    counts = record.counts()
    queue = _queue(record)
    running = record.runs(state="running")
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
        happened=_happened(record, judge, calls, since=since, now=now),
        alarms=tuple(wording.cut(alarm, MAX_TEXT) for alarm in alarms[-LATEST:]),
        needs=tuple(_needs(study, record, judge, calls, counts, alarms=len(alarms), paused=paused, engine=engine)),
        budget=budget_facts(study, record),
        lanes=_lanes(
            record.runs_since(now - window, MAX_BARS),
            calls,
            begin=now - window,
            over=None if engine is not None else record.last_end() or 0.0,
        ),
        running=_live(record, running),
        queue=queue,
        blocked=_blocked(engine=engine, paused=paused, held=len(running) + counts.get("queued", 0)) if queue else "",
        verdicts=judge.judgements[-LATEST:][::-1] if judge is not None else (),
    )


def _happened(
    record: StudyView,
    judge: Judged | None,
    calls: Sequence[Mapping[str, Any]],
    *,
    since: float,
    now: float,
) -> Happened:
    verdicts: dict[str, int] = {}
    champion = None
    if judge is not None:
        verdicts = dict(Counter(one.verdict for one in judge.challengers if one.at > since))
        kept = [one.run for one in judge.judgements if one.verdict == "keep" and one.at <= since]
        champion = judge.champion if judge.champion != (kept[-1] if kept else judge.base) else None
    counts = record.counts_since(since, now)
    own = [(status, ended) for role, status, _, ended, _ in counts if role != Role.IMPORTED]
    usages = [read_usage(call["answer"]["usage"]) for call in calls if call["answer"] and call["answer"]["at"] > since]
    kinds = record.count_events(since, ("alarm", "rejected"))
    return Happened(
        since=since,
        tried=sum(started for role, _, started, _, _ in counts if role == Role.TRIAL),
        ended=sum(ended for _, ended in own),
        failed=sum(ended for status, ended in own if status in FAILURES),
        verdicts=verdicts,
        champion=champion,
        verdict=judge.of(champion) if judge is not None and champion is not None else None,
        device_hours=sum(seconds for *_, seconds in counts) / 3600.0,
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
    unfinished = sum(counts.get(state, 0) for state in ("planned", "queued", "running"))
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


def _lanes(
    runs: Sequence[RunRow], calls: Sequence[Mapping[str, Any]], *, begin: float, over: float | None
) -> tuple[SlotLane, ...]:
    """Return what ran in each slot after `begin`.

    Args:
        over: When the last run ended, if no engine runs: nothing waits for an unanswered call any more.
    """
    lanes: dict[str, list[SlotBar]] = {}
    for run in runs:
        if run.slot:
            lanes.setdefault(run.slot, []).append(SlotBar(run.id, run.started or 0.0, run.ended, _kind(run)))
    asked = []
    for call in calls:
        unanswered = None if over is None else max(over, call["at"])
        end = call["answer"]["at"] if call["answer"] else unanswered
        if end is None or end >= begin:
            asked.append(SlotBar(call["call"], call["at"], end, "agent"))
    found = [SlotLane(name, tuple(bars)) for name, bars in sorted(lanes.items())]
    return tuple(found) + ((SlotLane("agents", tuple(asked[-MAX_BARS:])),) if asked else ())


def _kind(run: RunRow) -> str:
    if run.verdict:
        return run.verdict
    return "replicate" if run.twin and run.status == "ok" else run.status or run.state


def _live(record: StudyView, running: Sequence[RunRow]) -> tuple[LiveRun, ...]:
    latest = record.runs(status="ok", limit=2 * _USUAL) if running else ()
    seconds = [run.seconds for run in latest if run.seconds is not None and run.role != Role.IMPORTED]
    usual = median(seconds[-_USUAL:]) if seconds else None
    return tuple(LiveRun(run, usual) for run in running)


def _queue(record: StudyView) -> tuple[QueuedWork, ...]:
    planned = [
        QueuedWork(run.id, run.proposer, f"{run.role} of {run.twin}" if run.twin else str(run.role), _text(run.reason))
        for run in record.runs(state="planned")
    ]
    waiting = [
        QueuedWork(f"proposal {one.id}", one.proposer, _text("  ".join(one.words)), _text(one.reason))
        for one in record.waiting(MAX_QUEUE)
    ]
    return tuple((planned + waiting)[:MAX_QUEUE])


def _text(words: str) -> str:
    return wording.cut(wording.plain(words), MAX_TEXT)


def _blocked(*, engine: int | None, paused: bool, held: int) -> str:
    """Return why nothing of the queue starts.

    Args:
        held: Runs that hold a slot: they run, or wait at a scheduler.
    """
    if engine is None:
        return t("no engine is running")
    if paused:
        return t("paused")
    return t("all slots are busy") if held else t("about to start")


# -- as JSON


def overview_facts(
    found: StudyOverview, record: StudyView, metrics_of: Callable[[str], RunMetrics | None]
) -> dict[str, Any]:
    """Return an overview as JSON data.

    Args:
        found: The overview.
        record: The record of the study.
        metrics_of: Returns the metrics of a running run; None: they are not followed.
    """
    evidence, happened, judge = record.verdicts(), found.happened, found.judge
    promotion = happened.verdict
    champions = [one for one in judge.judgements if one.verdict == "keep"] if judge is not None else []
    return {
        "study": found.study,
        "at": found.at,
        "metric": found.metric,
        "goal": found.goal,
        "engine": found.engine,
        "paused": found.paused,
        "counts": found.counts,
        "waiting": found.waiting,
        "headline": found.headline,
        "champion": found.champion_shown,
        "judge": None if judge is None else {
            **judge_facts(judge, record),
            "champions": [{"run": one.run, "at": one.at, "mean": short(one.mean)} for one in champions],
        },
        "happened": {
            **asdict(happened),
            "verdict": None if promotion is None else promotion.verdict,
            "effect": None if promotion is None
            else [promotion.effect, promotion.low, promotion.high, promotion.against],
            "sentence": happened.sentence,
        },
        "alarms": found.alarms,
        "needs": [{**asdict(one), "sentence": one.sentence} for one in found.needs],
        "budget": [asdict(one) for one in found.budget],
        "lanes": [asdict(one) for one in found.lanes],
        "running": [_running(one, metrics_of(one.row.id)) for one in found.running],
        "queue": [asdict(one) for one in found.queue],
        "blocked": found.blocked,
        "verdicts": [verdict_facts(one.run, evidence[one.run]) for one in found.verdicts if one.run in evidence],
    }  # fmt: skip


def judge_facts(judge: Judged, record: StudyView) -> dict[str, Any]:
    """Return the state of the judge without its verdicts."""
    names = ("by", "champion", "base", "mean", "sd", "runs", "sigma", "noise_runs", "noise_points", "floor",
             "counts", "alpha", "spent", "reserved", "held_out")  # fmt: skip
    alphas = {test["run"]: test["alpha"] for test in (record.judge_state() or {}).get("tests", ())}
    return {
        **{name: getattr(judge, name) for name in names},
        "headline": in_each(lambda: judge.headline),
        "gain": None if judge.gain is None else asdict(judge.gain),
        "tests": [{**asdict(one), "alpha": alphas.get(one.run)} for one in judge.tests],
        "alarms": judge.alarms,
    }


def _running(one: LiveRun, metrics: RunMetrics | None) -> dict[str, Any]:
    run = one.row
    return {
        "run": run.id,
        "slot": run.slot,
        "role": str(run.role),
        "twin": run.twin,
        "started": run.started,
        "usual": one.usual_s,
        "step": metrics.step if metrics else None,
        "objective": short(metrics.objective()) if metrics else None,
        "reason": _text(run.reason),
    }


def verdict_facts(run: str, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict with its evidence and its bar."""
    numbers = ("effect", "low", "high", "p", "boundary", "alpha", "sigma", "cost")
    return {
        "run": run,
        "verdict": evidence.get("verdict"),
        "at": evidence.get("at"),
        "against": evidence.get("champion"),
        "n": evidence.get("n", 0),
        "look": evidence.get("look", 0),
        "why": _text(str(evidence.get("why", ""))),
        "flags": [wording.plain(str(flag)) for flag in evidence.get("flags", ())],
        **{name: short(evidence.get(name)) for name in numbers},
    }
