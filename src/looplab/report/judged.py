"""What was decided in a study, as reports and tables tell it: points, verdicts, who proposed what, what was watched.

A point is one config: a challenger's first run with all that repeat it under other seeds. Reports speak of points, so
that replicates do not look like challengers and a mean is not mistaken for one lucky run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from looplab.config.lab import StudyConfig
from looplab.decide.mix import Credit, credit
from looplab.judge import stats
from looplab.judge.judge import LEAST_SPREAD
from looplab.ledger.study import IMPORTED, RunRow, StudyLedger
from looplab.report import wording

CHALLENGERS = ("base", "trial")
"""The roles that stand for themselves; all others repeat one of them."""


@dataclass(frozen=True, slots=True)
class ReplicatedConfig:
    """The runs of one config from one start."""

    run: RunRow
    """The first one, by which it is known."""
    runs: tuple[RunRow, ...]
    """All that count, the first one among them."""
    copies: tuple[RunRow, ...] = ()
    """Reproductions: the same seed once more, so they say nothing about the spread."""

    @property
    def values(self) -> list[float]:
        return [run.objective for run in self.runs if run.objective is not None]

    @property
    def mean(self) -> float | None:
        values = self.values
        return stats.mean(values) if values else None

    @property
    def sd(self) -> float | None:
        """The standard deviation between its runs."""
        values = self.values
        return stats.spread(values) if len(values) > 1 else None

    @property
    def shown(self) -> str:
        return wording.mean(self.mean, self.sd, len(self.values))


def points(rows: Sequence[RunRow]) -> dict[str, ReplicatedConfig]:
    """The points of a study by their first run, in order."""
    leads: dict[str, RunRow] = {}
    owner: dict[tuple[str, str | None], str] = {}
    for row in rows:
        if row.role == IMPORTED:
            leads[row.id] = row  # of another tool: it repeats nothing here, and nothing repeats it
        elif row.role in CHALLENGERS:
            leads[row.id] = row
            owner.setdefault((row.point, row.warm), row.id)
    members: dict[str, list[RunRow]] = {}
    copies: dict[str, list[RunRow]] = {}
    whose: dict[str, str] = {}
    for row in rows:
        if row.id in leads:
            lead = row.id
        elif row.role == "reproduction" and row.twin in whose:
            lead = whose[row.twin]
        else:  # a control, or a replicate whose first run is gone, begins a point of its own
            lead = owner.setdefault((row.point, row.warm), row.id)
        whose[row.id] = lead
        (copies if row.role == "reproduction" and lead != row.id else members).setdefault(lead, []).append(row)
    by_id = {row.id: row for row in rows}
    return {
        lead: ReplicatedConfig(by_id[lead], tuple(members[lead]), tuple(copies.get(lead, ())))
        for lead in sorted(members, key=lambda lead: by_id[lead].n)
    }


# -- verdicts


@dataclass(frozen=True, slots=True)
class VerdictFacts:
    """A verdict with what it rests on. Effects are positive where it was better, whatever the goal."""

    run: str
    verdict: str
    why: str
    against: str | None
    """What it was compared with."""
    effect: float | None
    low: float | None
    """The 95 % interval of the effect."""
    high: float | None
    p: float | None
    """None: there was no test."""
    n: int
    """Pairs, or runs, that the effect rests on."""
    flags: tuple[str, ...]
    mean: float | None
    """Over all its runs, as measured."""
    sd: float | None
    runs: int
    at: float

    @property
    def interval(self) -> str:
        """`0.16 [0.11, 0.21]`"""
        if self.effect is None:
            return wording.NOTHING
        return wording.effect(self.effect, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much the champion is better than the base."""

    effect: float
    low: float
    high: float
    p: float
    n: int
    paired: bool

    @property
    def shown(self) -> str:
        how = f"{self.n} pairs" if self.paired else f"{self.n} runs"
        return f"{wording.effect(self.effect, self.low, self.high)} ({how}, p {wording.number(self.p, 2)})"


@dataclass(frozen=True, slots=True)
class UnderTest:
    """A challenger whose replicates are being run."""

    run: str
    look: int
    """Looks taken so far."""
    runs: int


@dataclass(frozen=True, slots=True)
class Judged:
    by: str
    """test, ratchet or deterministic"""
    base: str | None
    """The run that the base is known by."""
    champion: str | None
    mean: float | None
    """The champion's, over all its runs."""
    sd: float | None
    runs: int
    gain: Gain | None
    """Of the champion against the base; None where it is the base, or where too few runs can be compared."""
    sigma: float | None
    """The noise: the standard deviation between runs that differ only in their seed."""
    noise_runs: int
    noise_points: int
    """On how many runs of how many configs it rests."""
    floor: tuple[int, int]
    """Measured runs of the base, and how many are needed before anything is judged."""
    counts: dict[str, int]
    """Of the challengers' verdicts."""
    judgements: tuple[VerdictFacts, ...]
    """In the order in which they were given; the base's own is among them."""
    tests: tuple[UnderTest, ...]
    alpha: float
    spent: float
    """Of alpha, by tests that were lost."""
    reserved: float
    """Of alpha, by tests that are open."""
    alarms: tuple[str, ...]
    held_out: tuple[int, int] | None
    """How often the held-out metric was asked, and how often it may be; None: the study has none."""
    held_out_said: str | None = None
    """What it said when it was last read."""

    def of(self, run: str | None) -> VerdictFacts | None:
        return next((one for one in self.judgements if one.run == run), None)

    @property
    def challengers(self) -> list[VerdictFacts]:
        return [one for one in self.judgements if one.run != self.base]

    @property
    def headline(self) -> str:
        """The one sentence that a reader may take home."""
        if self.champion is None:
            have, needed = self.floor
            return f"No champion yet: the noise of the base is being measured ({have} of {needed} runs)"
        if self.champion == self.base:
            judged = wording.plural(len(self.challengers), "challenger")
            return f"Nothing has beaten the base yet ({judged} judged)"
        return f"Champion {self.champion} is {self.standing}"

    @property
    def standing(self) -> str:
        """`better than the base by 0.21 [0.18, 0.25] (12 pairs, p 1e-05)`"""
        own = self.of(self.champion)
        if self.champion == self.base:
            return "the base: nothing has beaten it yet"
        if self.by == "ratchet":
            return "the latest improvement, one run against one run; that may be luck"
        if self.by == "deterministic" and own is not None and own.effect is not None:
            return f"better than {own.against} by {wording.number(own.effect, 4)}, and exactly the same when repeated"
        if self.gain is not None:
            return f"better than the base by {self.gain.shown}"
        if own is not None and own.effect is not None:
            p = "" if own.p is None else f", p {wording.number(own.p, 2)}"
            return f"better than {own.against} by {own.interval} ({wording.plural(own.n, 'replicate')}{p})"
        return "the champion"

    @property
    def sentences(self) -> list[str]:
        """How things stand beside the headline, for people."""
        told = []
        own = self.of(self.champion)
        if own is not None and self.champion != self.base:
            told.append(f"Its verdict: {own.why}" + (f" ({'; '.join(own.flags)})" if own.flags else ""))
        if self.sigma is not None and self.by != "deterministic":
            rests = f"standard deviation, from {self.noise_runs} runs of {wording.plural(self.noise_points, 'config')}"
            told.append(
                f"Noise: runs that differ only in their seed vary by {wording.number(self.sigma, 3)} ({rests}). "
                "Less than that is no news from one run."
            )
        elif self.by == "test":
            told.append("Noise: not known yet.")
        if self.counts:
            told.append("Challengers: " + ", ".join(f"{n} {verdict}" for verdict, n in self.counts.items()) + ".")
        for test in self.tests:
            told.append(f"Under test: {test.run}, {wording.plural(test.runs, 'run')} and {test.look} looks so far.")
        if self.by == "test":
            held = f", {wording.number(self.reserved, 2)} held by open tests" if self.reserved else ""
            told.append(f"Chance to promote what is no better: {wording.number(self.alpha, 2)} for the whole study, "
                        f"{wording.number(self.spent, 2)} used{held}.")  # fmt: skip
        if self.held_out is not None:
            told.append(f"The held-out metric was asked {self.held_out[0]} of {self.held_out[1]} times.")
        if self.held_out_said is not None:
            told.append(self.held_out_said)
        return told


def judged(study: StudyConfig, record: StudyLedger, found: Mapping[str, ReplicatedConfig]) -> Judged | None:
    """None where the study has no judge."""
    if study.judge is None or study.objective is None:
        return None
    kept = record.judge_state() or {}
    verdicts = record.verdicts()
    every = found
    found = {run: point for run, point in every.items() if point.run.conditions == kept.get("conditions", "")}
    first = next((point.run.id for point in found.values() if point.run.role == "base"), None)
    bases = [run for run, evidence in verdicts.items() if "base" in evidence.get("flags", ()) and run in found]
    base = bases[0] if bases else first
    judgements = tuple(_judgement(run, evidence, every.get(run)) for run, evidence in verdicts.items())
    groups = [values for point in found.values() if len(values := point.values) > 1]
    noise = stats.pooled_spread(groups)
    counts: dict[str, int] = {}
    for one in judgements:
        if one.run != base:
            counts[one.verdict] = counts.get(one.verdict, 0) + 1
    champion, ground = found.get(kept.get("champion") or ""), found.get(base or "")
    sigma = noise[0] if noise else None
    rule = study.judge_rule or "test"
    floor = {"test": study.judge.baseline_seeds, "deterministic": 2, "ratchet": 1}[rule]
    return Judged(
        by=rule,
        base=base,
        champion=champion.run.id if champion else None,
        mean=champion.mean if champion else None,
        sd=champion.sd if champion else None,
        runs=len(champion.values) if champion else 0,
        gain=_gain(study.objective.goal, verdicts, ground, champion, sigma or 0.0),
        sigma=sigma,
        noise_runs=sum(map(len, groups)),
        noise_points=len(groups),
        floor=(len(ground.values) if ground else 0, floor),
        counts=counts,
        judgements=judgements,
        tests=tuple(
            UnderTest(test["run"], test["look"], len(found[test["run"]].values))
            for test in kept.get("tests", ())
            if test["run"] in found
        ),
        alpha=study.judge.alpha,
        spent=float(kept.get("spent", 0.0)),
        reserved=math.fsum(test["alpha"] for test in kept.get("tests", ())),
        alarms=tuple(wording.plain(alarm) for alarm in kept.get("alarms", ())),
        held_out=(record.asked_held_out(), study.holdout.budget) if study.holdout else None,
        held_out_said=record.said_held_out() if study.holdout else None,
    )


def judged_now(study: StudyConfig, record: StudyLedger) -> Judged | None:
    """As `judged`, of the runs as they stand in the ledger."""
    return judged(study, record, points(record.runs())) if study.judge else None


def _judgement(run: str, evidence: Mapping[str, Any], point: ReplicatedConfig | None) -> VerdictFacts:
    return VerdictFacts(
        run=run,
        verdict=evidence["verdict"],
        why=wording.plain(evidence.get("why", "")),
        against=evidence.get("champion"),
        effect=evidence.get("effect"),
        low=evidence.get("low"),
        high=evidence.get("high"),
        p=evidence.get("p"),
        n=evidence.get("n", 0),
        flags=tuple(flag for flag in evidence.get("flags", ()) if flag != "base"),
        mean=point.mean if point else None,
        sd=point.sd if point else None,
        runs=len(point.values) if point else 0,
        at=evidence.get("at", 0.0),
    )


def _gain(
    goal: str,
    verdicts: Mapping[str, Mapping[str, Any]],
    base: ReplicatedConfig | None,
    champion: ReplicatedConfig | None,
    sigma: float,
) -> Gain | None:
    """The judge compares a challenger with the champion of its time; this is the champion of now against the base."""
    if champion is None or base is None or champion.run.id == base.run.id:
        return None
    evidence = verdicts.get(champion.run.id, {})
    seeded = base.run.seed is not None
    if evidence.get("champion") == base.run.id and evidence.get("p") is not None:
        return Gain(evidence["effect"], evidence["low"], evidence["high"], evidence["p"], evidence["n"], seeded)
    if champion.run.warm != base.run.warm:  # it had more training than the base: no fair comparison
        return None
    sign = 1.0 if goal == "max" else -1.0
    # A first run was selected for being good, so it does not count.
    left_out = {champion.run.seed, base.run.seed}
    ours, theirs = ({run.seed: sign * run.objective for run in point.runs if run.objective is not None}
                    for point in (champion, base))  # fmt: skip
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs and seed not in left_out]
    if seeded and len(pairs) > 1:
        compared = stats.paired(pairs, LEAST_SPREAD * math.sqrt(2.0) * sigma)
    else:
        mine = [sign * run.objective for run in champion.runs[1:] if run.objective is not None]
        other = [sign * value for value in base.values]
        if len(mine) < 2 or len(other) < 2:
            return None
        compared = stats.welch(mine, other, LEAST_SPREAD * sigma)
    return Gain(compared.effect, *compared.interval(), compared.p(), compared.n, seeded and len(pairs) > 1)


# -- who proposed what


@dataclass(frozen=True, slots=True)
class MixFacts:
    """What each proposer has achieved, and how the mix trusted it over time."""

    credit: dict[str, Credit]
    weights: tuple[tuple[int, dict[str, float]], ...]
    """(proposals of the mix before, the share of each proposer); empty where the study has no mix."""


def mix_facts(record: StudyLedger, rows: Sequence[RunRow]) -> MixFacts | None:
    """None where nobody has proposed anything yet."""
    weights: list[tuple[int, dict[str, float]]] = []
    made = 0
    for event in _events(record, "mix"):
        weights.append((made, event.get("weights", {})))
        made += sum(event.get("chosen", {}).values())
    if weights and made > weights[-1][0]:
        weights.append((made, weights[-1][1]))
    repeats = {row.proposer for row in rows if row.role == "reproduction"}
    sql = "SELECT DISTINCT proposer FROM proposals WHERE study=? ORDER BY proposer"
    names = [row[0] for row in record.ledger.rows(sql, (record.name,)) if row[0] not in repeats]
    return MixFacts(credit(record, names), tuple(weights)) if names else None


# -- what was watched, what was reproduced


@dataclass(frozen=True, slots=True)
class Watched:
    """What a watch rule saw in a run."""

    run: str
    rule: str
    text: str
    stops: bool


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A run that was repeated exactly."""

    run: str
    again: str
    same: bool
    why: str


def watched(record: StudyLedger) -> tuple[Watched, ...]:
    return tuple(
        Watched(event["run"], wording.plain(event.get("rule", "")), wording.plain(event.get("text", "")),
                bool(event.get("stops")))
        for event in _events(record, "watched")
    )  # fmt: skip


def reproduced(record: StudyLedger) -> tuple[Reproduced, ...]:
    return tuple(
        Reproduced(event["run"], event.get("again", ""), bool(event.get("same")), wording.plain(event.get("why", "")))
        for event in _events(record, "reproduced")
    )


def _events(record: StudyLedger, kind: str) -> list[dict[str, Any]]:
    sql = "SELECT run, data FROM events WHERE study=? AND kind=? ORDER BY seq"
    return [{**orjson.loads(row["data"]), "run": row["run"]} for row in record.ledger.rows(sql, (record.name, kind))]
